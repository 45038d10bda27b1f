"""What a partition sequencer has in progress at one moment, and what it reads of the log end."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from fencepost_proxy.sequencer.events import LogEndRead, LogEndSnapshot, PendingAppend
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


def log_end_read(log_end: int, now: float, **facts: Any) -> LogEndRead:
    """The answer to `ReadLogEnd`: of a partition without transactions, whose leader knows no fence."""
    usual = {
        "requested_at": now,
        "log_start_offset": 0,
        "producer_id": 7000,
        "producer_state": None,
        "fence_base": (0, 0),
        "open_transactions": frozenset(),
        "log_append_time": False,
        "expiration_seconds": 86_400.0,
        "clock_offset_seconds": time.time() - now,
        "transactions_as_of": now,
    }
    return LogEndRead(LogEndSnapshot(log_end_offset=log_end, **usual | facts))  # type: ignore[arg-type]
