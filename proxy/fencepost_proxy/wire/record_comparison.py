"""Compares the records of an append one by one with those at its expected offsets, whatever batches those are in.

A client that sends records again after a restart may cut them into other batches than before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fencepost_policies.values import value
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.batch_scan import HeaderNames, write_id_of_record
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.primitives import MALFORMED, read_varint, reason_of
from fencepost_proxy.wire.records import payload_of, records_in

#: Reads of the log for one append: with more batches, it stays unknown whether the rest is there.
_READS_MAX = 100


@value
class Overlap:
    """The records of one batch in the log that are at offsets of the append.

    `end`: the offset after the batch. `equal`: how many equal the append's, timestamps included. `named`: how many of
    these have a write-id. `copied`: how many others have the write-id of the append's record. `missing`: how many are
    deleted.
    """

    end: int
    equal: int = 0
    named: int = 0
    copied: int = 0
    missing: int = 0


@dataclass(slots=True, eq=False)
class RecordComparison:
    """Of an append that expects `expected` with the log, batch by batch; `at` is the offset to read next."""

    where: TopicPartition
    expected: int
    record_count: int
    at: int = field(init=False)
    equal: int = 0
    named: int = 0
    copied: int = 0
    missing: int = 0
    _reads: int = 0
    _ours: list[tuple[int, bytes, bytes]] | None = None

    def __post_init__(self) -> None:
        self.at = self.expected

    def add(self, overlap: Overlap) -> None:
        self.at = max(overlap.end, self.at + 1)
        self.equal += overlap.equal
        self.named += overlap.named
        self.copied += overlap.copied
        self.missing += overlap.missing
        self._reads += 1

    def goes_on(self, log_end: int) -> bool:
        """Whether to read on: there are more offsets of the append in the log."""
        if self.at >= min(self.expected + self.record_count, log_end):
            return False
        if self._reads < _READS_MAX:
            return True
        self.missing += 1  # not read
        return False

    def overlap(
        self, batch: memoryview, records: memoryview, names: HeaderNames, *, decompressed_bytes_max: int
    ) -> Overlap:
        """`batch`: one in the log. `records`: the append's. Raises `MalformedBatch`, `LimitError`."""
        header = parse_batch_header(batch)
        end = header.base_offset + header.last_offset_delta + 1
        ours_header = parse_batch_header(records)
        if header.is_control or header.is_transactional != ours_header.is_transactional:
            return Overlap(end)  # a record of an aborted transaction is not there for its readers
        try:
            if self._ours is None:
                self._ours = [
                    (ours_header.base_timestamp_ms + delta, attributes, rest)
                    for attributes, delta, rest in records_in(
                        payload_of(records, ours_header, decompressed_bytes_max), ours_header.record_count
                    )
                ]
            ours = self._ours
            equal = named = copied = compared = 0
            theirs = records_in(payload_of(batch, header, decompressed_bytes_max), header.record_count)
            for attributes, delta, rest in theirs:
                offset_delta, body_at = read_varint(rest, 0)
                index = header.base_offset + offset_delta - self.expected
                if not 0 <= index < len(ours):
                    continue
                compared += 1
                timestamp, our_attributes, our_rest = ours[index]
                same_body = attributes == our_attributes and rest[body_at:] == our_rest[read_varint(our_rest, 0)[1] :]
                if same_body and timestamp == header.base_timestamp_ms + delta:
                    equal += 1
                    named += write_id_of_record(our_rest, names, self.where) is not None
                else:
                    write_id = write_id_of_record(our_rest, names, self.where)
                    copied += write_id is not None and write_id == write_id_of_record(rest, names, self.where)
        except MalformedBatch:
            raise
        except MALFORMED as error:
            raise MalformedBatch(f"malformed record batch: {reason_of(error)}") from error
        first, last = max(header.base_offset, self.expected), min(end, self.expected + len(ours))
        return Overlap(end, equal, named, copied, max(0, last - first - compared))
