"""What holds for any message, compared with the codecs of kafka-python and kio, in both directions.

The examples are in `test_produce.py`, `test_batch.py`, `test_control_codec.py`, `test_primitives.py` and
`test_compression.py`; here the values are drawn.
"""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Callable
from typing import Any

import aiokafka.codec
import aiokafka.record.default_records
import kafka.codec
import kafka.record.default_records
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.index import load_request_schema, load_response_schema
from kio.serial import readers, writers

from fencepost_proxy.errors import ClientProtocolError, UpstreamProtocolError
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire import primitives as p
from fencepost_proxy.wire.api_versions import restrict_api_versions
from fencepost_proxy.wire.apis import API_VERSIONS, APIS, PRODUCE
from fencepost_proxy.wire.batch import require_single_batch, verify_crc
from fencepost_proxy.wire.batch_scan import HeaderNames, scan_batch
from fencepost_proxy.wire.control import (
    codec_versions,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from fencepost_proxy.wire.produce import (
    encode_produce_request,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
)
from fencepost_proxy.wire.schema import Message
from tests.support.batches import built_by
from tests.support.kio_messages import NOT_IN_KIO, by_kio
from tests.support.properties import some

LIMIT = 1 << 20
NAMES = HeaderNames()
NOW_MS = 1_700_000_000_000
VERSIONS = range(3, 14)

int64s = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=60)
seeds = st.integers(0, 2**32)


# --- primitive types, against kio -------------------------------------------------------------------------------------


def _kio_wrote(write: Callable[[Any, Any], Any], value: object) -> bytes:
    out = io.BytesIO()
    write(out, value)
    return out.getvalue()


@some
@given(st.integers(0, 2**31 - 1))
def test_unsigned_varints_are_kios(value: int) -> None:
    ours = bytearray()
    p.write_uvarint(ours, value)
    assert bytes(ours) == _kio_wrote(writers.write_unsigned_varint, value)
    assert readers.read_unsigned_varint(bytes(ours), 0) == p.read_uvarint(ours, 0) == (value, len(ours))
    for length in range(len(ours)):
        with pytest.raises(p.MALFORMED):
            p.read_uvarint(ours[:length], 0)


@some
@given(int64s, st.binary(max_size=3))
def test_signed_varints_are_kafka_pythons(value: int, before: bytes) -> None:
    theirs = bytearray(before)
    kafka.record.util.encode_varint(value, theirs.append)
    ours = bytearray(before)
    p.write_varlong(ours, value)
    assert ours == theirs
    assert p.read_varlong(ours, len(before)) == (value, len(ours)) == kafka.record.util.decode_varint(ours, len(before))


@some
@given(st.none() | texts)
def test_strings_are_kios(text: str | None) -> None:
    for ours_write, ours_read, theirs_write in (
        (p.write_nullable_string, p.read_nullable_string, writers.write_nullable_legacy_string),
        (p.write_compact_nullable_string, p.read_compact_nullable_string, writers.write_nullable_compact_string),
    ):
        written = bytearray()
        ours_write(written, text)
        assert bytes(written) == _kio_wrote(theirs_write, text)
        assert ours_read(written, 0) == (text, len(written))
        for length in range(len(written)):
            with pytest.raises(p.MALFORMED):
                ours_read(written[:length], 0)


@some
@given(st.binary(max_size=40), st.integers(0, 5))
def test_noise_decodes_to_a_value_or_malformed(noise: bytes, at: int) -> None:
    view = memoryview(noise)
    for read in (
        p.read_uvarint,
        p.read_varint,
        p.read_varlong,
        p.read_nullable_string,
        p.read_string,
        p.read_compact_nullable_string,
        p.read_compact_string,
        p.read_nullable_bytes,
        p.read_compact_nullable_bytes,
        p.read_uuid,
        p.read_tags,
        lambda data, pos: p.read_array_count(data, pos, 3),
        lambda data, pos: p.read_compact_array_count(data, pos, 3),
    ):
        try:
            value, end = read(view, at)  # type: ignore[operator]
        except p.MALFORMED:
            continue
        assert at < end <= len(noise), (read, value)


# --- Produce ----------------------------------------------------------------------------------------------------------


@some
@given(st.sampled_from(VERSIONS), seeds)
def test_produce_written_by_kio_is_reencoded_unchanged(version: int, seed: int) -> None:
    rng = random.Random(seed)
    body = by_kio(load_request_schema(PRODUCE, version), rng)
    header = struct.pack(">hhih", PRODUCE, version, 5, 3) + b"kio" + (b"\0" if version >= 9 else b"")
    parsed = parse_produce_request(memoryview(header + body))
    assert b"".join(encode_produce_request(parsed))[4:] == header + body

    body = struct.pack(">i", 5) + (b"\0" if version >= 9 else b"")
    body += by_kio(load_response_schema(PRODUCE, version), rng)
    response = parse_produce_response(memoryview(body), version)
    assert encode_produce_response(response, version)[4:] == body
    for length in range(0, len(body), 7):
        with pytest.raises(UpstreamProtocolError):
            parse_produce_response(memoryview(body)[:length], version)


# --- record batches ---------------------------------------------------------------------------------------------------

some_records = st.lists(
    st.tuples(
        st.integers(NOW_MS - 10**9, NOW_MS + 10**9),
        st.none() | st.binary(max_size=60),
        st.none() | st.binary(max_size=300),
        st.lists(st.tuples(st.text(max_size=8), st.none() | st.binary(max_size=30)), max_size=3),
    ),
    min_size=1,
    max_size=12,
)
producers = st.tuples(st.integers(0, 2**40), st.integers(0, 2**15 - 1), st.integers(0, 2**31 - 1))
BUILDERS = (
    kafka.record.default_records.DefaultRecordBatchBuilder,
    aiokafka.record.default_records.DefaultRecordBatchBuilder,
)


@some
@given(st.sampled_from(BUILDERS), st.sampled_from([0, 1]), some_records, producers)
def test_batch_is_read_as_by_kafka_python(
    builder: Any, codec: int, rows: list[Any], producer: tuple[int, int, int]
) -> None:
    batch = built_by(builder, rows, codec=codec, producer=producer)
    theirs = kafka.record.default_records.DefaultRecordBatch(batch)
    header = require_single_batch(batch)
    scan = scan_batch(batch, NAMES, TopicPartition("orders", 3), source_is_base=False, decompressed_bytes_max=LIMIT)
    assert scan.header == header
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == producer
    assert (header.record_count, header.last_offset_delta) == (theirs.records_count, theirs.last_offset_delta)
    assert (header.crc, header.attributes, header.magic) == (theirs.crc, theirs.attributes, 2)
    assert (header.base_timestamp_ms, header.max_timestamp_ms) == (theirs.first_timestamp, theirs.max_timestamp)
    assert (header.base_offset, header.batch_length + 12) == (0, theirs.size_in_bytes)
    timestamps = [row[0] for row in rows]
    assert max(timestamps) - 1000 <= scan.max_timestamp_ms <= max(timestamps)
    assert verify_crc(batch)
    assert theirs.validate_crc()


# --- control messages -------------------------------------------------------------------------------------------------

READABLE = [
    (key, version)
    for key, api in APIS.items()
    if not api.gated and key != PRODUCE and (known := codec_versions(key)) is not None
    for version in range(max(known[0], api.min_version), min(known[1], api.max_version) + 1)
    if (key, version) not in NOT_IN_KIO
]


@some
@given(st.sampled_from(READABLE), seeds, st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 255)), max_size=4))
def test_altered_control_message_parses_or_is_peer_error(
    message: tuple[int, int], seed: int, changes: list[tuple[int, int]]
) -> None:
    key, version = message
    for schema, decode, encode, fault in (
        (load_request_schema, decode_request, encode_request, ClientProtocolError),
        (load_response_schema, decode_response, encode_response, UpstreamProtocolError),
    ):
        body = bytearray(by_kio(schema(key, version), random.Random(seed)))
        for at, value in changes:
            if body:
                body[at % len(body)] = value
        try:
            read = decode(key, version, bytes(body))
        except fault:
            continue
        if key != API_VERSIONS:
            again = encode(key, version, read)
            assert encode(key, version, decode(key, version, again)) == again


@some
@given(st.lists(st.tuples(st.integers(-1, 120), st.integers(0, 20), st.integers(-1, 20)), max_size=12))
def test_only_versions_common_to_both_sides_are_advertised(reported: list[tuple[int, int, int]]) -> None:
    response = Message(
        api_keys=[Message(api_key=key, min_version=low, max_version=high) for key, low, high in reported]
    )
    restrict_api_versions(response)
    for entry in response.api_keys:
        api = APIS[entry.api_key]
        assert not api.gated
        assert api.serves(entry.min_version)
        assert api.serves(entry.max_version)
        assert entry.min_version <= entry.max_version
        assert any(
            key == entry.api_key and low <= entry.min_version and entry.max_version <= high
            for key, low, high in reported
        )
    again = Message(api_keys=list(response.api_keys))
    restrict_api_versions(again)
    assert again == response
