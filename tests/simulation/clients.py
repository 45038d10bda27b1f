"""Producers on raw connections: what they send, how they retry, and how they violate the protocol."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import crc32c

from fencepost_policies.append import Check
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import ADD_PARTITIONS_TO_TXN, API_VERSIONS, FETCH, INCREMENTAL_ALTER_CONFIGS, METADATA
from fencepost_proxy.wire.produce import (
    PartitionData,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    encode_produce_request,
    parse_produce_response,
)
from tests.simulation.clock import Connection, End, take_frame
from tests.simulation.history import CheckChange, Try, Write
from tests.simulation.listener import ADDED, Listener, adds, answer_body, query_message
from tests.simulation.world import CHANGED, SHARED, TOPIC, Proxy, World
from tests.support.batches import Header, batch

RETRIABLE = frozenset({3, 6, 7, 19, 20, 100})
_TRIES_MAX = 6


@dataclass
class Request:
    correlation_id: int
    writes: list[Write]
    tries: list[Try] = field(default_factory=list)
    version: int = 9


@dataclass
class Query:
    """A request other than Produce, between appends. `expected` – its response after the correlation id.

    `never`: no response is allowed, because an earlier request must close the connection. `adds`: number of partitions
    that it adds to a transaction.
    """

    correlation_id: int
    expected: bytes
    never: bool = False
    adds: int = 0


#: (API, version): answered by the proxy, rewritten, or relayed.
_QUERIES = ((API_VERSIONS, 99), (API_VERSIONS, 3), (METADATA, 12), (FETCH, 12), (FETCH, 12), (2, 7))


@dataclass(frozen=True)
class Behavior:
    """How a client behaves. `lies` – share of invalid writes. `depth` – requests in flight. `silent` – share of
    requests with acks=0. `queries_to_send` – share of requests followed by another API.

    `rebirth`: retries with a new epoch and sequence 0, as a producer does that bumps its epoch. `strands`: adds
    partitions to transactions and writes nothing to them. `bulky`: batches of all sizes.
    """

    conditional: float = 1.0
    write_ids: float = 0.0
    producer: float = 0.0  # share of clients with a producer id
    retries: float = 1.0
    depth: int = 1
    lies: float = 0.0
    several: bool = False
    transactional: bool = False
    bypass: bool = False
    bumps: float = 0.5
    twin: bool = False
    old: float = 0.0
    silent: float = 0.0
    queries_to_send: float = 0.0
    rebirth: bool = False
    strands: float = 0.0
    bulky: bool = False


KINDS = {
    "honest": Behavior(write_ids=1.0),
    "sequenced": Behavior(producer=1.0),
    "bare": Behavior(),
    "chain": Behavior(depth=4, producer=0.6, write_ids=0.5),
    "twin": Behavior(twin=True, conditional=1.0),
    "idempotent": Behavior(conditional=0.0, producer=1.0, bumps=1.0),
    "idempotent-chain": Behavior(conditional=0.0, producer=1.0, bumps=1.0, depth=3),
    "plain": Behavior(conditional=0.0, retries=0.0),
    "mixed": Behavior(conditional=0.5, producer=0.7, write_ids=0.3),
    "mixed-chain": Behavior(conditional=0.5, producer=1.0, depth=4),
    "several": Behavior(several=True, conditional=0.8, producer=0.5, write_ids=0.5),
    "liar": Behavior(conditional=0.8, lies=0.5, producer=0.7, write_ids=0.3),
    "bypass": Behavior(conditional=0.0, producer=0.5, bypass=True, lies=0.3),
    "transactional": Behavior(conditional=0.4, transactional=True),
    "transactional-plain": Behavior(conditional=0.0, transactional=True),
    "old": Behavior(old=0.4, write_ids=0.5, producer=0.3),
    "silent": Behavior(conditional=0.1, silent=0.7, queries_to_send=0.5, depth=2),
    "silent-idempotent": Behavior(conditional=0.1, silent=0.5, queries_to_send=0.5, producer=1.0, depth=2),
    "asking": Behavior(queries_to_send=0.9, depth=4, producer=0.5, write_ids=0.5),
    "asking-plain": Behavior(conditional=0.0, queries_to_send=0.9, depth=3, producer=0.5),
    "wide": Behavior(several=True, conditional=0.7, producer=0.5, write_ids=0.5, depth=3, queries_to_send=0.2),
    "reborn": Behavior(rebirth=True, producer=1.0, write_ids=0.5, bumps=1.0),
    "reborn-chain": Behavior(rebirth=True, producer=1.0, write_ids=0.5, bumps=1.0, depth=3),
    "stranding": Behavior(conditional=0.0, transactional=True, strands=0.6),
    "bulky": Behavior(bulky=True, conditional=0.8, depth=3, producer=0.6, write_ids=0.3),
}


class Socket(End):
    """One client connection. Data that arrives after the client dropped it is ignored."""

    def __init__(self, primary: Peer) -> None:
        self._primary = primary
        self.connection: Connection | None = None
        self.sent_bytes = 0

    def data(self, data: bytes) -> None:
        if self._primary.socket is self:
            self._primary.data(data)

    def lost(self) -> None:
        if self._primary.socket is self:
            self._primary.lost()

    def write(self, data: bytes) -> None:
        assert self.connection is not None
        self.connection.to_b.write(data)
        self.sent_bytes += len(data)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close("a")


class Peer:
    """A client with one connection at a time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sim = world.sim
        self.socket: Socket | None = None
        self._bytes = bytearray()

    def attach(self, proxy: Proxy, node: int) -> bool:
        """Connect to the process's listener of this broker; False if there is none."""
        self._bytes.clear()
        socket = Socket(self)
        socket.connection = proxy.accept(socket, node)
        self.socket = socket if socket.connection is not None else None
        return self.socket is not None

    def disconnect(self) -> None:
        socket, self.socket = self.socket, None
        if socket is not None:
            socket.close()

    def data(self, data: bytes) -> None:
        self._bytes += data
        while (frame := take_frame(self._bytes)) is not None:
            self.received(frame)

    def received(self, frame: bytes) -> None:
        raise NotImplementedError

    def lost(self) -> None:
        raise NotImplementedError


def produce_frame(
    version: int,
    correlation_id: int,
    writes: Sequence[Write],
    *,
    client: str,
    transactional_id: str | None = None,
    acks: int = -1,
    timeout_ms: int = 3000,
) -> bytes:
    topics: dict[str, list[PartitionData]] = {}
    for write in writes:
        topics.setdefault(write.partition.topic, []).append(PartitionData(write.partition.partition, write.records))
    data = tuple(TopicData(name, None, tuple(parts)) for name, parts in topics.items())
    request = ProduceRequest(version, correlation_id, client, b"", transactional_id, acks, timeout_ms, data)
    return b"".join(encode_produce_request(request))


class Client(Peer):
    """One producer."""

    def __init__(self, world: World, name: str, kind: str, writes: int) -> None:
        super().__init__(world)
        self.name = name
        self.kind = KINDS[kind]
        self.writes_left = writes
        rng = self.sim.rng
        self.has_producer = self.sim.chance(self.kind.producer) or self.kind.transactional
        self.uses_write_ids = self.sim.chance(self.kind.write_ids)
        self.bumps = self.sim.chance(self.kind.bumps)
        self.producer_id, self.epoch = world.cluster.init_producer_id() if self.has_producer else (-1, -1)
        if self.kind.transactional:
            world.cluster.begin_transactional(self.producer_id)
            world.transactional_ids[name] = self.producer_id
        self.sequences: dict[TopicPartition, int] = {}
        self.ends: dict[TopicPartition, int] = {}
        self.proxy: int | None = None
        self.version = rng.choice((7, 9, 9, 11))
        self.done = False
        self._correlation = rng.randrange(1 << 20)
        self._in_flight: deque[Request | Query] = deque()
        self._job: list[Write] = []
        self._tries_left = 0
        self._rows: list[list[Write]] = []
        self._round = 0
        self._outcast = False  # its connection must be closed because of what it sent
        self._transaction_parts = 0
        self.sim.after(self.sim.between(0.3, 1.2), self._next)

    # ---- writes

    def _next(self) -> None:
        if self.writes_left <= 0 or (self.world.quiet and self.kind.bypass):
            self._finish()
            return
        if self.kind.transactional and self.world.cluster.busy(self.producer_id):
            self.sim.after(0.05, self._next)
            return
        self._job = self._compose()
        self._tries_left = _TRIES_MAX if self.sim.chance(self.kind.retries) else 1
        self._send()

    def _finish(self) -> None:
        self.done = True
        self._transaction_over(commit=True)
        if self.socket is not None:
            self.socket.close()

    def _transaction_over(self, *, commit: bool) -> None:
        if self.kind.transactional and self._transaction_parts:
            self._transaction_parts = 0
            self.world.cluster.end_transaction(self.producer_id, self.epoch, commit=commit)
            epoch = self.world.cluster.epoch_of(self.producer_id)
            if epoch != self.epoch:  # transactions v2: a new epoch for each transaction
                self.epoch = epoch
                self.sequences.clear()

    def _compose(self) -> list[Write]:
        """The next write, pipelined writes, or writes to several partitions."""
        rng, kind = self.sim.rng, self.kind
        names = self.world.names
        if kind.twin:
            copied = self._copy()
            if copied is not None:
                return [copied]
        if kind.several and len(names) > 1:
            self._rows = []
            for _ in range(rng.randrange(1, kind.depth + 1)):
                chosen = rng.sample(names, rng.randrange(1, len(names) + 1))
                self._rows.append([self._write(name, self._end_of(name)) for name in chosen])
                for write in self._rows[-1]:
                    self.ends[write.partition] = self._end_of(write.partition) + write.count
            self.writes_left -= 1
            return [write for row in self._rows for write in row]
        name = rng.choice(names)
        end = self._end_of(name)
        pipeline_key = []
        for _ in range(rng.randrange(1, kind.depth + 1)):
            write = self._write(name, end)
            end += write.count
            pipeline_key.append(write)
        self.writes_left -= 1
        return pipeline_key

    def _copy(self) -> Write | None:
        """Another client's batch, byte for byte, as this client's write."""
        candidates = [
            w
            for w in self.world.history.writes[-6:]
            if w.kind == "conditional" and w.write_id is None and w.honest and w.client != self.name and w.count < 9
        ]
        if not candidates:
            return None
        self.writes_left -= 1
        other = self.sim.rng.choice(candidates)
        return self._record(
            other.partition,
            "conditional",
            _headed(other.records, -1, -1, -1),
            count=other.count,
            expected=other.expected,
            write_id=None,
            honest=True,
        )

    def _end_of(self, name: TopicPartition) -> int:
        """The log end that the client assumes: reported earlier, or just read."""
        partition = self.world.cluster.partitions[name]
        if name not in self.ends or self.sim.chance(0.4):
            node = partition.leader if partition.leader is not None else next(iter(partition.replicas))
            self.ends[name] = partition.replicas[node].log_end
        return self.ends[name]

    def _write(self, name: TopicPartition, end: int) -> Write:
        rng, sim = self.sim.rng, self.sim
        number = len(self.world.history.writes)
        count = rng.choice((1, 1, 1, 2, 3))
        lying = sim.chance(self.kind.lies)
        # Unchecked topics ignore expected offsets: send none.
        conditional = sim.chance(self.kind.conditional) and self.world.checks[name.topic] is not Check.OFF
        expected: int | None = None
        headers: list[list[Header]] = [[] for _ in range(count)]
        base_offset = 0
        lie = (
            rng.choice(("sequence", "expectation", "shared", "contradiction", "crc", "fencepost-write-id"))
            if lying
            else ""
        )
        if conditional:
            expected = end
            if lie == "expectation":
                expected = max(0, end + rng.choice((-3, -2, -1, 1, 2)))
            if lie == "fencepost-write-id":
                expected = self._taken_offset(name) or expected
            if expected > 0 and sim.chance(0.1):
                base_offset = expected
            else:
                binding = "" if expected % 2 else f"@{name.topic}/{name.partition}"
                headers[0].append(("fencepost-expected-offset", f"{expected}{binding}".encode()))
                if lie == "contradiction" and count > 1:
                    headers[1].append(("fencepost-expected-offset", b"%d" % (expected + 5)))
        write_id = b"%s/%d" % (self.name.encode(), number) if conditional and self.uses_write_ids else None
        if lie == "fencepost-write-id" and conditional:
            write_id = self._taken_write_id(name, end) or write_id
        if write_id is not None:
            headers[0].append(("fencepost-write-id", write_id))
        timestamp_ms = sim.unix_ms
        if sim.chance(self.kind.old):
            timestamp_ms = rng.choice((-1, timestamp_ms - int(self.world.scenario.expiration_seconds * 1000)))
        producer = (-1, -1, -1)
        if self.has_producer:
            sequence = self.sequences.get(name, 0)
            if lie == "sequence":
                sequence = max(0, sequence - count)
            producer = (self.producer_id, self.epoch, sequence)
            self.sequences[name] = sequence + count
        if lie == "shared":
            epoch = rng.choice((0, 0, 1, 5)) if self.kind.bypass else 0
            producer = (SHARED, epoch, rng.choice((0, end % (1 << 31))))
        padding = b"." * rng.choice((0, 0, 300, 900)) if self.kind.bulky else b""
        records = batch(
            *(b"%d.%d" % (number, index) + padding for index in range(count)),
            headers=headers,
            timestamp_ms=timestamp_ms,
            producer=producer,
            transactional=self.kind.transactional,
            base_offset=base_offset,
        )
        if lie == "crc":
            spoiled = bytearray(records)
            spoiled[-1] ^= 1
            records = memoryview(bytes(spoiled))
        kind = "conditional" if conditional else "idempotent" if self.has_producer else "unconditional"
        if self.kind.transactional:
            kind = "transactional"
        honest = not lie or lie == "expectation"
        write = self._record(name, kind, records, count=count, expected=expected, write_id=write_id, honest=honest)
        write.forbidden = lie in ("shared", "crc") or (
            lie == "contradiction" and conditional and count > 1 and not base_offset
        )
        return write

    def _taken_write_id(self, name: TopicPartition, end: int) -> bytes | None:
        """The write-id of another client's last write to that partition."""
        taken = [w for w in self.world.history.writes if w.write_id and w.partition == name]
        return taken[-1].write_id if taken else None

    def _taken_offset(self, name: TopicPartition) -> int | None:
        taken = [w for w in self.world.history.writes if w.write_id and w.partition == name]
        return taken[-1].expected if taken else None

    def _record(
        self,
        name: TopicPartition,
        kind: str,
        records: memoryview,
        *,
        count: int,
        expected: int | None,
        write_id: bytes | None,
        honest: bool,
    ) -> Write:
        history = self.world.history
        write = Write(
            len(history.writes),
            self.name,
            name,
            kind,
            records,
            count,
            expected,
            write_id,
            honest=honest,
            bypass=self.kind.bypass,
        )
        history.writes.append(write)
        return write

    # ---- sending

    def _send(self) -> None:
        self._round += 1
        if self.socket is None and not self._connect(self._job[0].partition):
            self.sim.after(self.sim.between(0.05, 0.3), self._try_again)
            return
        if self.kind.transactional and not self.world.cluster.transactions_v2:
            self._add_partitions()
        else:
            self._transaction_parts += len(self._job) if self.kind.transactional else 0
            self._send_job()
        self.sim.after(self.sim.between(1.2, 3.5), self._give_up, self._round)

    def _send_job(self) -> None:
        requests = [[write] for write in self._job]
        if self.kind.several:
            again = set(map(id, self._job))
            requests = [[write for write in row if id(write) in again] for row in self._rows or [self._job]]
        for writes in requests:
            if writes:
                self._request(writes)
            if self.sim.chance(self.kind.queries_to_send):
                self._query()
        if not self._in_flight:
            # acks=0 has no response: send another request to learn that it arrived.
            self._query()

    def _add_partitions(self) -> None:
        """AddPartitionsToTxn (v1). Some partitions get no records, but still a marker that passes no sequencer."""
        assert self.socket is not None
        names = dict.fromkeys(write.partition for write in self._job)
        if self.sim.chance(self.kind.strands):
            names[self.sim.rng.choice(self.world.names)] = None
        self._correlation += 1
        self._in_flight.append(Query(self._correlation, ADDED, adds=len(names)))
        text = adds(self.name, self.producer_id, self.epoch, names)
        self.socket.write(query_message(ADD_PARTITIONS_TO_TXN, 3, self._correlation, text))

    def _added(self, queried: Query, body: bytes) -> None:
        if body == ADDED:
            self._transaction_parts += queried.adds
            self._send_job()
        else:
            self._new_epoch()
            self._after_job()

    def _connect(self, name: TopicPartition) -> bool:
        world, rng = self.world, self.sim.rng
        leader = world.cluster.partitions[name].leader
        node = leader if leader is not None and self.sim.chance(0.95) else rng.randrange(len(world.cluster.brokers))
        self._outcast = False
        if not self.kind.bypass:
            proxy = rng.choice(world.proxies)
            self.proxy = proxy.number
            return self.attach(proxy, node)
        if not world.cluster.brokers[node].live:
            return False
        self._bytes.clear()
        socket, side = Socket(self), Listener(world.cluster, node)
        socket.connection = side.connection = Connection(self.sim, world.delay, socket, side)
        world.cluster.brokers[node].sides.append(side)
        self.proxy, self.socket = None, socket
        return True

    def _request(self, writes: list[Write]) -> None:
        assert self.socket is not None
        self._correlation += 1
        silent = self.sim.chance(self.kind.silent) if self.kind.silent else False
        request = Request(self._correlation, list(writes), version=self.version)
        request.tries = [self.world.history.tried(write, self.sim.now, self.proxy) for write in writes]
        for attempt in request.tries:
            attempt.connection, attempt.silent = self.socket.connection, silent
            attempt.starts_at, attempt.correlation_id = self.socket.sent_bytes, request.correlation_id
        if not silent:
            self._in_flight.append(request)
            for write in writes:
                earlier = write.tries[:-1]
                if earlier and all(attempt.silent for attempt in earlier):
                    write.forbidden = False
        elif any(self._owed_an_answer(write) for write in writes):
            self._outcast = True
            for write in writes:
                write.forbidden = write.forbidden or all(attempt.silent for attempt in write.tries)
        for write in writes:
            self.sim.log(f"{self.name} -> proxy {self.proxy}: {write}, try {len(write.tries)}")
        self.socket.write(
            produce_frame(
                self.version,
                request.correlation_id,
                writes,
                client=self.name,
                transactional_id=self.name if self.kind.transactional else None,
                acks=0 if silent else self.sim.rng.choice((-1, -1, 1)),
                timeout_ms=self.sim.rng.choice((600, 1500, 3000)),
            )
        )

    def _owed_an_answer(self, write: Write) -> bool:
        """A refusal with acks=0 has no response: the proxy must append nothing and close the connection."""
        refused = write.expected is not None or self.world.checks[write.partition.topic] is Check.REQUIRED
        return refused and not self.kind.bypass and not self.world.scenario.managed

    def _query(self) -> None:
        assert self.socket is not None
        self._correlation += 1
        api_key, version = self.sim.rng.choice(_QUERIES)
        number = self._correlation
        expected = b"" if version == 99 else answer_body(api_key, number, b"")
        if not self.kind.bypass and api_key in (API_VERSIONS, METADATA):
            expected += CHANGED
        elif self.kind.bypass:
            expected = answer_body(api_key, number, b"")
        self._in_flight.append(Query(number, expected, never=self._outcast))
        self.socket.write(query_message(api_key, version, number))

    def _give_up(self, number: int) -> None:
        if number == self._round and self._in_flight and self.socket is not None and not self.world.quiet:
            self.sim.log(f"{self.name} gives up its connection")
            self.socket.close()

    # ---- responses

    def received(self, frame: bytes) -> None:
        correlation_id = int.from_bytes(frame[:4], "big", signed=True)
        if not self._in_flight or self._in_flight[0].correlation_id != correlation_id:
            self.world.history.broken.append(f"OUT OF ORDER: {self.name} got an unexpected response")
            return
        request = self._in_flight.popleft()
        if isinstance(request, Query):
            self._answered(request, frame[4:])
            return
        response: ProduceResponse = parse_produce_response(memoryview(frame), request.version)
        results = {(topic.name, result.partition): result for topic in response.topics for result in topic.partitions}
        if len(results) != len(request.writes):
            self.world.history.broken.append(
                f"WRONG RESPONSE: {self.name} got {len(results)} results for {len(request.writes)} batches"
            )
        for attempt in request.tries:
            name = attempt.write.partition
            attempt.result = results.get((name.topic, name.partition))
            attempt.answered_at = self.sim.now
            if attempt.result is None:
                self.world.history.broken.append(f"NO RESULT: {self.name} got none for {attempt.write}")
                continue
            self.sim.log(
                f"{self.name} <- {attempt.write.number}: {attempt.result.error_code} base "
                f"{attempt.result.base_offset} {attempt.message}"
            )
        if not self._in_flight:
            self._after_job()

    def _answered(self, queried: Query, body: bytes) -> None:
        if queried.adds:
            self._added(queried, body)
            return
        if body != queried.expected:
            self.world.history.broken.append(
                f"WRONG RESPONSE: {self.name}, {queried.correlation_id}: {body[:30]!r} for {queried.expected[:30]!r}"
            )
        if queried.never:
            self.world.history.broken.append(f"ACKS 0: {self.name} is served after a request that must disconnect it")
        if not self._in_flight:
            self._after_job()

    def lost(self) -> None:
        self.sim.log(f"{self.name} loses its connection")
        self.socket = None
        if self._in_flight:
            self._in_flight.clear()
            self._after_job()

    def _after_job(self) -> None:
        """Decide which writes to send again."""
        self._round += 1
        again: list[Write] = []
        failed = False
        for write in self._job:
            result = write.tries[-1].result if write.tries else None
            name = write.partition
            if write.tries and write.tries[-1].silent:
                self.ends.pop(name, None)
            elif result is not None and result.error_code == 0:
                self.ends[name] = result.base_offset + write.count
            elif result is None or result.error_code in RETRIABLE:
                if not failed or self.kind.several:
                    again.append(write)
            else:
                failed = True
                if result.error_code == 44 and result.base_offset >= 0:
                    self.ends[name] = result.base_offset
                else:
                    self.ends.pop(name, None)
        self._tries_left -= 1
        if failed and self.bumps and self.has_producer and not self.kind.transactional:
            self.epoch += 1
            self.sequences.clear()
            again = []
        if again and self._tries_left > 0 and not self.kind.transactional:
            if self.kind.rebirth and self.sim.chance(0.7):
                self._reborn(again)
            self._job = again
            self.sim.after(self.sim.between(0.02, 0.4), self._try_again)
            return
        if again and self.has_producer and not self.kind.transactional:
            # Given-up sequences may have been used: continue with a new epoch.
            self.epoch += 1
            self.sequences.clear()
        if again:
            self.ends.pop(again[0].partition, None)
        if self.kind.transactional and (failed or again):
            self._transaction_over(commit=False)
            self._new_epoch()
        elif self.kind.transactional and self.sim.chance(0.4):
            self._transaction_over(commit=self.sim.chance(0.7))
        self._job = []
        self.sim.after(self.sim.between(0.0, self.world.scenario.think_max), self._next)

    def _reborn(self, again: list[Write]) -> None:
        """Give the same records a new epoch. To Kafka these are new batches."""
        self.epoch += 1
        self.sequences.clear()
        for write in again:
            sequence = self.sequences.get(write.partition, 0)
            self.sequences[write.partition] = sequence + write.count
            write.records = _headed(write.records, self.producer_id, self.epoch, sequence)

    def _new_epoch(self) -> None:
        self._transaction_parts = 0
        _, self.epoch = self.world.cluster.init_producer_id(self.producer_id)
        self.sequences.clear()

    def _try_again(self) -> None:
        if self.socket is not None and self.sim.chance(0.5):
            # Not the leader, or no response: try another broker.
            self.socket.close()
            self.socket = None
        self._send()


class Probe(Peer):
    """After the faults: one conditional append that must succeed."""

    def __init__(self, world: World, proxy: int, name: TopicPartition, done: Callable[[bool], None]) -> None:
        super().__init__(world)
        self.proxy = proxy
        self.name = name
        self.accepted = False
        self.last = ""
        self._done = done
        self._tries = 0
        self._write: Write | None = None

    def send(self) -> None:
        world = self.world
        self._tries += 1
        partition = world.cluster.partitions[self.name]
        if partition.leader is None:
            self.last = "no leader"
            self._later()
            return
        if self.socket is None and not self.attach(world.proxies[self.proxy], partition.leader):
            self.last = "no connection"
            self._later()
            return
        assert self.socket is not None
        end = partition.replicas[partition.leader].log_end
        number = len(world.history.writes)
        records = batch(
            b"probe %d" % number, headers=[[("fencepost-expected-offset", b"%d" % end)]], timestamp_ms=world.sim.unix_ms
        )
        write = Write(number, f"probe-{self.proxy}", self.name, "conditional", records, 1, end, None)
        world.history.writes.append(write)
        self._write = write
        world.history.tried(write, world.sim.now, self.proxy)
        self.socket.write(produce_frame(9, self._tries, [write], client="probe"))

    def _later(self) -> None:
        if self._tries < 45:
            self.world.sim.after(0.3, self.send)
        else:
            self._done(False)

    def received(self, frame: bytes) -> None:
        response = parse_produce_response(memoryview(frame), 9)
        result = response.topics[0].partitions[0]
        assert self._write is not None
        attempt = self._write.tries[0]
        attempt.result, attempt.answered_at = result, self.world.sim.now
        self.last = f"{result.error_code} {result.error_message}"
        self.world.sim.log(f"probe of proxy {self.proxy}: {self.last}")
        self.disconnect()
        if result.error_code == 0:
            self.accepted = True
            self._done(True)
        else:
            self._later()

    def lost(self) -> None:
        self.socket = None
        self.last = "connection lost"
        self._later()


def _headed(records: memoryview, producer_id: int, epoch: int, sequence: int) -> memoryview:
    """The same records from another producer."""
    headed = bytearray(records)
    struct.pack_into(">qhi", headed, 43, producer_id, epoch, sequence)
    struct.pack_into(">I", headed, 17, crc32c.crc32c(bytes(headed[21:])))
    return memoryview(bytes(headed))


class Admin(Peer):
    """Switches the check of a topic on and off during the run, through any proxy. Repeats unacknowledged changes."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._correlation = 0
        self._plan = [Check.REQUIRED, Check.ON, Check.OFF, Check.REQUIRED, Check.OFF, Check.ON]
        first = self.sim.rng.randrange(len(self._plan))
        self._plan = self._plan[first:] + self._plan[:first]
        self._queried: CheckChange | None = None
        self.sim.after(0.3, self._next)

    def _next(self) -> None:
        if self.world.quiet:
            if self.socket is not None:
                self.socket.close()
            return
        self._queried = CheckChange(TOPIC, self._plan[0], self.sim.now)
        self._correlation += 1
        if self.socket is None:
            proxy = self.sim.rng.choice(self.world.proxies)
            self.attach(proxy, self.sim.rng.randrange(len(self.world.cluster.brokers)))
        if self.socket is None:
            self.sim.after(0.2, self._next)
            return
        self.world.history.check_changes.append(self._queried)
        self.sim.log(f"admin: {TOPIC} is to be checked for {self._plan[0].value}")
        text = f"{TOPIC}={self._plan[0].value}".encode()
        self.socket.write(query_message(INCREMENTAL_ALTER_CONFIGS, 1, self._correlation, text))
        # Enabling a check takes as long as the lease.
        patience = self.sim.between(0.2, 3.0) if self.sim.chance(0.3) else 6.0
        self.sim.after(patience, self._give_up, self._correlation)

    def _give_up(self, number: int) -> None:
        if number == self._correlation and self._queried is not None and self.socket is not None:
            self.socket.close()

    def received(self, frame: bytes) -> None:
        body = frame[4:]
        queried, self._queried = self._queried, None
        assert queried is not None
        if body == CHANGED:
            queried.reported_at = self.sim.now
            self.sim.log(f"admin: {TOPIC} is now checked for {queried.check.value}")
            self._plan.append(self._plan.pop(0))
            self.sim.after(self.sim.between(0.0, 3.0), self._next)
        else:
            self.sim.after(self.sim.between(0.05, 0.5), self._next)

    def lost(self) -> None:
        self.socket = None
        if self._queried is not None:
            self._queried = None
            self.sim.after(self.sim.between(0.05, 0.5), self._next)
