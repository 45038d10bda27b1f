"""Plans of admin requests: what Kafka gets, what the client gets, what is stored. Messages pass the codec both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

import pytest

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.topics.closed import hide, mentions
from fencepost_proxy.topics.planning import Joins, Known, Plan
from fencepost_proxy.topics.rewriting import plan_request
from fencepost_proxy.topics.state import StateView, TopicConfigChange, encode_topic_config
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS
from fencepost_proxy.types import MARKER, NO_TOPIC_ID, Offset, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.apis import APIS, Handling
from fencepost_proxy.wire.control import (
    decode_request,
    decode_response,
    encode_request,
    encode_request_frame,
    encode_response,
    parse_request_header,
)
from fencepost_proxy.wire.schema import Message

CHECK, SOURCE = "fencepost.check.expected.offsets", "fencepost.expected.offsets.source"
#: Known only to a newer version.
FUTURE = "fencepost.future"
#: What a topic has where nothing is set: name, value, source.
DEFAULTS = [(each.name, each.default, 5) for each in VIRTUAL_CONFIGS.values()]
ORDERS, PAYMENTS, STATE = UUID(int=0xA1), UUID(int=0xA2), UUID("5e0dba5e-c0de-4f11-9a3e-7c29e9d5f00d")
STATE_TOPIC = "__fencepost_state"
TOPIC, BROKER = 2, 4
SET, DELETE, APPEND, SUBTRACT = range(4)


@dataclass
class World:
    """One proxy's knowledge; a request and Kafka's answer pass through it."""

    stored: Mapping[str, str] = field(default_factory=dict)
    file: Mapping[str, str] = field(default_factory=dict)
    forwarded: Message = field(default_factory=Message)
    changes: list[TopicConfigChange] = field(default_factory=list)

    def known(self) -> Known:
        view = StateView("cluster-1")
        if self.stored:
            view.apply(Offset(0), *encode_topic_config("orders", ORDERS, self.stored))
        ids = {"orders": ORDERS, "payments": PAYMENTS}
        return Known(view, lambda topic: self.file if topic == "orders" else {}, ids.get, STATE_TOPIC, STATE)

    def rewriter(self, api_key: int, version: int, request: Message, answer: Message) -> Message:
        sent = decode_request(api_key, version, encode_request(api_key, version, request))
        plan = plan_request(api_key, version, sent, self.known())
        assert plan is not None
        self.forwarded = decode_request(api_key, version, encode_request(api_key, version, plan.forward))
        response = decode_response(api_key, version, encode_response(api_key, version, answer))
        self.changes = plan.finish(response)
        return decode_response(api_key, version, encode_response(api_key, version, response))

    def create(self, *topics: Message, answers: Sequence[Message] = (), version: int = 7, **more: object) -> Message:
        return self.rewriter(
            apis.CREATE_TOPICS,
            version,
            Message(topics=list(topics), timeout_ms=1, **more),
            Message(topics=list(answers)),
        )

    def alter(
        self, api_key: int, *resources: Message, answers: Sequence[Message] = (), version: int = 1, **more: object
    ) -> Message:
        request = Message(resources=list(resources), **more)
        return self.rewriter(api_key, version, request, Message(responses=list(answers)))

    def describe(self, *results: Message, version: int = 4, keys: Sequence[str] | None = None, **more: bool) -> Message:
        """The resources that Kafka answers with."""
        resources = [
            Message(resource_type=each.resource_type, resource_name=each.resource_name, configuration_keys=keys)
            for each in results
        ]
        return self.rewriter(
            apis.DESCRIBE_CONFIGS, version, Message(resources=resources, **more), Message(results=results)
        )

    def delete(self, *topics: Message, answers: Sequence[Message], version: int = 6, **more: object) -> None:
        request = Message(topics=list(topics), **more)
        self.rewriter(apis.DELETE_TOPICS, version, request, Message(responses=list(answers)))


def config(name: str, value: str | None, **more: object) -> Message:
    return Message(name=name, value=value, **more)


def versions(api_key: int) -> range:
    return range(APIS[api_key].min_version, APIS[api_key].max_version + 1)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize("api_key", [apis.CREATE_TOPICS, apis.ALTER_CONFIGS, apis.INCREMENTAL_ALTER_CONFIGS])
def test_virtual_configs_of_internal_topics_are_refused(api_key: int) -> None:
    world, created, requested = World(), api_key == apis.CREATE_TOPICS, config(CHECK, "true")
    if created:
        (reported,) = world.create(creatable("__consumer_offsets", requested)).topics
    else:
        (reported,) = world.alter(api_key, resource("__consumer_offsets", requested)).responses
    assert (reported.error_code, world.changes) == (40, [])
    assert "__consumer_offsets is internal to Kafka" in reported.error_message
    assert not (world.forwarded.topics if created else world.forwarded.resources)


def names(messages: list[Message]) -> list[str]:
    return [message.name for message in messages]


# --- AddPartitionsToTxn -----------------------------------------------------------------------------------------------


def added(world: World, *names: str, fresh: bool = True, error: int = 0) -> tuple[Plan, dict[str, list[int]]]:
    """The plan, and the error codes for the client, where Kafka answers `error` for whatever it gets."""
    topics = [Message(name=name, partitions=[1, 2]) for name in names]
    queried = Message(v3_and_below_transactional_id="app", v3_and_below_producer_id=5, v3_and_below_topics=topics)
    request = decode_request(apis.ADD_PARTITIONS_TO_TXN, 3, encode_request(apis.ADD_PARTITIONS_TO_TXN, 3, queried))
    plan = plan_request(apis.ADD_PARTITIONS_TO_TXN, 3, request, replace(world.known(), fresh=fresh))
    assert plan is not None
    entries = [
        Message(
            name=topic.name,
            results_by_partition=[Message(partition_index=p, partition_error_code=error) for p in topic.partitions],
        )
        for topic in plan.forward.v3_and_below_topics
    ]
    answer = Message(results_by_topic_v3_and_below=entries)
    plan.finish(answer)
    reported = answer.results_by_topic_v3_and_below
    return plan, {topic.name: [each.partition_error_code for each in topic.results_by_partition] for topic in reported}


def test_transaction_cannot_add_required_topic_partitions() -> None:
    plan, reported = added(World({CHECK: "required"}), "orders", "payments", error=49)
    assert plan.forward.v3_and_below_producer_id == -1, "Kafka adds nothing"
    assert reported == {"orders": [44, 44], "payments": [55, 55]}
    assert plan.joins is None


@pytest.mark.parametrize("error", [3, 29, 53, 55])
def test_unauthorized_transaction_learns_no_check(error: int) -> None:
    _, reported = added(World({CHECK: "required"}), "orders", "payments", error=error)
    assert reported == {"orders": [error] * 2, "payments": [error] * 2}


def test_joining_transaction_is_reported_to_true_topics_sequencers() -> None:
    plan, reported = added(World({"fencepost.check.expected.offsets": "true"}), "orders", "payments")
    assert reported == {"orders": [0, 0], "payments": [0, 0]}
    assert plan.joins == Joins("app", (TopicPartition("orders", 1), TopicPartition("orders", 2)))


def test_transaction_is_retriable_while_checks_are_unknown() -> None:
    plan, reported = added(World(), "orders", fresh=False, error=49)
    assert plan.forward.v3_and_below_producer_id == -1
    assert reported == {"orders": [51, 51]}


# --- WriteTxnMarkers --------------------------------------------------------------------------------------------------

SHARED = 77


def marked(
    world: World, *markers: tuple[int, str], fresh: bool = True, error: int = 0
) -> tuple[Plan, list[tuple[int, str, list[int]]]]:
    """The plan, and the errors of partitions 1 and 2 of each producer's topic, where Kafka answers `error`."""
    queried = Message(
        markers=[
            Message(producer_id=producer_id, topics=[Message(name=topic, partition_indexes=[1, 2])])
            for producer_id, topic in markers
        ]
    )
    request = decode_request(apis.WRITE_TXN_MARKERS, 1, encode_request(apis.WRITE_TXN_MARKERS, 1, queried))
    known = replace(world.known(), fresh=fresh, shared_producer_ids=frozenset({SHARED}))
    plan = plan_request(apis.WRITE_TXN_MARKERS, 1, request, known)
    assert plan is not None
    sent = decode_request(apis.WRITE_TXN_MARKERS, 1, encode_request(apis.WRITE_TXN_MARKERS, 1, plan.forward))
    answer = Message(
        markers=[
            Message(
                producer_id=marker.producer_id,
                topics=[
                    Message(
                        name=topic.name,
                        partitions=[Message(partition_index=p, error_code=error) for p in topic.partition_indexes],
                    )
                    for topic in marker.topics
                ],
            )
            for marker in sent.markers
            if marker.topics
        ]
    )
    plan.finish(answer)
    return plan, written(answer)


def written(answer: Message) -> list[tuple[int, str, list[int]]]:
    reported = decode_response(apis.WRITE_TXN_MARKERS, 1, encode_response(apis.WRITE_TXN_MARKERS, 1, answer))
    return [
        (marker.producer_id, topic.name, [each.error_code for each in topic.partitions])
        for marker in reported.markers
        for topic in marker.topics
    ]


@pytest.mark.parametrize("check", ["true", "required"])
def test_marker_waits_for_checked_topics_appends(check: str) -> None:
    plan, reported = marked(World({CHECK: check}), (5, "orders"), (6, "payments"))
    assert reported == [(5, "orders", [0, 0]), (6, "payments", [0, 0])]
    assert plan.joins == Joins(MARKER, (TopicPartition("orders", 1), TopicPartition("orders", 2)))
    assert plan.later is not None
    assert written(plan.later) == [(5, "orders", [6, 6]), (6, "payments", [6, 6])]


@pytest.mark.parametrize(("error", "reported"), [(3, 44), (31, 31)])
def test_marker_of_shared_producer_id_is_refused_to_administrators(error: int, reported: int) -> None:
    """Others get Kafka's error, and do not learn the producer id."""
    plan, codes = marked(World({CHECK: "required"}), (SHARED, "orders"), error=error)
    sent = [topic.partition_indexes for marker in plan.forward.markers for topic in marker.topics]
    assert sent == [[0x7FFFFFFF]], "there is no such partition"
    assert codes == [(SHARED, "orders", [reported] * 2)]
    assert plan.joins is None


def test_other_markers_of_a_partly_refused_request_are_written() -> None:
    plan, reported = marked(World({CHECK: "required"}), (SHARED, "orders"), (5, "payments"))
    assert [topic.partition_indexes for marker in plan.forward.markers for topic in marker.topics][1] == [1, 2]
    assert reported == [(SHARED, "orders", [44, 44]), (5, "payments", [0, 0])]


def test_marker_for_the_state_topic_is_denied_without_kafka() -> None:
    plan, reported = marked(World(), (5, STATE_TOPIC))
    assert [marker.topics for marker in plan.forward.markers] == [[]]
    assert reported == [(5, STATE_TOPIC, [29, 29])]


def test_marker_is_retriable_while_checks_are_unknown() -> None:
    plan, reported = marked(World(), (5, "orders"), fresh=False)
    assert reported == [(5, "orders", [6, 6])]
    assert plan.joins is None


# --- CreateTopics -----------------------------------------------------------------------------------------------------


def creatable(name: str, *configs: Message) -> Message:
    return Message(name=name, num_partitions=1, replication_factor=1, configs=list(configs))


@pytest.mark.parametrize("version", versions(apis.CREATE_TOPICS))
def test_created_topics_virtual_configs_are_stored_not_forwarded(version: int, world: World) -> None:
    alias = SOURCE.removeprefix("fencepost.")
    queried = creatable("orders", config("retention.ms", "1000"), config(CHECK, "TRUE"), config(alias, "base"))
    kafkas = Message(name="orders", topic_id=ORDERS, configs=[config("retention.ms", "1000", config_source=1)])

    others = Message(name="payments", topic_id=PAYMENTS, configs=[])
    answer = world.create(queried, creatable("payments"), answers=[kafkas, others], version=version)

    assert names(world.forwarded.topics) == ["orders", "payments"]
    assert names(world.forwarded.topics[0].configs) == ["retention.ms"]
    reported_id = ORDERS if version >= 7 else None
    assert world.changes == [TopicConfigChange("orders", reported_id, {CHECK: "true", SOURCE: "base"})]
    if version >= 5:
        shown = [(each.name, each.value, each.config_source) for each in answer.topics[0].configs]
        assert shown == [("retention.ms", "1000", 1), (CHECK, "true", 1), (SOURCE, "base", 1), *DEFAULTS[2:]]
        shown = [(each.name, each.value, each.config_source) for each in answer.topics[1].configs]
        assert shown == DEFAULTS


def test_created_topic_shows_checks_that_its_predecessor_leaves() -> None:
    """It was deleted directly at Kafka."""
    world = World(stored={CHECK: "required"})
    created = Message(name="orders", topic_id=PAYMENTS, configs=[])
    answer = world.create(creatable("orders", config(SOURCE, "base")), answers=[created])
    assert world.changes == [TopicConfigChange("orders", PAYMENTS, {SOURCE: "base"})]
    shown = [(each.name, each.value, each.config_source) for each in answer.topics[0].configs]
    assert shown == [(CHECK, "required", 1), (SOURCE, "base", 1), *DEFAULTS[2:]]


def test_file_configs_are_shown_at_creation_not_stored() -> None:
    world = World(file={CHECK: "required"})
    answer = world.create(creatable("orders"), answers=[Message(name="orders", topic_id=ORDERS, configs=[])])
    assert (answer.topics[0].configs[0].value, answer.topics[0].configs[0].config_source) == ("required", 4)
    assert world.changes == []


@pytest.mark.parametrize("version", versions(apis.CREATE_TOPICS))
@pytest.mark.parametrize("value", ["maybe", "", None])
def test_topic_with_invalid_virtual_config_is_not_created(version: int, value: str | None, world: World) -> None:
    wrong, right = creatable("orders", config(CHECK, value)), creatable("payments", config(CHECK, "true"))
    kafkas = Message(name="payments", topic_id=PAYMENTS, configs=None if version >= 5 else [])

    answer = world.create(wrong, right, answers=[kafkas], version=version)

    assert names(world.forwarded.topics) == ["payments"]
    reported = {each.name: (each.error_code, each.error_message) for each in answer.topics}
    assert reported["payments"][0] == 0
    assert reported["orders"][0] == 40
    if version >= 1:  # v0 has no messages
        assert f"{value!r} for configuration {CHECK}: it must be false, true or required" in reported["orders"][1]
    assert [change.topic for change in world.changes] == ["payments"]


def test_duplicate_topic_is_not_created_from_valid_entry(world: World) -> None:
    world.create(creatable("orders", config(CHECK, "maybe")), creatable("orders"))
    assert world.forwarded.topics == []


@pytest.mark.parametrize(
    ("answer", "validate_only"),
    [
        pytest.param(Message(name="orders", error_code=36, error_message="exists"), False, id="exists already"),
        pytest.param(Message(name="orders", error_code=29), False, id="not allowed"),
        pytest.param(Message(name="orders", configs=[]), True, id="validated only"),
    ],
)
def test_uncreated_topic_stores_no_configs(answer: Message, validate_only: bool, world: World) -> None:
    requested = creatable("orders", config(CHECK, "true"))
    reported = world.create(requested, answers=[answer], validate_only=validate_only)
    assert world.changes == []
    assert world.forwarded.validate_only is validate_only
    assert reported.topics[0].error_code == answer.__dict__.get("error_code", 0)


def test_virtual_configs_are_hidden_without_describe_permission() -> None:
    hidden = Message(name="orders", topic_id=ORDERS, topic_config_error_code=29, configs=[])
    reported = World().create(creatable("orders", config(CHECK, "true")), answers=[hidden])
    assert reported.topics[0].configs == []


# --- AlterConfigs and IncrementalAlterConfigs -------------------------------------------------------------------------


def resource(name: str, *configs: Message, kind: int = TOPIC) -> Message:
    return Message(resource_type=kind, resource_name=name, configs=list(configs))


def done(name: str, kind: int = TOPIC, error_code: int = 0) -> Message:
    return Message(resource_type=kind, resource_name=name, error_code=error_code, error_message=None)


def codes(answer: Message) -> dict[str, tuple[int, str | None]]:
    return {each.resource_name: (each.error_code, each.error_message) for each in answer.responses}


@pytest.mark.parametrize("name", [CHECK, CHECK.removeprefix("fencepost.")])
@pytest.mark.parametrize("version", versions(apis.INCREMENTAL_ALTER_CONFIGS))
def test_incremental_changes_are_taken_out_and_stored(version: int, name: str, world: World) -> None:
    ops = [
        config("retention.ms", "5", config_operation=SET),
        config(name, "Required", config_operation=SET),
        config(SOURCE, None, config_operation=DELETE),
    ]

    requested = resource("orders", *ops)
    answer = world.alter(apis.INCREMENTAL_ALTER_CONFIGS, requested, answers=[done("orders")], version=version)

    assert names(world.forwarded.resources[0].configs) == ["retention.ms"]
    assert world.changes == [TopicConfigChange("orders", None, {CHECK: "required"}, frozenset({SOURCE}))]
    assert codes(answer) == {"orders": (0, None)}


@pytest.mark.parametrize("api_key", [apis.ALTER_CONFIGS, apis.INCREMENTAL_ALTER_CONFIGS])
def test_virtual_only_change_still_checks_kafka_authorization(api_key: int) -> None:
    for error_code, stored in ((0, 1), (29, 0), (3, 0)):
        world = World()
        requested, kafkas = resource("orders", config(CHECK, "true")), done("orders", error_code=error_code)
        answer = world.alter(api_key, requested, answers=[kafkas], version=0)
        assert names(world.forwarded.resources[0].configs) == []
        assert world.forwarded.resources[0].resource_name == "orders"
        assert codes(answer) == {"orders": (error_code, None)}
        assert len(world.changes) == stored


@pytest.mark.parametrize("api_key", [apis.ALTER_CONFIGS, apis.INCREMENTAL_ALTER_CONFIGS])
@pytest.mark.parametrize(
    ("configs", "code", "part"),
    [
        ([config("retention.ms", "5"), config(CHECK, "perhaps")], 40, "must be false, true or required"),
        ([config(CHECK, "true"), config(CHECK, "false")], 42, "duplicate config keys"),
        ([config(CHECK, None)], 42, f"Null value not supported for : {CHECK}"),
    ],
)
def test_invalid_change_blocks_its_topic_only(
    api_key: int, configs: list[Message], code: int, part: str, world: World
) -> None:
    wrong, right = resource("orders", *configs), resource("payments", config(CHECK, "true"))

    answer = world.alter(api_key, wrong, right, answers=[done("payments")])

    assert [each.resource_name for each in world.forwarded.resources] == ["payments"]
    assert codes(answer)["payments"] == (0, None)
    assert codes(answer)["orders"][0] == code
    assert part in (codes(answer)["orders"][1] or "")
    assert [change.topic for change in world.changes] == ["payments"]


@pytest.mark.parametrize(("operation", "called"), [(APPEND, "APPEND"), (SUBTRACT, "SUBTRACT"), (9, "operation 9")])
def test_no_virtual_config_is_a_list(operation: int, called: str) -> None:
    requested = resource("orders", config(CHECK, "true", config_operation=operation))
    answer = World().alter(apis.INCREMENTAL_ALTER_CONFIGS, requested)
    assert codes(answer)["orders"] == (40, f"Can't {called} to key {CHECK} because its type is not LIST.")


@pytest.mark.parametrize("api_key", [apis.ALTER_CONFIGS, apis.INCREMENTAL_ALTER_CONFIGS])
def test_validate_only_reports_errors_and_stores_nothing(api_key: int, world: World) -> None:
    right, wrong = resource("orders", config(CHECK, "true")), resource("payments", config(CHECK, "no way"))
    answer = world.alter(api_key, right, wrong, answers=[done("orders")], validate_only=True)
    assert world.forwarded.validate_only is True
    assert {name: code for name, (code, _) in codes(answer).items()} == {"orders": 0, "payments": 40}
    assert world.changes == []


def test_legacy_call_changes_only_virtual_configs_that_it_names() -> None:
    """Its clients list the Kafka configs that a topic is to have."""
    world = World(stored={CHECK: "required", SOURCE: "base"})

    def changes(topic: str, *configs: Message) -> list[TopicConfigChange]:
        world.alter(apis.ALTER_CONFIGS, resource(topic, *configs), answers=[done(topic)], version=2)
        return world.changes

    assert changes("orders", config("retention.ms", "5")) == []
    assert changes("orders") == []
    assert changes("orders", config(SOURCE, "header")) == [TopicConfigChange("orders", None, {SOURCE: "header"})]


@pytest.mark.parametrize("stored", [f"!{FUTURE}", FUTURE])
def test_config_of_a_newer_version_can_only_be_deleted(stored: str) -> None:
    world = World(stored={stored: "on", CHECK: "true"})

    def alter(api_key: int, value: str | None, **more: int) -> tuple[int, str | None]:
        requested = resource("orders", config(FUTURE, value, **more))
        return codes(world.alter(api_key, requested, answers=[done("orders")]))["orders"]

    for api_key in (apis.ALTER_CONFIGS, apis.INCREMENTAL_ALTER_CONFIGS):
        code, message = alter(api_key, "on")
        assert (code, world.forwarded.resources, world.changes) == (40, [], [])
        assert f"This proxy does not know {FUTURE}" in (message or "")
    assert alter(apis.INCREMENTAL_ALTER_CONFIGS, None, config_operation=DELETE) == (0, None)
    assert names(world.forwarded.resources[0].configs) == []
    assert world.changes == [TopicConfigChange("orders", None, {}, frozenset({stored}))]


@pytest.mark.parametrize("api_key", [apis.ALTER_CONFIGS, apis.INCREMENTAL_ALTER_CONFIGS])
def test_configs_of_brokers_are_none_of_ours(api_key: int, world: World) -> None:
    world.alter(api_key, resource("1", config(CHECK, "true"), kind=BROKER), answers=[done("1", kind=BROKER)])
    assert names(world.forwarded.resources[0].configs) == [CHECK]
    assert world.changes == []


# --- DescribeConfigs --------------------------------------------------------------------------------------------------


def described(name: str, *configs: Message, kind: int = TOPIC, error_code: int = 0) -> Message:
    return Message(resource_type=kind, resource_name=name, configs=list(configs), error_code=error_code)


RETENTION = config("retention.ms", "1000", config_source=5)


@pytest.mark.parametrize("version", versions(apis.DESCRIBE_CONFIGS))
@pytest.mark.parametrize(
    ("stored", "file", "value", "source"),
    [({}, {}, "false", 5), ({}, {CHECK: "Required"}, "required", 4), ({CHECK: "true"}, {CHECK: "required"}, "true", 1)],
)
def test_virtual_configs_are_shown_with_their_source(
    version: int, stored: Mapping[str, str], file: Mapping[str, str], value: str, source: int
) -> None:
    world = World(stored=stored, file=file)
    answer = world.describe(described("orders", RETENTION), version=version)
    shown = {each.name: each for each in answer.results[0].configs}
    assert list(shown) == ["retention.ms", *VIRTUAL_CONFIGS]
    assert shown[CHECK].value == value
    if version == 0:
        assert shown[CHECK].is_default
    else:
        # Tools that copy overrides do not request synonyms.
        assert shown[CHECK].config_source == (4 if source == 1 else source)
        answer = world.describe(described("orders"), version=version, include_synonyms=True)
        assert {each.name: each for each in answer.results[0].configs}[CHECK].config_source == source
    assert (shown[CHECK].read_only, shown[CHECK].is_sensitive) == (False, False)
    assert shown[CHECK].synonyms == []
    assert shown[CHECK].config_type == (2 if version >= 3 else 0)
    assert shown["fencepost.max.record.age.ms"].config_type == (5 if version >= 3 else 0)
    assert not shown[CHECK].documentation


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (None, list(VIRTUAL_CONFIGS)),
        ([], list(VIRTUAL_CONFIGS)),
        ([CHECK], [CHECK]),
        ([SOURCE, "retention.ms"], [SOURCE]),
        (["check.expected.offsets"], ["check.expected.offsets"]),
        ([CHECK, CHECK], [CHECK]),
        (["retention.ms"], []),
    ],
)
def test_only_requested_configs_are_shown(keys: list[str] | None, shown: list[str], world: World) -> None:
    answer = world.describe(described("orders"), keys=keys)
    assert names(answer.results[0].configs) == shown
    # An empty list would query everything: the virtual names stay in it, and match nothing at Kafka.
    assert world.forwarded.resources[0].configuration_keys == keys


def test_config_of_a_newer_version_is_shown() -> None:
    world = World(stored={f"!{FUTURE}": "on"})
    for keys in (None, [FUTURE]):
        answer = world.describe(described("orders"), keys=keys, include_synonyms=True, include_documentation=True)
        shown = answer.results[0].configs[-1]
        assert (shown.name, shown.value, shown.config_source, shown.read_only) == (FUTURE, "on", 1, True)
        assert "a newer version set it" in shown.documentation
    assert names(world.describe(described("payments")).results[0].configs) == list(VIRTUAL_CONFIGS)


def test_requested_synonyms_and_documentation_are_returned() -> None:
    answer = World(stored={CHECK: "true"}, file={CHECK: "required"}).describe(
        described("orders"), keys=[CHECK], include_synonyms=True, include_documentation=True
    )

    shown = answer.results[0].configs[0]
    assert [(each.name, each.value, each.source) for each in shown.synonyms] == [
        (CHECK, "true", 1),
        (CHECK, "required", 4),
        (CHECK, "false", 5),
    ]
    assert "KIP-27" in shown.documentation


def test_errors_and_other_resources_are_left_alone() -> None:
    answer = World().describe(described("absent", error_code=3), described("1", RETENTION, kind=BROKER))
    assert [(each.error_code, names(each.configs)) for each in answer.results] == [(3, []), (0, ["retention.ms"])]


# --- DeleteTopics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", versions(apis.DELETE_TOPICS))
def test_what_was_deleted_is_known_by_its_id(version: int, world: World) -> None:
    topics = [Message(name="orders"), Message(name="payments")]
    deleted = Message(name="orders", topic_id=ORDERS if version >= 6 else NO_TOPIC_ID)
    denied = Message(name="payments", error_code=29)
    by_name = [] if version >= 6 else names(topics)
    world.delete(*topics, answers=[deleted, denied], version=version, topic_names=by_name)
    assert world.changes == [TopicConfigChange("orders", ORDERS, deleted=True)]


def test_deleting_a_replaced_topic_ends_its_inheritance() -> None:
    world = World(stored={CHECK: "true"})
    world.delete(Message(name=None, topic_id=PAYMENTS), answers=[Message(name="orders", topic_id=PAYMENTS)])
    assert world.changes == [TopicConfigChange("orders", PAYMENTS, deleted=True, inherited_from=ORDERS)]


def test_a_topic_deleted_by_its_id(world: World) -> None:
    by_id = Message(name=None, topic_id=ORDERS)
    world.delete(by_id, answers=[by_id])
    assert world.forwarded.topics[0].topic_id == ORDERS
    assert world.changes == [TopicConfigChange(None, ORDERS, deleted=True)]


# --- the state topic --------------------------------------------------------------------------------------------------


def both(key: str, **fields: object) -> list[Message]:
    """An entry of `orders` and one of the state topic; `key` is the field of the name."""
    return [Message(**{key: name}, **fields) for name in ("orders", STATE_TOPIC)]


def of_partitions(key: str) -> tuple[Message, Message]:
    """Topics with partitions; `key` is the field of the number."""
    name = "topic" if key == "partition" else "name"
    answered = [Message(**{name: "orders"}, partitions=[Message(**{key: 0})])]
    return Message(topics=both(name, partitions=[Message(**{key: 0})])), Message(topics=answered)


def fetch(*topics: Mapping[str, object]) -> tuple[Message, Message]:
    requested = [Message(**each, partitions=[Message(partition=1)]) for each in topics]
    return Message(topics=requested), Message(responses=[Message(**topics[0], partitions=[Message(partition_index=1)])])


RESOURCES = [resource("orders"), resource(STATE_TOPIC, config("retention.ms", "1"))]
ON_ORDERS = Message(name="orders", partitions=[Message(partition_index=1)])


def shared() -> tuple[Message, Message]:
    topics = [Message(topic_id=each, partitions=[Message(partition_index=1)]) for each in (ORDERS, STATE)]
    return Message(group_id="g", member_id="m", topics=topics), Message(responses=topics[:1])


CLOSED = [
    (
        apis.CREATE_TOPICS,
        7,
        Message(topics=[creatable("orders"), creatable(STATE_TOPIC)]),
        Message(topics=[Message(name="orders", configs=[])]),
    ),
    (apis.DELETE_TOPICS, 5, Message(topic_names=["orders", STATE_TOPIC]), Message(responses=[Message(name="orders")])),
    (
        apis.DELETE_TOPICS,
        6,
        Message(topics=[Message(name="orders"), Message(name=None, topic_id=STATE)]),
        Message(responses=[Message(name="orders", topic_id=ORDERS)]),
    ),
    (
        apis.DESCRIBE_CONFIGS,
        4,
        Message(resources=both("resource_name", resource_type=TOPIC)),
        Message(results=[described("orders")]),
    ),
    (apis.ALTER_CONFIGS, 2, Message(resources=RESOURCES), Message(responses=[done("orders")])),
    (apis.INCREMENTAL_ALTER_CONFIGS, 1, Message(resources=RESOURCES), Message(responses=[done("orders")])),
    (apis.CREATE_PARTITIONS, 3, Message(topics=both("name", count=2)), Message(results=[Message(name="orders")])),
    (apis.DELETE_RECORDS, 2, *of_partitions("partition_index")),
    (
        apis.ADD_PARTITIONS_TO_TXN,
        3,
        Message(v3_and_below_topics=both("name", partitions=[1])),
        Message(
            results_by_topic_v3_and_below=[
                Message(name="orders", results_by_partition=[Message(partition_index=1, partition_error_code=49)])
            ]
        ),
    ),
    (
        apis.WRITE_TXN_MARKERS,
        1,
        Message(markers=[Message(producer_id=5, topics=both("name", partition_indexes=[1]))]),
        Message(markers=[Message(producer_id=5, topics=[ON_ORDERS])]),
    ),
    (apis.FETCH, 12, *fetch({"topic": "orders"}, {"topic": STATE_TOPIC})),
    (apis.FETCH, 13, *fetch({"topic_id": ORDERS}, {"topic_id": STATE})),
    *((api_key, version, *shared()) for api_key in (apis.SHARE_FETCH, apis.SHARE_ACKNOWLEDGE) for version in (1, 2)),
    (apis.LIST_OFFSETS, 5, *of_partitions("partition_index")),
    (apis.OFFSET_FOR_LEADER_EPOCH, 4, *of_partitions("partition")),
    (apis.DESCRIBE_PRODUCERS, 0, Message(topics=both("name", partition_indexes=[1])), Message(topics=[ON_ORDERS])),
]


def error_codes(message: object) -> list[int]:
    """All error codes in a response's lists, depth first."""
    found: list[int] = []
    if isinstance(message, list):
        for each in message:
            found += error_codes(each)
    elif isinstance(message, Message):
        for name, value in vars(message).items():
            if name in ("error_code", "partition_error_code"):
                found.append(value)
            elif isinstance(value, list):
                found += error_codes(value)
    return found


@pytest.mark.parametrize(("api_key", "version", "request_", "answer"), CLOSED)
def test_state_topic_is_refused_and_the_rest_served(
    api_key: int, version: int, request_: Message, answer: Message, world: World
) -> None:
    assert mentions(memoryview(encode_request(api_key, version, request_)), world.known())
    reported = world.rewriter(api_key, version, request_, answer)

    forwarded = encode_request(api_key, version, world.forwarded)
    assert not mentions(forwarded, world.known())
    assert error_codes(world.forwarded) == []
    # Kafka adds none of the partitions if one is refused.
    served = 55 if api_key == apis.ADD_PARTITIONS_TO_TXN else 0
    assert set(error_codes(reported)) == {0, served, 29}
    assert sum(code == 29 for code in error_codes(reported)) == 1
    assert mentions(encode_response(api_key, version, reported), world.known())
    assert {change.topic for change in world.changes} <= {"orders"}


def test_every_inspected_or_rewritten_api_is_covered() -> None:
    touching = {
        key for key, api in APIS.items() if api.handling & (Handling.INSPECT_REQUEST | Handling.REWRITE_REQUEST)
    }
    assert touching == {api_key for api_key, *_ in CLOSED} | {
        apis.METADATA,
        apis.DESCRIBE_TOPIC_PARTITIONS,
        apis.CONSUMER_GROUP_HEARTBEAT,
        apis.SHARE_GROUP_HEARTBEAT,
    }


def test_share_group_never_subscribes_to_the_state_topic() -> None:
    request = Message(group_id="g", member_id="m", subscribed_topic_names=["orders", STATE_TOPIC])
    rewriters = RequestRewriters(AddressBook(19092), World().known, frozenset, lambda nodes: None)
    frame = memoryview(encode_request_frame(apis.SHARE_GROUP_HEARTBEAT, 1, 5, "c", request))[4:]
    forward = rewriters.begin(apis.SHARE_GROUP_HEARTBEAT, 1, frame, "proxy").forward
    assert forward is not None
    body = forward[4 + parse_request_header(forward[4:]).body_offset :]
    assert decode_request(apis.SHARE_GROUP_HEARTBEAT, 1, body).subscribed_topic_names == ["orders"]


@pytest.mark.parametrize(
    ("api_key", "version"),
    [(apis.METADATA, v) for v in versions(apis.METADATA)] + [(apis.DESCRIBE_TOPIC_PARTITIONS, 0)],
)
@pytest.mark.parametrize("queried", [False, True])
def test_state_topic_is_unlisted_and_refused_by_name(api_key: int, version: int, queried: bool) -> None:
    def topic(name: str, topic_id: UUID) -> Message:
        return Message(name=name, topic_id=topic_id, partitions=[Message(leader_id=1), Message(leader_id=2)])

    answer = Message(topics=[topic("orders", ORDERS), topic(STATE_TOPIC, STATE)])
    response = decode_response(api_key, version, encode_response(api_key, version, answer))
    hide(response, World().known(), queried=queried)
    assert STATE not in [each.topic_id for each in response.topics]
    reported = decode_response(api_key, version, encode_response(api_key, version, response))
    entries = [(each.name, each.error_code, len(each.partitions)) for each in reported.topics]
    assert entries == [("orders", 0, 2)] + ([(STATE_TOPIC, 29, 0)] if queried else [])
