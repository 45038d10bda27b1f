"""From a batch of a Produce request to its pending append, and from that to the batch that Kafka gets."""

from __future__ import annotations

from fencepost_policies.append import Refusal, where
from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM, Level, check_level
from fencepost_policies.values import value
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.events import AppendContext, PendingAppend, Placement
from fencepost_proxy.session.batches.reading import append_of, read_batch
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import fence_batch, zero_base_offset
from fencepost_proxy.wire.batch_scan import BatchScan, HeaderNames
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
)


def without_producer(records: memoryview) -> bytearray:
    """The batch as a producer that is not idempotent would have sent it."""
    return fence_batch(records, producer_id=-1, producer_epoch=-1, base_sequence=-1)


def batch_to_send(pending: PendingAppend) -> bytearray:
    """The batch to send to Kafka: fenced, if it has a fence."""
    fence = pending.placement.fence
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
    context: AppendContext = AppendContext()
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
        fields=draft.policy.fields,
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
        not_permitted = check_level(append, Level.OFF)
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
        transactional_id=draft.transactional_id,
        context=draft.context,
        placement=Placement(draft.deadline),
    )


def refused(partition: TopicPartition, refusal: Refusal) -> PartitionResult:
    return PartitionResult(
        partition=partition.partition,
        error_code=refusal.error_code,
        base_offset=refusal.base_offset,
        log_start_offset=refusal.log_start_offset,
        error_message=refusal.message,
    )
