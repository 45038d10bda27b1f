"""Configuration files: the resulting values, or errors that say what to change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fencepost_proxy.config import ControlSasl, Limits, ListenTls, UpstreamTls
from fencepost_proxy.config.keys import KEYS
from fencepost_proxy.config.reading import read
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.sequencer.events import SequencerLimits
from fencepost_proxy.types import Address, NodeId

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "fencepost.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


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
