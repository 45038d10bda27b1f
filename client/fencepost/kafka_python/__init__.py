"""Conditional publish with kafka-python 3."""

from __future__ import annotations

try:
    import kafka  # noqa: F401 - to explain how to install it
except ModuleNotFoundError as error:
    raise ImportError("fencepost.kafka_python needs kafka-python: pip install 'kafka-python>=3,<4'") from error

from fencepost._shared_log import BlockingSharedLog as SharedLog
from fencepost.kafka_python._ordered import OrderedConsumer, OrderedProducer
from fencepost.kafka_python._producer import ConditionalFuture, ConditionalProducer, describe_topic
from fencepost.kafka_python._writers import LogReader, LogWriter, TransactionalWriter

__all__ = [
    "ConditionalFuture",
    "ConditionalProducer",
    "LogReader",
    "LogWriter",
    "OrderedConsumer",
    "OrderedProducer",
    "SharedLog",
    "TransactionalWriter",
    "describe_topic",
]
