"""Appends at another offset than expected, and writers that bypass the proxy: counted, logged, shown."""

from __future__ import annotations

import time
from collections.abc import Callable

from fencepost_proxy import logs
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.status import ViolationStatus
from fencepost_proxy.sequencer.events import Violation
from fencepost_proxy.sequencer.in_doubt import FORGOTTEN
from fencepost_proxy.services.log_reader import LogReader

_log = logs.get("services.violations")


class Violations:
    def __init__(
        self,
        reads: Callable[[], LogReader | None],
        metrics: Metrics,
        spawn: Spawn,
    ) -> None:
        self._reads = reads
        self._metrics = metrics
        self._spawn = spawn
        self.count = 0
        self.last: ViolationStatus | None = None

    def report(self, violation: Violation) -> None:
        self.count += 1
        self.last = ViolationStatus(*violation.partition, violation.offset, round(time.time() * 1000))
        self._metrics.violations.inc()
        self._spawn(self._write(violation), "violation")

    async def _write(self, violation: Violation) -> None:
        reads, producer_id = self._reads(), violation.producer_id
        assert reads is not None
        if producer_id is None:
            producer_id = await reads.producer_at(violation.partition, violation.offset)
        _log.error(
            "OFFSET_VIOLATION",
            reason=FORGOTTEN if violation.forgotten else "a producer bypasses the proxy",
            partition=violation.partition,
            offset=violation.offset,
            producer_id="unknown" if producer_id is None else producer_id,
            appended_at=violation.appended_at,
            log_end=violation.log_end_offset,
        )
