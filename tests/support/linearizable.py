"""Whether a history of a key-value store is linearizable.

The store states a version with each result, and versions increase with each change of a key. So the order of the
changes is known, and no search for one is needed: a history is linearizable if each result fits that order in time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

ABSENT = -1


@dataclass
class Call:
    """A call and its result. `value`: what it puts, None for a deletion. Without `end`, its outcome is unknown."""

    key: str
    begin: float
    expected: int | None = None
    value: bytes | None = None
    end: float = math.inf
    changed: int | None = None
    observed: tuple[int, bytes | None] | None = None

    def put(self, version: int, end: float) -> None:
        self.changed, self.end = version, end

    def got(self, entry: Any, end: float) -> None:
        self.observe(*((ABSENT, None) if entry is None else (entry.version, entry.value)), end)

    def observe(self, version: int, value: bytes | None, end: float) -> None:
        self.observed, self.end = (version, value), end


def violations(history: Iterable[Call]) -> list[str]:
    by_key: defaultdict[str, list[Call]] = defaultdict(list)
    for call in history:
        by_key[call.key].append(call)
    return [each for calls in by_key.values() for each in _of_key(calls)]


def _of_key(calls: list[Call]) -> list[str]:
    """Each check that a result fails. A deletion's observers see ABSENT, whichever deletion it was."""
    found: list[str] = []
    changes = sorted((call for call in calls if call.changed is not None), key=lambda call: call.changed or 0)
    by_version = {call.changed: call for call in changes}
    unknown = [call for call in calls if call.end == math.inf]
    if len(by_version) != len(changes):
        found.append("two changes have one version")
    for call in calls:
        # Changes that ended before it began, and those that began before it ended.
        before = [each for each in changes if each.end < call.begin and each is not call]
        seen = [each.observed[0] for each in calls if each.observed is not None and each.end < call.begin]
        floor = max([ABSENT, *(each.changed or 0 for each in before), *seen])
        if call.changed is not None:
            if call.changed < floor:
                found.append(f"{call}: a later change has a smaller version than {floor}")
            if call.expected is not None:
                last = max(
                    (each.changed or 0 for each in changes if (each.changed or 0) < call.changed), default=ABSENT
                )
                deleted = last != ABSENT and by_version[last].value is None
                if last > call.expected and not (deleted and call.expected == ABSENT):
                    found.append(f"{call}: it replaced version {last}")
        elif call.observed is not None:
            found += _observation(call, floor, by_version, unknown, changes)
    return found


def _observation(
    call: Call, floor: int, by_version: dict[int | None, Call], unknown: list[Call], changes: list[Call]
) -> list[str]:
    assert call.observed is not None
    version, value = call.observed
    if version == ABSENT:
        concurrent = [each for each in (*changes, *unknown) if each.value is None and each.begin < call.end]
        if (
            floor != ABSENT
            and (floor not in by_version or by_version[floor].value is not None)
            and not any(each.changed is None or each.changed > floor for each in concurrent)
        ):
            return [f"{call}: absent, but version {floor} was put before"]
        return []
    source = by_version.get(version)
    if version < floor:
        return [f"{call}: stale, version {floor} was there before"]
    if source is None:
        if not any(each.begin < call.end for each in unknown):
            return [f"{call}: no change has version {version}"]
    elif source.begin > call.end or (value is not None and source.value != value):
        return [f"{call}: not what version {version} put"]
    return []
