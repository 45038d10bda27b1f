"""A pytest plugin: a real Kafka and the proxy, for the tests of an application.

In the application's `conftest.py`:

    pytest_plugins = ["fencepost_dev.pytest"]

In a test:

    def test_second_append_is_refused(fencepost):
        topic = fencepost.create_topic(configs={"fencepost.check.expected.offsets": "required"})
        producer = ConditionalProducer(bootstrap_servers=fencepost.bootstrap_servers)

The fixture has the scope of the session and starts `fencepost dev` on free ports, in about five seconds. Kafka and the
proxy end with the session, and all data is deleted. With pytest-xdist each worker has its own.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Final

import pytest

from fencepost_dev.errors import ClusterError
from fencepost_dev.process import supervised

_START: Final = (sys.executable, "-m", "fencepost_proxy", "dev", "--listen", "127.0.0.1:0", "--status", "127.0.0.1:0")
_STOP_SECONDS: Final = 30.0
_TOPIC_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Fencepost:
    """`bootstrap_servers`: the proxy's address, for the application. `kafka_bootstrap_servers`: the broker's, for a
    client that bypasses the proxy. `status`: address of the status page."""

    bootstrap_servers: str
    kafka_bootstrap_servers: str
    status: str

    def create_topic(
        self, name: str | None = None, *, partitions: int = 1, configs: Mapping[str, str] | None = None
    ) -> str:
        """Creates a topic with Kafka's or Fencepost's configs, and returns its name when clients can use it.

        The default name is a new one, so that tests do not meet each other's records.
        """
        from kafka import KafkaAdminClient  # noqa: PLC0415 - slow to import, and many tests do not need it
        from kafka.admin import NewTopic  # noqa: PLC0415

        name = name or f"test-{uuid.uuid4().hex[:12]}"
        with closing(KafkaAdminClient(bootstrap_servers=self.bootstrap_servers)) as admin:
            admin.create_topics([NewTopic(name, partitions, 1, topic_configs=dict(configs or {}))])
            deadline = time.monotonic() + _TOPIC_SECONDS
            # Brokers learn of a topic shortly after the controller.
            while True:
                (topic,) = admin.describe_topics([name])
                if not topic["error_code"] and len(topic["partitions"]) == partitions:
                    return name
                if time.monotonic() > deadline:
                    raise ClusterError(f"topic {name} has no leaders after {_TOPIC_SECONDS:.0f} s")
                time.sleep(0.05)


@pytest.fixture(scope="session")
def fencepost() -> Iterator[Fencepost]:
    """Kafka and the proxy of this test session: see `fencepost_dev.pytest`."""
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            supervised(list(_START)), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield _ready(process.stdout.readline(), log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _ready(line: str, log: IO[str]) -> Fencepost:
    if not line.startswith("ready "):
        log.seek(0)
        reason = (log.read().splitlines() or ["it printed nothing"])[-1]
        raise ClusterError(f"fencepost dev did not start: {reason}")
    found = dict(each.split("=", 1) for each in line.split()[1:])
    return Fencepost(found["bootstrap"], found["kafka"], found["status"])
