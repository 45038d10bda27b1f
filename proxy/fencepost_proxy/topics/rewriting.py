"""Virtual topic configs in admin requests: removed from the request, added to Kafka's response.

    plan = plan_request(api_key, version, request, known)
    send plan.forward upstream; get its response
    changes = plan.finish(response)          # completes the response in place
    store changes in the state topic; then send the response

*Authorization.* Changing a virtual config needs the right to alter the topic's configs. So a request always goes
upstream, on the client's own connection, even if it has only virtual configs. KRaft authorizes and looks up each
resource before its configs, even with an empty list (ControllerApis.handleIncrementalAlterConfigs and
handleLegacyAlterConfigs, then ConfigurationControlManager.validateAlterConfig). Nothing is stored unless Kafka
answered 0 for that resource, and `validate_only` stores nothing.

*All or nothing per resource*, as in Kafka: an invalid virtual config removes the whole resource from the request, so
its Kafka configs are not changed either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_policies.append_policy import InvalidConfigValue, Milliseconds
from fencepost_proxy.errors import Error
from fencepost_proxy.topics.closed import CLOSED_APIS, DENIED, denied_message, plan_closed
from fencepost_proxy.topics.create_partitions import plan_create_partitions
from fencepost_proxy.topics.planning import Known, Plan
from fencepost_proxy.topics.state import TopicConfigChange
from fencepost_proxy.topics.transactions import plan_add_partitions, plan_write_markers
from fencepost_proxy.topics.unknown_configs import UNKNOWN_CONFIG_DOCUMENTATION, shown_name
from fencepost_proxy.topics.virtual_configs import (
    INTERNAL_TOPICS,
    ORDERED_PARTITION_EXPANSIONS,
    ORDERED_PARTITION_EXPANSIONS_DOCUMENTATION,
    VIRTUAL_CONFIGS,
    canonical,
    parse_value,
)
from fencepost_proxy.types import NO_TOPIC_ID
from fencepost_proxy.wire.apis import (
    ADD_PARTITIONS_TO_TXN,
    ALTER_CONFIGS,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    WRITE_TXN_MARKERS,
)
from fencepost_proxy.wire.schema import Message

#: ConfigResource.Type
_TOPIC: Final = 2
#: AlterConfigOp.OpType
_SET: Final = 0
_DELETE: Final = 1
_LIST_OPERATIONS: Final = {2: "APPEND", 3: "SUBTRACT"}
#: DescribeConfigsResponse.ConfigSource
_TOPIC_CONFIG: Final = 1
_STATIC_BROKER_CONFIG: Final = 4
_DEFAULT_CONFIG: Final = 5
#: DescribeConfigsResponse.ConfigType
_STRING: Final = 2
_LONG: Final = 5


def plan_request(api_key: int, version: int, request: Message, known: Known) -> Plan | None:
    """The plan for a decoded request; None for an API without one. The request is changed in place."""
    if planner := _PLANNERS.get(api_key):
        return planner(version, request, known)
    return plan_closed(api_key, request, known) if api_key in CLOSED_APIS else None


class _Refused(Exception):
    """The proxy answers for a resource: Kafka does not get it."""

    def __init__(self, code: Error, message: str) -> None:
        super().__init__(message)
        self.code = code


# --- CreateTopics, DeleteTopics ---------------------------------------------------------------------------------------


def plan_create_topics(version: int, request: Message, known: Known) -> Plan:
    """Virtual configs are stored if Kafka creates the topic, and added to the response from v5 on."""
    pending: dict[str, dict[str, str]] = {}
    refused: dict[str, _Refused] = {}
    for topic in request.topics:
        try:
            if known.is_state_topic(topic.name):
                raise _Refused(DENIED, denied_message(known))
            _use_canonical_names(topic.configs)
            _no_read_only(topic.configs)
            ours = [config for config in topic.configs if config.name in VIRTUAL_CONFIGS]
            topic.configs = [config for config in topic.configs if config.name not in VIRTUAL_CONFIGS]
            pending[topic.name] = {config.name: _parse(config.name, config.value) for config in ours}
            _not_internal(topic.name, pending[topic.name])
        except _Refused as refusal:
            refused[topic.name] = refusal
    # By name: if a topic is in the request twice, Kafka would otherwise get one of them, and create it.
    request.topics = [topic for topic in request.topics if topic.name not in refused]

    def finish(response: Message) -> list[TopicConfigChange]:
        changes = []
        for topic in response.topics:
            configs = pending.get(topic.name, {})
            if topic.error_code != Error.NONE:
                continue
            if configs and not request.validate_only:
                changes.append(TopicConfigChange(topic.name, _known_id(topic.topic_id), configs))
            # Kafka shows a new topic's configs to clients that may describe them.
            if version >= 5 and topic.topic_config_error_code == Error.NONE and topic.configs is not None:
                # Others are inherited from a topic that was deleted directly in Kafka.
                inherited = known.view.configs_set_on(topic.name, _known_id(topic.topic_id))
                set_on_topic = {**inherited, **configs}
                levels = _levels(known.file_configs(topic.name), set_on_topic)
                topic.configs += [
                    Message(name=name, value=shown[0].value, config_source=shown[0].source)
                    for name, shown in levels.items()
                ]
        for name, refusal in refused.items():
            response.topics.append(Message(name=name, error_code=refusal.code, error_message=str(refusal), configs=[]))
        return changes

    return Plan(request, finish)


def plan_delete_topics(version: int, request: Message, known: Known) -> Plan:
    """A topic's records are deleted with it. The id of a topic deleted by name is looked up now, while it has one."""
    refused: list[Message] = []
    if version >= 6:
        named = [topic.name for topic in request.topics if topic.name is not None]
        refused = [topic for topic in request.topics if known.is_state_topic(topic.name, topic.topic_id)]
        request.topics = [topic for topic in request.topics if not known.is_state_topic(topic.name, topic.topic_id)]
    else:
        named = request.topic_names
        refused = [Message(name=name, topic_id=NO_TOPIC_ID) for name in named if known.is_state_topic(name)]
        request.topic_names = [name for name in named if not known.is_state_topic(name)]
    ids = {name: known.topic_id(name) for name in named}
    recorded = known.view.topic_configs.copy()  # in one step: the event loop may change them meanwhile

    def finish(response: Message) -> list[TopicConfigChange]:
        changes = [
            TopicConfigChange(
                topic.name,
                _known_id(topic.topic_id) or ids.get(topic.name),
                deleted=True,
                inherited_from=recorded[topic.name].topic_id if topic.name in recorded else None,
            )
            for topic in response.responses
            if topic.error_code == Error.NONE
        ]
        for topic in refused:
            response.responses.append(
                Message(
                    name=topic.name, topic_id=topic.topic_id, error_code=DENIED, error_message=denied_message(known)
                )
            )
        return changes

    return Plan(request, finish)


def _known_id(topic_id: UUID) -> UUID | None:
    """None if this version of the response has no id."""
    return None if topic_id == NO_TOPIC_ID else topic_id


# --- AlterConfigs, IncrementalAlterConfigs ----------------------------------------------------------------------------


def plan_alter_configs(_version: int, request: Message, known: Known) -> Plan:
    """The legacy request replaces all Kafka configs of a topic, and sets the virtual ones that it lists.

    It cannot reset those that it does not list: clients that only know this request (kafkajs, librdkafka's
    AlterConfigs) would switch checks off with any change of a Kafka config.
    """

    def alter(topic: str, ours: list[Message]) -> TopicConfigChange | None:
        _no_nulls(ours)
        assign = {config.name: _parse(config.name, config.value) for config in ours}
        return TopicConfigChange(topic, None, assign) if assign else None

    return _plan_alter(request, known, alter)


def plan_incremental_alter_configs(_version: int, request: Message, known: Known) -> Plan:
    """SET and DELETE. APPEND and SUBTRACT are for lists; no virtual config is one."""

    def alter(topic: str, ours: list[Message]) -> TopicConfigChange | None:
        _no_nulls([config for config in ours if config.config_operation != _DELETE])
        assign: dict[str, str] = {}
        unset: set[str] = set()
        for config in ours:
            if config.config_operation == _SET:
                assign[config.name] = _parse(config.name, config.value)
            elif config.config_operation == _DELETE:
                unset.add(config.name)
            else:
                what = _LIST_OPERATIONS.get(config.config_operation, f"operation {config.config_operation}")
                message = f"Can't {what} to key {config.name} because its type is not LIST."
                raise _Refused(Error.INVALID_CONFIG, message)
        return TopicConfigChange(topic, None, assign, frozenset(unset)) if ours else None

    return _plan_alter(request, known, alter)


def _plan_alter(
    request: Message, known: Known, alter: Callable[[str, list[Message]], TopicConfigChange | None]
) -> Plan:
    """Common part of both requests: `alter` returns a topic's change of virtual configs, or raises _Refused."""
    pending: dict[str, TopicConfigChange] = {}
    refused: dict[str, _Refused] = {}
    for resource in request.resources:
        if resource.resource_type != _TOPIC:
            continue
        topic = resource.resource_name
        try:
            if known.is_state_topic(topic):
                raise _Refused(DENIED, denied_message(known))
            virtual = VIRTUAL_CONFIGS.keys() | known.view.configs_set_on(topic, known.topic_id(topic)).keys()
            _use_canonical_names(resource.configs, virtual)
            _no_read_only(resource.configs)
            ours = [config for config in resource.configs if config.name in virtual]
            if len({config.name for config in ours}) != len(ours):
                raise _Refused(Error.INVALID_REQUEST, "Error due to duplicate config keys")
            resource.configs = [config for config in resource.configs if config.name not in virtual]
            if change := alter(topic, ours):
                _not_internal(topic, change.assign)
                pending[topic] = change
        except _Refused as refusal:
            refused[topic] = refusal
    # By name: Kafka refuses a resource that is in the request twice, and must not get only one of them.
    request.resources = [
        each for each in request.resources if each.resource_type != _TOPIC or each.resource_name not in refused
    ]

    def finish(response: Message) -> list[TopicConfigChange]:
        changes = [
            pending[each.resource_name]
            for each in response.responses
            if each.error_code == Error.NONE and each.resource_type == _TOPIC and each.resource_name in pending
        ]
        for topic, refusal in refused.items():
            response.responses.append(
                Message(resource_type=_TOPIC, resource_name=topic, error_code=refusal.code, error_message=str(refusal))
            )
        return [] if request.validate_only else changes

    return Plan(request, finish)


def _use_canonical_names(configs: list[Message], virtual: Set[str] = VIRTUAL_CONFIGS.keys()) -> None:
    """Those under which `virtual` has them."""
    stored = {shown_name(name): name for name in virtual}
    for config in configs:
        name = canonical(config.name)
        config.name = stored.get(name, name)


def _no_read_only(configs: list[Message]) -> None:
    if any(config.name == ORDERED_PARTITION_EXPANSIONS for config in configs):
        raise _Refused(
            Error.INVALID_CONFIG, f"{ORDERED_PARTITION_EXPANSIONS} is read-only: it lists the expansions of a topic"
        )


def _not_internal(topic: str, assign: Mapping[str, str]) -> None:
    if assign and topic in INTERNAL_TOPICS:
        raise _Refused(
            Error.INVALID_CONFIG, f"{topic} is internal to Kafka and is never checked: {', '.join(sorted(assign))}"
        )


def _no_nulls(configs: list[Message]) -> None:
    if nulls := [config.name for config in configs if config.value is None]:
        raise _Refused(Error.INVALID_REQUEST, f"Null value not supported for : {', '.join(nulls)}")


def _parse(name: str, value: str | None) -> str:
    if name not in VIRTUAL_CONFIGS:
        message = f"This proxy does not know {shown_name(name)}: a newer version set it. It can only delete it."
        raise _Refused(Error.INVALID_CONFIG, message)
    try:
        return parse_value(name, value)
    except InvalidConfigValue as error:
        raise _Refused(Error.INVALID_CONFIG, str(error)) from error


# --- DescribeConfigs --------------------------------------------------------------------------------------------------


class _Level(NamedTuple):
    """A value and its source; a *synonym* in DescribeConfigs."""

    value: str
    source: int


def plan_describe_configs(version: int, request: Message, known: Known) -> Plan:
    """Kafka's answer, with the virtual configs of topics added.

    The request is forwarded unchanged: names that Kafka does not know match nothing there
    (ConfigHelper.describeConfigs). So a request for virtual configs only returns none of Kafka's, while an empty list
    would return all.
    """

    def is_refused(each: Message) -> bool:
        return each.resource_type == _TOPIC and known.is_state_topic(each.resource_name)

    refused = [each for each in request.resources if is_refused(each)]
    request.resources = [each for each in request.resources if not is_refused(each)]
    requested = {
        each.resource_name: each.configuration_keys or None
        for each in request.resources
        if each.resource_type == _TOPIC
    }

    def finish(response: Message) -> list[TopicConfigChange]:
        for result in response.results:
            if result.resource_type != _TOPIC or result.error_code != Error.NONE:
                continue
            topic = result.resource_name
            keys = requested.get(topic)
            set_on_topic = known.view.configs_set_on(topic, known.topic_id(topic))
            levels = _levels(known.file_configs(topic), set_on_topic)
            all_names = [*levels, *([ORDERED_PARTITION_EXPANSIONS] if _shows_expansions(known, topic) else [])]
            requested_names = all_names if keys is None else dict.fromkeys(keys)  # as Kafka: a repeated key once
            for requested_name in requested_names:  # an alias is answered under its own name
                name = canonical(requested_name)
                if name in levels:
                    config = _described(version, request, name, levels[name])
                elif name == ORDERED_PARTITION_EXPANSIONS:
                    history = known.history(topic)
                    level = _Level(history.described(), _TOPIC_CONFIG if history.expansions else _DEFAULT_CONFIG)
                    config = _described(version, request, name, [level])
                else:
                    continue
                config.name = requested_name
                result.configs.append(config)
        for resource in refused:
            response.results.append(
                Message(
                    error_code=DENIED,
                    error_message=denied_message(known),
                    resource_type=_TOPIC,
                    resource_name=resource.resource_name,
                )
            )
        return []

    return Plan(request, finish)


def _described(version: int, request: Message, name: str, levels: list[_Level]) -> Message:
    synonyms = [Message(name=name, value=level.value, source=level.source) for level in levels]
    documented = version >= 3 and request.include_documentation
    config = VIRTUAL_CONFIGS.get(name)
    source = levels[0].source
    if source == _TOPIC_CONFIG and not request.include_synonyms:
        # Tools that copy a topic copy its overrides, and plain Kafka would refuse these. They do not request synonyms
        # (MirrorSourceConnector.describeTopicConfigs); tools that show overrides do (ConfigCommand). A read-only
        # config would be left out, too, but kafka-python refuses to set it.
        source = _STATIC_BROKER_CONFIG
    return Message(
        name=name,
        value=levels[0].value,
        read_only=config is None,
        is_default=True,  # v0, which has no source
        config_source=source,
        synonyms=synonyms if request.include_synonyms else [],
        config_type=_LONG if isinstance(config, Milliseconds) else _STRING,
        documentation=_documentation(name) if documented else None,
    )


def _documentation(name: str) -> str:
    if name == ORDERED_PARTITION_EXPANSIONS:
        return ORDERED_PARTITION_EXPANSIONS_DOCUMENTATION
    config = VIRTUAL_CONFIGS.get(name)
    return UNKNOWN_CONFIG_DOCUMENTATION if config is None else config.documentation


def _shows_expansions(known: Known, topic: str) -> bool:
    """Unless requested by name, only if there are expansions, or ordered ones are switched on."""
    policy = known.policy(topic)
    return bool(known.history(topic).expansions) or (policy is not None and policy.ordered)


def _levels(file_configs: Mapping[str, str], set_on_topic: Mapping[str, str]) -> dict[str, list[_Level]]:
    """All values of every virtual config, by precedence: the first one applies."""
    levels = {}
    for name, config in VIRTUAL_CONFIGS.items():
        levels[name] = [_Level(config.default, _DEFAULT_CONFIG)]
        if name in file_configs:
            levels[name].insert(0, _Level(config.parse(file_configs[name]), _STATIC_BROKER_CONFIG))
        if name in set_on_topic:
            levels[name].insert(0, _Level(set_on_topic[name], _TOPIC_CONFIG))
    unknown = set_on_topic.keys() - VIRTUAL_CONFIGS.keys()
    return levels | {shown_name(name): [_Level(set_on_topic[name], _TOPIC_CONFIG)] for name in sorted(unknown)}


_PLANNERS: Final[Mapping[int, Callable[[int, Message, Known], Plan]]] = {
    ADD_PARTITIONS_TO_TXN: lambda version, request, known: plan_add_partitions(request, known),
    CREATE_PARTITIONS: plan_create_partitions,
    CREATE_TOPICS: plan_create_topics,
    DELETE_TOPICS: plan_delete_topics,
    DESCRIBE_CONFIGS: plan_describe_configs,
    ALTER_CONFIGS: plan_alter_configs,
    INCREMENTAL_ALTER_CONFIGS: plan_incremental_alter_configs,
    WRITE_TXN_MARKERS: lambda version, request, known: plan_write_markers(request, known),
}
