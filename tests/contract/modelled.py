"""Rows in the modelled cluster: the whole proxy core, modelled brokers, and raw connections in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fencepost_policies.append import Check
from fencepost_proxy.types import TopicPartition
from tests.contract.rows import CONFIGS, OTHER, Faulty, Part, Row
from tests.contract.wire import WireLevel
from tests.simulation.clock import End
from tests.simulation.history import History
from tests.simulation.world import SHARED, TOPIC, Proxy, Scenario, World
from tests.support import raw

_STEP_SECONDS = 0.002
#: Reasons in the metrics that are not the first word of the message.
_REASONS = {"producer_id_taken": "shared_producer_id"}
_REASONS_BY_TEXT = {
    "another timestamp: copied headers": "copied_headers",
    "this proxy does not know the topic config": "unknown_config",
    "a transaction is open on the partition; its marker": "transaction_open",
}
_WITHOUT_METRIC = {"whole_request_refused", "producer_forgotten"}


class _World(World):
    """Without faults. Its only topic has the configs and settings of a row."""

    def __init__(self, row: Row, seed: int) -> None:
        self.row = row
        scenario = Scenario(
            row.name,
            partitions=row.partitions,
            others=() if row.second is None else ((f"{TOPIC}-second", Check.OFF),),
            proxies=1 + any(each.via == OTHER for each in row.sends),
            log_append_time=row.settings.log_append_time,
            slow_requests=0.0,
            slow_connections=0.0,
            lossy_reads=0.0,
            start_offsets=(0,),
            refuse_whole_requests=row.scope == "request",
            takeover_seconds=0.0,
            seconds=0.0,
        )
        super().__init__(scenario, seed, History())
        for partition in self.cluster.partitions.values():
            partition.settings = replace(
                partition.settings,
                max_message_bytes=row.settings.max_message_bytes,
                gzip=row.settings.gzip,
                old_format=row.old_format,
            )
        for proxy in self.proxies:
            proxy.partition_counts = {TOPIC: row.partitions}
            proxy.confirmed_at = {TOPIC: float("inf")}
        self.run_until(lambda: all(proxy.fresh(self.sim.now) for proxy in self.proxies))
        self.sim.run(self.sim.now + 1.0)

    def file_configs(self, topic: str) -> Mapping[str, str]:  # type: ignore[override]
        return CONFIGS[self.row.topic if topic == TOPIC else self.row.second or "plain"]

    def run_until(self, condition: Any, within_seconds: float = 60.0) -> bool:
        deadline = self.sim.now + within_seconds
        while not condition() and self.sim.now < deadline:
            self.sim.run(self.sim.now + _STEP_SECONDS)
        return bool(condition())


class _Socket(End):
    """A client's socket. Time advances while it waits."""

    def __init__(self, world: _World, proxy: Proxy) -> None:
        self._world = world
        self._received = bytearray()
        self._closed = False
        self._timeout_seconds = 60.0
        connection = proxy.accept(self, 0)
        assert connection is not None
        self.connection = connection

    def data(self, data: bytes) -> None:
        self._received += data

    def lost(self) -> None:
        self._closed = True

    def sendall(self, data: bytes) -> None:
        self.connection.to_b.write(data)

    def recv(self, count: int) -> bytes:
        self._world.run_until(lambda: self._received or self._closed, self._timeout_seconds)
        if not self._received and not self._closed:
            raise TimeoutError
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    def settimeout(self, seconds: float) -> None:
        self._timeout_seconds = seconds

    def getpeername(self) -> str:
        return "the modelled proxy"

    def close(self) -> None:
        self.connection.close("a")


class _Connection(raw.Connection):
    def __init__(self, world: _World, proxy: Proxy) -> None:
        self.socket = _Socket(world, proxy)  # type: ignore[assignment]
        self.client_id = "raw"
        self._correlation_ids = itertools.count(1)
        self._buffer = b""


class ModelledLevel(WireLevel):
    def __init__(self, row: Row, seed: int) -> None:
        self.world = _World(row, seed)
        super().__init__(row, TOPIC, lambda via: _Connection(self.world, self.world.proxies[via == OTHER]))
        if seed % 2 or not row.length:
            self.fill()
        else:  # the proxy has not read the topic
            old = [raw.Record(b"old", timestamp_ms=self.now_ms())] * row.length
            self.bypass(raw.batch(*old))

    def bypass(self, records: bytes) -> int:
        done: list[int] = []
        report = lambda result: done.append(result.base_offset)  # noqa: E731
        partition = self.world.cluster.partitions[self.world.names[0]]
        self.world.cluster.append(0, partition, records, report, acks=-1, timeout_ms=1000)
        assert self.world.run_until(lambda: done)
        return done[0]

    def check(self, part: Part, answer: tuple[int, int, str | None, int | None]) -> None:
        """Also that the metrics count each refusal, by its first word."""
        super().check(part, answer)
        if answer[2] is not None:
            first = answer[2].split()[0].lower()
            reason = next((reason for text, reason in _REASONS_BY_TEXT.items() if text in answer[2]), first)
            refusals = self.world.history.refusals
            assert reason in _WITHOUT_METRIC or _REASONS.get(reason, reason) in refusals, (reason, refusals)

    def now_ms(self) -> int:
        return self.world.sim.unix_ms

    def new_producer(self) -> tuple[int, int]:
        return self.world.cluster.init_producer_id()

    def shared_producer(self) -> tuple[int, int]:
        return SHARED, 0

    def stored(self, partition: int) -> list[raw.Logged]:
        replica = self.world.cluster.partitions[TopicPartition(*self.place(partition))].replicas[0]
        return [
            logged for each in replica.batches if each.base >= self.log_start for logged in raw.read_batches(each.data)
        ]

    @contextmanager
    def fault(self, faulty: Faulty) -> Iterator[None]:
        via = faulty.send.via
        client = self.connection(via).socket.connection  # type: ignore[attr-defined]
        proxied = self.world.proxies[via == OTHER].proxied_connections.values()
        upstream = next(each.upstream for each in proxied if each.client is client)
        wire, replica = upstream.to_a, self.world.cluster.partitions[self.world.names[0]].replicas[0]
        write, end, late = wire.write, replica.log_end, bytearray()

        def answer(data: bytes) -> None:
            if replica.log_end == end:
                write(data)
            elif faulty.response == "late":
                late.extend(data)
            else:
                upstream.cut()

        wire.write = answer  # type: ignore[method-assign]
        yield
        wire.write = write  # type: ignore[method-assign]
        assert replica.log_end > end
        if late:
            write(bytes(late))

    def begin(self, producer: str) -> tuple[int, int]:
        cluster = self.world.cluster
        known = cluster.transactional_ids.get(name := str(self.transactional_id(producer)))
        number, epoch = cluster.init_producer_id(known)
        if known is None:
            cluster.begin_transactional(number, v2=False)
            cluster.transactional_ids[name] = number
        assert cluster.add_partition(number, epoch, self.world.names[0])
        return number, epoch

    def end(self, producer: str, *, commit: bool) -> None:
        number, epoch = self._ids[producer]
        assert self.world.cluster.end_transaction(number, epoch, commit=commit)

    def await_end(self, log_end: int) -> None:
        replica = self.world.cluster.partitions[self.world.names[0]].replicas[0]
        assert self.world.run_until(lambda: replica.log_end == log_end)

    def delete_records(self, before: int) -> None:
        self.world.cluster.delete_records(self.world.names[0], before)
