"""The sink's options, checked before the first row. `OPTIONS` and `KAFKA_OPTIONS` list all of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fencepost.spark.errors import SinkError

#: Default of Java's max.request.size.
REQUEST_BYTES_MAX = 1_048_576


class Option(NamedTuple):
    """`default`: None if required, "" for none."""

    name: str
    default: str | None
    meaning: str


OPTIONS = (
    Option("kafka.bootstrap.servers", None, "addresses of the proxy: HOST:PORT, comma-separated"),
    Option(
        "topic",
        "",
        "topic of all rows. If not set, the column `topic` names the topic of each row",
    ),
    Option("topics", "", "all topics that the column `topic` may name, comma-separated"),
    Option(
        "sink.id",
        None,
        "permanent name of this stream or load. Rows of one sink.id are written once; another "
        "sink.id appends them again",
    ),
    Option(
        "arranged",
        "false",
        "true: all rows of a Kafka partition are in one task, as fencepost.spark.arrange "
        "puts them. A retry may then split the rows into other tasks",
    ),
    Option(
        "unmatched.rows",
        "auto",
        "what to do with rows in the topic that a retried task does not have. refuse: stop "
        "before the task appends. compare: go on, and compare the whole batch before its "
        "commit. keep: as compare, and leave extra rows in the topic; for one run. auto: "
        "refuse for df.write; compare for streams, but refuse if the data looks different",
    ),
    Option(
        "same.split",
        "false",
        "true: a retry splits rows without key and partition into the same tasks, even if "
        "equal rows in several tasks suggest otherwise",
    ),
    Option(
        "first.run",
        "false",
        "for one run. Streams: nothing of the unfinished batch was deleted from the topic, "
        "or it may be written again. Loads: this load never ran, so do not search the topic "
        "for its rows",
    ),
    Option("patience.seconds", "120", "how long a task retries while it cannot append"),
    Option(
        "batch.bytes", "900000", "size of an uncompressed record batch. The topic's max.message.bytes also limits it"
    ),
    Option(
        "report",
        "",
        "file on the driver that receives rows found and appended per partition, as JSON, after each batch",
    ),
)

KAFKA_OPTIONS = (
    Option("kafka.client.id", "fencepost-sink", ""),
    Option("kafka.security.protocol", "PLAINTEXT", "PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
    Option("kafka.sasl.mechanism", "", "PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
    Option("kafka.sasl.jaas.config", "", 'as in Java: …LoginModule required username="…" password="…";'),
    Option("kafka.ssl.truststore.type", "PEM", "only PEM; Java keystores are not supported"),
    Option("kafka.ssl.truststore.location", "", "PEM file on the driver and all executors"),
    Option("kafka.ssl.truststore.certificates", "", "certificates as PEM text"),
    Option("kafka.ssl.keystore.type", "PEM", "PEM"),
    Option("kafka.ssl.keystore.location", "", "PEM file with certificate chain and private key"),
    Option("kafka.ssl.key.password", "", "password of the private key"),
    Option("kafka.ssl.endpoint.identification.algorithm", "https", "empty: do not verify host names"),
    Option("kafka.compression.type", "none", "none, gzip, snappy, lz4, zstd"),
    Option("kafka.compression.gzip.level", "-1", "1 to 9, or -1 for 6"),
    Option("kafka.compression.lz4.level", "1", "1 to 17; above 12 is the same as 12"),
    Option("kafka.compression.zstd.level", "3", "-131072 to 22"),
    Option("kafka.request.timeout.ms", "30000", ""),
    Option("kafka.max.request.size", str(REQUEST_BYTES_MAX), "largest record, in bytes"),
    Option("kafka.acks", "all", "only all"),
)

#: Options of Java's producer without effect here.
IGNORED = frozenset(
    """batch.size buffer.memory client.dns.lookup connections.max.idle.ms delivery.timeout.ms
    enable.idempotence linger.ms
    max.block.ms max.in.flight.requests.per.connection metadata.max.age.ms metadata.max.idle.ms receive.buffer.bytes
    reconnect.backoff.max.ms reconnect.backoff.ms retries retry.backoff.max.ms retry.backoff.ms send.buffer.bytes
    socket.connection.setup.timeout.max.ms socket.connection.setup.timeout.ms sasl.client.callback.handler.class
    ssl.protocol ssl.enabled.protocols""".split()  # noqa: SIM905 - a list of so many would fill the page
)
_WHY_NOT = {
    "key.serializer": "keys are already bytes or strings",
    "value.serializer": "values are already bytes or strings",
    "partitioner.class": "the partition is the Java default partitioner's, or the column `partition`",
    "transactional.id": "the sink uses no transactions",
    "interceptor.classes": "the sink does not run in Java",
}
#: Options that Spark reads or adds.
_SPARKS = frozenset({"checkpointlocation", "path", "queryname", "asyncprogresstrackingenabled"})
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_UNMATCHED = ("auto", "refuse", "compare", "keep")
_COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
#: Compression levels per codec, as in Java's producer.
_LEVELS = {"gzip": (-1, 9), "lz4": (1, 17), "zstd": (-131072, 22)}
_PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked options. They are sent to the tasks, including the secrets in `client`."""

    topics: tuple[str, ...]
    topic_column: bool
    sink: str
    arranged: bool
    same_split: bool
    unmatched: str
    first_run: bool
    patience_seconds: float
    batch_bytes: int
    report: str
    compression: str | None
    #: Compression level; None: default.
    level: int | None
    record_bytes_max: int
    ignored: tuple[str, ...]
    client: dict[str, Any] = field(repr=False)


def settings(options: Mapping[str, str]) -> Settings:
    """Raises SinkError."""
    given = {name.lower(): value for name, value in options.items()}
    known = [option.name for option in (*OPTIONS, *KAFKA_OPTIONS)]
    ignored = []
    for name in given:
        if name in known or name in _SPARKS:
            continue
        if name.removeprefix("kafka.") in IGNORED and name.startswith("kafka."):
            ignored.append(name)
            continue
        why = _WHY_NOT.get(name.removeprefix("kafka."), "")
        near = difflib.get_close_matches(name, known, 1)
        raise SinkError(
            f"unknown option {name!r}"
            + (f": {why}" if why else f"; did you mean {near[0]!r}?" if near else "")
            + f" (known options: {', '.join(known)})"
        )
    for option in OPTIONS:
        if option.default is None and not given.get(option.name, "").strip():
            raise SinkError(f"option {option.name!r} is required: {option.meaning}")
    topic, topics = given.get("topic", "").strip(), _words(given.get("topics", ""))
    if not topic and not topics:
        raise SinkError("option 'topic' is required, or 'topics' with a column `topic`")
    if topic and topics:
        raise SinkError(
            "options 'topic' and 'topics' are both set (set 'topic' for all rows, or 'topics' with a column `topic`)"
        )
    acks = given.get("kafka.acks", "all").lower()
    if acks not in ("all", "-1"):
        raise SinkError(f"kafka.acks={acks} is not supported: exactly-once writes need all")
    compression = given.get("kafka.compression.type", "none").lower()
    if compression not in _COMPRESSIONS:
        raise SinkError(f"kafka.compression.type={compression}: must be one of {', '.join(_COMPRESSIONS)}")
    record_bytes_max = _number(given, "kafka.max.request.size", 1_000)
    return Settings(
        topics=(topic,) if topic else tuple(topics),
        topic_column=not topic,
        sink=given["sink.id"].strip(),
        arranged=_truth(given, "arranged"),
        same_split=_truth(given, "same.split"),
        unmatched=_choice(given, "unmatched.rows", _UNMATCHED),
        first_run=_truth(given, "first.run"),
        patience_seconds=_number(given, "patience.seconds", 1),
        batch_bytes=max(1_000, min(_number(given, "batch.bytes", 1_000), record_bytes_max - _OVERHEAD_BYTES)),
        report=given.get("report", ""),
        compression=None if compression == "none" else compression,
        level=_level(given, compression),
        record_bytes_max=record_bytes_max,
        ignored=tuple(sorted(ignored)),
        client=client_options(given),
    )


#: Reserved in a batch for its header, commit tag, expected offset and partition count.
_OVERHEAD_BYTES = 16_000


def batch_bytes(settings: Settings, message_bytes_max: int) -> int:
    """Largest batch for a topic with this max.message.bytes."""
    return max(1_000, min(settings.batch_bytes, message_bytes_max - _OVERHEAD_BYTES))


def client_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Connection options for `fencepost.spark.log.Log` (aiokafka's names and `ssl_*`) from the `kafka.*` options.
    Raises SinkError."""
    given = {name.lower(): value for name, value in options.items()}
    found: dict[str, Any] = {"bootstrap_servers": ",".join(_words(given.get("kafka.bootstrap.servers", "")))}
    found["client_id"] = given.get("kafka.client.id") or "fencepost-sink"
    protocol = given.get("kafka.security.protocol", "PLAINTEXT").upper()
    if protocol not in _PROTOCOLS:
        raise SinkError(f"kafka.security.protocol={protocol}: must be one of {', '.join(_PROTOCOLS)}")
    found["security_protocol"] = protocol
    if "kafka.request.timeout.ms" in given:
        found["request_timeout_ms"] = _number(given, "kafka.request.timeout.ms", 1_000)
    if protocol.startswith("SASL"):
        found |= _sasl(given)
    if protocol.endswith("SSL"):
        found |= _tls(given)
    return found


def _sasl(given: Mapping[str, str]) -> dict[str, Any]:
    mechanism = given.get("kafka.sasl.mechanism", "").upper()
    if mechanism not in _MECHANISMS:
        raise SinkError(f"kafka.sasl.mechanism={mechanism}: must be one of {', '.join(_MECHANISMS)}")
    jaas = dict(re.findall(r"""(\w+)\s*=\s*"((?:[^"\\]|\\.)*)\"""", given.get("kafka.sasl.jaas.config", "")))
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


def _tls(given: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for store in ("truststore", "keystore"):
        kind = given.get(f"kafka.ssl.{store}.type", "PEM").upper()
        store_file = given.get(f"kafka.ssl.{store}.location", "")
        if kind != "PEM" or store_file.lower().endswith((".jks", ".p12", ".pfx")):
            raise SinkError(
                f"kafka.ssl.{store}: only PEM is supported (convert the store with `keytool -exportcert "
                "-rfc -keystore FILE -alias NAME`, or `openssl pkcs12 -in FILE -nodes` for a key, "
                f"and set kafka.ssl.{store}.type=PEM)"
            )
    if certificates := given.get("kafka.ssl.truststore.certificates"):
        found["ssl_cadata"] = certificates
    if location := given.get("kafka.ssl.truststore.location"):
        found["ssl_cafile"] = location
    if location := given.get("kafka.ssl.keystore.location"):
        found["ssl_certfile"] = found["ssl_keyfile"] = location
    if password := given.get("kafka.ssl.key.password"):
        found["ssl_password"] = password
    found["ssl_check_hostname"] = bool(given.get("kafka.ssl.endpoint.identification.algorithm", "https").strip())
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _truth(given: Mapping[str, str], name: str) -> bool:
    stated = given.get(name, "false").strip().lower()
    if stated not in ("true", "false"):
        raise SinkError(f"option {name}={stated}: must be true or false")
    return stated == "true"


def _choice(given: Mapping[str, str], name: str, among: tuple[str, ...]) -> str:
    stated = given.get(name, among[0]).strip().lower()
    if stated not in among:
        raise SinkError(f"option {name}={stated}: must be one of {', '.join(among)}")
    return stated


def _level(given: Mapping[str, str], compression: str) -> int | None:
    """The level for `encoding.build`. Checks all three options."""
    levels: dict[str, int | None] = {}
    for codec, (least, most) in _LEVELS.items():
        name = f"kafka.compression.{codec}.level"
        stated = given.get(name, "").strip()
        levels[codec] = None
        if stated:
            if not stated.lstrip("-").isdecimal() or not least <= int(stated) <= most:
                raise SinkError(f"option {name}={stated}: must be a whole number from {least} to {most}")
            levels[codec] = int(stated)
    if levels["gzip"] == -1:
        levels["gzip"] = None
    return levels.get(compression)


def _number(given: Mapping[str, str], name: str, least: int) -> int:
    [default] = [option.default for option in (*OPTIONS, *KAFKA_OPTIONS) if option.name == name]
    stated = given.get(name, default) or ""
    try:
        number = int(stated)
    except ValueError:
        number = -1
    if number < least:
        raise SinkError(f"option {name}={stated}: must be a whole number of at least {least}")
    return number
