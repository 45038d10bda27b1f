"""Kafka's own load tools, in one JVM for the whole run."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fencepost_dev.jars import classpath, release
from fencepost_dev.java import find_jdk, logging_flags
from fencepost_dev.process import supervised
from fencepost_dev.tools import MAIN_CLASSES, compile_java

_SOURCES = Path(__file__).parent / "java"
#: Flags of the scripts in a Kafka distribution.
_JVM = ("-server", "-Xmx512m", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")
_TIMEOUT_SECONDS = 180.0
_PRODUCED = re.compile(r"([\d.]+) records sent, ([\d.,]+) records/sec \(([\d.,]+) MB/sec\)")


class LoadError(Exception):
    """A load tool failed or timed out."""


@dataclass(frozen=True, slots=True)
class Consumed:
    mib: float
    #: Excludes joining the group.
    mib_per_second: float


def produced_mib_per_second(printed: str) -> float:
    """Rate in the last summary line of kafka-producer-perf-test. Its MB are 2²⁰ bytes."""
    found = _PRODUCED.findall(printed)
    if not found:
        raise LoadError(f"no rate in the output of kafka-producer-perf-test:\n{printed}")
    return float(found[-1][2].replace(",", ""))


def consumed(printed: str, *, at_least_mib: float) -> Consumed:
    """Values of kafka-consumer-perf-test, by the names in its header line."""
    lines = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines() if line.count(",") >= 5]
    if len(lines) < 2 or "fetch.MB.sec" not in lines[0]:
        raise LoadError(f"no rate in the output of kafka-consumer-perf-test:\n{printed}")
    values = dict(zip(lines[0], lines[-1], strict=True))
    found = Consumed(float(values["data.consumed.in.MB"]), float(values["fetch.MB.sec"]))
    if found.mib < at_least_mib:
        raise LoadError(f"kafka-consumer-perf-test read {found.mib} MiB, not {at_least_mib}:\n{printed}")
    return found


class Jvm:
    """Create it in a thread that outlives it: the process ends with that thread."""

    def __init__(self, log: Path, *, version: str) -> None:
        classes = compile_java(sorted(_SOURCES.glob("*.java")), version=version)
        path = f"{classes}:{classpath(release(version).tools_lock)}"
        logging = logging_flags("ERROR", to_stderr=True)
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                supervised([str(find_jdk().java), *_JVM, *logging, "-cp", path, "PerfRunner"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._log = log

    def run(self, tool: str, arguments: Sequence[str]) -> str:
        """Run a tool (key of MAIN_CLASSES, or a class). Returns its output. Raises LoadError."""
        orders, printed = self._process.stdin, self._process.stdout
        assert orders is not None
        assert printed is not None
        # Killing a hanging JVM ends the read below.
        watch = threading.Timer(_TIMEOUT_SECONDS, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            orders.write("\t".join((MAIN_CLASSES.get(tool, tool), *arguments)) + "\n")
            orders.flush()
            lines: list[str] = []
            for line in printed:
                if line.startswith("=== "):
                    if line != "=== 0\n":
                        raise LoadError(f"{tool} ended with code {line[4:].strip()}:\n{''.join(lines)}")
                    return "".join(lines)
                lines.append(line)
        except OSError as error:
            raise LoadError(f"{tool}: the JVM ended ({error}); see {self._log}") from error
        finally:
            watch.cancel()
        raise LoadError(f"{tool} did not end within {_TIMEOUT_SECONDS:.0f} s, or the JVM ended; see {self._log}")

    def close(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
