"""A key-value store in one partition: docs/recipes/table.md has the format and the guarantee.

The version of a key is the offset of its record. A put is decided on the whole log, and appended only if the log still
ends there. A deletion is a record with a value header, not a tombstone: a compacted topic keeps it, so a reader that
continues from an old snapshot cannot miss it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from fencepost._log_writer import LogWriterBase
from fencepost._steps import Pause, Steps, now
from fencepost.errors import OffsetMismatchError, PositionLostError, VersionMismatchError
from fencepost.recipes._recipe import Method, Recipe
from fencepost.recipes._snapshot import Entry, Snapshot, load, save
from fencepost.records import LogRecord, Record, write_id_of

PUT, DELETE = "put", "delete"
#: The version of a key without a value.
ABSENT = -1


class _OtherLog(Exception):
    """The log has another record than the snapshot's last one at its offset."""


class TableBase(Recipe):
    """A key-value store whose versions are offsets. Puts and deletes can state the version that they expect.

    `log`: a LogWriter that nothing else uses, of a topic with `fencepost.check.expected.offsets=required`, compacted or
    with `retention.ms=-1`. `watch(key, entry)` is called for each change in the order of the log, with None for a
    deletion. `snapshot`: a file that `save` wrote. It is used if it belongs to this log; `snapshot_ignored` says why it
    was not. All entries are in memory, `entries_max` at most. See docs/recipes/table.md.
    """

    FORMAT = "table/1"

    def __init__(
        self,
        log: LogWriterBase,
        *,
        watch: Callable[[str, Entry | None], None] = lambda key, entry: None,
        snapshot: Path | None = None,
        entries_max: int = 1_000_000,
    ) -> None:
        super().__init__(log)
        self._watch, self._entries_max = watch, entries_max
        self._entries: dict[str, Entry] = {}
        #: Offset and write id of the last record that was read or appended.
        self._last: tuple[int, bytes] | None = None
        #: The snapshot's last record, until it was found in the log.
        self._anchor: tuple[int, bytes] | None = None
        self.snapshot_ignored: str | None = None
        if snapshot is not None and snapshot.exists():
            try:
                loaded = load(snapshot, log.topic, log.partition)
            except ValueError as error:
                self.snapshot_ignored = f"{snapshot}: {error}"
            else:
                self._entries = dict(loaded.entries)
                self._last = self._anchor = loaded.offset, loaded.write_id
        log.start_at(0 if self._anchor is None else self._anchor[0])

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The entries as of the last read. Other processes may have changed them since."""
        return MappingProxyType(self._entries)

    def _read_to_end(self) -> Steps[None]:
        """Apply the unread changes, and call `watch` for each. Raises the errors of LogWriter.read_to_end."""
        if self._anchor is None:
            return (yield from self._read(self._passed))
        try:
            yield from self._read(self._passed)
            why = None if self._anchor is None else "the log has no record at its offset"
        except _OtherLog:
            why = "the log has another record at its offset"
        except PositionLostError:
            why = "its offset is outside the log"
        if why is not None:
            self.snapshot_ignored = f"the snapshot is not of this log: {why}"
            self._entries, self._last, self._anchor = {}, None, None
            self._log.start_at(0)
            yield from self._read(self._passed)
        return None

    read_to_end = Method(_read_to_end)

    def _get(self, key: str) -> Steps[Entry | None]:
        """The entry of `key` at the log end, None if it has none."""
        yield from self._read_to_end()
        return self._entries.get(key)

    get = Method(_get)

    def _put(self, key: str, value: bytes, version: int | None = None) -> Steps[int]:
        """Set `key`, and return its new version. `version`: the one that it must have now, ABSENT (-1) for none.

        Raises VersionMismatchError: nothing was appended. Raises OffsetMismatchError if other writers were first for
        `retry.total_seconds`, ValueError beyond `entries_max`, and the errors of LogWriter. After InDoubtError, `get`
        shows whether it was done.
        """
        return self._changed_to(PUT, key, value, version)

    put = Method(_put)

    def _delete(self, key: str, version: int | None = None) -> Steps[int]:
        """Delete `key`, as `put`. Returns the offset of the deletion."""
        return self._changed_to(DELETE, key, b"", version)

    delete = Method(_delete)

    def _save(self, path: Path) -> Steps[None]:
        """Write a snapshot of the entries to a file, for a fast start. Raises OSError."""
        yield from self._read_to_end()
        if self._last is not None:
            save(path, self._log.topic, self._log.partition, Snapshot(*self._last, self._entries))

    save = Method(_save)

    def _changed_to(self, kind: str, key: str, value: bytes, version: int | None) -> Steps[int]:
        policy = self._log.retry
        deadline = now() + policy.total_seconds
        for tries in itertools.count(1):
            if not self._log.at_end or version not in {None, self._version(key)}:
                yield from self._read_to_end()
            if version is not None and self._version(key) != version:
                raise VersionMismatchError(self._log.topic, self._log.partition, key, version, self._version(key))
            if kind == PUT and key not in self._entries and len(self._entries) >= self._entries_max:
                raise ValueError(f"{key!r} is not put: the table has {self._entries_max} entries (raise entries_max)")
            try:
                offset = yield from self._write([Record(value, key.encode(), (self._header(kind),))])
            except OffsetMismatchError:
                pause = policy.jittered(tries - 1) if tries > 1 else 0.0
                if now() + pause >= deadline:
                    raise
            else:
                self._last = offset, self._log.last_write_id or b""
                self._set(key, Entry(value, offset) if kind == PUT else None)
                return offset
            yield Pause(pause)
        raise AssertionError("unreachable")

    def _version(self, key: str) -> int:
        entry = self._entries.get(key)
        return ABSENT if entry is None else entry.version

    def _set(self, key: str, entry: Entry | None) -> None:
        if entry is None:
            self._entries.pop(key, None)
        else:
            self._entries[key] = entry
        self._watch(key, entry)

    def _passed(self, record: LogRecord) -> None:
        at = record.offset, write_id_of(record) or b""
        if self._anchor is not None:
            if at != self._anchor:
                raise _OtherLog
            self._anchor = None
            return  # it is in the snapshot
        kind = self._kind(record)
        if kind not in {PUT, DELETE} or record.key is None:
            raise self._foreign(record, f"it is neither `{self.FORMAT} {PUT}` nor `{self.FORMAT} {DELETE}`")
        self._set(self._key(record), Entry(record.value or b"", record.offset) if kind == PUT else None)
        self._last = at
