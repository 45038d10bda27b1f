"""Proxies for the shared Kafka clusters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost_proxy.dev.cluster import KafkaCluster
from tests.support.proxy import ProxyProcess
from tests.support.three_brokers import Stage3, three_brokers


@pytest.fixture(scope="session")
def proxy_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proxies")


@pytest.fixture(scope="session")
def proxied(kafka: KafkaCluster, proxy_directory: Path) -> Iterator[ProxyProcess]:
    """A shared proxy for `kafka` without topic checks. Tests must leave it running."""
    with ProxyProcess(kafka.bootstrap, proxy_directory) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def proxied3(kafka3: KafkaCluster, proxy_directory: Path) -> Iterator[ProxyProcess]:
    """As `proxied`, for `kafka3`."""
    with ProxyProcess(kafka3.bootstrap, proxy_directory) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def shared_stage3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage3]:
    with three_brokers(tmp_path_factory.mktemp("three")) as stage:
        yield stage


@pytest.fixture
def stage3(shared_stage3: Stage3) -> Iterator[Stage3]:
    """Three brokers that a test may kill, stop or cut off, and two proxies. All are restored after each test."""
    yield shared_stage3
    shared_stage3.mend()
