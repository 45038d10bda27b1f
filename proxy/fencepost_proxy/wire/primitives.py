"""Readers and writers of Kafka's primitive types.

A reader takes data (`bytes`, `bytearray` or a byte `memoryview`) and a position. It returns the value and the position
after it, and copies only what it returns. On bad input it raises `Malformed`, or `IndexError` or `struct.error` for a
truncated field of fixed size. Callers catch `MALFORMED` and raise their own error with `reason_of(error)`.

Source: the protocol guide's "Protocol Primitive Types"; ByteUtils.java for the varints; KIP-482 for compact types and
tagged fields.
"""

from __future__ import annotations

from functools import lru_cache
from struct import Struct
from struct import error as StructError
from uuid import UUID

Bytes = bytes | bytearray | memoryview

INT16 = Struct(">h")
INT32 = Struct(">i")
INT64 = Struct(">q")

#: Kafka's limit in both encodings.
STRING_BYTES_MAX = 0x7FFF


class Malformed(ValueError):
    """The bytes violate the protocol; the text is a reason to log."""


class CutOff(Malformed):
    """The data ends inside a field. `needed` is the data length up to the field's end."""

    def __init__(self, needed: int) -> None:
        super().__init__("truncated field")
        self.needed = needed


#: All exceptions of readers. `UnicodeDecodeError` and `Malformed` are `ValueError`s.
MALFORMED = (ValueError, IndexError, StructError)


def reason_of(error: Exception) -> str:
    """Text to log for an error of `MALFORMED`, without record contents."""
    if isinstance(error, UnicodeDecodeError):
        return "string is not UTF-8"
    if isinstance(error, Malformed):
        return str(error)
    return "truncated field"


# --- variable-length integers -----------------------------------------------------------------------------------------


def read_uvarint(data: Bytes, at: int) -> tuple[int, int]:
    """UNSIGNED_VARINT: 32 bits in at most 5 bytes."""
    value = data[at]
    at += 1
    if value < 0x80:
        return value, at
    value &= 0x7F
    bit_offset = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << bit_offset
        if byte < 0x80:
            break
        bit_offset += 7
        if bit_offset > 28:
            raise Malformed("variable-length integer is longer than 5 bytes")
    if value > 0xFFFFFFFF:
        raise Malformed("variable-length integer does not fit 32 bits")
    return value, at


def read_varint(data: Bytes, at: int) -> tuple[int, int]:
    """VARINT: zigzag, 32 bits."""
    value = data[at]
    if value < 0x80:
        return (value >> 1) ^ -(value & 1), at + 1
    second = data[at + 1]
    if second < 0x80:
        return ((value & 0x7F) >> 1 | second << 6) ^ -(value & 1), at + 2
    value, at = read_uvarint(data, at)
    return (value >> 1) ^ -(value & 1), at


def read_varlong(data: Bytes, at: int) -> tuple[int, int]:
    """VARLONG: zigzag, 64 bits in at most 10 bytes."""
    value = data[at]
    if value < 0x80:
        return (value >> 1) ^ -(value & 1), at + 1
    value = 0
    bit_offset = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << bit_offset
        if byte < 0x80:
            break
        bit_offset += 7
        if bit_offset > 63:
            raise Malformed("variable-length integer is longer than 10 bytes")
    if value > 0xFFFFFFFFFFFFFFFF:
        raise Malformed("variable-length integer does not fit 64 bits")
    return (value >> 1) ^ -(value & 1), at


def write_uvarint(out: bytearray, value: int) -> None:
    """Appends a non-negative integer, 7 bits to a byte."""
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)


def write_varlong(out: bytearray, value: int) -> None:
    """Appends a zigzag integer; VARINT and VARLONG have the same form."""
    write_uvarint(out, (value << 1) ^ (value >> 63))


# --- strings ----------------------------------------------------------------------------------------------------------


def _text(data: Bytes, at: int, length: int) -> tuple[str, int]:
    end = at + length
    if length > STRING_BYTES_MAX:
        raise Malformed(f"string of {length} bytes is longer than the protocol's limit of {STRING_BYTES_MAX}")
    if end > len(data):
        raise CutOff(end)
    return str(data[at:end], "utf-8"), end


def read_nullable_string(data: Bytes, at: int) -> tuple[str | None, int]:
    (length,) = INT16.unpack_from(data, at)
    if length < 0:
        if length != -1:
            raise Malformed(f"string has length {length}")
        return None, at + 2
    return _text(data, at + 2, length)


def read_string(data: Bytes, at: int) -> tuple[str, int]:
    (length,) = INT16.unpack_from(data, at)
    if length < 0:
        raise Malformed(f"non-nullable string has length {length}")
    return _text(data, at + 2, length)


def read_compact_nullable_string(data: Bytes, at: int) -> tuple[str | None, int]:
    length = data[at]
    if length < 0x80:
        at += 1
    else:
        length, at = read_uvarint(data, at)
    if length == 0:
        return None, at
    return _text(data, at, length - 1)


def read_compact_string(data: Bytes, at: int) -> tuple[str, int]:
    length = data[at]
    if length < 0x80:
        at += 1
    else:
        length, at = read_uvarint(data, at)
    if length == 0:
        raise Malformed("non-nullable string is null")
    return _text(data, at, length - 1)


def _encoded(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > STRING_BYTES_MAX:
        raise ValueError(f"string of {len(encoded)} bytes is longer than the protocol's limit of {STRING_BYTES_MAX}")
    return encoded


def write_nullable_string(out: bytearray, text: str | None) -> None:
    if text is None:
        out += b"\xff\xff"
        return
    encoded = _encoded(text)
    out += INT16.pack(len(encoded))
    out += encoded


def write_compact_nullable_string(out: bytearray, text: str | None) -> None:
    if text is None:
        out.append(0)
        return
    encoded = _encoded(text)
    write_uvarint(out, len(encoded) + 1)
    out += encoded


# --- bytes ------------------------------------------------------------------------------------------------------------


def read_nullable_bytes(data: memoryview, at: int) -> tuple[memoryview | None, int]:
    """NULLABLE_BYTES and RECORDS, as a view."""
    (length,) = INT32.unpack_from(data, at)
    at += 4
    if length < 0:
        if length != -1:
            raise Malformed(f"byte field has length {length}")
        return None, at
    end = at + length
    if end > len(data):
        raise CutOff(end)
    return data[at:end], end


def read_compact_nullable_bytes(data: memoryview, at: int) -> tuple[memoryview | None, int]:
    """COMPACT_NULLABLE_BYTES and COMPACT_RECORDS, as a view."""
    length, at = read_uvarint(data, at)
    if length == 0:
        return None, at
    end = at + length - 1
    if end > len(data):
        raise CutOff(end)
    return data[at:end], end


# --- arrays -----------------------------------------------------------------------------------------------------------


def read_array_count(data: Bytes, at: int, item_bytes_min: int, *, bytes_total: int | None = None) -> tuple[int, int]:
    """Count of a non-null ARRAY. A count that cannot fit the remaining bytes is refused before any allocation.

    `bytes_total`: final length of the data, if `data` is only a prefix.
    """
    (count,) = INT32.unpack_from(data, at)
    at += 4
    left = (len(data) if bytes_total is None else bytes_total) - at
    if not 0 <= count * item_bytes_min <= left:
        raise _misfit(count, left)
    return count, at


def read_compact_array_count(
    data: Bytes, at: int, item_bytes_min: int, *, bytes_total: int | None = None
) -> tuple[int, int]:
    """Count of a non-null COMPACT_ARRAY, checked as in `read_array_count`."""
    count = data[at]
    if count < 0x80:
        at += 1
    else:
        count, at = read_uvarint(data, at)
    count -= 1
    left = (len(data) if bytes_total is None else bytes_total) - at
    if not 0 <= count * item_bytes_min <= left:
        raise _misfit(count, left)
    return count, at


def _misfit(count: int, bytes_left: int) -> Malformed:
    if count < 0:
        return Malformed("non-nullable array is null")
    return Malformed(f"array of {count} items does not fit the remaining {bytes_left} bytes")


# --- UUID -------------------------------------------------------------------------------------------------------------


def read_uuid(data: Bytes, at: int) -> tuple[UUID, int]:
    end = at + 16
    if end > len(data):
        raise CutOff(end)
    return _uuid(bytes(data[at:end])), end


@lru_cache(maxsize=4096)
def _uuid(raw: bytes) -> UUID:
    """Cached: topic ids repeat, and creating a UUID takes as long as reading the rest of a small message."""
    return UUID(bytes=raw)


# --- tagged fields (KIP-482) ------------------------------------------------------------------------------------------
#
# A *section* ends a flexible structure: a count, then tag, size and bytes of each field. Sections are kept as raw bytes
# including the count, so that unknown fields survive. b"" is the empty section.


#: Kafka assigns at most 5 per structure. The limit bounds CPU time: a frame has room for millions.
TAGS_MAX = 64
#: The empty section in a message: writers write `section or NO_TAGS`.
NO_TAGS = b"\0"


def read_tags(data: Bytes, at: int) -> tuple[bytes, int]:
    """The raw section at `at`, b"" if empty."""
    if data[at] == 0:
        return b"", at + 1
    start = at
    count, at = read_uvarint(data, at)
    if count > TAGS_MAX:
        raise Malformed(f"{count} tagged fields in one structure, above the limit of {TAGS_MAX}")
    if count * 2 > len(data) - at:
        raise CutOff(at + count * 2)
    for _ in range(count):
        _, at = read_uvarint(data, at)
        size, at = read_uvarint(data, at)
        at += size
        if at > len(data):
            raise CutOff(at)
    return (bytes(data[start:at]) if count else b""), at


def split_tags(section: bytes) -> list[tuple[int, bytes]]:
    """The fields of a section, in order: (tag, contents)."""
    if not section:
        return []
    count, at = read_uvarint(section, 0)
    fields = []
    for _ in range(count):
        tag, at = read_uvarint(section, at)
        size, at = read_uvarint(section, at)
        if at + size > len(section):
            raise CutOff(at + size)
        fields.append((tag, section[at : at + size]))
        at += size
    return fields


def join_tags(fields: list[tuple[int, bytes]]) -> bytes:
    """A section of these fields, which must be in ascending tag order; b"" for none."""
    if not fields:
        return b""
    out = bytearray()
    write_uvarint(out, len(fields))
    for tag, contents in fields:
        write_uvarint(out, tag)
        write_uvarint(out, len(contents))
        out += contents
    return bytes(out)
