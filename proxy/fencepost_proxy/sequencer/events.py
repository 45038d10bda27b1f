"""Events and effects of a partition sequencer, and the values in them.

The state machine is `sequencer.py`; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import NamedTuple
from uuid import UUID

from fencepost_policies.append import Append, Check
from fencepost_policies.values import value
from fencepost_proxy.types import PRODUCER_EPOCHS, TopicPartition
from fencepost_proxy.wire.produce import PartitionResult
from fencepost_proxy.wire.record_comparison import Overlap, RecordComparison

# --------------------------------------------------------------------------------------------------------------- values


class AppendMode(Enum):
    """Append mode: how a sequencer orders an append, and whether it fences it (`fenced`). See `sequencer.py`."""

    fenced: bool

    CONDITIONAL = auto()
    SEQUENCED = auto()
    PASS_THROUGH = auto()
    TRANSACTIONAL_CONDITIONAL = auto()


for _kind in AppendMode:
    _kind.fenced = _kind in (AppendMode.CONDITIONAL, AppendMode.SEQUENCED)


@value
class SequencerLimits:
    """Bounds of one sequencer. Times in seconds.

    `queued_seconds`: how long a request may wait in a broker's queue after its connection was lost.
    `answer_seconds`: how long others wait for an append that Kafka does not answer before it is resolved from the log,
    which is read every `late_read_seconds` then.
    `violation_seconds`: how long to look for the writer that bypassed the proxy before the append is answered.
    `transaction_wait_seconds`: how long a transaction is answered "try again" while another owns the partition and it
    is not known here what it owns through other instances. `producer_epochs`: epochs of one producer id; fewer only in
    tests. `bases_burst`, `base_seconds`: number of fence bases published at once, then one per `base_seconds`. A writer
    that bypasses the proxy costs one base per append. `claim_after_seconds`: how long the process must have appended
    alone before it claims a partition, doubled with each of the first `claim_doublings` claims; `claim_after_waits`:
    how many appends must have waited for the one before them meanwhile. `fencing`: off only in tests.
    """

    queue_max: int = 1000
    in_flight_max: int = 64
    attempts_max: int = 5
    unconfirmed_send_seconds: float = 1.0
    resolve_seconds: float = 15.0
    queued_seconds: float = 35.0
    answer_seconds: float = 1.0
    late_read_seconds: float = 0.5
    violation_seconds: float = 1.0
    transaction_wait_seconds: float = 10.0
    read_retry_seconds: float = 0.05
    remembered_producers_max: int = 1000
    remembered_batches_max: int = 1000
    decompressed_bytes_max: int = 128 * 1024 * 1024
    producer_epochs: int = PRODUCER_EPOCHS
    bases_burst: int = 20
    base_seconds: float = 1.0
    claim_after_seconds: float = 5.0
    claim_doublings: int = 7
    claim_after_waits: int = 8
    fencing: bool = True


@value
class Fence:
    """Fence: a producer id, epoch and sequence in place of a batch's own, so that Kafka appends it at one offset only.

    `instance_id`: 1 to 255; 0: none.
    """

    producer_id: int
    producer_epoch: int
    base_sequence: int
    instance_id: int = 0


#: Makes a batch one without a producer, as from a client that is not idempotent.
NO_PRODUCER = Fence(-1, -1, -1)
#: Reason of a retriable refusal: the partition waits for a transaction.
TRANSACTION_OPEN = "transaction_open"
#: Used as producer id. Kafka answers such batches one by one, so one failure does not fail the next.
INDEPENDENT = -2


class AppendContext(NamedTuple):
    """What the process knew when an append was submitted. Times are monotonic seconds.

    `instance_id`: of this instance, for the fence; 0: none. `connected_at`: when the append's broker connection was
    opened. `alone`: no other instance is known to serve the cluster. `taken_over`: no append of an earlier process is
    in flight any more.
    """

    instance_id: int = 0
    connected_at: float = -inf
    alone: bool = False
    taken_over: bool = True


@dataclass(slots=True, eq=False)
class Sending:
    """What the session knows of an append that it sends.

    `leader_epoch`: last known one of the partition, or -1. `has_partitions`: its transaction has appended to a checked
    partition, as far as this process knows. `may_write`: Kafka has confirmed that its client may write the topic, so
    the proxy may resend the batch; `Forget` ends that. `topic_id`: the topic it was sent to; None if Kafka took it by
    name. `may_arrive_until`: its last attempt, which Kafka did not answer in time, may reach Kafka until then, and
    longer, as after a lost connection.
    """

    leader_epoch: int = -1
    has_partitions: bool = False
    may_write: bool = False
    topic_id: UUID | None = None
    may_arrive_until: float = -inf


@dataclass(slots=True, eq=False)
class Placement:
    """Where the sequencer places an append, and what it has sent of it.

    `deadline`: until when it may wait. `at`: the offset it must be appended at, once decided. `fence`: None for a batch
    under its own producer id. `submitted_as`, `sent_as`: its number among all submitted, or sent, appends; 0: none.
    `sent_before`: an earlier attempt has an unknown outcome. `actual`: the log end that it was compared with.
    `predecessor_result`: the answer of a failed predecessor in its pipeline.
    `duplicate_waiters`: its duplicate waiters.
    """

    deadline: float
    kind: AppendMode = AppendMode.CONDITIONAL
    fence: Fence | None = None
    at: int | None = None
    submitted_as: int = 0
    sent_at: float | None = None
    sent_as: int = 0
    attempts: int = 0
    sent_before: bool = False
    actual: int = -1
    predecessor_result: PartitionResult | None = None
    duplicate_waiters: tuple[PendingAppend, ...] = ()  # a list takes 56 bytes

    def waits_no_longer(self, pending: PendingAppend) -> None:
        self.duplicate_waiters = tuple(each for each in self.duplicate_waiters if each is not pending)


@dataclass(slots=True, eq=False)
class Outcome:
    """What Kafka's answers and the log show of an append that was sent, for the resolver.

    `acknowledged`: Kafka answered 0, but the log has to confirm it. `appended_at`: where it was appended, if not at
    `Placement.at`. `is_there`: the log has or had it, but not at the expected offset; Kafka reports the offset.
    `reported_at`: the offset at which Kafka reports it as a duplicate; still to be read back.
    `late`: Kafka did not answer its last attempt in time while others waited; the connection is still open.
    `searched_to`: in doubt, and another sequence lies at its offset; it was looked for up to here.
    `error_code`: Kafka's inconclusive answer to its last attempt; `repeated`: to the last two.
    `unanswered`: an attempt has no answer and may be queued.
    `comparison`: of its records with those at its expected offset. `remembered`: where this process appended it, which
    the log has yet to confirm.
    """

    acknowledged: bool = False
    resolve_until: float = 0.0
    appended_at: int | None = None
    is_there: bool = False
    reported_at: int | None = None
    searched_to: int | None = None
    error_code: int = 0
    repeated: bool = False
    unanswered: bool = False
    late: bool = False
    comparison: RecordComparison | None = None
    remembered: AppendedBatch | None = None


@value
class PendingAppend:
    """Pending append: one append at one sequencer, from its submission to its answer.

    It is what the client submitted, at `submitted_at` (monotonic seconds). The session writes `sending`, the sequencer
    `placement` and `outcome`.
    """

    connection: int
    partition: TopicPartition
    append: Append
    records: memoryview
    digest: bytes
    check: Check
    submitted_at: float
    transactional_id: str | None
    context: AppendContext
    placement: Placement
    sending: Sending = field(default_factory=Sending)
    outcome: Outcome = field(default_factory=Outcome)

    __eq__, __hash__ = object.__eq__, object.__hash__  # another append may submit the same

    @property
    def producer(self) -> tuple[int, int]:
        return self.append.producer_id, self.append.producer_epoch

    @property
    def batch_name(self) -> tuple[tuple[int, int], int]:
        """Identifies the batch if it has a producer id."""
        return self.producer, self.append.base_sequence

    @property
    def pipeline_key(self) -> tuple[int, int]:
        return self.connection, self.append.producer_id

    @property
    def pipeline(self) -> int:
        """The producer id; INDEPENDENT for a batch without producer id and expected offset."""
        append = self.append
        return append.producer_id if append.producer_id >= 0 or append.expected_base_offset is not None else INDEPENDENT

    @property
    def follows(self) -> tuple[int, ...]:
        """Pipelines on its connection whose failure fails this append, too, if it was sent before that was known."""
        if self.append.producer_id >= 0:
            return (self.append.producer_id,)
        return (-1,) if self.pipeline == INDEPENDENT else (-1, INDEPENDENT)


@value
class ProducerState:
    """What the leader remembers of a producer id. `next_sequence` is 0 .. 2^31-1.

    `producer_epoch`: of a shared producer id, counted on from the ids before it, as in fence bases.
    """

    producer_epoch: int
    next_sequence: int


class Claim(Enum):
    """How the epoch of a fence base began, and which processes append under it.

    NONE      without a transaction marker: all instances
    SHARED    with a marker: all instances
    OURS      with a marker: this process only, which pipelines
    ANOTHERS  with a marker: another process only
    """

    NONE = auto()
    SHARED = auto()
    OURS = auto()
    ANOTHERS = auto()

    @classmethod
    def of(cls, stored: str | None, identity: str) -> Claim:
        """From the state topic (`encode_fence_base`), for the process with this identity."""
        if not stored:
            return cls.NONE if stored is None else cls.SHARED
        return cls.OURS if stored == identity else cls.ANOTHERS

    def stored(self, identity: str) -> str | None:
        """For the state topic, with a base of the process with this identity."""
        return identity if self is Claim.OURS else "" if self is Claim.SHARED else None


@value
class LogEndSnapshot:
    """Log-end snapshot: the log end as its leader sees it, and the producers' states at that moment.

    `requested_at`: when the read began.
    `open_transactions`: producer ids with an open transaction on this partition; `in_transaction`: their states.
    `fence_base`: the published (epoch, base); (0, 0) if none was published. `claim`: of that epoch.
    `marker_is_replicated`: False if the epoch has only its marker yet, which a new leader may lack. `may_claim`: the
    topic allows claims.
    `expiration_seconds`: Kafka forgets a producer whose newest record timestamp is older.
    `expiration_known_until`: from then on, read that setting again before a fence is relied on.
    `clock_offset_seconds`: add it to `now` for Unix time.
    `ended_transactions`: queried transactional ids that are not on this partition, according to their coordinators,
    before the log end was read; queried from `transactions_as_of` on.
    `ending_transactions`: those of the queried ones whose markers are about to be written.
    `producer_ids`: of the queried transactional ids; -1 if not known or about to change; None: no query was made.
    `leader_epoch`: of the leader that was read; -1 if not known.
    """

    requested_at: float
    log_end_offset: int
    log_start_offset: int
    producer_id: int
    producer_state: ProducerState | None
    fence_base: tuple[int, int]
    open_transactions: frozenset[int]
    log_append_time: bool
    expiration_seconds: float
    clock_offset_seconds: float
    ended_transactions: frozenset[str] = frozenset()
    ending_transactions: frozenset[str] = frozenset()
    transactions_as_of: float = -inf
    in_transaction: Mapping[int, ProducerState] = field(default_factory=dict)
    producer_ids: Mapping[str, int] | None = None
    expiration_known_until: float = inf
    leader_epoch: int = -1
    claim: Claim = Claim.NONE
    marker_is_replicated: bool = True
    may_claim: bool = False

    def oldest_ms(self, now: float) -> int:
        """Records that are not newer are too old for a fence: Kafka may forget their producer."""
        return int((now + self.clock_offset_seconds - self.expiration_seconds / 2) * 1000)

    def cannot_be_fenced(self, append: Append, now: float) -> bool:
        return not self.log_append_time and append.max_timestamp_ms <= self.oldest_ms(now)


# --------------------------------------------------------------------------------------------------------------- events


@value
class LogEndRead:
    snapshot: LogEndSnapshot


@value
class LogEndUnknown:
    """`error_code`: Kafka's, where a retry would not help (3: no such partition), else None."""

    reason: str
    error_code: int | None = None


@value
class AppendedBatch:
    """A batch that was acknowledged, or found in the log.

    `leader_epoch`, `known_since`: where and when it was acknowledged. `same_times`: unless the broker may have replaced
    record timestamps, `digest` covers them.
    """

    base_offset: int
    record_count: int
    digest: bytes
    write_id: bytes | None
    log_append_time_ms: int
    leader_epoch: int = -1
    known_since: float = inf
    same_times: bool = True

    @property
    def end(self) -> int:
        return self.base_offset + self.record_count

    def holds_for(self, pending: PendingAppend) -> bool:
        """Whether what is remembered is still true on the append's connection: the leader is the same, and has not
        restarted since. Otherwise the log may have lost its last records."""
        return (
            0 <= self.leader_epoch == pending.sending.leader_epoch and pending.context.connected_at <= self.known_since
        )

    def has_write_id_of(self, pending: PendingAppend) -> bool:
        """Write id: bytes in a record header that name a write, so that a retry is recognized after a restart, too."""
        return self.write_id is not None and self.write_id == pending.append.write_id


@value
class Found:
    """The batch at (or around) the requested offset.

    `appended_batch`, `overlap`: result of `read_appended_batch` at offset `appended_batch_at`; -1: not decoded yet.
    """

    batch: memoryview
    appended_batch_at: int = -1
    appended_batch: AppendedBatch | None = None
    overlap: Overlap | None = None


@value
class NotYet:
    """The offset cannot be read now: it is at or above the high watermark.

    `log_end_offset`: if above the offset, a batch that is not replicated yet lies there; else none does.
    """

    log_end_offset: int


@value
class OutOfRange:
    """The offset is below the log start."""


@value
class Unreadable:
    reason: str


BatchReadResult = Found | NotYet | OutOfRange | Unreadable


@value
class BatchRead:
    pending: PendingAppend
    result: BatchReadResult


@value
class Resent:
    """The control connection resent the batch. None: it could not, or its outcome is unknown."""

    pending: PendingAppend
    result: PartitionResult | None


@value
class BasePublished:
    """A new fence base is agreed on (`ok`), or could not be stored. `ours`: this process proposed it."""

    ok: bool
    ours: bool = False


@value
class Tick:
    """Time passed: deadlines and delayed reads."""


@value
class Forget:
    """The state may be outdated: a config changed, or the topic was recreated.

    `same_log`: the topic is the same, and all its appends passed this object, so remembered appends remain valid.
    """

    same_log: bool = False


Event = LogEndRead | LogEndUnknown | BatchRead | Resent | BasePublished | Tick | Forget

# -------------------------------------------------------------------------------------------------------------- effects


@value
class Admit:
    """Admit the append: send it with the fence `Placement.fence`, if any; then call `sent` or `cancel`."""

    pending: PendingAppend


@value
class Answer:
    """Final answer. `reason` names a refusal for the metrics; else None."""

    pending: PendingAppend
    result: PartitionResult
    reason: str | None = None


@value
class Late:
    """Kafka does not answer these appends of one connection, in the order in which they were sent, and others wait."""

    pending_appends: tuple[PendingAppend, ...]


@value
class MayJoin:
    """No fenced append is in flight whose offset this transaction's marker could take."""

    connection: int


@value
class ReadLogEnd:
    """`transactional_ids`: first query their coordinators for whether they are still on the partition."""

    partition: TopicPartition
    transactional_ids: tuple[str, ...] = ()


@value
class ReadBatch:
    """Read the batch at `offset` from the log; the reply is `BatchRead`."""

    pending: PendingAppend
    offset: int


@value
class Resend:
    """Send the batch again unchanged: Kafka recognises a duplicate by producer id and sequence."""

    pending: PendingAppend


@value
class PublishBase:
    """Agree with the other instances on a new fence epoch and the offset of its sequence 0.

    `claim`: if it is not NONE, write a marker of that epoch once this proposal is the one agreed on. Never repeat it: a
    second marker of an epoch takes another offset.
    """

    partition: TopicPartition
    producer_epoch: int
    base: int
    reason: str
    claim: Claim = Claim.NONE


@value
class Violation:
    """Violation: the log is not where the fence allows, because a writer bypasses the proxy or Kafka forgot the fence.

    `offset`: its first record, as far as known. `appended_at`: where an append of ours that expected `offset` was
    appended instead; None if there was none, and the log was found to end at `log_end_offset`.
    `producer_id`: of the batch at `offset`; -1 if it has none, None if not known.
    `forgotten`: no writer did; Kafka had forgotten the fence.
    """

    partition: TopicPartition
    offset: int
    appended_at: int | None = None
    log_end_offset: int | None = None
    producer_id: int | None = None
    forgotten: bool = False


@value
class LostRecords:
    """The log has lost records that this process has acknowledged.

    `offset`: the first of them, as far as known. `acknowledged_end`: the offset after the last one. `log_end_offset`:
    where the log ended instead; None if another batch lies at `offset`.
    """

    partition: TopicPartition
    offset: int
    acknowledged_end: int
    log_end_offset: int | None = None


Effect = Admit | Answer | Late | MayJoin | ReadLogEnd | ReadBatch | Resend | PublishBase | Violation | LostRecords
