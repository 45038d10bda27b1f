"""The snapshot file of a table: JSON lines, replaced atomically, with a checksum in the last line.

The first line states the partition and the last record: its offset and write id. A reader continues at that record. If
the log has another one there, as after the topic was created again, the snapshot is not of this log.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FORMAT = "fencepost-table-snapshot/1"


class Entry(NamedTuple):
    """The value of a key. `version`: the offset of its record."""

    value: bytes
    version: int


class Snapshot(NamedTuple):
    """`offset`, `write_id`: of the last record before it."""

    offset: int
    write_id: bytes
    entries: Mapping[str, Entry]


def save(path: Path, topic: str, partition: int, snapshot: Snapshot) -> None:
    """Replace the file. A crash leaves the old one. Raises OSError."""
    head = {"format": FORMAT, "topic": topic, "partition": partition, "offset": snapshot.offset}
    new = path.with_name(f"{path.name}.new")
    checksum = hashlib.sha256()
    with new.open("wb") as file:

        def add(line: object) -> None:
            text = json.dumps(line).encode() + b"\n"
            checksum.update(text)
            file.write(text)

        add({**head, "write_id": snapshot.write_id.hex(), "entries": len(snapshot.entries)})
        for key, (value, version) in snapshot.entries.items():
            add([key, base64.b64encode(value).decode(), version])
        file.write(json.dumps({"sha256": checksum.hexdigest()}).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def load(path: Path, topic: str, partition: int) -> Snapshot:
    """Raises OSError, or ValueError if the file is damaged or of another partition."""
    entries: dict[str, Entry] = {}
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        try:
            checksum.update(first := file.readline())
            head = json.loads(first)
            where = head["format"], head["topic"], head["partition"]
            if where != (FORMAT, topic, partition):
                raise ValueError(f"it is {where[0]} of {where[1]}-{where[2]}")
            for _ in range(head["entries"]):
                checksum.update(line := file.readline())
                key, value, version = json.loads(line)
                entries[key] = Entry(base64.b64decode(value), version)
            if json.loads(file.readline()) != {"sha256": checksum.hexdigest()}:
                raise ValueError("the checksum differs")
            return Snapshot(head["offset"], bytes.fromhex(head["write_id"]), entries)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it is no snapshot of a table ({error!r})") from error
