"""The state topic: what its records say, and the view that they add up to.

One compacted topic (`__fencepost_state`) with one partition; keys are `kind/…`, values JSON:

| key | value | of several |
|---|---|---|
| `producer-id/<proposal uuid>` | `{"cluster_id", "producer_id", "number"}` | of a number the lowest offset wins |
| `stamp-base/<topic id>/<partition>/<producer epoch>/<proposal uuid>` | `{"base"}` | the same, for each epoch |
| `process/<uuid>` | `{"started_ms", "place"}` | all count: the n-th of them has tag n mod 255 + 1 |
| `alive/<uuid>` | `{"at_ms"}` | sent again and again; a tombstone when the process ends well |
| `topic-config/<topic name>` | `{"topic_id", "configs"}` | the last wins; a tombstone: deleted by the proxy |
| `expansion…/…`, `partition-count/<topic id>` | how topics grow | `expansions.py` says |
| `withheld/<group>`, `released/…` | groups that wait for new partitions | `withheld.py` says |
| `poison/<producer id>/…` | transactions that must not commit | `poisoned.py` says |

"The first record of a key wins" would die by compaction, which keeps the last: so each proposal has a key of its own,
and it is written once. Not even its own writer may send it again: with A at offset 5, B at 6 and A's resend at 7, A
wins until compaction drops offset 5, and B from then on. Who does not know whether a proposal was stored reads the
topic, and makes a new one with a new uuid if it is not there. A proposal counts once it was read back.

A process whose tag is about to be given again (127 others have started since) takes a new one, so no two that live
have the same; that many would have to start within `config_lease_seconds`.

A record of a kind that only a newer version knows is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

from fencepost_proxy.errors import FencepostError
from fencepost_proxy.topics.expansions import KINDS as GROWTH_KINDS
from fencepost_proxy.topics.expansions import Expansion, Growth, Growths
from fencepost_proxy.topics.poisoned import KINDS as POISON_KINDS
from fencepost_proxy.topics.poisoned import PoisonView
from fencepost_proxy.topics.records import StateRecord, object_of, record, typed
from fencepost_proxy.topics.virtual_configs import (
    INTERNAL_TOPICS,
    UNGUARDED,
    VIRTUAL_CONFIGS,
    FileConfigs,
    InvalidConfigValue,
    TopicPolicy,
    parse_value,
    switches_off,
)
from fencepost_proxy.topics.withheld import KINDS as GROUP_KINDS
from fencepost_proxy.topics.withheld import WithheldView
from fencepost_proxy.types import LogEndOffset, Offset, ProducerEpoch, ProducerId

_PRODUCER_ID: Final = "producer-id"
_STAMP_BASE: Final = "stamp-base"
_TOPIC_CONFIG: Final = "topic-config"
_PROCESS: Final = "process"
_ALIVE: Final = "alive"
_TAGS: Final = 255
_OLDER_BASES_MAX: Final = 1000
#: From then on a process should take a new tag; at twice that its old one is somebody else's.
TAG_AGE_MAX: Final = 127
_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class StateError(FencepostError):
    """The state topic is another cluster's, or asks what this version cannot do: guarded appends wait for a person."""


class StampBase(NamedTuple):
    """Under `producer_epoch`, sequence = expected offset − `base`."""

    producer_epoch: ProducerEpoch
    base: LogEndOffset


class SetConfigs(NamedTuple):
    """The virtual configs that are set on one incarnation of a topic."""

    topic_id: UUID
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TopicConfigChange:
    """What an admin's call, answered well by Kafka, changes: store it (`StateView.records_of`), then answer the client.

    `topic_id` – None where neither request nor response tells it: look it up before storing.
    `replace` – `assign` is the whole new set; else it is laid over what is set, and `unset` taken out.
    `deleted` – the topic itself is gone; `topic` is None where it was deleted by an id whose name Kafka kept secret.
    `inherited_from` – of a deleted topic: the id in the record of its name's configs, before Kafka saw the deletion.
    """

    topic: str | None
    topic_id: UUID | None
    assign: Mapping[str, str] = field(default_factory=dict)
    unset: frozenset[str] = frozenset()
    replace: bool = False
    deleted: bool = False
    inherited_from: UUID | None = None


def encode_producer_id(proposal: UUID, cluster_id: str, producer_id: ProducerId, number: int = 0) -> StateRecord:
    """The proposal that fenced batches of this cluster are appended under this producer id: the first one, or the
    `number`-th one after it, for partitions that have used the epochs of those before."""
    value = {"cluster_id": cluster_id, "producer_id": producer_id, **({"number": number} if number else {})}
    return record(f"{_PRODUCER_ID}/{proposal}", value)


def encode_stamp_base(
    topic_id: UUID, partition: int, producer_epoch: ProducerEpoch, proposal: UUID, base: LogEndOffset
) -> StateRecord:
    """The proposal that this partition's stamps under this epoch count from `base`.

    Epochs go on from one shared producer id to the next: `PRODUCER_EPOCHS` of the first, then those of the second.
    """
    return record(f"{_STAMP_BASE}/{topic_id}/{partition}/{producer_epoch}/{proposal}", {"base": base})


def encode_process(process: UUID, started_ms: int, place: str | None = None) -> StateRecord:
    """That a proxy process has started (or wants a new tag). Written once, never deleted: the count is what matters.

    `place` – where it runs (`net/places.py`).
    """
    return record(f"{_PROCESS}/{process}", {"started_ms": started_ms, **({} if place is None else {"place": place})})


def encode_alive(process: UUID, at_ms: int) -> StateRecord:
    """That a proxy process lives. The time is for those that start later: the others go by when the record came."""
    return record(f"{_ALIVE}/{process}", {"at_ms": at_ms})


def encode_alive_tombstone(process: UUID) -> StateRecord:
    """That it has ended, with nothing of its own under way any more."""
    return StateRecord(f"{_ALIVE}/{process}".encode(), None)


class SignOfLife(NamedTuple):
    """`at_ms` – by the clock of the process itself; None: it has ended."""

    process: UUID
    at_ms: int | None


def sign_of_life(record: StateRecord) -> SignOfLife | None:
    """What a record of the kind `alive` says, None for any other."""
    kind, _, process = record.key.decode(errors="replace").partition("/")
    if kind != _ALIVE:
        return None
    try:
        value = object_of(record.value)
        return SignOfLife(UUID(process), None if value is None else typed(value, "at_ms", int))
    except ValueError:
        return None


def encode_topic_config(topic: str, topic_id: UUID, configs: Mapping[str, str]) -> StateRecord:
    """All virtual configs that are set on a topic."""
    return record(f"{_TOPIC_CONFIG}/{topic}", {"topic_id": str(topic_id), "configs": dict(configs)})


def encode_topic_config_tombstone(topic: str) -> StateRecord:
    return StateRecord(f"{_TOPIC_CONFIG}/{topic}".encode(), None)


class StateView:
    """What the state topic says, up to the last record applied. No I/O: somebody else reads the topic."""

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._next_offset = Offset(0)
        self._producer_ids: dict[int, ProducerId] = {}
        #: Every producer id that fenced batches are, or were, appended under.
        self.shared_producer_ids: frozenset[int] = frozenset()
        self._topic_configs: dict[str, SetConfigs] = {}
        self._processes: dict[UUID, int] = {}
        self._places: dict[UUID, str] = {}
        self._growths = Growths()
        self.groups = WithheldView()
        self.poisons = PoisonView()
        # Per partition and epoch the proposal that won: its key and its base.
        self._stamp_bases: dict[tuple[UUID, int], dict[ProducerEpoch, tuple[str, LogEndOffset]]] = {}

    def apply(self, offset: Offset, key: bytes | None, value: bytes | None) -> str | None:
        """One record, in offset order. Gives back why it was left out, for the log; None if it was not.

        Raises StateError for another cluster's id and for a config value that this version does not know.
        """
        if offset < self._next_offset:
            raise ValueError(f"record {offset} of the state topic comes after record {self._next_offset - 1}")
        self._next_offset = Offset(offset + 1)
        try:
            text = (key or b"").decode()
            kind, _, rest = text.partition("/")
            if kind == _PRODUCER_ID:
                self._apply_producer_id(text, object_of(value))
            elif kind == _STAMP_BASE:
                self._apply_stamp_base(text, rest, value)
            elif kind == _ALIVE:
                UUID(rest)  # who keeps the time looks at it: `StateTopic`
            elif kind == _PROCESS:
                self._processes.setdefault(UUID(rest), len(self._processes))
                if value is not None and isinstance(place := (object_of(value) or {}).get("place"), str):
                    self._places[UUID(rest)] = place
            elif kind == _TOPIC_CONFIG:
                self._apply_topic_config(rest, value)
            elif kind in GROWTH_KINDS:
                self._growths.apply(text, value)
            elif kind in GROUP_KINDS:
                self.groups.apply(text, value)
            elif kind in POISON_KINDS:
                self.poisons.apply(text, value)
            else:
                return f"record {offset} of the state topic has a key of an unknown kind: {text!r:.80}"
        except ValueError as error:
            return f"record {offset} of the state topic ({key!r:.80}) cannot be read: {error}"
        return None

    def _apply_producer_id(self, key: str, value: Mapping[str, Any] | None) -> None:
        if value is None:
            raise StateError(f"the state topic's record {key} was deleted: the producer id of this cluster is unknown")
        cluster_id, producer_id = typed(value, "cluster_id", str), typed(value, "producer_id", int)
        if cluster_id != self._cluster_id:
            raise StateError(
                f"the state topic belongs to cluster {cluster_id}, but this is cluster {self._cluster_id}: it was "
                "copied from there. If no topic of this cluster was guarded here yet, delete the state topic"
            )
        number = typed(value, "number", int) if "number" in value else 0
        self._producer_ids.setdefault(number, ProducerId(producer_id))
        self.shared_producer_ids = frozenset(self._producer_ids.values())

    def _apply_stamp_base(self, key: str, rest: str, raw: bytes | None) -> None:
        topic_id, partition, epoch, _ = rest.split("/")
        bases = self._stamp_bases.setdefault((UUID(topic_id), int(partition)), {})
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
        configs = {str(name): str(config) for name, config in typed(value, "configs", dict).items()}
        for name in configs.keys() & VIRTUAL_CONFIGS.keys():
            try:
                parse_value(name, configs[name])
            except InvalidConfigValue as error:
                raise StateError(f"topic {topic}: {error}. Was it set by a newer version of this proxy?") from error
        self._topic_configs[topic] = SetConfigs(UUID(typed(value, "topic_id", str)), MappingProxyType(configs))

    # ---- what it says

    @property
    def next_offset(self) -> Offset:
        """The offset behind the last record applied."""
        return self._next_offset

    def producer_id(self, number: int = 0) -> ProducerId | None:
        """The shared producer id of that number, None while none is agreed on."""
        return self._producer_ids.get(number)

    def place(self, process: UUID) -> str | None:
        """Where that process said that it runs."""
        return self._places.get(process)

    def tag_age(self, process: UUID) -> int:
        """How many processes have started since this one; 0 for one that is not known (yet)."""
        return len(self._processes) - 1 - self._processes[process] if process in self._processes else 0

    def tag(self, process: UUID) -> int:
        """1 to 255, of this process alone; 0 for one that is not known, or whose tag is another's by now."""
        if process not in self._processes or self.tag_age(process) > 2 * TAG_AGE_MAX - 1:
            return 0
        return self._processes[process] % _TAGS + 1

    @property
    def topic_configs(self) -> MappingProxyType[str, SetConfigs]:
        """By topic name, whether or not that incarnation of the topic still exists."""
        return MappingProxyType(self._topic_configs)

    def configs_set_on(self, topic: str, topic_id: UUID | None) -> Mapping[str, str]:
        """The virtual configs set on a topic of that name.

        A topic that was deleted and created again at Kafka inherits the checks of its predecessor, and nothing that
        switches one off: either could otherwise leave it unchecked without a word. `topic_id` None, where it is not
        known: the record applies as it is.
        """
        found = self._topic_configs.get(topic)
        if found is None:
            return _NOTHING
        if topic_id is None or topic_id == found.topic_id:
            return found.configs
        return {name: value for name, value in found.configs.items() if not switches_off(name, value)}

    def inherits(self, topic: str, topic_id: UUID) -> bool:
        """Whether a check holds for it that was set on another topic of that name."""
        found = self._topic_configs.get(topic)
        return (
            found is not None
            and found.topic_id != topic_id
            and TopicPolicy.of(self.configs_set_on(topic, topic_id)).read
        )

    def topic_policy(self, topic: str, topic_id: UUID | None, file_configs: FileConfigs) -> TopicPolicy:
        """What holds for a topic: set on it, else given by the file, else the default."""
        of_file, of_topic = file_configs(topic), self.configs_set_on(topic, topic_id)
        policy = TopicPolicy.of({**of_file, **of_topic}) if of_file or of_topic else UNGUARDED
        if not policy.counted and self.growth(topic, topic_id).pending is not None:
            # Switched off meanwhile: until the expansion has ended its appends go through doors all the same.
            return replace(policy, ordered=True)
        return policy

    def growth(self, topic: str, topic_id: UUID | None) -> Growth:
        """How this incarnation of a topic has grown; where `topic_id` is not known, the last one of that name."""
        return self._growths.growth(topic, topic_id)

    @property
    def pending_expansions(self) -> tuple[Expansion, ...]:
        return self._growths.pending()

    @property
    def grown(self) -> tuple[Expansion, ...]:
        """The last expansion of each topic that has ever grown, whether or not the topic still exists."""
        return self._growths.grown()

    @property
    def counted_topics(self) -> frozenset[str]:
        """Those whose partitions were ever counted, whether or not they still exist."""
        return self._growths.names()

    @property
    def counted_incarnations(self) -> Mapping[UUID, str]:
        """The same, by topic id."""
        return self._growths.incarnations()

    def tidy_expansion(self, expansion: Expansion) -> list[StateRecord]:
        """What to append to the state topic once it has ended."""
        return self._growths.tidy(expansion)

    def stamp_base(self, topic_id: UUID, partition: int) -> StampBase | None:
        """The base agreed on under the highest epoch; None where none was ever published (epoch 0, base 0)."""
        bases = self._stamp_bases.get((topic_id, partition))
        if not bases:
            return None
        epoch = max(bases)
        return StampBase(epoch, bases[epoch][1])

    def older_stamp_bases(self, topic_id: UUID, partition: int, producer_epoch: ProducerEpoch) -> list[StateRecord]:
        """Tombstones of bases that nothing relies on once there is one under that epoch: as many as fit in a batch."""
        bases = self._stamp_bases.get((topic_id, partition), {})
        older = (StateRecord(key.encode(), None) for epoch, (key, _) in bases.items() if epoch < producer_epoch)
        return list(islice(older, _OLDER_BASES_MAX))

    def stamp_base_proposal(self, topic_id: UUID, partition: int, producer_epoch: ProducerEpoch) -> bytes | None:
        """The key of the proposal that won under that epoch."""
        won = self._stamp_bases.get((topic_id, partition), {}).get(producer_epoch)
        return None if won is None else won[0].encode()

    def records_of(self, changes: Iterable[TopicConfigChange]) -> list[StateRecord]:
        """What to append to the state topic for these changes; nothing for one that changes nothing.

        Raises ValueError for a change whose `topic_id` was not looked up. Two proxies that change one topic at once:
        the last record wins as a whole.
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
        # Only by id: by the time this is stored, a new topic of that name may have configs of its own.
        records = [
            encode_topic_config_tombstone(topic)
            for topic, found in self._topic_configs.items()
            if found.topic_id == change.topic_id or (topic == change.topic and found.topic_id == change.inherited_from)
        ]
        return records + ([] if change.topic_id is None else self.forget_but_configs(change.topic_id))

    def forget_but_configs(self, topic_id: UUID) -> list[StateRecord]:
        """The tombstones of what is stored of a topic that is gone. Its configs stay for its successor."""
        records = [
            StateRecord(key.encode(), None)
            for (found, _), bases in self._stamp_bases.items()
            if found == topic_id
            for key, _ in bases.values()
        ]
        return records + self._growths.forget(topic_id) + self.groups.forget(topic_id)
