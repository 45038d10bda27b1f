"""The selective scan against one that parses every record.

Batches here are made to mislead the first: names of headers inside keys and values, followed by just what a header
would say; headers twice; numbers with one digit more than the one before; records cut so that a name lies across two.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire import batch_scan as product
from fencepost_proxy.wire.batch_scan import BatchScan, HeaderNames, scan_batch
from fencepost_proxy.wire.compression import MalformedBatch
from tests.support.bytewise import CODECS, NOW_MS, batch, framed, record, sized, varint
from tests.support.properties import some

LIMIT = 1 << 20
INT64_MAX = 2**63 - 1
CLUSTER = b"Mk3OEYBSD34fcwNTJENDM2Qx"
NAMES = HeaderNames(cluster_id=CLUSTER)
WHERE = TopicPartition("orders", 3)
#: Names that contain each other and themselves.
AWKWARD = HeaderNames(b"aa", b"aaa", b"a-a", cluster_id=CLUSTER)
#: What may follow a number, and for what it was made; "" if that is here.
OF_PARTITION = {
    b"": "",
    b"@orders/3": "",
    b"@orders/3@" + CLUSTER: "",
    b"@orders/4": "orders/4",
    b"@other/3": "other/3",
    b"@orders/3@other": "orders/3 of cluster other",
    b"@orders.3/2147483648@" + CLUSTER: "orders.3/2147483648",
}
OF_TOPIC = {b"": "", b"@orders": "", b"@orders@" + CLUSTER: "", b"@other": "other", b"@orders@X": "orders of cluster X"}

Header = tuple[bytes, bytes | None]


class Row(NamedTuple):
    """A record before it is bytes. `place` is its offset delta, None where that is its index in the batch."""

    headers: tuple[Header, ...] = ()
    key: bytes | None = None
    value: bytes | None = b"value"
    timestamp_delta: int = 0
    place: int | None = None


class Stated(NamedTuple):
    expected_base_offset: int | None = None
    contradiction: tuple[int, int] | None = None
    unreadable: int | None = None
    partition_count: int | None = None
    write_id: bytes | None = None
    copied_from: str | None = None


def plainly(rows: list[Row], names: HeaderNames = NAMES) -> Stated | None:
    """What the rows say, by the rules and nothing else; None where a record with a header of ours is out of place."""
    stated = Stated()
    for index, row in enumerate(rows):
        observed = set()
        write_ids: list[bytes | None] = []
        is_copy = False
        for spelling, value in row.headers:
            alias_of = b"fencepost-" + spelling
            name = alias_of if alias_of in (names.expected_offset, names.partition_count, names.write_id) else spelling
            if name not in (names.expected_offset, names.partition_count, names.write_id):
                continue
            if row.place not in (None, index):
                return None
            if name == names.write_id:
                write_ids.append(value)
                continue
            if value is None:
                return stated._replace(unreadable=index)
            bindings = OF_PARTITION if name == names.expected_offset else OF_TOPIC
            digits = value[: len(value) - len(value.lstrip(b"0123456789"))]
            made_for = bindings.get(value[len(digits) :])
            number = int(digits) if made_for is not None and 0 < len(digits) <= 19 else None
            if number is not None and made_for:
                stated = stated._replace(copied_from=stated.copied_from or made_for)
                is_copy = is_copy or name == names.expected_offset
                continue
            if name in observed:
                return stated._replace(unreadable=index)
            observed.add(name)
            if name == names.partition_count:
                if number is None or not 1 <= number < 2**31 or stated.partition_count not in (None, number):
                    return stated._replace(unreadable=index)
                stated = stated._replace(partition_count=number)
            elif value != b"-1":
                if number is None or number > INT64_MAX:
                    return stated._replace(unreadable=index)
                if stated.expected_base_offset is None:
                    stated = stated._replace(expected_base_offset=number - index)
                elif stated.expected_base_offset != number - index and stated.contradiction is None:
                    stated = stated._replace(contradiction=(index, number))
        if write_ids and not is_copy:
            if len(write_ids) > 1 or not write_ids[0]:
                return stated._replace(unreadable=index)
            stated = stated._replace(write_id=stated.write_id or write_ids[0])
    return stated


def built(rows: list[Row], codec: str = "none", max_timestamp_ms: int | None = None) -> memoryview:
    records = [
        record(
            i if row.place is None else row.place,
            row.headers,
            timestamp_delta=row.timestamp_delta,
            key=row.key,
            value=row.value,
        )
        for i, row in enumerate(rows)
    ]
    if max_timestamp_ms is None:
        max_timestamp_ms = NOW_MS + max(row.timestamp_delta for row in rows)
    return batch(records, codec=codec, max_timestamp_ms=max_timestamp_ms)


def scanned(records: memoryview, names: HeaderNames = NAMES) -> BatchScan:
    return scan_batch(records, names, WHERE, source_is_base=False, decompressed_bytes_max=LIMIT)


def last_observed(records: memoryview, names: HeaderNames = NAMES) -> Stated | None:
    try:
        scan = scanned(records, names)
    except MalformedBatch:
        return None
    return Stated(
        scan.expected_base_offset,
        scan.contradiction and (scan.contradiction.record, scan.contradiction.expected),
        scan.unreadable and scan.unreadable.record,
        scan.partition_count,
        scan.write_id,
        scan.copied_from,
    )


@pytest.fixture(params=["searched", "walked"], autouse=True, scope="module")
def way(request: pytest.FixtureRequest) -> object:
    """Both ways at any size and number of the records."""
    patch = pytest.MonkeyPatch()
    patch.setattr(product, "_WALKED_RECORDS_MAX", 0 if request.param == "searched" else 1 << 40)
    yield
    patch.undo()


# --- drawn batches ----------------------------------------------------------------------------------------------------

#: Where numbers get a digit more, where offsets end, and a few parsed ones.
bases = st.sampled_from([0, 1, 7, 8, 9, 41, 95, 96, 98, 995, 10**18 - 2, INT64_MAX - 1, INT64_MAX, INT64_MAX - 5, 1234])


@st.composite
def rows_and_names(draw: st.DrawFn) -> tuple[list[Row], HeaderNames]:
    names = draw(st.sampled_from([NAMES, NAMES, NAMES, AWKWARD]))
    base = draw(bases)
    count = draw(st.integers(1, 9))
    partition_count = draw(st.sampled_from([b"6", b"12", b"06"])) + draw(st.sampled_from(list(OF_TOPIC)))
    binding = draw(st.sampled_from(list(OF_PARTITION)))

    def agreeing(index: int) -> tuple[Header, ...]:
        return (
            (names.expected_offset, b"%d%b" % (base + index, binding)),
            (names.partition_count, partition_count),
            (names.write_id, b"w%d" % index),
        )

    values = st.sampled_from([b"", b"-1", b"5", b"041", b"x", b"9223372036854775808", b"w" * 64, b"w" * 63]) | st.none()
    odd_values = values | st.sampled_from([b"7" + each for each in [*OF_PARTITION, *OF_TOPIC, b"@", b"@orders/03"]])

    def misleading(index: int) -> st.SearchStrategy[bytes | None]:
        """Bytes that resemble one of our headers where none is."""
        probes = [sized(name) + sized(stated) for name, stated in agreeing(index)]
        piece = st.sampled_from(
            [*probes, *(name for name, _ in agreeing(index)), b"\x02", b"\0", b"text", probes[0][:-1]]
        )
        return st.none() | st.lists(piece, max_size=4).map(b"".join)

    rows = []
    for index in range(count):
        canonical = agreeing(index)
        aliases = tuple((name.removeprefix(b"fencepost-"), value) for name, value in canonical)
        ours = draw(st.sampled_from([canonical, aliases, canonical + aliases]))
        odd = st.tuples(st.sampled_from([name for name, _ in ours]), odd_values)
        other = st.tuples(
            st.sampled_from([b"h", names.expected_offset + b"!", b"x" + names.write_id]), misleading(index)
        )
        headers = st.lists(st.sampled_from(ours), unique=True, max_size=3)
        if draw(st.integers(0, 3)) == 0:
            headers = st.lists(st.sampled_from(ours) | odd | other, max_size=4)
        rows.append(
            Row(
                tuple(draw(headers)),
                draw(misleading(index)),
                draw(misleading(index)),
                draw(st.sampled_from([0, 0, 0, 1, 70, -1, 999, 1000, 1001, 9000, -70, 2**40])),
                draw(st.sampled_from([None] * 12 + [0, index + 1])),
            )
        )
    return rows, names


@some
@given(rows_and_names(), st.sampled_from(sorted(CODECS)))
@example(([Row(((b"fencepost-expected-offset", b"9"),)), Row(((b"fencepost-expected-offset", b"10"),))], NAMES), "none")
@example(([Row(((b"fencepost-expected-offset", b"9"),)), Row(((b"fencepost-expected-offset", b"1"),))], NAMES), "none")
@example(
    (
        [
            Row(((b"fencepost-expected-offset", b"%d" % INT64_MAX),)),
            Row(((b"fencepost-expected-offset", b"%d" % 2**63),)),
        ],
        NAMES,
    ),
    "none",
)
@example(([Row(((b"fencepost-write-id", b"a"),)), Row(((b"h", b"fencepost-write-id"),))], NAMES), "none")
def test_batch_scan_agrees_with_a_simple_reading(case: tuple[list[Row], HeaderNames], codec: str) -> None:
    rows, names = case
    parsed = plainly(rows, names)
    stated = last_observed(built(rows, codec), names)
    if stated is None:
        # A record out of place need not have a header of ours to be noticed.
        assert any(row.place not in (None, index) for index, row in enumerate(rows))
    else:
        assert stated == parsed


@some
@given(rows_and_names(), st.sampled_from([-(2**40), -1, 0, 1, 999, 2**50]))
def test_reported_batch_time_is_never_after_newest_record(case: tuple[list[Row], HeaderNames], lie_ms: int) -> None:
    """And where the header is right, at most a second older."""
    rows = [row._replace(place=None) for row in case[0]]
    newest_ms = NOW_MS + max(row.timestamp_delta for row in rows)
    stated = scanned(built(rows))
    assert newest_ms - 1000 <= stated.max_timestamp_ms <= newest_ms
    lying = scanned(built(rows, max_timestamp_ms=newest_ms + lie_ms))
    assert lying.max_timestamp_ms <= newest_ms


@pytest.mark.parametrize("lie_ms", [-1, NOW_MS - 1, NOW_MS + 5000])
def test_wrong_timestamp_in_the_header_is_ignored(lie_ms: int) -> None:
    rows = [Row(timestamp_delta=delta) for delta in (0, 3000, 7, -4000)]
    stated = scanned(built(rows, max_timestamp_ms=lie_ms))
    assert stated.max_timestamp_ms == NOW_MS + 3000


# --- single stories ---------------------------------------------------------------------------------------------------


def _expect(offset: int) -> Header:
    return b"fencepost-expected-offset", b"%d" % offset


@pytest.mark.parametrize("count", [63, 64, 65, 200, 8191, 8192, 8193, 9000])
def test_every_record_may_state_its_expectation(count: int) -> None:
    rows = [Row((_expect(41 + i),), value=b"") for i in range(count)]
    assert last_observed(built(rows)) == Stated(41)
    rows[-1] = Row((_expect(41 + count),))
    assert last_observed(built(rows)) == Stated(41, (count - 1, 41 + count))


@pytest.mark.parametrize("count", [3, 70, 8200])
@pytest.mark.parametrize("timestamp_delta", [0, 100, 10_000])
def test_misplaced_record_with_matching_expectation_is_malformed(count: int, timestamp_delta: int) -> None:
    """Kafka would append it at another offset than the one it expects, where the batch is not compressed."""
    rows = [Row((_expect(41 + i),), timestamp_delta=timestamp_delta) for i in range(count)]
    assert last_observed(built(rows)) == Stated(41)
    for place in (0, count - 2, count, 2**31 - 1):
        assert last_observed(built([*rows[:-1], rows[-1]._replace(place=place)])) is None


def _write_id(value: bytes | None) -> Header:
    return b"fencepost-write-id", value


EXPECTS_41 = Row((_expect(41),))
#: Like the header of the second record.
RESEMBLES = sized(b"fencepost-expected-offset") + sized(b"42")
#: The length of its name, after the header's 1, reads as the missing digit of 10.
ONE = Row(((b"fencepost-expected-offset", b"1"), (b"n" * 24, b"")))
UNREADABLE = Row(((b"fencepost-expected-offset", b"?"),))
NEAR_THE_END = [Row((_expect(INT64_MAX - 2 + i),)) for i in range(5)]
MISLEADING = {
    "header after a value that resembles it": (
        [EXPECTS_41, Row((_expect(50),), value=b"x" + RESEMBLES)],
        Stated(41, (1, 50)),
    ),
    "value that resembles the next header": (
        [EXPECTS_41, Row(value=RESEMBLES), Row((_expect(44),))],
        Stated(41, (2, 44)),
    ),
    "headers after an unreadable one": (
        [EXPECTS_41, UNREADABLE, Row((_expect(99), _write_id(b"w")))],
        Stated(41, unreadable=1),
    ),
    "offset beyond 64 bits": (NEAR_THE_END, Stated(INT64_MAX - 2, unreadable=3)),
    "number without its last digit": ([*(Row((_expect(7 + i),)) for i in range(3)), ONE], Stated(7, (3, 1))),
    "null write-id": ([Row((_write_id(each),)) for each in (b"a", b"b", None)], Stated(write_id=b"a", unreadable=2)),
    "empty write-id": ([Row((_write_id(each),)) for each in (b"a", b"b", b"")], Stated(write_id=b"a", unreadable=2)),
}


@pytest.mark.parametrize("name", MISLEADING)
def test_misleading_records_are_read_correctly(name: str) -> None:
    rows, stated = MISLEADING[name]
    assert last_observed(built(rows)) == stated


def test_offsets_reach_the_end_of_64_bits() -> None:
    assert last_observed(built(NEAR_THE_END[:3])) == Stated(INT64_MAX - 2)


def test_name_across_two_records_is_no_header() -> None:
    """Its first bytes end one record, its last are the length and the body of the next."""
    tail = b"expect"
    head = framed(b"\0\0\x02" + sized(None) + sized(b"v") + b"\0")
    name = tail + head[:6]
    names = HeaderNames(name, b"count", b"id")
    first = record(0, [(b"h", tail)])
    assert name in first + head
    assert last_observed(batch([first, head]), names) == Stated()


def test_overlong_header_name_length_is_accepted() -> None:
    """Kafka reads such a length, too."""
    body = b"\0\0\x02" + sized(None) + sized(b"v") + varint(1) + b"\x9e\x00expected-offset" + sized(b"50")
    assert last_observed(batch([record(0, [_expect(41)]), framed(body)])) == Stated(41, (1, 50))


@pytest.mark.parametrize("name", [b"fencepost-expected-offset", b"fencepost-partition-count", b"fencepost-write-id"])
def test_duplicate_header_in_a_later_record_is_unreadable(name: bytes) -> None:
    rows = [Row(((name, b"%d" % (6 + (i if name == b"fencepost-expected-offset" else 0))),)) for i in range(3)]
    assert last_observed(built([*rows, rows[2]._replace(headers=rows[2].headers * 2)])).unreadable == 3  # type: ignore[union-attr]
