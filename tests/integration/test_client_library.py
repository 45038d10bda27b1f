"""The client library through a proxy to Kafka, with each of the three Kafka clients.

The tests read results from Kafka directly. Some pause it for seconds.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaProducer, TopicPartition
from kafka.record.memory_records import MemoryRecords

import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python
from fencepost import (
    AppendRefusedError,
    BatchTooLargeError,
    CheckIsOffError,
    LogRecord,
    NotAtEndError,
    OffsetMismatchError,
    OffsetViolationError,
    PartitionRequiredError,
    PositionLostError,
    Record,
    RetryPolicy,
)
from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support import clients
from tests.support.clients import LIBRARIES, Producer
from tests.support.fixtures import proxy_fixture
from tests.support.proxy import ProxyProcess
from tests.support.senders import free_proxy_port

pytestmark = [pytest.mark.kafka, pytest.mark.parametrize("library", LIBRARIES)]

#: Checked from creation: a check that is switched on later waits for every proxy of the cluster.
_CHECKED = """
[topics."client-*"]
"fencepost.check.expected.offsets" = "required"
[topics."plain-*"]
"fencepost.check.expected.offsets" = "true"
"""
#: kafka-python leaves the socket of a failed connection attempt to the garbage collector.
_LEAKS_SOCKETS = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
IMPATIENT = RetryPolicy(attempt_seconds=2, total_seconds=150)


own_proxy = proxy_fixture(config=_CHECKED, port=free_proxy_port)


@pytest.fixture
def topic(own_proxy: ProxyProcess, unique_topic: Callable[..., str]) -> str:
    """A topic with one partition and `fencepost.check.expected.offsets=required`."""
    return clients.create_topic(own_proxy.bootstrap, unique_topic("client"))


@pytest.fixture
def producer(library: str, own_proxy: ProxyProcess) -> Iterator[Producer]:
    with closing(clients.Producer(library, own_proxy.bootstrap)) as made:
        yield made


def _batches(kafka: KafkaCluster, topic: str) -> list[tuple[int, int]]:
    """(base offset, record count) of every batch of partition 0, from the segment file on the broker's disk."""
    (segment,) = (kafka.data / "node-1").glob(f"data/{topic}-0/*.log")
    batches = MemoryRecords(segment.read_bytes())
    found = []
    while batches.has_next():
        batch = batches.next_batch()
        found.append((batch.base_offset, batch.last_offset_delta + 1))
    return found


# --- ConditionalProducer ---------------------------------------------------------------------------------------------


def test_record_is_appended_at_expected_offset_or_refused(producer: Producer, kafka: KafkaCluster, topic: str) -> None:
    first = producer.send(topic, b"first", partition=0, expected_offset=0)
    producer.resolve()
    assert first.get() == 0

    stale = producer.send(topic, b"stale", partition=0, expected_offset=0)
    producer.resolve()
    with pytest.raises(OffsetMismatchError) as caught:
        stale.get()
    refused = caught.value
    assert (refused.topic, refused.partition, refused.expected, refused.actual) == (topic, 0, 0, 1)
    assert not refused.possibly_yours
    assert refused.__cause__ is not None, "the library's exception is lost"

    early = producer.send(topic, b"early", partition=0, expected_offset=7)
    producer.resolve()
    with pytest.raises(OffsetMismatchError) as caught:
        early.get()
    assert (caught.value.expected, caught.value.actual) == (7, 1)

    again = producer.send(topic, b"second", partition=0, expected_offset=1)
    producer.resolve()
    assert again.get() == 1
    assert clients.read_all(kafka.bootstrap, topic) == [(0, b"first"), (1, b"second")]


def test_consecutive_sends_need_not_wait_for_each_other(producer: Producer, kafka: KafkaCluster, topic: str) -> None:
    outcomes = [producer.send(topic, b"%d" % i, partition=0, expected_offset=i) for i in range(500)]
    producer.resolve()
    assert [outcome.get() for outcome in outcomes] == list(range(500))
    assert clients.read_all(kafka.bootstrap, topic) == [(i, b"%d" % i) for i in range(500)]


def test_stale_batch_refuses_each_record_with_its_expectation(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, topic: str
) -> None:
    with closing(clients.Producer(library, own_proxy.bootstrap, linger_ms=3000)) as patient:
        _append_as_rival(kafka, topic)
        outcomes = [patient.send(topic, b"%d" % i, partition=0, expected_offset=i) for i in range(50)]
        patient.resolve()
    for i, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, OffsetMismatchError), outcome.error
        assert (outcome.error.expected, outcome.error.actual) == (i, 1)
    assert clients.log_end(kafka.bootstrap, topic) == 1


def test_sends_in_separate_batches_are_decided_separately(producer: Producer, kafka: KafkaCluster, topic: str) -> None:
    """A rival took offset 0: the record that expected 0 is refused, and the one that expected 1 may be appended."""
    _append_as_rival(kafka, topic)
    outcomes = []
    for i in range(3):
        outcomes.append(producer.send(topic, b"%d" % i, partition=0, expected_offset=i))
        producer.resolve()
    with pytest.raises(OffsetMismatchError):
        outcomes[0].get()
    assert [outcome.get() for outcome in outcomes[1:]] == [1, 2]
    assert clients.read_all(kafka.bootstrap, topic) == [(0, b"rival"), (1, b"1"), (2, b"2")]


_TOGETHER = {"confluent-kafka": {"linger.ms": 300}}


@pytest.mark.parametrize("check", ["client", "plain"], ids=["required", "true"])
def test_resend_in_other_batches_is_recognised(
    check: str, library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, unique_topic: Callable[..., str]
) -> None:
    """An outbox after a crash of the application: two of three events are in the log, as one batch."""
    topic = clients.create_topic(own_proxy.bootstrap, unique_topic(check))
    now_ms = int(time.time() * 1000)
    events = [
        {"value": b"event %d" % i, "expected_offset": i, "write_id": b"id %d" % i, "timestamp_ms": now_ms + i}
        for i in range(3)
    ]

    def send(*groups: list[dict[str, Any]]) -> list[clients.Outcome]:
        outcomes = []
        with closing(
            clients.Producer(library, own_proxy.bootstrap, **_TOGETHER.get(library, {"linger_ms": 300}))
        ) as made:
            for group in groups:
                outcomes += [made.send(topic, partition=0, **event) for event in group]
                made.resolve()
        return outcomes

    assert [each.get() for each in send(events[:2])] == [0, 1]
    assert [each.get() for each in send(events[:1], events[1:2], events[:2])] == [0, 1, 0, 1]
    for each in send(events):
        with pytest.raises(OffsetMismatchError) as refused:
            each.get()
        assert refused.value.possibly_yours is (True if library == "kafka-python" else None)
        assert library != "kafka-python" or "2 of 3 of these records are in the log" in str(refused.value)
    assert [each.get() for each in send(*([event] for event in events))] == [0, 1, 2]
    assert [each.get() for each in send(events[1:], events)] == [1, 2, 0, 1, 2]
    assert clients.read_all(kafka.bootstrap, topic) == [(i, b"event %d" % i) for i in range(3)]


def test_unchecked_topic_is_refused_before_sending(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, unique_topic: Callable[..., str]
) -> None:
    unchecked = clients.create_topic(own_proxy.bootstrap, unique_topic("unchecked"))
    with closing(clients.Producer(library, own_proxy.bootstrap)) as made:
        with pytest.raises(CheckIsOffError, match=r"check\.expected\.offsets=false"):
            made.send(unchecked, b"x", partition=0, expected_offset=0)
        with pytest.raises(CheckIsOffError, match="are not visible"):
            made.send(unique_topic("missing"), b"x", partition=0, expected_offset=0)
        assert clients.log_end(kafka.bootstrap, unchecked) == 0
        clients.set_check(own_proxy.bootstrap, unchecked, "true")
        outcome = made.send(unchecked, b"x", partition=0, expected_offset=0)
        made.resolve()
        assert outcome.get() == 0
    with (
        closing(clients.Producer(library, kafka.bootstrap)) as services,
        pytest.raises(CheckIsOffError, match="not a Fencepost proxy"),
    ):
        services.send(unchecked, b"x", partition=0, expected_offset=1)


def test_stale_write_after_check_switched_off_is_violation(
    producer: Producer, own_proxy: ProxyProcess, topic: str
) -> None:
    outcomes = [producer.send(topic, b"first", partition=0, expected_offset=0)]
    producer.resolve()
    clients.set_check(own_proxy.bootstrap, topic, "false")
    outcomes.append(producer.send(topic, b"stale", partition=0, expected_offset=0))
    producer.resolve()
    assert outcomes[0].get() == 0
    with pytest.raises(OffsetViolationError) as caught:
        outcomes[1].get()
    assert (caught.value.expected, caught.value.appended_at) == (0, 1)


def test_append_around_the_proxy_is_reported(
    library: str, producer: Producer, own_proxy: ProxyProcess, kafka: KafkaCluster, topic: str
) -> None:
    """As a violation, also by aiokafka, which drops the server's message. confluent-kafka reports the offset only."""
    first = producer.send(topic, b"first", partition=0, expected_offset=0)
    producer.resolve()
    with closing(KafkaProducer(bootstrap_servers=kafka.bootstrap)) as bypassing:
        bypassing.send(topic, b"around", partition=0).get(clients.WAIT_SECONDS)
    second = producer.send(topic, b"second", partition=0, expected_offset=1)
    producer.resolve()
    assert first.get() == 0
    with pytest.raises((OffsetViolationError, OffsetMismatchError)) as caught:
        second.get()
    assert isinstance(caught.value, OffsetMismatchError) is (library == "confluent-kafka")
    where = caught.value.actual if isinstance(caught.value, OffsetMismatchError) else caught.value.appended_at
    assert (caught.value.expected, where) == (1, 2)
    assert clients.read_all(kafka.bootstrap, topic)[2] == (2, b"second")


def test_refusal_by_another_check_is_final_and_no_mismatch(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, unique_topic: Callable[..., str]
) -> None:
    required = {f"fencepost.check.{name}": "required" for name in ("expected.offsets", "partition.count")}
    counted = clients.create_topic(own_proxy.bootstrap, unique_topic("counted"), **required)
    with closing(clients.Producer(library, own_proxy.bootstrap)) as made:
        outcome = made.send(counted, b"x", partition=0, expected_offset=0)
        made.resolve()
    with pytest.raises(AppendRefusedError, match=r"(?i)partition.count"):
        outcome.get()
    with closing(clients.log_writer(library, counted, own_proxy.bootstrap)) as log:
        log.read_to_end(lambda record: None)
        began = time.monotonic()
        with pytest.raises(AppendRefusedError, match=r"(?i)partition.count") as refused:
            log.append([Record(b"x")])
    assert time.monotonic() - began < RetryPolicy().total_seconds / 4
    assert refused.value.outcome == "refused"
    assert clients.log_end(kafka.bootstrap, counted) == 0


def test_conditional_send_requires_a_partition(
    producer: Producer, own_proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = clients.create_topic(own_proxy.bootstrap, unique_topic("plain"))
    with pytest.raises(PartitionRequiredError):
        producer.send(topic, b"x", expected_offset=0)
    outcome = producer.send(topic, b"x", key=b"k")
    producer.resolve()
    assert outcome.get() == 0


def test_acks_0_is_not_possible(library: str) -> None:
    making: dict[str, Callable[[], object]] = {
        "kafka-python": lambda: fencepost.kafka_python.ConditionalProducer(acks=0),
        "aiokafka": lambda: fencepost.aiokafka.ConditionalProducer(acks=0),
        "confluent-kafka": lambda: fencepost.confluent.ConditionalProducer({"acks": "0"}),
    }
    with pytest.raises(ValueError, match="acks=0"):
        making[library]()


def test_sends_ahead_of_an_answer_fall_together(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, topic: str
) -> None:
    """Several batches in flight, if the library allows it. Each refusal is an OffsetMismatchError with that
    `expected`."""
    settings = {
        "kafka-python": {"max_in_flight_requests_per_connection": 5, "batch_size": 1},
        "aiokafka": {"max_batch_size": 1},  # always one in flight
        "confluent-kafka": {"max_in_flight_requests_per_connection": 5, "batch_num_messages": 1},
    }
    with closing(clients.Producer(library, own_proxy.bootstrap, **settings[library])) as eager:
        outcomes = [eager.send(topic, b"%d" % i, partition=0, expected_offset=i + 10) for i in range(4)]
        eager.resolve()
        for i, outcome in enumerate(outcomes):
            assert isinstance(outcome.error, OffsetMismatchError), outcome.error
            assert (outcome.error.expected, outcome.error.actual in (0, None)) == (i + 10, True)
        again = eager.send(topic, b"right", partition=0, expected_offset=0)
        eager.resolve()
        assert again.get() == 0
    assert clients.read_all(kafka.bootstrap, topic) == [(0, b"right")]


# --- LogWriter -------------------------------------------------------------------------------------------------------


def test_second_log_writer_fences_the_first(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, topic: str
) -> None:
    first = clients.log_writer(library, topic, own_proxy.bootstrap)
    second = clients.log_writer(library, topic, own_proxy.bootstrap)
    with closing(first), closing(second):
        with pytest.raises(NotAtEndError):
            first.append([Record(b"too early")])
        assert first.read_to_end(_nothing) == 0
        assert first.append([Record(b"a"), Record(b"b", b"key", (("h", b"1"),))]) == 0
        assert first.append([Record(b"c")]) == 2

        taken_over: list[LogRecord] = []
        assert second.read_to_end(taken_over.append) == 3
        assert [(r.offset, r.key, r.value) for r in taken_over] == [(0, None, b"a"), (1, b"key", b"b"), (2, None, b"c")]
        assert ("h", b"1") in taken_over[1].headers
        assert second.append([Record(b"d")]) == 3

        with pytest.raises(OffsetMismatchError) as caught:
            first.append([Record(b"stale"), Record(b"stale too")])
        assert (caught.value.expected, caught.value.actual) == (3, 4)
        with pytest.raises(NotAtEndError):
            first.append([Record(b"still not")])
        missed: list[LogRecord] = []
        assert first.read_to_end(missed.append) == 4
        assert [r.value for r in missed] == [b"d"], "the writer reads its own appends again"
        assert first.append([Record(b"e")]) == 4
        assert first.next_offset == 5
    assert [value for _, value in clients.read_all(kafka.bootstrap, topic)] == [b"a", b"b", b"c", b"d", b"e"]


def test_every_append_is_one_batch_in_the_log(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, topic: str
) -> None:
    with closing(clients.log_writer(library, topic, own_proxy.bootstrap)) as log:
        log.read_to_end(_nothing)
        sizes = [1, 2000, 3, 700, 1]
        for size in sizes:
            log.append([Record(b"%d" % i, b"key") for i in range(size)])
        log.append([Record(b"x" * 900_000)])
    bases = [0, 1, 2001, 2004, 2704, 2705]
    assert _batches(kafka, topic) == list(zip(bases, [*sizes, 1], strict=True))


def test_append_too_large_for_one_batch_is_refused(
    library: str, own_proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    settings = {"max.message.bytes": "2000"}
    small = clients.create_topic(own_proxy.bootstrap, unique_topic("client-small"), **settings)
    with closing(clients.log_writer(library, small, own_proxy.bootstrap)) as log:
        log.read_to_end(_nothing)
        with pytest.raises(BatchTooLargeError, match="limit is 2000"):
            log.append([Record(b"x" * 300)] * 10)
        assert log.append([Record(b"x" * 300)] * 2) == 0, "the writer does not continue"


@_LEAKS_SOCKETS
def test_in_doubt_append_at_paused_broker_is_resolved(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, topic: str
) -> None:
    """1. The client sends and times out; its attempts stay in the broker's queue. 2. The broker resumes."""
    with closing(clients.log_writer(library, topic, own_proxy.bootstrap, IMPATIENT)) as log:
        log.read_to_end(_nothing)
        assert log.append([Record(b"before")]) == 0
        kafka.pause(1)
        resume = threading.Timer(5, kafka.resume, [1])  # two attempts time out
        resume.start()
        try:
            assert log.append([Record(b"in doubt"), Record(b"its second record")]) == 1
        finally:
            resume.join()
        assert log.append([Record(b"after")]) == 3
    assert [value for _, value in clients.read_all(kafka.bootstrap, topic)] == [
        b"before",
        b"in doubt",
        b"its second record",
        b"after",
    ]
    assert _batches(kafka, topic) == [(0, 1), (1, 2), (3, 1)]
    gc.collect()


@_LEAKS_SOCKETS
def test_log_writer_survives_killed_and_restarted_proxy(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, topic: str
) -> None:
    with closing(clients.log_writer(library, topic, own_proxy.bootstrap, IMPATIENT)) as log:
        log.read_to_end(_nothing)
        written: list[tuple[int, bytes]] = []

        def kill_twice() -> None:
            for _ in range(2):
                before = len(written)
                until(lambda before=before: len(written) > before + 50, "appends")
                own_proxy.kill()
                own_proxy.restart()

        killer = threading.Thread(target=kill_twice)
        killer.start()
        after = 0
        try:
            while killer.is_alive() or after < 20:
                after += not killer.is_alive()
                values = [b"%d.%d" % (len(written), i) for i in range(3)]
                base = log.append([Record(value) for value in values])
                written += [(base + i, value) for i, value in enumerate(values)]
                time.sleep(0.01)
        finally:
            killer.join()
    assert clients.read_all(kafka.bootstrap, topic) == written
    assert all(later[0] == earlier[0] + 1 for earlier, later in pairwise(written))
    gc.collect()


def test_transaction_markers_are_offsets_too(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, unique_topic: Callable[..., str]
) -> None:
    """Committed records are read, aborted ones are not. The next append expects the offset after the marker."""
    topic = clients.create_topic(own_proxy.bootstrap, unique_topic("plain-markers"))
    with closing(KafkaProducer(bootstrap_servers=kafka.bootstrap, transactional_id=f"txn-{topic}")) as writer:
        writer.init_transactions()
        for value, end in ((b"committed", writer.commit_transaction), (b"aborted", writer.abort_transaction)):
            writer.begin_transaction()
            writer.send(topic, value, partition=0).get(90)
            end()
    with closing(clients.log_writer(library, topic, own_proxy.bootstrap)) as log:
        read: list[LogRecord] = []
        assert log.read_to_end(read.append) == 4
        assert [r.value for r in read] == [b"committed"]
        assert log.append([Record(b"ours")]) == 4


def test_log_writer_reports_deleted_next_records(
    library: str, own_proxy: ProxyProcess, kafka: KafkaCluster, topic: str
) -> None:
    with (
        closing(clients.log_writer(library, topic, own_proxy.bootstrap)) as log,
        closing(clients.log_writer(library, topic, own_proxy.bootstrap)) as behind,
    ):
        behind.read_to_end(_nothing)
        log.read_to_end(_nothing)
        log.append([Record(b"a"), Record(b"b")])
        with closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
            admin.delete_records({TopicPartition(topic, 0): 2})
        with pytest.raises(PositionLostError, match="next offset 0 is outside the log, which holds 2 to 2"):
            behind.read_to_end(_nothing)


def _nothing(record: LogRecord) -> None: ...


def _append_as_rival(kafka: KafkaCluster, topic: str) -> None:
    with closing(KafkaProducer(bootstrap_servers=kafka.bootstrap)) as rival:
        rival.send(topic, b"rival", partition=0).get(90)
