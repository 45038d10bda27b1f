"""Two proxies claim partitions of a real Kafka from each other. Every check reads the log directly from Kafka."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
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
OK, TIMED_OUT, POLICY_VIOLATION = 0, 7, 44
WINDOW = 5
CLAIMING = "claiming a partition"


@dataclass
class Pipeline:
    """A writer that states the offset of each of `WINDOW` appends in flight. It has no producer id."""

    name: str
    address: str
    topic: str
    accepted: dict[bytes, int] = field(default_factory=dict)
    refused: set[bytes] = field(default_factory=set)
    end: int = 0
    paused: float = 0.0
    _number: int = 0

    def run(self, until: Callable[[], bool], seconds: float = 90.0) -> None:
        deadline, last = time.monotonic() + seconds, time.monotonic()
        while not until():
            assert time.monotonic() < deadline, f"{self.name}: {len(self.accepted)} accepted"
            try:
                with Connection(self.address) as connection:
                    while not until() and time.monotonic() < deadline:
                        before = len(self.accepted)
                        self._once(connection)
                        if len(self.accepted) > before:
                            self.paused, last = max(self.paused, time.monotonic() - last), time.monotonic()
            except (Closed, OSError):
                time.sleep(0.05)

    def _once(self, connection: Connection) -> None:
        values = [value_of(self.name, self._number + at, self.end + at) for at in range(WINDOW)]
        self._number += WINDOW
        for at, value in enumerate(values):
            connection.send_produce({self.topic: {0: batch(value, expected=self.end + at)}})
        for value in values:
            answer = connection.receive_produce()[1][self.topic, 0]
            if answer.error_code == OK:
                self.accepted[value] = answer.base_offset
                self.end = answer.base_offset + 1
            elif answer.error_code != TIMED_OUT:
                self.refused.add(value)
                if "OFFSET_MISMATCH" in (answer.message or ""):
                    self.end = answer.base_offset


def check(log: Log, topic: str, *pipelines: Pipeline) -> int:
    """What was acknowledged is there, what was refused is not, and each append is where it expected. Returns the number
    of markers."""
    batches = log.batches(topic)
    there = {each.values[0]: each.base_offset for each in batches if not each.is_control}
    for each in pipelines:
        assert {value: there.get(value) for value in each.accepted} == each.accepted
        assert not each.refused & there.keys()
    assert [value for value, offset in there.items() if value is None or expected_of(value) != offset] == []
    epochs = [each.producer_epoch for each in batches]
    assert epochs == sorted(epochs)
    return sum(each.is_control for each in batches)


@pytest.fixture
def proxies(kafka: KafkaCluster, tmp_path: Path) -> Iterator[list[ProxyProcess]]:
    with (
        ProxyProcess(kafka.bootstrap, tmp_path, config=CONFIG) as one,
        ProxyProcess(kafka.bootstrap, tmp_path, config=CONFIG) as other,
    ):
        yield [one, other]


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
    until = time.monotonic() + 15.0
    other = Pipeline("other", proxies[1].bootstrap, topic)
    threads = [threading.Thread(target=each.run, args=(lambda: time.monotonic() > until,)) for each in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    markers = check(log, topic, one, other)
    say(f"{len(one.accepted)} and {len(other.accepted)} appends accepted, {markers} claims")
    assert 2 <= markers <= 30
    assert one.accepted
    assert other.accepted
