"""What is kept of a request while somebody waits for its answer: its `PendingResponse`.

Every request that will be answered has one, in two queues of its connection:

- `_to_client`: every slot, in the order of the client's requests. Only the front one may write to the client.
- `_from_upstream`: the slots that the broker will answer, in the order they were sent.

A request that went up in parts, or changed, has an *inner* slot in the second queue for each of them, beside its own in
the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult

if TYPE_CHECKING:
    from fencepost_proxy.session.produce_exchange import ProduceExchange

#: The appends of one producer to one partition, on one connection.
PipelineKey = tuple[TopicPartition, int]


@dataclass(slots=True)
class Failed:
    """Why a chain failed, and up to which byte of the connection its client cannot have known.

    A, expecting 5, and B, expecting 6, are sent together. Another writer wins 5, A is refused – and B would land behind
    the other's record as if it were A. So what was sent before the answer to A was, falls with it. How much that is
    nobody can tell for certain from here: at least what had arrived when the answer left.
    """

    result: PartitionResult
    after_bytes: float = float("inf")


@dataclass(slots=True, eq=False)
class Begun:
    """Appends of a connection that had begun at some moment, of which nobody can tell to which topic they go.

    `reads_to` – the client's byte at which the frame ends that was on its way then. `turn` – what waited at a door or a
    gate. Both have requests in front of them, and become one: so `response_slots`, those without an answer, are only
    known once both are over.
    """

    at: float
    reads_to: int
    exchange: ProduceExchange | None
    response_slots: frozenset[PendingResponse] | None = None


class Answer(Enum):
    #: Streamed from upstream to the client as it is.
    RELAYED = auto()
    #: The same, once it is known to name no broker's address: a Produce response, of 100 bytes or so.
    RELAYED_UNLESS_BROKERS = auto()
    #: Collected from upstream; `PendingResponse.on_response` makes the answer of it, now or later.
    MADE_FROM_RESPONSE = auto()
    #: Not from upstream at all.
    MADE_HERE = auto()
    #: One guarded append that took the short way (`PendingResponse.single`); its answer does, too, if it is the one
    #: that is due.
    SINGLE = auto()


@dataclass(slots=True)
class Single:
    """What is kept of a guarded append that took the short way: enough to make a `ProduceExchange` of it after all."""

    pending: PendingAppend
    frame: memoryview
    starts_at: int
    answer_by: float
    topic: bytes
    topic_id: bytes


class PendingResponse:
    """One request that somebody waits for."""

    __slots__ = (
        "answer",
        "answered_at",
        "api_key",
        "chunks",
        "correlation_id",
        "done",
        "inner",
        "on_response",
        "pipeline_keys",
        "reserved_bytes",
        "single",
        "version",
    )

    def __init__(self, api_key: int, version: int, correlation_id: int, answer: Answer) -> None:
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.answer = answer
        self.on_response: Callable[[memoryview], None] | None = None
        self.chunks: list[bytes | memoryview] = []
        self.done = False
        #: When Kafka's answer was here; None where it has passed, or does not come from Kafka.
        self.answered_at: float | None = None
        #: Asked by us on behalf of another slot: no client's request of its own.
        self.inner = False
        self.single: Single | None = None
        self.reserved_bytes = 0
        #: Failed appends that its answer tells of: until it is read, what follows them follows a hole.
        self.pipeline_keys: list[PipelineKey] = []
