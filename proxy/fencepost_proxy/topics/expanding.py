"""How a counted topic gets more partitions without losing the order of its keys: the procedure, as a state machine.

What is at stake: a key that the old count puts into partition q and the new one into partition p. A consumer that reads
p only once it is done with q up to the *threshold* sees the key in order, if nothing that was hashed over the old count
lies behind the threshold, and nothing that was hashed over the new one before it. So appends are held while the count
changes, and where each prior partition ends then is its threshold.

`Procedure` is told what the driver's view of the state topic says (`World`) and what came of its questions (`Answer`),
and says what to do next (`Effect`), one thing at a time. It does no I/O and knows no clock. The steps:

| step | does | over when | if that cannot be |
|---|---|---|---|
| VALIDATE | asks Kafka whether the proxy itself may, and whether it makes sense | Kafka says yes | Kafka's error |
| INTENT | stores the proposal: all processes close their doors | it is the topic's pending one | refused: too late |
| LOOK | (taken over, or in doubt) describes the topic | it has the old count or the new one | unordered, failed |
| DOORS | waits | every process that may append has said that it is closed | gives up |
| TRANSACTIONS | looks for open transactions in all prior partitions | there are none | gives up |
| CREATE | describes the topic (is it still this one?); CreatePartitions | Kafka did it | gives up. No answer: LOOK |
| LEADERS | describes the topic | every partition has a leader | goes on trying |
| ENDS | log end, high watermark of each prior partition | all are replicated to their ends | LEADERS |
| STORE | stores the end: all processes open their doors | it is the end of the proposal | goes on trying |
| GIVE_UP | asks Kafka (validate-only) whether it has grown all the same | it has not: STORE | it has: LOOK |

Until CREATE anything that goes wrong for `wait_seconds` gives up: the topic is as it was, and its doors open at the old
count. From then on nothing does: what was created cannot be taken back, and only thresholds make it orderly.

*Taking over.* The steps leave nothing behind but records and partitions, so another process (or this one, started
anew) begins with LOOK and does again what may have been done: a closed door has been told of, a topic that has grown
shows it, ends are read anew. Two that drive at the same time (one was only slow) do no harm: the first end that is
stored counts, and who finds another driver in the view stops. Nothing is created or ended by a view that is too old:
who was stopped for minutes would end as failed what another one has created meanwhile. What one that is gone has sent
to Kafka may still be in a queue there for `doubt_seconds`, so for that long nobody who took over ends it as failed.

*Why Kafka is asked before giving up.* Metadata comes from any broker, and one may be behind: a topic that has grown
would be reopened at its old count. CreatePartitions is answered by the controller, which decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.errors import Error
from fencepost_proxy.topics.expansions import (
    NO_GROWTH,
    Assignments,
    Expansion,
    Growth,
    encode_claim,
    encode_closed,
    encode_done,
    encode_expansion,
    encode_failed,
    encode_unordered_end,
)
from fencepost_proxy.topics.records import StateRecord
from fencepost_proxy.types import LeaderEpoch, LogEndOffset, Offset, Transactor

#: Pauses before something is tried or looked at again: at first, and at most.
_PAUSE_SECONDS: Final = 0.05
_PAUSE_SECONDS_MAX: Final = 1.0
#: How often a topic must be missing from metadata before that is believed.
_MISSING_TOPIC_LOOKS: Final = 4
_TOO_OLD: Final = "the state topic is not read recently enough"
#: How messages to clients begin.
IN_PROGRESS: Final = "EXPANSION_IN_PROGRESS"
FAILED: Final = "EXPANSION_FAILED"
NOT_A_MULTIPLE: Final = "EXPANSION_NOT_A_MULTIPLE"
#: Answers of CreatePartitions that say that the topic is not as it was: another count, no such topic.
_GROWN_OR_GONE: Final = frozenset({Error.INVALID_PARTITIONS, Error.UNKNOWN_TOPIC_OR_PARTITION})


class Step(Enum):
    VALIDATE = "validate"
    INTENT = "intent"
    LOOK = "look"
    DOORS = "doors"
    TRANSACTIONS = "transactions"
    CREATE = "create"
    LEADERS = "leaders"
    ENDS = "ends"
    STORE = "store"
    GIVE_UP = "give up"


# --- what it is told ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class World:
    """What the driver sees without asking. `own` – all names that its process has gone by.

    `not_closed` – processes that may append, or whose requests may still be in a queue of Kafka's, and that have not
    said that their door is closed. `fresh` – whether the view is recent enough to rely on.
    """

    growth: Growth
    own: frozenset[UUID]
    not_closed: tuple[UUID, ...]
    fresh: bool = True


class Appended(NamedTuple):
    """The records are in the state topic, and in the view."""


class NotAppended(NamedTuple):
    """They are not, and never will be; or that cannot be known (`in_doubt`): then the view may show them yet."""

    reason: str
    in_doubt: bool


class Described(NamedTuple):
    """What metadata says now. `topic_id` None: there is no such topic."""

    topic_id: UUID | None
    partition_count: int = 0
    leaderless: tuple[int, ...] = ()


class TransactionsOpen(NamedTuple):
    """Per prior partition the producers with a transaction open; partitions without are left out."""

    producers: Mapping[int, Sequence[Transactor]]


class Created(NamedTuple):
    """CreatePartitions was answered with 0."""


class Refused(NamedTuple):
    """CreatePartitions was answered with an error that says that nothing was created."""

    code: int
    message: str | None


class PartitionEnd(NamedTuple):
    epoch: LeaderEpoch
    log_end: LogEndOffset
    high_watermark: Offset


class Ends(NamedTuple):
    """Of all prior partitions, in order; each under one leader epoch."""

    ends: tuple[PartitionEnd, ...]


class Unanswered(NamedTuple):
    """Kafka could not be asked, or gave no answer: what was asked for may have been done, or may yet be."""

    reason: str


Answer = Appended | NotAppended | Described | TransactionsOpen | Created | Refused | Ends | Unanswered


# --- what it wants --------------------------------------------------------------------------------------------------


class Append(NamedTuple):
    """Answered by Appended or NotAppended."""

    records: tuple[StateRecord, ...]


class Describe(NamedTuple):
    """Answered by Described or Unanswered."""


class LookAtTransactions(NamedTuple):
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
    """Until the view changes, or until then at most. `why` – for the log and the status page."""

    until: float
    why: str


class Result(Enum):
    DONE = "done"
    FAILED = "failed"
    UNORDERED = "unordered"
    #: Nothing was begun.
    REFUSED = "refused"
    #: Whether it has begun, or how it ends, is not known here: the view will show it.
    UNKNOWN = "unknown"
    #: Another process drives it now.
    SUPERSEDED = "superseded"
    #: The topic was deleted, and all that was known of it.
    DELETED = "deleted"


class Ended(NamedTuple):
    """Nothing more to do. `code`, `message` – for the client who asked for it."""

    result: Result
    code: int = Error.NONE
    message: str | None = None


Effect = Append | Describe | LookAtTransactions | CreatePartitions | ReadEnds


# --- the machine ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Verdict:
    """What STORE stores."""

    encode: Callable[[UUID, int], StateRecord]


@dataclass(slots=True)
class Procedure:
    """See the module. `ask` says what is wanted; `handle` is told what came of it, before `ask` is called again.

    `taken_over` – the expansion is in the view already, and somebody else may have gone any way with it.
    `new_id`, `clock_ms` – for names that were never used before, and wall-clock times in records.
    """

    expansion: Expansion
    now: float
    wait_seconds: float
    doubt_seconds: float
    new_id: Callable[[], UUID]
    clock_ms: Callable[[], int]
    taken_over: bool = False
    step: Step = Step.VALIDATE
    #: Seconds that each step has taken, in the order in which they were begun.
    took: dict[Step, float] = field(default_factory=dict)
    #: Why it has not moved on, for people.
    waits_for: str = ""
    _since: float = 0.0
    _begun: float = 0.0
    _stored: bool = False
    _created: bool = False
    #: The controller says that the count is another one; metadata must show it sooner or later.
    _has_grown: bool = False
    _missed: int = 0
    #: Described a moment ago, in this step.
    _is_there: bool = False
    _doubt_until: float = float("-inf")
    _pause: float = _PAUSE_SECONDS
    _paused_until: float = float("-inf")
    _failure: Ended | None = None
    _verdict: _Verdict | None = None
    _ended: Ended | None = None

    def __post_init__(self) -> None:
        self._since = self._begun = self.now
        if self.taken_over:
            self.step = Step.LOOK
            self._stored = True
            self._doubt_until = self.now + self.doubt_seconds

    # ---- what next

    def ask(self, world: World, now: float) -> Effect | Wait | Ended:
        self.now = now
        while True:
            ended = self._ended or self._ended_in(world)
            if ended is not None:
                self._note_time()
                return ended
            if now < self._paused_until:
                return Wait(self._paused_until, self.waits_for)
            wanted = self._wanted(world)
            if wanted is not None:
                return wanted

    def _ended_in(self, world: World) -> Ended | None:
        """What the view says came of it; None while it is this process's to carry out."""
        if not self._stored:
            return None
        growth, proposal = world.growth, self.expansion.proposal
        if growth.pending is not None and growth.pending.proposal == proposal:
            if growth.driver in world.own:
                return None
            text = f"{IN_PROGRESS} {self._name}: another proxy process goes on with it"
            return Ended(Result.SUPERSEDED, Error.REQUEST_TIMED_OUT, text)
        ended = growth.ended(proposal)
        if ended is not None:
            return self._unordered(ended.to_count) if ended.unordered else Ended(Result.DONE)
        if proposal in growth.failed:
            if self._failure is not None:
                return self._failure
            return Ended(Result.FAILED, Error.POLICY_VIOLATION, f"{FAILED} {self._name}: {growth.failed[proposal]}")
        if self.step is Step.INTENT and growth != NO_GROWTH:
            text = f"{IN_PROGRESS} {self._name}: another expansion of the topic was begun before"
            return Ended(Result.REFUSED, Error.INVALID_PARTITIONS, text)
        return Ended(Result.DELETED, Error.UNKNOWN_TOPIC_OR_PARTITION, f"{self._name}: the topic was deleted")

    def _wanted(self, world: World) -> Effect | Wait | None:
        """None: it has moved on to another step, or has ended."""
        expansion = self.expansion
        match self.step:
            case Step.VALIDATE | Step.GIVE_UP:
                if self.step is Step.GIVE_UP and self.now < self._doubt_until:
                    return self._wait(self._doubt_until, "what another process has asked Kafka for may still happen")
                return CreatePartitions(expansion.to_count, expansion.assignments, validate_only=True)
            case Step.INTENT if not self._stored:
                return Append((encode_expansion(expansion),))
            case Step.LOOK | Step.LEADERS:
                return Describe()
            case Step.DOORS:
                return self._doors(world)
            case Step.TRANSACTIONS:
                return LookAtTransactions(expansion.priors)
            case Step.CREATE:
                if not world.fresh:
                    return self._wait(self.now + _PAUSE_SECONDS, _TOO_OLD)
                if not self._is_there:
                    return Describe()
                return CreatePartitions(expansion.to_count, expansion.assignments, validate_only=False)
            case Step.ENDS:
                return ReadEnds(expansion.priors)
            case Step.STORE:
                assert self._verdict is not None
                if not world.fresh:
                    return self._wait(self.now + _PAUSE_SECONDS, _TOO_OLD)
                return Append((self._verdict.encode(self.new_id(), self.clock_ms()),))
        self._go(Step.DOORS)  # INTENT, and the view has it
        return None

    def _doors(self, world: World) -> Wait | None:
        if not world.not_closed:
            self._go(Step.LEADERS if self._created else Step.TRANSACTIONS)
            return None
        names = ", ".join(str(each) for each in sorted(world.not_closed, key=str))
        why = f"proxy process(es) {names} have not closed the topic yet: transactions, or what may be under way there"
        if self._too_late:
            self._give_up(why)
            return None
        return self._wait(self.now + _PAUSE_SECONDS_MAX, why)

    # ---- what came of it

    def handle(self, answer: Answer, now: float) -> None:
        self.now = now
        match self.step, answer:
            case Step.VALIDATE, Created():
                self._go(Step.INTENT)
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

            case Step.LOOK | Step.CREATE | Step.LEADERS, Described(topic_id) if topic_id != self.expansion.topic_id:
                self._not_there(certainly=topic_id is not None)
            case Step.LOOK, Described(_, count):
                self._looked(count)
            case Step.LEADERS, Described(_, count, leaderless):
                self._missed = 0
                if count < self.expansion.to_count or leaderless:
                    self._again(f"partitions without a leader: {', '.join(map(str, leaderless)) or 'not known yet'}")
                else:
                    self._go(Step.ENDS)

            case Step.TRANSACTIONS, TransactionsOpen(producers):
                self._transactions(producers)

            case Step.CREATE, Described():
                self._missed, self._is_there = 0, True
            case Step.CREATE, Created():
                self._created = True
                self._go(Step.LEADERS)
            case Step.CREATE, Refused(code, message):
                self._create_refused(code, message)
            case Step.CREATE, Unanswered(reason) if self._is_there:
                self._doubt_until = now + self.doubt_seconds
                self._look(reason)

            case Step.ENDS, Ends(ends):
                self._read(ends)
            case Step.ENDS, Unanswered(reason):
                self._go(Step.LEADERS)  # one may be gone again; or the topic is
                self._again(reason)

            case Step.STORE, Appended():
                pass  # the view has it, and says whether it was the first
            case Step.STORE, NotAppended(reason):
                self._again(reason)

            case Step.GIVE_UP, Created():
                self._fail()
            case Step.GIVE_UP, Refused(code):
                if code in _GROWN_OR_GONE:
                    self._has_grown = code == Error.INVALID_PARTITIONS
                    self._look(f"CreatePartitions is answered with error {code}")
                else:
                    self._fail()

            case Step.TRANSACTIONS, Unanswered(reason) if self._too_late:
                self._give_up(f"whether transactions are open cannot be found out: {reason}")
            case Step.CREATE, Unanswered(reason) if self._too_late:
                self._give_up(f"whether the topic is still there cannot be found out: {reason}")
            case _, Unanswered(reason):
                self._again(reason)
            case step, _:
                raise ValueError(f"{answer} is no answer to what step {step.value} asks")

    def _looked(self, count: int) -> None:
        expansion = self.expansion
        self._missed = 0
        if count == expansion.to_count:
            self._created = True
            self._go(Step.DOORS)
        elif count < expansion.from_count or (count == expansion.from_count and self._has_grown):
            self._again("metadata is behind")
        elif count == expansion.from_count:
            self._go(Step.DOORS)
        else:
            reason = f"the topic has {count} partitions"
            self._verdict = _Verdict(
                lambda end, at_ms: encode_unordered_end(expansion, end, to_count=count, reason=reason, at_ms=at_ms)
            )
            self._go(Step.STORE)

    def _transactions(self, producers: Mapping[int, Sequence[Transactor]]) -> None:
        if not producers:
            self._go(Step.CREATE)
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
        if code in _GROWN_OR_GONE:
            # 37 after the same request was found valid: it has been carried out, or somebody else's was.
            self._has_grown = code == Error.INVALID_PARTITIONS
            self._look(f"CreatePartitions is answered with error {code}")
        else:
            self._failure = Ended(Result.FAILED, code, self._refused_text(code, message))
            self._go(Step.GIVE_UP)

    def _read(self, ends: tuple[PartitionEnd, ...]) -> None:
        behind = [index for index, each in enumerate(ends) if each.high_watermark < each.log_end]
        if behind:
            self._again(f"partitions not replicated to their end: {', '.join(map(str, behind))}")
            return
        expansion = self.expansion
        thresholds = [each.log_end for each in ends]
        epochs = [each.epoch for each in ends]
        # Of one that was begun elsewhere, only the wall clock knows how long appends have been held.
        held_ms = None if self.taken_over else int((self.now - self._begun) * 1000)

        def encode(end: UUID, at_ms: int) -> StateRecord:
            held = max(0, at_ms - expansion.at_ms) if held_ms is None else held_ms
            return encode_done(expansion, end, thresholds=thresholds, epochs=epochs, at_ms=at_ms, held_ms=held)

        self._verdict = _Verdict(encode)
        self._go(Step.STORE)

    def _not_there(self, *, certainly: bool) -> None:
        """A broker that was just started may not know a topic yet: believed once seen several times in a row."""
        self._missed += 1
        if not certainly and self._missed < _MISSING_TOPIC_LOOKS:
            self._again("the topic is not in the metadata")
            return
        text = f"{FAILED} {self._name}: the topic was deleted"
        self._failure = Ended(Result.FAILED, Error.UNKNOWN_TOPIC_OR_PARTITION, text)
        self._fail()

    def _give_up(self, why: str) -> None:
        text = f"{FAILED} {self._name}: after {self.wait_seconds:g} s (limits.expansion_wait_seconds) {why}"
        self._failure = Ended(Result.FAILED, Error.POLICY_VIOLATION, text)
        self._go(Step.GIVE_UP)

    def _fail(self) -> None:
        assert self._failure is not None
        assert self._failure.message is not None
        expansion, reason = self.expansion, self._failure.message
        self._verdict = _Verdict(lambda end, at_ms: encode_failed(expansion, end, reason=reason, at_ms=at_ms))
        self._go(Step.STORE)

    def _unordered(self, count: int) -> Ended:
        text = f"{self._name}: the topic has grown to {count} partitions around the proxy, without order"
        return Ended(Result.UNORDERED, Error.INVALID_PARTITIONS, text)

    # ---- small things

    @property
    def _name(self) -> str:
        expansion = self.expansion
        return f"topic={expansion.topic} from={expansion.from_count} to={expansion.to_count}"

    @property
    def _too_late(self) -> bool:
        return not self._created and self.now - self._begun >= self.wait_seconds

    def _refused_text(self, code: int, message: str | None) -> str:
        text = f"{FAILED} {self._name}: Kafka does not let the proxy create the partitions: error {code} ({message})"
        if code == Error.TOPIC_AUTHORIZATION_FAILED:
            text += ". Give the proxy's own principal the right to ALTER the topic"
        return text

    def _go(self, step: Step) -> None:
        self._note_time()
        self._pause = _PAUSE_SECONDS
        self._is_there = False
        self.step = step
        self.waits_for = ""

    def _look(self, why: str) -> None:
        """What Kafka said does not fit what was known; or it said nothing."""
        self._go(Step.LOOK)
        self._again(why)

    def _again(self, why: str) -> None:
        self._paused_until = self.now + self._pause
        self._pause = min(self._pause * 2, _PAUSE_SECONDS_MAX)
        self.waits_for = why

    def _wait(self, until: float, why: str) -> Wait:
        self.waits_for = why
        return Wait(until, why)

    def _note_time(self) -> None:
        self.took[self.step] = self.took.get(self.step, 0.0) + self.now - self._since
        self._since = self.now


def not_a_multiple(topic: str, from_count: int, to_count: int) -> str | None:
    """What to tell who wants a topic to grow to a count that is none of the old one's multiples; None where it is."""
    if to_count % from_count == 0:
        return None
    return (
        f"{NOT_A_MULTIPLE} topic={topic} from={from_count} to={to_count}: keys placed by hash % count would move "
        "between partitions that are there already, where nobody waits for the old ones to be read. Grow it to "
        f"{from_count * 2}, {from_count * 3} or {from_count * 4}; or set ordered.partition.expansion=any, if keys are "
        "placed so that they move to new partitions only"
    )


# --- the door of each process ---------------------------------------------------------------------------------------


class Hold(NamedTuple):
    """Close the door, but for these producers. To be done at once; there is no answer."""

    but_for: frozenset[Transactor]


class IsClosed(NamedTuple):
    """All processes can read that the door is closed: nothing more to do until the end is stored."""


@dataclass(slots=True)
class Closing:
    """What every process does about a pending expansion of anybody's: its door closes and empties, and it says so.

    Open transactions must be able to end, so batches of their producers may pass until there are none. A door that is
    closed for all, and empty, and a look *after* that which finds no transaction: only that says that none is under
    way, since one whose first batch was inside at the last look may be open by now.

    Asked again and again like `Procedure`; the door itself must be closed for all before the first time.
    """

    expansion: Expansion
    #: For whom the door is open.
    but_for: frozenset[Transactor] = frozenset()
    _conclusive: bool = False
    _nothing_open: bool = False
    _pause: float = _PAUSE_SECONDS
    _paused_until: float = float("-inf")

    def ask(
        self, growth: Growth, process: UUID, *, empty: bool, now: float
    ) -> LookAtTransactions | Append | Wait | IsClosed:
        """`empty` – of its door. `process` – the name that this process goes by now; it may have changed."""
        if process in growth.closed:
            return IsClosed()
        if self._nothing_open:
            return Append((encode_closed(self.expansion, process),))
        if now < self._paused_until:
            return Wait(self._paused_until, "transactions, and what is under way")
        self._conclusive = empty and not self.but_for
        return LookAtTransactions(self.expansion.priors)

    def handle(self, answer: Answer, now: float) -> Hold | None:
        """Gives back what the door must be now, where that changes."""
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


# --- who drives -----------------------------------------------------------------------------------------------------


class Nobody(NamedTuple):
    """Nothing to drive here: nothing is pending, or another living process does."""


class Drive(NamedTuple):
    """It is this process's to carry out."""

    expansion: Expansion


class Claim(NamedTuple):
    """Who drove it is gone: append this, and see in the view who has won."""

    record: StateRecord


def driver(
    growth: Growth, *, own: frozenset[UUID], process: UUID, alive: frozenset[UUID], new_id: Callable[[], UUID]
) -> Nobody | Drive | Claim:
    """What this process, which now goes by the name `process`, is to do about a pending expansion.

    `alive` – the other processes that are not known to be gone.
    """
    if growth.pending is None:
        return Nobody()
    if growth.driver in own:
        return Drive(growth.pending)
    if growth.driver in alive:
        return Nobody()
    return Claim(encode_claim(growth.pending, growth.driver_round + 1, new_id(), process))
