"""How long a task waits and tries again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.write import PartitionWrite, Write

T = TypeVar("T")

_PAUSE_SECONDS = 0.1
_PAUSE_SECONDS_MAX = 3.0
_CONTENTION_SECONDS = 0.02
_CONTENTION_SECONDS_MAX = 1.0
_CONTENDED = 10


class Patience:
    """Pauses of one task, and the limit for the time without progress."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._clock = write.clock
        self._patience_seconds = write.plan.patience_seconds
        self._progress_at = self._appended_at = write.clock.now()
        self._last_error = ""

    def progressed(self) -> None:
        """Appends of other writers were read."""
        self._progress_at = self._clock.now()

    def appended(self) -> None:
        """Rows of this task were appended, or computed, which may take long."""
        self._progress_at = self._appended_at = self._clock.now()

    def later(self, partition: PartitionWrite, problem: str, *, contended: bool = False) -> None:
        partition.tries += 1
        self._last_error = problem
        pause, most = (
            (_CONTENTION_SECONDS, _CONTENTION_SECONDS_MAX) if contended else (_PAUSE_SECONDS, _PAUSE_SECONDS_MAX)
        )
        if contended and partition.tries == 1:
            return  # the first refusal reports the log end; a second one shows a competing writer
        pause = min(most, pause * 2 ** min(partition.tries, 10))
        partition.not_before = self._clock.now() + pause * (0.5 + self._clock.random())

    def patiently(self, probe: Callable[[], T]) -> T:
        tries = 0
        while True:
            try:
                return probe()
            except CannotReach as error:
                self._last_error = str(error)
                tries += 1
                self._give_up_if_late()
                self._clock.wait((), min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS * 2**tries) * (0.5 + self._clock.random()))

    def wait(self) -> None:
        """Wait until a response or a retry is due."""
        self._give_up_if_late()
        now = self._clock.now()
        flights = [p.flight.answer for p in self._write.partitions.values() if p.flight]
        due = [
            p.not_before - now
            for p in self._write.partitions.values()
            if p.queue and not p.flight and p.not_before > now
        ]
        pause = min(due, default=1.0 if flights else _PAUSE_SECONDS)
        self._clock.wait(flights, max(0.001, min(pause, 1.0)))

    def _give_up_if_late(self) -> None:
        # Appends by other writers count as progress, but not indefinitely.
        now, patience = self._clock.now(), self._patience_seconds
        if now - self._progress_at > patience or now - self._appended_at > _CONTENDED * patience:
            raise SinkError(
                f"nothing could be appended for {self._patience_seconds:g} s (option patience.seconds): "
                f"{self._last_error} (fix the cause and start the write again: it continues where it "
                "stopped)"
            )
