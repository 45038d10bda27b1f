"""Java updates the keys of a TLS 1.3 connection after 2^37 bytes, or as `jdk.tls.keyLimits` says (KAFKA-13418).

Over its limit, it requests new keys after each record that it reads, until it gets them. Native code updates its keys
before, because rustls takes more than 32 such requests at once for an attack.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest

from fencepost_dev.tools import run_tool
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log
from tests.support.sasl_ssl import ADMIN, Secured, sasl_ssl_kafka

pytestmark = [pytest.mark.kafka]

JAVA_BYTES, OUR_BYTES = 2**20, 2**18
RECORDS, VALUE = 20_000, bytes(1000)
_WAIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """Kafka, and tools of Kafka, with a low limit."""
    directory = tmp_path_factory.mktemp("keys")
    limits = ", ".join(f"{cipher} KeyUpdate {JAVA_BYTES}" for cipher in ("AES/GCM/NoPadding", "ChaCha20-Poly1305"))
    (file := directory / "java.security").write_text(f"jdk.tls.keyLimits={limits}\n")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("JAVA_TOOL_OPTIONS", f"-Djava.security.properties={file}")
        with sasl_ssl_kafka(directory) as kafka:
            yield kafka


def test_connections_outlive_their_keys(secured: Secured, tmp_path: Path) -> None:
    topic = unique_topic("keys")
    upstream, environment = secured.kafka.bootstrap_of("SECURED"), {"KEY_BYTES": str(OUR_BYTES)}
    with Connection(secured.kafka.bootstrap) as admin:
        assert admin.create_topic(topic) == (0, None)
    with ProxyProcess(
        upstream, tmp_path, config=secured.proxy_config(), module="tests.support.short_keys", environment=environment
    ) as proxy:
        # When much is written on one connection, and read on another,
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": proxy.bootstrap, "queue.buffering.max.messages": RECORDS} | secured.confluent(ADMIN)
        )
        for _ in range(RECORDS):
            producer.produce(topic, VALUE, partition=0)
        assert producer.flush(_WAIT_SECONDS) == 0
        (client := tmp_path / "client.properties").write_text(
            "".join(f"{key}={value}\n" for key, value in secured.java(ADMIN).items())
        )
        read = run_tool(
            "kafka-consumer-perf-test",
            [
                f"--bootstrap-server={proxy.bootstrap}",
                f"--topic={topic}",
                f"--num-records={RECORDS}",
                f"--command-config={client}",
            ],
        )

        # Then no connection breaks, so nothing is sent again.
        assert "connection closed" not in proxy.log
        assert Log(secured.kafka.bootstrap).end(topic) == RECORDS
        assert f", {RECORDS}, " in read.output
