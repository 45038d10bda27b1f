"""The keys of a batch's records."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_proxy.errors import LimitError
from fencepost_proxy.wire.batch import HEADER_BYTES
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.keys import record_keys
from tests.support.batches import batch


def _keys(records: memoryview, bytes_max: int = 1 << 20) -> list[bytes | None]:
    return list(record_keys(records, decompressed_bytes_max=bytes_max))


@given(key=st.none() | st.binary(max_size=300), count=st.integers(1, 5), codec=st.sampled_from((0, 1, 2, 3, 4)))
def test_each_record_has_its_key(key: bytes | None, count: int, codec: int) -> None:
    assert _keys(batch(*(b"v" * 100,) * count, key=key, compression=codec)) == [key] * count


def test_null_key_differs_from_empty_key() -> None:
    assert _keys(batch(b"v")) == [None]
    assert _keys(batch(b"v", key=b"")) == [b""]


def test_they_are_unpacked_under_a_bound() -> None:
    with pytest.raises(LimitError):
        _keys(batch(bytes(5000), key=b"k", compression=1), bytes_max=1000)


@given(st.data())
def test_mutated_batch_has_two_keys_or_is_malformed(data: st.DataObject) -> None:
    whole = bytearray(batch(b"value", b"value", key=b"key"))
    at = data.draw(st.integers(HEADER_BYTES, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    try:
        keys = _keys(memoryview(bytes(whole)))
    except MalformedBatch:
        return
    assert len(keys) == 2


def test_bytes_after_the_records_are_malformed() -> None:
    with pytest.raises(MalformedBatch, match="extra bytes"):
        _keys(memoryview(bytes(batch(b"v", key=b"k")) + b"\0"))
