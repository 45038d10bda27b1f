"""The end of a load: the driver appends the last rows, and the last commit tag says that the load is finished.

The last append of each partition is flagged, so other rows are refused there afterwards. A partition that had no row
has no flag: for these, another flag says that no partition has more rows. A record that is no row would be visible to
consumers, so some tasks defer their last row, and the driver appends it at the commit, as its task would have done. The
append with the flag is the last, so a log with the flag lacks no row:

    crash before it       the next run finds all rows but the deferred ones, and defers one of these again
    zombie driver         its append is refused; it finds the row that its successor appended
    no flag               none of these tasks had a missing row: later rows in an empty partition would be appended

Nothing in this file does I/O: `Log` and `Clock` do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fencepost.spark.appender import Appender
from fencepost.spark.errors import SinkError
from fencepost.spark.interfaces import Clock, Framing, Log, TopicIdentity, TopicPartition
from fencepost.spark.refusals import Refusals
from fencepost.spark.resumer import Resumer
from fencepost.spark.write import Deferred, Outcome, Patience, Plan, Write, Written


def refuse_recreated(sink: str, topic_ids: Mapping[str, str], topics: Mapping[str, TopicIdentity]) -> None:
    """Raises SinkError if a topic is not the one of the driver's snapshot: rows were deleted with that one."""
    for topic, identity in topics.items():
        if topic_ids[topic] != identity.id:
            raise SinkError(
                f"topic {topic} was deleted and created again while load {sink!r} was written to it (run it again, "
                "which appends the missing rows)"
            )


def refuse_without_task(sink: str, outcomes: Collection[Outcome]) -> None:
    """Raises SinkError if the log has rows of the batch in a partition of which no task has rows."""
    begun = frozenset[TopicPartition]().union(*(outcome.begun for outcome in outcomes))
    if lacking := begun.difference(*(outcome.partitions for outcome in outcomes)):
        names = ", ".join(f"{topic}-{partition}" for topic, partition in sorted(lacking))
        raise SinkError(
            f"{names}: the topic has rows of this batch of sink {sink!r}, and the data now has none: the source or the "
            "query changed since (go back to the data that began it; for other rows use another sink.id)"
        )


def close(
    plan: Plan, outcomes: Collection[Outcome], *, log: Log, framing: Framing, clock: Clock
) -> list[tuple[TopicPartition, Written]]:
    """Append the deferred rows. Returns what was written. Raises SinkError."""
    deferred = [(each.task, each.deferred) for each in outcomes if each.deferred is not None]
    deferred.sort(key=lambda each: each[0])
    return [
        (each.topic_partition, _append(Write(plan, each.probed, "", 0, task, log, framing, clock), each, index))
        for index, (task, each) in enumerate(deferred, 1 - len(deferred))
    ]


def _append(write: Write, deferred: Deferred, index: int) -> Written:
    """`index`: 0 for the last one."""
    at = deferred.topic_partition
    write.counts, write.ends_load, write.is_sorted = dict(deferred.counts), index == 0, True
    # A copy: Spark may commit twice.
    partition = replace(
        deferred.partition, queue=type(deferred.partition.queue)(), found=0, appended=0, first=-1, tries=0
    )
    partition.not_before = 0.0
    partition.put(deferred.rows)
    write.partitions[at] = partition
    refusals, patience = Refusals(write), Patience(write)
    appender = Appender(write, Resumer(write, refusals, patience), refusals, patience)
    appender.ends = True
    while appender.pending():
        appender.pump(flush=True)
        if appender.pending():
            patience.wait()
    return Written(partition.found, partition.appended, partition.first, partition.end)
