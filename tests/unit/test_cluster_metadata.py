"""Which of two Metadata answers is believed."""

from __future__ import annotations

from uuid import UUID

import pytest

from fencepost_proxy.cluster.metadata import (
    EMPTY,
    ClusterMetadata,
    Leader,
    PartitionInfo,
    TopicInfo,
    from_response,
    from_topic_list,
    merged,
)
from fencepost_proxy.types import Address, LeaderEpoch, NodeId
from fencepost_proxy.wire.apis import METADATA
from fencepost_proxy.wire.control import decode_response, encode_response
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.spliced import TopicList

FIRST, SECOND = UUID(int=1), UUID(int=2)


def topic(topic_id: UUID, *leaders: tuple[int, int]) -> TopicInfo:
    """Leaders as (node id, leader epoch), from partition 0 on."""
    partitions = {
        index: PartitionInfo(Leader(NodeId(node), LeaderEpoch(epoch)), (NodeId(1), NodeId(2)), (NodeId(1),))
        for index, (node, epoch) in enumerate(leaders)
    }
    return TopicInfo("t", topic_id, partitions)


def answer(*topics: TopicInfo, missing: tuple[str, ...] = ()) -> ClusterMetadata:
    brokers = {NodeId(1): Address("kafka-1", 9092)}
    return ClusterMetadata("cluster", brokers, {each.name: each for each in topics}, dict.fromkeys(missing, 3))


def leader_of(metadata: ClusterMetadata, partition: int = 0) -> Leader:
    return metadata.topics["t"].partitions[partition].leader


def test_lagging_broker_does_not_restore_old_leader() -> None:
    known = merged(EMPTY, answer(topic(FIRST, (1, 5))), all_topics=False)

    assert leader_of(merged(known, answer(topic(FIRST, (2, 4))), all_topics=False)) == (1, 5)
    assert leader_of(merged(known, answer(topic(FIRST, (2, 6))), all_topics=False)) == (2, 6)


def test_a_partition_without_a_leader_is_news_too() -> None:
    known = merged(EMPTY, answer(topic(FIRST, (1, 5))), all_topics=False)

    assert leader_of(merged(known, answer(topic(FIRST, (-1, 5))), all_topics=False)) == (-1, 5)


def test_recreated_topic_replaces_its_predecessor() -> None:
    known = merged(EMPTY, answer(topic(FIRST, (1, 5), (1, 5))), all_topics=False)

    again = merged(known, answer(topic(SECOND, (2, 0))), all_topics=False)

    assert leader_of(again) == (2, 0)
    assert again.topics["t"].partition_count == 1


def test_lagging_response_removes_no_partitions() -> None:
    known = merged(EMPTY, answer(topic(FIRST, (1, 5), (1, 5))), all_topics=False)

    assert merged(known, answer(topic(FIRST, (1, 5))), all_topics=False).topics["t"].partition_count == 2


def test_missing_or_unlisted_topic_is_removed() -> None:
    known = merged(EMPTY, answer(topic(FIRST, (1, 5))), all_topics=False)

    assert "t" in merged(known, answer(), all_topics=False).topics
    assert "t" not in merged(known, answer(missing=("t",)), all_topics=False).topics
    assert "t" not in merged(known, answer(), all_topics=True).topics


@pytest.mark.parametrize("version", [10, 12, 13])
def test_unchanged_topics_are_not_decoded_again(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(leader_id: int) -> TopicList:
        brokers = [Message(node_id=1, host="kafka-1", port=9092)]
        topics = [
            Message(name="t", topic_id=FIRST, partitions=[Message(partition_index=0, leader_id=leader_id)]),
            Message(name="u", topic_id=SECOND, partitions=[Message(partition_index=0, leader_id=1)]),
            Message(name="gone", topic_id=UUID(int=3), error_code=3),
            Message(name="later", topic_id=UUID(int=4), error_code=5),
        ]
        body = encode_response(METADATA, version, Message(cluster_id="cluster", brokers=brokers, topics=topics))
        expected.append(from_response(decode_response(METADATA, version, body)))
        return TopicList(METADATA, version, body, has_header=False)

    expected: list[ClusterMetadata] = []
    decoded: list[int] = []
    element = TopicList.element
    monkeypatch.setattr(TopicList, "element", lambda self, index: decoded.append(index) or element(self, index))
    first, read = from_topic_list(listed(1), {})
    again, read = from_topic_list(listed(1), read)
    assert decoded == [0, 1, 2, 3, 2, 3]
    decoded.clear()
    news, _ = from_topic_list(listed(2), read)
    assert decoded == [0, 2, 3]
    assert [first, again, news] == expected
    assert merged(merged(EMPTY, first, all_topics=False), news, all_topics=False).topics["u"] is first.topics["u"]


def test_topic_with_transient_error_is_left_undecided() -> None:
    def named(name: str, error_code: int) -> Message:
        return Message(name=name, error_code=error_code, topic_id=FIRST, partitions=[], is_internal=False)

    read = from_response(
        Message(brokers=[], cluster_id="c", topics=[named("gone", 3), named("new", 5), named("hidden", 29)])
    )

    assert read.missing == {"gone": 3, "hidden": 29}
    assert read.topics == {}
