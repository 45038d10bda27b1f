"""All configuration keys. Each key is a field of a dataclass below.

    name: type = _key(default, "what it means", …)

The field's name is the key in the TOML file, and a dataclass is a table of the file. Validation, `fencepost config
explain`, docs/configuration.md, environment variables and SIGHUP all use these definitions. To add a key, add a field
and run `python -m tests.pages`.

Other modules: `keys` (the keys as a list), `reading` (file, environment and command line), `client_properties`
(Kafka's client.properties), `locating` (lines of a file), `reference` (texts), `reloading` (changes by SIGHUP).
"""

# ruff: noqa: RUF009 - `_key` returns a new field for each call.

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address, NodeId

Mode = Literal["gateway", "sidecar"]
RefusalScope = Literal["partition", "request"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
ClientCertificates = Literal["none", "optional", "required"]
TlsVersion = Literal["1.2", "1.3"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]

#: Instance ids are 1 to 255, and each restarted worker takes another one.
_WORKERS_MAX: Final = 64

_DEFAULT_LISTEN: Final = Address("127.0.0.1", 19092)

#: Names that begin so are matched by no pattern. A check on `__consumer_offsets` would refuse every offset commit in a
#: transaction: its records, which the group coordinator writes, state no expected offset.
NO_PATTERN_FOR: Final = "__"
_NO_CONFIGS: Final[Mapping[str, str]] = MappingProxyType({})


class Problem(NamedTuple):
    """`where` – file and line, variable or option; empty where the value came from code."""

    key: str
    text: str
    where: str = ""

    def __str__(self) -> str:
        return ": ".join(each for each in (self.where, self.key, self.text) if each)


class Refused(ConfigError):
    """The errors in a configuration, one line each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        head = () if len(self.problems) == 1 else (f"{len(self.problems)} errors in the configuration:",)
        super().__init__("\n".join((*head, *map(str, self.problems))))


@dataclass(frozen=True, slots=True)
class Meaning:
    """Metadata of a key.

    `unit` – if the name does not end with it. `live` – SIGHUP changes the key (`Proxy.reload`). `option` – of
    `fencepost proxy`. `also` – another environment variable. `example` – for keys without a default. `above`, `least`,
    `most` – bounds of a number; limits have `above` 0 by default. `hidden` – for tests: accepted, but undocumented.
    """

    doc: str
    unit: str | None = None
    live: bool = False
    option: str | None = None
    also: str | None = None
    example: Any = None
    above: float | None = None
    least: int | None = None
    most: int | None = None
    hidden: bool = False

    def problem(self, value: Any) -> str | None:
        """What is wrong if `value` is a number outside the bounds."""
        if self.above is not None and not value > self.above:
            return f"must be above {self.above}, not {value!r}"
        if self.least is not None and not (value >= self.least and (self.most is None or value <= self.most)):
            bounds = f"at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
            return f"must be {bounds}, not {value!r}"
        return None


def _key(default: Any, doc: str, **more: Any) -> Any:
    return field(default=default, metadata={"meaning": Meaning(doc, **more)})


def _table(default_factory: Callable[[], Any], doc: str, **more: Any) -> Any:
    return field(default_factory=default_factory, metadata={"meaning": Meaning(doc, **more)})


def _limit(default: Any, doc: str, *, above: float | None = 0, **more: Any) -> Any:
    return _key(default, doc, above=above, **more)


def _is_here(address: Address) -> bool:
    """On this machine's loopback."""
    try:
        return ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"


def _refuse(table: str, problems: Iterator[tuple[str, str]]) -> None:
    found = [Problem(f"{table}.{key}" if table else key, text) for key, text in problems]
    if found:
        raise Refused(found)


def _outside(values: object) -> Iterator[tuple[str, str]]:
    """Numbers outside their bounds."""
    for each in fields(values):  # type: ignore[arg-type]
        meaning: Meaning | None = each.metadata.get("meaning")
        if meaning is not None and (problem := meaning.problem(getattr(values, each.name))) is not None:
            yield each.name, problem


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process. At a limit, the client's connection waits, gets a retriable Kafka error, or is closed.

    The log names the limit. Units are in the key name.
    """

    frame_bytes_max: int = _limit(
        104_857_600, "maximum size of a request or response, like Kafka's socket.request.max.bytes"
    )
    connections_max: int = _limit(2_000, "maximum client connections. Further ones are closed when accepted", live=True)
    address_connections_max: int = _limit(
        2_000,
        "maximum client connections from one address. Clients behind a gateway or on the proxy's host share an address",
        live=True,
    )
    in_flight_requests_max: int = _limit(
        100, "maximum unanswered requests per connection. Above, the proxy stops reading from it", live=True
    )
    buffered_bytes_max: int = _limit(
        268_435_456,
        "maximum bytes buffered for all connections. Above, the proxy stops reading from clients",
        live=True,
    )
    decompressed_bytes_max: int = _limit(
        104_857_600, "maximum decompressed size of a batch. Above, the client gets MESSAGE_TOO_LARGE"
    )
    sequencer_queue_max: int = _limit(
        1_000, "maximum pending appends per checked partition. Further ones get a retriable error", unit="appends"
    )
    sequencer_wait_max_seconds: float = _limit(
        5.0,
        "maximum wait of a pending append. A third of the client's request timeout applies if it is shorter",
        live=True,
    )
    handshake_seconds: float = _limit(
        10.0, "maximum time for the TLS handshake, and again for the first request", live=True
    )
    header_seconds: float = _limit(10.0, "maximum pause within a request header or a buffered request", live=True)
    client_idle_seconds: float = _limit(
        600.0, "idle time after which a client is disconnected, like Kafka's connections.max.idle.ms", live=True
    )
    commit_wait_seconds: float = _limit(
        10.0,
        "maximum time to validate a transaction before its commit, where topics check expected offsets. "
        "After that the client must retry",
    )
    connect_timeout_seconds: float = _limit(5.0, "timeout for connecting to a broker")
    request_timeout_seconds: float = _limit(
        30.0, "timeout for the proxy's own requests to a broker and for receiving a buffered request"
    )
    reconnect_backoff_min_seconds: float = _limit(0.05, "initial delay before reconnecting to a broker")
    reconnect_backoff_max_seconds: float = _limit(1.0, "maximum delay before reconnecting to a broker")
    control_in_flight_max: int = _limit(
        256, "maximum unanswered requests of the proxy itself per broker connection", unit="requests"
    )
    metadata_refresh_seconds: float = _limit(5.0, "interval at which the proxy refreshes brokers and known topics")
    resolve_retry_seconds: float = _limit(
        0.05, "delay before the proxy reads the log again to resolve an in-doubt append"
    )
    takeover_seconds: float = _limit(
        35.0,
        "time during which conditional appends to `true` topics get a retriable error after the proxy "
        "starts alongside another process or another process dies: Kafka may still hold its requests. "
        "Should not be below connect timeout + request timeout",
    )
    expansion_wait_seconds: float = _limit(
        60.0,
        "maximum time that a partition expansion waits for in-flight appends, transactions and other "
        "proxy processes. After that it is cancelled",
    )
    partition_grace_seconds: float = _limit(
        900.0,
        "grace period after a partition expansion (topic config partitioner): the proxy checks the "
        "placement of keys in batches without a partition count. Use more than delivery.timeout.ms + "
        "metadata.max.age.ms of any producer",
    )
    served_counts_max: int = _limit(
        10_000,
        "maximum client and topic pairs for which the proxy remembers the last reported partition count",
        unit="clients × topics",
    )
    remembered_producers_max: int = _limit(
        50_000,
        "maximum idempotent producers, counted per partition, whose last append the proxy remembers on "
        "checked topics (KAFKA-5793)",
    )
    gated_without_commit_seconds: float = _limit(
        600.0,
        "time after which a group gets a gated partition although it has committed nothing on the prior "
        "partition (topic config fencepost.ordered.partition.expansion). The proxy logs a warning",
    )
    gated_without_progress_seconds: float = _limit(
        3600.0,
        "the same for a group that has committed there, counted from its last progress. A client that "
        "commits only when records arrive never commits the last ones",
    )
    group_probe_seconds: float = _limit(
        1.0,
        "interval at which the proxy reads the offsets of groups that wait for a gated partition. Longer "
        "if many groups wait",
    )
    watched_partitions_per_second: float = _limit(
        150.0,
        "rate at which partitions are checked for open transactions and producers. 10,000 partitions take "
        "about a minute",
    )
    watched_shown_max: int = _limit(
        20,
        "maximum partitions, open transactions and hanging transactions named in metrics and on the "
        "status page; the worst are shown",
        unit="of each kind",
        live=True,
    )
    metric_partitions_shown_max: int = _limit(
        500,
        "maximum checked partitions with log end and sequence offset in metrics, in the order of their "
        "first append. The others are counted",
        unit="partitions",
        live=True,
    )
    drain_seconds: float = _limit(
        10.0,
        "maximum time for requests in progress when a connection closes or the process stops",
        live=True,
    )
    drain_notice_seconds: float = _key(
        0.0,
        "time during which the process serves with /readyz red before it stops, so that a load balancer can react",
        least=0,
        most=600,
        live=True,
    )

    @property
    def queued_seconds(self) -> float:
        """How long a broker may still hold a request after its connection broke.

        No proxy process waits longer for a response, including the connection attempt. A lower `takeover_seconds`
        applies to append barriers and takeovers only, not to partition sequencers.
        """
        return max(self.takeover_seconds, self.connect_timeout_seconds + self.request_timeout_seconds)

    def __post_init__(self) -> None:
        _refuse("limits", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from _outside(self)
        if self.buffered_bytes_max < self.frame_bytes_max:
            yield (
                "buffered_bytes_max",
                f"is {self.buffered_bytes_max} and must not be below limits.frame_bytes_max ({self.frame_bytes_max}): "
                "a single frame of that size could never be handled",
            )
        if self.reconnect_backoff_min_seconds > self.reconnect_backoff_max_seconds:
            yield (
                "reconnect_backoff_min_seconds",
                f"is {self.reconnect_backoff_min_seconds:g} and must not be above limits.reconnect_backoff_max_seconds "
                f"({self.reconnect_backoff_max_seconds:g})",
            )


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """Names of the record headers that clients use."""

    expected_offset: str = _key("fencepost-expected-offset", "record header with the expected offset of its record")
    partition_count: str = _key(
        "fencepost-partition-count", "record header with the partition count by which the batch's keys were placed"
    )
    write_id: str = _key("fencepost-write-id", "record header that identifies a write, so that a retry is recognized")

    def __post_init__(self) -> None:
        _refuse("headers", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        observed: dict[str, str] = {}
        for each in fields(self):
            name = getattr(self, each.name).removeprefix("fencepost-")  # the rest is an alias
            if not name:
                yield each.name, "must not be empty"
            elif name in observed:
                yield each.name, f"the header names must differ, and headers.{observed[name]} is {name!r}, too"
            observed.setdefault(name, each.name)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Log on stderr."""

    level: LogLevel = _key("info", "minimum severity of log events", live=True, option="--log-level")
    format: LogFormat = _key(
        "console", "log format: key=value lines, or one JSON object per line", live=True, option="--log-format"
    )


@dataclass(frozen=True, slots=True)
class ListenTls:
    """TLS for client connections, if the table is present. PEM files; changed files are loaded without a restart."""

    certificate_file: Path = _key(
        MISSING,
        "certificate and intermediate certificates, used by all listeners",
        live=True,
        example="/etc/fencepost/tls/tls.crt",
    )
    key_file: Path | None = _key(
        None,
        "private key. Default: in certificate_file",
        live=True,
        example="/etc/fencepost/tls/tls.key",
    )
    key_password_file: Path | None = _key(
        None, "file whose first line is the key's password", live=True, example="/etc/fencepost/tls/password"
    )
    client_certificates: ClientCertificates = _key(
        "none",
        "whether clients present a certificate. With optional, a certificate that is presented must be "
        "trusted. Kafka identifies clients by SASL, not by certificate",
        live=True,
    )
    client_ca_file: Path | None = _key(
        None,
        "CA of client certificates. Required unless client_certificates is none",
        live=True,
        example="/etc/fencepost/clients-ca.crt",
    )
    min_version: TlsVersion = _key("1.2", "minimum TLS version", live=True)

    def __post_init__(self) -> None:
        _refuse("listen_tls", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        if (self.client_certificates == "none") is not (self.client_ca_file is None):
            yield (
                "client_ca_file",
                'is required for client_certificates = "optional" or "required", and not allowed otherwise: it is the '
                "CA of client certificates",
            )


@dataclass(frozen=True, slots=True)
class UpstreamTls:
    """TLS for connections to brokers, if the table is present. PEM files."""

    ca_file: Path | None = _key(
        None,
        "CA of the brokers' certificates. Default: the system's CAs",
        live=True,
        example="/etc/fencepost/kafka-ca.crt",
    )
    certificate_file: Path | None = _key(
        None,
        "client certificate and intermediate certificates, for brokers that require one",
        live=True,
        example="/etc/fencepost/tls/proxy.crt",
    )
    key_file: Path | None = _key(
        None,
        "private key. Default: in certificate_file",
        live=True,
        example="/etc/fencepost/tls/proxy.key",
    )
    key_password_file: Path | None = _key(
        None, "file whose first line is the key's password", live=True, example="/etc/fencepost/tls/password"
    )
    check_hostname: bool = _key(
        True,
        "whether a broker's certificate must match its host name in `upstream` or Kafka's metadata. Host "
        "names are also sent as SNI",
        live=True,
    )
    min_version: TlsVersion = _key("1.2", "minimum TLS version", live=True)

    def __post_init__(self) -> None:
        _refuse("upstream_tls", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        for name in ("key_file", "key_password_file"):
            if self.certificate_file is None and getattr(self, name) is not None:
                yield name, "a key needs its certificate: certificate_file"


@dataclass(frozen=True, slots=True)
class ControlSasl:
    """The proxy's own login at Kafka, if the table is present. Clients log in as themselves.

    Files are read at every login.
    """

    mechanism: SaslMechanism = _key(MISSING, "SASL mechanism", example="SCRAM-SHA-512")
    username: str | None = _key(None, "user name, for PLAIN and SCRAM", example="fencepost")
    password_file: Path | None = _key(
        None, "file whose first line is the password, for PLAIN and SCRAM", example="/etc/fencepost/password"
    )
    token_file: Path | None = _key(
        None, "file whose first line is the token, for OAUTHBEARER", example="/etc/fencepost/token"
    )

    def __post_init__(self) -> None:
        _refuse("control_sasl", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        needed = ("token_file",) if self.mechanism == "OAUTHBEARER" else ("username", "password_file")
        for name in ("username", "password_file", "token_file"):
            if (getattr(self, name) is not None) is not (name in needed):
                missing = "must be given" if name in needed else "is not for this mechanism"
                yield name, f"{missing}: {self.mechanism} needs only {' and '.join(needed)}"


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Virtual configs for the topics whose name matches a glob (`*`, `?`, `[abc]`; case matters).

    Never for names that begin with `NO_PATTERN_FOR`: Kafka's internal topics, and by custom those of tools.
    """

    glob: str
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The configuration of `fencepost proxy`. `state_topic` is not a key: all proxies of a cluster share one topic."""

    upstream: tuple[Address, ...] = _key(
        MISSING,
        "Kafka's bootstrap servers",
        option="--bootstrap-server",
        also="FENCEPOST_BOOTSTRAP_SERVER",
        example=["kafka-1:9092", "kafka-2:9092"],
    )
    mode: Mode = _key(
        "gateway",
        "`gateway`: the proxy serves all brokers, with a listener for each, and advertises itself to "
        "clients. `sidecar`: the proxy serves only `broker`, which advertises the sidecar's address",
        option="--mode",
    )
    broker: Address | None = _key(
        None,
        "client listener of the sidecar's broker. The broker must advertise `advertised_host` and the "
        "port of `listen` for it. `upstream` must be a listener that clients do not use",
        option="--broker",
        example="127.0.0.1:9094",
    )
    broker_tls: bool = _key(
        True,
        "whether `upstream_tls` applies to `broker`. With false, that listener must be plaintext on the loopback",
    )
    listen: Address = _key(
        _DEFAULT_LISTEN,
        "bootstrap listener for clients. Port 0: any free port, also for the broker listeners",
        option="--listen",
    )
    advertised_host: str | None = _key(
        None,
        "host advertised to clients. Default: the address by which the client reached the proxy",
        option="--advertised-host",
        example="kafka.example.com",
    )
    broker_ports: Mapping[NodeId, int] = _table(
        dict,
        "listener port by broker id. Default: port of `listen` + 1 + broker id",
        example={"1": 20001, "2": 20002},
    )
    refusal_scope: RefusalScope = _key(
        "partition",
        "what a wrong expected offset refuses: the batch of that partition, or the whole request as "
        "KIP-27 literally says",
        option="--refusal-scope",
    )
    headers: HeaderNames = field(default_factory=HeaderNames)
    topic_patterns: tuple[TopicPattern, ...] = _key(
        (),
        "topic configs by topic name pattern (*, ?, [abc]; case-sensitive). They apply from topic "
        "creation; the first match applies alone. A config set on the topic itself wins. Names that begin "
        "with __ never match",
        example={"orders-*": {"fencepost.check.expected.offsets": "required"}},
    )
    unlisted_topics: Mapping[str, str] = _table(
        dict,
        "topic configs for topics that match no pattern, except names that begin with __",
        example={"fencepost.check.expected.offsets": "false"},
    )
    limits: Limits = field(default_factory=Limits)
    config_lease_seconds: float = _key(
        3.0,
        "maximum age of the proxy's view of topic configs. Above, appends to checked topics get a "
        "retriable error. Must be the same on all proxies of a cluster",
        above=0,
    )
    state_topic: str = "__fencepost_state"
    status: Address | None = _key(
        None,
        "address of the status page, /metrics, /livez and /readyz. Default: off",
        option="--status",
        example="127.0.0.1:8080",
    )
    status_token_file: Path | None = _key(
        None,
        "file whose first line is the token for changes through `status` (`fencepost expansions open "
        "--token-file`). Read at each use. Default: no changes allowed",
        example="/etc/fencepost/status-token",
    )
    log: LogConfig = field(default_factory=LogConfig)
    workers: int = _key(
        1,
        "number of worker processes that share the listeners (Linux). Each has its own limits",
        option="--workers",
        least=1,
        most=_WORKERS_MAX,
    )
    watch_transactions: bool = _key(
        True, "whether to monitor the cluster's transactions for the status page and metrics"
    )
    unsafe_disable_fencing: bool = _key(False, "for tests that show why fenced appends are needed", hidden=True)
    listen_tls: ListenTls | None = None
    upstream_tls: UpstreamTls | None = None
    control_sasl: ControlSasl | None = None

    def __post_init__(self) -> None:
        _refuse("", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from _outside(self)
        if not self.upstream:
            stated = 'no Kafka server given: use --bootstrap-server HOST:PORT, or upstream = ["HOST:PORT"] in the file'
            yield "upstream", stated
        if any(not address.port for address in self.upstream):
            yield "upstream", "a broker's port cannot be 0"
        if self.mode == "sidecar" and self.broker is None:
            yield "broker", 'is required for mode = "sidecar": the client listener of its broker'
        if self.mode != "sidecar" and not self.broker_tls:
            yield "broker_tls", 'applies to mode = "sidecar" only: a gateway uses `upstream_tls` for its brokers'
        if self.mode == "sidecar" and (self.broker_ports or not self.listen.port):
            key = "broker_ports" if self.broker_ports else "listen"
            yield key, 'mode = "sidecar" has one listener, and its port is what the broker advertises'
        if self.mode == "sidecar" and not self.broker_tls and self.broker is not None and not _is_here(self.broker):
            yield "broker_tls", f"broker = {self.broker} is not on the loopback: logins would be sent in plaintext"
        if self.workers > 1 and sys.platform != "linux":
            yield "workers", "more than one worker process needs Linux"
        ports = [*self.broker_ports.values()]
        if self.listen.port:
            ports.append(self.listen.port)
        if len(set(ports)) != len(ports):
            yield "broker_ports", "two brokers share a port, or one uses the port of the bootstrap listener"
        for pattern in self.topic_patterns:
            if pattern.glob.startswith(NO_PATTERN_FOR):
                yield (
                    f'topics."{pattern.glob}"',
                    f"no pattern matches names that begin with {NO_PATTERN_FOR}: Kafka's internal topics are never "
                    "checked. For other topics, set the config on the topic itself (kafka-configs --alter)",
                )

    def configs_for(self, topic: str) -> Mapping[str, str]:
        """The virtual configs that this file gives a topic: the first matching glob's, else `unlisted_topics`."""
        if topic.startswith(NO_PATTERN_FOR):
            return _NO_CONFIGS
        for pattern in self.topic_patterns:
            if fnmatchcase(topic, pattern.glob):
                return pattern.configs
        return self.unlisted_topics
