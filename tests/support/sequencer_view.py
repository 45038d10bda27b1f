"""What a partition sequencer has in progress at one moment."""

from __future__ import annotations

from typing import NamedTuple

from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.sequencer.sequencer import PartitionSequencer


class SequencerView(NamedTuple):
    """`overtakable`: queued appends that let other pipelines pass. `read_at`: when the last successful read of the log
    end was requested."""

    queued: tuple[PendingAppend, ...]
    overtakable: frozenset[PendingAppend]
    admitted: PendingAppend | None
    in_flight: tuple[PendingAppend, ...]
    in_doubt: tuple[PendingAppend, ...]
    being_read: tuple[PendingAppend, ...]
    fence_confirmed: bool
    read_at: float | None


def view_of(sequencer: PartitionSequencer, now: float) -> SequencerView:
    state = sequencer.state
    appends, snapshot = state.appends, state.fence.snapshot
    return SequencerView(
        queued=tuple(appends.queue),
        overtakable=frozenset(pending for pending in appends.queue if state.queued.block(pending, now)),
        admitted=appends.admitted,
        in_flight=tuple(appends.in_flight),
        in_doubt=tuple(appends.in_doubt),
        being_read=tuple(appends.being_read),
        fence_confirmed=now < state.fence.confirmed_until,
        read_at=None if snapshot is None else snapshot.requested_at,
    )
