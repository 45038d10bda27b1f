"""The status page's view of this process: its snapshot, its lists, and the metrics that are read on a scrape."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fencepost_policies.append import Check
from fencepost_proxy import logs
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.cluster.metadata import NO_NODE
from fencepost_proxy.cluster.refused import RefusedConnections
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.errors import Reason
from fencepost_proxy.executor import EXECUTOR
from fencepost_proxy.metrics import AddressNumbers, Metrics, Moment, PartitionNumbers, fencepost_version
from fencepost_proxy.observability import diagnosis, readiness
from fencepost_proxy.observability.history import SAMPLE_SECONDS, History
from fencepost_proxy.observability.lists import Lists
from fencepost_proxy.observability.status import (
    ABORT_ONLY_SHOWN,
    AbortOnlyStatus,
    BrokerStatus,
    Listed,
    PageRequest,
    Problem,
    StatusSnapshot,
)
from fencepost_proxy.observability.status_server import StatusServer
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.services.checked_topics import CheckedTopics
from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.services.driver import Driver
from fencepost_proxy.services.reports import Reports
from fencepost_proxy.services.unknown_configs import problems
from fencepost_proxy.transactions.watched import TransactionsReport
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.listeners import Listeners
from fencepost_proxy.transport.memory_budget import MemoryBudget
from fencepost_proxy.transport.upstreams import Upstreams
from fencepost_proxy.types import Address, NodeId, TopicPartition

_log = logs.get("services.process_status")
#: How long a topic's ignored expected offsets are shown.
_IGNORED_SECONDS = 3_600.0


@dataclass(eq=False)
class ProcessStatus:
    """`bootstrap`: set once clients can connect. `ends`: set when the process is about to stop."""

    config: ProxyConfig
    limits: Callable[[], Limits]
    cluster: ClusterView
    driver: Driver
    topics: CheckedTopics
    reports: Reports
    connections: ClientConnections
    memory: MemoryBudget
    book: AddressBook
    listeners: Listeners
    upstreams: Upstreams
    refused: RefusedConnections
    certificates: Certificates
    metrics: Metrics
    spawn: Spawn
    bootstrap: Address | None = None
    ends: bool = False

    def __post_init__(self) -> None:
        self._started_at = time.monotonic()
        self._history = History(self.metrics)
        self._lists = Lists(
            proxied_connections=self.connections.by_number,
            sequencers=self.driver.dispatcher.sequencers,
            refusals=self.reports.refusals,
            topics=self.topics.known,
            policy=self.cluster.policies.policy,
            info=self.cluster.kafka.topic,
            expansions=self.topics.expansions,
            gated=self.cluster.groups.waiting,
        )
        self.metrics.state_fresh_until = self.cluster.membership.fresh_until
        self.metrics.probe = self.probe

    def server(self) -> StatusServer:
        return StatusServer(
            self.snapshot,
            lambda: self.metrics,
            self._listed,
            not_ready=self.not_ready,
            release=self.cluster.groups.release,
            token_file=self.config.status_token_file,
            read_token_file=self.config.status_read_token_file,
            tls=self.certificates.status_context if self.config.status_tls else lambda: None,
        )

    async def run(self) -> None:
        """Keeps the rates of the last minutes."""
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.topics.services.collect_counts()
            self._history.sample(time.monotonic())

    def probe(self) -> None:
        """Updates the metrics that are read at scrape time."""
        limits, moment = self.limits(), Moment()
        self.topics.services.collect_counts()
        moment.connections_max = limits.connections_max
        moment.address = AddressNumbers((self.connections.most_from or ("", 0))[1], limits.address_connections_max)
        moment.buffered_bytes_max = limits.buffered_bytes_max
        moment.buffered_bytes = self.memory.reserved_bytes
        sequencers = dict.fromkeys(Phase, 0)
        for partition, sequencer in self.driver.dispatcher.sequencers.items():
            sequencers[sequencer.phase] += 1
            moment.appends_waiting += sequencer.waiting
            end = sequencer.log_end_offset
            if end is None:
                continue
            if len(moment.partitions) < limits.metric_partitions_shown_max:
                moment.partitions[partition] = PartitionNumbers(end, sequencer.sequence_offset)
            else:
                moment.partitions_left_out += 1
        moment.sequencers = {phase.name.lower(): count for phase, count in sequencers.items()}
        self.metrics.moment = moment
        self.metrics.ready = not self.not_ready()
        self.metrics.log_lines = logs.lines()
        self.metrics.traffic.requests_in_flight = self._in_flight()

    async def _listed(self, requested: Sequence[PageRequest]) -> Sequence[Listed]:
        return [self._lists.listed(each) for each in requested]

    def snapshot(self) -> StatusSnapshot:
        metrics, state, limits = self.metrics, self.cluster.membership.state, self.limits()
        self.topics.services.collect_counts()
        brokers = tuple(self._brokers())
        transactions = None if metrics.transactions is None else metrics.transactions()
        return StatusSnapshot(
            version=fencepost_version(),
            executor=str(EXECUTOR),
            uptime_seconds=time.monotonic() - self._started_at,
            cluster_id=self.cluster.kafka.cluster_id,
            bootstrap=self.bootstrap,
            not_ready=self.not_ready(),
            connections=len(self.connections.by_number),
            connections_max=limits.connections_max,
            requests_in_flight=self._in_flight(),
            buffered_bytes=self.memory.reserved_bytes,
            buffered_bytes_max=limits.buffered_bytes_max,
            bytes_to_kafka=metrics.traffic.bytes_to_kafka,
            bytes_to_clients=metrics.traffic.bytes_to_clients,
            violations=self.reports.violations,
            added_seconds=metrics.added_seconds(),
            state_lease_seconds=None if state is None else state.fresh_until - time.monotonic(),
            refusals=dict(metrics.refusals),
            brokers=brokers,
            problems=(*self._problems(brokers, transactions), *self.reports.slow_clients.problems()),
            last_violation=self.reports.last_violation,
            shortened_logs=self.reports.shortened_logs,
            last_shortened_log=self.reports.last_shortened_log,
            abort_only_transactions=tuple(self._abort_only()),
            warnings=tuple(self.topics.warnings()),
            certificate_days={of: (end - time.time()) / 86_400 for of, end in metrics.certificate_ends},
            instances=() if state is None else tuple(state.heartbeats.instances(time.monotonic())),
            history=self._history.columns(time.monotonic()),
            transactions=transactions,
        )

    def _ignoring_offsets(self) -> Sequence[str]:
        """Topics that got expected offsets lately, and still do not check them."""
        since, policy = time.monotonic() - _IGNORED_SECONDS, self.cluster.policies.policy
        reported = ((topic, policy(topic)) for topic, at in self.reports.ignored_offsets.items() if at >= since)
        return sorted(topic for topic, each in reported if each is None or each.check is Check.OFF)

    def _problems(self, brokers: Sequence[BrokerStatus], transactions: TransactionsReport | None) -> Iterator[Problem]:
        yield from self.cluster.rights.problems()
        yield from problems(self.cluster.membership.view.unknown_configs)
        yield from diagnosis.of_ignored_offsets(self._ignoring_offsets())
        yield from diagnosis.of_process(
            self.limits(),
            connections=len(self.connections.by_number),
            most_from=self.connections.most_from,
            buffered_bytes=self.memory.reserved_bytes,
            brokers=brokers,
            certificate_ends=self.metrics.certificate_ends,
            now=time.time(),
            cpu_wait=self._history.cpu_wait_of_last_minute(),
            refused={self._named(address): count for address, count in self.refused.recent()},
            led_by=self._led_by(brokers, () if transactions is None else transactions.leaderless),
        )

    def _in_flight(self) -> int:
        return sum(session.unanswered_count for session in self.driver.dispatcher.sessions.values())

    def _brokers(self) -> Iterator[BrokerStatus]:
        connections = Counter(each.node_id for each in self.connections.by_number.values())
        host = self.config.advertised_host or self.config.listen.host
        for node_id, kafka in sorted(self.book.nodes.items()):
            yield BrokerStatus(
                node_id=node_id,
                kafka=kafka,
                listener=self._reported_address(node_id, host),
                connections=connections[node_id],
                problem=self._problem_with(node_id),
            )

    def _reported_address(self, node_id: NodeId, host: str) -> Address | None:
        """The address of this broker in responses to clients."""
        if self.cluster.sidecar is not None:
            return self.cluster.sidecar.advertised.get(node_id)
        return self.book.advertised(node_id, host) if node_id in self.listeners else None

    def _named(self, address: Address) -> str:
        brokers = [str(node_id) for node_id, upstream in sorted(self.book.nodes.items()) if upstream == address]
        return f"Broker {', '.join(brokers)} ({address})" if brokers else f"Bootstrap server {address}"

    def _problem_with(self, node_id: NodeId) -> str | None:
        if (reason := self.upstreams.failure(node_id)) is not None:
            return reason
        if self.cluster.kafka.brokers and node_id not in self.cluster.kafka.brokers:
            return "no longer in the cluster's metadata: the broker is down, or was removed"
        return None

    def _led_by(
        self, brokers: Iterable[BrokerStatus], leaderless: Iterable[TopicPartition]
    ) -> Mapping[NodeId, Sequence[TopicPartition]]:
        """Partitions of unreachable brokers, and under `NO_NODE` those without a leader: of topics that the proxy keeps
        metadata of, and from `leaderless` (observed earlier) of all others."""
        topics = self.cluster.kafka.metadata.known.topics
        led_by = {NO_NODE: [each for each in leaderless if each.topic not in topics]}
        led_by |= {each.node_id: [] for each in brokers if each.problem is not None}
        for topic, info in topics.items():
            for partition, at in info.partitions.items():
                if at.leader.node_id in led_by:
                    led_by[at.leader.node_id].append(TopicPartition(topic, partition))
        return led_by

    def _abort_only(self) -> Iterator[AbortOnlyStatus]:
        now_ms = int(time.time() * 1000)
        for each in self.cluster.membership.view.abort_only_records.older_than(now_ms + 1)[:ABORT_ONLY_SHOWN]:
            seconds = max(0.0, (now_ms - each.at_ms) / 1000)
            yield AbortOnlyStatus(each.transactional_id, each.producer_id, each.producer_epoch, each.reason, seconds)

    def not_ready(self) -> tuple[Reason, ...]:
        """Why clients should not be sent here; nothing if it is ready."""
        if self.ends:
            return (readiness.SHUTTING_DOWN,)
        cluster = self.cluster
        if cluster.kafka.cluster_id is None:
            return (readiness.without_kafka(self.config.upstream, cluster.kafka.waits_because),)
        state, sidecar = cluster.membership.state, cluster.sidecar
        if self.bootstrap is None:
            return tuple(readiness.before_serving(sidecar, cluster.membership.waits_because, state))
        fresh = cluster.membership.fresh(time.monotonic())
        closed = [why for node_id, why in self.listeners.problems.items() if node_id in cluster.kafka.brokers]
        return (*readiness.while_serving(sidecar, state, fresh=fresh), *closed)
