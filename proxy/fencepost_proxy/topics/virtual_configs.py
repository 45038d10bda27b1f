"""The virtual topic configs: the one table, what their values mean, and what an admin should be warned of.

Kafka never sees them. They are set by CreateTopics, AlterConfigs and IncrementalAlterConfigs (`rewriting.py`), kept in
the state topic (`state.py`), or given by globs in the proxy's config file, which guard a topic from birth. What is set
on the topic wins over the file, the file over the default.

A config belongs into the table once it does what it says, and not before: a client that sets one which is not there
gets Kafka's own answer, INVALID_CONFIG for an unknown name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fencepost_policies.append import Check
from fencepost_policies.idempotence_level import Level
from fencepost_policies.partitioners import Partitioner

CHECK_EXPECTED_OFFSETS: Final = "check.expected.offsets"
EXPECTED_OFFSETS_CARRIER: Final = "expected.offsets.carrier"
CHECK_PARTITION_COUNT: Final = "check.partition.count"
PARTITIONER: Final = "partitioner"
ORDERED_PARTITION_EXPANSION: Final = "ordered.partition.expansion"
IDEMPOTENCE_LEVEL: Final = "idempotence.level"

#: The virtual configs that the config file gives a topic (`ProxyConfig.configs_for`).
FileConfigs = Callable[[str], Mapping[str, str]]


#: Kafka's internal topics (org.apache.kafka.common.internals.Topic), which Metadata marks `is_internal`. Brokers write
#: them, so no check applies, whatever an older version of this proxy let an admin set there.
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class InvalidConfigValue(ValueError):
    """A value that a virtual config cannot have. The message is for the admin: it names what is allowed."""


@dataclass(frozen=True, slots=True)
class VirtualConfig:
    """One row. `values` are all that it can be; a client may write them in any case."""

    name: str
    values: tuple[str, ...]
    default: str
    documentation: str

    def parse(self, value: str | None) -> str:
        """The value in its own spelling. Raises InvalidConfigValue."""
        parsed = (value or "").strip().lower()
        if parsed not in self.values:
            *first, last = self.values
            raise InvalidConfigValue(
                f"Invalid value {value!r} for configuration {self.name}: it must be {', '.join(first)} or {last}"
            )
        return parsed


_TABLE: Final = (
    VirtualConfig(
        name=CHECK_EXPECTED_OFFSETS,
        values=(Check.OFF.value, Check.ON.value, Check.REQUIRED.value),
        default=Check.OFF.value,
        documentation=(
            "Conditional publish (KIP-27). true: a batch with an expected offset is appended only if the log ends "
            "there; other batches are appended as usual. required: batches without an expected offset are "
            "refused."
        ),
    ),
    VirtualConfig(
        name=EXPECTED_OFFSETS_CARRIER,
        values=("header", "base"),
        default="header",
        documentation=(
            "Where a batch states its expected offset. header: in the record header expected-offset; a base "
            "offset above 0 also counts. base: in the batch's base offset, taken literally: 0 is 0, -1 is none."
        ),
    ),
    VirtualConfig(
        name=CHECK_PARTITION_COUNT,
        values=(Check.OFF.value, Check.ON.value, Check.REQUIRED.value),
        default=Check.OFF.value,
        documentation=(
            "Partition count check (KIP-253). true: a batch whose record header partition-count differs from the "
            "topic's partition count is refused. A batch without the header is checked by partitioner, or by the "
            "count last reported to its client. required: batches without the header are refused."
        ),
    ),
    VirtualConfig(
        name=PARTITIONER,
        values=("none", *(each.value for each in Partitioner)),
        default="none",
        documentation=(
            "How producers place keyed records, for check.partition.count=true. During a grace period after an "
            "expansion, the proxy recomputes the partition of each key in batches without a partition count and "
            "refuses batches with misplaced keys. murmur2: Java, kafka-python, aiokafka, librdkafka's "
            "murmur2_random; crc32: librdkafka's default; fnv1a: librdkafka's fnv1a_random and Sarama. Use none "
            "for producers that choose partitions in any other way."
        ),
    ),
    VirtualConfig(
        name=ORDERED_PARTITION_EXPANSION,
        values=("false", "true", "any"),
        default="false",
        documentation=(
            "Ordered partition expansion (KIP-253). Consumer groups get a new partition only after they read the "
            "prior partitions, so that records of a key stay in order. true: only multiples of the partition "
            "count are allowed, since otherwise keys placed by hash % count also move between old partitions. "
            "any: any count is allowed."
        ),
    ),
    VirtualConfig(
        name=IDEMPOTENCE_LEVEL,
        values=tuple(level.name.lower() for level in Level),
        default=Level.OFF.name.lower(),
        documentation=(
            "Required idempotence (KAFKA-5793, KAFKA-5794). required: batches without a producer id are refused. "
            "safe: batches that Kafka does not accept from idempotent producers (message format older than 0.11, "
            "or missing rights of the client) are appended without a producer id, and not exactly once. off: no "
            "check."
        ),
    ),
)

#: What only the proxy itself writes: how a topic has grown (`Growth.described`). Shown like a config, never set.
ORDERED_PARTITION_EXPANSIONS: Final = "ordered.partition.expansions"
ORDERED_PARTITION_EXPANSIONS_DOCUMENTATION: Final = (
    "Read-only. Expansions of this topic as JSON, oldest first: old and new partition count, the offset "
    "at which each prior partition ended (thresholds), the time, whether partitions were added without "
    "the proxy (unordered), and whether the new count is a multiple of the old one."
)

VIRTUAL_CONFIGS: Final[Mapping[str, VirtualConfig]] = MappingProxyType({config.name: config for config in _TABLE})


def parse_value(name: str, value: str | None) -> str:
    """The value of a config of the table, in its own spelling. Raises InvalidConfigValue."""
    return VIRTUAL_CONFIGS[name].parse(value)


def switches_off(name: str, value: str) -> bool:
    """Whether a topic would be checked less with this than without it."""
    config = VIRTUAL_CONFIGS.get(name)
    return config is not None and name not in (EXPECTED_OFFSETS_CARRIER, PARTITIONER) and value == config.default


def check_topic_config(name: str, value: str) -> str | None:
    """What is wrong with a virtual config in the config file, None for nothing."""
    if name not in VIRTUAL_CONFIGS:
        return f"there is no such topic config; there are {', '.join(sorted(VIRTUAL_CONFIGS))}"
    try:
        parse_value(name, value)
    except InvalidConfigValue as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """What the virtual configs of one topic come to."""

    check: Check = Check.OFF
    carrier_base: bool = False
    count_check: Check = Check.OFF
    partitioner: Partitioner | None = None
    ordered: bool = False
    any_growth: bool = False
    idempotence: Level = Level.OFF

    @property
    def guarded(self) -> bool:
        """Its appends go through gates (`partitions/gate.py`)."""
        return self.check is not Check.OFF

    @property
    def counted(self) -> bool:
        """Its appends go through a door (`topics/door.py`)."""
        return self.ordered or self.count_check is not Check.OFF

    @property
    def read(self) -> bool:
        """Its appends are looked into at all: somebody has to know what each of them says."""
        return self.guarded or self.counted or self.idempotence is not Level.OFF

    @classmethod
    def of(cls, configs: Mapping[str, str]) -> TopicPolicy:
        """From the configs that are set; the others have their defaults. Raises InvalidConfigValue."""
        values = {name: config.parse(configs.get(name, config.default)) for name, config in VIRTUAL_CONFIGS.items()}
        partitioner = values[PARTITIONER]
        return cls(
            check=Check(values[CHECK_EXPECTED_OFFSETS]),
            carrier_base=values[EXPECTED_OFFSETS_CARRIER] == "base",
            count_check=Check(values[CHECK_PARTITION_COUNT]),
            partitioner=None if partitioner == "none" else Partitioner(partitioner),
            ordered=values[ORDERED_PARTITION_EXPANSION] != "false",
            any_growth=values[ORDERED_PARTITION_EXPANSION] == "any",
            idempotence=Level[values[IDEMPOTENCE_LEVEL].upper()],
        )


def is_safe(configs: Mapping[str, str]) -> bool:
    """Whether these ask for `idempotence.level=safe`."""
    return configs.get(IDEMPOTENCE_LEVEL, "").strip().lower() == Level.SAFE.name.lower()


UNGUARDED: Final = TopicPolicy()


def durability_warnings(
    *, replication_factor: int, min_insync_replicas: int, unclean_leader_election: bool
) -> list[tuple[str, str]]:
    """Why Kafka itself may lose the first of two winners of an offset on a guarded topic: how the topic is, what to do.

    Empty where it cannot. For the log, when a topic becomes guarded, and for `fencepost check`: a check is as durable
    as the log that it is made on.
    """
    warnings = []
    if replication_factor < 3:
        warnings.append(
            (f"has {replication_factor} replica(s)", "give it 3, or a lost disk loses offsets that were won")
        )
    if min_insync_replicas < 2:
        warnings.append(
            (
                f"has min.insync.replicas={min_insync_replicas}",
                "set it to 2, or an offset may be won twice after its only replica failed",
            )
        )
    if unclean_leader_election:
        warnings.append(
            (
                "has unclean.leader.election.enable=true",
                "switch it off, or an outdated leader may give away again offsets that were won",
            )
        )
    return warnings
