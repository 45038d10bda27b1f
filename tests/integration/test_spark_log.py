"""The sink's access to Kafka's log, with real Kafka and a proxy: results of appends, and contents of the log."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from aiokafka.record.util import encode_varint
from kafka.protocol.admin import DeleteRecordsRequest, IncrementalAlterConfigsRequest

from fencepost.spark import log as module
from fencepost.spark.encoding import build
from fencepost.spark.errors import CannotReach, LogRefused, Unknown
from fencepost.spark.log import Answer, Log, OffsetsDeleted
from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support import raw
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import LZ4, ZSTD, Connection, Record, batch
from tests.support.sasl_ssl import ADMIN, Secured
from tests.support.transactions import Transactional

pytestmark = pytest.mark.kafka

OK, POLICY_VIOLATION = 0, 44
ANSWER_SECONDS = 60.0
MARK = b'{"sink":"s"}'
#: No log ends at this offset, so an append that expects it is refused.
_NOWHERE = 1 << 40
#: For a proxy that is killed and restarted.
SOON_BACK = """
config_lease_seconds = 1
[topics."checked-*"]
"fencepost.check.expected.offsets" = "true"
"""


@pytest.fixture(scope="module")
def log(proxy: ProxyProcess) -> Iterator[Log]:
    with Log({"bootstrap_servers": proxy.bootstrap}) as log:
        yield log


@pytest.fixture
def client(proxy: ProxyProcess) -> Iterator[Connection]:
    with Connection(proxy.bootstrap) as client:
        yield client


@pytest.fixture
def topic(client: Connection, log: Log, unique_topic: Callable[..., str]) -> str:
    return created(client, log, unique_topic("checked"))


def created(client: Connection, log: Log, name: str, *, partitions: int = 1, **configs: str) -> str:
    """A checked topic whose partitions accept appends."""
    assert client.create_topic(name, partitions=partitions, configs=configs) == (OK, None)
    until(
        lambda: log.offsets(name, range(partitions)) == dict.fromkeys(range(partitions), (0, 0)), "the topic's leaders"
    )

    def checked(partition: int) -> bool:
        with contextlib.suppress(Unknown):
            return answer(log.append(name, partition, chunk(_NOWHERE, "x"))).code == POLICY_VIOLATION
        return False

    for partition in range(partitions):
        until(lambda at=partition: checked(at), "the end of the topic's log to be known")  # type: ignore[misc]
    return name


def rows(*values: str) -> list[bytes]:
    return [b"\x01" + varint(len(value)) + value.encode() + b"\x00" for value in values]


def varint(value: int) -> bytes:
    out = bytearray()
    encode_varint(value, out.append)
    return bytes(out)


def chunk(expected: int, *values: str, commit_tag: bytes = MARK, compression: str | None = None) -> bytes:
    now_ms = int(time.time() * 1000)
    return build(rows(*values), commit_tag=commit_tag, expected=expected, now_ms=now_ms, compression=compression)


def answer(future: Future[Answer]) -> Answer:
    return future.result(ANSWER_SECONDS)


# --- appending --------------------------------------------------------------------------------------------------------


def test_batch_is_appended_and_read_with_commit_tag(log: Log, topic: str) -> None:
    first = answer(log.append(topic, 0, chunk(0, "a", "b")))
    second = answer(log.append(topic, 0, chunk(2, "c", commit_tag=b"second", compression="zstd")))

    assert (first.code, first.base_offset, second.code, second.base_offset) == (OK, 0, OK, 2)
    assert log.offsets(topic, [0]) == {0: (0, 3)}
    found = list(log.read(topic, 0, 0, 3))
    assert [(each.base_offset, each.next_offset, each.commit_tag, each.bodies) for each in found] == [
        (0, 2, MARK, rows("a", "b")),
        (2, 3, b"second", rows("c")),
    ]


def test_batch_refused_at_wrong_offset_is_then_appended(log: Log, topic: str) -> None:
    assert answer(log.append(topic, 0, chunk(0, "a", "b"))).code == OK

    refused = answer(log.append(topic, 0, chunk(1, "c")))
    moved = answer(log.append(topic, 0, chunk(refused.base_offset, "c")))

    assert (refused.code, refused.base_offset) == (POLICY_VIOLATION, 2)
    assert refused.message is not None
    assert refused.message.startswith(f"OFFSET_MISMATCH topic={topic} partition=0 expected=1 actual=2")
    assert (moved.code, moved.base_offset) == (OK, 2)


def test_batch_expecting_empty_log_is_refused_after_appends(log: Log, topic: str) -> None:
    assert answer(log.append(topic, 0, chunk(0, "a"))).code == OK

    refused = answer(log.append(topic, 0, chunk(0, "b")))

    assert (refused.code, refused.base_offset) == (POLICY_VIOLATION, 1)


def test_pipelined_appends_keep_submission_order(log: Log, topic: str) -> None:
    pipeline_key = [log.append(topic, 0, chunk(at, f"row {at}")) for at in range(30)]

    assert [answer(future).base_offset for future in pipeline_key] == list(range(30))
    assert [body for each in log.read(topic, 0, 0, 30) for body in each.bodies] == rows(
        *(f"row {at}" for at in range(30))
    )


def test_pipelined_appends_after_refused_one_are_refused(log: Log, topic: str) -> None:
    pipeline_key = [log.append(topic, 0, chunk(at, f"row {at}")) for at in (0, 1, 7, 8, 9)]

    assert [answer(future).code for future in pipeline_key] == [
        OK,
        OK,
        POLICY_VIOLATION,
        POLICY_VIOLATION,
        POLICY_VIOLATION,
    ]
    assert log.offsets(topic, [0]) == {0: (0, 2)}


def test_append_to_missing_topic_is_not_sent(
    proxy: ProxyProcess, unique_topic: Callable[..., str], client: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_UNKNOWN_TOPIC_SECONDS", 0.2)
    name = unique_topic("absent")
    with Log({"bootstrap_servers": proxy.bootstrap, "request_timeout_ms": 300}) as impatient:
        with pytest.raises(Unknown, match="not sent"):
            answer(impatient.append(name, 0, chunk(0, "a")))
        with pytest.raises(LogRefused, match=f"topic {name} does not exist"):
            impatient.partition_count(name)

    # Kafka creates requested topics, unless the request forbids it.
    assert name not in {each.name for each in client.metadata().topics}


# --- reading ----------------------------------------------------------------------------------------------------------


def test_foreign_batches_lie_between_ours(log: Log, topic: str, client: Connection) -> None:
    assert answer(log.append(topic, 0, chunk(0, "a"))).code == OK
    for codec in (0, LZ4, ZSTD):
        foreign = batch(Record(b"x" * 500, key=b"k"), Record(b"y" * 500), codec=codec)
        assert client.append(topic, foreign).error_code == OK
    assert answer(log.append(topic, 0, chunk(7, "b"))).code == OK

    found = list(log.read(topic, 0, 0, 8))

    assert [(each.base_offset, each.commit_tag) for each in found] == [
        (0, MARK),
        (1, None),
        (3, None),
        (5, None),
        (7, MARK),
    ]
    foreign_rows = [b"\x02k\xe8\x07" + b"x" * 500 + b"\x00", b"\x01\xe8\x07" + b"y" * 500 + b"\x00"]
    assert [each.bodies for each in found[1:4]] == [foreign_rows] * 3
    assert [last_batch.base_offset for end in (1, 3, 7, 8) if (last_batch := log.last_batch(topic, 0, end))] == [
        0,
        1,
        5,
        7,
    ]
    assert log.last_batch(topic, 0, 0) is None


def test_last_batches_of_many_partitions_take_few_requests(
    log: Log, client: Connection, unique_topic: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = created(client, log, unique_topic("checked"), partitions=5)
    long = "x" * 500_000
    for partition in range(4):
        answer(log.append(topic, partition, chunk(0, "a", commit_tag=b"older")))
        answer(log.append(topic, partition, chunk(1, long if partition else "b", "c", commit_tag=b"%d" % partition)))
    ends = {0: 3, 1: 3, 2: 3, 3: 3}
    fetches: list[int] = []
    unchanged = module.FetchRequest

    def fetch(*fields: Any) -> Any:
        fetches.append(len(fields[4][0][1]))
        return unchanged(*fields)

    monkeypatch.setattr(module, "FetchRequest", fetch)
    tags = {partition: logged and logged.commit_tag for partition, logged in log.last_batches(topic, ends).items()}
    assert tags == {partition: b"%d" % partition for partition in ends}
    assert fetches == [4]

    # As many requests as the limits need; a batch above them is returned alone.
    fetches.clear()
    monkeypatch.setattr(module, "_LAST_BATCH_BYTES", 100_000)
    again = {partition: logged and logged.commit_tag for partition, logged in log.last_batches(topic, ends).items()}
    assert again == tags
    assert fetches == [4, 3, 2, 1]
    assert log.last_batches(topic, {4: 0, 0: 1})[4] is None


def test_read_starts_within_a_batch_and_ends_exclusive(log: Log, topic: str) -> None:
    for at in range(0, 20, 5):
        assert answer(log.append(topic, 0, chunk(at, *"abcde"))).code == OK

    assert [each.base_offset for each in log.read(topic, 0, 7, 15)] == [5, 10]
    assert [each.base_offset for each in log.read(topic, 0, 10, 10)] == []


def test_markers_of_transactions_are_batches_without_rows(
    log: Log, topic: str, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    assert answer(log.append(topic, 0, chunk(0, "a"))).code == OK
    with Transactional(proxy.bootstrap, unique_topic("sink-foreign")) as foreign:
        for commit in (True, False):
            foreign.begin(topic)
            assert foreign.append(topic, b"in a transaction").error_code == OK
            assert foreign.end(commit=commit) == OK
    until(lambda: log.offsets(topic, [0])[0] == (0, 5), "both markers")

    found = list(log.read(topic, 0, 0, 5))

    assert [(each.base_offset, each.is_control, len(each.bodies)) for each in found] == [
        (0, False, 1),
        (1, False, 1),
        (2, True, 0),
        (3, False, 1),
        (4, True, 0),
    ]
    last_batch = log.last_batch(topic, 0, 5)
    assert last_batch is not None
    assert (last_batch.is_control, last_batch.commit_tag) == (True, None)


def test_reading_deleted_offsets_raises(log: Log, topic: str, kafka: KafkaCluster) -> None:
    for at in range(3):
        assert answer(log.append(topic, 0, chunk(at, "a"))).code == OK
    delete_below(kafka, topic, 2)

    assert log.offsets(topic, [0]) == {0: (2, 3)}
    assert [each.base_offset for each in log.read(topic, 0, 2, 3)] == [2]
    with pytest.raises(OffsetsDeleted, match="the log begins at 2") as gone:
        list(log.read(topic, 0, 1, 3))
    assert gone.value.log_start == 2

    delete_below(kafka, topic, 3)
    assert log.last_batch(topic, 0, 3) is None


def delete_below(kafka: KafkaCluster, topic: str, offset: int) -> None:
    queried = DeleteRecordsRequest.DeleteRecordsTopic
    partition = queried.DeleteRecordsPartition(partition_index=0, offset=offset)
    request = DeleteRecordsRequest(topics=[queried(name=topic, partitions=[partition])], timeout_ms=10_000)
    with Connection(kafka.bootstrap) as direct:
        assert direct.query(request, 2).topics[0].partitions[0].error_code == OK


@pytest.fixture
def busy_cleaner(kafka: KafkaCluster) -> Iterator[None]:
    """Reduce the log cleaner's pause between two passes, which is 15 seconds."""

    def rest(milliseconds: str | None) -> None:
        resource = IncrementalAlterConfigsRequest.AlterConfigsResource
        operation = int(milliseconds is None)  # 1: delete
        config = resource.AlterableConfig(name=_REST, config_operation=operation, value=milliseconds)
        brokers = resource(resource_type=4, resource_name="", configs=[config])
        with Connection(kafka.bootstrap) as direct:
            answer = direct.query(IncrementalAlterConfigsRequest(resources=[brokers], validate_only=False), 1)
            assert answer.responses[0].error_code == OK

    rest("100")
    yield
    rest(None)


_REST = "log.cleaner.backoff.ms"


@pytest.mark.usefixtures("busy_cleaner")
def test_what_was_compacted_leaves_gaps(log: Log, client: Connection, unique_topic: Callable[..., str]) -> None:
    # A compacted topic. Compaction leaves only one key's rows in the older segments.
    compaction = {"cleanup.policy": "compact", "segment.ms": "100", "min.cleanable.dirty.ratio": "0.01"}
    compaction |= {"max.compaction.lag.ms": "1", "delete.retention.ms": "0"}
    name = created(client, log, unique_topic("checked"), **compaction)
    ours = build(
        [b"\x02k\x02" + b"1\x00", b"\x02o\x02" + b"2\x00", b"\x02k\x02" + b"3\x00"],
        commit_tag=MARK,
        expected=0,
        now_ms=now(),
    )
    assert answer(log.append(name, 0, ours)).code == OK
    end = 3
    assert client.append(name, batch(Record(b"newer", key=b"k"))).error_code == OK

    def compacted() -> bool:
        nonlocal end
        assert client.append(name, batch(Record(b"newest", key=b"k"))).error_code == OK
        end = log.offsets(name, [0])[0][1]
        return [each.next_offset for each in log.read(name, 0, 0, end)][:1] == [3] and len(first().bodies) == 1

    def first() -> module.Logged:
        return next(log.read(name, 0, 0, end))

    until(compacted, "the cleaner", seconds=90, pause_seconds=0.2)

    # The other rows are read. The commit tag disappeared with its record.
    assert (first().base_offset, first().next_offset, first().commit_tag) == (0, 3, None)
    assert first().bodies == [b"\x02o\x02" + b"2\x00"]
    newest = log.last_batch(name, 0, end)
    assert newest is not None
    assert newest.next_offset == end


def now() -> int:
    return int(time.time() * 1000)


def test_long_log_is_read_in_pieces(log: Log, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    big = [f"{at} " + "x" * 40 for at in range(400)]
    for at in range(0, 400, 40):
        assert answer(log.append(topic, 0, chunk(at, *big[at : at + 40]))).code == OK
    sizes = []
    whole = module.batches
    monkeypatch.setattr(module, "batches", lambda fetched: [sizes.append(len(fetched)), whole(fetched)][1])
    monkeypatch.setattr("fencepost.spark.log._Client.fetch.__defaults__", (5000,))

    found = [body for each in log.read(topic, 0, 0, 400) for body in each.bodies]

    assert found == rows(*big)
    assert len(sizes) > 3
    assert max(sizes) <= 5000


def test_reading_waits_until_the_end_is_replicated(log: Log, topic: str) -> None:
    assert answer(log.append(topic, 0, chunk(0, "a"))).code == OK
    found: list[int] = []
    reader = threading.Thread(target=lambda: found.extend(each.base_offset for each in log.read(topic, 0, 0, 2)))
    reader.start()
    until(lambda: found == [0], "the batch that is there")

    assert answer(log.append(topic, 0, chunk(1, "b"))).code == OK
    reader.join(ANSWER_SECONDS)

    assert found == [0, 1]


def test_unreachable_end_offset_raises_after_patience(proxy: ProxyProcess, topic: str) -> None:
    with Log({"bootstrap_servers": proxy.bootstrap}, patience_seconds=0.5) as impatient:
        assert answer(impatient.append(topic, 0, chunk(0, "a"))).code == OK
        with pytest.raises(CannotReach, match="replicated up to offset 1 only"):
            list(impatient.read(topic, 0, 0, 2))


def test_configs_and_counts_are_those_of_now(log: Log, client: Connection, unique_topic: Callable[..., str]) -> None:
    name = created(client, log, unique_topic("checked"), partitions=2, **{"max.message.bytes": "4321"})

    config = log.config(name)
    assert log.partition_count(name) == 2
    client.query(raw.CreatePartitionsRequest(**_expanded(name, 3)), 1)

    assert (config["max.message.bytes"], config["fencepost.check.expected.offsets"]) == ("4321", "true")
    until(lambda: log.partition_count(name) == 3, "the third partition")
    assert answer(log.append(name, 2, chunk(0, "a"))).code == OK
    assert log.offsets(name, [0, 2]) == {0: (0, 0), 2: (0, 1)}


def _expanded(name: str, count: int) -> dict[str, object]:
    topics = [raw.CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=None)]
    return {"topics": topics, "timeout_ms": 10_000, "validate_only": False}


# --- failures ---------------------------------------------------------------------------------------------------------


def test_append_is_unknown_when_its_proxy_dies(
    kafka: KafkaCluster, tmp_path: Path, unique_topic: Callable[..., str]
) -> None:
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=SOON_BACK) as mortal,
        Log({"bootstrap_servers": mortal.bootstrap}) as log,
    ):
        with Connection(mortal.bootstrap) as client:
            name = created(client, log, unique_topic("checked"))
        until(lambda: answer(log.append(name, 0, chunk(0, "a"))).code == OK, "the log end to be known")
        # Two appends wait for their response while the proxy is killed.
        mortal.pause()
        waiting = [log.append(name, 0, chunk(1, "b")), log.append(name, 0, chunk(2, "c"))]
        with pytest.raises(TimeoutError):
            waiting[0].result(0.2)

        mortal.kill()

        # The outcome of both is unknown.
        for future in waiting:
            with pytest.raises(Unknown, match="no response from broker"):
                answer(future)
        # The next query is retried until the proxy is back.
        queried: Future[dict[int, tuple[int, int]]] = Future()
        querying = threading.Thread(target=lambda: queried.set_result(log.offsets(name, [0])))
        querying.start()
        mortal.restart()
        assert queried.result(ANSWER_SECONDS) == {0: (0, 1)}
        querying.join()
        until(lambda: answer(log.append(name, 0, chunk(1, "d"))).code == OK, "the log end to be known again")
        assert [body for each in log.read(name, 0, 0, 2) for body in each.bodies] == rows("a", "d")


def test_missing_proxy_raises_after_patience() -> None:
    port = free_port()
    log = Log({"bootstrap_servers": f"127.0.0.1:{port}"}, patience_seconds=0.5)
    with log, pytest.raises(CannotReach, match=f"127.0.0.1:{port}.*tried for 0.5 s"):
        log.partition_count("any")


def test_read_in_flight_at_close_is_unknown(kafka: KafkaCluster, topic: str) -> None:
    log = Log({"bootstrap_servers": kafka.bootstrap})
    assert log.partition_count(topic) == 1

    def read() -> None:
        with pytest.raises(Unknown):
            list(log.read(topic, 0, 0, 1))

    stuck = threading.Thread(target=read)
    stuck.start()

    log.close()
    log.close()

    stuck.join(ANSWER_SECONDS)
    assert not stuck.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        log.partition_count(topic)


# --- TLS and logins ---------------------------------------------------------------------------------------------------


@pytest.fixture
def login(secured: Secured) -> dict[str, Any]:
    """Client settings for Kafka's listener with TLS and logins."""
    return {"bootstrap_servers": secured.kafka.bootstrap_of("SECURED"), **secured.kafka_python(ADMIN)}


def test_log_works_with_tls_and_a_password(
    secured: Secured, login: dict[str, Any], unique_topic: Callable[..., str]
) -> None:
    name = unique_topic("secured")
    trusted = {key: value for key, value in login.items() if key != "ssl_cafile"}
    with Log(login) as log, Log(trusted | {"ssl_cadata": secured.authority.file.read_text()}) as by_text:
        with Connection(secured.kafka.bootstrap) as admin:
            assert admin.create_topic(name) == (OK, None)
        until(lambda: log.partition_count(name) == 1, "the topic")

        assert answer(log.append(name, 0, build(rows("a"), commit_tag=MARK, expected=0, now_ms=now()))).code == OK

        assert [each.commit_tag for each in by_text.read(name, 0, 0, 1)] == [MARK]


def test_a_wrong_password_is_final_and_says_so(login: dict[str, Any]) -> None:
    with (
        Log(login | {"sasl_plain_password": "wrong"}) as log,
        pytest.raises(LogRefused, match=r"SASL authentication with .+ failed: SaslAuthenticationFailed") as refused,
    ):
        log.partition_count("any")
    assert "wrong" not in str(refused.value)


def test_untrusted_broker_is_refused(login: dict[str, Any]) -> None:
    unknown = {key: value for key, value in login.items() if key != "ssl_cafile"}
    with Log(unknown) as log, pytest.raises(LogRefused, match=r"is not trusted: .*kafka\.ssl\.truststore\.location"):
        log.partition_count("any")


_FORKING = """
import os, sys
from fencepost.spark.log import Log
options = {"bootstrap_servers": sys.argv[1]}
log = Log.shared(options)
assert log is Log.shared(options)
assert log.partition_count(sys.argv[2]) == 1
for _ in range(2):
    child = os.fork()
    if not child:
        own = Log.shared(options)
        assert own is not log
        try:
            log.partition_count(sys.argv[2])
        except RuntimeError as error:
            assert "forked" in str(error)
        else:
            raise AssertionError
        assert own.partition_count(sys.argv[2]) == 1
        # As Spark's daemon has its workers end, and as others do.
        (os._exit if _ else sys.exit)(0)
    assert os.waitpid(child, 0)[1] == 0
    assert log.partition_count(sys.argv[2]) == 1
"""


def test_forked_process_gets_a_separate_log_without_warnings(kafka: KafkaCluster, topic: str) -> None:
    command = [sys.executable, "-W", "error", "-c", _FORKING, kafka.bootstrap, topic]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_SECONDS * 2, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
