"""Virtual topic configs: the table, the meaning of their values, and durability warnings for admins.

Kafka does not know them. CreateTopics, AlterConfigs and IncrementalAlterConfigs set them (`rewriting.py`), and the
state topic stores them (`state.py`). Globs in the proxy's config file set them too, and apply to a topic from its
creation. A value on the topic takes precedence over the file, the file over the default.

Each append policy brings its own (`fencepost_policies/registry.py`). For any other name the client gets Kafka's answer
INVALID_CONFIG.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from fencepost_policies.append import Check
from fencepost_policies.append_policy import (
    AppendPolicy,
    Choice,
    InvalidConfigValue,
    Milliseconds,
    Reads,
    Stage,
    TopicConfig,
)
from fencepost_policies.conditional_publish import CHECK_EXPECTED_OFFSETS, EXPECTED_OFFSETS_SOURCE
from fencepost_policies.idempotence_level import IDEMPOTENCE_LEVEL, Level
from fencepost_policies.partition_count import CHECK_PARTITION_COUNT, PARTITIONER
from fencepost_policies.partitioners import Partitioner
from fencepost_policies.registry import POLICIES

#: The virtual configs that the config file gives a topic (`ProxyConfig.configs_for`).
FileConfigs = Callable[[str], Mapping[str, str]]


#: Kafka's internal topics (org.apache.kafka.common.internals.Topic), which Metadata marks `is_internal`. Brokers write
#: them, so no check applies, even if an older version of this proxy stored one.
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})


ORDERED_PARTITION_EXPANSION: Final = Choice(
    name="fencepost.ordered.partition.expansion",
    settings={each: each for each in ("false", "true", "any")},
    default="false",
    documentation=(
        "With true, adding partitions keeps the order of each key's records (KIP-253): consumer groups get a new "
        "partition once they have read the prior partitions up to their thresholds. Only multiples of the current "
        "count are allowed, since otherwise hash % count moves keys between prior partitions, too. With any, any "
        "count."
    ),
)

_TABLE: Final[tuple[TopicConfig[Any], ...]] = (
    *(config for policy in POLICIES for config in (policy.config, *policy.more_configs)),
    ORDERED_PARTITION_EXPANSION,
)

#: Read-only config with the expansions of a topic (`ExpansionHistory.described`).
ORDERED_PARTITION_EXPANSIONS: Final = "fencepost.ordered.partition.expansions"
ORDERED_PARTITION_EXPANSIONS_DOCUMENTATION: Final = (
    "Read-only. Expansions of this topic, oldest first, as JSON: old and new partition count, end offset of each prior "
    "partition (thresholds), time, whether it was unordered, that is, it bypassed the proxy, and whether the new count "
    "is a multiple of the old one: only then do keys placed by hash % count move to new partitions only."
)

VIRTUAL_CONFIGS: Final[Mapping[str, TopicConfig[Any]]] = MappingProxyType({config.name: config for config in _TABLE})


_PREFIX: Final = "fencepost."


def canonical(name: str) -> str:
    """The name of a virtual config, given it or its alias without `fencepost.`; any other name unchanged."""
    prefixed = name if name.startswith(_PREFIX) else _PREFIX + name
    return prefixed if prefixed in VIRTUAL_CONFIGS or prefixed == ORDERED_PARTITION_EXPANSIONS else name


def parse_value(name: str, value: str | None) -> str:
    """The normalised value of a virtual config. Raises InvalidConfigValue."""
    return VIRTUAL_CONFIGS[name].parse(value)


def switches_off(name: str, value: str) -> bool:
    """Whether the value checks a topic less than the default would."""
    config = VIRTUAL_CONFIGS.get(name)
    return config is not None and config not in (EXPECTED_OFFSETS_SOURCE, PARTITIONER) and value == config.default


def weakens(name: str, old: str, new: str) -> bool:
    """Whether another value of a virtual config refuses fewer appends or expansions, as far as its kind shows."""
    config = VIRTUAL_CONFIGS.get(name)
    if config is None or config in (EXPECTED_OFFSETS_SOURCE, PARTITIONER):
        return False
    if isinstance(config, Milliseconds):
        longest, limit = config.setting(old), config.setting(new)
        return longest is not None and (limit is None or limit > longest)
    if isinstance(config, Choice) and config is not ORDERED_PARTITION_EXPANSION:
        words = list(config.settings)  # from off to the strictest
        return words.index(new) < words.index(old)
    return new == config.default != old


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
    """The parsed virtual configs of one topic.

    `on_arrival`: its policies of `Stage.ARRIVAL`, with their settings. `reads`: what these need of a batch.
    """

    check: Check = Check.OFF
    source_is_base: bool = False
    count_check: Check = Check.OFF
    partitioner: Partitioner | None = None
    ordered: bool = False
    any_expansion: bool = False
    idempotence: Level = Level.OFF
    on_arrival: tuple[tuple[AppendPolicy[Any], Any], ...] = ()
    reads: frozenset[Reads] = frozenset()

    @property
    def is_checked(self) -> bool:
        """Its appends pass a partition sequencer (`sequencer/sequencer.py`)."""
        return self.check is not Check.OFF

    @property
    def checks_count(self) -> bool:
        """Its appends pass an append barrier (`expansion/barrier.py`)."""
        return self.ordered or self.count_check is not Check.OFF

    @property
    def read(self) -> bool:
        """Its appends are decoded: at least one check needs their content."""
        return bool(self.is_checked or self.checks_count or self.idempotence is not Level.OFF or self.on_arrival)

    @property
    def reads_records(self) -> bool:
        """At least one check needs more of a batch than its header."""
        return bool(self.is_checked or self.count_check is not Check.OFF or self.on_arrival)

    @property
    def reads_headers(self) -> bool:
        """Expected offsets and write ids in record headers matter."""
        return self.is_checked or Reads.RECORD_HEADERS in self.reads

    @classmethod
    def of(cls, configs: Mapping[str, str]) -> TopicPolicy:
        """From the configs that are set, with defaults for the others. Raises InvalidConfigValue."""
        settings = {name: each.setting(configs.get(name, each.default)) for name, each in VIRTUAL_CONFIGS.items()}
        expansion = settings[ORDERED_PARTITION_EXPANSION.name]
        on_arrival = tuple(
            (policy, settings[policy.config.name])
            for policy in POLICIES
            if policy.stage is Stage.ARRIVAL and settings[policy.config.name] != policy.off
        )
        return cls(
            check=settings[CHECK_EXPECTED_OFFSETS.name],
            source_is_base=settings[EXPECTED_OFFSETS_SOURCE.name] == "base",
            count_check=settings[CHECK_PARTITION_COUNT.name],
            partitioner=settings[PARTITIONER.name],
            ordered=expansion != "false",
            any_expansion=expansion == "any",
            idempotence=settings[IDEMPOTENCE_LEVEL.name],
            on_arrival=on_arrival,
            reads=frozenset().union(*(policy.reads for policy, _ in on_arrival)),
        )


def is_safe(configs: Mapping[str, str]) -> bool:
    return configs.get(IDEMPOTENCE_LEVEL.name, "").strip().lower() == Level.SAFE.name.lower()


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
