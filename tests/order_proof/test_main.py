"""Results and exit status of the order proof, without runs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.campaigns import campaign
from tests.order_proof import __main__ as command
from tests.order_proof import run as proof
from tests.order_proof.observed import Decision, Observed
from tests.support.members import KINDS

_OBSERVED = Observed(1, 0, 0, "k", 2)


@pytest.mark.parametrize(
    ("between", "status"),
    [
        (Decision(), 0),
        (Decision(early=[_OBSERVED]), 0),  # the reason that `true` expands topics by multiples only
        (Decision(missing=234), 1),
    ],
)
def test_missing_records_fail_the_unordered_run_too(
    between: Decision,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def stage(*_: object) -> Iterator[None]:
        yield

    def run(_: object, kinds: object, plan: proof.Plan, *, ordered: bool, say: object) -> proof.Result:
        decision = between if plan is proof.BETWEEN_OLD else Decision() if ordered else Decision(early=[_OBSERVED])
        return proof.Result({KINDS[0]: decision}, {}, {})

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(proof, "stage", stage)
    monkeypatch.setattr(proof, "run", run)
    assert campaign("order_proof", command.prove, command.ARGUMENTS, only_one=command.FORMS, words=[]) == status
    assert ("the logs are in" in capsys.readouterr().out) == bool(status)
