"""The proxy is killed at any moment. No accepted append is lost, no refused append is in the log, and every check stays
on.

Only the state topic holds the checks. A process that has not read it knows of none.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kafka.protocol.admin import DeleteRecordsRequest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.threads import working
from tests.kit.waiting import until
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.proxy import ProxyProcess
from tests.support.raw import GZIP, Answer, Closed, Connection, Log, Producer, Record, batch
from tests.support.writers import Ledger, Writer, writing

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(480)]

OK, UNKNOWN_TOPIC_OR_PARTITION, NOT_LEADER, TIMED_OUT, POLICY_VIOLATION = 0, 3, 6, 7, 44
CHECK = "fencepost.check.expected.offsets"
STATE_TOPIC = "__fencepost_state"
LEASE_SECONDS = 1.0
CONFIG = f"config_lease_seconds = {LEASE_SECONDS}\n[limits]\ntakeover_seconds = 0.5\n"
#: Much longer than any other delay in these tests.
TAKEOVER_SECONDS = 25.0
PATIENCE_SECONDS = 90.0
SEED = 20_263


#: A cluster whose state topic tests may damage and whose broker they may pause.
cluster = kafka_fixture()


@pytest.fixture
def log(cluster: KafkaCluster) -> Log:
    return Log(cluster.bootstrap)


proxy = proxy_fixture(of="cluster", scope="function", config=CONFIG, unexpected=("Traceback", "crashed"))


def checked_topic(proxy: ProxyProcess, log: Log, topic: str, check: str) -> str:
    """Switch the check on by an admin call, so that only the state topic holds it."""
    with Connection(proxy.bootstrap, timeout_seconds=60) as client:
        assert client.create_topic(topic) == (OK, None)
        assert log.end(topic) == 0
        assert client.alter_topic(topic, {CHECK: check}) == (OK, None)
    return topic


def reported(client: Connection, topic: str, records: bytes) -> Answer:
    """The first response other than 6, which a proxy returns without appending when its lease has expired."""

    def answer() -> Answer | None:
        last = client.append(topic, records)
        return None if last.error_code == NOT_LEADER else last

    found: Answer = until(answer, f"an answer from {topic}", seconds=PATIENCE_SECONDS)
    return found


# --- the proxy is killed ----------------------------------------------------------------------------------------------


@dataclass
class Probes:
    """Unconditional appends to a `required` topic, from the moment the port accepts connections."""

    address: Callable[[], str]
    topic: str
    answers: Counter[str] = field(default_factory=Counter)

    def run(self, done: threading.Event) -> None:
        while not done.is_set():
            # One connection per append. Many of them wait while the process starts.
            with suppress(OSError, Closed), Connection(self.address(), timeout_seconds=30) as connection:
                producer = Producer(1 << 50, 0, 0) if random.random() < 0.5 else None
                answer = connection.append(self.topic, batch(b"unchecked", producer=producer), timeout_ms=1000)
                self.answers[f"{answer.error_code} {(answer.message or 'OK').split()[0]}"] += 1
            time.sleep(0.01)

    def check(self, log: Log) -> None:
        assert b"unchecked" not in log.values(self.topic)
        assert self.answers.keys() <= {f"{NOT_LEADER} TRY_AGAIN", f"{POLICY_VIOLATION} EXPECTATION_REQUIRED"}
        assert self.answers


class Restarts:
    def __init__(self, proxy: ProxyProcess, rng: random.Random) -> None:
        self._proxy = proxy
        self._rng = rng
        self._pool = ThreadPoolExecutor(1)
        self.counts: Counter[str] = Counter()

    def kill_while_it_serves(self) -> None:
        assert self._proxy.running
        time.sleep(self._rng.uniform(0, 0.4))
        self._proxy.kill()
        self.counts["while it served"] += 1

    def kill_while_it_starts(self) -> None:
        starting = self._start()
        time.sleep(self._rng.uniform(0, 1.2))
        # The proxy may be ready by now, which is a valid moment too.
        self._proxy.kill()
        with suppress(AssertionError):
            starting.result()
        self.counts["while it started"] += 1

    def bring_back(self) -> None:
        self._proxy.restart()

    def _start(self) -> Future[None]:
        before = self._proxy.pid
        starting = self._pool.submit(self._proxy.restart)
        until(lambda: self._proxy.pid != before or starting.done(), "a new process")
        return starting

    def close(self) -> None:
        self._pool.shutdown()


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(20, marks=pytest.mark.timeout(900)),
        pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_the_proxy_is_killed_at_any_moment(
    times: int, proxy: ProxyProcess, log: Log, unique_topic: Callable[..., str]
) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    probed, *topics = (
        checked_topic(proxy, log, unique_topic(f"restarts-{check}"), check)
        for check in ("required", "required", "true")
    )
    required, checked = map(Ledger, topics)
    named, idempotent = {"named": True}, {"idempotent": True, "conditional": False, "pause_seconds": 0.005}
    writers = [
        Writer(name, [proxy], ledger, timeout_ms=3000, **settings)
        for name, ledger, settings in (
            ("a", required, named),
            ("b", required, named),
            ("c", checked, named),
            ("idempotent", checked, idempotent),
        )
    ]
    probes = Probes(lambda: f"127.0.0.1:{proxy.port}", probed)
    restarts = Restarts(proxy, rng)

    def continue_appending() -> None:
        before = [each.ledger.accepted(each.name) for each in writers]

        def continued() -> bool:
            for each in writers:
                each.raise_error()
            now = [each.ledger.accepted(each.name) for each in writers]
            return sum(later > earlier for later, earlier in zip(now, before, strict=True)) >= 3

        until(continued, "the writers to get on", seconds=PATIENCE_SECONDS)

    with writing(*writers), working(probes.run):
        try:
            for number in range(times):
                if number % 4 == 3:
                    restarts.kill_while_it_starts()
                    restarts.bring_back()
                else:
                    continue_appending()
                    restarts.kill_while_it_serves()
                    if number % 4 != 2:
                        restarts.bring_back()
            continue_appending()
        finally:
            restarts.close()
            if not proxy.running:
                proxy.restart()
    print(f"killed {dict(restarts.counts)}; probes: {dict(probes.answers)}\nrequired: {required}\ntrue: {checked}")
    for ledger in (required, checked):
        ledger.check(log)
    assert required.misplaced() == 0
    probes.check(log)
    assert required.lost + checked.lost > times / 2, "too few responses were lost: the kills had no effect"


def test_takeover_waits_for_possibly_queued_appends(
    cluster: KafkaCluster, log: Log, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    """On `true` topics, after a process was killed. Not on `required` topics, and not after an orderly exit."""
    config = f"config_lease_seconds = {LEASE_SECONDS}\n[limits]\ntakeover_seconds = {TAKEOVER_SECONDS}\n"
    with Connection(cluster.bootstrap) as direct:
        start_anew(direct)  # removes the records of proxies that other tests killed
    with ProxyProcess(cluster.bootstrap, tmp_path, config=config) as proxy:
        required = checked_topic(proxy, log, unique_topic("restarts"), "required")
        checked = checked_topic(proxy, log, unique_topic("restarts"), "true")
        numbers = itertools.count()

        def answer(client: Connection, topic: str) -> Answer:
            return client.append(topic, batch(b"%d" % next(numbers), expected=log.end(topic)), timeout_ms=900)

        def accepted(topic: str) -> bool:
            with Connection(proxy.bootstrap, timeout_seconds=60) as client:
                return answer(client, topic).error_code == OK

        def accepted_at_once(topic: str) -> None:
            """The proxy may have to read the log end first."""
            until(lambda: accepted(topic), f"an append to {topic}", seconds=TAKEOVER_SECONDS / 2)

        assert proxy.stop() == 0
        proxy.restart()
        accepted_at_once(required)
        accepted_at_once(checked)

        proxy.kill()
        proxy.restart()
        with Connection(proxy.bootstrap, timeout_seconds=60) as client:
            waits = answer(client, checked)
            assert waits.error_code == NOT_LEADER, waits
            assert (waits.message or "").startswith("TRY_AGAIN"), waits
            assert reported(client, checked, batch(b"says nothing")).error_code == OK
        accepted_at_once(required)
        until(lambda: accepted(checked), "the end of the takeover", seconds=PATIENCE_SECONDS)


def test_a_broker_that_hangs_while_the_proxy_starts(
    cluster: KafkaCluster, proxy: ProxyProcess, log: Log, unique_topic: Callable[..., str]
) -> None:
    """The broker is paused for longer than the lease during the start. The proxy checks the topic or refuses to
    append."""
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    topic = checked_topic(proxy, log, unique_topic("restarts"), "required")
    probes = Probes(lambda: f"127.0.0.1:{proxy.port}", topic)
    done = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        probing = pool.submit(probes.run, done)
        try:
            for _ in range(3):
                proxy.kill()
                starting = pool.submit(proxy.restart)
                time.sleep(rng.uniform(0.1, 1.0))
                cluster.pause(1)
                try:
                    time.sleep(LEASE_SECONDS + 0.3)
                finally:
                    cluster.resume(1)
                starting.result()
        finally:
            done.set()
        probing.result()
    print(f"probes: {dict(probes.answers)}")
    probes.check(log)
    with Connection(proxy.bootstrap) as client:
        until(
            lambda: client.append(topic, batch(b"x", expected=0))[:2] == (OK, 0),
            "the broker to be itself again",
            seconds=PATIENCE_SECONDS,
        )


# --- an unusable state topic ------------------------------------------------------------------------------------------


def test_kafka_is_not_there_at_the_start(
    cluster: KafkaCluster, proxy: ProxyProcess, log: Log, unique_topic: Callable[..., str]
) -> None:
    """The proxy serves no client before it has read the state topic. Requests sent earlier are then checked."""
    topic = checked_topic(proxy, log, unique_topic("restarts"), "required")
    proxy.kill()
    cluster.pause(1)
    try:
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(proxy.restart)
            address = f"127.0.0.1:{proxy.port}"
            early = until(lambda: Connection(address, timeout_seconds=60), "the port", seconds=PATIENCE_SECONDS)
            early.send_produce({topic: {0: batch(b"unchecked")}})
            early.socket.settimeout(2.0)
            with pytest.raises(TimeoutError):
                early.receive_produce()
            early.socket.settimeout(60.0)
            assert not starting.done()
            cluster.resume(1)
            starting.result()
            with suppress(Closed):  # a response is allowed too
                answer = early.receive_produce()[1][topic, 0]
                assert answer.error_code in (NOT_LEADER, POLICY_VIOLATION), answer
            early.close()
    finally:
        cluster.resume(1)
    with Connection(proxy.bootstrap) as client:
        assert reported(client, topic, batch(b"unchecked")).error_code == POLICY_VIOLATION
        assert reported(client, topic, batch(b"x", expected=0))[:2] == (OK, 0)
    assert log.values(topic) == [b"x"]


def _a_compressed_batch(cluster: KafkaCluster, direct: Connection) -> None:
    assert direct.alter_topic(STATE_TOPIC, {"compression.type": "gzip"}) == (OK, None)

    def compressed() -> bool:
        # The log applies the config a moment later.
        assert direct.append(STATE_TOPIC, batch(Record(b"{}", key=b"no-such-kind/x"))).error_code == OK
        return Log(cluster.bootstrap).batches(STATE_TOPIC)[-1].codec == GZIP

    until(compressed, "a compressed batch")


def _a_config_of_a_newer_version(cluster: KafkaCluster, direct: Connection) -> None:
    value = (
        b'{"topic_id": "%s", "configs": {"fencepost.check.expected.offsets": "sometimes"}}' % str(uuid.uuid4()).encode()
    )
    assert direct.append(STATE_TOPIC, batch(Record(value, key=b"topic-config/newer"))).error_code == OK


def _another_clusters_producer_id(cluster: KafkaCluster, direct: Connection) -> None:
    value = b'{"cluster_id": "another", "producer_id": 7}'
    key = b"producer-id/%s" % str(uuid.uuid4()).encode()
    assert direct.append(STATE_TOPIC, batch(Record(value, key=key))).error_code == OK


def _deleted_records(cluster: KafkaCluster, direct: Connection) -> None:
    assert direct.alter_topic(STATE_TOPIC, {"cleanup.policy": "compact,delete"}) == (OK, None)
    queried = DeleteRecordsRequest.DeleteRecordsTopic
    partition = queried.DeleteRecordsPartition(partition_index=0, offset=1)
    request = DeleteRecordsRequest(topics=[queried(name=STATE_TOPIC, partitions=[partition])], timeout_ms=10_000)
    assert direct.query(request, 2).topics[0].partitions[0].error_code == OK
    assert direct.alter_topic(STATE_TOPIC, {"cleanup.policy": "compact"}) == (OK, None)


SPOILT = {
    "it cannot be read": (_a_compressed_batch, "compression.type"),
    "it says what only a newer version knows": (_a_config_of_a_newer_version, "newer version"),
    "it is another cluster's": (_another_clusters_producer_id, "cluster another"),
    "it lost records": (_deleted_records, "lost records"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_state_topic_that_cannot_be_relied_on(
    how: str, cluster: KafkaCluster, tmp_path: Path, log: Log, unique_topic: Callable[..., str]
) -> None:
    """The running process refuses all appends. A new process waits until the topic is repaired."""
    spoil, reason = SPOILT[how]
    with Connection(cluster.bootstrap) as direct:
        start_anew(direct)
        with ProxyProcess(cluster.bootstrap, tmp_path, config=CONFIG) as proxy:
            topic = checked_topic(proxy, log, unique_topic("restarts"), "required")
            with Connection(proxy.bootstrap, timeout_seconds=60) as client:
                assert reported(client, topic, batch(b"x", expected=0))[:2] == (OK, 0)

                spoil(cluster, direct)

                # Appends are handled by the last view until the lease expires.
                at = itertools.count(1)
                until(
                    lambda: client.append(topic, batch(b"y", expected=next(at))).error_code == NOT_LEADER,
                    "appends to be answered 6",
                    seconds=PATIENCE_SECONDS,
                )
                # The failure is permanent, not a timeout.
                until(lambda: "state topic failed" in proxy.log, "the report of it", seconds=PATIENCE_SECONDS)
                end = log.end(topic)
                for records in (batch(b"unchecked"), batch(b"late", expected=end)):
                    answer = client.append(topic, records)
                    assert answer.error_code == NOT_LEADER, answer
            proxy.kill()
        # A new process reports the reason, waits for an operator, and then serves.
        own = tmp_path / "next"
        own.mkdir()
        with ThreadPoolExecutor(1) as pool:
            starting = pool.submit(ProxyProcess, cluster.bootstrap, own, config=CONFIG)
            until(lambda: reason in logged(own), "it to say what is wrong", seconds=PATIENCE_SECONDS)
            assert not starting.done(), logged(own)
            start_anew(direct)
            with starting.result(PATIENCE_SECONDS) as proxy:
                assert "serving" in proxy.log
        start_anew(direct)
    assert log.end(topic) == end
    assert not {b"unchecked", b"late"} & set(log.values(topic))


def logged(directory: Path) -> str:
    return "".join(each.read_text() for each in directory.glob("*.log"))


def start_anew(direct: Connection) -> None:
    """Delete the state topic while no proxy runs, as an operator may."""
    direct.delete_topic(STATE_TOPIC)
    until(lambda: direct.metadata(STATE_TOPIC).topics[0].error_code == UNKNOWN_TOPIC_OR_PARTITION, "its deletion")
