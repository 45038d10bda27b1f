"""Writers: one thread for each kind of client, which continues after every error.

Every record's value is a unique id. Writers of a partition share the log end that they know (`Ends`), and mostly expect
it, sometimes an impossible offset.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import aiokafka
import confluent_kafka
import kafka

import fencepost
from fencepost import RetryPolicy
from tests.kit.history import OK, REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION, Manner, Recorder, Reported
from tests.kit.java import JavaError, JavaProducers
from tests.soak.stage import Stage
from tests.support import clients
from tests.support.raw import Answer, Closed, Connection, batch, produce_request

#: How long a client may retry, and how long one request may take.
DELIVERY_SECONDS = 12.0
REQUEST_SECONDS = 4.0
#: How long a writer waits for a library that should have given up.
_ANSWER_SECONDS = 40.0
_CLOSE_SECONDS = 8.0
_REQUEST_MS = int(REQUEST_SECONDS * 1000)
_SOCKET_SECONDS = 7.0
_MISMATCH = re.compile(r"OFFSET_MISMATCH \S+ \S+ expected=(-?\d+) actual=(-?\d+)( record=\d+)?( POSSIBLY_YOURS)?")
_VIOLATION = re.compile(r"^OFFSET_VIOLATION .*\bappended_at=(\d+)")

NONE, NOT_LEADER, TIMED_OUT, NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND = 0, 6, 7, 19, 20
_REFUSALS = frozenset({29, 32, 44, 87})


def reported_by(answer: Answer) -> Reported:
    """The outcome in a Produce response, for one attempt."""
    message = answer.message or ""
    code = answer.error_code
    if code == NONE:
        return Reported(OK, offset=answer.base_offset)
    more: dict[str, Any] = {"code": code, "detail": message[:200]}
    if found := _VIOLATION.match(message):
        return Reported(VIOLATION, offset=int(found[1]), **more)
    if code in _REFUSALS:
        return reported_by_message(message, code)
    if code == NOT_ENOUGH_REPLICAS or (code == NOT_LEADER and "TRY_AGAIN" in message):
        return Reported(TRY_AGAIN, **more)
    return Reported(UNKNOWN, **more)


def reported_by_message(message: str, code: int | str) -> Reported:
    """The outcome of a refusal with a visible message."""
    if found := _VIOLATION.match(message):
        return Reported(VIOLATION, offset=int(found[1]), code=code, detail=message[:200])
    found = _MISMATCH.search(message)
    # A contradictory expected offset gets another number: the offset that this record would have.
    actual = int(found[2]) if found and not found[3] else None
    yours = found[4] is not None if found else None
    return Reported(REFUSED, actual=actual, possibly_yours=yours, code=code, detail=message[:200])


def reported_by_error(error: BaseException) -> Reported:
    """The outcome of an exception from a Python library or our adapter."""
    kind = type(error).__name__
    more: dict[str, Any] = {"code": kind, "detail": str(error)[:200]}
    if isinstance(error, fencepost.OffsetMismatchError):
        return Reported(REFUSED, actual=error.actual, possibly_yours=error.possibly_yours, **more)
    if isinstance(error, fencepost.OffsetViolationError):
        return Reported(VIOLATION, offset=error.appended_at, **more)
    if isinstance(error, fencepost.CheckIsOffError | fencepost.NotAtEndError):
        return Reported(REFUSED, **more)  # nothing was sent
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

    def __init__(self, stage: Stage, recorder: Recorder, java: JavaProducers, seed: int, pace_seconds: float) -> None:
        self.stage = stage
        self.recorder = recorder
        self.java = java
        self.seed = seed
        self.pace_seconds = pace_seconds
        self.ends = Ends()
        self.over = threading.Event()


class Writer:
    """Calls `open`, then `step` repeatedly. After an exception or too many unknown outcomes it reopens its client."""

    kind = "writer"
    manner = Manner()

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        self.crew = crew
        self.topic = topic
        self.proxy = proxy
        self.name = f"{self.kind}-{topic}-{proxy}{number}"
        self.random = random.Random(f"{crew.seed}/{self.name}")
        self._numbers = itertools.count(1)
        self._unknown_in_a_row = 0
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def bootstrap(self) -> str:
        return self.crew.stage.bootstrap(self.proxy)

    def _run(self) -> None:
        while not self.crew.over.is_set():
            self._unknown_in_a_row = 0
            try:
                self.open()
                while not self.crew.over.is_set() and self._unknown_in_a_row < 3:
                    self.step()
                    self.crew.over.wait(self.random.uniform(0.3, 1.7) * self.crew.pace_seconds)
            except Exception as error:
                self.crew.recorder.anew(self.name, error)
                self.crew.over.wait(0.3)
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

    def call(
        self,
        ids: Sequence[str],
        expected: int | None,
        *,
        pipeline_key: str | None = None,
        transaction: str | None = None,
        manner: Manner | None = None,
    ) -> int:
        return self.crew.recorder.call(
            self.name,
            self.topic,
            0,
            ids,
            expected=expected,
            manner=manner or self.manner,
            pipeline_key=pipeline_key,
            transaction=transaction,
        )

    def reported(self, operation: int, reported: Reported, count: int = 1) -> Reported:
        self.crew.recorder.reported(operation, reported)
        self.crew.ends.last_observed(self.topic, reported, count)
        self._unknown_in_a_row = self._unknown_in_a_row + 1 if reported.outcome == UNKNOWN else 0
        return reported

    def wait(self, future: Future[Any], seconds: float = _ANSWER_SECONDS) -> Any:
        return future.result(seconds)


# --- raw requests -----------------------------------------------------------------------------------------------------


class RawWriter(Writer):
    """One append at a time, without retries."""

    kind = "raw"

    def open(self) -> None:
        self.connection = self.connect()

    def connect(self, bootstrap: str | None = None) -> Connection:
        """Connect to the listener of the partition's leader."""
        with Connection(bootstrap or self.bootstrap, timeout_seconds=_SOCKET_SECONDS) as queried:
            metadata = queried.metadata(self.topic)
        brokers = {each.node_id: f"{each.host}:{each.port}" for each in metadata.brokers}
        partitions = metadata.topics[0].partitions
        leader = partitions[0].leader_id if partitions else -1
        if leader not in brokers:
            raise OSError(f"{self.topic} has no leader")
        return Connection(brokers[leader], timeout_seconds=_SOCKET_SECONDS)

    def send(self, connection: Connection, records: bytes) -> Answer:
        return connection.append(self.topic, records, timeout_ms=_REQUEST_MS)

    def close(self) -> None:
        self.connection.close()

    def once(self, records: bytes, operation: int, count: int = 1) -> Reported:
        try:
            answer = self.send(self.connection, records)
        except (OSError, Closed, AssertionError) as error:
            self.reported(operation, Reported(UNKNOWN, code=type(error).__name__))
            raise
        reported = self.reported(operation, reported_by(answer), count)
        if answer.error_code == NOT_LEADER:
            raise OSError("another leader, perhaps")
        return reported

    def step(self) -> None:
        ids = [self.new_id() for _ in range(self.random.choice([1, 1, 1, 3]))]
        expected = self.expectation()
        records = batch(*(each.encode() for each in ids), expected=expected)
        self.once(records, self.call(ids, expected), len(ids))


class RawPassThroughWriter(RawWriter):
    """Without expected offset: refused where one is required."""

    kind = "raw-plain"

    def step(self) -> None:
        each = self.new_id()
        self.once(batch(each.encode()), self.call([each], None))


class RawRetrier(RawWriter):
    """Names each write, and sends it again through either proxy until its outcome is known."""

    kind = "raw-named"
    manner = Manner(named=True, resends=True)
    proxies: tuple[str, ...] = ("a", "b")

    def records(self, each: str, expected: int) -> bytes:
        return batch(each.encode(), expected=expected, write_id=each.encode())

    def open(self) -> None:
        self.connection: Connection | None = None  # type: ignore[assignment]

    def step(self) -> None:
        each, expected = self.new_id(), self.expectation()
        records = self.records(each, expected)
        operation = self.call([each], expected)
        give_up = time.monotonic() + 2 * DELIVERY_SECONDS
        reported = Reported(UNKNOWN)
        while True:
            try:
                if self.connection is None:
                    self.connection = self.connect(self.crew.stage.bootstrap(self.random.choice(self.proxies)))
                reported = reported_by(self.send(self.connection, records))
            except (OSError, Closed, AssertionError) as error:
                reported = Reported(UNKNOWN, code=type(error).__name__)
            # "Try again" covers one attempt: an earlier one may have been appended.
            if reported.outcome not in (UNKNOWN, TRY_AGAIN) or time.monotonic() > give_up:
                break
            self.close()
            if self.crew.over.wait(0.1):
                break
        if reported.outcome == TRY_AGAIN:
            reported = Reported(UNKNOWN, code=reported.code)
        self.reported(operation, reported)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None  # type: ignore[assignment]


class RawSequenced(RawRetrier):
    """Like an idempotent library: own producer id, no write-id, the same batch again until its outcome is known."""

    kind = "raw-sequenced"
    manner = Manner(resends=True, idempotent=True)

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(crew, topic, proxy, number)
        self.proxies = (proxy,)

    def open(self) -> None:
        super().open()
        with Connection(self.bootstrap, timeout_seconds=_SOCKET_SECONDS) as connection:
            self.producer = connection.init_producer_id()

    def records(self, each: str, expected: int) -> bytes:
        records = batch(each.encode(), expected=expected, producer=self.producer)
        self.producer = self.producer._replace(sequence=self.producer.sequence + 1)
        return records


class RawPipeline(RawWriter):
    """Pipelined batches with consecutive expected offsets."""

    kind = "raw-chain"

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(crew, topic, proxy, number)
        self._pipelines = itertools.count(1)

    def records(self, each: str, expected: int) -> bytes:
        return batch(each.encode(), expected=expected)

    def step(self) -> None:
        pipeline_key = f"{self.name}/chain {next(self._pipelines)}"
        expected = self.expectation()
        ids = [self.new_id() for _ in range(self.random.randint(2, 8))]
        calls = []
        for delta, each in enumerate(ids):
            records = self.records(each, expected + delta)
            calls.append((self.call([each], expected + delta, pipeline_key=pipeline_key), records))
        answered = 0
        try:
            # in one piece: otherwise the first response may precede the last request
            requests = [produce_request({self.topic: {0: each}}, timeout_ms=_REQUEST_MS) for _, each in calls]
            self.connection.socket.sendall(b"".join(self.connection.frame(each, 9)[1] for each in requests))
            for operation, _ in calls:
                answer = self.connection.receive_produce()[1][self.topic, 0]
                self.reported(operation, reported_by(answer))
                answered += 1
        except (OSError, Closed) as error:
            for operation, _ in calls[answered:]:
                self.reported(operation, Reported(UNKNOWN, code=type(error).__name__))
            raise
        if answer.error_code == NOT_LEADER:
            raise OSError("another leader, perhaps")


class RawSequencedPipeline(RawPipeline):
    """The same with an idempotent library's sequences, which continue after a refusal."""

    kind = "raw-chain-sequenced"
    manner = Manner(idempotent=True)

    def open(self) -> None:
        super().open()
        with Connection(self.bootstrap, timeout_seconds=_SOCKET_SECONDS) as connection:
            self.producer = connection.init_producer_id()

    def records(self, each: str, expected: int) -> bytes:
        records = batch(each.encode(), expected=expected, producer=self.producer)
        self.producer = self.producer._replace(sequence=self.producer.sequence + 1)
        return records


# --- the three Python libraries ---------------------------------------------------------------------------------------


def _configs(library: str, **more: Any) -> dict[str, Any]:
    """Settings that let a library give up in time, named as in `tests.support.clients`."""
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
            self.reported(operation, Reported(UNKNOWN, code="not settled"))
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
            self.reported(operation, reported_by_error(error), len(ids))
            if not isinstance(error, fencepost.OffsetMismatchError | fencepost.InDoubtError):
                raise
            self.log.read_to_end(lambda _: None)
        else:
            self.reported(operation, Reported(OK, offset=offset), len(ids))

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

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(crew, topic, proxy, number)
        self._names = itertools.count(1)

    def open(self) -> None:
        self.producer = f"{self.name}/{next(self._names)}"
        self.wait(
            self.crew.java.open(
                self.producer,
                bootstrap_servers=self.bootstrap,
                linger_ms=0,
                request_timeout_ms=int(REQUEST_SECONDS * 1000),
                delivery_timeout_ms=int(DELIVERY_SECONDS * 1000),
                max_block_ms=int(DELIVERY_SECONDS * 1000),
                **self.settings,
            )
        )

    def step(self) -> None:
        count = self.random.randint(1, self.pipeline_max)
        first = self.expectation()
        calls = []
        for delta in range(count):
            each = self.new_id()
            expected = first + delta if self.conditional else None
            operation = self.call([each], expected)
            write_id = each if self.manner.named else None
            calls.append((operation, self.crew.java.send(self.producer, self.topic, each, expected, write_id)))
        for operation, future in calls:
            self.reported(operation, self.reported_by(future))

    def reported_by(self, future: Future[int | None]) -> Reported:
        try:
            offset = self.wait(future)
        except JavaError as error:
            if error.kind == "PolicyViolationException":
                return reported_by_message(error.message, 44)
            return Reported(UNKNOWN, code=error.kind, detail=error.message[:200])
        except FutureTimeout:
            return Reported(UNKNOWN, code="no answer")
        return Reported(OK, offset=offset if offset is not None and offset >= 0 else None)

    def close(self) -> None:
        self.crew.java.query("close", self.producer)


class JavaPipeline(JavaWriter):
    kind = "java-chain"
    pipeline_max = 6


class JavaNamed(JavaWriter):
    kind = "java-named"
    manner = Manner(named=True, resends=True)
    settings = {"enable_idempotence": "false"}  # noqa: RUF012


class JavaPassThrough(JavaWriter):
    kind = "java-plain"
    conditional = False
    pipeline_max = 3


# --- transactions -----------------------------------------------------------------------------------------------------


class Transactional(Writer):
    """A transaction of a few records, some with an expected offset; then commit or abort."""

    manner = Manner(resends=True, sees_messages=False, idempotent=True)

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(crew, topic, proxy, number)
        self._transactions = itertools.count(1)

    def step(self) -> None:
        name = f"{self.name}/transaction {next(self._transactions)}"
        commit = self.random.random() < 0.65
        self.begin()
        accepted = True
        try:
            for _ in range(self.random.randint(1, 4)):
                expected = self.expectation() if self.random.random() < 0.3 else None
                each = self.new_id()
                operation = self.call([each], expected, transaction=name)
                reported = self.reported(operation, self.append(each, expected))
                accepted = accepted and reported.outcome == OK
                if not accepted:
                    break
            if commit and accepted:
                self.commit()
            else:
                self.abort()
        except Exception:
            self.crew.recorder.transaction(name, UNKNOWN)
            raise
        self.crew.recorder.transaction(name, "committed" if commit and accepted else "aborted")

    def begin(self) -> None:
        raise NotImplementedError

    def append(self, each: str, expected: int | None) -> Reported:
        raise NotImplementedError

    def commit(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError


class ConfluentTransactional(Transactional):
    kind = "confluent-transactional"

    def open(self) -> None:
        self.producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "transactional.id": self.name,
                "transaction.timeout.ms": 15_000,
                "message.timeout.ms": int(DELIVERY_SECONDS * 1000),
                "request.timeout.ms": int(REQUEST_SECONDS * 1000),
                "socket.timeout.ms": int(REQUEST_SECONDS * 1000),
                "linger.ms": 0,
                "log_level": 0,
            }
        )
        self.producer.init_transactions(_ANSWER_SECONDS)

    def begin(self) -> None:
        self.producer.begin_transaction()

    def append(self, each: str, expected: int | None) -> Reported:
        reports: list[tuple[Any, Any]] = []
        headers = [] if expected is None else [("fencepost-expected-offset", b"%d" % expected)]
        self.producer.produce(
            self.topic, each.encode(), partition=0, headers=headers, on_delivery=lambda *report: reports.append(report)
        )
        self.producer.flush(_ANSWER_SECONDS)
        if not reports:
            return Reported(UNKNOWN, code="not settled")
        error, message = reports[0]
        if error is not None:
            return reported_by_error(confluent_kafka.KafkaException(error))
        return Reported(OK, offset=message.offset() if message.offset() >= 0 else None)

    def commit(self) -> None:
        self.producer.commit_transaction(_ANSWER_SECONDS)

    def abort(self) -> None:
        self.producer.abort_transaction(_ANSWER_SECONDS)

    def close(self) -> None:
        self.producer.purge()
        self.producer.flush(1.0)


class JavaTransactional(Transactional, JavaWriter):
    kind = "java-transactional"
    manner = Manner(resends=True, idempotent=True)

    def __init__(self, crew: Crew, topic: str, proxy: str, number: int = 1) -> None:
        super().__init__(crew, topic, proxy, number)
        self.settings = {"transactional_id": self.name, "transaction_timeout_ms": 12_000}

    def open(self) -> None:
        JavaWriter.open(self)
        self._query("init")

    def _query(self, verb: str) -> None:
        self.wait(self.crew.java.query(verb, self.producer))

    def begin(self) -> None:
        self._query("begin")

    def append(self, each: str, expected: int | None) -> Reported:
        return self.reported_by(self.crew.java.send(self.producer, self.topic, each, expected))

    def commit(self) -> None:
        self._query("commit")

    def abort(self) -> None:
        self._query("abort")


class AiokafkaTransactional(Transactional):
    kind = "aiokafka-transactional"

    def open(self) -> None:
        import asyncio  # noqa: PLC0415 - only this kind needs an event loop

        self._runner = asyncio.Runner()
        self._asyncio = asyncio

        async def start() -> Any:
            producer = aiokafka.AIOKafkaProducer(
                bootstrap_servers=self.bootstrap,
                transactional_id=self.name,
                transaction_timeout_ms=15_000,
                request_timeout_ms=int(REQUEST_SECONDS * 1000),
            )
            await asyncio.wait_for(producer.start(), _ANSWER_SECONDS)
            return producer

        self.producer = self._runner.run(start())

    def _do(self, work: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return await self._asyncio.wait_for(work(), _ANSWER_SECONDS)

        return self._runner.run(run())

    def begin(self) -> None:
        self._do(self.producer.begin_transaction)

    def append(self, each: str, expected: int | None) -> Reported:
        headers = [] if expected is None else [("fencepost-expected-offset", b"%d" % expected)]
        try:
            done = self._do(
                lambda: self.producer.send_and_wait(self.topic, each.encode(), partition=0, headers=headers)
            )
        except Exception as error:
            return reported_by_error(error)
        return Reported(OK, offset=done.offset if done.offset >= 0 else None)

    def commit(self) -> None:
        self._do(self.producer.commit_transaction)

    def abort(self) -> None:
        self._do(self.producer.abort_transaction)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._do(self.producer.stop)
        self._runner.close()
