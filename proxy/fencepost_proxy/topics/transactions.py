"""AddPartitionsToTxn (transactions v1) and WriteTxnMarkers for checked topics.

A transaction's marker takes an offset in each partition that the transaction added, even without records, and does not
pass the sequencer. `required` topics do not allow that: the partition is refused with 44 before Kafka gets the request,
and every client can abort after that error. On `true` topics the sequencers are notified, and may delay the request.

If one partition is refused, none is added, as in Kafka.

Kafka checks the client's rights before the proxy refuses: it gets a request without effect, so that clients without
rights get Kafka's errors and learn nothing about the topics.

WriteTxnMarkers comes from an admin client that ends a hanging transaction. In a checked partition the marker is written
while no conditional append is in progress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fencepost_policies.append import Check
from fencepost_proxy.errors import Error, LimitError
from fencepost_proxy.topics.closed import DENIED
from fencepost_proxy.topics.planning import Joins, Known, Plan
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.types import MARKER, TopicPartition
from fencepost_proxy.wire.schema import Message

_NO_PRODUCER_ID = -1
#: No topic has it: no marker is written for it.
NO_PARTITION: Final = 0x7FFFFFFF
#: Kafka's answers to a client that may not add the partitions, and for partitions that do not exist.
_NOT_PERMITTED: Final = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.TOPIC_AUTHORIZATION_FAILED,
        Error.CLUSTER_AUTHORIZATION_FAILED,
        Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Error.OPERATION_NOT_ATTEMPTED,
    }
)
#: Limit for a request with a checked topic, since each partition goes to a sequencer. See `session.reading`.
_PARTITIONS_MAX = 2_048


def plan_add_partitions(request: Message, known: Known) -> Plan:
    """For v0 to v3, which clients use. `plan.joins` has the partitions of `true` topics."""
    topics = request.v3_and_below_topics
    refusals = {topic.name: error for topic in topics if (error := _add_error(topic.name, known)) is not None}
    if refusals:
        return _refuse_to_add(request, refusals, known)
    joins = [
        TopicPartition(topic.name, partition)
        for topic in topics
        if known.check(topic.name) is Check.ON
        for partition in topic.partitions
    ]
    if not joins:
        return Plan(request, lambda response: [])
    queried = [(topic.name, list(topic.partitions)) for topic in topics]
    _not_too_many(joins[0], sum(len(partitions) for _, partitions in queried))
    joined = Joins(request.v3_and_below_transactional_id, tuple(joins))
    return Plan(request, lambda response: [], joined, _later(queried))


def _add_error(topic: str, known: Known) -> int | None:
    if known.is_state_topic(topic):
        return DENIED
    check = known.check(topic)
    if check is None:
        # The virtual configs are outdated: an error on which every client retries.
        return Error.CONCURRENT_TRANSACTIONS
    return Error.POLICY_VIOLATION if check is Check.REQUIRED else None


def _refuse_to_add(request: Message, refusals: Mapping[str, int], known: Known) -> Plan:
    """No transactional id has the producer id that Kafka gets: it checks the rights, then adds nothing."""
    closed = [topic for topic in request.v3_and_below_topics if known.is_state_topic(topic.name)]
    request.v3_and_below_topics = [each for each in request.v3_and_below_topics if not known.is_state_topic(each.name)]
    request.v3_and_below_producer_id = _NO_PRODUCER_ID

    def finish(response: Message) -> list[TopicConfigChange]:
        for topic in response.results_by_topic_v3_and_below:
            for each in topic.results_by_partition:
                if each.partition_error_code not in _NOT_PERMITTED:
                    each.partition_error_code = refusals.get(topic.name, Error.OPERATION_NOT_ATTEMPTED)
        response.results_by_topic_v3_and_below += [
            _add_result(topic.name, topic.partitions, refusals[topic.name]) for topic in closed
        ]
        return []

    return Plan(request, finish)


def _add_result(topic: str, partitions: Sequence[int], error: int) -> Message:
    results = [Message(partition_index=each, partition_error_code=error) for each in partitions]
    return Message(name=topic, results_by_partition=results)


def _not_too_many(checked: TopicPartition, partitions: int) -> None:
    if partitions > _PARTITIONS_MAX:
        raise LimitError(
            f"{partitions} partitions are to be in a transaction, and topic {checked.topic} is one that this proxy "
            f"checks: then a request may name {_PARTITIONS_MAX}; send smaller requests"
        )


def _later(queried: list[tuple[str, list[int]]]) -> Message:
    """No partition was added: clients retry."""
    results = [_add_result(topic, partitions, Error.CONCURRENT_TRANSACTIONS) for topic, partitions in queried]
    return Message(throttle_time_ms=0, results_by_topic_v3_and_below=results)


def plan_write_markers(request: Message, known: Known) -> Plan:
    """`plan.joins` has the partitions of checked topics."""
    refused: list[tuple[int, str, list[int], int]] = []
    joins: dict[TopicPartition, None] = {}
    queried = [
        (marker.producer_id, [(topic.name, list(topic.partition_indexes)) for topic in marker.topics])
        for marker in request.markers
    ]
    for marker in request.markers:
        kept = []
        for topic in marker.topics:
            error = _marker_error(marker.producer_id, topic.name, known)
            if error is not None:
                refused.append((marker.producer_id, topic.name, list(topic.partition_indexes), error))
                if error != DENIED:
                    kept.append(Message(name=topic.name, partition_indexes=[NO_PARTITION]))
                continue
            kept.append(topic)
            if known.check(topic.name) is not Check.OFF:
                joins.update((TopicPartition(topic.name, each), None) for each in topic.partition_indexes)
        marker.topics = kept

    def finish(response: Message) -> list[TopicConfigChange]:
        results = {marker.producer_id: marker for marker in response.markers}
        for producer_id, topic, partitions, error in refused:
            if producer_id not in results:
                results[producer_id] = Message(producer_id=producer_id, topics=[])
                response.markers.append(results[producer_id])
            denied = _take_out(results[producer_id].topics, topic) == Error.CLUSTER_AUTHORIZATION_FAILED
            code = Error.CLUSTER_AUTHORIZATION_FAILED if denied else error
            results[producer_id].topics.append(_marker_result(topic, partitions, code))
        return []

    if not joins:
        return Plan(request, finish)
    _not_too_many(next(iter(joins)), sum(len(partitions) for _, topics in queried for _, partitions in topics))
    # Nothing was written: Kafka's tools retry.
    later = [
        Message(
            producer_id=producer_id,
            topics=[_marker_result(name, partitions, Error.NOT_LEADER_OR_FOLLOWER) for name, partitions in topics],
        )
        for producer_id, topics in queried
    ]
    return Plan(request, finish, Joins(MARKER, tuple(joins)), Message(markers=later))


def _marker_error(producer_id: int, topic: str, known: Known) -> int | None:
    if known.is_state_topic(topic):
        return DENIED
    if producer_id in known.shared_producer_ids:
        return Error.POLICY_VIOLATION
    return Error.NOT_LEADER_OR_FOLLOWER if known.check(topic) is None else None


def _take_out(topics: list[Message], name: str) -> int | None:
    """Kafka's error for `NO_PARTITION` of a refused topic; None if Kafka did not get it."""
    for topic in topics:
        if topic.name == name:
            topics.remove(topic)
            return next((int(each.error_code) for each in topic.partitions), None)
    return None


def _marker_result(topic: str, partitions: list[int], error: int) -> Message:
    results = [Message(partition_index=each, error_code=error) for each in partitions]
    return Message(name=topic, partitions=results)
