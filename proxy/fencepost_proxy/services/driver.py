"""Runs the dispatcher with a clock and sockets: events in, actions carried out, ticks, quotas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.metrics import Traffic
from fencepost_proxy.services.log_reader import LogReader
from fencepost_proxy.services.reports import Reports
from fencepost_proxy.services.session_requests import SessionRequests
from fencepost_proxy.session.dispatcher import Action, Dispatcher, ForConnection, ForControl
from fencepost_proxy.session.frames import messages as sessions
from fencepost_proxy.session.session import Session
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import Transactor

#: How often partition sequencers and sessions check their time limits.
_TICK_SECONDS = 0.02
#: Minimum pause between two quota renewals (`Dispatcher.renew_quota`): about the work that one quota allows.
_QUOTA_SECONDS = 0.003


class AddedTime:
    """For the event being handled: how long each request and response had waited in the proxy before it."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._forwarded: list[float] = []
        self._answered: list[float] = []

    def forwarded(self, waited_seconds: float) -> None:
        self._forwarded.append(waited_seconds)

    def answered(self, waited_seconds: float) -> None:
        self._answered.append(waited_seconds)

    def event_handled(self, began: float) -> None:
        if self._forwarded or self._answered:
            took = time.monotonic() - began
            for waited in self._forwarded:
                self._traffic.request_seconds.observe(waited + took)
            for waited in self._answered:
                self._traffic.response_seconds.observe(waited + took)
            self._forwarded.clear()
            self._answered.clear()


@dataclass(eq=False)
class Driver:
    """Also the driver of proxied connections, and the append barriers of expansions."""

    dispatcher: Dispatcher
    connections: ClientConnections
    traffic: Traffic
    added: AddedTime
    log_reader: LogReader
    requests: SessionRequests
    reports: Reports
    spawn: Spawn
    _ticker: asyncio.TimerHandle | None = field(default=None, init=False)
    _renewing: bool = field(default=False, init=False)

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()

    # ---- proxied connections

    def proxied_opened(self, proxied: ProxiedConnection) -> Session:
        return self.dispatcher.open(proxied.connection, proxied.local_host, time.monotonic())

    def proxied_closed(self, proxied: ProxiedConnection) -> None:
        self.connections.remove(proxied)

    def keep_time(self, session: Session) -> None:
        """The session waits for something with a time limit."""
        self.dispatcher.keep_time(session)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def session_event(self, connection: int, event: sessions.Event) -> None:
        now = time.monotonic()
        self.perform(self.dispatcher.session_event(connection, event, now), now)

    # ---- actions

    def perform(self, actions: list[Action], began: float) -> None:
        """`began` – when the event arrived that caused these actions."""
        for action in actions:
            if isinstance(action, ForConnection):
                self._for_connection(action.connection, action.command)
            elif isinstance(action, ForControl):
                self.spawn(self._read(action), f"read {action.partition}")
            else:
                self.reports.finding(action.finding)
        self.added.event_handled(began)
        if self._ticker is None and self.dispatcher.needs_ticks:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        if not self._renewing and self.dispatcher.over_quota:
            self._renew_later(0.0)

    def _for_connection(self, connection: int, command: sessions.Command) -> None:
        proxied = self.connections.by_number.get(connection)
        match command:
            case sessions.ToClient(chunks):
                self.traffic.bytes_to_clients += sum(map(len, chunks))
            case sessions.ToUpstream(chunks):
                self.traffic.bytes_to_kafka += sum(map(len, chunks))
            case _ if self.reports.take(command, proxied):
                return
            case _ if (requested := self.requests.start(connection, command, proxied)) is not None:
                self.spawn(self._report(connection, requested), f"{type(command).__name__} of {connection}")
                return
        if proxied is not None:
            proxied.perform(command)

    async def _report(self, connection: int, requested: Coroutine[Any, Any, sessions.Event | None]) -> None:
        event = await requested
        if event is not None:
            self.session_event(connection, event)

    async def _read(self, requested: ForControl) -> None:
        event = await self.log_reader.carry_out(requested)
        now = time.monotonic()
        self.perform(self.dispatcher.sequencer_event(requested.partition, event, now), now)

    # ---- time

    def _tick(self) -> None:
        self._ticker = None
        now = time.monotonic()
        self.perform(self.dispatcher.tick(now), now)

    def _renew_later(self, took: float) -> None:
        """Leaves the event loop to others for at least as long as the last renewal `took`."""
        self._renewing = True
        asyncio.get_running_loop().call_later(max(took, _QUOTA_SECONDS), self._renew_quota)

    def _renew_quota(self) -> None:
        began = time.monotonic()
        self.perform(self.dispatcher.renew_quota(began), began)
        self._renewing = False
        if self.dispatcher.over_quota:
            self._renew_later(time.monotonic() - began)

    # ---- append barriers

    def close_barrier(self, topic: str, but_for: frozenset[Transactor]) -> None:
        now = time.monotonic()
        self.perform(self.dispatcher.close_barrier(topic, now, but_for), now)

    def open_barrier(self, topic: str, partition_count: int | None) -> None:
        now = time.monotonic()
        barrier = self.dispatcher.barrier(topic)
        actions = self.dispatcher.open_barrier(topic, partition_count or barrier.count or 0, now)
        if not barrier.count:
            barrier.forget_count()
        self.perform(actions, now)

    def barrier_empty(self, topic: str) -> bool:
        return self.dispatcher.barrier_empty(topic, time.monotonic())

    def in_doubt(self) -> bool:
        """Something that was sent may still be appended."""
        now = time.monotonic()
        return self.dispatcher.in_doubt or not all(each.empty(now) for each in self.dispatcher.barriers.values())

    def forget_topic(self, topic: str, *, same_log: bool = False) -> None:
        now = time.monotonic()
        self.perform(self.dispatcher.forget_topic(topic, now, same_log=same_log), now)
