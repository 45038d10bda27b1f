"""Certificates of clients: native code accepts and refuses what OpenSSL does, with the same reason and alert."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tlslite.api import HandshakeSettings, TLSConnection, X509CertChain, parsePEMKey
from tlslite.errors import TLSError

from fencepost_proxy.config import ListenTls
from fencepost_proxy.executor import EXECUTOR
from fencepost_proxy.transport import client_certificates
from fencepost_proxy.transport.certificates import listener_context
from fencepost_proxy.transport.client_certificates import ClientCertificates
from fencepost_proxy.transport.native_tls import Context, NativeTlsSocket, tls_socket
from fencepost_proxy.transport.tls import TlsBuffers, TlsSocket, of_client, secure
from tests.protocol.test_tls_socket import WAIT_SECONDS, authority, peer, receive, server, tcp_pair
from tests.support.certificates import Authority, Certificate, self_signed

__all__ = ["authority", "server"]  # fixtures
pytestmark = pytest.mark.skipif(EXECUTOR.module is None, reason=EXECUTOR.why_python)

VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]
EC = {name: ["ec", "-pkeyopt", f"ec_paramgen_curve:{name}"] for name in ("P-256", "P-384", "P-521")}


@dataclass(frozen=True)
class Outcome:
    """`refused`: as in the log, or None. `alert`: what the client got, or None."""

    refused: tuple[str, str] | None
    alert: str | None


@pytest.fixture
def listening(authority: Authority, server: Certificate, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Context]:
    def make(mode: str = "required", *, native: bool = True) -> Context:
        with monkeypatch.context() as patched:
            if not native:
                patched.setattr(Context, "set_native", lambda *_: None)
            tls = ListenTls(server.certificate, server.key, None, mode, authority.file)  # type: ignore[arg-type]
            made = listener_context(tls)
        assert (made.native is not None) is native
        return made

    return make


def connect(context: Context, talk: Callable[[socket.socket], str | None]) -> tuple[Outcome, TlsSocket]:
    """`talk` returns the alert that the client got."""
    near, far = tcp_pair()
    sock = tls_socket(near, context, TlsBuffers())
    alerts: list[str | None] = []

    async def serve() -> tuple[str, str] | None:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await secure(sock)
                sock.send(b"!")
                assert await receive(sock, 1) in (b"", b"?")
        except OSError as error:
            return of_client(error)
        finally:
            sock.close()
        return None

    def run() -> None:
        with far:
            alerts.append(talk(far))

    with peer(run):
        refused = asyncio.run(serve())
    return Outcome(refused, alerts[0]), sock


def client(certificate: Certificate | None, version: ssl.TLSVersion) -> Callable[[socket.socket], str | None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = version
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    if certificate is not None:
        context.load_cert_chain(certificate.certificate, certificate.key)

    def talk(far: socket.socket) -> str | None:
        try:
            with context.wrap_socket(far) as secured:
                assert secured.recv(1) == b"!"
        except ssl.SSLError as error:
            return error.reason
        except OSError:
            return "closed"
        return None

    return talk


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def sign(
    authority: Authority,
    directory: Path,
    *,
    key: list[str] = EC["P-256"],
    extensions: str | None = "basicConstraints=CA:FALSE",
    more: tuple[str, ...] = ("-days", "20"),
) -> Certificate:
    """`extensions` – None: a certificate of version 1."""
    directory.mkdir()
    made = Certificate(*(directory / name for name in ("client.pem", "client.key", "both.pem")))
    request = directory / "client.csr"
    openssl("req", "-new", "-nodes", "-newkey", *key, "-subj", "/CN=client", "-keyout", made.key, "-out", request)
    own = []
    if extensions is not None:
        (file := directory / "client.ext").write_text(extensions + "\n")
        own = ["-extfile", file]
    signer = ["-CA", authority.file, "-CAkey", authority._key, "-CAcreateserial"]
    openssl("x509", "-req", "-in", request, *signer, *more, *own, "-out", made.certificate)
    return made


@pytest.fixture(scope="module")
def clients(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate | None]:
    at = tmp_path_factory.mktemp("clients")
    (here := at / "self").mkdir()
    intermediate = authority.authority("between")
    through = intermediate.sign("through")
    both = at / "chain.pem"
    both.write_text(through.certificate.read_text() + intermediate.file.read_text())

    def usage(extension: str) -> Certificate:
        return sign(authority, at / extension.replace("=", "-"), extensions=extension)

    return {
        "none": None,
        "right": authority.sign("right"),
        "expired": authority.sign("old", days=-1),
        "untrusted": Authority(at / "others").sign("mallory"),
        "of an authority with the same name": Authority(at / "impostor").sign("impostor"),
        "its own authority": self_signed(here),
        "the authority's own": Certificate(authority.file, authority._key, authority.file),
        "for servers": usage("extendedKeyUsage=serverAuth"),
        "for clients": usage("extendedKeyUsage=clientAuth"),
        "for encryption": usage("keyUsage=keyEncipherment"),
        "for signatures": usage("keyUsage=digitalSignature"),
        "unknown critical extension": usage("1.2.3.4=critical,DER:0500"),
        "version 1": sign(authority, at / "v1", extensions=None),
        "intermediate authority": Certificate(both, through.key, both),
        "without its intermediate authority": through,
        "signed with SHA-1": sign(authority, at / "sha1", more=("-days", "20", "-sha1")),
        "P-384": sign(authority, at / "p384", key=EC["P-384"]),
        "P-521": sign(authority, at / "p521", key=EC["P-521"]),
        "RSA": sign(authority, at / "rsa", key=["rsa:2048"]),
        "RSA 1024": sign(authority, at / "rsa1024", key=["rsa:1024"]),
        "Ed25519": sign(authority, at / "ed25519", key=["ed25519"]),
    }


ACCEPTED = {
    *("right", "for clients", "for signatures", "version 1", "intermediate authority"),
    *("P-384", "P-521", "RSA", "Ed25519"),
}


@pytest.mark.parametrize("mode", ["required", "optional"])
@pytest.mark.parametrize("version", VERSIONS)
def test_openssl_and_native_code_decide_alike(
    clients: dict[str, Certificate | None], listening: Callable[..., Context], mode: str, version: ssl.TLSVersion
) -> None:
    accepted = ACCEPTED | ({"none"} if mode == "optional" else set())
    for name, certificate in clients.items():
        observed = []
        for native in (True, False):
            context = listening(mode, native=native)
            outcome, sock = connect(context, client(certificate, version))
            assert isinstance(sock, NativeTlsSocket) is native
            assert not native or sock.native is not None
            observed.append(outcome)
        assert (observed[0].refused is None) is (name in accepted), (name, observed)
        if name == "none" and version == ssl.TLSVersion.TLSv1_2:
            assert observed[0].refused == observed[1].refused  # the alert is that of TLS 1.3
        else:
            assert observed[0] == observed[1], name


@pytest.mark.parametrize("version", [(3, 3), (3, 4)])
@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ["right", "version 1"])
def test_certificate_without_its_key_is_refused(
    clients: dict[str, Certificate | None],
    listening: Callable[..., Context],
    name: str,
    native: bool,
    version: tuple[int, int],
) -> None:
    right, other = clients[name], clients["for clients"]
    assert right is not None
    assert other is not None
    settings = HandshakeSettings()
    settings.minVersion = settings.maxVersion = version
    settings.certificate_compression_send = []

    def holding(key: Path) -> Callable[[socket.socket], str | None]:
        shown = X509CertChain()
        shown.parsePemList(right.certificate.read_text())

        def talk(far: socket.socket) -> str | None:
            connection = TLSConnection(far)
            try:
                connection.handshakeClientCert(shown, parsePEMKey(key.read_text(), private=True), settings=settings)
                assert connection.recv(1) == b"!"
            except (TLSError, OSError) as error:
                return type(error).__name__
            connection.close()
            return None

        return talk

    context = listening(native=native)
    outcome, sock = connect(context, holding(right.key))
    assert (sock.native is not None) is native
    assert outcome == Outcome(None, None)
    outcome, sock = connect(context, holding(other.key))
    assert (sock.native is not None) is native
    assert outcome.refused is not None
    assert outcome.alert is not None


@pytest.mark.parametrize("version", VERSIONS)
def test_client_with_an_unsupported_key_is_left_to_openssl(
    authority: Authority, listening: Callable[..., Context], tmp_path: Path, version: ssl.TLSVersion
) -> None:
    certificate = sign(authority, tmp_path / "ed448", key=["ed448"])
    context = listening()
    first, sock = connect(context, client(certificate, version))
    assert first.refused is not None
    again, sock = connect(context, client(certificate, version))
    assert (again, sock.native) == (Outcome(None, None), None)


def test_refused_certificate_leaves_native_code_in_use(
    clients: dict[str, Certificate | None], listening: Callable[..., Context]
) -> None:
    context = listening()
    for name in ("expired", "untrusted", "right"):
        outcome, sock = connect(context, client(clients[name], ssl.TLSVersion.TLSv1_3))
        assert sock.native is not None
    assert outcome.refused is None


@pytest.mark.parametrize("version", VERSIONS)
def test_session_with_a_certificate_is_not_resumed(
    clients: dict[str, Certificate | None], listening: Callable[..., Context], version: ssl.TLSVersion
) -> None:
    context, right = listening(), clients["right"]
    assert right is not None
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ours.check_hostname, ours.verify_mode = False, ssl.CERT_NONE
    ours.maximum_version = version
    ours.load_cert_chain(right.certificate, right.key)
    sessions: list[ssl.SSLSession | None] = [None]

    def talk(far: socket.socket) -> str | None:
        with ours.wrap_socket(far, session=sessions[-1]) as secured:
            assert secured.recv(1) == b"!"
            assert not secured.session_reused
            sessions.append(secured.session)
        return None

    for _ in range(2):
        assert connect(context, talk)[0] == Outcome(None, None)


def test_addresses_left_to_openssl_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(client_certificates.time, "monotonic", lambda: now[0])
    clients = ClientCertificates(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    for number in range(1_001):
        clients.leave_to_openssl(str(number))
    assert [clients.needs_openssl(each) for each in ("0", "1", "1000", "1001")] == [False, True, True, False]
    now[0] += 3_600.0
    assert not clients.needs_openssl("1000")
