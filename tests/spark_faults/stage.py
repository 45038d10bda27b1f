"""The environment of a fault: Kafka, the proxy, Spark drivers that can be killed, a source, and the counting of rows.

A **stage** has one Kafka, one proxy, and a driver that runs until a fault kills it. A **trial** tests one sink. It has
a topic, and queries that write their sources to it. A source is a directory, and each of its files is one micro-batch.
`Trial.count` counts the rows in Kafka, independently of Spark's reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fencepost.spark import stated
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.jars import fetch
from fencepost_dev.java import find_jdk
from tests.kit import reading, waiting
from tests.kit.lines import LineProcess
from tests.kit.waiting import NeverHappened
from tests.spark_faults import gates
from tests.spark_faults.query import FENCEPOST, ROWS_AT_ONCE
from tests.support.kafka import running_kafka, unique_topic
from tests.support.ports import free_ports_in_a_row
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection
from tests.support.spark import session_of

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.25
until = partial(waiting.until, seconds=PATIENCE_SECONDS, pause_seconds=_POLL_SECONDS)
PARTITIONS = 2
TASKS = 2
KEYS = 20
ROWS = 4000
#: Rows of a task before its point `rows`: more than the buffers before Kafka take, but not all.
LET_THROUGH = 1400
_TEXT = "x" * 180
#: The prefix that a changed query adds to each value.
CHANGED = b"changed "
#: Two concurrent tasks, with four attempts each.
LOCAL = "local[2,4]"
#: Separate executors: JVMs apart from the driver's.
CLUSTER = "local-cluster[2,1,1024]"
#: Workers that outlive drivers, with one host name each: a task never has two attempts on one host. See `Standalone`.
STANDALONE = "standalone"
_CONFIG = """
[topics."faults-*"]
"fencepost.check.expected.offsets" = "required"
"""
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class QueryFailed(Exception):
    """The error that ended a query, as Spark reports it."""

    def __init__(self, reported: str) -> None:
        super().__init__(reported)
        self.reported = reported

    @property
    def reason(self) -> str:
        """The sink's message without Spark's stack frames; otherwise Spark's first line."""
        return stated(self) or self.reported.strip().partition("\n")[0]


# --- Spark ------------------------------------------------------------------------------------------------------------


class Driver(LineProcess):
    """Runs `python -m tests.spark_faults.driver`; ready on construction."""

    def __init__(self, directory: Path, master: str, extra: Mapping[str, str]) -> None:
        self.master, self.extra = master, dict(extra)
        #: It runs, but no longer for the stage, which starts another one.
        self.forgotten = False
        self.log = directory / f"driver-{time.monotonic_ns()}.log"
        jars = ":".join(map(str, fetch("spark-kafka")))
        path = f"{directory / 'classes'}:{jars}"
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.extraClassPath": path,
            "spark.executor.extraClassPath": path,
            "spark.driver.extraJavaOptions": _JVM,
            "spark.executor.extraJavaOptions": _JVM,
            "spark.log.level": "WARN",
            "spark.sql.execution.arrow.maxRecordsPerBatch": str(ROWS_AT_ONCE),
            "spark.sql.streaming.checkpointFileManagerClass": "GatedCheckpoints",
            "spark.local.dir": str(directory / "spark"),
            **extra,
        }
        command = [sys.executable, "-m", "tests.spark_faults.driver", master, json.dumps(settings)]
        self._lines: queue.Queue[str | None] = queue.Queue()
        super().__init__(command, self._lines.put, log=self.log, cwd=directory, environment=_environment(directory))
        try:
            assert self._observe_record() == "ready"
        except BaseException:
            self.end()
            raise

    def report(self, what: str, **more: Any) -> Any:
        self.send(json.dumps({"do": what, **more}))
        answer = self._observe_record()
        if "error" in answer:
            raise QueryFailed(answer["error"])
        return answer["ok"]

    def kill(self) -> None:
        """Send SIGKILL to the driver's Python process and JVM, but not to its workers."""
        ours = self.processes()
        for pid in (self.process.pid, *(pid for pid, (parent, _) in ours.items() if parent == self.process.pid)):
            _signal(pid, signal.SIGKILL)
        self.process.wait()

    def executors(self) -> list[int]:
        return [pid for pid, (_, command) in self.processes().items() if "CoarseGrainedExecutorBackend" in command]

    def workers(self) -> list[int]:
        return [pid for pid, (_, command) in self.processes().items() if "pyspark.daemon" in command]

    def processes(self) -> dict[int, tuple[int, str]]:
        """Parent and command of each live process of its session."""
        return session_of(self.process.pid)

    def end(self) -> None:
        while members := self.processes():
            for pid in members:
                _signal(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        self.close()

    def _observe_record(self) -> Any:
        try:
            line = self._lines.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            line = None
        if line is None:
            raise NeverHappened(f"the driver did not respond:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)


def _environment(directory: Path) -> dict[str, str]:
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "PYTHONWARNINGS": "ignore",
        gates.DIRECTORY: str(directory / "gates"),
    }


class Standalone:
    """A Spark standalone cluster: a master, and workers with separate addresses."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        port = free_ports_in_a_row(2)
        self.url = f"spark://127.0.0.1:{port}"
        self._directory = directory
        self._environment = {
            **os.environ,
            **environment,
            "SPARK_DAEMON_JAVA_OPTS": _JVM,
            "SPARK_HOME": str(_spark_home()),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._log = directory / "standalone.log"
        master = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(port + 1)]
        self._start("org.apache.spark.deploy.master.Master", *master)
        for host in ("127.0.0.1", "127.0.0.2"):
            self._start_worker(host)
        self._until_registered(2)

    def host_of(self, process: int) -> str:
        """The address of the worker that started this process."""
        return next(host for host, worker in self._workers.items() if process in session_of(worker.pid))

    def kill_worker(self, host: str) -> None:
        """Send SIGKILL to the worker, its executor and the Python processes, as if the machine had failed."""
        worker = self._workers[host]
        while members := session_of(worker.pid):
            for pid in members:
                _signal(pid, signal.SIGKILL)
            worker.poll()
            time.sleep(_POLL_SECONDS)

    def restart_worker(self, host: str) -> None:
        self._start_worker(host)
        self._until_registered(3)

    def _start_worker(self, host: str) -> None:
        settings = ["--host", host, "--cores", "1", "--memory", "1g", "--webui-port", "0"]
        work = str(self._directory / "work")
        name = "org.apache.spark.deploy.worker.Worker"
        self._workers[host] = self._start(name, *settings, "--work-dir", work, self.url)

    def _until_registered(self, count: int) -> None:
        registered = "Successfully registered with master"
        until(lambda: self._log.read_text().count(registered) >= count, "the workers registered")

    def close(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with self._log.open("a") as log:
            process = subprocess.Popen(
                [str(_spark_home() / "bin/spark-class"), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self._processes.append(process)
        return process


def _signal(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


# --- the stage --------------------------------------------------------------------------------------------------------


class Stage:
    def __init__(self, kafka: KafkaCluster, directory: Path) -> None:
        self.kafka, self.directory = kafka, directory
        for name in ("classes", "gates", "proxy", "spark"):
            (directory / name).mkdir()
        os.environ[gates.DIRECTORY] = str(directory / "gates")
        _compile(directory / "classes")
        self.proxy = ProxyProcess(kafka.bootstrap, directory / "proxy", config=_CONFIG, port=free_ports_in_a_row(4))
        self._drivers: list[Driver] = []
        self._standalone: Standalone | None = None

    @property
    def standalone(self) -> Standalone:
        """Started on first use."""
        if self._standalone is None:
            self._standalone = Standalone(self.directory, _environment(self.directory))
        return self._standalone

    def driver(self, master: str = LOCAL, **extra: str) -> Driver:
        """A live driver of this kind: the current one if it matches."""
        extra = {name.replace("_", "."): value for name, value in extra.items()}
        if master == STANDALONE:
            master = self.standalone.url
        if self._drivers and (last := self._drivers[-1]).running and not last.forgotten:
            if (last.master, last.extra) == (master, extra):
                return last
            last.end()
        self._drivers.append(Driver(self.directory, master, extra))
        return self._drivers[-1]

    def end_orphans(self) -> None:
        """End the processes of killed drivers."""
        for each in self._drivers[:-1]:
            each.end()
        if self._drivers and not self._drivers[-1].running:
            self._drivers[-1].end()

    def close(self) -> None:
        for each in self._drivers:
            each.end()
        if self._standalone is not None:
            self._standalone.close()
        self.proxy.close()


@contextmanager
def stage(directory: Path) -> Iterator[Stage]:
    with running_kafka(1) as kafka, contextlib.closing(Stage(kafka, directory)) as ready:
        yield ready


def _spark_home() -> Path:
    import pyspark  # noqa: PLC0415

    return Path(pyspark.__file__).parent


def _compile(target: Path) -> None:
    jars = _spark_home() / "jars"
    source = Path(__file__).with_name("GatedCheckpoints.java")
    subprocess.run(
        [find_jdk().javac, "-nowarn", "-d", target, "-cp", f"{jars}/*", source], check=True, capture_output=True
    )


# --- a trial ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    expected: int
    missing: int
    duplicated: int
    #: Records after a later one of the same key, in one partition.
    out_of_order: int
    #: Records that no source has.
    foreign: int = 0

    @property
    def exact(self) -> bool:
        return not (self.missing or self.duplicated or self.out_of_order or self.foreign)


@dataclass(slots=True)
class Query:
    """A query that a trial starts, and may restart with other settings."""

    name: str
    source: str
    checkpoint: str
    sink_id: str
    first_id: int = 0
    tasks: int = TASKS
    files: int = 1
    prefix: str = ""
    let_through: int = LET_THROUGH
    #: One `df.write` of all rows of the source.
    load: bool = False
    options: dict[str, str] = field(default_factory=dict)
    #: Micro-batches created, and the rows in them.
    batches: int = 0
    rows: int = 0
    newest: int = 0

    def more(self, rows: int = ROWS) -> int:
        """Add a micro-batch to the source. Return its number, provided that each file became one batch."""
        ids = range(self.first_id + self.rows, self.first_id + self.rows + rows)
        table = pa.table(
            {
                "id": pa.array(ids, pa.int64()),
                "key": [f"{self.name}-{n % KEYS}" for n in ids],
                "counter": pa.array([n // KEYS for n in ids], pa.int64()),
                "text": [_TEXT] * rows,
            }
        )
        file = Path(self.source) / f"{self.batches:04}.parquet"
        part = file.with_name(f".{file.name}")
        pq.write_table(table, part)
        # Spark reads the files of a source in the order of their times.
        when = time.time() - 1000 + self.batches
        os.utime(part, (when, when))
        part.rename(file)
        self.batches += 1
        self.rows += rows
        self.newest = rows
        return self.batches - 1

    def done(self, batch: int) -> bool:
        return (Path(self.checkpoint) / "commits" / str(batch)).exists()


class Trial:
    """Consecutive faults on one sink and one topic. Call `begin` before each."""

    def __init__(self, stage: Stage, sink: str, master: str = LOCAL) -> None:
        self.stage, self.sink, self.master = stage, sink, master
        self.ours = sink == FENCEPOST
        self.topic = unique_topic("faults" if self.ours else "plain")
        with Connection(stage.kafka.bootstrap) as admin:
            assert admin.create_topic(self.topic, partitions=PARTITIONS, replicas=1) == (0, None)
        self.directory = stage.directory / f"{self.topic}-{time.monotonic_ns()}"
        self.queries: list[Query] = []
        self.driver_settings: dict[str, str] = {}
        self.begin(chained=False)

    def begin(self, *, chained: bool) -> None:
        """`chained` – the next fault uses the query of this one."""
        gates.clear()
        self.stage.end_orphans()
        self.chained = chained
        #: The batch that the fault hits.
        self.at = 0
        #: The sink's refusal, the reaction to it, and the counts at the refusal.
        self.refusal = self.then = ""
        self.at_refusal: Counts | None = None
        self._counted_from = {query.name: query.rows for query in self.queries}

    def close(self) -> None:
        for each in self.queries:
            with contextlib.suppress(QueryFailed, NeverHappened, OSError):
                if self.driver.running:
                    self.driver.report("stop", name=each.name)
        gates.clear()
        self.stage.end_orphans()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def driver(self) -> Driver:
        return self.stage.driver(self.master, **self.driver_settings)

    def query(self, name: str = "q", first_id: int = 0) -> Query:
        directory = self.directory / name
        (directory / "source").mkdir(parents=True)
        made = Query(name, str(directory / "source"), str(directory / "checkpoint"), f"{self.topic}-{name}", first_id)
        self.queries.append(made)
        return made

    def start(self, query: Query) -> None:
        self.driver.report(
            "start",
            **asdict(query),
            sink=self.sink,
            bootstrap=self.stage.proxy.bootstrap,
            topic=self.topic,
            partitions=PARTITIONS,
        )

    def stop(self, query: Query) -> None:
        self.driver.report("stop", name=query.name)

    def loaded(self, query: Query) -> None:
        """Wait until a `df.write` has ended. Raises QueryFailed if it failed."""
        until(lambda: not self.driver.report("state", name=query.name)["active"], f"the load {query.name} ended")
        if error := self.driver.report("state", name=query.name)["error"]:
            raise QueryFailed(error)

    def done(self, query: Query, batch: int) -> None:
        """Wait until Spark has recorded the batch as complete. Raises QueryFailed if the query ends."""
        until(lambda: query.done(batch) or self._failed(query), f"batch {batch} of {query.name} done")

    def fails(self, query: Query) -> QueryFailed:
        try:
            until(lambda: self._failed(query), f"{query.name} failed")
        except QueryFailed as failed:
            return failed
        raise AssertionError

    def _failed(self, query: Query) -> bool:
        state = self.driver.report("state", name=query.name)
        if not state["active"]:
            raise QueryFailed(state["error"] or "ended without an error")
        return False

    def run(self, query: Query, batches: int = 1) -> None:
        """Start the query and wait until it has completed so many more batches."""
        last = [query.more() for _ in range(batches)][-1]
        self.start(query)
        self.done(query, last)

    def reached(self, *names: str) -> int:
        """Wait until a process is at one of these points; return its id."""
        until(
            lambda: any(gates.reached(name) for name in names) or any(map(self._failed, self.queries)),
            f"a process at {' or '.join(names)}",
        )
        return next(pid for name in names if (pid := gates.reached(name)))

    def has_written(self, query: Query, batch: int, task: int) -> None:
        """Wait until some rows of this task, of the latest batch, are in Kafka."""

        def some() -> bool:
            keys = {key.encode() for key in gates.recorded(f"key.{batch}.{task}.")}
            first = query.first_id + query.rows - query.newest
            return any(
                key in keys and _number(value) >= first
                for partition in range(PARTITIONS)
                for key, value in read(self.stage.kafka.bootstrap, self.topic, partition)
            )

        until(some, f"rows of task {task} of batch {batch} in Kafka")

    def count(self) -> Counts:
        """Count the rows that the sources got since `begin`."""
        expected = {
            query.first_id + n
            for query in self.queries
            for n in range(self._counted_from.get(query.name, 0), query.rows)
        }
        earlier = {query.first_id + n for query in self.queries for n in range(query.rows)} - expected
        rows = Counter[int]()
        out_of_order = 0
        for partition in range(PARTITIONS):
            last: dict[bytes, int] = {}
            for key, value in read(self.stage.kafka.bootstrap, self.topic, partition):
                number, counter = _number(value), int(value.removeprefix(CHANGED).split()[1])
                if number not in earlier:
                    rows[number] += 1
                    out_of_order += counter < last.get(key, -1)
                    last[key] = counter
        return Counts(
            len(expected),
            sum(n not in rows for n in expected),
            sum(times - 1 for times in rows.values()),
            out_of_order,
            sum(n not in expected for n in rows),
        )

    def refused(self, query: Query, then: str) -> None:
        """Expect that our sink refuses to continue, and has appended nothing wrong. `then` – the reaction to it."""
        self.refusal = self.fails(query).reason
        self.at_refusal = self.count()
        self.then = then


def _number(value: bytes) -> int:
    """The number of the source's row."""
    return int(value.removeprefix(CHANGED).split()[0])


def read(bootstrap: str, topic: str, partition: int) -> Iterator[tuple[bytes, bytes]]:
    """Key and value of each record."""
    for message in reading.read(bootstrap, (topic, partition), isolation="read_uncommitted"):
        yield message.key(), message.value()
