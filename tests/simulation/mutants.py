"""Seeded defects: each breaks one rule of the gate, and simulation has to notice.

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
from fencepost_proxy.partitions import events as g
from fencepost_proxy.partitions import gate as gate_module
from fencepost_proxy.partitions import gate_state as gate_state_module
from fencepost_proxy.partitions import publishing as publishing_module
from fencepost_proxy.partitions.gate import Gate
from fencepost_proxy.partitions.memory import Memory
from fencepost_proxy.partitions.settling import Settling
from fencepost_proxy.session import guarded as guarded_module
from fencepost_proxy.session import reading as reading_module
from fencepost_proxy.session import short_way as short_way_module
from fencepost_proxy.session import turn as turn_module
from fencepost_proxy.session.messages import ToGate
from fencepost_proxy.session.session import Session
from fencepost_proxy.session.switch import Switch
from fencepost_proxy.session.turn import Turn
from fencepost_proxy.topics.door import Door
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.transactions import judge as judge_module
from fencepost_proxy.transactions.judge import Judge
from tests.simulation import world as world_module
from tests.simulation.scenarios import SCENARIOS, run


class Patch:
    """Attributes replaced for as long as a mutant lives."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        if isinstance(owner, type):
            owner = next(each for each in owner.__mro__ if name in each.__dict__)  # a session is made of parts
        self._old.append((owner, name, owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)))
        setattr(owner, name, value)

    def edit(self, owner: type, name: str, *changes: tuple[str, str]) -> None:
        """A method with some of its text exchanged. Each text has to be there: or the code has moved on."""
        original = getattr(owner, name)
        source = textwrap.dedent(inspect.getsource(original))
        for old, new in changes:
            if old not in source:
                raise TypeError(f"{owner.__name__}.{name} has no {old!r}")
            source = source.replace(old, new)
        scope: dict[str, Any] = {}
        flags = inspect.unwrap(original).__code__.co_flags & annotations.compiler_flag
        code = compile(source, f"<{name} with a defect>", "exec", flags=flags)
        exec(code, original.__globals__, scope)
        self.set(owner, name, scope[name])

    def undo(self) -> None:
        for owner, name, value in reversed(self._old):
            setattr(owner, name, value)


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
    orig = Gate.__init__

    def init(self: Gate, partition: Any, limits: g.GateLimits, names: Any = gate_state_module.DEFAULT_NAMES) -> None:
        orig(self, partition, replace(limits, stamping=False), names)

    patch.set(Gate, "__init__", init)


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
    orig = Gate._stamped_success

    def success(self: Gate, ticket: g.Ticket, result: Any, now: float) -> None:
        if result.log_append_time_ms == -1 and ticket.at is not None:
            self._landed_at(ticket, -1, result.log_start_offset, now)
        else:
            orig(self, ticket, result, now)

    patch.set(Gate, "_stamped_success", success)


@mutant("a duplicate is taken for a success", "another's batch may lie there: rule 5", "race", "one-broker")
def duplicate_is_success(patch: Patch) -> None:
    orig = Gate._stamped_success
    patch.set(
        Gate,
        "_stamped_success",
        lambda self, ticket, result, now: orig(self, ticket, replace(result, log_append_time_ms=-1), now),
    )


@mutant("on a LogAppendTime topic a 0 is not read back", "fresh and duplicate look the same: rule 4", "log-append-time")
def log_append_time_not_read_back(patch: Patch) -> None:
    patch.set(
        Gate,
        "_stamped_success",
        lambda self, ticket, result, now: self._landed_at(ticket, result.log_append_time_ms, -1, now),
    )


@mutant(
    "a violation is told as a mismatch", "44 without OFFSET_VIOLATION means nothing appended", "bypass", "bypass-true"
)
def violation_not_told(patch: Patch) -> None:
    def elsewhere(self: Gate, ticket: g.Ticket, result: Any, now: float) -> None:
        self._go_cold()
        message = f"OFFSET_MISMATCH topic=orders partition=0 expected={ticket.at} actual={result.base_offset}"
        self._refuse(ticket, Refusal(Error.POLICY_VIOLATION, "offset_mismatch", message, result.base_offset))

    patch.set(Gate, "_landed_elsewhere", elsewhere)


@mutant(
    "an appended batch moves the believed end by one record", "the end moves by the batch's records", "chains", "race"
)
def end_moves_by_one(patch: Patch) -> None:
    orig = Gate._note_landed

    def landed(self: Gate, ticket: g.Ticket, *rest: Any) -> Any:
        noted = orig(self, ticket, *rest)
        if ticket.append.record_count > 1 and self._log_end == ticket.at + ticket.append.record_count:  # type: ignore[operator]
            self._log_end -= 1
            self._end_as_of = float("inf")
        return noted

    patch.set(Gate, "_note_landed", landed)


# --------------------------------------------------------------------------------------------------- warm and cold


@mutant("once warm, always warm", "warm for a quarter of producer.id.expiration.ms", "idle-chains")
def warm_for_ever(patch: Patch) -> None:
    patch.set(Gate, "_warm", lambda self, ticket, now: self.phase is gate_module.Phase.OPEN and self._warm_until > 0)


@mutant("chains go out while cold", "pipeline only while warm: rule 13", "refused-chains")
def cold_pipeline(patch: Patch) -> None:
    def fits(self: Gate, ticket: g.Ticket, now: float) -> bool:
        flight = self._in_flight
        same = all(o.kind.stamped and o.connection == ticket.connection for o in flight)
        return not flight or (ticket.kind.stamped and self.phase is gate_module.Phase.OPEN and same)

    patch.set(Gate, "_fits_beside_in_flight", fits)


@mutant("old and missing timestamps are stamped", "stamp only fresh timestamps: rules 2, 3", "expiry")
def any_timestamp(patch: Patch) -> None:
    patch.set(Gate, "_timestamps", staticmethod(lambda ticket, tail, now: None))


@mutant("unstamped appends go beside stamped ones", "what is not stamped moves the log", "true-one", "liars-true")
def own_beside_stamped(patch: Patch) -> None:
    orig = Gate._fits_beside_in_flight
    patch.set(
        Gate,
        "_fits_beside_in_flight",
        lambda self, ticket, now: ticket.kind is g.Kind.OWN or orig(self, ticket, now),
    )


@mutant("the shift is not counted", "every unstamped append shifts the stamp: rule 6", "true-one", "liars-true")
def shift_not_counted(patch: Patch) -> None:
    patch.set(Gate, "_own_success", lambda self, ticket, result, now: self._answer(ticket, result))
    patch.set(Gate, "_moved_by_own", lambda self, end, ticket: None)


# ----------------------------------------------------------------------------------------- the stamp that is agreed on


@mutant("a log that moved without its stamp is not noticed", "publish a new base: rule 6", "bypass")
def base_never_published(patch: Patch) -> None:
    patch.set(Gate, "_stamp_left_behind", staticmethod(lambda tail: None))


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
    orig = Gate._tail_read

    def read(self: Gate, tail: g.Tail, now: float) -> None:
        orig(self, tail, now)
        if self.phase is gate_module.Phase.OPEN:
            self._epoch = tail.stamp_base[0]

    patch.set(Gate, "_tail_read", read)


@mutant("the last epoch of a producer id is never left", "go on with the next producer id", "rotating")
def epochs_run_out(patch: Patch) -> None:
    orig = Gate._new_base

    def last(self: Gate, tail: g.Tail, reason: str) -> g.PublishBase:
        wanted = orig(self, tail, reason)
        return replace(wanted, producer_epoch=min(wanted.producer_epoch, self._limits.producer_epochs - 1))

    patch.set(Gate, "_new_base", last)


@mutant("published bases are not read", "whoever gets 47 adopts what is published: rule 6", "bypass")
def base_not_read(patch: Patch) -> None:
    patch.set(StateView, "stamp_base", lambda self, topic_id, partition: None)


@mutant("45 and 47 go to the client", "no bare 45 for a stamped batch", "race", "one-broker", "true-many")
def stamp_errors_passed_on(patch: Patch) -> None:
    for module in (gate_module, gate_state_module):
        patch.set(module, "ABOUT_THE_STAMP", frozenset())


# ------------------------------------------------------------------------------------------------------------- doubts


@mutant(
    "7, 20 and errors beside an offset are final",
    "an error after the append is no refusal: rule 1",
    "cluster",
    "one-broker",
)
def timeout_is_final(patch: Patch) -> None:
    orig = Gate._answered

    def answered(self: Gate, ticket: g.Ticket, result: Any, now: float) -> None:
        if result.error_code != 0:
            result = replace(result, error_code=Error.NOT_LEADER_OR_FOLLOWER, base_offset=-1)
        orig(self, ticket, result, now)

    patch.set(Gate, "_answered", answered)


@mutant(
    "a retry goes where the log ends, though its first try landed since it was looked for",
    "only the log decides: rule 1",
    "wide-logged-in",
)
def first_try_forgotten(patch: Patch) -> None:
    patch.set(Gate, "_first_try_decides", lambda self, ticket, end, now: None)


@mutant("an error on a resend is final", "only the log decides: rule 1", "resends")
def resend_error_is_final(patch: Patch) -> None:
    def resent(self: Gate, ticket: g.Ticket, result: Any, now: float) -> None:
        if ticket in self._doubts:
            if result is None:
                self._settle_later(ticket, now)
            else:
                self._settled(ticket, now)
                self._answer(ticket, result)

    patch.set(Gate, "_resent", resent)


@mutant("doubts are never looked at again", "settled in time, always", "one-broker", "cluster")
def no_second_look(patch: Patch) -> None:
    orig = Gate._tick

    def tick(self: Gate, now: float) -> None:
        if self.phase is gate_module.Phase.SETTLING:
            self._retry_at = None
        orig(self, now)

    patch.set(Gate, "_tick", tick)


@mutant(
    "a client that vanishes takes its append out of the gate",
    "a vanished client does not release the gate",
    "true-one",
    "liars-true",
)
def client_loss_releases(patch: Patch) -> None:
    lost = Session._client_lost
    withdrawn = Gate._withdrawn

    def client_lost(self: Session, now: float) -> None:
        self._no_short_ways()
        for turn in self._turns.values():
            for ticket in turn.granted:
                self._commands.append(ToGate(ticket, g.Withdrawn(ticket)))
        lost(self, now)

    def out(self: Gate, ticket: g.Ticket) -> None:
        if ticket in self._in_flight:
            self._in_flight.remove(ticket)
        else:
            withdrawn(self, ticket)

    patch.set(Session, "_client_lost", client_lost)
    patch.set(Gate, "_withdrawn", out)


# ------------------------------------------------------------------------------------------------------------ retries


@mutant("a producer's retry is not known", "retries come before the offset check", "retries")
def retry_not_known(patch: Patch) -> None:
    patch.set(Memory, "retry_of", lambda self, ticket: None)
    patch.set(Gate, "_known_retry", lambda self, ticket: False)


@mutant(
    "a retry is known by its sequence alone",
    "the same sequence with other records is another batch",
    "liars",
    "liars-true",
)
def retry_without_digest(patch: Patch) -> None:
    def retry_of(self: Memory, ticket: g.Ticket) -> Any:
        known = self.stamped.get(ticket.producer, ())
        return next((landed for first, landed in known if first == ticket.append.base_sequence), None)

    patch.set(Memory, "retry_of", retry_of)


@mutant("equal records are taken for the client's own", "never success by mere likeness: rule 5", "race", "one-broker")
def likeness_is_success(patch: Patch) -> None:
    patch.set(
        Gate,
        "_names_itself",
        staticmethod(lambda ticket, there: there.digest == ticket.digest),
    )


@mutant("a write-id alone is proof", "the records have to be equal too", "liars")
def write_id_alone(patch: Patch) -> None:
    orig = Gate._end_mismatch

    def end(self: Gate, ticket: g.Ticket, there: Any, now: float, **more: Any) -> None:
        if there is not None and self._names_itself(ticket, there):
            self._accept(ticket, there)
        else:
            orig(self, ticket, there, now, **more)

    patch.set(Gate, "_end_mismatch", end)


@mutant("write-ids are not looked for", "a named write is recognised for ever", "one-broker", "race")
def write_id_ignored(patch: Patch) -> None:
    patch.set(Gate, "_names_itself", staticmethod(lambda ticket, there: False))


@mutant("POSSIBLY_YOURS is left out", "an equal batch at E has to be told: rule 14", "race", "one-broker")
def not_marked(patch: Patch) -> None:
    orig = Gate._end_mismatch

    def end(self: Gate, ticket: g.Ticket, there: Any, now: float, **more: Any) -> None:
        own = there is not None and there.digest == ticket.digest and self._names_itself(ticket, there)
        orig(self, ticket, there if own else None, now, **(more if own else {}))

    patch.set(Gate, "_end_mismatch", end)


@mutant("the end that is remembered is told", "actual was true during the call", "race", "one-broker")
def old_actual(patch: Patch) -> None:
    orig = Gate._decide

    def decide(self: Gate, ticket: g.Ticket, now: float) -> bool:
        offered_at, ticket.offered_at = ticket.offered_at, float("-inf")
        try:
            return orig(self, ticket, now)
        finally:
            ticket.offered_at = offered_at

    patch.set(Gate, "_decide", decide)


# ------------------------------------------------------------------------------------------- transactions, topics


@mutant("open transactions are not looked at", "a marker takes an offset: rule 7", "calm-transactions")
def marker_ignored(patch: Patch) -> None:
    orig = Gate._tail_read
    patch.set(Gate, "_tail_read", lambda self, tail, now: orig(self, replace(tail, open_transactions=frozenset()), now))
    patch.set(Gate, "_joined", lambda self, transactional_id, believe_from: None)


@mutant("that a transaction joins is not heard", "markers come where nothing was written: rule 7", "calm-stranded")
def joins_not_heard(patch: Patch) -> None:
    patch.set(Gate, "_joined", lambda self, transactional_id, believe_from: None)


@mutant("a transaction joins while stamped appends are on their way", "its marker puts them one further", "stranded")
def joins_at_once(patch: Patch) -> None:
    def let_join(self: Gate) -> None:
        self._effects += [g.MayJoin(connection) for _, connection in self._joining]
        self._joining = {}

    patch.set(Gate, "_let_join", let_join)


@mutant("a transaction is put off for ever", "it joins once what is stamped has been answered", "atomic")
def joins_never(patch: Patch) -> None:
    patch.set(Gate, "_let_join", lambda self: None)


@mutant("a transaction that owns something waits for another one", "two would wait for each other", "atomic-crossing")
def owners_wait(patch: Patch) -> None:
    patch.set(Gate, "_may_not_wait", lambda self, ticket, tail, now: False)


@mutant(
    "what a transaction owns by another process is not suspected",
    "where others serve the cluster it waits for so long only",
    "atomic-crossing-v2",
)
def owners_elsewhere_wait(patch: Patch) -> None:
    orig = Gate._may_not_wait

    def may_not_wait(self: Gate, ticket: g.Ticket, tail: Any, now: float) -> bool:
        ticket.alone = True
        return orig(self, ticket, tail, now)

    patch.set(Gate, "_may_not_wait", may_not_wait)


@mutant(
    "one that has only joined keeps other transactions waiting",
    "two that joined each other's partitions would wait for ever",
    "atomic-crossing",
)
def joined_is_written(patch: Patch) -> None:
    orig = Gate._another_transaction_is_open

    def is_open(self: Gate, ticket: g.Ticket, tail: Any) -> bool:
        return orig(self, ticket, tail) or bool(self._transactions.keys() - {ticket.transactional_id})

    patch.set(Gate, "_another_transaction_is_open", is_open)


@mutant(
    "another transaction's records keep no transaction waiting",
    "it owns the partition until its marker is read back",
    "atomic-calm",
)
def records_are_no_obstacle(patch: Patch) -> None:
    orig = Gate._another_transaction_is_open

    def is_open(self: Gate, ticket: g.Ticket, tail: Any) -> bool:
        return not ticket.append.transactional and orig(self, ticket, tail)

    patch.set(Gate, "_another_transaction_is_open", is_open)


@mutant(
    "what was read before an append came is relied on within a transaction",
    "the marker of its producer's last transaction has come since",
    "atomic-calm",
)
def own_marker_ignored(patch: Patch) -> None:
    patch.set(Gate, "_knows_transaction", staticmethod(lambda ticket, tail: True))


@mutant("an ending transaction is not waited for", "its markers are on their way", "atomic-calm")
def ending_ignored(patch: Patch) -> None:
    orig = Gate._tail_read
    patch.set(
        Gate, "_tail_read", lambda self, tail, now: orig(self, replace(tail, ending_transactions=frozenset()), now)
    )


@mutant(
    "a transactional batch is not known again where it was expected",
    "by its sequence it names itself",
    "atomic",
    "atomic-v2",
)
def itself_not_known(patch: Patch) -> None:
    patch.set(Gate, "_is_itself", staticmethod(lambda found, there, ticket: False))


@mutant(
    "that a transactional batch landed elsewhere is not looked for",
    "44 alone means nothing appended",
    "atomic-bypassing",
)
def landed_elsewhere_not_suspected(patch: Patch) -> None:
    patch.set(Gate, "_sequence_is_taken", lambda self, ticket: False)


@mutant(
    "a batch is refused while an earlier try of it may be queued",
    "it would land behind its refusal",
    "atomic",
    "atomic-bypassing",
)
def refused_while_queued(patch: Patch) -> None:
    patch.set(Gate, "_is_queued", lambda self, ticket, now: False)


@mutant(
    "within a transaction a duplicate is taken for a success",
    "an earlier transaction's batch may have its sequence",
    "atomic-bypassed",
    "atomic-cluster",
)
def own_duplicate_is_success(patch: Patch) -> None:
    orig = Gate._own_success
    patch.set(
        Gate,
        "_own_success",
        lambda self, ticket, result, now: orig(self, ticket, replace(result, log_append_time_ms=-1), now),
    )


# ------------------------------------------------------------------------------------------------------ commits


@mutant("a commit goes to Kafka unseen", "the commit is the guard", "atomic", "atomic-v2")
def commits_not_judged(patch: Patch) -> None:
    patch.set(Judge, "begin", lambda self: judge_module.PASS)


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
    patch.set(Gate, "_is_anothers_producer", staticmethod(lambda ticket, tail: False))


@mutant(
    "what other processes refused is not asked for",
    "poison is in the state topic",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def poison_not_read(patch: Patch) -> None:
    orig = Judge.handle

    def handle(self: Judge, answer: Any) -> Any:
        return orig(self, judge_module.StateRead(()) if isinstance(answer, judge_module.StateRead) else answer)

    patch.set(Judge, "handle", handle)


@mutant(
    "a refusal is told before it is noted",
    "whichever process the commit comes to refuses it",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def told_before_noted(patch: Patch) -> None:
    patch.set(Session, "_waits_for_notes", lambda self, slot, turn: False)


@mutant(
    "what this process did not see is not read back",
    "each batch in the log says where it should lie",
    "atomic-roaming",
)
def log_not_read_back(patch: Patch) -> None:
    patch.set(Judge, "_batches", lambda self, partition, batches: None)


@mutant("what cannot be found out in time passes", "never a pass", "atomic-cluster", "atomic-cluster-v2", "atomic-v2")
def later_is_pass(patch: Patch) -> None:
    patch.set(judge_module, "_later", lambda message: judge_module.PASS)


@mutant("what is said of a transaction is not taken back", "the next one may have its epoch", "atomic-crossing")
def poison_not_lifted(patch: Patch) -> None:
    patch.set(world_module.Notes, "lift", lambda self, connection, wanted: self._told(connection, wanted.token, True))


@mutant(
    "an append whose request is no more stays under way",
    "what nobody is told of keeps no commit waiting",
    "atomic-roaming",
    "atomic-cluster",
)
def under_way_for_ever(patch: Patch) -> None:
    patch.set(Session, "_let_go", lambda self, turn: None)


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
    of_all = "for ticket in turn.tickets.values():"
    of_some = "for ticket in [t for key, t in turn.tickets.items() if key not in turn.results]:"
    patch.edit(Session, "_let_go", (of_all, of_some))


@mutant(
    "a refusal beside an append without an answer is told before it is noted",
    "whichever process the commit comes to refuses it",
    "atomic-roaming",
    "atomic-cluster",
    "atomic-cluster-v2",
)
def told_beside_the_unknown(patch: Patch) -> None:
    patch.edit(Session, "_tell_what_is_unknown", ("self._tell_later_instead(turn)", "pass"))


@mutant("transactions pass on `required` topics", "nothing unstamped there: rule 7", "refused-transactions-v2")
def transactions_on_required(patch: Patch) -> None:
    patch.set(Gate, "_no_transactions", staticmethod(lambda ticket: None))


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
    orig = Turn.upstream_request

    def request(self: Turn) -> Any:
        made = orig(self)
        return None if made is None else replace(made, acks=self.request.acks)

    patch.set(Turn, "upstream_request", request)
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
    orig = turn_module.make_ticket

    def make(bid: Any, *rest: Any) -> Any:
        return orig(replace(bid, shared_producer_ids=frozenset()), *rest)

    for module in (guarded_module, short_way_module):
        patch.set(module, "make_ticket", make)


@mutant("contradictions pass", "an expectation that contradicts its place is a mismatch", "liars", "liars-true")
def contradiction_passes(patch: Patch) -> None:
    orig = turn_module.append_of
    patch.set(turn_module, "append_of", lambda partition, scan: replace(orig(partition, scan), contradiction=None))


# ----------------------------------------------------------------------------------------------- order and bounds


@mutant("answers go out as they are made", "one connection's answers in its order", "chains", "refused-chains")
def answers_out_of_order(patch: Patch) -> None:
    def front(self: Session) -> None:
        for slot in [slot for slot in self._to_client if slot.done]:
            self._to_client.remove(slot)
            self._client_out += slot.chunks

    patch.set(Session, "_answer_front", front)


@mutant("a gate's queue has no bound", "a partition's queue is bounded", "crowd")
def queue_unbounded(patch: Patch) -> None:
    orig = Gate.__init__

    def init(self: Gate, partition: Any, limits: g.GateLimits, names: Any = gate_state_module.DEFAULT_NAMES) -> None:
        orig(self, partition, replace(limits, queue_max=1000), names)

    patch.set(Gate, "__init__", init)


@mutant("a gate remembers every batch", "bounded memory", "crowd")
def remembers_everything(patch: Patch) -> None:
    orig = Gate.__init__

    def init(self: Gate, partition: Any, limits: g.GateLimits, names: Any = gate_state_module.DEFAULT_NAMES) -> None:
        orig(self, partition, replace(limits, remembered_batches_max=1 << 30), names)

    patch.set(Gate, "__init__", init)


@mutant("a grant to a client that is gone is not given back", "no stuck gate", "crowd", "chains", "one-broker")
def grant_to_nobody(patch: Patch) -> None:
    orig = Switch._tell

    def tell(self: Switch, ticket: g.Ticket, event: Any, gate: Gate) -> None:
        if ticket.connection in self.sessions:
            orig(self, ticket, event, gate)

    patch.set(Switch, "_tell", tell)
    patch.set(Session, "_give_turns_back", lambda self: None)


@mutant("a turn that is withdrawn is kept", "no stuck gate", "whole-requests", "true-cluster")
def withdrawn_keeps_its_turn(patch: Patch) -> None:
    orig = Gate._withdrawn
    patch.set(Gate, "_withdrawn", lambda self, ticket: None if ticket is self._granted else orig(self, ticket))


@mutant("a request's memory is not given back", "bounded memory", "race")
def memory_kept(patch: Patch) -> None:
    def end(self: Session, slot: Any, chunks: Any) -> None:
        slot.chunks, slot.done, slot.reserved_bytes = chunks, True, 0
        self._answer_front()

    patch.set(Session, "_end", end)


# ------------------------------------------------------------------------------------------------ chains and turns


@mutant("what comes behind a failed batch is let in", "a chain falls as a whole: rule 13", "chains", "queues")
def chain_goes_on(patch: Patch) -> None:
    patch.set(Session, "_chain_failed", lambda self, slot, ticket, result: None)


@mutant("what was sent behind a failed batch is tried again", "a chain falls as a whole: rule 13", "mixed-chains")
def sent_behind_goes_on(patch: Patch) -> None:
    patch.set(Gate, "_sent_behind", lambda self, ticket: iter(()))


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
    orig = Gate._offered

    def offered(self: Gate, ticket: g.Ticket, now: float) -> None:
        orig(self, ticket, now)
        if self._queue and self._queue[-1] is ticket:
            self._queue.rotate(1)

    patch.set(Gate, "_offered", offered)


@mutant("a connection that has the turn keeps it", "a gate is fair", "queues", "chains")
def holder_keeps_the_turn(patch: Patch) -> None:
    orig = Gate._advance

    def advance(self: Gate, now: float) -> None:
        if self._in_flight:
            holder = self._in_flight[-1].connection
            self._queue = type(self._queue)(sorted(self._queue, key=lambda t: t.connection != holder))
        orig(self, now)

    patch.set(Gate, "_advance", advance)


@mutant("who waits for a turn waits for ever", "a gate answers in time", "hanging", "one-broker")
def waits_for_ever(patch: Patch) -> None:
    orig = Gate._tick

    def tick(self: Gate, now: float) -> None:
        waiting, self._queue = self._queue, type(self._queue)()
        orig(self, now)
        waiting.extend(self._queue)
        self._queue = waiting

    patch.set(Gate, "_tick", tick)


@mutant("a cold grant is good for ever", "cold: send soon after the read: rule 12", "wide-required", "wide", "cluster")
def cold_grant_never_old(patch: Patch) -> None:
    patch.set(Gate, "may_send", lambda self, ticket, now: ticket is self._granted)


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
    patch.set(Gate, "_is_from_here", lambda self, found, ticket, at: True)


# ------------------------------------------------------------------------------------- what a log goes through, again


@mutant("log end and sequence are not of one moment", "bracketed reads only: rule 6", "race", "one-broker", "cluster")
def read_without_brackets(patch: Patch) -> None:
    orig = world_module.ControlCall._end_after

    def end_after(self: Any, partition: Any, before: int, state: Any, open_transactions: Any) -> None:
        orig(self, partition, self.log_end(partition), state, open_transactions)

    patch.set(world_module.ControlCall, "_end_after", end_after)


@mutant("what may still be queued is not waited for", "beside unstamped appends: rule 8", "true-one", "true-cluster")
def queued_not_waited_for(patch: Patch) -> None:
    patch.set(Gate, "_waits_for_what_may_be_queued", lambda self, ticket, now: False)


@mutant("a successor goes on at once", "after a takeover, wait: rule 8", "takeover")
def takeover_not_waited_for(patch: Patch) -> None:
    patch.set(world_module.Proxy, "taken_over", lambda self, now: True)


@mutant("a predecessor's batch is taken for nobody's", "detected after a takeover: rule 8", "takeover", "true-many")
def takeover_not_detected(patch: Patch) -> None:
    patch.set(
        Gate,
        "_landed_elsewhere",
        lambda self, ticket, result, now: self._accept(ticket, self.memory.add(ticket, result.log_append_time_ms)),
    )


# -------------------------------------------------------------------------------------------- acks=0, other messages


@mutant("batches without a producer id are one chain", "Kafka answers such batches one by one", "switches", "bulky")
def no_independent_batches(patch: Patch) -> None:
    patch.set(g.Ticket, "pipeline", property(lambda self: self.append.producer_id))


@mutant("acks=0 is answered", "acks=0 has no answer", "silent")
def acks_0_answered(patch: Patch) -> None:
    patch.set(Turn, "silent", property(lambda self: False))


@mutant("an append with acks=0 fails in silence", "acks=0: an error closes the connection", "silent")
def acks_0_fails_silently(patch: Patch) -> None:
    orig = Session._finish_turn

    def finish(self: Session, slot: Any, turn: Turn) -> None:
        if turn.silent:
            turn.results = {key: replace(result, error_code=0) for key, result in turn.results.items()}
        orig(self, slot, turn)

    patch.set(Session, "_finish_turn", finish)


@mutant("an expectation with acks=0 is appended", "acks=0: an expectation closes the connection", "silent")
def acks_0_expects(patch: Patch) -> None:
    orig = Session._take_bid

    def take(self: Session, turn: Turn, *rest: Any) -> None:
        request = turn.request
        turn.request = replace(request, acks=1)
        try:
            orig(self, turn, *rest)
        finally:
            turn.request = request

    patch.set(Session, "_take_bid", take)


@mutant("an answer that only passes goes past those before it", "one connection's answers in its order", "asking")
def relayed_answers_overtake(patch: Patch) -> None:
    patch.set(Session, "_upstream_is_blocked", lambda self: False)


@mutant("who waits for memory is not asked again", "no stuck connection", "bulky")
def waits_for_memory(patch: Patch) -> None:
    patch.set(Session, "needs_ticks", property(lambda self: bool(self._answer_by) or self.client_gone))


# -------------------------------------------------------------------------------------------------- the short way
# Those of its defects that no run here shows are in tests/unit/test_short_way.py, which compares it to the general way.


@mutant("the short way stamps while cold", "cold: send soon after the read: rule 12", "idle-chains")
def taken_while_cold(patch: Patch) -> None:
    warm = "if not (self._in_flight or self._warm(ticket, now) or self._tail_is_fresh(now)):"
    patch.edit(Gate, "_stamp_at_end", (warm, "if False:"))


@mutant("the short way takes a retry for a new append", "retries come before the offset check", "true-one")
def taken_retry(patch: Patch) -> None:
    known = "if its_retry_is_known_here and (memory.retry_of(ticket) or self._follows(ticket)):"
    patch.edit(Gate, "take", (known, "if False:"))


@mutant("the short way asks no policy", "what the policy refuses is refused", "liars", "switches", "race")
def taken_without_policy(patch: Patch) -> None:
    patch.edit(
        Gate, "take", ("append.transactional or POLICY.check(append, _FACTS[ticket.check]) is not None", "False")
    )


@mutant("the short way stamps old timestamps", "stamp only fresh timestamps: rules 2, 3", "expiry")
def taken_with_any_timestamp(patch: Patch) -> None:
    patch.edit(Gate, "_stamp_at_end", (" or self._timestamps(ticket, tail, now) is not None", ""))


@mutant("the short way takes contradictions", "an expectation that contradicts its place is a mismatch", "liars-true")
def taken_contradiction(patch: Patch) -> None:
    patch.edit(Gate, "_stamp_at_end", (" or ticket.append.contradiction is not None", ""))


@mutant("the short way goes past who waits", "a gate is fair", "queues", "crowd")
def taken_past_the_queue(patch: Patch) -> None:
    patch.edit(Gate, "take", ("if self._queue or self._granted", "if self._granted"))


@mutant("the short way stamps without comparing", "0 means success only at the expected offset", "race", "liars")
def taken_anywhere(patch: Patch) -> None:
    patch.edit(Gate, "_stamp_at_end", ("if expected != end or ", "if "))


@mutant("the short way does not compare an answer's offset", "0 means success only there", "bypass", "bypass-true")
def landed_anywhere(patch: Patch) -> None:
    patch.edit(Gate, "landed", ("result.base_offset != ticket.at\n", "False\n"))


@mutant("the short way takes a duplicate for a success", "another's batch may lie there: rule 5", "race", "one-broker")
def landed_duplicate(patch: Patch) -> None:
    patch.edit(Gate, "landed", ("or result.log_append_time_ms != -1\n", "\n"))


@mutant("the short way ends whichever append comes first", "no stuck gate", "true-many", "true-one", "true-cluster")
def landed_out_of_order(patch: Patch) -> None:
    patch.edit(Gate, "landed", (" or self._in_flight[0] is not ticket", ""))


@mutant("the short way does not note what landed", "retries come before the offset check", "retries")
def landed_and_forgotten(patch: Patch) -> None:
    patch.edit(Gate, "landed", ("self._note_landed(ticket, result.log_append_time_ms, now)", "pass"))


@mutant(
    "the short way does not count what was not stamped", "every unstamped append shifts the stamp: rule 6", "true-one"
)
def landed_without_a_shift(patch: Patch) -> None:
    patch.edit(Gate, "landed", ("self._moved_by_own(result.base_offset + ticket.append.record_count, ticket)", "pass"))


@mutant("the short way takes an error for a success", "an error is no success", "resends")
def landed_by_an_error(patch: Patch) -> None:
    patch.edit(Session, "_end_single", ("if error or ", "error = 0\n    if "))


@mutant("the short way goes on behind a failed batch", "a chain falls as a whole: rule 13", "chains", "queues")
def taken_behind_a_hole(patch: Patch) -> None:
    patch.edit(Session, "_take_single", (" or self._failed_chains", ""))


@mutant(
    "what took the short way first is never taken back", "settled in time, always", "one-broker", "chains", "cluster"
)
def one_is_not_taken_back(patch: Patch) -> None:
    patch.edit(Session, "_no_short_ways", ("if single is None:", "if single is None or index == 0:"))


@mutant("the short way keeps its memory", "bounded memory", "race")
def short_way_keeps_memory(patch: Patch) -> None:
    patch.edit(Session, "_end_single", ("self._around.release(slot.reserved_bytes)\n", "\n"))


@mutant("the short way is taken by old configs", "a view of the configs has a lease: rule 10", "switches")
def short_way_without_a_lease(patch: Patch) -> None:
    patch.edit(Session, "take_up", (" or not around.fresh(now)", ""))


@mutant("a topic that was not guarded stays so", "what the configs say now holds", "switches")
def never_guarded_again(patch: Patch) -> None:
    patch.edit(Session, "take_up", ("if around.policy(self._known.topic_name) is not None:", "if False:"))


@mutant("a known request names any topic", "what is known of a request is its whole beginning", "wide", "wide-required")
def any_topic_is_known(patch: Patch) -> None:
    patch.set(Session, "_is_known", lambda self, frame, version: version == self._known.version)


@mutant(
    "an answer by the short way goes past those before it", "one connection's answers in its order", "chains", "asking"
)
def short_answers_overtake(patch: Patch) -> None:
    first = "if slot is not to_client[0] or (len(to_client) > 1 and to_client[1].done):"
    patch.edit(
        Session,
        "take_down",
        (first, "if False:"),
        ("del to_client[0], from_upstream[0]", "to_client.remove(from_upstream.pop(0))"),
    )


# ------------------------------------------------------------------------------------------ the doors of counted topics

_GROWING = ("growing", "growing-required")


@mutant("an empty door is one that is closed", "an expansion waits for what is inside", *_GROWING)
def door_forgets_who_is_inside(patch: Patch) -> None:
    patch.edit(Door, "empty", ("not self._inside and ", ""))


@mutant("a closed door lets everybody in", "nothing is appended while a topic grows", *_GROWING)
def door_never_closes(patch: Patch) -> None:
    patch.edit(Door, "admits", ("if self.closed_at is None:", "if True:"))


@mutant("an append whose connection broke is out", "a broker may have it queued", *_GROWING)
def door_without_doubts(patch: Patch) -> None:
    patch.edit(Door, "leave", ("if in_doubt:", "if False:"))


@mutant("a new process has nothing under way", "its predecessor's requests may be queued", *_GROWING)
def door_of_a_new_process_is_clear(patch: Patch) -> None:
    patch.edit(Door, "__init__", ("self._clear_at = clear_at", 'self._clear_at = float("-inf")'))


@mutant("the short way goes past the doors", "every append to a counted topic goes through its door", *_GROWING)
def short_way_past_the_door(patch: Patch) -> None:
    patch.edit(Session, "_take_single", ("policy is None or policy.counted", "policy is None"))


@mutant("what is refused at a door breaks no chain", "what follows a refused batch follows a hole", *_GROWING)
def door_breaks_no_chain(patch: Patch) -> None:
    patch.set(Session, "_chains_fail_at_door", lambda self, slot, turn: None)


@mutant("a request is out as soon as it is sent", "it is inside until Kafka has answered", *_GROWING)
def door_left_when_sent(patch: Patch) -> None:
    sent = "turn.sent.update(turn.unsent())"
    patch.edit(Session, "_send_granted", (sent, f"{sent}; self._leave_door(turn, unsent=True)"))


@mutant(
    "an error that says nothing is a refusal", "only the log tells after it", "server-errors", "server-errors-required"
)
def error_is_final(patch: Patch) -> None:
    patch.set(gate_module, "IN_DOUBT", gate_module.IN_DOUBT - gate_state_module.MAY_BE_FINAL)


@mutant("the same error twice is final whatever the log has", "it is read after the second", "server-errors")
def repeated_error_without_a_look(patch: Patch) -> None:
    ends = "self._settled(ticket, now); self._answer(ticket, result)"
    patch.edit(Settling, "_resent_stamped", ("self._settle_first(now)", ends))


@mutant(
    "when a connection ends, what was sent ahead of the rest of its request is told as not sent",
    "it may be in the log",
    "wide",
    "wide-required",
)
def sent_ahead_and_told_unsent(patch: Patch) -> None:
    patch.edit(Session, "_give_turns_back", ("key not in turn.sent and ", ""))


# ------------------------------------------------------------------------------------------------------- the rules


@dataclass(frozen=True)
class Rule:
    """One rule that the stamp needs in order to hold. `elsewhere` – tests of what of it lies outside the simulated
    core."""

    text: str
    elsewhere: tuple[str, ...] = ()


_PRODUCER_STATE = "tests/integration/test_producer_state.py"
_STATE_TOPIC = "tests/integration/test_state_topic.py"

RULES = {
    1: Rule("An error is final only for a batch that was sent once and answered; after a doubt the log decides"),
    2: Rule("Only batches with fresh timestamps are stamped: Kafka forgets a producer by them"),
    3: Rule("Nor are batches without a timestamp"),
    4: Rule(
        "With LogAppendTime every 0 is read back; a change of that config is noticed",
        (f"{_PRODUCER_STATE}::test_log_append_time_comes_and_goes",),
    ),
    5: Rule("Another's batch is never called the client's; what cannot be read is unknown"),
    6: Rule("A shift comes from a bracketed read, or from what is published; a new base has a new epoch"),
    7: Rule("Markers pass no gate: no transactions where everything has to be stamped, no guess beside open ones"),
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
        "Nothing passes by configs that are older than their lease; a switch-on is reported after it",
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
        "A replica may restore an older sequence: no shift is guessed from it. (Scenarios `compacted` and "
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
def alive(one: Mutant) -> Iterator[None]:
    patch = Patch()
    try:
        one.apply(patch)
        yield
    finally:
        patch.undo()


def hunt(one: Mutant, seeds: int) -> tuple[str, int, str] | None:
    """(scenario, seed, what was found) of the first run that notices it, and that the code as it is passes; None if
    none of so many does."""
    for seed in range(seeds):
        for name in one.scenarios:
            with alive(one):
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
        "Defects that the simulation must notice, each a rule of the gate broken once. Made by `make mutants` from\n"
        "`tests/simulation/mutants.py`; the seed is the first that notices it (`python -m tests.simulation` replays\n"
        "seeds of the code as it is). A seed counts only if the code as it is passes it.\n\n"
        "| mutant | what is wrong with it | the rule | caught by | as |\n|---|---|---|---|---|\n" + table + "\n\n"
        "## The rules of the stamp\n\n"
        "Which mutant breaks which, and the tests of what lies outside the simulated core (the client of the state\n"
        "topic, the brokers' configs).\n\n"
        "| # | rule | broken by | tests elsewhere |\n|---|---|---|---|\n" + _table_of_rules() + "\n"
    )
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
