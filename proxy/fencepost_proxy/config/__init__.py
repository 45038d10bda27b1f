"""All configuration keys. Each key is a field of a dataclass below, and the string after it is its documentation.

    name: type = default
    name: type = _key(default, live=True, …)

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
from typing import Any, ClassVar, Final, Literal, NamedTuple

from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address, NodeId

Mode = Literal["gateway", "sidecar"]
RefusalScope = Literal["partition", "request"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
ClientCertificates = Literal["none", "optional", "required"]
TlsVersion = Literal["1.2", "1.3"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
#: Values of a dataclass that do not fit together: key, and what is wrong.
Conflicts = Iterator[tuple[str, str]]

#: Names that begin so are matched by no pattern. A check on `__consumer_offsets` would refuse every offset commit in a
#: transaction: its records, which the group coordinator writes, state no expected offset.
NO_PATTERN_FOR: Final = "__"
_EXAMPLE_CONFIG: Final = "fencepost.check.expected.offsets"


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


def _key(default: Any = MISSING, *, factory: Callable[[], Any] | Any = MISSING, **facts: Any) -> Any:
    """`facts` – fields of `keys.Key`, which documents them."""
    return field(default=default, default_factory=factory, metadata=facts)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one process. At a limit, the client's connection waits, gets a retriable Kafka error, or is closed.

    The log names the limit. Units are in the key name.
    """

    frame_bytes_max: int = 104_857_600
    """Maximum size of a request or response, like Kafka's socket.request.max.bytes."""
    connections_max: int = _key(2_000, live=True)
    """Maximum client connections. Further ones are closed when accepted."""
    address_connections_max: int = _key(2_000, live=True)
    """Maximum client connections from one address. Clients behind a gateway or on the proxy's host share an address."""
    in_flight_requests_max: int = _key(100, live=True)
    """Maximum unanswered requests per connection. Above, the proxy stops reading from it."""
    buffered_bytes_max: int = _key(268_435_456, live=True)
    """Maximum bytes buffered for all connections. Above, the proxy stops reading from clients."""
    decompressed_bytes_max: int = 104_857_600
    """Maximum decompressed size of a batch; at most 33,554,432 for batches with Fencepost record headers. Above, the
    client gets MESSAGE_TOO_LARGE."""
    sequencer_queue_max: int = _key(1_000, unit="of appends")
    """Maximum pending appends per checked partition. Further ones get a retriable error."""
    sequencer_wait_max_seconds: float = _key(5.0, live=True)
    """Maximum wait of a pending append. A third of the client's request timeout applies if it is shorter."""
    handshake_seconds: float = _key(10.0, live=True)
    """Maximum time for the TLS handshake, and again for the first request."""
    header_seconds: float = _key(10.0, live=True)
    """Maximum pause within a request header or a buffered request."""
    client_idle_seconds: float = _key(600.0, live=True)
    """Idle time after which a client is disconnected, like Kafka's connections.max.idle.ms."""
    commit_wait_seconds: float = 10.0
    """Maximum time to validate a transaction before its commit, where topics check expected offsets. After that the
    client must retry."""
    connect_timeout_seconds: float = 5.0
    """Timeout for connecting to a broker."""
    request_timeout_seconds: float = 30.0
    """Timeout for the proxy's own requests to a broker and for receiving a buffered request."""
    reconnect_backoff_max_seconds: float = 1.0
    """Maximum delay before reconnecting to a broker. The delay begins at 0.05 s and doubles."""
    metadata_refresh_seconds: float = 5.0
    """Interval at which the proxy refreshes brokers and known topics."""
    takeover_seconds: float = 35.0
    """Time during which conditional appends to `true` topics get a retriable error after the proxy starts alongside
    another process or another process dies: Kafka may still hold its requests. Should not be below connect timeout +
    request timeout."""
    expansion_wait_seconds: float = 60.0
    """Maximum time that a partition expansion waits for in-flight appends, transactions and other proxy processes.
    After that it is cancelled."""
    partition_grace_seconds: float = 900.0
    """Grace period after a partition expansion (topic config partitioner): the proxy checks the placement of keys in
    batches without a partition count. Use more than delivery.timeout.ms + metadata.max.age.ms of any producer."""
    remembered_producers_max: int = 50_000
    """Maximum idempotent producers, counted per partition, whose last append the proxy remembers on checked topics
    (KAFKA-5793)."""
    gated_without_commit_seconds: float = 600.0
    """Time after which a group gets a gated partition although it has committed nothing on the prior partition (topic
    config fencepost.ordered.partition.expansion). The proxy logs a warning."""
    gated_without_progress_seconds: float = 3600.0
    """The same for a group that has committed there, counted from its last progress. A client that commits only when
    records arrive never commits the last ones."""
    group_probe_seconds: float = 1.0
    """Interval at which the proxy reads the offsets of groups that wait for a gated partition. Longer if many groups
    wait."""
    watched_partitions_per_second: float = _key(150.0, unit="per second")
    """Rate at which partitions are checked for open transactions and producers. 10,000 partitions take about a minute.
    """
    watched_shown_max: int = _key(20, unit="of each kind", live=True)
    """Maximum partitions, open transactions and hanging transactions named in metrics and on the status page; the worst
    are shown."""
    metric_partitions_shown_max: int = _key(500, unit="of partitions", live=True)
    """Maximum checked partitions with log end and sequence offset in metrics, in the order of their first append. The
    others are counted."""
    drain_seconds: float = _key(10.0, live=True)
    """Maximum time for requests in progress when a connection closes or the process stops."""
    drain_notice_seconds: float = _key(0.0, live=True, least=0, most=600)
    """Time during which the process serves with /readyz red before it stops, so that a load balancer can react."""

    @property
    def queued_seconds(self) -> float:
        """How long a broker may still hold a request after its connection broke.

        No proxy process waits longer for a response, including the connection attempt. A lower `takeover_seconds`
        applies to append barriers and takeovers only, not to partition sequencers.
        """
        return max(self.takeover_seconds, self.connect_timeout_seconds + self.request_timeout_seconds)

    def conflicts(self) -> Conflicts:
        if self.buffered_bytes_max < self.frame_bytes_max:
            yield (
                "buffered_bytes_max",
                f"is {self.buffered_bytes_max} and must not be below limits.frame_bytes_max ({self.frame_bytes_max}): "
                "a single frame of that size could never be handled",
            )


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Log on stderr."""

    level: LogLevel = _key("info", live=True, option="--log-level")
    """Minimum severity of log events."""
    format: LogFormat = _key("console", live=True, option="--log-format")
    """Log format: key=value lines, or one JSON object per line."""


@dataclass(frozen=True, slots=True)
class ListenTls:
    """TLS for client connections, if the table is present. PEM files; changed files are loaded without a restart."""

    certificate_file: Path = _key(live=True, example="/etc/fencepost/tls/tls.crt")
    """Certificate and intermediate certificates, used by all listeners."""
    key_file: Path | None = _key(None, live=True, example="/etc/fencepost/tls/tls.key")
    """Private key. Default: in certificate_file."""
    key_password_file: Path | None = _key(None, live=True, example="/etc/fencepost/tls/password")
    """File whose first line is the key's password."""
    client_certificates: ClientCertificates = _key("none", live=True)
    """Whether clients present a certificate. With optional, a certificate that is presented must be trusted. Kafka
    identifies clients by SASL, not by certificate."""
    client_ca_file: Path | None = _key(None, live=True, example="/etc/fencepost/clients-ca.crt")
    """CA of client certificates. Required unless client_certificates is none."""
    min_version: TlsVersion = _key("1.2", live=True)
    """Minimum TLS version."""

    def conflicts(self) -> Conflicts:
        if (self.client_certificates == "none") is not (self.client_ca_file is None):
            yield (
                "client_ca_file",
                'is required for client_certificates = "optional" or "required", and not allowed otherwise: it is the '
                "CA of client certificates",
            )


@dataclass(frozen=True, slots=True)
class UpstreamTls:
    """TLS for connections to brokers, if the table is present. PEM files."""

    ca_file: Path | None = _key(None, live=True, example="/etc/fencepost/kafka-ca.crt")
    """CA of the brokers' certificates. Default: the system's CAs."""
    certificate_file: Path | None = _key(None, live=True, example="/etc/fencepost/tls/proxy.crt")
    """Client certificate and intermediate certificates, for brokers that require one."""
    key_file: Path | None = _key(None, live=True, example="/etc/fencepost/tls/proxy.key")
    """Private key. Default: in certificate_file."""
    key_password_file: Path | None = _key(None, live=True, example="/etc/fencepost/tls/password")
    """File whose first line is the key's password."""
    check_hostname: bool = _key(True, live=True)
    """Whether a broker's certificate must match its host name in `upstream` or Kafka's metadata. Host names are also
    sent as SNI."""
    min_version: TlsVersion = _key("1.2", live=True)
    """Minimum TLS version."""

    def conflicts(self) -> Conflicts:
        for name in ("key_file", "key_password_file"):
            if self.certificate_file is None and getattr(self, name) is not None:
                yield name, "a key needs its certificate: certificate_file"


@dataclass(frozen=True, slots=True)
class ControlSasl:
    """The proxy's own login at Kafka, if the table is present. Clients log in as themselves.

    Files are read at every login.
    """

    mechanism: SaslMechanism = _key(live=True, example="SCRAM-SHA-512")
    """SASL mechanism."""
    username: str | None = _key(None, live=True, example="fencepost")
    """User name, for PLAIN and SCRAM."""
    password_file: Path | None = _key(None, live=True, example="/etc/fencepost/password")
    """File whose first line is the password, for PLAIN and SCRAM."""
    token_file: Path | None = _key(None, live=True, example="/etc/fencepost/token")
    """File whose first line is the token, for OAUTHBEARER."""

    def conflicts(self) -> Conflicts:
        needed = ("token_file",) if self.mechanism == "OAUTHBEARER" else ("username", "password_file")
        for name in ("username", "password_file", "token_file"):
            if (getattr(self, name) is not None) is not (name in needed):
                missing = "must be given" if name in needed else "is not for this mechanism"
                yield name, f"{missing}: {self.mechanism} needs only {' and '.join(needed)}"


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """The configuration of `fencepost proxy`. Raises Refused if values do not fit together."""

    #: Not a key: all proxies of a cluster share one topic.
    state_topic: ClassVar[str] = "__fencepost_state"

    upstream: tuple[Address, ...] = _key(
        option="--bootstrap-server", also="FENCEPOST_BOOTSTRAP_SERVER", example=["kafka-1:9092", "kafka-2:9092"]
    )
    """Kafka's bootstrap servers."""
    mode: Mode = _key("gateway", option="--mode")
    """`gateway`: the proxy serves all brokers, with a listener for each, and advertises itself to clients. `sidecar`:
    the proxy serves only `broker`, which advertises the sidecar's address."""
    broker: Address | None = _key(None, option="--broker", example="127.0.0.1:9094")
    """Client listener of the sidecar's broker. The broker must advertise `advertised_host` and the port of `listen` for
    it. `upstream` must be a listener that clients do not use."""
    broker_tls: bool = True
    """Whether `upstream_tls` applies to `broker`. With false, that listener must be plaintext on the loopback."""
    listen: Address = _key(Address("127.0.0.1", 19092), option="--listen")
    """Bootstrap listener for clients. Port 0: any free port, also for the broker listeners."""
    reuse_port: bool = False
    """Whether other proxies of this host may use the same ports (SO_REUSEPORT, Linux). The kernel then distributes
    connections over them. Each needs its own `status`. Topics with `fencepost.check.expected.offsets=true` need one
    proxy without it."""
    advertised_host: str | None = _key(None, option="--advertised-host", example="kafka.example.com")
    """Host advertised to clients. Default: the address by which the client reached the proxy."""
    homes: bool = False
    """Whether clients reach each broker through one of the proxies, which share the brokers among them. All proxies
    need it, and each an `advertised_host` and port of `listen` that lead to it alone."""
    broker_ports: Mapping[NodeId, int] = _key(factory=dict, example={"1": 20001, "2": 20002})
    """Listener port by broker id. Default: port of `listen` + 1 + broker id."""
    refusal_scope: RefusalScope = _key("partition", option="--refusal-scope")
    """What a wrong expected offset refuses: the batch of that partition, or the whole request as KIP-27 literally says.
    """
    topics: Mapping[str, Mapping[str, str]] = _key(factory=dict, example={"orders-*": {_EXAMPLE_CONFIG: "required"}})
    """Topic configs by topic name pattern (*, ?, [abc]; case-sensitive). They apply from topic creation; the first
    match applies alone. A config set on the topic itself wins. Names that begin with __ never match."""
    unlisted_topics: Mapping[str, str] = _key(factory=dict, example={_EXAMPLE_CONFIG: "false"})
    """Topic configs for topics that match no pattern, except names that begin with __."""
    limits: Limits = field(default_factory=Limits)
    config_lease_seconds: float = 3.0
    """Maximum age of the proxy's view of topic configs. Above, appends to checked topics get a retriable error. Must be
    the same on all proxies of a cluster."""
    status: Address | None = _key(None, option="--status", example="127.0.0.1:8080")
    """Address of the status page, /metrics, /livez and /readyz. Default: off."""
    status_token_file: Path | None = _key(None, example="/etc/fencepost/status-token")
    """File whose first line is the token for changes through `status` (`fencepost expansions open --token-file`). Read
    at each use. Default: no changes allowed."""
    status_read_token_file: Path | None = _key(None, example="/etc/fencepost/status-read-token")
    """File whose first line every request to `status` must have, except /livez and /readyz: as bearer token, or as
    password of any user (browsers). Read at each use. Default: no login."""
    status_tls: bool = False
    """Whether `status` uses TLS, with the certificate of `listen_tls`."""
    log: LogConfig = field(default_factory=LogConfig)
    watch_transactions: bool = True
    """Whether to monitor the cluster's transactions for the status page and metrics."""
    unsafe_disable_fencing: bool = _key(False, hidden=True)
    """For tests that show why fenced appends are needed."""
    listen_tls: ListenTls | None = None
    upstream_tls: UpstreamTls | None = None
    control_sasl: ControlSasl | None = None

    def __post_init__(self) -> None:
        found = [Problem(key, text) for key, text in self.conflicts()]
        for each in fields(self):
            table = getattr(self, each.name)
            if hasattr(table, "conflicts"):
                found += [Problem(f"{each.name}.{key}", text) for key, text in table.conflicts()]
        if found:
            raise Refused(found)

    def conflicts(self) -> Conflicts:
        if not self.upstream:
            stated = 'no Kafka server given: use --bootstrap-server HOST:PORT, or upstream = ["HOST:PORT"] in the file'
            yield "upstream", stated
        if self.status_tls and self.listen_tls is None:
            yield "status_tls", "needs the certificate of [listen_tls]"
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
        if self.reuse_port and sys.platform != "linux":
            yield "reuse_port", "needs Linux"
        if self.homes:
            if self.mode == "sidecar" or self.reuse_port or self.broker_ports:
                yield "homes", 'cannot be combined with mode = "sidecar", reuse_port or broker_ports'
            if self.advertised_host is None or not self.listen.port:
                yield "homes", "needs advertised_host and a port in listen, where clients reach this proxy alone"
        ports = [*self.broker_ports.values()] + ([self.listen.port] if self.listen.port else [])
        if len(set(ports)) != len(ports):
            yield "broker_ports", "two brokers share a port, or one uses the port of the bootstrap listener"

    @property
    def home_address(self) -> Address | None:
        """The bootstrap address by which clients reach this process alone; None without `homes`."""
        return Address(str(self.advertised_host), self.listen.port) if self.homes else None

    @property
    def given_configs(self) -> tuple[Mapping[str, str], ...]:
        """All virtual configs of this file: of the topics without a pattern first."""
        return self.unlisted_topics, *self.topics.values()

    def configs_for(self, topic: str) -> Mapping[str, str]:
        """The virtual configs that this file gives a topic: the first matching glob's, else `unlisted_topics`."""
        if topic.startswith(NO_PATTERN_FOR):
            return {}
        return next((its for glob, its in self.topics.items() if fnmatchcase(topic, glob)), self.unlisted_topics)


def _is_here(address: Address) -> bool:
    """On this machine's loopback."""
    try:
        return ip_address(address.host).is_loopback
    except ValueError:
        return address.host == "localhost"
