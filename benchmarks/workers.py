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
from benchmarks.stage import Run, await_kafka_behind, cpu_of, say
from benchmarks.workloads import (
    PARTITIONS,
    RECORD_BYTES,
    Found,
    Lane,
    _Chain,
    _consume,
    _filled_topic,
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
        await_kafka_behind(route)
        run.routes.append(route)
        yield route
    finally:
        if route in run.routes:
            run.routes.remove(route)
        route.stop()


def rows(run: Run) -> list[Row]:
    of_one = _chain(run, run.product)
    with _two_workers(run) as two:
        of_two = _chain(run, two)
        topic, filled = run.topic("plain", PARTITIONS), _filled_topic(run)
        lanes = [Lane(DIRECT, run.direct, topic), Lane(ONE, run.product, topic), Lane(TWO, two, topic)]
        reading = [replace(purpose, topic=filled) for purpose in lanes]
        plan = run.plan
        requests = _REQUESTS_QUICK if plan.quick else _REQUESTS
        found = [
            *_of(
                "produce",
                "MiB/s",
                "CPU s/GB",
                lanes,
                _rounds(
                    run,
                    "workers, produce",
                    lanes,
                    lambda purpose: _produce(
                        run, purpose, plan.produce_records, RECORD_BYTES, "enable.idempotence=false"
                    ),
                ),
            ),
            *_of(
                "consume",
                "MiB/s",
                "CPU s/GB",
                lanes,
                _rounds(run, "workers, consume", reading, lambda purpose: _consume(run, purpose, plan.consume_records)),
            ),
            *_of(
                "small requests",
                "per s",
                "CPU µs each",
                lanes,
                _rounds(run, "workers, small requests", lanes, lambda purpose: _small_requests(purpose, requests)),
            ),
        ]
        found += [
            Row(TABLE, purpose.name, "RSS MB", (machine.rss_bytes(purpose.route.pids()) / 1e6,))
            for purpose in lanes
            if purpose.route.is_ours
        ]
        found += [
            Row(TABLE, ONE, "pipeline MiB/s", of_one),
            Row(TABLE, TWO, "pipeline MiB/s", of_two),
            Row(TABLE, TWO, f"pipeline of {ONE}", ratios(of_two, of_one)),
        ]
        run.drop(topic, filled)
        return found


def _of(what: str, unit: str, cpu: str, lanes: list[Lane], found: dict[str, Found]) -> list[Row]:
    made = [Row(TABLE, purpose.name, f"{what} {unit}", tuple(found[purpose.name].rates)) for purpose in lanes]
    made += [
        Row(TABLE, purpose.name, f"{what} {cpu}", tuple(found[purpose.name].cpu))
        for purpose in lanes
        if purpose.route.is_ours
    ]
    made.append(Row(TABLE, TWO, f"{what} of {ONE}", ratios(found[TWO].rates, found[ONE].rates)))
    return made


def _chain(run: Run, route: Route) -> tuple[float, ...]:
    """MiB/s of 16 KB batches, five in flight, on a `required` topic, per round. The first round is discarded."""
    rates = []
    with contextlib.closing(_Chain("", route, run.topic("required"), "header")) as pipeline_key:
        for _ in range(run.plan.rounds + 1):
            for _ in range(run.plan.slices):
                pipeline_key.slice(run.plan.slice_requests)
            rates.append(statistics.median(pipeline_key.rates))
            pipeline_key.rates.clear()
    say(f"workers, pipeline: {rates[-1]:.3g} MiB/s")
    return tuple(rates[1:])


def _small_requests(purpose: Lane, requests: int) -> tuple[float, float]:
    """Requests per second, and the route's CPU µs per request."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        bootstrap = stack.enter_context(contextlib.closing(Connection(purpose.route.address)))
        leader = bootstrap.broker()
        for _ in range(_CONNECTIONS):
            connection = stack.enter_context(contextlib.closing(Connection(leader)))
            connection.greet()
            appends = Appends(Shape(purpose.topic, 1, 100))
            selector.register(connection.socket, selectors.EVENT_READ, (connection, appends))
            connection.send(appends.frame())
            appends.check(connection.receive())
        with cpu_of(purpose.route) as cpu:
            began = time.perf_counter()
            for key in list(selector.get_map().values()):
                key.data[0].send(key.data[1].frame())
            answered = 0
            while answered < requests:
                ready = selector.select(_ANSWER_SECONDS)
                if not ready:
                    raise RefusedError(f"{purpose.name}: no response within {_ANSWER_SECONDS:g} s")
                for key, _ in ready:
                    connection, appends = key.data
                    appends.check(connection.receive())
                    answered += 1
                    connection.send(appends.frame())
            took = time.perf_counter() - began
    say(f"{purpose.name}: {answered / took:,.0f} requests/s")
    return answered / took, cpu[0] / answered * 1e6
