"""The state topic is closed to clients: not listed, not read, not written, not deleted; named, it gets error 29.

What only moves it between brokers (AlterPartitionReassignments, AlterReplicaLogDirs, ElectLeaders) or tells offsets
stays open to those whom Kafka allows it: operators must be able to empty a broker.

A request that may name it (`Treatment.INSPECT_REQUEST`) is searched for the topic's name and id as bytes (`mentions`),
and decoded only if they occur: nothing on the wire compresses or splits them. Produce is not here, its topics are read
anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from fencepost_proxy.errors import Error
from fencepost_proxy.topics.planning import Known, Plan
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.wire.apis import DELETE_RECORDS, FETCH
from fencepost_proxy.wire.schema import Message

DENIED: Final = Error.TOPIC_AUTHORIZATION_FAILED


def denied_message(known: Known) -> str:
    return f"{known.state_topic} is where the proxy keeps its state; it is closed to clients."


def mentions(frame: bytes | memoryview, known: Known) -> bool:
    """Whether the state topic's name or id occurs in a request's bytes. True may be chance, False is certain."""
    data = bytes(frame)
    if known.state_topic.encode() in data:
        return True
    return known.state_topic_id is not None and known.state_topic_id.bytes in data


def hide(response: Message, known: Known, *, asked: bool) -> None:
    """Takes the state topic out of a Metadata or DescribeTopicPartitions response.

    `asked` – the request `mentions` it: then it stays as an entry with error 29 and no partitions, since a client
    waits for an answer about a topic that it named.
    """
    kept = []
    for topic in response.topics:
        if known.is_state_topic(topic.name, topic.topic_id):
            if not asked:
                continue
            topic.error_code = DENIED
            topic.partitions = []
        kept.append(topic)
    response.topics = kept


def plan_closed(api_key: int, request: Message, known: Known) -> Plan:
    """The plan for a request to one of `CLOSED_APIS` that `mentions` the state topic."""
    return CLOSED_APIS[api_key](request, known)


def _fetch(request: Message, known: Known) -> Plan:
    refused = _take(request, "topics", lambda topic: known.is_state_topic(topic.topic, topic.topic_id))

    def finish(response: Message) -> list[TopicConfigChange]:
        for topic in refused:
            partitions = [
                Message(partition_index=each.partition, error_code=DENIED, high_watermark=-1, records=b"")
                for each in topic.partitions
            ]
            response.responses.append(Message(topic=topic.topic, topic_id=topic.topic_id, partitions=partitions))
        return []

    return Plan(request, finish)


def _delete_records(request: Message, known: Known) -> Plan:
    refused = _take(request, "topics", lambda topic: known.is_state_topic(topic.name))

    def finish(response: Message) -> list[TopicConfigChange]:
        for topic in refused:
            partitions = [
                Message(partition_index=each.partition_index, low_watermark=-1, error_code=DENIED)
                for each in topic.partitions
            ]
            response.topics.append(Message(name=topic.name, partitions=partitions))
        return []

    return Plan(request, finish)


def _take(request: Message, attribute: str, unwanted: Callable[[Message], bool]) -> list[Message]:
    """Takes the unwanted entries out of a list of the request."""
    entries: list[Message] = getattr(request, attribute)
    setattr(request, attribute, [entry for entry in entries if not unwanted(entry)])
    return [entry for entry in entries if unwanted(entry)]


CLOSED_APIS: Final[Mapping[int, Callable[[Message, Known], Plan]]] = {
    FETCH: _fetch,
    DELETE_RECORDS: _delete_records,
}
