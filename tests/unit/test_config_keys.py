"""The table of configuration keys: documentation, sources of values, and all errors at once."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from fencepost_proxy.cli import proxy
from fencepost_proxy.cli.main import main
from fencepost_proxy.config import ProxyConfig, Refused
from fencepost_proxy.config.keys import KEYS, SHOWN, TABLES, Key, variable
from fencepost_proxy.config.locating import lines_of
from fencepost_proxy.config.reading import read
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


def test_a_hidden_key_is_never_suggested() -> None:
    environment = {"FENCEPOST_UPSTREAM": "a:1", "FENCEPOST_UNSAFE_DISABLE_FENCIN": "true"}
    assert read(environment=environment).config == read(environment={"FENCEPOST_UPSTREAM": "a:1"}).config


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
