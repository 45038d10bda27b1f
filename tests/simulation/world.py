"""One simulated deployment: brokers, proxy processes, the network between them, and faults.

A proxy process is the real `Dispatcher` with real sessions and sequencers. The sockets, tasks and control client of
`server.py` and `services/` are modelled, with delays and failures.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import crc32c

from fencepost_policies.append import Check
from fencepost_policies.conditional_publish import CHECK_EXPECTED_OFFSETS
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.sequencer import events as sequencers
from fencepost_proxy.sequencer.appends import batch_to_send
from fencepost_proxy.session.control.rewriters import Finished, RequestRewriter
from fencepost_proxy.session.dispatcher import Action, Dispatcher, ForConnection, ForControl, Report
from fencepost_proxy.session.frames import messages as sessions
from fencepost_proxy.session.frames.services import relayed_versions_without
from fencepost_proxy.session.session import Session
from fencepost_proxy.topics.abort_only import AbortOnly, cleared
from fencepost_proxy.topics.fencing import FenceBase, encode_fence_base, encode_producer_id
from fencepost_proxy.topics.planning import Joins
from fencepost_proxy.topics.state import NotStored, StateRecord, StateView, TopicConfigChange
from fencepost_proxy.topics.virtual_configs import ORDERED_PARTITION_EXPANSION, TopicPolicy
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import SEQUENCE_MODULUS, LogEndOffset, Offset, ProducerEpoch, ProducerId, TopicPartition
from fencepost_proxy.wire.apis import (
    ADD_PARTITIONS_TO_TXN,
    API_VERSIONS,
    END_TXN,
    INCREMENTAL_ALTER_CONFIGS,
    METADATA,
)
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.produce import NodeEndpoint, PartitionResult
from tests.simulation.barriers import Barriers
from tests.simulation.broker import NOT_LEADER, Cluster, LogBatch, Partition, Replica
from tests.simulation.clock import UNIX_MINUS_MONOTONIC, Connection, End, Sim, take_frame
from tests.simulation.commit_validation import AbortOnlyRecords, ValidatorCall
from tests.simulation.listener import ADD_LATER, NOT_ADDED, Listener, read_adds
from tests.simulation.watching import WatchedDispatcher
from tests.support.counting import Counting

if TYPE_CHECKING:
    from tests.simulation.history import History

SHARED = 7000
TOPIC = "orders"
_CLUSTER_ID = "simulated"
_LEASE_SECONDS = 3.0
_POLL_SECONDS = 0.7
_TICK_SECONDS = 0.05
_QUOTA_SECONDS = 0.003
_READ_SECONDS = 2.0
#: Shorter than in the product, like all times here, but longer than a restart takes.
_DEAD_SECONDS = 2.0


LIMITS = sequencers.SequencerLimits(
    queue_max=50, in_flight_max=4, unconfirmed_send_seconds=0.5, resolve_seconds=3.0, queued_seconds=9.0
)


@dataclass(frozen=True)
class Scenario:
    """Parameters of a run. `airtight`: every batch lies at its expected offset. `unviolated`: no live process reports a
    violation.

    `others`: more topics, with one partition and the given check each. `managed`: an admin changes the check of
    `orders` during the run. `barriers`: number of times that the append barriers of `orders` close.
    """

    name: str
    check: Check = Check.REQUIRED
    brokers: int = 1
    min_isr: int = 1
    proxies: int = 1
    partitions: int = 1
    clients: tuple[str, ...] = ("honest", "honest", "chain")
    writes: int = 8
    faults: tuple[str, ...] = ("cut",)
    faults_max: int = 6
    seconds: float = 8.0
    expiration_seconds: float = 86_400.0
    log_append_time: bool = False
    unclean: bool = False
    airtight: bool = True
    unviolated: bool = False
    by_topic_id: bool = True
    slow_requests: float = 0.02
    throttled: float = 0.0
    slow_connections: float = 0.03
    lossy_reads: float = 0.02
    too_large: float = 0.0
    server_errors: float = 0.0
    transactions_v2: bool = False
    transaction_timeout: float = 3.0
    pause_max: float = 5.0
    think_max: float = 0.6
    start_offsets: tuple[int, ...] = (0, 0, 0, (1 << 31) - 9)
    limits: sequencers.SequencerLimits = field(default_factory=lambda: LIMITS)
    refuse_whole_requests: bool = False
    clients_log_in: bool = False
    others: tuple[tuple[str, Check], ...] = ()
    managed: bool = False
    memory_bytes: int = 1 << 24
    read_here_bytes: int = 1 << 20
    takeover_seconds: float = 1.0
    barriers: int = 0
    claims: bool = False


#: Appended to responses that the proxy rewrites.
CHANGED = b"+"
NOT_STORED = b"-"
_API_VERSIONS_MAX = 4


class ModelRewriters:
    """Rewrite some messages, relay or answer others, change checks, and add partitions to transactions."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def begin(self, api_key: int, version: int, frame: memoryview, local_host: str) -> RequestRewriter:
        framed = len(frame).to_bytes(4, "big") + bytes(frame)
        if api_key == API_VERSIONS and version > _API_VERSIONS_MAX:
            return RequestRewriter(None, answer=_framed(bytes(frame[4:8]) + CHANGED))
        if api_key == INCREMENTAL_ALTER_CONFIGS:
            return RequestRewriter(framed, finish=self._altered)
        if api_key == ADD_PARTITIONS_TO_TXN:
            return self._adds(frame, framed)
        if api_key in (API_VERSIONS, METADATA):
            return RequestRewriter(framed, finish=lambda response: Finished(_framed(bytes(response) + CHANGED)))
        return RequestRewriter(framed)

    def _adds(self, frame: memoryview, framed: bytes) -> RequestRewriter:
        transactional_id, _, _, partitions = read_adds(bytes(frame[8:]))
        policies = {name: self._proxy.policy(name.topic) for name in partitions}
        refused = any(p is not None and p.check is Check.REQUIRED for p in policies.values())
        if refused or not self._proxy.fresh(self._proxy.sim.now):
            return RequestRewriter(None, answer=_framed(bytes(frame[4:8]) + NOT_ADDED))
        joins = Joins(transactional_id, tuple(name for name, policy in policies.items() if policy is not None))
        later = _framed(bytes(frame[4:8]) + ADD_LATER)
        finish = lambda response: Finished(_framed(bytes(response)))  # noqa: E731
        return RequestRewriter(framed, finish=finish, joins=joins, answer_later=lambda: later)

    @staticmethod
    def _altered(response: memoryview) -> Finished:
        topic, value = bytes(response[4:]).decode().split("=")
        change = TopicConfigChange(topic, None, {CHECK_EXPECTED_OFFSETS.name: value})
        head = bytes(response[:4])
        return Finished(_framed(head + CHANGED), (change,), lambda error: _framed(head + NOT_STORED))


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


class StateTopic:
    """The compacted state topic. Appends and reads are delayed."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.records: list[StateRecord | None] = []  # None: compacted away
        self.reachable = True
        proposal = UUID(int=sim.rng.getrandbits(128))
        self.records.append(encode_producer_id(proposal, _CLUSTER_ID, ProducerId(SHARED)))


class Proxy(Counting):
    """One proxy process, with restarts, and its `Services`. `start` creates all state that a crash loses."""

    frame_bytes_max = 1 << 20
    in_flight_requests_max = 10
    sequencer_wait_max_seconds = 1.0
    request_timeout_seconds = 3.0
    decompressed_bytes_max = 1 << 20
    state_topic = "__state"
    relayed_versions = relayed_versions_without(frozenset({END_TXN}))
    state_topic_marks = (b"__state",)
    lease_seconds = _LEASE_SECONDS
    requires_confirmation = True

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.sim = world.sim
        self.number = number
        self.header_names = HeaderNames()
        self.refuse_whole_requests = world.scenario.refuse_whole_requests
        self.clients_log_in = world.scenario.clients_log_in
        self.incarnation = 0
        self.paused_until = 0.0
        self.live = False
        self.proxied_connections: dict[int, ProxiedConnection] = {}
        self._next_connection = 0
        self._deferred: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []
        self.start()

    # ---- process

    def start(self) -> None:
        self.live = True
        self.incarnation += 1
        self.free_bytes = self.world.scenario.memory_bytes
        self.read_here_bytes_max = self.world.scenario.read_here_bytes
        self.dispatcher = WatchedDispatcher(
            self,
            ModelRewriters(self),  # type: ignore[arg-type]
            self.world.scenario.limits,
            self.header_names,
            sim=self.sim,
            history=self.world.history,
        )
        self.proxied_connections = {}
        self.transactions = Table(queued_seconds=self.world.scenario.limits.queued_seconds)
        Counting.__init__(self)
        self._view = StateView(_CLUSTER_ID)
        self._instance_id = self.world.next_instance_id()
        self.started_at = self.sim.now
        self.died_at = float("-inf")
        self._takes_over = self.incarnation > 1 or self.number > 0
        self._read_to = 0
        self._fresh_until = float("-inf")
        #: Until then this process reaches no leader of the state topic, or only one that no other replica confirms.
        self.blind_until = float("-inf")
        self._ticking = False
        self._renewing = False
        self._metadata: dict[TopicPartition, tuple[int | None, int, UUID]] = {}
        self.topic_names: dict[UUID, str] = {}
        self.unknown_topic_ids: dict[UUID, float] = {}
        self._policies: dict[str, TopicPolicy | None] = {}
        self._abort_only_records = AbortOnlyRecords(self)
        self.log_append_time = self.world.log_append_time
        self._refreshing = False
        self._refresh_all()
        self.later(self.sim.between(0.01, 0.2), self._poll)
        self.later(2.0, self._housekeeping)

    def crash(self) -> None:
        if not self.live:
            return
        self.sim.log(f"proxy {self.number} crashes")
        self.died_at = self.sim.now
        self.live = False
        self.incarnation += 1
        self._deferred.clear()
        self.paused_until = 0.0
        for proxied in list(self.proxied_connections.values()):
            proxied.client.cut()
            proxied.upstream.cut()

    def pause(self, seconds: float) -> None:
        if self.live:
            self.sim.log(f"proxy {self.number} is paused for {seconds:.2f} s")
            self.paused_until = self.sim.now + seconds
            self.sim.after(seconds, self._resume, self.incarnation)

    def _resume(self, incarnation: int) -> None:
        """Handle deferred events, in order."""
        if incarnation != self.incarnation or self.paused_until > self.sim.now:
            return
        deferred, self._deferred = self._deferred, []
        for fence, call, args in deferred:
            if fence == self.incarnation:
                call(*args)

    @property
    def running(self) -> bool:
        """Also false shortly after a pause, while it catches up."""
        return self.live and not self._deferred and self.paused_until + 1.0 < self.sim.now

    def here(self, call: Callable[..., None], *args: Any) -> None:
        """Call now, when the process resumes, or never."""
        if self.paused_until > self.sim.now or self._deferred:
            self._deferred.append((self.incarnation, call, args))
        else:
            call(*args)

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.sim.after(delay, self._if_same, self.incarnation, call, args)

    def _if_same(self, incarnation: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.live and incarnation == self.incarnation:
            self.here(call, *args)

    # ---- services

    @property
    def shared_producer_ids(self) -> frozenset[int]:
        return self._view.producer_ids.all

    def shared_producer_id(self, number: int) -> int | None:
        return self._view.producer_ids.get(number)

    @property
    def instance_id(self) -> int:
        return self._instance_id

    def alone(self, now: float) -> bool:
        """By heartbeats in the state topic (cluster/state_topic.py)."""
        if self.incarnation > 1 and now - self.started_at < _DEAD_SECONDS:
            return False  # its predecessor may still count as live
        return not any(other.counts_as_live(now) for other in self.world.proxies if other is not self)

    def counts_as_live(self, now: float) -> bool:
        """A started process counts at once: the heartbeats of the one that crashed are not old yet."""
        return self.live or now - self.died_at < _DEAD_SECONDS

    def taken_over(self, now: float) -> bool:
        return not self._takes_over or now - self.started_at > self.world.scenario.takeover_seconds

    def unix_ms(self, now: float) -> int:
        return round((now + UNIX_MINUS_MONOTONIC) * 1000)

    def fresh(self, now: float) -> bool:
        return now < self._fresh_until

    def policy(self, topic: str) -> TopicPolicy | None:
        try:
            return self._policies[topic]
        except KeyError:
            pass
        policy = self._view.topic_policy(topic, self.topic_id(topic), self.world.file_configs)
        found = self._policies[topic] = policy if policy.read else None
        return found

    @property
    def in_doubt_seconds(self) -> float:
        """How long a broker may have an unanswered append queued."""
        return self.world.scenario.limits.queued_seconds

    def barrier(self, topic: str) -> AppendBarrier:
        return self.dispatcher.barrier(topic)

    def new_barrier(self, topic: str) -> AppendBarrier:
        if self.world.barriers is None:
            return super().new_barrier(topic)
        clear_at = self.started_at + self.in_doubt_seconds if self.incarnation > 1 else float("-inf")
        return self.world.barriers.new_barrier(topic, self.in_doubt_seconds, clear_at, self.sim.now)

    @property
    def sequencers(self) -> Dispatcher:
        return self.dispatcher

    def topic_id(self, topic: str) -> UUID | None:
        return next((known[2] for name, known in self._metadata.items() if name.topic == topic), None)

    def leader_epoch(self, partition: TopicPartition) -> int:
        known = self._metadata.get(partition)
        return -1 if known is None else known[1]

    def produce_version_max(self) -> int:
        return 13 if self.world.scenario.by_topic_id else 12

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        return endpoint

    def unread_bytes(self, connection: int) -> int:
        proxied = self.proxied_connections.get(connection)
        return 0 if proxied is None else proxied.received_bytes + proxied.client.to_b.unread_bytes - proxied.fed_bytes

    # ---- connections

    def accept(self, client: End, node: int) -> Connection | None:
        """A client connects to the listener of a broker."""
        if not self.live or not self.world.cluster.brokers[node].live:
            return None
        self._next_connection += 1
        number = self._next_connection
        proxied = ProxiedConnection(self, number, client, node)
        self.proxied_connections[number] = proxied
        self.world.history.proxied_connections[proxied.client] = proxied.answered
        self.dispatcher.open(number, "proxy", self.sim.now)
        return proxied.client

    def report(self, connection: int, event: sessions.Event) -> None:
        self.perform(self.dispatcher.session_event(connection, event, self.sim.now))

    def keep_time(self, session: Session) -> None:
        self.dispatcher.keep_time(session)
        self.perform([])

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ForConnection(connection, command):
                    self._for_connection(connection, command)
                case ForControl():
                    self.sim.log(f"proxy {self.number} queries: {_brief(action.effect)}")
                    ControlCall(self, action).start()
                case Report(finding):
                    self.sim.log(f"proxy {self.number} reports {finding}")
                    self.world.history.reported(finding)
        if not self._ticking and self.dispatcher.needs_ticks:
            self._ticking = True
            self.later(_TICK_SECONDS, self._tick)
        if not self._renewing and self.dispatcher.over_quota:
            self._renewing = True
            self.later(_QUOTA_SECONDS, self._renew_quota)

    def _renew_quota(self) -> None:
        self._renewing = False
        self.perform(self.dispatcher.renew_quota(self.sim.now))

    def _tick(self) -> None:
        self._ticking = False
        self.perform(self.dispatcher.tick(self.sim.now))

    def _for_connection(self, connection: int, command: sessions.Command) -> None:
        proxied = self.proxied_connections.get(connection)
        match command:
            case sessions.TopicStale():
                if not self._refreshing:
                    self._refreshing = True
                    self.later(self.sim.between(0.005, 0.1), self._refresh_all)
            case sessions.Count(what, label):
                if what == "refusal":
                    self.world.history.refusals[label] += 1
            case (
                sessions.Downgraded()
                | sessions.HeadersCopied()
                | sessions.OffsetIgnored()
                | sessions.Throttled()
                | sessions.LateAppends()
            ):
                pass
            case sessions.Store():
                self._store(connection, command)
            case sessions.ReadBatches():
                self.later(self.sim.between(0.0, 0.3), self._read_batches, connection, command)
            case sessions.ValidateCommit():
                ValidatorCall(self, connection, command).start()
            case sessions.RecordAbortOnly():
                self._abort_only_records.record(connection, command)
            case sessions.ClearAbortOnly():
                self._abort_only_records.clear_abort_only(connection, command)
            case _ if proxied is not None:
                proxied.perform(command)

    def _read_batches(self, connection: int, requested: sessions.ReadBatches) -> None:
        if connection in self.proxied_connections:
            requested.read()
        self.report(connection, sessions.BatchesRead(requested.token))

    def topic_ended(self, proxied: ProxiedConnection) -> None:
        self.proxied_connections.pop(proxied.number, None)

    # ---- metadata

    def leader(self, name: TopicPartition) -> tuple[int | None, int, UUID]:
        return self._metadata[name]

    def _refresh(self, name: TopicPartition) -> None:
        """Refresh all partitions of the topic, as Metadata does."""
        known = self._metadata.get(name)
        for each, partition in self.world.cluster.partitions.items():
            if each.topic == name.topic:
                self._metadata[each] = (partition.leader, partition.epoch, partition.topic_id)
        if known is not None and known[2] != self._metadata[name][2]:
            self._policies.pop(name.topic, None)
            self.perform(self.dispatcher.forget_topic(name.topic, self.sim.now))

    def _refresh_all(self) -> None:
        self._refreshing = False
        for name in {name.topic: name for name in self.world.cluster.partitions}.values():
            self._refresh(name)

    def refresh(self, name: TopicPartition) -> None:
        self._refresh(name)

    def _housekeeping(self) -> None:
        self._refresh_all()
        if self.log_append_time != self.world.log_append_time:
            self.log_append_time = self.world.log_append_time
            for topic in self.world.checks:
                self.perform(self.dispatcher.forget_topic(topic, self.sim.now, same_log=True))
        self.later(2.0, self._housekeeping)

    # ---- transactions

    def abort_only_of(self, producer_id: int, producer_epoch: int) -> tuple[AbortOnly, ...]:
        return self._view.abort_only_records.of(producer_id, producer_epoch)

    def read_state(self, done: Callable[[bool], None]) -> None:
        """Read the state topic up to the end that the broker sees."""
        state = self.world.state
        if not state.reachable or self.blind_until > self.sim.now or self.sim.chance(self.world.lossy_reads):
            self.later(_READ_SECONDS, done, False)
            return

        def answered() -> None:
            read_to = len(state.records)
            self.later(self.sim.between(0.001, 0.02), applied, read_to)

        def applied(read_to: int) -> None:
            self._polled(float("-inf"), max(read_to, self._read_to))
            done(True)

        self.sim.after(self.sim.between(0.001, 0.03), answered)

    # ---- the state topic

    def _poll(self) -> None:
        queried_at = self.sim.now
        state = self.world.state
        blind = self.blind_until > queried_at
        if state.reachable and (not blind or not self.requires_confirmation):
            delay = self.sim.between(0.001, 0.05)
            # The response has the records present when the broker handles it. A cut-off leader has an old end.
            self.later(delay, self._polled, queried_at, self._read_to if blind else len(state.records))
        self.later(_POLL_SECONDS, self._poll)

    def _polled(self, queried_at: float, read_to: int) -> None:
        records = self.world.state.records
        changed = set()
        while self._read_to < read_to:
            record = records[self._read_to]
            if record is not None:
                self._view.apply(Offset(self._read_to), record.key, record.value)
                if (name := cleared(record)) is not None:
                    self.transactions.cleared(name)
                kind, _, topic = record.key.decode().partition("/")
                if kind == "topic-config":
                    changed.add(topic)
            self._read_to += 1
        if changed:
            self._policies.clear()
        for topic in sorted(changed):
            self.sim.log(f"proxy {self.number} learns: {topic} is checked for {self.policy(topic)}")
            self.perform(self.dispatcher.forget_topic(topic, self.sim.now))
        self._fresh_until = max(self._fresh_until, queried_at + _LEASE_SECONDS)

    def fence_base(self, topic_id: UUID, partition: int) -> FenceBase:
        return self._view.fence_bases.get(topic_id, partition) or FenceBase(ProducerEpoch(0), LogEndOffset(0))

    @property
    def identity(self) -> str:
        return f"{self.number}.{self.incarnation}"

    def claim_of(self, topic_id: UUID, partition: int) -> sequencers.Claim:
        return sequencers.Claim.of(self._view.fence_bases.claim(topic_id, partition), self.identity)

    def winning_base(self, topic_id: UUID, partition: int, epoch: int) -> bytes | None:
        return self._view.fence_bases.proposal(topic_id, partition, ProducerEpoch(epoch))

    def publish(self, record: StateRecord, done: Callable[[bool], None]) -> None:
        """Store and read back. False means unknown: the record may be stored, now or later."""
        state = self.world.state
        lost = self.sim.chance(self.world.lossy_reads)
        if not state.reachable or self.blind_until > self.sim.now or (lost and self.sim.chance(0.5)):
            self.later(_READ_SECONDS if not state.reachable else 0.05, done, False)
            return

        def store() -> None:
            state.records.append(record)
            if not lost:
                self.later(self.sim.between(0.001, 0.02), stored, len(state.records))

        def stored(read_to: int) -> None:
            self._polled(float("-inf"), max(read_to, self._read_to))
            done(True)

        self.sim.after(self.sim.between(0.001, 0.05), store)
        if lost:
            self.later(_READ_SECONDS, done, False)

    def _store(self, connection: int, store: sessions.Store) -> None:
        """Acknowledge a check only after the lease, as server.py does."""
        changes = [replace(change, topic_id=self.topic_id(change.topic or "")) for change in store.changes]

        def report(error: str | None) -> None:
            failure = None if error is None else NotStored(error)
            self.report(connection, sessions.Stored(store.token, failure))

        def published(ok: bool) -> None:
            if ok:
                self.later(self.lease_seconds, report, None)
            else:
                report("the state topic cannot be reached")

        records = self._view.records_of(changes)
        if records:
            self.publish(records[0], published)
        else:
            published(True)  # already stored: other processes may not know it yet


class _Side(End):
    def __init__(self, proxied: ProxiedConnection, *, client: bool) -> None:
        self._proxied = proxied
        self._client = client

    def data(self, data: bytes) -> None:
        proxy = self._proxied.proxy
        if proxy.live and self._proxied.incarnation == proxy.incarnation:
            if self._client:
                self._proxied.received_bytes += len(data)
            proxy.here(self._proxied.data, data, self._client)

    def lost(self) -> None:
        proxy = self._proxied.proxy
        if proxy.live and self._proxied.incarnation == proxy.incarnation:
            proxy.here(self._proxied.lost, self._client)


def _spliced(data: bytes, passing_bytes: int) -> int:
    """Number of bytes to splice: all or none, depending on the length."""
    return 0 if len(data) % 2 else min(passing_bytes, len(data))


class ProxiedConnection:
    """A client connection and its own upstream connection (transport/proxied_connection.py)."""

    def __init__(self, proxy: Proxy, number: int, client: End, node: int) -> None:
        sim, cluster = proxy.sim, proxy.world.cluster
        self.proxy = proxy
        self.number = number
        self.incarnation = proxy.incarnation
        self.client = Connection(sim, proxy.world.delay, client, _Side(self, client=True))
        broker = Listener(cluster, node)
        self.upstream = Connection(sim, proxy.world.delay, _Side(self, client=False), broker)
        broker.connection = self.upstream
        cluster.brokers[node].sides.append(broker)
        self._closed = {True: False, False: False}
        self.received_bytes = 0  # received from the client by the socket; `fed_bytes`: by the session
        self.fed_bytes = 0
        #: By correlation id: bytes that the client had sent when its response left.
        self.answered: dict[int, int] = {}
        self._answers = bytearray()

    def data(self, data: bytes, client: bool) -> None:
        if client:
            self.fed_bytes += len(data)
        if self._closed[client]:
            return
        session = self.proxy.dispatcher.sessions.get(self.number)
        if session is None:
            return
        now = self.proxy.sim.now
        if client:
            taken, out = session.fast_path.take_up(memoryview(data), now)
            if taken:
                self.upstream.to_b.write(b"".join(out))
                if session.needs_ticks:
                    self.proxy.keep_time(session)
                data = data[taken:]
            spliced = _spliced(data, session.state.client.unseen_bytes)
            if spliced:
                self.upstream.to_b.write(data[:spliced])
                self.proxy.report(self.number, sessions.ClientPassed(spliced))
            if data[spliced:]:
                self.proxy.report(self.number, sessions.ClientBytes(memoryview(data[spliced:])))
        else:
            taken, out = session.fast_path.take_down(memoryview(data), now)
            if taken:
                self._answer(b"".join(out))
                data = data[taken:]
            spliced = _spliced(data, session.state.upstream.unseen_bytes)
            if spliced:
                self._answer(data[:spliced])
                self.proxy.report(self.number, sessions.UpstreamPassed(spliced))
            if data[spliced:]:
                self.proxy.report(self.number, sessions.UpstreamBytes(memoryview(data[spliced:])))

    def _answer(self, data: bytes) -> None:
        self._note_answers(data)
        self.client.to_a.write(data)

    def lost(self, client: bool) -> None:
        if not self._closed[client]:
            self._closed[client] = True
            self.proxy.report(self.number, sessions.ClientLost() if client else sessions.UpstreamLost("it broke"))
            if all(self._closed.values()):
                self.proxy.topic_ended(self)

    def _note_answers(self, data: bytes) -> None:
        self._answers += data
        while (frame := take_frame(self._answers)) is not None:
            number = int.from_bytes(frame[:4], "big", signed=True)
            self.answered[number] = self.fed_bytes + self.proxy.unread_bytes(self.number)

    def perform(self, command: sessions.Command) -> None:
        match command:
            case sessions.ToClient(chunks):
                self._answer(b"".join(chunks))
            case sessions.ToUpstream(chunks):
                self.upstream.to_b.write(b"".join(chunks))
            case sessions.ReadClient(on):
                self.client.to_b.hold(not on)
            case sessions.ReadUpstream(on):
                self.upstream.to_a.hold(not on)
            case sessions.CloseClient(reason, fault):
                self.proxy.sim.log(f"proxy {self.proxy.number} closes connection {self.number}: {reason}")
                self.proxy.world.history.closed(reason, fault)
                self.client.close("b")
            case sessions.CloseUpstream():
                self.upstream.close("a")
            case _:
                raise AssertionError(command)


class ControlCall:
    """One request of a sequencer to the control client (services/log_reader.py, cluster/)."""

    def __init__(self, proxy: Proxy, requested: ForControl) -> None:
        self.proxy = proxy
        self.requested = requested
        self.deadline = proxy.sim.now + _READ_SECONDS
        self.queried_at = proxy.sim.now
        self.node = 0
        self.epoch = 0
        self.topic_id = UUID(int=0)
        self._brokers_incarnation = 0
        self._incarnation = proxy.incarnation
        self._ended: frozenset[str] = frozenset()
        self._ending: frozenset[str] = frozenset()
        self._transactions_as_of = float("-inf")
        self._producer_ids: dict[str, int] = {}

    @property
    def partition(self) -> Partition:
        return self.proxy.world.cluster.partitions[self.requested.partition]

    def start(self) -> None:
        effect = self.requested.effect
        if isinstance(effect, sequencers.PublishBase):
            self._publish(effect)
        elif isinstance(effect, sequencers.Resend):
            self._resend(effect)
        else:
            self._once()

    def _once(self) -> None:
        """Query the leader in metadata, which may not lead."""
        self.queried_at = self._transactions_as_of = self.proxy.sim.now
        leader, self.epoch, self.topic_id = self.proxy.leader(self.requested.partition)
        if leader is None or self.proxy.sim.chance(self.proxy.world.lossy_reads):
            self._again("no leader, or no connection")
            return
        self.node = leader
        self._brokers_incarnation = self.proxy.world.cluster.brokers[leader].incarnation
        effect = self.requested.effect
        if isinstance(effect, sequencers.ReadBatch):
            self._step(self._fetch, effect)
        elif isinstance(effect, sequencers.ReadLogEnd) and effect.transactional_ids:
            self._step(self._transactions, effect.transactional_ids)
        else:
            self._step(self._end_before)

    def _again(self, reason: str) -> None:
        if self.proxy.incarnation != self._incarnation:
            return
        if self.proxy.sim.now + 0.05 >= self.deadline:
            self._failed(reason)
        else:
            self.proxy.later(self.proxy.sim.between(0.02, 0.1), self._retry)

    def _retry(self) -> None:
        self.proxy.refresh(self.requested.partition)
        self._once()

    def _failed(self, reason: str) -> None:
        effect = self.requested.effect
        if isinstance(effect, sequencers.ReadBatch):
            self._report(sequencers.BatchRead(effect.pending, sequencers.Unreadable(reason)))
        else:
            self._report(sequencers.LogEndUnknown(reason))

    def _step(self, call: Callable[..., None], *args: Any) -> None:
        """Let the broker handle it later; a dead one never answers."""
        sim = self.proxy.sim
        broker = self.proxy.world.cluster.brokers[self.node]
        wait = max(0.0, broker.paused_until - sim.now)
        if not broker.live or broker.incarnation != self._brokers_incarnation:
            self._again("the broker is down")
        elif wait > 0:
            if sim.now + wait < self.deadline:
                sim.after(wait, self._at_broker, call, args)
            else:
                self.proxy.later(max(0.0, self.deadline - sim.now), self._failed, "the broker does not answer")
        else:
            sim.after(sim.between(0.0003, 0.004), self._at_broker, call, args)

    def _at_broker(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        broker = self.proxy.world.cluster.brokers[self.node]
        if broker.incarnation != self._brokers_incarnation or not broker.live:
            self._again("the broker is down")
        elif broker.paused_until > self.proxy.sim.now:
            self._step(call, *args)
        else:
            call(*args)

    def _transactions(self, transactional_ids: tuple[str, ...]) -> None:
        """Query coordinators: is the transaction still on the partition, markers included?"""
        world = self.proxy.world
        self._ended = self._ending = frozenset()
        for transactional_id in transactional_ids:
            producer_id = world.transactional_ids.get(transactional_id, -1)
            transaction = world.cluster.transactions.get(producer_id)
            preparing = transaction is not None and transaction.state.startswith("Prepare")
            self._producer_ids[transactional_id] = -1 if preparing else producer_id
            on = transaction is not None and self.requested.partition in transaction.partitions
            if not on and (transaction is None or not transaction.markers_due):
                self._ended |= {transactional_id}
            elif preparing:
                self._ending |= {transactional_id}
        self._step(self._end_before)

    def _leads(self) -> bool:
        return self.proxy.world.cluster.leads(self.node, self.partition, self.epoch)

    def _end_before(self) -> None:
        if not self._leads():
            self._again("not the leader of that epoch")
        else:
            self._step(self._producers, self.partition, self.log_end(self.partition))

    def log_end(self, partition: Partition) -> int:
        """OffsetForLeaderEpoch, for the current epoch."""
        return partition.replicas[self.node].log_end

    def _producers(self, partition: Partition, before: int) -> None:
        replica = partition.replicas[self.node]
        states = {
            producer: sequencers.ProducerState(known.epoch, (known.last_sequence + 1) % SEQUENCE_MODULUS)
            for producer, known in replica.producers.items()
        }
        in_transaction = {
            producer: sequencers.ProducerState(known.epoch, (known.last_sequence + 1) % SEQUENCE_MODULUS)
            for producer, known in replica.producers.items()
            if known.transaction_start is not None
        }
        self._step(self._end_after, partition, before, states, in_transaction)

    def _end_after(
        self,
        partition: Partition,
        before: int,
        states: dict[int, sequencers.ProducerState],
        in_transaction: dict[int, sequencers.ProducerState],
    ) -> None:
        proxy = self.proxy
        if partition is not self.partition or not self._leads():
            self._again("not the leader of that epoch")
            return
        end = self.log_end(partition)
        if end != before:
            proxy.later(proxy.world.delay(), self._report, sequencers.LogEndUnknown("the log moved while it was read"))
            return
        snapshot = sequencers.LogEndSnapshot(
            requested_at=self.queried_at,
            log_end_offset=end,
            log_start_offset=partition.replicas[self.node].log_start,
            producer_id=-1,
            producer_state=None,
            fence_base=(0, 0),
            open_transactions=frozenset(in_transaction),
            in_transaction=in_transaction,
            ended_transactions=self._ended,
            ending_transactions=self._ending,
            transactions_as_of=self._transactions_as_of,
            producer_ids=dict(self._producer_ids),
            log_append_time=proxy.log_append_time,
            leader_epoch=self.epoch,
            expiration_seconds=proxy.world.scenario.expiration_seconds,
            clock_offset_seconds=UNIX_MINUS_MONOTONIC,
        )
        proxy.later(proxy.world.delay(), self._snapshot_came, snapshot, states)

    def _snapshot_came(self, snapshot: sequencers.LogEndSnapshot, states: dict[int, sequencers.ProducerState]) -> None:
        proxy = self.proxy
        at = proxy.leader(self.requested.partition)[2], self.requested.partition.partition
        base, claim = proxy.fence_base(*at), proxy.claim_of(*at)
        epochs = proxy.world.scenario.limits.producer_epochs
        number = base.producer_epoch // epochs
        producer_id = proxy.shared_producer_id(number)
        if producer_id is None:
            self._report(sequencers.LogEndUnknown("no producer id is agreed on yet"))
            return
        state = states.get(producer_id)
        if state is not None:
            state = replace(state, producer_epoch=number * epochs + state.producer_epoch)
        proxy.sim.log(f"proxy {proxy.number} reads end {snapshot.log_end_offset}, state {state}, base {base}")
        known = replace(
            snapshot,
            fence_base=(base.producer_epoch, base.base),
            claim=claim,
            marker_is_replicated=claim is sequencers.Claim.NONE
            or state != sequencers.ProducerState(base.producer_epoch, 0)
            or self._is_replicated(snapshot.log_end_offset),
            may_claim=proxy.world.scenario.claims,
            producer_id=producer_id,
            producer_state=state,
        )
        self._report(sequencers.LogEndRead(known))

    def _is_replicated(self, end: int) -> bool:
        return self._leads() and self.partition.replicas[self.node].high_watermark >= end

    def _fetch(self, probe: sequencers.ReadBatch) -> None:
        """Read up to the high watermark, as a consumer does."""
        proxy, partition = self.proxy, self.partition
        if self.topic_id != partition.topic_id or not self._leads():
            self._again("not the leader of that epoch")
            return
        replica = partition.replicas[self.node]
        if probe.offset < replica.log_start:
            result: sequencers.BatchReadResult = sequencers.OutOfRange()
        elif probe.offset >= replica.high_watermark:
            self._step(self._end_for_read, probe, partition)
            return
        else:
            batch = replica.batch_at(probe.offset)
            result = sequencers.OutOfRange() if batch is None else sequencers.Found(memoryview(batch.data))
        proxy.later(proxy.world.delay(), self._report, sequencers.BatchRead(probe.pending, result))

    def _end_for_read(self, probe: sequencers.ReadBatch, partition: Partition) -> None:
        proxy = self.proxy
        if partition is not self.partition or not self._leads():
            self._again("not the leader of that epoch")
            return
        result = sequencers.NotYet(self.log_end(partition))
        proxy.later(proxy.world.delay(), self._report, sequencers.BatchRead(probe.pending, result))

    def _resend(self, effect: sequencers.Resend) -> None:
        """Resend an append once; its response may be lost."""
        proxy, partition = self.proxy, self.partition
        node, _, topic_id = proxy.leader(self.requested.partition)
        if node is None or not proxy.world.cluster.brokers[node].live or proxy.sim.chance(proxy.world.lossy_reads):
            proxy.later(0.05, self._report, sequencers.Resent(effect.pending, None))
            proxy.later(0.05, proxy.refresh, self.requested.partition)
            return
        reported: list[bool] = []
        cluster = proxy.world.cluster

        def report(result: sequencers.Resent) -> None:
            if not reported:
                reported.append(True)
                if result.result is not None and result.result.error_code == NOT_LEADER:
                    proxy.refresh(self.requested.partition)
                self._report(result)

        def handled() -> None:
            if partition.topic_id != topic_id or partition.deleted:
                return
            records = bytes(batch_to_send(effect.pending))
            cluster.append(node, partition, records, answered, acks=-1, timeout_ms=2000)

        def answered(result: PartitionResult) -> None:
            here = replace(result, partition=partition.name.partition)
            proxy.later(proxy.world.delay(), report, sequencers.Resent(effect.pending, here))

        cluster.queue(node, cluster.brokers[node].incarnation, handled)
        proxy.later(3.0, report, sequencers.Resent(effect.pending, None))

    def _publish(self, effect: sequencers.PublishBase) -> None:
        proxy = self.proxy
        topic_id = proxy.leader(self.requested.partition)[2]
        record = encode_fence_base(
            topic_id,
            effect.partition.partition,
            ProducerEpoch(effect.producer_epoch),
            UUID(int=proxy.sim.rng.getrandbits(128)),
            LogEndOffset(effect.base),
            claim=effect.claim.stored(proxy.identity),
        )

        number, epoch = divmod(effect.producer_epoch, proxy.world.scenario.limits.producer_epochs)

        def acquired(ok: bool) -> None:
            if ok:
                proxy.publish(record, published)
            else:
                self._report(sequencers.BasePublished(False))

        def published(ok: bool) -> None:
            won = proxy.winning_base(topic_id, effect.partition.partition, effect.producer_epoch)
            ours = ok and won == record.key
            report = functools.partial(self._report, sequencers.BasePublished(ok, ours=ours))
            if ours and effect.claim is not sequencers.Claim.NONE:
                self._write_marker(proxy.shared_producer_id(number), epoch, report)
            else:
                report()

        if proxy.shared_producer_id(number) is not None:
            proxy.publish(record, published)
            return
        proposal, producer_id = UUID(int=proxy.sim.rng.getrandbits(128)), ProducerId(SHARED * 10 + number)
        proxy.publish(encode_producer_id(proposal, _CLUSTER_ID, producer_id, number), acquired)

    def _write_marker(self, producer_id: int | None, epoch: int, done: Callable[[], None]) -> None:
        """Once. It may be lost, its answer too, and it may be late."""
        proxy, partition = self.proxy, self.partition
        node, _, topic_id = proxy.leader(self.requested.partition)
        cluster, answered = proxy.world.cluster, [False]

        def answer(_: int) -> None:
            if not answered[0]:
                answered[0] = True
                proxy.later(proxy.world.delay(), done)

        def handled() -> None:
            if partition.topic_id == topic_id and not partition.deleted:
                assert producer_id is not None
                cluster.write_marker(node, partition, producer_id, epoch, answer)

        proxy.later(_READ_SECONDS, answer, 0)
        if node is None or producer_id is None or proxy.sim.chance(proxy.world.lossy_reads):
            return
        queued = functools.partial(cluster.queue, node, cluster.brokers[node].incarnation, handled)
        late = (
            proxy.sim.between(0.0, 2 * _READ_SECONDS) if proxy.sim.chance(proxy.world.scenario.slow_requests) else 0.0
        )
        proxy.sim.after(late, queued)

    def _report(self, event: sequencers.Event) -> None:
        if self.proxy.live and self._incarnation == self.proxy.incarnation:
            self.proxy.here(self._deliver, event)

    def _deliver(self, event: sequencers.Event) -> None:
        proxy = self.proxy
        if proxy.sim.tracing and isinstance(event, (sequencers.BatchRead, sequencers.Resent, sequencers.LogEndUnknown)):
            proxy.sim.log(f"proxy {proxy.number} gets {_brief(event)}")
        proxy.perform(proxy.dispatcher.sequencer_event(self.requested.partition, event, proxy.sim.now))


def _brief(what: object) -> str:
    match what:
        case sequencers.ReadBatch(pending, offset):
            return f"look at {offset} (its batch is sent at {pending.placement.at})"
        case sequencers.BatchRead(_, result):
            end = f" {result.log_end_offset}" if isinstance(result, sequencers.NotYet) else ""
            return f"{type(result).__name__}{end}"
        case sequencers.Resent(_, result):
            return f"resent: {result}"
        case sequencers.Resend():
            return "resend"
        case _:
            return str(what)


def _without_records(batch: LogBatch) -> LogBatch:
    """The last batch of a producer after compaction: only its header."""
    data = bytearray(batch.data[:61])
    struct.pack_into(">i", data, 8, 61 - 12)
    struct.pack_into(">i", data, 57, 0)
    struct.pack_into(">I", data, 17, crc32c.crc32c(bytes(data[21:])))
    return replace(batch, data=bytes(data), header=batch.header._replace(record_count=0))


class World:
    """The state of one run."""

    def __init__(self, scenario: Scenario, seed: int, history: History, *, tracing: bool = False) -> None:
        self.scenario = scenario
        self.sim = sim = Sim(seed, tracing=tracing)
        self.history = history
        self.lossy_reads = scenario.lossy_reads
        self.log_append_time = scenario.log_append_time
        self.cluster = Cluster(
            sim,
            broker_count=scenario.brokers,
            min_isr=scenario.min_isr,
            expiration_seconds=scenario.expiration_seconds,
            log_append_time=scenario.log_append_time,
            unclean=scenario.unclean,
            slow_requests=scenario.slow_requests,
            throttled=scenario.throttled,
            too_large=scenario.too_large,
            server_errors=scenario.server_errors,
            transactions_v2=scenario.transactions_v2,
        )
        start = sim.rng.choice(scenario.start_offsets)
        self.checks = {TOPIC: scenario.check, **dict(scenario.others)}
        self.names = [TopicPartition(TOPIC, number) for number in range(scenario.partitions)]
        self.names += [TopicPartition(topic, 0) for topic, _ in scenario.others]
        topic_ids = {topic: UUID(int=sim.rng.getrandbits(128)) for topic in self.checks}
        for name in self.names:
            self.cluster.create(name, start).topic_id = topic_ids[name.topic]
        self._instance_ids = 0
        self.transactional_ids = self.cluster.transactional_ids
        self.state = StateTopic(sim)
        self.barriers: Barriers | None = None
        self.proxies = [Proxy(self, number) for number in range(scenario.proxies)]
        self.quiet = False
        if scenario.barriers:
            self.barriers = Barriers(self, TOPIC, scenario.barriers)
        sim.after(0.5, self._control_tick)

    def file_configs(self, topic: str) -> dict[str, str]:
        """The configuration files set the checks, unless an admin does."""
        if topic == TOPIC and self.scenario.managed:
            return {}
        configs = {CHECK_EXPECTED_OFFSETS.name: self.checks[topic].value} if topic in self.checks else {}
        if topic == TOPIC and self.scenario.barriers:
            configs[ORDERED_PARTITION_EXPANSION.name] = "true"
        return configs

    def next_instance_id(self) -> int:
        self._instance_ids += 1
        return self._instance_ids

    def delay(self) -> float:
        """Delay of one chunk of a stream."""
        if self.sim.chance(self.scenario.slow_connections) and not self.quiet:
            return self.sim.between(0.02, 0.4)
        return self.sim.between(0.0002, 0.003)

    def _control_tick(self) -> None:
        self.cluster.control_tick()
        self.cluster.abort_old_transactions(self.scenario.transaction_timeout)
        self.sim.after(0.5, self._control_tick)

    # ---- faults

    def schedule_faults(self) -> None:
        rng = self.sim.rng
        for _ in range(rng.randrange(self.scenario.faults_max + 1)):
            kind = rng.choice(self.scenario.faults)
            self.sim.after(self.sim.between(0.05, self.scenario.seconds), getattr(self, f"_fault_{kind}"))

    def heal(self) -> None:
        """End all faults."""
        self.sim.log("all faults end")
        self.quiet = True
        self.lossy_reads = 0.0
        self.cluster.slow_requests = self.cluster.throttled = self.cluster.too_large = self.cluster.server_errors = 0.0
        self.state.reachable = True
        for proxy in self.proxies:
            proxy.blind_until = float("-inf")
        for node, broker in enumerate(self.cluster.brokers):
            broker.paused_until = min(broker.paused_until, self.sim.now)
            self.cluster.restart(node)
        for proxy in self.proxies:
            if not proxy.live:
                proxy.start()

    def _proxied_connections(self) -> list[ProxiedConnection]:
        return [proxied for proxy in self.proxies if proxy.live for proxied in proxy.proxied_connections.values()]

    def _fault_cut(self) -> None:
        proxied_connections = self._proxied_connections()
        if proxied_connections:
            proxied = self.sim.rng.choice(proxied_connections)
            side = proxied.upstream if self.sim.chance(0.6) else proxied.client
            self.sim.log(f"a connection of proxy {proxied.proxy.number} is cut ({proxied.number})")
            side.cut()

    def _fault_snip(self) -> None:
        """Cut a client connection, but not its broker connection."""
        proxied_connections = self._proxied_connections()
        if proxied_connections:
            proxied = self.sim.rng.choice(proxied_connections)
            self.sim.log(f"a client of proxy {proxied.proxy.number} is cut off ({proxied.number})")
            proxied.client.cut()

    def _fault_kill(self) -> None:
        node = self.sim.rng.randrange(len(self.cluster.brokers))
        if self.cluster.brokers[node].live and not self.quiet:
            self.cluster.kill(node)
            self.sim.after(self.sim.between(0.05, 3.0), self.cluster.restart, node)

    def _fault_lose(self, tries: int = 400, end: int = -1) -> None:
        """Just after an append, cut off all clients and kill the broker, which restarts without its last records."""
        partition, broker = self.cluster.partitions[self.names[0]], self.cluster.brokers[0]
        replica = partition.replicas[0]
        if not broker.live or self.quiet or not replica.batches:
            return
        if end < 0 or replica.log_end <= end:
            if tries:
                self.sim.after(0.005, self._fault_lose, tries - 1, replica.log_end)
            return
        self.sim.after(self.sim.between(0.0, 0.006), self._lose, partition, broker.incarnation)

    def _lose(self, partition: Partition, incarnation: int) -> None:
        broker, replica = self.cluster.brokers[0], partition.replicas[0]
        if broker.incarnation != incarnation:
            return
        for proxied in self._proxied_connections():
            proxied.client.cut()
        self.cluster.kill(0)
        kept = replica.batches[-min(len(replica.batches), self.sim.rng.randint(1, 3))].base
        replica.truncate(max(kept, replica.log_start))
        partition.lost_by_unclean, partition.lost_at = True, self.sim.now
        self.sim.log(f"the log has lost its last records and ends at {replica.log_end}")
        self.sim.after(self.sim.between(0.05, 0.5), self.cluster.restart, 0)

    def _fault_pause(self) -> None:
        node = self.sim.rng.randrange(len(self.cluster.brokers))
        if self.cluster.brokers[node].live and not self.quiet:
            self.cluster.pause(node, self.sim.between(0.1, self.scenario.pause_max))

    def _fault_move(self) -> None:
        if not self.quiet:
            name = self.sim.rng.choice(self.names)
            self.cluster.elect(self.cluster.partitions[name], prefer_other=True)

    def _fault_crash(self) -> None:
        proxy = self.sim.rng.choice(self.proxies)
        if proxy.live and not self.quiet:
            proxy.crash()
            self.sim.after(self.sim.between(0.05, 1.5), self._start_again, proxy)

    @staticmethod
    def _start_again(proxy: Proxy) -> None:
        if not proxy.live:
            proxy.start()

    def _fault_freeze(self) -> None:
        if not self.quiet:
            self.sim.rng.choice(self.proxies).pause(self.sim.between(0.1, 4.0))

    def _fault_expire(self) -> None:
        self.cluster.expire_producers()

    def _fault_delete(self) -> None:
        name = self.sim.rng.choice(self.names)
        partition = self.cluster.partitions[name]
        if partition.leader is None:
            return
        leader = partition.replicas[partition.leader]
        ends = [b.end for b in leader.batches if leader.log_start < b.end <= leader.high_watermark]
        if ends:
            leader.log_start = self.sim.rng.choice(ends)
            self.sim.log(f"{name}: records before {leader.log_start} are deleted")

    def _fault_recreate(self) -> None:
        if not self.quiet:
            topic = self.sim.rng.choice(self.names).topic
            topic_id = UUID(int=self.sim.rng.getrandbits(128))
            for name in self.names:
                if name.topic == topic:
                    self.cluster.recreate(name)
                    self.cluster.partitions[name].topic_id = topic_id

    def _fault_state(self) -> None:
        """Make the state topic unreachable for some time."""
        self.state.reachable = False
        self.sim.after(self.sim.between(0.5, 5.0), setattr, self.state, "reachable", True)

    def _fault_roll(self) -> None:
        """Restart processes one after the other."""
        if not self.quiet:
            at = 0.0
            for proxy in self.proxies:
                self.sim.after(at, proxy.crash)
                at += self.sim.between(0.05, 1.0)
                self.sim.after(at, self._start_again, proxy)
                at += self.sim.between(0.0, 0.5)

    def _fault_zombie(self) -> None:
        """Pause a process beyond every timeout."""
        if not self.quiet:
            self.sim.rng.choice(self.proxies).pause(self.sim.between(4.0, 9.0))

    def _fault_hang(self) -> None:
        """Pause a broker beyond every timeout, with its queue."""
        node = self.sim.rng.randrange(len(self.cluster.brokers))
        if self.cluster.brokers[node].live and not self.quiet:
            self.cluster.pause(node, self.sim.between(6.0, 12.0))

    def _fault_compact(self) -> None:
        """Compact logs: batches vanish or lose their records, offsets and each live producer's last batch stay.

        Only below every high watermark, and never the newest batches (active segment).
        """
        rng = self.sim.rng
        partition = self.cluster.partitions[rng.choice(self.names)]
        replicas = list(partition.replicas.values())
        low = min(replica.high_watermark for replica in replicas)
        shared = set.intersection(*({(b.base, b.leader_epoch) for b in replica.batches[:-1]} for replica in replicas))
        last = {k.batches[-1][2] for replica in replicas for k in replica.producers.values() if k.batches}
        doomed = {base for base, _ in sorted(shared) if base < low and rng.random() < 0.6}
        emptied = doomed & last
        for replica in replicas:
            kept = []
            for each in replica.batches:
                if each.base in doomed and each.end <= low:
                    if replica is replicas[0] and each.header.record_count:
                        self.history.compacted.append((partition, each))
                    if each.base in emptied:
                        kept.append(_without_records(each))
                else:
                    kept.append(each)
            replica.batches = kept
        self.sim.log(f"{partition.name}: {sorted(doomed - emptied)} are compacted away, {sorted(emptied)} emptied")

    def _fault_tidy(self) -> None:
        """Compact the state topic."""
        observed: set[bytes] = set()
        records = self.state.records
        for at in range(len(records) - 1, -1, -1):
            record = records[at]
            if record is not None and record.key in observed:
                records[at] = None
            elif record is not None:
                observed.add(record.key)

    def _fault_reassign(self) -> None:
        """Let a follower replica restart at the log start, with the producers found there, and make it the leader."""
        if self.quiet:
            return
        name = self.sim.rng.choice(self.names)
        partition = self.cluster.partitions[name]
        others = [node for node in partition.isr if node != partition.leader and self.cluster.brokers[node].live]
        if partition.leader is None or not others:
            return
        node = self.sim.rng.choice(others)
        old = partition.replicas[node]
        partition.replicas[node] = new = Replica(old.log_start, log_append_time=old.log_append_time)
        new.batches, new.log_end, new.high_watermark = list(old.batches), old.log_end, old.high_watermark
        new.reload_producers(0, self.sim.unix_ms, self.cluster.expiration_ms)
        self.sim.log(f"broker {node} {name}: starts again at {new.log_start}")
        self.sim.after(self.sim.between(0.1, 1.0), functools.partial(self.cluster.elect, partition, prefer_other=True))

    def _fault_retype(self) -> None:
        """Change message.timestamp.type during the run; proxies read it at intervals."""
        self.log_append_time = not self.log_append_time
        self.sim.log(f"log append time: {self.log_append_time}")
        for partition in self.cluster.partitions.values():
            for replica in partition.replicas.values():
                replica.log_append_time = self.log_append_time

    def _fault_blind(self) -> None:
        """Make the state topic unreachable for one process."""
        if not self.quiet:
            self.sim.rng.choice(self.proxies).blind_until = self.sim.now + self.sim.between(0.5, 6.0)

    def _fault_propose(self) -> None:
        """Append a late proposal of a shared producer id. The first one wins."""
        proposal = UUID(int=self.sim.rng.getrandbits(128))
        late = ProducerId(SHARED + 1 + len(self.state.records))
        self.state.records.append(encode_producer_id(proposal, _CLUSTER_ID, late))

    def _fault_purge(self) -> None:
        """Delete all records up to the high watermark."""
        name = self.sim.rng.choice(self.names)
        partition = self.cluster.partitions[name]
        if partition.leader is not None:
            leader = partition.replicas[partition.leader]
            leader.log_start = max(
                leader.log_start, leader.high_watermark
            )  # follower_replicas learn it when they fetch
            self.sim.log(f"{name}: records before {leader.log_start} are deleted")
