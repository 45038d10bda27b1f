"""Rows of a batch that are in the log and that the task has not matched yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Origin of an append: this task and run; the same task number in another run; another number in another run.
THIS_RUN, SAME_NUMBER, FOREIGN = range(3)


@dataclass(slots=True)
class Group:
    """The appends of one task number of one run. `size`: their rows; `matched`: how many of them are this task's;
    `has_unmatched`: their task also lacked rows under its own number."""

    run: str
    task: int
    origin: int
    size: int = 0
    matched: int = 0
    has_unmatched: bool = False


class Pool:
    """Rows of this batch in one partition of the log that the input did not have yet, with the group of each."""

    __slots__ = ("_more", "_once")

    def __init__(self) -> None:
        self._once: dict[bytes, int] = {}
        #: Copies per group, for rows with several copies.
        self._more: dict[bytes, dict[int, int]] = {}

    def add(self, digests: Sequence[bytes], group: int) -> None:
        fresh = dict.fromkeys(digests, group)
        if len(fresh) == len(digests) and not self._more and self._once.keys().isdisjoint(fresh):
            self._once.update(fresh)
            return
        for digest in digests:
            if digest in self._more:
                among = self._more[digest]
            elif digest in self._once:
                among = self._more[digest] = {self._once.pop(digest): 1}
            else:
                self._once[digest] = group
                continue
            among[group] = among.get(group, 0) + 1

    def take(self, digest: bytes, groups: Sequence[Group], most: int) -> int | None:
        """Remove one copy and return its group: the task's own first, none with an origin above `most`."""
        group = self._once.get(digest)
        if group is not None:
            if groups[group].origin > most:
                return None
            del self._once[digest]
            return group
        among = self._more.get(digest)
        if among is None:
            return None
        group = min(among, key=lambda each: groups[each].origin)
        if groups[group].origin > most:
            return None
        if among[group] > 1:
            among[group] -= 1
        elif len(among) > 1:
            del among[group]
        else:
            del self._more[digest]
        return group

    def left(self) -> Iterator[tuple[bytes, int, int]]:
        """Digest, group, count."""
        for digest, group in self._once.items():
            yield digest, group, 1
        for digest, among in self._more.items():
            for group, count in among.items():
                yield digest, group, count

    def count(self, groups: Sequence[Group], origin: int) -> int:
        return sum(count for _, group, count in self.left() if groups[group].origin == origin)
