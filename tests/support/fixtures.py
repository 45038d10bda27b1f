"""Fixtures of a test module: its own Kafka, and its own proxy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
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


@contextmanager
def _running(
    count: int, request: pytest.FixtureRequest, *, of: str = "kafka", unexpected: Sequence[str] = (), **settings: Any
) -> Iterator[list[ProxyProcess]]:
    kafka = request.getfixturevalue(of)
    directory = request.getfixturevalue("tmp_path_factory").mktemp("proxy")
    with ExitStack() as stack:
        started = []
        for _ in range(count):
            now = {name: value() if callable(value) else value for name, value in settings.items()}
            started.append(stack.enter_context(ProxyProcess(kafka.bootstrap, directory, **now)))
        yield started
        for process in started:
            assert not [text for text in unexpected if text in process.log], process.log


def proxy_fixture(*, scope: Any = "module", **settings: Any) -> Any:
    """`of` – the fixture of its Kafka. `unexpected` – what its log must not contain. `settings` – of `ProxyProcess`, or
    functions that return them when it starts."""

    @pytest.fixture(scope=scope)
    def proxy(request: pytest.FixtureRequest) -> Iterator[ProxyProcess]:
        with _running(1, request, **settings) as (process,):
            yield process

    return proxy


def proxies_fixture(*, scope: Any = "module", **settings: Any) -> Any:
    """As `proxy_fixture`: two proxies with the same settings."""

    @pytest.fixture(scope=scope)
    def proxies(request: pytest.FixtureRequest) -> Iterator[list[ProxyProcess]]:
        with _running(2, request, **settings) as started:
            yield started

    return proxies
