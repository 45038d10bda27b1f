"""AddPartitionsToTxn (transactions v1) and WriteTxnMarkers for checked topics.

A transaction's marker takes an offset in each partition that the transaction added, even without records, and does not
pass the sequencer. `required` topics do not allow that: the partition is refused with 44 before Kafka gets the request,
and every client can abort after that error. On `true` topics the sequencers are notified, and may delay the request.

The request's other partitions are added: a client aborts after any error, and then their markers do no harm.

WriteTxnMarkers comes from an admin client that ends a hanging transaction. In a checked partition the marker is written
while no conditional append is in progress.
"""

from __future__ import annotations

from fencepost_policies.append import Check
from fencepost_proxy.errors import Error, LimitError
from fencepost_proxy.topics.closed import DENIED
from fencepost_proxy.topics.planning import Joins, Known, Plan
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.types import MARKER, TopicPartition
from fencepost_proxy.wire.schema import Message

_CONCURRENT_TRANSACTIONS = 51
#: Limit for a request with a checked topic, since each partition goes to a sequencer. See `session.reading`.
_PARTITIONS_MAX = 2_048


def plan_add_partitions(request: Message, known: Known) -> Plan:
    """For v0 to v3, which clients use. `plan.joins` has the partitions of `true` topics."""
    refused: list[tuple[Message, int]] = []
    kept: list[Message] = []
    joins: list[TopicPartition] = []
    for topic in request.v3_and_below_topics:
        check = known.check(topic.name)
        if known.is_state_topic(topic.name):
            refused.append((topic, DENIED))
        elif check is None:
            # The virtual configs are outdated: an error on which every client retries.
            refused.append((topic, _CONCURRENT_TRANSACTIONS))
        elif check is Check.REQUIRED:
            refused.append((topic, Error.POLICY_VIOLATION))
        else:
            kept.append(topic)
            if check is Check.ON:
                joins += [TopicPartition(topic.name, partition) for partition in topic.partitions]
    queried = [(topic.name, list(topic.partitions)) for topic in request.v3_and_below_topics]
    request.v3_and_below_topics = kept

    def finish(response: Message) -> list[TopicConfigChange]:
        for topic, error in refused:
            results = [Message(partition_index=each, partition_error_code=error) for each in topic.partitions]
            response.results_by_topic_v3_and_below.append(Message(name=topic.name, results_by_partition=results))
        return []

    if not joins:
        return Plan(request, finish)
    _not_too_many(joins[0], sum(len(partitions) for _, partitions in queried))
    return Plan(request, finish, Joins(request.v3_and_below_transactional_id, tuple(joins)), _later(queried))


def _not_too_many(checked: TopicPartition, partitions: int) -> None:
    if partitions > _PARTITIONS_MAX:
        raise LimitError(
            f"{partitions} partitions are to be in a transaction, and topic {checked.topic} is one that this proxy "
            f"checks: then a request may name {_PARTITIONS_MAX}; send smaller requests"
        )


def _later(queried: list[tuple[str, list[int]]]) -> Message:
    """No partition was added: clients retry."""
    topics = [
        Message(
            name=name,
            results_by_partition=[
                Message(partition_index=each, partition_error_code=_CONCURRENT_TRANSACTIONS) for each in partitions
            ],
        )
        for name, partitions in queried
    ]
    return Message(throttle_time_ms=0, results_by_topic_v3_and_below=topics)


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
            results[producer_id].topics.append(_marker_result(topic, partitions, error))
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


def _marker_result(topic: str, partitions: list[int], error: int) -> Message:
    results = [Message(partition_index=each, error_code=error) for each in partitions]
    return Message(name=topic, partitions=results)
