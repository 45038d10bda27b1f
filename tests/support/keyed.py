"""Keyed producers of the four client libraries, with their usual configuration."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import confluent_kafka

from fencepost_policies.partitioners import Partitioner
from tests.kit import producers
from tests.kit.java import JavaError, JavaProducers

WAIT_SECONDS = 60.0
#: Longer than any test, so that no client refreshes the partition count by age.
_NEVER_MS = 300_000


class Client(NamedTuple):
    name: str
    placed_by: Partitioner = Partitioner.MURMUR2
    age: str = "metadata_max_age_ms"


CLIENTS = {
    "Java": Client("java"),
    "kafka-python": Client("kafka-python"),
    "aiokafka": Client("aiokafka"),
    "confluent-kafka": Client("confluent-kafka", Partitioner.CRC32, "topic_metadata_refresh_interval_ms"),
}


@dataclass(frozen=True, slots=True)
class Sent:
    """The result of one send as its user gets it: partition and offset, or the error and its message."""

    partition: int = -1
    offset: int = -1
    error: str | None = None
    shown: str = ""


class Keyed:
    def __init__(self, client: str, bootstrap: str, **configs: Any) -> None:
        self._java = JavaProducers() if client == "Java" else None
        name, self.placed_by, age = CLIENTS[client]
        self._producer = producers.start(
            name, self._java, bootstrap, seconds=WAIT_SECONDS, **{age: _NEVER_MS, **configs}
        )

    def send(self, topic: str, key: str, value: str, *, says: bool) -> Sent:
        """Wait for the outcome. `says` – with the number of partitions that the client knows."""
        try:
            offset, partition = self.start(topic, key, value, says=says).result(WAIT_SECONDS)
        except JavaError as error:
            return Sent(error=error.kind, shown=error.message)
        except confluent_kafka.KafkaException as error:
            return Sent(error=error.args[0].name(), shown=error.args[0].str())
        except Exception as error:
            return Sent(error=type(error).__name__, shown=f"{error}")
        return Sent(partition, offset)

    def start(self, topic: str, key: str, value: str, *, says: bool = False) -> Future[producers.Placed]:
        return self._producer.send(topic, value, key=key, partition=None, counted=says)

    def close(self) -> None:
        self._producer.close()
        if self._java is not None:
            self._java.close()


@contextmanager
def keyed(client: str, bootstrap: str, **configs: Any) -> Iterator[Keyed]:
    producer = Keyed(client, bootstrap, **configs)
    try:
        yield producer
    finally:
        producer.close()
