"""Append barrier: delays Produce requests to a topic while it is expanded, and shows when none is in progress.

Sans-IO. Each process has one per topic that checks partition counts or has ordered expansions. A Produce request enters
before its partition count is checked. It leaves when Kafka has answered everything sent for it. So the checked count
holds until the append is in the log, or certainly never will be. An expansion is a sequence:

1. It closes the append barrier. 2. It waits until no request is inside. 3. It opens it with the new count.

Appends that may be inside without being known:

- A request whose broker connection was lost may still be queued in a broker. It blocks the barrier for
  `in_doubt_seconds` more. So does an append that a sequencer resends to resolve its outcome. While a sequencer has
  in-doubt appends, the barrier does not count as empty either (`Dispatcher.barrier_empty`).
- Requests in progress when checks were switched on, and requests of an earlier process, never entered. `clear_at` is
  when they must be over.

While an expansion waits for transactions, those must be able to end. So batches of their producers may pass the closed
barrier (`but_for`), under their current epoch. They are inside like all others. With transactions v2 a producer's next
transaction has the next epoch, and waits. Before v2 both look alike: a producer that begins one transaction after
another passes, until one read finds none of its transactions open.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable

_NO_PRODUCER: frozenset[tuple[int, int]] = frozenset()


class AppendBarrier:
    """Times are monotonic seconds. A pass is named by its request: any hashable, one at a time.

    `count`: the number of partitions it was last opened with; None before the first time, when metadata applies.
    """

    __slots__ = (
        "_but_for",
        "_clear_at",
        "_entered",
        "_in_doubt_seconds",
        "_in_doubt_until",
        "closed_at",
        "count",
        "topic",
    )

    def __init__(self, topic: str, *, in_doubt_seconds: float, clear_at: float = float("-inf")) -> None:
        self.topic = topic
        self.count: int | None = None
        self.closed_at: float | None = None
        self._in_doubt_seconds = in_doubt_seconds
        self._clear_at = clear_at
        self._in_doubt_until = float("-inf")
        self._entered: set[Hashable] = set()
        self._but_for = _NO_PRODUCER

    # ---- for Produce requests

    def admits(self, transactional_producers: Collection[tuple[int, int]] = ()) -> bool:
        """Whether a request may enter now. `transactional_producers`: (id, epoch) of its transactional batches for this
        topic, if it has no other batches."""
        if self.closed_at is None:
            return True
        return bool(transactional_producers) and self._but_for.issuperset(transactional_producers)

    def enter(self, pass_id: Hashable, now: float, transactional_producers: Collection[tuple[int, int]] = ()) -> bool:
        """False while it is closed: nothing changed, retry when it is open."""
        if pass_id in self._entered:
            raise ValueError(f"{pass_id!r} has entered the append barrier of {self.topic} already")
        if not self.admits(transactional_producers):
            return False
        self._entered.add(pass_id)
        return True

    def leave(self, pass_id: Hashable, now: float, *, in_doubt: bool = False) -> None:
        """`in_doubt`: it was sent, and will not be answered."""
        self._entered.remove(pass_id)
        if in_doubt:
            self._in_doubt_until = max(self._in_doubt_until, now + self._in_doubt_seconds)

    def mark_in_doubt(self, now: float) -> None:
        """An append was sent without a request inside, and will not be answered."""
        self._in_doubt_until = max(self._in_doubt_until, now + self._in_doubt_seconds)

    # ---- for expansions

    def close(self, now: float, *, but_for: Iterable[tuple[int, int]] = ()) -> None:
        """Admit no request except these producers' transactions. Call again to change the producers."""
        if self.closed_at is None:
            self.closed_at = now
        self._but_for = frozenset(but_for)

    def open(self, count: int) -> None:
        """From now on `count` applies. `Dispatcher.open_barrier` also notifies the waiting requests."""
        self.count = count
        self.closed_at = None
        self._but_for = _NO_PRODUCER

    def forget_count(self) -> None:
        """The topic was recreated."""
        self.count = None

    @property
    def closed(self) -> bool:
        return self.closed_at is not None

    @property
    def in_flight(self) -> int:
        return len(self._entered)

    @property
    def idle(self) -> bool:
        """Open, no request inside, and no earlier one that may still be in progress."""
        return self.closed_at is None and not self._entered and self.empty_at == float("-inf")

    def empty(self, now: float) -> bool:
        """No request is inside, and none that was may still be appended."""
        return not self._entered and now >= self.empty_at

    @property
    def empty_at(self) -> float:
        """Earliest time at which `empty` can hold, as known now."""
        return max(self._clear_at, self._in_doubt_until)

    def not_empty_before(self, at: float) -> None:
        """A request that never entered may be in progress until then."""
        self._clear_at = max(self._clear_at, at)
