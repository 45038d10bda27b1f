"""Judges a history of appends by the log that Kafka has in the end. Knows the promises, and nothing of the proxy.

A history is what `tests/soak/history.py` describes. Each rule has a name, by which its findings are counted:

| rule | what must hold |
|---|---|
| FALSE ACCEPT | an append that was told "ok at X" has its record at X, and X is what it expected |
| LOST | ... and the record is in the log at all |
| REFUSED BUT THERE | what was refused is not in the log |
| VIOLATION NOT THERE | what was told to have landed elsewhere lies where it was said to |
| TWICE | no record is in the log twice |
| ELSEWHERE | a conditional record is at its expected offset or nowhere, whatever was told |
| UNGUARDED | a `required` topic has no record that came without an expectation or in a transaction |
| LOOKS UNGUARDED | no client is told that a topic's check is off while it is on |
| HALF A BATCH | the records of one append are there together, side by side, or not at all |
| ORDER | an append that ended before another began lies before it; a chain's records lie in its order |
| HOLE | where one proxy serves a topic: nothing of a chain lands after one of it was refused |
| UNTRUE END | the log end that a refusal tells was the log end at some moment of the call |
| BARE ERROR | a conditional append never hears of sequences and epochs: no stamp's error is passed on |
| ABORTED VISIBLE | readers of committed records do not see what was aborted |
| COMMITTED MISSING | ... and see all that was accepted in a transaction that was committed |
| HALF A TRANSACTION | ... and all or nothing of one whose outcome is not known |
| STRANGER | every record in the log was sent by a writer of this history |
| GAP | no offset is missing |

What is tolerated, because the contract (docs/contract.md) says that it can happen (`Decision.tolerated` counts it):

- *unnamed retry*: a refusal speaks of one send. Of a client that sends again by itself, without a write-id, and was not
  told that nothing equal lies at the expected offset, an earlier send may have landed at the expected offset.
- *told as mismatch*: a client that is not shown messages cannot tell OFFSET_VIOLATION from OFFSET_MISMATCH (`true`
  topics).
- *late elsewhere*: on `true` topics an append whose outcome is unknown, or of which an earlier send was in doubt, may
  land where it did not expect.
- *stale end*: aiokafka does not see the log end that a refusal tells; its adapter reads it afterwards, by a ListOffsets
  that a leader which was deposed and has not heard of it answers as of the time before.
- *at least once*: an unconditional append of a client that resends without idempotence may be in the log twice.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.history import OK, REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION, read_lines

#: Errors that speak of a producer's sequence, epoch or id, by number and as libraries name them.
_ERRORS_OF_PRODUCERS = frozenset(
    {45, 46, 47, 49, 59, 90}
    | {"OutOfOrderSequenceNumber", "OutOfOrderSequenceException", "OUT_OF_ORDER_SEQUENCE_NUMBER"}
    | {"DuplicateSequenceNumber", "DuplicateSequenceException", "DUPLICATE_SEQUENCE_NUMBER"}
    | {"InvalidProducerEpoch", "InvalidProducerEpochException", "INVALID_PRODUCER_EPOCH"}
    | {"UnknownProducerId", "UnknownProducerIdException", "UNKNOWN_PRODUCER_ID"}
)
_FOREVER = float("inf")

Place = tuple[str, int]


@dataclass(slots=True)
class Operation:
    number: int
    writer: str
    place: Place
    ids: tuple[str, ...]
    expected: int | None
    start: float
    named: bool = False
    resends: bool = False
    sees_messages: bool = True
    idempotent: bool = False
    reads_end: bool = False
    pipeline_key: str | None = None
    transaction: str | None = None
    end: float = _FOREVER
    outcome: str = UNKNOWN
    offset: int | None = None
    actual: int | None = None
    possibly_yours: bool | None = None
    code: int | str | None = None
    detail: str | None = None

    def __str__(self) -> str:
        topic, partition = self.place
        reported = [
            f"{name} {value}" for name in ("offset", "actual", "code") if (value := getattr(self, name)) is not None
        ]
        end = "open" if self.end == _FOREVER else f"{self.end:.6f}"
        return (
            f"op {self.number} of {self.writer} ({self.ids[0]}{f' +{len(self.ids) - 1}' * (len(self.ids) > 1)}) on "
            f"{topic}-{partition}, expected {self.expected}, {self.start:.6f}..{end}: "
            f"{', '.join([self.outcome, *reported])}{f' ({self.detail})' if self.detail else ''}"
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """What the log has at one offset. `id` is None for a transaction marker."""

    offset: int
    id: str | None
    leader_epoch: int = 0
    visible: bool = True


@dataclass(frozen=True, slots=True)
class Topic:
    """`mode`: of the check. `one_proxy`: only one proxy process at a time takes appends to it."""

    mode: str
    one_proxy: bool = False


@dataclass(slots=True)
class History:
    topics: dict[str, Topic] = field(default_factory=dict)
    operations: dict[int, Operation] = field(default_factory=dict)
    #: What was told of each. One that is not here: unknown.
    transactions: dict[str, str] = field(default_factory=dict)
    logs: dict[Place, list[Entry]] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        match event["e"]:
            case "topic":
                self.topics[event["topic"]] = Topic(event["mode"], event["one_proxy"])
            case "call":
                self.operations[event["op"]] = Operation(
                    event["op"],
                    event["writer"],
                    (event["topic"], event["partition"]),
                    tuple(event["ids"]),
                    event["expected"],
                    event["t"],
                    event["named"],
                    event["resends"],
                    event["sees_messages"],
                    event["idempotent"],
                    event.get("reads_end", False),
                    event["pipeline_key"],
                    event["transaction"],
                )
            case "return":
                operation = self.operations[event["op"]]
                operation.end = event["t"]
                operation.outcome = event["outcome"]
                for name in ("offset", "actual", "possibly_yours", "code", "detail"):
                    setattr(operation, name, event.get(name))
            case "transaction":
                self.transactions[event["transaction"]] = event["outcome"]

    def add_entry(self, line: Mapping[str, Any]) -> None:
        entry = Entry(line["offset"], line["id"], line["leader_epoch"], line["visible"])
        self.logs.setdefault((line["topic"], line["partition"]), []).append(entry)


def load(history: Path, log: Path) -> History:
    loaded = History()
    for event in read_lines(history):
        loaded.add(event)
    for line in read_lines(log):
        loaded.add_entry(line)
    return loaded


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


@dataclass(slots=True)
class Decision:
    findings: list[Finding] = field(default_factory=list)
    tolerated: Counter[str] = field(default_factory=Counter)
    #: How often each rule had something to look at: a rule that never had any has shown nothing.
    probed_at: Counter[str] = field(default_factory=Counter)

    @property
    def rules(self) -> list[str]:
        return [finding.rule for finding in self.findings]


def check(history: History) -> Decision:
    decision = Decision()
    by_place: dict[Place, list[Operation]] = defaultdict(list)
    for operation in history.operations.values():
        by_place[operation.place].append(operation)
    for place in by_place.keys() | history.logs.keys():
        _Partition(history, place, by_place[place], decision).check()
    return decision


class _Partition:
    def __init__(self, history: History, place: Place, operations: list[Operation], decision: Decision) -> None:
        self.topic = history.topics[place[0]]
        self.transactions = history.transactions
        self.place = place
        self.operations = operations
        self.entries = sorted(history.logs.get(place, []), key=lambda entry: entry.offset)
        self.decision = decision
        self.where: dict[str, list[int]] = defaultdict(list)
        for entry in self.entries:
            if entry.id is not None:
                self.where[entry.id].append(entry.offset)
        self.owners = {each: operation for operation in operations for each in operation.ids}

    @property
    def airtight(self) -> bool:
        return self.topic.mode == "required"

    def found(self, rule: str, text: object) -> None:
        self.decision.findings.append(Finding(rule, str(text)))

    def probe(self, rule: str) -> None:
        self.decision.probed_at[rule] += 1

    def tolerate(self, why: str) -> None:
        self.decision.tolerated[why] += 1

    def check(self) -> None:
        self.gaps_and_strangers()
        for operation in self.operations:
            self.outcome(operation)
            self.copies(operation)
            self.placed(operation)
            self.together(operation)
            self.errors(operation)
        self.order()
        self.pipelines()
        self.ends()
        self.visibility()

    # ---- the log by itself

    def gaps_and_strangers(self) -> None:
        topic, partition = self.place
        for index, entry in enumerate(self.entries):
            self.probe("GAP")
            if entry.offset != index:
                self.found("GAP", f"{topic}-{partition}: offset {index} is missing; {entry.offset} comes next")
                break
        for entry in self.entries:
            if entry.id is None:
                if self.airtight:
                    self.found("UNGUARDED", f"{topic}-{partition}: a transaction marker at offset {entry.offset}")
                continue
            self.probe("STRANGER")
            if entry.id not in self.owners:
                self.found("STRANGER", f"{topic}-{partition}: nobody sent {entry.id!r}, which is at {entry.offset}")

    # ---- one operation

    def offsets(self, operation: Operation) -> list[int]:
        """Where its first record is."""
        return self.where.get(operation.ids[0], [])

    def outcome(self, operation: Operation) -> None:
        there = self.offsets(operation)
        if operation.outcome == OK:
            self.probe("FALSE ACCEPT")
            self.probe("LOST")
            if not there:
                self.found("LOST", operation)
            elif operation.offset is None and operation.expected is None:
                pass  # a library that resent it, and was not told where the first send landed
            elif operation.offset not in there:
                self.found("FALSE ACCEPT", f"{operation}: it is at {there}")
            elif operation.expected is not None and operation.offset != operation.expected:
                self.found("FALSE ACCEPT", f"{operation}: accepted off its expectation")
        elif operation.outcome == VIOLATION:
            self.probe("VIOLATION NOT THERE")
            if operation.offset not in there:
                self.found("VIOLATION NOT THERE", f"{operation}: it is at {there}")
        elif operation.outcome in (REFUSED, TRY_AGAIN):
            self.probe("REFUSED BUT THERE")
            if there:
                why = self.may_be_there(operation, there)
                if why is None:
                    self.found("REFUSED BUT THERE", f"{operation}: it is at {there}")
                else:
                    self.tolerate(why)

    def may_be_there(self, operation: Operation, there: list[int]) -> str | None:
        """Why a record that was refused may lie there all the same. None: it may not."""
        if operation.resends and not operation.named and operation.possibly_yours is not False:
            return "unnamed retry"
        if not self.airtight and operation.expected not in there:
            if not operation.sees_messages:
                return "told as mismatch"
            if operation.resends:
                return "late elsewhere"
        return None

    def copies(self, operation: Operation) -> None:
        at_least_once = operation.expected is None and operation.resends and not operation.idempotent
        for each in operation.ids:
            self.probe("TWICE")
            if len(self.where.get(each, [])) > 1:
                if at_least_once:
                    self.tolerate("at least once")
                else:
                    self.found("TWICE", f"{operation}: {each} is at {self.where[each]}")

    def placed(self, operation: Operation) -> None:
        if operation.expected is None or operation.transaction is not None:
            if self.airtight:
                self.probe("UNGUARDED")
                if self.offsets(operation):
                    self.found("UNGUARDED", f"{operation}: it is at {self.offsets(operation)}")
            if operation.expected is None:
                return
        for delta, each in enumerate(operation.ids):
            for offset in self.where.get(each, []):
                self.probe("ELSEWHERE")
                if offset == operation.expected + delta:
                    continue
                text = f"{operation}: {each} is at {offset}"
                if self.airtight:
                    self.found("ELSEWHERE", text)
                elif operation.outcome == UNKNOWN:
                    self.tolerate("late elsewhere")
                elif operation.outcome == OK:
                    # An accepted one has its own rule; a copy of it besides has that of copies.
                    continue
                elif operation.outcome != VIOLATION and self.may_be_there(operation, [offset]) is None:
                    self.found("ELSEWHERE", text)

    def together(self, operation: Operation) -> None:
        if len(operation.ids) == 1:
            return
        self.probe("HALF A BATCH")
        places = [self.where.get(each, []) for each in operation.ids]
        first = places[0]
        if any(offsets != [offset + delta for offset in first] for delta, offsets in enumerate(places)):
            self.found("HALF A BATCH", f"{operation}: its records are at {places}")

    def errors(self, operation: Operation) -> None:
        if operation.code == "CheckIsOff":
            self.found("LOOKS UNGUARDED", operation)
        if operation.expected is None or operation.transaction is not None:
            return
        if operation.idempotent and not self.airtight:
            return  # its appends without an expectation may have gone to Kafka under its own sequence
        self.probe("BARE ERROR")
        if operation.code in _ERRORS_OF_PRODUCERS:
            self.found("BARE ERROR", operation)

    # ---- operations among each other

    def accepted(self) -> list[Operation]:
        return [each for each in self.operations if each.outcome == OK and each.offset is not None]

    def order(self) -> None:
        accepted = self.accepted()
        ended = sorted(accepted, key=lambda each: each.end)
        highest: Operation | None = None
        next_ended = 0
        for operation in sorted(accepted, key=lambda each: each.start):
            while next_ended < len(ended) and ended[next_ended].end < operation.start:
                if highest is None or _offset(ended[next_ended]) > _offset(highest):
                    highest = ended[next_ended]
                next_ended += 1
            if highest is not None:
                self.probe("ORDER")
                if _offset(highest) >= _offset(operation):
                    self.found("ORDER", f"{operation} began after the end of {highest}")

    def pipelines(self) -> None:
        pipelines: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            if operation.pipeline_key is not None:
                pipelines[operation.pipeline_key].append(operation)
        for pipeline in pipelines.values():
            before: Operation | None = None
            refused: Operation | None = None
            for operation in sorted(pipeline, key=lambda each: each.number):
                if operation.outcome == OK:
                    self.probe("ORDER")
                    if before is not None and _offset(before) >= _offset(operation):
                        self.found("ORDER", f"{operation} was sent behind {before}")
                    before = operation
                    if refused is not None and self.topic.one_proxy:
                        self.found("HOLE", f"{operation} was sent behind {refused}")
                elif operation.outcome in (REFUSED, TRY_AGAIN):
                    self.probe("HOLE")
                    refused = refused or operation

    def ends(self) -> None:
        """The log end that a refusal told, between bounds that are sure.

        It is no less than what had been accepted before the call. And it is no more than what had been sent by the end
        of the call: the record that lies just below it was not sent later, unless what lay there before was cut off by
        a change of leaders.
        """
        ended = sorted(self.accepted(), key=lambda each: each.end)
        times = [each.end for each in ended]
        highest = []
        least = 0
        for each in ended:
            least = max(least, _offset(each) + len(each.ids))
            highest.append(least)
        entries = {entry.offset: entry for entry in self.entries}
        first_of_epoch: dict[int, Entry] = {}
        for entry in self.entries:
            first_of_epoch.setdefault(entry.leader_epoch, entry)
        for operation in self.operations:
            if operation.outcome != REFUSED or operation.actual is None:
                continue
            self.probe("UNTRUE END")
            before = bisect.bisect_left(times, operation.start)
            if before and operation.actual < highest[before - 1]:
                if operation.reads_end:
                    self.tolerate("stale end")
                    continue
                text = f"the log had {highest[before - 1]} before it began ({ended[before - 1]})"
                self.found("UNTRUE END", f"{operation}: {text}")
                continue
            below = entries.get(operation.actual - 1)
            if below is None:
                if operation.actual > 0 and not self.was_cut(operation):
                    self.found("UNTRUE END", f"{operation}: the log never reached {operation.actual}")
                continue
            writer = self.owners.get(below.id) if below.id is not None else None
            if writer is not None and writer.start > operation.end:
                first = first_of_epoch[below.leader_epoch]
                # Where this leader's first record was there before the call, no change of leaders came in between.
                primary = self.owners.get(first.id) if first.id is not None else None
                if primary is not None and primary.outcome == OK and primary.end < operation.start:
                    self.found("UNTRUE END", f"{operation}: the record below that end was sent later, by {writer}")

    def was_cut(self, operation: Operation) -> bool:
        """Whether the log may have been longer during this call than it is in the end.

        Then something had been appended that nobody was told of as accepted, and nothing of it is left to be seen.
        """
        return any(
            each.outcome == UNKNOWN and each.start < operation.end and not self.offsets(each)
            for each in self.operations
        )

    # ---- transactions

    def visibility(self) -> None:
        visible = {entry.id for entry in self.entries if entry.id is not None and entry.visible}
        groups: dict[str, list[Operation]] = defaultdict(list)
        for operation in self.operations:
            if operation.transaction is not None:
                groups[operation.transaction].append(operation)
            elif operation.outcome == OK:
                self.probe("COMMITTED MISSING")
                for each in operation.ids:
                    if each in self.where and each not in visible:
                        self.found("COMMITTED MISSING", f"{operation}: no reader of committed records sees {each}")
        for name, operations in groups.items():
            outcome = self.transactions.get(name, UNKNOWN)
            accepted = [each for operation in operations if operation.outcome == OK for each in operation.ids]
            of_all = [each for operation in operations for each in operation.ids]
            if outcome == "aborted":
                self.probe("ABORTED VISIBLE")
                for each in of_all:
                    if each in visible:
                        self.found("ABORTED VISIBLE", f"{each} of transaction {name}, at {self.where[each]}")
            elif outcome == "committed":
                self.probe("COMMITTED MISSING")
                for each in accepted:
                    if each not in visible:
                        self.found("COMMITTED MISSING", f"{each} of transaction {name}")
            else:
                self.probe("HALF A TRANSACTION")
                there = [each for each in of_all if each in self.where]
                observed = [each for each in there if each in visible]
                if observed and observed != there:
                    self.found("HALF A TRANSACTION", f"of {name} {observed} can be seen, of {there} that are there")


def _offset(operation: Operation) -> int:
    assert operation.offset is not None
    return operation.offset


def report(decision: Decision, *, findings_max: int = 20) -> Iterable[str]:
    """Lines that tell it."""
    counts = Counter(decision.rules)
    yield "checked: " + ", ".join(f"{rule} {count}" for rule, count in sorted(decision.probed_at.items()))
    if decision.tolerated:
        yield "tolerated: " + ", ".join(f"{why} {count}" for why, count in sorted(decision.tolerated.items()))
    for rule, count in sorted(counts.items()):
        yield f"VIOLATED {rule}: {count}"
        of_rule = [finding for finding in decision.findings if finding.rule == rule]
        yield from (f"  {finding.text}" for finding in of_rule[:findings_max])
    yield "verdict: " + ("VIOLATED" if decision.findings else "holds")
