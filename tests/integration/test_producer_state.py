"""Kafka loses producer state that fences need: expiry, deleted records, compaction, a recreated topic, a restart.

The brokers expire producers after ten seconds, clean their logs several times a second, and are killed. A `Story` is
one checked partition and its writer's responses. After each loss, `assert_right` appends through two proxies and
compares the responses with Kafka's log.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from kafka.protocol.admin import DeleteRecordsRequest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from fencepost_proxy.wire.batch import parse_batch_header
from tests.kit.waiting import until
from tests.support.batches import now_ms
from tests.support.fixtures import kafka_fixture, proxies_fixture
from tests.support.kafka import unique_topic
from tests.support.messages import Fields, RawConnection
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Answer, Closed, Connection, Log, Record, batch, read_batches

pytestmark = pytest.mark.kafka

OK, UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER, TIMED_OUT, MESSAGE_TOO_LARGE = 0, 3, 6, 7, 10
INVALID_TIMESTAMP, POLICY_VIOLATION = 32, 44
COME_AGAIN = frozenset({UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER, TIMED_OUT})
LIST_OFFSETS, DESCRIBE_PRODUCERS = 2, 61
EARLIEST = -2
DAY_MS = 86_400_000
WRAP = 1 << 31
EXPIRATION_MS = 10_000
MESSAGE_BYTES_MAX = 20_000
PATIENCE_SECONDS = 60.0
#: Proxies of other tests start and stop here. A short takeover keeps their queued appends from delaying this test.
CONFIG = f"{CHECKED_BY_NAME}\n[limits]\ntakeover_seconds = 0.5\n"
SETTINGS = {
    "producer.id.expiration.ms": str(EXPIRATION_MS),
    "producer.id.expiration.check.interval.ms": "200",
    "log.initial.task.delay.ms": "100",
    "log.retention.check.interval.ms": "200",
    "log.cleaner.backoff.ms": "100",
    "log.segment.delete.delay.ms": "100",
}
LOG_APPEND_TIME, CREATE_TIME = ({"message.timestamp.type": kind} for kind in ("LogAppendTime", "CreateTime"))
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.ms": "50",
    "min.cleanable.dirty.ratio": "0.001",
    "max.compaction.lag.ms": "50",
    "delete.retention.ms": "50",
}


#: Brokers that expire producers soon. A test that kills a broker restarts it.
cluster = kafka_fixture(1, properties=SETTINGS)


#: Two, so that one of them has not handled the earlier appends.
proxies = proxies_fixture(of="cluster", config=CONFIG, unexpected=("Traceback", "crashed"))


# --- one checked partition and its writer's responses -----------------------------------------------------------------


def final_answer(address: str, topic: str, records: bytes, **settings: object) -> Answer:
    """The first response that is not retriable."""

    def answer() -> Answer | None:
        with Connection(address, timeout_seconds=30) as connection:
            last = connection.append(topic, records, **settings)
        return None if last.error_code in COME_AGAIN else last

    found: Answer = until(answer, f"an answer from {topic} that is not retriable", seconds=PATIENCE_SECONDS)
    return found


@dataclass
class Story:
    """`end`: the log end offset according to the responses. `accepted`: by first offset, the batch and its values.
    `key`: the key of all records, so that compaction keeps only the last. Without it, each record has a different
    key."""

    topic: str
    log: Log
    addresses: list[str]
    end: int = 0
    accepted: dict[int, tuple[bytes, tuple[bytes, ...]]] = field(default_factory=dict)
    key: bytes | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def required(self) -> bool:
        return self.topic.startswith("required")

    def make(self, size: int = 1, *, expected: int | None = None, timestamp_ms: int | None = None) -> bytes:
        """A batch with a write id and unique values and keys."""
        number = next(self.numbers)
        values = [b"%d.%d" % (number, i) for i in range(size)]
        records = [Record(value, key=self.key or value, timestamp_ms=timestamp_ms) for value in values]
        name = uuid.uuid4().bytes
        return batch(*records, expected=self.end if expected is None else expected, write_id=name)

    def took(self, records: bytes, answer: Answer, size: int = 1) -> None:
        assert (answer.error_code, answer.base_offset) == (OK, self.end), (self.topic, answer)
        self.accepted[self.end] = records, tuple(_values(records))
        self.end += size

    def append(self, size: int = 1, *, through: int = 0, timestamp_ms: int | None = None) -> None:
        records = self.make(size, timestamp_ms=timestamp_ms)
        self.took(records, final_answer(self.addresses[through], self.topic, records), size)

    def refuse(self, records: bytes, *, through: int = 0) -> None:
        answer = final_answer(self.addresses[through], self.topic, records)
        assert (answer.error_code, answer.base_offset) == (POLICY_VIOLATION, self.end), (self.topic, answer)
        assert (answer.message or "").startswith("OFFSET_MISMATCH"), answer

    def retry(self, offset: int, *, through: int = 0, gone: bool = False) -> None:
        """Check that a retry is a known duplicate. If its records are `gone`, or too old for a write id to prove that
        they are not a copy, it may be refused as possibly the client's."""
        records = self.accepted[offset][0]
        old = now_ms() - parse_batch_header(records).max_timestamp_ms >= EXPIRATION_MS / 2
        answer = final_answer(self.addresses[through], self.topic, records)
        if (gone or old) and answer.error_code != OK:
            assert answer.error_code == POLICY_VIOLATION, answer
            assert "POSSIBLY_YOURS" in (answer.message or ""), answer
        else:
            assert (answer.error_code, answer.base_offset) == (OK, offset), (self.topic, answer)

    def check(self) -> None:
        """The log has only the accepted values, at their offsets. Its start may have moved."""
        there = {}
        for each in self.log.batches(self.topic, start=log_start(self.log, self.topic)):
            if not each.is_control:
                # Compaction removes records from batches and leaves empty batches.
                there.update(dict.fromkeys(each.values, each.base_offset))
        reported = {value: offset for offset, (_, values) in self.accepted.items() for value in values}
        assert there.items() <= reported.items()
        assert self.log.end(self.topic) == self.end


def _values(records: bytes) -> list[bytes]:
    return [value for each in read_batches(records) for value in each.values if value is not None]


def assert_right(story: Story, *, gone: bool = False) -> None:
    """Check appends after a loss of state. `gone`: the records accepted so far can no longer be read."""
    here, there = range(2)
    before = sorted(story.accepted)
    # Kafka refuses the first of several pipelined appends. Without producer state, the second could take its offset.
    with Connection(story.addresses[here], timeout_seconds=30) as connection:
        too_large = batch(b"x" * 2 * MESSAGE_BYTES_MAX, expected=story.end)
        pipeline_key = [too_large, story.make(expected=story.end + 1), story.make(expected=story.end + 2)]
        for records in pipeline_key:
            connection.send_produce({story.topic: {0: records}})
        codes = [connection.receive_produce()[1][story.topic, 0].error_code for _ in pipeline_key]
        assert OK not in codes, (story.topic, codes)
    # Appends with a wrong expected offset are refused.
    for through in (here, there):
        for wrong in (story.end - 1, story.end + 1, story.end + WRAP, story.end - WRAP):
            if wrong >= 0:
                story.refuse(story.make(expected=wrong), through=through)
    # One of two concurrent appends is accepted.
    if story.required:
        both = [story.make(), story.make()]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda at: final_answer(story.addresses[at], story.topic, both[at]), (here, there)))
        winner = [answer.error_code for answer in answers].index(OK)
        story.took(both[winner], answers[winner])
        assert answers[1 - winner].error_code == POLICY_VIOLATION
        assert "VIOLATION " not in (answers[1 - winner].message or "")
    # Pipelined appends and batches of several records succeed.
    story.append(3, through=here)
    with Connection(story.addresses[here], timeout_seconds=30) as connection:
        pipeline_key = [story.make(expected=story.end + i) for i in range(4)]
        for records in pipeline_key:
            connection.send_produce({story.topic: {0: records}})
        answers = [connection.receive_produce()[1][story.topic, 0] for _ in pipeline_key]
    for records, answer in zip(pipeline_key, answers, strict=True):
        # Batches with write ids may be retried.
        again = answer.error_code in COME_AGAIN
        story.took(records, final_answer(story.addresses[here], story.topic, records) if again else answer)
    story.append(through=here)
    story.check()
    # Both proxies recognize retries, although only one of them handled the original.
    for through in (here, there):
        for offset in (before[:1] + before[-1:]) if before else []:
            story.retry(offset, through=through, gone=gone)
    story.check()


Report = Callable[..., Story]


@pytest.fixture
def report(cluster: KafkaCluster, proxies: list[ProxyProcess]) -> Report:
    """`report("required", length=3)` creates a story."""
    return partial(begin, cluster, proxies)


def begin(
    cluster: KafkaCluster,
    proxies: list[ProxyProcess],
    prefix: str,
    *,
    length: int = 0,
    key: bytes | None = None,
    configs: dict[str, str] | None = None,
) -> Story:
    log, topic = Log(cluster.bootstrap), unique_topic(prefix)
    create(proxies[0].bootstrap, log, topic, configs)
    story = Story(topic, log, [proxy.bootstrap for proxy in proxies], key=key)
    for _ in range(length):
        story.append()
    return story


def create(address: str, log: Log, topic: str, configs: dict[str, str] | None = None) -> None:
    with Connection(address) as connection:
        limits = {"max.message.bytes": str(MESSAGE_BYTES_MAX)}
        assert connection.create_topic(topic, configs=limits | (configs or {})) == (OK, None)
    assert log.end(topic) == 0


def queried_from_leader(log: Log, topic: str, api_key: int, version: int, body: Fields) -> Fields:
    """The partition in the response of a broker that leads it, which takes a moment after a restart."""

    def answered() -> Fields | None:
        with RawConnection(Address.parse(log.leader(topic))) as connection:
            answer: Fields = connection.query(api_key, version, body)["Topics"][0]["Partitions"][0]
        return None if answer["ErrorCode"] in (UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER) else answer

    found: Fields = until(answered, f"the leader of {topic}", seconds=PATIENCE_SECONDS)
    assert found["ErrorCode"] == OK, found
    return found


def producers(log: Log, topic: str) -> dict[int, tuple[int, int]]:
    """Producer state in the leader: producer id → (epoch, last sequence)."""
    topics = [{"Name": topic, "PartitionIndexes": [0]}]
    answer = queried_from_leader(log, topic, DESCRIBE_PRODUCERS, 0, {"Topics": topics})
    return {each["ProducerId"]: (each["ProducerEpoch"], each["LastSequence"]) for each in answer["ActiveProducers"]}


def log_start(log: Log, topic: str) -> int:
    topics = [{"Name": topic, "Partitions": [{"PartitionIndex": 0, "Timestamp": EARLIEST}]}]
    return int(queried_from_leader(log, topic, LIST_OFFSETS, 5, {"ReplicaId": -1, "Topics": topics})["Offset"])


def delete_records(log: Log, topic: str) -> None:
    queried = DeleteRecordsRequest.DeleteRecordsTopic
    partition = queried.DeleteRecordsPartition(partition_index=0, offset=-1)
    with log.connect(topic) as connection:
        request = DeleteRecordsRequest(topics=[queried(name=topic, partitions=[partition])], timeout_ms=10_000)
        assert connection.query(request, 2).topics[0].partitions[0].error_code == OK


@contextmanager
def while_it_is_written_to(story: Story) -> Iterator[None]:
    """Append conditionally until the block ends. Every append must be accepted."""
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            story.append()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            before = story.end
            until(lambda: story.end > before or writing.done(), "the writer to get on", seconds=PATIENCE_SECONDS)
            yield
            before = story.end
            until(lambda: story.end > before or writing.done(), "the writer to get on", seconds=PATIENCE_SECONDS)
        finally:
            done.set()
        writing.result()


# --- state lost while the broker runs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expired(cluster: KafkaCluster, proxies: list[ProxyProcess]) -> dict[str, Story]:
    """Partitions without producer state, after one shared wait."""
    stories = {}
    for prefix, what in itertools.product(("required", "checked"), ("records kept", "records deleted")):
        story = stories[f"{prefix}, {what}"] = begin(cluster, proxies, prefix, length=5)
        assert producers(story.log, story.topic)
    for name, story in stories.items():
        if name.endswith("deleted"):
            delete_records(story.log, story.topic)
    for story in stories.values():
        until(lambda story=story: not producers(story.log, story.topic), "Kafka to forget", seconds=90)
    return stories


@pytest.mark.parametrize("what", ["records kept", "records deleted"])
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_producer_state_that_expired(prefix: str, what: str, expired: dict[str, Story]) -> None:
    """The partition accepts any first sequence, like a new one, but its log end offset is not 0."""
    assert_right(expired[f"{prefix}, {what}"], gone=what == "records deleted")


@pytest.mark.parametrize("how", ["DeleteRecords", "retention"])
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_records_that_are_deleted(prefix: str, how: str, report: Report) -> None:
    """All records are deleted during appends. The log end offset does not change."""
    story = report(prefix, length=3)
    with while_it_is_written_to(story), story.log.connect(story.topic) as direct:
        if how == "retention":
            assert direct.alter_topic(story.topic, {"retention.ms": "1", "segment.ms": "50"}) == (OK, None)

        def deleted(before: int) -> bool:
            if how == "DeleteRecords":
                delete_records(story.log, story.topic)
            return log_start(story.log, story.topic) > before

        for _ in range(3):
            before = log_start(story.log, story.topic)
            until(partial(deleted, before), "records to be deleted", seconds=PATIENCE_SECONDS)
        if how == "retention":
            assert direct.alter_topic(story.topic, {"retention.ms": None, "segment.ms": None}) == (OK, None)
    delete_records(story.log, story.topic)
    assert log_start(story.log, story.topic) == story.end
    assert_right(story, gone=True)


@pytest.mark.parametrize("timestamp", ["two days old", "none"])
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_records_whose_timestamps_make_kafka_forget(prefix: str, timestamp: str, report: Report) -> None:
    """Kafka expires a producer by the timestamp of its newest record. Therefore the proxy must not fence such a
    batch."""
    story = report(prefix, length=3)
    timestamp_ms = -1 if timestamp == "none" else now_ms() - 2 * DAY_MS
    for _ in range(3):
        if story.required:
            answer = final_answer(story.addresses[0], story.topic, story.make(2, timestamp_ms=timestamp_ms))
            assert answer.error_code == INVALID_TIMESTAMP, answer
        else:
            story.append(2, timestamp_ms=timestamp_ms)
            # Unfenced batches with a wrong expected offset are refused too.
            story.refuse(story.make(expected=story.end - 2, timestamp_ms=timestamp_ms))
            story.refuse(story.make(expected=story.end + 1, timestamp_ms=timestamp_ms))
        story.append()
    shared = {each.producer_id for each in story.log.batches(story.topic) if each.producer_id >= 0}
    assert shared <= producers(story.log, story.topic).keys(), "the shared producer id has expired"
    assert_right(story)


def is_compacted(story: Story) -> bool:
    """Whether the first records are compacted away, although the log start offset is still 0."""
    assert log_start(story.log, story.topic) == 0
    first = story.log.batches(story.topic)[0]
    return first.base_offset > 0 or not first.values


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_a_log_that_is_compacted(prefix: str, report: Report) -> None:
    """Batches disappear or become empty during appends. The log end offset does not change."""
    story = report(prefix, key=b"the same", configs=COMPACTED)
    with while_it_is_written_to(story):
        until(lambda: story.end > 0 and is_compacted(story), "compaction", seconds=PATIENCE_SECONDS)
    assert_right(story, gone=True)


# --- timestamps of the broker -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_log_append_time(prefix: str, report: Report) -> None:
    story = report(prefix, length=3, configs=LOG_APPEND_TIME)
    assert_right(story)
    story.append(2, timestamp_ms=now_ms() - 2 * DAY_MS)
    assert_right(story)


@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_log_append_time_comes_and_goes(prefix: str, report: Report) -> None:
    """The config changes directly at Kafka during appends. The proxy may mistake successes for duplicates and the
    reverse."""
    story = report(prefix, length=1)
    with while_it_is_written_to(story), story.log.connect(story.topic) as direct:
        for kind in (LOG_APPEND_TIME, CREATE_TIME, LOG_APPEND_TIME):
            assert direct.alter_topic(story.topic, kind) == (OK, None)
            before = story.end
            until(lambda before=before: story.end > before + 5, "the writer to get on", seconds=PATIENCE_SECONDS)
    assert_right(story)


def test_unnamed_log_append_time_batch_is_possibly_yours(report: Report) -> None:
    """The proxy does not know of the config yet and cannot identify the batch. It returns a success or a marked
    refusal."""
    story = report("required", length=1)
    with story.log.connect(story.topic) as direct, Connection(story.addresses[0]) as client:
        assert direct.alter_topic(story.topic, LOG_APPEND_TIME) == (OK, None)
        for number in range(20):
            answer = client.append(story.topic, batch(b"unnamed %d" % number, expected=story.end))
            if answer.error_code == NOT_LEADER:
                continue  # nothing was appended
            there = story.log.values(story.topic)
            if answer.error_code == OK:
                assert answer.base_offset == story.end
                assert there[answer.base_offset] == b"unnamed %d" % number
            else:
                assert answer.error_code == POLICY_VIOLATION, answer
                assert ("POSSIBLY_YOURS" in (answer.message or "")) == (there[-1] == b"unnamed %d" % number), answer
            story.end = len(there)


# --- another topic of the same name -----------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["the proxy", "Kafka itself"])
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_a_topic_is_created_again_under_its_writer(prefix: str, by: str, report: Report) -> None:
    """Appends accepted after the creation are in the new topic at their offsets. Refused appends are not."""
    story = report(prefix, length=2)
    topic, log = story.topic, story.log
    reported: dict[bytes, tuple[float, Answer]] = {}
    done = threading.Event()

    def write() -> None:
        end, numbers = 0, itertools.count()
        while not done.is_set():
            value, began = b"w%d" % next(numbers), time.monotonic()
            try:
                with Connection(story.addresses[0], timeout_seconds=30) as connection:
                    answer = connection.append(topic, batch(value, expected=end))
            except (OSError, Closed):
                continue
            reported[value] = began, answer
            if answer.base_offset >= 0:
                end = answer.base_offset + (answer.error_code == OK)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            with Connection(story.addresses[0] if by == "the proxy" else log.leader(topic)) as admin:
                for _ in range(2):
                    until(lambda: log.end(topic) > 10, "the writer to get on", seconds=PATIENCE_SECONDS)
                    old_id = topic_id(log, topic)
                    assert admin.delete_topic(topic) == OK
                    until(lambda: admin.create_topic(topic)[0] == OK, "the new topic", seconds=PATIENCE_SECONDS)
                    until(
                        lambda old_id=old_id: topic_id(log, topic) not in (None, old_id),
                        "its id",
                        seconds=PATIENCE_SECONDS,
                    )
                    created = time.monotonic()
                    until(lambda: log.end(topic) > 0, "the writer to get on", seconds=PATIENCE_SECONDS)
            until(lambda: log.end(topic) > 10, "the writer to get on", seconds=PATIENCE_SECONDS)
        finally:
            done.set()
        writing.result()

    there = {value: offset for offset, value in enumerate(log.values(topic))}
    for value, (began, answer) in reported.items():
        if answer.error_code == OK and (began > created or value in there):
            assert there.get(value) == answer.base_offset, (value, answer)
        elif answer.error_code not in (OK, TIMED_OUT):
            assert value not in there, (value, answer)
    assert there.keys() <= reported.keys()

    # No append meant for the old topic was appended to the new one.
    assert not [each for _, each in reported.values() if "OFFSET_VIOLATION" in (each.message or "")]


def topic_id(log: Log, topic: str) -> uuid.UUID | None:
    with log.connect(topic) as connection:
        found = connection.metadata(topic).topics[0]
        return None if found.error_code else uuid.UUID(str(found.topic_id))


# --- the broker is killed ---------------------------------------------------------------------------------------------

#: Log start offsets that a real partition would reach only after years.
BEGINS = {
    "a pipeline across the wrap": WRAP - 6,
    "a batch across the wrap": WRAP - 2,
    "a batch across the second wrap": 2 * WRAP - 3,
}
HISTORIES = ("plain", "records deleted", "compacted", "LogAppendTime", "old timestamps", *BEGINS)


@pytest.fixture(scope="module")
def restarted(cluster: KafkaCluster, proxies: list[ProxyProcess]) -> dict[str, Story]:
    """Stories of every kind, after a kill of the broker. It rebuilds its producer state from the logs."""
    stories = {
        f"{prefix}, {history}": _before_the_restart(prefix, history, partial(begin, cluster, proxies))
        for prefix in ("required", "checked")
        for history in HISTORIES
    }
    cluster.kill(1)
    for name, story in stories.items():
        history = name.partition(", ")[2]
        if history in BEGINS:
            story.end = BEGINS[history]
            begin_at(cluster.data / "node-1" / "data" / f"{story.topic}-0", story.end)
    cluster.restart(1)
    for story in stories.values():
        assert story.log.end(story.topic) == story.end
    return stories


def _before_the_restart(prefix: str, history: str, report: Report) -> Story:
    configs = {"compacted": COMPACTED, "LogAppendTime": LOG_APPEND_TIME}.get(history)
    story: Story = report(prefix, configs=configs, key=b"the same" if history == "compacted" else None)
    if history in BEGINS:
        return story  # `begin_at` needs an empty log
    for _ in range(4):
        story.append(2)
        if history == "old timestamps" and not story.required:
            story.append(timestamp_ms=now_ms() - 2 * DAY_MS)
    if history == "records deleted":
        delete_records(story.log, story.topic)
    elif history == "compacted":
        with while_it_is_written_to(story):
            until(lambda: is_compacted(story), "compaction", seconds=PATIENCE_SECONDS)
    return story


def begin_at(directory: Path, offset: int) -> None:
    """Make an empty log of a stopped broker begin at `offset`, by the name of its only segment."""
    (segment,) = directory.glob("*.log")
    assert segment.stat().st_size == 0
    for leftover in (*directory.glob("*.index"), *directory.glob("*.timeindex"), *directory.glob("*.snapshot")):
        leftover.unlink()
    segment.rename(directory / f"{offset:020}.log")


@pytest.mark.parametrize("history", [each for each in HISTORIES if each not in BEGINS])
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_a_broker_that_was_killed_and_came_back(prefix: str, history: str, restarted: dict[str, Story]) -> None:
    assert_right(restarted[f"{prefix}, {history}"], gone=history in ("records deleted", "compacted"))


@pytest.mark.parametrize("begins", BEGINS)
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_sequences_wrap_where_offsets_do_not(prefix: str, begins: str, restarted: dict[str, Story]) -> None:
    """A sequence has 31 bits, an offset 63."""
    story = restarted[f"{prefix}, {begins}"]
    wrap = BEGINS[begins] // WRAP * WRAP + WRAP
    assert story.end < wrap
    if "batch" in begins:
        story.append(5)
        (across,) = [each for each in story.log.batches(story.topic, start=story.end - 5) if each.values]
        assert across.base_sequence == across.base_offset % WRAP > WRAP - 5
    assert_right(story)
    assert story.end > wrap
    assert_right(story)


def test_producers_continue_after_a_clean_restart(cluster: KafkaCluster, restarted: dict[str, Story]) -> None:
    """The broker has stored producer state with wrapped sequences, sequence offsets and deleted batches."""
    gone = [story for name, story in restarted.items() if name.endswith("records deleted")]
    for story in gone:
        delete_records(story.log, story.topic)
    cluster.restart(1)
    for story in gone:
        assert log_start(story.log, story.topic) == story.end, "the broker did not keep the log start offset"
    for story in restarted.values():
        for _ in range(2):
            story.refuse(story.make(expected=story.end - 1))
            story.refuse(story.make(expected=story.end + 1), through=1)
            story.append(2)
        story.append(through=1)
        story.check()
    for story in gone:
        story.retry(0, through=0, gone=True)
        story.retry(0, through=1, gone=True)
