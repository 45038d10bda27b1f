"""The defects of native code (`tests/native_mutants`) fit its source. Whether tests notice them takes minutes."""

from __future__ import annotations

import pytest

from tests.native_mutants.mutants import MUTANTS, EditDoesNotApply, NativeMutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_defect_fits_the_source(mutant: NativeMutant) -> None:
    assert mutant.sources()


def test_names_of_defects_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15


def test_edit_that_fits_nothing_says_so() -> None:
    with pytest.raises(EditDoesNotApply, match=r"gone: native/src/permit.rs has 0 times `no such code`, not once"):
        NativeMutant("gone", (("permit.rs", "no such code", ""),)).sources()
