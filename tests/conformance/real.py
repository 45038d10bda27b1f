"""Real Kafka as a driver: raw requests. Only requests that are not under test are retried."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from kafka.protocol.admin import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteRecordsRequest,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
)
from kafka.protocol.consumer import (
    FetchRequest,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForLeaderEpochRequest,
)
from kafka.protocol.producer import AddPartitionsToTxnRequest, EndTxnRequest

from fencepost_dev.cluster import KafkaCluster
from tests.conformance.driver import (
    ANSWER_SECONDS,
    DEFAULTS,
    Answer,
    Kafka,
    ProducerState,
    Settings,
    Stored,
    Topic,
    Transaction,
    Wire,
    stored_batches,
)
from tests.kit.waiting import until
from tests.support import raw
from tests.support.batches import now_ms
from tests.support.kafka import unique_topic

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
_BYTES_MAX = 1 << 20
_COORDINATOR_BUSY = (COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR, CONCURRENT)
_RESPONSES: dict[Any, Any] = {
    AlterPartitionReassignmentsRequest: AlterPartitionReassignmentsResponse,
    CreateAclsRequest: CreateAclsResponse,
    DescribeProducersRequest: DescribeProducersResponse,
    DescribeTransactionsRequest: DescribeTransactionsResponse,
    ElectLeadersRequest: ElectLeadersResponse,
    ListOffsetsRequest: ListOffsetsResponse,
}


def query(connection: raw.Connection, request: Any, version: int) -> Any:
    """`raw.Connection.query` for more messages."""
    if type(request) not in _RESPONSES:
        return connection.query(request, version)
    connection.send(request, version)
    return _RESPONSES[type(request)].decode(connection.receive_frame(), version=version, header=True)


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

    def _metadata(self) -> Any:
        with self.kafka.some() as connection:
            return connection.metadata(self.name).topics[0]

    @property
    def topic_id(self) -> uuid.UUID:
        return uuid.UUID(str(self._metadata().topic_id))

    def _epoch_end(self, node: int, believed: int, queried: int) -> Any:
        topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
        partition = topic.OffsetForLeaderPartition(partition=0, current_leader_epoch=believed, leader_epoch=queried)
        request = OffsetForLeaderEpochRequest(replica_id=-1, topics=[topic(topic=self.name, partitions=[partition])])
        with self.at(node) as connection:
            return connection.query(request, 4).topics[0].partitions[0]

    def end(self) -> int:
        """A new leader may not serve yet."""

        def probe() -> int | None:
            return self.end_as_of(self.leader(), self.leader_epoch())

        return int(until(probe, "the log end", accept=lambda o: o is not None, seconds=ANSWER_SECONDS))

    def end_as_of(self, node: int, leader_epoch: int) -> int | None:
        answer = self._epoch_end(node, leader_epoch, leader_epoch)
        if answer.error_code == OK:
            return int(answer.end_offset)
        assert answer.error_code in (NOT_LEADER, FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH), answer.error_code
        return None

    def _list(self, timestamp: int) -> int | None:
        topic = ListOffsetsRequest.ListOffsetsTopic
        partition = topic.ListOffsetsPartition(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)
        request = ListOffsetsRequest(
            replica_id=-1, isolation_level=0, topics=[topic(name=self.name, partitions=[partition])]
        )
        with self.at() as connection:
            answer = query(connection, request, 7).topics[0].partitions[0]
        return int(answer.offset) if answer.error_code == OK else None

    def high_watermark(self) -> int:
        """Unknown right after an election."""
        found = until(lambda: self._list(_LATEST), "the high watermark", accept=lambda o: o is not None)
        return int(found)

    def start(self) -> int:
        found = until(lambda: self._list(_EARLIEST), "the log start", accept=lambda o: o is not None)
        return int(found)

    def producers(self, node: int | None = None) -> dict[int, ProducerState]:
        topic = DescribeProducersRequest.TopicRequest
        request = DescribeProducersRequest(topics=[topic(name=self.name, partition_indexes=[0])])
        with self.at(node) as connection:
            answer = query(connection, request, 0).topics[0].partitions[0]
        if answer.error_code:
            raise PermissionError(answer.error_code)
        return {
            each.producer_id: ProducerState(
                each.producer_epoch, each.last_sequence, each.last_timestamp, each.current_txn_start_offset
            )
            for each in answer.active_producers
        }

    def read(self) -> list[Stored]:
        end, at = self.high_watermark(), self.start()
        found: list[Stored] = []
        with self.at() as connection:
            while at < end:
                topic = FetchRequest.FetchTopic
                partition = topic.FetchPartition(partition=0, fetch_offset=at, partition_max_bytes=_BYTES_MAX)
                request = FetchRequest(
                    replica_id=-1,
                    max_wait_ms=500,
                    min_bytes=1,
                    max_bytes=_BYTES_MAX,
                    isolation_level=0,
                    topics=[topic(topic=self.name, partitions=[partition])],
                )
                answer = connection.query(request, 4).responses[0].partitions[0]
                assert answer.error_code == OK, answer.error_code
                for each in stored_batches(bytes(answer.records or b"")):
                    if each.base_offset + len(each.values) > at:
                        found.append(each)
                        at = each.base_offset + len(each.values)
        return found

    # ---- changes

    def delete_records(self, before: int) -> None:
        topic = DeleteRecordsRequest.DeleteRecordsTopic
        partition = topic.DeleteRecordsPartition(partition_index=0, offset=before)
        request = DeleteRecordsRequest(topics=[topic(name=self.name, partitions=[partition])], timeout_ms=10_000)
        with self.at() as connection:
            answer = connection.query(request, 2).topics[0].partitions[0]
        assert (answer.error_code, answer.low_watermark) == (OK, before)

    def deny(self, operation: str) -> None:
        creation = CreateAclsRequest.AclCreation(
            resource_type=2,
            resource_name=self.name,
            resource_pattern_type=3,
            principal="User:ANONYMOUS",
            host="*",
            operation={"READ": 3, "WRITE": 4}[operation],
            permission_type=2,
        )
        everything_else = CreateAclsRequest.AclCreation(
            resource_type=2,
            resource_name=self.name,
            resource_pattern_type=3,
            principal="User:ANONYMOUS",
            host="*",
            operation=2,
            permission_type=3,
        )
        with self.kafka.some() as connection:
            answer = query(connection, CreateAclsRequest(creations=[everything_else, creation]), 2)
        assert [each.error_code for each in answer.results] == [OK, OK]

    def recreate(self) -> None:
        """Check the id: Metadata may still return the old topic."""
        old = self.topic_id
        with self.kafka.some() as connection:
            assert connection.delete_topic(self.name) == OK
        until(lambda: self._metadata().error_code == UNKNOWN_TOPIC, f"{self.name} to be deleted")
        self._create()
        assert self.topic_id != old

    # ---- more than one broker

    def _partition(self) -> Any:
        return self._metadata().partitions[0]

    def leader(self) -> int:
        def probe() -> int:
            metadata = self._metadata()
            return -1 if metadata.error_code or not metadata.partitions else int(metadata.partitions[0].leader_id)

        return int(until(probe, f"a leader of {self.name}", accept=lambda n: n >= 0, seconds=40.0))

    def leader_epoch(self) -> int:
        return int(self._partition().leader_epoch)

    def replicas(self) -> Sequence[int]:
        return [int(node) for node in self._partition().replica_nodes]

    def in_sync(self) -> int:
        metadata = self._metadata()
        return 0 if metadata.error_code or not metadata.partitions else len(metadata.partitions[0].isr_nodes)

    def move_leader(self, node: int) -> None:
        """Make it the preferred leader and elect it."""
        replicas = [node, *(each for each in self.replicas() if each != node)]
        topic = AlterPartitionReassignmentsRequest.ReassignableTopic
        partition = topic.ReassignablePartition(partition_index=0, replicas=replicas)
        reassignment = AlterPartitionReassignmentsRequest(
            timeout_ms=10_000, topics=[topic(name=self.name, partitions=[partition])]
        )
        with self.kafka.some() as connection:
            answer = query(connection, reassignment, 0)
            assert answer.error_code == OK
            until(lambda: list(self.replicas()) == replicas, "the new order of replicas")
            elected = ElectLeadersRequest.TopicPartitions
            election = ElectLeadersRequest(
                election_type=0, topic_partitions=[elected(topic=self.name, partitions=[0])], timeout_ms=10_000
            )

            def moved() -> bool:
                result = query(connection, election, 2).replica_election_results[0].partition_result[0]
                return result.error_code in (OK, ELECTION_NOT_NEEDED)

            until(moved, f"{self.name} to move to {node}", seconds=ANSWER_SECONDS)

        def all_know() -> bool:
            if self.leader() != node:
                return False
            epoch = self.leader_epoch()
            follower_replicas = [each for each in replicas if each != node and each not in self.kafka.paused]
            old_ones_know = all(
                self._epoch_end(each, epoch, epoch).error_code == NOT_LEADER for each in follower_replicas
            )
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
        added = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=topic.name, partitions=[0])
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self._name,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[added],
        )
        with self._kafka.some() as connection:

            def done() -> bool:
                answer = connection.query(request, 3).results_by_topic_v3_and_below[0].results_by_partition[0]
                code = answer.partition_error_code
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

    def is_on(self, topic: Topic) -> bool:
        assert isinstance(topic, RealTopic)
        with self._kafka.some() as connection:
            (state,) = query(
                connection, DescribeTransactionsRequest(transactional_ids=[self._name]), 0
            ).transaction_states
        assert state.error_code == OK, state.error_code
        return topic.name in [each.topic for each in state.topics]

    def say_end(self, epoch: int, *, commit: bool) -> int:
        codes: list[int] = []

        def answered() -> bool:
            codes.append(self._end_txn(epoch, commit).error_code)
            return codes[-1] not in _COORDINATOR_BUSY

        self._kafka.until(answered, "an answer to EndTxn")
        return codes[-1]

    def state(self) -> str:
        with self._kafka.some() as connection:
            described = query(connection, DescribeTransactionsRequest(transactional_ids=[self._name]), 0)
        state: str = described.transaction_states[0].transaction_state
        return state

    def _end_txn(self, epoch: int, commit: bool) -> Any:
        request = EndTxnRequest(
            transactional_id=self._name, producer_id=self.producer_id, producer_epoch=epoch, committed=commit
        )
        with self._kafka.some() as connection:
            return connection.query(request, 5 if self._v2 else 3)

    def end(self, *, commit: bool) -> None:
        answer = self._end_txn(self.epoch, commit)
        assert answer.error_code == OK, answer.error_code
        if self._v2:
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
