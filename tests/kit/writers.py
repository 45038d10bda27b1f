"""Writers: one thread for each kind of client, which continues after every error.

Every record's value is a unique id. Writers of a partition share the log end that they know (`Ends`), and mostly expect
it, sometimes an impossible offset.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, NamedTuple

import confluent_kafka

import fencepost
from fencepost import RetryPolicy
from tests.kit import producers
from tests.kit.history import OK, REFUSED, UNKNOWN, VIOLATION, History, Manner, Operation, Reported
from tests.kit.java import JavaError, JavaProducers
from tests.kit.threads import Worker
from tests.support import clients
from tests.support.writers import reported_by_message

_CLOSE_SECONDS = 8.0
REOPENED = "client reopened"
_ONCE = Manner()


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


class Settings(NamedTuple):
    """`pace_seconds` – approximate pause of a writer after each step. `wrong` – the share of wrong expected offsets.
    `answer_seconds` – how long a writer waits for a library that should have given up."""

    pace_seconds: float
    seed: int = 0
    wrong: float = 0.0
    answer_seconds: float = 40.0


class Crew:
    """Shared state of all writers of a run. `address` – a client's bootstrap address, by the proxy's name. `settings` –
    fields of `Settings`."""

    def __init__(self, address: Callable[[str], str], history: History, java: JavaProducers, **settings: Any) -> None:
        self.address = address
        self.history = history
        self.java = java
        self.settings = Settings(**settings)
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
        self.random = random.Random(f"{crew.settings.seed}/{self.name}")
        #: Operations that were reported as appended.
        self.accepted = 0
        self._numbers = itertools.count(1)
        self._unknown_in_a_row = 0

    @property
    def bootstrap(self) -> str:
        return self.crew.address(self.proxy)

    def work(self) -> None:
        while not self.over.is_set():
            self._unknown_in_a_row = 0
            try:
                self.open()
                while not self.over.is_set() and self._unknown_in_a_row < 3:
                    self.step()
                    self.over.wait(self.random.uniform(0.3, 1.7) * self.crew.settings.pace_seconds)
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
        if self.random.random() < self.crew.settings.wrong:
            return max(0, end + self.random.choice([-3, -1, 1, 2, 100]))
        return end

    def call(self, ids: Sequence[str], expected: int | None, **more: Any) -> Operation:
        return self.crew.history.call(self.name, self.topic, ids, expected=expected, manner=self.manner, **more)

    def reported(self, operation: Operation, reported: Reported) -> Reported:
        self.crew.history.reported(operation, reported)
        self.crew.ends.last_observed(self.topic, reported, len(operation.ids))
        self.accepted += reported.outcome == OK
        self._unknown_in_a_row = self._unknown_in_a_row + 1 if reported.outcome == UNKNOWN else 0
        return reported


class ClientWriter(Writer):
    """A producer of one of the four clients, or of our library for it. Sends one record, or up to `at_once`.

    Ours adds write-ids. With another, `manner.named` writers state them.
    """

    def __init__(
        self,
        *place: Any,
        client: str,
        ours: bool = False,
        at_once: int = 1,
        partitions: int = 1,
        settings: Mapping[str, Any] = MappingProxyType({}),
        **more: Any,
    ) -> None:
        super().__init__(*place, **more)
        self.partitions = partitions
        self._client, self._states_ids, self._at_once = client, self.manner.named and not ours, at_once
        self._settings = {**settings} | ({"kind": producers.OURS[client]} if ours else {})

    def open(self) -> None:
        seconds = self.crew.settings.answer_seconds
        self.producer = producers.start(self._client, self.crew.java, self.bootstrap, seconds=seconds, **self._settings)

    def step(self) -> None:
        first, sent, pipeline_key = self.expectation(), [], None
        for delta in range(self.random.randint(1, self._at_once)):
            each, expected = self.new_id(), first + delta if self.conditional else None
            partition = delta % self.partitions
            pipeline_key = pipeline_key or (each if self.manner.idempotent else None)
            operation = self.call([each], expected, partition=partition, pipeline_key=pipeline_key)
            sent.append((operation, self.send(each, expected, partition)))
        for operation, future in sent:
            self.reported(operation, self.outcome(future))

    def outcome(self, future: Future[Any]) -> Reported:
        found = producers.outcome(future, self.crew.settings.answer_seconds)
        return reported_by_error(found) if isinstance(found, Exception) else Reported(OK, offset=found)

    def send(self, each: str, expected: int | None, partition: int = 0) -> Future[Any]:
        """What the client raises is its outcome, too."""
        future: Future[Any] = Future()
        write_id = each if self._states_ids and expected is not None else None
        try:
            return self.producer.send(self.topic, each, expected=expected, partition=partition, write_id=write_id)
        except Exception as error:
            future.set_exception(error)
            return future

    def close(self) -> None:
        self.producer.close()


class LogWriter(Writer):
    """KIP-27's worked example: reads to the end, appends a batch, resolves unknown outcomes."""

    def __init__(self, *place: Any, client: str, policy: RetryPolicy | None = None) -> None:
        super().__init__(*place, manner=Manner(named=True, resends=True, reads_end=True))
        self._client, self._policy = client, policy

    def open(self) -> None:
        self.log = clients.log_writer(self._client, self.topic, self.bootstrap, self._policy)
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

    def __init__(self, *place: Any, client: str, settings: Mapping[str, Any]) -> None:
        manner = Manner(resends=True, sees_messages=client == "java", idempotent=True)
        super().__init__(*place, client=client, manner=manner, settings=settings)
        self._settings |= {"transactional_id": self.name, "transaction_timeout_ms": 15_000}
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
                reported = self.outcome(self.send(each, expected))
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
