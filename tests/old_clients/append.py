"""Log in by each mechanism and append one record each time, in the environment of an old library.

Reads JSON from standard input: `library`, `bootstrap`, `topic`, `ca_file`, `user`, `password`, `token`, `mechanisms`.
Record N expects offset N. Prints the offsets as JSON.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from typing import Any

_SECONDS = 60.0


class _Token:
    """The token provider that kafka-python and aiokafka require."""

    def __init__(self, token: str) -> None:
        self._token = token

    def token(self) -> str:
        return self._token

    def extensions(self) -> dict[str, str]:
        return {}


def _headers(number: int) -> list[tuple[str, bytes]]:
    return [("fencepost-expected-offset", str(number).encode())]


def _login(reported: dict[str, Any], mechanism: str) -> dict[str, Any]:
    return {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": mechanism,
        "sasl_plain_username": reported["user"],
        "sasl_plain_password": reported["password"],
    }


def by_kafka_python(reported: dict[str, Any], mechanism: str, number: int) -> int:
    from kafka import KafkaProducer  # noqa: PLC0415
    from kafka.oauth.abstract import AbstractTokenProvider  # type: ignore[import-not-found]  # noqa: PLC0415

    class Token(_Token, AbstractTokenProvider):  # type: ignore[misc]
        pass

    login = _login(reported, mechanism)
    producer = KafkaProducer(
        bootstrap_servers=reported["bootstrap"],
        ssl_cafile=reported["ca_file"],
        sasl_oauth_token_provider=Token(reported["token"]),
        **login,
    )
    sent = producer.send(reported["topic"], mechanism.encode(), partition=0, headers=_headers(number))
    offset: int = sent.get(_SECONDS).offset
    producer.close()
    return offset


def by_aiokafka(reported: dict[str, Any], mechanism: str, number: int) -> int:
    from aiokafka import AIOKafkaProducer  # noqa: PLC0415
    from aiokafka.abc import AbstractTokenProvider  # noqa: PLC0415

    class Token(AbstractTokenProvider):
        async def token(self) -> str:
            text: str = reported["token"]
            return text

    async def send() -> int:
        context = ssl.create_default_context(cafile=reported["ca_file"])
        login = _login(reported, mechanism) | {"sasl_oauth_token_provider": Token(), "ssl_context": context}
        async with AIOKafkaProducer(bootstrap_servers=reported["bootstrap"], **login) as producer:
            value, headers = mechanism.encode(), _headers(number)
            met = await producer.send_and_wait(reported["topic"], value, partition=0, headers=headers)
            offset: int = met.offset
            return offset

    return asyncio.run(send())


def by_confluent(reported: dict[str, Any], mechanism: str, number: int) -> int:
    from confluent_kafka import Producer  # noqa: PLC0415

    settings = {
        "bootstrap.servers": reported["bootstrap"],
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": reported["ca_file"],
        "sasl.mechanism": mechanism,
        "message.timeout.ms": round(_SECONDS * 1000),
    }
    if mechanism == "OAUTHBEARER":
        settings["oauth_cb"] = lambda _: (reported["token"], time.time() + 3600)
    else:
        settings |= {"sasl.username": reported["user"], "sasl.password": reported["password"]}
    observed: list[Any] = []
    producer = Producer(settings)
    producer.produce(
        reported["topic"],
        mechanism.encode(),
        partition=0,
        headers=_headers(number),
        on_delivery=lambda error, message: observed.append(message.offset() if error is None else str(error)),
    )
    producer.flush(_SECONDS)
    offset: int = observed[0]
    return offset


if __name__ == "__main__":
    reported = json.load(sys.stdin)
    by = {"kafka-python": by_kafka_python, "aiokafka": by_aiokafka, "confluent-kafka": by_confluent}
    append = by[reported["library"]]
    print(json.dumps([append(reported, each, number) for number, each in enumerate(reported["mechanisms"])]))
