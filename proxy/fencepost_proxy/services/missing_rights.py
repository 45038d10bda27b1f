"""Checked topics on which the proxy's own user lacks an operation: for the log, the status page and admins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cluster.authorized import CHECKED, REQUIRED, allow_command, missing_operations, principal_of
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import Error
from fencepost_proxy.observability.status import Problem
from fencepost_proxy.types import Bounded

_log = logs.get("services.missing_rights")

_TOPICS_MAX: Final = 1_000
_QUERY_SECONDS: Final = 5.0
#: Topics in one command and in one message.
_NAMED_MAX: Final = 5


class MissingRights:
    def __init__(self, kafka: KafkaClient, config: ProxyConfig) -> None:
        self._kafka = kafka
        self._config = config
        self._topics: Bounded[str, tuple[str, ...]] = Bounded(_TOPICS_MAX)

    async def require(self, topics: Mapping[str, Sequence[str]]) -> None:
        """Topic → operations. Raises `UpstreamUnavailable`: with code 29 and the command that helps if one is missing,
        without a code if that is not known."""
        if not topics:
            return
        lacking = await missing_operations(self._kafka, topics, timeout_seconds=_QUERY_SECONDS)
        if lacking:
            text, todo = self._stated(lacking)
            raise UpstreamUnavailable(f"{text} ({todo})", error_code=Error.TOPIC_AUTHORIZATION_FAILED, hint=todo)

    async def look_up(self, topics: Iterable[str]) -> None:
        """Kafka denied something on these topics: what is missing. Logs each topic once, until its rights are back."""
        queried = sorted(set(topics))
        try:
            lacking = await missing_operations(
                self._kafka, dict.fromkeys(queried, REQUIRED), timeout_seconds=_QUERY_SECONDS
            )
        except UpstreamUnavailable:
            return  # the next one looks it up again
        new = {topic: operations for topic, operations in lacking.items() if topic not in self._topics}
        for topic in queried:
            self._topics.pop(topic, None)
        self._topics.update(lacking)
        if new:
            text, todo = self._stated(new)
            _log.error("appends to checked topics are refused: rights of the proxy are missing", reason=text, do=todo)

    async def look_up_again(self) -> None:
        if self._topics:
            await self.look_up(list(self._topics))

    def problems(self) -> Iterator[Problem]:
        if self._topics:
            text, todo = self._stated(self._topics)
            yield Problem(True, f"Appends to checked topics are refused: {text}", f"Run {todo}")

    def _stated(self, lacking: Mapping[str, Sequence[str]]) -> tuple[str, str]:
        """What is missing, and the command that adds it."""
        names = sorted(lacking)
        operations = [each for each in (*CHECKED, "ALTER") if any(each in lacking[name] for name in names)]
        more = f" and {len(names) - _NAMED_MAX} more topics" if len(names) > _NAMED_MAX else ""
        text = f"{principal_of(self._config)}, the proxy's user, may not {' and '.join(operations)} "
        text += f"{', '.join(names[:_NAMED_MAX])}{more}"
        resource = " ".join(f"--topic {name}" for name in names[:_NAMED_MAX])
        return text, allow_command(self._config, dict.fromkeys((*CHECKED, *operations)), resource)
