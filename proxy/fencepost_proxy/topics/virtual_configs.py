"""Virtual config: a topic config that the proxy stores and applies, and Kafka does not know.

The table, the meaning of their values, and durability warnings for admins. CreateTopics, AlterConfigs and
IncrementalAlterConfigs set them (`rewriting.py`), and the state topic stores them (`state.py`). Globs in the proxy's
config file set them too, and apply to a topic from its creation. A value on the topic takes precedence over the file,
the file over the default.

Each append check brings its own (`fencepost_policies/registry.py`). For any other name the client gets Kafka's answer
INVALID_CONFIG, unless it deletes a config that a newer version has set (`unknown_configs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from fencepost_policies.append import Check
from fencepost_policies.append_policy import Choice, InvalidConfigValue, Milliseconds, Policies, TopicConfig
from fencepost_policies.conditional_publish import CHECK_EXPECTED_OFFSETS, CLAIMS, EXPECTED_OFFSETS_SOURCE
from fencepost_policies.fields import Field, RecordHeader
from fencepost_policies.idempotence_level import IDEMPOTENCE_LEVEL, Level
from fencepost_policies.partition_count import CHECK_PARTITION_COUNT, PARTITIONER
from fencepost_policies.partitioners import Partitioner
from fencepost_policies.registry import CHECKS, OTHER_CHECKS, POLICIES
from fencepost_proxy.topics.unknown_configs import MUST_BE_UNDERSTOOD, NOT_UNDERSTOOD, must_be_understood, shown_name

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
    *(config for check in CHECKS for config in (check.config, *check.more_configs)),
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
#: These say how a topic is checked, not whether.
_MANNERS: Final = frozenset(config.name for check in CHECKS for config in check.more_configs)


_PREFIX: Final = "fencepost."

#: Stored under their own names: every version knows them. Another config must be understood, unless it is listed here,
#: because versions that do not know it may ignore it.
_STORED_UNCHANGED: Final = frozenset(
    {
        "fencepost.check.expected.offsets",
        "fencepost.expected.offsets.source",
        "fencepost.check.partition.count",
        "fencepost.partitioner",
        "fencepost.idempotence.level",
        "fencepost.max.record.age.ms",
        "fencepost.ordered.partition.expansion",
    }
)


def stored_name(name: str, value: str) -> str:
    """The name of a config in the state topic. An unknown one keeps its stored name.

    The default is what versions do that do not know the config.
    """
    config = VIRTUAL_CONFIGS.get(name)
    unchanged = config is None or name in _STORED_UNCHANGED or value == config.default
    return name if unchanged else MUST_BE_UNDERSTOOD + name


def name_of(stored: str) -> str:
    """The name of a stored config; unchanged if this version does not know it."""
    name = canonical(shown_name(stored))
    return name if name in VIRTUAL_CONFIGS else stored


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
    return config is not None and name not in _MANNERS and value == config.default


def weakens(name: str, old: str, new: str) -> bool:
    """Whether another value of a virtual config refuses fewer appends or expansions, as far as its kind shows."""
    if (config := VIRTUAL_CONFIGS.get(name)) is None:
        return True  # one of a newer version is deleted
    if name in _MANNERS:
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

    `policies`: those that are on. `configs`: the values that are not the default, by name.
    `is_checked`: its appends pass a partition sequencer (`sequencer/sequencer.py`). `checks_count`: they pass an append
    barrier (`expansion/barrier.py`).

    What its checks need of a batch: `fields`; `reads_records`, if more than its header; `reads_headers`, if expected
    offsets and write ids in record headers matter. `read`: at least one check is on, so appends are decoded.
    """

    check: Check = Check.OFF
    source_is_base: bool = False
    count_check: Check = Check.OFF
    partitioner: Partitioner | None = None
    ordered: bool = False
    any_expansion: bool = False
    idempotence: Level = Level.OFF
    claims: bool = False
    policies: Policies = ()
    configs: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    is_checked: bool = field(init=False)
    checks_count: bool = field(init=False)
    read: bool = field(init=False)
    reads_records: bool = field(init=False)
    reads_headers: bool = field(init=False)
    fields: tuple[Field[Any], ...] = field(init=False)

    def __post_init__(self) -> None:
        settings = {
            CHECK_EXPECTED_OFFSETS.name: self.check,
            CHECK_PARTITION_COUNT.name: self.count_check,
            IDEMPOTENCE_LEVEL.name: self.idempotence,
        }
        others = (each for each in OTHER_CHECKS if settings[each.config.name] != each.off)
        checks = (*others, *(policy for policy, _ in self.policies))
        reads = dict.fromkeys(each for check in checks for each in check.reads)
        derived = {
            "is_checked": self.check is not Check.OFF,
            "checks_count": self.ordered or self.count_check is not Check.OFF,
            "read": self.ordered or bool(checks),
            "reads_records": bool(reads or self.policies),
            "reads_headers": RecordHeader.EXPECTED_OFFSET in reads or RecordHeader.WRITE_ID in reads,
            "fields": tuple(each for each in reads if isinstance(each, Field)),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, configs: Mapping[str, str]) -> TopicPolicy:
        """From the configs that are set, with defaults for the others. Raises InvalidConfigValue."""
        values = {name: each.parse(configs.get(name, each.default)) for name, each in VIRTUAL_CONFIGS.items()}
        settings = {name: VIRTUAL_CONFIGS[name].setting(value) for name, value in values.items()}
        expansion = settings[ORDERED_PARTITION_EXPANSION.name]
        with_settings = ((policy, settings[policy.config.name]) for policy in POLICIES)
        unknown = must_be_understood(configs)
        not_understood = ((NOT_UNDERSTOOD, unknown),) if unknown else ()
        return cls(
            check=settings[CHECK_EXPECTED_OFFSETS.name],
            source_is_base=settings[EXPECTED_OFFSETS_SOURCE.name] == "base",
            count_check=settings[CHECK_PARTITION_COUNT.name],
            partitioner=settings[PARTITIONER.name],
            ordered=expansion != "false",
            any_expansion=expansion == "any",
            idempotence=settings[IDEMPOTENCE_LEVEL.name],
            claims=settings[CLAIMS.name],
            policies=(
                *not_understood,
                *((policy, setting) for policy, setting in with_settings if setting != policy.off),
            ),
            configs=tuple((name, value) for name, value in values.items() if value != VIRTUAL_CONFIGS[name].default),
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
