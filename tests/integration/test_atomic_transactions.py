"""Transactions with expected offsets on several partitions commit only if all offsets match.

The tests send raw requests of both protocols through one proxy, through two, and directly. They read committed records
from Kafka directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from kafka.protocol.producer import EndTxnRequest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.fixtures import kafka_fixture, proxies_fixture
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess, blocked_by
from tests.support.raw import Connection, Log, batch
from tests.support.stopping_validator import Stops
from tests.support.transactions import Transactional, abort_as_an_admin, committed, end_request, transaction_state

pytestmark = pytest.mark.kafka

OK, NOT_LEADER, POLICY_VIOLATION, CONCURRENT_TRANSACTIONS, UNKNOWN_PRODUCER_ID, ABORTABLE = 0, 6, 44, 51, 59, 120
#: Kafka's errors after it aborted the transaction on timeout.
FENCED = (47, 48, 90)
PATIENCE_SECONDS = 60.0
COMMIT_WAIT_SECONDS = 2.0
CONFIG = f"{CHECKED_WITH_LONG_LEASE}\n[limits]\ntakeover_seconds = 0.5\ncommit_wait_seconds = {COMMIT_WAIT_SECONDS}\n"
#: Error of a refused commit, by protocol: EndTxn v3, v5.
REFUSED = {1: UNKNOWN_PRODUCER_ID, 2: ABORTABLE}

both_protocols = pytest.mark.parametrize("protocol", [1, 2])


cluster = kafka_fixture()


proxies = proxies_fixture(of="cluster", config=CONFIG, unexpected=("Traceback", "crashed"))


@dataclass
class Stage:
    cluster: KafkaCluster
    proxies: list[ProxyProcess]
    unique: Callable[..., str]

    @property
    def proxy(self) -> ProxyProcess:
        return self.proxies[0]

    @property
    def other(self) -> ProxyProcess:
        return self.proxies[1]

    @property
    def log(self) -> Log:
        return Log(self.cluster.bootstrap)

    def topic(self, prefix: str = "checked") -> str:
        """A checked topic with two partitions and two records in each."""
        name = self.unique(prefix)
        with Connection(self.proxy.bootstrap) as client:
            assert client.create_topic(name, partitions=2) == (OK, None)
            for partition in range(2):
                assert self.log.end(name, partition) == 0
                for _ in range(2):
                    until(
                        lambda partition=partition: self._append_old(client, name, partition),
                        "a leader",
                        seconds=PATIENCE_SECONDS,
                    )
        return name

    @staticmethod
    def _append_old(client: Connection, topic: str, partition: int) -> bool:
        records = batch(b"old", base_offset=-1 if topic.startswith("base") else 0)
        return client.append(topic, records, partition=partition).error_code == OK

    def producer(self, protocol: int, *, direct: bool = False) -> Transactional:
        """`direct` – directly to Kafka."""
        address = self.cluster.bootstrap if direct else self.proxy.bootstrap
        return Transactional(address, self.unique("txn"), protocol=protocol)

    def ended(self, transactional: Transactional) -> None:
        """Wait for the transaction's markers."""
        until(
            lambda: self.state(transactional) in ("CompleteCommit", "CompleteAbort", "Empty"),
            "the markers",
            seconds=PATIENCE_SECONDS,
        )

    def state(self, transactional: Transactional) -> str:
        return transaction_state(self.cluster.bootstrap, transactional.name)[0]

    def committed(self, topic: str) -> list[list[bytes]]:
        """The records of each partition that a read_committed consumer gets."""
        return list(committed(self.cluster.bootstrap, (topic, 0), (topic, 1)).values())


@pytest.fixture
def stage(cluster: KafkaCluster, proxies: list[ProxyProcess], unique_topic: Callable[..., str]) -> Stage:
    return Stage(cluster, proxies, unique_topic)


def begin(transactional: Transactional, topic: str) -> None:
    if transactional.protocol == 1:
        assert set(transactional.add({topic: [0, 1]}).values()) == {OK}


def through(proxy: ProxyProcess, transactional: Transactional) -> Transactional:
    """The same producer over another proxy."""
    return by(proxy.bootstrap, transactional)


def by(address: str, transactional: Transactional) -> Transactional:
    transactional.connection.close()
    transactional.connection = Connection(address, timeout_seconds=60)
    return transactional


@both_protocols
def test_all_hold_and_it_commits(protocol: int, stage: Stage) -> None:
    topic = stage.topic()
    with stage.producer(protocol) as transactional:
        for end in (2, 4, 6):  # each transaction leaves a marker
            begin(transactional, topic)
            answers = transactional.append_all({(topic, 0): ([b"a"], end), (topic, 1): ([b"b"], end)})
            assert [(a.error_code, a.base_offset) for a in answers.values()] == [(OK, end)] * 2
            assert transactional.end(commit=True) == OK
            stage.ended(transactional)
    assert stage.committed(topic) == [[b"old", b"old", value, value, value] for value in (b"a", b"b")]


@both_protocols
def test_one_refused_append_hides_the_whole_transaction(protocol: int, stage: Stage) -> None:
    topic = stage.topic()
    with stage.producer(protocol) as transactional:
        begin(transactional, topic)
        answers = transactional.append_all({(topic, 0): ([b"a"], 2), (topic, 1): ([b"b"], 1)})
        assert answers[topic, 0].error_code == OK
        assert answers[topic, 1].error_code == POLICY_VIOLATION
        assert transactional.end(commit=True) == REFUSED[protocol]
        assert stage.state(transactional) == "Ongoing"
        assert transactional.end(commit=False) == OK
        stage.ended(transactional)
        # The producer's next transaction is independent.
        begin(transactional, topic)
        at = {partition: stage.log.end(topic, partition) for partition in range(2)}
        answers = transactional.append_all({(topic, partition): ([b"c"], end) for partition, end in at.items()})
        assert [a.error_code for a in answers.values()] == [OK, OK]
        assert transactional.end(commit=True) == OK
        stage.ended(transactional)
    assert stage.committed(topic) == [[b"old", b"old", b"c"]] * 2


@both_protocols
def test_transaction_with_only_refusals_can_only_abort(protocol: int, stage: Stage) -> None:
    """With transactions v2 the coordinator does not know of the transaction then."""
    topic = stage.topic()
    with stage.producer(protocol) as transactional:
        begin(transactional, topic)
        assert transactional.append(topic, b"a", expected=7).error_code == POLICY_VIOLATION
        assert transactional.end(commit=True) == REFUSED[protocol]
        assert through(stage.other, transactional).end(commit=True) == REFUSED[protocol]
        assert transactional.end(commit=False) == OK


@both_protocols
@pytest.mark.parametrize("killed", [False, True], ids=["", "killed between"])
def test_refused_at_one_proxy_and_committed_through_another(killed: bool, protocol: int, stage: Stage) -> None:
    topic = stage.topic()
    with stage.producer(protocol) as transactional:
        begin(transactional, topic)
        assert transactional.append(topic, b"a", expected=2).error_code == OK
        assert transactional.append(topic, b"b", partition=1, expected=9).error_code == POLICY_VIOLATION
        if killed:
            stage.proxy.kill()
        through(stage.other, transactional)
        assert transactional.end(commit=True) == REFUSED[protocol]
        if killed:
            stage.proxy.restart()
            through(stage.proxy, transactional)
            assert transactional.end(commit=True) == REFUSED[protocol]
            through(stage.other, transactional)
        assert transactional.end(commit=False) == OK
        stage.ended(transactional)
        # v1 keeps its epoch: the refusal of the previous transaction does not apply to the next one at either proxy.
        begin(transactional, topic)
        until(
            lambda: transactional.append(topic, b"c", expected=stage.log.end(topic)).error_code == OK,
            "an append",
            seconds=PATIENCE_SECONDS,
        )
        through(stage.proxy, transactional)
        assert transactional.end(commit=True) == OK
        stage.ended(transactional)
    assert stage.committed(topic)[0] == [b"old", b"old", b"c"]


@both_protocols
def test_appends_that_no_proxy_knows_of(protocol: int, stage: Stage) -> None:
    """As after a crash of the proxy before it stored the refusal. The record headers show the expected offsets."""
    topic = stage.topic()
    with stage.producer(protocol, direct=True) as transactional:
        begin(transactional, topic)
        assert transactional.append(topic, b"a", expected=2).base_offset == 2
        assert transactional.append(topic, b"b", partition=1).base_offset == 2
        assert through(stage.proxy, transactional).end(commit=True) == OK
        stage.ended(transactional)
        by(stage.cluster.bootstrap, transactional)
        begin(transactional, topic)
        assert transactional.append(topic, b"c", expected=4).base_offset == 4
        assert transactional.append(topic, b"d", expected=4).base_offset == 5  # Kafka does not compare
        assert through(stage.proxy, transactional).end(commit=True) == REFUSED[protocol]
        assert transactional.end(commit=False) == OK
        stage.ended(transactional)
    assert stage.committed(topic)[0] == [b"old", b"old", b"a"]
    assert stage.committed(topic)[1] == [b"old", b"old", b"b"]


@both_protocols
def test_a_marker_in_the_middle_of_it(protocol: int, stage: Stage) -> None:
    """An administrator aborts the transaction on one partition. Its records there can no longer be committed."""
    topic = stage.topic()
    with stage.producer(protocol) as transactional:
        begin(transactional, topic)
        assert transactional.append(topic, b"a", expected=2).error_code == OK
        assert transactional.append(topic, b"b", partition=1, expected=2).error_code == OK
        abort_as_an_admin(stage.cluster.bootstrap, topic, transactional.producer)
        until(lambda: stage.log.end(topic) == 4, "the marker", seconds=PATIENCE_SECONDS)
        assert transactional.end(commit=True) == REFUSED[protocol]
        assert transactional.end(commit=False) == OK
        stage.ended(transactional)
    assert stage.committed(topic) == [[b"old", b"old"]] * 2


@both_protocols
def test_base_offset_source_commits_only_through_same_proxy(protocol: int, stage: Stage) -> None:
    topic = stage.topic("base")
    with stage.producer(protocol) as transactional:
        transactional.source_is_base = True
        for end, through_whom, outcome in ((2, stage.proxy, OK), (4, stage.other, REFUSED[protocol])):
            through(stage.proxy, transactional)
            begin(transactional, topic)
            assert transactional.append(topic, b"a", expected=end).error_code == OK
            assert through(through_whom, transactional).end(commit=True) == outcome
            if outcome:
                assert transactional.end(commit=False) == OK
            stage.ended(transactional)


@both_protocols
def test_retry_after_retriable_error_decides_the_commit(protocol: int, stage: Stage) -> None:
    """One proxy returns error 6, then the other resolves the append from the log. It commits only if it finds it."""
    topic = stage.topic()
    with (
        stage.producer(2) as in_the_way,
        stage.producer(protocol) as transactional,
    ):
        for again in (False, True):
            end = stage.log.end(topic)
            assert in_the_way.append(topic, b"x").error_code == OK
            through(stage.proxy, transactional)
            begin(transactional, topic)
            assert transactional.append(topic, b"a", expected=end + 2, timeout_ms=900).error_code == NOT_LEADER
            assert in_the_way.end(commit=False) == OK
            stage.ended(in_the_way)
            if again:
                until(
                    lambda end=end: transactional.append(topic, b"a", expected=end + 2).error_code == OK,
                    "admission of its append",
                    seconds=PATIENCE_SECONDS,
                )
            through(stage.other, transactional)
            assert transactional.end(commit=True) == (OK if again else REFUSED[protocol])
            if not again:
                assert transactional.end(commit=False) == OK
            stage.ended(transactional)
    assert stage.committed(topic)[0] == [b"old", b"old", b"a"]


@both_protocols
def test_an_end_that_lies(protocol: int, stage: Stage) -> None:
    """Wrong epochs, unknown transactions and repeated commits commit nothing else."""
    topic = stage.topic()
    with stage.producer(protocol) as transactional:
        begin(transactional, topic)
        assert transactional.append(topic, b"a", expected=9).error_code == POLICY_VIOLATION
        assert transactional.append(topic, b"b").error_code == OK
        producer = transactional.producer

        def end(name: str, epoch: int, version: int) -> int:
            request = end_request(name, producer._replace(epoch=epoch), commit=True)
            return int(transactional.connection.query(request, version).error_code)

        for version in (0, 1, 2, 3, 4, 5):
            refused = ABORTABLE if version >= 4 else UNKNOWN_PRODUCER_ID
            # CONCURRENT_TRANSACTIONS: validation did not finish in time.
            validated = until(
                lambda version=version: end(transactional.name, producer.epoch, version),
                "validation of the commit",
                accept=lambda code: code != CONCURRENT_TRANSACTIONS,
            )
            assert validated == refused
            assert end(transactional.name, producer.epoch + 1, version) not in (OK, refused)
            if producer.epoch:
                assert end(transactional.name, producer.epoch - 1, version) not in (OK, refused)
            assert end(stage.unique("nobody"), producer.epoch, version) not in (OK, ABORTABLE)
        assert transactional.end(commit=False) == OK
        stage.ended(transactional)
        begin(transactional, topic)
        at = stage.log.end(topic)
        assert transactional.append(topic, b"c", expected=at).error_code == OK
        before = transactional.producer
        assert transactional.end(commit=True) == OK
        transactional.producer = before
        assert transactional.end(commit=True) == OK  # as in Kafka: a retry of a completed commit
        stage.ended(transactional)
    assert stage.committed(topic)[0] == [b"old", b"old", b"c"]


@pytest.mark.parametrize(
    "retry_seconds", [0.0, pytest.param(120.0, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_commit_waits_while_kafka_cannot_be_queried(retry_seconds: float, stage: Stage) -> None:
    """The proxy never relays a commit that it cannot validate, however often the client retries."""
    topic = stage.topic()
    with stage.producer(2) as transactional:
        begin(transactional, topic)
        assert transactional.append(topic, b"a", expected=2).error_code == OK
        producer = transactional.producer
        request = end_request(transactional.name, producer, commit=True)
        stage.cluster.pause(1)
        try:
            retry_until = time.monotonic() + retry_seconds
            while True:
                assert transactional.connection.query(request, 5).error_code == CONCURRENT_TRANSACTIONS
                if time.monotonic() >= retry_until:
                    break
        finally:
            stage.cluster.resume(1)
        if not retry_seconds:
            assert stage.state(transactional) == "Ongoing"
        # The coordinator may have fenced the producer on timeout.
        ended = transactional.end(commit=True)
        assert ended == OK or (retry_seconds and ended in FENCED)
        stage.ended(transactional)
    assert stage.committed(topic)[0] == [b"old", b"old", *([b"a"] if ended == OK else [])]


@both_protocols
def test_commit_from_a_paused_proxy_ends_nothing(protocol: int, stage: Stage) -> None:
    """1. The proxy pauses with a commit. 2. The client aborts through another proxy and starts a new transaction.
    3. The paused proxy resumes: its commit ends nothing."""
    topic = stage.topic()
    with stage.producer(protocol) as transactional:
        begin(transactional, topic)
        assert transactional.append(topic, b"a", expected=2).error_code == OK
        producer = transactional.producer
        late = end_request(transactional.name, producer, commit=True)
        stage.proxy.pause()
        try:
            transactional.connection.send(late, 3)
            through(stage.other, transactional)
            assert transactional.end(commit=False) == OK
            stage.ended(transactional)
            begin(transactional, topic)
            at = stage.log.end(topic)
            until(
                lambda: transactional.append(topic, b"b", expected=at).error_code == OK,
                "the next append",
                seconds=PATIENCE_SECONDS,
            )
        finally:
            stage.proxy.resume()
        with stage.producer(protocol) as another:  # validated after the earlier commit
            elsewhere = stage.topic()
            begin(another, elsewhere)
            assert another.append(elsewhere, b"x", expected=2).error_code == OK
            assert another.end(commit=True) == OK
        assert stage.state(transactional) == "Ongoing"
        end = stage.log.end(topic, 1)  # v1 wrote a marker there
        assert transactional.append(topic, b"c", partition=1, expected=end).error_code == OK
        assert transactional.end(commit=True) == OK
        stage.ended(transactional)
    assert stage.committed(topic) == [[b"old", b"old", b"b"], [b"old", b"old", b"c"]]


@pytest.mark.soak
def test_commit_through_another_proxy_during_validation_succeeds(stage: Stage, tmp_path: Path) -> None:
    """1. The first commit waits in a queue and its connection breaks. 2. The client retries through another proxy,
    which sends the commit to the coordinator. 3. The first commit is validated: it must not report a failure."""
    topic, stops = stage.topic(), tmp_path / "stops"
    stops.mkdir()
    validating = ProxyProcess(
        stage.cluster.bootstrap,
        tmp_path,
        config=CONFIG.replace(f"wait_seconds = {COMMIT_WAIT_SECONDS}", "wait_seconds = 60.0"),
        module="tests.support.stopping_validator",
        environment={"STOPS": str(stops)},
    )
    with validating, stage.producer(2) as transactional:
        through(validating, transactional)
        until(  # the proxy has just started
            lambda: transactional.connection.append(topic, batch(b"old", expected=2)).error_code == OK,
            "an append",
            seconds=PATIENCE_SECONDS,
        )
        assert transactional.append(topic, b"a", expected=3).error_code == OK
        again = end_request(transactional.name, transactional.producer, commit=True)
        with Connection(validating.bootstrap) as second, Stops(stops, "producers:before") as stopped:
            second.send(again, 5)
            stopped.await_reached(transactional.name)
            assert through(stage.other, transactional).end(commit=True) == OK
            stage.ended(transactional)
            stopped.release()
            assert second.receive(EndTxnRequest, 5)[1].error_code == CONCURRENT_TRANSACTIONS
            assert second.query(again, 5).error_code == OK  # Kafka's response to a repeated commit
    assert stage.committed(topic)[0] == [b"old", b"old", b"old", b"a"]


def test_validating_much_unpacked_data_blocks_no_client(
    cluster: KafkaCluster, tmp_path: Path, unique_topic: Callable[..., str]
) -> None:
    """540 MiB in 0.5 MB, appended through one proxy and committed through another, which must read them.

    That takes longer than one attempt of the commit.
    """
    gzip, unpacked_bytes, batches = 1, 90 << 20, 6
    short = CONFIG.replace(f"commit_wait_seconds = {COMMIT_WAIT_SECONDS}", "commit_wait_seconds = 0.5")
    with (
        ProxyProcess(cluster.bootstrap, tmp_path, config=CONFIG) as one,
        ProxyProcess(cluster.bootstrap, tmp_path, config=f'status = "127.0.0.1:0"\n{short}') as other,
    ):
        stage = Stage(cluster, [one, other], unique_topic)
        topic = stage.topic()
        with stage.producer(2) as transactional:
            assert transactional.append(topic, b"a", expected=2).error_code == OK
            for _ in range(batches):
                answer = transactional.append(topic, bytes(unpacked_bytes), codec=gzip, timeout_ms=60_000)
                assert answer.error_code == OK
            assert through(other, transactional).end(commit=True) == OK
            stage.ended(transactional)
            assert stage.state(transactional) == "CompleteCommit"
        metrics = other.metrics()
        assert metrics['fencepost_commits_total{outcome="unknown"}'] >= 1
        assert metrics["fencepost_event_loop_late_seconds_count"] >= 1
        assert not blocked_by(other.log, "wire|transactions")
