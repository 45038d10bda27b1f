"""The simulation's brokers (`tests/simulation/broker.py`) as a driver."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from fencepost_proxy.preflight.conformance.batches import Logged, read_batches
from fencepost_proxy.preflight.conformance.driver import (
    DEFAULTS,
    Answer,
    Kafka,
    ProducerState,
    Settings,
    Topic,
    Transaction,
    Wire,
)
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import (
    BY_TOPIC_ID,
    PartitionData,
    ProduceRequest,
    TopicData,
    encode_produce_request,
    parse_produce_response,
)
from tests.simulation import broker
from tests.simulation.clock import Connection, End, Sim

ANSWER_SECONDS = 60.0
_DAY_SECONDS = 86_400.0
_STEP_SECONDS = 0.002
_NAMED = 9


class ModelKafka(Kafka):
    """A separate cluster for each case, from a seed. Its clock advances only in `until`."""

    def __init__(self, seed: int, brokers: int) -> None:
        self.sim = Sim(seed)
        self.cluster = broker.Cluster(
            self.sim,
            broker_count=brokers,
            min_isr=1,
            expiration_seconds=_DAY_SECONDS,
            log_append_time=False,
            unclean=False,
            slow_requests=0.0,
            throttled=0.0,
            too_large=0.0,
            server_errors=0.0,
            transactions_v2=False,
        )
        self.cluster.commits_under_min_isr = False
        self._topics = 0
        self._control_tick()

    def _control_tick(self) -> None:
        self.cluster.control_tick()
        self.sim.after(0.5, self._control_tick)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = self.sim.now + ANSWER_SECONDS
        while not condition():
            assert self.sim.now < deadline, f"seed {self.sim.seed}: waited {ANSWER_SECONDS:g} s for {what}"
            self.sim.run(self.sim.now + _STEP_SECONDS)

    def now_ms(self) -> int:
        return self.sim.unix_ms

    def let_fetches_end(self) -> None:
        pass  # leaders answer immediately

    def create(self, settings: Settings = DEFAULTS) -> ModelTopic:
        assert settings.replicas == len(self.cluster.brokers), "each broker of the model has a replica of everything"
        self._topics += 1
        name = TopicPartition(f"conformance-{self._topics}", 0)
        self.cluster.create(
            name,
            settings=broker.Settings(
                settings.min_isr,
                settings.log_append_time,
                settings.max_message_bytes,
                settings.timestamp_after_max_ms,
                settings.gzip,
            ),
        )
        topic = ModelTopic(self, name)
        self.until(lambda: topic.in_sync() == settings.replicas, "all replicas")
        return topic

    def transactional(self, *, v2: bool) -> ModelTransaction:
        return ModelTransaction(self, v2=v2)

    def _stop(self, *, clean: bool) -> None:
        nodes = range(len(self.cluster.brokers))
        for node in nodes:
            self.cluster.kill(node)
        for node in nodes:
            self.cluster.restart(node, clean=clean)
        self.until(self._led, "leaders")

    def _led(self) -> bool:
        return all(
            p.leader is not None and self.cluster.leads(p.leader, p, p.epoch) for p in self.cluster.partitions.values()
        )

    def restart(self) -> None:
        self._stop(clean=True)

    def crash(self) -> None:
        self._stop(clean=False)

    def expire_producers(self) -> None:
        self.cluster.expire_producers()

    def pause(self, node: int) -> None:
        self.cluster.pause(node, 1e6)

    def resume(self, node: int) -> None:
        self.cluster.resume(node)

    def kill(self, node: int) -> None:
        self.cluster.kill(node)

    def start_again(self, node: int) -> None:
        self.cluster.restart(node)


class ModelTopic(Topic):
    def __init__(self, kafka: ModelKafka, name: TopicPartition) -> None:
        self.kafka = kafka
        self.name = name

    @property
    def _partition(self) -> broker.Partition:
        return self.kafka.cluster.partitions[self.name]

    def _replica(self, node: int | None = None) -> broker.Replica:
        return self._partition.replicas[self.leader() if node is None else node]

    # ---- appends

    def append(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000, node: int | None = None) -> Answer:
        wire = ModelWire(self.kafka, self.name, self.leader() if node is None else node)
        wire.send(records, acks=acks, timeout_ms=timeout_ms)
        answer = wire.receive()
        wire.close()
        return answer

    def append_by_id(self, records: bytes, topic_id: object) -> Answer:
        wire = ModelWire(self.kafka, self.name, self.leader(), topic_id)
        wire.send(records)
        return wire.receive()

    def connect(self) -> ModelWire:
        return ModelWire(self.kafka, self.name, self.leader())

    # ---- state

    @property
    def topic_id(self) -> object:
        return self._partition.topic_id

    def end(self) -> int:
        return self._replica().log_end

    def end_as_of(self, node: int, leader_epoch: int) -> int | None:
        partition = self._partition
        if not self.kafka.cluster.leads(node, partition, leader_epoch):
            return None
        return partition.replicas[node].log_end

    def high_watermark(self) -> int:
        return self._replica().high_watermark

    def start(self) -> int:
        return self._replica().log_start

    def producers(self, node: int | None = None) -> dict[int, ProducerState]:
        if self._partition.read_denied:
            raise PermissionError(broker.DENIED)
        return {
            producer_id: ProducerState(
                known.epoch,
                known.last_sequence,
                known.last_timestamp_ms,
                -1 if known.transaction_start is None else known.transaction_start,
            )
            for producer_id, known in self._replica(node).producers.items()
        }

    def read(self) -> list[Logged]:
        replica = self._replica()
        return [
            found
            for batch in replica.batches
            if replica.log_start < batch.end <= replica.high_watermark
            for found in read_batches(batch.data)
        ]

    # ---- changes

    def delete_records(self, before: int) -> None:
        self.kafka.cluster.delete_records(self.name, before)

    def write_marker(self, producer_id: int, epoch: int) -> int:
        codes: list[int] = []
        self.kafka.cluster.write_marker(self.leader(), self._partition, producer_id, epoch, codes.append)
        self.kafka.until(lambda: bool(codes), "an answer to WriteTxnMarkers")
        return codes[0]

    def deny(self, operation: str) -> None:
        if operation == "READ":
            self._partition.read_denied = True
        else:
            self._partition.write_denied = True

    def recreate(self) -> None:
        self.kafka.cluster.recreate(self.name)

    # ---- more than one broker

    def leader(self) -> int:
        self.kafka.until(lambda: self._partition.leader is not None, f"a leader of {self.name}")
        leader = self._partition.leader
        assert leader is not None
        return leader

    def leader_epoch(self) -> int:
        return self._partition.epoch

    def replicas(self) -> Sequence[int]:
        return list(self._partition.replicas)

    def in_sync(self) -> int:
        return len(self._partition.isr)

    def move_leader(self, node: int) -> None:
        partition = self._partition
        assert node in partition.isr
        while partition.leader != node:
            self.kafka.cluster.elect(partition, prefer_other=True)
        self.kafka.until(
            lambda: all(view.epoch == partition.epoch for view in partition.views.values()), "all to know the leader"
        )


class ModelWire(Wire):
    def __init__(self, kafka: ModelKafka, name: TopicPartition, node: int, topic_id: object = None) -> None:
        self._kafka = kafka
        self._name = name
        self._topic_id = topic_id
        self._near = _Near()
        far = broker.BrokerSide(kafka.cluster, node)
        self._connection = Connection(kafka.sim, lambda: 0.0005, self._near, far)
        far.connection = self._connection
        kafka.cluster.brokers[node].sides.append(far)
        self._version = _NAMED if topic_id is None else BY_TOPIC_ID

    def send(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000) -> None:
        partitions = (PartitionData(0, memoryview(records)),)
        if self._topic_id is None:
            topic = TopicData(self._name.topic, None, partitions)
        else:
            topic = TopicData("", self._topic_id, partitions)  # type: ignore[arg-type]
        request = ProduceRequest(self._version, 1, "case", b"", None, acks, timeout_ms, (topic,))
        self._connection.to_b.write(b"".join(bytes(chunk) for chunk in encode_produce_request(request)))

    def receive(self) -> Answer:
        self._kafka.until(lambda: bool(self._near.frames), "an answer")
        response = parse_produce_response(memoryview(self._near.frames.popleft()), self._version)
        result = response.topics[0].partitions[0]
        return Answer(result.error_code, result.base_offset, result.log_append_time_ms, result.log_start_offset)

    def close(self) -> None:
        self._connection.close("a")


class _Near(End):
    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self._bytes = b""

    def data(self, data: bytes) -> None:
        self._bytes += data
        while len(self._bytes) >= 4 and len(self._bytes) >= 4 + int.from_bytes(self._bytes[:4], "big"):
            end = 4 + int.from_bytes(self._bytes[:4], "big")
            self.frames.append(self._bytes[4:end])
            self._bytes = self._bytes[end:]

    def lost(self) -> None: ...


class ModelTransaction(Transaction):
    def __init__(self, kafka: ModelKafka, *, v2: bool) -> None:
        self._kafka = kafka
        self.producer_id, self.epoch = kafka.cluster.init_producer_id()
        kafka.cluster.begin_transactional(self.producer_id, v2=v2)

    def _markers_written(self) -> bool:
        return not self._kafka.cluster.busy(self.producer_id)

    def add(self, topic: Topic) -> None:
        assert isinstance(topic, ModelTopic)
        self._kafka.until(self._markers_written, "the markers of the last transaction")
        assert self._kafka.cluster.add_partition(self.producer_id, self.epoch, topic.name)

    def append(self, topic: Topic, records: bytes) -> Answer:
        self._kafka.until(self._markers_written, "the markers of the last transaction")
        return topic.append(records)

    def is_on(self, topic: Topic) -> bool:
        assert isinstance(topic, ModelTopic)
        return topic.name in self._kafka.cluster.transaction_partitions(self.producer_id)

    def say_end(self, epoch: int, *, commit: bool) -> int:
        codes: list[int] = []

        def answered() -> bool:
            codes.append(self._kafka.cluster.end_txn(self.producer_id, epoch, commit=commit)[0])
            return codes[-1] != broker.CONCURRENT_TRANSACTIONS

        self._kafka.until(answered, "an answer to EndTxn")
        return codes[-1]

    def state(self) -> str:
        return self._kafka.cluster.transactions[self.producer_id].state

    def end(self, *, commit: bool) -> None:
        error, _, self.epoch = self._kafka.cluster.end_txn(self.producer_id, self.epoch, commit=commit)
        assert error == broker.NONE, error
