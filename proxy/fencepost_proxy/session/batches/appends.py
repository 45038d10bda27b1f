"""From a batch of a Produce request to its append, and from that to the batch that Kafka gets."""

from __future__ import annotations

from fencepost_policies.append import Append, Refusal, where
from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM, Level, check_level
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.batches.reading import append_of
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import fence_batch, zero_base_offset
from fencepost_proxy.wire.batch_scan import BatchScan
from fencepost_proxy.wire.produce import PartitionResult


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


def checked_append(
    partition: TopicPartition, scan: BatchScan | Refusal, shared_producer_ids: frozenset[int]
) -> Append | Refusal:
    """What a batch says; a refusal if clients may not append it to a checked topic."""
    if isinstance(scan, Refusal):
        return scan
    append, header = append_of(partition, scan), scan.header
    if header.is_control:
        message = f"CONTROL_BATCH {where(append)}: only brokers write these"
        return Refusal(Error.INVALID_RECORD, "control_batch", message)
    if header.producer_id >= MADE_UP_IDS_FROM:
        not_permitted = check_level(append, Level.OFF)
        assert not_permitted is not None
        return not_permitted
    if header.producer_id in shared_producer_ids:
        message = f"PRODUCER_ID_TAKEN {where(append)}: producer id {header.producer_id} is the proxy's own"
        return Refusal(Error.POLICY_VIOLATION, "shared_producer_id", message)
    return append


def refused(partition: TopicPartition, refusal: Refusal) -> PartitionResult:
    return PartitionResult(
        partition=partition.partition,
        error_code=refusal.error_code,
        base_offset=refusal.base_offset,
        log_start_offset=refusal.log_start_offset,
        error_message=refusal.message,
    )
