"""One Produce request with checked partitions: its appends at their sequencers, and how its answer is put together.

Admitted appends are forwarded in one request, refused ones are answered by the proxy, and both results are merged into
one response. The partitions are submitted one after the other, in the order of topic and partition. Admitted appends
block other appends to their partitions until they are sent, so they do not wait long for the rest: they are sent ahead
(`CheckedProduce._send_ahead`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fencepost_policies.append import NO_FACTS, Refusal, where
from fencepost_policies.append_policy import Reads
from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM, IdempotenceLevel, Level
from fencepost_policies.values import value
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.reading import Readings, append_of, read_batch
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import (
    HEADER_BYTES,
    BatchScan,
    HeaderNames,
    fence_batch,
    fenced_header,
    zero_base_offset,
)
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    TopicResult,
)

if TYPE_CHECKING:
    from fencepost_proxy.session.levels import LeveledProduce
    from fencepost_proxy.session.partition_counts import CountCheckedProduce
    from fencepost_proxy.session.pending_responses import PipelineKey

ACKS_ALL = -1
LEVEL_POLICY = IdempotenceLevel()
NOTHING_DENIED: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class ProduceExchange:
    """`results` fills up with the final result of each partition; `pending_appends` are the appends to checked ones.
    Times are monotonic seconds.

    - `waiting_for` – the append submitted last, None once all are decided; `submitted_at` – since when.
    - `admitted` – block their partitions until they are sent or cancelled; `admitted_at` – since when the first does.
    - `sent` – the partitions whose batches went upstream.
    - `alone` – it waits for one partition with none admitted, and submits all in order after that.
    - `answer_by` – when the client must get an answer. `received_at` – when the request was complete.
    - `sequencer_seconds` – how long it has waited for sequencers and barriers so far.
    - `count_checked` – its topics with partition-count checks; `refused_by_policy` – partitions refused by these.
    - `at_barrier` – it waits for a barrier or for metadata, before the sequencers.
    - `misread` – pipelines of batches that could not become pending appends.
    - `leveled` – its batches with idempotence levels.
    - `querying` – open queries to Kafka that the answer waits for; `starts_queried` – log starts were queried.
    - `stated` – topics for which Kafka has answered whether the client may write.
    - `denied` – topics that the client may not write, with Kafka's error, found before anything else was done.
    - `open_records` – records of failed appends of a transaction that are not stored yet; None: not determined.
    - `readings` – the parsed batches.
    """

    request: ProduceRequest
    starts_at: int = 0
    answer_by: float = float("inf")
    received_at: float = 0.0
    submitted_at: float = 0.0
    sequencer_seconds: float = 0.0
    pending_appends: dict[TopicPartition, PendingAppend] = field(default_factory=dict)
    results: dict[TopicPartition, PartitionResult] = field(default_factory=dict)
    to_submit: list[PendingAppend] = field(default_factory=list)
    waiting_for: PendingAppend | None = None
    admitted: list[PendingAppend] = field(default_factory=list)
    admitted_at: float = 0.0
    sent: set[TopicPartition] = field(default_factory=set)
    alone: bool = False
    throttle_time_ms: int = 0
    count_checked: CountCheckedProduce | None = None
    at_barrier: bool = False
    refused_by_policy: frozenset[TopicPartition] = frozenset()
    misread: list[PipelineKey] = field(default_factory=list)
    leveled: LeveledProduce | None = None
    querying: int = 0
    starts_queried: bool = False
    stated: frozenset[str] = frozenset()
    denied: Mapping[str, int] = field(default_factory=lambda: NOTHING_DENIED)
    open_records: int | None = None
    readings: Readings | None = None

    @property
    def complete(self) -> bool:
        return all(key in self.results for key in self.partitions())

    @property
    def refused(self) -> bool:
        """Whether the proxy refused a part of it. A recognized retry has its result too, and that is a success."""
        return any(self.refusals())

    def refusals(self) -> Iterator[PartitionResult]:
        """Except topics that Kafka denies."""
        return (result for key, result in self.results.items() if result.error_code and key.topic not in self.denied)

    @property
    def silent(self) -> bool:
        """acks=0: the client reads no answer."""
        return self.request.acks == 0

    def partitions(self) -> Iterator[TopicPartition]:
        for topic in self.request.topics:
            for data in topic.partitions:
                yield TopicPartition(topic.name, data.partition)

    # ---- what goes upstream

    def unsent(self) -> Iterator[TopicPartition]:
        """What can be sent now: what is admitted, and what needs no admission."""
        for key in self.partitions():
            if key not in self.results and key not in self.sent:
                pending = self.pending_appends.get(key)
                if pending is None or pending in self.admitted:
                    yield key

    def upstream_request(self) -> ProduceRequest | None:
        """What may be sent and is not sent yet, fenced; None if there is nothing. acks=all if an append is fenced.

        With acks=1 a leader could lose a conditional append that it acknowledged, and let a second writer win the same
        offset.
        """
        topics = self._only(set(self.unsent()))
        if not topics:
            return None
        acks = ACKS_ALL if self.admitted or self.request.acks == 0 else self.request.acks
        return replace(self.request, topics=topics, acks=acks)

    def request_for(self, pending: PendingAppend) -> ProduceRequest:
        """A single append, with its new fence."""
        return replace(self.request, topics=self._only({pending.partition}), acks=ACKS_ALL)

    def request_without(self, keys: Collection[TopicPartition]) -> ProduceRequest:
        """The batches to resend without their producer ids."""
        acks = ACKS_ALL if self.request.acks == 0 else self.request.acks
        return replace(self.request, topics=self._only(keys), acks=acks)

    def _only(self, keys: Collection[TopicPartition]) -> tuple[TopicData, ...]:
        parts = (
            (topic, [d for d in topic.partitions if TopicPartition(topic.name, d.partition) in keys])
            for topic in self.request.topics
        )
        return tuple(
            replace(topic, partitions=tuple(self._upstream_data(topic, data) for data in requested))
            for topic, requested in parts
            if requested
        )

    def _upstream_data(self, topic: TopicData, data: PartitionData) -> PartitionData:
        key = TopicPartition(topic.name, data.partition)
        pending = self.pending_appends.get(key)
        if data.records is None:
            return data
        if pending is None:
            drops_id = self.leveled is not None and key in self.leveled.without
            return replace(data, records=memoryview(without_producer(data.records))) if drops_id else data
        return replace(data, records=memoryview(batch_to_send(pending)))

    # ---- what comes back

    def response(self) -> ProduceResponse:
        topics = tuple(
            TopicResult(
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=tuple(self.results[TopicPartition(topic.name, data.partition)] for data in topic.partitions),
                tags=b"",
            )
            for topic in self.request.topics
        )
        return ProduceResponse(
            correlation_id=self.request.correlation_id, topics=topics, throttle_time_ms=self.throttle_time_ms
        )


def sent_batch(pending: PendingAppend) -> tuple[bytes, memoryview]:
    """The header of the batch to send, and its records unchanged."""
    fence, records = pending.fence, pending.records
    if fence is None:
        return bytes(zero_base_offset(records[:HEADER_BYTES])), records[HEADER_BYTES:]
    header = fenced_header(
        records,
        producer_id=fence.producer_id,
        producer_epoch=fence.producer_epoch,
        base_sequence=fence.base_sequence,
        instance_id=fence.instance_id,
    )
    return bytes(header), records[HEADER_BYTES:]


def without_producer(records: memoryview) -> bytearray:
    """The batch as a producer that is not idempotent would have sent it."""
    return fence_batch(records, producer_id=-1, producer_epoch=-1, base_sequence=-1)


def batch_to_send(pending: PendingAppend) -> bytearray:
    """The batch to send to Kafka: fenced, if it has a fence."""
    fence = pending.fence
    if fence is None:
        # Kafka refuses a base offset other than 0; the expected offset is not for Kafka.
        return zero_base_offset(pending.records)
    return fence_batch(
        pending.records,
        producer_id=fence.producer_id,
        producer_epoch=fence.producer_epoch,
        base_sequence=fence.base_sequence,
        instance_id=fence.instance_id,
    )


@value
class AppendDraft:
    """What is needed of a checked topic and of the connection to make pending appends."""

    connection: int
    policy: TopicPolicy
    names: HeaderNames
    decompressed_bytes_max: int
    shared_producer_ids: frozenset[int]
    now: float
    deadline: float
    instance_id: int = 0
    connected_at: float = float("-inf")
    alone: bool = False
    taken_over: bool = True
    transactional_id: str | None = None


def make_pending_append(
    draft: AppendDraft, partition: TopicPartition, data: PartitionData, scan: BatchScan | Refusal | None = None
) -> PendingAppend | Refusal:
    """The pending append of a batch. `scan` – the batch, if it is already read."""
    scan = scan or read_batch(
        partition,
        data.records,
        draft.names,
        source_is_base=draft.policy.source_is_base,
        timestamps=Reads.TIMESTAMPS in draft.policy.reads,
        bytes_max=draft.decompressed_bytes_max,
    )
    if isinstance(scan, Refusal):
        return scan
    assert data.records is not None
    append, header = append_of(partition, scan), scan.header
    if header.is_control:
        message = f"CONTROL_BATCH {where(append)}: only brokers write these"
        return Refusal(Error.INVALID_RECORD, "control_batch", message)
    if header.producer_id >= MADE_UP_IDS_FROM:
        not_permitted = LEVEL_POLICY.check(append, Level.OFF, NO_FACTS)
        assert not_permitted is not None
        return not_permitted
    if header.producer_id in draft.shared_producer_ids:
        message = f"PRODUCER_ID_TAKEN {where(append)}: producer id {header.producer_id} is the proxy's own"
        return Refusal(Error.POLICY_VIOLATION, "shared_producer_id", message)
    return PendingAppend(
        connection=draft.connection,
        partition=partition,
        append=append,
        records=data.records,
        digest=scan.digest,
        check=draft.policy.check,
        submitted_at=draft.now,
        deadline=draft.deadline,
        instance_id=draft.instance_id,
        connected_at=draft.connected_at,
        alone=draft.alone,
        taken_over=draft.taken_over,
        transactional_id=draft.transactional_id,
    )


def refused(partition: TopicPartition, refusal: Refusal) -> PartitionResult:
    return PartitionResult(
        partition=partition.partition,
        error_code=refusal.error_code,
        base_offset=refusal.base_offset,
        log_start_offset=refusal.log_start_offset,
        error_message=refusal.message,
    )
