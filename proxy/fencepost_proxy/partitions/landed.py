"""What lies in the log, compared with an append that may have landed there.

Reading it may take long, so it is done outside the event loop (`net/reads.py`) where it can be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fencepost_policies.values import value
from fencepost_proxy.errors import ProtocolError
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

if TYPE_CHECKING:
    from fencepost_proxy.partitions.events import Ticket


@value
class Landed:
    """An acknowledged batch, or one that was found in the log."""

    base_offset: int
    record_count: int
    digest: bytes
    write_id: bytes | None
    log_append_time_ms: int

    @property
    def end(self) -> int:
        return self.base_offset + self.record_count


def read_landed(batch: memoryview, offset: int, ticket: Ticket, names: HeaderNames, bytes_max: int) -> Landed | None:
    """What the log has at `offset`, None if no batch begins there (or it cannot be decoded).

    It has the ticket's digest if it has its records.
    """
    try:
        header = parse_batch_header(batch)
        if header.base_offset != offset or header.is_control:
            return None
        scan = scan_batch(batch, names, carrier_base=False, decompressed_bytes_max=bytes_max)
        digest = ticket.digest if _has_its_records(batch, header, scan, ticket, bytes_max) else scan.digest
    except ProtocolError:
        return None
    time_ms = header.max_timestamp_ms if header.is_log_append_time else -1
    return Landed(offset, header.record_count, digest, scan.write_id, time_ms)


def _has_its_records(batch: memoryview, header: BatchHeader, scan: BatchScan, ticket: Ticket, bytes_max: int) -> bool:
    """The broker may have written them anew."""
    if scan.digest == ticket.digest:
        return True
    # The broker replaced the timestamps, or the writer did when it made its named write again (Spark does, after a
    # restart): the rest is compared.
    replaced = header.is_log_append_time or (scan.write_id is not None and scan.write_id == ticket.append.write_id)
    if header.record_count != ticket.append.record_count or not (
        replaced or may_be_rewritten(scan.digest, ticket.digest)
    ):
        return False
    if replaced and same_bytes(scan.digest, ticket.digest):
        return True
    theirs, ours = (
        digest_batch(each, decompressed_bytes_max=bytes_max, ignore_timestamps=replaced)
        for each in (batch, ticket.records)
    )
    return theirs == ours
