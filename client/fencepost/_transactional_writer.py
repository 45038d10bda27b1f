"""The steps of a transaction: append to several partitions, commit, and find an unknown outcome in the log."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Protocol

from fencepost._reading import Consumer, Reading
from fencepost._steps import Closing, Pause, Steps, Uninterrupted, Use, now, once, run
from fencepost._transaction import (
    COMMIT_REFUSED_MESSAGE,
    Ended,
    Part,
    RequestedAppends,
    appended_batch,
    parts_of,
    refuse_required,
    resolve,
)
from fencepost.errors import OutcomeUnknownError, TransactionAbortedError, TransactionConflictError, WriterFencedError
from fencepost.records import new_write_id
from fencepost.retries import RetryPolicy, patiently


class CommitRefused(Exception):
    """The proxy refused the commit, and the producer can still abort."""


class CommitInDoubt(Exception):
    """The commit's outcome is unknown. `refused`: the commit was probably refused, but only a new producer can
    continue."""

    def __init__(self, *, refused: bool = False) -> None:
        super().__init__()
        self.refused = refused


class TransactionalProducer(Protocol):
    """An adapter's producer. Methods return a result or an awaitable."""

    @property
    def error(self) -> type[Exception]: ...

    def require(self, topic: str) -> Any:
        """TopicFacts. Raises CheckIsOffError, or `error` if the configs cannot be read."""

    def open(self) -> Any:
        """Start a producer, which first ends an earlier one's transaction. Raises CannotRead if worth a retry."""

    def begin(self) -> Any: ...

    def send(self, part: Part, write_id: bytes) -> Any:
        """The offset of the first record. Raises the error that `append` raises after the abort."""

    def commit(self) -> Any:
        """Raises CommitRefused, CommitInDoubt, WriterFencedError."""

    def abort(self) -> Any:
        """True if aborted. False or any error: the abort is not confirmed."""

    def discard(self) -> Any:
        """Close the producer, which may be unusable."""

    def close(self) -> Any:
        """Close the other connections."""


class TransactionalWriterBase:
    """Appends to several partitions in one transaction, each at its expected offset: all or nothing (KIP-27, KIP-98).

    `configs` (`config` for confluent-kafka): the library's connection settings for producer, consumer and admin client.
    `transaction_timeout_seconds`: the coordinator aborts an open transaction after this time. A send, commit or abort
    takes up to `retry.attempt_seconds`, finding an unknown outcome up to `retry.total_seconds`. See docs/client.md.

    One append at a time: a second one raises ConcurrentUseError. Use one writer per `transactional_id` at a time: a new
    writer fences the previous one. With aiokafka, call `stop`, or use `async with`.
    """

    # As in `LogWriterBase`, `append` is steps.

    def __init__(
        self,
        transactional_id: str,
        producer: TransactionalProducer,
        consumer: Consumer,
        retry: RetryPolicy,
    ) -> None:
        self.transactional_id = transactional_id
        self._producer = producer
        self._consumer = consumer
        instead = "a writer with its own transactional id for each task or thread"
        self._use = Use(f"TransactionalWriter {transactional_id!r}", instead)
        self._reading = Reading(consumer, retry, self._use)
        self._retry = retry
        self._open = False
        self._fenced = False

    def append(self, requested: RequestedAppends) -> Any:
        """Append to all partitions and commit, or append to none.

        `requested`: {partition: (expected offset, records)}. A partition is a (topic, partition) tuple or the client
        library's TopicPartition. An expected offset of None appends without a check; at least one must be set. Returns
        {partition: offset of its first record}. A transaction marker follows the records, so the next expected offset
        is that offset + number of records + 1, unless another writer appends first.

        Raises OffsetMismatchError, TransactionConflictError or TransactionAbortedError (not done in time): no record is
        or becomes visible; read, decide and append again (see `retrying`). Raises WriterFencedError if the writer is
        unusable, OutcomeUnknownError if the outcome is unknown, ValueError and CheckIsOffError if nothing was sent.
        Other errors are the client library's; no record is visible then either. An append of aiokafka that is cancelled
        is aborted, unless its commit was sent.
        """
        return self._use.alone(self._append(requested))

    def _append(self, requested: RequestedAppends) -> Steps[dict[Any, int]]:
        parts = parts_of(requested)
        write_id = new_write_id()
        if self._fenced:
            raise WriterFencedError(self.transactional_id)
        for part in parts:
            if part.expected is not None:
                require = lambda topic=part.topic: once(self._producer.require, topic)  # noqa: E731
                refuse_required(part.topic, (yield from patiently(require, self._retry, self._producer.error)))
        if not self._open:
            yield from patiently(self._start, self._retry)
        try:
            yield self._producer.begin()
            offsets = {}
            for part in parts:
                offsets[part.key] = appended_batch(part, (yield self._producer.send(part, write_id)))
        except BaseException as error:
            self._fenced |= isinstance(error, WriterFencedError)
            # A refused batch leaves a sequence gap in this producer, so the next append needs a new one.
            yield Uninterrupted(self._use.prolonged(self._give_up(goes_on=False)))
            raise
        yield from self._commit(parts, write_id)
        return offsets

    def _commit(self, parts: list[Part], write_id: bytes) -> Steps[None]:
        try:
            yield self._producer.commit()
        except CommitRefused as refusal:
            yield from self._give_up(goes_on=True)
            raise TransactionConflictError(COMMIT_REFUSED_MESSAGE) from refusal.__cause__
        except WriterFencedError as fenced:
            self._fenced = True
            yield from self._drop()
            yield from self._resolve_commit(parts, write_id, fenced, fenced.__cause__)
        except CommitInDoubt as in_doubt:
            yield from self._drop()
            aborted = (
                TransactionConflictError(COMMIT_REFUSED_MESSAGE)
                if in_doubt.refused
                else TransactionAbortedError("no response to the commit, and it was not applied")
            )
            yield from self._resolve_commit(parts, write_id, aborted, in_doubt.__cause__)
        except BaseException:
            # Interrupted: the next append completes or aborts the transaction.
            yield Uninterrupted(self._use.prolonged(self._drop()))
            raise

    def _drop(self) -> Steps[None]:
        """Discard the producer. The next append, or the transaction timeout, ends an open transaction."""
        self._open = False
        yield self._producer.discard()

    def _start(self) -> Steps[None]:
        yield self._producer.open()
        self._open = True

    def _give_up(self, *, goes_on: bool) -> Steps[None]:
        """Abort the transaction, because other writers wait for its partitions."""
        aborted = False
        with contextlib.suppress(Exception):
            aborted = yield self._producer.abort()
        if aborted and goes_on:
            return
        yield from self._drop()
        if not aborted and not self._fenced:
            with contextlib.suppress(Exception):  # otherwise the next append or the transaction timeout aborts it
                yield from self._start()

    def _resolve_commit(
        self, parts: list[Part], write_id: bytes, aborted: Exception, cause: BaseException | None
    ) -> Steps[None]:
        """Return if the transaction committed. Raises `aborted` or OutcomeUnknownError."""
        part = next(part for part in parts if part.expected is not None)
        assert part.expected is not None
        deadline = now() + self._retry.total_seconds
        for tries in itertools.count(1):
            if not self._open and not self._fenced:
                with contextlib.suppress(Exception):
                    yield from self._start()
            observation = yield from self._reading.probe(part.topic, part.partition, part.expected)
            ended = resolve(part, write_id, observation)
            if ended is Ended.COMMITTED:
                return
            if ended is Ended.ABORTED:
                raise aborted from cause
            if ended is Ended.DELETED or now() >= deadline:
                reason = "the log now starts after it" if ended is Ended.DELETED else f"last error: {cause!r}"
                expected = {each.where: each.expected for each in parts if each.expected is not None}
                raise OutcomeUnknownError(expected, write_id, reason) from cause
            yield Pause(self._retry.pause(tries))


class BlockingTransactionalWriter(TransactionalWriterBase, Closing):
    __doc__ = TransactionalWriterBase.__doc__

    def append(self, requested: RequestedAppends) -> dict[Any, int]:
        return dict(run(super().append(requested)))

    def close(self) -> None:
        """Close the connections. No append is pending: `append` waits for its outcome."""
        run(self._drop())
        self._producer.close()
        self._consumer.close()
