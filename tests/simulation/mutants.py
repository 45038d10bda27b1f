"""Seeded defects: each breaks one rule of the proxy, and the simulation must detect it.

Each is a monkeypatch of the code under test. `python -m tests.simulation.mutants` tries all and writes docs/mutants.md.
"""

from __future__ import annotations

import inspect
import re
import struct
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer import publishing as publishing_module
from fencepost_proxy.sequencer import sequencer as sequencer_module
from fencepost_proxy.sequencer import state as state_module
from fencepost_proxy.sequencer.in_doubt import InDoubtResolver
from fencepost_proxy.sequencer.memory import Memory
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session import checked_produce as produce_module
from fencepost_proxy.session import fast_path as fast_path_module
from fencepost_proxy.session import produce_exchange as exchange_module
from fencepost_proxy.session import reading as reading_module
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.messages import ToSequencer
from fencepost_proxy.session.produce_exchange import ProduceExchange
from fencepost_proxy.session.session import Session
from fencepost_proxy.topics.barrier import AppendBarrier
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.transactions import commit_validator as validator_module
from fencepost_proxy.transactions.commit_validator import CommitValidator
from tests.simulation import world as world_module
from tests.simulation.scenarios import SCENARIOS, run


class Patch:
    """Replaced attributes, and their originals."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        if isinstance(target, type):
            target = next(each for each in target.__mro__ if name in each.__dict__)  # a session inherits its parts
        self._old.append((target, name, target.__dict__[name] if isinstance(target, type) else getattr(target, name)))
        setattr(target, name, value)

    def edit(self, target: type, name: str, *changes: tuple[str, str]) -> None:
        """Replace text in a method's source. Raise TypeError if the text is missing, because the code has changed."""
        original = getattr(target, name)
        source = textwrap.dedent(inspect.getsource(original))
        for old, new in changes:
            if old not in source:
                raise TypeError(f"{target.__name__}.{name} has no {old!r}")
            source = source.replace(old, new)
        scope: dict[str, Any] = {}
        flags = inspect.unwrap(original).__code__.co_flags & annotations.compiler_flag
        code = compile(source, f"<{name} with a defect>", "exec", flags=flags)
        exec(code, original.__globals__, scope)
        self.set(target, name, scope[name])

    def undo(self) -> None:
        for target, name, value in reversed(self._old):
            setattr(target, name, value)


@dataclass(frozen=True)
class Mutant:
    """`breaks` – the defect; `rule` – the rule that it violates; `scenarios` – where it is tried."""

    name: str
    breaks: str
    rule: str
    scenarios: tuple[str, ...]
    apply: Callable[[Patch], None]


MUTANTS: list[Mutant] = []


def mutant(breaks: str, rule: str, *scenarios: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def register(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(apply.__name__.replace("_", "-"), breaks, rule, scenarios, apply))
        return apply

    return register


# ----------------------------------------------------------------------------------------------------------- comparison


@mutant("appends are sent unfenced: only the sequencer compares", "Kafka itself compares", "race", "one-broker")
def no_fence(patch: Patch) -> None:
    orig = PartitionSequencer.__init__

    def init(
        self: PartitionSequencer,
        partition: Any,
        limits: g.SequencerLimits,
        names: Any = state_module.DEFAULT_NAMES,
    ) -> None:
        orig(self, partition, replace(limits, fencing=False), names)

    patch.set(PartitionSequencer, "__init__", init)


@mutant("the high watermark is used as the log end", "the log end is the leader's log end offset", "cluster")
def high_watermark_for_log_end(patch: Patch) -> None:
    patch.set(world_module.ControlCall, "log_end", lambda self, partition: partition.replicas[self.node].high_watermark)


@mutant("sequences do not wrap", "sequence = (expected − sequence offset) mod 2³¹", "race")
def no_wrap(patch: Patch) -> None:
    for module in (sequencer_module, publishing_module):
        patch.set(module, "SEQUENCE_MODULUS", 1 << 40)


@mutant(
    "a response's base offset is not compared", "0 means success only at the expected offset", "bypass", "bypass-true"
)
def base_offset_not_compared(patch: Patch) -> None:
    orig = PartitionSequencer._fenced_success

    def success(self: PartitionSequencer, pending: g.PendingAppend, result: Any, now: float) -> None:
        if result.log_append_time_ms == -1 and pending.at is not None:
            self._appended_at(pending, -1, result.log_start_offset, now)
        else:
            orig(self, pending, result, now)

    patch.set(PartitionSequencer, "_fenced_success", success)


@mutant("a duplicate is reported as success", "the batch there may be another writer's: rule 5", "race", "one-broker")
def duplicate_is_success(patch: Patch) -> None:
    orig = PartitionSequencer._fenced_success
    patch.set(
        PartitionSequencer,
        "_fenced_success",
        lambda self, pending, result, now: orig(self, pending, replace(result, log_append_time_ms=-1), now),
    )


@mutant("with LogAppendTime, a 0 is not read back", "new appends and duplicates look alike: rule 4", "log-append-time")
def log_append_time_not_read_back(patch: Patch) -> None:
    patch.set(
        PartitionSequencer,
        "_fenced_success",
        lambda self, pending, result, now: self._appended_at(pending, result.log_append_time_ms, -1, now),
    )


@mutant(
    "a violation is reported as a mismatch",
    "44 without OFFSET_VIOLATION means nothing appended",
    "bypass",
    "bypass-true",
)
def violation_not_reported(patch: Patch) -> None:
    def elsewhere(self: PartitionSequencer, pending: g.PendingAppend, result: Any, now: float) -> None:
        self._unconfirm()
        message = f"OFFSET_MISMATCH topic=orders partition=0 expected={pending.at} actual={result.base_offset}"
        self._refuse(pending, Refusal(Error.POLICY_VIOLATION, "offset_mismatch", message, result.base_offset))

    patch.set(PartitionSequencer, "_appended_elsewhere", elsewhere)


@mutant(
    "an append advances the known log end by too few records",
    "the log end advances by the batch's record count",
    "pipelines",
    "race",
)
def end_moves_by_one(patch: Patch) -> None:
    orig = PartitionSequencer._record_appended

    def appended_batch(self: PartitionSequencer, pending: g.PendingAppend, *rest: Any) -> Any:
        recorded = orig(self, pending, *rest)
        if pending.append.record_count > 1 and self._log_end == pending.at + pending.append.record_count:  # type: ignore[operator]
            self._log_end -= 1
            self._end_as_of = float("inf")
        return recorded

    patch.set(PartitionSequencer, "_record_appended", appended_batch)


# ------------------------------------------------------------------------------------- confirmed and unconfirmed fences


@mutant(
    "a confirmed fence stays confirmed", "confirmation lasts a quarter of producer.id.expiration.ms", "idle-pipelines"
)
def confirmed_indefinitely(patch: Patch) -> None:
    patch.set(
        PartitionSequencer,
        "_is_confirmed",
        lambda self, pending, now: self.phase is sequencer_module.Phase.OPEN and self._confirmed_until > 0,
    )


@mutant(
    "appends are pipelined while the fence is unconfirmed",
    "pipeline only with a confirmed fence: rule 13",
    "refused-pipelines",
)
def unconfirmed_pipeline(patch: Patch) -> None:
    def fits(self: PartitionSequencer, pending: g.PendingAppend, now: float) -> bool:
        flight = self._in_flight
        same = all(o.kind.fenced and o.connection == pending.connection for o in flight)
        return not flight or (pending.kind.fenced and self.phase is sequencer_module.Phase.OPEN and same)

    patch.set(PartitionSequencer, "_fits_with_in_flight", fits)


@mutant("batches with old or missing timestamps are fenced", "fence only fresh timestamps: rules 2, 3", "expiry")
def any_timestamp(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_timestamps", staticmethod(lambda pending, snapshot, now: None))


@mutant(
    "unfenced appends are sent while fenced ones are in flight",
    "an unfenced append moves the log end",
    "true-one",
    "liars-true",
)
def unfenced_with_fenced(patch: Patch) -> None:
    orig = PartitionSequencer._fits_with_in_flight
    patch.set(
        PartitionSequencer,
        "_fits_with_in_flight",
        lambda self, pending, now: pending.kind is g.AppendMode.PASS_THROUGH or orig(self, pending, now),
    )


@mutant(
    "unfenced appends do not change the sequence offset",
    "every unfenced append changes the sequence offset: rule 6",
    "true-one",
    "liars-true",
)
def sequence_offset_not_updated(patch: Patch) -> None:
    patch.set(
        PartitionSequencer, "_pass_through_success", lambda self, pending, result, now: self._answer(pending, result)
    )
    patch.set(PartitionSequencer, "_moved_by_pass_through", lambda self, end, pending: None)


# ----------------------------------------------------------------------------------------------------------- fence base


@mutant("appends outside the fence sequence are not noticed", "publish a new fence base: rule 6", "bypass")
def base_never_published(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_fence_outside_log", staticmethod(lambda snapshot: None))


@mutant("the new fence base keeps the old epoch", "a new fence base needs a new epoch: rule 6", "bypass")
def epoch_not_raised(patch: Patch) -> None:
    orig = world_module.ControlCall._publish
    patch.set(
        world_module.ControlCall,
        "_publish",
        lambda self, effect: orig(self, replace(effect, producer_epoch=max(0, effect.producer_epoch - 1))),
    )


@mutant("the partition's current epoch is not adopted", "adopt what DescribeProducers reports: rule 15", "bypass-true")
def epoch_not_adopted(patch: Patch) -> None:
    orig = PartitionSequencer._log_end_read

    def read(self: PartitionSequencer, snapshot: g.LogEndSnapshot, now: float) -> None:
        orig(self, snapshot, now)
        if self.phase is sequencer_module.Phase.OPEN:
            self._epoch = snapshot.fence_base[0]

    patch.set(PartitionSequencer, "_log_end_read", read)


@mutant("a producer id is not replaced after its last epoch", "continue with the next producer id", "rotating")
def epochs_run_out(patch: Patch) -> None:
    orig = PartitionSequencer._new_base

    def last(self: PartitionSequencer, snapshot: g.LogEndSnapshot, reason: str) -> g.PublishBase:
        requested = orig(self, snapshot, reason)
        return replace(requested, producer_epoch=min(requested.producer_epoch, self._limits.producer_epochs - 1))

    patch.set(PartitionSequencer, "_new_base", last)


@mutant("published fence bases are not read", "adopt the published base after error 47: rule 6", "bypass")
def base_not_read(patch: Patch) -> None:
    patch.set(StateView, "fence_base", lambda self, topic_id, partition: None)


@mutant("45 and 47 are relayed to the client", "no bare 45 for a fenced append", "race", "one-broker", "true-many")
def fence_errors_relayed(patch: Patch) -> None:
    for module in (sequencer_module, state_module):
        patch.set(module, "FENCE_ERRORS", frozenset())


# ----------------------------------------------------------------------------------------------------- in-doubt appends


@mutant(
    "7, 20 and errors with a base offset are final",
    "an error after the append is no refusal: rule 1",
    "cluster",
    "one-broker",
)
def timeout_is_final(patch: Patch) -> None:
    orig = PartitionSequencer._answered

    def answered(self: PartitionSequencer, pending: g.PendingAppend, result: Any, now: float) -> None:
        if result.error_code != 0:
            result = replace(result, error_code=Error.NOT_LEADER_OR_FOLLOWER, base_offset=-1)
        orig(self, pending, result, now)

    patch.set(PartitionSequencer, "_answered", answered)


@mutant(
    "a retry is sent to the log end, although its first attempt was appended since the last read",
    "only the log decides: rule 1",
    "wide-logged-in",
)
def first_attempt_ignored(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_first_try_decides", lambda self, pending, end, now: None)


@mutant("an error for a resend is final", "only the log decides: rule 1", "resends")
def resend_error_is_final(patch: Patch) -> None:
    def resent(self: PartitionSequencer, pending: g.PendingAppend, result: Any, now: float) -> None:
        if pending in self._in_doubt_appends:
            if result is None:
                self._resolve_later(pending, now)
            else:
                self._resolved(pending, now)
                self._answer(pending, result)

    patch.set(PartitionSequencer, "_resent", resent)


@mutant(
    "the log is not read again for in-doubt appends", "in-doubt appends are always resolved", "one-broker", "cluster"
)
def no_second_read(patch: Patch) -> None:
    orig = PartitionSequencer._tick

    def tick(self: PartitionSequencer, now: float) -> None:
        if self.phase is sequencer_module.Phase.RESOLVING:
            self._retry_at = None
        orig(self, now)

    patch.set(PartitionSequencer, "_tick", tick)


@mutant(
    "the append of a lost client leaves the sequencer",
    "a lost client does not release its append",
    "true-one",
    "liars-true",
)
def client_loss_releases(patch: Patch) -> None:
    lost = Session._client_lost
    canceled = PartitionSequencer._canceled

    def client_lost(self: Session, now: float) -> None:
        self._disable_fast_path()
        for produce in self._produce_in_flight.values():
            for key, pending in produce.pending_appends.items():
                if key in produce.sent and key not in produce.results:
                    self._commands.append(ToSequencer(pending, g.Canceled(pending)))
        lost(self, now)

    def out(self: PartitionSequencer, pending: g.PendingAppend) -> None:
        if pending in self._in_flight:
            self._in_flight.remove(pending)
        else:
            canceled(self, pending)

    patch.set(Session, "_client_lost", client_lost)
    patch.set(PartitionSequencer, "_canceled", out)


# -------------------------------------------------------------------------------------------------------------- retries


@mutant("a producer's retry is not recognized", "recognize retries before comparing offsets", "retries")
def retry_not_recognized(patch: Patch) -> None:
    patch.set(Memory, "retry_of", lambda self, pending: None)
    patch.set(PartitionSequencer, "_known_retry", lambda self, pending: False)


@mutant(
    "a retry is recognized by its sequence only",
    "the same sequence with other records is another batch",
    "liars",
    "liars-true",
)
def retry_without_digest(patch: Patch) -> None:
    def retry_of(self: Memory, pending: g.PendingAppend) -> Any:
        known = self.fenced.get(pending.producer, ())
        return next((appended_batch for first, appended_batch in known if first == pending.append.base_sequence), None)

    patch.set(Memory, "retry_of", retry_of)


@mutant(
    "equal records count as the client's append", "equal records do not prove success: rule 5", "race", "one-broker"
)
def equality_is_success(patch: Patch) -> None:
    patch.set(
        PartitionSequencer,
        "_names_itself",
        staticmethod(lambda pending, there: there.digest == pending.digest),
    )


@mutant("a write-id alone proves success", "the records must be equal too", "liars")
def write_id_alone(patch: Patch) -> None:
    orig = PartitionSequencer._end_mismatch

    def end(self: PartitionSequencer, pending: g.PendingAppend, there: Any, now: float, **more: Any) -> None:
        if there is not None and self._names_itself(pending, there):
            self._accept(pending, there)
        else:
            orig(self, pending, there, now, **more)

    patch.set(PartitionSequencer, "_end_mismatch", end)


@mutant("write-ids are ignored", "a named write is recognized while it is in the log", "one-broker", "race")
def write_id_ignored(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_names_itself", staticmethod(lambda pending, there: False))


@mutant("POSSIBLY_YOURS is omitted", "report an equal batch at the expected offset: rule 14", "race", "one-broker")
def possibly_yours_omitted(patch: Patch) -> None:
    orig = PartitionSequencer._end_mismatch

    def end(self: PartitionSequencer, pending: g.PendingAppend, there: Any, now: float, **more: Any) -> None:
        own = there is not None and there.digest == pending.digest and self._names_itself(pending, there)
        orig(self, pending, there if own else None, now, **(more if own else {}))

    patch.set(PartitionSequencer, "_end_mismatch", end)


@mutant("a remembered log end is reported", "actual was the log end during the call", "race", "one-broker")
def old_actual(patch: Patch) -> None:
    orig = PartitionSequencer._decide

    def decide(self: PartitionSequencer, pending: g.PendingAppend, now: float) -> bool:
        submitted_at, pending.submitted_at = pending.submitted_at, float("-inf")
        try:
            return orig(self, pending, now)
        finally:
            pending.submitted_at = submitted_at

    patch.set(PartitionSequencer, "_decide", decide)


# ------------------------------------------------------------------------------------------------- transactions, topics


@mutant("open transactions are ignored", "a marker takes an offset: rule 7", "calm-transactions")
def open_transactions_ignored(patch: Patch) -> None:
    orig = PartitionSequencer._log_end_read
    patch.set(
        PartitionSequencer,
        "_log_end_read",
        lambda self, snapshot, now: orig(self, replace(snapshot, open_transactions=frozenset()), now),
    )
    patch.set(PartitionSequencer, "_joined", lambda self, transactional_id, believe_from: None)


@mutant(
    "a transaction that adds the partition is not recorded",
    "markers come even where nothing was written: rule 7",
    "calm-stranded",
)
def joins_not_recorded(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_joined", lambda self, transactional_id, believe_from: None)


@mutant(
    "a transaction adds the partition while fenced appends are in flight",
    "its marker would move them by one",
    "stranded",
)
def joins_at_once(patch: Patch) -> None:
    def let_join(self: PartitionSequencer) -> None:
        self._effects += [g.MayJoin(connection) for _, connection in self._joining]
        self._joining = {}

    patch.set(PartitionSequencer, "_let_join", let_join)


@mutant("AddPartitionsToTxn is delayed indefinitely", "it proceeds once all fenced appends are answered", "atomic")
def joins_never(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_let_join", lambda self: None)


@mutant(
    "a transaction that holds a partition waits for another one", "two would wait for each other", "atomic-crossing"
)
def transactions_deadlock(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_may_not_wait", lambda self, pending, snapshot, now: False)


@mutant(
    "partitions that a transaction holds through another process are ignored",
    "with several processes the wait is limited",
    "atomic-crossing-v2",
)
def transactions_deadlock_across_processes(patch: Patch) -> None:
    orig = PartitionSequencer._may_not_wait

    def may_not_wait(self: PartitionSequencer, pending: g.PendingAppend, snapshot: Any, now: float) -> bool:
        pending.alone = True
        return orig(self, pending, snapshot, now)

    patch.set(PartitionSequencer, "_may_not_wait", may_not_wait)


@mutant(
    "a transaction without records on the partition blocks others",
    "two that added each other's partitions would deadlock",
    "atomic-crossing",
)
def joined_counts_as_written(patch: Patch) -> None:
    orig = PartitionSequencer._another_transaction_is_open

    def is_open(self: PartitionSequencer, pending: g.PendingAppend, snapshot: Any) -> bool:
        return orig(self, pending, snapshot) or bool(self._transactions.keys() - {pending.transactional_id})

    patch.set(PartitionSequencer, "_another_transaction_is_open", is_open)


@mutant(
    "another transaction's records do not block a transaction",
    "they do until its marker is read back",
    "atomic-calm",
)
def open_records_ignored(patch: Patch) -> None:
    orig = PartitionSequencer._another_transaction_is_open

    def is_open(self: PartitionSequencer, pending: g.PendingAppend, snapshot: Any) -> bool:
        return not pending.append.transactional and orig(self, pending, snapshot)

    patch.set(PartitionSequencer, "_another_transaction_is_open", is_open)


@mutant(
    "a transactional append relies on a log end read before it arrived",
    "its producer's previous marker may have come since",
    "atomic-calm",
)
def previous_marker_ignored(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_knows_transaction", staticmethod(lambda pending, snapshot: True))


@mutant("an ending transaction is not waited for", "its markers are still to come", "atomic-calm")
def ending_ignored(patch: Patch) -> None:
    orig = PartitionSequencer._log_end_read
    patch.set(
        PartitionSequencer,
        "_log_end_read",
        lambda self, snapshot, now: orig(self, replace(snapshot, ending_transactions=frozenset()), now),
    )


@mutant(
    "a transactional batch at its expected offset is not recognized",
    "its sequence identifies it",
    "atomic",
    "atomic-v2",
)
def own_batch_not_recognized(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_is_itself", staticmethod(lambda found, there, pending: False))


@mutant(
    "a transactional batch at another offset is not searched for",
    "44 alone means nothing appended",
    "atomic-bypassing",
)
def taken_sequence_ignored(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_sequence_is_taken", lambda self, pending: False)


@mutant(
    "a batch is refused while an earlier attempt may be queued",
    "it could be appended after its refusal",
    "atomic",
    "atomic-bypassing",
)
def refused_while_queued(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_is_queued", lambda self, pending, now: False)


@mutant(
    "in a transaction, a duplicate is reported as success",
    "an earlier transaction's batch may have its sequence",
    "atomic-bypassed",
    "atomic-cluster",
)
def transactional_duplicate_is_success(patch: Patch) -> None:
    orig = PartitionSequencer._pass_through_success
    patch.set(
        PartitionSequencer,
        "_pass_through_success",
        lambda self, pending, result, now: orig(self, pending, replace(result, log_append_time_ms=-1), now),
    )


# -------------------------------------------------------------------------------------------------------------- commits


@mutant("a commit is relayed without validation", "the commit validator decides", "atomic", "atomic-v2")
def commits_not_validated(patch: Patch) -> None:
    patch.set(CommitValidator, "begin", lambda self: validator_module.PASS)


@mutant(
    "any client may use any transactional id", "Kafka authorizes the use of a transactional id", "atomic-unauthorized"
)
def transactional_id_not_authorized(patch: Patch) -> None:
    def prove_use(self: Session, transactional_id: str, correlation_id: int, client_id: Any, done: Any) -> None:
        self._may_use = transactional_id
        done(True)

    patch.set(Session, "_prove_use", prove_use)


@mutant(
    "an authorized transactional id admits any producer id",
    "Kafka would add the batch to that producer's open transaction",
    "atomic-unauthorized",
    "atomic-unauthorized-v2",
)
def anothers_producer_id(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_is_anothers_producer", staticmethod(lambda pending, snapshot: False))


@mutant(
    "refusals by other processes are not read",
    "abort-only transactions are in the state topic",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def abort_only_not_read(patch: Patch) -> None:
    orig = CommitValidator.handle

    def handle(self: CommitValidator, answer: Any) -> Any:
        return orig(self, validator_module.StateRead(()) if isinstance(answer, validator_module.StateRead) else answer)

    patch.set(CommitValidator, "handle", handle)


@mutant(
    "a refusal is reported before it is stored",
    "every process must refuse the commit",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def reported_before_stored(patch: Patch) -> None:
    patch.set(Session, "_waits_for_records", lambda self, pending_response, produce: False)


@mutant(
    "appends that this process did not handle are not read back",
    "each batch in the log states its expected offset",
    "atomic-roaming",
)
def log_not_read_back(patch: Patch) -> None:
    patch.set(CommitValidator, "_batches", lambda self, partition, batches: None)


@mutant(
    "an undecided commit passes", "an undecided commit is postponed", "atomic-cluster", "atomic-cluster-v2", "atomic-v2"
)
def undecided_is_pass(patch: Patch) -> None:
    patch.set(validator_module, "_later", lambda message: validator_module.PASS)


@mutant("abort-only records are not cleared", "the next transaction may have the same epoch", "atomic-crossing")
def abort_only_not_cleared(patch: Patch) -> None:
    patch.set(
        world_module.Notes,
        "clear_abort_only",
        lambda self, connection, requested: self._reported(connection, requested.token, True),
    )


@mutant(
    "an append whose request has ended stays pending",
    "an unreported outcome delays no commit",
    "atomic-roaming",
    "atomic-cluster",
)
def pending_indefinitely(patch: Patch) -> None:
    patch.set(Session, "_end_appends", lambda self, produce: None)


@mutant(
    "a commit whose connection broke is waited for indefinitely",
    "the next transaction may have the same epoch",
    "atomic-roaming-v1",
    "atomic-roaming",
)
def lost_commits_waited_for(patch: Patch) -> None:
    patch.set(Session, "_leave_commits", lambda self: None)


@mutant(
    "only appends without a result are released",
    "an unreported outcome delays no commit",
    "atomic-roaming",
    "atomic-cluster",
)
def results_not_released(patch: Patch) -> None:
    of_all = "for pending in produce.pending_appends.values():"
    of_some = "for pending in [t for key, t in produce.pending_appends.items() if key not in produce.results]:"
    patch.edit(Session, "_end_appends", (of_all, of_some))


@mutant(
    "a refusal is reported with an unknown outcome before it is stored",
    "every process must refuse the commit",
    "atomic-roaming",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def reported_with_unknown_outcome(patch: Patch) -> None:
    patch.edit(Session, "_answer_unknown_outcomes", ("self._answer_later_instead(produce)", "pass"))


@mutant("`required` topics accept transactions", "no unfenced appends there: rule 7", "refused-transactions-v2")
def transactions_on_required(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_no_transactions", staticmethod(lambda pending: None))


@mutant("appends are sent by topic name", "a recreated topic is another topic: rule 11", "recreated")
def by_name(patch: Patch) -> None:
    patch.set(Session, "_sent_by_id", lambda self, request: False)
    patch.set(Session, "_take_single", lambda self, *rest: None)


@mutant(
    "conditional appends keep the client's acks",
    "acks=all, or a truncation assigns an offset twice",
    "cluster",
    "resends",
)
def client_acks_kept(patch: Patch) -> None:
    orig = ProduceExchange.upstream_request

    def request(self: ProduceExchange) -> Any:
        made = orig(self)
        return None if made is None else replace(made, acks=self.request.acks)

    patch.set(ProduceExchange, "upstream_request", request)
    encode = fast_path_module.encode_single

    def encoded(*, before_acks: bytes, **rest: Any) -> Any:
        # The fast path does not keep the client's acks: use 1.
        (*whole,) = encode(before_acks=before_acks, **rest)
        frame = bytearray(b"".join(whole))
        struct.pack_into(">h", frame, 12 + len(before_acks), 1)
        return [bytes(frame)]

    patch.set(fast_path_module, "encode_single", encoded)


# ------------------------------------------------------------------------------------------------------------- refusals


@mutant("corrupt batches are fenced", "fencing would make a wrong CRC valid", "liars", "liars-true")
def crc_not_checked(patch: Patch) -> None:
    patch.set(reading_module, "verify_crc", lambda records: True)


@mutant("clients may use the shared producer id", "refuse client batches under it: rule 9", "liars", "liars-true")
def shared_id_accepted(patch: Patch) -> None:
    orig = exchange_module.make_pending_append

    def make(draft: Any, *rest: Any) -> Any:
        return orig(replace(draft, shared_producer_ids=frozenset()), *rest)

    for module in (produce_module, fast_path_module):
        patch.set(module, "make_pending_append", make)


@mutant(
    "contradictory expected offsets are accepted",
    "an expected offset that contradicts its place is a mismatch",
    "liars",
    "liars-true",
)
def contradiction_accepted(patch: Patch) -> None:
    orig = exchange_module.append_of
    patch.set(exchange_module, "append_of", lambda partition, scan: replace(orig(partition, scan), contradiction=None))


# ----------------------------------------------------------------------------------------------------- order and limits


@mutant(
    "responses are sent as soon as they are ready",
    "responses keep the order of their requests",
    "pipelines",
    "refused-pipelines",
)
def responses_out_of_order(patch: Patch) -> None:
    def front(self: Session) -> None:
        for pending_response in [pending_response for pending_response in self._to_client if pending_response.done]:
            self._to_client.remove(pending_response)
            self._client_out += pending_response.chunks

    patch.set(Session, "_answer_front", front)


@mutant("a sequencer's queue is unbounded", "a partition's queue is bounded", "crowd")
def queue_unbounded(patch: Patch) -> None:
    orig = PartitionSequencer.__init__

    def init(
        self: PartitionSequencer,
        partition: Any,
        limits: g.SequencerLimits,
        names: Any = state_module.DEFAULT_NAMES,
    ) -> None:
        orig(self, partition, replace(limits, queue_max=1000), names)

    patch.set(PartitionSequencer, "__init__", init)


@mutant("a sequencer remembers every batch", "bounded memory", "crowd")
def remembers_everything(patch: Patch) -> None:
    orig = PartitionSequencer.__init__

    def init(
        self: PartitionSequencer,
        partition: Any,
        limits: g.SequencerLimits,
        names: Any = state_module.DEFAULT_NAMES,
    ) -> None:
        orig(self, partition, replace(limits, remembered_batches_max=1 << 30), names)

    patch.set(PartitionSequencer, "__init__", init)


@mutant(
    "an append admitted for a disconnected client is not canceled",
    "no stuck sequencer",
    "crowd",
    "pipelines",
    "one-broker",
)
def admitted_after_disconnect(patch: Patch) -> None:
    orig = Dispatcher._report

    def report(self: Dispatcher, pending: g.PendingAppend, event: Any, sequencer: PartitionSequencer) -> None:
        if pending.connection in self.sessions:
            orig(self, pending, event, sequencer)

    patch.set(Dispatcher, "_report", report)
    patch.set(Session, "_return_waiting_produce", lambda self: None)


@mutant("a canceled append stays admitted", "no stuck sequencer", "whole-requests", "true-cluster")
def canceled_stays_admitted(patch: Patch) -> None:
    orig = PartitionSequencer._canceled
    patch.set(
        PartitionSequencer,
        "_canceled",
        lambda self, pending: None if pending is self._admitted else orig(self, pending),
    )


@mutant("a request's memory is not released", "bounded memory", "race")
def memory_not_released(patch: Patch) -> None:
    def end(self: Session, pending_response: Any, chunks: Any) -> None:
        pending_response.chunks, pending_response.done, pending_response.reserved_bytes = chunks, True, 0
        self._answer_front()

    patch.set(Session, "_end", end)


# ------------------------------------------------------------------------------------------------- pipelines and queues


@mutant("appends after a failed batch are accepted", "a pipeline fails as a whole: rule 13", "pipelines", "queues")
def pipeline_continues(patch: Patch) -> None:
    patch.set(Session, "_pipeline_failed", lambda self, pending_response, pending, result: None)


@mutant("appends sent after a failed batch are sent again", "a pipeline fails as a whole: rule 13", "mixed-pipelines")
def sent_successors_retried(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_sent_after", lambda self, pending: iter(()))


@mutant(
    "appends are pipelined while other processes serve",
    "another writer's batch may take the failed one's offset: rule 13",
    "control-requests",
    "twins",
    "restarted-clients",
)
def pipelined_with_other_processes(patch: Patch) -> None:
    patch.set(world_module.Proxy, "alone", lambda self, now: True)


@mutant("the newest append is admitted first", "a sequencer is fair", "queues", "crowd")
def last_come_first_served(patch: Patch) -> None:
    orig = PartitionSequencer._submitted

    def submitted(self: PartitionSequencer, pending: g.PendingAppend, now: float) -> None:
        orig(self, pending, now)
        if self._queue and self._queue[-1] is pending:
            self._queue.rotate(1)

    patch.set(PartitionSequencer, "_submitted", submitted)


@mutant("a connection with appends in flight is preferred", "a sequencer is fair", "queues", "pipelines")
def one_connection_first(patch: Patch) -> None:
    orig = PartitionSequencer._advance

    def advance(self: PartitionSequencer, now: float) -> None:
        if self._in_flight:
            holder = self._in_flight[-1].connection
            self._queue = type(self._queue)(sorted(self._queue, key=lambda t: t.connection != holder))
        orig(self, now)

    patch.set(PartitionSequencer, "_advance", advance)


@mutant("queued appends do not time out", "a sequencer answers in time", "hanging", "one-broker")
def waits_indefinitely(patch: Patch) -> None:
    orig = PartitionSequencer._tick

    def tick(self: PartitionSequencer, now: float) -> None:
        waiting, self._queue = self._queue, type(self._queue)()
        orig(self, now)
        waiting.extend(self._queue)
        self._queue = waiting

    patch.set(PartitionSequencer, "_tick", tick)


@mutant(
    "an append admitted with an unconfirmed fence may be sent at any time",
    "unconfirmed: send soon after the read: rule 12",
    "wide-required",
    "wide",
    "cluster",
)
def unconfirmed_admission_never_stale(patch: Patch) -> None:
    patch.set(PartitionSequencer, "may_send", lambda self, pending, now: pending is self._admitted)


# ------------------------------------------------------------------------------------------ agreement between processes


@mutant("configs are used beyond their lease", "a view of the configs has a lease: rule 10", "config-changes")
def lease_ignored(patch: Patch) -> None:
    patch.set(world_module.Proxy, "fresh", lambda self, now: self._fresh_until > 0)


@mutant("a cut-off leader of the state topic is trusted", "another replica confirms it: rule 10", "config-changes")
def leader_unconfirmed(patch: Patch) -> None:
    patch.set(world_module.Proxy, "wants_confirmation", False)


@mutant("a config change is reported immediately", "report it after the lease: rule 10", "config-changes")
def config_change_reported_early(patch: Patch) -> None:
    patch.set(world_module.Proxy, "lease_seconds", 0.0)


@mutant("the last proposed producer id wins", "the lowest offset wins, permanently: rule 9", "proposals")
def last_producer_id_wins(patch: Patch) -> None:
    orig = StateView._apply_producer_id

    def apply(self: StateView, key: str, value: Any) -> None:
        self._producer_ids.clear()
        orig(self, key, value)

    patch.set(StateView, "_apply_producer_id", apply)


@mutant("all processes have the same instance id", "an instance id belongs to one process", "twins")
def one_instance_id_for_all(patch: Patch) -> None:
    patch.set(world_module.World, "next_tag", lambda self: 7)


@mutant("the instance id in a fence is ignored", "what is not proved is no success: rule 5", "twins")
def instance_id_ignored(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_is_from_here", lambda self, found, pending, at: True)


# ---------------------------------------------------------------------------------------------- log reads and takeovers


@mutant(
    "log end and sequence are read at different moments",
    "bracketed reads only: rule 6",
    "race",
    "one-broker",
    "cluster",
)
def read_without_brackets(patch: Patch) -> None:
    orig = world_module.ControlCall._end_after

    def end_after(self: Any, partition: Any, before: int, state: Any, open_transactions: Any) -> None:
        orig(self, partition, self.log_end(partition), state, open_transactions)

    patch.set(world_module.ControlCall, "_end_after", end_after)


@mutant(
    "appends that may still be queued are not waited for",
    "separate them from unfenced appends: rule 8",
    "true-one",
    "true-cluster",
)
def queued_not_waited_for(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_waits_for_queued", lambda self, pending, now: False)


@mutant("a successor process appends immediately", "wait after a takeover: rule 8", "takeover")
def takeover_not_waited_for(patch: Patch) -> None:
    patch.set(world_module.Proxy, "taken_over", lambda self, now: True)


@mutant(
    "an append at another offset is reported as success", "detect it after a takeover: rule 8", "takeover", "true-many"
)
def takeover_not_detected(patch: Patch) -> None:
    patch.set(
        PartitionSequencer,
        "_appended_elsewhere",
        lambda self, pending, result, now: self._accept(pending, self.memory.add(pending, result.log_append_time_ms)),
    )


# ----------------------------------------------------------------------------------------------- acks=0, other messages


@mutant(
    "batches without a producer id form one pipeline",
    "Kafka answers such batches independently",
    "config-changes",
    "bulky",
)
def no_independent_batches(patch: Patch) -> None:
    patch.set(g.PendingAppend, "pipeline", property(lambda self: self.append.producer_id))


@mutant("acks=0 gets a response", "acks=0 has no response", "silent")
def acks_0_answered(patch: Patch) -> None:
    patch.set(ProduceExchange, "silent", property(lambda self: False))


@mutant("an append with acks=0 fails silently", "acks=0: an error closes the connection", "silent")
def acks_0_fails_silently(patch: Patch) -> None:
    orig = Session._finish_produce

    def finish(self: Session, pending_response: Any, produce: ProduceExchange) -> None:
        if produce.silent:
            produce.results = {key: replace(result, error_code=0) for key, result in produce.results.items()}
        orig(self, pending_response, produce)

    patch.set(Session, "_finish_produce", finish)


@mutant(
    "an append with acks=0 and an expected offset is sent", "acks=0: an expected offset closes the connection", "silent"
)
def acks_0_expects(patch: Patch) -> None:
    orig = Session._take_draft

    def take(self: Session, produce: ProduceExchange, *rest: Any) -> None:
        request = produce.request
        produce.request = replace(request, acks=1)
        try:
            orig(self, produce, *rest)
        finally:
            produce.request = request

    patch.set(Session, "_take_draft", take)


@mutant("a relayed response overtakes earlier ones", "responses keep the order of their requests", "control-requests")
def relayed_responses_overtake(patch: Patch) -> None:
    patch.set(Session, "_upstream_is_blocked", lambda self: False)


@mutant("a connection that waits for memory is not resumed", "no stuck connection", "bulky")
def memory_wait_never_ends(patch: Patch) -> None:
    patch.set(Session, "needs_ticks", property(lambda self: bool(self._answer_by) or self.client_closed))


# ------------------------------------------------------------------------------------------------------------ fast path
# tests/unit/test_fast_path.py compares the fast path with the ordinary one, for defects that no run here shows.


@mutant(
    "the fast path sends while the fence is unconfirmed",
    "unconfirmed: send soon after the read: rule 12",
    "idle-pipelines",
)
def fast_path_unconfirmed(patch: Patch) -> None:
    warm = "if not (self._in_flight or self._is_confirmed(pending, now) or self._snapshot_is_fresh(now)):"
    patch.edit(PartitionSequencer, "_fence_at_end", (warm, "if False:"))


@mutant("the fast path treats a retry as a new append", "recognize retries before comparing offsets", "true-one")
def fast_path_retry(patch: Patch) -> None:
    known = "if its_retry_is_known_here and (memory.retry_of(pending) or self._follows(pending)):"
    patch.edit(PartitionSequencer, "take", (known, "if False:"))


@mutant("the fast path skips the policy", "what the policy refuses is refused", "liars", "config-changes", "race")
def fast_path_without_policy(patch: Patch) -> None:
    patch.edit(
        PartitionSequencer,
        "take",
        ("append.transactional or POLICY.check(append, _FACTS[pending.check]) is not None", "False"),
    )


@mutant("the fast path fences old timestamps", "fence only fresh timestamps: rules 2, 3", "expiry")
def fast_path_any_timestamp(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "_fence_at_end", (" or self._timestamps(pending, snapshot, now) is not None", ""))


@mutant(
    "the fast path accepts contradictory expected offsets",
    "an expected offset that contradicts its place is a mismatch",
    "liars-true",
)
def fast_path_contradiction(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "_fence_at_end", (" or pending.append.contradiction is not None", ""))


@mutant("the fast path overtakes queued appends", "a sequencer is fair", "queues", "crowd")
def fast_path_past_the_queue(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "take", ("if self._queue or self._admitted", "if self._admitted"))


@mutant("the fast path ignores the expected offset", "0 means success only at the expected offset", "race", "liars")
def fast_path_without_comparison(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "_fence_at_end", ("if expected != end or ", "if "))


@mutant(
    "the fast path does not compare a response's base offset",
    "0 means success only at the expected offset",
    "bypass",
    "bypass-true",
)
def fast_path_any_base_offset(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "appended_batch", ("result.base_offset != pending.at\n", "False\n"))


@mutant(
    "the fast path reports a duplicate as success",
    "the batch there may be another writer's: rule 5",
    "race",
    "one-broker",
)
def fast_path_duplicate(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "appended_batch", ("or result.log_append_time_ms != -1\n", "\n"))


@mutant("the fast path completes appends out of order", "no stuck sequencer", "true-many", "true-one", "true-cluster")
def fast_path_out_of_order(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "appended_batch", (" or self._in_flight[0] is not pending", ""))


@mutant("the fast path does not record appended batches", "recognize retries before comparing offsets", "retries")
def fast_path_not_remembered(patch: Patch) -> None:
    patch.edit(
        PartitionSequencer, "appended_batch", ("self._record_appended(pending, result.log_append_time_ms, now)", "pass")
    )


@mutant(
    "the fast path ignores unfenced appends", "every unfenced append changes the sequence offset: rule 6", "true-one"
)
def fast_path_sequence_offset(patch: Patch) -> None:
    patch.edit(
        PartitionSequencer,
        "appended_batch",
        ("self._moved_by_pass_through(result.base_offset + pending.append.record_count, pending)", "pass"),
    )


@mutant("the fast path reports an error as success", "an error is no success", "resends")
def fast_path_error(patch: Patch) -> None:
    patch.edit(Session, "_end_single", ("if error or ", "error = 0\n    if "))


@mutant("the fast path continues after a failed batch", "a pipeline fails as a whole: rule 13", "pipelines", "queues")
def fast_path_after_failure(patch: Patch) -> None:
    patch.edit(Session, "_take_single", (" or self._failed_pipelines", ""))


@mutant(
    "the oldest fast-path append gets no ordinary state",
    "in-doubt appends are always resolved",
    "one-broker",
    "pipelines",
    "cluster",
)
def fast_path_state_lost(patch: Patch) -> None:
    patch.edit(Session, "_disable_fast_path", ("if single is None:", "if single is None or index == 0:"))


@mutant("the fast path does not release memory", "bounded memory", "race")
def fast_path_keeps_memory(patch: Patch) -> None:
    patch.edit(Session, "_end_single", ("self._services.release(pending_response.reserved_bytes)\n", "\n"))


@mutant("the fast path uses expired configs", "a view of the configs has a lease: rule 10", "config-changes")
def fast_path_without_lease(patch: Patch) -> None:
    patch.edit(Session, "take_up", (" or not services.fresh(now)", ""))


@mutant("a topic that was unchecked stays unchecked", "the current configs apply", "config-changes")
def unchecked_stays_unchecked(patch: Patch) -> None:
    patch.edit(Session, "take_up", ("if services.policy(self._known.topic_name) is not None:", "if False:"))


@mutant(
    "a request that starts like the previous one may name any topic",
    "the whole beginning identifies a request",
    "wide",
    "wide-required",
)
def any_topic_matches(patch: Patch) -> None:
    patch.set(Session, "_is_known", lambda self, frame, version: version == self._known.version)


@mutant(
    "a fast-path response overtakes earlier ones",
    "responses keep the order of their requests",
    "pipelines",
    "control-requests",
)
def fast_path_overtakes(patch: Patch) -> None:
    first = "if pending_response is not to_client[0] or (len(to_client) > 1 and to_client[1].done):"
    patch.edit(
        Session,
        "take_down",
        (first, "if False:"),
        ("del to_client[0], from_upstream[0]", "to_client.remove(from_upstream.pop(0))"),
    )


# ------------------------------------------------------------------------------------------------------ append barriers

_EXPANSIONS = ("expansion", "expansion-required")


@mutant("a closed barrier counts as empty", "an expansion waits for requests inside the barrier", *_EXPANSIONS)
def closed_barrier_counts_as_empty(patch: Patch) -> None:
    patch.edit(AppendBarrier, "empty", ("not self._entered and ", ""))


@mutant("a closed barrier admits requests", "nothing is appended during an expansion", *_EXPANSIONS)
def barrier_never_closes(patch: Patch) -> None:
    patch.edit(AppendBarrier, "admits", ("if self.closed_at is None:", "if True:"))


@mutant("an append whose connection broke leaves the barrier", "a broker may have it queued", *_EXPANSIONS)
def barrier_without_in_doubt(patch: Patch) -> None:
    patch.edit(AppendBarrier, "leave", ("if in_doubt:", "if False:"))


@mutant("a new process starts with an empty barrier", "its predecessor's requests may be queued", *_EXPANSIONS)
def new_process_barrier_empty(patch: Patch) -> None:
    patch.edit(AppendBarrier, "__init__", ("self._clear_at = clear_at", 'self._clear_at = float("-inf")'))


@mutant(
    "the fast path skips append barriers", "every append to a topic with count checks enters its barrier", *_EXPANSIONS
)
def fast_path_past_the_barrier(patch: Patch) -> None:
    patch.edit(Session, "_take_single", ("policy is None or policy.checks_count", "policy is None"))


@mutant("a refusal at the barrier fails no pipeline", "its successors would follow a sequence gap", *_EXPANSIONS)
def barrier_fails_no_pipeline(patch: Patch) -> None:
    patch.set(Session, "_pipelines_fail_at_barrier", lambda self, pending_response, produce: None)


@mutant("a request leaves the barrier when it is sent", "it leaves when Kafka has answered", *_EXPANSIONS)
def barrier_left_when_sent(patch: Patch) -> None:
    sent = "produce.sent.update(produce.unsent())"
    patch.edit(Session, "_send_admitted", (sent, f"{sent}; self._leave_barrier(produce, unsent=True)"))


@mutant(
    "an inconclusive error is a refusal", "only the log decides after it", "server-errors", "server-errors-required"
)
def inconclusive_error_is_final(patch: Patch) -> None:
    patch.set(sequencer_module, "IN_DOUBT", sequencer_module.IN_DOUBT - state_module.MAY_BE_FINAL)


@mutant("a repeated error is final without a read", "the log is read after the second", "server-errors")
def repeated_error_without_a_read(patch: Patch) -> None:
    ends = "self._resolved(pending, now); self._answer(pending, result)"
    patch.edit(InDoubtResolver, "_resent_fenced", ("self._resolve_first(now)", ends))


@mutant(
    "when a connection ends, appends sent ahead are reported as not sent",
    "they may be in the log",
    "wide",
    "wide-required",
)
def sent_ahead_reported_unsent(patch: Patch) -> None:
    patch.edit(Session, "_return_waiting_produce", ("key not in produce.sent and ", ""))


# ---------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """One rule of the fence. `elsewhere` – tests of its parts outside the simulated core."""

    text: str
    elsewhere: tuple[str, ...] = ()


_PRODUCER_STATE = "tests/integration/test_producer_state.py"
_STATE_TOPIC = "tests/integration/test_state_topic.py"

RULES = {
    1: Rule(
        "An error is final only for a batch that was sent once and answered; for an in-doubt append the log decides"
    ),
    2: Rule("Only batches with fresh timestamps are fenced: Kafka forgets a producer by its timestamps"),
    3: Rule("Batches without a timestamp are not fenced"),
    4: Rule(
        "With LogAppendTime every 0 is read back; a change of that config is noticed",
        (f"{_PRODUCER_STATE}::test_log_append_time_comes_and_goes",),
    ),
    5: Rule("Another writer's batch is never reported as the client's; what cannot be read is unknown"),
    6: Rule("A sequence offset comes from a bracketed read or from the published base; a new base has a new epoch"),
    7: Rule("Markers pass no sequencer: `required` topics refuse transactions; an open one makes the log end unknown"),
    8: Rule("Requests that a dead process left in a broker's queue are waited for, or detected"),
    9: Rule(
        "Of several proposals the first wins, permanently; no client uses the shared producer id",
        (
            f"{_STATE_TOPIC}::test_another_clusters_records_are_not_taken",
            f"{_STATE_TOPIC}::test_deleted_topic_is_waited_for_and_replacement_refused",
            f"{_STATE_TOPIC}::test_lost_records_are_not_overlooked",
        ),
    ),
    10: Rule(
        "No append passes on configs older than their lease; enabling a check is acknowledged after the lease",
        (
            "tests/integration/test_races.py::test_no_append_is_sent_with_expired_configs",
            "tests/integration/test_cut_off_leader.py::test_switched_on_check_applies_despite_old_leader_configs",
        ),
    ),
    11: Rule("A recreated topic is another topic: appends name it by id"),
    12: Rule("With an unconfirmed fence: read log end and state, send soon after, one append at a time"),
    13: Rule("Pipeline only with a confirmed fence; appends sent after a failed batch fail with it"),
    14: Rule("A mismatch states whether equal records are at the expected offset"),
    15: Rule(
        "The partition's current epoch is adopted",
        ("tests/integration/test_bypassing_writers.py::test_bypassing_fence_with_huge_epoch_is_recovered",),
    ),
    16: Rule(
        "A replica may restore an older sequence: no sequence offset is inferred from it. (Scenarios `compacted` and "
        "`compacted-true` compact, expire and restart. Kafka drops a producer's last batch and keeps an older one only "
        "with tombstones, which the model does not have.)",
        (f"{_PRODUCER_STATE}::test_a_log_that_is_compacted",),
    ),
    17: Rule(
        "Enabling a check warns the operator where Kafka itself may lose an accepted append",
        (
            "tests/unit/test_virtual_configs.py::test_durability_warnings_follow_replication_settings",
            "tests/integration/test_leader_changes.py::test_weak_replication_settings_are_warned_about",
        ),
    ),
    18: Rule(
        "A producer unknown to a partition may start at any sequence: Kafka's leniency, relied on",
        ("tests/conformance/cases.py::unknown_producer_starts_at_any_sequence",),
    ),
}


def rules_of(one: Mutant) -> list[int]:
    stated = re.search(r"rules? ([0-9, ]+)$", one.rule)
    return [] if stated is None else [int(number) for number in stated.group(1).split(",")]


def _table_of_rules() -> str:
    rows = []
    for number, rule in RULES.items():
        broken = ", ".join(f"`{one.name}`" for one in MUTANTS if number in rules_of(one))
        elsewhere = "<br>".join(f"`{test}`" for test in rule.elsewhere)
        rows.append(f"| {number} | {rule.text} | {broken} | {elsewhere} |")
    return "\n".join(rows)


# -------------------------------------------------------------------------------------------------------------- running


@contextmanager
def live(one: Mutant) -> Iterator[None]:
    patch = Patch()
    try:
        one.apply(patch)
        yield
    finally:
        patch.undo()


def hunt(one: Mutant, seeds: int) -> tuple[str, int, str] | None:
    """(scenario, seed, finding) of the first run that fails with the mutant and passes without it, or None."""
    for seed in range(seeds):
        for name in one.scenarios:
            with live(one):
                found = _found(name, seed)
            if found is not None and _found(name, seed) is None:
                return name, seed, found
    return None


def _found(name: str, seed: int) -> str | None:
    try:
        outcome = run(SCENARIOS[name], seed)
    except (TypeError, AttributeError):
        raise  # the mutant does not fit the code: its crash proves nothing
    except Exception as error:
        return f"CRASH: {type(error).__name__}: {error}"
    return outcome.found[0] if outcome.found else None


def row(one: Mutant, where: str, label: str) -> str:
    return f"| `{one.name}` | {one.breaks} | {one.rule} | {where} | {label} |"


def page(rows: list[str]) -> str:
    table = "\n".join(rows)
    return (
        "# Mutants\n\n"
        "Defects that the simulation must detect. Each breaks one rule. `make mutants` generates this page from\n"
        "`tests/simulation/mutants.py`. *Caught by*: the first scenario and seed that fail with the defect and pass\n"
        "without it. `python -m tests.simulation` replays a seed without the defect.\n\n"
        "| mutant | defect | rule | caught by | as |\n|---|---|---|---|---|\n" + table + "\n\n"
        "## The rules of the fence\n\n"
        "The mutants that break each rule, and tests of its parts outside the simulated core (state topic client,\n"
        "brokers' configs).\n\n"
        "| # | rule | broken by | tests elsewhere |\n|---|---|---|---|\n" + _table_of_rules() + "\n"
    )


def main() -> int:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    rows = []
    survivors = 0
    for one in MUTANTS:
        caught = hunt(one, seeds)
        survivors += caught is None
        where = "**not caught**" if caught is None else f"{caught[0]}, seed {caught[1]}"
        label = "" if caught is None else caught[2].split(":")[0]
        print(f"{one.name:<40}{where:<32}{'' if caught is None else caught[2][:90]}", flush=True)
        rows.append(row(one, where, label))
    Path("docs/mutants.md").write_text(page(rows))
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
