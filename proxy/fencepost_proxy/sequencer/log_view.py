"""Reads of a partition's log, and the comparison of what they find with an append.

Reading a batch may take long, so `services/log_reader.py` does it outside the event loop where possible.
"""

from __future__ import annotations

from contextlib import suppress
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
from fencepost_proxy.wire.record_comparison import Overlap


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

    def retry(self, now: float, *, late: bool = False) -> None:
        self.retry_at = now + (self.limits.late_read_seconds if late else self.limits.read_retry_seconds)

    def retry_is_due(self, now: float) -> bool:
        if self.retry_at is None or self.retry_at > now:
            return False
        self.retry_at = None
        return True

    def decode(self, result: BatchReadResult | None, offset: int, pending: PendingAppend) -> AppendedBatch | None:
        return self._decoded(result, offset, pending).appended_batch

    def overlap(self, found: Found, offset: int, pending: PendingAppend) -> Overlap | None:
        """None: the batch cannot be decoded."""
        return self._decoded(found, offset, pending).overlap

    def _decoded(self, result: BatchReadResult | None, offset: int, pending: PendingAppend) -> Found:
        if not isinstance(result, Found):
            return _NOTHING
        if result.appended_batch_at == offset:
            return result
        return decoded(result.batch, offset, pending, self.names, self.limits.decompressed_bytes_max)


_NOTHING = Found(memoryview(b""))


def decoded(batch: memoryview, offset: int, pending: PendingAppend, names: HeaderNames, bytes_max: int) -> Found:
    """The batch that contains `offset`, compared with the append: as a whole, or else record by record."""
    appended_batch = read_appended_batch(batch, offset, pending, names, bytes_max)
    overlap = None
    if pending.outcome.comparison is not None and (appended_batch is None or appended_batch.digest != pending.digest):
        with suppress(ProtocolError):
            overlap = pending.outcome.comparison.overlap(
                batch, pending.records, names, decompressed_bytes_max=bytes_max
            )
    return Found(batch, offset, appended_batch, overlap)


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
        same_times = _has_its_records(batch, header, scan, pending, bytes_max)
        is_equal = same_times or (
            header.is_log_append_time and _has_its_records(batch, header, scan, pending, bytes_max, replaced_times=True)
        )
    except ProtocolError:
        return None
    digest = pending.digest if is_equal else scan.digest
    time_ms = header.max_timestamp_ms if header.is_log_append_time else -1
    return AppendedBatch(offset, header.record_count, digest, scan.write_id, time_ms, same_times=same_times)


def _has_its_records(
    batch: memoryview,
    header: BatchHeader,
    scan: BatchScan,
    pending: PendingAppend,
    bytes_max: int,
    *,
    replaced_times: bool = False,
) -> bool:
    """Whether the records are equal, although the broker may have rewritten the batch, and replaced their times."""
    if scan.digest == pending.digest:
        return True
    if header.record_count != pending.append.record_count or not (
        replaced_times or may_be_rewritten(scan.digest, pending.digest)
    ):
        return False
    if replaced_times and same_bytes(scan.digest, pending.digest):
        return True
    theirs, ours = (
        digest_batch(each, decompressed_bytes_max=bytes_max, ignore_timestamps=replaced_times)
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
    header, fence = parse_batch_header(found.batch), pending.placement.fence
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
    header, fence = parse_batch_header(found.batch), pending.placement.fence
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
