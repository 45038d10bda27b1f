"""TLS contexts of listeners and broker connections, from certificate and key files.

Certificates are renewed without a restart: `probe` finds changed files and reloads them. If a reload fails, the old
context stays in use. Existing connections keep their context.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from os import stat_result
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fencepost_proxy import logs
from fencepost_proxy.config import ListenTls, TlsVersion, UpstreamTls
from fencepost_proxy.config.client_properties import CertificatesIn, JavaStore
from fencepost_proxy.config.secrets import secret
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.transport.client_certificates import ClientCertificates
from fencepost_proxy.transport.native_tls import Context

if TYPE_CHECKING:
    from fencepost_native import TlsContext

_log = logs.get("transport.certificates")

_VERSIONS: Final = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
#: TLS 1.2 ciphers with forward secrecy and authenticated encryption. TLS 1.3 has no others.
_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"
_MODES: Final = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}
#: How often files are checked for changes.
_PROBE_SECONDS: Final = 5.0
_SOON_SECONDS: Final = 14 * 86_400.0
_DAY_SECONDS: Final = 86_400.0

#: A certificate that was issued just now may begin in the future by this machine's clock.
_CLOCKS_DIFFER_SECONDS: Final = 300.0
EXPIRED, NOT_YET = "expired", "is not valid"

LISTENER: Final = "listener"
UPSTREAM: Final = "upstream"


def listener_context(tls: ListenTls) -> Context:
    """Raises `ConfigError` with the config key and the file."""
    context = _listening(tls)
    if tls.client_certificates != "none":
        verifying = _listening(replace(tls, min_version="1.2"))
        verifying.maximum_version = ssl.TLSVersion.TLSv1_2
        context.clients = ClientCertificates(verifying)
    clients = None if context.clients is None else (tls.client_certificates == "required", context.clients.verify)

    def native(made: type[TlsContext]) -> tuple[TlsContext, float]:
        return made.listener(*_identity_pem(tls.certificate_file, tls.key_file), tls.min_version, clients), float("inf")

    context.set_native(native)
    return context


def _listening(tls: ListenTls) -> Context:
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls.min_version)
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    _load_own(context, "listen_tls", tls.certificate_file, tls.key_file, tls.key_password_file)
    if tls.client_ca_file is not None:
        _load_trusted(context, "listen_tls.client_ca_file", tls.client_ca_file)
    context.verify_mode = _MODES[tls.client_certificates]
    return context


def upstream_context(tls: UpstreamTls) -> Context:
    """Raises `ConfigError` with the config key and the file."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, tls.min_version)
    context.check_hostname = tls.check_hostname
    if tls.ca_file is None:
        context.load_default_certs()
    else:
        _load_trusted(context, "upstream_tls.ca_file", tls.ca_file)
    if tls.certificate_file is not None:
        _load_own(context, "upstream_tls", tls.certificate_file, tls.key_file, tls.key_password_file)

    def native(made: type[TlsContext]) -> tuple[TlsContext, float]:
        if not tls.check_hostname:
            raise ValueError("upstream_tls.check_hostname")
        roots, until, complete = _roots(context)
        if tls.certificate_file is not None and not complete:
            # OpenSSL would complete the proxy's own certificates with it.
            raise ValueError("upstream_tls.ca_file has an intermediate authority")
        identity = None if tls.certificate_file is None else _identity_pem(tls.certificate_file, tls.key_file)
        return made.upstream(roots, identity, tls.min_version), until

    context.set_native(native)
    return context


def _identity_pem(certificate: Path, key: Path | None) -> tuple[bytes, bytes]:
    with _as_pem(certificate) as file:
        pem = Path(file).read_bytes()
    return pem, pem if key is None else key.read_bytes()


def _roots(context: ssl.SSLContext) -> tuple[list[bytes], float, bool]:
    """What OpenSSL trusts alone, until when it does, and whether that is all. Native code does not check it again."""
    trusted, ends, now = [], [], time.time()
    known = context.get_ca_certs()
    for decoded, encoded in zip(known, context.get_ca_certs(binary_form=True), strict=True):
        begins, end = (ssl.cert_time_to_seconds(str(decoded[key])) for key in ("notBefore", "notAfter"))
        if decoded["subject"] == decoded["issuer"] and begins <= now < end:
            trusted.append(encoded)
            ends.append(float(end))
    return trusted, min(ends, default=float("inf")), all(each["subject"] == each["issuer"] for each in known)


def _context(protocol: int, min_version: TlsVersion) -> Context:
    context = Context(protocol)
    context.minimum_version = _VERSIONS[min_version]
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_ciphers(_CIPHERS)
    return context


def _load_own(
    context: ssl.SSLContext, table: str, certificate: Path, key: Path | None, password_file: Path | None
) -> None:
    for name, file in (("certificate_file", certificate), ("key_file", key)):
        if file is not None:
            _readable(f"{table}.{name}", file)

    def password() -> str:
        # Called for encrypted keys only. Without it OpenSSL would prompt on the terminal.
        if password_file is None:
            raise ConfigError(f"{table}.key_password_file: the key in {key or certificate} is encrypted")
        return secret(f"{table}.key_password_file", password_file)

    try:
        with _as_pem(certificate) as pem:
            context.load_cert_chain(pem, key, password)
    except ssl.SSLError as error:
        raise ConfigError(f"{table}.{_what_is_wrong(error, certificate, key)}") from error
    _require_valid(f"{table}.certificate_file", certificate)


def _require_valid(where: str, certificate: Path) -> None:
    """Peers refuse a certificate outside its validity: a start fails, and a reload keeps the one in use."""
    now, begins, ends = time.time(), not_before(certificate), not_after(certificate)
    if ends is not None and ends < now:
        raise ConfigError(f"{where}: {certificate} {EXPIRED} on {_date(ends)}")
    if begins is not None and begins > now + _CLOCKS_DIFFER_SECONDS:
        raise ConfigError(f"{where}: {certificate} {NOT_YET} before {_date(begins)}")


def _what_is_wrong(error: ssl.SSLError, certificate: Path, key: Path | None) -> str:
    """Find the reason, which OpenSSL often does not report."""
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"key_file: the key in {key or certificate} is not that of the certificate in {certificate}"
    if "-----BEGIN CERTIFICATE-----" not in certificate.read_text("ascii", "replace"):
        return f"certificate_file: no PEM certificate is in {certificate}"
    keys = (key or certificate).read_text("ascii", "replace")
    if "PRIVATE KEY-----" not in keys:
        return f"key_file: no PEM private key is in {key or certificate}"
    if "ENCRYPTED" in keys:
        return f"key_password_file: not the password of the key in {key or certificate}"
    return f"certificate_file: {certificate} cannot be used: {error.reason or error}"


def _load_trusted(context: ssl.SSLContext, where: str, file: Path) -> None:
    _readable(where, file)
    try:
        if isinstance(file, CertificatesIn):
            context.load_verify_locations(cadata=file.der())
        elif isinstance(file, JavaStore):
            context.load_verify_locations(cadata=file.pem())
        else:
            context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ConfigError(f"{where}: no PEM certificate is in {file}") from error


def _readable(where: str, file: Path) -> None:
    try:
        file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error.strerror}") from error


def not_after(certificate: Path) -> float | None:
    """Expiry in seconds since 1970; None if unknown."""
    return _seconds(certificate, "notAfter")


def not_before(certificate: Path) -> float | None:
    """Start of validity in seconds since 1970; None if unknown."""
    return _seconds(certificate, "notBefore")


def names(certificate: Path) -> list[str]:
    """DNS names and IP addresses of the certificate; empty if unknown."""
    try:
        return [name for kind, name in _decoded(certificate)["subjectAltName"] if kind in ("DNS", "IP Address")]
    except (OSError, AttributeError, KeyError, ValueError, ConfigError):
        return []


def _seconds(certificate: Path, key: str) -> float | None:
    try:
        return float(ssl.cert_time_to_seconds(_decoded(certificate)[key]))
    except (OSError, AttributeError, KeyError, ValueError, ConfigError):
        return None


def _decoded(certificate: Path) -> Mapping[str, Any]:
    # The public `ssl` API decodes certificates of peers only.
    with _as_pem(certificate) as file:
        decoded: Mapping[str, Any] = ssl._ssl._test_decode_cert(file)  # type: ignore[attr-defined]
    return decoded


def _as_pem(certificate: Path) -> AbstractContextManager[str]:
    if not isinstance(certificate, JavaStore):
        return nullcontext(str(certificate))
    from fencepost.java_keystores import pem_file  # noqa: PLC0415 - the client library

    return pem_file(certificate.pem())


class _Kept:
    """One context and its files."""

    def __init__(
        self, name: str, make: Callable[[], Context], certificate: Path | None, files: Iterable[Path | None]
    ) -> None:
        self.name = name
        self._make = make
        self._certificate = certificate
        self._files = [each for each in files if each is not None]
        self._observed = self._probe()
        self.context = make()
        self._report_executor()
        self.not_after = None if certificate is None else not_after(certificate)
        self._warned_at = float("-inf")
        self._warn_of_end()

    def _report_executor(self) -> None:
        if self.context.why_python:
            _log.info("TLS is executed in pure Python", of=self.name, reason=self.context.why_python)

    def _probe(self) -> list[tuple[int, int, int] | None]:
        return [_identity(each) for each in self._files]

    def probe(self, *, at_once: bool) -> bool | None:
        """Reload changed files. Returns whether that succeeded; None without a change."""
        observed = self._probe()
        self._warn_of_end()
        if observed == self._observed and not at_once:
            return None
        changed, self._observed = observed != self._observed, observed
        try:
            self.context = self._make()
            self._report_executor()
        except (ConfigError, OSError) as error:
            _log.error("certificate reload failed: the old certificates stay in use", of=self.name, reason=error)
            return False
        if self._certificate is not None:
            self.not_after = not_after(self._certificate)
        self._warned_at = float("-inf")
        _log.info("certificates loaded", of=self.name, files_changed=changed, not_after=_date(self.not_after))
        self._warn_of_end()
        return True

    def _warn_of_end(self) -> None:
        """Log at most once a day."""
        now = time.time()
        if self.not_after is None or self.not_after - now > _SOON_SECONDS or now - self._warned_at < _DAY_SECONDS:
            return
        self._warned_at = now
        what = "expired" if self.not_after < now else "expires soon"
        _log.warning(f"certificate {what}", of=self.name, file=self._certificate, not_after=_date(self.not_after))


def _identity(file: Path) -> tuple[int, int, int] | None:
    try:
        found: stat_result = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


class Certificates:
    """`listener`, `upstream`: contexts for new connections, None for plain TCP. Creation raises `ConfigError`."""

    def __init__(self, listen: ListenTls | None, upstream: UpstreamTls | None, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self._listener: _Kept | None = None
        self._upstream: _Kept | None = None
        if listen is not None:
            files = listen.certificate_file, listen.key_file, listen.key_password_file, listen.client_ca_file
            self._listener = _Kept(LISTENER, lambda: listener_context(listen), listen.certificate_file, files)
        if upstream is not None:
            identity = upstream.certificate_file, upstream.key_file, upstream.key_password_file
            trusted = upstream.ca_file
            self._upstream = _Kept(
                UPSTREAM, lambda: upstream_context(upstream), upstream.certificate_file, (trusted, *identity)
            )
        self._metrics.certificates_end(self.not_after())

    @property
    def listener(self) -> Context | None:
        return None if self._listener is None else self._listener.context

    @property
    def upstream(self) -> Context | None:
        return None if self._upstream is None else self._upstream.context

    def status_context(self) -> ssl.SSLContext | None:
        """For a server that keeps one context: each connection gets the certificate in use, and needs none itself."""
        if self._listener is None:
            return None
        context = _context(ssl.PROTOCOL_TLS_SERVER, "1.2")

        def renew(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            assert self.listener is not None
            connection.context = self.listener

        context.sni_callback = renew
        return context

    def change(self, listen: ListenTls | None, upstream: UpstreamTls | None) -> None:
        """Use other files or settings for new connections. Raises `ConfigError` and then changes nothing.

        This does not enable or disable TLS on either side.
        """
        made = Certificates(
            listen if self._listener is not None else None, upstream if self._upstream is not None else None
        )
        self._listener, self._upstream = made._listener, made._upstream

    def not_after(self) -> dict[str, float]:
        """Expiry of each own certificate, seconds since 1970."""
        kept = (each for each in (self._listener, self._upstream) if each is not None)
        return {each.name: each.not_after for each in kept if each.not_after is not None}

    def probe(self, *, at_once: bool = False) -> list[bool]:
        """Reload changed files; `at_once`: all. Returns success per reload."""
        kept = (each for each in (self._listener, self._upstream) if each is not None)
        succeeded = [loaded for each in kept if (loaded := each.probe(at_once=at_once)) is not None]
        for each in succeeded:
            self._metrics.certificates_loaded(each)
        self._metrics.certificates_end(self.not_after())
        return succeeded

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_SECONDS)
            self.probe()
