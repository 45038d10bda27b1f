"""The partition sequencer: orders the appends to one checked partition and decides the answer to each.

Sans-IO: calls in, effects out, no clock (every call has `now`). One object per partition and process. `session/`
submits appends, `services/` does the reads. The decisions are in the parts that `PartitionSequencer` composes:

    Admitter -> Admit -> KafkaAnswers -> Answer
                              |
        InDoubtResolver, Lookups: only the log shows the outcome

Principle
---------
A conditional append is *fenced*. It is appended under one producer id that all instances share. Its sequence is its
expected offset: `sequence = (expected - sequence_offset) mod 2^31`. Kafka appends only the next sequence of a producer,
atomically. So the broker refuses (45) an append whose expectation no longer holds, even one that waited in a queue
while its connection closed and other appends passed it. `sequence_offset` is the number of unfenced offsets. On
`required` topics it is the published base (0 at first). On `true` topics this process counts it.

Three hazards; without its rule, each led to an append at the wrong offset or to a lost append reported as safe:

1. *Fence unconfirmed.* A broker that does not know the producer id accepts any first sequence. So a fence is relied on
   only while **confirmed**: after a fenced append of this process was acknowledged, in that leader epoch, on
   connections opened before it, for a quarter of `producer.id.expiration.ms`, and at most `KNOWN_SECONDS` after that
   setting was read (`services/log_reader.py`). While unconfirmed: read the log end and the producer's state, then send
   one append, alone, soon after the read.
2. *In-doubt appends.* An error or an acknowledgement is conclusive only for a batch that was sent once and answered on
   that connection. After a lost connection, 7, 20, or any error with a base offset, only the log decides. It is read at
   the expected offset (`in_doubt.py`).
3. *Another append's success.* Kafka takes an equal sequence range for a duplicate, whatever it contains. The loser of a
   race may get error 0 with the winner's offset. On a CreateTime topic that answer carries a log append time. On a
   LogAppendTime topic it looks like any success, so there every success is read back.

Append modes (`AppendMode`)
---------------------
CONDITIONAL   has an expected offset, not transactional. Fenced. One connection at a time; pipelined while the fence is
              confirmed.
SEQUENCED     no expected offset; not idempotent, or its producer had fenced appends before. Fenced at the log end.
              Kafka does not know the sequence of a refused append: unfenced, the producer's next one would be a gap.
PASS_THROUGH  no expected offset; idempotent or transactional. Keeps its producer id. Runs alongside others of its mode.
TRANSACTIONAL_CONDITIONAL
              transactional with an expected offset. Keeps its producer id. Runs alone, after a read of the log end.
              Kafka does not compare: its answer shows its offset, which is checked again before the transaction commits
              (`transactions/`).

Phases
------
UNCONFIRMED  nothing known. An append that needs the log end starts READING.
READING      log end and producer state requested. Read: OPEN or PUBLISHING. Read failed: UNCONFIRMED.
PUBLISHING   `required` only: the log moved without the fence, or the partition is claimed (`fence_bases.py`), so the
             instances agree on a new base. Stored: UNCONFIRMED.
OPEN         log end, sequence offset and epoch known. In-doubt appends: RESOLVING once none is in flight. Unexpected
             offset: UNCONFIRMED.
RESOLVING    in-doubt appends are looked up in the log, in order. Afterwards UNCONFIRMED; OPEN if all were only
             confirmed.

Appends that may still be queued
--------------------------------
An append with an unknown outcome may wait in a broker's queue and be appended later. If all appends are fenced that is
harmless: it is appended where it expected, or never. On `true` topics there are unfenced appends, too:

1. A fenced append for offset 5 waits in a broker's queue.
2. A PASS_THROUGH append takes offset 5. The fence's sequence does not move.
3. The fenced append is appended at 6.

So, while a request may still be queued (`queued_seconds`), PASS_THROUGH appends wait for fenced ones, unless a later
fenced append was acknowledged. Conditional appends wait for unfenced ones, except the retry of that batch. The retry of
a fenced append is looked up at its first attempt's offset. It gets the same sequence, or is not sent while the first
attempt may still be appended.

Transactions
------------
A marker takes an offset without passing the sequencer. So a fenced append and a possible marker are never in flight
together. A transaction joins the partition only after all fenced appends in flight are answered (`join`, `MayJoin`).
Fenced conditional appends are then answered "try again" until its marker is read back.
A transaction that has records here owns the partition. Another transaction's conditional append is answered "try
again". It is refused if its transaction owns a partition, too, since the two might deadlock.
Kafka adds a batch to an open transaction by producer id alone, whatever transactional id the client may use. The
sequencer does not: with an expected offset, the producer id must belong to the transactional id.
"""

from __future__ import annotations

from fencepost_proxy.sequencer.admitter import Admitter
from fencepost_proxy.sequencer.events import (
    AppendMode,
    BasePublished,
    BatchRead,
    Effect,
    Event,
    Forget,
    LogEndRead,
    LogEndSnapshot,
    LogEndUnknown,
    LostRecords,
    PendingAppend,
    Resent,
    SequencerLimits,
    Tick,
)
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.sequencer.in_doubt import InDoubtResolver, Lookups
from fencepost_proxy.sequencer.kafka_answers import KafkaAnswers
from fencepost_proxy.sequencer.permits import IssuedPermit
from fencepost_proxy.sequencer.state import PartitionState
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import PartitionResult

DEFAULT_NAMES = HeaderNames()


class PartitionSequencer:
    """Sequencer of one checked partition; see the module. `names`: the record headers with the expected offset."""

    __slots__ = ("_admitter", "_kafka_answers", "_lookups", "_resolver", "issued", "partition", "state")

    def __init__(self, partition: TopicPartition, limits: SequencerLimits, names: HeaderNames = DEFAULT_NAMES) -> None:
        self.partition = partition
        self.state = state = PartitionState.new(partition, limits, names)
        self._lookups = lookups = Lookups(state)
        self._resolver = resolver = InDoubtResolver(state, lookups)
        self._admitter = Admitter(state, lookups, resolver)
        self._kafka_answers = KafkaAnswers(state, lookups, resolver)
        self.issued = IssuedPermit(partition, state)

    # ---- state, for other modules

    @property
    def phase(self) -> Phase:
        return self.state.fence.phase

    @property
    def idle(self) -> bool:
        """No append waits or is in flight. No ticks are needed, and dropping the object costs only a new read."""
        return self.state.appends.idle and self.issued.idle

    @property
    def in_transaction(self) -> bool:
        return self.state.transactions.in_transaction

    @property
    def log_end_offset(self) -> int | None:
        if self.state.fence.phase is not Phase.OPEN:
            return None
        return self.state.fence.log_end if self.issued.permit is None else self.issued.permit.log_end

    @property
    def sequence_offset(self) -> int:
        return self.state.fence.sequence_offset if self.issued.permit is None else self.issued.permit.sequence_offset

    @property
    def waiting(self) -> int:
        return len(self.state.appends.queue)

    # ---- calls of sessions: each returns what follows from it

    def submit(self, pending: PendingAppend, now: float) -> list[Effect]:
        self.issued.take_back()
        self._admitter.submit(pending, now)
        return self._finish(now)

    def read_ahead(self, pending: PendingAppend, now: float) -> list[Effect]:
        """It will be submitted soon, after others of its request: read the log end now if nothing is in progress."""
        if self.idle:
            self.issued.take_back()
            self._admitter.read_ahead(pending, now)
        return self._finish(now)

    def may_send(self, pending: PendingAppend, now: float) -> bool:
        """Whether the append may still be sent. With an unconfirmed fence, only shortly after the read of the log
        end."""
        if pending is not self.state.appends.admitted or pending.placement.predecessor_result is not None:
            return False
        kind = pending.placement.kind
        if pending.outcome.is_there or (not kind.fenced and kind is not AppendMode.TRANSACTIONAL_CONDITIONAL):
            return True
        return self.state.fence.is_confirmed(pending, now) or self.state.fence.is_fresh(now)

    def cancel(self, pending: PendingAppend, now: float) -> list[Effect]:
        """It will not be sent: its client has disconnected, or another partition refused its request."""
        self.issued.take_back()
        self.state.appends.cancel(pending)
        return self._finish(now)

    def sent(self, pending: PendingAppend, now: float) -> list[Effect]:
        """An admitted append was passed to its connection."""
        self.issued.take_back()
        assert pending is self.state.appends.admitted, "an append is sent only after it was admitted"
        self.state.appends.admitted = None
        self._kafka_answers.sent(pending, now)
        return self._finish(now)

    def answered(self, pending: PendingAppend, result: PartitionResult, now: float) -> list[Effect]:
        if self.issued.complete(pending, result, now):
            return self._effects()  # nothing waits
        self.issued.take_back()
        self._kafka_answers.answered(pending, result, now)
        return self._finish(now)

    def lost(self, pending: PendingAppend, now: float) -> list[Effect]:
        """The connection was lost between `sent` and the answer."""
        self.issued.take_back()
        self._kafka_answers.lost(pending, now)
        return self._finish(now)

    def join(self, transactional_id: str, connection: int, now: float) -> list[Effect]:
        """A transaction is about to add this partition; a marker will follow, with or without records.

        `connection` waits for `MayJoin` before it sends the request. `transactional_id`: `MARKER` if the client sends a
        marker itself.
        """
        self.issued.take_back()
        self.state.transactions.join(transactional_id, connection)
        return self._finish(now)

    def joined(self, transactional_id: str, answered: bool, now: float) -> list[Effect]:
        """The coordinator has `answered`, or will not get the request. Otherwise the connection was lost, and the
        request may still arrive."""
        self.issued.take_back()
        until = now if answered else now + self.state.log.limits.queued_seconds
        self.state.transactions.answered(transactional_id, until)
        return self._finish(now)

    # ---- results of reads, and time

    def handle(self, event: Event, now: float) -> list[Effect]:
        if self.issued.permit is not None and isinstance(event, Tick):
            return []  # nothing waits
        self.issued.take_back()
        match event:
            case LogEndRead(snapshot):
                self._resolver.log_end_read(snapshot, now)
                self._log_end_read(snapshot, now)
            case LogEndUnknown(_, error_code):
                self._resolver.log_end_read(None, now)
                self._admitter.log_end_unknown(error_code, now)
            case BatchRead(pending, result):
                if pending in self.state.appends.in_doubt:
                    self._resolver.found(pending, result, now)
                else:
                    self._lookups.found(pending, result, now)
            case Resent(pending, result):
                self._resolver.resent(pending, result, now)
            case BasePublished(ok, ours):
                self.state.fence.base_published(ok, ours, now)
            case Tick():
                self._tick(now)
            case Forget(same_log):
                if not same_log:
                    self.state.retries.clear()
                self.state.fence.moves_unfenced()
                for pending in self.state.appends.in_doubt:
                    pending.sending.may_write = False  # the topic may have been recreated, or its ACLs changed
        return self._finish(now)

    def _log_end_read(self, snapshot: LogEndSnapshot, now: float) -> None:
        if self.state.fence.read_is_usable():
            self._forget_truncated(snapshot)
            self.state.transactions.forget_ended(snapshot)
            self.state.fence.read(snapshot, now)

    def _forget_truncated(self, snapshot: LogEndSnapshot) -> None:
        """Memory is never stronger than the log."""
        retries, end = self.state.retries, snapshot.log_end_offset
        acknowledged_end = retries.acknowledged_end
        if end >= max(self.state.fence.log_end, acknowledged_end):
            return
        if end < acknowledged_end and not 0 <= snapshot.leader_epoch < retries.acknowledged_epoch:
            self.state.log.effects.append(LostRecords(self.partition, end, acknowledged_end, end))
        retries.forget_from(end)

    def _tick(self, now: float) -> None:
        self._admitter.answer_late(now)
        self._lookups.end_late(now)
        self._admitter.answer_late_duplicates(now)
        if self.state.appends.queue and self.state.appends.in_flight:
            self._kafka_answers.report_late(now)
        if self.state.log.retry_is_due(now):
            self._lookups.read_again()
            self._resolver.read_again(now)

    def _finish(self, now: float) -> list[Effect]:
        if self.state.transactions.joining and not self.state.appends.fenced_unanswered:
            self.state.transactions.let_join()
        self._admitter.advance(now)
        return self._effects()

    def _effects(self) -> list[Effect]:
        # Copied out: the last batch must not stay in memory until the partition's next one.
        effects = self.state.log.effects.copy()
        self.state.log.effects.clear()
        return effects
