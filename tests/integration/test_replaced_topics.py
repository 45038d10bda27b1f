"""A checked topic keeps its checks when it is deleted and created again at Kafka, with two proxies running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import UUID

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.kafka import kafka_version
from tests.support.messages import RawConnection
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, batch, final_answer

pytestmark = pytest.mark.kafka

CHECK, OK, UNKNOWN_TOPIC, NOT_LEADER, POLICY_VIOLATION = "fencepost.check.expected.offsets", 0, 3, 6, 44
#: An append with this expected offset is always refused on a checked topic.
FAR = 1_000_000_000


class Proxies:
    def __init__(self, kafka: KafkaCluster, directory: Path, stack: ExitStack) -> None:
        self.processes = []
        config = 'config_lease_seconds = 1.0\nstatus = "127.0.0.1:0"\n'
        for number in range(2):
            (directory / str(number)).mkdir()
            self.processes.append(
                stack.enter_context(ProxyProcess(kafka.bootstrap, directory / str(number), config=config))
            )

    def answers(self, topic: str, records: bytes) -> set[int]:
        codes = set()
        for process in self.processes:
            with Connection(process.bootstrap) as client:
                codes.add(final_answer(client, topic, records).error_code)
        return codes

    def pages(self, path: str) -> list[str]:
        return [process.page(path) for process in self.processes]

    def report(self, count: int) -> bool:
        return all(f"\nfencepost_replaced_topics {count}.0" in page for page in self.pages("/metrics"))


@pytest.fixture
def proxies(kafka: KafkaCluster, tmp_path: Path) -> Iterator[Proxies]:
    with ExitStack() as stack:
        yield Proxies(kafka, tmp_path, stack)


PRODUCE, METADATA, UNKNOWN_TOPIC_ID = 0, 3, 100


def topic_id(address: Address, topic: str) -> UUID:
    with RawConnection(address) as connection:
        found = connection.query(METADATA, 12, {"Topics": [{"Name": topic}], "AllowAutoTopicCreation": False})
    return UUID(str(found["Topics"][0]["TopicId"]))


def answer_by_id(connection: RawConnection, at: UUID, records: bytes) -> int:
    """Of an append by topic id (Produce v13), after the proxy and Kafka know the topic."""
    data = [{"TopicId": at, "PartitionData": [{"Index": 0, "Records": records}]}]

    def answer() -> int | None:
        found = connection.query(PRODUCE, 13, {"Acks": -1, "TimeoutMs": 5_000, "TopicData": data})["Responses"][0]
        assert UUID(str(found["TopicId"])) == at
        (partition,) = found["PartitionResponses"]
        return None if partition["ErrorCode"] in (NOT_LEADER, UNKNOWN_TOPIC) else int(partition["ErrorCode"])

    return until(answer, "an answer", accept=lambda code: code is not None) or OK


@pytest.mark.skipif(kafka_version() < "4.1", reason="Produce v13 is new in Kafka 4.1")
@pytest.mark.parametrize("checks", ["false", "true", "required"])
def test_append_by_topic_id_never_reaches_a_replaced_topic(
    kafka: KafkaCluster, proxied: ProxyProcess, unique_topic: Callable[..., str], checks: str
) -> None:
    log, topic, direct = Log(kafka.bootstrap), unique_topic("by-id"), kafka.address(1)
    with Connection(proxied.bootstrap) as admin:
        assert admin.create_topic(topic, configs={CHECK: checks}) == (OK, None)
    old = topic_id(direct, topic)
    with RawConnection(Address.parse(proxied.bootstrap)) as client, RawConnection(direct) as kafka_itself:
        first = batch(b"old", expected=None if checks == "false" else 0)
        assert answer_by_id(client, old, first) == OK
        if checks != "false":
            assert answer_by_id(client, old, batch(b"far", expected=FAR)) == POLICY_VIOLATION
        created_again_at_kafka(log, topic)
        new = topic_id(direct, topic)
        assert new != old

        assert answer_by_id(kafka_itself, old, first) == UNKNOWN_TOPIC_ID
        for each in (old, UUID(int=4711)):
            assert answer_by_id(client, each, first) == UNKNOWN_TOPIC_ID
        assert log.end(topic) == 0

        def appended() -> bool:
            return answer_by_id(client, new, first) == OK

        until(appended, "the proxy to know the new topic")
        assert log.values(topic) == [b"old"]
    with Connection(proxied.bootstrap) as admin:
        assert admin.delete_topic(topic) == OK  # it would be reported as replaced until then


def created_again_at_kafka(log: Log, topic: str) -> None:
    with log.connect(topic) as direct:
        assert direct.delete_topic(topic) == OK
        until(lambda: direct.metadata(topic).topics[0].error_code == UNKNOWN_TOPIC, "the deletion")
        until(lambda: direct.create_topic(topic)[0] == OK, "the creation")
    assert log.end(topic) == 0


def test_topic_replaced_at_kafka_stays_checked_until_decided(
    kafka: KafkaCluster, proxies: Proxies, unique_topic: Callable[..., str]
) -> None:
    log, one = Log(kafka.bootstrap), proxies.processes[0]
    switched_off, confirmed, deleted = topics = [unique_topic(name) for name in ("off", "confirmed", "deleted")]
    with Connection(one.bootstrap) as admin:
        for topic in topics:
            assert admin.create_topic(topic, configs={CHECK: "required"}) == (OK, None)
            assert final_answer(admin, topic, batch(b"old", expected=0)).error_code == OK
    for topic in topics:
        created_again_at_kafka(log, topic)

    def checked() -> None:
        for topic in topics:
            assert proxies.answers(topic, batch(b"far", expected=FAR)) == {POLICY_VIOLATION}
            assert proxies.answers(topic, batch(b"bare")) == {POLICY_VIOLATION}

    def reported() -> bool:
        checked()
        return proxies.report(3)

    until(reported, "both proxies to report the topics")
    for topic in topics:
        assert all(
            f"topic={topic}" in p.log and "deleted and created again at Kafka" in p.log for p in proxies.processes
        )
        assert all(topic in page for page in proxies.pages("/status.json"))
    proxies.processes[1].kill()
    proxies.processes[1].restart()
    checked()

    with Connection(one.bootstrap) as admin:
        assert admin.describe_topic(confirmed)[CHECK] == "required"
        assert admin.alter_topic(switched_off, {CHECK: None})[0] == OK
        assert admin.alter_topic(confirmed, {CHECK: "required"})[0] == OK
        assert admin.delete_topic(deleted) == OK
        until(lambda: admin.metadata(deleted).topics[0].error_code == UNKNOWN_TOPIC, "the deletion")
    with log.connect(switched_off) as direct:
        until(lambda: direct.create_topic(deleted)[0] == OK, "the creation")
    for topic in (switched_off, deleted):
        until(lambda topic=topic: proxies.answers(topic, batch(b"bare")) == {OK}, "appends without a check")
    assert proxies.answers(confirmed, batch(b"far", expected=FAR)) == {POLICY_VIOLATION}
    until(lambda: proxies.report(0), "both proxies to report nothing")
