"""Compare one and two worker processes with direct connections, on a machine shared with Kafka and its client.

    python -m benchmarks --only workers

Both routes of the product have the same configuration, except `--workers 2`. *Small requests*: many connections from
one client process, each with one request in flight. *Pipeline*: pipelined conditional appends. With two workers, the
proxy forwards them one at a time. Measured before the two workers start, and with them.
"""

from __future__ import annotations

import contextlib
import selectors
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from benchmarks import machine, routes
from benchmarks.raw import Appends, Connection, RefusedError, Shape
from benchmarks.results import DIRECT, Row, ratios
from benchmarks.routes import Route
from benchmarks.stage import Run, await_kafka_through, cpu_of, say
from benchmarks.workloads import (
    PARTITIONS,
    RECORD_BYTES,
    Found,
    Series,
    _consume,
    _filled_topic,
    _Pipeline,
    _produce,
    _rounds,
)

TABLE: Final = "workers"
ONE: Final = "1 worker"
TWO: Final = "2 workers"
_CONNECTIONS: Final = 64
_REQUESTS: Final = 20_000
_REQUESTS_QUICK: Final = 5_000
_ANSWER_SECONDS: Final = 30.0


@contextlib.contextmanager
def _two_workers(run: Run) -> Iterator[Route]:
    one = routes.product()
    peer = replace(one, name=TWO, start=(*one.start, "--workers", "2"))
    (port,) = routes.free_ports(1)
    route = Route(peer, port=port, upstream=run.kafka, directory=run.directory)
    route.start()
    try:
        await_kafka_through(route)
        run.routes.append(route)
        yield route
    finally:
        if route in run.routes:
            run.routes.remove(route)
        route.stop()


def rows(run: Run) -> list[Row]:
    of_one = _pipeline_rates(run, run.product)
    with _two_workers(run) as two:
        of_two = _pipeline_rates(run, two)
        topic, filled = run.topic("unchecked", PARTITIONS), _filled_topic(run)
        all_series = [Series(DIRECT, run.direct, topic), Series(ONE, run.product, topic), Series(TWO, two, topic)]
        reading = [replace(series, topic=filled) for series in all_series]
        plan = run.plan
        requests = _REQUESTS_QUICK if plan.quick else _REQUESTS
        found = [
            *_of(
                "produce",
                "MiB/s",
                "CPU s/GB",
                all_series,
                _rounds(
                    run,
                    "workers, produce",
                    all_series,
                    lambda series: _produce(
                        run, series, plan.produce_records, RECORD_BYTES, "enable.idempotence=false"
                    ),
                ),
            ),
            *_of(
                "consume",
                "MiB/s",
                "CPU s/GB",
                all_series,
                _rounds(run, "workers, consume", reading, lambda series: _consume(run, series, plan.consume_records)),
            ),
            *_of(
                "small requests",
                "per s",
                "CPU µs each",
                all_series,
                _rounds(run, "workers, small requests", all_series, lambda series: _small_requests(series, requests)),
            ),
        ]
        found += [
            Row(TABLE, series.name, "RSS MB", (machine.rss_bytes(series.route.pids()) / 1e6,))
            for series in all_series
            if series.route.is_ours
        ]
        found += [
            Row(TABLE, ONE, "pipeline MiB/s", of_one),
            Row(TABLE, TWO, "pipeline MiB/s", of_two),
            Row(TABLE, TWO, f"pipeline of {ONE}", ratios(of_two, of_one)),
        ]
        run.drop(topic, filled)
        return found


def _of(what: str, unit: str, cpu: str, all_series: list[Series], found: dict[str, Found]) -> list[Row]:
    made = [Row(TABLE, series.name, f"{what} {unit}", tuple(found[series.name].rates)) for series in all_series]
    made += [
        Row(TABLE, series.name, f"{what} {cpu}", tuple(found[series.name].cpu))
        for series in all_series
        if series.route.is_ours
    ]
    made.append(Row(TABLE, TWO, f"{what} of {ONE}", ratios(found[TWO].rates, found[ONE].rates)))
    return made


def _pipeline_rates(run: Run, route: Route) -> tuple[float, ...]:
    """MiB/s of 16 KB batches, five in flight, on a `required` topic, per round. The first round is discarded."""
    rates = []
    with contextlib.closing(_Pipeline("", route, run.topic("required"), "header")) as pipeline:
        for _ in range(run.plan.rounds + 1):
            for _ in range(run.plan.slices):
                pipeline.slice(run.plan.slice_requests)
            rates.append(statistics.median(pipeline.rates))
            pipeline.rates.clear()
    say(f"workers, pipeline: {rates[-1]:.3g} MiB/s")
    return tuple(rates[1:])


def _small_requests(series: Series, requests: int) -> tuple[float, float]:
    """Requests per second, and the route's CPU µs per request."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        bootstrap = stack.enter_context(contextlib.closing(Connection(series.route.address)))
        leader = bootstrap.broker()
        for _ in range(_CONNECTIONS):
            connection = stack.enter_context(contextlib.closing(Connection(leader)))
            connection.greet()
            appends = Appends(Shape(series.topic, 1, 100))
            selector.register(connection.socket, selectors.EVENT_READ, (connection, appends))
            connection.send(appends.frame())
            appends.check(connection.receive())
        with cpu_of(series.route) as cpu:
            began = time.perf_counter()
            for key in list(selector.get_map().values()):
                key.data[0].send(key.data[1].frame())
            answered = 0
            while answered < requests:
                ready = selector.select(_ANSWER_SECONDS)
                if not ready:
                    raise RefusedError(f"{series.name}: no response within {_ANSWER_SECONDS:g} s")
                for key, _ in ready:
                    connection, appends = key.data
                    appends.check(connection.receive())
                    answered += 1
                    connection.send(appends.frame())
            took = time.perf_counter() - began
    say(f"{series.name}: {answered / took:,.0f} requests/s")
    return answered / took, cpu[0] / answered * 1e6
