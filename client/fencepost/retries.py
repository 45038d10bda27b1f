"""How long a log writer tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`attempt_seconds` bounds one send or one read, `total_seconds` an append with all its retries and looks at the
    log, or the wait for a cluster that cannot be reached. Between tries the pause doubles from `pause_seconds` to
    `pause_seconds_max`.
    """

    attempt_seconds: float = 15.0
    total_seconds: float = 120.0
    pause_seconds: float = 0.05
    pause_seconds_max: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.attempt_seconds <= self.total_seconds:
            raise ValueError(
                f"attempt_seconds={self.attempt_seconds} must be above 0 and at most total_seconds={self.total_seconds}"
            )

    def pause(self, tries: int) -> float:
        """Seconds to wait after the `tries`-th try, counted from 1."""
        return min(self.pause_seconds_max, self.pause_seconds * 2.0 ** min(tries - 1, 32))
