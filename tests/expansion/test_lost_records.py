"""Prior partitions that lose records below a threshold: compacted, expired, or truncated by an unclean leader election.

This file covers the library's ordered consumers, and a group where the log is really truncated. Other groups are in
`tests/integration/test_groups.py`.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import confluent_kafka
import pytest
from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import NewTopic

from fencepost_dev.cluster import KafkaCluster
from tests.expansion.conftest import EXPANDING
from tests.expansion.test_library_consumer import Reader, each_library, places, reader
from tests.kit.waiting import until
from tests.support.clients import LIBRARIES
from tests.support.expanded import ExpandedTopic
from tests.support.expanding import expand, expansions
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.kafka import running_kafka, unique_topic
from tests.support.members import MEMBERS, Member
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, batch

pytestmark = [pytest.mark.kafka]

_PATIENCE_SECONDS = 120.0


#: A broker that compacts logs as soon as possible.
cleaning = kafka_fixture(1, properties={"log.cleaner.backoff.ms": "200"})


proxy = proxy_fixture(of="cleaning", config=EXPANDING)


def _topic(kafka: KafkaCluster, proxy: ProxyProcess, **configs: str) -> ExpandedTopic:
    """Two partitions; `fencepost.ordered.partition.expansion=any`."""
    return ExpandedTopic(kafka.bootstrap, proxy.bootstrap, f"lost-{uuid4().hex[:8]}", 2, **configs)


def _reads_until(consumer: Reader, requested: set[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not requested <= set(found):
        assert time.monotonic() < deadline, f"{found} came; {consumer.waiting()} wait"
        found += consumer.read(0.5)
    return found


@each_library
def test_what_retention_took_is_not_waited_for(library: str, cleaning: KafkaCluster, proxy: ProxyProcess) -> None:
    # Given a consumer in the middle of a prior partition whose unread records are all deleted
    topic = _topic(cleaning, proxy)
    topic.write(0, 10)
    topic.expand(3)
    topic.write(2, 4)
    with closing(KafkaAdminClient(bootstrap_servers=cleaning.bootstrap)) as admin:
        admin.delete_records({TopicPartition(topic.name, 0): 10})
    with closing(reader(library, proxy, topic.name, {0: 4})) as consumer:
        # Then it reads the new partition from its beginning
        assert _reads_until(consumer, places(2, 0, 4)) == sorted(places(2, 0, 4))


@each_library
def test_what_compaction_took_is_not_waited_for(library: str, cleaning: KafkaCluster, proxy: ProxyProcess) -> None:
    configs = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "1",
    }
    topic = _topic(cleaning, proxy, **configs)
    # Given a prior partition with ten records of one key, all below the threshold and compacted away
    topic.write(0, 10)
    topic.expand(3)
    topic.write(2, 4)

    def all_taken() -> bool:
        topic.write(0, 1)
        batches = Log(cleaning.bootstrap).batches(topic.name, 0)
        return all(each.base_offset >= 10 for each in batches if each.values)

    until(all_taken, "compaction", pause_seconds=0.3)
    with closing(reader(library, proxy, topic.name, {0: 5})) as consumer:
        found = _reads_until(consumer, places(2, 0, 4))
    # Then it reads the remaining records of the prior partition first, none of them below the threshold
    assert [place for place in found if place[0] == 2] == sorted(places(2, 0, 4))
    assert all(offset >= 10 for partition, offset in found if partition == 0)


@each_library
def test_what_was_truncated_is_not_waited_for(library: str, cleaning: KafkaCluster, proxy: ProxyProcess) -> None:
    # Given a threshold above the log end
    topic = _topic(cleaning, proxy)
    topic.write(0, 5)
    topic.expand_by_hand(3, thresholds=[9, 0])
    topic.write(2, 4)
    with closing(reader(library, proxy, topic.name)) as consumer:
        found = _reads_until(consumer, places(2, 0, 4))
    # Then it reads the existing records first
    assert found == [*sorted(places(0, 0, 5)), *sorted(places(2, 0, 4))]


def _append(address: str, topic: str, partition: int, values: list[bytes]) -> None:
    with Log(address).connect(topic, partition) as connection:
        for value in values:
            # A broker may be named as leader before it has learned that.
            until(lambda v=value: connection.append(topic, batch(v), partition=partition).error_code == 0, "an append")  # type: ignore[misc]


@pytest.mark.soak
@pytest.mark.parametrize("client", [*LIBRARIES, "librdkafka-eager", "librdkafka-consumer"])
def test_unclean_leader_truncates_prior_partition_below_threshold(client: str, tmp_path: Path) -> None:
    # Given a prior partition with two replicas: the second is down while the last records are written, and the
    # expansion's threshold lies after them. (State topic and groups are on the first broker, which stays.)
    with running_kafka(1) as kafka, ProxyProcess(kafka.bootstrap, tmp_path, config=EXPANDING) as proxy:
        leader, follower = kafka.add_broker(), kafka.add_broker()
        topic, group = unique_topic("ordered"), f"truncated-{uuid4().hex[:8]}"
        with closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
            configs = {"unclean.leader.election.enable": "true", "min.insync.replicas": "1"}
            admin.create_topics([NewTopic(topic, replica_assignments={0: [leader, follower]}, topic_configs=configs)])
        first = str(kafka.address(1))

        def led_by(node_id: int, *, in_sync: int) -> bool:
            with Connection(first) as connection:
                found = connection.metadata(topic).topics[0].partitions
            zero = next((each for each in found if each.partition_index == 0), None)
            return zero is not None and zero.leader_id == node_id and len(zero.isr_nodes) == in_sync

        until(lambda: led_by(leader, in_sync=2), f"{topic} to appear")
        _append(first, topic, 0, [b"%d" % n for n in range(5)])
        kafka.kill(follower)
        until(lambda: led_by(leader, in_sync=1), "the follower to leave the in-sync replicas")
        _append(first, topic, 0, [b"%d" % n for n in range(5, 9)])
        until(lambda: expand(proxy.bootstrap, topic, 2, assignments=[[1, leader]])[0] == 0, f"{topic} to be expanded")
        assert [each.thresholds for each in expansions(proxy.bootstrap, topic)] == [(9,)]

        # When the leader fails permanently, and the replica that lacks the records becomes leader
        kafka.kill(leader)
        kafka.restart(follower, wait=False)
        until(lambda: led_by(follower, in_sync=1), "an unclean election")
        until(lambda: Log(first).end(topic, 0) == 5, "the log to be shorter")
        _append(first, topic, 1, [b"new"] * 3)

        # Then a consumer that has read the remaining records does not wait for the lost ones
        if client in LIBRARIES:
            with closing(reader(client, proxy, topic, {0: 2})) as consumer:
                assert _reads_until(consumer, places(1, 0, 3)) == [*sorted(places(0, 2, 5)), *sorted(places(1, 0, 3))]
            return
        consumer_of_group = confluent_kafka.Consumer({"bootstrap.servers": first, "group.id": group})
        consumer_of_group.commit(offsets=[confluent_kafka.TopicPartition(topic, 0, 5)], asynchronous=False)
        consumer_of_group.close()
        with Member(MEMBERS[client], proxy.bootstrap, topic, group) as member:
            until(lambda: len(member.read_of(1)) == 3, f"the new partition's records: {member.errors}")
            assert [each.partition for each in member.read] == [1] * 3
