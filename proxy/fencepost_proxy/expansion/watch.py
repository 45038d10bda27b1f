"""Group members that lack partitions of their assignment, and when they get the rest.

The coordinator does not know that a partition is gated. So the proxy makes the member rejoin, or adds it later:

- Classic protocol: a Heartbeat is answered REBALANCE_IN_PROGRESS, so the member rejoins, and its next SyncGroup answer
  has the partitions that are no longer gated. Each member that lacks one must do that. A member other than the group's
  leader that rejoins a stable group gets the same generation, and the other members do not notice.
- KIP-848: the coordinator sends an assignment once, when it changes. It is remembered here, and added to the answer of
  a later heartbeat.

KIP-848 has a pitfall:

1. Member M is assigned p, which is gated.
2. The coordinator revokes p. M gets an assignment equal to its own, so it acknowledges nothing.
3. The coordinator waits for M to give up p, and finally fences M.

So the partitions that M last reported as owned are put into its next request. They are recorded for all members, before
any partition is gated. If M has not reported any here, what it was sent is used after a while: with anything to change,
it would have reported by then.

A member that is unknown here may lack partitions, too, if the state topic says so of its group. That happens after a
restart of this process, or if its coordinator moved to a broker whose connections go through another process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fencepost_proxy.types import Bounded, TopicPartition

#: Remembered members of watched groups; a forgotten one rejoins once when a partition is released.
_MEMBERS_MAX: Final = 100_000
#: A KIP-848 member that has not taken partitions is sent them again after this many heartbeats.
_REPEAT_AFTER: Final = 3
#: After this many heartbeats without a report, a member is assumed to own exactly what it was sent.
_SILENT_MAX: Final = 3

#: A coordinator's assignment: topic ids and partitions.
Assigned = tuple[tuple[UUID, tuple[int, ...]], ...]


@dataclass(slots=True)
class _Member:
    """`lacking`: partitions that it was assigned and did not get."""

    generation: int
    lacking: frozenset[TopicPartition]


@dataclass(slots=True)
class ConsumerMember:
    """A member of the KIP-848 protocol.

    `assigned`: the coordinator's last assignment; `allowed`: the part of it sent to the member. `acknowledge`: the
    coordinator may wait for a report that the member sees no need for, since `silent_for` heartbeats. `sent_ago`:
    heartbeats since it was sent released partitions.
    """

    assigned: Assigned
    allowed: Assigned
    lacking: frozenset[TopicPartition]
    acknowledge: bool
    silent_for: int = 0
    sent_ago: int = 0


@dataclass(slots=True)
class Group:
    """`gated`: partitions gated now; None until looked up. `recorded`: partitions that members may lack according to
    the state topic. `active_at`: last request of a member here."""

    gated: frozenset[TopicPartition] | None = None
    recorded: frozenset[TopicPartition] = frozenset()
    active_at: float = 0.0
    requested: set[TopicPartition] = field(default_factory=set)

    def released(self, lacking: frozenset[TopicPartition]) -> frozenset[TopicPartition]:
        return frozenset() if self.gated is None else lacking - self.gated


class Watch:
    """One per process. A group is watched once a partition was gated for it."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self._members: Bounded[tuple[str, str], _Member] = Bounded(_MEMBERS_MAX)
        self._consumers: Bounded[tuple[str, str], ConsumerMember] = Bounded(_MEMBERS_MAX)
        self._owned: Bounded[tuple[str, str], Assigned] = Bounded(_MEMBERS_MAX)

    # ---- groups

    def track_gated(self, group: str, gated: Iterable[TopicPartition], queried: Iterable[TopicPartition]) -> None:
        """`queried`: partitions that a member was about to get; `gated`: those of them that are gated now."""
        gated, queried = frozenset(gated), frozenset(queried)
        watched = self.groups.get(group)
        if watched is None:
            if not gated:
                return
            watched = self.groups[group] = Group()
        watched.requested |= gated
        before = watched.recorded if watched.gated is None else watched.gated
        watched.gated = (before - queried) | gated

    def update(
        self, group: str, gated: frozenset[TopicPartition], queried: frozenset[TopicPartition] | None = None
    ) -> None:
        """The gated ones of `queried`; None: of all partitions.

        During the lookup, another partition may have been gated, which `queried` did not include. It stays gated.
        Otherwise a KIP-848 member would get it with its next heartbeat, before it has read the prior partitions.
        """
        watched = self.groups.get(group)
        if watched is None:
            return
        unasked = frozenset() if queried is None or watched.gated is None else watched.gated - queried
        watched.gated = gated | (unasked & (watched.requested | watched.recorded))

    def record(self, group: str, lacking: frozenset[TopicPartition]) -> None:
        """Partitions that members of the group may lack, according to the state topic.

        New ones are gated by another process, so they are gated here, too, until looked up. Otherwise:
        1. The group was looked up once here, for p2, and no member has connected since.
        2. Another process adds p3 to the record, and dies.
        3. A KIP-848 member connects here, and gets p3 at once.
        """
        watched = self.groups.get(group)
        if watched is None:
            if not lacking:
                return
            watched = self.groups[group] = Group()
        if watched.gated is not None:
            watched.gated |= lacking - watched.recorded
        watched.recorded = lacking

    def forget(self, group: str) -> None:
        self.groups.pop(group, None)
        for members in (self._members, self._consumers):
            for key in [key for key in members if key[0] == group]:
                del members[key]

    # ---- the classic protocol

    def synced(self, group: str, member: str, generation: int, lacking: frozenset[TopicPartition]) -> None:
        """A member is about to get its assignment without `lacking`."""
        if group in self.groups:
            self._members[group, member] = _Member(generation, lacking)

    def must_rejoin(self, group: str, member: str, generation: int, now: float) -> bool:
        """Whether to answer REBALANCE_IN_PROGRESS to a heartbeat that the coordinator accepted."""
        watched = self.groups.get(group)
        if watched is None:
            return False
        watched.active_at = now
        known = self._members.get((group, member))
        lacking = watched.recorded if known is None or known.generation != generation else known.lacking
        return bool(watched.released(lacking))

    # ---- KIP-848

    def consumer(self, group: str, member: str) -> ConsumerMember | None:
        return self._consumers.get((group, member))

    def consumer_heartbeat(self, group: str, member: str, owned: Assigned | None, now: float) -> Assigned | None:
        """A heartbeat is sent upstream. Returns the owned partitions to add if it has none."""
        watched = self.groups.get(group)
        if watched is not None:
            watched.active_at = now
        known = self._consumers.get((group, member))
        if owned is not None:
            self._owned[group, member] = owned
            if known is not None:
                known.acknowledge = False
        elif known is not None and known.acknowledge:
            known.silent_for += 1
            stated = self._owned.get((group, member))
            if stated is not None or known.silent_for >= _SILENT_MAX:
                known.acknowledge = False
                return known.allowed if stated is None else stated
        return None

    def consumer_assigned(
        self, group: str, member: str, assigned: Assigned, allowed: Assigned, lacking: frozenset[TopicPartition]
    ) -> None:
        """The coordinator has sent an assignment, and the member is about to get `allowed` of it."""
        if group not in self.groups:
            return
        known = self._consumers.get((group, member))
        acknowledge = bool(lacking or (known is not None and known.lacking))
        self._consumers[group, member] = ConsumerMember(assigned, allowed, lacking, acknowledge)

    def consumer_gets(self, group: str, member: str, topic_ids: Mapping[str, UUID]) -> Assigned | None:
        """Assignment to add to an answer without one; None: nothing."""
        watched, known = self.groups.get(group), self._consumers.get((group, member))
        if watched is None or known is None or not known.lacking:
            return None
        released = watched.released(known.lacking)
        if not released:
            return None
        owned = self._owned.get((group, member), ())
        if all(_has(owned, topic_ids.get(each.topic), each) for each in released):
            known.lacking -= released
            known.sent_ago = 0
            return None
        known.sent_ago += 1
        if known.sent_ago > 1 and known.sent_ago % _REPEAT_AFTER:
            return None
        left_out = {(topic_ids.get(each.topic), each.partition) for each in known.lacking - released}
        known.allowed = without(known.assigned, left_out)
        return known.allowed

    def consumer_is_unknown(self, group: str, member: str) -> bool:
        """Whether the member is unknown here and may lack a released partition."""
        watched = self.groups.get(group)
        if watched is None:
            return False
        return (group, member) not in self._consumers and bool(watched.released(watched.recorded))

    def consumer_left(self, group: str, member: str) -> None:
        self._consumers.pop((group, member), None)
        self._owned.pop((group, member), None)


def without(assigned: Assigned, left_out: Collection[tuple[UUID | None, int]]) -> Assigned:
    """The assignment without these; topics without partitions are removed."""
    kept = ((topic, tuple(p for p in partitions if (topic, p) not in left_out)) for topic, partitions in assigned)
    return tuple((topic, partitions) for topic, partitions in kept if partitions)


def _has(owned: Assigned, topic_id: UUID | None, partition: TopicPartition) -> bool:
    return any(topic == topic_id and partition.partition in partitions for topic, partitions in owned)
