"""Proxies for the shared Kafka clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Connection, Log, filled_topic
from tests.support.sasl_ssl import Secured, sasl_ssl_kafka
from tests.support.secured import Sides, proxy_of
from tests.support.senders import JavaProducers
from tests.support.three_brokers import Stage3, three_brokers


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """One broker with TLS, logins and an authorizer, shared as `kafka` is."""
    with sasl_ssl_kafka(tmp_path_factory.mktemp("secured")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def sides(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    """A proxy of `secured` whose clients log in without TLS. Leave it running."""
    expanding = '[topics."shared-*"]\n"fencepost.ordered.partition.expansion" = "true"\n'
    config = f"{CHECKED_BY_NAME}\n{expanding}\n[limits]\nexpansion_wait_seconds = 600\n"
    status = ("--status", "127.0.0.1:0")
    with proxy_of(secured.kafka, tmp_path_factory.mktemp("rights"), config, arguments=status) as proxy:
        yield Sides(secured.kafka, proxy)
        assert "Traceback" not in proxy.log


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
def java() -> Iterator[JavaProducers]:
    """Java's producers, for `Client.open`."""
    with JavaProducers() as process:
        yield process


@pytest.fixture(scope="module")
def shared_stage3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage3]:
    with three_brokers(tmp_path_factory.mktemp("three")) as stage:
        yield stage


@pytest.fixture
def stage3(shared_stage3: Stage3) -> Iterator[Stage3]:
    """Three brokers that a test may kill, stop or cut off, and two proxies. All are restored after each test."""
    yield shared_stage3
    shared_stage3.mend()


@pytest.fixture
def log(kafka: KafkaCluster) -> Log:
    return Log(kafka.bootstrap)


@pytest.fixture
def client(proxy: ProxyProcess) -> Iterator[Connection]:
    with Connection(proxy.bootstrap) as connection:
        yield connection


@pytest.fixture
def new_topic(client: Connection, log: Log, unique_topic: Callable[..., str]) -> Callable[..., str]:
    """`new_topic("required", length=3)`: a checked topic with so many records, appended through the proxy."""

    def create(prefix: str, *, length: int = 0) -> str:
        return filled_topic(client, log, unique_topic(prefix), length)

    return create
