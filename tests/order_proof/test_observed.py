"""The order proof's comparison, with constructed observations: it must find every kind of fault."""

from __future__ import annotations

from tests.order_proof.observed import NANOS, WARM_UP, Assigned, Expanded, Observed, validate

ONE_TO_TWO = Expanded(1, 2, 10 * NANOS, 11 * NANOS)


def observations(*reported: tuple[int, int]) -> list[Observed]:
    """(partition, counter) of the key `k`, one a second."""
    return [Observed(i * NANOS, partition, i, "k", counter) for i, (partition, counter) in enumerate(reported, 10)]


def test_key_moving_to_new_partition_stays_in_order() -> None:
    decision = validate(observations((0, 1), (0, 2), (1, 3), (1, 4)), {"k": 4}, [ONE_TO_TWO])
    assert decision.holds
    assert decision.records == 4
    assert decision.longest_hold_seconds == 1.0


def test_record_before_its_predecessor_is_out_of_order() -> None:
    decision = validate(observations((0, 1), (1, 3), (0, 2), (1, 4)), {"k": 4}, [ONE_TO_TWO])
    assert [each.counter for each in decision.early] == [3]
    assert [each.counter for each in decision.late] == [2]
    assert not decision.missing


def test_reread_records_are_fine_until_key_moved_on() -> None:
    same = validate(observations((0, 1), (0, 2), (0, 1), (0, 2), (1, 3)), {"k": 3}, [ONE_TO_TWO])
    assert same.holds
    assert same.again == 2
    back = validate(observations((0, 1), (0, 2), (1, 3), (0, 2)), {"k": 3}, [ONE_TO_TWO])
    assert [each.counter for each in back.late] == [2]


def test_expelled_member_may_repeat_what_it_had_fetched() -> None:
    reported = [(0, 1, "a"), (0, 1, "b"), (0, 2, "b"), (1, 3, "b"), (0, 2, "a")]
    observed = [
        Observed(i * NANOS, partition, i, "k", counter, member)
        for i, (partition, counter, member) in enumerate(reported, 10)
    ]
    first, taken = Assigned(9 * NANOS, "a", frozenset({0})), Assigned(10 * NANOS + 1, "b", frozenset({0, 1}))
    decision = validate(observed, {"k": 3}, [ONE_TO_TWO], [first, taken])
    assert decision.holds
    assert [each.member for each in decision.expelled] == ["a"]
    # A member that has the partition, or got it back, must not read out of order.
    for assigned in ([first], [first, taken, Assigned(13 * NANOS + 1, "a", frozenset({0}))]):
        assert [each.member for each in validate(observed, {"k": 3}, [ONE_TO_TWO], assigned).late] == ["a"]


def test_time_decides_not_the_order_of_reports() -> None:
    assert validate(reversed(observations((0, 1), (0, 2), (1, 3))), {"k": 3}, [ONE_TO_TWO]).holds


def test_unobserved_record_is_missing() -> None:
    decision = validate(observations((0, 1), (0, 2)), {"k": 3, "never": 2}, [ONE_TO_TWO])
    assert decision.missing == 3
    assert not decision.holds


def test_warm_up_records_are_not_validated() -> None:
    warm = [Observed(1, 0, 0, WARM_UP, 0), Observed(2, 0, 1, WARM_UP, 0)]
    assert validate([*warm, *observations((0, 1))], {"k": 1}).records == 1
