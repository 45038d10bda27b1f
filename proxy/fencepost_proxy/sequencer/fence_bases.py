"""Fence base: the offset that has sequence 0 in one epoch of the fence, as all instances have agreed on.

Only `required` topics have one. There every append is fenced, so log end and next sequence move together, and the
sequence offset is the base. If they differ, a writer has bypassed the proxies. No append is admitted until a new base
is stored where all instances read it.

A new base needs a new epoch, and a producer id has 32,768 epochs. Epochs continue with the next shared producer id:
epoch 32,768 is epoch 0 of the second one. Kafka does not compare appends queued under the old id with those under the
new one. So the last epoch of an id serves one append, with sequence 0. From then on Kafka refuses everything under the
old id: older epochs by their epoch, the last epoch by its sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fencepost_proxy.sequencer.events import LogEndSnapshot, PublishBase, Violation
from fencepost_proxy.sequencer.log_view import LogView
from fencepost_proxy.types import SEQUENCE_MODULUS


@dataclass(slots=True, eq=False)
class FenceBases:
    """From a log-end snapshot that does not fit the base, to a stored base."""

    _log: LogView
    _due: float = -inf  # when its bases would have been published at one per `base_seconds`
    _foreign: LogEndSnapshot | None = None  # of the base to be stored, if its epoch was not published

    def is_last_epoch(self, epoch: int) -> bool:
        """The last epoch of its producer id."""
        return epoch % self._log.limits.producer_epochs == self._log.limits.producer_epochs - 1

    def outside_log(self, snapshot: LogEndSnapshot) -> str | None:
        """Why the published base no longer fits the log; None if it fits."""
        epoch, base = snapshot.fence_base
        if snapshot.log_end_offset < base:
            return f"log end {snapshot.log_end_offset} is before the fence base {base}"
        state = snapshot.producer_state
        if self.is_last_epoch(epoch):
            if snapshot.log_end_offset != base or (state is not None and state.producer_epoch >= epoch):
                return f"the last epoch of producer id {snapshot.producer_id} has been used"
            return None
        if state is None:
            return None
        if state.producer_epoch > epoch:
            return f"the partition has fence epoch {state.producer_epoch}, published is {epoch}"
        next_sequence = state.next_sequence if state.producer_epoch == epoch else 0
        if next_sequence != (snapshot.log_end_offset - base) % SEQUENCE_MODULUS:
            return (
                f"log end {snapshot.log_end_offset} is not the fence's next sequence {next_sequence} plus base {base}"
            )
        return None

    def propose(self, snapshot: LogEndSnapshot, reason: str, now: float) -> bool:
        """False if there were too many recently. Meanwhile appends wait, then get a retriable error."""
        limits = self._log.limits
        due = max(self._due, now)
        if due - now > limits.bases_burst * limits.base_seconds:
            self._log.retry_at = due - limits.bases_burst * limits.base_seconds
            return False
        self._due = due + limits.base_seconds
        self._log.effects.append(self._new_base(snapshot, reason))
        return True

    def _new_base(self, snapshot: LogEndSnapshot, reason: str) -> PublishBase:
        """The base to propose. An epoch has one base, so a new base needs a new epoch.

        Exception: another writer used the shared producer id under an epoch that has no base. Then its epoch is kept,
        after its last sequence, since the first append under a new epoch has no sequence to compare. The last epoch is
        never kept: Kafka refuses all others of that producer id by then.
        """
        epoch, _ = snapshot.fence_base
        state = snapshot.producer_state
        if state is not None and state.producer_epoch > epoch:
            self._foreign = snapshot
            epoch = state.producer_epoch
            if not self.is_last_epoch(epoch):
                return PublishBase(self._log.partition, epoch, snapshot.log_end_offset - state.next_sequence, reason)
        return PublishBase(self._log.partition, epoch + 1, snapshot.log_end_offset, reason)

    def published(self, ok: bool, ours: bool, now: float) -> None:
        foreign, self._foreign = self._foreign, None
        if ok and ours and foreign is not None:
            # No instance had published a base under that epoch, so another writer used it.
            self.report_foreign_epoch(foreign)
        if not ok:
            self._log.retry(now)

    def report_foreign_epoch(self, snapshot: LogEndSnapshot) -> None:
        """The snapshot shows only the last record of the foreign batch, not where it begins."""
        self._report(max(snapshot.log_end_offset - 1, 0), snapshot)

    def report_unfenced(self, snapshot: LogEndSnapshot) -> None:
        """From the first offset that is not fenced; not if the log became shorter, or has an unknown epoch."""
        epoch, base = snapshot.fence_base
        state = snapshot.producer_state
        if state is None or state.producer_epoch > epoch or snapshot.log_end_offset < base:
            return
        next_sequence = state.next_sequence if state.producer_epoch == epoch else 0
        missing = (snapshot.log_end_offset - base - next_sequence) % SEQUENCE_MODULUS
        if 0 < missing <= snapshot.log_end_offset - base:
            self._report(snapshot.log_end_offset - missing, snapshot)

    def _report(self, offset: int, snapshot: LogEndSnapshot) -> None:
        self._log.effects.append(Violation(self._log.partition, offset, log_end_offset=snapshot.log_end_offset))
