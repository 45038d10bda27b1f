"""What a session receives (events) and emits (commands). Nothing here decides anything.

Bytes in events are views that are valid during the call only. Bytes in commands are often views into those: code that
cannot write them at once makes a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from fencepost_policies.values import value
from fencepost_proxy.expansion.queries import Notice, Query, Reply
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.topics.abort_only import AbortOnly
from fencepost_proxy.topics.planning import ExpansionOutcome, ExpansionRequest
from fencepost_proxy.topics.state import NotStored, TopicConfigChange
from fencepost_proxy.transactions.commit_validator import Decision
from fencepost_proxy.types import TopicPartition

# --------------------------------------------------------------------------------------------------------------- events


@value
class ClientBytes:
    data: memoryview


@value
class UpstreamBytes:
    data: memoryview


@value
class ClientPassed:
    """So many of `ConnectionState.client.unseen_bytes` went to the broker unread by the session."""

    byte_count: int


@value
class UpstreamPassed:
    """So many of `ConnectionState.upstream.unseen_bytes` went to the client unread by the session."""

    byte_count: int


@value
class ClientLost:
    """The client closed its connection, or it broke."""


@value
class UpstreamLost:
    reason: str


@value
class Stored:
    """The changes of a `Store` are in the state topic and known to every proxy process; or why not."""

    token: int
    error: NotStored | None


@value
class Expanded:
    """The outcomes of an `Expand`, one for each of its requests."""

    token: int
    outcomes: tuple[ExpansionOutcome, ...]


@value
class Replied:
    """To a `GroupQuery`."""

    token: int
    reply: Reply


@value
class CommitDecided:
    """To a `ValidateCommit`."""

    token: int
    decision: Decision


@value
class AbortOnlyRecorded:
    """To a `RecordAbortOnly` or a `ClearAbortOnly`: stored, and known to every process that reads the state topic; or
    not stored."""

    token: int
    stored: bool


@value
class BatchesRead:
    """To a `ReadBatches`: it has finished."""

    token: int


@value
class AppendsLate:
    """Kafka does not answer these appends to one partition, in the order in which they were sent, and others wait."""

    pending_appends: tuple[PendingAppend, ...]


@value
class TopicNews:
    """A barrier opened, or metadata reported a count: check again whether waiting requests may enter."""


@value
class Drain:
    """Start no further request, answer those in progress until then, and hang up.

    Repeated until then, it serves as a `Tick`.
    """

    until: float
    because: str = "this process is shutting down; its requests are answered"


@value
class Tick:
    """Time passed, or memory was freed: check again what waits."""


@value
class QuotaRenewed:
    """Other connections were served: the session has its whole work quota again."""


Event = (
    ClientBytes
    | UpstreamBytes
    | ClientPassed
    | UpstreamPassed
    | ClientLost
    | UpstreamLost
    | Stored
    | Expanded
    | Replied
    | CommitDecided
    | AbortOnlyRecorded
    | BatchesRead
    | AppendsLate
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
    """Continue reading from the client, or pause (`on=False`)."""

    on: bool


@value
class ReadUpstream:
    on: bool


@value
class CloseClient:
    """Close once everything written is sent. `reason` – for the log. `fault` – an error type that shows which peer is
    at fault, None if neither is.

    `hang_up` – the client may still be sending: discard that until the client closes. To close a socket with unread
    bytes resets the connection, and the reset may overtake the last answer.
    """

    reason: str
    fault: type[Exception] | None = None
    hang_up: bool = False


@value
class CloseUpstream:
    pass


@value
class Store:
    """Put changes of virtual topic configs into the state topic; answer with `Stored(token, NotStored | None)`."""

    token: int
    changes: tuple[TopicConfigChange, ...]


@value
class Expand:
    """Expand these topics; answer with `Expanded(token)` within `timeout_ms`, with the state at that time."""

    token: int
    requests: tuple[ExpansionRequest, ...]
    timeout_ms: int


@value
class GroupQuery:
    """Query a group; answer with `Replied(token)` soon, also on failure."""

    token: int
    query_message: Query


@value
class Noticed:
    """A group, or a member of one, was observed."""

    notice: Notice


@value
class ValidateCommit:
    """May this transaction commit? Answer with `CommitDecided(token)` soon, also on failure.

    `end_txn_version` – of the request. `may_be_committed` – an earlier one may have committed it.
    """

    token: int
    transactional_id: str
    producer_id: int
    producer_epoch: int
    end_txn_version: int
    may_be_committed: bool = False


@value
class RecordAbortOnly:
    """Put it into the state topic; answer with `AbortOnlyRecorded(token)` soon, also on failure.

    `instead_of` – the names of the records that it replaces atomically.
    """

    token: int
    abort_only: AbortOnly
    instead_of: frozenset[UUID] = frozenset()


@value
class ClearAbortOnly:
    """Such a transaction has ended: delete its records from the state topic, after reading that to its end.

    Answer with `AbortOnlyRecorded(token)` soon, also on failure. `token` 0: no answer is needed.
    """

    token: int
    producer_id: int
    producer_epoch: int


@value
class ReadBatches:
    """Run `read`, which works on batches or on a control message, off the event loop. Answer with `BatchesRead(token)`,
    also on failure.

    Skip it if the connection has closed.
    """

    token: int
    read: Callable[[], None]


@value
class LoginFailed:
    """For the log: Kafka refused a client's login. `principal` – as the client named it, empty if it did not."""

    mechanism: str
    principal: str
    reason: str


@value
class Throttled:
    """The client is over a Kafka quota: Kafka reads nothing from its connection for `throttle_ms`."""

    throttle_ms: int


@value
class LateAppends:
    """Kafka did not answer the client's appends to this partition for `seconds`, while other clients waited for them:
    they are resolved from the log."""

    partition: TopicPartition
    seconds: float


@value
class TopicStale:
    """Kafka's answer shows that the cached metadata of a checked topic is outdated: refresh it."""

    topic: str


@value
class HeadersCopied:
    """A batch for `partition` has headers that do not count there: they were made for `copied_from`."""

    partition: TopicPartition
    copied_from: str
    client_id: str | None


@value
class OffsetIgnored:
    """A batch with an expected offset for a topic that does not check it."""

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
    """For the metrics: a refusal by reason, a request by API. For the status page also, where known: the partition, the
    expected offset and the actual log end (-1: the refusal is not about offsets).
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
    | Store
    | Expand
    | GroupQuery
    | Noticed
    | ValidateCommit
    | RecordAbortOnly
    | ClearAbortOnly
    | ReadBatches
    | LoginFailed
    | Throttled
    | LateAppends
    | TopicStale
    | HeadersCopied
    | OffsetIgnored
    | Downgraded
    | Count
)
