"""Records that cost work and bring no data: the connection is closed soon, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tlslite.api import HandshakeSettings, TLSConnection
from tlslite.constants import AlertDescription, AlertLevel, ContentType, KeyUpdateMessageType
from tlslite.messages import Alert, ApplicationData, Message

from fencepost_proxy.transport.native_tls import tls_socket
from fencepost_proxy.transport.tls import TlsBuffers, secure
from tests.protocol.test_tls_socket import (
    WAIT_SECONDS,
    authority,
    executor,
    listen,
    peer,
    receive,
    server,
    tcp_pair,
    trusting,
)
from tests.support.certificates import Authority, Certificate

__all__ = ["authority", "executor", "server"]  # fixtures

TLS12, TLS13 = (3, 3), (3, 4)
#: More than is tolerated of each kind: 40 KB.
RECORDS = 1_500
#: CPU time of one read, on a slow machine, too.
READ_SECONDS_MAX = 0.1


def hostile_records(connection: TLSConnection, kind: str) -> Iterator[object]:
    if kind == "key update":
        return connection.send_keyupdate_request(KeyUpdateMessageType.update_not_requested)  # type: ignore[no-any-return]
    if kind == "requested key update":
        return connection.send_keyupdate_request(KeyUpdateMessageType.update_requested)  # type: ignore[no-any-return]
    message = {
        "empty": lambda: ApplicationData().create(bytearray()),
        "warning": lambda: Alert().create(AlertDescription.user_canceled, AlertLevel.warning),
        # Begins another handshake. (OpenSSL does not look into it: renegotiation is off.)
        "handshake": lambda: Message(ContentType.handshake, bytearray(b"\x01\x00\x00\x00")),
    }[kind]()
    return connection._recordLayer.sendRecord(message)  # type: ignore[no-any-return]


def flood(far: socket.socket, kind: str, version: tuple[int, int], begun: threading.Event) -> None:
    connection, settings = TLSConnection(far), HandshakeSettings()
    settings.minVersion = settings.maxVersion = version
    connection.handshakeClientCert(settings=settings)
    connection.sock.buffer_writes = True
    for _ in range(RECORDS):
        for _ in hostile_records(connection, kind):
            pass
    begun.set()
    with suppress(OSError):
        connection.sock.flush()
    with suppress(OSError):
        far.recv(1 << 20)


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        ("key update", TLS13),
        ("requested key update", TLS13),
        ("empty", TLS13),
        ("empty", TLS12),
        ("warning", TLS13),
        ("warning", TLS12),
        ("handshake", TLS12),
    ],
)
def test_records_without_data_end_their_connection_alone(
    authority: Authority, server: Certificate, kind: str, version: tuple[int, int]
) -> None:
    context, buffers = listen(server), TlsBuffers()
    near, far = tcp_pair()
    good_near, good_far = tcp_pair()
    begun, refused, echoed = threading.Event(), threading.Event(), [0]
    slowest = 0.0

    def echo() -> None:
        with trusting(authority).wrap_socket(good_far, server_hostname="localhost") as secured:
            while True:
                over = refused.is_set()
                secured.sendall(b"request")
                assert secured.recv(100) == b"REQUEST"
                echoed[0] += begun.is_set()
                if over:
                    return
                time.sleep(0.001)

    async def serve_hostile() -> None:
        nonlocal slowest
        sock, buffer = tls_socket(near, context, buffers), memoryview(bytearray(256 * 1024))
        await secure(sock)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    started = time.thread_time()
                    try:
                        assert sock.recv_into(buffer) == 0
                        raise AssertionError("the hostile client closed")
                    except BlockingIOError:
                        pass
                    finally:
                        slowest = max(slowest, time.thread_time() - started)
                    await asyncio.sleep(0.001)
        except (ssl.SSLError, ConnectionAbortedError):
            refused.set()
        finally:
            sock.close()

    async def serve_good() -> None:
        sock = tls_socket(good_near, context, buffers)
        await secure(sock)
        while request := await receive(sock, 7):
            sock.send(request.upper())
        sock.close()

    async def serve() -> None:
        await asyncio.gather(serve_hostile(), serve_good())

    with far, peer(lambda: flood(far, kind, version, begun)), peer(echo):
        asyncio.run(serve())
    assert refused.is_set()
    assert echoed[0] > 0
    assert slowest < READ_SECONDS_MAX
