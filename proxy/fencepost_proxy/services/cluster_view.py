"""What this process knows of the Kafka cluster: topics, groups and transactions, the state topic, the logs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from fencepost_proxy.cluster.broker import Access
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.connecting import Connector
from fencepost_proxy.cluster.fetches import Fetches
from fencepost_proxy.cluster.groups import ConsumerGroups
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.producers import Producers
from fencepost_proxy.cluster.refused import RefusedConnections
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.cluster.topics import Topics
from fencepost_proxy.cluster.transactions import Transactions
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.expansion.counts import Counts
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services.claim_markers import ClaimMarkers
from fencepost_proxy.services.expansions import Barriers, Expansions
from fencepost_proxy.services.groups import GroupProgressTracker
from fencepost_proxy.services.log_reader import LogReader
from fencepost_proxy.services.membership import Membership
from fencepost_proxy.services.missing_rights import MissingRights
from fencepost_proxy.services.sidecar import SidecarProbe
from fencepost_proxy.services.topic_lookups import TopicLookups
from fencepost_proxy.services.topic_policies import TopicPolicies
from fencepost_proxy.services.transactions import Commits
from fencepost_proxy.services.watching import TransactionWatch
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.transactions.watched import Leaders
from fencepost_proxy.transactions.watching import Pace
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.transport.listeners import Listeners
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.state_records import StateRecord


class ClusterView:
    """`expansions`: set once this process has joined the others. `sidecar`: None in another mode."""

    expansions: Expansions | None = None

    def __init__(
        self,
        config: ProxyConfig,
        certificates: Certificates,
        listeners: Listeners,
        *,
        metrics: Metrics,
        refused: RefusedConnections,
        connector: Connector,
        spawn: Spawn,
    ) -> None:
        limits = config.limits
        self._config = config
        self._metrics = metrics
        self._spawn = spawn
        access = Access(
            lambda: certificates.upstream,
            config.control_sasl,
            on_failure=metrics.upstream_tls_failures.inc,
            on_login=metrics.logged_in,
            on_error=metrics.upstream_errors["proxy"].inc,
            connector=connector,
            on_refused=lambda address: refused.record(address, "proxy"),
        )
        self.kafka = kafka = KafkaClient(config.upstream, limits, on_brokers=listeners.brokers_changed, access=access)
        self.sidecar: SidecarProbe | None = None
        if config.mode == "sidecar":
            self.sidecar = SidecarProbe(
                config, lambda: listeners.bootstrap, lambda: (kafka.cluster_id, kafka.brokers), access
            )
        self.membership = membership = Membership(kafka, config)
        self.header_names = HeaderNames()
        self.rights = MissingRights(kafka, config)
        self.log_reader = LogReader(
            kafka,
            membership,
            limits.frame_bytes_max,
            rights=self.rights,
            names=self.header_names,
            unpacked_bytes_max=limits.decompressed_bytes_max,
            markers=ClaimMarkers(
                kafka,
                lambda topic: (policy := self.policies.policy(topic)) is not None and policy.claims,
                metrics.claims,
            ),
        )
        self.counts = Counts(
            lambda topic: None if (info := kafka.topic(topic)) is None else (info.topic_id, info.partition_count),
            membership.history,
            lambda: round(time.time() * 1000),
            resolve_seconds=limits.partition_grace_seconds,
        )
        self.lookups = TopicLookups(
            kafka, self.counts, spawn, self.rights, timeout_seconds=limits.connect_timeout_seconds
        )
        self.topic_id = self.lookups.topic_id
        self.policies = TopicPolicies(config, membership, self.topic_id)
        self.groups = self._groups()
        self.transactions = Table(queued_seconds=limits.queued_seconds)
        self.commits = self._commits()

    def _groups(self) -> GroupProgressTracker:
        return GroupProgressTracker(
            self._config.limits,
            lambda: self.membership.joined,
            lambda: self.membership.view,
            groups=ConsumerGroups(self.kafka),
            log_ends=LogEnds(self.kafka),
            fetches=Fetches(self.kafka),
            configured=self._config.given_configs,
            policy=self.policies.policy,
            topic_id=self.topic_id,
            metrics=self._metrics,
        )

    def broker_of(self, listener: NodeId | None, address: Address | None) -> NodeId | None:
        """The broker of a client's upstream connection to `address`, None if that is not known.

        `listener`: the broker of the client's listener, None for bootstrap. Bootstrap addresses may be names that no
        broker advertises, unless there is only one broker.
        """
        if self.sidecar is not None:
            return self.sidecar.node_id
        if listener is not None:
            return listener
        brokers = self.kafka.brokers
        if len(brokers) == 1:
            return next(iter(brokers))
        return next((node_id for node_id, each in brokers.items() if each == address), None)

    def _commits(self) -> Commits:
        return Commits(
            self._config.limits,
            lambda: self.membership.joined,
            metadata=self.kafka.metadata,
            transactions=Transactions(self.kafka),
            producers=Producers(self.kafka),
            log_ends=LogEnds(self.kafka),
            fetches=Fetches(self.kafka),
            in_sync=self.log_reader.in_sync,
            table=self.transactions,
            configured=self._config.given_configs,
            policy=self.policies.policy,
            names=self.header_names,
            metrics=self._metrics,
        )

    async def join(self, on_change: Callable[[Sequence[StateRecord]], None], barriers: Barriers) -> StateTopic:
        """Joins the other processes; waits until that works. `on_change` gets the state topic's records."""
        cluster_id = self.kafka.cluster_id
        self.header_names.cluster_id = None if cluster_id is None else cluster_id.encode()
        state = await self.membership.join(on_change)
        self.expansions = Expansions(
            state,
            self._config.limits,
            metadata=self.kafka.metadata,
            topics=Topics(self.kafka),
            producers=Producers(self.kafka),
            log_ends=LogEnds(self.kafka),
            barriers=barriers,
            metrics=self._metrics,
            spawn=self._spawn,
        )
        return state

    def watch_transactions(
        self, limits: Callable[[], Limits], on_leaders: Callable[[Leaders], Awaitable[None]]
    ) -> None:
        pace = Pace(limits().watched_partitions_per_second)
        watch = TransactionWatch(self.kafka, pace, self._spawn, on_leaders=on_leaders)
        self._metrics.transactions = lambda: watch.report(limits().watched_shown_max)
        self._spawn(watch.run(), "watch transactions")
