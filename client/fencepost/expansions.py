"""Reads a topic's partition expansions (KIP-253) with an admin client of any library."""

from __future__ import annotations

from typing import Any

from fencepost._ordering import PartitionExpansion, expansions_of

__all__ = ["PartitionExpansion", "partition_expansions"]

_LIBRARIES = frozenset({"kafka", "aiokafka", "confluent_kafka"})


def partition_expansions(admin: Any, topic: str) -> Any:
    """Read a topic's expansions through the proxy: a tuple of `PartitionExpansion`, oldest first.

    `admin`: an admin client of kafka-python, aiokafka or confluent-kafka, connected to the proxy. Returns a coroutine
    for aiokafka. Raises CheckIsOffError if ordered expansion is off, TypeError for another admin client, and the client
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
