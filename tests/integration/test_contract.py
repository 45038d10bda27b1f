"""What a client may rely on, row by row (KIP-27 and docs/contract.md), by raw sockets, on real Kafka.

Every test asks the log itself, at Kafka's own address, what was appended.
"""

from __future__ import annotations

import contextlib
import select
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from kafka.protocol.producer import AddPartitionsToTxnRequest, EndTxnRequest, ProduceRequest

from fencepost_proxy.dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.proxy import ProxyProcess
from tests.support.raw import (
    CODECS,
    Answer,
    Batches,
    Closed,
    Connection,
    Log,
    Producer,
    Record,
    batch,
    produce_request,
    sign,
)

pytestmark = [pytest.mark.kafka, pytest.mark.brokers]

PRODUCE = 0
#: The first Produce version that names topics by id.
BY_TOPIC_ID = 13

OK = 0
CORRUPT_MESSAGE, UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER = 2, 3, 6
TOPIC_AUTHORIZATION_FAILED, INVALID_TIMESTAMP, INVALID_CONFIG, POLICY_VIOLATION, INVALID_RECORD = 29, 32, 40, 44, 87
DAY_MS = 86_400_000
CHECK = "fencepost.check.expected.offsets"
SOURCE = "fencepost.expected.offsets.source"
STATE_TOPIC = "__fencepost_state"
#: The value of records that must not get into it.
FORGED = b'{"forged": true}'

NewTopic = Callable[..., str]


@pytest.fixture
def log(kafka: KafkaCluster) -> Log:
    return Log(kafka.bootstrap)


@pytest.fixture
def client(proxy: ProxyProcess) -> Iterator[Connection]:
    with Connection(proxy.bootstrap) as connection:
        yield connection


@pytest.fixture
def new_topic(client: Connection, log: Log, unique_topic: Callable[..., str]) -> NewTopic:
    """`new_topic("required")`: created through the proxy, guarded by the glob that its name begins with."""

    def create(prefix: str, *, partitions: int = 1, length: int = 0, **configs: str) -> str:
        name = unique_topic(prefix)
        kafka_names = {key.replace("_", "."): value for key, value in configs.items()}
        assert client.create_topic(name, partitions=partitions, configs=kafka_names) == (OK, None)
        for partition in range(partitions):
            assert log.end(name, partition) == 0
        if length:
            assert client.append(name, batch(*[b"old"] * length, expected=0)).error_code == OK
        return name

    return create


def assert_refused(answer: Answer, code: int, message: str, *, base_offset: int = -1) -> None:
    """`message` is how the answer's begins."""
    assert (answer.error_code, answer.base_offset) == (code, base_offset), answer
    assert answer.message is not None
    assert answer.message.startswith(message), answer
    assert answer.record_errors == ()


# --- what is said, and where ------------------------------------------------------------------------------------------


def test_append_with_correct_expectation_gets_that_offset(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required")
    for expected, size in ((0, 1), (1, 3), (4, 1)):
        answer = client.append(topic, batch(*[b"v%d" % expected] * size, expected=expected))
        assert (answer.error_code, answer.base_offset, answer.message) == (OK, expected, None)
    assert log.values(topic) == [b"v0", b"v1", b"v1", b"v1", b"v4"]


@pytest.mark.parametrize("expected", [0, 2, 4, 5, 9_000_000_000, 2**63 - 1])
def test_wrong_expectation_is_refused_with_the_log_end(
    expected: int, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic("required", length=3)
    answer = client.append(topic, batch(b"new", expected=expected))
    message = f"OFFSET_MISMATCH topic={topic} partition=0 expected={expected} actual=3"
    assert answer == Answer(POLICY_VIOLATION, 3, -1, 0, message, ())
    assert log.values(topic) == [b"old"] * 3


def test_a_refusal_changes_nothing_for_the_next_append(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required", length=3)
    for _ in range(3):
        assert client.append(topic, batch(b"bad", expected=7)).error_code == POLICY_VIOLATION
    assert client.append(topic, batch(b"good", expected=3)).base_offset == 3
    assert log.values(topic)[3:] == [b"good"]


def test_the_expectation_may_stand_on_a_later_record(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required", length=3)
    assert client.append(topic, batch(b"a", b"b", Record(b"c", expected=5))).base_offset == 3
    refused = client.append(topic, batch(b"x", Record(b"y", expected=6)))
    assert_refused(refused, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=6)
    assert refused.message is not None
    assert refused.message.endswith("expected=5 actual=6")
    assert log.values(topic)[3:] == [b"a", b"b", b"c"]


def test_expectations_of_one_batch_that_agree_are_one(client: Connection, new_topic: NewTopic) -> None:
    topic = new_topic("required", length=3)
    assert client.append(topic, batch(Record(b"a", 3), b"b", Record(b"c", 5))).base_offset == 3


def test_expectation_contradicting_its_record_position_is_a_mismatch(
    client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic("required", length=3)
    answer = client.append(topic, batch(Record(b"a", 3), b"b", Record(b"c", 9)))
    assert_refused(answer, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=3)
    assert answer.message is not None
    assert answer.message.endswith("expected=9 actual=5 record=2")
    assert log.end(topic) == 3


def test_minus_one_says_nothing(client: Connection, log: Log, new_topic: NewTopic) -> None:
    required, checked = new_topic("required"), new_topic("checked", length=2)
    nothing = batch(Record(b"x", expected=b"-1"))
    assert_refused(client.append(required, nothing), POLICY_VIOLATION, f"EXPECTATION_REQUIRED topic={required} ")
    assert client.append(checked, nothing).base_offset == 2
    assert (log.end(required), log.end(checked)) == (0, 3)


def test_append_without_expectation_follows_the_check_level(client: Connection, log: Log, new_topic: NewTopic) -> None:
    required, checked = new_topic("required", length=1), new_topic("checked", length=1)
    message = f"EXPECTATION_REQUIRED topic={required} partition=0"
    assert_refused(client.append(required, batch(b"x")), POLICY_VIOLATION, message)
    assert client.append(checked, batch(b"x")).base_offset == 1
    assert client.append(checked, batch(b"y", expected=2)).base_offset == 2
    assert (log.values(required), log.values(checked)) == ([b"old"], [b"old", b"x", b"y"])


@pytest.mark.parametrize(
    "stated",
    [b"", b"abc", b"+3", b" 3", b"3 ", b"-2", b"0x3", b"3.0", "٣".encode(), b"1" * 20, b"9223372036854775808"],
)
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_a_header_that_cannot_be_read(
    stated: bytes, prefix: str, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic(prefix, length=3)
    answer = client.append(topic, batch(b"first", Record(b"second", expected=stated)))
    message = f"HEADER_UNREADABLE topic={topic} partition=0 record=1 header=fencepost-expected-offset"
    assert_refused(answer, INVALID_RECORD, message)
    assert log.end(topic) == 3


def test_a_header_that_is_null_or_repeated(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required")
    null = Record(b"x", headers=[("fencepost-expected-offset", None)])
    twice = Record(b"x", expected=0, headers=[("other", b"1"), ("fencepost-expected-offset", b"0")])
    for record in (null, twice):
        answer = client.append(topic, batch(record))
        message = f"HEADER_UNREADABLE topic={topic} partition=0 record=0 header=fencepost-expected-offset"
        assert_refused(answer, INVALID_RECORD, message)
    assert log.end(topic) == 0


def test_value_resembling_the_header_is_no_expectation(client: Connection, new_topic: NewTopic) -> None:
    topic = new_topic("checked", length=1)
    tricky = Record(
        b"fencepost-expected-offset\x02\x39", headers=[("expected-offset-", b"9"), ("x", b"fencepost-expected-offset")]
    )
    assert client.append(topic, batch(tricky)).base_offset == 1


@pytest.mark.parametrize("codec", CODECS)
def test_every_compression(codec: str, client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required", length=3)
    big = [b"%d" % i * 500 for i in range(10)]
    assert client.append(topic, batch(*big, expected=3, codec=CODECS[codec])).base_offset == 3
    refused = client.append(topic, batch(*big, expected=4, codec=CODECS[codec]))
    assert_refused(refused, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=13)
    last = log.batches(topic)[-1]
    assert (last.codec, last.values) == (CODECS[codec], tuple(big))


@pytest.mark.parametrize("version", range(3, 13))
def test_every_produce_version(version: int, client: Connection, log: Log, new_topic: NewTopic) -> None:
    if version > client.api_versions()[PRODUCE][1]:
        pytest.skip(f"this Kafka has no Produce v{version}")
    topic = new_topic("required", length=3)
    good = client.append(topic, batch(b"a", expected=3), version=version)
    bad = client.append(topic, batch(b"b", expected=3), version=version)
    start = 0 if version >= 5 else None
    message = f"OFFSET_MISMATCH topic={topic} partition=0 expected=3 actual=4" if version >= 8 else None
    assert good == Answer(OK, 3, -1, start, None, ())
    assert bad == Answer(POLICY_VIOLATION, 4, -1, start, message, ())
    assert log.end(topic) == 4


# --- the other source of the expected offset --------------------------------------------------------------------------


def test_a_base_offset_above_zero_is_an_expectation(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required", length=3)
    assert_refused(client.append(topic, batch(b"x", base_offset=0)), POLICY_VIOLATION, "EXPECTATION_REQUIRED")
    assert_refused(client.append(topic, batch(b"x", base_offset=2)), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=3)
    # The broker takes no other base offset than 0, so this shows too that it was zeroed on its way.
    assert client.append(topic, batch(b"a", b"b", base_offset=3)).base_offset == 3
    assert log.values(topic)[3:] == [b"a", b"b"]


def test_base_offset_source_is_taken_literally(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("base-required")
    assert client.append(topic, batch(b"a", base_offset=0)).base_offset == 0
    refused = client.append(topic, batch(b"b", base_offset=0))
    assert_refused(refused, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=1)
    assert_refused(client.append(topic, batch(b"c", base_offset=-1)), POLICY_VIOLATION, "EXPECTATION_REQUIRED")
    assert client.append(topic, batch(b"d", base_offset=1)).base_offset == 1
    assert log.values(topic) == [b"a", b"d"]


@pytest.mark.parametrize("prefix", ["required", "base-required"])
def test_a_header_decides_where_there_is_one(prefix: str, client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic(prefix)
    assert client.append(topic, batch(b"a", expected=0, base_offset=7)).base_offset == 0
    refused = client.append(topic, batch(b"b", expected=7, base_offset=1))
    assert_refused(refused, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=1)
    assert log.values(topic) == [b"a"]


@pytest.mark.parametrize("stated", [None, -1])
def test_base_offset_without_expectation_is_zeroed(
    stated: int | None, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """-1 says nothing; upstream it would be refused. Idempotent, so that the batch goes without a stamp."""
    topic = new_topic("base")
    producer = client.init_producer_id()
    record = Record(b"a", expected=None if stated is None else b"-1")
    assert client.append(topic, batch(record, base_offset=-1, producer=producer)).base_offset == 0
    assert client.append(topic, batch(b"b", base_offset=-1)).base_offset == 1
    assert log.values(topic) == [b"a", b"b"]


def test_a_base_offset_that_is_none(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("base")
    assert_refused(client.append(topic, batch(b"a", base_offset=-2)), INVALID_RECORD, "HEADER_UNREADABLE")
    assert log.end(topic) == 0


# --- batches that are not what they should be -------------------------------------------------------------------------


def test_a_batch_that_does_not_match_its_crc(client: Connection, log: Log, new_topic: NewTopic) -> None:
    """Stamping computes the CRC anew: a batch that was damaged before must not be healed by it."""
    topic = new_topic("required")
    damaged = bytearray(batch(b"payload", expected=0))
    damaged[damaged.index(b"payload")] ^= 1
    assert client.append(topic, bytes(damaged)).error_code == CORRUPT_MESSAGE
    assert log.end(topic) == 0
    assert client.append(topic, batch(b"payload", expected=0)).error_code == OK


def _resized(good: bytes, count: int) -> bytes:
    bad = bytearray(good)
    struct.pack_into(">i", bad, 57, count)
    sign(bad)
    return bytes(bad)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda good: good[:40],
        lambda good: good[:-1],
        lambda good: good + b"\0",
        lambda good: good + good,
        lambda good: b"",
        lambda good: _resized(good, 2),
        lambda good: _resized(good, 0),
        lambda good: good[:16] + b"\1" + good[17:],
    ],
    ids=["no header", "cut", "one byte more", "two batches", "empty", "count too high", "count zero", "magic 1"],
)
def test_malformed_batch_fails_only_its_partition(
    spoil: Callable[[bytes], bytes], client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic("required", partitions=2)
    good = batch(b"v", expected=0)
    answers = client.produce({topic: {0: spoil(good), 1: good}})
    assert answers[topic, 0].error_code in (INVALID_RECORD, CORRUPT_MESSAGE)
    assert answers[topic, 1].error_code == OK
    assert (log.end(topic, 0), log.end(topic, 1)) == (0, 1)


def test_a_client_may_not_write_control_batches(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required")
    marker = batch(Record(b"\0\0\0\0\0\0", key=b"\0\0\0\1", expected=0), attributes=0x20)
    assert_refused(client.append(topic, marker), INVALID_RECORD, "CONTROL_BATCH")
    assert log.end(topic) == 0


def test_client_using_shared_producer_id_is_refused(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required", length=1)
    (first,) = log.batches(topic)
    stolen = Producer(first.producer_id, first.producer_epoch, 1)
    assert_refused(
        client.append(topic, batch(b"x", expected=1, producer=stolen)), POLICY_VIOLATION, "PRODUCER_ID_TAKEN"
    )
    assert log.end(topic) == 1


# --- timestamps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("age", ["two days", "none at all"])
def test_fenced_append_requires_recent_timestamps(age: str, client: Connection, log: Log, new_topic: NewTopic) -> None:
    """Kafka forgets a producer by its record timestamps, and with it what a stamp is compared with."""
    topic = new_topic("required", length=1)
    timestamp_ms = -1 if age == "none at all" else int(time.time() * 1000) - 2 * DAY_MS
    answer = client.append(topic, batch(Record(b"x", expected=1, timestamp_ms=timestamp_ms)))
    assert_refused(answer, INVALID_TIMESTAMP, f"TIMESTAMP_TOO_OLD topic={topic} partition=0 newest={timestamp_ms}")
    assert log.end(topic) == 1
    assert client.append(topic, batch(b"x", expected=1)).base_offset == 1


@pytest.mark.parametrize("age", ["two days", "none at all"])
def test_old_timestamps_are_accepted_on_checked_topics(
    age: str, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic("checked", length=1)
    timestamp_ms = -1 if age == "none at all" else int(time.time() * 1000) - 2 * DAY_MS
    refused = client.append(topic, batch(Record(b"x", expected=7, timestamp_ms=timestamp_ms)))
    assert_refused(refused, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=1)
    for expected in (1, 2):
        old = Record(b"old", expected=expected, timestamp_ms=timestamp_ms)
        assert client.append(topic, batch(old)).base_offset == expected
    assert client.append(topic, batch(Record(b"plain", timestamp_ms=timestamp_ms))).base_offset == 3
    assert client.append(topic, batch(b"fresh", expected=4)).base_offset == 4
    assert log.end(topic) == 5


def test_log_append_time(client: Connection, log: Log, new_topic: NewTopic) -> None:
    """Kafka answers a fresh append there as it answers a duplicate, so the log is asked each time."""
    topic = new_topic("required", message_timestamp_type="LogAppendTime")
    now_ms = time.time() * 1000
    for expected in range(4):
        answer = client.append(topic, batch(Record(b"v%d" % expected, expected=expected, timestamp_ms=1)))
        assert (answer.error_code, answer.base_offset) == (OK, expected)
        assert abs(answer.log_append_time_ms - now_ms) < 60_000
    refused = client.append(topic, batch(b"x", expected=2))
    assert_refused(refused, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=4)
    assert log.values(topic) == [b"v0", b"v1", b"v2", b"v3"]


# --- acks -------------------------------------------------------------------------------------------------------------


def test_acks_0_with_an_expectation_closes_the_connection(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("checked", length=1)
    client.send_produce({topic: {0: batch(b"x", expected=1)}}, acks=0)
    assert client.is_closed()
    assert log.end(topic) == 1


def test_acks_0_without_expectation_is_appended_unanswered(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("checked", length=1)
    for i in range(3):
        client.send_produce({topic: {0: batch(b"silent%d" % i)}}, acks=0)
    assert client.append(topic, batch(b"loud", expected=4)).base_offset == 4  # the next answer is this one's
    assert log.values(topic) == [b"old", b"silent0", b"silent1", b"silent2", b"loud"]


def test_acks_0_with_an_error_closes_the_connection(
    client: Connection, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    required, small = new_topic("required"), new_topic("checked", max_message_bytes="1000")
    for topic, records in ((required, batch(b"says nothing")), (small, batch(b"x" * 2000))):
        with Connection(proxy.bootstrap) as connection:
            connection.send_produce({topic: {0: records}}, acks=0)
            assert connection.is_closed(), topic
        assert log.end(topic) == 0


def test_acks_1_goes_up_as_all(kafka3: KafkaCluster, proxy3: ProxyProcess, unique_topic: Callable[..., str]) -> None:
    """With a follower that does not answer, acks=1 is done at once and acks=all is not."""
    log3 = Log(kafka3.bootstrap)
    leader, duplicate_waiter, _ = kafka3.node_ids
    topics = {prefix: unique_topic(prefix) for prefix in ("plain", "required", "checked")}
    with Connection(proxy3.bootstrap) as admin:
        for topic in topics.values():
            assert admin.create_topic(topic, on=[leader, duplicate_waiter]) == (OK, None)
            assert log3.end(topic) == 0
    with contextlib.ExitStack() as stack:
        clients = {prefix: stack.enter_context(_leader_through(proxy3, topic)) for prefix, topic in topics.items()}
        for prefix, client in clients.items():
            until(
                lambda prefix=prefix, client=client: client.append(topics[prefix], batch(b"warm", expected=0))[0] == OK,
                f"an append to {topics[prefix]}",
            )
        kafka3.pause(duplicate_waiter)
        try:
            for prefix, client in clients.items():
                client.send_produce({topics[prefix]: {0: _stated(prefix)}}, acks=1)
            answered = {"plain": _answers_within(clients["plain"], 60.0)}
            answered |= {prefix: _answers_within(clients[prefix], 0.5) for prefix in ("required", "checked")}
        finally:
            kafka3.resume(duplicate_waiter)
        assert answered == {"plain": True, "required": False, "checked": False}
        for prefix, client in clients.items():
            assert client.receive_produce()[1][topics[prefix], 0][:2] == (OK, 1)


def _stated(prefix: str) -> bytes:
    return batch(b"x", expected=1 if prefix == "required" else None)


def _answers_within(connection: Connection, seconds: float) -> bool:
    readable, _, _ = select.select([connection.socket], [], [], seconds)
    return bool(readable)


def _leader_through(proxy: ProxyProcess, topic: str) -> Connection:
    """To the proxy's listener for the partition's leader."""
    with Connection(proxy.bootstrap) as connection:
        metadata = connection.metadata(topic)
    leader_id = metadata.topics[0].partitions[0].leader_id
    return Connection(next(f"{each.host}:{each.port}" for each in metadata.brokers if each.node_id == leader_id))


# --- requests with several partitions ---------------------------------------------------------------------------------


def test_each_partition_of_a_request_stands_alone(client: Connection, log: Log, new_topic: NewTopic) -> None:
    required, checked, plain = new_topic("required", partitions=3), new_topic("checked", partitions=2), new_topic("p")
    answers = client.produce(
        {
            checked: {1: batch(b"e", expected=4), 0: batch(b"d")},
            required: {
                2: batch(b"c"),
                0: batch(b"a", expected=0),
                1: batch(b"b", expected=1),
                9: batch(b"?", expected=0),
            },
            plain: {0: batch(b"f")},
        },
        timeout_ms=12_000,
    )
    assert {key: answer.error_code for key, answer in answers.items()} == {
        (required, 0): OK,
        (required, 1): POLICY_VIOLATION,
        (required, 2): POLICY_VIOLATION,
        (required, 9): answers[required, 9].error_code,
        (checked, 0): OK,
        (checked, 1): POLICY_VIOLATION,
        (plain, 0): OK,
    }
    assert answers[required, 9].error_code in (UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER)
    assert (answers[required, 1].base_offset, answers[required, 2].base_offset) == (0, -1)
    assert [log.values(required, partition) for partition in range(3)] == [[b"a"], [], []]
    assert (log.values(checked, 0), log.values(checked, 1), log.values(plain)) == ([b"d"], [], [b"f"])


def test_refusal_scope_request_follows_the_kip(
    kafka: KafkaCluster, log: Log, new_topic: NewTopic, tmp_path: Path
) -> None:
    required, plain = new_topic("required", partitions=2), new_topic("plain")
    config = 'refusal_scope = "request"\n[topics."required-*"]\n"fencepost.check.expected.offsets" = "required"\n'
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=config) as strict,
        Connection(strict.bootstrap) as client,
    ):
        for order in ((0, 1), (1, 0)):
            batches: Batches = {
                required: {partition: batch(b"x", expected=5 if partition == order[0] else 0) for partition in order},
                plain: {0: batch(b"x")},
            }
            answers = client.produce(batches)
            assert {answer.error_code for answer in answers.values()} == {POLICY_VIOLATION}
            reported = f"OFFSET_MISMATCH topic={required} partition={order[0]} expected=5 actual=0"
            assert answers[required, order[0]].message == reported
            assert all(reported in (answer.message or "") for answer in answers.values())
        assert [log.end(required, 0), log.end(required, 1), log.end(plain)] == [0, 0, 0]
        answers = client.produce({required: {0: batch(b"a", expected=0), 1: batch(b"b", expected=0)}})
        assert {answer.error_code for answer in answers.values()} == {OK}


def test_request_naming_a_partition_twice_closes_connection(client: Connection, log: Log, new_topic: NewTopic) -> None:
    """Kafka would answer for one of the two: what became of the other, nobody could tell."""
    topic = new_topic("required")
    _, frame = client.frame(_twice(topic, batch(b"a", expected=0), batch(b"b", expected=1)), 9)
    client.socket.sendall(frame)
    assert client.is_closed()
    assert log.end(topic) == 0


def _twice(topic: str, first: bytes, second: bytes) -> Any:
    request = produce_request({topic: {0: first}})
    partitions = request.topic_data[0].partition_data
    partitions += produce_request({topic: {0: second}}).topic_data[0].partition_data
    return request


# --- several requests in flight ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["required", "checked"])
@pytest.mark.parametrize("idempotent", [False, True])
def test_pipelined_appends_are_appended_in_order(
    prefix: str, idempotent: bool, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic(prefix)
    producer = client.init_producer_id() if idempotent else None
    frames = b""
    for i in range(40):
        who = producer and producer._replace(sequence=2 * i)
        records = batch(b"a%d" % i, b"b%d" % i, expected=2 * i, producer=who)
        frames += client.frame(_request(topic, records), 9)[1]
    client.socket.sendall(frames)
    for i in range(40):
        _, answers = client.receive_produce()
        assert (answers[topic, 0].error_code, answers[topic, 0].base_offset) == (OK, 2 * i)
    assert log.values(topic) == [value for i in range(40) for value in (b"a%d" % i, b"b%d" % i)]


def _request(topic: str, records: bytes) -> Any:
    return produce_request({topic: {0: records}})


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("idempotent", [False, True])
def test_pipelined_appends_after_a_refusal_are_refused(
    warm: bool, idempotent: bool, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """Batch 3 of ten expects one too much, and those behind it go on from there. None may get a bare 45."""
    topic = new_topic("required", length=5)
    start = 5
    if not warm:
        client.alter_topic(topic, {CHECK: "true"})  # the gate forgets
        client.alter_topic(topic, {CHECK: "required"})
    producer = client.init_producer_id() if idempotent else None
    frames = b""
    for i in range(10):
        expected = start + i + (i >= 3)
        who = producer and producer._replace(sequence=i)
        frames += client.frame(_request(topic, batch(b"v%d" % i, expected=expected, producer=who)), 9)[1]
    client.socket.sendall(frames)
    answers = [client.receive_produce()[1][topic, 0] for _ in range(10)]
    assert [each.error_code for each in answers] == [OK] * 3 + [POLICY_VIOLATION] * 7
    assert log.values(topic)[start:] == [b"v0", b"v1", b"v2"]
    assert client.append(topic, batch(b"next", expected=8)).base_offset == 8


@pytest.mark.parametrize("idempotent", [False, True])
def test_fitting_append_after_refused_batch_is_refused(
    idempotent: bool, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """Its sender thinks that the refused one lies before it. Another producer's batch stands alone."""
    topic = new_topic("checked", partitions=2, length=3)
    mine, other = client.init_producer_id(), client.init_producer_id()
    refused = batch(b"refused", expected=7, producer=mine if idempotent else None)
    behind = [
        batch(b"fits", expected=3, producer=mine._replace(sequence=1) if idempotent else None),
        batch(b"says nothing", producer=mine._replace(sequence=2) if idempotent else None),
        batch(b"another's", expected=3, producer=other),
    ]
    requests = [_request(topic, records) for records in (refused, *behind)]
    requests.append(produce_request({topic: {1: batch(b"elsewhere", expected=0)}}))
    client.socket.sendall(b"".join(client.frame(request, 9)[1] for request in requests))
    answers = [next(iter(client.receive_produce()[1].values())) for _ in requests]
    assert [each.error_code for each in answers] == [POLICY_VIOLATION] * 3 + [OK] * 2
    assert_refused(answers[1], POLICY_VIOLATION, "PREDECESSOR_FAILED OFFSET_MISMATCH")
    assert (log.values(topic, 0)[3:], log.values(topic, 1)) == ([b"another's"], [b"elsewhere"])
    assert client.append(topic, batch(b"sent knowing it", expected=4)).base_offset == 4


def test_answers_keep_the_order_of_requests(client: Connection, log: Log, new_topic: NewTopic) -> None:
    required, plain = new_topic("required"), new_topic("plain")
    newest = client.api_versions()[PRODUCE][1]
    expected_kinds = []
    frames = b""
    for i in range(12):
        fetch_topic = FetchRequest.FetchTopic
        queried = fetch_topic.FetchPartition(
            partition=0, fetch_offset=0, last_fetched_epoch=-1, log_start_offset=-1, partition_max_bytes=1000
        )
        requests: list[tuple[Any, int]] = [
            (_request(required, batch(b"r%d" % i, expected=i if i % 3 else 99)), 9),
            (_request(plain, batch(b"p%d" % i)), newest),
            (_request(required, batch(b"late", expected=50)), 3),
            (ApiVersionsRequest(client_software_name="raw", client_software_version="1"), 3),
            (MetadataRequest(topics=None, allow_auto_topic_creation=False), 9),
            (
                FetchRequest(
                    replica_id=-1,
                    max_wait_ms=1,
                    min_bytes=0,
                    max_bytes=1000,
                    isolation_level=0,
                    session_id=0,
                    session_epoch=-1,
                    topics=[fetch_topic(topic=plain, partitions=[queried])],
                    forgotten_topics_data=[],
                    rack_id="",
                ),
                11,
            ),
        ]
        for request, version in requests:
            correlation_id, frame = client.frame(request, version)
            frames += frame
            expected_kinds.append((correlation_id, type(request), version))
    client.socket.sendall(frames)
    appended = 0
    for correlation_id, kind, version in expected_kinds:
        got, answer = client.receive(kind, version)
        assert got == correlation_id
        if kind is ProduceRequest and answer.responses[0].name == plain:
            # A proxy that stood still for as long as its lease must not know yet what is guarded.
            code = answer.responses[0].partition_responses[0].error_code
            assert code in (OK, NOT_LEADER)
            appended += code == OK
    assert log.end(plain) == appended


# --- retries ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_retry_is_recognised_by_producer_and_sequence(
    prefix: str, client: Connection, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic(prefix, length=2)
    producer = client.init_producer_id()
    mine = batch(b"a", b"b", expected=2, producer=producer)
    assert client.append(topic, mine).base_offset == 2
    assert client.append(topic, batch(b"c", expected=4, producer=producer._replace(sequence=2))).base_offset == 4
    assert client.append(topic, batch(b"other", expected=5)).base_offset == 5
    with Connection(proxy.bootstrap) as other:
        for connection in (client, other, client):
            again = connection.append(topic, mine)
            assert (again.error_code, again.base_offset) == (OK, 2)
    assert log.values(topic) == [b"old", b"old", b"a", b"b", b"c", b"other"]


def test_same_sequence_with_other_records_is_no_retry(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required")
    producer = client.init_producer_id()
    assert client.append(topic, batch(b"a", expected=0, producer=producer)).base_offset == 0
    other = client.append(topic, batch(b"b", expected=0, producer=producer))
    assert_refused(other, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=1)
    newer = client.append(topic, batch(b"a", expected=0, producer=producer._replace(epoch=1)))
    assert newer.error_code == POLICY_VIOLATION
    assert log.values(topic) == [b"a"]


def test_write_id_retry_is_recognised_indefinitely(
    kafka: KafkaCluster, log: Log, new_topic: NewTopic, tmp_path: Path
) -> None:
    """Also by a proxy that never saw it, and behind other appends."""
    topic = new_topic("required")
    mine = batch(b"a", b"b", expected=0, write_id=b"write-1")
    config = '[topics."required-*"]\n"fencepost.check.expected.offsets" = "required"\n'
    with ProxyProcess(kafka.bootstrap, tmp_path, config=config) as proxy:
        with Connection(proxy.bootstrap) as client:
            assert client.append(topic, mine).base_offset == 0
            assert client.append(topic, batch(b"c", expected=2)).base_offset == 2
            assert client.append(topic, mine)[:2] == (OK, 0)
        proxy.kill()
        proxy.restart()
        with Connection(proxy.bootstrap) as client:
            assert client.append(topic, mine)[:2] == (OK, 0)
            assert client.append(topic, batch(b"d", expected=3)).base_offset == 3
            assert client.append(topic, mine)[:2] == (OK, 0)
            # What only resembles it is not it.
            for other in (
                batch(b"a", b"X", expected=0, write_id=b"write-1"),
                batch(b"a", b"b", expected=0, write_id=b"write-2"),
                batch(b"a", expected=0, write_id=b"write-1"),
                batch(b"a", b"b", b"c", expected=0, write_id=b"write-1"),
                batch(b"b", expected=1, write_id=b"write-1"),
            ):
                assert_refused(client.append(topic, other), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=4)
    assert log.values(topic) == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("codec", CODECS)
def test_a_write_id_is_found_in_every_compression(
    codec: str, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """The topic is compressed by the broker in another way than the batch was."""
    topic = new_topic("required", compression_type="zstd" if codec != "zstd" else "gzip")
    mine = batch(b"a" * 300, b"b" * 300, expected=0, write_id=b"it", codec=CODECS[codec])
    assert client.append(topic, mine).base_offset == 0
    client.alter_topic(topic, {CHECK: "true"})  # the gate forgets, so that it has to read
    assert client.append(topic, mine)[:2] == (OK, 0)
    assert log.end(topic) == 2


def test_equal_records_without_a_name_are_possibly_yours(
    kafka: KafkaCluster, client: Connection, log: Log, new_topic: NewTopic, tmp_path: Path
) -> None:
    topic = new_topic("required")
    mine = batch(b"a", expected=0)
    assert client.append(topic, mine).base_offset == 0
    config = '[topics."required-*"]\n"fencepost.check.expected.offsets" = "required"\n'
    with ProxyProcess(kafka.bootstrap, tmp_path, config=config) as other, Connection(other.bootstrap) as stranger:
        for connection in (client, stranger):
            answer = connection.append(topic, mine)
            assert answer.error_code == POLICY_VIOLATION
            reported = f"OFFSET_MISMATCH topic={topic} partition=0 expected=0 actual=1 POSSIBLY_YOURS"
            assert (answer.base_offset, answer.message) == (1, reported)
    assert log.end(topic) == 1


def test_an_idempotent_producer_mixes_conditional_and_other_batches(
    client: Connection, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic("checked")
    producer = client.init_producer_id()
    sent = []
    for i in range(12):
        expected = i if i % 3 == 1 else None
        records = batch(b"v%d" % i, expected=expected, producer=producer._replace(sequence=i))
        assert client.append(topic, records)[:2] == (OK, i)
        sent.append(records)
    refused = batch(b"bad", expected=5, producer=producer._replace(sequence=12))
    assert client.append(topic, refused).error_code == POLICY_VIOLATION
    # The client goes on as if nothing had happened: with the sequence of the refused one, or with the next.
    assert client.append(topic, batch(b"v12", producer=producer._replace(sequence=12)))[:2] == (OK, 12)
    assert client.append(topic, batch(b"v13", expected=13, producer=producer._replace(sequence=14)))[:2] == (OK, 13)
    with Connection(proxy.bootstrap) as other:
        for i in (9, 10, 11):
            assert other.append(topic, sent[i])[:2] == (OK, i)
    assert log.values(topic) == [b"v%d" % i for i in range(14)]


def test_unconditional_idempotent_batches_keep_what_kafka_promises_them(
    client: Connection, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic("checked")
    producer = client.init_producer_id()
    for i in range(3):
        assert client.append(topic, batch(b"v", producer=producer._replace(sequence=i))).base_offset == i
    with Connection(proxy.bootstrap) as other:
        assert other.append(topic, batch(b"v", producer=producer._replace(sequence=2)))[:2] == (OK, 2)
        gap = other.append(topic, batch(b"v", producer=producer._replace(sequence=7)))
    assert gap.error_code == 45
    assert {each.producer_id for each in log.batches(topic)} == {producer.id}
    assert log.end(topic) == 3


# --- writers that go around the proxy ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_bypassing_append_makes_success_a_violation(
    prefix: str, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """What Kafka cannot compare is at least found out: the one case where 44 means appended."""
    topic = new_topic(prefix, length=2)
    assert client.append(topic, batch(b"old", expected=2)).base_offset == 2  # the leader's epoch is known by now
    with log.connect(topic) as direct:
        assert direct.append(topic, batch(b"bypass")).base_offset == 3
        answer = client.append(topic, batch(b"mine", expected=3))
        message = f"OFFSET_VIOLATION topic={topic} partition=0 expected=3 appended_at=4"
        assert_refused(answer, POLICY_VIOLATION, message, base_offset=4)
        until(
            lambda: "OFFSET_VIOLATION" in proxy.log, "the log line: it names the other writer, who is looked up first"
        )
        for end in (5, 6):
            refused = client.append(topic, batch(b"x", expected=4))
            assert_refused(refused, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=end)
            assert client.append(topic, batch(b"next%d" % end, expected=end)).base_offset == end
        # Seen before the next append: then it is an ordinary mismatch.
        assert direct.append(topic, batch(b"bypass")).base_offset == 7
        assert client.append(topic, batch(b"x", expected=1)).base_offset == 8
        assert_refused(
            client.append(topic, batch(b"x", expected=7)), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=8
        )
        assert client.append(topic, batch(b"y", expected=8)).base_offset == 8
    values = [b"old"] * 3 + [b"bypass", b"mine", b"next5", b"next6", b"bypass", b"y"]
    assert log.values(topic) == values


# --- transactions -----------------------------------------------------------------------------------------------------


def test_topic_checked_by_pattern_logs_replication_warning(
    proxy: ProxyProcess, client: Connection, new_topic: NewTopic
) -> None:
    """One broker: it has one replica. As soon as the topic is used; the file may name what there is not yet."""
    topic = new_topic("checked")
    assert client.append(topic, batch(b"a", expected=0)).error_code == OK
    until(
        lambda: [line for line in proxy.log.splitlines() if topic in line and "has 1 replica(s)" in line],
        "a warning",
        seconds=60,
    )


def _begin(client: Connection, topic: str, name: str, producer: Producer, expected: int = OK) -> None:
    added = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic, partitions=[0])
    request = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=name,
        v3_and_below_producer_id=producer.id,
        v3_and_below_producer_epoch=producer.epoch,
        v3_and_below_topics=[added],
    )

    def begun() -> bool:
        code = client.query(request, 3).results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code
        assert code in (expected, 51), code  # CONCURRENT_TRANSACTIONS: the one before is being ended
        return bool(code == expected)

    until(begun, "the transaction to begin")


def _end(client: Connection, name: str, producer: Producer, *, commit: bool) -> None:
    request = EndTxnRequest(
        transactional_id=name, producer_id=producer.id, producer_epoch=producer.epoch, committed=commit
    )
    # CONCURRENT_TRANSACTIONS: it could not be judged in time.
    code = until(lambda: client.query(request, 3).error_code, "it to end", accept=lambda code: code != 51)
    assert code == OK


def test_a_transaction_on_a_required_topic_is_refused(
    client: Connection, log: Log, new_topic: NewTopic, unique_topic: Callable[..., str]
) -> None:
    topic, name = new_topic("required", length=1), unique_topic("txn")
    producer = until(lambda: client.init_producer_id(name), "a producer id")
    _begin(client, topic, name, producer, expected=POLICY_VIOLATION)
    records = batch(b"x", expected=1, producer=producer, transactional=True)
    answer = client.append(topic, records, transactional_id=name)
    assert_refused(answer, POLICY_VIOLATION, f"TRANSACTIONS_NOT_SUPPORTED topic={topic} partition=0")
    # What the client's abort would have left there, had the partition been added, is a marker.
    assert b"x" not in log.values(topic)
    assert client.append(topic, batch(b"y", expected=1)).error_code == OK


@pytest.mark.parametrize("commit", [True, False])
def test_a_transaction_on_a_checked_topic(  # noqa: PLR0917
    commit: bool,
    proxy: ProxyProcess,
    client: Connection,
    log: Log,
    new_topic: NewTopic,
    unique_topic: Callable[..., str],
) -> None:
    """Expectations work within it; others' have to wait for its marker, which takes an offset."""
    topic, name = new_topic("checked", length=1), unique_topic("txn")
    with Connection(proxy.bootstrap) as transactional:
        producer = until(lambda: transactional.init_producer_id(name), "a producer id")
        _begin(transactional, topic, name, producer)

        def append(records: bytes) -> Answer:
            return transactional.append(topic, records, transactional_id=name, version=11)

        first = batch(b"t0", expected=1, producer=producer, transactional=True)
        assert append(first)[:2] == (OK, 1)
        if not commit:  # its commit would be refused: see test_atomic_transactions.py
            wrong = batch(b"bad", expected=9, producer=producer._replace(sequence=1), transactional=True)
            assert_refused(append(wrong), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=2)
        second = batch(b"t1", producer=producer._replace(sequence=1), transactional=True)
        assert append(second)[:2] == (OK, 2)

        meanwhile = client.append(topic, batch(b"mine", expected=3), timeout_ms=1500)
        assert meanwhile.error_code == NOT_LEADER
        _end(transactional, name, producer, commit=commit)
    until(lambda: log.end(topic) == 4, "the marker")
    reported = until(
        lambda: client.append(topic, batch(b"mine", expected=3)),
        "the proxy to know of it",
        accept=lambda answer: answer is not None and answer.error_code != NOT_LEADER,
    )
    assert_refused(reported, POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=4)
    assert client.append(topic, batch(b"mine", expected=4)).base_offset == 4
    assert log.values(topic) == [b"old", b"t0", b"t1", b"mine"]


# --- the check comes and goes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("incremental", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_the_check_is_changed_while_clients_write(
    incremental: bool, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic("plain")

    def set_check(value: str) -> None:
        assert client.alter_topic(topic, {CHECK: value}, incremental=incremental) == (OK, None)
        assert client.describe_topic(topic)[CHECK] == value

    assert client.append(topic, batch(b"unguarded", expected=5)).base_offset == 0
    set_check("true")
    assert_refused(client.append(topic, batch(b"x", expected=5)), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=1)
    assert client.append(topic, batch(b"checked")).base_offset == 1
    assert client.append(topic, batch(b"checked", expected=2)).base_offset == 2
    set_check("required")
    assert_refused(client.append(topic, batch(b"x")), POLICY_VIOLATION, "EXPECTATION_REQUIRED")
    assert client.append(topic, batch(b"required", expected=3)).base_offset == 3
    set_check("false")
    assert client.append(topic, batch(b"unguarded", expected=5)).base_offset == 4
    set_check("required")
    assert_refused(client.append(topic, batch(b"x", expected=4)), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=5)
    assert client.append(topic, batch(b"required", expected=5)).base_offset == 5
    assert log.end(topic) == 6


@pytest.mark.parametrize("by", ["the proxy", "Kafka itself"])
def test_recreated_topic_starts_at_offset_zero(by: str, client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic("required", length=3)
    old_id = client.metadata(topic).topics[0].topic_id
    with log.connect(topic) as direct:
        if by == "Kafka itself" and direct.api_versions()[PRODUCE][1] < BY_TOPIC_ID:
            pytest.skip("this Kafka takes batches by topic name alone: such an append is reported as a violation")
        admin = client if by == "the proxy" else direct
        assert admin.delete_topic(topic) == OK
        until(lambda: direct.metadata(topic).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION, "the deletion")
        until(lambda: admin.create_topic(topic)[0] == OK, "the creation")
        until(lambda: direct.metadata(topic).topics[0].topic_id not in (old_id, None), "the new topic")
    assert log.end(topic) == 0

    def settled(records: bytes) -> Answer:
        """A retriable answer is allowed while the proxy finds out; a success or a refusal has to be right."""

        def answer() -> Answer | None:
            last = client.append(topic, records)
            return None if last.error_code in (UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER) else last

        answered: Answer = until(answer, "an answer that is not retriable")
        return answered

    assert_refused(settled(batch(b"x", expected=3)), POLICY_VIOLATION, "OFFSET_MISMATCH", base_offset=0)
    assert settled(batch(b"new", expected=0))[:2] == (OK, 0)
    assert settled(batch(b"newer", expected=1))[:2] == (OK, 1)
    assert log.values(topic) == [b"new", b"newer"]


# --- virtual configs --------------------------------------------------------------------------------------------------


def test_a_config_given_at_creation(client: Connection, log: Log, new_topic: NewTopic) -> None:
    topic = new_topic(
        "plain", check_expected_offsets="required", expected_offsets_source="base", retention_ms="7200000"
    )
    shown = client.describe_topic(topic)
    assert (shown[CHECK], shown[SOURCE], shown["retention.ms"]) == ("required", "base", "7200000")
    assert client.describe_topic(topic, keys=[CHECK]) == {CHECK: "required"}
    assert client.append(topic, batch(b"a", base_offset=0)).base_offset == 0
    assert client.append(topic, batch(b"b", base_offset=0)).error_code == POLICY_VIOLATION
    with log.connect(topic) as direct:
        assert CHECK not in direct.describe_topic(topic)


def test_topic_shows_default_and_file_configs(client: Connection, new_topic: NewTopic) -> None:
    assert client.describe_topic(new_topic("plain"), keys=[CHECK, SOURCE]) == {CHECK: "false", SOURCE: "header"}
    assert client.describe_topic(new_topic("required"), keys=[CHECK]) == {CHECK: "required"}
    assert client.describe_topic(new_topic("base"), keys=[SOURCE]) == {SOURCE: "base"}


@pytest.mark.parametrize(("name", "value"), [(CHECK, "maybe"), (CHECK, ""), (SOURCE, "pigeon")])
def test_invalid_config_value_is_refused_with_its_reason(
    name: str, value: str, client: Connection, new_topic: NewTopic, unique_topic: Callable[..., str]
) -> None:
    topic = new_topic("plain")
    allowed = "false, true or required" if name == CHECK else "header or base"
    for incremental in (True, False):
        code, message = client.alter_topic(topic, {name: value, "retention.ms": "7200000"}, incremental=incremental)
        assert code == INVALID_CONFIG
        assert message == f"Invalid value '{value}' for configuration {name}: it must be {allowed}"
    never = unique_topic("plain")
    assert client.create_topic(never, configs={name: value})[0] == INVALID_CONFIG
    assert client.metadata(never).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION
    assert client.describe_topic(topic)["retention.ms"] != "7200000"


@pytest.mark.parametrize("incremental", [True, False])
def test_validate_only_changes_nothing(incremental: bool, client: Connection, new_topic: NewTopic) -> None:
    topic = new_topic("plain")
    alter = client.alter_topic
    assert alter(topic, {CHECK: "required"}, incremental=incremental, validate_only=True) == (OK, None)
    assert alter(topic, {CHECK: "maybe"}, incremental=incremental, validate_only=True)[0] == INVALID_CONFIG
    assert client.describe_topic(topic)[CHECK] == "false"
    assert client.append(topic, batch(b"x")).error_code == OK


def test_a_config_is_taken_back(client: Connection, new_topic: NewTopic) -> None:
    """Deleted by the incremental API, left out in the older one, which replaces them all: the file's value again."""
    topic = new_topic("required")
    assert client.alter_topic(topic, {CHECK: "true"}) == (OK, None)
    assert client.describe_topic(topic)[CHECK] == "true"
    assert client.alter_topic(topic, {CHECK: None}) == (OK, None)
    assert client.describe_topic(topic)[CHECK] == "required"
    assert client.alter_topic(topic, {CHECK: "false"}) == (OK, None)
    assert client.alter_topic(topic, {"retention.ms": "7200000"}, incremental=False) == (OK, None)
    assert client.describe_topic(topic)[CHECK] == "required"


def test_kafka_config_errors_are_relayed_and_nothing_stored(client: Connection, new_topic: NewTopic) -> None:
    topic = new_topic("plain")
    code, _ = client.alter_topic(topic, {CHECK: "required", "retention.ms": "soon"})
    assert code == INVALID_CONFIG
    assert client.describe_topic(topic)[CHECK] == "false"
    assert client.alter_topic("no-such-topic", {CHECK: "required"})[0] == UNKNOWN_TOPIC_OR_PARTITION


def test_config_survives_restart_and_ends_with_its_topic(
    kafka: KafkaCluster, proxy: ProxyProcess, log: Log, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = unique_topic("plain")
    with ProxyProcess(kafka.bootstrap, tmp_path, config="config_lease_seconds = 1.0") as other:
        with Connection(other.bootstrap) as client:
            assert client.create_topic(topic, configs={CHECK: "required"}) == (OK, None)
        other.kill()
        other.restart()
        for address in (other.bootstrap, proxy.bootstrap):
            with Connection(address) as client:
                assert client.describe_topic(topic)[CHECK] == "required"
                assert client.append(topic, batch(b"x")).error_code == POLICY_VIOLATION
        with Connection(other.bootstrap) as client:
            assert client.delete_topic(topic) == OK
            until(lambda: client.metadata(topic).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION, "the deletion")
            until(lambda: client.create_topic(topic)[0] == OK, "the creation")
            assert log.end(topic) == 0
            assert client.describe_topic(topic)[CHECK] == "false"
            assert client.append(topic, batch(b"x")).error_code == OK


def test_recreated_topic_is_checked_by_every_instance(
    kafka: KafkaCluster, log: Log, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    """The other process has appended to the one before it, so it knows an id by that name."""
    topic, lease = unique_topic("plain"), "config_lease_seconds = 1.0"
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=lease) as one,
        ProxyProcess(kafka.bootstrap, tmp_path, config=lease) as other,
        Connection(one.bootstrap) as admin,
        Connection(other.bootstrap) as client,
    ):
        assert admin.create_topic(topic, configs={CHECK: "required"}) == (OK, None)
        assert client.append(topic, batch(b"x", expected=0)).error_code == OK
        assert admin.delete_topic(topic) == OK
        until(lambda: admin.metadata(topic).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION, "the deletion")
        until(lambda: admin.create_topic(topic, configs={CHECK: "required"})[0] == OK, "the creation")

        assert client.append(topic, batch(b"nowhere", expected=5)).error_code == POLICY_VIOLATION
        assert client.append(topic, batch(b"bare")).error_code == POLICY_VIOLATION
        assert client.append(topic, batch(b"y", expected=0)).base_offset == 0
        assert log.values(topic) == [b"y"]


# --- the state topic --------------------------------------------------------------------------------------------------


def test_the_state_topic_is_closed_to_clients(client: Connection, log: Log) -> None:
    assert STATE_TOPIC not in [topic.name for topic in client.metadata().topics]
    queried = client.metadata(STATE_TOPIC).topics[0]
    assert (queried.error_code, queried.partitions) == (TOPIC_AUTHORIZATION_FAILED, [])
    with log.connect(STATE_TOPIC) as direct:
        assert direct.metadata(STATE_TOPIC).topics[0].error_code == OK

    for version in (3, 9, 12):
        for acks in (1, -1):
            answer = client.append(STATE_TOPIC, batch(Record(FORGED, key=b"x")), version=version, acks=acks)
            assert answer.error_code == TOPIC_AUTHORIZATION_FAILED
    assert client.delete_topic(STATE_TOPIC) == TOPIC_AUTHORIZATION_FAILED
    for incremental in (True, False):
        code, _ = client.alter_topic(STATE_TOPIC, {"cleanup.policy": "delete"}, incremental=incremental)
        assert code == TOPIC_AUTHORIZATION_FAILED
    assert client.create_topic(STATE_TOPIC)[0] != OK

    fetch_topic = FetchRequest.FetchTopic
    partition = fetch_topic.FetchPartition(partition=0, fetch_offset=0, log_start_offset=-1, partition_max_bytes=1000)
    fetch = FetchRequest(
        replica_id=-1,
        max_wait_ms=1,
        min_bytes=0,
        max_bytes=1000,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[fetch_topic(topic=STATE_TOPIC, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id="",
    )
    fetched = client.query(fetch, 11).responses[0].partitions[0]
    assert (fetched.error_code, bytes(fetched.records or b"")) == (TOPIC_AUTHORIZATION_FAILED, b"")
    assert FORGED not in log.values(STATE_TOPIC)  # its end moves meanwhile: proxies say that they are there


@pytest.mark.parametrize("version", [9, 13])
def test_state_topic_append_in_mixed_request_is_refused(
    version: int, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    plain = new_topic("plain")
    with log.connect(STATE_TOPIC) as direct:
        ids = {topic.name: topic.topic_id for topic in direct.metadata(plain, STATE_TOPIC).topics}
    state = batch(Record(FORGED, key=b"x"))
    with Connection(proxy.bootstrap) as other:
        try:
            other.send_produce({STATE_TOPIC: {0: state}}, acks=0, version=version, topic_ids=ids)
            assert other.is_closed()
        except Closed:
            pass
    if version < 13:  # as long as newer versions are not served
        answers = client.produce({plain: {0: batch(b"x")}, STATE_TOPIC: {0: state}}, version=version)
        assert answers[STATE_TOPIC, 0].error_code == TOPIC_AUTHORIZATION_FAILED
        assert answers[plain, 0].error_code == OK
    assert FORGED not in log.values(STATE_TOPIC)  # its end moves meanwhile: proxies say that they are there


# --- what expects nothing, and has no producer id ---------------------------------------------------------------------


@pytest.mark.parametrize("gap", ["corrupt", "too large", "malformed"])
def test_unconditional_batches_are_answered_as_by_kafka(
    gap: str, kafka: KafkaCluster, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """30 batches, sent ahead of their answers; every tenth is one that Kafka refuses."""
    checked, direct = new_topic("checked", max_message_bytes="2000"), new_topic("plain", max_message_bytes="2000")
    good = batch(b"good")
    malformed = bytearray(good[:-1] + b"\x09")  # a header count, and no headers
    sign(malformed)
    bad = {"corrupt": good[:-1] + b"!", "too large": batch(b"x" * 3000), "malformed": bytes(malformed)}[gap]
    answers = []
    with Connection(kafka.bootstrap) as at_kafka:
        for connection, topic in ((client, checked), (at_kafka, direct)):
            batches = [bad if number % 10 == 3 else good for number in range(30)]
            connection.socket.sendall(b"".join(connection.frame(_request(topic, each), 9)[1] for each in batches))
            reported = [connection.receive_produce()[1][topic, 0] for _ in batches]
            answers.append([(each.error_code, each.base_offset) for each in reported])
    assert [code != OK for code, _ in answers[0]] == [number % 10 == 3 for number in range(30)]
    assert answers[0] == answers[1]
    assert log.end(checked) == 27
