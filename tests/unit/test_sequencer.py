"""Dialogues with one partition sequencer: events and effects. Its docstring numbers the rules tested here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from fencepost_policies.append import Append, Check
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.sequencer import PartitionSequencer, Phase
from fencepost_proxy.session.appends import AppendDraft, make_pending_append
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import MARKER, TopicPartition
from fencepost_proxy.wire.batch import fence_batch
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import PartitionData, PartitionResult
from tests.support import bytewise
from tests.support.batches import batch, expecting, now_ms

TP = TopicPartition("orders", 3)
SHARED = 7000
LIMITS = g.SequencerLimits()
E = TypeVar("E")

NOT_LEADER, TIMED_OUT, TOO_LARGE, AFTER_APPEND = 6, 7, 10, 20
OLD_TIMESTAMP, POLICY_VIOLATION, OUT_OF_ORDER, WRONG_EPOCH = 32, 44, 45, 47


@dataclass
class Talk:
    """One partition sequencer and a clock. `effects` are those that no assertion has consumed yet."""

    check: Check = Check.REQUIRED
    sequencer: PartitionSequencer = field(default_factory=lambda: PartitionSequencer(TP, LIMITS))
    now: float = 1000.0
    instance_id: int = 0
    connected_at: float = 0.0
    leader_epoch: int = 0
    alone: bool = True
    taken_over: bool = True
    may_write: bool = False  # whether the session knows that Kafka authorizes its client
    effects: list[g.Effect] = field(default_factory=list)

    def report(self, event: g.Event) -> None:
        self.effects += self.sequencer.handle(event, self.now)

    def call(self, name: str, *arguments: Any) -> None:
        """A call of a session."""
        self.effects += getattr(self.sequencer, name)(*arguments, self.now)

    def submit(
        self,
        records: memoryview,
        *,
        connection: int = 1,
        wait: float = 5.0,
        within: str | None = None,
        owns: bool = False,
    ) -> g.PendingAppend:
        """`within` – a transaction of that id, which `owns` partitions already or does not."""
        draft = AppendDraft(
            connection=connection,
            policy=TopicPolicy(self.check),
            names=HeaderNames(),
            decompressed_bytes_max=1 << 20,
            shared_producer_ids=frozenset({SHARED}),
            now=self.now,
            deadline=self.now + wait,
            instance_id=self.instance_id,
            connected_at=self.connected_at,
            alone=self.alone,
            taken_over=self.taken_over,
            transactional_id=within,
        )
        pending = make_pending_append(draft, TP, PartitionData(TP.partition, records, b""))
        assert isinstance(pending, g.PendingAppend), pending
        pending.may_write = self.may_write
        pending.has_partitions = owns
        pending.leader_epoch = self.leader_epoch
        self.call("submit", pending)
        return pending

    def next(self, kind: type[E]) -> E:
        assert self.effects, f"no effect, expected {kind.__name__}"
        effect = self.effects.pop(0)
        assert isinstance(effect, kind), f"expected {kind.__name__}, got {effect}"
        return effect

    def silent(self) -> None:
        assert not self.effects, self.effects

    def snapshot(self, end: int, *, next_sequence: int | None = None, **more: Any) -> None:
        """Answer the sequencer's read of the log end."""
        self.next(g.ReadLogEnd)
        state = None if next_sequence is None else g.ProducerState(more.pop("epoch", 0), next_sequence)
        facts: dict[str, Any] = {
            "requested_at": self.now,
            "log_end_offset": end,
            "log_start_offset": 0,
            "producer_id": SHARED,
            "producer_state": state,
            "fence_base": (0, 0),
            "open_transactions": frozenset(),
            "log_append_time": False,
            "expiration_seconds": 86_400.0,
            "clock_offset_seconds": time.time() - self.now,
            "transactions_as_of": self.now,
        }
        self.report(g.LogEndRead(g.LogEndSnapshot(**(facts | more))))

    def admitted(self, pending: g.PendingAppend) -> g.Fence | None:
        assert self.next(g.Admit).pending is pending
        self.call("sent", pending)
        return pending.fence

    def kafka(
        self, pending: g.PendingAppend, error: int = 0, base_offset: int = -1, log_append_time_ms: int = -1
    ) -> None:
        self.call("answered", pending, PartitionResult(TP.partition, error, base_offset, log_append_time_ms))

    def answered(self, pending: g.PendingAppend) -> PartitionResult:
        answer = self.next(g.Answer)
        assert answer.pending is pending
        return answer.result

    def accepted(self, pending: g.PendingAppend, at: int) -> None:
        result = self.answered(pending)
        assert (result.error_code, result.base_offset) == (0, at), result

    def mismatch(self, pending: g.PendingAppend, *, expected: int, actual: int) -> str:
        result = self.answered(pending)
        assert (result.error_code, result.base_offset) == (POLICY_VIOLATION, actual), result
        assert result.error_message is not None
        assert f"OFFSET_MISMATCH topic=orders partition=3 expected={expected} actual={actual}" in result.error_message
        assert result.record_errors == ()
        return result.error_message

    def append(self, at: int, *values: bytes, timestamp_ms: int | None = None, connection: int = 1) -> g.PendingAppend:
        """A conditional append that succeeds while the fence is confirmed."""
        pending = self.submit(expecting(at, *values, timestamp_ms=timestamp_ms), connection=connection)
        assert self.admitted(pending) == g.Fence(SHARED, 0, at)
        self.kafka(pending, base_offset=at)
        self.accepted(pending, at)
        return pending


def confirmed(at: int = 10, check: Check = Check.REQUIRED) -> Talk:
    """The state after one successful append of one record; the log ends at `at`."""
    talk = Talk(check)
    pending = talk.submit(expecting(at - 1, b"first"))
    talk.snapshot(at - 1)
    talk.admitted(pending)
    talk.kafka(pending, base_offset=at - 1)
    talk.accepted(pending, at - 1)
    talk.silent()
    talk.now += 1
    return talk


def in_log(records: memoryview, at: int, fence: g.Fence | None = None, *, log_append_time: bool = False) -> g.Found:
    """The records as a broker would hand them out, at their offset."""
    fence = fence or g.Fence(SHARED, 0, at)
    stored = fence_batch(
        records,
        producer_id=fence.producer_id,
        producer_epoch=fence.producer_epoch,
        base_sequence=fence.base_sequence,
        instance_id=fence.instance_id,
    )
    stored[:8] = at.to_bytes(8, "big")
    if log_append_time:  # rewritten by the broker
        stored[21:23] = b"\0\x08"
    return g.Found(memoryview(bytes(stored)))


def not_fenced(records: memoryview, at: int) -> g.Found:
    """The same of a batch that kept its own producer id."""
    return g.Found(memoryview(at.to_bytes(8, "big") + bytes(records[8:])))


def compacted(found: g.Found, record_count: int) -> g.Found:
    """The batch with fewer records: compaction keeps its offset, its offset range and its producer."""
    left = bytearray(found.batch)
    left[21:23] = b"\0\0"
    left[57:61] = record_count.to_bytes(4, "big")
    return g.Found(memoryview(bytes(left)))


# ---------------------------------------------------------------------------------------------------- the happy path


def test_unconfirmed_sequencer_reads_log_end_and_fences() -> None:
    talk = Talk()
    pending = talk.submit(expecting(41, b"a", b"b"))
    talk.snapshot(41)
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 41)
    talk.kafka(pending, base_offset=41)
    talk.accepted(pending, 41)
    assert talk.sequencer.log_end_offset == 43


def test_confirmed_sequencer_appends_without_reading() -> None:
    talk = confirmed(10)
    talk.append(10, b"a", b"b")
    talk.append(12, b"c", connection=2)
    talk.silent()


def test_sequences_wrap_where_kafkas_do() -> None:
    talk = Talk()
    end = (1 << 31) + 5
    pending = talk.submit(expecting(end, b"a"))
    talk.snapshot(end, next_sequence=5)
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 5)


def test_true_topic_counts_unfenced_appends_in_sequence_offset() -> None:
    talk = confirmed(10, Check.ON)
    own = talk.submit(batch(b"x", b"y", producer=(5, 0, 0)))
    assert talk.admitted(own) is None
    talk.kafka(own, base_offset=10)
    talk.accepted(own, 10)
    pending = talk.submit(expecting(12, b"z"))
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 10)


def test_batch_without_producer_is_fenced_at_log_end() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(batch(b"x"))
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 10)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_mismatch_reports_log_end_read_during_the_request() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(12, b"a"))
    talk.snapshot(11, next_sequence=11)  # another process has appended meanwhile
    talk.mismatch(pending, expected=12, actual=11)


def test_earlier_log_end_is_not_reported_as_actual() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(12, b"a"))
    talk.next(g.ReadLogEnd)
    talk.silent()
    assert pending.sent_at is None


def test_unreadable_batch_at_offset_gives_retriable_error() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(11, b"a"), wait=1.0)
    talk.snapshot(12, next_sequence=12)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, g.NotYet(12)))
    talk.silent()
    talk.now += 0.1
    talk.report(g.Tick())
    talk.next(g.ReadBatch)
    talk.now += 1.0
    talk.report(g.Tick())
    assert talk.answered(pending).error_code == NOT_LEADER


# ------------------------------------------------------------------- rule 1: an answer speaks of a batch sent once


def test_sequence_gap_becomes_mismatch_after_reading_the_log() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, OUT_OF_ORDER)
    talk.snapshot(13, next_sequence=13)
    assert talk.next(g.ReadBatch).offset == 10
    talk.report(g.BatchRead(pending, in_log(expecting(10, b"theirs"), 10)))
    talk.mismatch(pending, expected=10, actual=13)


def test_fence_with_wrong_epoch_is_rebuilt_from_log() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, WRONG_EPOCH)
    talk.snapshot(10, next_sequence=0, epoch=3, fence_base=(3, 10))
    assert talk.admitted(pending) == g.Fence(SHARED, 3, 0)
    talk.kafka(pending, base_offset=10)
    talk.accepted(pending, 10)


def test_repeatedly_refused_fence_ends_with_retriable_error() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    for _ in range(LIMITS.attempts_max):
        talk.admitted(pending)
        talk.kafka(pending, OUT_OF_ORDER)
        if talk.effects and isinstance(talk.effects[0], g.ReadLogEnd):
            talk.snapshot(10)
    assert talk.answered(pending).error_code == NOT_LEADER


@pytest.mark.parametrize(
    ("error", "base_offset"), [(TIMED_OUT, -1), (AFTER_APPEND, -1), (NOT_LEADER, 10), (-1, -1), (56, -1)]
)
def test_errors_after_possible_append_leave_it_in_doubt(error: int, base_offset: int) -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a", write_id=b"w"))
    talk.admitted(pending)
    talk.kafka(pending, error, base_offset)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    talk.report(g.BatchRead(pending, in_log(pending.records, 10)))
    talk.accepted(pending, 10)
    assert talk.sequencer.phase is Phase.UNCONFIRMED


def test_not_leader_before_any_append_is_relayed() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, NOT_LEADER)
    assert talk.answered(pending).error_code == NOT_LEADER
    talk.silent()
    talk.submit(expecting(10, b"a"))
    talk.next(g.ReadLogEnd)  # the new leader may not know the fence


def test_lost_acknowledgement_is_resolved_from_the_log() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.call("lost", pending)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    talk.report(g.BatchRead(pending, in_log(expecting(10, b"theirs"), 10)))
    talk.snapshot(11, next_sequence=11)  # it can no longer be appended: decide again
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, in_log(expecting(10, b"theirs"), 10)))
    talk.mismatch(pending, expected=10, actual=11)


def in_doubt(
    *, check: Check = Check.REQUIRED, producer: tuple[int, int, int] = (5, 0, 0)
) -> tuple[Talk, g.PendingAppend]:
    """The acknowledgement of an append at 10 is lost; its client may write, and this process has an instance id."""
    talk = confirmed(10, check)
    talk.instance_id, talk.may_write = 7, True
    pending = talk.submit(expecting(10, b"a", producer=producer))
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 10, 7)
    talk.call("lost", pending)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    return talk, pending


def test_fence_with_own_instance_id_proves_the_append() -> None:
    talk, pending = in_doubt()
    talk.report(g.BatchRead(pending, in_log(pending.records, 10, pending.fence)))
    talk.accepted(pending, 10)
    retry = talk.submit(pending.records, connection=2)
    talk.accepted(retry, 10)


def test_equal_batch_of_another_instance_is_no_success() -> None:
    talk, pending = in_doubt()
    theirs = in_log(pending.records, 10, g.Fence(SHARED, 0, 10, 8))
    talk.report(g.BatchRead(pending, theirs))
    talk.snapshot(11, next_sequence=11)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, theirs))
    assert "POSSIBLY_YOURS" in talk.mismatch(pending, expected=10, actual=11)


def test_unconditional_batch_is_fenced_again_at_new_end() -> None:
    talk = confirmed(10, Check.ON)
    talk.instance_id = 7
    pending = talk.submit(batch(b"a"))
    talk.admitted(pending)
    talk.call("lost", pending)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, in_log(pending.records, 10, g.Fence(SHARED, 0, 10, 8))))
    talk.snapshot(11, next_sequence=11)
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 11, 7)


def test_one_of_two_equal_batches_succeeds() -> None:
    talk, first = in_doubt()
    talk.report(g.BatchRead(first, g.NotYet(10)))
    talk.snapshot(10, next_sequence=9)  # not the sequence of its fence: the outcome stays unknown
    assert talk.answered(first).error_code == TIMED_OUT
    second = talk.submit(expecting(10, b"a", producer=(6, 0, 0), timestamp_ms=first.append.max_timestamp_ms))
    talk.snapshot(10, next_sequence=10)
    talk.admitted(second)
    talk.call("lost", second)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(second, in_log(first.records, 10, first.fence)))
    talk.accepted(second, 10)
    retry = talk.submit(first.records, connection=3)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, in_log(first.records, 10, first.fence)))
    talk.snapshot(11, next_sequence=11)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, in_log(first.records, 10, first.fence)))
    assert "POSSIBLY_YOURS" in talk.mismatch(retry, expected=10, actual=11)


def test_in_doubt_batch_is_resent_at_unchanged_end() -> None:
    talk, pending = in_doubt()
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    talk.snapshot(10, next_sequence=10)
    assert talk.next(g.Resend).pending is pending
    talk.report(g.Resent(pending, PartitionResult(3, 0, 10)))
    talk.accepted(pending, 10)


@pytest.mark.parametrize(
    "resent", [None, PartitionResult(3, 0, 10, now_ms()), PartitionResult(3, 45), PartitionResult(3, 19)]
)
def test_outcome_after_resend_is_read_from_the_log(resent: PartitionResult | None) -> None:
    talk, pending = in_doubt()
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    talk.snapshot(10, next_sequence=10)
    talk.next(g.Resend)
    talk.report(g.Resent(pending, resent))
    talk.silent()
    talk.now += 0.1
    talk.report(g.Tick())
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, in_log(pending.records, 10, pending.fence)))
    talk.accepted(pending, 10)


@pytest.mark.parametrize(
    "facts",
    [
        {"next_sequence": 11},
        {"next_sequence": 10, "epoch": 1},
        {"next_sequence": 10, "fence_base": (1, 10)},
        {"next_sequence": 10, "open_transactions": frozenset({4})},
        {"next_sequence": 10, "requested_at": 990.0},
        {"next_sequence": 10, "expiration_seconds": -1000.0},
        {"next_sequence": 10, "producer_id": SHARED + 1},
    ],
)
def test_changed_sequence_prevents_the_resend(facts: dict[str, Any]) -> None:
    talk, pending = in_doubt()
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    talk.snapshot(10, **facts)
    assert talk.answered(pending).error_code == TIMED_OUT


def test_log_that_moved_before_resend_is_read_again() -> None:
    talk, pending = in_doubt()
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    talk.snapshot(11, next_sequence=11)
    talk.now += 0.1
    talk.report(g.Tick())
    talk.next(g.ReadBatch)


def test_nothing_is_resent_without_proven_write_permission() -> None:
    talk, pending = in_doubt()
    pending.may_write = False
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    assert talk.answered(pending).error_code == TIMED_OUT
    talk = confirmed(10, Check.ON)
    own = talk.submit(batch(b"x", producer=(5, 0, 0)))
    talk.admitted(own)
    talk.call("lost", own)
    assert talk.answered(own).error_code == TIMED_OUT


def test_nothing_is_resent_to_a_possibly_recreated_topic() -> None:
    talk, pending = in_doubt()
    talk.report(g.Forget())
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    assert talk.answered(pending).error_code == TIMED_OUT


def test_nothing_is_resent_after_a_sequence_gap() -> None:
    talk = confirmed(10)
    talk.instance_id, talk.may_write = 7, True
    first = talk.submit(expecting(10, b"a", producer=(5, 0, 0)))
    talk.admitted(first)
    second = talk.submit(expecting(11, b"b", producer=(5, 0, 1)))
    talk.admitted(second)
    talk.call("lost", first)
    talk.call("lost", second)
    talk.next(g.ReadBatch)
    theirs = in_log(expecting(10, b"theirs"), 10, g.Fence(SHARED, 0, 10, 8))
    talk.report(g.BatchRead(first, theirs))
    assert talk.next(g.ReadBatch) == g.ReadBatch(second, 11)
    talk.report(g.BatchRead(second, g.NotYet(11)))
    assert talk.answered(second).error_code == TIMED_OUT
    talk.snapshot(11, next_sequence=11)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(first, theirs))
    talk.mismatch(first, expected=10, actual=11)


def test_retry_after_unknown_outcome_finds_the_first_try() -> None:
    talk, first = in_doubt()
    talk.may_write = False
    talk.report(g.BatchRead(first, g.Unreadable("no leader")))
    talk.now += 20
    talk.report(g.Tick())
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(first, g.Unreadable("no leader")))
    assert talk.answered(first).error_code == TIMED_OUT
    retry = talk.submit(first.records, connection=2)
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 10)
    talk.report(g.BatchRead(retry, in_log(first.records, 10, first.fence)))
    talk.accepted(retry, 10)


def test_unfenced_appends_wait_for_possibly_queued_fenced_one() -> None:
    talk, lost = in_doubt(check=Check.ON)
    lost.may_write = False
    talk.report(g.BatchRead(lost, g.NotYet(10)))
    assert talk.answered(lost).error_code == TIMED_OUT
    own = talk.submit(batch(b"x", producer=(8, 0, 0)), connection=2, wait=100.0)
    talk.silent()
    talk.now += LIMITS.queued_seconds + 1
    talk.report(g.Tick())
    assert talk.admitted(own) is None


def test_acknowledged_later_fence_ends_that_wait() -> None:
    talk, lost = in_doubt(check=Check.ON)
    lost.may_write = False
    talk.report(g.BatchRead(lost, g.NotYet(10)))
    talk.answered(lost)
    other = talk.submit(expecting(10, b"b"), connection=2)
    talk.snapshot(10, next_sequence=10)
    talk.admitted(other)
    own = talk.submit(batch(b"x", producer=(8, 0, 0)), connection=2)
    talk.kafka(other, base_offset=10)
    talk.accepted(other, 10)
    assert talk.admitted(own) is None


def test_conditional_append_waits_for_possibly_queued_unfenced_one() -> None:
    talk = confirmed(10, Check.ON)
    own = talk.submit(batch(b"x", producer=(8, 0, 0), transactional=True))
    talk.admitted(own)
    talk.call("lost", own)
    assert talk.answered(own).error_code == TIMED_OUT
    conditional = talk.submit(expecting(10, b"a"), connection=2)
    talk.silent()
    talk.now += 6
    talk.report(g.Tick())
    assert talk.answered(conditional).error_code == NOT_LEADER
    late = talk.submit(expecting(11, b"a"), connection=2, wait=100.0)
    talk.now += LIMITS.queued_seconds
    talk.report(g.Tick())
    talk.snapshot(11, next_sequence=10)
    talk.admitted(late)


def test_equal_batch_without_write_id_proves_nothing() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.call("lost", pending)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, in_log(pending.records, 10)))
    result = talk.answered(pending)
    assert result.error_code == TIMED_OUT
    assert "may be yours" in (result.error_message or "")


def test_missing_in_doubt_append_is_unknown() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.call("lost", pending)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    assert talk.answered(pending).error_code == TIMED_OUT


@pytest.mark.parametrize("other", ["not_fenced", "fenced before it"])
def test_in_doubt_append_is_sought_after_foreign_batches(other: str) -> None:
    """A queued append or a marker is appended first. The sequence of the in-doubt append still fits. If the sequencer
    treated it as lost, it would be appended twice."""
    talk = confirmed(10, Check.ON)
    talk.instance_id, talk.may_write = 7, True
    lost = talk.submit(batch(b"a"))
    assert talk.admitted(lost) == g.Fence(SHARED, 0, 10, 7)
    talk.call("lost", lost)
    assert talk.next(g.ReadBatch) == g.ReadBatch(lost, 10)
    queued = batch(b"x", b"y", producer=(8, 0, 0))
    talk.report(
        g.BatchRead(
            lost, not_fenced(queued, 10) if other == "not_fenced" else in_log(queued, 10, g.Fence(SHARED, 0, 8))
        )
    )
    assert talk.next(g.ReadBatch) == g.ReadBatch(lost, 12)
    talk.report(g.BatchRead(lost, in_log(lost.records, 12, lost.fence)))
    talk.accepted(lost, 12)


def test_absent_in_doubt_append_is_resent_unchanged() -> None:
    talk = confirmed(10, Check.ON)
    talk.instance_id, talk.may_write = 7, True
    lost = talk.submit(batch(b"a"))
    talk.admitted(lost)
    talk.call("lost", lost)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(lost, not_fenced(batch(b"x"), 10)))
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(lost, g.NotYet(11)))
    talk.snapshot(11, next_sequence=10)
    assert talk.next(g.Resend).pending is lost
    assert lost.fence == g.Fence(SHARED, 0, 10, 7)


def test_retry_of_unresolved_batch_skips_foreign_batches() -> None:
    talk = confirmed(10, Check.ON)
    records = unresolved(talk)
    retry = talk.submit(records, connection=2)
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 11)
    marker = not_fenced(batch(b"x"), 11)
    talk.report(g.BatchRead(retry, marker))
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 12)
    talk.report(g.BatchRead(retry, g.NotYet(12)))
    talk.snapshot(13, next_sequence=12)  # it was queued, and was appended after that read
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 12)
    talk.report(g.BatchRead(retry, in_log(records, 12, g.Fence(SHARED, 0, 11))))
    talk.accepted(retry, 12)


@pytest.mark.parametrize("marker", [False, True])
def test_a_lost_acknowledgement_does_not_hide_a_violation(marker: bool) -> None:
    """A marker in its place is no writer around the proxy: its transaction may have joined since."""
    talk = confirmed(10, Check.ON)
    talk.instance_id = 7
    lost = talk.submit(expecting(10, b"a"))
    talk.admitted(lost)
    talk.call("lost", lost)
    talk.next(g.ReadBatch)
    foreign = not_fenced(batch(b"x", producer=(8, 0, 0)), 10)
    if marker:
        foreign = g.Found(memoryview(bytes(foreign.batch[:21]) + b"\0\x30" + bytes(foreign.batch[23:])))
    talk.report(g.BatchRead(lost, foreign))
    assert talk.next(g.ReadBatch) == g.ReadBatch(lost, 11)
    talk.report(g.BatchRead(lost, in_log(lost.records, 11, lost.fence)))
    assert talk.next(g.ReadBatch) == g.ReadBatch(lost, 10)
    talk.report(g.BatchRead(lost, foreign))
    if not marker:
        assert talk.next(g.Violation) == g.Violation(TP, 10, 11, producer_id=8)
    message = talk.answered(lost).error_message or ""
    assert "OFFSET_VIOLATION" in message
    assert ("bypasses the proxy" in message) is not marker


def test_displaced_in_doubt_append_may_still_follow() -> None:
    talk = confirmed(10, Check.ON)
    talk.may_write = True
    records = expecting(10, b"a", producer=(5, 0, 0))
    lost = talk.submit(records)
    talk.admitted(lost)
    talk.call("lost", lost)
    for pending in (lost, None):
        pending = pending or talk.submit(records, connection=2)  # noqa: PLW2901
        assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
        talk.report(g.BatchRead(pending, not_fenced(batch(b"x"), 10)))
        assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 11)
        talk.report(g.BatchRead(pending, g.NotYet(11)))
        assert talk.answered(pending).error_code == TIMED_OUT
    # Only for a limited time.
    talk.now += LIMITS.queued_seconds + 1
    retry = talk.submit(records, connection=2)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, not_fenced(batch(b"x"), 10)))
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, g.NotYet(11)))
    talk.snapshot(11, next_sequence=10)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, not_fenced(batch(b"x"), 10)))
    talk.mismatch(retry, expected=10, actual=11)


def test_compacted_in_doubt_batch_stays_unknown() -> None:
    """Its offset, its offset range and its fence are those of the first attempt, but some records are deleted."""
    talk = confirmed(10, Check.ON)
    talk.append(10, b"x")
    named = talk.submit(expecting(11, b"a", producer=(5, 0, 0)))
    talk.admitted(named)
    talk.kafka(named, base_offset=11)
    talk.accepted(named, 11)
    records = batch(b"b", b"c", producer=(5, 0, 1))
    lost = talk.submit(records)
    talk.admitted(lost)
    talk.call("lost", lost)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(lost, g.NotYet(12)))
    assert talk.answered(lost).error_code == TIMED_OUT
    retry = talk.submit(records, connection=2)
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 12)
    talk.report(g.BatchRead(retry, compacted(in_log(records, 12), 1)))
    assert talk.answered(retry).error_code == TIMED_OUT


@pytest.mark.parametrize("count", [2, 3])
def test_compacted_batch_at_expected_offset_is_possibly_yours(count: int) -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(4, b"a", b"b"))
    talk.snapshot(10, next_sequence=10)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, compacted(in_log(batch(*(b"x" for _ in range(count))), 4), 1)))
    assert talk.mismatch(pending, expected=4, actual=10).endswith("POSSIBLY_YOURS") is (count == 2)


def test_repacked_batch_in_doubt_is_recognised() -> None:
    """A broker that compresses in another way measures timestamps from the first record, whatever the client did."""
    at_ms = now_ms()

    def measured_from(origin_ms: int) -> memoryview:
        headers = [(b"fencepost-expected-offset", b"10")]
        records = [bytewise.record(i, headers[i:], timestamp_delta=at_ms + i - origin_ms) for i in range(2)]
        return bytewise.batch(records, base_timestamp_ms=origin_ms)

    talk = confirmed(10)
    talk.instance_id = 7
    pending = talk.submit(measured_from(at_ms - 70))
    fence = talk.admitted(pending)
    talk.call("lost", pending)
    assert talk.next(g.ReadBatch).offset == 10
    talk.report(g.BatchRead(pending, in_log(measured_from(at_ms), 10, fence)))
    talk.accepted(pending, 10)


def test_no_append_starts_while_one_is_in_doubt() -> None:
    talk = confirmed(10)
    lost = talk.submit(expecting(10, b"a"))
    talk.admitted(lost)
    talk.call("lost", lost)
    talk.next(g.ReadBatch)
    waiting = talk.submit(expecting(10, b"b"), connection=2)
    talk.silent()
    talk.report(g.BatchRead(lost, g.NotYet(10)))
    talk.answered(lost)
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(waiting) == g.Fence(SHARED, 0, 10)


def test_lost_client_keeps_its_sent_append_first() -> None:
    talk = confirmed(10)
    sent = talk.submit(expecting(10, b"a"))
    talk.admitted(sent)
    talk.call("cancel", sent)
    talk.submit(expecting(10, b"b"), connection=2)
    talk.silent()


def test_answer_after_resolution_changes_nothing() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.call("lost", pending)
    talk.next(g.ReadBatch)
    talk.kafka(pending, OUT_OF_ORDER)
    talk.silent()


def test_connection_lost_after_answer_leaves_nothing_in_doubt() -> None:
    talk = confirmed(10)
    pending = talk.append(10, b"a")
    talk.call("lost", pending)
    talk.silent()
    talk.append(11, b"b")


# ----------------------------------------------------------------------- rules 2 and 3: what makes Kafka forget


def test_the_limit_for_timestamps_moves_with_the_clock() -> None:
    talk = confirmed(10)
    limit_ms = now_ms()
    for at in (10, 11):
        talk.now += 5.5 * 3600
        talk.append(at, b"fresh enough: half a day is the limit")
    talk.now += 2 * 3600
    pending = talk.submit(expecting(12, b"a", timestamp_ms=limit_ms))
    assert talk.answered(pending).error_code == OLD_TIMESTAMP


def test_old_batch_on_true_topic_is_sent_unfenced() -> None:
    talk = confirmed(10, Check.ON)
    old = talk.submit(expecting(10, b"a", timestamp_ms=0, producer=(5, 0, 0)))
    assert talk.admitted(old) == g.NO_PRODUCER
    waiting = talk.submit(expecting(11, b"b"), connection=1)
    talk.silent()
    talk.kafka(old, base_offset=10)
    talk.accepted(old, 10)
    assert talk.admitted(waiting) == g.Fence(SHARED, 0, 10)


def too_old(talk: Talk) -> memoryview:
    """An unconditional batch of a producer with fenced appends: Kafka does not know its sequences."""
    fenced = talk.submit(expecting(10, b"a", producer=(5, 0, 0)))
    talk.admitted(fenced)
    talk.kafka(fenced, base_offset=10)
    talk.accepted(fenced, 10)
    return batch(b"old", producer=(5, 0, 1), timestamp_ms=0)


@pytest.mark.parametrize("conditional", [False, True])
def test_retry_of_an_appended_old_batch_is_recognised(conditional: bool) -> None:
    talk = confirmed(10, Check.ON)
    records = too_old(talk)
    if conditional:
        records = expecting(11, b"old", producer=(5, 0, 1), timestamp_ms=0)
    first = talk.submit(records)
    assert talk.admitted(first) == g.NO_PRODUCER
    talk.kafka(first, base_offset=11)
    talk.accepted(first, 11)  # the answer does not reach its client
    talk.accepted(talk.submit(records, connection=2), 11)
    talk.silent()


def test_retry_of_old_unknown_batch_is_not_sent() -> None:
    """Nothing in the log proves that it is there, and Kafka would not know it again."""
    talk = confirmed(10, Check.ON)
    records = too_old(talk)
    first = talk.submit(records)
    talk.admitted(first)
    talk.call("lost", first)
    assert talk.answered(first).error_code == TIMED_OUT
    for _ in range(2):
        assert talk.answered(talk.submit(records, connection=2)).error_code == TIMED_OUT


@pytest.mark.parametrize("check", [Check.ON, Check.REQUIRED])
def test_retry_that_became_too_old_is_not_appended(check: Check) -> None:
    talk = confirmed(10, check)
    limit_ms = now_ms() - 12 * 3600 * 1000
    records = expecting(10, b"a", producer=(5, 0, 0), timestamp_ms=limit_ms + 10_000)
    first = talk.submit(records)
    assert talk.admitted(first) == g.Fence(SHARED, 0, 10)
    talk.call("lost", first)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(first, g.NotYet(10)))
    assert talk.answered(first).error_code == TIMED_OUT
    talk.now += 20
    retry = talk.submit(records, connection=2)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, g.NotYet(10)))
    clock = {"clock_offset_seconds": now_ms() / 1000 + 20 - talk.now}
    talk.snapshot(10, next_sequence=10, **clock)
    assert talk.answered(retry).error_code == TIMED_OUT


def test_log_append_time_topic_confirms_every_success() -> None:
    talk = Talk()
    pending = talk.submit(expecting(10, b"a", timestamp_ms=0))
    talk.snapshot(10, log_append_time=True)
    talk.admitted(pending)
    talk.kafka(pending, base_offset=10, log_append_time_ms=5)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    talk.report(g.BatchRead(pending, in_log(pending.records, 10, log_append_time=True)))
    talk.accepted(pending, 10)
    talk.submit(expecting(11, b"b"))
    talk.next(g.Admit)  # the fence stays confirmed: the read was only a check


def test_append_found_in_log_leaves_log_end_unknown() -> None:
    talk = Talk()
    first = talk.submit(expecting(10, b"a"))
    talk.snapshot(10, log_append_time=True)
    late = talk.submit(expecting(5, b"b"), connection=2)
    talk.now += 1
    talk.admitted(first)
    talk.kafka(first, base_offset=10, log_append_time_ms=5)  # perhaps a duplicate: the log may be longer now
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(first, in_log(first.records, 10, log_append_time=True)))
    talk.accepted(first, 10)
    talk.snapshot(13, next_sequence=13, log_append_time=True)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(late, in_log(expecting(5, b"theirs"), 5)))
    talk.mismatch(late, expected=5, actual=13)


def test_success_not_confirmed_by_log_is_a_mismatch() -> None:
    talk = Talk()
    pending = talk.submit(expecting(10, b"a"))
    talk.snapshot(10, log_append_time=True)
    talk.admitted(pending)
    talk.kafka(pending, base_offset=10, log_append_time_ms=5)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, in_log(expecting(10, b"theirs"), 10)))
    talk.snapshot(11, next_sequence=11, log_append_time=True)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, in_log(expecting(10, b"theirs"), 10)))
    talk.mismatch(pending, expected=10, actual=11)


# ------------------------------------------------------------------------------ rule 5: Kafka's idea of a duplicate


@pytest.mark.parametrize(("equal", "instance_id"), [(False, 0), (True, 0), (True, 7), (True, 8)])
def test_duplicate_answer_to_first_send_is_anothers_batch(equal: bool, instance_id: int) -> None:
    talk = confirmed(10)
    talk.instance_id = 7
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, base_offset=10, log_append_time_ms=now_ms())
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    theirs = in_log(pending.records if equal else expecting(10, b"theirs"), 10, g.Fence(SHARED, 0, 10, instance_id))
    talk.report(g.BatchRead(pending, theirs))
    talk.snapshot(11, next_sequence=11)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, theirs))
    assert ("POSSIBLY_YOURS" in talk.mismatch(pending, expected=10, actual=11)) is equal


def test_new_log_append_time_is_noticed_from_response() -> None:
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, base_offset=10, log_append_time_ms=now_ms())
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, in_log(pending.records, 10, log_append_time=True)))
    talk.accepted(pending, 10)


# ------------------------------------------------------------------------------------------ rule 6: offsets and bases


def test_required_topic_publishes_new_fence_base_before_use() -> None:
    talk = Talk()
    pending = talk.submit(expecting(12, b"a"))
    talk.snapshot(12, next_sequence=10)  # two records came around the proxy
    publish = talk.next(g.PublishBase)
    assert (publish.producer_epoch, publish.base) == (1, 12)
    talk.silent()
    talk.report(g.BasePublished(True))
    talk.snapshot(12, next_sequence=10, fence_base=(1, 12))
    assert talk.admitted(pending) == g.Fence(SHARED, 1, 0)


def test_losing_base_proposal_uses_the_winners_base() -> None:
    talk = Talk()
    pending = talk.submit(expecting(13, b"a"))
    talk.snapshot(12, next_sequence=10)
    talk.next(g.PublishBase)
    talk.report(g.BasePublished(True))
    talk.snapshot(
        13, epoch=1, next_sequence=2, fence_base=(1, 11)
    )  # another process proposed 11 first, and appended two
    assert talk.admitted(pending) == g.Fence(SHARED, 1, 2)


def test_partition_without_fence_state_needs_no_base() -> None:
    talk = Talk()
    pending = talk.submit(expecting(500, b"a"))
    talk.snapshot(500)
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 500)


def test_recently_published_foreign_epoch_is_no_violation() -> None:
    talk = Talk()
    pending = talk.submit(expecting(12, b"a"))
    talk.snapshot(12, epoch=2, next_sequence=2, fence_base=(1, 5))  # this process's view is one poll old
    talk.next(g.PublishBase)
    talk.report(g.BasePublished(True, ours=False))
    talk.snapshot(12, epoch=2, next_sequence=2, fence_base=(2, 10))
    assert talk.admitted(pending) == g.Fence(SHARED, 2, 2)


def test_append_at_another_offset_is_a_reported_violation() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, base_offset=11)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)  # which producer is it?
    talk.report(g.BatchRead(pending, in_log(batch(b"theirs"), 10, g.Fence(99, 0, 0))))
    assert talk.next(g.Violation) == g.Violation(TP, 10, 11, producer_id=99)
    result = talk.answered(pending)
    assert result.error_code == POLICY_VIOLATION
    assert "OFFSET_VIOLATION topic=orders partition=3 expected=10 appended_at=11 producer_id=99" in (
        result.error_message or ""
    )
    talk.submit(expecting(12, b"b"))
    talk.next(g.ReadLogEnd)


@pytest.mark.parametrize("sequence", [10, 9])
def test_violation_after_equal_sequence_names_producer_expiration(sequence: int) -> None:
    """Kafka would have compared the two. One sequence earlier: an append of the proxy lies one too far."""
    talk = confirmed(10)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, base_offset=11)
    talk.next(g.ReadBatch)
    forgotten = sequence == 10
    talk.report(g.BatchRead(pending, in_log(batch(b"another proxy's"), 10, g.Fence(SHARED, 0, sequence))))
    assert talk.next(g.Violation) == g.Violation(TP, 10, 11, producer_id=SHARED, forgotten=forgotten)
    message = talk.answered(pending).error_message or ""
    assert ("producer.id.expiration.ms" in message) is forgotten
    assert ("bypasses the proxy" in message) is not forgotten


def test_violation_is_reported_without_a_known_author() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, base_offset=11)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, g.Unreadable("no leader")))
    talk.now += 2
    talk.report(g.Tick())
    assert talk.next(g.Violation) == g.Violation(TP, 10, 11)
    assert "appended_at=11 producer_id=unknown" in (talk.answered(pending).error_message or "")


@pytest.mark.parametrize("named", [True, False])
def test_retry_during_violation_lookup_gets_its_answer(named: bool) -> None:
    talk = confirmed(10, Check.ON)
    records = expecting(10, b"a", write_id=b"w") if named else expecting(10, b"a", producer=(5, 0, 0))
    pending = talk.submit(records)
    talk.admitted(pending)
    talk.kafka(pending, base_offset=11)
    talk.next(g.ReadBatch)
    retry = talk.submit(records, connection=2)
    talk.report(g.BatchRead(pending, in_log(batch(b"theirs"), 10, g.Fence(99, 0, 0))))
    talk.next(g.Violation)
    reported = talk.answered(pending)
    assert talk.answered(retry) == reported


def test_unexplained_log_end_is_a_violation_on_required() -> None:
    talk = confirmed(10)
    refused = talk.submit(expecting(10, b"a"))
    talk.admitted(refused)
    talk.kafka(refused, OUT_OF_ORDER)
    talk.snapshot(13, next_sequence=10)  # three records came around the proxy
    assert talk.next(g.Violation) == g.Violation(TP, 10, log_end_offset=13)
    talk.next(g.PublishBase)


def test_earlier_sequence_offset_is_no_violation_at_start() -> None:
    talk = Talk()
    talk.submit(expecting(12, b"a"))
    talk.snapshot(12, next_sequence=10)  # perhaps appended before the topic was checked
    talk.next(g.PublishBase)


@pytest.mark.parametrize("check", [Check.ON, Check.REQUIRED])
def test_foreign_epoch_of_shared_producer_is_reported(check: Check) -> None:
    talk = Talk(check)
    pending = talk.submit(expecting(12, b"a"))
    talk.snapshot(12, epoch=32_766, next_sequence=2)
    if check is Check.REQUIRED:
        publish = talk.next(g.PublishBase)
        assert (publish.producer_epoch, publish.base) == (32_766, 10)
        talk.report(g.BasePublished(True, ours=True))
    assert talk.next(g.Violation) == g.Violation(TP, 11, log_end_offset=12)
    if check is Check.REQUIRED:
        talk.snapshot(12, epoch=32_766, next_sequence=2, fence_base=(32_766, 10))
    assert talk.admitted(pending) == g.Fence(SHARED, 32_766, 2)


# ------------------------------------------------------------------- the last epoch, and the producer id after it

NEXT_ID = SHARED + 1
LAST = 32_767


def test_foreign_last_epoch_leads_to_next_producer_id() -> None:
    talk = Talk()
    pending = talk.submit(expecting(12, b"a"))
    talk.snapshot(12, epoch=LAST, next_sequence=2)
    publish = talk.next(g.PublishBase)
    assert (publish.producer_epoch, publish.base) == (LAST + 1, 12)
    talk.report(g.BasePublished(True, ours=True))
    assert talk.next(g.Violation) == g.Violation(TP, 11, log_end_offset=12)
    talk.snapshot(12, fence_base=(LAST + 1, 12), producer_id=NEXT_ID)
    assert talk.admitted(pending) == g.Fence(NEXT_ID, 0, 0)
    talk.kafka(pending, base_offset=12)
    talk.accepted(pending, 12)
    second = talk.submit(expecting(13, b"b"))
    assert talk.admitted(second) == g.Fence(NEXT_ID, 0, 1)


def test_last_epoch_is_good_for_one_append() -> None:
    """Sequence 0 of the last epoch: from then on Kafka refuses what still comes under that producer id."""
    talk = Talk()
    first = talk.submit(expecting(12, b"a"))
    later = talk.submit(expecting(13, b"b"))
    talk.snapshot(12, epoch=LAST - 1, next_sequence=3, fence_base=(LAST, 12))
    assert talk.admitted(first) == g.Fence(SHARED, LAST, 0)
    talk.silent()
    talk.kafka(first, base_offset=12)
    talk.accepted(first, 12)
    talk.snapshot(13, epoch=LAST, next_sequence=1, fence_base=(LAST, 12))
    publish = talk.next(g.PublishBase)
    assert (publish.producer_epoch, publish.base) == (LAST + 1, 13)
    talk.report(g.BasePublished(True, ours=True))
    talk.snapshot(13, fence_base=(LAST + 1, 13), producer_id=NEXT_ID)
    assert talk.admitted(later) == g.Fence(NEXT_ID, 0, 0)


def test_last_epoch_forgotten_by_kafka_is_not_reused() -> None:
    talk = Talk()
    talk.submit(expecting(13, b"a"))
    talk.snapshot(13, fence_base=(LAST, 12))
    assert talk.next(g.PublishBase).producer_epoch == LAST + 1


def test_epochs_continue_under_the_next_producer_id() -> None:
    talk = Talk()
    pending = talk.submit(expecting(20, b"a"))
    known = {"producer_id": NEXT_ID}
    talk.snapshot(20, epoch=LAST + 6, next_sequence=3, fence_base=(LAST + 6, 10), **known)
    assert talk.next(g.PublishBase).producer_epoch == LAST + 7
    talk.report(g.BasePublished(True, ours=True))
    talk.snapshot(20, epoch=LAST + 6, next_sequence=3, fence_base=(LAST + 7, 20), **known)
    assert talk.admitted(pending) == g.Fence(NEXT_ID, 6, 0)


def test_next_producer_id_resends_an_in_doubt_append() -> None:
    talk = Talk()
    talk.may_write = True
    pending = talk.submit(expecting(20, b"a"))
    known = {"producer_id": NEXT_ID, "epoch": LAST + 6, "next_sequence": 10, "fence_base": (LAST + 6, 10)}
    talk.snapshot(20, **known)
    talk.admitted(pending)
    talk.call("lost", pending)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, g.NotYet(20)))
    talk.snapshot(20, **known)
    assert talk.next(g.Resend) == g.Resend(pending)


def test_fence_bases_are_published_at_a_bounded_rate() -> None:
    """Each appends at Kafka itself would cost an epoch: 32,767 in a quarter of an hour."""
    talk = Talk()
    talk.submit(expecting(99_999, b"a"), wait=10_000)
    began, published = talk.now, 0
    for end in range(1, 2_000):
        talk.snapshot(end, next_sequence=0, fence_base=(published, 0))
        if talk.effects and isinstance(talk.effects[0], g.PublishBase):
            talk.effects.pop()
            published += 1
            talk.report(g.BasePublished(True, ours=True))
            continue
        talk.silent()
        talk.now += 0.5
        talk.report(g.Tick())
        while not talk.effects:
            talk.now += 0.5
            talk.report(g.Tick())
    limits = g.SequencerLimits()
    assert published > limits.bases_burst
    assert published <= limits.bases_burst + 2 + (talk.now - began) / limits.base_seconds


# -------------------------------------------------------------------------------------- rules 12, 13: fence unconfirmed


def test_unconfirmed_sequencer_sends_one_append_alone() -> None:
    talk = Talk()
    first = talk.submit(expecting(10, b"a"))
    talk.snapshot(10)
    talk.admitted(first)
    second = talk.submit(expecting(11, b"b"))
    talk.silent()
    talk.kafka(first, base_offset=10)
    talk.accepted(first, 10)
    assert talk.admitted(second) == g.Fence(SHARED, 0, 11)


def test_unconfirmed_admission_expires() -> None:
    talk = Talk()
    pending = talk.submit(expecting(10, b"a"))
    talk.snapshot(10)
    talk.next(g.Admit)
    assert talk.sequencer.may_send(pending, talk.now)
    talk.now += LIMITS.unconfirmed_send_seconds + 0.1
    assert not talk.sequencer.may_send(pending, talk.now)


def test_warmth_ends_before_kafka_can_forget() -> None:
    talk = confirmed(10)
    talk.now += 86_400 / 4 + 1
    talk.submit(expecting(10, b"a"))
    talk.next(g.ReadLogEnd)


def test_fence_is_unconfirmed_after_the_expiration_lease() -> None:
    talk = Talk()
    first = talk.submit(expecting(9, b"a"))
    talk.snapshot(9, expiration_known_until=talk.now + 60)
    talk.admitted(first)
    talk.kafka(first, base_offset=9)
    talk.accepted(first, 9)
    talk.now += 59
    talk.append(10, b"an acknowledgement does not make that read a later one")
    talk.now += 2
    talk.submit(expecting(11, b"c"))
    talk.next(g.ReadLogEnd)


def test_fence_is_unconfirmed_on_a_newer_connection() -> None:
    talk = confirmed(10)
    talk.now += 5
    talk.connected_at = talk.now  # the broker may have started again meanwhile, and forgotten
    talk.submit(expecting(10, b"a"))
    talk.next(g.ReadLogEnd)


def test_fence_is_unconfirmed_under_another_leader() -> None:
    talk = confirmed(10)
    talk.now += 5
    talk.leader_epoch = 1
    talk.submit(expecting(10, b"a"))
    talk.next(g.ReadLogEnd)


def test_new_append_keeps_the_fence_confirmed() -> None:
    talk = confirmed(10)
    started_ms = now_ms()
    for hours in (5, 10, 15):
        talk.now += 5 * 3600
        talk.append(talk.sequencer.log_end_offset or 0, b"a", timestamp_ms=started_ms + hours * 3_600_000)


# ------------------------------------------------------------------------------------------------------- pipelining


def test_pipelined_appends_are_sent_before_acknowledgements() -> None:
    talk = confirmed(10)
    pipeline_key = [talk.submit(expecting(10 + 2 * i, b"a", b"b")) for i in range(3)]
    for i, pending in enumerate(pipeline_key):
        assert talk.admitted(pending) == g.Fence(SHARED, 0, 10 + 2 * i)
    for i, pending in enumerate(pipeline_key):
        talk.kafka(pending, base_offset=10 + 2 * i)
        talk.accepted(pending, 10 + 2 * i)


def test_pipelining_stops_while_other_instances_are_live() -> None:
    talk = confirmed(10)
    talk.alone = False
    first = talk.submit(expecting(10, b"a"))
    talk.admitted(first)
    second = talk.submit(expecting(11, b"b"))
    talk.silent()
    talk.kafka(first, base_offset=10)
    talk.accepted(first, 10)
    talk.admitted(second)


@pytest.mark.parametrize("check", [Check.ON, Check.REQUIRED])
def test_takeover_delays_conditional_appends_on_true_topics(check: Check) -> None:
    talk = Talk(check)
    talk.taken_over = False
    pending = talk.submit(expecting(10, b"a"))
    if check is Check.REQUIRED:
        talk.snapshot(10)
        talk.admitted(pending)
    else:
        talk.silent()
        later = talk.submit(batch(b"later"))
        unconditional = talk.submit(batch(b"x"), connection=2)
        talk.snapshot(10)
        talk.admitted(unconditional)  # without an expected offset it does not wait
        talk.kafka(unconditional, base_offset=10)
        talk.accepted(unconditional, 10)
        talk.silent()
        talk.now += 6
        talk.report(g.Tick())
        assert talk.answered(pending).error_code == NOT_LEADER
        assert talk.answered(later).error_code == NOT_LEADER


def test_append_from_another_connection_waits_for_the_pipeline() -> None:
    talk = confirmed(10)
    first = talk.submit(expecting(10, b"a"))
    talk.admitted(first)
    other = talk.submit(expecting(11, b"b"), connection=2)
    talk.silent()
    talk.kafka(first, base_offset=10)
    talk.accepted(first, 10)
    assert talk.admitted(other) == g.Fence(SHARED, 0, 11)


def test_pipeline_fails_with_its_first_append_without_45() -> None:
    talk = confirmed(10, Check.ON)
    first = talk.submit(expecting(10, b"a", producer=(5, 0, 0)))
    second = talk.submit(batch(b"unconditional", producer=(5, 0, 1)))
    third = talk.submit(expecting(12, b"c", producer=(5, 0, 2)))
    for pending in (first, second, third):
        assert talk.admitted(pending)
    for pending in (first, second, third):
        talk.kafka(pending, OUT_OF_ORDER)
    talk.snapshot(20, next_sequence=20)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(first, in_log(expecting(10, b"theirs"), 10)))
    talk.mismatch(first, expected=10, actual=20)
    for pending in (second, third):
        assert talk.answered(pending).error_code == POLICY_VIOLATION
    talk.silent()


def test_producer_continues_after_a_refused_conditional_batch() -> None:
    talk = confirmed(10, Check.ON)
    own = talk.submit(batch(b"x", producer=(5, 0, 0)))
    assert talk.admitted(own) is None
    talk.kafka(own, base_offset=10)
    talk.accepted(own, 10)
    refused = talk.submit(expecting(99, b"a", producer=(5, 0, 1)))
    talk.now += 1
    talk.effects.clear()
    talk.sequencer.handle(g.Tick(), talk.now)
    talk.sequencer.cancel(refused, talk.now)
    # Kafka knows sequence 0 of this producer and would find a gap before 2.
    later = talk.submit(batch(b"y", producer=(5, 0, 2)))
    assert later.kind is g.AppendMode.SEQUENCED


# ----------------------------------------------------------------------------------------------------------- retries


def test_retry_waits_for_the_first_try_in_flight() -> None:
    talk = confirmed(10)
    records = expecting(10, b"a", producer=(5, 0, 0))
    first = talk.submit(records)
    talk.admitted(first)
    retry = talk.submit(records, connection=2)
    talk.silent()
    talk.kafka(first, base_offset=10)
    talk.accepted(first, 10)
    talk.accepted(retry, 10)


def test_what_was_truncated_is_not_remembered() -> None:
    talk = confirmed(10)
    records = expecting(10, b"a", producer=(5, 0, 0))
    first = talk.submit(records)
    talk.admitted(first)
    talk.kafka(first, base_offset=10)
    talk.accepted(first, 10)
    talk.now += 1
    probe = talk.submit(expecting(50, b"x"))
    talk.snapshot(10, next_sequence=10)  # the log goes back, and the sequence with it
    talk.mismatch(probe, expected=50, actual=10)
    retry = talk.submit(records, connection=2)
    if isinstance(talk.effects[0], g.ReadLogEnd):
        talk.snapshot(10, next_sequence=10)
    assert talk.admitted(retry) == g.Fence(SHARED, 0, 10)


def unresolved(talk: Talk) -> memoryview:
    """An unconditional batch of a producer with fenced appends, answered with 7 while Kafka may have it queued."""
    first = talk.submit(expecting(10, b"a", producer=(5, 0, 0)))
    talk.admitted(first)
    talk.kafka(first, base_offset=10)
    talk.accepted(first, 10)
    records = batch(b"b", producer=(5, 0, 1))
    lost = talk.submit(records)
    assert talk.admitted(lost) == g.Fence(SHARED, 0, 11)
    talk.call("lost", lost)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(lost, g.NotYet(11)))
    assert talk.answered(lost).error_code == TIMED_OUT
    return records


def retry_of_absent_batch(talk: Talk) -> tuple[memoryview, g.PendingAppend]:
    """The retry of such a batch, which was not where its first try should be."""
    records = unresolved(talk)
    retry = talk.submit(records, connection=2)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, g.NotYet(11)))
    return records, retry


def test_retry_of_unresolved_batch_is_sought_in_log() -> None:
    talk = confirmed(10, Check.ON)
    records = unresolved(talk)
    retry = talk.submit(records, connection=2)
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 11)
    talk.report(g.BatchRead(retry, in_log(records, 11)))
    talk.accepted(retry, 11)  # the first attempt was appended meanwhile


def test_absent_unresolved_batch_is_retried_with_same_sequence() -> None:
    talk = confirmed(10, Check.ON)
    records, retry = retry_of_absent_batch(talk)
    talk.snapshot(11, next_sequence=11)
    assert talk.admitted(retry) == g.Fence(SHARED, 0, 11)
    talk.kafka(retry, base_offset=11, log_append_time_ms=now_ms())  # the first try was faster
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 11)
    talk.report(g.BatchRead(retry, in_log(records, 11)))
    talk.accepted(retry, 11)


def test_later_append_passes_a_waiting_one_but_not_a_retry() -> None:
    talk = confirmed(10, Check.ON)
    records = expecting(10, b"a", b"b", producer=(5, 0, 0))
    lost = talk.submit(records)
    talk.admitted(lost)
    talk.call("lost", lost)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(lost, g.NotYet(10)))
    assert talk.answered(lost).error_code == TIMED_OUT
    other = talk.submit(expecting(10, b"x"), connection=2)
    talk.snapshot(10, next_sequence=10)
    talk.admitted(other)
    talk.submit(batch(b"waits", producer=(8, 0, 0)), connection=3)  # the lost append may still be queued
    retry = talk.submit(records, connection=4)
    later = talk.submit(batch(b"later"), connection=5)
    talk.kafka(other, base_offset=10)
    talk.accepted(other, 10)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, in_log(other.records, 10)))
    talk.snapshot(11, next_sequence=11)
    talk.mismatch(retry, expected=10, actual=11)
    assert talk.admitted(later) == g.Fence(SHARED, 0, 11)


def test_first_try_appended_before_retry_is_not_repeated() -> None:
    talk = confirmed(10, Check.ON)
    records, retry = retry_of_absent_batch(talk)
    talk.snapshot(12, next_sequence=12)  # it was queued, and was appended after that read
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 11)
    talk.report(g.BatchRead(retry, in_log(records, 11)))
    talk.accepted(retry, 11)


def test_retry_is_fenced_again_when_sequence_was_taken() -> None:
    talk = confirmed(10, Check.ON)
    _, retry = retry_of_absent_batch(talk)
    talk.snapshot(12, next_sequence=12)
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 11)
    talk.report(g.BatchRead(retry, in_log(batch(b"another's"), 11)))
    talk.snapshot(12, next_sequence=12)
    assert talk.admitted(retry) == g.Fence(SHARED, 0, 12)


def two_unresolved(talk: Talk, *, conditional: bool) -> tuple[memoryview, memoryview]:
    """Two pipelined batches, both answered with 7 while Kafka may still have them queued."""
    fenced = talk.submit(expecting(10, b"a", producer=(5, 0, 0)))
    talk.admitted(fenced)
    talk.kafka(fenced, base_offset=10)
    talk.accepted(fenced, 10)
    made = (expecting(11, b"b", producer=(5, 0, 1)), expecting(12, b"c", producer=(5, 0, 2)))
    if not conditional:
        made = batch(b"b", producer=(5, 0, 1)), batch(b"c", producer=(5, 0, 2))
    lost = [talk.submit(records) for records in made]
    for at, pending in enumerate(lost, 11):
        assert talk.admitted(pending) == g.Fence(SHARED, 0, at)
    for pending in lost:
        talk.call("lost", pending)
    first, second = lost
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(first, g.NotYet(11)))
    talk.next(g.ReadBatch)
    assert talk.answered(first).error_code == TIMED_OUT
    talk.report(g.BatchRead(second, g.NotYet(11)))
    assert talk.answered(second).error_code == TIMED_OUT
    return made


@pytest.mark.parametrize("conditional", [False, True])
def test_pipelined_retries_keep_their_order(conditional: bool) -> None:
    talk = confirmed(10, Check.ON)
    retries = [talk.submit(records, connection=2) for records in two_unresolved(talk, conditional=conditional)]
    for at, retry in enumerate(retries, 11):
        assert talk.next(g.ReadBatch) == g.ReadBatch(retry, at)
        talk.report(g.BatchRead(retry, g.NotYet(11)))
    talk.snapshot(11, next_sequence=11)
    for at, retry in enumerate(retries, 11):
        assert talk.admitted(retry) == g.Fence(SHARED, 0, at)
        talk.kafka(retry, base_offset=at)
        talk.accepted(retry, at)


@pytest.mark.parametrize("conditional", [False, True])
def test_retry_of_a_possibly_queued_batch_stays_unknown(conditional: bool) -> None:
    """Both may still land, this one at 12: neither is it refused, nor does it go where the log ends now."""
    talk = confirmed(10, Check.ON)
    _, records = two_unresolved(talk, conditional=conditional)
    retry = talk.submit(records, connection=2)
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 12)
    talk.report(g.BatchRead(retry, g.NotYet(11)))
    talk.snapshot(11, next_sequence=11)
    assert talk.answered(retry).error_code == TIMED_OUT
    # Only for a limited time.
    talk.now += LIMITS.queued_seconds + 1
    retry = talk.submit(records, connection=2)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(retry, g.NotYet(11)))
    talk.snapshot(11, next_sequence=11)
    if conditional:
        talk.mismatch(retry, expected=12, actual=11)
    else:
        assert talk.admitted(retry) == g.Fence(SHARED, 0, 11)


@pytest.mark.parametrize("error", [3, 5, 19, TOO_LARGE])
def test_failed_retry_does_not_exclude_the_first_try(error: int) -> None:
    """If the sequencer forgot the first attempt, the next retry could append the batch a second time."""
    talk = confirmed(10, Check.ON)
    records, retry = retry_of_absent_batch(talk)
    talk.snapshot(11, next_sequence=11)
    talk.admitted(retry)
    talk.kafka(retry, error)
    assert talk.answered(retry).error_code == error
    again = talk.submit(records, connection=2)
    assert talk.next(g.ReadBatch) == g.ReadBatch(again, 11)
    talk.report(g.BatchRead(again, in_log(records, 11)))
    talk.accepted(again, 11)


def test_failed_pipelined_retry_stays_unresolved() -> None:
    talk = confirmed(10, Check.ON)
    made = two_unresolved(talk, conditional=False)
    retries = [talk.submit(records, connection=2) for records in made]
    for at, retry in enumerate(retries, 11):
        assert talk.next(g.ReadBatch) == g.ReadBatch(retry, at)
        talk.report(g.BatchRead(retry, g.NotYet(11)))
    talk.snapshot(11, next_sequence=11)
    talk.admitted(retries[0])
    talk.kafka(retries[0], 19)
    for retry in retries:
        assert talk.answered(retry).error_code == 19
    again = talk.submit(made[1], connection=3)
    assert talk.next(g.ReadBatch) == g.ReadBatch(again, 12)


def test_early_retry_of_unknown_batch_is_sought_too() -> None:
    talk = confirmed(10, Check.ON)
    named = talk.submit(expecting(10, b"a", producer=(5, 0, 0)))
    talk.admitted(named)
    talk.kafka(named, base_offset=10)
    talk.accepted(named, 10)
    ahead = talk.submit(expecting(11, b"c"), connection=2)
    talk.admitted(ahead)
    records = batch(b"b", producer=(5, 0, 1))
    first = talk.submit(records)
    retry = talk.submit(records, connection=3)  # its connection has broken, and the proxy does not know yet
    talk.kafka(ahead, base_offset=11)
    talk.accepted(ahead, 11)
    talk.admitted(first)
    talk.call("lost", first)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(first, g.NotYet(12)))
    assert talk.answered(first).error_code == TIMED_OUT
    talk.snapshot(13, next_sequence=13)  # it was queued, and was appended after that read
    assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 12)
    talk.report(g.BatchRead(retry, in_log(records, 12)))
    talk.accepted(retry, 12)


@pytest.mark.parametrize("end", ["canceled while it is looked up", "canceled in the queue", "its time is over"])
def test_retry_that_is_not_sent_leaves_batch_unresolved(end: str) -> None:
    talk = confirmed(10, Check.ON)
    records = unresolved(talk)
    retry = talk.submit(records, connection=2)
    talk.next(g.ReadBatch)
    if end == "canceled while it is looked up":
        talk.call("cancel", retry)
        talk.report(g.BatchRead(retry, g.NotYet(11)))
    else:
        talk.report(g.BatchRead(retry, g.NotYet(11)))
        talk.now += 6
        if end == "its time is over":
            talk.report(g.Tick())
        else:
            talk.call("cancel", retry)
    talk.snapshot(11, next_sequence=11)
    if end == "canceled while it is looked up":
        assert talk.next(g.Admit).pending is retry
        talk.call("cancel", retry)  # no connection is left to send it
    talk.effects.clear()
    again = talk.submit(records, connection=3)
    assert talk.next(g.ReadBatch) == g.ReadBatch(again, 11)


# ------------------------------------------------------------------------------------------------------ transactions


def test_open_transaction_gives_conditional_append_retriable_error() -> None:
    talk = Talk(Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.snapshot(10, open_transactions=frozenset({5}))
    assert talk.answered(pending).error_code == NOT_LEADER


def test_log_end_is_reread_after_transactional_append() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(batch(b"t", producer=(5, 0, 0), transactional=True))
    assert talk.admitted(pending) is None
    talk.kafka(pending, base_offset=10)
    talk.accepted(pending, 10)
    talk.submit(expecting(11, b"a"))
    talk.next(g.ReadLogEnd)


def joins(talk: Talk, transactional_id: str = "app") -> None:
    talk.call("join", transactional_id, 9)
    assert talk.next(g.MayJoin) == g.MayJoin(9)


def test_joined_transaction_counts_until_coordinator_reports_its_end() -> None:
    talk = confirmed(10, Check.ON)
    joins(talk)
    talk.call("joined", "app", True)
    talk.now += 1
    first = talk.submit(expecting(10, b"a"))
    assert talk.effects[0] == g.ReadLogEnd(TP, ("app",))
    talk.snapshot(10, next_sequence=10)  # nothing was written: the leader knows of no transaction
    assert talk.answered(first).error_code == NOT_LEADER
    second = talk.submit(expecting(10, b"a"))
    assert talk.effects[0] == g.ReadLogEnd(TP, ("app",))
    talk.snapshot(11, next_sequence=10, ended_transactions=frozenset({"app"}))  # its marker lies at 10
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(second, in_log(batch(b"marker"), 10)))
    talk.mismatch(second, expected=10, actual=11)
    third = talk.submit(expecting(11, b"a"))
    if isinstance(talk.effects[0], g.ReadLogEnd):
        assert talk.effects[0] == g.ReadLogEnd(TP)
        talk.snapshot(11, next_sequence=10)
    assert talk.admitted(third) == g.Fence(SHARED, 0, 10)


@pytest.mark.parametrize("check", [Check.ON, Check.REQUIRED])
@pytest.mark.parametrize("answered", [True, False])
def test_appends_wait_while_a_marker_is_written(check: Check, answered: bool) -> None:
    talk = confirmed(10, check)
    sent = talk.submit(expecting(10, b"a"))
    talk.admitted(sent)
    talk.call("join", MARKER, 9)
    waiting = talk.submit(expecting(12, b"b"), wait=60)
    late = talk.submit(expecting(12, b"c"))
    talk.silent()  # a conditional append is in progress
    talk.kafka(sent, base_offset=10)
    talk.accepted(sent, 10)
    assert talk.next(g.MayJoin) == g.MayJoin(9)
    talk.silent()
    assert not talk.sequencer.may_take(replace(waiting), talk.now)
    if answered:
        talk.call("cancel", late)
    talk.call("joined", MARKER, answered)
    if not answered:
        talk.now += LIMITS.queued_seconds - 0.1
        talk.report(g.Tick())
        assert talk.answered(late).error_message == (
            "TRY_AGAIN a transaction marker is being written topic=orders partition=3"
        )
        talk.silent()  # it may still be written
        talk.now += 0.2
        talk.report(g.Tick())
    talk.snapshot(12, next_sequence=11)
    if check is Check.REQUIRED:  # no client has bypassed the proxy: no Violation
        talk.next(g.PublishBase)
        talk.report(g.BasePublished(True, ours=True))
        talk.snapshot(12, epoch=1, next_sequence=0, fence_base=(1, 12))
    assert talk.admitted(waiting) is not None


def test_log_end_read_during_marker_is_read_again() -> None:
    talk = Talk(Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.call("join", MARKER, 9)
    read = talk.effects.pop(0)
    assert talk.next(g.MayJoin) == g.MayJoin(9)
    talk.effects.append(read)
    talk.snapshot(10)
    talk.silent()
    talk.call("joined", MARKER, True)
    talk.snapshot(10)
    talk.admitted(pending)


def test_appends_wait_for_every_marker() -> None:
    talk = confirmed(10, Check.ON)
    for connection in (8, 9):
        talk.call("join", MARKER, connection)
        assert talk.next(g.MayJoin) == g.MayJoin(connection)
    talk.submit(expecting(12, b"a"))
    talk.call("joined", MARKER, True)
    assert talk.sequencer.in_transaction
    talk.silent()
    talk.call("joined", MARKER, True)
    assert not talk.sequencer.in_transaction
    talk.next(g.ReadLogEnd)


@pytest.mark.parametrize("fate", ["not answered yet", "lost a moment ago"])
def test_coordinator_that_may_not_know_is_not_trusted(fate: str) -> None:
    talk = confirmed(10, Check.ON)
    joins(talk)
    if fate == "lost a moment ago":
        talk.call("joined", "app", False)
    pending = talk.submit(expecting(10, b"a"))
    talk.snapshot(10, next_sequence=10, ended_transactions=frozenset({"app"}))
    assert talk.answered(pending).error_code == NOT_LEADER


def test_coordinator_response_older_than_the_join_is_ignored() -> None:
    talk = confirmed(10, Check.ON)
    joins(talk)
    pending = talk.submit(expecting(10, b"a"))
    queried_at = talk.now
    talk.now += 0.1
    talk.call("joined", "app", True)  # while the log end is still being read
    talk.now += 0.1
    talk.snapshot(10, next_sequence=10, ended_transactions=frozenset({"app"}), transactions_as_of=queried_at)
    assert talk.answered(pending).error_code == NOT_LEADER


def test_fence_is_unconfirmed_while_a_transaction_may_exist() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.call("join", "app", 1)
    talk.kafka(pending, base_offset=10)
    talk.accepted(pending, 10)
    talk.next(g.MayJoin)
    talk.submit(expecting(11, b"b"))
    talk.next(g.ReadLogEnd)


def test_an_unconditional_append_does_not_wait_for_transactions() -> None:
    talk = confirmed(10, Check.ON)
    joins(talk)
    unconditional = talk.submit(batch(b"x"))
    talk.snapshot(10, next_sequence=10, open_transactions=frozenset({4}))
    assert talk.admitted(unconditional) == g.Fence(SHARED, 0, 10)


def test_transactions_are_refused_where_expectations_are_required() -> None:
    talk = confirmed(10)
    result = talk.answered(talk.submit(expecting(10, b"t", producer=(5, 0, 0), transactional=True)))
    assert result.error_code == POLICY_VIOLATION
    assert "TRANSACTIONS_NOT_SUPPORTED" in (result.error_message or "")


_STARTED_MS = int(time.time() * 1000)  # a retry has the timestamps of its first try


def within(expected: int | None, *values: bytes, producer: tuple[int, int, int] = (5, 0, 0)) -> memoryview:
    """A batch of a transaction."""
    if expected is None:
        return batch(*values, producer=producer, transactional=True, timestamp_ms=_STARTED_MS)
    return expecting(expected, *values, producer=producer, transactional=True, timestamp_ms=_STARTED_MS)


def written_by_another(talk: Talk, at: int = 10) -> None:
    """Transaction `other`, of producer 4, has a record at `at`."""
    pending = talk.submit(within(None, b"o", producer=(4, 0, 0)), within="other", connection=9)
    talk.admitted(pending)
    talk.kafka(pending, base_offset=at)
    talk.accepted(pending, at)


def test_transaction_without_appends_retries_while_another_has_records() -> None:
    talk = confirmed(10, Check.ON)
    written_by_another(talk)
    pending = talk.submit(within(11, b"t"), within="app")
    talk.snapshot(11, open_transactions=frozenset({4}))
    assert talk.answered(pending).error_code == NOT_LEADER


def test_transaction_with_appends_conflicts_with_another_one() -> None:
    talk = confirmed(10, Check.ON)
    written_by_another(talk)
    pending = talk.submit(within(11, b"t"), within="app", owns=True)
    talk.snapshot(11, open_transactions=frozenset({4}))
    result = talk.answered(pending)
    assert result.error_code == POLICY_VIOLATION
    assert (result.error_message or "").startswith("TRANSACTION_CONFLICT topic=orders partition=3: ")
    assert result.base_offset == -1


def test_transaction_that_only_joined_delays_no_other() -> None:
    """Two that have joined each other's partitions would both wait, and neither has written anything yet."""
    talk = confirmed(10, Check.ON)
    joins(talk, "other")
    talk.call("joined", "other", True)
    pending = talk.submit(within(10, b"t"), within="app", owns=True)
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(pending) is None
    talk.kafka(pending, base_offset=10)
    talk.accepted(pending, 10)


def test_marker_of_own_previous_transaction_is_waited_for() -> None:
    """Kafka answers EndTxn before it writes the markers."""
    talk = confirmed(10, Check.ON)
    for _ in range(2):
        pending = talk.submit(within(10, b"t"), within="app")
        talk.snapshot(10, next_sequence=10, ending_transactions=frozenset({"app"}))  # read again for each
        assert talk.answered(pending).error_code == NOT_LEADER


def test_transaction_with_appends_waits_for_an_ending_one() -> None:
    """The ending transaction waits for no other. Its markers are appended to one partition after the other."""
    talk = confirmed(10, Check.ON)
    written_by_another(talk)
    pending = talk.submit(within(12, b"t"), within="app", owns=True)
    more = {"open_transactions": frozenset({4}), "ending_transactions": frozenset({"other"})}
    talk.snapshot(11, **more)
    assert talk.answered(pending).error_code == NOT_LEADER
    pending = talk.submit(within(12, b"t"), within="app", owns=True)
    talk.snapshot(11, **more | {"open_transactions": frozenset({4, 6})})  # another transaction is open, too
    assert talk.answered(pending).error_code == POLICY_VIOLATION


def test_joined_and_ending_transaction_is_waited_for() -> None:
    """The ending transaction waits for no other, and its marker is on its way."""
    talk = confirmed(10, Check.ON)
    joins(talk, "other")
    talk.call("joined", "other", True)
    pending = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10, ending_transactions=frozenset({"other"}))
    assert talk.answered(pending).error_code == NOT_LEADER


def test_transaction_with_refused_append_has_no_records_here() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(within(None, b"o", producer=(4, 0, 7)), within="other", connection=9)
    talk.admitted(pending)
    talk.kafka(pending, 45)
    assert talk.answered(pending).error_code == 45
    mine = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(mine) is None


def test_transaction_with_lost_append_is_waited_for() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(within(None, b"o", producer=(4, 0, 0)), within="other", connection=9)
    talk.admitted(pending)
    talk.call("lost", pending)
    assert talk.answered(pending).error_code == TIMED_OUT
    mine = talk.submit(within(10, b"t"), within="app", wait=1.0)
    talk.now += 1.1
    talk.report(g.Tick())
    assert talk.answered(mine).error_code == NOT_LEADER
    talk.now += 40
    mine = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(mine) is None


def test_transaction_delays_no_append_after_its_marker() -> None:
    talk = confirmed(10, Check.ON)
    written_by_another(talk)
    talk.now += 1
    pending = talk.submit(within(12, b"t"), within="app", owns=True)
    assert talk.effects[0] == g.ReadLogEnd(TP, ("other", "app"))
    talk.snapshot(12, next_sequence=10, ended_transactions=frozenset({"other"}))
    assert talk.admitted(pending) is None
    talk.kafka(pending, base_offset=12)
    talk.accepted(pending, 12)
    # And what it wrote is no news of its next transaction, which has only joined.
    joins(talk, "other")
    talk.call("joined", "other", True)
    more = talk.submit(within(13, b"t", producer=(5, 0, 1)), within="app", owns=True)
    talk.snapshot(13, next_sequence=10, open_transactions=frozenset({5}))
    assert talk.admitted(more) is None


INVALID_PRODUCER_ID_MAPPING = 49


@pytest.mark.parametrize("expected", [10, 11, 17, 3])
def test_foreign_producer_id_in_a_transaction_is_refused(expected: int) -> None:
    """A client with another transactional id uses the producer id of an open transaction. The answer is that of Kafka's
    coordinator, without the log end offset. Kafka would have added the batch to the open transaction."""
    talk = confirmed(10, Check.ON)
    mine = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10, producer_ids={"app": 5})
    assert talk.admitted(mine) is None
    talk.kafka(mine, base_offset=10)
    talk.accepted(mine, 10)
    talk.now += 1
    theirs = talk.submit(within(expected, b"t", producer=(5, 0, 1)), within="others")
    talk.snapshot(11, next_sequence=10, open_transactions=frozenset({5}), producer_ids={"app": 5, "others": 6})
    result = talk.answered(theirs)
    assert (result.error_code, result.base_offset) == (INVALID_PRODUCER_ID_MAPPING, -1)
    assert "ANOTHERS_PRODUCER" in str(result.error_message)
    more = talk.submit(within(11, b"t", producer=(5, 0, 1)), within="app")
    assert talk.admitted(more) is None


def test_unknown_producer_id_is_left_to_kafka() -> None:
    """Its coordinator does not know it, is away, or about to give it another producer id: then Kafka is to decide."""
    talk = confirmed(10, Check.ON)
    mine = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10, producer_ids={"app": -1})
    assert talk.admitted(mine) is None


def test_producer_id_is_known_per_transactional_id() -> None:
    talk = confirmed(10, Check.ON)
    first = talk.submit(within(17, b"t", producer=(6, 0, 0)), within="others")
    second = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10, producer_ids={"others": 6})
    talk.mismatch(first, expected=17, actual=10)
    assert talk.effects[0] == g.ReadLogEnd(TP, ("app",))
    talk.snapshot(10, next_sequence=10, producer_ids={"app": 6})
    assert talk.answered(second).error_code == INVALID_PRODUCER_ID_MAPPING


def test_transaction_waits_bounded_time_with_other_instances() -> None:
    """What it owns by them is not known here."""
    talk = confirmed(10, Check.ON)
    written_by_another(talk)
    talk.alone = False
    codes = []
    for _ in range(5):
        pending = talk.submit(within(11, b"t"), within="app")
        talk.snapshot(11, open_transactions=frozenset({4}))
        codes.append(talk.answered(pending).error_code)
        talk.now += 3
    assert codes == [NOT_LEADER] * 4 + [POLICY_VIOLATION]
    # A later append waits again.
    talk.now += 3
    pending = talk.submit(within(11, b"t"), within="app")
    talk.snapshot(11, open_transactions=frozenset({4}))
    assert talk.answered(pending).error_code == NOT_LEADER


def test_taken_offset_is_refused_despite_open_transactions() -> None:
    talk = confirmed(10, Check.ON)
    written_by_another(talk)
    pending = talk.submit(within(9, b"t"), within="app")
    talk.snapshot(11, open_transactions=frozenset({4}))
    talk.mismatch(pending, expected=9, actual=11)


# ---- a retry within a transaction


def lost_at_ten(talk: Talk) -> memoryview:
    """A batch of transaction `app`, expecting 10, that ended unknown."""
    records = within(10, b"t", b"u")
    pending = talk.submit(records, within="app")
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(pending) is None
    talk.call("lost", pending)
    assert talk.answered(pending).error_code == TIMED_OUT
    return records


def own(at: int, producer: tuple[int, int, int] = (5, 0, 0), *values: bytes) -> g.Found:
    return in_log(within(10, *(values or (b"t", b"u")), producer=producer), at, g.Fence(*producer))


def in_transaction(next_sequence: int, epoch: int = 0) -> dict[str, Any]:
    return {
        "open_transactions": frozenset({5}),
        "in_transaction": {5: g.ProducerState(epoch, next_sequence)},
    }


def test_retry_of_appended_transactional_batch_succeeds() -> None:
    """And does not wait until its first try can be in no queue any more."""
    talk = confirmed(10, Check.ON)
    records = lost_at_ten(talk)
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(12, next_sequence=10, **in_transaction(2))
    assert talk.next(g.ReadBatch) == g.ReadBatch(again, 10)
    talk.report(g.BatchRead(again, own(10)))
    talk.accepted(again, 10)


@pytest.mark.parametrize(
    "there",
    [own(10, (5, 0, 2)), own(10, (5, 1, 0)), own(10, (6, 0, 0)), own(10, (5, 0, 0), b"t", b"v")],
    ids=["another sequence", "another epoch", "another producer", "other records"],
)
def test_different_batch_at_the_offset_is_no_success(there: g.Found) -> None:
    talk = confirmed(10, Check.ON)
    records = lost_at_ten(talk)
    talk.now += 40  # its first try sits in no queue any more
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(12, next_sequence=10)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(again, there))
    talk.mismatch(again, expected=10, actual=12)


def test_retry_appended_elsewhere_is_reported_as_violation() -> None:
    talk = confirmed(10, Check.ON)
    records = lost_at_ten(talk)
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(14, next_sequence=10, **in_transaction(2))
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(again, in_log(batch(b"another's"), 10)))
    assert talk.admitted(again) is None  # sent again: for Kafka it is a duplicate
    talk.kafka(again, base_offset=12, log_append_time_ms=7)
    assert talk.next(g.ReadBatch) == g.ReadBatch(again, 12)
    talk.report(g.BatchRead(again, own(12)))
    assert talk.next(g.ReadBatch) == g.ReadBatch(again, 10)
    talk.report(g.BatchRead(again, in_log(batch(b"another's"), 10)))
    talk.next(g.Violation)
    result = talk.answered(again)
    assert (result.error_code, result.base_offset) == (POLICY_VIOLATION, 12)
    assert "OFFSET_VIOLATION" in (result.error_message or "")


def test_violation_by_a_marker_names_the_marker() -> None:
    """The marker ends a transaction that joined and wrote nothing. No append waits for such a transaction."""
    talk = confirmed(10, Check.ON)
    pending = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10)
    talk.admitted(pending)
    talk.kafka(pending, base_offset=11)
    talk.next(g.ReadBatch)
    marker = bytearray(in_log(batch(b"marker"), 10, g.Fence(4, 0, -1)).batch)
    marker[22] |= 0x30
    talk.report(g.BatchRead(pending, g.Found(memoryview(bytes(marker)))))
    result = talk.answered(pending)
    assert result.error_code == POLICY_VIOLATION
    assert "OFFSET_VIOLATION" in (result.error_message or "")
    assert "marker" in (result.error_message or "")


def test_mismatch_after_forgotten_sequence_is_possibly_yours() -> None:
    talk = confirmed(10, Check.ON)
    records = lost_at_ten(talk)
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(14, next_sequence=10, **in_transaction(4))
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(again, in_log(batch(b"another's"), 10)))
    talk.admitted(again)
    talk.kafka(again, 45)
    assert "POSSIBLY_YOURS" in talk.mismatch(again, expected=10, actual=14)


@pytest.mark.parametrize(
    "state", [in_transaction(0), in_transaction(2, epoch=1), {}], ids=["not come to it", "of another epoch", "unknown"]
)
def test_unknown_batch_at_taken_offset_is_refused(state: dict[str, Any]) -> None:
    talk = confirmed(10, Check.ON)
    records = lost_at_ten(talk)
    talk.now += 40  # its first try sits in no queue any more
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(14, next_sequence=10, **state)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(again, in_log(batch(b"another's"), 10)))
    talk.mismatch(again, expected=10, actual=14)


def test_refusal_waits_while_earlier_try_may_be_queued() -> None:
    """The queued attempt could be appended after the refusal, in the producer's next transaction of the same epoch."""
    talk = confirmed(10, Check.ON)
    records = lost_at_ten(talk)
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(14, next_sequence=10)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(again, in_log(batch(b"another's"), 10)))
    assert talk.answered(again).error_code == NOT_LEADER


def duplicate_at_ten(talk: Talk) -> g.PendingAppend:
    pending = talk.submit(within(10, b"t", b"u"), within="app")
    talk.snapshot(10, next_sequence=10)
    talk.admitted(pending)
    talk.kafka(pending, base_offset=10, log_append_time_ms=7)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    return pending


def test_what_kafka_calls_a_duplicate_is_read_back() -> None:
    talk = confirmed(10, Check.ON)
    pending = duplicate_at_ten(talk)
    talk.report(g.BatchRead(pending, own(10)))
    talk.accepted(pending, 10)


def test_duplicate_of_an_earlier_batch_is_sequence_taken() -> None:
    """One of a transaction that was aborted while it sat in a queue, under transactions v1."""
    talk = confirmed(10, Check.ON)
    pending = duplicate_at_ten(talk)
    talk.report(g.BatchRead(pending, own(10, (5, 0, 0), b"o", b"p")))
    result = talk.answered(pending)
    assert result.error_code == POLICY_VIOLATION
    assert (result.error_message or "").startswith("SEQUENCE_TAKEN topic=orders partition=3 offset=10: ")


def unconditional_duplicate_at_seven(talk: Talk) -> g.PendingAppend:
    pending = talk.submit(within(None, b"t", b"u"), within="app")
    talk.admitted(pending)
    talk.kafka(pending, base_offset=7, log_append_time_ms=7)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 7)
    return pending


def test_unconditional_duplicate_of_earlier_batch_is_sequence_taken() -> None:
    """Kafka answers 0 with the offset of the other batch. If the proxy relayed that, the record would be lost."""
    talk = confirmed(10, Check.ON)
    pending = unconditional_duplicate_at_seven(talk)
    talk.report(g.BatchRead(pending, own(7, (5, 0, 0), b"o", b"p")))
    assert "SEQUENCE_TAKEN" in (talk.answered(pending).error_message or "")


def test_unconditional_retry_known_to_kafka_is_read_back() -> None:
    talk = confirmed(10, Check.ON)
    pending = unconditional_duplicate_at_seven(talk)
    talk.report(g.BatchRead(pending, in_log(within(None, b"t", b"u"), 7, g.Fence(5, 0, 0))))
    talk.accepted(pending, 7)


def test_duplicate_of_a_batch_elsewhere_is_sequence_taken() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(within(10, b"t", b"u"), within="app")
    talk.snapshot(10, next_sequence=10)
    talk.admitted(pending)
    talk.kafka(pending, base_offset=7, log_append_time_ms=7)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 7)
    talk.report(g.BatchRead(pending, own(7, (5, 0, 0), b"o", b"p")))
    assert "SEQUENCE_TAKEN" in (talk.answered(pending).error_message or "")


def test_unreadable_duplicate_becomes_unknown() -> None:
    talk = confirmed(10, Check.ON)
    pending = duplicate_at_ten(talk)
    for _ in range(2):
        talk.report(g.BatchRead(pending, g.Unreadable("the leader is moving")))
        talk.silent()
        talk.now += 1
        talk.report(g.Tick())
        assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    talk.now += 10
    talk.report(g.Tick())
    assert talk.answered(pending).error_code == TIMED_OUT


def test_later_appends_wait_for_acknowledged_transactional_retry() -> None:
    talk = confirmed(10, Check.ON)
    records = lost_at_ten(talk)
    later = talk.submit(within(12, b"v", producer=(5, 0, 2)), within="app", wait=1.0, owns=True)
    talk.silent()
    talk.now += 1.1
    talk.report(g.Tick())
    assert talk.answered(later).error_code == NOT_LEADER
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(again) is None
    talk.kafka(again, base_offset=10)
    talk.accepted(again, 10)
    later = talk.submit(within(12, b"v", producer=(5, 0, 2)), within="app", wait=1.0, owns=True)
    talk.snapshot(12, next_sequence=10, **in_transaction(2))
    assert talk.admitted(later) is None


# ---- a transaction joins


@pytest.mark.parametrize("way", ["by events", "fast path"])
def test_join_waits_for_fenced_appends_in_flight(way: str) -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.call("join", "app", 7)
    talk.silent()
    if way == "fast path":
        assert not talk.sequencer.may_complete(pending, PartitionResult(TP.partition, 0, 10))
    talk.kafka(pending, base_offset=10)
    talk.accepted(pending, 10)
    assert talk.next(g.MayJoin) == g.MayJoin(7)


def test_join_waits_for_in_doubt_appends() -> None:
    """Otherwise the marker takes the offset at which the sequencer looks for the in-doubt batch: the client gets 44,
    and Kafka appends the batch after the marker."""
    talk = confirmed(10, Check.ON)
    records = expecting(10, b"a")
    pending = talk.submit(records)
    fence = talk.admitted(pending)
    talk.call("join", "app", 7)
    talk.call("lost", pending)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    talk.silent()
    assert fence is not None
    talk.report(g.BatchRead(pending, in_log(records, 10, fence)))
    talk.next(g.Answer)
    assert talk.next(g.MayJoin) == g.MayJoin(7)


def test_unfenced_append_does_not_delay_a_join() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(batch(b"x", producer=(8, 0, 0)))
    talk.admitted(pending)
    talk.call("join", "app", 7)
    assert talk.next(g.MayJoin) == g.MayJoin(7)


def test_fenced_conditional_appends_wait_for_a_pending_join() -> None:
    talk = confirmed(10, Check.ON)
    first = talk.submit(expecting(10, b"a"))
    talk.admitted(first)
    talk.call("join", "app", 7)
    second = talk.submit(expecting(11, b"b"))
    talk.silent()
    talk.kafka(first, base_offset=10)
    talk.accepted(first, 10)
    talk.next(g.MayJoin)
    talk.snapshot(
        11, next_sequence=11, ended_transactions=frozenset({"app"})
    )  # it has not been sent to its coordinator
    assert talk.answered(second).error_code == NOT_LEADER


def test_admission_before_a_join_expires() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.next(g.Admit)  # and waits for another partition of its request
    assert talk.sequencer.may_send(pending, talk.now)
    talk.call("join", "app", 7)
    assert talk.next(g.MayJoin) == g.MayJoin(7)
    assert not talk.sequencer.may_send(pending, talk.now)


def test_abandoned_join_is_not_notified_later() -> None:
    talk = confirmed(10, Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.call("join", "app", 7)
    talk.call("joined", "app", True)
    talk.kafka(pending, base_offset=10)
    talk.accepted(pending, 10)
    talk.silent()


# ----------------------------------------------------------------------------------------------------- time and bounds


def test_unreadable_log_end_is_retried_until_timeout() -> None:
    talk = Talk()
    pending = talk.submit(expecting(10, b"a"), wait=1.0)
    for _ in range(3):
        talk.next(g.ReadLogEnd)
        talk.report(g.LogEndUnknown("the leader is moving"))
        talk.silent()
        talk.now += 0.2
        talk.report(g.Tick())
    talk.now += 1.0
    talk.effects.clear()
    talk.report(g.Tick())
    assert talk.answered(pending).error_code == NOT_LEADER


def test_missing_partition_is_refused_at_once() -> None:
    talk = Talk()
    pending_appends = [talk.submit(expecting(10, b"a"), connection=i) for i in range(2)]
    talk.next(g.ReadLogEnd)
    talk.report(g.LogEndUnknown("there is no such partition", 3))
    assert [talk.answered(pending).error_code for pending in pending_appends] == [3, 3]
    assert talk.sequencer.idle


def test_the_queue_is_bounded() -> None:
    talk = Talk(sequencer=PartitionSequencer(TP, g.SequencerLimits(queue_max=2)))
    for _ in range(2):
        talk.submit(expecting(10, b"a"))
    talk.next(g.ReadLogEnd)
    result = talk.answered(talk.submit(expecting(10, b"a")))
    assert result.error_code == NOT_LEADER
    assert "queue is full" in (result.error_message or "")


def test_appends_are_admitted_in_submission_order() -> None:
    talk = confirmed(10)
    first = talk.submit(expecting(10, b"a"), connection=1)
    talk.admitted(first)
    waiting = [talk.submit(expecting(11 + i, b"x"), connection=2 + i) for i in range(3)]
    talk.kafka(first, base_offset=10)
    talk.accepted(first, 10)
    for i, pending in enumerate(waiting):
        talk.admitted(pending)
        talk.silent()
        talk.kafka(pending, base_offset=11 + i)
        talk.accepted(pending, 11 + i)


def test_retry_keeps_original_producer_after_later_fenced_append() -> None:
    talk = confirmed(10, Check.ON)
    own = talk.submit(batch(b"x", producer=(5, 0, 0)))
    assert talk.admitted(own) is None
    talk.kafka(own, base_offset=10)
    talk.accepted(own, 10)  # the answer does not reach its client
    fenced = talk.submit(expecting(11, b"a", producer=(5, 0, 1)))
    assert talk.admitted(fenced) == g.Fence(SHARED, 0, 10)
    talk.kafka(fenced, base_offset=11)
    talk.accepted(fenced, 11)
    retry = talk.submit(batch(b"x", producer=(5, 0, 0)), connection=2)
    assert talk.admitted(retry) is None  # Kafka knows it by its sequence
    assert retry.kind is g.AppendMode.PASS_THROUGH
    talk.kafka(retry, base_offset=10, log_append_time_ms=now_ms())
    talk.accepted(retry, 10)
    assert talk.admitted(talk.submit(batch(b"y", producer=(5, 0, 2)))) == g.Fence(SHARED, 0, 11)


def test_idempotent_unconditional_appends_run_together_unfenced() -> None:
    talk = confirmed(10, Check.ON)
    pending_appends = [talk.submit(batch(b"x", producer=(5 + i, 0, 0)), connection=i) for i in range(3)]
    for pending in pending_appends:
        assert talk.admitted(pending) is None
    conditional = talk.submit(expecting(13, b"a"), connection=9)
    talk.silent()
    for i in (1, 0, 2):  # answered in another order than sent
        talk.kafka(pending_appends[i], base_offset=10 + i)
        talk.accepted(pending_appends[i], 10 + i)
    assert talk.admitted(conditional) == g.Fence(SHARED, 0, 10)


def test_lost_idempotent_append_is_resent_before_others() -> None:
    talk = confirmed(10, Check.ON)
    talk.may_write = True
    own = talk.submit(batch(b"x", producer=(5, 0, 0)))
    talk.admitted(own)
    talk.call("lost", own)
    assert talk.next(g.Resend).pending is own
    conditional = talk.submit(expecting(11, b"a"), connection=2)
    talk.silent()
    talk.report(g.Resent(own, None))
    talk.now += 0.1
    talk.report(g.Tick())
    assert talk.next(g.Resend).pending is own
    talk.report(g.Resent(own, PartitionResult(3, 0, 10)))
    talk.accepted(own, 10)
    talk.snapshot(11, next_sequence=10)
    assert talk.admitted(conditional) == g.Fence(SHARED, 0, 10)


@pytest.mark.parametrize("fate", ["unknown", "an error on the resend", "an error"])
def test_lost_idempotent_append_after_failure_is_not_resent(fate: str) -> None:
    """Kafka finds the gap only if it knows this producer; else it would take the second without the first."""
    talk = confirmed(10, Check.ON)
    talk.may_write = True
    first, second = (talk.submit(batch(b"x", producer=(5, 0, each))) for each in range(2))
    talk.admitted(first)
    talk.admitted(second)
    if fate == "an error":
        talk.kafka(first, TOO_LARGE)
        assert talk.answered(first).error_code == TOO_LARGE
        talk.call("lost", second)
        assert talk.answered(second).error_code == TIMED_OUT
        return
    talk.call("lost", first)
    talk.call("lost", second)
    assert talk.next(g.Resend).pending is first
    talk.now += LIMITS.resolve_seconds
    talk.report(g.Resent(first, None if fate == "unknown" else PartitionResult(3, TOO_LARGE)))
    assert {talk.next(g.Answer).pending for _ in range(2)} == {first, second}
    talk.silent()


@pytest.mark.parametrize("error", [19, 6, 3, 7])
def test_retriable_resend_error_is_retried(error: int) -> None:
    talk = confirmed(10, Check.ON)
    talk.may_write = True
    own = talk.submit(batch(b"x", producer=(5, 0, 0)))
    talk.admitted(own)
    talk.call("lost", own)
    talk.next(g.Resend)
    talk.report(g.Resent(own, PartitionResult(3, error)))
    talk.silent()  # the first send may still be in the log: Kafka answers 19 before it looks for duplicates
    talk.now += 0.1
    talk.report(g.Tick())
    talk.next(g.Resend)


@pytest.mark.parametrize("error", [TOO_LARGE, OLD_TIMESTAMP, OUT_OF_ORDER, WRONG_EPOCH])
def test_resend_error_leaves_the_first_send_unknown(error: int) -> None:
    talk = confirmed(10, Check.ON)
    talk.may_write = True
    own = talk.submit(batch(b"x", producer=(5, 0, 0)))
    talk.admitted(own)
    talk.call("lost", own)
    talk.next(g.Resend)
    talk.report(g.Resent(own, PartitionResult(3, error)))
    assert talk.answered(own).error_code == TIMED_OUT


@pytest.mark.parametrize("conditional", [True, False])
def test_retry_of_a_waiting_append_is_appended_once(conditional: bool) -> None:
    talk = confirmed(10, Check.ON)
    talk.append(10, b"x")
    named = talk.submit(expecting(11, b"a", producer=(5, 0, 0)))
    talk.admitted(named)
    talk.kafka(named, base_offset=11)
    talk.accepted(named, 11)
    records = expecting(13, b"b", producer=(5, 0, 1)) if conditional else batch(b"b", producer=(5, 0, 1))
    ahead = talk.submit(expecting(12, b"c"), connection=2)
    talk.admitted(ahead)
    first = talk.submit(records)
    again = talk.submit(records, connection=3)
    talk.silent()  # both wait for the other connection's append
    talk.kafka(ahead, base_offset=12)
    talk.accepted(ahead, 12)
    talk.admitted(first)
    talk.kafka(first, base_offset=13)
    talk.accepted(first, 13)
    talk.accepted(again, 13)
    talk.silent()


def test_duplicate_waiter_replaces_a_canceled_first_try() -> None:
    talk = confirmed(10)
    records = expecting(10, b"a", producer=(5, 0, 0))
    first = talk.submit(records)
    talk.admitted(first)
    talk.call("lost", first)
    talk.next(g.ReadBatch)
    again = talk.submit(records, connection=2)
    talk.silent()
    # Another process appended there, and its batch was truncated: the first attempt would be sent again.
    talk.report(g.BatchRead(first, in_log(expecting(10, b"another's"), 10)))
    talk.snapshot(10, next_sequence=10)
    assert talk.next(g.Admit).pending is first
    talk.call("cancel", first)
    assert talk.admitted(again) == g.Fence(SHARED, 0, 10)
    talk.kafka(again, base_offset=10)
    talk.accepted(again, 10)


def test_duplicate_waiter_of_a_resubmitted_append_is_cancelable() -> None:
    talk, first = in_doubt()
    retry = talk.submit(first.records, connection=2)
    theirs = in_log(expecting(10, b"theirs"), 10, g.Fence(SHARED, 0, 10, 8))
    talk.report(g.BatchRead(first, theirs))
    talk.call("cancel", retry)
    talk.snapshot(11, next_sequence=11)
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(first, theirs))
    talk.mismatch(first, expected=10, actual=11)
    talk.silent()


def test_conditional_append_hides_predecessors_error_45() -> None:
    talk = confirmed(10, Check.ON)
    own = talk.submit(batch(b"x", producer=(5, 0, 7)))
    talk.admitted(own)
    later = talk.submit(expecting(11, b"a", producer=(5, 0, 8)))
    talk.kafka(own, OUT_OF_ORDER)
    assert talk.answered(own).error_code == OUT_OF_ORDER  # Kafka's own word, and its own business
    result = talk.answered(later)
    assert result.error_code == POLICY_VIOLATION
    assert result.error_message == "PREDECESSOR_FAILED error 45"


def test_in_doubt_append_after_failed_batch_fails_too() -> None:
    talk = confirmed(10, Check.ON)
    first, second = talk.submit(batch(b"a")), talk.submit(expecting(11, b"b"))
    talk.admitted(first)
    talk.admitted(second)
    talk.call("lost", second)
    talk.kafka(first, TOO_LARGE)
    assert talk.answered(first).error_code == TOO_LARGE
    assert talk.next(g.ReadBatch) == g.ReadBatch(second, 11)
    talk.report(g.BatchRead(second, in_log(batch(b"theirs"), 11)))
    assert talk.answered(second).error_code == TOO_LARGE


def test_an_unconditional_batch_does_not_fall_with_another() -> None:
    """Neither has a producer id: Kafka would answer each for itself."""
    talk = confirmed(10, Check.ON)
    first, second = talk.submit(batch(b"a")), talk.submit(batch(b"b"))
    for pending in (first, second):
        talk.admitted(pending)
    talk.kafka(first, TOO_LARGE)
    assert talk.answered(first).error_code == TOO_LARGE
    talk.kafka(second, OUT_OF_ORDER)  # its fence was that of a successor
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(second).base_sequence == 10
    talk.kafka(second, base_offset=10)
    talk.accepted(second, 10)


def test_admitted_append_fails_with_its_pipeline() -> None:
    talk = confirmed(10)
    first = talk.submit(expecting(10, b"a", producer=(5, 0, 0)))
    talk.admitted(first)
    second = talk.submit(expecting(11, b"b", producer=(5, 0, 1)))
    assert talk.next(g.Admit).pending is second
    assert talk.sequencer.may_send(second, talk.now)
    talk.kafka(first, TOO_LARGE)
    assert talk.answered(first).error_code == TOO_LARGE
    assert not talk.sequencer.may_send(second, talk.now)
    talk.call("cancel", second)
    talk.call("submit", second)
    assert talk.answered(second).error_code == TOO_LARGE


def test_append_after_a_canceled_resubmission_fails_too() -> None:
    talk = confirmed(10, Check.ON)
    first, second = talk.submit(batch(b"a")), talk.submit(expecting(11, b"b"))
    for pending in (first, second):
        talk.admitted(pending)
    for pending in (first, second):
        talk.kafka(pending, OUT_OF_ORDER)
    talk.snapshot(10, next_sequence=10)
    assert talk.next(g.Admit).pending is first
    talk.call("cancel", first)  # the client's next request is half sent, say
    assert talk.answered(second).error_code == NOT_LEADER


def test_unused_fence_is_not_kept() -> None:
    """A canceled append is submitted again after its producer was forgotten: the old fence would not be compared."""
    talk = confirmed(10, Check.ON)
    fenced = talk.submit(expecting(10, b"a", producer=(5, 0, 0)))
    talk.admitted(fenced)
    talk.kafka(fenced, base_offset=10)
    talk.accepted(fenced, 10)
    unconditional = talk.submit(batch(b"b", producer=(5, 0, 1)))
    assert talk.next(g.Admit).pending is unconditional
    talk.report(g.Forget())
    talk.call("cancel", unconditional)
    talk.call("submit", unconditional)
    assert talk.admitted(unconditional) is None


def test_forgetting_drops_log_end_and_pending_reads() -> None:
    talk = Talk()
    pending = talk.submit(expecting(10, b"a"))
    assert isinstance(talk.effects[0], g.ReadLogEnd)
    talk.report(g.Forget())
    talk.snapshot(7)  # requested before the topic was created again
    talk.snapshot(0)
    talk.mismatch(pending, expected=10, actual=0)


@pytest.mark.parametrize("same_log", [True, False])
def test_config_change_keeps_retry_detection(same_log: bool) -> None:
    talk = confirmed(10, Check.ON)
    records = unresolved(talk)
    talk.report(g.Forget(same_log))
    retry = talk.submit(records, connection=2)
    if same_log:
        assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 11)
    else:
        assert retry.kind is g.AppendMode.PASS_THROUGH  # of another topic nothing is known


def test_append_has_defaults_without_a_sequencer() -> None:
    """`Append` has sensible defaults: a policy can be tried in a line."""
    assert Append("t", 0, 1, None).producer_id == -1


# ------------------------------------------------------------------------------------ errors that Kafka gives each time

SERVER_ERROR = -1


def failed(talk: Talk) -> g.PendingAppend:
    """Kafka has answered an append that expects 10 with -1, and nothing lies there."""
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.kafka(pending, SERVER_ERROR)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    return pending


def resent(talk: Talk, pending: g.PendingAppend, error: int = SERVER_ERROR) -> None:
    talk.snapshot(10, next_sequence=10)
    assert talk.next(g.Resend).pending is pending
    talk.report(g.Resent(pending, PartitionResult(3, error)))


def test_repeated_error_is_final_if_log_is_unchanged() -> None:
    talk = confirmed(10)
    talk.may_write = True
    pending = failed(talk)
    other = talk.submit(expecting(10, b"b"), connection=2)
    resent(talk, pending)
    assert talk.next(g.ReadBatch) == g.ReadBatch(pending, 10)  # after the second answer, at once
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    talk.snapshot(10, next_sequence=10)
    assert talk.answered(pending) == PartitionResult(3, SERVER_ERROR)
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(other) == g.Fence(SHARED, 0, 10)


@pytest.mark.parametrize("there", ["in the log", "not replicated yet", "by its sequence"])
def test_repeated_error_is_not_final_if_append_exists(there: str) -> None:
    talk = confirmed(10)
    talk.may_write, talk.instance_id = True, 7
    pending = failed(talk)
    resent(talk, pending)
    talk.next(g.ReadBatch)
    if there == "in the log":
        talk.report(g.BatchRead(pending, in_log(pending.records, 10, pending.fence)))
        talk.accepted(pending, 10)
        return
    talk.report(g.BatchRead(pending, g.NotYet(11 if there == "not replicated yet" else 10)))
    if there == "by its sequence":
        talk.snapshot(10, next_sequence=11)
        assert talk.answered(pending).error_code == TIMED_OUT
    talk.silent()


def test_different_second_error_is_not_final() -> None:
    talk = confirmed(10)
    talk.may_write = True
    pending = failed(talk)
    resent(talk, pending, error=56)
    talk.silent()
    talk.now += 0.1
    talk.report(g.Tick())
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    resent(talk, pending)
    talk.silent()


def test_repeated_error_after_lost_try_is_unknown() -> None:
    talk = confirmed(10)
    talk.may_write = True
    pending = talk.submit(expecting(10, b"a"))
    talk.admitted(pending)
    talk.call("lost", pending)
    for _ in range(2):
        talk.next(g.ReadBatch)
        talk.report(g.BatchRead(pending, g.NotYet(10)))
        resent(talk, pending)
        talk.now += 0.1
        talk.report(g.Tick())
    talk.next(g.ReadBatch)
    talk.report(g.BatchRead(pending, g.NotYet(10)))
    talk.snapshot(10, next_sequence=10)
    assert talk.answered(pending).error_code == TIMED_OUT  # the first try may be queued, and appended later


def test_error_is_final_without_proven_write_permission() -> None:
    talk = confirmed(10, Check.ON)
    pending = failed(talk)
    talk.snapshot(10, next_sequence=10)
    assert talk.answered(pending) == PartitionResult(3, SERVER_ERROR)
    talk.submit(batch(b"x", producer=(5, 0, 0)), connection=2)
    talk.next(g.Admit)  # nothing is queued that it would have to wait for


def test_unconditional_append_error_is_relayed() -> None:
    talk = confirmed(10, Check.ON)
    talk.may_write = True
    own = talk.submit(batch(b"x", producer=(5, 0, 0)))
    talk.admitted(own)
    talk.kafka(own, SERVER_ERROR)
    assert talk.answered(own) == PartitionResult(3, SERVER_ERROR)
    conditional = talk.submit(expecting(10, b"a"), connection=2)
    talk.snapshot(10, next_sequence=10)
    talk.admitted(conditional)


def test_transactional_append_timed_out_by_kafka_is_final() -> None:
    """`timeout_ms` is the client's to choose: it could keep others from appending for as long as a queue may take."""
    talk = confirmed(10, Check.ON)
    transactional = talk.submit(batch(b"x", producer=(5, 0, 0), transactional=True), within="t")
    talk.admitted(transactional)
    talk.kafka(transactional, TIMED_OUT)
    assert talk.answered(transactional).error_code == TIMED_OUT
    conditional = talk.submit(expecting(12, b"a"), connection=2)
    talk.snapshot(12, next_sequence=10, ended_transactions=frozenset({"t"}), transactions_as_of=talk.now)
    talk.admitted(conditional)
