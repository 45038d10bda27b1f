"""Keyed producers of the four client libraries, with their usual configuration."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiokafka
import confluent_kafka
from kafka import KafkaProducer

from fencepost_policies.partitioners import Partitioner
from tests.kit.java import JavaError, JavaProducers

WAIT_SECONDS = 60.0
#: Longer than any test, so that no client refreshes the partition count by age.
_NEVER_MS = 300_000
_HEADER = "fencepost-partition-count"


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of one send as its user gets it: partition and offset, or the error and its message."""

    partition: int = -1
    offset: int = -1
    error: str | None = None
    shown: str = ""


class Keyed(Protocol):
    """One producer. `send` waits for the outcome; `says` – with the number of partitions that the client knows."""

    placed_by: Partitioner

    def send(self, topic: str, key: str, value: str, *, says: bool) -> Sent: ...

    def close(self) -> None: ...


def _failed(error: Exception) -> Sent:
    return Sent(error=type(error).__name__, shown=f"{error}")


class KafkaPython:
    placed_by = Partitioner.MURMUR2

    def __init__(self, bootstrap: str, **configs: Any) -> None:
        self._producer = KafkaProducer(bootstrap_servers=bootstrap, metadata_max_age_ms=_NEVER_MS, **configs)

    def send(self, topic: str, key: str, value: str, *, says: bool) -> Sent:
        try:
            count = len(self._producer.partitions_for(topic))
            headers = [(_HEADER, b"%d" % count)] if says else []
            future = self._producer.send(topic, value.encode(), key=key.encode(), headers=headers)
            metadata = future.get(WAIT_SECONDS)
        except Exception as error:
            return _failed(error)
        return Sent(metadata.partition, metadata.offset)

    def close(self) -> None:
        self._producer._sender.force_close()
        self._producer.close()


class Aiokafka:
    placed_by = Partitioner.MURMUR2

    def __init__(self, bootstrap: str, **configs: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

        async def start() -> Any:
            producer = aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, metadata_max_age_ms=_NEVER_MS, **configs)
            await producer.start()
            return producer

        self._producer = self._run(start())

    def send(self, topic: str, key: str, value: str, *, says: bool) -> Sent:
        async def send() -> Any:
            count = len(await self._producer.partitions_for(topic))
            headers = [(_HEADER, b"%d" % count)] if says else []
            return await self._producer.send_and_wait(topic, value.encode(), key=key.encode(), headers=headers)

        try:
            metadata = self._run(send())
        except Exception as error:
            return _failed(error)
        return Sent(metadata.partition, metadata.offset)

    def close(self) -> None:
        try:
            self._run(self._producer.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)


class Confluent:
    """Queries the count only at first and after a failure, as a user would: each query goes to the broker."""

    placed_by = Partitioner.CRC32

    def __init__(self, bootstrap: str, **configs: Any) -> None:
        quiet = {"log_level": 0, "error_cb": lambda error: None}
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "topic.metadata.refresh.interval.ms": _NEVER_MS, **quiet, **configs}
        )
        self._counts: dict[str, int] = {}

    def _count(self, topic: str) -> int:
        """Repeat the query, which fails if a refusal closes its connection at that moment."""
        try:
            listed = self._producer.list_topics(topic, timeout=WAIT_SECONDS)
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() != confluent_kafka.KafkaError._TRANSPORT:
                raise
            listed = self._producer.list_topics(topic, timeout=WAIT_SECONDS)
        return len(listed.topics[topic].partitions)

    def send(self, topic: str, key: str, value: str, *, says: bool) -> Sent:
        if says and topic not in self._counts:
            self._counts[topic] = self._count(topic)
        headers = [(_HEADER, b"%d" % self._counts[topic])] if says else []
        ended: list[Sent] = []

        def delivered(error: Any, msg: Any) -> None:
            if error is None:
                ended.append(Sent(msg.partition(), msg.offset()))
            else:
                self._counts.pop(topic, None)
                ended.append(Sent(error=error.name(), shown=error.str()))

        self._producer.produce(topic, value.encode(), key=key.encode(), headers=headers, on_delivery=delivered)
        assert self._producer.flush(WAIT_SECONDS) == 0
        return ended[0]

    def close(self) -> None:
        self._producer.purge()
        self._producer.flush(WAIT_SECONDS)


class Java:
    placed_by = Partitioner.MURMUR2

    def __init__(self, bootstrap: str, **configs: Any) -> None:
        self._java = JavaProducers()
        settings = self._java.words(bootstrap_servers=bootstrap, metadata_max_age_ms=_NEVER_MS, **configs)
        self._java.query("open", "p", *settings).result(WAIT_SECONDS)

    def send(self, topic: str, key: str, value: str, *, says: bool) -> Sent:
        sent = self.start(topic, key, value, says=says)
        try:
            offset, partition = sent.result(WAIT_SECONDS)
        except JavaError as error:
            return Sent(error=error.kind, shown=error.message)
        return Sent(partition, offset)

    def start(self, topic: str, key: str, value: str, *, says: bool = False) -> Future[list[int]]:
        """Send without waiting; the result is offset and partition."""
        return self._java.query("send", "p", topic, "-", "-", "-", value, key, "count" if says else "-")

    def close(self) -> None:
        self._java.close()


CLIENTS: dict[str, Callable[..., Keyed]] = {
    "Java": Java,
    "kafka-python": KafkaPython,
    "aiokafka": Aiokafka,
    "confluent-kafka": Confluent,
}


@contextmanager
def keyed(client: str, bootstrap: str, **configs: Any) -> Iterator[Keyed]:
    with ExitStack() as stack:
        producer = CLIENTS[client](bootstrap, **configs)
        stack.callback(producer.close)
        yield producer
