"""Virtual topic configs: the table, the meaning of their values, and durability warnings for admins.

Kafka does not know them. CreateTopics, AlterConfigs and IncrementalAlterConfigs set them (`rewriting.py`), and the
state topic stores them (`state.py`). Globs in the proxy's config file set them too, and apply to a topic from its
creation. A value on the topic takes precedence over the file, the file over the default.

A config is added to the table only once it works. For any other name the client gets Kafka's answer INVALID_CONFIG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from fencepost_policies.append import Check
from fencepost_policies.idempotence_level import Level
from fencepost_policies.partitioners import Partitioner

CHECK_EXPECTED_OFFSETS: Final = "fencepost.check.expected.offsets"
EXPECTED_OFFSETS_SOURCE: Final = "fencepost.expected.offsets.source"
CHECK_PARTITION_COUNT: Final = "fencepost.check.partition.count"
PARTITIONER: Final = "fencepost.partitioner"
ORDERED_PARTITION_EXPANSION: Final = "fencepost.ordered.partition.expansion"
IDEMPOTENCE_LEVEL: Final = "fencepost.idempotence.level"

#: The virtual configs that the config file gives a topic (`ProxyConfig.configs_for`).
FileConfigs = Callable[[str], Mapping[str, str]]


#: Kafka's internal topics (org.apache.kafka.common.internals.Topic), which Metadata marks `is_internal`. Brokers write
#: them, so no check applies, even if an older version of this proxy stored one.
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


class InvalidConfigValue(ValueError):
    """An invalid value of a virtual config. The message is for the admin and lists the valid ones."""


@dataclass(frozen=True, slots=True)
class VirtualConfig:
    """One row. `values` are the valid ones; clients may write them in any case."""

    name: str
    values: tuple[str, ...]
    default: str
    documentation: str

    def parse(self, value: str | None) -> str:
        """The normalised value. Raises InvalidConfigValue."""
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
            "Conditional publish (KIP-27). With true, a batch with an expected offset is appended only if the log ends "
            "there, and a batch without one is appended as usual. With required, a batch without an expected offset is "
            "refused."
        ),
    ),
    VirtualConfig(
        name=EXPECTED_OFFSETS_SOURCE,
        values=("header", "base"),
        default="header",
        documentation=(
            "Source of a batch's expected offset. With header, the record header fencepost-expected-offset (a base "
            "offset above 0 counts too). With base, the batch's base offset, taken literally: 0 is 0, -1 is none."
        ),
    ),
    VirtualConfig(
        name=CHECK_PARTITION_COUNT,
        values=(Check.OFF.value, Check.ON.value, Check.REQUIRED.value),
        default=Check.OFF.value,
        documentation=(
            "Refuse producers with an outdated partition count (KIP-253). With true, a batch that states the count "
            "used to place its keys (record header fencepost-partition-count) is refused if the topic has another "
            "count. A batch without it is checked by fencepost.partitioner, or by the count in its client's last "
            "Metadata response. With required, a batch without it is refused."
        ),
    ),
    VirtualConfig(
        name=PARTITIONER,
        values=("none", *(each.value for each in Partitioner)),
        default="none",
        documentation=(
            "How producers place keyed records, for fencepost.check.partition.count=true. During the grace period "
            "after an expansion, keys of batches without a partition count are hashed here, and a batch with a "
            "misplaced key is refused. murmur2: Java, kafka-python, aiokafka, librdkafka's murmur2_random; crc32: "
            "librdkafka's default; fnv1a: librdkafka's fnv1a_random and Sarama. Not for topics whose producers choose "
            "partitions in any other way."
        ),
    ),
    VirtualConfig(
        name=ORDERED_PARTITION_EXPANSION,
        values=("false", "true", "any"),
        default="false",
        documentation=(
            "With true, adding partitions keeps the order of each key's records (KIP-253): consumer groups get a new "
            "partition once they have read the prior partitions up to their thresholds. Only multiples of the current "
            "count are allowed, since otherwise hash % count moves keys between prior partitions, too. With any, any "
            "count."
        ),
    ),
    VirtualConfig(
        name=IDEMPOTENCE_LEVEL,
        values=tuple(level.name.lower() for level in Level),
        default=Level.OFF.name.lower(),
        documentation=(
            "Idempotence required of producers (KAFKA-5793, KAFKA-5794). With required, a batch without a producer id "
            "is refused. With safe, a batch that Kafka accepts from no idempotent producer (message format before "
            "0.11, or no permission) is appended without its producer id, so not exactly once. With off, nothing is "
            "checked."
        ),
    ),
)

#: Read-only config with the expansions of a topic (`ExpansionHistory.described`).
ORDERED_PARTITION_EXPANSIONS: Final = "fencepost.ordered.partition.expansions"
ORDERED_PARTITION_EXPANSIONS_DOCUMENTATION: Final = (
    "Read-only. Expansions of this topic, oldest first, as JSON: old and new partition count, end offset of each prior "
    "partition (thresholds), time, whether it was unordered, that is, it bypassed the proxy, and whether the new count "
    "is a multiple of the old one: only then do keys placed by hash % count move to new partitions only."
)

VIRTUAL_CONFIGS: Final[Mapping[str, VirtualConfig]] = MappingProxyType({config.name: config for config in _TABLE})


_PREFIX: Final = "fencepost."


def canonical(name: str) -> str:
    """The name of a virtual config, given it or its alias without `fencepost.`; any other name unchanged."""
    prefixed = name if name.startswith(_PREFIX) else _PREFIX + name
    return prefixed if prefixed in VIRTUAL_CONFIGS or prefixed == ORDERED_PARTITION_EXPANSIONS else name


def canonical_names(configs: Mapping[str, str]) -> dict[str, str]:
    return {canonical(name): value for name, value in configs.items()}


def parse_value(name: str, value: str | None) -> str:
    """The normalised value of a virtual config. Raises InvalidConfigValue."""
    return VIRTUAL_CONFIGS[name].parse(value)


def switches_off(name: str, value: str) -> bool:
    """Whether the value checks a topic less than the default would."""
    config = VIRTUAL_CONFIGS.get(name)
    return config is not None and name not in (EXPECTED_OFFSETS_SOURCE, PARTITIONER) and value == config.default


def check_topic_config(name: str, value: str) -> str | None:
    """What is wrong with a virtual config in the config file, None if it is valid."""
    if (name := canonical(name)) not in VIRTUAL_CONFIGS:
        return f"there is no such topic config (valid: {', '.join(sorted(VIRTUAL_CONFIGS))})"
    try:
        parse_value(name, value)
    except InvalidConfigValue as error:
        return str(error)
    return None


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """The parsed virtual configs of one topic."""

    check: Check = Check.OFF
    source_is_base: bool = False
    count_check: Check = Check.OFF
    partitioner: Partitioner | None = None
    ordered: bool = False
    any_expansion: bool = False
    idempotence: Level = Level.OFF

    @property
    def is_checked(self) -> bool:
        """Its appends pass a partition sequencer (`sequencer/sequencer.py`)."""
        return self.check is not Check.OFF

    @property
    def checks_count(self) -> bool:
        """Its appends pass an append barrier (`topics/barrier.py`)."""
        return self.ordered or self.count_check is not Check.OFF

    @property
    def read(self) -> bool:
        """Its appends are decoded: at least one check needs their content."""
        return self.is_checked or self.checks_count or self.idempotence is not Level.OFF

    @classmethod
    def of(cls, configs: Mapping[str, str]) -> TopicPolicy:
        """From the configs that are set, with defaults for the others. Raises InvalidConfigValue."""
        values = {name: config.parse(configs.get(name, config.default)) for name, config in VIRTUAL_CONFIGS.items()}
        partitioner = values[PARTITIONER]
        return cls(
            check=Check(values[CHECK_EXPECTED_OFFSETS]),
            source_is_base=values[EXPECTED_OFFSETS_SOURCE] == "base",
            count_check=Check(values[CHECK_PARTITION_COUNT]),
            partitioner=None if partitioner == "none" else Partitioner(partitioner),
            ordered=values[ORDERED_PARTITION_EXPANSION] != "false",
            any_expansion=values[ORDERED_PARTITION_EXPANSION] == "any",
            idempotence=Level[values[IDEMPOTENCE_LEVEL].upper()],
        )


def is_safe(configs: Mapping[str, str]) -> bool:
    return configs.get(IDEMPOTENCE_LEVEL, "").strip().lower() == Level.SAFE.name.lower()


UNCHECKED: Final = TopicPolicy()


def durability_warnings(
    *, replication_factor: int, min_insync_replicas: int, unclean_leader_election: bool
) -> list[tuple[str, str]]:
    """(condition, remedy) for each reason why Kafka itself may lose an acknowledged append of a checked topic.

    For the log, when a topic becomes checked, and for `fencepost check`: a check is only as durable as its log.
    """
    warnings = []
    if replication_factor < 3:
        warnings.append(
            (f"has {replication_factor} replica(s)", "set it to 3, or a disk failure loses acknowledged appends")
        )
    if min_insync_replicas < 2:
        warnings.append(
            (
                f"has min.insync.replicas={min_insync_replicas}",
                "set it to 2, or two appends may win one offset after its only replica failed",
            )
        )
    if unclean_leader_election:
        warnings.append(
            (
                "has unclean.leader.election.enable=true",
                "switch it off, or an outdated leader may assign acknowledged offsets again",
            )
        )
    return warnings
