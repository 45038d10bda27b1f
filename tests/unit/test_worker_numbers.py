"""Numbers of several processes shown as one's, and connections shared out between processes that share a listener."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fencepost_proxy.metrics import AddressNumbers, Metrics, PartitionNumbers, ProcessNumbers, WorkerNumbers
from fencepost_proxy.observability.exposition import exposition
from fencepost_proxy.transport.listeners import Acceptor, bind
from fencepost_proxy.types import Address, TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.workers.channel import pair
from fencepost_proxy.workers.worker import AWAY, LOAD_BYTES, Worker
from tests.kit.waiting import until_async


def counts_of(times: int) -> Metrics:
    metrics = Metrics()
    for _ in range(times):
        metrics.connections.inc()
        metrics.traffic.requests[PRODUCE][9] += 1
        metrics.traffic.bytes_to_kafka += 1000
        metrics.traffic.request_seconds.observe(0.001)
        metrics.sequencer_wait_seconds.observe(0.1)
        metrics.refusals.inc("offset_mismatch")
    return metrics


def test_numbers_of_two_processes_are_added_without_changes() -> None:
    one, other = counts_of(2), counts_of(3)
    other.refusals.inc("not_ready")

    whole = one.plus(pickle.loads(pickle.dumps(other)))

    assert whole.connections.value == 5
    assert whole.traffic.requests[PRODUCE][9] == 5
    assert whole.traffic.bytes_to_kafka == 5000
    assert dict(whole.refusals) == {"offset_mismatch": 5, "not_ready": 1}
    assert sum(whole.traffic.request_seconds.counts) == 5
    assert whole.sequencer_wait_seconds.total == pytest.approx(0.5)
    assert (one.connections.value, other.connections.value) == (2, 3)
    assert dict(one.refusals) == {"offset_mismatch": 2}


def test_most_advanced_numbers_of_a_shared_partition_win() -> None:
    one, other = counts_of(1), counts_of(1)
    known, both = TopicPartition("t", 0), TopicPartition("t", 1)
    one.moment.partitions = {known: PartitionNumbers(7, 1), both: PartitionNumbers(7, 3)}
    other.moment.partitions = {both: PartitionNumbers(9, 2)}
    one.moment.sequencers = other.moment.sequencers = {"open": 2}
    one.moment.address, other.moment.address = AddressNumbers(7, 100), AddressNumbers(5, 100)
    one.upstream_errors["clients"].inc("lost")
    other.upstream_errors["clients"].inc("lost")

    whole = one.plus(pickle.loads(pickle.dumps(other)))

    assert whole.moment.partitions == {known: (7, 1), both: (9, 2)}
    assert whole.moment.sequencers == {"open": 4}
    assert whole.moment.address == (7, 100)  # connections are limited in each process
    assert whole.upstream_errors == {"clients": {"lost": 2}, "proxy": {}}
    assert one.moment.sequencers == {"open": 2}


def test_ended_worker_keeps_totals_and_loses_pending_numbers() -> None:
    metrics = counts_of(3)
    metrics.expansions_pending.inc()
    metrics.partitions_gated.value = 5
    metrics.traffic.requests_in_flight = 7
    metrics.moment.appends_waiting = 4

    metrics.ended()

    text = exposition(metrics).decode()
    for name in ("client_connections", "expansions_pending", "gated_partitions", "requests_in_flight"):
        assert f"fencepost_{name} 0.0" in text
    assert "fencepost_sequencer_waiting_appends 0.0" in text
    assert 'fencepost_requests_total{api="Produce",version="9"} 3.0' in text


def test_only_multiple_workers_have_a_series_each() -> None:
    metrics = counts_of(1)
    assert b"worker" not in exposition(metrics)

    metrics.workers = [
        WorkerNumbers(0, 3, 5, 70, 1, ProcessNumbers(1.5)),
        WorkerNumbers(1, 4, 6, 80, 2, ProcessNumbers(2.5)),
    ]
    text = exposition(metrics).decode()

    assert 'fencepost_worker_client_connections{worker="1"} 4.0' in text
    assert 'fencepost_worker_starts_total{worker="1"} 2.0' in text
    assert 'fencepost_worker_cpu_seconds_total{worker="1"} 2.5' in text
    assert "fencepost_connection_migrations_total 0.0" in text


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    file = os.memfd_create("loads")
    os.ftruncate(file, 2 * LOAD_BYTES)
    with ExitStack() as stack:
        made = []
        for index in range(2):
            for each in (packets := pair(), listeners := pair()):
                for sock in each:
                    stack.callback(sock.close)
            made.append(Worker(index, packets[0], listeners[0], os.dup(file)))
        os.close(file)
        yield made


def test_worker_with_fewer_connections_accepts_first(workers: list[Worker]) -> None:
    one, other = workers
    one.has(1)
    other.has(0)
    assert one.others_first()
    assert not other.others_first()
    other.has(1)
    assert not one.others_first()


def test_connections_are_not_left_to_absent_worker(workers: list[Worker]) -> None:
    one, other = workers
    other.has(AWAY)
    one.has(100)
    assert not one.others_first()


def test_connection_not_taken_by_others_is_accepted() -> None:
    """It is left to them once: one that has fewer may be busy, or stand still."""

    async def story() -> None:
        listener = bind(Address("127.0.0.1", 0), "a test")
        queried: list[None] = []
        taken: list[socket.socket] = []

        def others_first() -> bool:
            queried.append(None)
            return True

        acceptor = Acceptor(listener, lambda sock, peer: taken.append(sock), others_first)
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(socket.create_connection(listener.getsockname()))
            await until_async(lambda: len(taken) == 3, "three connections")
        assert len(queried) >= 3
        acceptor.close()
        for each in (*taken, listener):
            each.close()

    asyncio.run(story())
