"""Conditional publish with confluent-kafka."""

from __future__ import annotations

try:
    import confluent_kafka  # noqa: F401 - to explain how to install it
except ModuleNotFoundError as error:
    raise ImportError("fencepost.confluent needs confluent-kafka: pip install 'confluent-kafka>=2.16'") from error

from fencepost._shared_log import BlockingSharedLog as SharedLog
from fencepost.confluent._ordered import OrderedConsumer, OrderedProducer
from fencepost.confluent._producer import ConditionalProducer, describe_topic
from fencepost.confluent._writers import LogReader, LogWriter, TransactionalWriter

__all__ = [
    "ConditionalProducer",
    "LogReader",
    "LogWriter",
    "OrderedConsumer",
    "OrderedProducer",
    "SharedLog",
    "TransactionalWriter",
    "describe_topic",
]
