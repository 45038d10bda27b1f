"""The supervisor starts several worker processes for one address. It does not connect to Kafka.

    supervisor ── primary worker (0)      per worker: one socket for packets, one for listener requests
               ── worker 1
               ── …

It binds every port once and shares the sockets with all workers: the kernel chooses the worker that accepts a
connection, and if a worker dies the others accept its pending connections. A worker that exits unexpectedly is
restarted. A connection that needs the primary worker is migrated through the supervisor as an opaque packet; without a
primary worker it is closed.

The primary worker starts first, because it does the work that is needed once per cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import ConfigError, Reason
from fencepost_proxy.metrics import Metrics, ProcessNumbers, WorkerNumbers, fencepost_version
from fencepost_proxy.observability import readiness
from fencepost_proxy.observability.lists import Found, merged
from fencepost_proxy.observability.status import BrokerStatus, Listed, PageRequest, StatusSnapshot
from fencepost_proxy.observability.status_server import StatusServer
from fencepost_proxy.transport.listeners import bind
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.workers.channel import Channel, Packet, pair, receive_packet, send_packet
from fencepost_proxy.workers.worker import (
    AWAY,
    LIST,
    LOAD_BYTES,
    MIGRATE,
    PRIMARY,
    READY,
    RELEASE,
    RELOAD,
    REPORT,
    START,
    ListenerRequest,
    Report,
)

_log = logs.get("workers.supervisor")
_limited_log = logs.RateLimitedLog(_log)

_PAUSE_MIN_SECONDS: Final = 0.1
_PAUSE_MAX_SECONDS: Final = 10.0
_STARTING_HINT: Final = "Wait a moment: the other workers serve its clients. If it recurs, the log gives the reason."
#: A worker that served this long is restarted immediately.
_STEADY_SECONDS: Final = 30.0
#: Timeout of a worker's report; after it the previous report is shown.
_REPORT_SECONDS: Final = 1.0
#: Time after the drain limits until a worker is killed.
_END_SECONDS: Final = 5.0


@dataclass(slots=True)
class _WorkerState:
    """One worker and its predecessors with the same number."""

    index: int
    process: Process | None = None
    channel: Channel | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    starts: int = 0
    configured: bool = False  # its configuration was sent
    report: Report | None = None  # the last one of the running process
    retired: Metrics | None = None  # counters of ended processes


@dataclass(slots=True)
class _Query:
    """A list query sent to all workers."""

    awaited: set[int] = field(default_factory=set)
    found: dict[int, list[Found]] = field(default_factory=dict)
    answered: asyncio.Event = field(default_factory=asyncio.Event)


async def supervise(
    config: ProxyConfig,
    *,
    on_ready: Callable[[Address], None],
    on_reload: Callable[[Callable[[ProxyConfig], None]], None] = lambda reload: None,
) -> int:
    """Run until SIGTERM or SIGINT; return the exit status. Raises `ConfigError` if a port is not available.

    `on_reload` receives, at the start, a function that applies a new configuration, as in `app.serve`.
    """
    supervisor = Supervisor(config, on_ready)
    on_reload(supervisor.reload)
    try:
        return await supervisor.run()
    finally:
        await supervisor.close()


class Supervisor:
    def __init__(self, config: ProxyConfig, on_ready: Callable[[Address], None]) -> None:
        self._config = config
        self._on_ready = on_ready
        self._worker_states = [_WorkerState(index) for index in range(config.workers)]
        self._loads_file = os.memfd_create("fencepost-loads", os.MFD_CLOEXEC)
        os.ftruncate(self._loads_file, LOAD_BYTES * config.workers)
        self._loads = memoryview(mmap.mmap(self._loads_file, 0)).cast("q")
        self._listening: dict[NodeId | None, socket.socket] = {}
        self._stopping = asyncio.Event()
        self._forced = False
        self._bootstrap: Address | None = None
        self._status_code = 0
        self._served = False  # all workers were ready once
        self._started_at = time.monotonic()
        self._queried: asyncio.Task[None] | None = None
        self._awaited: set[int] = set()
        self._reported = asyncio.Event()
        self._status = StatusServer(
            self._snapshot,
            self._shown_metrics,
            self._listed,
            refresh=self._query_all,
            release=self._release,
            token_file=config.status_token_file,
        )
        self._queries: dict[int, _Query] = {}
        self._numbers = itertools.count(1)

    # ---- life

    async def run(self) -> int:
        self._listener(ListenerRequest(None, self._config.listen, "clients"))
        if self._config.status is not None:
            try:
                await self._status.start(self._config.status)
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {self._config.status} for the status page: {error.strerror or error}"
                ) from error
        loop = asyncio.get_running_loop()
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._signalled)
        async with asyncio.TaskGroup() as tasks:
            for worker_state in self._worker_states:
                tasks.create_task(self._keep(worker_state), name=f"worker {worker_state.index}")
            tasks.create_task(self._report_ready(), name="ready")
        return self._status_code

    def reload(self, config: ProxyConfig) -> None:
        """Apply `config`, in which only `live` keys differ. Workers that start later use it too."""
        self._config = config
        logs.change(config.log.level, config.log.format)
        for worker_state in self._worker_states:
            if not worker_state.configured or worker_state.channel is None:
                continue
            if not worker_state.channel.send(Packet.of(RELOAD, self._of_worker())):
                _log.error("failed to send the new configuration to a worker", worker=worker_state.index)

    def _signalled(self) -> None:
        if self._forced:
            _log.warning("third stop signal: exiting immediately, requests in progress are lost")
            for worker_state in self._worker_states:
                if worker_state.process is not None and worker_state.process.returncode is None:
                    worker_state.process.kill()
            os._exit(1)
        if self._stopping.is_set():
            self._forced = True
            self._listen_no_more()
            self._terminate_workers()
            return
        _log.info("draining", longest_seconds=self._config.limits.drain_seconds)
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        self._terminate_workers()
        # The workers close their sockets at the same time, so new connections are refused.
        asyncio.get_running_loop().call_later(self._config.limits.drain_notice_seconds, self._listen_no_more)

    def _terminate_workers(self) -> None:
        for worker_state in self._worker_states:
            if worker_state.process is not None and worker_state.process.returncode is None:
                worker_state.process.terminate()

    def _listen_no_more(self) -> None:
        for sock in self._listening.values():
            sock.close()
        self._listening.clear()

    async def close(self) -> None:
        self._listen_no_more()
        await self._status.close()
        logs.report_suppressed(at_once=True)

    async def _report_ready(self) -> None:
        for worker_state in self._worker_states:
            if not await self._unless_stopping(worker_state.ready.wait()):
                return
        assert self._bootstrap is not None
        self._served = True
        _log.info("serving", bootstrap=self._bootstrap, workers=len(self._worker_states))
        self._on_ready(self._bootstrap)

    async def _unless_stopping(self, what: object) -> bool:
        """Await `what`; False if the supervisor is stopping."""
        waiting = asyncio.ensure_future(what)  # type: ignore[call-overload]
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        done = waiting.done()
        for each in (waiting, stopping):
            each.cancel()
        return done and not self._stopping.is_set()

    # ---- workers

    async def _keep(self, worker_state: _WorkerState) -> None:
        """Run and restart the worker. If it ends before all workers are ready, stop everything."""
        pause_seconds = _PAUSE_MIN_SECONDS
        while not self._stopping.is_set():
            began = time.monotonic()
            status = await self._run(worker_state)
            if self._stopping.is_set():
                # SIGTERM arrived before the worker had a handler for it.
                self._status_code = max(self._status_code, 0 if status == -signal.SIGTERM else abs(status))
                return
            if not self._served:
                self._status_code = status if status > 0 else 1
                self._stop()
                return
            if time.monotonic() - began > _STEADY_SECONDS:
                pause_seconds = _PAUSE_MIN_SECONDS
            _log.error(
                "worker exited unexpectedly", worker=worker_state.index, status=status, again_in_seconds=pause_seconds
            )
            await self._unless_stopping(asyncio.sleep(pause_seconds))
            pause_seconds = min(2 * pause_seconds, _PAUSE_MAX_SECONDS)

    async def _run(self, worker_state: _WorkerState) -> int:
        ours, theirs = pair()
        listeners, theirs_too = pair()
        worker_state.starts += 1
        self._loads[worker_state.index] = AWAY
        # A new session: Ctrl-C in a terminal reaches the supervisor only, which forwards it once.
        worker_state.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "fencepost_proxy", "proxy"),
            *(
                "--worker",
                ":".join(map(str, (worker_state.index, theirs.fileno(), theirs_too.fileno(), self._loads_file))),
            ),
            pass_fds=(theirs.fileno(), theirs_too.fileno(), self._loads_file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        theirs_too.close()
        listeners.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(listeners, self._listener_requested, listeners)
        worker_state.channel = Channel(ours, lambda packet: self._received(worker_state, packet))
        primary = self._worker_states[PRIMARY]
        if worker_state is primary or self._served or await self._unless_stopping(primary.ready.wait()):
            worker_state.configured = worker_state.channel.send(Packet.of(START, self._of_worker()))
        if self._stopping.is_set():
            with contextlib.suppress(ProcessLookupError):  # already exited
                worker_state.process.terminate()
        status = await self._end_of(worker_state.process)
        loop.remove_reader(listeners)
        listeners.close()
        worker_state.channel.close()
        worker_state.channel = None
        worker_state.configured = False
        worker_state.ready.clear()
        self._loads[worker_state.index] = AWAY
        self._retire(worker_state)
        return status

    def _of_worker(self) -> ProxyConfig:
        """Configuration of workers: the supervisor serves the status page and metrics."""
        watched = self._config.watch_transactions and self._config.status is not None
        return replace(self._config, status=None, watch_transactions=watched)

    async def _end_of(self, process: Process) -> int:
        ended = asyncio.create_task(process.wait())
        if await self._unless_stopping(asyncio.shield(ended)):
            return ended.result()
        try:
            limits = self._config.limits
            async with asyncio.timeout(limits.drain_notice_seconds + limits.drain_seconds + _END_SECONDS):
                return await ended
        except TimeoutError:
            process.kill()
            return await process.wait()

    def _received(self, worker_state: _WorkerState, packet: Packet) -> None:
        if packet.kind == MIGRATE:
            primary = self._worker_states[PRIMARY]
            if not (primary.ready.is_set() and primary.channel is not None and primary.channel.send(packet)):
                packet.close()
                _limited_log.warning(
                    "primary", "connection closed", worker=worker_state.index, reason="no primary worker"
                )
        elif packet.kind == READY:
            bootstrap = packet.message()
            if worker_state.index == PRIMARY:
                self._bootstrap = bootstrap
            worker_state.ready.set()
        elif packet.kind == REPORT:
            _, worker_state.report = packet.message()
            self._awaited.discard(worker_state.index)
            if not self._awaited:
                self._reported.set()
        elif packet.kind == LIST:
            self._found(worker_state, *packet.message())

    # ---- listeners

    def _listener_requested(self, requester: socket.socket) -> None:
        try:
            packet = receive_packet(requester)
            if packet is None:
                asyncio.get_running_loop().remove_reader(requester)
                return
            try:
                answer = Packet.of("listener", None, [self._listener(packet.message()).dup()])
            except ConfigError as error:
                answer = Packet.of("listener", str(error))
            send_packet(requester, answer)
        except OSError as error:
            _log.warning("failed to send a listener to a worker", reason=error)

    def _listener(self, requested: ListenerRequest) -> socket.socket:
        sock = self._listening.get(requested.node_id)
        if sock is None:
            sock = self._listening[requested.node_id] = bind(requested.address, requested.what)
        return sock

    # ---- reports of all workers

    async def _query_all(self) -> None:
        """Concurrent calls share one query."""
        if self._queried is None or self._queried.done():
            self._queried = asyncio.create_task(self._query())
        await asyncio.shield(self._queried)

    async def _query(self) -> None:
        self._reported.clear()
        # A worker that waits for START would take the query for it.
        queried = [
            worker_state
            for worker_state in self._worker_states
            if worker_state.configured and worker_state.channel is not None
        ]
        self._awaited = {worker_state.index for worker_state in queried}
        for worker_state in queried:
            if worker_state.channel is not None and not worker_state.channel.send(Packet.of(REPORT)):
                self._awaited.discard(worker_state.index)
        if self._awaited:
            try:
                async with asyncio.timeout(_REPORT_SECONDS):
                    await self._reported.wait()
            except TimeoutError:
                pass

    async def _listed(self, requested: Sequence[PageRequest]) -> Sequence[Listed]:
        """Merge the lists of all workers that respond in time."""
        number = next(self._numbers)
        query_message = self._queries[number] = _Query()
        try:
            for worker_state in self._worker_states:
                if worker_state.channel is not None and worker_state.ready.is_set():
                    query_message.awaited.add(worker_state.index)
                    if not worker_state.channel.send(Packet.of(LIST, (number, tuple(requested)))):
                        query_message.awaited.discard(worker_state.index)
            if query_message.awaited:
                async with asyncio.timeout(_REPORT_SECONDS):
                    await query_message.answered.wait()
        except TimeoutError:
            pass
        finally:
            del self._queries[number]
        found = [query_message.found[index] for index in sorted(query_message.found)]
        return [
            merged(each, [lists[position] for lists in found]) if found else Listed()
            for position, each in enumerate(requested)
        ]

    def _found(self, worker_state: _WorkerState, number: int, found: list[Found]) -> None:
        query_message = self._queries.get(number)
        if query_message is not None:
            query_message.found[worker_state.index] = found
            query_message.awaited.discard(worker_state.index)
            if not query_message.awaited:
                query_message.answered.set()

    def _retire(self, worker_state: _WorkerState) -> None:
        """Keep the counters of an ended worker, so that sums never decrease."""
        if worker_state.report is None:
            return
        metrics, worker_state.report = worker_state.report.metrics, None
        metrics.ended()
        worker_state.retired = metrics if worker_state.retired is None else worker_state.retired.plus(metrics)

    def metrics(self) -> Metrics:
        whole = Metrics()
        whole.log_lines = logs.lines()
        workers = []
        fresh_until = float("inf")
        for worker_state in self._worker_states:
            of_worker = Metrics() if worker_state.retired is None else worker_state.retired
            of_process = ProcessNumbers()
            if worker_state.report is not None:
                of_process = worker_state.report.process
                of_worker = of_worker.plus(worker_state.report.metrics)
                fresh_until = min(fresh_until, worker_state.report.state_fresh_until)
            else:
                fresh_until = float("-inf")
            whole = whole.plus(of_worker)
            workers.append(
                WorkerNumbers(
                    worker_state.index,
                    of_worker.connections.value,
                    of_worker.connections_accepted.value,
                    of_worker.traffic.requests_in_all,
                    worker_state.starts,
                    of_process,
                )
            )
        primary = self._worker_states[PRIMARY].report
        if primary is not None and (transactions := primary.snapshot.transactions) is not None:
            whole.transactions = lambda: transactions
        if primary is not None:
            whole.certificate_ends = primary.metrics.certificate_ends
        whole.state_fresh_until = lambda: fresh_until  # type: ignore[assignment]
        whole.workers = workers
        return whole

    def _shown_metrics(self) -> Metrics:
        metrics = self.metrics()
        metrics.ready = self._snapshot().ready
        return metrics

    async def _release(self, group: str, topic: str) -> str:
        """The primary worker stores it; the others read it from the state topic."""
        channel = self._worker_states[PRIMARY].channel
        if channel is None or not channel.send(Packet.of(RELEASE, (group, topic))):
            return "not done: the primary worker is unreachable now"
        return f"requested: the log has the result for group {group} and topic {topic}"

    def _snapshot(self) -> StatusSnapshot:
        metrics = self.metrics()
        primary = self._worker_states[PRIMARY].report
        snapshots = [
            worker_state.report.snapshot for worker_state in self._worker_states if worker_state.report is not None
        ]
        uptime_seconds = time.monotonic() - self._started_at
        if primary is None or not snapshots:
            reason = readiness.SHUTTING_DOWN if self._stopping.is_set() else readiness.PRIMARY_IS_STARTING
            return StatusSnapshot(fencepost_version(), uptime_seconds, None, self._bootstrap, not_ready=(reason,))
        away = tuple(
            Reason(f"worker {worker_state.index} is starting", _STARTING_HINT)
            for worker_state in self._worker_states
            if not worker_state.ready.is_set()
        )
        leases = [each.state_lease_seconds for each in snapshots if each.state_lease_seconds is not None]
        return replace(
            primary.snapshot,
            uptime_seconds=uptime_seconds,
            bootstrap=self._bootstrap or primary.snapshot.bootstrap,
            not_ready=(readiness.SHUTTING_DOWN,) if self._stopping.is_set() else primary.snapshot.not_ready,
            warnings=(*primary.snapshot.warnings, *away),
            connections=metrics.connections.value,
            requests_in_flight=sum(each.requests_in_flight for each in snapshots),
            buffered_bytes=sum(each.buffered_bytes for each in snapshots),
            bytes_to_kafka=metrics.traffic.bytes_to_kafka,
            bytes_to_clients=metrics.traffic.bytes_to_clients,
            violations=metrics.violations.value,
            added_seconds=metrics.added_seconds(),
            state_lease_seconds=min(leases, default=None),
            refusals=dict(metrics.refusals),
            brokers=_brokers(snapshots),
            problems=tuple(dict.fromkeys(each for snapshot in snapshots for each in snapshot.problems)),
            last_violation=max(
                (each.last_violation for each in snapshots if each.last_violation is not None),
                key=attrgetter("at_ms"),
                default=None,
            ),
        )


def _brokers(snapshots: list[StatusSnapshot]) -> tuple[BrokerStatus, ...]:
    brokers: dict[NodeId, BrokerStatus] = {}
    for snapshot in snapshots:
        for each in snapshot.brokers:
            before = brokers.get(each.node_id)
            connections = each.connections + (0 if before is None else before.connections)
            brokers[each.node_id] = replace(
                before or each,
                connections=connections,
                problem=each.problem or (None if before is None else before.problem),
            )
    return tuple(brokers[node_id] for node_id in sorted(brokers))
