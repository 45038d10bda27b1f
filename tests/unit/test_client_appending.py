"""The log writer's decisions: what a try at an append means once the log was looked at."""

from __future__ import annotations

import pytest

from fencepost import (
    BatchTooLarge,
    HeaderNames,
    InDoubt,
    LogRecord,
    NotAtEnd,
    OffsetMismatch,
    OffsetViolation,
    PositionLost,
    Record,
    RetryPolicy,
)
from fencepost._appending import (
    Again,
    Append,
    Appended,
    Decision,
    Done,
    LogPosition,
    MaybeAppended,
    Observation,
    Refused,
    resolve,
)
from fencepost._checks import TopicFacts

NAMES = HeaderNames()
OURS = b"ours"
POLICY = RetryPolicy(attempt_seconds=1, total_seconds=10, pause_seconds=0.1, pause_seconds_max=1)


def _mismatch(actual: int | None = 57, possibly_yours: bool | None = False) -> Refused:
    return Refused(OffsetMismatch("t", 0, 41, actual, possibly_yours=possibly_yours))


def _record(offset: int, write_id: bytes | None) -> LogRecord:
    headers = () if write_id is None else (("write-id", write_id),)
    return LogRecord(offset, 0, None, b"v", headers)


DOUBT = MaybeAppended(TimeoutError("no answer"))
SEQUENCED = _mismatch()
MUTE = _mismatch(possibly_yours=None)  # a library that does not show the message
MAYBE = _mismatch(possibly_yours=True)
SHORTER = _mismatch(actual=12, possibly_yours=None)

MINE = Observation(0, 57, _record(41, OURS))
THEIRS = Observation(0, 57, _record(41, b"theirs"))
UNNAMED = Observation(0, 57, _record(41, None))
GAP = Observation(0, 57, _record(43, b"theirs"))
MARKER_LAST = Observation(0, 42, None)
NOTHING_YET = Observation(0, 41, None)
SHORT = Observation(0, 12, None)
DELETED = Observation(50, 57, _record(50, b"theirs"))


@pytest.mark.parametrize("reply", [DOUBT, SEQUENCED, MUTE, MAYBE])
def test_a_record_of_ours_there_settles_it_whatever_was_answered(reply: Refused | MaybeAppended) -> None:
    assert resolve(41, OURS, reply, MINE, NAMES) is Decision.OURS


@pytest.mark.parametrize("reply", [DOUBT, SEQUENCED, MUTE, MAYBE])
@pytest.mark.parametrize("observation", [THEIRS, UNNAMED])
def test_anothers_record_there_is_a_refusal(reply: Refused | MaybeAppended, observation: Observation) -> None:
    assert resolve(41, OURS, reply, observation, NAMES) is Decision.REFUSED


@pytest.mark.parametrize(
    ("reply", "observation", "decision"),
    [
        (DOUBT, NOTHING_YET, Decision.UNDECIDED),  # it may be queued still, or never have arrived
        (DOUBT, GAP, Decision.UNDECIDED),  # a marker lies there: let the server say so
        (DOUBT, SHORT, Decision.UNDECIDED),
        (DOUBT, DELETED, Decision.GONE),
        (SEQUENCED, NOTHING_YET, Decision.REFUSED),
        (SEQUENCED, GAP, Decision.REFUSED),
        (SEQUENCED, DELETED, Decision.REFUSED),
        (MUTE, NOTHING_YET, Decision.UNDECIDED),  # the library's first send may have landed and not be replicated
        (MUTE, MARKER_LAST, Decision.REFUSED),
        (MUTE, GAP, Decision.REFUSED),
        (MUTE, DELETED, Decision.GONE),
        (MAYBE, NOTHING_YET, Decision.UNDECIDED),
        (MAYBE, DELETED, Decision.GONE),
        (SHORTER, SHORT, Decision.REFUSED),
    ],
)
def test_where_nothing_lies_there_the_answer_counts(
    reply: Refused | MaybeAppended, observation: Observation, decision: Decision
) -> None:
    assert resolve(41, OURS, reply, observation, NAMES) is decision


def _begun(position: LogPosition | None = None, records: int = 3) -> Append:
    position = position or _at_end()
    batch = [Record(b"v%d" % i, timestamp_ms=1) for i in range(records)]
    return position.begin(batch, OURS, TopicFacts(None), now=100.0)


def _at_end(end: int = 41, bytes_max: int = 10_000) -> LogPosition:
    position = LogPosition("t", 0, NAMES, POLICY, bytes_max)
    position.start_reading(0, end)
    position.reached(end)
    return position


def test_an_acknowledged_append_is_done_and_the_next_expects_the_offset_behind_it() -> None:
    position = _at_end()
    append = _begun(position)
    assert append.expected == 41
    assert append.validate(Appended(41), None, now=100.1) == Done(41)
    position.ended(append)
    assert _begun(position).expected == 44


def test_every_record_of_a_batch_expects_its_own_offset_under_one_write_id() -> None:
    append = _begun()
    assert [dict(append.headers(i)) for i in range(3)] == [
        {"expected-offset": b"41", "write-id": OURS},
        {"expected-offset": b"42", "write-id": OURS},
        {"expected-offset": b"43", "write-id": OURS},
    ]


def test_an_acknowledgement_for_another_offset_is_never_a_success() -> None:
    with pytest.raises(OffsetViolation):
        _begun().validate(Appended(42), None, now=100.1)


def test_a_doubt_settled_as_ours_is_a_success() -> None:
    assert _begun().validate(DOUBT, MINE, now=100.1) == Done(41)


def test_a_refusal_is_raised_as_the_server_said_it() -> None:
    with pytest.raises(OffsetMismatch) as caught:
        _begun().validate(SEQUENCED, THEIRS, now=100.1)
    assert caught.value is SEQUENCED.error


def test_a_doubt_that_turns_out_to_be_anothers_append_is_a_mismatch() -> None:
    with pytest.raises(OffsetMismatch) as caught:
        _begun().validate(DOUBT, THEIRS, now=100.1)
    assert (caught.value.expected, caught.value.actual, caught.value.possibly_yours) == (41, 57, False)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_the_same_is_tried_again_with_growing_pauses_until_the_time_is_over() -> None:
    append = _begun()
    pauses = []
    for now in (100.0, 101.0, 102.0, 103.0, 104.0, 109.9):
        step = append.validate(DOUBT, NOTHING_YET, now)
        assert isinstance(step, Again)
        pauses.append(step.after_seconds)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    with pytest.raises(InDoubt, match="tried for 10 s") as caught:
        append.validate(DOUBT, NOTHING_YET, now=110.0)
    assert (caught.value.expected, caught.value.write_id) == (41, OURS)


def test_a_log_that_cannot_be_read_leaves_even_a_refusal_open() -> None:
    """The refusal may speak of the library's second send, and the first may have landed."""
    append = _begun()
    assert isinstance(append.validate(MUTE, None, now=100.0), Again)
    with pytest.raises(InDoubt):
        append.validate(MUTE, None, now=110.0)


def test_an_append_whose_place_was_deleted_cannot_be_settled() -> None:
    with pytest.raises(InDoubt, match="the log now starts after it"):
        _begun().validate(DOUBT, DELETED, now=100.0)


def test_appending_needs_the_end_to_have_been_read_and_again_after_every_append_that_did_not_end_well() -> None:
    position = LogPosition("t", 0, NAMES, POLICY, 10_000)
    with pytest.raises(NotAtEnd):
        _begun(position)
    position = _at_end()
    _begun(position)  # and never ended: refused, or in doubt
    with pytest.raises(NotAtEnd):
        _begun(position)
    assert position.start_reading(0, 57) == 41
    position.reached(57)
    assert _begun(position).expected == 57


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_sent_and_costs_nothing() -> None:
    position = _at_end(bytes_max=10_000)
    with pytest.raises(BatchTooLarge, match="up to 10"):
        position.begin([Record(b"x" * 9_950)], OURS, TopicFacts(None), now=0)
    with pytest.raises(BatchTooLarge, match="the limit is 500"):
        position.begin([Record(b"x" * 500)], OURS, TopicFacts(max_message_bytes=500), now=0)
    with pytest.raises(ValueError, match="at least one"):
        position.begin([], OURS, TopicFacts(None), now=0)
    assert _begun(position).expected == 41


@pytest.mark.parametrize(("log_start", "log_end"), [(50, 60), (0, 12)])
def test_a_log_that_lost_the_writers_place_is_noticed(log_start: int, log_end: int) -> None:
    """Retention passed it by, or the topic was recreated."""
    position = _at_end()
    with pytest.raises(PositionLost, match="discard the state"):
        position.start_reading(log_start, log_end)
    with pytest.raises(NotAtEnd):
        _begun(position)


def test_reading_starts_at_the_log_start_and_ends_behind_offsets_without_records() -> None:
    position = LogPosition("t", 0, NAMES, POLICY, 10_000)
    assert position.start_reading(7, 20) == 7
    position.next_offset = 19  # offset 18 was the last record, 19 is a transaction marker
    assert position.reached(20) == 20
