"""What the messages of the proxy become in the client library."""

from __future__ import annotations

import copy
import pickle

import pytest

from fencepost import FencepostError, InDoubt, OffsetMismatch, OffsetViolation
from fencepost._refusals import refusal, verify
from fencepost_policies.append import Append, Contradiction
from fencepost_policies.conditional_publish import offset_mismatch


def _append(expected: int, contradiction: Contradiction | None = None) -> Append:
    return Append("orders", 3, 5, expected, contradiction)


def test_the_message_of_a_mismatch_is_read() -> None:
    stated = offset_mismatch(_append(41), 57)
    error = refusal("orders", 3, 41, code=stated.error_code, message=stated.message)
    assert isinstance(error, OffsetMismatch)
    assert (error.topic, error.partition, error.expected, error.actual) == ("orders", 3, 41, 57)
    assert error.possibly_yours is False
    assert str(error) == "orders-3: expected offset 41, but the log end offset is 57"


def test_possibly_yours_is_read_and_explained() -> None:
    stated = offset_mismatch(_append(41), 57, possibly_yours=True)
    error = refusal("orders", 3, 41, code=stated.error_code, message=stated.message)
    assert isinstance(error, OffsetMismatch)
    assert error.possibly_yours is True
    assert "read them before writing again" in str(error)


def test_later_record_reports_own_expectation_and_log_end() -> None:
    """Three sends expecting 41, 42, 43 in one batch: the server names the first only."""
    stated = offset_mismatch(_append(41), 57)
    error = refusal("orders", 3, 43, code=44, message=stated.message)
    assert isinstance(error, OffsetMismatch)
    assert (error.expected, error.actual) == (43, 57)
    assert "expected=41" in str(error)


def test_fitting_record_in_refused_batch_explains_refusal() -> None:
    """Sent 41 and 50 in one batch while the log ends at 41: `actual` in the message is the offset of record 1."""
    stated = offset_mismatch(_append(41, Contradiction(record=1, expected=50, offset_delta=1)), 41)
    assert "actual=42 record=1" in stated.message
    error = refusal("orders", 3, 41, code=44, message=stated.message)
    assert isinstance(error, OffsetMismatch)
    assert error.actual == 41
    assert "another record of the same batch was refused" in str(error)
    assert stated.message in str(error)


def test_record_after_refused_predecessor_is_a_mismatch() -> None:
    """Sent 41 and 42 without waiting while the log ends at 42: 41 does not fit, and 42 must not land behind a hole."""
    stated = offset_mismatch(_append(41), 42)
    error = refusal("orders", 3, 42, code=44, message=f"PREDECESSOR_FAILED {stated.message}")
    assert isinstance(error, OffsetMismatch)
    assert (error.expected, error.actual, error.possibly_yours) == (42, 42, None)
    assert "an earlier append was refused" in str(error)


def test_record_after_misplaced_predecessor_is_a_mismatch() -> None:
    violation = "OFFSET_VIOLATION topic=orders partition=3 expected=41 appended_at=60: a writer went around the proxy"
    error = refusal("orders", 3, 42, code=44, message=f"PREDECESSOR_FAILED {violation}")
    assert isinstance(error, OffsetMismatch)
    assert (error.expected, error.actual, error.possibly_yours) == (42, None, None)


def test_policy_violation_without_message_is_unexplained_mismatch() -> None:
    error = refusal("orders", 3, 41, code=44, message=None, log_end=57)
    assert isinstance(error, OffsetMismatch)
    assert (error.actual, error.possibly_yours) == (57, None)
    unknown = refusal("orders", 3, 41, code=44, message=None)
    assert isinstance(unknown, OffsetMismatch)
    assert unknown.actual is None


def test_append_at_another_offset_is_a_violation() -> None:
    message = "OFFSET_VIOLATION topic=orders partition=3 expected=41 appended_at=60: a writer went around the proxy"
    error = refusal("orders", 3, 41, code=44, message=message)
    assert isinstance(error, OffsetViolation)
    assert (error.expected, error.appended_at) == (41, 60)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (44, "EXPECTATION_REQUIRED topic=orders partition=3: this topic has fencepost.check.expected.offsets=required"),
        (44, "somebody's own policy says no"),
        (87, "HEADER_UNREADABLE topic=orders partition=3 record=0 header=fencepost-expected-offset: not a number"),
        (7, "OFFSET_MISMATCH topic=orders partition=3 expected=41 actual=57"),
    ],
)
def test_other_errors_are_left_to_the_library(code: int, message: str) -> None:
    assert refusal("orders", 3, 41, code=code, message=message) is None


def test_a_record_acknowledged_elsewhere_is_a_violation() -> None:
    verify("orders", 3, 41, 41)
    with pytest.raises(OffsetViolation, match="appended at offset 42, expected 41"):
        verify("orders", 3, 41, 42)


@pytest.mark.parametrize(
    "error",
    [
        OffsetMismatch("orders", 3, 41, 57, possibly_yours=True),
        OffsetViolation("orders", 3, 41, 60),
        InDoubt("orders", 3, 41, b"\x01\x02", "tried for 120 s"),
    ],
)
def test_errors_survive_pickling_and_copying(error: FencepostError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.__dict__ == error.__dict__
