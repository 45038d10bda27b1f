"""Rates of the last fifteen minutes, from counters."""

from __future__ import annotations

import time

import pytest

from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability import history as product
from fencepost_proxy.observability.history import History
from fencepost_proxy.wire.apis import FETCH, PRODUCE


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(product, "cpu_wait_seconds", lambda: waited[0])
    waited[0] = 0.0
    return Metrics()


waited = [0.0]


def test_rates_are_differences_of_counters(metrics: Metrics) -> None:
    began = time.monotonic()
    metrics.traffic.requests[PRODUCE][9] = 1_000
    history = History(metrics)
    metrics.traffic.requests[PRODUCE][9] += 30
    metrics.traffic.requests[FETCH][12] += 20
    metrics.traffic.bytes_to_kafka += 5_000
    metrics.traffic.bytes_to_clients += 500
    metrics.refusals.inc("offset_mismatch", 2)
    metrics.traffic.request_seconds.observe(0.0004, times=98)
    metrics.traffic.response_seconds.observe(0.02, times=2)
    metrics.loop_late_seconds.observe(0.2)
    waited[0] = 2.5
    history._before = history._before._replace(at=began)
    history.sample(began + 5.0)
    history.sample(began + 10.0)

    columns = history.columns(began + 11.0)

    assert columns.pop("cpu")
    assert columns == {
        "seconds_ago": [6.0, 1.0],
        "requests": (10.0, 0.0),
        "to_kafka": (1_000.0, 0.0),
        "to_clients": (100.0, 0.0),
        "refusals": (24.0, 0.0),
        "added_p99": (0.025, None),
        "loop_late": (0.25, None),
        "cpu_wait": (0.5, 0.0),
    }


def test_history_has_fifteen_minutes(metrics: Metrics) -> None:
    history = History(metrics)
    assert set(map(len, history.columns(0.0).values())) == {0}
    began = time.monotonic()
    for number in range(200):
        history.sample(began + 5.0 * number)
    columns = history.columns(began + 5.0 * 199)
    assert set(map(len, columns.values())) == {180}
    assert columns["seconds_ago"][0] == 179 * 5.0


def test_infinite_quantiles_are_cut(metrics: Metrics) -> None:
    history = History(metrics)
    metrics.traffic.request_seconds.observe(90.0)
    history.sample(time.monotonic())
    assert history.columns(0.0)["added_p99"] == (1,)


def test_cpu_of_the_first_minute_is_unknown(metrics: Metrics) -> None:
    history = History(metrics)
    began = time.monotonic()
    for number in range(1, 12):
        waited[0] += 2.0
        history.sample(began + 5.0 * number)
        assert history.cpu_wait_of_last_minute() == 0.0
    history.sample(began + 60.0)
    assert history.cpu_wait_of_last_minute() == pytest.approx(11 / 12 * 0.4, abs=0.01)


def test_a_thread_without_a_cpu_is_counted() -> None:
    if (before := product.cpu_wait_seconds()) is None:
        pytest.skip("this system does not report it")
    time.sleep(0.01)
    after = product.cpu_wait_seconds()
    assert after is not None
    assert 0 <= before <= after
