"""Results of a Produce request: each is written once, and a success only by a sequencer or Kafka."""

from __future__ import annotations

import pytest

from fencepost_proxy.errors import ContradictoryResults, Error
from fencepost_proxy.session.batches.produce_exchange import Results
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult

PARTITION = TopicPartition("checked-a", 0)
APPENDED = PartitionResult(0, Error.NONE, 5)
UNKNOWN = PartitionResult(0, Error.REQUEST_TIMED_OUT)
MISMATCH = PartitionResult(0, Error.INVALID_RECORD, 7)
TRY_AGAIN = PartitionResult(0, Error.NOT_LEADER_OR_FOLLOWER)


def _with(result: PartitionResult) -> Results:
    results = Results()
    results.answer(PARTITION, result)
    return results


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (MISMATCH, APPENDED),
        (UNKNOWN, APPENDED),
        (APPENDED, MISMATCH),
        (APPENDED, PartitionResult(0, Error.NONE, 6)),
        (UNKNOWN, MISMATCH),
    ],
)
def test_second_different_result_is_an_error(first: PartitionResult, second: PartitionResult) -> None:
    results = _with(first)
    with pytest.raises(ContradictoryResults, match="two results"):
        results.answer(PARTITION, second)
    assert results == {PARTITION: first}


def test_same_result_twice_is_one() -> None:
    results = _with(APPENDED)
    results.answer(PARTITION, APPENDED)
    assert results == {PARTITION: APPENDED}


def test_retriable_error_of_canceled_append_stays() -> None:
    results = Results()
    results.refuse(PARTITION, TRY_AGAIN)
    results.answer(PARTITION, APPENDED)
    assert results == {PARTITION: TRY_AGAIN}


def test_refusal_after_result_is_an_error() -> None:
    with pytest.raises(ContradictoryResults):
        _with(APPENDED).refuse(PARTITION, TRY_AGAIN)


def test_only_an_error_overrides_a_result() -> None:
    results = _with(APPENDED)
    results.override(PARTITION, MISMATCH)
    assert results == {PARTITION: MISMATCH}
    with pytest.raises(AssertionError):
        results.override(PARTITION, APPENDED)
    with pytest.raises(AssertionError):
        Results().refuse(PARTITION, APPENDED)


def test_nothing_else_writes_results() -> None:
    results = _with(MISMATCH)
    with pytest.raises(TypeError):
        results[PARTITION] = APPENDED
    with pytest.raises(TypeError):
        results |= {PARTITION: APPENDED}
    assert not any(getattr(results, method) for method in ("setdefault", "update", "pop", "popitem", "clear"))
    assert results == {PARTITION: MISMATCH}
