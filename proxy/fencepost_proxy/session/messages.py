"""What a session is told (events) and what it wants done (commands). Nothing here decides anything.

Bytes in events are views that are valid during the call only. So are bytes in commands: views into those of the event,
often. Whoever cannot write them at once makes a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from fencepost_policies.values import value
from fencepost_proxy.groups.queries import Notice, Query, Reply
from fencepost_proxy.sequencer.events import Event as SequencerEvent
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.topics.abort_only import AbortOnly
from fencepost_proxy.topics.planning import ExpansionOutcome, ExpansionRequest
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.transactions.commit_validator import Decision
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.api_versions import Software
from fencepost_proxy.wire.produce import PartitionResult

# --------------------------------------------------------------------------------------------------------------- events


@value
class ClientBytes:
    data: memoryview


@value
class UpstreamBytes:
    data: memoryview


@value
class ClientPassed:
    """So many of `Session.passing_up_bytes` went to the broker without being read here."""

    byte_count: int


@value
class UpstreamPassed:
    """So many of `Session.passing_down_bytes` went to the client without being read here."""

    byte_count: int


@value
class ClientLost:
    """The client closed its connection, or it broke."""


@value
class UpstreamLost:
    reason: str


@value
class AppendAdmitted:
    pending: PendingAppend


@value
class AppendCompleted:
    """The gate's last word on a ticket, sent or not."""

    pending: PendingAppend
    result: PartitionResult
    reason: str | None


@value
class MayJoin:
    """Of what was asked by `TransactionJoins`: the gate has nothing against it any more."""

    partition: TopicPartition


@value
class Stored:
    """What `Store` asked for is in the state topic and every proxy process knows it; or why not."""

    token: int
    error: str | None


@value
class Expanded:
    """What came of `Expand`, one for each of its requests."""

    token: int
    outcomes: tuple[ExpansionOutcome, ...]


@value
class Replied:
    """To an `Ask`."""

    token: int
    reply: Reply


@value
class CommitDecided:
    """To a `ValidateCommit`."""

    token: int
    decision: Decision


@value
class AbortOnlyRecorded:
    """To a `RecordAbortOnly` or a `ClearAbortOnly`: every process knows it that reads the state topic; or it is not
    stored."""

    token: int
    stored: bool


@value
class BatchesRead:
    """To a `ReadBatches`: it has been carried out."""

    token: int


@value
class TopicNews:
    """A door was opened, or metadata has told a count: look again whether what waits there may go in."""


@value
class Drain:
    """The process is to end: begin no further request, answer what is under way until then, and hang up.

    Told again and again until then, it serves as a `Tick`.
    """

    until: float


@value
class Tick:
    """Time passed, memory was freed: look again at what waits."""


@value
class QuotaRenewed:
    """Other connections had their turn: the session has its whole quota of work again."""


Event = (
    ClientBytes
    | UpstreamBytes
    | ClientPassed
    | UpstreamPassed
    | ClientLost
    | UpstreamLost
    | AppendAdmitted
    | AppendCompleted
    | MayJoin
    | Stored
    | Expanded
    | Replied
    | CommitDecided
    | AbortOnlyRecorded
    | BatchesRead
    | TopicNews
    | Drain
    | QuotaRenewed
    | Tick
)

# ------------------------------------------------------------------------------------------------------------- commands


@value
class ToClient:
    chunks: list[bytes | memoryview]


@value
class ToUpstream:
    chunks: list[bytes | memoryview]


@value
class ReadClient:
    """Go on reading from the client, or pause (`on=False`)."""

    on: bool


@value
class ReadUpstream:
    on: bool


@value
class CloseClient:
    """Close once what was written has gone out. `reason` is for the log; `fault` is whose it was, None for nobody's.

    `hang_up` – the client may still be sending: what it sends is thrown away until it has seen the end. A socket that
    is closed with bytes unread resets the connection, and that may overtake the answer that the client is to see.
    """

    reason: str
    fault: type[Exception] | None = None
    hang_up: bool = False


@value
class CloseUpstream:
    pass


@value
class ToSequencer:
    pending: PendingAppend
    event: SequencerEvent


@value
class ToPartition:
    """For the gate of a partition, without a ticket."""

    partition: TopicPartition
    event: SequencerEvent


@value
class Store:
    """Put changes of virtual topic configs into the state topic; answer with `Stored(token)`."""

    token: int
    changes: tuple[TopicConfigChange, ...]


@value
class Expand:
    """Let these topics grow; answer with `Expanded(token)` within `timeout_ms`, as things stand then."""

    token: int
    requests: tuple[ExpansionRequest, ...]
    timeout_ms: int


@value
class Ask:
    """Find that out about a group; answer with `Replied(token)`, whatever comes of it, and soon."""

    token: int
    query_message: Query


@value
class Noticed:
    """A group, or a member of one, has shown something."""

    notice: Notice


@value
class ValidateCommit:
    """May this transaction commit? Answer with `CommitDecided(token)`, whatever comes of it, and soon.

    `end_txn_version` – of the request that asks for it. `may_be_committed` – an earlier one may have done it.
    """

    token: int
    transactional_id: str
    producer_id: int
    producer_epoch: int
    end_txn_version: int
    may_be_committed: bool = False


@value
class RecordAbortOnly:
    """Put it into the state topic; answer with `AbortOnlyRecorded(token)`, whatever comes of it, and soon.

    `instead_of` – the names of those that it takes the place of, at the same moment.
    """

    token: int
    abort_only: AbortOnly
    instead_of: frozenset[UUID] = frozenset()


@value
class ClearAbortOnly:
    """Such a transaction has ended: take what the state topic says of it away, read to its end.

    Answer with `AbortOnlyRecorded(token)`, whatever comes of it, and soon. `token` 0: nobody waits for it.
    """

    token: int
    producer_id: int
    producer_epoch: int


@value
class ReadBatches:
    """Call `read`, which works on batches or on a control message, where it delays nothing else. Answer with
    `BatchesRead(token)`, whatever comes of it.

    Not worth while any more once the connection is gone.
    """

    token: int
    read: Callable[[], None]


@value
class MigratedConnection:
    """What there is to a session in which nothing is under way: enough for another process to go on with it.

    `unread` – what the client sent and nobody has acted on, a frame's beginning first. `received_bytes` – of the client
    before that, in all. `login_ends` – monotonic. `failed_pipelines` – per partition and producer id: its failure, up
    to which byte it counts.
    """

    local_host: str
    client_id: str | None
    opened_at: float
    may_write: tuple[tuple[str, float], ...]
    failed_pipelines: tuple[tuple[TopicPartition, int, PartitionResult, float], ...]
    received_bytes: int
    login_ends: float
    unread: bytes
    software: Software | None = None


@value
class LoginFailed:
    """For the log: Kafka refused a client's login. `principal` – as the client named it, empty where it did not."""

    mechanism: str
    principal: str
    reason: str


@value
class Migrate:
    """Both connections go to the process that owns what the client asks for; this session has ended."""

    migrated: MigratedConnection


@value
class TopicStale:
    """Kafka's answer shows that what we know of a guarded topic is out of date: look it up again."""

    topic: str


@value
class Downgraded:
    """So many batches of a `safe` topic go to Kafka without their producer ids. `why` – `message_format`,
    `not_permitted`."""

    topic: str
    why: str
    batches: int


@value
class Count:
    """For the metrics: a refusal by reason, a request by API. And for those who watch: of which partition, where it is
    known, the offset that was expected, and where the log ended instead (-1: that was not what it was about).
    """

    what: str
    label: str
    partition: TopicPartition | None = None
    expected: int | None = None
    actual: int = -1


Command = (
    ToClient
    | ToUpstream
    | ReadClient
    | ReadUpstream
    | CloseClient
    | CloseUpstream
    | ToSequencer
    | ToPartition
    | Store
    | Expand
    | Ask
    | Noticed
    | ValidateCommit
    | RecordAbortOnly
    | ClearAbortOnly
    | ReadBatches
    | LoginFailed
    | Migrate
    | TopicStale
    | Downgraded
    | Count
)
