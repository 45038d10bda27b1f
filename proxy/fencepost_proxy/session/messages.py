"""What a session is told (events) and what it wants done (commands). Nothing here decides anything.

Bytes in events are views that are valid during the call only. So are bytes in commands: views into those of the event,
often. Whoever cannot write them at once makes a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.partitions.events import Event as GateEvent
from fencepost_proxy.partitions.events import Ticket
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult

# --------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ClientBytes:
    data: memoryview


@dataclass(frozen=True, slots=True)
class UpstreamBytes:
    data: memoryview


@dataclass(frozen=True, slots=True)
class ClientPassed:
    """So many of `Session.passing_up_bytes` went to the broker without being read here."""

    byte_count: int


@dataclass(frozen=True, slots=True)
class UpstreamPassed:
    """So many of `Session.passing_down_bytes` went to the client without being read here."""

    byte_count: int


@dataclass(frozen=True, slots=True)
class ClientLost:
    """The client closed its connection, or it broke."""


@dataclass(frozen=True, slots=True)
class UpstreamLost:
    reason: str


@dataclass(frozen=True, slots=True)
class TurnGranted:
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The gate's last word on a ticket, sent or not."""

    ticket: Ticket
    result: PartitionResult
    reason: str | None


@dataclass(frozen=True, slots=True)
class Stored:
    """What `Store` asked for is in the state topic and every proxy process knows it; or why not."""

    token: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed, memory was freed: look again at what waits."""


Event = (
    ClientBytes
    | UpstreamBytes
    | ClientPassed
    | UpstreamPassed
    | ClientLost
    | UpstreamLost
    | TurnGranted
    | TurnEnded
    | Stored
    | Tick
)

# ------------------------------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class ToClient:
    chunks: list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class ToUpstream:
    chunks: list[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class ReadClient:
    """Go on reading from the client, or pause (`on=False`)."""

    on: bool


@dataclass(frozen=True, slots=True)
class ReadUpstream:
    on: bool


@dataclass(frozen=True, slots=True)
class CloseClient:
    """Close once what was written has gone out. `reason` is for the log; `fault` is whose it was, None for nobody's."""

    reason: str
    fault: type[Exception] | None = None


@dataclass(frozen=True, slots=True)
class CloseUpstream:
    pass


@dataclass(frozen=True, slots=True)
class ToGate:
    ticket: Ticket
    event: GateEvent


@dataclass(frozen=True, slots=True)
class ToPartition:
    """For the gate of a partition, without a ticket."""

    partition: TopicPartition
    event: GateEvent


@dataclass(frozen=True, slots=True)
class Store:
    """Put changes of virtual topic configs into the state topic; answer with `Stored(token)`."""

    token: int
    changes: tuple[TopicConfigChange, ...]


@dataclass(frozen=True, slots=True)
class TopicStale:
    """Kafka's answer shows that what we know of a guarded topic is out of date: look it up again."""

    topic: str


@dataclass(frozen=True, slots=True)
class Count:
    """For the metrics: a refusal by reason, a request by API."""

    what: str
    label: str


Command = (
    ToClient
    | ToUpstream
    | ReadClient
    | ReadUpstream
    | CloseClient
    | CloseUpstream
    | ToGate
    | ToPartition
    | Store
    | TopicStale
    | Count
)
