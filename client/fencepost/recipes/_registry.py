"""Names with consecutive numbers, and numbers alone: docs/recipes/registry.md has the formats and the guarantees.

The number of a record is in its header. It is decided on the whole log, and appended only if the log still ends there.
So it follows the number before it, whatever other writers do at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from fencepost._log_writer import LogWriterBase
from fencepost._steps import Pause, Steps, now
from fencepost.errors import InDoubtError, OffsetMismatchError, PositionLostError
from fencepost.recipes._recipe import Method, Recipe, header_of
from fencepost.records import LogRecord, Record, write_id_of

T = TypeVar("T")

NUMBER = "fencepost-number"


class Entry(NamedTuple):
    """A registered name. `number`: from 1 on, in the order of registration; `offset`: of its record."""

    number: int
    value: bytes
    offset: int


class Numbered(Recipe):
    """Records with consecutive numbers."""

    KIND = ""

    def __init__(self, log: LogWriterBase) -> None:
        super().__init__(log)
        #: The greatest number that was read or appended.
        self.last = 0

    def _passed(self, record: LogRecord) -> None:
        if self._kind(record) != self.KIND:
            raise self._foreign(record, f"it has no header `fencepost-recipe: {self.FORMAT} {self.KIND}`")
        try:
            number = int(header_of(record, NUMBER) or b"")
        except ValueError:
            raise self._foreign(record, f"it has no number in the header {NUMBER}") from None
        self._numbered(record, number)
        self.last = number

    def _numbered(self, record: LogRecord, number: int) -> None:
        """Handle the record `number`. Raises ForeignRecordError."""
        raise NotImplementedError

    def _added(self, record: Callable[[], Record | None]) -> Steps[int | None]:
        """Append what `record()` returns, decided at the log end and again if another writer was first. Returns the
        record's offset, None if there is none to append."""
        policy = self._log.retry
        deadline = now() + policy.total_seconds
        for tries in itertools.count(1):
            yield from self._read(self._passed)
            decided = record()
            if decided is None:
                return None
            headers = self._header(self.KIND), (NUMBER, b"%d" % (self.last + 1))
            try:
                offset = yield from self._write([Record(decided.value, decided.key, headers)])
            except OffsetMismatchError:
                pause = policy.jittered(tries)
                if now() + pause >= deadline:
                    raise
            else:
                self.last += 1
                return offset
            yield Pause(pause)
        raise AssertionError("unreachable")


class RegistryBase(Numbered):
    """Names, each with the value of its first writer and a number. Every reader gets the same.

    `log`: a LogWriter that nothing else uses, of a topic with `fencepost.check.expected.offsets=required` whose records
    are never deleted. All names are in memory, `entries_max` at most. See docs/recipes/registry.md.
    """

    FORMAT = "registry/1"
    KIND = "entry"

    def __init__(self, log: LogWriterBase, *, entries_max: int = 1_000_000) -> None:
        super().__init__(log)
        self._entries: dict[str, Entry] = {}
        self._entries_max = entries_max
        log.start_at(0)  # so that a deleted record is an error, and not a name that is free again

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The names that were read or registered. An entry never changes; other writers may have added some."""
        return MappingProxyType(self._entries)

    def _register(self, name: str, value: bytes = b"") -> Steps[Entry]:
        """The entry of `name`: with `value` if this is its first registration, else as it was registered before.

        Repeat it after InDoubtError. Raises OffsetMismatchError if other writers were first for `retry.total_seconds`,
        ValueError if `entries_max` names are registered, and the other errors of LogWriter.
        """
        if name not in self._entries:
            offset = yield from self._added(lambda: self._new(name, value))
            if offset is not None:
                self._entries[name] = Entry(self.last, value, offset)
        return self._entries[name]

    register = Method(_register)

    def _get(self, name: str) -> Steps[Entry | None]:
        """The entry of `name`, None if it is not registered. Reads to the log end for a name that it does not know."""
        if name not in self._entries:
            yield from self._read(self._passed)
        return self._entries.get(name)

    get = Method(_get)

    def _new(self, name: str, value: bytes) -> Record | None:
        if name in self._entries:
            return None
        if len(self._entries) >= self._entries_max:
            raise ValueError(f"{name!r} is not registered: there are {self._entries_max} names (raise entries_max)")
        return Record(value, name.encode())

    def _numbered(self, record: LogRecord, number: int) -> None:
        name = self._key(record)
        if number != self.last + 1 or name in self._entries:
            raise self._foreign(record, f"it registers {name!r} with number {number} after number {self.last}")
        self._entries[name] = Entry(number, record.value or b"", record.offset)


class SequenceBase(Numbered):
    """Numbers from 1 on, each taken once, none left out. The log has what each was taken for.

    `log`: a LogWriter that nothing else uses, of a topic with `fencepost.check.expected.offsets=required` that keeps
    its newest record. See docs/recipes/registry.md.
    """

    FORMAT = "sequence/1"
    KIND = "number"

    def __init__(self, log: LogWriterBase) -> None:
        super().__init__(log)
        #: Appends with unknown outcome: the purpose of each write id; and the numbers of those found in the log.
        self._in_doubt: dict[bytes, bytes] = {}
        self._found: dict[bytes, int] = {}

    def _take(self, purpose: bytes = b"") -> Steps[int]:
        """The next number. `purpose`: what it is for, the value of its record.

        After InDoubtError, repeat it with the same `purpose`: if the number was taken, it is returned. Raises
        OffsetMismatchError if other writers were first for `retry.total_seconds`, and the other errors of LogWriter.
        """
        try:
            offset = yield from self._added(lambda: self._next(purpose))
        except InDoubtError as error:
            self._in_doubt[error.write_id] = purpose
            raise
        if offset is None:
            return self._found.pop(purpose)
        self._in_doubt.clear()  # the offset that they expected is taken
        return self.last

    take = Method(_take)

    def _next(self, purpose: bytes) -> Record | None:
        """None if an attempt whose outcome was unknown took a number for `purpose`."""
        if purpose in self._found:
            return None
        if self.last == 0 and self._log.next_offset:
            raise PositionLostError(
                f"{self._log.topic}-{self._log.partition}: the last number is unknown: its record was deleted (set "
                "retention.ms=-1, and continue in a new topic)"
            )
        return Record(purpose)

    def _numbered(self, record: LogRecord, number: int) -> None:
        if self.last and number != self.last + 1:
            raise self._foreign(record, f"it has number {number} after number {self.last}")
        purpose = self._in_doubt.pop(write_id_of(record) or b"", None)
        if purpose is not None:
            self._found[purpose] = number
