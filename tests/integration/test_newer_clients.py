"""What clients got with Kafka 4: they see the same through the proxy as at Kafka itself.

| script | proposal | client |
|---|---|---|
| a subscription by pattern, evaluated by the coordinator | KIP-848 | confluent-kafka |
| offsets are reset to a time ago | KIP-1106 | Kafka's console consumer |
| metrics are pushed to the broker | KIP-714 | confluent-kafka |
| the broker requests a rebootstrap | KIP-1102 | confluent-kafka |
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from fencepost_dev import cluster as embedded
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import compile_java, run_tool
from fencepost_proxy.wire.apis import METADATA
from tests.integration.test_equivalence import WAIT_SECONDS, Stage
from tests.kit.fault_proxy import FaultProxy, Respond
from tests.kit.stage import WIRE, piped_kafka
from tests.kit.waiting import until
from tests.support.kafka import kafka_version
from tests.support.messages import RawConnection
from tests.support.proxy import ProxyProcess

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.timeout(300),
    pytest.mark.skipif(kafka_version() < "4.1", reason="Kafka 4.0 lacks some of it"),
]

SOURCES = Path(__file__).parents[1] / "java"
INCREMENTAL_ALTER_CONFIGS, CLIENT_METRICS = 44, 16
REBOOTSTRAP_REQUIRED = 129


class World:
    """A broker behind a fault proxy, which receives clients' metrics; and a proxy in front."""

    def __init__(self, kafka: KafkaCluster, pipe: FaultProxy, pushes: Path) -> None:
        self.kafka, self.pipe, self._pushes = kafka, pipe, pushes

    def pushes(self, client_id: str) -> list[list[str]]:
        """Of a client: content type, whether it is the last one, size."""
        lines = self._pushes.read_text().splitlines() if self._pushes.exists() else []
        return [line.split()[1:] for line in lines if line.split()[0] == client_id]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, ProxyProcess]]:
    directory = tmp_path_factory.mktemp("newer")
    classes, known = compile_java([SOURCES / "TelemetryReceiver.java"], version=kafka_version()), embedded.classpath
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "classpath", lambda *arguments: f"{known(*arguments)}:{classes}")
        properties = {"metric.reporters": "TelemetryReceiver", "telemetry.file": str(directory / "pushes")}
        with (
            piped_kafka(1, properties=properties) as (kafka, pipes),
            ProxyProcess(pipes[1].address, directory) as proxy,
        ):
            yield World(kafka, pipes[1], directory / "pushes"), proxy


def write(stage: Stage, topic: str, *records: tuple[bytes, int], **settings: Any) -> None:
    """Records, each with its age in seconds, to partition 0."""
    producer = confluent_kafka.Producer({**stage.confluent, **settings})
    for value, age in records:
        producer.produce(topic, value, partition=0, timestamp=int((time.time() - age) * 1000))
    assert producer.flush(WAIT_SECONDS) == 0


def pattern(stage: Stage, world: World) -> Any:
    for what in ("one", "two"):
        write(stage, stage.topic(f"read-{what}"), (what.encode(), 0))
    write(stage, stage.topic("other"), (b"other", 0))
    settings = {"group.id": stage.name("group"), "group.protocol": "consumer", "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer({**stage.confluent, **settings})
    consumer.subscribe([f"^{stage.name('read')}-.*"])
    read: list[bytes] = []
    until(lambda: read.extend(each.value() for each in consumer.consume(9, 0.5)) or read, "both",
        accept=lambda found: len(found) > 1 and len(consumer.assignment()) == 4)  # fmt: skip
    assigned = sorted((each.topic, each.partition) for each in consumer.assignment())
    consumer.close()
    return sorted(read), assigned


def time_ago(stage: Stage, world: World) -> Any:
    topic = stage.topic()
    write(stage, topic, (b"old", 7200), (b"new", 60))
    where = ("--bootstrap-server", stage.confluent["bootstrap.servers"], "--topic", topic)
    reset = ("--command-property", "auto.offset.reset=by_duration:PT1H")
    ends = ("--max-messages", "1", "--timeout-ms", "60000")
    return run_tool("kafka-console-consumer", [*where, *reset, *ends], version=kafka_version()).output.split()


def pushed_metrics(stage: Stage, world: World) -> Any:
    configs = [{"Name": name, "ConfigOperation": 0, "Value": value} for name, value in
        (("interval.ms", "500"), ("metrics", "*"))]  # fmt: skip
    with RawConnection(world.kafka.address(1)) as admin:
        resource = {"ResourceType": CLIENT_METRICS, "ResourceName": "all", "Configs": configs}
        answer = admin.query(INCREMENTAL_ALTER_CONFIGS, 1, {"Resources": [resource]})
        assert answer["Responses"][0]["ErrorCode"] == 0
    client_id = stage.name("client")

    def push() -> None:
        producer = confluent_kafka.Producer({**stage.confluent, "client.id": client_id})
        until(lambda: producer.poll(0.1) or world.pushes(client_id), "a push", seconds=WAIT_SECONDS)

    push()  # and end
    until(lambda: world.pushes(client_id)[-1][1] == "true", "the last push")
    return sorted({(kind, last, int(size) > 0) for kind, last, size in world.pushes(client_id)})


def rebootstrap(stage: Stage, world: World) -> Any:
    def required(request: bytes) -> bytes:
        """Metadata v13 without brokers and topics; the error is its last field."""
        (correlation_id,) = struct.unpack_from(">i", request, 8)
        body = struct.pack(">ib", correlation_id, 0) + struct.pack(">ibbib", 0, 1, 0, -1, 1)
        body += struct.pack(">hb", REBOOTSTRAP_REQUIRED, 0)
        return struct.pack(">i", len(body)) + body

    topic, lines = stage.topic(), list[str]()
    logger = logging.Logger("client")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    settings = {**stage.confluent, "client.id": stage.name("client"), "debug": "broker,metadata", "logger": logger}
    producer = confluent_kafka.Producer(settings)
    for value in (b"before", b"after"):
        producer.produce(topic, value, partition=0)
        assert producer.flush(WAIT_SECONDS) == 0
        if value == b"before":
            client_id = stage.name("client").encode()
            fault = world.pipe.add(Respond("request", client_id, METADATA, respond=required, when=_is_v13))
            with suppress(confluent_kafka.KafkaException):  # this error, or that of the closed connection
                producer.list_topics(topic, WAIT_SECONDS)
            fault.wait(WAIT_SECONDS)
    return any("rebootstrap" in line.lower().replace("-", "") for line in lines)


def _is_v13(request: bytes) -> bool:
    return int.from_bytes(request[6:8]) == 13


SCRIPTS: dict[str, tuple[Callable[[Stage, World], Any], Callable[[Any], bool]]] = {
    "subscription by pattern": (pattern, lambda seen: seen[0] == [b"one", b"two"] and len(seen[1]) == 4),
    "offset reset by duration": (time_ago, lambda seen: seen == ["new"]),
    "pushed metrics": (pushed_metrics, lambda seen: {last for _, last, _ in seen} == {"true", "false"}),
    "rebootstrap": (rebootstrap, lambda seen: seen is True),
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_newer_client_sees_the_same_through_the_proxy(script: str, world: tuple[World, ProxyProcess]) -> None:
    (place, proxy), (play, works) = world, SCRIPTS[script]
    observed = []
    for bootstrap in (place.kafka.bootstrap_of(WIRE), proxy.bootstrap):
        stage = Stage(bootstrap, 1)
        observed.append(stage.plain(seen := play(stage, place), {}))
        print(bootstrap, observed[-1])
        assert works(seen)
    assert observed[0] == observed[1]
