"""Security properties of a Java client.properties (`--command-config`), as `upstream_tls` and `control_sasl`.

Passwords, inline certificates and Java key stores stay in their files. The configuration holds a path that extracts
them at each use, so a changed password applies at the next login, like that of a `password_file`.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import Any, Final

from fencepost_proxy.config import Problem, Refused

_PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
#: Login module -> how the names of its mechanisms begin.
_MODULES: Final = {"plain.PlainLoginModule": "PLAIN", "scram.ScramLoginModule": "SCRAM-"}
_EXAMPLE: Final = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="…" password="…";'
_INLINE: Final = "ssl.truststore.certificates"
_TRUSTED: Final = ("ssl.truststore.location", _INLINE, "ssl.ca.location")
_HOST_CHECK: Final = "ssl.endpoint.identification.algorithm"
_TOKEN: Final = "sasl.oauthbearer.token.endpoint.url"
_SUPPORTED: Final = {
    *("security.protocol", "sasl.mechanism", "sasl.jaas.config", "sasl.username", "sasl.password", _TOKEN, *_TRUSTED),
    *("ssl.truststore.type", "ssl.truststore.password", "ssl.keystore.type", "ssl.keystore.location", _HOST_CHECK),
    *("ssl.keystore.password", "ssl.key.password"),
}
_STORES: Final = ("ssl.truststore", "ssl.keystore")
_STORE_TYPES: Final = ("JKS", "PKCS12", "PEM")
_ONE_FILE: Final = "is not supported (write key and certificates to one PEM file, and set ssl.keystore.location)"
_REFUSED: Final = dict.fromkeys(("ssl.keystore.key", "ssl.keystore.certificate.chain"), _ONE_FILE)
#: Of a store that is PEM.
_NO_PASSWORD: Final = "a PEM store has no password: remove it"
_NO_KEY_PASSWORD: Final = "is not supported (remove it, and set FENCEPOST_UPSTREAM_TLS__KEY_PASSWORD_FILE)"
_OPTION: Final = r"""(\w+)\s*=\s*("(?:\\.|[^"\\])*"|[^\s;"=]+)"""
_LOGIN: Final = re.compile(
    rf"org\.apache\.kafka\.common\.security\.({'|'.join(map(re.escape, _MODULES))})\s+\w+((?:\s+{_OPTION})*)\s*;",
    re.DOTALL,
)
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)


class PasswordIn(PosixPath):
    """A properties file whose text is the password in it."""

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        return _login(_properties(self))[1]


class CertificatesIn(PosixPath):
    """A properties file with CA certificates in `ssl.truststore.certificates`."""

    def der(self) -> bytes:
        """Raises Refused. Java accepts PEM without line feeds, OpenSSL does not."""
        given = _properties(self)
        try:
            found = [b64decode(each) for each in _CERTIFICATE.findall(given.get(_INLINE))]
        except ValueError:
            found = []
        if not found:
            raise Refused([given.problem(_INLINE, "has no PEM certificate")])
        return b"".join(found)


class JavaStore(PosixPath):
    """A Java key store. Its passwords are in `properties`."""

    properties: Path
    is_truststore: bool

    @classmethod
    def of(cls, given: _Properties, store: str) -> JavaStore:
        found = cls(given.get(f"{store}.location"))
        found.properties, found.is_truststore = given.file, store == "ssl.truststore"
        return found

    def __reduce__(self) -> Any:
        store = "ssl.truststore" if self.is_truststore else "ssl.keystore"
        return JavaStore.of, (_Properties(self.properties, {f"{store}.location": str(self)}, {}), store)

    def pem(self) -> str:
        """Trusted certificates, or a private key and its certificates. Raises Refused, OSError."""
        from fencepost.java_keystores import KeyStoreError, identity, pem, trusted_certificates  # noqa: PLC0415

        given, data = _properties(self.properties), self.read_bytes()
        store = "ssl.truststore" if self.is_truststore else "ssl.keystore"
        password = given.get(f"{store}.password") or None
        try:
            if self.is_truststore:
                return pem(trusted_certificates(data, password))
            return identity(data, password, given.get("ssl.key.password") or None)
        except KeyStoreError as error:
            raise Refused([given.problem(f"{store}.location", f"{self} {error}")]) from None


@dataclass(frozen=True, slots=True)
class ClientProperties:
    """`document` – as in TOML; None if the file has no security properties. `ignored` – the other properties."""

    document: Mapping[str, Mapping[str, object]] | None
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Properties:
    file: Path
    values: Mapping[str, str]
    lines: Mapping[str, int]

    def get(self, name: str) -> str:
        return self.values.get(name, "")

    def problem(self, name: str, text: str) -> Problem:
        """`text` never has the value, which may be a secret."""
        return Problem(name, text, f"{self.file}:{self.lines[name]}" if name in self.lines else str(self.file))


def read_client_properties(file: Path) -> ClientProperties:
    """Raises Refused with all errors."""
    try:
        given = _properties(file)
    except OSError as error:
        raise Refused([Problem("", f"cannot be read: {error.strerror}", str(file))]) from error
    protocol = given.get("security.protocol").upper()
    if not any(name.startswith(("security.", "sasl.", "ssl.")) for name in given.values):
        return ClientProperties(None, tuple(sorted(given.values)))
    if protocol not in _PROTOCOLS:
        raise Refused([given.problem("security.protocol", f"must be one of {', '.join(_PROTOCOLS)}")])
    readers = {"control_sasl": ("sasl.", _control_sasl), "upstream_tls": ("ssl.", _upstream_tls)}
    used = {table: each for table, each in readers.items() if each[0][:-1].upper() in protocol.split("_")}
    # Kafka's clients ignore properties that the protocol does not use.
    relevant = {n for n in given.values if n.startswith(("security.", *(prefix for prefix, _ in used.values())))}
    problems = list(_unsupported(given, relevant))
    document: dict[str, Mapping[str, object]] = {}
    for table, (_, read) in used.items():
        try:
            document[table] = read(given)
        except Refused as refused:
            problems += refused.problems
    if problems:
        raise Refused(problems)
    return ClientProperties(document, tuple(sorted(given.values.keys() - relevant)))


def _unsupported(given: _Properties, names: Iterable[str]) -> Iterator[Problem]:
    for store in _STORES:
        kind = f"{store}.type"
        if kind in names and given.get(kind).upper() not in _STORE_TYPES:
            yield given.problem(kind, f"must be one of {', '.join(_STORE_TYPES)}")
        if f"{store}.password" in names and not _is_java_store(given, store):
            yield given.problem(f"{store}.password", _NO_PASSWORD)
    if "ssl.key.password" in names and not _is_java_store(given, "ssl.keystore"):
        yield given.problem("ssl.key.password", _NO_KEY_PASSWORD)
    for name in sorted(set(names) - _SUPPORTED):
        stated = f"is not supported (remove it, or correct its name: {', '.join(sorted(_SUPPORTED))})"
        yield given.problem(name, _REFUSED.get(name, stated))


def _is_java_store(given: _Properties, store: str) -> bool:
    """By its content, as in Java. Kafka's default type is JKS; a missing file counts as what its type says."""
    location = given.get(f"{store}.location")
    if not location:
        return False
    from fencepost.java_keystores import is_key_store  # noqa: PLC0415

    try:
        with open(location, "rb") as file:
            return is_key_store(file.read(4))
    except OSError:
        return given.get(f"{store}.type").upper() != "PEM"


def _control_sasl(given: _Properties) -> Mapping[str, object]:
    mechanism = given.get("sasl.mechanism").upper()
    if mechanism not in _MECHANISMS:
        raise Refused([given.problem("sasl.mechanism", f"must be one of {', '.join(_MECHANISMS)}")])
    if mechanism == "OAUTHBEARER":
        from fencepost.java_properties import token_file  # noqa: PLC0415

        try:
            return {"mechanism": mechanism, "token_file": token_file(given.get(_TOKEN))}
        except ValueError as error:
            raise Refused([given.problem(_TOKEN, str(error))]) from None
    return {"mechanism": mechanism, "username": _login(given)[0], "password_file": PasswordIn(given.file)}


def _login(given: _Properties) -> tuple[str, str]:
    """User name and password. Raises Refused."""
    jaas = given.get("sasl.jaas.config")
    if jaas:
        module = _LOGIN.fullmatch(jaas)
        options = {} if module is None else {name: _unquoted(value) for name, value in re.findall(_OPTION, module[2])}
        name, password = options.get("username"), options.get("password")
        if module is None or not (name and password):
            raise Refused([given.problem("sasl.jaas.config", f"must be a login by PLAIN or SCRAM, as in {_EXAMPLE}")])
        if not given.get("sasl.mechanism").upper().startswith(_MODULES[module[1]]):
            raise Refused([given.problem("sasl.jaas.config", f"{module[1]} is not for this sasl.mechanism")])
    else:
        name, password = given.get("sasl.username"), given.get("sasl.password")
        if not (name and password):
            raise Refused([given.problem("sasl.jaas.config", "must be given, or sasl.username and sasl.password")])
    return name, password


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1], flags=re.DOTALL) if value[0] == '"' else value


def _upstream_tls(given: _Properties) -> Mapping[str, object]:
    found: dict[str, object] = {}
    trusted = [name for name in _TRUSTED if given.get(name)]
    if len(trusted) > 1:
        raise Refused([given.problem(trusted[1], f"must not be given with {trusted[0]}")])
    if trusted == [_INLINE]:
        found["ca_file"] = CertificatesIn(given.file)
        CertificatesIn(given.file).der()
    elif trusted:
        found["ca_file"] = _store(given, "ssl.truststore") if trusted[0] == _TRUSTED[0] else given.get(trusted[0])
    if given.get("ssl.keystore.location"):
        found["certificate_file"] = _store(given, "ssl.keystore")
    if _HOST_CHECK in given.values:
        if given.get(_HOST_CHECK).lower() not in ("", "https"):
            raise Refused([given.problem(_HOST_CHECK, "must be https, or empty to accept any host name")])
        found["check_hostname"] = bool(given.get(_HOST_CHECK))
    return found


def _store(given: _Properties, store: str) -> object:
    return JavaStore.of(given, store) if _is_java_store(given, store) else given.get(f"{store}.location")


def _properties(file: Path) -> _Properties:
    # The client library takes a megabyte.
    from fencepost.java_properties import properties_of  # noqa: PLC0415

    found = list(properties_of(file.read_bytes()))
    return _Properties(file, {each.name: each.value for each in found}, {each.name: each.line for each in found})
