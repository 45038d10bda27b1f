"""The reader by which tests hold Kafka's log against what was told."""

from __future__ import annotations

import struct

from tests.support.raw import Record, batch, read_batches, sign

_LAST_OFFSET_DELTA, _RECORDS = 23, 57


def test_partially_compacted_batch_keeps_its_end_offset() -> None:
    # Given a batch of three records at 28, of which only the last one is left, as Kafka leaves it.
    left = bytearray(batch(Record(b"the last one", key=b"the same"), base_offset=28))
    struct.pack_into(">i", left, _LAST_OFFSET_DELTA, 2)
    sign(left)
    # And the next one, of which none is left.
    empty = bytearray(batch(Record(b"", key=b""), base_offset=31)[: _RECORDS + 4])
    struct.pack_into(">i", empty, 8, len(empty) - 12)
    struct.pack_into(">i", empty, _RECORDS, 0)
    sign(empty)

    # When they are read
    first, second = read_batches(bytes(left + empty))

    # Then whoever reads on does so behind them, not within (where Kafka would give the same batch for ever).
    assert (first.values, first.next_offset) == ((b"the last one",), 31)
    assert (second.values, second.next_offset) == ((), 32)
