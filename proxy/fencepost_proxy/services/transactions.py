"""Validates transaction commits (`transactions/commit_validator.py` decides) and records failed appends in the state
topic.

The Kafka client needs DESCRIBE on the transactional ids of producers for checked topics, and READ on the topics.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from fencepost_policies.append import Check
from fencepost_policies.conditional_publish import CHECK_EXPECTED_OFFSETS
from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import UpstreamUnavailable, deadline_in, remaining
from fencepost_proxy.cluster.fetches import Fetches
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.metadata_cache import MetadataCache
from fencepost_proxy.cluster.producers import Producers
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.cluster.transactions import NotCoordinator, Transactions
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import FencepostError, LimitError
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.session.batches.reading import HERE_BYTES_MAX, HERE_STEPS_MAX
from fencepost_proxy.session.frames.messages import ValidateCommit
from fencepost_proxy.topics.abort_only import AbortOnly, cleared, encode_abort_only_record, encode_abort_only_tombstones
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transactions.commit_validator import (
    ONGOING,
    V2_FROM,
    Answer,
    CheckedTopic,
    CommitQuery,
    CommitValidator,
    Decision,
    Logged,
    LogIs,
    Marker,
    Outcome,
    ProducerAt,
    ProducersAre,
    QueryProducers,
    QueryTransaction,
    ReadBack,
    ReadState,
    StateRead,
    TimedOut,
    TransactionIs,
)
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import Monotonic, NodeId, Offset, ProducerId
from fencepost_proxy.wire.batch import BatchHeader, split_batches
from fencepost_proxy.wire.batch_scan import HeaderNames, scan_batch
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.records import Effort
from fencepost_proxy.wire.state_records import StateRecord
from fencepost_proxy.wire.uncompressed_batch import read_uncompressed_records

_log = logs.get("services.transactions")
_limited_log = logs.RateLimitedLog(_log)

#: The client waits for its append's response meanwhile; on timeout it gets a retriable error.
_STORE_SECONDS: Final = 10.0
_STOOD_STILL_SECONDS: Final = 1.0
_FETCH_BYTES: Final = 4_194_304
#: Retry interval for records that are not replicated yet, which brokers do not return.
_PROBE_AGAIN_SECONDS: Final = 0.02
#: Age after which an abort-only transaction is looked up: it may have ended without a proxy.
_OLD_SECONDS: Final = 3_600.0
_MAINTENANCE_SECONDS: Final = 60.0
_MAINTAINED_AT_ONCE: Final = 100
_COMMIT_MARKER: Final = 1
#: Small reads run in the event loop if they decompress to little; a thread does the others, one commit at a time.
_HERE_BYTES_MAX: Final = 65_536
#: Time slice of a thread that reads batches (one batch may exceed it).
_SLICE_SECONDS: Final = 0.25
#: Batches kept between attempts of a commit, for all transactions.
_REMEMBERED_MAX: Final = 100_000


@dataclass(slots=True, eq=False)
class _ReadSoFar:
    """Progress in one partition's log for one transaction. `slice`: current read, not cancelled with its commit."""

    at: int
    found: list[Logged] = field(default_factory=list)
    slice: asyncio.Task[None] | None = None


class Commits:
    """`policy`: of a topic, None without checks. `table`: this process's view of transactions. `in_sync`:
    min.insync.replicas of a topic.

    `state`: the state topic, once this process joins the others.
    """

    def __init__(
        self,
        limits: Limits,
        state: Callable[[], StateTopic],
        *,
        metadata: MetadataCache,
        transactions: Transactions,
        producers: Producers,
        log_ends: LogEnds,
        fetches: Fetches,
        in_sync: Callable[[str], Awaitable[int]],
        table: Table,
        configured: Iterable[Mapping[str, str]],
        policy: Callable[[str], TopicPolicy | None],
        names: HeaderNames,
        metrics: Metrics,
    ) -> None:
        self._metadata = metadata
        self._transactions = transactions
        self._producers = producers
        self._log_ends = log_ends
        self._fetches = fetches
        self._in_sync = in_sync
        self._limits = limits
        self._table = table
        self._policy = policy
        self._names = names
        self._metrics = metrics
        self._state = state
        off = Check.OFF.value
        self._by_file = any(each.get(CHECK_EXPECTED_OFFSETS.name, off) != off for each in configured)
        self._some_topic = False
        self._read: OrderedDict[tuple[object, ...], _ReadSoFar] = OrderedDict()
        #: One batch at a time: each may unpack to `limits.decompressed_bytes_max`.
        self._unpacking = asyncio.Semaphore(1)
        #: Whether commits need validation.
        self.validating = True

    def apply_records(self, records: Sequence[StateRecord]) -> None:
        """Apply new records of the state topic."""
        for record in records:
            if (name := cleared(record)) is not None:
                self._table.cleared(name)

    def refresh(self) -> None:
        """Update after a change of virtual configs."""
        self._some_topic = self._by_file or any(
            self._checked(topic) is not None for topic in self._state().view.topic_configs
        )
        self.probe(time.monotonic())

    def probe(self, now: float) -> None:
        """Call once a second: an expiring view cannot prove that no topic is checked."""
        self.validating = self._some_topic or now + 1.5 >= self._state().fresh_until

    def _checked(self, topic: str) -> CheckedTopic | None:
        policy = self._policy(topic)
        return CheckedTopic(policy.source_is_base) if policy is not None and policy.is_checked else None

    # ---- commits

    async def validate(self, requested: ValidateCommit, node_id: NodeId | None) -> Decision:
        """Validate a commit within `limits.commit_wait_seconds`; never raises.

        `node_id`: of the broker that the commit goes to, None if that is not known.
        """
        began = time.monotonic()
        try:
            decision = await self._validate(requested, node_id)
        except Exception as error:
            _log.crash("commit validation crashed", error)
            decision = Decision(Outcome.LATER, "unknown", f"commit validation crashed: {error!r}")
        if time.monotonic() - began > self._limits.commit_wait_seconds + _STOOD_STILL_SECONDS:
            # 1. This process was suspended. 2. The client committed through another proxy and began its next
            # transaction, under v1 with the same epoch. 3. Passing this commit now would commit half of that one.
            decision = Decision(Outcome.LATER, "unknown", "this process was suspended during the validation")
        self._metrics.commit_wait_seconds.observe(time.monotonic() - began)
        self._metrics.commits.inc(
            decision.outcome.name.lower() if decision.outcome is Outcome.PASS else decision.reason
        )
        if decision.outcome is not Outcome.PASS:
            _limited_log.warning(
                f"commit {decision.reason}",
                "commit refused: the client must abort"
                if decision.outcome is Outcome.REFUSE
                else "commit deferred: the client must retry",
                transactional_id=requested.transactional_id,
                producer_id=requested.producer_id,
                producer_epoch=requested.producer_epoch,
                reason=decision.message,
            )
        return decision

    async def _validate(self, requested: ValidateCommit, node_id: NodeId | None) -> Decision:
        deadline = deadline_in(self._limits.commit_wait_seconds)
        validate = CommitValidator(
            self._table,
            requested.transactional_id,
            requested.producer_id,
            requested.producer_epoch,
            v2=requested.end_txn_version >= V2_FROM,
            is_checked=self._checked,
            may_be_committed=requested.may_be_committed,
        )
        stated = validate.begin()
        queried: set[asyncio.Task[Answer]] = set()
        try:
            while not isinstance(stated, Decision):
                queried.update(
                    asyncio.create_task(self._answer(query, node_id, deadline), name=f"{query}") for query in stated
                )
                done, queried = await asyncio.wait(
                    queried, timeout=remaining(deadline), return_when=asyncio.FIRST_COMPLETED
                )
                stated = () if done else validate.handle(TimedOut())
                for each in done:
                    more = validate.handle(each.result())
                    if isinstance(more, Decision) or isinstance(stated, Decision):
                        stated = stated if isinstance(stated, Decision) else more
                    else:
                        stated = (*stated, *more)
            if stated.outcome is not Outcome.LATER:
                self._forget(requested.producer_id)
            return stated
        finally:
            for each in queried:
                each.cancel()

    async def _answer(self, query: CommitQuery, node_id: NodeId | None, deadline: Monotonic) -> Answer:
        """Run a query; a failure is a result too."""
        try:
            match query:
                case ReadState(producer_id, producer_epoch):
                    await self._state().read_to_end(timeout_seconds=remaining(deadline))
                    fresh = self._state().fresh
                    return StateRead(
                        self._state().view.abort_only_records.of(producer_id, producer_epoch) if fresh else None
                    )
                case QueryTransaction(transactional_id):
                    return await self._transaction_at(node_id, transactional_id, deadline)
                case QueryProducers(producer_id, partitions):
                    states = await self._producers.producer_at(
                        ProducerId(producer_id), partitions, in_sync=self._in_sync, timeout_seconds=remaining(deadline)
                    )
                    return ProducersAre(
                        {
                            tp: None
                            if state is None
                            else ProducerAt(state.epoch, state.last_sequence, state.current_txn_start_offset)
                            for tp, state in states.items()
                        }
                    )
                case ReadBack():
                    return await self._read_back(query, deadline)
        except FencepostError as error:
            _limited_log.error(
                f"{type(query).__name__}",
                "commit validation lacks data (the proxy's principal needs DESCRIBE on transactional ids, and READ on "
                "checked topics)",
                queried=query,
                reason=error,
            )
        match query:
            case ReadState():
                return StateRead(None)
            case QueryTransaction():
                return TransactionIs(known=False)
            case QueryProducers():
                return ProducersAre({})
            case ReadBack(_, partition):
                return LogIs(partition, None)

    async def _transaction_at(
        self, node_id: NodeId | None, transactional_id: str, deadline: Monotonic
    ) -> TransactionIs:
        elsewhere = TransactionIs(known=False, elsewhere=True)
        if node_id is None:
            return elsewhere
        try:
            found = await self._transactions.describe_at(node_id, transactional_id, timeout_seconds=remaining(deadline))
        except NotCoordinator:
            return elsewhere
        if found is None:
            return TransactionIs(known=True)
        return TransactionIs(True, found.producer_id, found.producer_epoch, found.state, found.partitions)

    # ---- the log

    async def _read_back(self, query: ReadBack, deadline: Monotonic) -> LogIs:
        """Read up to the current log end, waiting for records that are not replicated yet.

        After `deadline` the next attempt continues here.
        """
        partition = query.partition
        end = (await self._log_ends.log_end(partition, timeout_seconds=remaining(deadline))).offset
        so_far = self._so_far(query)
        while so_far.at < end:
            before = so_far.at
            if so_far.slice is None:
                fetched = await self._fetches.fetch(
                    partition,
                    Offset(before),
                    bytes_max=_FETCH_BYTES,
                    committed=False,
                    timeout_seconds=remaining(deadline),
                )
                if fetched.out_of_range:
                    return LogIs(partition, None, out_of_range=True)
                if so_far.slice is None and so_far.at == before:  # otherwise another attempt of this commit reads
                    so_far.slice = asyncio.create_task(self._read_on(so_far, query, fetched.records))
                    so_far.slice.add_done_callback(lambda task: task.cancelled() or task.exception())
            if so_far.slice is not None:
                await asyncio.shield(so_far.slice)
            if so_far.at == before:
                if not remaining(deadline):
                    return LogIs(partition, None)
                await asyncio.sleep(_PROBE_AGAIN_SECONDS)
        return LogIs(partition, tuple(so_far.found))

    def _so_far(self, query: ReadBack) -> _ReadSoFar:
        """Read progress; keyed by leader epoch and topic id, because the log may differ after either changes."""
        info, leader = self._metadata.topic(query.partition.topic), self._metadata.leader(query.partition)
        log = None if info is None else info.topic_id, None if leader is None else leader.leader_epoch
        key = query.producer_id, query.partition, query.from_offset, query.checked, log
        so_far = self._read.setdefault(key, _ReadSoFar(query.from_offset))
        self._read.move_to_end(key)
        count = sum(len(each.found) + 1 for each in self._read.values())
        while count > _REMEMBERED_MAX and len(self._read) > 1:
            _, oldest = self._read.popitem(last=False)
            count -= len(oldest.found) + 1
        return so_far

    def _forget(self, producer_id: int) -> None:
        for key in [key for key in self._read if key[0] == producer_id]:
            del self._read[key]

    async def _read_on(self, so_far: _ReadSoFar, query: ReadBack, records: bytes) -> None:
        try:
            try:
                if len(records) > _HERE_BYTES_MAX:
                    raise LimitError("too large for the event loop")
                at, found = self._slice(query, records, Effort(HERE_BYTES_MAX, HERE_STEPS_MAX))
            except LimitError:
                async with self._unpacking:
                    at, found = await asyncio.to_thread(self._slice, query, records)
            so_far.at = max(so_far.at, at)
            so_far.found += found
        finally:
            so_far.slice = None

    def _slice(self, query: ReadBack, records: bytes, effort: Effort | None = None) -> tuple[int, list[Logged]]:
        """Next offset, and the batches found. Raises `LimitError` if `effort` does not suffice."""
        until = time.monotonic() + _SLICE_SECONDS
        at, found = 0, []
        for header, batch in split_batches(memoryview(records)):
            at = header.base_offset + header.last_offset_delta + 1
            if header.producer_id == query.producer_id:
                found.append(self._logged(query, header, batch, effort))
            if time.monotonic() >= until:
                break
        return at, found

    def _logged(self, query: ReadBack, header: BatchHeader, batch: memoryview, effort: Effort | None) -> Logged:
        logged = Logged(header.base_offset, header.record_count, header.producer_epoch, header.base_sequence)
        try:
            if header.is_control:
                marker = next(int.from_bytes((r.key or b"")[2:4]) for r in read_uncompressed_records(header, batch))
                kind = Marker.COMMIT if marker == _COMMIT_MARKER else Marker.ABORT
                return Logged(header.base_offset, 1, header.producer_epoch, -1, marker=kind)
            end = header.base_offset + header.last_offset_delta + 1
            if query.checked[0] <= header.base_offset and end <= query.checked[1]:
                return logged
            scan = scan_batch(
                batch,
                self._names,
                query.partition,
                source_is_base=False,
                decompressed_bytes_max=self._limits.decompressed_bytes_max,
                header=header,
                effort=effort,
            )
        except (MalformedBatch, LimitError) as error:
            if effort is not None and isinstance(error, LimitError):
                raise
            return Logged(*_position(logged), conditional=True)  # its offset cannot be verified
        if scan.contradiction is not None or scan.unreadable is not None:
            return Logged(*_position(logged), conditional=True)
        expected = scan.expected_base_offset
        return Logged(*_position(logged), conditional=expected is not None, expected=expected)

    # ---- abort-only transactions in the state topic

    async def record_abort_only(self, abort_only: AbortOnly, instead_of: Iterable[UUID] = ()) -> bool:
        """Record an abort-only transaction; False if it is not known to be stored."""
        try:
            records = encode_abort_only_record(abort_only._replace(at_ms=int(time.time() * 1000)), instead_of)
            await self._state().append(records, timeout_seconds=_STORE_SECONDS)
        except FencepostError as error:
            _limited_log.error(
                "record",
                "failed to record an abort-only transaction: the client must retry",
                transactional_id=abort_only.transactional_id,
                reason=error,
            )
            return False
        except Exception as error:
            _log.crash("failed to persist abort-only marker", error)
            return False
        return True

    async def clear_abort_only(self, producer_id: int, producer_epoch: int) -> bool:
        """Clear the records of an ended transaction; False if some may remain."""
        try:
            await self._state().read_to_end(timeout_seconds=_STORE_SECONDS)
            abort_only_records = self._state().view.abort_only_records.of(producer_id, producer_epoch)
            await self._state().append(encode_abort_only_tombstones(abort_only_records), timeout_seconds=_STORE_SECONDS)
        except FencepostError as error:
            _limited_log.warning(
                "clear",
                "failed to clear an ended transaction: the producer's next commit may be refused once",
                producer_id=producer_id,
                reason=error,
            )
            return False
        except Exception as error:
            _log.crash("failed to clear abort-only marker", error)
            return False
        return True

    async def run(self) -> None:
        """Clear transactions that ended without a proxy, indefinitely."""
        while True:
            await asyncio.sleep(_MAINTENANCE_SECONDS)
            try:
                await self.maintain(time.time() - _OLD_SECONDS)
            except FencepostError as error:
                _limited_log.warning("old", "lookup of old transactions failed", reason=error)

    async def maintain(self, recorded_before: float) -> None:
        """Clear those of some records older than that time (Unix seconds) whose transactions have ended.

        Raises `UpstreamUnavailable`, `StateError`.
        """
        over, failure = [], None
        for abort_only in self._state().view.abort_only_records.older_than(int(recorded_before * 1000))[
            :_MAINTAINED_AT_ONCE
        ]:
            try:
                if await self._has_ended(abort_only):
                    over.append(abort_only)
            except UpstreamUnavailable as error:
                if error.error_code is None:
                    failure = error
                    break
        await self._state().append(encode_abort_only_tombstones(over))
        if failure is not None:
            raise failure

    async def _has_ended(self, abort_only: AbortOnly) -> bool:
        """For every broker, since one that is cut off may take itself for the coordinator, with old state."""
        answered, producer = False, (abort_only.producer_id, abort_only.producer_epoch)
        for node_id in self._metadata.known.brokers:
            try:
                found = await self._transactions.describe_at(node_id, abort_only.transactional_id)
            except NotCoordinator:
                continue
            answered = True
            if found is not None and found.state == ONGOING and (found.producer_id, found.producer_epoch) == producer:
                return False
        return answered


def _position(logged: Logged) -> tuple[int, int, int, int]:
    return logged.base_offset, logged.record_count, logged.producer_epoch, logged.base_sequence
