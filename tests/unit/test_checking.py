"""`fencepost check` without Kafka: files, names, limits, and its report."""

from __future__ import annotations

import argparse
import asyncio
import resource
import socket
from pathlib import Path

import pytest

from fencepost_proxy.cli import check as command
from fencepost_proxy.cluster import authorized
from fencepost_proxy.config import ControlSasl, Limits, ListenTls, ProxyConfig, UpstreamTls
from fencepost_proxy.preflight import checking, rights
from fencepost_proxy.preflight.findings import Finding, Group, State
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.schema import Message
from tests.support.certificates import Authority
from tests.support.ports import free_port

UPSTREAM = (Address("kafka", 9092),)


def states(found: list[Finding]) -> dict[str, str]:
    return {each.what: each.state.value for each in found}


def stated(found: list[Finding], what: str) -> str:
    return " / ".join(each.reported for each in found if each.what == what)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


# --- files ------------------------------------------------------------------------------------------------------------


def test_certificates_that_end_or_have_ended(authority: Authority) -> None:
    for days, state in ((30, "ok"), (5, "warning"), (-1, "failed")):
        made = authority.sign(f"for-{days}", days=days)
        made.key.chmod(0o600)
        config = ProxyConfig(UPSTREAM, listen_tls=ListenTls(made.certificate, made.key), upstream_tls=UpstreamTls())
        found = list(checking._files(config))
        assert states(found) == {"listen_tls.certificate_file": state}, found
        assert "chmod" not in str(found)


def test_secrets_that_everybody_may_read(authority: Authority, tmp_path: Path) -> None:
    made = authority.sign("open")
    (password := tmp_path / "password").write_text("hunter2\n")
    sasl = ControlSasl("SCRAM-SHA-512", "me", password)
    tls = ListenTls(made.certificate, made.key)
    config = ProxyConfig(UPSTREAM, listen_tls=tls, upstream_tls=UpstreamTls(), control_sasl=sasl)
    for file in (made.key, password):
        file.chmod(0o644)

    loose = list(checking._files(config))
    for file in (made.key, password):
        file.chmod(0o640)
    tight = list(checking._files(config))

    assert [each.todo for each in loose if each.state is State.WARNING] == [
        f"chmod o= {made.key}",
        f"chmod o= {password}",
    ]
    assert {each.state for each in tight} == {State.OK}
    assert "hunter2" not in str(loose)


def test_missing_and_mismatched_files_are_reported(authority: Authority, tmp_path: Path) -> None:
    one, two = authority.sign("one"), authority.sign("two")
    config = ProxyConfig(
        UPSTREAM,
        listen_tls=ListenTls(one.certificate, two.key),
        upstream_tls=UpstreamTls(ca_file=tmp_path / "absent"),
        control_sasl=ControlSasl("OAUTHBEARER", token_file=tmp_path / "missing"),
    )

    found = [each for each in checking._files(config) if each.state is State.FAILED]

    assert [each.what for each in found] == ["listen_tls.key_file", "upstream_tls.ca_file", "control_sasl.token_file"]
    assert "is not that of the certificate" in found[0].reported
    assert found[0].todo == "correct the file, or use another one"
    assert "cannot be read: No such file" in found[1].reported


@pytest.mark.parametrize(
    ("names", "host", "fits"),
    [
        ("DNS:kafka.example.com", "kafka.example.com", True),
        ("DNS:kafka.example.com", "KAFKA.example.com.", True),
        ("DNS:*.example.com", "kafka.example.com", True),
        ("DNS:*.example.com", "a.kafka.example.com", False),
        ("DNS:*.example.com", "example.com", False),
        ("DNS:kafka.example.com,IP:10.0.0.1", "10.0.0.1", True),
        ("DNS:kafka.example.com,IP:10.0.0.1", "10.0.0.2", False),
        ("IP:::1", "0:0:0:0:0:0:0:1", True),
    ],
)
def test_certificate_must_match_the_advertised_host(authority: Authority, names: str, host: str, fits: bool) -> None:
    made = authority.sign("names", names=names)
    config = ProxyConfig(UPSTREAM, advertised_host=host, listen_tls=ListenTls(made.certificate, made.key))
    found = [each for each in checking._files(config) if "advertised_host" in each.reported]
    assert bool(found) is not fits
    assert all(each.state is State.FAILED and host in each.todo for each in found)


def test_plaintext_connections_are_reported(tmp_path: Path) -> None:
    (password := tmp_path / "password").write_text("p\n")
    password.chmod(0o600)
    found = list(checking._files(ProxyConfig(UPSTREAM, control_sasl=ControlSasl("PLAIN", "me", password))))
    one_side = list(checking._files(ProxyConfig(UPSTREAM, upstream_tls=UpstreamTls())))
    assert states(found)["control_sasl.mechanism"] == "warning"
    assert "from clients to the proxy" in stated(one_side, "TLS")
    assert list(checking._files(ProxyConfig(UPSTREAM))) == []


# --- this machine -----------------------------------------------------------------------------------------------------


def test_fewer_open_files_than_clients_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    (many,) = checking._machine(ProxyConfig(UPSTREAM))
    (few,) = checking._machine(ProxyConfig(UPSTREAM, limits=Limits(connections_max=100)))
    assert (many.state, many.todo) == (State.WARNING, "ulimit -n 4200, or LimitNOFILE=4200 in the unit")
    assert few.state is State.OK


def test_ports_of_listeners() -> None:
    async def probe(config: ProxyConfig, brokers: list[NodeId] | None, running: bool = False) -> list[Finding]:
        return await checking._listeners(config, brokers, running)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ProxyConfig(UPSTREAM, listen=Address("127.0.0.1", free_port()), broker_ports={NodeId(2): port})
        found = asyncio.run(probe(config, [NodeId(2)]))
        absent = asyncio.run(probe(config, [NodeId(1)]))
        running = asyncio.run(probe(config, [NodeId(2)], running=True))
        no_brokers = asyncio.run(probe(config, None))

    assert states(found) == {"listener for clients": "ok", "listener for broker 2": "failed"}
    assert "another process listens there" in stated(found, "listener for broker 2")
    assert "names broker(s) 2, which are not in the cluster now" in stated(absent, "broker_ports")
    assert states(running) == {"listener for clients": "failed", "listener for broker 2": "ok"}
    assert states(no_brokers)["listeners for brokers"] == "unknown"
    assert states(no_brokers)["listener for broker 2"] == "failed"


def test_a_broker_id_that_leaves_no_port(tmp_path: Path) -> None:
    config = ProxyConfig(UPSTREAM, listen=Address("127.0.0.1", 60_000))
    found = asyncio.run(checking._listeners(config, [NodeId(1), NodeId(9_000)], False))
    assert "is not from 1 to 65535" in stated(found, "listener for broker 9000")


def test_unknown_host_is_a_warning() -> None:
    there = asyncio.run(checking._resolves("localhost"))
    nowhere = asyncio.run(checking._resolves("a..b"))
    assert (there.state, nowhere.state) == (State.OK, State.WARNING)


# --- Kafka ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "release"),
    [(0, "older than 3.0"), (7, "3.3"), (21, "3.9"), (25, "4.0"), (33, "4.4"), (34, "newer than 4.4")],
)
def test_release_is_derived_from_its_level(level: int, release: str) -> None:
    assert checking.release_of(level) == release


def test_authorized_operations_are_bits() -> None:
    for bits, missing in ((1 << 3 | 1 << 8, ["WRITE"]), (0, ["READ", "WRITE"]), (-(1 << 31), [])):
        assert authorized.missing(Message(topic_authorized_operations=bits), ("READ", "WRITE")) == missing


@pytest.mark.parametrize(
    ("glob", "resource", "exact"),
    [
        ("orders", "--topic orders", True),
        ("orders-*", "--topic orders- --resource-pattern-type prefixed", True),
        ("*", "--topic '*'", True),
        ("orders-?", "--topic orders- --resource-pattern-type prefixed", False),
        ("a*-[bc]", "--topic a --resource-pattern-type prefixed", False),
        ("*-orders", "--topic '*'", False),
    ],
)
def test_glob_becomes_a_resource_pattern(glob: str, resource: str, exact: bool) -> None:
    assert rights._topics_of(glob) == (resource, exact)


# --- how it is reported -----------------------------------------------------------------------------------------------


def test_the_list_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    kafka, files = Group("Kafka"), Group("files")
    found = [
        kafka.ok("one", "is healthy"),
        files.failed("two", "is not", "mend it"),
        kafka.warning("three", "a foreign name: \x1b[31m", "check it"),
        files.unknown("four", "no answer"),
    ]

    command._report(argparse.Namespace(json=False), found)

    assert capsys.readouterr().out.splitlines() == [
        "Kafka",
        "  ok       one: is healthy",
        "  warning  three: a foreign name: \\x1b[31m",
        "           → check it",
        "files",
        "  FAILED   two: is not",
        "           → mend it",
        "  unknown  four: no answer",
        "",
        "4 checks: 1 ok, 1 unknown, 1 warning, 1 FAILED",
    ]


@pytest.mark.parametrize(
    ("hosts", "homes", "state"),
    [
        (["10.0.0.1"], True, State.OK),
        (["10.0.0.1", "fd00::1"], True, State.OK),
        (["10.0.0.1", "10.0.0.2"], True, State.WARNING),
        (["10.0.0.1", "10.0.0.2"], False, State.OK),
    ],
)
async def test_home_address_must_lead_to_one_proxy(
    hosts: list[str], homes: bool, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look_up(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET6 if ":" in each else socket.AF_INET, 1, 6, "", (each, 0)) for each in hosts]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    found = await checking._resolves("proxies", alone=homes)
    assert found.state is state
    assert ("leads to this proxy alone" in found.todo) is (state is State.WARNING)
    assert ("must lead to this proxy alone" in found.reported) is (homes and state is State.OK)
