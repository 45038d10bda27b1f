"""The simulation detects seeded defects. `make mutants` tries all; this file, those that few seeds detect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.defects import DEFECTS, SLOW
from tests.support.mutants import Mutant

from .mutants import MUTANTS, RULES, hunt, rules_of
from .scenarios import SCENARIOS, run

#: CPU time: almost four minutes with forty processes on two cores.
pytestmark = pytest.mark.timeout(900)

_QUICK_SEEDS = 100
#: Defects that need many seeds: see docs/mutants.md.
_RARE = frozenset(
    {
        "admitted-after-disconnect",
        "barrier-without-in-doubt",
        "by-name",
        "client-acks-kept",
        "client-loss-releases",
        "closed-barrier-counts-as-empty",
        "confirmed-indefinitely",
        "fast-path-without-lease",
        "first-attempt-ignored",
        "instance-id-ignored",
        "joins-not-recorded",
        "last-producer-id-wins",
        "leader-unconfirmed",
        "lease-ignored",
        "log-not-read-back",
        "no-second-read",
        "one-instance-id-for-all",
        "pipelined-with-other-processes",
        "queued-not-waited-for",
        "resend-error-is-final",
        "takeover-not-waited-for",
        "timeout-is-final",
        "transactional-duplicate-is-success",
        "transactions-deadlock",
        "unconfirmed-pipeline",
        "write-id-ignored",
    }
)


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize("one", [m for m in MUTANTS if m.name not in _RARE], ids=lambda m: m.name)
def test_defect_is_detected(one: Mutant) -> None:
    assert hunt(one, _QUICK_SEEDS) is not None, f"not detected: {one.breaks}"


def test_mutants_apply_and_are_undone() -> None:
    before = run(SCENARIOS["race"], 1)
    for one in (*MUTANTS, *(defect for defect, _ in (*DEFECTS, *SLOW))):
        with one.live():
            pass
    assert run(SCENARIOS["race"], 1) == before


def test_every_rule_has_a_mutant_or_another_test() -> None:
    broken = {number for one in MUTANTS for number in rules_of(one)}
    assert all(number in broken or rule.elsewhere for number, rule in RULES.items())
    assert broken <= set(RULES)


def test_tests_cited_by_rules_exist() -> None:
    root = Path(__file__).parents[2]
    for cited in (test for rule in RULES.values() for test in rule.elsewhere):
        file, name = cited.split("::")
        assert f"def {name}(" in (root / file).read_text("utf-8"), cited


def test_names_are_unique_and_rare_ones_exist() -> None:
    names = {one.name for one in MUTANTS}
    assert len(names) == len(MUTANTS) >= 30
    assert names >= _RARE
