"""Producers of every client with one interface: the four libraries with their usual configuration, and ours.

A `send` submits one record and returns; the library continues in the background. `Observed` is what a user gets.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import aiokafka
import confluent_kafka
import kafka.errors
from kafka import KafkaProducer

import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python
from fencepost_dev.tools import compile_java, java_command
from tests.kit.waiting import until
from tests.support.kafka import kafka_version
from tests.support.ports import free_ports_in_a_row
from tests.support.raw import Connection

WAIT_SECONDS = 120.0
_JAVA_SOURCE = Path(__file__).parents[1] / "java" / "ScriptedProducers.java"


@dataclass(frozen=True, slots=True)
class Observed:
    """The result of one send. `error`: the exception's class or the error's name; `shown`: other details."""

    offset: int | None = None
    error: str | None = None
    shown: str = ""

    def __str__(self) -> str:
        if self.error is None:
            return f"offset {self.offset}"
        return f"{self.error}: {self.shown}" if self.shown else self.error


class Sending:
    def __init__(self) -> None:
        self._ended = threading.Event()
        self._observed: Observed | None = None

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def end(self, observed: Observed) -> None:
        self._observed = observed
        self._ended.set()

    def get(self, seconds: float = WAIT_SECONDS) -> Observed:
        assert self._ended.wait(seconds), "the client has reported no outcome yet"
        assert self._observed is not None
        return self._observed


class Sender(Protocol):
    def send(
        self, topic: str, value: str, *, partition: int = 0, expected: int | None = None, write_id: str | None = None
    ) -> Sending: ...

    def close(self) -> None: ...


def _headers(expected: int | None, write_id: str | None) -> list[tuple[str, bytes]]:
    headers = [] if expected is None else [("fencepost-expected-offset", b"%d" % expected)]
    return headers if write_id is None else [*headers, ("fencepost-write-id", write_id.encode())]


def _failed(error: BaseException) -> Observed:
    return Observed(error=type(error).__name__, shown=str(error))


def _for_the_library(expected: int | None, write_id: str | None) -> dict[str, Any]:
    return {"expected_offset": expected, "write_id": None if write_id is None else write_id.encode()}


class KafkaPython:
    def __init__(self, bootstrap: str, configs: Mapping[str, Any], *, library: bool) -> None:
        kind = fencepost.kafka_python.ConditionalProducer if library else KafkaProducer
        self._library = library
        self._producer = kind(bootstrap_servers=bootstrap, **configs)

    def send(
        self, topic: str, value: str, *, partition: int = 0, expected: int | None = None, write_id: str | None = None
    ) -> Sending:
        stated: dict[str, Any] = {"headers": _headers(expected, write_id)}
        if self._library:
            stated = _for_the_library(expected, write_id)
        sending = Sending()
        try:
            future = self._producer.send(topic, value.encode(), partition=partition, **stated)
        except kafka.errors.KafkaError as error:
            sending.end(_failed(error))
            return sending
        future.add_callback(lambda metadata: sending.end(Observed(metadata.offset)))
        future.add_errback(lambda error: sending.end(_failed(error)))
        return sending

    def close(self) -> None:
        self._producer._sender.force_close()
        self._producer.close()


class Aiokafka:
    """In the event loop of a separate thread."""

    def __init__(self, bootstrap: str, configs: Mapping[str, Any], *, library: bool) -> None:
        self._library = library
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: set[asyncio.Task[None]] = set()

        async def start() -> Any:
            kind = fencepost.aiokafka.ConditionalProducer if library else aiokafka.AIOKafkaProducer
            producer = kind(bootstrap_servers=bootstrap, **configs)
            await producer.start()
            return producer

        self._producer = self._run(start())

    def send(
        self, topic: str, value: str, *, partition: int = 0, expected: int | None = None, write_id: str | None = None
    ) -> Sending:
        stated: dict[str, Any] = {"headers": _headers(expected, write_id)}
        if self._library:
            stated = _for_the_library(expected, write_id)
        sending = Sending()

        async def outcome(future: Any) -> None:
            try:
                sending.end(Observed((await future).offset))
            except Exception as error:
                sending.end(_failed(error))

        async def send() -> None:
            try:
                future = await self._producer.send(topic, value.encode(), partition=partition, **stated)
            except Exception as error:
                sending.end(_failed(error))
                return
            task = asyncio.create_task(outcome(future))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self._run(send())
        return sending

    def close(self) -> None:
        async def stop() -> None:
            await asyncio.wait_for(self._producer.stop(), WAIT_SECONDS)
            await asyncio.sleep(0)

        try:
            self._run(stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)


class Confluent:
    def __init__(self, bootstrap: str, configs: Mapping[str, Any], *, library: bool) -> None:
        kind: Any = fencepost.confluent.ConditionalProducer if library else confluent_kafka.Producer
        self._library = library
        quiet = {"log_level": 0, "error_cb": lambda error: None}
        self._producer = kind({"bootstrap.servers": bootstrap, **quiet, **configs})
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        while not self._closed.is_set():
            with contextlib.suppress(confluent_kafka.KafkaException):  # after a fatal error
                self._producer.poll(0.05)

    def send(
        self, topic: str, value: str, *, partition: int = 0, expected: int | None = None, write_id: str | None = None
    ) -> Sending:
        stated: dict[str, Any] = {"headers": _headers(expected, write_id)}
        if self._library:
            stated = _for_the_library(expected, write_id)
        sending = Sending()

        def delivered(error: Any, msg: confluent_kafka.Message) -> None:
            if error is None:
                sending.end(Observed(msg.offset()))
            elif isinstance(error, Exception):
                sending.end(_failed(error))
            else:
                sending.end(Observed(error=error.name(), shown=f"msg.offset()={msg.offset()} fatal={error.fatal()}"))

        try:
            self._producer.produce(topic, value.encode(), partition=partition, on_delivery=delivered, **stated)
        except confluent_kafka.KafkaException as error:  # after a fatal error
            sending.end(_failed(error))
        return sending

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        self._producer.purge()
        self._producer.flush(WAIT_SECONDS)


class JavaProducers:
    """One JVM with any number of producers."""

    def __init__(self) -> None:
        version = kafka_version()
        classes = compile_java([_JAVA_SOURCE], version=version)
        self._process = subprocess.Popen(
            java_command("ScriptedProducers", [], version=version, classes=classes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self._sendings: dict[str, Sending] = {}
        self._names = itertools.count(1)
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(WAIT_SECONDS)
        self._thread.join(WAIT_SECONDS)

    def open(self, bootstrap: str, configs: Mapping[str, Any]) -> Sender:
        name = f"p{next(self._names)}"
        self.report("open", name, bootstrap, *(f"{key}={value}" for key, value in configs.items()))
        return _JavaProducer(self, name)

    def report(self, *words: str) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write("\t".join(words) + "\n")
            self._process.stdin.flush()

    def send(self, name: str, *words: str) -> Sending:
        instance_id = f"s{next(self._names)}"
        sending = self._sendings[instance_id] = Sending()
        self.report("send", name, instance_id, *words)
        return sending

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            for line in self._process.stdout:
                instance_id, what, *rest = line.rstrip("\n").split("\t")
                sending = self._sendings.pop(instance_id)
                sending.end(Observed(int(rest[0])) if what == "ok" else Observed(error=rest[0], shown=rest[1]))


@dataclass(frozen=True, slots=True)
class _JavaProducer:
    process: JavaProducers
    name: str

    def send(
        self, topic: str, value: str, *, partition: int = 0, expected: int | None = None, write_id: str | None = None
    ) -> Sending:
        stated = "-" if expected is None else str(expected)
        return self.process.send(self.name, topic, str(partition), stated, write_id or "-", value)

    def close(self) -> None:
        self.process.report("close", self.name)


@dataclass(frozen=True)
class Client:
    """A row of the tables in docs/other-clients.md: a client library with the configuration there."""

    name: str
    library: str  # java, kafka-python, aiokafka, confluent-kafka
    configs: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False  # `fencepost`'s producer with it
    idempotent: bool = False
    #: Whether it pipelines a partition's batches by default.
    pipelines: bool = False
    #: Whether it can send anything after a refusal.
    goes_on: bool = True

    def open(self, bootstrap: str, java: JavaProducers, **more: Any) -> Sender:
        """`more`: further settings, in the library's spelling with `_` for `.`."""
        configs = {**self.configs, **self._spelled(more)}
        match self.library:
            case "java":
                return java.open(bootstrap, configs)
            case "kafka-python":
                return KafkaPython(bootstrap, configs, library=self.ours)
            case "aiokafka":
                return Aiokafka(bootstrap, configs, library=self.ours)
            case "confluent-kafka":
                return Confluent(bootstrap, configs, library=self.ours)
        raise AssertionError(self.library)

    def one_record_a_batch(self) -> dict[str, Any]:
        return {
            "java": {"batch_size": 0},
            "kafka-python": {"batch_size": 1},
            "aiokafka": {"max_batch_size": 1},
            "confluent-kafka": {"batch_num_messages": 1},
        }[self.library]

    def _spelled(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        if self.library in ("java", "confluent-kafka"):
            return {name.replace("_", "."): value for name, value in settings.items()}
        return dict(settings)


CLIENTS = (
    Client("Java (default: idempotent)", "java", idempotent=True, pipelines=True),
    Client("Java, `enable.idempotence=false`", "java", {"enable.idempotence": "false"}, pipelines=True),
    Client("kafka-python (default: idempotent)", "kafka-python", idempotent=True, goes_on=False),
    Client("kafka-python, `enable_idempotence=False`", "kafka-python", {"enable_idempotence": False}, pipelines=True),
    Client("aiokafka (default)", "aiokafka"),
    Client("aiokafka, `enable_idempotence=True`", "aiokafka", {"enable_idempotence": True}, idempotent=True),
    Client("confluent-kafka (default)", "confluent-kafka", pipelines=True),
    Client(
        "confluent-kafka, `enable.idempotence=true`",
        "confluent-kafka",
        {"enable.idempotence": True},
        idempotent=True,
        pipelines=True,
    ),
    Client("`fencepost.kafka_python`", "kafka-python", ours=True),
    Client("`fencepost.aiokafka`", "aiokafka", ours=True),
    Client("`fencepost.confluent`", "confluent-kafka", ours=True, idempotent=True),
)


def create_topic(address: str, name: str, partitions: int = 1) -> str:
    """Create it through the proxy. Returns once the broker reports its configs, which our library reads."""
    with Connection(address) as raw:
        assert raw.create_topic(name, partitions=partitions) == (0, None)

        def shown() -> bool:
            with contextlib.suppress(AssertionError):  # the broker does not know it yet
                return "fencepost.check.expected.offsets" in raw.describe_topic(name)
            return False

        until(shown, f"the configs of {name}")
    return name


def free_proxy_port() -> int:
    """A bootstrap port whose listener for broker 1 (+ 1 + broker id) is free too, also for a restart."""
    return free_ports_in_a_row(3)


def documented(heading: str) -> Iterator[dict[str, str]]:
    """The rows of the table below this heading in docs/other-clients.md, by column names."""
    lines = (Path(__file__).parents[2] / "docs" / "other-clients.md").read_text().splitlines()
    below = itertools.islice(lines, lines.index(heading) + 1, None)
    table = itertools.takewhile(
        lambda line: line.startswith("|"), itertools.dropwhile(lambda line: not line.startswith("|"), below)
    )
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    for row in rows:
        yield dict(zip(header, row, strict=True))
