"""Options are checked before the first row, and each refusal says what to do."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from fencepost.spark.errors import LogRefused, SinkError
from fencepost.spark.log import connection_options
from fencepost.spark.options import KAFKA_OPTIONS, OPTIONS, client_options, settings

GIVEN = {"kafka.bootstrap.servers": "a:1, b:2", "topic": "t", "sink.id": "s"}
TOKEN_URL = "kafka.sasl.oauthbearer.token.endpoint.url"
OAUTH = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "OAUTHBEARER"}
STORES = Path(__file__).parents[1] / "keystores"
TLS = {"kafka.security.protocol": "SSL", "kafka.ssl.keystore.password": "changeit"}
JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="p\\"q=;";'


def test_what_is_required_suffices() -> None:
    chosen = settings({**GIVEN, "checkpointLocation": "/tmp/x"})
    assert (chosen.topics, chosen.plan.sink, chosen.topic_column) == (("t",), "s", False)
    assert chosen.client == {
        "bootstrap_servers": "a:1,b:2",
        "client_id": "fencepost-sink",
        "security_protocol": "PLAINTEXT",
    }


@pytest.mark.parametrize("missing", GIVEN)
def test_missing_required_option_is_named(missing: str) -> None:
    with pytest.raises(SinkError, match=f"option '{missing}' is required"):
        settings({name: value for name, value in GIVEN.items() if name != missing})


@pytest.mark.parametrize(
    ("more", "stated"),
    [
        ({"sinkid": "x"}, "did you mean 'sink.id'"),
        ({"topics": "a,b"}, "are both set"),
        ({"kafka.acks": "1"}, "exactly-once writes need all"),
        ({"kafka.compression.type": "brotli"}, "must be one of none, gzip"),
        ({"kafka.compression.type": "gzip", "kafka.compression.gzip.level": "10"}, "from -1 to 9"),
        ({"kafka.compression.zstd.level": "fast"}, "from -131072 to 22"),
        ({"kafka.key.serializer": "x"}, "already bytes or strings"),
        ({"kafka.transactional.id": "x"}, "uses no transactions"),
        ({"kafka.partitioner.class": "x"}, "the column `partition`"),
        ({"kafka.transaction.timeout.ms": "1"}, "'kafka.transaction.timeout.ms': the sink uses no transactions"),
        ({"kafka.sasl.oauthbearer.jwks.endpoint.url": "x"}, "url': of OAUTHBEARER, only a token in a file"),
        ({**OAUTH, TOKEN_URL: "https://idp/token"}, f"option {TOKEN_URL} must be file:///PATH"),
        (OAUTH, f"option {TOKEN_URL} must be file:///PATH"),
        ({"kafka.group.id": "x"}, "an option of consumers"),
        ({"startingOffsets": "x"}, "an option of Spark's Kafka source"),
        ({"kafka.sasl.mecanism": "x"}, "did you mean 'kafka.sasl.mechanism'"),
        ({"kafka.compresion.type": "x"}, "did you mean 'kafka.compression.type'"),
        ({"same.split": "true"}, r"option same.split was removed: a retry may split"),
        ({"unmatched.rows": "keep"}, r"option unmatched.rows was removed: .*another sink.id"),
        ({"first.run": "true"}, r"option first.run was removed: "),
        ({"Arranged": "true"}, r"option arranged was removed: fencepost.spark.append"),
        ({"batch.id": "-1"}, "whole number of at least 0"),
        ({"batch.bytes": "10"}, "at least 1000"),
        ({"patience.seconds": "soon"}, "whole number"),
        ({"kafka.security.protocol": "TLS"}, "must be one of PLAINTEXT"),
        ({"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "GSSAPI"}, "must be one of PLAIN"),
        ({"kafka.security.protocol": "SASL_PLAINTEXT", "kafka.sasl.mechanism": "PLAIN"}, "needs username"),
        (
            {"kafka.security.protocol": "SSL", "kafka.ssl.truststore.location": "/x.jks"},
            "/x.jks cannot be read: No such",
        ),
        (TLS | {"kafka.ssl.keystore.location": f"{STORES}/own.jks"}, "own.jks has a private key with another password"),
        (TLS | {"kafka.ssl.truststore.type": "BKS"}, "must be one of PEM, JKS, PKCS12"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, str], stated: str) -> None:
    with pytest.raises(SinkError, match=stated):
        settings({**GIVEN, **more})


@pytest.mark.parametrize(
    ("codec", "stated", "level"),
    [("gzip", "-1", None), ("gzip", "9", 9), ("lz4", "17", 17), ("zstd", "-7", -7), ("snappy", "5", None)],
)
def test_compression_level_follows_its_codec(codec: str, stated: str, level: int | None) -> None:
    levels = {"kafka.compression.gzip.level": "2", "kafka.compression.lz4.level": "3"}
    if codec != "snappy":
        levels[f"kafka.compression.{codec}.level"] = stated
    assert settings({**GIVEN, "kafka.compression.type": codec, **levels}).level == level


def test_meaningless_java_producer_options_are_accepted() -> None:
    chosen = settings({**GIVEN, "kafka.linger.ms": "5", "kafka.enable.idempotence": "true"})
    assert chosen.ignored == ("kafka.enable.idempotence", "kafka.linger.ms")


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (
            {
                "kafka.security.protocol": "sasl_ssl",
                "kafka.sasl.mechanism": "scram-sha-512",
                "kafka.sasl.jaas.config": JAAS,
            },
            {
                "sasl_mechanism": "SCRAM-SHA-512",
                "sasl_plain_username": "u",
                "sasl_plain_password": 'p"q=;',
                "ssl_check_hostname": True,
            },
        ),
        (
            {
                "kafka.security.protocol": "SSL",
                "kafka.ssl.truststore.type": "PEM",
                "kafka.ssl.truststore.location": "/ca.pem",
                "kafka.ssl.keystore.location": "/me.pem",
                "kafka.ssl.key.password": "k",
                "kafka.ssl.endpoint.identification.algorithm": "",
            },
            {
                "ssl_cafile": "/ca.pem",
                "ssl_certfile": "/me.pem",
                "ssl_keyfile": "/me.pem",
                "ssl_password": "k",
                "ssl_check_hostname": False,
            },
        ),
        ({"kafka.request.timeout.ms": "5000"}, {"request_timeout_ms": 5000}),
        (
            {**OAUTH, TOKEN_URL: "file:///run/my%20token"},
            {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_file": "/run/my token"},
        ),
    ],
)
def test_kafkas_names_become_the_clients(more: dict[str, str], found: dict[str, Any]) -> None:
    assert found.items() <= client_options({**GIVEN, **more}).items()


@pytest.mark.parametrize("kind", ["jks", "p12"])
def test_java_stores_are_read_on_the_driver(kind: str) -> None:
    given = {**GIVEN, **TLS, "kafka.ssl.truststore.location": f"{STORES}/trust.{kind}"}
    given |= {"kafka.ssl.truststore.password": "changeit", "kafka.ssl.keystore.location": f"{STORES}/own.{kind}"}
    given |= {"kafka.ssl.keystore.type": "jks", "kafka.ssl.key.password": "keypass1"}
    # Executors get PEM text. Java stores need not be there.
    sent = pickle.loads(pickle.dumps(client_options(given)))
    assert not {"ssl_cafile", "ssl_certfile", "ssl_password"} & sent.keys()
    context = connection_options(sent)["ssl_context"]
    assert context.get_ca_certs(binary_form=True) == [(STORES / "own.crt").read_bytes()]


def test_token_is_read_at_each_login(tmp_path: Path) -> None:
    file = tmp_path / "token"
    options = client_options({**GIVEN, **OAUTH, TOKEN_URL: file.as_uri()})
    provider = connection_options(pickle.loads(pickle.dumps(options)))["sasl_oauth_token_provider"]
    for token in ("first", "second"):
        file.write_text(f"{token}\n")
        assert asyncio.run(provider.token()) == token
    file.unlink()
    with pytest.raises(LogRefused, match=r"cannot read the OAuth token in .*: No such file"):
        asyncio.run(provider.token())


def test_secrets_are_not_shown() -> None:
    more = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN", "kafka.sasl.jaas.config": JAAS}
    assert 'p"q' not in repr(settings({**GIVEN, **more}))


def test_a_batch_fits_the_topic_and_the_request() -> None:
    chosen = settings({**GIVEN, "batch.bytes": "5000000"})
    assert chosen.plan.append_bytes_max < chosen.record_bytes_max
    assert chosen.plan_for(100_000).append_bytes_max < 100_000


def test_topics_may_be_a_column() -> None:
    chosen = settings({**{n: v for n, v in GIVEN.items() if n != "topic"}, "topics": "a, b"})
    assert (chosen.topics, chosen.topic_column) == (("a", "b"), True)


def test_every_option_has_a_name_once() -> None:
    names = [option.name for option in (*OPTIONS, *KAFKA_OPTIONS)]
    assert len(names) == len(set(names))
    assert all(option.meaning for option in OPTIONS)
