"""The simulation notices defects. `make mutants` tries all of them; here, those that a few seeds suffice for."""

from __future__ import annotations

import pytest

from .mutants import MUTANTS, alive, hunt
from .scenarios import SCENARIOS, run

_QUICK_SEEDS = 8
#: Defects that need a rare coincidence: `make mutants` has the seeds for them.
_RARE = frozenset(
    {
        "acks-as-asked",
        "client-loss-releases",
        "cold-pipeline",
        "grant-to-nobody",
        "no-wrap",
        "resend-error-is-final",
        "timeout-is-final",
        "warm-for-ever",
    }
)


@pytest.mark.parametrize("one", [m for m in MUTANTS if m.name not in _RARE], ids=lambda m: m.name)
def test_a_defect_is_noticed(one) -> None:  # type: ignore[no-untyped-def]
    assert hunt(one, _QUICK_SEEDS) is not None, f"nothing notices that {one.breaks}"


def test_a_mutant_leaves_nothing_behind() -> None:
    before = run(SCENARIOS["race"], 1)
    for one in MUTANTS:
        with alive(one):
            pass
    assert run(SCENARIOS["race"], 1) == before


def test_there_are_enough_of_them() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 30
