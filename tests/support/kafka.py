"""Real Kafka for tests: the release, and unique names."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import DEFAULT_VERSION

_numbers = itertools.count(1)


def kafka_version() -> str:
    """The release under test: `$FENCEPOST_KAFKA` (see `make test-brokers`), else the latest."""
    return os.environ.get("FENCEPOST_KAFKA") or DEFAULT_VERSION


def unique_topic(prefix: str = "topic") -> str:
    """A name that no other test of this run uses."""
    return f"{prefix}-{os.getpid()}-{next(_numbers)}"


@contextmanager
def running_kafka(brokers: int = 1, **settings: object) -> Iterator[KafkaCluster]:
    """A cluster of the release under test, for tests that break it. Other tests share `kafka` and `kafka3`."""
    with KafkaCluster(brokers, version=kafka_version(), **settings) as cluster:  # type: ignore[arg-type]
        yield cluster
