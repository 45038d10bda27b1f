"""A Kafka with TLS and logins by every mechanism, and how each client connects to it or to a proxy."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import confluent_kafka.admin as confluent_admin
from aiokafka.abc import AbstractTokenProvider as AiokafkaTokenProvider
from kafka.net.sasl.oauth import AbstractTokenProvider
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.config import ControlSasl, UpstreamTls
from fencepost_proxy.types import Address
from tests.support.certificates import Authority, Certificate
from tests.support.kafka import running_kafka
from tests.support.messages import RawConnection
from tests.support.raw import Connection, Enter

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
#: The proxy's user, which may do everything; another such user; and two users without permissions.
CONTROL, ADMIN, ALICE, BOB = "control", "admin", "alice", "bob"
USERS = (CONTROL, ADMIN, ALICE, BOB)
#: Users with a password only, and without permissions but those that a test gives them on unique names.
OTHER_USERS = (
    *("nobody", "describer", "reader", "writer", "expelled", "blind", "configurer", "grower"),
    *("owner", "topicless", "idless", "groupless", "other", "internal", "member", "stranger", "halfway", "gateway"),
)
#: Lifetime of a login at the listener SHORT.
SHORT_SECONDS = 3
_WAIT_SECONDS = 60.0
_TOKEN_SECONDS = 3600
_SASL_HANDSHAKE, _SASL_AUTHENTICATE = 17, 36
_LOGIN_MODULE = "org.apache.kafka.common.security"


def password(user: str) -> str:
    return f"{user}'s secret"


def token(user: str) -> str:
    """An unsecured token, which Kafka's default validator accepts."""
    now = int(time.time())

    def encoded(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    claims = {"sub": user, "iat": now - 10, "exp": now + _TOKEN_SECONDS}
    return f"{encoded({'alg': 'none'})}.{encoded(claims)}."


class _AiokafkaToken(AiokafkaTokenProvider):
    def __init__(self, user: str) -> None:
        self._user = user

    async def token(self) -> str:
        return token(self._user)


class _Token(AbstractTokenProvider):
    def __init__(self, user: str) -> None:
        super().__init__()
        self._user = user

    def token(self) -> str:
        return token(self._user)


@dataclass(frozen=True)
class Secured:
    """`kafka`'s listeners: `SECURED` requires a login by any mechanism; `SHORT` requires a new login every few seconds;
    `MUTUAL` requires a certificate and no login; `LOOPBACK` requires a login, without TLS. Test setup uses `PLAINTEXT`.
    """

    kafka: KafkaCluster
    authority: Authority
    #: Certificate of the listeners of brokers and proxies.
    server: Certificate
    directory: Path

    def login_files(self) -> tuple[Path, Path]:
        """Files for the proxy's login: a password and a token."""
        (secret := self.directory / "password").write_text(password(CONTROL) + "\n")
        (bearer := self.directory / "token").write_text(token(CONTROL) + "\n")
        return secret, bearer

    def control_sasl(self, mechanism: str = "PLAIN") -> ControlSasl:
        secret, bearer = self.login_files()
        if mechanism == "OAUTHBEARER":
            return ControlSasl("OAUTHBEARER", token_file=bearer)
        return ControlSasl(mechanism, CONTROL, secret)  # type: ignore[arg-type]

    @property
    def upstream_tls(self) -> UpstreamTls:
        return UpstreamTls(self.authority.file)

    def proxy_config(self, mechanism: str = "PLAIN", listen: str = "", more: str = "") -> str:
        """`listen` – further lines of listen_tls."""
        secret, bearer = self.login_files()
        login = f'username = "{CONTROL}"\npassword_file = "{secret}"'
        if mechanism == "OAUTHBEARER":
            login = f'token_file = "{bearer}"'
        return f"""
{more}
[listen_tls]
certificate_file = "{self.server.certificate}"
key_file = "{self.server.key}"
{listen}

[upstream_tls]
ca_file = "{self.authority.file}"

[control_sasl]
mechanism = "{mechanism}"
{login}
"""

    # ---- clients

    def entering(self, user: str) -> Enter:
        """Log in with a password, by PLAIN."""
        context, log_in = self.trusting(), logging_in(user)

        def enter(new: socket.socket) -> socket.socket:
            try:
                new = context.wrap_socket(new, server_hostname="127.0.0.1")
            except BaseException:
                new.close()
                raise
            return log_in(new)

        return enter

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.authority.file))

    def login(self, client: str, user: str, mechanism: str = "PLAIN") -> Mapping[str, Any]:
        of = {"java": self.java, "kafka-python": self.kafka_python, "aiokafka": self.aiokafka}
        return of.get(client, self.confluent)(user, mechanism)

    def kafka_python(self, user: str, mechanism: str = "PLAIN") -> dict[str, Any]:
        return {
            "security_protocol": "SASL_SSL",
            "ssl_cafile": str(self.authority.file),
            "sasl_mechanism": mechanism,
            **self._python_login(user, mechanism),
        }

    def _python_login(self, user: str, mechanism: str) -> dict[str, Any]:
        if mechanism == "OAUTHBEARER":
            return {"sasl_oauth_token_provider": _Token(user)}
        return {"sasl_plain_username": user, "sasl_plain_password": password(user)}

    def aiokafka(self, user: str, mechanism: str = "PLAIN") -> dict[str, Any]:
        login = self._python_login(user, mechanism)
        if mechanism == "OAUTHBEARER":
            login = {"sasl_oauth_token_provider": _AiokafkaToken(user)}
        return {
            "security_protocol": "SASL_SSL",
            "ssl_context": self.trusting(),
            "sasl_mechanism": mechanism,
            **login,
        }

    def confluent(self, user: str, mechanism: str = "PLAIN") -> dict[str, Any]:
        settings: dict[str, Any] = {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.authority.file),
            "sasl.mechanism": mechanism,
        }
        if mechanism == "OAUTHBEARER":
            return settings | {"oauth_cb": lambda _: (token(user), time.time() + _TOKEN_SECONDS)}
        return settings | {"sasl.username": user, "sasl.password": password(user)}

    def java(self, user: str, mechanism: str = "PLAIN") -> dict[str, str]:
        options = f'username="{user}" password="{password(user)}"'
        module = "scram.ScramLoginModule" if mechanism.startswith("SCRAM") else "plain.PlainLoginModule"
        if mechanism == "OAUTHBEARER":
            module, options = "oauthbearer.OAuthBearerLoginModule", f'unsecuredLoginStringClaim_sub="{user}"'
        return {
            "security.protocol": "SASL_SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority.file),
            "sasl.mechanism": mechanism,
            "sasl.jaas.config": f"{_LOGIN_MODULE}.{module} required {options};",
        }


class SecuredConnection(Connection):
    """A raw connection with TLS; `log_in` authenticates it."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        super().__init__(address)
        self.socket = context.wrap_socket(self.socket, server_hostname="127.0.0.1")

    def log_in(self, user: str, secret: str | None = None) -> int:
        """Return the error code."""
        assert self.query(SaslHandshakeRequest(mechanism="PLAIN"), 1).error_code == 0
        code: int = self.query(SaslAuthenticateRequest(auth_bytes=plain(user, secret)), 1).error_code
        return code


def plain(user: str, secret: str | None = None) -> bytes:
    return f"\0{user}\0{password(user) if secret is None else secret}".encode()


def logging_in(user: str) -> Enter:
    """Log in with a password, by PLAIN."""

    def enter(new: socket.socket) -> socket.socket:
        try:
            client = RawConnection.over(new)
            assert client.query(_SASL_HANDSHAKE, 1, {"Mechanism": "PLAIN"})["ErrorCode"] == 0
            assert client.query(_SASL_AUTHENTICATE, 1, {"AuthBytes": plain(user)})["ErrorCode"] == 0
        except BaseException:
            new.close()
            raise
        return new

    return enter


def server_properties(
    authority: Authority, server: Certificate, listeners: Sequence[str] = ("secured", "short", "loopback")
) -> dict[str, str]:
    """`listeners` – those with logins, in lower case."""
    passwords = " ".join(f'user_{user}="{password(user)}"' for user in (*USERS, *OTHER_USERS))
    properties = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        # Clients of the plaintext listener may do everything: they set up the test.
        "super.users": f"User:ANONYMOUS;User:{CONTROL};User:{ADMIN};User:CN=proxy",
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(server.both),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(authority.file),
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.short.connections.max.reauth.ms": str(SHORT_SECONDS * 1000),
        # Permits a second login, but no test lasts long enough to require it.
        "listener.name.loopback.connections.max.reauth.ms": "86400000",
    }
    for listener in listeners:
        for mechanism in MECHANISMS:
            name = f"listener.name.{listener}.{mechanism.lower()}.sasl.jaas.config"
            module = {"PLAIN": f"plain.PlainLoginModule required {passwords}"}.get(
                mechanism, "scram.ScramLoginModule required"
            )
            if mechanism == "OAUTHBEARER":
                module = 'oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="broker"'
            properties[name] = f"{_LOGIN_MODULE}.{module};"
    return properties


@contextmanager
def sasl_ssl_kafka(
    directory: Path,
    brokers: int = 1,
    more: Mapping[str, str] | None = None,
    relays: Mapping[str, tuple[str, Address]] | None = None,
) -> Iterator[Secured]:
    """`relays` – more listeners: their protocol, and the address of the TCP relay that they advertise."""
    relayed, authority = dict(relays or {}), Authority(directory / "authority")
    server = authority.sign("server")
    logins = [name.lower() for name, (protocol, _) in relayed.items() if protocol.startswith("SASL")]
    properties = server_properties(authority, server, ("secured", "short", "loopback", *logins)) | dict(more or {})
    listeners = {"SECURED": "SASL_SSL", "SHORT": "SASL_SSL", "MUTUAL": "SSL", "LOOPBACK": "SASL_PLAINTEXT"}
    listeners |= {name: protocol for name, (protocol, _) in relayed.items()}
    advertised = {name: address for name, (_, address) in relayed.items()}
    with running_kafka(brokers, properties=properties, listeners=listeners, advertised=advertised) as cluster:
        set_scram_passwords(cluster.bootstrap)
        yield Secured(cluster, authority, server, directory)


def set_scram_passwords(bootstrap: str) -> None:
    admin = confluent_admin.AdminClient({"bootstrap.servers": bootstrap, "log_level": 4})  # no "purging events"
    for kind in (confluent_admin.ScramMechanism.SCRAM_SHA_256, confluent_admin.ScramMechanism.SCRAM_SHA_512):
        # One request each, because Kafka accepts a user only once per request.
        requested = [
            confluent_admin.UserScramCredentialUpsertion(
                user, confluent_admin.ScramCredentialInfo(kind, 4096), password(user).encode()
            )
            for user in USERS
        ]
        for done in admin.alter_user_scram_credentials(requested).values():
            done.result(_WAIT_SECONDS)
