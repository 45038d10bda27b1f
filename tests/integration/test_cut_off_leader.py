"""The leader of the state topic, or of a checked partition, is cut off from the other brokers, but not from a proxy
with outdated metadata.

The isolated broker does not learn that it lost leadership: it still responds, with outdated metadata. Records that
other instances store with the new leader must still take effect where the proxy needs the current state.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from kafka.protocol.metadata import FindCoordinatorRequest

from fencepost_proxy.types import Address
from tests.kit.stage import NODES
from tests.kit.waiting import until
from tests.support.cut_off import CutOffCluster, cut_off_cluster
from tests.support.kafka import unique_topic
from tests.support.messages import Fields, RawConnection
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Answer, Connection, Producer, batch, produce_request
from tests.support.three_brokers import LIMITS
from tests.support.transactions import Transactional, abort_as_an_admin, end_request, init_request

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(400)]

OK, POLICY_VIOLATION, ABORTABLE = 0, 44, 120
_AGAIN = frozenset({3, 5, 6, 7, 14, 15, 16, 51})
_METADATA, _ELECT_LEADERS, _REASSIGN = 3, 43, 45
STATE_TOPIC = "__fencepost_state"
_PATIENCE_SECONDS = 90.0


def query(address: str, api_key: int, version: int, body: Fields) -> Fields:
    with RawConnection(Address.parse(address), 30.0) as connection:
        return connection.query(api_key, version, body)


def leader(address: str, topic: str) -> int:
    """The leader of partition 0 in this broker's metadata."""
    (found,) = query(address, _METADATA, 9, {"Topics": [{"Name": topic}]})["Topics"]
    return int(found["Partitions"][0]["LeaderId"]) if found["Partitions"] else -1


def lead(kafka: CutOffCluster, topic: str, node_id: int) -> None:
    requested = {"PartitionIndex": 0, "Replicas": [node_id, *(each for each in NODES if each != node_id)]}
    elected = {"ElectionType": 0, "TopicPartitions": [{"Topic": topic, "Partitions": [0]}], "TimeoutMs": 20_000}

    def led() -> bool:
        topics = [{"Name": topic, "Partitions": [requested]}]
        query(kafka.wire(node_id), _REASSIGN, 0, {"TimeoutMs": 20_000, "Topics": topics})
        query(kafka.wire(node_id), _ELECT_LEADERS, 2, elected)
        return all(leader(kafka.wire(each), topic) == node_id for each in NODES)

    until(led, f"broker {node_id} to lead {topic}", seconds=_PATIENCE_SECONDS)


def coordinator(address: str, transactional_id: str) -> int:
    """Its coordinator in this broker's metadata."""

    def found() -> Any:
        with Connection(address) as client:
            request = FindCoordinatorRequest(key_type=1, coordinator_keys=[transactional_id])
            (answer,) = client.query(request, 4).coordinators
        return None if answer.error_code else (answer.node_id,)

    (node_id,) = until(found, "a coordinator", seconds=_PATIENCE_SECONDS)
    return int(node_id)


def retried(query_message: Callable[[], Any], code: Callable[[Any], int]) -> Any:
    def queried() -> Any:
        answer = query_message()
        return None if code(answer) in _AGAIN else answer

    return until(queried, "an answer", seconds=_PATIENCE_SECONDS)


@dataclass(frozen=True, slots=True)
class CutOff:
    """`believing` – proxies that query `lost` first. `informed` queries only the `others`.

    `lost` was the coordinator of `old_id`, and not of `new_id`. `begun`: transactions, each with a record on partition
    0 of a topic that `lost` led.
    """

    kafka: CutOffCluster
    lost: int
    others: tuple[int, int]
    believing: tuple[ProxyProcess, ProxyProcess]
    informed: ProxyProcess
    unchecked: str
    old_id: str
    new_id: str
    begun: Mapping[str, Transactional]

    @property
    def still_believed(self) -> bool:
        return leader(self.kafka.wire(self.lost), STATE_TOPIC) == self.lost


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutOff]:
    """A state topic whose leader is cut off from the other brokers, but not from the `believing` proxies."""
    with cut_off_cluster() as kafka, ExitStack() as stack:

        def proxy(name: str, *nodes: int) -> ProxyProcess:
            upstream = ",".join(map(kafka.wire, nodes))
            return stack.enter_context(
                ProxyProcess(
                    upstream,
                    tmp_path_factory.mktemp(name),
                    config=CHECKED_BY_NAME + LIMITS,
                    module="tests.support.querying_first",
                    environment={"FIRST": kafka.wire(nodes[0])},
                )
            )

        lost = NODES[0]
        here, there = (each for each in NODES if each != lost)
        believing = proxy("believing", lost, here, there), proxy("believing too", lost, here, there)
        unchecked = unique_topic("plain")
        with Connection(believing[0].bootstrap) as admin:
            assert admin.create_topic(unchecked, on=[here, there, lost]) == (OK, None)
        lead(kafka, STATE_TOPIC, lost)
        for each in believing:
            assert unconditional(each, here, unchecked) == OK

        names = iter(lambda: unique_topic("txn"), "")
        old_id, new_id = (
            next(name for name in names if (coordinator(kafka.wire(here), name) == lost) is old)
            for old in (True, False)
        )
        Transactional(kafka.wire(lost), old_id).connection.close()  # the old coordinator knows its producer
        begun = {}
        for _ in LATER:
            topic = unique_topic("checked")
            name = next(name for name in names if coordinator(kafka.wire(here), name) != lost)
            node = coordinator(kafka.wire(here), name)
            with Connection(believing[1].bootstrap) as admin:
                assert admin.create_topic(topic, on=[lost, here, there]) == (OK, None)
            lead(kafka, topic, lost)
            address = f"127.0.0.1:{believing[1].port + 1 + node}"
            begun[topic] = stack.enter_context(Transactional(address, name, timeout_ms=300_000))
            appended = append_in(begun[topic], f"127.0.0.1:{believing[1].port + 1 + lost}", topic, 0)
            assert appended.error_code == OK, appended
        kafka.cut_off(lost)
        for topic in (STATE_TOPIC, *begun):
            until(
                lambda topic=topic: leader(kafka.wire(here), topic) in (here, there),  # type: ignore[misc]
                "another leader",
                seconds=_PATIENCE_SECONDS,
            )
        informed = proxy("informed", here, there)
        yield CutOff(kafka, lost, (here, there), believing, informed, unchecked, old_id, new_id, begun)


def append_in(transaction: Transactional, address: str, topic: str, expected: int) -> Answer:
    """One record, by the leader at this address."""

    def append() -> Answer:
        producer = transaction.producer._replace(sequence=transaction.sequences.get((topic, 0), 0))
        records = batch(b"one", expected=expected, producer=producer, transactional=True)
        with Connection(address) as client:
            client.send(produce_request({topic: {0: records}}, -1, 10_000, transaction.name), 12)
            return client.receive_produce(12)[1][topic, 0]

    answer: Answer = retried(append, lambda answer: int(answer.error_code))
    transaction.sequences[topic, 0] = transaction.sequences.get((topic, 0), 0) + 1
    return answer


def abort_part(kafka: CutOffCluster, led_by: int, topic: str, transaction: Transactional) -> None:
    abort_as_an_admin(kafka.wire(led_by), topic, transaction.producer)


def append_elsewhere(kafka: CutOffCluster, led_by: int, topic: str, transaction: Transactional) -> None:
    assert append_in(transaction, kafka.wire(led_by), topic, 7)[:2] == (OK, 1)


#: What happens at a partition's new leader.
LATER = {"part of it is aborted": abort_part, "an append bypasses the proxy": append_elsewhere}


def unconditional(proxy: ProxyProcess, led_by: int, topic: str) -> int:
    """The final error code of an append without an expected offset."""

    def append() -> Answer:
        with Connection(f"127.0.0.1:{proxy.port + 1 + led_by}") as client:
            return client.append(topic, batch(b"anything"), acks=-1)

    return int(retried(append, lambda answer: int(answer.error_code)).error_code)


def test_switched_on_check_applies_despite_old_leader_configs(cut_off: CutOff) -> None:
    # Given a topic whose check was switched on later, through the informed proxy,
    here, _ = cut_off.others
    proxy = cut_off.believing[0]
    with Connection(cut_off.informed.bootstrap) as admin:

        def switched() -> bool:
            return admin.alter_topic(cut_off.unchecked, {"fencepost.check.expected.offsets": "required"})[0] == OK

        until(switched, "the check to be switched on", seconds=_PATIENCE_SECONDS)
    assert cut_off.still_believed

    # Then the other proxy accepts no unchecked append from then on, and learns of the check.
    assert unconditional(proxy, here, cut_off.unchecked) == POLICY_VIOLATION
    assert cut_off.still_believed


@pytest.mark.parametrize("old", [False, True], ids=["another-coordinator", "old-coordinator"])
def test_proxy_using_old_leader_refuses_invalid_commit(cut_off: CutOff, old: bool) -> None:
    kafka, lost, informed, believing = cut_off.kafka, cut_off.lost, cut_off.informed, cut_off.believing[1]
    here, there = cut_off.others
    name = cut_off.old_id if old else cut_off.new_id
    assert cut_off.still_believed

    # Given a transaction through the informed proxy, with one matching and one stale expected offset,
    good, bad = unique_topic("checked"), unique_topic("checked")
    with Connection(informed.bootstrap) as admin:
        assert admin.create_topic(good, on=[here, there]) == (OK, None)
        assert admin.create_topic(bad, on=[there, here]) == (OK, None)
    until(lambda: coordinator(kafka.wire(here), name) != lost, "another coordinator", seconds=_PATIENCE_SECONDS)
    node = coordinator(kafka.wire(here), name)

    def at(address: str, request: Any, version: int) -> Any:
        with Connection(address) as client:
            return client.query(request, version)

    init = init_request(name, 300_000)
    found = retried(lambda: at(kafka.wire(node), init, 4), lambda answer: int(answer.error_code))
    producer = Producer(found.producer_id, found.producer_epoch, 0)

    def append(topic: str, led_by: int, expected: int) -> Answer:
        records = batch(b"half of it", expected=expected, producer=producer, transactional=True)
        request = produce_request({topic: {0: records}}, -1, 10_000, name)
        with Connection(f"127.0.0.1:{informed.port + 1 + led_by}") as client:
            client.send(request, 12)
            return client.receive_produce(12)[1][topic, 0]

    for topic, led_by, expected, code in ((good, here, 0, OK), (bad, there, 3, POLICY_VIOLATION)):
        reported = retried(
            lambda topic=topic, led_by=led_by, expected=expected: append(topic, led_by, expected),
            lambda answer: int(answer.error_code),
        )
        assert reported.error_code == code, reported

    # Then the other proxy refuses the commit.
    commit = end_request(name, producer, commit=True)
    address = f"127.0.0.1:{believing.port + 1 + node}"
    reported = retried(lambda: at(address, commit, 5), lambda answer: int(answer.error_code))
    assert reported.error_code == ABORTABLE
    assert cut_off.still_believed


@pytest.mark.parametrize("later", LATER)
def test_commit_is_refused_despite_old_partition_leader(cut_off: CutOff, later: str) -> None:
    # Given a transaction with a record on a partition whose leader is cut off,
    kafka, lost = cut_off.kafka, cut_off.lost
    topic = list(cut_off.begun)[list(LATER).index(later)]
    transaction = cut_off.begun[topic]
    assert leader(kafka.wire(lost), topic) == lost
    new_leader = leader(kafka.wire(cut_off.others[0]), topic)
    assert new_leader != lost

    # When its next leader loses that record, or appends one at another offset than it expects,
    LATER[later](kafka, new_leader, topic, transaction)

    # Then a proxy that believes the old leader refuses the commit.
    assert transaction.end(commit=True) == ABORTABLE
    assert leader(kafka.wire(lost), topic) == lost


def test_command_keeps_transaction_that_old_coordinator_does_not_list(cut_off: CutOff) -> None:
    # Given a transaction that only the new coordinator lists,
    kafka, topic, here = cut_off.kafka, cut_off.unchecked, cut_off.others[0]
    until(
        lambda: coordinator(kafka.wire(here), cut_off.old_id) != cut_off.lost,
        "another coordinator",
        seconds=_PATIENCE_SECONDS,
    )
    node = coordinator(kafka.wire(here), cut_off.old_id)
    with Transactional(kafka.wire(node), cut_off.old_id, timeout_ms=300_000) as transaction:
        appended = append_in(transaction, kafka.wire(here), topic, 0)
        assert appended.error_code == OK, appended
        assert coordinator(kafka.wire(cut_off.lost), cut_off.old_id) == cut_off.lost

        # Then the command does not abort a part of it.
        named = "--topic", topic, "--partition", "0", "--start-offset", str(appended.base_offset)
        command = [sys.executable, "-m", "fencepost_proxy", "transactions", "abort", *named, "--yes"]
        done = subprocess.run(
            [*command, "--bootstrap-server", kafka.wire(cut_off.lost)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        assert done.returncode == 1, done
        assert "does not include this partition" in done.stdout
        assert "its coordinator will end it" in done.stderr
        assert transaction.end(commit=True) == OK
