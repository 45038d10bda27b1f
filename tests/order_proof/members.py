"""Consumer groups of real clients (`tests/support/members.py`), and what their members read."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.order_proof.observed import NANOS, Assigned, Observed
from tests.support import members
from tests.support.members import KINDS, Kind

#: The minimum that brokers allow by default, so that a killed member is detected soon.
_SESSION_MS = 6_000
_HEARTBEAT_MS = 500
_METADATA_MS = 1_000
#: Members of the new protocol join and leave as fast as the others.
BROKER_PROPERTIES = {
    "group.consumer.min.session.timeout.ms": str(_SESSION_MS),
    "group.consumer.session.timeout.ms": str(_SESSION_MS),
    "group.consumer.min.heartbeat.interval.ms": str(_HEARTBEAT_MS),
    "group.consumer.heartbeat.interval.ms": str(_HEARTBEAT_MS),
}


class Group:
    """All members of one group, including earlier ones, and what they read. `bootstraps` – the addresses that members
    use in turn."""

    def __init__(self, kind: Kind, bootstraps: Sequence[str], topic: str, directory: Path, reset: str) -> None:
        self.kind, self.topic, self.directory, self.reset = kind, topic, directory, reset
        self._bootstraps = bootstraps
        self.id = f"{topic}-{kind.client}-{kind.protocol}"
        self.members: list[members.Member] = []

    def join(self, commit_seconds: float) -> members.Member:
        name = len(self.members) + 1
        member = members.Member(
            self.kind,
            self._bootstraps[name % len(self._bootstraps)],
            self.topic,
            self.id,
            self.reset,
            commit_seconds=commit_seconds,
            metadata_ms=_METADATA_MS,
            heartbeat_ms=_HEARTBEAT_MS,
            session_ms=_SESSION_MS,
            log=self.directory / f"{self.id}-{name}.log",
            isolation_level="read_committed",
        )
        self.members.append(member)
        return member

    @property
    def running(self) -> list[members.Member]:
        return [member for member in self.members if member.running]

    @property
    def observed(self) -> Iterator[Observed]:
        for name, member in enumerate(self.members, 1):
            for each in member.read.copy():
                yield Observed(each.nanos, each.partition, each.offset, each.key, int(each.value), f"{name}")

    @property
    def assigned(self) -> Iterator[Assigned]:
        for name, member in enumerate(self.members, 1):
            for each in member.assignments:
                yield Assigned(each.nanos, f"{name}", each.partitions)

    def has_observed(self, partitions: Iterable[int]) -> bool:
        """Whether the group read a record of each partition."""
        return all(any(each in member.partitions for member in self.members) for each in partitions)

    def has_observed_any(self, partitions: Iterable[int]) -> bool:
        return any(each in member.partitions for member in self.members for each in partitions)

    def has_all(self, written: Mapping[str, int]) -> bool:
        found: dict[str, set[int]] = defaultdict(set)
        for each in self.observed:
            found[each.key].add(each.counter)
        return all(len(found[key]) >= count for key, count in written.items())

    def holds_partitions(self, count: int) -> bool:
        """Whether all partitions are assigned, by the members' latest reports."""
        return frozenset().union(*(member.assigned for member in self.members)).issuperset(range(count))

    def standing(self) -> str:
        """For each partition: the highest offset read, and the time since the last read."""
        last: dict[int, Observed] = {}
        highest: dict[int, int] = defaultdict(int)
        for record in sorted(self.observed):
            last[record.partition] = record
            highest[record.partition] = max(highest[record.partition], record.offset)
        now = time.monotonic_ns()
        stood = (f"{p}: {highest[p]} ({(now - last[p].nanos) / NANOS:.0f} s ago)" for p in sorted(last))
        return ", ".join(stood) or "nothing"

    def end(self) -> None:
        for member in self.members:
            member.end_input()
        for member in self.members:
            member.close()
        with (self.directory / f"{self.id}.seen").open("w") as file:
            file.writelines(
                f"{r.nanos} {r.member} {r.partition} {r.offset} {r.key} {r.counter}\n" for r in sorted(self.observed)
            )
            file.writelines(f"{each}\n" for each in sorted(self.assigned))
            file.writelines(f"{each}\n" for member in self.members for each in member.errors)


def kinds_named(pattern: str) -> tuple[Kind, ...]:
    """Kinds by comma-separated name prefixes; all if empty."""
    requested = [each for each in pattern.split(",") if each]
    return tuple(kind for kind in KINDS if not requested or any(kind.name.startswith(each) for each in requested))
