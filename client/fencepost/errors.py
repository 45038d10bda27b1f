"""What can go wrong with a conditional append or an ordered read, and what to do about it.

Everything else – a lost connection, no permission, a record that the broker finds invalid – is raised as the client
library's own exception.
"""

from __future__ import annotations

from collections.abc import Mapping


class FencepostError(Exception):
    """Base of the errors of this library."""

    def __reduce__(self) -> tuple[object, ...]:
        # An exception is pickled and copied by its args, which here are the text: processes hand refusals on.
        return _rebuild, (type(self), self.args, {**self.__dict__})


class OffsetMismatch(FencepostError):
    """The log does not end where the write expected it to: somebody else appended. The send was refused.

    `expected` is the offset that was asked for. `actual` is the log end that the refusal tells, the offset that the
    next record would get; None where the client library hides it and it could not be read. It is out of date as soon
    as another writer appends. `possibly_yours`: records equal to these already lie at `expected`, so an earlier try of
    this very write may have landed: read back before you write it again. None where it is not known: the client library
    does not show the message that says so (aiokafka, confluent-kafka), or the write was refused with one sent ahead of
    it.

    Do: read the partition on from `expected`, decide again on what you find, append at the new end. Sending the same
    write again at a newer offset without reading would undo what the check is for.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        expected: int,
        actual: int | None,
        *,
        possibly_yours: bool | None = None,
        detail: str | None = None,
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.expected = expected
        self.actual = actual
        self.possibly_yours = possibly_yours
        end = "ends elsewhere" if actual is None else f"ends at {actual}"
        text = f"{topic}-{partition}: expected offset {expected}, but the log {end}"
        if actual == expected:
            # The record itself would have fitted: another record of its batch did not, or a batch sent ahead of it.
            text = f"{topic}-{partition}: expected offset {expected}, but another record of the same batch did not fit"
            if detail is not None and detail.startswith("SENT_BEHIND"):
                text = f"{topic}-{partition}: expected offset {expected}, but a record sent ahead of it did not fit"
        if possibly_yours:
            text += "; equal records lie there, perhaps an earlier try of this write: read back before writing again"
        if detail:
            text += f" ({detail})"
        super().__init__(text)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled by their args, which here are a text: processes hand refusals to each other.
        state = {**self.__dict__}
        return _rebuild, (type(self), self.args, state)


class OffsetViolation(FencepostError):
    """The write *was appended*, but not at the offset that it expected.

    Either a writer goes around the proxy, or the topic's check was switched off between our look at it and the write.
    Every other writer can see these records: repair by hand, and find the writer (the proxy logs it as an ERROR).
    """

    def __init__(self, topic: str, partition: int, expected: int, appended_at: int) -> None:
        self.topic = topic
        self.partition = partition
        self.expected = expected
        self.appended_at = appended_at
        super().__init__(
            f"{topic}-{partition}: appended at offset {appended_at} although {expected} was expected: a writer goes "
            "around the proxy, or check.expected.offsets was switched off meanwhile"
        )


class CheckIsOff(FencepostError):
    """Nothing would check this write's expected offset or partition count, so it was not sent; or the topic does not
    grow in order, so it cannot be read in order. `config` – the topic config to switch on.
    """

    def __init__(self, topic: str, found: str, config: str = "check.expected.offsets") -> None:
        self.topic = topic
        self.config = config
        super().__init__(
            f"topic {topic!r}: {found}; nothing was sent. Connect to the Fencepost proxy and switch the check on: "
            f"kafka-configs.sh --bootstrap-server <proxy> --alter --entity-type topics --entity-name {topic} "
            f"--add-config {config}=true"
        )


class PartitionCountChanged(FencepostError):
    """The topic has grown since this record was placed, and it could not be placed again in the time allowed.

    It was *not* appended. `expected` is the number of partitions that it was placed over, `actual` the number that the
    refusal tells, None where the client library hides it.
    """

    def __init__(self, topic: str, partition: int, expected: int, actual: int | None, *, reason: str) -> None:
        self.topic = topic
        self.partition = partition
        self.expected = expected
        self.actual = actual
        now = "another number" if actual is None else str(actual)
        super().__init__(
            f"{topic}-{partition}: placed over {expected} partitions, but the topic has {now}; not appended: {reason}"
        )


class PartitionRequired(FencepostError, ValueError):
    """A conditional send without a partition. Every partition has offsets of its own, so say which one is meant."""


class BatchTooLarge(FencepostError, ValueError):
    """These records do not fit into one batch, and a batch is what is appended as a whole. Nothing was sent."""


class InDoubt(FencepostError):
    """The append was sent, and whether it is in the log could not be found out in the time allowed.

    Do: `read_to_end` once the cluster can be reached; the records of the write are those whose `write-id` header is
    `write_id`, at `expected`. It cannot land anywhere else, and not after another append at that offset.
    """

    def __init__(self, topic: str, partition: int, expected: int, write_id: bytes, reason: str) -> None:
        self.topic = topic
        self.partition = partition
        self.expected = expected
        self.write_id = write_id
        super().__init__(
            f"{topic}-{partition}: whether the append at offset {expected} is in the log could not be found out: "
            f"{reason}; read_to_end() will show it (write-id {write_id.hex()})"
        )


class NotAtEnd(FencepostError):
    """`append` on a log writer that has not read the partition to its end, or was fenced since. Call `read_to_end`."""


class PositionLost(FencepostError):
    """The log no longer holds what the writer would read next.

    Records before the log start were deleted unread, or the log is shorter than what was read already (the topic was
    recreated, or Kafka lost its tail). The state built from it is not the log's any more: throw it away and start
    again with a new log writer.
    """


class TransactionAborted(FencepostError):
    """Nothing of the transaction is in the log for read_committed readers, nor will be. The writer can be used again.

    Raised as it is where the cluster or a partition could not be written to in time, `__cause__` says how; and, as
    TransactionConflict, where somebody else was in the way. Do: read again, decide again, append again.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"the transaction was aborted, nothing of it is visible: {reason}")


class TransactionConflict(TransactionAborted):
    """Another transaction holds one of the partitions, or the commit was refused, since an append of this transaction
    turned out not to lie where it was expected (a writer that goes around the proxy, another's marker in between).

    Do: read again, decide again, append again, after a pause that differs from the other's: see `retrying`.
    """


class OutcomeUnknown(FencepostError):
    """The commit was sent, and whether it happened could not be found out in the time allowed.

    All of it is in the log or nothing is. Do: read the partitions once the cluster can be reached; the records of the
    transaction are those whose `write-id` header is `write_id`, at `expected`: (topic, partition) → offset. The next
    `append` of the same writer, or of another with the same transactional id, first brings it to its end.
    """

    def __init__(self, expected: Mapping[tuple[str, int], int], write_id: bytes, reason: str) -> None:
        self.expected = dict(expected)
        self.write_id = write_id
        where = ", ".join(f"{topic}-{partition} at {offset}" for (topic, partition), offset in self.expected.items())
        super().__init__(
            f"whether the transaction ({where}) is committed could not be found out: {reason}; "
            f"reading will show it (write-id {write_id.hex()})"
        )


class WriterFenced(FencepostError):
    """Another writer with the same transactional id has started, or the transaction took longer than its timeout.

    Nothing of the append that raises this is visible. This writer appends no more: close it, and make a new one if
    this process is still the one to write.
    """

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        super().__init__(
            f"transactional id {transactional_id!r}: another writer has started with it, or the transaction timed out; "
            "nothing of it is visible, and this writer appends no more"
        )


def _rebuild(cls: type[FencepostError], args: tuple[object, ...], state: dict[str, object]) -> FencepostError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error
