"""State topic: the Kafka topic in which proxies keep virtual configs, expansions, fence bases and heartbeats.

Its records, and the view that results from them. It is compacted (`__fencepost_state`), with one partition; keys are
`kind/…`, values JSON:

| key | value | if there are several |
|---|---|---|
| `topic-config/<topic name>` | `{"topic_id", "configs"}` | the last wins; a tombstone: deleted by the proxy |
| `expansion…/…`, `partition-count/<topic id>` | expansions of topics | see `expansion/history.py` |
| `gated/<group>`, `released/…` | gated assignments of consumer groups | see `expansion/gated.py` |
| `abort-only/<producer id>/…` | abort-only transactions | see `abort_only.py` |
| `producer-id/…`, `fence-base/…` | fenced appends | see `fencing.py` |
| `process/…`, `heartbeat/…` | proxy processes | see `processes.py` |

"The first record of a key wins" does not survive compaction, which keeps the last. So each proposal has its own key and
is written once, even by its writer:

1. Proposal A is at offset 5, B at 6, and A is written again at 7. A wins.
2. Compaction drops offset 5. B wins.

A process that does not know whether its proposal was stored reads the topic. If it is missing, the process makes a new
one with a new uuid. A proposal counts once it was read back.

Records of unknown kinds, from newer versions, are left alone. Configs with unknown names are kept and reported
(`unknown_configs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_policies.append_policy import InvalidConfigValue
from fencepost_proxy.errors import StateError
from fencepost_proxy.expansion.gated import KINDS as GROUP_KINDS
from fencepost_proxy.expansion.gated import GatedView
from fencepost_proxy.expansion.history import KINDS as EXPANSION_KINDS
from fencepost_proxy.expansion.history import ExpansionHistories, ExpansionHistory
from fencepost_proxy.native_view import NativeView
from fencepost_proxy.topics import hints
from fencepost_proxy.topics.abort_only import ABORT_ONLY, AbortOnlyView
from fencepost_proxy.topics.fencing import FENCE_BASE, PRODUCER_ID, FenceBaseRecords, SharedProducerIds
from fencepost_proxy.topics.processes import HEARTBEAT, PROCESS, Processes
from fencepost_proxy.topics.unknown_configs import shown_name
from fencepost_proxy.topics.virtual_configs import (
    INTERNAL_TOPICS,
    UNCHECKED,
    VIRTUAL_CONFIGS,
    FileConfigs,
    TopicPolicy,
    name_of,
    parse_value,
    stored_name,
    switches_off,
)
from fencepost_proxy.types import Offset
from fencepost_proxy.wire.state_records import StateRecord, object_of, record, tombstone, typed

_TOPIC_CONFIG: Final = "topic-config"
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class SetConfigs(NamedTuple):
    """The virtual configs set on one incarnation of a topic."""

    topic_id: UUID
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TopicConfigChange:
    """Result of an admin request that Kafka accepted: store it (`StateView.records_of`), then answer the client.

    `topic_id`: None if neither request nor response has it: look it up before storing.
    `assign` and `unset` name all that changes: other configs keep their values.
    `deleted`: the topic was deleted; `topic` is None if it was deleted by id and Kafka did not give its name.
    `inherited_from`: for a deleted topic, the id in the record of its name's configs before Kafka saw the deletion.
    """

    topic: str | None
    topic_id: UUID | None
    assign: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    deleted: bool = False
    inherited_from: UUID | None = None


@dataclass(frozen=True, slots=True)
class NotStored:
    """Why changes were not stored. `denied`: the proxy's own user lacks an operation, so a repetition fails too."""

    reason: str
    denied: bool = False


def encode_topic_config(topic: str, topic_id: UUID, configs: Mapping[str, str]) -> StateRecord:
    """All virtual configs set on a topic."""
    stored = {stored_name(name, value): value for name, value in configs.items()}
    return record(f"{_TOPIC_CONFIG}/{topic}", {"topic_id": str(topic_id), "configs": stored})


def encode_topic_config_tombstone(topic: str) -> StateRecord:
    return tombstone(f"{_TOPIC_CONFIG}/{topic}")


class StateView(NativeView, remembered=("_next_offset",)):
    """The state topic's content up to the last record applied. No I/O: the caller reads the topic.

    Each part holds the records of some kinds, and documents them.
    """

    def __init__(self, cluster_id: str) -> None:
        self._next_offset = Offset(0)
        self._topic_configs: dict[str, SetConfigs] = {}
        self._unknown_configs: dict[str, tuple[str, ...]] = {}
        self.producer_ids = SharedProducerIds(cluster_id)
        self.fence_bases = FenceBaseRecords()
        self.processes = Processes()
        self.expansions = ExpansionHistories()
        self.groups = GatedView()
        self.abort_only_records = AbortOnlyView()
        self._kinds: dict[str, Callable[[str, bytes | None], None]] = {
            PRODUCER_ID: self.producer_ids.apply,
            FENCE_BASE: self.fence_bases.apply,
            PROCESS: self.processes.apply,
            HEARTBEAT: self.processes.apply,
            _TOPIC_CONFIG: self._apply_topic_config,
            ABORT_ONLY: self.abort_only_records.apply,
            **dict.fromkeys(EXPANSION_KINDS, self.expansions.apply),
            **dict.fromkeys(GROUP_KINDS, self.groups.apply),
        }

    def apply(self, offset: Offset, key: bytes | None, value: bytes | None) -> str | None:
        """Apply one record, in offset order. Returns why it was skipped, for the log; None if it was applied.

        Raises StateError for another cluster's id, and for a config value that this version does not know.
        """
        if offset < self._next_offset:
            raise ValueError(f"record {offset} of the state topic comes after record {self._next_offset - 1}")
        self._next_offset = Offset(offset + 1)
        try:
            text = (key or b"").decode()
            apply = self._kinds.get(text.partition("/")[0])
            if apply is None:
                return f"record {offset} of the state topic has a key of an unknown kind: {text!r:.80}"
            apply(text, value)
        except ValueError as error:
            return f"record {offset} of the state topic ({key!r:.80}) cannot be read: {error}"
        return None

    def _apply_topic_config(self, key: str, raw: bytes | None) -> None:
        topic, value = key.partition("/")[2], object_of(raw)
        if value is None or topic in INTERNAL_TOPICS:
            self._topic_configs.pop(topic, None)
            self._unknown_configs.pop(topic, None)
            return
        configs = {name_of(str(name)): str(config) for name, config in typed(value, "configs", dict).items()}
        for name in configs.keys() & VIRTUAL_CONFIGS.keys():
            try:
                parse_value(name, configs[name])
            except InvalidConfigValue as error:
                raise _of_newer_version(topic, error) from error
        self._topic_configs[topic] = SetConfigs(UUID(typed(value, "topic_id", str)), MappingProxyType(configs))
        self._unknown_configs.pop(topic, None)
        if unknown := configs.keys() - VIRTUAL_CONFIGS.keys():
            self._unknown_configs[topic] = tuple(sorted(unknown))

    # ---- queries

    @property
    def next_offset(self) -> Offset:
        """The offset after the last record applied."""
        return self._next_offset

    @property
    def topic_configs(self) -> MappingProxyType[str, SetConfigs]:
        """By topic name, whether or not that incarnation of the topic still exists."""
        return MappingProxyType(self._topic_configs)

    @property
    def unknown_configs(self) -> Mapping[str, tuple[str, ...]]:
        """Topics with configs that this version does not know, and the stored names of these."""
        return self._unknown_configs

    def configs_set_on(self, topic: str, topic_id: UUID | None) -> Mapping[str, str]:
        """The virtual configs set on a topic of that name.

        A topic that was deleted and recreated directly in Kafka inherits its predecessor's checks, but no config that
        switches one off: either could otherwise leave it unchecked silently. `topic_id` None if unknown: the record
        applies unchanged.
        """
        found = self._topic_configs.get(topic)
        if found is None:
            return _NOTHING
        if topic_id is None or topic_id == found.topic_id:
            return found.configs
        return {name: value for name, value in found.configs.items() if not switches_off(name, value)}

    def inherits(self, topic: str, topic_id: UUID) -> bool:
        """Whether a check set on an earlier topic of that name applies to it."""
        found = self._topic_configs.get(topic)
        return (
            found is not None
            and found.topic_id != topic_id
            and TopicPolicy.of(self.configs_set_on(topic, topic_id)).read
        )

    def topic_policy(self, topic: str, topic_id: UUID | None, file_configs: FileConfigs) -> TopicPolicy:
        """What holds for a topic: set on it, else given by the file, else the default."""
        of_file, of_topic = file_configs(topic), self.configs_set_on(topic, topic_id)
        policy = TopicPolicy.of({**of_file, **of_topic}) if of_file or of_topic else UNCHECKED
        if not policy.checks_count and self.history(topic, topic_id).pending is not None:
            # Switched off during an expansion: until it ends, appends still pass the append barrier.
            return replace(policy, ordered=True)
        return policy

    def history(self, topic: str, topic_id: UUID | None) -> ExpansionHistory:
        """Expansions of this incarnation; if `topic_id` is None, of the latest one of that name."""
        return self.expansions.history(topic, topic_id)

    def records_of(self, changes: Iterable[TopicConfigChange]) -> list[StateRecord]:
        """Records to append to the state topic for these changes; none for a change without effect.

        Raises ValueError for a change whose `topic_id` was not looked up. If two proxies change one topic at the same
        time, the last record wins as a whole.
        """
        records: list[StateRecord] = []
        for change in changes:
            records += self._forget(change) if change.deleted else self._alter(change)
        return records

    def _alter(self, change: TopicConfigChange) -> list[StateRecord]:
        if change.topic is None or change.topic_id is None:
            raise ValueError(f"the id of topic {change.topic} must be known before its configs are stored")
        old, new = self.configs_set_on(change.topic, change.topic_id), self._set_by(change)
        if new == old and not self.inherits(change.topic, change.topic_id):
            return []
        if new:
            return [encode_topic_config(change.topic, change.topic_id, new)]
        return [encode_topic_config_tombstone(change.topic)]

    def _set_by(self, change: TopicConfigChange) -> dict[str, str]:
        """The virtual configs set on the topic after the change."""
        old = {} if change.topic is None else self.configs_set_on(change.topic, change.topic_id)
        return {**{name: value for name, value in old.items() if name not in change.unset}, **change.assign}

    def effect_of(self, change: TopicConfigChange, file_configs: FileConfigs) -> dict[str, tuple[str, str]]:
        """(old, new) value of each virtual config of the topic that is different after the change; new is empty for a
        deleted one that this version does not know."""
        if change.topic is None:
            return {}
        of_file = {name: parse_value(name, value) for name, value in file_configs(change.topic).items()}
        defaults = {name: config.default for name, config in VIRTUAL_CONFIGS.items()} | of_file
        old = defaults | {**self.configs_set_on(change.topic, change.topic_id)}
        new = defaults | ({} if change.deleted else self._set_by(change))
        effect = {name: (old[name], new[name]) for name in defaults if old[name] != new[name]}
        return effect | {shown_name(name): (old[name], "") for name in old.keys() - new.keys()}

    def _forget(self, change: TopicConfigChange) -> list[StateRecord]:
        # By id only: when this is stored, a new topic of that name may have other configs.
        records = [
            encode_topic_config_tombstone(topic)
            for topic, found in self._topic_configs.items()
            if found.topic_id == change.topic_id or (topic == change.topic and found.topic_id == change.inherited_from)
        ]
        return records + ([] if change.topic_id is None else self.forget_but_configs(change.topic_id))

    def forget_but_configs(self, topic_id: UUID) -> list[StateRecord]:
        """Tombstones of a deleted topic's records. Its configs stay for its successor."""
        return self.fence_bases.forget(topic_id) + self.expansions.forget(topic_id) + self.groups.forget(topic_id)


def _of_newer_version(topic: str, error: InvalidConfigValue) -> StateError:
    text = f"topic {topic}: {error}. Was it set by a newer version of this proxy?"
    return StateError(text, hint=hints.NEWER_VERSION)
