"""How a topic has grown, and where each of its partitions ended then (KIP-253's thresholds)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fencepost.errors import CheckIsOff

#: Topic configs that exist only through the proxy.
ORDERED_CONFIG = "ordered.partition.expansion"
EXPANSIONS_CONFIG = "ordered.partition.expansions"


@dataclass(frozen=True, slots=True)
class PartitionExpansion:
    """The topic grew from `from_count` partitions to `to_count`.

    `thresholds[q]` – where the partition `q` of those before ended: no record behind it was placed over fewer than
    `to_count` partitions. None where nobody knows: the growth went around the proxy (`unordered`), or is still under
    way (`pending`). `at_ms` – when it ended, Unix milliseconds.
    """

    from_count: int
    to_count: int
    thresholds: tuple[int, ...] | None
    at_ms: int | None = None
    unordered: bool = False

    @property
    def pending(self) -> bool:
        return self.thresholds is None and not self.unordered


def expansions_of(topic: str, configs: Mapping[str, str | None]) -> tuple[PartitionExpansion, ...]:
    """From a topic's configs, oldest first. Raises CheckIsOff where they do not say that it grows in order."""
    told = configs.get(EXPANSIONS_CONFIG)
    if configs.get(ORDERED_CONFIG) in ("true", "any") and told is not None:
        return parse_expansions(told)
    if not configs:
        found = "its configs cannot be seen (no such topic, or just created, or no right to DescribeConfigs on it)"
    elif ORDERED_CONFIG not in configs:
        found = f"no {ORDERED_CONFIG}, so these servers are not a Fencepost proxy"
    else:
        found = f"{ORDERED_CONFIG}={configs[ORDERED_CONFIG]}"
    raise CheckIsOff(topic, found, ORDERED_CONFIG)


def parse_expansions(text: str) -> tuple[PartitionExpansion, ...]:
    """The value of `ordered.partition.expansions`. Raises ValueError."""
    try:
        return tuple(_expansion(each) for each in json.loads(text))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{EXPANSIONS_CONFIG} cannot be read: {text!r}") from error


def _expansion(told: Mapping[str, Any]) -> PartitionExpansion:
    unordered = bool(told.get("unordered", False))
    known = told.get("thresholds") is not None and not unordered and not told.get("pending", False)
    return PartitionExpansion(
        int(told["from"]),
        int(told["to"]),
        tuple(map(int, told["thresholds"])) if known else None,
        told.get("at_ms"),
        unordered,
    )


def partition_expansions(admin: Any, topic: str) -> Any:
    """A topic's `PartitionExpansion`s, oldest first, as a tuple; with aiokafka's admin client, a coroutine of it.

    `admin` – the admin client of kafka-python, aiokafka or confluent-kafka, connected to the proxy. Raises CheckIsOff
    where the topic does not grow in order, and the client library's errors.
    """
    library = next(
        (each for cls in type(admin).__mro__ if (each := cls.__module__.partition(".")[0]) in _LIBRARIES), None
    )
    # Imported here: who has one of the three need not have the others.
    if library == "kafka":
        from fencepost.kafka_python import describe_topic  # noqa: PLC0415

        return expansions_of(topic, describe_topic(admin, topic))
    if library == "aiokafka":
        from fencepost.aiokafka import read_expansions  # noqa: PLC0415

        return read_expansions(admin, topic)
    if library == "confluent_kafka":
        from fencepost.confluent import describe_topic as describe  # noqa: PLC0415

        return expansions_of(topic, describe(admin, topic))
    raise TypeError(f"{type(admin)!r} is not an admin client of kafka-python, aiokafka or confluent-kafka")


_LIBRARIES = frozenset({"kafka", "aiokafka", "confluent_kafka"})
EXPANSION_CONFIGS = (ORDERED_CONFIG, EXPANSIONS_CONFIG)
