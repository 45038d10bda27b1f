"""How many partitions counted topics have, when they grew, and which count each client was told last. Sans-IO.

A topic's count has three sources: its expansions, as the state topic tells them; metadata, which any broker answers
from a copy that may lag; and the door that an expansion has opened. Partitions are never taken away, so the largest
that is known of an incarnation is true, and may be too small. While an expansion is pending its partitions are there or
not: they do not count before it has ended.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.topics.expansions import Growth

#: For how long a guess is held against a client: one that refreshes its metadata elsewhere must not be shut out.
_BELIEVED_SECONDS: Final = 5.0
_NEVER: Final = float("-inf")
#: Names of topics come from clients: a stranger's must not fill the memory.
_MISSING_MAX: Final = 10_000


class Client(NamedTuple):
    """Whom a Metadata answer was for: as much as two connections of one client have in common."""

    host: str
    client_id: str | None


@dataclass(slots=True)
class _Topic:
    """`confirmed_at` – when metadata was asked whose answer said `count`. Times are monotonic seconds."""

    topic_id: UUID
    count: int
    grown_at: float = _NEVER
    confirmed_at: float = _NEVER


@dataclass(slots=True)
class _Served:
    count: int
    refused_at: float | None = None


class Counts:
    """`metadata` gives a topic's id and count as last heard, `growth` its expansions, `clock_ms` the time of day."""

    def __init__(
        self,
        metadata: Callable[[str], tuple[UUID, int] | None],
        growth: Callable[[str, UUID], Growth],
        clock_ms: Callable[[], int],
        *,
        settle_seconds: float,
        served_max: int,
    ) -> None:
        self._metadata = metadata
        self._growth = growth
        self._clock_ms = clock_ms
        self._settle_seconds = settle_seconds
        self._served_max = served_max
        self._topics: dict[str, _Topic] = {}
        self._missing: dict[str, float] = {}  # when metadata was asked for them last
        self._served: OrderedDict[tuple[Client, str], _Served] = OrderedDict()

    # ---- of topics

    def count(self, topic: str, now: float) -> int | None:
        """None while it is not known."""
        heard = self._metadata(topic)
        if heard is None:
            return None
        topic_id, count = heard
        known = self._topics.get(topic)
        if known is not None and known.topic_id != topic_id:
            known = None
        growth = self._growth(topic, topic_id)
        if growth.pending is not None:
            return growth.pending.from_count
        count = max(count, growth.count or 0)
        if known is None:
            unseen = growth.count is not None and count > growth.count
            grown_at = now if unseen else self._last_grown(growth, now)
            known = self._topics[topic] = _Topic(topic_id, count, grown_at)
        elif count > known.count:
            known.count, known.grown_at = count, now
        return known.count

    def _last_grown(self, growth: Growth, now: float) -> float:
        ended_at_ms = growth.expansions[-1].ended_at_ms if growth.expansions else None
        return _NEVER if ended_at_ms is None else now - max(0, self._clock_ms() - ended_at_ms) / 1000

    def settles(self, topic: str, now: float) -> bool:
        """Whether it has grown so recently that producers may still hold what they placed before. Ask `count` first."""
        known = self._topics.get(topic)
        return known is not None and now - known.grown_at < self._settle_seconds

    def confirm(self, topic: str, asked_at: float, now: float) -> None:
        """Metadata has answered what was asked then: `count` is true, None where there is no such topic."""
        if self.count(topic, now) is None:
            if len(self._missing) >= _MISSING_MAX:
                self._missing.clear()
            self._missing[topic] = asked_at
            return
        known = self._topics.get(topic)  # none while an expansion is pending that is the first news of it
        if known is not None:
            known.confirmed_at = max(known.confirmed_at, asked_at)

    def confirmed_since(self, topic: str, at: float) -> bool:
        """Whether metadata was asked at that time or later."""
        if self._metadata(topic) is None:
            return self._missing.get(topic, _NEVER) >= at
        known = self._topics.get(topic)
        return known is not None and known.confirmed_at >= at

    def forget(self, topic: str) -> None:
        """The topic is another one now, or none."""
        self._topics.pop(topic, None)

    # ---- of clients

    def serve(self, client: Client, counts: Iterable[tuple[str, int]]) -> None:
        """A Metadata answer leaves for the client."""
        for topic, count in counts:
            self._served[client, topic] = _Served(count)
            self._served.move_to_end((client, topic))
        while len(self._served) > self._served_max:
            self._served.popitem(last=False)

    def served(self, client: Client, topic: str, now: float) -> int | None:
        """The count that it was told last, by this process; None where nobody knows, or nobody should believe it."""
        served = self._served.get((client, topic))
        if served is None:
            return None
        if served.refused_at is not None and now - served.refused_at > _BELIEVED_SECONDS:
            del self._served[client, topic]
            return None
        return served.count

    def refused(self, client: Client, topic: str, now: float) -> None:
        """It was refused for what it was told last: it asks again, here or at another process."""
        served = self._served.get((client, topic))
        if served is not None and served.refused_at is None:
            served.refused_at = now
