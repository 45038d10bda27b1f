"""Clusters that cases may break. Other tests do not use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.conformance.real import PROPERTIES, RealKafka
from tests.support.kafka import running_kafka

#: A killed broker cannot return, and a paused one stays in sync, until its session expires. Cases wait several times.
_SESSION = {"broker.session.timeout.ms": "8000", "broker.heartbeat.interval.ms": "1000"}


@pytest.fixture(scope="module")
def one_broker() -> Iterator[RealKafka]:
    with running_kafka(1, properties=PROPERTIES | _SESSION) as cluster, closing(RealKafka(cluster)) as kafka:
        yield kafka


@pytest.fixture(scope="module")
def three_brokers() -> Iterator[RealKafka]:
    """With three, a majority of controllers survives one broker. They expire producers often."""
    often = {"producer.id.expiration.check.interval.ms": "200"}
    with running_kafka(3, properties=_SESSION | often) as cluster, closing(RealKafka(cluster)) as kafka:
        yield kafka
