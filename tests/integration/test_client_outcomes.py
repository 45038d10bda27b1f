"""What the user of an unmodified client sees: an appended record, a refused one, and whether the producer goes on.

Each client appends at 0, expects 7 where the log ends at 1, then goes on with 1, then sends without an expectation.
`pytest -s` prints the table. The answers that docs and README give to users of these libraries are pinned here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import aiokafka
import aiokafka.errors
import confluent_kafka
import kafka.errors
import pytest
from kafka import KafkaProducer

from fencepost_proxy.dev.cluster import KafkaCluster
from tests.support import clients
from tests.support.proxy import ProxyProcess

pytestmark = pytest.mark.kafka

WAIT_SECONDS = 20.0
#: What each record expects; None says nothing.
SCRIPT: tuple[int | None, ...] = (0, 7, 1, None)


@dataclass(frozen=True, slots=True)
class Seen:
    """One send as its user sees it. `shown`: everything that the library tells of a refusal."""

    expected: int | None
    offset: int | None = None
    error: str | None = None
    shown: str = ""

    def __str__(self) -> str:
        what = f"offset {self.offset}" if self.error is None else f"{self.error}: {self.shown}"
        return f"expected {self.expected!s:>4} -> {what}"


@pytest.fixture(scope="module")
def stock_proxy(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    config = '[topics."outcome-*"]\n"check.expected.offsets" = "true"\n'
    with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("proxy"), config=config) as process:
        yield process


def _headers(expected: int | None) -> list[tuple[str, bytes]]:
    return [] if expected is None else [("expected-offset", b"%d" % expected)]


def _kafka_python(bootstrap: str, topic: str, configs: dict[str, Any]) -> list[Seen]:
    seen = []
    with closing(KafkaProducer(bootstrap_servers=bootstrap, **configs)) as producer:
        for expected in SCRIPT:
            future = producer.send(topic, b"x", headers=_headers(expected), partition=0)
            try:
                seen.append(Seen(expected, offset=future.get(WAIT_SECONDS).offset))
            except kafka.errors.KafkaError as error:
                seen.append(Seen(expected, error=type(error).__name__, shown=str(error)))
    return seen


def _aiokafka(bootstrap: str, topic: str, configs: dict[str, Any]) -> list[Seen]:
    async def run() -> list[Seen]:
        seen = []
        async with aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, **configs) as producer:
            for expected in SCRIPT:
                send = producer.send_and_wait(topic, b"x", headers=_headers(expected), partition=0)
                try:
                    metadata = await asyncio.wait_for(send, WAIT_SECONDS)
                    seen.append(Seen(expected, offset=metadata.offset))
                except aiokafka.errors.KafkaError as error:
                    seen.append(Seen(expected, error=type(error).__name__, shown=str(error)))
        return seen

    return asyncio.run(run())


def _confluent(bootstrap: str, topic: str, configs: dict[str, Any]) -> list[Seen]:
    seen: list[Seen] = []
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, **configs})
    for expected in SCRIPT:

        def delivered(
            error: confluent_kafka.KafkaError | None, msg: confluent_kafka.Message, expected: int | None = expected
        ) -> None:
            if error is None:
                seen.append(Seen(expected, offset=msg.offset()))
            else:
                shown = (
                    f"{error.str()}; msg.offset()={msg.offset()} retriable={error.retriable()} fatal={error.fatal()}"
                )
                seen.append(Seen(expected, error=error.name(), shown=shown))

        headers: Any = _headers(expected)
        producer.produce(topic, b"x", headers=headers, partition=0, on_delivery=delivered)
        assert producer.flush(WAIT_SECONDS) == 0
    producer.close()
    return seen


Run = Callable[[str, str, dict[str, Any]], list[Seen]]

#: name -> how to run it, its settings, what a refusal shows, does the producer go on
CLIENTS: dict[str, tuple[Run, dict[str, Any], str, str, bool]] = {
    "kafka-python (default: idempotent)": (
        _kafka_python,
        {},
        "PolicyViolationError",
        "[Error 44] PolicyViolationError: OFFSET_MISMATCH topic={topic} partition=0 expected=7 actual=1",
        False,
    ),
    "kafka-python enable_idempotence=False": (
        _kafka_python,
        {"enable_idempotence": False},
        "PolicyViolationError",
        "[Error 44] PolicyViolationError: OFFSET_MISMATCH topic={topic} partition=0 expected=7 actual=1",
        True,
    ),
    "aiokafka (default)": (_aiokafka, {}, "PolicyViolationError", "[Error 44] PolicyViolationError", True),
    "aiokafka enable_idempotence=True": (
        _aiokafka,
        {"enable_idempotence": True},
        "PolicyViolationError",
        "[Error 44] PolicyViolationError",
        True,
    ),
    "confluent-kafka (default)": (
        _confluent,
        {},
        "POLICY_VIOLATION",
        "Broker: Policy violation; msg.offset()=1 retriable=False fatal=False",
        True,
    ),
    "confluent-kafka enable.idempotence=true": (
        _confluent,
        {"enable.idempotence": True},
        "POLICY_VIOLATION",
        "Broker: Policy violation; msg.offset()=1 retriable=False fatal=False",
        True,
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_a_stock_client_sees(
    client: str, stock_proxy: ProxyProcess, kafka: KafkaCluster, unique_topic: Callable[..., str]
) -> None:
    run, configs, error, shown, goes_on = CLIENTS[client]
    topic = clients.create_topic(stock_proxy.bootstrap, unique_topic("outcome"))
    seen = run(stock_proxy.bootstrap, topic, configs)
    print(f"\n{client}")
    for one in seen:
        print(f"    {one}")
    refusal = Seen(7, error=error, shown=shown.format(topic=topic))
    if goes_on:
        assert seen == [Seen(0, 0), refusal, Seen(1, 1), Seen(None, 2)]
        assert clients.log_end(kafka.bootstrap, topic) == 3
    else:
        # Dead: everything after it fails with the error of the refused one, whatever it expects.
        again = [Seen(expected, error=error, shown=refusal.shown) for expected in (1, None)]
        assert seen == [Seen(0, 0), refusal, *again]
        assert clients.log_end(kafka.bootstrap, topic) == 1
