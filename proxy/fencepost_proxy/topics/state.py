"""The state topic: its records, and the view that results from them.

One compacted topic (`__fencepost_state`) with one partition; keys are `kind/…`, values JSON:

| key | value | if there are several |
|---|---|---|
| `producer-id/<proposal uuid>` | `{"cluster_id", "producer_id", "number"}` | the lowest offset per number wins |
| `fence-base/<topic id>/<partition>/<producer epoch>/<proposal uuid>` | `{"base"}` | the same, per epoch |
| `process/<uuid>` | `{"started_ms", "identity"}` | all count: the n-th process has instance id n mod 255 + 1 |
| `heartbeat/<uuid>` | `{"at_ms"}` | heartbeat, repeated; a tombstone when the process ends normally |
| `topic-config/<topic name>` | `{"topic_id", "configs"}` | the last wins; a tombstone: deleted by the proxy |
| `expansion…/…`, `partition-count/<topic id>` | expansions of topics | see `expansion/history.py` |
| `gated/<group>`, `released/…` | gated assignments of consumer groups | see `expansion/gated.py` |
| `abort-only/<producer id>/…` | abort-only transactions | see `abort_only.py` |

"The first record of a key wins" does not survive compaction, which keeps the last. So each proposal has its own key and
is written once, even by its writer:

1. Proposal A is at offset 5, B at 6, and A is written again at 7. A wins.
2. Compaction drops offset 5. B wins.

A process that does not know whether its proposal was stored reads the topic. If it is missing, the process makes a new
one with a new uuid. A proposal counts once it was read back.

A process whose instance id is about to be reused (127 others have started since) takes a new one. So no two live
processes have the same, unless that many start within `config_lease_seconds`.

Records of unknown kinds, from newer versions, are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

from fencepost_policies.append_policy import InvalidConfigValue
from fencepost_proxy.errors import FencepostError
from fencepost_proxy.expansion.gated import KINDS as GROUP_KINDS
from fencepost_proxy.expansion.gated import GatedView
from fencepost_proxy.expansion.history import KINDS as EXPANSION_KINDS
from fencepost_proxy.expansion.history import Expansion, ExpansionHistories, ExpansionHistory
from fencepost_proxy.topics import hints
from fencepost_proxy.topics.abort_only import KINDS as ABORT_ONLY_KINDS
from fencepost_proxy.topics.abort_only import AbortOnlyView
from fencepost_proxy.topics.virtual_configs import (
    INTERNAL_TOPICS,
    UNCHECKED,
    VIRTUAL_CONFIGS,
    FileConfigs,
    TopicPolicy,
    canonical,
    parse_value,
    switches_off,
)
from fencepost_proxy.types import LogEndOffset, Offset, ProducerEpoch, ProducerId
from fencepost_proxy.wire.state_records import StateRecord, object_of, record, typed

_PRODUCER_ID: Final = "producer-id"
_FENCE_BASE: Final = "fence-base"
_TOPIC_CONFIG: Final = "topic-config"
_PROCESS: Final = "process"
_HEARTBEAT: Final = "heartbeat"
_INSTANCE_IDS: Final = 255
_OLDER_BASES_MAX: Final = 1000
#: From then on a process should take a new instance id; at twice that another process gets its old one.
INSTANCE_ID_AGE_MAX: Final = 127
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class StateError(FencepostError):
    """The state topic belongs to another cluster, or needs a newer version: checked appends wait for an operator."""

    def __init__(self, text: str, *, hint: str) -> None:
        super().__init__(text, hint=hint)


class FenceBase(NamedTuple):
    """Under `producer_epoch`, sequence = expected offset − `base`."""

    producer_epoch: ProducerEpoch
    base: LogEndOffset


class SetConfigs(NamedTuple):
    """The virtual configs set on one incarnation of a topic."""

    topic_id: UUID
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TopicConfigChange:
    """Result of an admin request that Kafka accepted: store it (`StateView.records_of`), then answer the client.

    `topic_id`: None if neither request nor response has it: look it up before storing.
    `replace`: `assign` is the whole new set; else merge it into the current configs, and remove `unset`.
    `deleted`: the topic was deleted; `topic` is None if it was deleted by id and Kafka did not give its name.
    `inherited_from`: for a deleted topic, the id in the record of its name's configs before Kafka saw the deletion.
    """

    topic: str | None
    topic_id: UUID | None
    assign: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    replace: bool = False
    deleted: bool = False
    inherited_from: UUID | None = None


def encode_producer_id(proposal: UUID, cluster_id: str, producer_id: ProducerId, number: int = 0) -> StateRecord:
    """Proposal of a producer id for fenced appends of this cluster: the first one, or the `number`-th after it, for
    partitions that have used all epochs of those before."""
    value = {"cluster_id": cluster_id, "producer_id": producer_id, **({"number": number} if number else {})}
    return record(f"{_PRODUCER_ID}/{proposal}", value)


def encode_fence_base(
    topic_id: UUID, partition: int, producer_epoch: ProducerEpoch, proposal: UUID, base: LogEndOffset
) -> StateRecord:
    """Proposal of the fence base of a partition under this epoch.

    Epochs continue from one shared producer id to the next: `PRODUCER_EPOCHS` of the first, then those of the second.
    """
    return record(f"{_FENCE_BASE}/{topic_id}/{partition}/{producer_epoch}/{proposal}", {"base": base})


def encode_process(process: UUID, started_ms: int, identity: str | None = None) -> StateRecord:
    """A process has started, or needs a new instance id. Written once, never deleted: the number of records counts.

    `identity`: its process identity (`cluster/process_identity.py`).
    """
    return record(
        f"{_PROCESS}/{process}", {"started_ms": started_ms, **({} if identity is None else {"identity": identity})}
    )


def encode_heartbeat(process: UUID, at_ms: int) -> StateRecord:
    """Heartbeat. The time is for processes that start later; the others use the arrival time of the record."""
    return record(f"{_HEARTBEAT}/{process}", {"at_ms": at_ms})


def encode_heartbeat_tombstone(process: UUID) -> StateRecord:
    """The process has ended, with none of its requests in progress."""
    return StateRecord(f"{_HEARTBEAT}/{process}".encode(), None)


class Heartbeat(NamedTuple):
    """`at_ms`: clock of the process itself; None: it has ended."""

    process: UUID
    at_ms: int | None


def heartbeat(record: StateRecord) -> Heartbeat | None:
    """The heartbeat in a record of the kind `heartbeat`, None for other kinds."""
    kind, _, process = record.key.decode(errors="replace").partition("/")
    if kind != _HEARTBEAT:
        return None
    try:
        value = object_of(record.value)
        return Heartbeat(UUID(process), None if value is None else typed(value, "at_ms", int))
    except ValueError:
        return None


def encode_topic_config(topic: str, topic_id: UUID, configs: Mapping[str, str]) -> StateRecord:
    """All virtual configs set on a topic."""
    return record(f"{_TOPIC_CONFIG}/{topic}", {"topic_id": str(topic_id), "configs": dict(configs)})


def encode_topic_config_tombstone(topic: str) -> StateRecord:
    return StateRecord(f"{_TOPIC_CONFIG}/{topic}".encode(), None)


class StateView:
    """The state topic's content up to the last record applied. No I/O: the caller reads the topic."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._next_offset = Offset(0)
        self._producer_ids: dict[int, ProducerId] = {}
        #: All producer ids ever used for fenced appends.
        self.shared_producer_ids: frozenset[int] = frozenset()
        self._topic_configs: dict[str, SetConfigs] = {}
        self._processes: dict[UUID, int] = {}
        self._identities: dict[UUID, str] = {}
        self._histories = ExpansionHistories()
        self.groups = GatedView()
        self.abort_only_records = AbortOnlyView()
        # Per partition and epoch the proposal that won: its key and its base.
        self._fence_bases: dict[tuple[UUID, int], dict[ProducerEpoch, tuple[str, LogEndOffset]]] = {}

    def apply(self, offset: Offset, key: bytes | None, value: bytes | None) -> str | None:
        """Apply one record, in offset order. Returns why it was skipped, for the log; None if it was applied.

        Raises StateError for another cluster's id, and for a config value that this version does not know.
        """
        if offset < self._next_offset:
            raise ValueError(f"record {offset} of the state topic comes after record {self._next_offset - 1}")
        self._next_offset = Offset(offset + 1)
        try:
            text = (key or b"").decode()
            kind, _, rest = text.partition("/")
            if kind == _PRODUCER_ID:
                self._apply_producer_id(text, object_of(value))
            elif kind == _FENCE_BASE:
                self._apply_fence_base(text, rest, value)
            elif kind == _HEARTBEAT:
                UUID(rest)  # `StateTopic` keeps the time
            elif kind == _PROCESS:
                self._processes.setdefault(UUID(rest), len(self._processes))
                if value is not None and isinstance(identity := (object_of(value) or {}).get("identity"), str):
                    self._identities[UUID(rest)] = identity
            elif kind == _TOPIC_CONFIG:
                self._apply_topic_config(rest, value)
            elif kind in EXPANSION_KINDS:
                self._histories.apply(text, value)
            elif kind in GROUP_KINDS:
                self.groups.apply(text, value)
            elif kind in ABORT_ONLY_KINDS:
                self.abort_only_records.apply(text, value)
            else:
                return f"record {offset} of the state topic has a key of an unknown kind: {text!r:.80}"
        except ValueError as error:
            return f"record {offset} of the state topic ({key!r:.80}) cannot be read: {error}"
        return None

    def _apply_producer_id(self, key: str, value: Mapping[str, Any] | None) -> None:
        if value is None:
            raise _without_producer_id(key)
        cluster_id, producer_id = typed(value, "cluster_id", str), typed(value, "producer_id", int)
        if cluster_id != self._cluster_id:
            raise _copied(cluster_id, self._cluster_id)
        number = typed(value, "number", int) if "number" in value else 0
        self._producer_ids.setdefault(number, ProducerId(producer_id))
        self.shared_producer_ids = frozenset(self._producer_ids.values())

    def _apply_fence_base(self, key: str, rest: str, raw: bytes | None) -> None:
        topic_id, partition, epoch, _ = rest.split("/")
        bases = self._fence_bases.setdefault((UUID(topic_id), int(partition)), {})
        producer_epoch = ProducerEpoch(int(epoch))
        value = object_of(raw)
        if value is not None:
            bases.setdefault(producer_epoch, (key, LogEndOffset(typed(value, "base", int))))
        elif bases.get(producer_epoch, ("",))[0] == key:
            del bases[producer_epoch]

    def _apply_topic_config(self, topic: str, raw: bytes | None) -> None:
        value = object_of(raw)
        if value is None or topic in INTERNAL_TOPICS:
            self._topic_configs.pop(topic, None)
            return
        configs = {canonical(str(name)): str(config) for name, config in typed(value, "configs", dict).items()}
        for name in configs.keys() & VIRTUAL_CONFIGS.keys():
            try:
                parse_value(name, configs[name])
            except InvalidConfigValue as error:
                raise _of_newer_version(topic, error) from error
        self._topic_configs[topic] = SetConfigs(UUID(typed(value, "topic_id", str)), MappingProxyType(configs))

    # ---- queries

    @property
    def next_offset(self) -> Offset:
        """The offset after the last record applied."""
        return self._next_offset

    def producer_id(self, number: int = 0) -> ProducerId | None:
        """The shared producer id of that number, None while none is agreed on."""
        return self._producer_ids.get(number)

    def identity(self, process: UUID) -> str | None:
        """Process identity that the process reported."""
        return self._identities.get(process)

    def instance_id_age(self, process: UUID) -> int:
        """Number of processes started since this one; 0 if it is unknown (yet)."""
        return len(self._processes) - 1 - self._processes[process] if process in self._processes else 0

    def instance_id(self, process: UUID) -> int:
        """Instance id, 1 to 255; 0 if the process is unknown, or another process may have its id."""
        if process not in self._processes or self.instance_id_age(process) > 2 * INSTANCE_ID_AGE_MAX - 1:
            return 0
        return self._processes[process] % _INSTANCE_IDS + 1

    @property
    def topic_configs(self) -> MappingProxyType[str, SetConfigs]:
        """By topic name, whether or not that incarnation of the topic still exists."""
        return MappingProxyType(self._topic_configs)

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
        return self._histories.history(topic, topic_id)

    @property
    def pending_expansions(self) -> tuple[Expansion, ...]:
        return self._histories.pending()

    @property
    def expanded(self) -> tuple[Expansion, ...]:
        """The last expansion of each expanded topic, also of deleted topics."""
        return self._histories.expanded()

    @property
    def count_checked_topics(self) -> frozenset[str]:
        """Topics that ever had partition-count checks, also deleted ones."""
        return self._histories.names()

    @property
    def count_checked_incarnations(self) -> Mapping[UUID, str]:
        """The same, by topic id."""
        return self._histories.incarnations()

    def tidy_expansion(self, expansion: Expansion) -> list[StateRecord]:
        """Records to append to the state topic after the expansion ended."""
        return self._histories.tidy(expansion)

    def fence_base(self, topic_id: UUID, partition: int) -> FenceBase | None:
        """The base agreed on under the highest epoch; None if none was published (epoch 0, base 0)."""
        bases = self._fence_bases.get((topic_id, partition))
        if not bases:
            return None
        epoch = max(bases)
        return FenceBase(epoch, bases[epoch][1])

    def older_fence_bases(self, topic_id: UUID, partition: int, producer_epoch: ProducerEpoch) -> list[StateRecord]:
        """Tombstones of bases that are not needed once that epoch has one; as many as fit in a batch."""
        bases = self._fence_bases.get((topic_id, partition), {})
        older = (StateRecord(key.encode(), None) for epoch, (key, _) in bases.items() if epoch < producer_epoch)
        return list(islice(older, _OLDER_BASES_MAX))

    def fence_base_proposal(self, topic_id: UUID, partition: int, producer_epoch: ProducerEpoch) -> bytes | None:
        """The key of the winning proposal under that epoch."""
        won = self._fence_bases.get((topic_id, partition), {}).get(producer_epoch)
        return None if won is None else won[0].encode()

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
        old = self.configs_set_on(change.topic, change.topic_id)
        kept = {} if change.replace else {name: value for name, value in old.items() if name not in change.unset}
        new = {**kept, **change.assign}
        if new == old and not self.inherits(change.topic, change.topic_id):
            return []
        if new:
            return [encode_topic_config(change.topic, change.topic_id, new)]
        return [encode_topic_config_tombstone(change.topic)]

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
        records = [
            StateRecord(key.encode(), None)
            for (found, _), bases in self._fence_bases.items()
            if found == topic_id
            for key, _ in bases.values()
        ]
        return records + self._histories.forget(topic_id) + self.groups.forget(topic_id)


def _without_producer_id(key: str) -> StateError:
    text = f"the state topic's record {key} was deleted: the producer id of this cluster is unknown"
    return StateError(text, hint=hints.RECREATE)


def _copied(from_cluster: str, cluster: str | None) -> StateError:
    return StateError(
        f"the state topic belongs to cluster {from_cluster}, but this is cluster {cluster}: it was copied from there "
        "(if no topic of this cluster has had append checks yet, delete the state topic)",
        hint=hints.COPIED,
    )


def _of_newer_version(topic: str, error: InvalidConfigValue) -> StateError:
    text = f"topic {topic}: {error}. Was it set by a newer version of this proxy?"
    return StateError(text, hint=hints.NEWER_VERSION)
