"""Partition counts of checked topics, when they were expanded, and which count each client was last served. Sans-IO.

A topic's count has three sources: its expansions in the state topic; metadata, which any broker answers from a copy
that may lag; and the append barrier that an expansion has opened. Partitions are never removed, so the largest known
count of an incarnation is a lower bound. Partitions of a pending expansion do not count before it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.expansion.history import ExpansionHistory
from fencepost_proxy.types import Bounded

#: How long a guess counts against a client: it may have refreshed its metadata at another instance.
_BELIEVED_SECONDS: Final = 5.0
_NEVER: Final = float("-inf")
#: Clients supply topic names, so bound the memory.
_MISSING_MAX: Final = 10_000
#: Pairs of a client and a topic whose last reported count is remembered.
_SERVED_MAX: Final = 10_000


class Client(NamedTuple):
    """The recipient of a Metadata answer: what two connections of one client have in common."""

    host: str
    client_id: str | None


@dataclass(slots=True)
class _Topic:
    """`confirmed_at`: when the Metadata request was sent whose answer had `count`. Times are monotonic seconds."""

    topic_id: UUID
    count: int
    expanded_at: float = _NEVER
    confirmed_at: float = _NEVER


@dataclass(slots=True)
class _Served:
    count: int
    refused_at: float | None = None


class Counts:
    """`metadata` returns a topic's last known id and count, `history` its expansions, `clock_ms` the time of day."""

    def __init__(
        self,
        metadata: Callable[[str], tuple[UUID, int] | None],
        history: Callable[[str, UUID], ExpansionHistory],
        clock_ms: Callable[[], int],
        *,
        resolve_seconds: float,
        served_max: int = _SERVED_MAX,
    ) -> None:
        self._metadata = metadata
        self._history = history
        self._clock_ms = clock_ms
        self._grace_seconds = resolve_seconds
        self._topics: dict[str, _Topic] = {}
        self._missing: dict[str, float] = {}  # time of the last Metadata request for them
        self._served: Bounded[tuple[Client, str], _Served] = Bounded(served_max)

    # ---- topics

    def count(self, topic: str, now: float) -> int | None:
        """None while it is not known."""
        last_observed = self._metadata(topic)
        if last_observed is None:
            return None
        topic_id, count = last_observed
        known = self._topics.get(topic)
        if known is not None and known.topic_id != topic_id:
            known = None
        history = self._history(topic, topic_id)
        if history.pending is not None:
            return history.pending.from_count
        count = max(count, history.count or 0)
        if known is None:
            unseen = history.count is not None and count > history.count
            expanded_at = now if unseen else self._last_expanded(history, now)
            known = self._topics[topic] = _Topic(topic_id, count, expanded_at)
        elif count > known.count:
            known.count, known.expanded_at = count, now
        return known.count

    def _last_expanded(self, history: ExpansionHistory, now: float) -> float:
        ended_at_ms = history.expansions[-1].ended_at_ms if history.expansions else None
        return _NEVER if ended_at_ms is None else now - max(0, self._clock_ms() - ended_at_ms) / 1000

    def in_grace_period(self, topic: str, now: float) -> bool:
        """Post-expansion grace period: the time after an expansion in which producers may still use the old count.

        So the proxy checks the keys of batches that state no count. Call `count` first.
        """
        known = self._topics.get(topic)
        return known is not None and now - known.expanded_at < self._grace_seconds

    def confirm(self, topic: str, queried_at: float, now: float) -> None:
        """Metadata requested at `queried_at` was answered: `count` is current, None if the topic does not exist."""
        if self.count(topic, now) is None:
            if len(self._missing) >= _MISSING_MAX:
                self._missing.clear()
            self._missing[topic] = queried_at
            return
        known = self._topics.get(topic)  # None if a pending expansion is its first record
        if known is not None:
            known.confirmed_at = max(known.confirmed_at, queried_at)

    def confirmed_since(self, topic: str, at: float) -> bool:
        """Whether metadata was requested at that time or later."""
        if self._metadata(topic) is None:
            return self._missing.get(topic, _NEVER) >= at
        known = self._topics.get(topic)
        return known is not None and known.confirmed_at >= at

    def forget(self, topic: str) -> None:
        """The topic was deleted or recreated."""
        self._topics.pop(topic, None)

    # ---- clients

    def serve(self, client: Client, counts: Iterable[tuple[str, int]]) -> None:
        """A Metadata answer is sent to the client."""
        for topic, count in counts:
            self._served[client, topic] = _Served(count)

    def served(self, client: Client, topic: str, now: float) -> int | None:
        """The count this process last sent to the client; None if unknown or no longer trusted."""
        served = self._served.get((client, topic))
        if served is None:
            return None
        if served.refused_at is not None and now - served.refused_at > _BELIEVED_SECONDS:
            del self._served[client, topic]
            return None
        return served.count

    def refused(self, client: Client, topic: str, now: float) -> None:
        """An append was refused because of that count: the client refreshes its metadata, here or at another
        instance."""
        served = self._served.get((client, topic))
        if served is not None and served.refused_at is None:
            served.refused_at = now
