"""What metadata shows of topics, and when it has to be refreshed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol
from uuid import UUID

from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.errors import Error
from fencepost_proxy.expansion.counts import Counts
from fencepost_proxy.native_view import NativeView
from fencepost_proxy.services.missing_rights import MissingRights
from fencepost_proxy.topics.state import SetConfigs
from fencepost_proxy.types import TopicPartition

#: A topic whose id differs from the state topic's is looked up this often, until no broker's metadata can be stale.
_LOOK_UP_SECONDS = 0.1
_VERIFY_SECONDS = 10.0
#: Pause between two metadata requests that clients cause, and topics whose last such request is remembered.
_REFRESH_PAUSE_SECONDS = 0.05
_LOOKED_UP_MAX = 10_000
#: Brokers learn of a new topic one by one: a missing topic counts as absent only after this time.
_NEW_TOPIC_SECONDS = 0.3


class TopicObserver(Protocol):
    def replaced(self, topic: str) -> None:
        """Its id has changed, or it was deleted."""

    def verified(self) -> None:
        """After `verify`."""

    def refreshed(self, now: float) -> None:
        """After `refresh`."""


class TopicLookups(NativeView, remembered=("_unverified",)):
    """`observer` – set before the first lookup. `timeout_seconds` – of a request that clients cause."""

    observer: TopicObserver

    def __init__(
        self,
        kafka: KafkaClient,
        counts: Counts,
        spawn: Spawn,
        rights: MissingRights,
        *,
        timeout_seconds: float,
    ) -> None:
        self._rights = rights
        self._kafka = kafka
        self._counts = counts
        self._spawn = spawn
        self._timeout_seconds = timeout_seconds
        self._unverified: frozenset[str] = frozenset()  # topics whose known ids may be those of deleted topics
        self._refreshing = False
        self._stale: dict[str, None] = {}  # topics whose metadata to refresh
        self._looked_up: dict[str, float] = {}  # when the last answered metadata request for each was sent

    def topic_id(self, topic: str) -> UUID | None:
        info = self._kafka.topic(topic)
        return None if info is None or topic in self._unverified else info.topic_id

    def metadata_error(self, partition: TopicPartition, queried_since: float) -> Error | None:
        """NONE: it exists. None: metadata does not show it, and was not refreshed since then."""
        topic = self._kafka.topic(partition.topic)
        if topic is not None and partition.partition in topic.partitions:
            return Error.NONE
        if topic is None:
            queried_since += _NEW_TOPIC_SECONDS
        if self._looked_up.get(partition.topic, float("-inf")) < queried_since:
            return None
        return Error.TOPIC_AUTHORIZATION_FAILED if self.denied(partition.topic) else Error.UNKNOWN_TOPIC_OR_PARTITION

    def denied(self, topic: str) -> bool:
        """Whether the proxy's user may not DESCRIBE the topic, as last reported."""
        return topic in self._kafka.metadata.denied

    # ---- ids

    def verify(self, topics: Iterable[str], configs: Mapping[str, SetConfigs]) -> None:
        """The state topic may name a newer topic id than this process has from metadata: the topic was deleted and
        created again through another instance. Until metadata is refreshed, the state topic applies.
        """
        for topic in topics:
            reported, known = configs.get(topic), self.topic_id(topic)
            if reported is not None and known is not None and known != reported.topic_id:
                self._unverified |= {topic}
                self._spawn(self._look_up_again(topic, configs), f"look up {topic}")

    async def _look_up_again(self, topic: str, configs: Mapping[str, SetConfigs]) -> None:
        """A broker's metadata may be stale, too. If it persists, the topic was replaced directly at Kafka."""
        believed_from = time.monotonic() + _VERIFY_SECONDS
        while True:
            with suppress(UpstreamUnavailable):
                await self._kafka.refresh_metadata([topic])
                info, reported = self._kafka.topic(topic), configs.get(topic)
                as_reported = info is None or reported is None or info.topic_id == reported.topic_id
                if as_reported or time.monotonic() >= believed_from:
                    break
            await asyncio.sleep(_LOOK_UP_SECONDS)
        self._unverified -= {topic}
        self.observer.replaced(topic)
        self.observer.verified()

    # ---- refreshing

    def refresh(self, topic: str) -> None:
        self._stale[topic] = None
        if not self._refreshing:
            self._refreshing = True
            self._spawn(self._refresh_stale(), "refresh metadata")

    async def _refresh_stale(self) -> None:
        """Batches requests and pauses between them, because clients can make topics stale at will."""
        try:
            while self._stale:
                topics, self._stale = self._stale, {}
                await self._refresh(list(topics))
                await asyncio.sleep(_REFRESH_PAUSE_SECONDS)
        finally:
            self._refreshing = False

    async def _refresh(self, topics: Sequence[str]) -> None:
        before, queried_at = {topic: self.topic_id(topic) for topic in topics}, time.monotonic()
        try:
            await self._kafka.refresh_metadata(topics, timeout_seconds=self._timeout_seconds)
        except UpstreamUnavailable:
            return  # housekeeping retries
        if denied := [topic for topic in topics if self.denied(topic)]:
            await self._rights.look_up(denied)
        now = time.monotonic()
        if len(self._looked_up) > _LOOKED_UP_MAX:
            self._looked_up.clear()
        for topic in topics:
            if self.topic_id(topic) != before[topic]:
                self.observer.replaced(topic)
            self._counts.confirm(topic, queried_at, now)
            self._looked_up[topic] = queried_at
        self.observer.refreshed(now)
