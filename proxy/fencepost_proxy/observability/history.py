"""Rates of the last fifteen minutes, for the status page: differences of counters that other code maintains."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from fencepost_proxy.metrics import ADDED_SECONDS, Distribution, Metrics
from fencepost_proxy.observability.process import cpu_wait_seconds

SAMPLE_SECONDS: Final = 5.0
_SAMPLES_MAX: Final = 180
_MINUTE_SAMPLES: Final = 12


class Sample(NamedTuple):
    """One interval of about `SAMPLE_SECONDS`.

    `at`: its end, monotonic. `requests`, `to_kafka`, `to_clients` (bytes): per second. `refusals`: per minute.
    `added_p99`, `loop_late`: upper bounds of the 99th percentile of the time added, and of the longest event loop
    delay, in seconds; None without observations. `cpu`, `cpu_wait`: share of the interval in which the event loop's
    thread used a CPU, and in which it waited for one.
    """

    at: float
    requests: float
    to_kafka: float
    to_clients: float
    refusals: float
    added_p99: float | None
    loop_late: float | None
    cpu: float
    cpu_wait: float


class _Counters(NamedTuple):
    at: float
    sums: tuple[float, ...]  # in the order of `Sample`, without distributions
    added: Sequence[int]
    late: Sequence[int]


class History:
    """`sample`: to be called in the event loop's thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: deque[Sample] = deque(maxlen=_SAMPLES_MAX)
        self._before = self._counters(time.monotonic())

    def sample(self, now: float) -> None:
        before, after = self._before, self._counters(now)
        self._before = after
        seconds = max(after.at - before.at, 1e-3)
        requests, to_kafka, to_clients, refusals, cpu, cpu_wait = (
            round((one - other) / seconds, 3) for one, other in zip(after.sums, before.sums, strict=True)
        )
        added = _quantile_bound(ADDED_SECONDS, before.added, after.added, 0.99)
        late = _quantile_bound(self._metrics.loop_late_seconds.bounds, before.late, after.late, 1.0)
        self._samples.append(
            Sample(now, requests, to_kafka, to_clients, round(refusals * 60, 3), added, late, cpu, cpu_wait)
        )

    def _counters(self, now: float) -> _Counters:
        metrics, traffic = self._metrics, self._metrics.traffic
        requests = sum(map(sum, traffic.requests.values()))
        refusals = sum(metrics.refusals.values())
        cpu = time.thread_time(), cpu_wait_seconds() or 0.0
        return _Counters(
            now,
            (requests, traffic.bytes_to_kafka, traffic.bytes_to_clients, refusals, *cpu),
            traffic.request_seconds.plus(traffic.response_seconds).counts,
            tuple(metrics.loop_late_seconds.counts),
        )

    def cpu_wait_of_last_minute(self) -> float:
        """Mean of `cpu_wait`; 0 in the first minute."""
        last = list(self._samples)[-_MINUTE_SAMPLES:]
        return sum(each.cpu_wait for each in last) / _MINUTE_SAMPLES if len(last) == _MINUTE_SAMPLES else 0.0

    def columns(self, now: float) -> Mapping[str, Sequence[float | None]]:
        """The fields of the samples, oldest first; `seconds_ago` instead of `at`."""
        at, *others = zip(*self._samples, strict=True) if self._samples else [()] * len(Sample._fields)
        ages = [round(now - each, 1) for each in at]
        return {"seconds_ago": ages, **dict(zip(Sample._fields[1:], others, strict=True))}


def _quantile_bound(
    bounds: Sequence[float], before: Sequence[int], after: Sequence[int], quantile: float
) -> float | None:
    """Of what was observed in between. Above the last bound: that bound."""
    between = Distribution(bounds)
    between.counts = [one - other for one, other in zip(after, before, strict=True)]
    found = between.quantile_bound(quantile)
    return None if found is None else min(found, bounds[-1])
