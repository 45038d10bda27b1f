"""The log writer's decisions: what the result of an append means after the log was read."""

from __future__ import annotations

import pytest

from fencepost import (
    BatchTooLargeError,
    InDoubtError,
    LogRecord,
    NotAtEndError,
    OffsetMismatchError,
    PositionLostError,
    Record,
    RetryPolicy,
)
from fencepost._appending import Append, Decision, Failure, LogPosition, MaybeAppended, Observation, resolve
from fencepost._checks import TopicFacts

OURS = b"ours"
POLICY = RetryPolicy(attempt_seconds=1, total_seconds=10, pause_seconds=0.1, pause_seconds_max=1)


def _mismatch(actual: int | None = 57, possibly_yours: bool | None = False) -> OffsetMismatchError:
    return OffsetMismatchError("t", 0, 41, actual, possibly_yours=possibly_yours)


def _record(offset: int, write_id: bytes | None) -> LogRecord:
    headers = () if write_id is None else (("fencepost-write-id", write_id),)
    return LogRecord(offset, 0, None, b"v", headers)


IN_DOUBT = MaybeAppended()
IN_DOUBT.__cause__ = TimeoutError("no answer")
SEQUENCED = _mismatch()
MUTE = _mismatch(possibly_yours=None)  # a library that does not show the message
MAYBE = _mismatch(possibly_yours=True)
SHORTER = _mismatch(actual=12)
SHORTER_MUTE = _mismatch(actual=12, possibly_yours=None)
SHORTER_MAYBE = _mismatch(actual=12, possibly_yours=True)

MINE = Observation(0, 57, _record(41, OURS))
THEIRS = Observation(0, 57, _record(41, b"theirs"))
UNNAMED = Observation(0, 57, _record(41, None))
GAP = Observation(0, 57, _record(43, b"theirs"))
MARKER_LAST = Observation(0, 42, None)
NOTHING_YET = Observation(0, 41, None)
SHORT = Observation(0, 12, None)
DELETED = Observation(50, 57, _record(50, b"theirs"))


@pytest.mark.parametrize("failure", [IN_DOUBT, SEQUENCED, MUTE, MAYBE])
def test_own_record_in_log_decides_any_reply(failure: Failure) -> None:
    assert resolve(41, OURS, failure, MINE) is Decision.OURS


@pytest.mark.parametrize("failure", [IN_DOUBT, SEQUENCED, MUTE, MAYBE])
@pytest.mark.parametrize("observation", [THEIRS, UNNAMED])
def test_anothers_record_there_is_a_refusal(failure: Failure, observation: Observation) -> None:
    assert resolve(41, OURS, failure, observation) is Decision.REFUSED


@pytest.mark.parametrize(
    ("failure", "observation", "decision"),
    [
        (IN_DOUBT, NOTHING_YET, Decision.UNDECIDED),  # it may be queued still, or never have arrived
        (IN_DOUBT, GAP, Decision.UNDECIDED),  # a marker lies there: let the server say so
        (IN_DOUBT, SHORT, Decision.UNDECIDED),
        (IN_DOUBT, DELETED, Decision.DELETED),
        (SEQUENCED, NOTHING_YET, Decision.REFUSED),
        (SEQUENCED, GAP, Decision.REFUSED),
        (SEQUENCED, DELETED, Decision.REFUSED),
        (MUTE, NOTHING_YET, Decision.UNDECIDED),  # the library's first send may be appended and not replicated
        (MUTE, MARKER_LAST, Decision.REFUSED),
        (MUTE, GAP, Decision.REFUSED),
        (MUTE, DELETED, Decision.DELETED),
        (MAYBE, NOTHING_YET, Decision.UNDECIDED),
        (MAYBE, DELETED, Decision.DELETED),
        (SHORTER, SHORT, Decision.REFUSED),
        (SHORTER_MUTE, SHORT, Decision.UNDECIDED),  # the library's first send may be queued still
        (SHORTER_MAYBE, SHORT, Decision.UNDECIDED),
    ],
)
def test_reply_decides_when_log_shows_no_record(failure: Failure, observation: Observation, decision: Decision) -> None:
    assert resolve(41, OURS, failure, observation) is decision


def _begun(position: LogPosition | None = None, records: int = 3) -> Append:
    position = position or _at_end()
    batch = [Record(b"v%d" % i, timestamp_ms=1) for i in range(records)]
    return position.begin(batch, OURS, TopicFacts(None, cluster_id="C"), now=100.0)


def _at_end(end: int = 41, bytes_max: int = 10_000) -> LogPosition:
    position = LogPosition("t", 0, POLICY, bytes_max)
    position.start_reading(0, end)
    position.reached(end)
    return position


def test_next_append_expects_offset_after_acknowledged_one() -> None:
    position = _at_end()
    append = _begun(position)
    assert append.expected == 41
    position.ended(append)
    assert _begun(position).expected == 44


def test_batch_records_expect_own_offsets_under_one_id() -> None:
    append = _begun()
    assert [dict(append.headers(i)) for i in range(3)] == [
        {"fencepost-expected-offset": b"41@t/0@C", "fencepost-write-id": OURS},
        {"fencepost-expected-offset": b"42@t/0@C", "fencepost-write-id": OURS},
        {"fencepost-expected-offset": b"43@t/0@C", "fencepost-write-id": OURS},
    ]


def test_in_doubt_append_found_in_log_succeeds() -> None:
    assert _begun().pause_after(IN_DOUBT, MINE, now=100.1) is None


def test_refusal_is_raised_unchanged() -> None:
    with pytest.raises(OffsetMismatchError) as caught:
        _begun().pause_after(SEQUENCED, THEIRS, now=100.1)
    assert caught.value is SEQUENCED


def test_in_doubt_append_replaced_by_another_is_mismatch() -> None:
    with pytest.raises(OffsetMismatchError) as caught:
        _begun().pause_after(IN_DOUBT, THEIRS, now=100.1)
    assert (caught.value.expected, caught.value.actual, caught.value.possibly_yours) == (41, 57, False)
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_in_doubt_append_retries_with_backoff_until_timeout() -> None:
    append = _begun()
    pauses = []
    for now in (100.0, 101.0, 102.0, 103.0, 104.0, 109.9):
        pauses.append(append.pause_after(IN_DOUBT, NOTHING_YET, now))
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    with pytest.raises(InDoubtError, match="tried for 10 s") as caught:
        append.pause_after(IN_DOUBT, NOTHING_YET, now=110.0)
    assert (caught.value.expected, caught.value.write_id) == (41, OURS)


def test_refusal_stays_in_doubt_with_unreadable_log() -> None:
    """The refusal may be of the library's second send, and the first may be appended."""
    append = _begun()
    assert append.pause_after(MUTE, None, now=100.0) == 0.1
    with pytest.raises(InDoubtError):
        append.pause_after(MUTE, None, now=110.0)


def test_append_at_deleted_offset_stays_in_doubt() -> None:
    with pytest.raises(InDoubtError, match="the log now starts after it"):
        _begun().pause_after(IN_DOUBT, DELETED, now=100.0)


def test_append_needs_log_end_read_after_every_failure() -> None:
    position = LogPosition("t", 0, POLICY, 10_000)
    with pytest.raises(NotAtEndError):
        _begun(position)
    position = _at_end()
    _begun(position)  # and never ended: refused, or in doubt
    with pytest.raises(NotAtEndError):
        _begun(position)
    assert position.start_reading(0, 57) == 41
    position.reached(57)
    assert _begun(position).expected == 57


def test_too_large_batch_is_refused_before_sending() -> None:
    position = _at_end(bytes_max=10_000)
    with pytest.raises(BatchTooLargeError, match="up to 10"):
        position.begin([Record(b"x" * 9_950)], OURS, TopicFacts(None), now=0)
    with pytest.raises(BatchTooLargeError, match="the limit is 500"):
        position.begin([Record(b"x" * 500)], OURS, TopicFacts(max_message_bytes=500), now=0)
    with pytest.raises(ValueError, match="at least one"):
        position.begin([], OURS, TopicFacts(None), now=0)
    assert _begun(position).expected == 41


@pytest.mark.parametrize(("log_start", "log_end"), [(50, 60), (0, 12)])
def test_lost_log_position_is_noticed(log_start: int, log_end: int) -> None:
    """Retention passed it by, or the topic was recreated."""
    position = _at_end()
    with pytest.raises(PositionLostError, match="discard the state"):
        position.start_reading(log_start, log_end)
    with pytest.raises(NotAtEndError):
        _begun(position)


def test_reading_covers_log_start_to_trailing_markers() -> None:
    position = LogPosition("t", 0, POLICY, 10_000)
    assert position.start_reading(7, 20) == 7
    position.next_offset = 19  # offset 18 was the last record, 19 is a transaction marker
    assert position.reached(20) == 20
