"""The fence of a partition: what is known of its log end and sequence, and how long it may be relied on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf

from fencepost_policies.append import Check, Refusal
from fencepost_policies.conditional_publish import check_timestamps
from fencepost_proxy.sequencer.events import Claim, Fence, LogEndSnapshot, PendingAppend
from fencepost_proxy.sequencer.fence_bases import FenceBases
from fencepost_proxy.sequencer.log_view import LogView
from fencepost_proxy.types import SEQUENCE_MODULUS


class Phase(Enum):
    """See `sequencer.py`."""

    UNCONFIRMED = auto()
    READING = auto()
    PUBLISHING = auto()
    OPEN = auto()
    RESOLVING = auto()


_KNOWN = (Phase.OPEN, Phase.RESOLVING)


@dataclass(slots=True, eq=False)
class PartitionFence:
    """Log end, sequence offset, epoch: known while OPEN.

    `joined`: transactions on the partition, see `PartitionTransactions`. `end_as_of`: the log end was true at some
    moment after this. `check`: of the last append. `accounted`: every append up to `log_end` passed a sequencer, as far
    as known here. `exclusive`: only this process may append under the epoch (`Claim.OURS`).
    """

    _log: LogView
    _joined: Mapping[str, float]
    bases: FenceBases = field(init=False)
    phase: Phase = Phase.UNCONFIRMED
    snapshot: LogEndSnapshot | None = None
    log_end: int = -1
    end_as_of: float = -inf
    sequence_offset: int = 0
    epoch: int = 0
    confirmed_until: float = -inf
    confirmed_since: float = -inf
    confirmed_epoch: int = -1
    check: Check = Check.ON
    accounted: bool = False
    exclusive: bool = False
    _read_is_stale: bool = False

    def __post_init__(self) -> None:
        self.bases = FenceBases(self._log)

    # ---- validity of what is known

    def is_confirmed(self, pending: PendingAppend, now: float) -> bool:
        """Fence confirmed: the broker on the append's connection certainly knows the last fence and compares the next.

        It must be the same broker process and the same leader that acknowledged a fence. A restart may forget producers
        whose records are deleted; a connection opened before the acknowledgement would not survive it. A replica that
        restarts may lack what its leader has forgotten.
        """
        return (
            self.phase is Phase.OPEN
            and now < self.confirmed_until
            and pending.context.connected_at <= self.confirmed_since
            and pending.sending.leader_epoch == self.confirmed_epoch
            and not self._joined
        )

    def is_fresh(self, now: float) -> bool:
        """Whether the log end was read just now, and nothing was sent since."""
        return (
            self.phase is Phase.OPEN
            and self.snapshot is not None
            and now <= self.snapshot.requested_at + self._log.limits.unconfirmed_send_seconds
            and self.end_as_of == self.snapshot.requested_at
        )

    @property
    def log_start(self) -> int:
        return -1 if self.snapshot is None else self.snapshot.log_start_offset

    def unconfirm(self) -> None:
        if self.phase is Phase.OPEN:
            self.phase = Phase.UNCONFIRMED
        self.confirmed_until = -inf
        self.end_as_of = -inf

    def moves_unfenced(self) -> None:
        """The log end moves, but not by a client that bypasses the proxy."""
        self.accounted = False
        self._read_is_stale = self.phase is Phase.READING
        self.unconfirm()

    # ---- reads of the log end

    def read_is_usable(self) -> bool:
        """Whether a log-end snapshot is waited for, and the log end has not moved since the request."""
        if self.phase is not Phase.READING:
            return False
        if self._read_is_stale:
            self._read_is_stale = False
            self.phase = Phase.UNCONFIRMED
            return False
        return True

    def read(self, snapshot: LogEndSnapshot, now: float) -> None:
        accounted, self.accounted = self.accounted, False
        self.snapshot = snapshot
        published_epoch, base = snapshot.fence_base
        state = snapshot.producer_state
        if snapshot.log_end_offset != self.log_end:
            self.bases.disturbed(now)
        self.log_end = snapshot.log_end_offset
        self.end_as_of = snapshot.requested_at
        self.confirmed_until = -inf
        self.exclusive = False
        if self.check is Check.REQUIRED:
            if not snapshot.marker_is_replicated:
                # A leader without it would not compare the first append of the epoch.
                self.accounted, self.phase = accounted, Phase.UNCONFIRMED
                self._log.retry(now)
                return
            reason = self.bases.outside_log(snapshot)
            if reason is not None:
                if accounted:
                    self.bases.report_unfenced(snapshot)
                proposed = self.bases.propose(snapshot, reason, now)
                self.phase = Phase.PUBLISHING if proposed else Phase.UNCONFIRMED
                return
            self.epoch, self.sequence_offset = published_epoch, base
            self.accounted = True
            if snapshot.claim is Claim.OURS and snapshot.may_claim:
                # Else a process may append under the epoch that does not know of claims: one of an older release.
                self._claimed(snapshot)
        elif state is None:
            self.epoch, self.sequence_offset = published_epoch, base
        else:
            if state.producer_epoch > max(published_epoch, self.epoch):
                self.bases.report_foreign_epoch(snapshot)
            self.epoch = state.producer_epoch
            self.sequence_offset = (snapshot.log_end_offset - state.next_sequence) % SEQUENCE_MODULUS
        self.phase = Phase.OPEN

    def _claimed(self, snapshot: LogEndSnapshot) -> None:
        """The leader knows the epoch, of which no other process has appends. So it compares the next one, as after an
        acknowledged append: the marker is as new as the claim."""
        self.exclusive = True
        until = self.bases.claimed_at + snapshot.expiration_seconds / 4
        self.confirmed_until = min(until, snapshot.expiration_known_until)
        self.confirmed_since, self.confirmed_epoch = snapshot.requested_at, snapshot.leader_epoch

    def claims(self, snapshot: LogEndSnapshot, now: float) -> bool:
        """Claim the partition for speed, if that is due. The fence must be confirmed, and nothing in flight."""
        if self.exclusive or self.check is not Check.REQUIRED or not self.bases.claims(snapshot, self.log_end, now):
            return False
        self.phase = Phase.PUBLISHING
        return True

    def base_published(self, ok: bool, ours: bool, now: float) -> None:
        if self.phase is Phase.PUBLISHING:
            self.phase = Phase.UNCONFIRMED
            self.bases.published(ok, ours, now)

    # ---- appends

    def put_on(self, pending: PendingAppend, at: int, snapshot: LogEndSnapshot) -> None:
        pending.placement.at = at
        limits = self._log.limits
        if pending.placement.kind.fenced and limits.fencing:
            sequence = (at - self.sequence_offset) % SEQUENCE_MODULUS
            pending.placement.fence = Fence(
                snapshot.producer_id, self.epoch % limits.producer_epochs, sequence, pending.context.instance_id
            )

    @staticmethod
    def too_old(pending: PendingAppend, snapshot: LogEndSnapshot, now: float) -> Refusal | None:
        """Refuse a batch with too old records: the broker ages a producer by record timestamps and would forget the
        fence."""
        if snapshot.log_append_time or not pending.placement.kind.fenced:
            return None
        return check_timestamps(pending.append, snapshot.oldest_ms(now))

    def appended(self, pending: PendingAppend, end: int, in_doubt: bool, now: float) -> None:
        """A fenced append is in the log. `in_doubt`: it was found there, and may be much older."""
        snapshot = self.snapshot
        if snapshot is None or self.phase not in _KNOWN:
            return
        self.log_end = max(self.log_end, end)
        # The log ended before it when it was appended: at this send, if Kafka reports so.
        self.end_as_of = -inf if in_doubt or pending.placement.sent_at is None else pending.placement.sent_at
        # Records may be half of the setting old when sent. The remaining quarter covers requests in a queue.
        self.confirmed_until = min(now + snapshot.expiration_seconds / 4, snapshot.expiration_known_until)
        self.confirmed_since, self.confirmed_epoch = now, pending.sending.leader_epoch
        if self.check is Check.REQUIRED and self.bases.is_last_epoch(self.epoch):
            self.unconfirm()

    def appended_unfenced(self, pending: PendingAppend, end: int) -> None:
        """The log moved without the fence's sequence: add the difference to the sequence offset."""
        self.sequence_offset += end - self.log_end
        self.log_end = end
        self.end_as_of = pending.placement.sent_at or self.end_as_of
