"""Queries of the monitor of a cluster's transactions (`transactions/watching.py`).

Needs DESCRIBE on topics and transactional ids, and READ on topics (DescribeProducers). Kafka omits transactional ids
and topics that the proxy may not describe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from fencepost_proxy.cluster.broker import BrokerConnection, Call, UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.log_ends import LATEST
from fencepost_proxy.cluster.producers import describe_producers_call
from fencepost_proxy.cluster.transactions import TRANSACTIONAL_ID_NOT_FOUND, read_described
from fencepost_proxy.errors import error_name
from fencepost_proxy.transactions.watched import (
    Answer,
    DescribeTransactions,
    Descriptions,
    FindLeaders,
    Leaders,
    Listed,
    Listing,
    ListTransactions,
    OpenInLog,
    PartitionProbe,
    PartitionProbes,
    ProbePartitions,
    Query,
)
from fencepost_proxy.types import NodeId, Offset, ProducerId, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.control import decode_response
from fencepost_proxy.wire.schema import Message

_QUERY_SECONDS: Final = 10.0
_TRANSACTION_LOG: Final = "__transaction_state"
_LIST_OFFSETS: Final = 2
_FROM_A_CONSUMER: Final = -1
_READ_UNCOMMITTED, _READ_COMMITTED = 0, 1
_ANY_EPOCH: Final = -1
_UNKNOWN_SERVER_ERROR: Final = -1
#: Larger responses are decoded in a thread, so that the event loop serves others meanwhile.
_DECODED_HERE_BYTES: Final = 65_536


class Queries:
    """Runs each query once. Raises `UpstreamUnavailable`."""

    def __init__(self, kafka: KafkaClient) -> None:
        self._kafka = kafka
        self._leaders: tuple[bytes, Leaders] | None = None

    async def query(self, query_message: Query) -> Answer:
        match query_message:
            case ListTransactions():
                return await self.list_transactions(query_message)
            case DescribeTransactions():
                return await self.describe_transactions(query_message)
            case FindLeaders():
                return await self._find_leaders()
            case ProbePartitions():
                return await self._probe_at(query_message)

    async def list_transactions(self, query_message: ListTransactions) -> Listing:
        message = Message(
            state_filters=list(query_message.states),
            producer_id_filters=list(query_message.producer_ids),
            duration_filter=-1,
            transactional_id_pattern=None,
        )
        answer = await self._one(query_message.node_id, apis.LIST_TRANSACTIONS, message, at_most=2)
        _check(answer.error_code, "ListTransactions")
        return Listing(
            [
                Listed(each.transactional_id, ProducerId(each.producer_id), each.transaction_state)
                for each in answer.transaction_states
            ]
        )

    async def describe_transactions(self, query_message: DescribeTransactions) -> Descriptions:
        message = Message(transactional_ids=list(query_message.transactional_ids))
        answer = await self._one(query_message.node_id, apis.DESCRIBE_TRANSACTIONS, message, at_most=0)
        known = [each for each in answer.transaction_states if each.error_code != TRANSACTIONAL_ID_NOT_FOUND]
        for each in known:
            _check(each.error_code, "DescribeTransactions")
        return Descriptions([read_described(each) for each in known])

    async def _find_leaders(self) -> Leaders:
        """Metadata of all topics, decoded only if it changed, and in a thread if it is large."""
        digest, known = self._leaders or (b"", None)
        taken = Message()

        def take(body: memoryview) -> Message:
            taken.body = bytes(body)
            return taken

        failure: UpstreamUnavailable | None = None
        for node_id in sorted(self._kafka.brokers):  # the same broker each time: its responses are byte-identical
            try:
                version = 0

                def calls(connection: BrokerConnection) -> Sequence[Call]:
                    nonlocal version
                    version = connection.version(apis.METADATA, at_least=9, at_most=13)
                    message = Message(
                        topics=None,
                        allow_auto_topic_creation=False,
                        include_cluster_authorized_operations=False,
                        include_topic_authorized_operations=False,
                    )
                    return [Call(apis.METADATA, version, message, take)]

                await self._kafka.query_broker(node_id, calls, timeout_seconds=_QUERY_SECONDS)
            except UpstreamUnavailable as error:
                failure = error
                continue
            body: bytes = taken.body
            found = blake2b(body, digest_size=16).digest()
            if known is not None and found == digest:
                return known
            if len(body) > _DECODED_HERE_BYTES:
                leaders = await asyncio.to_thread(_leaders, version, body)
            else:
                leaders = _leaders(version, body)
            self._leaders = found, leaders
            return leaders
        raise failure or UpstreamUnavailable("no broker is known")

    async def _probe_at(self, query_message: ProbePartitions) -> PartitionProbes:
        by_topic: dict[str, list[int]] = {}
        for topic, partition in query_message.partitions:
            by_topic.setdefault(topic, []).append(partition)

        def calls(connection: BrokerConnection) -> Sequence[Call]:
            version = connection.version(_LIST_OFFSETS, at_least=4, at_most=7)

            def offsets(isolation_level: int) -> Call:
                topics = [
                    Message(
                        name=topic,
                        partitions=[
                            Message(partition_index=each, current_leader_epoch=_ANY_EPOCH, timestamp=LATEST)
                            for each in partitions
                        ],
                    )
                    for topic, partitions in by_topic.items()
                ]
                message = Message(replica_id=_FROM_A_CONSUMER, isolation_level=isolation_level, topics=topics)
                return Call(_LIST_OFFSETS, version, message)

            return [
                offsets(_READ_UNCOMMITTED),
                offsets(_READ_COMMITTED),
                describe_producers_call(connection, query_message.partitions),
            ]

        latest, stable, producers = await self._kafka.query_broker(
            query_message.node_id, calls, timeout_seconds=_QUERY_SECONDS
        )
        high_watermarks, last_stable_offsets = _offsets(latest), _offsets(stable)
        found: dict[TopicPartition, PartitionProbe | int] = {}
        for described in producers.topics:
            for each in described.partitions:
                where = TopicPartition(described.name, each.partition_index)
                high_watermark, hw_error = high_watermarks.get(where, (-1, _UNKNOWN_SERVER_ERROR))
                last_stable_offset, lso_error = last_stable_offsets.get(where, (-1, _UNKNOWN_SERVER_ERROR))
                error = each.error_code or hw_error or lso_error
                found[where] = error or PartitionProbe(
                    Offset(high_watermark),
                    Offset(last_stable_offset),
                    len(each.active_producers),
                    tuple(
                        OpenInLog(
                            ProducerId(one.producer_id),
                            one.producer_epoch,
                            one.coordinator_epoch,
                            Offset(one.current_txn_start_offset),
                            one.last_timestamp,
                        )
                        for one in each.active_producers
                        if one.current_txn_start_offset >= 0
                    ),
                )
        return PartitionProbes(found)

    async def _one(self, node_id: NodeId, api_key: int, message: Message, *, at_most: int) -> Message:
        def calls(connection: BrokerConnection) -> Sequence[Call]:
            return [Call(api_key, connection.version(api_key, at_most=at_most), message)]

        (answer,) = await self._kafka.query_broker(node_id, calls, timeout_seconds=_QUERY_SECONDS)
        return answer


def _check(error_code: int, api: str) -> None:
    if error_code:
        raise UpstreamUnavailable(f"{api} returned {error_name(error_code)}", error_code=error_code)


def _offsets(answer: Message) -> dict[TopicPartition, tuple[int, int]]:
    """(offset, error code) by partition."""
    return {
        TopicPartition(topic.name, each.partition_index): (each.offset, each.error_code)
        for topic in answer.topics
        for each in topic.partitions
    }


def _leaders(version: int, body: bytes) -> Leaders:
    by_node: dict[NodeId, list[TopicPartition]] = {}
    coordinators = True
    for topic in decode_response(apis.METADATA, version, body).topics:
        for each in topic.partitions:
            by_node.setdefault(NodeId(each.leader_id), []).append(TopicPartition(topic.name, each.partition_index))
            if topic.name == _TRANSACTION_LOG and each.leader_id < 0:
                coordinators = False
    return Leaders({node_id: sorted(partitions) for node_id, partitions in by_node.items()}, coordinators)
