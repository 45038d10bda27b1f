"""AddPartitionsToTxn (transactions v1) where topics are guarded.

A transaction's marker takes an offset in each of its partitions, in those it added and never wrote to as well, and
passes no gate. `required` topics cannot have that: there the partition is refused before Kafka hears of it, with 44,
which every client takes for an error that it can abort. On `true` topics the gates are told who joins, and may put it
off.

The others of the request are added: a client aborts after any error, and then their markers do no harm.
"""

from __future__ import annotations

from fencepost_policies.append import Check
from fencepost_proxy.errors import Error
from fencepost_proxy.topics.closed import DENIED
from fencepost_proxy.topics.planning import Joins, Known, Plan
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.schema import Message

_CONCURRENT_TRANSACTIONS = 51


def plan_add_partitions(request: Message, known: Known) -> Plan:
    """For v0 to v3, which clients use. `plan.joins` names the partitions of `true` topics."""
    refused: list[tuple[Message, int]] = []
    kept: list[Message] = []
    joins: list[TopicPartition] = []
    for topic in request.v3_and_below_topics:
        check = known.check(topic.name)
        if known.is_state_topic(topic.name):
            refused.append((topic, DENIED))
        elif check is None:
            # The virtual configs were not read recently enough: retriable for every client.
            refused.append((topic, _CONCURRENT_TRANSACTIONS))
        elif check is Check.REQUIRED:
            refused.append((topic, Error.POLICY_VIOLATION))
        else:
            kept.append(topic)
            if check is Check.ON:
                joins += [TopicPartition(topic.name, partition) for partition in topic.partitions]
    asked = [(topic.name, list(topic.partitions)) for topic in request.v3_and_below_topics]
    request.v3_and_below_topics = kept

    def finish(response: Message) -> list[TopicConfigChange]:
        for topic, error in refused:
            results = [Message(partition_index=each, partition_error_code=error) for each in topic.partitions]
            response.results_by_topic_v3_and_below.append(Message(name=topic.name, results_by_partition=results))
        return []

    if not joins:
        return Plan(request, finish)
    return Plan(request, finish, Joins(request.v3_and_below_transactional_id, tuple(joins)), _later(asked))


def _later(asked: list[tuple[str, list[int]]]) -> Message:
    """Nothing was added: clients ask again."""
    topics = [
        Message(
            name=name,
            results_by_partition=[
                Message(partition_index=each, partition_error_code=_CONCURRENT_TRANSACTIONS) for each in partitions
            ],
        )
        for name, partitions in asked
    ]
    return Message(throttle_time_ms=0, results_by_topic_v3_and_below=topics)
