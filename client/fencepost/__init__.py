"""Conditional publish for applications: append only if the log ends where you think it does (KIP-27).

Pick the adapter of the client library that you use; importing `fencepost` itself imports none of them:

- `fencepost.kafka_python` – kafka-python 3
- `fencepost.aiokafka` – aiokafka
- `fencepost.confluent` – confluent-kafka

Each has a `ConditionalProducer` (the library's own producer, with `expected_offset=`), a `LogWriter` (KIP-27's worked
example: read a partition to its end, then append batches to it), and, for state that lies on several partitions, a
`LogReader` and a `TransactionalWriter` (append to all of them where they are expected to end, or to none). See
docs/client.md.
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
    OutcomeUnknown,
    PartitionCountChanged,
    PartitionRequired,
    PositionLost,
    TransactionAborted,
    TransactionConflict,
    WriterFenced,
)
from fencepost.expansions import PartitionExpansion, partition_expansions
from fencepost.records import HeaderNames, LogRecord, Record
from fencepost.retries import RetryPolicy, retrying, retrying_async

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
    "OutcomeUnknown",
    "PartitionCountChanged",
    "PartitionExpansion",
    "PartitionRequired",
    "PositionLost",
    "Record",
    "RetryPolicy",
    "TransactionAborted",
    "TransactionConflict",
    "Waiting",
    "WriterFenced",
    "jump_hash",
    "partition_expansions",
    "retrying",
    "retrying_async",
]
