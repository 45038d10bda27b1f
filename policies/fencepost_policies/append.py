"""What a policy sees and says: an append, the facts about its partition, a refusal.

This module imports nothing of the proxy. A policy is a pure function of an `Append` and the `Facts` it asked
for, so it can be read, tested and argued about without a socket in sight.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import ClassVar, Protocol

from fencepost_policies.values import value


class Check(Enum):
    """Value of a topic config that switches a check on (`check.expected.offsets`, `check.partition.count`)."""

    OFF = "false"
    ON = "true"
    REQUIRED = "required"


@value
class Contradiction:
    """A record whose own expectation cannot hold if those before it do.

    `record` is its index in the batch, `expected` the offset its header asks for, `offset_delta` its distance
    from the batch's first record.
    """

    record: int
    expected: int
    offset_delta: int


@value
class Unreadable:
    """A record header of ours that cannot be read: which record, which header, what is wrong with it."""

    record: int
    header: str
    reason: str


@value
class Append:
    """One record batch on its way to one partition: what its producer said about it.

    `expected_base_offset` is the offset the batch's first record must get, None where nothing was said. It may be
    negative when a record far into a batch asks for an offset that is too small: such a batch can never fit.
    Timestamps are Unix milliseconds, -1 where a record has none.
    """

    topic: str
    partition: int
    record_count: int
    expected_base_offset: int | None
    contradiction: Contradiction | None = None
    unreadable: Unreadable | None = None
    partition_count: int | None = None
    write_id: bytes | None = None
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    transactional: bool = False
    max_timestamp_ms: int = -1


class Fact(Enum):
    """What a policy may ask to be told."""

    CHECK_EXPECTED_OFFSETS = auto()
    LOG_END_OFFSET = auto()
    OLDEST_TIMESTAMP_MS = auto()


@value
class Facts:
    """What is known about the partition at the moment of the check; None where it is not known.

    `log_end_offset` – the offset the next record will get. None while Kafka itself is the one to compare.
    `oldest_timestamp_ms` – a stamped batch must carry a `max_timestamp_ms` above this. None where record
    timestamps do not matter (LogAppendTime, or a batch that is not stamped).
    """

    check_expected_offsets: Check = Check.OFF
    log_end_offset: int | None = None
    log_start_offset: int = -1
    oldest_timestamp_ms: int | None = None


@value
class Refusal:
    """An answer of our own: nothing of the batch was appended by the send it answers.

    `error_code` is a Kafka error code. `base_offset` is the log end where the refusal tells it, else -1.
    """

    error_code: int
    reason: str
    message: str
    base_offset: int = -1
    log_start_offset: int = -1


class Policy(Protocol):
    """Says yes (None) or no to an append. Pure: no clock, no I/O, no memory."""

    needs: ClassVar[frozenset[Fact]]

    def check(self, append: Append, facts: Facts) -> Refusal | None: ...


#: Error codes that policies answer with. The names are Kafka's (org.apache.kafka.common.protocol.Errors).
CLUSTER_AUTHORIZATION_FAILED = 31
POLICY_VIOLATION = 44
INVALID_TIMESTAMP = 32
INVALID_PARTITIONS = 37
INVALID_RECORD = 87


def header_unreadable(append: Append) -> Refusal | None:
    """The refusal of a batch in which a record header of ours cannot be read."""
    bad = append.unreadable
    if bad is None:
        return None
    where = f"topic={append.topic} partition={append.partition} record={bad.record} header={bad.header}"
    return Refusal(INVALID_RECORD, "header_unreadable", f"HEADER_UNREADABLE {where}: {bad.reason}")
