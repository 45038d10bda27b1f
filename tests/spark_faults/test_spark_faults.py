"""The Spark sink under faults: each row of the source is in Kafka once, in order per key, although processes die.

This is the short form. `make spark-faults` runs every fault, also with Spark's Kafka sink, and prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.spark_faults import run
from tests.spark_faults.faults import FAULTS, Fault
from tests.spark_faults.query import FENCEPOST, KAFKA
from tests.spark_faults.stage import Stage, stage

pytestmark = [pytest.mark.kafka, pytest.mark.spark, pytest.mark.no_cover, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("faults")) as made:
        yield made


def struck(ready: Stage, name: str, sink: str) -> run.Outcome:
    [fault] = [fault for fault in FAULTS if fault.name == name]
    return run.run(ready, [fault], [sink]).outcomes[name, sink]


def test_zombie_appends_nothing_its_successor_has_written(ready: Stage, say: Callable[[str], None]) -> None:
    """1. The driver dies when its task is about to append. 2. Another driver writes the batch. 3. The task resumes."""
    outcome = struck(ready, "zombie-append", FENCEPOST)
    say(run.reported(outcome))
    assert outcome.exact, outcome


def test_unlogged_batch_is_duplicated_by_kafka_sink_only(ready: Stage, say: Callable[[str], None]) -> None:
    """Given a written batch that Spark cannot log. Shows that the counting finds duplicates."""
    ours, sparks = (struck(ready, "log-raises", sink) for sink in (FENCEPOST, KAFKA))
    say(f"ours: {run.reported(ours)}; Spark's: {run.reported(sparks)}")
    assert ours.exact, ours
    assert sparks.counts.duplicated > 0
    assert not sparks.counts.missing
    assert not sparks.broken


def test_load_survives_a_killed_worker_of_a_cluster(ready: Stage, say: Callable[[str], None]) -> None:
    """Given a standalone cluster of two workers with one task each."""
    outcome = struck(ready, "worker-killed", FENCEPOST)
    say(run.reported(outcome))
    assert outcome.exact, outcome


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_row_is_there_once(ready: Stage, fault: Fault, say: Callable[[str], None]) -> None:
    outcome = struck(ready, fault.name, FENCEPOST)
    say(f"{run.reported(outcome)} {outcome.refusal}")
    assert outcome.exact, outcome
