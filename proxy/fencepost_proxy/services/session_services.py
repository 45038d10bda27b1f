"""What sessions use of this process: the implementation of `session.services.Services`."""

from __future__ import annotations

import time
from collections.abc import MutableMapping, Sequence
from typing import Final
from uuid import UUID

from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.errors import error_name
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.expansion.counts import Client
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.native_view import NativeView
from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.services.driver import AddedTime
from fencepost_proxy.session.batches.reading import HERE_BYTES_MAX
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.frames.services import RelayedVersions, and_addresses, but_for
from fencepost_proxy.session.relay.native import settings_for, shared
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.listeners import Listeners
from fencepost_proxy.transport.memory_budget import MemoryBudget
from fencepost_proxy.types import Bounded, TopicPartition
from fencepost_proxy.wire.apis import END_TXN, PRODUCE

#: More than a cluster has topics to which clients append.
_TOPIC_NAMES_MAX: Final = 100_000
_UNKNOWN_TOPIC_IDS_MAX: Final = 10_000


class SessionServices(NativeView, remembered=("in_flight_requests_max", "relayed_versions")):
    """`sequencers` is set once there is a dispatcher."""

    sequencers: Dispatcher

    def __init__(
        self,
        config: ProxyConfig,
        cluster: ClusterView,
        *,
        connections: ClientConnections,
        listeners: Listeners,
        memory: MemoryBudget,
        metrics: Metrics,
        added: AddedTime,
    ) -> None:
        limits = config.limits
        self._config = config
        self.header_names = cluster.header_names
        self.frame_bytes_max = limits.frame_bytes_max
        self.request_timeout_seconds = limits.request_timeout_seconds
        self.decompressed_bytes_max = limits.decompressed_bytes_max
        self.read_here_bytes_max = HERE_BYTES_MAX
        self.state_topic = config.state_topic
        self.refuse_whole_requests = config.refusal_scope == "request"
        # A Kafka listener requires a login from every client or from none. Clients reach the same listener as the
        # proxy's connections: if the proxy needs a login there, so do clients.
        self.clients_log_in = config.control_sasl is not None
        self.reload(limits)

        self._cluster = cluster
        self._kafka = cluster.kafka
        self._membership = membership = cluster.membership
        self.fresh = membership.fresh
        self.alone = membership.alone
        self.taken_over = membership.taken_over
        self.policy = cluster.policies.policy
        self.topic_id = cluster.topic_id
        self.topic_names: MutableMapping[UUID, str] = Bounded(_TOPIC_NAMES_MAX)
        self.unknown_topic_ids: MutableMapping[UUID, float] = Bounded(_UNKNOWN_TOPIC_IDS_MAX)
        self.metadata_error = cluster.lookups.metadata_error
        self.endpoint = listeners.endpoint
        self.reserve = memory.reserve
        self.release = memory.release
        self.idempotence = IdempotenceMemory(limits.remembered_producers_max)
        self.transactions = cluster.transactions
        self._marked_topic_id: UUID | None = None
        self._state_topic_marks: tuple[bytes, ...] = (config.state_topic.encode(),)

        self._connections = connections
        self.unread_bytes = connections.unread_bytes
        self._counts = counts = cluster.counts
        self.partition_count = counts.count
        self.count_confirmed_since = counts.confirmed_since
        self.in_grace_period = counts.in_grace_period
        #: Until when appends that no barrier knows of may be appended.
        self.unanswered_until = float("-inf")

        self._metrics = metrics
        self._traffic = metrics.traffic
        self.forwarded = added.forwarded
        self.answered = added.answered

        self.native = settings_for(self, shared(membership.fresh_until, memory))
        self.relayed_versions: RelayedVersions = but_for(cluster.groups.relayed_versions, END_TXN)

    def reload(self, limits: Limits) -> None:
        self.in_flight_requests_max = limits.in_flight_requests_max
        self.sequencer_wait_max_seconds = limits.sequencer_wait_max_seconds

    def update_relayed_versions(self) -> None:
        """They depend on the state topic and on the groups."""
        versions = self._cluster.groups.relayed_versions
        if self._config.mode == "sidecar":
            versions = and_addresses(versions)
        self.relayed_versions = but_for(versions, END_TXN) if self._cluster.commits.validating else versions

    # ---- the cluster

    @property
    def state_topic_marks(self) -> tuple[bytes, ...]:
        topic_id = self.topic_id(self.state_topic)
        if topic_id is not self._marked_topic_id:
            self._marked_topic_id = topic_id
            self._state_topic_marks = (self.state_topic.encode(), *([] if topic_id is None else [topic_id.bytes]))
        return self._state_topic_marks

    @property
    def shared_producer_ids(self) -> frozenset[int]:
        state = self._membership.state
        return frozenset() if state is None else state.view.producer_ids.all

    @property
    def instance_id(self) -> int:
        state = self._membership.state
        return 0 if state is None else state.heartbeats.instance_id

    def unix_ms(self, now: float) -> int:
        return round(time.time() * 1000)

    def leader_epoch(self, partition: TopicPartition) -> int:
        leader = self._kafka.leader(partition)
        return -1 if leader is None else leader.leader_epoch

    def produce_version_max(self) -> int:
        return self._kafka.pool.version_max(PRODUCE)

    def known(self) -> Known:
        """For rewritten requests."""
        state_topic = self._kafka.topic(self.state_topic)
        return Known(
            view=self._membership.view,
            file_configs=self._config.configs_for,
            topic_id=self.topic_id,
            state_topic=self.state_topic,
            state_topic_id=None if state_topic is None else state_topic.topic_id,
            fresh=self.fresh(time.monotonic()),
            shared_producer_ids=self.shared_producer_ids,
            may_check_counts=self._cluster.policies.may_check_counts(),
        )

    # ---- topics with partition-count checks

    def barrier(self, topic: str) -> AppendBarrier:
        return self.sequencers.barrier(topic)

    def new_barrier(self, topic: str) -> AppendBarrier:
        """Closed if an expansion is pending. It counts as empty only once appends of an earlier process have ended."""
        barrier = AppendBarrier(
            topic,
            in_doubt_seconds=self._config.limits.takeover_seconds,
            clear_at=self._membership.takeover_until,
        )
        if self._membership.history(topic, self.topic_id(topic)).pending is not None:
            barrier.close(time.monotonic())
        return barrier

    def served_count(self, connection: int, client_id: str | None, topic: str, now: float) -> int | None:
        client = self._client(connection, client_id)
        return None if client is None else self._counts.served(client, topic, now)

    def record_served(self, connection: int, client_id: str | None, counts: Sequence[tuple[str, int]]) -> None:
        client = self._client(connection, client_id)
        if client is not None:
            self._counts.serve(client, counts)

    def record_guess(self, connection: int, client_id: str | None, topic: str, now: float) -> None:
        client = self._client(connection, client_id)
        if client is not None:
            self._counts.refused(client, topic, now)

    def record_unanswered(self, now: float) -> None:
        self.unanswered_until = now + self._config.limits.takeover_seconds

    def _client(self, connection: int, client_id: str | None) -> Client | None:
        host = self._connections.host(connection)
        return None if host is None else Client(host, client_id)

    # ---- metrics

    def count_request(self, api_key: int, version: int) -> None:
        self._traffic.requests[api_key][version] += 1

    def collect_counts(self) -> None:
        """What native code has counted."""
        if self.native is None:
            return
        requests, admitted, to_kafka, to_clients, request_seconds, response_seconds = self.native[1].take_counts()
        traffic = self._traffic
        for api_key, version, count in requests:
            traffic.requests[api_key][version] += count
        self._metrics.sequencer_wait_seconds.observe(0.0, admitted)
        traffic.bytes_to_kafka += to_kafka
        traffic.bytes_to_clients += to_clients
        traffic.request_seconds.add(*request_seconds)
        traffic.response_seconds.add(*response_seconds)

    def kafka_refused(self, error_code: int) -> None:
        self._metrics.kafka_errors.inc(error_name(error_code))

    def upstream_lost(self) -> None:
        self._metrics.upstream_errors["clients"].inc("lost")

    def sequencer_waited(self, seconds: float) -> None:
        self._metrics.sequencer_wait_seconds.observe(seconds)

    def barrier_waited(self, seconds: float) -> None:
        self._metrics.barrier_wait_seconds.observe(seconds)
