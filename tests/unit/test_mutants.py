"""Mutants of both simulations apply to the current code. The simulations' own tests show that they are detected."""

from __future__ import annotations

import sys

import pytest

from tests.simulation import mutants as simulation
from tests.sink_simulation import mutants as sink_simulation
from tests.support.mutants import Change, Mutant, MutantDoesNotApply, body, edit, put, wrap


class _Sequencer:
    queue_max = 3

    def decide(self, log_end: int, expected: int) -> str:
        if log_end <= expected:  # not reached yet
            return "later"
        return "later" if self.is_full else "now"

    @property
    def is_full(self) -> bool:
        return self.queue_max == 0


def _outcome(*changes: Change) -> str:
    with Mutant("example", "a defect", (), *changes).live():
        return _Sequencer().decide(2, 1)


def test_every_mutant_applies() -> None:
    for mutant in (*simulation.MUTANTS, *sink_simulation.MUTANTS):
        with mutant.live():
            pass


@pytest.mark.parametrize(
    "change",
    [
        edit(_Sequencer, "decide", ("log_end  <=  (expected)", "True")),
        edit(_Sequencer, "decide", ('return "later" if self.is_full else "now"', 'expected = 0; return "later"')),
        body(_Sequencer, "decide", 'return "later"'),
        body(_Sequencer, "is_full", "return True"),
        wrap(_Sequencer, "decide", lambda decide, sequencer, log_end, _: decide(sequencer, log_end, log_end)),
        put(sys.modules[__name__], "_Sequencer.queue_max", 0),
    ],
    ids=["expression", "statement", "body", "property", "wrapper", "path"],
)
def test_change_lasts_while_its_mutant_is_live(change: Change) -> None:
    assert _outcome() == "now"
    assert _outcome(change) == "later"
    assert _outcome() == "now"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit(_Sequencer, "decide", ("log_end < expected", "True")), "decide has no node `log_end < expected`"),
        (edit(_Sequencer, "decide", ("log_end < expected", "True")), "; similar: `log_end <= expected`"),
        (edit(_Sequencer, "decide", ("pass", "return 1")), "decide has no node `pass`"),
        (edit(_Sequencer, "decide", ('"later"', '"now"')), 'decide has 2 nodes `"later"`'),
        (body(_Sequencer, "is_fully", "pass"), "_Sequencer has no attribute is_fully; similar: `is_full`"),
        (put(_Sequencer, "queue_min", 0), "_Sequencer has no attribute queue_min; similar: `queue_max`"),
    ],
)
def test_change_that_does_not_apply_is_an_error(change: Change, message: str) -> None:
    with pytest.raises(MutantDoesNotApply) as raised:
        _outcome(put(_Sequencer, "queue_max", 0), change)
    assert str(raised.value).startswith("mutant example: ")
    assert message in str(raised.value)
    assert _Sequencer.queue_max == 3
