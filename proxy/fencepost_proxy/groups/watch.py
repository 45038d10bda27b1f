"""Members of groups that hold less than they were assigned: who they are, and when they are to get the rest.

The coordinator does not know that a partition was withheld. So a member has to be brought to ask again, or be told:

- Classic protocol: a Heartbeat is answered REBALANCE_IN_PROGRESS, so the member joins again, and its next SyncGroup
  answer has what is no longer withheld. Each member that lacks something needs that: a follower that joins a stable
  group again just gets the same generation, without the others noticing.
- KIP-848: the coordinator tells an assignment once, when it changes. It is remembered here, and put into the answer of
  a later heartbeat.

KIP-848 has a trap. Member M is assigned p, which is withheld. The coordinator takes p away again; M is told an
assignment that does not differ from what it holds, has nothing to do and acknowledges nothing. The coordinator waits
for M to give up p, and fences M in the end. So what M last said that it owns is put into its next request: that is
noted of all members, before anything is withheld from them. Of one that has not said it here, what it was told is taken
for it after a while: had it something to do, it would have said so by then.

A member that never showed up here (this process was restarted, or its coordinator moved to a broker whose connections
go through another process) may hold less as well, where the state topic says so of its group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar
from uuid import UUID

from fencepost_proxy.types import TopicPartition

_Value = TypeVar("_Value")

#: Members of watched groups that are remembered; whoever is forgotten joins again once when something is released.
_MEMBERS_MAX: Final = 100_000
#: After how many heartbeats a KIP-848 member is told once more of partitions that it has not taken.
_TELL_AGAIN: Final = 3
#: After how many heartbeats in which it says nothing a member is taken to hold what it was told, no more and no less.
_SILENT_MAX: Final = 3

#: What a coordinator assigned: topic id and partitions.
Assigned = tuple[tuple[UUID, tuple[int, ...]], ...]


@dataclass(slots=True)
class _Member:
    """`lacking` – what it was assigned and did not get."""

    generation: int
    lacking: frozenset[TopicPartition]


@dataclass(slots=True)
class ConsumerMember:
    """A member of the KIP-848 protocol.

    `assigned` – what the coordinator told last, `held` – the part of it that the member was told. `acknowledge` – the
    coordinator may wait for a word that the member sees no need for; since `silent_for` heartbeats. `told_ago` –
    heartbeats since it was told of what had been withheld.
    """

    assigned: Assigned
    held: Assigned
    lacking: frozenset[TopicPartition]
    acknowledge: bool
    silent_for: int = 0
    told_ago: int = 0


@dataclass(slots=True)
class Group:
    """`withheld` – from the group, now; None until that was looked up. `recorded` – what the state topic says that
    members may lack. `active_at` – when a member was heard of here."""

    withheld: frozenset[TopicPartition] | None = None
    recorded: frozenset[TopicPartition] = frozenset()
    active_at: float = 0.0
    wanted: set[TopicPartition] = field(default_factory=set)

    def released(self, lacking: frozenset[TopicPartition]) -> frozenset[TopicPartition]:
        return frozenset() if self.withheld is None else lacking - self.withheld


class Watch:
    """Of one process. Groups are watched from when something is first withheld from them."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self._members: OrderedDict[tuple[str, str], _Member] = OrderedDict()
        self._consumers: OrderedDict[tuple[str, str], ConsumerMember] = OrderedDict()
        self._owned: OrderedDict[tuple[str, str], Assigned] = OrderedDict()

    # ---- what is known of groups

    def withhold(self, group: str, withheld: Iterable[TopicPartition], asked: Iterable[TopicPartition]) -> None:
        """What a member was about to get (`asked`), and what of it is withheld from its group now."""
        withheld, asked = frozenset(withheld), frozenset(asked)
        watched = self.groups.get(group)
        if watched is None:
            if not withheld:
                return
            watched = self.groups[group] = Group()
        watched.wanted |= withheld
        before = watched.recorded if watched.withheld is None else watched.withheld
        watched.withheld = (before - asked) | withheld

    def update(
        self, group: str, withheld: frozenset[TopicPartition], asked: frozenset[TopicPartition] | None = None
    ) -> None:
        """What of `asked` is withheld from it; None: of all that there is.

        While that was looked up, a member may have been about to get another partition, which was withheld: that one is
        not released by an answer to a question that did not name it. A KIP-848 member would be told of it by its next
        heartbeat, unread priors or not.
        """
        watched = self.groups.get(group)
        if watched is None:
            return
        unasked = frozenset() if asked is None or watched.withheld is None else watched.withheld - asked
        watched.withheld = withheld | (unasked & (watched.wanted | watched.recorded))

    def record(self, group: str, lacking: frozenset[TopicPartition]) -> None:
        """What the state topic says that members of the group may lack.

        What is new in it another process withholds, now: it is withheld here as well, until that was looked up.
        Otherwise: the group was looked at once, for p2, and no member of it was heard here since; p3 is added to the
        record; the other process dies, a KIP-848 member comes here, and is told of p3 at once.
        """
        watched = self.groups.get(group)
        if watched is None:
            if not lacking:
                return
            watched = self.groups[group] = Group()
        if watched.withheld is not None:
            watched.withheld |= lacking - watched.recorded
        watched.recorded = lacking

    def forget(self, group: str) -> None:
        self.groups.pop(group, None)
        for members in (self._members, self._consumers):
            for key in [key for key in members if key[0] == group]:
                del members[key]

    # ---- the classic protocol

    def synced(self, group: str, member: str, generation: int, lacking: frozenset[TopicPartition]) -> None:
        """A member is about to get its assignment, but for these."""
        if group in self.groups:
            _put(self._members, (group, member), _Member(generation, lacking))

    def must_rejoin(self, group: str, member: str, generation: int, now: float) -> bool:
        """Whether a heartbeat that the coordinator answered well is to be answered REBALANCE_IN_PROGRESS."""
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

    def consumer_asks(self, group: str, member: str, owned: Assigned | None, now: float) -> Assigned | None:
        """A heartbeat goes up. Gives back what it has to say in place of nothing."""
        watched = self.groups.get(group)
        if watched is not None:
            watched.active_at = now
        known = self._consumers.get((group, member))
        if owned is not None:
            _put(self._owned, (group, member), owned)
            if known is not None:
                known.acknowledge = False
        elif known is not None and known.acknowledge:
            known.silent_for += 1
            said = self._owned.get((group, member))
            if said is not None or known.silent_for >= _SILENT_MAX:
                known.acknowledge = False
                return known.held if said is None else said
        return None

    def consumer_told(
        self, group: str, member: str, assigned: Assigned, held: Assigned, lacking: frozenset[TopicPartition]
    ) -> None:
        """The coordinator has assigned something, and the member is about to be told `held` of it."""
        if group not in self.groups:
            return
        known = self._consumers.get((group, member))
        acknowledge = bool(lacking or (known is not None and known.lacking))
        _put(self._consumers, (group, member), ConsumerMember(assigned, held, lacking, acknowledge))

    def consumer_gets(self, group: str, member: str, topic_ids: Mapping[str, UUID]) -> Assigned | None:
        """What to put into an answer that assigns nothing; None: nothing."""
        watched, known = self.groups.get(group), self._consumers.get((group, member))
        if watched is None or known is None or not known.lacking:
            return None
        released = watched.released(known.lacking)
        if not released:
            return None
        owned = self._owned.get((group, member), ())
        if all(_has(owned, topic_ids.get(each.topic), each) for each in released):
            known.lacking -= released
            known.told_ago = 0
            return None
        known.told_ago += 1
        if known.told_ago > 1 and known.told_ago % _TELL_AGAIN:
            return None
        left_out = {(topic_ids.get(each.topic), each.partition) for each in known.lacking - released}
        known.held = without(known.assigned, left_out)
        return known.held

    def consumer_is_strange(self, group: str, member: str) -> bool:
        """Whether it may lack something of which nothing is known here, and which is released."""
        watched = self.groups.get(group)
        if watched is None:
            return False
        return (group, member) not in self._consumers and bool(watched.released(watched.recorded))

    def consumer_left(self, group: str, member: str) -> None:
        self._consumers.pop((group, member), None)
        self._owned.pop((group, member), None)

    def lacking_members(self) -> int:
        """For the metrics."""
        classic = sum(bool(each.lacking) for each in self._members.values())
        return classic + sum(bool(each.lacking) for each in self._consumers.values())


def without(assigned: Assigned, left_out: Collection[tuple[UUID | None, int]]) -> Assigned:
    """But for these; a topic of which nothing is left goes, too."""
    kept = ((topic, tuple(p for p in partitions if (topic, p) not in left_out)) for topic, partitions in assigned)
    return tuple((topic, partitions) for topic, partitions in kept if partitions)


def _has(owned: Assigned, topic_id: UUID | None, partition: TopicPartition) -> bool:
    return any(topic == topic_id and partition.partition in partitions for topic, partitions in owned)


def _put(members: OrderedDict[tuple[str, str], _Value], key: tuple[str, str], value: _Value) -> None:
    members[key] = value
    members.move_to_end(key)
    if len(members) > _MEMBERS_MAX:
        members.popitem(last=False)
