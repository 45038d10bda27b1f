"""Kafka's primitive types: variable-length integers at their edges, strings at their limit, tagged fields."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fencepost_proxy.wire.primitives import (
    TAGS_MAX,
    CutOff,
    Malformed,
    join_tags,
    read_compact_nullable_string,
    read_compact_string,
    read_nullable_bytes,
    read_nullable_string,
    read_string,
    read_tags,
    read_uuid,
    read_uvarint,
    read_varint,
    read_varlong,
    split_tags,
    write_compact_nullable_string,
    write_nullable_string,
)


@pytest.mark.parametrize(
    ("read", "data", "value"),
    [
        (read_uvarint, b"\x00", 0),
        (read_uvarint, b"\x7f", 127),
        (read_uvarint, b"\xac\x02", 300),
        (read_uvarint, b"\xff\xff\xff\xff\x0f", 2**32 - 1),
        (read_uvarint, b"\x80\x00", 0),
        (read_varint, b"\x01", -1),
        (read_varint, b"\x02", 1),
        (read_varint, b"\xfe\xff\xff\xff\x0f", 2**31 - 1),
        (read_varint, b"\xff\xff\xff\xff\x0f", -(2**31)),
        (read_varlong, b"\x01", -1),
        (read_varlong, b"\xfe" + b"\xff" * 8 + b"\x01", 2**63 - 1),
        (read_varlong, b"\xff" * 9 + b"\x01", -(2**63)),
    ],
)
def test_integers_of_variable_length(read: Callable[[bytes, int], tuple[int, int]], data: bytes, value: int) -> None:
    assert read(b"x" + data + b"y", 1) == (value, 1 + len(data))


@pytest.mark.parametrize(
    ("read", "data", "reason"),
    [
        (read_uvarint, b"\xff\xff\xff\xff\x1f", "does not fit 32 bits"),
        (read_uvarint, b"\x80\x80\x80\x80\x80\x00", "longer than 5 bytes"),
        (read_varint, b"\xff\xff\xff\xff\x1f", "does not fit 32 bits"),
        (read_varlong, b"\xff" * 9 + b"\x02", "does not fit 64 bits"),
        (read_varlong, b"\x80" * 10 + b"\x00", "longer than 10 bytes"),
    ],
)
def test_integers_that_are_too_large(read: Callable[[bytes, int], tuple[int, int]], data: bytes, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        read(data, 0)


def test_string_may_have_at_most_32767_bytes() -> None:
    longest, longer = "ü" * 16_383 + "x", "ü" * 16_384
    for write, read in (
        (write_nullable_string, read_nullable_string),
        (write_compact_nullable_string, read_compact_nullable_string),
    ):
        out = bytearray()
        write(out, longest)
        assert read(out, 0) == (longest, len(out))
        with pytest.raises(ValueError, match="32768 bytes is longer than"):
            write(out, longer)
    with pytest.raises(Malformed, match="32768 bytes is longer"):
        read_compact_string(b"\x81\x80\x02" + longer.encode(), 0)


def test_invalid_nulls_and_lengths_are_malformed() -> None:
    assert read_nullable_string(b"\xff\xff", 0) == (None, 2)
    assert read_compact_nullable_string(b"\0", 0) == (None, 1)
    for read, data in (
        (read_string, b"\xff\xff"),
        (read_nullable_string, b"\xff\xfe"),
        (read_compact_string, b"\0"),
    ):
        with pytest.raises(Malformed):
            read(data, 0)
    with pytest.raises(Malformed, match="length -2"):
        read_nullable_bytes(memoryview(b"\xff\xff\xff\xfe"), 0)


def test_truncated_data_reports_how_many_bytes_it_needs() -> None:
    for read, data, needed in (
        (read_string, b"\0\x05abc", 7),
        (read_compact_string, b"\x06abc", 6),
        (read_tags, b"\x01\x00\x05abc", 8),
        (read_uuid, b"0123456789", 16),
    ):
        with pytest.raises(CutOff) as caught:
            read(data, 0)
        assert caught.value.needed == needed


def test_tagged_fields_section_is_kept_raw_and_splittable() -> None:
    section = b"\x02\x00\x01a\x80\x01\x00"
    assert read_tags(b"x" + section + b"y", 1) == (section, 8)
    assert split_tags(section) == [(0, b"a"), (128, b"")]
    assert join_tags(split_tags(section)) == section
    assert read_tags(b"\0", 0) == (b"", 1)
    assert read_tags(b"\x80\0", 0) == (b"", 2)
    assert split_tags(b"") == []


def test_too_many_tagged_fields_are_refused_unread() -> None:
    fields = b"".join(bytes([instance_id, 0]) for instance_id in range(TAGS_MAX))
    assert read_tags(bytes([TAGS_MAX]) + fields, 0)[1] == 1 + len(fields)
    with pytest.raises(Malformed, match=f"above the limit of {TAGS_MAX}"):
        read_tags(bytes([TAGS_MAX + 1]) + fields, 0)
    assert join_tags([]) == b""
