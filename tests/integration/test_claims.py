"""Two proxies claim partitions of a real Kafka from each other. Every check reads the log directly from Kafka."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.threads import working
from tests.support.fixtures import proxies_fixture
from tests.support.kafka import running_kafka
from tests.support.proxy import ProxyProcess
from tests.support.raw import Closed, Connection, Log, batch
from tests.support.writers import expected_of, value_of

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover]

CONFIG = """
[topics."claimed-*"]
"fencepost.check.expected.offsets" = "required"
"fencepost.claims" = "true"

[limits]
takeover_seconds = 0.5
"""
OK, NOT_LEADER, TIMED_OUT = 0, 6, 7
WINDOW = 5
CLAIMING = "claiming a partition"


@dataclass
class Pipeline:
    """A writer that states the offset of each of `WINDOW` appends in flight. It has no producer id."""

    name: str
    address: str
    topic: str
    partition: int = 0
    accepted: dict[bytes, int] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    end: int = 0
    #: The longest time between two accepted appends.
    paused: float = 0.0
    _number: int = 0
    _accepted_at: float = 0.0

    def run(self, until: Callable[[], bool], seconds: float = 90.0) -> None:
        deadline, self._accepted_at = time.monotonic() + seconds, time.monotonic()
        while not until():
            assert time.monotonic() < deadline, f"{self.name}: {len(self.accepted)} accepted"
            with suppress(Closed, OSError, AssertionError), Log(self.address).connect(self.topic, self.partition) as it:
                while not until() and time.monotonic() < deadline and self._once(it):
                    pass

    def append(self, over: threading.Event) -> None:
        self.run(over.is_set, 300.0)

    def _once(self, connection: Connection) -> bool:
        """False if another connection is needed."""
        values = [value_of(self.name, self._number + at, self.end + at) for at in range(WINDOW)]
        self._number += WINDOW
        leads = True
        batches = [batch(value, expected=self.end + at) for at, value in enumerate(values)]
        answers = connection.pipeline(self.topic, batches, partition=self.partition)
        for value, answer in zip(values, answers, strict=True):
            if answer.error_code == OK:
                now = time.monotonic()
                self.paused, self._accepted_at = max(self.paused, now - self._accepted_at), now
                self.accepted[value] = answer.base_offset
                self.end = answer.base_offset + 1
            elif answer.error_code != TIMED_OUT:
                self.refused.add(value)
                leads &= answer.error_code != NOT_LEADER
                if "OFFSET_MISMATCH" in (answer.message or ""):
                    self.end = answer.base_offset
        return leads


def check(log: Log, topic: str, *pipelines: Pipeline, partition: int = 0) -> int:
    """What was acknowledged is there, what was refused is not, and each append is where it expected. Returns the number
    of markers."""
    batches = log.batches(topic, partition)
    there = {each.values[0]: each.base_offset for each in batches if not each.is_control}
    for each in pipelines:
        assert {value: there.get(value) for value in each.accepted} == each.accepted
        assert not each.refused & there.keys()
    assert [value for value, offset in there.items() if value is None or expected_of(value) != offset] == []
    epochs = [each.producer_epoch for each in batches]
    assert epochs == sorted(epochs)
    return sum(each.is_control for each in batches)


proxies = proxies_fixture(scope="function", config=CONFIG)


def test_partition_is_claimed_and_taken_over_from_a_killed_process(
    kafka: KafkaCluster, proxies: list[ProxyProcess], unique_topic: Callable[..., str]
) -> None:
    log, topic = Log(kafka.bootstrap), unique_topic("claimed")
    first, second = proxies
    with Connection(first.bootstrap) as connection:
        assert connection.create_topic(topic, partitions=1) == (OK, None)
    one = Pipeline("one", first.bootstrap, topic)
    one.run(lambda: CLAIMING in first.log and len(one.accepted) % 100 < WINDOW)
    claimed_at = len(one.accepted)
    one.run(lambda: len(one.accepted) >= claimed_at + 500)
    assert check(log, topic, one) == 1

    first.kill()
    other = Pipeline("other", second.bootstrap, topic, end=one.end)
    other.run(lambda: len(other.accepted) >= 500)
    assert CLAIMING in second.log
    assert check(log, topic, one, other) == 2


def test_two_writers_share_a_partition_and_none_is_misplaced(
    kafka: KafkaCluster, proxies: list[ProxyProcess], unique_topic: Callable[..., str], say: Callable[[str], None]
) -> None:
    log, topic = Log(kafka.bootstrap), unique_topic("claimed")
    with Connection(proxies[0].bootstrap) as connection:
        assert connection.create_topic(topic, partitions=1) == (OK, None)
    one = Pipeline("one", proxies[0].bootstrap, topic)
    one.run(lambda: CLAIMING in proxies[0].log)
    other = Pipeline("other", proxies[1].bootstrap, topic)
    with working(one.append, other.append):
        time.sleep(15.0)
    markers = check(log, topic, one, other)
    say(f"{len(one.accepted)} and {len(other.accepted)} appends accepted, {markers} claims")
    assert 2 <= markers <= 30
    assert one.accepted
    assert other.accepted


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_claims_hold_while_processes_and_brokers_fail(
    tmp_path: Path, unique_topic: Callable[..., str], say: Callable[[str], None]
) -> None:
    """Three brokers and three proxies. Each writer goes from proxy to proxy, long enough for claims; proxies are killed
    and suspended, brokers killed. FENCEPOST_RACE_MINUTES: for how long."""
    minutes, partitions, rng = float(os.environ.get("FENCEPOST_RACE_MINUTES", "10")), 6, random.Random(7)
    topic, faults = unique_topic("claimed"), Counter[str]()
    with ExitStack() as opened:
        kafka = opened.enter_context(running_kafka(3))
        proxies = [opened.enter_context(ProxyProcess(kafka.bootstrap, tmp_path, config=CONFIG)) for _ in range(3)]
        with Connection(proxies[0].bootstrap) as connection:
            settings = {"min.insync.replicas": "2"}
            created = connection.create_topic(topic, partitions=partitions, replicas=3, configs=settings)
            assert created == (OK, None)
        writers = [Pipeline(f"w{each}", "", topic, each) for each in range(partitions)]
        end = time.monotonic() + 60 * minutes - 20

        def write(writer: Pipeline, over: threading.Event) -> None:
            while not over.is_set():
                writer.address = proxies[rng.randrange(3)].bootstrap
                moment = time.monotonic() + rng.choice((2.0, 12.0, 25.0))
                with suppress(AssertionError):  # the proxy or its broker is down
                    writer.run(lambda moment=moment: over.is_set() or time.monotonic() > moment)

        with working(*(partial(write, each) for each in writers), seconds=120):
            while time.monotonic() < end:
                time.sleep(rng.uniform(2.0, 10.0))
                fault, proxy = rng.choice(("kill", "suspend", "suspend", "broker")), proxies[rng.randrange(3)]
                faults[fault] += 1
                if fault == "kill":
                    proxy.kill()
                    proxy.restart()
                elif fault == "suspend":
                    proxy.pause()
                    time.sleep(rng.uniform(0.5, 8.0))
                    proxy.resume()
                else:
                    node = rng.choice(kafka.node_ids)
                    kafka.kill(node)
                    time.sleep(rng.uniform(1.0, 5.0))
                    kafka.restart(node)
            time.sleep(20)
        log = Log(kafka.bootstrap)
        markers = sum(check(log, topic, each, partition=each.partition) for each in writers)
        accepted = sum(len(each.accepted) for each in writers)
        paused = max(each.paused for each in writers)
        say(f"{accepted} accepted, {markers} claims, longest pause {paused:.1f} s, faults {dict(faults)}")
        assert all("Traceback" not in proxy.log for proxy in proxies)
        assert markers > partitions
