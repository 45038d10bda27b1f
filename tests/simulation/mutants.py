"""Seeded defects: each breaks one rule of the sequencer, and simulation has to notice.

Switched on by this harness only, as monkeypatches of the code under test. `python -m tests.simulation.mutants` tries
all of them and writes docs/mutants.md.
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
from fencepost_proxy.sequencer import sequencer as gate_module
from fencepost_proxy.sequencer import state as gate_state_module
from fencepost_proxy.sequencer.in_doubt import InDoubtResolver
from fencepost_proxy.sequencer.memory import Memory
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session import checked_produce as guarded_module
from fencepost_proxy.session import fast_path as short_way_module
from fencepost_proxy.session import produce_exchange as turn_module
from fencepost_proxy.session import reading as reading_module
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.messages import ToSequencer
from fencepost_proxy.session.produce_exchange import ProduceExchange
from fencepost_proxy.session.session import Session
from fencepost_proxy.topics.barrier import AppendBarrier
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.transactions import commit_validator as judge_module
from fencepost_proxy.transactions.commit_validator import CommitValidator
from tests.simulation import world as world_module
from tests.simulation.scenarios import SCENARIOS, run


class Patch:
    """Attributes replaced for as long as a mutant lives."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def set(self, primary: Any, name: str, value: Any) -> None:
        if isinstance(primary, type):
            primary = next(each for each in primary.__mro__ if name in each.__dict__)  # a session is made of parts
        self._old.append(
            (primary, name, primary.__dict__[name] if isinstance(primary, type) else getattr(primary, name))
        )
        setattr(primary, name, value)

    def edit(self, primary: type, name: str, *changes: tuple[str, str]) -> None:
        """A method with some of its text exchanged. Each text has to be there: or the code has moved on."""
        original = getattr(primary, name)
        source = textwrap.dedent(inspect.getsource(original))
        for old, new in changes:
            if old not in source:
                raise TypeError(f"{primary.__name__}.{name} has no {old!r}")
            source = source.replace(old, new)
        scope: dict[str, Any] = {}
        flags = inspect.unwrap(original).__code__.co_flags & annotations.compiler_flag
        code = compile(source, f"<{name} with a defect>", "exec", flags=flags)
        exec(code, original.__globals__, scope)
        self.set(primary, name, scope[name])

    def undo(self) -> None:
        for primary, name, value in reversed(self._old):
            setattr(primary, name, value)


@dataclass(frozen=True)
class Mutant:
    """`breaks` – what is wrong with it; `rule` – what forbids that; `scenarios` – where it shows."""

    name: str
    breaks: str
    rule: str
    scenarios: tuple[str, ...]
    apply: Callable[[Patch], None]


MUTANTS: list[Mutant] = []


def mutant(breaks: str, rule: str, *scenarios: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    def note(apply: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(apply.__name__.replace("_", "-"), breaks, rule, scenarios, apply))
        return apply

    return note


# ------------------------------------------------------------------------------------------------- what is compared


@mutant("batches go unstamped: the gate alone compares", "Kafka itself does the comparing", "race", "one-broker")
def no_stamp(patch: Patch) -> None:
    orig = PartitionSequencer.__init__

    def init(
        self: PartitionSequencer,
        partition: Any,
        limits: g.SequencerLimits,
        names: Any = gate_state_module.DEFAULT_NAMES,
    ) -> None:
        orig(self, partition, replace(limits, fencing=False), names)

    patch.set(PartitionSequencer, "__init__", init)


@mutant("the high watermark is taken for the log end", "the log end is the leader's LEO", "cluster")
def high_watermark_for_log_end(patch: Patch) -> None:
    patch.set(world_module.ControlCall, "log_end", lambda self, partition: partition.replicas[self.node].high_watermark)


@mutant("sequences do not wrap", "sequence = (expected − shift) mod 2³¹", "race")
def no_wrap(patch: Patch) -> None:
    for module in (gate_module, publishing_module):
        patch.set(module, "SEQUENCE_MODULUS", 1 << 40)


@mutant(
    "an answer's base offset is not compared", "0 means success only at the expected offset", "bypass", "bypass-true"
)
def base_offset_not_compared(patch: Patch) -> None:
    orig = PartitionSequencer._fenced_success

    def success(self: PartitionSequencer, pending: g.PendingAppend, result: Any, now: float) -> None:
        if result.log_append_time_ms == -1 and pending.at is not None:
            self._appended_at(pending, -1, result.log_start_offset, now)
        else:
            orig(self, pending, result, now)

    patch.set(PartitionSequencer, "_fenced_success", success)


@mutant("a duplicate is taken for a success", "another's batch may lie there: rule 5", "race", "one-broker")
def duplicate_is_success(patch: Patch) -> None:
    orig = PartitionSequencer._fenced_success
    patch.set(
        PartitionSequencer,
        "_fenced_success",
        lambda self, pending, result, now: orig(self, pending, replace(result, log_append_time_ms=-1), now),
    )


@mutant("on a LogAppendTime topic a 0 is not read back", "fresh and duplicate look the same: rule 4", "log-append-time")
def log_append_time_not_read_back(patch: Patch) -> None:
    patch.set(
        PartitionSequencer,
        "_fenced_success",
        lambda self, pending, result, now: self._appended_at(pending, result.log_append_time_ms, -1, now),
    )


@mutant(
    "a violation is told as a mismatch", "44 without OFFSET_VIOLATION means nothing appended", "bypass", "bypass-true"
)
def violation_not_told(patch: Patch) -> None:
    def elsewhere(self: PartitionSequencer, pending: g.PendingAppend, result: Any, now: float) -> None:
        self._unconfirm()
        message = f"OFFSET_MISMATCH topic=orders partition=0 expected={pending.at} actual={result.base_offset}"
        self._refuse(pending, Refusal(Error.POLICY_VIOLATION, "offset_mismatch", message, result.base_offset))

    patch.set(PartitionSequencer, "_appended_elsewhere", elsewhere)


@mutant(
    "an appended batch moves the believed end by one record", "the end moves by the batch's records", "chains", "race"
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


# --------------------------------------------------------------------------------------------------- warm and cold


@mutant("once warm, always warm", "warm for a quarter of producer.id.expiration.ms", "idle-chains")
def warm_for_ever(patch: Patch) -> None:
    patch.set(
        PartitionSequencer,
        "_is_confirmed",
        lambda self, pending, now: self.phase is gate_module.Phase.OPEN and self._confirmed_until > 0,
    )


@mutant("chains go out while cold", "pipeline only while warm: rule 13", "refused-chains")
def cold_pipeline(patch: Patch) -> None:
    def fits(self: PartitionSequencer, pending: g.PendingAppend, now: float) -> bool:
        flight = self._in_flight
        same = all(o.kind.fenced and o.connection == pending.connection for o in flight)
        return not flight or (pending.kind.fenced and self.phase is gate_module.Phase.OPEN and same)

    patch.set(PartitionSequencer, "_fits_with_in_flight", fits)


@mutant("old and missing timestamps are stamped", "stamp only fresh timestamps: rules 2, 3", "expiry")
def any_timestamp(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_timestamps", staticmethod(lambda pending, snapshot, now: None))


@mutant("unstamped appends go beside stamped ones", "what is not stamped moves the log", "true-one", "liars-true")
def own_beside_stamped(patch: Patch) -> None:
    orig = PartitionSequencer._fits_with_in_flight
    patch.set(
        PartitionSequencer,
        "_fits_with_in_flight",
        lambda self, pending, now: pending.kind is g.AppendMode.PASS_THROUGH or orig(self, pending, now),
    )


@mutant("the shift is not counted", "every unstamped append shifts the stamp: rule 6", "true-one", "liars-true")
def shift_not_counted(patch: Patch) -> None:
    patch.set(
        PartitionSequencer, "_pass_through_success", lambda self, pending, result, now: self._answer(pending, result)
    )
    patch.set(PartitionSequencer, "_moved_by_pass_through", lambda self, end, pending: None)


# ----------------------------------------------------------------------------------------- the stamp that is agreed on


@mutant("a log that moved without its stamp is not noticed", "publish a new base: rule 6", "bypass")
def base_never_published(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_fence_outside_log", staticmethod(lambda snapshot: None))


@mutant("the new base is published under the old epoch", "a new base needs a new epoch: rule 6", "bypass")
def epoch_not_raised(patch: Patch) -> None:
    orig = world_module.ControlCall._publish
    patch.set(
        world_module.ControlCall,
        "_publish",
        lambda self, effect: orig(self, replace(effect, producer_epoch=max(0, effect.producer_epoch - 1))),
    )


@mutant(
    "the epoch that the partition knows is not adopted", "adopt what DescribeProducers shows: rule 15", "bypass-true"
)
def epoch_not_adopted(patch: Patch) -> None:
    orig = PartitionSequencer._log_end_read

    def read(self: PartitionSequencer, snapshot: g.LogEndSnapshot, now: float) -> None:
        orig(self, snapshot, now)
        if self.phase is gate_module.Phase.OPEN:
            self._epoch = snapshot.fence_base[0]

    patch.set(PartitionSequencer, "_log_end_read", read)


@mutant("the last epoch of a producer id is never left", "go on with the next producer id", "rotating")
def epochs_run_out(patch: Patch) -> None:
    orig = PartitionSequencer._new_base

    def last(self: PartitionSequencer, snapshot: g.LogEndSnapshot, reason: str) -> g.PublishBase:
        requested = orig(self, snapshot, reason)
        return replace(requested, producer_epoch=min(requested.producer_epoch, self._limits.producer_epochs - 1))

    patch.set(PartitionSequencer, "_new_base", last)


@mutant("published bases are not read", "whoever gets 47 adopts what is published: rule 6", "bypass")
def base_not_read(patch: Patch) -> None:
    patch.set(StateView, "fence_base", lambda self, topic_id, partition: None)


@mutant("45 and 47 go to the client", "no bare 45 for a stamped batch", "race", "one-broker", "true-many")
def stamp_errors_passed_on(patch: Patch) -> None:
    for module in (gate_module, gate_state_module):
        patch.set(module, "FENCE_ERRORS", frozenset())


# ------------------------------------------------------------------------------------------------------------- doubts


@mutant(
    "7, 20 and errors beside an offset are final",
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
    "a retry goes where the log ends, though its first try landed since it was looked for",
    "only the log decides: rule 1",
    "wide-logged-in",
)
def first_try_forgotten(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_first_try_decides", lambda self, pending, end, now: None)


@mutant("an error on a resend is final", "only the log decides: rule 1", "resends")
def resend_error_is_final(patch: Patch) -> None:
    def resent(self: PartitionSequencer, pending: g.PendingAppend, result: Any, now: float) -> None:
        if pending in self._in_doubt_appends:
            if result is None:
                self._resolve_later(pending, now)
            else:
                self._resolved(pending, now)
                self._answer(pending, result)

    patch.set(PartitionSequencer, "_resent", resent)


@mutant("doubts are never looked at again", "settled in time, always", "one-broker", "cluster")
def no_second_look(patch: Patch) -> None:
    orig = PartitionSequencer._tick

    def tick(self: PartitionSequencer, now: float) -> None:
        if self.phase is gate_module.Phase.RESOLVING:
            self._retry_at = None
        orig(self, now)

    patch.set(PartitionSequencer, "_tick", tick)


@mutant(
    "a client that vanishes takes its append out of the gate",
    "a vanished client does not release the gate",
    "true-one",
    "liars-true",
)
def client_loss_releases(patch: Patch) -> None:
    lost = Session._client_lost
    withdrawn = PartitionSequencer._canceled

    def client_lost(self: Session, now: float) -> None:
        self._disable_fast_path()
        for exchange in self._exchanges_in_flight.values():
            for pending in exchange.admitted:
                self._commands.append(ToSequencer(pending, g.Canceled(pending)))
        lost(self, now)

    def out(self: PartitionSequencer, pending: g.PendingAppend) -> None:
        if pending in self._in_flight:
            self._in_flight.remove(pending)
        else:
            withdrawn(self, pending)

    patch.set(Session, "_client_lost", client_lost)
    patch.set(PartitionSequencer, "_canceled", out)


# ------------------------------------------------------------------------------------------------------------ retries


@mutant("a producer's retry is not known", "retries come before the offset check", "retries")
def retry_not_known(patch: Patch) -> None:
    patch.set(Memory, "retry_of", lambda self, pending: None)
    patch.set(PartitionSequencer, "_known_retry", lambda self, pending: False)


@mutant(
    "a retry is known by its sequence alone",
    "the same sequence with other records is another batch",
    "liars",
    "liars-true",
)
def retry_without_digest(patch: Patch) -> None:
    def retry_of(self: Memory, pending: g.PendingAppend) -> Any:
        known = self.fenced.get(pending.producer, ())
        return next((appended_batch for first, appended_batch in known if first == pending.append.base_sequence), None)

    patch.set(Memory, "retry_of", retry_of)


@mutant("equal records are taken for the client's own", "never success by mere likeness: rule 5", "race", "one-broker")
def likeness_is_success(patch: Patch) -> None:
    patch.set(
        PartitionSequencer,
        "_names_itself",
        staticmethod(lambda pending, there: there.digest == pending.digest),
    )


@mutant("a write-id alone is proof", "the records have to be equal too", "liars")
def write_id_alone(patch: Patch) -> None:
    orig = PartitionSequencer._end_mismatch

    def end(self: PartitionSequencer, pending: g.PendingAppend, there: Any, now: float, **more: Any) -> None:
        if there is not None and self._names_itself(pending, there):
            self._accept(pending, there)
        else:
            orig(self, pending, there, now, **more)

    patch.set(PartitionSequencer, "_end_mismatch", end)


@mutant("write-ids are not looked for", "a named write is recognised for ever", "one-broker", "race")
def write_id_ignored(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_names_itself", staticmethod(lambda pending, there: False))


@mutant("POSSIBLY_YOURS is left out", "an equal batch at E has to be told: rule 14", "race", "one-broker")
def not_marked(patch: Patch) -> None:
    orig = PartitionSequencer._end_mismatch

    def end(self: PartitionSequencer, pending: g.PendingAppend, there: Any, now: float, **more: Any) -> None:
        own = there is not None and there.digest == pending.digest and self._names_itself(pending, there)
        orig(self, pending, there if own else None, now, **(more if own else {}))

    patch.set(PartitionSequencer, "_end_mismatch", end)


@mutant("the end that is remembered is told", "actual was true during the call", "race", "one-broker")
def old_actual(patch: Patch) -> None:
    orig = PartitionSequencer._decide

    def decide(self: PartitionSequencer, pending: g.PendingAppend, now: float) -> bool:
        submitted_at, pending.submitted_at = pending.submitted_at, float("-inf")
        try:
            return orig(self, pending, now)
        finally:
            pending.submitted_at = submitted_at

    patch.set(PartitionSequencer, "_decide", decide)


# ------------------------------------------------------------------------------------------- transactions, topics


@mutant("open transactions are not looked at", "a marker takes an offset: rule 7", "calm-transactions")
def marker_ignored(patch: Patch) -> None:
    orig = PartitionSequencer._log_end_read
    patch.set(
        PartitionSequencer,
        "_log_end_read",
        lambda self, snapshot, now: orig(self, replace(snapshot, open_transactions=frozenset()), now),
    )
    patch.set(PartitionSequencer, "_joined", lambda self, transactional_id, believe_from: None)


@mutant("that a transaction joins is not heard", "markers come where nothing was written: rule 7", "calm-stranded")
def joins_not_heard(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_joined", lambda self, transactional_id, believe_from: None)


@mutant("a transaction joins while stamped appends are on their way", "its marker puts them one further", "stranded")
def joins_at_once(patch: Patch) -> None:
    def let_join(self: PartitionSequencer) -> None:
        self._effects += [g.MayJoin(connection) for _, connection in self._joining]
        self._joining = {}

    patch.set(PartitionSequencer, "_let_join", let_join)


@mutant("a transaction is put off for ever", "it joins once what is stamped has been answered", "atomic")
def joins_never(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_let_join", lambda self: None)


@mutant("a transaction that owns something waits for another one", "two would wait for each other", "atomic-crossing")
def owners_wait(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_may_not_wait", lambda self, pending, snapshot, now: False)


@mutant(
    "what a transaction owns by another process is not suspected",
    "where others serve the cluster it waits for so long only",
    "atomic-crossing-v2",
)
def owners_elsewhere_wait(patch: Patch) -> None:
    orig = PartitionSequencer._may_not_wait

    def may_not_wait(self: PartitionSequencer, pending: g.PendingAppend, snapshot: Any, now: float) -> bool:
        pending.alone = True
        return orig(self, pending, snapshot, now)

    patch.set(PartitionSequencer, "_may_not_wait", may_not_wait)


@mutant(
    "one that has only joined keeps other transactions waiting",
    "two that joined each other's partitions would wait for ever",
    "atomic-crossing",
)
def joined_is_written(patch: Patch) -> None:
    orig = PartitionSequencer._another_transaction_is_open

    def is_open(self: PartitionSequencer, pending: g.PendingAppend, snapshot: Any) -> bool:
        return orig(self, pending, snapshot) or bool(self._transactions.keys() - {pending.transactional_id})

    patch.set(PartitionSequencer, "_another_transaction_is_open", is_open)


@mutant(
    "another transaction's records keep no transaction waiting",
    "it owns the partition until its marker is read back",
    "atomic-calm",
)
def records_are_no_obstacle(patch: Patch) -> None:
    orig = PartitionSequencer._another_transaction_is_open

    def is_open(self: PartitionSequencer, pending: g.PendingAppend, snapshot: Any) -> bool:
        return not pending.append.transactional and orig(self, pending, snapshot)

    patch.set(PartitionSequencer, "_another_transaction_is_open", is_open)


@mutant(
    "what was read before an append came is relied on within a transaction",
    "the marker of its producer's last transaction has come since",
    "atomic-calm",
)
def own_marker_ignored(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_knows_transaction", staticmethod(lambda pending, snapshot: True))


@mutant("an ending transaction is not waited for", "its markers are on their way", "atomic-calm")
def ending_ignored(patch: Patch) -> None:
    orig = PartitionSequencer._log_end_read
    patch.set(
        PartitionSequencer,
        "_log_end_read",
        lambda self, snapshot, now: orig(self, replace(snapshot, ending_transactions=frozenset()), now),
    )


@mutant(
    "a transactional batch is not known again where it was expected",
    "by its sequence it names itself",
    "atomic",
    "atomic-v2",
)
def itself_not_known(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_is_itself", staticmethod(lambda found, there, pending: False))


@mutant(
    "that a transactional batch landed elsewhere is not looked for",
    "44 alone means nothing appended",
    "atomic-bypassing",
)
def landed_elsewhere_not_suspected(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_sequence_is_taken", lambda self, pending: False)


@mutant(
    "a batch is refused while an earlier try of it may be queued",
    "it would land behind its refusal",
    "atomic",
    "atomic-bypassing",
)
def refused_while_queued(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_is_queued", lambda self, pending, now: False)


@mutant(
    "within a transaction a duplicate is taken for a success",
    "an earlier transaction's batch may have its sequence",
    "atomic-bypassed",
    "atomic-cluster",
)
def own_duplicate_is_success(patch: Patch) -> None:
    orig = PartitionSequencer._pass_through_success
    patch.set(
        PartitionSequencer,
        "_pass_through_success",
        lambda self, pending, result, now: orig(self, pending, replace(result, log_append_time_ms=-1), now),
    )


# ------------------------------------------------------------------------------------------------------ commits


@mutant("a commit goes to Kafka unseen", "the commit is the guard", "atomic", "atomic-v2")
def commits_not_judged(patch: Patch) -> None:
    patch.set(CommitValidator, "begin", lambda self: judge_module.PASS)


@mutant("anybody speaks for a transaction", "Kafka says who may use a transactional id", "atomic-strangers")
def use_not_proved(patch: Patch) -> None:
    def prove_use(self: Session, transactional_id: str, correlation_id: int, client_id: Any, done: Any) -> None:
        self._may_use = transactional_id
        done(True)

    patch.set(Session, "_prove_use", prove_use)


@mutant(
    "beside a transactional id of one's own any producer id goes",
    "Kafka adds it to whatever that producer has open",
    "atomic-strangers",
    "atomic-strangers-v2",
)
def anothers_producer_id(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_is_anothers_producer", staticmethod(lambda pending, snapshot: False))


@mutant(
    "what other processes refused is not asked for",
    "poison is in the state topic",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def poison_not_read(patch: Patch) -> None:
    orig = CommitValidator.handle

    def handle(self: CommitValidator, answer: Any) -> Any:
        return orig(self, judge_module.StateRead(()) if isinstance(answer, judge_module.StateRead) else answer)

    patch.set(CommitValidator, "handle", handle)


@mutant(
    "a refusal is told before it is noted",
    "whichever process the commit comes to refuses it",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def told_before_noted(patch: Patch) -> None:
    patch.set(Session, "_waits_for_notes", lambda self, response_slot, exchange: False)


@mutant(
    "what this process did not see is not read back",
    "each batch in the log says where it should lie",
    "atomic-roaming",
)
def log_not_read_back(patch: Patch) -> None:
    patch.set(CommitValidator, "_batches", lambda self, partition, batches: None)


@mutant("what cannot be found out in time passes", "never a pass", "atomic-cluster", "atomic-cluster-v2", "atomic-v2")
def later_is_pass(patch: Patch) -> None:
    patch.set(judge_module, "_later", lambda message: judge_module.PASS)


@mutant("what is said of a transaction is not taken back", "the next one may have its epoch", "atomic-crossing")
def poison_not_lifted(patch: Patch) -> None:
    patch.set(
        world_module.Notes,
        "clear_abort_only",
        lambda self, connection, requested: self._reported(connection, requested.token, True),
    )


@mutant(
    "an append whose request is no more stays under way",
    "what nobody is told of keeps no commit waiting",
    "atomic-roaming",
    "atomic-cluster",
)
def under_way_for_ever(patch: Patch) -> None:
    patch.set(Session, "_let_go", lambda self, exchange: None)


@mutant(
    "a commit whose connection broke is waited for for ever",
    "the next transaction may have its epoch",
    "atomic-roaming-v1",
    "atomic-roaming",
)
def commits_waited_for(patch: Patch) -> None:
    patch.set(Session, "_leave_commits", lambda self: None)


@mutant(
    "only what has no result is let go",
    "what nobody is told of keeps no commit waiting",
    "atomic-roaming",
    "atomic-cluster",
)
def results_are_not_let_go(patch: Patch) -> None:
    of_all = "for pending in exchange.pending_appends.values():"
    of_some = "for pending in [t for key, t in exchange.pending_appends.items() if key not in exchange.results]:"
    patch.edit(Session, "_let_go", (of_all, of_some))


@mutant(
    "a refusal beside an append without an answer is told before it is noted",
    "whichever process the commit comes to refuses it",
    "atomic-roaming",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def told_beside_the_unknown(patch: Patch) -> None:
    patch.edit(Session, "_answer_unknown_outcomes", ("self._answer_later_instead(exchange)", "pass"))


@mutant("transactions pass on `required` topics", "nothing unstamped there: rule 7", "refused-transactions-v2")
def transactions_on_required(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_no_transactions", staticmethod(lambda pending: None))


@mutant("appends go by topic name", "a topic created again is another one: rule 11", "recreated")
def by_name(patch: Patch) -> None:
    patch.set(Session, "_goes_by_id", lambda self, request: False)
    patch.set(Session, "_take_single", lambda self, *rest: None)


@mutant(
    "conditional appends keep the client's acks",
    "acks=all, or a truncation gives an offset twice",
    "cluster",
    "resends",
)
def acks_as_asked(patch: Patch) -> None:
    orig = ProduceExchange.upstream_request

    def request(self: ProduceExchange) -> Any:
        made = orig(self)
        return None if made is None else replace(made, acks=self.request.acks)

    patch.set(ProduceExchange, "upstream_request", request)
    encode = short_way_module.encode_single

    def encoded(*, before_acks: bytes, **rest: Any) -> Any:
        # The short way does not keep what the client asked for: here, what one with acks=1 would have got.
        (*whole,) = encode(before_acks=before_acks, **rest)
        frame = bytearray(b"".join(whole))
        struct.pack_into(">h", frame, 12 + len(before_acks), 1)
        return [bytes(frame)]

    patch.set(short_way_module, "encode_single", encoded)


# ----------------------------------------------------------------------------------------------- what is let through


@mutant("damaged batches are stamped", "stamping would make a wrong CRC right", "liars", "liars-true")
def crc_not_checked(patch: Patch) -> None:
    patch.set(reading_module, "verify_crc", lambda records: True)


@mutant("clients may use the shared producer id", "refuse client batches under it: rule 9", "liars", "liars-true")
def shared_id_let_through(patch: Patch) -> None:
    orig = turn_module.make_pending_append

    def make(draft: Any, *rest: Any) -> Any:
        return orig(replace(draft, shared_producer_ids=frozenset()), *rest)

    for module in (guarded_module, short_way_module):
        patch.set(module, "make_pending_append", make)


@mutant("contradictions pass", "an expectation that contradicts its place is a mismatch", "liars", "liars-true")
def contradiction_passes(patch: Patch) -> None:
    orig = turn_module.append_of
    patch.set(turn_module, "append_of", lambda partition, scan: replace(orig(partition, scan), contradiction=None))


# ----------------------------------------------------------------------------------------------- order and bounds


@mutant("answers go out as they are made", "one connection's answers in its order", "chains", "refused-chains")
def answers_out_of_order(patch: Patch) -> None:
    def front(self: Session) -> None:
        for response_slot in [response_slot for response_slot in self._to_client if response_slot.done]:
            self._to_client.remove(response_slot)
            self._client_out += response_slot.chunks

    patch.set(Session, "_answer_front", front)


@mutant("a gate's queue has no bound", "a partition's queue is bounded", "crowd")
def queue_unbounded(patch: Patch) -> None:
    orig = PartitionSequencer.__init__

    def init(
        self: PartitionSequencer,
        partition: Any,
        limits: g.SequencerLimits,
        names: Any = gate_state_module.DEFAULT_NAMES,
    ) -> None:
        orig(self, partition, replace(limits, queue_max=1000), names)

    patch.set(PartitionSequencer, "__init__", init)


@mutant("a gate remembers every batch", "bounded memory", "crowd")
def remembers_everything(patch: Patch) -> None:
    orig = PartitionSequencer.__init__

    def init(
        self: PartitionSequencer,
        partition: Any,
        limits: g.SequencerLimits,
        names: Any = gate_state_module.DEFAULT_NAMES,
    ) -> None:
        orig(self, partition, replace(limits, remembered_batches_max=1 << 30), names)

    patch.set(PartitionSequencer, "__init__", init)


@mutant("a grant to a client that is gone is not given back", "no stuck gate", "crowd", "chains", "one-broker")
def grant_to_nobody(patch: Patch) -> None:
    orig = Dispatcher._report

    def report(self: Dispatcher, pending: g.PendingAppend, event: Any, sequencer: PartitionSequencer) -> None:
        if pending.connection in self.sessions:
            orig(self, pending, event, sequencer)

    patch.set(Dispatcher, "_report", report)
    patch.set(Session, "_return_exchanges", lambda self: None)


@mutant("a turn that is withdrawn is kept", "no stuck gate", "whole-requests", "true-cluster")
def withdrawn_keeps_its_turn(patch: Patch) -> None:
    orig = PartitionSequencer._canceled
    patch.set(
        PartitionSequencer,
        "_canceled",
        lambda self, pending: None if pending is self._admitted else orig(self, pending),
    )


@mutant("a request's memory is not given back", "bounded memory", "race")
def memory_kept(patch: Patch) -> None:
    def end(self: Session, response_slot: Any, chunks: Any) -> None:
        response_slot.chunks, response_slot.done, response_slot.reserved_bytes = chunks, True, 0
        self._answer_front()

    patch.set(Session, "_end", end)


# ------------------------------------------------------------------------------------------------ chains and turns


@mutant("what comes behind a failed batch is let in", "a chain falls as a whole: rule 13", "chains", "queues")
def chain_goes_on(patch: Patch) -> None:
    patch.set(Session, "_pipeline_failed", lambda self, response_slot, pending, result: None)


@mutant("what was sent behind a failed batch is tried again", "a chain falls as a whole: rule 13", "mixed-chains")
def sent_behind_goes_on(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_sent_after", lambda self, pending: iter(()))


@mutant(
    "chains are pipelined beside other processes",
    "another's batch may fill a failed one's place: rule 13",
    "asking",
    "twins",
    "reborn",
)
def pipelined_beside_others(patch: Patch) -> None:
    patch.set(world_module.Proxy, "alone", lambda self, now: True)


@mutant("who comes last is served first", "a gate is fair", "queues", "crowd")
def last_come_first_served(patch: Patch) -> None:
    orig = PartitionSequencer._submitted

    def submitted(self: PartitionSequencer, pending: g.PendingAppend, now: float) -> None:
        orig(self, pending, now)
        if self._queue and self._queue[-1] is pending:
            self._queue.rotate(1)

    patch.set(PartitionSequencer, "_submitted", submitted)


@mutant("a connection that has the turn keeps it", "a gate is fair", "queues", "chains")
def holder_keeps_the_turn(patch: Patch) -> None:
    orig = PartitionSequencer._advance

    def advance(self: PartitionSequencer, now: float) -> None:
        if self._in_flight:
            holder = self._in_flight[-1].connection
            self._queue = type(self._queue)(sorted(self._queue, key=lambda t: t.connection != holder))
        orig(self, now)

    patch.set(PartitionSequencer, "_advance", advance)


@mutant("who waits for a turn waits for ever", "a gate answers in time", "hanging", "one-broker")
def waits_for_ever(patch: Patch) -> None:
    orig = PartitionSequencer._tick

    def tick(self: PartitionSequencer, now: float) -> None:
        waiting, self._queue = self._queue, type(self._queue)()
        orig(self, now)
        waiting.extend(self._queue)
        self._queue = waiting

    patch.set(PartitionSequencer, "_tick", tick)


@mutant("a cold grant is good for ever", "cold: send soon after the read: rule 12", "wide-required", "wide", "cluster")
def cold_grant_never_old(patch: Patch) -> None:
    patch.set(PartitionSequencer, "may_send", lambda self, pending, now: pending is self._admitted)


# -------------------------------------------------------------------------------------------- what processes agree on


@mutant("the configs are relied on however old they are", "a view of the configs has a lease: rule 10", "switches")
def lease_ignored(patch: Patch) -> None:
    patch.set(world_module.Proxy, "fresh", lambda self, now: self._fresh_until > 0)


@mutant("a leader of the state topic is believed that was cut off", "other replicas confirm it: rule 10", "switches")
def leader_unconfirmed(patch: Patch) -> None:
    patch.set(world_module.Proxy, "wants_confirmation", False)


@mutant("a switch is reported as soon as it is stored", "reported after the lease: rule 10", "switches")
def switch_reported_at_once(patch: Patch) -> None:
    patch.set(world_module.Proxy, "lease_seconds", 0.0)


@mutant("the last proposal of a producer id wins", "the lowest offset wins, for ever: rule 9", "proposals")
def last_producer_id_wins(patch: Patch) -> None:
    orig = StateView._apply_producer_id

    def apply(self: StateView, key: str, value: Any) -> None:
        self._producer_id = None
        orig(self, key, value)

    patch.set(StateView, "_apply_producer_id", apply)


@mutant("all processes have one tag", "a tag is one process's", "twins")
def one_tag_for_all(patch: Patch) -> None:
    patch.set(world_module.World, "next_tag", lambda self: 7)


@mutant("another process's tag is not looked at", "what is not proved is no success: rule 5", "twins")
def tag_ignored(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_is_from_here", lambda self, found, pending, at: True)


# ------------------------------------------------------------------------------------- what a log goes through, again


@mutant("log end and sequence are not of one moment", "bracketed reads only: rule 6", "race", "one-broker", "cluster")
def read_without_brackets(patch: Patch) -> None:
    orig = world_module.ControlCall._end_after

    def end_after(self: Any, partition: Any, before: int, state: Any, open_transactions: Any) -> None:
        orig(self, partition, self.log_end(partition), state, open_transactions)

    patch.set(world_module.ControlCall, "_end_after", end_after)


@mutant("what may still be queued is not waited for", "beside unstamped appends: rule 8", "true-one", "true-cluster")
def queued_not_waited_for(patch: Patch) -> None:
    patch.set(PartitionSequencer, "_waits_for_what_may_be_queued", lambda self, pending, now: False)


@mutant("a successor goes on at once", "after a takeover, wait: rule 8", "takeover")
def takeover_not_waited_for(patch: Patch) -> None:
    patch.set(world_module.Proxy, "taken_over", lambda self, now: True)


@mutant("a predecessor's batch is taken for nobody's", "detected after a takeover: rule 8", "takeover", "true-many")
def takeover_not_detected(patch: Patch) -> None:
    patch.set(
        PartitionSequencer,
        "_appended_elsewhere",
        lambda self, pending, result, now: self._accept(pending, self.memory.add(pending, result.log_append_time_ms)),
    )


# -------------------------------------------------------------------------------------------- acks=0, other messages


@mutant("batches without a producer id are one chain", "Kafka answers such batches one by one", "switches", "bulky")
def no_independent_batches(patch: Patch) -> None:
    patch.set(g.PendingAppend, "pipeline", property(lambda self: self.append.producer_id))


@mutant("acks=0 is answered", "acks=0 has no answer", "silent")
def acks_0_answered(patch: Patch) -> None:
    patch.set(ProduceExchange, "silent", property(lambda self: False))


@mutant("an append with acks=0 fails in silence", "acks=0: an error closes the connection", "silent")
def acks_0_fails_silently(patch: Patch) -> None:
    orig = Session._finish_exchange

    def finish(self: Session, response_slot: Any, exchange: ProduceExchange) -> None:
        if exchange.silent:
            exchange.results = {key: replace(result, error_code=0) for key, result in exchange.results.items()}
        orig(self, response_slot, exchange)

    patch.set(Session, "_finish_exchange", finish)


@mutant("an expectation with acks=0 is appended", "acks=0: an expectation closes the connection", "silent")
def acks_0_expects(patch: Patch) -> None:
    orig = Session._take_draft

    def take(self: Session, exchange: ProduceExchange, *rest: Any) -> None:
        request = exchange.request
        exchange.request = replace(request, acks=1)
        try:
            orig(self, exchange, *rest)
        finally:
            exchange.request = request

    patch.set(Session, "_take_draft", take)


@mutant("an answer that only passes goes past those before it", "one connection's answers in its order", "asking")
def relayed_answers_overtake(patch: Patch) -> None:
    patch.set(Session, "_upstream_is_blocked", lambda self: False)


@mutant("who waits for memory is not asked again", "no stuck connection", "bulky")
def waits_for_memory(patch: Patch) -> None:
    patch.set(Session, "needs_ticks", property(lambda self: bool(self._answer_by) or self.client_closed))


# -------------------------------------------------------------------------------------------------- the short way
# Those of its defects that no run here shows are in tests/unit/test_fast_path.py, which compares it to the general way.


@mutant("the short way stamps while cold", "cold: send soon after the read: rule 12", "idle-chains")
def taken_while_cold(patch: Patch) -> None:
    warm = "if not (self._in_flight or self._is_confirmed(pending, now) or self._snapshot_is_fresh(now)):"
    patch.edit(PartitionSequencer, "_fence_at_end", (warm, "if False:"))


@mutant("the short way takes a retry for a new append", "retries come before the offset check", "true-one")
def taken_retry(patch: Patch) -> None:
    known = "if its_retry_is_known_here and (memory.retry_of(pending) or self._follows(pending)):"
    patch.edit(PartitionSequencer, "take", (known, "if False:"))


@mutant("the short way asks no policy", "what the policy refuses is refused", "liars", "switches", "race")
def taken_without_policy(patch: Patch) -> None:
    patch.edit(
        PartitionSequencer,
        "take",
        ("append.transactional or POLICY.check(append, _FACTS[pending.check]) is not None", "False"),
    )


@mutant("the short way stamps old timestamps", "stamp only fresh timestamps: rules 2, 3", "expiry")
def taken_with_any_timestamp(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "_fence_at_end", (" or self._timestamps(pending, snapshot, now) is not None", ""))


@mutant("the short way takes contradictions", "an expectation that contradicts its place is a mismatch", "liars-true")
def taken_contradiction(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "_fence_at_end", (" or pending.append.contradiction is not None", ""))


@mutant("the short way goes past who waits", "a gate is fair", "queues", "crowd")
def taken_past_the_queue(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "take", ("if self._queue or self._admitted", "if self._admitted"))


@mutant("the short way stamps without comparing", "0 means success only at the expected offset", "race", "liars")
def taken_anywhere(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "_fence_at_end", ("if expected != end or ", "if "))


@mutant("the short way does not compare an answer's offset", "0 means success only there", "bypass", "bypass-true")
def landed_anywhere(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "appended_batch", ("result.base_offset != pending.at\n", "False\n"))


@mutant("the short way takes a duplicate for a success", "another's batch may lie there: rule 5", "race", "one-broker")
def landed_duplicate(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "appended_batch", ("or result.log_append_time_ms != -1\n", "\n"))


@mutant("the short way ends whichever append comes first", "no stuck gate", "true-many", "true-one", "true-cluster")
def landed_out_of_order(patch: Patch) -> None:
    patch.edit(PartitionSequencer, "appended_batch", (" or self._in_flight[0] is not pending", ""))


@mutant("the short way does not note what landed", "retries come before the offset check", "retries")
def landed_and_forgotten(patch: Patch) -> None:
    patch.edit(
        PartitionSequencer, "appended_batch", ("self._record_appended(pending, result.log_append_time_ms, now)", "pass")
    )


@mutant(
    "the short way does not count what was not stamped", "every unstamped append shifts the stamp: rule 6", "true-one"
)
def landed_without_a_shift(patch: Patch) -> None:
    patch.edit(
        PartitionSequencer,
        "appended_batch",
        ("self._moved_by_pass_through(result.base_offset + pending.append.record_count, pending)", "pass"),
    )


@mutant("the short way takes an error for a success", "an error is no success", "resends")
def landed_by_an_error(patch: Patch) -> None:
    patch.edit(Session, "_end_single", ("if error or ", "error = 0\n    if "))


@mutant("the short way goes on behind a failed batch", "a chain falls as a whole: rule 13", "chains", "queues")
def taken_behind_a_hole(patch: Patch) -> None:
    patch.edit(Session, "_take_single", (" or self._failed_pipelines", ""))


@mutant(
    "what took the short way first is never taken back", "settled in time, always", "one-broker", "chains", "cluster"
)
def one_is_not_taken_back(patch: Patch) -> None:
    patch.edit(Session, "_disable_fast_path", ("if single is None:", "if single is None or index == 0:"))


@mutant("the short way keeps its memory", "bounded memory", "race")
def short_way_keeps_memory(patch: Patch) -> None:
    patch.edit(Session, "_end_single", ("self._services.release(response_slot.reserved_bytes)\n", "\n"))


@mutant("the short way is taken by old configs", "a view of the configs has a lease: rule 10", "switches")
def short_way_without_a_lease(patch: Patch) -> None:
    patch.edit(Session, "take_up", (" or not services.fresh(now)", ""))


@mutant("a topic that was not guarded stays so", "what the configs say now holds", "switches")
def never_guarded_again(patch: Patch) -> None:
    patch.edit(Session, "take_up", ("if services.policy(self._known.topic_name) is not None:", "if False:"))


@mutant("a known request names any topic", "what is known of a request is its whole beginning", "wide", "wide-required")
def any_topic_is_known(patch: Patch) -> None:
    patch.set(Session, "_is_known", lambda self, frame, version: version == self._known.version)


@mutant(
    "an answer by the short way goes past those before it", "one connection's answers in its order", "chains", "asking"
)
def short_answers_overtake(patch: Patch) -> None:
    first = "if response_slot is not to_client[0] or (len(to_client) > 1 and to_client[1].done):"
    patch.edit(
        Session,
        "take_down",
        (first, "if False:"),
        ("del to_client[0], from_upstream[0]", "to_client.remove(from_upstream.pop(0))"),
    )


# ------------------------------------------------------------------------------------------ the doors of counted topics

_GROWING = ("expansion", "expansion-required")


@mutant("an empty door is one that is closed", "an expansion waits for what is inside", *_GROWING)
def door_forgets_who_is_inside(patch: Patch) -> None:
    patch.edit(AppendBarrier, "empty", ("not self._entered and ", ""))


@mutant("a closed door lets everybody in", "nothing is appended while a topic grows", *_GROWING)
def door_never_closes(patch: Patch) -> None:
    patch.edit(AppendBarrier, "admits", ("if self.closed_at is None:", "if True:"))


@mutant("an append whose connection broke is out", "a broker may have it queued", *_GROWING)
def door_without_doubts(patch: Patch) -> None:
    patch.edit(AppendBarrier, "leave", ("if in_doubt:", "if False:"))


@mutant("a new process has nothing under way", "its predecessor's requests may be queued", *_GROWING)
def door_of_a_new_process_is_clear(patch: Patch) -> None:
    patch.edit(AppendBarrier, "__init__", ("self._clear_at = clear_at", 'self._clear_at = float("-inf")'))


@mutant("the short way goes past the doors", "every append to a counted topic goes through its door", *_GROWING)
def short_way_past_the_door(patch: Patch) -> None:
    patch.edit(Session, "_take_single", ("policy is None or policy.counted", "policy is None"))


@mutant("what is refused at a door breaks no chain", "what follows a refused batch follows a hole", *_GROWING)
def door_breaks_no_chain(patch: Patch) -> None:
    patch.set(Session, "_pipelines_fail_at_barrier", lambda self, response_slot, exchange: None)


@mutant("a request is out as soon as it is sent", "it is inside until Kafka has answered", *_GROWING)
def door_left_when_sent(patch: Patch) -> None:
    sent = "exchange.sent.update(exchange.unsent())"
    patch.edit(Session, "_send_admitted", (sent, f"{sent}; self._leave_barrier(exchange, unsent=True)"))


@mutant(
    "an error that says nothing is a refusal", "only the log tells after it", "server-errors", "server-errors-required"
)
def error_is_final(patch: Patch) -> None:
    patch.set(gate_module, "IN_DOUBT", gate_module.IN_DOUBT - gate_state_module.MAY_BE_FINAL)


@mutant("the same error twice is final whatever the log has", "it is read after the second", "server-errors")
def repeated_error_without_a_look(patch: Patch) -> None:
    ends = "self._resolved(pending, now); self._answer(pending, result)"
    patch.edit(InDoubtResolver, "_resent_fenced", ("self._resolve_first(now)", ends))


@mutant(
    "when a connection ends, what was sent ahead of the rest of its request is told as not sent",
    "it may be in the log",
    "wide",
    "wide-required",
)
def sent_ahead_and_told_unsent(patch: Patch) -> None:
    patch.edit(Session, "_return_exchanges", ("key not in exchange.sent and ", ""))


# ------------------------------------------------------------------------------------------------------- the rules


@dataclass(frozen=True)
class Rule:
    """One rule that the fence needs in order to hold. `elsewhere` – tests of what of it lies outside the simulated
    core."""

    text: str
    elsewhere: tuple[str, ...] = ()


_PRODUCER_STATE = "tests/integration/test_producer_state.py"
_STATE_TOPIC = "tests/integration/test_state_topic.py"

RULES = {
    1: Rule(
        "An error is final only for a batch that was sent once and answered; after a mark_in_doubt the log decides"
    ),
    2: Rule("Only batches with fresh timestamps are fenced: Kafka forgets a producer by them"),
    3: Rule("Nor are batches without a timestamp"),
    4: Rule(
        "With LogAppendTime every 0 is read back; a change of that config is noticed",
        (f"{_PRODUCER_STATE}::test_log_append_time_comes_and_goes",),
    ),
    5: Rule("Another's batch is never called the client's; what cannot be read is unknown"),
    6: Rule("A sequence_offset comes from a bracketed read, or from what is published; a new base has a new epoch"),
    7: Rule("Markers pass no sequencer: no transactions where everything has to be fenced, no guess beside open ones"),
    8: Rule("What a process that is gone left in a broker's queue is waited for, or detected"),
    9: Rule(
        "Of several proposals the first wins, for ever; nobody else uses the shared producer id",
        (
            f"{_STATE_TOPIC}::test_another_clusters_records_are_not_taken",
            f"{_STATE_TOPIC}::test_a_topic_that_vanishes_is_waited_for_and_one_in_its_place_is_refused",
            f"{_STATE_TOPIC}::test_lost_records_are_not_overlooked",
        ),
    ),
    10: Rule(
        "Nothing relayed_versions by configs that are older than their lease; a dispatcher-on is reported after it",
        (
            "tests/integration/test_races.py::test_no_append_passes_while_the_configs_are_older_than_the_lease",
            "tests/integration/test_cut_off_leader.py::test_nothing_passes_by_configs_that_the_old_leader_still_tells",
        ),
    ),
    11: Rule("A topic that was created again is another topic: appends go by its id"),
    12: Rule("Cold: read log end and state, send soon after, one alone"),
    13: Rule("Pipeline only while warm; what was sent behind a failed batch falls with it"),
    14: Rule("A mismatch where equal records lie says so"),
    15: Rule(
        "The epoch that the partition knows is adopted",
        ("tests/integration/test_bypassing_writers.py::test_the_stamp_itself_under_a_huge_epoch",),
    ),
    16: Rule(
        "A replica may restore an older sequence: no sequence_offset is guessed from it. (Scenarios `compacted` and "
        "`compacted-true` compact, expire and restart; that Kafka drops a producer's last batch and keeps an older one "
        "takes tombstones, which the model does not have.)",
        (f"{_PRODUCER_STATE}::test_a_log_that_is_compacted",),
    ),
    17: Rule(
        "Whoever switches a check on is warned where Kafka itself may lose a winner",
        (
            "tests/unit/test_virtual_configs.py::test_an_admin_is_warned_where_kafka_itself_may_lose_a_winner",
            "tests/integration/test_leader_changes.py::test_who_switches_a_check_on_is_warned_of_what_kafka_may_lose",
        ),
    ),
    18: Rule(
        "A producer that a partition does not know may begin at any sequence: Kafka's leniency, relied on",
        ("tests/conformance/cases.py::a_producer_that_is_not_known_begins_anywhere",),
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


# --------------------------------------------------------------------------------------------------------- running


@contextmanager
def live(one: Mutant) -> Iterator[None]:
    patch = Patch()
    try:
        one.apply(patch)
        yield
    finally:
        patch.undo()


def hunt(one: Mutant, seeds: int) -> tuple[str, int, str] | None:
    """(scenario, seed, what was found) of the first run that notices it, and that the code as it is relayed_versions;
    None if none of so many does."""
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
        raise  # the mutant does not fit the code any more: that it crashes is no proof of anything
    except Exception as error:
        return f"CRASH: {type(error).__name__}: {error}"
    return outcome.found[0] if outcome.found else None


def main() -> int:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    rows = []
    survivors = 0
    for one in MUTANTS:
        caught = hunt(one, seeds)
        survivors += caught is None
        where = "**not caught**" if caught is None else f"{caught[0]}, seed {caught[1]}"
        what = "" if caught is None else caught[2].split(":")[0]
        print(f"{one.name:<32}{where:<32}{'' if caught is None else caught[2][:90]}", flush=True)
        rows.append(f"| `{one.name}` | {one.breaks} | {one.rule} | {where} | {what} |")
    table = "\n".join(rows)
    Path("docs/mutants.md").write_text(
        "# Mutants\n\n"
        "Defects that the simulation must notice: each breaks a rule of the sequencer. Made by `make mutants` from\n"
        "`tests/simulation/mutants.py`; the seed is the first that notices it (`python -m tests.simulation` replays\n"
        "seeds of the code as it is). A seed counts only if the code as it is relayed_versions it.\n\n"
        "| mutant | what is wrong with it | the rule | caught by | as |\n|---|---|---|---|---|\n" + table + "\n\n"
        "## The rules of the fence\n\n"
        "Which mutant breaks which, and the tests of what lies outside the simulated core (the client of the state\n"
        "topic, the brokers' configs).\n\n"
        "| # | rule | broken by | tests elsewhere |\n|---|---|---|---|\n" + _table_of_rules() + "\n"
    )
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
