"""Group progress tracker: what consumer groups of topics with ordered expansion committed and still have to read.

It answers the queries of `groups/assignment_filter.py`, and checks once a second whether gated partitions may be
assigned. The control client needs DESCRIBE on these groups and topics, and READ on the topics.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fencepost_proxy import logs
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error, FencepostError
from fencepost_proxy.groups.assignment_filter import ASSIGNING, FOLLOWING, AssignmentFilter
from fencepost_proxy.groups.consumable import Aborted, consumable_below
from fencepost_proxy.groups.gating import Decision, Progress, RemainingRecords, Search, Wait, Why, brought_by, decide
from fencepost_proxy.groups.queries import (
    Beginnings,
    GatedPartitions,
    HasTasks,
    IsAssigned,
    LookedUp,
    MayHave,
    Notice,
    Query,
    Reply,
    WhatIsAssigned,
    WhereToBegin,
)
from fencepost_proxy.groups.watch import Group, Watch
from fencepost_proxy.net.control import ControlClient, UpstreamUnavailable
from fencepost_proxy.net.metrics import Metrics
from fencepost_proxy.net.state_topic import StateTopic
from fencepost_proxy.net.status import GatedStatus
from fencepost_proxy.session.services import RELAYED_VERSIONS, RelayedVersions, relayed_versions_without
from fencepost_proxy.topics.expansions import Expansion, ExpansionHistory
from fencepost_proxy.topics.gated import encode_gated, encode_gated_tombstone, encode_released
from fencepost_proxy.topics.records import StateRecord
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.topics.virtual_configs import ORDERED_PARTITION_EXPANSION, TopicPolicy
from fencepost_proxy.types import Offset, TopicPartition

_log = logs.get("net.groups")
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
_NOT_ALLOWED: Final = frozenset({Error.TOPIC_AUTHORIZATION_FAILED, 30})  # 30: GROUP_AUTHORIZATION_FAILED
#: Records found in the log are searched again if a group does not advance to them: they may be deleted.
_PROBE_AGAIN_SECONDS: Final = 10.0
#: A group without requests in this process for this long is not checked.
_ACTIVE_SECONDS: Final = 120.0
#: After the last gated partition, how long members may have fewer partitions than the coordinator assigned.
_REMEMBERED_SECONDS: Final = 1800.0
_LOG_START_SECONDS: Final = 5.0
_SHOWN_AS_STANDING_SECONDS: Final = 60.0
_FETCH_BYTES: Final = 1_048_576
#: Rate limit of all searches for consumable records.
_SEARCH_BYTES_PER_SECOND: Final = 32_000_000
_FIRST_WINDOW: Final = 2
_WINDOW_FACTOR: Final = 32
_REMAINING_MAX: Final = 100_000
_CLIENTS_MAX: Final = 10_000
_LOOKED_UP_MAX: Final = 100_000
_BYTES_UNPACKED_MAX: Final = 104_857_600

ALL_RELAYED_VERSIONS: Final = RELAYED_VERSIONS
_RELAYED_BUT_ASSIGNING: Final = relayed_versions_without(ASSIGNING)
_RELAYED_BUT_FOLLOWING: Final = relayed_versions_without(FOLLOWING)

_Client = tuple[str, "str | None"]
#: A new partition of one incarnation of a topic.
_CreatedPartition = tuple[UUID, TopicPartition]
#: Commits on prior partitions; -1 for none.
_Commits = dict[int, int]


@dataclass(slots=True)
class _Probed:
    """A log-end snapshot, and when it was last read."""

    remaining: RemainingRecords
    at: float


@dataclass(slots=True)
class _Story:
    """Per group: gated partitions with start times, progress, and its members' clients.

    `idle_since`: for a gated partition whose prior partitions are all assigned: commits there, and since when they have
    not advanced. `silent`: no member sent a request here recently.
    """

    since: dict[TopicPartition, float] = field(default_factory=dict)
    idle_since: dict[_CreatedPartition, tuple[_Commits, float]] = field(default_factory=dict)
    stood: dict[TopicPartition, tuple[int, float]] = field(default_factory=dict)
    decisions: dict[TopicPartition, Decision] = field(default_factory=dict)
    clients: dict[_Client, float] = field(default_factory=dict)
    timed_out: set[_CreatedPartition] = field(default_factory=set)
    free_since: float | None = None
    silent: bool = False

    def stood_seconds(self, topic: str, wait: Wait, now: float) -> float:
        """Time since the group last advanced on that prior partition."""
        position, since = self.stood.get(TopicPartition(topic, wait.prior_partition), (-1, now))
        return now - since if position == wait.position else 0.0


class GroupProgressTracker:
    """`policy`: of a topic, None without checks. `topic_id`: None if unknown."""

    def __init__(
        self,
        control: ControlClient,
        limits: Limits,
        *,
        configured: Iterable[Mapping[str, str]],
        policy: Callable[[str], TopicPolicy | None],
        topic_id: Callable[[str], UUID | None],
        metrics: Metrics,
        remembered_seconds: float = _REMEMBERED_SECONDS,
    ) -> None:
        self._control = control
        self._limits = limits
        self._policy = policy
        self._topic_id = topic_id
        self._remembered_seconds = remembered_seconds
        self._state: StateTopic | None = None
        self._by_file = any(each.get(ORDERED_PARTITION_EXPANSION.name, "false") != "false" for each in configured)
        self._ids: dict[str, UUID] = {}
        self._names: dict[UUID, str] = {}
        self._stories: dict[str, _Story] = {}
        self._remaining: OrderedDict[tuple[UUID, int, int], _Probed] = OrderedDict()
        self._starts: dict[_CreatedPartition, tuple[int, float]] = {}
        # When a client last queried an offset of a partition, and whether it ever queried another one than the end.
        self._looked_up: OrderedDict[tuple[_Client, TopicPartition], tuple[float, bool]] = OrderedDict()
        self._with_tasks: set[str] = set()
        self._to_store: list[StateRecord] = []
        self._searching = asyncio.Lock()
        self._search_again_at = 0.0
        self.relayed_versions: RelayedVersions = ALL_RELAYED_VERSIONS
        self.watch = Watch()
        self.assignment_filter = AssignmentFilter(self.watch, self, time.monotonic)
        self._metrics = metrics

    def attach(self, state: StateTopic) -> None:
        """Set the state topic once it is loaded."""
        self._state = state

    @property
    def _view(self) -> StateView | None:
        return None if self._state is None else self._state.view

    # ---- expansion view

    def refresh(self) -> None:
        """Update from the state topic after a change."""
        view = self._view
        if view is None:
            return
        ids = {topic: configs.topic_id for topic, configs in view.topic_configs.items()}
        ids.update((each.topic, each.topic_id) for each in (*view.expanded, *view.pending_expansions))
        # A record may be from a deleted topic: metadata takes precedence.
        self._ids = {topic: self._topic_id(topic) or topic_id for topic, topic_id in ids.items() if self.expands(topic)}
        self._names = {topic_id: topic for topic, topic_id in self._ids.items()}
        expanded = any(each.topic in self._ids for each in (*view.expanded, *view.pending_expansions))
        if expanded or self.watch.groups:
            self.relayed_versions = _RELAYED_BUT_FOLLOWING
        else:
            self.relayed_versions = _RELAYED_BUT_ASSIGNING if self._ids or self._by_file else ALL_RELAYED_VERSIONS
        for group in view.groups.groups.keys() | self.watch.groups.keys():
            recorded = view.groups.groups.get(group)
            self.watch.record(group, frozenset() if recorded is None else recorded.partitions)

    def expands(self, topic: str) -> bool:
        policy = self._policy(topic)
        return policy is not None and policy.ordered

    def new(self, partition: TopicPartition) -> bool:
        history = self._history(partition.topic)
        return history is not None and brought_by(history, partition.partition) is not None

    def topic(self, topic_id: UUID) -> str | None:
        return self._names.get(topic_id)

    def topic_ids(self) -> Mapping[str, UUID]:
        return self._ids

    def _history(self, topic: str) -> ExpansionHistory | None:
        view = self._view
        if view is None or not self.expands(topic):
            return None
        return view.history(topic, self._topic_id(topic))

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
                        members = await self._control.consumer_group_assignments(group, timeout_seconds=_REPLY_SECONDS)
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
        story = self._stories.setdefault(group, _Story())
        story.clients[(host, query_message.client_id)] = time.monotonic()
        if len(story.clients) > _CLIENTS_MAX:
            del story.clients[next(iter(story.clients))]
        decisions, failed = await self._decisions(group, query_message.partitions, _DECIDE_SECONDS)
        for reason in set(failed.values()):
            _limited_log.warning(group, "group lookup failed", group=group, reason=_reason_of(reason))
        decisions |= dict.fromkeys(failed, Decision(Why.UNKNOWN))
        self._record(group, decisions, query_message.partitions)
        if decisions:
            await self._remember(group)
        elif group not in self.watch.groups:
            self._stories.pop(group, None)
        return GatedPartitions(frozenset(decisions))

    def _record(self, group: str, gated: Mapping[TopicPartition, Decision], queried: Iterable[TopicPartition]) -> None:
        now = time.monotonic()
        self.watch.track_gated(group, gated, queried)
        if group in self.watch.groups:
            self.watch.groups[group].active_at = now
            self.relayed_versions = _RELAYED_BUT_FOLLOWING
            self._report(group, gated, queried, now)

    def _report(
        self,
        group: str,
        gated: Mapping[TopicPartition, Decision],
        queried: Iterable[TopicPartition],
        now: float,
    ) -> None:
        """Log and count changes of a group's gated partitions."""
        story = self._stories.setdefault(group, _Story())
        story.silent = False
        for partition in queried:
            decision = gated.get(partition)
            if decision is None:
                since = story.since.pop(partition, None)
                story.decisions.pop(partition, None)
                if since is not None:
                    self._metrics.partitions_released.inc()
                    _log.info("gated partition assigned", group=group, partition=partition, waited=now - since)
                continue
            story.decisions[partition] = decision
            if partition not in story.since:
                story.since[partition] = now
                _log.info(
                    "new partition gated for a group",
                    group=group,
                    partition=partition,
                    reason=decision.why.value if decision.why else None,
                    records_max=sum(wait.records_max for wait in decision.waits),
                )
        self._count_gated()
        story.free_since = None if story.since else story.free_since or now

    def _count_gated(self) -> None:
        reported = (len(each.since) for each in self._stories.values() if not each.silent)
        self._metrics.partitions_gated.value = sum(reported)

    async def _remember(self, group: str) -> None:
        """Store the gated partitions before a member lacks one, because a restarted process must know them."""
        view, watched = self._view, self.watch.groups.get(group)
        if view is None or watched is None or self._state is None or not watched.gated:
            return
        known = view.groups.groups.get(group)
        partitions = watched.gated | (frozenset() if known is None else known.partitions)
        if known is not None and known.partitions == partitions:
            return
        ids = dict(self._ids) if known is None else {**known.topic_ids, **self._ids}
        for topic in {each.topic for each in partitions} - ids.keys():
            topic_id = self._topic_id(topic)
            if topic_id is not None:
                ids[topic] = topic_id
        at_ms = int(time.time() * 1000) if known is None else known.at_ms
        try:
            await self._state.append([encode_gated(group, partitions, ids, at_ms)], timeout_seconds=_REPLY_SECONDS)
        except FencepostError as error:
            # Retried. Meanwhile members would miss the partition only if all proxies ended.
            _limited_log.warning("remember", "failed to store gated partitions", group=group, reason=error)

    async def _beginnings(self, query_message: WhereToBegin) -> Mapping[TopicPartition, int]:
        """Start offsets for a group that existed before the expansion; others use their own reset policy."""
        group = query_message.group
        view = self._view
        if view is None:
            return {}
        known = group in self.watch.groups or group in view.groups.groups
        if not known:
            topics = {each.topic for each in query_message.partitions}
            committed = await self._commits(group, [each for topic in topics for each in self._prior_partitions(topic)])
            known_topics = {each.topic for each in committed}
        else:
            known_topics = {each.topic for each in query_message.partitions}
        requested = [each for each in query_message.partitions if each.topic in known_topics]
        starts = await asyncio.gather(
            *(self._control.log_start(each, timeout_seconds=_QUERY_SECONDS) for each in requested)
        )
        return dict(zip(requested, starts, strict=True))

    def _prior_partitions(self, topic: str) -> list[TopicPartition]:
        history = self._history(topic)
        if history is None or not history.ordered:
            return []
        return [TopicPartition(topic, prior_partition) for prior_partition in history.ordered[0].prior_partitions]

    async def _commits(self, group: str, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        requested = sorted(set(partitions))
        if not requested:
            return {}
        return await self._control.committed_offsets(group, requested, timeout_seconds=_QUERY_SECONDS)

    # ---- the decision

    async def _decisions(
        self, group: str, partitions: Iterable[TopicPartition], seconds: float
    ) -> tuple[dict[TopicPartition, Decision], dict[TopicPartition, Exception]]:
        """Gated partitions with decisions, and partitions whose lookup failed with reasons.

        Topics are independent: a deleted, leaderless or unauthorized topic does not affect partitions of the others.
        """
        topics: dict[str, list[TopicPartition]] = {}
        for partition in partitions:
            topics.setdefault(partition.topic, []).append(partition)

        async def of_topic(queried: list[TopicPartition]) -> dict[TopicPartition, Decision]:
            async with asyncio.timeout(seconds):
                return await self._of_topic(group, queried)

        answers = await asyncio.gather(*map(of_topic, topics.values()), return_exceptions=True)
        gated: dict[TopicPartition, Decision] = {}
        failed: dict[TopicPartition, Exception] = {}
        for queried, answer in zip(topics.values(), answers, strict=True):
            if isinstance(answer, FencepostError | TimeoutError):
                failed |= dict.fromkeys(queried, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                gated |= answer
        return gated, failed

    async def _of_topic(self, group: str, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Decision]:
        """Gated partitions of one topic. Raises `UpstreamUnavailable`."""
        gated: dict[TopicPartition, Decision] = {}
        queried: dict[TopicPartition, Expansion] = {}
        view = self._view
        for partition in partitions:
            history = self._history(partition.topic)
            brought = None if history is None else brought_by(history, partition.partition)
            if isinstance(brought, Why):
                gated[partition] = Decision(brought)
            elif brought is not None and view is not None and not self._let_go(view, group, partition, brought):
                queried[partition] = brought
        if not queried:
            return gated
        prior_partitions = {
            TopicPartition(each.topic, prior_partition)
            for each, by in queried.items()
            for prior_partition in by.prior_partitions
        }
        commits = await self._commits(group, prior_partitions | queried.keys())
        lagging = [
            prior_partition
            for prior_partition in prior_partitions
            if self._is_lagging(prior_partition, commits, queried.values())
        ]
        if lagging:  # otherwise nothing is gated, wherever the logs start
            lagging += [each for each in queried if commits.get(each, 0) > 0 and each not in lagging]
        starts = await self._log_starts(next(iter(queried.values())).topic_id, lagging)
        for partition, expansion in queried.items():
            decision = await self._decide(group, partition, expansion, commits, starts)
            if decision.why is not None:
                gated[partition] = decision
        return gated

    def _let_go(self, view: StateView, group: str, partition: TopicPartition, expansion: Expansion) -> bool:
        """Whether an operator or a timeout stopped gating, whatever the group committed."""
        story = self._stories.get(group)
        timed_out = story is not None and (expansion.topic_id, partition) in story.timed_out
        return timed_out or view.groups.released(expansion.topic_id, expansion.to_count, group)

    @staticmethod
    def _is_lagging(
        prior_partition: TopicPartition, commits: Mapping[TopicPartition, int], expansions: Iterable[Expansion]
    ) -> bool:
        return any(
            prior_partition.topic == each.topic
            and prior_partition.partition < each.from_count
            and commits.get(prior_partition, 0) < each.thresholds[prior_partition.partition]
            for each in expansions
        )

    async def _log_starts(self, topic_id: UUID, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        now = time.monotonic()
        found = {each: self._starts[topic_id, each][0] for each in partitions if self._known_start(topic_id, each, now)}
        requested = [each for each in partitions if each not in found]
        starts = await asyncio.gather(
            *(self._control.log_start(each, timeout_seconds=_QUERY_SECONDS) for each in requested)
        )
        for partition, start in zip(requested, starts, strict=True):
            self._starts[topic_id, partition] = start, now
            found[partition] = start
        return found

    def _known_start(self, topic_id: UUID, partition: TopicPartition, now: float) -> bool:
        known = self._starts.get((topic_id, partition))
        return known is not None and now - known[1] < _LOG_START_SECONDS

    async def _decide(
        self,
        group: str,
        partition: TopicPartition,
        expansion: Expansion,
        commits: Mapping[TopicPartition, int],
        starts: Mapping[TopicPartition, int],
    ) -> Decision:
        topic = partition.topic
        progress = Progress(
            commits={each.partition: offset for each, offset in commits.items() if each.topic == topic},
            log_starts={each.partition: offset for each, offset in starts.items() if each.topic == topic},
            passed=self._passed(group, partition, expansion),
        )
        while True:
            remaining_by_partition = {
                prior_partition: probed.remaining
                for prior_partition, threshold in enumerate(expansion.thresholds)
                if (probed := self._remaining.get((expansion.topic_id, prior_partition, threshold))) is not None
            }
            decision = decide(expansion, partition.partition, progress, remaining_by_partition)
            if not decision.searches:
                return self._after_waiting(group, partition, expansion, decision)
            for search in decision.searches:
                await self._search(expansion, topic, search)

    def _passed(self, group: str, partition: TopicPartition, expansion: Expansion) -> frozenset[int]:
        """Prior partitions without a commit that a member started reading at the end, so none of them is awaited."""
        story = self._stories.get(group)
        if story is None:
            return frozenset()
        return frozenset(
            prior_partition
            for prior_partition in expansion.prior_partitions
            if any(
                self._began_at_end(client, TopicPartition(partition.topic, prior_partition)) for client in story.clients
            )
        )

    def _began_at_end(self, client: _Client, partition: TopicPartition) -> bool:
        """A client that also queried other offsets may have started there and queried the end to measure its lag."""
        looked_up = self._looked_up.get((client, partition))
        return looked_up is not None and not looked_up[1]

    def _after_waiting(
        self, group: str, partition: TopicPartition, expansion: Expansion, decision: Decision
    ) -> Decision:
        """Bound the wait for a group that commits nothing, or nothing further.

        The limit does not apply while a prior partition is itself gated. Example: a topic is expanded from 1 to 2 to 4
        partitions, and a group lags in the first one for an hour. It then gets the second one, without commits on it.
        """
        story, created_partitions, now = self._stories.get(group), (expansion.topic_id, partition), time.monotonic()
        if story is None:
            return decision
        lacks_prior_partitions = any(
            TopicPartition(partition.topic, wait.prior_partition) in story.since for wait in decision.waits
        )
        if decision.why is None or lacks_prior_partitions:
            story.idle_since.pop(created_partitions, None)
            return decision
        commits = {wait.prior_partition: wait.position if wait.committed else -1 for wait in decision.waits}
        before, since = story.idle_since.get(created_partitions, (commits, now))
        if commits != before:
            since = now
        story.idle_since[created_partitions] = commits, since
        has_committed = max(commits.values(), default=-1) >= 0
        limit = "gated_without_progress_seconds" if has_committed else "gated_without_commit_seconds"
        if now - since < getattr(self._limits, limit):
            return decision
        story.timed_out.add(created_partitions)
        # Stored for all processes, or each rebalance would restart the wait.
        now_ms = int(time.time() * 1000)
        self._to_store.append(encode_released(expansion.topic_id, expansion.to_count, group, now_ms))
        self._metrics.partitions_timed_out.inc()
        _log.warning(
            "gating timed out: the group committed nothing further on prior partitions within the limit, and may read "
            "records of a key out of order",
            group=group,
            partition=partition,
            commits=commits,
            limit=f"limits.{limit}",
        )
        return Decision()

    # ---- the log

    async def _search(self, expansion: Expansion, topic: str, search: Search) -> None:
        """Search backwards from the threshold for the last consumable record, as far as needed."""
        key = expansion.topic_id, search.prior_partition, search.threshold
        async with self._searching:
            probed = self._remaining.get(key)
            if probed is None:
                probed = self._remaining[key] = _Probed(RemainingRecords.of(search.threshold), time.monotonic())
                if len(self._remaining) > _REMAINING_MAX:
                    self._remaining.popitem(last=False)
            remaining = probed.remaining
            window = _FIRST_WINDOW
            while remaining.awaits(search.position) is None:
                start = max(search.position, remaining.searched_from - window)
                partition = TopicPartition(topic, search.prior_partition)
                remaining.found(start, await self._highest(partition, start, remaining.searched_from))
                window *= _WINDOW_FACTOR
            probed.at = time.monotonic()

    async def _highest(self, partition: TopicPartition, start: int, end: int) -> int | None:
        """The highest consumable offset in [start, end)."""
        highest: int | None = None
        offset = start
        while offset < end:
            await asyncio.sleep(max(0.0, self._search_again_at - time.monotonic()))
            fetched = await self._control.fetch_committed(
                partition, Offset(offset), bytes_max=_FETCH_BYTES, timeout_seconds=_QUERY_SECONDS
            )
            pause = len(fetched.records) / _SEARCH_BYTES_PER_SECOND
            self._search_again_at = max(self._search_again_at, time.monotonic()) + pause
            if fetched.out_of_range:
                # No records below the log start or above the log end.
                start = await self._control.log_start(partition, timeout_seconds=_QUERY_SECONDS)
                if start <= offset:
                    return highest
                offset = start
                continue
            found = await asyncio.to_thread(
                consumable_below,
                end,
                memoryview(fetched.records),
                (Aborted(*each) for each in fetched.aborted),
                from_offset=offset,
                decompressed_bytes_max=_BYTES_UNPACKED_MAX,
            )
            highest = highest if found.highest is None else found.highest
            if found.next_offset is None:
                if fetched.last_stable_offset < end:
                    log_end = await self._control.high_watermark(partition, timeout_seconds=_QUERY_SECONDS)
                    if fetched.last_stable_offset < min(end, log_end):
                        raise UpstreamUnavailable(f"{partition}: a transaction is open at {fetched.last_stable_offset}")
                return highest
            offset = max(found.next_offset, offset + 1)
        return highest

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
        watched, view = self.watch.groups.get(group), self._view
        now = time.monotonic()
        if watched is None or view is None:
            return False
        partitions = watched.requested | watched.recorded
        if not partitions and now - watched.active_at > self._remembered_seconds:
            self.watch.forget(group)
            self._stories.pop(group, None)
            return False
        if now - watched.active_at > _ACTIVE_SECONDS and watched.gated is not None:
            self._has_no_news(group, watched, now)
            return False
        try:
            self._probe_again_where_stalled(group, now)
            decisions, failed = await self._decisions(group, partitions, _QUERY_SECONDS)
            before = watched.gated
            as_before = {each for each in failed if before is None or each in before}
            self.watch.update(group, frozenset(decisions) | as_before, frozenset(partitions))
            self._report(group, decisions, partitions - failed.keys(), now)
            self._stands(group, decisions, now)
            for reason in set(failed.values()):
                _limited_log.warning(group, "lookup of a waiting group failed", group=group, reason=_reason_of(reason))
            self._release_unobserved(group, [each for each, reason in failed.items() if _is_not_allowed(reason)], now)
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
        story = self._stories.get(group)
        if story is not None and not story.silent:
            story.silent = True
            story.idle_since.clear()  # a group that was stopped could not commit
            self._count_gated()
        if not watched.recorded and now - watched.active_at > _RECORDED_SECONDS:
            self.watch.forget(group)
            self._stories.pop(group, None)

    def _release_unobserved(self, group: str, partitions: Iterable[TopicPartition], now: float) -> None:
        """Without authorization the group's progress is unknown: it waits like a group without commits."""
        story = self._stories.setdefault(group, _Story())
        for partition in partitions:
            since = story.since.setdefault(partition, now)
            history = self._history(partition.topic)
            brought = None if history is None else brought_by(history, partition.partition)
            if not isinstance(brought, Expansion):
                continue
            created_partitions = brought.topic_id, partition
            if created_partitions in story.timed_out or now - since < self._limits.gated_without_commit_seconds:
                continue
            story.timed_out.add(created_partitions)
            self._metrics.partitions_timed_out.inc()
            _log.error(
                "gating timed out: the group's progress is unknown, because the proxy is not authorized (its "
                "principal needs DESCRIBE on groups and topics, and READ on topics with ordered expansion)",
                group=group,
                partition=partition,
            )

    def _stands(self, group: str, decisions: Mapping[TopicPartition, Decision], now: float) -> None:
        story = self._stories.setdefault(group, _Story())
        waits = {
            TopicPartition(each.topic, wait.prior_partition): wait for each, v in decisions.items() for wait in v.waits
        }
        before = story.stood
        story.stood = {
            prior_partition: (
                wait.position,
                before[prior_partition][1]
                if prior_partition in before and before[prior_partition][0] == wait.position
                else now,
            )
            for prior_partition, wait in waits.items()
        }

    def _probe_again_where_stalled(self, group: str, now: float) -> None:
        """Search again where a group does not advance: compaction, retention or truncation may have removed records."""
        story = self._stories.get(group)
        if story is None:
            return
        for prior_partition, (_, since) in story.stood.items():
            if now - since < _PROBE_AGAIN_SECONDS:
                continue
            topic_id = self._ids.get(prior_partition.topic)
            for key, probed in list(self._remaining.items()):
                if (
                    key[0] == topic_id
                    and key[1] == prior_partition.partition
                    and now - probed.at >= _PROBE_AGAIN_SECONDS
                ):
                    del self._remaining[key]

    async def _forgive(self, group: str, now: float) -> None:
        """Nothing is gated: delete the record once all members must have their partitions."""
        story, view = self._stories.get(group), self._view
        if story is None or view is None or self._state is None:
            return
        if story.free_since is None:
            story.free_since = now
        if now - story.free_since < self._remembered_seconds:
            return
        if group in view.groups.groups:
            await self._state.append([encode_gated_tombstone(group)])
        self.watch.forget(group)
        self._stories.pop(group, None)

    async def _store_what_is_due(self) -> None:
        if self._state is None:
            return
        try:
            await self._state.append(self._to_store)
            self._to_store = []
        except FencepostError as error:  # retried; storing twice is harmless
            _limited_log.warning("store", "failed to store the end of gating", reason=error)

    async def _tidy(self, now: float) -> None:
        """Delete state records of groups that are no longer active."""
        view = self._view
        if view is None or self._state is None:
            return
        old_ms = (time.time() - _RECORDED_SECONDS) * 1000
        silent = [
            group
            for group, recorded in view.groups.groups.items()
            if recorded.at_ms < old_ms
            and ((watched := self.watch.groups.get(group)) is None or now - watched.active_at > _ACTIVE_SECONDS)
        ]
        try:
            await self._state.append([encode_gated_tombstone(group) for group in silent])
        except FencepostError as error:
            _limited_log.warning("tidy", "state topic cleanup failed", reason=error)

    def _forget_old(self, now: float) -> None:
        remembered_seconds = self._limits.gated_without_commit_seconds
        while self._looked_up and now - next(iter(self._looked_up.values()))[0] > remembered_seconds:
            self._looked_up.popitem(last=False)
        if len(self._starts) > _REMAINING_MAX:
            self._starts.clear()

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
            case LookedUp(client_id, latest, others):
                client = host, client_id
                for partition in (*latest, *others):
                    before = self._looked_up.get((client, partition))
                    elsewhere = partition in others or (before is not None and before[1])
                    self._looked_up[client, partition] = now, elsewhere
                    self._looked_up.move_to_end((client, partition))
                while len(self._looked_up) > _LOOKED_UP_MAX:
                    self._looked_up.popitem(last=False)

    # ---- for operators

    async def release(self, group: str, topic: str) -> str:
        """Stop gating a topic's current new partitions for a group; return a result message."""
        history, view = self._history(topic), self._view
        if history is None or view is None or self._state is None or not history.ordered:
            return f"{topic} has no ordered expansion known to this process: nothing is gated"
        closed = [each for each in history.ordered if not view.groups.released(each.topic_id, each.to_count, group)]
        now_ms = int(time.time() * 1000)
        try:
            await self._state.append([encode_released(each.topic_id, each.to_count, group, now_ms) for each in closed])
        except FencepostError as error:
            return f"not stored: {error} (try again)"
        if closed:
            _log.warning(
                "operator stopped gating a topic for a group, which may read records of a key out of order",
                group=group,
                topic=topic,
            )
        counts = ", ".join(f"{each.from_count} to {each.to_count}" for each in history.ordered)
        return f"group {group} gets the new partitions of {topic} ({counts}) with its members' next heartbeats"

    def waiting(self) -> list[GatedStatus]:
        now = time.monotonic()
        return [
            GatedStatus(
                group=group,
                topic=partition.topic,
                partition=partition.partition,
                why="" if decision.why is None else decision.why.value,
                records_max=sum(wait.records_max for wait in decision.waits),
                waits=tuple(
                    _described(wait, story.stood_seconds(partition.topic, wait, now)) for wait in decision.waits
                ),
                seconds=now - story.since.get(partition, now),
            )
            for group, story in sorted(self._stories.items())
            if not story.silent
            for partition, decision in sorted(story.decisions.items())
        ]


def _reason_of(error: Exception) -> str:
    return str(error) or "Kafka did not respond in time"


def _is_not_allowed(error: Exception) -> bool:
    return isinstance(error, UpstreamUnavailable) and error.error_code in _NOT_ALLOWED


def _described(wait: Wait, stood_seconds: float) -> str:
    at = f"committed {wait.position}" if wait.committed else "nothing committed"
    stands = f", no further commit for {stood_seconds:.0f} s" if stood_seconds >= _SHOWN_AS_STANDING_SECONDS else ""
    return f"partition {wait.prior_partition}: {at}, threshold {wait.threshold}{stands}"
