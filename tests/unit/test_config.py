"""The configuration: its keys and their documentation, the sources of values, and errors that say what to change."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest

from fencepost_proxy.cli import proxy
from fencepost_proxy.cli.main import main
from fencepost_proxy.config import ControlSasl, Limits, ListenTls, ProxyConfig, Refused, UpstreamTls
from fencepost_proxy.config.keys import KEYS, SHOWN, TABLES, Key, variable
from fencepost_proxy.config.locating import lines_of
from fencepost_proxy.config.reading import read
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.sequencer.events import SequencerLimits
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS
from fencepost_proxy.types import Address, NodeId

ROOT = Path(__file__).parents[2]
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "fencepost.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in SHOWN:
        for name in key.variables:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("FENCEPOST_CONFIG", raising=False)


def stated(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words]) == 0
    return capsys.readouterr().out


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_field_is_a_key_or_a_table() -> None:
    known = {each.field_name for each in KEYS.values() if not each.table} | set(TABLES)
    assert {each.name for each in fields(ProxyConfig)} == known
    assert [each.name for each in KEYS.values() if each.hidden] == ["unsafe_disable_fencing"]


@pytest.mark.parametrize("key", SHOWN, ids=lambda key: key.name)
def test_every_key_has_documentation_and_an_example(key: Key) -> None:
    assert len(key.doc) > 10
    assert key.example is not None or key.default or key.default == 0, "give it example="


def test_command_line_options_match_the_key_table() -> None:
    parser = argparse.ArgumentParser()
    proxy.add_settings(parser)
    options = {option for action in parser._actions for option in action.option_strings}
    files = {"--config", "--command-config"}
    assert options - {"-h", "--help", "--upstream"} - files == {key.option for key in SHOWN if key.option}


# --- what is explained ------------------------------------------------------------------------------------------------


def test_example_file_has_every_key_and_loads(capsys: pytest.CaptureFixture[str], write: Write) -> None:
    example = stated("config", "explain", "--toml", capsys=capsys)
    # A login is by password or by token.
    everything = re.sub(r"^#(?! |$)", "", example, flags=re.MULTILINE).replace("\ntoken_file =", "\n# token_file =")

    nearly_empty = read(write(example))
    whole = write(everything.replace('client_certificates = "none"', 'client_certificates = "required"'))
    full = read(whole)

    assert set(nearly_empty.origins) == {"upstream"}
    assert nearly_empty.config.limits == ProxyConfig(upstream=(Address("a", 1),)).limits
    assert set(full.origins) == {key.name for key in SHOWN} - {"control_sasl.token_file"}
    assert full.config.broker_ports == {NodeId(1): 20001, NodeId(2): 20002}
    assert all(name in example for name in VIRTUAL_CONFIGS)


def test_explain_shows_every_fact_of_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    text = stated("config", "explain", "limits.drain_seconds", capsys=capsys)

    for part in (
        "Maximum time for requests in progress",
        "number of seconds, above 0",
        "10.0",
        "[limits]",
        "FENCEPOST_LIMITS__DRAIN_SECONDS=10.0",
        "applied without a restart",
    ):
        assert part in text


@pytest.mark.parametrize("name", [*(key.name for key in SHOWN), *TABLES, *VIRTUAL_CONFIGS, "drain_seconds"])
def test_whatever_has_a_name_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in stated("config", "explain", name, capsys=capsys)


@pytest.mark.parametrize(
    ("queried", "meant"),
    [("limit.drain_second", "limits.drain_seconds"), ("drain_secs", "limits.drain_seconds"), ("listn", "listen")],
)
def test_unknown_key_suggests_the_closest_key(queried: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "explain", queried]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


# --- which value wins -------------------------------------------------------------------------------------------------


def test_command_line_overrides_environment_and_environment_overrides_file(write: Write) -> None:
    file = write('upstream = "f:1"\nlisten = "f:2"\nstatus = "f:3"\n[log]\nlevel = "error"\nformat = "json"\n')
    environment = {"FENCEPOST_LISTEN": "e:2", "FENCEPOST_STATUS": "e:3", "FENCEPOST_LOG__LEVEL": "debug"}
    loaded = read(file, {"status": "c:3"}, environment=environment)

    config = loaded.config
    assert (config.upstream, config.listen, config.status) == ((Address("f", 1),), Address("e", 2), Address("c", 3))
    assert (config.log.level, config.log.format) == ("debug", "json")
    assert loaded.origins == {
        "upstream": f"{file}:1",
        "listen": "environment FENCEPOST_LISTEN",
        "status": "command line",
        "log.level": "environment FENCEPOST_LOG__LEVEL",
        "log.format": f"{file}:6",
    }
    assert loaded.origin("reuse_port") == "default"


def test_every_kind_of_value_comes_through_the_environment() -> None:
    config = read(
        environment={
            "FENCEPOST_UPSTREAM": "a:1, b:2",
            "FENCEPOST_LIMITS__CONNECTIONS_MAX": "7",
            "FENCEPOST_LIMITS__DRAIN_SECONDS": "2.5",
            "FENCEPOST_WATCH_TRANSACTIONS": "false",
            "FENCEPOST_BROKER_PORTS": "{ 1 = 20001 }",
            "FENCEPOST_TOPICS": '{ "orders-*" = { "fencepost.check.expected.offsets" = "required" } }',
            "FENCEPOST_UPSTREAM_TLS": "{}",
            "FENCEPOST_CONTROL_SASL": '{ mechanism = "PLAIN", username = "a" }',
            "FENCEPOST_CONTROL_SASL__PASSWORD_FILE": "/p",
            "FENCEPOST_ADVERTISED_HOST": "",
        }
    ).config

    assert config.upstream == (Address("a", 1), Address("b", 2))
    assert (config.limits.connections_max, config.limits.drain_seconds) == (7, 2.5)
    assert not config.watch_transactions
    assert config.broker_ports == {NodeId(1): 20001}
    assert config.configs_for("orders-1") == {"fencepost.check.expected.offsets": "required"}
    assert config.upstream_tls is not None
    assert config.control_sasl is not None
    assert config.control_sasl.password_file == Path("/p")
    assert config.advertised_host is None


def test_bootstrap_server_variable_sets_upstream() -> None:
    loaded = read(environment={"FENCEPOST_BOOTSTRAP_SERVER": "a:1,b:2"})
    assert loaded.config.upstream == (Address("a", 1), Address("b", 2))
    assert loaded.origin("upstream") == "environment FENCEPOST_BOOTSTRAP_SERVER"


def test_unknown_keys_of_one_variable_keep_their_order() -> None:
    names = [f"zz{number}" for number in range(9)]
    text = f"{{ {', '.join(f'{name} = 1' for name in names)} }}"
    with pytest.raises(Refused) as refused:
        read(environment={"FENCEPOST_UPSTREAM": "a:1", "FENCEPOST_LOG": text})
    assert [each.key for each in refused.value.problems] == [f"log.{name}" for name in names]


def test_two_variables_of_a_key_are_refused() -> None:
    names = "FENCEPOST_UPSTREAM", "FENCEPOST_BOOTSTRAP_SERVER"
    with pytest.raises(Refused, match=r"FENCEPOST_UPSTREAM: upstream: is also set by FENCEPOST_BOOTSTRAP_SERVER"):
        read(environment=dict.fromkeys(names, "a:1"))


def test_foreign_environment_variables_are_ignored() -> None:
    """Kubernetes sets variables of every service in every container, and the service is likely called fencepost. Those
    that this repository uses may be exported where a proxy starts."""
    used = set()
    for pattern in ("*.yml", "*.md", "Makefile", "deploy/**/*", "docs/*.md", "tests/**/*.py", "proxy/**/*.py"):
        for file in ROOT.glob(pattern):
            if file.is_file() and file.name != Path(__file__).name:
                used.update(re.findall(r"\bFENCEPOST_[A-Z][A-Z_]*[A-Z]\b", file.read_text("utf-8", "ignore")))
    others = used - {name for key in KEYS.values() for name in key.variables} - {variable((name,)) for name in TABLES}
    assert {"FENCEPOST_IMAGE", "FENCEPOST_BROKER_PORT", "FENCEPOST_CONFIG"} <= others
    by_kubernetes = {
        "FENCEPOST_SERVICE_HOST": "10.0.0.1",
        "FENCEPOST_SERVICE_PORT_KAFKA": "19092",
        "FENCEPOST_PORT": "tcp://10.0.0.1:19092",
        "FENCEPOST_PORT_19092_TCP_ADDR": "10.0.0.1",
        "FENCEPOST_STATUS_SERVICE_HOST": "10.0.0.2",
        "FENCEPOST_STATUS_PORT": "tcp://10.0.0.2:8080",
    }

    read(None, {"upstream": "a:1"}, environment=dict.fromkeys(others - {"FENCEPOST_CONFIG"}, "x") | by_kubernetes)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("FENCEPOST_UPSTREM", "a:1", "there is no such key; did you mean FENCEPOST_UPSTREAM?"),
        ("FENCEPOST_BOOTSTRAP_SERVERS", "a:1", "there is no such key; did you mean FENCEPOST_BOOTSTRAP_SERVER?"),
        ("FENCEPOST_LIMITS__DRAIN_SECOND", "1", "did you mean FENCEPOST_LIMITS__DRAIN_SECONDS?"),
        ("FENCEPOST_NONSENSE__AT_ALL", "1", "there is no such key; `fencepost config explain` lists them"),
        ("FENCEPOST_WORKERS", "2", "was removed: run several proxies with reuse_port = true"),
        ("FENCEPOST_LIMITS__DRAIN_SECONDS", "-1", "limits.drain_seconds: must be above 0, not -1.0"),
        ("FENCEPOST_WATCH_TRANSACTIONS", "yes", "watch_transactions: must be true or false, not 'yes'"),
        ("FENCEPOST_BROKER_PORTS", "1=2", "broker_ports: must be a table ([broker_ports]), not '1=2'"),
        ("FENCEPOST_LOG", "debug", "log: must be a TOML table on one line"),
        ("FENCEPOST_CONTROL_SASL__MECHANISM", "PLAIN", "control_sasl.username: must be given: PLAIN needs only"),
    ],
)
def test_a_slip_in_the_environment_names_the_variable(name: str, text: str, complaint: str) -> None:
    with pytest.raises(Refused) as refused:
        read(None, {"upstream": "a:1"}, environment={name: text})
    assert f"environment {name}: {complaint}" in str(refused.value) or complaint in str(refused.value)
    assert "environment" in str(refused.value)


def test_secret_in_place_of_path_is_not_printed(write: Write) -> None:
    with pytest.raises(Refused, match="must be the path of a file, not its content") as refused:
        read(write('upstream = "a:1"\n[listen_tls]\ncertificate_file = """-----BEGIN PRIVATE KEY-----\nhunter2"""\n'))
    assert "hunter2" not in str(refused.value)
    with pytest.raises(Refused) as refused:
        read(None, {"upstream": "a:1"}, environment={"FENCEPOST_CONTROL_SASL__PASSWORD": "hunter2"})
    assert "did you mean FENCEPOST_CONTROL_SASL__PASSWORD_FILE?" in str(refused.value)
    assert "hunter2" not in str(refused.value)


# --- errors -----------------------------------------------------------------------------------------------------------


def test_all_errors_are_listed_in_file_order(write: Write) -> None:
    file = write(
        """\
# a comment
upstream = ["a:1"]
listne = "b:2"
drain_seconds = 3

[limits]
connections_max = 0
handshake_secs = 1
header_seconds = "a"

[topics."orders-*"]
"fencepost.check.expected.offsets" = "maybe"
[topics]
x.partitioner = "murmur3"

[listen_tls]
"key_file" = "/k"
"""
    )

    with pytest.raises(Refused) as refused:
        read(file)

    assert [(each.where.rpartition(":")[2], each.key) for each in refused.value.problems] == [
        ("3", "listne"),
        ("4", "drain_seconds"),
        ("7", "limits.connections_max"),
        ("8", "limits.handshake_secs"),
        ("9", "limits.header_seconds"),
        ("12", 'topics."orders-*"."fencepost.check.expected.offsets"'),
        ("14", "topics.x.partitioner"),
        ("16", "listen_tls.certificate_file"),
    ]
    lines = str(refused.value).splitlines()
    assert lines[0] == "8 errors in the configuration:"
    assert lines[2] == f"{file}:4: drain_seconds: unknown key; drain_seconds belongs in [limits]"


@pytest.mark.parametrize(
    "text",
    [
        'a = """\nb = 1\n[c]\n"""\nd = 1',
        "a = [\n  1, # x = 2\n  2,\n]\nd = 1",
        '[a."b.c"]\n"d e" = 1\nf.g = 2\n[h]\ni = { j = 1, k = { l = 2 } }',
        "a = 1\r\n\r\n[b]\r\nc = 2\r\n",
        "[a]\n[[b]]\nc = 1\n[[b]]\nc = 2",
        "a = [\n  [1],\n  { b = 1 },\n]\nc = [ # ]\n  1 ]\nd = 1",
        "a = '''x\n'''\nb = '#'  # no end of it",
        "",
    ],
)
def test_every_file_key_is_found_on_its_line(text: str) -> None:
    lines = text.replace("\r\n", "\n").split("\n")
    found = lines_of(text)

    def paths(document: dict[str, object], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        here = {(*above, name) for name in document}
        return here.union(*(paths(each, (*above, name)) for name, each in document.items() if isinstance(each, dict)))

    assert paths(tomllib.loads(text)) <= set(found)
    for path, line in found.items():
        assert path[-1] in lines[line - 1]


# --- what holds -------------------------------------------------------------------------------------------------------


def test_show_prints_values_and_origins_as_valid_file(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(
        'upstream = ["a:1"]\n[limits]\ndrain_seconds = 3\n[topics."x*"]\npartitioner = "murmur2"\n'
        '[control_sasl]\nmechanism = "PLAIN"\nusername = "me"\npassword_file = "/p"\n'
    )
    monkeypatch.setenv("FENCEPOST_CONFIG", str(file))
    monkeypatch.setenv("FENCEPOST_LOG__LEVEL", "debug")

    text = stated("config", "show", "--listen", "c:5", capsys=capsys)
    rows = json.loads(stated("config", "show", "--listen", "c:5", "--json", "--changed", capsys=capsys))

    assert re.search(rf"^limits.drain_seconds = 3.0 +# {re.escape(str(file))}:3$", text, re.MULTILINE)
    assert re.search(r'^log.level = "debug" +# environment FENCEPOST_LOG__LEVEL$', text, re.MULTILINE)
    assert re.search(r'^listen = "c:5" +# command line$', text, re.MULTILINE)
    assert re.search(r"^reuse_port = false +# default$", text, re.MULTILINE)
    assert {row["key"]: row["value"] for row in rows} == {
        "upstream": ["a:1"],
        "listen": "c:5",
        "limits.drain_seconds": 3.0,
        "log.level": "debug",
        "control_sasl.mechanism": "PLAIN",
        "control_sasl.username": "me",
        "control_sasl.password_file": "/p",
        "topics": {"x*": {"fencepost.partitioner": "murmur2"}},
    }
    # And: it is a file that means the same.
    (again := tmp_path / "again.toml").write_text(text, encoding="utf-8")
    monkeypatch.delenv("FENCEPOST_LOG__LEVEL")
    before = read(file, {"listen": "c:5", "log": {"level": "debug"}}).config
    assert read(again).config == before


def test_the_file_that_is_deployed_is_valid() -> None:
    loaded = read(ROOT / "deploy" / "fencepost.toml")
    assert loaded.config.configs_for("checked-orders") == {"fencepost.check.expected.offsets": "required"}


# --- files ------------------------------------------------------------------------------------------------------------


def test_every_key_of_a_file_arrives(write: Write) -> None:
    config = read(
        write(
            """
            upstream = ["kafka-1:9092", "[::1]:9093"]
            listen = "0.0.0.0:19092"
            advertised_host = "kafka.example.com"
            refusal_scope = "request"
            config_lease_seconds = 2
            status = "127.0.0.1:8080"
            reuse_port = true
            broker_ports = { 1 = 20001, 2 = 20002 }
            [log]
            format = "json"
            [limits]
            connections_max = 7
            drain_seconds = 1
            [topics."orders-*"]
            "fencepost.check.expected.offsets" = "required"
            [unlisted_topics]
            "fencepost.check.expected.offsets" = true
            """
        )
    ).config

    assert config.upstream == (Address("kafka-1", 9092), Address("::1", 9093))
    assert config.listen == Address("0.0.0.0", 19092)
    assert config.advertised_host == "kafka.example.com"
    assert config.refusal_scope == "request"
    assert config.config_lease_seconds == 2.0
    assert config.status == Address("127.0.0.1", 8080)
    assert config.reuse_port
    assert config.broker_ports == {NodeId(1): 20001, NodeId(2): 20002}
    assert (config.log.format, config.log.level) == ("json", "info")
    assert (config.limits.connections_max, config.limits.drain_seconds) == (7, 1.0)
    assert config.limits.frame_bytes_max == 104_857_600
    assert dict(config.configs_for("orders-eu")) == {"fencepost.check.expected.offsets": "required"}
    assert dict(config.configs_for("payments")) == {"fencepost.check.expected.offsets": "true"}
    assert not config.unsafe_disable_fencing


def test_every_key_of_tls_and_logins_arrives(write: Write) -> None:
    config = read(
        write(
            """
            upstream = ["kafka:9093"]
            [listen_tls]
            certificate_file = "/tls/listener.pem"
            key_file = "/tls/listener.key"
            key_password_file = "/tls/password"
            client_certificates = "optional"
            client_ca_file = "/tls/clients.pem"
            min_version = "1.3"
            [upstream_tls]
            ca_file = "/tls/kafka.pem"
            certificate_file = "/tls/proxy.pem"
            key_file = "/tls/proxy.key"
            key_password_file = "/tls/password"
            check_hostname = false
            min_version = "1.3"
            [control_sasl]
            mechanism = "SCRAM-SHA-256"
            username = "fencepost"
            password_file = "/secrets/password"
            """
        )
    ).config

    assert config.listen_tls == ListenTls(
        Path("/tls/listener.pem"),
        Path("/tls/listener.key"),
        Path("/tls/password"),
        "optional",
        Path("/tls/clients.pem"),
        "1.3",
    )
    assert config.upstream_tls == UpstreamTls(
        Path("/tls/kafka.pem"), Path("/tls/proxy.pem"), Path("/tls/proxy.key"), Path("/tls/password"), False, "1.3"
    )
    assert config.control_sasl == ControlSasl("SCRAM-SHA-256", "fencepost", Path("/secrets/password"))


def test_empty_table_enables_tls_to_brokers(write: Write) -> None:
    config = read(write('upstream = "kafka:9093"\n[upstream_tls]\n')).config
    assert config.upstream_tls == UpstreamTls()
    assert config.upstream_tls is not None
    assert config.upstream_tls.check_hostname
    assert (config.listen_tls, config.control_sasl) == (None, None)


def test_the_first_glob_that_matches_decides_alone(write: Write) -> None:
    config = read(
        write(
            """
            upstream = "a:1"
            [topics."orders-test-*"]
            "fencepost.check.expected.offsets" = "false"
            [topics."orders-*"]
            "fencepost.check.expected.offsets" = "required"
            "fencepost.expected.offsets.source" = "base"
            """
        )
    ).config

    assert dict(config.configs_for("orders-test-1")) == {"fencepost.check.expected.offsets": "false"}
    assert config.configs_for("orders-1")["fencepost.expected.offsets.source"] == "base"
    assert config.configs_for("Orders-1") == {}


@pytest.mark.parametrize("pattern", ['[topics."*"]', '[topics."*offsets"]', "[unlisted_topics]"])
def test_no_pattern_matches_internal_topics(write: Write, pattern: str) -> None:
    config = read(write(f'upstream = "a:1"\n{pattern}\n"fencepost.check.expected.offsets" = "required"')).config
    assert config.configs_for("any-offsets") == {"fencepost.check.expected.offsets": "required"}
    for topic in ("__consumer_offsets", "__my_offsets"):
        assert config.configs_for(topic) == {}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            '[topics."__consumer_offsets"]\n"fencepost.check.expected.offsets" = "true"',
            "no pattern matches names that begin",
        ),
        ('listne = "a:1"', "listne: unknown key; did you mean 'listen'?"),
        ("[limits]\nconnection_max = 1", "limits.connection_max: unknown key; did you mean 'connections_max'?"),
        ("[limits]\nconnections_max = 1.5", "limits.connections_max: must be a whole number, not 1.5"),
        ("[limits]\nconnections_max = true", "limits.connections_max: must be a whole number, not true"),
        ("[limits]\ndrain_seconds = nan", "limits.drain_seconds: must be above 0"),
        ("[limits]\nframe_bytes_max = 999999999", "limits.buffered_bytes_max: is 268435456 and must not be below"),
        ("limits = 3", "limits: must be a table ([limits]), not 3"),
        ('listen = "nowhere"', "listen: 'nowhere' is not HOST:PORT"),
        ('listen = "a:70000"', "listen: 'a:70000' has no usable port"),
        ('upstream = "SASL_SSL://a:1"', "upstream: 'SASL_SSL://a:1' starts with a protocol; write only HOST:PORT"),
        ("upstream = []", "upstream: must be"),
        ('upstream = "a:0"', "upstream: a broker's port cannot be 0"),
        ('refusal_scope = "batch"', "refusal_scope: must be one of 'partition', 'request', not 'batch'"),
        ("broker_tls = false", 'broker_tls: applies to mode = "sidecar" only'),
        (
            'mode = "sidecar"\nbroker = "kafka-1:9094"\nbroker_tls = false',
            "broker_tls: broker = kafka-1:9094 is not on the loopback: logins would be sent in plaintext",
        ),
        ("[broker_ports]\none = 1", "broker_ports.one: the key must be a broker id"),
        ("[broker_ports]\n1 = 5\n2 = 5", "broker_ports: two brokers share a port"),
        ("config_lease_seconds = 0", "config_lease_seconds: must be above 0"),
        ('[topics."a"]\ncheck.expected.offsets = "true"', "a config name with dots needs quotes"),
        ('[topics."a"]\n"fencepost.check.expected.offsets" = "maybe"', "it must be false, true or required"),
        ('[topics."a"]\n"check.expected.offset" = "true"', "there is no such topic config"),
        ("[listen_tls]", "listen_tls.certificate_file: must be given"),
        (
            '[listen_tls]\ncertificate_file = "/a"\nclient_certificates = "required"',
            "listen_tls.client_ca_file: is required for client_certificates",
        ),
        (
            '[listen_tls]\ncertificate_file = "/a"\nclient_ca_file = "/b"',
            "listen_tls.client_ca_file: is required for client_certificates",
        ),
        (
            '[listen_tls]\ncertificate_file = "/a"\nclient_certificates = "must"',
            "listen_tls.client_certificates: must be one of 'none', 'optional', 'required', not 'must'",
        ),
        ('[listen_tls]\ncertificate_file = "/a"\nmin_version = "1.1"', "min_version: must be one of '1.2', '1.3'"),
        ("[listen_tls]\ncertificate_file = 7", "listen_tls.certificate_file: must be a text that is not empty, not 7"),
        ('[upstream_tls]\nkey_file = "/a"', "upstream_tls.key_file: a key needs its certificate"),
        ('[upstream_tls]\ncheck_hostname = "no"', "upstream_tls.check_hostname: must be true or false, not 'no'"),
        ("[control_sasl]", "control_sasl.mechanism: must be given"),
        ('[control_sasl]\nmechanism = "GSSAPI"', "control_sasl.mechanism: must be one of 'PLAIN', 'SCRAM-SHA-256'"),
        (
            '[control_sasl]\nmechanism = "PLAIN"\nusername = "a"',
            "control_sasl.password_file: must be given: PLAIN needs only username and password_file",
        ),
        (
            '[control_sasl]\nmechanism = "OAUTHBEARER"\nusername = "a"\ntoken_file = "/b"',
            "control_sasl.username: is not for this mechanism: OAUTHBEARER needs only token_file",
        ),
        (
            '[control_sasl]\nmechanism = "PLAIN"\nusername = "a"\npassword = "secret"',
            "control_sasl.password: unknown key; did you mean 'password_file'",
        ),
        ("listen = ", "is not TOML: "),
        ('listen = "a:1\n', "line 2"),
        ("listen = a:1", "a text needs quotes"),
        ('[topics.orders-*]\n"fencepost.check.expected.offsets" = "true"', 'quotes: [topics."orders-*"]'),
    ],
)
def test_config_error_names_file_key_and_remedy(write: Write, text: str, complaint: str) -> None:
    file = write(text if text.startswith("upstream = ") else f'upstream = "a:1"\n{text}')
    with pytest.raises(ConfigError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}:")
    assert complaint in str(caught.value)
    assert "secret" not in str(caught.value)


def test_command_line_error_does_not_blame_the_file(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"^command line: listen: 'x' is not HOST:PORT"):
        read(write('upstream = "a:1"'), {"listen": "x"})


@pytest.mark.parametrize("environment", [{}, {"HOME": "/root"}])
def test_missing_upstream_names_the_option(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^upstream: no Kafka server given.*use --bootstrap-server HOST:PORT"):
        read(None, {}, environment=environment)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        read(tmp_path / "absent.toml")


def test_hidden_key_is_not_suggested(write: Write) -> None:
    with pytest.raises(ConfigError) as caught:
        read(write('upstream = "a:1"\nzzz = 1'))
    assert "allowed here" in str(caught.value)
    assert "unsafe" not in str(caught.value)
    assert read(write('upstream = "a:1"\nunsafe_disable_fencing = true')).config.unsafe_disable_fencing
    read(write('upstream = "a:1"'), environment={"FENCEPOST_UNSAFE_DISABLE_FENCIN": "true"})


def test_every_limit_names_its_unit() -> None:
    units = (
        "_bytes_max",
        "connections_max",
        "requests_max",
        "queue_max",
        "in_flight_max",
        "counts_max",
        "producers_max",
        "_seconds",
        "_per_second",
        "shown_max",
    )

    assert [key.name for key in KEYS.values() if key.table == "limits" and not key.name.endswith(units)] == []


def test_sequencers_and_barriers_share_one_queue_time() -> None:
    """Barriers wait `takeover_seconds`; with a longer time in sequencers, an append could follow an empty barrier."""
    limits = Limits()
    assert limits.takeover_seconds == limits.queued_seconds == SequencerLimits().queued_seconds
    assert limits.queued_seconds == limits.connect_timeout_seconds + limits.request_timeout_seconds
    assert replace(limits, takeover_seconds=90.0).queued_seconds == 90.0
    assert replace(limits, takeover_seconds=0.5).queued_seconds == limits.queued_seconds
