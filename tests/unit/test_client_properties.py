"""`--command-config`: a Java client.properties as TLS and login of the proxy's own connections."""

from __future__ import annotations

import argparse
import pickle
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fencepost_proxy.cli import proxy
from fencepost_proxy.cli.main import main
from fencepost_proxy.config import ControlSasl, ProxyConfig, Refused, UpstreamTls
from fencepost_proxy.config.client_properties import read_client_properties
from fencepost_proxy.config.reading import read
from fencepost_proxy.config.secrets import secret
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.transport.certificates import not_after, upstream_context
from fencepost_proxy.types import Address
from tests.support.certificates import Authority

Write = Callable[[str], Path]
_SECURITY = "org.apache.kafka.common.security"
PLAIN = f'{_SECURITY}.plain.PlainLoginModule required username="alice" password="s3cret";'
SCRAM = f'{_SECURITY}.scram.ScramLoginModule required username="alice" password="s3cret";'
LOGIN = f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.jaas.config={PLAIN}\n"
TOKEN = "sasl.oauthbearer.token.endpoint.url=file:///run/token\n"
STORES = Path(__file__).parent / "keystores"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        (file := tmp_path / "client.properties").write_text(text, "latin-1")
        return file

    return write


def of(file: Path, **more: object) -> ProxyConfig:
    return read(None, {"upstream": "a:1"}, command_config=file, **more).config  # type: ignore[arg-type]


def login(config: ProxyConfig) -> tuple[str, str | None, str]:
    sasl = config.control_sasl
    assert sasl is not None
    assert sasl.password_file is not None
    return sasl.mechanism, sasl.username, secret("password", sasl.password_file)


# --- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "tls", "sasl"),
    [
        ("PLAINTEXT", False, False),
        ("SSL", True, False),
        ("SASL_PLAINTEXT", False, True),
        ("SASL_SSL", True, True),
        ("sasl_ssl", True, True),
    ],
)
def test_protocol_determines_tls_and_login(write: Write, protocol: str, tls: bool, sasl: bool) -> None:
    config = of(write(LOGIN.replace("SASL_PLAINTEXT", protocol)))
    assert (config.upstream_tls is not None, config.control_sasl is not None) == (tls, sasl)


@pytest.mark.parametrize(
    ("mechanism", "lines"),
    [
        ("PLAIN", f"sasl.jaas.config={PLAIN}"),
        ("SCRAM-SHA-256", f"sasl.jaas.config={SCRAM}"),
        ("SCRAM-SHA-512", f"sasl.jaas.config : {SCRAM.replace(' username', ' tokenauth=false username')}"),
        ("PLAIN", "sasl.username=alice\nsasl.password=s3cret"),
    ],
)
def test_each_login_form_gives_name_and_password(write: Write, mechanism: str, lines: str) -> None:
    config = of(write(f"security.protocol=SASL_SSL\nsasl.mechanism={mechanism}\n{lines}\n"))
    assert login(config) == (mechanism, "alice", "s3cret")


def test_properties_are_parsed_as_by_java(write: Write) -> None:
    file = write(
        "# comment \\\n! comment\n\n  security.protocol : SASL_PLAINTEXT\r\nsasl.mechanism PLAIN\r"
        "sasl.jaas.config=\\\n    "
        + PLAIN.replace(" required", " \\\n\t required")
        .replace("alice", "al\\u0069ce")
        .replace("s3cret", 'p\\\\"=#;\xe9')
        + "\\"
    )
    assert login(of(file)) == ("PLAIN", "alice", 'p"=#;\xe9')


def test_changed_password_applies_at_next_login(write: Write) -> None:
    config = of(write(LOGIN))
    write(LOGIN.replace("s3cret", "changed"))
    assert login(pickle.loads(pickle.dumps(config)))[2] == "changed"


def test_missing_password_fails_at_next_login(write: Write) -> None:
    config = of(write(LOGIN))
    write(LOGIN.replace("password", "other"))
    with pytest.raises(ConfigError, match=r"sasl\.jaas\.config: must be a login by PLAIN or SCRAM"):
        login(config)


def test_store_locations_become_tls_files(write: Write) -> None:
    stores = "ssl.truststore.type=PEM\nssl.truststore.location=/ca.pem\n"
    stores += "ssl.keystore.type=PEM\nssl.keystore.location=/client.pem\n"
    assert of(write(f"security.protocol=SSL\n{stores}")).upstream_tls == UpstreamTls(
        Path("/ca.pem"), Path("/client.pem")
    )
    assert of(write("security.protocol=SSL\nssl.ca.location=/ca.pem\n")).upstream_tls == UpstreamTls(Path("/ca.pem"))


@pytest.mark.parametrize("kind", ["jks", "p12"])
def test_java_stores_are_read_at_each_use(write: Write, kind: str) -> None:
    lines = f"security.protocol=SSL\nssl.truststore.location={STORES}/trust.{kind}\nssl.truststore.password=changeit\n"
    lines += f"ssl.keystore.location={STORES}/own.{kind}\nssl.keystore.password=changeit\nssl.key.password=keypass1\n"
    tls = pickle.loads(pickle.dumps(of(write(lines)))).upstream_tls
    assert upstream_context(tls).get_ca_certs(binary_form=True) == [(STORES / "own.crt").read_bytes()]
    assert (not_after(tls.certificate_file) or 0) > time.time()
    # A changed password applies at the next use.
    for password, why in (("ssl.truststore.password", "ssl.truststore"), ("ssl.keystore.password", "ssl.keystore")):
        write(lines.replace(f"{password}=changeit", f"{password}=s3cret"))
        with pytest.raises(ConfigError, match=rf"{why}.location: .*{kind} .*password") as refused:
            upstream_context(tls)
        assert "s3cret" not in str(refused.value)


def test_token_file_is_named_as_in_java(write: Write) -> None:
    sasl = of(write("security.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER\n" + TOKEN)).control_sasl
    assert sasl == ControlSasl("OAUTHBEARER", token_file=Path("/run/token"))


@pytest.mark.parametrize(("value", "checks"), [("", False), ("https", True), ("HTTPS", True)])
def test_empty_identification_algorithm_disables_host_check(write: Write, value: str, checks: bool) -> None:
    tls = of(write(f"security.protocol=SSL\nssl.endpoint.identification.algorithm={value}\n")).upstream_tls
    assert tls is not None
    assert upstream_context(tls).check_hostname is checks
    assert upstream_context(tls).verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize("line_end", ["\\n\\\n", " \\\n"])
def test_inline_certificates_are_trusted(write: Write, tmp_path: Path, line_end: str) -> None:
    authorities = [Authority(tmp_path / name) for name in ("one", "two")]
    lines = [line for each in authorities for line in each.file.read_text().splitlines()]
    inline = f"ssl.truststore.type=PEM\nssl.truststore.certificates={line_end.join(lines)}\n"
    tls = of(write(f"security.protocol=SSL\n{inline}")).upstream_tls
    assert tls is not None
    trusted = set(upstream_context(tls).get_ca_certs(binary_form=True))
    assert trusted == {ssl.PEM_cert_to_DER_cert(each.file.read_text()) for each in authorities}


# --- precedence -------------------------------------------------------------------------------------------------------

FILE = """
upstream = "f:1"
[upstream_tls]
check_hostname = false
[control_sasl]
mechanism = "OAUTHBEARER"
token_file = "/token"
"""


def test_client_properties_replace_the_files_tables(write: Write, tmp_path: Path) -> None:
    (toml := tmp_path / "fencepost.toml").write_text(FILE)
    properties = write(LOGIN.replace("SASL_PLAINTEXT", "SASL_SSL"))
    loaded = read(toml, command_config=properties)
    assert loaded.config.upstream_tls == UpstreamTls()
    assert login(loaded.config) == ("PLAIN", "alice", "s3cret")
    assert loaded.origin("control_sasl.username") == str(properties)
    assert loaded.origin("upstream") == f"{toml}:2"


def test_plaintext_protocol_removes_the_files_tables(write: Write, tmp_path: Path) -> None:
    (toml := tmp_path / "fencepost.toml").write_text(FILE)
    config = read(toml, command_config=write("security.protocol=PLAINTEXT\n")).config
    assert (config.upstream_tls, config.control_sasl) == (None, None)


def test_properties_without_security_replace_nothing(write: Write, tmp_path: Path) -> None:
    (toml := tmp_path / "fencepost.toml").write_text(FILE)
    loaded = read(toml, command_config=write("client.id=x\nrequest.timeout.ms=5\n"))
    assert loaded.config == read(toml).config
    assert loaded.ignored == ("client.id", "request.timeout.ms")


def test_environment_overrides_client_properties(write: Write, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("by environment\n")
    environment = {
        "FENCEPOST_CONTROL_SASL__PASSWORD_FILE": str(tmp_path / "password"),
        "FENCEPOST_UPSTREAM_TLS__MIN_VERSION": "1.3",
    }
    config = of(write(LOGIN.replace("SASL_PLAINTEXT", "SASL_SSL")), environment=environment)
    assert login(config) == ("PLAIN", "alice", "by environment")
    assert config.upstream_tls == UpstreamTls(min_version="1.3")


def test_options_override_environment_beside_client_properties(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENCEPOST_BOOTSTRAP_SERVER", "environment:1")
    parser = argparse.ArgumentParser()
    proxy.add_parser(parser.add_subparsers())
    for option in ("--bootstrap-server", "--upstream"):
        config = proxy.read_config(
            parser.parse_args(["proxy", option, "a:1,b:2", f"--command-config={write(LOGIN)}"])
        ).config
        assert config.upstream == (Address("a", 1), Address("b", 2))
        assert config.control_sasl is not None


# --- what is ignored and refused --------------------------------------------------------------------------------------


def test_properties_unused_by_the_protocol_are_ignored(write: Write) -> None:
    file = write("security.protocol=SSL\nsasl.mechanism=GSSAPI\nsasl.kerberos.service.name=kafka\nclient.id=x\n")
    assert read_client_properties(file).ignored == ("client.id", "sasl.kerberos.service.name", "sasl.mechanism")


TLS = "security.protocol=SSL\n"
OAUTH = "security.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER"
SASL = "security.protocol=SASL_SSL\nsasl.mechanism=PLAIN\n"


@pytest.mark.parametrize(
    ("lines", "stated"),
    [
        ("sasl.mechanism=PLAIN", "security.protocol: must be one of PLAINTEXT, SSL"),
        ("security.protocol=TLS", ":1: security.protocol: must be one of PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        (f"security.protocol=SASL_SSL\nsasl.jaas.config={PLAIN}", "sasl.mechanism: must be one of PLAIN, SCRAM"),
        ("security.protocol=SASL_SSL\nsasl.mechanism=GSSAPI", ":2: sasl.mechanism: must be one of PLAIN, SCRAM"),
        (OAUTH, "sasl.oauthbearer.token.endpoint.url: must be file:///PATH of a file with the token"),
        (f"{OAUTH}\nsasl.oauthbearer.token.endpoint.url=https://idp/s3cret", ":3: sasl.oauthbearer.token.endpoint.url"),
        (SASL, "sasl.jaas.config: must be given, or sasl.username and sasl.password"),
        (f"{SASL}sasl.username=alice", "sasl.jaas.config: must be given, or sasl.username and sasl.password"),
        (f"{SASL}sasl.jaas.config={PLAIN[:-1]}", ":3: sasl.jaas.config: must be a login by PLAIN or SCRAM, as in org."),
        (f"{SASL}sasl.jaas.config={PLAIN.replace('Plain', 'Other')}", "must be a login by PLAIN or SCRAM"),
        (f"{SASL}sasl.jaas.config={SCRAM}", "scram.ScramLoginModule is not for this sasl.mechanism"),
        (f"{SASL}sasl.jaas.config={PLAIN}\nsasl.login.class=x", "sasl.login.class: is not supported (remove it, or"),
        (f"{TLS}security.providers=x", "security.providers: is not supported"),
        (f"{TLS}ssl.trustore.location=/a", ":2: ssl.trustore.location: is not supported (remove it, or correct its"),
        (f"{TLS}ssl.truststore.type=BKS\nssl.truststore.location=/a", ":2: ssl.truststore.type: must be one of JKS,"),
        (f"{TLS}ssl.truststore.type=PEM\nssl.truststore.password=s3cret", "a PEM store has no password: remove it"),
        (f"{TLS}ssl.keystore.type=PEM\nssl.keystore.password=s3cret", "a PEM store has no password: remove it"),
        (f"{TLS}ssl.key.password=s3cret", "set FENCEPOST_UPSTREAM_TLS__KEY_PASSWORD_FILE"),
        (f"{TLS}ssl.keystore.type=PEM\nssl.keystore.key=s3cret", "write key and certificates to one PEM file"),
        (f"{TLS}ssl.keystore.type=PEM\nssl.keystore.certificate.chain=a", "write key and certificates to one PEM"),
        (f"{TLS}ssl.truststore.type=PEM\nssl.truststore.certificates=s3cret", "has no PEM certificate"),
        (
            f"{TLS}ssl.truststore.type=PEM\nssl.truststore.location=/a\nssl.ca.location=/b",
            "ssl.ca.location: must not be given with ssl.truststore.location",
        ),
        (f"{TLS}ssl.endpoint.identification.algorithm=none", "must be https, or empty to accept any host name"),
    ],
)
def test_error_names_property_and_remedy(write: Write, lines: str, stated: str) -> None:
    file = write(lines + "\n")
    with pytest.raises(Refused) as refused:
        of(file)
    assert str(refused.value).startswith((str(file), "2 errors in the configuration:"))
    assert stated in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_all_errors_are_reported_together(write: Write) -> None:
    with pytest.raises(Refused) as refused:
        of(write(f"{SASL}ssl.cipher.suites=x\nssl.endpoint.identification.algorithm=none\n"))
    keys = {each.key for each in refused.value.problems}
    assert keys == {"ssl.cipher.suites", "sasl.jaas.config", "ssl.endpoint.identification.algorithm"}


@pytest.mark.parametrize("command", ["proxy", "check", "transactions", "expansions"])
def test_unreadable_file_ends_each_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent = tmp_path / "absent"
    assert main([command, "--bootstrap-server", "127.0.0.1:1", "--command-config", str(absent)]) == 2
    captured = capsys.readouterr()
    stated = " ".join((captured.out + captured.err).split())
    assert f"{absent}: cannot be read: No such file or directory" in stated


def test_effective_values_show_no_password(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(LOGIN)
    assert main(["config", "show", "--changed", "--bootstrap-server=a:1", f"--command-config={file}"]) == 0
    shown = capsys.readouterr().out
    assert f"# {file}" in shown
    assert "s3cret" not in shown
