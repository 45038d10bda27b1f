"""The proxy process: runs the dispatcher on sockets, a clock and the control client.

`serve` is the entry. It binds the bootstrap port (and fails at once if it cannot), waits for Kafka, reads the state
topic to its end, and only then accepts connections. Earlier clients wait in the kernel's accept queue.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

from fencepost_proxy import logs
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.cluster.broker import Access, UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.configs import Configs
from fencepost_proxy.cluster.fetches import Fetches
from fencepost_proxy.cluster.groups import ConsumerGroups
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.producers import Producers
from fencepost_proxy.cluster.state_topic import StateTopic
from fencepost_proxy.cluster.topics import Topics
from fencepost_proxy.cluster.transactions import Transactions
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import ConfigError, FencepostError, Reason, error_name
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.expansion.counts import Client, Counts
from fencepost_proxy.expansion.history import ExpansionHistory
from fencepost_proxy.metrics import AddressNumbers, Metrics, Moment, PartitionNumbers, fencepost_version, observed
from fencepost_proxy.observability import diagnosis, readiness
from fencepost_proxy.observability.lists import Found, Lists, Refusals, Sources
from fencepost_proxy.observability.status import (
    ABORT_ONLY_SHOWN,
    AbortOnlyStatus,
    BrokerStatus,
    ExpansionStatus,
    Listed,
    PageRequest,
    StatusSnapshot,
)
from fencepost_proxy.observability.status_server import StatusServer
from fencepost_proxy.observability.watchdog import Watchdog
from fencepost_proxy.sequencer.events import SequencerLimits
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.services.durability import DurabilityWarnings
from fencepost_proxy.services.expansions import Expansions
from fencepost_proxy.services.groups import GroupProgressTracker
from fencepost_proxy.services.log_reader import FACTS_SECONDS, LogReader
from fencepost_proxy.services.replaced_topics import ReplacedTopics
from fencepost_proxy.services.session_requests import SessionRequests
from fencepost_proxy.services.sidecar import SidecarProbe
from fencepost_proxy.services.topic_configs import TopicConfigs
from fencepost_proxy.services.topic_lookups import TopicLookups
from fencepost_proxy.services.transactions import Commits
from fencepost_proxy.services.violations import Violations
from fencepost_proxy.services.watching import TransactionWatch
from fencepost_proxy.session import messages as sessions
from fencepost_proxy.session.dispatcher import Action, Dispatcher, ForConnection, ForControl
from fencepost_proxy.session.draining import READ_SECONDS
from fencepost_proxy.session.levels import MESSAGE_FORMAT, NOT_PERMITTED
from fencepost_proxy.session.reading import HERE_BYTES_MAX
from fencepost_proxy.session.rewriters import RequestRewriters
from fencepost_proxy.session.services import RelayedVersions, and_addresses, but_for
from fencepost_proxy.session.session import Session
from fencepost_proxy.topics.abort_only import is_abort_only
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.topics.virtual_configs import TopicPolicy, is_safe
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.transactions.watching import Pace
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.listeners import Acceptor, bind
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.transport.proxied_socket import Buffers, Socket
from fencepost_proxy.transport.stalled import StalledConnections
from fencepost_proxy.transport.tls import TlsSocket, of_client, secure
from fencepost_proxy.transport.upstreams import Upstreams
from fencepost_proxy.types import Address, Monotonic, NodeId, TopicPartition, Transactor
from fencepost_proxy.wire.apis import END_TXN, PRODUCE, api_name
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import NodeEndpoint
from fencepost_proxy.wire.state_records import StateRecord

if TYPE_CHECKING:
    from fencepost_proxy.workers.worker import MigratedSockets, Worker

_T = TypeVar("_T")
_log = logs.get("server")
_limited_log = logs.RateLimitedLog(_log)

#: How often partition sequencers and sessions check their time limits.
_TICK_SECONDS = 0.02
#: Minimum pause between two quota renewals (`session/connection.py`): about the work that one quota allows.
_QUOTA_SECONDS = 0.003
_HOUSEKEEPING_SECONDS = 1.0
#: How often certificate files are checked for changes.
_CERTIFICATES_SECONDS = 5.0
_START_AGAIN_SECONDS = 2.0
_DRAIN_POLL_SECONDS = 0.02
#: How long a client may take to notice that its connection was closed. Until then its data is discarded: a reset could
#: cost it a response that it has not read.
_LINGER_SECONDS = 1.0
_WELCOME = "connect "
#: Maximum topics for which the log explains why their batches lose their producer ids.
_REPORTED_MAX = 10_000
_WHY_DOWNGRADED = {
    MESSAGE_FORMAT: "its message format is older than 0.11 and has no producer ids",
    NOT_PERMITTED: "Kafka does not permit idempotent writes to one of its clients",
}


async def serve(
    config: ProxyConfig,
    *,
    on_ready: Callable[[Address], None] = lambda address: None,
    stop: asyncio.Event | None = None,
    force: asyncio.Event | None = None,
    worker: Worker | None = None,
    on_reload: Callable[[Callable[[ProxyConfig], None]], None] = lambda reload: None,
) -> None:
    """Runs until cancelled, or until `stop` is set: then it drains, within `limits.drain_seconds`.

    `force` – when set, the drain ends without waiting for requests in progress.
    `on_ready` gets the bootstrap address once clients can connect. `worker` – the role of this process among several.
    `on_reload` gets, at the start, the function that applies a new configuration and reloads certificates.
    Raises ConfigError if a port cannot be bound. Problems with Kafka do not raise: it retries until they are fixed.
    """
    async with AsyncExitStack() as stack:
        proxy = Proxy(config, worker)
        stack.push_async_callback(proxy.close)
        on_reload(proxy.reload)
        stop = stop or asyncio.Event()
        if worker is not None:
            stack.callback(worker.close)
            worker.attach(proxy)
        on_ready(await proxy.start())
        await stop.wait()
        await proxy.drain(force or asyncio.Event())


class Proxy:
    """Provides the services that sessions use, and drives the proxied connections."""

    def __init__(self, config: ProxyConfig, worker: Worker | None = None) -> None:
        limits = config.limits
        self._worker = worker
        self.config = config
        self.header_names = HeaderNames(*(name.encode() for name in _names(config)))
        self.frame_bytes_max = limits.frame_bytes_max
        self.in_flight_requests_max = limits.in_flight_requests_max
        self.sequencer_wait_max_seconds = limits.sequencer_wait_max_seconds
        self.request_timeout_seconds = limits.request_timeout_seconds
        self.decompressed_bytes_max = limits.decompressed_bytes_max
        self.read_here_bytes_max = HERE_BYTES_MAX
        self.state_topic = config.state_topic
        self.refuse_whole_requests = config.refusal_scope == "request"
        # A Kafka listener requires a login from every client or from none. Clients reach the same listener as the
        # proxy's connections: if the proxy needs a login there, so do clients.
        self.clients_log_in = config.control_sasl is not None
        self.transactions = Table(queued_seconds=limits.queued_seconds)
        self._metrics = Metrics(lambda: self._state.fresh_until if self._state else Monotonic(float("-inf")))
        self._certificates = Certificates(config.listen_tls, config.upstream_tls)
        self._metrics.certificates_end(self._certificates.not_after())
        self._watchdog = Watchdog(self._metrics.loop_late_seconds.observe)
        access = Access(
            lambda: self._certificates.upstream,
            config.control_sasl,
            on_failure=self._metrics.upstream_tls_failures.inc,
            on_login=self._metrics.logged_in,
            on_error=self._metrics.upstream_errors["proxy"].inc,
        )
        self._is_sidecar = config.mode == "sidecar"
        self._sidecar: SidecarProbe | None = None
        self._access = access
        self._control = KafkaClient(config.upstream, limits, on_brokers=self._brokers_changed, access=access)
        self._state: StateTopic | None = None
        self._reads: LogReader | None = None
        self._book = AddressBook(config.listen.port, advertised_host=config.advertised_host, ports=config.broker_ports)
        log_ends, fetches = LogEnds(self._control), Fetches(self._control)
        self._groups = GroupProgressTracker(
            limits,
            groups=ConsumerGroups(self._control),
            log_ends=log_ends,
            fetches=fetches,
            configured=config.given_configs,
            policy=self.policy,
            topic_id=self.topic_id,
            metrics=self._metrics,
        )
        self.idempotence = IdempotenceMemory(limits.remembered_producers_max)
        configured = config.given_configs
        self._safe_by_file = any(is_safe(configs) for configs in configured)
        self._safe = self._safe_by_file
        self._logged_downgraded: set[tuple[str, str]] = set()
        self._commits = Commits(
            limits,
            metadata=self._control.metadata,
            transactions=Transactions(self._control),
            producers=Producers(self._control),
            log_ends=log_ends,
            fetches=fetches,
            table=self.transactions,
            configured=config.given_configs,
            policy=self.policy,
            names=self.header_names,
            metrics=self._metrics,
        )
        self._connections = ClientConnections(
            lambda: self.config.limits, self._metrics, (lambda count: None) if worker is None else worker.has
        )
        self.proxied_connections = self._connections.by_number
        self._durability = DurabilityWarnings(self._control, self.policy, self._spawn)
        self._topic_configs = TopicConfigs(
            self._control,
            lambda: self._state,
            self.topic_id,
            self._topic_replaced,
            self._durability,
            lease_seconds=config.config_lease_seconds,
        )
        self._requests = SessionRequests(
            groups=self._groups,
            commits=self._commits,
            expansions=lambda: self._expansions,
            store=self._topic_configs.store,
            host=self._connections.host,
            report=self.session_event,
            queried=self._update_relayed_versions,
            spawn=self._spawn,
        )
        self.relayed_versions: RelayedVersions = but_for(self._groups.relayed_versions, END_TXN)
        rewriters = RequestRewriters(
            self._book,
            self._known,
            lambda: self.shared_producer_ids,
            self._open_listeners,
            self._groups.assignment_filter,
            own_addresses=not self._is_sidecar,
            some_are_safe=lambda: self._safe,
            in_loop=self._requests.in_loop,
        )
        sequencer_limits = SequencerLimits(
            queue_max=limits.sequencer_queue_max,
            read_retry_seconds=limits.resolve_retry_seconds,
            queued_seconds=limits.queued_seconds,
            decompressed_bytes_max=limits.decompressed_bytes_max,
            fencing=not config.unsafe_disable_fencing,
        )
        self._primary = worker is None or worker.primary
        self.dispatcher = Dispatcher(self, rewriters, sequencer_limits, self.header_names, primary=self._primary)
        self._stalled = StalledConnections(lambda: self.config.limits, self.dispatcher, self._metrics)
        self._numbers = itertools.count(1)
        self._buffers = Buffers()
        self._marked_topic_id: UUID | None = None
        self._state_topic_marks: tuple[bytes, ...] = (config.state_topic.encode(),)
        self._free_bytes = limits.buffered_bytes_max
        #: For the event being handled: how long each request and response had waited in the proxy before it.
        self._forwarded: list[float] = []
        self._answered: list[float] = []
        self._policies: dict[str, TopicPolicy | None] = {}
        self._upstreams = Upstreams(lambda: self.config, self._book, self._certificates, self._buffers, self._metrics)
        self._listening: dict[NodeId | None, socket.socket] = {}
        self._acceptors: dict[NodeId | None, Acceptor] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._renewing = False
        self._waits_because: Reason | None = None  # during start-up
        self._to_end = False  # no longer ready
        self._draining = False
        self._closed = False
        self._expansions: Expansions | None = None
        self._count_checked: set[str] = set()  # by what admins set, not by the file
        self._unanswered_until = float("-inf")
        self._counts = Counts(
            self._reported_count,
            self._history,
            lambda: round(time.time() * 1000),
            resolve_seconds=limits.partition_grace_seconds,
            served_max=limits.served_counts_max,
        )
        self._accepting = False
        self._started_at = time.monotonic()
        self._bootstrap: Address | None = None
        self._violations = Violations(lambda: self._reads, self._metrics, self._spawn)
        self._refusals = Refusals()
        self._lookups = TopicLookups(
            self._control,
            self._counts,
            spawn=self._spawn,
            replaced=self._topic_replaced,
            verified=self._verified,
            refreshed=self._refreshed,
            timeout_seconds=lambda: self.config.limits.connect_timeout_seconds,
        )
        self._replaced = ReplacedTopics(self.topic_id, self._metrics, primary=self._primary)
        self._takeover_until = float("-inf")
        self.traffic = self._metrics.traffic
        self._lists = Lists(
            Sources(
                proxied_connections=self.proxied_connections,
                sequencers=self.dispatcher.sequencers,
                refusals=self._refusals,
                topics=self._checked_topics,
                policy=self.policy,
                info=self._control.topic,
                expansions=self._expansion_status,
                gated=self._groups.waiting,
            )
        )
        self._status = StatusServer(
            self._snapshot,
            lambda: self._metrics,
            self._listed,
            release=self._groups.release,
            token_file=config.status_token_file,
        )
        self._metrics.probe = self._probe

    # ---- life

    async def start(self) -> Address:
        config = self.config
        sock = self._listening[None] = self._bind(None, config.listen, "clients")
        host, port = sock.getsockname()[:2]
        self._watchdog.start()
        await self._start_status()
        _log.info(
            "starting", upstream=", ".join(map(str, config.upstream)), listen=Address(host, port), pid=os.getpid()
        )
        if self._is_sidecar:
            self._sidecar = SidecarProbe(
                config,
                lambda: Address(host, port),
                lambda: (self._control.cluster_id, self._control.brokers),
                self._access,
            )
        if config.unsafe_disable_fencing:
            _log.error("unsafe_disable_fencing is set: an append may be accepted at an offset that it did not expect")
        self._warn_of_what_is_set()
        # Before connecting to Kafka: faulty certificate files may be why Kafka is unreachable.
        self._spawn(self._watch_certificates(), "certificates")
        await self._control.start()
        if self._sidecar is not None:
            self._spawn(self._sidecar.run(), "what the broker advertises")
        await self._join_the_others()
        assert self._state is not None
        assert self._reads is not None
        assert self._expansions is not None
        await self._until_kafka_can(self._read_broker_settings, readiness.NO_BROKER_SETTINGS)
        self._brokers_changed(self._control.brokers)
        await self._maintain_topics()
        self._commits.refresh()
        self._update_relayed_versions()
        self._expansions.start()
        self._accepting = True
        self._connections.report()
        for node_id in list(self._listening):
            self._accept_on(node_id)
        self._spawn(self._housekeeping(), "housekeeping")
        self._spawn(self._watch_broker_settings(), "broker settings")
        self._spawn(self._groups.run(), "groups")
        self._spawn(self._commits.run(), "old transactions")
        self._watch_transactions()
        address = self._bootstrap = Address(config.advertised_host or host, port)
        _log.info("serving", bootstrap=address, brokers=len(self._book.nodes))
        return address

    async def _join_the_others(self) -> None:
        """Reads the state topic and registers with the other processes; retries until that works.

        Kafka may be starting, ACLs may be missing, or the topic may be misconfigured; /readyz shows the reason.
        Each try starts from scratch, since nothing read from a misconfigured topic may be kept.
        """
        config = self.config

        async def join() -> bool:
            state = self._state = StateTopic(
                self._control,
                name=config.state_topic,
                lease_seconds=config.config_lease_seconds,
                limits=config.limits,
                on_change=self._state_changed,
            )
            self._expansions = Expansions(
                state,
                config.limits,
                metadata=self._control.metadata,
                topics=Topics(self._control),
                producers=Producers(self._control),
                log_ends=LogEnds(self._control),
                barriers=self,
                metrics=self._metrics,
                spawn=self._spawn,
                primary=self._primary,
            )
            self._reads = LogReader(
                self._control,
                state,
                config.limits.frame_bytes_max,
                names=self.header_names,
                unpacked_bytes_max=config.limits.decompressed_bytes_max,
            )
            self._groups.attach(state)
            self._commits.attach(state)
            try:
                await state.start()
                await state.acquire_producer_id()
                return await state.heartbeats.enter()
            except FencepostError:
                await state.close()
                raise

        if await self._until_kafka_can(join, readiness.unusable(config.state_topic)):
            _log.info("other proxy processes serve this cluster, or stopped recently without deregistering")
            self._takeover_until = time.monotonic() + config.limits.takeover_seconds

    async def _until_kafka_can(self, attempt: Callable[[], Awaitable[_T]], step: Reason) -> _T:
        while True:
            try:
                result = await attempt()
            except FencepostError as error:
                self._waits_because = readiness.starting(step, error)
                _limited_log.error("start", "waiting", what=step, reason=error)
                await asyncio.sleep(_START_AGAIN_SECONDS)
            else:
                self._waits_because = None
                return result

    def _warn_of_what_is_set(self) -> None:
        config = self.config
        if config.broker is not None and not self._is_sidecar:
            _log.warning('broker is set and not used: mode is "gateway", not "sidecar"')
        mechanism = None if config.control_sasl is None else config.control_sasl.mechanism
        if mechanism in ("PLAIN", "OAUTHBEARER") and config.upstream_tls is None:
            _log.warning(
                "the proxy sends its password or token to Kafka in plaintext: upstream_tls is not set",
                mechanism=mechanism,
            )
        if (config.listen_tls is None) is not (config.upstream_tls is None):
            plaintext_part = "from clients to the proxy" if config.listen_tls is None else "from the proxy to Kafka"
            _log.warning(
                f"TLS is enabled on one side only: traffic, including SASL passwords, is plaintext {plaintext_part}"
            )
        tls = config.upstream_tls
        if tls is not None and tls.certificate_file is not None and config.control_sasl is None:
            _log.warning(
                "if Kafka maps the certificate of upstream_tls to a principal, every client without a SASL login has "
                "the proxy's permissions"
            )

    def _watch_transactions(self) -> None:
        """If a status page can show the result; with several workers, in the primary worker only."""
        config = self.config
        shown = config.status is not None if self._worker is None else self._worker.primary
        if config.watch_transactions and shown:
            pace = Pace(config.limits.watched_partitions_per_second)
            watch = TransactionWatch(self._control, pace, self._spawn)
            self._metrics.transactions = lambda: watch.report(self.config.limits.watched_shown_max)
            self._spawn(watch.run(), "watch transactions")

    async def _start_status(self) -> None:
        """Runs first, so that the status page shows a proxy that waits for Kafka."""
        address = self.config.status
        if address is None:
            return
        try:
            await self._status.start(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address} for the status page: {error.strerror or error}") from error

    async def drain(self, force: asyncio.Event) -> None:
        """Reports not ready, stops accepting connections and starting requests, finishes the requests in progress, and
        closes each connection when it is idle. After `limits.drain_seconds`, appends still queued here get a retriable
        error, and in-doubt appends get an error that says that their outcome is unknown.
        """
        limits = self.config.limits
        self._to_end = True
        if limits.drain_notice_seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.drain_notice_seconds):
                    await force.wait()
        self._draining = True
        self._listen_no_more()
        connections, until = len(self.proxied_connections), time.monotonic() + limits.drain_seconds
        left = await self._end_connections(until, force)
        if left:
            unanswered = {api_name(key): count for key, count in sorted(left.items())}
            _log.warning("requests not answered within limits.drain_seconds", unanswered=unanswered)
        _log.info("drained", connections=connections, unanswered=sum(left.values()))
        now = time.monotonic()
        in_doubt_now = self.dispatcher.in_doubt or not all(
            barrier.empty(now) for barrier in self.dispatcher.barriers.values()
        )
        if self._state is not None and not left[PRODUCE] and not in_doubt_now:
            await self._state.heartbeats.leave()

    async def _end_connections(self, until: float, force: asyncio.Event) -> Counter[int]:
        """By API, how many requests were not answered in time."""
        left: Counter[int] | None = None
        for task in self._tasks:
            if task.get_name().startswith(_WELCOME):
                task.cancel()
        await asyncio.sleep(0)
        while len(self._connections):
            now = time.monotonic()
            if force.is_set():
                until = min(until, now)
            # Count before sessions give up the requests that they wait for.
            if left is None and now >= until - READ_SECONDS - 5 * _DRAIN_POLL_SECONDS:
                left = Counter(key for session in self.dispatcher.sessions.values() for key in session.unanswered)
            for proxied in list(self.proxied_connections.values()):
                since = proxied.client.closing_since
                if proxied.session is None:
                    proxied.client.abort()  # nothing was read from it
                elif since is None:
                    self.session_event(proxied.connection, sessions.Drain(until))
                elif now >= since + _LINGER_SECONDS and (now >= until or not proxied.client.unsent):
                    proxied.client.abort()
            if now >= until + _LINGER_SECONDS:
                break
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        return left or Counter()

    def _listen_no_more(self) -> None:
        """New connections are refused at once, so that clients try another proxy."""
        self._accepting = False
        self._stop_accepting()
        for sock in self._listening.values():
            sock.close()

    async def close(self) -> None:
        self._listen_no_more()
        if self._ticker is not None:
            self._ticker.cancel()
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._connections.abort()
        await self._status.close()
        if self._state is not None:
            await self._state.close()
        await self._control.close()
        self._watchdog.stop()
        logs.report_suppressed(at_once=True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A task that ends with the process, and whose failure is logged."""
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.crash("a task crashed", error, task=task.get_name())

    # ---- services for sessions

    def _update_relayed_versions(self) -> None:
        """Which versions are relayed unread depends on the state topic and on the groups."""
        relayed_versions = (
            and_addresses(self._groups.relayed_versions) if self._is_sidecar else self._groups.relayed_versions
        )
        self.relayed_versions = but_for(relayed_versions, END_TXN) if self._commits.validating else relayed_versions

    @property
    def state_topic_marks(self) -> tuple[bytes, ...]:
        topic_id = self.topic_id(self.state_topic)
        if topic_id is not self._marked_topic_id:
            self._marked_topic_id = topic_id
            self._state_topic_marks = (self.state_topic.encode(), *([] if topic_id is None else [topic_id.bytes]))
        return self._state_topic_marks

    @property
    def shared_producer_ids(self) -> frozenset[int]:
        return frozenset() if self._state is None else self._state.view.shared_producer_ids

    @property
    def instance_id(self) -> int:
        return 0 if self._state is None else self._state.heartbeats.instance_id

    def alone(self, now: float) -> bool:
        # With several workers never alone, even before the first heartbeat of another.
        return self._worker is None and self._state is not None and self._state.heartbeats.alone(now)

    def taken_over(self, now: float) -> bool:
        return now >= self._takeover_until

    def unix_ms(self, now: float) -> int:
        return round(time.time() * 1000)

    def fresh(self, now: float) -> bool:
        return self._state is not None and now < self._state.fresh_until

    def policy(self, topic: str) -> TopicPolicy | None:
        try:
            return self._policies[topic]
        except KeyError:
            pass
        assert self._state is not None
        policy = self._state.view.topic_policy(topic, self.topic_id(topic), self.config.configs_for)
        if len(self._policies) > 100_000:  # names come from clients, authorized or not: limit the memory
            self._policies.clear()
        found = self._policies[topic] = policy if policy.read else None
        return found

    @property
    def sequencers(self) -> Dispatcher:
        return self.dispatcher

    def topic_id(self, topic: str) -> UUID | None:
        return self._lookups.topic_id(topic)

    def partition_exists(self, partition: TopicPartition, queried_since: float) -> bool | None:
        return self._lookups.partition_exists(partition, queried_since)

    def leader_epoch(self, partition: TopicPartition) -> int:
        leader = self._control.leader(partition)
        return -1 if leader is None else leader.leader_epoch

    def produce_version_max(self) -> int:
        return self._control.pool.version_max(PRODUCE)

    # ---- services for topics with partition-count checks

    def barrier(self, topic: str) -> AppendBarrier:
        return self.dispatcher.barrier(topic)

    def new_barrier(self, topic: str) -> AppendBarrier:
        """Closed if an expansion is pending. It counts as empty only once appends of an earlier process have ended."""
        barrier = AppendBarrier(
            topic, in_doubt_seconds=self.config.limits.takeover_seconds, clear_at=self._takeover_until
        )
        if self._state is not None and self._state.view.history(topic, self.topic_id(topic)).pending is not None:
            barrier.close(time.monotonic())
        return barrier

    def partition_count(self, topic: str, now: float) -> int | None:
        return self._counts.count(topic, now)

    def count_confirmed_since(self, topic: str, at: float) -> bool:
        return self._counts.confirmed_since(topic, at)

    def in_grace_period(self, topic: str, now: float) -> bool:
        return self._counts.in_grace_period(topic, now)

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
        self._unanswered_until = now + self.config.limits.takeover_seconds

    def barrier_waited(self, seconds: float) -> None:
        self._metrics.barrier_wait_seconds.observe(seconds)

    def _client(self, connection: int, client_id: str | None) -> Client | None:
        proxied = self.proxied_connections.get(connection)
        return None if proxied is None else Client(proxied.peer.host, client_id)

    def _reported_count(self, topic: str) -> tuple[UUID, int] | None:
        info = self._control.topic(topic)
        return None if info is None else (info.topic_id, info.partition_count)

    def _history(self, topic: str, topic_id: UUID) -> ExpansionHistory:
        assert self._state is not None
        return self._state.view.history(topic, topic_id)

    def _record_count_checked(self, topic: str, now: float) -> None:
        """The topic's configs have changed. Appends sent before its checks were enabled never entered a barrier."""
        policy = self.policy(topic)
        if policy is None or not policy.checks_count:
            self._count_checked.discard(topic)
        elif topic not in self._count_checked:
            self._count_checked.add(topic)
            barrier = self.dispatcher.barrier(topic)
            self.dispatcher.now_count_checked(topic, now)
            if self._accepting and not (self.dispatcher.quiet and now >= self._unanswered_until):
                seconds = self.config.config_lease_seconds + self.config.limits.request_timeout_seconds
                barrier.not_empty_before(now + seconds)

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        if self._is_sidecar:
            return endpoint
        node_id = NodeId(endpoint.node_id)
        if self._book.learn(node_id, Address(endpoint.host, endpoint.port)):
            self._open_listeners([node_id])
        host, port = self._book.advertised(node_id, local_host)
        return NodeEndpoint(node_id, host, port, endpoint.rack)

    def reserve(self, byte_count: int) -> bool:
        if byte_count > self._free_bytes:
            return False
        self._free_bytes -= byte_count
        return True

    def release(self, byte_count: int) -> None:
        self._free_bytes += byte_count

    def _known(self) -> Known:
        assert self._state is not None
        state_topic = self._control.topic(self.config.state_topic)
        return Known(
            view=self._state.view,
            file_configs=self.config.configs_for,
            topic_id=self.topic_id,
            state_topic=self.config.state_topic,
            state_topic_id=None if state_topic is None else state_topic.topic_id,
            fresh=self.fresh(time.monotonic()),
            shared_producer_ids=self.shared_producer_ids,
        )

    def release_group(self, group: str, topic: str) -> None:
        """Requested by an operator on the status page."""
        self._spawn(self._release_group(group, topic), f"release for {group}")

    async def _release_group(self, group: str, topic: str) -> None:
        outcome = await self._groups.release(group, topic)
        _log.info("release of new partitions requested by an operator", group=group, topic=topic, outcome=outcome)

    # ---- virtual configs

    def _state_changed(self, records: Sequence[StateRecord]) -> None:
        self._commits.apply_records(records)
        if all(is_abort_only(record) for record in records):
            return  # hundreds in a second, where transactions race
        assert self._state is not None
        self._lookups.verify(filter(None, map(_topic_of, records)), self._state.view.topic_configs)
        self._replaced.state_changed(self._state.view)
        self._policies.clear()
        self._groups.refresh()
        self._record_safe()
        self._commits.refresh()
        self._update_relayed_versions()
        if self._expansions is not None:
            self._expansions.view_changed()
        now = time.monotonic()
        for topic in {_topic_of(record) for record in records}:
            if topic is not None:
                self._record_count_checked(topic, now)
                self._perform(self.dispatcher.forget_topic(topic, now), now)

    def _record_safe(self) -> None:
        """Whether a topic has fencepost.idempotence.level=safe: it accepts clients that may not write idempotently."""
        assert self._state is not None
        set_on_topics = self._state.view.topic_configs.values()
        self._safe = self._safe_by_file or any(is_safe(each.configs) for each in set_on_topics)

    def _downgraded(self, topic: str, why: str, batches: int) -> None:
        """Counts every time, logs once."""
        self._metrics.downgrades.inc(why, batches)
        if (topic, why) not in self._logged_downgraded and len(self._logged_downgraded) < _REPORTED_MAX:
            self._logged_downgraded.add((topic, why))
            _log.warning("idempotence dropped for a topic with level `safe`", topic=topic, why=_WHY_DOWNGRADED[why])

    def close_barrier(self, topic: str, but_for: frozenset[Transactor]) -> None:
        now = time.monotonic()
        self._perform(self.dispatcher.close_barrier(topic, now, but_for), now)

    def open_barrier(self, topic: str, partition_count: int | None) -> None:
        now = time.monotonic()
        barrier = self.dispatcher.barrier(topic)
        actions = self.dispatcher.open_barrier(topic, partition_count or barrier.count or 0, now)
        if not barrier.count:
            barrier.forget_count()
        self._perform(actions, now)

    def barrier_empty(self, topic: str) -> bool:
        return self.dispatcher.barrier_empty(topic, time.monotonic())

    # ---- proxied connections

    def _accept_on(self, node_id: NodeId | None) -> None:
        def accepted(sock: socket.socket, peer: Address) -> None:
            self._accepted(sock, peer, node_id)

        others_first = None if self._worker is None else self._worker.others_first
        self._acceptors[node_id] = Acceptor(self._listening[node_id], accepted, others_first)

    def _stop_accepting(self) -> None:
        for acceptor in self._acceptors.values():
            acceptor.close()
        self._acceptors.clear()

    def _accepted(self, sock: socket.socket, peer: Address, node_id: NodeId | None) -> None:
        if self._draining:
            self._connections.refused(peer)
            sock.close()
            return
        if not self._connections.admits(peer):
            sock.close()
            return
        local_host = sock.getsockname()[0]
        context = self._certificates.listener
        near: Socket = sock if context is None else TlsSocket(sock, context, self._buffers.tls)
        proxied = ProxiedConnection(
            next(self._numbers), near, self, self._buffers, peer=peer, local_host=local_host, node_id=node_id
        )
        self._metrics.connections_accepted.inc()
        self._connections.add(proxied)
        self._spawn(self._welcome(proxied, near, node_id), f"{_WELCOME}{proxied.connection}")

    async def _welcome(self, proxied: ProxiedConnection, near: Socket, node_id: NodeId | None) -> None:
        """A client whose TLS handshake fails costs Kafka no connection."""
        if not isinstance(near, TlsSocket) or await self._secured(proxied, near):
            await self._connect(proxied, node_id)

    async def _secured(self, proxied: ProxiedConnection, near: TlsSocket) -> bool:
        seconds = self.config.limits.handshake_seconds
        try:
            async with asyncio.timeout(seconds):
                await secure(near)
        except TimeoutError:
            kind, why = "timeout", f"no TLS handshake within {seconds:g} s (limits.handshake_seconds)"
        except OSError as error:
            kind, why = of_client(error)
        else:
            self._metrics.tls_handshakes.inc("ok")
            proxied.opened_at = time.monotonic()
            return True
        self._metrics.tls_handshakes.inc(kind)
        self._metrics.connections_closed.inc("tls")
        _limited_log.warning(f"tls {kind}", "connection closed", peer=proxied.peer, reason=why)
        proxied.close_reason = why
        proxied.client.abort()
        return False

    async def _connect(self, proxied: ProxiedConnection, node_id: NodeId | None) -> None:
        try:
            far = await self._upstreams.connect(node_id)
        except UpstreamUnavailable as error:
            _limited_log.warning("upstream", "no upstream connection for a client", peer=proxied.peer, reason=error)
            proxied.close_reason = "no upstream connection"
            proxied.client.close(time.monotonic())
        else:
            proxied.connected(far)

    def proxied_opened(self, proxied: ProxiedConnection) -> Session:
        return self.dispatcher.open(proxied.connection, proxied.local_host, time.monotonic())

    def proxied_closed(self, proxied: ProxiedConnection) -> None:
        self._connections.remove(proxied)

    def keep_time(self, session: Session) -> None:
        """The session waits for something with a time limit."""
        self.dispatcher.keep_time(session)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def session_event(self, connection: int, event: sessions.Event) -> None:
        now = time.monotonic()
        self._perform(self.dispatcher.session_event(connection, event, now), now)

    def _perform(self, actions: list[Action], began: float) -> None:
        """`began` – when the event arrived that caused these actions."""
        for action in actions:
            if isinstance(action, ForConnection):
                self._for_connection(action.connection, action.command)
            elif isinstance(action, ForControl):
                self._spawn(self._read(action), f"read {action.partition}")
            else:
                self._violations.report(action.violation)
        if self._forwarded or self._answered:
            took = time.monotonic() - began
            for waited in self._forwarded:
                self.traffic.request_seconds.observe(waited + took)
            for waited in self._answered:
                self.traffic.response_seconds.observe(waited + took)
            self._forwarded.clear()
            self._answered.clear()
        if self._ticker is None and self.dispatcher.needs_ticks:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)
        if not self._renewing and self.dispatcher.over_quota:
            self._renew_later(0.0)

    def _for_connection(self, connection: int, command: sessions.Command) -> None:
        proxied = self.proxied_connections.get(connection)
        match command:
            case sessions.ToClient(chunks):
                self.traffic.bytes_to_clients += sum(map(len, chunks))
            case sessions.ToUpstream(chunks):
                self.traffic.bytes_to_kafka += sum(map(len, chunks))
            case sessions.Count(what, label):
                if what == "refusal":
                    self._metrics.refusals.inc(label)
                    self._refusals.record(command, proxied)
                return
            case sessions.Downgraded(topic, why, batches):
                self._downgraded(topic, why, batches)
                return
            case sessions.Migrate(migrated):
                if proxied is not None:
                    self._migrate(proxied, migrated)
                return
            case sessions.Noticed(notice):
                self._groups.notice(notice, "" if proxied is None else proxied.peer.host)
                return
            case sessions.TopicStale(topic):
                self._lookups.refresh(topic)
                return
            case sessions.LoginFailed(mechanism, principal, reason) if proxied is not None:
                self._metrics.client_logins_failed.inc()
                _limited_log.warning(
                    ("login", proxied.peer.host),
                    "login failed",
                    peer=proxied.peer,
                    mechanism=mechanism,
                    principal=principal or "unknown",
                    reason=reason,
                )
                return
            case sessions.CloseClient() if proxied is not None:
                self._closing(proxied, command)
            case _ if self._requests.start(connection, command):
                return
        if proxied is not None:
            proxied.perform(command)

    def _closing(self, proxied: ProxiedConnection, command: sessions.CloseClient) -> None:
        if command.fault is None:
            self._metrics.connections_closed.inc("stale_partition_count" if command.hang_up else "upstream_closed")
            return
        self._metrics.connections_closed.inc(command.fault.__name__)
        _limited_log.warning(_kind(command), "connection closed", peer=proxied.peer, reason=command.reason)

    def _renew_later(self, took: float) -> None:
        """Leaves the event loop to others for at least as long as the last renewal `took`."""
        self._renewing = True
        asyncio.get_running_loop().call_later(max(took, _QUOTA_SECONDS), self._renew_quota)

    def _renew_quota(self) -> None:
        began = time.monotonic()
        self._perform(self.dispatcher.renew_quota(began), began)
        self._renewing = False
        if self.dispatcher.over_quota:
            self._renew_later(time.monotonic() - began)

    def _tick(self) -> None:
        self._ticker = None
        now = time.monotonic()
        self._perform(self.dispatcher.tick(now), now)

    async def _read(self, requested: ForControl) -> None:
        assert self._reads is not None
        event = await self._reads.carry_out(requested)
        now = time.monotonic()
        self._perform(self.dispatcher.sequencer_event(requested.partition, event, now), now)

    # ---- brokers and their listeners

    def _brokers_changed(self, brokers: Mapping[NodeId, Address]) -> None:
        self._open_listeners([node_id for node_id, address in brokers.items() if self._book.learn(node_id, address)])

    def _open_listeners(self, node_ids: Sequence[NodeId]) -> None:
        """Listens before it returns, so that clients that learn the port can connect."""
        if self._is_sidecar:
            return
        for node_id in node_ids:
            if node_id in self._listening:
                continue  # the broker has moved; its listener gets the address from the book
            try:
                port = self._book.listener_port(node_id)
                sock = self._bind(node_id, Address(self.config.listen.host, port), f"broker {node_id}")
            except ConfigError as error:
                _log.error("no listener for a broker", broker=node_id, reason=error)
                continue
            self._listening[node_id] = sock
            self._book.listens_on(node_id, sock.getsockname()[1])
            _log.info("listening for broker", broker=node_id, port=sock.getsockname()[1])
            if self._accepting:
                self._accept_on(node_id)

    def _bind(self, node_id: NodeId | None, address: Address, what: str) -> socket.socket:
        if self._worker is None:
            return bind(address, what)
        from fencepost_proxy.workers.worker import ListenerRequest  # noqa: PLC0415 - a single process need not load it

        return self._worker.listener(ListenerRequest(node_id, address, what))

    # ---- migration between workers

    def _migrate(self, proxied: ProxiedConnection, migrated: sessions.MigratedConnection) -> None:
        """Migrates to the primary worker. If that fails, the connection is closed, never served here."""
        assert self._worker is not None
        if self._draining:
            proxied.client.close(time.monotonic())
            assert proxied.upstream is not None
            proxied.upstream.close(time.monotonic())
            return
        given = proxied.detach()
        if given is None:
            return
        from fencepost_proxy.workers.worker import MigratedSockets  # noqa: PLC0415 - a single process need not load it

        self._metrics.released_total.inc()
        on_its_way = MigratedSockets(migrated, proxied.peer, proxied.node_id, given.to_client, given.to_upstream)
        if not self._worker.migrate(on_its_way, self._movable(given.client), self._movable(given.upstream)):
            _limited_log.warning(
                "migrate", "connection closed", peer=proxied.peer, reason="the primary worker cannot be reached"
            )
            self._metrics.connections_closed.inc("primary_unreachable")

    def _movable(self, sock: Socket) -> socket.socket:
        """TLS cannot move to another process: its socket stays here, and a bridge to it moves instead."""
        if not isinstance(sock, TlsSocket):
            assert isinstance(sock, socket.socket)
            return sock
        from fencepost_proxy.workers.bridge import Bridge  # noqa: PLC0415 - for several workers with TLS only

        bridge = Bridge(sock, self._buffers, self._connections.remove_moved)
        self._connections.add_moved(bridge)
        return bridge.far

    def take_over(self, migrated: MigratedSockets, client: socket.socket, upstream: socket.socket) -> None:
        """Takes over a connection that another worker accepted."""
        if self._draining or self._closed or len(self.proxied_connections) >= self.config.limits.connections_max:
            why = "this process is shutting down" if self._draining else "the primary worker is at connections_max"
            _limited_log.warning("take over", "connection closed", peer=migrated.peer, reason=why)
            client.close()
            upstream.close()
            return
        number, local_host = next(self._numbers), migrated.session.local_host
        proxied = ProxiedConnection(
            number, client, self, self._buffers, peer=migrated.peer, local_host=local_host, node_id=migrated.node_id
        )
        self._connections.add(proxied)
        proxied.take_over(
            upstream,
            self.dispatcher.take_over(number, migrated.session),
            unread=migrated.session.unread,
            to_client=migrated.to_client,
            to_upstream=migrated.to_upstream,
        )

    def report(self) -> tuple[StatusSnapshot, Metrics, float]:
        """For the supervisor, which combines the workers' reports."""
        self._probe()
        metrics = copy.copy(self._metrics)
        metrics.state_fresh_until = None
        metrics.probe = observed
        metrics.transactions = None  # the snapshot has them
        return self._snapshot(), metrics, self._state.fresh_until if self._state else float("-inf")

    # ---- housekeeping

    def reload(self, config: ProxyConfig) -> None:
        """Applies a configuration that differs in `live` keys only, and reloads certificates and keys. Open connections
        keep their certificates."""
        before, self.config = self.config, config
        limits = config.limits
        self.in_flight_requests_max = limits.in_flight_requests_max
        self.sequencer_wait_max_seconds = limits.sequencer_wait_max_seconds
        # Negative if more is buffered than the new limit: reservations fail until enough is released.
        self._free_bytes += limits.buffered_bytes_max - before.limits.buffered_bytes_max
        logs.change(config.log.level, config.log.format)
        if (config.listen_tls, config.upstream_tls) != (before.listen_tls, before.upstream_tls):
            try:
                self._certificates.change(config.listen_tls, config.upstream_tls)
            except ConfigError as error:
                _log.error("certificates could not be reloaded: the old ones stay in use", reason=error)
        self._check_certificates(at_once=True)

    def _check_certificates(self, *, at_once: bool = False) -> None:
        for succeeded in self._certificates.probe(at_once=at_once):
            self._metrics.certificates_loaded(succeeded)
            self._metrics.certificates_end(self._certificates.not_after())

    async def _watch_certificates(self) -> None:
        while True:
            await asyncio.sleep(_CERTIFICATES_SECONDS)
            self._check_certificates()

    async def _housekeeping(self) -> None:
        """Closes stalled clients every second, and checks the checked topics less often."""
        probed_at = time.monotonic()
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            now = time.monotonic()
            self._connections.close_stuck(now)
            self._stalled.close(list(self.proxied_connections.values()), now)
            self._commits.probe(time.monotonic())
            self._update_relayed_versions()
            logs.report_suppressed()
            if self._state is not None and self._state.heartbeats.instance_id_expires:
                self._spawn(self._renew_instance_id(), "renew the instance id")
            if self._expansions is not None:
                self._expansions.maintain(self._count_checked_topics())
            seconds = FACTS_SECONDS
            if self._replaced.unsettled:
                seconds = min(seconds, self.config.config_lease_seconds)
            if time.monotonic() - probed_at >= seconds:
                probed_at = time.monotonic()
                await self._maintain_topics()

    async def _watch_broker_settings(self) -> None:
        """Settings that Kafka's sequence comparison depends on may change while brokers run."""
        while True:
            await asyncio.sleep(FACTS_SECONDS)
            try:
                await self._read_broker_settings()
            except UpstreamUnavailable as error:
                _limited_log.warning("broker settings", "the brokers' settings could not be read again", reason=error)

    async def _read_broker_settings(self) -> None:
        assert self._state is not None
        assert self._reads is not None
        expiration, requested_at = self._reads.expiration, time.monotonic()
        before = expiration.milliseconds
        facts = await Configs(self._control).broker_facts(timeout_seconds=FACTS_SECONDS)
        lowered = expiration.observe(facts, requested_at)
        if self._accepting and expiration.milliseconds != before:
            _log.warning("producer.id.expiration.ms has changed", was=before, milliseconds=expiration.milliseconds)
        if lowered:
            now = time.monotonic()
            for topic in {partition.topic for partition in self.dispatcher.sequencers}:
                self._perform(self.dispatcher.forget_topic(topic, now, same_log=True), now)
        if self._accepting:
            await self._state.settings.read_again()

    def _count_checked_topics(self) -> list[str]:
        """Known topics: enabled by an admin, appended to here, or checked at some earlier time."""
        if self._state is None:
            return []
        topics = sorted({*self._count_checked, *self.dispatcher.barriers, *self._state.view.count_checked_topics})
        return [topic for topic in topics if (policy := self.policy(topic)) is not None and policy.checks_count]

    async def _renew_instance_id(self) -> None:
        assert self._state is not None
        try:
            await self._state.heartbeats.enter()
        except FencepostError as error:
            _limited_log.warning("instance id", "instance id could not be renewed", reason=error)

    async def _maintain_topics(self) -> None:
        """Refreshes checked topics' ids (a name may refer to a new topic) and the configs that sequencers depend on."""
        assert self._state is not None
        assert self._reads is not None
        configured = self._state.view.topic_configs
        sequenced_topics = {partition.topic for partition in self.dispatcher.sequencers}
        barriers = {topic for topic in self.dispatcher.barriers if self.topic_id(topic) is not None}
        topics = sorted({*configured, *sequenced_topics, *barriers, *self._state.view.count_checked_topics})
        if not topics:
            return
        before = {topic: self.topic_id(topic) for topic in topics}
        self._durability.keep(topics)
        try:
            await self._control.refresh_metadata(topics)
            self._durability.check(topic for topic in topics if self.topic_id(topic) is not None)
            for topic in topics:
                if self.topic_id(topic) != before[topic]:
                    self._topic_replaced(topic)
            self._replaced.probe(self._state.view)
            there = sorted(topic for topic in sequenced_topics if self.topic_id(topic) is not None)
            known = {topic for topic in there if self._reads.known_facts(topic) is not None}
            for topic in await self._reads.changed_facts(there):
                if topic in known:
                    _log.info("Kafka's configs of a checked topic have changed", topic=topic)
                    self._durability.changed(topic)
                now = time.monotonic()
                self._perform(self.dispatcher.forget_topic(topic, now, same_log=True), now)
        except UpstreamUnavailable as error:
            _limited_log.warning("topics", "checked topics could not be looked up", reason=error)

    def _warnings(self) -> Iterable[Reason]:
        if self._expansions is not None:
            yield from self._expansions.warnings()
        yield from self._replaced.warnings()

    def _verified(self) -> None:
        self._commits.refresh()
        self._update_relayed_versions()

    def _refreshed(self, now: float) -> None:
        self._perform(self.dispatcher.topic_news(now), now)

    def _topic_replaced(self, topic: str) -> None:
        self._policies.pop(topic, None)
        self._counts.forget(topic)
        self.idempotence.forget_topic(topic)
        if topic in self.dispatcher.barriers:
            self.dispatcher.barriers[topic].forget_count()
        now = time.monotonic()
        self._perform(self.dispatcher.forget_topic(topic, now), now)

    # ---- status and metrics

    def count_request(self, api_key: int, version: int) -> None:
        self.traffic.requests[api_key][version] += 1

    def kafka_refused(self, error_code: int) -> None:
        self._metrics.kafka_errors.inc(error_name(error_code))

    def upstream_lost(self) -> None:
        self._metrics.upstream_errors["clients"].inc("lost")

    def unread_bytes(self, connection: int) -> int:
        proxied = self.proxied_connections.get(connection)
        return 0 if proxied is None else proxied.client.unread_bytes()

    def sequencer_waited(self, seconds: float) -> None:
        self._metrics.sequencer_wait_seconds.observe(seconds)

    def forwarded(self, waited_seconds: float) -> None:
        self._forwarded.append(waited_seconds)

    def answered(self, waited_seconds: float) -> None:
        self._answered.append(waited_seconds)

    def _in_flight(self) -> int:
        return sum(len(session.requests) for session in self.dispatcher.sessions.values())

    def _probe(self) -> None:
        """Updates the metrics that are read at scrape time."""
        limits, moment = self.config.limits, Moment()
        moment.connections_max = limits.connections_max
        moment.address = AddressNumbers((self._connections.most_from or ("", 0))[1], limits.address_connections_max)
        moment.buffered_bytes_max = limits.buffered_bytes_max
        moment.buffered_bytes = limits.buffered_bytes_max - self._free_bytes
        sequencers = dict.fromkeys(Phase, 0)
        for partition, sequencer in self.dispatcher.sequencers.items():
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
        self._metrics.moment = moment
        self._metrics.ready = not self._not_ready(time.monotonic())
        self._metrics.log_lines = logs.lines()
        self.traffic.requests_in_flight = self._in_flight()

    def _snapshot(self) -> StatusSnapshot:
        now = time.monotonic()
        state = self._state
        traffic = self.traffic
        brokers = tuple(self._broker_status())
        return StatusSnapshot(
            version=fencepost_version(),
            uptime_seconds=now - self._started_at,
            cluster_id=self._control.cluster_id,
            bootstrap=self._bootstrap,
            not_ready=tuple(self._not_ready(now)),
            connections=len(self.proxied_connections),
            requests_in_flight=self._in_flight(),
            buffered_bytes=self.config.limits.buffered_bytes_max - self._free_bytes,
            bytes_to_kafka=traffic.bytes_to_kafka,
            bytes_to_clients=traffic.bytes_to_clients,
            violations=self._violations.count,
            added_seconds=self._metrics.added_seconds(),
            state_lease_seconds=None if state is None else state.fresh_until - now,
            refusals=dict(self._metrics.refusals),
            brokers=brokers,
            problems=tuple(
                diagnosis.of_process(
                    self.config.limits,
                    connections=len(self._connections),
                    most_from=self._connections.most_from,
                    buffered_bytes=self.config.limits.buffered_bytes_max - self._free_bytes,
                    brokers=brokers,
                    certificate_ends=self._metrics.certificate_ends,
                    now=time.time(),
                    sidecar=self._sidecar is not None,
                )
            ),
            last_violation=self._violations.last,
            abort_only_transactions=tuple(self._abort_only_status()),
            warnings=tuple(self._warnings()),
            transactions=None if self._metrics.transactions is None else self._metrics.transactions(),
        )

    def _broker_status(self) -> list[BrokerStatus]:
        connections: dict[NodeId, int] = {}
        for proxied in self.proxied_connections.values():
            if proxied.node_id is not None:
                connections[proxied.node_id] = connections.get(proxied.node_id, 0) + 1
        host = self.config.advertised_host or self.config.listen.host
        return [
            BrokerStatus(
                node_id=node_id,
                kafka=kafka,
                listener=self._reported_address(node_id, host),
                connections=connections.get(node_id, 0),
                problem=self._problem_with(node_id),
            )
            for node_id, kafka in sorted(self._book.nodes.items())
        ]

    def _reported_address(self, node_id: NodeId, host: str) -> Address | None:
        """The address of this broker in responses to clients."""
        if self._sidecar is not None:
            return self._sidecar.advertised.get(node_id)
        return self._book.advertised(node_id, host) if node_id in self._listening else None

    def _problem_with(self, node_id: NodeId) -> str | None:
        if (reason := self._upstreams.failure(node_id)) is not None:
            return reason
        if self._control.brokers and node_id not in self._control.brokers:
            return "no longer in the cluster's metadata: the broker is down, or was removed"
        return None

    def _checked_topics(self) -> set[str]:
        """Known topics that may have append checks."""
        if self._state is None:
            return set()
        return {
            *self._state.view.topic_configs,
            *self.dispatcher.barriers,
            *(each.topic for each in self.dispatcher.sequencers),
        }

    def _expansion_status(self) -> tuple[ExpansionStatus, ...]:
        return () if self._expansions is None else self._expansions.status()

    async def _listed(self, requested: Sequence[PageRequest]) -> Sequence[Listed]:
        return [self._lists.listed(each) for each in requested]

    def found(self, requested: Sequence[PageRequest]) -> list[Found]:
        """For the supervisor, which combines the workers' lists."""
        return [self._lists.found(each, with_names=True) for each in requested]

    def _abort_only_status(self) -> list[AbortOnlyStatus]:
        if self._state is None:
            return []
        now_ms = int(time.time() * 1000)
        return [
            AbortOnlyStatus(
                each.transactional_id,
                each.producer_id,
                each.producer_epoch,
                each.reason,
                max(0.0, (now_ms - each.at_ms) / 1000),
            )
            for each in self._state.view.abort_only_records.older_than(now_ms + 1)[:ABORT_ONLY_SHOWN]
        ]

    def _not_ready(self, now: float) -> list[Reason]:
        if self._to_end:
            return [readiness.SHUTTING_DOWN]
        if self._control.cluster_id is None:
            return [readiness.without_kafka(self.config.upstream, self._control.waits_because)]
        if self._bootstrap is None:
            return readiness.before_serving(self._sidecar, self._waits_because, self._state)
        return readiness.while_serving(self._sidecar, self._state, fresh=self.fresh(now))


def _kind(close: sessions.CloseClient) -> object:
    """Rate-limits similar closings together: by the start of the reason, without its numbers."""
    return close.fault, re.sub(r"-?\d+", "", close.reason)[:20]


def _names(config: ProxyConfig) -> tuple[str, str, str]:
    headers = config.headers
    return headers.expected_offset, headers.partition_count, headers.write_id


def _topic_of(record: StateRecord) -> str | None:
    """The topic whose virtual configs a state record changes."""
    kind, _, topic = record.key.decode(errors="replace").partition("/")
    return topic if kind == "topic-config" else None
