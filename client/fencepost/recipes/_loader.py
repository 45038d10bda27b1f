"""A load from any source that can be killed anywhere: docs/recipes/loader.md has the format and the guarantee.

The source gives units: rows, and the position after them. Units have numbers from 1. A group of units is appended as
few batches, one partition after the other, each at the offset that was read. The last record of each batch says

- how far its partition is: all rows of earlier units are there, and some of this one;
- from where to continue: up to which unit everything is in *all* partitions, and the position after that unit.

A start reads the last batch of each partition and continues after the latest such position. It skips the rows that a
partition has already. The statements stay true, also those of an older loader. If its batch arrives late, a start is
stale but not wrong: the next append to that partition is refused.
"""

from __future__ import annotations

import base64
import itertools
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from fencepost._log_writer import LogWriterBase
from fencepost._partitioning import murmur2
from fencepost._steps import Pause, Steps, Use, now
from fencepost.errors import LoadChangedError, LoadPositionLostError, LoadTakenOverError, OffsetMismatchError
from fencepost.recipes._recipe import Method, OfOneLibrary, header_of
from fencepost.records import LogRecord, Record, batch_bytes_max

#: The header of the last record of each batch.
LOAD: Final = "fencepost-load"
_HEADER_BYTES: Final = len(LOAD) + 10
_NUMBER_MAX: Final = 10**15
#: Rows that wait until the source is known to be unchanged.
_WAITING_BYTES_MAX: Final = 64_000_000
#: A search for the last batch reads so many records from the end, then this many times as many.
_SEARCH_FACTOR: Final = 100

#: (record, number of its unit, partition count) → partition. The same arguments always give the same result.
Placement = Callable[[Record, int, int], int]


def _base64_bytes(data: bytes) -> int:
    return 4 * ((len(data) + 2) // 3)


def by_key(record: Record, unit: int, count: int) -> int:
    """As the Java client places keys. Rows without a key: one partition for each unit."""
    return unit % count if record.key is None else murmur2(record.key, count)


@dataclass(frozen=True, slots=True)
class Progress:
    """Its partition has all rows of the units before `unit`, and `rows` of this unit, which ends at position `at` of
    the source. All partitions have the units up to `complete`, and the source continues after it at `position`.
    `partitions`: the partition count. `run`: of the loader."""

    load: str
    run: str
    unit: int
    rows: int
    at: bytes
    complete: int
    position: bytes
    partitions: int

    def encoded(self) -> bytes:
        named = {k: base64.b64encode(v).decode() if isinstance(v, bytes) else v for k, v in asdict(self).items()}
        return json.dumps(named, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class _Row:
    """`progress`: of its partition, if the row is the last of a batch."""

    record: Record
    progress: Progress


class LoaderBase(OfOneLibrary):
    """Loads rows of a source into a topic: each once, in order, across restarts, without transactions.

    `name`: of the load, in the log. `logs`: a LogWriter for each partition of the topic, from 0, or one of the only
    partition that gets rows. Nothing else uses them. `partition_of`: chooses the partition of a record, like the Java
    client by default. `group_bytes`: rows are appended when there are so many bytes of them, or after `linger_seconds`.
    `new`: the load never ran; needed only if records of the topic were deleted and no batch of the load is found.

    The source must give the same rows and positions in the same order when it is read again from a position. See
    docs/recipes/loader.md.
    """

    def __init__(
        self,
        name: str,
        logs: Sequence[LogWriterBase],
        *,
        partition_of: Placement = by_key,
        group_bytes: int = 4_000_000,
        linger_seconds: float = 1.0,
        new: bool = False,
    ) -> None:
        partitions = [log.partition for log in logs]
        if len({log.topic for log in logs}) != 1 or (len(logs) > 1 and partitions != list(range(len(logs)))):
            raise ValueError("logs must be one LogWriter for each partition of one topic, from 0 on, or a single one")
        for log in logs:
            self._require(log)
        self.name = name
        self.topic = logs[0].topic
        self._logs = logs
        self._partition_of = partition_of
        self._group_bytes = group_bytes
        self._linger_seconds = linger_seconds
        self._new = new
        self._use = Use(f"Loader {name!r}", "one Loader for each load, in one task or thread")
        self._run = secrets.token_hex(8)
        #: Where the source is read from at the start, then the position up to which everything is in the log. None: the
        #: beginning.
        self.position: bytes | None = None
        self._taken_to = b""
        self._complete = self._unit = 0
        self._found: list[Progress | None] = []
        self._found_to = 0
        self._before_expansion = (0, 0)
        self._waiting: list[list[_Row]] = [[] for _ in logs]
        self._waiting_bytes = 0
        self._waiting_since = 0.0
        self._ended: BaseException | None = None

    def _start(self) -> Steps[None]:
        """Find the position in the log. Raises LoadPositionLostError, and the errors of LogWriter.read_to_end."""
        any_deleted = False
        for log in self._logs:
            start, progress = yield from self._last(log)
            self._found.append(progress)
            any_deleted |= start > 0
        known = [each for each in self._found if each is not None]
        if known:
            last = max(known, key=lambda each: each.complete)
            self._complete = self._unit = last.complete
            self.position = last.position if last.complete else None
            self._found_to = max(each.unit for each in known)
            fewest = min(each.partitions for each in known)
            if fewest < len(self._logs):  # the units after `complete` that are in the log were placed with this count
                self._before_expansion = max(each.unit for each in known if each.partitions == fewest), fewest
        elif any_deleted and not self._new:
            raise LoadPositionLostError(self.name, self.topic)

    _find = Method(_start)

    def _last(self, log: LogWriterBase) -> Steps[tuple[int, Progress | None]]:
        """The log start, and the newest progress of this load; at the log end."""
        start, end = yield from log.bounds()
        for count in (_SEARCH_FACTOR**power for power in itertools.count()):
            begin, found = max(start, end - count), None
            log.start_again_at(begin)
            loop = log.loop()
            while (item := (yield from loop.following())) is not None:
                found = self._progress_of(item.value) or found
            if found is not None or begin == start:
                return start, found
        raise AssertionError("unreachable")

    def _append(self, rows: Iterable[Record], position: bytes) -> Steps[None]:
        """Take the rows up to `position` of the source, and append the group if it is large or old enough.

        After an error, nothing more can be appended: create a new Loader, which continues where this one ended. Raises
        LoadChangedError, LoadTakenOverError, and the errors of LogWriter.append.
        """
        return self._ending_with_an_error(self._take(rows, position))

    append = Method(_append)

    def _flush(self) -> Steps[None]:
        """Append all rows that were taken, as before a pause of the source. Then `position` is after them."""
        return self._ending_with_an_error(self._append_waiting())

    flush = Method(_flush)

    def _ending_with_an_error(self, steps: Steps[None]) -> Steps[None]:
        """After an error, a part of a unit may have been taken, or its outcome be unknown."""
        if self._ended is not None:
            raise RuntimeError(f"load {self.name!r} has ended (create a new Loader)") from self._ended
        try:
            yield from steps
        except BaseException as error:
            self._ended = error
            raise

    def _take(self, rows: Iterable[Record], position: bytes) -> Steps[None]:
        self._unit += 1
        boundary, fewest = self._before_expansion
        count = len(self._logs) if self._unit > boundary else fewest
        taken = [0] * len(self._logs)
        for record in rows:
            partition = self._partition_of(record, self._unit, count)
            if not 0 <= partition < count:
                raise ValueError(f"partition_of() returned {partition!r} (topic {self.topic} has {count} partitions)")
            taken[partition] += 1
            progress = Progress(self.name, self._run, self._unit, taken[partition], position, 0, b"", count)
            if not self._is_there(partition, progress):
                if not self._waiting_bytes:
                    self._waiting_since = now()
                self._waiting[partition].append(_Row(record, progress))
                self._waiting_bytes += batch_bytes_max([record], b"")
        for partition, found in enumerate(self._found):
            if found is not None and found.unit == self._unit and taken[partition] < found.rows:
                raise LoadChangedError(self.name, self.topic, self._logs[partition].partition, self._unit)
        self._taken_to = position
        is_old = self._waiting_bytes and now() - self._waiting_since >= self._linger_seconds
        if self._unit < self._found_to and self._waiting_bytes < _WAITING_BYTES_MAX:
            return  # first compare the source with what is in the log
        # The next batch then states that all partitions have what an earlier run left: short runs do not begin again.
        if is_old or self._waiting_bytes >= self._group_bytes or self._unit in {boundary, self._found_to}:
            yield from self._append_waiting()

    def _is_there(self, partition: int, progress: Progress) -> bool:
        found = self._found[partition]
        if found is None or progress.unit > found.unit:
            return False
        if progress.unit == found.unit and progress.at != found.at:
            raise LoadChangedError(self.name, self.topic, self._logs[partition].partition, progress.unit)
        return progress.unit < found.unit or progress.rows <= found.rows

    def _append_waiting(self) -> Steps[None]:
        for log, rows in zip(self._logs, self._waiting, strict=True):
            while rows:
                batch = yield from self._batch(log, rows)
                yield from self._write(log, batch)
                del rows[: len(batch)]
        if self._unit > self._complete:
            self._complete, self.position = self._unit, self._taken_to
        self._waiting_bytes = 0

    def _batch(self, log: LogWriterBase, rows: Sequence[_Row]) -> Steps[list[Record]]:
        """The first rows that fit into one append, with the progress on the last one."""
        limit, binding = yield from log.batch_limit()
        # To state the progress of each row, only to know its length, would take most of the time.
        largest = len(self._stated(replace(rows[0].progress, unit=_NUMBER_MAX, rows=_NUMBER_MAX, at=b"")))
        size, records = largest + _HEADER_BYTES, list[Record]()
        for row in rows:
            size += batch_bytes_max([row.record], binding)
            if records and size + _base64_bytes(row.progress.at) > limit:
                break
            records.append(row.record)
        header = LOAD, self._stated(rows[len(records) - 1].progress)
        records[-1] = replace(records[-1], headers=(*records[-1].headers, header))
        return records

    def _stated(self, progress: Progress) -> bytes:
        return replace(progress, complete=self._complete, position=self.position or b"").encoded()

    def _write(self, log: LogWriterBase, batch: Sequence[Record]) -> Steps[None]:
        """Append it: after records of other writers, but not after those of another run of this load."""
        deadline = now() + log.retry.total_seconds
        for tries in itertools.count(1):
            try:
                yield from LogWriterBase.append(log, batch)
                return
            except OffsetMismatchError as refused:
                loop = log.loop()
                while (item := (yield from loop.following())) is not None:
                    progress = self._progress_of(item.value)
                    if progress is not None:
                        raise LoadTakenOverError(self.name, log.topic, log.partition, item.value.offset) from refused
                if now() >= deadline:
                    raise
            if tries > 1:
                yield Pause(log.retry.jittered(tries - 1))

    def _progress_of(self, record: LogRecord) -> Progress | None:
        stated = header_of(record, LOAD)
        if stated is None:
            return None
        try:
            fields: dict[str, Any] = json.loads(stated)
            for name in ("at", "position"):
                fields[name] = base64.b64decode(fields[name])
            progress = Progress(**fields)
        except (ValueError, TypeError, KeyError):
            return None
        return progress if progress.load == self.name else None
