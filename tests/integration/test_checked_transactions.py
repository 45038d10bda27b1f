"""Transactions on checked topics: markers take offsets and never pass a partition sequencer.

On `true` topics conditional appends of other producers wait (6) until the marker is written. `required` topics refuse
transactions before Kafka receives them. The expected state is the partition's log, read from Kafka directly.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.instances import CLIENTS, Process, Reported
from tests.support.messages import RawConnection
from tests.support.proxy import CHECKED_WITH_LONG_LEASE, ProxyProcess
from tests.support.raw import Answer, Connection, Log, Producer, batch, final_answer, produce_request
from tests.support.transactions import (
    Transactional,
    abort_as_an_admin,
    open_transactions,
    set_transaction_version,
    transaction_state,
    write_abort_marker,
)

pytestmark = pytest.mark.kafka

OK, NOT_LEADER, DENIED, POLICY_VIOLATION, OPERATION_NOT_ATTEMPTED = 0, 6, 29, 44, 55
#: Kafka assigns ids from 0.
FOREIGN_PRODUCER_ID = 1 << 40
STATE_TOPIC = "__fencepost_state"
#: Error of a refused commit, by protocol: EndTxn v3, v5.
REFUSED = {1: 59, 2: 120}
#: Other tests start and stop proxies of this cluster. Their left-over fences are not tested here.
CONFIG = f"{CHECKED_WITH_LONG_LEASE}\n[limits]\ntakeover_seconds = 0.5\n"
PATIENCE_SECONDS = 60.0
#: Long enough for a write on a busy machine, short enough for a test.
SHORT_TRANSACTION_MS = 12_000
SEED = 20_262

NewTopic = Callable[..., str]


#: One broker whose coordinator checks for timed-out transactions every 0.2 s.
cluster = kafka_fixture(1, properties={"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"})


proxy = proxy_fixture(of="cluster", config=CONFIG, unexpected=("crashed", "Traceback"))


@pytest.fixture
def log(cluster: KafkaCluster) -> Log:
    return Log(cluster.bootstrap)


@pytest.fixture
def client(proxy: ProxyProcess) -> Iterator[Connection]:
    with Connection(proxy.bootstrap, timeout_seconds=60) as connection:
        yield connection


@dataclass
class Responses:
    """The responses to conditional writers, by value."""

    answers: dict[bytes, Answer] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        return sum(answer.error_code == OK for answer in list(self.answers.values()))

    def check(self, log: Log, topic: str) -> Counter[str]:
        """Accepted values are at their expected offsets, refused ones are absent. One proxy causes no violations."""
        there = {
            value: each.base_offset + delta for each in log.batches(topic) for delta, value in enumerate(each.values)
        }
        codes: Counter[str] = Counter()
        for value, answer in self.answers.items():
            codes[(answer.message or "").split(" ")[0] or "OK"] += 1
            if answer.error_code == OK:
                assert there.get(value) == answer.base_offset == int(value.rpartition(b"/")[2]), (value, answer)
            else:
                assert answer.error_code in (NOT_LEADER, POLICY_VIOLATION), (value, answer)
                assert value not in there, (value, answer)
        return codes


@contextmanager
def beside_a_conditional_writer(address: str, topic: str, name: str = "w") -> Iterator[Responses]:
    """Append serially at the last reported end, from before the block starts until after it ends."""
    reported = Responses()
    done = threading.Event()

    def write() -> None:
        end = number = 0
        with Connection(address, timeout_seconds=60) as connection:
            while not done.is_set():
                number += 1
                value = b"%s/%d/%d" % (name.encode(), number, end)
                answer = reported.answers[value] = connection.append(topic, batch(value, expected=end), timeout_ms=4500)
                if answer.base_offset >= 0:
                    end = answer.base_offset + (answer.error_code == OK)

    def gets_on() -> None:
        before = reported.accepted
        until(
            lambda: reported.accepted > before or writing.done(),
            "progress of the writer",
            seconds=PATIENCE_SECONDS,
        )

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            gets_on()
            yield reported
            gets_on()
        finally:
            done.set()
        writing.result()


# --- all ways to end a transaction ------------------------------------------------------------------------------------


def _commit(transactional: Transactional, cluster: KafkaCluster, topic: str) -> None:
    assert transactional.end(commit=True) == OK


def _abort(transactional: Transactional, cluster: KafkaCluster, topic: str) -> None:
    assert transactional.end(commit=False) == OK


def _time_out(transactional: Transactional, cluster: KafkaCluster, topic: str) -> None:
    """The client does nothing; the coordinator aborts."""


def _fence(transactional: Transactional, cluster: KafkaCluster, topic: str) -> None:
    address = "{}:{}".format(*transactional.connection.socket.getpeername())
    with Transactional(address, transactional.name, protocol=transactional.protocol):
        pass


def _abort_as_an_admin(transactional: Transactional, cluster: KafkaCluster, topic: str) -> None:
    abort_as_an_admin(cluster.bootstrap, topic, transactional.producer)


WAYS = {
    "commit": _commit,
    "abort": _abort,
    "timeout": _time_out,
    "a second instance": _fence,
    "an admin's abort": _abort_as_an_admin,
}
Way = Callable[[Transactional, KafkaCluster, str], None]


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_conditional_appends_wait_for_the_marker(  # noqa: PLR0917
    way: str,
    protocol: int,
    cluster: KafkaCluster,
    proxy: ProxyProcess,
    client: Connection,
    log: Log,
    new_topic: NewTopic,
    unique_topic: Callable[..., str],
) -> None:
    topic = new_topic("checked", length=2)
    timeout_ms = SHORT_TRANSACTION_MS if way == "timeout" else 60_000
    with Transactional(proxy.bootstrap, unique_topic("txn"), protocol=protocol, timeout_ms=timeout_ms) as transactional:
        transactional.begin(topic)
        assert transactional.append(topic, b"t0", expected=2)[:2] == (OK, 2)
        assert transactional.append(topic, b"t1")[:2] == (OK, 3)
        if way != "commit":  # a refused append would prevent it: see test_atomic_transactions.py
            wrong = transactional.append(topic, b"wrong", expected=2)
            assert (wrong.error_code, wrong.base_offset) == (POLICY_VIOLATION, 4)

        for expected in (4, 5):
            meanwhile = client.append(topic, batch(b"mine", expected=expected), timeout_ms=3000)
            timed_out = way == "timeout" and log.end(topic) > 4  # a busy machine may be this late
            assert meanwhile.error_code in ((NOT_LEADER, POLICY_VIOLATION) if timed_out else (NOT_LEADER,)), meanwhile

        WAYS[way](transactional, cluster, topic)
        until(lambda: log.end(topic) > 4, "the marker", seconds=PATIENCE_SECONDS)
        if way == "an admin's abort":
            # The coordinator does not know of this marker and writes a second one.
            assert transaction_state(cluster.bootstrap, transactional.name)[0] == "Ongoing"
            between = client.append(topic, batch(b"between", expected=5), timeout_ms=3000)
            assert between.error_code == NOT_LEADER, between
            transactional.end(commit=False)
            until(lambda: log.end(topic) > 5, "the second marker", seconds=PATIENCE_SECONDS)
    end = log.end(topic)
    stale = final_answer(client, topic, batch(b"mine", expected=4))
    assert (stale.error_code, stale.base_offset) == (POLICY_VIOLATION, end)
    assert (stale.message or "").startswith("OFFSET_MISMATCH")
    for at in (end, end + 1):
        assert final_answer(client, topic, batch(b"after", expected=at))[:2] == (OK, at)
    assert not open_transactions(cluster.bootstrap, topic)
    assert log.values(topic) == [b"old", b"old", b"t0", b"t1", b"after", b"after"]


@pytest.mark.parametrize("prefix", ["checked", "required"])
def test_admin_markers_through_the_proxy_displace_no_append(
    prefix: str, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    topic = new_topic(prefix, length=1)
    logged = len(proxy.log)
    with (
        RawConnection(Address.parse(proxy.bootstrap)) as admin,
        beside_a_conditional_writer(proxy.bootstrap, topic) as reported,
    ):
        for _ in range(60):
            before = reported.accepted
            assert write_abort_marker(admin, topic, Producer(FOREIGN_PRODUCER_ID, 0, 0)) == OK
            until(lambda before=before: reported.accepted > before, "progress of the writer")  # type: ignore[misc]
    codes = reported.check(log, topic)
    assert codes.keys() <= {"OK", "OFFSET_MISMATCH", "TRY_AGAIN"}, codes
    assert sum(batch.is_control for batch in log.batches(topic)) == 60
    assert "OFFSET_VIOLATION" not in proxy.log[logged:]


def test_markers_of_the_proxys_own_are_refused(
    cluster: KafkaCluster, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    checked, unchecked = new_topic("required", length=1), new_topic("plain", length=1)
    shared = log.batches(checked)[0].producer_id
    ends = log.end(checked), log.end(unchecked)
    with RawConnection(Address.parse(proxy.bootstrap)) as admin:
        for topic in (checked, unchecked):
            assert write_abort_marker(admin, topic, Producer(shared, 0, 0)) == POLICY_VIOLATION
        assert write_abort_marker(admin, STATE_TOPIC, Producer(FOREIGN_PRODUCER_ID, 0, 0)) == DENIED
    assert (log.end(checked), log.end(unchecked)) == ends
    assert not any(each.is_control for each in log.batches(STATE_TOPIC))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "an admin's abort"])
def test_partition_added_but_never_written_gets_a_marker(  # noqa: PLR0917
    way: str,
    cluster: KafkaCluster,
    proxy: ProxyProcess,
    client: Connection,
    log: Log,
    new_topic: NewTopic,
    unique_topic: Callable[..., str],
) -> None:
    """The leader knows of no transaction but gets a marker. Only the proxy that relayed the request can expect it."""
    topic = new_topic("checked", length=2)
    timeout_ms = SHORT_TRANSACTION_MS if way == "timeout" else 60_000
    with Transactional(proxy.bootstrap, unique_topic("txn"), protocol=1, timeout_ms=timeout_ms) as transactional:
        transactional.begin(topic)
        meanwhile = client.append(topic, batch(b"mine", expected=2), timeout_ms=3000)
        WAYS[way](transactional, cluster, topic)
        until(lambda: log.end(topic) > 2, "the marker", seconds=PATIENCE_SECONDS)
    assert meanwhile.error_code == NOT_LEADER, meanwhile
    stale = final_answer(client, topic, batch(b"mine", expected=2))
    assert (stale.error_code, stale.base_offset) == (POLICY_VIOLATION, 3)
    assert final_answer(client, topic, batch(b"after", expected=3))[:2] == (OK, 3)
    assert log.values(topic) == [b"old", b"old", b"after"]


@pytest.mark.parametrize("way", [way for way in WAYS if way not in ("timeout", "an admin's abort")])
@pytest.mark.parametrize("written", [True, False], ids=["written to", "only added"])
def test_conditional_writer_stays_correct_during_transaction_markers(  # noqa: PLR0917
    written: bool,
    way: str,
    cluster: KafkaCluster,
    proxy: ProxyProcess,
    log: Log,
    new_topic: NewTopic,
    unique_topic: Callable[..., str],
) -> None:
    """The writer appends continuously. Whenever the marker is written, no append misses its expected offset."""
    topic = new_topic("checked")
    with beside_a_conditional_writer(proxy.bootstrap, topic) as reported:
        for _ in range(10):
            with Transactional(proxy.bootstrap, unique_topic("txn"), protocol=1) as transactional:
                transactional.begin(topic)
                if written:
                    appended_batch = until_ok(lambda transactional=transactional: transactional.append(topic, b"txn"))
                    assert appended_batch.error_code == OK
                WAYS[way](transactional, cluster, topic)
                until(
                    lambda transactional=transactional: (
                        transaction_state(cluster.bootstrap, transactional.name)[0] not in ("Ongoing", "PrepareCommit")
                    ),
                    "its end",
                    seconds=PATIENCE_SECONDS,
                )
            before = reported.accepted
            until(
                lambda before=before: reported.accepted > before,
                "progress of the writer",
                seconds=PATIENCE_SECONDS,
            )
    print(reported.check(log, topic))


def until_ok(append: Callable[[], Answer]) -> Answer:
    """Retry on 6, which another append in progress causes."""

    def queried() -> Answer | None:
        answer = append()
        return None if answer.error_code == NOT_LEADER else answer

    found: Answer = until(queried, "an answer that is not retriable", seconds=PATIENCE_SECONDS)
    return found


def test_transactions_of_both_protocols_and_conditional_writers(
    cluster: KafkaCluster, proxy: ProxyProcess, log: Log, new_topic: NewTopic, unique_topic: Callable[..., str]
) -> None:
    """Random conditional appends, with and without transactions that commit, abort, are fenced or stay empty."""
    print(f"seed {SEED}")
    topic = new_topic("checked")
    codes: Counter[int] = Counter()
    met_a_marker: list[int] = []

    def transactions(protocol: int) -> None:
        rng = random.Random(SEED + protocol)
        end = 0
        name = unique_topic("txn")
        with Transactional(proxy.bootstrap, name, protocol=protocol) as transactional:
            for _ in range(15):
                transactional.begin(topic)
                appended = refused = later = 0
                for _ in range(rng.randint(0, 3)):
                    expected = end if rng.random() < 0.5 else None
                    answer = transactional.append(topic, b"txn", expected=expected, timeout_ms=3000)
                    codes[answer.error_code] += 1
                    assert answer.error_code in (OK, NOT_LEADER, POLICY_VIOLATION), answer
                    if "OFFSET_VIOLATION" in (answer.message or ""):
                        # The append was in progress when the other transaction added the partition.
                        assert answer.message.endswith("the marker of another transaction came between"), answer
                        met_a_marker.append(protocol)
                    appended += answer.error_code == OK
                    refused += answer.error_code == POLICY_VIOLATION and expected is not None
                    later += answer.error_code == NOT_LEADER and expected is not None
                    if answer.base_offset >= 0:
                        assert expected in (None, answer.base_offset) or answer.error_code != OK
                        end = answer.base_offset + (answer.error_code == OK)
                if rng.random() < 0.2:
                    transactional.init()
                elif appended or refused or later or protocol == 1:
                    commits = rng.random() < 0.5
                    reported = transactional.end(commit=commits)
                    if not commits or not (refused or later):
                        assert reported == OK
                    elif refused:
                        assert reported == REFUSED[protocol]
                    else:
                        assert reported in (OK, REFUSED[protocol])  # depending on a retry of that append
                    if reported != OK:
                        assert transactional.end(commit=False) == OK

    with (
        beside_a_conditional_writer(proxy.bootstrap, topic, "a") as a,
        beside_a_conditional_writer(proxy.bootstrap, topic, "b") as b,
        ThreadPoolExecutor(2) as pool,
    ):
        for task in [pool.submit(transactions, protocol) for protocol in (1, 2)]:
            task.result()
    print(f"transactional {dict(codes)}", *(reported.check(log, topic) for reported in (a, b)))
    assert codes[OK] > len(met_a_marker)


def test_the_proxy_restarts_while_a_transaction_is_open(
    cluster: KafkaCluster, log: Log, unique_topic: Callable[..., str], tmp_path: Path
) -> None:
    """The new process has no state of the transaction. It learns of it from the partition's leader."""
    topic = unique_topic("checked")
    with ProxyProcess(cluster.bootstrap, tmp_path, config=CONFIG) as proxy:
        with Connection(proxy.bootstrap) as client:
            assert client.create_topic(topic) == (OK, None)
            assert log.end(topic) == 0
            assert final_answer(client, topic, batch(b"old", expected=0))[:2] == (OK, 0)
        with Transactional(cluster.bootstrap, unique_topic("txn")) as transactional:
            assert transactional.append(topic, b"txn").base_offset == 1
            proxy.kill()
            proxy.restart()
            with Connection(proxy.bootstrap) as client:
                for expected in (1, 2):
                    answer = client.append(topic, batch(b"mine", expected=expected), timeout_ms=3000)
                    assert answer.error_code == NOT_LEADER, answer
                assert transactional.end(commit=True) == OK
                until(lambda: log.end(topic) == 3, "the marker", seconds=PATIENCE_SECONDS)
                assert final_answer(client, topic, batch(b"mine", expected=3))[:2] == (OK, 3)
    assert log.values(topic) == [b"old", b"txn", b"mine"]


# --- topics that refuse transactions ----------------------------------------------------------------------------------


def test_required_topics_are_never_added_to_a_transaction(
    cluster: KafkaCluster, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """An added partition gets a marker even without writes. As in Kafka, no topic of a refused request is added."""
    required, unchecked_topic, checked = new_topic("required", length=2), new_topic("plain"), new_topic("checked")
    with Transactional(proxy.bootstrap, f"{required}-txn", protocol=1) as transactional:
        assert transactional.add({required: [0]}) == {(required, 0): POLICY_VIOLATION}
        assert transaction_state(cluster.bootstrap, transactional.name)[1] == set()
        codes = transactional.add({unchecked_topic: [0], required: [0], checked: [0]})
        skipped = OPERATION_NOT_ATTEMPTED
        assert codes == {(unchecked_topic, 0): skipped, (required, 0): POLICY_VIOLATION, (checked, 0): skipped}
        assert transaction_state(cluster.bootstrap, transactional.name)[1] == set()
        added = {(unchecked_topic, 0), (checked, 0)}
        assert transactional.add({unchecked_topic: [0], checked: [0]}) == dict.fromkeys(added, OK)
        assert transaction_state(cluster.bootstrap, transactional.name) == ("Ongoing", added)

        refused = transactional.append(required, b"txn", expected=2)
        assert refused.error_code == POLICY_VIOLATION
        assert (refused.message or "").startswith("TRANSACTIONS_NOT_SUPPORTED")
        assert client.append(required, batch(b"new", expected=2))[:2] == (OK, 2)
        assert client.append(checked, batch(b"x", expected=0), timeout_ms=3000).error_code == NOT_LEADER
        assert transactional.append(unchecked_topic, b"txn").error_code == OK
        assert transactional.end(commit=True) == REFUSED[1]  # the proxy refused a conditional append
        assert transactional.end(commit=False) == OK
    until(lambda: (log.end(unchecked_topic), log.end(checked)) == (2, 1), "the markers", seconds=PATIENCE_SECONDS)
    assert client.append(required, batch(b"new", expected=3))[:2] == (OK, 3)
    assert final_answer(client, checked, batch(b"x", expected=1))[:2] == (OK, 1)
    assert log.values(required) == [b"old", b"old", b"new", b"new"]


@pytest.mark.parametrize("beside", [(), ("plain",)], ids=["alone", "with another topic"])
def test_required_topic_refuses_appends_within_a_transaction(  # noqa: PLR0917
    beside: Sequence[str], cluster: KafkaCluster, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """Transactions v2: the first write would add the partition. The proxy refuses it before Kafka receives it."""
    required, others = new_topic("required", length=2), [new_topic(prefix) for prefix in beside]
    with Transactional(proxy.bootstrap, f"{required}-txn") as transactional:
        for expected in (None, 2, 7):
            requested = {(topic, 0): ((b"txn",), None) for topic in others}
            answers = transactional.append_all({(required, 0): ((b"txn",), expected), **requested})
            assert answers[required, 0].error_code == POLICY_VIOLATION
            if expected is not None:
                assert (answers[required, 0].message or "").startswith("TRANSACTIONS_NOT_SUPPORTED")
            assert [answers[topic, 0].error_code for topic in others] == [OK] * len(others)
        state, partitions = transaction_state(cluster.bootstrap, transactional.name)
        assert partitions == {(topic, 0) for topic in others}
        if others:
            assert transactional.end(commit=True) == REFUSED[2]  # the proxy refused a conditional append
            assert transactional.end(commit=False) == OK
            until(lambda: log.end(others[0]) == 4, "the marker", seconds=PATIENCE_SECONDS)
        else:
            assert state == "Empty"
    assert client.append(required, batch(b"new", expected=2))[:2] == (OK, 2)
    assert log.values(required) == [b"old", b"old", b"new"]


# --- conflicting transactions -----------------------------------------------------------------------------------------


def _appended_at_end(client: Connection, log: Log, topic: str) -> bool:
    """With v1, EndTxn returns before the markers are written, so the end may still move."""
    answer = client.append(topic, batch(b"mine", expected=log.end(topic)))
    assert answer.error_code in (OK, NOT_LEADER, POLICY_VIOLATION), answer
    return answer.error_code == OK


@pytest.mark.parametrize("how", ["one by one", "one by one, unconditional", "in one request"])
@pytest.mark.parametrize("protocol", [1, 2])
def test_transactions_in_opposite_partition_order_all_commit(  # noqa: PLR0917
    protocol: int, how: str, proxy: ProxyProcess, client: Connection, log: Log, new_topic: NewTopic
) -> None:
    """Neither waits for a partition while it occupies one that the other needs: one gets an error and aborts. The proxy
    always queues partitions of one request in the same order."""
    topics = [new_topic("checked"), new_topic("checked")]
    start_line = threading.Barrier(2, timeout=PATIENCE_SECONDS)
    yielded: Counter[str] = Counter()
    rounds = 6

    def append(transactional: Transactional, name: str, topics: list[str]) -> list[Answer]:
        transactional.begin(*topics)
        ends = {topic: None if "unconditional" in how else log.end(topic) for topic in topics}
        requested = {(topic, 0): ((name.encode(),), end) for topic, end in ends.items()}
        return list(transactional.append_all(requested, timeout_ms=3000).values())

    def writer(name: str, order: list[str]) -> None:
        rng = random.Random(f"{SEED}{name}")
        with Transactional(proxy.bootstrap, f"{order[0]}-{name}", protocol=protocol) as transactional:
            for _ in range(rounds):
                start_line.wait()
                done = False
                while not done:
                    answers: list[Answer] = []
                    for group in [order] if how == "in one request" else [[topic] for topic in order]:
                        answers += append(transactional, name, group)
                        if answers[-1].error_code != OK:
                            break
                    for answer in answers:
                        assert answer.error_code in (OK, NOT_LEADER, POLICY_VIOLATION), answer
                        # With v1 the other transaction may have added the partition only to write its marker there.
                        assert protocol == 1 or "OFFSET_VIOLATION" not in (answer.message or ""), answer
                    done = [answer.error_code for answer in answers] == [OK, OK]
                    assert transactional.end(commit=done) == OK
                    if not done:
                        yielded[name] += 1
                        threading.Event().wait(rng.uniform(0, 0.1))

    with ThreadPoolExecutor(2) as pool:
        for task in [pool.submit(writer, "a", topics), pool.submit(writer, "b", topics[::-1])]:
            task.result()
    print(f"protocol {protocol}: yielded {dict(yielded)}")
    for topic in topics:
        until(partial(_appended_at_end, client, log, topic), "end of the transactions", seconds=PATIENCE_SECONDS)


@pytest.mark.parametrize("protocol", [1, 2])
def test_conflicting_transaction_waits_only_without_earlier_appends(
    protocol: int, cluster: KafkaCluster, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    """Each transaction occupies the other's partition: both must abort. One aborts and begins again: it waits (6)."""
    left, right = new_topic("checked"), new_topic("checked")
    with (
        Transactional(proxy.bootstrap, f"{left}-a", protocol=protocol) as a,
        Transactional(proxy.bootstrap, f"{left}-b", protocol=protocol) as b,
    ):
        a.begin(left, right)
        b.begin(left, right)
        assert a.append(left, b"a", expected=0)[:2] == (OK, 0)
        assert b.append(right, b"b", expected=0)[:2] == (OK, 0)
        for transactional, other in ((a, right), (b, left)):
            refused = transactional.append(other, b"x", expected=1, timeout_ms=3000)
            assert refused.error_code == POLICY_VIOLATION
            assert (refused.message or "").startswith("TRANSACTION_CONFLICT"), refused
            assert transactional.end(commit=True) == REFUSED[protocol]
        assert a.end(commit=False) == OK
        a.begin(left, right)
        waits = a.append(right, b"a", expected=2, timeout_ms=3000)
        assert waits.error_code == NOT_LEADER, waits
        assert b.end(commit=False) == OK
        until(
            lambda: a.append(right, b"a", expected=log.end(right), timeout_ms=3000).error_code == OK,
            "the markers",
            seconds=PATIENCE_SECONDS,
        )


def again(connection: Connection, transactional: Transactional, topic: str, records: bytes) -> Answer:
    version = 12 if transactional.protocol == 2 else 11
    request = produce_request({topic: {0: records}}, -1, 10_000, transactional.name)

    def queried() -> Answer | None:
        connection.send(request, version)
        answer: Answer = connection.receive_produce(version)[1][topic, 0]
        return None if answer.error_code in (NOT_LEADER, 51) else answer

    found: Answer = until(queried, "an answer that is not retriable", seconds=PATIENCE_SECONDS)
    return found


@pytest.mark.parametrize("protocol", [1, 2])
def test_transactional_retry_gets_the_first_outcome(
    protocol: int, cluster: KafkaCluster, proxy: ProxyProcess, log: Log, new_topic: NewTopic
) -> None:
    """Over another connection or through an instance without state: 0 at its expected offset, else a violation."""
    topic, other = new_topic("checked", length=2), new_topic("checked", length=2)
    with Transactional(proxy.bootstrap, f"{topic}-txn", protocol=protocol) as transactional:
        transactional.begin(topic, other)
        where_expected = batch(b"x", b"y", expected=2, producer=transactional.producer, transactional=True)
        elsewhere = batch(b"z", expected=1, producer=transactional.producer, transactional=True)
        with Connection(cluster.bootstrap) as services, Connection(proxy.bootstrap) as through:
            assert again(services, transactional, topic, where_expected)[:2] == (OK, 2)
            assert again(services, transactional, other, elsewhere)[:2] == (OK, 2)
            for _ in range(2):
                assert again(through, transactional, topic, where_expected)[:2] == (OK, 2)
                violated = again(through, transactional, other, elsewhere)
                assert (violated.error_code, violated.base_offset) == (POLICY_VIOLATION, 2)
                assert "OFFSET_VIOLATION" in (violated.message or ""), violated
        assert transactional.end(commit=True) == REFUSED[protocol]
        assert transactional.end(commit=False) == OK
    assert log.values(topic) == [b"old", b"old", b"x", b"y"]


# --- clients after a refusal in a transaction -------------------------------------------------------------------------


#: Transactions that each client loses after a refused one. It does not reuse the refused batch's sequence number, so
#: that its next first batch has a sequence gap (45). The same happens without the proxy, after a batch that a broker
#: refuses. Clients that begin a new transaction recover, except aiokafka.
LOST_AFTERWARDS = {"java": 0, "confluent-kafka": 1, "kafka-python": 1, "aiokafka": None}
TRIES_MAX = 3


@pytest.mark.parametrize(("library", "version"), [("java", 1), *((library, 2) for library in CLIENTS)])
def test_a_refusal_within_a_transaction_leaves_it_abortable(  # noqa: PLR0917
    library: str,
    version: int,
    cluster: KafkaCluster,
    proxy: ProxyProcess,
    log: Log,
    new_topic: NewTopic,
    tmp_path: Path,
) -> None:
    """The same producer aborts the refused transaction and commits a later one. `version` – of transactions."""
    set_transaction_version(cluster.bootstrap, version)
    topic = new_topic("checked")
    name = f"{topic}-txn"

    def ended() -> int:
        """The log end once the marker is written."""
        until(
            lambda: transaction_state(cluster.bootstrap, name)[0].startswith(("Complete", "Empty")),
            "the coordinator",
            seconds=PATIENCE_SECONDS,
        )
        return log.end(topic)

    with Process(library, proxy.bootstrap, tmp_path) as process:

        def send(expected: int) -> Reported:
            return process.query("send", "a", topic, 0, f"expects-{expected}", expected)

        process.do("init", "a", name, 60_000)
        process.do("begin", "a")
        assert send(0) == (True, "0")
        refusal = send(99)
        assert re.search("POLICY_VIOLATION|PolicyViolation", refusal.error), refusal
        if library == "java":
            assert refusal.text.endswith(f" OFFSET_MISMATCH topic={topic} partition=0 expected=99 actual=1")
        process.do("abort", "a")
        assert ended() == 2
        committed, failed = False, []
        while not committed and len(failed) < TRIES_MAX:
            end = ended()
            # kafka-python raises an error while it gets a new epoch.
            until(lambda: process.query("begin", "a").ok, "a transaction to begin")
            first = send(end)
            if first.ok:
                assert (first.text, send(end + 1)) == (str(end), (True, str(end + 1)))
                committed = process.query("commit", "a").ok
            if not committed:
                failed.append(first)
                process.query("abort", "a")  # unless the new epoch has ended it
    print(f"{library}: {refusal}; lost afterwards: {failed}")
    lost = LOST_AFTERWARDS[library]
    assert (committed, len(failed)) == ((False, TRIES_MAX) if lost is None else (True, lost))
    values = [b"expects-%d" % each for each in ((0, end, end + 1) if committed else (0,))]
    until(lambda: log.values(topic) == values, "exactly the committed and aborted records")
