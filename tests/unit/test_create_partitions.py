"""CreatePartitions of topics with partition-count checks, and how expansions are shown."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.errors import Error
from fencepost_proxy.expansion.history import (
    Expansion,
    encode_done,
    encode_expansion,
    encode_failed,
    encode_partition_count,
)
from fencepost_proxy.expansion.procedure import not_a_multiple
from fencepost_proxy.topics.planning import ExpansionOutcome, ExpansionRequest, Expansions, Known, Plan
from fencepost_proxy.topics.rewriting import plan_request
from fencepost_proxy.topics.state import StateView, TopicConfigChange
from fencepost_proxy.types import LeaderEpoch, LogEndOffset, NodeId, Offset
from fencepost_proxy.wire.apis import CREATE_PARTITIONS, DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS
from fencepost_proxy.wire.control import decode_request, encode_request
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.state_records import StateRecord

EXPANDS, SEQUENCED = UUID(int=1), UUID(int=2)
IDS = {"expands": EXPANDS, "also-expands": UUID(int=3), "unchecked": SEQUENCED}
PROCESS, END = UUID(int=50), UUID(int=60)
FIRST = Expansion("expands", EXPANDS, 2, 3, UUID(int=70), 1_000, process=PROCESS)
DONE = encode_done(
    FIRST, END, thresholds=[LogEndOffset(57), LogEndOffset(80)], epochs=[LeaderEpoch(0)] * 2, at_ms=2_000, blocked_ms=40
)


def known(*records: StateRecord, fresh: bool = True) -> Known:
    view = StateView("cluster-1")
    for offset, record in enumerate(records):
        assert view.apply(Offset(offset), *record) is None
    values = {"expands": "any", "also-expands": "any", "doubles": "true"}
    return Known(
        view,
        lambda topic: {"fencepost.ordered.partition.expansion": values.get(topic, "false")},
        IDS.get,
        "__state",
        UUID(int=9),
        fresh=fresh,
    )


def queried(*topics: Message, validate_only: bool = False, services: Known | None = None) -> Plan:
    request = Message(topics=list(topics), timeout_ms=5_000, validate_only=validate_only)
    plan = plan_request(CREATE_PARTITIONS, 3, request, services or known())
    assert plan is not None
    for sent in (plan.forward, plan.expansions.first if plan.expansions else None):
        if sent is not None:  # it can be written down
            decode_request(CREATE_PARTITIONS, 3, encode_request(CREATE_PARTITIONS, 3, sent))
    return plan


def expanding(*topics: Message, **more: Any) -> tuple[Plan, Expansions]:
    plan = queried(*topics, **more)
    assert plan.expansions is not None
    return plan, plan.expansions


def topic(name: str, count: int = 3, assignments: list[Message] | None = None) -> Message:
    return Message(name=name, count=count, assignments=assignments)


def names(request: Message | None) -> list[str]:
    return [] if request is None else [each.name for each in request.topics]


def answered(*names: str, code: int = 0) -> Message:
    return Message(throttle_time_ms=0, results=[Message(name=name, error_code=code) for name in names])


# --- what goes to Kafka -----------------------------------------------------------------------------------------------


def test_kafka_only_validates_an_ordered_expansion() -> None:
    replicas = [Message(broker_ids=[1, 2])]
    plan, expanded_topics = expanding(topic("expands", 3, replicas))

    assert plan.forward.validate_only
    assert names(plan.forward) == ["expands"]
    assert expanded_topics.first is None
    assert expanded_topics.timeout_ms == 5_000
    response = answered("expands")
    assert plan.finish(response) == []
    assert expanded_topics.requested(response) == (
        ExpansionRequest("expands", 3, ((NodeId(1), NodeId(2)),), ordered=True),
    )
    expanded_topics.report(response, {"expands": ExpansionOutcome("expands", 44, "EXPANSION_FAILED")})
    [result] = response.results
    assert (result.error_code, result.error_message) == (44, "EXPANSION_FAILED")


def test_kafkas_validation_error_is_relayed_without_expansion() -> None:
    _, expanded_topics = expanding(topic("expands", 1))
    response = answered("expands", code=Error.INVALID_PARTITIONS)
    assert expanded_topics.requested(response) == ()
    expanded_topics.report(response, {})
    assert [each.error_code for each in response.results] == [Error.INVALID_PARTITIONS]


def test_other_topics_are_forwarded_first_and_responses_merged() -> None:
    plan, expanded_topics = expanding(topic("unchecked"), topic("expands"), topic("also-expands", 5))
    assert expanded_topics.first is not None

    assert (names(expanded_topics.first), expanded_topics.first.validate_only) == (["unchecked"], False)
    assert (names(plan.forward), plan.forward.validate_only) == (["expands", "also-expands"], True)

    expanded_topics.finish_first(answered("unchecked", code=Error.INVALID_PARTITIONS))
    response = answered("expands", "also-expands")
    plan.finish(response)
    assert [each.topic for each in expanded_topics.requested(response)] == ["expands", "also-expands"]
    expanded_topics.report(response, {"expands": ExpansionOutcome("expands", 0, None)})
    assert {each.name: each.error_code for each in response.results} == {
        "expands": 0,
        "also-expands": 0,
        "unchecked": Error.INVALID_PARTITIONS,
    }


@pytest.mark.parametrize(
    ("requested", "validate_only"), [(["unchecked"], False), (["expands"], True), (["unchecked", "expands"], True)]
)
def test_unchecked_or_validate_only_requests_are_forwarded(requested: list[str], validate_only: bool) -> None:
    plan = queried(*map(topic, requested), validate_only=validate_only)
    assert plan.expansions is None
    assert names(plan.forward) == requested
    assert plan.forward.validate_only is validate_only


@pytest.mark.parametrize("validate_only", [False, True])
def test_multiples_only_topic_is_validated_by_the_proxy(validate_only: bool) -> None:
    plan, expanded_topics = expanding(topic("unchecked"), topic("doubles"), validate_only=validate_only)
    assert expanded_topics.first is not None
    assert (names(expanded_topics.first), expanded_topics.first.validate_only) == (["unchecked"], validate_only)
    assert (names(plan.forward), plan.forward.validate_only) == (["doubles"], True)
    [request] = expanded_topics.requested(answered("doubles"))
    assert (request.multiples_only, request.validate_only) == (True, validate_only)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 7), (2, 4), (2, 8), (3, 9)])
def test_by_multiples_keys_move_to_new_partitions_only(before: int, after: int) -> None:
    assert not_a_multiple("t", before, after) is None
    assert all(key % after == key % before or key % after >= before for key in range(before * after))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 8), (4, 6)])
def test_else_keys_move_between_old_partitions(before: int, after: int) -> None:
    text = not_a_multiple("t", before, after)
    assert text is not None
    assert text.startswith(f"EXPANSION_NOT_A_MULTIPLE topic=t from={before} to={after}: ")
    assert any(key % after != key % before and key % after < before for key in range(before * after))


# --- what is not let through ------------------------------------------------------------------------------------------


def test_pending_expansion_refuses_any_other() -> None:
    plan, pending = expanding(topic("expands", 8), topic("unchecked"), services=known(encode_expansion(FIRST)))

    assert names(pending.first) == ["unchecked"]
    assert (names(plan.forward), plan.forward.validate_only) == (["expands"], True), (
        "Kafka decides whether this client may know"
    )
    for stated in (Error.NONE, Error.INVALID_PARTITIONS):
        response = answered("expands", code=stated)
        plan.finish(response)
        assert pending.requested(response) == ()
        (refused,) = response.results
        assert (refused.name, refused.error_code) == ("expands", Error.INVALID_PARTITIONS)
        assert refused.error_message == "EXPANSION_IN_PROGRESS topic=expands from=2 to=3: it continues automatically"


def test_pending_expansion_is_hidden_from_unauthorized_clients() -> None:
    plan = queried(topic("expands", 8), services=known(encode_expansion(FIRST)))
    for stated in (Error.TOPIC_AUTHORIZATION_FAILED, Error.UNKNOWN_TOPIC_OR_PARTITION):
        response = answered("expands", code=stated)
        plan.finish(response)
        assert [(each.name, each.error_code) for each in response.results] == [("expands", stated)]
        assert not hasattr(response.results[0], "error_message"), "Kafka's own words stay"


def test_request_is_retriable_while_checks_are_unknown() -> None:
    plan = queried(topic("unchecked"), services=known(fresh=False))
    assert names(plan.forward) == []
    response = answered()
    plan.finish(response)
    assert [each.error_code for each in response.results] == [Error.REQUEST_TIMED_OUT]


# --- how expansions are shown -----------------------------------------------------------------------------------------


def described(topic: str, services: Known, keys: list[str] | None = None) -> dict[str, Message]:
    resource = Message(resource_type=2, resource_name=topic, configuration_keys=keys)
    request = Message(resources=[resource], include_synonyms=True, include_documentation=True)
    plan = plan_request(DESCRIBE_CONFIGS, 4, request, services)
    assert plan is not None
    result = Message(error_code=0, error_message=None, resource_type=2, resource_name=topic, configs=[])
    response = Message(throttle_time_ms=0, results=[result])
    plan.finish(response)
    return {each.name: each for each in response.results[0].configs}


def test_thresholds_are_a_read_only_config() -> None:
    services = known(encode_expansion(FIRST), DONE)
    shown = described("expands", services)["fencepost.ordered.partition.expansions"]

    assert shown.read_only
    assert json.loads(shown.value) == [
        {"from": 2, "to": 3, "thresholds": [57, 80], "at_ms": 2000, "unordered": False, "multiple": False}
    ]
    assert "thresholds" in shown.documentation
    config = Message(name="fencepost.ordered.partition.expansions", config_operation=0, value="[]")
    resource = Message(resource_type=2, resource_name="expands", configs=[config])
    plan = plan_request(INCREMENTAL_ALTER_CONFIGS, 1, Message(resources=[resource], validate_only=False), services)
    assert plan is not None
    response = Message(throttle_time_ms=0, responses=[])
    plan.finish(response)
    assert [each.error_code for each in response.responses] == [Error.INVALID_CONFIG]
    assert "read-only" in response.responses[0].error_message


def test_expansions_are_shown_when_possible_or_requested() -> None:
    name = "fencepost.ordered.partition.expansions"
    assert described("expands", known())[name].value == "[]"
    assert name not in described("unchecked", known())
    assert described("unchecked", known(), [name])[name].value == "[]"
    assert name not in described("expands", known(), ["retention.ms"])


# --- the records ------------------------------------------------------------------------------------------------------


def test_initial_count_holds_until_the_topic_expands() -> None:
    services = known(encode_partition_count("expands", EXPANDS, 2))
    assert services.history("expands").count == 2
    services = known(encode_partition_count("expands", EXPANDS, 2), encode_expansion(FIRST), DONE)
    history = services.history("expands")
    assert history.count == 3
    assert history.created_by(2) == history.expansions[0]
    assert history.created_by(1) is None


def test_expansion_end_applies_once_to_pending_expansion() -> None:
    other = replace(FIRST, proposal=UUID(int=71), to_count=8)
    failed = encode_failed(FIRST, UUID(int=61), reason="too late", at_ms=3_000)
    history = known(encode_expansion(FIRST), encode_expansion(other), DONE, failed).history("expands")
    assert history.count == 3
    assert not history.failed
    assert history.pending is None, "what was proposed while another was pending never comes to be"


def test_pending_expansion_is_shown_without_thresholds() -> None:
    later = replace(FIRST, from_count=3, to_count=6, proposal=UUID(int=77))
    shown = json.loads(known(encode_expansion(FIRST), DONE, encode_expansion(later)).history("expands").described())
    assert [(each["from"], each["to"], each.get("pending", False)) for each in shown] == [(2, 3, False), (3, 6, True)]
    assert shown[0]["thresholds"] is not None
    assert (shown[1]["thresholds"], shown[1]["at_ms"]) == (None, None)


def test_expansion_may_follow_failure_unless_it_is_outdated() -> None:
    failed = encode_failed(FIRST, END, reason="a transaction is open", at_ms=2_000)
    again = replace(FIRST, proposal=UUID(int=72))
    history = known(encode_expansion(FIRST), failed, encode_expansion(again)).history("expands")
    assert history.pending == again
    assert history.failed == {FIRST.proposal: "a transaction is open"}
    outdated = replace(FIRST, proposal=UUID(int=73), to_count=5)
    history = known(encode_expansion(FIRST), DONE, encode_expansion(outdated)).history("expands")
    assert history.pending is None
    assert history.count == 3


def test_expansion_outside_the_proxy_is_recorded_once() -> None:
    unordered = Expansion("expands", EXPANDS, 2, 5, UUID(int=74), 1_000, unordered=True)
    twice = replace(unordered, proposal=UUID(int=75))
    history = known(encode_expansion(unordered), encode_expansion(twice)).history("expands")
    assert [(each.from_count, each.to_count, each.unordered) for each in history.expansions] == [(2, 5, True)]
    assert history.ordered == ()
    assert json.loads(history.described())[0]["thresholds"] == []


def test_deleting_a_topic_removes_its_expansion_records() -> None:
    loser = replace(FIRST, proposal=UUID(int=76))
    records = [encode_partition_count("expands", EXPANDS, 2), encode_expansion(FIRST), encode_expansion(loser), DONE]
    services = known(*records)
    tombstones = services.view.records_of([TopicConfigChange("expands", EXPANDS, deleted=True)])
    assert {each.key for each in tombstones} == {each.key for each in records}
    assert all(each.value is None for each in tombstones)
    assert known(*records, *tombstones).history("expands").expansions == ()


def test_expanding_topic_stays_checked_when_switched_off() -> None:
    pending = Expansion("unchecked", SEQUENCED, 1, 2, UUID(int=77), 1_000, process=PROCESS)
    assert known(encode_expansion(pending)).is_count_checked("unchecked")
    assert not known().is_count_checked("unchecked")
