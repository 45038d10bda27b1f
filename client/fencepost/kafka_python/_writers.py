"""Log writers, log readers and transactional writers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import BrokerResponseError, KafkaError, KafkaTimeoutError, RetriableError, UnknownError

from fencepost._appending import Append, MaybeAppended
from fencepost._checks import BlockingChecks
from fencepost._log_writer import DEFAULT_BATCH_BYTES_MAX, BlockingLogWriter
from fencepost._reading import BlockingLogReader
from fencepost._steps import CannotRead
from fencepost._transaction import COMMIT_REFUSED, FENCED, Part, explained
from fencepost._transactional_writer import BlockingTransactionalWriter, CommitInDoubt
from fencepost.errors import WriterFencedError
from fencepost.kafka_python._producer import ConditionalProducer, checks_of
from fencepost.records import LogRecord, Record
from fencepost.retries import RetryPolicy

#: Longest wait of a batch for `flush`; long, so that the library never splits a batch on a timer.
_LINGER_MS = 300_000
_POLL_MS = 500
_FETCH_WAIT_MS = 10
#: Retry backoff of an append that waits for another writer's transaction.
_RETRY_BACKOFF_MS = 20
_ERROR_CODE = re.compile(r"\[Error (\d+)\]")


class LogWriter(BlockingLogWriter):
    __doc__ = BlockingLogWriter.__doc__

    def __init__(
        self,
        topic: str,
        partition: int,
        *,
        compression_type: str | None = None,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        batch_bytes_max: int = DEFAULT_BATCH_BYTES_MAX,
        check_ttl_seconds: float = 30.0,
        **configs: Any,
    ) -> None:
        configs.setdefault("request_timeout_ms", int(retry.attempt_seconds * 1000))
        consumer = _CommittedConsumer(retry.attempt_seconds, configs)
        consumer.start()
        producer_configs = {
            **configs,
            "compression_type": compression_type,
            "batch_size": batch_bytes_max,
            # One send per attempt: a read of the log decides whether to send again.
            "retries": 0,
        }
        appender = _Appender(producer_configs, checks_of(check_ttl_seconds, configs), retry.attempt_seconds)
        super().__init__(topic, partition, appender, consumer, retry, batch_bytes_max)


class _Sender:
    """Sends one batch at a time with a producer that can be discarded."""

    error = KafkaError

    def __init__(self, configs: Mapping[str, Any], checks: BlockingChecks, attempt_seconds: float) -> None:
        self._checks = checks
        self.require = checks.require
        self._attempt_seconds = attempt_seconds
        self._timeout_ms = int(attempt_seconds * 1000)
        self._producer: Any = None
        self._configs: dict[str, Any] = {
            **configs,
            "linger_ms": _LINGER_MS,
            "delivery_timeout_ms": _LINGER_MS + 2 * self._timeout_ms,
            "max_block_ms": self._timeout_ms,
        }

    def _open(self) -> Any:
        if self._producer is None:
            self._producer = ConditionalProducer(**self._configs)
            self._producer._checks = self._checks  # one admin client for all producers
        return self._producer

    def _sent(
        self, topic: str, partition: int, records: Sequence[Record], expected: int | None, write_id: bytes
    ) -> list[Any]:
        """The futures of `records`, after a flush."""
        futures = [
            self._producer.send(
                topic,
                record.value,
                record.key,
                list(record.headers),
                partition,
                record.timestamp_ms,
                expected_offset=None if expected is None else expected + index,
                write_id=write_id,
            )
            for index, record in enumerate(records)
        ]
        self._producer.flush(self._attempt_seconds)
        return futures

    def discard(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            # close() waits for pending records without a limit; no public method drops them.
            producer._sender.force_close()
            KafkaProducer.close(producer)

    def close(self) -> None:
        self.discard()
        self._checks.close()


class _Appender(_Sender):
    def send(self, append: Append) -> int:
        done = False
        try:
            self._open()
            futures = self._sent(append.topic, append.partition, append.records, append.expected, append.write_id)
            done = True
            offsets = [int(future.get(0).offset) for future in futures]
            return offsets[0]
        except (RetriableError, UnknownError) as error:
            raise MaybeAppended from error
        finally:
            if not done:
                self.discard()  # drops its buffered records: a later flush must not send them


class _CommittedConsumer:
    error = KafkaError
    timeout_error = KafkaTimeoutError

    def __init__(self, attempt_seconds: float, configs: Mapping[str, Any]) -> None:
        self._timeout_ms = int(attempt_seconds * 1000)
        self._configs = {
            "fetch_max_wait_ms": _FETCH_WAIT_MS,  # a read never waits for future records
            **{k: v for k, v in configs.items() if k in KafkaConsumer.DEFAULT_CONFIG},
            "allow_auto_create_topics": False,
            "auto_offset_reset": "none",
            "enable_auto_commit": False,
            "isolation_level": "read_committed",
        }
        self._consumer: Any = None

    def start(self) -> None:
        if self._consumer is None:
            self._consumer = KafkaConsumer(**self._configs)

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        tp = TopicPartition(topic, partition)
        self.start()
        start = self._consumer.beginning_offsets([tp], self._timeout_ms)[tp]
        return start, self._consumer.end_offsets([tp], self._timeout_ms)[tp]

    def exists(self, topic: str, partition: int) -> bool:
        self.start()
        listed = topic in self._consumer.topics()  # also refreshes what the next method returns
        return listed and partition in self._consumer.partitions_for_topic(topic)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        tp = TopicPartition(topic, partition)
        if self._consumer.assignment() != {tp}:
            self._consumer.assign([tp])
        self._consumer.seek(tp, offset)

    def poll(self) -> tuple[list[LogRecord], int | None]:
        (tp,) = self._consumer.assignment()
        records = [
            LogRecord(record.offset, record.timestamp, record.key, record.value, tuple(record.headers))
            for record in self._consumer.poll(_POLL_MS).get(tp, [])
        ]
        return records, self._consumer.position(tp, _POLL_MS)

    def pause(self) -> None:
        """Nothing is fetched between polls."""

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()


class LogReader(BlockingLogReader):
    __doc__ = BlockingLogReader.__doc__

    def __init__(
        self,
        partitions: Iterable[Any],
        *,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        **configs: Any,
    ) -> None:
        timeout_ms = int(retry.attempt_seconds * 1000)
        configs.setdefault("request_timeout_ms", timeout_ms)
        configs.setdefault("bootstrap_timeout_ms", timeout_ms)
        super().__init__(partitions, _CommittedConsumer(retry.attempt_seconds, configs), retry)


class TransactionalWriter(BlockingTransactionalWriter):
    __doc__ = BlockingTransactionalWriter.__doc__

    def __init__(
        self,
        transactional_id: str,
        *,
        compression_type: str | None = None,
        transaction_timeout_seconds: float = 60.0,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        check_ttl_seconds: float = 30.0,
        **configs: Any,
    ) -> None:
        timeout_ms = int(retry.attempt_seconds * 1000)
        configs.setdefault("request_timeout_ms", timeout_ms)
        configs.setdefault("bootstrap_timeout_ms", timeout_ms)
        producer_configs = {
            **configs,
            "transactional_id": transactional_id,
            "transaction_timeout_ms": int(transaction_timeout_seconds * 1000),
            "compression_type": compression_type,
            "retry_backoff_ms": _RETRY_BACKOFF_MS,
        }
        super().__init__(
            transactional_id,
            _Transaction(producer_configs, checks_of(check_ttl_seconds, configs), retry.attempt_seconds),
            _CommittedConsumer(retry.attempt_seconds, configs),
            retry,
        )


class _Transaction(_Sender):
    def open(self) -> None:
        try:
            self._open().init_transactions()
        except KafkaError as error:
            self.discard()
            if isinstance(error, RetriableError):
                raise CannotRead from error
            raise

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, part: Part, write_id: bytes) -> int:
        try:
            futures = self._sent(part.topic, part.partition, part.records, part.expected, write_id)
            offsets = [int(future.get(0).offset) for future in futures]
            return offsets[0]
        except Exception as error:
            code = error.errno if isinstance(error, BrokerResponseError) else None
            retriable = isinstance(error, RetriableError | UnknownError)
            why = explained(part, error, code=code, retriable=retriable, transactional_id=self._id)
            raise why from (None if why is error else error)

    def commit(self) -> None:
        # Not commit_transaction(), which has no timeout.
        ended = self._producer._transaction_manager.begin_commit()
        self._producer._sender.wakeup()
        try:
            if not ended.wait(self._timeout_ms):
                raise CommitInDoubt from KafkaTimeoutError(f"no response within {self._attempt_seconds:g} s")
        except BrokerResponseError as error:
            if error.errno in FENCED:
                raise WriterFencedError(self._id) from error
            raise CommitInDoubt from error
        except KafkaError as error:
            # Most errors arrive as text only, and make the producer unusable.
            code = _ERROR_CODE.search(str(error))
            raise CommitInDoubt(refused=code is not None and int(code[1]) in COMMIT_REFUSED) from error

    def abort(self) -> bool:
        aborted = self._producer._transaction_manager.begin_abort()
        self._producer._sender.wakeup()
        return bool(aborted.wait(self._timeout_ms))

    @property
    def _id(self) -> str:
        return str(self._configs["transactional_id"])
