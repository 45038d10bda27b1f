"""The specification holds where the contract promises, and fails where a rule is left out or the contract excludes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.contract.sentences import PAGE, sentences
from tests.specification import tlc
from tests.specification.__main__ import check
from tests.specification.models import DESIGNS, LIMITS, MODELS, SIBLINGS, Model

_MODULES = {each.stem: each.read_text("utf-8") for each in tlc.SPECIFICATION.glob("*.tla")}
_FENCE_BASES = tlc.ROOT / "proxy" / "fencepost_proxy" / "sequencer" / "fence_bases.py"
_TIMEOUT_SECONDS = 230.0
#: Larger bounds of `make specification`, one test each.
_LONG_SECONDS = 1800.0
_COMMENT = re.compile(r"\(\*(.*?)\*\)|\\\*([^\n]*)", re.DOTALL)


def _of(models: tuple[Model, ...], small: bool) -> list[object]:
    return [pytest.param(each, id=each.id) for each in models if each.small is small]


@pytest.mark.parametrize("model", _of(MODELS, small=True))
def test_model_has_the_stated_result(model: Model) -> None:
    _, problem = check(model, _TIMEOUT_SECONDS)
    assert problem is None, problem


@pytest.mark.soak
@pytest.mark.timeout(_LONG_SECONDS)
@pytest.mark.parametrize("model", _of(MODELS, small=False))
def test_large_model_has_the_stated_result(model: Model) -> None:
    _, problem = check(model, _LONG_SECONDS)
    assert problem is None, problem


def test_each_module_has_designs_and_siblings() -> None:
    modules = {each.module for each in MODELS}
    assert {each.module for each in DESIGNS} == {each.module for each in SIBLINGS} == modules
    assert len(SIBLINGS) >= 12


def test_each_design_has_a_floor_of_states() -> None:
    assert [each.id for each in DESIGNS if each.small and each.states_min == 0] == []


def _rules(text: str) -> set[str]:
    return set(re.findall(r'Rule\("([^"]+)"\)', text))


@pytest.mark.parametrize("module", sorted({each.module for each in MODELS}))
def test_each_rule_is_left_out_once(module: str) -> None:
    models = [each for each in (*SIBLINGS, *LIMITS) if each.module == module]
    left_out = {rule for each in models for rule in re.findall(r'"([^"]+)"', each.constants["Without"])}
    assert left_out == _rules(_MODULES[module])


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[*`]", "", text).split())


@pytest.mark.parametrize("module", sorted({each.module for each in MODELS}))
def test_each_promise_cites_a_sentence(module: str) -> None:
    promises = _MODULES[module].split("What docs/contract.md promises" if module != "FencedAppend" else "PART 3: what")[
        1
    ]
    sources = {each.number: _plain(each.text) for each in sentences(PAGE.read_text("utf-8"))}
    sources[""] = _plain(_FENCE_BASES.read_text("utf-8"))
    cited = [
        (number, _plain(quoted))
        for comment in _COMMENT.finditer(promises)
        for quoted, number in re.findall(r'"([^"]+)"(?:\s+\(([A-Z]\d+)\))?', comment[1] or comment[2] or "")
    ]
    assert len(cited) >= 2
    assert [each for each in cited if each[1].lower() not in sources.get(each[0], "").lower()] == []


def _tiny() -> Model:
    return next(each for each in MODELS if each.id.endswith("a_lost_acknowledgement_proves_nothing"))


def test_rule_that_does_not_matter_is_reported() -> None:
    _, problem = check(replace(_tiny(), violates="AppendedWhereExpected"), _TIMEOUT_SECONDS)
    assert problem is not None
    assert problem.startswith("violated: SuccessIsInTheLog, expected: AppendedWhereExpected")
    assert "ConnectionLost" in problem


def test_model_that_became_too_narrow_is_reported() -> None:
    _, problem = check(replace(_tiny(), states_min=1_000), _TIMEOUT_SECONDS)
    assert problem is not None
    assert "the model is too narrow" in problem


def test_error_in_a_module_is_reported() -> None:
    with pytest.raises(tlc.TlcError, match="Unknown operator"):
        tlc.check("Broken", {}, (), timeout_seconds=60, modules={"Broken": "---- MODULE Broken ----\nSpec == a\n===="})
