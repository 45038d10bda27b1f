"""The table of virtual topic configs: values, policies, and warnings for operators."""

from __future__ import annotations

import itertools

import pytest

from fencepost_policies.append import Check
from fencepost_policies.append_policy import InvalidConfigValue
from fencepost_policies.partitioners import Partitioner
from fencepost_proxy.topics.virtual_configs import (
    UNCHECKED,
    VIRTUAL_CONFIGS,
    TopicPolicy,
    canonical,
    check_topic_config,
    durability_warnings,
    parse_value,
    weakens,
)


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("fencepost.check.expected.offsets", "false", "false"),
        ("fencepost.check.expected.offsets", "TRUE", "true"),
        ("fencepost.check.expected.offsets", " Required ", "required"),
        ("fencepost.expected.offsets.source", "header", "header"),
        ("fencepost.expected.offsets.source", "Base", "base"),
        ("fencepost.check.partition.count", "Required", "required"),
        ("fencepost.partitioner", "none", "none"),
        ("fencepost.partitioner", "Murmur2", "murmur2"),
        ("fencepost.ordered.partition.expansion", "True", "true"),
        ("fencepost.max.record.age.ms", " 0060000", "60000"),
        ("max.record.age.ms", "-1", "-1"),
    ],
)
def test_values_are_case_insensitive_and_stored_normalized(name: str, written: str, value: str) -> None:
    assert parse_value(canonical(name), written) == value
    assert check_topic_config(name, written) is None


@pytest.mark.parametrize(
    ("name", "written", "allowed"),
    [
        ("fencepost.check.expected.offsets", "yes", "must be false, true or required"),
        ("fencepost.check.expected.offsets", "", "must be false, true or required"),
        ("fencepost.check.expected.offsets", None, "must be false, true or required"),
        ("fencepost.expected.offsets.source", "footer", "must be header or base"),
        ("fencepost.check.partition.count", "6", "must be false, true or required"),
        ("fencepost.partitioner", "sha1", "must be none, murmur2, crc32 or fnv1a"),
        ("fencepost.ordered.partition.expansion", "required", "must be false, true or any"),
        ("fencepost.max.record.age.ms", "0", "must be milliseconds from 1, or -1"),
        ("fencepost.max.record.age.ms", "1h", "must be milliseconds from 1, or -1"),
        ("fencepost.max.record.age.ms", str(1 << 63), "must be milliseconds from 1, or -1"),
    ],
)
def test_invalid_value_error_lists_the_valid_ones(name: str, written: str | None, allowed: str) -> None:
    with pytest.raises(InvalidConfigValue, match=f"{written!r} for configuration {name}: it {allowed}"):
        parse_value(name, written)


@pytest.mark.parametrize("name", ["transactional.level", "cleanup.policy"])
def test_what_does_nothing_yet_cannot_be_set(name: str) -> None:
    assert name not in VIRTUAL_CONFIGS
    assert "there is no such topic config" in (check_topic_config(name, "true") or "")


def test_defaults_are_values() -> None:
    for config in VIRTUAL_CONFIGS.values():
        assert config.parse(config.default) == config.default
        assert config.documentation


@pytest.mark.parametrize(
    ("configs", "policy"),
    [
        ({}, UNCHECKED),
        ({}, TopicPolicy(Check.OFF, source_is_base=False)),
        ({"fencepost.check.expected.offsets": "true"}, TopicPolicy(Check.ON, source_is_base=False)),
        ({"fencepost.check.expected.offsets": "REQUIRED"}, TopicPolicy(Check.REQUIRED, source_is_base=False)),
        ({"fencepost.expected.offsets.source": "base"}, TopicPolicy(Check.OFF, source_is_base=True)),
        (
            {"fencepost.check.expected.offsets": "false", "some.later": "x"},
            TopicPolicy(Check.OFF, source_is_base=False),
        ),
        ({"fencepost.check.partition.count": "true"}, TopicPolicy(count_check=Check.ON)),
        ({"fencepost.partitioner": "crc32"}, TopicPolicy(partitioner=Partitioner.CRC32)),
        ({"fencepost.ordered.partition.expansion": "true"}, TopicPolicy(ordered=True)),
    ],
)
def test_what_configs_come_to(configs: dict[str, str], policy: TopicPolicy) -> None:
    assert TopicPolicy.of(configs) == policy
    assert policy.is_checked is (policy.check is not Check.OFF)
    assert policy.checks_count is (policy.ordered or policy.count_check is not Check.OFF)


@pytest.mark.parametrize(
    ("replicas", "in_sync", "unclean", "reported"),
    [
        (3, 2, False, []),
        (2, 2, False, ["2 replica"]),
        (3, 1, False, ["min.insync.replicas=1"]),
        (3, 2, True, ["unclean.leader.election"]),
        (1, 1, True, ["1 replica", "min.insync.replicas=1", "unclean.leader.election"]),
    ],
)
def test_durability_warnings_follow_replication_settings(
    replicas: int, in_sync: int, unclean: bool, reported: list[str]
) -> None:
    warnings = durability_warnings(
        replication_factor=replicas, min_insync_replicas=in_sync, unclean_leader_election=unclean
    )

    assert len(warnings) == len(reported)
    for (state, todo), part in zip(warnings, reported, strict=True):
        assert part in state
        assert todo


@pytest.mark.parametrize(
    ("name", "strict_to_lax"),
    [
        ("fencepost.check.expected.offsets", ("required", "true", "false")),
        ("fencepost.check.partition.count", ("required", "true", "false")),
        ("fencepost.idempotence.level", ("required", "safe", "off")),
        ("fencepost.max.record.age.ms", ("1000", "60000", "-1")),
    ],
)
def test_change_towards_fewer_refusals_weakens(name: str, strict_to_lax: tuple[str, ...]) -> None:
    for stricter, laxer in itertools.combinations(strict_to_lax, 2):
        assert weakens(name, stricter, laxer)
        assert not weakens(name, laxer, stricter)


def test_other_changes_weaken_only_if_they_switch_off() -> None:
    expansion = "fencepost.ordered.partition.expansion"
    assert [weakens(expansion, "any", new) for new in ("true", "false")] == [False, True]
    assert not weakens("fencepost.expected.offsets.source", "base", "header")
    assert not weakens("fencepost.partitioner", "murmur2", "crc32")
    assert weakens("fencepost.of.a.newer.version", "deleted", "")
