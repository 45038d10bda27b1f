"""The library's ordered producers of the three clients, with one interface."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Protocol

import fencepost.aiokafka
import fencepost.confluent
import fencepost.kafka_python

_WAIT_SECONDS = 120.0


class Producer(Protocol):
    """Keys and values are text."""

    def send(self, topic: str, key: str, value: str, **options: Any) -> None:
        """Send without waiting for the outcome."""
        ...

    def resolve(self) -> list[Any]:
        """Wait for all outcomes; return the failures."""
        ...

    def close(self) -> None: ...


class KafkaPython:
    def __init__(self, bootstrap: str, **options: Any) -> None:
        self.producer = fencepost.kafka_python.OrderedProducer(
            bootstrap_servers=bootstrap, key_serializer=str.encode, value_serializer=str.encode, **options
        )
        self._futures: list[Any] = []

    def send(self, topic: str, key: str, value: str, **options: Any) -> None:
        self._futures.append(self.producer.send(topic, value, key, **options))

    def resolve(self) -> list[Any]:
        self.producer.flush(_WAIT_SECONDS)
        done, self._futures = self._futures, []
        return [error for future in done if (error := _error(future)) is not None]

    def close(self) -> None:
        self.producer.close()


def _error(future: Any) -> Exception | None:
    try:
        future.get(_WAIT_SECONDS)
    except Exception as error:
        return error
    return None


class Confluent:
    def __init__(self, bootstrap: str, **options: Any) -> None:
        self.producer = fencepost.confluent.OrderedProducer({"bootstrap.servers": bootstrap, "log_level": 0}, **options)
        self._failed: list[Any] = []

    def send(self, topic: str, key: str, value: str, **options: Any) -> None:
        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                self._failed.append(error)

        self.producer.produce(topic, value, key, on_delivery=delivered, **options)
        self.producer.poll(0)

    def resolve(self) -> list[Any]:
        assert self.producer.flush(_WAIT_SECONDS) == 0
        failed, self._failed = self._failed, []
        return failed

    def close(self) -> None:
        self.producer.close()


class Aiokafka:
    """In an event loop in a separate thread, as in an application."""

    def __init__(self, bootstrap: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._futures: list[Any] = []

        async def start() -> fencepost.aiokafka.OrderedProducer:
            producer = fencepost.aiokafka.OrderedProducer(
                bootstrap_servers=bootstrap, key_serializer=str.encode, value_serializer=str.encode, **options
            )
            await producer.start()
            return producer

        self.producer = self._run(start())

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_WAIT_SECONDS)

    def send(self, topic: str, key: str, value: str, **options: Any) -> None:
        self._futures.append(self._run(self.producer.send(topic, value, key, **options)))

    def resolve(self) -> list[Any]:
        async def resolve() -> list[Any]:
            await self.producer.flush()
            outcomes = await asyncio.gather(*self._futures, return_exceptions=True)
            self._futures.clear()
            return [each for each in outcomes if isinstance(each, BaseException)]

        return list(self._run(resolve()))

    def close(self) -> None:
        self._run(self.producer.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def producer(library: str, bootstrap: str, **options: Any) -> Producer:
    kinds: dict[str, Callable[..., Producer]] = {
        "kafka-python": KafkaPython,
        "aiokafka": Aiokafka,
        "confluent-kafka": Confluent,
    }
    return kinds[library](bootstrap, **options)
