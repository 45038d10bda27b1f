"""Transactional clients as processes that can be killed (`transactional_worker.py`, `TransactionalWorker.java`)."""

from __future__ import annotations

import itertools
import queue
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from fencepost_dev.tools import compile_java, java_command
from tests.kit.lines import LineProcess
from tests.support.kafka import kafka_version

CLIENTS = ("java", "confluent-kafka", "kafka-python", "aiokafka")
_JAVA = Path(__file__).parents[1] / "java" / "TransactionalWorker.java"
_PATIENCE_SECONDS = 150.0
_PROBE_SECONDS = 0.5
#: Thread dumps go to stderr, apart from the responses.
_JAVA_ENVIRONMENT = {"JDK_JAVA_OPTIONS": "-XX:+DisplayVMOutputToStderr"}
_numbers = itertools.count(1)


class Reported(NamedTuple):
    """`text` – the response, or the exception's class and message."""

    ok: bool
    text: str

    @property
    def error(self) -> str:
        return "" if self.ok else self.text.split(" ")[0]


class Process(LineProcess):
    def __init__(self, client: str, bootstrap: str, directory: Path) -> None:
        self.client = client
        if client == "java":
            classes = compile_java([_JAVA], version=kafka_version())
            command = java_command("TransactionalWorker", [bootstrap], version=kafka_version(), classes=classes)
        else:
            command = [sys.executable, "-m", "tests.support.transactional_worker", client, bootstrap]
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.log = directory / f"{client}-{next(_numbers)}.log"
        super().__init__(command, self._lines.put, log=self.log, environment=_JAVA_ENVIRONMENT)

    def close(self, seconds: float = 0.0) -> None:
        self.kill()

    @property
    def at(self) -> str:
        """The last step that it began of an endless command (`transform`, `forward`)."""
        begun = [line for line in self.log.read_text().splitlines() if line.startswith("at ")]
        return begun[-1].split()[1] if begun else ""

    def probe(self) -> None:
        """Make it log its stack traces."""
        self.process.send_signal(signal.SIGQUIT if self.client == "java" else signal.SIGUSR1)
        time.sleep(_PROBE_SECONDS)

    def report(self, *command: object) -> None:
        """Send a command; `apply_records` returns its response."""
        self.send(" ".join(map(str, command)))

    def apply_records(self, within_seconds: float = _PATIENCE_SECONDS) -> Reported | None:
        """None: it ended, or sent no response."""
        try:
            line = self._lines.get(timeout=within_seconds)
        except queue.Empty:
            return None
        if line is None:
            self._lines.put(None)
            return None
        state, _, text = line.partition(" ")
        assert state in ("ok", "error"), line
        return Reported(state == "ok", text)

    def query(self, *command: object) -> Reported:
        self.report(*command)
        reported = self.apply_records()
        assert reported is not None, f"{self.client} sent no response to {command}: {self.log.read_text()[-2000:]}"
        return reported

    def do(self, *command: object) -> str:
        """Run a command that must succeed."""
        reported = self.query(*command)
        assert reported.ok, f"{self.client}: {command}: {reported.text}"
        return reported.text
