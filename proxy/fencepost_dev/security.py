"""The certificates, users and ACLs of `fencepost dev --secure`, a cluster on which to try a secured setup.

Every listener has a certificate of one new CA. Users log in with SASL/PLAIN over TLS and a new password:

- `admin`, a super user
- `app`, with ACLs on topics, groups and transactional ids that begin with `app-`
- `other`, without ACLs
- `fencepost`, the proxy's own, with the ACLs of docs/security.md

The files are new at each start, so there is nothing to renew. Brokers and controllers log in as `kafka`. The cluster
keeps its listener without logins, on which `KafkaCluster` waits until it is ready: there, Kafka permits nothing.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from fencepost_dev.errors import ClusterError
from fencepost_dev.ports import HOST

LISTENER: Final = "SECURED"
LISTENERS: Final = {"CONTROLLER": "SASL_SSL", LISTENER: "SASL_SSL"}
ADMIN, APP, OTHER, PROXY = "admin", "app", "other", "fencepost"
#: Of what `app` may use.
APP_PREFIX: Final = "app-"
_BROKER: Final = "kafka"
_MECHANISM: Final = "PLAIN"
_LOGIN_MODULE: Final = "org.apache.kafka.common.security.plain.PlainLoginModule required"
_VALID: Final = timedelta(days=90)
_STATE_TOPIC: Final = "__fencepost_state"
_READY_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Secured:
    """`directory`: has all files, and must exist."""

    directory: Path
    passwords: Mapping[str, str] = field(
        default_factory=lambda: {each: secrets.token_urlsafe(12) for each in (ADMIN, APP, OTHER, PROXY, _BROKER)}
    )

    @property
    def ca_file(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def _server_file(self) -> Path:
        """Key and certificate of brokers and proxy."""
        return self.directory / "server.pem"

    def properties_file(self, user: str) -> Path:
        """The client.properties of a user: for Java clients, Kafka's tools and `--command-config`."""
        return self.directory / f"{user}.properties"

    @property
    def config_file(self) -> Path:
        """The proxy's configuration."""
        return self.directory / "fencepost.toml"

    def write(self) -> None:
        """All files but `config_file`."""
        authority, server = _certificates()
        self.ca_file.write_bytes(authority)
        _write_secret(self._server_file, server)
        for user in (ADMIN, APP, OTHER):
            lines = {
                "security.protocol": "SASL_SSL",
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.ca_file),
                "sasl.mechanism": _MECHANISM,
                "sasl.jaas.config": f"{_LOGIN_MODULE} {self._login(user)};",
            }
            _write_secret(self.properties_file(user), "".join(f"{k}={v}\n" for k, v in lines.items()).encode())
        _write_secret(self.directory / "fencepost.password", f"{self.passwords[PROXY]}\n".encode())

    def write_config(self, upstream: str, listen: str, status: str) -> None:
        self.config_file.write_text(
            f"""\
upstream = {upstream.split(",")!r}
listen = "{listen}"
status = "{status}"

[listen_tls]
certificate_file = "{self._server_file}"

[upstream_tls]
ca_file = "{self.ca_file}"

[control_sasl]
mechanism = "{_MECHANISM}"
username = "{PROXY}"
password_file = "{self.directory / "fencepost.password"}"
""",
            "utf-8",
        )

    def _login(self, user: str) -> str:
        return f'username="{user}" password="{self.passwords[user]}"'

    def server_properties(self) -> dict[str, str]:
        """Of each broker, for `KafkaCluster(listeners=LISTENERS)`."""
        users = " ".join(f'user_{user}="{password}"' for user, password in self.passwords.items())
        login = f"{_LOGIN_MODULE} {self._login(_BROKER)} {users};"
        return {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{_BROKER};User:{ADMIN}",
            "inter.broker.listener.name": LISTENER,
            "sasl.enabled.mechanisms": _MECHANISM,
            "sasl.mechanism.inter.broker.protocol": _MECHANISM,
            "sasl.mechanism.controller.protocol": _MECHANISM,
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._server_file),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca_file),
            **{f"listener.name.{each.lower()}.plain.sasl.jaas.config": login for each in LISTENERS},
        }

    def kafka_python(self, user: str) -> dict[str, Any]:
        """Settings of kafka-python's clients."""
        return {
            "security_protocol": "SASL_SSL",
            "ssl_cafile": str(self.ca_file),
            "sasl_mechanism": _MECHANISM,
            "sasl_plain_username": user,
            "sasl_plain_password": self.passwords[user],
        }

    def create_acls(self, bootstrap: str) -> None:
        """Creates the ACLs, which exist already if the cluster's data is kept. Raises `ClusterError`."""
        from kafka import KafkaAdminClient  # noqa: PLC0415 - slow to import
        from kafka.errors import KafkaError  # noqa: PLC0415

        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                admin = KafkaAdminClient(bootstrap_servers=bootstrap, **self.kafka_python(ADMIN))
                try:
                    failed = admin.create_acls(list(_acls()))["failed"]
                finally:
                    admin.close()
                if not failed:
                    return
                reason = failed[0]
            except KafkaError as error:
                reason = error
            if time.monotonic() > deadline:
                raise ClusterError(f"cannot create ACLs at {bootstrap}: {reason}")
            time.sleep(0.2)


def _acls() -> Iterable[Any]:
    from kafka.admin import (  # noqa: PLC0415
        ACL,
        ACLOperation,
        ACLPermissionType,
        ACLResourcePatternType,
        ResourcePattern,
        ResourceType,
    )

    exact, prefixed = ACLResourcePatternType.LITERAL, ACLResourcePatternType.PREFIXED
    # The proxy's: docs/security.md. `app` may WRITE from the proxy's host alone.
    for user, host, kind, name, pattern, operations in (
        (PROXY, "*", "TOPIC", _STATE_TOPIC, exact, "CREATE"),
        (PROXY, "*", "TOPIC", "*", exact, "READ WRITE DESCRIBE DESCRIBE_CONFIGS ALTER"),
        (PROXY, "*", "CLUSTER", "kafka-cluster", exact, "IDEMPOTENT_WRITE DESCRIBE_CONFIGS DESCRIBE"),
        (PROXY, "*", "GROUP", "*", exact, "DESCRIBE"),
        (PROXY, "*", "TRANSACTIONAL_ID", "*", exact, "DESCRIBE"),
        (APP, "*", "TOPIC", APP_PREFIX, prefixed, "READ DESCRIBE DESCRIBE_CONFIGS"),
        (APP, HOST, "TOPIC", APP_PREFIX, prefixed, "WRITE"),
        (APP, "*", "GROUP", APP_PREFIX, prefixed, "READ DESCRIBE"),
        (APP, "*", "TRANSACTIONAL_ID", APP_PREFIX, prefixed, "WRITE DESCRIBE"),
    ):
        resource = ResourcePattern(ResourceType[kind], name, pattern)
        for operation in operations.split():
            yield ACL(f"User:{user}", host, ACLOperation[operation], ACLPermissionType.ALLOW, resource)


def _write_secret(file: Path, content: bytes) -> None:
    file.touch(0o600)
    file.write_bytes(content)


def _certificates() -> tuple[bytes, bytes]:
    """PEM: the CA's certificate; key and certificate of every server on this machine."""
    from cryptography import x509  # noqa: PLC0415 - only for `--secure`
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def certificate(subject: str, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name(_AUTHORITY))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + _VALID)
        )

    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = dict.fromkeys(
        (
            *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
            *("encipher_only", "decipher_only"),
        ),
        False,
    )
    authority = (
        certificate(_AUTHORITY, ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address(HOST))]
    server = (
        certificate("localhost", server_key)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return authority.public_bytes(pem), private + server.public_bytes(pem)


_AUTHORITY: Final = "fencepost dev"
