"""A topic of any cluster, by the protocol alone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from fencepost_proxy.cluster.broker import deadline_in
from fencepost_proxy.cluster.transactions import marker_error
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.preflight.conformance.batches import Logged, read_batches
from fencepost_proxy.preflight.conformance.case import Deviation, NotTested
from fencepost_proxy.preflight.conformance.driver import Answer, ProducerState, Settings, Topic, Wire
from fencepost_proxy.preflight.conformance.requests import DENIED_CODES, Requests
from fencepost_proxy.transactions.watched import OpenInLog, abort_marker
from fencepost_proxy.types import NO_TOPIC_ID, Address, Offset, ProducerId, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

#: Versions: all releases have the first, which names topics.
PRODUCE, PRODUCE_V2, _PRODUCE_BY_ID = 9, 12, 13
_ELECT_LEADERS, _REASSIGN = 43, 45
_LATEST, _EARLIEST = -1, -2
_FETCH_BYTES: Final = 1 << 20
_ELSEWHERE: Final = (Error.NOT_LEADER_OR_FOLLOWER, Error.FENCED_LEADER_EPOCH, Error.UNKNOWN_LEADER_EPOCH)


def require_permission(code: int) -> None:
    if code in DENIED_CODES:
        raise NotTested(f"this user may not: {error_name(code)}")


def produce(
    topic: str, records: bytes, *, acks: int, timeout_ms: int, name: str | None = None, topic_id: UUID = NO_TOPIC_ID
) -> Message:
    """A Produce request. `name`: transactional id."""
    data = [Message(name=topic, topic_id=topic_id, partition_data=[Message(index=0, records=records)])]
    return Message(transactional_id=name, acks=acks, timeout_ms=timeout_ms, topic_data=data)


def answer_of(response: Message) -> Answer:
    result = response.responses[0].partition_responses[0]
    return Answer(result.error_code, result.base_offset, result.log_append_time_ms, result.log_start_offset)


def same_code(code: int, api: str) -> None:
    if code:
        raise Deviation(f"{api} returned {error_name(code)}")


class _Queries(Topic):
    """What brokers know of a topic."""

    kafka: Requests
    name: str

    def _at(self, node: int | None) -> Address:
        return self.kafka.address(self.leader() if node is None else node)

    def _query(
        self, api_key: int, topic: Message, *, at_least: int, at_most: int, node: int | None = None, **more: Any
    ) -> Message:
        """Query its leader, or `node`, about this topic. Return the answer for its partition 0."""
        message = Message(topics=[topic], **more)
        answer = self.kafka.query(api_key, message, at_least=at_least, at_most=at_most, to=self._at(node))
        found: Message = answer.topics[0].partitions[0]
        return found

    def _partition(self) -> Message | None:
        """None if it has none yet."""
        found = self.kafka.metadata(self.name)
        require_permission(found.error_code)
        return None if found.error_code or not found.partitions else found.partitions[0]

    @property
    def topic_id(self) -> UUID:
        found: UUID = self.kafka.metadata(self.name).topic_id
        return found

    def _epoch_end(self, node: int, epoch: int) -> Message:
        partition = Message(partition=0, current_leader_epoch=epoch, leader_epoch=epoch)
        topic = Message(topic=self.name, partitions=[partition])
        return self._query(apis.OFFSET_FOR_LEADER_EPOCH, topic, at_least=2, at_most=4, node=node, replica_id=-1)

    def end(self) -> int:
        """A new leader may not serve yet."""
        found = self.kafka.wait(
            lambda: self.end_as_of(self.leader(), self.leader_epoch()), "the log end", lambda offset: offset is not None
        )
        assert found is not None
        return found

    def end_as_of(self, node: int, leader_epoch: int) -> int | None:
        answer = self._epoch_end(node, leader_epoch)
        if not answer.error_code:
            return int(answer.end_offset)
        require_permission(answer.error_code)
        if answer.error_code not in _ELSEWHERE:
            raise Deviation(f"OffsetForLeaderEpoch returned {error_name(answer.error_code)}")
        return None

    def _list(self, timestamp: int) -> int | None:
        partition = Message(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)
        topic = Message(name=self.name, partitions=[partition])
        more = {"replica_id": -1, "isolation_level": 0}
        answer = self._query(apis.LIST_OFFSETS, topic, at_least=2, at_most=7, **more)
        require_permission(answer.error_code)
        return None if answer.error_code else int(answer.offset)

    def high_watermark(self) -> int:
        """Unknown right after an election."""
        return self._offset(_LATEST, "the high watermark")

    def start(self) -> int:
        return self._offset(_EARLIEST, "the log start")

    def _offset(self, timestamp: int, what: str) -> int:
        found = self.kafka.wait(lambda: self._list(timestamp), what, lambda offset: offset is not None)
        assert found is not None
        return found

    def producers(self, node: int | None = None) -> dict[int, ProducerState]:
        topic = Message(name=self.name, partition_indexes=[0])
        answer = self._query(apis.DESCRIBE_PRODUCERS, topic, at_least=0, at_most=0, node=node)
        if answer.error_code in DENIED_CODES:
            raise PermissionError(answer.error_code)
        if answer.error_code:
            raise Deviation(f"DescribeProducers returned {error_name(answer.error_code)}")
        return {
            each.producer_id: ProducerState(
                each.producer_epoch, each.last_sequence, each.last_timestamp, each.current_txn_start_offset
            )
            for each in answer.active_producers
        }

    def read(self) -> list[Logged]:
        at, end, found = self.start(), self.high_watermark(), list[Logged]()
        while at < end:
            batches = [each for each in self._fetch(at) if at <= each.base_offset < end]
            if not batches:
                raise Deviation(f"Fetch returned nothing at offset {at}, below the high watermark {end}")
            found += batches
            at = found[-1].base_offset + max(len(found[-1].values), 1)
        return found

    def _fetch(self, at: int) -> list[Logged]:
        partition = Message(
            partition=0,
            current_leader_epoch=-1,
            fetch_offset=at,
            last_fetched_epoch=-1,
            log_start_offset=-1,
            partition_max_bytes=_FETCH_BYTES,
        )
        message = Message(
            replica_id=-1,
            max_wait_ms=100,
            min_bytes=1,
            max_bytes=_FETCH_BYTES,
            isolation_level=0,
            session_id=0,
            session_epoch=-1,
            topics=[Message(topic=self.name, partitions=[partition])],
            forgotten_topics_data=[],
            rack_id="",
        )
        response = self.kafka.query(apis.FETCH, message, at_least=4, at_most=12, to=self._at(None))
        answer = response.responses[0].partitions[0]
        require_permission(answer.error_code)
        return list(read_batches(bytes(answer.records or b"")))

    def leader(self) -> int:
        def probe() -> int:
            found = self._partition()
            return -1 if found is None else int(found.leader_id)

        return self.kafka.wait(probe, f"a leader of {self.name}", lambda node: node >= 0)

    def leader_epoch(self) -> int:
        found = self._partition()
        return -1 if found is None else int(found.leader_epoch)

    def replicas(self) -> Sequence[int]:
        found = self._partition()
        return [] if found is None else list(found.replica_nodes)

    def in_sync(self) -> int:
        found = self._partition()
        return 0 if found is None else len(found.isr_nodes)


class AnyTopic(_Queries):
    def __init__(self, kafka: Requests, name: str, settings: Settings) -> None:
        self.kafka = kafka
        self.name = name
        self._settings = settings
        self._create()

    def _create(self) -> None:
        stated = self._settings.replicas
        self.kafka.create_topic(self.name, self._settings, stated if stated > 1 else self.kafka.replicas)
        self.kafka.wait(self._serves, f"{self.name} to be served")

    def _serves(self) -> bool:
        """Metadata names a leader slightly before it serves, and replicas join one by one."""
        return self.in_sync() >= self._settings.replicas and self._list(_LATEST) is not None

    def append(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000, node: int | None = None) -> Answer:
        return self.produce(records, PRODUCE, acks=acks, timeout_ms=timeout_ms, node=node)

    def append_by_id(self, records: bytes, topic_id: object) -> Answer:
        assert isinstance(topic_id, UUID)
        return self.produce(records, _PRODUCE_BY_ID, topic_id=topic_id)

    def produce(
        self,
        records: bytes,
        version: int,
        *,
        acks: int = -1,
        timeout_ms: int = 10_000,
        node: int | None = None,
        name: str | None = None,
        topic_id: UUID = NO_TOPIC_ID,
    ) -> Answer:
        message = produce(self.name, records, acks=acks, timeout_ms=timeout_ms, name=name, topic_id=topic_id)
        to, seconds = self._at(node), timeout_ms / 1000
        at_least = 5 if version == PRODUCE else version
        return answer_of(
            self.kafka.query(apis.PRODUCE, message, at_least=at_least, at_most=version, to=to, seconds=seconds)
        )

    def connect(self) -> AnyWire:
        wire = AnyWire(self.kafka, self._at(None), self.name)
        self.kafka.wires.append(wire)
        return wire

    def delete_records(self, before: int) -> None:
        topic = Message(name=self.name, partitions=[Message(partition_index=0, offset=before)])
        answer = self._query(apis.DELETE_RECORDS, topic, at_least=0, at_most=2, timeout_ms=10_000)
        if (answer.error_code, answer.low_watermark) != (Error.NONE, before):
            raise Deviation(f"DeleteRecords returned {error_name(answer.error_code)}, {answer.low_watermark}")

    def write_marker(self, producer_id: int, epoch: int) -> int:
        marker = OpenInLog(ProducerId(producer_id), epoch, 0, Offset(-1), -1)
        message = abort_marker(TopicPartition(self.name, 0), marker)
        code = marker_error(self.kafka.query(apis.WRITE_TXN_MARKERS, message, at_least=1, at_most=1, to=self._at(None)))
        require_permission(code)
        return code

    def deny(self, operation: str) -> None:
        raise NotTested(f"ACLs are not to be changed ({operation})")

    def recreate(self) -> None:
        """Check the id: Metadata may still return the old topic."""
        old = self.topic_id
        self.kafka.delete_topics([self.name])
        self._create()
        self.kafka.wait(lambda: self.topic_id != old, "the id of the new topic")

    def move_leader(self, node: int) -> None:
        """Make it the preferred leader and elect it."""
        replicas = [node, *(each for each in self.replicas() if each != node)]
        requested = [Message(partition_index=0, replicas=replicas)]
        message = Message(timeout_ms=10_000, topics=[Message(name=self.name, partitions=requested)])
        code = self.kafka.query(_REASSIGN, message, at_most=0).error_code
        require_permission(code)
        same_code(code, "AlterPartitionReassignments")
        self.kafka.wait(lambda: list(self.replicas()) == replicas, "the new order of replicas")
        elected = [Message(topic=self.name, partitions=[0])]
        election = Message(election_type=0, topic_partitions=elected, timeout_ms=10_000)

        def moved() -> bool:
            (result,) = self.kafka.query(_ELECT_LEADERS, election, at_least=1, at_most=2).replica_election_results
            return result.partition_result[0].error_code in (Error.NONE, Error.ELECTION_NOT_NEEDED)

        self.kafka.wait(moved, f"{self.name} to move to {node}")
        self.kafka.wait(lambda: self._led_by(node), f"{self.name} to be led by {node}")

    def other_replicas(self, leader: int) -> Sequence[int]:
        """Those that can be queried."""
        return [each for each in self.replicas() if each != leader]

    def _led_by(self, node: int) -> bool:
        """Whether all its replicas know it."""
        if self.leader() != node:
            return False
        epoch = self.leader_epoch()
        answers = [self._epoch_end(each, epoch).error_code for each in self.other_replicas(node)]
        return all(each == Error.NOT_LEADER_OR_FOLLOWER for each in answers) and self.end_as_of(node, epoch) is not None


class AnyWire(Wire):
    def __init__(self, kafka: Requests, address: Address, topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._connection = kafka.run(kafka.open(address))
        self._pending: deque[asyncio.Task[Message]] = deque()

    def send(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000) -> None:
        message = produce(self._topic, records, acks=acks, timeout_ms=timeout_ms)

        async def start() -> None:
            deadline = deadline_in(timeout_ms / 1000 + self._kafka.answer_seconds)
            work = self._connection.query(apis.PRODUCE, message, at_least=5, at_most=PRODUCE, deadline=deadline)
            self._pending.append(asyncio.create_task(work))
            await asyncio.sleep(0)  # it is written in the task's first step

        self._kafka.run(start())

    def receive(self) -> Answer:
        task = self._pending.popleft()

        async def answer() -> Message:
            return await task

        return answer_of(self._kafka.run(answer()))

    def close(self) -> None:
        async def close() -> None:
            await self._connection.close()
            await asyncio.gather(*self._pending, return_exceptions=True)

        self._kafka.run(close())
