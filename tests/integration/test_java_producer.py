"""Errors and results that Kafka's Java producer shows for conditional appends, with and without idempotence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.tools import compile_java, run_java
from tests.support.kafka import kafka_version
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log

pytestmark = [pytest.mark.kafka, pytest.mark.brokers]

SOURCE = Path(__file__).parents[1] / "java" / "ConditionalSends.java"


def sends(bootstrap: str, topic: str, idempotent: bool, *expected: str) -> list[str]:
    """One line per record: `ok OFFSET`, or the exception's class and message."""
    version = kafka_version()
    classes = compile_java([SOURCE], version=version)
    arguments = [bootstrap, topic, str(idempotent).lower(), *expected]
    return run_java("ConditionalSends", arguments, classes=classes, version=version).output.splitlines()


@pytest.mark.parametrize("idempotent", [True, False], ids=["idempotent", "not idempotent"])
def test_java_producer_sees_mismatch_offsets_and_continues(
    idempotent: bool, kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = unique_topic("checked")
    with Connection(proxy.bootstrap) as client:
        assert client.create_topic(topic) == (0, None)

    observed = sends(proxy.bootstrap, topic, idempotent, "0", "7", "1", "-", "3")

    print(*observed, sep="\n")
    assert observed == [
        "ok 0",
        f"PolicyViolationException OFFSET_MISMATCH topic={topic} partition=0 expected=7 actual=1",
        "ok 1",
        "ok 2",
        "ok 3",
    ]
    log = Log(kafka.bootstrap)
    assert log.values(topic) == [b"expects 0", b"expects 1", b"expects -", b"expects 3"]


def test_java_producer_without_required_expectation_is_refused(
    proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = unique_topic("required")
    with Connection(proxy.bootstrap) as client:
        assert client.create_topic(topic) == (0, None)

    nothing_reported, stated = sends(proxy.bootstrap, topic, True, "-", "0")

    assert nothing_reported.startswith(f"PolicyViolationException EXPECTATION_REQUIRED topic={topic} partition=0")
    assert stated == "ok 0"
