"""Shared parts of jobs that use the sink: Kafka client settings on the command line, and progress output."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final, TextIO

from pyspark.sql import SparkSession

from fencepost.java_properties import properties_of
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


class Progress:
    """Prints the number and rate of appended records, from log end offsets, while Spark writes."""

    def __init__(
        self, job: str, spark: SparkSession, log: Log, topic: str, *, partitions: int, out: TextIO | None = None
    ) -> None:
        self._job, self._spark, self._log, self._topic = job, spark, log, topic
        self._partitions = range(partitions)
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
        before, since = 0, time.monotonic()
        reported = since - _LINE_SECONDS
        while not self._over.wait(_PROBE_SECONDS):
            with contextlib.suppress(CannotReach, SinkError):  # the write reports the error itself
                ends = [end for _, end in self._log.offsets(self._topic, self._partitions).values()]
                now, there = time.monotonic(), sum(ends)
                if first is None:
                    first = before = there
                if self._live or now - reported >= _LINE_SECONDS:
                    self._report(ends, there - first, (there - before) / (now - since))
                    reported = now
                    before, since = there, now

    def _report(self, ends: list[int], appended: int, speed: float) -> None:
        at = " ".join(f"{end:,}" for end in ends[:8]) + (" …" if len(ends) > 8 else "")
        line = f"{self._job}: {appended:,} records appended, {speed:,.0f} a second; log ends {at}{self._stages()}"
        if self._live:
            print(f"\r{line:<{self._width}}", end="", file=self._out, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._out, flush=True)

    def _stages(self) -> str:
        """Completed and total tasks of Spark's active stages."""
        tracker = self._spark.sparkContext.statusTracker()
        found = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
        return "".join(f"; Spark: {each.numCompletedTasks} of {each.numTasks} tasks done" for each in found if each)
