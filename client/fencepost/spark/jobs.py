"""Shared parts of jobs that use the sink: their command lines, and progress output."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final, NamedTuple, TextIO

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from fencepost.java_properties import properties_of
from fencepost.spark.driver_probe import probe
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.log import Log

#: Interval of log-end reads, and of output lines if the output is not a terminal.
_PROBE_SECONDS: Final = 1.0
_LINE_SECONDS: Final = 10.0


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    add_named_values(
        parser, "--option", help="Set a Kafka client option, named as in Java: security.protocol=SASL_SSL; repeatable"
    )
    parser.add_argument(
        "--client-config",
        metavar="FILE",
        help="Read Kafka client options from a .properties file on the driver; use it for secrets",
    )


def add_named_values(parser: argparse.ArgumentParser, option: str, *, help: str) -> None:
    """An option that may be repeated, as (name, value) pairs."""
    parser.add_argument(option, type=named_value, action="append", default=[], metavar="NAME=VALUE", help=help)


def named_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.strip(), value.strip()


def client_settings(args: argparse.Namespace) -> dict[str, str]:
    """`kafka.*` options for Spark, from `add_client_arguments` and `--bootstrap`. Raises SinkError."""
    found = {"bootstrap.servers": args.bootstrap}
    if args.client_config:
        try:
            with open(args.client_config, "rb") as file:
                properties = list(properties_of(file.read()))
        except OSError as error:
            raise SinkError(f"--client-config {args.client_config}: {error}") from None
        for each in properties:
            if not (each.name and each.is_separated):
                # Do not print the line: it may contain a password.
                raise SinkError(f"--client-config {args.client_config}: line {each.line} is not NAME=VALUE")
        found |= {each.name: each.value for each in properties}
    found |= dict(args.option)
    return {f"kafka.{name}": value for name, value in found.items()}


def session(name: str) -> SparkSession:
    """The session of a job. Spark's own lines and progress bar would hide the job's lines: they are off, unless
    `--conf` sets them."""
    SparkContext._ensure_initialized()  # otherwise SparkConf does not have what spark-submit was given
    given, builder = SparkConf(), SparkSession.builder.appName(name)
    for option, value in (("spark.log.level", "ERROR"), ("spark.ui.showConsoleProgress", "false")):
        if not given.contains(option):
            builder = builder.config(option, value)
    return builder.getOrCreate()


class Work(NamedTuple):
    """What Spark does. `rows`: all rows of the load, None while they are read; `read`: those read so far."""

    rows: int | None = None
    read: int = 0
    tasks_done: int = 0
    tasks: int = 0


class Stages:
    """Spark's stages of a load: they read the rows and shuffle them, then sort and write them."""

    def __init__(self, spark: SparkSession) -> None:
        self._context = spark.sparkContext
        self._rows: int | None = None

    def work(self) -> Work:
        active = sorted(self._context.statusTracker().getActiveStageIds())
        # Spark has the number of rows only here. It skips stages, and a quick one may have ended before.
        stages = [self._stage(number) for number in range(max(active, default=-1) + 1)]
        finished = [each for number, each in enumerate(stages) if each is not None and number not in active]
        shuffled = [each.shuffleWriteRecords() for each in finished if each.shuffleWriteRecords()]
        current = next((stages[number] for number in reversed(active) if stages[number] is not None), None)
        if current is None:
            return Work(self._rows)
        if shuffled and current.shuffleWriteRecords() == 0:
            self._rows = shuffled[-1]
        read = max(current.inputRecords(), current.shuffleWriteRecords())
        return Work(self._rows, read, current.numCompleteTasks(), current.numTasks())

    def _stage(self, number: int) -> Any:
        try:
            return self._context._jsc.sc().statusStore().lastStageAttempt(number)
        except Py4JError:  # no such stage, or Spark's internals have changed
            return None


class Progress:
    """Prints what a load does and how much of it is done: from Spark's stages, and log end offsets. `found`: rows that
    earlier runs appended."""

    def __init__(
        self,
        job: str,
        stages: Stages,
        log: Log,
        topic: str,
        *,
        partitions: int,
        found: int = 0,
        out: TextIO | None = None,
    ) -> None:
        self._job, self._stages, self._log, self._topic = job, stages, log, topic
        self._partitions = range(partitions)
        self._found = found
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._over = threading.Event()
        self._width = 0

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        thread = threading.Thread(target=self._show, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(10)
            if self._live:
                print("\r" + " " * self._width + "\r", end="", file=self._out, flush=True)

    def _show(self) -> None:
        first: int | None = None
        began = reported = time.monotonic() - _LINE_SECONDS
        while not self._over.wait(_PROBE_SECONDS):
            with contextlib.suppress(CannotReach, SinkError):  # the write reports the error itself
                now, work = time.monotonic(), self._stages.work()
                if work.rows is not None:  # without the last row of each task (`arranging.py`)
                    work = work._replace(rows=work.rows - len(self._partitions))
                there = sum(end for _, end in self._log.offsets(self._topic, self._partitions).values())
                if first is None:
                    first = there
                if there == first:
                    began = now  # of the first append, at most one read later
                line = progress_of(work, self._found, there - first, now - began)
                if line and (self._live or now - reported >= _LINE_SECONDS):
                    self._report(f"{self._job}: {line}")
                    reported = now

    def _report(self, line: str) -> None:
        if self._live:
            print(f"\r{line:<{self._width}}", end="", file=self._out, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._out, flush=True)


def progress_of(work: Work, found: int, appended: int, seconds: float) -> str:
    """`found`: rows that earlier runs appended; `appended`: records since, in `seconds`. Empty before the first
    task of Spark."""
    if not appended and work.rows is None:
        tasks = f"{work.tasks_done} of {work.tasks} tasks done ({work.tasks_done / max(work.tasks, 1):.0%})"
        return f"reading: {work.read:,} rows, {tasks}" if work.tasks else ""
    if not appended:
        again = f"; an earlier run appended {found:,} of them" if found else ""
        return f"sorting: {work.rows:,} rows{again}"
    speed = appended / max(seconds, _PROBE_SECONDS)
    if not work.rows:
        return f"writing: {appended:,} records appended, {speed:,.0f} a second"
    # Other writers may append too.
    done = min(found + appended, work.rows)
    left = f"{timedelta(seconds=round((work.rows - done) / speed))} left"
    return f"writing: {done:,} of {work.rows:,} rows ({done / work.rows:.0%}), {speed:,.0f} a second, {left}"


def rows_in_log(log: Log, sink: str, topic: str) -> int:
    """The rows of this load that earlier runs appended. Raises CannotReach, SinkError."""
    found = probe(log, sink, {topic: log.identify(topic)}, at=int(time.time() * 1000)).observations.values()
    return sum(each.last.prefix.rows for each in found if each.last and each.last.prefix)
