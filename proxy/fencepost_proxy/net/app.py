"""The proxy process: the switch driven by real sockets, a clock, and the control client.

`serve` is the entry. Start-up fails closed and early: the bootstrap port is taken first (or the user is told at once
that it cannot be), then Kafka is waited for, then the state topic is read to its end; connections are accepted only
after that. Clients that come too early wait in the kernel's queue.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fencepost_compiled import what_runs
from fencepost_proxy import logs
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import ConfigError, FencepostError
from fencepost_proxy.groups.questions import Question
from fencepost_proxy.net.control import ControlClient, UpstreamUnavailable
from fencepost_proxy.net.expansions import Expansions
from fencepost_proxy.net.groups import GroupKeeper
from fencepost_proxy.net.http import BrokerStatus, GuardedTopicStatus, StatusServer, StatusSnapshot
from fencepost_proxy.net.link import Link
from fencepost_proxy.net.listeners import Acceptor, bind, connect
from fencepost_proxy.net.metrics import Metrics, fencepost_version
from fencepost_proxy.net.reads import FACTS_SECONDS, GateReads
from fencepost_proxy.net.side import Buffers, Paused
from fencepost_proxy.net.state_topic import StateTopic
from fencepost_proxy.partitions.events import GateLimits, Ticket, Violation
from fencepost_proxy.partitions.gate import Gate
from fencepost_proxy.session import messages as sessions
from fencepost_proxy.session.exchange import Exchanges
from fencepost_proxy.session.session import Session
from fencepost_proxy.session.surroundings import Passes
from fencepost_proxy.session.switch import Action, ForConnection, ForControl, Report, Switch
from fencepost_proxy.topics.counts import Client, Counts
from fencepost_proxy.topics.door import Door
from fencepost_proxy.topics.expansions import Growth
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.topics.records import StateRecord
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.topics.virtual_configs import TopicPolicy, durability_warnings
from fencepost_proxy.types import Address, Monotonic, NodeId, ProducerId, TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.batch import HeaderNames
from fencepost_proxy.wire.produce import NodeEndpoint

if TYPE_CHECKING:
    from fencepost_proxy.net.worker import HandedLink, Worker

_log = logs.get("net.app")
_limited_log = logs.RateLimitedLog(_log)

#: How often waiting gates and sessions are told that time has passed.
_TICK_SECONDS = 0.02
_HOUSEKEEPING_SECONDS = 1.0
_STORE_SECONDS = 15.0
_DRAIN_LOOK_SECONDS = 0.02


async def serve(
    config: ProxyConfig,
    *,
    on_ready: Callable[[Address], None] = lambda address: None,
    stop: asyncio.Event | None = None,
    worker: Worker | None = None,
) -> None:
    """Runs until cancelled, or until `stop` is set: then it drains, within `limits.drain_seconds`.

    `on_ready` is told the bootstrap address once clients can connect. `worker` – what this process is among several.
    Raises ConfigError where a port cannot be had, StateError where the state topic cannot be relied on.
    """
    async with AsyncExitStack() as stack:
        proxy = Proxy(config, worker)
        stack.push_async_callback(proxy.close)
        stop = stop or asyncio.Event()
        if worker is not None:
            stack.callback(worker.close)
            worker.attach(proxy)
        on_ready(await proxy.start())
        await stop.wait()
        await proxy.drain()


class Proxy:
    """See the module. Answers what sessions ask of their surroundings, and drives the links."""

    def __init__(self, config: ProxyConfig, worker: Worker | None = None) -> None:
        limits = config.limits
        self._worker = worker
        self.config = config
        self.header_names = HeaderNames(*(name.encode() for name in _names(config)))
        self.frame_bytes_max = limits.frame_bytes_max
        self.in_flight_requests_max = limits.in_flight_requests_max
        self.gate_wait_max_seconds = limits.gate_wait_max_seconds
        self.request_timeout_seconds = limits.request_timeout_seconds
        self.decompressed_bytes_max = limits.decompressed_bytes_max
        self.state_topic = config.state_topic
        self.refuse_whole_requests = config.refusal_scope == "request"
        self._control = ControlClient(config.upstream, limits, on_brokers=self._brokers_changed)
        self._state: StateTopic | None = None
        self._reads: GateReads | None = None
        self._book = AddressBook(config.listen.port, advertised_host=config.advertised_host, ports=config.broker_ports)
        self._metrics = Metrics(lambda: self._state.fresh_until if self._state else Monotonic(float("-inf")))
        self._groups = GroupKeeper(
            self._control,
            limits,
            configured=[config.unlisted_topics, *(pattern.configs for pattern in config.topic_patterns)],
            policy=self.policy,
            topic_id=self.topic_id,
            metrics=self._metrics,
        )
        exchanges = Exchanges(
            self._book, self._known, self._shared_producer_id, self._open_listeners, self._groups.desk
        )
        gate_limits = GateLimits(
            queue_max=limits.gate_queue_max,
            read_retry_seconds=limits.settle_retry_seconds,
            decompressed_bytes_max=limits.decompressed_bytes_max,
            stamping=not config.unsafe_disable_stamping,
        )
        owner = worker is None or worker.owner
        self.switch = Switch(self, exchanges, gate_limits, self.header_names, owner=owner)
        self.links: dict[int, Link] = {}
        self._numbers = itertools.count(1)
        self._buffers = Buffers()
        self._marked_topic_id: UUID | None = None
        self._state_topic_marks: tuple[bytes, ...] = (config.state_topic.encode(),)
        self._free_bytes = limits.buffered_bytes_max
        #: Of the event that is being handled: how long before it each of the requests and answers was here.
        self._forwarded: list[float] = []
        self._answered: list[float] = []
        self._policies: dict[str, TopicPolicy | None] = {}
        self._bootstrap_turn = itertools.cycle(range(len(config.upstream)))
        self._listening: dict[NodeId | None, socket.socket] = {}
        self._acceptors: dict[NodeId | None, Acceptor] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refreshing: set[str] = set()
        self._ticker: asyncio.TimerHandle | None = None
        self._draining = False
        self._closed = False
        self._expansions: Expansions | None = None
        self._counted: set[str] = set()  # by what admins set, not by the file
        self._unanswered_until = float("-inf")
        self._counts = Counts(
            self._count_heard,
            self._growth,
            lambda: round(time.time() * 1000),
            settle_seconds=limits.partition_settle_seconds,
            served_max=limits.served_counts_max,
        )
        self._accepting = False
        self._started_at = time.monotonic()
        self._bootstrap: Address | None = None
        self._violations = 0
        self._warned: set[str] = set()  # of guarded topics that there are
        self._takeover_until = float("-inf")
        self.traffic = self._metrics.traffic
        self._status = StatusServer(self._snapshot, self._metrics, release=self._groups.release)

    # ---- life

    async def start(self) -> Address:
        config = self.config
        sock = self._listening[None] = self._bind(None, config.listen, "clients")
        host, port = sock.getsockname()[:2]
        await self._start_status()
        if config.unsafe_disable_stamping:
            _log.error("unsafe_disable_stamping is set: an append may be accepted at an offset that it did not expect")
        await self._control.start()
        self._state = StateTopic(
            self._control,
            name=config.state_topic,
            lease_seconds=config.config_lease_seconds,
            limits=config.limits,
            on_change=self._state_changed,
        )
        self._expansions = Expansions(
            self._control,
            self._state,
            config.limits,
            doors=self,
            metrics=self._metrics,
            spawn=self._spawn,
            owner=self._worker is None or self._worker.owner,
        )
        self._reads = GateReads(self._control, self._state, config.limits.frame_bytes_max)
        self._groups.attach(self._state)
        await self._state.start()
        await self._state.acquire_producer_id()
        if await self._state.enter():
            _log.info("other proxy processes serve this cluster, or ended a moment ago without saying so")
            self._takeover_until = time.monotonic() + config.limits.takeover_seconds
        facts = await self._control.broker_facts()
        self._reads.producer_id_expiration_ms = facts.producer_id_expiration_ms
        self._brokers_changed(self._control.brokers)
        await self._look_after_topics()
        self._expansions.start()
        self._accepting = True
        self._count_links()
        for node_id in list(self._listening):
            self._accept_on(node_id)
        self._spawn(self._housekeeping(), "housekeeping")
        self._spawn(self._groups.run(), "groups")
        address = self._bootstrap = Address(config.advertised_host or host, port)
        _log.info("serving", bootstrap=address, brokers=len(self._book.nodes), code=what_runs())
        return address

    async def _start_status(self) -> None:
        """First of all: who waits for Kafka should be able to see that it does."""
        address = self.config.status
        if address is None:
            return
        try:
            await self._status.start(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on {address} for the status page: {error.strerror or error}") from error

    async def drain(self) -> None:
        """Accepts nobody and reads no further request; waits for the answers under way, then closes every link."""
        self._draining = True
        self._accept_nobody()
        for link in list(self.links.values()):
            link.client.pause(Paused.DRAINING)
        deadline = time.monotonic() + self.config.limits.drain_seconds
        while time.monotonic() < deadline and not all(s.drained for s in self.switch.sessions.values()):  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_LOOK_SECONDS)
        left = sum(not session.drained for session in self.switch.sessions.values())
        _log.info("drained", connections=len(self.links), unanswered=left)
        now = time.monotonic()
        doubtful = self.switch.in_doubt or not all(door.empty(now) for door in self.switch.doors.values())
        if self._state is not None and not left and not doubtful:
            await self._state.leave()

    async def close(self) -> None:
        self._accept_nobody()
        for sock in self._listening.values():
            sock.close()
        if self._ticker is not None:
            self._ticker.cancel()
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for link in list(self.links.values()):
            link.client.abort()
            if link.upstream is not None:
                link.upstream.abort()
        await self._status.close()
        if self._state is not None:
            await self._state.close()
        await self._control.close()

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
            _log.crash(f"{task.get_name()} crashed", error)

    # ---- what sessions ask (session.Surroundings)

    @property
    def passes(self) -> Passes:
        return self._groups.passes

    @property
    def state_topic_marks(self) -> tuple[bytes, ...]:
        topic_id = self.topic_id(self.state_topic)
        if topic_id is not self._marked_topic_id:
            self._marked_topic_id = topic_id
            self._state_topic_marks = (self.state_topic.encode(), *([] if topic_id is None else [topic_id.bytes]))
        return self._state_topic_marks

    @property
    def shared_producer_id(self) -> int:
        return -1 if (producer_id := self._shared_producer_id()) is None else producer_id

    def _shared_producer_id(self) -> ProducerId | None:
        return None if self._state is None else self._state.view.producer_id

    @property
    def tag(self) -> int:
        return 0 if self._state is None else self._state.tag

    def alone(self, now: float) -> bool:
        # Known from the start, not only once the other workers gave a sign of life.
        return self._worker is None and self._state is not None and self._state.alone(now)

    def taken_over(self, now: float) -> bool:
        return now >= self._takeover_until

    def fresh(self, now: float) -> bool:
        return self._state is not None and now < self._state.fresh_until

    def policy(self, topic: str) -> TopicPolicy | None:
        try:
            return self._policies[topic]
        except KeyError:
            pass
        assert self._state is not None
        policy = self._state.view.topic_policy(topic, self.topic_id(topic), self.config.configs_for)
        if len(self._policies) > 100_000:  # names come from clients: a stranger's must not fill the memory
            self._policies.clear()
        found = self._policies[topic] = policy if policy.guarded or policy.counted else None
        return found

    def gate(self, partition: TopicPartition) -> Gate | None:
        return self.switch.gates.get(partition)

    def topic_id(self, topic: str) -> UUID | None:
        info = self._control.topic(topic)
        return None if info is None else info.topic_id

    def leader_epoch(self, partition: TopicPartition) -> int:
        leader = self._control.leader(partition)
        return -1 if leader is None else leader.leader_epoch

    def produce_version_max(self) -> int:
        return self._control.version_max(PRODUCE)

    def may_send(self, ticket: Ticket, now: float) -> bool:
        return self.switch.may_send(ticket, now)

    # ---- what they ask about counted topics (session.counted.Surroundings)

    def door(self, topic: str) -> Door:
        return self.switch.door(topic)

    def new_door(self, topic: str) -> Door:
        """Closed, where an expansion is pending; and not empty before what an earlier process has sent is over."""
        door = Door(topic, doubt_seconds=self.config.limits.takeover_seconds, clear_at=self._takeover_until)
        if self._state is not None and self._state.view.growth(topic, self.topic_id(topic)).pending is not None:
            door.close(time.monotonic())
        return door

    def partition_count(self, topic: str, now: float) -> int | None:
        return self._counts.count(topic, now)

    def count_confirmed_since(self, topic: str, at: float) -> bool:
        return self._counts.confirmed_since(topic, at)

    def settles(self, topic: str, now: float) -> bool:
        return self._counts.settles(topic, now)

    def served_count(self, connection: int, client_id: str | None, topic: str, now: float) -> int | None:
        client = self._client(connection, client_id)
        return None if client is None else self._counts.served(client, topic, now)

    def note_served(self, connection: int, client_id: str | None, counts: Sequence[tuple[str, int]]) -> None:
        client = self._client(connection, client_id)
        if client is not None:
            self._counts.serve(client, counts)

    def note_guess(self, connection: int, client_id: str | None, topic: str, now: float) -> None:
        client = self._client(connection, client_id)
        if client is not None:
            self._counts.refused(client, topic, now)

    def note_unanswered(self, now: float) -> None:
        self._unanswered_until = now + self.config.limits.takeover_seconds

    def door_waited(self, seconds: float) -> None:
        self._metrics.door_wait_seconds.observe(seconds)

    def _client(self, connection: int, client_id: str | None) -> Client | None:
        link = self.links.get(connection)
        return None if link is None else Client(link.peer.host, client_id)

    def _count_heard(self, topic: str) -> tuple[UUID, int] | None:
        info = self._control.topic(topic)
        return None if info is None else (info.topic_id, info.partition_count)

    def _growth(self, topic: str, topic_id: UUID) -> Growth:
        assert self._state is not None
        return self._state.view.growth(topic, topic_id)

    def _note_counted(self, topic: str, now: float) -> None:
        """Its configs have changed. What was under way when it became a counted topic never came to a door."""
        policy = self.policy(topic)
        if policy is None or not policy.counted:
            self._counted.discard(topic)
        elif topic not in self._counted:
            self._counted.add(topic)
            door = self.switch.door(topic)
            if self._accepting and not (self.switch.quiet and now >= self._unanswered_until):
                seconds = self.config.config_lease_seconds + self.config.limits.request_timeout_seconds
                door.not_empty_before(now + seconds)

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
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
        )

    def release_group(self, group: str, topic: str) -> None:
        """Asked by an operator, at the process that has the status page."""
        self._spawn(self._release_group(group, topic), f"release for {group}")

    async def _release_group(self, group: str, topic: str) -> None:
        _log.info(await self._groups.release(group, topic))

    # ---- virtual configs

    def _state_changed(self, records: Sequence[StateRecord]) -> None:
        self._policies.clear()
        self._groups.refresh()
        if self._expansions is not None:
            self._expansions.view_changed()
        now = time.monotonic()
        for topic in {_topic_of(record) for record in records}:
            if topic is not None:
                self._note_counted(topic, now)
                self._perform(self.switch.forget_topic(topic, now), now)

    def close_door(self, topic: str, but_for: frozenset[ProducerId]) -> None:
        now = time.monotonic()
        self._perform(self.switch.close_door(topic, now, but_for), now)

    def open_door(self, topic: str, partition_count: int | None) -> None:
        now = time.monotonic()
        door = self.switch.door(topic)
        actions = self.switch.open_door(topic, partition_count or door.count or 0, now)
        if not door.count:
            door.forget_count()
        self._perform(actions, now)

    def door_empty(self, topic: str) -> bool:
        return self.switch.door(topic).empty(time.monotonic())

    async def _expand(self, connection: int, expand: sessions.Expand) -> None:
        assert self._expansions is not None
        outcomes = await asyncio.gather(
            *(self._expansions.expand(request, expand.timeout_ms) for request in expand.requests)
        )
        self.session_event(connection, sessions.Expanded(expand.token, tuple(outcomes)))

    async def _store(self, connection: int, store: sessions.Store) -> None:
        """A switch-on is reported only once every process knows of it, or has stopped serving (its lease ran out)."""
        error = None
        try:
            async with asyncio.timeout(_STORE_SECONDS):
                assert self._state is not None
                changes = [await self._with_topic_id(change) for change in store.changes]
                await self._forget_deleted(changes)
                records = self._state.view.records_of(changes)
                if records:
                    await self._state.append(records)
                if not all(change.deleted for change in changes):
                    # Also where nothing had to be stored: somebody else may have done so a moment ago.
                    await asyncio.sleep(self.config.config_lease_seconds)
                for change in changes:
                    if change.topic is not None and not change.deleted:
                        _log.info("topic configs changed", topic=change.topic, set=dict(change.assign) or None)
                        self._warned.discard(change.topic)
                        self._warn_about([change.topic])
        except (FencepostError, TimeoutError, ValueError) as failure:
            error = str(failure) or "it took too long"
            _log.error("virtual configs could not be stored", reason=error)
        self.session_event(connection, sessions.Stored(store.token, error))

    async def _forget_deleted(self, changes: Sequence[TopicConfigChange]) -> None:
        """Before the client hears of it: what a gate believes of a topic must not outlive it."""
        gone = [change.topic for change in changes if change.deleted and change.topic is not None]
        if gone:
            await self._control.refresh_metadata(gone)
        for topic in gone:
            self._topic_replaced(topic)

    async def _with_topic_id(self, change: TopicConfigChange) -> TopicConfigChange:
        """Where no response told it, metadata does; a topic just created is not everywhere at once."""
        if change.deleted or change.topic is None:
            return change
        topic_id = change.topic_id
        while True:
            await self._control.refresh_metadata([change.topic])
            known = self.topic_id(change.topic)
            if known is not None and (topic_id is None or known == topic_id):
                return TopicConfigChange(change.topic, known, change.assign, change.unset, change.replace)
            await asyncio.sleep(0.05)

    def _warn_about(self, topics: Iterable[str]) -> None:
        """Of what Kafka itself may lose there: once for each topic, whoever switched its check on."""
        for topic in set(topics) - self._warned:
            self._warned.add(topic)
            self._spawn(self._warn_of_loss(topic), "durability check")

    async def _warn_of_loss(self, topic: str) -> None:
        assert self._reads is not None
        info = self._control.topic(topic)
        policy = self.policy(topic)
        if info is None or policy is None or not policy.guarded:
            return
        try:
            facts = await self._reads.facts(topic)
        except UpstreamUnavailable:
            return
        for warning in durability_warnings(
            topic,
            replication_factor=info.replication_factor,
            min_insync_replicas=facts.min_insync_replicas,
            unclean_leader_election=facts.unclean_leader_election,
        ):
            _log.warning(warning)

    # ---- links

    def _accept_on(self, node_id: NodeId | None) -> None:
        def accepted(sock: socket.socket, peer: Address) -> None:
            self._accepted(sock, peer, node_id)

        others_turn = None if self._worker is None else self._worker.others_turn
        self._acceptors[node_id] = Acceptor(self._listening[node_id], accepted, others_turn)

    def _accept_nobody(self) -> None:
        for acceptor in self._acceptors.values():
            acceptor.close()
        self._acceptors.clear()

    def _accepted(self, sock: socket.socket, peer: Address, node_id: NodeId | None) -> None:
        if len(self.links) >= self.config.limits.connections_max or self._draining:
            _limited_log.warning("connections", "connection refused: connections_max is reached", peer=peer)
            sock.close()
            return
        local_host = sock.getsockname()[0]
        link = Link(next(self._numbers), sock, self, self._buffers, peer=peer, local_host=local_host, node_id=node_id)
        self.links[link.connection] = link
        self._metrics.connections.inc()
        self._metrics.connections_accepted.inc()
        self._count_links()
        self._spawn(self._connect(link, node_id), f"connect {link.connection}")

    async def _connect(self, link: Link, node_id: NodeId | None) -> None:
        """Opens the link's upstream connection: to its listener's broker, or to any of those configured."""
        tries = [self._book.upstream_of(node_id)] if node_id is not None else None
        reason: object = "the broker is not known"
        first = next(self._bootstrap_turn) if node_id is None else 0
        for address in tries or [*self.config.upstream[first:], *self.config.upstream[:first]]:
            if address is None:
                continue
            try:
                async with asyncio.timeout(self.config.limits.connect_timeout_seconds):
                    sock = await connect(address)
            except (OSError, TimeoutError) as error:
                reason = f"{address}: {error or 'no answer in time'}"
                continue
            link.connected(sock)
            return
        _limited_log.warning("upstream", "no upstream connection for a client", peer=link.peer, reason=reason)
        link.close_reason = "no upstream connection"
        link.client.close(time.monotonic())

    def link_opened(self, link: Link) -> Session:
        return self.switch.open(link.connection, link.local_host, time.monotonic())

    def link_closed(self, link: Link) -> None:
        if self.links.pop(link.connection, None) is not None:
            self._metrics.connections.dec()
            self._count_links()

    def _count_links(self) -> None:
        if self._worker is not None:
            self._worker.has(len(self.links))

    def keep_time(self, session: Session) -> None:
        """It waits for something that has a time limit."""
        self.switch.keep_time(session)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def session_event(self, connection: int, event: sessions.Event) -> None:
        now = time.monotonic()
        self._perform(self.switch.session_event(connection, event, now), now)

    def _perform(self, actions: list[Action], began: float) -> None:
        """`began` – when the event came of which they are."""
        for action in actions:
            if isinstance(action, ForConnection):
                self._for_connection(action.connection, action.command)
            elif isinstance(action, ForControl):
                self._spawn(self._read(action), f"read {action.partition}")
            else:
                self._report(action)
        if self._forwarded or self._answered:
            took = time.monotonic() - began
            for waited in self._forwarded:
                self.traffic.request_seconds.observe(waited + took)
            for waited in self._answered:
                self.traffic.response_seconds.observe(waited + took)
            self._forwarded.clear()
            self._answered.clear()
        if self._ticker is None and self.switch.needs_ticks:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick)

    def _for_connection(self, connection: int, command: sessions.Command) -> None:
        link = self.links.get(connection)
        match command:
            case sessions.Count(what, label):
                if what == "refusal":
                    self._metrics.refused(label)
                return
            case sessions.HandOver(handed):
                if link is not None:
                    self._hand_over(link, handed)
                return
            case sessions.Expand():
                self._spawn(self._expand(connection, command), "expand topics")
                return
            case sessions.Store():
                self._spawn(self._store(connection, command), "store configs")
                return
            case sessions.Ask(token, question):
                self._spawn(self._ask(connection, token, question), f"ask about group {question.group}")
                return
            case sessions.Noticed(notice):
                self._groups.notice(notice, "" if link is None else link.peer.host)
                return
            case sessions.TopicStale(topic):
                if topic not in self._refreshing:
                    self._refreshing.add(topic)
                    self._spawn(self._refresh(topic), f"refresh {topic}")
                return
            case sessions.ToClient(chunks):
                self.traffic.bytes_to_clients += sum(map(len, chunks))
            case sessions.ToUpstream(chunks):
                self.traffic.bytes_to_kafka += sum(map(len, chunks))
            case sessions.CloseClient() if link is not None:
                self._closing(link, command)
        if link is not None:
            link.perform(command)

    def _closing(self, link: Link, command: sessions.CloseClient) -> None:
        if command.fault is None:
            self._metrics.closed("stale_partition_count" if command.hang_up else "upstream_closed")
            return
        self._metrics.closed(command.fault.__name__)
        _limited_log.warning(_kind(command), "connection closed", peer=link.peer, reason=command.reason)

    def _tick(self) -> None:
        self._ticker = None
        now = time.monotonic()
        self._perform(self.switch.tick(now), now)

    async def _ask(self, connection: int, token: int, question: Question) -> None:
        link = self.links.get(connection)
        reply = await self._groups.answer(question, "" if link is None else link.peer.host)
        self.session_event(connection, sessions.Replied(token, reply))

    async def _read(self, wanted: ForControl) -> None:
        assert self._reads is not None
        event = await self._reads.carry_out(wanted)
        now = time.monotonic()
        self._perform(self.switch.gate_event(wanted.partition, event, now), now)

    def _report(self, report: Report) -> None:
        self._violations += 1
        self._metrics.violations.inc()
        self._spawn(self._log_violation(report.violation), "violation")

    async def _log_violation(self, violation: Violation) -> None:
        assert self._reads is not None
        producer_id = violation.producer_id
        if producer_id is None:
            producer_id = await self._reads.producer_at(violation.partition, violation.offset)
        _log.error(
            "OFFSET_VIOLATION: somebody writes around the proxy",
            partition=violation.partition,
            offset=violation.offset,
            producer_id="unknown" if producer_id is None else producer_id,
            appended_at=violation.appended_at,
            log_end=violation.log_end_offset,
        )

    # ---- brokers and their listeners

    def _brokers_changed(self, brokers: Mapping[NodeId, Address]) -> None:
        self._open_listeners([node_id for node_id, address in brokers.items() if self._book.learn(node_id, address)])

    def _open_listeners(self, node_ids: Sequence[NodeId]) -> None:
        """Bound and listening when it returns; whoever is told of the port now finds it open."""
        for node_id in node_ids:
            if node_id in self._listening:
                continue  # it has moved; its listener asks the book where to connect
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
        from fencepost_proxy.net.worker import WantedListener  # noqa: PLC0415 - a single process need not load it

        return self._worker.listener(WantedListener(node_id, address, what))

    # ---- from worker to worker

    def _hand_over(self, link: Link, handed: sessions.Handed) -> None:
        """To the worker that owns what the client asks for. Where that cannot be: closed, never served here."""
        assert self._worker is not None
        if self._draining:
            link.client.close(time.monotonic())
            assert link.upstream is not None
            link.upstream.close(time.monotonic())
            return
        given = link.give_away()
        if given is None:
            return
        from fencepost_proxy.net.worker import HandedLink  # noqa: PLC0415 - a single process need not load it

        self._metrics.handed_over.inc()
        on_its_way = HandedLink(handed, link.peer, link.node_id, given.to_client, given.to_upstream)
        if not self._worker.hand_over(on_its_way, given):
            _limited_log.warning("hand over", "connection closed: the owner process cannot be reached", peer=link.peer)
            self._metrics.closed("owner_away")

    def take_over(self, handed: HandedLink, client: socket.socket, upstream: socket.socket) -> None:
        """A connection that another worker has accepted."""
        if self._draining or self._closed or len(self.links) >= self.config.limits.connections_max:
            why = (
                "this process is shutting down" if self._draining else "connections_max is reached in the owner process"
            )
            _limited_log.warning("take over", f"connection closed: {why}", peer=handed.peer)
            client.close()
            upstream.close()
            return
        number, local_host = next(self._numbers), handed.session.local_host
        link = Link(
            number, client, self, self._buffers, peer=handed.peer, local_host=local_host, node_id=handed.node_id
        )
        self.links[number] = link
        self._metrics.connections.inc()
        self._count_links()
        link.take_over(
            upstream,
            self.switch.take_over(number, handed.session),
            unread=handed.session.unread,
            to_client=handed.to_client,
            to_upstream=handed.to_upstream,
        )

    def report(self) -> tuple[StatusSnapshot, Metrics, float]:
        """For the process that shows all workers together."""
        metrics = copy.copy(self._metrics)
        metrics.state_fresh_until = None
        return self._snapshot(), metrics, self._state.fresh_until if self._state else float("-inf")

    # ---- housekeeping

    async def _housekeeping(self) -> None:
        """Once a second: clients that stall are closed. Now and then: guarded topics are looked at again."""
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            self._close_stalled()
            self.traffic.requests_in_flight = self._in_flight()
            if self._state is not None and self._state.tag_runs_out:
                self._spawn(self._renew_tag(), "tag")
            if self._expansions is not None:
                self._expansions.look_after(self._counted_topics())
            if time.monotonic() - looked_at >= FACTS_SECONDS:
                looked_at = time.monotonic()
                await self._look_after_topics()

    def _counted_topics(self) -> list[str]:
        """Those that are known: switched on by an admin, appended to here, or counted at some time."""
        if self._state is None:
            return []
        topics = sorted({*self._counted, *self.switch.doors, *self._state.view.counted_topics})
        return [topic for topic in topics if (policy := self.policy(topic)) is not None and policy.counted]

    async def _renew_tag(self) -> None:
        assert self._state is not None
        try:
            await self._state.enter()
        except FencepostError as error:
            _limited_log.warning("tag", "no new tag for this process", reason=error)

    def _close_stalled(self) -> None:
        now = time.monotonic()
        for link in list(self.links.values()):
            self._abort_unread(link, now)
            reason = self._stalled(link, now)
            if reason is not None:
                _limited_log.info(reason, "connection closed", peer=link.peer, reason=reason)
                self._metrics.closed("stalled")
                link.client.close(now)

    def _abort_unread(self, link: Link, now: float) -> None:
        """A peer that does not take what was written would keep its closed connection for ever.

        A client that does not read its answers; and, behind one that has left, a broker that cannot get rid of its
        answer since nobody reads it any more, and therefore reads nothing either.
        """
        for side in (link.client, link.upstream):
            since = None if side is None else side.closing_since
            if side is not None and since is not None and now - since > self.config.limits.drain_seconds:
                side.abort()

    def _stalled(self, link: Link, now: float) -> str | None:
        if link.client.closing_since is not None:
            return None
        limits = self.config.limits
        session = self.switch.sessions.get(link.connection)
        if session is None:
            return None  # its upstream connection is being opened, which has a limit of its own
        silent = now - max(link.client.received_at, link.opened_at)
        if not link.client.received_at and silent > limits.handshake_seconds:
            return f"it sent nothing for {limits.handshake_seconds:g} s (limits.handshake_seconds)"
        if session.mid_header and not link.client.paused and silent > limits.header_seconds:
            return f"it stopped within a frame's header for {limits.header_seconds:g} s (limits.header_seconds)"
        since = session.collecting_since
        if since is not None and not link.client.paused:
            # It holds memory that all share: it must not stop, nor trickle.
            if silent > limits.header_seconds:
                return f"it stopped within a frame for {limits.header_seconds:g} s (limits.header_seconds)"
            if now - since > limits.request_timeout_seconds:
                allowed = f"{limits.request_timeout_seconds:g} s (limits.request_timeout_seconds)"
                return f"a frame of it was not whole within {allowed}"
        heard = 0.0 if link.upstream is None else link.upstream.received_at
        if min(silent, now - heard) > limits.client_idle_seconds:
            # Nothing moved in either direction: it is silent, or does not read what it asked for.
            return f"nothing moved for {limits.client_idle_seconds:g} s (limits.client_idle_seconds)"
        return None

    async def _look_after_topics(self) -> None:
        """Guarded topics: their ids (a name may be another topic's by now) and the configs that gates rely on."""
        assert self._state is not None
        assert self._reads is not None
        configured = self._state.view.topic_configs
        gated = {partition.topic for partition in self.switch.gates}
        doors = {topic for topic in self.switch.doors if self.topic_id(topic) is not None}
        topics = sorted({*configured, *gated, *doors, *self._state.view.counted_topics})
        if not topics:
            return
        before = {topic: self.topic_id(topic) for topic in topics}
        self._warned.intersection_update(topics)
        try:
            await self._control.refresh_metadata(topics)
            self._warn_about(topic for topic in topics if self.topic_id(topic) is not None)
            for topic in topics:
                if self.topic_id(topic) != before[topic]:
                    self._topic_replaced(topic)
            there = sorted(topic for topic in gated if self.topic_id(topic) is not None)
            for topic in await self._reads.changed_facts(there):
                now = time.monotonic()
                self._perform(self.switch.forget_topic(topic, now), now)
        except UpstreamUnavailable as error:
            _limited_log.warning("topics", "guarded topics could not be looked up", reason=error)

    async def _refresh(self, topic: str) -> None:
        before, asked_at = self.topic_id(topic), time.monotonic()
        try:
            await self._control.refresh_metadata([topic], timeout_seconds=self.config.limits.connect_timeout_seconds)
        except UpstreamUnavailable:
            return  # housekeeping looks again
        finally:
            self._refreshing.discard(topic)
        if self.topic_id(topic) != before:
            self._topic_replaced(topic)
        now = time.monotonic()
        self._counts.confirm(topic, asked_at, now)
        self._perform(self.switch.topic_news(now), now)

    def _topic_replaced(self, topic: str) -> None:
        self._policies.pop(topic, None)
        self._counts.forget(topic)
        if topic in self.switch.doors:
            self.switch.doors[topic].forget_count()
        now = time.monotonic()
        self._perform(self.switch.forget_topic(topic, now), now)

    # ---- for people and machines that watch

    def count_request(self, api_key: int) -> None:
        self.traffic.requests[api_key] += 1

    def unread_bytes(self, connection: int) -> int:
        link = self.links.get(connection)
        return 0 if link is None else link.client.unread_bytes()

    def gate_waited(self, seconds: float) -> None:
        self._metrics.gate_wait_seconds.observe(seconds)

    def forwarded(self, waited_seconds: float) -> None:
        self._forwarded.append(waited_seconds)

    def answered(self, waited_seconds: float) -> None:
        self._answered.append(waited_seconds)

    def _in_flight(self) -> int:
        return sum(session.in_flight for session in self.switch.sessions.values())

    def _snapshot(self) -> StatusSnapshot:
        now = time.monotonic()
        state = self._state
        traffic = self.traffic
        return StatusSnapshot(
            version=fencepost_version(),
            uptime_seconds=now - self._started_at,
            cluster_id=self._control.cluster_id,
            bootstrap=self._bootstrap,
            not_ready=tuple(self._not_ready(now)),
            connections=len(self.links),
            requests_in_flight=self._in_flight(),
            buffered_bytes=self.config.limits.buffered_bytes_max - self._free_bytes,
            bytes_to_kafka=traffic.bytes_to_kafka,
            bytes_to_clients=traffic.bytes_to_clients,
            violations=self._violations,
            added_seconds=self._metrics.added_seconds(),
            state_lease_seconds=None if state is None else state.fresh_until - now,
            refusals=dict(self._metrics.refusals),
            brokers=tuple(self._broker_status()),
            guarded_topics=tuple(self._guarded_status()),
            expansions=() if self._expansions is None else self._expansions.status(),
            withheld=tuple(self._groups.waiting()),
            warnings=() if self._expansions is None else self._expansions.warnings(),
        )

    def _broker_status(self) -> list[BrokerStatus]:
        connections: dict[NodeId, int] = {}
        for link in self.links.values():
            if link.node_id is not None:
                connections[link.node_id] = connections.get(link.node_id, 0) + 1
        host = self.config.advertised_host or self.config.listen.host
        return [
            BrokerStatus(
                node_id=node_id,
                kafka=kafka,
                listener=self._book.advertised(node_id, host) if node_id in self._listening else None,
                connections=connections.get(node_id, 0),
            )
            for node_id, kafka in sorted(self._book.nodes.items())
        ]

    def _guarded_status(self) -> list[GuardedTopicStatus]:
        if self._state is None:
            return []
        waiting = dict.fromkeys(self._state.view.topic_configs, 0)
        for partition, gate in self.switch.gates.items():
            waiting[partition.topic] = waiting.get(partition.topic, 0) + gate.waiting
        guarded = []
        for topic, count in sorted(waiting.items()):
            policy, info = self.policy(topic), self._control.topic(topic)
            if policy is not None and policy.guarded and info is not None:
                guarded.append(GuardedTopicStatus(topic, policy.check.value, info.partition_count, count))
        return guarded

    def _not_ready(self, now: float) -> list[str]:
        if self._draining:
            return ["it is shutting down"]
        if self._control.cluster_id is None:
            return [f"waiting for Kafka at {', '.join(map(str, self.config.upstream))}"]
        if self._bootstrap is None:
            return ["reading the state topic"]
        if self._state is not None and self._state.failure is not None:
            return [self._state.failure]
        return [] if self.fresh(now) else ["the state topic was not read recently enough: appends are not let through"]


def _kind(close: sessions.CloseClient) -> object:
    """What makes two closings the same to a reader of the log: how the reason begins, without its numbers."""
    return close.fault, re.sub(r"-?\d+", "", close.reason)[:20]


def _names(config: ProxyConfig) -> tuple[str, str, str]:
    headers = config.headers
    return headers.expected_offset, headers.partition_count, headers.write_id


def _topic_of(record: StateRecord) -> str | None:
    """The topic whose virtual configs a state record changes."""
    kind, _, topic = record.key.decode(errors="replace").partition("/")
    return topic if kind == "topic-config" else None
