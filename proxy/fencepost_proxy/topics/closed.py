"""Hide the state topic from clients: no list, read, write, delete or log metadata. By name it gets error 29, Kafka's
answer for a topic that a client may not describe.

APIs that only move it between brokers (AlterPartitionReassignments, AlterReplicaLogDirs, ElectLeaders) stay open to
clients with Kafka's permission, as do those that show its replicas: operators must be able to empty a broker.

A request that may name it (`Handling.INSPECT_REQUEST`) is searched for the topic's name and id as bytes (`mentions`),
and decoded only if they occur. The wire format neither compresses nor splits them. Produce is not handled here, since
its topics are read anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from fencepost_proxy.errors import Error
from fencepost_proxy.topics.planning import Known, Plan
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.types import NO_TOPIC_ID
from fencepost_proxy.wire.apis import DELETE_RECORDS, DESCRIBE_PRODUCERS, FETCH, LIST_OFFSETS, OFFSET_FOR_LEADER_EPOCH
from fencepost_proxy.wire.schema import Message

DENIED: Final = Error.TOPIC_AUTHORIZATION_FAILED
#: A proxy recognizes the response of another proxy by this.
CLOSED: Final = "it is closed to clients"
#: Value of `topic_authorized_operations`.
_NOT_REPORTED: Final = -(2**31)


def denied_message(known: Known) -> str:
    return f"{known.state_topic} is the proxy's state topic; {CLOSED}"


def mentions(frame: bytes | memoryview, known: Known) -> bool:
    """Whether a request contains the state topic's name or id. True may be a coincidence, False is certain."""
    data = bytes(frame)
    if known.state_topic.encode() in data:
        return True
    return known.state_topic_id is not None and known.state_topic_id.bytes in data


def hide(response: Message, known: Known, *, queried: bool, by_name: bool = True) -> bool:
    """Remove the state topic from a Metadata or DescribeTopicPartitions response; False: it was not there.

    `queried`: the request `mentions` it. Then it stays as an entry with error 29 and no partitions, since a client
    waits for an answer about a topic that it named. A client that gave the name does not get its id, and vice versa.
    """
    kept, found = [], False
    for topic in response.topics:
        if known.is_state_topic(topic.name, topic.topic_id):
            found = True
            if not queried:
                continue
            topic.error_code = DENIED
            topic.partitions = []
            topic.topic_authorized_operations = _NOT_REPORTED
            if by_name:
                topic.topic_id = NO_TOPIC_ID
            else:
                topic.name = None
        kept.append(topic)
    response.topics = kept
    return found


def plan_closed(api_key: int, request: Message, known: Known) -> Plan:
    """The plan for a request to one of `CLOSED_APIS` that `mentions` the state topic."""
    return CLOSED_APIS[api_key](request, known)


def _fetch(request: Message, known: Known) -> Plan:
    def denied(topic: Message) -> Message:
        partitions = [
            Message(partition_index=each.partition, error_code=DENIED, high_watermark=-1, records=b"")
            for each in topic.partitions
        ]
        return Message(topic=topic.topic, topic_id=topic.topic_id, partitions=partitions)

    refused = _take(request, "topics", lambda topic: known.is_state_topic(topic.topic, topic.topic_id))
    return _answered_too(request, "responses", [denied(topic) for topic in refused])


def _delete_records(request: Message, known: Known) -> Plan:
    def denied(topic: Message) -> Message:
        partitions = [
            Message(partition_index=each.partition_index, low_watermark=-1, error_code=DENIED)
            for each in topic.partitions
        ]
        return Message(name=topic.name, partitions=partitions)

    refused = _take(request, "topics", lambda topic: known.is_state_topic(topic.name))
    return _answered_too(request, "topics", [denied(topic) for topic in refused])


def _list_offsets(request: Message, known: Known) -> Plan:
    def denied(topic: Message) -> Message:
        partitions = [
            Message(partition_index=each.partition_index, error_code=DENIED, timestamp=-1, offset=-1, leader_epoch=-1)
            for each in topic.partitions
        ]
        return Message(name=topic.name, partitions=partitions)

    refused = _take(request, "topics", lambda topic: known.is_state_topic(topic.name))
    return _answered_too(request, "topics", [denied(topic) for topic in refused])


def _epoch_ends(request: Message, known: Known) -> Plan:
    def denied(topic: Message) -> Message:
        partitions = [
            Message(partition=each.partition, error_code=DENIED, leader_epoch=-1, end_offset=-1)
            for each in topic.partitions
        ]
        return Message(topic=topic.topic, partitions=partitions)

    refused = _take(request, "topics", lambda topic: known.is_state_topic(topic.topic))
    return _answered_too(request, "topics", [denied(topic) for topic in refused])


def _describe_producers(request: Message, known: Known) -> Plan:
    def denied(topic: Message) -> Message:
        partitions = [
            Message(partition_index=index, error_code=DENIED, error_message=denied_message(known))
            for index in topic.partition_indexes
        ]
        return Message(name=topic.name, partitions=partitions)

    refused = _take(request, "topics", lambda topic: known.is_state_topic(topic.name))
    return _answered_too(request, "topics", [denied(topic) for topic in refused])


def _answered_too(request: Message, attribute: str, denied: Sequence[Message]) -> Plan:
    """Forward the rest of the request; append the answers for the removed entries to Kafka's answers."""

    def finish(response: Message) -> list[TopicConfigChange]:
        getattr(response, attribute).extend(denied)
        return []

    return Plan(request, finish)


def leave_out_of_subscription(request: Message, known: Known) -> None:
    """For ConsumerGroupHeartbeat: as if the topic did not exist, and the member had none of its partitions."""
    if request.subscribed_topic_names is not None:
        names = request.subscribed_topic_names
        request.subscribed_topic_names = [name for name in names if not known.is_state_topic(name)]
    if request.topic_partitions is not None:
        _take(request, "topic_partitions", lambda topic: known.is_state_topic(None, topic.topic_id))


def leave_out_of_assignment(response: Message, known: Known) -> None:
    """For its answer: a member that subscribed to a pattern would get an authorization error for it."""
    if response.assignment is not None:
        _take(response.assignment, "topic_partitions", lambda topic: known.is_state_topic(None, topic.topic_id))


def _take(request: Message, attribute: str, unwanted: Callable[[Message], bool]) -> list[Message]:
    """Take the unwanted entries out of a list of the request."""
    entries: list[Message] = getattr(request, attribute)
    setattr(request, attribute, [entry for entry in entries if not unwanted(entry)])
    return [entry for entry in entries if unwanted(entry)]


CLOSED_APIS: Final[Mapping[int, Callable[[Message, Known], Plan]]] = {
    FETCH: _fetch,
    DELETE_RECORDS: _delete_records,
    LIST_OFFSETS: _list_offsets,
    OFFSET_FOR_LEADER_EPOCH: _epoch_ends,
    DESCRIBE_PRODUCERS: _describe_producers,
}
