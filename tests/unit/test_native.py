"""Native code does with any bytes what Python does: two proxies get the same ones, and everything they write is equal.

Whole dialogues are compared in `test_fast_path.py`.
"""

from __future__ import annotations

import gc
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import pytest
from crc32c import crc32c
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder

from fencepost_policies.append import Check
from fencepost_policies.idempotence_level import Level
from fencepost_proxy.native_view import changed
from fencepost_proxy.sequencer.events import SequencerLimits
from fencepost_proxy.session.frames.messages import ClientBytes, CloseClient, Command
from fencepost_proxy.session.relay.native import MODULE, settings_for
from fencepost_proxy.session.relay.native_path import NativePath
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transport.memory_budget import MemoryBudget
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import FETCH, METADATA
from fencepost_proxy.wire.control import encode_response
from fencepost_proxy.wire.produce import (
    VERSION_MAX,
    VERSION_MIN,
    PartitionData,
    ProduceRequest,
    TopicData,
    encode_produce_request,
)
from fencepost_proxy.wire.schema import Message
from tests.fuzz.dialogue import NOW_MS, SHARED, TOPIC_IDS, FuzzServices, Wires
from tests.support import native_counts
from tests.support.batches import Row, batch, built_by, expecting
from tests.support.executors import NATIVE, PYTHON, executing, needs_native
from tests.support.properties import some
from tests.unit.test_fast_path import _decisive, _Talk
from tests.unit.test_session import HEARTBEAT, request

pytestmark = needs_native

NAMES = ("expected-offset", "partition-count", "write-id")
VERSIONS = range(VERSION_MIN, VERSION_MAX + 1)
#: Positions in the answer to one append: its topic's id; and what is only passed on, the log start.
_TOPIC_ID_AT = 10
_PASSED_ON = {*range(49, 57)}
_FRAME_BYTES_MAX = 1 << 20


class _Services(FuzzServices):
    frame_bytes_max = _FRAME_BYTES_MAX
    decompressed_bytes_max = _FRAME_BYTES_MAX
    read_here_bytes_max = _FRAME_BYTES_MAX


class _Proxy(_Talk):
    closed_because = ""

    def _command(self, wires: Wires, command: Command) -> None:
        if isinstance(command, CloseClient):
            self.closed_because = command.reason
        super()._command(wires, command)

    @property
    def free_bytes(self) -> int:
        free: int = self.services.free_bytes
        return free

    def _make_services(self, setup: dict[str, Any]) -> FuzzServices:
        return _Services(setup)


class _LongPipelines(_Proxy):
    """With the default limits of a process."""

    limits = SequencerLimits()

    def _make_services(self, setup: dict[str, Any]) -> FuzzServices:
        services = super()._make_services(setup)
        services.in_flight_requests_max = 100
        return services


class _Remembered(_Services):
    """As the services of a process: changes are reported."""

    fresh_until = float("inf")

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        if self.native is not None:
            self.memory = self.native[0].MemoryBudget(self.free_bytes)
            self.reserve, self.release = self.memory.reserve, self.memory.release
            self.native = settings_for(self, self.native[0].Shared(lambda: self.fresh_until, self.memory, True))  # type: ignore[arg-type]


class _RememberingProxy(_Proxy):
    @property
    def free_bytes(self) -> int:
        memory = getattr(self.services, "memory", None)
        return super().free_bytes - (0 if memory is None else memory.reserved_bytes)

    def _make_services(self, setup: dict[str, Any]) -> FuzzServices:
        return _Remembered(setup)


class _Both:
    """Two proxies, one of each executor. Their fences are confirmed, and their logs have a record."""

    def __init__(
        self,
        topic: str = "required",
        partitions: Sequence[int] = (0,),
        version: int = 12,
        make: type[_Proxy] = _Proxy,
    ) -> None:
        self.topic, self.version = topic, version
        self.counts: Counter[str] = Counter()
        self.proxies = []
        for executor in (PYTHON, NATIVE):
            with executing(executor):
                self.proxies.append(make())
        self.python, self.native = self.proxies
        for partition in partitions:
            self.append({partition: expecting(0, b"v", timestamp_ms=NOW_MS)})
            self.answer()
        # The clients are opened again, to count what native code does from here on.
        native_counts.count(self.native.services, self.counts)
        for proxy in self.proxies:
            proxy.client = proxy._wires(1)
        self.same("at the start")

    def each(self, do: Callable[[_Proxy], object]) -> None:
        for proxy in self.proxies:
            do(proxy)
        self.same()

    def send(self, data: bytes, cuts: Sequence[int] = ()) -> None:
        def send(proxy: _Proxy) -> None:
            proxy.client.client_wrote += data
            proxy._deliver_client(proxy.client, list(cuts))

        self.each(send)

    def request(self, batches: dict[int, Any], correlation_id: int = 1) -> bytes:
        return self.request_of(self.topic, batches, correlation_id, self.version)

    @staticmethod
    def request_of(
        topic: str, batches: dict[int, Any], correlation_id: int, version: int = 12, client_id: str | None = "client"
    ) -> bytes:
        data = tuple(PartitionData(partition, memoryview(bytes(made))) for partition, made in batches.items())
        topics = (TopicData(topic, TOPIC_IDS.get(topic), data),)
        return b"".join(
            encode_produce_request(ProduceRequest(version, correlation_id, client_id, b"", None, -1, 30_000, topics))
        )

    def append(self, batches: dict[int, Any], cuts: Sequence[int] = (), correlation_id: int = 1) -> None:
        self.send(self.request(batches, correlation_id), cuts)

    def append_at(self, offsets: Iterable[int]) -> None:
        """A record at each, one after the other."""
        for offset in offsets:
            self.append({0: expecting(offset, b"x", timestamp_ms=NOW_MS)})
            self.answer()

    def answer(self, cut: int = 0, count: int = 3) -> None:
        """Kafka answers everything, the log is read."""

        def answer(proxy: _Proxy) -> None:
            for _ in range(count):
                while proxy.control:
                    proxy._control(0, "true", 0)
                proxy._answer(proxy.client, "ok", 0, cut)

        self.each(answer)

    def same(self, when: str = "") -> None:
        for name in ("client_got", "upstream_got", "proxy_closed_client", "client_paused", "upstream_paused"):
            ours, theirs = (getattr(proxy.client, name) for proxy in (self.native, self.python))
            if name.endswith("_got") and self.native.client.proxy_closed_client:
                # How much was relayed of a frame that closed the connection depends on how it was relayed.
                assert ours.startswith(theirs) or theirs.startswith(ours)
                assert self.frames_of(ours) == self.frames_of(theirs)
            else:
                assert ours == theirs, f"{name} {when}"
        assert self.native.free_bytes == self.python.free_bytes, when
        logs = [[(log.end, log.batches) for log in proxy.logs.values()] for proxy in self.proxies]
        assert logs[0] == logs[1], when

    @staticmethod
    def frames_of(data: bytearray) -> int:
        """Complete ones."""
        at = count = 0
        while at + 4 + int.from_bytes(data[at : at + 4] or b"\xff" * 4, "big") <= len(data):
            at += 4 + int.from_bytes(data[at : at + 4], "big")
            count += 1
        return count

    def end(self) -> None:
        """Nothing is left, and what decides about the future is the same."""
        assert _decisive(self.native) == _decisive(self.python)
        for proxy in self.proxies:
            proxy._end_everything()
        assert _decisive(self.native) == _decisive(self.python)


# --- batches ----------------------------------------------------------------------------------------------------------

_numbers = st.sampled_from(
    [
        b"3@required/0",
        b"3@checked/0@fuzzed",
        b"3@other/0",
        b"3@",
        b"-1",
        b"0",
        b"2",
        b"3",
        b"03",
        b"+3",
        b" 1",
        b"1.0",
        b"",
        b"x",
        b"9" * 19,
        b"9223372036854775807",
        b"1" * 20,
    ]
)


@st.composite
def _header(draw: st.DrawFn) -> tuple[str, bytes | None]:
    name = draw(st.sampled_from((*NAMES, *(f"fencepost-{name}" for name in NAMES), "other", "x-write-id-y")))
    return name, draw(st.none() | _numbers | st.binary(max_size=20))


@st.composite
def _usual_headers(draw: st.DrawFn, index: int) -> list[tuple[str, bytes | None]]:
    headers: list[tuple[str, bytes | None]] = []
    if draw(st.booleans()):
        expected = 3 + index + draw(st.sampled_from((*(0,) * 20, -1, 1)))
        prefix = draw(st.sampled_from(("", "fencepost-")))
        headers.append((f"{prefix}expected-offset", b"%d" % expected))
    if draw(st.integers(0, 3)) == 3:
        headers.append((draw(st.sampled_from(("write-id", "fencepost-write-id"))), draw(st.binary(max_size=30))))
    return headers


@st.composite
def batches(draw: st.DrawFn) -> bytes:
    """Usual ones, odd ones, and such as no client makes."""
    count = draw(st.sampled_from((1, 1, 1, 2, 3, 7)))
    odd = draw(st.integers(0, 3)) == 3
    size = draw(st.sampled_from((1, 1, 10, 16 * 1024 - 200, 16 * 1024 - 61, 16 * 1024, 20_000)))
    rows: list[Row] = []
    for index in range(count):
        timestamp = NOW_MS + draw(st.sampled_from((*(0,) * 12, 1, 1000, 1001, -50, -90_000_000, 10**9)))
        headers = draw(st.lists(_header(), max_size=3)) if odd else draw(_usual_headers(index))
        if index == 0 and not odd:
            headers = headers or [("expected-offset", b"3")]
        value = draw(st.sampled_from((None, b"", b"v" * (size // count), b"write-id")))
        rows.append((timestamp, draw(st.sampled_from((None, b"key"))), value, headers))
    producer = draw(st.sampled_from((*((-1, -1, -1),) * 6, (5, 0, 0), (5, 0, -1), (1 << 62, 0, 3), (7000, 0, 1))))
    codec = draw(st.sampled_from((*(0,) * 12, 1)))
    made = bytearray(built_by(DefaultRecordBatchBuilder, rows, codec=codec, producer=producer))
    struct.pack_into(">q", made, 0, draw(st.sampled_from((*(0,) * 12, 1, 2, -1, -2, 1 << 62))))
    wrong = False
    for _ in range(draw(st.sampled_from((*(0,) * 9, 1, 2)))):
        at = draw(st.integers(0, min(len(made) - 1, 120)))
        made[at] = draw(st.integers(0, 255))
        wrong = draw(st.booleans())
    if draw(st.integers(0, 15)) == 15:
        made += draw(st.binary(max_size=5))
    if draw(st.integers(0, 15)) == 15:
        del made[draw(st.integers(1, len(made))) :]
    if not wrong and len(made) >= 61:
        struct.pack_into(">I", made, 17, crc32c(bytes(made[21:])))
    return bytes(made)


#: Batches that Python and native code read.
_READ: Counter[bool] = Counter()


@some
@given(batches(), st.sampled_from(("required", "checked")), st.sampled_from(([], [], [60], [9, 4000])))
def test_any_batch_is_read_as_python_reads_it(made: bytes, topic: str, cuts: list[int]) -> None:
    assume(made)
    both = _Both(topic)
    both.append_at((1, 2))  # by Python, by native code
    assert both.counts["native: appended"] == 1
    both.append({0: made}, cuts, 2)
    _READ[both.counts["native: appended"] == 2] += 1
    both.answer()
    both.append({0: expecting(both.python.logs[TopicPartition(topic, 0)].end, b"last", timestamp_ms=NOW_MS)}, [], 3)
    both.answer()
    both.end()


def test_both_read_some_of_these_batches() -> None:
    _READ.clear()
    test_any_batch_is_read_as_python_reads_it()
    print(_READ)
    assert min(_READ[by_native] for by_native in (False, True)) > 5


_OFFSET, _COUNT, _ID = (f"fencepost-{name}" for name in NAMES)
#: Headers of each record, at log end 3; and whether native code appends the batch.
_HEADERS: list[tuple[bool, list[list[tuple[str, bytes | None]]]]] = [
    (True, [[(_OFFSET, b"3")], [(_OFFSET, b"4")]]),
    (True, [[("expected-offset", b"03"), ("write-id", b"w")]]),
    (True, [[(_ID, b"w"), (_OFFSET, b"3")], [(_ID, b"x")], []]),
    (True, [[("x-write-id", b""), ("other", None), (_OFFSET, b"3")]]),
    (True, [[(_OFFSET, b"-1")], [(_OFFSET, b"4")]]),
    (True, [[(_OFFSET, b"3@required/0")], [(_OFFSET, b"4@required/0@fuzzed")], [(_OFFSET, b"5")]]),
    (True, [[(_OFFSET, b"03@required/0@fuzzed"), (_ID, b"w")]]),
    (False, [[(_OFFSET, b"3@required/0")], [(_OFFSET, b"5@required/0")]]),
    (False, [[(_OFFSET, b"4@required/1"), (_OFFSET, b"3@required/0")]]),
    *(
        (False, [[(_OFFSET, b"3" + place), (_ID, b"w")]])
        for place in (
            *(b"@", b"@required", b"@required/", b"@required/00", b"@required/+0", b"@require/0", b"@requireds/0"),
            b"@requires/0",
            *(b"@required/1", b"@required/0@", b"@required/0@fuzzed@", b"@required/0@other", b"@required/0 "),
            *(b"@required/2147483648", b"@required/4294967296", b"/0", b"@/0", b"@required0"),
        )
    ),
    (False, [[(_OFFSET, b"3"), (_OFFSET, b"3")]]),
    (False, [[(_OFFSET, b"3"), ("expected-offset", b"3")]]),
    (False, [[(_OFFSET, b"-1"), (_OFFSET, b"3")]]),
    (False, [[(_OFFSET, b"3")], [(_OFFSET, b"5")]]),
    (False, [[(_OFFSET, b"3")], [], [(_OFFSET, b"3")]]),
    (False, [[(_OFFSET, b"3"), (_ID, b"w"), ("write-id", b"w")]]),
    *((False, [[(_OFFSET, b"3"), (_ID, value)]]) for value in (b"", None)),
    *((False, [[(_OFFSET, b"3"), (_COUNT, value)]]) for value in (b"1", b"2", b"0", b"-1", b"x", None)),
    *(
        (False, [[(_OFFSET, value)]])
        for value in (None, b"", b"+3", b" 3", b"3 ", b"3.0", b"-3", b"2", b"4", b"9" * 19, b"0" * 19 + b"3", b"\xb3")
    ),
]


@pytest.mark.parametrize(("appended", "headers"), _HEADERS)
def test_headers_mean_the_same(appended: bool, headers: list[list[tuple[str, bytes | None]]]) -> None:
    rows: list[Row] = [(NOW_MS, None, b"v", each) for each in headers]
    _means_the_same(bytearray(built_by(DefaultRecordBatchBuilder, rows)), appended)


#: Position, format and value of a field that is changed in a usual batch, and whether native code appends it.
_FIELDS: list[tuple[bool, int, str, int]] = [
    *((True, 0, ">q", base) for base in (-1, 0, 3, 99)),
    (True, 0, ">q", -2),
    *((False, 8, ">i", length) for length in (-1, 0, 48, 49, 1 << 30, 2**31 - 1)),
    (True, 12, ">i", 5),
    *((False, 16, ">b", magic) for magic in (0, 1, 3, -1)),
    *((False, 21, ">h", attributes) for attributes in (1, 4, 7, 0x10, 0x20)),
    (True, 21, ">h", 0x7F << 7),
    *((False, 23, ">i", delta) for delta in (-1, 1, 2**31 - 1)),
    (False, 27, ">q", -(2**63)),
    (True, 27, ">q", 2**63 - 1),
    *((False, 43, ">q", producer_id) for producer_id in (1 << 62, 2**63 - 1, 7000)),
    *((False, 57, ">i", count) for count in (-1, 0, 2, 2**31 - 1)),
    *((False, 61, ">B", length) for length in (0, 1, 0x7F, 0xFF)),
    *((False, 63, ">B", delta) for delta in (0x80, 0xFF)),
]


@pytest.mark.parametrize(("appended", "at", "kind", "given"), _FIELDS)
def test_fields_of_batches_mean_the_same(appended: bool, at: int, kind: str, given: int) -> None:
    made = bytearray(expecting(3, b"v", timestamp_ms=NOW_MS))
    struct.pack_into(kind, made, at, given)
    _means_the_same(made, appended)


@pytest.mark.parametrize("size", [1, 16 * 1024 - 120, 16 * 1024, 40_000])
@pytest.mark.parametrize("at", [17, 30, -1])
def test_wrong_crc_is_noticed(at: int, size: int) -> None:
    made = bytearray(expecting(3, b"v" * size, timestamp_ms=NOW_MS))
    made[at] ^= 1
    _means_the_same(made, False, crc_fits=False)


@pytest.mark.parametrize("more", [b"\0", b"xx", bytes(61)])
def test_bytes_after_a_batch_are_noticed(more: bytes) -> None:
    made = expecting(3, b"v", timestamp_ms=NOW_MS)
    _means_the_same(bytearray(made) + more, False)
    longer = bytearray(made) + more
    struct.pack_into(">i", longer, 8, len(longer) - 12)
    _means_the_same(longer, False)


def _means_the_same(made: bytearray, appended: bool, *, crc_fits: bool = True) -> None:
    if crc_fits:
        struct.pack_into(">I", made, 17, crc32c(bytes(made[21:])))
    both = _Both()
    both.append_at((1, 2))
    both.append({0: made}, [], 2)
    assert (both.counts["native: appended"] == 2) is appended
    both.answer()
    both.end()


@pytest.mark.parametrize("version", [7, 12, 13])
def test_usual_batches_are_for_native_code(version: int) -> None:
    both = _Both(version=version)
    for number, size in enumerate((1, 100, 16 * 1024 - 100, 16 * 1024 - 61, 16 * 1024, 40_000)):
        both.append({0: expecting(1 + number, b"v" * size, write_id=b"w", timestamp_ms=NOW_MS)}, [], number)
        both.answer()
    print(both.counts)
    assert both.counts["native: completed"] >= 4
    both.end()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("client_id", [None, "client"])
def test_appends_of_every_version_are_for_native_code(version: int, client_id: str | None) -> None:
    both = _Both(partitions=(0, 1), version=version)
    for offset in range(1, 5):
        made = {partition: expecting(offset, b"x", timestamp_ms=NOW_MS) for partition in (1, 0)}
        both.send(both.request_of(both.topic, made, offset, version, client_id), [60] if offset == 3 else [])
        both.answer()
    assert both.counts["native: several partitions completed"] == 3  # Python reads the first one
    both.end()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("error", [0, 7])
def test_python_answers_appends_of_every_version_that_native_code_sent(version: int, error: int) -> None:
    both = _Both(version=version)
    both.append_at((1, 2))
    both.append({0: expecting(3, b"x", timestamp_ms=NOW_MS)}, [], 7)
    both.send(request(METADATA, 5, 8, struct.pack(">i?", 0, False)))
    assert both.counts["native: returned"] == 1
    _answer_with(both, [(31, error)] if error else [])
    both.answer()
    both.end()


def test_flexible_partitions_of_an_old_request_are_malformed() -> None:
    both, made = _Both(version=7), {0: expecting(2, b"x", timestamp_ms=NOW_MS)}
    both.append_at((1,))
    old, flexible = (both.request_of("required", made, 2, version).partition(b"required") for version in (7, 12))
    both.send(_framed((old[0] + old[1] + flexible[2])[4:]))
    assert both.python.client.proxy_closed_client
    assert both.python.logs[TopicPartition("required", 0)].end == 2


def test_appends_that_never_arrive_whole_are_for_native_code() -> None:
    """Batches of a megabyte arrive in pieces from a connection's first one on."""
    both = _Both()
    for number in range(3):
        both.append({0: expecting(1 + number, b"v" * 10_000, timestamp_ms=NOW_MS)}, [900], number)
        both.answer()
    assert both.counts["native: collected"] == 2  # Python reads the first one
    both.end()


@pytest.mark.parametrize("version", [7, 12])
@pytest.mark.parametrize("in_flight", [1, 3, 5])
def test_full_pipeline_returns_to_native_code(in_flight: int, version: int) -> None:
    """One request that only the general path handles does not keep the later ones of a busy connection there."""
    both = _Both(make=_LongPipelines, version=version)
    both.append_at(range(1, 3))
    offsets = iter(range(3, 100))

    def append(version: int = version) -> None:
        offset = next(offsets)
        made = {0: expecting(offset, b"x", timestamp_ms=NOW_MS)}
        both.send(both.request_of("required", made, offset, version))

    def one_by_one(count: int) -> None:
        for _ in range(count):
            both.answer(count=1)
            append()

    for _ in range(in_flight):
        append()
    append(version=9)  # the next one starts differently, too
    before = both.counts.copy()
    one_by_one(5)
    assert both.counts["native: appended"] == before["native: appended"] + 4
    one_by_one(2 * in_flight)
    assert both.counts["native: returned"] == before["native: returned"]
    assert both.counts["native: completed"] >= before["native: completed"] + in_flight
    both.answer(count=2 * in_flight)
    both.end()


# --- several partitions, several requests -----------------------------------------------------------------------------


@some
@given(
    st.lists(st.tuples(st.sampled_from(((0,), (1,), (0, 1), (1, 0))), st.integers(1, 3)), min_size=1, max_size=4),
    st.integers(0, 90),
    st.sampled_from((3, 7, 8, 12)),
)
def test_requests_and_answers_are_encoded_equally(
    requests: list[tuple[tuple[int, ...], int]], cut: int, version: int
) -> None:
    both, ends = _Both(partitions=(0, 1), version=version), [1, 1]
    both.append_at((1,))
    ends[0] += 1
    for number, (partitions, count) in enumerate(requests):
        made = {}
        for partition in partitions:
            made[partition] = expecting(ends[partition], *[b"v"] * count, timestamp_ms=NOW_MS)
            ends[partition] += count
        both.append(made, [], number)
    both.answer(cut, 6)
    both.end()


# --- answers ----------------------------------------------------------------------------------------------------------


@some
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 255)), max_size=2), st.integers(0, 3), st.integers(0, 40))
def test_any_answer_means_the_same(changes: list[tuple[int, int]], extra: int, cut: int) -> None:
    both = _Both()
    both.append_at((1,))
    both.append({0: expecting(2, b"a", timestamp_ms=NOW_MS)}, [], 7)
    _answer_with(both, changes, extra, cut)
    both.answer()
    both.end()


def _answer_with(both: _Both, changes: list[tuple[int, int]], extra: int = 0, cut: int = 0) -> None:
    def answer(proxy: _Proxy) -> None:
        if not proxy.client.queried:
            return
        answer = bytearray(proxy._produced(proxy.client.queried.popleft(), "ok", 0))
        for at, value in changes:
            if at < len(answer):
                answer[at] = value
        answer += b"\0" * extra
        proxy.client.lied = True
        proxy.client.upstream_wrote += answer
        proxy._deliver_upstream(proxy.client, cut)

    both.each(answer)


def test_each_field_of_an_answer_counts() -> None:
    """A wrong one is never taken for the expected success."""
    taken = set()
    for at in range(8, 4 + 23 + 33 + 6):
        completed = 0
        for value in (1, 255):
            both = _Both()
            both.append_at((1,))
            both.append({0: expecting(2, b"a", timestamp_ms=NOW_MS)}, [], 7)
            _answer_with(both, [(at, value)])
            completed += both.counts["native: completed"]
            assert _decisive(both.native) == _decisive(both.python), (at, value)
        if completed == 2:
            taken.add(at)
    assert taken == _PASSED_ON


# --- streams ----------------------------------------------------------------------------------------------------------


@some
@given(st.integers(0, 2**32), st.lists(st.integers(1, 200), max_size=6), st.integers(0, 200))
def test_relayed_streams_are_cut_in_the_same_way(seed: int, cuts: list[int], cut: int) -> None:
    rng, both = random.Random(seed), _Both("relay")
    stream = bytearray()
    for number in range(rng.randrange(1, 8)):
        if rng.random() < 0.5:
            stream += both.request({0: expecting(5, b"r" * rng.randrange(300), timestamp_ms=NOW_MS)}, number)
        else:
            body = struct.pack(">hhih", rng.choice((1, 11, 12, 14)), rng.choice((3, 4, 13)), number, 1) + b"c"
            body += rng.randbytes(rng.randrange(80)) + (b"__state" if rng.random() < 0.1 else b"")
            stream += _framed(body)
    both.send(bytes(stream), cuts)
    both.answer(cut, 10)
    both.end()


@some
@given(
    st.lists(st.sampled_from(("plain", "endpoints", "tags", "empty", "noise")), min_size=1, max_size=5),
    st.sampled_from((15, 16, 17, 18)),
    st.integers(0, 200),
    st.integers(0, 2**32),
)
@example(["tags"], 17, 0, 1)
@example(["endpoints"], 17, 0, 1)
def test_addresses_after_records_are_rewritten_in_the_same_way(
    kinds: list[str], version: int, cut: int, seed: int
) -> None:
    rng, both = random.Random(seed), _Both("relay")
    requests = [struct.pack(">hhih", FETCH, version, number, -1) + b"\0..." for number in range(len(kinds))]
    both.send(b"".join(map(_framed, requests)))
    answers = [_fetched(kind, number, version, rng) for number, kind in enumerate(kinds)]

    _answer_raw(both, answers, cut)
    if version > 15:
        assert b"broker.internal" not in both.native.client.client_got
    both.end()


@pytest.mark.parametrize("topics", [b"\x7f", b"\xff" * 5])
@pytest.mark.parametrize("cut", [20, 33, 50, 120])
def test_malformed_response_that_arrives_in_pieces_closes_the_connection(cut: int, topics: bytes) -> None:
    both = _Both("relay")
    request = struct.pack(">hhih", FETCH, 17, 0, -1) + b"\0..."
    both.send(_framed(request))
    partition = Message(partition_index=0, records=bytes(100))
    made = Message(responses=[Message(topic_id=UUID(int=5), partitions=[partition])])
    data = bytearray(struct.pack(">i", 0) + b"\0" + encode_response(FETCH, 17, made))
    data[15 : 15 + len(topics)] = topics  # their number

    _answer_raw(both, [bytes(data)], cut)
    assert both.native.client.proxy_closed_client
    for proxy in both.proxies:
        assert "malformed Fetch v17 response" in proxy.closed_because


def _answer_raw(both: _Both, answers: Sequence[bytes], cut: int) -> None:
    def answer(proxy: _Proxy) -> None:
        proxy.client.queried.clear()
        proxy.client.lied = True
        proxy.client.upstream_wrote += b"".join(map(_framed, answers))
        proxy._deliver_upstream(proxy.client, cut)

    both.each(answer)


def _framed(body: bytes | bytearray) -> bytes:
    return struct.pack(">i", len(body)) + body


def _fetched(kind: str, correlation_id: int, version: int, rng: random.Random) -> bytes:
    partition = Message(partition_index=0, records=rng.randbytes(rng.randrange(300)))
    partition.aborted_transactions = rng.choice((None, [], [Message(producer_id=1, first_offset=2)] * 3))
    topics = [Message(topic_id=UUID(int=5), partitions=[partition] * rng.randrange(3))] * rng.randrange(3)
    made = Message(responses=topics)
    if kind == "endpoints":
        made.node_endpoints = [Message(node_id=1, host="broker.internal", port=9092, rack=None)]
    elif kind == "tags":
        partition.current_leader = Message(leader_id=1, leader_epoch=2)
        made.unknown_tags = ((9, b"later"),)
    elif kind == "empty":
        made.responses = []
    data = bytearray(struct.pack(">i", correlation_id) + b"\0" + encode_response(FETCH, version, made))
    if kind == "noise":
        data[rng.randrange(4, len(data))] = rng.randrange(256)
    return bytes(data)


# --- hostile input ----------------------------------------------------------------------------------------------------


@some
@given(
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=3),
    st.sampled_from((None, -1, 0, 7, 8, 9, 2**31 - 1, -(2**31))),
    st.integers(0, 400),
    st.lists(st.integers(1, 90), max_size=3),
    st.sampled_from((7, 12)),
)
def test_hostile_requests_do_the_same(
    changes: list[tuple[int, int]], length: int | None, cut_off: int, cuts: list[int], version: int
) -> None:
    both = _Both(partitions=(0, 1), version=version)
    both.append_at((1,))
    usual = both.request({0: expecting(2, b"a", timestamp_ms=NOW_MS), 1: expecting(1, b"a", timestamp_ms=NOW_MS)})
    data = bytearray(usual)
    for at, value in changes:
        data[at % len(data)] = value
    if length is not None:
        struct.pack_into(">i", data, 0, length)
    if cut_off < len(data):
        del data[len(data) - cut_off :]
    both.send(bytes(data) + usual, cuts)
    both.answer()
    both.end()


@some
@given(st.binary(max_size=100), st.integers(-1, 2**31 - 1), st.sampled_from((7, 12)))
def test_noise_after_a_known_start_does_the_same(noise: bytes, length: int, version: int) -> None:
    both = _Both(version=version)
    usual = both.request({0: expecting(1, b"x", timestamp_ms=NOW_MS)})
    both.send(usual)
    both.answer()
    start = usual[4 : usual.index(b"required") + len(b"required")]
    both.send(struct.pack(">i", len(start) + len(noise)) + start + noise)
    both.answer()
    both.send(struct.pack(">i", length) + start + noise)
    both.answer()
    both.end()


@pytest.mark.parametrize("version", [8, 9, 12, 13])
@pytest.mark.parametrize("producer_id", [6, SHARED])
@pytest.mark.parametrize("at", [0, 2])
def test_producer_ids_of_relayed_requests_are_read_wherever_they_are_cut(
    version: int, producer_id: int, at: int
) -> None:
    counts: Counter[str] = Counter()
    for cut in range(25, 430, 7):
        both = _Both("relay", version=version)
        made = {index: bytes(batch(b"x" * 60, timestamp_ms=NOW_MS)) for index in range(3)}
        both.append(made, [], 1)
        made[at] = bytes(batch(b"x" * 60, timestamp_ms=NOW_MS, producer=(producer_id, 0, 0)))
        both.append(made, [cut, 11], 2)
        both.append({0: batch(b"y", timestamp_ms=NOW_MS)}, [cut], 3)
        both.answer()
        assert both.native.client.proxy_closed_client == (producer_id == SHARED)
        counts += both.counts
    assert counts["native: relayed in pieces"] >= 9


@pytest.mark.parametrize("version", [12, 13])
def test_topic_id_is_the_clients_for_both(version: int) -> None:
    """Another topic has the name: only a client that names the topic appends to it."""
    both = _Both(version=version, make=_RememberingProxy)
    both.append_at((1,))
    replaced = UUID(int=4711)
    for proxy in both.proxies:
        proxy.services.topic_id = lambda topic: replaced
    with executing(NATIVE):
        changed()
    completed = both.counts["native: completed"]
    both.append({0: expecting(2, b"x", timestamp_ms=NOW_MS)})
    if version == 13:
        answer = bytes(both.python.client.client_got[-80:])
        assert TOPIC_IDS["required"].bytes + b"\2" + struct.pack(">ih", 0, 100) in answer
    assert both.counts["native: completed"] == completed


def test_varints_of_ten_bytes_and_many_partitions_do_the_same() -> None:
    one = expecting(1, b"x", timestamp_ms=NOW_MS)
    both = _Both()
    usual = both.request({0: one})
    at = usual.index(b"required") + len(b"required")
    long = b"\xff" * 9 + b"\x01"
    for ending in (
        b"\x80" + bytes(20),
        long + usual[at + 1 :],
        usual[at : at + 5] + long + usual[at + 6 :],
        b"\x80" + b"".join(struct.pack(">i", number) + b"\x02\0\0" for number in range(127)) + b"\0\0",
        b"\x7f" + b"".join(struct.pack(">i", number) + b"\x02\0\0" for number in range(126)) + b"\0\0",
    ):
        frame = usual[4:at] + ending
        other = _Both()
        other.append({0: one})
        other.answer()
        other.send(_framed(frame))
        other.answer()
        other.end()
    data = usual[at + 1 : -2]
    frame = usual[4:at] + b"\x03" + data + data + b"\0\0"
    both.send(usual)
    both.answer()
    both.send(_framed(frame))
    both.answer()
    both.end()


def test_topic_ids_of_answers_are_compared() -> None:
    both = _Both()
    both.append_at((1,))
    both.append({0: expecting(2, b"a", timestamp_ms=NOW_MS)}, [], 7)
    _answer_with(both, list(enumerate(TOPIC_IDS["checked"].bytes, _TOPIC_ID_AT)))
    assert both.native.client.proxy_closed_client


@contextmanager
def _over_sockets(
    topic: str = "required",
) -> Iterator[tuple[_Proxy, Any, socket.socket, socket.socket, Callable[[], Any]]]:
    """A native proxy with a permit, its session, the client's and the broker's ends, and a call that reads requests."""
    both = _Both(topic)
    both.append_at((1, 2))
    proxy = both.native
    proxy.services.free_bytes = proxy.services.memory_bytes = 1 << 20
    session = proxy.dispatcher.sessions[proxy.client.number]
    client, near_client = socket.socketpair()
    broker, near_broker = socket.socketpair()
    with client, near_client, broker, near_broker:
        for sock in (client, near_client, broker, near_broker):
            sock.setblocking(False)
        fds = near_client.fileno(), near_broker.fileno()
        yield proxy, session, client, broker, lambda: session.fast_path.pump_up(*fds, 0, proxy.now)


def test_large_append_whose_permit_ends_while_it_arrives_is_sent() -> None:
    """It is received where it stays, so no other bytes come with its last ones."""
    with _over_sockets() as (proxy, session, client, broker, pump):
        requests = [
            _Both.request_of("required", {0: expecting(offset, b"x" * 100_000, timestamp_ms=NOW_MS)}, offset)
            for offset in (3, 4)
        ]
        client.send(requests[0])
        assert pump()[2:4] == (None, None)  # large ones are expected from now on
        assert len(broker.recv(1 << 20)) > 100_000
        client.send(requests[1][:50_000])
        assert pump()[2:4] == (None, None)
        proxy.dispatcher.sequencer(TopicPartition("required", 0)).issued.take_back()
        client.send(requests[1][50_000:])
        rest = pump()[2]
        assert rest
        taken, out = session.fast_path.take_up(memoryview(rest), proxy.now)
        assert taken == len(rest)
        assert len(b"".join(out)) > 100_000


@pytest.mark.parametrize("producer_id", [6, SHARED])
def test_large_batches_are_relayed_up_to_one_of_a_producer_id_of_the_proxy(producer_id: int) -> None:
    """After a request with a large batch, the next one's batches are relayed unread, but for their headers."""
    large = bytes(batch(b"x" * 400_000, timestamp_ms=NOW_MS))
    last = bytes(batch(b"x" * 400_000, timestamp_ms=NOW_MS, producer=(producer_id, 0, 0)))
    requests = [_Both.request_of("relay", {0: large, 1: each}, number) for number, each in ((7, large), (8, last))]
    relayed = b""
    with _over_sockets("relay") as (proxy, session, client, broker, pump):
        for request in requests:
            left, rest, received = memoryview(request), None, True
            while rest is None and (left or received):
                with suppress(BlockingIOError):
                    left = left[client.send(left) :]
                received, _, rest, *_ = pump()
                with suppress(BlockingIOError):
                    relayed += broker.recv(1 << 20)
        if rest is not None:
            session.handle(ClientBytes(memoryview(rest)), proxy.now)
        assert session.state.closing == (producer_id == SHARED)
    assert b"".join(requests).startswith(relayed)
    assert (last[:61] in relayed) == (producer_id != SHARED)
    assert len(relayed) > len(requests[0]) + len(large)


def test_position_of_a_large_append_counts_the_requests_before_it() -> None:
    """They are done with in the same call."""
    with _over_sockets() as (_, session, client, _, pump):
        large, small, last = (
            _Both.request_of("required", {0: expecting(offset, b"x" * size, timestamp_ms=NOW_MS)}, offset)
            for offset, size in ((3, 100_000), (4, 10), (5, 100_000))
        )
        first = session.state.received_bytes
        for data in (large, small + last):
            client.send(data)
            pump()
        connection = session.fast_path.native.connection
        assert connection is not None
        starts = [checked[1] for *_, checked in connection.return_requests() if checked is not None]
    assert starts == [first + 4, first + len(large) + 4, first + len(large + small) + 4]


# --- circumstances ----------------------------------------------------------------------------------------------------


def _set(name: str, given: object) -> Callable[[_Proxy], None]:
    return lambda proxy: setattr(proxy.services, name, given)


def _passes(seconds: float) -> Callable[[_Proxy], None]:
    def later(proxy: _Proxy) -> None:
        proxy.now += seconds

    return later


_CIRCUMSTANCES: dict[str, Callable[[_Proxy], object]] = {
    "another leader": _set("leader_epoch", lambda partition: 1),
    "another proxy": _set("is_alone", False),
    "not taken over": _set("is_taken_over", False),
    "another instance id": _set("instance_id", 77),
    "virtual configs are old": _set("is_fresh", False),
    "a policy that checks nothing": _set("policy", lambda topic: None),
    "a policy that is equal": _set("policy", lambda topic: TopicPolicy(Check.ON)),
    "a policy that requires": _set("policy", lambda topic: TopicPolicy(Check.REQUIRED)),
    "a policy with levels": _set("policy", lambda topic: TopicPolicy(Check.ON, idempotence=Level.REQUIRED)),
    "a recreated topic": _set("topic_id", lambda topic: UUID(int=4)),
    "an older broker": _set("newest_produce", 12),
    "no memory": _set("free_bytes", 10),
    "a day later": _passes(86_400.0),
    "an hour later": _passes(3600.0),
    "seven hours later": _passes(7 * 3600.0),
}


@pytest.mark.parametrize("circumstance", _CIRCUMSTANCES)
@pytest.mark.parametrize("in_flight", [0, 1])
def test_circumstances_count_for_both(circumstance: str, in_flight: int) -> None:
    both = _Both("checked")
    both.append_at(range(1, 3))
    if in_flight:
        both.append({0: expecting(3, b"y", timestamp_ms=NOW_MS)})
    assert both.counts["native: appended"] == 1 + in_flight
    both.each(_CIRCUMSTANCES[circumstance])
    end = 3 + in_flight
    both.append({0: expecting(end, b"z", timestamp_ms=NOW_MS)}, [], 2)
    both.append({0: expecting(end + 1, b"z", timestamp_ms=NOW_MS)}, [40], 3)
    both.answer()
    assert _decisive(both.native) == _decisive(both.python)


@pytest.mark.parametrize("circumstance", sorted(_CIRCUMSTANCES.keys() - {"no memory"}))
def test_reported_changes_count_where_native_code_remembers(circumstance: str) -> None:
    both = _Both("checked", make=_RememberingProxy)
    both.append_at(range(1, 4))
    both.each(_CIRCUMSTANCES[circumstance])
    changed()
    both.append({0: expecting(4, b"z", timestamp_ms=NOW_MS)}, [], 2)
    both.answer()
    assert _decisive(both.native) == _decisive(both.python)


@pytest.mark.parametrize(
    "circumstance", sorted(_CIRCUMSTANCES.keys() - {"no memory", "a day later", "an hour later", "seven hours later"})
)
def test_verification_finds_a_change_that_was_not_reported(circumstance: str) -> None:
    both = _Both("checked", make=_RememberingProxy)
    both.append_at(range(1, 4))
    both.each(_CIRCUMSTANCES[circumstance])
    with pytest.raises(RuntimeError, match="`changed` was not called"):
        both.append({0: expecting(4, b"z", timestamp_ms=NOW_MS)})


@pytest.mark.parametrize("api_key", [HEARTBEAT, METADATA], ids=["relayed", "rewritten"])
def test_append_waits_for_requests_of_other_apis(api_key: int) -> None:
    """Kafka handles them first. Native code relays the first kind, and Python keeps the other."""
    both = _Both("checked")
    both.append_at((1, 2))
    version, body = (4, bytes(30)) if api_key == HEARTBEAT else (5, struct.pack(">i?", 0, False))
    other = request(api_key, version, 7, body)
    sent, appended = len(both.native.client.upstream_got), both.counts["native: appended"]
    assert appended
    both.send(other + both.request({0: expecting(3, b"z", timestamp_ms=NOW_MS)}, 8))
    assert len(both.native.client.upstream_got) <= sent + len(other) + 100  # a rewritten one may be longer
    assert both.counts["native: appended"] == appended
    both.answer()
    assert len(both.native.client.upstream_got) > sent + len(other)


def test_response_to_append_is_awaited_in_both() -> None:
    both = _Both("checked")
    both.append_at((1, 2))
    both.append({0: expecting(3, b"z", timestamp_ms=NOW_MS)})
    paths = [proxy.dispatcher.sessions[proxy.client.number].fast_path for proxy in both.proxies]
    assert [path.awaits_append for path in paths] == [True, True]
    both.answer()
    assert [path.awaits_append for path in paths] == [False, False]


def test_what_time_ends_is_not_reported() -> None:
    both = _Both("checked", make=_RememberingProxy)
    for offset in range(1, 4):
        both.append_at((offset,))
        both.native.services.fresh_until = both.native.now + 5
        changed()
    both.each(_passes(5))
    both.each(_set("is_fresh", False))
    both.append({0: expecting(4, b"z", timestamp_ms=NOW_MS)}, [], 2)
    assert both.counts["native: completed"] == 2
    assert _decisive(both.native) == _decisive(both.python)


def test_memory_is_shared_with_python() -> None:
    both = _Both("checked", make=_RememberingProxy)
    memory = both.native.services.memory
    for offset in (1, 2, 3):
        both.append({0: expecting(offset, b"x", timestamp_ms=NOW_MS)})
        assert memory.reserved_bytes > 0
        both.answer()
    assert both.counts["native: completed"] == 2
    memory.resize(10)
    sent = len(both.native.client.upstream_got)
    with pytest.raises(AssertionError):  # the other one has memory
        both.append({0: expecting(4, b"x", timestamp_ms=NOW_MS)})
    assert len(both.native.client.upstream_got) == sent


@pytest.mark.parametrize("make", [MemoryBudget, getattr(MODULE, "MemoryBudget", None)], ids=[PYTHON, NATIVE])
def test_budgets_are_the_same(make: type[MemoryBudget]) -> None:
    memory = make(100)
    assert [memory.reserve(count) for count in (60, 41, 40, 1)] == [True, False, True, False]
    memory.release(60)
    memory.resize(50)
    assert (memory.reserved_bytes, memory.reserve(11), memory.reserve(10)) == (40, False, True)


def test_check_of_an_append_in_flight_counts_for_both() -> None:
    both, requires = _Both("checked"), TopicPolicy(Check.REQUIRED)
    both.append_at((1, 2))
    both.each(_set("policy", lambda topic: requires))
    both.append({0: expecting(3, b"x", timestamp_ms=NOW_MS)})
    assert both.counts["native: appended"] == 2
    assert _decisive(both.native) == _decisive(both.python)


def test_old_unconditional_batches_are_for_native_code() -> None:
    """Those of a producer that is not idempotent, on a `true` topic: Kafka would forget their fence."""
    both = _Both("checked")
    both.append_at((1, 2))
    before = both.counts["native: appended"]
    for number in range(3):
        both.append({0: batch(b"old", timestamp_ms=NOW_MS - 90_000_000)}, [], number)
    both.answer()
    both.append({0: expecting(6, b"new", timestamp_ms=NOW_MS)}, [], 4)
    both.answer()
    assert both.counts["native: appended"] == before + 4
    both.end()


@pytest.mark.parametrize("expects", [False, True])
def test_other_connections_count_for_both(expects: bool) -> None:
    """Two clients have appends in flight, and Kafka appends and answers the second one's first."""
    both = _Both("checked")

    def of_client(index: int) -> None:
        for proxy in both.proxies:
            proxy.client = proxy._wires(index)

    for index, offset in ((1, 1), (2, 2), (1, 3), (2, 4)):
        of_client(index)
        both.append({0: expecting(offset, b"x", timestamp_ms=NOW_MS)})
        both.answer()
    for index, offset in ((1, 5), (2, 6)):
        values = [b"x"] * index
        made = batch(*values, timestamp_ms=NOW_MS, producer=(10 + index, 0, 0))
        if expects:
            made = expecting(offset, *values, timestamp_ms=NOW_MS)
        of_client(index)
        both.append({0: made}, [], 9)
    for index in (2, 1):
        of_client(index)
        both.answer()
    print(both.counts)
    assert both.counts["native: appended"] == (3 if expects else 4)
    assert _decisive(both.native) == _decisive(both.python)


def test_producer_is_remembered_while_others_append() -> None:
    """A batch of it that comes again is never appended twice, however many native code appended in between."""
    both, count = _Both("checked"), 30

    def append(producer: int, sequence: int, correlation_id: int) -> None:
        made = batch(b"x%d" % sequence, timestamp_ms=NOW_MS, producer=(producer, 0, sequence))
        both.append({0: made}, [], correlation_id)
        both.answer()

    for producer in (5, 6):  # from now on its batches are fenced
        end = both.python.logs[TopicPartition("checked", 0)].end
        first = expecting(end, b"f", timestamp_ms=NOW_MS, producer=(producer, 0, 0))
        both.append({0: first}, [], producer)
        both.answer()
    append(5, 1, 1)
    for sequence in range(1, count):
        append(6, sequence, 100 + sequence)
    before = both.python.logs[TopicPartition("checked", 0)].end
    append(5, 1, 2)
    assert both.counts["native: completed"] > count / 2
    assert both.native.logs[TopicPartition("checked", 0)].end == before
    both.end()


def test_dropped_connection_is_garbage_collected() -> None:
    def paths() -> int:
        gc.collect()
        return sum(isinstance(each, NativePath) for each in gc.get_objects())

    before = paths()
    with executing(NATIVE):
        proxy = _Proxy()
    assert paths() > before

    del proxy

    assert paths() == before
