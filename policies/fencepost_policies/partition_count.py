"""Partition counts (KIP-253): append only records that were placed with the topic's current partition count.

A count stated by the producer is exact. A producer without one placed its records at send(), and may have got another
count since. With the topic's `partitioner`, the keys show it. Otherwise the count in its last Metadata response is
used, which is a guess.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fencepost_policies.append import (
    INVALID_PARTITIONS,
    INVALID_RECORD,
    POLICY_VIOLATION,
    Append,
    Check,
    Refusal,
    copied_headers,
    where,
)
from fencepost_policies.append_policy import AppendCheck, Choice
from fencepost_policies.fields import RecordHeader
from fencepost_policies.partitioners import Partitioner, partition_for
from fencepost_policies.values import value

CHECK_PARTITION_COUNT: Final = Choice(
    name="fencepost.check.partition.count",
    settings={each.value: each for each in Check},
    default=Check.OFF.value,
    documentation=(
        "Refuse producers with an outdated partition count (KIP-253). With true, a batch that states the count "
        "used to place its keys (record header fencepost-partition-count) is refused if the topic has another "
        "count. A batch without it is checked by fencepost.partitioner, or by the count in its client's last "
        "Metadata response. With required, a batch without it is refused."
    ),
)
PARTITIONER: Final = Choice(
    name="fencepost.partitioner",
    settings={"none": None, **{each.value: each for each in Partitioner}},
    default="none",
    documentation=(
        "How producers place keyed records, for fencepost.check.partition.count=true. During the grace period "
        "after an expansion, keys of batches without a partition count are hashed here, and a batch with a "
        "misplaced key is refused. murmur2: Java, kafka-python, aiokafka, librdkafka's murmur2_random; crc32: "
        "librdkafka's default; fnv1a: librdkafka's fnv1a_random and Sarama. Not for topics whose producers choose "
        "partitions in any other way."
    ),
)


class PartitionCount(AppendCheck[Check]):
    """`true` checks a stated count if there is one, `required` demands one. Checked inside the append barrier."""

    config = CHECK_PARTITION_COUNT
    more_configs = (PARTITIONER,)
    reads = (RecordHeader.PARTITION_COUNT,)
    reasons = (
        "invalid_partition_count",
        "misplaced_key",
        "partition_count_required",
        "partition_count_contradiction",
        "header_unreadable",
    )


@value
class PartitionFacts:
    """State of the topic, and what replaces a missing partition count.

    `count`: its partition count. `declared`: the count that the request states for all its batches of the topic.
    `partitioner`, `keys`: how its producers place keys, and the batch's keys in order, during the post-expansion grace
    period; else None. `served`: the count last sent to this client, None if unknown.
    """

    count: int
    declared: int | None = None
    partitioner: Partitioner | None = None
    keys: Iterable[bytes | None] | None = None
    served: int | None = None


def check_count(append: Append, setting: Check, of: PartitionFacts) -> Refusal | None:
    if setting is Check.OFF:
        return None
    stated = append.partition_count
    if stated is not None and of.declared is not None and stated != of.declared:
        return Refusal(
            INVALID_RECORD,
            "partition_count_contradiction",
            f"PARTITION_COUNT_CONTRADICTION {where(append)}: record header has {stated}, request has {of.declared}",
        )
    stated = of.declared if stated is None else stated
    if stated is not None:
        return None if stated == of.count else invalid_partition_count(append, stated, of.count)
    if setting is Check.REQUIRED:
        return Refusal(
            POLICY_VIOLATION,
            "partition_count_required",
            f"PARTITION_COUNT_REQUIRED {where(append)} actual={of.count}: this topic has "
            "fencepost.check.partition.count=required, so the first record of every batch must carry the partition "
            f"count used to place its key, in the record header fencepost-partition-count{copied_headers(append)}",
        )
    if of.partitioner is not None:
        return _misplaced(append, of, of.partitioner)
    if of.served is not None and of.served < of.count:
        return invalid_partition_count(append, of.served, of.count)
    return None


def invalid_partition_count(append: Append, expected: int, actual: int) -> Refusal:
    """Refusal of a batch placed with `expected` partitions when there are `actual`."""
    message = f"INVALID_PARTITION_COUNT {where(append)} expected={expected} actual={actual}"
    return Refusal(INVALID_PARTITIONS, "invalid_partition_count", message)


def _misplaced(append: Append, of: PartitionFacts, partitioner: Partitioner) -> Refusal | None:
    for record, key in enumerate(of.keys or ()):
        belongs = partition_for(partitioner, key, of.count)
        if belongs is not None and belongs != append.partition:
            return Refusal(
                INVALID_PARTITIONS,
                "misplaced_key",
                f"MISPLACED_KEY {where(append)} record={record} belongs={belongs} actual={of.count}: of "
                f"{of.count} partitions, its key is placed on another one by {partitioner.value}",
            )
    return None
