"""Measure the proxy's cost of TLS: CPU time per byte and per connection, memory per idle connection.

    python -m benchmarks.secured            # some minutes
    python -m benchmarks.secured --quick    # a fifth of everything

Three proxies run in front of one Kafka: without TLS, with TLS to clients only, with TLS and SASL on both sides. Their
measurements alternate, so that other load affects all of them. Figures are the proxy process's CPU time (user and
system, from the kernel's scheduler) and resident memory. Clients are librdkafka and raw connections.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import confluent_kafka

from benchmarks.scaling import cpu_seconds, rss_kb
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection
from tests.support.sasl_ssl import ADMIN, Secured, SecuredConnection, sasl_ssl_kafka

_VALUE_BYTES: Final = 100_000
_WAIT_SECONDS: Final = 120.0
#: An incomplete ClientHello: TLS record header and one byte of 512.
_HALF_HELLO: Final = b"\x16\x03\x01\x02\x00\x01"

PRODUCED, CONSUMED = "CPU s/GB, produced", "CPU s/GB, consumed"
CONNECTED, OPEN, HALF = "CPU ms/connection, opened and closed", "KB/connection, open", "KB/handshake, stalled"
FIGURES: Final = (PRODUCED, CONSUMED, CONNECTED, OPEN, HALF)


@dataclass
class Setup:
    """`connect`: opens an authenticated raw connection."""

    name: str
    proxy: ProxyProcess
    client: dict[str, Any]
    connect: Callable[[], Connection]
    secured: bool
    observed: dict[str, list[float]] = field(default_factory=dict)

    def record(self, figure: str, value: float) -> None:
        self.observed.setdefault(figure, []).append(value)


@contextlib.contextmanager
def setups(directory: Path) -> Iterator[list[Setup]]:
    with ExitStack() as stack:
        secured = stack.enter_context(sasl_ssl_kafka(directory, more={"authorizer.class.name": ""}))
        limits = "\n[limits]\nhandshake_seconds = 600.0\n"

        def proxy(upstream: str, config: str) -> ProxyProcess:
            return stack.enter_context(ProxyProcess(upstream, directory, config=config + limits))

        def let_in(at: ProxyProcess, trusting: ssl.SSLContext, *, login: bool) -> Connection:
            connection = SecuredConnection(at.bootstrap, trusting)
            if login:
                assert connection.log_in(ADMIN) == 0
            return connection

        plaintext, near = secured.kafka.bootstrap, _to_clients(secured)
        without, one, both = (
            proxy(plaintext, ""),
            proxy(plaintext, near),
            proxy(secured.kafka.bootstrap_of("SECURED"), secured.proxy_config("SCRAM-SHA-512")),
        )
        trusting, login = secured.trusting(), secured.confluent(ADMIN)
        ssl_only = {"security.protocol": "SSL", "ssl.ca.location": str(secured.authority.file)}
        yield [
            Setup("without TLS", without, {}, lambda: Connection(without.bootstrap), False),
            Setup("TLS to clients", one, ssl_only, lambda: let_in(one, trusting, login=False), True),
            Setup("SASL_SSL, both sides", both, login, lambda: let_in(both, trusting, login=True), True),
        ]


def _to_clients(secured: Secured) -> str:
    return f'[listen_tls]\ncertificate_file = "{secured.server.certificate}"\nkey_file = "{secured.server.key}"\n'


def produce(setup: Setup, topic: str, byte_count: int) -> float:
    """CPU seconds of the bytes only: the client connects before and disconnects after the measurement."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": setup.proxy.bootstrap, "linger.ms": 5, "batch.size": 1_000_000, **setup.client}
    )
    value = os.urandom(_VALUE_BYTES)
    producer.produce(topic, value, partition=0)
    assert producer.flush(_WAIT_SECONDS) == 0
    before = cpu_seconds(setup.proxy.pid)
    for _ in range(byte_count // _VALUE_BYTES):
        while True:
            try:
                producer.produce(topic, value, partition=0)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(_WAIT_SECONDS) == 0
    return cpu_seconds(setup.proxy.pid) - before


def consume(setup: Setup, topic: str, start: int, byte_count: int) -> float:
    """As `produce`. The consumer reads the last record first, then seeks to `start`."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": setup.proxy.bootstrap, "group.id": topic, "fetch.message.max.bytes": 8_000_000}
        | setup.client
    )

    def read(left: int) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while left > 0:
            assert time.monotonic() < deadline
            for message in consumer.consume(100, 1.0):
                assert message.error() is None, message.error()
                left -= len(message.value() or b"")

    last = start + byte_count // _VALUE_BYTES - 1
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, last)])
    read(_VALUE_BYTES)
    before = cpu_seconds(setup.proxy.pid)
    consumer.seek(confluent_kafka.TopicPartition(topic, 0, start))
    read(byte_count)
    spent = cpu_seconds(setup.proxy.pid) - before
    consumer.close()
    return spent


def measure(setup: Setup, number: int, byte_count: int, connections: int) -> None:
    pid, topic = setup.proxy.pid, "-".join(["secured", *setup.name.replace(",", "").lower().split()])
    start = number * (byte_count // _VALUE_BYTES + 1)
    gigabytes = byte_count / 1e9

    setup.record(PRODUCED, produce(setup, topic, byte_count) / gigabytes)
    setup.record(CONSUMED, consume(setup, topic, start + 1, byte_count) / gigabytes)

    def connect_and_close() -> None:
        for _ in range(connections):
            with setup.connect() as connection:
                connection.api_versions()

    before = cpu_seconds(pid)
    connect_and_close()
    setup.record(CONNECTED, (cpu_seconds(pid) - before) * 1000 / connections)
    resident_kb = rss_kb(pid)
    there = [setup.connect() for _ in range(connections)]
    for each in there:
        each.api_versions()
    setup.record(OPEN, (rss_kb(pid) - resident_kb) / connections)
    for each in there:
        each.close()


def stall(setup: Setup, connections: int) -> None:
    """Run once, at the end: freed memory is reused, so a repetition would measure less."""
    host, _, port = setup.proxy.bootstrap.rpartition(":")
    before = rss_kb(setup.proxy.pid)
    there = []
    for _ in range(connections):
        there.append(socket.create_connection((host, int(port))))
        there[-1].sendall(_HALF_HELLO)
    with setup.connect() as last:  # accepted after them
        last.api_versions()
    setup.record(HALF, (rss_kb(setup.proxy.pid) - before) / connections)
    for each in there:
        each.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.secured")
    parser.add_argument("--quick", action="store_true", help="run a fifth of each measurement")
    options = parser.parse_args()
    megabytes, connections, rounds = (40, 100, 2) if options.quick else (100, 300, 4)
    with tempfile.TemporaryDirectory(prefix="fencepost-secured-") as directory, setups(Path(directory)) as measured:
        for number in range(rounds + 1):
            for setup in measured:
                measure(setup, number, megabytes * 1_000_000, connections)
                if not number:
                    setup.observed = {
                        OPEN: setup.observed[OPEN]
                    }  # warm-up round; only its memory counts, because later rounds reuse it
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
        for setup in measured:
            setup.observed[OPEN] = setup.observed[OPEN][:1]
            if setup.secured:
                stall(setup, 3 * connections)
    first = measured[0].observed
    print("| " + " | ".join(["", *FIGURES]) + " |")
    print("|---" * (len(FIGURES) + 1) + "|")
    for setup in measured:
        cells = [_cell(setup.observed.get(each, []), first.get(each, [])) for each in FIGURES]
        print("| " + " | ".join([setup.name, *cells]) + " |")
    return 0


def _cell(observed: list[float], without: list[float]) -> str:
    """Median of the rounds, and its ratio to the setup without TLS."""
    if not observed:
        return "–"
    middle = statistics.median(observed)
    if not without or observed is without:
        return f"{middle:.2f}"
    ratios = [one / other for one, other in zip(observed, without, strict=True) if other > 0]
    return f"{middle:.2f} (×{statistics.median(ratios):.1f})" if ratios else f"{middle:.2f}"


if __name__ == "__main__":
    sys.exit(main())
