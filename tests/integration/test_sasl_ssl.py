"""TLS to clients and to Kafka, client logins through the proxy, and the proxy's login, with a real Kafka that requires
them."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from fencepost_proxy.cluster.broker import PLAINTEXT, Access, BrokerConnection, UpstreamUnavailable, deadline_in
from fencepost_proxy.config import ControlSasl, Limits, UpstreamTls
from fencepost_proxy.transport.certificates import upstream_context
from fencepost_proxy.wire.apis import METADATA
from fencepost_proxy.wire.schema import Message
from tests.kit.producers import start
from tests.kit.waiting import until
from tests.support.certificates import Authority
from tests.support.clients import LIBRARIES
from tests.support.ports import free_port, free_ports_in_a_row
from tests.support.proxy import ProxyProcess, probed
from tests.support.raw import Closed, Connection, Log, batch, produce_request
from tests.support.sasl_ssl import (
    ADMIN,
    ALICE,
    CONTROL,
    MECHANISMS,
    SHORT_SECONDS,
    Secured,
    SecuredConnection,
    password,
    plain,
)
from tests.support.senders import JavaProducers, open_sender

pytestmark = [pytest.mark.kafka]

WAIT_SECONDS = 60.0
CHECKS = """
[topics."required-*"]
"fencepost.check.expected.offsets" = "required"

[topics."checked-*"]
"fencepost.check.expected.offsets" = "true"
"""


@pytest.fixture(scope="module")
def through(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy of `SECURED` with TLS on its listeners. Tests must leave it running.

    It listens on [::]. Its IPv4 clients must get broker addresses for which its certificate is valid.
    """
    upstream = secured.kafka.bootstrap_of("SECURED")
    config = secured.proxy_config() + CHECKS
    port = free_ports_in_a_row(8)
    listen = ("--listen", f"[::]:{port}") if socket.has_dualstack_ipv6() else ()
    with ProxyProcess(upstream, tmp_path_factory.mktemp("proxy"), config=config, port=port, arguments=listen) as proxy:
        proxy.bootstrap = f"127.0.0.1:{port}"
        yield proxy


def created(secured: Secured, name: str) -> str:
    with Connection(secured.kafka.bootstrap) as admin:
        assert admin.create_topic(name) == (0, None)
    until(lambda: Log(secured.kafka.bootstrap).end(name) == 0, f"the leader of {name}")
    return name


def expecting(offset: int, *values: bytes) -> bytes:
    return batch(*values, expected=offset)


# --- client logins ----------------------------------------------------------------------------------------------------


def append_first(client: str, bootstrap: str, secured: Secured, mechanism: str, topic: str) -> int:
    """Its offset."""
    with closing(start(client, None, bootstrap, **secured.login(client, ADMIN, mechanism))) as producer:
        return producer.send(topic, "v", expected=0).result(WAIT_SECONDS).offset


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("client", LIBRARIES)
def test_clients_log_in_through_the_proxy(
    secured: Secured,
    through: ProxyProcess,
    unique_topic: Callable[..., str],
    mechanism: str,
    client: str,
) -> None:
    topic = created(secured, unique_topic("required"))

    assert append_first(client, through.bootstrap, secured, mechanism, topic) == 0

    assert Log(secured.kafka.bootstrap).values(topic) == [b"v"]


def test_homes_serve_clients_with_tls(secured: Secured, tmp_path: Path, unique_topic: Callable[..., str]) -> None:
    """Two proxies, TLS and logins on both sides. Clients of either one get to the broker's home."""
    upstream = secured.kafka.bootstrap_of("SECURED")
    config = secured.proxy_config(more='homes = true\nadvertised_host = "127.0.0.1"') + CHECKS
    with ExitStack() as running:
        proxies = []
        for number in range(2):
            (directory := tmp_path / str(number)).mkdir()
            status = ("--status", f"127.0.0.1:{free_port()}")
            proxies.append(running.enter_context(ProxyProcess(upstream, directory, config=config, arguments=status)))

        def homes() -> set[int]:
            at = [AdminClient({"bootstrap.servers": each.bootstrap, **secured.confluent(ADMIN)}) for each in proxies]
            return {broker.port for each in at for broker in each.list_topics(timeout=10).brokers.values()}

        until(lambda: len(homes()) == 1, "one home")
        for each, client in itertools.product(proxies, LIBRARIES):
            topic = created(secured, unique_topic("required"))
            assert append_first(client, each.bootstrap, secured, "SCRAM-SHA-256", topic) == 0
        metrics = [each.metrics() for each in proxies]
    shares = [
        sum(count for name, count in each.items() if name.startswith("fencepost_sequencers{")) for each in metrics
    ]
    assert sorted(shares) == [0, 6]
    handshakes = {name for each in metrics for name, count in each.items() if count and "tls_handshakes" in name}
    assert handshakes == {'fencepost_tls_handshakes_total{result="ok"}'}


def test_java_logs_in_through_the_proxy(
    secured: Secured, through: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    topic = created(secured, unique_topic("required"))
    with JavaProducers() as java:
        for number, mechanism in enumerate(MECHANISMS):
            sender = open_sender("java", java, through.bootstrap, **secured.java(ADMIN, mechanism))
            assert sender.send(topic, mechanism, expected=number).get().offset == number
            sender.close()

    assert Log(secured.kafka.bootstrap).values(topic) == [each.encode() for each in MECHANISMS]


def test_wrong_password_is_refused_like_kafka(secured: Secured, through: ProxyProcess) -> None:
    observed = []
    for bootstrap in (secured.kafka.bootstrap_of("SECURED"), through.bootstrap):
        with SecuredConnection(bootstrap, secured.trusting()) as client:
            assert client.query(SaslHandshakeRequest(mechanism="PLAIN"), 1).error_code == 0
            answer = client.query(SaslAuthenticateRequest(auth_bytes=plain(ALICE, "guessed")), 1)
            observed.append((answer.error_code, answer.error_message, client.is_closed(WAIT_SECONDS)))

    assert observed[0] == observed[1]
    assert observed[1] == (58, "Authentication failed: Invalid username or password", True)
    assert "guessed" not in through.log


@pytest.mark.parametrize("right", [True, False])
def test_bare_tokens_are_answered_as_by_kafka(secured: Secured, through: ProxyProcess, right: bool) -> None:
    observed = []
    for bootstrap in (secured.kafka.bootstrap_of("SECURED"), through.bootstrap):
        with SecuredConnection(bootstrap, secured.trusting()) as client:
            assert client.api_versions()[17] == (0, 1)
            assert client.query(SaslHandshakeRequest(mechanism="PLAIN"), 0).error_code == 0
            sent = plain(ADMIN if right else ALICE, None if right else "guessed")
            client.socket.sendall(len(sent).to_bytes(4, "big") + sent)
            if right:
                observed.append((client.receive_frame(), sorted(each.node_id for each in client.metadata().brokers)))
            else:
                observed.append(client.is_closed(WAIT_SECONDS))

    assert observed[0] == observed[1]
    if not right:
        until(lambda: "login failed" in through.log, "the failed login in the log")
        line = next(each for each in through.log.splitlines() if "login failed" in each)
        assert "mechanism=PLAIN principal=alice" in line
        assert 'reason="Authentication failed: Invalid username or password"' in line
        assert "guessed" not in through.log


# --- reauthentication -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def short(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy of the listener where logins expire after some seconds, including the proxy's."""
    upstream = secured.kafka.bootstrap_of("SHORT")
    config = secured.proxy_config("SCRAM-SHA-512") + CHECKS
    with ProxyProcess(upstream, tmp_path_factory.mktemp("short"), config=config) as proxy:
        yield proxy


def test_java_reauthenticates_under_load(
    secured: Secured, short: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    """Java's producer reauthenticates without waiting for appends in flight."""
    topic = created(secured, unique_topic("required"))
    began = time.monotonic()
    count = 0
    with JavaProducers() as java:
        sender = open_sender("java", java, short.bootstrap, batch_size=0, **secured.java(ADMIN, "SCRAM-SHA-256"))
        while time.monotonic() - began < 3 * SHORT_SECONDS:
            sendings = [sender.send(topic, f"{number}", expected=number) for number in range(count, count + 20)]
            for number, sending in enumerate(sendings, count):
                observed = sending.get()
                assert observed.offset == number, observed
            count += len(sendings)
        sender.close()

    assert Log(secured.kafka.bootstrap).values(topic) == [b"%d" % number for number in range(count)]
    closed = [line for line in short.log.splitlines() if "connection closed" in line]
    assert closed == []


def test_nothing_of_ours_comes_into_a_login(
    secured: Secured, short: ProxyProcess, tmp_path: Path, unique_topic: Callable[..., str]
) -> None:
    """The proxy retries an append whose sequence another process took. It must not do so while the client
    authenticates."""
    topic = created(secured, unique_topic("checked"))
    config = secured.proxy_config() + CHECKS
    rounds = 5
    with ProxyProcess(secured.kafka.bootstrap_of("SHORT"), tmp_path, config=config) as other:
        for _ in range(rounds):
            with (
                SecuredConnection(short.bootstrap, secured.trusting()) as client,
                SecuredConnection(other.bootstrap, secured.trusting()) as rival,
            ):
                assert client.log_in(ADMIN) == rival.log_in(ADMIN) == 0
                # Both processes know the log end, then one process has an outdated one.
                until(lambda: client.append(topic, batch(b"known")).error_code == 0, "the first append")
                until(lambda: rival.append(topic, batch(b"r", b"r")).error_code == 0, "the rival's append")

                # The outdated process receives an append and a login in one write.
                _, append = client.frame(produce_request({topic: {0: batch(b"late")}}), 9)
                _, login = client.frame(SaslHandshakeRequest(mechanism="PLAIN"), 1)
                client.socket.sendall(append + login)

                # Both are answered in order. The login and a later append succeed.
                assert client.receive_produce()[1][topic, 0].error_code == 0
                assert client.receive(SaslHandshakeRequest, 1)[1].error_code == 0
                assert client.query(SaslAuthenticateRequest(auth_bytes=plain(ADMIN)), 1).error_code == 0
                assert client.append(topic, batch(b"behind")).error_code == 0

    values = Log(secured.kafka.bootstrap).values(topic)
    assert values.count(b"late") == values.count(b"behind") == rounds


def test_proxy_reauthenticates_its_own_connections(secured: Secured, short: ProxyProcess) -> None:
    """Kafka closes a connection at its first request after the login has expired."""
    access = Access(lambda: upstream_context(secured.upstream_tls), secured.control_sasl("SCRAM-SHA-256"))
    logins = []
    access = replace(access, on_login=logins.append)

    async def query_for_long() -> int:
        address = secured.kafka.address(1, "SHORT")
        connection = await BrokerConnection.open(address, limits=Limits(), client_id="test", access=access)
        queried = 0
        try:
            while len(logins) < 3:
                answers = await asyncio.gather(
                    *(
                        connection.request(METADATA, 9, Message(topics=[]), deadline=deadline_in(WAIT_SECONDS))
                        for _ in range(10)
                    )
                )
                queried += len(answers)
                await asyncio.sleep(0.05)
            assert not connection.closed
        finally:
            await connection.close()
        return queried

    assert asyncio.run(query_for_long()) > 20
    assert logins == [True] * 3


# --- the proxy's login, and its failures ------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_proxy_logs_in_by_each_mechanism(secured: Secured, mechanism: str) -> None:
    assert opened(secured, "SECURED", Access(lambda: upstream_context(secured.upstream_tls),
                                             secured.control_sasl(mechanism))) is None  # fmt: skip


def opened(secured: Secured, listener: str, access: Access) -> str | None:
    """The error of a broker connection of the proxy, or None if it succeeds."""

    async def query() -> str | None:
        address = secured.kafka.address(1, listener)
        limits = Limits(connect_timeout_seconds=WAIT_SECONDS, request_timeout_seconds=WAIT_SECONDS)
        try:
            connection = await BrokerConnection.open(address, limits=limits, client_id="test", access=access)
            try:
                await connection.request(METADATA, 9, Message(topics=[]), deadline=deadline_in(WAIT_SECONDS))
            finally:
                await connection.close()
        except UpstreamUnavailable as error:
            return str(error).replace(str(address), "HERE")
        return None

    return asyncio.run(query())


def test_why_kafka_does_not_let_the_proxy_in(secured: Secured, tmp_path: Path) -> None:
    tls, login = secured.upstream_tls, secured.control_sasl()
    (wrong := tmp_path / "wrong").write_text("wrong\n")
    unauthorized_clients = Authority(tmp_path / "others")
    guest = secured.authority.sign("proxy")

    def why(listener: str, tls: UpstreamTls | None, login: ControlSasl | None = None) -> str | None:
        access = PLAINTEXT if tls is None and login is None else Access(lambda: tls and upstream_context(tls), login)
        return opened(secured, listener, access)

    found = {
        "right": why("SECURED", tls, login),
        "wrong password": why("SECURED", tls, replace(login, password_file=wrong)),
        "wrong scram password": why("SECURED", tls, ControlSasl("SCRAM-SHA-256", CONTROL, wrong)),
        "no password": why("SECURED", tls, replace(login, password_file=tmp_path / "absent")),
        "no login": why("SECURED", tls),
        "no tls": why("SECURED", None),
        "tls to a plain one": why("PLAINTEXT", tls),
        "unknown authority": why("SECURED", UpstreamTls(unauthorized_clients.file), login),
        "no certificate": why("MUTUAL", tls),
        "a certificate": why("MUTUAL", replace(tls, certificate_file=guest.certificate, key_file=guest.key)),
    }
    print(found)
    assert found.pop("right") is None
    assert found.pop("a certificate") is None
    stated = {
        "wrong password": "SASL PLAIN as control: Authentication failed: Invalid username or password",
        "wrong scram password": "SASL SCRAM-SHA-256 as control: Authentication failed during authentication due to "
        "invalid credentials with SASL mechanism SCRAM-SHA-256",
        "no password": "control_sasl.password_file: ",
        "no login": "does that listener require a login (control_sasl)?",
        "no tls": "it speaks TLS; set upstream_tls",
        "tls to a plain one": "it closed the connection during the TLS handshake",
        "unknown authority": "its certificate is not trusted: unable to get local issuer certificate "
        "(upstream_tls.ca_file)",
        "no certificate": "it requires a certificate that it trusts",
    }
    assert {what: words in found[what] for what, words in stated.items()} == dict.fromkeys(stated, True), found  # type: ignore[operator]


def test_invalid_credential_files_are_retried_until_valid(secured: Secured, tmp_path: Path) -> None:
    # A proxy with the wrong authority and the wrong password.
    status = f"127.0.0.1:{free_port()}"
    (file := tmp_path / "changing").write_text("wrong\n")
    (trusted := tmp_path / "trusted").write_bytes(Authority(tmp_path / "others").file.read_bytes())
    config = secured.proxy_config(more=f'status = "{status}"')
    config = config.replace(str(secured.login_files()[0]), str(file))
    config = config.replace(f'ca_file = "{secured.authority.file}"', f'ca_file = "{trusted}"')
    upstream = secured.kafka.bootstrap_of("SECURED")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(ProxyProcess, upstream, tmp_path, config=config)

        # The readiness check reports the certificate.
        until(lambda: "is not trusted" in probed(status, "/readyz")[1], "the reason")

        # With the right authority, it reports only the password.
        trusted.write_bytes(secured.authority.file.read_bytes())
        until(
            lambda: (
                "SASL PLAIN as control: Authentication failed: Invalid username or password"
                in probed(status, "/readyz")[1]
            ),
            "the reason",
        )

        # With the right password, the proxy starts without a restart.
        file.write_text(password(CONTROL) + "\n")
        with starting.result(WAIT_SECONDS) as proxy:
            assert proxy.page("/readyz").strip() == "ready"
            logins = re.findall(r'fencepost_control_logins_total\{result="(\w+)"\} (\d+)', proxy.page("/metrics"))
            assert {result for result, count in logins if int(count)} == {"ok", "failed"}
            for secret in ("wrong\n", password(CONTROL)):
                assert secret not in proxy.log
            assert password(CONTROL) not in proxy.page("/status.json")


# --- certificates -----------------------------------------------------------------------------------------------------


def test_plaintext_client_on_tls_listener_is_logged(secured: Secured, through: ProxyProcess) -> None:
    with Connection(through.bootstrap) as client, pytest.raises(Closed):
        client.api_versions()
    until(lambda: "this listener needs security.protocol=SSL or SASL_SSL" in through.log, "the reason in the log")


def test_clients_have_to_show_a_certificate(secured: Secured, tmp_path: Path, unique_topic: Callable[..., str]) -> None:
    # The proxy requires a trusted client certificate, and Kafka requires a password as well.
    friend = secured.authority.sign("friend")
    stranger = Authority(tmp_path / "others").sign("stranger")
    listen = f'client_certificates = "required"\nclient_ca_file = "{secured.authority.file}"'
    config = secured.proxy_config(listen=listen) + CHECKS
    topic = created(secured, unique_topic("required"))

    def append(number: int, certificate: Any) -> int:
        context = secured.trusting()
        if certificate is not None:
            context.load_cert_chain(certificate.certificate, certificate.key)
        with SecuredConnection(proxy.bootstrap, context) as client:
            assert client.log_in(ADMIN) == 0
            return client.append(topic, expecting(number, b"v")).base_offset

    with ProxyProcess(secured.kafka.bootstrap_of("SECURED"), tmp_path, config=config) as proxy:
        assert append(0, friend) == 0
        for who in (None, stranger):
            with pytest.raises((Closed, ssl.SSLError)):
                append(1, who)
        until(lambda: "client_certificates is required" in proxy.log, "why the one without")
        until(lambda: "its certificate is not trusted" in proxy.log, "why the unknown client")
        assert append(1, friend) == 1


def test_start_with_missing_certificate_fails(tmp_path: Path) -> None:
    (file := tmp_path / "fencepost.toml").write_text(f'[listen_tls]\ncertificate_file = "{tmp_path}/absent.pem"\n')
    here = ["--upstream", "127.0.0.1:1", "--listen", f"127.0.0.1:{free_port()}", "--config", str(file)]

    ended = subprocess.run(
        [sys.executable, "-m", "fencepost_proxy", "proxy", *here],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )

    assert ended.returncode == 2
    assert "listen_tls.certificate_file: " in ended.stderr
    assert "absent.pem cannot be read: No such file or directory" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_replaced_certificates_are_reloaded(secured: Secured, tmp_path: Path) -> None:
    # A proxy with an open connection, and a certificate of another authority for the same host.
    other = Authority(tmp_path / "other")
    certificate, key = tmp_path / "listener.pem", tmp_path / "listener.key"
    certificate.write_bytes(secured.server.certificate.read_bytes())
    key.write_bytes(secured.server.key.read_bytes())
    config = secured.proxy_config().replace(str(secured.server.certificate), str(certificate))
    config = config.replace(str(secured.server.key), str(key))

    def shown(authority: Authority) -> bool:
        context = ssl.create_default_context(cafile=str(authority.file))
        try:
            with SecuredConnection(proxy.bootstrap, context) as client:
                return bool(client.api_versions())
        except ssl.SSLCertVerificationError:
            return False

    with (
        ProxyProcess(secured.kafka.bootstrap_of("SECURED"), tmp_path, config=config) as proxy,
        SecuredConnection(proxy.bootstrap, secured.trusting()) as old,
    ):
        assert old.log_in(ADMIN) == 0
        assert not shown(other)

        # Only the certificate file is replaced.
        new = other.sign("new")
        certificate.write_bytes(new.certificate.read_bytes())
        proxy.signal_reload()

        # The old certificate stays in use, and the log states the reason.
        until(lambda: "certificate reload failed" in proxy.log, "the error in the log")
        assert shown(secured.authority)

        # The key file is replaced too, without a signal.
        key.write_bytes(new.key.read_bytes())

        # New connections get the new certificate, and the old connection stays open.
        until(lambda: shown(other), "the new certificate")
        assert not shown(secured.authority)
        assert old.query(MetadataRequest(topics=[]), 9) is not None


# --- sidecar ----------------------------------------------------------------------------------------------------------


def test_sidecar_terminates_tls_for_a_loopback_listener(
    secured: Secured, tmp_path: Path, unique_topic: Callable[..., str]
) -> None:
    """Connections to other brokers use TLS, since the listener between brokers is not on the loopback."""
    topic = created(secured, unique_topic("required"))
    arguments = ("--mode", "sidecar", "--broker", str(secured.kafka.address(1, "LOOPBACK")))
    config = secured.proxy_config(more='advertised_host = "127.0.0.1"\nbroker_tls = false') + CHECKS
    with ProxyProcess(secured.kafka.bootstrap_of("SECURED"), tmp_path, config=config, arguments=arguments) as sidecar:
        # The sidecar's request reaches the loopback listener. The response shows that this sidecar is not advertised.
        until(lambda: "does not advertise this sidecar" in sidecar.log, "the query to its broker")
        # A client's login over TLS reaches it too.
        with Connection(sidecar.bootstrap, enter=secured.entering(ADMIN)) as client:
            until(lambda: client.append(topic, expecting(0, b"first")).error_code == 0, "the first append")
            assert client.append(topic, expecting(0, b"second")).error_code == 44
    assert Log(secured.kafka.bootstrap).values(topic) == [b"first"]


# --- floods -----------------------------------------------------------------------------------------------------------


def test_unfinished_tls_handshakes_are_closed_and_block_none(secured: Secured, tmp_path: Path) -> None:
    config = secured.proxy_config() + "\n[limits]\nhandshake_seconds = 2.0\n"
    with ProxyProcess(secured.kafka.bootstrap_of("SECURED"), tmp_path, config=config) as proxy:
        host, _, port = proxy.bootstrap.rpartition(":")
        slow = [socket.create_connection((host, int(port))) for _ in range(100)]
        for each in slow:
            each.sendall(b"\x16\x03\x01\x02\x00\x01")
        # Other clients are served meanwhile.
        with SecuredConnection(proxy.bootstrap, secured.trusting()) as client:
            assert client.log_in(ADMIN) == 0
        for each in slow:
            each.settimeout(WAIT_SECONDS)
            with each:
                assert each.recv(1) in (b"", b"\x15")
        until(lambda: "no TLS handshake within 2 s (limits.handshake_seconds)" in proxy.log, "the reason in the log")
