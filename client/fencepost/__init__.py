"""Conditional publish: append a record only if the partition ends at the expected offset (KIP-27).

Import the module for your client library. `fencepost` itself imports none of them:

- `fencepost.kafka_python` – kafka-python 3
- `fencepost.aiokafka` – aiokafka
- `fencepost.confluent` – confluent-kafka

Each module has:

- `ConditionalProducer`: the library's producer, with `expected_offset=`;
- `LogWriter`: reads one partition to its end, then appends batches to it;
- `SharedLog`: the same for all tasks or threads of a process;
- `LogReader` and `TransactionalWriter`: read several partitions, then append to all of them at the expected offsets
  or to none;
- `OrderedProducer` and `OrderedConsumer`: keep each key in order while partitions are added (KIP-253).

See docs/client.md.
"""

from __future__ import annotations

from fencepost._ordering import Waiting
from fencepost._partitioning import jump_hash
from fencepost._shared_log import Change
from fencepost.errors import (
    AppendRefusedError,
    BatchTooLargeError,
    CheckIsOffError,
    ConcurrentUseError,
    FencepostError,
    ForeignRecordError,
    InDoubtError,
    LoadChangedError,
    LoadPositionLostError,
    LoadTakenOverError,
    LockHeldError,
    LockLostError,
    LogBusyError,
    NotAtEndError,
    NotLeaderError,
    OffsetMismatchError,
    OffsetViolationError,
    OutcomeUnknownError,
    PartitionCountChangedError,
    PartitionRequiredError,
    PositionLostError,
    TransactionAbortedError,
    TransactionConflictError,
    VersionMismatchError,
    WriterFencedError,
)
from fencepost.expansions import PartitionExpansion, partition_expansions
from fencepost.records import LogRecord, Record
from fencepost.retries import RetryPolicy, retrying, retrying_async

__version__ = "0.1.0"

__all__ = [
    "AppendRefusedError",
    "BatchTooLargeError",
    "Change",
    "CheckIsOffError",
    "ConcurrentUseError",
    "FencepostError",
    "ForeignRecordError",
    "InDoubtError",
    "LoadChangedError",
    "LoadPositionLostError",
    "LoadTakenOverError",
    "LockHeldError",
    "LockLostError",
    "LogBusyError",
    "LogRecord",
    "NotAtEndError",
    "NotLeaderError",
    "OffsetMismatchError",
    "OffsetViolationError",
    "OutcomeUnknownError",
    "PartitionCountChangedError",
    "PartitionExpansion",
    "PartitionRequiredError",
    "PositionLostError",
    "Record",
    "RetryPolicy",
    "TransactionAbortedError",
    "TransactionConflictError",
    "VersionMismatchError",
    "Waiting",
    "WriterFencedError",
    "jump_hash",
    "partition_expansions",
    "retrying",
    "retrying_async",
]
