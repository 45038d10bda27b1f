"""A load with transactions and a side topic for the position, next to the same load with `Loader`.

    python -m benchmarks.loads                # 2 to 4 minutes
    python -m benchmarks.loads --rounds 1     # too short for published figures

Both load the same rows with confluent-kafka into three partitions, in turn, in one run. The transactions go to Kafka
directly. A commit is one group of rows and the position after them. After a kill, a new process finds the position and
commits the next group: the seconds are those from its first connection to that commit.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from benchmarks import routes
from benchmarks.stage import QUICK, Run, Stage
from fencepost import Record
from fencepost.confluent import LogWriter
from fencepost.recipes import Loader
from fencepost_dev.errors import DevError

PARTITIONS: Final = 3
_NAME: Final = "a-load"
_ROW_BYTES: Final = 100
_KILL_AFTER_SECONDS: Final = 0.5
_SECONDS_MAX: Final = 60.0


class Way(Protocol):
    position: bytes | None

    def commit(self, rows: list[Record], position: bytes) -> None: ...


class WithTransactions:
    """What is built today: rows and position in one transaction, the position in another topic."""

    def __init__(self, topic: str, bootstrap: str) -> None:
        self._topic, self._positions = topic, f"{topic}-positions"
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "transactional.id": f"{_NAME}-{topic}", "partitioner": "murmur2_random"}
        )
        self._producer.init_transactions(_SECONDS_MAX)  # aborts the transaction of an earlier process
        self.position: bytes | None = None
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": _NAME,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        start, _ = consumer.get_watermark_offsets(TopicPartition(self._positions, 0), _SECONDS_MAX)
        consumer.assign([TopicPartition(self._positions, 0, start)])
        while True:
            message = consumer.poll(_SECONDS_MAX)
            if message is None:
                raise TimeoutError("the positions cannot be read")
            error = message.error()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                break
            if error is not None:
                raise RuntimeError(str(error))
            if message.key() == _NAME.encode():
                self.position = message.value()
        consumer.close()

    def commit(self, rows: list[Record], position: bytes) -> None:
        self._producer.begin_transaction()
        for row in rows:
            self._producer.produce(self._topic, row.value, row.key)
        self._producer.produce(self._positions, position, _NAME, 0)
        self._producer.commit_transaction(_SECONDS_MAX)


class WithLoader:
    def __init__(self, topic: str, bootstrap: str) -> None:
        logs = [LogWriter(topic, each, {"bootstrap.servers": bootstrap}) for each in range(PARTITIONS)]
        self._load = Loader(_NAME, logs)
        self._load.start()
        self.position = self._load.position

    def commit(self, rows: list[Record], position: bytes) -> None:
        self._load.append(rows, position)
        self._load.flush()


WAYS: Final[dict[str, Callable[[str, str], Way]]] = {"transactions": WithTransactions, "Loader": WithLoader}


def groups(position: bytes | None, size: int) -> Iterator[tuple[list[Record], bytes]]:
    for number in itertools.count(int(position or 0) + 1):
        rows = [Record(b"%d.%d" % (number, row) + b"x" * _ROW_BYTES, b"%d" % (row % 1000)) for row in range(size)]
        yield rows, b"%d" % number


def worker(way: str, topic: str, bootstrap: str) -> None:
    """Commit until killed. Prints the seconds from the first connection to each commit, and the group's number."""
    began = time.monotonic()
    load = WAYS[way](topic, bootstrap)
    for rows, position in groups(load.position, 100):
        load.commit(rows, position)
        print(f"{time.monotonic() - began:.4f} {position.decode()}", flush=True)


class Target:
    """A topic of one way. `bootstrap`: where its clients connect."""

    def __init__(self, run: Run, way: str) -> None:
        self.way = way
        self.bootstrap = run.kafka if way == "transactions" else run.product.address
        self.last = 0
        self.topic = run.topic("unchecked" if way == "transactions" else "required", PARTITIONS)
        if way == "transactions":
            run.named_topic(f"{self.topic}-positions", 1, **{"cleanup.policy": "compact"})

    def open(self) -> Way:
        return WAYS[self.way](self.topic, self.bootstrap)


def commit_seconds(targets: list[Target], size: int, rounds: int, commits: int) -> dict[str, list[float]]:
    """Of each way: the seconds of each commit. The first round is discarded."""
    loads = {each.way: each.open() for each in targets}
    sources = {way: groups(load.position, size) for way, load in loads.items()}
    seconds: dict[str, list[float]] = {way: [] for way in loads}
    for number in range(rounds + 1):
        for way in list(loads) if number % 2 else reversed(list(loads)):
            for rows, position in itertools.islice(sources[way], commits):
                began = time.perf_counter()
                loads[way].commit(rows, position)
                if number:
                    seconds[way].append(time.perf_counter() - began)
    return seconds


def seconds_after_a_kill(target: Target) -> float:
    """Start a process, kill it during its commits, and start it again. Raises DevError if it does not continue."""
    command = [sys.executable, "-m", "benchmarks.loads", "--worker", target.way, target.topic, target.bootstrap]

    def run(after: int) -> tuple[float, int]:
        """The seconds to the commit of the group after this one, and the last group."""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
            assert process.stdout is not None
            found: list[tuple[float, int]] = []
            killed = False
            for line in process.stdout:
                if not line.endswith("\n"):
                    break
                found.append((float(line.split()[0]), int(line.split()[1])))
                if found[-1][1] > after and not killed:
                    time.sleep(_KILL_AFTER_SECONDS)
                    process.send_signal(signal.SIGKILL)
                    killed = True
        # The last commit may have no line. Loader goes through the last group again, and appends nothing.
        if not found or not after <= found[0][1] <= after + 2:
            raise DevError(f"{target.way}: continued after group {after} with {found[:1]}")
        return next(seconds for seconds, group in found if group > after), found[-1][1]

    _, last = run(target.last)
    seconds, target.last = run(last)
    return seconds


def lines_of(way: str) -> int:
    return sum(1 for line in inspect.getsource(WAYS[way]).splitlines() if line.strip())


def compare(run: Run, rounds: int) -> Iterator[str]:
    """Lines of a table."""
    yield "| | transactions | `Loader` | ratio |"
    yield "|---|---|---|---|"
    targets = [Target(run, way) for way in WAYS]
    first, second = targets
    yield f"| lines of code | {lines_of(first.way)} | {lines_of(second.way)} | |"
    for size, commits in ((10, 40), (1000, 20)):
        seconds = commit_seconds([Target(run, way) for way in WAYS], size, rounds, commits)
        sorted_ = [sorted(seconds[each.way]) for each in targets]
        for what, of in (("p50", 0.5), ("p95", 0.95)):
            values = [each[int(len(each) * of)] * 1000 for each in sorted_]
            yield f"| commit of {size:,} rows, {what} | {values[0]:.1f} ms | {values[1]:.1f} ms | {_ratio(values)} |"
        rates = [size * len(each) / sum(each) for each in sorted_]
        yield f"| rows/s, {size:,} a commit | {rates[0]:,.0f} | {rates[1]:,.0f} | {_ratio(rates)} |"
    after: list[list[float]] = [[], []]
    for _ in range(rounds):
        for target, found in zip(targets, after, strict=True):
            found.append(seconds_after_a_kill(target))
    medians = [statistics.median(each) for each in after]
    yield f"| from a kill to the next commit | {medians[0]:.2f} s | {medians[1]:.2f} s | {_ratio(medians)} |"


def _ratio(values: list[float]) -> str:
    return f"{values[1] / values[0]:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loads", description="Compare two ways to load.")
    parser.add_argument("--rounds", type=int, default=8, help="repetitions (default: %(default)s)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        with contextlib.suppress(KeyboardInterrupt):
            worker(*options.worker)
        return 0
    try:
        with Stage(QUICK, [routes.product()], kafka_port=None) as run:
            for line in compare(run, options.rounds):
                print(line, flush=True)
    except DevError as error:
        print(f"loads: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
