"""One process at a time works off a partition, each item once: docs/recipes/queue.md has the format and the guarantee.

It is the leader of a second partition, which has the results. Each append there has the results of some items
and the position after them. So both are there or neither is, and what a former leader appends is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fencepost._log_writer import LogWriterBase
from fencepost._reading import LogReaderBase
from fencepost._steps import Steps
from fencepost.recipes._leader import LeaderBase
from fencepost.recipes._recipe import RECIPE, Method, header_of
from fencepost.records import LogRecord, Record

POSITION = "fencepost-position"
_KIND = "queue/1 position"


class QueueBase(LeaderBase):
    """A leader of `log`'s partition that works off the items of another one, each once.

    `items`: a LogReader of one partition of any topic. `log`: a LogWriter for the results; its topic has
    `fencepost.check.expected.offsets=required`. Nothing else uses them. `name`, `apply`: as for Leader; `apply` gets
    the results of others. See docs/recipes/queue.md.
    """

    def __init__(
        self,
        items: LogReaderBase,
        log: LogWriterBase,
        name: str,
        apply: Callable[[LogRecord], Any] = lambda record: None,
    ) -> None:
        super().__init__(log, name, apply)
        if len(items._positions) != 1:
            raise ValueError(f"items has {len(items._positions)} partitions (pass a LogReader of one)")
        self._items = items
        (self._at,) = items._positions.values()
        self._source = f"{self._at.topic}/{self._at.partition}"
        #: The offset of the first item without results; None before the first results.
        self.position: int | None = None
        self._position_record: int | None = None
        #: The offset after the items of the last `take`, and the position at which they begin.
        self._taken: tuple[int, int | None] | None = None

    def _take(self, limit: int = 100) -> Steps[list[LogRecord]]:
        """The next items, `limit` at most; none if all have results. The same ones again until `finish`.

        Raises NotLeaderError if this process does not lead, PositionLostError if unfinished items were deleted, and the
        errors of LogReader and LogWriter.
        """
        self._taken = None
        if self.term is None:
            raise self._not_leader(None, self.current)
        if not self._log.at_end:
            yield from self._read_to_end()
        self._at.next_offset = self.position
        found: list[LogRecord] = []
        loop = self._items._loop()
        try:
            while len(found) < limit and (item := (yield from loop.following())) is not None:
                found.append(item.value[1])
        finally:
            del loop  # a traceback would keep it, and with it the use of the reader
        if found:
            self._taken = found[-1].offset + 1, self.position
        return found

    take = Method(_take)

    def _finish(self, results: Sequence[Record]) -> Steps[int]:
        """Append the results of the items that `take` returned, and the position after them, as one batch.

        Returns the offset of the first record. Without results, a record with the position only is appended. Raises
        what Leader.append raises, and ValueError without `take`. After an error, `take` again.
        """
        taken, self._taken = self._taken, None
        if taken is None or taken[1] != self.position:
            raise ValueError("no items to finish (call take() first, and after every error)")
        marked = b"%d@%b" % (taken[0], self._source.encode())
        *others, last = results or [Record(b"", headers=((RECIPE, _KIND.encode()),))]
        last = replace(last, headers=(*last.headers, (POSITION, marked)))
        offset = yield from self._append_as_leader([*others, last])
        self.position = taken[0]
        return offset

    finish = Method(_finish)

    def _passed(self, record: LogRecord) -> Any:
        stated = header_of(record, POSITION)
        if stated is not None:
            offset, _, source = stated.decode(errors="replace").partition("@")
            # A record whose `apply` failed is read again.
            before = -1 if self.position is None or self._position_record == record.offset else self.position
            if source != self._source or not offset.isdecimal() or int(offset) <= before:
                raise self._foreign(
                    record, f"its position {stated!r} does not follow {self.position} of {self._source}"
                )
        only_position = header_of(record, RECIPE) == _KIND.encode()
        result = None if only_position else super()._passed(record)
        if stated is not None:
            self.position, self._position_record = int(offset), record.offset
        return result
