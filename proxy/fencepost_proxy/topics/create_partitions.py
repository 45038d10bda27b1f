"""CreatePartitions for topics with partition-count checks: Kafka validates the request, and the proxy executes it.

Such a topic is expanded by `expansion/procedure.py`, under the proxy's own principal. So the client's request is
forwarded as *validate-only*, on the client's own connection: Kafka checks permission and validity. Only then does the
procedure begin, and its result is the client's answer.

A client with permission also gets "expansion in progress" as the answer to that validation.

Other topics in the same request are forwarded unchanged. CreatePartitions has one flag for all its topics, so they go
first, in a separate request. A client's own validate-only request gets Kafka's answer, except for what the proxy
refuses.

*Multiples.* With hash % count a key stays or moves to a new partition only if the new count is a multiple of the old
one. From 2 to 3, a key of hash 4 moves from partition 0 to partition 1, which exists already: consumers of partition 1
do not wait for partition 0. So an ordered topic is expanded to multiples, unless its config is `any`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fencepost_proxy.errors import Error
from fencepost_proxy.expansion.procedure import IN_PROGRESS
from fencepost_proxy.topics.closed import DENIED, denied_message
from fencepost_proxy.topics.planning import ExpansionOutcome, ExpansionRequest, Expansions, Known, Plan
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.types import NodeId
from fencepost_proxy.wire.schema import Message

#: Kafka's errors that mean that this client lacks permission; they show nothing else of the topic.
_NOT_ALLOWED: Final = frozenset(
    {Error.TOPIC_AUTHORIZATION_FAILED, Error.CLUSTER_AUTHORIZATION_FAILED, Error.UNKNOWN_TOPIC_OR_PARTITION}
)


def plan_create_partitions(_version: int, request: Message, known: Known) -> Plan:
    refused: list[Message] = []
    kafkas: list[Message] = []
    ours: list[Message] = []
    expanded_topics: dict[str, Message] = {}
    for topic in request.topics:
        refusal = _refusal(topic.name, known, validate_only=request.validate_only)
        if refusal is not None:
            refused.append(refusal)
        elif not request.validate_only and (in_progress := _in_progress(topic.name, known)):
            expanded_topics[topic.name] = in_progress
        elif _multiples_only(topic.name, known) or (not request.validate_only and known.is_count_checked(topic.name)):
            ours.append(topic)
        else:
            kafkas.append(topic)

    busy = [topic for topic in request.topics if topic.name in expanded_topics]

    def finish(response: Message) -> list[TopicConfigChange]:
        for result in response.results:
            if result.name in expanded_topics and result.error_code not in _NOT_ALLOWED:
                refusal = expanded_topics[result.name]
                result.error_code, result.error_message = refusal.error_code, refusal.error_message
        response.results += refused
        return []

    if not ours and not busy:
        request.topics = kafkas
        return Plan(request, finish)
    validated = Message(topics=ours + busy, timeout_ms=request.timeout_ms, validate_only=True)
    first = None
    if kafkas:
        first = Message(topics=kafkas, timeout_ms=request.timeout_ms, validate_only=request.validate_only)
    requests = [_request(topic, known, validate_only=request.validate_only) for topic in ours]
    return Plan(validated, finish, expansions=_expansions(first, requests, request.timeout_ms))


def _multiples_only(topic: str, known: Known) -> bool:
    policy = known.policy(topic)
    return policy is not None and policy.ordered and not policy.any_expansion


def _request(topic: Message, known: Known, *, validate_only: bool) -> ExpansionRequest:
    assignments, policy = topic.assignments, known.policy(topic.name)
    return ExpansionRequest(
        topic.name,
        topic.count,
        None if assignments is None else tuple(tuple(map(NodeId, each.broker_ids)) for each in assignments),
        ordered=policy is not None and policy.ordered,
        multiples_only=_multiples_only(topic.name, known),
        validate_only=validate_only,
    )


def _refusal(topic: str, known: Known, *, validate_only: bool) -> Message | None:
    if known.is_state_topic(topic):
        return Message(name=topic, error_code=DENIED, error_message=denied_message(known))
    if validate_only:
        return None
    if known.policy(topic) is None:
        text = "partition-count checks of the topic are not known at the moment (try again)"
        return Message(name=topic, error_code=Error.REQUEST_TIMED_OUT, error_message=text)
    return None


def _in_progress(topic: str, known: Known) -> Message | None:
    pending = known.history(topic).pending
    if pending is None:
        return None
    text = f"{IN_PROGRESS} topic={topic} from={pending.from_count} to={pending.to_count}: it continues automatically"
    return Message(name=topic, error_code=Error.INVALID_PARTITIONS, error_message=text)


def _expansions(first: Message | None, requests: list[ExpansionRequest], timeout_ms: int) -> Expansions:
    answered_first: list[Message] = []

    def requested(response: Message) -> tuple[ExpansionRequest, ...]:
        valid = {result.name for result in response.results if result.error_code == Error.NONE}
        return tuple(each for each in requests if each.topic in valid)

    def finish_first(response: Message) -> None:
        answered_first.extend(response.results)

    def report(response: Message, outcomes: Mapping[str, ExpansionOutcome]) -> None:
        for result in response.results:
            outcome = outcomes.get(result.name)
            if outcome is not None and result.error_code == Error.NONE:
                result.error_code = outcome.code
                result.error_message = outcome.message
        response.results += answered_first

    return Expansions(first, finish_first, requested, report, timeout_ms)
