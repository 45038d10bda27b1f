"""State of a request until its answer is sent: its `PendingResponse`.

Every request with an answer has one, in two queues of its connection:

- `to_client`: all of them, in the order of the client's requests. Only the front one may write to the client.
- `from_upstream`: those that the broker will answer, in the order they were sent.

A request that was changed or split for upstream has one in the first queue, and an *inner* one in the second for each
request sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult

#: The appends of one producer to one partition, on one connection.
PipelineKey = tuple[TopicPartition, int]


@dataclass(slots=True)
class Failed:
    """Why pipelined appends failed, and up to which byte of the connection the client cannot have known.

    1. The client sends A, expecting 5, and B, expecting 6.
    2. Another writer appends at 5, and A is refused.
    3. If B were admitted, it would be appended after the other writer's record as if A had been appended.

    So everything that the client sent before it received A's answer fails too. The proxy cannot know that byte exactly:
    it takes everything that had arrived when the answer left.
    """

    result: PartitionResult
    after_bytes: float = float("inf")


class Answer(Enum):
    #: Streamed from upstream to the client unchanged.
    RELAYED = auto()
    #: The same, unless it contains broker addresses or a throttle time: a Produce response, of about 100 bytes.
    RELAYED_UNLESS_BROKERS = auto()
    #: Streamed from upstream, but for broker addresses after the records (`wire/node_endpoints.py`).
    RELAYED_UNTIL_BROKERS = auto()
    #: Collected from upstream; `PendingResponse.on_response` makes the answer from it, now or later.
    MADE_FROM_RESPONSE = auto()
    #: Made by the proxy alone.
    MADE_HERE = auto()


class PendingResponse:
    """One request with an answer."""

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
        "version",
    )

    def __init__(self, api_key: int, version: int, correlation_id: int, answer: Answer) -> None:
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.answer = answer
        #: Gets the frame without its length; of Produce, the parsed response.
        self.on_response: Callable[..., None] | None = None
        self.chunks: list[bytes | memoryview] = []
        self.done = False
        #: When Kafka's answer arrived; None if it was streamed, or does not come from Kafka.
        self.answered_at: float | None = None
        #: Sent by the proxy on behalf of another pending response; not a request of the client.
        self.inner = False
        self.reserved_bytes = 0
        #: Failed appends that its answer reports. Until the client reads it, the appends that follow leave a gap.
        self.pipeline_keys: list[PipelineKey] = []


def inner_response(
    api_key: int, version: int, correlation_id: int, on_response: Callable[..., None]
) -> PendingResponse:
    """Of a request that the proxy sends on behalf of another one."""
    pending_response = PendingResponse(api_key, version, correlation_id, Answer.MADE_FROM_RESPONSE)
    pending_response.inner = True
    pending_response.on_response = on_response
    return pending_response
