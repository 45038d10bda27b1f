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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import confluent_kafka

import fencepost
from fencepost import RetryPolicy
from tests.kit import producers
from tests.kit.history import OK, REFUSED, TRY_AGAIN, UNKNOWN, VIOLATION, History, Manner, Operation, Reported
from tests.kit.java import JavaError, JavaProducers
from tests.kit.threads import Worker
from tests.soak.stage import PROXIES, Stage
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
_ONCE = Manner()


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
    """Calls `open`, then `step` repeatedly. After an exception or too many unknown outcomes it reopens its client.

    `kind` – its name in `KINDS`. `conditional` – whether it states expected offsets.
    """

    def __init__(
        self, kind: str, crew: Crew, topic: str, proxy: str, *, manner: Manner = _ONCE, conditional: bool = True
    ) -> None:
        super().__init__(f"{kind}-{topic}/{proxy}", crew.over)
        self.kind, self.manner, self.conditional = kind, manner, conditional
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


# --- raw requests -----------------------------------------------------------------------------------------------------


class RawWriter(Writer):
    """Pipelined batches with consecutive expected offsets, without retries; or one batch at a time.

    `batches`, `records` – their numbers, chosen at random. Idempotent ones have sequences that continue after a
    refusal.
    """

    def __init__(
        self, *place: Any, batches: Sequence[int] = (1,), records: Sequence[int] = (1, 1, 1, 3), **more: Any
    ) -> None:
        super().__init__(*place, **more)
        self._batches, self._records = batches, records
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
        count = self.random.choice(self._batches)
        pipeline_key = f"{self.name}/pipeline {next(self._pipelines)}" if count > 1 else None
        calls, batches = [], []
        for _ in range(count):
            ids = [self.new_id() for _ in range(self.random.choice(self._records))]
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


class RawRetrier(RawWriter):
    """Sends each batch again until its outcome is known: through either proxy, or if idempotent through its own."""

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
        proxies = (self.proxy,) if self.manner.idempotent else PROXIES
        while True:
            try:
                if self._open is None:
                    self._open = self.connect(self.crew.stage.bootstrap(self.random.choice(proxies)))
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


class ClientWriter(Writer):
    """A producer of one of the four clients, or of our library for it. Sends one record, or up to `at_once`.

    Ours adds write-ids. With another, `manner.named` writers state them.
    """

    def __init__(self, *place: Any, client: str, ours: bool = False, at_once: int = 1, **more: Any) -> None:
        settings = more.pop("settings", {})
        super().__init__(*place, **more)
        self._client, self._states_ids, self._at_once = client, self.manner.named and not ours, at_once
        self._settings = settings | ({"kind": producers.OURS[client]} if ours else {})

    def open(self) -> None:
        settings = _configs(self._client, **self._settings)
        self.producer = producers.start(
            self._client, self.crew.java, self.bootstrap, seconds=_ANSWER_SECONDS, **settings
        )

    def step(self) -> None:
        first, sent = self.expectation(), []
        for delta in range(self.random.randint(1, self._at_once)):
            each, expected = self.new_id(), first + delta if self.conditional else None
            operation = self.call([each], expected)
            sent.append((operation, self.send(each, expected)))
        for operation, future in sent:
            self.reported(operation, reported_by_future(future))

    def send(self, each: str, expected: int | None) -> Future[Any]:
        """What the client raises is its outcome, too."""
        future: Future[Any] = Future()
        write_id = each if self._states_ids and expected is not None else None
        try:
            return self.producer.send(self.topic, each, expected=expected, write_id=write_id)
        except Exception as error:
            future.set_exception(error)
            return future

    def close(self) -> None:
        self.producer.close()


class LogWriter(Writer):
    """KIP-27's worked example: reads to the end, appends a batch, resolves unknown outcomes."""

    def __init__(self, *place: Any, client: str) -> None:
        super().__init__(*place, manner=Manner(named=True, resends=True, reads_end=True))
        self._client = client

    def open(self) -> None:
        policy = RetryPolicy(attempt_seconds=REQUEST_SECONDS, total_seconds=3 * DELIVERY_SECONDS)
        self.log = clients.log_writer(self._client, self.topic, self.bootstrap, policy)
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


class Transactional(ClientWriter):
    """A transaction of a few records, some with an expected offset; then commit or abort."""

    def __init__(self, *place: Any, client: str) -> None:
        manner = Manner(resends=True, sees_messages=client == "java", idempotent=True)
        super().__init__(*place, client=client, manner=manner)
        self._settings = {"transactional_id": self.name, "transaction_timeout_ms": 15_000}
        self._transactions = itertools.count(1)

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
                reported = reported_by_future(self.send(each, expected))
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


# --- the kinds --------------------------------------------------------------------------------------------------------

_IDEMPOTENT, _NOT_IDEMPOTENT = {"enable_idempotence": True}, {"enable_idempotence": False}
_NAMED, _SEQUENCED = Manner(named=True, resends=True), Manner(resends=True, idempotent=True)
_SILENT = replace(_SEQUENCED, sees_messages=False)


def _client(client: str, manner: Manner, **more: Any) -> Callable[..., Writer]:
    return partial(ClientWriter, client=client, manner=manner, **more)


#: Kind → a writer of (kind, crew, topic, proxy). A pipeline's requests, or its records, go out together; a plain writer
#: states no expected offset.
KINDS: dict[str, Callable[..., Writer]] = {
    "raw": RawWriter,
    "raw-plain": partial(RawWriter, conditional=False, records=(1,)),
    "raw-pipeline": partial(RawWriter, batches=range(2, 9), records=(1,)),
    "raw-pipeline-sequenced": partial(RawWriter, batches=range(2, 9), records=(1,), manner=Manner(idempotent=True)),
    "raw-named": partial(RawRetrier, manner=_NAMED),
    "raw-sequenced": partial(RawRetrier, manner=_SEQUENCED),
    "kafka-python": _client("kafka-python", _NAMED, ours=True),
    "aiokafka": _client("aiokafka", replace(_NAMED, sees_messages=False, reads_end=True), ours=True),
    "confluent": _client("confluent-kafka", replace(_NAMED, sees_messages=False), ours=True),
    "kafka-python-headers": _client("kafka-python", Manner(resends=True), settings=_NOT_IDEMPOTENT),
    "aiokafka-headers": _client("aiokafka", replace(_SILENT, named=True), settings=_IDEMPOTENT),
    "confluent-headers": _client("confluent-kafka", replace(_SILENT, named=True), settings=_IDEMPOTENT),
    "confluent-headers-not-idempotent": _client(
        "confluent-kafka", replace(_NAMED, sees_messages=False), settings=_NOT_IDEMPOTENT
    ),
    "java": _client("java", _SEQUENCED),
    "java-pipeline": _client("java", _SEQUENCED, at_once=6),
    "java-named": _client("java", _NAMED, settings=_NOT_IDEMPOTENT),
    "kafka-python-plain": _client("kafka-python", _SEQUENCED, conditional=False),
    "confluent-plain": _client("confluent-kafka", _SILENT, conditional=False, settings=_IDEMPOTENT),
    "aiokafka-plain": _client("aiokafka", Manner(resends=True, sees_messages=False), conditional=False),
    "java-plain": _client("java", _SEQUENCED, conditional=False, at_once=3),
    "kafka-python-log": partial(LogWriter, client="kafka-python"),
    "aiokafka-log": partial(LogWriter, client="aiokafka"),
    "confluent-log": partial(LogWriter, client="confluent-kafka"),
    "confluent-transactional": partial(Transactional, client="confluent-kafka"),
    "java-transactional": partial(Transactional, client="java"),
    "aiokafka-transactional": partial(Transactional, client="aiokafka"),
}
