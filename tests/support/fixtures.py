"""Fixtures of a test module: its own Kafka, and its own proxy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.support.kafka import running_kafka
from tests.support.proxy import ProxyProcess


def kafka_fixture(brokers: int = 1, **settings: Any) -> Any:
    """`settings` – of `running_kafka`."""

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[KafkaCluster]:
        with running_kafka(brokers, **settings) as running:
            yield running

    return cluster


def proxy_fixture(*, of: str = "kafka", unexpected: Sequence[str] = (), **settings: Any) -> Any:
    """`of` – the fixture of its Kafka. `unexpected` – what its log must not contain. `settings` – of `ProxyProcess`, or
    functions that return them when it starts."""

    @pytest.fixture(scope="module")
    def proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
        kafka = request.getfixturevalue(of)
        now = {name: value() if callable(value) else value for name, value in settings.items()}
        with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("proxy"), **now) as process:
            yield process
            assert not [text for text in unexpected if text in process.log], process.log

    return proxy
