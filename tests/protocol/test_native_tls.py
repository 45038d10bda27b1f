"""TLS in native code: OpenSSL decides what rustls refuses, and the reasons of refusals are the same."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.config import ListenTls, ProxyConfig, UpstreamTls
from fencepost_proxy.executor import EXECUTOR
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.transport.certificates import Certificates, listener_context, upstream_context
from fencepost_proxy.transport.native_tls import Context, tls_socket
from fencepost_proxy.transport.proxied_socket import Buffers
from fencepost_proxy.transport.tls import TlsBuffers, TlsSocket, secure
from fencepost_proxy.transport.upstreams import NotConnected, Upstreams
from fencepost_proxy.types import Address
from tests.protocol.test_tls_socket import authority, listen, peer, server, tcp_pair, trusting
from tests.support.certificates import Authority, Certificate, self_signed

__all__ = ["authority", "server"]  # fixtures
pytestmark = pytest.mark.skipif(EXECUTOR.module is None, reason=EXECUTOR.why_python)


@contextmanager
def broker(context: ssl.SSLContext | None) -> Iterator[tuple[Address, list[int]]]:
    """Its address, and its connections so far. `context` – None: it does not speak TLS."""
    accepted: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve(sock: socket.socket) -> None:
            with suppress(OSError), sock:
                if context is None:
                    sock.sendall(bytes(8))
                    sock.recv(1)
                else:
                    with context.wrap_socket(sock, server_side=True) as secured:
                        secured.recv(1)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listening.accept()
                    accepted.append(1)
                    threading.Thread(target=serve, args=(sock,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield Address(*listening.getsockname()[:2]), accepted
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            thread.join(10.0)


def upstreams(tls: UpstreamTls, address: Address) -> Upstreams:
    config = ProxyConfig(upstream=(address,), listen=Address("127.0.0.1", 0), upstream_tls=tls)
    return Upstreams(config, AddressBook(0), Certificates(None, tls), Buffers(), Metrics())


def outcome(tls: UpstreamTls, address: Address) -> str:
    """Why it is refused, or what encrypts."""

    async def connect() -> str:
        try:
            sock, _ = await upstreams(tls, address).probe(None)
        except NotConnected as error:
            return str(error).partition(": ")[2]
        sock.close()
        assert isinstance(sock, TlsSocket)
        return "python" if sock.native is None else "native"

    return asyncio.run(connect())


def test_refused_broker_has_the_same_reason(
    authority: Authority, server: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, expired = authority.sign("old", days=-1), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    expired.load_cert_chain(old.certificate, old.key)
    old_version = listen(server)
    old_version.maximum_version = ssl.TLSVersion.TLSv1_2
    cases: list[tuple[ssl.SSLContext | None, UpstreamTls, str]] = [
        (expired, UpstreamTls(authority.file), "certificate has expired"),
        (listen(authority.sign("elsewhere", names="DNS:kafka-7")), UpstreamTls(authority.file), "for another name"),
        (listen(Authority(tmp_path / "others").sign("other")), UpstreamTls(authority.file), "not trusted"),
        (old_version, UpstreamTls(authority.file, min_version="1.3"), "no TLS version or cipher in common"),
        (None, UpstreamTls(authority.file), "does not speak TLS"),
        (listen(server), UpstreamTls(authority.file), "native"),
    ]
    for context, tls, stated in cases:
        with broker(context) as (address, _):
            native = outcome(tls, address)
            with monkeypatch.context() as patched:
                patched.setattr(Context, "set_native", lambda *_: None)
                python = outcome(tls, address)
        assert stated in native
        assert native == python or (native, python) == ("native", "python")


def test_openssl_accepts_what_rustls_refuses(tmp_path: Path) -> None:
    # Given: a broker whose certificate is that of an authority, as `openssl req -x509` makes it.
    made = self_signed(tmp_path)
    tls, context = UpstreamTls(made.certificate), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with broker(context) as (address, accepted):

        async def connect_twice() -> None:
            connecting = upstreams(tls, address)
            assert connecting._certificates.upstream is not None
            assert connecting._certificates.upstream.native is not None
            for _ in range(2):
                sock, _ = await connecting.probe(None)
                assert isinstance(sock, TlsSocket)
                assert sock.native is None
                sock.close()

        asyncio.run(connect_twice())
    # Then: only the first connection was tried by rustls.
    assert len(accepted) == 3


def test_an_intermediate_authority_alone_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Authority(tmp_path / "root")
    intermediate = root.authority("intermediate")
    context = listener_context(ListenTls((made := intermediate.sign("server")).certificate, made.key))
    with broker(context) as (address, _):
        native = outcome(UpstreamTls(intermediate.file), address)
        monkeypatch.setattr(Context, "set_native", lambda *_: None)
        assert outcome(UpstreamTls(intermediate.file), address) == native
    assert "not trusted" in native


def test_authority_that_expires_is_not_trusted(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    context = upstream_context(UpstreamTls(authority.file))
    assert context.native is not None
    (root,) = context.get_ca_certs()
    end = ssl.cert_time_to_seconds(str(root["notAfter"]))
    monkeypatch.setattr(time, "time", lambda: end - 1)
    assert context.native is not None
    monkeypatch.setattr(time, "time", lambda: end + 1)
    assert context.native is None
    assert context.why_python == "no trusted certificates"


def test_client_that_rustls_refuses_is_served_by_openssl(authority: Authority, server: Certificate) -> None:
    # Given: a client whose only elliptic curve rustls does not have.
    near, far = tcp_pair()
    client = trusting(authority)
    client.set_ecdh_curve("secp521r1")
    received = []

    def talk() -> None:
        with client.wrap_socket(far, server_hostname="localhost") as secured:
            secured.sendall(b"question")
            received.append(secured.recv(100))

    async def serve() -> None:
        sock = tls_socket(near, listen(server), TlsBuffers())
        assert sock.native is not None
        await secure(sock)
        assert sock.native is None
        buffer = memoryview(bytearray(256 * 1024))
        while True:
            try:
                count = sock.recv_into(buffer)
                break
            except BlockingIOError:
                await asyncio.sleep(0.01)
        sock.send(bytes(buffer[:count]).upper())
        sock.close()

    with peer(talk):
        asyncio.run(serve())
    assert received == [b"QUESTION"]


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(
            lambda it: listener_context(ListenTls(it.locked.certificate, it.locked.key, it.password)), id="key"
        ),
        pytest.param(lambda it: upstream_context(UpstreamTls(it.file, check_hostname=False)), id="hostname"),
        pytest.param(lambda it: upstream_context(UpstreamTls(it.server.certificate)), id="no authority"),
    ],
)
def test_settings_that_need_openssl_get_it(
    authority: Authority, server: Certificate, tmp_path: Path, made: Callable[[object], Context]
) -> None:
    class Files:
        file, locked = authority.file, authority.sign("locked", password="right")
        password = tmp_path / "password"

    Files.server = server  # type: ignore[attr-defined]
    Files.password.write_text("right\n")
    context = made(Files)
    assert context.native is None
    assert context.why_python
