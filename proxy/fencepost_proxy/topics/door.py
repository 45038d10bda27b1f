"""The door of a counted topic: who is inside, whether one may enter, and whether nobody is left. Sans-IO.

A topic that checks partition counts, or whose expansions keep order, has one door in each process. A Produce request
enters before its count is looked at, and leaves when Kafka has answered for all that was sent of it: so the count that
an append was checked for holds until that append is in the log, or certainly never will be. An expansion closes the
door, waits until nobody is inside, and opens it with the new count.

What may be inside without being known here:

- A request whose upstream connection broke is gone, and its append may still be queued in a broker. It holds the door
  for `doubt_seconds` more. So does what a gate sends once more to find out what became of it; and as long as a gate
  has such doubts, the door does not count as empty either (`Switch.door_empty`).
- What was under way when the topic became a counted one, and what an earlier process had sent, never entered. Nobody
  knows of it; `clear_at` is when it must be over.

While an expansion waits for transactions, those must be able to end: batches of their producers may pass the closed
door (`but_for`), under the epoch that they have now. They are inside like all others. With transactions v2 the next one
of a producer has the next epoch, and waits. Before, they look alike: until one look finds none of its open, a producer
that has one upon the other passes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

_NOBODY: frozenset[tuple[int, int]] = frozenset()


class Door:
    """Times are monotonic seconds. A pass is named by whoever enters: any hashable, once at a time.

    `count` – the number of partitions that it was opened with last; None while nobody has said one, and what metadata
    tells holds.
    """

    __slots__ = ("_but_for", "_clear_at", "_doubt_seconds", "_doubtful_until", "_inside", "closed_at", "count", "topic")

    def __init__(self, topic: str, *, doubt_seconds: float, clear_at: float = float("-inf")) -> None:
        self.topic = topic
        self.count: int | None = None
        self.closed_at: float | None = None
        self._doubt_seconds = doubt_seconds
        self._clear_at = clear_at
        self._doubtful_until = float("-inf")
        self._inside: set[Hashable] = set()
        self._but_for = _NOBODY

    # ---- for Produce requests

    def admits(self, transactional_producers: Collection[tuple[int, int]] = ()) -> bool:
        """Whether one may enter now. `transactional_producers` – ids and epochs of those whose transactional batches it
        has here, if it has no others."""
        if self.closed_at is None:
            return True
        return bool(transactional_producers) and self._but_for.issuperset(transactional_producers)

    def enter(self, pass_id: Hashable, now: float, transactional_producers: Collection[tuple[int, int]] = ()) -> bool:
        """False while it is closed: nothing has happened, try again when it is open."""
        if pass_id in self._inside:
            raise ValueError(f"{pass_id!r} is behind the door of {self.topic} already")
        if not self.admits(transactional_producers):
            return False
        self._inside.add(pass_id)
        return True

    def leave(self, pass_id: Hashable, now: float, *, in_doubt: bool = False) -> None:
        """`in_doubt` – it was sent, and its answer will never come."""
        self._inside.remove(pass_id)
        if in_doubt:
            self._doubtful_until = max(self._doubtful_until, now + self._doubt_seconds)

    def doubt(self, now: float) -> None:
        """Something was sent for which nobody is inside, and whose answer will never come."""
        self._doubtful_until = max(self._doubtful_until, now + self._doubt_seconds)

    # ---- for expansions

    def close(self, now: float, *, but_for: Iterable[tuple[int, int]] = ()) -> None:
        """Nobody enters from here on, but for those producers' transactions. Again: with other producers."""
        if self.closed_at is None:
            self.closed_at = now
        self._but_for = frozenset(but_for)

    def open(self, count: int) -> None:
        """From here on `count` is what appends are checked for. See `Switch.open_door`: it tells those that wait."""
        self.count = count
        self.closed_at = None
        self._but_for = _NOBODY

    def forget_count(self) -> None:
        """The topic was created anew."""
        self.count = None

    @property
    def closed(self) -> bool:
        return self.closed_at is not None

    @property
    def in_flight(self) -> int:
        """How many are inside."""
        return len(self._inside)

    @property
    def idle(self) -> bool:
        """Open, nobody inside, and nobody ever was of whom something may be under way."""
        return self.closed_at is None and not self._inside and self.empty_at == float("-inf")

    def empty(self, now: float) -> bool:
        """Nobody is inside, and nothing that was may still be appended."""
        return not self._inside and now >= self.empty_at

    @property
    def empty_at(self) -> float:
        """When `empty` can be, at the earliest, as far as is known now."""
        return max(self._clear_at, self._doubtful_until)

    def not_empty_before(self, at: float) -> None:
        """Something may be under way that never entered, until then."""
        self._clear_at = max(self._clear_at, at)
