"""What all tests share: one real Kafka of each size, started by the first test that asks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import fencepost_compiled
from fencepost_proxy.dev import cluster as clusters
from fencepost_proxy.dev.cluster import KafkaCluster
from tests.support import kafka as support
from tests.support import workers
from tests.support.ports import own_ports
from tests.support.proxy import GUARDED_BY_NAME, ProxyProcess

#: By what coverage's `patch = subprocess` finds its way into child processes.
_COVERAGE = "COVERAGE_PROCESS_CONFIG"

clusters.FREE_PORTS = own_ports()
# Whatever else the machine does meanwhile.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("busy")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if fencepost_compiled.compiled():
        for item in items:
            if item.get_closest_marker("pure") is not None:
                item.add_marker(pytest.mark.skip(reason="compiled code cannot be changed"))
    if hasattr(config, "workerinput"):
        items.sort(key=workers.longest_first)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """`no_cover`, of pytest-cov, for the processes that the test starts too: being measured takes most of their time.

    For tests of what other tests cover anyway, under many more faults and with many more clients.
    """
    covered = os.environ.get(_COVERAGE)
    if item.get_closest_marker("no_cover") is not None:
        os.environ.pop(_COVERAGE, None)
    try:
        return (yield)
    finally:
        if covered is not None:
            os.environ[_COVERAGE] = covered


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Saying(config))


class _Saying:
    """Prints what tests say, in the process that has the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")
        if terminal is None:
            return
        if report.failed:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")  # which, long before the end says why
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == "said":
                    terminal.write_line(f"\n    {value}")


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a line although the test passes, whichever process it runs in."""
    return lambda text: request.node.user_properties.append(("said", text))


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


@pytest.fixture(scope="session")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """The proxy in front of `kafka`, guarding topics by the beginning of their names (`GUARDED_BY_NAME`)."""
    with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("proxy"), config=GUARDED_BY_NAME) as process:
        yield process


@pytest.fixture(scope="session")
def proxy3(kafka3: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """The same in front of `kafka3`."""
    with ProxyProcess(kafka3.bootstrap, tmp_path_factory.mktemp("proxy3"), config=GUARDED_BY_NAME) as process:
        yield process
