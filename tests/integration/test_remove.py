"""docs/remove.md: its commands, in order, take the proxy away, and clients continue at Kafka where they were."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import confluent_kafka
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, NewPartitions, NewTopic

from fencepost import CheckIsOffError, OffsetMismatchError
from fencepost.kafka_python import ConditionalProducer, OrderedProducer
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import run_tool
from tests.kit.waiting import until
from tests.support.clients import set_check
from tests.support.docs import ROOT, commands
from tests.support.kafka import kafka_version, running_kafka
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import Log

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.timeout(600),
    # kafka-python leaves the socket of a failed connection attempt to the garbage collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

PAGE = ROOT / "docs" / "remove.md"
GROUP = "billing"
_ORDERED = {"fencepost.ordered.partition.expansion": "true", "fencepost.check.partition.count": "true"}
_WAIT = 90


@dataclass
class Scene:
    kafka: KafkaCluster
    proxy: ProxyProcess
    status: str

    def run(self, text: str) -> str:
        """A command of the page, with the addresses of this test. Returns what it printed."""
        text = text.replace("KAFKA:9092", self.kafka.bootstrap).replace("PROXY:19092", self.proxy.bootstrap)
        name, *words = shlex.split(text.replace("127.0.0.1:8080", self.status))
        if name == "systemctl":
            assert self.proxy.stop() == 0
            return ""
        if name.startswith("kafka-"):
            return run_tool(name.removesuffix(".sh"), words, version=kafka_version()).output
        command = [sys.executable, "-m", "fencepost_proxy", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=_WAIT, check=True).stdout


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """With an authorizer, because the page has commands for ACLs. Clients log in nowhere and may do everything."""
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    status = f"127.0.0.1:{free_port()}"
    with (
        running_kafka(1, properties=properties) as kafka,
        ProxyProcess(kafka.bootstrap, tmp_path, arguments=("--status", status)) as proxy,
    ):
        yield Scene(kafka, proxy, status)


def set_up(scene: Scene) -> None:
    """Checked appends, an expanded topic, and a group that has read it: all through the proxy."""
    proxy = scene.proxy.bootstrap
    required = {"fencepost.check.expected.offsets": "required"}
    with closing(KafkaAdminClient(bootstrap_servers=proxy)) as admin:
        admin.create_topics(
            [
                NewTopic("orders", 1, 1, topic_configs=required),
                NewTopic("events", 1, 1, topic_configs=_ORDERED),
                NewTopic("payments", 1, 1, topic_configs={"fencepost.check.expected.offsets": "true"}),
            ]
        )
        known = ("orders", "events", "payments")
        until(lambda: not any(each["error_code"] for each in admin.describe_topics(known)), "the topics")
        with closing(ConditionalProducer(bootstrap_servers=proxy)) as producer:
            for offset in range(3):
                producer.send("orders", b"%d" % offset, partition=0, expected_offset=offset).get(_WAIT)
        write_events(proxy, range(20))
        admin.create_partitions({"events": NewPartitions(2)})
        until(lambda: len(admin.describe_topics(["events"])[0]["partitions"]) == 2, "the expansion")
        write_events(proxy, range(20, 40))
    run_tool("kafka-acls", [*f"--bootstrap-server {scene.kafka.bootstrap} --add".split(), *_ACL])


_ACL = (
    *("--allow-principal", "User:fencepost", "--topic", "*", "--operation", "Read", "--operation", "Write"),
    *("--operation", "Describe", "--operation", "DescribeConfigs"),
)


def write_events(bootstrap: str, values: range) -> None:
    with closing(OrderedProducer(bootstrap_servers=bootstrap)) as producer:
        for each in [producer.send("events", b"%d" % value, key=b"key %d" % (value % 7)) for value in values]:
            each.get(_WAIT)


def consume(bootstrap: str, count: int) -> set[bytes]:
    """By a member of the group, which commits."""
    found: set[bytes] = set()
    consumer = KafkaConsumer(
        "events", bootstrap_servers=bootstrap, group_id=GROUP, auto_offset_reset="earliest", enable_auto_commit=False
    )
    with closing(consumer):

        def polled() -> bool:
            for records in consumer.poll(1000).values():
                found.update(each.value for each in records)
                # The group gets the new partition once it has committed the old one up to its threshold.
                consumer.commit()
            return len(found) >= count

        until(polled, f"{count} records", seconds=_WAIT)
    return found


def members_share_the_group(*addresses: str) -> None:
    """One through the proxy, the other at Kafka: each has a partition of the topic. None commits."""
    with ExitStack() as stack:
        members = [
            stack.enter_context(
                closing(KafkaConsumer("events", bootstrap_servers=each, group_id=GROUP, enable_auto_commit=False))
            )
            for each in addresses
        ]

        def assigned() -> list[int]:
            for each in members:
                each.poll(200)
            return sorted(partition.partition for each in members for partition in each.assignment())

        until(
            lambda: assigned() == [0, 1] and all(len(each.assignment()) == 1 for each in members), "both", seconds=_WAIT
        )


def commits(bootstrap: str) -> dict[int, int]:
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        found = admin.list_group_offsets({GROUP: [TopicPartition("events", each) for each in (0, 1)]})[GROUP]
    return {partition.partition: each.offset for partition, each in found.items()}


def open_transaction(bootstrap: str) -> confluent_kafka.Producer:
    producer = transactional(bootstrap)
    producer.begin_transaction()
    producer.produce("payments", b"uncommitted", partition=0)
    producer.flush(_WAIT)
    return producer


def transactional(bootstrap: str) -> confluent_kafka.Producer:
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": "ledger"})
    producer.init_transactions(_WAIT)
    return producer


def refused_stale(bootstrap: str) -> bool:
    with closing(ConditionalProducer(bootstrap_servers=bootstrap)) as producer:
        try:
            producer.send("orders", b"stale", partition=0, expected_offset=1).get(_WAIT)
        except OffsetMismatchError:
            return True
    return False


def append_unchecked(bootstrap: str, value: bytes, **settings: object) -> int:
    with closing(KafkaProducer(bootstrap_servers=bootstrap)) as producer:
        return int(producer.send("orders", value, partition=0, **settings).get(_WAIT).offset)


def topic_configs(bootstrap: str, topic: str) -> set[str]:
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        found = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)], config_filter="all")
    return set(found["topic"][topic])


def topics(bootstrap: str) -> set[str]:
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        return set(admin.list_topics())


def test_commands_of_the_page_remove_the_proxy(scene: Scene) -> None:
    steps = [each.text for each in commands(PAGE)]
    step: Callable[[], str] = lambda: scene.run(steps.pop(0))  # noqa: E731
    kafka, proxy = scene.kafka.bootstrap, scene.proxy.bootstrap
    set_up(scene)
    first = consume(proxy, 40)
    committed = commits(proxy)
    assert sum(committed.values()) == 40
    client = open_transaction(proxy)
    assert refused_stale(proxy)

    # Expansions and transactions.
    assert "events" in step()
    assert "Ongoing" in step()

    # Checks off: `required` topics accept appends without expected offsets.
    step()
    step()
    until(lambda: append_unchecked(proxy, b"3"), "an append without expected offset", accept=lambda offset: offset == 3)

    # ACLs, and the clients, of which some still use the proxy.
    step()
    write_events_at(kafka, range(40, 50))
    members_share_the_group(proxy, kafka)
    assert consume(kafka, 10) == {b"%d" % value for value in range(40, 50)}
    assert sum(commits(proxy).values()) == 50

    step()
    assert not scene.proxy.running
    stays(scene, first, committed)
    stops(scene, client)
    come_back_with_the_state_topic(scene)

    # What is left.
    assert "__fencepost_state" in topics(kafka)
    step()
    until(lambda: "__fencepost_state" not in topics(kafka), "the deletion")
    assert "operation=WRITE" in step()
    step()
    assert steps == []
    listed = ["--bootstrap-server", kafka, "--list", "--principal", "User:fencepost"]
    assert "operation=" not in run_tool("kafka-acls", listed).output
    assert topics(kafka) - {"__consumer_offsets", "__transaction_state"} == {"orders", "events", "payments"}

    # Come back.
    scene.proxy.restart()
    set_check(proxy, "orders", "required")
    assert refused_stale(proxy)
    with closing(ConditionalProducer(bootstrap_servers=proxy)) as producer:
        end = Log(kafka).end("orders")
        assert producer.send("orders", b"again", partition=0, expected_offset=end).get(_WAIT).offset == end


def write_events_at(kafka: str, values: range) -> None:
    """By Kafka's own producer."""
    with closing(KafkaProducer(bootstrap_servers=kafka)) as producer:
        for each in [producer.send("events", b"%d" % value, key=b"key %d" % value) for value in values]:
            each.get(_WAIT)


def stays(scene: Scene, first: set[bytes], committed: dict[int, int]) -> None:
    """The table of the page."""
    kafka = scene.kafka.bootstrap
    log = Log(kafka)
    assert log.values("orders") == [b"0", b"1", b"2", b"3"]
    assert first == {b"%d" % value for value in range(40)}
    assert all(now >= committed[partition] for partition, now in commits(kafka).items())
    with closing(KafkaConsumer(bootstrap_servers=kafka, auto_offset_reset="earliest")) as consumer:
        consumer.assign([TopicPartition("orders", 0)])
        (records,) = until(lambda: consumer.poll(1000), "records").values()
    assert "fencepost-expected-offset" in dict(records[0].headers)
    for topic in ("orders", "events"):
        assert not any(name.startswith("fencepost") for name in topic_configs(kafka, topic))
    with closing(KafkaAdminClient(bootstrap_servers=kafka)) as admin:
        assert len(admin.describe_topics(["events"])[0]["partitions"]) == 2
        assert {each[0] if isinstance(each, tuple) else each["group_id"] for each in admin.list_groups()} == {GROUP}


def stops(scene: Scene, client: confluent_kafka.Producer) -> None:
    kafka = scene.kafka.bootstrap
    header = ("fencepost-expected-offset", b"0@orders/0")
    assert append_unchecked(kafka, b"stale", headers=[header]) == 4
    with closing(ConditionalProducer(bootstrap_servers=kafka)) as producer, pytest.raises(CheckIsOffError):
        producer.send("orders", b"5", partition=0, expected_offset=5).get(_WAIT)

    # The transaction that was open: its producer's successor has Kafka abort it.
    with pytest.raises(confluent_kafka.KafkaException):
        client.commit_transaction(5)
    new = transactional(kafka)
    new.begin_transaction()
    new.produce("payments", b"committed", partition=0)
    new.commit_transaction(_WAIT)
    consumer = KafkaConsumer(bootstrap_servers=kafka, isolation_level="read_committed", auto_offset_reset="earliest")
    with closing(consumer):
        consumer.assign([TopicPartition("payments", 0)])
        records = until(lambda: consumer.poll(1000), "a record")
        assert [each.value for each in records[TopicPartition("payments", 0)]] == [b"committed"]


def come_back_with_the_state_topic(scene: Scene) -> None:
    scene.proxy.restart()
    shown = scene.run("fencepost expansions --status 127.0.0.1:8080 --topic events --json")
    assert '"thresholds": [\n' in shown or '"thresholds": [2' in shown, shown
    assert scene.proxy.stop() == 0
