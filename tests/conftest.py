"""What all tests share: one real Kafka of each size, started by the first test that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fencepost_proxy.dev.cluster import KafkaCluster
from tests.support import kafka as support


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaCluster]:
    """One broker. Shared by all: use topics of your own, and leave it running and unpaused."""
    with support.running_kafka(1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kafka3() -> Iterator[KafkaCluster]:
    """Three brokers. Shared by all, as `kafka`; whoever stops one starts it again."""
    with support.running_kafka(3) as cluster:
        yield cluster


@pytest.fixture
def unique_topic() -> Callable[..., str]:
    """`unique_topic("prefix")`: a name of its own for each call."""
    return support.unique_topic
