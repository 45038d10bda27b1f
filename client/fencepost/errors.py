"""Errors of conditional appends and ordered reads, each with the action to take.

Other failures (lost connection, missing permission, invalid record) keep the client library's own exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal


class FencepostError(Exception):
    """Base of the errors of this library.

    `outcome` of the append: `"refused"` (nothing was appended, or nothing is visible), `"appended"`, or `"unknown"`.
    `retriable`: reading, deciding and appending again may succeed. `retrying` repeats after these errors.
    """

    outcome: Literal["refused", "appended", "unknown"] = "refused"
    retriable = False

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled by `args`, which here hold only the text.
        return _rebuild, (type(self), self.args, {**self.__dict__})


class OffsetMismatchError(FencepostError):
    """The append was refused: the log end offset differs from the expected offset. Another writer appended first.

    `expected`: the offset in the request. `actual`: the log end offset from the refusal, which is the offset of the
    next record; None if the client library hides it and it could not be read. The next append makes it stale.
    `possibly_yours`: True if an earlier attempt of this write may be in the log, or may still be appended. Read the log
    before you write again. None if unknown: the client library hides the message (aiokafka,
    confluent-kafka), or an earlier append in the same pipeline was refused.

    Action: read the partition from `expected`, decide again, append at the new end. Do not send the same write at a
    newer offset without reading: that defeats the check.
    """

    retriable = True

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
        end = "the log end offset differs" if actual is None else f"the log end offset is {actual}"
        text = f"{topic}-{partition}: expected offset {expected}, but {end}"
        if actual == expected:
            # This record's offset was right: another record of its batch, or an earlier append, failed the check.
            text = f"{topic}-{partition}: expected offset {expected}, but another record of the same batch was refused"
            if detail is not None and detail.startswith("PREDECESSOR_FAILED"):
                text = f"{topic}-{partition}: expected offset {expected}, but an earlier append was refused"
        if possibly_yours:
            text += "; an earlier attempt may be in the log: read it before writing again"
        if detail:
            text += f" ({detail})"
        super().__init__(text)


class AppendRefusedError(FencepostError):
    """The append was refused by another check of the topic than the expected offset. The same append is refused again.

    `reason`: the server's message; the topic's other checks if the client library hides it (aiokafka, confluent-kafka).

    Action: change the append, or the topic's checks.
    """

    def __init__(self, topic: str, partition: int, reason: str) -> None:
        self.topic = topic
        self.partition = partition
        self.reason = reason
        super().__init__(f"{topic}-{partition}: append refused: {reason}")


class OffsetViolationError(FencepostError):
    """The record *was appended*, but at another offset than expected.

    Cause: a writer bypasses the proxy, or the check was switched off after this client last read the topic configs.
    The records are visible to every reader.

    Action: repair the log by hand and find the writer. The proxy logs the violation as an ERROR.
    """

    outcome = "appended"

    def __init__(self, topic: str, partition: int, expected: int, appended_at: int) -> None:
        self.topic = topic
        self.partition = partition
        self.expected = expected
        self.appended_at = appended_at
        super().__init__(
            f"{topic}-{partition}: appended at offset {appended_at}, expected {expected}: a writer bypasses the proxy, "
            "or fencepost.check.expected.offsets was switched off"
        )


class CheckIsOffError(FencepostError):
    """The topic config that the call needs is off, or the servers are not a Fencepost proxy. Nothing was sent.

    `config`: the topic config to switch on. Without it, nothing checks the expected offset or the partition count, or
    partitions are not added in order.
    """

    def __init__(self, topic: str, found: str, config: str = "fencepost.check.expected.offsets") -> None:
        self.topic = topic
        self.config = config
        super().__init__(
            f"topic {topic!r}: {found}; nothing was sent (connect to the Fencepost proxy and set the config: "
            f"kafka-configs.sh --bootstrap-server PROXY:19092 --alter --entity-type topics --entity-name {topic} "
            f"--add-config {config}=true)"
        )


class PartitionCountChangedError(FencepostError):
    """The record was *not* appended: its topic was expanded, and the producer could not repartition it in time.

    `expected`: the partition count that chose its partition. `actual`: the partition count from the refusal, None if
    the client library hides it. `partition`: -1 if the record had none.
    """

    def __init__(self, topic: str, partition: int, expected: int, actual: int | None, *, reason: str) -> None:
        self.topic = topic
        self.partition = partition
        self.expected = expected
        self.actual = actual
        now = "a different number" if actual is None else str(actual)
        super().__init__(
            f"{topic}-{partition}: not appended: partitioned for {expected} partitions, the topic has {now}; {reason}"
        )


class PartitionRequiredError(FencepostError, ValueError):
    """A conditional send has no `partition`. An expected offset is meaningful for one partition only."""


class BatchTooLargeError(FencepostError, ValueError):
    """The records do not fit into one batch, which is the atomic unit of an append. Nothing was sent."""


class InDoubtError(FencepostError):
    """The append was sent, but its outcome was not confirmed in time.

    Action: call `read_to_end` when the cluster is reachable. If the write was appended, its records are at `expected`
    and their `fencepost-write-id` header is `write_id`. It can be appended only there, and only if no other
    append took that offset.
    """

    outcome = "unknown"

    def __init__(self, topic: str, partition: int, expected: int, write_id: bytes, reason: str) -> None:
        self.topic = topic
        self.partition = partition
        self.expected = expected
        self.write_id = write_id
        super().__init__(
            f"{topic}-{partition}: outcome of the append at offset {expected} is unknown: {reason} "
            f"(call read_to_end() to find out; write-id {write_id.hex()})"
        )


class NotAtEndError(FencepostError):
    """The log writer has not read to the end of the partition, or an append failed since. Call `read_to_end`."""


class ConcurrentUseError(FencepostError, RuntimeError):
    """Another task, thread or loop is using the object, which allows one use at a time. Nothing was read or sent."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(
            f"{what}: another append, read or loop is in progress; nothing was read or sent (await it or end it first, "
            f"or use {instead})"
        )


class LoadPositionLostError(FencepostError):
    """No batch of the load is in the topic, and old records were deleted: they may have been the load's.

    Action: if the load never ran, `new=True`. Else find out how far it came, and load the rest under another name.
    """

    def __init__(self, load: str, topic: str) -> None:
        self.load = load
        self.topic = topic
        super().__init__(
            f"topic {topic}: no batch of load {load!r} is there, and old records were deleted: they may have "
            "been its batches (if this load never ran, pass new=True)"
        )


class LoadChangedError(FencepostError):
    """The source of a load does not give the rows that it gave before. Nothing of the unit was appended again.

    `unit`: the number of the first one that differs.

    Action: restore the source, or load what is missing under another name.
    """

    def __init__(self, load: str, topic: str, partition: int, unit: int) -> None:
        self.load = load
        self.topic = topic
        self.partition = partition
        self.unit = unit
        super().__init__(
            f"{topic}-{partition}: load {load!r}: unit {unit} of the source has another position or fewer rows than "
            "those in the log (the source must give the same units in the same order)"
        )


class LoadTakenOverError(FencepostError):
    """Another process runs the same load: it appended a batch after this one had started. Nothing was doubled.

    `offset`: of the other loader's batch.

    Action: stop one of the two. After a restart, the batch may also be of the killed process: start again.
    """

    def __init__(self, load: str, topic: str, partition: int, offset: int) -> None:
        self.load = load
        self.topic = topic
        self.partition = partition
        self.offset = offset
        super().__init__(
            f"{topic}-{partition}: another loader of {load!r} appended at offset {offset} (stop it, or stop this one)"
        )


class LogBusyError(FencepostError):
    """Too many decisions wait for a shared log, or this one waited too long. Nothing was sent: try later."""

    retriable = True


class PositionLostError(FencepostError):
    """The next offset to read is outside the log, or the partition does not exist.

    Cause: unread records or the topic were deleted, the topic was recreated, or Kafka lost records at the log end.

    Action: discard the state built from the log and start again with a new log writer.
    """


class TransactionAbortedError(FencepostError):
    """The transaction was aborted: read_committed readers never see its records. The writer can be used again.

    Cause: the cluster or a partition could not be written in time (see `__cause__`), or another writer conflicted
    (subclass `TransactionConflictError`). Action: read, decide and append again.
    """

    retriable = True

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"transaction aborted, none of its records are visible: {reason}")


class TransactionConflictError(TransactionAbortedError):
    """Another transaction is open on one of the partitions, or the proxy refused the commit.

    The proxy refuses a commit if an append of the transaction is not at its expected offset: a writer bypassed the
    proxy, or another transaction's marker came in between.

    Action: read, decide and append again after a random pause (see `retrying`).
    """


class OutcomeUnknownError(FencepostError):
    """The commit was sent, but its outcome was not confirmed in time. Either all appends are committed or none.

    `expected`: {(topic, partition): offset}. Action: read the partitions when the cluster is reachable. If the
    transaction committed, its records are at `expected` and their `fencepost-write-id` header is `write_id`. The next
    `append` with the same transactional id first completes or aborts the transaction.
    """

    outcome = "unknown"

    def __init__(self, expected: Mapping[tuple[str, int], int], write_id: bytes, reason: str) -> None:
        self.expected = dict(expected)
        self.write_id = write_id
        where = ", ".join(f"{topic}-{partition} at {offset}" for (topic, partition), offset in self.expected.items())
        super().__init__(
            f"outcome of the transaction ({where}) is unknown: {reason} "
            f"(read the partitions to find out; write-id {write_id.hex()})"
        )


class WriterFencedError(FencepostError):
    """Another writer started with the same transactional id, or the transaction exceeded its timeout.

    The records of the failed append are not visible, and this writer cannot append again. Action: close it. Create a
    new writer only if this process should still write.
    """

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        super().__init__(
            f"transactional id {transactional_id!r} is fenced: another writer started with it, or the transaction "
            "timed out; none of its records are visible (close this writer)"
        )


class NotLeaderError(FencepostError):
    """The append or claim was refused: another process leads the partition, or none that this one has read of.

    `term`: of this process, None if it did not lead. `leader_term`, `leader`: of the newest claim that was read.

    Action: stop acting as the leader, and follow: `read_to_end`. To lead again, `claim`.
    """

    def __init__(
        self, topic: str, partition: int, term: int | None, leader_term: int | None, leader: str | None
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.term = term
        self.leader_term = leader_term
        self.leader = leader
        found = "no claim was read" if leader_term is None else f"{leader!r} leads since offset {leader_term}"
        ended = "this process does not lead" if term is None else f"the term {term} of this process is over"
        super().__init__(f"{topic}-{partition}: {ended}: {found} (follow with read_to_end(); to lead, claim())")


class LockHeldError(FencepostError):
    """Another process has the lock when the timeout of `acquire` ends, or was first each time.

    `token`, `holder`: of the holder that was read last, None if there was none. Action: try later.
    """

    retriable = True

    def __init__(self, topic: str, partition: int, token: int | None, holder: str | None) -> None:
        self.topic = topic
        self.partition = partition
        self.token = token
        self.holder = holder
        found = "other processes were first" if token is None else f"{holder!r} holds it with token {token}"
        super().__init__(f"{topic}-{partition}: lock not acquired in time: {found} (try later)")


class LockLostError(FencepostError):
    """This process does not hold the lock, or no longer: another one acquired it after the lease had ended.

    `token`, `holder`: of that one, None if unknown. Action: stop what the lock protects. To hold it again, `acquire`.
    """

    def __init__(self, topic: str, partition: int, token: int | None, holder: str | None) -> None:
        self.topic = topic
        self.partition = partition
        self.token = token
        self.holder = holder
        found = "it was not acquired" if token is None else f"{holder!r} acquired it with token {token}"
        super().__init__(
            f"{topic}-{partition}: this process does not hold the lock: {found} (stop what it protects, or acquire it)"
        )


class VersionMismatchError(FencepostError):
    """The put or delete was refused: the key has another version than expected. Nothing was appended.

    `expected`, `actual`: versions, -1 for an absent key. Action: get the key, decide again.
    """

    retriable = True

    def __init__(self, topic: str, partition: int, key: str, expected: int, actual: int) -> None:
        self.topic = topic
        self.partition = partition
        self.key = key
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"{topic}-{partition}: key {key!r} has version {actual}, expected {expected} (get it, and decide again)"
        )


class ForeignRecordError(FencepostError):
    """A record in a recipe's log does not follow its format: it was written without the recipe, or by a newer version.

    Reading stops before it, so that no reader decides on a state that others do not have.

    Action: upgrade this process, or remove the writer and repair the log by hand.
    """

    def __init__(self, topic: str, partition: int, offset: int, why: str) -> None:
        self.topic = topic
        self.partition = partition
        self.offset = offset
        super().__init__(
            f"{topic}-{partition}: cannot use the record at offset {offset}: {why} (upgrade, or find its writer)"
        )


def _rebuild(cls: type[FencepostError], args: tuple[object, ...], state: dict[str, object]) -> FencepostError:
    error = cls.__new__(cls, *args)
    error.__dict__.update(state)
    return error
