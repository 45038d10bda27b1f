"""For each rule, a history that breaks it; and good histories that break none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.checker import Decision, check, report, verify
from tests.kit.history import (
    OK,
    REFUSED,
    TRY_AGAIN,
    UNKNOWN,
    VIOLATION,
    Entry,
    History,
    Manner,
    Operation,
    Reported,
    Topic,
    load,
)

TOPIC = "t"
PARTITION = (TOPIC, 0)


class Story:
    """Operations take a second each, one after the other, by default."""

    def __init__(self, mode: str = "required", *, one_proxy: bool = False) -> None:
        self.history = History(topics={TOPIC: Topic(mode, one_proxy)}, logs={PARTITION: []})
        self.now = 0.0

    def op(self, *ids: str, expected: int | None = None, outcome: str = OK, **more: Any) -> Operation:
        number = len(self.history.operations) + 1
        start = more.pop("start", self.now)
        end = more.pop("end", start + 1.0)
        self.now = max(self.now, start + 2.0)
        if outcome == OK:
            more.setdefault("offset", expected)
        operation = Operation(
            number, more.pop("writer", "w"), PARTITION, ids, expected, start, end=end, outcome=outcome
        )
        for name, value in more.items():
            assert hasattr(operation, name), name
            setattr(operation, name, value)
        self.history.operations[number] = operation
        return operation

    def log(self, *ids: str | None, epochs: dict[str, int] | None = None, hidden: tuple[str, ...] = ()) -> Story:
        self.history.logs[PARTITION] = [
            Entry(offset, each, (epochs or {}).get(each or "", 0), each not in hidden)
            for offset, each in enumerate(ids)
        ]
        return self

    @property
    def decision(self) -> Decision:
        return check(self.history)

    @property
    def rules(self) -> list[str]:
        return self.decision.rules


# --- good histories ---------------------------------------------------------------------------------------------------


def test_racing_writers_with_one_refusal_satisfy_the_checker() -> None:
    story = Story()
    story.op("a", expected=0, start=0.0)
    story.op("b", expected=0, outcome=REFUSED, actual=1, start=0.5)
    story.op("c", expected=1)
    story.op("d", "e", "f", expected=2)
    story.op("g", expected=5, outcome=UNKNOWN, end=float("inf"))
    story.op("h", expected=5, outcome=TRY_AGAIN)
    story.log("a", "c", "d", "e", "f", "g")
    assert story.rules == []
    assert story.decision.probed_at["FALSE SUCCESS"] == 3
    assert story.decision.probed_at["WRONG LOG END"] == 1
    assert not story.decision.tolerated


def test_an_unknown_append_may_also_be_nowhere() -> None:
    story = Story()
    story.op("a", expected=0, outcome=UNKNOWN)
    story.op("b", expected=0)
    assert story.log("b").rules == []


def test_reported_violation_with_unconditional_writers_is_accepted() -> None:
    story = Story("true")
    story.op("x")
    story.history.operations[1].offset = 0
    story.op("a", expected=0, outcome=VIOLATION, offset=1)
    assert story.log("x", "a").rules == []


def test_transactions_that_ended_as_they_should() -> None:
    story = Story("true")
    story.op("a", transaction="t1", offset=0)
    story.op("b", transaction="t2", offset=2)
    story.op("c", transaction="t3", offset=4)
    story.op("d", transaction="t4", offset=6)
    story.history.transactions = {"t1": "committed", "t2": "aborted"}
    assert story.log("a", None, "b", None, "c", None, "d", None, hidden=("b", "d")).rules == []


def test_documented_anomalies_are_tolerated() -> None:
    story = Story()
    story.op("a", expected=0, outcome=REFUSED, resends=True, sees_messages=False, actual=1)
    story.op("b", expected=1, outcome=REFUSED, resends=True, possibly_yours=True, actual=2)
    decision = story.log("a", "b").decision
    assert (decision.rules, decision.tolerated) == ([], {"unnamed retry": 2})

    story = Story("true")
    story.op("a", outcome=UNKNOWN)
    story.op("b", expected=0, outcome=UNKNOWN)
    story.op("c", expected=1, outcome=REFUSED, sees_messages=False)
    story.op("d", expected=1, outcome=REFUSED, resends=True, named=True)
    story.op("e", resends=True, offset=4)
    decision = story.log("a", "b", "c", "d", "e", "e").decision
    assert decision.rules == []
    assert decision.tolerated == {"late at another offset": 2, "reported as mismatch": 1, "at least once": 1}


def test_only_stale_ends_read_by_clients_are_tolerated() -> None:
    story = Story()
    story.op("a", expected=0)
    story.op("b", expected=1, outcome=REFUSED, actual=0, reads_end=True)
    decision = story.log("a").decision
    assert (decision.rules, decision.tolerated) == ([], {"stale end": 1})
    story.op("c", expected=1, outcome=REFUSED, actual=5, reads_end=True)
    assert story.rules == ["WRONG LOG END"]


def test_log_end_truncated_later_was_true() -> None:
    """1. An append with unknown outcome is at offset 1. 2. A leader change removes it. 3. Another append is at 1."""
    story = Story()
    story.op("a", expected=0)
    story.op("lost", expected=1, outcome=UNKNOWN)
    story.op("b", expected=9, outcome=REFUSED, actual=2)
    story.op("c", expected=1)
    assert story.log("a", "c", epochs={"a": 0, "c": 1}).rules == []


def test_records_lost_by_an_unclean_election_are_tolerated() -> None:
    story = Story()
    story.history.topics[TOPIC] = Topic("required", may_lose=True)
    story.op("a", expected=0)
    story.op("lost", expected=1)
    story.op("b", expected=1)
    decision = story.log("a", "b").decision
    assert (decision.rules, decision.tolerated) == ([], {"lost by Kafka": 1})


# --- each rule broken -------------------------------------------------------------------------------------------------


def false_accept_elsewhere(story: Story) -> None:
    story.op("a", outcome=UNKNOWN, expected=0)
    story.op("b", expected=0, offset=0)
    story.log("a", "b")


def false_accept_off_its_expectation(story: Story) -> None:
    story.op("a", expected=0)
    story.op("b", expected=0, offset=1)
    story.log("a", "b")


def lost(story: Story) -> None:
    story.op("a", expected=0)
    story.log()


def refused_but_there(story: Story) -> None:
    story.op("a", expected=0, outcome=REFUSED)
    story.log("a")


def to_be_tried_again_but_there(story: Story) -> None:
    story.op("a", expected=0, outcome=TRY_AGAIN)
    story.log("a")


def a_named_retry_refused_but_there(story: Story) -> None:
    story.op("a", expected=0, outcome=REFUSED, resends=True, named=True, sees_messages=False)
    story.log("a")


def not_possibly_yours_but_there(story: Story) -> None:
    story.op("a", expected=0, outcome=REFUSED, resends=True, possibly_yours=False)
    story.log("a")


def violation_not_there(story: Story) -> None:
    story.op("a", expected=0)
    story.op("b", expected=0, outcome=VIOLATION, offset=1)
    story.log("a")


def twice(story: Story) -> None:
    story.op("a", expected=0, outcome=UNKNOWN, resends=True)
    story.log("a", "a")


def twice_although_accepted(story: Story) -> None:
    story.op("a", expected=0, resends=True, named=True)
    story.log("a", "a")


def an_unknown_one_elsewhere(story: Story) -> None:
    story.op("a", expected=0)
    story.op("b", expected=0, outcome=UNKNOWN)
    story.log("a", "b")


def unchecked(story: Story) -> None:
    story.op("a", offset=0)
    story.log("a")


def a_transaction_on_a_required_topic(story: Story) -> None:
    story.op("a", expected=0, transaction="t1")
    story.log("a")


def a_marker_on_a_required_topic(story: Story) -> None:
    story.log(None)


def half_a_batch(story: Story) -> None:
    story.op("a", "b", expected=0, outcome=UNKNOWN)
    story.log("a")


def a_batch_torn_apart(story: Story) -> None:
    story.op("a", "b", expected=0, outcome=UNKNOWN)
    story.op("c", expected=1)
    story.log("a", "c", "b")


def out_of_order(story: Story) -> None:
    story.op("b", expected=1)
    story.op("a", expected=0)
    story.log("a", "b")


def a_pipeline_out_of_order(story: Story) -> None:
    story.op("b", expected=1, pipeline_key="c", start=0.0, end=9.0)
    story.op("a", expected=0, pipeline_key="c", start=0.0, end=9.0)
    story.log("a", "b")


def an_end_below_what_had_been_accepted(story: Story) -> None:
    story.op("a", expected=0)
    story.op("b", expected=9, outcome=REFUSED, actual=0)
    story.log("a")


def an_end_above_what_had_been_sent(story: Story) -> None:
    story.op("a", expected=0)
    story.op("b", expected=9, outcome=REFUSED, actual=2)
    story.op("c", expected=1)
    story.log("a", "c")


def an_end_that_never_was(story: Story) -> None:
    story.op("a", expected=0)
    story.op("b", expected=9, outcome=REFUSED, actual=5)
    story.log("a")


def a_bare_error(story: Story) -> None:
    story.op("a", expected=0, outcome=REFUSED, code=45)
    story.log()


def a_bare_error_as_a_library_names_it(story: Story) -> None:
    story.op("a", expected=0, outcome=UNKNOWN, code="OutOfOrderSequenceNumber", idempotent=True)
    story.log()


def reported_that_its_check_is_off(story: Story) -> None:
    story.op("a", expected=0, outcome=REFUSED, code="CheckIsOffError")
    story.log()


def an_unauthorized_client(story: Story) -> None:
    story.log("who")


def a_gap(story: Story) -> None:
    story.op("a", expected=1)
    story.history.logs[PARTITION] = [Entry(1, "a")]


BROKEN_ON_REQUIRED: list[tuple[Callable[[Story], None], list[str]]] = [
    (false_accept_elsewhere, ["FALSE SUCCESS", "WRONG OFFSET"]),
    (false_accept_off_its_expectation, ["FALSE SUCCESS", "WRONG OFFSET"]),
    (lost, ["LOST"]),
    (refused_but_there, ["REFUSED BUT APPENDED"]),
    (to_be_tried_again_but_there, ["REFUSED BUT APPENDED"]),
    (a_named_retry_refused_but_there, ["REFUSED BUT APPENDED"]),
    (not_possibly_yours_but_there, ["REFUSED BUT APPENDED"]),
    (violation_not_there, ["WRONG OFFSET REPORTED"]),
    (twice, ["APPENDED TWICE", "WRONG OFFSET"]),
    (twice_although_accepted, ["APPENDED TWICE", "WRONG OFFSET"]),
    (an_unknown_one_elsewhere, ["WRONG OFFSET"]),
    (unchecked, ["NOT REFUSED"]),
    (a_transaction_on_a_required_topic, ["NOT REFUSED"]),
    (a_marker_on_a_required_topic, ["NOT REFUSED"]),
    (half_a_batch, ["PARTIAL BATCH"]),
    (a_batch_torn_apart, ["WRONG OFFSET", "PARTIAL BATCH"]),
    (out_of_order, ["ORDER"]),
    (a_pipeline_out_of_order, ["ORDER"]),
    (an_end_below_what_had_been_accepted, ["WRONG LOG END"]),
    (an_end_above_what_had_been_sent, ["WRONG LOG END"]),
    (an_end_that_never_was, ["WRONG LOG END"]),
    (a_bare_error, ["PRODUCER ERROR"]),
    (a_bare_error_as_a_library_names_it, ["PRODUCER ERROR"]),
    (reported_that_its_check_is_off, ["CHECK REPORTED OFF"]),
    (an_unauthorized_client, ["UNKNOWN RECORD"]),
    (a_gap, ["GAP"]),
]


@pytest.mark.parametrize(("write", "rules"), BROKEN_ON_REQUIRED, ids=lambda each: getattr(each, "__name__", ""))
def test_broken_promise_on_required_topic_is_found(write: Callable[[Story], None], rules: list[str]) -> None:
    story = Story()
    write(story)
    assert story.rules == rules


def an_accepted_one_elsewhere(story: Story) -> None:
    story.op("x", offset=0)
    story.op("a", expected=0, offset=1)
    story.log("x", "a")


def a_refused_one_at_its_offset(story: Story) -> None:
    story.op("a", expected=0, outcome=REFUSED, sees_messages=False)
    story.log("a")


def a_refused_one_elsewhere_that_got_a_message(story: Story) -> None:
    story.op("x", offset=0)
    story.op("a", expected=0, outcome=REFUSED)
    story.log("x", "a")


def an_idempotent_one_twice(story: Story) -> None:
    story.op("a", offset=0, resends=True, idempotent=True)
    story.log("a", "a")


def a_pipeline_with_a_gap(story: Story) -> None:
    story.op("x", offset=0)
    story.op("a", expected=0, pipeline_key="c", outcome=REFUSED, start=5.0, end=9.0)
    story.op("b", expected=1, pipeline_key="c", start=5.0, end=9.0)
    story.log("x", "b")


def aborted_but_visible(story: Story) -> None:
    story.op("a", offset=0, transaction="t1")
    story.history.transactions["t1"] = "aborted"
    story.log("a", None)


def committed_but_hidden(story: Story) -> None:
    story.op("a", offset=0, transaction="t1")
    story.history.transactions["t1"] = "committed"
    story.log("a", None, hidden=("a",))


def accepted_without_a_transaction_but_hidden(story: Story) -> None:
    story.op("a", offset=0)
    story.log("a", hidden=("a",))


def half_a_transaction(story: Story) -> None:
    story.op("a", offset=0, transaction="t1")
    story.op("b", offset=1, transaction="t1")
    story.log("a", "b", None, hidden=("b",))


BROKEN_ON_TRUE: list[tuple[Callable[[Story], None], list[str]]] = [
    (an_accepted_one_elsewhere, ["FALSE SUCCESS"]),
    (a_refused_one_at_its_offset, ["REFUSED BUT APPENDED"]),
    (a_refused_one_elsewhere_that_got_a_message, ["REFUSED BUT APPENDED", "WRONG OFFSET"]),
    (an_idempotent_one_twice, ["APPENDED TWICE"]),
    (a_pipeline_with_a_gap, ["APPENDED AFTER FAILURE"]),
    (aborted_but_visible, ["ABORTED VISIBLE"]),
    (committed_but_hidden, ["COMMITTED BUT MISSING"]),
    (accepted_without_a_transaction_but_hidden, ["COMMITTED BUT MISSING"]),
    (half_a_transaction, ["PARTIAL TRANSACTION"]),
]


@pytest.mark.parametrize(("write", "rules"), BROKEN_ON_TRUE, ids=lambda each: getattr(each, "__name__", ""))
def test_broken_promise_on_checked_topic_is_found(write: Callable[[Story], None], rules: list[str]) -> None:
    story = Story("true", one_proxy=True)
    write(story)
    assert story.rules == rules


def test_every_checker_rule_has_a_violating_history() -> None:
    from tests.kit import checker  # noqa: PLC0415 - its docstring is tested

    reported = {line.split("|")[1].strip() for line in (checker.__doc__ or "").splitlines() if line.startswith("| ")}
    broken = {rule for _, rules in (*BROKEN_ON_REQUIRED, *BROKEN_ON_TRUE) for rule in rules}
    assert reported - {"rule"} == broken


def test_pipeline_across_two_proxies_may_resume() -> None:
    story = Story("required")
    a_pipeline_with_a_gap(story)
    story.history.operations[1].expected = 0
    assert story.rules == []


# --- the recorder -----------------------------------------------------------------------------------------------------


def test_saved_history_is_checked_unchanged(tmp_path: Path) -> None:
    history = History()
    history.topic(TOPIC, "required")
    first = history.call("raw/1", TOPIC, ["a"], expected=0)
    second = history.call("raw/2", TOPIC, ["b"], expected=0, manner=Manner(named=True))
    history.reported(first, Reported(OK, offset=0))
    history.reported(first, Reported(UNKNOWN))
    history.reported(second, Reported(REFUSED, actual=1, code=44, detail="OFFSET_MISMATCH"))
    history.call("raw/2", TOPIC, ["c"], expected=1)
    history.transactions["t1"] = "committed"
    history.event("broker killed", "1")
    history.logs[PARTITION] = [Entry(0, "b")]
    assert history.counts() == {("raw", OK): 1, ("raw", REFUSED): 1, ("raw", UNKNOWN): 1}

    history.save(tmp_path / "history.json")
    loaded = load(tmp_path / "history.json")
    decision = check(loaded)

    assert [operation.outcome for operation in loaded.operations.values()] == [OK, REFUSED, UNKNOWN]
    assert (loaded.topics, loaded.transactions, loaded.events) == (
        history.topics,
        history.transactions,
        history.events,
    )
    assert decision.rules == ["LOST", "REFUSED BUT APPENDED"]
    lines = list(report(decision))
    assert lines[-1] == "result: VIOLATED"
    assert any("op 2 of raw/2 (b) on t-0, expected 0" in line for line in lines)
    with pytest.raises(AssertionError, match="VIOLATED LOST: 1"):
        verify(loaded)


def test_unknown_outcome_is_replaced_by_a_retry() -> None:
    story = Story()
    operation = story.op("a", expected=0, outcome=UNKNOWN)
    story.history.reported(operation, Reported(OK, offset=0))
    assert story.log().rules == ["LOST"]
