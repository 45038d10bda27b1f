"""Clusters for cases to break: nobody else uses them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.real import PROPERTIES, RealKafka
from tests.support.kafka import running_kafka

#: One that was killed may not come back before its session is over; one that stands still is a replica in sync as long,
#: and cases tell several steps of such a time.
_SESSION = {"broker.session.timeout.ms": "8000", "broker.heartbeat.interval.ms": "1000"}


@pytest.fixture(scope="module")
def one_broker() -> Iterator[RealKafka]:
    with running_kafka(1, properties=PROPERTIES | _SESSION) as cluster:
        yield RealKafka(cluster)


@pytest.fixture(scope="module")
def one_broker_that_expires() -> Iterator[RealKafka]:
    """It looks for expired producers all the time."""
    with running_kafka(1, properties={"producer.id.expiration.check.interval.ms": "200"}) as cluster:
        yield RealKafka(cluster)


@pytest.fixture(scope="module")
def three_brokers() -> Iterator[RealKafka]:
    """A majority of controllers is there when one broker is not."""
    with running_kafka(3, properties=_SESSION) as cluster:
        yield RealKafka(cluster)
