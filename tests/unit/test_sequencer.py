"""Dialogues with one partition sequencer: events and effects. Its docstring numbers the rules tested here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from fencepost_policies.append import Check
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.appends import sent_after
from fencepost_proxy.sequencer.sequencer import PartitionSequencer, Phase
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import MARKER, TopicPartition
from fencepost_proxy.wire.batch import fence_batch
from fencepost_proxy.wire.produce import PartitionResult
from tests.support import bytewise
from tests.support.batches import batch, expecting, now_ms
from tests.support.pending import pending_append
from tests.support.sequencer_view import log_end_read

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
        pending = pending_append(
            TP,
            records,
            TopicPolicy(self.check),
            frozenset({SHARED}),
            now=self.now,
            wait=wait,
            connection=connection,
            context=g.AppendContext(self.instance_id, self.connected_at, self.alone, self.taken_over),
            transactional_id=within,
        )
        assert isinstance(pending, g.PendingAppend), pending
        pending.sending.may_write = self.may_write
        pending.sending.has_partitions = owns
        pending.sending.leader_epoch = self.leader_epoch
        self.call("submit", pending)
        return pending

    def sends(self, records: memoryview, **options: Any) -> g.PendingAppend:
        """The append is submitted and admitted, and goes to Kafka."""
        pending = self.submit(records, **options)
        self.admitted(pending)
        return pending

    def loses(self, records: memoryview, **options: Any) -> g.PendingAppend:
        """It is sent, too, but Kafka's answer does not arrive."""
        pending = self.submit(records, **options)
        self.lost(pending)
        return pending

    def is_unconfirmed(self, end: int) -> None:
        """An append at the log end makes the sequencer read the log end first."""
        self.submit(expecting(end, b"a"))
        self.next(g.ReadLogEnd)

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
        epoch = more.pop("epoch", 0)
        state = None if next_sequence is None else g.ProducerState(epoch, next_sequence)
        self.report(log_end_read(end, self.now, producer_state=state, **more))

    def admitted(self, pending: g.PendingAppend) -> g.Fence | None:
        assert self.next(g.Admit).pending is pending
        self.call("sent", pending)
        return pending.placement.fence

    def _sent(self, pending: g.PendingAppend) -> None:
        if self.effects and self.effects[0] == g.Admit(pending):
            self.admitted(pending)

    def kafka(
        self, pending: g.PendingAppend, error: int = 0, base_offset: int = -1, log_append_time_ms: int = -1
    ) -> None:
        """Kafka answers the append, which is sent now if it was not before."""
        self._sent(pending)
        self.call("answered", pending, PartitionResult(TP.partition, error, base_offset, log_append_time_ms))

    def relayed(self, pending: g.PendingAppend, error: int) -> None:
        """Kafka's error is the answer."""
        self.kafka(pending, error)
        self.fails(pending, error)

    def lost(self, *pending_appends: g.PendingAppend) -> None:
        """The connection of appends breaks after they were sent, now or before."""
        for pending in pending_appends:
            self._sent(pending)
        for pending in pending_appends:
            self.call("lost", pending)

    def read(self, pending: g.PendingAppend, result: g.BatchReadResult, *, at: int | None = None) -> None:
        """Answer the sequencer's read of the log for this append, at that offset."""
        effect = self.next(g.ReadBatch)
        assert effect == g.ReadBatch(pending, effect.offset if at is None else at)
        self.report(g.BatchRead(pending, result))

    def resent(self, pending: g.PendingAppend, result: PartitionResult | None) -> None:
        assert self.next(g.Resend).pending is pending
        self.report(g.Resent(pending, result))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.report(g.Tick())

    def answered(self, pending: g.PendingAppend) -> PartitionResult:
        answer = self.next(g.Answer)
        assert answer.pending is pending
        return answer.result

    def fails(self, pending: g.PendingAppend, error: int, text: str = "") -> str:
        result = self.answered(pending)
        assert result.error_code == error, result
        message = result.error_message or ""
        # By this, clients without the message know that the batch is in the log.
        assert (result.log_append_time_ms >= 0) == message.startswith("OFFSET_VIOLATION"), result
        assert text in message
        return message

    def accepted(self, pending: g.PendingAppend, at: int) -> None:
        result = self.answered(pending)
        assert (result.error_code, result.base_offset) == (0, at), result

    def acknowledged(self, pending: g.PendingAppend, at: int) -> None:
        self.kafka(pending, base_offset=at)
        self.accepted(pending, at)

    def unknown(self, pending: g.PendingAppend, *, at: int) -> None:
        """The connection of a fenced append breaks; the log ends where it should lie."""
        self.lost(pending)
        self.read(pending, g.NotYet(at), at=at)
        self.fails(pending, TIMED_OUT)

    def mismatch(self, pending: g.PendingAppend, *, expected: int, actual: int) -> str:
        result = self.answered(pending)
        assert (result.error_code, result.base_offset) == (POLICY_VIOLATION, actual), result
        assert result.error_message is not None
        assert f"OFFSET_MISMATCH topic=orders partition=3 expected={expected} actual={actual}" in result.error_message
        assert result.record_errors == ()
        return result.error_message

    def taken(self, pending: g.PendingAppend, there: g.Found, *, expected: int = 10, actual: int = 11) -> str:
        """The append is decided with the present log, and refused because of what is there."""
        self.snapshot(actual, next_sequence=actual)
        self.read(pending, there, at=expected)
        return self.mismatch(pending, expected=expected, actual=actual)

    def append(self, at: int, *values: bytes, connection: int = 1, **more: Any) -> g.PendingAppend:
        """A conditional append that succeeds while the fence is confirmed."""
        pending = self.submit(expecting(at, *values, **more), connection=connection)
        assert self.admitted(pending) == g.Fence(SHARED, 0, at, self.instance_id)
        self.acknowledged(pending, at)
        return pending


def confirmed(check: Check = Check.REQUIRED, *, limits: g.SequencerLimits = LIMITS, **attributes: Any) -> Talk:
    """The state after one successful append of one record; the log ends at 10. `attributes`: of the talk, from then."""
    talk = Talk(check, PartitionSequencer(TP, limits))
    pending = talk.submit(expecting(9, b"first"))
    talk.snapshot(9)
    talk.acknowledged(pending, 9)
    talk.silent()
    return replace(talk, **{"now": talk.now + 1} | attributes)


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


def marker(found: g.Found) -> g.Found:
    return g.Found(memoryview(bytes(found.batch[:21]) + b"\0\x30" + bytes(found.batch[23:])))


BOTH = pytest.mark.parametrize("check", [Check.REQUIRED, Check.ON], ids=str)
THEIRS = in_log(expecting(10, b"theirs"), 10)


@pytest.fixture
def talk() -> Talk:
    return Talk()


# ---------------------------------------------------------------------------------------------------- the happy path


@pytest.mark.parametrize(
    ("end", "facts", "sequence"),
    [(41, {}, 41), (500, {}, 500), ((1 << 31) + 5, {"next_sequence": 5}, 5)],
    ids=["first append", "no fence state needs no base", "sequences wrap where Kafka's do"],
)
def test_unconfirmed_sequencer_reads_log_end_and_fences(
    end: int, facts: dict[str, Any], sequence: int, talk: Talk
) -> None:
    pending = talk.submit(expecting(end, b"a", b"b"))
    talk.snapshot(end, **facts)
    assert talk.admitted(pending) == g.Fence(SHARED, 0, sequence)
    talk.acknowledged(pending, end)
    assert talk.sequencer.log_end_offset == end + 2


def _following(talk: Talk, records: memoryview, **options: Any) -> g.PendingAppend:
    """An append that another partition's sequencer gets first."""
    pending = replace(talk, sequencer=PartitionSequencer(TP, LIMITS), effects=[]).submit(records, **options)
    talk.call("read_ahead", pending)
    return pending


def test_log_end_read_ahead_admits_an_append_for_a_second() -> None:
    for seconds, reads_again in ((0.9, False), (1.1, True)):
        talk = Talk()
        _following(talk, expecting(7, b"a"))
        talk.snapshot(7)
        talk.silent()
        talk.now += seconds
        pending = talk.submit(expecting(7, b"a"))
        if reads_again:
            talk.snapshot(7)
        assert talk.admitted(pending) == g.Fence(SHARED, 0, 7)


def test_append_waits_for_the_read_ahead(talk: Talk) -> None:
    _following(talk, expecting(7, b"a"))
    pending = talk.submit(expecting(7, b"a"))
    talk.snapshot(7)
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 7)


def test_what_needs_no_read_is_not_read_ahead() -> None:
    talk = confirmed(Check.ON)
    _following(talk, expecting(10, b"confirmed"))
    _following(Talk(Check.ON), batch(b"unfenced", producer=(5, 0, 0)))
    _following(talk, expecting(10, b"transactional", producer=(5, 0, 0)), within="app")
    talk.silent()
    pending = talk.submit(expecting(10, b"admitted"))
    talk.next(g.Admit)
    talk.now += 100_000
    _following(talk, expecting(11, b"a"))
    talk.call("sent", pending)
    _following(talk, expecting(11, b"a"))
    talk.silent()
    talk.acknowledged(pending, 10)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_unreadable_batch_at_offset_gives_retriable_error() -> None:
    talk = confirmed()
    pending = talk.submit(expecting(11, b"a"), wait=1.0)
    talk.snapshot(12, next_sequence=12)
    talk.read(pending, g.NotYet(12))
    talk.silent()
    talk.tick(0.1)
    talk.next(g.ReadBatch)
    talk.tick(1.0)
    talk.fails(pending, NOT_LEADER)


# ------------------------------------------------------------------------------------------- resends in other batches


def outbox(first: int, *values: bytes, named: bool = True, at_ms: int | None = None) -> memoryview:
    """A batch whose records each have their expected offset and, if `named`, a write-id of their own."""
    headers = [
        [("fencepost-expected-offset", b"%d" % (first + i)), *([("fencepost-write-id", b"id of " + each)] * named)]
        for i, each in enumerate(values)
    ]
    return batch(*values, headers=headers, timestamp_ms=NOW_MS if at_ms is None else at_ms)


NOW_MS = now_ms()


@pytest.mark.parametrize(
    ("there", "count"),
    [
        ([(4, b"a"), (5, b"x"), (6, b"c")], 2),
        ([(4, b"x"), (5, b"b"), (6, b"y")], 1),
        ([(4, b"a", b"b"), (6, b"x", b"y")], 2),
        ([(4, b"x"), (5, b"y"), (6, b"z")], 0),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_partial_resend_says_how_many_records_are_there(
    there: list[tuple[int, bytes]], count: int, named: bool
) -> None:
    talk = confirmed()
    pending = talk.submit(outbox(4, b"a", b"b", b"c", named=named))
    talk.snapshot(20, next_sequence=20)
    for first, *logged in there:
        talk.read(pending, in_log(outbox(first, *logged, named=named), first), at=first)
    message = talk.mismatch(pending, expected=4, actual=20)
    assert message.endswith(f" POSSIBLY_YOURS: {count} of 3 of these records are in the log") is (count > 0)
    assert ("POSSIBLY_YOURS" in message) is (count > 0)


def test_resend_without_write_ids_is_possibly_yours() -> None:
    talk = confirmed()
    pending = talk.submit(outbox(4, b"a", b"b", named=False))
    talk.snapshot(20, next_sequence=20)
    talk.read(pending, in_log(outbox(4, b"a", named=False), 4), at=4)
    talk.read(pending, in_log(outbox(5, b"b", named=False), 5), at=5)
    assert talk.mismatch(pending, expected=4, actual=20).endswith("POSSIBLY_YOURS")


@pytest.mark.parametrize(
    "deleted", [g.OutOfRange(), compacted(in_log(outbox(5, b"b", b"c"), 5), 1)], ids=["out of range", "compacted"]
)
def test_resend_of_partly_deleted_records_is_possibly_yours(deleted: g.BatchReadResult) -> None:
    talk = confirmed()
    pending = talk.submit(batch(b"x", b"y", b"z", headers=[[("fencepost-expected-offset", b"4")]]))
    talk.snapshot(20, next_sequence=20)
    talk.read(pending, in_log(outbox(4, b"a"), 4), at=4)
    talk.read(pending, deleted, at=5)
    assert talk.mismatch(pending, expected=4, actual=20).endswith("POSSIBLY_YOURS")


def test_resend_over_too_many_batches_is_possibly_yours() -> None:
    talk = confirmed()
    pending = talk.submit(outbox(4, *[b"x"] * 200))
    talk.snapshot(500, next_sequence=500)
    for at in range(4, 104):
        talk.read(pending, in_log(outbox(at, b"y"), at), at=at)
    assert talk.mismatch(pending, expected=4, actual=500).endswith("POSSIBLY_YOURS")


def test_records_of_another_transaction_are_no_resend() -> None:
    """They may be aborted: then no reader sees them."""
    talk = confirmed(Check.ON)
    pending = talk.submit(outbox(4, b"a"))
    talk.snapshot(20, next_sequence=20)
    there = bytearray(in_log(outbox(4, b"a", b"b"), 4).batch)
    there[22] |= 0x10
    talk.read(pending, g.Found(memoryview(bytes(there))), at=4)
    assert "POSSIBLY_YOURS" not in talk.mismatch(pending, expected=4, actual=20)


COPIED = "POSSIBLY_YOURS: the log has its write-id with another timestamp: copied headers"


@BOTH
@pytest.mark.parametrize("there", [(4, b"a"), (3, b"z", b"a"), (4, b"a", b"b")], ids=str)
def test_write_id_with_another_timestamp_is_refused_as_copied(check: Check, there: tuple[int, bytes]) -> None:
    talk = confirmed(check)
    first, *values = there
    talk.sequencer.state.retries.clear()
    pending = talk.submit(outbox(4, b"a", at_ms=NOW_MS + 5_000))
    talk.snapshot(20, next_sequence=20)
    talk.read(pending, in_log(outbox(first, *values), first), at=4)
    answer = talk.next(g.Answer)
    assert answer.reason == "copied_headers"
    assert COPIED in str(answer.result.error_message)


@pytest.mark.parametrize("replaced", [False, True], ids=["kept", "replaced"])
@pytest.mark.parametrize("copied", [False, True], ids=["retry", "copy"])
def test_log_append_time_topic_keeps_the_times_that_prove_a_retry(replaced: bool, copied: bool) -> None:
    """Compaction may replace them: then nothing distinguishes a retry from a copy."""
    talk = confirmed()
    pending = talk.submit(expecting(4, b"a", write_id=b"w", timestamp_ms=NOW_MS + copied))
    talk.snapshot(20, next_sequence=20, log_append_time=True)
    there = expecting(4, b"a", write_id=b"w", timestamp_ms=NOW_MS + 9_000 if replaced else NOW_MS)
    talk.read(pending, in_log(there, 4, log_append_time=True), at=4)
    if copied or replaced:
        assert COPIED in talk.mismatch(pending, expected=4, actual=20)
    else:
        talk.accepted(pending, 4)


@pytest.mark.parametrize(("age_seconds", "known"), [(40_000, True), (46_000, False), (None, False)])
@pytest.mark.parametrize("together", [True, False])
def test_a_write_id_proves_a_retry_while_records_are_young(
    age_seconds: int | None, known: bool, together: bool
) -> None:
    """Half of producer.id.expiration.ms, here a day. Records without timestamps never prove it."""
    talk = confirmed()
    at_ms = -1 if age_seconds is None else NOW_MS - 1000 * age_seconds
    pending = talk.submit(outbox(4, b"a", at_ms=at_ms))
    talk.snapshot(20, next_sequence=20)
    there = outbox(4, b"a", at_ms=at_ms) if together else outbox(4, b"a", b"b", at_ms=at_ms)
    talk.read(pending, in_log(there, 4), at=4)
    if known:
        talk.accepted(pending, 4)
    else:
        message = talk.mismatch(pending, expected=4, actual=20)
        assert message.endswith("POSSIBLY_YOURS: its write-id is in the log, but its records are too old for a retry")


# ---------------------------------------------------------------------------------- refusals that a retry may outlive


@BOTH
def test_mismatch_above_the_log_end_is_possibly_yours_while_a_first_attempt_is_queued(check: Check) -> None:
    """A pipeline is lost with its connection: both appends may still be appended, in order."""
    talk = confirmed(check)
    first, second = (talk.submit(outbox(at, b"%d" % at)) for at in (10, 11))
    talk.lost(first, second)
    talk.read(first, g.NotYet(10), at=10)
    talk.next(g.ReadBatch)
    talk.fails(first, TIMED_OUT)
    talk.report(g.BatchRead(second, g.NotYet(10)))
    talk.fails(second, TIMED_OUT)
    retry = talk.submit(second.records, connection=2)
    talk.snapshot(10, next_sequence=10)
    assert talk.mismatch(retry, expected=11, actual=10).endswith(
        "POSSIBLY_YOURS: an earlier attempt may still be appended"
    )
    talk.now += 2
    beyond = talk.submit(outbox(12, b"x"), connection=2)
    talk.snapshot(10, next_sequence=10)
    assert "POSSIBLY_YOURS" not in talk.mismatch(beyond, expected=12, actual=10)
    talk.now += LIMITS.queued_seconds
    retry = talk.submit(second.records, connection=2)
    talk.snapshot(10, next_sequence=10)
    assert "POSSIBLY_YOURS" not in talk.mismatch(retry, expected=11, actual=10)


@pytest.mark.parametrize("taken_over", [True, False])
def test_mismatch_above_the_log_end_during_a_takeover_is_possibly_yours(taken_over: bool) -> None:
    talk = confirmed(taken_over=taken_over)
    pending = talk.submit(outbox(12, b"x"))
    talk.snapshot(10, next_sequence=10)
    assert ("POSSIBLY_YOURS" in talk.mismatch(pending, expected=12, actual=10)) is not taken_over


# ------------------------------------------------------------------- rule 1: an answer speaks of a batch sent once


def test_sequence_gap_becomes_mismatch_after_reading_the_log() -> None:
    talk = confirmed()
    pending = talk.submit(expecting(10, b"a"))
    talk.kafka(pending, OUT_OF_ORDER)
    talk.taken(pending, THEIRS, actual=13)


def test_fence_with_wrong_epoch_is_rebuilt_from_log() -> None:
    talk = confirmed()
    pending = talk.submit(expecting(10, b"a"))
    talk.kafka(pending, WRONG_EPOCH)
    talk.snapshot(10, next_sequence=0, epoch=3, fence_base=(3, 10))
    assert talk.admitted(pending) == g.Fence(SHARED, 3, 0)
    talk.acknowledged(pending, 10)


def test_repeatedly_refused_fence_ends_with_retriable_error() -> None:
    talk = confirmed()
    pending = talk.submit(expecting(10, b"a"))
    for _ in range(LIMITS.attempts_max):
        talk.kafka(pending, OUT_OF_ORDER)
        if talk.effects and isinstance(talk.effects[0], g.ReadLogEnd):
            talk.snapshot(10)
    talk.fails(pending, NOT_LEADER)


@pytest.mark.parametrize(
    ("error", "base_offset"), [(TIMED_OUT, -1), (AFTER_APPEND, -1), (NOT_LEADER, 10), (-1, -1), (56, -1)]
)
def test_errors_after_possible_append_leave_it_in_doubt(error: int, base_offset: int) -> None:
    talk = confirmed()
    pending = talk.submit(expecting(10, b"a", write_id=b"w"))
    talk.kafka(pending, error, base_offset)
    talk.read(pending, in_log(pending.records, 10), at=10)
    talk.accepted(pending, 10)
    assert talk.sequencer.phase is Phase.UNCONFIRMED


def test_not_leader_before_any_append_is_relayed() -> None:
    talk = confirmed()
    pending = talk.submit(expecting(10, b"a"))
    talk.relayed(pending, NOT_LEADER)
    talk.silent()
    talk.is_unconfirmed(10)  # the new leader may not know the fence


def in_doubt(check: Check = Check.REQUIRED, *, may_write: bool = True) -> tuple[Talk, g.PendingAppend]:
    """The acknowledgement of an append at 10 is lost. This process has an instance id."""
    talk = confirmed(check, instance_id=7, may_write=may_write)
    pending = talk.sends(expecting(10, b"a", producer=(5, 0, 0)))
    assert pending.placement.fence == g.Fence(SHARED, 0, 10, 7)
    talk.lost(pending)
    return talk, pending


def test_fence_with_own_instance_id_proves_the_append() -> None:
    talk, pending = in_doubt()
    talk.read(pending, in_log(pending.records, 10, pending.placement.fence), at=10)
    talk.accepted(pending, 10)
    talk.accepted(talk.submit(pending.records, connection=2), 10)


@pytest.mark.parametrize("equal", [True, False])
def test_batch_of_another_instance_is_no_success(equal: bool) -> None:
    talk, pending = in_doubt()
    theirs = in_log(pending.records if equal else expecting(10, b"theirs"), 10, g.Fence(SHARED, 0, 10, 8))
    talk.read(pending, theirs, at=10)
    assert ("POSSIBLY_YOURS" in talk.taken(pending, theirs)) is equal  # it can no longer be appended: decided again


def test_unconditional_batch_is_fenced_again_at_new_end() -> None:
    talk = confirmed(Check.ON, instance_id=7)
    pending = talk.loses(batch(b"a"))
    talk.read(pending, in_log(pending.records, 10, g.Fence(SHARED, 0, 10, 8)))
    talk.snapshot(11, next_sequence=11)
    assert talk.admitted(pending) == g.Fence(SHARED, 0, 11, 7)


def test_one_of_two_equal_batches_succeeds() -> None:
    talk, first = absent(next_sequence=9)  # not the sequence of its fence: the outcome stays unknown
    talk.fails(first, TIMED_OUT)
    there = in_log(first.records, 10, first.placement.fence)
    second = talk.submit(expecting(10, b"a", producer=(6, 0, 0), timestamp_ms=first.append.max_timestamp_ms))
    talk.snapshot(10, next_sequence=10)
    talk.lost(second)
    talk.read(second, there)
    talk.accepted(second, 10)
    retry = talk.submit(first.records, connection=3)
    talk.read(retry, there)
    assert "POSSIBLY_YOURS" in talk.taken(retry, there)


def absent(end: int = 10, **facts: Any) -> tuple[Talk, g.PendingAppend]:
    """It is not where it should be, and then the log end is read."""
    talk, pending = in_doubt()
    talk.read(pending, g.NotYet(10), at=10)
    talk.snapshot(end, **{"next_sequence": end} | facts)
    return talk, pending


def test_in_doubt_batch_is_resent_at_unchanged_end() -> None:
    talk, pending = absent()
    talk.resent(pending, PartitionResult(3, 0, 10))
    talk.accepted(pending, 10)


@pytest.mark.parametrize(
    "resent", [None, PartitionResult(3, 0, 10, now_ms()), PartitionResult(3, 45), PartitionResult(3, 19)]
)
def test_outcome_after_resend_is_read_from_the_log(resent: PartitionResult | None) -> None:
    talk, pending = absent()
    talk.resent(pending, resent)
    talk.silent()
    talk.tick(0.1)
    talk.read(pending, in_log(pending.records, 10, pending.placement.fence))
    talk.accepted(pending, 10)


@pytest.mark.parametrize(
    "facts",
    [
        {"next_sequence": 11},
        {"epoch": 1},
        {"fence_base": (1, 10)},
        {"open_transactions": frozenset({4})},
        {"requested_at": 990.0},
        {"expiration_seconds": -1000.0},
        {"producer_id": SHARED + 1},
    ],
    ids=str,
)
def test_changed_sequence_prevents_the_resend(facts: dict[str, Any]) -> None:
    talk, pending = absent(**facts)
    talk.fails(pending, TIMED_OUT)


def test_log_that_moved_before_resend_is_read_again() -> None:
    talk, _ = absent(11)
    talk.tick(0.1)
    talk.next(g.ReadBatch)


def test_forgotten_fence_does_not_prevent_the_resend() -> None:
    talk, pending = absent(next_sequence=None)
    talk.resent(pending, PartitionResult(3, 0, 10))
    talk.accepted(pending, 10)


def test_unread_log_end_before_resend_is_read_again() -> None:
    talk, pending = in_doubt()
    talk.read(pending, g.NotYet(10), at=10)
    talk.next(g.ReadLogEnd)
    talk.report(g.LogEndUnknown("no leader"))
    talk.tick(0.1)
    talk.read(pending, g.NotYet(10), at=10)
    talk.snapshot(10, next_sequence=10)
    assert talk.next(g.Resend).pending is pending


def test_nothing_is_resent_without_proven_write_permission() -> None:
    talk, pending = in_doubt(may_write=False)
    talk.read(pending, g.NotYet(10))
    talk.fails(pending, TIMED_OUT)
    talk = confirmed(Check.ON)
    talk.fails(talk.loses(batch(b"x", producer=(5, 0, 0))), TIMED_OUT)


def test_nothing_is_resent_to_a_possibly_recreated_topic() -> None:
    talk, pending = in_doubt()
    talk.report(g.Forget())
    talk.read(pending, g.NotYet(10))
    talk.fails(pending, TIMED_OUT)


def test_nothing_is_resent_after_a_sequence_gap() -> None:
    talk = confirmed(instance_id=7, may_write=True)
    first, second = (talk.sends(expecting(10 + i, b"a", producer=(5, 0, i))) for i in range(2))
    talk.lost(first, second)
    theirs = in_log(expecting(10, b"theirs"), 10, g.Fence(SHARED, 0, 10, 8))
    talk.read(first, theirs)
    talk.read(second, g.NotYet(11), at=11)
    talk.fails(second, TIMED_OUT)
    talk.taken(first, theirs)


def test_retry_after_unknown_outcome_finds_the_first_try() -> None:
    talk, first = in_doubt()
    talk.may_write = False
    talk.read(first, g.Unreadable("no leader"))
    talk.tick(20)
    talk.read(first, g.Unreadable("no leader"))
    talk.fails(first, TIMED_OUT)
    retry = talk.submit(first.records, connection=2)
    talk.read(retry, in_log(first.records, 10, first.placement.fence), at=10)
    talk.accepted(retry, 10)


@pytest.mark.parametrize("end", ["time", "a later fence is acknowledged"])
def test_unfenced_appends_wait_for_possibly_queued_fenced_one(end: str) -> None:
    talk, lost = in_doubt(Check.ON, may_write=False)
    talk.read(lost, g.NotYet(10))
    talk.fails(lost, TIMED_OUT)
    if end == "time":
        own = talk.submit(batch(b"x", producer=(8, 0, 0)), connection=2, wait=100.0)
        talk.silent()
        talk.tick(LIMITS.queued_seconds + 1)
    else:
        other = talk.submit(expecting(10, b"b"), connection=2)
        talk.snapshot(10, next_sequence=10)
        talk.admitted(other)
        own = talk.submit(batch(b"x", producer=(8, 0, 0)), connection=2)
        talk.acknowledged(other, 10)
    assert talk.admitted(own) is None


def test_conditional_append_waits_for_possibly_queued_unfenced_one() -> None:
    talk = confirmed(Check.ON)
    talk.fails(talk.loses(batch(b"x", producer=(8, 0, 0), transactional=True)), TIMED_OUT)
    conditional = talk.submit(expecting(10, b"a"), connection=2)
    talk.silent()
    talk.tick(6)
    talk.fails(conditional, NOT_LEADER)
    late = talk.submit(expecting(11, b"a"), connection=2, wait=100.0)
    talk.tick(LIMITS.queued_seconds)
    talk.snapshot(11, next_sequence=10)
    talk.admitted(late)


def test_equal_batch_without_write_id_proves_nothing() -> None:
    talk = confirmed()
    pending = talk.loses(expecting(10, b"a"))
    talk.read(pending, in_log(pending.records, 10))
    talk.fails(pending, TIMED_OUT, "may be yours")


@pytest.mark.parametrize("fenced", [False, True])
def test_in_doubt_append_is_sought_after_foreign_batches(fenced: bool) -> None:
    """A queued append or a marker is appended first. The sequence of the in-doubt append still fits. If the sequencer
    treated it as lost, it would be appended twice."""
    talk = confirmed(Check.ON, instance_id=7, may_write=True)
    lost = talk.loses(batch(b"a"))
    queued = batch(b"x", b"y", producer=(8, 0, 0))
    talk.read(lost, in_log(queued, 10, g.Fence(SHARED, 0, 8)) if fenced else not_fenced(queued, 10), at=10)
    talk.read(lost, in_log(lost.records, 12, lost.placement.fence), at=12)
    talk.accepted(lost, 12)


def test_absent_in_doubt_append_is_resent_unchanged() -> None:
    talk = confirmed(Check.ON, instance_id=7, may_write=True)
    lost = talk.loses(batch(b"a"))
    talk.read(lost, not_fenced(batch(b"x"), 10))
    talk.read(lost, g.NotYet(11))
    talk.snapshot(11, next_sequence=10)
    assert talk.next(g.Resend).pending is lost
    assert lost.placement.fence == g.Fence(SHARED, 0, 10, 7)


def test_retry_of_unresolved_batch_skips_foreign_batches() -> None:
    talk = confirmed(Check.ON)
    records = unresolved(talk)
    retry = talk.submit(records, connection=2)
    talk.read(retry, not_fenced(batch(b"x"), 11), at=11)  # a marker
    talk.read(retry, g.NotYet(12), at=12)
    talk.snapshot(13, next_sequence=12)  # it was queued, and was appended after that read
    talk.read(retry, in_log(records, 12, g.Fence(SHARED, 0, 11)), at=12)
    talk.accepted(retry, 12)


@pytest.mark.parametrize("is_marker", [False, True])
def test_a_lost_acknowledgement_does_not_hide_a_violation(is_marker: bool) -> None:
    """A marker in its place is no writer around the proxy: its transaction may have joined since."""
    talk = confirmed(Check.ON, instance_id=7)
    lost = talk.loses(expecting(10, b"a"))
    foreign = not_fenced(batch(b"x", producer=(8, 0, 0)), 10)
    if is_marker:
        foreign = marker(foreign)
    talk.read(lost, foreign)
    talk.read(lost, in_log(lost.records, 11, lost.placement.fence), at=11)
    talk.read(lost, foreign, at=10)
    if not is_marker:
        assert talk.next(g.Violation) == g.Violation(TP, 10, 11, producer_id=8)
    message = talk.fails(lost, POLICY_VIOLATION, "OFFSET_VIOLATION")
    assert ("bypasses the proxy" in message) is not is_marker


def test_displaced_in_doubt_append_may_still_follow() -> None:
    talk = confirmed(Check.ON, may_write=True)
    foreign = not_fenced(batch(b"x"), 10)

    def absent(pending: g.PendingAppend) -> g.PendingAppend:
        talk.read(pending, foreign, at=10)
        talk.read(pending, g.NotYet(11), at=11)
        return pending

    lost = talk.loses(expecting(10, b"a", producer=(5, 0, 0)))
    talk.fails(absent(lost), TIMED_OUT)
    talk.fails(absent(talk.submit(lost.records, connection=2)), TIMED_OUT)
    talk.now += LIMITS.queued_seconds + 1  # only for a limited time
    retry = absent(talk.submit(lost.records, connection=2))
    talk.snapshot(11, next_sequence=10)
    talk.read(retry, foreign)
    talk.mismatch(retry, expected=10, actual=11)


def test_compacted_in_doubt_batch_stays_unknown() -> None:
    """Its offset, its offset range and its fence are those of the first attempt, but some records are deleted."""
    talk = confirmed(Check.ON)
    talk.append(10, b"a", producer=(5, 0, 0))
    records = batch(b"b", b"c", producer=(5, 0, 1))
    talk.unknown(talk.submit(records), at=11)
    retry = talk.submit(records, connection=2)
    talk.read(retry, compacted(in_log(records, 11), 1), at=11)
    talk.fails(retry, TIMED_OUT)


@pytest.mark.parametrize("count", [2, 3])
def test_compacted_batch_at_expected_offset_is_possibly_yours(count: int) -> None:
    talk = confirmed()
    pending = talk.submit(expecting(4, b"a", b"b"))
    there = compacted(in_log(batch(*[b"x"] * count), 4), 1)
    assert talk.taken(pending, there, expected=4, actual=10).endswith("POSSIBLY_YOURS")


def test_repacked_batch_in_doubt_is_recognised() -> None:
    """A broker that compresses in another way measures timestamps from the first record, whatever the client did."""
    at_ms = now_ms()

    def measured_from(origin_ms: int) -> memoryview:
        headers = [(b"fencepost-expected-offset", b"10")]
        records = [bytewise.record(i, headers[i:], timestamp_delta=at_ms + i - origin_ms) for i in range(2)]
        return bytewise.batch(records, base_timestamp_ms=origin_ms)

    talk = confirmed(instance_id=7)
    pending = talk.loses(measured_from(at_ms - 70))
    talk.read(pending, in_log(measured_from(at_ms), 10, pending.placement.fence), at=10)
    talk.accepted(pending, 10)


def test_no_append_starts_while_one_is_in_doubt() -> None:
    talk = confirmed()
    lost = talk.loses(expecting(10, b"a"))
    read = talk.next(g.ReadBatch)
    waiting = talk.submit(expecting(10, b"b"), connection=2)
    talk.silent()
    talk.effects.append(read)
    talk.read(lost, g.NotYet(10))
    talk.fails(lost, TIMED_OUT)
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(waiting) == g.Fence(SHARED, 0, 10)


def test_lost_client_keeps_its_sent_append_first() -> None:
    talk = confirmed()
    talk.call("cancel", talk.sends(expecting(10, b"a")))
    talk.submit(expecting(10, b"b"), connection=2)
    talk.silent()


def test_answer_after_resolution_changes_nothing() -> None:
    talk = confirmed()
    pending = talk.loses(expecting(10, b"a"))
    talk.next(g.ReadBatch)
    talk.kafka(pending, OUT_OF_ORDER)
    talk.silent()


def test_connection_lost_after_answer_leaves_nothing_in_doubt() -> None:
    talk = confirmed()
    talk.lost(talk.append(10, b"a"))
    talk.silent()
    talk.append(11, b"b")


# ----------------------------------------------------------------------- rules 2 and 3: what makes Kafka forget


def test_the_limit_for_timestamps_moves_with_the_clock() -> None:
    talk = confirmed()
    limit_ms = now_ms()
    for at in (10, 11):
        talk.now += 5.5 * 3600
        talk.append(at, b"fresh enough: half a day is the limit")
    talk.now += 2 * 3600
    talk.fails(talk.submit(expecting(12, b"a", timestamp_ms=limit_ms)), OLD_TIMESTAMP)


def test_old_unconditional_batches_on_true_topic_need_no_read() -> None:
    """A load of old records by a producer that is not idempotent."""
    talk = confirmed(Check.ON)
    loaded = [talk.sends(batch(b"old", timestamp_ms=0), connection=2) for _ in range(3)]
    assert [each.placement.fence for each in loaded] == [None] * 3
    waiting = talk.submit(expecting(13, b"b"))
    talk.silent()
    for at, each in enumerate(loaded, 10):
        talk.acknowledged(each, at)
    assert talk.admitted(waiting) == g.Fence(SHARED, 0, 10)


@pytest.mark.parametrize("conditional", [False, True])
def test_retry_of_an_appended_old_batch_is_recognised(conditional: bool) -> None:
    """Kafka does not know the sequences of a producer with fenced appends."""
    talk = confirmed(Check.ON)
    talk.append(10, b"a", producer=(5, 0, 0))
    old: dict[str, Any] = {"producer": (5, 0, 1), "timestamp_ms": 0}
    first = talk.sends(expecting(11, b"old", **old) if conditional else batch(b"old", **old))
    assert first.placement.fence == g.NO_PRODUCER
    talk.acknowledged(first, 11)  # the answer does not reach its client
    talk.accepted(talk.submit(first.records, connection=2), 11)
    talk.silent()


def test_retry_of_old_unknown_batch_is_not_sent() -> None:
    """Nothing in the log proves that it is there, and Kafka would not know it again."""
    talk = confirmed(Check.ON)
    talk.append(10, b"a", producer=(5, 0, 0))
    first = talk.loses(batch(b"old", producer=(5, 0, 1), timestamp_ms=0))
    talk.fails(first, TIMED_OUT)
    for _ in range(2):
        talk.fails(talk.submit(first.records, connection=2), TIMED_OUT)


@pytest.mark.parametrize("check", [Check.ON, Check.REQUIRED])
def test_retry_that_became_too_old_is_not_appended(check: Check) -> None:
    talk = confirmed(check)
    limit_ms = now_ms() - 12 * 3600 * 1000
    first = talk.sends(expecting(10, b"a", producer=(5, 0, 0), timestamp_ms=limit_ms + 10_000))
    assert first.placement.fence == g.Fence(SHARED, 0, 10)
    talk.unknown(first, at=10)
    talk.now += 20
    retry = talk.submit(first.records, connection=2)
    talk.read(retry, g.NotYet(10))
    talk.snapshot(10, next_sequence=10, clock_offset_seconds=now_ms() / 1000 + 20 - talk.now)
    talk.fails(retry, TIMED_OUT)


@pytest.mark.parametrize("known", [True, False], ids=["known", "noticed from the response"])
def test_log_append_time_topic_confirms_every_success(known: bool, talk: Talk) -> None:
    pending = talk.submit(expecting(10, b"a", timestamp_ms=0 if known else None))
    talk.snapshot(10, log_append_time=known)
    talk.kafka(pending, base_offset=10, log_append_time_ms=now_ms())
    talk.read(pending, in_log(pending.records, 10, log_append_time=True), at=10)
    talk.accepted(pending, 10)
    if known:
        talk.sends(expecting(11, b"b"))  # the fence stays confirmed: the read was only a check


def test_append_found_in_log_leaves_log_end_unknown(talk: Talk) -> None:
    first = talk.submit(expecting(10, b"a"))
    talk.snapshot(10, log_append_time=True)
    late = talk.submit(expecting(5, b"b"), connection=2)
    talk.now += 1
    talk.kafka(first, base_offset=10, log_append_time_ms=5)  # perhaps a duplicate: the log may be longer now
    talk.read(first, in_log(first.records, 10, log_append_time=True))
    talk.accepted(first, 10)
    talk.taken(late, in_log(expecting(5, b"theirs"), 5), expected=5, actual=13)


def test_success_not_confirmed_by_log_is_a_mismatch(talk: Talk) -> None:
    pending = talk.submit(expecting(10, b"a"))
    talk.snapshot(10, log_append_time=True)
    talk.kafka(pending, base_offset=10, log_append_time_ms=5)
    talk.read(pending, THEIRS)
    talk.taken(pending, THEIRS)


# ------------------------------------------------------------------------------ rule 5: Kafka's idea of a duplicate


@pytest.mark.parametrize(("equal", "instance_id"), [(False, 0), (True, 0), (True, 7), (True, 8)])
def test_duplicate_answer_to_first_send_is_anothers_batch(equal: bool, instance_id: int) -> None:
    talk = confirmed(instance_id=7)
    pending = talk.submit(expecting(10, b"a"))
    talk.kafka(pending, base_offset=10, log_append_time_ms=now_ms())
    theirs = in_log(pending.records if equal else expecting(10, b"theirs"), 10, g.Fence(SHARED, 0, 10, instance_id))
    talk.read(pending, theirs, at=10)
    assert ("POSSIBLY_YOURS" in talk.taken(pending, theirs)) is equal


# ------------------------------------------------------------------------------------------ rule 6: offsets and bases

#: The producer id after the last epoch.
NEXT_ID = SHARED + 1
LAST = 32_767


@dataclass
class NewBase:
    """Log end, epoch, next sequence, fence base and producer id, as read before and after a base was published."""

    expected: int
    before: tuple[int, int, int | None, tuple[int, int], int]
    proposed: tuple[int, int]
    after: tuple[int, int, int | None, tuple[int, int], int]
    fence: g.Fence
    ours: bool = True
    violation: bool = False


NEW_BASES = {
    "two records came around the proxy": NewBase(
        12, (12, 0, 10, (0, 0), SHARED), (1, 12), (12, 0, 10, (1, 12), SHARED), g.Fence(SHARED, 1, 0)
    ),
    "another process proposed 11 first, and appended two": NewBase(
        13, (12, 0, 10, (0, 0), SHARED), (1, 12), (13, 1, 2, (1, 11), SHARED), g.Fence(SHARED, 1, 2)
    ),
    "the view of the published epoch is one poll old": NewBase(
        12, (12, 2, 2, (1, 5), SHARED), (2, 10), (12, 2, 2, (2, 10), SHARED), g.Fence(SHARED, 2, 2), ours=False
    ),
    "a foreign epoch": NewBase(
        12,
        (12, LAST - 1, 2, (0, 0), SHARED),
        (LAST - 1, 10),
        (12, LAST - 1, 2, (LAST - 1, 10), SHARED),
        g.Fence(SHARED, LAST - 1, 2),
        violation=True,
    ),
    "the last epoch, used by another": NewBase(
        12,
        (12, LAST, 2, (0, 0), SHARED),
        (LAST + 1, 12),
        (12, 0, None, (LAST + 1, 12), NEXT_ID),
        g.Fence(NEXT_ID, 0, 0),
        violation=True,
    ),
    "the last epoch, forgotten by Kafka": NewBase(
        13,
        (13, 0, None, (LAST, 12), SHARED),
        (LAST + 1, 13),
        (13, 0, None, (LAST + 1, 13), NEXT_ID),
        g.Fence(NEXT_ID, 0, 0),
    ),
    "the next producer id": NewBase(
        20,
        (20, LAST + 6, 3, (LAST + 6, 10), NEXT_ID),
        (LAST + 7, 20),
        (20, LAST + 6, 3, (LAST + 7, 20), NEXT_ID),
        g.Fence(NEXT_ID, 6, 0),
    ),
}


@pytest.mark.parametrize("why", NEW_BASES)
def test_required_topic_publishes_new_fence_base_before_use(why: str) -> None:
    """An earlier sequence offset is no violation at the start: perhaps the topic was not checked yet."""
    new = NEW_BASES[why]

    def read(end: int, epoch: int, next_sequence: int | None, fence_base: tuple[int, int], producer_id: int) -> None:
        talk.snapshot(end, epoch=epoch, next_sequence=next_sequence, fence_base=fence_base, producer_id=producer_id)

    talk = Talk()
    pending = talk.submit(expecting(new.expected, b"a"))
    read(*new.before)
    proposal = talk.next(g.PublishBase)
    assert (proposal.producer_epoch, proposal.base) == new.proposed
    talk.silent()
    talk.report(g.BasePublished(True, ours=new.ours))
    if new.violation:
        assert talk.next(g.Violation) == g.Violation(TP, 11, log_end_offset=12)
    read(*new.after)
    assert talk.admitted(pending) == new.fence
    talk.acknowledged(pending, new.expected)
    following = replace(new.fence, base_sequence=new.fence.base_sequence + 1)
    assert talk.sends(expecting(new.expected + 1, b"b")).placement.fence == following


def test_foreign_epoch_on_true_topic_is_reported() -> None:
    talk = Talk(Check.ON)
    pending = talk.submit(expecting(12, b"a"))
    talk.snapshot(12, epoch=LAST - 1, next_sequence=2)
    assert talk.next(g.Violation) == g.Violation(TP, 11, log_end_offset=12)
    assert talk.admitted(pending) == g.Fence(SHARED, LAST - 1, 2)


def test_last_epoch_is_good_for_one_append(talk: Talk) -> None:
    """Sequence 0 of the last epoch: from then on Kafka refuses what still comes under that producer id."""
    first = talk.submit(expecting(12, b"a"))
    later = talk.submit(expecting(13, b"b"))
    talk.snapshot(12, epoch=LAST - 1, next_sequence=3, fence_base=(LAST, 12))
    assert talk.admitted(first) == g.Fence(SHARED, LAST, 0)
    talk.silent()
    talk.acknowledged(first, 12)
    talk.snapshot(13, epoch=LAST, next_sequence=1, fence_base=(LAST, 12))
    proposal = talk.next(g.PublishBase)
    assert (proposal.producer_epoch, proposal.base) == (LAST + 1, 13)
    talk.report(g.BasePublished(True, ours=True))
    talk.snapshot(13, fence_base=(LAST + 1, 13), producer_id=NEXT_ID)
    assert talk.admitted(later) == g.Fence(NEXT_ID, 0, 0)


def test_next_producer_id_resends_an_in_doubt_append() -> None:
    talk = Talk(may_write=True)
    pending = talk.submit(expecting(20, b"a"))
    known = {"producer_id": NEXT_ID, "epoch": LAST + 6, "next_sequence": 10, "fence_base": (LAST + 6, 10)}
    talk.snapshot(20, **known)
    talk.lost(pending)
    talk.read(pending, g.NotYet(20))
    talk.snapshot(20, **known)
    assert talk.next(g.Resend) == g.Resend(pending)


def test_fence_bases_are_published_at_a_bounded_rate(talk: Talk) -> None:
    """Each appends at Kafka itself would cost an epoch: 32,767 in a quarter of an hour."""
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
        while not talk.effects:
            talk.tick(0.5)
    assert published > LIMITS.bases_burst
    assert published <= LIMITS.bases_burst + 2 + (talk.now - began) / LIMITS.base_seconds


# ---------------------------------------------------------------------------------------------------------- violations


@pytest.mark.parametrize(
    ("author", "forgotten", "reason"),
    [
        (g.Fence(99, 0, 0), False, "bypasses the proxy"),
        (g.Fence(SHARED, 0, 10), True, "producer.id.expiration.ms"),
        (g.Fence(SHARED, 0, 9), False, "bypasses the proxy"),  # an append of the proxy lies one too far
    ],
    ids=["another producer", "equal sequence, which Kafka would have compared", "one sequence earlier"],
)
def test_append_at_another_offset_is_a_reported_violation(author: g.Fence, forgotten: bool, reason: str) -> None:
    talk = confirmed(Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.kafka(pending, base_offset=11)
    talk.read(pending, in_log(batch(b"theirs"), 10, author), at=10)  # which producer is it?
    violation = g.Violation(TP, 10, 11, producer_id=author.producer_id, forgotten=forgotten)
    assert talk.next(g.Violation) == violation
    what = f"OFFSET_VIOLATION topic=orders partition=3 expected=10 appended_at=11 producer_id={author.producer_id}: "
    message = talk.fails(pending, POLICY_VIOLATION, what)
    assert [each in message for each in ("bypasses the proxy", reason)] == [not forgotten, True]
    talk.is_unconfirmed(12)


def test_violation_is_reported_without_a_known_author() -> None:
    talk = confirmed(Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.kafka(pending, base_offset=11)
    talk.read(pending, g.Unreadable("no leader"))
    talk.tick(2)
    assert talk.next(g.Violation) == g.Violation(TP, 10, 11)
    talk.fails(pending, POLICY_VIOLATION, "appended_at=11 producer_id=unknown")


@pytest.mark.parametrize("identity", [{"write_id": b"w"}, {"producer": (5, 0, 0)}], ids=str)
def test_retry_during_violation_lookup_gets_its_answer(identity: dict[str, Any]) -> None:
    talk = confirmed(Check.ON)
    pending = talk.submit(expecting(10, b"a", **identity))
    talk.kafka(pending, base_offset=11)
    read = talk.next(g.ReadBatch)
    retry = talk.submit(pending.records, connection=2)
    talk.effects.append(read)
    talk.read(pending, in_log(batch(b"theirs"), 10, g.Fence(99, 0, 0)))
    talk.next(g.Violation)
    assert talk.answered(pending) == talk.answered(retry)


def test_unexplained_log_end_is_a_violation_on_required() -> None:
    talk = confirmed()
    talk.kafka(talk.submit(expecting(10, b"a")), OUT_OF_ORDER)
    talk.snapshot(13, next_sequence=10)  # three records came around the proxy
    assert talk.next(g.Violation) == g.Violation(TP, 10, log_end_offset=13)
    talk.next(g.PublishBase)


def test_log_before_the_fence_base_is_no_violation(talk: Talk) -> None:
    pending = talk.submit(expecting(20, b"a"))
    talk.snapshot(20, fence_base=(1, 20))
    talk.acknowledged(pending, 20)
    talk.kafka(talk.submit(expecting(21, b"b")), OUT_OF_ORDER)
    talk.snapshot(19, fence_base=(1, 20))  # a leader without the last records, and without the producer
    talk.next(g.LostRecords)
    talk.next(g.PublishBase)


# -------------------------------------------------------------------------------------- rules 12, 13: fence unconfirmed


def test_unconfirmed_admission_expires(talk: Talk) -> None:
    pending = talk.submit(expecting(10, b"a"))
    talk.snapshot(10)
    talk.next(g.Admit)
    assert talk.sequencer.may_send(pending, talk.now)
    talk.now += LIMITS.unconfirmed_send_seconds + 0.1
    assert not talk.sequencer.may_send(pending, talk.now)


@pytest.mark.parametrize(
    "changes",
    [{"now": 1002 + 86_400 / 4}, {"now": 1006.0, "connected_at": 1006.0}, {"now": 1006.0, "leader_epoch": 1}],
    ids=["before Kafka can forget", "the broker may have started again, and forgotten", "another leader"],
)
def test_fence_becomes_unconfirmed(changes: dict[str, Any]) -> None:
    confirmed(**changes).is_unconfirmed(10)


def test_fence_is_unconfirmed_after_the_expiration_lease(talk: Talk) -> None:
    first = talk.submit(expecting(9, b"a"))
    talk.snapshot(9, expiration_known_until=talk.now + 60)
    talk.acknowledged(first, 9)
    talk.now += 59
    talk.append(10, b"an acknowledgement does not make that read a later one")
    talk.now += 2
    talk.is_unconfirmed(11)


def test_new_append_keeps_the_fence_confirmed() -> None:
    talk = confirmed()
    started_ms = now_ms()
    for at, hours in enumerate((5, 10, 15), 10):
        talk.now += 5 * 3600
        talk.append(at, b"a", timestamp_ms=started_ms + hours * 3_600_000)


# ------------------------------------------------------------------------------------------------------- pipelining


@pytest.mark.parametrize(("alone", "connection"), [(False, 1), (True, 2)], ids=["live instances", "another connection"])
def test_append_waits_for_those_in_flight(alone: bool, connection: int) -> None:
    talk = confirmed(alone=alone)
    first = talk.sends(expecting(10, b"a"))
    second = talk.submit(expecting(11, b"b"), connection=connection)
    talk.silent()
    talk.acknowledged(first, 10)
    assert talk.admitted(second) == g.Fence(SHARED, 0, 11)


def two_lost(talk: Talk, end: int) -> None:
    """Two pipelined appends whose connection was lost, and which are answered as unknown."""
    lost = [talk.sends(expecting(at, b"lost%d" % at)) for at in (end, end + 1)]
    talk.lost(*lost)
    talk.read(lost[0], g.NotYet(end))
    talk.next(g.ReadBatch)
    talk.fails(lost[0], TIMED_OUT)
    talk.report(g.BatchRead(lost[1], g.NotYet(end)))
    talk.fails(lost[1], TIMED_OUT)


def test_no_pipeline_while_a_lost_append_may_be_queued() -> None:
    """1. Another append takes the sequence of the first lost one. 2. The second lost one follows it. 3. It has the
    sequence of the next append, which is refused. 4. A successor that was sent before that would fit."""
    talk = confirmed()
    two_lost(talk, 10)
    first = talk.submit(expecting(10, b"a"), connection=2)
    talk.snapshot(10, next_sequence=10)
    talk.acknowledged(first, 10)
    second = talk.sends(expecting(11, b"b"), connection=2)
    third = talk.submit(expecting(12, b"c"), connection=2)
    talk.silent()
    talk.acknowledged(second, 11)
    talk.admitted(third)
    talk.sends(expecting(13, b"d"), connection=2)


def test_takeover_delays_conditional_appends_on_true_topics() -> None:
    talk = Talk(Check.ON, taken_over=False)
    pending = talk.submit(expecting(10, b"a"))
    talk.silent()
    later = talk.submit(batch(b"later"))
    unconditional = talk.submit(batch(b"x"), connection=2)
    talk.snapshot(10)
    talk.acknowledged(unconditional, 10)
    talk.silent()
    talk.tick(6)
    talk.fails(pending, NOT_LEADER)
    talk.fails(later, NOT_LEADER)


def test_pipeline_fails_with_its_first_append_without_45() -> None:
    talk = confirmed(Check.ON)
    first = talk.sends(expecting(10, b"a", producer=(5, 0, 0)))
    others = (batch(b"unconditional", producer=(5, 0, 1)), expecting(12, b"c", producer=(5, 0, 2)))
    later = [talk.sends(records) for records in others]
    for pending in (first, *later):
        talk.kafka(pending, OUT_OF_ORDER)
    talk.taken(first, THEIRS, actual=20)
    for pending in later:
        talk.fails(pending, POLICY_VIOLATION)
    talk.silent()


def test_producer_continues_after_a_refused_conditional_batch() -> None:
    talk = confirmed(Check.ON)
    talk.acknowledged(talk.submit(batch(b"x", producer=(5, 0, 0))), 10)
    refused = talk.submit(expecting(99, b"a", producer=(5, 0, 1)))
    talk.tick(1)
    talk.call("cancel", refused)
    # Kafka knows sequence 0 of this producer and would find a gap before 2.
    assert talk.submit(batch(b"y", producer=(5, 0, 2))).placement.kind is g.AppendMode.SEQUENCED


# ----------------------------------------------------------------------------------------------------------- retries


def test_retry_waits_for_the_first_try_in_flight() -> None:
    talk = confirmed()
    first = talk.sends(expecting(10, b"a", producer=(5, 0, 0)))
    retry = talk.submit(first.records, connection=2)
    talk.silent()
    talk.acknowledged(first, 10)
    talk.accepted(retry, 10)


def test_what_was_truncated_is_not_remembered() -> None:
    talk = confirmed()
    first = talk.append(10, b"a", producer=(5, 0, 0))
    talk.now += 1
    probe = talk.submit(expecting(50, b"x"))
    talk.snapshot(10, next_sequence=10)  # the log goes back, and the sequence with it
    assert talk.next(g.LostRecords) == g.LostRecords(TP, 10, 11, 10)
    talk.mismatch(probe, expected=50, actual=10)
    retry = talk.submit(first.records, connection=2)
    if isinstance(talk.effects[0], g.ReadLogEnd):
        talk.snapshot(10, next_sequence=10)
    assert talk.admitted(retry) == g.Fence(SHARED, 0, 10)


def test_append_that_ends_before_the_truncation_is_remembered() -> None:
    talk = confirmed()
    first = talk.append(10, b"a", producer=(5, 0, 0))
    talk.append(11, b"b", producer=(5, 0, 1))
    talk.now += 1
    talk.submit(expecting(50, b"x"))
    talk.snapshot(11, next_sequence=11)
    assert talk.next(g.LostRecords) == g.LostRecords(TP, 11, 12, 11)
    talk.next(g.Answer)
    assert list(talk.sequencer.state.retries.appended_batch) == [9, 10]
    talk.accepted(talk.submit(first.records, connection=2), 10)


def retried_under_another_leader(check: Check, *, expected: bool = True) -> tuple[Talk, g.PendingAppend]:
    """The retry of an acknowledged batch at 10, from an idempotent producer."""
    talk = confirmed(check)
    talk.append(10, b"a", producer=(5, 0, 0))
    first = talk.append(11, b"b", producer=(5, 0, 1))
    if not expected:
        first = talk.sends(batch(b"c", producer=(5, 0, 2)))
        talk.acknowledged(first, 12)
    talk.now += 1
    talk.leader_epoch += 1
    retry = talk.submit(first.records, connection=2)
    return talk, retry


@pytest.mark.parametrize("change", ["none", "leader", "connection", "unknown leader"])
@BOTH
def test_memory_holds_only_for_its_leader_and_connection(check: Check, change: str) -> None:
    talk = confirmed(check)
    first = talk.append(10, b"a", producer=(5, 0, 0))
    talk.now += 1
    if change == "connection":
        talk.connected_at = talk.now  # the broker may have restarted
    else:
        talk.leader_epoch = {"none": 0, "leader": 1, "unknown leader": -1}[change]
    retry = talk.submit(first.records, connection=2)
    if change != "none":
        talk.read(retry, in_log(first.records, 10), at=10)
    talk.accepted(retry, 10)
    talk.silent()


@BOTH
def test_retry_of_lost_append_is_appended_again(check: Check) -> None:
    talk, retry = retried_under_another_leader(check)
    talk.read(retry, g.NotYet(11), at=11)
    assert talk.next(g.LostRecords) == g.LostRecords(TP, 11, 12, 11)
    talk.snapshot(11, next_sequence=11)
    assert talk.admitted(retry) == g.Fence(SHARED, 0, 11)
    talk.acknowledged(retry, 11)
    talk.silent()


@BOTH
def test_retry_of_append_lost_with_others_is_a_mismatch(check: Check) -> None:
    talk, retry = retried_under_another_leader(check)
    talk.read(retry, g.NotYet(9), at=11)
    assert talk.next(g.LostRecords) == g.LostRecords(TP, 9, 12, 9)
    talk.snapshot(9, next_sequence=9)
    assert "POSSIBLY_YOURS" not in talk.mismatch(retry, expected=11, actual=9)


@BOTH
def test_retry_is_a_mismatch_if_the_log_has_another_history(check: Check) -> None:
    talk, retry = retried_under_another_leader(check)
    talk.read(retry, in_log(batch(b"other"), 11), at=11)
    assert talk.next(g.LostRecords) == g.LostRecords(TP, 11, 12)
    talk.snapshot(14, next_sequence=14)
    talk.read(retry, in_log(batch(b"other"), 11), at=11)
    assert "POSSIBLY_YOURS" not in talk.mismatch(retry, expected=11, actual=14)


def test_successor_of_a_remembered_append_waits_for_its_read() -> None:
    talk, retry = retried_under_another_leader(Check.ON, expected=False)
    successor = talk.submit(batch(b"d", producer=(5, 0, 3)), connection=2)
    talk.next(g.ReadBatch)
    talk.silent()
    talk.report(g.BatchRead(retry, g.NotYet(12)))
    talk.next(g.LostRecords)
    talk.snapshot(12, next_sequence=12)
    talk.admitted(retry)
    talk.acknowledged(retry, 12)
    talk.admitted(successor)


@pytest.mark.parametrize("deleted", [g.OutOfRange(), compacted(in_log(batch(b"b", b"c"), 11), 1)], ids=["log", "key"])
def test_remembered_append_with_deleted_records_is_unknown(deleted: g.BatchReadResult) -> None:
    talk = confirmed()
    first = talk.append(10, b"a", producer=(5, 0, 0))
    first = talk.append(11, b"b", b"c", producer=(5, 0, 1))
    talk.leader_epoch += 1
    retry = talk.submit(first.records, connection=2)
    talk.read(retry, deleted, at=11)
    talk.fails(retry, TIMED_OUT, "OUTCOME_UNKNOWN")


def test_remembered_append_is_read_until_it_is_replicated() -> None:
    talk, retry = retried_under_another_leader(Check.REQUIRED)
    talk.read(retry, g.NotYet(12), at=11)
    talk.silent()
    talk.tick(0.1)
    talk.read(retry, g.Unreadable("no leader"), at=11)
    talk.tick(6.0)
    talk.fails(retry, NOT_LEADER)


@pytest.mark.parametrize(("leader_epoch", "lost"), [(-1, True), (3, True), (4, True), (2, False)])
def test_shorter_log_is_reported_unless_an_older_leader_shows_it(leader_epoch: int, lost: bool) -> None:
    talk = confirmed(leader_epoch=3, now=1010.0)
    first = talk.submit(expecting(10, b"a"))
    talk.snapshot(10, next_sequence=10)
    talk.acknowledged(first, 10)
    talk.now += 1
    probe = talk.submit(expecting(50, b"x"))
    talk.snapshot(10, next_sequence=10, leader_epoch=leader_epoch)
    if lost:
        assert talk.next(g.LostRecords) == g.LostRecords(TP, 10, 11, 10)
    talk.mismatch(probe, expected=50, actual=10)
    talk.now += 1
    probe = talk.submit(expecting(50, b"x"))
    talk.snapshot(10, next_sequence=10, leader_epoch=leader_epoch)
    talk.mismatch(probe, expected=50, actual=10)  # reported once


def test_truncated_log_without_acknowledged_records_is_not_reported() -> None:
    talk = confirmed()
    probe = talk.submit(expecting(50, b"x"))
    talk.snapshot(12, next_sequence=12)  # records that are not replicated yet
    talk.mismatch(probe, expected=50, actual=12)
    talk.now += 1
    probe = talk.submit(expecting(50, b"x"))
    talk.snapshot(10, next_sequence=10)
    talk.mismatch(probe, expected=50, actual=10)


def unresolved(talk: Talk) -> memoryview:
    """An unconditional batch of a producer with fenced appends, answered with 7 while Kafka may have it queued."""
    talk.append(10, b"a", producer=(5, 0, 0))
    lost = talk.sends(batch(b"b", producer=(5, 0, 1)))
    assert lost.placement.fence == g.Fence(SHARED, 0, 11)
    talk.unknown(lost, at=11)
    return lost.records


def retry_of_absent_batch(end: int) -> tuple[Talk, g.PendingAppend]:
    """The retry of such a batch, which was not where its first try should be. Then the log ends at `end`."""
    talk = confirmed(Check.ON)
    retry = talk.submit(unresolved(talk), connection=2)
    talk.read(retry, g.NotYet(11), at=11)
    talk.snapshot(end, next_sequence=end)
    return talk, retry


def test_absent_unresolved_batch_is_retried_with_same_sequence() -> None:
    talk, retry = retry_of_absent_batch(11)
    assert talk.admitted(retry) == g.Fence(SHARED, 0, 11)
    talk.kafka(retry, base_offset=11, log_append_time_ms=now_ms())  # the first try was faster
    talk.read(retry, in_log(retry.records, 11), at=11)
    talk.accepted(retry, 11)


def test_later_append_passes_a_waiting_one_but_not_a_retry() -> None:
    talk = confirmed(Check.ON)
    lost = talk.submit(expecting(10, b"a", b"b", producer=(5, 0, 0)))
    talk.unknown(lost, at=10)
    other = talk.submit(expecting(10, b"x"), connection=2)
    talk.snapshot(10, next_sequence=10)
    talk.admitted(other)
    talk.submit(batch(b"waits", producer=(8, 0, 0)), connection=3)  # the lost append may still be queued
    retry = talk.submit(lost.records, connection=4)
    later = talk.submit(batch(b"later"), connection=5)
    talk.acknowledged(other, 10)
    talk.read(retry, in_log(other.records, 10))
    talk.snapshot(11, next_sequence=11)
    read = talk.next(g.ReadBatch)
    assert talk.admitted(later) == g.Fence(SHARED, 0, 11)
    talk.report(g.BatchRead(read.pending, in_log(other.records, 10)))
    talk.mismatch(retry, expected=10, actual=11)


def test_retry_is_fenced_again_when_sequence_was_taken() -> None:
    talk, retry = retry_of_absent_batch(12)
    talk.read(retry, in_log(batch(b"another's"), 11), at=11)
    talk.snapshot(12, next_sequence=12)
    assert talk.admitted(retry) == g.Fence(SHARED, 0, 12)


@pytest.mark.parametrize("error", [3, 5, 19, TOO_LARGE])
def test_failed_retry_does_not_exclude_the_first_try(error: int) -> None:
    """If the sequencer forgot the first attempt, the next retry could append the batch a second time."""
    talk, retry = retry_of_absent_batch(11)
    talk.relayed(retry, error)
    again = talk.submit(retry.records, connection=2)
    talk.read(again, in_log(retry.records, 11), at=11)
    talk.accepted(again, 11)


def two_unresolved(talk: Talk, *, conditional: bool) -> list[memoryview]:
    """Two pipelined batches, both answered with 7 while Kafka may still have them queued."""
    talk.append(10, b"a", producer=(5, 0, 0))
    made = [batch(b"b", producer=(5, 0, 1)), batch(b"c", producer=(5, 0, 2))]
    if conditional:
        made = [expecting(11, b"b", producer=(5, 0, 1)), expecting(12, b"c", producer=(5, 0, 2))]
    lost = [talk.sends(records) for records in made]
    assert [pending.placement.fence for pending in lost] == [g.Fence(SHARED, 0, at) for at in (11, 12)]
    talk.lost(*lost)
    talk.read(lost[0], g.NotYet(11))
    read = talk.next(g.ReadBatch)
    talk.fails(lost[0], TIMED_OUT)
    talk.effects.append(read)
    talk.read(lost[1], g.NotYet(11))
    talk.fails(lost[1], TIMED_OUT)
    return made


def two_retries(talk: Talk, *, conditional: bool) -> list[g.PendingAppend]:
    """Neither is in the log."""
    retries = [talk.submit(records, connection=2) for records in two_unresolved(talk, conditional=conditional)]
    for at, retry in enumerate(retries, 11):
        talk.read(retry, g.NotYet(11), at=at)
    talk.snapshot(11, next_sequence=11)
    return retries


@pytest.mark.parametrize("conditional", [False, True])
def test_pipelined_retries_keep_their_order(conditional: bool) -> None:
    talk = confirmed(Check.ON)
    for at, retry in enumerate(two_retries(talk, conditional=conditional), 11):
        assert talk.admitted(retry) == g.Fence(SHARED, 0, at)
        talk.acknowledged(retry, at)


@pytest.mark.parametrize("conditional", [False, True])
def test_retry_of_a_possibly_queued_batch_stays_unknown(conditional: bool) -> None:
    """Both may still land, this one at 12: neither is it refused, nor does it go where the log ends now."""
    talk = confirmed(Check.ON)
    _, records = two_unresolved(talk, conditional=conditional)

    def retried() -> g.PendingAppend:
        retry = talk.submit(records, connection=2)
        talk.read(retry, g.NotYet(11), at=12)
        talk.snapshot(11, next_sequence=11)
        return retry

    talk.fails(retried(), TIMED_OUT)
    talk.now += LIMITS.queued_seconds + 1  # only for a limited time
    retry = retried()
    if conditional:
        talk.mismatch(retry, expected=12, actual=11)
    else:
        assert talk.admitted(retry) == g.Fence(SHARED, 0, 11)


def test_failed_pipelined_retry_stays_unresolved() -> None:
    talk = confirmed(Check.ON)
    retries = two_retries(talk, conditional=False)
    talk.kafka(retries[0], 19)
    for retry in retries:
        talk.fails(retry, 19)
    again = talk.submit(retries[1].records, connection=3)
    assert talk.next(g.ReadBatch) == g.ReadBatch(again, 12)


def test_early_retry_of_unknown_batch_is_sought_too() -> None:
    talk = confirmed(Check.ON)
    talk.append(10, b"a", producer=(5, 0, 0))
    ahead = talk.sends(expecting(11, b"c"), connection=2)
    first = talk.submit(batch(b"b", producer=(5, 0, 1)))
    retry = talk.submit(first.records, connection=3)  # its connection has broken, and the proxy does not know yet
    talk.acknowledged(ahead, 11)
    talk.unknown(first, at=12)
    talk.snapshot(13, next_sequence=13)  # it was queued, and was appended after that read
    talk.read(retry, in_log(first.records, 12), at=12)
    talk.accepted(retry, 12)


@pytest.mark.parametrize("end", ["canceled while it is looked up", "canceled in the queue", "its time is over"])
def test_retry_that_is_not_sent_leaves_batch_unresolved(end: str) -> None:
    talk = confirmed(Check.ON)
    records = unresolved(talk)
    retry = talk.submit(records, connection=2)
    read = talk.next(g.ReadBatch)
    if end == "canceled while it is looked up":
        talk.call("cancel", retry)
    talk.effects.append(read)
    talk.read(retry, g.NotYet(11))
    if end == "its time is over":
        talk.tick(6)
    elif end == "canceled in the queue":
        talk.call("cancel", retry)
    talk.snapshot(11, next_sequence=11)
    if end == "canceled while it is looked up":
        assert talk.next(g.Admit).pending is retry
        talk.call("cancel", retry)  # no connection is left to send it
    talk.effects.clear()
    again = talk.submit(records, connection=3)
    assert talk.next(g.ReadBatch) == g.ReadBatch(again, 11)


# ------------------------------------------------------------------------------------------------------ transactions


def test_log_end_is_reread_after_transactional_append() -> None:
    talk = confirmed(Check.ON)
    pending = talk.sends(batch(b"t", producer=(5, 0, 0), transactional=True))
    assert pending.placement.fence is None
    talk.acknowledged(pending, 10)
    talk.is_unconfirmed(11)


def joins(talk: Talk, transactional_id: str = "app") -> None:
    talk.call("join", transactional_id, 9)
    assert talk.next(g.MayJoin) == g.MayJoin(9)


def test_joined_transaction_counts_until_coordinator_reports_its_end() -> None:
    talk = confirmed(Check.ON)
    joins(talk)
    talk.call("joined", "app", True)
    talk.now += 1
    first = talk.submit(expecting(10, b"a"))
    assert talk.effects[0] == g.ReadLogEnd(TP, ("app",))
    talk.snapshot(10, next_sequence=10)  # nothing was written: the leader knows of no transaction
    talk.fails(first, NOT_LEADER)
    second = talk.submit(expecting(10, b"a"))
    assert talk.effects[0] == g.ReadLogEnd(TP, ("app",))
    talk.snapshot(11, next_sequence=10, ended_transactions=frozenset({"app"}))  # its marker lies at 10
    talk.read(second, in_log(batch(b"marker"), 10))
    talk.mismatch(second, expected=10, actual=11)
    third = talk.submit(expecting(11, b"a"))
    if isinstance(talk.effects[0], g.ReadLogEnd):
        assert talk.effects[0] == g.ReadLogEnd(TP)
        talk.snapshot(11, next_sequence=10)
    assert talk.admitted(third) == g.Fence(SHARED, 0, 10)


@pytest.mark.parametrize("check", [Check.ON, Check.REQUIRED])
@pytest.mark.parametrize("answered", [True, False])
def test_appends_wait_while_a_marker_is_written(check: Check, answered: bool) -> None:
    talk = confirmed(check)
    sent = talk.sends(expecting(10, b"a"))
    talk.call("join", MARKER, 9)
    waiting = talk.submit(expecting(12, b"b"), wait=60)
    late = talk.submit(expecting(12, b"c"))
    talk.silent()  # a conditional append is in progress
    talk.acknowledged(sent, 10)
    assert talk.next(g.MayJoin) == g.MayJoin(9)
    talk.silent()
    assert talk.sequencer.issued.issue(object, talk.now) is None  # type: ignore[arg-type]
    if answered:
        talk.call("cancel", late)
    talk.call("joined", MARKER, answered)
    if not answered:
        talk.tick(LIMITS.queued_seconds - 0.1)
        talk.fails(late, NOT_LEADER, "TRY_AGAIN a transaction marker is being written topic=orders partition=3")
        talk.silent()  # it may still be written
        talk.tick(0.2)
    talk.snapshot(12, next_sequence=11)
    if check is Check.REQUIRED:  # no client has bypassed the proxy: no Violation
        talk.next(g.PublishBase)
        talk.report(g.BasePublished(True, ours=True))
        talk.snapshot(12, epoch=1, next_sequence=0, fence_base=(1, 12))
    assert talk.admitted(waiting) is not None


def test_log_end_read_during_marker_is_read_again() -> None:
    talk = Talk(Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    read = talk.next(g.ReadLogEnd)
    joins(talk, MARKER)
    talk.effects.append(read)
    talk.snapshot(10)
    talk.silent()
    talk.call("joined", MARKER, True)
    talk.snapshot(10)
    talk.admitted(pending)


def test_appends_wait_for_every_marker() -> None:
    talk = confirmed(Check.ON)
    for _ in range(2):
        joins(talk, MARKER)
    talk.submit(expecting(12, b"a"))
    talk.call("joined", MARKER, True)
    assert talk.sequencer.in_transaction
    talk.silent()
    talk.call("joined", MARKER, True)
    assert not talk.sequencer.in_transaction
    talk.next(g.ReadLogEnd)


@pytest.mark.parametrize("fate", ["not answered yet", "lost a moment ago", "answered after the query"])
def test_coordinator_that_may_not_know_is_not_trusted(fate: str) -> None:
    talk = confirmed(Check.ON)
    joins(talk)
    if fate == "lost a moment ago":
        talk.call("joined", "app", False)
    pending = talk.submit(expecting(10, b"a"))
    queried_at = talk.now
    if fate == "answered after the query":
        talk.now += 0.1
        talk.call("joined", "app", True)  # while the log end is still being read
        talk.now += 0.1
    talk.snapshot(10, next_sequence=10, ended_transactions=frozenset({"app"}), transactions_as_of=queried_at)
    refused = talk.next(g.Answer)
    assert (refused.pending, refused.result.error_code, refused.reason) == (pending, NOT_LEADER, "transaction_open")


def test_fence_is_unconfirmed_while_a_transaction_may_exist() -> None:
    talk = confirmed(Check.ON)
    pending = talk.sends(expecting(10, b"a"))
    talk.call("join", "app", 1)
    talk.acknowledged(pending, 10)
    talk.next(g.MayJoin)
    talk.is_unconfirmed(11)


def test_an_unconditional_append_does_not_wait_for_transactions() -> None:
    talk = confirmed(Check.ON)
    joins(talk)
    unconditional = talk.submit(batch(b"x"))
    talk.snapshot(10, next_sequence=10, open_transactions=frozenset({4}))
    assert talk.admitted(unconditional) == g.Fence(SHARED, 0, 10)


_STARTED_MS = int(time.time() * 1000)  # a retry has the timestamps of its first try


def within(expected: int | None, *values: bytes, producer: tuple[int, int, int] = (5, 0, 0)) -> memoryview:
    """A batch of a transaction."""
    if expected is None:
        return batch(*values, producer=producer, transactional=True, timestamp_ms=_STARTED_MS)
    return expecting(expected, *values, producer=producer, transactional=True, timestamp_ms=_STARTED_MS)


OPEN, ALSO_OPEN = {"open_transactions": frozenset({4})}, {"open_transactions": frozenset({4, 6})}
OWN_OPEN = {"open_transactions": frozenset({5})}
ENDING, OWN_ENDING = {"ending_transactions": frozenset({"other"})}, {"ending_transactions": frozenset({"app"})}
CONFLICT = "TRANSACTION_CONFLICT topic=orders partition=3: "


@pytest.mark.parametrize(
    ("other", "expected", "owns", "facts", "error", "message"),
    [
        ("wrote", 11, False, OPEN, NOT_LEADER, "TRY_AGAIN"),
        ("wrote", 11, True, OPEN, POLICY_VIOLATION, CONFLICT),
        ("wrote", 9, False, OPEN, POLICY_VIOLATION, "OFFSET_MISMATCH"),
        # The ending transaction waits for no other. Its markers are appended to one partition after the other.
        ("wrote", 12, True, OPEN | ENDING, NOT_LEADER, "TRY_AGAIN"),
        ("wrote", 12, True, ALSO_OPEN | ENDING, POLICY_VIOLATION, CONFLICT),
        # Two that have joined each other's partitions would both wait, and neither has written anything yet.
        ("joined", 10, True, {}, 0, ""),
        ("joined", 10, False, ENDING, NOT_LEADER, "TRY_AGAIN"),
        # Its own transaction, of which only the marker is missing.
        ("none", 10, True, OWN_OPEN | OWN_ENDING, NOT_LEADER, "TRY_AGAIN"),
        ("was refused", 10, False, {}, 0, ""),
        # Kafka answers EndTxn before it writes the markers.
        ("none", 10, False, OWN_ENDING, NOT_LEADER, "TRY_AGAIN"),
        # The coordinator does not know it, is away, or about to give it another producer id: then Kafka is to decide.
        ("none", 10, False, {"producer_ids": {"app": -1}}, 0, ""),
        ("none", 10, False, {}, 0, ""),
    ],
)
def test_transaction_alongside_another_one(
    *, other: str, expected: int, owns: bool, facts: dict[str, Any], error: int, message: str
) -> None:
    """`other`: what transaction `other`, of producer 4, has done. `owns`: transaction `app` has appended elsewhere."""
    talk = confirmed(Check.ON)
    end = 11 if other == "wrote" else 10
    if other == "wrote":
        written_by_another(talk)
    elif other == "joined":
        joins(talk, "other")
        talk.call("joined", "other", True)
    elif other == "was refused":
        refused = talk.submit(within(None, b"o", producer=(4, 0, 7)), within="other", connection=9)
        talk.relayed(refused, 45)
    for _ in range(2 if error == NOT_LEADER else 1):  # the log end is read again for each
        pending = talk.submit(within(expected, b"t"), within="app", owns=owns)
        talk.snapshot(end, next_sequence=10, **facts)
        if error:
            result = talk.answered(pending)
            reported = 11 if expected == 9 else expected  # the log end, or after a conflict the expected offset
            assert (result.error_code, result.base_offset) == (error, reported if error == POLICY_VIOLATION else -1)
            assert (result.error_message or "").startswith(message)
        else:
            assert talk.admitted(pending) is None
            talk.acknowledged(pending, end)


def written_by_another(talk: Talk) -> None:
    """Transaction `other`, of producer 4, has a record at 10."""
    pending = talk.submit(within(None, b"o", producer=(4, 0, 0)), within="other", connection=9)
    talk.acknowledged(pending, 10)


def test_transaction_with_lost_append_is_waited_for() -> None:
    talk = confirmed(Check.ON)
    lost = talk.loses(within(None, b"o", producer=(4, 0, 0)), within="other", connection=9)
    talk.fails(lost, TIMED_OUT)
    mine = talk.submit(within(10, b"t"), within="app", wait=1.0)
    talk.tick(1.1)
    talk.fails(mine, NOT_LEADER)
    talk.now += 40
    mine = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(mine) is None


def test_transaction_delays_no_append_after_its_marker() -> None:
    talk = confirmed(Check.ON)
    written_by_another(talk)
    talk.now += 1
    pending = talk.submit(within(12, b"t"), within="app", owns=True)
    assert talk.effects[0] == g.ReadLogEnd(TP, ("other", "app"))
    talk.snapshot(12, next_sequence=10, ended_transactions=frozenset({"other"}))
    talk.acknowledged(pending, 12)
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
    talk = confirmed(Check.ON)
    mine = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10, producer_ids={"app": 5})
    talk.acknowledged(mine, 10)
    talk.now += 1
    theirs = talk.submit(within(expected, b"t", producer=(5, 0, 1)), within="others")
    talk.snapshot(11, next_sequence=10, open_transactions=frozenset({5}), producer_ids={"app": 5, "others": 6})
    result = talk.answered(theirs)
    assert (result.error_code, result.base_offset) == (INVALID_PRODUCER_ID_MAPPING, -1)
    assert "ANOTHERS_PRODUCER" in str(result.error_message)
    assert talk.sends(within(11, b"t", producer=(5, 0, 1)), within="app").placement.fence is None


def test_producer_id_is_known_per_transactional_id() -> None:
    talk = confirmed(Check.ON)
    first = talk.submit(within(17, b"t", producer=(6, 0, 0)), within="others")
    second = talk.submit(within(10, b"t"), within="app")
    talk.snapshot(10, next_sequence=10, producer_ids={"others": 6})
    talk.mismatch(first, expected=17, actual=10)
    assert talk.effects[0] == g.ReadLogEnd(TP, ("app",))
    talk.snapshot(10, next_sequence=10, producer_ids={"app": 6})
    talk.fails(second, INVALID_PRODUCER_ID_MAPPING)


def test_transaction_waits_bounded_time_with_other_instances() -> None:
    """What it owns by them is not known here. Afterwards, a later append waits again."""
    talk = confirmed(Check.ON)
    written_by_another(talk)
    talk.alone = False
    for error in (*[NOT_LEADER] * 4, POLICY_VIOLATION, NOT_LEADER):
        pending = talk.submit(within(11, b"t"), within="app")
        talk.snapshot(11, open_transactions=frozenset({4}))
        talk.fails(pending, error)
        talk.now += 6 if error == POLICY_VIOLATION else 3


# ---- a retry within a transaction


def own(at: int, producer: tuple[int, int, int] = (5, 0, 0), *values: bytes) -> g.Found:
    return in_log(within(10, *(values or (b"t", b"u")), producer=producer), at, g.Fence(*producer))


def in_transaction(next_sequence: int, epoch: int = 0) -> dict[str, Any]:
    return {
        "open_transactions": frozenset({5}),
        "in_transaction": {5: g.ProducerState(epoch, next_sequence)},
    }


ANOTHERS = in_log(batch(b"another's"), 10)
OTHER_RECORDS = own(10, (5, 0, 0), b"o", b"p")


def lost_at_ten(talk: Talk) -> memoryview:
    """A batch of transaction `app`, expecting 10, that ended unknown."""
    pending = talk.submit(within(10, b"t", b"u"), within="app")
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(pending) is None
    talk.lost(pending)
    talk.fails(pending, TIMED_OUT)
    return pending.records


def retried(
    there: g.Found, end: int, facts: dict[str, Any], *, after_seconds: float = 0.0
) -> tuple[Talk, g.PendingAppend]:
    talk = confirmed(Check.ON)
    records = lost_at_ten(talk)
    talk.now += after_seconds
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(end, next_sequence=10, **facts)
    talk.read(again, there, at=10)
    return talk, again


def test_retry_of_appended_transactional_batch_succeeds() -> None:
    """And does not wait until its first try can be in no queue any more."""
    talk, again = retried(own(10), 12, in_transaction(2))
    talk.accepted(again, 10)


DIFFERENT: dict[str, tuple[g.Found, int, dict[str, Any]]] = {
    "another sequence": (own(10, (5, 0, 2)), 12, {}),
    "another epoch": (own(10, (5, 1, 0)), 12, {}),
    "another producer": (own(10, (6, 0, 0)), 12, {}),
    "other records": (OTHER_RECORDS, 12, {}),
    "its transaction has not come to it": (ANOTHERS, 14, in_transaction(0)),
    "a transaction of another epoch": (ANOTHERS, 14, in_transaction(2, epoch=1)),
    "no transaction": (ANOTHERS, 14, {}),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_different_batch_at_the_offset_is_no_success(difference: str) -> None:
    there, end, facts = DIFFERENT[difference]
    talk, again = retried(there, end, facts, after_seconds=40)  # its first try sits in no queue any more
    talk.mismatch(again, expected=10, actual=end)


def test_refusal_waits_while_earlier_try_may_be_queued() -> None:
    """The queued attempt could be appended after the refusal, in the producer's next transaction of the same epoch."""
    talk, again = retried(ANOTHERS, 14, {})
    talk.fails(again, NOT_LEADER)


def test_retry_appended_elsewhere_is_reported_as_violation() -> None:
    talk, again = retried(ANOTHERS, 14, in_transaction(2))
    assert talk.admitted(again) is None  # sent again: for Kafka it is a duplicate
    talk.kafka(again, base_offset=12, log_append_time_ms=7)
    talk.read(again, own(12), at=12)
    talk.read(again, ANOTHERS, at=10)
    talk.next(g.Violation)
    result = talk.answered(again)
    assert (result.error_code, result.base_offset) == (POLICY_VIOLATION, 12)
    assert "OFFSET_VIOLATION" in (result.error_message or "")


def test_mismatch_after_forgotten_sequence_is_possibly_yours() -> None:
    talk, again = retried(ANOTHERS, 14, in_transaction(4))
    talk.kafka(again, 45)
    assert "POSSIBLY_YOURS" in talk.mismatch(again, expected=10, actual=14)


def sent_in_transaction(expected: int | None = 10) -> tuple[Talk, g.PendingAppend]:
    talk = confirmed(Check.ON)
    pending = talk.submit(within(expected, b"t", b"u"), within="app")
    if expected is not None:
        talk.snapshot(10, next_sequence=10)
    talk.admitted(pending)
    return talk, pending


def test_violation_by_a_marker_names_the_marker() -> None:
    """The marker ends a transaction that joined and wrote nothing. No append waits for such a transaction."""
    talk, pending = sent_in_transaction()
    talk.kafka(pending, base_offset=11)
    talk.read(pending, marker(in_log(batch(b"marker"), 10, g.Fence(4, 0, -1))))
    assert "marker" in talk.fails(pending, POLICY_VIOLATION, "OFFSET_VIOLATION")


@pytest.mark.parametrize(
    ("expected", "at", "there", "is_itself"),
    [
        (10, 10, own(10), True),
        # One of a transaction that was aborted while it sat in a queue, under transactions v1.
        (10, 10, OTHER_RECORDS, False),
        (10, 7, own(7, (5, 0, 0), b"o", b"p"), False),
        (None, 7, in_log(within(None, b"t", b"u"), 7, g.Fence(5, 0, 0)), True),
        # Kafka answers 0 with the offset of the other batch. If the proxy relayed that, the record would be lost.
        (None, 7, own(7, (5, 0, 0), b"o", b"p"), False),
    ],
)
def test_what_kafka_calls_a_duplicate_is_read_back(
    expected: int | None, at: int, there: g.Found, is_itself: bool
) -> None:
    talk, pending = sent_in_transaction(expected)
    talk.kafka(pending, base_offset=at, log_append_time_ms=7)
    talk.read(pending, there, at=at)
    if is_itself:
        talk.accepted(pending, at)
    else:
        message = talk.fails(pending, POLICY_VIOLATION)
        assert message.startswith(f"SEQUENCE_TAKEN topic=orders partition=3 offset={at}: ")


def test_unreadable_duplicate_becomes_unknown() -> None:
    talk, pending = sent_in_transaction()
    talk.kafka(pending, base_offset=10, log_append_time_ms=7)
    for _ in range(2):
        talk.read(pending, g.Unreadable("the leader is moving"), at=10)
        talk.silent()
        talk.tick(1)
    talk.next(g.ReadBatch)
    talk.tick(10)
    talk.fails(pending, TIMED_OUT)


def test_later_appends_wait_for_acknowledged_transactional_retry() -> None:
    talk = confirmed(Check.ON)
    records = lost_at_ten(talk)
    later = talk.submit(within(12, b"v", producer=(5, 0, 2)), within="app", wait=1.0, owns=True)
    talk.silent()
    talk.tick(1.1)
    talk.fails(later, NOT_LEADER)
    again = talk.submit(records, within="app", owns=True)
    talk.snapshot(10, next_sequence=10)
    talk.acknowledged(again, 10)
    later = talk.submit(within(12, b"v", producer=(5, 0, 2)), within="app", wait=1.0, owns=True)
    talk.snapshot(12, next_sequence=10, **in_transaction(2))
    assert talk.admitted(later) is None


# ---- a transaction joins


def test_join_waits_for_in_doubt_appends() -> None:
    """Otherwise the marker takes the offset at which the sequencer looks for the in-doubt batch: the client gets 44,
    and Kafka appends the batch after the marker."""
    talk = confirmed(Check.ON)
    pending = talk.sends(expecting(10, b"a"))
    talk.call("join", "app", 7)
    talk.lost(pending)
    talk.read(pending, in_log(pending.records, 10, pending.placement.fence), at=10)
    talk.fails(pending, TIMED_OUT)
    assert talk.next(g.MayJoin) == g.MayJoin(7)


def test_unfenced_append_does_not_delay_a_join() -> None:
    talk = confirmed(Check.ON)
    talk.sends(batch(b"x", producer=(8, 0, 0)))
    joins(talk)


def test_fenced_conditional_appends_wait_for_a_pending_join() -> None:
    talk = confirmed(Check.ON)
    first = talk.sends(expecting(10, b"a"))
    talk.call("join", "app", 7)
    second = talk.submit(expecting(11, b"b"))
    talk.silent()
    talk.acknowledged(first, 10)
    talk.next(g.MayJoin)  # it has not been sent to its coordinator
    talk.snapshot(11, next_sequence=11, ended_transactions=frozenset({"app"}))
    talk.fails(second, NOT_LEADER)


def test_admission_before_a_join_expires() -> None:
    talk = confirmed(Check.ON)
    pending = talk.submit(expecting(10, b"a"))
    talk.next(g.Admit)  # and waits for another partition of its request
    assert talk.sequencer.may_send(pending, talk.now)
    joins(talk)
    assert not talk.sequencer.may_send(pending, talk.now)


def test_abandoned_join_is_not_notified_later() -> None:
    talk = confirmed(Check.ON)
    pending = talk.sends(expecting(10, b"a"))
    talk.call("join", "app", 7)
    talk.call("joined", "app", True)
    talk.acknowledged(pending, 10)
    talk.silent()


# ----------------------------------------------------------------------------------------------------- time and bounds


def test_unreadable_log_end_is_retried_until_timeout(talk: Talk) -> None:
    pending = talk.submit(expecting(10, b"a"), wait=1.0)
    for _ in range(3):
        talk.next(g.ReadLogEnd)
        talk.report(g.LogEndUnknown("the leader is moving"))
        talk.silent()
        talk.tick(0.2)
    talk.effects.clear()
    talk.tick(1.0)
    talk.fails(pending, NOT_LEADER)


def test_missing_partition_is_refused_at_once(talk: Talk) -> None:
    pending_appends = [talk.submit(expecting(10, b"a"), connection=i) for i in range(2)]
    talk.next(g.ReadLogEnd)
    talk.report(g.LogEndUnknown("there is no such partition", 3))
    for pending in pending_appends:
        talk.fails(pending, 3)
    assert talk.sequencer.idle


def test_missing_right_of_the_proxy_is_refused_at_once(talk: Talk) -> None:
    """A retry would end in a timeout that hides the reason."""
    pending_appends = [talk.submit(expecting(10, b"a"), connection=i) for i in range(2)]
    talk.next(g.ReadLogEnd)
    talk.report(g.LogEndUnknown("DescribeProducers returned TOPIC_AUTHORIZATION_FAILED", 29))
    for pending in pending_appends:
        assert talk.fails(pending, 29).startswith("NOT_AUTHORIZED topic=")
    assert talk.sequencer.idle


def test_missing_right_is_no_answer_about_an_earlier_attempt() -> None:
    talk = confirmed(Check.ON)
    retry = talk.submit(unresolved(talk), connection=2)
    talk.read(retry, g.NotYet(11), at=11)
    talk.next(g.ReadLogEnd)
    talk.report(g.LogEndUnknown("DescribeProducers returned TOPIC_AUTHORIZATION_FAILED", 29))
    talk.fails(retry, TIMED_OUT)


def test_the_queue_is_bounded() -> None:
    talk = Talk(sequencer=PartitionSequencer(TP, g.SequencerLimits(queue_max=2)))
    for _ in range(2):
        talk.submit(expecting(10, b"a"))
    talk.next(g.ReadLogEnd)
    talk.fails(talk.submit(expecting(10, b"a")), NOT_LEADER, "queue is full")


# ---------------------------------------------------------------------------------------------- unconditional appends


def test_idempotent_unconditional_appends_run_together_unfenced() -> None:
    talk = confirmed(Check.ON)
    pending_appends = [talk.sends(batch(b"x", producer=(5 + i, 0, 0)), connection=i) for i in range(3)]
    assert not any(pending.placement.fence for pending in pending_appends)
    conditional = talk.submit(expecting(13, b"a"), connection=9)
    talk.silent()
    for i in (1, 0, 2):  # answered in another order than sent
        talk.acknowledged(pending_appends[i], 10 + i)
    assert talk.admitted(conditional) == g.Fence(SHARED, 0, 10)


def test_unfenced_append_waits_for_fenced_ones_in_flight() -> None:
    talk = confirmed(Check.ON)
    fenced = talk.sends(expecting(10, b"a"))
    unfenced = talk.submit(batch(b"x", producer=(5, 0, 0)))
    talk.silent()
    talk.acknowledged(fenced, 10)
    assert talk.admitted(unfenced) is None


def test_connection_in_flight_is_not_preferred() -> None:
    talk = confirmed()
    first = talk.sends(expecting(10, b"a"))
    other, _ = (talk.submit(expecting(11, b"b"), connection=connection) for connection in (2, 1))
    talk.silent()
    talk.acknowledged(first, 10)
    talk.admitted(other)


def test_lost_idempotent_append_is_resent_before_others() -> None:
    talk = confirmed(Check.ON, may_write=True)
    own = talk.loses(batch(b"x", producer=(5, 0, 0)))
    resend = talk.next(g.Resend)
    conditional = talk.submit(expecting(11, b"a"), connection=2)
    talk.silent()
    talk.effects.append(resend)
    talk.resent(own, None)
    talk.tick(0.1)
    talk.resent(own, PartitionResult(3, 0, 10))
    talk.accepted(own, 10)
    talk.snapshot(11, next_sequence=10)
    assert talk.admitted(conditional) == g.Fence(SHARED, 0, 10)


@pytest.mark.parametrize("fate", ["unknown", "an error on the resend", "an error"])
def test_lost_idempotent_append_after_failure_is_not_resent(fate: str) -> None:
    """Kafka finds the gap only if it knows this producer; else it would take the second without the first."""
    talk = confirmed(Check.ON, may_write=True)
    first, second = (talk.sends(batch(b"x", producer=(5, 0, each))) for each in range(2))
    if fate == "an error":
        talk.relayed(first, TOO_LARGE)
        talk.lost(second)
        talk.fails(second, TIMED_OUT)
        return
    talk.lost(first, second)
    talk.now += LIMITS.resolve_seconds
    talk.resent(first, None if fate == "unknown" else PartitionResult(3, TOO_LARGE))
    assert {talk.next(g.Answer).pending for _ in range(2)} == {first, second}
    talk.silent()


@pytest.mark.parametrize("error", [19, 6, 3, 7, TOO_LARGE, OLD_TIMESTAMP, OUT_OF_ORDER, WRONG_EPOCH])
def test_resend_error_leaves_the_first_send_unknown(error: int) -> None:
    """It may still be in the log: Kafka answers 19 before it looks for duplicates."""
    talk = confirmed(Check.ON, may_write=True)
    own = talk.loses(batch(b"x", producer=(5, 0, 0)))
    talk.resent(own, PartitionResult(3, error))
    if error in (19, 6, 3, 7):
        talk.silent()
        talk.tick(0.1)
        talk.next(g.Resend)
    else:
        talk.fails(own, TIMED_OUT)


@pytest.mark.parametrize("conditional", [True, False])
def test_retry_of_a_waiting_append_is_appended_once(conditional: bool) -> None:
    talk = confirmed(Check.ON)
    talk.append(10, b"a", producer=(5, 0, 0))
    records = expecting(12, b"b", producer=(5, 0, 1)) if conditional else batch(b"b", producer=(5, 0, 1))
    ahead = talk.sends(expecting(11, b"c"), connection=2)
    first = talk.submit(records)
    again = talk.submit(records, connection=3)
    talk.silent()  # both wait for the other connection's append
    talk.acknowledged(ahead, 11)
    talk.acknowledged(first, 12)
    talk.accepted(again, 12)
    talk.silent()


def test_duplicate_waiter_replaces_a_canceled_first_try() -> None:
    talk = confirmed()
    first = talk.loses(expecting(10, b"a", producer=(5, 0, 0)))
    read = talk.next(g.ReadBatch)
    again = talk.submit(first.records, connection=2)
    talk.silent()
    # Another process appended there, and its batch was truncated: the first attempt would be sent again.
    talk.effects.append(read)
    talk.read(first, ANOTHERS)
    talk.snapshot(10, next_sequence=10)
    assert talk.next(g.Admit).pending is first
    talk.call("cancel", first)
    assert talk.admitted(again) == g.Fence(SHARED, 0, 10)
    talk.acknowledged(again, 10)


def test_duplicate_waiter_of_a_resubmitted_append_is_cancelable() -> None:
    talk, first = in_doubt()
    retry = talk.submit(first.records, connection=2)
    theirs = in_log(expecting(10, b"theirs"), 10, g.Fence(SHARED, 0, 10, 8))
    talk.read(first, theirs)
    talk.call("cancel", retry)
    talk.taken(first, theirs)
    talk.silent()


def test_conditional_append_hides_predecessors_error_45() -> None:
    talk = confirmed(Check.ON)
    own = talk.sends(batch(b"x", producer=(5, 0, 7)))
    later = talk.submit(expecting(11, b"a", producer=(5, 0, 8)))
    talk.relayed(own, OUT_OF_ORDER)  # Kafka's own word, and its own business
    assert talk.fails(later, POLICY_VIOLATION) == "PREDECESSOR_FAILED OUT_OF_ORDER_SEQUENCE_NUMBER"


def test_in_doubt_append_after_failed_batch_fails_too() -> None:
    talk = confirmed(Check.ON)
    first, second = talk.sends(batch(b"a")), talk.sends(expecting(11, b"b"))
    talk.lost(second)
    talk.relayed(first, TOO_LARGE)
    talk.read(second, in_log(batch(b"theirs"), 11), at=11)
    talk.fails(second, TOO_LARGE)


def test_an_unconditional_batch_does_not_fall_with_another() -> None:
    """Neither has a producer id: Kafka would answer each for itself."""
    talk = confirmed(Check.ON)
    first, second = talk.sends(batch(b"a")), talk.sends(batch(b"b"))
    talk.relayed(first, TOO_LARGE)
    talk.kafka(second, OUT_OF_ORDER)  # its fence was that of a successor
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(second) == g.Fence(SHARED, 0, 10)
    talk.acknowledged(second, 10)


def test_admitted_append_fails_with_its_pipeline() -> None:
    talk = confirmed()
    first = talk.sends(expecting(10, b"a", producer=(5, 0, 0)))
    second = talk.submit(expecting(11, b"b", producer=(5, 0, 1)))
    assert talk.next(g.Admit).pending is second
    assert talk.sequencer.may_send(second, talk.now)
    talk.relayed(first, TOO_LARGE)
    assert not talk.sequencer.may_send(second, talk.now)
    talk.call("cancel", second)
    talk.call("submit", second)
    talk.fails(second, TOO_LARGE)


def test_append_after_a_canceled_resubmission_fails_too() -> None:
    talk = confirmed(Check.ON)
    first, second = talk.sends(batch(b"a")), talk.sends(expecting(11, b"b"))
    for pending in (first, second):
        talk.kafka(pending, OUT_OF_ORDER)
    talk.snapshot(10, next_sequence=10)
    assert talk.next(g.Admit).pending is first
    talk.call("cancel", first)  # the client's next request is half sent, say
    talk.fails(second, NOT_LEADER)


def test_unused_fence_is_not_kept() -> None:
    """A canceled append is submitted again after its producer was forgotten: the old fence would not be compared."""
    talk = confirmed(Check.ON)
    talk.append(10, b"a", producer=(5, 0, 0))
    unconditional = talk.submit(batch(b"b", producer=(5, 0, 1)))
    assert talk.next(g.Admit).pending is unconditional
    talk.report(g.Forget())
    talk.call("cancel", unconditional)
    talk.call("submit", unconditional)
    assert talk.admitted(unconditional) is None


def test_forgetting_drops_log_end_and_pending_reads(talk: Talk) -> None:
    pending = talk.submit(expecting(10, b"a"))
    talk.report(g.Forget())
    talk.snapshot(7)  # requested before the topic was created again
    talk.snapshot(0)
    talk.mismatch(pending, expected=10, actual=0)


@pytest.mark.parametrize("same_log", [True, False])
def test_config_change_keeps_retry_detection(same_log: bool) -> None:
    talk = confirmed(Check.ON)
    records = unresolved(talk)
    talk.report(g.Forget(same_log))
    retry = talk.submit(records, connection=2)
    if same_log:
        assert talk.next(g.ReadBatch) == g.ReadBatch(retry, 11)
    else:
        assert retry.placement.kind is g.AppendMode.PASS_THROUGH  # of another topic nothing is known


# ------------------------------------------------------------------------------------ errors that Kafka gives each time

SERVER_ERROR = -1


def failed(check: Check = Check.REQUIRED, **attributes: Any) -> tuple[Talk, g.PendingAppend]:
    """Kafka has answered an append that expects 10 with -1, and nothing lies there."""
    talk = confirmed(check, **attributes)
    pending = talk.submit(expecting(10, b"a"))
    talk.kafka(pending, SERVER_ERROR)
    talk.read(pending, g.NotYet(10), at=10)
    return talk, pending


def test_append_after_a_violation_has_no_append_time() -> None:
    """Its own batch is not in the log."""
    violation = PartitionResult(3, POLICY_VIOLATION, 11, 7, error_message="OFFSET_VIOLATION expected=10 appended_at=11")
    answer = sent_after(confirmed(Check.ON).submit(expecting(12, b"o")), violation)
    assert (answer.error_code, answer.log_append_time_ms) == (POLICY_VIOLATION, -1)
    assert (answer.error_message or "").startswith("PREDECESSOR_FAILED OFFSET_VIOLATION")


def fails_again(talk: Talk, pending: g.PendingAppend, error: int = SERVER_ERROR) -> None:
    talk.snapshot(10, next_sequence=10)
    talk.resent(pending, PartitionResult(3, error))


def test_repeated_error_is_final_if_log_is_unchanged() -> None:
    talk, pending = failed(may_write=True)
    other = talk.submit(expecting(10, b"b"), connection=2)
    fails_again(talk, pending)
    talk.read(pending, g.NotYet(10), at=10)  # after the second answer, at once
    talk.snapshot(10, next_sequence=10)
    assert talk.answered(pending) == PartitionResult(3, SERVER_ERROR)
    talk.snapshot(10, next_sequence=10)
    assert talk.admitted(other) == g.Fence(SHARED, 0, 10)


@pytest.mark.parametrize("there", ["in the log", "not replicated yet", "by its sequence"])
def test_repeated_error_is_not_final_if_append_exists(there: str) -> None:
    talk, pending = failed(may_write=True, instance_id=7)
    fails_again(talk, pending)
    if there == "in the log":
        talk.read(pending, in_log(pending.records, 10, pending.placement.fence))
        talk.accepted(pending, 10)
        return
    talk.read(pending, g.NotYet(11 if there == "not replicated yet" else 10))
    if there == "by its sequence":
        talk.snapshot(10, next_sequence=11)
        talk.fails(pending, TIMED_OUT)
    talk.silent()


def test_different_second_error_is_not_final() -> None:
    talk, pending = failed(may_write=True)
    fails_again(talk, pending, error=56)
    talk.silent()
    talk.tick(0.1)
    talk.read(pending, g.NotYet(10))
    fails_again(talk, pending)
    talk.silent()


def test_repeated_error_after_lost_try_is_unknown() -> None:
    talk = confirmed(may_write=True)
    pending = talk.loses(expecting(10, b"a"))
    for _ in range(2):
        talk.read(pending, g.NotYet(10))
        fails_again(talk, pending)
        talk.tick(0.1)
    talk.read(pending, g.NotYet(10))
    talk.snapshot(10, next_sequence=10)
    talk.fails(pending, TIMED_OUT)  # the first try may be queued, and appended later


def test_error_is_final_without_proven_write_permission() -> None:
    talk, pending = failed(Check.ON)
    talk.snapshot(10, next_sequence=10)
    assert talk.answered(pending) == PartitionResult(3, SERVER_ERROR)
    talk.sends(batch(b"x", producer=(5, 0, 0)), connection=2)  # nothing is queued that it would have to wait for


def test_unconditional_append_error_is_relayed() -> None:
    talk = confirmed(Check.ON, may_write=True)
    own = talk.submit(batch(b"x", producer=(5, 0, 0)))
    talk.kafka(own, SERVER_ERROR)
    assert talk.answered(own) == PartitionResult(3, SERVER_ERROR)
    conditional = talk.submit(expecting(10, b"a"), connection=2)
    talk.snapshot(10, next_sequence=10)
    talk.admitted(conditional)


def test_transactional_append_timed_out_by_kafka_is_final() -> None:
    """`timeout_ms` is the client's to choose: it could keep others from appending for as long as a queue may take."""
    talk = confirmed(Check.ON)
    transactional = talk.submit(batch(b"x", producer=(5, 0, 0), transactional=True), within="t")
    talk.relayed(transactional, TIMED_OUT)
    conditional = talk.submit(expecting(12, b"a"), connection=2)
    talk.snapshot(12, next_sequence=10, ended_transactions=frozenset({"t"}), transactions_as_of=talk.now)
    talk.admitted(conditional)
