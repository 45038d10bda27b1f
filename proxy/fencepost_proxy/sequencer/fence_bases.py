"""Fence base: the offset that has sequence 0 in one epoch of the fence, as all instances have agreed on.

Only `required` topics have one. There every append is fenced, so log end and next sequence move together, and the
sequence offset is the base. If they differ, a writer has bypassed the proxies. No append is admitted until a new base
is stored where all instances read it.

A new base needs a new epoch, and a producer id has 32,768 epochs. Epochs continue with the next shared producer id:
epoch 32,768 is epoch 0 of the second one. Kafka does not compare appends queued under the old id with those under the
new one. So the last epoch of an id serves one append, with sequence 0. From then on Kafka refuses everything under the
old id: older epochs by their epoch, the last epoch by its sequence.

Claims
------
An epoch can begin with a transaction marker under the shared producer id. The marker takes one offset. From then on
Kafka refuses all lower epochs, and the first append of the epoch must have sequence 0, so it is compared. So a process
can have an epoch for itself, and pipeline while others live (`specification/Claims.tla`):

1. The process publishes a base after the next offset, which the marker is to take. The first proposal of an epoch wins,
   so each epoch has one marker.
2. It writes the marker, and reads the log end. If another append came before the marker, the base does not fit, and it
   claims again with the next epoch. Now no other process can append.
3. A process that reads another one's claim, and has an append, begins a shared epoch in the same way: all append under
   it, one append at a time. It waits for nothing.

A base of a claim is used only once the marker is in the log, and replicated. The last epochs of an id are shared. The
last one begins once the marker before it is in the log, or is missing for longer than a request may be queued.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fencepost_proxy.sequencer.events import Claim, LogEndSnapshot, PublishBase, Violation
from fencepost_proxy.sequencer.log_view import LogView
from fencepost_proxy.types import SEQUENCE_MODULUS

#: The last epochs of a producer id are shared, so that no process pipelines when the next id begins.
_SHARED_EPOCHS = 3


@dataclass(slots=True, eq=False)
class FenceBases:
    """From a log-end snapshot that does not fit the base, to a stored base."""

    _log: LogView
    _due: float = -inf  # when its bases would have been published at one per `base_seconds`
    _foreign: LogEndSnapshot | None = None  # of the base to be stored, if its epoch was not published
    #: When this process last claimed, how often, and when it last found appends of others; appends that waited since.
    claimed_at: float = -inf
    _claims: int = 0
    _disturbed_at: float = -inf
    _waited: int = 0
    _waiting: float = -inf
    _missing_since: float = inf  # when the marker before a last epoch was first missing

    def is_last_epoch(self, epoch: int) -> bool:
        """The last epoch of its producer id."""
        return epoch % self._log.limits.producer_epochs == self._log.limits.producer_epochs - 1

    def outside_log(self, snapshot: LogEndSnapshot) -> str | None:
        """Why the published base no longer fits the log; None if it fits."""
        epoch, base = snapshot.fence_base
        if snapshot.claim is Claim.ANOTHERS:
            return f"another process has claimed the partition with epoch {epoch}"
        if snapshot.log_end_offset < base:
            return f"log end {snapshot.log_end_offset} is before the fence base {base}"
        state = snapshot.producer_state
        if self._lacks_marker(snapshot):
            return f"the marker of fence epoch {epoch} is not in the log"
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
        if self._marker_may_follow(snapshot, now):
            self._log.retry(now, late=True)
            return False
        due = max(self._due, now)
        if due - now > limits.bases_burst * limits.base_seconds:
            self._log.retry_at = due - limits.bases_burst * limits.base_seconds
            return False
        self._due = due + limits.base_seconds
        self._log.effects.append(self._new_base(snapshot, reason, self._next_claim(snapshot)))
        return True

    def _marker_may_follow(self, snapshot: LogEndSnapshot, now: float) -> bool:
        """A last epoch begins without a marker. Before it, one that is missing might still take an offset."""
        epoch, _ = snapshot.fence_base
        if not (self.is_last_epoch(epoch + 1) and self._lacks_marker(snapshot)):
            self._missing_since = inf
            return False
        self._missing_since = min(self._missing_since, now)
        return now < self._missing_since + self._log.limits.queued_seconds

    @staticmethod
    def _lacks_marker(snapshot: LogEndSnapshot) -> bool:
        epoch, state = snapshot.fence_base[0], snapshot.producer_state
        return snapshot.claim is not Claim.NONE and (state is None or state.producer_epoch < epoch)

    def _next_claim(self, snapshot: LogEndSnapshot) -> Claim:
        """An epoch after a claim begins with a marker: only that ends what the claim's process may have sent, and what
        its marker might still do."""
        is_last = self.is_last_epoch(snapshot.fence_base[0] + 1)
        return Claim.NONE if snapshot.claim is Claim.NONE or is_last else Claim.SHARED

    # ---- claims

    def disturbed(self, now: float) -> None:
        """The log has moved without this process."""
        self._disturbed_at, self._waited = now, 0

    def waited(self, submitted_at: float) -> None:
        """An append, submitted then, waits for the one before it, because the partition is not claimed."""
        if submitted_at != self._waiting:
            self._waiting = submitted_at
            self._waited += 1

    def claims(self, snapshot: LogEndSnapshot, log_end: int, now: float) -> bool:
        """Propose a claim if this process has been the only one to append here, for longer after each claim. Its log
        end must be known."""
        limits, (epoch, _) = self._log.limits, snapshot.fence_base
        left = limits.producer_epochs - 1 - (epoch + 1) % limits.producer_epochs
        alone_for = limits.claim_after_seconds * 2 ** min(self._claims, limits.claim_doublings)
        if self._waited < limits.claim_after_waits or now < self._disturbed_at + alone_for or left < _SHARED_EPOCHS:
            return False
        self._claims += 1
        self.claimed_at, self._waited = now, 0
        reason = "only this process has appended for a while"
        self._log.effects.append(PublishBase(self._log.partition, epoch + 1, log_end + 1, reason, Claim.OURS))
        return True

    def _new_base(self, snapshot: LogEndSnapshot, reason: str, claim: Claim) -> PublishBase:
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
        # The marker of a claim takes an offset.
        base = snapshot.log_end_offset + (claim is not Claim.NONE)
        return PublishBase(self._log.partition, epoch + 1, base, reason, claim)

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
        if snapshot.claim is not Claim.NONE and next_sequence == 0:
            return  # appends of the epoch before, or other markers, came before its marker
        missing = (snapshot.log_end_offset - base - next_sequence) % SEQUENCE_MODULUS
        if 0 < missing <= snapshot.log_end_offset - base:
            self._report(snapshot.log_end_offset - missing, snapshot)

    def _report(self, offset: int, snapshot: LogEndSnapshot) -> None:
        self._log.effects.append(Violation(self._log.partition, offset, log_end_offset=snapshot.log_end_offset))
