"""Decompression under a bound: what each producer's framing looks like, bombs, and broken input."""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
import textwrap
import time
from typing import Any

import aiokafka.codec
import cramjam
import kafka.codec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencepost_proxy.errors import ClientProtocolError, LimitError
from fencepost_proxy.wire.compression import (
    CODEC_NAMES,
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    ZSTD,
    MalformedBatch,
    UndecodableBatch,
    decompress,
)
from tests.support import compressed

LIMIT = 4 << 20


def _finished(compressor: Any, data: bytes) -> bytes:
    compressor.compress(data)
    return bytes(compressor.finish())


#: Every way in which a producer frames a codec. aiokafka writes xerial snappy as Java does; librdkafka a raw block.
ENCODERS = {
    "gzip-python": (GZIP, gzip.compress),
    "gzip-kafka-python": (GZIP, kafka.codec.gzip_encode),
    "gzip-cramjam": (GZIP, cramjam.gzip.compress),
    "snappy-xerial": (SNAPPY, aiokafka.codec.snappy_encode),
    "snappy-raw": (SNAPPY, cramjam.snappy.compress_raw),
    "lz4-aiokafka": (LZ4, aiokafka.codec.lz4_encode),
    "lz4-cramjam": (LZ4, lambda data: _finished(cramjam.lz4.Compressor(block_linked=False), data)),
    "zstd-aiokafka": (ZSTD, aiokafka.codec.zstd_encode),
    "zstd-cramjam": (ZSTD, cramjam.zstd.compress),
}
each_encoder = pytest.mark.parametrize("encoder", list(ENCODERS))


def _records(size: int) -> bytes:
    """Text that compresses about as well as records do."""
    words = random.Random(size)
    text = b"".join(
        b'{"flight":%d,"tail":"N%d"}' % (words.randrange(900), words.randrange(99)) for _ in range(size // 20 + 1)
    )
    return text[:size]


@each_encoder
@pytest.mark.parametrize("size", [0, 1, 100, 70_000, 1_000_000])
def test_what_a_producer_compressed_comes_back(encoder: str, size: int) -> None:
    codec, encode = ENCODERS[encoder]
    data = _records(size)
    assert bytes(decompress(codec, memoryview(bytes(encode(data))), bytes_max=LIMIT)) == data


@each_encoder
def test_the_bound_is_exact_whatever_the_ratio(encoder: str) -> None:
    codec, encode = ENCODERS[encoder]
    for data in (b"\0" * 3_000_000, os.urandom(300_000)):  # the first outgrows the first buffer several times
        packed = memoryview(bytes(encode(data)))
        assert bytes(decompress(codec, packed, bytes_max=len(data))) == data
        with pytest.raises(
            LimitError, match=f"{CODEC_NAMES[codec]}.*limit of {len(data) - 1} bytes.*limits.decompressed_bytes_max"
        ):
            decompress(codec, packed, bytes_max=len(data) - 1)


def test_no_compression_is_the_same_view() -> None:
    data = memoryview(b"records")
    assert decompress(NONE, data, bytes_max=1) is data


def test_an_unknown_codec_is_malformed() -> None:
    with pytest.raises(MalformedBatch, match="codec 5"):
        decompress(5, memoryview(b""), bytes_max=1)


BOMB_SCRIPT = textwrap.dedent(
    """
    import resource, sys
    import cramjam
    from fencepost_proxy.errors import LimitError
    from fencepost_proxy.wire.compression import decompress

    codec, name, gigabyte, mebibyte = int(sys.argv[1]), sys.argv[2], 1 << 30, 1 << 20
    options = {"block_linked": False} if name == "lz4" else {}
    compressor = getattr(cramjam, name).Compressor(**options)
    bomb = bytearray()
    for _ in range(gigabyte // (16 * mebibyte)):
        compressor.compress(bytes(16 * mebibyte))
        bomb += bytes(compressor.flush())
    bomb += bytes(compressor.finish())
    with open("/proc/self/statm") as statm:
        have = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + 64 * mebibyte, have + 64 * mebibyte))
    try:
        decompress(codec, memoryview(bomb), bytes_max=8 * mebibyte)
    except LimitError:
        print("stopped")
    """
)


@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space by what /proc says")
@pytest.mark.parametrize(("codec", "name"), [(GZIP, "gzip"), (LZ4, "lz4"), (ZSTD, "zstd")])
def test_gigabyte_bomb_stops_at_the_bound(codec: int, name: str) -> None:
    """Unpacked in a process that cannot get more than 64 MiB beyond what it has."""
    done = subprocess.run(
        [sys.executable, "-c", BOMB_SCRIPT, str(codec), name], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout == "stopped\n", done.stderr[-500:]


@pytest.mark.parametrize("blocks", [1, 3])
def test_snappy_block_claiming_gigabytes_is_refused(blocks: int) -> None:
    """Five bytes say how much to allocate: here 4 GiB."""
    claim = b"\xff\xff\xff\xff\x0f" + b"\0" * 20
    xerial = b"\x82SNAPPY\0" + b"\0\0\0\1" * 2 + (len(claim).to_bytes(4, "big") + claim) * blocks
    for data in (claim, xerial):
        with pytest.raises(LimitError):
            decompress(SNAPPY, memoryview(data), bytes_max=LIMIT)


def test_snappy_blocks_count_together() -> None:
    block = bytes(cramjam.snappy.compress_raw(b"x" * 1000))
    stream = b"\x82SNAPPY\0" + b"\0\0\0\1" * 2 + (len(block).to_bytes(4, "big") + block) * 5
    assert bytes(decompress(SNAPPY, memoryview(stream), bytes_max=5000)) == b"x" * 5000
    with pytest.raises(LimitError):
        decompress(SNAPPY, memoryview(stream), bytes_max=4999)


def test_concatenated_xerial_streams_are_read_as_in_java() -> None:
    one, two = aiokafka.codec.snappy_encode(b"one"), aiokafka.codec.snappy_encode(b"two")
    assert bytes(decompress(SNAPPY, memoryview(one + two), bytes_max=LIMIT)) == b"onetwo"


@each_encoder
def test_truncated_data_is_malformed_or_short(encoder: str) -> None:
    """xerial snappy has no end mark: cut between blocks it is shorter, which the record count then shows. An LZ4
    frame's content checksum is not read."""
    codec, encode = ENCODERS[encoder]
    data = _records(100_000)
    packed = memoryview(bytes(encode(data)))
    for length in [*range(1, 200), *range(200, len(packed), 97), len(packed) - 1]:
        try:
            got = bytes(decompress(codec, packed[:length], bytes_max=LIMIT))
        except MalformedBatch:
            continue
        assert encoder in ("snappy-xerial", "lz4-cramjam")
        assert data.startswith(got)
        assert (len(got) < len(data)) == (encoder == "snappy-xerial")


@given(st.sampled_from([GZIP, SNAPPY, LZ4, ZSTD]), st.binary(min_size=1, max_size=300))
def test_garbage_is_the_clients_fault(codec: int, data: bytes) -> None:
    for prefix in (b"", b"\x1f\x8b\x08\0", b"\x82SNAPPY\0\0\0\0\1\0\0\0\1", b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd"):
        try:
            got = decompress(codec, memoryview(prefix + data), bytes_max=10_000)
        except ClientProtocolError:
            continue
        assert len(got) <= 10_000


@each_encoder
def test_damaged_data_is_clients_fault_or_bounded(encoder: str) -> None:
    codec, encode = ENCODERS[encoder]
    packed = bytes(encode(_records(2_000)))
    for at in range(len(packed)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(packed)
            damaged[at] ^= flip
            try:
                got = decompress(codec, memoryview(damaged), bytes_max=LIMIT)
            except ClientProtocolError:
                continue
            assert len(got) <= LIMIT


def _forms(names: dict[str, str]) -> set[str]:
    return {f"{codec}, {form}" if form else codec for codec, forms in names.items() for form in forms.split("|")}


#: What Kafka answers to each, by `tests/integration/test_compressed_forms.py`, where it is not an error.
TAKEN = _forms(
    {
        "gzip": "|trailing zeros|trailing bytes|two members|an empty member after|file name|reserved flag",
        "lz4": "|two blocks|trailing zeros|trailing bytes|content size|wrong content size|an empty frame after"
        "|a frame too many|skippable frame after|content checksum|wrong content checksum|block checksums",
        "snappy": "one raw block|blocks|blocks, two trailing bytes|blocks, two streams|blocks, newer version"
        "|blocks, older version",
        "zstd": "|two frames|skippable frame before|skippable frame after|stored",
    }
)
#: Kafka finds other records in these than their batch claims, and answers INVALID_RECORD.
OTHER_RECORDS = _forms(
    {
        "gzip": "a member too many",
        "lz4": "two frames",
        "snappy": "blocks, one too many|blocks, none",
        "zstd": "a frame too many|nothing",
    }
)
#: What Kafka's reader misses, the proxy does not look for; Kafka answers.
LEFT_TO_KAFKA = {"lz4, missing content checksum"}


@pytest.mark.parametrize("form", compressed.FORMS)
def test_each_form_is_decompressed_as_in_kafka(form: str) -> None:
    codec, data = compressed.FORMS[form]
    if form in TAKEN | LEFT_TO_KAFKA:
        assert bytes(decompress(codec, memoryview(data), bytes_max=LIMIT)) == compressed.ALL
    elif form in OTHER_RECORDS:
        assert bytes(decompress(codec, memoryview(data), bytes_max=LIMIT)) != compressed.ALL
    else:
        with pytest.raises(UndecodableBatch):
            decompress(codec, memoryview(data), bytes_max=LIMIT)


@pytest.mark.parametrize("size", [300, 100_000, 1_000_000])
@pytest.mark.parametrize("random_bytes", [False, True])
def test_gzip_with_trailing_bytes_has_same_bound(size: int, random_bytes: bool) -> None:
    data = os.urandom(size) if random_bytes else _records(size)
    packed = memoryview(gzip.compress(data[: size // 2]) + gzip.compress(data[size // 2 :]) + b"trailing")
    assert bytes(decompress(GZIP, packed, bytes_max=size)) == data
    with pytest.raises(LimitError):
        decompress(GZIP, packed, bytes_max=size - 1)


def test_many_gzip_members_take_linear_time() -> None:
    """The time for each does not depend on the bytes after it."""
    packed = memoryview(gzip.compress(b"x") * 20_000 + b"trailing")
    began = time.process_time()
    assert len(decompress(GZIP, packed, bytes_max=LIMIT)) == 20_000
    assert time.process_time() - began < 5.0
