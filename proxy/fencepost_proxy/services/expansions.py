"""Partition expansions: runs the procedure of `expansion/procedure.py` against Kafka, the state topic and a clock.

Every process follows the pending expansions in its view of the state topic. It closes its append barrier as soon as it
reads an expansion, and opens it when it reads the end. One process runs the procedure; if it dies, another claims it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Protocol
from uuid import UUID, uuid4

from fencepost_proxy import logs
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.metadata_cache import MetadataCache
from fencepost_proxy.cluster.producers import Producers
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.cluster.topics import Topics
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error, FencepostError, Reason
from fencepost_proxy.expansion import procedure as ex
from fencepost_proxy.expansion.history import Expansion, ExpansionHistory
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.status import ExpansionStatus
from fencepost_proxy.services.expansion_effects import QUERY_SECONDS, ExpansionEffects
from fencepost_proxy.services.partition_counts import PartitionCounts
from fencepost_proxy.topics.planning import ExpansionOutcome, ExpansionRequest
from fencepost_proxy.types import Transactor

_log = logs.get("services.expansions")
_limited_log = logs.RateLimitedLog(_log)

#: Wait after which the log names what a step waits for.
_SAY_SECONDS: Final = 1.0
#: Share of the client's timeout after which it gets an "in progress" response.
_OF_ITS_TIMEOUT: Final = 0.95


class Barriers(Protocol):
    """This process's append barriers, by topic. Missing ones are created."""

    def close_barrier(self, topic: str, but_for: frozenset[Transactor]) -> None: ...

    def open_barrier(self, topic: str, partition_count: int | None) -> None:
        """`partition_count`: None for no change."""

    def barrier_empty(self, topic: str) -> bool: ...


class Expansions:
    """See the module. `spawn` starts a task that ends with the process."""

    def __init__(
        self,
        state: StateTopic,
        limits: Limits,
        *,
        metadata: MetadataCache,
        topics: Topics,
        producers: Producers,
        log_ends: LogEnds,
        barriers: Barriers,
        metrics: Metrics,
        spawn: Spawn,
    ) -> None:
        self._metadata = metadata
        self._effects = ExpansionEffects(
            state, limits, metadata=metadata, topics=topics, producers=producers, log_ends=log_ends
        )
        self._counts = PartitionCounts(state, metadata, metrics, spawn, barriers.open_barrier)
        self._state = state
        self._limits = limits
        self._barriers = barriers
        self._metrics = metrics
        self._spawn = spawn
        self._changed = asyncio.Event()  # set and replaced when the view changes
        self._closings: dict[UUID, ex.Closing] = {}  # by topic id
        self._procedures: dict[UUID, ex.Procedure] = {}  # by proposal
        self._claiming: set[UUID] = set()
        self._running = False

    # ---- the view

    def start(self) -> None:
        """Call once this process has an identity (`StateTopic.enter`)."""
        self._running = True
        self.view_changed()

    def view_changed(self) -> None:
        """Apply new records to the append barriers first: no append may pass a barrier that is closed now."""
        pending = {expansion.topic_id: expansion for expansion in self._state.view.expansions.pending}
        for topic_id, closing in list(self._closings.items()):
            expansion = pending.get(topic_id)
            if expansion is None or expansion.proposal != closing.expansion.proposal:
                del self._closings[topic_id]
                self._reopen(closing.expansion, pending.values())
        for topic_id, expansion in pending.items():
            if topic_id not in self._closings:
                self._closings[topic_id] = closing = ex.Closing(expansion)
                self._barriers.close_barrier(expansion.topic, closing.but_for)
                self._spawn(self._close(closing), f"close {expansion.topic}")
        self._metrics.expansions_pending.value = len(pending)
        self._drive_what_is_ours()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _reopen(self, expansion: Expansion, pending: Iterable[Expansion]) -> None:
        """Open the barrier, unless a new topic of the same name has an expansion too.

        Barriers are keyed by name, and this process may have reported this one as closed.
        """
        if any(each.topic == expansion.topic and each.topic_id != expansion.topic_id for each in pending):
            return
        history = self._state.view.history(expansion.topic, expansion.topic_id)
        count = history.count
        if history.ended(expansion.proposal) is None:
            count = expansion.from_count if expansion.proposal in history.failed else None
        self._barriers.open_barrier(expansion.topic, count)
        _log.info("appends resumed", topic=expansion.topic, partitions="as before" if count is None else count)

    def _history(self, expansion: Expansion) -> ExpansionHistory:
        return self._state.view.history(expansion.topic, expansion.topic_id)

    async def _view_change(self, until: float) -> None:
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await changed.wait()

    # ---- append barriers of this process

    async def _close(self, closing: ex.Closing) -> None:
        expansion = closing.expansion
        while self._closings.get(expansion.topic_id) is closing:
            now = time.monotonic()
            process = self._state.heartbeats.process
            if process is None or not self._running:
                await self._view_change(now + QUERY_SECONDS)
                continue
            empty = self._barriers.barrier_empty(expansion.topic)
            match closing.query(self._history(expansion), process, empty=empty, now=now):
                case ex.IsClosed():
                    await self._view_change(now + QUERY_SECONDS)
                case ex.Wait(until):
                    await self._view_change(until)
                case ex.Append(records):
                    answer = await self._effects.append(ex.Append(records))
                    if isinstance(answer, ex.NotAppended):
                        _limited_log.warning(
                            "closed",
                            "append barrier not reported",
                            topic=expansion.topic,
                            reason=answer.reason,
                        )
                        await self._view_change(time.monotonic() + 1.0)
                    else:
                        _log.info("appends blocked", topic=expansion.topic, proposal=expansion.proposal)
                case ex.ProbeTransactions(partitions):
                    hold = closing.handle(
                        await self._effects.transactions(expansion.topic, partitions), time.monotonic()
                    )
                    if hold is not None and self._closings.get(expansion.topic_id) is closing:
                        self._barriers.close_barrier(expansion.topic, hold.but_for)

    # ---- running an expansion

    async def expand(self, request: ExpansionRequest, timeout_ms: int) -> ExpansionOutcome:
        """Run an expansion; return the response for its client within the client's timeout."""
        topic = request.topic
        try:
            await self._metadata.refresh([topic], timeout_seconds=QUERY_SECONDS)
            info = self._metadata.topic(topic)
            process = self._state.heartbeats.process
            if info is None or process is None:
                return ExpansionOutcome(topic, Error.UNKNOWN_TOPIC_OR_PARTITION, f"topic={topic}: not found")
            # A broker's metadata may be out of date.
            count = max(info.partition_count, self._state.view.history(topic, info.topic_id).count or 0)
            outcome = self._probed_at(request, count)
            if outcome is not None:
                return outcome
            await self._counts.record(info)
        except FencepostError as error:
            return ExpansionOutcome(topic, Error.REQUEST_TIMED_OUT, f"topic={topic}: {error}")
        expansion = Expansion(
            topic,
            info.topic_id,
            count,
            request.to_count,
            uuid4(),
            int(time.time() * 1000),
            process=process,
            assignments=request.assignments,
        )
        procedure = self._procedure(expansion)
        ended: asyncio.Future[ex.Ended] = asyncio.get_running_loop().create_future()
        self._spawn(self._drive(procedure, ended), f"expand {topic}")
        await asyncio.wait({ended}, timeout=timeout_ms / 1000 * _OF_ITS_TIMEOUT)
        if ended.done():
            return ExpansionOutcome(topic, ended.result().code, ended.result().message)
        where = procedure.step.value + (f": {procedure.waits_for}" if procedure.waits_for else "")
        counts = f"from={expansion.from_count} to={expansion.to_count}"
        text = f"{ex.IN_PROGRESS} topic={topic} {counts}: the expansion continues; it is at step {where}"
        return ExpansionOutcome(topic, Error.REQUEST_TIMED_OUT, text)

    @staticmethod
    def _probed_at(request: ExpansionRequest, count: int) -> ExpansionOutcome | None:
        """Response that needs no expansion; None to run it."""
        problem = ex.not_a_multiple(request.topic, count, request.to_count)
        if problem is not None and request.multiples_only:
            return ExpansionOutcome(request.topic, Error.INVALID_PARTITIONS, problem)
        if request.validate_only:
            return ExpansionOutcome(request.topic, Error.NONE, None)
        if problem is not None and request.ordered:
            _log.warning(
                "new partition count is no multiple of the old: keys may move between old partitions", reason=problem
            )
        return None

    def _procedure(self, expansion: Expansion, *, taken_over: bool = False) -> ex.Procedure:
        procedure = ex.Procedure(
            expansion,
            time.monotonic(),
            wait_seconds=self._limits.expansion_wait_seconds,
            in_doubt_seconds=self._limits.takeover_seconds,
            new_id=uuid4,
            clock_ms=lambda: int(time.time() * 1000),
            taken_over=taken_over,
        )
        self._procedures[expansion.proposal] = procedure
        return procedure

    def _drive_what_is_ours(self) -> None:
        """Resume this process's expansions, and claim those without a live process."""
        process = self._state.heartbeats.process
        if process is None or not self._running:
            return
        live = self._state.heartbeats.live(time.monotonic())
        for expansion in self._state.view.expansions.pending:
            if expansion.proposal in self._procedures:
                continue
            history = self._history(expansion)
            match ex.driver(history, own_names=self._state.heartbeats.names, process=process, live=live, new_id=uuid4):
                case ex.Drive():
                    _log.info("expansion taken over", topic=expansion.topic, proposal=expansion.proposal)
                    self._spawn(self._drive(self._procedure(expansion, taken_over=True)), f"expand {expansion.topic}")
                case ex.Claim(record) if expansion.proposal not in self._claiming:
                    self._claiming.add(expansion.proposal)
                    self._spawn(self._claim(expansion, ex.Append((record,))), f"claim {expansion.topic}")

    async def _claim(self, expansion: Expansion, claim: ex.Append) -> None:
        try:
            await self._effects.append(claim)  # the view shows which claim won
        finally:
            self._claiming.discard(expansion.proposal)

    async def _drive(self, procedure: ex.Procedure, ended: asyncio.Future[ex.Ended] | None = None) -> None:
        expansion = procedure.expansion
        end = ex.Ended(ex.Result.UNKNOWN, Error.UNKNOWN_SERVER_ERROR, "internal error: see the proxy's log")
        try:
            end = await self._carried_out(procedure)
        finally:
            self._procedures.pop(expansion.proposal, None)
            if ended is not None and not ended.done():
                ended.set_result(end)
        self._report_end(procedure, end)
        if end.result in (ex.Result.DONE, ex.Result.FAILED, ex.Result.UNORDERED):
            records = tuple(self._state.view.expansions.tidy(expansion))
            if records:
                await self._effects.append(ex.Append(records))

    async def _carried_out(self, procedure: ex.Procedure) -> ex.Ended:
        step, since = None, 0.0
        while True:
            now = time.monotonic()
            history, process = self._history(procedure.expansion), self._state.heartbeats.process
            may_append = {*self._state.heartbeats.may_append(now), *(() if process is None else (process,))}
            not_closed = tuple(may_append - history.closed)
            world = ex.World(history, self._state.heartbeats.names, not_closed, fresh=self._state.fresh)
            requested = procedure.query(world, now)
            if procedure.step is not step:
                step, since = procedure.step, now
                _log.info(
                    "expansion step",
                    topic=procedure.expansion.topic,
                    step=step.value,
                    proposal=procedure.expansion.proposal,
                )
            if isinstance(requested, ex.Ended):
                return requested
            if isinstance(requested, ex.Wait):
                if requested.why and now - since > _SAY_SECONDS:
                    _limited_log.info(
                        ("waits", procedure.expansion.proposal, step),
                        "expansion waits",
                        topic=procedure.expansion.topic,
                        step=step.value,
                        reason=requested.why,
                    )
                await self._view_change(requested.until)
                continue
            procedure.handle(await self._effects.answer(procedure, requested), time.monotonic())

    def _report_end(self, procedure: ex.Procedure, end: ex.Ended) -> None:
        expansion = procedure.expansion
        took = " ".join(f"{step.value}={seconds:.3f}" for step, seconds in procedure.took.items())
        ended = self._history(expansion).ended(expansion.proposal)
        blocked_ms = None if ended is None else ended.blocked_ms
        self._metrics.expansions.inc(end.result.value)
        if end.result is ex.Result.DONE and blocked_ms is not None:
            self._metrics.expansion_blocked_seconds.observe(blocked_ms / 1000)
        say = _log.info if end.result is ex.Result.DONE else _log.warning
        say(
            "expansion ended",
            topic=expansion.topic,
            result=end.result.value,
            partitions=f"{expansion.from_count}->{expansion.to_count}",
            blocked_seconds=None if blocked_ms is None else blocked_ms / 1000,
            thresholds=None if ended is None else ",".join(map(str, ended.thresholds)),
            seconds=took,
            reason=end.message,
        )

    # ---- expansions without the proxy

    def maintain(self, count_checked: Iterable[str]) -> None:
        """Periodic check for topics expanded without the proxy, and for expansions whose process died.

        `count_checked`: known topics with partition-count checks.
        """
        if not self._running:
            return
        self._state.heartbeats.may_append(time.monotonic())  # detects dead processes early
        self._drive_what_is_ours()
        if self._state.fresh:
            self._counts.maintain(count_checked, time.monotonic())

    # ---- status

    def status(self) -> tuple[ExpansionStatus, ...]:
        """Pending expansions first, then the last one of each existing topic."""
        view = self._state.view
        existing = [each for each in view.expansions.expanded if self._exists(each)]
        return tuple(self._status_of(each) for each in (*view.expansions.pending, *existing))

    def _exists(self, expansion: Expansion) -> bool:
        info = self._metadata.topic(expansion.topic)
        return info is not None and info.topic_id == expansion.topic_id

    def _status_of(self, expansion: Expansion) -> ExpansionStatus:
        state = "unordered" if expansion.unordered else "done" if expansion.ordered else "pending"
        procedure = self._procedures.get(expansion.proposal) if state == "pending" else None
        return ExpansionStatus(
            topic=expansion.topic,
            from_count=expansion.from_count,
            to_count=expansion.to_count,
            state=state,
            at_ms=expansion.ended_at_ms or expansion.at_ms,
            step=None if procedure is None else procedure.step.value,
            waits_for=None if procedure is None else procedure.waits_for or None,
            blocked_ms=expansion.blocked_ms,
            thresholds=expansion.thresholds,
        )

    def warnings(self) -> tuple[Reason, ...]:
        return tuple(_unordered(each) for each in self.status() if each.state == "unordered")


def _unordered(expansion: ExpansionStatus) -> Reason:
    return Reason(
        f"{expansion.topic} was expanded without the proxy from {expansion.from_count} to {expansion.to_count} "
        "partitions: key order is lost across this expansion",
        "The order cannot be restored. Add partitions only through the proxy: docs/partition-expansion.md.",
    )
