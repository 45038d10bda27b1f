"""How writers classify responses. An error here would hide a broken promise, or report a false one."""

from __future__ import annotations

import confluent_kafka
import pytest
from kafka.errors import KafkaTimeoutError, PolicyViolationError

from fencepost import CheckIsOffError, InDoubtError, OffsetMismatchError, OffsetViolationError
from tests.kit.history import OK, REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION
from tests.kit.writers import reported_by_error
from tests.support.raw import Answer
from tests.support.writers import reported_by

MISMATCH = "OFFSET_MISMATCH topic=t partition=0 expected=7 actual=9"


def answer(code: int, message: str | None = None, base_offset: int = -1) -> Answer:
    return Answer(code, base_offset, -1, -1, message, ())


@pytest.mark.parametrize(
    ("given", "outcome", "offset", "actual", "possibly_yours"),
    [
        (answer(0, base_offset=7), OK, 7, None, None),
        (answer(44, MISMATCH, 9), REFUSED, None, 9, False),
        (answer(44, MISMATCH + " POSSIBLY_YOURS", 9), REFUSED, None, 9, True),
        (answer(44, "PREDECESSOR_FAILED " + MISMATCH, 9), REFUSED, None, 9, False),
        (answer(44, MISMATCH + " record=2", 9), REFUSED, None, None, False),
        (answer(44, "EXPECTATION_REQUIRED topic=t partition=0"), REFUSED, None, None, None),
        (answer(44, "OFFSET_VIOLATION topic=t expected=7 appended_at=9: a client"), VIOLATION, 9, None, None),
        (
            answer(44, "PREDECESSOR_FAILED OFFSET_VIOLATION expected=7 appended_at=9"),
            REFUSED,
            None,
            None,
            None,
        ),
        (answer(6, "TRY_AGAIN the log end"), TRY_AGAIN, None, None, None),
        (answer(6), UNKNOWN, None, None, None),
        (answer(7, "OUTCOME_UNKNOWN"), UNKNOWN, None, None, None),
        (answer(19), TRY_AGAIN, None, None, None),
        (answer(20), UNKNOWN, None, None, None),
        (answer(45), UNKNOWN, None, None, None),
    ],
)
def test_an_answer_to_one_send(
    given: Answer, outcome: str, offset: int | None, actual: int | None, possibly_yours: bool | None
) -> None:
    reported = reported_by(given)
    assert (reported.outcome, reported.offset, reported.actual, reported.possibly_yours) == (
        outcome,
        offset,
        actual,
        possibly_yours,
    )
    assert reported.code == (None if outcome == OK else given.error_code)


@pytest.mark.parametrize(
    ("error", "outcome", "offset", "actual"),
    [
        (OffsetMismatchError("t", 0, 7, 9), REFUSED, None, 9),
        (OffsetViolationError("t", 0, 7, 9), VIOLATION, 9, None),
        (CheckIsOffError("t", "the check is off"), REFUSED, None, None),
        (InDoubtError("t", 0, 7, b"id", "no answer"), UNKNOWN, None, None),
        (PolicyViolationError(MISMATCH), REFUSED, None, 9),
        (PolicyViolationError(), REFUSED, None, None),
        (KafkaTimeoutError(), UNKNOWN, None, None),
        (
            confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError.POLICY_VIOLATION)),
            REFUSED,
            None,
            None,
        ),
        (
            confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._MSG_TIMED_OUT)),
            UNKNOWN,
            None,
            None,
        ),
    ],
)
def test_what_a_library_raises(error: Exception, outcome: str, offset: int | None, actual: int | None) -> None:
    reported = reported_by_error(error)
    assert (reported.outcome, reported.offset, reported.actual) == (outcome, offset, actual)
