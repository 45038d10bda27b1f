"""Measure the cost of TLS, and HAProxy's: CPU time per byte, request and connection, memory per idle connection.

    python -m benchmarks.secured            # some minutes
    python -m benchmarks.secured --quick    # a fifth of everything

The proxies run in front of one Kafka: without TLS, with TLS to clients only, with TLS and SASL on both sides, and the
last one in pure Python. So do HAProxy, if it is installed, and the proxies of `benchmarks/peers.toml` that have a
`tls_config` there, without TLS and with TLS on both sides. Logins pass through them. Measurements alternate, so that
other load affects all of them. Figures are CPU time of the process (user and system, from the kernel's scheduler) and
resident memory. Clients are librdkafka and raw connections.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import statistics
import string
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import confluent_kafka

from benchmarks import machine
from benchmarks.__main__ import PEERS
from benchmarks.raw import Appends, Shape
from benchmarks.routes import Peer, Route, free_ports, haproxy, read_peers
from benchmarks.scaling import cpu_seconds, rss_kb
from fencepost_dev.ports import HOST
from fencepost_proxy.types import Address
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection
from tests.support.sasl_ssl import ADMIN, Secured, SecuredConnection, sasl_ssl_kafka

_VALUE_BYTES: Final = 100_000
_WAIT_SECONDS: Final = 120.0
#: An incomplete ClientHello: TLS record header and one byte of 512.
_HALF_HELLO: Final = b"\x16\x03\x01\x02\x00\x01"
_SMALL_BYTES: Final = 100
_HAPROXY: Final = "HAProxy"
#: Kafka's listeners that advertise HAProxy, without TLS and with it.
_RELAYED: Final = "RELAYED"
_SECURELY_RELAYED: Final = "SRELAYED"

PRODUCED, CONSUMED, SMALL = "CPU s/GB, produced", "CPU s/GB, consumed", "CPU µs/small request"
CONNECTED, OPEN, HALF = "CPU ms/connection, opened and closed", "KB/connection, open", "KB/handshake, stalled"
FIGURES: Final = (PRODUCED, CONSUMED, SMALL, CONNECTED, OPEN, HALF)


@dataclass
class Setup:
    """`connect`: opens an authenticated raw connection. `compared`: the setup to which its figures are ratios."""

    name: str
    bootstrap: str
    pid: int
    compared: str
    client: dict[str, Any]
    connect: Callable[[], Connection]
    secured: bool
    observed: dict[str, list[float]] = field(default_factory=dict)

    def record(self, figure: str, value: float) -> None:
        self.observed.setdefault(figure, []).append(value)


@contextlib.contextmanager
def setups(directory: Path, peers: Sequence[Peer]) -> Iterator[list[Setup]]:
    """`peers`: with TLS, and rewriting addresses."""
    with ExitStack() as stack:
        clear_port, tls_port, *ports = free_ports(2 + 2 * len(peers))
        secured = stack.enter_context(
            sasl_ssl_kafka(
                directory,
                more={"authorizer.class.name": ""},
                relays={
                    _RELAYED: ("PLAINTEXT", Address(HOST, clear_port)),
                    _SECURELY_RELAYED: ("SASL_SSL", Address(HOST, tls_port)),
                },
            )
        )
        limits = "\n[limits]\nhandshake_seconds = 600.0\n"

        def proxy(upstream: str, config: str, native: str = "auto") -> tuple[str, int]:
            environment = {"FENCEPOST_NATIVE": native}
            started = ProxyProcess(upstream, directory, config=config + limits, environment=environment)
            stack.enter_context(started)
            return started.bootstrap, started.pid

        def start(peer: Peer, port: int, upstream: str) -> tuple[str, int]:
            route = Route(peer, port=port, upstream=upstream, directory=directory)
            route.start()
            stack.callback(route.stop)
            return route.address, max(route.pids(), key=rss_kb)

        def relay(port: int, listener: str, listen: str, server: str) -> tuple[str, int]:
            return start(_haproxy(listener, listen, server), port, secured.kafka.bootstrap_of(listener))

        trusting = secured.trusting()

        def let_in(address: str, *, login: bool) -> Connection:
            connection = SecuredConnection(address, trusting)
            if login:
                assert connection.log_in(ADMIN) == 0
            return connection

        def setup(name: str, at: tuple[str, int], compared: str, *, tls: bool = True, login: bool = True) -> Setup:
            address, pid = at
            if not tls:
                return Setup(name, address, pid, compared, {}, lambda: Connection(address), False)
            ssl_only = {"security.protocol": "SSL", "ssl.ca.location": str(secured.authority.file)}
            client = secured.confluent(ADMIN) if login else ssl_only
            return Setup(name, address, pid, compared, client, lambda: let_in(address, login=login), True)

        plaintext, encrypted = secured.kafka.bootstrap, secured.kafka.bootstrap_of("SECURED")
        both, to_both = secured.proxy_config("SCRAM-SHA-512"), "SASL_SSL on both sides"
        ours = [
            setup("without TLS", proxy(plaintext, ""), "without TLS", tls=False),
            setup("TLS to clients", proxy(plaintext, _to_clients(secured)), "without TLS", login=False),
            setup(to_both, proxy(encrypted, both), "without TLS"),
            setup(f"{to_both}, pure Python", proxy(encrypted, both, "off"), "without TLS"),
        ]
        if haproxy().missing:
            print(haproxy().missing, file=sys.stderr)
        else:
            clear, cipher = "HAProxy, without TLS", f"HAProxy, {to_both}"
            to_kafka = f"ssl verify required ca-file {secured.authority.file}"
            ours += [
                setup(clear, relay(clear_port, _RELAYED, "", ""), clear, tls=False),
                setup(
                    cipher,
                    relay(tls_port, _SECURELY_RELAYED, f"ssl crt {secured.server.both}", to_kafka),
                    clear,
                ),
            ]
        for peer in peers:
            clear, cipher = f"{peer.name}, without TLS", f"{peer.name}, {to_both}"
            ours += [
                setup(clear, start(replace(peer, name=clear), ports.pop(), plaintext), clear, tls=False),
                setup(cipher, start(with_tls(peer, cipher, secured), ports.pop(), encrypted), clear),
            ]
        yield ours


def with_tls(peer: Peer, name: str, secured: Secured) -> Peer:
    server, trusted = secured.server, secured.authority.file
    files = {"certificate": server.certificate, "key": server.key, "trusted": trusted}
    return replace(peer, name=name, config=string.Template(peer.tls_config).safe_substitute(files))


def _haproxy(name: str, listen: str, server: str) -> Peer:
    """`listen`, `server`: more words of its lines `bind` and `server`."""
    peer = haproxy()
    config = peer.config.replace("${host}:${port}", "${host}:${port} " + listen)
    config = config.replace("${upstream}", "${upstream} " + server)
    return replace(peer, name=name, config=config)


def _to_clients(secured: Secured) -> str:
    return f'[listen_tls]\ncertificate_file = "{secured.server.certificate}"\nkey_file = "{secured.server.key}"\n'


def produce(setup: Setup, topic: str, byte_count: int) -> float:
    """CPU seconds of the bytes only: the client connects before and disconnects after the measurement."""
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": setup.bootstrap, "linger.ms": 5, "batch.size": 1_000_000, **setup.client}
    )
    value = os.urandom(_VALUE_BYTES)
    producer.produce(topic, value, partition=0)
    assert producer.flush(_WAIT_SECONDS) == 0
    before = cpu_seconds(setup.pid)
    for _ in range(byte_count // _VALUE_BYTES):
        while True:
            try:
                producer.produce(topic, value, partition=0)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(_WAIT_SECONDS) == 0
    return cpu_seconds(setup.pid) - before


def consume(setup: Setup, topic: str, start: int, byte_count: int) -> float:
    """As `produce`. The consumer reads the last record first, then seeks to `start`."""
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": setup.bootstrap, "group.id": topic, "fetch.message.max.bytes": 8_000_000} | setup.client
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
    before = cpu_seconds(setup.pid)
    consumer.seek(confluent_kafka.TopicPartition(topic, 0, start))
    read(byte_count)
    spent = cpu_seconds(setup.pid) - before
    consumer.close()
    return spent


def append_small(setup: Setup, topic: str, count: int) -> float:
    """CPU seconds of `count` appends of one small record, one in flight."""
    creator = confluent_kafka.Producer({"bootstrap.servers": setup.bootstrap, **setup.client})
    creator.produce(topic, b"", partition=0)
    assert creator.flush(_WAIT_SECONDS) == 0
    appends = Appends(Shape(topic, 1, _SMALL_BYTES))
    with setup.connect() as connection:

        def append() -> None:
            connection.socket.sendall(appends.frame())
            frame = connection.receive_frame()
            appends.check(struct.pack(">i", len(frame)) + frame)

        for _ in range(count // 10):
            append()
        before = cpu_seconds(setup.pid)
        for _ in range(count):
            append()
        return cpu_seconds(setup.pid) - before


def idle_kb(setup: Setup, connections: int) -> float:
    """Resident memory of an idle connection, after some others: the first ones load code and fill buffers."""
    with ExitStack() as stack:

        def open_some(count: int) -> None:
            for _ in range(count):
                stack.enter_context(setup.connect()).api_versions()

        open_some(connections // 3)
        before = rss_kb(setup.pid)
        open_some(connections)
        return (rss_kb(setup.pid) - before) / connections


def measure(setup: Setup, number: int, byte_count: int, connections: int) -> None:
    pid, topic = setup.pid, re.sub(r"[^a-z]+", "-", f"secured {setup.name}".lower())
    if not number:
        # In memory that no earlier connection has left.
        setup.record(OPEN, idle_kb(setup, connections))
    small = 10 * connections
    start = number * (byte_count // _VALUE_BYTES + 1)
    gigabytes = byte_count / 1e9

    setup.record(PRODUCED, produce(setup, topic, byte_count) / gigabytes)
    setup.record(CONSUMED, consume(setup, topic, start + 1, byte_count) / gigabytes)

    setup.record(SMALL, append_small(setup, f"{topic}-small", small) * 1e6 / small)

    def connect_and_close() -> None:
        for _ in range(connections):
            with setup.connect() as connection:
                connection.api_versions()

    before = cpu_seconds(pid)
    connect_and_close()
    setup.record(CONNECTED, (cpu_seconds(pid) - before) * 1000 / connections)


def stall(setup: Setup, connections: int) -> None:
    """Run once, at the end: freed memory is reused, so a repetition would measure less."""
    host, _, port = setup.bootstrap.rpartition(":")
    before = rss_kb(setup.pid)
    there = []
    for _ in range(connections):
        there.append(socket.create_connection((host, int(port))))
        there[-1].sendall(_HALF_HELLO)
    with setup.connect() as last:  # accepted after them
        last.api_versions()
    setup.record(HALF, (rss_kb(setup.pid) - before) / connections)
    for each in there:
        each.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.secured")
    parser.add_argument("--quick", action="store_true", help="run a fifth of each measurement")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="FILE.toml")
    options = parser.parse_args()
    known = read_peers(options.peers.read_text("utf-8"))
    for peer in known:
        if peer.missing:
            print(f"{peer.name}: {peer.missing}", file=sys.stderr)
    peers = [peer for peer in known if peer.tls_config]
    megabytes, connections, rounds = (40, 100, 2) if options.quick else (100, 300, 4)
    machine.print_heading("TLS")
    with (
        tempfile.TemporaryDirectory(prefix="fencepost-secured-") as directory,
        setups(Path(directory), peers) as measured,
    ):
        for number in range(rounds + 1):
            for setup in measured:
                measure(setup, number, megabytes * 1_000_000, connections)
                if not number:
                    setup.observed = {
                        OPEN: setup.observed[OPEN]
                    }  # warm-up round; only its memory counts, because later rounds reuse it
            print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
        for setup in measured:
            if setup.secured:
                stall(setup, 3 * connections)
    by_name = {setup.name: setup for setup in measured}
    print("| " + " | ".join(["", *FIGURES]) + " |")
    print("|---" * (len(FIGURES) + 1) + "|")
    for setup in measured:
        first = by_name[setup.compared].observed
        cells = [_cell(setup.observed.get(each, []), first.get(each, [])) for each in FIGURES]
        print("| " + " | ".join([setup.name, *cells]) + " |")
    for name in (_HAPROXY, *(peer.name for peer in peers)):
        _print_ratios(by_name["SASL_SSL on both sides"], by_name.get(f"{name}, SASL_SSL on both sides"), name)
    return 0


def _print_ratios(ours: Setup, theirs: Setup | None, name: str) -> None:
    """By round, then their median: other load affects both of a round."""
    if theirs is None:
        return
    cells = []
    for figure in FIGURES:
        ratios = [one / other for one, other in zip(ours.observed[figure], theirs.observed[figure], strict=True)]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
    print("| " + " | ".join([f"of {name}'s, SASL_SSL on both sides", *cells]) + " |")


def _cell(observed: list[float], without: list[float]) -> str:
    """Median of the rounds, and its ratio to the same proxy without TLS."""
    if not observed:
        return "–"
    middle = statistics.median(observed)
    if not without or observed is without:
        return f"{middle:.2f}"
    ratios = [one / other for one, other in zip(observed, without, strict=True) if other > 0]
    return f"{middle:.2f} (×{statistics.median(ratios):.1f})" if ratios else f"{middle:.2f}"


if __name__ == "__main__":
    sys.exit(main())
