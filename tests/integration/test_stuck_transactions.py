"""Open and hanging transactions on real Kafka: how the proxy shows them, and how an operator ends them.

A transaction hangs when a late batch of a producer without transactions v2 is appended after its coordinator has ended
the transaction. Since Kafka 3.6, leaders check such a batch with the coordinator, unless this is switched off. Cases
that take minutes are in the long form (marker soak).
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from kafka import KafkaConsumer, TopicPartition
from kafka.protocol.metadata import FindCoordinatorRequest

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import DEFAULT_VERSION
from fencepost_dev.tools import run_tool
from tests.kit.waiting import until
from tests.support.fixtures import kafka_fixture
from tests.support.instances import Process
from tests.support.kafka import kafka_version, running_kafka, unique_topic
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Answer, Connection, Log, Producer, batch
from tests.support.transactions import Transactional, open_transactions, transaction_state

pytestmark = [pytest.mark.kafka, pytest.mark.brokers, pytest.mark.timeout(600)]

_PATIENCE_SECONDS = 120.0
NOT_LEADER, OFFSET_MISMATCH = 6, 44


#: Of proxies with a status page.
STATUS = ("--status", "127.0.0.1:0")


def hanging(reason: str) -> str:
    return f'fencepost_kafka_hanging_transactions{{reason="{reason}"}}'


HANGING, NOT_LISTED, OVERDUE, MARKERS_MISSING = map(
    hanging, ("unknown_to_coordinator", "not_listed", "overdue", "markers_missing")
)


#: Its leaders do not check batches with the coordinator.
trusting_kafka = kafka_fixture(1, properties={"transaction.partition.verification.enable": "false"})


def metric(proxy: ProxyProcess, name: str, requested: float) -> dict[str, float]:
    """All metrics, once this one has the requested value."""

    def there() -> dict[str, float] | None:
        found = proxy.metrics()
        return found if found.get(name) == requested else None

    found: dict[str, float] = until(there, f"{name} {requested}", seconds=_PATIENCE_SECONDS)
    return found


def create(kafka: KafkaCluster, topic: str) -> None:
    with Connection(kafka.bootstrap) as admin:
        assert admin.create_topic(topic, partitions=2) == (0, None)
    for partition in range(2):
        assert Log(kafka.bootstrap).end(topic, partition) == 0  # waits for the leader


def conditional(proxy: ProxyProcess, topic: str, expected: int) -> Answer:
    with Connection(proxy.bootstrap) as client:
        return client.append(topic, batch(b"mine", expected=expected))


def transactions(*arguments: str, typed: str = "") -> tuple[int, str]:
    """Exit status and output, stdout and stderr, of `fencepost transactions`."""
    command = [sys.executable, "-m", "fencepost_proxy", "transactions", *arguments]
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=_PATIENCE_SECONDS, check=False, input=typed
    )
    return done.returncode, done.stdout + done.stderr


def committed(bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
    """A committed reader gets exactly these values of partition 0 at first."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, isolation_level="read_committed")
    with closing(consumer):
        consumer.assign([TopicPartition(topic, 0)])
        consumer.seek_to_beginning()
        read: list[bytes] = []
        until(
            lambda: read.extend(each.value for some in consumer.poll(500).values() for each in some) or read,
            f"{values}",
            accept=lambda found: len(found) >= len(values),
        )
        assert read == list(values)


def of_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(transactions(*arguments, "--json")[1])
    return found


def kafka_transactions(*arguments: str) -> str:
    return run_tool("kafka-transactions", arguments, version=kafka_version()).output


def test_hanging_transaction_is_shown_found_and_aborted(trusting_kafka: KafkaCluster, tmp_path: Path) -> None:
    topic, name = unique_topic("checked"), unique_topic("payments")
    create(trusting_kafka, topic)
    lag = f'fencepost_kafka_last_stable_offset_lag{{partition="0",topic="{topic}"}}'
    with (
        ProxyProcess(trusting_kafka.bootstrap, tmp_path, config=CHECKED_BY_NAME, arguments=STATUS) as proxy,
        Transactional(trusting_kafka.bootstrap, name, protocol=1) as producer,
    ):
        # A transaction is open on a checked topic.
        producer.begin(topic)
        producer.append(topic, b"a", b"b")

        # The metrics show it, and it does not hang.
        observed = metric(proxy, lag, 2)
        assert observed[f'fencepost_kafka_last_stable_offset{{partition="0",topic="{topic}"}}'] == 0
        assert observed[f'fencepost_kafka_partition_producer_ids{{partition="0",topic="{topic}"}}'] == 1
        observed = metric(proxy, "fencepost_kafka_open_transactions", 1)
        assert observed['fencepost_kafka_transactional_ids{state="Ongoing"}'] == 1
        until(
            lambda: proxy.metrics()["fencepost_kafka_open_transaction_age_seconds_max"] > 0,
            "its age",
            seconds=_PATIENCE_SECONDS,
        )
        assert name in proxy.page("/status.json")

        # The command shows it, through the proxy and directly at Kafka.
        for bootstrap in (proxy.bootstrap, trusting_kafka.bootstrap):
            (opened,) = of_json("--bootstrap", bootstrap)["open"]
            assert (opened["transactional_id"], opened["producer_id"]) == (name, producer.producer.id)
            assert opened["first_partitions"] == [f"{topic}-0"]
        described = of_json("describe", name, "--bootstrap", proxy.bootstrap)
        assert described["state"] == "Ongoing"
        (place,) = described["partitions"]
        assert (place["start_offset"], place["last_stable_offset"], place["high_watermark"]) == (0, 0, 2)
        status, text = transactions("hanging", "--bootstrap", proxy.bootstrap)
        assert (status, text.splitlines()[0]) == (0, "no hanging transactions found")
        first = ("abort", "--bootstrap", proxy.bootstrap, "--topic", topic, "--partition", "0", "--start-offset", "0")
        status, text = transactions(*first, "--yes")
        assert (status, "its coordinator will end it" in text) == (1, True)
        assert open_transactions(trusting_kafka.bootstrap, topic) == {producer.producer.id}

        # Its coordinator ends it, and a late batch arrives.
        assert producer.end(commit=True) == 0
        until(lambda: not open_transactions(trusting_kafka.bootstrap, topic), "the marker")
        late = producer.append(topic, b"late")
        assert (late.error_code, late.base_offset) == (0, 3)
        # The coordinator stores the state after the marker.
        until(
            lambda: transaction_state(trusting_kafka.bootstrap, name) == ("CompleteCommit", set()),
            "the end of the transaction",
            seconds=_PATIENCE_SECONDS,
        )

        # A batch of a producer that no coordinator knows.
        with Connection(trusting_kafka.bootstrap) as stranger:
            records = batch(b"whose?", producer=Producer(987_654_321, 0, 0), transactional=True)
            settings: dict[str, Any] = {"version": 11, "transactional_id": f"{name}-unknown"}
            assert stranger.append(topic, records, partition=1, **settings).error_code == 0

        # Both hang, according to the metrics, the page, the log, the command and Kafka's tool.
        metric(proxy, "fencepost_kafka_open_transactions", 0)
        assert metric(proxy, HANGING, 1)[lag] == 1
        metric(proxy, NOT_LISTED, 1)
        found, nobodys = sorted(
            of_json("hanging", "--status", proxy.status)["hanging"], key=lambda each: each["partition"]
        )
        assert (found["topic"], found["partition"], found["start_offset"]) == (topic, 0, 3)
        assert (found["producer_id"], found["transactional_id"]) == (producer.producer.id, name)
        assert (nobodys["producer_id"], nobodys["transactional_id"]) == (987_654_321, None)
        assert "its coordinator does not know of it" in proxy.page("/status.json")
        line = f"hanging transaction: read_committed consumers of its partition are stuck partition={topic}-0"
        until(lambda: line in proxy.log, "a line in the log")
        status, text = transactions("hanging", "--bootstrap", proxy.bootstrap)
        assert status == 1
        assert "no coordinator lists its producer" in text
        advice = [line.partition("to abort it:")[2] for line in text.splitlines() if "to abort it:" in line]
        # Conditional appends are blocked meanwhile.
        assert conditional(proxy, topic, 4).error_code == NOT_LEADER
        listed = kafka_transactions(
            "--bootstrap-server", proxy.bootstrap, "find-hanging", "--broker-id", "1", "--max-transaction-timeout", "0"
        )
        assert topic in listed

        # An operator runs the suggested command through the proxy, and aborts only after a confirmation.
        committed(proxy.bootstrap, topic, [b"a", b"b"])
        mine, another = ([*shlex.split(each)[2:]] for each in sorted(advice, key=lambda each: "--partition 1" in each))
        for arguments, typed, expected in (
            ([*mine, "--dry-run", "--yes"], "", (0, "nothing written (--dry-run)")),
            (mine, "", (1, "nothing written")),
            ([*mine[:-1], "4"], "yes", (2, f"open: producer {producer.producer.id} from offset 3")),
        ):
            status, text = transactions(*arguments, typed=typed)
            assert (status, expected[1] in text) == (expected[0], True), text
            assert open_transactions(trusting_kafka.bootstrap, topic) == {producer.producer.id}
        status, text = transactions(*mine, typed="yes\n")
        assert (status, text.splitlines()[-1]) == (0, "Abort it? (yes) aborted; last stable offset 5")
        # Directly at Kafka, by its producer.
        producer_of_another = ("--producer-id", "987654321", "--producer-epoch", "0", "--coordinator-epoch", "0")
        assert another[-2:] == ["--start-offset", "0"]
        direct = ("--bootstrap-server", trusting_kafka.bootstrap)
        status, text = transactions(*another[:-2], *producer_of_another, *direct, "--yes")
        assert (status, "no coordinator lists its producer" in text) == (0, True), text

        # No transaction hangs any more.
        until(lambda: not open_transactions(trusting_kafka.bootstrap, topic), "the markers")
        metric(proxy, NOT_LISTED, 0)
        observed = metric(proxy, HANGING, 0)
        assert lag not in observed
        # Conditional appends continue after the marker.
        appended_batch = until(
            lambda: conditional(proxy, topic, 5),
            "an answer that is not retriable",
            accept=lambda answer: answer.error_code != NOT_LEADER,
        )
        assert (appended_batch.error_code, appended_batch.base_offset) == (0, 5)
        committed(proxy.bootstrap, topic, [b"a", b"b", b"mine"])
        assert transactions("hanging", "--bootstrap", proxy.bootstrap)[0] == 0


def test_abort_only_transaction_is_shown_until_aborted(trusting_kafka: KafkaCluster, tmp_path: Path) -> None:
    topic, name = unique_topic("checked"), unique_topic("transfers")
    create(trusting_kafka, topic)
    with (
        ProxyProcess(trusting_kafka.bootstrap, tmp_path, config=CHECKED_BY_NAME, arguments=STATUS) as proxy,
        Transactional(proxy.bootstrap, name, protocol=1) as producer,
    ):

        def shown() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = json.loads(proxy.page("/status.json"))["abort_only_transactions"]
            return found

        assert shown() == []
        producer.begin(topic)
        until(lambda: producer.append(topic, b"a", expected=7).error_code == OFFSET_MISMATCH, "where the log ends")

        (found,) = until(shown, "it on the page", seconds=_PATIENCE_SECONDS)
        assert (found["transactional_id"], found["producer_id"]) == (name, producer.producer.id)
        assert "expected=7" in found["why"]
        assert name in proxy.page("/status.json")

        assert producer.end(commit=False) == 0
        until(lambda: not shown(), "its end", seconds=_PATIENCE_SECONDS)


def test_page_shows_opened_and_ended_transactions(trusting_kafka: KafkaCluster, tmp_path: Path) -> None:
    topic, name = unique_topic("stuck"), unique_topic("payments")
    create(trusting_kafka, topic)
    with (
        ProxyProcess(trusting_kafka.bootstrap, tmp_path, arguments=STATUS) as proxy,
        Transactional(proxy.bootstrap, name, protocol=1) as producer,
    ):
        producer.begin(topic)
        producer.append(topic, b"a")
        metric(proxy, "fencepost_kafka_open_transactions", 1)
        (opened,) = of_json("--status", proxy.status)["open"]
        assert opened["transactional_id"] == name

        # An operator ends it with a newer Kafka tool.
        if not kafka_version().startswith(("3.", "4.0")):
            kafka_transactions(
                "--bootstrap-server", proxy.bootstrap, "forceTerminateTransaction", "--transactionalId", name
            )
        else:
            assert producer.end(commit=False) == 0
        metric(proxy, "fencepost_kafka_open_transactions", 0)
        until(lambda: not open_transactions(trusting_kafka.bootstrap, topic), "the marker")


def test_transaction_that_stops_appends_is_named_and_ended(trusting_kafka: KafkaCluster, tmp_path: Path) -> None:
    """It has no records. Its marker would take an offset, so conditional appends get 6."""
    topic, name = unique_topic("checked"), unique_topic("forgotten")
    create(trusting_kafka, topic)
    with ProxyProcess(trusting_kafka.bootstrap, tmp_path, config=CHECKED_BY_NAME, arguments=STATUS) as proxy:
        assert conditional(proxy, topic, 0).base_offset == 0
        with Transactional(proxy.bootstrap, name, protocol=1, timeout_ms=600_000) as producer:
            producer.begin(topic)

        def named() -> str | None:
            assert conditional(proxy, topic, 1).error_code == NOT_LEADER
            problems = json.loads(proxy.page("/status.json"))["problems"]
            return next((each["do"] for each in problems if f"Transaction {name} " in each["what"]), None)

        advice = until(named, "the problem")
        assert proxy.metrics()['fencepost_refusals_total{reason="transaction_open"}'] > 0
        command = shlex.split(advice.partition(": ")[2].replace("HOST:PORT", proxy.bootstrap))
        assert command[:3] == ["fencepost", "transactions", "abort"]
        assert transactions(*command[2:], typed="no\n")[0] == 1
        assert transactions(*command[2:], "--yes") == (0, ANY)
        until(lambda: conditional(proxy, topic, 2).error_code != NOT_LEADER, "the end of the transaction")
        status, said = transactions(*command[2:], "--yes")
        assert (status, "has no open transaction" in said) == (1, True)
    # The marker took offset 1.
    assert Log(trusting_kafka.bootstrap).values(topic) == [b"mine", b"mine"]


def test_switched_off_transaction_watch_shows_nothing(trusting_kafka: KafkaCluster, tmp_path: Path) -> None:
    config = "watch_transactions = false"
    with ProxyProcess(trusting_kafka.bootstrap, tmp_path, config=config, arguments=STATUS) as proxy:
        assert json.loads(proxy.page("/status.json"))["transactions"] is None
        assert not [name for name in proxy.metrics() if name.startswith("fencepost_kafka")]
        status, text = transactions("--status", proxy.status)
        assert (status, "watch_transactions" in text) == (2, True)


# --- faults that take minutes -----------------------------------------------------------------------------------------


@pytest.fixture
def stubborn_kafka() -> Iterator[KafkaCluster]:
    """Coordinators check for timed-out transactions once an hour and expire idle ids soon. Paused brokers keep
    leadership."""
    properties = {
        "transaction.partition.verification.enable": "false",
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": "3600000",
        "transactional.id.expiration.ms": "10000",
        "transaction.remove.expired.transaction.cleanup.interval.ms": "1000",
        "broker.session.timeout.ms": "600000",
        "replica.lag.time.max.ms": "4000",
    }
    with running_kafka(3, properties=properties) as cluster:
        yield cluster


def led_elsewhere(kafka: KafkaCluster, node_id: int, prefix: str) -> str:
    """A transactional id whose coordinator is on another broker."""
    with Connection(kafka.bootstrap.split(",")[0]) as admin:
        for number in range(50):
            name = f"{prefix}-{number}"
            (found,) = admin.query(FindCoordinatorRequest(key_type=1, coordinator_keys=[name]), 4).coordinators
            if found.error_code == 0 and found.node_id != node_id:
                return name
    raise AssertionError(f"all coordinators are on broker {node_id}")


def not_controller(kafka: KafkaCluster) -> int:
    """A broker that is not the active controller, whose requests to a paused one time out only after 30 s."""
    arguments = ("--bootstrap-server", kafka.bootstrap, "describe", "--status")
    status = run_tool("kafka-metadata-quorum", arguments, version=kafka_version()).output
    (controller,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("LeaderId")]
    return 3 if controller != 3 else 2


def create_on(proxy: ProxyProcess, topics: Mapping[str, Sequence[int]]) -> None:
    with Connection(proxy.bootstrap) as admin:
        for topic, nodes in topics.items():
            assert admin.create_topic(topic, on=nodes) == (0, None)


@pytest.mark.soak
@pytest.mark.no_cover
@pytest.mark.timeout(900)
def test_overdue_and_incomplete_transactions_are_shown_until_resolved(
    stubborn_kafka: KafkaCluster, tmp_path: Path
) -> None:
    log = Log(stubborn_kafka.bootstrap)
    fine, away = unique_topic("fine"), unique_topic("away")
    stopped = not_controller(stubborn_kafka)
    with (
        ProxyProcess(stubborn_kafka.bootstrap, tmp_path, arguments=STATUS) as proxy,
        Process("kafka-python", stubborn_kafka.bootstrap, tmp_path) as producers,
    ):
        create_on(proxy, {fine: [1, 2, 3], away: [stopped]})

        # A transaction that times out after a second. Neither its coordinator nor that of the last one is paused later.
        overdue = led_elsewhere(stubborn_kafka, stopped, f"{fine}-overdue")
        producers.do("init", "overdue", overdue, 1_000)
        producers.do("begin", "overdue")
        producers.do("send", "overdue", fine, 0, "a", "-")
        # A late batch of a completed transaction whose transactional id expires.
        producers.do("init", "expired", f"{fine}-expired", 60_000)
        producers.do("begin", "expired")
        offset = int(producers.do("send", "expired", fine, 0, "b", "-"))
        (sent,) = [each for each in log.batches(fine) if each.base_offset == offset]
        producers.do("commit", "expired")
        until(lambda: [each for each in log.batches(fine) if each.is_control], "the marker")
        late = batch(b"late", producer=Producer(sent.producer_id, sent.producer_epoch, 1), transactional=True)
        with log.connect(fine) as leader:
            answer = leader.append(fine, late, version=11, transactional_id=f"{fine}-expired")
        assert answer.error_code == 0, answer

        # The late batch hangs and is not listed, although the coordinator knew its transaction at first.
        metric(proxy, NOT_LISTED, 1)
        (found,) = of_json("hanging", "--status", proxy.status)["hanging"]
        assert (found["producer_id"], found["start_offset"]) == (sent.producer_id, answer.base_offset)

        # A transaction commits while the leader of one of its partitions is paused.
        cut = led_elsewhere(stubborn_kafka, stopped, f"{away}-cut")
        producers.do("init", "cut", cut, 300_000)
        producers.do("begin", "cut")
        producers.do("send", "cut", fine, 0, "c", "-")
        producers.do("send", "cut", away, 0, "d", "-")
        stubborn_kafka.pause(stopped)
        producers.do("commit", "cut")

        # Its markers are missing, and the first transaction is overdue, according to the metrics, the page and the
        # command.
        metric(proxy, OVERDUE, 1)
        metric(proxy, MARKERS_MISSING, 1)
        stuck = {each["transactional_id"]: each for each in of_json("--status", proxy.status)["open"]}
        assert stuck[overdue]["stuck"] == "overdue"
        assert (stuck[cut]["stuck"], stuck[cut]["state"]) == ("markers_missing", "PrepareCommit")
        assert stuck[cut]["first_partitions"] == [f"{away}-0"]
        text = proxy.page("/status.json")
        for why in ("should have aborted it by now", "its markers are not written"):
            assert why in text
        others = ",".join(str(stubborn_kafka.address(each)) for each in (1, 2, 3) if each != stopped)
        described = of_json("describe", cut, "--bootstrap", others)
        assert [(each["topic"], each["leader"]) for each in described["partitions"]] == [(away, stopped)]
        status, text = transactions("hanging", "--bootstrap", others)
        assert (status, overdue in text) == (1, True)

        # The broker resumes, and the other transaction's producer initializes again.
        stubborn_kafka.resume(stopped)
        producers.do("init", "overdue", overdue, 60_000)

        # Neither is stuck any more.
        metric(proxy, MARKERS_MISSING, 0)
        metric(proxy, OVERDUE, 0)


@pytest.mark.soak
@pytest.mark.no_cover
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "skips_it"), [("4.0.2", False), (DEFAULT_VERSION, True)])
def test_partition_without_leader_gets_marker_or_hangs(version: str, skips_it: bool, tmp_path: Path) -> None:
    """When the leader returns, the marker is written. Newer releases never write it (KAFKA-20734): the transaction
    hangs there, although Kafka reports it as committed."""
    fine, away = unique_topic("fine"), unique_topic("away")
    with (
        KafkaCluster(3, version=version) as kafka,
        ProxyProcess(kafka.bootstrap, tmp_path, arguments=STATUS) as proxy,
        Process("kafka-python", kafka.bootstrap, tmp_path) as producers,
    ):
        create_on(proxy, {fine: [1, 2, 3], away: [3]})
        # A transaction on two partitions, one of which has lost its only broker.
        cut = led_elsewhere(kafka, 3, away)
        producers.do("init", "cut", cut, 300_000)
        producers.do("begin", "cut")
        producers.do("send", "cut", fine, 0, "c", "-")
        producers.do("send", "cut", away, 0, "d", "-")
        kafka.pause(3)
        others = ",".join(str(kafka.address(each)) for each in (1, 2))
        log = Log(others)
        until(lambda: not log.known_leader(away, 0), "a partition without a leader", seconds=_PATIENCE_SECONDS)

        producers.do("commit", "cut")
        ended = "CompleteCommit" if skips_it else "PrepareCommit"
        described = until(
            lambda: of_json("describe", cut, "--bootstrap", others),
            ended,
            accept=lambda found: found["state"] == ended,
            seconds=_PATIENCE_SECONDS,
        )
        assert [(each["topic"], each["leader"]) for each in described["partitions"]] == (
            [] if skips_it else [(away, None)]
        )
        until(lambda: not open_transactions(log.leader(fine), fine), "the other marker")

        # When the broker is back, the marker is written, or the transaction hangs.
        kafka.resume(3)
        log = Log(kafka.bootstrap)
        if skips_it:
            metric(proxy, HANGING, 1)
            (found,) = of_json("hanging", "--status", proxy.status)["hanging"]
            assert (found["topic"], found["start_offset"], found["transactional_id"]) == (away, 0, cut)
            assert open_transactions(log.leader(away), away) == {found["producer_id"]}
        else:
            until(lambda: not open_transactions(log.leader(away), away), "the marker", seconds=_PATIENCE_SECONDS)
            assert log.batches(away)[-1].is_control
