"""A model of Kafka brokers, as producers and the proxy's control client observe them.

Replicas with real record batches, leaders and follower_replicas, high watermark, leader epochs and truncation, ISR, the
idempotence check of ProducerStateManager, transaction markers, requests that outlive their connections. Sources:
UnifiedLog.scala, ProducerStateManager.java, ProducerAppendInfo.java, ReplicaManager.scala, Partition.scala.

Simplified: the controller acts immediately and correctly; a leader learns ISR changes immediately, brokers learn new
leaders late. A kill ends a process: written data survives (page cache).
"""

from __future__ import annotations

import functools
import gzip
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from uuid import UUID

import crc32c

from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HEADER_BYTES, BatchHeader, parse_batch_header, verify_crc
from fencepost_proxy.wire.produce import (
    BY_TOPIC_ID,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicResult,
    encode_produce_response,
    parse_produce_request,
)
from tests.simulation.clock import Connection, End, Sim, take_frame

NONE, UNKNOWN_TOPIC, NOT_LEADER, TIMED_OUT = 0, 3, 6, 7
NOT_ENOUGH_REPLICAS, AFTER_APPEND, CORRUPT, TOO_LARGE, SERVER_ERROR = 19, 20, 2, 10, -1
DENIED, INVALID_TIMESTAMP = 29, 32
OUT_OF_ORDER, WRONG_EPOCH, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING = 45, 47, 48, 49
CONCURRENT_TRANSACTIONS, DENIED_TRANSACTIONAL_ID, PRODUCER_FENCED = 51, 53, 90
OLD_FORMAT, INVALID_RECORD, UNKNOWN_TOPIC_ID = 43, 87, 100
_SEQUENCES = 1 << 31
_REMEMBERED_BATCHES = 5
_CODEC, _GZIP, _LOG_APPEND_TIME, _KNOWN_ATTRIBUTES = 0x07, 0x01, 0x08, 0x7F
_RECORDS_AT = 61


@dataclass(frozen=True, slots=True)
class Settings:
    """Configs of a topic that limit batches. None: no limit."""

    min_isr: int = 1
    log_append_time: bool = False
    max_message_bytes: int | None = None
    timestamp_after_max_ms: int | None = None
    gzip: bool = False
    old_format: bool = False  # message format before 0.11: no producer ids


@dataclass(slots=True)
class LogBatch:
    base: int
    count: int
    data: bytes
    header: BatchHeader
    leader_epoch: int

    @property
    def end(self) -> int:
        return self.base + self.count


@dataclass(slots=True)
class Known:
    """ProducerStateEntry: one replica's view of a producer. `batches`: (first, last sequence, base, end, timestamp)."""

    epoch: int
    batches: deque[tuple[int, int, int, int, int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_BATCHES))
    last_timestamp_ms: int = -1
    transaction_start: int | None = None

    @property
    def last_sequence(self) -> int:
        return self.batches[-1][1] if self.batches else -1


def newest_timestamp(batch: bytes, header: BatchHeader) -> int:
    """The newest timestamp that a broker computes from the records. Compressed records: the header's."""
    if header.attributes & _CODEC:
        return header.max_timestamp_ms
    (base,) = struct.unpack_from(">q", batch, 27)
    newest, at = -1, _RECORDS_AT
    for _ in range(header.record_count):
        length, begin = _varint(batch, at)
        delta, _ = _varint(batch, begin + 1)
        newest = max(newest, base + delta)
        at = begin + length
    return newest


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, sequence_offset = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << sequence_offset
        at, sequence_offset = at + 1, sequence_offset + 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at


class Replica:
    """One broker's copy of one partition."""

    def __init__(self, start: int, *, log_append_time: bool, gzip: bool = False) -> None:
        self.batches: list[LogBatch] = []
        #: A kill may reset the log start to the stored one. Below `highest_start`, readers may have missed records.
        self._log_start = self.checkpointed_start = self.highest_start = start
        self.log_end = start
        self.high_watermark = start
        self.producers: dict[int, Known] = {}
        self.log_append_time = log_append_time
        self.gzip = gzip

    @property
    def log_start(self) -> int:
        return self._log_start

    @log_start.setter
    def log_start(self, offset: int) -> None:
        self._log_start = offset
        self.highest_start = max(self.highest_start, offset)

    # ---- appends

    def append_as_leader(
        self, data: bytes, header: BatchHeader, leader_epoch: int, now_ms: int, *, from_zero: bool = False
    ) -> PartitionResult:
        """The result's `partition` is 0; the caller sets it. `from_zero`: unknown producers start at 0 (v2)."""
        if header.producer_id >= 0:
            refused = self.check_producer(header, from_zero=from_zero)
            if refused is not None:
                return refused
        newest = now_ms if self.log_append_time else newest_timestamp(data, header)
        stored = self._rewritten(data, header, newest)
        struct.pack_into(">q", stored, 0, self.log_end)
        struct.pack_into(">i", stored, 12, leader_epoch)
        base = self.log_end
        self.append(bytes(stored), leader_epoch)
        return PartitionResult(0, NONE, base, now_ms if self.log_append_time else -1, self.log_start)

    def _rewritten(self, data: bytes, header: BatchHeader, newest_timestamp_ms: int) -> bytearray:
        """The batch as stored. If the broker rewrites it, only known attributes survive."""
        stored = bytearray(data)
        attributes = header.attributes
        if self.gzip and not attributes & _CODEC:
            stored[_RECORDS_AT:] = gzip.compress(data[_RECORDS_AT:], mtime=0)
            struct.pack_into(">i", stored, 8, len(stored) - 12)
            attributes |= _GZIP
        if self.log_append_time:
            attributes |= _LOG_APPEND_TIME
        if attributes != header.attributes or newest_timestamp_ms != header.max_timestamp_ms:
            struct.pack_into(">h", stored, 21, attributes & _KNOWN_ATTRIBUTES)
            struct.pack_into(">q", stored, 35, newest_timestamp_ms)
            struct.pack_into(">I", stored, 17, crc32c.crc32c(bytes(stored[21:])))
        return stored

    def check_producer(self, header: BatchHeader, *, from_zero: bool) -> PartitionResult | None:
        known = self.producers.get(header.producer_id)
        first = header.base_sequence
        last = (first + header.last_offset_delta) % _SEQUENCES
        if known is None:  # an unknown producer may start at any sequence
            return PartitionResult(0, OUT_OF_ORDER, log_start_offset=self.log_start) if from_zero and first else None
        if known.epoch == header.producer_epoch:
            for known_first, known_last, base, _, timestamp in known.batches:
                if (known_first, known_last) == (first, last):
                    return PartitionResult(0, NONE, base, timestamp, self.log_start)
        if header.producer_epoch < known.epoch:
            return PartitionResult(0, WRONG_EPOCH, log_start_offset=self.log_start)
        expected = 0 if header.producer_epoch > known.epoch else (known.last_sequence + 1) % _SEQUENCES
        return None if first == expected else PartitionResult(0, OUT_OF_ORDER, log_start_offset=self.log_start)

    def append(self, stored: bytes, leader_epoch: int) -> None:
        header = parse_batch_header(memoryview(stored))
        batch = LogBatch(header.base_offset, header.record_count, stored, header, leader_epoch)
        assert batch.base == self.log_end
        self.batches.append(batch)
        self.log_end = batch.end
        self._learn(batch)

    def _learn(self, batch: LogBatch) -> None:
        header = batch.header
        if header.producer_id < 0:
            return
        known = self.producers.get(header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            start = None if known is None else known.transaction_start
            known = self.producers[header.producer_id] = Known(header.producer_epoch, transaction_start=start)
        known.last_timestamp_ms = header.max_timestamp_ms
        if header.is_control:
            known.transaction_start = None
            return
        last = (header.base_sequence + header.last_offset_delta) % _SEQUENCES
        known.batches.append((header.base_sequence, last, batch.base, batch.end, header.max_timestamp_ms))
        if header.is_transactional and known.transaction_start is None:
            known.transaction_start = batch.base

    # ---- expiry and truncation

    def expire_producers(self, now_ms: int, expiration_ms: int) -> None:
        for producer_id, known in list(self.producers.items()):
            if known.transaction_start is None and now_ms - known.last_timestamp_ms >= expiration_ms:
                del self.producers[producer_id]

    def reload_producers(self, snapshot: int, now_ms: int, expiration_ms: int, *, clean: bool = True) -> None:
        """Rebuild the producers after a restart or truncation: each producer's last unexpired batch in the snapshot,
        deleted or not, and the batches after it. A snapshot at or below the log start is ignored.

        `clean`: the snapshot has all producers known at shutdown. Otherwise recovery made it from the log.
        """
        used = snapshot > self.log_start
        before, self.producers = self.producers, {}
        if used:
            for batch in self.batches:
                if batch.base < snapshot:
                    self._learn(batch)
            if clean:
                self.producers = {pid: known for pid, known in self.producers.items() if pid in before}
            for known in self.producers.values():
                while len(known.batches) > 1:
                    known.batches.popleft()
            self.expire_producers(now_ms, expiration_ms)
        for batch in self.batches:
            if batch.end > self.log_start and not (used and batch.base < snapshot):
                self._learn(batch)
        self.expire_producers(now_ms, expiration_ms)

    def truncate(self, end: int) -> bool:
        if end >= self.log_end:
            return False
        self.batches = [batch for batch in self.batches if batch.end <= end]
        self.log_end = max(self.batches[-1].end if self.batches else self.log_start, self.log_start)
        self.high_watermark = min(self.high_watermark, self.log_end)
        return True

    def batch_at(self, offset: int) -> LogBatch | None:
        for batch in reversed(self.batches):
            if batch.base <= offset < batch.end:
                return batch
            if batch.end <= offset:
                return None
        return None


@dataclass(slots=True)
class View:
    """A partition's leadership, as one broker knows it."""

    leader: int | None = None
    epoch: int = -1
    isr: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Partition:
    """One incarnation of a partition: the controller's state, and all replicas."""

    name: TopicPartition
    topic_id: UUID
    leader: int | None
    epoch: int
    isr: list[int]
    replicas: dict[int, Replica]
    settings: Settings
    views: dict[int, View]
    fetched_to: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    #: (time, node, log end) of brokers that believe they lead: the values that `actual` may have.
    ends: list[tuple[float, int, int]] = field(default_factory=list)
    deleted: bool = False
    lost_by_unclean: bool = False
    lost_at: float = float("inf")
    read_denied: bool = False
    write_denied: bool = False

    @property
    def min_isr(self) -> int:
        return self.settings.min_isr


@dataclass(slots=True, eq=False)
class Waiting:
    """An acks=all append that waits for its replicas (DelayedProduce)."""

    broker: int
    incarnation: int
    epoch: int
    required: int
    result: PartitionResult
    done: Callable[[PartitionResult], None]
    over: bool = False


@dataclass(slots=True)
class Transaction:
    """The coordinator's state of one transactional producer. With transactions v2, each end bumps the epoch."""

    producer_id: int
    epoch: int
    v2: bool = False
    ongoing: bool = False
    partitions: list[TopicPartition] = field(default_factory=list)
    began_at: float = 0.0
    due: list[TopicPartition] = field(default_factory=list)
    committed: bool | None = None  # outcome of the last one
    ends: int = 0  # number of ended ones

    @property
    def markers_due(self) -> int:
        return len(self.due)

    @property
    def state(self) -> str:
        """The state in DescribeTransactions."""
        if self.ongoing:
            return "Ongoing"
        if self.committed is None and not self.due:
            return "Empty"
        return f"{'Prepare' if self.due else 'Complete'}{'Commit' if self.committed else 'Abort'}"


class BrokerSide(End):
    """The broker's end of a connection: one request at a time."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self.cluster = cluster
        self.node = node
        self.incarnation = cluster.brokers[node].incarnation
        self.connection: Connection | None = None
        self._bytes = bytearray()
        self._frames: deque[bytes] = deque()
        self._busy = False
        self._closed = False

    def data(self, data: bytes) -> None:
        if self._closed:
            return
        self._bytes += data
        while (frame := take_frame(self._bytes)) is not None:
            self._frames.append(frame)
        self._next()

    def lost(self) -> None:
        """The current request continues; received ones may also be handled (closingChannels), or not."""
        self._closed = True
        if self.cluster.sim.chance(0.5):
            self._frames.clear()

    def _next(self) -> None:
        if not self._busy and self._frames:
            self._busy = True
            frame = self._frames.popleft()
            self.cluster.queue(self.node, self.incarnation, self._handle, frame)

    def _handle(self, frame: bytes) -> None:
        request = parse_produce_request(memoryview(frame))
        self.cluster.produce(self.node, request, lambda response: self._respond(request, response))

    def _respond(self, request: ProduceRequest, response: ProduceResponse) -> None:
        throttled, sim = 0.0, self.cluster.sim
        if self.cluster.throttled and sim.chance(self.cluster.throttled):
            throttled = sim.between(0.05, 3.0)
        if not self._closed and self.connection is not None and self.cluster.live(self.node, self.incarnation):
            response = replace(response, throttle_time_ms=round(throttled * 1000))
            self.connection.to_a.write(encode_produce_response(response, request.api_version))
        if throttled:
            sim.after(throttled, self._read_on)
        else:
            self._read_on()

    def _read_on(self) -> None:
        self._busy = False
        self._next()


@dataclass(slots=True)
class Broker:
    live: bool = True
    incarnation: int = 0
    paused_until: float = 0.0
    put_off: list[tuple[Callable[..., None], tuple[object, ...]]] = field(default_factory=list)
    sides: list[BrokerSide] = field(default_factory=list)


class Cluster:
    """All brokers, the controller and the transaction coordinator."""

    def __init__(
        self,
        sim: Sim,
        *,
        broker_count: int,
        min_isr: int,
        expiration_seconds: float,
        log_append_time: bool,
        unclean: bool,
        slow_requests: float,
        throttled: float,
        too_large: float,
        server_errors: float,
        transactions_v2: bool,
    ) -> None:
        self.sim = sim
        self.brokers = [Broker() for _ in range(broker_count)]
        self.settings = Settings(min_isr, log_append_time)
        self.expiration_ms = int(expiration_seconds * 1000)
        #: Before 4.0 (KIP-966), batches of the last in-sync replica are committed below min.insync.replicas, and a
        #: waiting append gets 20. Since then it keeps waiting and gets 7.
        self.commits_under_min_isr = sim.chance(0.5)
        self.unclean = unclean
        self.slow_requests = slow_requests
        self.throttled = throttled
        self.too_large = too_large
        self.server_errors = server_errors
        self.transactions_v2 = transactions_v2
        self.partitions: dict[TopicPartition, Partition] = {}
        self.retired: list[Partition] = []
        self.transactions: dict[int, Transaction] = {}
        self.transactional_ids: dict[str, int] = {}  # → producer id
        self._next_producer_id = 100

    # ---- topics

    def create(self, name: TopicPartition, start: int = 0, settings: Settings | None = None) -> Partition:
        rng = self.sim.rng
        nodes = list(range(len(self.brokers)))
        rng.shuffle(nodes)
        settings = settings or self.settings
        replicas = {
            node: Replica(start, log_append_time=settings.log_append_time, gzip=settings.gzip) for node in nodes
        }
        views = {node: View(nodes[0], 0, list(nodes)) for node in nodes}
        partition = Partition(name, UUID(int=rng.getrandbits(128)), nodes[0], 0, list(nodes), replicas, settings, views)
        self.partitions[name] = partition
        self._note_end(partition, nodes[0])
        return partition

    def recreate(self, name: TopicPartition) -> None:
        """Delete and recreate: another topic with the same name."""
        old = self.partitions[name]
        old.deleted = True
        self.retired.append(old)
        for waiting in old.waiting:
            self._finish(old, waiting, UNKNOWN_TOPIC)
        self.sim.log(f"topic of {name} is deleted and created again")
        self.create(name, settings=old.settings)

    def delete_records(self, name: TopicPartition, before: int | None = None) -> None:
        """Delete records, by default up to a random batch end. Producers stay known."""
        partition = self.partitions[name]
        if partition.leader is None:
            return
        leader = partition.replicas[partition.leader]
        ends = [b.end for b in leader.batches if leader.log_start < b.end <= leader.high_watermark]
        if ends:
            start = self.sim.rng.choice(ends) if before is None else before
            for replica in partition.replicas.values():
                replica.log_start = max(replica.log_start, min(start, replica.log_end))
            self.sim.log(f"{name}: records before {start} are deleted")

    # ---- request queues

    def live(self, node: int, incarnation: int) -> bool:
        broker = self.brokers[node]
        return broker.live and broker.incarnation == incarnation

    def queue(self, node: int, incarnation: int, call: Callable[..., None], *args: object) -> None:
        """Queue a request. It stays queued if its connection closes."""
        sim = self.sim
        delay = sim.between(0.05, 3.0) if sim.chance(self.slow_requests) else sim.between(0.0002, 0.003)
        sim.after(delay, self._dequeue, node, incarnation, call, args)

    def _dequeue(self, node: int, incarnation: int, call: Callable[..., None], args: tuple[object, ...]) -> None:
        if self.live(node, incarnation) and not self._put_off(node, self._dequeue, node, incarnation, call, args):
            call(*args)

    def _put_off(self, node: int, call: Callable[..., None], *args: object) -> bool:
        """If the broker is paused, call this when it resumes, and return True."""
        broker = self.brokers[node]
        if broker.paused_until <= self.sim.now:
            return False
        broker.put_off.append((call, args))
        return True

    def pause(self, node: int, seconds: float) -> None:
        self.sim.log(f"broker {node} is paused for {seconds:.2f} s")
        self.brokers[node].paused_until = self.sim.now + seconds
        self.sim.after(seconds, self._run_put_off, node)

    def resume(self, node: int) -> None:
        self.brokers[node].paused_until = 0.0
        self._run_put_off(node)

    def _run_put_off(self, node: int) -> None:
        broker = self.brokers[node]
        if broker.paused_until <= self.sim.now:
            put_off, broker.put_off = broker.put_off, []
            for call, args in put_off:
                self.sim.after(self.sim.between(0.0, 0.01), call, *args)

    # ---- Produce

    def produce(self, node: int, request: ProduceRequest, done: Callable[[ProduceResponse], None]) -> None:
        requested = [(topic, data) for topic in request.topics for data in topic.partitions]
        results: dict[tuple[str, UUID | None, int], PartitionResult] = {}

        def one(key: tuple[str, UUID | None, int], result: PartitionResult) -> None:
            results[key] = PartitionResult(
                key[2], result.error_code, result.base_offset, result.log_append_time_ms, result.log_start_offset
            )
            if len(results) == len(requested):
                topics = tuple(
                    TopicResult(
                        t.name, t.topic_id, tuple(results[t.name, t.topic_id, d.partition] for d in t.partitions)
                    )
                    for t in request.topics
                )
                done(ProduceResponse(request.correlation_id, topics, 0))

        for topic, data in requested:
            key = (topic.name, topic.topic_id, data.partition)
            if request.api_version >= BY_TOPIC_ID:
                found = [
                    p
                    for p in self.partitions.values()
                    if p.topic_id == topic.topic_id and p.name.partition == data.partition
                ]
                if not found:
                    one(key, PartitionResult(0, UNKNOWN_TOPIC_ID))
                    continue
                partition = found[0]
            else:
                partition = self.partitions[TopicPartition(topic.name, data.partition)]
            records = bytes(data.records or b"")
            done_with = functools.partial(one, key)
            self.append(node, partition, records, done_with, acks=request.acks, timeout_ms=request.timeout_ms)

    def append(
        self,
        node: int,
        partition: Partition,
        records: bytes,
        done: Callable[[PartitionResult], None],
        *,
        acks: int,
        timeout_ms: int,
    ) -> None:
        sim = self.sim
        view = partition.views[node]
        replica = partition.replicas[node]
        refused = self._refuse(node, partition, records, acks)
        if refused != NONE:
            reported = refused in (NOT_ENOUGH_REPLICAS, INVALID_RECORD, INVALID_TIMESTAMP)
            return done(PartitionResult(0, refused, log_start_offset=replica.log_start if reported else -1))
        failed = bool(self.server_errors) and sim.chance(self.server_errors)
        if self._cannot_be_read(records) or (failed and sim.chance(0.5)):
            return done(PartitionResult(0, SERVER_ERROR))
        header = parse_batch_header(memoryview(records))
        result = replica.append_as_leader(
            records, header, view.epoch, sim.unix_ms, from_zero=header.is_transactional and self._v2(header.producer_id)
        )
        if sim.tracing:
            sim.log(
                f"broker {node} {partition.name}: {header.producer_id}/{header.producer_epoch}/{header.base_sequence}"
                f" x{header.record_count} -> error {result.error_code} base {result.base_offset}"
                + (" (duplicate)" if result.error_code == 0 and result.base_offset + 1 > replica.log_end else "")
                + f", log end {replica.log_end}, epoch {view.epoch}"
            )
        if result.error_code:
            return done(result)
        self._note_end(partition, node)
        self._advance(partition, node)
        self._replicate_soon(partition, node)
        if failed:
            return done(PartitionResult(0, SERVER_ERROR))
        if acks != -1:
            return done(result)
        required = result.base_offset + header.record_count
        waiting = Waiting(node, self.brokers[node].incarnation, view.epoch, required, result, done)
        partition.waiting.append(waiting)
        self._check_waiting(partition)
        if not waiting.over:
            sim.after(timeout_ms / 1000, self._expire_waiting, partition, waiting)
        return None

    def _cannot_be_read(self, records: bytes) -> bool:
        """Some batches cannot be decompressed, whichever client sends them."""
        return crc32c.crc32c(records[HEADER_BYTES:]) % 1000 < 1000 * self.server_errors

    def _refuse(self, node: int, partition: Partition, records: bytes, acks: int) -> int:
        """Checks before the duplicate check, in Kafka's order."""
        view, settings = partition.views[node], partition.settings
        if partition.write_denied:
            return DENIED
        if view.leader != node:
            return NOT_LEADER
        if not records:
            return INVALID_RECORD
        header = parse_batch_header(memoryview(records))
        if settings.old_format and header.producer_id >= 0:
            return OLD_FORMAT
        if header.is_transactional and not self._in_transaction(header, partition.name):
            v2 = self._v2(header.producer_id)
            return CONCURRENT_TRANSACTIONS if v2 and self.busy(header.producer_id) else INVALID_TXN_STATE
        if acks == -1 and len(view.isr) < settings.min_isr:
            return NOT_ENOUGH_REPLICAS
        if header.base_offset != 0:
            return INVALID_RECORD
        if settings.max_message_bytes is not None and len(records) > settings.max_message_bytes:
            return TOO_LARGE
        if self.too_large and self.sim.chance(self.too_large):
            return TOO_LARGE
        if not verify_crc(memoryview(records)):
            return CORRUPT
        ahead = settings.timestamp_after_max_ms
        if ahead is not None and newest_timestamp(records, header) - self.sim.unix_ms > ahead:
            return INVALID_TIMESTAMP
        return NONE

    def _in_transaction(self, header: BatchHeader, name: TopicPartition) -> bool:
        """Verify with the coordinator that the partition was added. With transactions v2, add it."""
        if self._v2(header.producer_id):
            self._add(header.producer_id, header.producer_epoch, name)
        transaction = self.transactions.get(header.producer_id)
        return (
            transaction is not None
            and transaction.ongoing
            and transaction.epoch == header.producer_epoch
            and name in transaction.partitions
        )

    def _expire_waiting(self, partition: Partition, waiting: Waiting) -> None:
        if not waiting.over and not self._put_off(waiting.broker, self._expire_waiting, partition, waiting):
            self._finish(partition, waiting, TIMED_OUT)

    def _finish(self, partition: Partition, waiting: Waiting, error: int) -> None:
        if waiting.over:
            return
        waiting.over = True
        if waiting in partition.waiting:
            partition.waiting.remove(waiting)
        r = waiting.result
        if self.live(waiting.broker, waiting.incarnation):
            waiting.done(PartitionResult(0, error, r.base_offset, r.log_append_time_ms, r.log_start_offset))

    def _check_waiting(self, partition: Partition) -> None:
        for waiting in list(partition.waiting):
            view = partition.views[waiting.broker]
            if view.leader != waiting.broker or view.epoch != waiting.epoch:
                self._finish(partition, waiting, NOT_LEADER)
            elif partition.replicas[waiting.broker].high_watermark >= waiting.required:
                self._finish(partition, waiting, NONE if len(view.isr) >= partition.min_isr else AFTER_APPEND)

    # ---- replication

    def _advance(self, partition: Partition, node: int) -> None:
        """Advance the leader's high watermark to what the whole ISR has."""
        view = partition.views[node]
        replica = partition.replicas[node]
        fetched = partition.fetched_to.setdefault((node, view.epoch), {})
        low = min((fetched.get(other, 0) for other in view.isr if other != node), default=replica.log_end)
        high_watermark = min(low, replica.log_end)
        if len(view.isr) < partition.min_isr and not self.commits_under_min_isr:
            return
        if high_watermark > replica.high_watermark:
            replica.high_watermark = high_watermark
            self._check_waiting(partition)

    def _replicate_soon(self, partition: Partition, leader: int) -> None:
        for node in partition.replicas:
            if node != leader:
                delay = 0.001 + self.sim.rng.expovariate(300.0)
                if self.sim.chance(0.02):
                    delay += self.sim.between(0.0, 1.5)
                self.sim.after(delay, self._fetch, partition, node, leader, self.brokers[node].incarnation)

    def _fetch(self, partition: Partition, node: int, leader: int, incarnation: int) -> None:
        """One fetch of a follower: truncate to the common prefix, copy the rest, report the position."""
        for each in (node, leader):
            if not self.brokers[each].live or partition.deleted:
                return
            if self._put_off(each, self._fetch, partition, node, leader, incarnation):
                return
        if self.brokers[node].incarnation != incarnation:
            return
        mine, theirs = partition.views[node], partition.views[leader]
        if mine.leader != leader or theirs.leader != leader or mine.epoch != theirs.epoch:
            return
        here, there = partition.replicas[node], partition.replicas[leader]
        shared = 0
        for ours, other in zip(here.batches, there.batches, strict=False):
            if (ours.base, ours.leader_epoch) != (other.base, other.leader_epoch):
                break
            shared += 1
        common = here.batches[shared - 1].end if shared else (here.batches[0].base if here.batches else here.log_end)
        if here.truncate(common):
            here.reload_producers(self.snapshot_of(here), self.sim.unix_ms, self.expiration_ms)
            self.sim.log(f"broker {node} {partition.name}: truncated to {here.log_end}")
        for batch in there.batches[shared:]:
            here.append(batch.data, batch.leader_epoch)
        here.log_start = max(here.log_start, min(there.log_start, here.log_end))
        here.high_watermark = max(here.high_watermark, min(there.high_watermark, here.log_end))
        self.sim.after(
            self.sim.between(0.0005, 0.004), self._fetched, partition, node, leader, here.log_end, mine.epoch
        )

    def _fetched(self, partition: Partition, node: int, leader: int, end: int, epoch: int) -> None:
        """The follower's next fetch reports that it has everything up to `end`."""
        if not self.brokers[leader].live or partition.deleted:
            return
        if self._put_off(leader, self._fetched, partition, node, leader, end, epoch):
            return
        view = partition.views[leader]
        if view.leader != leader or view.epoch != epoch or partition.views[node].epoch != epoch:
            return
        fetched = partition.fetched_to.setdefault((leader, epoch), {})
        fetched[node] = max(fetched.get(node, 0), end)
        current = partition.leader == leader and partition.epoch == epoch
        lagging = end < partition.replicas[leader].high_watermark
        if current and node not in partition.isr and not lagging and self.brokers[node].live:
            partition.isr.append(node)
            view.isr = list(partition.isr)
        self._advance(partition, leader)
        replica = partition.replicas[node]
        replica.high_watermark = max(
            replica.high_watermark, min(partition.replicas[leader].high_watermark, replica.log_end)
        )

    def snapshot_of(self, replica: Replica) -> int:
        """Offset of the newest producer snapshot."""
        bases = [replica.log_end, *(b.base for b in replica.batches[-8:])]
        return self.sim.rng.choice(bases)

    # ---- leadership

    def elect(self, partition: Partition, *, prefer_other: bool = False) -> None:
        """Choose a leader in a new epoch and notify the brokers."""
        candidates = [n for n in partition.isr if self._seems_live(n)]
        if prefer_other and len(candidates) > 1:
            candidates = [n for n in candidates if n != partition.leader]
        if not candidates and self.unclean:
            candidates = [n for n in partition.replicas if self._seems_live(n)]
            if candidates:
                partition.isr = []
                partition.lost_by_unclean = True
                partition.lost_at = self.sim.now
        partition.epoch += 1
        partition.leader = self.sim.rng.choice(candidates) if candidates else None
        if partition.leader is not None:
            partition.isr = [n for n in partition.isr if self._seems_live(n)] or [partition.leader]
        self.sim.log(f"{partition.name}: leader {partition.leader}, epoch {partition.epoch}, isr {partition.isr}")
        for node in partition.replicas:
            self.sim.after(
                self.sim.between(0.001, 0.3), self._learn_leader, partition, node, self.brokers[node].incarnation
            )

    def _seems_live(self, node: int) -> bool:
        broker = self.brokers[node]
        return broker.live and broker.paused_until <= self.sim.now

    def _learn_leader(self, partition: Partition, node: int, incarnation: int) -> None:
        if not self.live(node, incarnation) or partition.deleted:
            return
        if self._put_off(node, self._learn_leader, partition, node, incarnation):
            return
        view = partition.views[node]
        led = view.leader == node
        view.leader, view.isr = partition.leader, list(partition.isr)
        if view.epoch != partition.epoch:
            view.epoch = partition.epoch
            if view.leader == node:
                self.sim.log(f"broker {node} {partition.name}: leads in epoch {view.epoch}")
                self._note_end(partition, node)
            elif led:
                partition.ends.append((self.sim.now, node, -1))
        self._check_waiting(partition)
        if view.leader == node:
            self._advance(partition, node)
            self._replicate_soon(partition, node)
        elif view.leader is not None:
            self.sim.after(self.sim.between(0.001, 0.01), self._fetch, partition, node, view.leader, incarnation)

    def control_tick(self) -> None:
        """Twice a second: remove dead brokers from ISRs and elect leaders."""
        for partition in list(self.partitions.values()):
            dead = [n for n in partition.isr if not self._seems_live(n)]
            if dead and len(dead) < len(partition.isr):
                partition.isr = [n for n in partition.isr if n not in dead]
                if partition.leader not in dead:
                    leader = partition.leader
                    if leader is not None:
                        self.sim.after(
                            self.sim.between(0.001, 0.1),
                            self._learn_leader,
                            partition,
                            leader,
                            self.brokers[leader].incarnation,
                        )
            if partition.leader is None:
                if any(self._seems_live(n) for n in (partition.replicas if self.unclean else partition.isr)):
                    self.elect(partition)
            elif not self._seems_live(partition.leader):
                if len(self.brokers) > 1 or not self.brokers[partition.leader].live:
                    self.elect(partition)
            else:
                # Followers fetch continuously; here, when there is something to copy, and at intervals.
                self._replicate_soon(partition, partition.leader)

    def kill(self, node: int) -> None:
        broker = self.brokers[node]
        broker.live = False
        broker.incarnation += 1
        self.sim.log(f"broker {node} is killed")
        self.resume(node)
        for side in broker.sides:
            if side.connection is not None:
                side.connection.cut()
        broker.sides.clear()
        for partition in self.partitions.values():
            for waiting in list(partition.waiting):
                if waiting.broker == node:
                    waiting.over = True
                    partition.waiting.remove(waiting)
            if partition.views[node].leader == node:
                partition.ends.append((self.sim.now, node, -1))
            partition.views[node] = View()

    def restart(self, node: int, *, clean: bool | None = None) -> None:
        """`clean`: after a clean shutdown; by default random."""
        broker = self.brokers[node]
        if broker.live:
            return
        clean = self.sim.chance(0.5) if clean is None else clean
        broker.live = True
        self.sim.log(f"broker {node} starts again")
        for partition in self.partitions.values():
            replica = partition.replicas[node]
            # After both, only each producer's last batch is known: recovery takes a snapshot, too.
            if clean:
                replica.checkpointed_start = replica.log_start
            elif self.sim.chance(0.5):  # stored once a minute
                replica.log_start = replica.checkpointed_start
            replica.reload_producers(replica.log_end, self.sim.unix_ms, self.expiration_ms, clean=clean)
            replica.high_watermark = max(
                replica.log_start, min(replica.high_watermark, replica.log_end) - self.sim.rng.choice((0, 0, 2))
            )
            if partition.leader == node:
                # It returned before the controller noticed: the new incarnation is fenced first.
                if len(partition.isr) > 1:
                    partition.isr.remove(node)
                self.elect(partition)
            else:
                self.sim.after(self.sim.between(0.001, 0.3), self._learn_leader, partition, node, broker.incarnation)

    def expire_producers(self) -> None:
        for partition in self.partitions.values():
            for node, replica in partition.replicas.items():
                if self.brokers[node].live:
                    replica.expire_producers(self.sim.unix_ms, self.expiration_ms)

    # ---- requests of the control client; None: not the leader of that epoch

    def leads(self, node: int, partition: Partition, epoch: int) -> bool:
        view = partition.views[node]
        return self._seems_live(node) and not partition.deleted and view.leader == node and view.epoch == epoch

    # ---- transactions

    def init_producer_id(self, known: int | None = None) -> tuple[int, int]:
        if known is not None:
            transaction = self.transactions[known]
            if transaction.ongoing:
                self._end_transaction(transaction, commit=False)
            transaction.epoch += 1
            transaction.committed = None
            return known, transaction.epoch
        producer_id = self._next_producer_id
        self._next_producer_id += 1
        return producer_id, 0

    def may_use(self, client_id: str | None, transactional_id: str) -> bool:
        """Kafka authorizes principals; here, client ids."""
        return transactional_id == client_id or not (client_id or "").startswith("stranger")

    def begin_transactional(self, producer_id: int, *, v2: bool | None = None) -> None:
        """With transactions v1 or v2; by default the cluster's version."""
        self.transactions[producer_id] = Transaction(producer_id, 0, self.transactions_v2 if v2 is None else v2)

    def add_partition(self, producer_id: int, epoch: int, name: TopicPartition) -> bool:
        """AddPartitionsToTxn. With transactions v2 the broker adds the partition at the first append."""
        return self._v2(producer_id) or self._add(producer_id, epoch, name)

    def _v2(self, producer_id: int) -> bool:
        transaction = self.transactions.get(producer_id)
        return transaction is not None and transaction.v2

    def epoch_of(self, producer_id: int) -> int:
        """The epoch that EndTxn returns for the next transaction (v2)."""
        return self.transactions[producer_id].epoch

    def transaction_partitions(self, producer_id: int) -> list[TopicPartition]:
        """DescribeTransactions: added partitions whose markers are not written yet."""
        transaction = self.transactions[producer_id]
        return [*transaction.partitions, *transaction.due]

    def busy(self, producer_id: int) -> bool:
        """CONCURRENT_TRANSACTIONS: markers of the previous transaction are being written."""
        return self.transactions[producer_id].markers_due > 0

    def _add(self, producer_id: int, epoch: int, name: TopicPartition) -> bool:
        transaction = self.transactions[producer_id]
        if transaction.epoch != epoch or transaction.markers_due:
            return False
        if not transaction.ongoing:
            transaction.ongoing, transaction.partitions, transaction.began_at = True, [], self.sim.now
        if name not in transaction.partitions:
            transaction.partitions.append(name)
        return True

    def end_transaction(self, producer_id: int, epoch: int, *, commit: bool) -> bool:
        transaction = self.transactions[producer_id]
        if not transaction.ongoing or transaction.epoch != epoch:
            return False
        self._end_transaction(transaction, commit=commit)
        return True

    def end_txn(self, producer_id: int, epoch: int, *, commit: bool) -> tuple[int, int, int]:
        """Return error, producer id and next epoch (v2).

        TransactionCoordinator.endTransaction: the same end may be repeated; with v2, also with the previous epoch.
        """
        transaction = self.transactions.get(producer_id)
        if transaction is None:
            return INVALID_PRODUCER_ID_MAPPING, -1, -1
        again = transaction.v2 and epoch == transaction.epoch - 1 and not transaction.ongoing
        if epoch != transaction.epoch and not again:
            return PRODUCER_FENCED, -1, -1
        if transaction.ongoing:
            self._end_transaction(transaction, commit=commit)
            transaction.committed = commit
        elif transaction.v2 and not again and not commit and not transaction.markers_due:
            transaction.epoch += 1  # an abort ends even a transaction that was not begun
            transaction.committed = False
        elif transaction.committed is not commit or (transaction.v2 and not again):
            return INVALID_TXN_STATE, -1, -1
        elif transaction.markers_due:
            return CONCURRENT_TRANSACTIONS, -1, -1
        return NONE, producer_id, transaction.epoch

    def _end_transaction(self, transaction: Transaction, *, commit: bool) -> None:
        transaction.ongoing = False
        transaction.ends += 1
        if transaction.v2:
            transaction.epoch += 1
        transaction.due += transaction.partitions
        for name in transaction.partitions:
            self.sim.after(
                self.sim.between(0.002, 0.3), self._marker, name, transaction.producer_id, transaction.epoch, commit
            )
        transaction.partitions = []

    def _marker(self, name: TopicPartition, producer_id: int, epoch: int, commit: bool) -> None:
        """The leader writes it past every sequencer, however late, and again until it is replicated (acks=all)."""
        partition = self.partitions[name]
        node = partition.leader
        if node is None or not self.leads(node, partition, partition.epoch):
            self.sim.after(0.2, self._marker, name, producer_id, epoch, commit)
            return
        replica = partition.replicas[node]
        known = replica.producers.get(producer_id)
        if known is not None and known.epoch > epoch:
            self.transactions[producer_id].due.remove(name)
            return
        replica.append(_marker(replica.log_end, producer_id, epoch, commit, self.sim.unix_ms), partition.epoch)
        self.sim.log(f"{name}: {'commit' if commit else 'abort'} marker of {producer_id}, log end {replica.log_end}")
        self._note_end(partition, node)
        self._advance(partition, node)
        self._replicate_soon(partition, node)
        again = functools.partial(self._marker, name, producer_id, epoch, commit)
        done = functools.partial(self.transactions[producer_id].due.remove, name)
        self._marker_written(partition, node, partition.epoch, replica.log_end, done, again)

    def write_marker(
        self, node: int, partition: Partition, producer_id: int, epoch: int, done: Callable[[int], None]
    ) -> None:
        """WriteTxnMarkers (abort), for a producer without a transaction. `done` gets the error code."""
        replica, view = partition.replicas[node], partition.views[node]
        if partition.deleted or view.leader != node:
            return done(NOT_LEADER)
        if len(view.isr) < partition.min_isr:
            return done(NOT_ENOUGH_REPLICAS)
        known = replica.producers.get(producer_id)
        if known is not None and known.epoch > epoch:
            return done(WRONG_EPOCH)
        replica.append(_marker(replica.log_end, producer_id, epoch, False, self.sim.unix_ms), view.epoch)
        self.sim.log(f"{partition.name}: claim marker {producer_id}/{epoch}, log end {replica.log_end}")
        self._note_end(partition, node)
        self._advance(partition, node)
        self._replicate_soon(partition, node)
        written, lost = functools.partial(done, NONE), functools.partial(done, NOT_LEADER)
        self._marker_written(partition, node, view.epoch, replica.log_end, written, lost)
        return None

    def _marker_written(  # noqa: PLR0917
        self,
        partition: Partition,
        node: int,
        leader_epoch: int,
        end: int,
        done: Callable[[], None],
        again: Callable[[], None],
    ) -> None:
        view = partition.views[node]
        if partition.deleted:
            done()
        elif not self.brokers[node].live or view.leader != node or view.epoch != leader_epoch:
            again()  # first: the follower's batches up to there may be another leader's, and this one truncated
        elif partition.replicas[node].high_watermark >= end:
            done()
        else:
            self.sim.after(0.02, self._marker_written, partition, node, leader_epoch, end, done, again)

    def abort_old_transactions(self, older_than_seconds: float) -> None:
        for transaction in self.transactions.values():
            if transaction.ongoing and self.sim.now - transaction.began_at > older_than_seconds:
                transaction.epoch += 1
                transaction.committed = False
                self._end_transaction(transaction, commit=False)

    # ---- for checkers

    def _note_end(self, partition: Partition, node: int) -> None:
        partition.ends.append((self.sim.now, node, partition.replicas[node].log_end))

    def final_log(self, partition: Partition) -> list[LogBatch]:
        """The leader's log at the end of the run; for a deleted partition, its last leader's."""
        if partition.leader is not None:
            return partition.replicas[partition.leader].batches
        return max(partition.replicas.values(), key=lambda r: r.log_end).batches


def is_commit(control_batch: bytes) -> bool:
    """Whether a marker commits: the type is in the record key."""
    return control_batch[_RECORDS_AT + 8] == 1


def _marker(base: int, producer_id: int, epoch: int, commit: bool, now_ms: int) -> bytes:
    """A control batch with one record (EndTransactionMarker)."""
    key, value = struct.pack(">hh", 0, int(commit)), struct.pack(">hi", 0, 0)
    record = bytes((0, 0, 0, len(key) * 2)) + key + bytes((len(value) * 2,)) + value + b"\0"
    record = bytes((len(record) * 2,)) + record
    covered = struct.pack(">hiqqqhii", 0x30, 0, now_ms, now_ms, producer_id, epoch, -1, 1) + record
    rest = struct.pack(">I", crc32c.crc32c(covered)) + covered
    return struct.pack(">qiib", base, 4 + 1 + len(rest), 0, 2) + rest
