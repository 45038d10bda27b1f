"""What a response to a raw append means, for a first attempt and for a retry (`tests/support/writers.py`)."""

from __future__ import annotations

import pytest

from tests.kit.history import OK, REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION
from tests.support.raw import Answer
from tests.support.writers import Ledger, expected_of, value_of

MISMATCH = "OFFSET_MISMATCH topic=t partition=0 expected=7 actual=9"
LOST = Answer(7, -1, -1, -1, "OUTCOME_UNKNOWN", ())


def answer(code: int, message: str | None = None, base_offset: int = -1) -> Answer:
    return Answer(code, base_offset, -1, -1, message, ())


@pytest.mark.parametrize(
    ("given", "first", "again", "named_again"),
    [
        (answer(0, base_offset=7), OK, OK, OK),
        (answer(44, MISMATCH), REFUSED, REFUSED, REFUSED),
        (answer(44, f"{MISMATCH} POSSIBLY_YOURS"), UNKNOWN, UNKNOWN, UNKNOWN),
        (answer(44, f"PREDECESSOR_FAILED {MISMATCH}"), REFUSED, UNKNOWN, REFUSED),
        (answer(44, "OFFSET_VIOLATION topic=t expected=7 appended_at=9"), VIOLATION, VIOLATION, VIOLATION),
        (answer(6), TRY_AGAIN, UNKNOWN, UNKNOWN),
        (answer(19), TRY_AGAIN, UNKNOWN, UNKNOWN),
        (LOST, UNKNOWN, UNKNOWN, UNKNOWN),
    ],
)
def test_an_answer_covers_one_attempt_or_all(given: Answer, first: str, again: str, named_again: str) -> None:
    outcomes = []
    for retried, named in ((False, False), (True, False), (True, True)):
        ledger, value = Ledger("required-t"), value_of("writer", 1, 7)
        ledger.sent(value, named=named)
        if retried:
            ledger.note(value, LOST)
        ledger.note(value, given, again=retried)
        outcomes.append(ledger.by_value[value].outcome)
    assert outcomes == [first, again, named_again]


def test_unexpected_error_of_a_first_attempt_fails() -> None:
    ledger, value = Ledger("required-t"), value_of("writer", 1, 7)
    ledger.sent(value)
    with pytest.raises(AssertionError):
        ledger.note(value, answer(45))


def test_values_state_their_expected_offset() -> None:
    assert expected_of(value_of("writer", 1, 7)) == 7
    assert expected_of(value_of("writer", 1, None)) is None
