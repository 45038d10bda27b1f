"""A TLS socket behaves as a plain one: against Python's implementation, over real sockets, in any pieces."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fencepost_proxy.cluster.tls_failures import NotTls, of_broker
from fencepost_proxy.config import ListenTls, UpstreamTls
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.executor import EXECUTOR
from fencepost_proxy.transport import certificates
from fencepost_proxy.transport.certificates import listener_context, upstream_context
from fencepost_proxy.transport.native_tls import Context, tls_socket
from fencepost_proxy.transport.tls import TlsBuffers, TlsSocket, Unused, of_client, secure
from tests.support.certificates import Authority, Certificate

WAIT_SECONDS = 60.0
T = TypeVar("T")
_KEY_UPDATE = 24  # RFC 8446, 4.6.3
CLOSED_EARLY = (ssl.SSLError, ConnectionError)


@pytest.fixture(params=["native", "python"], autouse=True)
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What encrypts: every test is for both."""
    if request.param == "python":
        monkeypatch.setattr(Context, "set_native", lambda *_: None)
    elif EXECUTOR.module is None:
        pytest.skip(EXECUTOR.why_python)
    return str(request.param)


@pytest.fixture
def in_python(executor: str) -> None:
    if executor == "native":
        pytest.skip("concerns OpenSSL alone")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Certificate:
    return authority.sign("server")


def listen(server: Certificate, **more: object) -> Context:
    return listener_context(ListenTls(server.certificate, server.key, **more))  # type: ignore[arg-type]


def trusting(authority: Authority, **more: object) -> Context:
    return upstream_context(UpstreamTls(authority.file, **more))  # type: ignore[arg-type]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """As the kernel's own sockets are: with small buffers, so that writes are taken in part."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        near.connect(listening.getsockname())
        far, _ = listening.accept()
    far.settimeout(WAIT_SECONDS)
    return near, far


@contextmanager
def peer(work: Callable[[], object]) -> Iterator[None]:
    """Runs in a thread, and raises nothing."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert raised == []


async def _until(sock: TlsSocket, work: Callable[[], int], *, to_write: bool = False) -> int:
    """The result of `work` once the socket is ready."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return work()
        except BlockingIOError:
            ready = asyncio.Event()
            (loop.add_writer if to_write else loop.add_reader)(sock.fileno(), ready.set)
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await ready.wait()
            finally:
                (loop.remove_writer if to_write else loop.remove_reader)(sock.fileno())


async def send_all(sock: TlsSocket, data: bytes, rng: random.Random) -> None:
    """In pieces that are cut again when one was taken in part, as the product does."""
    rest = memoryview(data)
    while rest:
        piece = rest[: rng.choice((1, 7, 100, 5_000, 200_000))]
        chunks: list[bytes | memoryview] = [piece[:3], piece[3:]]
        taken = await _until(sock, lambda chunks=chunks: sock.sendmsg(chunks), to_write=True)  # type: ignore[misc]
        assert 0 < taken <= len(piece)
        rest = rest[taken:]


async def receive(sock: TlsSocket, size: int) -> bytes:
    buffer = memoryview(bytearray(256 * 1024))
    received = bytearray()
    while len(received) < size:
        count = await _until(sock, lambda: sock.recv_into(buffer))
        if not count:
            break
        received += buffer[:count]
    return bytes(received)


def empty(buffers: TlsBuffers) -> bool:
    return not buffers.incoming.pending and not buffers.outgoing.pending


def conversation(
    authority: Authority,
    server: Certificate,
    *,
    client: Callable[[ssl.SSLSocket], object],
    serve: Callable[[TlsSocket], Awaitable[T]],
    buffers: TlsBuffers | None = None,
) -> T:
    """`client` has Python's own socket, in a thread; `serve` has ours. Both are closed at the end."""
    near, far = tcp_pair()

    def talk() -> None:
        with trusting(authority).wrap_socket(far, server_hostname="localhost", suppress_ragged_eofs=False) as secured:
            client(secured)

    async def serve_secured() -> T:
        sock = tls_socket(near, listen(server), buffers or TlsBuffers())
        await secure(sock)
        try:
            return await serve(sock)
        finally:
            sock.close()

    with peer(talk):
        return asyncio.run(serve_secured())


class Records:
    """A TLS client that sends its records when the test says so."""

    def __init__(self, context: ssl.SSLContext, far: socket.socket) -> None:
        self._far, self._incoming, self.outgoing = far, ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self.outgoing, server_hostname="localhost")

    def shake_hands(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.send()
                self._incoming.write(self._far.recv(100_000))
        self.send()

    def send(self) -> None:
        self._far.sendall(self.outgoing.read())


@pytest.mark.parametrize("min_version", ["1.2", "1.3"])
@pytest.mark.parametrize("as_server", [True, False])
def test_bytes_arrive_as_they_were_sent(
    authority: Authority, server: Certificate, min_version: str, as_server: bool, executor: str
) -> None:
    # Given: one end is ours, the other is Python's own.
    seed = 1
    data = random.Random(seed).randbytes(3_000_000)
    near, far = tcp_pair()
    buffers = TlsBuffers()
    theirs = trusting(authority) if as_server else listen(server)
    if min_version == "1.2":
        theirs.maximum_version = ssl.TLSVersion.TLSv1_2
    ours = listen(server) if as_server else trusting(authority)
    echoed, key_updates = bytearray(), Counter[str]()

    def observe(_: object, direction: str, *message: Any) -> None:
        key_updates[direction] += message[2] == _KEY_UPDATE

    theirs._msg_callback = observe  # type: ignore[attr-defined]

    def echo() -> None:
        with theirs.wrap_socket(
            far, server_side=not as_server, server_hostname="localhost" if as_server else None
        ) as secured:
            while len(echoed) < len(data):
                echoed.extend(secured.recv(100_000))
            secured.sendall(bytes(echoed))

    async def talk() -> bytes:
        sock = tls_socket(near, ours, buffers, None if as_server else "localhost")
        await secure(sock)
        assert (sock.native is not None) == (executor == "native")
        if sock.native is not None and min_version == "1.3":
            sock.native.key_bytes_max = len(data) // 10
        if sock.native is None:
            assert sock._ssl.version() == f"TLSv{min_version}"
        else:
            assert sock.native.is_tls13 == (min_version == "1.3")
        await send_all(sock, data, random.Random(seed))
        answer = await receive(sock, len(data))
        assert empty(buffers)
        assert sock.unread_bytes() in (0, 2)  # an alert that ends the session, in TLS 1.3
        sock.close()
        return answer

    with peer(echo):
        answer = asyncio.run(talk())
    assert bytes(echoed) == data
    assert answer == data
    if executor == "native" and min_version == "1.3":
        assert 9 <= key_updates["read"] <= 30
    else:
        assert not key_updates["read"]


def test_several_connections_share_what_is_empty_between_calls(authority: Authority, server: Certificate) -> None:
    # Given: five connections to one process, whose records are sent and received in no order.
    buffers, context = TlsBuffers(), listen(server)
    pairs = [tcp_pair() for _ in range(5)]
    stated = [f"client {number} ".encode() * 3_000 for number in range(5)]
    last_observed: list[bytes] = [b""] * 5

    def client(number: int) -> Callable[[], None]:
        def talk() -> None:
            with trusting(authority).wrap_socket(pairs[number][1], server_hostname="localhost") as secured:
                for at in range(0, len(stated[number]), 1_000):
                    secured.sendall(stated[number][at : at + 1_000])
                while len(last_observed[number]) < len(stated[number]):
                    last_observed[number] += secured.recv(100_000)

        return talk

    async def serve(number: int) -> None:
        sock = tls_socket(pairs[number][0], context, buffers)
        await secure(sock)
        received = await receive(sock, len(stated[number]))
        await send_all(sock, received, random.Random(number))
        sock.close()

    async def serve_all() -> None:
        await asyncio.gather(*(serve(number) for number in range(5)))

    with peer(client(0)), peer(client(1)), peer(client(2)), peer(client(3)), peer(client(4)):
        asyncio.run(serve_all())
    assert last_observed == stated
    assert empty(buffers)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_unread_bytes_equal_what_the_peer_sent(
    authority: Authority, server: Certificate, version: ssl.TLSVersion
) -> None:
    # Given: a client that has sent three requests, and one half of a fourth record.
    near, far = tcp_pair()
    context = trusting(authority)
    context.maximum_version = version
    client = Records(context, far)
    sent, read_first = threading.Event(), threading.Event()

    def talk() -> None:
        client.shake_hands()
        client.tls.write(b"a" * 1_000)
        client.send()
        assert read_first.wait(WAIT_SECONDS)
        for size in (10, 500, 3_000):
            client.tls.write(b"b" * size)
        whole = client.outgoing.read()
        client.tls.write(b"c" * 200)
        far.sendall(whole + client.outgoing.read()[:50])
        sent.set()

    async def count() -> None:
        sock = tls_socket(near, listen(server), TlsBuffers())
        await secure(sock)
        assert await receive(sock, 1_000) == b"a" * 1_000
        assert sock.unread_bytes() == 0
        read_first.set()
        while not sent.is_set() or sock.unread_bytes() < 3_710:  # noqa: ASYNC110 - a socket has no event
            await asyncio.sleep(0.01)
        assert sock.unread_bytes() == 10 + 500 + 3_000 + 200  # the last of them is not whole, but has been sent
        assert await receive(sock, 3_510) == b"b" * 3_510
        assert sock.unread_bytes() == 200
        sock.close()

    with peer(talk):
        asyncio.run(count())
    far.close()


def test_close_arriving_with_last_bytes_is_noticed(authority: Authority, server: Certificate) -> None:
    """The peer waits for our close and sends nothing more, so that no later event of the socket reports its close."""
    near, far = tcp_pair()
    client = Records(trusting(authority), far)

    def talk() -> None:
        client.shake_hands()
        client.tls.write(b"last words")
        with suppress(ssl.SSLError):
            client.tls.unwrap()
        client.send()

    async def serve() -> None:
        sock = tls_socket(near, listen(server), TlsBuffers())
        await secure(sock)
        assert await receive(sock, 10) == b"last words"
        ready = asyncio.Event()
        asyncio.get_running_loop().add_reader(sock.fileno(), ready.set)
        async with asyncio.timeout(WAIT_SECONDS):
            await ready.wait()
        asyncio.get_running_loop().remove_reader(sock.fileno())
        assert sock.recv_into(memoryview(bytearray(256 * 1024))) == 0
        sock.close()

    with peer(talk):
        asyncio.run(serve())
    far.close()


def test_close_is_signalled_to_the_peer(authority: Authority, server: Certificate) -> None:
    received = []

    def client(secured: ssl.SSLSocket) -> None:
        received.append(secured.recv(100))
        received.append(secured.recv(100))  # raises if the connection ends without a close message

    async def serve(sock: TlsSocket) -> None:
        sock.send(b"last words")

    conversation(authority, server, client=client, serve=serve)
    assert received == [b"last words", b""]


def test_half_closed_socket_still_receives(authority: Authority, server: Certificate) -> None:
    """`hang_up` does this: its peer gets the last response and the close, and may still be sending."""
    received = []

    def client(secured: ssl.SSLSocket) -> None:
        secured.sendall(b"a question")
        received.append(secured.recv(100))
        secured.sendall(b"another one")
        received.append(secured.recv(100))

    async def serve(sock: TlsSocket) -> bytes:
        assert await receive(sock, 10) == b"a question"
        sock.send(b"the last answer")
        sock.shutdown(socket.SHUT_WR)
        return await receive(sock, 100)

    assert conversation(authority, server, client=client, serve=serve) == b"another one"
    assert received == [b"the last answer", b""]


# --- handshakes that come to nothing ----------------------------------------------------------------------------------


def fails(ours: ssl.SSLContext, name: str | None, talk: Callable[[socket.socket], object]) -> OSError:
    """The error of our end."""
    near, far = tcp_pair()
    buffers = TlsBuffers()

    async def try_it() -> OSError:
        sock = tls_socket(near, ours, buffers, name)
        try:
            await secure(sock)
            await receive(sock, 1)  # with TLS 1.3 a client's handshake ends before its certificate is checked
        except OSError as error:
            return error
        finally:
            sock.close()
        raise AssertionError("it succeeded")

    def run() -> None:
        with suppress(*CLOSED_EARLY), far:
            talk(far)

    with peer(run):
        error = asyncio.run(try_it())
    assert empty(buffers)
    return error


def as_client(context: ssl.SSLContext) -> Callable[[socket.socket], object]:
    def talk(far: socket.socket) -> None:
        with context.wrap_socket(far, server_hostname="localhost") as secured:
            secured.recv(1)

    return talk


def as_server(context: ssl.SSLContext) -> Callable[[socket.socket], object]:
    def talk(far: socket.socket) -> None:
        with context.wrap_socket(far, server_side=True) as secured:
            secured.recv(1)

    return talk


API_VERSIONS_REQUEST = bytes.fromhex("0000001a001200030000000000036b637400056b636174063200000000")


@pytest.mark.parametrize("first", [API_VERSIONS_REQUEST, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x05\x01\x00\x05hello"])
def test_a_client_that_does_not_speak_tls(server: Certificate, first: bytes) -> None:
    error = fails(listen(server), None, lambda far: far.sendall(first))
    assert isinstance(error, NotTls)
    kind, words = of_client(error)
    assert kind == "not_tls"
    assert "security.protocol=SSL" in words


def test_clients_certificates(authority: Authority, server: Certificate, tmp_path: Path) -> None:
    # Given: listeners that request certificates of one authority.
    other = Authority(tmp_path / "untrusted").sign("mallory")
    friend, old = authority.sign("friend"), authority.sign("old", days=-1)
    required = listen(server, client_certificates="required", client_ca_file=authority.file)
    optional = listen(server, client_certificates="optional", client_ca_file=authority.file)

    def showing(certificate: Certificate | None) -> Callable[[socket.socket], object]:
        context = trusting(authority)
        if certificate is not None:
            context.load_cert_chain(certificate.certificate, certificate.key)
        return as_client(context)

    # Then: no certificate, an untrusted one and an expired one have different reasons.
    assert of_client(fails(required, None, showing(None)))[0] == "no_certificate"
    for context in (required, optional):
        assert of_client(fails(context, None, showing(other)))[0] == "untrusted"
        kind, words = of_client(fails(context, None, showing(old)))
        assert (kind, "expired" in words) == ("untrusted", True)
    # And: authorized clients are accepted.
    for context, certificate in ((required, friend), (optional, friend), (optional, None)):
        near, far = tcp_pair()

        async def greet(near: socket.socket = near, context: ssl.SSLContext = context) -> None:
            sock = tls_socket(near, context, TlsBuffers())
            await secure(sock)
            sock.send(b"!")
            sock.close()

        with peer(lambda far=far, certificate=certificate: showing(certificate)(far)):  # type: ignore[misc]
            asyncio.run(greet())
        far.close()


def test_other_reasons_of_clients(authority: Authority, server: Certificate, tmp_path: Path) -> None:
    kind, words = of_client(fails(listen(server), None, as_client(trusting(Authority(tmp_path / "other")))))
    assert (kind, "unknown ca" in words) == ("distrusted", True)
    old = trusting(authority)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert of_client(fails(listen(server, min_version="1.3"), None, as_client(old)))[0] == "no_common"
    cut_off = fails(listen(server), None, lambda far: far.sendall(b"\x16\x03\x01"))
    assert of_client(cut_off)[0] == "left"
    # A port check is no failed handshake.
    assert not isinstance(cut_off, Unused)
    assert isinstance(fails(listen(server), None, lambda far: None), Unused)


@pytest.mark.usefixtures("in_python")
def test_untrusted_broker_is_classified_by_cause(authority: Authority, server: Certificate, tmp_path: Path) -> None:
    elsewhere = authority.sign("elsewhere", names="DNS:kafka-7.example.com")
    others = Authority(tmp_path / "others").sign("untrusted")

    kind, words, _ = of_broker(fails(trusting(authority), "localhost", as_server(listen(elsewhere))))
    assert (kind, "localhost" in words, "check_hostname" in words) == ("hostname_mismatch", True, True)
    kind, words, _ = of_broker(fails(trusting(authority), "127.0.0.1", as_server(listen(elsewhere))))
    assert kind == "hostname_mismatch"
    kind, words, _ = of_broker(fails(trusting(authority), "localhost", as_server(listen(others))))
    assert (kind, "ca_file" in words) == ("untrusted", True)
    # An expired one.
    old, expired = authority.sign("old", days=-1), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    expired.load_cert_chain(old.certificate, old.key)
    assert of_broker(fails(trusting(authority), "localhost", as_server(expired)))[:2] == (
        "untrusted",
        "its certificate is not valid now: certificate has expired",
    )
    # Without a check of the host name, the signature is still checked.
    careless = trusting(authority, check_hostname=False)
    assert of_broker(fails(careless, "localhost", as_server(listen(others))))[0] == "untrusted"
    # A server without TLS.
    assert of_broker(fails(trusting(authority), "localhost", lambda far: far.sendall(bytes(8))))[0] == "not_tls"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_broker_that_refuses_the_proxys_certificate_is_classified(
    authority: Authority, server: Certificate, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    strict = listen(server, client_certificates="required", client_ca_file=authority.file)
    strict.maximum_version = version
    kind = of_broker(fails(trusting(authority), "localhost", as_server(strict)))[0]
    assert kind == ("no_common" if version == ssl.TLSVersion.TLSv1_2 else "certificate_required")
    # One whose intermediate authority is missing in its file.
    made = Authority(tmp_path / "root").authority("intermediate").sign("proxy")
    shown = trusting(authority, certificate_file=made.certificate, key_file=made.key)
    assert of_broker(fails(shown, "localhost", as_server(strict)))[0] == "distrusted"


@pytest.mark.parametrize(("host", "sent"), [("localhost", "localhost"), ("127.0.0.1", None)])
def test_broker_receives_server_name_only_for_host_names(
    authority: Authority, server: Certificate, host: str, sent: str | None
) -> None:
    context = listen(server)
    queried: list[str | None] = []
    context.sni_callback = lambda sock, name, _: queried.append(name) or ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
    fails(trusting(authority), host, as_server(context))
    assert queried == [sent]


def test_unfinished_handshake_blocks_no_other_connection(authority: Authority, server: Certificate) -> None:
    # Given: a client that sends a byte now and then.
    slow_near, slow_far = tcp_pair()
    buffers, context = TlsBuffers(), listen(server)
    slow_far.sendall(b"\x16\x03\x01\x02\x00\x01")
    near, far = tcp_pair()

    async def serve() -> bytes:
        slow = tls_socket(slow_near, context, buffers)
        waiting = asyncio.ensure_future(secure(slow))
        sock = tls_socket(near, context, buffers)
        await secure(sock)
        words = await receive(sock, 5)
        assert not waiting.done()
        waiting.cancel()
        slow.close()
        sock.close()
        return words

    def talk() -> None:
        with trusting(authority).wrap_socket(far, server_hostname="localhost") as secured:
            secured.sendall(b"hello")
            secured.recv(1)

    with peer(talk):
        assert asyncio.run(serve()) == b"hello"
    slow_far.close()


def test_altered_record_ends_the_connection(authority: Authority, server: Certificate) -> None:
    buffers = TlsBuffers()

    def client(secured: ssl.SSLSocket) -> None:
        with socket.socket(fileno=secured.detach()) as raw:
            raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))

    async def serve(sock: TlsSocket) -> None:
        with pytest.raises(ssl.SSLError):
            await receive(sock, 1)

    conversation(authority, server, client=client, serve=serve, buffers=buffers)
    assert empty(buffers)


@pytest.mark.usefixtures("in_python")
def test_peer_ignoring_openssl_responses_is_closed(authority: Authority, server: Certificate) -> None:
    buffers = TlsBuffers()
    done = threading.Event()

    def client(secured: ssl.SSLSocket) -> None:
        with suppress(OSError):
            while not done.is_set():
                secured.sendall(b"again")
                time.sleep(0.001)

    async def serve(sock: TlsSocket) -> None:
        async def answer() -> None:
            while True:
                # OpenSSL writes this much if, say, its peer begins one handshake after another.
                buffers.outgoing.write(bytes(16_384))
                await receive(sock, 5)

        async with asyncio.timeout(WAIT_SECONDS):
            with pytest.raises(ConnectionAbortedError, match="does not read TLS responses"):
                await answer()
        assert len(sock._unflushed) < 512 * 1024
        done.set()

    conversation(authority, server, client=client, serve=serve, buffers=buffers)


# --- files ------------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_used_are_named(
    authority: Authority, server: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, old = authority.sign("other"), authority.sign("old", days=-1)
    locked = authority.sign("locked", password="right")
    (password := tmp_path / "password").write_text("right\n")
    (wrong := tmp_path / "wrong").write_text("wrong\n")
    (nothing := tmp_path / "nothing.pem").write_text("nothing\n")
    for tls, stated in (
        (ListenTls(tmp_path / "absent"), "listen_tls.certificate_file: .*absent cannot be read: No such file"),
        (ListenTls(server.certificate), "listen_tls.key_file: no PEM private key is in .*server.pem"),
        (ListenTls(nothing), "listen_tls.certificate_file: no PEM certificate is in .*nothing.pem"),
        (ListenTls(server.certificate, other.key), "listen_tls.key_file: the key in .*other.key is not that of"),
        (ListenTls(old.certificate, old.key), "listen_tls.certificate_file: .*old.pem expired on 20"),
        (ListenTls(locked.certificate, locked.key), "listen_tls.key_password_file: the key in .* is encrypted"),
        (ListenTls(locked.certificate, locked.key, wrong), "listen_tls.key_password_file: not the password"),
        (
            ListenTls(server.certificate, server.key, None, "required", nothing),
            "listen_tls.client_ca_file: no PEM certificate is in .*nothing.pem",
        ),
    ):
        with pytest.raises(ConfigError, match=stated) as refused:
            listener_context(tls)
        assert "right" not in str(refused.value)
        assert "wrong\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"upstream_tls\.ca_file: no PEM certificate is in .*nothing\.pem"):
        upstream_context(UpstreamTls(nothing))
    monkeypatch.setattr(certificates, "not_before", lambda _: time.time() + 3_600)
    with pytest.raises(ConfigError, match=r"listen_tls\.certificate_file: .*server\.pem is not valid before 20"):
        listener_context(ListenTls(server.certificate, server.key))
    monkeypatch.undo()
    listener_context(ListenTls(locked.certificate, locked.key, password))
    listener_context(ListenTls(server.both))
