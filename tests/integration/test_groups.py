"""New partitions are kept from a group until it has read the prior ones: every client, against real Kafka."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from fencepost_proxy.dev.cluster import KafkaCluster
from tests.support.grown import GrownTopic
from tests.support.members import MEMBERS, WAIT_SECONDS, Member, until
from tests.support.proxy import ProxyProcess

#: Rebalances at once, and KIP-848 heartbeats that a test can wait for.
_BROKER = {
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.min.heartbeat.interval.ms": "300",
    "group.consumer.heartbeat.interval.ms": "300",
    "offsets.topic.num.partitions": "3",
    "log.cleaner.backoff.ms": "200",
    "log.retention.check.interval.ms": "500",
}
_CONFIG = """
[limits]
withheld_without_commit_seconds = 3.0
"""


@pytest.fixture(scope="module")
def groups_kafka() -> Iterator[KafkaCluster]:
    with KafkaCluster(properties=_BROKER) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def proxy(groups_kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(groups_kafka.bootstrap, tmp_path_factory.mktemp("groups")) as proxy:
        yield proxy


@pytest.fixture
def topic(groups_kafka: KafkaCluster, proxy: ProxyProcess) -> GrownTopic:
    return GrownTopic(groups_kafka.bootstrap, proxy.bootstrap, f"grown-{uuid4().hex[:8]}", 2)


def _withheld(proxy: ProxyProcess, group: str, partition: int = 2) -> bool:
    return any(
        "is withheld from a group" in line and group in line and f"-{partition}" in line
        for line in proxy.log.splitlines()
    )


def _offsets(member: Member, partition: int) -> list[int]:
    return [each.offset for each in member.read_of(partition)]


def _commit_until(member: Member, condition: Callable[[], bool], proxy: ProxyProcess) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < give_up, f"it did not come: {member.read[-3:]} {member.errors}\n{proxy.log}"
        member.commit()
        time.sleep(0.1)


@pytest.mark.parametrize("client", MEMBERS)
def test_a_new_partition_comes_once_the_prior_ones_are_read_and_committed(
    client: str, topic: GrownTopic, proxy: ProxyProcess
) -> None:
    # Given a group that has read a topic of two partitions, and has committed one half of it.
    group = f"{client}-{topic.name}"
    topic.write(0, 5)
    topic.write(1, 5)
    with MEMBERS[client](proxy.bootstrap, topic.name, group, "earliest") as member:
        until(lambda: len(member.read) == 10, f"only {member.read} was read: {member.errors}")
        member.commit()
        topic.write(0, 5)
        topic.write(1, 5)
        until(lambda: len(member.read) == 20, f"only {member.read} was read: {member.errors}")

        # When the topic grows, and the new partition is written to.
        topic.grow(3)
        topic.write(2, 7)

        # Then it is withheld: what was read is not committed yet.
        until(lambda: _withheld(proxy, group), f"nothing was withheld: {member.errors}\n{proxy.log}")
        assert not member.read_of(2)
        assert 2 not in member.assigned

        # Until it is (again, where the rebalance made it begin at its commits): then all of it comes.
        _commit_until(member, lambda: len(member.read_of(2)) == 7, proxy)
        assert _offsets(member, 2) == list(range(7))
        for prior in (0, 1):
            assert list(dict.fromkeys(_offsets(member, prior))) == list(range(10))
        until(lambda: member.assigned == {0, 1, 2}, f"it has {member.assigned}")
