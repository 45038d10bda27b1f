"""Hide the state topic from clients: no list, read, write, delete or log metadata. By name it gets error 29, Kafka's
answer for a topic that a client may not describe.

APIs that only move it between brokers (AlterPartitionReassignments, AlterReplicaLogDirs, ElectLeaders) stay open to
clients with Kafka's permission, as do those that show its replicas: operators must be able to empty a broker.

A request that may name it (`Handling.INSPECT_REQUEST`) is searched for the topic's name and id as bytes (`mentions`),
and decoded only if they occur. The wire format neither compresses nor splits them. Produce is not handled here, since
its topics are read anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from fencepost_proxy.errors import Error
from fencepost_proxy.topics.planning import Known, Plan
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.types import NO_TOPIC_ID
from fencepost_proxy.wire.apis import (
    DELETE_RECORDS,
    DESCRIBE_PRODUCERS,
    FETCH,
    LIST_OFFSETS,
    OFFSET_FOR_LEADER_EPOCH,
    SHARE_ACKNOWLEDGE,
    SHARE_FETCH,
)
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
    return any(mark in data for mark in marks(known))


def marks(known: Known) -> tuple[bytes, ...]:
    """What occurs in any message that names the state topic."""
    name = known.state_topic.encode()
    return (name,) if known.state_topic_id is None else (name, known.state_topic_id.bytes)


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
    """The plan for a request to one of `CLOSED_APIS` that `mentions` the state topic.

    Forwards the rest of the request, and appends the answers for the removed entries to Kafka's answers.
    """
    api = CLOSED_APIS[api_key]

    def is_closed(topic: Message) -> bool:
        fields = vars(topic)
        return known.is_state_topic(fields.get("name") or fields.get("topic"), fields.get("topic_id"))

    denied = [
        Message(
            partitions=[api.denied(each, known) for each in getattr(topic, api.partitions)],
            **{each: getattr(topic, each) for each in api.named},
        )
        for topic in _take(request, "topics", is_closed)
    ]

    def finish(response: Message) -> list[TopicConfigChange]:
        getattr(response, api.answers).extend(denied)
        return []

    return Plan(request, finish)


def leave_out_of_subscription(request: Message, known: Known) -> None:
    """For heartbeats of groups: as if the topic did not exist, and the member had none of its partitions."""
    if request.subscribed_topic_names is not None:
        names = request.subscribed_topic_names
        request.subscribed_topic_names = [name for name in names if not known.is_state_topic(name)]
    if getattr(request, "topic_partitions", None) is not None:
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


class _Closed(NamedTuple):
    """`denied`: the answer for a partition of the state topic. `named`: fields that identify a topic.

    `partitions`, `answers`: the fields with a topic's partitions and with the answers.
    """

    denied: Callable[[Any, Known], Message]
    named: tuple[str, ...] = ("name",)
    partitions: str = "partitions"
    answers: str = "topics"


CLOSED_APIS: Final[Mapping[int, _Closed]] = {
    FETCH: _Closed(
        lambda each, _: Message(partition_index=each.partition, error_code=DENIED, high_watermark=-1, records=b""),
        named=("topic", "topic_id"),
        answers="responses",
    ),
    DELETE_RECORDS: _Closed(
        lambda each, _: Message(partition_index=each.partition_index, low_watermark=-1, error_code=DENIED)
    ),
    LIST_OFFSETS: _Closed(
        lambda each, _: Message(
            partition_index=each.partition_index, error_code=DENIED, timestamp=-1, offset=-1, leader_epoch=-1
        )
    ),
    OFFSET_FOR_LEADER_EPOCH: _Closed(
        lambda each, _: Message(partition=each.partition, error_code=DENIED, leader_epoch=-1, end_offset=-1),
        named=("topic",),
    ),
    **dict.fromkeys(
        (SHARE_FETCH, SHARE_ACKNOWLEDGE),
        _Closed(
            lambda each, known: Message(
                partition_index=each.partition_index, error_code=DENIED, error_message=denied_message(known)
            ),
            named=("topic_id",),
            answers="responses",
        ),
    ),
    DESCRIBE_PRODUCERS: _Closed(
        lambda index, known: Message(partition_index=index, error_code=DENIED, error_message=denied_message(known)),
        partitions="partition_indexes",
    ),
}
