"""The proxy process: puts its parts together, starts, drains and reloads them.

`serve` is the entry. It binds the bootstrap port (and fails at once if it cannot), waits for Kafka, reads the state
topic to its end, and only then accepts connections. Earlier clients wait in the kernel's accept queue, or
connect to another proxy that shares the port.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from fencepost_proxy import logs
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.cluster.refused import RefusedConnections
from fencepost_proxy.cluster.tasks import Tasks
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.executor import EXECUTOR
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability import readiness
from fencepost_proxy.observability.watchdog import Watchdog
from fencepost_proxy.sequencer.events import SequencerLimits
from fencepost_proxy.services.checked_topics import CheckedTopics
from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.services.driver import AddedTime, Driver
from fencepost_proxy.services.homes import Homes
from fencepost_proxy.services.housekeeping import Housekeeping
from fencepost_proxy.services.process_status import ProcessStatus
from fencepost_proxy.services.replaced_topics import ReplacedTopics
from fencepost_proxy.services.reports import Reports
from fencepost_proxy.services.session_requests import SessionRequests
from fencepost_proxy.services.session_services import SessionServices
from fencepost_proxy.services.settings_warnings import warn_of_settings
from fencepost_proxy.services.topic_configs import TopicConfigs
from fencepost_proxy.services.topic_warnings import TopicWarnings
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.transport.certificates import Certificates
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.listeners import Listeners
from fencepost_proxy.transport.memory_budget import MemoryBudget
from fencepost_proxy.transport.proxied_socket import Buffers
from fencepost_proxy.transport.socket_server import SocketServer
from fencepost_proxy.transport.stalled import StalledConnections
from fencepost_proxy.transport.upstreams import Upstreams
from fencepost_proxy.types import Address
from fencepost_proxy.wire.apis import PRODUCE, api_name

_log = logs.get("server")


async def serve(
    config: ProxyConfig,
    *,
    on_ready: Callable[[Address], None] = lambda address: None,
    stop: asyncio.Event | None = None,
    force: asyncio.Event | None = None,
    on_reload: Callable[[Callable[[ProxyConfig], None]], None] = lambda reload: None,
) -> None:
    """Runs until cancelled, or until `stop` is set: then it drains, within `limits.drain_seconds`.

    `force` – when set, the drain ends without waiting for requests in progress.
    `on_ready` gets the bootstrap address once clients can connect.
    `on_reload` gets, at the start, the function that applies a new configuration and reloads certificates.
    Raises ConfigError if a port cannot be bound. Problems with Kafka do not raise: it retries until they are fixed.
    """
    async with AsyncExitStack() as stack:
        proxy = Proxy(config)
        stack.push_async_callback(proxy.close)
        on_reload(proxy.reload)
        stop = stop or asyncio.Event()
        on_ready(await proxy.start())
        await stop.wait()
        await proxy.drain(force or asyncio.Event())


class Proxy:
    """One process: `start`, then `drain`, then `close`."""

    def __init__(self, config: ProxyConfig) -> None:
        self._live = _LiveConfig(config)
        self._tasks = Tasks()
        self._metrics = metrics = Metrics()
        self._watchdog = Watchdog(metrics.loop_late_seconds.observe)
        self._certificates = Certificates(config.listen_tls, config.upstream_tls, metrics)
        self._buffers = Buffers()
        make_budget = MemoryBudget if EXECUTOR.module is None else EXECUTOR.module.MemoryBudget
        self._memory: MemoryBudget = make_budget(config.limits.buffered_bytes_max)
        self._book = AddressBook(config.listen.port, advertised_host=config.advertised_host, ports=config.broker_ports)
        self._listeners = listeners = Listeners(config, self._book)
        self._upstreams = Upstreams(config, self._book, self._certificates, self._buffers, metrics)
        self._refused = RefusedConnections(metrics)
        self._connections = ClientConnections(self._live.limits, metrics)
        self._cluster = cluster = ClusterView(
            config,
            self._certificates,
            listeners,
            metrics=metrics,
            refused=self._refused,
            connector=self._upstreams.connector,
            spawn=self._tasks.spawn,
        )
        self._homes: Homes | None = None
        if (here := config.home_address) is not None:
            self._homes = Homes(here, lambda: cluster.kafka.brokers, cluster.membership.others_addresses)
            self._book.home_of = self._homes.of
        self._topic_warnings = TopicWarnings(
            cluster.kafka, cluster.policies.policy, self._tasks.spawn, shared_ports=config.reuse_port
        )
        self._replaced = ReplacedTopics(cluster.topic_id, metrics)
        self._serve_sessions(config)

    def _serve_sessions(self, config: ProxyConfig) -> None:
        cluster, connections, metrics = self._cluster, self._connections, self._metrics
        added = AddedTime(metrics.traffic)
        self._services = services = SessionServices(
            config,
            cluster,
            connections=connections,
            listeners=self._listeners,
            memory=self._memory,
            metrics=metrics,
            added=added,
        )
        configs = TopicConfigs(
            cluster, self._topic_warnings, config.configs_for, lease_seconds=config.config_lease_seconds
        )
        self._requests = requests = SessionRequests(
            cluster, configs, connections.host, services.update_relayed_versions
        )
        rewriters = RequestRewriters(
            self._book,
            services.known,
            lambda: services.shared_producer_ids,
            self._listeners.open,
            cluster.groups.assignment_filter,
            own_addresses=cluster.sidecar is None,
            some_are_safe=cluster.policies.some_are_safe,
            in_loop=requests.in_loop,
        )
        self._dispatcher = services.sequencers = Dispatcher(
            services, rewriters, _sequencer_limits(config), cluster.header_names
        )
        reports = Reports(metrics, cluster.groups, cluster.lookups, cluster.log_reader, self._tasks.spawn)
        self._driver = driver = Driver(
            self._dispatcher,
            connections,
            traffic=metrics.traffic,
            added=added,
            log_reader=cluster.log_reader,
            requests=requests,
            reports=reports,
            spawn=self._tasks.spawn,
        )
        self._socket_server = SocketServer(
            connections,
            self._dispatcher,
            driver,
            upstreams=self._upstreams,
            certificates=self._certificates,
            buffers=self._buffers,
            metrics=metrics,
            limits=self._live.limits,
            listeners=self._listeners,
            refused=self._refused,
        )
        self._topics = CheckedTopics(
            config, cluster, driver, services, replaced_topics=self._replaced, connections=connections
        )
        cluster.lookups.observer = self._topics
        self._show_status(config, reports)

    def _show_status(self, config: ProxyConfig, reports: Reports) -> None:
        self._status = status = ProcessStatus(
            config,
            self._live.limits,
            self._cluster,
            self._driver,
            topics=self._topics,
            reports=reports,
            connections=self._connections,
            memory=self._memory,
            book=self._book,
            listeners=self._listeners,
            upstreams=self._upstreams,
            refused=self._refused,
            certificates=self._certificates,
            metrics=self._metrics,
            spawn=self._tasks.spawn,
        )
        self._status_server = status.server()

    # ---- start

    async def start(self) -> Address:
        config, cluster, spawn = self._live.config, self._cluster, self._tasks.spawn
        self._listeners.open_bootstrap()
        self._watchdog.start()
        if config.status is not None:
            # First, so that the status page shows a proxy that waits for Kafka.
            try:
                await self._status_server.start(config.status)
            except OSError as error:
                why = error.strerror or error
                raise ConfigError(f"cannot listen on {config.status} for the status page: {why}") from error
            spawn(self._status.run(), "status history")
        listen = self._listeners.bootstrap
        _log.info("starting", upstream=", ".join(map(str, config.upstream)), listen=listen, pid=os.getpid())
        log = _log.info if EXECUTOR.expected else _log.warning
        log("executor of the hot path", executor=EXECUTOR)
        warn_of_settings(config)
        # Before connecting to Kafka: faulty certificate files may be why Kafka is unreachable.
        spawn(self._certificates.watch(), "certificates")
        await cluster.kafka.start()
        if cluster.sidecar is not None:
            spawn(cluster.sidecar.run(), "what the broker advertises")
        await cluster.join(self._topics.state_changed, self._driver)
        housekeeping = self._housekeeping()
        await cluster.membership.until_kafka_can(housekeeping.read_broker_settings, readiness.NO_BROKER_SETTINGS)
        self._listeners.brokers_changed(cluster.kafka.brokers)
        await housekeeping.maintain_topics()
        self._topics.verified()
        assert cluster.expansions is not None
        cluster.expansions.start()
        self._listeners.accept(self._socket_server.accepted)
        spawn(housekeeping.run(), "housekeeping")
        if self._homes is not None:
            spawn(self._homes.run(), "homes")
        spawn(housekeeping.watch_broker_settings(), "broker settings")
        spawn(cluster.groups.run(), "groups")
        spawn(cluster.commits.run(), "old transactions")
        if config.watch_transactions and config.status is not None:  # it shows the result
            cluster.watch_transactions(self._live.limits, self._topics.found)
        address = self._status.bootstrap = Address(config.advertised_host or listen.host, listen.port)
        _log.info("serving", bootstrap=address, brokers=len(self._book.nodes))
        return address

    def _housekeeping(self) -> Housekeeping:
        return Housekeeping(
            self._cluster,
            self._driver,
            topics=self._topics,
            replaced=self._replaced,
            warnings=self._topic_warnings,
            connections=self._connections,
            stalled=StalledConnections(self._live.limits, self._dispatcher, self._metrics),
            homes=self._homes,
            spawn=self._tasks.spawn,
            lease_seconds=self._live.config.config_lease_seconds,
        )

    # ---- the end

    async def drain(self, force: asyncio.Event) -> None:
        """Drain: stop accepting connections and requests, finish the requests in progress, and close idle connections.

        Reports not ready. After `limits.drain_seconds`, appends still queued here get a retriable error, and in-doubt
        appends get an error that says that their outcome is unknown.
        """
        limits = self._live.limits()
        self._status.ends = True
        if self._homes is not None:
            self._homes.retiring = True
            await self._cluster.membership.retire_address()
        if limits.drain_notice_seconds:
            with suppress(TimeoutError):
                async with asyncio.timeout(limits.drain_notice_seconds):
                    await force.wait()
        self._listeners.close()
        connections, until = len(self._connections.by_number), time.monotonic() + limits.drain_seconds
        left = await self._socket_server.drain(until, force)
        if left:
            unanswered = {api_name(key): count for key, count in sorted(left.items())}
            _log.warning("requests not answered within limits.drain_seconds", unanswered=unanswered)
        _log.info("drained", connections=connections, unanswered=sum(left.values()))
        state = self._cluster.membership.state
        if state is not None and not left[PRODUCE] and not self._driver.in_doubt():
            await state.heartbeats.leave()

    async def close(self) -> None:
        self._listeners.close()
        self._driver.close()
        await self._socket_server.close()
        await self._tasks.close()
        self._connections.abort()
        await self._status_server.close()
        if self._cluster.membership.state is not None:
            await self._cluster.membership.state.close()
        await self._cluster.kafka.close()
        self._watchdog.stop()
        logs.report_suppressed(at_once=True)

    # ---- reload

    def reload(self, config: ProxyConfig) -> None:
        """Applies a configuration that differs in `live` keys only, and reloads certificates and keys. Open connections
        keep their certificates."""
        before, self._live.config = self._live.config, config
        self._services.reload(config.limits)
        self._memory.resize(config.limits.buffered_bytes_max)
        logs.change(config.log.level, config.log.format)
        if (config.listen_tls, config.upstream_tls) != (before.listen_tls, before.upstream_tls):
            try:
                self._certificates.change(config.listen_tls, config.upstream_tls)
            except ConfigError as error:
                _log.error("certificates could not be reloaded: the old ones stay in use", reason=error)
        self._cluster.kafka.access.sasl = config.control_sasl
        self._certificates.probe(at_once=True)


class _LiveConfig:
    """The configuration in force, which SIGHUP replaces."""

    def __init__(self, config: ProxyConfig) -> None:
        self.config = config

    def limits(self) -> Limits:
        return self.config.limits


def _sequencer_limits(config: ProxyConfig) -> SequencerLimits:
    limits = config.limits
    return SequencerLimits(
        queue_max=limits.sequencer_queue_max,
        queued_seconds=limits.queued_seconds,
        decompressed_bytes_max=limits.decompressed_bytes_max,
        fencing=not config.unsafe_disable_fencing,
    )
