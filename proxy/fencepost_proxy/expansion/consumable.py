"""Which fetched records a consumer would get: no markers, aborted records or records removed by compaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fencepost_proxy.errors import LimitError
from fencepost_proxy.wire.batch import BatchHeader, split_batches
from fencepost_proxy.wire.batch_scan import record_offset_deltas
from fencepost_proxy.wire.compression import MalformedBatch


class Aborted(NamedTuple):
    """A producer's aborted transaction, from a Fetch answer (read committed)."""

    producer_id: int
    first_offset: int


class ScanResult(NamedTuple):
    """`highest`: the highest consumable offset below the limit, or None. `next_offset`: where to fetch next."""

    highest: int | None
    next_offset: int | None


def consumable_below(
    limit: int, records: memoryview, aborted: Iterable[Aborted], *, from_offset: int, decompressed_bytes_max: int
) -> ScanResult:
    """For the records of one Fetch answer, read committed. `next_offset` None: it had no records."""
    to_come = sorted(aborted, key=lambda each: each.first_offset)
    open_ids: set[int] = set()
    highest: int | None = None
    next_offset: int | None = None
    for header, batch in split_batches(records):
        last = header.base_offset + header.last_offset_delta
        next_offset = last + 1
        while to_come and to_come[0].first_offset <= last:
            open_ids.add(to_come.pop(0).producer_id)
        if header.is_control:
            open_ids.discard(header.producer_id)
            continue
        if header.base_offset >= limit:
            break
        if last < from_offset or (header.is_transactional and header.producer_id in open_ids):
            continue
        found = _highest(header, batch, from_offset, limit, decompressed_bytes_max)
        highest = highest if found is None else found
    return ScanResult(highest, next_offset)


def _highest(header: BatchHeader, batch: memoryview, low: int, limit: int, bytes_max: int) -> int | None:
    last = header.base_offset + header.last_offset_delta
    if header.record_count == header.last_offset_delta + 1:
        return min(last, limit - 1)  # no record was removed
    if not header.record_count:
        return None
    try:
        deltas = record_offset_deltas(batch, header, decompressed_bytes_max=bytes_max)
    except (MalformedBatch, LimitError):
        return min(last, limit - 1)  # better to release a partition too late than too early
    offsets = [header.base_offset + delta for delta in deltas]
    return max((offset for offset in offsets if low <= offset < limit), default=None)
