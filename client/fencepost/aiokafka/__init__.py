"""Conditional publish with aiokafka."""

from __future__ import annotations

try:
    import aiokafka  # noqa: F401 - to explain how to install it
except ModuleNotFoundError as error:
    raise ImportError("fencepost.aiokafka needs aiokafka: pip install 'aiokafka>=0.14'") from error

from fencepost.aiokafka._ordered import OrderedConsumer, OrderedProducer
from fencepost.aiokafka._producer import ConditionalProducer, describe_topic, read_expansions
from fencepost.aiokafka._writers import LogReader, LogWriter, SharedLog, TransactionalWriter

__all__ = [
    "ConditionalProducer",
    "LogReader",
    "LogWriter",
    "OrderedConsumer",
    "OrderedProducer",
    "SharedLog",
    "TransactionalWriter",
    "describe_topic",
    "read_expansions",
]
