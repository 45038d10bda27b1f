"""Commit tags: the Spark sink's only stored state, in a header of the last record of each append.

A log is truncated only between batches, so the last record of a partition has a commit tag while no other client
writes to it. A new driver reads the sink's position from the last commit tag of each partition:

    began    offset at or below the first append of its micro-batch in this partition
    before   `began` of the sink's previous micro-batch in this partition; -1 if there was none

So the micro-batches of a partition form a linked list from newest to oldest.

`task_appends` avoids reads. It counts, per task of this run, the appends between the driver's snapshot and this append.
A task that finds the log longer than expected reads the last batch only: its `task_appends` shows whether the unread
part contains appends of that task.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from fencepost.spark.errors import SinkError

HEADER = "fencepost-sink"
VERSION = 1
#: With more tasks in one partition, `task_appends` is omitted, so that a commit tag stays small.
TASK_APPENDS_MAX = 400


@dataclass(frozen=True, slots=True)
class CommitTag:
    """A commit tag. `query`: Spark's id of the streaming query, "" for `df.write`; `run`: the driver's snapshot before
    the append; `attempt`: random id of a task attempt; `append`: append number per attempt and partition; `over`:
    partition count used for the rows; `created_partitions`: partition count at the start of the batch; `arranged`: all
    rows of a partition were in one task; `at`: time of the snapshot, ms; `task_appends`: {task: appends}, None if too
    long or unknown; `has_unmatched`: at the append, the log had rows of another run under this task's number that the
    task did not have; `done`: on the last append of a load, the total of its rows (`totals.py`)."""

    sink: str
    query: str
    run: str
    batch: int
    task: int
    attempt: str
    append: int
    began: int
    before: int
    over: int
    created_partitions: int
    arranged: bool
    at: int
    task_appends: dict[int, int] | None
    has_unmatched: bool = False
    done: tuple[int, int] | None = None

    def encode(self) -> bytes:
        stated: dict[str, Any] = {"v": VERSION}
        for each in fields(self):
            stated[each.name] = getattr(self, each.name)
        if not self.has_unmatched:
            del stated["has_unmatched"]
        if self.done is None:
            del stated["done"]
        return json.dumps(stated, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, header: bytes) -> CommitTag:
        """Raises SinkError for an unreadable commit tag: ignoring it could append rows twice."""
        try:
            stated = json.loads(header)
            version = stated.pop("v")
            if version == VERSION:
                if stated["task_appends"] is not None:
                    stated["task_appends"] = {int(task): int(count) for task, count in stated["task_appends"].items()}
                stated.setdefault("has_unmatched", False)
                stated["done"] = tuple(stated["done"]) if "done" in stated else None
                return cls(**{each.name: stated[each.name] for each in fields(cls)})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SinkError(f"cannot read a record header {HEADER!r} in the topic: {header[:80]!r}") from error
        raise SinkError(
            f"the topic has rows of sink version {version}, and this is version {VERSION} (write "
            "with a newer fencepost)"
        )


def own_commit_tag(logged: Any, sink: str) -> CommitTag | None:
    """The commit tag of a batch of this sink; None for other batches."""
    if logged is None or logged.commit_tag is None:
        return None
    commit_tag = CommitTag.decode(logged.commit_tag)
    return commit_tag if commit_tag.sink == sink else None
