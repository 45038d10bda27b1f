"""The simulation detects seeded defects, in the run that mutants.md names or in one of a few others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fuzz.defects import DEFECTS, SLOW
from tests.support.mutants import Mutant

from .mutants import MUTANTS, RULES, hunt, rules_of, shown
from .scenarios import SCENARIOS, run

#: CPU time: almost four minutes with forty processes on two cores.
pytestmark = pytest.mark.timeout(900)

_QUICK_SEEDS = 100
_PAGE = Path(__file__).with_name("mutants.md")
#: Mutant → scenario and seed that showed it when `make mutants` wrote the page.
_SHOWN_BY = {
    name: (scenario, int(seed))
    for name, scenario, seed in re.findall(
        r"^\| `([\w-]+)` \|.* ([\w-]+), seed (\d+) \|", _PAGE.read_text("utf-8"), re.MULTILINE
    )
}


@pytest.mark.no_cover  # coverage of broken code means nothing
@pytest.mark.parametrize("one", MUTANTS, ids=lambda m: m.name)
def test_defect_is_detected(one: Mutant) -> None:
    found = one.name in _SHOWN_BY and shown(one, *_SHOWN_BY[one.name])
    assert found or hunt(one, _QUICK_SEEDS), f"not detected: {one.breaks}. Does `make mutants` detect it?"


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


def test_names_are_unique() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 30
