"""The stage's own faults and repairs, on one broker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.fault_proxy import Hold
from tests.kit.stage import Stage, piped_kafka
from tests.kit.waiting import until
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, batch

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(300)]


def append(proxy: ProxyProcess, topic: str, value: bytes) -> bool:
    with Connection(proxy.bootstrap, timeout_seconds=10.0) as client:
        leader = client.metadata(topic).brokers[0]
    with Connection(f"{leader.host}:{leader.port}", timeout_seconds=10.0) as client:
        return client.append(topic, batch(value)).error_code == 0


def test_mend_repairs_everything_and_end_stops_proxies(tmp_path: Path) -> None:
    with piped_kafka(1) as (kafka, pipes):
        with Stage(kafka, tmp_path, pipes) as stage:
            stage.start_proxies({name: {} for name in ("killed", "paused")})
            other = stage.start_proxy("other")
            killed, paused = stage.proxies
            topic = stage.create(unique_topic(), on=[1])
            assert (stage.leader(topic), stage.isr(topic), stage.controller()) == (1, {1}, 1)
            assert append(paused, topic, b"before")
            assert any(b"before" in frame for frame in pipes[1].produced)

            killed.kill()
            paused.pause()
            fault = pipes[1].add(Hold("request", b"after"))
            kafka.kill(1)
            assert stage.living == []
            stage.mend()

            assert stage.living == [1]
            for proxy in stage.proxies:
                until(lambda proxy=proxy: append(proxy, topic, b"after"), "an append after the repair")
            assert not fault.observed.is_set()
            assert set(stage.log.values(topic)) == {b"before", b"after"}
        assert not any(each.running for each in (killed, paused, other))
        assert kafka.running(1)
