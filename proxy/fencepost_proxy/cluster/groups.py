"""Consumer groups: OffsetFetch v2–7 and ConsumerGroupDescribe v0–1, to the group's coordinator.

Retried, with a new FindCoordinator, on errors 14, 15, 16 and the like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from fencepost_proxy.cluster.broker import BrokerConnection
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.responses import check, only
from fencepost_proxy.types import Monotonic, Offset, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message


@dataclass(frozen=True, slots=True)
class ConsumerGroups:
    """What coordinators know of groups."""

    kafka: KafkaClient

    async def committed_offsets(
        self, group: str, partitions: Iterable[TopicPartition], *, timeout_seconds: float | None = None
    ) -> Mapping[TopicPartition, Offset]:
        """A group's committed offsets (OffsetFetch); partitions without a commit are missing.

        Needs DESCRIBE on the group and on the topics.
        """
        requested: dict[str, list[int]] = {}
        for topic, partition in partitions:
            requested.setdefault(topic, []).append(partition)
        topics = [Message(name=topic, partition_indexes=numbers) for topic, numbers in requested.items()]

        async def query(connection: BrokerConnection, deadline: Monotonic) -> Mapping[TopicPartition, Offset]:
            message = Message(group_id=group, topics=topics, require_stable=False)
            answer = await connection.query(apis.OFFSET_FETCH, message, at_least=2, at_most=7, deadline=deadline)
            check(answer.error_code, "OffsetFetch")
            found: dict[TopicPartition, Offset] = {}
            for topic in answer.topics:
                for each in topic.partitions:
                    check(each.error_code, "OffsetFetch")
                    if each.committed_offset >= 0:
                        found[TopicPartition(topic.name, each.partition_index)] = Offset(each.committed_offset)
            return found

        return await self.kafka.query_coordinator(group, query, timeout_seconds)

    async def assignments(
        self, group: str, *, timeout_seconds: float | None = None
    ) -> Mapping[str, Sequence[tuple[UUID, Sequence[int]]]]:
        """Assignment of each member of a KIP-848 group. Needs DESCRIBE on the group."""

        async def query(
            connection: BrokerConnection, deadline: Monotonic
        ) -> Mapping[str, Sequence[tuple[UUID, Sequence[int]]]]:
            message = Message(group_ids=[group], include_authorized_operations=False)
            answer = await connection.query(apis.CONSUMER_GROUP_DESCRIBE, message, at_most=1, deadline=deadline)
            described = only(answer.groups, "ConsumerGroupDescribe")
            check(described.error_code, "ConsumerGroupDescribe", described.error_message)
            return {
                member.member_id: [(each.topic_id, each.partitions) for each in member.assignment.topic_partitions]
                for member in described.members
            }

        return await self.kafka.query_coordinator(group, query, timeout_seconds)
