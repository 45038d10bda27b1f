"""One Produce request that touches guarded partitions: its turns at their gates, and how its answers are put together.

What passed is forwarded in one request; what was refused is answered here, and both are merged into one response. The
partitions are waited for one after the other, in the order of topic and partition. Those that are granted block other
appends until they are sent, so they do not wait long for the rest: they are sent ahead (`CheckedProduce._send_ahead`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fencepost_policies.append import Refusal
from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM, Level, check_idempotence
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
NOTHING_DENIED: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class ProduceExchange:
    """`results` fills up with the final answer of each partition; `pending_appends` are its appends to guarded ones.

    `waiting_for` is the ticket offered last, None once all have a verdict. `admitted` block their partitions until they
    are sent or withdrawn, `admitted_at` – since when the first of them does. `sent` – the partitions whose batches went
    upstream. `alone` – it waits for one partition with none granted, and goes through all in order after that.
    `answer_by` – when the client has to be told something, monotonic seconds.
    `received_at` – when it was here whole; `submitted_at` – when `waiting_for` was offered; `sequencer_seconds` – how
    long it has waited at gates so far.
    `counted` – what of it concerns counted topics; `at_barrier` – it waits there, and has not come to the gates.
    `count_refused` – partitions refused there. `misread` – chains of batches that could be no tickets. `leveled` – what
    of it has to do with levels of idempotence. `querying` – questions to Kafka that its answer waits for;
    `starts_queried`
    – where its logs start was one; `said` – topics of which Kafka has answered whether its client may write.
    `denied` – topics that its client may not write, and Kafka's words; it has been asked before anything else was done.
    `notes` – of failed appends of a transaction that are not stored yet; None: it has not been asked whether there are.
    `readings` – what its batches say.
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
    counted: CountCheckedProduce | None = None
    at_barrier: bool = False
    count_refused: frozenset[TopicPartition] = frozenset()
    misread: list[PipelineKey] = field(default_factory=list)
    leveled: LeveledProduce | None = None
    querying: int = 0
    starts_queried: bool = False
    stated: frozenset[str] = frozenset()
    denied: Mapping[str, int] = field(default_factory=lambda: NOTHING_DENIED)
    notes: int | None = None
    readings: Readings | None = None

    @property
    def complete(self) -> bool:
        return all(key in self.results for key in self.partitions())

    @property
    def refused(self) -> bool:
        """Whether something of it has failed here. A known retry has its result too, and that is a success."""
        return any(self.refusals())

    def refusals(self) -> Iterator[PartitionResult]:
        """But for what Kafka itself does not take."""
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
        """What can be sent now: what is granted, and what needs no grant."""
        for key in self.partitions():
            if key not in self.results and key not in self.sent:
                pending = self.pending_appends.get(key)
                if pending is None or pending in self.admitted:
                    yield key

    def upstream_request(self) -> ProduceRequest | None:
        """What has passed and is not sent yet, stamped; None if there is nothing. acks=all as soon as one append is
        stamped.

        With acks=1 a leader could forget a conditional append that it acknowledged, and let a second writer win the
        same offset.
        """
        topics = self._only(set(self.unsent()))
        if not topics:
            return None
        acks = ACKS_ALL if self.admitted or self.request.acks == 0 else self.request.acks
        return replace(self.request, topics=topics, acks=acks)

    def request_for(self, pending: PendingAppend) -> ProduceRequest:
        """One append of it alone, with its new stamp."""
        return replace(self.request, topics=self._only({pending.partition}), acks=ACKS_ALL)

    def request_without(self, keys: Collection[TopicPartition]) -> ProduceRequest:
        """Those of its batches that go without their producer ids now."""
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
            goes_without = self.leveled is not None and key in self.leveled.without
            return replace(data, records=memoryview(without_producer(data.records))) if goes_without else data
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
    """The same in two parts: its header, and the records as they came."""
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
    """The ticket's batch as Kafka gets it: stamped, if it has a stamp."""
    fence = pending.fence
    if fence is None:
        # Kafka refuses a base offset other than 0, and ours is no concern of its.
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
    """What a turn needs to know of one guarded topic and of its own connection to make tickets."""

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
    """What the gate has to know of a batch. `scan` – what it says, where it was read already."""
    scan = scan or read_batch(
        partition,
        data.records,
        draft.names,
        carrier_base=draft.policy.carrier_base,
        bytes_max=draft.decompressed_bytes_max,
    )
    if isinstance(scan, Refusal):
        return scan
    assert data.records is not None
    where, header = f"topic={partition.topic} partition={partition.partition}", scan.header
    if header.is_control:
        return Refusal(Error.INVALID_RECORD, "control_batch", f"CONTROL_BATCH {where}: only brokers write these")
    if header.producer_id >= MADE_UP_IDS_FROM:
        not_permitted = check_idempotence(partition.topic, partition.partition, header.producer_id, Level.OFF)
        assert not_permitted is not None
        return not_permitted
    if header.producer_id in draft.shared_producer_ids:
        message = f"PRODUCER_ID_TAKEN {where}: producer id {header.producer_id} is the proxy's own"
        return Refusal(Error.POLICY_VIOLATION, "shared_producer_id", message)
    return PendingAppend(
        connection=draft.connection,
        partition=partition,
        append=append_of(partition, scan),
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
