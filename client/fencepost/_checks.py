"""Cache of checked topics. A topic is looked up before the first send: an unchecked topic ignores expectations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fencepost.errors import CheckIsOffError
from fencepost.records import CHECK_CONFIG, MAX_MESSAGE_BYTES_CONFIG

_ON = frozenset({"true", "required"})
_OFF = frozenset({None, "", "false", "off", "-1", "0"})
_NO_OTHER_CHECK = frozenset(
    {
        CHECK_CONFIG,
        "fencepost.partitioner",
        "fencepost.expected.offsets.source",
        "fencepost.ordered.partition.expansion",
        "fencepost.ordered.partition.expansions",
    }
)


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """Configs of a checked topic. `max_message_bytes`: the broker's limit for a batch, None if not visible.
    `required`: every append must state an expected offset, and transactions are refused. `cluster_id`: of Kafka."""

    max_message_bytes: int | None
    required: bool = False
    cluster_id: str | None = None


def check_is_off(topic: str, configs: Mapping[str, str | None], config: str) -> CheckIsOffError:
    if not configs:
        found = "its configs are not visible (topic missing or just created, or no DescribeConfigs permission)"
    elif configs.get(config) is None:
        found = f"no {config}, so these servers are not a Fencepost proxy"
    else:
        found = f"{config}={configs[config]}"
    return CheckIsOffError(topic, found, config)


class CheckCache:
    """Checked topics. An entry expires after `ttl_seconds`. A topic whose check is off is not cached.

    No I/O: if `get` returns None, the adapter calls DescribeConfigs and passes the result to `learn`.
    """

    def __init__(
        self, ttl_seconds: float, clock: Callable[[], float] = time.monotonic, config: str = CHECK_CONFIG
    ) -> None:
        self.config = config
        #: Set before `learn`.
        self.cluster_id: str | None = None
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._known: dict[str, tuple[float, TopicFacts]] = {}
        self._others: dict[str, Sequence[str]] = {}

    def get(self, topic: str) -> TopicFacts | None:
        known = self._known.get(topic)
        if known is None or self._clock() >= known[0]:
            return None
        return known[1]

    def others(self, topic: str) -> Sequence[str]:
        """The topic's other checks, as `config=value`, when it was last looked up."""
        return self._others.get(topic, ())

    def learn(self, topic: str, configs: Mapping[str, str | None]) -> TopicFacts:
        """Store the topic's facts. Raises CheckIsOffError with the reason if `configs` do not switch the check on."""
        self._known.pop(topic, None)
        self._others[topic] = [
            f"{name}={other}"
            for name, other in configs.items()
            if name.startswith("fencepost.") and name not in _NO_OTHER_CHECK and other not in _OFF
        ]
        value = configs.get(self.config)
        if value not in _ON:
            raise check_is_off(topic, configs, self.config)
        limit = configs.get(MAX_MESSAGE_BYTES_CONFIG)
        facts = TopicFacts(int(limit) if limit else None, value == "required", self.cluster_id)
        self._known[topic] = (self._clock() + self._ttl_seconds, facts)
        return facts


class BlockingChecks:
    """Checked topics, read through its own admin client. Thread-safe."""

    def __init__(
        self,
        cache: CheckCache,
        open_admin: Callable[[], Any],
        describe: Callable[[Any, str], dict[str, str | None]],
        cluster_id_of: Callable[[Any, str], str | None],
        close_admin: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self._cache = cache
        self._cluster_id_of = cluster_id_of
        self._open_admin = open_admin
        self._describe = describe
        self._close_admin = close_admin
        self._admin: Any = None
        self._lock = threading.Lock()

    def require(self, topic: str) -> TopicFacts:
        """The facts of a checked topic. Raises CheckIsOffError, or the client library's error if the configs cannot be
        read."""
        with self._lock:
            facts = self._cache.get(topic)
            if facts is not None:
                return facts
            if self._admin is None:
                self._admin = self._open_admin()
            configs = self._describe(self._admin, topic)
            if self._cache.cluster_id is None:
                self._cache.cluster_id = self._cluster_id_of(self._admin, topic)
            return self._cache.learn(topic, configs)

    def others(self, topic: str) -> Sequence[str]:
        """The topic's other checks: see `CheckCache.others`."""
        return self._cache.others(topic)

    def close(self) -> None:
        with self._lock:
            if self._admin is not None:
                self._close_admin(self._admin)
            self._admin = None
