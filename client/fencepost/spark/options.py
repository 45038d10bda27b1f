"""The sink's options, checked before the first row. `OPTIONS` and `KAFKA_OPTIONS` list all of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from fencepost.java_keystores import KeyStoreError, identity, is_key_store, pem, trusted_certificates
from fencepost.java_properties import token_file
from fencepost.spark.errors import SinkError
from fencepost.spark.write import Plan

#: Default of Java's max.request.size.
REQUEST_BYTES_MAX = 1_048_576
#: Reserved in a batch for its header, commit tag, expected offset and partition count.
_OVERHEAD_BYTES = 16_000
_CODECS = ("gzip", "lz4", "zstd")


def _text(_: Option, stated: str) -> str:
    return stated.strip()


def _words(_: Option, stated: str) -> list[str]:
    return [word.strip() for word in stated.split(",") if word.strip()]


def _truth(_: Option, stated: str) -> bool:
    if stated.strip().lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return stated.strip().lower() == "true"


def _choice(option: Option, stated: str) -> str:
    """One of the words of `meaning`, in any case."""
    for name in option.meaning.split(", "):
        if name.lower() == stated.strip().lower():
            return name
    raise ValueError(f"must be one of {option.meaning}")


def _number(least: int, most: int | None = None) -> Callable[[Option, str], int]:
    def read(_: Option, stated: str) -> int:
        try:
            number = int(stated)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            limits = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"must be a whole number {limits}")
        return number

    return read


def _count(_: Option, stated: str) -> int | None:
    if not stated.strip():
        return None
    if not stated.strip().isdecimal():
        raise ValueError("must be a whole number of at least 0")
    return int(stated)


class Option(NamedTuple):
    """`default`: None if required, "" for none. `read`: the value from the option and its text; raises ValueError."""

    name: str
    default: str | None
    meaning: str
    read: Callable[[Option, str], Any] = _text


OPTIONS = (
    Option("kafka.bootstrap.servers", None, "addresses of the proxy: HOST:PORT, comma-separated", _words),
    Option("topic", "", "topic of all rows. If not set, the column `topic` names the topic of each row"),
    Option("topics", "", "all topics that the column `topic` may name, comma-separated", _words),
    Option(
        "sink.id",
        None,
        "permanent name of this stream or load. Rows of one sink.id are written once; another "
        "sink.id appends them again",
    ),
    Option(
        "batch.id",
        "",
        "in foreachBatch, the number of the micro-batch. Each is written once, with one sink.id for all",
        _count,
    ),
    Option("patience.seconds", "120", "how long a task retries while it cannot append", _number(1)),
    Option(
        "batch.bytes",
        "900000",
        "size of an uncompressed record batch. The topic's max.message.bytes also limits it",
        _number(1_000),
    ),
    Option(
        "report",
        "",
        "file on the driver that receives rows found and appended per partition, as JSON, after each batch",
    ),
)

KAFKA_OPTIONS = (
    Option("kafka.client.id", "fencepost-sink", ""),
    Option("kafka.security.protocol", "PLAINTEXT", "PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL", _choice),
    Option("kafka.sasl.mechanism", "", "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER", _choice),
    Option("kafka.sasl.jaas.config", "", 'as in Java: …LoginModule required username="…" password="…";'),
    Option(
        "kafka.sasl.oauthbearer.token.endpoint.url",
        "",
        "file:///PATH: file with the token, on the driver and all executors. It is read at each login",
    ),
    Option("kafka.ssl.truststore.type", "PEM", "PEM, JKS, PKCS12", _choice),
    Option(
        "kafka.ssl.truststore.location", "", "PEM file on the driver and all executors, or Java store on the driver"
    ),
    Option("kafka.ssl.truststore.password", "", "password of a Java store"),
    Option("kafka.ssl.truststore.certificates", "", "certificates as PEM text"),
    Option("kafka.ssl.keystore.type", "PEM", "PEM, JKS, PKCS12", _choice),
    Option(
        "kafka.ssl.keystore.location",
        "",
        "certificate chain and private key: PEM file or Java store, as for truststore",
    ),
    Option("kafka.ssl.keystore.password", "", "password of a Java store"),
    Option("kafka.ssl.key.password", "", "password of the private key, if another one"),
    Option("kafka.ssl.endpoint.identification.algorithm", "https", "empty: do not verify host names"),
    Option("kafka.compression.type", "none", "none, gzip, snappy, lz4, zstd", _choice),
    Option("kafka.compression.gzip.level", "-1", "1 to 9, or -1 for 6", _number(-1, 9)),
    Option("kafka.compression.lz4.level", "1", "1 to 17; above 12 is the same as 12", _number(1, 17)),
    Option("kafka.compression.zstd.level", "3", "-131072 to 22", _number(-131072, 22)),
    Option("kafka.request.timeout.ms", "30000", "", _number(1_000)),
    Option("kafka.max.request.size", str(REQUEST_BYTES_MAX), "largest record, in bytes", _number(1_000)),
    Option("kafka.acks", "all", "only all"),
)

_OPTIONS = {option.name: option for option in (*OPTIONS, *KAFKA_OPTIONS)}
#: Options of Java's producer without effect here.
IGNORED = frozenset(
    """batch.size buffer.memory client.dns.lookup connections.max.idle.ms delivery.timeout.ms enable.idempotence
    linger.ms max.block.ms max.in.flight.requests.per.connection metadata.max.age.ms metadata.max.idle.ms
    receive.buffer.bytes reconnect.backoff.max.ms reconnect.backoff.ms retries retry.backoff.max.ms retry.backoff.ms
    send.buffer.bytes socket.connection.setup.timeout.max.ms socket.connection.setup.timeout.ms
    sasl.client.callback.handler.class ssl.protocol ssl.enabled.protocols enable.metrics.push metric.reporters
    metrics.num.samples metrics.recording.level metrics.sample.window.ms metadata.recovery.strategy
    metadata.recovery.rebootstrap.trigger.ms partitioner.adaptive.partitioning.enable
    partitioner.availability.timeout.ms""".split()  # noqa: SIM905 - a list of so many would fill the page
)
#: By names and beginnings of names of well-known options, which no other option is like.
_WHY_NOT = {
    "key.serializer": "keys are already bytes or strings",
    "value.serializer": "values are already bytes or strings",
    "partitioner.": "the partition is the Java default partitioner's, or the column `partition`",
    "transaction": "the sink uses no transactions",
    "interceptor.classes": "the sink does not run in Java",
    "security.providers": "the sink does not run in Java",
    "ssl.engine.factory.class": "the sink does not run in Java",
    "ssl.provider": "the sink does not run in Java",
    "ssl.keymanager.algorithm": "the sink does not run in Java",
    "ssl.trustmanager.algorithm": "the sink does not run in Java",
    "ssl.secure.random.implementation": "the sink does not run in Java",
    "ssl.cipher.suites": "Python's cipher suites are used",
    "ssl.keystore.key": "key and certificates are in the file kafka.ssl.keystore.location",
    "ssl.keystore.certificate.chain": "key and certificates are in the file kafka.ssl.keystore.location",
    "sasl.kerberos.": "of SASL, PLAIN, SCRAM and OAUTHBEARER are supported",
    "sasl.login.": "of SASL, PLAIN, SCRAM and OAUTHBEARER are supported",
    "sasl.oauthbearer.": "of OAUTHBEARER, only a token in a file is supported: "
    "kafka.sasl.oauthbearer.token.endpoint.url=file:///PATH",
    **dict.fromkeys(("group.id", "auto.offset.reset", "isolation.level", "fetch."), "it is an option of consumers"),
    **dict.fromkeys(
        ("startingoffsets", "endingoffsets", "startingtimestamp", "endingtimestamp", "failondataloss", "includeheaders",
         "maxoffsetspertrigger", "minoffsetspertrigger", "minpartitions", "subscribe", "assign", "groupidprefix"),
        "it is an option of Spark's Kafka source",
    ),
}  # fmt: skip
#: Options of earlier versions.
_REMOVED = {
    "arranged": "fencepost.spark.append and fencepost.spark.stream arrange the rows (leave it out)",
    "same.split": "a retry may split the rows into any tasks (leave it out)",
    "unmatched.rows": "a retry with other rows is refused (leave it out; for other rows use another sink.id)",
    "first.run": "records that others wrote before the first run are no loss (leave it out)",
}
#: Options that Spark reads or adds.
_SPARKS = frozenset({"checkpointlocation", "path", "queryname", "asyncprogresstrackingenabled"})


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked options. They are sent to the tasks, including the secrets in `client`. `batch_id`: None for a load."""

    plan: Plan
    batch_id: int | None
    topics: tuple[str, ...]
    topic_column: bool
    report: str
    compression: str | None
    level: int | None
    record_bytes_max: int
    ignored: tuple[str, ...]
    client: dict[str, Any] = field(repr=False)

    def plan_for(self, message_bytes_max: int) -> Plan:
        """The plan for a topic with this max.message.bytes."""
        bytes_max = max(1_000, min(self.plan.append_bytes_max, message_bytes_max - _OVERHEAD_BYTES))
        return replace(self.plan, append_bytes_max=bytes_max)


class _Given:
    """The options that the user set, by name."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.texts = {name.lower(): text for name, text in options.items()}

    def text(self, name: str) -> str:
        return self.texts.get(name, _OPTIONS[name].default or "")

    def __getitem__(self, name: str) -> Any:
        """Raises SinkError."""
        stated = self.text(name)
        try:
            return _OPTIONS[name].read(_OPTIONS[name], stated)
        except ValueError as error:
            raise SinkError(f"option {name}={stated}: {error}") from None

    def level(self, codec: str) -> int | None:
        """The compression level; None for the codec's default."""
        name = f"kafka.compression.{codec}.level"
        level: int | None = self[name] if self.texts.get(name, "").strip() else None
        return None if (codec, level) == ("gzip", -1) else level


def settings(options: Mapping[str, str]) -> Settings:
    """Raises SinkError."""
    if not options:
        raise SinkError(
            "no option is set: Spark does not pass the OPTIONS of CREATE TABLE to Python formats (use CREATE TEMPORARY "
            "VIEW … USING fencepost OPTIONS (…), or INSERT INTO … WITH (…))"
        )
    given = _Given(options)
    ignored = _refuse_unknown(given)
    for option in OPTIONS:
        if option.default is None and not given.text(option.name).strip():
            raise SinkError(f"option {option.name!r} is required: {option.meaning}")
    topic, topics = given["topic"], given["topics"]
    if not topic and not topics:
        raise SinkError("option 'topic' is required, or 'topics' with a column `topic`")
    if topic and topics:
        raise SinkError(
            "options 'topic' and 'topics' are both set (set 'topic' for all rows, or 'topics' with a column `topic`)"
        )
    if (acks := given.text("kafka.acks").lower()) not in ("all", "-1"):
        raise SinkError(f"kafka.acks={acks} is not supported: exactly-once writes need all")
    compression, record_bytes_max = given["kafka.compression.type"], given["kafka.max.request.size"]
    levels = {codec: given.level(codec) for codec in _CODECS}
    return Settings(
        Plan(
            given["sink.id"],
            patience_seconds=given["patience.seconds"],
            append_bytes_max=max(1_000, min(given["batch.bytes"], record_bytes_max - _OVERHEAD_BYTES)),
        ),
        batch_id=given["batch.id"],
        topics=(topic,) if topic else tuple(topics),
        topic_column=not topic,
        report=given["report"],
        compression=None if compression == "none" else compression,
        level=levels.get(compression),
        record_bytes_max=record_bytes_max,
        ignored=tuple(sorted(ignored)),
        client=client_options(options),
    )


def _refuse_unknown(given: _Given) -> list[str]:
    """Returns the ignored options."""
    ignored = []
    for name in given.texts.keys() - _OPTIONS.keys() - _SPARKS:
        javas = name.removeprefix("kafka.")
        if javas in IGNORED and javas != name:
            ignored.append(name)
            continue
        if name in _REMOVED:
            raise SinkError(f"option {name} was removed: {_REMOVED[name]}")
        why = next((why for beginning, why in _WHY_NOT.items() if javas.startswith(beginning)), "")
        near = difflib.get_close_matches(name, _OPTIONS, 1)
        raise SinkError(
            f"unknown option {name!r}"
            + (f": {why}" if why else f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(_OPTIONS)})")
        )
    return ignored


def client_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Connection options for `fencepost.spark.log.Log` (aiokafka's names and `ssl_*`) from the `kafka.*` options.
    Raises SinkError."""
    given = _Given(options)
    protocol = given["kafka.security.protocol"]
    found: dict[str, Any] = {
        "bootstrap_servers": ",".join(given["kafka.bootstrap.servers"]),
        "client_id": given.text("kafka.client.id") or _OPTIONS["kafka.client.id"].default,
        "security_protocol": protocol,
    }
    if "kafka.request.timeout.ms" in given.texts:
        found["request_timeout_ms"] = given["kafka.request.timeout.ms"]
    if protocol.startswith("SASL"):
        found |= _sasl(given)
    if protocol.endswith("SSL"):
        found |= _tls(given)
    return found


def _sasl(given: _Given) -> dict[str, Any]:
    mechanism = given["kafka.sasl.mechanism"]
    if mechanism == "OAUTHBEARER":
        name = "kafka.sasl.oauthbearer.token.endpoint.url"
        try:
            return {"sasl_mechanism": mechanism, "sasl_oauth_token_file": str(token_file(given.text(name)))}
        except ValueError as error:
            raise SinkError(f"option {name} {error}") from None
    jaas = dict(re.findall(r"""(\w+)\s*=\s*"((?:[^"\\]|\\.)*)\"""", given.text("kafka.sasl.jaas.config")))
    if not {"username", "password"} <= set(jaas):
        raise SinkError(
            'kafka.sasl.jaas.config needs username="…" and password="…", as in '
            'org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="p";'
        )
    unescaped = {name: re.sub(r"\\(.)", r"\1", value) for name, value in jaas.items()}
    return {
        "sasl_mechanism": mechanism,
        "sasl_plain_username": unescaped["username"],
        "sasl_plain_password": unescaped["password"],
    }


def _tls(given: _Given) -> dict[str, Any]:
    files = {
        "ssl_cadata": given.text("kafka.ssl.truststore.certificates"),
        "ssl_cafile": given.text("kafka.ssl.truststore.location"),
        "ssl_certfile": given.text("kafka.ssl.keystore.location"),
        "ssl_keyfile": given.text("kafka.ssl.keystore.location"),
        "ssl_password": given.text("kafka.ssl.key.password"),
    }
    verify = bool(given.text("kafka.ssl.endpoint.identification.algorithm").strip())
    if trusted := _from_java_store(given, "truststore", lambda *store: pem(trusted_certificates(*store[:2]))):
        files |= {"ssl_cafile": "", "ssl_cadata": trusted}
    if key := _from_java_store(given, "keystore", identity):
        files |= {"ssl_certfile": "", "ssl_keyfile": "", "ssl_password": "", "ssl_identity": key}
    return {name: value for name, value in files.items() if value} | {"ssl_check_hostname": verify}


def _from_java_store(given: _Given, store: str, read: Callable[[bytes, str | None, str | None], str]) -> str:
    """PEM of a Java store, read on the driver; empty for a PEM file, which each process reads. Raises SinkError."""
    kind, location = given[f"kafka.ssl.{store}.type"], given.text(f"kafka.ssl.{store}.location")
    if not location:
        return ""
    try:
        data = Path(location).read_bytes()
        if not is_key_store(data):
            return ""
        return read(
            data, given.text(f"kafka.ssl.{store}.password") or None, given.text("kafka.ssl.key.password") or None
        )
    except KeyStoreError as error:
        raise SinkError(f"kafka.ssl.{store}.location={location} {error}") from None
    except OSError as error:
        if kind == "PEM" and not location.lower().endswith((".jks", ".p12", ".pfx")):
            return ""
        raise SinkError(f"kafka.ssl.{store}.location={location} cannot be read: {error.strerror}") from None
