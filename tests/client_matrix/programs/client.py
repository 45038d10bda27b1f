"""One of the Python clients, perhaps an old release: see `releases.py`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import ssl
import sys
import time
from collections.abc import Callable
from typing import Any

_SECONDS = 60.0
_RECORDS = 3


class _Token:
    """The token provider that kafka-python and aiokafka require."""

    def __init__(self, token: str) -> None:
        self._token = token

    def token(self) -> str:
        return self._token

    def extensions(self) -> dict[str, str]:
        return {}


def _expecting(offset: int) -> list[tuple[str, bytes]]:
    return [("fencepost-expected-offset", str(offset).encode())]


def _python_login(given: dict[str, Any]) -> dict[str, Any]:
    if not given["mechanism"]:
        return {}
    login = {"security_protocol": "SASL_SSL", "sasl_mechanism": given["mechanism"]}
    return login | {"sasl_plain_username": given["user"], "sasl_plain_password": given["password"]}


def _kafka_python_token(token: str) -> Any:
    for module in ("kafka.oauth.abstract", "kafka.sasl.oauth", "kafka.net.sasl.oauth"):
        with contextlib.suppress(ImportError):
            return type("Token", (_Token, importlib.import_module(module).AbstractTokenProvider), {})(token)
    raise LookupError("kafka-python has no token provider")


def by_kafka_python(given: dict[str, Any]) -> dict[str, Any]:
    from kafka import KafkaConsumer, KafkaProducer  # noqa: PLC0415

    topic = given["topic"]
    settings = {"bootstrap_servers": given["bootstrap"], **_python_login(given)}
    if given["mechanism"]:
        settings["ssl_cafile"] = given["ca_file"]
    if given["mechanism"] == "OAUTHBEARER":
        settings["sasl_oauth_token_provider"] = _kafka_python_token(given["token"])
    observed: dict[str, Any] = {}
    at_ms = int(time.time() * 1000)  # Kafka's retention deletes records of an older time within minutes
    for codec in given["codecs"]:
        producer = KafkaProducer(compression_type=None if codec == "none" else codec, **settings)
        sent = [
            producer.send(topic, codec.encode(), b"k", [("h", b"v")], partition=0, timestamp_ms=at_ms + number)
            for number in range(_RECORDS)
        ]
        observed[codec] = [each.get(_SECONDS).offset for each in sent]
        producer.close()
    # An idempotent producer is unusable after a refusal.
    one_by_one = {"enable_idempotence": False} if "enable_idempotence" in KafkaProducer.DEFAULT_CONFIG else {}
    producer = KafkaProducer(**settings, **one_by_one)
    for name, headers in (("refused", _expecting(0)), ("after", [])):
        if given["refused"]:
            try:
                observed[name] = producer.send(topic, b"x", headers=headers, partition=0).get(_SECONDS).offset
            except Exception as error:
                observed[name] = str(error)
    producer.close()
    consumer = KafkaConsumer(topic, group_id=given["group"], auto_offset_reset="earliest", **settings)
    read: list[str] = []
    deadline = time.monotonic() + _SECONDS
    while len(read) < _RECORDS * len(given["codecs"]) and time.monotonic() < deadline:
        read += [each.value.decode() for batch in consumer.poll(1000).values() for each in batch]
    consumer.commit()
    consumer.close()
    return observed | {"group": read[: _RECORDS * len(given["codecs"])]}


def by_aiokafka(given: dict[str, Any]) -> dict[str, Any]:
    return asyncio.run(_by_aiokafka(given))


async def _by_aiokafka(given: dict[str, Any]) -> dict[str, Any]:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer  # noqa: PLC0415
    from aiokafka.abc import AbstractTokenProvider  # noqa: PLC0415

    class Token(AbstractTokenProvider):
        async def token(self) -> str:
            text: str = given["token"]
            return text

    topic = given["topic"]
    settings = {"bootstrap_servers": given["bootstrap"], **_python_login(given)}
    if given["mechanism"]:
        context = ssl.create_default_context(cafile=given["ca_file"])
        settings |= {"sasl_oauth_token_provider": Token(), "ssl_context": context}
    observed: dict[str, Any] = {}
    for codec in given["codecs"]:
        async with AIOKafkaProducer(compression_type=None if codec == "none" else codec, **settings) as producer:
            sent = [
                await producer.send(topic, codec.encode(), b"k", partition=0, headers=[("h", b"v")])
                for _ in range(_RECORDS)
            ]
            observed[codec] = [(await each).offset for each in sent]
    async with AIOKafkaProducer(transactional_id=given["transaction"], **settings) as producer:
        async with producer.transaction():
            committed = await producer.send_and_wait(topic, b"committed", partition=0)
        await producer.begin_transaction()
        await producer.send_and_wait(topic, b"aborted", partition=0)
        await producer.abort_transaction()
        observed["committed"] = committed.offset
    async with AIOKafkaProducer(**settings) as producer:
        for name, headers in (("refused", _expecting(0)), ("after", [])):
            if given["refused"]:
                try:
                    observed[name] = (await producer.send_and_wait(topic, b"x", partition=0, headers=headers)).offset
                except Exception as error:
                    observed[name] = str(error)
    read: list[str] = []
    consumer = AIOKafkaConsumer(
        topic,
        group_id=given["group"],
        auto_offset_reset="earliest",
        isolation_level="read_committed",
        enable_auto_commit=False,
        **settings,
    )
    async with consumer:
        while "committed" not in read:
            read.append((await asyncio.wait_for(consumer.getone(), _SECONDS)).value.decode())
        await consumer.commit()
    return observed | {"group": read}


def by_confluent_kafka(given: dict[str, Any]) -> dict[str, Any]:
    from confluent_kafka import Consumer, Producer  # noqa: PLC0415

    topic = given["topic"]
    settings = {"bootstrap.servers": given["bootstrap"]}
    if given["mechanism"]:
        settings |= {"security.protocol": "SASL_SSL", "ssl.ca.location": given["ca_file"]}
        settings["sasl.mechanism"] = given["mechanism"]
        if given["mechanism"] == "OAUTHBEARER":
            settings["oauth_cb"] = lambda _: (given["token"], time.time() + 3600)
        else:
            settings |= {"sasl.username": given["user"], "sasl.password": given["password"]}

    def send(producer: Any, value: str, count: int = 1, headers: Any = ()) -> list[Any]:
        met: list[Any] = []

        def report(error: Any, message: Any) -> None:
            met.append(message.offset() if error is None else str(error))

        for _ in range(count):
            producer.produce(topic, value, "k", partition=0, headers=list(headers), on_delivery=report)
        producer.flush(_SECONDS)
        return met

    observed: dict[str, Any] = {}
    for codec in given["codecs"]:
        producer = Producer({**settings, "compression.type": codec, "message.timeout.ms": round(_SECONDS * 1000)})
        observed[codec] = send(producer, codec, _RECORDS, [("h", b"v")])
    producer = Producer({**settings, "transactional.id": given["transaction"]})
    producer.poll(1)  # before 2.12, only this requests an OAUTHBEARER token
    producer.init_transactions(_SECONDS)
    for value in ("committed", "aborted"):
        producer.begin_transaction()
        observed[value] = send(producer, value)
        if value == "committed":
            producer.commit_transaction(_SECONDS)
        else:
            producer.abort_transaction(_SECONDS)
    if given["refused"]:
        producer = Producer(settings)
        observed["refused"] = send(producer, "x", headers=_expecting(0))
        observed["after"] = send(producer, "x")
    consumer = Consumer({**settings, "group.id": given["group"], "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    read: list[str] = []
    deadline = time.monotonic() + _SECONDS
    while "committed" not in read and time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            read.append(message.value().decode())
    consumer.commit(asynchronous=False)
    consumer.close()
    return observed | {"group": read}


BY: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "kafka-python": by_kafka_python,
    "aiokafka": by_aiokafka,
    "confluent-kafka": by_confluent_kafka,
}

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for name, value in BY[given["library"]](given).items():
        print(name, value, sep="\t")
