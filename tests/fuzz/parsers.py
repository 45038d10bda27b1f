"""Fuzzes the parsers of `wire/`: each returns a value or reports the peer's error, in bounded memory.

An input is a valid message (a Produce request or response of any version, a record batch of any codec, a control
message of any API and version) with some bytes changed, and its parser. A parsed message is encoded again and must give
the same bytes, or at least the same value.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Hashable
from typing import Any
from uuid import UUID

import cramjam

from fencepost_proxy.errors import ClientProtocolError, ProtocolError, UpstreamProtocolError
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import API_VERSIONS
from fencepost_proxy.wire.batch import fence_batch, parse_batch_header, split_batches, verify_crc
from fencepost_proxy.wire.batch_digest import digest_batch
from fencepost_proxy.wire.batch_scan import HeaderNames, scan_batch
from fencepost_proxy.wire.compression import decompress
from fencepost_proxy.wire.control import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    parse_request_header,
    parse_response_header,
)
from fencepost_proxy.wire.produce import (
    NodeEndpoint,
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    RecordError,
    TopicData,
    TopicResult,
    encode_produce_request,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
    peek_produce,
)
from fencepost_proxy.wire.uncompressed_batch import encode_uncompressed_batch, read_uncompressed_records
from tests.fuzz.dialogue import SERVED, made_up_body, make_batch
from tests.fuzz.engine import Failure, Op, Program, Tracer, Untraced

_INSTANCE_IDS = b"\x02\x09\x03abc\xac\x02\x00"
_DECOMPRESSED_MAX = 100_000
_NAMES = HeaderNames()
_WHERE = TopicPartition("orders", 3)
_PARSERS = (
    "produce-request",
    "produce-response",
    "batch",
    "fetched",
    "compressed",
    "uncompressed",
    "request",
    "response",
)
_LETTERS = (0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF)


def _produce_request(version: int, variant: int) -> bytes:
    tags = _INSTANCE_IDS if version >= 9 and variant & 1 else b""
    name, topic_id = ("", UUID(int=7)) if version >= 13 else ("flights", None)
    records = memoryview(make_batch(5, ["end", 0, 2, 1, 0, 1, 0]))
    parts = (PartitionData(3, records, tags), PartitionData(0, None, tags), PartitionData(1, memoryview(b""), tags))
    request = ProduceRequest(
        version,
        77,
        "client",
        tags,
        "tx" if variant & 2 else None,
        -1,
        3000,
        (TopicData(name, topic_id, parts, tags),) * 2,
        tags,
    )
    return b"".join(encode_produce_request(request))[4:]


def _produce_response(version: int, variant: int) -> bytes:
    tags = _INSTANCE_IDS if version >= 9 and variant & 1 else b""
    name, topic_id = ("", UUID(int=7)) if version >= 13 else ("flights", None)
    errors = (RecordError(1, "bad", tags), RecordError(2, None, tags))
    result = PartitionResult(3, 44, 57, -1, 12, errors, "message", tags)
    nodes = (NodeEndpoint(5, "host", 9092, "rack", tags), NodeEndpoint(6, "host", 9093, None))
    topics = (TopicResult(name, topic_id, (result, PartitionResult(0, 0, 5)), tags),)
    return encode_produce_response(ProduceResponse(77, topics, 5, nodes, tags, tags), version)[4:]


def _batch(variant: int) -> bytes:
    data = bytearray(
        make_batch(3, ["end" if variant & 1 else "none", 0, 1 + variant % 4, variant % 3, 0, variant & 3, 0])
    )
    codec = (variant >> 3) % 5
    if codec:
        packed = bytes(_compressed(codec, bytes(data[61:])))
        data[61:] = packed
        struct.pack_into(">i", data, 8, len(data) - 12)
        struct.pack_into(">h", data, 21, codec)
        data = fence_batch(memoryview(data), producer_id=1, producer_epoch=0, base_sequence=0)
    return bytes(data)


def _compressed(codec: int, data: bytes) -> bytes:
    match codec:
        case 1:
            return bytes(cramjam.gzip.compress(data))
        case 2:
            block = bytes(cramjam.snappy.compress_raw(data))
            return b"\x82SNAPPY\0" + b"\0\0\0\1" * 2 + struct.pack(">i", len(block)) + block
        case 3:
            compressor = cramjam.lz4.Compressor(block_linked=False)
            compressor.compress(data)
            return bytes(compressor.finish())
        case _:
            return bytes(cramjam.zstd.compress(data))


class Parsers:
    """`setup` selects message and parser; the operations change bytes."""

    name = "wire"
    modules = (
        "proxy/fencepost_proxy/wire/produce.py",
        "proxy/fencepost_proxy/wire/batch.py",
        "proxy/fencepost_proxy/wire/batch_digest.py",
        "proxy/fencepost_proxy/wire/batch_scan.py",
        "proxy/fencepost_proxy/wire/records.py",
        "proxy/fencepost_proxy/wire/compression.py",
        "proxy/fencepost_proxy/wire/uncompressed_batch.py",
        "proxy/fencepost_proxy/wire/primitives.py",
        "proxy/fencepost_proxy/wire/schema.py",
        "proxy/fencepost_proxy/wire/control.py",
    )

    def setup(self, rng: random.Random) -> dict[str, Any]:
        return {"parser": rng.randrange(len(_PARSERS)), "version": rng.randrange(1000), "variant": rng.randrange(64)}

    def op(self, rng: random.Random) -> Op:
        index = rng.choice((rng.randrange(70), rng.randrange(600)))
        draw = rng.random()
        if draw < 0.5:
            return ["byte", index, rng.choice((*_LETTERS, rng.randrange(256)))]
        if draw < 0.65:
            return ["bit", index, rng.randrange(8)]
        return rng.choice(
            [
                ["cut", index],
                ["delete", index, rng.randint(1, 4)],
                ["insert", index, [rng.choice(_LETTERS) for _ in range(rng.randint(1, 6))]],
                ["int", index, rng.choice((-1, 0, 1, 2**31 - 1, -(2**31), rng.randrange(300)))],
                ["copy", index, rng.randrange(600), rng.randint(1, 30)],
                ["right-crc"],
            ]
        )

    def execute(self, program: Program, observed: set[Hashable], tracer: Tracer | Untraced) -> bytes:
        setup = program.setup
        parser = _PARSERS[setup["parser"] % len(_PARSERS)]
        version, variant = abs(setup["version"]), abs(setup["variant"])
        # few changes reach deeper code than many
        data = _changed(_input(parser, version, variant), program.ops[:6])
        if parser == "batch" and variant & 32 and len(data) > 12:
            data = data[:8] + struct.pack(">i", len(data) - 12) + data[12:]
        outcome = _try(parser, version, data, tracer)
        observed.add((parser, outcome[:30]))
        return data + outcome.encode()


def _input(parser: str, version: int, variant: int) -> bytearray:
    match parser:
        case "produce-request":
            return bytearray(_produce_request(3 + version % 11, variant))
        case "produce-response":
            return bytearray(_produce_response(3 + version % 11, variant))
        case "batch":
            return bytearray(_batch(variant))
        case "fetched":
            return bytearray(_batch(variant) + _batch(variant + 1))
        case "compressed":
            return bytearray(_compressed(1 + variant % 4, b"some text, some more text, " * (1 + version)))
        case "uncompressed":
            return bytearray(encode_uncompressed_batch([(b"k", b"v"), (None, b""), (b"key", None)], 5))
        case _:
            key, api_version = SERVED[version % len(SERVED)]
            return bytearray(made_up_body(key, api_version, parser, variant % 6)[:3000])


def _changed(data: bytearray, ops: list[Op]) -> bytes:
    for kind, *rest in ops:
        if not data:
            break
        at = abs(rest[0]) % len(data) if rest else 0
        match kind:
            case "byte":
                data[at] = rest[1] & 255
            case "bit":
                data[at] ^= 1 << (rest[1] & 7)
            case "cut":
                del data[at:]
            case "delete":
                del data[at : at + abs(rest[1])]
            case "insert":
                data[at:at] = bytes(each & 255 for each in rest[1])
            case "int" if at + 4 <= len(data):
                struct.pack_into(">i", data, at, (rest[1] + 2**31) % 2**32 - 2**31)
            case "copy":
                source = abs(rest[1]) % len(data)
                data[at:at] = data[source : source + abs(rest[2])]
            case "right-crc" if len(data) > 61:
                struct.pack_into(">i", data, 8, len(data) - 12)
                data = fence_batch(memoryview(data), producer_id=1, producer_epoch=0, base_sequence=0)
            case _:
                pass
        del data[20_000:]
    return bytes(data)


def _try(parser: str, version: int, data: bytes, tracer: Tracer | Untraced) -> str:
    """The result. Any exception except a `ProtocolError` for the right peer is a failure."""
    view = memoryview(data)
    upstream = parser in ("produce-response", "fetched", "response")
    try:
        tracer.call(_PARSE[parser], version, view)
    except ProtocolError as error:
        fault = UpstreamProtocolError if upstream else ClientProtocolError
        if not isinstance(error, fault):
            raise Failure("the wrong peer is blamed", f"{type(error).__name__}: {error}") from error
        if len(str(error)) > 1000:
            raise Failure("an error text that is too long", len(str(error))) from error
        return f"{type(error).__name__} {error}"
    return "parsed"


def _parse_produce_request(version: int, view: memoryview) -> None:
    peeked = peek_produce(view, len(view))
    request = parse_produce_request(view)
    if peeked is None or (peeked.acks, peeked.topic_count) != (request.acks, len(request.topics)):
        raise Failure("peek and parse do not agree", peeked)
    if request.topics and (peeked.first_topic, peeked.first_id) != (request.topics[0].name, request.topics[0].topic_id):
        raise Failure("peek and parse do not agree on the topic", peeked)
    again = b"".join(encode_produce_request(request))[4:]
    if parse_produce_request(memoryview(again)) != request:
        raise Failure("a request changes when encoded and parsed again")


def _parse_produce_response(version: int, view: memoryview) -> None:
    version = 3 + version % 11
    response = parse_produce_response(view, version)
    again = encode_produce_response(response, version)[4:]
    if parse_produce_response(memoryview(again), version) != response:
        raise Failure("a response changes when encoded and parsed again")


def _parse_batch(version: int, view: memoryview) -> None:
    scan = scan_batch(view, _NAMES, _WHERE, source_is_base=bool(version & 1), decompressed_bytes_max=_DECOMPRESSED_MAX)
    digest_batch(view, decompressed_bytes_max=_DECOMPRESSED_MAX)
    digest_batch(view, decompressed_bytes_max=_DECOMPRESSED_MAX, ignore_timestamps=True)
    verify_crc(view)
    fenced = memoryview(fence_batch(view, producer_id=9, producer_epoch=1, base_sequence=2))
    after = scan_batch(fenced, _NAMES, _WHERE, source_is_base=False, decompressed_bytes_max=_DECOMPRESSED_MAX)
    if after.digest != scan.digest or not verify_crc(fenced) or after.header.base_offset:
        raise Failure("a fence changes other fields")


def _parse_fetched(version: int, view: memoryview) -> None:
    for header, batch in split_batches(view):
        if parse_batch_header(batch) != header:
            raise Failure("two different headers of one batch")


def _parse_compressed(version: int, view: memoryview) -> None:
    got = decompress(1 + version % 4, view, bytes_max=_DECOMPRESSED_MAX)
    if len(got) > _DECOMPRESSED_MAX:
        raise Failure("decompression exceeds the limit", len(got))


def _parse_uncompressed(version: int, view: memoryview) -> None:
    list(read_uncompressed_records(parse_batch_header(view), view))


def _parse_request(version: int, view: memoryview) -> None:
    key, api_version = SERVED[version % len(SERVED)]
    message = decode_request(key, api_version, view)
    encoded = encode_request(key, api_version, message)
    # Tagged fields in the wrong order are encoded in the right one.
    if encode_request(key, api_version, decode_request(key, api_version, encoded)) != encoded:
        raise Failure("a request changes when encoded and parsed again")
    header = struct.pack(">hhi", key, api_version, 1) + bytes(view)
    if parse_request_header(header).body_offset > len(header):
        raise Failure("a header longer than its frame")


def _parse_response(version: int, view: memoryview) -> None:
    key, api_version = SERVED[version % len(SERVED)]
    parse_response_header(struct.pack(">i", 1) + bytes(view), key, api_version)
    message = decode_response(key, api_version, view)
    encoded = encode_response(key, api_version, message)
    if key != API_VERSIONS and encode_response(key, api_version, decode_response(key, api_version, encoded)) != encoded:
        raise Failure("a response changes when encoded and parsed again")


_PARSE = {
    "produce-request": _parse_produce_request,
    "produce-response": _parse_produce_response,
    "batch": _parse_batch,
    "fetched": _parse_fetched,
    "compressed": _parse_compressed,
    "uncompressed": _parse_uncompressed,
    "request": _parse_request,
    "response": _parse_response,
}
