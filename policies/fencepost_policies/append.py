"""Input and output of a check: an append, facts, a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from fencepost_policies.fields import Field
from fencepost_policies.values import value

V = TypeVar("V")


class Check(Enum):
    """Value of `fencepost.check.expected.offsets` or `fencepost.check.partition.count`."""

    OFF = "false"
    ON = "true"
    REQUIRED = "required"


@value
class Contradiction:
    """A record whose expected offset contradicts that of the records before it.

    `record`: its index in the batch; `expected`: the offset in its header; `offset_delta`: its distance from the first
    record of the batch.
    """

    record: int
    expected: int
    offset_delta: int


@value
class Unreadable:
    """A fencepost record header that cannot be decoded: index of the record, name of the header, reason."""

    record: int
    header: str
    reason: str


@value
class Append:
    """One record batch for one partition, with what its producer stated.

    `expected_base_offset`: expected offset of the first record; None if not stated. It may be negative if a later
    record states too small an offset: such a batch never fits. `max_timestamp_ms`: Unix milliseconds, -1 without one.
    `copied_from`: what the first header is bound to that does not count here: another topic, partition or cluster. None
    without such. `fields`: those that policies of the topic read; None without such.
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
    copied_from: str | None = None
    fields: Mapping[Field[Any], Any] | None = None

    def field(self, field: Field[V]) -> V:
        """Of `reads` of a policy of the topic."""
        assert self.fields is not None
        found: V = self.fields[field]
        return found


@value
class Facts:
    """What is known at the time of the check. `now_ms`: Unix milliseconds."""

    now_ms: int


@value
class Refusal:
    """The proxy's own answer: this attempt appended nothing of the batch.

    `error_code`: a Kafka error code. `base_offset`: the log end if the refusal states it, else -1.
    `log_append_time_ms`: of a batch that was appended at another offset, else -1. By these two, clients that drop the
    message distinguish the kinds of POLICY_VIOLATION (docs/contract.md).
    """

    error_code: int
    reason: str
    message: str
    base_offset: int = -1
    log_start_offset: int = -1
    log_append_time_ms: int = -1


#: Error codes of checks, with Kafka's names (org.apache.kafka.common.protocol.Errors).
CLUSTER_AUTHORIZATION_FAILED = 31
POLICY_VIOLATION = 44
INVALID_TIMESTAMP = 32
INVALID_PARTITIONS = 37
INVALID_RECORD = 87


def header_unreadable(append: Append) -> Refusal | None:
    """Refusal of a batch with a fencepost record header that cannot be decoded."""
    bad = append.unreadable
    if bad is None:
        return None
    record = f"{where(append)} record={bad.record} header={bad.header}"
    return Refusal(INVALID_RECORD, "header_unreadable", f"HEADER_UNREADABLE {record}: {bad.reason}")


def copied_headers(append: Append) -> str:
    """For the refusal of a batch without a header that it must have: why those that it has do not count."""
    if append.copied_from is None:
        return ""
    return (
        f" (its Fencepost headers are copied headers: they were made for {append.copied_from} and do not count here; "
        "remove them, then state what is meant here)"
    )


def where(append: Append) -> str:
    """The topic and the partition, as in the text of a refusal."""
    return f"topic={append.topic} partition={append.partition}"
