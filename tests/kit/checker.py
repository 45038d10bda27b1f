"""Compares a history of appends with the final log of Kafka. Knows the promises, but not the proxy.

`tests/kit/history.py` describes histories. Findings are counted by rule:

| rule | promise |
|---|---|
| FALSE SUCCESS | a successful append is at the reported offset, which is the expected one |
| LOST | a successful append is in the log |
| REFUSED BUT APPENDED | a refused append is not in the log |
| WRONG OFFSET REPORTED | an append reported as a violation is at the reported offset |
| APPENDED TWICE | no record is in the log twice |
| WRONG OFFSET | a conditional record is at its expected offset or not in the log, whatever the response |
| NOT REFUSED | a `required` topic has no unconditional or transactional record |
| CHECK REPORTED OFF | no client learns that a topic's check is off while it is on |
| PARTIAL BATCH | the records of one append are consecutive in the log, or absent |
| ORDER | an append that ended before another began precedes it; pipelined appends keep their order |
| APPENDED AFTER FAILURE | with one proxy per topic, a pipeline ends at its first refused append |
| WRONG LOG END | the log end in a refusal was the log end during the call |
| PRODUCER ERROR | a conditional append gets no error about sequences and epochs |
| ABORTED VISIBLE | read_committed consumers receive no aborted record |
| COMMITTED BUT MISSING | read_committed consumers receive every successful record of a committed transaction |
| PARTIAL TRANSACTION | they receive all or nothing of a transaction with unknown outcome |
| UNKNOWN RECORD | a writer of this history sent every record in the log |
| GAP | no offset is missing |

Tolerated, because the contract (docs/contract.md) permits it (counted in `Decision.tolerated`):

- *unnamed retry*: a refusal covers one attempt. If a client resends automatically, without a write-id, and the response
  did not exclude equal records at the expected offset, an earlier attempt may be there.
- *reported as mismatch*: a client that does not get messages cannot distinguish OFFSET_VIOLATION from OFFSET_MISMATCH
  (`true` topics).
- *late at another offset*: on `true` topics an append with unknown outcome, or with an in-doubt earlier attempt, may be
  at another offset.
- *stale end*: aiokafka does not get the log end of a refusal. Its adapter reads it with ListOffsets, and a deposed
  leader may return an old one.
- *at least once*: an unconditional append of a client that resends without idempotence may be in the log twice.
- *lost by Kafka*: of a topic that may lose the end of its log (an unclean election).
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.kit.history import OK, REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION, Entry, History, Operation, Place

#: Errors about a producer's sequence, epoch or id: numbers, and names in libraries.
_ERRORS_OF_PRODUCERS = frozenset(
    {45, 46, 47, 49, 59, 90}
    | {"OutOfOrderSequenceNumber", "OutOfOrderSequenceException", "OUT_OF_ORDER_SEQUENCE_NUMBER"}
    | {"DuplicateSequenceNumber", "DuplicateSequenceException", "DUPLICATE_SEQUENCE_NUMBER"}
    | {"InvalidProducerEpoch", "InvalidProducerEpochException", "INVALID_PRODUCER_EPOCH"}
    | {"UnknownProducerId", "UnknownProducerIdException", "UNKNOWN_PRODUCER_ID"}
)


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
    #: How often each rule was tested. A rule that was never tested has shown nothing.
    probed_at: Counter[str] = field(default_factory=Counter)

    @property
    def rules(self) -> list[str]:
        return [finding.rule for finding in self.findings]


def check(history: History) -> Decision:
    decision = Decision()
    by_partition: dict[Place, list[Operation]] = defaultdict(list)
    for operation in history.operations.values():
        by_partition[operation.place].append(operation)
    for place in by_partition.keys() | history.logs.keys():
        _Partition(history, place, by_partition[place], decision).check()
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
        self.senders = {each: operation for operation in operations for each in operation.ids}

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
        self.gaps_and_unknown_records()
        for operation in self.operations:
            self.outcome(operation)
            self.copies(operation)
            self.placed(operation)
            self.together(operation)
            self.errors(operation)
        if not self.topic.may_lose:
            self.order()
            self.pipelines()
            self.ends()
        self.visibility()

    # ---- log

    def gaps_and_unknown_records(self) -> None:
        topic, partition = self.place
        for index, entry in enumerate(self.entries):
            self.probe("GAP")
            if entry.offset != index:
                self.found("GAP", f"{topic}-{partition}: offset {index} is missing; {entry.offset} comes next")
                break
        for entry in self.entries:
            if entry.id is None:
                if self.airtight:
                    self.found("NOT REFUSED", f"{topic}-{partition}: a transaction marker at offset {entry.offset}")
                continue
            self.probe("UNKNOWN RECORD")
            if entry.id not in self.senders:
                self.found("UNKNOWN RECORD", f"{topic}-{partition}: no writer sent {entry.id!r} at {entry.offset}")

    # ---- single operations

    def offsets(self, operation: Operation) -> list[int]:
        """Offsets of its first record."""
        return self.where.get(operation.ids[0], [])

    def outcome(self, operation: Operation) -> None:
        there = self.offsets(operation)
        if operation.outcome == OK:
            self.probe("FALSE SUCCESS")
            self.probe("LOST")
            if not there and self.topic.may_lose:
                self.tolerate("lost by Kafka")
            elif not there:
                self.found("LOST", operation)
            elif operation.offset is None and operation.expected is None:
                pass  # a library resent it, and does not know the first attempt's offset
            elif operation.offset not in there:
                self.found("FALSE SUCCESS", f"{operation}: it is at {there}")
            elif operation.expected is not None and operation.offset != operation.expected:
                self.found("FALSE SUCCESS", f"{operation}: accepted at another offset than expected")
        elif operation.outcome == VIOLATION:
            self.probe("WRONG OFFSET REPORTED")
            if operation.offset not in there:
                self.found("WRONG OFFSET REPORTED", f"{operation}: it is at {there}")
        elif operation.outcome in (REFUSED, TRY_AGAIN):
            self.probe("REFUSED BUT APPENDED")
            if there:
                why = self.may_be_there(operation, there)
                if why is None:
                    self.found("REFUSED BUT APPENDED", f"{operation}: it is at {there}")
                else:
                    self.tolerate(why)

    def may_be_there(self, operation: Operation, there: list[int]) -> str | None:
        """Why a refused record may be in the log, or None."""
        if operation.resends and not operation.named and operation.possibly_yours is not False:
            return "unnamed retry"
        if not self.airtight and operation.expected not in there:
            if not operation.sees_messages:
                return "reported as mismatch"
            if operation.resends:
                return "late at another offset"
        return None

    def copies(self, operation: Operation) -> None:
        at_least_once = operation.expected is None and operation.resends and not operation.idempotent
        for each in operation.ids:
            self.probe("APPENDED TWICE")
            if len(self.where.get(each, [])) > 1:
                if at_least_once:
                    self.tolerate("at least once")
                else:
                    self.found("APPENDED TWICE", f"{operation}: {each} is at {self.where[each]}")

    def placed(self, operation: Operation) -> None:
        if operation.expected is None or operation.transaction is not None:
            if self.airtight:
                self.probe("NOT REFUSED")
                if self.offsets(operation):
                    self.found("NOT REFUSED", f"{operation}: it is at {self.offsets(operation)}")
            if operation.expected is None:
                return
        for delta, each in enumerate(operation.ids):
            for offset in self.where.get(each, []):
                self.probe("WRONG OFFSET")
                if offset == operation.expected + delta:
                    continue
                text = f"{operation}: {each} is at {offset}"
                if self.airtight:
                    self.found("WRONG OFFSET", text)
                elif operation.outcome == UNKNOWN:
                    self.tolerate("late at another offset")
                elif operation.outcome == OK:
                    # FALSE SUCCESS covers it, and APPENDED TWICE its copies.
                    continue
                elif operation.outcome != VIOLATION and self.may_be_there(operation, [offset]) is None:
                    self.found("WRONG OFFSET", text)

    def together(self, operation: Operation) -> None:
        if len(operation.ids) == 1:
            return
        self.probe("PARTIAL BATCH")
        places = [self.where.get(each, []) for each in operation.ids]
        first = places[0]
        if any(offsets != [offset + delta for offset in first] for delta, offsets in enumerate(places)):
            self.found("PARTIAL BATCH", f"{operation}: its records are at {places}")

    def errors(self, operation: Operation) -> None:
        if operation.code == "CheckIsOffError":
            self.found("CHECK REPORTED OFF", operation)
        if operation.expected is None or operation.transaction is not None:
            return
        if operation.idempotent and not self.airtight:
            return  # its unconditional appends may have used its own sequence at Kafka
        self.probe("PRODUCER ERROR")
        if operation.code in _ERRORS_OF_PRODUCERS:
            self.found("PRODUCER ERROR", operation)

    # ---- several operations

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
                if operation.outcome == OK and operation.offset is not None:
                    self.probe("ORDER")
                    if before is not None and _offset(before) >= _offset(operation):
                        self.found("ORDER", f"{operation} was sent after {before}")
                    before = operation
                    if refused is not None and self.topic.one_proxy:
                        self.found("APPENDED AFTER FAILURE", f"{operation} was sent after {refused}")
                elif operation.outcome in (REFUSED, TRY_AGAIN):
                    self.probe("APPENDED AFTER FAILURE")
                    refused = refused or operation

    def ends(self) -> None:
        """Compare the log end in a refusal with certain bounds.

        It is at least the end of all appends accepted before the call. And the record below it was not sent after the
        call, unless a leader change removed what was there before.
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
            self.probe("WRONG LOG END")
            before = bisect.bisect_left(times, operation.start)
            if before and operation.actual < highest[before - 1]:
                if operation.reads_end:
                    self.tolerate("stale end")
                    continue
                text = f"the log had {highest[before - 1]} before it began ({ended[before - 1]})"
                self.found("WRONG LOG END", f"{operation}: {text}")
                continue
            below = entries.get(operation.actual - 1)
            if below is None:
                if operation.actual > 0 and not self.was_cut(operation):
                    self.found("WRONG LOG END", f"{operation}: the log never reached {operation.actual}")
                continue
            writer = self.senders.get(below.id) if below.id is not None else None
            if writer is not None and writer.start > operation.end:
                first = first_of_epoch[below.leader_epoch]
                # If this leader's first record precedes the call, the leader did not change since.
                sender = self.senders.get(first.id) if first.id is not None else None
                if sender is not None and sender.outcome == OK and sender.end < operation.start:
                    self.found("WRONG LOG END", f"{operation}: the record below that end was sent later, by {writer}")

    def was_cut(self, operation: Operation) -> bool:
        """Whether the log may have been longer during the call: then an append with unknown outcome is missing."""
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
                self.probe("COMMITTED BUT MISSING")
                for each in operation.ids:
                    if each in self.where and each not in visible:
                        self.found("COMMITTED BUT MISSING", f"{operation}: no read_committed consumer receives {each}")
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
                self.probe("COMMITTED BUT MISSING")
                for each in accepted:
                    if each not in visible:
                        self.found("COMMITTED BUT MISSING", f"{each} of transaction {name}")
            else:
                self.probe("PARTIAL TRANSACTION")
                there = [each for each in of_all if each in self.where]
                observed = [each for each in there if each in visible]
                if observed and observed != there:
                    self.found("PARTIAL TRANSACTION", f"of {name} {observed} are visible, of {there} in the log")


def verify(history: History) -> None:
    """Raises AssertionError with the report."""
    decision = check(history)
    assert not decision.findings, "\n".join(report(decision))


def _offset(operation: Operation) -> int:
    assert operation.offset is not None
    return operation.offset


def report(decision: Decision, *, findings_max: int = 20) -> Iterable[str]:
    """The report, line by line."""
    counts = Counter(decision.rules)
    yield "checked: " + ", ".join(f"{rule} {count}" for rule, count in sorted(decision.probed_at.items()))
    if decision.tolerated:
        yield "tolerated: " + ", ".join(f"{why} {count}" for why, count in sorted(decision.tolerated.items()))
    for rule, count in sorted(counts.items()):
        yield f"VIOLATED {rule}: {count}"
        of_rule = [finding for finding in decision.findings if finding.rule == rule]
        yield from (f"  {finding.text}" for finding in of_rule[:findings_max])
    yield "result: " + ("VIOLATED" if decision.findings else "passed")
