"""What the messages of the proxy become in the client library, its exceptions and its version."""

from __future__ import annotations

import copy
import json
import pickle
import tomllib
from collections import Counter

import pytest

import fencepost
from fencepost import FencepostError, InDoubtError, OffsetMismatchError, OffsetViolationError, errors
from fencepost._refusals import refusal, verify
from fencepost_policies.append import Append, Contradiction
from fencepost_policies.conditional_publish import offset_mismatch
from tests.support.docs import ROOT


def _append(expected: int, contradiction: Contradiction | None = None) -> Append:
    return Append("orders", 3, 5, expected, contradiction)


MISMATCH = offset_mismatch(_append(41), 57).message
POSSIBLY_YOURS = offset_mismatch(_append(41), 57, possibly_yours=True).message
PARTLY_YOURS = offset_mismatch(
    _append(41), 57, possibly_yours=True, why="2 of 3 of these records are in the log"
).message
NEXT_FITS = offset_mismatch(_append(41), 42).message
VIOLATION = "OFFSET_VIOLATION topic=orders partition=3 expected=41 appended_at=60: a writer went around the proxy"
#: Records expecting 41 and 50 in one batch, while the log ends at 41: `actual` is the offset of record 1.
CONTRADICTED = offset_mismatch(_append(41, Contradiction(record=1, expected=50, offset_delta=1)), 41).message


@pytest.mark.parametrize(
    ("expected", "message", "reported", "stated"),
    [
        (41, MISMATCH, (57, False), "expected offset 41, but the log end offset is 57"),
        (41, POSSIBLY_YOURS, (57, True), "read it before writing again"),
        (41, PARTLY_YOURS, (57, True), "before writing again (2 of 3 of these records are in the log)"),
        # Three sends expecting 41, 42, 43 in one batch: the server names the first only.
        (43, MISMATCH, (57, False), "expected=41"),
        (41, CONTRADICTED, (41, False), "another record of the same batch was refused"),
        # Sent 41 and 42 without waiting while the log ends at 42: 41 does not fit, and 42 must not follow a gap.
        (42, f"PREDECESSOR_FAILED {NEXT_FITS}", (42, None), "an earlier append was refused"),
        (42, f"PREDECESSOR_FAILED {VIOLATION}", (None, None), ""),
    ],
)
def test_policy_violation_becomes_a_mismatch(
    expected: int, message: str, reported: tuple[int | None, bool | None], stated: str
) -> None:
    error = refusal("orders", 3, expected, code=44, message=message)
    assert isinstance(error, OffsetMismatchError)
    assert (error.topic, error.partition, error.expected) == ("orders", 3, expected)
    assert (error.actual, error.possibly_yours) == reported
    assert stated in str(error)


def test_each_policy_violation_of_the_contract_is_read() -> None:
    found = Counter[str]()
    for file in (ROOT / "contract" / "cases").iterdir():
        for case in json.loads(file.read_text("utf-8")):
            for request in (each for step in case["steps"] for each in step.get("produce", ())):
                for answer in (part["answer"] for part in request["partitions"] if "error" in part.get("answer", {})):
                    read, expected = answer["error"], int(answer["error"].get("expected", 0))
                    error = refusal("orders", 3, expected, code=answer["code"], message=answer["message"])
                    assert (error is None) == (answer["code"] != 44), answer
                    if error is not None:
                        assert error.outcome == read["outcome"], answer
                        found[type(error).__name__] += 1
                    if isinstance(error, OffsetMismatchError):
                        assert error.actual == answer["base_offset"], answer
                        assert bool(error.possibly_yours) == read.get("possibly_yours", False), answer
    assert min(found[name] for name in ("OffsetMismatchError", "OffsetViolationError", "AppendRefusedError")) > 5, found


def test_mismatch_of_another_record_quotes_the_message() -> None:
    assert "actual=42 record=1" in CONTRADICTED
    assert CONTRADICTED in str(refusal("orders", 3, 41, code=44, message=CONTRADICTED))


def test_append_at_another_offset_is_a_violation() -> None:
    error = refusal("orders", 3, 41, code=44, message=VIOLATION)
    assert isinstance(error, OffsetViolationError)
    assert (error.expected, error.appended_at) == (41, 60)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (87, "HEADER_UNREADABLE topic=orders partition=3 record=0 header=fencepost-expected-offset: not a number"),
        (7, "OFFSET_MISMATCH topic=orders partition=3 expected=41 actual=57"),
    ],
)
def test_other_errors_are_left_to_the_library(code: int, message: str) -> None:
    assert refusal("orders", 3, 41, code=code, message=message) is None


def test_a_record_acknowledged_elsewhere_is_a_violation() -> None:
    verify("orders", 3, 41, 41)
    with pytest.raises(OffsetViolationError, match="appended at offset 42, expected 41"):
        verify("orders", 3, 41, 42)


@pytest.mark.parametrize(
    "error",
    [
        OffsetMismatchError("orders", 3, 41, 57, possibly_yours=True),
        OffsetViolationError("orders", 3, 41, 60),
        InDoubtError("orders", 3, 41, b"\x01\x02", "tried for 120 s"),
    ],
)
def test_errors_survive_pickling_and_copying(error: FencepostError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert twin.__dict__ == error.__dict__


ALL = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, FencepostError)]


def test_names_end_in_error_and_are_exported() -> None:
    assert len(ALL) > 10
    for each in ALL:
        assert each.__name__.endswith("Error")
        assert getattr(fencepost, each.__name__) is each


def test_outcome_and_retriable_of_each_error() -> None:
    appended = {each.__name__ for each in ALL if each.outcome == "appended"}
    unknown = {each.__name__ for each in ALL if each.outcome == "unknown"}
    again = {each.__name__ for each in ALL if each.retriable}
    assert appended == {"OffsetViolationError"}
    assert unknown == {"InDoubtError", "OutcomeUnknownError"}
    assert again == {
        "LockHeldError",
        "LogBusyError",
        "OffsetMismatchError",
        "TransactionAbortedError",
        "TransactionConflictError",
        "VersionMismatchError",
    }
    assert all(each.outcome == "refused" for each in ALL if each.retriable)


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert fencepost.__version__ == project["version"]
