"""What a gate is told (events), what it asks for (effects), and the values both are made of.

The machine itself is `gate.py`; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from uuid import UUID

from fencepost_policies.append import Append, Check
from fencepost_policies.values import value
from fencepost_proxy.partitions.landed import Landed
from fencepost_proxy.types import PRODUCER_EPOCHS, TopicPartition
from fencepost_proxy.wire.produce import PartitionResult

# --------------------------------------------------------------------------------------------------------------- values


class Kind(Enum):
    """See `gate.py`. `stamped` – goes under the shared producer id."""

    stamped: bool

    CONDITIONAL = auto()
    PLAIN = auto()
    OWN = auto()
    OWN_CONDITIONAL = auto()


for _kind in Kind:
    _kind.stamped = _kind in (Kind.CONDITIONAL, Kind.PLAIN)


@value
class GateLimits:
    """Bounds of one gate. Times in seconds.

    `queued_seconds` – how long a request whose connection is gone may be expected to sit in a broker's queue.
    `violation_seconds` – for finding out who wrote around the proxy, before its victim is told.
    `transaction_wait_seconds` – for how long one transaction is told to come again because another has the partition,
    where what it owns by other processes is not known here.
    `producer_epochs` – of one producer id: fewer only in tests. `bases_burst`, `base_seconds` – so many new fence bases
    are published at once, then one in so long: a writer that bypasses the proxy costs one for each of its appends.
    `stamping` is off only in tests that show what it is for.
    """

    queue_max: int = 1000
    in_flight_max: int = 64
    attempts_max: int = 5
    cold_send_seconds: float = 1.0
    settle_seconds: float = 15.0
    queued_seconds: float = 35.0
    violation_seconds: float = 1.0
    transaction_wait_seconds: float = 10.0
    read_retry_seconds: float = 0.05
    remembered_producers_max: int = 1000
    remembered_batches_max: int = 1000
    decompressed_bytes_max: int = 128 * 1024 * 1024
    producer_epochs: int = PRODUCER_EPOCHS
    bases_burst: int = 20
    base_seconds: float = 1.0
    stamping: bool = True


@value
class Stamp:
    """What replaces a batch's own producer fields. `tag` says which process stamped it, 1 to 255; 0: none."""

    producer_id: int
    producer_epoch: int
    base_sequence: int
    tag: int = 0


#: Makes a batch one without a producer, as if its client were not idempotent.
NO_PRODUCER = Stamp(-1, -1, -1)
#: In the place of a producer id. Kafka answers such batches one by one, so the failure of one is not another's.
INDEPENDENT = -2


@dataclass(slots=True, eq=False)
class Ticket:
    """One append at one gate, from its offer to its answer. Times are monotonic seconds.

    `tag` – this process's, for the stamp. `connected_at` – since when its upstream connection is open. `leader_epoch` –
    of the partition, as last heard, -1 if not. `alone` – no other process is known to serve the cluster. `taken_over` –
    what an earlier process had under way is over. The fields after it are the gate's. `at` – the offset that it must
    land at, once that is decided. `stamp` – None for a batch that goes as its producer made it. `offered_as`, `sent_as`
    – its number among all that this gate was offered, or saw sent, 0 for none. `acknowledged` – Kafka said 0, but the
    log has to confirm it. `actual` – the log end that it was compared with. `appended_at` – where it landed, if that is
    not `at`. `sent_before` – it is the retry of a try that ended unknown. `is_there` – the log has it, or had it when
    it was read, though not where it expected: Kafka is to say where. `said_at` – where Kafka says that it lies, as a
    duplicate: that is to be read back. `seen_to` – in doubt, and what lies where it should be has not its sequence: up
    to here it was looked for. `error_code` – Kafka's answer to its last try, where that alone does not say whether it
    was appended; `repeated` – to the last two. `unanswered` – a try of it has no answer, and may be queued. `behind` –
    the answer of a failed batch ahead of it in its chain. `followers` – retries
    of this very batch that wait for its outcome.

    `owns_partitions` – its transaction has appended to some guarded partition, as far as this process knows.
    Two are the session's: `may_write` – Kafka has said that its client may write the topic, so that the proxy may send
    the batch again by itself. `topic_id` – which topic it was sent to, None where Kafka took it by name.
    """

    connection: int
    partition: TopicPartition
    append: Append
    records: memoryview
    digest: bytes
    check: Check
    offered_at: float
    deadline: float
    tag: int = 0
    connected_at: float = float("-inf")
    leader_epoch: int = -1
    alone: bool = False
    taken_over: bool = True
    transactional_id: str | None = None
    owns_partitions: bool = False
    kind: Kind = Kind.CONDITIONAL
    stamp: Stamp | None = None
    at: int | None = None
    offered_as: int = 0
    sent_at: float | None = None
    sent_as: int = 0
    attempts: int = 0
    acknowledged: bool = False
    settle_until: float = 0.0
    actual: int = -1
    appended_at: int | None = None
    sent_before: bool = False
    is_there: bool = False
    said_at: int | None = None
    seen_to: int | None = None
    error_code: int = 0
    repeated: bool = False
    unanswered: bool = False
    may_write: bool = False
    topic_id: UUID | None = None
    behind: PartitionResult | None = None
    followers: list[Ticket] = field(default_factory=list)

    @property
    def producer(self) -> tuple[int, int]:
        return self.append.producer_id, self.append.producer_epoch

    @property
    def pipeline(self) -> int:
        """The producer id; INDEPENDENT for a batch that has none and expects nothing."""
        append = self.append
        return append.producer_id if append.producer_id >= 0 or append.expected_base_offset is not None else INDEPENDENT

    @property
    def follows(self) -> tuple[int, ...]:
        """The pipelines of its connection whose failure fails this append too, if it was sent before that was known."""
        if self.append.producer_id >= 0:
            return (self.append.producer_id,)
        return (-1,) if self.pipeline == INDEPENDENT else (-1, INDEPENDENT)


@value
class ProducerState:
    """What the leader remembers of a producer id. `next_sequence` is 0 .. 2^31-1.

    `producer_epoch` – of a shared producer id: counted on from the ids before it, as those of fence bases are.
    """

    producer_epoch: int
    next_sequence: int


@value
class Tail:
    """The end of a log as its leader sees it, with the producers' states of the same moment.

    `requested_at` – when the reading began. `open_transactions` – producer ids that have one on this partition;
    `in_transaction` – what the leader remembers of these.
    `stamp_base` – the published (epoch, base), (0, 0) if none ever was. `expiration_seconds` – after that age, by its
    newest record's timestamp, Kafka forgets a producer; `expiration_known_until` – from then on that setting has to be
    read again before a fence is relied on. `wall_minus_monotonic_seconds` turns `now` into Unix time.
    `ended_transactions` – of the transactional ids that were asked for: their coordinators said, before the log end was
    read, that they are not on this partition; asked from `transactions_as_of` on. `ending_transactions` – of these,
    those whose markers are about to be written. `producer_ids` – whose they are, -1 where that is not known, or about
    to change; None: nobody was asked.
    """

    requested_at: float
    log_end_offset: int
    log_start_offset: int
    producer_id: int
    producer_state: ProducerState | None
    stamp_base: tuple[int, int]
    open_transactions: frozenset[int]
    log_append_time: bool
    expiration_seconds: float
    wall_minus_monotonic_seconds: float
    ended_transactions: frozenset[str] = frozenset()
    ending_transactions: frozenset[str] = frozenset()
    transactions_as_of: float = float("-inf")
    in_transaction: Mapping[int, ProducerState] = field(default_factory=dict)
    producer_ids: Mapping[str, int] | None = None
    expiration_known_until: float = float("inf")


# --------------------------------------------------------------------------------------------------------------- events


@value
class Offered:
    ticket: Ticket


@value
class Withdrawn:
    """The ticket will not be sent: its client is gone, or its request was refused at another gate."""

    ticket: Ticket


@value
class Sent:
    """A granted ticket was handed to its connection."""

    ticket: Ticket


@value
class Answered:
    ticket: Ticket
    result: PartitionResult


@value
class Lost:
    """The connection died between `Sent` and the answer."""

    ticket: Ticket


@value
class TailRead:
    tail: Tail


@value
class TailUnknown:
    """`error_code`: Kafka's, where waiting would not help (3: there is no such partition), else None."""

    reason: str
    error_code: int | None = None


@value
class Found:
    """The batch at (or around) the offset that was asked for, as the log has it.

    `landed` – what `read_landed` says of it at `landed_at`; -1: it has not been read.
    """

    batch: memoryview
    landed_at: int = -1
    landed: Landed | None = None


@value
class NotYet:
    """Nothing can be read there now: the offset is at or beyond the high watermark.

    `log_end_offset`: above the offset, something lies there that is not replicated yet; else nothing does.
    """

    log_end_offset: int


@value
class OutOfRange:
    """The offset is below the log start."""


@value
class Unreadable:
    reason: str


LookResult = Found | NotYet | OutOfRange | Unreadable


@value
class Looked:
    ticket: Ticket
    result: LookResult


@value
class Resent:
    """The control connection sent the ticket's batch again. None: it could not, or does not know what became of it."""

    ticket: Ticket
    result: PartitionResult | None


@value
class TransactionJoins:
    """A transaction wants its coordinator to add this partition: then a marker will come, written to or not.

    `connection` – waits for `MayJoin` before it sends that. `transactional_id` – `MARKER`: it sends a marker itself.
    """

    transactional_id: str
    connection: int


@value
class TransactionJoined:
    """The coordinator has `answered`, or will never be asked; else the connection broke, and the request may still
    come to it."""

    transactional_id: str
    answered: bool


@value
class BasePublished:
    """A new stamp base is agreed on (`ok`), or could not be stored. `ours` – it is what this process proposed."""

    ok: bool
    ours: bool = False


@value
class Tick:
    """Time passed: deadlines and delayed reads."""


@value
class Forget:
    """What the gate believes may no longer hold: a config changed, the topic was recreated.

    `same_log` – not that, and its appends came to this gate all the time: what landed in it is there.
    """

    same_log: bool = False


Event = (
    Offered
    | Withdrawn
    | Sent
    | Answered
    | Lost
    | TailRead
    | TailUnknown
    | Looked
    | Resent
    | TransactionJoins
    | TransactionJoined
    | BasePublished
    | Tick
    | Forget
)

# -------------------------------------------------------------------------------------------------------------- effects


@value
class Grant:
    """The ticket's turn: send it, stamped with `ticket.stamp` if there is one; then `Sent` or `Withdrawn`."""

    ticket: Ticket


@value
class Answer:
    """The ticket's end. `reason` names a refusal for the metrics, None for anything else."""

    ticket: Ticket
    result: PartitionResult
    reason: str | None = None


@value
class MayJoin:
    """Nothing stamped is on its way any more that the marker of this transaction could put one further."""

    connection: int


@value
class ReadTail:
    """`transactional_ids` – ask their coordinators first whether they are still on the partition."""

    partition: TopicPartition
    transactional_ids: tuple[str, ...] = ()


@value
class Look:
    """Read the batch at `offset` from the log; answer with `Looked`."""

    ticket: Ticket
    offset: int


@value
class Resend:
    """Send the ticket's batch again as it was sent: by its producer id and sequence Kafka knows a duplicate."""

    ticket: Ticket


@value
class PublishBase:
    """Agree with the other processes on a new stamp: epoch and the offset that its sequence 0 stands for."""

    partition: TopicPartition
    producer_epoch: int
    base: int
    reason: str


@value
class Violation:
    """Somebody writes around the proxy.

    `offset` – where the first of it lies, as far as is known. `appended_at` – where a batch of ours that expected
    `offset` landed for it; None where none did: the log was found to end at `log_end_offset` without our doing.
    `producer_id` – whose batch lies at `offset`: -1 if it names none, None if that is not known. `forgotten` – nobody
    does: Kafka did not know the fence any more.
    """

    partition: TopicPartition
    offset: int
    appended_at: int | None = None
    log_end_offset: int | None = None
    producer_id: int | None = None
    forgotten: bool = False


Effect = Grant | Answer | MayJoin | ReadTail | Look | Resend | PublishBase | Violation
