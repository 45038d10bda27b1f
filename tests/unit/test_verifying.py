"""`fencepost verify-broker` without a cluster: results, report, and the batches that cases send."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fencepost_proxy.cli import verify_broker
from fencepost_proxy.cli.main import main
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.errors import Error
from fencepost_proxy.preflight.conformance.batches import Producer, make_batch, read_batches
from fencepost_proxy.preflight.conformance.case import Case, Control, Deviation, NotAvailable, NotTested, Promise
from fencepost_proxy.preflight.conformance.cases import CASES
from fencepost_proxy.preflight.conformance.driver import Kafka
from fencepost_proxy.preflight.verifying import (
    Cluster,
    Outcome,
    Report,
    Result,
    Status,
    as_json,
    run_case,
    run_twice,
    selected,
)
from tests.conformance.model import ModelKafka
from tests.conformance.test_wrong_models import WRONG_MODELS
from tests.support import raw

CLUSTER = Cluster("cluster-1", 3, "4.4", [])
_BY_NAME = {case.name: case for case in CASES}


def results(outcomes: dict[str, Outcome]) -> list[Result]:
    """All cases hold but these."""
    return [Result(case, outcomes.get(case.name, Outcome.HOLDS)) for case in selected(CASES)]


def statuses(outcomes: dict[str, Outcome], cluster: Cluster = CLUSTER) -> dict[str, str]:
    report = Report(cluster, results(outcomes), 1.0)
    return {promise.value: report.status(promise)[0].value for promise in Promise}


def test_unknown_claims_are_no_failure() -> None:
    """They are off by default, and their markers need another right."""

    def holds(outcome: Outcome, name: str = "marker_claims_an_epoch") -> bool:
        return Report(CLUSTER, results({name: outcome}), 1.0).holds

    assert holds(Outcome.UNKNOWN)
    assert not holds(Outcome.DIFFERS)
    assert not holds(Outcome.UNKNOWN, "sequence_gap_is_refused")


def test_every_selected_case_holds_on_the_model() -> None:
    for case in selected(CASES):
        result = run_case(ModelKafka(1, case.brokers), case, brokers=3)
        assert (result.outcome, result.reason) == (Outcome.HOLDS, ""), case.name


def test_cases_that_disturb_brokers_are_left_out() -> None:
    chosen = selected(CASES)
    assert len(chosen) > 30
    assert {case.control for case in CASES} - {case.control for case in chosen} == set(Control)
    assert len(chosen[0].promises) == len(Promise), "the most important come first"


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("sequence_gap_is_refused", {"required", "true", "transactions", "Spark sink", "claims"}),
        ("marker_claims_an_epoch", {"claims"}),
        ("commit_marker_takes_an_offset", {"true", "transactions"}),
        ("transactional_batch_needs_its_partition_added", {"transactions"}),
        ("different_sequence_offsets_both_succeed", set()),
    ],
)
def test_a_difference_breaks_the_promises_that_need_the_fact(name: str, broken: set[str]) -> None:
    found = statuses({name: Outcome.DIFFERS})
    assert {promise for promise, status in found.items() if status == Status.BROKEN} == broken
    assert set(found.values()) <= {Status.BROKEN, Status.HOLDS}
    assert {promise for promise, each in statuses({name: Outcome.UNKNOWN}).items() if each != Status.HOLDS} == broken


def test_what_is_not_tested_is_not_called_true() -> None:
    assert statuses({"sequences_wrap": Outcome.UNKNOWN})["required"] == Status.UNKNOWN
    assert statuses({"transaction_states_v2": Outcome.ABSENT})["transactions"] == Status.HOLDS
    assert set(statuses({}, replace(CLUSTER, lacking=["DescribeProducers v0–0"])).values()) == {Status.BROKEN}
    assert not Report(CLUSTER, results({}), 1.0, left="topic x").holds
    assert Report(CLUSTER, results({}), 1.0).holds


def _failing(error: Exception, *, optional: bool = False, brokers: int = 1) -> Result:
    def failing(kafka: Kafka) -> None:
        raise error

    case = Case(failing, "a fact", frozenset(Promise), brokers, None, optional)
    return run_case(ModelKafka(1, 1), case, brokers=1)


class _Cleaned(ModelKafka):
    until_time = 5.0
    cleaned = 0

    def clean(self) -> None:
        self.cleaned += 1
        self.until_time = float("inf")


def test_difference_counts_if_it_shows_twice() -> None:
    def result(*attempts: Exception | None) -> tuple[Outcome, str, int]:
        left = list(attempts)

        def report(kafka: Kafka) -> None:
            assert kafka.until_time == 5.0, "the second attempt has the same limit"  # type: ignore[attr-defined]
            if (error := left.pop(0)) is not None:
                raise error

        kafka = _Cleaned(1, 1)
        found = run_twice(kafka, Case(report, "a fact", frozenset(), 1, None, False), brokers=1)  # type: ignore[arg-type]
        return found.outcome, found.reason, kafka.cleaned

    moved, gap = Deviation("the leader moved"), Deviation("a gap")
    assert result(None) == (Outcome.HOLDS, "", 1)
    assert result(moved, None) == (Outcome.HOLDS, "at the second attempt; at first the leader moved", 2)
    assert result(gap, moved) == (Outcome.DIFFERS, "a gap", 2)
    assert result(NotTested("not permitted")) == (Outcome.UNKNOWN, "not permitted", 1)


@pytest.mark.parametrize(
    ("error", "outcome", "of_optional"),
    [
        (UpstreamUnavailable("no", error_code=Error.UNSUPPORTED_VERSION), Outcome.DIFFERS, Outcome.ABSENT),
        (UpstreamUnavailable("closed by the broker"), Outcome.DIFFERS, Outcome.DIFFERS),
        (NotAvailable("no transactions v2"), Outcome.UNKNOWN, Outcome.ABSENT),
        (NotTested("this user may not"), Outcome.UNKNOWN, Outcome.UNKNOWN),
        (PermissionError(29), Outcome.UNKNOWN, Outcome.UNKNOWN),
        (KeyError(7_000_001), Outcome.DIFFERS, Outcome.DIFFERS),
    ],
)
def test_failures_of_a_case_are_distinguished(error: Exception, outcome: Outcome, of_optional: Outcome) -> None:
    assert _failing(error).outcome is outcome
    assert _failing(error, optional=True).outcome is of_optional
    assert _failing(error, brokers=2).outcome is Outcome.ABSENT


def test_difference_is_reported_with_the_line_of_its_case() -> None:
    (wrong,) = (each for each in WRONG_MODELS if each.name == "sequences_are_compared_with_the_log_end")
    with wrong.live():
        result = run_case(ModelKafka(1, 1), _BY_NAME["sequence_gap_is_refused"], brokers=1)
    assert result.outcome is Outcome.DIFFERS
    assert "instead of [OUT_OF_ORDER_SEQUENCE_NUMBER (45), offset -1" in result.reason
    assert re.match(r"appends\.py:\d+: same\(topic\.append", result.where)


def test_report_for_people_and_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    found = results({"sequence_gap_is_refused": Outcome.DIFFERS, "transaction_states_v2": Outcome.ABSENT})
    report = Report(CLUSTER, [replace(each, reason="\x1b[31m because") for each in found], 12.3)

    verify_broker._print(report)

    shown = capsys.readouterr().out
    assert shown.startswith("cluster cluster-1, 3 broker(s), features of Kafka 4.4: ")
    assert "\nrequired      does not hold: A sequence gap is refused with 45\n" in shown
    assert "not tested    broker kills" in shown
    assert "\ndiffers\n  A sequence gap is refused with 45\n      \\x1b[31m because\n" in shown
    assert "\nnot available\n  In v2 too\n" in shown
    stated = json.loads(json.dumps(as_json(report)))
    assert stated["promises"]["required"]["result"] == "does not hold"
    assert len(stated["cases"]) == len(found)
    assert "retention and compaction" in stated["not_tested"]


def test_promise_that_holds_names_cases_that_did_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    verify_broker._print(Report(CLUSTER, results({"transaction_states_v2": Outcome.ABSENT}), 12.3))

    assert "\ntransactions  holds (cases that this cluster cannot run: In v2 too)\n" in capsys.readouterr().out


def test_command_needs_a_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FENCEPOST_BOOTSTRAP_SERVER", raising=False)
    assert main(["verify-broker"]) == 2
    assert "use --bootstrap-server" in capsys.readouterr().err


# --- batches ----------------------------------------------------------------------------------------------------------


def _alike() -> Iterator[tuple[bytes, bytes]]:
    """Batches of cases, and the same by another library."""
    for values in ([b"a"], [b"", b"b" * 300, b"c"]):
        for timestamp_ms in (-1, 1_700_000_000_000):
            records = [raw.Record(value, timestamp_ms=timestamp_ms, headers=[("h", b"\xff")]) for value in values]
            for transactional in (False, True):
                yield (
                    make_batch(
                        values,
                        timestamp_ms=timestamp_ms,
                        producer=Producer(7, 1, 5),
                        transactional=transactional,
                        base_offset=3,
                        attributes=0x5A00,
                        headers=[(b"h", b"\xff")],
                    ),
                    raw.batch(
                        *records,
                        producer=raw.Producer(7, 1, 5),
                        transactional=transactional,
                        base_offset=3,
                        attributes=0x5A00,
                    ),
                )


def test_batches_equal_those_of_another_library() -> None:
    for ours, theirs in _alike():
        assert ours[:12] + ours[16:] == theirs[:12] + theirs[16:], "but for the leader epoch, which brokers set"
        (read,) = read_batches(ours)
        (expected,) = raw.read_batches(ours)
        assert (read.base_offset, read.producer_id, read.producer_epoch) == expected[:3]
        assert (read.is_control, read.attributes, read.values) == (False, expected.attributes, expected.values)
