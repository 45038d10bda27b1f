"""What a session may ask of the process it runs in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol
from uuid import UUID

from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session import partition_counts
from fencepost_proxy.topics.barrier import AppendBarrier
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import APIS, DESCRIBE_CLUSTER, DESCRIBE_QUORUM, FIND_COORDINATOR, Handling
from fencepost_proxy.wire.batch import HeaderNames
from fencepost_proxy.wire.produce import NodeEndpoint

#: API key -> the versions that pass without a look, and whether the state topic must not occur in their bytes.
RelayedVersions = Mapping[int, tuple[int, int, bool]]
RELAYED_VERSIONS: Final[RelayedVersions] = MappingProxyType(
    {
        key: (api.min_version, api.max_version, Handling.INSPECT_REQUEST in api.handling)
        for key, api in APIS.items()
        if api.handling in (Handling.RELAY, Handling.INSPECT_REQUEST)
    }
)


def relayed_versions_without(api_keys: frozenset[int]) -> RelayedVersions:
    """Where these are to be looked into."""
    return MappingProxyType({key: versions for key, versions in RELAYED_VERSIONS.items() if key not in api_keys})


def and_addresses(relayed_versions: RelayedVersions) -> RelayedVersions:
    """Where brokers' addresses are told as Kafka has them."""
    apis = [APIS[key] for key in (FIND_COORDINATOR, DESCRIBE_CLUSTER, DESCRIBE_QUORUM)]
    return MappingProxyType(
        {**relayed_versions, **{api.key: (api.min_version, api.max_version, False) for api in apis}}
    )


def but_for(relayed_versions: RelayedVersions, api_key: int) -> RelayedVersions:
    """The same, but this one is to be looked into."""
    return MappingProxyType({key: versions for key, versions in relayed_versions.items() if key != api_key})


class Services(partition_counts.Services, Protocol):
    """Answers hold at the moment of asking."""

    frame_bytes_max: int
    in_flight_requests_max: int
    sequencer_wait_max_seconds: float
    request_timeout_seconds: float
    decompressed_bytes_max: int
    #: Of a request's batches, once unpacked; see `Readings`.
    read_here_bytes_max: int
    header_names: HeaderNames
    refuse_whole_requests: bool
    #: Whether Kafka knows each client by a login of its own; else each is to it who the proxy is, and may what it may.
    clients_log_in: bool
    state_topic: str
    idempotence: IdempotenceMemory
    transactions: Table
    #: What passes without a look; see `RELAYED_VERSIONS`.
    relayed_versions: RelayedVersions

    @property
    def state_topic_marks(self) -> tuple[bytes, ...]:
        """Bytes that occur in every request that concerns the state topic: its name, its id."""

    @property
    def shared_producer_ids(self) -> frozenset[int]:
        """What stamped batches are, or were, appended under. A client may not use them."""

    @property
    def instance_id(self) -> int:
        """What tells this process's stamps from those of the others, 1 to 255; 0 while that is not settled."""

    def alone(self, now: float) -> bool:
        """Whether no other process is known to serve the cluster."""

    def taken_over(self, now: float) -> bool:
        """Whether what processes before this one had under way is over."""

    def fresh(self, now: float) -> bool:
        """Whether the virtual configs are loaded and recent enough to rely on."""

    def policy(self, topic: str) -> TopicPolicy | None:
        """The policy of a guarded or a counted topic, None for one that is neither."""

    def sequencer(self, partition: TopicPartition) -> PartitionSequencer | None:
        """The partition's gate, None if it has not been needed lately, or may have ended what is not told here yet."""

    def partition_exists(self, partition: TopicPartition, queried_since: float) -> bool | None:
        """By metadata; None: it does not show the partition, and has not been asked since then."""

    def topic_id(self, topic: str) -> UUID | None: ...
    def leader_epoch(self, partition: TopicPartition) -> int:
        """As last heard of, -1 if it was not."""

    def produce_version_max(self) -> int:
        """The newest Produce version that every broker understands."""

    def may_send(self, pending: PendingAppend, now: float) -> bool:
        """Whether the gate's grant still holds."""

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        """The same broker at the address by which clients reach it."""

    def count_request(self, api_key: int, version: int) -> None:
        """For the metrics; the key is one of the table's, the version one that it serves, or `UNKNOWN_VERSION`."""

    def kafka_refused(self, error_code: int) -> None:
        """For the metrics: Kafka's answer to a guarded append."""

    def upstream_lost(self) -> None:
        """For the metrics: the connection to the broker, with something unanswered."""

    def unread_bytes(self, connection: int) -> int:
        """What the client has sent and nobody has read from its socket yet."""

    def sequencer_waited(self, seconds: float) -> None:
        """For the metrics: from an append's offer to its turn."""

    def new_barrier(self, topic: str) -> AppendBarrier:
        """The door of a topic that is counted from now on, or was not used before."""

    def barrier_waited(self, seconds: float) -> None:
        """For the metrics: from a request's arrival until it went in at the doors of its counted topics."""

    def record_served(self, connection: int, client_id: str | None, counts: Sequence[tuple[str, int]]) -> None:
        """A Metadata answer tells this client these partition counts."""

    def record_guess(self, connection: int, client_id: str | None, topic: str, now: float) -> None:
        """It was refused for the count that it was told last."""

    def record_unanswered(self, now: float) -> None:
        """Appends that no door knows of are on their way to Kafka, and nobody will hear of them."""

    def forwarded(self, waited_seconds: float) -> None:
        """For the metrics: a request goes up now; it was read so long before this event, gates not counted."""

    def answered(self, waited_seconds: float) -> None:
        """For the metrics: an answer of Kafka's goes to its client now; it was read so long before this event."""

    def reserve(self, byte_count: int) -> bool:
        """Takes from the memory that all connections share; False if there is not enough now."""

    def release(self, byte_count: int) -> None: ...
