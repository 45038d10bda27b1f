"""Any message of the Kafka under test, from the definitions in that Kafka's jar, independently of the code under test.

Messages are dicts with the names of Kafka's definitions (`topicName` or `TopicName`, as Kafka spells it).
"""

from __future__ import annotations

import json
import re
import socket
import struct
import uuid
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from fencepost_dev.jars import classpath, release
from fencepost_proxy.types import Address
from tests.support import raw
from tests.support.kafka import kafka_version

Fields = dict[str, Any]

_API_VERSIONS = 18
_NUMBERS = {"int8": "b", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q", "float64": "d"}
_LATEST = 32767


class Definition(NamedTuple):
    """`versions` as in the jar, first and last."""

    api_key: int
    name: str
    versions: tuple[int, int]
    request: dict[str, Any]
    response: dict[str, Any]

    def flexible(self, version: int) -> bool:
        return _within(version, self.request["flexibleVersions"])


@cache
def definitions() -> Mapping[int, Definition]:
    """By API key, without APIs that the release has removed."""
    jars = classpath(release(kafka_version()).broker_lock).split(":")
    with zipfile.ZipFile(next(jar for jar in jars if Path(jar).name.startswith("kafka-clients"))) as jar:
        schemas = {
            Path(entry).stem: json.loads(re.sub(r"(?m)^\s*//.*$", "", jar.read(entry).decode()))
            for entry in jar.namelist()
            if re.fullmatch(r"common/message/\w+(Request|Response)\.json", entry)
        }
    found = {}
    for stem, request in schemas.items():
        if request["type"] == "request" and "fields" in request:
            name = stem.removesuffix("Request")
            first, last = _range(request["validVersions"])
            key = request["apiKey"]
            found[key] = Definition(key, name, (first, last), request, schemas[f"{name}Response"])
    return found


def encode_request(api_key: int, version: int, correlation_id: int, body: Fields) -> bytes:
    """A whole frame with its length. Fields that `body` lacks have Kafka's default."""
    definition = definitions()[api_key]
    out = bytearray(struct.pack(">hhih", api_key, version, correlation_id, 4) + b"walk")
    if definition.flexible(version):
        out.append(0)
    _Writer(definition.request, version, out).fields(definition.request["fields"], body)
    return struct.pack(">i", len(out)) + bytes(out)


def decode_response(api_key: int, version: int, frame: bytes) -> Fields:
    """Decode the whole body of a frame without its length."""
    definition = definitions()[api_key]
    if api_key == _API_VERSIONS and frame[4:6] == struct.pack(">h", 35):
        version = 0  # KIP-511
    reader = _Reader(definition.response, version, frame, 4)
    if definition.flexible(version) and api_key != _API_VERSIONS:
        reader.tags([], {})
    body = reader.fields(definition.response["fields"])
    assert reader.at == len(frame), f"{len(frame) - reader.at} bytes are left of {definition.name} v{version}"
    return body


class Closed(raw.Closed):
    """The peer closed the connection instead of responding."""


class RawConnection:
    """One request at a time on a plaintext socket."""

    def __init__(self, address: Address, timeout_seconds: float = 60.0, *, enter: raw.Enter = raw.as_it_is) -> None:
        self.socket = enter(socket.create_connection(address, timeout_seconds))
        self.next_correlation_id = 1000

    @classmethod
    def over(cls, opened: socket.socket) -> Self:
        connection = cls.__new__(cls)
        connection.socket, connection.next_correlation_id = opened, 1000
        return connection

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def query_raw(self, api_key: int, version: int, body: Fields) -> bytes:
        """The response frame without its length. Raises Closed."""
        self.next_correlation_id += 1
        self.socket.sendall(encode_request(api_key, version, self.next_correlation_id, body))
        frame = self.receive()
        assert struct.unpack_from(">i", frame) == (self.next_correlation_id,)
        return frame

    def query(self, api_key: int, version: int, body: Fields) -> Fields:
        return decode_response(api_key, version, self.query_raw(api_key, version, body))

    def receive(self) -> bytes:
        (length,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                more = self.socket.recv(count - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                raise Closed
            data += more
        return bytes(data)


def _range(text: str) -> tuple[int, int]:
    if text == "none":
        return 1, 0
    first, dash, last = text.removesuffix("+").partition("-")
    return int(first), _LATEST if text.endswith("+") else int(last if dash else first)


def _within(version: int, text: str | None) -> bool:
    first, last = _range(text or "none")
    return first <= version <= last


class _Walk:
    def __init__(self, schema: dict[str, Any], version: int) -> None:
        self.version = version
        self.flexible = _within(version, schema["flexibleVersions"])
        self.structs = {each["name"]: each["fields"] for each in schema.get("commonStructs", [])}

    def has(self, field: dict[str, Any]) -> bool:
        return _within(self.version, field["versions"])

    def nullable(self, field: dict[str, Any]) -> bool:
        return _within(self.version, field.get("nullableVersions"))

    def is_compact(self, field: dict[str, Any]) -> bool:
        # Some fields, such as the client id, have their old format also in flexible versions.
        return self.flexible and field.get("flexibleVersions") != "none"

    def inner(self, field: dict[str, Any], name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = field.get("fields") or self.structs[name]
        return found


class _Writer(_Walk):
    def __init__(self, schema: dict[str, Any], version: int, out: bytearray) -> None:
        super().__init__(schema, version)
        self.out = out

    def fields(self, fields: list[dict[str, Any]], values: Fields) -> None:
        names = {field["name"] for field in fields}
        assert values.keys() <= names, f"no such fields: {values.keys() - names}, there are {names}"
        tagged = []
        for field in filter(self.has, fields):
            if _within(self.version, field.get("taggedVersions")):
                if field["name"] in values:
                    tagged.append(field)
            else:
                self.value(field, field["type"], values.get(field["name"], _default(field)))
        if self.flexible:
            self.out += _uvarint(len(tagged))
            for field in sorted(tagged, key=lambda each: each["tag"]):
                whole, self.out = self.out, bytearray()
                self.value(field, field["type"], values[field["name"]])
                whole += _uvarint(field["tag"]) + _uvarint(len(self.out)) + self.out
                self.out = whole

    def value(self, field: dict[str, Any], kind: str, value: Any) -> None:
        if kind.startswith("[]"):
            self.length(field, None if value is None else len(value))
            for each in value or ():
                self.value({"fields": field["fields"]} if "fields" in field else {}, kind[2:], each)
        elif kind in _NUMBERS:
            self.out += struct.pack(">" + _NUMBERS[kind], value)
        elif kind == "bool":
            self.out.append(bool(value))
        elif kind == "uuid":
            self.out += uuid.UUID(int=0).bytes if value is None else value.bytes
        elif kind in ("string", "bytes", "records"):
            raw = value.encode() if isinstance(value, str) else value
            size = None if raw is None else len(raw)
            if kind == "string" and not self.is_compact(field):
                self.out += struct.pack(">h", -1 if size is None else size)
            else:
                self.length(field, size)
            self.out += raw or b""
        elif self.nullable(field):
            self.out += b"\xff" if value is None else b"\x01"
            if value is not None:
                self.fields(self.inner(field, kind), value)
        else:
            self.fields(self.inner(field, kind), value or {})

    def length(self, field: dict[str, Any], size: int | None) -> None:
        if self.is_compact(field):
            self.out += _uvarint(0 if size is None else size + 1)
        else:
            self.out += struct.pack(">i", -1 if size is None else size)


class _Reader(_Walk):
    def __init__(self, schema: dict[str, Any], version: int, data: bytes, at: int) -> None:
        super().__init__(schema, version)
        self.data = data
        self.at = at

    def fields(self, fields: list[dict[str, Any]]) -> Fields:
        tagged, found = [], {}
        for field in filter(self.has, fields):
            if _within(self.version, field.get("taggedVersions")):
                tagged.append(field)
            else:
                found[field["name"]] = self.value(field, field["type"])
        if self.flexible:
            self.tags(tagged, found)
        return found

    def tags(self, known: list[dict[str, Any]], found: Fields) -> None:
        for _ in range(self.uvarint()):
            instance_id, size = self.uvarint(), self.uvarint()
            end = self.at + size
            field = next((each for each in known if each["tag"] == instance_id), None)
            if field is None:
                found[f"tag {instance_id}"] = self.data[self.at : end]
                self.at = end
            else:
                found[field["name"]] = self.value(field, field["type"])
            assert self.at == end

    def value(self, field: dict[str, Any], kind: str) -> Any:
        if kind.startswith("[]"):
            count = self.length(field)
            of_each = {"fields": field["fields"]} if "fields" in field else {}
            return None if count is None else [self.value(of_each, kind[2:]) for _ in range(count)]
        if kind in _NUMBERS:
            number = struct.Struct(">" + _NUMBERS[kind])
            return number.unpack(self.take(number.size))[0]
        if kind == "bool":
            return self.take(1) != b"\0"
        if kind == "uuid":
            return uuid.UUID(bytes=self.take(16))
        if kind in ("string", "bytes", "records"):
            if kind == "string" and not self.is_compact(field):
                (size,) = struct.unpack(">h", self.take(2))
                size = None if size < 0 else size
            else:
                size = self.length(field)
            raw = None if size is None else self.take(size)
            return raw.decode() if raw is not None and kind == "string" else raw
        if self.nullable(field) and self.take(1) == b"\xff":
            return None
        return self.fields(self.inner(field, kind))

    def length(self, field: dict[str, Any]) -> int | None:
        size = self.uvarint() - 1 if self.is_compact(field) else struct.unpack(">i", self.take(4))[0]
        return None if size < 0 else size

    def uvarint(self) -> int:
        value = sequence_offset = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << sequence_offset
            sequence_offset += 7
            if byte < 0x80:
                return value

    def take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        assert len(taken) == count, "the response is cut off"
        self.at += count
        return taken


def _default(field: dict[str, Any]) -> Any:
    kind, text = field["type"], field.get("default")
    if text == "null":
        return None
    if kind.startswith("[]"):
        return []
    if kind in _NUMBERS:
        return float(text or 0) if kind == "float64" else int(str(text or 0), 0)
    if kind == "bool":
        return str(text).lower() == "true"
    if kind == "string":
        return text or ""
    return b"" if kind in ("bytes", "records") else None


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
