"""The base of the stamp on `required` topics: which offset has sequence 0, in which epoch. All processes agree on it.

There every append is stamped, so log end and next sequence move together, and the shift is the base. Where they do not,
somebody appended around the proxies: nothing goes on before a new base is stored where all processes read it.

A new base needs a new epoch, and a producer id has 32,768. Epochs go on with the next shared producer id: epoch 32,768
is epoch 0 of the second one. Kafka does not refuse what still waits in a queue under the old id for an append under the
new one. So the last epoch of an id is used for one append, with sequence 0. After it Kafka refuses whatever still comes
under the old id: older epochs, and everything else with sequence 0.
"""

from __future__ import annotations

from fencepost_proxy.partitions.events import PublishBase, Tail, Violation
from fencepost_proxy.partitions.gate_state import GateState, Phase
from fencepost_proxy.types import SEQUENCE_MODULUS


class Publishing(GateState):
    """Phase PUBLISHING: from a tail that the base does not fit, to a base that is stored (`BasePublished`)."""

    def _stamp_left_behind(self, tail: Tail) -> str | None:
        """Why the published base no longer fits the log, None if it does.

        On a `required` topic every append is stamped, so log end and next sequence move together. Where they do not,
        somebody appended around the proxies. All processes must agree on the new base before any of them uses it.
        """
        epoch, base = tail.stamp_base
        if tail.log_end_offset < base:
            return f"the log ends at {tail.log_end_offset}, before the stamp's base {base}"
        state = tail.producer_state
        if self._is_last_epoch(epoch):
            if tail.log_end_offset != base or (state is not None and state.producer_epoch >= epoch):
                return f"the last epoch of producer id {tail.producer_id} has been used"
            return None
        if state is None:
            return None
        if state.producer_epoch > epoch:
            return f"the partition knows the stamp's epoch {state.producer_epoch}, published is {epoch}"
        next_sequence = state.next_sequence if state.producer_epoch == epoch else 0
        if next_sequence != (tail.log_end_offset - base) % SEQUENCE_MODULUS:
            return f"the log ends at {tail.log_end_offset}, the stamp's next sequence is {next_sequence} above {base}"
        return None

    def _new_base(self, tail: Tail, reason: str) -> PublishBase:
        """What the processes should agree on. An epoch has one base for ever, so a new base needs a new epoch.

        But not where another writer used the stamp's producer id under an epoch that has no base: to go on after its
        last sequence is the safer way, since the first append under a new epoch has no sequence to be compared with.
        Only its last epoch is left at once: Kafka refuses all others of that producer id by now.
        """
        epoch, _ = tail.stamp_base
        state = tail.producer_state
        if state is not None and state.producer_epoch > epoch:
            self._foreign = tail
            epoch = state.producer_epoch
            if not self._is_last_epoch(epoch):
                return PublishBase(self.partition, epoch, tail.log_end_offset - state.next_sequence, reason)
        return PublishBase(self.partition, epoch + 1, tail.log_end_offset, reason)

    def _publish(self, tail: Tail, reason: str, now: float) -> None:
        """Later, if there were too many of late. Meanwhile appends wait, then are answered with a retriable error."""
        limits = self._limits
        due = max(self._bases_due, now)
        if due - now > limits.bases_burst * limits.base_seconds:
            self.phase = Phase.COLD
            self._retry_at = due - limits.bases_burst * limits.base_seconds
            return
        self._bases_due = due + limits.base_seconds
        self.phase = Phase.PUBLISHING
        self._effects.append(self._new_base(tail, reason))

    def _report_foreign_epoch(self, tail: Tail) -> None:
        last = max(tail.log_end_offset - 1, 0)  # his batch; where it begins the tail does not say
        self._effects.append(Violation(self.partition, last, log_end_offset=tail.log_end_offset))

    @staticmethod
    def _first_unstamped(tail: Tail) -> int | None:
        """Where the log left the stamp behind; None where it did not get longer but shorter, or by an unknown epoch."""
        epoch, base = tail.stamp_base
        state = tail.producer_state
        if state is None or state.producer_epoch > epoch or tail.log_end_offset < base:
            return None
        next_sequence = state.next_sequence if state.producer_epoch == epoch else 0
        missing = (tail.log_end_offset - base - next_sequence) % SEQUENCE_MODULUS
        return tail.log_end_offset - missing if 0 < missing <= tail.log_end_offset - base else None

    def _base_published(self, ok: bool, ours: bool, now: float) -> None:
        foreign, self._foreign = self._foreign, None
        if self.phase is Phase.PUBLISHING:
            self.phase = Phase.COLD
            if ok and ours and foreign is not None:
                # No process had published a base under that epoch: it is nobody's of ours.
                self._report_foreign_epoch(foreign)
            if not ok:
                self._retry_at = now + self._limits.read_retry_seconds
