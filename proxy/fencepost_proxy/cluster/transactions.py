"""Transactions: DescribeTransactions v0 and InitProducerId, to the transaction coordinator.

DescribeTransactions needs DESCRIBE on the transactional id.

Retried, with a new FindCoordinator, on errors 14, 15, 16 and the like. WriteTxnMarkers v1 is sent once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fencepost_proxy.cluster.broker import BrokerConnection, Call, UpstreamUnavailable
from fencepost_proxy.cluster.client import TRANSACTION_COORDINATOR, KafkaClient
from fencepost_proxy.cluster.responses import Retry, check, only
from fencepost_proxy.errors import Error
from fencepost_proxy.transactions.watched import Described, OpenInLog, abort_marker
from fencepost_proxy.types import Monotonic, NodeId, ProducerId, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

TRANSACTIONAL_ID_NOT_FOUND: Final = 105


class NotCoordinator(UpstreamUnavailable):
    """The queried broker is not the coordinator of the transactional id."""


@dataclass(frozen=True, slots=True)
class Transactions:
    """What coordinators know of transactions."""

    kafka: KafkaClient

    async def describe(self, transactional_id: str, *, timeout_seconds: float | None = None) -> Described | None:
        """The coordinator's state of it (DescribeTransactions), None for an unknown transactional id.

        A broker that is cut off from the others may name a former coordinator, whose state is old: see `describe_at`.
        Needs DESCRIBE on the transactional id. Raises UpstreamUnavailable.
        """

        async def query(connection: BrokerConnection, deadline: Monotonic) -> Described | None:
            return _described(await _state(connection, transactional_id, deadline))

        return await self.kafka.query_coordinator(
            transactional_id, query, timeout_seconds, key_type=TRANSACTION_COORDINATOR
        )

    async def describe_at(
        self, node_id: NodeId, transactional_id: str, *, timeout_seconds: float | None = None
    ) -> Described | None:
        """`describe`, by this broker. Raises UpstreamUnavailable, `NotCoordinator`."""

        async def query(connection: BrokerConnection, deadline: Monotonic) -> Described | None:
            state = await _state(connection, transactional_id, deadline)
            if state.error_code == Error.NOT_COORDINATOR:
                raise NotCoordinator(f"broker {node_id} is not its coordinator")
            return _described(state)

        return await self.kafka.query_one(node_id, query, timeout_seconds)

    async def fence(self, described: Described, *, timeout_seconds: float | None = None) -> None:
        """Aborts the open transaction of its id on all partitions, and fences its producer.

        Needs WRITE on the transactional id. Raises UpstreamUnavailable. Repeating it does no harm.
        """

        async def query(connection: BrokerConnection, deadline: Monotonic) -> None:
            message = Message(
                transactional_id=described.transactional_id,
                transaction_timeout_ms=described.timeout_ms,
                producer_id=-1,
                producer_epoch=-1,
            )
            answer = await connection.query(apis.INIT_PRODUCER_ID, message, at_most=4, deadline=deadline)
            if answer.error_code == Error.CONCURRENT_TRANSACTIONS:
                raise Retry("its markers are not written yet")
            check(answer.error_code, "InitProducerId")

        await self.kafka.query_coordinator(
            described.transactional_id, query, timeout_seconds, key_type=TRANSACTION_COORDINATOR
        )


async def _state(connection: BrokerConnection, transactional_id: str, deadline: Monotonic) -> Message:
    message = Message(transactional_ids=[transactional_id])
    answer = await connection.query(apis.DESCRIBE_TRANSACTIONS, message, at_most=0, deadline=deadline)
    return only(answer.transaction_states, "DescribeTransactions")


def _described(state: Message) -> Described | None:
    if state.error_code == TRANSACTIONAL_ID_NOT_FOUND:
        return None
    check(state.error_code, "DescribeTransactions")
    return read_described(state)


def read_described(state: Message) -> Described:
    return Described(
        state.transactional_id,
        ProducerId(state.producer_id),
        state.producer_epoch,
        state.transaction_state,
        state.transaction_timeout_ms,
        state.transaction_start_time_ms,
        frozenset(TopicPartition(topic.topic, each) for topic in state.topics for each in topic.partitions),
    )


async def write_abort_marker(
    kafka: KafkaClient, leader: NodeId, tp: TopicPartition, opened: OpenInLog, *, timeout_seconds: float
) -> int:
    """Kafka's error code. Never repeated: a second marker could end the producer's next transaction.

    Needs ALTER on the cluster (before Kafka 3.8 CLUSTER_ACTION). Raises UpstreamUnavailable.
    """

    def calls(connection: BrokerConnection) -> list[Call]:
        return [connection.call(apis.WRITE_TXN_MARKERS, abort_marker(tp, opened), at_most=1)]

    (answer,) = await kafka.query_broker(leader, calls, timeout_seconds=timeout_seconds)
    return marker_error(answer)


#: Kafka's answers to `marker_probe` of a user that may not write markers.
MARKERS_DENIED: Final = frozenset({Error.CLUSTER_AUTHORIZATION_FAILED, Error.TOPIC_AUTHORIZATION_FAILED})


def marker_error(answer: Message) -> int:
    """Kafka's error code in the answer to `abort_marker`. Raises UpstreamUnavailable if it is for other partitions."""
    topic = only(only(answer.markers, "WriteTxnMarkers").topics, "WriteTxnMarkers")
    return int(only(topic.partitions, "WriteTxnMarkers").error_code)
