"""Ordered partition expansion: adds partitions to a checked topic and keeps the order of its keys. A state machine.

The problem: a key that the old count places in partition q may be placed in partition p by the new count. A consumer
reads such a key in order if it reads q up to its *threshold* before it reads p, and two conditions hold. No record
placed by the old count lies after the threshold, and none placed by the new count before it. So appends are blocked
while the count changes. The log end of each prior partition at that time is its threshold.

`Procedure` gets the driver's view of the state topic (`World`) and replies (`Answer`), and returns the next action
(`Effect`), one at a time. It does no I/O and has no clock. Steps:

| step | does | ends when | otherwise |
|---|---|---|---|
| VALIDATE | checks with Kafka (validate-only) that the proxy may create the partitions | it may | Kafka's error |
| INTENT | stores the proposal: all processes close their append barriers | it is the pending one | refused: too late |
| PROBE | (taken over, or in doubt) describes the topic | it has the old or the new count | unordered, failed |
| BARRIERS | waits | every process that may append has reported its append barrier closed | gives up |
| TRANSACTIONS | looks for open transactions in all prior partitions | there are none | gives up |
| CREATE | describes the topic (same topic id?); CreatePartitions | Kafka did it | gives up. No answer: PROBE |
| LEADERS | describes the topic | every partition has a leader | retries |
| ENDS | reads log end and high watermark of each prior partition | all are fully replicated | LEADERS |
| STORE | stores the end: all processes open their append barriers | it is the proposal's end | retries |
| ABANDON | checks with Kafka (validate-only) whether the topic was expanded after all | no: STORE | yes: PROBE |

Before CREATE, any problem that lasts `wait_seconds` ends the expansion: the topic is unchanged, and its append barriers
open at the old count. After CREATE nothing ends it: partitions cannot be removed, and only thresholds give them order.

*Taking over.* The steps leave only records and partitions. So another process, or this one after a restart, begins with
PROBE and repeats what may have been done: closed append barriers are recorded, an expanded topic shows it, and ends are
read again. Two drivers at the same time do no harm: the first stored end counts, and a driver that finds another one in
the view stops. No driver creates or stores an end with an outdated view: a process that was suspended for minutes would
store "failed" for partitions that another one has created. A request of a dead driver may wait in Kafka's queue for
`in_doubt_seconds`, so until then a successor does not store "failed".

*The check before giving up.* Any broker answers Metadata, and its copy may lag: an expanded topic would be
reopened at its old count. The controller answers CreatePartitions, and it decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.expansion.history import (
    NO_EXPANSIONS,
    Assignments,
    Expansion,
    ExpansionHistory,
    encode_claim,
    encode_closed,
    encode_done,
    encode_expansion,
    encode_failed,
    encode_unordered_end,
)
from fencepost_proxy.types import LeaderEpoch, LogEndOffset, Offset, Transactor
from fencepost_proxy.wire.state_records import StateRecord

#: Pause before a retry: first, and at most.
_PAUSE_SECONDS: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 1.0
#: The topic must be missing from metadata this many times to be considered deleted.
_MISSING_TOPIC_TRIES: Final = 4
_TOO_OLD: Final = "the state topic was not read recently enough"
#: First words of messages to clients.
IN_PROGRESS: Final = "EXPANSION_IN_PROGRESS"
FAILED: Final = "EXPANSION_FAILED"
NOT_A_MULTIPLE: Final = "EXPANSION_NOT_A_MULTIPLE"
#: CreatePartitions errors that mean the topic has changed: another count, or no such topic.
_EXPANDED_OR_DELETED: Final = frozenset({Error.INVALID_PARTITIONS, Error.UNKNOWN_TOPIC_OR_PARTITION})


class Step(Enum):
    VALIDATE = "validate"
    INTENT = "intent"
    PROBE = "probe"
    BARRIERS = "barriers"
    TRANSACTIONS = "transactions"
    CREATE = "create"
    LEADERS = "leaders"
    ENDS = "ends"
    STORE = "store"
    ABANDON = "give up"


# --- input ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class World:
    """The driver's view. `own_names`: all names that its process has had.

    `not_closed`: processes that may append, or whose requests may still be queued in Kafka, and that have not reported
    their append barrier closed. `fresh`: the view is recent enough to rely on.
    """

    history: ExpansionHistory
    own_names: frozenset[UUID]
    not_closed: tuple[UUID, ...]
    fresh: bool = True


class Appended(NamedTuple):
    """The records are in the state topic, and in the view."""


class NotAppended(NamedTuple):
    """They are not, and never will be. `in_doubt`: unknown, the view may show them later."""

    reason: str
    in_doubt: bool


class Described(NamedTuple):
    """Current metadata. `topic_id` None: no such topic."""

    topic_id: UUID | None
    partition_count: int = 0
    leaderless: tuple[int, ...] = ()


class TransactionsOpen(NamedTuple):
    """Producers with an open transaction, per prior partition that has any."""

    producers: Mapping[int, Sequence[Transactor]]


class Created(NamedTuple):
    """CreatePartitions answered 0."""


class Refused(NamedTuple):
    """CreatePartitions answered an error that means that nothing was created."""

    code: int
    message: str | None


class PartitionEnd(NamedTuple):
    epoch: LeaderEpoch
    log_end: LogEndOffset
    high_watermark: Offset


class Ends(NamedTuple):
    """Of all prior partitions, in order, each under one leader epoch."""

    ends: tuple[PartitionEnd, ...]


class Unanswered(NamedTuple):
    """No request reached Kafka, or no answer came: the request may have been executed, or may be later."""

    reason: str


Answer = Appended | NotAppended | Described | TransactionsOpen | Created | Refused | Ends | Unanswered


# --- output ---------------------------------------------------------------------------------------------------------


class Append(NamedTuple):
    """Answered by Appended or NotAppended."""

    records: tuple[StateRecord, ...]


class Describe(NamedTuple):
    """Answered by Described or Unanswered."""


class ProbeTransactions(NamedTuple):
    """Answered by TransactionsOpen or Unanswered."""

    partitions: range


class CreatePartitions(NamedTuple):
    """Answered by Created, Refused or Unanswered."""

    to_count: int
    assignments: Assignments | None
    validate_only: bool


class ReadEnds(NamedTuple):
    """Answered by Ends or Unanswered."""

    partitions: range


class Wait(NamedTuple):
    """Wait until the view changes, at most until `until`. `why`: for the log and the status page."""

    until: float
    why: str


class Result(Enum):
    DONE = "done"
    FAILED = "failed"
    UNORDERED = "unordered"
    #: Nothing was begun.
    REFUSED = "refused"
    #: Unknown here whether it has begun, or how it ends: the view will show it.
    UNKNOWN = "unknown"
    #: Another process drives it now.
    SUPERSEDED = "superseded"
    #: The topic and all its records were deleted.
    DELETED = "deleted"


class Ended(NamedTuple):
    """Finished. `code`, `message`: for the client that requested it."""

    result: Result
    code: int = Error.NONE
    message: str | None = None


Effect = Append | Describe | ProbeTransactions | CreatePartitions | ReadEnds


# --- state machine --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Procedure:
    """See the module. `query` returns the next action; pass its reply to `handle` before `query` is called again.

    `taken_over`: the expansion is in the view already, and another process may have executed any step.
    `new_id`, `clock_ms`: fresh UUIDs, and wall-clock times for records.
    """

    expansion: Expansion
    now: float
    wait_seconds: float
    in_doubt_seconds: float
    new_id: Callable[[], UUID]
    clock_ms: Callable[[], int]
    taken_over: bool = False
    step: Step = Step.VALIDATE
    #: Seconds per step, in the order in which the steps began.
    took: dict[Step, float] = field(default_factory=dict)
    #: Why it has not advanced, for operators.
    waits_for: str = ""
    _since: float = 0.0
    _begun: float = 0.0
    _stored: bool = False
    _created: bool = False
    #: The controller reports another count; metadata will show it later.
    _has_expanded: bool = False
    _missed: int = 0
    #: Described in this step.
    _is_there: bool = False
    _in_doubt_until: float = float("-inf")
    _pause: float = _PAUSE_SECONDS
    _paused_until: float = float("-inf")
    _failure: Ended | None = None
    #: Encodes the record that STORE stores.
    _decision: Callable[[UUID, int], StateRecord] | None = None
    _ended: Ended | None = None

    def __post_init__(self) -> None:
        self._since = self._begun = self.now
        if self.taken_over:
            self.step = Step.PROBE
            self._stored = True
            self._in_doubt_until = self.now + self.in_doubt_seconds

    # ---- next action

    def query(self, world: World, now: float) -> Effect | Wait | Ended:
        self.now = now
        while True:
            ended = self._ended or self._ended_in(world)
            if ended is not None:
                self._record_time()
                return ended
            if now < self._paused_until:
                return Wait(self._paused_until, self.waits_for)
            requested = self._requested(world)
            if requested is not None:
                return requested

    def _ended_in(self, world: World) -> Ended | None:
        """The result according to the view; None while this process is the driver."""
        if not self._stored:
            return None
        history, proposal = world.history, self.expansion.proposal
        if history.pending is not None and history.pending.proposal == proposal:
            if history.driver in world.own_names:
                return None
            text = f"{IN_PROGRESS} {self._name}: another proxy process has taken it over"
            return Ended(Result.SUPERSEDED, Error.REQUEST_TIMED_OUT, text)
        ended = history.ended(proposal)
        if ended is not None:
            return self._unordered(ended.to_count) if ended.unordered else Ended(Result.DONE)
        if proposal in history.failed:
            if self._failure is not None:
                return self._failure
            return Ended(Result.FAILED, Error.POLICY_VIOLATION, f"{FAILED} {self._name}: {history.failed[proposal]}")
        if self.step is Step.INTENT and history != NO_EXPANSIONS:
            text = f"{IN_PROGRESS} {self._name}: another expansion of the topic began earlier"
            return Ended(Result.REFUSED, Error.INVALID_PARTITIONS, text)
        return Ended(Result.DELETED, Error.UNKNOWN_TOPIC_OR_PARTITION, f"{self._name}: the topic was deleted")

    def _requested(self, world: World) -> Effect | Wait | None:
        """None: the step changed, or the procedure ended."""
        expansion = self.expansion
        match self.step:
            case Step.VALIDATE | Step.ABANDON:
                if self.step is Step.ABANDON and self.now < self._in_doubt_until:
                    return self._wait(self._in_doubt_until, "a request of another process may still be queued in Kafka")
                return CreatePartitions(expansion.to_count, expansion.assignments, validate_only=True)
            case Step.INTENT if not self._stored:
                return Append((encode_expansion(expansion),))
            case Step.PROBE | Step.LEADERS:
                return Describe()
            case Step.BARRIERS:
                return self._barriers(world)
            case Step.TRANSACTIONS:
                return ProbeTransactions(expansion.prior_partitions)
            case Step.CREATE:
                if not world.fresh:
                    return self._wait(self.now + _PAUSE_SECONDS, _TOO_OLD)
                if not self._is_there:
                    return Describe()
                return CreatePartitions(expansion.to_count, expansion.assignments, validate_only=False)
            case Step.ENDS:
                return ReadEnds(expansion.prior_partitions)
            case Step.STORE:
                assert self._decision is not None
                if not world.fresh:
                    return self._wait(self.now + _PAUSE_SECONDS, _TOO_OLD)
                return Append((self._decision(self.new_id(), self.clock_ms()),))
        self._enter_step(Step.BARRIERS)  # INTENT is in the view
        return None

    def _barriers(self, world: World) -> Wait | None:
        if not world.not_closed:
            self._enter_step(Step.LEADERS if self._created else Step.TRANSACTIONS)
            return None
        names = ", ".join(str(each) for each in sorted(world.not_closed, key=str))
        why = f"proxy process(es) {names} have not closed the topic yet: transactions or requests in progress"
        if self._too_late:
            self._give_up(why)
            return None
        return self._wait(self.now + _PAUSE_SECONDS_MAX, why)

    # ---- replies

    def handle(self, answer: Answer, now: float) -> None:
        self.now = now
        match self.step, answer:
            case Step.VALIDATE, Created():
                self._enter_step(Step.INTENT)
            case Step.VALIDATE, Refused(code, message):
                self._ended = Ended(Result.REFUSED, code, self._refused_text(code, message))
            case Step.VALIDATE, Unanswered(reason):
                self._ended = Ended(Result.REFUSED, Error.REQUEST_TIMED_OUT, f"{self._name}: {reason}")

            case Step.INTENT, Appended():
                self._stored = True
                self._begun = now
            case Step.INTENT, NotAppended(reason, in_doubt):
                result = Result.UNKNOWN if in_doubt else Result.REFUSED
                self._ended = Ended(result, Error.REQUEST_TIMED_OUT, f"{self._name}: {reason}")

            case Step.PROBE | Step.CREATE | Step.LEADERS, Described():
                self._described(answer)
            case Step.TRANSACTIONS, TransactionsOpen(producers):
                self._transactions(producers)

            case Step.CREATE, Created():
                self._created = True
                self._enter_step(Step.LEADERS)
            case Step.CREATE, Refused(code, message):
                self._create_refused(code, message)
            case Step.CREATE, Unanswered(reason) if self._is_there:
                self._in_doubt_until = now + self.in_doubt_seconds
                self._probe(reason)

            case Step.ENDS, Ends(ends):
                self._read(ends)
            case Step.ENDS, Unanswered(reason):
                self._enter_step(Step.LEADERS)  # a leader, or the topic, may be missing again
                self._again(reason)

            case Step.STORE, Appended():
                pass  # the view has it, and shows whether it was the first
            case Step.STORE, NotAppended(reason):
                self._again(reason)

            case Step.ABANDON, Created():
                self._fail()
            case Step.ABANDON, Refused(code):
                if code in _EXPANDED_OR_DELETED:
                    self._probe_after(code)
                else:
                    self._fail()

            case Step.TRANSACTIONS, Unanswered(reason) if self._too_late:
                self._give_up(f"failed to look for open transactions: {reason}")
            case Step.CREATE, Unanswered(reason) if self._too_late:
                self._give_up(f"failed to describe the topic: {reason}")
            case _, Unanswered(reason):
                self._again(reason)
            case step, _:
                raise ValueError(f"{answer} is not a reply to step {step.value}")

    def _described(self, topic: Described) -> None:
        if topic.topic_id != self.expansion.topic_id:
            self._not_there(certainly=topic.topic_id is not None)
            return
        self._missed = 0
        if self.step is Step.PROBE:
            self._probed(topic.partition_count)
        elif self.step is Step.CREATE:
            self._is_there = True
        elif topic.partition_count < self.expansion.to_count or topic.leaderless:
            self._again(f"partitions without a leader: {', '.join(map(str, topic.leaderless)) or 'not known yet'}")
        else:
            self._enter_step(Step.ENDS)

    def _probed(self, count: int) -> None:
        expansion = self.expansion
        if count == expansion.to_count:
            self._created = True
            self._enter_step(Step.BARRIERS)
        elif count < expansion.from_count or (count == expansion.from_count and self._has_expanded):
            self._again("metadata is outdated")
        elif count == expansion.from_count:
            self._enter_step(Step.BARRIERS)
        else:
            reason = f"the topic has {count} partitions"
            self._decision = lambda end, at_ms: encode_unordered_end(
                expansion, end, to_count=count, reason=reason, at_ms=at_ms
            )
            self._enter_step(Step.STORE)

    def _transactions(self, producers: Mapping[int, Sequence[Transactor]]) -> None:
        if not producers:
            self._enter_step(Step.CREATE)
            return
        where = "; ".join(
            f"partition {partition}: producer id {', '.join(str(producer_id) for producer_id, _ in transactors)}"
            for partition, transactors in sorted(producers.items())[:5]
        )
        why = f"transactions are open ({where})"
        if self._too_late:
            self._give_up(why)
        else:
            self._again(why)

    def _create_refused(self, code: int, message: str | None) -> None:
        if code in _EXPANDED_OR_DELETED:
            self._probe_after(code)
        else:
            self._failure = Ended(Result.FAILED, code, self._refused_text(code, message))
            self._enter_step(Step.ABANDON)

    def _probe_after(self, code: int) -> None:
        # 37 after the same request was valid: it has been executed, or another client's was.
        self._has_expanded = code == Error.INVALID_PARTITIONS
        self._probe(f"CreatePartitions returned {error_name(code)}")

    def _read(self, ends: tuple[PartitionEnd, ...]) -> None:
        not_replicated = [index for index, each in enumerate(ends) if each.high_watermark < each.log_end]
        if not_replicated:
            self._again(f"partitions not fully replicated: {', '.join(map(str, not_replicated))}")
            return
        expansion = self.expansion
        thresholds = [each.log_end for each in ends]
        epochs = [each.epoch for each in ends]
        # If another process began it, only the wall clock shows for how long appends were blocked.
        blocked_ms = None if self.taken_over else int((self.now - self._begun) * 1000)

        def encode(end: UUID, at_ms: int) -> StateRecord:
            blocked = max(0, at_ms - expansion.at_ms) if blocked_ms is None else blocked_ms
            return encode_done(expansion, end, thresholds=thresholds, epochs=epochs, at_ms=at_ms, blocked_ms=blocked)

        self._decision = encode
        self._enter_step(Step.STORE)

    def _not_there(self, *, certainly: bool) -> None:
        """A broker that just started may not know a topic yet, so it must be missing several times in a row."""
        self._missed += 1
        if not certainly and self._missed < _MISSING_TOPIC_TRIES:
            self._again("the topic is not in the metadata")
            return
        text = f"{FAILED} {self._name}: the topic was deleted"
        self._failure = Ended(Result.FAILED, Error.UNKNOWN_TOPIC_OR_PARTITION, text)
        self._fail()

    def _give_up(self, why: str) -> None:
        text = f"{FAILED} {self._name}: after {self.wait_seconds:g} s (limits.expansion_wait_seconds) {why}"
        self._failure = Ended(Result.FAILED, Error.POLICY_VIOLATION, text)
        self._enter_step(Step.ABANDON)

    def _fail(self) -> None:
        assert self._failure is not None
        assert self._failure.message is not None
        expansion, reason = self.expansion, self._failure.message
        self._decision = lambda end, at_ms: encode_failed(expansion, end, reason=reason, at_ms=at_ms)
        self._enter_step(Step.STORE)

    def _unordered(self, count: int) -> Ended:
        text = f"{self._name}: a client that bypassed the proxy expanded the topic to {count} partitions, without order"
        return Ended(Result.UNORDERED, Error.INVALID_PARTITIONS, text)

    # ---- helpers

    @property
    def _name(self) -> str:
        expansion = self.expansion
        return f"topic={expansion.topic} from={expansion.from_count} to={expansion.to_count}"

    @property
    def _too_late(self) -> bool:
        return not self._created and self.now - self._begun >= self.wait_seconds

    def _refused_text(self, code: int, message: str | None) -> str:
        text = f"{FAILED} {self._name}: Kafka refused to create the partitions: {error_name(code)} ({message})"
        if code == Error.TOPIC_AUTHORIZATION_FAILED:
            text += ". Give the proxy's own principal the right to ALTER the topic"
        return text

    def _enter_step(self, step: Step) -> None:
        self._record_time()
        self._pause = _PAUSE_SECONDS
        self._is_there = False
        self.step = step
        self.waits_for = ""

    def _probe(self, why: str) -> None:
        """Kafka's answer contradicts the known state, or is missing."""
        self._enter_step(Step.PROBE)
        self._again(why)

    def _again(self, why: str) -> None:
        self._paused_until = self.now + self._pause
        self._pause = min(self._pause * 2, _PAUSE_SECONDS_MAX)
        self.waits_for = why

    def _wait(self, until: float, why: str) -> Wait:
        self.waits_for = why
        return Wait(until, why)

    def _record_time(self) -> None:
        self.took[self.step] = self.took.get(self.step, 0.0) + self.now - self._since
        self._since = self.now


def not_a_multiple(topic: str, from_count: int, to_count: int) -> str | None:
    """Refusal text if `to_count` is not a multiple of `from_count`, else None."""
    if to_count % from_count == 0:
        return None
    return (
        f"{NOT_A_MULTIPLE} topic={topic} from={from_count} to={to_count}: keys placed by hash % count would move "
        "between existing partitions, and consumers would read them out of order (expand it to "
        f"{from_count * 2}, {from_count * 3} or {from_count * 4}, or set fencepost.ordered.partition.expansion=any if "
        "keys move to new partitions only)"
    )


# --- append barrier of each process ---------------------------------------------------------------------------------


class Hold(NamedTuple):
    """Close the append barrier except for these producers. Do it now; no reply is needed."""

    but_for: frozenset[Transactor]


class IsClosed(NamedTuple):
    """All processes can read that the append barrier is closed: nothing to do until the end is stored."""


@dataclass(slots=True)
class Closing:
    """Runs in every process during a pending expansion: closes its append barrier, drains it and reports it.

    Open transactions must be able to end, so batches of their producers may pass until there are none. Only one order
    of events proves that no transaction is open: the barrier is closed for all, then empty, then a read finds none.
    Otherwise a transaction whose first batch was in flight at the read may be open since.

    Polled like `Procedure`. The append barrier must be closed for all before the first poll.
    """

    expansion: Expansion
    #: Producers for which the append barrier is open.
    but_for: frozenset[Transactor] = frozenset()
    _conclusive: bool = False
    _nothing_open: bool = False
    _pause: float = _PAUSE_SECONDS
    _paused_until: float = float("-inf")

    def query(
        self, history: ExpansionHistory, process: UUID, *, empty: bool, now: float
    ) -> ProbeTransactions | Append | Wait | IsClosed:
        """`empty`: its append barrier is. `process`: current name of this process; it may have changed."""
        if process in history.closed:
            return IsClosed()
        if self._nothing_open:
            return Append((encode_closed(self.expansion, process),))
        if now < self._paused_until:
            return Wait(self._paused_until, "transactions and requests in progress")
        self._conclusive = empty and not self.but_for
        return ProbeTransactions(self.expansion.prior_partitions)

    def handle(self, answer: Answer, now: float) -> Hold | None:
        """The new state of the append barrier, if it changes."""
        self._paused_until = now + self._pause
        self._pause = min(self._pause * 2, _PAUSE_SECONDS_MAX / 4)
        if not isinstance(answer, TransactionsOpen):
            return None
        producers = frozenset(each for transactors in answer.producers.values() for each in transactors)
        self._nothing_open = self._conclusive and not producers
        if producers == self.but_for:
            return None
        self.but_for = producers
        return Hold(producers)


# --- driver ---------------------------------------------------------------------------------------------------------


class Drive(NamedTuple):
    """This process drives the expansion."""

    expansion: Expansion


class Claim(NamedTuple):
    """The driver is dead: append this record, then see in the view which claim won."""

    record: StateRecord


def driver(
    history: ExpansionHistory,
    *,
    own_names: frozenset[UUID],
    process: UUID,
    live: frozenset[UUID],
    new_id: Callable[[], UUID],
) -> Drive | Claim | None:
    """What process `process` must do about a pending expansion. None: there is none, or another live process drives it.

    `live`: the other processes that are not known to be dead.
    """
    if history.pending is None:
        return None
    if history.driver in own_names:
        return Drive(history.pending)
    if history.driver in live:
        return None
    return Claim(encode_claim(history.pending, history.driver_round + 1, new_id(), process))
