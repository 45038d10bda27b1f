"""The control client: the proxy's requests to Kafka, on separate connections.

It opens up to four connections per broker, each when first needed: for queries; for appends, because an append that
waits for replicas blocks its connection; for continuous polling; and for leader checks, on which leases depend. It
needs READ, WRITE and DESCRIBE on checked topics and the state topic, CREATE for the latter, IDEMPOTENT_WRITE (or
WRITE on any topic), DESCRIBE_CONFIGS on topics and the cluster, and DESCRIBE on the consumer groups of topics with
ordered partition expansion.

A query to a partition leader carries the known leader epoch if the API has a field for it. It is repeated after a
metadata refresh if the broker is not the leader of that epoch, until the caller's time limit. Appends are sent once:
the caller resolves failures.

Every coroutine raises UpstreamUnavailable when it runs out of time. Its `error_code` is set if retrying cannot help:
3 no such topic or partition, 29 or 31 not authorized, 35 the broker lacks the API version.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from hashlib import blake2b
from typing import Any, Final, TypeVar
from uuid import UUID

from fencepost_proxy import logs
from fencepost_proxy.cluster import metadata as cluster
from fencepost_proxy.cluster.broker import (
    PLAINTEXT,
    Access,
    BrokerConnection,
    Call,
    OutcomeUnknown,
    PooledConnection,
    UpstreamUnavailable,
    deadline_in,
    remaining,
)
from fencepost_proxy.cluster.metadata import NO_NODE, ClusterMetadata, Leader, PartitionInfo, TopicInfo
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error
from fencepost_proxy.types import (
    NO_TOPIC_ID,
    Address,
    LeaderEpoch,
    LogEndOffset,
    Monotonic,
    NodeId,
    Offset,
    ProducerEpoch,
    ProducerId,
    TopicPartition,
)
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.batch import MalformedBatch, parse_batch_header
from fencepost_proxy.wire.produce import PartitionResult
from fencepost_proxy.wire.schema import Message

__all__ = [
    "BatchRead",
    "BrokerFacts",
    "ClusterMetadata",
    "CompactedAway",
    "ControlClient",
    "Found",
    "Leader",
    "LogEnd",
    "NotYet",
    "OutOfRange",
    "OutcomeUnknown",
    "PartitionEnd",
    "PartitionInfo",
    "PartitionReading",
    "ProducerState",
    "TopicFacts",
    "TopicInfo",
    "TransactionState",
    "UpstreamUnavailable",
]

_log = logs.get("cluster.client")
_limited_log = logs.RateLimitedLog(_log)
_T = TypeVar("_T")

_CLIENT_ID: Final = "fencepost"
_EARLIEST: Final = -2
_LATEST: Final = -1
_BATCH_PREFIX_BYTES: Final = 12  # base offset and length, before what the length counts
_FROM_A_CONSUMER: Final = -1  # replica id
_READ_UNCOMMITTED: Final = 0
_READ_COMMITTED: Final = 1
_NO_SESSION_EPOCH: Final = -1
_TOPIC_RESOURCE: Final = 2
_BROKER_RESOURCE: Final = 4
_GROUP_COORDINATOR: Final = 0
_TRANSACTION_COORDINATOR: Final = 1
#: Consecutive metadata responses without a topic before it counts as missing: brokers learn of new topics one by one.
_MISSING_TOPIC_TRIES: Final = 4
#: If a replica does not report the leader in this time, the other replicas are queried too.
_ONE_MORE_SECONDS: Final = 0.2
#: Maximum sets of topics whose last Metadata response is remembered (all known topics, the checked topics).
_QUERIES_REMEMBERED: Final = 8

#: Error codes that a retry or a metadata refresh may resolve.
_RETRIABLE: Final = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.LEADER_NOT_AVAILABLE,
        Error.NOT_LEADER_OR_FOLLOWER,
        Error.REQUEST_TIMED_OUT,
        Error.KAFKA_STORAGE_ERROR,
        Error.FENCED_LEADER_EPOCH,
        Error.UNKNOWN_LEADER_EPOCH,
        Error.UNKNOWN_TOPIC_ID,
        Error.INCONSISTENT_TOPIC_ID,
        9,  # REPLICA_NOT_AVAILABLE
        14,  # COORDINATOR_LOAD_IN_PROGRESS
        Error.COORDINATOR_NOT_AVAILABLE,
        16,  # NOT_COORDINATOR
        41,  # NOT_CONTROLLER
        78,  # OFFSET_NOT_AVAILABLE: the new leader does not know its high watermark yet
        89,  # THROTTLING_QUOTA_EXCEEDED
    }
)


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The log end of a partition, as reported by the leader of that epoch."""

    leader_epoch: LeaderEpoch
    offset: LogEndOffset
    node_id: NodeId


@dataclass(frozen=True, slots=True)
class PartitionEnd:
    """Log end and high watermark of a partition from one read, by the leader of one epoch."""

    log_end: LogEnd
    high_watermark: Offset


@dataclass(frozen=True, slots=True)
class ProducerState:
    """What a partition's leader remembers of one producer.

    `last_sequence` is -1 before its first sequence of this epoch. `last_timestamp_ms`: the highest record timestamp
    of its last batch, by which Kafka expires it. `current_txn_start_offset`: None without an open transaction here.
    """

    producer_id: ProducerId
    epoch: ProducerEpoch
    last_sequence: int
    last_timestamp_ms: int
    current_txn_start_offset: Offset | None


@dataclass(frozen=True, slots=True)
class TransactionState:
    """`state` – Kafka's name for it. `partitions` – those of the transaction whose markers are not yet written."""

    state: str
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class PartitionReading:
    """A snapshot of the end of a partition, read from the leader of `log_end.leader_epoch`.

    `consistent` – the log end was the same before and after the producers were read, so they belong together.
    `requested_at` – when the read began: it includes everything acknowledged before.
    """

    log_end: LogEnd
    log_start_offset: Offset
    producers: Mapping[ProducerId, ProducerState]
    consistent: bool
    requested_at: Monotonic

    @property
    def open_transactions(self) -> Mapping[ProducerId, ProducerState]:
        return {key: each for key, each in self.producers.items() if each.current_txn_start_offset is not None}


@dataclass(frozen=True, slots=True)
class Found:
    """The complete batch whose offset range contains the requested offset."""

    batch: bytes


@dataclass(frozen=True, slots=True)
class NotYet:
    """The offset is at or above the high watermark.

    An unreplicated batch may still be there: compare with `log_end`.
    """

    high_watermark: Offset


@dataclass(frozen=True, slots=True)
class OutOfRange:
    """The offset is below the log start: retention or DeleteRecords removed the records."""

    log_start_offset: Offset


@dataclass(frozen=True, slots=True)
class CompactedAway:
    """Compaction removed the records at this offset; the next batch begins at `next_base_offset`."""

    next_base_offset: Offset


BatchRead = Found | NotYet | OutOfRange | CompactedAway


@dataclass(frozen=True, slots=True)
class Fetched:
    """`aborted` – (producer id, first offset) of the aborted transactions among the records."""

    records: bytes
    aborted: tuple[tuple[int, int], ...]
    last_stable_offset: Offset
    out_of_range: bool = False


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A topic's effective Kafka configs. `assumed`: not permitted to read them, these are Kafka's defaults."""

    assumed: bool = True
    log_append_time: bool = False
    max_message_bytes: int = 1_048_588
    min_insync_replicas: int = 1
    unclean_leader_election: bool = False
    cleanup_policy: frozenset[str] = frozenset({"delete"})
    timestamp_before_max_ms: int = 9_223_372_036_854_775_807
    timestamp_after_max_ms: int = 3_600_000


@dataclass(frozen=True, slots=True)
class BrokerFacts:
    """Settings of the brokers. If they differ: the shortest expiration.

    `complete` – every broker responded.
    """

    producer_id_expiration_ms: int = 86_400_000
    complete: bool = True


class _Purpose(Enum):
    QUERIES = auto()
    APPENDS = auto()
    WATCHING = auto()
    LEADERS = auto()


class _Retry(Exception):
    """A retry after a metadata refresh may succeed."""


@dataclass(slots=True)
class _Refresh:
    """Topics whose metadata callers requested; None: all. One request serves all callers before it is sent."""

    topics: set[str] | None = field(default_factory=set)
    task: asyncio.Task[ClusterMetadata] | None = None


class _Reported:
    """Digests of the last Metadata responses, and the metadata after each was adopted.

    A cluster rarely changes between refreshes. A byte-identical response is not decoded again: with ten thousand
    partitions, decoding took most of an idle proxy's CPU time.
    """

    #: Replaces a response that adds nothing to what is known.
    NOTHING_NEW: Final = Message()

    def __init__(self) -> None:
        self._answers: OrderedDict[object, tuple[bytes, ClusterMetadata]] = OrderedDict()
        self._digest = b""

    def lookup(self, queried: object, known: ClusterMetadata, body: memoryview) -> Message | None:
        """`NOTHING_NEW` if the same query had the same response before, and metadata has not changed since."""
        self._digest = blake2b(body, digest_size=16).digest()
        digest, adopted = self._answers.get(queried, (b"", cluster.EMPTY))
        return self.NOTHING_NEW if digest == self._digest and adopted is known else None

    def adopted(self, queried: object, metadata: ClusterMetadata) -> None:
        """Records that `metadata` includes the response last passed to `lookup`."""
        self._answers[queried] = self._digest, metadata
        self._answers.move_to_end(queried)
        if len(self._answers) > _QUERIES_REMEMBERED:
            self._answers.popitem(last=False)


class ControlClient:
    """See the module. Owned by one event loop; `start` before anything else, `close` at the end.

    `on_brokers` is called with all brokers' addresses when one was added, moved or removed. `access` – TLS and login
    of its connections; callers that open more connections use it too.
    """

    def __init__(
        self,
        upstream: Sequence[Address],
        limits: Limits,
        *,
        on_brokers: Callable[[Mapping[NodeId, Address]], None] | None = None,
        access: Access = PLAINTEXT,
    ) -> None:
        self._limits = limits
        self.access = access
        self._on_brokers = on_brokers
        #: While `start` waits: why the last attempt failed.
        self.waits_because: str | None = None
        self._metadata = cluster.EMPTY
        self._reported = _Reported()
        self._version_max: dict[int, int] = {}  # until a connection is opened or the brokers change
        self._bootstrap = [
            PooledConnection(each, limits=limits, client_id=_CLIENT_ID, access=access) for each in upstream
        ]
        self._proxied_connections: dict[tuple[NodeId, _Purpose], PooledConnection] = {}
        self._next_refresh: _Refresh | None = None
        self._refreshing = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False
        self._coordinators: dict[tuple[int, str], NodeId] = {}
        self._reported_at: dict[NodeId, float] = {}  # when a broker last reported a partition's leader

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self, *, timeout_seconds: float | None = None) -> None:
        """Returns once a broker has sent metadata. Without a timeout it retries indefinitely, and logs that."""
        deadline = None if timeout_seconds is None else deadline_in(timeout_seconds)
        addresses = ",".join(str(each.address) for each in self._bootstrap)
        for each in self._bootstrap:
            each.quiet = True  # failures are logged below
        while True:
            try:
                await self.refresh_metadata([], timeout_seconds=self._limits.connect_timeout_seconds)
                break
            except UpstreamUnavailable as e:
                if deadline is not None and time.monotonic() > deadline:
                    raise
                self.waits_because = str(e)
                _limited_log.warning("start", "waiting for Kafka", upstream=addresses, reason=e)
                await asyncio.sleep(self._limits.reconnect_backoff_max_seconds)
        for each in self._bootstrap:
            each.quiet = False
        await self._greet_brokers()
        _log.info("connected to Kafka", cluster_id=self.cluster_id, brokers=len(self.brokers))
        self._run(self._keep_metadata_fresh(), "metadata refresh")

    async def close(self) -> None:
        """Ends every task and connection; requests in flight fail."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for proxied in [*self._bootstrap, *self._proxied_connections.values()]:
            await proxied.close()

    # --- what is known ------------------------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> str | None:
        """Id of the first cluster that responded. Responses from another cluster are rejected."""
        return self._metadata.cluster_id

    @property
    def brokers(self) -> Mapping[NodeId, Address]:
        """The brokers' addresses, as advertised by the listener of `upstream`."""
        return self._metadata.brokers

    def api_versions(self, node_id: NodeId) -> Mapping[int, tuple[int, int]] | None:
        """API key -> (min, max) version, from the last connection to the broker; None before the first.

        `start` connects to every reachable broker, the periodic metadata refresh to the others.
        """
        proxied = self._proxied_connections.get((node_id, _Purpose.QUERIES))
        return None if proxied is None else proxied.api_versions

    def version_max(self, api_key: int) -> int:
        """The newest version of an API that every broker supports, 0 if one broker's versions are unknown."""
        known = self._version_max.get(api_key)
        if known is None:
            reported = [self.api_versions(node_id) for node_id in self.brokers]
            newest = [0 if versions is None else versions.get(api_key, (0, 0))[1] for versions in reported]
            known = self._version_max[api_key] = min(newest, default=0)
        return known

    def topic(self, name: str) -> TopicInfo | None:
        """The topic's metadata as last reported; None if it was never requested or does not exist."""
        return self._metadata.topics.get(name)

    def leader(self, tp: TopicPartition) -> Leader | None:
        """The leader as last reported; None if there is none or the topic's metadata was never requested."""
        info = self.topic(tp.topic)
        partition = info.partitions.get(tp.partition) if info is not None else None
        return None if partition is None or partition.leader.node_id == NO_NODE else partition.leader

    # --- metadata -----------------------------------------------------------------------------------------------------

    async def refresh_metadata(
        self, topics: Iterable[str] | None, *, timeout_seconds: float | None = None
    ) -> ClusterMetadata:
        """Sends a Metadata request for the brokers and these topics (None: all topics). Never creates a topic.

        Returns the metadata of all topics requested so far, without those that do not exist. The request is sent
        after this call; concurrent calls share one.
        """
        deadline = self._deadline(timeout_seconds)
        refresh = self._next_refresh
        if refresh is None or refresh.task is None:
            refresh = self._next_refresh = _Refresh()
            refresh.task = self._run(self._refresh(refresh), "metadata")
        if topics is None:
            refresh.topics = None
        elif refresh.topics is not None:
            refresh.topics.update(topics)
        done, _ = await asyncio.wait({refresh.task}, timeout=remaining(deadline))
        if not done or refresh.task.cancelled():
            raise UpstreamUnavailable(
                "no broker answered Metadata in time: check that upstream is a Kafka listener for clients"
            )
        return refresh.task.result()

    async def _refresh(self, refresh: _Refresh) -> ClusterMetadata:
        # One request at a time. Calls during a request join the next one: the response to a request sent before the
        # caller found its metadata stale may be stale, too.
        async with self._refreshing:
            self._next_refresh = None
            requested = refresh.topics
            names = (
                None if requested is None else [Message(name=name, topic_id=NO_TOPIC_ID) for name in sorted(requested)]
            )
            message = Message(topics=names, allow_auto_topic_creation=False)
            reason = "no broker is known"
            for proxied in self._connections_to_query():
                # Short enough to try the other brokers if one hangs.
                deadline = deadline_in(self._limits.connect_timeout_seconds)
                try:
                    connection = await proxied.connected(deadline)
                    version = connection.version(apis.METADATA, at_least=10, at_most=13)
                    queried = version, None if requested is None else frozenset(requested)
                    known = partial(self._reported.lookup, queried, self._metadata)
                    answer = await connection.request(apis.METADATA, version, message, known, deadline=deadline)
                    if answer is _Reported.NOTHING_NEW:
                        return self._metadata
                    if answer.error_code:
                        raise UpstreamUnavailable(f"{proxied.address}: Metadata answered error {answer.error_code}")
                    metadata = self._adopt(cluster.from_response(answer), all_topics=requested is None)
                    self._reported.adopted(queried, metadata)
                    return metadata
                except UpstreamUnavailable as e:
                    reason = str(e)
            raise UpstreamUnavailable(f"no broker returned metadata; last error: {reason}")

    def _connections_to_query(self) -> list[PooledConnection]:
        """Open connections first: any broker can answer."""
        proxied_connections = [self._proxied(node_id, _Purpose.QUERIES) for node_id in self.brokers] + self._bootstrap
        return sorted(proxied_connections, key=lambda proxied: proxied.connection is None)

    def _adopt(self, news: ClusterMetadata, *, all_topics: bool) -> ClusterMetadata:
        known = self._metadata
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
        self._metadata = cluster.merged(known, news, all_topics=all_topics)
        if news.brokers != known.brokers:
            self._version_max.clear()
            for key in [
                key for key, proxied in self._proxied_connections.items() if news.brokers.get(key[0]) != proxied.address
            ]:
                self._run(self._proxied_connections.pop(key).close(), "close a connection")
            if self._on_brokers is not None:
                self._on_brokers(news.brokers)
        return self._metadata

    async def _keep_metadata_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._limits.metadata_refresh_seconds)
            try:
                await self.refresh_metadata(list(self._metadata.topics))
            except UpstreamUnavailable as e:
                _limited_log.warning("metadata", "metadata cannot be refreshed", reason=e)
            await self._greet_brokers()

    async def _greet_brokers(self) -> None:
        """Connects to every reachable broker, to learn its API versions."""
        deadline = deadline_in(self._limits.connect_timeout_seconds)
        proxied_connections = [self._proxied(node_id, _Purpose.QUERIES) for node_id in self.brokers]
        # The pooled connection logs a failure, and the next round retries.
        await asyncio.gather(*(proxied.connected(deadline) for proxied in proxied_connections), return_exceptions=True)

    # --- offsets and producers ----------------------------------------------------------------------------------------

    async def log_end(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> LogEnd:
        """OffsetForLeaderEpoch of the current epoch, with that epoch as fence: the log end offset, not the high
        watermark.

        Retried on errors 3, 6, 74, 75 and the like, on a response for another epoch (its offset is the start of the
        next epoch, not the log end), and on an undefined one (-1).
        """

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> LogEnd:
            call = _log_end_call(connection, tp, leader.leader_epoch)
            return _read_log_end(await connection.request(*call, deadline=deadline), leader)

        return await self._query_leader(tp, query, timeout_seconds)

    async def log_start(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> Offset:
        """ListOffsets of -2, with the leader epoch as fence."""
        return await self._list_offset(tp, _EARLIEST, timeout_seconds)

    async def high_watermark(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> Offset:
        """ListOffsets of -1 as a consumer, read uncommitted, with the leader epoch as fence."""
        return await self._list_offset(tp, _LATEST, timeout_seconds)

    async def confirmed_high_watermark(
        self, tp: TopicPartition, *, in_sync: int, timeout_seconds: float | None = None
    ) -> Offset:
        """`high_watermark` from a confirmed leader: everything acknowledged before this call is below it.

        A leader that is partitioned from the other brokers, but not from the proxy, keeps responding as leader
        indefinitely, and the proxy's metadata may come from it. `in_sync` – min.insync.replicas. Apart from this
        leader, all replicas but `in_sync` must know of no later leader. docs/decisions/0014 shows that this suffices.
        """

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> Offset:
            call = _list_offset_call(connection, tp, leader.leader_epoch, _LATEST)
            # Queried now, not earlier: a replica that has stored appends of a later leader by now knows that leader.
            confirming = self._run(self._confirm_leader(tp, leader, in_sync, deadline), "confirm a leader")
            try:
                answer = await _request_or_close(connection, call, deadline)
                await confirming
            finally:
                confirming.cancel()
            return _read_list_offset(answer)

        return await self._query_leader(tp, query, timeout_seconds, _Purpose.LEADERS)

    async def _confirm_leader(self, tp: TopicPartition, leader: Leader, in_sync: int, deadline: Monotonic) -> None:
        """Raises _Retry if another replica knows of a later leader, or too few replicas respond."""
        info = self.topic(tp.topic)
        if info is None or tp.partition not in info.partitions:
            raise _Retry("is no longer known")
        replicas = set(info.partitions[tp.partition].replicas)
        requested = len(replicas) - in_sync
        others = [each for each in replicas if each != leader.node_id and each in self.brokers]
        # Query no more replicas than needed, those that responded most recently first: others may be down.
        others.sort(key=lambda node_id: self._reported_at.get(node_id, float("-inf")))
        queried: set[asyncio.Task[ClusterMetadata | None]] = set()
        try:
            while requested > 0:
                while others and len(queried) < requested:
                    queried.add(self._run(self._reported_by(others.pop(), tp.topic, deadline), "leader"))
                if len(queried) < requested:
                    raise _Retry(f"too few replicas are reachable to confirm that broker {leader.node_id} leads")
                patience = _ONE_MORE_SECONDS if others else None
                done, queried = await asyncio.wait(queried, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    queried |= {self._run(self._reported_by(each, tp.topic, deadline), "leader") for each in others}
                    others.clear()
                for each in done:
                    reported = each.result()
                    news = reported and reported.topics.get(tp.topic)
                    if not reported or not news or tp.partition not in news.partitions:
                        continue
                    partition = news.partitions[tp.partition]
                    if news.topic_id != info.topic_id or partition.leader.leader_epoch > leader.leader_epoch:
                        self._adopt(reported, all_topics=False)
                        raise _Retry(f"broker {leader.node_id} is no longer its leader")
                    # Replicas are being added: those known before may no longer be in sync.
                    added = set(partition.replicas) - replicas
                    replicas |= added
                    others += [node_id for node_id in added if node_id in self.brokers]
                    requested += len(added) - 1
        finally:
            for task in queried:
                task.cancel()

    async def _reported_by(self, node_id: NodeId, topic: str, deadline: Monotonic) -> ClusterMetadata | None:
        """The topic's metadata from this broker, None if it does not respond. Not adopted."""
        try:
            connection = await self._proxied(node_id, _Purpose.LEADERS).connected(deadline)
            version = connection.version(apis.METADATA, at_least=10, at_most=13)
            message = Message(topics=[Message(name=topic, topic_id=NO_TOPIC_ID)], allow_auto_topic_creation=False)
            answer = await _request_or_close(connection, Call(apis.METADATA, version, message), deadline)
        except UpstreamUnavailable:
            return None
        if answer.error_code:
            return None
        self._reported_at[node_id] = time.monotonic()
        return cluster.from_response(answer)

    async def partition_end(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> PartitionEnd:
        """Log end, then high watermark, under one leader epoch. If the latter is not below the former, everything up to
        that log end is replicated."""

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> PartitionEnd:
            calls = [
                _log_end_call(connection, tp, leader.leader_epoch),
                _list_offset_call(connection, tp, leader.leader_epoch, _LATEST),
            ]
            log_end, latest = await connection.pipeline(calls, deadline=deadline)
            return PartitionEnd(_read_log_end(log_end, leader), _read_list_offset(latest))

        return await self._query_leader(tp, query, timeout_seconds)

    async def _list_offset(self, tp: TopicPartition, timestamp: int, timeout_seconds: float | None) -> Offset:
        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> Offset:
            call = _list_offset_call(connection, tp, leader.leader_epoch, timestamp)
            return _read_list_offset(await connection.request(*call, deadline=deadline))

        return await self._query_leader(tp, query, timeout_seconds)

    async def read_partition(self, tp: TopicPartition, *, timeout_seconds: float | None = None) -> PartitionReading:
        """Log end, producers (DescribeProducers, needs READ on the topic) and log start, in one read.

        DescribeProducers has no fence: a follower responds too, with what it has replicated so far. So it is sent
        between two OffsetForLeaderEpoch requests on one connection, which the broker handles in order and only the
        leader of that epoch answers.
        """

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> PartitionReading:
            requested_at = Monotonic(time.monotonic())
            fence = _log_end_call(connection, tp, leader.leader_epoch)
            calls = [
                fence,
                _describe_producers_call(connection, tp),
                fence,
                _list_offset_call(connection, tp, leader.leader_epoch, _EARLIEST),
            ]
            before, producers, after, start = await connection.pipeline(calls, deadline=deadline)
            log_end = _read_log_end(after, leader)
            consistent = _read_log_end(before, leader) == log_end
            return PartitionReading(
                log_end, _read_list_offset(start), _read_producers(producers), consistent, requested_at
            )

        return await self._query_leader(tp, query, timeout_seconds)

    async def producer_state(
        self, tp: TopicPartition, producer_id: ProducerId, *, timeout_seconds: float | None = None
    ) -> ProducerState | None:
        """The leader's state of one producer, if any. See `read_partition`."""
        reading = await self.read_partition(tp, timeout_seconds=timeout_seconds)
        return reading.producers.get(producer_id)

    async def open_transactions(
        self, tp: TopicPartition, *, timeout_seconds: float | None = None
    ) -> Mapping[ProducerId, ProducerState]:
        """The producers with a transaction open on the partition. See `read_partition`."""
        return (await self.read_partition(tp, timeout_seconds=timeout_seconds)).open_transactions

    # --- groups -------------------------------------------------------------------------------------------------------

    async def committed_offsets(
        self, group: str, partitions: Iterable[TopicPartition], *, timeout_seconds: float | None = None
    ) -> Mapping[TopicPartition, Offset]:
        """A group's committed offsets (OffsetFetch); partitions without a commit are missing.

        Needs DESCRIBE on the group and on the topics.
        """
        requested: dict[str, list[int]] = {}
        for topic, partition in partitions:
            requested.setdefault(topic, []).append(partition)
        topics = [Message(name=topic, partition_indexes=numbers) for topic, numbers in requested.items()]

        async def query(connection: BrokerConnection, deadline: Monotonic) -> Mapping[TopicPartition, Offset]:
            version = connection.version(apis.OFFSET_FETCH, at_least=2, at_most=7)
            message = Message(group_id=group, topics=topics, require_stable=False)
            answer = await connection.request(apis.OFFSET_FETCH, version, message, deadline=deadline)
            _check(answer.error_code, "OffsetFetch")
            found: dict[TopicPartition, Offset] = {}
            for topic in answer.topics:
                for each in topic.partitions:
                    _check(each.error_code, "OffsetFetch")
                    if each.committed_offset >= 0:
                        found[TopicPartition(topic.name, each.partition_index)] = Offset(each.committed_offset)
            return found

        return await self._query_coordinator(group, query, timeout_seconds)

    async def consumer_group_assignments(
        self, group: str, *, timeout_seconds: float | None = None
    ) -> Mapping[str, Sequence[tuple[UUID, Sequence[int]]]]:
        """Assignment of each member of a KIP-848 group. Needs DESCRIBE on the group."""

        async def query(
            connection: BrokerConnection, deadline: Monotonic
        ) -> Mapping[str, Sequence[tuple[UUID, Sequence[int]]]]:
            version = connection.version(apis.CONSUMER_GROUP_DESCRIBE, at_most=1)
            message = Message(group_ids=[group], include_authorized_operations=False)
            answer = await connection.request(apis.CONSUMER_GROUP_DESCRIBE, version, message, deadline=deadline)
            described = _only(answer.groups, "ConsumerGroupDescribe")
            _check(described.error_code, "ConsumerGroupDescribe", described.error_message)
            return {
                member.member_id: [(each.topic_id, each.partitions) for each in member.assignment.topic_partitions]
                for member in described.members
            }

        return await self._query_coordinator(group, query, timeout_seconds)

    async def _query_coordinator(
        self,
        name: str,
        query: Callable[[BrokerConnection, Monotonic], Awaitable[_T]],
        timeout_seconds: float | None,
        *,
        key_type: int = _GROUP_COORDINATOR,
    ) -> _T:
        """Queries the coordinator of a group or transactional id: the cached one, else from FindCoordinator."""

        async def find(connection: BrokerConnection, deadline: Monotonic) -> _T:
            node_id = self._coordinators.pop((key_type, name), None)
            if node_id is None:
                version = connection.version(apis.FIND_COORDINATOR, at_least=3, at_most=6)
                message = Message(key=name, key_type=key_type, coordinator_keys=[name])
                answer = await connection.request(apis.FIND_COORDINATOR, version, message, deadline=deadline)
                found = _only(answer.coordinators, "FindCoordinator") if version >= _SEVERAL_COORDINATORS else answer
                _check(found.error_code, "FindCoordinator", found.error_message)
                node_id = NodeId(found.node_id)
            there = await self._proxied(node_id, _Purpose.QUERIES).connected(deadline)
            result = await query(there, deadline)
            if len(self._coordinators) < _COORDINATORS_MAX:
                self._coordinators[key_type, name] = node_id  # until a query fails
            return result

        return await self._query_any(find, timeout_seconds)

    # --- records ------------------------------------------------------------------------------------------------------

    async def read_batch(
        self, tp: TopicPartition, offset: Offset, *, bytes_max: int = 1_048_576, timeout_seconds: float | None = None
    ) -> BatchRead:
        """Fetches the batch that contains `offset`, without waiting, read uncommitted, by topic id if the broker
        supports it (v13). A batch larger than `bytes_max` is still returned in full.

        Control batches (transaction markers) are returned like any other.
        """

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> BatchRead:
            partition = await self._fetch_now(connection, leader, tp, offset, bytes_max=bytes_max, deadline=deadline)
            if partition.error_code == Error.OFFSET_OUT_OF_RANGE:
                start = _list_offset_call(connection, tp, leader.leader_epoch, _EARLIEST)
                latest = _list_offset_call(connection, tp, leader.leader_epoch, _LATEST)
                low, high = map(_read_list_offset, await connection.pipeline([start, latest], deadline=deadline))
                if offset < low:
                    return OutOfRange(low)
                if offset >= high:
                    return NotYet(high)
                raise _Retry(f"offset {offset} is out of range, yet within {low} to {high}")
            _check(partition.error_code, "Fetch")
            if not partition.records:
                if offset >= partition.high_watermark:
                    return NotYet(Offset(partition.high_watermark))
                raise _Retry(f"nothing at offset {offset} below the high watermark {partition.high_watermark}")
            return _batch_containing(offset, partition.records)

        return await self._query_leader(tp, query, timeout_seconds)

    async def fetch_committed(
        self, tp: TopicPartition, offset: Offset, *, bytes_max: int, timeout_seconds: float | None = None
    ) -> Fetched:
        """Records from `offset` on, without waiting, read committed. Needs READ on the topic."""
        return await self._fetch(tp, offset, bytes_max=bytes_max, committed=True, timeout_seconds=timeout_seconds)

    async def fetch_uncommitted(
        self, tp: TopicPartition, offset: Offset, *, bytes_max: int, timeout_seconds: float | None = None
    ) -> Fetched:
        """The same, read uncommitted; `aborted` is meaningless."""
        return await self._fetch(tp, offset, bytes_max=bytes_max, committed=False, timeout_seconds=timeout_seconds)

    async def _fetch(
        self, tp: TopicPartition, offset: Offset, *, bytes_max: int, committed: bool, timeout_seconds: float | None
    ) -> Fetched:
        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> Fetched:
            partition = await self._fetch_now(
                connection, leader, tp, offset, bytes_max=bytes_max, deadline=deadline, committed=committed
            )
            if partition.error_code != Error.OFFSET_OUT_OF_RANGE:
                _check(partition.error_code, "Fetch")
            return Fetched(
                bytes(partition.records or b""),
                tuple((each.producer_id, each.first_offset) for each in partition.aborted_transactions or ()),
                Offset(partition.last_stable_offset),
                out_of_range=partition.error_code == Error.OFFSET_OUT_OF_RANGE,
            )

        return await self._query_leader(tp, query, timeout_seconds)

    async def _fetch_now(
        self,
        connection: BrokerConnection,
        leader: Leader,
        tp: TopicPartition,
        offset: Offset,
        *,
        bytes_max: int,
        deadline: Monotonic,
        committed: bool = False,
    ) -> Message:
        """Fetches without waiting for new records. Returns the response's partition."""
        info = self.topic(tp.topic)
        call = fetch_call(
            connection,
            tp,
            info.topic_id if info is not None else None,
            offset,
            leader_epoch=leader.leader_epoch,
            bytes_max=bytes_max,
            wait_max_ms=0,
            bytes_min=0,
            committed=committed,
        )
        return fetched_partition(await connection.request(*call, deadline=deadline))

    async def produce(
        self,
        tp: TopicPartition,
        batch: bytes,
        *,
        timeout_ms: int,
        acks: int = -1,
        topic_id: UUID | None = None,
    ) -> PartitionResult:
        """Appends one batch, sent at most once. Any error code is in the result, including 3, 6 and 100.

        Uses the given or the cached topic id if the broker supports it (v13), so that the batch cannot be appended to
        a topic created again under the same name (error 100). `acks` is -1 or 1.

        Raises UpstreamUnavailable if nothing was sent, and OutcomeUnknown if no response came within a second after
        `timeout_ms`: then only the log shows the outcome.
        """
        if acks not in (-1, 1):
            raise ValueError("acks must be -1 or 1: acks=0 has no response")
        # The broker answers 7 after timeout_ms; one second is for the network.
        deadline = deadline_in(timeout_ms / 1000 + 1.0)
        leader = self.leader(tp)
        if leader is None:
            await self.refresh_metadata([tp.topic], timeout_seconds=remaining(deadline))
            leader = self.leader(tp)
        if leader is None:
            raise UpstreamUnavailable(f"{tp}: has no leader now")
        connection = await self._proxied(leader.node_id, _Purpose.APPENDS).connected(deadline)
        info = self.topic(tp.topic)
        by_id = topic_id or (info.topic_id if info is not None else NO_TOPIC_ID)
        version = connection.version(apis.PRODUCE, at_least=3, at_most=13 if by_id != NO_TOPIC_ID else 12)
        partition = Message(index=tp.partition, records=batch)
        topic = Message(name=tp.topic, topic_id=by_id, partition_data=[partition])
        message = Message(transactional_id=None, acks=acks, timeout_ms=timeout_ms, topic_data=[topic])
        answer = await connection.request(apis.PRODUCE, version, message, deadline=deadline)
        result = _only(_only(answer.responses, "Produce").partition_responses, "Produce")
        if result.error_code in _RETRIABLE:
            # For the next append; this one does not wait for it.
            self._run(self._refresh_quietly(tp.topic), "metadata")
        return PartitionResult(
            tp.partition,
            result.error_code,
            result.base_offset,
            result.log_append_time_ms,
            result.log_start_offset,
            error_message=result.error_message,
        )

    async def _refresh_quietly(self, topic: str) -> None:
        try:
            await self.refresh_metadata([topic])
        except UpstreamUnavailable as e:
            _limited_log.warning("metadata", "metadata cannot be refreshed", reason=e)

    # --- the cluster --------------------------------------------------------------------------------------------------

    async def init_producer_id(self, *, timeout_seconds: float | None = None) -> tuple[ProducerId, ProducerEpoch]:
        """InitProducerId without a transactional id: a new producer id and its epoch (0)."""

        async def query(connection: BrokerConnection, deadline: Monotonic) -> tuple[ProducerId, ProducerEpoch]:
            version = connection.version(apis.INIT_PRODUCER_ID, at_most=4)
            message = Message(transactional_id=None, transaction_timeout_ms=0, producer_id=-1, producer_epoch=-1)
            answer = await connection.request(apis.INIT_PRODUCER_ID, version, message, deadline=deadline)
            _check(answer.error_code, "InitProducerId")
            return ProducerId(answer.producer_id), ProducerEpoch(answer.producer_epoch)

        return await self._query_any(query, timeout_seconds)

    async def transaction_partitions(
        self, transactional_id: str, *, timeout_seconds: float | None = None
    ) -> frozenset[TopicPartition]:
        """The partitions of its transaction whose markers are not yet written (DescribeTransactions).

        Needs DESCRIBE on the transactional id. Raises UpstreamUnavailable.
        """

        found = await self.transaction(transactional_id, timeout_seconds=timeout_seconds)
        return frozenset() if found is None else found.partitions

    async def transaction(
        self, transactional_id: str, *, timeout_seconds: float | None = None
    ) -> TransactionState | None:
        """The coordinator's state of it (DescribeTransactions), None for an unknown transactional id.

        Needs DESCRIBE on the transactional id. Raises UpstreamUnavailable.
        """

        async def query(connection: BrokerConnection, deadline: Monotonic) -> TransactionState | None:
            version = connection.version(apis.DESCRIBE_TRANSACTIONS, at_most=0)
            message = Message(transactional_ids=[transactional_id])
            answer = await connection.request(apis.DESCRIBE_TRANSACTIONS, version, message, deadline=deadline)
            state = _only(answer.transaction_states, "DescribeTransactions")
            if state.error_code == _TRANSACTIONAL_ID_NOT_FOUND:
                return None
            _check(state.error_code, "DescribeTransactions")
            return TransactionState(
                state.transaction_state,
                ProducerId(state.producer_id),
                ProducerEpoch(state.producer_epoch),
                frozenset(TopicPartition(topic.topic, each) for topic in state.topics for each in topic.partitions),
            )

        return await self._query_coordinator(
            transactional_id, query, timeout_seconds, key_type=_TRANSACTION_COORDINATOR
        )

    async def producer_at(
        self, producer_id: ProducerId, partitions: Iterable[TopicPartition], *, timeout_seconds: float | None = None
    ) -> Mapping[TopicPartition, ProducerState | None]:
        """The partition leaders' state of one producer, None if they have none; see `read_partition`.

        One read per broker. A partition whose leader does not respond in time is missing; a deleted one has None.
        """
        deadline = self._deadline(timeout_seconds)
        by_leader: dict[NodeId, list[TopicPartition]] = {}
        rest = []
        for tp in partitions:
            leader = self.leader(tp)
            if leader is None:
                rest.append(tp)
            else:
                by_leader.setdefault(leader.node_id, []).append(tp)
        found: dict[TopicPartition, ProducerState | None] = {}

        async def at_leader(node_id: NodeId, queried: list[TopicPartition]) -> None:
            try:
                connection = await self._proxied(node_id, _Purpose.QUERIES).connected(deadline)
                leaders = {tp: leader for tp in queried if (leader := self.leader(tp)) is not None}
                fence = _log_ends_call(connection, leaders)
                calls = [fence, _describe_producers_of(connection, queried), fence]
                before, producers, after = await connection.pipeline(calls, deadline=deadline)
                led = _led(before, leaders) & _led(after, leaders)
                found.update((tp, state) for tp, state in _state_of(producers, producer_id).items() if tp in led)
            except UpstreamUnavailable:
                pass
            rest.extend(tp for tp in queried if tp not in found)

        async def alone(tp: TopicPartition) -> None:
            try:
                found[tp] = await self.producer_state(tp, producer_id, timeout_seconds=remaining(deadline))
            except UpstreamUnavailable as error:
                if error.error_code == Error.UNKNOWN_TOPIC_OR_PARTITION:
                    found[tp] = None  # deleted

        await asyncio.gather(*(at_leader(node_id, queried) for node_id, queried in by_leader.items()))
        await asyncio.gather(*map(alone, rest))
        return found

    async def create_topic(
        self,
        name: str,
        *,
        partitions: int,
        replication_factor: int,
        configs: Mapping[str, str],
        timeout_seconds: float | None = None,
    ) -> bool:
        """CreateTopics. False if the topic existed, whatever its configs.

        Retried after a lost response, so False may also mean that an earlier try created it. Brokers learn of the
        topic one by one: call `refresh_metadata` until it shows.
        """

        async def query(connection: BrokerConnection, deadline: Monotonic) -> bool:
            version = connection.version(apis.CREATE_TOPICS, at_least=2, at_most=7)
            requested = Message(
                name=name,
                num_partitions=partitions,
                replication_factor=replication_factor,
                assignments=[],
                configs=[Message(name=key, value=value) for key, value in configs.items()],
            )
            message = Message(topics=[requested], timeout_ms=int(remaining(deadline) * 1000), validate_only=False)
            answer = await connection.request(apis.CREATE_TOPICS, version, message, deadline=deadline)
            topic = _only(answer.topics, "CreateTopics")
            if topic.error_code == Error.TOPIC_ALREADY_EXISTS:
                return False
            _check(topic.error_code, "CreateTopics", topic.error_message)
            return True

        return await self._query_any(query, timeout_seconds)

    async def create_partitions(
        self,
        topic: str,
        count: int,
        assignments: Sequence[Sequence[NodeId]] | None,
        *,
        validate_only: bool,
        timeout_seconds: float | None = None,
    ) -> tuple[int, str | None]:
        """CreatePartitions up to `count` in total. Sent once; returns Kafka's error code and message.

        Needs ALTER on the topic. Raises UpstreamUnavailable if nothing was sent or the outcome is unknown (also as
        OutcomeUnknown).
        """
        deadline = self._deadline(timeout_seconds)
        connection = await self._connections_to_query()[0].connected(deadline)
        version = connection.version(apis.CREATE_PARTITIONS, at_most=3)
        broker_assignments = None if assignments is None else [Message(broker_ids=list(each)) for each in assignments]
        message = Message(
            topics=[Message(name=topic, count=count, assignments=broker_assignments)],
            timeout_ms=int(remaining(deadline) * 1000),
            validate_only=validate_only,
        )
        answer = await connection.request(apis.CREATE_PARTITIONS, version, message, deadline=deadline)
        result = _only(answer.results, "CreatePartitions")
        if result.error_code in _RETRIABLE and result.error_code != Error.UNKNOWN_TOPIC_OR_PARTITION:
            text = result.error_message or "no text"
            raise UpstreamUnavailable(f"CreatePartitions answered error {result.error_code} ({text})")
        return result.error_code, result.error_message

    async def topic_facts(self, topic: str, *, timeout_seconds: float | None = None) -> TopicFacts:
        """DescribeConfigs of a topic. If that is not permitted: Kafka's defaults, and a warning."""

        async def query(connection: BrokerConnection, deadline: Monotonic) -> Mapping[str, str]:
            return await _describe_configs(connection, _TOPIC_RESOURCE, topic, _TOPIC_CONFIGS, deadline)

        return _topic_facts(await self._allowed(self._query_any(query, timeout_seconds), f"topic {topic}"))

    async def facts_of_topics(
        self, topics: Sequence[str], *, timeout_seconds: float | None = None
    ) -> Mapping[str, TopicFacts]:
        """The same for many topics, in few requests. Omits topics that do not exist.

        Raises UpstreamUnavailable.
        """
        deadline = self._deadline(timeout_seconds)
        facts: dict[str, TopicFacts] = {}
        for start in range(0, len(topics), TOPICS_DESCRIBED_AT_ONCE):
            queried = topics[start : start + TOPICS_DESCRIBED_AT_ONCE]

            async def query(
                connection: BrokerConnection, deadline: Monotonic, queried: Sequence[str] = queried
            ) -> Mapping[str, TopicFacts]:
                return await described_topics(connection, queried, deadline)

            facts.update(await self._query_any(query, remaining(deadline)))
        return facts

    async def broker_facts(self, *, timeout_seconds: float | None = None) -> BrokerFacts:
        """DescribeConfigs sent to each broker. If that is not permitted: Kafka's defaults, and a warning.

        Omits brokers that do not respond in time. Raises UpstreamUnavailable if none does.
        """
        deadline = self._deadline(timeout_seconds)

        async def query(node_id: NodeId) -> Mapping[str, str]:
            connection = await self._proxied(node_id, _Purpose.QUERIES).connected(deadline)
            return await _describe_configs(connection, _BROKER_RESOURCE, str(node_id), _BROKER_CONFIGS, deadline)

        answers = await asyncio.gather(
            *(self._allowed(query(node_id), f"broker {node_id}") for node_id in self.brokers), return_exceptions=True
        )
        found: list[Mapping[str, str]] = []
        failure: UpstreamUnavailable | None = None
        for answer in answers:
            if isinstance(answer, UpstreamUnavailable):
                failure = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.append(answer)
        if not found:
            raise failure or UpstreamUnavailable("no broker is known")
        default = BrokerFacts()
        return BrokerFacts(
            min(int(each.get("producer.id.expiration.ms", default.producer_id_expiration_ms)) for each in found),
            complete=failure is None,
        )

    @staticmethod
    async def _allowed(query_message: Awaitable[Mapping[str, str]], what: str) -> Mapping[str, str]:
        try:
            return await query_message
        except UpstreamUnavailable as e:
            if e.error_code not in (Error.TOPIC_AUTHORIZATION_FAILED, _CLUSTER_AUTHORIZATION_FAILED):
                raise
            _limited_log.warning(
                ("configs", what), "may not read configs, Kafka's defaults are assumed", of=what, reason=e
            )
            return {}

    async def query_broker(
        self, node_id: NodeId, calls: Callable[[BrokerConnection], Sequence[Call]], *, timeout_seconds: float
    ) -> list[Message]:
        """Sends the requests that `calls` makes, once, on a connection that no sequencer query or append uses.

        The caller checks error codes in responses.
        """
        deadline = self._deadline(timeout_seconds)
        connection = await self._proxied(node_id, _Purpose.WATCHING).connected(deadline)
        return await connection.pipeline(calls(connection), deadline=deadline)

    # --- query routing ------------------------------------------------------------------------------------------------

    async def _query_leader(
        self,
        tp: TopicPartition,
        query: Callable[[BrokerConnection, Leader, Monotonic], Awaitable[_T]],
        timeout_seconds: float | None,
        purpose: _Purpose = _Purpose.QUERIES,
    ) -> _T:
        async def once(deadline: Monotonic) -> _T:
            leader = self.leader(tp)
            if leader is None:
                raise _Retry("has no leader now")
            connection = await self._proxied(leader.node_id, purpose).connected(deadline)
            return await query(connection, leader, deadline)

        deadline = self._deadline(timeout_seconds)
        if self.leader(tp) is None:
            with suppress(UpstreamUnavailable):
                await self.refresh_metadata([tp.topic], timeout_seconds=remaining(deadline))
        return await self._until(deadline, f"{tp}", once, tp=tp)

    async def _query_any(
        self, query: Callable[[BrokerConnection, Monotonic], Awaitable[_T]], timeout_seconds: float | None
    ) -> _T:
        attempt = 0

        async def once(deadline: Monotonic) -> _T:
            nonlocal attempt
            proxied_connections = self._connections_to_query()
            proxied = proxied_connections[attempt % len(proxied_connections)]
            attempt += 1
            return await query(await proxied.connected(deadline), deadline)

        return await self._until(self._deadline(timeout_seconds), "Kafka", once)

    async def _until(
        self,
        deadline: Monotonic,
        what: str,
        once: Callable[[Monotonic], Awaitable[_T]],
        *,
        tp: TopicPartition | None = None,
    ) -> _T:
        """Retries until there is a response, the deadline has passed, or retrying cannot help."""
        pause = self._limits.reconnect_backoff_min_seconds
        missing = 0
        while True:
            try:
                return await once(deadline)
            except _Retry as e:
                reason = str(e)
            except UpstreamUnavailable as e:
                if e.error_code is not None:
                    raise
                reason = str(e)
            if remaining(deadline) <= pause:
                raise UpstreamUnavailable(f"{what}: {reason}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._limits.reconnect_backoff_max_seconds)
            if tp is not None:
                try:
                    await self.refresh_metadata([tp.topic], timeout_seconds=remaining(deadline))
                except UpstreamUnavailable:
                    continue
                info = self.topic(tp.topic)
                missing = missing + 1 if info is None or tp.partition not in info.partitions else 0
                if missing >= _MISSING_TOPIC_TRIES:
                    raise UpstreamUnavailable(
                        f"{what}: no such topic or partition, or no permission to DESCRIBE it",
                        error_code=Error.UNKNOWN_TOPIC_OR_PARTITION,
                    )

    def _proxied(self, node_id: NodeId, purpose: _Purpose) -> PooledConnection:
        proxied = self._proxied_connections.get((node_id, purpose))
        if proxied is None:
            if node_id not in self.brokers:
                raise UpstreamUnavailable(f"broker {node_id} is not in the cluster now")
            if self._closed:
                raise UpstreamUnavailable("the control client is closed")
            proxied = PooledConnection(
                self.brokers[node_id],
                limits=self._limits,
                client_id=_CLIENT_ID,
                on_opened=self._version_max.clear,
                access=self.access,
            )
            self._proxied_connections[node_id, purpose] = proxied
        return proxied

    def _deadline(self, timeout_seconds: float | None) -> Monotonic:
        return deadline_in(self._limits.request_timeout_seconds if timeout_seconds is None else timeout_seconds)

    def _run(self, work: Coroutine[Any, Any, _T], name: str) -> asyncio.Task[_T]:
        """Runs a task that `close` cancels. A failure is the caller's to await; otherwise it is ignored."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


# --- requests and answers, one pair per API -------------------------------------------------------------------------

_CLUSTER_AUTHORIZATION_FAILED: Final = 31
#: The first FindCoordinator that answers for several keys.
_SEVERAL_COORDINATORS: Final = 4
_COORDINATORS_MAX: Final = 100_000
_TRANSACTIONAL_ID_NOT_FOUND: Final = 105
_LIST_OFFSETS: Final = 2
TOPICS_DESCRIBED_AT_ONCE: Final = 200
_TOPIC_CONFIGS: Final = (
    "message.timestamp.type",
    "max.message.bytes",
    "min.insync.replicas",
    "unclean.leader.election.enable",
    "cleanup.policy",
    "message.timestamp.before.max.ms",
    "message.timestamp.after.max.ms",
)
_BROKER_CONFIGS: Final = ("producer.id.expiration.ms",)


def _check(error_code: int, api: str, message: str | None = None) -> None:
    if not error_code:
        return
    text = f"{api} answered error {error_code}" + (f" ({message})" if message else "")
    if error_code in _RETRIABLE:
        raise _Retry(text)
    raise UpstreamUnavailable(text, error_code=error_code)


def _only(items: Sequence[Message], api: str) -> Message:
    if len(items) != 1:
        raise UpstreamUnavailable(f"{api} answered for {len(items)} topics or partitions instead of one")
    return items[0]


def _log_end_call(connection: BrokerConnection, tp: TopicPartition, leader_epoch: LeaderEpoch) -> Call:
    version = connection.version(apis.OFFSET_FOR_LEADER_EPOCH, at_least=2, at_most=4)
    partition = Message(partition=tp.partition, current_leader_epoch=leader_epoch, leader_epoch=leader_epoch)
    message = Message(topics=[Message(topic=tp.topic, partitions=[partition])])
    return Call(apis.OFFSET_FOR_LEADER_EPOCH, version, message)


def _log_ends_call(connection: BrokerConnection, leaders: Mapping[TopicPartition, Leader]) -> Call:
    version = connection.version(apis.OFFSET_FOR_LEADER_EPOCH, at_least=2, at_most=4)
    topics: dict[str, list[Message]] = {}
    for tp, leader in leaders.items():
        epoch = leader.leader_epoch
        topics.setdefault(tp.topic, []).append(
            Message(partition=tp.partition, current_leader_epoch=epoch, leader_epoch=epoch)
        )
    return Call(
        apis.OFFSET_FOR_LEADER_EPOCH,
        version,
        Message(topics=[Message(topic=topic, partitions=each) for topic, each in topics.items()]),
    )


async def _request_or_close(connection: BrokerConnection, call: Call, deadline: Monotonic) -> Message:
    """Closes the connection after a timeout: the broker may be dead, which only a new connection shows."""
    try:
        return await connection.request(*call, deadline=deadline)
    except OutcomeUnknown:
        await connection.close()
        raise


def _led(answer: Message, leaders: Mapping[TopicPartition, Leader]) -> set[TopicPartition]:
    """The partitions whose leader of that epoch responded."""
    found = set()
    for topic in answer.topics:
        for each in topic.partitions:
            tp = TopicPartition(topic.topic, each.partition)
            leader = leaders.get(tp)
            if leader is not None and not each.error_code and each.leader_epoch == leader.leader_epoch:
                found.add(tp)
    return found


def _read_log_end(answer: Message, leader: Leader) -> LogEnd:
    partition = _only(_only(answer.topics, "OffsetForLeaderEpoch").partitions, "OffsetForLeaderEpoch")
    _check(partition.error_code, "OffsetForLeaderEpoch")
    if partition.leader_epoch != leader.leader_epoch or partition.end_offset < 0:
        # Undefined (-1, -1): the epoch has no entry in the leader's log yet.
        raise _Retry(f"end of leader epoch {leader.leader_epoch} unknown, got epoch {partition.leader_epoch}")
    return LogEnd(leader.leader_epoch, LogEndOffset(partition.end_offset), leader.node_id)


def _list_offset_call(
    connection: BrokerConnection, tp: TopicPartition, leader_epoch: LeaderEpoch, timestamp: int
) -> Call:
    version = connection.version(_LIST_OFFSETS, at_least=5, at_most=7)
    partition = Message(partition_index=tp.partition, current_leader_epoch=leader_epoch, timestamp=timestamp)
    topic = Message(name=tp.topic, partitions=[partition])
    message = Message(replica_id=_FROM_A_CONSUMER, isolation_level=_READ_UNCOMMITTED, topics=[topic])
    return Call(_LIST_OFFSETS, version, message)


def _read_list_offset(answer: Message) -> Offset:
    partition = _only(_only(answer.topics, "ListOffsets").partitions, "ListOffsets")
    _check(partition.error_code, "ListOffsets")
    if partition.offset < 0:
        raise _Retry("ListOffsets answered no offset")
    return Offset(partition.offset)


def _describe_producers_call(connection: BrokerConnection, tp: TopicPartition) -> Call:
    version = connection.version(apis.DESCRIBE_PRODUCERS, at_most=0)
    message = Message(topics=[Message(name=tp.topic, partition_indexes=[tp.partition])])
    return Call(apis.DESCRIBE_PRODUCERS, version, message)


def _describe_producers_of(connection: BrokerConnection, partitions: Iterable[TopicPartition]) -> Call:
    version = connection.version(apis.DESCRIBE_PRODUCERS, at_most=0)
    topics: dict[str, list[int]] = {}
    for tp in partitions:
        topics.setdefault(tp.topic, []).append(tp.partition)
    message = Message(topics=[Message(name=topic, partition_indexes=each) for topic, each in topics.items()])
    return Call(apis.DESCRIBE_PRODUCERS, version, message)


def _state_of(answer: Message, producer_id: ProducerId) -> Mapping[TopicPartition, ProducerState | None]:
    return {
        TopicPartition(topic.name, each.partition_index): _producers_of(each).get(producer_id)
        for topic in answer.topics
        for each in topic.partitions
        if not each.error_code
    }


def _read_producers(answer: Message) -> Mapping[ProducerId, ProducerState]:
    partition = _only(_only(answer.topics, "DescribeProducers").partitions, "DescribeProducers")
    _check(partition.error_code, "DescribeProducers", partition.error_message)
    return _producers_of(partition)


def _producers_of(partition: Message) -> Mapping[ProducerId, ProducerState]:
    return {
        ProducerId(each.producer_id): ProducerState(
            ProducerId(each.producer_id),
            ProducerEpoch(each.producer_epoch),
            each.last_sequence,
            each.last_timestamp,
            Offset(each.current_txn_start_offset) if each.current_txn_start_offset >= 0 else None,
        )
        for each in partition.active_producers
    }


def fetch_call(
    connection: BrokerConnection,
    tp: TopicPartition,
    topic_id: UUID | None,
    offset: Offset,
    *,
    leader_epoch: LeaderEpoch,
    bytes_max: int,
    wait_max_ms: int,
    bytes_min: int,
    committed: bool = False,
) -> Call:
    """Fetch of one partition without a fetch session; v13 (topic id) if supported."""
    by_id = topic_id or NO_TOPIC_ID
    version = connection.version(apis.FETCH, at_least=9, at_most=13 if by_id != NO_TOPIC_ID else 12)
    partition = Message(
        partition=tp.partition,
        current_leader_epoch=leader_epoch,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=bytes_max,
    )
    message = Message(
        replica_id=_FROM_A_CONSUMER,
        max_wait_ms=wait_max_ms,
        min_bytes=bytes_min,
        max_bytes=bytes_max,
        isolation_level=_READ_COMMITTED if committed else _READ_UNCOMMITTED,
        session_id=0,
        session_epoch=_NO_SESSION_EPOCH,
        topics=[Message(topic=tp.topic, topic_id=by_id, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id="",
    )
    return Call(apis.FETCH, version, message)


def fetched_partition(answer: Message) -> Message:
    """The only partition of a Fetch response. The caller checks its error code."""
    _check(answer.error_code, "Fetch")
    return _only(_only(answer.responses, "Fetch").partitions, "Fetch")


def _batch_containing(offset: Offset, records: bytes) -> Found | CompactedAway:
    try:
        header = parse_batch_header(memoryview(records))
    except MalformedBatch as e:
        raise UpstreamUnavailable(f"the log contains a batch that this proxy cannot read: {e}") from e
    if header.base_offset > offset:
        return CompactedAway(Offset(header.base_offset))
    size = _BATCH_PREFIX_BYTES + header.batch_length
    if header.base_offset + header.last_offset_delta < offset or size > len(records):
        raise _Retry(f"Fetch of offset {offset} answered offset {header.base_offset}, or only a part of it")
    return Found(records[:size])


def _topic_facts(configs: Mapping[str, str]) -> TopicFacts:
    """Empty `configs`: not permitted to read them."""
    default = TopicFacts()
    return TopicFacts(
        assumed=not configs,
        log_append_time=configs.get("message.timestamp.type") == "LogAppendTime",
        max_message_bytes=int(configs.get("max.message.bytes", default.max_message_bytes)),
        min_insync_replicas=int(configs.get("min.insync.replicas", default.min_insync_replicas)),
        unclean_leader_election=configs.get("unclean.leader.election.enable") == "true",
        cleanup_policy=frozenset(configs["cleanup.policy"].replace(" ", "").split(","))
        if "cleanup.policy" in configs
        else default.cleanup_policy,
        timestamp_before_max_ms=int(configs.get("message.timestamp.before.max.ms", default.timestamp_before_max_ms)),
        timestamp_after_max_ms=int(configs.get("message.timestamp.after.max.ms", default.timestamp_after_max_ms)),
    )


async def described_topics(
    connection: BrokerConnection, topics: Sequence[str], deadline: Monotonic
) -> Mapping[str, TopicFacts]:
    """Configs of the topics that exist, in one request. Raises UpstreamUnavailable."""
    version = connection.version(apis.DESCRIBE_CONFIGS, at_least=1, at_most=4)
    keys = list(_TOPIC_CONFIGS)
    resources = [Message(resource_type=_TOPIC_RESOURCE, resource_name=each, configuration_keys=keys) for each in topics]
    message = Message(resources=resources)
    answer = await connection.request(apis.DESCRIBE_CONFIGS, version, message, deadline=deadline)
    facts = {}
    for result in answer.results:
        if result.error_code == Error.TOPIC_AUTHORIZATION_FAILED:
            facts[result.resource_name] = TopicFacts()
        elif not result.error_code:
            facts[result.resource_name] = _topic_facts(_values(result))
    return facts


def _values(result: Message) -> Mapping[str, str]:
    return {each.name: each.value for each in result.configs if each.value is not None}


async def _describe_configs(
    connection: BrokerConnection, resource_type: int, name: str, keys: Sequence[str], deadline: Monotonic
) -> Mapping[str, str]:
    version = connection.version(apis.DESCRIBE_CONFIGS, at_least=1, at_most=4)
    resource = Message(resource_type=resource_type, resource_name=name, configuration_keys=list(keys))
    answer = await connection.request(apis.DESCRIBE_CONFIGS, version, Message(resources=[resource]), deadline=deadline)
    result = _only(answer.results, "DescribeConfigs")
    _check(result.error_code, "DescribeConfigs", result.error_message)
    return _values(result)
