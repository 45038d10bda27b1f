"""One simulated deployment: brokers, proxy processes, the network between them, and the faults that befall them.

A proxy process here is the real `Switch`, with its real sessions and gates; what `net/` does with sockets, tasks and
the control client is modelled, delays and failures included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fencepost_policies.append import Check
from fencepost_proxy.partitions import events as gates
from fencepost_proxy.session import messages as sessions
from fencepost_proxy.session.exchange import Exchange
from fencepost_proxy.session.switch import Action, ForConnection, ForControl, Report, Switch
from fencepost_proxy.topics.state import StateRecord, StateView, encode_producer_id, encode_stamp_base
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import SEQUENCE_MODULUS, LogEndOffset, Offset, ProducerEpoch, ProducerId, TopicPartition
from fencepost_proxy.wire.batch import HeaderNames, zero_base_offset
from fencepost_proxy.wire.produce import NodeEndpoint, PartitionResult
from tests.simulation.broker import NOT_LEADER, BrokerSide, Cluster, Partition
from tests.simulation.clock import WALL_MINUS_MONOTONIC, Connection, End, Sim

if TYPE_CHECKING:
    from tests.simulation.history import History

SHARED = 7000
TOPIC = "orders"
_CLUSTER_ID = "simulated"
_LEASE_SECONDS = 3.0
_POLL_SECONDS = 0.7
_TICK_SECONDS = 0.05
_READ_SECONDS = 2.0
_MEMORY_BYTES = 1 << 24


@dataclass(frozen=True)
class Scenario:
    """What a run is made of. `airtight`: no batch may ever lie elsewhere than it expected."""

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
    by_topic_id: bool = True
    slow_requests: float = 0.02
    lossy_reads: float = 0.02
    too_large: float = 0.0
    transactions_v2: bool = False
    pause_max: float = 5.0
    think_max: float = 0.6
    start_offsets: tuple[int, ...] = (0, 0, 0, (1 << 31) - 9)
    limits: gates.GateLimits = field(
        default_factory=lambda: gates.GateLimits(
            queue_max=50, in_flight_max=4, cold_send_seconds=0.5, settle_seconds=3.0
        )
    )
    refuse_whole_requests: bool = False


class NoExchanges:
    """Only Produce is spoken here."""

    def begin(self, api_key: int, version: int, frame: memoryview, local_host: str) -> Exchange:
        raise AssertionError(f"API {api_key} in a simulation of Produce")


class StateTopic:
    """The compacted state topic: appended to with a delay, followed by each proxy with another."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.records: list[StateRecord] = []
        self.reachable = True
        proposal = UUID(int=sim.rng.getrandbits(128))
        self.records.append(encode_producer_id(proposal, _CLUSTER_ID, ProducerId(SHARED)))


class Proxy:
    """One proxy process, restarts included: what must not survive a crash is made anew by `start`.

    Also its `Surroundings`: what sessions ask of the process.
    """

    frame_bytes_max = 1 << 20
    in_flight_requests_max = 10
    gate_wait_max_seconds = 1.0
    request_timeout_seconds = 3.0
    decompressed_bytes_max = 1 << 20
    state_topic = "__state"

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.sim = world.sim
        self.number = number
        self.header_names = HeaderNames()
        self.refuse_whole_requests = world.scenario.refuse_whole_requests
        self.incarnation = 0
        self.paused_until = 0.0
        self.alive = False
        self.links: dict[int, Link] = {}
        self._next_connection = 0
        self._deferred: list[tuple[int, Callable[..., None], tuple[Any, ...]]] = []
        self.start()

    # ---- life

    def start(self) -> None:
        self.alive = True
        self.incarnation += 1
        self.free_bytes = _MEMORY_BYTES
        self.switch = Switch(self, NoExchanges(), self.world.scenario.limits, self.header_names)  # type: ignore[arg-type]
        self.links = {}
        self._view = StateView(_CLUSTER_ID)
        self._read_to = 0
        self._fresh_until = float("-inf")
        self._ticking = False
        self._metadata: dict[TopicPartition, tuple[int | None, int, UUID]] = {}
        self._refreshing = False
        for name in self.world.cluster.partitions:
            self._refresh(name)
        self.later(self.sim.between(0.01, 0.2), self._poll)
        self.later(2.0, self._housekeeping)

    def crash(self) -> None:
        if not self.alive:
            return
        self.sim.log(f"proxy {self.number} crashes")
        self.alive = False
        self.incarnation += 1
        self._deferred.clear()
        self.paused_until = 0.0
        for link in list(self.links.values()):
            link.client.cut()
            link.upstream.cut()

    def pause(self, seconds: float) -> None:
        if self.alive:
            self.sim.log(f"proxy {self.number} is paused for {seconds:.2f} s")
            self.paused_until = self.sim.now + seconds
            self.sim.after(seconds, self._resume, self.incarnation)

    def _resume(self, incarnation: int) -> None:
        """What came in meanwhile is handled now, in its order."""
        if incarnation != self.incarnation or self.paused_until > self.sim.now:
            return
        deferred, self._deferred = self._deferred, []
        for stamp, call, args in deferred:
            if stamp == self.incarnation:
                call(*args)

    def here(self, call: Callable[..., None], *args: Any) -> None:
        """Something that happens to this process: now, or when it is continued, or never."""
        if self.paused_until > self.sim.now or self._deferred:
            self._deferred.append((self.incarnation, call, args))
        else:
            call(*args)

    def later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.sim.after(delay, self._if_same, self.incarnation, call, args)

    def _if_same(self, incarnation: int, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self.alive and incarnation == self.incarnation:
            self.here(call, *args)

    # ---- Surroundings

    @property
    def shared_producer_id(self) -> int:
        return -1 if self._view.producer_id is None else self._view.producer_id

    def fresh(self, now: float) -> bool:
        return now < self._fresh_until

    def policy(self, topic: str) -> TopicPolicy | None:
        return TopicPolicy(self.world.scenario.check) if topic == TOPIC else None

    def topic_id(self, topic: str) -> UUID | None:
        return next((known[2] for name, known in self._metadata.items() if name.topic == topic), None)

    def produce_version_max(self) -> int:
        # With one id for all partitions of the topic only.
        return 13 if self.world.scenario.by_topic_id and len(self.world.cluster.partitions) == 1 else 12

    def may_send(self, ticket: gates.Ticket, now: float) -> bool:
        return self.switch.may_send(ticket, now)

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        return endpoint

    def count_request(self, api_key: int) -> None: ...
    def gate_waited(self, seconds: float) -> None: ...

    def unread_bytes(self, connection: int) -> int:
        return 0

    def reserve(self, byte_count: int) -> bool:
        if byte_count > self.free_bytes:
            return False
        self.free_bytes -= byte_count
        return True

    def release(self, byte_count: int) -> None:
        self.free_bytes += byte_count

    # ---- links

    def accept(self, client: End, node: int) -> Connection | None:
        """A client connects to the listener of a broker."""
        if not self.alive or not self.world.cluster.brokers[node].alive:
            return None
        self._next_connection += 1
        number = self._next_connection
        link = Link(self, number, client, node)
        self.links[number] = link
        self.switch.open(number, "proxy")
        return link.client

    def tell(self, connection: int, event: sessions.Event) -> None:
        self.perform(self.switch.session_event(connection, event, self.sim.now))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ForConnection(connection, command):
                    self._for_connection(connection, command)
                case ForControl():
                    self.sim.log(f"proxy {self.number} asks: {_brief(action.effect)}")
                    ControlCall(self, action).start()
                case Report(violation):
                    self.sim.log(f"proxy {self.number} reports {violation}")
                    self.world.history.reported(violation)
        if not self._ticking and self.switch.needs_ticks:
            self._ticking = True
            self.later(_TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self.perform(self.switch.tick(self.sim.now))

    def _for_connection(self, connection: int, command: sessions.Command) -> None:
        link = self.links.get(connection)
        match command:
            case sessions.TopicStale():
                if not self._refreshing:
                    self._refreshing = True
                    self.later(self.sim.between(0.005, 0.1), self._refresh_all)
            case sessions.Count():
                pass
            case _ if link is not None:
                link.perform(command)

    def topic_ended(self, link: Link) -> None:
        self.links.pop(link.number, None)

    # ---- what it knows of Kafka

    def leader(self, name: TopicPartition) -> tuple[int | None, int, UUID]:
        return self._metadata[name]

    def _refresh(self, name: TopicPartition) -> None:
        partition = self.world.cluster.partitions[name]
        known = self._metadata.get(name)
        self._metadata[name] = (partition.leader, partition.epoch, partition.topic_id)
        if known is not None and known[2] != partition.topic_id:
            self.perform(self.switch.forget_topic(name.topic, self.sim.now))

    def _refresh_all(self) -> None:
        self._refreshing = False
        for name in self.world.cluster.partitions:
            self._refresh(name)

    def refresh(self, name: TopicPartition) -> None:
        self._refresh(name)

    def _housekeeping(self) -> None:
        self._refresh_all()
        self.later(2.0, self._housekeeping)

    # ---- the state topic

    def _poll(self) -> None:
        asked_at = self.sim.now
        state = self.world.state
        if state.reachable:
            delay = self.sim.between(0.001, 0.05)
            # What is there when the question is handled is in its answer.
            self.later(delay, self._polled, asked_at, len(state.records))
        self.later(_POLL_SECONDS, self._poll)

    def _polled(self, asked_at: float, read_to: int) -> None:
        records = self.world.state.records
        while self._read_to < read_to:
            record = records[self._read_to]
            self._view.apply(Offset(self._read_to), record.key, record.value)
            self._read_to += 1
        self._fresh_until = max(self._fresh_until, asked_at + _LEASE_SECONDS)

    def stamp_base(self, topic_id: UUID, partition: int) -> tuple[int, int]:
        base = self._view.stamp_base(topic_id, partition)
        return (0, 0) if base is None else (base.producer_epoch, base.base)

    def publish(self, record: StateRecord, done: Callable[[bool], None]) -> None:
        """Stored and read back, or not known to be: then it may be there all the same, or come later."""
        state = self.world.state
        lost = self.sim.chance(self.world.lossy_reads)
        if not state.reachable or (lost and self.sim.chance(0.5)):
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


class _Side(End):
    def __init__(self, link: Link, *, client: bool) -> None:
        self._link = link
        self._client = client

    def data(self, data: bytes) -> None:
        proxy = self._link.proxy
        if proxy.alive and self._link.incarnation == proxy.incarnation:
            proxy.here(self._link.data, data, self._client)

    def lost(self) -> None:
        proxy = self._link.proxy
        if proxy.alive and self._link.incarnation == proxy.incarnation:
            proxy.here(self._link.lost, self._client)


class Link:
    """A client connection and its own upstream connection (net/link.py)."""

    def __init__(self, proxy: Proxy, number: int, client: End, node: int) -> None:
        sim, cluster = proxy.sim, proxy.world.cluster
        self.proxy = proxy
        self.number = number
        self.incarnation = proxy.incarnation
        self.client = Connection(sim, proxy.world.delay, client, _Side(self, client=True))
        broker = BrokerSide(cluster, node)
        self.upstream = Connection(sim, proxy.world.delay, _Side(self, client=False), broker)
        broker.connection = self.upstream
        cluster.brokers[node].sides.append(broker)
        self._gone = {True: False, False: False}

    def data(self, data: bytes, client: bool) -> None:
        if not self._gone[client]:
            event = sessions.ClientBytes(memoryview(data)) if client else sessions.UpstreamBytes(memoryview(data))
            self.proxy.tell(self.number, event)

    def lost(self, client: bool) -> None:
        if not self._gone[client]:
            self._gone[client] = True
            self.proxy.tell(self.number, sessions.ClientLost() if client else sessions.UpstreamLost("it broke"))
            if all(self._gone.values()):
                self.proxy.topic_ended(self)

    def perform(self, command: sessions.Command) -> None:
        match command:
            case sessions.ToClient(chunks):
                self.client.to_a.write(b"".join(chunks))
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
    """One thing that a gate asked of the control client (net/reads.py, net/control.py), step by step."""

    def __init__(self, proxy: Proxy, wanted: ForControl) -> None:
        self.proxy = proxy
        self.wanted = wanted
        self.deadline = proxy.sim.now + _READ_SECONDS
        self.asked_at = proxy.sim.now
        self.node = 0
        self.epoch = 0
        self.topic_id = UUID(int=0)
        self._brokers_incarnation = 0
        self._incarnation = proxy.incarnation

    @property
    def partition(self) -> Partition:
        return self.proxy.world.cluster.partitions[self.wanted.partition]

    def start(self) -> None:
        effect = self.wanted.effect
        if isinstance(effect, gates.PublishBase):
            self._publish(effect)
        elif isinstance(effect, gates.Resend):
            self._resend(effect)
        else:
            self._once()

    def _once(self) -> None:
        """Ask whom metadata names as the leader; who is not, says so."""
        self.asked_at = self.proxy.sim.now
        leader, self.epoch, self.topic_id = self.proxy.leader(self.wanted.partition)
        if leader is None or self.proxy.sim.chance(self.proxy.world.lossy_reads):
            self._again("no leader, or no connection")
            return
        self.node = leader
        self._brokers_incarnation = self.proxy.world.cluster.brokers[leader].incarnation
        if isinstance(self.wanted.effect, gates.Look):
            self._step(self._fetch, self.wanted.effect)
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
        self.proxy.refresh(self.wanted.partition)
        self._once()

    def _failed(self, reason: str) -> None:
        effect = self.wanted.effect
        if isinstance(effect, gates.Look):
            self._tell(gates.Looked(effect.ticket, gates.Unreadable(reason)))
        else:
            self._tell(gates.TailUnknown(reason))

    def _step(self, call: Callable[..., None], *args: Any) -> None:
        """Handled by the broker a little later; a dead one never answers."""
        sim = self.proxy.sim
        broker = self.proxy.world.cluster.brokers[self.node]
        wait = max(0.0, broker.paused_until - sim.now)
        if not broker.alive or broker.incarnation != self._brokers_incarnation:
            self._again("the broker is gone")
        elif wait > 0:
            if sim.now + wait < self.deadline:
                sim.after(wait, self._at_broker, call, args)
            else:
                self.proxy.later(max(0.0, self.deadline - sim.now), self._failed, "the broker does not answer")
        else:
            sim.after(sim.between(0.0003, 0.004), self._at_broker, call, args)

    def _at_broker(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        broker = self.proxy.world.cluster.brokers[self.node]
        if broker.incarnation != self._brokers_incarnation or not broker.alive:
            self._again("the broker is gone")
        elif broker.paused_until > self.proxy.sim.now:
            self._step(call, *args)
        else:
            call(*args)

    def _leads(self) -> bool:
        return self.proxy.world.cluster.leads(self.node, self.partition, self.epoch)

    def _end_before(self) -> None:
        if not self._leads():
            self._again("not the leader of that epoch")
        else:
            self._step(self._producers, self.partition, self.log_end(self.partition))

    def log_end(self, partition: Partition) -> int:
        """OffsetForLeaderEpoch of the current epoch."""
        return partition.replicas[self.node].log_end

    def _producers(self, partition: Partition, before: int) -> None:
        replica = partition.replicas[self.node]
        known = replica.producers.get(SHARED)
        state = None
        if known is not None:
            state = gates.ProducerState(known.epoch, (known.last_sequence + 1) % SEQUENCE_MODULUS)
        open_transactions = frozenset(p for p, k in replica.producers.items() if k.transaction_start is not None)
        self._step(self._end_after, partition, before, state, open_transactions)

    def _end_after(
        self,
        partition: Partition,
        before: int,
        state: gates.ProducerState | None,
        open_transactions: frozenset[int],
    ) -> None:
        proxy = self.proxy
        if partition is not self.partition or not self._leads():
            self._again("not the leader of that epoch")
            return
        end = self.log_end(partition)
        if end != before:
            proxy.later(proxy.world.delay(), self._tell, gates.TailUnknown("the log moved while it was read"))
            return
        tail = gates.Tail(
            requested_at=self.asked_at,
            log_end_offset=end,
            log_start_offset=partition.replicas[self.node].log_start,
            producer_id=SHARED,
            producer_state=state,
            stamp_base=(0, 0),
            open_transactions=open_transactions,
            log_append_time=proxy.world.scenario.log_append_time,
            expiration_seconds=proxy.world.scenario.expiration_seconds,
            wall_minus_monotonic_seconds=WALL_MINUS_MONOTONIC,
        )
        proxy.later(proxy.world.delay(), self._tail_came, tail)

    def _tail_came(self, tail: gates.Tail) -> None:
        proxy = self.proxy
        base = proxy.stamp_base(proxy.leader(self.wanted.partition)[2], self.wanted.partition.partition)
        proxy.sim.log(f"proxy {proxy.number} reads end {tail.log_end_offset}, state {tail.producer_state}, base {base}")
        self._tell(gates.TailRead(replace(tail, stamp_base=base)))

    def _fetch(self, look: gates.Look) -> None:
        """By the high watermark, as a consumer reads."""
        proxy, partition = self.proxy, self.partition
        if self.topic_id != partition.topic_id or not self._leads():
            self._again("not the leader of that epoch")
            return
        replica = partition.replicas[self.node]
        if look.offset < replica.log_start:
            result: gates.LookResult = gates.OutOfRange()
        elif look.offset >= replica.high_watermark:
            self._step(self._end_for_look, look, partition)
            return
        else:
            batch = replica.batch_at(look.offset)
            result = gates.OutOfRange() if batch is None else gates.Found(memoryview(batch.data))
        proxy.later(proxy.world.delay(), self._tell, gates.Looked(look.ticket, result))

    def _end_for_look(self, look: gates.Look, partition: Partition) -> None:
        proxy = self.proxy
        if partition is not self.partition or not self._leads():
            self._again("not the leader of that epoch")
            return
        result = gates.NotYet(self.log_end(partition))
        proxy.later(proxy.world.delay(), self._tell, gates.Looked(look.ticket, result))

    def _resend(self, effect: gates.Resend) -> None:
        """An append of our own, sent once; its answer may be lost."""
        proxy, partition = self.proxy, self.partition
        node, _, topic_id = proxy.leader(self.wanted.partition)
        if node is None or not proxy.world.cluster.brokers[node].alive or proxy.sim.chance(proxy.world.lossy_reads):
            proxy.later(0.05, self._tell, gates.Resent(effect.ticket, None))
            proxy.later(0.05, proxy.refresh, self.wanted.partition)
            return
        told: list[bool] = []
        cluster = proxy.world.cluster

        def tell(result: gates.Resent) -> None:
            if not told:
                told.append(True)
                if result.result is not None and result.result.error_code == NOT_LEADER:
                    proxy.refresh(self.wanted.partition)
                self._tell(result)

        def handled() -> None:
            if partition.topic_id != topic_id or partition.deleted:
                return
            records = bytes(zero_base_offset(effect.ticket.records))
            cluster.append(node, partition, records, answered, acks=-1, timeout_ms=2000)

        def answered(result: PartitionResult) -> None:
            here = replace(result, partition=partition.name.partition)
            proxy.later(proxy.world.delay(), tell, gates.Resent(effect.ticket, here))

        cluster.queue(node, cluster.brokers[node].incarnation, handled)
        proxy.later(3.0, tell, gates.Resent(effect.ticket, None))

    def _publish(self, effect: gates.PublishBase) -> None:
        proxy = self.proxy
        topic_id = proxy.leader(self.wanted.partition)[2]
        record = encode_stamp_base(
            topic_id,
            effect.partition.partition,
            ProducerEpoch(effect.producer_epoch),
            UUID(int=proxy.sim.rng.getrandbits(128)),
            LogEndOffset(effect.base),
        )
        proxy.publish(record, lambda ok: self._tell(gates.BasePublished(ok)))

    def _tell(self, event: gates.Event) -> None:
        if self.proxy.alive and self._incarnation == self.proxy.incarnation:
            self.proxy.here(self._deliver, event)

    def _deliver(self, event: gates.Event) -> None:
        proxy = self.proxy
        if proxy.sim.tracing and isinstance(event, (gates.Looked, gates.Resent, gates.TailUnknown)):
            proxy.sim.log(f"proxy {proxy.number} is told {_brief(event)}")
        proxy.perform(proxy.switch.gate_event(self.wanted.partition, event, proxy.sim.now))


def _brief(what: object) -> str:
    match what:
        case gates.Look(ticket, offset):
            return f"look at {offset} (its batch is sent at {ticket.at})"
        case gates.Looked(_, result):
            end = f" {result.log_end_offset}" if isinstance(result, gates.NotYet) else ""
            return f"{type(result).__name__}{end}"
        case gates.Resent(_, result):
            return f"resent: {result}"
        case gates.Resend():
            return "resend"
        case _:
            return str(what)


class World:
    """Everything of one run."""

    def __init__(self, scenario: Scenario, seed: int, history: History, *, tracing: bool = False) -> None:
        self.scenario = scenario
        self.sim = sim = Sim(seed, tracing=tracing)
        self.history = history
        self.lossy_reads = scenario.lossy_reads
        self.cluster = Cluster(
            sim,
            broker_count=scenario.brokers,
            min_isr=scenario.min_isr,
            expiration_seconds=scenario.expiration_seconds,
            log_append_time=scenario.log_append_time,
            unclean=scenario.unclean,
            slow_requests=scenario.slow_requests,
            too_large=scenario.too_large,
            transactions_v2=scenario.transactions_v2,
        )
        start = sim.rng.choice(scenario.start_offsets)
        self.names = [TopicPartition(TOPIC, number) for number in range(scenario.partitions)]
        for name in self.names:
            self.cluster.create(name, start)
        self.state = StateTopic(sim)
        self.proxies = [Proxy(self, number) for number in range(scenario.proxies)]
        self.quiet = False
        sim.after(0.5, self._control_tick)

    def delay(self) -> float:
        """How long a piece of a stream is under way."""
        if self.sim.chance(0.03) and not self.quiet:
            return self.sim.between(0.02, 0.4)
        return self.sim.between(0.0002, 0.003)

    def _control_tick(self) -> None:
        self.cluster.control_tick()
        self.cluster.abort_old_transactions(3.0)
        self.sim.after(0.5, self._control_tick)

    # ---- faults

    def schedule_faults(self) -> None:
        rng = self.sim.rng
        for _ in range(rng.randrange(self.scenario.faults_max + 1)):
            kind = rng.choice(self.scenario.faults)
            self.sim.after(self.sim.between(0.05, self.scenario.seconds), getattr(self, f"_fault_{kind}"))

    def heal(self) -> None:
        """From here on nothing breaks any more."""
        self.sim.log("all faults end")
        self.quiet = True
        self.lossy_reads = 0.0
        self.cluster.slow_requests = self.cluster.too_large = 0.0
        self.state.reachable = True
        for node, broker in enumerate(self.cluster.brokers):
            broker.paused_until = min(broker.paused_until, self.sim.now)
            self.cluster.restart(node)
        for proxy in self.proxies:
            if not proxy.alive:
                proxy.start()

    def _links(self) -> list[Link]:
        return [link for proxy in self.proxies if proxy.alive for link in proxy.links.values()]

    def _fault_cut(self) -> None:
        links = self._links()
        if links:
            link = self.sim.rng.choice(links)
            side = link.upstream if self.sim.chance(0.6) else link.client
            self.sim.log(f"a connection of proxy {link.proxy.number} is cut ({link.number})")
            side.cut()

    def _fault_snip(self) -> None:
        """A client is gone; its upstream connection is not."""
        links = self._links()
        if links:
            link = self.sim.rng.choice(links)
            self.sim.log(f"a client of proxy {link.proxy.number} is cut off ({link.number})")
            link.client.cut()

    def _fault_kill(self) -> None:
        node = self.sim.rng.randrange(len(self.cluster.brokers))
        if self.cluster.brokers[node].alive and not self.quiet:
            self.cluster.kill(node)
            self.sim.after(self.sim.between(0.05, 3.0), self.cluster.restart, node)

    def _fault_pause(self) -> None:
        node = self.sim.rng.randrange(len(self.cluster.brokers))
        if self.cluster.brokers[node].alive and not self.quiet:
            self.cluster.pause(node, self.sim.between(0.1, self.scenario.pause_max))

    def _fault_move(self) -> None:
        if not self.quiet:
            name = self.sim.rng.choice(self.names)
            self.cluster.elect(self.cluster.partitions[name], prefer_other=True)

    def _fault_crash(self) -> None:
        proxy = self.sim.rng.choice(self.proxies)
        if proxy.alive and not self.quiet:
            proxy.crash()
            self.sim.after(self.sim.between(0.05, 1.5), self._start_again, proxy)

    @staticmethod
    def _start_again(proxy: Proxy) -> None:
        if not proxy.alive:
            proxy.start()

    def _fault_freeze(self) -> None:
        if not self.quiet:
            self.sim.rng.choice(self.proxies).pause(self.sim.between(0.1, 4.0))

    def _fault_expire(self) -> None:
        self.cluster.expire_producers()

    def _fault_delete(self) -> None:
        self.cluster.delete_records(self.sim.rng.choice(self.names))

    def _fault_recreate(self) -> None:
        if not self.quiet:
            self.cluster.recreate(self.sim.rng.choice(self.names))

    def _fault_state(self) -> None:
        """The state topic cannot be reached for a while."""
        self.state.reachable = False
        self.sim.after(self.sim.between(0.5, 5.0), setattr, self.state, "reachable", True)
