"""Clusters for cases to break: nobody else uses them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.real import PROPERTIES, RealKafka
from tests.support.kafka import running_kafka


@pytest.fixture(scope="session")
def one_broker() -> Iterator[RealKafka]:
    # One that was killed may not come back before its session is over.
    session = {"broker.session.timeout.ms": "1500", "broker.heartbeat.interval.ms": "300"}
    with running_kafka(1, properties=PROPERTIES | session) as cluster:
        yield RealKafka(cluster)


@pytest.fixture(scope="session")
def one_broker_that_expires() -> Iterator[RealKafka]:
    """It looks for expired producers all the time."""
    with running_kafka(1, properties={"producer.id.expiration.check.interval.ms": "200"}) as cluster:
        yield RealKafka(cluster)


@pytest.fixture(scope="session")
def three_brokers() -> Iterator[RealKafka]:
    """A majority of controllers is there when one broker is not."""
    with running_kafka(3) as cluster:
        yield RealKafka(cluster)
