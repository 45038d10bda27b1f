"""Compare-and-append over several partitions with each of the three client libraries, with commits that are refused or
lost.

The tests read the log directly from Kafka. A fault proxy between the proxy and Kafka refuses or loses commits.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic
from kafka.errors import KafkaError

import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python
from fencepost import (
    CheckIsOffError,
    LogRecord,
    OffsetMismatchError,
    OutcomeUnknownError,
    Record,
    RetryPolicy,
    TransactionAbortedError,
    TransactionConflictError,
    WriterFencedError,
    retrying,
)
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import OLD_CLIENTS_LOCK, RELEASES, classpath
from fencepost_dev.java import QUICK_JVM, find_jdk
from fencepost_dev.tools import compile_java, run_java
from fencepost_proxy.types import Address
from tests.kit.fault_proxy import Cut, Direction, FaultProxy
from tests.kit.producers import Producer, start
from tests.kit.waiting import until
from tests.support import transactions
from tests.support.clients import LIBRARIES
from tests.support.endings import END_TXN, commits, refuse_commit, version_of
from tests.support.kafka import kafka_version, running_kafka
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Connection, Log
from tests.support.transactions import set_transaction_version, transaction_state

pytestmark = [
    pytest.mark.kafka,
    # From producers and consumers that fail to connect: kafka-python leaves their sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

JAVA = Path(__file__).parents[1] / "java" / "ConditionalTransactions.java"
Place = tuple[str, int]
PATIENCE_SECONDS = 60.0
POLICY = RetryPolicy(attempt_seconds=3, total_seconds=60)
#: Short timeouts for a response.
HASTY = RetryPolicy(attempt_seconds=2, total_seconds=60)


class _Awaited:
    def __init__(self, make: Callable[[], Any]) -> None:
        self.runner = asyncio.Runner()

        async def made() -> Any:
            return make()

        self.inner = self.runner.run(made())

    def close(self) -> None:
        self.runner.run(self.inner.stop())
        self.runner.close()


class _AwaitedWriter(_Awaited):
    def append(self, requested: Mapping[Any, Any]) -> dict[Any, int]:
        offsets: dict[Any, int] = self.runner.run(self.inner.append(requested))
        return offsets


class _AwaitedReader(_Awaited):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        self.runner.run(self.inner.start())

    def read_to_end(self, apply: Callable[[Any, LogRecord], None]) -> dict[Any, int]:
        ends: dict[Any, int] = self.runner.run(self.inner.read_to_end(apply))
        return ends


def writer_of(library: str, bootstrap: str, name: str, retry: RetryPolicy = POLICY) -> Any:
    if library == "confluent-kafka":
        return fencepost.confluent.TransactionalWriter(name, {"bootstrap.servers": bootstrap}, retry=retry)
    if library == "aiokafka":
        return _AwaitedWriter(
            lambda: fencepost.aiokafka.TransactionalWriter(name, bootstrap_servers=bootstrap, retry=retry)
        )
    return fencepost.kafka_python.TransactionalWriter(name, bootstrap_servers=bootstrap, retry=retry)


def reader_of(library: str, bootstrap: str, topic: str) -> Any:
    places = [(topic, 0), (topic, 1)]
    if library == "confluent-kafka":
        return fencepost.confluent.LogReader(places, {"bootstrap.servers": bootstrap}, retry=POLICY)
    if library == "aiokafka":
        return _AwaitedReader(lambda: fencepost.aiokafka.LogReader(places, bootstrap_servers=bootstrap, retry=POLICY))
    return fencepost.kafka_python.LogReader(places, bootstrap_servers=bootstrap, retry=POLICY)


@pytest.fixture(scope="module")
def pipe() -> Iterator[FaultProxy]:
    with FaultProxy() as made:
        yield made


@pytest.fixture(scope="module")
def own_kafka(pipe: FaultProxy) -> Iterator[KafkaCluster]:
    in_front = Address("127.0.0.1", pipe.port)
    with running_kafka(1, listeners={"WIRE": "PLAINTEXT"}, advertised={"WIRE": in_front}) as cluster:
        pipe.targets = (cluster.address(1, "WIRE"),)
        yield cluster


@pytest.fixture(scope="module")
def own_proxy(
    pipe: FaultProxy, own_kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    with ProxyProcess(pipe.address, tmp_path_factory.mktemp("proxy"), config=CHECKED_BY_NAME) as process:
        yield process


@pytest.fixture
def topic(own_kafka: KafkaCluster, own_proxy: ProxyProcess, unique_topic: Callable[..., str]) -> str:
    """A topic of two partitions with `fencepost.check.expected.offsets=true`, known to the broker and the proxy."""
    name = unique_topic("checked")
    with closing(KafkaAdminClient(bootstrap_servers=own_kafka.bootstrap)) as admin:
        admin.create_topics([NewTopic(name, 2, 1)])
    for partition in range(2):
        assert Log(own_kafka.bootstrap).end(name, partition) == 0
    until(lambda: _is_checked(own_proxy, name), "the proxy to show it")
    return name


def _is_checked(proxy: ProxyProcess, topic: str) -> bool:
    with suppress(AssertionError), Connection(proxy.bootstrap) as client:
        return client.describe_topic(topic)["fencepost.check.expected.offsets"] == "true"
    return False


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Collect garbage while the expected warnings are ignored."""
    yield
    gc.collect()


class Committed:
    """Values that Kafka shows to read_committed readers, once all transactions have ended."""

    def __init__(self, kafka: KafkaCluster, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic

    def __call__(self) -> list[list[bytes]]:
        until(self._all_ended, "the markers", seconds=PATIENCE_SECONDS)
        return list(transactions.committed(self._kafka.bootstrap, (self._topic, 0), (self._topic, 1)).values())

    def _all_ended(self) -> bool:
        with closing(self._consumer("read_committed")) as stable, closing(self._consumer("read_uncommitted")) as high:
            tps = [TopicPartition(self._topic, partition) for partition in (0, 1)]
            return bool(stable.end_offsets(tps) == high.end_offsets(tps))

    def _consumer(self, isolation: str) -> Any:
        return KafkaConsumer(bootstrap_servers=self._kafka.bootstrap, isolation_level=isolation)


@pytest.fixture
def committed(own_kafka: KafkaCluster, topic: str) -> Committed:
    return Committed(own_kafka, topic)


def records(*values: bytes) -> list[Record]:
    return [Record(value) for value in values]


def _tried(writer: Any, place: Place) -> bool:
    try:
        writer.append({place: (0, records(b"no"))})
    except CheckIsOffError:  # the topic was created just now
        return False
    return True


def nothing(_: Any, __: LogRecord) -> None: ...


@pytest.mark.parametrize("library", LIBRARIES)
def test_records_are_appended_to_all_partitions_or_none(
    library: str, own_proxy: ProxyProcess, topic: str, committed: Committed
) -> None:
    read: list[tuple[Place, bytes | None]] = []
    with (
        closing(writer_of(library, own_proxy.bootstrap, f"{topic}-w")) as writer,
        closing(reader_of(library, own_proxy.bootstrap, topic)) as reader,
    ):
        # The first append goes to empty partitions.
        first, second = (topic, 0), (topic, 1)
        assert writer.append({second: (0, records(b"x", b"y")), first: (0, records(b"a"))}) == {first: 0, second: 0}
        # The next offset is after the records and the marker, as the reader reports.
        assert writer.append({first: (2, records(b"b")), second: (3, records(b"z"))}) == {first: 2, second: 3}
        ends = until(
            lambda: (
                found if (found := reader.read_to_end(lambda p, r: read.append((p, r.value))))[first] == 4 else None
            ),
            "the markers",
        )
        assert ends == {first: 4, second: 5}
        assert sorted(read) == [(first, b"a"), (first, b"b"), (second, b"x"), (second, b"y"), (second, b"z")]
        # One of two expected offsets is wrong.
        for stale in ({first: (4, records(b"no")), second: (3, records(b"no"))}, {first: (99, records(b"no"))}):
            with pytest.raises(OffsetMismatchError) as refusal:
                writer.append(stale)
            (place,) = [each for each, (expected, _) in stale.items() if expected != ends[each]]
            assert (refusal.value.topic, refusal.value.partition) == place
            assert refusal.value.expected == stale[place][0]
            # Nothing is appended, and the same writer continues from the current log end.
            ends = retrying(lambda: _append_at_the_ends(writer, reader, b"next"), POLICY)
    assert committed() == [[b"a", b"b", b"next", b"next"], [b"x", b"y", b"z", b"next", b"next"]]


def _append_at_the_ends(writer: Any, reader: Any, value: bytes) -> dict[Place, int]:
    expected = reader.read_to_end(nothing)
    writer.append({place: (offset, records(value)) for place, offset in expected.items()})
    return {place: offset + 2 for place, offset in expected.items()}


@pytest.mark.parametrize("library", LIBRARIES)
def test_refused_commit_appends_nothing_and_writer_continues(  # noqa: PLR0917
    library: str, pipe: FaultProxy, own_proxy: ProxyProcess, own_kafka: KafkaCluster, topic: str, committed: Committed
) -> None:
    with (
        closing(writer_of(library, own_proxy.bootstrap, f"{topic}-w")) as writer,
        closing(reader_of(library, own_proxy.bootstrap, topic)) as reader,
    ):
        refused = pipe.add(refuse_commit())
        with pytest.raises(TransactionConflictError, match="commit refused"):
            writer.append({(topic, 0): (0, records(b"no")), (topic, 1): (0, records(b"no"))})
        assert refused.happened.is_set()
        # The writer has already aborted, so no other writer waits for a timeout.
        until(lambda: transaction_state(own_kafka.bootstrap, f"{topic}-w")[0] != "Ongoing", "the abort")
        retrying(lambda: _append_at_the_ends(writer, reader, b"yes"), POLICY)
    assert committed() == [[b"yes"], [b"yes"]]


@pytest.mark.parametrize(
    "after", [pytest.param(True, id="answered"), pytest.param(False, id="not even sent", marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_commit_with_lost_answer_is_resolved(  # noqa: PLR0917
    library: str, after: bool, pipe: FaultProxy, own_proxy: ProxyProcess, topic: str, committed: Committed
) -> None:
    """All connections fail for longer than the writer waits for a response. A new producer and the log then give the
    outcome."""
    with (
        closing(writer_of(library, own_proxy.bootstrap, f"{topic}-w", HASTY)) as writer,
        closing(reader_of(library, own_proxy.bootstrap, topic)) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        writer.append({(topic, 0): (0, records(b"first")), (topic, 1): (0, records(b"first"))})
        fault = pipe.add(broken_commit("response" if after else "request"))
        healed = pool.submit(_heal, pipe, fault, HASTY.attempt_seconds + 1.5)
        requested = {(topic, 0): (2, records(b"second")), (topic, 1): (2, records(b"second"))}
        if after:
            assert writer.append(requested) == {(topic, 0): 2, (topic, 1): 2}
        else:
            with pytest.raises(TransactionAbortedError):
                writer.append(requested)
        healed.result()
        retrying(lambda: _append_at_the_ends(writer, reader, b"third"), POLICY)
    expected = [b"first", b"second", b"third"] if after else [b"first", b"third"]
    assert committed() == [expected, expected]


def broken_commit(direction: Direction) -> Cut:
    """Close all connections, and new ones until `accept`, before the commit request or its response is relayed."""
    return Cut(direction, api_key=END_TXN, when=commits, refuse=True)


def _heal(pipe: FaultProxy, fault: Cut, after_seconds: float) -> None:
    fault.wait()
    time.sleep(after_seconds)
    pipe.accept()


@pytest.mark.parametrize(
    "library", [LIBRARIES[0], *(pytest.param(each, marks=pytest.mark.soak) for each in LIBRARIES[1:])]
)
def test_unresolvable_outcome_is_unknown_until_read_back(
    library: str, pipe: FaultProxy, own_proxy: ProxyProcess, topic: str, committed: Committed
) -> None:
    gives_up = RetryPolicy(attempt_seconds=4, total_seconds=8)
    with (
        closing(writer_of(library, own_proxy.bootstrap, f"{topic}-w", gives_up)) as writer,
        closing(reader_of(library, own_proxy.bootstrap, topic)) as reader,
    ):
        pipe.add(broken_commit("response"))
        try:
            with pytest.raises(OutcomeUnknownError) as unknown:
                writer.append({(topic, 0): (0, records(b"first")), (topic, 1): (0, records(b"first"))})
            assert unknown.value.expected == {(topic, 0): 0, (topic, 1): 0}
        finally:
            pipe.accept()
        read: list[LogRecord] = []
        until(lambda: reader.read_to_end(lambda _, r: read.append(r)) and len(read) == 2, "it", seconds=60)
        assert all(("fencepost-write-id", unknown.value.write_id) in record.headers for record in read)
        until(lambda: _appended(writer, reader, b"second"), "the writer to go on", seconds=PATIENCE_SECONDS)
    assert committed() == [[b"first", b"second"]] * 2


def _appended(writer: Any, reader: Any, value: bytes) -> bool:
    try:
        _append_at_the_ends(writer, reader, value)
    except (OffsetMismatchError, TransactionAbortedError):
        return False
    return True


@pytest.mark.parametrize("library", LIBRARIES)
def test_second_writer_of_same_name_fences_the_first(
    library: str, own_proxy: ProxyProcess, topic: str, committed: Committed
) -> None:
    with (
        closing(writer_of(library, own_proxy.bootstrap, f"{topic}-w")) as first,
        closing(writer_of(library, own_proxy.bootstrap, f"{topic}-w")) as second,
        closing(reader_of(library, own_proxy.bootstrap, topic)) as reader,
    ):
        retrying(lambda: _append_at_the_ends(first, reader, b"first"), POLICY)
        retrying(lambda: _append_at_the_ends(second, reader, b"second"), POLICY)
        for _ in range(2):
            with pytest.raises(WriterFencedError):
                retrying(lambda: _append_at_the_ends(first, reader, b"zombie"), POLICY)
        retrying(lambda: _append_at_the_ends(second, reader, b"third"), POLICY)
    assert committed() == [[b"first", b"second", b"third"]] * 2


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_nothing_would_check_is_not_sent(
    library: str, own_kafka: KafkaCluster, own_proxy: ProxyProcess, topic: str, committed: Committed
) -> None:
    with closing(writer_of(library, own_kafka.bootstrap, f"{topic}-direct")) as writer, pytest.raises(CheckIsOffError):
        writer.append({(topic, 0): (0, records(b"no"))})
    with closing(writer_of(library, own_proxy.bootstrap, f"{topic}-w")) as writer:
        with pytest.raises(ValueError, match="no partition has an expected offset"):
            writer.append({(topic, 0): (None, records(b"no"))})
        with closing(KafkaAdminClient(bootstrap_servers=own_kafka.bootstrap)) as admin:
            admin.create_topics([NewTopic(f"required-{topic}", 1, 1)])
        with pytest.raises(ValueError, match="which refuses transactions"):
            until(lambda: _tried(writer, (f"required-{topic}", 0)), "the topic")
        # One partition may have no expected offset.
        writer.append({(topic, 0): (0, records(b"yes")), (topic, 1): (None, records(b"wherever"))})
    assert committed() == [[b"yes"], [b"wherever"]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_bypassing_append_aborts_the_whole_transaction(
    library: str, own_kafka: KafkaCluster, own_proxy: ProxyProcess, topic: str, committed: Committed
) -> None:
    """Kafka does not check the offsets of transactional batches. One batch is misplaced, and the whole transaction is
    aborted."""
    with (
        closing(writer_of(library, own_proxy.bootstrap, f"{topic}-w")) as writer,
        closing(reader_of(library, own_proxy.bootstrap, topic)) as reader,
        closing(KafkaProducer(bootstrap_servers=own_kafka.bootstrap)) as bypassing,
    ):
        retrying(lambda: _append_at_the_ends(writer, reader, b"first"), POLICY)
        committed()
        expected = reader.read_to_end(nothing)
        bypassing.send(topic, b"around", partition=1).get(PATIENCE_SECONDS)
        with pytest.raises((OffsetMismatchError, TransactionConflictError)):
            writer.append({place: (offset, records(b"no")) for place, offset in expected.items()})
        retrying(lambda: _append_at_the_ends(writer, reader, b"second"), POLICY)
    assert committed() == [[b"first", b"second"], [b"first", b"around", b"second"]]


# --- unmodified clients: a refused commit, as in docs/other-clients.md ------------------------------------------------


@pytest.mark.parametrize(
    ("library", "version", "raised", "goes_on"),
    [
        ("kafka-python", 3, "Unhandled error in EndTxnResponse: [Error 59]", False),
        ("aiokafka", 0, "Unexpected error during batch delivery", False),
        ("confluent-kafka", 1, "UNKNOWN_PRODUCER_ID", True),
    ],
    ids=LIBRARIES,
)
def test_refused_commit_outcome_of_other_producers(  # noqa: PLR0917
    library: str,
    version: int,
    raised: str,
    goes_on: bool,
    pipe: FaultProxy,
    own_proxy: ProxyProcess,
    topic: str,
    committed: Committed,
) -> None:
    def send(client: Producer, value: str) -> None:
        client.begin()
        client.send(topic, value).result(PATIENCE_SECONDS)

    def started() -> Producer:
        return start(library, None, own_proxy.bootstrap, transactional_id=f"{topic}-w")

    with closing(started()) as client:
        send(client, "no")
        refused = pipe.add(refuse_commit())
        with pytest.raises(Exception, match=re.escape(raised)) as refusal:
            client.commit()
        assert version_of(refused.request) == version
        if goes_on:
            assert refusal.value.args[0].txn_requires_abort()
            client.abort()
            send(client, "yes")
            client.commit()
        else:
            with pytest.raises((KafkaError, AssertionError)):  # aiokafka raises AssertionError for its internal states
                client.abort()
    with closing(started()) as another:
        send(another, "another")
        another.commit()
    assert committed()[0] == ([b"yes", b"another"] if goes_on else [b"another"])


def _java_client(release: str, arguments: list[str]) -> list[str]:
    """The program's output with the jars of that client release. Tests have no broker of 3.7.2."""
    if release in RELEASES:
        classes = compile_java([JAVA], version=release)
        ran = run_java("ConditionalTransactions", arguments, classes=classes, version=release, timeout_seconds=200)
        return ran.output.splitlines()
    path = os.pathsep.join([str(compile_java([JAVA])), classpath(OLD_CLIENTS_LOCK)])
    command = [str(find_jdk().java), *QUICK_JVM, "-cp", path, "ConditionalTransactions", *arguments]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=200, check=True)
    return ended.stdout.splitlines()


older = pytest.mark.soak


@pytest.mark.parametrize(
    ("release", "transactions", "version", "raised"),
    [
        (kafka_version(), 1, 4, "TransactionAbortableException"),
        (kafka_version(), 2, 5, "TransactionAbortableException"),
        pytest.param("4.0.2", 1, 4, "TransactionAbortableException", marks=older),
        pytest.param("4.0.2", 2, 5, "TransactionAbortableException", marks=older),
        pytest.param("3.9.2", 1, 4, "TransactionAbortableException", marks=older),
        pytest.param("3.9.2", 2, 4, "TransactionAbortableException", marks=older),
        pytest.param("3.7.2", 1, 3, "UnknownProducerIdException", marks=older),
        pytest.param("3.7.2", 2, 3, "UnknownProducerIdException", marks=older),
    ],
)
def test_what_java_sees_of_a_refused_commit(  # noqa: PLR0917
    release: str,
    transactions: int,
    version: int,
    raised: str,
    pipe: FaultProxy,
    own_kafka: KafkaCluster,
    own_proxy: ProxyProcess,
    topic: str,
    committed: Committed,
) -> None:
    set_transaction_version(own_kafka.bootstrap, transactions)
    refused = pipe.add(refuse_commit())
    try:
        steps = ["begin", f"{topic}=0", "commit", "abort", "begin", f"{topic}=2", "commit"]
        reported = _java_client(release, [own_proxy.bootstrap, f"{topic}-w", *steps])
    finally:
        set_transaction_version(own_kafka.bootstrap, 2)
    assert version_of(refused.request) == version
    assert reported[2].startswith(raised)
    assert [*reported[:2], *reported[3:]] == ["ok", "ok 0", "ok", "ok", "ok 2", "ok"]
    assert committed()[0] == [b"expects 2"]
