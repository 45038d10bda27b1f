"""Cluster metadata, merged from Metadata responses of several brokers.

Each broker's metadata may lag. A partition's leader is therefore replaced only by one with the same or a higher leader
epoch. If the topic id changed, the topic was created again and its old metadata is discarded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.errors import Error
from fencepost_proxy.types import Address, LeaderEpoch, NodeId
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.spliced import TopicList

NO_NODE: Final = NodeId(-1)


class Leader(NamedTuple):
    node_id: NodeId
    leader_epoch: LeaderEpoch


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """`leader`: node id -1 without a leader. Replicas are broker ids."""

    leader: Leader
    replicas: tuple[NodeId, ...]
    in_sync_replicas: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class TopicInfo:
    name: str
    topic_id: UUID
    partitions: Mapping[int, PartitionInfo]
    is_internal: bool = False

    @property
    def partition_count(self) -> int:
        return len(self.partitions)

    @property
    def replication_factor(self) -> int:
        """The lowest of all partitions, 0 without partitions."""
        return min((len(each.replicas) for each in self.partitions.values()), default=0)


@dataclass(frozen=True, slots=True)
class ClusterMetadata:
    """One response, or the merged metadata. `topics`: existing topics that are visible to the proxy.

    `missing`: requested topics that were not found: name -> Kafka error code (3, 17, 29).
    """

    cluster_id: str | None
    brokers: Mapping[NodeId, Address]
    topics: Mapping[str, TopicInfo]
    missing: Mapping[str, int]


EMPTY: Final = ClusterMetadata(None, MappingProxyType({}), MappingProxyType({}), MappingProxyType({}))

_ABSENT: Final = {Error.UNKNOWN_TOPIC_OR_PARTITION, Error.INVALID_TOPIC_EXCEPTION, Error.TOPIC_AUTHORIZATION_FAILED}


def from_response(response: Message) -> ClusterMetadata:
    """Read a Metadata response of v10 or later (topic ids). A topic with a transient error is in neither mapping."""
    topics: dict[str, TopicInfo] = {}
    missing: dict[str, int] = {}
    for topic in response.topics:
        if topic.error_code in _ABSENT:
            missing[topic.name] = topic.error_code
        elif not topic.error_code:
            topics[topic.name] = _topic_info(topic)
    return ClusterMetadata(response.cluster_id, _brokers(response), topics, missing)


#: Topics by their bytes in a response.
ReadBefore = Mapping[bytes, TopicInfo]


def from_topic_list(response: TopicList, before: ReadBefore) -> tuple[ClusterMetadata, ReadBefore]:
    """As `from_response`, but topics whose bytes are in `before` are not decoded. Also returns the next `before`."""
    topics: dict[str, TopicInfo] = {}
    missing: dict[str, int] = {}
    read: dict[bytes, TopicInfo] = {}
    for index in range(len(response)):
        encoded = response.encoded_element(index)
        info = before.get(encoded)
        if info is None:
            topic = response.element(index)
            if topic.error_code in _ABSENT:
                missing[topic.name] = topic.error_code
            if topic.error_code:
                continue
            info = _topic_info(topic)
        topics[info.name] = read[encoded] = info
    return ClusterMetadata(response.before.cluster_id, _brokers(response.before), topics, missing), read


def _topic_info(topic: Message) -> TopicInfo:
    partitions = {
        each.partition_index: PartitionInfo(
            Leader(NodeId(each.leader_id), LeaderEpoch(each.leader_epoch)),
            tuple(map(NodeId, each.replica_nodes)),
            tuple(map(NodeId, each.isr_nodes)),
        )
        for each in sorted(topic.partitions, key=lambda each: each.partition_index)
    }
    return TopicInfo(topic.name, topic.topic_id, partitions, topic.is_internal)


def _brokers(response: Message) -> dict[NodeId, Address]:
    return {NodeId(each.node_id): Address(each.host, each.port) for each in response.brokers}


def merged(known: ClusterMetadata, news: ClusterMetadata, *, all_topics: bool) -> ClusterMetadata:
    """`known` updated with `news`; returns `known` itself if nothing changed.

    `all_topics`: topics that `news` does not list do not exist.
    """
    topics = {} if all_topics else {name: info for name, info in known.topics.items() if name not in news.missing}
    for name, info in news.topics.items():
        topics[name] = _newer(known.topics.get(name), info)
    if (known.cluster_id, known.brokers, known.topics) == (news.cluster_id, news.brokers, topics):
        return known
    return ClusterMetadata(news.cluster_id, news.brokers, topics, MappingProxyType({}))


def _newer(known: TopicInfo | None, news: TopicInfo) -> TopicInfo:
    if known is None or known is news or known.topic_id != news.topic_id:
        return news
    partitions = dict(news.partitions)
    for index, before in known.partitions.items():
        # Kafka never removes partitions: a response without one is out of date.
        if index not in partitions or before.leader.leader_epoch > partitions[index].leader.leader_epoch:
            partitions[index] = before
    return news if partitions == news.partitions else replace(news, partitions=partitions)
