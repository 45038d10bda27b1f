"""Compare what lies in the log with an append that may have been appended there.

Reading a batch may take long, so `services/log_reader.py` does it outside the event loop where possible.
"""

from __future__ import annotations

from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.sequencer.events import AppendedBatch, PendingAppend
from fencepost_proxy.wire.batch import (
    BatchHeader,
    BatchScan,
    HeaderNames,
    digest_batch,
    may_be_rewritten,
    parse_batch_header,
    same_bytes,
    scan_batch,
)


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
        scan = scan_batch(batch, names, source_is_base=False, decompressed_bytes_max=bytes_max)
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
