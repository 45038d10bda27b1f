"""Real Kafka as a driver: raw requests. Only requests that are not under test are retried."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fencepost_dev.cluster import KafkaCluster
from tests.conformance.driver import (
    ANSWER_SECONDS,
    DEFAULTS,
    Answer,
    Kafka,
    ProducerState,
    Settings,
    Topic,
    Transaction,
    Wire,
)
from tests.kit.waiting import until
from tests.support import raw
from tests.support.batches import now_ms
from tests.support.kafka import unique_topic
from tests.support.messages import Fields, RawConnection

OK, UNKNOWN_TOPIC, NOT_LEADER, UNKNOWN_TOPIC_ID = 0, 3, 6, 100
COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR, CONCURRENT = 14, 15, 16, 51
FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH = 74, 75
ELECTION_NOT_NEEDED = 84
#: Needed by `Topic.deny`.
PROPERTIES = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}
_LATEST, _EARLIEST = -1, -2
_COORDINATOR_BUSY = (COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR, CONCURRENT)
_LIST_OFFSETS, _METADATA, _DELETE_RECORDS, _OFFSET_FOR_LEADER_EPOCH, _ADD_PARTITIONS_TO_TXN = 2, 3, 21, 23, 24
_END_TXN, _CREATE_ACLS, _ELECT_LEADERS, _REASSIGN, _DESCRIBE_PRODUCERS, _DESCRIBE_TRANSACTIONS = 26, 30, 43, 45, 61, 65


def _read(answer: raw.Answer) -> Answer:
    start = answer.log_start_offset
    return Answer(answer.error_code, answer.base_offset, answer.log_append_time_ms, -1 if start is None else start)


#: Longest wait of a follower's fetch: replica.fetch.wait.max.ms.
FETCH_WAIT_SECONDS = 0.5


class RealKafka(Kafka):
    """Cases may break `cluster`: do not share it."""

    def __init__(self, cluster: KafkaCluster) -> None:
        self.cluster = cluster
        self.paused: set[int] = set()
        self.wires: list[RealWire] = []
        self.topics: list[RealTopic] = []

    def now_ms(self) -> int:
        return now_ms()

    def address(self, node: int) -> str:
        return str(self.cluster.address(node))

    def some(self) -> raw.Connection:
        """A connection to a running broker."""
        nodes = [n for n in self.cluster.node_ids if self.cluster.running(n) and n not in self.paused]
        return raw.Connection(self.address(nodes[0]), timeout_seconds=ANSWER_SECONDS)

    def query(self, api_key: int, version: int, body: Fields, node: int | None = None) -> Fields:
        """Query this broker, or any running one."""
        running = (n for n in self.cluster.node_ids if self.cluster.running(n) and n not in self.paused)
        address = self.cluster.address(next(running) if node is None else node)
        with RawConnection(address, ANSWER_SECONDS) as connection:
            return connection.query(api_key, version, body)

    def create(self, settings: Settings = DEFAULTS) -> RealTopic:
        topic = RealTopic(self, unique_topic("conformance"), settings)
        self.topics.append(topic)
        return topic

    def transactional(self, *, v2: bool) -> RealTransaction:
        return RealTransaction(self, unique_topic("transactional"), v2=v2)

    def restart(self) -> None:
        for node in self.cluster.node_ids:
            self.cluster.shut_down(node)
        self._start_all()

    def crash(self) -> None:
        for node in self.cluster.node_ids:
            self.cluster.kill(node)
        self._start_all()

    def _start_all(self) -> None:
        """Metadata names leaders slightly before they serve."""
        for node in self.cluster.node_ids:
            self.cluster.restart(node, wait=False)
        self.cluster.await_ready()
        for topic in self.topics:
            topic.end()

    def expire_producers(self) -> None:
        """Brokers do it automatically (`producer.id.expiration.check.interval.ms`)."""

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what, seconds=ANSWER_SECONDS)

    def pause(self, node: int) -> None:
        self.cluster.pause(node)
        self.paused.add(node)

    def let_fetches_end(self) -> None:
        time.sleep(2 * FETCH_WAIT_SECONDS)

    def resume(self, node: int) -> None:
        self.cluster.resume(node)
        self.paused.discard(node)

    def kill(self, node: int) -> None:
        self.cluster.kill(node)
        self.paused.discard(node)

    def start_again(self, node: int) -> None:
        self.cluster.restart(node)

    def heal(self) -> None:
        """Restore the cluster for the next case."""
        for wire in self.wires:
            wire.close()
        self.wires.clear()
        self.topics.clear()
        for node in list(self.paused):
            self.resume(node)
        down = [node for node in self.cluster.node_ids if not self.cluster.running(node)]
        for node in down:
            self.cluster.restart(node, wait=False)
        if down:
            self.cluster.await_ready()


def kafka_configs(settings: Settings) -> dict[str, str]:
    configs = {"min.insync.replicas": str(settings.min_isr)}
    if settings.log_append_time:
        configs["message.timestamp.type"] = "LogAppendTime"
    if settings.max_message_bytes is not None:
        configs["max.message.bytes"] = str(settings.max_message_bytes)
    if settings.gzip:
        configs["compression.type"] = "gzip"
    if settings.timestamp_after_max_ms is not None:
        configs["message.timestamp.after.max.ms"] = str(settings.timestamp_after_max_ms)
    return configs


class RealTopic(Topic):
    def __init__(self, kafka: RealKafka, name: str, settings: Settings) -> None:
        self.kafka = kafka
        self.name = name
        self.settings = settings
        self._create()

    def _create(self) -> None:
        settings, configs = self.settings, kafka_configs(self.settings)
        with self.kafka.some() as connection:
            answer = connection.create_topic(self.name, replicas=settings.replicas, configs=configs)
            assert answer == (OK, None), answer
        until(self._serves, f"{self.name} to be served", seconds=ANSWER_SECONDS)

    def _serves(self) -> bool:
        """Metadata names a leader slightly before it serves, and follower_replicas join one by one."""
        return self.in_sync() == self.settings.replicas and self._list(_LATEST) is not None

    def at(self, node: int | None = None) -> raw.Connection:
        return raw.Connection(self.kafka.address(self.leader() if node is None else node), timeout_seconds=20.0)

    # ---- appends

    def append(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000, node: int | None = None) -> Answer:
        with self.at(node) as connection:
            connection.socket.settimeout(timeout_ms / 1000 + ANSWER_SECONDS)
            return _read(connection.append(self.name, records, acks=acks, timeout_ms=timeout_ms))

    def append_by_id(self, records: bytes, topic_id: object) -> Answer:
        assert isinstance(topic_id, uuid.UUID)
        with self.at() as connection:
            answers = connection.produce({self.name: {0: records}}, version=13, topic_ids={self.name: topic_id})
            return _read(next(iter(answers.values())))

    def connect(self) -> RealWire:
        wire = RealWire(self.at(), self.name)
        self.kafka.wires.append(wire)
        return wire

    # ---- state

    def _query(self, api_key: int, version: int, topic: Fields, node: int | None = None, **more: Any) -> Fields:
        """Query its leader, or `node`, about this topic. Return the answer for its partition 0."""
        where = self.leader() if node is None else node
        answer = self.kafka.query(api_key, version, {"Topics": [topic], **more}, where)
        found: Fields = answer["Topics"][0]["Partitions"][0]
        return found

    def _metadata(self) -> Fields:
        body = {"Topics": [{"Name": self.name}], "AllowAutoTopicCreation": False}
        found: Fields = self.kafka.query(_METADATA, 12, body)["Topics"][0]
        return found

    def _partition(self) -> Fields:
        """Empty where it has none yet."""
        metadata = self._metadata()
        return {} if metadata["ErrorCode"] or not metadata["Partitions"] else metadata["Partitions"][0]

    @property
    def topic_id(self) -> uuid.UUID:
        return uuid.UUID(str(self._metadata()["TopicId"]))

    def _epoch_end(self, node: int, epoch: int) -> Fields:
        partition = {"Partition": 0, "CurrentLeaderEpoch": epoch, "LeaderEpoch": epoch}
        topic = {"Topic": self.name, "Partitions": [partition]}
        return self._query(_OFFSET_FOR_LEADER_EPOCH, 4, topic, node, ReplicaId=-1)

    def end(self) -> int:
        """A new leader may not serve yet."""

        def probe() -> int | None:
            return self.end_as_of(self.leader(), self.leader_epoch())

        return int(until(probe, "the log end", accept=lambda o: o is not None, seconds=ANSWER_SECONDS))

    def end_as_of(self, node: int, leader_epoch: int) -> int | None:
        answer = self._epoch_end(node, leader_epoch)
        if answer["ErrorCode"] == OK:
            return int(answer["EndOffset"])
        assert answer["ErrorCode"] in (NOT_LEADER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH), answer["ErrorCode"]
        return None

    def _list(self, timestamp: int) -> int | None:
        partition = {"PartitionIndex": 0, "CurrentLeaderEpoch": -1, "Timestamp": timestamp}
        topic = {"Name": self.name, "Partitions": [partition]}
        answer = self._query(_LIST_OFFSETS, 7, topic, ReplicaId=-1, IsolationLevel=0)
        return int(answer["Offset"]) if answer["ErrorCode"] == OK else None

    def high_watermark(self) -> int:
        """Unknown right after an election."""
        found = until(lambda: self._list(_LATEST), "the high watermark", accept=lambda o: o is not None)
        return int(found)

    def start(self) -> int:
        found = until(lambda: self._list(_EARLIEST), "the log start", accept=lambda o: o is not None)
        return int(found)

    def producers(self, node: int | None = None) -> dict[int, ProducerState]:
        answer = self._query(_DESCRIBE_PRODUCERS, 0, {"Name": self.name, "PartitionIndexes": [0]}, node)
        if answer["ErrorCode"]:
            raise PermissionError(answer["ErrorCode"])
        return {
            each["ProducerId"]: ProducerState(
                each["ProducerEpoch"], each["LastSequence"], each["LastTimestamp"], each["CurrentTxnStartOffset"]
            )
            for each in answer["ActiveProducers"]
        }

    def read(self) -> list[raw.Logged]:
        end = self.high_watermark()
        batches = raw.Log(self.kafka.address(self.leader())).batches(self.name, start=self.start())
        return [each for each in batches if each.base_offset < end]

    # ---- changes

    def delete_records(self, before: int) -> None:
        topic = {"Name": self.name, "Partitions": [{"PartitionIndex": 0, "Offset": before}]}
        answer = self._query(_DELETE_RECORDS, 2, topic, TimeoutMs=10_000)
        assert (answer["ErrorCode"], answer["LowWatermark"]) == (OK, before)

    def deny(self, operation: str) -> None:
        rule = {"ResourceType": 2, "ResourceName": self.name, "ResourcePatternType": 3}
        rule |= {"Principal": "User:ANONYMOUS", "Host": "*"}
        allowed, denied = {"Operation": 2, "PermissionType": 3}, {"PermissionType": 2}
        denied["Operation"] = {"READ": 3, "WRITE": 4}[operation]
        answer = self.kafka.query(_CREATE_ACLS, 2, {"Creations": [rule | allowed, rule | denied]})
        assert [each["ErrorCode"] for each in answer["Results"]] == [OK, OK]

    def recreate(self) -> None:
        """Check the id: Metadata may still return the old topic."""
        old = self.topic_id
        with self.kafka.some() as connection:
            assert connection.delete_topic(self.name) == OK
        until(lambda: self._metadata()["ErrorCode"] == UNKNOWN_TOPIC, f"{self.name} to be deleted")
        self._create()
        assert self.topic_id != old

    # ---- more than one broker

    def leader(self) -> int:
        def probe() -> int:
            return int(self._partition().get("LeaderId", -1))

        return int(until(probe, f"a leader of {self.name}", accept=lambda n: n >= 0, seconds=40.0))

    def leader_epoch(self) -> int:
        return int(self._partition()["LeaderEpoch"])

    def replicas(self) -> Sequence[int]:
        return list(self._partition()["ReplicaNodes"])

    def in_sync(self) -> int:
        return len(self._partition().get("IsrNodes", ()))

    def move_leader(self, node: int) -> None:
        """Make it the preferred leader and elect it."""
        replicas = [node, *(each for each in self.replicas() if each != node)]
        requested = [{"PartitionIndex": 0, "Replicas": replicas}]
        body = {"TimeoutMs": 10_000, "Topics": [{"Name": self.name, "Partitions": requested}]}
        assert self.kafka.query(_REASSIGN, 0, body)["ErrorCode"] == OK
        until(lambda: list(self.replicas()) == replicas, "the new order of replicas")
        election = {"ElectionType": 0, "TopicPartitions": [{"Topic": self.name, "Partitions": [0]}]}

        def moved() -> bool:
            (result,) = self.kafka.query(_ELECT_LEADERS, 2, election | {"TimeoutMs": 10_000})["ReplicaElectionResults"]
            return result["PartitionResult"][0]["ErrorCode"] in (OK, ELECTION_NOT_NEEDED)

        until(moved, f"{self.name} to move to {node}", seconds=ANSWER_SECONDS)

        def all_know() -> bool:
            if self.leader() != node:
                return False
            epoch = self.leader_epoch()
            followers = [each for each in replicas if each != node and each not in self.kafka.paused]
            old_ones_know = all(self._epoch_end(each, epoch)["ErrorCode"] == NOT_LEADER for each in followers)
            return old_ones_know and self.end_as_of(node, epoch) is not None

        until(all_know, f"{self.name} to be led by {node}", seconds=ANSWER_SECONDS)


class RealWire(Wire):
    def __init__(self, connection: raw.Connection, topic: str) -> None:
        self._connection = connection
        self._topic = topic
        self._connection.socket.settimeout(ANSWER_SECONDS)

    def send(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000) -> None:
        self._connection.send_produce({self._topic: {0: records}}, acks=acks, timeout_ms=timeout_ms)

    def receive(self) -> Answer:
        _, answers = self._connection.receive_produce()
        return _read(answers[self._topic, 0])

    def close(self) -> None:
        self._connection.close()


class RealTransaction(Transaction):
    """Coordinator requests go to any broker: transactional cases use one broker."""

    def __init__(self, kafka: RealKafka, name: str, *, v2: bool) -> None:
        self._kafka = kafka
        self._name = name
        self._v2 = v2
        with kafka.some() as connection:

            def begun() -> raw.Producer | None:
                try:
                    return connection.init_producer_id(name)
                except AssertionError:
                    return None

            producer = until(begun, "a producer id", seconds=ANSWER_SECONDS)
        self.producer_id, self.epoch = producer.id, producer.epoch

    def add(self, topic: Topic) -> None:
        assert isinstance(topic, RealTopic)
        if self._v2:
            return
        prefix = "V3AndBelow"
        body = {
            f"{prefix}TransactionalId": self._name,
            f"{prefix}ProducerId": self.producer_id,
            f"{prefix}ProducerEpoch": self.epoch,
            f"{prefix}Topics": [{"Name": topic.name, "Partitions": [0]}],
        }

        def done() -> bool:
            (answer,) = self._kafka.query(_ADD_PARTITIONS_TO_TXN, 3, body)[f"ResultsByTopic{prefix}"]
            code = answer["ResultsByPartition"][0]["PartitionErrorCode"]
            assert code == OK or code in _COORDINATOR_BUSY, code
            return bool(code == OK)

        until(done, "the partition to be added", seconds=ANSWER_SECONDS)

    def append(self, topic: Topic, records: bytes) -> Answer:
        """Retry while the coordinator still writes the previous transaction's markers (v2)."""
        assert isinstance(topic, RealTopic)
        version = 12 if self._v2 else 9
        with topic.at() as connection:

            def answered() -> raw.Answer | None:
                answer = connection.append(topic.name, records, version=version, transactional_id=self._name)
                return None if answer.error_code in _COORDINATOR_BUSY else answer

            return _read(until(answered, "the transactional append", seconds=ANSWER_SECONDS))

    def _described(self) -> Fields:
        (state,) = self._kafka.query(_DESCRIBE_TRANSACTIONS, 0, {"TransactionalIds": [self._name]})["TransactionStates"]
        assert state["ErrorCode"] == OK, state["ErrorCode"]
        return dict(state)

    def is_on(self, topic: Topic) -> bool:
        assert isinstance(topic, RealTopic)
        return topic.name in [each["Topic"] for each in self._described()["Topics"]]

    def say_end(self, epoch: int, *, commit: bool) -> int:
        codes: list[int] = []

        def answered() -> bool:
            codes.append(self._end_txn(epoch, commit)["ErrorCode"])
            return codes[-1] not in _COORDINATOR_BUSY

        self._kafka.until(answered, "an answer to EndTxn")
        return codes[-1]

    def state(self) -> str:
        return str(self._described()["TransactionState"])

    def _end_txn(self, epoch: int, commit: bool) -> Fields:
        body = {"TransactionalId": self._name, "ProducerId": self.producer_id, "ProducerEpoch": epoch}
        return self._kafka.query(_END_TXN, 5 if self._v2 else 3, body | {"Committed": commit})

    def end(self, *, commit: bool) -> None:
        answer = self._end_txn(self.epoch, commit)
        assert answer["ErrorCode"] == OK, answer["ErrorCode"]
        if self._v2:
            self.producer_id, self.epoch = answer["ProducerId"], answer["ProducerEpoch"]
