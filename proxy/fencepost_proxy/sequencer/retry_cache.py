"""Batches that a sequencer has answered: recognises retries and repeats their answers.

In memory only, bounded by `SequencerLimits`, oldest dropped first. It decides nothing: `sequencer.py` queries it.

Kafka does this for a producer's own sequences. Those of fenced batches never reach Kafka.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from fencepost_policies.append import Refusal
from fencepost_proxy.sequencer.events import AppendedBatch, AppendMode, Fence, PendingAppend, SequencerLimits
from fencepost_proxy.wire.batch import sequence_add

#: As many batches of a producer as Kafka recognises.
_PER_PRODUCER = 5
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Producer = tuple[int, int]


@dataclass(slots=True, eq=False)
class RetryCache:
    """See the module. A producer is (id, epoch)."""

    _limits: SequencerLimits
    appended_batch: OrderedDict[int, AppendedBatch] = field(default_factory=OrderedDict)
    fenced: OrderedDict[_Producer, deque[tuple[int, AppendedBatch]]] = field(default_factory=OrderedDict)
    _pass_through: OrderedDict[_Producer, deque[int]] = field(default_factory=OrderedDict)
    _unresolved: OrderedDict[tuple[_Producer, int], tuple[bytes, int, Fence]] = field(default_factory=OrderedDict)
    _violations: OrderedDict[tuple[object, ...], tuple[bytes, Refusal]] = field(default_factory=OrderedDict)

    def clear(self) -> None:
        for each in (self.appended_batch, self.fenced, self._pass_through, self._unresolved, self._violations):
            each.clear()

    @property
    def acknowledged_end(self) -> int:
        """The offset after the last append that was acknowledged; -1 if none is remembered."""
        return next(reversed(self.appended_batch.values())).end if self.appended_batch else -1

    @property
    def acknowledged_epoch(self) -> int:
        """The leader epoch of that append."""
        return next(reversed(self.appended_batch.values())).leader_epoch if self.appended_batch else -1

    def forget_from(self, offset: int) -> None:
        """The log was truncated there."""
        for base in [base for base, appended_batch in self.appended_batch.items() if appended_batch.end > offset]:
            del self.appended_batch[base]
        for producer, batches in self.fenced.items():
            self.fenced[producer] = deque((b for b in batches if b[1].end <= offset), maxlen=_PER_PRODUCER)
        for name in [name for name, (_, refusal) in self._violations.items() if refusal.base_offset >= offset]:
            del self._violations[name]

    # ---- fenced batches that were appended

    def record_fenced(self, pending: PendingAppend) -> None:
        """From now on, not all sequences of its producer reach Kafka."""
        self._of_producer(pending.producer)

    def is_fenced(self, pending: PendingAppend) -> bool:
        return pending.producer in self.fenced

    def add(self, pending: PendingAppend, log_append_time_ms: int, now: float) -> AppendedBatch:
        assert pending.placement.at is not None
        append = pending.append
        appended_batch = AppendedBatch(
            pending.placement.at,
            append.record_count,
            pending.digest,
            append.write_id,
            log_append_time_ms,
            pending.sending.leader_epoch,
            now,
        )
        self.remember(appended_batch, pending.producer, append.base_sequence)
        return appended_batch

    def remember(self, appended_batch: AppendedBatch, producer: _Producer, base_sequence: int) -> None:
        self.appended_batch[appended_batch.base_offset] = appended_batch
        _bound(self.appended_batch, self._limits.remembered_batches_max)
        if producer[0] >= 0:
            self._of_producer(producer).append((base_sequence, appended_batch))

    def retry_of(self, pending: PendingAppend) -> AppendedBatch | None:
        """Where this batch was appended, by its producer's sequence and its records."""
        for first, appended_batch in self.fenced.get(pending.producer, ()):
            if first == pending.append.base_sequence and appended_batch.digest == pending.digest:
                return appended_batch
        return None

    def next_fenced_sequence(self, producer: _Producer) -> int | None:
        """Of a producer whose batches are fenced, -1 if not known; None for others."""
        recent = self.fenced.get(producer)
        if recent is None:
            return None
        if not recent:
            return -1
        first, last = recent[-1]
        return sequence_add(first, last.record_count)

    def _of_producer(self, producer: _Producer) -> deque[tuple[int, AppendedBatch]]:
        recent = self.fenced.setdefault(producer, deque(maxlen=_PER_PRODUCER))
        self.fenced.move_to_end(producer)
        _bound(self.fenced, self._limits.remembered_producers_max)
        return recent

    # ---- batches sent under their own producer id

    def add_pass_through(self, producer: _Producer, base_sequence: int) -> None:
        recent = self._pass_through.setdefault(producer, deque(maxlen=_PER_PRODUCER))
        if base_sequence not in recent:
            recent.append(base_sequence)
        self._pass_through.move_to_end(producer)
        _bound(self._pass_through, self._limits.remembered_producers_max)

    def went_as_pass_through(self, pending: PendingAppend) -> bool:
        """Kafka recognises a duplicate of it by its own sequence only."""
        return pending.append.producer_id >= 0 and pending.append.base_sequence in self._pass_through.get(
            pending.producer, ()
        )

    # ---- batches with an unknown outcome

    @property
    def has_unknown(self) -> bool:
        """The next batch may be the retry of one that needs a decision."""
        return bool(self._unresolved or self._violations)

    def add_unresolved(self, pending: PendingAppend) -> None:
        if pending.append.producer_id < 0 or pending.placement.fence is None:
            return
        kind = pending.placement.kind
        at = -1 if kind is AppendMode.PASS_THROUGH else pending.placement.at  # without a producer id, at any offset
        if at is not None and (kind.fenced or kind is AppendMode.PASS_THROUGH):
            self._unresolved[pending.batch_name] = (pending.digest, at, pending.placement.fence)
            _bound(self._unresolved, self._limits.remembered_batches_max)

    def unresolved(self, pending: PendingAppend) -> tuple[int, Fence] | None:
        """Expected offset and fence of its earlier attempt; -1 and `NO_PRODUCER` if it may be at any offset."""
        known = self._unresolved.get(pending.batch_name) if self._unresolved and pending.placement.kind.fenced else None
        return known[1:] if known is not None and known[0] == pending.digest else None

    def resolved(self, pending: PendingAppend) -> None:
        if self._unresolved:
            self._unresolved.pop(pending.batch_name, None)

    # ---- batches appended elsewhere than expected

    def add_violation(self, pending: PendingAppend, refusal: Refusal) -> None:
        for name in names_of(pending):
            self._violations[name] = (pending.digest, refusal)
        _bound(self._violations, self._limits.remembered_batches_max)

    def violation_of(self, pending: PendingAppend) -> Refusal | None:
        for name in names_of(pending) if self._violations else ():
            digest, refusal = self._violations.get(name, (b"", None))
            if refusal is not None and digest == pending.digest:
                return refusal
        return None


def names_of(pending: PendingAppend) -> Iterator[tuple[object, ...]]:
    """What identifies a retry: the producer's sequence, the write-id."""
    append = pending.append
    if append.producer_id >= 0:
        yield pending.batch_name
    if append.write_id is not None:
        yield append.write_id, append.expected_base_offset


def same_write(one: PendingAppend, other: PendingAppend) -> bool:
    """Whether one is a retry of the other, by identification and records."""
    return one.digest == other.digest and not set(names_of(one)).isdisjoint(names_of(other))


def _bound(members: OrderedDict[_Key, _Value], count_max: int) -> None:
    while len(members) > count_max:
        members.popitem(last=False)
