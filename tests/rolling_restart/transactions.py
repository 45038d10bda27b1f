"""Writers that commit small transactions sequentially, and continue after every error.

Each follows its client's documentation. After a failed send or commit, the writer aborts the transaction and repeats
it. After a failed abort, it creates a producer with the same transactional id, which ends the open transaction. The
writer then reads whether that one was committed, as an application reads its offsets. Values contain the number of the
attempt, so records of unsuccessful attempts are visible.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Any

from tests.kit import producers
from tests.kit.history import OK, Manner, Reported, read_committed
from tests.kit.producers import Producer
from tests.kit.waiting import until
from tests.kit.writers import Crew, Writer, reported_by_error
from tests.support.raw import Log

PARTITIONS = 3
_RECORDS = 6
#: The writer itself aborts every fifth transaction.
_ABORT_EVERY = 5
#: Longer than clients wait for a restarting proxy. kafka-python waits indefinitely for lost requests.
_REPORTED_SECONDS = 40.0
#: Kafka's Java producer waits for `max.block.ms`, 60 s.
_JAVA_SECONDS = 130.0
_TIMEOUT_MS = 120_000
_PATIENCE_SECONDS = 150.0
_PAUSE_SECONDS = 0.05


class Transactions(Writer):
    """The only writer of its topic. Values begin with the attempt, "NAME/NUMBER.TRY". `kafka` – Kafka's own bootstrap
    address."""

    partitions = PARTITIONS

    def __init__(self, client: str, crew: Crew, topic: str, kafka: str) -> None:
        super().__init__(client, crew, topic, "", manner=Manner(resends=True, idempotent=True))
        self._client, self._kafka = client, kafka
        self._seconds = _JAVA_SECONDS if client == "java" else _REPORTED_SECONDS
        self._producer: Producer | None = None
        self._open: str | None = None
        #: Open when a proxy ended.
        self.open_then: set[str] = set()
        #: Errors of repeated attempts, by operation.
        self.again: Counter[str] = Counter()
        self.producers = 0
        self.longest_seconds = 0.0

    def note_open(self) -> None:
        """Record the open transaction when a proxy ended: it must continue through another proxy."""
        if self._open is not None:
            self.open_then.add(self._open)

    def __str__(self) -> str:
        everything = self.crew.history.transactions
        mine = {name: ended for name, ended in everything.items() if name.startswith(f"{self.name}/")}
        ended = Counter(mine.values())
        again = sum(count for what, count in self.again.items() if not what.startswith(("abort", "init")))
        return (
            f"{self.name}: {ended['committed']} committed, {ended['aborted']} aborted, "
            f"{len(self.open_then & mine.keys())} open at a stop, {again} tried again, "
            f"{self.producers - 1} new producers, longest {self.longest_seconds:.1f} s"
        )

    # ---- one transaction

    def work(self) -> None:
        number = 0
        while not self.over.is_set():
            began, attempt, aborts = time.monotonic(), 0, number % _ABORT_EVERY == _ABORT_EVERY - 1
            while not self._is_done(f"{self.name}/{number}.{attempt}", aborts=aborts):
                attempt += 1
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
            number += 1
            self.over.wait(_PAUSE_SECONDS)
        self._close()

    def _is_done(self, name: str, *, aborts: bool) -> bool:
        """Whether the transaction has ended as intended."""
        step = "init"
        try:
            producer = self._producer = self._producer or self._new()
            step = "begin"
            self._begin(producer)
            step, self._open = "send", name
            self._send(producer, name)
            step = "abort" if aborts else "commit"
            if aborts:
                producer.abort()
            else:
                producer.commit()
        except Exception as error:
            self._failed(step, error)
        else:
            self.crew.history.transactions[name] = "aborted" if aborts else "committed"
            return True
        finally:
            self._open = None
        if self._producer is None or self._is_aborted(self._producer):
            self.crew.history.transactions[name] = "aborted"
            return False
        # The next producer determines the outcome when it starts.
        self._close()
        self._renew()
        committed = [read_committed(self._kafka, self.topic, each) for each in range(self.partitions)]
        is_committed = any(value.startswith(f"{name}/") for values in committed for value in values.values())
        self.crew.history.transactions[name] = "committed" if is_committed else "aborted"
        return is_committed

    def _begin(self, producer: Producer) -> None:
        producer.begin()

    def _send(self, producer: Producer, name: str) -> None:
        """Raises the first error."""
        sent = []
        for number in range(_RECORDS):
            value, partition, expected = f"{name}/{number}", number % self.partitions, self._expected(number)
            operation = self.call([value], expected, partition=partition, transaction=name)
            sent.append((operation, producer.send(self.topic, value, partition=partition, expected=expected)))
        failed = []
        for operation, future in sent:
            outcome = producers.outcome(future, self._seconds)
            if isinstance(outcome, Exception):
                failed.append(outcome)
                self.reported(operation, reported_by_error(outcome))
            else:
                self.reported(operation, Reported(OK, offset=outcome))
        for error in failed:
            raise error

    def _expected(self, number: int) -> int | None:
        return None

    def _is_aborted(self, producer: Producer) -> bool:
        try:
            producer.abort()
        except Exception as error:
            self._failed("abort", error)
            return False
        return True

    def _failed(self, step: str, error: Exception) -> None:
        self.again[f"{step}: {type(error).__name__} {error}"[:160].replace("\n", " ")] += 1

    # ---- the producer

    def _new(self) -> Producer:
        self.producers += 1
        settings: dict[str, Any] = {"acks": "all", "enable_idempotence": True, "transactional_id": self.name}
        if self._client == "kafka-python":
            settings["delivery_timeout_ms"] = int(_REPORTED_SECONDS * 1000)
        return producers.start(
            self._client,
            self.crew.java,
            self.bootstrap,
            seconds=self._seconds,
            transaction_timeout_ms=_TIMEOUT_MS,
            **settings,
        )

    def _renew(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                self._producer = self._new()
            except Exception as error:
                if time.monotonic() > deadline:
                    raise
                self._failed("init", error)
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def _close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(Exception):
                producer.close()


class ConditionalTransactions(Transactions):
    """In one partition, each record with its expected offset."""

    partitions = 1

    _next = 0

    def _begin(self, producer: Producer) -> None:
        self._next = until(
            self._log_end, "a log end after a marker", seconds=_PATIENCE_SECONDS, accept=lambda end: end is not None
        )
        super()._begin(producer)

    def _log_end(self) -> int | None:
        """Transaction markers appear later than the EndTxn response."""
        batches = Log(self._kafka).batches(self.topic)
        if not batches:
            return 0
        return batches[-1].next_offset if batches[-1].is_control else None

    def _expected(self, number: int) -> int | None:
        return self._next + number
