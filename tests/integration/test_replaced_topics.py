"""A checked topic keeps its checks when it is deleted and created again at Kafka, with two proxies running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.ports import free_port
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, batch, final_answer

pytestmark = pytest.mark.kafka

CHECK, OK, UNKNOWN_TOPIC, POLICY_VIOLATION = "fencepost.check.expected.offsets", 0, 3, 44
#: An append with this expected offset is always refused on a checked topic.
FAR = 1_000_000_000


class Proxies:
    def __init__(self, kafka: KafkaCluster, directory: Path, stack: ExitStack) -> None:
        self.processes = []
        self._status = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        for number, status in enumerate(self._status):
            config = f'config_lease_seconds = 1.0\nstatus = "{status}"\n'
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
        return [urlopen(f"http://{status}{path}", timeout=30).read().decode() for status in self._status]

    def report(self, count: int) -> bool:
        return all(f"\nfencepost_replaced_topics {count}.0" in page for page in self.pages("/metrics"))


@pytest.fixture
def proxies(kafka: KafkaCluster, tmp_path: Path) -> Iterator[Proxies]:
    with ExitStack() as stack:
        yield Proxies(kafka, tmp_path, stack)


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
