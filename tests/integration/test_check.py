"""`fencepost check` against a Kafka with TLS, SASL and an authorizer, with correct and incorrect configurations."""

from __future__ import annotations

import json
import re
import shlex
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.cli.main import main
from fencepost_proxy.topics.state import encode_topic_config
from fencepost_proxy.types import Address
from tests.kit.waiting import until
from tests.support.certificates import Authority
from tests.support.messages import Fields, RawConnection
from tests.support.ports import free_port, free_ports_in_a_row
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, Record, batch
from tests.support.sasl_ssl import ADMIN, ALICE, BOB, CONTROL, Secured, logging_in, password, sasl_ssl_kafka
from tests.support.secured import PRODUCE, Sides, User, allow, deny, produce
from tests.support.tools import run_tools

pytestmark = pytest.mark.kafka

TOPIC = 2
CLUSTER = 4
READ, WRITE, CREATE, DESCRIBE, DESCRIBE_CONFIGS, IDEMPOTENT_WRITE = 3, 4, 5, 8, 10, 12
INCREMENTAL_ALTER_CONFIGS, DENIED = 44, 29
STATE_TOPIC = "__fencepost_state"
CHECKED_TOPICS = '[topics."checked-*"]\n"fencepost.check.expected.offsets" = "required"\n'


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with sasl_ssl_kafka(tmp_path_factory.mktemp("check")) as scene:
        yield scene


def switch_on(topic: str) -> Fields:
    check = {"Name": "fencepost.check.expected.offsets", "ConfigOperation": 0, "Value": "required"}
    resource = {"ResourceType": TOPIC, "ResourceName": topic, "Configs": [check]}
    return {"Resources": [resource], "ValidateOnly": False}


class Checked:
    def __init__(self, config: str, directory: Path, *options: str) -> None:
        self.file = directory / "fencepost.toml"
        self.file.write_text(config)
        self._options = options
        self.status, reported = self._run("--json")
        self.findings: list[dict[str, str]] = json.loads(reported)["findings"]

    def _run(self, *options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "fencepost_proxy", "check", "--config", str(self.file), "--seconds", "200"]
        done = subprocess.run([*command, *self._options, *options], capture_output=True, text=True, check=False)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout

    def text(self) -> str:
        """The text output; its exit status is the same."""
        status, reported = self._run()
        assert status == self.status
        return reported

    def of(self, state: str) -> dict[str, str]:
        """Subject → message of the findings in that state."""
        return {each["what"]: each["reported"] for each in self.findings if each["state"] == state}

    def todo(self, what: str) -> str:
        return " ".join(each["todo"] for each in self.findings if each["what"] == what)


def until_failed(config: str, directory: Path, requested: set[str]) -> Checked:
    """Repeat until ACL changes reach the broker."""

    observed: list[Checked] = []

    def probe() -> dict[str, str]:
        observed.append(Checked(config, directory))
        return observed[-1].of("failed")

    until(probe, f"failures of {requested}", seconds=120.0, accept=lambda failed: set(failed) == requested)
    return observed[-1]


def acl_commands(checked: Checked) -> list[str]:
    return [
        each for finding in checked.findings for each in finding["todo"].split(" && ") if each.startswith("kafka-acls")
    ]


def admin_login(secured: Secured, directory: Path) -> Path:
    """For `admin.properties` in suggested commands."""
    (login := directory / "admin.properties").write_text(
        "".join(f"{key}={value}\n" for key, value in secured.java(ADMIN).items())
    )
    return login


def listening(connect_seconds: int = 60) -> str:
    """The check connects once, and a busy machine may need longer."""
    return f"""
listen = "127.0.0.1:{free_ports_in_a_row(4)}"
limits.connect_timeout_seconds = {connect_seconds}
"""


def by(user: str, secured: Secured, directory: Path, more: str = "", connect_seconds: int = 60) -> str:
    """The config of a proxy that logs in as that user."""
    (secret := directory / "password").write_text(password(user) + "\n")
    secret.chmod(0o600)
    return f"""
upstream = "{secured.kafka.bootstrap_of("SECURED")}"
{listening(connect_seconds)}
[upstream_tls]
ca_file = "{secured.authority.file}"
[control_sasl]
mechanism = "PLAIN"
username = "{user}"
password_file = "{secret}"
{more}
"""


@pytest.mark.brokers
def test_a_set_up_that_works(secured: Secured, tmp_path: Path) -> None:
    secret = secured.login_files()[0]
    secret.chmod(0o600)
    secured.server.key.chmod(0o600)
    # The listeners' certificate is for this host.
    more = f'upstream = "{secured.kafka.bootstrap_of("SECURED")}"\nadvertised_host = "localhost"\n{listening()}'
    config = secured.proxy_config(more=more) + CHECKED_TOPICS

    checked = Checked(config, tmp_path)

    assert checked.status == 0
    assert checked.of("failed") == {}
    succeeded = checked.of("ok")
    upstream = secured.kafka.bootstrap_of("SECURED")
    assert succeeded[f"upstream {upstream}"] == f"TLSv1.3, SASL PLAIN as {CONTROL}, cluster {secured.kafka.cluster_id}"
    assert secured.kafka.cluster_id in succeeded["cluster"]
    assert "has all required APIs" in succeeded[f"broker 1 at {upstream}"]
    assert succeeded["a producer id"] == "allowed (IDEMPOTENT_WRITE)"
    assert "is free" in succeeded["listener for clients"]
    assert "is free" in succeeded["listener for broker 1"]
    assert "is valid until" in succeeded["listen_tls.certificate_file"]
    assert "checked-*" in checked.of("unknown")["topics in the file"]
    # And: the check changes nothing, however often it runs.
    assert "does not exist yet, and may be created" in succeeded[f"state topic {STATE_TOPIC}"]
    assert f"state topic {STATE_TOPIC}: does not exist yet" in checked.text()


@pytest.mark.brokers
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_java_client_properties_connect_each_command(
    secured: Secured, tmp_path: Path, mechanism: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def properties(name: str, **changed: str) -> Path:
        lines = secured.java(CONTROL, mechanism) | {"client.id": "mine"} | changed
        (file := tmp_path / name).write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        file.chmod(0o600)
        return file

    file, upstream = properties("client.properties"), secured.kafka.bootstrap_of("SECURED")
    login = secured.java(CONTROL, mechanism)["sasl.jaas.config"].replace(password(CONTROL), "wrong")
    wrong = properties("wrong.properties", **{"sasl.jaas.config": login})
    tls = f'[listen_tls]\ncertificate_file = "{secured.server.certificate}"\nkey_file = "{secured.server.key}"\n'
    more = ("--bootstrap-server", upstream, "--command-config")

    checked = Checked(listening() + tls, tmp_path, *more, str(file))
    refused = Checked(listening() + tls, tmp_path, *more, str(wrong))

    assert (checked.status, checked.of("failed")) == (0, {})
    assert f"SASL {mechanism} as {CONTROL}, cluster" in checked.of("ok")[f"upstream {upstream}"]
    assert main(["verify-broker", *more, str(wrong)]) == 2
    assert main(["verify-broker", *more, str(file), "--timeout", "1"]) == 1, "too short for all cases"
    assert "\nrequired      " in capsys.readouterr().out
    assert refused.status == 1
    assert "Authentication failed" in refused.of("failed")[f"upstream {upstream}"]
    status = f"127.0.0.1:{free_port()}"
    arguments = "--command-config", str(file), "--log-level", "debug", "--status", status
    with (
        Connection(secured.kafka.bootstrap) as admin,
        without_state_topic(admin),
        ProxyProcess(upstream, tmp_path, config=tls, arguments=arguments) as proxy,
    ):
        for command, address in product(("transactions", "expansions"), (upstream, proxy.bootstrap)):
            status = main([command, "--bootstrap-server", address, "--command-config", str(file), "--json"])
            assert status == 0, capsys.readouterr().err
            assert main([command, "--bootstrap-server", address, "--command-config", str(wrong)]) == 2
        topic = f"tools-{mechanism.lower()}"
        assert admin.create_topic(topic) == (0, None)
        for tool in (["append", topic, "first"], ["read", topic]):
            assert main([*tool, "--bootstrap-server", proxy.bootstrap, "--command-config", str(file)]) == 0
        assert re.search(r"client properties ignored file=\S+ properties=client\.id\n", proxy.log)
        socket.create_connection(Address.parse(proxy.bootstrap)).close()  # as a load balancer checks a port
        until(lambda: "connection closed before its TLS handshake" in proxy.log, "the port check")
        handshakes = [line for line in proxy.log.splitlines() if "WARNING" in line and "TLS" in line]
        assert handshakes == [], "a tool that connects and closes is no failed handshake"
        counted = {name for name in proxy.metrics() if name.startswith("fencepost_tls_handshakes_total")}
        assert counted == {'fencepost_tls_handshakes_total{result="ok"}'}


def test_kafka_without_authorizer_succeeds_and_proxy_upstream_fails(
    kafka: KafkaCluster, proxied: ProxyProcess, tmp_path: Path
) -> None:
    direct = Checked(f'upstream = "{kafka.bootstrap}"\n{listening()}{CHECKED_TOPICS}', tmp_path)
    by_mistake = Checked(f'upstream = "{proxied.bootstrap}"\n{listening()}{CHECKED_TOPICS}', tmp_path)

    assert (direct.status, direct.of("failed"), direct.of("unknown")) == (0, {}, {})
    assert "all operations are allowed" in direct.of("ok")["authorizer"]
    assert by_mistake.status == 1
    assert "is upstream a proxy?" in by_mistake.of("failed")[f"state topic {STATE_TOPIC}"]


def test_shared_ports_are_reported_for_true_topics(kafka: KafkaCluster, tmp_path: Path) -> None:
    with Connection(kafka.bootstrap) as admin:
        for name in ("shared-true", "shared-required"):
            assert admin.create_topic(name) == (0, None)
    checks = "".join(
        f'[topics."shared-{each}"]\n"fencepost.check.expected.offsets" = "{each}"\n' for each in ("true", "required")
    )
    config = f'upstream = "{kafka.bootstrap}"\n{listening()}'

    (one := tmp_path / "one").mkdir()
    alone = Checked(config + checks, one)
    several = Checked(f"reuse_port = true\n{config}{checks}", tmp_path)

    stated = "with reuse_port, wrong offsets are detected, not prevented: shared-true"
    assert [each["reported"] for each in several.findings if "reuse_port" in each["reported"]] == [stated]
    assert "reuse_port" not in str(alone.findings)


def test_broker_certificate_of_an_unknown_ca_fails(secured: Secured, tmp_path: Path) -> None:
    other = Authority(tmp_path / "other")
    config = by(CONTROL, secured, tmp_path).replace(str(secured.authority.file), str(other.file))

    checked = Checked(config, tmp_path)

    assert checked.status == 1
    (what,) = checked.of("failed")
    assert "its certificate is not trusted" in checked.of("failed")[what]
    assert "upstream_tls.ca_file" in checked.todo(what)
    assert "→ set upstream_tls.ca_file to the CA" in checked.text()


@contextmanager
def tls_server(context: ssl.SSLContext) -> Iterator[int]:
    """A server that completes TLS handshakes and does nothing else; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    near, _ = listener.accept()
                    with suppress(OSError), closing(context.wrap_socket(near, server_side=True)) as client:
                        client.recv(1)

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_brokers_whose_certificate_is_for_another_name(secured: Secured, tmp_path: Path) -> None:
    elsewhere = secured.authority.sign("elsewhere", names="DNS:kafka.example.com")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(elsewhere.certificate, elsewhere.key)
    with tls_server(context) as port:
        config = by(CONTROL, secured, tmp_path).replace(secured.kafka.bootstrap_of("SECURED"), f"127.0.0.1:{port}")
        checked = Checked(config, tmp_path)

    assert checked.status == 1
    assert "its certificate is for another name" in checked.of("failed")[f"upstream 127.0.0.1:{port}"]
    assert "advertised.listeners" in checked.todo(f"upstream 127.0.0.1:{port}")


def test_a_sidecar_before_a_listener_without_tls(secured: Secured, tmp_path: Path) -> None:
    """Kafka's other listeners have TLS. The proxy has one TLS configuration for both."""
    broker = secured.kafka.address(1, "LOOPBACK")
    what = f"sidecar of {broker}"
    beside = f'mode = "sidecar"\nbroker = "{broker}"\nadvertised_host = "127.0.0.1"\n'

    checked = Checked(beside + by(CONTROL, secured, tmp_path), tmp_path)

    assert checked.status == 1
    assert "does it speak TLS (upstream_tls)?" in checked.of("failed")[what]
    assert "broker_tls = false" in checked.todo(what)

    checked = Checked(f"{beside}broker_tls = false\n" + by(CONTROL, secured, tmp_path), tmp_path)

    assert "does not advertise this sidecar" in checked.of("failed")[what], "the proxy could not connect"


@pytest.mark.brokers
def test_right_to_claim_is_reported_with_its_command(secured: Secured, kafka: KafkaCluster, tmp_path: Path) -> None:
    claims = '[topics."claimed-*"]\n"fencepost.check.expected.offsets" = "required"\n"fencepost.claims" = "true"\n'

    lacking = Checked(by(ALICE, secured, tmp_path, claims), tmp_path)
    allowed = Checked(f'upstream = "{kafka.bootstrap}"\n{listening()}{claims}', tmp_path)
    without = Checked(f'upstream = "{kafka.bootstrap}"\n{listening()}{CHECKED_TOPICS}', tmp_path)

    assert "may not write transaction markers" in lacking.of("warning")["claims"]
    assert "--operation Alter --cluster" in lacking.todo("claims")
    assert "claims" in allowed.of("ok")
    assert "claims" not in [each["what"] for each in without.findings]


@pytest.mark.brokers
def test_missing_acl_is_reported_with_its_command(secured: Secured, tmp_path: Path) -> None:
    # Given: a topic that the file checks, and a user without ACLs.
    topic = "checked-orders"
    with Connection(secured.kafka.bootstrap) as admin:
        assert admin.create_topic(topic) == (0, None)
    until(lambda: Log(secured.kafka.bootstrap).end(topic) == 0, f"the leader of {topic}")
    config = by(ALICE, secured, tmp_path, CHECKED_TOPICS)

    # When: the user has no operation.
    checked = Checked(config, tmp_path)

    # Then:
    state = f"state topic {STATE_TOPIC}"
    assert checked.status == 1
    assert set(checked.of("failed")) == {state, "a producer id"}
    assert f"--allow-principal User:{ALICE}" in checked.todo(state)
    assert "--operation IdempotentWrite --cluster" in checked.todo("a producer id")
    assert "none visible to the proxy" in checked.of("unknown")["other topics"]
    assert "--topic PREFIX --resource-pattern-type prefixed" in checked.todo("other topics")
    assert "broker configs" in checked.of("warning")
    assert "transactional ids" in checked.of("warning")
    assert "consumer groups" in checked.of("unknown")

    # When: the user can describe a topic without WRITE, and create the state topic without READ.
    for operation in (DESCRIBE, READ):
        allow(secured.kafka, ALICE, TOPIC, topic, operation)
    for operation in (DESCRIBE, CREATE, WRITE):
        allow(secured.kafka, ALICE, TOPIC, STATE_TOPIC, operation)
    checked = until_failed(config, tmp_path, {state, "topics in the file"})
    assert checked.of("failed")[state] == "once it exists, the proxy may not READ it"
    assert checked.of("failed")["topics in the file"] == f"the proxy may not WRITE: {topic}"
    assert f"--operation Write --topic {topic}" in checked.todo("topics in the file")

    # When: all suggested ACLs exist.
    allow(secured.kafka, ALICE, TOPIC, topic, WRITE)
    allow(secured.kafka, ALICE, TOPIC, STATE_TOPIC, READ)
    assert until_failed(config, tmp_path, set()).status == 0


def test_every_suggested_command_runs_and_all_are_enough(secured: Secured, tmp_path: Path) -> None:
    # Given: checked topics, some of which exist, an unchecked topic, and a user without ACLs.
    with Connection(secured.kafka.bootstrap) as admin:
        for name in ("checked-1", "checked-2", "other"):
            assert admin.create_topic(name) == (0, None)
    absent = '[topics."ordered-*"]\n"fencepost.ordered.partition.expansion" = "true"\n'
    config = f'status = "127.0.0.1:{free_port()}"\n' + by(BOB, secured, tmp_path, CHECKED_TOPICS + absent)
    login = admin_login(secured, tmp_path)
    observed: list[Checked] = []
    done: set[str] = set()

    def suggested() -> list[str]:
        observed.append(Checked(config, tmp_path))
        return [each.replace("PREFIX", "other") for each in acl_commands(observed[-1])]

    # When: an administrator runs the suggested commands until there are no new ones.
    until(suggested, "findings", accept=bool)
    while new := [each for each in suggested() if each not in done]:
        done.update(new)
        run_tools([shlex.split(each.replace("admin.properties", str(login))) for each in new], tmp_path)

    # Then: no finding remains, once the brokers know all ACLs.
    until(suggested, "no more findings", accept=lambda left: not left)
    assert observed[-1].status == 0
    stated = str(sorted(done))
    assert "--topic checked- --resource-pattern-type prefixed" in stated
    assert "--operation Alter --topic ordered- --resource-pattern-type prefixed" in stated
    assert "may be read (READ)" in observed[-1].of("ok")["transaction watch"]


def test_missing_topic_rights_of_the_proxy_are_named(secured: Secured, tmp_path: Path) -> None:
    """After commands of `fencepost check` that name no topic: what is reported to admins, producers and operators."""
    kafka, user, topic, status = secured.kafka, "gateway", "gateway-orders", f"127.0.0.1:{free_port()}"
    for operation in (READ, WRITE, CREATE, DESCRIBE, DESCRIBE_CONFIGS):
        allow(kafka, user, TOPIC, STATE_TOPIC, operation)
    allow(kafka, user, CLUSTER, "kafka-cluster", IDEMPOTENT_WRITE)
    (secret := tmp_path / "gateway").write_text(password(user))
    login = f'[control_sasl]\nmechanism = "PLAIN"\nusername = "{user}"\npassword_file = "{secret}"\n'
    upstream = kafka.bootstrap_of("LOOPBACK")
    with Connection(kafka.bootstrap) as admin:
        assert admin.create_topic(topic) == (0, None)
    with (
        Connection(kafka.bootstrap) as admin,
        without_state_topic(admin),
        ProxyProcess(upstream, tmp_path, config=login, arguments=("--status", status)) as proxy,
    ):
        through = Sides(kafka, proxy).through

        def altered() -> tuple[int, str]:
            with User(through, ADMIN) as client:
                (response,) = client.query(INCREMENTAL_ALTER_CONFIGS, 1, switch_on(topic))["Responses"]
            return response["ErrorCode"], response["ErrorMessage"]

        def appended(expected: int) -> tuple[int, str]:
            with User(through, ADMIN) as client:
                body = produce(topic, batch(b"x", expected=expected))
                (response,) = client.query(PRODUCE, 9, body)["Responses"][0]["PartitionResponses"]
            return response["ErrorCode"], response["ErrorMessage"]

        def problem() -> str:
            return " ".join(each["what"] + each["do"] for each in json.loads(proxy.page("/status.json"))["problems"])

        begun = time.monotonic()
        code, message = altered()
        assert time.monotonic() - begun < 10, "it waits, although no repetition helps"
        assert code == DENIED
        assert f"User:{user}, the proxy's user, may not READ and WRITE and DESCRIBE {topic}" in message
        every = "--operation Read --operation Write --operation Describe --operation DescribeConfigs"
        assert f"{every} --topic {topic}" in message
        assert re.search(r"ERROR .* virtual configs could not be stored .*kafka-acls", proxy.log)
        allow(kafka, user, TOPIC, topic, READ)
        assert f"may not WRITE {topic} " in altered()[1]
        allow(kafka, user, TOPIC, topic, WRITE)
        assert altered()[0] == 0
        assert appended(0)[0] == 0

        deny(kafka, user, TOPIC, topic, READ)
        code, message = until(lambda: appended(2), "a refusal", accept=lambda it: it[0] == DENIED)
        assert message.startswith(f"NOT_AUTHORIZED topic={topic}: the proxy's own user lacks READ")
        stated = until(problem, "the problem on the page", accept=lambda text: "kafka-acls" in text)
        assert f"User:{user}, the proxy's user, may not READ {topic}" in stated
        deny(kafka, user, TOPIC, topic, DESCRIBE)
        until(lambda: f"may not READ and WRITE and DESCRIBE {topic}" in problem(), "the hidden topic", seconds=30.0)
        assert appended(2)[0] == DENIED


def test_command_that_adds_replicas_to_the_state_topic(kafka3: KafkaCluster, tmp_path: Path) -> None:
    config = f'upstream = "{kafka3.bootstrap}"\n{listening()}'
    with Connection(str(kafka3.address(1))) as admin, without_state_topic(admin):
        assert admin.create_topic(STATE_TOPIC, on=[1], configs={"cleanup.policy": "compact"}) == (0, None)
        what = f"state topic {STATE_TOPIC}"
        warned = until(lambda: Checked(config, tmp_path), "a warning", accept=lambda it: what in it.of("warning"))
        assert "it has 1 replica(s)" in warned.of("warning")[what]

        echo, tool = warned.todo(what).split("; ")
        (tmp_path / "admin.properties").touch()
        subprocess.run(["sh", "-c", echo], cwd=tmp_path, check=True)
        words = [
            str(tmp_path / word) if word.endswith((".json", ".properties")) else word for word in shlex.split(tool)
        ]
        run_tools([words], tmp_path)

        until(lambda: Checked(config, tmp_path).of("warning"), "three replicas", accept=lambda left: what not in left)


def test_taken_ports_and_servers_that_are_not_there(secured: Secured, tmp_path: Path) -> None:
    absent = f"127.0.0.1:{free_port()}"
    upstream = secured.kafka.bootstrap_of("SECURED")
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as hangs:
        port = taken.getsockname()[1]
        silent = f"127.0.0.1:{hangs.getsockname()[1]}"
        ports = f"[broker_ports]\n1 = {port}\n"
        config = by(CONTROL, secured, tmp_path, ports)
        some = Checked(config.replace(upstream, f"{upstream},{absent}"), tmp_path)
        impatient = by(CONTROL, secured, tmp_path, ports, connect_seconds=1)
        none = Checked(impatient.replace(upstream, f"{absent},{silent}"), tmp_path)
        running = Checked(config, tmp_path, "--running")

    # A proxy starts with one of two servers, but not with a port that is in use.
    assert some.status == 1
    assert set(some.of("failed")) == {"listener for broker 1"}
    assert "another process listens there" in some.of("failed")["listener for broker 1"]
    assert "--running" in some.todo("listener for broker 1")
    assert "refused" in some.of("warning")[f"upstream {absent}"]
    # No server responds: everything that depends on it is unknown.
    assert none.status == 1
    assert {f"upstream {absent}", f"upstream {silent}"} <= set(none.of("failed"))
    assert "nothing listens there" in none.todo(f"upstream {absent}")
    assert "no TLS handshake within 1 s" in none.of("failed")[f"upstream {silent}"]
    assert "listeners for brokers" in none.of("unknown")
    # A running proxy occupies its ports. Its bootstrap listener is missing.
    assert running.of("ok")["listener for broker 1"] == f"127.0.0.1:{port}: in use"
    assert "nothing listens there" in running.of("failed")["listener for clients"]


@pytest.mark.parametrize(
    ("command", "begins"),
    [
        (("append", "orders", "first", "--expect", "0"), "fencepost: nothing was sent: cannot"),
        (("read", "orders"), "fencepost: cannot"),
        (("expansions",), "fencepost: cannot"),
        (("transactions",), "fencepost: cannot"),
    ],
)
def test_commands_say_at_once_why_they_cannot_connect(
    secured: Secured, tmp_path: Path, command: tuple[str, ...], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kafka's clients retry each of these until a timeout, and report only that."""
    there, other = secured.kafka.bootstrap_of("SECURED"), Authority(tmp_path / "other")
    login = secured.java(CONTROL)
    jaas = login["sasl.jaas.config"].replace(password(CONTROL), "wrong")

    def failed(reason: str, todo: str, properties: Mapping[str, str], bootstrap: str = there) -> None:
        (file := tmp_path / "client.properties").write_text("".join(f"{k}={v}\n" for k, v in properties.items()))
        file.chmod(0o600)
        begun = time.monotonic()
        assert main([*command, "--bootstrap-server", bootstrap, "--command-config", str(file)]) == 2
        assert time.monotonic() - begun < 15
        stated = capsys.readouterr().err.splitlines()[-1]
        assert stated.startswith(begins), stated
        assert reason in stated, stated
        assert todo in stated, stated
        assert "upstream_tls" not in stated, stated
        assert "control_sasl" not in stated, stated

    failed("Connection refused", "nothing listens there", login, f"127.0.0.1:{free_port()}")
    failed("Authentication failed", "check username and password", {**login, "sasl.jaas.config": jaas})
    untrusted = {**login, "ssl.truststore.location": str(other.file)}
    failed("its certificate is not trusted", "set ssl.truststore.location", untrusted)
    without_tls = {"security.protocol": "PLAINTEXT"}
    failed("TLS", "set security.protocol to SSL or SASL_SSL", without_tls)
    without_login = {key: value for key, value in login.items() if not key.startswith("sasl")}
    failed("", "SASL_SSL, and the login", {**without_login, "security.protocol": "SSL"})


def test_a_login_that_is_wrong_or_missing(secured: Secured, tmp_path: Path) -> None:
    upstream = f"upstream {secured.kafka.bootstrap_of('SECURED')}"
    config = by(CONTROL, secured, tmp_path)
    (tmp_path / "password").write_text("not the one\n")

    wrong = Checked(config, tmp_path)
    without = Checked(config.partition("[control_sasl]")[0], tmp_path)

    assert (wrong.status, without.status) == (1, 1)
    assert f"SASL PLAIN as {CONTROL}: Authentication failed" in wrong.of("failed")[upstream]
    assert "control_sasl.username" in wrong.todo(upstream)
    assert "add the table [control_sasl]" in without.todo(upstream)
    assert "not the one" not in wrong.text() + str(wrong.findings)


def test_it_ends_when_its_time_is_up(secured: Secured, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        silent = f"127.0.0.1:{hangs.getsockname()[1]}"
        config = by(CONTROL, secured, tmp_path)
        checked = Checked(config.replace(secured.kafka.bootstrap_of("SECURED"), silent), tmp_path, "--seconds", "1")

    assert checked.status == 1
    assert "check not finished within 1 s" in checked.of("failed")["time"]
    # Findings about the local machine are still reported.
    assert "is free" in checked.of("ok")["listener for clients"]


def test_invalid_configuration_is_reported_with_line_numbers(tmp_path: Path) -> None:
    checked = Checked('upstream = "a:1"\nlistne = "b:2"\n[limits]\ndrain_seconds = 0\n', tmp_path)

    stated: list[Any] = [(each["state"], each["reported"]) for each in checked.findings]
    assert checked.status == 2
    assert stated == [
        ("failed", f"{checked.file}:2: listne: unknown key; did you mean 'listen'?"),
        ("failed", f"{checked.file}:4: limits.drain_seconds: must be above 0, not 0.0"),
    ]
    assert "FAILED" in checked.text()


@contextmanager
def without_state_topic(admin: Connection) -> Iterator[None]:
    """Delete the state topic afterwards: other tests check a cluster without it."""
    try:
        yield
    finally:
        admin.delete_topic(STATE_TOPIC)


def test_topics_on_which_admins_have_set_a_check(secured: Secured, tmp_path: Path) -> None:
    # Given: stored checks of an existing topic, of a recreated topic, and of a topic in the file.
    there, again, listed = "set-orders", "set-again", "checked-but-off"
    with Connection(secured.kafka.bootstrap) as admin, without_state_topic(admin):
        assert admin.create_topic(STATE_TOPIC, configs={"cleanup.policy": "compact"}) == (0, None)
        for topic in (there, again, listed):
            assert admin.create_topic(topic) == (0, None)
        known = until(
            lambda: admin.metadata(there, again, listed).topics,
            "brokers to know these topics",
            accept=lambda topics: not any(each.error_code for each in topics),
        )
        ids = {each.name: each.topic_id for each in known}
        for topic, topic_id, check in (
            (there, ids[there], "required"),
            (again, UUID(int=7), "required"),
            (listed, ids[listed], "false"),
        ):
            key, value = encode_topic_config(topic, topic_id, {"fencepost.check.expected.offsets": check})
            # Retry while the state topic has no leader: then nothing is appended.
            stored = partial(admin.append, STATE_TOPIC, batch(Record(value, key=key)))
            until(lambda stored=stored: stored().error_code == 0, f"{topic} to be stored")  # type: ignore[misc]
        for operation in (DESCRIBE, READ, WRITE):
            allow(secured.kafka, ALICE, TOPIC, STATE_TOPIC, operation)
        for topic in (there, again, listed):
            allow(secured.kafka, ALICE, TOPIC, topic, DESCRIBE)
        allow(secured.kafka, ALICE, TOPIC, listed, WRITE)
        config = by(ALICE, secured, tmp_path, CHECKED_TOPICS)

        # Then: ACLs are missing on the first topic and on the recreated topic, which keeps its checks.
        checked = until_failed(config, tmp_path, {"topics set by admins"})
        assert checked.of("failed")["topics set by admins"] == f"the proxy may not READ and WRITE: {again}, {there}"
        suggested_options = f"--operation Read --operation Write --topic {again} --topic {there}"
        assert suggested_options in checked.todo("topics set by admins")
        stated = str(checked.findings)
        assert f"unchecked despite the file: {listed}" in stated
        assert f"has min.insync.replicas=1: {there}" not in stated  # the user cannot read its configs

        # When: the user can read them.
        for topic, operation in product((there, again), (READ, WRITE, DESCRIBE_CONFIGS)):
            allow(secured.kafka, ALICE, TOPIC, topic, operation)
        checked = until_failed(config, tmp_path, set())
        stated = [each["reported"] for each in checked.findings if each["what"] == "topics set by admins"]
        assert f"all required operations on 2 topic(s): {again}, {there}" in stated
        assert f"has min.insync.replicas=1: {again}, {there}" in stated
        assert "set it to 2" in checked.todo("topics set by admins")


def test_suggested_commands_prevent_direct_appends(secured: Secured, tmp_path: Path) -> None:
    """A client at another address than the proxy can append directly at first, and in the end through it alone."""
    # Given: a checked topic, a client that may write it from everywhere, and a proxy.
    kafka, user, topic, client_host = secured.kafka, "member", "checked-by-kafka", "127.0.0.2"
    allow(kafka, user, TOPIC, topic, WRITE)
    (secret := tmp_path / "control").write_text(password(CONTROL))
    login = f'{CHECKED_TOPICS}[control_sasl]\nmechanism = "PLAIN"\nusername = "{CONTROL}"\npassword_file = "{secret}"\n'
    upstream = kafka.bootstrap_of("LOOPBACK")
    checks = by(CONTROL, secured, tmp_path, CHECKED_TOPICS)
    with (
        Connection(kafka.bootstrap) as admin,
        without_state_topic(admin),
        ProxyProcess(upstream, tmp_path, config=login) as proxy,
    ):
        assert admin.create_topic(topic) == (0, None)

        def appended(address: str, records: bytes) -> int:
            opened = socket.create_connection(Address.parse(address), 60, source_address=(client_host, 0))
            with RawConnection.over(logging_in(user)(opened)) as client:
                (response,) = client.query(PRODUCE, 9, produce(topic, records))["Responses"][0]["PartitionResponses"]
            return int(response["ErrorCode"])

        # When: Kafka lets the client bypass the proxy, `check` says so.
        until(lambda: appended(upstream, batch(b"direct")) == 0, "an append that bypasses the proxy")
        checked = Checked(checks, tmp_path)
        stated = f"WRITE on {topic} is allowed to User:{user} from host *: can bypass the proxy"
        assert stated in [each["reported"] for each in checked.findings if each["state"] == "warning"]
        assert checked.status == 0

        # When: an administrator runs the suggested commands.
        commands = [
            each.replace("admin.properties", str(admin_login(secured, tmp_path))) for each in acl_commands(checked)
        ]
        run_tools([shlex.split(each) for each in commands], tmp_path)

        # Then: Kafka refuses the client, except through the proxy.
        until(lambda: appended(upstream, batch(b"direct")) == DENIED, "Kafka to refuse direct appends")
        end = Log(kafka.bootstrap).end(topic)
        until(lambda: appended(proxy.bootstrap, batch(b"x", expected=end)) == 0, "an append through the proxy")
        assert "bypassing is prevented by Kafka" in Checked(checks, tmp_path).of("ok")["checked topics"]
