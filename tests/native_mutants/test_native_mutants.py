"""Tests notice each defect of native code in `mutants.py`, and nothing without one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.native_mutants.mutants import MUTANTS, NativeMutant, build, found
from tests.support.executors import needs_native

pytestmark = [
    needs_native,
    pytest.mark.skipif(shutil.which("cargo") is None, reason="needs cargo, to build native code with defects"),
    pytest.mark.no_cover,
    pytest.mark.timeout(1800),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("native")


def test_nothing_is_found_without_a_defect(directory: Path) -> None:
    assert found(build(directory, None)) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_defect_of_native_code_is_noticed(mutant: NativeMutant, directory: Path) -> None:
    difference = found(build(directory, mutant))
    assert difference is not None, f"not noticed: {mutant.name}"
    print(difference)
