"""Reads of a partition's log, and the comparison of what they find with an append.

Reading a batch may take long, so `services/log_reader.py` does it outside the event loop where possible.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.sequencer.events import (
    AppendedBatch,
    BatchReadResult,
    Effect,
    Found,
    PendingAppend,
    ReadBatch,
    SequencerLimits,
)
from fencepost_proxy.types import SEQUENCE_MODULUS, TopicPartition
from fencepost_proxy.wire.batch import BatchHeader, parse_batch_header
from fencepost_proxy.wire.batch_digest import digest_batch, may_be_rewritten, same_bytes
from fencepost_proxy.wire.batch_scan import BatchScan, HeaderNames, scan_batch


@dataclass(slots=True, eq=False)
class LogView:
    """What a sequencer requests of its partition's log, and when it requests again (`retry_at`).

    `names`: the record headers that carry the expected offset. `effects`: of the sequencer's present call.
    """

    partition: TopicPartition
    limits: SequencerLimits
    names: HeaderNames
    effects: list[Effect]
    retry_at: float | None = None

    def read(self, pending: PendingAppend, offset: int) -> None:
        self.effects.append(ReadBatch(pending, offset))

    def retry(self, now: float) -> None:
        self.retry_at = now + self.limits.read_retry_seconds

    def retry_is_due(self, now: float) -> bool:
        if self.retry_at is None or self.retry_at > now:
            return False
        self.retry_at = None
        return True

    def decode(self, result: BatchReadResult | None, offset: int, pending: PendingAppend) -> AppendedBatch | None:
        if not isinstance(result, Found):
            return None
        if result.appended_batch_at == offset:
            return result.appended_batch
        return read_appended_batch(result.batch, offset, pending, self.names, self.limits.decompressed_bytes_max)


def read_appended_batch(
    batch: memoryview, offset: int, pending: PendingAppend, names: HeaderNames, bytes_max: int
) -> AppendedBatch | None:
    """The batch at `offset`; None if no batch begins there, or it cannot be decoded.

    Its digest is the append's if it has the same records.
    """
    try:
        header = parse_batch_header(batch)
        if header.base_offset != offset or header.is_control:
            return None
        scan = scan_batch(batch, names, pending.partition, source_is_base=False, decompressed_bytes_max=bytes_max)
        digest = pending.digest if _has_its_records(batch, header, scan, pending, bytes_max) else scan.digest
    except ProtocolError:
        return None
    time_ms = header.max_timestamp_ms if header.is_log_append_time else -1
    return AppendedBatch(offset, header.record_count, digest, scan.write_id, time_ms)


def _has_its_records(
    batch: memoryview, header: BatchHeader, scan: BatchScan, pending: PendingAppend, bytes_max: int
) -> bool:
    """Whether the records are equal, although the broker may have rewritten the batch."""
    if scan.digest == pending.digest:
        return True
    # Timestamps may differ: the broker replaced them, or the writer did when it repeated a write-id (Spark, after a
    # restart). Compare the rest.
    replaced = header.is_log_append_time or (scan.write_id is not None and scan.write_id == pending.append.write_id)
    if header.record_count != pending.append.record_count or not (
        replaced or may_be_rewritten(scan.digest, pending.digest)
    ):
        return False
    if replaced and same_bytes(scan.digest, pending.digest):
        return True
    theirs, ours = (
        digest_batch(each, decompressed_bytes_max=bytes_max, ignore_timestamps=replaced)
        for each in (batch, pending.records)
    )
    return theirs == ours


def is_compacted(found: Found, pending: PendingAppend) -> bool:
    """It was as long as the append's batch, and some of its records are deleted."""
    header = parse_batch_header(found.batch)
    return header.record_count <= header.last_offset_delta == pending.append.record_count - 1


def end_of_other_sequence(found: Found, pending: PendingAppend) -> int | None:
    """End of the found batch, if the append may follow it; None if it is that append, or has its sequence or a later
    one."""
    header, fence = parse_batch_header(found.batch), pending.fence
    if fence is None:
        return None
    end = header.base_offset + header.last_offset_delta + 1
    if header.producer_id != fence.producer_id:
        return end
    if header.producer_epoch != fence.producer_epoch:
        return end if header.producer_epoch < fence.producer_epoch else None
    ahead = (fence.base_sequence - header.base_sequence) % SEQUENCE_MODULUS
    return end if header.last_offset_delta < ahead < SEQUENCE_MODULUS // 2 else None


def has_its_sequence(found: Found, pending: PendingAppend, at: int | None = None) -> bool:
    """Whether the record at `at`, or the first one of the batch, has the append's producer id, epoch and sequence."""
    header, fence = parse_batch_header(found.batch), pending.fence
    if fence is None:
        return False
    skipped = 0 if at is None else at - header.base_offset
    sequence = (header.base_sequence + skipped) % SEQUENCE_MODULUS
    return (header.producer_id, header.producer_epoch, sequence) == (
        fence.producer_id,
        fence.producer_epoch,
        fence.base_sequence,
    )


def producer_of(result: BatchReadResult | None) -> tuple[int | None, bool]:
    """Producer id of the batch found there, and whether it is a marker."""
    if not isinstance(result, Found):
        return None, False
    try:
        header = parse_batch_header(result.batch)
    except ProtocolError:
        return None, False
    return header.producer_id, header.is_control
