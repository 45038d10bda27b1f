"""Producers of the four clients with one interface. Settings have the client's names, with `_` for `.`.

`send` submits one record and returns a future: its result is `Placed`, or it raises what the user of the client gets.
`kind` – the client's own producer class, or one of our library.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import aiokafka
import confluent_kafka
import kafka

import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python
from tests.kit.java import JavaProducers

#: Of calls that start, end and close a producer, or end a transaction. `seconds` replaces it.
WAIT_SECONDS = 60.0
#: Our library's producers that state expected offsets.
OURS: Mapping[str, Any] = {
    "kafka-python": fencepost.kafka_python.ConditionalProducer,
    "aiokafka": fencepost.aiokafka.ConditionalProducer,
    "confluent-kafka": fencepost.confluent.ConditionalProducer,
}
#: Its producers that keep keys in order across expansions.
ORDERED: Mapping[str, Any] = {
    "kafka-python": fencepost.kafka_python.OrderedProducer,
    "aiokafka": fencepost.aiokafka.OrderedProducer,
    "confluent-kafka": fencepost.confluent.OrderedProducer,
}
CLIENTS = ("java", "kafka-python", "aiokafka", "confluent-kafka")
_numbers = itertools.count(1)


class Placed(NamedTuple):
    """Where a record is. A negative offset: the client does not know it."""

    offset: int
    partition: int


class Stated(NamedTuple):
    """What a record says: its key, its partition (None: the client places it), the expected offset, a write-id, whether
    the number of partitions that the client knows, and its time."""

    key: str | None = None
    partition: int | None = 0
    expected: int | None = None
    write_id: str | None = None
    counted: bool = False
    timestamp_ms: int | None = None

    def options(self, count: int | None, *, ours: bool, timestamp: str = "timestamp_ms") -> dict[str, Any]:
        """Options of a `send` of our library's producers, or headers. `count` – of partitions, if `counted`."""
        key = None if self.key is None else self.key.encode()
        placed = {"key": key, "partition": self.partition, timestamp: self.timestamp_ms}
        named = None if self.write_id is None else self.write_id.encode()
        if ours:
            said: dict[str, Any] = {"expected_offset": self.expected, "write_id": named}
        else:
            headers = (("expected-offset", self.expected), ("partition-count", count))
            said = {"headers": [(f"fencepost-{name}", b"%d" % each) for name, each in headers if each is not None]}
            said["headers"] += [] if named is None else [("fencepost-write-id", named)]
        return {name: each for name, each in (placed | said).items() if each is not None}


class Producer(Protocol):
    """With a `transactional_id`, it starts by ending the previous producer's transaction.

    `send` takes the fields of `Stated`.
    """

    def send(self, topic: str, value: str, **stated: Any) -> Future[Placed]: ...
    def begin(self) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


class Undelivered(confluent_kafka.KafkaException):
    """The error and the message of a delivery report."""

    def __init__(self, error: confluent_kafka.KafkaError, message: confluent_kafka.Message) -> None:
        super().__init__(error)
        self.message = message


class KafkaPython:
    def __init__(
        self, bootstrap: str, *, kind: Any = kafka.KafkaProducer, seconds: float = WAIT_SECONDS, **settings: Any
    ) -> None:
        self._seconds, self._ours = seconds, kind is not kafka.KafkaProducer
        self._producer = kind(bootstrap_servers=bootstrap, **settings)
        if "transactional_id" in settings:
            try:
                self._producer.init_transactions()
            except BaseException:
                self.close()
                raise

    def send(self, topic: str, value: str, **stated: Any) -> Future[Placed]:
        said, future = Stated(**stated), Future[Placed]()
        count = len(self._producer.partitions_for(topic)) if said.counted else None
        sent = self._producer.send(topic, value.encode(), **said.options(count, ours=self._ours))
        sent.add_callback(lambda metadata: future.set_result(Placed(metadata.offset, metadata.partition)))
        sent.add_errback(future.set_exception)
        return future

    def begin(self) -> None:
        self._producer.begin_transaction()

    def commit(self) -> None:
        _bounded(self._producer.commit_transaction, self._seconds)

    def abort(self) -> None:
        _bounded(self._producer.abort_transaction, self._seconds)

    def close(self) -> None:
        try:
            self._producer.close(1)
        except kafka.errors.KafkaTimeoutError:  # it has records that it cannot send
            self._producer._sender.force_close()  # noqa: SLF001 - `close` would wait for them again
            self._producer.close()


def _bounded(call: Callable[[], object], seconds: float) -> None:
    """Run a call that has no timeout. Raises TimeoutError."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            call()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    ended.result(seconds)


class Aiokafka:
    """In the event loop of a separate thread."""

    def __init__(
        self, bootstrap: str, *, kind: Any = aiokafka.AIOKafkaProducer, seconds: float = WAIT_SECONDS, **settings: Any
    ) -> None:
        self._seconds, self._ours = seconds, kind is not aiokafka.AIOKafkaProducer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def start() -> Any:
            producer = kind(bootstrap_servers=bootstrap, **settings)
            try:
                await producer.start()
            except BaseException:
                await producer.stop()
                raise
            return producer

        try:
            self._producer = self._run(start())
        except BaseException:
            self._end_loop()
            raise

    def send(self, topic: str, value: str, **stated: Any) -> Future[Placed]:
        said, future = Stated(**stated), Future[Placed]()

        def ended(sent: asyncio.Future[Any]) -> None:
            error = asyncio.CancelledError() if sent.cancelled() else sent.exception()
            if error is None:
                future.set_result(Placed(sent.result().offset, sent.result().partition))
            else:
                future.set_exception(error)

        async def send() -> None:
            count = len(await self._producer.partitions_for(topic)) if said.counted else None
            sent = await self._producer.send(topic, value.encode(), **said.options(count, ours=self._ours))
            asyncio.ensure_future(sent).add_done_callback(ended)

        self._run(send())
        return future

    def begin(self) -> None:
        self._run(self._producer.begin_transaction())

    def commit(self) -> None:
        self._run(self._producer.commit_transaction())

    def abort(self) -> None:
        self._run(self._producer.abort_transaction())

    def close(self) -> None:
        try:
            self._run(self._producer.stop())
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self._seconds)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, self._seconds), self._loop).result()


class Confluent:
    """`options` – of a class of our library, in addition to the settings.

    It queries a topic's number of partitions only at first and after a failure, as a user would: each query goes to the
    broker.
    """

    def __init__(
        self,
        bootstrap: str,
        *,
        kind: Any = confluent_kafka.Producer,
        seconds: float = WAIT_SECONDS,
        options: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        self._seconds, self._ours = seconds, kind is not confluent_kafka.Producer
        self._counts: dict[str, int] = {}
        # Callbacks are named as in Python.
        dotted = {name if callable(value) else name.replace("_", "."): value for name, value in settings.items()}
        quiet = {"log_level": 0, "error_cb": lambda error: None}
        self._producer = kind({"bootstrap.servers": bootstrap, **quiet, **dotted}, **options)
        if "transactional_id" in settings:
            self._producer.init_transactions(seconds)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._closed.is_set():
            with suppress(confluent_kafka.KafkaException):  # after a fatal error
                self._producer.poll(0.05)

    def send(self, topic: str, value: str, **stated: Any) -> Future[Placed]:
        said, future = Stated(**stated), Future[Placed]()

        def delivered(error: Any, message: confluent_kafka.Message) -> None:
            if error is None:
                future.set_result(Placed(message.offset(), message.partition()))
            else:
                self._counts.pop(topic, None)
                future.set_exception(error if isinstance(error, Exception) else Undelivered(error, message))

        if said.counted and topic not in self._counts:
            self._counts[topic] = self._count(topic)
        count = self._counts.get(topic) if said.counted else None
        options = said.options(count, ours=self._ours, timestamp="timestamp")
        self._producer.produce(topic, value.encode(), on_delivery=delivered, **options)
        return future

    def _count(self, topic: str) -> int:
        """Repeat the query, which fails if a refusal closes its connection at that moment."""
        try:
            listed = self._producer.list_topics(topic, timeout=self._seconds)
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() != confluent_kafka.KafkaError._TRANSPORT:
                raise
            listed = self._producer.list_topics(topic, timeout=self._seconds)
        return len(listed.topics[topic].partitions)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def commit(self) -> None:
        self._producer.commit_transaction(self._seconds)

    def abort(self) -> None:
        self._producer.abort_transaction(self._seconds)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._producer.purge()
        self._producer.flush(self._seconds)
        if self._ours:
            self._producer.close()


class Java:
    """In the shared JVM."""

    def __init__(self, java: JavaProducers, bootstrap: str, *, seconds: float = WAIT_SECONDS, **settings: Any) -> None:
        self._java, self._seconds = java, seconds
        self._name = f"p{next(_numbers)}"
        self._do("open", *java.words(bootstrap_servers=bootstrap, **settings))
        if "transactional_id" in settings:
            try:
                self._do("init")
            except BaseException:
                self.close()
                raise

    def send(self, topic: str, value: str, **stated: Any) -> Future[Placed]:
        said, future = Stated(**stated), Future[Placed]()
        words = ["-" if each is None else str(each) for each in (said.partition, said.expected, said.write_id)]
        keyed = [] if said.key is None else [said.key, "count" if said.counted else "-"]
        sent = self._java.query("send", self._name, topic, *words, value, *keyed)

        def ended(sent: Future[list[int]]) -> None:
            error = sent.exception()
            if error is None:
                future.set_result(Placed(*sent.result()))
            else:
                future.set_exception(error)

        sent.add_done_callback(ended)
        return future

    def begin(self) -> None:
        self._do("begin")

    def commit(self) -> None:
        self._do("commit")

    def abort(self) -> None:
        self._do("abort")

    def close(self) -> None:
        self._do("close")

    def _do(self, verb: str, *words: str) -> None:
        self._java.query(verb, self._name, *words).result(self._seconds)


def start(client: str, java: JavaProducers | None, bootstrap: str, **settings: Any) -> Producer:
    """`seconds` – of the calls that have no future."""
    match client:
        case "java":
            assert java is not None
            return Java(java, bootstrap, **settings)
        case "kafka-python":
            return KafkaPython(bootstrap, **settings)
        case "aiokafka":
            return Aiokafka(bootstrap, **settings)
    return Confluent(bootstrap, **settings)


def ordered(library: str, bootstrap: str, **options: Any) -> Producer:
    """`options` – of the library's ordered producer."""
    more = {"options": options} if library == "confluent-kafka" else options
    return start(library, None, bootstrap, kind=ORDERED[library], seconds=2 * WAIT_SECONDS, **more)


def failures(sent: Iterable[Future[Any]], seconds: float = 2 * WAIT_SECONDS) -> list[Exception]:
    """Wait for all outcomes."""
    outcomes = [outcome(each, seconds) for each in sent]
    return [each for each in outcomes if isinstance(each, Exception)]


def outcome(future: Future[Any], seconds: float) -> int | Exception | None:
    """The offset, if the user gets it, or the error. TimeoutError: none in that time."""
    try:
        offset = int(future.result(seconds).offset)
    except Exception as error:
        return error
    return offset if offset >= 0 else None
