"""Record batches: what is read out of one, and what stays when it is changed.

Batches come from kafka-python's builder, from aiokafka's, and from librdkafka (through its own mock broker); where a
batch has to be odd or broken, it is put together here byte by byte.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import aiokafka.record.default_records
import crc32c
import kafka.record.default_records
import pytest
from confluent_kafka import Producer
from hypothesis import example, given
from hypothesis import strategies as st

from fencepost_proxy.errors import ClientProtocolError, LimitError, UpstreamProtocolError
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire import batch_scan as product
from fencepost_proxy.wire import checksum
from fencepost_proxy.wire.batch import (
    fence_batch,
    parse_batch_header,
    require_single_batch,
    sequence_add,
    split_batches,
    verify_crc,
    zero_base_offset,
)
from fencepost_proxy.wire.batch_digest import digest_batch
from fencepost_proxy.wire.batch_scan import BatchScan, HeaderNames, scan_batch
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.records import RECORDS_MAX, Effort
from tests.support import raw
from tests.support.batches import built_by
from tests.support.bytewise import altered, record, sized, varint
from tests.support.bytewise import batch as _batch
from tests.support.line_counts import lines_of

NOW_MS = 1_700_000_000_000
LIMIT = 16 << 20
NAMES = HeaderNames()
WHERE = TopicPartition("orders", 3)
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
each_codec = pytest.mark.parametrize("codec", list(CODECS))

Headers = Sequence[tuple[str, bytes | None]]


def _record(offset_delta: int, headers: Headers = (), **more: Any) -> bytes:
    return record(offset_delta, [(name.encode(), value) for name, value in headers], **more)


# --- batches, byte by byte --------------------------------------------------------------------------------------------


def _saying(*headers: Headers) -> memoryview:
    """One record for each argument, which are its headers."""
    return _batch([_record(i, stated) for i, stated in enumerate(headers)])


def _scan(batch: memoryview, names: HeaderNames = NAMES, *, source_is_base: bool = False) -> BatchScan:
    return scan_batch(batch, names, WHERE, source_is_base=source_is_base, decompressed_bytes_max=LIMIT)


# --- batches of real producers ----------------------------------------------------------------------------------------

Built = list[tuple[int, bytes | None, bytes | None, Headers]]  # timestamp, key, value, headers


def _by_kafka_python(codec: int, records: Built) -> memoryview:
    return built_by(kafka.record.default_records.DefaultRecordBatchBuilder, records, codec=codec)


def _by_aiokafka(codec: int, records: Built) -> memoryview:
    return built_by(aiokafka.record.default_records.DefaultRecordBatchBuilder, records, codec=codec)


def _by_librdkafka(codec: str, records: Built) -> memoryview:
    """librdkafka produces to the mock broker that it has inside; a Fetch of our own gets the bytes back."""
    producer = Producer({"test.mock.num.brokers": 1, "compression.type": codec, "linger.ms": 60_000, "log_level": 0})
    broker = producer.list_topics("t", timeout=60).brokers[1]
    for timestamp, key, value, headers in records:
        producer.produce("t", value, key, partition=0, timestamp=timestamp, headers=list(headers))
    assert producer.flush(60) == 0  # which sends at once, and all in one batch
    with raw.Connection(f"{broker.host}:{broker.port}") as connection:
        answer = connection.query(raw.fetch("t", bytes_max=LIMIT), 4)
    return memoryview(bytes(answer.responses[0].partitions[0].records))


FLIGHTS: Built = [
    (NOW_MS + 70 * i, b"N%d" % i if i % 3 else None, b'{"flight": %d, "carrier": "UA", "origin": "EWR"}' % i, ())
    for i in range(200)
]
FLIGHTS[5] = (
    NOW_MS - 9_000_000,
    None,
    None,
    [("fencepost-expected-offset", b"105"), ("fencepost-write-id", b"load-7"), ("other", None)],
)


PRODUCERS: dict[str, Callable[[str], memoryview]] = {
    "kafka-python": lambda codec: _by_kafka_python(CODECS[codec], FLIGHTS),
    "aiokafka": lambda codec: _by_aiokafka(CODECS[codec], FLIGHTS),
    "librdkafka": lambda codec: _by_librdkafka(codec, FLIGHTS),
}


@pytest.mark.parametrize(
    ("producer", "codec"),
    [
        (producer, codec)
        for producer in PRODUCERS
        for codec in CODECS
        if producer != "kafka-python" or codec in ("none", "gzip")  # it needs further packages for the others
    ],
)
def test_what_real_producers_write_is_read(producer: str, codec: str) -> None:
    batch = PRODUCERS[producer](codec)
    scan = _scan(batch)
    assert scan.header.compression == CODECS[codec]
    assert scan.header.record_count == 200
    assert scan.expected_base_offset == 100
    assert scan.write_id == b"load-7"
    assert (scan.unreadable, scan.contradiction, scan.partition_count) == (None, None, None)
    assert scan.max_timestamp_ms == NOW_MS + 70 * 199
    assert verify_crc(batch)
    assert _digest(batch) == _digest(_by_kafka_python(0, FLIGHTS))


@pytest.mark.parametrize(
    ("bit", "name"), [(0x08, "is_log_append_time"), (0x10, "is_transactional"), (0x20, "is_control")]
)
def test_each_attribute_has_its_bit(bit: int, name: str) -> None:
    header = parse_batch_header(_batch([_record(0)], attributes=bit))
    flags = {flag: getattr(header, flag) for flag in ("is_log_append_time", "is_transactional", "is_control")}
    assert [flag for flag, is_set in flags.items() if is_set] == [name]
    assert header.compression == 0


# --- exactly one batch ------------------------------------------------------------------------------------------------

ONE = _batch([_record(0)])


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        pytest.param(b"", "shorter than its header", id="empty"),
        pytest.param(bytes(ONE)[:60], "shorter than its header", id="header-cut-off"),
        pytest.param(bytes(ONE)[:-1], "not one batch", id="cut-off"),
        pytest.param(bytes(ONE) + b"\0", "not one batch", id="left-over"),
        pytest.param(bytes(ONE) * 2, "not one batch", id="two"),
        pytest.param(_batch([_record(0)], magic=1), "magic 1", id="magic-1"),
        pytest.param(_batch([_record(0)], magic=0), "magic 0", id="magic-0"),
        pytest.param(_batch([_record(0)], magic=3), "magic 3", id="magic-3"),
        pytest.param(b"\0" * 26, "magic 0", id="old-message"),
        pytest.param(_batch([]), "has 0 records", id="no-records"),
        pytest.param(_batch([_record(0)], count=-1), "has -1 records", id="negative-count"),
        pytest.param(_batch([_record(0)], last_offset_delta=1), "has 1 records, but last offset delta 1", id="gap"),
        pytest.param(_batch([_record(0)], attributes=5), "codec 5", id="codec"),
        pytest.param(bytes(ONE)[:8] + b"\xff\xff\xff\xff" + bytes(ONE)[12:], "length of -1", id="negative-length"),
        pytest.param(bytes(ONE)[:8] + b"\0\0\0\x30" + bytes(ONE)[12:], "length of 48", id="impossible-length"),
    ],
)
def test_anything_but_one_complete_batch_is_malformed(records: bytes, reason: str) -> None:
    with pytest.raises(MalformedBatch, match=reason):
        require_single_batch(memoryview(records))
    with pytest.raises(MalformedBatch, match=reason):
        _scan(memoryview(records))


# --- expectations -----------------------------------------------------------------------------------------------------


def _expect(*values: bytes) -> Headers:
    return [("fencepost-expected-offset", value) for value in values]


def test_header_names_can_be_configured() -> None:
    names = HeaderNames(b"x-expect", b"x-count", b"x-id")
    batch = _saying(
        [("x-expect", b"3"), ("x-count", b"4"), ("x-id", b"id"), ("fencepost-expected-offset", b"nonsense")]
    )
    scan = _scan(batch, names)
    assert (scan.expected_base_offset, scan.partition_count, scan.write_id) == (3, 4, b"id")
    assert scan.unreadable is None


# --- walking over the records -----------------------------------------------------------------------------------------

#: Sizes on both sides of where a record's length takes one byte more, and beyond what the fast loop reads itself.
value_sizes = st.sampled_from([0, 1, 50, 52, 53, 54, 55, 56, 57, 58, 100, 8170, 8180, 8185, 8190, 9000])
#: Deltas on both sides of where a timestamp takes one byte more, both signs.
timestamp_deltas = st.sampled_from([0, 1, -1, 63, -64, 64, -65, 8191, -8192, 8192, -8193, 1_048_576, 2**40, -(2**40)])
KEYS = (b"k", b"", None)


@given(st.lists(st.tuples(value_sizes, timestamp_deltas, st.booleans()), min_size=1, max_size=12))
@example([(50, 0, False), (50, 0, False), (50, 1, False)])
def test_timestamps_and_expectations_are_found_at_any_size(rows: list[tuple[int, int, bool]]) -> None:
    records = [
        _record(
            i, _expect(b"%d" % (1000 + i)) if says else (), timestamp_delta=delta, key=KEYS[i % 3], value=b"v" * size
        )
        for i, (size, delta, says) in enumerate(rows)
    ]
    scan = _scan(_batch(records))
    assert scan.max_timestamp_ms == NOW_MS + max(delta for _, delta, _ in rows)
    assert scan.expected_base_offset == (1000 if any(says for _, _, says in rows) else None)
    assert (scan.contradiction, scan.unreadable) == (None, None)


def test_timestamp_may_be_missing_but_not_beyond_64_bits() -> None:
    """Kafka would see a time long ago where we saw one far ahead, and expire the producer's state by it."""
    assert _scan(_batch([_record(0)], base_timestamp_ms=-1)).max_timestamp_ms == -1
    with pytest.raises(MalformedBatch, match="timestamp does not fit 64 bits"):
        _scan(_batch([_record(0), _record(1, timestamp_delta=2**62)], base_timestamp_ms=2**62))


SAYING = _expect(b"41")


@pytest.mark.parametrize("headers", [(), SAYING], ids=["skipped", "parsed"])
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        pytest.param(lambda h: _batch([_record(0, h)], count=2), "malformed", id="fewer-records-than-claimed"),
        pytest.param(lambda h: _batch([_record(0, h)], count=RECORDS_MAX), "malformed", id="a-million-claimed"),
        pytest.param(lambda h: _batch([_record(0, h), _record(1)], count=1), "extra bytes", id="more-than-claimed"),
        pytest.param(lambda h: _batch([_record(0, h), b"\0"], count=1), "extra bytes", id="a-byte-left-over"),
        pytest.param(lambda h: _batch([_record(0, h)[:-1]]), "longer than its batch", id="last-byte-missing"),
        pytest.param(lambda h: _batch([varint(-5) + _record(0, h)]), "negative length", id="negative-length"),
        pytest.param(lambda h: _batch([varint(-500) + _record(0, h)]), "negative length", id="negative-length-2-bytes"),
        pytest.param(lambda h: _batch([varint(2**31 - 1) + _record(0, h)]), "longer", id="two-gigabytes"),
        pytest.param(lambda h: _batch([b"\xff" * 5 + b"\x01" + _record(0, h)]), "longer than 5", id="endless-length"),
        pytest.param(lambda h: _batch([varint(40) + b"\0" + b"\xff" * 40]), "longer than 10", id="endless-timestamp"),
    ],
)
def test_record_count_must_match_the_header(
    build: Callable[[Headers], memoryview], reason: str, headers: Headers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all records are read. Kafka always reads all (`test_malformed_records.py`)."""
    monkeypatch.setattr(product, "_WALKED_RECORDS_MAX", 1 << 40)
    with pytest.raises(MalformedBatch, match=reason):
        _scan(build(headers))


def _broken(body: bytes) -> memoryview:
    """A record with this after its offset delta. It contains the name of one of our headers, so that it is read."""
    body = b"\0\0\0" + body
    return _batch([varint(len(body)) + body])


NAME = sized(b"fencepost-expected-offset")


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        pytest.param(_batch([_record(5, SAYING)]), "offset delta 5", id="offset-delta"),
        pytest.param(_batch([_record(0), _record(0, SAYING)]), "offset delta 0", id="offset-delta-repeated"),
        pytest.param(_broken(b"\x01\x01" + varint(-1) + NAME), "invalid header count -1", id="negative-headers"),
        pytest.param(
            _broken(b"\x01\x01" + varint(2**31 - 1) + NAME), "invalid header count 2147483647", id="many-headers"
        ),
        pytest.param(_broken(b"\x01\x01\x02" + varint(500) + NAME), "invalid header name length 500", id="long-name"),
        pytest.param(_broken(b"\x01\x01\x02\x01" + NAME), "invalid header name length -1", id="null-name"),
        pytest.param(_broken(b"\x01\x01\x02" + NAME + varint(9)), "invalid header value length 9", id="long-value"),
        pytest.param(
            _broken(b"\x01\x01\x02" + NAME + b"\x01x"), "shorter than its length field", id="bytes-after-headers"
        ),
        pytest.param(_broken(varint(500) + NAME), "malformed", id="long-key"),
        pytest.param(_broken(b"\x01" + varint(2**31 - 1) + NAME), "malformed", id="long-record-value"),
    ],
)
def test_parsed_record_must_be_well_formed(batch: memoryview, reason: str) -> None:
    with pytest.raises(MalformedBatch, match=reason):
        _scan(batch)


@each_codec
def test_mutated_batch_parses_or_is_clients_fault(codec: str) -> None:
    headers = [[*_expect(b"%d" % (7 + i)), ("fencepost-write-id", b"w")] for i in range(4)]
    batch = _by_aiokafka(CODECS[codec], [(NOW_MS + i, b"key", b"value" * 20, each) for i, each in enumerate(headers)])
    assert _scan(batch).header.compression == CODECS[codec]
    refused = 0
    for changed in altered(batch):
        try:
            _scan(changed, source_is_base=True)
            digest_batch(changed, decompressed_bytes_max=LIMIT)
            digest_batch(changed, decompressed_bytes_max=LIMIT, ignore_timestamps=True)
        except ClientProtocolError:
            refused += 1
    assert refused > 50


def test_batch_decompressing_beyond_the_limit_is_refused() -> None:
    batch = _by_aiokafka(4, [(NOW_MS, None, b"\0" * 100_000, ())])
    assert len(batch) < 1000
    with pytest.raises(LimitError, match="limit of 100000 bytes"):
        scan_batch(batch, NAMES, WHERE, source_is_base=False, decompressed_bytes_max=100_000)
    with pytest.raises(LimitError):
        digest_batch(batch, decompressed_bytes_max=100_000)


# --- digests ----------------------------------------------------------------------------------------------------------

SOME: Built = [
    (NOW_MS, b"k", b"v" * 100, [("a", b"1"), ("b", None)]),
    (NOW_MS + 5, None, b"w" * 100, ()),
    (NOW_MS - 70, b"", None, [("a", b"")]),
]


def _digest(batch: memoryview, *, ignore_timestamps: bool = False) -> bytes:
    return digest_batch(batch, decompressed_bytes_max=LIMIT, ignore_timestamps=ignore_timestamps)


def _rewritten(batch: memoryview, **changes: int) -> memoryview:
    """The batch with fields of its header replaced, as a broker does when it appends."""
    header = parse_batch_header(batch)._replace(**changes)
    packed = struct.pack(">qiibIhiqqqhii", *header)
    return memoryview(packed + bytes(batch[61:]))


@each_codec
def test_digest_is_independent_of_packing(codec: str) -> None:
    unpacked = _by_kafka_python(0, SOME)
    packed = _rewritten(
        _by_aiokafka(CODECS[codec], SOME),
        base_offset=1_000_000,
        partition_leader_epoch=9,
        producer_id=5,
        producer_epoch=6,
        base_sequence=7,
        max_timestamp_ms=NOW_MS + 999,
    )
    assert _digest(packed) == _digest(unpacked)
    assert _digest(packed, ignore_timestamps=True) == _digest(unpacked, ignore_timestamps=True)


def _with(index: int, row: tuple[int, bytes | None, bytes | None, Headers]) -> Built:
    return [*SOME[:index], row, *SOME[index + 1 :]]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(SOME[:2], id="one-less"),
        pytest.param([*SOME, SOME[2]], id="one-more"),
        pytest.param([SOME[0], SOME[2], SOME[1]], id="order"),
        pytest.param(_with(0, (NOW_MS, b"K", b"v" * 100, SOME[0][3])), id="key"),
        pytest.param(_with(1, (NOW_MS + 5, b"", b"w" * 100, ())), id="empty-key-for-null"),
        pytest.param(_with(1, (NOW_MS + 5, None, b"w" * 99 + b"W", ())), id="value"),
        pytest.param(_with(0, (NOW_MS, b"k", b"v" * 100, [("b", None), ("a", b"1")])), id="header-order"),
        pytest.param(_with(2, (NOW_MS - 70, b"", None, [("a", None)])), id="null-header"),
    ],
)
def test_any_difference_in_the_records_gives_another_digest(other: Built) -> None:
    one, two = _by_kafka_python(0, SOME), _by_kafka_python(0, other)
    assert _digest(one) != _digest(two)
    assert _digest(one, ignore_timestamps=True) != _digest(two, ignore_timestamps=True)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([(t + 1, key, value, headers) for t, key, value, headers in SOME], id="all"),
        pytest.param(_with(2, (NOW_MS - 71, *SOME[2][1:])), id="one"),
    ],
)
def test_timestamps_count_unless_they_are_ignored(other: Built) -> None:
    one, two = _by_kafka_python(0, SOME), _by_kafka_python(0, other)
    assert _digest(one) != _digest(two)
    assert _digest(one, ignore_timestamps=True) == _digest(two, ignore_timestamps=True)
    assert _digest(one) != _digest(one, ignore_timestamps=True)


def test_record_attributes_count() -> None:
    """Kafka assigns them no meaning yet; what it assigns later must not be ignored."""
    body = _record(0)[1:]
    one, two = (_batch([varint(len(body)) + attributes + body[1:]]) for attributes in (b"\0", b"\1"))
    assert _digest(one) != _digest(two)
    assert _digest(one, ignore_timestamps=True) != _digest(two, ignore_timestamps=True)


def test_digest_is_independent_of_base_timestamp() -> None:
    """A broker that repacks a batch measures from its first record; the absolute timestamps stay."""
    deltas = [0, 64, -3, 9000]

    def measured_from(origin: int) -> memoryview:
        records = [_record(i, timestamp_delta=d - origin, value=b"v" * (50 + i)) for i, d in enumerate(deltas)]
        return _batch(records, base_timestamp_ms=NOW_MS + origin)

    digests = {_digest(measured_from(origin)) for origin in (0, 1, -1, 64, 100_000, -100_000)}
    assert len(digests) == 1
    assert digests.pop() == _digest(
        _by_kafka_python(0, [(NOW_MS + d, None, b"v" * (50 + i), ()) for i, d in enumerate(deltas)])
    )


def test_log_append_time_batch_compares_without_timestamps() -> None:
    """What a broker makes of it when it repacks: another base, all deltas zero, the attribute set."""
    sent = _batch([_record(i, timestamp_delta=7 * i) for i in range(3)])
    stored = _batch([_record(i) for i in range(3)], base_timestamp_ms=NOW_MS + 12_345, attributes=0x08, base_offset=88)
    assert _digest(sent, ignore_timestamps=True) == _digest(stored, ignore_timestamps=True)
    assert _digest(sent) != _digest(stored)


# --- changing a batch -------------------------------------------------------------------------------------------------


@each_codec
def test_fenced_batch_keeps_records_and_replaces_producer(codec: str) -> None:
    original = _rewritten(_by_aiokafka(CODECS[codec], FLIGHTS), base_offset=57, partition_leader_epoch=3)
    before = bytes(original)
    fenced = memoryview(fence_batch(original, producer_id=1 << 40, producer_epoch=32_767, base_sequence=2**31 - 1))
    assert bytes(original) == before
    assert verify_crc(fenced)
    assert kafka.record.default_records.DefaultRecordBatch(fenced).validate_crc()
    assert parse_batch_header(fenced) == parse_batch_header(original)._replace(
        base_offset=0,
        partition_leader_epoch=-1,
        producer_id=1 << 40,
        producer_epoch=32_767,
        base_sequence=2**31 - 1,
        crc=parse_batch_header(fenced).crc,
    )
    assert fenced[61:] == original[61:]
    assert _digest(fenced) == _digest(original)


def test_a_damaged_batch_has_a_wrong_crc() -> None:
    batch = _by_kafka_python(0, FLIGHTS)
    assert verify_crc(batch)
    for at in (17, 20, 21, 60, 61, len(batch) - 1):
        damaged = bytearray(batch)
        damaged[at] ^= 1
        assert not verify_crc(memoryview(damaged)), at


def test_a_zeroed_base_offset_changes_nothing_else() -> None:
    batch = _batch([_record(0)], base_offset=123_456_789_012)
    zeroed = zero_base_offset(batch)
    assert zeroed == bytes(8) + bytes(batch[8:])
    assert verify_crc(memoryview(zeroed))


@pytest.mark.parametrize(
    ("sequence", "count", "after"),
    [(0, 1, 1), (41, 0, 41), (2**31 - 1, 1, 0), (2**31 - 1, 5, 4), (2**31 - 2, 1, 2**31 - 1), (5, 2**31 - 1, 4)],
)
def test_sequences_wrap_as_kafkas_do(sequence: int, count: int, after: int) -> None:
    theirs = kafka.record.default_records.DefaultRecordBatch(ONE)._increment_sequence(sequence, count)
    assert sequence_add(sequence, count) == after == theirs


# --- a Fetch answer ---------------------------------------------------------------------------------------------------

OLD_MESSAGE = struct.pack(">qiIbb", 3, 14 + 5, 0, 1, 0) + b"\0" * 13  # offset, size, CRC, magic 1, attributes


def test_a_fetch_answer_falls_into_its_complete_batches() -> None:
    batches = [bytes(_batch([_record(i) for i in range(n)], base_offset=10 * n)) for n in (1, 2, 3)]
    data = memoryview(batches[0] + OLD_MESSAGE + batches[1] + batches[2])
    assert [bytes(batch) for _, batch in split_batches(data)] == batches
    assert [header.base_offset for header, _ in split_batches(data)] == [10, 20, 30]
    assert all(batch.obj is data.obj for _, batch in split_batches(data))
    for cut in range(1, len(batches[2]) + 1):
        assert [bytes(batch) for _, batch in split_batches(data[:-cut])] == batches[:2]


# --- work is bounded --------------------------------------------------------------------------------------------------

#: The shortest record; its offset delta is not read.
TINY = _record(0, key=None, value=None)


def test_more_records_than_the_limit_are_refused_unread() -> None:
    with pytest.raises(
        LimitError, match=f"{RECORDS_MAX + 1} records in a record batch exceed the limit of {RECORDS_MAX}"
    ):
        _scan(_batch([b"no record"], count=RECORDS_MAX + 1))
    with pytest.raises(LimitError, match="exceed the limit of"):
        _digest(_batch([b"no record"], count=RECORDS_MAX + 1))


def test_records_without_our_headers_are_not_walked_over() -> None:
    """Neither for their timestamps nor for the digest, wherever the base timestamp is."""
    batch = _batch([_record(0, timestamp_delta=9)] + [TINY] * 100_000)
    assert lines_of(lambda: _scan(batch)) < 50_000


_LIMITS: Any = {"source_is_base": False, "decompressed_bytes_max": LIMIT}


def test_proxy_header_after_too_many_records_is_refused() -> None:
    batch = _batch([TINY] * 50 + [_record(50, SAYING)])
    assert scan_batch(batch, NAMES, WHERE, **_LIMITS, effort=Effort(LIMIT, 70)).expected_base_offset == 41 - 50
    with pytest.raises(LimitError, match="records before a header for the proxy"):
        scan_batch(batch, NAMES, WHERE, **_LIMITS, effort=Effort(LIMIT, 50))


def test_large_batch_with_headers_for_the_proxy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "_COPIED_BYTES_MAX", 1_500_000)
    large = bytes(2_000_000)
    assert _scan(_batch([_record(0, value=large)])).expected_base_offset is None
    with pytest.raises(LimitError, match=r"above the limit of 1500000 \(send smaller batches: no setting raises it\)"):
        _scan(_batch([_record(0, SAYING, value=large)]))


@pytest.mark.parametrize("records", [1, 3])
def test_more_record_headers_than_the_steps_are_refused(records: int) -> None:
    batch = _batch([_record(i, [*SAYING, *[("other", None)] * 20]) for i in range(records)])
    with pytest.raises(LimitError, match="record headers in a record batch exceed"):
        scan_batch(batch, NAMES, WHERE, **_LIMITS, effort=Effort(LIMIT, 30))


def test_batch_emptied_by_compaction_can_be_digested() -> None:
    ((_, batch),) = split_batches(_batch([], last_offset_delta=4))
    assert _digest(batch) != _digest(ONE)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_batch([_record(0)], magic=3), id="magic-3"),
        pytest.param(bytes(8) + b"\xff\xff\xff\xff" + bytes(ONE)[12:], id="negative-length"),
        pytest.param(bytes(12) + bytes(ONE)[12:], id="zero-length"),
        pytest.param(bytes(8) + struct.pack(">i", -12) + bytes(60), id="length-that-would-loop"),
        pytest.param(bytes(8) + b"\0\0\0\x30" + bytes(ONE)[12:], id="shorter-than-a-header"),
        pytest.param(bytes(16) + b"\xff" + bytes(60), id="negative-magic"),
    ],
)
def test_impossible_fetch_response_is_the_brokers_fault(data: bytes) -> None:
    with pytest.raises(UpstreamProtocolError):
        list(split_batches(memoryview(data)))


def test_crc_of_parts_is_the_packages_crc_of_all() -> None:
    parts = random.Random(5).randbytes(61), memoryview(random.Random(6).randbytes(5_000)), b""
    assert checksum.crc32c(*parts) == crc32c.crc32c(b"".join(parts))
    assert checksum.crc32c() == crc32c.crc32c(b"") == 0
