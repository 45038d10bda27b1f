"""Assignment filter: changes requests and answers of consumer groups whose new partitions are gated.

| API | change |
|---|---|
| SyncGroup | gated partitions are removed from the assignment in the answer |
| Heartbeat | REBALANCE_IN_PROGRESS for a member that lacks a partition that is no longer gated |
| ConsumerGroupHeartbeat | both: gated partitions are removed from the assignment, and added later |
| OffsetFetch | "no commit" on a new partition becomes its beginning, for groups that existed before |
| ShareGroupHeartbeat | none; reported: a share group keeps no order, so that nothing is gated for it |
| StreamsGroupHeartbeat | none; reported: tasks are assigned, which are not gated |
| ListOffsets | none; recorded, since a group without commits that begins at a prior partition's end has read it |

Answers that depend on a group's progress wait for it (`queries.py`). Heartbeats of members that lack nothing do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol
from uuid import UUID

from fencepost_policies.values import value
from fencepost_proxy.expansion.assignment import MalformedAssignment, decode_assignment
from fencepost_proxy.expansion.queries import (
    Beginnings,
    GatedPartitions,
    HasTasks,
    IsAssigned,
    LookedUp,
    MayHave,
    Notice,
    Query,
    Reply,
    SharesTopics,
    WhatIsAssigned,
    WhereToBegin,
)
from fencepost_proxy.expansion.watch import Assigned, Watch, without
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import (
    CONSUMER_GROUP_HEARTBEAT,
    HEARTBEAT,
    LIST_OFFSETS,
    OFFSET_FETCH,
    SHARE_GROUP_HEARTBEAT,
    STREAMS_GROUP_HEARTBEAT,
    SYNC_GROUP,
)
from fencepost_proxy.wire.schema import Message

#: Decoded while a topic may be expanded in order; `FOLLOWING`: once one has been.
ASSIGNING: Final = frozenset({SYNC_GROUP, CONSUMER_GROUP_HEARTBEAT, SHARE_GROUP_HEARTBEAT, STREAMS_GROUP_HEARTBEAT})
FOLLOWING: Final = ASSIGNING | {HEARTBEAT, OFFSET_FETCH, LIST_OFFSETS}

#: More than a member of a group has. Only admin clients query more, and all of this takes the event loop's time.
_PARTITIONS_MAX: Final = 20_000

_CONSUMERS: Final = (None, "", "consumer")
_LATEST: Final = -1
_NO_COMMIT: Final = -1
_COORDINATOR_LOAD_IN_PROGRESS: Final = 14
_REBALANCE_IN_PROGRESS: Final = 27
_GROUP_ERROR_FROM: Final = 2
_BY_GROUP_FROM: Final = 8
_BY_ID_FROM: Final = 10


class ExpansionView(Protocol):
    """Expansion view: what is known of topics with ordered expansions."""

    def new(self, partition: TopicPartition) -> bool:
        """Whether an ordered expansion added the partition, or may have."""

    def expands(self, topic: str) -> bool:
        """Whether the topic has, or may have, such partitions."""

    def topic(self, topic_id: UUID) -> str | None:
        """Name of such a topic."""

    def topic_ids(self) -> Mapping[str, UUID]:
        """Ids of such topics."""


@value
class Outcome:
    """Result for an answer that was decoded, and possibly changed.

    `complete`: applies the reply to `query_message`; the answer waits for it.
    """

    changed: bool = False
    query_message: Query | None = None
    complete: Callable[[Reply], None] = lambda reply: None
    notice: Notice | None = None


@value
class GroupPlan:
    """`forward`: the changed request; None: unchanged. `finish` gets the decoded answer."""

    forward: Message | None
    finish: Callable[[Message], Outcome]


_UNCHANGED: Final = Outcome()


class AssignmentFilter:
    """One per process. `now` is monotonic seconds."""

    def __init__(self, watch: Watch, expansion_view: ExpansionView, now: Callable[[], float]) -> None:
        self._watch = watch
        self._expansion_view = expansion_view
        self._now = now

    def begin(self, api_key: int, version: int, client_id: str | None, request: Message) -> GroupPlan:
        """`api_key`: one of `FOLLOWING`."""
        if api_key == SYNC_GROUP:
            return GroupPlan(None, lambda answer: self._synced(request, client_id, answer))
        if api_key == HEARTBEAT:
            return GroupPlan(None, lambda answer: self._heartbeat(request, answer))
        if api_key == OFFSET_FETCH:
            return GroupPlan(None, lambda answer: self._offsets(version, request, answer))
        if api_key == LIST_OFFSETS:
            return GroupPlan(None, lambda answer: self._looked_up(request, client_id, answer))
        if api_key == SHARE_GROUP_HEARTBEAT:
            return GroupPlan(None, lambda answer: self._shared(request))
        if api_key == STREAMS_GROUP_HEARTBEAT:
            return GroupPlan(None, lambda answer: self._streams(request))
        return self._consumer_heartbeat(request, client_id)

    def _shared(self, request: Message) -> Outcome:
        topics = tuple(each for each in request.subscribed_topic_names or () if self._expansion_view.expands(each))
        return Outcome(notice=SharesTopics(request.group_id, topics)) if topics else _UNCHANGED

    def _streams(self, request: Message) -> Outcome:
        """Only a member that joins states the topology. Kafka alone can read its patterns: any may match."""
        subtopologies = () if request.topology is None else request.topology.subtopologies
        expands = any(
            (each.source_topic_regex and self._expansion_view.topic_ids())
            or any(map(self._expansion_view.expands, each.source_topics))
            for each in subtopologies
        )
        return Outcome(notice=HasTasks(request.group_id)) if expands else _UNCHANGED

    # ---- the classic protocol

    def _synced(self, request: Message, client_id: str | None, answer: Message) -> Outcome:
        if answer.error_code or answer.protocol_type not in _CONSUMERS:
            return _UNCHANGED
        group, member, generation = request.group_id, request.member_id, request.generation_id
        new: tuple[TopicPartition, ...] = ()
        try:
            assignment = decode_assignment(answer.assignment)
            named = (TopicPartition(topic, each) for topic, partitions in assignment.topics for each in partitions)
            new = tuple(partition for partition in named if self._expansion_view.new(partition))
        except MalformedAssignment:
            # Not an ordinary consumer's (`protocol_type` shows that from v5 on only), or empty: a leader may leave out
            # members without partitions. Such a member lacks nothing; otherwise it would have to rejoin indefinitely.
            pass
        if not new or assignment.has_task_data:
            self._watch.synced(group, member, generation, frozenset())
            return Outcome(notice=HasTasks(group)) if new else _UNCHANGED

        def complete(reply: Reply) -> None:
            assert isinstance(reply, GatedPartitions)
            gated = reply.partitions
            self._watch.synced(group, member, generation, gated)
            if gated:
                kept = assignment.keeping(lambda topic, number: TopicPartition(topic, number) not in gated)
                answer.assignment = kept.encode()

        return Outcome(changed=True, query_message=MayHave(group, client_id, new), complete=complete)

    def _heartbeat(self, request: Message, answer: Message) -> Outcome:
        if answer.error_code:
            return _UNCHANGED
        if not self._watch.must_rejoin(request.group_id, request.member_id, request.generation_id, self._now()):
            return _UNCHANGED
        answer.error_code = _REBALANCE_IN_PROGRESS
        return Outcome(changed=True)

    # ---- KIP-848

    def _consumer_heartbeat(self, request: Message, client_id: str | None) -> GroupPlan:
        group, member = request.group_id, request.member_id
        owned = None if request.topic_partitions is None else _assigned(request.topic_partitions)
        forward = None
        if request.member_epoch < 0:
            self._watch.consumer_left(group, member)
        elif member:
            instead = self._watch.consumer_heartbeat(group, member, owned, self._now())
            if instead is not None:
                request.topic_partitions, forward = _topics(instead), request
        return GroupPlan(forward, lambda answer: self._consumer_assigned(group, member, client_id, answer))

    def _consumer_assigned(self, group: str, member: str, client_id: str | None, answer: Message) -> Outcome:
        member = member or answer.member_id or ""  # v0: the coordinator may assign the id
        if answer.error_code or answer.member_epoch < 0:
            self._watch.consumer_left(group, member)
            return _UNCHANGED
        if answer.assignment is None:
            return self._consumer_continues(group, member, answer)
        assigned = _assigned(answer.assignment.topic_partitions)
        new = tuple(partition for partition in self._named(assigned) if self._expansion_view.new(partition))
        if not new:
            self._watch.consumer_assigned(group, member, assigned, assigned, frozenset())
            return _UNCHANGED

        def complete(reply: Reply) -> None:
            assert isinstance(reply, GatedPartitions)
            allowed = self._without(assigned, reply.partitions)
            self._watch.consumer_assigned(group, member, assigned, allowed, reply.partitions)
            if reply.partitions:
                answer.assignment.topic_partitions = _topics(allowed)

        return Outcome(changed=True, query_message=MayHave(group, client_id, new), complete=complete)

    def _consumer_continues(self, group: str, member: str, answer: Message) -> Outcome:
        if self._watch.consumer_is_unknown(group, member):

            def complete(reply: Reply) -> None:
                assert isinstance(reply, IsAssigned)
                if reply.assigned is not None:
                    lacking = self._watch.groups[group].recorded if group in self._watch.groups else frozenset()
                    lacking &= frozenset(self._named(reply.assigned))
                    allowed = self._without(reply.assigned, lacking)
                    self._watch.consumer_assigned(group, member, reply.assigned, allowed, lacking)
                    self._give(group, member, answer)

            return Outcome(changed=True, query_message=WhatIsAssigned(group, member), complete=complete)
        return Outcome(changed=True) if self._give(group, member, answer) else _UNCHANGED

    def _without(self, assigned: Assigned, lacking: Iterable[TopicPartition]) -> Assigned:
        ids = self._expansion_view.topic_ids()
        return without(assigned, {(ids.get(each.topic), each.partition) for each in lacking})

    def _give(self, group: str, member: str, answer: Message) -> bool:
        assigned = self._watch.consumer_gets(group, member, self._expansion_view.topic_ids())
        if assigned is None:
            return False
        answer.assignment = Message(topic_partitions=_topics(assigned))
        return True

    def _named(self, assigned: Assigned) -> list[TopicPartition]:
        named = []
        for topic_id, partitions in assigned:
            topic = self._expansion_view.topic(topic_id)
            if topic is not None:
                named += [TopicPartition(topic, partition) for partition in partitions]
        return named

    # ---- offsets

    def _offsets(self, version: int, request: Message, answer: Message) -> Outcome:
        """Only admin clients request several groups at once, to see their commits: unchanged."""
        if version < _BY_GROUP_FROM:
            group, holder = request.group_id, answer
        elif len(answer.groups) == 1:
            group, holder = answer.groups[0].group_id, answer.groups[0]
        else:
            return _UNCHANGED
        if getattr(holder, "error_code", 0):
            return _UNCHANGED
        if _too_many(holder.topics):
            return _UNCHANGED
        missing: dict[TopicPartition, Message] = {}
        for topic in holder.topics:
            name = topic.name if version < _BY_ID_FROM else self._expansion_view.topic(topic.topic_id)
            if name is None or not self._expansion_view.expands(name):
                continue
            for entry in topic.partitions:
                partition = TopicPartition(name, entry.partition_index)
                if (
                    entry.committed_offset == _NO_COMMIT
                    and not entry.error_code
                    and self._expansion_view.new(partition)
                ):
                    missing[partition] = entry
        if not missing:
            return _UNCHANGED

        def complete(reply: Reply) -> None:
            assert isinstance(reply, Beginnings)
            if reply.offsets is None:
                # Retriable: a group that begins by its own policy might skip records written since the expansion.
                for each in [holder] if version >= _GROUP_ERROR_FROM else missing.values():
                    each.error_code = _COORDINATOR_LOAD_IN_PROGRESS
                return
            for partition, entry in missing.items():
                entry.committed_offset = reply.offsets.get(partition, _NO_COMMIT)

        return Outcome(changed=True, query_message=WhereToBegin(group, tuple(missing)), complete=complete)

    def _looked_up(self, request: Message, client_id: str | None, answer: Message) -> Outcome:
        """Record only what Kafka answered: a client without access to the topic must not affect its groups."""
        if _too_many(request.topics) or _too_many(answer.topics):
            return _UNCHANGED
        reported = {
            (topic.name, entry.partition_index)
            for topic in answer.topics
            for entry in topic.partitions
            if not entry.error_code
        }
        latest: list[TopicPartition] = []
        others: list[TopicPartition] = []
        for topic in request.topics:
            if self._expansion_view.expands(topic.name):
                for entry in topic.partitions:
                    if (topic.name, entry.partition_index) not in reported:
                        continue
                    partitions = latest if entry.timestamp == _LATEST else others
                    partitions.append(TopicPartition(topic.name, entry.partition_index))
        if not (latest or others):
            return _UNCHANGED
        return Outcome(notice=LookedUp(client_id, tuple(latest), tuple(others)))


def _too_many(topics: Sequence[Message]) -> bool:
    return len(topics) > _PARTITIONS_MAX or sum(len(topic.partitions) for topic in topics) > _PARTITIONS_MAX


def _assigned(topics: Sequence[Message]) -> Assigned:
    return tuple((topic.topic_id, tuple(topic.partitions)) for topic in topics)


def _topics(assigned: Iterable[tuple[UUID, tuple[int, ...]]]) -> list[Message]:
    return [Message(topic_id=topic_id, partitions=list(partitions)) for topic_id, partitions in assigned]
