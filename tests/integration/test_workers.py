"""Two worker processes share one address, and clients notice no difference between them.

On `required` topics, Kafka checks the sequence, so both workers append. Other checked topics need the primary worker.
If a connection of worker 1 sends a request for one, the connection migrates with all pipelined requests.
"""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.kafka import unique_topic
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import CHECKED_BY_NAME, READY_SECONDS, ProxyProcess
from tests.support.raw import Answer, Closed, Connection, Log, Producer, batch, produce_request
from tests.support.three_brokers import leaders_listener
from tests.support.transactions import Transactional
from tests.support.writers import (
    OK,
    POLICY_VIOLATION,
    Ledger,
    Writer,
    append_at_the_end,
    expected_of,
    value_of,
    writing,
)

pytestmark = pytest.mark.kafka

NOT_LEADER = 6
PRIMARY, OTHER = 0, 1


class Workers(ProxyProcess):
    """A proxy of two workers, with the metrics of each."""

    def __init__(self, upstream: str, directory: Path, *, config: str = CHECKED_BY_NAME) -> None:
        self._status = f"127.0.0.1:{free_ports_in_a_row(1)}"
        super().__init__(upstream, directory, config=config, arguments=("--workers", "2", "--status", self._status))

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self._status}{path}", timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/status.json"))
        return found

    def metric(self, name: str) -> float:
        """The value, or 0 if the metric is absent."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(f"{name} ")]
        return float(lines[0].split()[-1]) if lines else 0.0

    def of_worker(self, name: str, worker: int) -> float:
        return self.metric(f'fencepost_worker_{name}{{worker="{worker}"}}')

    def worker_pid(self, worker: int) -> int:
        def found() -> int | None:
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                with suppress(OSError):
                    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if b"--worker" in arguments and arguments[-2].startswith(b"%d:" % worker):
                        return int(pid)
            return None

        pid: int = until(found, f"a process of worker {worker}")
        return pid

    def connect(self, worker: int, topic: str | None = None) -> Connection:
        """A connection accepted by this worker: to the topic's leader, otherwise to bootstrap."""
        address = self.bootstrap if topic is None else until(lambda: self.known_leader(topic), f"a leader of {topic}")
        with ExitStack() as others:
            while True:
                before = self.of_worker("client_connections_accepted_total", worker)
                connection = Connection(address, timeout_seconds=20.0)
                connection.api_versions()
                if self.of_worker("client_connections_accepted_total", worker) > before:
                    return connection
                others.callback(connection.close)

    def known_leader(self, topic: str) -> str | None:
        with suppress(Closed, OSError):
            return leaders_listener(self, topic)
        return None

    def kill_worker(self, worker: int) -> None:
        os.kill(self.worker_pid(worker), signal.SIGKILL)

    def _serves(self) -> bool:
        status = self.status()
        # Other tests at this Kafka cause other warnings, such as topics expanded directly at Kafka.
        return bool(status["ready"]) and not any("is starting" in each for each in status["warnings"])

    def await_start(self, worker: int, starts: int) -> None:
        until(
            lambda: self.of_worker("starts_total", worker) >= starts and self._serves(),
            f"worker {worker} to be started again",
        )


@pytest.fixture(scope="module")
def shared(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(kafka.bootstrap, tmp_path_factory.mktemp("workers")) as proxy:
        yield proxy


@pytest.fixture
def own(kafka: KafkaCluster, tmp_path: Path) -> Iterator[Workers]:
    """A proxy that the test may kill."""
    with Workers(kafka.bootstrap, tmp_path) as proxy:
        yield proxy


def new_topic(proxy: Workers, prefix: str) -> str:
    topic = unique_topic(prefix)
    with Connection(proxy.bootstrap) as connection:
        assert connection.create_topic(topic)[0] == OK
    until(lambda: proxy.known_leader(topic), f"a leader of {topic}")
    return topic


def append(connection: Connection, topic: str, records: bytes) -> Answer:
    """Append, and retry while the error is 6, as for a new leader or sequencer."""

    last: list[Answer] = []

    def answered() -> bool:
        last[:] = [connection.append(topic, records)]
        return last[0].error_code != NOT_LEADER

    try:
        until(answered, f"an append to {topic}")
    except AssertionError as failure:
        raise AssertionError(f"{failure}: {last}") from failure
    return last[0]


# --- requests for any worker ------------------------------------------------------------------------------------------


def test_unchecked_connections_stay_with_either_worker(shared: Workers, log: Log) -> None:
    topic = new_topic(shared, "plain")
    released_total = shared.metric("fencepost_connection_migrations_total")

    with shared.connect(PRIMARY, topic) as one, shared.connect(OTHER, topic) as other:
        assert append(one, topic, batch(b"one")).base_offset == 0
        assert append(other, topic, batch(b"other")).base_offset == 1
        assert shared.of_worker("requests_total", PRIMARY) > 0
        assert shared.of_worker("requests_total", OTHER) > 0
        assert shared.metric('fencepost_requests_total{api="Produce",version="9"}') >= 2
        assert shared.status()["connections"] >= 2

    assert log.values(topic) == [b"one", b"other"]
    assert shared.metric("fencepost_connection_migrations_total") == released_total


def test_connections_are_shared_out_evenly(shared: Workers) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(Connection(shared.bootstrap)).api_versions()

        def counts() -> list[float]:
            return [shared.of_worker("client_connections", worker) for worker in (PRIMARY, OTHER)]

        # Connections of other tests may be closing.
        until(lambda: abs(counts()[0] - counts()[1]) <= 4, "as many connections here as there")


def test_writers_through_both_workers_race_on_required_topic(shared: Workers, log: Log) -> None:
    topic = new_topic(shared, "required")
    requests = [shared.of_worker("requests_total", worker) for worker in (PRIMARY, OTHER)]

    with shared.connect(PRIMARY, topic) as one, shared.connect(OTHER, topic) as other:
        rounds = 40
        for offset in range(rounds):
            for connection, name in ((one, b"one"), (other, b"other")):
                connection.send_produce({topic: {0: batch(name, expected=offset)}})
            answers = [connection.receive_produce()[1][topic, 0] for connection in (one, other)]
            while any(answer.error_code == NOT_LEADER for answer in answers):
                answers = [c.append(topic, batch(n, expected=offset)) for c, n in ((one, b"one"), (other, b"other"))]
            codes = sorted(answer.error_code for answer in answers)
            assert codes in ([OK, POLICY_VIOLATION], [POLICY_VIOLATION, POLICY_VIOLATION]), answers
            assert log.end(topic) == offset + 1
        for worker, before in zip((PRIMARY, OTHER), requests, strict=True):
            assert shared.of_worker("requests_total", worker) >= before + rounds


# --- requests for the primary worker ----------------------------------------------------------------------------------


def test_pipelining_connection_migrates_to_primary_worker_completely(shared: Workers, log: Log) -> None:
    plain, topic = new_topic(shared, "plain"), new_topic(shared, "checked")
    with shared.connect(PRIMARY, topic) as first:
        assert append(first, topic, batch(b"first", expected=0)).base_offset == 0
    with shared.connect(OTHER, topic) as connection:
        before = shared.metric("fencepost_connection_migrations_total")
        frames = [
            connection.frame(request, 9)[1]
            for request in (
                produce({plain: {0: batch(b"before")}}),
                produce({topic: {0: batch(b"a", expected=1)}}),
                produce({plain: {0: batch(b"between")}, topic: {0: batch(b"b", expected=2)}}),
                produce({plain: {0: batch(b"behind")}}),
            )
        ]
        wire = b"".join(frames)
        half = len(frames[0]) + len(frames[1]) // 2
        connection.socket.sendall(wire[:half])
        connection.receive_produce()
        connection.socket.sendall(wire[half:])
        answers = [connection.receive_produce()[1] for _ in range(3)]

        assert [answer[topic, 0].error_code for answer in answers[:2]] == [OK, OK]
        assert [answer[topic, 0].base_offset for answer in answers[:2]] == [1, 2]
        assert shared.metric("fencepost_connection_migrations_total") == before + 1
        assert connection.append(topic, batch(b"c", expected=3)).base_offset == 3
    assert log.values(topic) == [b"first", b"a", b"b", b"c"]
    assert log.values(plain) == [b"before", b"between", b"behind"]


def produce(batches: dict[str, dict[int, bytes]]) -> Any:
    return produce_request(batches, -1, 10_000)


def test_writers_through_both_workers_race_on_checked_topic(shared: Workers, log: Log) -> None:
    """Idempotent producers append too. Two processes could only detect misplaced appends, while one process prevents
    them."""
    topic = new_topic(shared, "checked")
    proxies: Sequence[ProxyProcess] = [shared]
    writers = [
        Writer("single", proxies, topic),
        Writer("other", proxies, topic),
        Writer("chain", proxies, topic, pipeline_key=4),
        Writer("plain", proxies, topic, conditional=False, pause_seconds=0.01),
        Writer("own-id", proxies, topic, conditional=False, idempotent=True, pause_seconds=0.01),
        Writer("own-id-too", proxies, topic, conditional=False, idempotent=True, pause_seconds=0.01),
    ]
    released_total = shared.metric("fencepost_connection_migrations_total")
    violations = shared.metric("fencepost_offset_violations_total")
    late = Ledger()
    with writing(*writers):
        await_end(log, topic, 100, writers)
        with shared.connect(OTHER, topic) as connection:
            for number in range(20):
                end = log.end(topic)
                value = value_of("late", number, end)
                late.sent(value)
                late.note(value, connection.append(topic, batch(value, expected=end)))
        await_end(log, topic, 400, writers)
    ledger = late.take(*(each.ledger for each in writers))

    assert ledger.misplaced(log, topic) == []
    assert not ledger.violated
    assert [v for v, at in ledger.accepted.items() if expected_of(v) not in (None, at)] == []
    assert shared.metric("fencepost_offset_violations_total") == violations
    assert shared.metric("fencepost_connection_migrations_total") > released_total


def await_end(log: Log, topic: str, end: int, writers: Sequence[Writer]) -> None:
    def there() -> bool:
        for each in writers:
            each.raise_failure()
        return log.end(topic) >= end

    until(there, f"{topic} to grow to {end}", seconds=120.0)


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_transaction_with_expectations_through_the_other_worker(protocol: int, shared: Workers, log: Log) -> None:
    """The primary worker learns of the transaction as soon as Kafka. It checks no expected offset before the marker is
    written."""
    topic = new_topic(shared, "checked")
    with shared.connect(OTHER, topic) as found, shared.connect(PRIMARY, topic) as rival:
        assert append(rival, topic, batch(b"before", expected=0)).base_offset == 0
        with Transactional(shared.bootstrap, topic) as transaction:
            transaction.connection.close()
            transaction.connection, transaction.protocol = found, protocol
            transaction.begin(topic)
            if protocol == 1:
                assert rival.append(topic, batch(b"x", expected=1), timeout_ms=1000).error_code == NOT_LEADER
            assert transaction.append(topic, b"a", b"b", expected=1).base_offset == 1
            assert rival.append(topic, batch(b"x", expected=3), timeout_ms=1000).error_code == NOT_LEADER
            assert transaction.end(commit=True) == OK
        until(lambda: log.end(topic) == 4, "the marker")
        assert append(rival, topic, batch(b"c", expected=4)).base_offset == 4


@pytest.mark.parametrize("protocol", [1, 2])
def test_commit_through_other_worker_is_validated(protocol: int, shared: Workers, log: Log) -> None:
    """The commit migrates to the primary worker, as the appends did. It knows their outcomes without reading the
    log."""
    topic = new_topic(shared, "checked")
    with (
        shared.connect(PRIMARY, topic) as append_here,
        shared.connect(OTHER, topic) as refused_here,
        shared.connect(OTHER, topic) as committed_here,
        Transactional(shared.bootstrap, topic, protocol=protocol) as transaction,
    ):
        transaction.connection.close()
        transaction.connection = append_here
        transaction.begin(topic)
        until(lambda: transaction.append(topic, b"a", expected=0).error_code == OK, "its turn")
        transaction.connection = refused_here
        assert transaction.append(topic, b"b", expected=0).error_code == POLICY_VIOLATION
        assert transaction.end(commit=True) == {1: 59, 2: 120}[protocol]
        assert transaction.end(commit=False) == OK
        transaction.connection = committed_here
        until(lambda: log.end(topic) == 2, "the marker")
        transaction.begin(topic)
        until(lambda: transaction.append(topic, b"c", expected=2).error_code == OK, "its turn")
        assert transaction.end(commit=True) == OK


def test_config_change_through_any_worker_reaches_all(shared: Workers) -> None:
    topic = new_topic(shared, "plain")
    before = shared.metric("fencepost_connection_migrations_total")
    with shared.connect(OTHER, topic) as witness, shared.connect(OTHER) as admin:
        assert admin.alter_topic(topic, {"fencepost.check.expected.offsets": "required"}) == (OK, None)
        assert shared.metric("fencepost_connection_migrations_total") == before + 1
        with shared.connect(PRIMARY) as another:
            for each in (witness, another):
                assert each.describe_topic(topic)["fencepost.check.expected.offsets"] == "required"
        answer = append(witness, topic, batch(b"says nothing"))
        assert (answer.error_code, (answer.message or "").split()[0]) == (POLICY_VIOLATION, "EXPECTATION_REQUIRED")
        assert append(witness, topic, batch(b"a", expected=0)).base_offset == 0
    assert shared.metric("fencepost_connection_migrations_total") == before + 1


def test_failed_pipeline_stays_failed_after_migration(shared: Workers, log: Log) -> None:
    """1: A is refused on a `required` topic. 2: A request for a `checked` topic makes the connection migrate. 3: B,
    pipelined after A, must fail."""
    required, checked = new_topic(shared, "required"), new_topic(shared, "checked")
    with shared.connect(OTHER, required) as connection, shared.connect(PRIMARY, required) as rival:
        assert append(rival, required, batch(b"theirs", expected=0)).base_offset == 0
        who = connection.init_producer_id()
        frames = [
            connection.frame(produce({topic: {0: records}}), 9)[1]
            for topic, records in (
                (required, batch(b"A", expected=0, producer=who)),
                (checked, batch(b"between", expected=0)),
                (required, batch(b"B", expected=1, producer=Producer(who.id, who.epoch, 1))),
            )
        ]
        connection.socket.sendall(b"".join(frames))
        a, _, b = (connection.receive_produce()[1] for _ in frames)
        assert a[required, 0].error_code == POLICY_VIOLATION
        assert b[required, 0].error_code != OK, "B was appended as if A had been"
    assert b"B" not in log.values(required)


# --- workers that end -------------------------------------------------------------------------------------------------


@pytest.mark.no_cover
@pytest.mark.parametrize("worker", [OTHER, PRIMARY], ids=["another worker", "primary worker"])
@pytest.mark.parametrize("prefix", ["required", "checked"])
def test_worker_killed_under_load_is_restarted(worker: int, prefix: str, own: Workers, log: Log) -> None:
    topic = new_topic(own, prefix)
    writers = [
        Writer("single", [own], topic),
        Writer("idempotent", [own], topic, idempotent=True),
        Writer("named", [own], topic, named=True),
        Writer("another", [own], topic, pipeline_key=3),
    ]
    with writing(*writers):
        await_end(log, topic, 40, writers)
        own.kill_worker(worker)
        own.await_start(worker, 2)
        await_end(log, topic, log.end(topic) + 60, writers)
    ledger = Ledger().take(*(each.ledger for each in writers))
    append_at_the_end(log, own, topic, "after", ledger)

    ledger.check(log, topic)
    assert "worker exited unexpectedly" in own.log
    assert own.metric("fencepost_client_connections_accepted_total") > 0


def test_checked_append_fails_when_paused_primary_is_killed(own: Workers, log: Log) -> None:
    """A connection that needs the paused primary worker waits. It is closed when the worker is killed."""
    checked, plain = new_topic(own, "checked"), new_topic(own, "plain")
    with own.connect(OTHER, checked) as needs_it, own.connect(OTHER, plain) as does_not:
        pid = own.worker_pid(PRIMARY)
        os.kill(pid, signal.SIGSTOP)
        needs_it.send_produce({checked: {0: batch(b"a", expected=0)}})
        assert append(does_not, plain, batch(b"unguarded")).base_offset == 0
        os.kill(pid, signal.SIGKILL)
        with pytest.raises((Closed, OSError)):
            needs_it.receive_produce()
    own.await_start(PRIMARY, 2)
    with own.connect(OTHER, checked) as again:
        assert append(again, checked, batch(b"b", expected=0)).base_offset == 0
    assert log.values(checked) == [b"b"]


def test_sigterm_drains_all_workers(own: Workers, log: Log) -> None:
    topic = new_topic(own, "required")
    with own.connect(PRIMARY, topic) as one, own.connect(OTHER, topic) as other:
        assert append(one, topic, batch(b"a", expected=0)).base_offset == 0
        assert append(other, topic, batch(b"b", expected=1)).base_offset == 1
        pids = [own.worker_pid(worker) for worker in (PRIMARY, OTHER)]
        assert own.stop() == 0
        assert one.is_closed()
        assert other.is_closed()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert own.log.count("drained") == 2


def test_workers_end_when_their_supervisor_is_killed(own: Workers) -> None:
    pids = [own.worker_pid(worker) for worker in (PRIMARY, OTHER)]
    own.kill()
    until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "the workers to end")
    own.restart()
    assert own.status()["ready"]


def test_taken_port_fails_the_start_of_workers(kafka: KafkaCluster, tmp_path: Path) -> None:
    with Workers(kafka.bootstrap, tmp_path) as first:
        began = time.monotonic()
        with pytest.raises(AssertionError, match="another process listens there"):
            ProxyProcess(kafka.bootstrap, tmp_path, port=first.port, arguments=("--workers", "2"))
        assert time.monotonic() - began < READY_SECONDS, "the start timed out"
