"""Partition counts (KIP-253): append only records that were placed with the topic's current partition count.

A count stated by the producer is exact. A producer without one placed its records at send(), and may have got another
count since. With the topic's `partitioner`, the keys show it. Otherwise the count in its last Metadata response is
used, which is a guess.
"""

from __future__ import annotations

from collections.abc import Iterable

from fencepost_policies.append import INVALID_PARTITIONS, INVALID_RECORD, POLICY_VIOLATION, Append, Check, Refusal
from fencepost_policies.partitioners import Partitioner, partition_for
from fencepost_policies.values import value


@value
class CountFacts:
    """State of the topic, and what replaces a missing count.

    `count`: its partition count. `partitioner`, `keys`: how its producers place keys, and the batch's keys in order,
    during the post-expansion grace period; else None. `served`: the count last sent to this client, None if unknown.
    """

    check: Check
    count: int
    partitioner: Partitioner | None = None
    keys: Iterable[bytes | None] | None = None
    served: int | None = None


def check_partition_count(append: Append, declared: int | None, facts: CountFacts) -> Refusal | None:
    """`declared`: by the request, for all its batches of the topic; `append.partition_count`: by the batch."""
    if facts.check is Check.OFF:
        return None
    stated = append.partition_count
    if stated is not None and declared is not None and stated != declared:
        return Refusal(
            INVALID_RECORD,
            "partition_count_contradiction",
            f"PARTITION_COUNT_CONTRADICTION {_where(append)}: record header has {stated}, request has {declared}",
        )
    stated = declared if stated is None else stated
    if stated is not None:
        return None if stated == facts.count else invalid_partition_count(append, stated, facts.count)
    if facts.check is Check.REQUIRED:
        return Refusal(
            POLICY_VIOLATION,
            "partition_count_required",
            f"PARTITION_COUNT_REQUIRED {_where(append)} actual={facts.count}: this topic has "
            "fencepost.check.partition.count=required, so the first record of every batch must carry the partition "
            "count used to place its key, in the record header fencepost-partition-count",
        )
    if facts.partitioner is not None:
        return _misplaced(append, facts, facts.partitioner)
    if facts.served is not None and facts.served < facts.count:
        return invalid_partition_count(append, facts.served, facts.count)
    return None


def invalid_partition_count(append: Append, expected: int, actual: int) -> Refusal:
    """Refusal of a batch placed with `expected` partitions when there are `actual`."""
    message = f"INVALID_PARTITION_COUNT {_where(append)} expected={expected} actual={actual}"
    return Refusal(INVALID_PARTITIONS, "invalid_partition_count", message)


def _misplaced(append: Append, facts: CountFacts, partitioner: Partitioner) -> Refusal | None:
    for record, key in enumerate(facts.keys or ()):
        belongs = partition_for(partitioner, key, facts.count)
        if belongs is not None and belongs != append.partition:
            return Refusal(
                INVALID_PARTITIONS,
                "misplaced_key",
                f"MISPLACED_KEY {_where(append)} record={record} belongs={belongs} actual={facts.count}: of "
                f"{facts.count} partitions, its key is placed on another one by {partitioner.value}",
            )
    return None


def _where(append: Append) -> str:
    return f"topic={append.topic} partition={append.partition}"
