"""All sessions and all gates of one process, wired together: the whole proxy without a socket in it.

`net/` drives it with real connections and a clock, the simulation with modelled ones. Events of a connection go in by
`session_event`, results of reads by `gate_event`; what comes out is a list of `Action`s, in order: commands of a
session for its connection, and reads that a gate wants done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

from fencepost_policies.values import value
from fencepost_proxy.partitions import events as gates
from fencepost_proxy.partitions.events import GateLimits
from fencepost_proxy.partitions.gate import Gate
from fencepost_proxy.session import messages as sessions
from fencepost_proxy.session.exchange import Exchanges
from fencepost_proxy.session.session import Session
from fencepost_proxy.session.slots import Begun
from fencepost_proxy.session.surroundings import Surroundings
from fencepost_proxy.topics.door import Door
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HeaderNames

_T = TypeVar("_T")

#: How many idle gates are kept: each costs a few kilobytes, and dropping one costs its partition a cold start.
_IDLE_GATES_MAX = 10_000
_IDLE_DOORS_MAX = 10_000


@value
class ForConnection:
    connection: int
    command: sessions.Command


@value
class ForControl:
    """A read (or a resend) that a gate waits for; its result comes back by `gate_event`."""

    partition: TopicPartition
    effect: gates.ReadTail | gates.Look | gates.Resend | gates.PublishBase


@value
class Report:
    violation: gates.Violation


Action = ForConnection | ForControl | Report


class Switch:
    """`around` answers the sessions' questions, except `may_send`, which is the gates' to answer (see `may_send`).

    `owner` – False in a worker process beside the one that owns what only one may (see `session`).
    """

    def __init__(
        self,
        around: Surroundings,
        exchanges: Exchanges,
        limits: GateLimits,
        names: HeaderNames,
        *,
        owner: bool = True,
    ) -> None:
        self._owner = owner
        self.sessions: dict[int, Session] = {}
        self.gates: dict[TopicPartition, Gate] = {}
        self.doors: dict[str, Door] = {}
        self._around = around
        self._exchanges = exchanges
        self._limits = limits
        self._names = names
        self._busy_gates: dict[Gate, None] = {}  # as ordered sets: what happens must not depend on hashes
        self._busy_sessions: dict[Session, None] = {}
        self._over_quota: dict[Session, None] = {}
        self._begun: dict[str, dict[Session, Begun]] = {}  # by counted topic: what went past its door
        self._actions: list[Action] = []
        self._work: deque[tuple[Session, sessions.Event] | tuple[Gate, gates.Event]] = deque()

    # ---- events in, actions out

    def open(self, connection: int, local_host: str, now: float) -> Session:
        session = self.sessions[connection] = Session(
            connection, local_host, self._around, self._exchanges, now, owner=self._owner
        )
        return session

    def take_over(self, connection: int, handed: sessions.Handed) -> Session:
        """Instead of `open`, for a connection that another process began with."""
        session = self.sessions[connection] = Session.of(handed, connection, self._around, self._exchanges)
        return session

    def session_event(self, connection: int, event: sessions.Event, now: float) -> list[Action]:
        session = self.sessions.get(connection)
        if session is None:
            return []
        self._work.append((session, event))
        return self._run(now)

    def keep_time(self, session: Session) -> None:
        """Ticks it from now on, until it needs none: after `Session.take_up`, which sets time limits."""
        self._busy_sessions[session] = None

    def gate_event(self, partition: TopicPartition, event: gates.Event, now: float) -> list[Action]:
        gate = self.gates.get(partition)
        if gate is None:
            return []
        self._work.append((gate, event))
        return self._run(now)

    def forget_topic(self, topic: str, now: float, *, same_log: bool = False) -> list[Action]:
        """A config of the topic changed, or the topic is another one now. `same_log`: one of Kafka's configs only."""
        for partition, gate in self.gates.items():
            if partition.topic == topic:
                self._work.append((gate, gates.Forget(same_log)))
        return self._run(now)

    # ---- the doors of counted topics

    def door(self, topic: str) -> Door:
        """The topic's door, made where it was not needed before."""
        door = self.doors.get(topic)
        if door is None:
            if len(self.doors) >= _IDLE_DOORS_MAX:
                self._drop_idle_doors()
            door = self.doors[topic] = self._around.new_door(topic)
        return door

    def close_door(self, topic: str, now: float, but_for: Iterable[tuple[int, int]] = ()) -> list[Action]:
        """Nobody enters any more, but for transactions of these producers: they are told to try again."""
        self.door(topic).close(now, but_for=but_for)
        return self.topic_news(now) if but_for else []

    def open_door(self, topic: str, count: int, now: float) -> list[Action]:
        """The topic has so many partitions."""
        self.door(topic).open(count)
        return self.topic_news(now)

    def door_empty(self, topic: str, now: float) -> bool:
        """Nobody is inside, nothing that was may still be appended, and no gate will send any of it once more.

        What was cut off is outside at once, and its gate may send it again for as long as it settles that: what it
        sends at the very end may be queued longer than what was sent first.
        """
        if self._past_door(topic, now) or not self.door(topic).empty(now):
            return False
        return not any(partition.topic == topic and not gate.idle for partition, gate in self.gates.items())

    def now_counted(self, topic: str, now: float) -> None:
        """From here on its appends come to its door. What is under way is kept in mind until it is over.

        A topic is not counted, so a frame of 90 MB to it is streamed past its door. While it trickles in, somebody
        switches the count on and lets the topic grow. Nobody but this connection knows that there is an append that was
        placed under the old count; and how long it takes is the client's to say.
        """
        found = {session: begun for session in self.sessions.values() if (begun := session.begun(now)) is not None}
        if found:
            self._begun[topic] = {**found, **self._begun.get(topic, {})}

    def look_past_doors(self, now: float) -> bool:
        """Now and then: forgets what is over. Whether anything is left."""
        for topic in list(self._begun):
            self._past_door(topic, now)
        return bool(self._begun)

    def streams_past_doors(self, session: Session, since: float) -> str | None:
        """The topic for whose door a frame of this connection is waited for, begun before and since that moment."""
        for topic, found in self._begun.items():
            begun = found.get(session)
            if begun is not None and begun.at <= since and session.is_streaming(begun):
                return topic
        return None

    def _past_door(self, topic: str, now: float) -> bool:
        """Whether something may be under way that was begun before the topic was counted."""
        found = self._begun.get(topic)
        if found is None:
            return False
        for session, begun in list(found.items()):
            if session.is_over(begun):
                del found[session]
                if session.is_silent(begun):
                    self.door(topic).doubt(now)
        if not found:
            del self._begun[topic]
        return bool(found)

    def _has_ended(self, session: Session, now: float) -> None:
        """What it had begun may be queued in a broker."""
        for topic, found in self._begun.items():
            if found.pop(session, None) is not None:
                self.door(topic).doubt(now)

    def topic_news(self, now: float) -> list[Action]:
        """What waits at a door looks again."""
        waiting = [session for session in self._busy_sessions if session.at_door]
        self._work.extend((session, sessions.TopicNews()) for session in waiting)
        return self._run(now)

    @property
    def quiet(self) -> bool:
        """Certainly no append is under way that any session knows of."""
        return not self.in_doubt and not any(session.appends_unknown for session in self.sessions.values())

    def tick(self, now: float) -> list[Action]:
        """Due every few tens of milliseconds while `needs_ticks`."""
        self._work.extend((gate, gates.Tick()) for gate in self._busy_gates)
        self._work.extend((session, sessions.Tick()) for session in self._busy_sessions)
        return self._run(now)

    def renew_quota(self, now: float) -> list[Action]:
        """Renew that of the session that is `over_quota` for longest. Due while there is one; others come between."""
        session = next(iter(self._over_quota))
        del self._over_quota[session]
        return self.session_event(session.connection, sessions.QuotaRenewed(), now)

    # ---- what others may look at

    @property
    def over_quota(self) -> bool:
        return bool(self._over_quota)

    @property
    def in_doubt(self) -> bool:
        """Something that was sent may still land."""
        return any(not gate.idle for gate in self.gates.values())

    @property
    def needs_ticks(self) -> bool:
        return bool(self._busy_gates or self._busy_sessions)

    def gate(self, partition: TopicPartition) -> Gate | None:
        """For the short way, which must not overtake what gates and sessions have to tell each other: while there is
        any of that, None. See `Surroundings.gate`.
        """
        return None if self._work else self.gates.get(partition)

    def may_send(self, ticket: gates.Ticket, now: float) -> bool:
        gate = self.gates.get(ticket.partition)
        return gate is not None and gate.may_send(ticket, now)

    # ---- inside

    def _run(self, now: float) -> list[Action]:
        """One event may set off others, at other sessions too: until none is left."""
        while self._work:
            where, event = self._work.popleft()
            if isinstance(where, Session):
                for command in where.handle(event, now):  # type: ignore[arg-type]
                    self._route(where, command)
                if where.finished:
                    self.sessions.pop(where.connection, None)
                    if self._begun:
                        self._has_ended(where, now)
                elif where.over_quota:
                    self._over_quota[where] = None
                _note(self._busy_sessions, where, where.needs_ticks and not where.finished)
            else:
                for effect in where.handle(event, now):  # type: ignore[arg-type]
                    self._carry_out(where, effect, now)
                _note(self._busy_gates, where, not where.idle)
        actions, self._actions = self._actions, []
        return actions

    def _route(self, session: Session, command: sessions.Command) -> None:
        if isinstance(command, sessions.ToPartition):
            self._work.append((self._gate(command.partition), command.event))
        elif isinstance(command, sessions.ToGate):
            self._work.append((self._gate(command.ticket.partition), command.event))
        else:
            self._actions.append(ForConnection(session.connection, command))

    def _carry_out(self, gate: Gate, effect: gates.Effect, now: float) -> None:
        match effect:
            case gates.Grant(ticket):
                self._tell(ticket, sessions.TurnGranted(ticket), gate)
            case gates.Answer(ticket, result, reason):
                self._tell(ticket, sessions.TurnEnded(ticket, result, reason), gate)
            case gates.MayJoin(connection):
                session = self.sessions.get(connection)
                if session is not None:
                    self._work.append((session, sessions.MayJoin(gate.partition)))
            case gates.Violation():
                self._actions.append(Report(effect))
            case _:
                if isinstance(effect, gates.Resend) and gate.partition.topic in self.doors:
                    self.doors[gate.partition.topic].doubt(now)
                self._actions.append(ForControl(gate.partition, effect))

    def _tell(self, ticket: gates.Ticket, event: sessions.Event, gate: Gate) -> None:
        session = self.sessions.get(ticket.connection)
        if session is not None:
            self._work.append((session, event))
        elif isinstance(event, sessions.TurnGranted):
            self._work.append((gate, gates.Withdrawn(ticket)))

    def _gate(self, partition: TopicPartition) -> Gate:
        gate = self.gates.get(partition)
        if gate is None:
            if len(self.gates) >= _IDLE_GATES_MAX:
                self._drop_idle_gates()
            gate = self.gates[partition] = self._new_gate(partition)
        return gate

    def _new_gate(self, partition: TopicPartition) -> Gate:
        return Gate(partition, self._limits, self._names)

    def _drop_idle_doors(self) -> None:
        """Those that a new one would equal. By a pattern, any name that a stranger makes up is a counted topic."""
        droppable = [topic for topic, door in self.doors.items() if door.idle]
        for topic in droppable[: _IDLE_DOORS_MAX // 2]:
            del self.doors[topic]

    def _drop_idle_gates(self) -> None:
        droppable = [name for name, gate in self.gates.items() if gate.idle and not gate.in_transaction]
        for partition in droppable[: _IDLE_GATES_MAX // 2]:
            del self.gates[partition]


def _note(members: dict[_T, None], member: _T, belongs: bool) -> None:
    if belongs:
        members[member] = None
    else:
        members.pop(member, None)
