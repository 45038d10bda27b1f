"""A server at a broker's address that does not speak Kafka: the proxy keeps running and its memory stays bounded."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fencepost_proxy.types import Address
from tests.integration.test_bad_input import NOISE_BYTES, rss_bytes
from tests.integration.test_proxy_command import get, proxy
from tests.kit.waiting import until
from tests.support.ports import free_port

pytestmark = [pytest.mark.no_cover, pytest.mark.timeout(200)]

FRAME_BYTES_MAX = 20_000_000
CONFIG = f"""
[limits]
frame_bytes_max = {FRAME_BYTES_MAX}
request_timeout_seconds = 1.0
reconnect_backoff_max_seconds = 0.1
"""
_CHUNK = bytes(65_536)


def _endless(sock: socket.socket, correlation_id: bytes) -> None:
    """An impossible length, then endless bytes."""
    sock.sendall(struct.pack(">i", 2_000_000_000) + correlation_id)
    while True:
        sock.sendall(_CHUNK)


def _nearly(sock: socket.socket, correlation_id: bytes) -> None:
    """The longest allowed response, without the last byte."""
    sock.sendall(struct.pack(">i", FRAME_BYTES_MAX) + correlation_id)
    for _ in range(FRAME_BYTES_MAX // len(_CHUNK) - 1):
        sock.sendall(_CHUNK)
    sock.recv(1)


def _many(sock: socket.socket, correlation_id: bytes) -> None:
    """More APIs than bytes."""
    body = correlation_id + b"\0\0" + struct.pack(">i", 2**31 - 1) + bytes(100)
    sock.sendall(struct.pack(">i", len(body)) + body)
    sock.recv(1)


def _another(sock: socket.socket, correlation_id: bytes) -> None:
    sock.sendall(struct.pack(">ii", 6, 99_999) + b"\0\0")
    sock.recv(1)


def _noise(sock: socket.socket, correlation_id: bytes) -> None:
    sock.sendall(os.urandom(4_096))
    sock.recv(1)


def _silence(sock: socket.socket, correlation_id: bytes) -> None:
    sock.recv(1)


def _end(sock: socket.socket, correlation_id: bytes) -> None:
    sock.shutdown(socket.SHUT_RDWR)


KINDS: tuple[Callable[[socket.socket, bytes], None], ...] = (_endless, _nearly, _many, _another, _noise, _silence, _end)


@contextmanager
def hostile() -> Iterator[tuple[Address, list[str]]]:
    """Serve each connection with the next of `KINDS`. Yield the address and the names of the kinds that have been
    served."""
    listener = socket.create_server(("127.0.0.1", 0))
    kinds, met = itertools.cycle(KINDS), list[str]()

    def serve(sock: socket.socket, kind: Callable[[socket.socket, bytes], None]) -> None:
        with sock, suppress(OSError):
            sock.settimeout(60.0)
            head = sock.recv(4_096)
            kind(sock, head[8:12])
        met.append(kind.__name__)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0], next(kinds)), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield Address(*listener.getsockname()), met
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_hostile_broker_costs_bounded_memory(tmp_path: Path) -> None:
    status = free_port()
    (file := tmp_path / "fencepost.toml").write_text(CONFIG)
    with hostile() as (address, met):
        arguments = (f"--upstream={address}", "--listen=127.0.0.1:0", f"--status=127.0.0.1:{status}")
        with proxy(*arguments, f"--config={file}") as process:
            until(lambda: get(status, "/livez")[0] == 200, "the process to start")
            before, most = rss_bytes(process.pid), 0
            deadline = time.monotonic() + 120
            while min(met.count(kind.__name__) for kind in KINDS) < 2:
                assert time.monotonic() < deadline, met
                most = max(most, rss_bytes(process.pid))
                time.sleep(0.05)
            assert get(status, "/livez")[0] == 200
            assert get(status, "/readyz")[0] == 503
            assert process.poll() is None
            assert most - before < 3 * FRAME_BYTES_MAX + NOISE_BYTES
