"""This process among the proxies of its cluster: the state topic and its heartbeats there."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar
from uuid import UUID

from fencepost_proxy import logs
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import FencepostError, Reason
from fencepost_proxy.expansion.history import ExpansionHistory
from fencepost_proxy.metrics import fencepost_version
from fencepost_proxy.native_view import NativeView
from fencepost_proxy.observability import readiness
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.types import Address, Monotonic
from fencepost_proxy.wire.state_records import StateRecord

_T = TypeVar("_T")
_log = logs.get("services.membership")
_limited_log = logs.RateLimitedLog(_log)

_START_AGAIN_SECONDS = 2.0
#: In heartbeats: the bootstrap address by which clients reach this process alone.
_CLIENTS: Final = "clients"


class Membership(NativeView, remembered=("state", "takeover_until")):
    """`state`: None before the first try to join. `waits_because`: why the start waits, None if it does not."""

    def __init__(self, kafka: KafkaClient, config: ProxyConfig) -> None:
        self._kafka = kafka
        self._config = config
        self._empty_view = StateView("")
        self.state: StateTopic | None = None
        self.waits_because: Reason | None = None
        self.takeover_until = float("-inf")

    @property
    def joined(self) -> StateTopic:
        """The state topic of a process that has joined."""
        assert self.state is not None
        return self.state

    @property
    def view(self) -> StateView:
        return self._empty_view if self.state is None else self.state.view

    def history(self, topic: str, topic_id: UUID | None) -> ExpansionHistory:
        return self.view.history(topic, topic_id)

    def fresh_until(self) -> Monotonic:
        """Until when the view contains every record in force."""
        return Monotonic(float("-inf")) if self.state is None else self.state.fresh_until

    def fresh(self, now: float) -> bool:
        return self.state is not None and now < self.state.fresh_until

    def taken_over(self, now: float) -> bool:
        """Takeover: the time after a start in which Kafka may still append requests of other processes, live or dead.

        Whether it is over.
        """
        return now >= self.takeover_until

    def alone(self, now: float) -> bool:
        return self.state is not None and self.state.heartbeats.alone(now)

    def others_addresses(self) -> list[Address]:
        """Where clients reach each of the other live processes, as far as they announce it."""
        if self.state is None:
            return []
        found = []
        for each in self.state.heartbeats.reported(_CLIENTS, time.monotonic()):
            with suppress(ValueError):
                found.append(Address.parse(each))
        return found

    async def retire_address(self) -> None:
        """Clients should reach this process no longer."""
        if self.state is not None:
            about = {name: each for name, each in self.state.heartbeats.about.items() if name != _CLIENTS}
            await self.state.heartbeats.report(about)

    @property
    def identity(self) -> str:
        """As the claims of this process have it."""
        return str(self.joined.heartbeats.process)

    async def join(self, on_change: Callable[[Sequence[StateRecord]], None]) -> StateTopic:
        """Reads the state topic and registers with the other processes; retries until that works.

        Kafka may be starting, ACLs may be missing, or the topic may be misconfigured; /readyz shows the reason.
        Each try starts from scratch, since nothing read from a misconfigured topic may be kept.
        """
        config = self._config

        async def join() -> bool:
            state = self.state = StateTopic(
                self._kafka,
                name=config.state_topic,
                lease_seconds=config.config_lease_seconds,
                limits=config.limits,
                on_change=on_change,
            )
            about = {"host": platform.node(), "version": fencepost_version()}
            if config.status is not None:
                about["status"] = str(config.status)
            if config.home_address is not None:
                about[_CLIENTS] = str(config.home_address)
            state.heartbeats.about = about
            try:
                await state.start()
                await state.acquire_producer_id()
                return await state.heartbeats.enter()
            except FencepostError:
                await state.close()
                raise

        if await self.until_kafka_can(join, readiness.unusable(config.state_topic)):
            _log.info("other proxy processes serve this cluster, or stopped recently without deregistering")
            self.takeover_until = time.monotonic() + config.limits.takeover_seconds
        return self.joined

    async def until_kafka_can(self, attempt: Callable[[], Awaitable[_T]], step: Reason) -> _T:
        while True:
            try:
                result = await attempt()
            except FencepostError as error:
                self.waits_because = readiness.starting(step, error)
                _limited_log.error("start", "waiting", what=step, reason=error)
                await asyncio.sleep(_START_AGAIN_SECONDS)
            else:
                self.waits_because = None
                return result
