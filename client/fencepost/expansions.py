"""A topic's partition expansions and their thresholds (KIP-253)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fencepost.errors import CheckIsOff

#: Topic configs that exist only through the proxy.
ORDERED_CONFIG = "fencepost.ordered.partition.expansion"
EXPANSIONS_CONFIG = "fencepost.ordered.partition.expansions"


@dataclass(frozen=True, slots=True)
class PartitionExpansion:
    """One expansion of a topic from `from_count` to `to_count` partitions.

    `thresholds[q]`: log end offset of prior partition `q` at the expansion, for `q` < `from_count`. No record at or
    after it was partitioned for fewer than `to_count` partitions. None if the expansion bypassed the proxy
    (`unordered`) or is in progress (`pending`). `at_ms`: completion time, Unix milliseconds.
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
    """Parse a topic's configs, oldest expansion first. Raises CheckIsOff if ordered expansion is off."""
    reported = configs.get(EXPANSIONS_CONFIG)
    if configs.get(ORDERED_CONFIG) in ("true", "any") and reported is not None:
        return parse_expansions(reported)
    if not configs:
        found = "its configs are not visible (topic missing or just created, or no DescribeConfigs permission)"
    elif ORDERED_CONFIG not in configs:
        found = f"no {ORDERED_CONFIG}, so these servers are not a Fencepost proxy"
    else:
        found = f"{ORDERED_CONFIG}={configs[ORDERED_CONFIG]}"
    raise CheckIsOff(topic, found, ORDERED_CONFIG)


def parse_expansions(text: str) -> tuple[PartitionExpansion, ...]:
    """Parse the value of `fencepost.ordered.partition.expansions`. Raises ValueError."""
    try:
        return tuple(_expansion(each) for each in json.loads(text))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{EXPANSIONS_CONFIG} is malformed: {text!r}") from error


def _expansion(reported: Mapping[str, Any]) -> PartitionExpansion:
    unordered = bool(reported.get("unordered", False))
    known = reported.get("thresholds") is not None and not unordered and not reported.get("pending", False)
    return PartitionExpansion(
        int(reported["from"]),
        int(reported["to"]),
        tuple(map(int, reported["thresholds"])) if known else None,
        reported.get("at_ms"),
        unordered,
    )


def partition_expansions(admin: Any, topic: str) -> Any:
    """Read a topic's expansions through the proxy: a tuple of `PartitionExpansion`, oldest first.

    `admin`: an admin client of kafka-python, aiokafka or confluent-kafka, connected to the proxy. Returns a coroutine
    for aiokafka. Raises CheckIsOff if ordered expansion is off, TypeError for another admin client, and the client
    library's errors.
    """
    library = next(
        (each for cls in type(admin).__mro__ if (each := cls.__module__.partition(".")[0]) in _LIBRARIES), None
    )
    # Imported here: each client library is optional.
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
