"""Kafka 2.8, the last release that accepts topics of message format 0.10 (`fencepost.idempotence.level=safe`).

One broker and its ZooKeeper, each a process. Clients whose id begins with `not-idempotent` may write there, but get no
producer ids (`tests/java/NotIdempotent.java`).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from fencepost_dev.jars import OLD_BROKER_LOCK, classpath
from fencepost_dev.java import QUICK_JVM, find_jdk, logging_flags
from fencepost_dev.process import SupervisedProcess
from fencepost_dev.tools import compile_java
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.messages import RawConnection
from tests.support.ports import free_port

OLD_FORMAT = {"message.format.version": "0.10.2"}
_AUTHORIZER = Path(__file__).parents[1] / "java" / "NotIdempotent.java"
_START_SECONDS = 120.0
_METADATA = 3
_BROKER = """
broker.id=1
listeners=PLAINTEXT://127.0.0.1:{port}
zookeeper.connect=127.0.0.1:{zookeeper}
log.dirs={directory}/log
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
auto.create.topics.enable=false
authorizer.class.name=NotIdempotent
"""
_ZOOKEEPER = """
clientPort={port}
clientPortAddress=127.0.0.1
dataDir={directory}/zookeeper
admin.enableServer=false
maxClientCnxns=0
"""


class OldKafka:
    """A context manager. `bootstrap` – the broker's address."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="fencepost-old-kafka-"))
        self._port, self._zookeeper_port = free_port(), free_port()
        self._processes: list[SupervisedProcess] = []

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.signal(signal.SIGKILL)
            process.wait(10)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _start(self) -> None:
        zookeeper, broker = self._directory / "zookeeper.properties", self._directory / "server.properties"
        zookeeper.write_text(_ZOOKEEPER.format(port=self._zookeeper_port, directory=self._directory))
        broker.write_text(_BROKER.format(port=self._port, zookeeper=self._zookeeper_port, directory=self._directory))
        self._run("org.apache.zookeeper.server.ZooKeeperServerMain", zookeeper)
        self._await(self._zookeeper_port)
        self._run("kafka.Kafka", broker)
        self._await(self._port)
        until(self._sees_itself, "the broker to register", seconds=_START_SECONDS)

    def _run(self, main: str, config: Path) -> None:
        flags = ["-Xmx512m", *QUICK_JVM, *logging_flags("WARN", to_stderr=False)]
        path = os.pathsep.join([classpath(OLD_BROKER_LOCK), str(compile_java([_AUTHORIZER]))])
        command = [str(find_jdk().java), *flags, "-cp", path, main, str(config)]
        self._processes.append(SupervisedProcess(command, output=self._directory / f"{config.stem}.out"))

    def _await(self, port: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._processes[-1].running:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        output = max(self._directory.glob("*.out"), key=lambda path: path.stat().st_mtime)
        raise RuntimeError(f"nothing listens on port {port}: {output.read_text()[-2000:]}")

    def _sees_itself(self) -> bool:
        with RawConnection(Address.parse(self.bootstrap)) as connection:
            return bool(connection.query(_METADATA, 9, {"Topics": None})["Brokers"])
