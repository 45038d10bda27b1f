"""A group does not get new partitions until it has read the prior partitions: all clients, on a real Kafka."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen
from uuid import uuid4

import confluent_kafka
import confluent_kafka.admin
import pytest
from kafka import KafkaAdminClient, TopicPartition

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import compile_java, java_command
from fencepost_proxy.cli.main import main
from tests.kit.waiting import until
from tests.support.expanded import ExpandedTopic
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.kafka import kafka_version
from tests.support.members import MEMBERS, WAIT_SECONDS, Member
from tests.support.proxy import ProxyProcess

pytestmark = pytest.mark.kafka

_JAVA = Path(__file__).parent.parent / "java"
#: Immediate rebalances, and short KIP-848 heartbeat intervals.
_BROKER = {
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.min.heartbeat.interval.ms": "300",
    "group.consumer.heartbeat.interval.ms": "300",
    "offsets.topic.num.partitions": "3",
    "log.cleaner.backoff.ms": "200",
    "log.retention.check.interval.ms": "500",
}


groups_kafka = kafka_fixture(properties=_BROKER)


proxy = proxy_fixture(of="groups_kafka")


@pytest.fixture
def topic(groups_kafka: KafkaCluster, proxy: ProxyProcess) -> ExpandedTopic:
    return ExpandedTopic(groups_kafka.bootstrap, proxy.bootstrap, f"grown-{uuid4().hex[:8]}", 2)


def _gated(proxy: ProxyProcess, group: str, partition: int = 2) -> bool:
    return any(
        "new partition gated for a group" in line and group in line and f"-{partition}" in line
        for line in proxy.log.splitlines()
    )


def _offsets(member: Member, partition: int) -> list[int]:
    return [each.offset for each in member.read_of(partition)]


def _commit_until(member: Member, condition: Callable[[], bool], proxy: ProxyProcess) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < give_up, f"timed out: {member.read[-3:]} {member.errors}\n{proxy.log}"
        member.commit()
        time.sleep(0.1)


#: In Kafka 3.9 the new protocol is a preview without librdkafka support, with and without a proxy.
_TOO_NEW = {"librdkafka-consumer"} if kafka_version().startswith("3.") else set()


@pytest.mark.brokers
@pytest.mark.parametrize("client", [each for each in MEMBERS if each not in _TOO_NEW])
def test_new_partition_is_assigned_after_prior_partition_commits(
    client: str, topic: ExpandedTopic, proxy: ProxyProcess
) -> None:
    # Given a group that has read a topic of two partitions, and has committed one half of it.
    group = f"{client}-{topic.name}"
    topic.write(0, 5)
    topic.write(1, 5)
    with Member(MEMBERS[client], proxy.bootstrap, topic.name, group) as member:
        until(lambda: len(member.read) == 10, f"only {member.read} was read: {member.errors}")
        member.commit()
        topic.write(0, 5)
        topic.write(1, 5)
        until(lambda: len(member.read) == 20, f"only {member.read} was read: {member.errors}")

        # When the topic is expanded, and the new partition is written to.
        topic.expand(3)
        topic.write(2, 7)

        # Then the new partition is gated: the records that were read are not committed yet.
        until(lambda: _gated(proxy, group), f"no partition was gated: {member.errors}\n{proxy.log}")
        assert not member.read_of(2)
        assert 2 not in member.assigned

        # After the commit (repeated if the rebalance reset the member to its commits) all records arrive.
        _commit_until(member, lambda: len(member.read_of(2)) == 7, proxy)
        assert _offsets(member, 2) == list(range(7))
        for prior_partition in (0, 1):
            assert list(dict.fromkeys(_offsets(member, prior_partition))) == list(range(10))
        until(lambda: member.assigned == {0, 1, 2}, f"it has {member.assigned}")


# ---- conditions that could block a group or make it skip records


#: This client starts fast, and commits only the last record's offset plus one.
_CLIENT = "librdkafka-eager"


def _member(proxy: ProxyProcess, topic: ExpandedTopic, group: str, reset: str = "earliest") -> Member:
    return Member(MEMBERS[_CLIENT], proxy.bootstrap, topic.name, group, reset)


def _commit(kafka: KafkaCluster, group: str, topic: str, offsets: dict[int, int]) -> None:
    """Commit for a group without members, as an admin does."""
    consumer = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    try:
        positions = [confluent_kafka.TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
        consumer.commit(offsets=positions, asynchronous=False)
    finally:
        consumer.close()


def _transaction(kafka: KafkaCluster, topic: str, partition: int, count: int, *, commit: bool) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": f"tx-{uuid4().hex}"})
    producer.init_transactions(90)
    producer.begin_transaction()
    for number in range(count):
        producer.produce(topic, f"t{number}".encode(), key=b"tx", partition=partition)
    producer.flush(90)
    if commit:
        producer.commit_transaction(90)
    else:
        producer.abort_transaction(90)


def _gets_the_new_partition(member: Member, count: int, proxy: ProxyProcess, partition: int = 2) -> None:
    until(
        lambda: len(member.read_of(partition)) >= count,
        f"{member.read} {member.errors}\n{proxy.log}",
    )
    assert _offsets(member, partition) == list(range(count))


@pytest.mark.parametrize("end", ["a committed transaction", "an aborted transaction", "retention", "truncation"])
def test_group_waits_for_no_records_that_cannot_come(
    end: str, topic: ExpandedTopic, groups_kafka: KafkaCluster, proxy: ProxyProcess
) -> None:
    """The group has committed all that it will ever commit of a prior partition, and its threshold is higher."""
    group = f"ends-{topic.name}"
    committed, thresholds = 5, None
    topic.write(0, 5)
    match end:
        case "a committed transaction":
            _transaction(groups_kafka, topic.name, 0, 3, commit=True)
            committed = 8  # the last record's offset plus one: before the marker
        case "an aborted transaction":
            _transaction(groups_kafka, topic.name, 0, 3, commit=False)
        case "retention":
            committed = 4  # the record after it is deleted before the group reads it
        case "truncation":
            thresholds = [9, 0]  # as after an unclean leader election
    _commit(groups_kafka, group, topic.name, {0: committed, 1: 0})

    if thresholds is None:
        topic.expand(3)
    else:
        topic.expand_by_hand(3, thresholds=thresholds)
    topic.write(2, 4)
    if end == "retention":
        admin = KafkaAdminClient(bootstrap_servers=groups_kafka.bootstrap)
        with closing(admin):
            admin.delete_records({TopicPartition(topic.name, 0): 5})

    with _member(proxy, topic, group) as member:
        _gets_the_new_partition(member, 4, proxy)


def test_records_before_an_aborted_end_are_waited_for(
    topic: ExpandedTopic, groups_kafka: KafkaCluster, proxy: ProxyProcess
) -> None:
    group = f"before-{topic.name}"
    topic.write(0, 5)
    _transaction(groups_kafka, topic.name, 0, 200, commit=False)
    _commit(groups_kafka, group, topic.name, {0: 4})
    topic.expand(3)
    topic.write(2, 4)
    with _member(proxy, topic, group) as member:
        until(lambda: len(member.read_of(0)) == 1, f"{member.errors}")
        until(lambda: _gated(proxy, group), proxy.log)
        assert not member.read_of(2)
        _commit_until(member, lambda: len(member.read_of(2)) == 4, proxy)
        assert [each.partition for each in member.read] == [0] + [2] * 4


def test_compacted_records_are_not_waited_for_after_reading(groups_kafka: KafkaCluster, proxy: ProxyProcess) -> None:
    # Given a compacted topic, a group before five records, and a threshold after them.
    configs = {
        "cleanup.policy": "compact",
        "segment.ms": "100",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "1",
    }
    topic = ExpandedTopic(groups_kafka.bootstrap, proxy.bootstrap, f"compact-{uuid4().hex[:8]}", 2, **configs)
    group = f"compacted-{topic.name}"
    topic.write(0, 10)
    _commit(groups_kafka, group, topic.name, {0: 5})
    topic.expand(3)
    topic.write(2, 4)
    with _member(proxy, topic, group) as member:
        until(lambda: _gated(proxy, group), proxy.log)
        # When compaction removes them, since their key got a newer record, and the group does not commit.
        topic.write(0, 1)
        for _ in range(100):
            topic.write(0, 1)
            if member.read_of(2):
                break
            time.sleep(0.3)
        # Then the group gets the new partition.
        _gets_the_new_partition(member, 4, proxy)


@pytest.mark.parametrize("client", ["librdkafka-eager", "java-eager", "java-consumer"])
def test_latest_group_reads_whole_new_partition(client: str, topic: ExpandedTopic, proxy: ProxyProcess) -> None:
    # Given a group with auto.offset.reset=latest, the clients' default.
    group = f"latest-{client}-{topic.name}"
    with Member(MEMBERS[client], proxy.bootstrap, topic.name, group, "latest") as member:
        until(lambda: member.assigned == {0, 1}, f"{member.errors}")
        while not member.read:
            topic.write(0, 1)
            time.sleep(0.2)
        member.commit()
        # When the topic is expanded, and the new partition is written to while it is gated.
        before = topic.end(0)
        topic.write(0, 3)
        topic.expand(3)
        topic.write(2, 4)
        until(lambda: any(each.offset >= before for each in member.read_of(0)), f"{member.errors}")
        # Then the group reads all of it.
        _commit_until(member, lambda: len(member.read_of(2)) >= 4, proxy)
        assert _offsets(member, 2) == [0, 1, 2, 3]


def test_a_new_group_reads_the_prior_partitions_first(topic: ExpandedTopic, proxy: ProxyProcess) -> None:
    topic.write(0, 5)
    topic.write(1, 5)
    topic.expand(3)
    topic.write(2, 5)
    group = f"new-{topic.name}"
    with _member(proxy, topic, group) as member:
        until(lambda: len(member.read) == 10, f"{member.errors}")
        assert member.assigned == {0, 1}
        _commit_until(member, lambda: len(member.read_of(2)) == 5, proxy)
        assert {each.partition for each in member.read[:10]} == {0, 1}


def test_group_reset_to_the_start_waits_again(
    topic: ExpandedTopic, groups_kafka: KafkaCluster, proxy: ProxyProcess
) -> None:
    topic.write(0, 5)
    topic.expand(3)
    topic.write(2, 5)
    group = f"reset-{topic.name}"
    # Reset on a prior partition, but in the middle of the new one: as KIP-253 specifies, it continues.
    _commit(groups_kafka, group, topic.name, {0: 0, 1: 0, 2: 3})
    with _member(proxy, topic, group) as member:
        until(lambda: len(member.read_of(2)) == 2, f"{member.errors}")
    # Reset on all partitions: it reads them in order again.
    _commit(groups_kafka, group, topic.name, {0: 0, 1: 0, 2: 0})
    with _member(proxy, topic, group) as member:
        until(lambda: len(member.read_of(0)) == 5, f"{member.errors}")
        assert not member.read_of(2)
        _commit_until(member, lambda: len(member.read_of(2)) == 5, proxy)


def test_several_expansions_open_one_after_the_other(
    topic: ExpandedTopic, groups_kafka: KafkaCluster, proxy: ProxyProcess
) -> None:
    # Given a topic that was expanded twice while its group was not running.
    group = f"twice-{topic.name}"
    topic.write(0, 3)
    _commit(groups_kafka, group, topic.name, {0: 0, 1: 0})
    topic.expand(3)
    topic.write(2, 3)
    topic.expand(4)
    topic.write(3, 3)
    with _member(proxy, topic, group) as member:
        until(lambda: len(member.read_of(0)) == 3, f"{member.errors}")
        _commit_until(member, lambda: len(member.read_of(3)) == 3, proxy)
        first = list(dict.fromkeys(each.partition for each in member.read))
        assert first == [0, 2, 3]


@pytest.mark.parametrize("client", ["librdkafka-eager", "librdkafka-consumer", "java-consumer"])
def test_restarted_proxy_assigns_what_it_had_gated(client: str, groups_kafka: KafkaCluster, tmp_path: Path) -> None:
    with ProxyProcess(groups_kafka.bootstrap, tmp_path) as proxy:
        topic = ExpandedTopic(groups_kafka.bootstrap, proxy.bootstrap, f"restart-{uuid4().hex[:8]}", 2)
        group = f"{client}-{topic.name}"
        topic.write(0, 5)
        topic.expand(3)
        topic.write(2, 5)
        with Member(MEMBERS[client], proxy.bootstrap, topic.name, group) as member:
            # Given a member with fewer partitions than its coordinator assigned, and whose proxy dies.
            until(lambda: len(member.read_of(0)) == 5 and _gated(proxy, group), f"{member.errors}\n{proxy.log}")
            proxy.kill()
            proxy.restart()
            # When it continues with the same generation through a new process, and commits.
            _commit_until(member, lambda: len(member.read_of(2)) == 5, proxy)
            # Then it gets the rest through that process, and reads none of it twice.
            assert _offsets(member, 2) == list(range(5))


@pytest.fixture
def impatient(groups_kafka: KafkaCluster, tmp_path: Path) -> Iterator[ProxyProcess]:
    """A proxy that waits only 12 seconds for a group's commits: longer than a busy machine needs to observe it."""
    config = "[limits]\ngated_without_commit_seconds = 12.0\ngated_without_progress_seconds = 12.0\n"
    with ProxyProcess(groups_kafka.bootstrap, tmp_path, config=config) as proxy:
        yield proxy


@pytest.fixture
def watched(groups_kafka: KafkaCluster, tmp_path: Path) -> Iterator[ProxyProcess]:
    """A proxy with a status page."""
    with _with_page(groups_kafka, tmp_path) as proxy:
        yield proxy


def _with_page(kafka: KafkaCluster, directory: Path) -> ProxyProcess:
    (token := directory / "token").write_text("let-them-pass\n")
    config = f'status = "127.0.0.1:0"\nstatus_token_file = "{token}"\n'
    return ProxyProcess(kafka.bootstrap, directory, config=config)


def test_group_without_commits_gets_new_partition_after_timeout(topic: ExpandedTopic, impatient: ProxyProcess) -> None:
    group = f"silent-{topic.name}"
    topic.write(0, 5)
    topic.expand(3)
    topic.write(2, 5)
    with _member(impatient, topic, group) as member:
        until(lambda: _gated(impatient, group), impatient.log)
        assert not member.read_of(2)
        _gets_the_new_partition(member, 5, impatient)
    assert "limits.gated_without_commit_seconds" in impatient.log


def test_member_committing_only_on_records_gets_new_partition(topic: ExpandedTopic, impatient: ProxyProcess) -> None:
    """Like franz-go with a blocking poll: records are committed by the next poll that returns records."""
    group = f"blocking-{topic.name}"
    topic.write(0, 5)
    topic.write(1, 5)
    settings: dict[str, Any] = {"bootstrap.servers": impatient.bootstrap, "group.id": group}
    settings |= {"auto.offset.reset": "earliest"}
    settings |= {"topic.metadata.refresh.interval.ms": 500, "enable.auto.commit": False}
    # A rebalance would make an eager member read its last records again, and commit them.
    consumer = confluent_kafka.Consumer(settings | {"partition.assignment.strategy": "cooperative-sticky"})
    read: dict[int, list[int]] = {}
    polled: list[confluent_kafka.Message] = []
    give_up = time.monotonic() + WAIT_SECONDS
    expanded = False
    try:
        consumer.subscribe([topic.name])
        while len(read.get(2, [])) < 5:
            assert time.monotonic() < give_up, f"{read}\n{impatient.log}"
            records = [each for each in consumer.consume(1, 0.2) if each.error() is None]
            if records and polled:
                consumer.commit(message=polled[-1], asynchronous=False)
            polled = records or polled
            for each in records:
                read.setdefault(each.partition(), []).append(each.offset())
            if not expanded and len({*read.get(0, ())}) == len({*read.get(1, ())}) == 5:
                topic.expand(3)
                topic.write(2, 5)
                expanded = True
    finally:
        consumer.close()
    assert _gated(impatient, group)
    assert read[2] == list(range(5))
    assert "limits.gated_without_progress_seconds" in impatient.log


def test_latest_group_without_commits_does_not_wait(topic: ExpandedTopic, proxy: ProxyProcess) -> None:
    # Given prior partitions with records, and a group that started after them and so has nothing to commit.
    group = f"idle-{topic.name}"
    topic.write(0, 5)
    topic.write(1, 5)
    topic.expand(3)
    with _member(proxy, topic, group, "latest") as member:
        until(lambda: _gated(proxy, group), proxy.log)
        until(lambda: member.assigned == {0, 1, 2}, f"{member.assigned} {member.errors}\n{proxy.log}")
        topic.write(2, 3)
        _gets_the_new_partition(member, 3, proxy)


def test_operator_sees_waiting_group_and_forces_its_assignment(
    groups_kafka: KafkaCluster,
    topic: ExpandedTopic,
    watched: ProxyProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    group = f"operator/{topic.name}"
    topic.write(0, 7)
    topic.expand(3)
    topic.write(2, 5)
    with _member(watched, topic, group) as member:
        until(lambda: len(member.read_of(0)) == 7, f"{member.errors}")
        waits = ["partition 0: nothing committed, threshold 7"]
        until(lambda: [each["waits"] for each in _waiting(watched, group)] == [waits], watched.log)
        (waiting,) = _waiting(watched, group)
        assert (waiting["topic"], waiting["partition"]) == (topic.name, 2)
        assert waiting["records_max"] == 7
        # At least one: groups of other tests on this Kafka may wait as well.
        until(lambda: _metric(watched, "gated_partitions") >= 1, "the metric of gated partitions")
        released_total = _metric(watched, "gated_partitions_released_total")

        address = watched.status
        assert main(["expansions", "--status", address, "--topic", topic.name]) == 0
        table = capsys.readouterr().out
        assert f"  {topic.name}  2 -> 3" in table
        assert f"  {group}  {topic.name}-2" in table
        assert main(["expansions", "--bootstrap", watched.bootstrap, "--topic", topic.name]) == 0
        assert f"  {topic.name}  2 -> 3" in capsys.readouterr().out

        # Kafka's tools show Kafka's commits: nothing is committed yet.
        assert _committed(groups_kafka.bootstrap, group) == _committed(watched.bootstrap, group) == {}
        named = [TopicPartition(topic.name, 2)]
        assert _committed(groups_kafka.bootstrap, group, named) == {2: -1}
        assert _committed(watched.bootstrap, group, named) == {2: 0}  # the client may be a member, and gets the same

        release = ["expansions", "open", topic.name, group, "--status", address]
        assert main(release) == 2
        assert "Authorization: Bearer TOKEN" in capsys.readouterr().err
        assert main([*release, "--token-file", f"{tmp_path}/token"]) == 0
        assert "gets the new partitions" in capsys.readouterr().out

        _gets_the_new_partition(member, 5, watched)
        until(lambda: not _waiting(watched, group), watched.log)
        until(
            lambda: _metric(watched, "gated_partitions_released_total") > released_total, "the metric of released ones"
        )
    assert main(["expansions", "--bootstrap", watched.bootstrap, "--json"]) == 0
    of_all = json.loads(capsys.readouterr().out)["expansions"]
    assert {each["topic"]: each["thresholds"] for each in of_all}[topic.name] == [7, 0]


def _metric(proxy: ProxyProcess, name: str) -> float:
    return proxy.metrics()[f"fencepost_{name}"]


def _committed(address: str, group: str, partitions: list[TopicPartition] | None = None) -> dict[int, int]:
    """All commits of a group, or those of certain partitions; -1 where there is none."""
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": address})
    named = None if partitions is None else [confluent_kafka.TopicPartition(*each) for each in partitions]
    queried = confluent_kafka.ConsumerGroupTopicPartitions(group, named)
    found = admin.list_consumer_group_offsets([queried])[group].result(90).topic_partitions
    return {each.partition: max(each.offset, -1) for each in found}


def _waiting(proxy: ProxyProcess, group: str) -> list[dict[str, Any]]:
    return [each for each in json.loads(proxy.page("/status.json"))["gated"] if each["group"] == group]


# ---- members that join and leave


@pytest.mark.parametrize("client", ["librdkafka-consumer", "java-consumer"])
def test_gated_partition_moving_between_members_is_eventually_read(
    client: str, topic: ExpandedTopic, proxy: ProxyProcess
) -> None:
    # Given a member of the new protocol for which all new partitions are gated.
    group = f"moves-{client}-{topic.name}"
    # It joined before the expansion, and has reported its partitions before any was gated.
    topic.write(0, 3)
    with Member(MEMBERS[client], proxy.bootstrap, topic.name, group) as one:
        until(lambda: one.assigned == {0, 1} and len(one.read) == 3, f"{one.errors}\n{proxy.log}")
        topic.expand(4)
        topic.write(2, 3)
        topic.write(3, 3)
        until(lambda: _gated(proxy, group, 2) and _gated(proxy, group, 3), proxy.log)
        # When a second one joins: the coordinator revokes partitions from the first, possibly gated ones, and assigns
        # them to the second as soon as the first has released them.
        with Member(MEMBERS[client], proxy.bootstrap, topic.name, group) as two:
            until(lambda: _both_stable(proxy, topic, group), "the coordinator waits for a member")
            until(lambda: one.assigned | two.assigned == {0, 1}, f"{one.assigned} {two.assigned}")
            # Then both get their partitions, once the prior partitions are read.
            give_up = time.monotonic() + WAIT_SECONDS
            while one.assigned | two.assigned != {0, 1, 2, 3}:
                assert time.monotonic() < give_up, (
                    f"{one.assigned} {two.assigned}\n{one.errors} {two.errors}\n{proxy.log}"
                )
                one.commit()
                two.commit()
                time.sleep(0.1)
            until(lambda: len(one.assigned) == len(two.assigned) == 2, f"{one.assigned} {two.assigned}")
            for partition in (2, 3):
                until(lambda p=partition: {*_offsets(one, p), *_offsets(two, p)} == {0, 1, 2}, f"{one.read} {two.read}")


def _both_stable(proxy: ProxyProcess, topic: ExpandedTopic, group: str) -> bool:
    described = _described(topic.kafka, group)
    if described is None:
        return False
    assigned_counts = [len(each.assignment.topic_partitions) for each in described.members]
    return assigned_counts == [2, 2] and described.state.name == "STABLE"


def _described(address: str, group: str) -> Any:
    """None if the coordinator is not available."""
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": address})
    try:
        return admin.describe_consumer_groups([group])[group].result()
    except confluent_kafka.KafkaException:
        return None


# ---- Streams


@pytest.mark.parametrize(
    "protocol", ["classic", pytest.param("streams", marks=pytest.mark.skipif(kafka_version() < "4.2", reason="early"))]
)
def test_streams_application_is_not_gated_but_logged(
    groups_kafka: KafkaCluster, proxy: ProxyProcess, tmp_path: Path, protocol: str
) -> None:
    # Given Kafka Streams on an ordered topic. (Streams fixes the count of its internal topics: added input partitions
    # are an error for an application that groups by key, so this one only maps.)
    topic = ExpandedTopic(groups_kafka.bootstrap, proxy.bootstrap, f"streams-{uuid4().hex[:8]}", 2)
    topic.write(0, 3)
    group = f"app-{topic.name}"
    classes = compile_java([_JAVA / "MapStream.java"])
    command = java_command(
        "MapStream", [proxy.bootstrap, group, topic.name, f"{topic.name}-out", str(tmp_path), protocol], classes=classes
    )
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            observed = [process.stdout.readline().split() for _ in range(3)]
            assert [each[0] for each in observed] == ["mapped"] * 3
            # When the topic is expanded, then the application reads the new partition immediately.
            topic.expand(4)
            topic.write(2, 3)
            observed = [process.stdout.readline().split() for _ in range(3)]
            assert [each[:2] for each in observed] == [["mapped", "2"]] * 3
            until(lambda: "assigns tasks" in proxy.log and group in proxy.log, proxy.log)
            assert not _gated(proxy, group)
        finally:
            process.kill()


@pytest.mark.parametrize("client", [pytest.param("librdkafka-eager", marks=pytest.mark.soak), "librdkafka-consumer"])
def test_assignments_are_gated_across_two_proxies(client: str, groups_kafka: KafkaCluster, tmp_path: Path) -> None:
    # Given a group with two members, each connected to another proxy.
    with _with_page(groups_kafka, tmp_path) as first, _with_page(groups_kafka, tmp_path) as second:
        topic = ExpandedTopic(groups_kafka.bootstrap, first.bootstrap, f"shared-{uuid4().hex[:8]}", 2)
        group = f"{client}-{topic.name}"
        with (
            Member(MEMBERS[client], first.bootstrap, topic.name, group) as one,
            Member(MEMBERS[client], second.bootstrap, topic.name, group) as two,
        ):
            until(lambda: len(one.assigned) == len(two.assigned) == 1, f"{one.errors} {two.errors}")
            topic.write(0, 3)
            topic.write(1, 3)
            topic.expand(4)
            topic.write(2, 3)
            topic.write(3, 3)
            until(
                lambda: {row["partition"] for proxy in (first, second) for row in _waiting(proxy, group)} == {2, 3},
                first.log,
            )
            # When an operator releases the partitions at one of the proxies.
            path = f"/groups/{quote(group, safe='')}/release?topic={topic.name}"
            shown = {"Authorization": "Bearer let-them-pass"}
            with urlopen(Request(f"http://{first.status}{path}", method="POST", headers=shown), timeout=60) as answer:
                assert b"gets the new partitions" in answer.read()
            # Then both proxies learn of it and make their members rebalance.
            until(lambda: one.assigned | two.assigned == {0, 1, 2, 3}, f"{one.assigned} {two.assigned}\n{second.log}")
            for partition in (2, 3):
                until(
                    lambda p=partition: {*_offsets(one, p), *_offsets(two, p)} == {0, 1, 2},  # type: ignore[misc]
                    f"{one.read} {two.read}",
                )


@pytest.mark.parametrize("client", ["librdkafka-eager", "librdkafka-consumer"])
def test_a_coordinator_that_moves_forgets_nothing(client: str, tmp_path: Path) -> None:
    with KafkaCluster(3, properties=_BROKER) as kafka, ProxyProcess(kafka.bootstrap, tmp_path) as proxy:
        # Given a group that waits for a new partition.
        topic = ExpandedTopic(kafka.bootstrap, proxy.bootstrap, f"moved-{uuid4().hex[:8]}", 2, replicas=3)
        group = f"{client}-{topic.name}"
        topic.write(0, 3)
        with Member(MEMBERS[client], proxy.bootstrap, topic.name, group) as member:
            until(lambda: len(member.read_of(0)) == 3, f"{member.errors}")
            topic.expand(4)
            topic.write(2, 3)
            until(lambda: _gated(proxy, group), proxy.log)
            # When its coordinator dies, and another broker takes its place.
            until(lambda: _described(kafka.bootstrap, group) is not None, "its coordinator to be known")
            kafka.kill(_described(kafka.bootstrap, group).coordinator.id)
            assert not member.read_of(2)
            # Then the group gets it once it has committed, as usual.
            _commit_until(member, lambda: len(member.read_of(2)) == 3, proxy)
            assert _offsets(member, 2) == [0, 1, 2]
