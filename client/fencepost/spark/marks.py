"""What the sink stores in the log, and nowhere else: one header on the last record of each of its batches.

A log is only ever truncated between batches, so the last record of a partition has a mark for as long as nobody else
writes to it. From the last mark of each partition a new driver knows where the sink stands:

    began    where the micro-batch of this mark began in this partition, or further down: no chunk of it lies below
    before   the same of the sink's micro-batch before it in this partition; -1 if there was none

so the micro-batches of a partition form a chain that can be walked back.

`seen` spares reading. It says how many chunks of which task of this run lie between the driver's look and this chunk.
Who finds the log longer than expected reads the last batch only, and knows from its `seen` whether anything of its own
task is among what it has not read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from fencepost.spark.errors import SinkError

HEADER = "fencepost-sink"
VERSION = 1
#: Above that many tasks in one partition they are not listed any more: a mark stays small beside its batch.
SEEN_MAX = 400


@dataclass(frozen=True, slots=True)
class Mark:
    """`query` – Spark's id of the streaming query, "" for `df.write`; `run` – the driver's look that the chunk was
    written after; `attempt` – random, of one attempt of the task; `chunk` – counted per attempt and partition;
    `over` – the partition count that rows were placed over, `born` – the one when the batch was begun; `arranged` – all
    rows of a partition were in one task; `at` – time of the driver's look, ms; `seen` – task → chunks, None where that
    would be too long or is not known; `doubtful` – when it was appended, rows of another run lay under the task's
    number that it did not have."""

    sink: str
    query: str
    run: str
    batch: int
    task: int
    attempt: str
    chunk: int
    began: int
    before: int
    over: int
    born: int
    arranged: bool
    at: int
    seen: dict[int, int] | None
    doubtful: bool = False

    def encode(self) -> bytes:
        said: dict[str, Any] = {"v": VERSION}
        for each in fields(self):
            said[each.name] = getattr(self, each.name)
        if not self.doubtful:
            del said["doubtful"]
        return json.dumps(said, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, header: bytes) -> Mark:
        """Raises SinkError for what this version cannot read: to take it for somebody else's would write rows again."""
        try:
            said = json.loads(header)
            version = said.pop("v")
            if version == VERSION:
                if said["seen"] is not None:
                    said["seen"] = {int(task): int(count) for task, count in said["seen"].items()}
                said.setdefault("doubtful", False)
                return cls(**{each.name: said[each.name] for each in fields(cls)})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SinkError(f"cannot read a record header {HEADER!r} in the topic: {header[:80]!r}") from error
        raise SinkError(
            f"the topic has rows of sink version {version}, and this is version {VERSION} (write "
            "with a newer fencepost)"
        )
