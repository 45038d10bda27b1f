"""Connects all sessions and partition sequencers of one process: the proxy core, without sockets.

`server.py` drives it with real connections and a clock, the simulation with modelled ones. Events of a connection enter
by `session_event`, results of reads by `sequencer_event`. Each returns `Action`s, in order: a session's commands for
its connection, and reads for a sequencer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fencepost_policies.values import value
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.sequencer import events as sequencers
from fencepost_proxy.sequencer.events import PendingAppend, SequencerLimits
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.session.frames import messages as sessions
from fencepost_proxy.session.frames.services import Services
from fencepost_proxy.session.produce.begun import PastBarriers
from fencepost_proxy.session.session import Session
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import PartitionResult

_Decision = TypeVar("_Decision", bound=sequencers.Admit | sequencers.Answer)

#: How many idle sequencers are kept: each takes some kilobytes, and a dropped one starts with an unconfirmed fence.
_IDLE_SEQUENCERS_MAX = 10_000
_IDLE_BARRIERS_MAX = 10_000


@value
class ForConnection:
    connection: int
    command: sessions.Command


@value
class ForControl:
    """A read (or a resend) that a sequencer waits for; its result comes back by `sequencer_event`."""

    partition: TopicPartition
    effect: sequencers.ReadLogEnd | sequencers.ReadBatch | sequencers.Resend | sequencers.PublishBase


@value
class Report:
    finding: sequencers.Violation | sequencers.LostRecords


Action = ForConnection | ForControl | Report


class Dispatcher:
    """`services` are the sessions' services; their `sequencers` is this object."""

    def __init__(
        self,
        services: Services,
        rewriters: RequestRewriters,
        limits: SequencerLimits,
        names: HeaderNames,
    ) -> None:
        self.sessions: dict[int, Session] = {}
        self.sequencers: dict[TopicPartition, PartitionSequencer] = {}
        self.barriers: dict[str, AppendBarrier] = {}
        self._services = services
        self._rewriters = rewriters
        self._limits = limits
        self._names = names
        # Ordered sets: the order must not depend on hashes.
        self._busy_sequencers: dict[PartitionSequencer, None] = {}
        self._busy_sessions: dict[Session, None] = {}
        self._over_quota: dict[Session, None] = {}
        self.past_barriers = PastBarriers(self.sessions, self.barrier)
        self._actions: list[Action] = []
        self._caused: list[Action] = []  # by direct calls of the session that is called; its own commands come first
        self._now = 0.0
        self._called: dict[Session | PartitionSequencer, None] = {}
        #: Calls in their order: whom, what, and its arguments before `now`.
        self._work: deque[tuple[Session | PartitionSequencer, Callable[..., Any], tuple[Any, ...]]] = deque()

    # ---- events in, actions out

    def open(self, connection: int, local_host: str, now: float) -> Session:
        session = self.sessions[connection] = Session(connection, local_host, self._services, self._rewriters, now)
        return session

    def session_event(self, connection: int, event: sessions.Event, now: float) -> list[Action]:
        session = self.sessions.get(connection)
        if session is None:
            return []
        self._work.append((session, session.handle, (event,)))
        return self._run(now)

    def keep_time(self, session: Session) -> None:
        """Tick it from now on until it needs none: after `FastPath.take_up`, which sets time limits."""
        self._busy_sessions[session] = None

    def sequencer_event(self, partition: TopicPartition, event: sequencers.Event, now: float) -> list[Action]:
        sequencer = self.sequencers.get(partition)
        if sequencer is None:
            return []
        self._work.append((sequencer, sequencer.handle, (event,)))
        return self._run(now)

    def forget_topic(self, topic: str, now: float, *, same_log: bool = False) -> list[Action]:
        """The topic's config changed, or the topic was replaced. `same_log`: only one of Kafka's configs changed."""
        for partition, sequencer in self.sequencers.items():
            if partition.topic == topic:
                self._work.append((sequencer, sequencer.handle, (sequencers.Forget(same_log),)))
        return self._run(now)

    # ---- append barriers

    def barrier(self, topic: str) -> AppendBarrier:
        """The topic's barrier, created on first use."""
        barrier = self.barriers.get(topic)
        if barrier is None:
            if len(self.barriers) >= _IDLE_BARRIERS_MAX:
                self._drop_idle_barriers()
            barrier = self.barriers[topic] = self._services.new_barrier(topic)
        return barrier

    def close_barrier(self, topic: str, now: float, but_for: Iterable[tuple[int, int]] = ()) -> list[Action]:
        """Admit no append except of these producers' transactions, and let waiting requests check again."""
        self.barrier(topic).close(now, but_for=but_for)
        return self.topic_news(now) if but_for else []

    def open_barrier(self, topic: str, count: int, now: float) -> list[Action]:
        """The topic has `count` partitions."""
        self.barrier(topic).open(count)
        return self.topic_news(now)

    def barrier_empty(self, topic: str, now: float) -> bool:
        """No append has entered, none that had may still be appended, and no sequencer will resend one.

        An append whose connection ended has left at once, and its sequencer may resend it while it resolves the
        outcome. What the sequencer sends last may be queued in the broker longer than what was sent first.
        """
        if self.past_barriers.has_any(topic, now) or not self.barrier(topic).empty(now):
            return False
        return not any(
            partition.topic == topic and not sequencer.idle for partition, sequencer in self.sequencers.items()
        )

    def topic_news(self, now: float) -> list[Action]:
        """Requests that wait for barriers check again."""
        waiting = [session for session in self._busy_sessions if session.at_barrier]
        self._work.extend((session, session.handle, (sessions.TopicNews(),)) for session in waiting)
        return self._run(now)

    @property
    def quiet(self) -> bool:
        """No append is in progress that any session knows of."""
        return not self.in_doubt and not any(session.begun.appends_unknown for session in self.sessions.values())

    def tick(self, now: float) -> list[Action]:
        """Call it every few tens of milliseconds while `needs_ticks`."""
        self._work.extend((each, each.handle, (sequencers.Tick(),)) for each in self._busy_sequencers)
        self._work.extend((each, each.handle, (sessions.Tick(),)) for each in self._busy_sessions)
        return self._run(now)

    def renew_quota(self, now: float) -> list[Action]:
        """Renew the quota of the session over it for longest. Call it while `over_quota`, between other events."""
        session = next(iter(self._over_quota))
        del self._over_quota[session]
        return self.session_event(session.connection, sessions.QuotaRenewed(), now)

    # ---- for other modules

    @property
    def over_quota(self) -> bool:
        return bool(self._over_quota)

    @property
    def in_doubt(self) -> bool:
        """Something that was sent may still be appended."""
        return any(not sequencer.idle for sequencer in self.sequencers.values())

    @property
    def needs_ticks(self) -> bool:
        return bool(self._busy_sequencers or self._busy_sessions)

    # ---- calls of sessions, see `Sequencers`

    def submit(self, pending: PendingAppend) -> sequencers.Admit | sequencers.Answer | None:
        decisions = sequencers.Admit, sequencers.Answer
        return self._call(pending.partition, PartitionSequencer.submit, pending, about=pending, returned=decisions)

    def read_ahead(self, pending: PendingAppend) -> None:
        self._call(pending.partition, PartitionSequencer.read_ahead, pending)

    def cancel(self, pending: PendingAppend) -> None:
        self._call(pending.partition, PartitionSequencer.cancel, pending)

    def sent(self, pending: PendingAppend) -> None:
        self._call(pending.partition, PartitionSequencer.sent, pending)

    def answered(self, pending: PendingAppend, result: PartitionResult) -> sequencers.Answer | None:
        return self._call(
            pending.partition, PartitionSequencer.answered, pending, result, about=pending, returned=sequencers.Answer
        )

    def lost(self, pending: PendingAppend) -> None:
        self._call(pending.partition, PartitionSequencer.lost, pending)

    def join(self, partition: TopicPartition, transactional_id: str, connection: int) -> None:
        self._call(partition, PartitionSequencer.join, transactional_id, connection)

    def joined(self, partition: TopicPartition, transactional_id: str, *, answered: bool) -> None:
        self._call(partition, PartitionSequencer.joined, transactional_id, answered)

    def may_send(self, pending: PendingAppend, now: float) -> bool:
        sequencer = self.sequencers.get(pending.partition)
        return sequencer is not None and sequencer.may_send(pending, now)

    def sequencer(self, partition: TopicPartition) -> PartitionSequencer | None:
        return None if self._work else self.sequencers.get(partition)

    # ---- internals

    def _run(self, now: float) -> list[Action]:
        """Make the calls until none is left: one may cause others, also of other sessions."""
        self._now = now
        try:
            while self._work:
                where, call, arguments = self._work.popleft()
                self._called[where] = None
                found = call(*arguments, now)
                if isinstance(where, Session):
                    for command in found:
                        self._actions.append(ForConnection(where.connection, command))
                    if self._caused:
                        self._actions += self._caused
                        self._caused.clear()
                else:
                    for effect in found:
                        self._carry_out(where, effect, now)
        finally:  # also after an error in one of them: the others need their ticks
            for where in self._called:
                if isinstance(where, PartitionSequencer):
                    (self._busy_sequencers.pop if where.idle else self._busy_sequencers.setdefault)(where, None)
                elif where.finished:
                    self._end(where, now)
                else:
                    if where.over_quota:
                        self._over_quota[where] = None
                    (self._busy_sessions.setdefault if where.needs_ticks else self._busy_sessions.pop)(where, None)
            self._called.clear()
        actions, self._actions = self._actions, []
        return actions

    def _end(self, session: Session, now: float) -> None:
        self.sessions.pop(session.connection, None)
        self._busy_sessions.pop(session, None)
        self.past_barriers.has_ended(session, now)

    def _carry_out(self, sequencer: PartitionSequencer, effect: sequencers.Effect, now: float) -> None:
        match effect:
            case sequencers.Admit(pending):
                session = self.sessions.get(pending.connection)
                if session is not None:
                    self._work.append((session, session.append_admitted, (pending,)))
                else:
                    self._work.append((sequencer, sequencer.cancel, (pending,)))
            case sequencers.Answer(pending):
                session = self.sessions.get(pending.connection)
                if session is not None:
                    self._work.append((session, session.append_completed, (effect,)))
            case sequencers.Late(pending_appends):
                session = self.sessions.get(pending_appends[0].connection)
                if session is not None:
                    self._work.append((session, session.handle, (sessions.AppendsLate(pending_appends),)))
            case sequencers.MayJoin(connection):
                session = self.sessions.get(connection)
                if session is not None:
                    self._work.append((session, session.may_join, (sequencer.partition,)))
            case sequencers.Violation() | sequencers.LostRecords():
                self._actions.append(Report(effect))
            case _:
                if isinstance(effect, sequencers.Resend) and sequencer.partition.topic in self.barriers:
                    self.barriers[sequencer.partition.topic].mark_in_doubt(now)
                self._actions.append(ForControl(sequencer.partition, effect))

    def _call(
        self,
        partition: TopicPartition,
        call: Callable[..., list[sequencers.Effect]],
        *arguments: object,
        about: PendingAppend | None = None,
        returned: type[_Decision] | tuple[type[_Decision], ...] = (),
    ) -> _Decision | None:
        """Call its sequencer, and return the effect on the append `about` if it is `returned`. While calls are queued,
        it comes after them, and so do all its effects."""
        sequencer = self.sequencers.get(partition)
        if sequencer is None:
            if len(self.sequencers) >= _IDLE_SEQUENCERS_MAX:
                self._drop_idle_sequencers()
            sequencer = self.sequencers[partition] = self._new_sequencer(partition)
        if self._work:
            self._work.append((sequencer, call, (sequencer, *arguments)))
            return None
        self._called[sequencer] = None
        found = None
        actions, self._actions = self._actions, self._caused
        try:
            for effect in call(sequencer, *arguments, self._now):
                if isinstance(effect, returned) and effect.pending is about:
                    found = effect
                else:
                    self._carry_out(sequencer, effect, self._now)
        finally:
            self._actions = actions
        return found

    def _new_sequencer(self, partition: TopicPartition) -> PartitionSequencer:
        return PartitionSequencer(partition, self._limits, self._names)

    def _drop_idle_barriers(self) -> None:
        """Those that a new one would equal. With a pattern config, any topic name that an unauthorized client makes up
        gets a barrier."""
        droppable = [topic for topic, barrier in self.barriers.items() if barrier.idle]
        for topic in droppable[: _IDLE_BARRIERS_MAX // 2]:
            del self.barriers[topic]

    def _drop_idle_sequencers(self) -> None:
        called = {*self._called, *(where for where, _, _ in self._work)}
        droppable = [
            name
            for name, sequencer in self.sequencers.items()
            if sequencer.idle and not sequencer.in_transaction and sequencer not in called
        ]
        for partition in droppable[: _IDLE_SEQUENCERS_MAX // 2]:
            self.sequencers.pop(partition).issued.take_back()
