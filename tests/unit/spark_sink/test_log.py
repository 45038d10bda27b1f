"""The sink's log when leaders move, brokers stop and responses are missing, on scripted brokers."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import pytest

from fencepost.spark import log as module
from fencepost.spark.encoding import build
from fencepost.spark.errors import CannotReach, LogRefused, SinkError, Unknown
from fencepost.spark.log import Log
from fencepost.spark.wire import Produce_v9
from tests.kit.waiting import until
from tests.support.fake_cluster import FakeCluster

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS = 0, 1, 2, 3, 18
LEADER_NOT_AVAILABLE, NOT_LEADER, TOPIC_DENIED = 5, 6, 29
ANSWER_SECONDS = 60.0


class Brokers(FakeCluster):
    """In a thread. `queried` – requests by broker and API; `described` – the topics whose metadata was requested,
    None for all; `refusing` – an error code for each request about a partition; `dropping`, `silent` – APIs whose
    requests close the connection, or get no response."""

    def __init__(self, brokers: int = 2, **topics: int) -> None:
        super().__init__(brokers, topics)
        self.queried: Counter[tuple[int, int]] = Counter()
        self.described: set[str | None] = set()
        self.refusing: Callable[[], int] = lambda: 0
        self.dropping: set[int] = set()
        self.silent: set[int] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result(ANSWER_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result(ANSWER_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _ended(self) -> None:
        self.close()
        # Connections close before the loop does.
        transports = self._loop._transports  # type: ignore[attr-defined]
        while any(not each.is_closing() for each in list(transports.values())):  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def lead(self, topic: str, broker: int) -> None:
        def moved() -> None:
            self.topics[topic].partitions[0].leader = broker
            self.changed()

        self._loop.call_soon_threadsafe(moved)
        until(lambda: self.topics[topic].partitions[0].leader == broker, "the new leader", pause_seconds=0.001)

    def answer(self, node_id: int, frame: bytes) -> Any:
        (key,) = struct.unpack_from(">h", frame)
        self.queried[node_id, key] += 1
        if key in self.dropping:
            raise ValueError("dropped")
        return None if key in self.silent else super().answer(node_id, frame)

    def _metadata(self, version: int, request: Any) -> Any:
        self.described |= {None} if request.topics is None else {topic.name for topic in request.topics}
        return super()._metadata(version, request)

    def find(self, name: str | None, topic_id: Any, index: int, node_id: int) -> Any:
        code = self.refusing()
        return (None, code) if code else super().find(name, topic_id, index, node_id)


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Brokers]:
    with Brokers(2, t=1, u=2, w=6) as running:
        yield running


@contextmanager
def a_log(brokers: FakeCluster, patience_seconds: float = ANSWER_SECONDS, **options: Any) -> Iterator[Log]:
    with Log({"bootstrap_servers": brokers.bootstrap, **options}, patience_seconds=patience_seconds) as log:
        yield log


@pytest.fixture
def log(brokers: Brokers) -> Iterator[Log]:
    with a_log(brokers) as running:
        yield running


def chunk(value: str = "a") -> bytes:
    body = b"\x01" + bytes([2 * len(value)]) + value.encode() + b"\x00"
    # These brokers accept no other base offset than 0.
    built = build([body], commit_tag=b"m", expected=0, now_ms=int(time.time() * 1000))
    assert built[:8] == bytes(8)
    return built


def test_an_append_follows_the_leader(brokers: Brokers, log: Log) -> None:
    assert log.append("t", 0, chunk()).result(ANSWER_SECONDS).base_offset == 0
    # After the leader has moved, the old one refuses, and the next append goes to the new one.
    brokers.lead("t", 2)
    refused = log.append("t", 0, chunk()).result(ANSWER_SECONDS)
    appended = log.append("t", 0, chunk()).result(ANSWER_SECONDS)
    assert (refused.code, appended.code, appended.base_offset) == (NOT_LEADER, 0, 1)
    assert (brokers.queried[1, PRODUCE], brokers.queried[2, PRODUCE]) == (2, 1)


def test_queries_follow_the_leader_automatically(brokers: Brokers, log: Log) -> None:
    assert log.append("t", 0, chunk()).result(ANSWER_SECONDS).code == 0
    brokers.lead("t", 2)
    assert log.offsets("t", [0]) == {0: (0, 1)}
    brokers.lead("t", 1)
    assert [each.commit_tag for each in log.read("t", 0, 0, 1)] == [b"m"]
    brokers.lead("t", 2)
    last_batch = log.last_batch("t", 0, 1)
    assert last_batch is not None
    assert last_batch.commit_tag == b"m"


def test_each_partition_is_queried_at_its_leader(brokers: Brokers, log: Log) -> None:
    assert log.append("u", 1, chunk()).result(ANSWER_SECONDS).code == 0
    assert log.offsets("u", [0, 1]) == {0: (0, 0), 1: (0, 1)}
    assert (brokers.queried[1, LIST_OFFSETS], brokers.queried[2, LIST_OFFSETS]) == (2, 2)


def test_last_batches_take_one_request_per_broker(brokers: Brokers, log: Log) -> None:
    ends = dict.fromkeys(range(6), 1)
    for partition in ends:
        log.append("w", partition, chunk()).result(ANSWER_SECONDS)
    found = log.last_batches("w", ends)
    assert {logged and logged.commit_tag for logged in found.values()} == {b"m"}
    assert list(found) == list(ends)
    assert sorted(count for (_, key), count in brokers.queried.items() if key == FETCH) == [1, 1]


def test_last_batch_is_queried_alone_after_an_error(brokers: Brokers, log: Log) -> None:
    for partition in range(2):
        log.append("u", partition, chunk()).result(ANSWER_SECONDS)
    codes = iter([NOT_LEADER, NOT_LEADER])
    brokers.refusing = lambda: next(codes, 0)
    assert all(log.last_batches("u", {0: 1, 1: 1}).values())


def test_topic_is_identified_by_the_id_that_kafka_gave_it(brokers: Brokers, log: Log) -> None:
    identity = log.identify("w")
    assert identity == (brokers.topics["w"].topic_id.hex, dict.fromkeys(range(6), 0))
    assert log.identify("u").id != identity.id


def test_query_waits_until_partition_has_leader(brokers: Brokers, log: Log) -> None:
    assert log.partition_count("t") == 1
    brokers.lead("t", -1)
    queried = log._submit(lambda wire: wire.offsets("t", [0]))
    until(lambda: sum(brokers.queried[node, METADATA] for node in (1, 2)) > 5, "some tries")
    assert not queried.done()
    brokers.lead("t", 2)
    assert queried.result(ANSWER_SECONDS) == {0: (0, 0)}


@pytest.fixture
def time_is_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes for the log only while it pauses, however busy the machine is."""
    now, sleep = [0.0], asyncio.sleep

    async def pause(seconds: float) -> None:
        if threading.current_thread().name == "fencepost-log":
            now[0] += seconds
            seconds = 0
        await sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))


@pytest.mark.usefixtures("time_is_pauses")
@pytest.mark.parametrize("code", [LEADER_NOT_AVAILABLE, NOT_LEADER])
def test_leaderless_queries_back_off_and_time_out(brokers: Brokers, code: int) -> None:
    brokers.refusing = lambda: code
    # Whatever the user configures, the sink needs no metadata of other topics.
    with a_log(brokers, patience_seconds=1.0, metadata_max_age_ms=20) as log:
        with pytest.raises(CannotReach, match=r"the log ends of topic t: .*tried for 1 s"):
            log.offsets("t", [0])
        with pytest.raises(CannotReach, match=r"t-0 at offset 0: .*tried for 1 s"):
            list(log.read("t", 0, 0, 1))

    # With increasing pauses: of 0.05 s each there would be 40 and 20.
    assert 3 <= brokers.queried[1, LIST_OFFSETS] <= 20
    assert 3 <= brokers.queried[1, FETCH] <= 10
    assert brokers.described == {"t"}


def test_append_is_sent_once_whatever_the_outcome(brokers: Brokers, log: Log) -> None:
    assert log.append("t", 0, chunk()).result(ANSWER_SECONDS).code == 0
    log._submit(_hurried).result(ANSWER_SECONDS)
    brokers.silent = {PRODUCE}
    with pytest.raises(Unknown, match="t-0: no response from broker 1"):
        log.append("t", 0, chunk()).result(ANSWER_SECONDS)
    brokers.silent, brokers.dropping = set(), {PRODUCE}
    with pytest.raises(Unknown, match="t-0: no response from broker 1"):
        log.append("t", 0, chunk()).result(ANSWER_SECONDS)
    brokers.dropping = set()

    assert log.append("t", 0, chunk()).result(ANSWER_SECONDS).base_offset == 1
    assert brokers.queried[1, PRODUCE] == 4


async def _hurried(wire: Any) -> None:
    """The connection of broker 1 waits for no answer any longer; whichever takes its place does."""
    for (node, _), connection in wire._kafka._conns.items():
        if node == 1:
            connection._request_timeout = 0.2


def test_query_is_retried_after_its_connection_breaks(brokers: Brokers, log: Log) -> None:
    assert log.append("t", 0, chunk()).result(ANSWER_SECONDS).code == 0
    for api, query in {
        LIST_OFFSETS: lambda: log.offsets("t", [0]),
        FETCH: lambda: list(log.read("t", 0, 0, 1)),
        METADATA: lambda: log.partition_count("t"),
    }.items():
        brokers.dropping = {api}
        before = sum(brokers.queried[node, api] for node in (1, 2))
        queried: list[object] = []
        querying = threading.Thread(target=lambda query=query, queried=queried: queried.append(query()))  # type: ignore[misc]
        querying.start()
        until(lambda api=api, before=before: sum(brokers.queried[n, api] for n in (1, 2)) > before + 1, "two tries")  # type: ignore[misc]
        brokers.dropping = set()
        querying.join(ANSWER_SECONDS)
        assert len(queried) == 1


def test_authorization_error_is_not_retried(brokers: Brokers, log: Log) -> None:
    brokers.refusing = lambda: TOPIC_DENIED
    for query in (lambda: log.offsets("t", [0]), lambda: list(log.read("t", 0, 0, 1))):
        with pytest.raises(LogRefused, match=r"topic t: TopicAuthorizationFailedError: .*allow READ, WRITE"):
            query()
    # The caller decides what the result of an append means.
    assert log.append("t", 0, chunk()).result(ANSWER_SECONDS).code == TOPIC_DENIED


def test_moved_brokers_are_found_through_bootstrap_servers(brokers: Brokers, log: Log) -> None:
    assert log.partition_count("t") == 1
    # The addresses in the metadata are outdated now; the bootstrap servers are not.
    log._submit(_lost).result(ANSWER_SECONDS)
    assert log.offsets("t", [0]) == {0: (0, 0)}


async def _lost(wire: Any) -> None:
    await wire.close()
    wire._kafka._conns.clear()
    cluster = wire._kafka.cluster
    cluster._brokers = {node: broker._replace(port=1) for node, broker in cluster._brokers.items()}


def test_threads_share_a_log(brokers: Brokers, log: Log) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(log.append("u", 0, chunk()).result(ANSWER_SECONDS).base_offset))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(found) == list(range(20))


def test_process_shares_one_log_per_options(brokers: Brokers) -> None:
    options = {"bootstrap_servers": brokers.bootstrap, "client_id": "mine"}
    log = Log.shared(options)
    assert Log.shared(dict(reversed(options.items()))) is log
    assert Log.shared(options | {"client_id": "other"}) is not log
    log.close()
    assert Log.shared(options) is not log
    module._close_all()


def test_unloadable_certificate_is_a_user_error() -> None:
    with (
        Log({"bootstrap_servers": "h:1", "security_protocol": "SSL", "ssl_cafile": "/absent/ca.pem"}) as log,
        pytest.raises(SinkError, match=r"cannot load the certificates of kafka\.ssl\.\*"),
    ):
        log.partition_count("t")


def test_request_repr_contains_no_records() -> None:
    assert "secret" not in repr(Produce_v9("t", 0, 1000, chunk("secret")))
