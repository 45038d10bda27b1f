"""One leader of a partition, elected by the log itself: docs/recipes/leader.md has the format and the guarantee.

1. A contender reads to the log end, and appends a claim there: it is refused if any record was appended since.
2. The claim's offset is the term. An offset is assigned once, so a term is unique, and later terms are greater.
3. Everything that the leader appends, it appends at the end that it knows. Another contender's claim moves the end, so
   the broker refuses what the old leader sends, even if that was delayed by minutes.
4. The old leader reads on after the refusal, up to the claim and no further. Reading over the claim would give it the
   new end, and its next append would be accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fencepost._log_writer import LogWriterBase
from fencepost._steps import Pause, Steps, now
from fencepost.errors import NotLeaderError, OffsetMismatchError
from fencepost.recipes._recipe import RECIPE, Method, Recipe
from fencepost.records import LogRecord, Record

CLAIM = "claim"


class Claim(NamedTuple):
    """The claim of the leader `name`. `term`: its offset."""

    term: int
    name: str


class LeaderBase(Recipe):
    """One leader of a partition at a time. A deposed leader's appends are refused by the broker.

    `log`: a LogWriter that nothing else uses, of a topic with `fencepost.check.expected.offsets=required`. `name`: of
    this process, for others to read. `apply(record)` is called for each record that others appended, in order.

    A Leader detects no failure: the application decides when to call `claim`, for example when `silent_seconds` exceeds
    the interval at which a leader appends something. See docs/recipes/leader.md.
    """

    FORMAT = "leader/1"

    def __init__(self, log: LogWriterBase, name: str, apply: Callable[[LogRecord], Any] = lambda record: None) -> None:
        super().__init__(log)
        self.name = name
        self._apply = apply
        #: The offset of this process's claim; None while it does not lead.
        self.term: int | None = None
        #: The newest claim that was read or appended.
        self.current: Claim | None = None

    def _read_to_end(self) -> Steps[int]:
        """Apply the unread records. Returns the log end offset.

        Raises NotLeaderError if this process led and another claim was read: its term is over. The next call continues
        with that claim. Raises the errors of LogWriter.read_to_end.
        """
        yield from self._read(self._passed)
        assert self._log.next_offset is not None
        return self._log.next_offset

    read_to_end = Method(_read_to_end)

    def _claim(self) -> Steps[int]:
        """Read to the end, then become the leader. Returns the term.

        If ordinary records are appended meanwhile, it reads on and tries again for `retry.total_seconds`, then raises
        OffsetMismatchError. Raises NotLeaderError if another claim was first. After InDoubtError, claim again.
        """
        self.term = None
        yield from self._read_to_end()
        observed, policy = self.current, self._log.retry
        deadline = now() + policy.total_seconds
        for tries in itertools.count(1):
            try:
                term = yield from self._write([Record(self.name.encode(), headers=(self._header(CLAIM),))])
                break
            except OffsetMismatchError as refused:
                if now() >= deadline:
                    raise
                if tries > 1:
                    yield Pause(policy.jittered(tries - 1))
                yield from self._read_to_end()
                if self.current != observed:
                    raise self._not_leader(None, self.current) from refused
        self.term, self.current = term, Claim(term, self.name)
        return term

    claim = Method(_claim)

    def _append(self, records: Sequence[Record]) -> Steps[int]:
        """Append `records` as one batch. Returns the offset of the first record.

        Raises NotLeaderError if this process does not lead, or no longer: nothing was appended. Otherwise as
        LogWriter.append: after OffsetMismatchError, a writer without a claim was first, and its records are applied.
        After InDoubtError, call `read_to_end`, then decide again.
        """
        if any(name == RECIPE for record in records for name, _ in record.headers):
            raise ValueError(f"header {RECIPE!r} is set by recipes (remove it from headers)")
        return (yield from self._append_as_leader(records))

    append = Method(_append)

    def _append_as_leader(self, records: Sequence[Record]) -> Steps[int]:
        if self.term is None:
            raise self._not_leader(None, self.current)
        try:
            return (yield from self._write(records))
        except OffsetMismatchError as refused:
            deposed: NotLeaderError | None = None
            try:
                yield from self._read_to_end()
            except NotLeaderError as error:
                deposed = error
            except Exception as error:  # the next read raises it again; here the refusal is what matters
                raise refused from error
            if deposed is not None:
                raise deposed from refused
            raise

    def _passed(self, record: LogRecord) -> Any:
        """Handle one record that was read. Own records are read only after an append with unknown outcome."""
        if self._kind(record) is None:
            return self._apply(record)
        claim = Claim(record.offset, (record.value or b"").decode(errors="replace"))
        if self.term is not None:
            term, self.term = self.term, None
            raise self._not_leader(term, claim)
        self.current = claim
        return None

    def _not_leader(self, term: int | None, claim: Claim | None) -> NotLeaderError:
        at = (None, None) if claim is None else (claim.term, claim.name)
        return NotLeaderError(self._log.topic, self._log.partition, term, *at)
