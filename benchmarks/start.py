"""How long `fencepost proxy` takes until clients can connect, Kafka running; and what that time goes into.

    python -m benchmarks.start
    python -m benchmarks.start --quick

Real Kafka, one broker. The first start on a cluster creates the state topic, so it is told apart. Wall time is from the
start of the process to its `ready` line; CPU time is the process's, user and system, so it does not count what else
the machine does. The parts of it are those of Python processes that import only so much, by turns with the starts.

Bytecode is written to a directory of the run's own, as it would lie beside an installed package.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from benchmarks.results import Row, at_most
from fencepost_proxy.dev.cluster import KafkaCluster

TABLE: Final = "start"
_STARTS, _STARTS_QUICK = 11, 3
_STOP_SECONDS: Final = 15.0
_ANY_PORT: Final = "127.0.0.1:0"

#: What a start has imported by then; each includes the one before it.
_PARTS: Final[Mapping[str, str]] = {
    "Python alone": "pass",
    "with asyncio and uvloop": "import asyncio, uvloop",
    "with checksums and codecs": "import asyncio, uvloop, argparse, json, logging, crc32c, cramjam",
    "with the whole proxy": "import fencepost_proxy.cli.main as m; m._parser('proxy');"
    " import asyncio, uvloop, fencepost_proxy.net.app",
}


class HasCluster(Protocol):
    """As much of the runner's `Run` as is needed here."""

    @property
    def cluster(self) -> KafkaCluster: ...


@dataclass(frozen=True)
class Start:
    seconds: float
    cpu_ms: float
    rss_mb: float


def start_once(upstream: str, environment: Mapping[str, str]) -> Start:
    """One proxy, stopped again once it was ready."""
    command = ["-m", "fencepost_proxy", "proxy", "--upstream", upstream, "--listen", _ANY_PORT, "--log-level", "error"]
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.monotonic() - began
        try:
            if not line.startswith("ready "):
                raise AssertionError(f"fencepost proxy did not get ready: {line!r}")
            tasks = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
            cpu_ms = sum(int(each.read_text().split()[0]) for each in tasks) / 1e6
            status = Path(f"/proc/{process.pid}/status").read_text()
            rss_mb = int(status.partition("VmRSS:")[2].split()[0]) / 1024
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_SECONDS)
    return Start(seconds, cpu_ms, rss_mb)


def import_once(code: str, environment: Mapping[str, str]) -> float:
    """CPU milliseconds of a Python process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def with_bytecode(directory: Path) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**environment, "PYTHONPYCACHEPREFIX": str(directory)}


def rows(run: HasCluster | None = None, *, quick: bool = False) -> list[Row]:
    """On the run's Kafka, where proxies have been before; else on one of its own, whose first start is told too."""
    if run is not None:
        return _rows(run.cluster, quick, fresh=False)
    with KafkaCluster(1) as kafka:
        return _rows(kafka, quick, fresh=True)


def _rows(kafka: KafkaCluster, quick: bool, *, fresh: bool) -> list[Row]:
    found: list[Row] = []

    def add(route: str, measure: str, values: list[float], limit: float | None = None) -> None:
        row = Row(TABLE, route, measure, tuple(values), None if limit is None else at_most(limit))
        found.append(row)
        print(f"{route:45} {measure:12} {row}", flush=True)

    with tempfile.TemporaryDirectory() as directory:
        environment = with_bytecode(Path(directory))
        import_once(_PARTS["with the whole proxy"], environment)  # writes the bytecode
        if fresh:
            add("fencepost, the cluster's first", "s", [start_once(kafka.bootstrap, environment).seconds])
        starts: list[Start] = []
        parts: dict[str, list[float]] = {name: [] for name in _PARTS}
        for _ in range(_STARTS_QUICK if quick else _STARTS):
            starts.append(start_once(kafka.bootstrap, environment))
            for name, code in _PARTS.items():
                parts[name].append(import_once(code, environment))
    add("fencepost", "s", [each.seconds for each in starts], 0.5)
    add("fencepost", "CPU ms", [each.cpu_ms for each in starts])
    add("fencepost", "RSS MB", [each.rss_mb for each in starts], 40)
    for name, values in parts.items():
        add(f"imports: {name}", "CPU ms", values)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer starts")
    rows(quick=parser.parse_args().quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
