"""Traces of real proxies before real Kafka, while proxies, clients and brokers are killed, are behaviors of the
specification."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.threads import working
from tests.specification.recorded_proxy import DIRECTORY
from tests.specification.recorder import Trace
from tests.specification.traces import coverage, validate, written
from tests.support.clients import create_topic
from tests.support.fixtures import kafka_fixture
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, batch

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(900)]

_PIPELINED: Final = 4
#: Each must occur in the runs together, or they show too little. `lost` needs several kills of the broker.
_EVENTS: Final = ("submit", "read", "sent", "answered appended", "answer success", "mismatch", "answer failed")


kafka_to_kill = kafka_fixture()


def _write(bootstrap: str, topic: str, seed: int, over: threading.Event) -> None:
    """Append at the latest known log end, sometimes several batches at once. Connect again after a failure."""
    rng, expected, tries = random.Random(seed), 0, 0
    while not over.is_set():
        try:
            with Connection(bootstrap, timeout_seconds=10) as connection:
                while not over.is_set():
                    count = rng.choice((1, _PIPELINED))
                    tries += count
                    for number in range(count):
                        records = batch(b"%d-%d-%d" % (seed, tries, number), expected=expected + number)
                        connection.send_produce({topic: {0: records}})
                    for _ in range(count):
                        answer = connection.receive_produce()[1][topic, 0]
                        if not answer.error_code:
                            expected = answer.base_offset + 1
                        elif actual := re.search(r"actual=(\d+)", answer.message or ""):
                            expected = int(actual[1])
                    over.wait(rng.uniform(0.02, 0.15))
        except OSError:
            time.sleep(0.2)


def _kill_proxy(proxy: ProxyProcess, kafka: KafkaCluster) -> None:
    proxy.kill()
    proxy.restart()


def _kill_broker(proxy: ProxyProcess, kafka: KafkaCluster) -> None:
    """While requests wait in it."""
    kafka.pause(1)
    time.sleep(0.3)
    kafka.kill(1)
    kafka.restart(1)


_FAULTS: Final[tuple[Callable[[ProxyProcess, KafkaCluster], None], ...]] = (_kill_broker, _kill_proxy)


def traces_of(kafka: KafkaCluster, directory: Path, runs: range) -> list[Trace]:
    """Each run: two writers race in a new topic; a fault meanwhile."""
    directory.mkdir()
    environment = {DIRECTORY: str(directory), "FENCEPOST_NATIVE": "off"}
    module = "tests.specification.recorded_proxy"
    with ProxyProcess(kafka.bootstrap, directory, module=module, environment=environment) as proxy:
        for run in runs:
            topic = create_topic(proxy.bootstrap, unique_topic("traced"), "required")
            with working(
                *(partial(_write, proxy.bootstrap, topic, seed) for seed in (2 * run, 2 * run + 1)), seconds=120
            ):
                time.sleep(random.Random(run).uniform(0.3, 0.6))
                _FAULTS[run % 2](proxy, kafka)
                time.sleep(0.3)
    return written(directory)


def _check(traces: list[Trace], runs: int, say: Callable[[str], None]) -> None:
    covered = coverage(traces)
    say(f"{runs} runs, {len(traces)} traces, {sum(covered.values())} events: {dict(covered)}")
    assert len(traces) >= runs
    assert [each for each in (*_EVENTS, *(["lost"] if runs > 2 else [])) if not covered[each]] == []
    assert any(each.get("after") for trace in traces for each in trace.events), "nothing was pipelined"
    assert validate(traces) is None


@pytest.mark.parametrize("runs", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_traces_under_kills_are_behaviors_of_the_specification(
    runs: int, kafka_to_kill: KafkaCluster, tmp_path: Path, say: Callable[[str], None]
) -> None:
    _check(traces_of(kafka_to_kill, tmp_path / "traces", range(runs)), runs, say)
