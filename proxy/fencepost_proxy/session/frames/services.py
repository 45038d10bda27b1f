"""What a session uses of its process."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Final, Protocol
from uuid import UUID

from fencepost_proxy.errors import Error
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.sequencer.events import Admit, Answer, PendingAppend
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import APIS, DESCRIBE_CLUSTER, DESCRIBE_QUORUM, FIND_COORDINATOR, Handling
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import NodeEndpoint, PartitionResult

if TYPE_CHECKING:
    from fencepost_native import Settings as NativeSettings

#: API key -> the versions relayed undecoded, and whether the state topic must not occur in their bytes.
RelayedVersions = Mapping[int, tuple[int, int, bool]]
RELAYED_VERSIONS: Final[RelayedVersions] = MappingProxyType(
    {
        key: (api.min_version, api.max_version, Handling.INSPECT_REQUEST in api.handling)
        for key, api in APIS.items()
        if api.handling & ~Handling.REWRITE_ENDPOINTS in (Handling.RELAY, Handling.INSPECT_REQUEST)
    }
)


def relayed_versions_without(api_keys: frozenset[int]) -> RelayedVersions:
    """Decode these."""
    return MappingProxyType({key: versions for key, versions in RELAYED_VERSIONS.items() if key not in api_keys})


def and_addresses(relayed_versions: RelayedVersions) -> RelayedVersions:
    """Where broker addresses are not rewritten."""
    apis = [APIS[key] for key in (FIND_COORDINATOR, DESCRIBE_CLUSTER, DESCRIBE_QUORUM)]
    return MappingProxyType(
        {**relayed_versions, **{api.key: (api.min_version, api.max_version, False) for api in apis}}
    )


def but_for(relayed_versions: RelayedVersions, api_key: int) -> RelayedVersions:
    """The same, but decode this one."""
    return MappingProxyType({key: versions for key, versions in relayed_versions.items() if key != api_key})


class Sequencers(Protocol):
    """The partition sequencers of the process. For the calls see `PartitionSequencer`.

    `submit` and `answered` return the sequencer's decision if there is one at once. All other results come by
    `Session.append_admitted`, `append_completed` and `may_join`, after the session's current event.
    """

    def submit(self, pending: PendingAppend) -> Admit | Answer | None: ...
    def read_ahead(self, pending: PendingAppend) -> None: ...
    def cancel(self, pending: PendingAppend) -> None: ...
    def sent(self, pending: PendingAppend) -> None: ...
    def answered(self, pending: PendingAppend, result: PartitionResult) -> Answer | None: ...
    def lost(self, pending: PendingAppend) -> None: ...
    def join(self, partition: TopicPartition, transactional_id: str, connection: int) -> None: ...
    def joined(self, partition: TopicPartition, transactional_id: str, *, answered: bool) -> None: ...

    def may_send(self, pending: PendingAppend, now: float) -> bool:
        """Whether the sequencer's admission is still valid."""

    def sequencer(self, partition: TopicPartition) -> PartitionSequencer | None:
        """For permits: None if it was not used lately, or while calls are queued, which must not be overtaken."""


class Settings(Protocol):
    """What the configuration says."""

    frame_bytes_max: int
    in_flight_requests_max: int
    sequencer_wait_max_seconds: float
    request_timeout_seconds: float
    decompressed_bytes_max: int
    #: Limit for a request's batches once decompressed; see `Readings`.
    read_here_bytes_max: int
    header_names: HeaderNames
    refuse_whole_requests: bool
    #: Whether clients log in to Kafka; else Kafka sees every client with the proxy's permissions.
    clients_log_in: bool
    state_topic: str


class Topics(Protocol):
    """What the state topic and Kafka's metadata say of topics."""

    topic_names: MutableMapping[UUID, str]
    unknown_topic_ids: MutableMapping[UUID, float]
    relayed_versions: RelayedVersions

    @property
    def state_topic_marks(self) -> tuple[bytes, ...]:
        """Bytes that occur in every request about the state topic: its name and its id."""

    def fresh(self, now: float) -> bool:
        """Whether the virtual configs are loaded and recent enough to rely on."""

    def policy(self, topic: str) -> TopicPolicy | None:
        """The policy of a topic with append checks or partition-count checks, else None."""

    def metadata_error(self, partition: TopicPartition, queried_since: float) -> Error | None:
        """Of metadata; None: it does not show the partition, and was not refreshed since then."""

    def topic_id(self, topic: str) -> UUID | None: ...
    def leader_epoch(self, partition: TopicPartition) -> int:
        """The latest known, -1 if none is."""

    def produce_version_max(self) -> int:
        """The newest Produce version that every broker understands."""

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        """The same broker with the address by which clients reach it."""


class Process(Protocol):
    """This process among the others, and what it knows of producers and transactions."""

    idempotence: IdempotenceMemory
    transactions: Table
    #: The module `fencepost_native` and what all connections share there; None without it.
    native: tuple[ModuleType, NativeSettings] | None

    @property
    def sequencers(self) -> Sequencers: ...
    @property
    def shared_producer_ids(self) -> frozenset[int]:
        """Producer ids of fenced appends, present and past. Clients may not use them."""

    @property
    def instance_id(self) -> int:
        """Identifies this process's fences, 1 to 255; 0 while none is assigned."""

    def alone(self, now: float) -> bool:
        """Whether no other process is known to serve the cluster."""

    def taken_over(self, now: float) -> bool:
        """Whether the appends of earlier processes are completed."""

    def unix_ms(self, now: float) -> int:
        """The time of day, Unix milliseconds."""

    def new_barrier(self, topic: str) -> AppendBarrier:
        """The barrier of a topic that gets partition-count checks, or was not used before."""


class Memory(Protocol):
    """Bytes of requests in this process."""

    def reserve(self, byte_count: int) -> bool:
        """Takes from the shared memory budget; False if there is not enough now."""

    def release(self, byte_count: int) -> None: ...
    def unread_bytes(self, connection: int) -> int:
        """What the client has sent and the proxy has not read from the socket."""


class Observation(Protocol):
    """What is reported of requests: for the metrics, unless a method names another purpose."""

    def count_request(self, api_key: int, version: int) -> None:
        """The key is one of `APIS`, the version one that it serves, or `UNKNOWN_VERSION`."""

    #: Kafka's error for a checked append.
    def kafka_refused(self, error_code: int) -> None: ...
    #: The broker connection ended with unanswered requests.
    def upstream_lost(self) -> None: ...
    def sequencer_waited(self, seconds: float) -> None:
        """From an append's submission to its admission."""

    def barrier_waited(self, seconds: float) -> None:
        """From a request's arrival until it entered the barriers of its topics."""

    def forwarded(self, waited_seconds: float) -> None:
        """A request goes upstream now; it was read so long before, time at sequencers not included."""

    def answered(self, waited_seconds: float) -> None:
        """A response of Kafka goes to its client now; it was read so long before."""

    def record_served(self, connection: int, client_id: str | None, counts: Sequence[tuple[str, int]]) -> None:
        """For count checks: a Metadata response reports these partition counts to this client."""

    def record_guess(self, connection: int, client_id: str | None, topic: str, now: float) -> None:
        """For expansions: an append was refused for the partition count last reported to this client."""

    def record_unanswered(self, now: float) -> None:
        """For expansions: appends that no barrier knows of are on their way to Kafka, and their outcome will stay
        unknown."""


class Expansions(Protocol):
    """What count checks need of the process. Answers are valid at the moment of the call only."""

    header_names: HeaderNames
    decompressed_bytes_max: int

    @property
    def shared_producer_ids(self) -> frozenset[int]: ...

    def policy(self, topic: str) -> TopicPolicy | None: ...

    def barrier(self, topic: str) -> AppendBarrier:
        """Of a topic with partition-count checks."""

    def partition_count(self, topic: str, now: float) -> int | None:
        """Of a topic with partition-count checks, None while unknown."""

    def count_confirmed_since(self, topic: str, at: float) -> bool:
        """Whether metadata requested at that time or later was received."""

    def in_grace_period(self, topic: str, now: float) -> bool:
        """Whether it was expanded recently."""

    def served_count(self, connection: int, client_id: str | None, topic: str, now: float) -> int | None:
        """The count last reported to this client, None if unknown."""


class Services(Settings, Topics, Process, Memory, Observation, Expansions, Protocol):
    """What a session uses of its process. Each part names in its constructor what it uses.

    Answers are valid at the moment of the call only.
    """
