"""Transactions: DescribeTransactions v0, to the transaction coordinator. Needs DESCRIBE on the transactional id.

Retried, with a new FindCoordinator, on errors 14, 15, 16 and the like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fencepost_proxy.cluster.broker import BrokerConnection
from fencepost_proxy.cluster.client import TRANSACTION_COORDINATOR, KafkaClient
from fencepost_proxy.cluster.responses import check, only
from fencepost_proxy.types import Monotonic, ProducerEpoch, ProducerId, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

_TRANSACTIONAL_ID_NOT_FOUND: Final = 105


@dataclass(frozen=True, slots=True)
class TransactionState:
    """`state` – Kafka's name for it. `partitions` – those of the transaction whose markers are not yet written."""

    state: str
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Transactions:
    """What coordinators know of transactions."""

    kafka: KafkaClient

    async def describe(self, transactional_id: str, *, timeout_seconds: float | None = None) -> TransactionState | None:
        """The coordinator's state of it (DescribeTransactions), None for an unknown transactional id.

        Needs DESCRIBE on the transactional id. Raises UpstreamUnavailable.
        """

        async def query(connection: BrokerConnection, deadline: Monotonic) -> TransactionState | None:
            message = Message(transactional_ids=[transactional_id])
            answer = await connection.query(apis.DESCRIBE_TRANSACTIONS, message, at_most=0, deadline=deadline)
            state = only(answer.transaction_states, "DescribeTransactions")
            if state.error_code == _TRANSACTIONAL_ID_NOT_FOUND:
                return None
            check(state.error_code, "DescribeTransactions")
            return TransactionState(
                state.transaction_state,
                ProducerId(state.producer_id),
                ProducerEpoch(state.producer_epoch),
                frozenset(TopicPartition(topic.topic, each) for topic in state.topics for each in topic.partitions),
            )

        return await self.kafka.query_coordinator(
            transactional_id, query, timeout_seconds, key_type=TRANSACTION_COORDINATOR
        )
