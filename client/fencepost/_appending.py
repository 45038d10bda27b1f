"""The log writer's decisions, without I/O: what one try at an append means, once the log was looked at.

A try ends in one of three ways: appended, refused, or nobody knows (a timeout, a lost connection, a retriable error).
Only the first is believed as it is. After the other two the partition is read at the expected offset, because:

- a client library retries by itself. Its first send may have landed and its answer been lost; then the refusal that
  the library reports speaks of its last send only;
- a request whose connection died may still be queued in the broker and land later.

What lies at the expected offset decides: a record with this write's `write-id` is ours, any other record there means
that somebody was first. If nothing can be read there, the same records are sent again under the same write-id at the
same expected offset. That is always safe: an offset is given once, so of all copies one at most can land.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from fencepost._checks import TopicFacts
from fencepost._refusals import verify
from fencepost.errors import BatchTooLarge, InDoubt, NotAtEnd, OffsetMismatch, PositionLost
from fencepost.records import HeaderNames, LogRecord, Record, batch_bytes_max, conditional_headers, write_id_of
from fencepost.retries import RetryPolicy


@dataclass(frozen=True, slots=True)
class Appended:
    base_offset: int


@dataclass(frozen=True, slots=True)
class Refused:
    error: OffsetMismatch


@dataclass(frozen=True, slots=True)
class Doubtful:
    """`cause` is what the client library raised."""

    cause: BaseException


Reply = Appended | Refused | Doubtful


@dataclass(frozen=True, slots=True)
class Sight:
    """The log around the expected offset: its bounds as a consumer sees them, and
    the first record at or behind the expected offset, None if there is none."""

    log_start: int
    log_end: int
    first: LogRecord | None


class Verdict(Enum):
    OURS = auto()
    REFUSED = auto()
    UNDECIDED = auto()
    GONE = auto()


def settle(expected: int, write_id: bytes, reply: Refused | Doubtful, sight: Sight, names: HeaderNames) -> Verdict:
    """What became of the write `write_id` at `expected`.

    | seen at `expected`                   | after a refusal                                  | after a doubt |
    |--------------------------------------|--------------------------------------------------|---------------|
    | a record of this write               | OURS                                             | OURS          |
    | another's record                     | REFUSED                                          | REFUSED       |
    | none, but the log goes on behind it  | REFUSED (a transaction marker lies there)        | UNDECIDED     |
    | nothing yet                          | REFUSED if *plain*, or the log is shorter; else UNDECIDED | UNDECIDED |
    | deleted: the log starts behind it    | REFUSED if *plain*; else GONE                    | GONE          |

    *plain*: the server's message was seen, and does not say POSSIBLY_YOURS.
    """
    refused = reply.error if isinstance(reply, Refused) else None
    if sight.log_start > expected:
        return Verdict.REFUSED if refused and refused.possibly_yours is False else Verdict.GONE
    if sight.first is not None and sight.first.offset == expected:
        return Verdict.OURS if write_id_of(names, sight.first) == write_id else Verdict.REFUSED
    if refused is None:
        return Verdict.UNDECIDED
    shorter = refused.actual is not None and refused.actual < expected
    if sight.log_end > expected or refused.possibly_yours is False or shorter:
        return Verdict.REFUSED
    return Verdict.UNDECIDED  # what refused it is not replicated yet, so it cannot be read


@dataclass(frozen=True, slots=True)
class Done:
    base_offset: int


@dataclass(frozen=True, slots=True)
class Again:
    after_seconds: float


class Append:
    """One batch on its way: the same records, expectation and write-id in every try. Times are monotonic seconds."""

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        expected: int,
        write_id: bytes,
        records: Sequence[Record],
        names: HeaderNames,
        policy: RetryPolicy,
        now: float,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.expected = expected
        self.write_id = write_id
        self.records = records
        self._names = names
        self._policy = policy
        self._deadline = now + policy.total_seconds
        self._tries = 0

    def headers(self, index: int) -> list[tuple[str, bytes]]:
        """The headers of the `index`-th record. Every record carries the expectation, so that even a batch that a
        library managed to split is checked to its last record."""
        record = self.records[index]
        return conditional_headers(self._names, record.headers, self.expected + index, self.write_id)

    def judge(self, reply: Reply, sight: Sight | None, now: float) -> Done | Again:
        """What to do after a try. `sight` is None if the reply was `Appended`, or the log could not be read.

        Raises OffsetMismatch, InDoubt, or OffsetViolation.
        """
        self._tries += 1
        if isinstance(reply, Appended):
            verify(self.topic, self.partition, self.expected, reply.base_offset)
            return Done(reply.base_offset)
        verdict = (
            Verdict.UNDECIDED if sight is None else settle(self.expected, self.write_id, reply, sight, self._names)
        )
        if verdict is Verdict.OURS:
            return Done(self.expected)
        if verdict is Verdict.REFUSED:
            if isinstance(reply, Refused):
                raise reply.error
            assert sight is not None
            raise OffsetMismatch(
                self.topic, self.partition, self.expected, sight.log_end, possibly_yours=False
            ) from reply.cause
        cause = reply.error if isinstance(reply, Refused) else reply.cause
        if verdict is Verdict.GONE:
            raise self._in_doubt("the log starts behind it by now") from cause
        if now >= self._deadline:
            raise self._in_doubt(f"tried for {self._policy.total_seconds:g} s, at last: {cause!r}") from cause
        return Again(self._policy.pause(self._tries))

    def _in_doubt(self, reason: str) -> InDoubt:
        return InDoubt(self.topic, self.partition, self.expected, self.write_id, reason)


class LogPosition:
    """Where a log writer stands in its partition, and whether it may append."""

    def __init__(self, topic: str, partition: int, names: HeaderNames, policy: RetryPolicy, bytes_max: int) -> None:
        self.topic = topic
        self.partition = partition
        self.next_offset: int | None = None
        self.at_end = False
        self._names = names
        self._policy = policy
        self._bytes_max = bytes_max

    def start_reading(self, log_start: int, log_end: int) -> int:
        """The offset to read from. Raises PositionLost."""
        self.at_end = False
        if self.next_offset is None:
            self.next_offset = log_start
        if not log_start <= self.next_offset <= log_end:
            raise PositionLost(
                f"{self.topic}-{self.partition}: the next record to read was {self.next_offset}, but the log now holds "
                f"{log_start} to {log_end}; throw the state away and start with a new log writer"
            )
        return self.next_offset

    def reached(self, log_end: int) -> int:
        """Everything before `log_end` was read; behind the last record there may be offsets that hold none.
        Returns the next offset."""
        assert self.next_offset is not None
        self.next_offset = max(self.next_offset, log_end)
        self.at_end = True
        return self.next_offset

    def begin(self, records: Sequence[Record], write_id: bytes, facts: TopicFacts, now: float) -> Append:
        """An append of `records` at the end that was read. Until `ended`, the writer is not at the end.

        Records without a timestamp must have been given one: a retry has to be equal to the first try.
        Raises NotAtEnd, BatchTooLarge, ValueError.
        """
        if not self.at_end or self.next_offset is None:
            raise NotAtEnd(f"{self.topic}-{self.partition}: call read_to_end() first, and after every refusal")
        if not records:
            raise ValueError("nothing to append: give at least one record")
        size = batch_bytes_max(self._names, records)
        limit = min(self._bytes_max, facts.max_message_bytes or self._bytes_max)
        if size > limit:
            raise BatchTooLarge(
                f"{self.topic}-{self.partition}: {len(records)} records need up to {size} bytes uncompressed, a batch "
                f"may have {limit} (the smaller of batch_bytes_max and the topic's max.message.bytes); append fewer"
            )
        self.at_end = False
        return Append(
            self.topic,
            self.partition,
            expected=self.next_offset,
            write_id=write_id,
            records=records,
            names=self._names,
            policy=self._policy,
            now=now,
        )

    def ended(self, append: Append) -> None:
        """`append` is in the log, and nothing can have come between."""
        self.next_offset = append.expected + len(append.records)
        self.at_end = True
