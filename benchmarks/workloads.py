"""The workloads. Each discards a full-size warm-up, rotates the order of its routes, and repeats."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks import machine
from benchmarks.java import consumed, produced_mib_per_second
from benchmarks.raw import NO_PRODUCER, Appends, Connection, RefusedError, Shape, percentile
from benchmarks.results import ADDED_P50, CPU_PER_GB, CPU_PER_REQUEST, FLOOR, OF_UNCONDITIONAL, P50, P99, Row, ratios
from benchmarks.routes import Route, StartError
from benchmarks.stage import Plan, Run, await_kafka_through, cpu_of, say

_MIB = 1 << 20
_GB = 1e9
RECORD_BYTES = 1024
SMALL_RECORD_BYTES = 100
PARTITIONS = 3
IN_FLIGHT = 5
#: Records per batch of the pipelined load.
PIPELINE_RECORDS = 16
_PRODUCER = ("batch.size=65536", "linger.ms=5", "max.in.flight.requests.per.connection=5", "compression.type=none")
_Item = TypeVar("_Item")
CHECKS_OFF = "checks off"
CHECKS_ON = "checks on"


@dataclass(frozen=True)
class Series:
    """One load on one route: a line of a table. `topic` selects the product's checks."""

    name: str
    route: Route
    topic: str


@dataclass
class Found:
    """Results of one series, one value per round."""

    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def rotated(items: Sequence[_Item], by: int) -> list[_Item]:
    by %= max(1, len(items))
    return [*items[by:], *items[:by]]


def _rounds(
    run: Run, what: str, all_series: Sequence[Series], measure: Callable[[Series], tuple[float, float]]
) -> dict[str, Found]:
    """`measure` returns (rate, CPU seconds per GB). The first round is discarded."""
    found = {series.name: Found() for series in all_series}
    for number in range(run.plan.rounds + 1):
        say(f"{what}: {f'round {number} of {run.plan.rounds}' if number else 'warm-up'}")
        for series in rotated(all_series, number):
            rate, cpu = measure(series)
            if number:
                found[series.name].rates.append(rate)
                found[series.name].cpu.append(cpu)
    return found


def _rows(table: str, all_series: Sequence[Series], found: dict[str, Found], base: str, *, measure: str) -> list[Row]:
    rows = []
    for series in all_series:
        mine = found[series.name]
        rows.append(Row(table, series.name, measure, tuple(mine.rates)))
        if series.name != base:
            rows.append(Row(table, series.name, f"of {base}", ratios(mine.rates, found[base].rates)))
        if series.route.is_ours:
            rows.append(Row(table, series.name, CPU_PER_GB, tuple(mine.cpu)))
    return rows


def series_of(run: Run, unchecked: str, checked: Sequence[str]) -> list[Series]:
    """One series per route. The product has two: checks off, and checks on with its own topic."""
    all_series = []
    topics = iter(checked)
    for route in run.routes:
        if route in run.products:
            all_series.append(Series(f"{route.name}, {CHECKS_OFF}", route, unchecked))
            all_series.append(Series(f"{route.name}, {CHECKS_ON}", route, next(topics)))
        else:
            all_series.append(Series(route.name, route, unchecked))
    return all_series


# --- produce ----------------------------------------------------------------------------------------------------------


def _produce(
    run: Run, series: Series, records: int, size: int, *settings: str, tool: Sequence[str] = ()
) -> tuple[float, float]:
    with cpu_of(series.route) as cpu:
        printed = run.jvm.run(
            "kafka-producer-perf-test",
            [
                *("--topic", series.topic, "--num-records", str(records), "--record-size", str(size)),
                *("--throughput", "-1", "--bootstrap-server", series.route.address),
                *tool,
                *("--command-property", "acks=all", *_PRODUCER, *settings),
            ],
        )
    return produced_mib_per_second(printed), cpu[0] / (records * size / _GB)


def produce(run: Run) -> list[Row]:
    """1 KB records, not idempotent; through the product to topics with and without checks."""
    topics = [run.topic("unchecked", PARTITIONS), *(run.topic("checked", PARTITIONS) for _ in run.products)]
    all_series = series_of(run, topics[0], topics[1:])
    for route in run.routes:
        machine.forget_peak(route.pids())
    found = _rounds(
        run,
        "produce",
        all_series,
        lambda series: _produce(run, series, run.plan.produce_records, RECORD_BYTES, "enable.idempotence=false"),
    )
    run.drop(*topics)
    rows = _rows("produce", all_series, found, "direct", measure="MiB/s")
    rows += [
        Row(
            "memory",
            series.route.name,
            "peak MB under produce load",
            (machine.rss_peak_bytes(series.route.pids()) / 1e6,),
        )
        for series in all_series
        if series.route.is_ours and series.topic == topics[0]
    ]
    return rows


def produce_small(run: Run) -> list[Row]:
    """Records of 100 bytes. On a topic with checks, the product reads the headers of each record."""
    topics = [run.topic("unchecked", PARTITIONS), *(run.topic("checked", PARTITIONS) for _ in run.products)]
    all_series = [
        series for series in series_of(run, topics[0], topics[1:]) if series.route in (run.direct, *run.products)
    ]
    records = run.plan.produce_records * 4
    found = _rounds(
        run,
        "produce 100 B",
        all_series,
        lambda series: _produce(run, series, records, SMALL_RECORD_BYTES, "enable.idempotence=false"),
    )
    run.drop(*topics)
    rows = _rows("produce 100 B", all_series, found, "direct", measure="MiB/s")
    for product in run.products:
        off, on = (f"{product.name}, {which}" for which in (CHECKS_OFF, CHECKS_ON))
        rows.append(Row("produce 100 B", on, "of checks off", ratios(found[on].rates, found[off].rates)))
    return rows


def _against_itself(run: Run, table: str, measure: Callable[[Series], tuple[float, float]]) -> list[Row]:
    """Direct and through the product only."""
    topic = run.topic("unchecked", PARTITIONS)
    all_series = [Series(route.name, route, topic) for route in (run.direct, run.product)]
    found = _rounds(run, table, all_series, measure)
    run.drop(topic)
    return _rows(table, all_series, found, "direct", measure="MiB/s")


def idempotent(run: Run) -> list[Row]:
    records = run.plan.produce_records
    return _against_itself(
        run, "idempotent", lambda series: _produce(run, series, records, RECORD_BYTES, "enable.idempotence=true")
    )


def transactional(run: Run) -> list[Row]:
    """A transaction is committed every 100 ms."""
    records = run.plan.produce_records
    return _against_itself(
        run,
        "transactional",
        lambda series: _produce(run, series, records, RECORD_BYTES, tool=("--transaction-duration-ms", "100")),
    )


# --- consume ----------------------------------------------------------------------------------------------------------


def _consume(run: Run, series: Series, records: int, *settings: str) -> tuple[float, float]:
    with cpu_of(series.route) as cpu:
        printed = run.jvm.run(
            "kafka-consumer-perf-test",
            [
                *("--bootstrap-server", series.route.address, "--topic", series.topic, "--num-records", str(records)),
                *(word for setting in settings for word in ("--command-property", setting)),
            ],
        )
    found = consumed(printed, at_least_mib=0.99 * records * RECORD_BYTES / _MIB)
    return found.mib_per_second, cpu[0] / (found.mib * _MIB / _GB)


def _filled_topic(run: Run, *tool: str) -> str:
    topic = run.topic("unchecked", PARTITIONS, **{"retention.bytes": "-1"})
    _produce(run, Series("", run.direct, topic), run.plan.consume_records, RECORD_BYTES, tool=tool)
    return topic


def consume(run: Run) -> list[Row]:
    topic = _filled_topic(run)
    all_series = [Series(route.name, route, topic) for route in run.routes]
    for route in run.routes:
        machine.forget_peak(route.pids())
    found = _rounds(run, "consume", all_series, lambda series: _consume(run, series, run.plan.consume_records))
    run.drop(topic)
    rows = _rows("consume", all_series, found, "direct", measure="MiB/s")
    rows += [
        Row("memory", route.name, "peak MB under consume load", (machine.rss_peak_bytes(route.pids()) / 1e6,))
        for route in run.routes
        if route.is_ours
    ]
    return rows


def read_committed(run: Run) -> list[Row]:
    topic = _filled_topic(run, "--transaction-duration-ms", "100")
    all_series = [Series(route.name, route, topic) for route in (run.direct, run.product)]
    found = _rounds(
        run,
        "read_committed",
        all_series,
        lambda series: _consume(run, series, run.plan.consume_records, "isolation.level=read_committed"),
    )
    run.drop(topic)
    return _rows("read_committed", all_series, found, "direct", measure="MiB/s")


# --- one in flight ----------------------------------------------------------------------------------------------------


class _Single:
    """One connection, one request in flight, one record of 100 bytes."""

    def __init__(self, name: str, route: Route, topic: str, offset_source: str | None) -> None:
        self.name = name
        self.route = route
        self._connection = Connection(route.address)
        self._connection.greet()
        self._appends = Appends(Shape(topic, 1, SMALL_RECORD_BYTES, offset_source))
        # Once: finding child processes takes milliseconds.
        self._pids = route.pids()
        self.times: list[int] = []
        self.slice_rates: list[float] = []
        self.cpu = 0.0
        self.requests = 0

    def slice(self, requests: int) -> None:
        send, receive, appends, times = self._connection.send, self._connection.receive, self._appends, self.times
        clock = time.perf_counter_ns
        cpu = machine.cpu_seconds(self._pids)
        began = clock()
        for _ in range(requests):
            frame = appends.frame()
            sent = clock()
            send(frame)
            answer = receive()
            times.append(clock() - sent)
            appends.check(answer)
        self.slice_rates.append(requests / (clock() - began) * 1e9)
        self.cpu += machine.cpu_seconds(self._pids) - cpu
        self.requests += requests

    def forget(self) -> None:
        self.times.clear()
        self.slice_rates.clear()
        self.cpu = 0.0
        self.requests = 0

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Disable Python's garbage collector, which would increase a route's high percentiles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_OFFSET_SOURCES = (
    ("checked", "header", "true, header"),
    ("base-checked", "base", "true, base offset"),
    ("required", "header", "required, header"),
    ("base-required", "base", "required, base offset"),
)


def one_in_flight(run: Run) -> list[Row]:
    """All routes, and all kinds of conditional appends, in alternating slices of a few requests."""
    plan = run.plan
    unchecked, checked = run.topic("unchecked"), [run.topic("checked") for _ in run.products]
    with contextlib.ExitStack() as opened:
        all_series = [
            _Single(series.name, series.route, series.topic, None) for series in series_of(run, unchecked, checked)
        ]
        conditional = [
            _Single(f"{product.name}, {what}", product, run.topic(prefix), offset_source)
            for product in run.products
            for prefix, offset_source, what in _OFFSET_SOURCES
        ]
        everything = [*all_series, *conditional]
        for series in everything:
            opened.callback(series.close)
        p50: dict[str, list[float]] = {series.name: [] for series in everything}
        p99: dict[str, list[float]] = {series.name: [] for series in everything}
        rates: dict[str, list[float]] = {series.name: [] for series in everything}
        cpu: dict[str, list[float]] = {series.name: [] for series in everything}
        for number in range(plan.rounds + 1):
            say(f"one in flight: {f'round {number} of {plan.rounds}' if number else 'warm-up'}")
            with _no_collections():
                for slice_number in range(plan.slices):
                    for series in rotated(everything, slice_number + number):
                        series.slice(plan.slice_requests)
            for series in everything:
                if number:
                    times = sorted(series.times)
                    p50[series.name].append(percentile(times, 0.5) / 1000)
                    p99[series.name].append(percentile(times, 0.99) / 1000)
                    rates[series.name].append(percentile(sorted(series.slice_rates), 0.5))
                    cpu[series.name].append(series.cpu / series.requests * 1e6)
                series.forget()
    rows = []
    for series in all_series:
        name = series.name
        rows.append(Row("one in flight", name, P50, tuple(p50[name])))
        if series.route is not run.direct:
            added = tuple(mine - base for mine, base in zip(p50[name], p50["direct"], strict=True))
            rows.append(Row("one in flight", name, ADDED_P50, added))
        rows.append(Row("one in flight", name, P99, tuple(p99[name])))
        if series.route.is_ours:
            rows.append(Row("one in flight", name, CPU_PER_REQUEST, tuple(cpu[name])))
    for series in (*(each for each in all_series if each.route in run.products), *conditional):
        name = series.name
        rows.append(Row("conditional", name, "requests/s", tuple(rates[name])))
        if series in conditional:
            unconditional = f"{series.route.name}, {CHECKS_OFF}"
            rows.append(Row("conditional", name, OF_UNCONDITIONAL, ratios(rates[name], rates[unconditional])))
        rows.append(Row("conditional", name, P50, tuple(p50[name])))
        rows.append(Row("conditional", name, P99, tuple(p99[name])))
        rows.append(Row("conditional", name, CPU_PER_REQUEST, tuple(cpu[name])))
    return rows


# --- several in flight ------------------------------------------------------------------------------------------------


class _Pipeline:
    """An idempotent producer with several batches of 1 KB records in flight on one connection."""

    def __init__(self, name: str, route: Route, topic: str, offset_source: str | None) -> None:
        self.name = name
        self._connection = Connection(route.address)
        self._connection.greet()
        producer = self._connection.producer()
        assert producer != NO_PRODUCER
        self._appends = Appends(Shape(topic, PIPELINE_RECORDS, RECORD_BYTES, offset_source, producer))
        self.is_ours = route.is_ours
        self._pids = route.pids()
        self.rates: list[float] = []
        self.cpu: list[float] = []

    def slice(self, requests: int) -> None:
        """Send `requests` and wait for all responses."""
        send, receive, appends = self._connection.send, self._connection.receive, self._appends
        cpu = machine.cpu_seconds(self._pids)
        began = time.perf_counter()
        for number in range(requests + IN_FLIGHT):
            if number >= IN_FLIGHT:
                appends.check(receive())
            if number < requests:
                send(appends.frame())
        seconds = time.perf_counter() - began
        size = requests * PIPELINE_RECORDS * RECORD_BYTES
        self.rates.append(size / _MIB / seconds)
        self.cpu.append((machine.cpu_seconds(self._pids) - cpu) / (size / _GB))

    def close(self) -> None:
        self._connection.close()


def pipelined(run: Run) -> list[Row]:
    """All routes, and all kinds of conditional appends. Other checkouts of the product run separately."""
    rows = []
    first = run.product
    for product in run.products:
        with run.alone(product):
            rows += _pipelined(run, product, others=product is first)
    return rows


def _pipelined(run: Run, product: Route, *, others: bool) -> list[Row]:
    plan = run.plan
    unconditional = f"{product.name}, {CHECKS_OFF}"
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    with contextlib.ExitStack() as opened:
        all_series = [
            _Pipeline(each.name, each.route, run.topic(each.topic), None)
            for each in series_of(run, "unchecked", ["checked"])
            if others or each.route is product
        ]
        conditional = [
            _Pipeline(f"{product.name}, {what}", product, run.topic(prefix), offset_source)
            for prefix, offset_source, what in _OFFSET_SOURCES
        ]
        all_series += conditional
        for series in all_series:
            opened.callback(series.close)
            rates[series.name] = []
            cpu[series.name] = []
        for number in range(plan.rounds + 1):
            say(f"pipelined, {product.name}: {f'round {number} of {plan.rounds}' if number else 'warm-up'}")
            with _no_collections():
                for slice_number in range(plan.slices):
                    for series in rotated(all_series, slice_number + number):
                        series.slice(plan.slice_requests)
            for series in all_series:
                if number:
                    rates[series.name].append(percentile(sorted(series.rates), 0.5))
                    cpu[series.name].append(percentile(sorted(series.cpu), 0.5))
                series.rates.clear()
                series.cpu.clear()
    rows = []
    for series in all_series:
        rows.append(Row("pipelined", series.name, "MiB/s", tuple(rates[series.name])))
        if series in conditional:
            rows.append(
                Row("pipelined", series.name, OF_UNCONDITIONAL, ratios(rates[series.name], rates[unconditional]))
            )
        if series.is_ours:
            rows.append(Row("pipelined", series.name, CPU_PER_GB, tuple(cpu[series.name])))
    return rows


def pipelined_java(run: Run) -> list[Row]:
    """Kafka's own idempotent producer. Conditional records have their expected offset."""
    rows = []
    for product in run.products:
        with run.alone(product):
            rows += _pipelined_java(run, product)
    return rows


def _pipelined_java(run: Run, product: Route) -> list[Row]:
    all_series = [
        Series(f"{product.name}, {CHECKS_OFF}", product, run.topic("unchecked")),
        Series(f"{product.name}, true, header", product, run.topic("checked")),
        Series(f"{product.name}, required, header", product, run.topic("required")),
    ]
    records = run.plan.produce_records // 2
    log_ends = dict.fromkeys((series.topic for series in all_series), 0)

    def measure(series: Series) -> tuple[float, float]:
        expected = "-" if series is all_series[0] else str(log_ends[series.topic])
        with cpu_of(series.route) as cpu:
            printed = run.jvm.run(
                "PipelineLoad",
                [
                    series.route.address,
                    series.topic,
                    str(records),
                    str(RECORD_BYTES),
                    expected,
                    "acks=all",
                    *_PRODUCER,
                ],
            )
        log_ends[series.topic] += records
        count, milliseconds = printed.split()
        size = int(count) * RECORD_BYTES
        return size / _MIB / (float(milliseconds) / 1000), cpu[0] / (size / _GB)

    found = _rounds(run, f"pipelined, Java, {product.name}", all_series, measure)
    rows = []
    for series in all_series:
        name = series.name
        rows.append(Row("pipelined", name, "Java MiB/s", tuple(found[name].rates)))
        if series is not all_series[0]:
            rows.append(
                Row(
                    "pipelined",
                    name,
                    "Java, of unconditional",
                    ratios(found[name].rates, found[all_series[0].name].rates),
                )
            )
        rows.append(Row("pipelined", name, "Java, proxy CPU s/GB", tuple(found[name].cpu)))
    return rows


# --- memory and start -------------------------------------------------------------------------------------------------


def fresh(run: Run) -> list[Row]:
    """Restart each proxy several times, then open idle connections to it.

    The relay in C is left out: it has two pipes for each connection, and may not have thousands.
    """
    rows: list[Row] = []
    for route in [each for each in run.routes if each.is_ours and each.name != FLOOR]:
        say(f"start and memory: {route.name}")
        try:
            rows += _fresh(run, route)
        except (OSError, RefusedError, StartError) as error:
            if route is run.product:
                raise
            run.routes.remove(route)
            route.stop()
            run.missing[route.name] = f"ended early: {error}"
    return rows


def _fresh(run: Run, route: Route) -> list[Row]:
    seconds = []
    for _ in range(run.plan.starts):
        route.stop()
        seconds.append(route.start())
        await_kafka_through(route)
    rows = [Row("start", route.name, "s", tuple(seconds))]
    # Let the memory of the new process stabilize.
    time.sleep(1.0)
    idle = machine.rss_bytes(route.pids())
    rows.append(Row("memory", route.name, "idle MB", (idle / 1e6,)))
    # Limits: our descriptors, and the proxy's, which needs two per connection.
    possible = [count for count in run.plan.idle_connections if count < machine.descriptors_max() // 2 - 200]
    for count in possible:
        buffered = _with_idle_connections(route, count)
        rows.append(Row("memory", route.name, f"MB with {count:,} idle connections", (buffered / 1e6,)))
        if count == max(possible):
            # Of the largest number, because the first connections have one-time costs.
            rows.append(Row("memory", route.name, "KB per idle connection", ((buffered - idle) / count / 1e3,)))
    route.stop()
    route.start()
    await_kafka_through(route)
    return rows


def _with_idle_connections(route: Route, count: int) -> int:
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            connection = Connection(route.address)
            opened.callback(connection.close)
            connection.greet()
        time.sleep(0.5)
        return machine.rss_bytes(route.pids())


WORKLOADS: dict[str, Callable[[Run], list[Row]]] = {
    "start and memory": fresh,
    "one in flight": one_in_flight,
    "produce": produce,
    "consume": consume,
    "produce 100 B": produce_small,
    "pipelined": pipelined,
    "pipelined, Java": pipelined_java,
    "idempotent": idempotent,
    "transactional": transactional,
    "read_committed": read_committed,
}


def settings_of(plan: Plan) -> dict[str, str]:
    """Settings of each table, by its name."""
    producer = "acks=all, batch.size=65536, linger.ms=5, 5 in flight, no compression, 3 partitions"
    tool = "Kafka's own tools in one JVM after a warm-up"
    single = (
        f"A raw client, Produce v9 of one {SMALL_RECORD_BYTES}-byte record with acks=all, in alternating "
        f"slices of {plan.slice_requests} requests, {plan.slices} per round and line"
    )
    return {
        "produce": f"kafka-producer-perf-test, {plan.produce_records:,} records of {RECORD_BYTES:,} bytes: "
        f"{producer}, not idempotent; {tool}.",
        "produce 100 B": f"As above, {plan.produce_records * 4:,} records of {SMALL_RECORD_BYTES} bytes.",
        "consume": f"kafka-consumer-perf-test, {plan.consume_records:,} records of {RECORD_BYTES:,} bytes, "
        "3 partitions, its default settings (fetch size 1 MiB); joining the group is not counted.",
        "one in flight": f"{single}.",
        "conditional": f"{single}; the unconditional ones are those of the table above.",
        "pipelined": f"A raw idempotent client, {IN_FLIGHT} requests in flight of {PIPELINE_RECORDS} records of "
        f"{RECORD_BYTES:,} bytes, one connection, one partition. Java: KafkaProducer with the settings of `produce`, "
        "one partition, every record with its offset.",
        "idempotent": "As `produce`, enable.idempotence=true.",
        "transactional": "As `produce`, transactional, a commit every 100 ms.",
        "read_committed": "As `consume`, isolation.level=read_committed, of a topic written transactionally.",
        "memory": "Resident set of all processes of a proxy. Idle, and with connections that each did ApiVersions and "
        "Metadata: freshly started.",
        "start": "From the start of the program to the first connection accepted, Kafka running.",
    }
