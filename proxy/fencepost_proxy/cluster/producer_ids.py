"""Producer ids without a transactional id: InitProducerId v0–4, to any broker. Needs IDEMPOTENT_WRITE or WRITE.

Retried on any broker: an id that a lost response contained is never used.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.cluster.broker import BrokerConnection
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.responses import check
from fencepost_proxy.types import Monotonic, ProducerEpoch, ProducerId
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message


@dataclass(frozen=True, slots=True)
class ProducerIds:
    """New producer ids."""

    kafka: KafkaClient

    async def init(self, *, timeout_seconds: float | None = None) -> tuple[ProducerId, ProducerEpoch]:
        """InitProducerId without a transactional id: a new producer id and its epoch (0)."""

        async def query(connection: BrokerConnection, deadline: Monotonic) -> tuple[ProducerId, ProducerEpoch]:
            message = Message(transactional_id=None, transaction_timeout_ms=0, producer_id=-1, producer_epoch=-1)
            answer = await connection.query(apis.INIT_PRODUCER_ID, message, at_most=4, deadline=deadline)
            check(answer.error_code, "InitProducerId")
            return ProducerId(answer.producer_id), ProducerEpoch(answer.producer_epoch)

        return await self.kafka.query_any(query, timeout_seconds)
