"""Group progress tracker: what consumer groups of topics with ordered expansion committed and still have to read.

It answers the queries of `expansion/assignment_filter.py`, and checks once a second whether gated partitions may be
assigned. The Kafka client needs DESCRIBE on these groups and topics, and READ on the topics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final
from uuid import UUID

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.fetches import Fetches
from fencepost_proxy.cluster.groups import ConsumerGroups
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error, FencepostError
from fencepost_proxy.expansion.assignment_filter import ASSIGNING, FOLLOWING, AssignmentFilter
from fencepost_proxy.expansion.gated import encode_gated, encode_gated_tombstone, encode_released
from fencepost_proxy.expansion.gating import Decision, Why
from fencepost_proxy.expansion.offset_lookups import OffsetLookups
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
from fencepost_proxy.expansion.watch import Group, Watch
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.status import GatedStatus
from fencepost_proxy.services.expanded_topics import ExpandedTopics
from fencepost_proxy.services.gating_decisions import GatingDecisions
from fencepost_proxy.services.group_stories import GroupStories
from fencepost_proxy.services.topic_warnings import some
from fencepost_proxy.services.unread_records import SEARCH_AGAIN_SECONDS, UnreadRecords
from fencepost_proxy.session.frames.services import RELAYED_VERSIONS, RelayedVersions, relayed_versions_without
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.topics.virtual_configs import ORDERED_PARTITION_EXPANSION, TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.state_records import StateRecord

_log = logs.get("services.groups")
_limited_log = logs.RateLimitedLog(_log)

#: A coordinator's response is delayed this long at most: members time out only after many seconds. Queries to Kafka get
#: a part of it, which leaves time to store the decision.
_REPLY_SECONDS: Final = 2.0
_DECIDE_SECONDS: Final = 1.5
#: Pause between two groups: at most fifty per second.
_BETWEEN_PROBES_SECONDS: Final = 0.02
_QUERY_SECONDS: Final = 5.0
#: Gated partitions of a group are forgotten after this long without a member; an active process stores them again.
_RECORDED_SECONDS: Final = 86_400.0
_TIDY_SECONDS: Final = 600.0
_NOT_ALLOWED: Final = frozenset({Error.TOPIC_AUTHORIZATION_FAILED, Error.GROUP_AUTHORIZATION_FAILED})
#: A group without requests in this process for this long is not checked.
_ACTIVE_SECONDS: Final = 120.0
#: After the last gated partition, how long members may have fewer partitions than the coordinator assigned.
_REMEMBERED_SECONDS: Final = 1800.0
_CLIENTS_MAX: Final = 10_000

ALL_RELAYED_VERSIONS: Final = RELAYED_VERSIONS
_RELAYED_BUT_ASSIGNING: Final = relayed_versions_without(ASSIGNING)
_RELAYED_BUT_FOLLOWING: Final = relayed_versions_without(FOLLOWING)


class GroupProgressTracker:
    """`policy`: of a topic, None without checks. `topic_id`: None if unknown.

    `state`: the state topic, once this process joins the others; `view`: its content, empty before.
    """

    def __init__(
        self,
        limits: Limits,
        state: Callable[[], StateTopic],
        view: Callable[[], StateView],
        *,
        groups: ConsumerGroups,
        log_ends: LogEnds,
        fetches: Fetches,
        configured: Iterable[Mapping[str, str]],
        policy: Callable[[str], TopicPolicy | None],
        topic_id: Callable[[str], UUID | None],
        metrics: Metrics,
        remembered_seconds: float = _REMEMBERED_SECONDS,
    ) -> None:
        self._groups = groups
        self._log_ends = log_ends
        self._unread = UnreadRecords(log_ends, fetches)
        self._limits = limits
        self.topics = ExpandedTopics(policy, topic_id, view)
        self._remembered_seconds = remembered_seconds
        self._state = state
        self._by_file = any(each.get(ORDERED_PARTITION_EXPANSION.name, "false") != "false" for each in configured)
        self._stories = GroupStories(metrics)
        self._lookups = OffsetLookups()
        self._decisions = GatingDecisions(
            self.topics, self._stories, limits, metrics, groups=groups, unread=self._unread, lookups=self._lookups
        )
        self._with_tasks: set[str] = set()
        #: Topics that a share group reads.
        self._shared: set[str] = set()
        self.relayed_versions: RelayedVersions = ALL_RELAYED_VERSIONS
        self.watch = Watch()
        self.assignment_filter = AssignmentFilter(self.watch, self.topics, time.monotonic)

    async def _store(self, records: Sequence[StateRecord], timeout_seconds: float | None = None) -> None:
        if records:
            await self._state().append(records, timeout_seconds=timeout_seconds)

    # ---- expansion view

    def refresh(self) -> None:
        """Update from the state topic after a change."""
        expanded = self.topics.refresh()
        if expanded or self.watch.groups:
            self.relayed_versions = _RELAYED_BUT_FOLLOWING
        else:
            self.relayed_versions = (
                _RELAYED_BUT_ASSIGNING if self.topics.topic_ids() or self._by_file else ALL_RELAYED_VERSIONS
            )
        groups = self.topics.view.groups.groups
        for group in groups.keys() | self.watch.groups.keys():
            recorded = groups.get(group)
            self.watch.record(group, frozenset() if recorded is None else recorded.partitions)

    # ---- queries

    async def answer(self, query_message: Query, host: str) -> Reply:
        """Answer within the time that members wait; never raises. Unknown partitions are gated and checked again."""
        try:
            async with asyncio.timeout(_REPLY_SECONDS):
                match query_message:
                    case MayHave():
                        return await self._may_have(query_message, host)
                    case WhereToBegin():
                        return Beginnings(await self._beginnings(query_message))
                    case WhatIsAssigned(group, member):
                        members = await self._groups.assignments(group, timeout_seconds=_REPLY_SECONDS)
                        found = members.get(member)
                        return IsAssigned(None if found is None else tuple((t, tuple(ps)) for t, ps in found))
        except (FencepostError, TimeoutError) as error:
            reason = _reason_of(error)
            _limited_log.warning(query_message.group, "group lookup failed", group=query_message.group, reason=reason)
        except Exception as error:
            _log.crash("group lookup crashed", error, group=query_message.group)
        match query_message:
            case MayHave(group, _, partitions):
                unknown = dict.fromkeys(partitions, Decision(Why.UNKNOWN))
                self._record(group, unknown, partitions)
                return GatedPartitions(frozenset(partitions))
            case WhereToBegin():
                return Beginnings(None)
        return IsAssigned(None)

    async def _may_have(self, query_message: MayHave, host: str) -> GatedPartitions:
        group = query_message.group
        story = self._stories.of(group)
        story.clients[(host, query_message.client_id)] = time.monotonic()
        if len(story.clients) > _CLIENTS_MAX:
            del story.clients[next(iter(story.clients))]
        decisions, failed = await self._decisions.decide(group, query_message.partitions, _DECIDE_SECONDS)
        for reason in set(failed.values()):
            _limited_log.warning(group, "group lookup failed", group=group, reason=_reason_of(reason))
        decisions |= dict.fromkeys(failed, Decision(Why.UNKNOWN))
        self._record(group, decisions, query_message.partitions)
        if decisions:
            await self._remember(group)
        elif group not in self.watch.groups:
            self._stories.forget(group)
        return GatedPartitions(frozenset(decisions))

    def _record(self, group: str, gated: Mapping[TopicPartition, Decision], queried: Iterable[TopicPartition]) -> None:
        now = time.monotonic()
        self.watch.track_gated(group, gated, queried)
        if group in self.watch.groups:
            self.watch.groups[group].active_at = now
            self.relayed_versions = _RELAYED_BUT_FOLLOWING
            self._stories.report(group, gated, queried, now)

    async def _remember(self, group: str) -> None:
        """Store the gated partitions before a member lacks one, because a restarted process must know them."""
        watched = self.watch.groups.get(group)
        if watched is None or not watched.gated:
            return
        known = self.topics.view.groups.groups.get(group)
        partitions = watched.gated | (frozenset() if known is None else known.partitions)
        if known is not None and known.partitions == partitions:
            return
        ids = {**({} if known is None else known.topic_ids), **self.topics.topic_ids()}
        for topic in {each.topic for each in partitions} - ids.keys():
            topic_id = self.topics.topic_id(topic)
            if topic_id is not None:
                ids[topic] = topic_id
        at_ms = int(time.time() * 1000) if known is None else known.at_ms
        try:
            await self._store([encode_gated(group, partitions, ids, at_ms)], _REPLY_SECONDS)
        except FencepostError as error:
            # Retried. Meanwhile members would miss the partition only if all proxies ended.
            _limited_log.warning("remember", "failed to store gated partitions", group=group, reason=error)

    async def _beginnings(self, query_message: WhereToBegin) -> Mapping[TopicPartition, int]:
        """Start offsets for a group that existed before the expansion; others use their own reset policy."""
        group = query_message.group
        if group not in self.watch.groups and group not in self.topics.view.groups.groups:
            topics = {each.topic for each in query_message.partitions}
            committed = await self._decisions.commits(
                group, [each for topic in topics for each in self._prior_partitions(topic)]
            )
            known_topics = {each.topic for each in committed}
        else:
            known_topics = {each.topic for each in query_message.partitions}
        requested = [each for each in query_message.partitions if each.topic in known_topics]
        starts = await asyncio.gather(
            *(self._log_ends.log_start(each, timeout_seconds=_QUERY_SECONDS) for each in requested)
        )
        return dict(zip(requested, starts, strict=True))

    def _prior_partitions(self, topic: str) -> list[TopicPartition]:
        first = self.topics.history(topic).ordered[:1]
        return [TopicPartition(topic, prior_partition) for each in first for prior_partition in each.prior_partitions]

    # ---- periodic checks

    async def run(self) -> None:
        """Check indefinitely whether gated partitions may be assigned."""
        tidied_at = time.monotonic()
        while True:
            began = time.monotonic()
            await asyncio.sleep(self._limits.group_probe_seconds)
            for group in list(self.watch.groups):
                if await self._probe(group):
                    await asyncio.sleep(_BETWEEN_PROBES_SECONDS)
            await self._store_what_is_due()
            self._forget_old(began)
            if began - tidied_at > _TIDY_SECONDS:
                tidied_at = began
                await self._tidy(began)

    async def _probe(self, group: str) -> bool:
        """Check one group. Returns whether Kafka was queried."""
        watched, now = self.watch.groups.get(group), time.monotonic()
        if watched is None:
            return False
        partitions = watched.requested | watched.recorded
        if not partitions and now - watched.active_at > self._remembered_seconds:
            self.watch.forget(group)
            self._stories.forget(group)
            return False
        if now - watched.active_at > _ACTIVE_SECONDS and watched.gated is not None:
            self._has_no_news(group, watched, now)
            return False
        try:
            self._probe_again_where_stalled(group, now)
            decisions, failed = await self._decisions.decide(group, partitions, _QUERY_SECONDS)
            before = watched.gated
            as_before = {each for each in failed if before is None or each in before}
            self.watch.update(group, frozenset(decisions) | as_before, frozenset(partitions))
            self._stories.report(group, decisions, partitions - failed.keys(), now)
            self._stories.of(group).observe(decisions, now)
            for reason in set(failed.values()):
                _limited_log.warning(group, "lookup of a waiting group failed", group=group, reason=_reason_of(reason))
            not_allowed = [each for each, reason in failed.items() if _is_not_allowed(reason)]
            self._decisions.release_unobserved(group, not_allowed, now)
            if decisions or as_before:
                await self._remember(group)
            else:
                await self._forgive(group, now)
        except FencepostError as error:
            _limited_log.warning(group, "failed to store the end of gating", group=group, reason=error)
        except Exception as error:
            _log.crash("group lookup crashed", error, group=group)
        return True

    def _has_no_news(self, group: str, watched: Group, now: float) -> None:
        """Stop reporting a group without requests, which may no longer exist, and forget it after a day."""
        self._stories.silence(group)
        if not watched.recorded and now - watched.active_at > _RECORDED_SECONDS:
            self.watch.forget(group)
            self._stories.forget(group)

    def _probe_again_where_stalled(self, group: str, now: float) -> None:
        """Search again where a group does not advance: compaction, retention or truncation may have removed records."""
        story = self._stories.get(group)
        if story is None:
            return
        for prior_partition, (_, since) in story.stood.items():
            if now - since >= SEARCH_AGAIN_SECONDS:
                self._unread.forget_old(
                    self.topics.topic_ids().get(prior_partition.topic), prior_partition.partition, now
                )

    async def _forgive(self, group: str, now: float) -> None:
        """Nothing is gated: delete the record once all members must have their partitions."""
        story = self._stories.get(group)
        if story is None:
            return
        if story.free_since is None:
            story.free_since = now
        if now - story.free_since < self._remembered_seconds:
            return
        if group in self.topics.view.groups.groups:
            await self._store([encode_gated_tombstone(group)])
        self.watch.forget(group)
        self._stories.forget(group)

    async def _store_what_is_due(self) -> None:
        try:
            due = list(self._decisions.to_store)
            await self._store(due)
            del self._decisions.to_store[: len(due)]  # others may have been added meanwhile
        except FencepostError as error:  # retried; storing twice is harmless
            _limited_log.warning("store", "failed to store the end of gating", reason=error)

    async def _tidy(self, now: float) -> None:
        """Delete state records of groups that are no longer active."""
        old_ms = (time.time() - _RECORDED_SECONDS) * 1000
        silent = [
            group
            for group, recorded in self.topics.view.groups.groups.items()
            if recorded.at_ms < old_ms
            and ((watched := self.watch.groups.get(group)) is None or now - watched.active_at > _ACTIVE_SECONDS)
        ]
        try:
            await self._store([encode_gated_tombstone(group) for group in silent])
        except FencepostError as error:
            _limited_log.warning("tidy", "state topic cleanup failed", reason=error)

    def _forget_old(self, now: float) -> None:
        self._lookups.forget_old(now - self._limits.gated_without_commit_seconds)
        self._unread.bound()

    # ---- notices from sessions

    def notice(self, notice: Notice, host: str) -> None:
        now = time.monotonic()
        match notice:
            case HasTasks(group):
                if group not in self._with_tasks and len(self._with_tasks) < _CLIENTS_MAX:
                    self._with_tasks.add(group)
                    _log.warning(
                        "group assigns tasks, not only partitions (Kafka Streams?): its partitions are not gated, and "
                        "it may read records of a key out of order after an expansion",
                        group=group,
                    )
            case SharesTopics(group, topics):
                new = set(topics) - self._shared
                if new and len(self._shared) < _CLIENTS_MAX:
                    self._shared |= new
                    _log.warning(
                        "a share group reads topics that expand in order: share groups keep no order, so that their "
                        "assignments are not gated (read these topics with a consumer group, if order matters)",
                        group=group,
                        topics=some(sorted(new)),
                    )
            case LookedUp(client_id, latest, others):
                self._lookups.record((host, client_id), latest, others, now)

    # ---- for operators

    def waiting(self) -> list[GatedStatus]:
        return self._stories.status(time.monotonic())

    async def release(self, group: str, topic: str) -> str:
        """Stop gating a topic's current new partitions for a group; return a result message."""
        ordered = self.topics.history(topic).ordered
        if not ordered:
            return f"{topic} has no ordered expansion known to this process: nothing is gated"
        released = self.topics.view.groups.released
        closed = [each for each in ordered if not released(each.topic_id, each.to_count, group)]
        now_ms = int(time.time() * 1000)
        try:
            await self._store([encode_released(each.topic_id, each.to_count, group, now_ms) for each in closed])
        except FencepostError as error:
            return f"not stored: {error} (try again)"
        counts = ", ".join(f"{each.from_count} to {each.to_count}" for each in ordered)
        return f"group {group} gets the new partitions of {topic} ({counts}) with its members' next heartbeats"


def _reason_of(error: Exception) -> str:
    return str(error) or "Kafka did not respond in time"


def _is_not_allowed(error: Exception) -> bool:
    return isinstance(error, UpstreamUnavailable) and error.error_code in _NOT_ALLOWED
