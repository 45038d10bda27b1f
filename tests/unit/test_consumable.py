"""Which records of a log a consumer would be given."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from fencepost_proxy.expansion.consumable import Aborted, consumable_below
from fencepost_proxy.wire.uncompressed_batch import encode_uncompressed_batch

_HEADER = struct.Struct(">qiibIhiqqqhii")
_TRANSACTIONAL, _CONTROL = 0x10, 0x20


def _batch(base: int, count: int, *, attributes: int = 0, producer: int = -1, last: int | None = None) -> bytes:
    """`last` – the last offset of its range, where compaction has left `count` records, the first ones."""
    raw = bytearray(encode_uncompressed_batch([(b"k", b"v")] * count, 0))
    fields = list(_HEADER.unpack_from(raw))
    fields[0], fields[5], fields[9] = base, attributes, producer
    if last is not None:
        fields[6] = last - base
    _HEADER.pack_into(raw, 0, *fields)
    return bytes(raw)


def _marker(offset: int, producer: int) -> bytes:
    return _batch(offset, 1, attributes=_TRANSACTIONAL | _CONTROL, producer=producer)


def _data(base: int, count: int, producer: int) -> bytes:
    return _batch(base, count, attributes=_TRANSACTIONAL, producer=producer)


@pytest.mark.parametrize(
    ("batches", "aborted", "limit", "highest"),
    [
        ([_batch(0, 5)], [], 5, 4),
        ([_batch(0, 5)], [], 3, 2),
        ([_batch(0, 5), _batch(5, 5)], [], 5, 4),
        ([], [], 5, None),
        ([_batch(7, 1)], [], 5, None),  # everything below was deleted
        ([_batch(0, 5), _data(5, 1, 1), _marker(6, 1)], [], 7, 5),
        ([_batch(0, 5), _data(5, 1, 1), _marker(6, 1)], [(1, 5)], 7, 4),
        ([_data(0, 2, 1), _data(2, 2, 2), _marker(4, 1)], [(1, 0)], 5, 3),
        # One producer, first aborted, then committed.
        ([_data(0, 1, 1), _marker(1, 1), _data(2, 1, 1), _marker(3, 1)], [(1, 0)], 4, 2),
        # And the other way round.
        ([_data(0, 1, 1), _marker(1, 1), _data(2, 1, 1), _marker(3, 1)], [(1, 2)], 4, 0),
        # Compaction took what was above: two records are left of a range of ten.
        ([_batch(0, 2, last=9)], [], 10, 1),
        ([_batch(0, 2, last=9)], [], 1, 0),
        # Kafka keeps an empty batch for a producer's last sequence.
        ([_batch(0, 3), _batch(3, 0, last=9)], [], 10, 2),
    ],
)
def test_the_last_record_below_the_limit(
    batches: Sequence[bytes], aborted: Sequence[tuple[int, int]], limit: int, highest: int | None
) -> None:
    probed = consumable_below(
        limit,
        memoryview(b"".join(batches)),
        [Aborted(*each) for each in aborted],
        from_offset=0,
        decompressed_bytes_max=1 << 20,
    )
    assert probed.highest == highest


def test_result_includes_the_next_offset() -> None:
    records = memoryview(_batch(0, 5) + _batch(5, 5, last=20)[:-3])
    probed = consumable_below(50, records, [], from_offset=0, decompressed_bytes_max=1 << 20)
    assert probed == (4, 5)
    assert consumable_below(50, memoryview(b""), [], from_offset=0, decompressed_bytes_max=1).next_offset is None


def test_records_below_the_start_offset_are_ignored() -> None:
    probed = consumable_below(10, memoryview(_batch(0, 2, last=9)), [], from_offset=2, decompressed_bytes_max=1 << 20)
    assert probed.highest is None
    assert probed.next_offset == 10
