"""Commit tags: the Spark sink's only stored state, in a header of the last record of each append.

A log is truncated only between batches, so the last record of a partition has a commit tag while no other client
writes to it. A new driver reads the sink's position from the last commit tag of each partition:

    rows     how many rows of its micro-batch are in this partition, and their running digest (`rows.py`)
    began    offset at or below the first append of its micro-batch in this partition
    before   `began` of the sink's previous micro-batch in this partition; -1 if there was none

So the micro-batches of a partition form a linked list from newest to oldest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fencepost.spark.errors import SinkError

HEADER = "fencepost-sink"
VERSION = 2


class Prefix(NamedTuple):
    """The first rows of a sequence: their number and their running digest."""

    rows: int = 0
    digest: int = 0


@dataclass(frozen=True, slots=True)
class CommitTag:
    """A commit tag. `query`: Spark's id of the streaming query, "" for `df.write`; `run`: the driver's snapshot before
    the append; `counts`: the partition counts by which rows of the batch were placed, the last one for this append;
    `at`: time of the snapshot, ms; `prefix`: the rows of the batch in this partition, if they have an order; `last`:
    the batch has no more of them; `done`: the load has no more rows in any partition."""

    sink: str
    query: str
    run: str
    batch: int
    began: int
    before: int
    counts: tuple[int, ...]
    at: int
    prefix: Prefix | None = None
    last: bool = False
    done: bool = False
    is_old: bool = False

    def encode(self) -> bytes:
        stated = {"v": VERSION, **asdict(self)}
        return json.dumps({name: each for name, each in stated.items() if each}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, header: bytes, sink: str | None = None) -> CommitTag | None:
        """None if it is not of this sink. Raises SinkError for an unreadable one: ignoring it could append rows
        twice."""
        try:
            stated: dict[str, Any] = {"query": "", "batch": 0, "began": 0, "before": 0, "at": 0, **json.loads(header)}
            version = stated.pop("v")
            if sink not in (None, stated["sink"]):
                return None
            if version == VERSION:
                stated["counts"] = tuple(stated["counts"])
                stated["prefix"] = Prefix(*stated["prefix"]) if "prefix" in stated else None
                return cls(**stated)
            if version == 1:
                kept = {name: stated[name] for name in ("sink", "query", "run", "batch", "began", "before", "at")}
                return cls(**kept, counts=(), is_old=True)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SinkError(f"cannot read a record header {HEADER!r} in the topic: {header[:80]!r}") from error
        raise SinkError(
            f"the topic has rows of sink version {version}, and this is version {VERSION} (write with a newer "
            "fencepost)"
        )


def own_commit_tag(logged: Any, sink: str) -> CommitTag | None:
    """The commit tag of a batch of this sink; None for other batches."""
    return None if logged is None or logged.commit_tag is None else CommitTag.decode(logged.commit_tag, sink)
