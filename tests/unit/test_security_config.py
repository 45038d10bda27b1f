"""The tables of TLS and logins: what a file may say, and what it is told where it may not. Files that change."""

from __future__ import annotations

from pathlib import Path

import pytest

from fencepost_proxy.config import ControlSasl, ListenTls, UpstreamTls
from fencepost_proxy.config.reading import load
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.net.certificates import Certificates
from fencepost_proxy.net.metrics import Metrics
from tests.support.certificates import Authority

UPSTREAM = 'upstream = ["kafka:9093"]\n'


def test_every_key(tmp_path: Path) -> None:
    (file := tmp_path / "fencepost.toml").write_text(
        UPSTREAM
        + """
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

    config = load(file)

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


def test_empty_table_enables_tls_to_brokers(tmp_path: Path) -> None:
    (file := tmp_path / "fencepost.toml").write_text(UPSTREAM + "[upstream_tls]\n")

    config = load(file)

    assert config.upstream_tls == UpstreamTls()
    assert config.upstream_tls is not None
    assert config.upstream_tls.check_hostname
    assert (config.listen_tls, config.control_sasl) == (None, None)


@pytest.mark.parametrize(
    ("lines", "stated"),
    [
        ("[listen_tls]", "listen_tls.certificate_file: must be given"),
        ('[listen_tls]\ncertificate = "/a"', "listen_tls.certificate: unknown key; did you mean 'certificate_file'"),
        (
            '[listen_tls]\ncertificate_file = "/a"\nkeyfile = "/b"',
            "listen_tls.keyfile: unknown key; did you mean 'key_file'",
        ),
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
        ("upstream_tls = true", r"upstream_tls: must be a table \(\[upstream_tls\]\), not true"),
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
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, lines: str, stated: str) -> None:
    (file := tmp_path / "fencepost.toml").write_text(UPSTREAM + lines + "\n")

    with pytest.raises(ConfigError, match=stated) as refused:
        load(file)

    assert str(file) in str(refused.value)
    assert "secret" not in str(refused.value)


# --- files that change ------------------------------------------------------------------------------------------------


def test_changed_files_are_reloaded_unless_broken(tmp_path: Path) -> None:
    # Given: a listener's certificate, and brokers' authority.
    authority = Authority(tmp_path / "authority")
    one, two = authority.sign("one", days=5), authority.sign("two", days=10)
    file, trusted = tmp_path / "both.pem", tmp_path / "trusted.pem"
    file.write_bytes(one.both.read_bytes())
    trusted.write_bytes(authority.file.read_bytes())
    certificates = Certificates(ListenTls(file), UpstreamTls(trusted))
    listener, upstream = certificates.listener, certificates.upstream
    ends = certificates.not_after()
    assert set(ends) == {"listener"}

    # Then: as long as nothing has changed, nothing is read.
    assert certificates.probe() == []
    assert certificates.listener is listener

    # When: it is broken, or gone, the old one stays.
    file.write_text("in the middle of being written")
    assert certificates.probe() == [False]
    assert certificates.probe() == []
    file.unlink()
    assert certificates.probe() == [False]
    assert (certificates.listener, certificates.not_after()) == (listener, ends)

    # When: there is another one, new connections get it.
    file.write_bytes(two.both.read_bytes())
    assert certificates.probe() == [True]
    assert certificates.listener is not listener
    assert certificates.upstream is upstream
    assert certificates.not_after()["listener"] - ends["listener"] > 4 * 86_400

    # And: whoever asks for it has all of them read.
    assert certificates.probe(at_once=True) == [True, True]
    assert certificates.upstream is not upstream


def test_start_with_missing_certificate_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"listen_tls\.certificate_file: .*absent cannot be read: No such file"):
        Certificates(ListenTls(tmp_path / "absent"), None)


def test_tls_and_login_metrics_are_exported() -> None:
    metrics, other = Metrics(), Metrics()
    for result in ("ok", "ok", "not_tls"):
        metrics.tls_handshake(result)
    metrics.upstream_tls_failed("untrusted")
    metrics.logged_in(True)
    metrics.logged_in(False)
    metrics.certificates_loaded(False)
    metrics.certificates_end({"listener": 2_000_000_000.0})
    other.tls_handshake("ok")

    text = metrics.plus(other).exposition().decode()

    for line in (
        'fencepost_tls_handshakes_total{result="ok"} 3.0',
        'fencepost_tls_handshakes_total{result="not_tls"} 1.0',
        'fencepost_upstream_tls_failures_total{reason="untrusted"} 1.0',
        'fencepost_control_logins_total{result="ok"} 1.0',
        'fencepost_control_logins_total{result="failed"} 1.0',
        'fencepost_certificate_reloads_total{result="failed"} 1.0',
        'fencepost_certificate_not_after_timestamp_seconds{of="listener"} 2e+09',
    ):
        assert f"{line}\n" in text
