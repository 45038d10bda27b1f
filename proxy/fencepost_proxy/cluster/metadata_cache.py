"""The cluster's metadata as last reported: Metadata v10–13, to any broker.

Tries each broker once, then fails. Responses from another cluster than the first are rejected. Of a response, only the
topics are decoded that are not byte-identical to those of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cluster import hints
from fencepost_proxy.cluster.broker import UpstreamUnavailable, deadline_in
from fencepost_proxy.cluster.metadata import (
    EMPTY,
    NO_NODE,
    ClusterMetadata,
    Leader,
    ReadBefore,
    TopicInfo,
    from_topic_list,
    merged,
)
from fencepost_proxy.cluster.pool import ConnectionPool
from fencepost_proxy.cluster.tasks import SharedCall, Tasks
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.native_view import NativeView
from fencepost_proxy.types import NO_TOPIC_ID, Address, Bounded, NodeId, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.spliced import TopicList

_log = logs.get("cluster.metadata_cache")
_limited_log = logs.RateLimitedLog(_log)
_MARGIN_SECONDS: Final = 0.5

#: Maximum sets of topics whose last Metadata response is remembered (all known topics, the checked topics).
_QUERIES_REMEMBERED: Final = 8
_DENIED_REMEMBERED: Final = 10_000


class _Reported:
    """Digests of the last Metadata responses, the metadata after each was adopted, and the topics in it.

    A cluster rarely changes between refreshes, and then few topics. With ten thousand partitions, decoding took most of
    an idle proxy's CPU time; after a change, it kept the event loop from everything else for 0.2 s.
    """

    #: Replaces a response that adds nothing to what is known.
    NOTHING_NEW: Final = Message()

    def __init__(self) -> None:
        self._answers: Bounded[object, tuple[bytes, ClusterMetadata, ReadBefore]] = Bounded(_QUERIES_REMEMBERED)
        self._digest = b""
        self._read: ReadBefore = {}

    def lookup(self, version: int, topics: frozenset[str] | None, known: ClusterMetadata, body: memoryview) -> Message:
        """`NOTHING_NEW` if the same query had the same response before, and metadata has not changed since.

        Else `news`, and Kafka's `error_code`.
        """
        self._digest = blake2b(body, digest_size=16).digest()
        digest, adopted, read_before = self._answers.get((version, topics), (b"", EMPTY, {}))
        if digest == self._digest and adopted is known:
            return self.NOTHING_NEW
        listed = TopicList(apis.METADATA, version, bytes(body), has_header=False)
        news, self._read = from_topic_list(listed, read_before)
        return Message(news=news, error_code=listed.after.error_code)

    def adopted(self, version: int, topics: frozenset[str] | None, metadata: ClusterMetadata) -> None:
        """Records that `metadata` includes the response last passed to `lookup`."""
        self._answers[version, topics] = self._digest, metadata, self._read


class MetadataCache(NativeView, remembered=("known",)):
    """`on_brokers` is called with all brokers' addresses when one was added, moved or removed."""

    def __init__(
        self,
        pool: ConnectionPool,
        limits: Limits,
        tasks: Tasks,
        on_brokers: Callable[[Mapping[NodeId, Address]], None] | None,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._tasks = tasks
        self._on_brokers = on_brokers
        self.known = EMPTY
        #: Topics that the proxy's user may not DESCRIBE, as last reported.
        self.denied: Bounded[str, None] = Bounded(_DENIED_REMEMBERED)
        self._reported = _Reported()
        #: Topics for the next request; None: all.
        self._requested: set[str] | None = set()
        self._refreshes = SharedCall(tasks, "metadata", self._refresh)

    def topic(self, name: str) -> TopicInfo | None:
        """The topic's metadata as last reported; None if it was never requested or does not exist."""
        return self.known.topics.get(name)

    def leader(self, tp: TopicPartition) -> Leader | None:
        """The leader as last reported; None if there is none or the topic's metadata was never requested."""
        info = self.topic(tp.topic)
        partition = info.partitions.get(tp.partition) if info is not None else None
        return None if partition is None or partition.leader.node_id == NO_NODE else partition.leader

    async def refresh(self, topics: Iterable[str] | None, *, timeout_seconds: float | None = None) -> ClusterMetadata:
        """Sends a Metadata request for the brokers and these topics (None: all topics). Never creates a topic.

        Returns the metadata of all topics requested so far, without those that do not exist. The request is sent
        after this call; concurrent calls share one.
        """
        seconds = self._limits.request_timeout_seconds if timeout_seconds is None else timeout_seconds
        if topics is None:
            self._requested = None
        elif self._requested is not None:
            self._requested.update(topics)
        try:
            return await self._refreshes.result(seconds)
        except TimeoutError:
            raise UpstreamUnavailable(
                "no broker answered Metadata in time: check that upstream is a Kafka listener for clients",
                hint=hints.SLOW,
            ) from None

    def refresh_seconds(self, brokers: int) -> float:
        """How long a refresh takes if none of so many brokers responds."""
        return brokers * (self._limits.connect_timeout_seconds + _MARGIN_SECONDS) + _MARGIN_SECONDS

    async def refresh_quietly(self, topics: Iterable[str]) -> None:
        try:
            await self.refresh(topics)
        except UpstreamUnavailable as e:
            _limited_log.warning("metadata", "metadata cannot be refreshed", reason=e)

    async def _refresh(self) -> ClusterMetadata:
        requested, self._requested = self._requested, set()
        names = None if requested is None else [Message(name=name, topic_id=NO_TOPIC_ID) for name in sorted(requested)]
        message = Message(topics=names, allow_auto_topic_creation=False)
        last = UpstreamUnavailable("no broker is known")
        for pooled in self._pool.to_any():
            # Short enough to try the other brokers if one hangs. The attempt to connect ends before, with its reason.
            deadline = deadline_in(self._limits.connect_timeout_seconds + _MARGIN_SECONDS)
            try:
                connection = await pooled.connected(deadline)
                version = connection.version(apis.METADATA, at_least=10, at_most=13)
                topics = None if requested is None else frozenset(requested)
                known = partial(self._reported.lookup, version, topics, self.known)
                answer = await connection.request(apis.METADATA, version, message, known, deadline=deadline)
                if answer is _Reported.NOTHING_NEW:
                    return self.known
                if answer.error_code:
                    raise UpstreamUnavailable(f"{pooled.address}: Metadata returned {error_name(answer.error_code)}")
                metadata = self.adopt(answer.news, all_topics=requested is None)
                self._reported.adopted(version, topics, metadata)
                return metadata
            except UpstreamUnavailable as e:
                last = e
        raise UpstreamUnavailable(f"no broker returned metadata; last error: {last}", hint=last.hint)

    def adopt(self, news: ClusterMetadata, *, all_topics: bool) -> ClusterMetadata:
        known = self.known
        if known.cluster_id is not None and news.cluster_id != known.cluster_id:
            _limited_log.error(
                "cluster id",
                "upstream is now a different cluster and is not used: if that is intended, restart the proxy",
                was=known.cluster_id,
                now=news.cluster_id,
            )
            raise UpstreamUnavailable(
                f"upstream is cluster {news.cluster_id} now, this proxy serves {known.cluster_id}"
            )
        for name in (*news.topics, *news.missing):
            self.denied.pop(name, None)
            if news.missing.get(name) == Error.TOPIC_AUTHORIZATION_FAILED:
                self.denied[name] = None
        self.known = merged(known, news, all_topics=all_topics)
        if news.brokers != known.brokers:
            for moved in self._pool.use(news.brokers):
                self._tasks.run(moved.close(), "close a connection")
            if self._on_brokers is not None:
                self._on_brokers(news.brokers)
        return self.known
