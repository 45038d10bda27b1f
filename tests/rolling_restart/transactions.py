"""Producers of the four clients that commit small transactions sequentially, and continue after every error.

Each follows its client's documentation. After a failed send or commit, the writer aborts the transaction and repeats
it. After a failed abort, it creates a producer with the same transactional id, which ends the open transaction. The
writer then reads whether that one was committed, as an application reads its offsets. Values contain the number of the
attempt, so records of unsuccessful attempts are visible.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kafka import KafkaConsumer, TopicPartition

from tests.kit.java import JavaProducers
from tests.kit.waiting import until
from tests.rolling_restart.writers import Aiokafka, Confluent, Java, KafkaPython, Sending, Writer
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


class Transacting(Sending, Protocol):
    def begin(self) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


class _KafkaPython(KafkaPython):
    def __init__(self, bootstrap: str, topic: str, name: str) -> None:
        super().__init__(
            bootstrap,
            topic,
            transactional_id=name,
            transaction_timeout_ms=_TIMEOUT_MS,
            delivery_timeout_ms=int(_REPORTED_SECONDS * 1000),
        )
        try:
            self._producer.init_transactions()
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        self._producer.begin_transaction()

    def commit(self) -> None:
        _bounded(self._producer.commit_transaction)

    def abort(self) -> None:
        _bounded(self._producer.abort_transaction)

    def close(self) -> None:
        self._producer.close(1)


class _Aiokafka(Aiokafka):
    def __init__(self, bootstrap: str, topic: str, name: str) -> None:
        super().__init__(bootstrap, topic, transactional_id=name, transaction_timeout_ms=_TIMEOUT_MS)

    def begin(self) -> None:
        self._runner.run(self._producer.begin_transaction())

    def commit(self) -> None:
        self._runner.run(self._producer.commit_transaction())

    def abort(self) -> None:
        self._runner.run(self._producer.abort_transaction())


class _Confluent(Confluent):
    def __init__(self, bootstrap: str, topic: str, name: str) -> None:
        super().__init__(bootstrap, topic, transactional_id=name, transaction_timeout_ms=_TIMEOUT_MS)
        self._producer.init_transactions(_REPORTED_SECONDS)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def commit(self) -> None:
        self._producer.commit_transaction(_REPORTED_SECONDS)

    def abort(self) -> None:
        self._producer.abort_transaction(_REPORTED_SECONDS)


class _Java(Java):
    """`conditional` – all records go to one partition, each with its expected offset."""

    def __init__(
        self, java: JavaProducers, kafka: str, bootstrap: str, topic: str, name: str, *, conditional: bool
    ) -> None:
        settings = {"transactional_id": name, "transaction_timeout_ms": _TIMEOUT_MS}
        super().__init__(java, name, bootstrap, topic, expects=conditional, **settings)
        self._log = Log(kafka)
        self._is_known = False
        try:
            self._do("init")
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        if self._expects and not self._is_known:
            self._next = until(
                self._where_it_ends,
                "a log end after a marker",
                seconds=_PATIENCE_SECONDS,
                accept=lambda found: found is not None,
            )
        self._do("begin")

    def _where_it_ends(self) -> int | None:
        """Transaction markers appear later than the EndTxn response."""
        batches = self._log.batches(self._topic)
        if not batches:
            return 0
        return batches[-1].next_offset if batches[-1].is_control else None

    def send(self, values: Sequence[str]) -> list[int | Exception]:
        sent = [
            self._java.send(
                self._name,
                self._topic,
                value,
                self._next + number if self._expects else None,
                partition=0 if self._expects else number % PARTITIONS,
            )
            for number, value in enumerate(values)
        ]
        reported: list[int | Exception] = []
        for each in sent:
            try:
                reported.append(each.result(_JAVA_SECONDS) or 0)
            except Exception as error:
                reported.append(error)
        self._is_known = all(isinstance(each, int) for each in reported)
        return reported

    def commit(self) -> None:
        self._end("commit")

    def abort(self) -> None:
        self._end("abort")

    def _end(self, verb: str) -> None:
        is_known, self._is_known = self._is_known, False
        self._do(verb)
        self._next += _RECORDS + 1  # the marker takes an offset
        self._is_known = is_known

    def _do(self, verb: str) -> None:
        self._java.query(verb, self._name).result(_JAVA_SECONDS)


def _bounded(call: Callable[[], object]) -> None:
    """Run a call that has no timeout. Raises TimeoutError."""
    reported: queue.Queue[Exception | None] = queue.Queue()

    def run() -> None:
        try:
            call()
        except Exception as error:
            reported.put(error)
        else:
            reported.put(None)

    threading.Thread(target=run, daemon=True).start()
    try:
        error = reported.get(timeout=_REPORTED_SECONDS)
    except queue.Empty:
        raise TimeoutError("it does not come back") from None
    if error is not None:
        raise error


@dataclass
class Tries:
    """`committed` – attempt → number of records, of attempts that the client reported as committed or that were found
    so. `aborted` – by the writer's decision. `open_then` – open when a proxy ended. `again` – errors of repeated
    attempts, by operation. `producers` – how many were created after the first one."""

    committed: dict[str, int] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    open_then: set[str] = field(default_factory=set)
    again: Counter[str] = field(default_factory=Counter)
    looked_up: int = 0
    producers: int = -1
    longest_pause_seconds: float = 0.0


class Transactions(Writer):
    """The only writer of its topic. Values begin with the attempt, "NAME/NUMBER.TRY"."""

    def __init__(self, name: str, topic: str, partitions: int, kafka: str, start: Callable[[], Transacting]) -> None:
        self.partitions = partitions
        self.tries = Tries()
        self._open: str | None = None
        self._kafka = kafka
        self._start_one = start
        self._producer: Transacting | None = None
        super().__init__(name, topic, start, _RECORDS)

    @property
    def appended(self) -> int:
        self.raise_crash()
        return _RECORDS * len(self.tries.committed)

    def note_open(self) -> None:
        """Record the open transaction when a proxy ended: it must continue through another proxy."""
        if self._open is not None:
            self.tries.open_then.add(self._open)

    def committed(self) -> list[tuple[int, str]]:
        """(partition, value) of every record that a read_committed consumer gets from Kafka, in each log's order.

        Waits for open transactions.
        """
        return _committed(self._kafka, self.topic, self.partitions)

    def _work(self) -> None:
        number = 0
        while not self._end.is_set():
            began = time.monotonic()
            self._until_done(number)
            pause = time.monotonic() - began
            self.tries.longest_pause_seconds = max(self.tries.longest_pause_seconds, pause)
            number += 1
            self._end.wait(_PAUSE_SECONDS)
        self._drain()

    def _until_done(self, number: int) -> None:
        """Repeat the transaction until it has ended as intended."""
        attempt, aborts = 0, number % _ABORT_EVERY == _ABORT_EVERY - 1
        while not self._is_done(f"{self.name}/{number}.{attempt}", aborts=aborts):
            attempt += 1

    def _is_done(self, name: str, *, aborts: bool) -> bool:
        step, tries = "init", self.tries
        try:
            producer = self._producer = self._producer or self._new()
            step = "begin"
            producer.begin()
            step, self._open = "send", name
            for reported in producer.send([f"{name}/{number}" for number in range(_RECORDS)]):
                if isinstance(reported, Exception):
                    raise reported
            step = "abort" if aborts else "commit"
            if aborts:
                producer.abort()
                tries.aborted.add(name)
            else:
                producer.commit()
                tries.committed[name] = _RECORDS
        except Exception as error:
            tries.again[f"{step}: {_stated(error)}"] += 1
        else:
            return True
        finally:
            self._open = None
        if self._producer is None or self._is_aborted(self._producer):
            return False
        # The next producer determines the outcome when it starts.
        self._drain()
        self._renew()
        tries.looked_up += 1
        if any(value.startswith(f"{name}/") for _, value in self.committed()):
            tries.committed[name] = _RECORDS
            return True
        return False

    def _is_aborted(self, producer: Transacting) -> bool:
        try:
            producer.abort()
        except Exception as error:
            self.tries.again[f"abort: {_stated(error)}"] += 1
            return False
        return True

    def _new(self) -> Transacting:
        self.tries.producers += 1
        return self._start_one()

    def _renew(self) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                self._producer = self._new()
            except Exception as error:
                if time.monotonic() > deadline:
                    raise
                self.tries.again[f"init: {_stated(error)}"] += 1
                time.sleep(_PAUSE_SECONDS)
            else:
                return

    def _drain(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            with contextlib.suppress(Exception):
                producer.close()


def _stated(error: Exception) -> str:
    return f"{type(error).__name__} {error}"[:160].replace("\n", " ")


def transactional(client: str, kafka: str, bootstrap: str, topic: str, java: JavaProducers) -> Transactions:
    name = f"{client}-transactions"
    starts: dict[str, Callable[[], Transacting]] = {
        "java": lambda: _Java(java, kafka, bootstrap, topic, name, conditional=False),
        "kafka-python": lambda: _KafkaPython(bootstrap, topic, name),
        "aiokafka": lambda: _Aiokafka(bootstrap, topic, name),
        "confluent-kafka": lambda: _Confluent(bootstrap, topic, name),
    }
    return Transactions(name, topic, PARTITIONS, kafka, starts[client])


def conditional_transactions(kafka: str, bootstrap: str, topic: str, java: JavaProducers) -> Transactions:
    """Transactions of Kafka's Java producer, in which each record states its expected offset."""
    name = "java-conditional-transactions"
    return Transactions(name, topic, 1, kafka, lambda: _Java(java, kafka, bootstrap, topic, name, conditional=True))


def _committed(kafka: str, topic: str, partitions: int) -> list[tuple[int, str]]:
    with contextlib.closing(
        KafkaConsumer(bootstrap_servers=kafka, isolation_level="read_committed", enable_auto_commit=False)
    ) as consumer:
        log = Log(kafka)
        ends = {TopicPartition(topic, each): log.end(topic, each) for each in range(partitions)}
        consumer.assign(list(ends))
        consumer.seek_to_beginning()
        found: dict[int, list[str]] = {each: [] for each in range(partitions)}
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while any(consumer.position(each) < end for each, end in ends.items()):
            assert time.monotonic() < deadline, f"{topic} cannot be read to its end: a transaction is open"
            for partition, records in consumer.poll(200).items():
                found[partition.partition] += [record.value.decode() for record in records]
    return [(partition, value) for partition, values in found.items() for value in values]


@dataclass(frozen=True)
class Committed:
    """Results of one writer's transactions, read committed. `open_then` – open when a proxy ended, and committed or
    aborted nevertheless. `torn` – transactions with only a part of their records. `shown` – records of aborted
    attempts. `lost`, `twice` – records."""

    writer: str
    committed: int
    aborted: int
    open_then: int
    again: int
    producers: int
    in_kafka: int
    lost: int
    twice: int
    shown: int
    torn: int
    out_of_order: int
    pause_seconds: float
    reported: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not (self.lost or self.twice or self.shown or self.torn or self.out_of_order) and bool(self.committed)


def counted(writer: Transactions, stored: Sequence[tuple[int, str]]) -> Committed:
    tries = writer.tries
    times = Counter(value for _, value in stored)
    of_tries = Counter(value.rpartition("/")[0] for value in times)
    expected = {f"{name}/{number}" for name in tries.committed for number in range(_RECORDS)}
    orders: dict[int, list[tuple[int, int]]] = {}
    for partition, value in stored:
        name, _, number = value.rpartition("/")
        orders.setdefault(partition, []).append((int(name.rpartition("/")[2].partition(".")[0]), int(number)))
    return Committed(
        writer.name,
        len(tries.committed),
        len(tries.aborted),
        len(tries.open_then & (tries.committed.keys() | tries.aborted)),
        sum(count for what, count in tries.again.items() if not what.startswith(("abort", "init"))),
        max(0, tries.producers),
        len(stored),
        len(expected - times.keys()),
        sum(count - 1 for count in times.values()),
        len(times.keys() - expected),
        sum(count != _RECORDS for count in of_tries.values()),
        sum(later < earlier for each in orders.values() for earlier, later in itertools.pairwise(each)),
        tries.longest_pause_seconds,
        tuple(f"{what} ({count} times)" for what, count in tries.again.most_common(6)),
    )
