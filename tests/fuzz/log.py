"""A minimal partition log for the fuzzer's broker: compares sequences and recognizes duplicates."""

from __future__ import annotations

import struct

from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.appends import batch_to_send
from fencepost_proxy.sequencer.events import BatchReadResult, Found, NotYet, OutOfRange, ProducerState
from fencepost_proxy.types import SEQUENCE_MODULUS, TopicPartition
from fencepost_proxy.wire.batch import require_single_batch, sequence_add, verify_crc
from fencepost_proxy.wire.produce import PartitionResult

SHARED = 7000
UNIX_SECONDS = 1_700_000_000.0
CORRUPT, OUT_OF_ORDER, INVALID_EPOCH, INVALID_RECORD = 2, 45, 47, 87
_REMEMBERED = 5
Appended = tuple[int, int, int]  # error code, base offset, log append time


class Log:
    def __init__(self, *, log_append_time_ms: int | None = None) -> None:
        self.log_append_time_ms = log_append_time_ms
        self.end = 0
        self.start = 0
        self.batches: list[tuple[int, int, bytes]] = []  # base, end, bytes
        self._producers: dict[int, tuple[int, int, list[tuple[int, int, int]]]] = {}  # epoch, next, (first, last, base)

    def append(self, records: bytes) -> Appended:
        try:
            header = require_single_batch(memoryview(records))
        except ProtocolError:
            return INVALID_RECORD, -1, -1
        if not verify_crc(memoryview(records)):
            return CORRUPT, -1, -1
        if header.base_offset or header.is_control:
            return INVALID_RECORD, -1, -1
        count, producer_id, epoch = header.record_count, header.producer_id, header.producer_epoch
        first, last = header.base_sequence, sequence_add(header.base_sequence, header.record_count - 1)
        recent: list[tuple[int, int, int]] = []
        if producer_id >= 0:
            known = self._producers.get(producer_id)
            if known is not None and epoch < known[0]:
                return INVALID_EPOCH, -1, -1
            if known is not None and epoch == known[0]:
                recent = known[2]
                for each in recent:
                    if each[:2] == (first, last):
                        return 0, each[2], self.log_append_time_ms or header.max_timestamp_ms
                if first != known[1]:
                    return OUT_OF_ORDER, -1, -1
            elif known is not None and first != 0:
                return OUT_OF_ORDER, -1, -1
        base = self.end
        self.end += count
        stored = struct.pack(">q", base) + bytes(records[8:])
        self.batches.append((base, self.end, stored))
        if producer_id >= 0:
            recent = [*recent, (first, last, base)][-_REMEMBERED:]
            self._producers[producer_id] = (epoch, (last + 1) % SEQUENCE_MODULUS, recent)
        return 0, base, -1 if self.log_append_time_ms is None else self.log_append_time_ms

    def move(self, count: int) -> None:
        """Append a marker, or a batch that bypasses the proxy."""
        self.end += count

    def truncate(self, end: int) -> None:
        """Truncate the log and the producer states."""
        truncated = [batch for _, upto, batch in self.batches if upto > end]
        self.batches = [each for each in self.batches if each[1] <= end]
        self.end = min(self.end, end)
        if truncated:
            self._producers.clear()

    def producer_state(self, producer_id: int) -> ProducerState | None:
        known = self._producers.get(producer_id)
        return None if known is None else ProducerState(known[0], known[1])

    def probe(self, offset: int) -> BatchReadResult:
        if offset < self.start:
            return OutOfRange()
        if offset >= self.end:
            return NotYet(self.end)
        for _, upto, batch in self.batches:
            if offset < upto:
                return Found(memoryview(batch))
        return NotYet(self.end)


def carry_out(
    effect: g.ReadLogEnd | g.ReadBatch | g.Resend | g.PublishBase,
    partition: TopicPartition,
    log: Log,
    bases: dict[TopicPartition, tuple[int, int]],
    *,
    queried_at: float,
    kind: str,
    error: int,
) -> g.Event:
    """The control client's response to a sequencer: the current state, or a failure."""
    failed = kind in ("unknown", "unreadable", "no-topic")
    match effect:
        case g.ReadLogEnd():
            if kind == "no-topic":
                return g.LogEndUnknown("deleted", 3)
            if failed or kind in ("not-yet", "deleted"):
                return g.LogEndUnknown("not now")
            return g.LogEndRead(
                g.LogEndSnapshot(
                    requested_at=queried_at,
                    log_end_offset=log.end,
                    log_start_offset=log.start,
                    producer_id=SHARED,
                    producer_state=log.producer_state(SHARED),
                    fence_base=bases.get(partition, (0, 0)),
                    open_transactions=frozenset({2} if kind == "open" else ()),
                    log_append_time=log.log_append_time_ms is not None,
                    expiration_seconds=86_400.0,
                    transactions_as_of=queried_at,
                    clock_offset_seconds=UNIX_SECONDS,
                )
            )
        case g.ReadBatch(pending, offset):
            if failed:
                return g.BatchRead(pending, g.Unreadable("not now"))
            if kind == "not-yet":
                return g.BatchRead(pending, g.NotYet(offset + error % 3))
            return g.BatchRead(pending, g.OutOfRange() if kind == "deleted" else log.probe(offset))
        case g.Resend(pending):
            if failed or kind in ("not-yet", "deleted"):
                return g.Resent(pending, None)
            if kind == "error" and error:
                return g.Resent(pending, PartitionResult(partition.partition, error))
            code, base, at = log.append(bytes(batch_to_send(pending)))
            return g.Resent(pending, PartitionResult(partition.partition, code, base, at, 0))
        case g.PublishBase(_, epoch, base, _):
            if not failed:
                bases[partition] = max(bases.get(partition, (0, 0)), (epoch, base))
            return g.BasePublished(not failed)
