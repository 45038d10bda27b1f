"""Shared fixtures: one real Kafka of each size, started by the first test that uses it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from _pytest.unraisableexception import collect_unraisable
from kafka.net.inet import KafkaNetSocket
from kafka.net.transport import KafkaSSLTransport

# Before the product is imported, and for its processes: what native code remembers is compared with what Python says.
os.environ.setdefault("FENCEPOST_NATIVE", "verify")

from fencepost_dev import ports
from fencepost_dev.cluster import KafkaCluster
from tests.kit.fault_proxy import FaultProxy
from tests.kit.stage import piped_kafka
from tests.support import examples, results, workers  # noqa: F401
from tests.support import kafka as support
from tests.support.ports import own_ports
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess

#: coverage's `patch = subprocess` reads this variable in child processes.
_COVERAGE = "COVERAGE_PROCESS_CONFIG"

ports.FREE_PORTS = own_ports()


class _SocketOfKafkaPython(socket.socket):
    """kafka-python leaks the socket of a refused or unfinished connection when its client closes."""

    def __del__(self) -> None:
        self.close()


class _TlsSocketOfKafkaPython(ssl.SSLSocket):
    """The same socket after the TLS handshake."""

    def __del__(self) -> None:
        self.close()


def _tls_of_kafka_python(config: dict[str, Any], build: Any = KafkaSSLTransport._build_ssl_context) -> ssl.SSLContext:
    context: ssl.SSLContext = build(config)
    context.sslsocket_class = _TlsSocketOfKafkaPython
    return context


KafkaNetSocket.socket = lambda self, *arguments: _SocketOfKafkaPython(*arguments)  # type: ignore[method-assign]
KafkaSSLTransport._build_ssl_context = staticmethod(_tls_of_kafka_python)  # type: ignore[method-assign]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return workers.ByFile(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not _LEAKS_FAIL:
        for item in filter(_has_clients_of_others, items):
            item.add_marker(_LEAKS_ARE_REPORTED)
    if hasattr(config, "workerinput") and config.workerinput["ends_at"] == float("inf"):
        items.sort(key=workers.longest_first)  # the given order decides what a time limit cuts off


#: Leaked sockets and coroutines are errors in tests of this repository's code. Other client libraries leak some when a
#: connection fails at the wrong moment. Tests with such libraries report a warning instead. FENCEPOST_LEAKS=fail makes
#: it an error there too, and names the test that leaked.
_LEAKS_FAIL = os.environ.get("FENCEPOST_LEAKS") == "fail"
_LEAKS_ARE_REPORTED = pytest.mark.filterwarnings(
    "default::ResourceWarning",
    "default:coroutine .* was never awaited:RuntimeWarning",
    "default::pytest.PytestUnraisableExceptionWarning",
)


def _has_clients_of_others(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("kafka", "spark", "docker"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # excludes existing objects, so that each collection after a test is cheap


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Collect garbage after each test, so that a leak is reported for the test that caused it."""
    yield
    if _has_clients_of_others(item):
        gc.collect()
        collect_unraisable(item.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Apply pytest-cov's `no_cover` to child processes too, because measuring takes most of their time.

    For tests with many faults and clients whose code paths other tests cover.
    """
    covered = os.environ.get(_COVERAGE)
    if item.get_closest_marker("no_cover") is not None:
        os.environ.pop(_COVERAGE, None)
    try:
        with _logs_as_they_were():
            return (yield)
    finally:
        if covered is not None:
            os.environ[_COVERAGE] = covered


@contextmanager
def _logs_as_they_were() -> Iterator[None]:
    """Restore the loggers: a command that runs in this process configures them."""
    root, package = logging.getLogger(), logging.getLogger("fencepost")
    handlers, levels = root.handlers[:], (root.level, package.level)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        package.setLevel(levels[1])
        logging.captureWarnings(False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    results.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Saying(config))
    config.pluginmanager.register(results.Results(config))


class _Saying:
    """Prints what tests report, in the process that has the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._plugins.get_plugin("terminalreporter")
        if terminal is None:
            return
        if report.failed:
            terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")  # the reason follows at the end of the run
        if report.when == "teardown":
            for name, value in report.user_properties:
                if name == "said":
                    terminal.write_line(f"\n    {value}")


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print a line even if the test passes, from any worker process."""
    return lambda text: request.node.user_properties.append(("said", text))


@pytest.fixture(scope="session")
def _kafka_and_pipe() -> Iterator[tuple[KafkaCluster, FaultProxy]]:
    with piped_kafka(1) as (cluster, pipes):
        yield cluster, pipes[1]


@pytest.fixture(scope="session")
def kafka(_kafka_and_pipe: tuple[KafkaCluster, FaultProxy]) -> KafkaCluster:
    """One broker, shared by all tests. Use unique topics; leave it running and unpaused."""
    return _kafka_and_pipe[0]


@pytest.fixture(scope="session")
def pipe(_kafka_and_pipe: tuple[KafkaCluster, FaultProxy]) -> FaultProxy:
    """The fault proxy in front of `kafka`. Add faults for unique topics only."""
    return _kafka_and_pipe[1]


@pytest.fixture(scope="module")
def kafka3() -> Iterator[KafkaCluster]:
    """Three brokers, shared by one test file. A test that stops a broker starts it again.

    Three idle brokers take a fifth of a core: as much in a minute as their start. So they do not run all the time.
    """
    with support.running_kafka(3) as cluster:
        yield cluster


@pytest.fixture
def unique_topic() -> Callable[..., str]:
    """`unique_topic("prefix")` returns a different name on each call."""
    return support.unique_topic


@pytest.fixture(scope="session")
def proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy for `kafka`, which checks topics by name prefix (`CHECKED_BY_NAME`)."""
    with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("proxy"), config=CHECKED_BY_NAME) as process:
        yield process


@pytest.fixture(scope="module")
def proxy3(kafka3: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(kafka3.bootstrap, tmp_path_factory.mktemp("proxy3"), config=CHECKED_BY_NAME) as process:
        yield process
