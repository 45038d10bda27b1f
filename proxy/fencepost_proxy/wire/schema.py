"""A lossless codec for any Kafka message, from Kafka's JSON schemas.

The schemas are in `schemas.json`, a line for each message, from a release of Kafka (`python -m tests.pages.schemas`).

Unlike the codecs of client libraries, this one keeps unknown tagged fields at every level (`Message.unknown_tags`). As
in Kafka, a known tagged field with its default value is not written, and tagged fields are written in ascending order.
Each schema and version is compiled once, into a pair of closures, and a layout to skip over its values (`layouts.py`).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from uuid import UUID

from fencepost_proxy.errors import LimitError
from fencepost_proxy.types import NO_TOPIC_ID
from fencepost_proxy.wire.layouts import (
    COMPACT,
    COMPACT_STRUCTS,
    FIXED,
    LONG,
    LONG_STRUCTS,
    NULLABLE,
    SHORT,
    TAGS,
    Layout,
    joined,
)
from fencepost_proxy.wire.primitives import (
    INT16,
    INT32,
    NO_TAGS,
    CutOff,
    Malformed,
    join_tags,
    read_compact_nullable_string,
    read_compact_string,
    read_nullable_string,
    read_string,
    read_tags,
    read_uuid,
    read_uvarint,
    split_tags,
    write_compact_nullable_string,
    write_nullable_string,
    write_uvarint,
)


class Message(SimpleNamespace):
    """A request, a response, or a struct in one: Kafka's fields as attributes in snake_case.

    Types: int, str, bytes (`bytes` and `records`), bool, float, `uuid.UUID`, list, Message, None for null. A decoded
    message has every field of the schema, with Kafka's default if the version lacks it. A message to encode may omit
    fields that have their default: `Message(name="t", configs=[])`. Encoding raises `TypeError` for an unknown
    attribute.
    """

    #: (tag, value bytes) of unknown tagged fields.
    unknown_tags: tuple[tuple[int, bytes], ...] = ()


class LimitedBytes(bytes):
    """Bytes from which at most `items_left` array elements are read: a decoded element can take 100 times its bytes."""

    items_left: int

    def take(self, count: int) -> None:
        """Raises `LimitError`."""
        self.items_left -= count
        if self.items_left < 0:
            raise LimitError("more array elements than the limit")


_Read = Callable[[bytes, int], tuple[Any, int]]
_Write = Callable[[bytearray, Any], None]


class Codec(NamedTuple):
    """`read(data, pos) -> (value, end)` raises `MALFORMED`; `write(out, value)` raises `ValueError` or `TypeError`.

    Every length is checked against the remaining bytes.
    """

    read: _Read
    write: _Write
    layout: Layout = ()


class Parts(NamedTuple):
    """Codecs of what comes before an array of a message, of its elements, and of what comes after it.

    `compact`: whether the count of the array is a varint, as in flexible versions.
    """

    before: Codec
    element: Codec
    after: Codec
    compact: bool


class _Field(NamedTuple):
    name: str
    codec: Codec
    default: Callable[[], Any]


_FIXED: Final = {
    "int8": struct.Struct(">b"),
    "int16": INT16,
    "uint16": struct.Struct(">H"),
    "int32": INT32,
    "uint32": struct.Struct(">I"),
    "int64": struct.Struct(">q"),
    "float64": struct.Struct(">d"),
    "bool": struct.Struct(">?"),
}
_EVERY: Final = 32767


def _versions(text: str | None) -> tuple[int, int]:
    """Parses `3-5`, `3+`, `3`, `none` or nothing into (first, last); `none` and nothing give an empty range."""
    if not text or text == "none":
        return 1, 0
    first, dash, last = text.removesuffix("+").partition("-")
    return int(first), int(last) if dash else (_EVERY if text.endswith("+") else int(first))


def _in(version: int, text: str | None) -> bool:
    first, last = _versions(text)
    return first <= version <= last


@cache
def _lines() -> dict[str, str]:
    """The schemas as text: few of them are ever needed."""
    text = Path(__file__).with_name("schemas.json").read_text("utf-8")
    return dict(re.findall(r'(?m)^"(\w+)": (.*?),?$', text))


@cache
def _schema(name: str) -> dict[str, Any] | None:
    line = _lines().get(name)
    return None if line is None else json.loads(line)


def valid_versions(name: str) -> tuple[int, int] | None:
    """(min, max) version of a message such as `MetadataRequest`; None without a schema."""
    schema = _schema(name)
    return _versions(schema["validVersions"]) if schema is not None else None


@cache
def codec(name: str, version: int) -> Codec | None:
    """The codec of a message such as `MetadataRequest`; None without a schema of that version."""
    schema = _schema(name)
    if schema is None or not _in(version, schema["validVersions"]):
        return None
    structs = {common["name"]: common["fields"] for common in schema.get("commonStructs", [])}
    compiled, _ = _struct(name, schema["fields"], structs, version, _in(version, schema["flexibleVersions"]))
    return compiled


_Structs = dict[str, list[dict[str, Any]]]


@cache
def parts(name: str, version: int, array: str, *inner: str) -> Parts:
    """The parts of a message around one of its arrays, such as `Topics`. The schema must have that version.

    With `inner`: the parts of an element around an array in it.
    """
    schema = _schema(name)
    assert schema is not None
    fields = schema["fields"]
    *outer, last = (array, *inner)
    for each in outer:
        (fields,) = (field["fields"] for field in fields if field["name"] == each)
    (at,) = (at for at, field in enumerate(fields) if field["name"] == last)
    structs = {common["name"]: common["fields"] for common in schema.get("commonStructs", [])}
    flexible = _in(version, schema["flexibleVersions"])
    assert _in(version, fields[at]["versions"])
    assert not any(_in(version, field.get("taggedVersions")) for field in fields[: at + 1])
    before, _ = _struct(name, fields[:at], structs, version, flexible, ends=False)
    element, _ = _type({"fields": fields[at].get("fields")}, fields[at]["type"][2:], structs, version, flexible)
    after, _ = _struct(name, fields[at + 1 :], structs, version, flexible)
    return Parts(before, element, after, flexible)


def untagged_fields(name: str, version: int) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Name, type and, of structs, the definitions of the fields of a message; `fields_of` reads those."""
    schema = _schema(name)
    assert schema is not None
    return fields_of(schema["fields"], version)


def fields_of(fields: list[dict[str, Any]], version: int) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """The same of a struct in a message, without the tagged ones."""
    return [
        (field["name"], field["type"], field.get("fields", []))
        for field in fields
        if _in(version, field["versions"]) and not _in(version, field.get("taggedVersions"))
    ]


def fixed_bytes(type_name: str) -> int | None:
    """Length of a type; None if it varies."""
    if type_name == "uuid":
        return len(NO_TOPIC_ID.bytes)
    numbers = _FIXED.get(type_name)
    return None if numbers is None else numbers.size


class _Struct(NamedTuple):
    """The fields of a struct at a version. `constants`, `makers` – the defaults of all fields, in any version.

    `has_tags`: it ends with tagged fields.
    """

    name: str
    has_tags: bool
    untagged: list[_Field]
    tagged: dict[int, _Field]
    constants: dict[str, Any]
    makers: list[tuple[str, Callable[[], Any]]]

    def make(self) -> Message:
        message = Message(**self.constants)
        for name, maker in self.makers:
            setattr(message, name, maker())
        return message


def _struct(
    name: str, fields: list[dict[str, Any]], structs: _Structs, version: int, flexible: bool, *, ends: bool = True
) -> tuple[Codec, Callable[[], Message]]:
    """The codec of a struct at a version, and a factory of the struct with Kafka's defaults. `ends`: False for the
    first fields of a struct only."""
    struct_of = _Struct(name, flexible and ends, [], {}, {}, [])
    for field in fields:
        field_name = re.sub(r"(?<!^)(?=[A-Z])", "_", field["name"]).lower()
        codec, default = _type(field, field["type"], structs, version, flexible)
        if isinstance(default(), list | Message):
            struct_of.makers.append((field_name, default))
        else:
            struct_of.constants[field_name] = default()
        if not _in(version, field["versions"]):
            continue
        if _in(version, field.get("taggedVersions")):
            struct_of.tagged[field["tag"]] = _Field(field_name, codec, default)
        else:
            struct_of.untagged.append(_Field(field_name, codec, default))
    layouts = [field.codec.layout for field in struct_of.untagged]
    if struct_of.has_tags:
        layouts.append(((TAGS, 0),))
    return Codec(_reader(struct_of), _writer(struct_of), joined(layouts)), struct_of.make


def _reader(of: _Struct) -> _Read:
    # Decoding sets the untagged fields; only the others need defaults.
    read_fields = [(field.name, field.codec.read) for field in of.untagged]
    read_names = {field.name for field in of.untagged}
    other_constants = {name: value for name, value in of.constants.items() if name not in read_names}
    other_makers = [(name, maker) for name, maker in of.makers if name not in read_names]

    def read(data: bytes, pos: int) -> tuple[Message, int]:
        message = Message()
        values = message.__dict__
        values.update(other_constants)
        for name, maker in other_makers:
            values[name] = maker()
        for name, read_field in read_fields:
            values[name], pos = read_field(data, pos)
        if of.has_tags:
            section, pos = read_tags(data, pos)
            unknown = []
            for tag, value in split_tags(section):
                if (field := of.tagged.get(tag)) is None:
                    unknown.append((tag, value))
                    continue
                values[field.name], end = field.codec.read(value, 0)
                if end != len(value):
                    raise Malformed(f"tagged field {field.name} has {len(value)} bytes instead of {end}")
            if unknown:
                message.unknown_tags = tuple(unknown)
        return message, pos

    return read


def _writer(of: _Struct) -> _Write:
    known = frozenset(of.constants) | {name for name, _ in of.makers} | {"unknown_tags"}

    def write(out: bytearray, message: Message) -> None:
        values = message.__dict__
        if not values.keys() <= known:
            raise TypeError(f"{of.name} has no field {', '.join(sorted(values.keys() - known))}")
        for name, codec, default in of.untagged:
            try:
                codec.write(out, values[name] if name in values else default())
            except (struct.error, AttributeError, ValueError) as error:
                raise ValueError(f"{of.name}.{name} cannot be {values.get(name)!r:.80}: {error}") from error
        if of.has_tags:
            tags = list(message.unknown_tags)
            for tag, (name, codec, default) in of.tagged.items():
                if name in values and values[name] != default():
                    value = bytearray()
                    codec.write(value, values[name])
                    tags.append((tag, bytes(value)))
            out += join_tags(sorted(tags, key=lambda pair: pair[0])) or NO_TAGS

    return write


def _type(
    field: dict[str, Any], type_name: str, structs: _Structs, version: int, flexible: bool
) -> tuple[Codec, Callable[[], Any]]:
    """The codec of a field's type, and a factory of its default."""
    nullable = _in(version, field.get("nullableVersions"))
    null_default = field.get("default") == "null"
    if type_name.startswith("[]"):
        # `nullableVersions` and `default` of the field apply to the array, not to its elements.
        of_element = {"fields": field["fields"]} if "fields" in field else {}
        element, _ = _type(of_element, type_name[2:], structs, version, flexible)
        return _array(element, type_name[2:], nullable, flexible), lambda: None if null_default else []
    if fixed := _FIXED.get(type_name):
        default = _number(type_name, field.get("default") or "0")
        return _fixed(fixed), lambda: default
    if type_name == "uuid":
        return Codec(read_uuid, _write_uuid, ((FIXED, len(NO_TOPIC_ID.bytes)),)), lambda: NO_TOPIC_ID
    if type_name == "string":
        text = None if null_default else field.get("default", "")
        return _string(nullable, flexible), lambda: text
    if type_name in ("bytes", "records"):
        return _bytes(nullable, flexible), lambda: None if null_default else b""
    codec, make = _struct(type_name, field.get("fields") or structs[type_name], structs, version, flexible)
    return (_nullable(codec) if nullable else codec), (lambda: None) if null_default else make


def _number(type_name: str, text: str | bool | float) -> int | float | bool:
    if type_name == "bool":
        return str(text).lower() == "true"
    return float(text) if type_name == "float64" else int(str(text), 0)


def _fixed(fixed: struct.Struct) -> Codec:
    unpack, size = fixed.unpack_from, fixed.size

    def read(data: bytes, pos: int) -> tuple[Any, int]:
        return unpack(data, pos)[0], pos + size

    return Codec(read, lambda out, value: out.extend(fixed.pack(value)), ((FIXED, size),))


def _write_uuid(out: bytearray, value: UUID) -> None:
    out += value.bytes


def _string(nullable: bool, flexible: bool) -> Codec:
    if flexible:
        read: _Read = read_compact_nullable_string if nullable else read_compact_string
        write = write_compact_nullable_string if nullable else _not_null(write_compact_nullable_string)
        return Codec(read, write, ((COMPACT, 1),))
    read = read_nullable_string if nullable else read_string
    return Codec(read, write_nullable_string if nullable else _not_null(write_nullable_string), ((SHORT, 1),))


def _not_null(write: _Write) -> _Write:
    def write_value(out: bytearray, value: Any) -> None:
        if value is None:
            raise ValueError("null is not allowed in this version")
        write(out, value)

    return write_value


def _bytes(nullable: bool, flexible: bool) -> Codec:
    def read(data: bytes, pos: int) -> tuple[bytes | None, int]:
        length, pos = _read_length(data, pos, nullable, flexible)
        return (None, pos) if length is None else (data[pos : pos + length], pos + length)

    def write(out: bytearray, value: bytes | None) -> None:
        _write_length(out, value, flexible)
        out += value or b""

    return Codec(read, write if nullable else _not_null(write), ((COMPACT if flexible else LONG, 1),))


def _array(element: Codec, element_type: str, nullable: bool, flexible: bool) -> Codec:
    numbers = _FIXED.get(element_type)
    letter = numbers.format[-1] if numbers is not None else ""

    def read(data: bytes, pos: int) -> tuple[list[Any] | None, int]:
        count, pos = _read_length(data, pos, nullable, flexible)
        if count is None:
            return None, pos
        if isinstance(data, LimitedBytes):
            data.take(count)
        if numbers is not None:
            return list(struct.unpack_from(f">{count}{letter}", data, pos)), pos + count * numbers.size
        items = []
        for _ in range(count):
            item, pos = element.read(data, pos)
            items.append(item)
        return items, pos

    def write(out: bytearray, items: list[Any] | None) -> None:
        _write_length(out, items, flexible)
        if not items:
            return
        if numbers is not None:
            out += struct.pack(f">{len(items)}{letter}", *items)
            return
        for item in items:
            element.write(out, item)

    return Codec(read, write if nullable else _not_null(write), _array_layout(element.layout, flexible))


def _array_layout(element: Layout, flexible: bool) -> Layout:
    if len(element) == 1 and element[0][0] == FIXED:
        return ((COMPACT if flexible else LONG, element[0][1]),)
    return ((COMPACT_STRUCTS if flexible else LONG_STRUCTS, len(element)), *element)


def _nullable(codec: Codec) -> Codec:
    """A nullable struct (KIP-893): preceded by one byte, -1 for null and 1 for present."""

    def read(data: bytes, pos: int) -> tuple[Any, int]:
        return (None, pos + 1) if data[pos] >= 0x80 else codec.read(data, pos + 1)

    def write(out: bytearray, value: Message | None) -> None:
        out.append(0xFF if value is None else 1)
        if value is not None:
            codec.write(out, value)

    return Codec(read, write, ((NULLABLE, len(codec.layout)), *codec.layout))


def _read_length(data: bytes, pos: int, nullable: bool, flexible: bool) -> tuple[int | None, int]:
    """Length of a byte field or count of an array; None for null."""
    if flexible:
        length, pos = read_uvarint(data, pos)
        length -= 1
    else:
        (length,) = INT32.unpack_from(data, pos)
        pos += INT32.size
    if length == -1 and nullable:
        return None, pos
    if length < 0:
        raise Malformed(f"length {length} is not allowed in this version")
    # An array element takes at least one byte, so the check also bounds a count.
    if pos + length > len(data):
        raise CutOff(pos + length)
    return length, pos


def _write_length(out: bytearray, value: bytes | list[Any] | None, flexible: bool) -> None:
    if flexible:
        write_uvarint(out, 0 if value is None else len(value) + 1)
    else:
        out += INT32.pack(-1 if value is None else len(value))
