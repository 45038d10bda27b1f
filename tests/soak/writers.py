"""Writers: one thread for each kind of client, which continues after every error.

Every record's value is a unique id. Writers of a partition share the log end that they know (`Ends`), and mostly expect
it, sometimes an impossible offset.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import confluent_kafka
import kafka

import fencepost
from fencepost import RetryPolicy
from tests.kit import producers
from tests.kit.history import OK, REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION, History, Manner, Operation, Reported
from tests.kit.java import JavaError, JavaProducers
from tests.kit.threads import Worker
from tests.soak.stage import Stage
from tests.support import clients
from tests.support.raw import Closed, Connection, Producer, batch, produce_request
from tests.support.writers import NOT_LEADER, reported_by, reported_by_message

#: How long a client may retry, and how long one request may take.
DELIVERY_SECONDS = 12.0
REQUEST_SECONDS = 4.0
#: How long a writer waits for a library that should have given up.
_ANSWER_SECONDS = 40.0
_CLOSE_SECONDS = 8.0
_REQUEST_MS = int(REQUEST_SECONDS * 1000)
_SOCKET_SECONDS = 7.0
REOPENED = "client reopened"


def reported_by_future(future: Future[Any]) -> Reported:
    found = producers.outcome(future, _ANSWER_SECONDS)
    return reported_by_error(found) if isinstance(found, Exception) else Reported(OK, offset=found)


def reported_by_error(error: BaseException) -> Reported:
    """The outcome of an exception from a client or our adapter."""
    kind = type(error).__name__
    more: dict[str, Any] = {"code": kind, "detail": str(error)[:200]}
    if isinstance(error, fencepost.OffsetMismatchError):
        return Reported(REFUSED, actual=error.actual, possibly_yours=error.possibly_yours, **more)
    if isinstance(error, fencepost.OffsetViolationError):
        return Reported(VIOLATION, offset=error.appended_at, **more)
    if isinstance(error, fencepost.CheckIsOffError | fencepost.NotAtEndError):
        return Reported(REFUSED, **more)  # nothing was sent
    if isinstance(error, JavaError):
        if error.kind == "PolicyViolationException":
            return reported_by_message(error.message, 44)
        return Reported(UNKNOWN, code=error.kind, detail=error.message[:200])
    if kind == "PolicyViolationError":
        return reported_by_message(str(error), 44)
    if isinstance(error, confluent_kafka.KafkaException):
        failed = error.args[0]
        more["code"] = failed.name()
        return Reported(REFUSED if failed.code() == confluent_kafka.KafkaError.POLICY_VIOLATION else UNKNOWN, **more)
    return Reported(UNKNOWN, **more)


class Ends:
    """The log ends that the writers of a topic assume."""

    def __init__(self) -> None:
        self._ends: dict[str, int] = {}

    def last_observed(self, topic: str, reported: Reported, count: int = 1) -> None:
        if reported.outcome == OK and reported.offset is not None:
            self._ends[topic] = reported.offset + count
        elif reported.actual is not None and reported.actual >= 0:
            self._ends[topic] = reported.actual

    def of(self, topic: str) -> int:
        return self._ends.get(topic, 0)


class Crew:
    """Shared state of all writers of a run."""

    def __init__(self, stage: Stage, history: History, java: JavaProducers, seed: int, pace_seconds: float) -> None:
        self.stage = stage
        self.history = history
        self.java = java
        self.seed = seed
        self.pace_seconds = pace_seconds
        self.ends = Ends()
        self.over = threading.Event()


class Writer(Worker):
    """Calls `open`, then `step` repeatedly. After an exception or too many unknown outcomes it reopens its client."""

    kind = "writer"
    manner = Manner()

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(f"{self.kind}-{topic}/{proxy}{number}", crew.over)
        self.crew = crew
        self.topic = topic
        self.proxy = proxy
        self.random = random.Random(f"{crew.seed}/{self.name}")
        self._numbers = itertools.count(1)
        self._unknown_in_a_row = 0

    @property
    def bootstrap(self) -> str:
        return self.crew.stage.bootstrap(self.proxy)

    def work(self) -> None:
        while not self.over.is_set():
            self._unknown_in_a_row = 0
            try:
                self.open()
                while not self.over.is_set() and self._unknown_in_a_row < 3:
                    self.step()
                    self.over.wait(self.random.uniform(0.3, 1.7) * self.crew.pace_seconds)
            except Exception as error:
                self.crew.history.event(REOPENED, f"{self.kind} {type(error).__name__}: {error}")
                self.over.wait(0.3)
            finally:
                # a library may wait indefinitely
                closing = threading.Thread(target=self._close_quietly, daemon=True)
                closing.start()
                closing.join(_CLOSE_SECONDS)

    def _close_quietly(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def open(self) -> None: ...

    def step(self) -> None: ...

    def close(self) -> None: ...

    # ---- for subclasses

    def new_id(self) -> str:
        return f"{self.name}/{next(self._numbers)}"

    def expectation(self) -> int:
        """Mostly the log end; sometimes an offset after or before it."""
        end = self.crew.ends.of(self.topic)
        if self.random.random() < 0.06:
            return max(0, end + self.random.choice([-3, -1, 1, 2, 100]))
        return end

    def call(self, ids: Sequence[str], expected: int | None, **more: Any) -> Operation:
        return self.crew.history.call(self.name, self.topic, ids, expected=expected, manner=self.manner, **more)

    def reported(self, operation: Operation, reported: Reported) -> Reported:
        self.crew.history.reported(operation, reported)
        self.crew.ends.last_observed(self.topic, reported, len(operation.ids))
        self._unknown_in_a_row = self._unknown_in_a_row + 1 if reported.outcome == UNKNOWN else 0
        return reported

    def wait(self, future: Future[Any], seconds: float = _ANSWER_SECONDS) -> Any:
        return future.result(seconds)


# --- raw requests -----------------------------------------------------------------------------------------------------


class RawWriter(Writer):
    """Pipelined batches with consecutive expected offsets, without retries; or one batch at a time.

    `batches`, `records` – their numbers, chosen at random. Idempotent ones have sequences that continue after a
    refusal.
    """

    kind = "raw"
    conditional = True
    batches: Sequence[int] = (1,)
    records: Sequence[int] = (1, 1, 1, 3)

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(crew, topic, proxy, number)
        self._pipelines = itertools.count(1)
        self.producer: Producer | None = None

    def open(self) -> None:
        self.connection = self.connect(self.bootstrap)
        if self.manner.idempotent:
            self.producer = self.connection.init_producer_id()

    def connect(self, bootstrap: str) -> Connection:
        return connect_to_leader(bootstrap, self.topic, _SOCKET_SECONDS)

    def close(self) -> None:
        self.connection.close()

    def batch(self, ids: Sequence[str], expected: int | None) -> bytes:
        producer, write_id = self.producer, ids[0].encode() if self.manner.named else None
        if producer is not None:
            self.producer = producer._replace(sequence=producer.sequence + len(ids))
        return batch(*(each.encode() for each in ids), expected=expected, producer=producer, write_id=write_id)

    def step(self) -> None:
        end = self.expectation() if self.conditional else None
        count = self.random.choice(self.batches)
        pipeline_key = f"{self.name}/pipeline {next(self._pipelines)}" if count > 1 else None
        calls, batches = [], []
        for _ in range(count):
            ids = [self.new_id() for _ in range(self.random.choice(self.records))]
            batches.append(self.batch(ids, end))
            calls.append(self.call(ids, end, pipeline_key=pipeline_key))
            end = None if end is None else end + len(ids)
        # in one piece: otherwise the first response may precede the last request
        requests = [produce_request({self.topic: {0: each}}, timeout_ms=_REQUEST_MS) for each in batches]
        left = list(calls)
        try:
            self.connection.socket.sendall(b"".join(self.connection.frame(each, 9)[1] for each in requests))
            while left:
                answer = self.connection.receive_produce()[1][self.topic, 0]
                self.reported(left.pop(0), reported_by(answer))
        except (OSError, Closed) as error:
            for operation in left:
                self.reported(operation, Reported(UNKNOWN, code=type(error).__name__))
            raise
        if answer.error_code == NOT_LEADER:
            raise OSError("another leader, perhaps")


class RawPassThroughWriter(RawWriter):
    """Without expected offset: refused where one is required."""

    kind = "raw-plain"
    conditional = False
    records = (1,)


class RawPipeline(RawWriter):
    kind = "raw-chain"
    batches = range(2, 9)
    records = (1,)


class RawSequencedPipeline(RawPipeline):
    kind = "raw-chain-sequenced"
    manner = Manner(idempotent=True)


class RawRetrier(RawWriter):
    """Names each write, and sends it again through either proxy until its outcome is known."""

    kind = "raw-named"
    manner = Manner(named=True, resends=True)
    proxies: tuple[str, ...] = ("a", "b")

    def open(self) -> None:
        self._open: Connection | None = None
        if self.manner.idempotent:
            with Connection(self.bootstrap, timeout_seconds=_SOCKET_SECONDS) as connection:
                self.producer = connection.init_producer_id()

    def step(self) -> None:
        each, expected = self.new_id(), self.expectation()
        records = self.batch([each], expected)
        operation = self.call([each], expected)
        give_up = time.monotonic() + 2 * DELIVERY_SECONDS
        while True:
            try:
                if self._open is None:
                    self._open = self.connect(self.crew.stage.bootstrap(self.random.choice(self.proxies)))
                reported = reported_by(self._open.append(self.topic, records, timeout_ms=_REQUEST_MS))
            except (OSError, Closed, AssertionError) as error:
                reported = Reported(UNKNOWN, code=type(error).__name__)
            # "Try again" covers one attempt: an earlier one may have been appended.
            if reported.outcome not in (UNKNOWN, TRY_AGAIN) or time.monotonic() > give_up:
                break
            self.close()
            if self.over.wait(0.1):
                break
        if reported.outcome == TRY_AGAIN:
            reported = Reported(UNKNOWN, code=reported.code)
        self.reported(operation, reported)

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open = None


class RawSequenced(RawRetrier):
    """Like an idempotent library: own producer id, no write-id, the same batch again until its outcome is known."""

    kind = "raw-sequenced"
    manner = Manner(resends=True, idempotent=True)

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(crew, topic, proxy, number)
        self.proxies = (proxy,)


def connect_to_leader(bootstrap: str, topic: str, timeout_seconds: float) -> Connection:
    with Connection(bootstrap, timeout_seconds=timeout_seconds) as queried:
        metadata = queried.metadata(topic)
    brokers = {each.node_id: f"{each.host}:{each.port}" for each in metadata.brokers}
    partitions = metadata.topics[0].partitions
    leader = partitions[0].leader_id if partitions else -1
    if leader not in brokers:
        raise OSError(f"{topic} has no leader")
    return Connection(brokers[leader], timeout_seconds=timeout_seconds)


# --- the Python libraries -------------------------------------------------------------------------------------------


def _configs(library: str, **more: Any) -> dict[str, Any]:
    """Settings that let a library give up in time."""
    request_ms, delivery_ms = int(REQUEST_SECONDS * 1000), int(DELIVERY_SECONDS * 1000)
    found: dict[str, Any] = {
        "kafka-python": {
            "request_timeout_ms": request_ms,
            "delivery_timeout_ms": delivery_ms,
            "max_block_ms": delivery_ms,
            "retries": 1000,
            "acks": "all",
            "connections_max_idle_ms": 60_000,
        },
        "aiokafka": {"request_timeout_ms": request_ms, "acks": "all"},
        "confluent-kafka": {
            "message_timeout_ms": delivery_ms,
            "request_timeout_ms": request_ms,
            "socket_timeout_ms": request_ms,
            "linger_ms": 0,
        },
        "java": {
            "request_timeout_ms": request_ms,
            "delivery_timeout_ms": delivery_ms,
            "max_block_ms": delivery_ms,
            "linger_ms": 0,
        },
    }[library]
    return found | more


class LibraryWriter(Writer):
    """Our `ConditionalProducer` with one of the libraries: it adds write-ids."""

    conditional = True
    library = ""
    more: dict[str, Any] = {}  # noqa: RUF012 - of a class, never changed

    def open(self) -> None:
        self.producer = clients.producer(self.library, self.bootstrap, **_configs(self.library, **self.more))

    def options(self, each: str, expected: int) -> dict[str, Any]:
        return {"expected_offset": expected}

    def step(self) -> None:
        each = self.new_id()
        expected = self.expectation() if self.conditional else None
        operation = self.call([each], expected)
        options = self.options(each, expected) if expected is not None else {}
        try:
            outcome = self.producer.send(self.topic, each.encode(), partition=0, **options)
            self.producer.resolve()
        except Exception as error:
            self.reported(operation, reported_by_error(error))
            raise
        if outcome.error is not None:
            self.reported(operation, reported_by_error(outcome.error))
        elif outcome.offset is None:
            self.reported(operation, Reported(UNKNOWN, code="not resolved"))
        else:
            self.reported(operation, Reported(OK, offset=outcome.offset if outcome.offset >= 0 else None))

    def close(self) -> None:
        self.producer.close()


class KafkaPython(LibraryWriter):
    kind = "kafka-python"
    library = "kafka-python"
    manner = Manner(named=True, resends=True)


class Aiokafka(LibraryWriter):
    kind = "aiokafka"
    library = "aiokafka"
    manner = Manner(named=True, resends=True, sees_messages=False, reads_end=True)


class Confluent(LibraryWriter):
    kind = "confluent"
    library = "confluent-kafka"
    manner = Manner(named=True, resends=True, sees_messages=False)


class KafkaPythonHeaders(KafkaPython):
    """The unmodified library with our record header, without write-id."""

    kind = "kafka-python-headers"
    manner = Manner(resends=True)

    def options(self, each: str, expected: int) -> dict[str, Any]:
        return {"headers": [("fencepost-expected-offset", b"%d" % expected)]}


class AiokafkaHeaders(Aiokafka):
    """Idempotent, with write-ids added manually."""

    kind = "aiokafka-headers"
    manner = Manner(named=True, resends=True, sees_messages=False, idempotent=True)
    more = {"enable_idempotence": True}  # noqa: RUF012

    def options(self, each: str, expected: int) -> dict[str, Any]:
        return {"headers": [("fencepost-expected-offset", b"%d" % expected), ("fencepost-write-id", each.encode())]}


class ConfluentHeaders(AiokafkaHeaders):
    kind = "confluent-headers"
    library = "confluent-kafka"
    more = {"enable_idempotence": True}  # noqa: RUF012


class ConfluentNotIdempotent(AiokafkaHeaders):
    kind = "confluent-headers-not-idempotent"
    library = "confluent-kafka"
    manner = Manner(named=True, resends=True, sees_messages=False)
    more = {"enable_idempotence": False}  # noqa: RUF012


class _StockKafkaPython(clients.KafkaPythonProducer):
    """The library's own producer: our adapter is never idempotent."""

    def __init__(self, bootstrap: str, **configs: Any) -> None:
        self.producer = kafka.KafkaProducer(bootstrap_servers=bootstrap, **configs)
        self._waiting = []


class KafkaPythonPassThrough(KafkaPython):
    """Without expected offset; idempotent by default."""

    kind = "kafka-python-plain"
    manner = Manner(resends=True, idempotent=True)
    conditional = False

    def open(self) -> None:
        self.producer = _StockKafkaPython(self.bootstrap, **_configs(self.library))


class ConfluentPassThrough(Confluent):
    """Without expected offset; idempotent."""

    kind = "confluent-plain"
    manner = Manner(resends=True, sees_messages=False, idempotent=True)
    conditional = False
    more = {"enable_idempotence": True}  # noqa: RUF012


class AiokafkaPassThrough(Aiokafka):
    """Without expected offset; at least once."""

    kind = "aiokafka-plain"
    manner = Manner(resends=True, sees_messages=False)
    conditional = False


class LogWriter(Writer):
    """KIP-27's worked example: reads to the end, appends a batch, resolves unknown outcomes."""

    library = ""
    manner = Manner(named=True, resends=True, reads_end=True)

    def open(self) -> None:
        policy = RetryPolicy(attempt_seconds=REQUEST_SECONDS, total_seconds=3 * DELIVERY_SECONDS)
        self.log = clients.log_writer(self.library, self.topic, self.bootstrap, policy)
        self.log.read_to_end(lambda _: None)

    def step(self) -> None:
        expected = self.log.next_offset
        ids = [self.new_id() for _ in range(self.random.randint(1, 4))]
        operation = self.call(ids, expected)
        try:
            offset = self.log.append([fencepost.Record(each.encode()) for each in ids])
        except Exception as error:
            self.reported(operation, reported_by_error(error))
            if not isinstance(error, fencepost.OffsetMismatchError | fencepost.InDoubtError):
                raise
            self.log.read_to_end(lambda _: None)
        else:
            self.reported(operation, Reported(OK, offset=offset))

    def close(self) -> None:
        self.log.close()


class KafkaPythonLog(LogWriter):
    kind = "kafka-python-log"
    library = "kafka-python"


class AiokafkaLog(LogWriter):
    kind = "aiokafka-log"
    library = "aiokafka"


class ConfluentLog(LogWriter):
    kind = "confluent-log"
    library = "confluent-kafka"


# --- Java -------------------------------------------------------------------------------------------------------------


class JavaWriter(Writer):
    """Idempotent by default. Sends one record, or pipelined ones."""

    kind = "java"
    manner = Manner(resends=True, idempotent=True)
    conditional = True
    pipeline_max = 1
    settings: dict[str, Any] = {}  # noqa: RUF012 - of a class, never changed

    def open(self) -> None:
        settings = _configs("java", **self.settings)
        self.producer = producers.Java(self.crew.java, self.bootstrap, seconds=_ANSWER_SECONDS, **settings)

    def step(self) -> None:
        count = self.random.randint(1, self.pipeline_max)
        first = self.expectation()
        calls = []
        for delta in range(count):
            each = self.new_id()
            expected = first + delta if self.conditional else None
            operation = self.call([each], expected)
            write_id = each if self.manner.named else None
            calls.append((operation, self.producer.send(self.topic, each, expected=expected, write_id=write_id)))
        for operation, future in calls:
            self.reported(operation, reported_by_future(future))

    def close(self) -> None:
        self.producer.close()


class JavaPipeline(JavaWriter):
    kind = "java-chain"
    pipeline_max = 6


class JavaNamed(JavaWriter):
    kind = "java-named"
    manner = Manner(named=True, resends=True)
    settings = {"enable_idempotence": False}  # noqa: RUF012


class JavaPassThrough(JavaWriter):
    kind = "java-plain"
    conditional = False
    pipeline_max = 3


# --- transactions -----------------------------------------------------------------------------------------------------


class Transactional(Writer):
    """A transaction of a few records, some with an expected offset; then commit or abort."""

    client = ""
    manner = Manner(resends=True, sees_messages=False, idempotent=True)

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(crew, topic, proxy, number)
        self._transactions = itertools.count(1)

    def open(self) -> None:
        configs = _configs(self.client, transactional_id=self.name, transaction_timeout_ms=15_000)
        self.producer = producers.start(self.client, self.crew.java, self.bootstrap, seconds=_ANSWER_SECONDS, **configs)

    def step(self) -> None:
        name = f"{self.name}/transaction {next(self._transactions)}"
        commit = self.random.random() < 0.65
        self.producer.begin()
        accepted = True
        try:
            for _ in range(self.random.randint(1, 4)):
                expected = self.expectation() if self.random.random() < 0.3 else None
                each = self.new_id()
                operation = self.call([each], expected, transaction=name)
                try:
                    future = self.producer.send(self.topic, each, expected=expected)
                except Exception as error:
                    reported = reported_by_error(error)
                else:
                    reported = reported_by_future(future)
                self.reported(operation, reported)
                accepted = accepted and reported.outcome == OK
                if not accepted:
                    break
            if commit and accepted:
                self.producer.commit()
            else:
                self.producer.abort()
        except Exception:
            self.crew.history.transactions[name] = UNKNOWN
            raise
        self.crew.history.transactions[name] = "committed" if commit and accepted else "aborted"

    def close(self) -> None:
        self.producer.close()


class ConfluentTransactional(Transactional):
    kind = "confluent-transactional"
    client = "confluent-kafka"


class JavaTransactional(Transactional):
    kind = "java-transactional"
    client = "java"
    manner = Manner(resends=True, idempotent=True)


class AiokafkaTransactional(Transactional):
    kind = "aiokafka-transactional"
    client = "aiokafka"
