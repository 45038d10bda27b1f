"""The simulation notices defects. `make mutants` tries all of them; here, those that a few seeds suffice for."""

from __future__ import annotations

import pytest

from .mutants import MUTANTS, RULES, hunt, live, rules_of
from .scenarios import SCENARIOS, run

#: All of it is work: four minutes were nearly used up on a machine with forty processes that wanted its two cores.
pytestmark = pytest.mark.timeout(900)

_QUICK_SEEDS = 100
#: Defects that need a rare coincidence: `make mutants` has the seeds for them.
_RARE = frozenset(
    {
        "acks-as-queried",
        "by-name",
        "client-loss-releases",
        "cold-pipeline",
        "barrier-forgets-who-is-entered",
        "barrier-without-doubts",
        "first-try-forgotten",
        "grant-to-nobody",
        "joins-not-last_observed",
        "last-producer-id-wins",
        "leader-unconfirmed",
        "lease-ignored",
        "log-not-read-back",
        "no-second-probe",
        "one-instance_id-for-all",
        "own-duplicate-is-success",
        "owners-wait",
        "pipelined-beside-others",
        "queued-not-waited-for",
        "resend-error-is-final",
        "short-way-without-a-lease",
        "instance_id-ignored",
        "takeover-not-waited-for",
        "timeout-is-final",
        "warm-for-ever",
        "write-id-ignored",
    }
)


@pytest.mark.no_cover  # of what is broken
@pytest.mark.parametrize("one", [m for m in MUTANTS if m.name not in _RARE], ids=lambda m: m.name)
def test_a_defect_is_noticed(one) -> None:  # type: ignore[no-untyped-def]
    assert hunt(one, _QUICK_SEEDS) is not None, f"nothing notices that {one.breaks}"


def test_a_mutant_leaves_nothing_behind() -> None:
    before = run(SCENARIOS["race"], 1)
    for one in MUTANTS:
        with live(one):
            pass
    assert run(SCENARIOS["race"], 1) == before


def test_every_rule_of_the_stamp_is_broken_or_tested_elsewhere() -> None:
    broken = {number for one in MUTANTS for number in rules_of(one)}
    assert all(number in broken or rule.elsewhere for number, rule in RULES.items())
    assert broken <= set(RULES)


def test_there_are_enough_of_them() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 30
