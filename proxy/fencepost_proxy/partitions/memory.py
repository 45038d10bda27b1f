"""Batches that a sequencer has answered: recognises retries and repeats their answers.

In memory only, bounded by `GateLimits`, oldest dropped first. It decides nothing: `gate.py` queries it.

Kafka does this for a producer's own sequences. Those of fenced batches never reach Kafka.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TypeVar

from fencepost_policies.append import Refusal
from fencepost_proxy.partitions.events import GateLimits, Kind, Stamp, Ticket
from fencepost_proxy.partitions.landed import Landed

#: As many batches of a producer as Kafka recognises.
_PER_PRODUCER = 5
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Producer = tuple[int, int]


class Memory:
    """See the module. Keyed by ticket; a producer is (id, epoch)."""

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits
        self.landed: OrderedDict[int, Landed] = OrderedDict()
        self.stamped: OrderedDict[_Producer, deque[tuple[int, Landed]]] = OrderedDict()
        self._own: OrderedDict[_Producer, deque[int]] = OrderedDict()
        self._unresolved: OrderedDict[tuple[_Producer, int], tuple[bytes, int, Stamp]] = OrderedDict()
        self._violations: OrderedDict[tuple[object, ...], tuple[bytes, Refusal]] = OrderedDict()

    def clear(self) -> None:
        for each in (self.landed, self.stamped, self._own, self._unresolved, self._violations):
            each.clear()

    def forget_from(self, offset: int) -> None:
        """The log was truncated there."""
        for base in [base for base, landed in self.landed.items() if landed.end > offset]:
            del self.landed[base]
        for producer, batches in self.stamped.items():
            self.stamped[producer] = deque((b for b in batches if b[1].end <= offset), maxlen=_PER_PRODUCER)

    # ---- fenced batches that were appended

    def note_stamped(self, ticket: Ticket) -> None:
        """From now on, not all sequences of its producer reach Kafka."""
        self._of_producer(ticket)

    def is_stamped(self, ticket: Ticket) -> bool:
        return ticket.producer in self.stamped

    def add(self, ticket: Ticket, log_append_time_ms: int) -> Landed:
        assert ticket.at is not None
        append = ticket.append
        landed = Landed(ticket.at, append.record_count, ticket.digest, append.write_id, log_append_time_ms)
        self.landed[ticket.at] = landed
        _bound(self.landed, self._limits.remembered_batches_max)
        if append.producer_id >= 0:
            self._of_producer(ticket).append((append.base_sequence, landed))
        return landed

    def retry_of(self, ticket: Ticket) -> Landed | None:
        """Where this batch was appended, by its producer's sequence and its records."""
        for first, landed in self.stamped.get(ticket.producer, ()):
            if first == ticket.append.base_sequence and landed.digest == ticket.digest:
                return landed
        return None

    def _of_producer(self, ticket: Ticket) -> deque[tuple[int, Landed]]:
        recent = self.stamped.setdefault(ticket.producer, deque(maxlen=_PER_PRODUCER))
        self.stamped.move_to_end(ticket.producer)
        _bound(self.stamped, self._limits.remembered_producers_max)
        return recent

    # ---- batches sent under their own producer id

    def add_own(self, ticket: Ticket) -> None:
        recent = self._own.setdefault(ticket.producer, deque(maxlen=_PER_PRODUCER))
        if ticket.append.base_sequence not in recent:
            recent.append(ticket.append.base_sequence)
        self._own.move_to_end(ticket.producer)
        _bound(self._own, self._limits.remembered_producers_max)

    def went_as_own(self, ticket: Ticket) -> bool:
        """Kafka recognises a duplicate of it by its own sequence only."""
        return ticket.append.producer_id >= 0 and ticket.append.base_sequence in self._own.get(ticket.producer, ())

    # ---- batches with an unknown outcome

    def add_unresolved(self, ticket: Ticket) -> None:
        if ticket.append.producer_id < 0 or ticket.stamp is None:
            return
        at = -1 if ticket.kind is Kind.OWN else ticket.at  # without a producer id, at any offset
        if at is not None and (ticket.kind.stamped or ticket.kind is Kind.OWN):
            key = (ticket.producer, ticket.append.base_sequence)
            self._unresolved[key] = (ticket.digest, at, ticket.stamp)
            _bound(self._unresolved, self._limits.remembered_batches_max)

    def unresolved(self, ticket: Ticket) -> tuple[int, Stamp] | None:
        """Expected offset and fence of its earlier attempt; -1 and `NO_PRODUCER` if it may be at any offset."""
        known = self._unresolved.get((ticket.producer, ticket.append.base_sequence))
        return known[1:] if ticket.kind.stamped and known is not None and known[0] == ticket.digest else None

    def resolved(self, ticket: Ticket) -> None:
        self._unresolved.pop((ticket.producer, ticket.append.base_sequence), None)

    # ---- batches appended elsewhere than expected

    def add_violation(self, ticket: Ticket, refusal: Refusal) -> None:
        for name in names_of(ticket):
            self._violations[name] = (ticket.digest, refusal)
        _bound(self._violations, self._limits.remembered_batches_max)

    def violation_of(self, ticket: Ticket) -> Refusal | None:
        for name in names_of(ticket):
            digest, refusal = self._violations.get(name, (b"", None))
            if refusal is not None and digest == ticket.digest:
                return refusal
        return None


def names_of(ticket: Ticket) -> Iterator[tuple[object, ...]]:
    """What identifies a retry: the producer's sequence, the write-id."""
    append = ticket.append
    if append.producer_id >= 0:
        yield append.producer_id, append.producer_epoch, append.base_sequence
    if append.write_id is not None:
        yield append.write_id, append.expected_base_offset


def same_write(one: Ticket, other: Ticket) -> bool:
    """Whether one is a retry of the other, by identification and records."""
    return one.digest == other.digest and not set(names_of(one)).isdisjoint(names_of(other))


def _bound(members: OrderedDict[_Key, _Value], count_max: int) -> None:
    while len(members) > count_max:
        members.popitem(last=False)
