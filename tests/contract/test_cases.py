"""contract/cases: what other implementations and client libraries run. `tests/unit/test_pages.py`: they are current."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.contract.sentences import ROOT
from tests.contract.tables import TABLES

_CONTRACT = ROOT / "contract"
_SCHEMA = json.loads((_CONTRACT / "schema.json").read_text("utf-8"))
#: Some languages read all numbers as 64-bit floating point.
_EXACT_MAX = 2**53
_TOPIC_NAME_MAX = 249 - 20
_FILES = sorted((_CONTRACT / "cases").iterdir())


def _cases() -> list[dict[str, Any]]:
    return [case for file in _FILES for case in json.loads(file.read_text("utf-8"))]


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


def test_each_table_has_a_file() -> None:
    assert [each.name for each in _FILES] == [f"{table}.json" for table in sorted(TABLES)]


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_cases_follow_the_schema(file: Path) -> None:
    cases = json.loads(file.read_text("utf-8"))
    jsonschema.Draft202012Validator(_SCHEMA).validate(cases)
    assert len(cases) == len(TABLES[file.stem])


@pytest.mark.parametrize("field", ["steps", "name", "sentences"])
def test_case_without_a_required_field_does_not_follow_it(field: str) -> None:
    (case, *_) = json.loads(_FILES[0].read_text("utf-8"))
    del case[field]
    assert [each.validator for each in jsonschema.Draft202012Validator(_SCHEMA).iter_errors([case])] == ["required"]


def test_numbers_are_exact_in_every_language() -> None:
    found = list(_numbers(_cases()))
    assert len(found) > 1_000
    assert [number for number in found if abs(number) > _EXACT_MAX] == []


def test_no_two_cases_share_a_topic() -> None:
    topics = [topic["name"] for case in _cases() for topic in case["topics"]]
    assert len(topics) == len(set(topics))
    assert max(map(len, topics)) < _TOPIC_NAME_MAX


def test_each_refusal_has_what_a_client_reads_from_it() -> None:
    kinds = set()
    for request in (each for case in _cases() for step in case["steps"] for each in step.get("produce", ())):
        for answer in (part["answer"] for part in request["partitions"] if "answer" in part):
            assert ("error" in answer) == ("message" in answer)
            kinds.add(answer.get("error", {}).get("kind"))
    assert {"OFFSET_MISMATCH", "OFFSET_VIOLATION", "OUTCOME_UNKNOWN", "TRY_AGAIN", "INVALID_PARTITION_COUNT"} <= kinds
