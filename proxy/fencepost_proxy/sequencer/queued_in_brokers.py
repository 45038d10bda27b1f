"""Appends that may still be queued in a broker; see the section of that name in `sequencer.py`."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from fencepost_policies.append import Check
from fencepost_proxy.sequencer.events import PendingAppend, SequencerLimits

#: Unfenced batches that no producer's sequence identifies.
_UNNAMED = None


@dataclass(slots=True, eq=False)
class QueuedInBrokers:
    """Until when, for fenced appends and for unfenced ones. `_fenced_to`: the log end after the last fenced one."""

    _limits: SequencerLimits
    fenced_until: float = -inf
    _fenced_to: int = -1
    _unfenced_until: float = -inf
    _unfenced: OrderedDict[tuple[tuple[int, int], int] | None, float] = field(default_factory=OrderedDict)

    def add(self, pending: PendingAppend, now: float) -> None:
        until = max(now, pending.sending.may_arrive_until) + self._limits.queued_seconds
        if pending.placement.kind.fenced:
            assert pending.placement.at is not None
            self.fenced_until = until
            self._fenced_to = max(self._fenced_to, pending.placement.at + pending.append.record_count)
            return
        self._unfenced_until = until
        named = pending.placement.fence is None and pending.append.producer_id >= 0
        name = pending.batch_name if named else _UNNAMED
        self._unfenced[name] = until
        self._unfenced.move_to_end(name)
        if len(self._unfenced) > self._limits.remembered_batches_max:
            oldest = self._unfenced.popitem(last=False)[1]
            self._unfenced[_UNNAMED] = max(oldest, self._unfenced.get(_UNNAMED, oldest))

    def fenced_appended(self, end: int) -> None:
        """The sequences up to `end` are used now."""
        if end >= self._fenced_to:
            self.fenced_until = -inf

    def appended(self, pending: PendingAppend) -> None:
        """The log has it. If an earlier attempt still reaches a broker, Kafka takes it for a duplicate."""
        if self._unfenced.pop(pending.batch_name, None) is not None:
            self._unfenced_until = max(self._unfenced.values(), default=-inf)

    def contains(self, pending: PendingAppend, now: float) -> bool:
        return self._unfenced_until > now and self._unfenced.get(pending.batch_name, now) > now

    def may_append_later(self, pending: PendingAppend, now: float) -> bool:
        """Whether an earlier attempt, fenced at its offset, may still be appended once the log ends there."""
        expected = pending.append.expected_base_offset
        return now < self.fenced_until and expected is not None and expected < self._fenced_to

    def any(self, now: float) -> bool:
        return now < max(self.fenced_until, self._unfenced_until)

    def block(self, pending: PendingAppend, now: float) -> bool:
        """On `required` topics no append is unfenced."""
        if pending.check is Check.REQUIRED:
            return False
        if pending.append.expected_base_offset is not None:
            if not pending.context.taken_over:
                return True
            # Kafka decides in which order a retry and its earlier attempt are appended.
            if now < self._unfenced_until and not (pending.append.transactional and self._only_itself(pending, now)):
                return True
        return now < self.fenced_until and not pending.placement.kind.fenced

    def _only_itself(self, pending: PendingAppend, now: float) -> bool:
        mine = pending.batch_name
        return not any(until > now and name != mine for name, until in self._unfenced.items())
