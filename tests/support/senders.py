"""Producers of every client with one interface: the four libraries with their usual configuration, and ours.

A `send` submits one record and returns; the library continues in the background. `Observed` is what a user gets.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiokafka.errors
import confluent_kafka
import kafka.errors

from tests.kit.java import JavaError, JavaProducers
from tests.kit.producers import OURS, Producer, Undelivered, start
from tests.kit.waiting import until
from tests.support.ports import free_ports_in_a_row
from tests.support.raw import Connection

WAIT_SECONDS = 120.0
_RAISED = (aiokafka.errors.KafkaError, kafka.errors.KafkaError, confluent_kafka.KafkaException)


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
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    @property
    def ended(self) -> bool:
        return self._future.done()

    def get(self, seconds: float = WAIT_SECONDS) -> Observed:
        done, _ = wait([self._future], seconds)
        assert done, "the client has reported no outcome yet"
        match self._future.exception():
            case None:
                return Observed(self._future.result().offset)
            case JavaError() as error:
                return Observed(error=error.kind, shown=error.message)
            case Undelivered() as error:
                failed = error.args[0]
                shown = f"msg.offset()={error.message.offset()} fatal={failed.fatal()}"
                return Observed(error=failed.name(), shown=shown)
            case error:
                return Observed(error=type(error).__name__, shown=str(error))


@dataclass(frozen=True, slots=True)
class Sender:
    producer: Producer

    def send(self, topic: str, value: str, **stated: Any) -> Sending:
        try:
            return Sending(self.producer.send(topic, value, **stated))
        except _RAISED as error:  # after a fatal error
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return Sending(failed)

    def close(self) -> None:
        self.producer.close()


def open_sender(library: str, java: JavaProducers, bootstrap: str, **settings: Any) -> Sender:
    return Sender(start(library, java, bootstrap, seconds=WAIT_SECONDS, **settings))


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
        """`more`: further settings, with `_` for `.`."""
        ours = {"kind": OURS[self.library]} if self.ours else {}
        return open_sender(self.library, java, bootstrap, **self.configs, **ours, **more)

    def one_record_a_batch(self) -> dict[str, Any]:
        return {
            "java": {"batch_size": 0},
            "kafka-python": {"batch_size": 1},
            "aiokafka": {"max_batch_size": 1},
            "confluent-kafka": {"batch_num_messages": 1},
        }[self.library]


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
