"""Log writer decisions, without I/O: the outcome of an append attempt, given a read of the log.

An attempt ends as appended, refused or in doubt (timeout, lost connection, retriable error). Only *appended* is final.
Otherwise the partition is read at the expected offset, because:

- a client library retries automatically. Its first send may have been appended and the response lost. The reported
  refusal then covers the last send only;
- a request whose connection was lost may still be queued in the broker and be appended later.

The record at the expected offset decides. If it has this write's `fencepost-write-id`, the append succeeded. Any other
record means that another writer was first. If no record can be read there, the same records are sent again with the
same write id and expected offset. That is always safe: an offset is assigned once, so at most one copy is appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from fencepost._checks import TopicFacts
from fencepost.errors import BatchTooLargeError, InDoubtError, NotAtEndError, OffsetMismatchError, PositionLostError
from fencepost.records import LogRecord, Record, batch_bytes_max, binding_of, conditional_headers, write_id_of
from fencepost.retries import RetryPolicy


class MaybeAppended(Exception):
    """An attempt is in doubt. `__cause__`: the client library's error."""


Failure = OffsetMismatchError | MaybeAppended


@dataclass(frozen=True, slots=True)
class Observation:
    """A read of the log: its bounds as a consumer sees them, and the first record at or after the expected offset
    (None if there is none)."""

    log_start: int
    log_end: int
    first: LogRecord | None


class Decision(Enum):
    OURS = auto()
    REFUSED = auto()
    UNDECIDED = auto()
    DELETED = auto()


def resolve(expected: int, write_id: bytes, failure: Failure, observation: Observation) -> Decision:
    """The outcome of the write `write_id` at `expected`.

    | read at `expected`                   | after a refusal                                  | in doubt  |
    |--------------------------------------|--------------------------------------------------|-----------|
    | a record of this write               | OURS                                             | OURS      |
    | a record of another write            | REFUSED                                          | REFUSED   |
    | no record, but the log is longer     | REFUSED (a transaction marker is there)          | UNDECIDED |
    | nothing yet                          | REFUSED if *clear*; else UNDECIDED               | UNDECIDED |
    | deleted: the log starts after it     | REFUSED if *clear*; else DELETED                 | DELETED   |

    *clear*: the server's message is known and does not contain POSSIBLY_YOURS.
    """
    refused = failure if isinstance(failure, OffsetMismatchError) else None
    if observation.log_start > expected:
        return Decision.REFUSED if refused and refused.possibly_yours is False else Decision.DELETED
    if observation.first is not None and observation.first.offset == expected:
        return Decision.OURS if write_id_of(observation.first) == write_id else Decision.REFUSED
    if refused is None:
        return Decision.UNDECIDED
    if observation.log_end > expected or refused.possibly_yours is False:
        return Decision.REFUSED
    # The conflicting record is not replicated yet, so it is not readable. Or the log is shorter, and the client
    # library's first attempt may still be queued.
    return Decision.UNDECIDED


class Append:
    """One batch, with the same records, expected offset and write id in every attempt. Times: monotonic seconds."""

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        expected: int,
        write_id: bytes,
        records: Sequence[Record],
        policy: RetryPolicy,
        now: float,
        cluster_id: str | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self._binding = binding_of(topic, partition, cluster_id)
        self.expected = expected
        self.write_id = write_id
        self.records = records
        self._policy = policy
        self._deadline = now + policy.total_seconds
        self._tries = 0

    def headers(self, index: int) -> list[tuple[str, bytes]]:
        """The headers of record `index`. Each record carries its expected offset, so that a batch split by the client
        library is still checked completely."""
        record = self.records[index]
        return conditional_headers(record.headers, self.expected + index, self.write_id, self._binding)

    def pause_after(self, failure: Failure, observation: Observation | None, now: float) -> float | None:
        """Seconds until the next attempt; None if the log shows that the append succeeded. `observation`: None if the
        log could not be read.

        Raises OffsetMismatchError or InDoubtError.
        """
        self._tries += 1
        decision = (
            Decision.UNDECIDED if observation is None else resolve(self.expected, self.write_id, failure, observation)
        )
        if decision is Decision.OURS:
            return None
        refused = isinstance(failure, OffsetMismatchError)
        if decision is Decision.REFUSED:
            if refused:
                raise failure
            assert observation is not None
            raise OffsetMismatchError(
                self.topic, self.partition, self.expected, observation.log_end, possibly_yours=False
            ) from failure.__cause__
        cause = failure if refused else failure.__cause__
        if decision is Decision.DELETED:
            raise self._in_doubt("the log now starts after it") from cause
        if now >= self._deadline:
            raise self._in_doubt(f"tried for {self._policy.total_seconds:g} s, last error: {cause!r}") from cause
        return self._policy.pause(self._tries)

    def _in_doubt(self, reason: str) -> InDoubtError:
        return InDoubtError(self.topic, self.partition, self.expected, self.write_id, reason)


class LogPosition:
    """A log writer's position in its partition, and whether it may append."""

    def __init__(self, topic: str, partition: int, policy: RetryPolicy, bytes_max: int) -> None:
        self.topic = topic
        self.partition = partition
        self.next_offset: int | None = None
        self.at_end = False
        self._policy = policy
        self._bytes_max = bytes_max

    def start_reading(self, log_start: int, log_end: int) -> int:
        """The offset to read from. Raises PositionLostError."""
        self.at_end = False
        if self.next_offset is None:
            self.next_offset = log_start
        if not log_start <= self.next_offset <= log_end:
            raise PositionLostError(
                f"{self.topic}-{self.partition}: next offset {self.next_offset} is outside the log, which holds "
                f"{log_start} to {log_end} (discard the state and start with a new log writer)"
            )
        return self.next_offset

    def reached(self, log_end: int) -> int:
        """Record that everything before `log_end` was read; offsets after the last record may hold none.
        Returns the next offset."""
        assert self.next_offset is not None
        self.next_offset = max(self.next_offset, log_end)
        self.at_end = True
        return self.next_offset

    def bytes_limit(self, facts: TopicFacts) -> int:
        return min(self._bytes_max, facts.max_message_bytes or self._bytes_max)

    def begin(self, records: Sequence[Record], write_id: bytes, facts: TopicFacts, now: float) -> Append:
        """Begin an append of `records` at the next offset. The writer is not at the end again until `ended`.

        Every record needs a timestamp, because a retry must equal the first attempt. Raises NotAtEndError,
        BatchTooLargeError, ValueError.
        """
        if not self.at_end or self.next_offset is None:
            raise NotAtEndError(
                f"{self.topic}-{self.partition}: not at the log end (call read_to_end() first, and after every refusal)"
            )
        if not records:
            raise ValueError("nothing to append (pass at least one record)")
        size = batch_bytes_max(records, binding_of(self.topic, self.partition, facts.cluster_id))
        bytes_max = self.bytes_limit(facts)
        if size > bytes_max:
            raise BatchTooLargeError(
                f"{self.topic}-{self.partition}: {len(records)} records need up to {size} bytes uncompressed, the "
                f"limit is {bytes_max} (the smaller of batch_bytes_max and the topic's max.message.bytes; append fewer)"
            )
        self.at_end = False
        return Append(
            self.topic,
            self.partition,
            expected=self.next_offset,
            write_id=write_id,
            records=records,
            policy=self._policy,
            now=now,
            cluster_id=facts.cluster_id,
        )

    def ended(self, append: Append) -> None:
        """`append` is in the log at its expected offset, so the writer is at the end again."""
        self.next_offset = append.expected + len(append.records)
        self.at_end = True
