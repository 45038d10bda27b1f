"""This process's heartbeats in the state topic, and those of the other instances.

Without a stored heartbeat for `_SILENT_SECONDS_MAX`, an instance stops serving checked topics before others consider
it dead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID, uuid4

from fencepost_proxy import logs
from fencepost_proxy.cluster import process_identity
from fencepost_proxy.cluster.broker import OutcomeUnknown, UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.producer_ids import ProducerIds
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import StateError
from fencepost_proxy.native_view import NativeView, RememberedMap
from fencepost_proxy.topics.processes import (
    INSTANCE_ID_AGE_MAX,
    NOTHING,
    encode_heartbeat,
    encode_heartbeat_tombstone,
    encode_process,
    heartbeat,
)
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.types import Monotonic, Offset, ProducerId
from fencepost_proxy.wire.state_records import StateRecord

_log = logs.get("cluster.heartbeats")
_limited_log = logs.RateLimitedLog(_log)

#: Heartbeat interval, and the silence after which other instances consider an instance dead.
_HEARTBEAT_SECONDS: Final = 20.0
_DEAD_SECONDS: Final = 90.0
#: Heartbeat interval until the other instances are certain to have observed a first heartbeat.
_UNACKNOWLEDGED_SECONDS: Final = 1.0
#: Without a stored heartbeat for this long, an instance stops serving checked topics before others consider it dead.
_SILENT_SECONDS_MAX: Final = 75.0
_LEAVE_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Instance:
    """A proxy process of the cluster, for the status page. `instance_id`: 0 if none is assigned.

    `host`, `version`, `status` (its address): None if it does not report them. `heartbeat_seconds`: since its last one.
    `live`: not known to be dead.
    """

    instance_id: int
    host: str | None
    version: str | None
    status: str | None
    heartbeat_seconds: float
    live: bool
    this: bool = False


class Topic(Protocol):
    """The state topic. `read_until`: until when the view has every record in force."""

    view: StateView
    read_until: Monotonic

    async def append(
        self,
        records: Sequence[StateRecord],
        *,
        timeout_seconds: float | None = None,
        producer_id: ProducerId | None = None,
    ) -> list[Offset]: ...


class Heartbeats(NativeView, remembered=("process", "_sending"), until=("live_until",)):
    """`live_until`: until when the other instances consider this one live.

    `about`: what this process reports of itself (`host`, `version`, `status`, and `clients`: where they reach it).
    """

    def __init__(self, topic: Topic, kafka: KafkaClient, limits: Limits) -> None:
        self._topic = topic
        self._producer_ids = ProducerIds(kafka)
        self._limits = limits
        self._instance_id = 0
        self._instance_id_as_of = Offset(-1)
        self.process: UUID | None = None  # the current identity of this process; None before `enter`
        self.names: frozenset[UUID] = frozenset()  # all its identities: a new instance id has a new one
        self.about: Mapping[str, str] = NOTHING
        self._others = RememberedMap[UUID, float]()  # time of the last heartbeat
        self._about: dict[UUID, Mapping[str, str]] = {}
        self._found_dead: dict[UUID, float] = {}  # processes of this machine: when they were first found dead
        self.live_until = float("inf")  # until when the others consider this one live
        self._announced_at = float("-inf")  # when its present identity was first sent
        self._former: set[UUID] = set()  # retired identities whose tombstones may not be stored yet
        self._sending: asyncio.Task[None] | None = None

    async def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait({self._sending})

    @property
    def unacknowledged(self) -> bool:
        """Whether the other instances may not know this process."""
        return self.live_until == float("-inf")

    @property
    def instance_id(self) -> int:
        """This instance's id, 1 to 255, unique in the cluster; 0 if none is assigned."""
        if self.process is None:
            return 0
        view = self._topic.view
        if self._instance_id_as_of != view.next_offset:  # read for each append; changes with the view only
            self._instance_id_as_of, self._instance_id = view.next_offset, view.processes.instance_id(self.process)
        return self._instance_id

    @property
    def instance_id_expires(self) -> bool:
        return self.process is not None and self._topic.view.processes.age(self.process) > INSTANCE_ID_AGE_MAX

    def alone(self, now: float) -> bool:
        """Whether no other heartbeat was observed for `_DEAD_SECONDS` while this instance sends its own.

        Not a proof: a starting instance is observed a moment later, and a suspended one may resume.
        """
        return self._sending is not None and not any(
            now - last_observed < _DEAD_SECONDS for last_observed in self._others.view.values()
        )

    def live(self, now: float) -> frozenset[UUID]:
        """The other processes that are not known to be dead."""
        return frozenset(
            each
            for each, last_observed in self._others.view.items()
            if now - last_observed < _DEAD_SECONDS and self._dead_at(each) is None
        )

    def instances(self, now: float) -> list[Instance]:
        """This process, then the others that did not report their end, last heartbeat first."""
        if self.process is None:
            return []
        live, instance_id = self.live(now), self._topic.view.processes.instance_id
        this = Instance(self.instance_id, *_reported(self.about), 0.0, live=not self.unacknowledged, this=True)
        others = sorted(self._others.view.items(), key=lambda each: -each[1])
        return [this] + [
            Instance(instance_id(process), *_reported(self._about.get(process, NOTHING)), now - at, process in live)
            for process, at in others
        ]

    def reported(self, what: str, now: float) -> list[str]:
        """What the other live processes report under that name in their heartbeats."""
        reports = (self._about.get(each, NOTHING).get(what) for each in self.live(now))
        return [each for each in reports if isinstance(each, str)]

    async def report(self, about: Mapping[str, str]) -> None:
        """Report this at once, and in later heartbeats."""
        self.about = about
        if self.process is None:
            return
        try:
            await self._topic.append([self._heartbeat(self.process)], timeout_seconds=_LEAVE_SECONDS)
        except (UpstreamUnavailable, StateError) as error:
            _log.warning("heartbeat not stored", reason=error)

    def may_append(self, now: float) -> frozenset[UUID]:
        """The other processes that may append, or whose appends Kafka may still have queued.

        A process without a heartbeat for 75 seconds no longer serves; its last requests are finished
        `limits.takeover_seconds` later. The same delay applies to a process that was found dead.
        """
        queued = self._limits.takeover_seconds
        found = []
        for each, last_observed in self._others.view.items():
            dead_at = self._dead_at(each)
            until = (
                last_observed + _SILENT_SECONDS_MAX
                if dead_at is None
                else min(dead_at, last_observed + _SILENT_SECONDS_MAX)
            )
            if now < until + queued:
                found.append(each)
        return frozenset(found)

    def _dead_at(self, process: UUID) -> float | None:
        """When a process of this machine was first found dead."""
        if process not in self._found_dead:
            identity = self._topic.view.processes.identity(process)
            if identity is None or not process_identity.is_dead(identity):
                return None
            self._found_dead[process] = time.monotonic()
        return self._found_dead[process]

    async def enter(self, *, timeout_seconds: float | None = None) -> bool:
        """Take the next instance id and send heartbeats until `leave`. Returns whether other instances are live.

        Also renews an instance id. Without one (not stored in time) the process works but proves less: see `sequencer`.
        Raises `UpstreamUnavailable`, `StateError`.

        An instance serves requests only after it has read back its own first heartbeat. Otherwise:
        1. Its record is lost or late.
        2. An expansion starts, waits for all instances it knows, and ends.
        3. Meanwhile this instance admits an append, because its view lacks that expansion.
        4. The append is appended past a threshold.
        A heartbeat that was read back precedes every expansion that the view lacks, so the process that runs that
        expansion knows this instance.

        The first record also checks that Kafka accepts any first sequence from a new producer, as fenced appends need:
        it uses a new producer id and does not start at sequence 0. (Transactions v2 no longer allow this.)
        """
        process = uuid4()
        producer_id, _ = await self._producer_ids.init(timeout_seconds=timeout_seconds)
        before = self.process
        records = [encode_process(process, _now_ms(), process_identity.own_identity()), self._heartbeat(process)]
        self.names |= {process}
        if before is not None:
            records.append(encode_heartbeat_tombstone(before))
        sent_at = time.monotonic()
        try:
            await self._topic.append(records, timeout_seconds=timeout_seconds, producer_id=producer_id)
            self.live_until = sent_at + _SILENT_SECONDS_MAX
        except OutcomeUnknown as error:
            _log.warning("no instance id assigned", reason=error)
            self._announced_at = sent_at
            if before is None:
                self.live_until = float("-inf")
            else:
                self._former.add(before)  # the others know this identity until its tombstone is stored
        self.process = process
        self._instance_id_as_of = Offset(-1)
        self._others.discard(process)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_heartbeats(), name="heartbeats")
        return any(sent_at - last_observed < _DEAD_SECONDS for last_observed in self._others.view.values())

    async def leave(self) -> None:
        """Report a clean end: no request of this process is in progress."""
        if self._sending is None or self.process is None:
            return
        self._sending.cancel()
        try:
            await self._topic.append([encode_heartbeat_tombstone(self.process)], timeout_seconds=_LEAVE_SECONDS)
        except (UpstreamUnavailable, StateError) as error:
            _log.warning("failed to store the tombstone of this process's heartbeat", reason=error)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_UNACKNOWLEDGED_SECONDS if self.unacknowledged else _HEARTBEAT_SECONDS)
            sent_at = time.monotonic()
            former = frozenset(self._former)
            ended = [*self._long_dead(sent_at), *former]
            assert self.process is not None
            try:
                await self._topic.append([self._heartbeat(self.process), *map(encode_heartbeat_tombstone, ended)])
                self.live_until = sent_at + _SILENT_SECONDS_MAX
                self._former -= former
            except (UpstreamUnavailable, StateError) as error:
                _limited_log.warning("heartbeat", "heartbeat not stored", reason=error)

    def _heartbeat(self, process: UUID) -> StateRecord:
        return encode_heartbeat(process, _now_ms(), self.about)

    def _long_dead(self, now: float) -> list[UUID]:
        """Crashed processes, to be removed, or the list would be unbounded.

        Their requests must be finished: a tombstone states a clean end. None with an outdated view: if this process was
        suspended, it has yet to read the heartbeats that the others sent meanwhile.
        """
        over = max(_DEAD_SECONDS, _SILENT_SECONDS_MAX + self._limits.takeover_seconds + _HEARTBEAT_SECONDS)
        if now >= self._topic.read_until:
            return []
        return [each for each, last_observed in self._others.view.items() if now - last_observed >= over]

    def observe(self, record: StateRecord, *, loaded: bool) -> None:
        beat = heartbeat(record)
        if beat is None:
            return
        if beat.process == self.process:
            if self.unacknowledged and beat.at_ms is not None:
                self.live_until = self._announced_at + _SILENT_SECONDS_MAX
            return
        if beat.at_ms is None:
            self._others.discard(beat.process)
            self._found_dead.pop(beat.process, None)
            self._about.pop(beat.process, None)
            return
        # Heartbeats read at the start may be old. With clock skew a live process counts again at its next heartbeat.
        age_seconds = 0.0 if loaded else max(0.0, time.time() - beat.at_ms / 1000)
        self._others.set(beat.process, time.monotonic() - age_seconds)
        self._about[beat.process] = beat.about


def _now_ms() -> int:
    return int(time.time() * 1000)


def _reported(about: Mapping[str, str]) -> tuple[str | None, str | None, str | None]:
    return about.get("host"), about.get("version"), about.get("status")
