"""What the exceptions of the client library have in common, and its version."""

from __future__ import annotations

import tomllib

import fencepost
from fencepost import errors
from fencepost.errors import FencepostError
from tests.support.docs import ROOT

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
    assert again == {"OffsetMismatchError", "TransactionAbortedError", "TransactionConflictError"}
    assert all(each.outcome == "refused" for each in ALL if each.retriable)


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert fencepost.__version__ == project["version"]
