"""Compares the order in which a group read the records of each key with the order in which they were written.

Members print a line after each record that they handled, with the system's monotonic clock, which all processes share.
So the records of a group have one order in time, whichever member handled them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

NANOS = 1_000_000_000
#: The key of records that are written before the run; the checks ignore them.
WARM_UP = "warm-up"


@dataclass(frozen=True, slots=True, order=True)
class Observed:
    """A handled record. `counter` counts the records of its key from 1 on. `member` – the member that handled it."""

    nanos: int
    partition: int
    offset: int
    key: str
    counter: int
    member: str = ""


@dataclass(frozen=True, slots=True, order=True)
class Assigned:
    """The partitions that a member of the group has from this time on, as reported to it."""

    nanos: int
    member: str
    partitions: frozenset[int]


@dataclass(frozen=True, slots=True)
class Expanded:
    """`began`: when the request to add partitions was sent. `ended`: when its response arrived."""

    from_count: int
    to_count: int
    began_nanos: int
    ended_nanos: int


@dataclass(slots=True)
class Decision:
    """`early` – read before the record that precedes it. `late` – read again on an earlier generation's partition,
    after its key was read on a later one. `expelled` – as `late`, by a member that had lost the partition to another
    member and did not know it yet: no coordinator can prevent that for fetched records. `again` – read repeatedly, as
    at-least-once permits. `missing` – never read. `longest_hold_seconds` – from the expansion to the first record of a
    new partition."""

    keys: int = 0
    records: int = 0
    early: list[Observed] = field(default_factory=list)
    late: list[Observed] = field(default_factory=list)
    expelled: list[Observed] = field(default_factory=list)
    again: int = 0
    missing: int = 0
    longest_hold_seconds: float = 0.0

    @property
    def out_of_order(self) -> int:
        return len(self.early) + len(self.late)

    @property
    def holds(self) -> bool:
        return not (self.early or self.late or self.missing)


def validate(
    observed: Iterable[Observed],
    written: Mapping[str, int],
    expansions: Iterable[Expanded] = (),
    assigned: Iterable[Assigned] = (),
) -> Decision:
    """`written` – acknowledged records per key. `observed` – what one group read. `assigned`: in any order."""
    expansions = list(expansions)
    assignments = sorted(assigned)
    decision = Decision(keys=len(written))
    reached: dict[str, int] = defaultdict(int)
    found: dict[str, set[int]] = defaultdict(set)
    age: dict[str, int] = defaultdict(int)
    first: dict[int, int] = {}
    for record in sorted(each for each in observed if each.key != WARM_UP):
        decision.records += 1
        first.setdefault(record.partition, record.nanos)
        created_partitions = next(
            (i for i, g in enumerate(expansions, 1) if g.from_count <= record.partition < g.to_count), 0
        )
        if record.counter in found[record.key]:
            decision.again += 1
        if record.counter > reached[record.key] + 1:
            decision.early.append(record)
        elif created_partitions < age[record.key] and record.counter < reached[record.key]:
            (decision.expelled if _expelled(record, assignments) else decision.late).append(record)
        age[record.key] = max(age[record.key], created_partitions)
        found[record.key].add(record.counter)
        reached[record.key] = max(reached[record.key], record.counter)
    decision.missing = sum(count - len(found[key] & set(range(1, count + 1))) for key, count in written.items())
    for expansion in expansions:
        for partition in range(expansion.from_count, expansion.to_count):
            if partition in first:
                hold_seconds = (first[partition] - expansion.ended_nanos) / NANOS
                decision.longest_hold_seconds = max(decision.longest_hold_seconds, hold_seconds)
    return decision


def _expelled(record: Observed, assignments: list[Assigned]) -> bool:
    """Whether another member was assigned the partition after this member's last assignment."""
    before = [each for each in assignments if each.nanos < record.nanos]
    latest = max((each.nanos for each in before if each.member == record.member), default=0)
    return any(
        each.nanos > latest and each.member != record.member and record.partition in each.partitions for each in before
    )
