"""The end of a load: the driver appends the last rows, and the last commit tag states the total of all rows.

A record that is no row would be visible to consumers, so the total is in the commit tag of a row, and some tasks defer
their last row. At the commit, the driver continues their attempts. That is as safe as in the task: the attempt appends
at the end that it knows, or reads first (`task.py`). The append with the total is the last, so a log with a total lacks
no row:

    crash before it       the next run finds all rows but the deferred ones, and defers one of these again
    crash after it        the next run is done: tasks compute the total of their rows, and read nothing
    zombie driver         its append is refused; it reads the rows of its successor, and finds its own among them
    load without rows     no total: there is nothing to append twice
    several partitions    one partition has the total; the driver's snapshot reads all

Other rows under the sink.id of a finished load have another total (`totals.py`) and are refused.

Nothing in this file does I/O: `Log` and `Clock` do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fencepost.spark.appender import Appender
from fencepost.spark.errors import SinkError
from fencepost.spark.interfaces import Clock, Framing, Log, TopicIdentity, TopicPartition
from fencepost.spark.refusals import Refusals, name_of
from fencepost.spark.resumer import Resumer
from fencepost.spark.totals import NO_ROWS, Total
from fencepost.spark.write import Deferred, Outcome, Patience, Plan, Write, Written


def refuse_recreated(sink: str, topic_ids: Mapping[str, str], topics: Mapping[str, TopicIdentity]) -> None:
    """Raises SinkError if a topic is not the one of the driver's snapshot: rows were deleted with that one."""
    for topic, identity in topics.items():
        if topic_ids[topic] != identity.id:
            raise SinkError(
                f"topic {topic} was deleted and created again while load {sink!r} was written to it (run it again, "
                "which appends the missing rows)"
            )


def close(
    plan: Plan, outcomes: Collection[Outcome], *, log: Log, framing: Framing, clock: Clock
) -> list[tuple[TopicPartition, Written]]:
    """Append the deferred rows and the total. Returns what was written. Raises SinkError."""
    total = NO_ROWS
    for outcome in outcomes:
        total = total.plus(outcome.total)
    for outcome in outcomes:
        if outcome.done is not None and outcome.done != total:
            raise _other_rows(plan, Total(*outcome.done), total, appended=not outcome.was_done)
    deferred = sorted((each.deferred for each in outcomes if each.deferred is not None), key=lambda each: each.task)
    ends: dict[TopicPartition, int] = {}
    written = []
    for each in deferred:
        at, completion = each.topic_partition, total if each is deferred[-1] else None
        end = ends.get(at, _end_without_other_runs(each, outcomes))
        now = _append(plan, each, completion, end, log=log, framing=framing, clock=clock)
        ends[at] = now.end if now.appended == now.end - end else -1
        written.append((at, now))
    return written


def _end_without_other_runs(deferred: Deferred, outcomes: Collection[Outcome]) -> int:
    """The log end up to which these tasks appended all records since the driver's snapshot; -1 if others did too."""
    written = [
        each.partitions[deferred.topic_partition] for each in outcomes if deferred.topic_partition in each.partitions
    ]
    end = max(each.end for each in written)
    return end if end - deferred.begin == sum(each.appended for each in written) else -1


def _append(
    plan: Plan, deferred: Deferred, completion: Total | None, end: int, *, log: Log, framing: Framing, clock: Clock
) -> Written:
    """`end`: a log end below which other runs appended nothing since the driver's snapshot, or -1."""
    write = Write(plan, deferred.probed, "", 0, deferred.task, deferred.attempt, log, framing, clock)
    write.over, write.created_counts, write.has_unmatched = (
        dict(deferred.over),
        dict(deferred.created_counts),
        deferred.has_unmatched,
    )
    write.at_commit, write.completion = True, completion
    # A copy: Spark may commit twice.
    appends = deferred.partition.task_appends
    partition = replace(
        deferred.partition,
        queue=deferred.partition.queue.copy(),
        task_appends=None if appends is None else dict(appends),
        found=0,
        appended=0,
        first=-1,
        tries=0,
        not_before=0.0,
    )
    if end > partition.end:
        partition.end, partition.task_appends = end, None
    partition.put(deferred.rows)
    write.partitions[deferred.topic_partition] = partition
    refusals, patience = Refusals(write), Patience(write)
    resumer = Resumer(write, refusals, patience, {})
    appender = Appender(write, resumer, refusals, patience)
    while appender.pending():
        appender.pump(flush=True)
        if appender.pending():
            patience.wait()
    if resumer.found_foreign:
        # Other tasks may have found the same copy of a row, and compare no more.
        raise SinkError(
            f"{name_of(deferred.topic_partition)}: another run of load {plan.sink!r} appended its last rows at the "
            "same time (run it again, which compares them)"
        )
    return Written(partition.found, partition.appended, partition.first, partition.end)


def _other_rows(plan: Plan, done: Total, total: Total, *, appended: bool) -> SinkError:
    differ = ", not the same" if done.rows == total.rows else ""
    so_far = "some of them may be in the topic" if appended else "nothing was appended"
    return SinkError(
        f"load {plan.sink!r} is finished: it has written {done.rows} rows, and the data now has {total.rows}{differ}; "
        f"{so_far} (a finished load needs nothing; for other rows use another sink.id)"
    )
