"""Conditional publish for applications: append only if the log ends where you think it does (KIP-27).

Pick the adapter of the client library that you use; importing `fencepost` itself imports none of them:

- `fencepost.kafka_python` – kafka-python 3
- `fencepost.aiokafka` – aiokafka
- `fencepost.confluent` – confluent-kafka

Each has a `ConditionalProducer` (the library's own producer, with `expected_offset=`) and a `LogWriter` (KIP-27's
worked example: read a partition to its end, then append batches to it). See docs/client.md.
"""

from __future__ import annotations

from fencepost._ordering import Waiting
from fencepost._placing import jump_hash
from fencepost.errors import (
    BatchTooLarge,
    CheckIsOff,
    FencepostError,
    InDoubt,
    NotAtEnd,
    OffsetMismatch,
    OffsetViolation,
    PartitionCountChanged,
    PartitionRequired,
    PositionLost,
)
from fencepost.expansions import PartitionExpansion, partition_expansions
from fencepost.records import HeaderNames, LogRecord, Record
from fencepost.retries import RetryPolicy

__all__ = [
    "BatchTooLarge",
    "CheckIsOff",
    "FencepostError",
    "HeaderNames",
    "InDoubt",
    "LogRecord",
    "NotAtEnd",
    "OffsetMismatch",
    "OffsetViolation",
    "PartitionCountChanged",
    "PartitionExpansion",
    "PartitionRequired",
    "PositionLost",
    "Record",
    "RetryPolicy",
    "Waiting",
    "jump_hash",
    "partition_expansions",
]
