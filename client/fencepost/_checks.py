"""Is a topic's check on? Asked before anything is sent, since without it an expectation would be silently ignored."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fencepost.errors import CheckIsOff
from fencepost.records import CHECK_CONFIG, MAX_MESSAGE_BYTES_CONFIG

_ON = frozenset({"true", "required"})


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """What was found out about a topic whose check is on. `max_message_bytes`: of a batch, as the broker limits it;
    `required`: every write has to expect an offset, and transactions are refused."""

    max_message_bytes: int | None
    required: bool = False


class CheckCache:
    """Topics known to be checked. Each is asked about again after `ttl_seconds`; one that is off, at every send.

    No I/O: `get` says what is known, the adapter asks DescribeConfigs where it is None, `learn` takes the answer.
    """

    def __init__(
        self, ttl_seconds: float, clock: Callable[[], float] = time.monotonic, config: str = CHECK_CONFIG
    ) -> None:
        self.config = config
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._known: dict[str, tuple[float, TopicFacts]] = {}

    def get(self, topic: str) -> TopicFacts | None:
        known = self._known.get(topic)
        if known is None or self._clock() >= known[0]:
            return None
        return known[1]

    def learn(self, topic: str, configs: Mapping[str, str | None]) -> TopicFacts:
        """Raises CheckIsOff, saying which of the reasons it is, unless `configs` switch the check on."""
        self._known.pop(topic, None)
        value = configs.get(self.config)
        if value not in _ON:
            if value is not None:
                found = f"{self.config}={value}"
            elif configs:
                found = f"no {self.config}, so these servers are not a Fencepost proxy"
            else:
                found = (
                    "its configs cannot be seen (no such topic, or just created, or no right to DescribeConfigs on it)"
                )
            raise CheckIsOff(topic, found, self.config)
        limit = configs.get(MAX_MESSAGE_BYTES_CONFIG)
        facts = TopicFacts(int(limit) if limit else None, value == "required")
        self._known[topic] = (self._clock() + self._ttl_seconds, facts)
        return facts
