"""Broker settings that fencing relies on, changed while brokers and proxies run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka.protocol.admin import IncrementalAlterConfigsRequest

from fencepost_dev.cluster import KafkaCluster
from tests.integration.test_producer_state import PATIENCE_SECONDS, create, producers
from tests.kit.waiting import until
from tests.support.fixtures import kafka_fixture
from tests.support.kafka import unique_topic
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Answer, Connection, Log, batch, final_answer

pytestmark = pytest.mark.kafka

OK, POLICY_VIOLATION, SECOND_MS = 0, 44, "1000"
CONFIG = f"{CHECKED_BY_NAME}\n[limits]\ntakeover_seconds = 0.5\n"


#: Kafka checks for expired producers several times a second, after a day by default until a test lowers that.
cluster = kafka_fixture(1, properties={"producer.id.expiration.check.interval.ms": "200"})


@pytest.fixture
def proxies(cluster: KafkaCluster, tmp_path: Path) -> Iterator[list[ProxyProcess]]:
    with (
        ProxyProcess(cluster.bootstrap, tmp_path, config=CONFIG) as first,
        ProxyProcess(cluster.bootstrap, tmp_path, config=CONFIG) as second,
    ):
        yield [first, second]
    set_expiration(cluster, None)


def set_expiration(cluster: KafkaCluster, milliseconds: str | None) -> None:
    """Change all brokers, as `kafka-configs.sh --entity-default --alter` does. None restores Kafka's default."""
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource
    operation = int(milliseconds is None)  # 1: delete
    config = resource.AlterableConfig(name="producer.id.expiration.ms", config_operation=operation, value=milliseconds)
    brokers = resource(resource_type=4, resource_name="", configs=[config])
    with Connection(cluster.bootstrap) as direct:
        answer = direct.query(IncrementalAlterConfigsRequest(resources=[brokers], validate_only=False), 1)
        assert answer.responses[0].error_code == OK


def expect_at(end: int, proxy: ProxyProcess, topic: str) -> None:
    with Connection(proxy.bootstrap) as client:
        answer = final_answer(client, topic, batch(b"%d" % end, expected=end))
    assert (answer.error_code, answer.base_offset) == (OK, end), answer


@pytest.mark.parametrize("known", [True, False], ids=["confirmed", "unconfirmed"])
def test_stale_append_after_lowered_producer_expiration(
    known: bool, cluster: KafkaCluster, proxies: list[ProxyProcess]
) -> None:
    """A proxy that has read the new value refuses the append. One that has not returns an error with the cause."""
    stale, other = proxies
    log, topic = Log(cluster.bootstrap), unique_topic("required")
    create(stale.bootstrap, log, topic)
    with Connection(stale.bootstrap) as client:  # the proxy does not rely on fences over a connection opened later
        for end in (0, 1):  # after an append, the proxy knows the leader's epoch
            assert final_answer(client, topic, batch(b"%d" % end, expected=end)).base_offset == end
        for end in (2, 3, 4):
            expect_at(end, other, topic)
        answer = stale_append(client, cluster, stale, topic, known=known)
    assert answer.error_code == POLICY_VIOLATION, answer
    message = answer.message or ""
    if known or message.startswith("OFFSET_MISMATCH"):
        assert message.startswith("OFFSET_MISMATCH"), message
        assert (answer.base_offset, log.end(topic)) == (5, 5)
    else:
        assert message.startswith(f"OFFSET_VIOLATION topic={topic} partition=0 expected=2 appended_at=5 "), message
        assert "producer.id.expiration.ms" in message
        until(lambda: 'reason="Kafka had forgotten' in stale.log, "the log line", seconds=PATIENCE_SECONDS)

    end = log.end(topic)
    expect_at(end, other, topic)
    expect_at(end + 1, stale, topic)


def stale_append(client: Connection, cluster: KafkaCluster, stale: ProxyProcess, topic: str, *, known: bool) -> Answer:
    """Append at 2, the log end that its proxy observed last."""
    log = Log(cluster.bootstrap)
    set_expiration(cluster, SECOND_MS)
    until(lambda: not producers(log, topic), "Kafka to forget the fence", seconds=PATIENCE_SECONDS)
    if known:
        changed = "producer.id.expiration.ms has changed"
        until(lambda: changed in stale.log, "the setting to be read again", seconds=PATIENCE_SECONDS)
    return final_answer(client, topic, batch(b"stale", expected=2))
