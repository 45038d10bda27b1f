"""What a session may ask of the process it runs in."""

from __future__ import annotations

from typing import Protocol
from uuid import UUID

from fencepost_proxy.partitions.events import Ticket
from fencepost_proxy.partitions.gate import Gate
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HeaderNames
from fencepost_proxy.wire.produce import NodeEndpoint


class Surroundings(Protocol):
    """Answers hold at the moment of asking."""

    frame_bytes_max: int
    in_flight_requests_max: int
    gate_wait_max_seconds: float
    request_timeout_seconds: float
    decompressed_bytes_max: int
    header_names: HeaderNames
    refuse_whole_requests: bool
    state_topic: str

    @property
    def state_topic_marks(self) -> tuple[bytes, ...]:
        """Bytes that occur in every request that concerns the state topic: its name, its id."""

    @property
    def shared_producer_id(self) -> int:
        """What stamped batches are appended under, -1 while it is not known."""

    @property
    def tag(self) -> int:
        """What tells this process's stamps from those of the others, 1 to 255; 0 while that is not settled."""

    def alone(self, now: float) -> bool:
        """Whether no other process is known to serve the cluster."""

    def taken_over(self, now: float) -> bool:
        """Whether what processes before this one had under way is over."""

    def fresh(self, now: float) -> bool:
        """Whether the virtual configs are loaded and recent enough to rely on."""

    def policy(self, topic: str) -> TopicPolicy | None:
        """The policy of a guarded topic, None for one that is not."""

    def gate(self, partition: TopicPartition) -> Gate | None:
        """The partition's gate, None if it has not been needed lately."""

    def topic_id(self, topic: str) -> UUID | None: ...
    def leader_epoch(self, partition: TopicPartition) -> int:
        """As last heard of, -1 if it was not."""

    def produce_version_max(self) -> int:
        """The newest Produce version that every broker understands."""

    def may_send(self, ticket: Ticket, now: float) -> bool:
        """Whether the gate's grant still holds."""

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        """The same broker at the address by which clients reach it."""

    def count_request(self, api_key: int) -> None:
        """For the metrics; the key is one of the table's."""

    def unread_bytes(self, connection: int) -> int:
        """What the client has sent and nobody has read from its socket yet."""

    def gate_waited(self, seconds: float) -> None:
        """For the metrics: from an append's offer to its turn."""

    def forwarded(self, waited_seconds: float) -> None:
        """For the metrics: a request goes up now; it was read so long before this event, gates not counted."""

    def answered(self, waited_seconds: float) -> None:
        """For the metrics: an answer of Kafka's goes to its client now; it was read so long before this event."""

    def reserve(self, byte_count: int) -> bool:
        """Takes from the memory that all connections share; False if there is not enough now."""

    def release(self, byte_count: int) -> None: ...
