"""What an operator may set: the one table of keys. Each is a field of a dataclass below.

    name: type = _key(default, "what it means", …)

The field's name is the key in the TOML file, a dataclass is a table of the file, and all else that is known of a key
stands beside it: from here come the checks, `fencepost config explain`, docs/configuration.md, the names of environment
variables, and what SIGHUP may change. So a new key is one line here, and `fencepost config explain --markdown >
docs/configuration.md` afterwards.

Beside this: `keys` (the table as a list), `reading` (file, environment and command line), `locating` (lines of a file),
`reference` (the words), `reloading` (what a new file changes).
"""

# ruff: noqa: RUF009 - `_key` makes a field: what it is called with is shared by nobody.

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
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

#: Tags of processes are 1 to 255, and each worker that is started again takes another.
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
    """All that is wrong with a configuration, one line each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        head = () if len(self.problems) == 1 else (f"{len(self.problems)} errors in the configuration:",)
        super().__init__("\n".join((*head, *map(str, self.problems))))


def _meaning(
    doc: str,
    *,
    unit: str | None = None,
    live: bool = False,
    option: str | None = None,
    example: object = None,
    above: float | None = None,
    least: int | None = None,
    most: int | None = None,
    hidden: bool = False,
) -> Mapping[str, Any]:
    """What `_key` and a `field` without a default say of a key.

    `unit` – where its name does not end with it. `live` – SIGHUP changes it in a running proxy (`Proxy.reconfigure`).
    `option` – of `fencepost proxy`. `example` – where there is no default to show. `above`, `least`, `most` – of
    numbers; of a limit, `above` is 0 where it does not say otherwise. `hidden` – for tests: taken, and told to nobody.
    """
    return MappingProxyType(
        {
            "doc": doc,
            "unit": unit,
            "live": live,
            "option": option,
            "example": example,
            "above": above,
            "least": least,
            "most": most,
            "hidden": hidden,
        }
    )


def _key(default: Any, doc: str, **more: Any) -> Any:
    return field(default=default, metadata=_meaning(doc, **more))


def _table(default_factory: Callable[[], Any], doc: str, **more: Any) -> Any:
    return field(default_factory=default_factory, metadata=_meaning(doc, **more))


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
    """Numbers that are not where they may be."""
    for each in fields(values):  # type: ignore[arg-type]
        problem = out_of_range(each.metadata, getattr(values, each.name))
        if problem is not None:
            yield each.name, problem


def out_of_range(meaning: Mapping[str, Any], value: Any) -> str | None:
    above, least, most = (meaning.get(each) for each in ("above", "least", "most"))
    if above is not None and not value > above:
        return f"must be above {above}, not {value!r}"
    if least is not None and not (value >= least and (most is None or value <= most)):
        return f"must be {f'at least {least}' if most is None else f'from {least} to {most}'}, not {value!r}"
    return None


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the process. The unit is the end of the name or the word before `_max`.

    What happens at a limit: a client's connection waits (backpressure), or gets a retriable Kafka error, or is
    closed with the limit's name in the log.
    """

    frame_bytes_max: int = _limit(104_857_600, "largest request or response frame; Kafka's socket.request.max.bytes")
    connections_max: int = _limit(2_000, "client connections at once; one more is closed on arrival", live=True)
    address_connections_max: int = _limit(
        2_000,
        "of those at once from one address; clients behind a gateway or beside the proxy share one",
        live=True,
    )
    in_flight_requests_max: int = _limit(
        100, "unanswered requests of one connection; then it is not read any further", live=True
    )
    buffered_bytes_max: int = _limit(
        268_435_456, "bytes held in memory for all connections; then nobody is read", live=True
    )
    decompressed_bytes_max: int = _limit(
        104_857_600, "records of one batch once decompressed; above: MESSAGE_TOO_LARGE"
    )
    gate_queue_max: int = _limit(
        1_000, "appends waiting at one guarded partition; one more gets a retriable error", unit="appends"
    )
    gate_wait_max_seconds: float = _limit(
        5.0, "longest wait at a gate; never more than a third of the client's timeout", live=True
    )
    handshake_seconds: float = _limit(10.0, "from accept to the first whole request", live=True)
    header_seconds: float = _limit(
        10.0, "silence within a frame's header, or within a frame that is held in memory", live=True
    )
    client_idle_seconds: float = _limit(
        600.0, "silence after which a client is closed; Kafka's connections.max.idle.ms", live=True
    )
    commit_wait_seconds: float = _limit(
        10.0,
        "how long a transaction's commit is looked into where topics check expectations; then its client is told to "
        "ask again",
    )
    connect_timeout_seconds: float = _limit(5.0, "opening a connection to a broker")
    request_timeout_seconds: float = _limit(
        30.0, "one request of our own to a broker, then its connection is given up; a client's frame held in memory"
    )
    reconnect_backoff_min_seconds: float = _limit(0.05, "pause after the first failed connection to a broker")
    reconnect_backoff_max_seconds: float = _limit(1.0, "longest pause between connection attempts to a broker")
    control_in_flight_max: int = _limit(
        256, "our own unanswered requests on one connection to a broker", unit="requests"
    )
    metadata_refresh_seconds: float = _limit(5.0, "how often brokers and known topics are looked up again")
    settle_retry_seconds: float = _limit(0.05, "pause before an append in doubt is looked for again")
    takeover_seconds: float = _limit(
        35.0,
        "after a start beside another process, or after one that died: conditional appends on `true` topics get a "
        "retriable error, since a request of its may still be queued in Kafka; connection timeout + request timeout",
    )
    expansion_wait_seconds: float = _limit(
        60.0,
        "a counted topic is to grow: how long appends under way, transactions and other proxy processes may take to "
        "end, until it is given up, with the topic as it was",
    )
    partition_settle_seconds: float = _limit(
        900.0,
        "after a topic has grown: how long keys of batches that do not say their partition count are placed anew here "
        "(topic config partitioner); longer than any producer may hold a record, delivery.timeout.ms and "
        "metadata.max.age.ms together",
    )
    served_counts_max: int = _limit(
        10_000,
        "pairs of client and topic of which is remembered the partition count that the client was told last",
        unit="clients × topics",
    )
    remembered_producers_max: int = _limit(
        50_000,
        "idempotent producers, counted for each partition, of which the last acknowledged append is remembered, on "
        "topics whose appends are read (KAFKA-5793)",
    )
    withheld_without_commit_seconds: float = _limit(
        600.0,
        "how long a group that has committed nothing on a prior partition is kept from a new one (topic config "
        "ordered.partition.expansion); then it gets it, and a warning is logged",
    )
    withheld_without_progress_seconds: float = _limit(
        3600.0,
        "the same for a group that has committed there, from its last commit on that brought it further: a client "
        "that commits only when records arrive never commits the last ones",
    )
    group_look_seconds: float = _limit(
        1.0, "how often it is looked up how far a group is that waits for a new partition; less often where many wait"
    )
    watched_partitions_per_second: float = _limit(
        150.0,
        "how many partitions are looked at for open transactions and producers, one after the other, for the metrics; "
        "10,000 take a minute",
    )
    watched_shown_max: int = _limit(
        20,
        "partitions, open and hanging transactions that metrics and status page name, of each kind the worst",
        unit="of each kind",
        live=True,
    )
    metric_partitions_shown_max: int = _limit(
        500,
        "guarded partitions of which metrics show the log end and the shift, in the order in which they were first "
        "appended to; the others are counted",
        unit="partitions",
        live=True,
    )
    drain_seconds: float = _limit(
        10.0,
        "how long a closing connection may take to pass on what is under way; and how long requests under way are "
        "waited for once the process is to end",
        live=True,
    )
    drain_notice_seconds: float = _key(
        0.0,
        "once the process is to end: how long it goes on as before with /readyz red, so that a load balancer that "
        "looks there sends it nobody any more; 0: not at all",
        least=0,
        most=600,
        live=True,
    )

    @property
    def queued_seconds(self) -> float:
        """How long a request whose connection broke may sit in a broker's queue: the one figure for gates and doors.

        No process of ours waits any longer for an answer, opening the connection included. Who sets `takeover_seconds`
        lower (to be quick where nothing stands still) lowers it for doors and takeovers; gates have nobody waiting.
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
    """The record headers by which an unmodified client speaks to the proxy."""

    expected_offset: str = _key("expected-offset", "says the offset that its record must get")
    partition_count: str = _key("partition-count", "says over how many partitions the batch's keys were placed")
    write_id: str = _key("write-id", "names a write, by which a retry is recognised")

    def __post_init__(self) -> None:
        _refuse("headers", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        seen: dict[str, str] = {}
        for each in fields(self):
            name = getattr(self, each.name)
            if not name:
                yield each.name, "must not be empty"
            elif name in seen:
                yield each.name, f"the header names must differ, and headers.{seen[name]} is {name!r}, too"
            seen.setdefault(name, each.name)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the proxy tells on stderr."""

    level: LogLevel = _key("info", "least severe event that is logged", live=True, option="--log-level")
    format: LogFormat = _key(
        "console", "lines of key=value for people, or one JSON object per line", live=True, option="--log-format"
    )


@dataclass(frozen=True, slots=True)
class ListenTls:
    """TLS on the listeners, if the table is there. Files are PEM; one that changes is read again without a restart."""

    certificate_file: Path = field(
        metadata=_meaning(
            "the certificate and then its chain; all listeners show it, since they share a host name",
            live=True,
            example="/etc/fencepost/tls/tls.crt",
        )
    )
    key_file: Path | None = _key(
        None,
        "the certificate's private key; not given: in the same file",
        live=True,
        example="/etc/fencepost/tls/tls.key",
    )
    key_password_file: Path | None = _key(
        None, "holds the key's password, in its first line", live=True, example="/etc/fencepost/tls/password"
    )
    client_certificates: ClientCertificates = _key(
        "none",
        "whether clients are asked for one. optional: one that is shown must be trusted. What a certificate says "
        "reaches nobody: Kafka knows clients by their SASL login",
        live=True,
    )
    client_ca_file: Path | None = _key(
        None,
        "who signs clients' certificates; needed unless they are none",
        live=True,
        example="/etc/fencepost/clients-ca.crt",
    )
    min_version: TlsVersion = _key("1.2", "oldest TLS that is spoken", live=True)

    def __post_init__(self) -> None:
        _refuse("listen_tls", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        if (self.client_certificates == "none") is not (self.client_ca_file is None):
            yield (
                "client_ca_file",
                'belongs to client_certificates = "optional" or "required", and they need it: it says whose signature '
                "counts",
            )


@dataclass(frozen=True, slots=True)
class UpstreamTls:
    """TLS to the brokers, if the table is there: on its own connections and on its clients' alike. PEM files."""

    ca_file: Path | None = _key(
        None,
        "who signs brokers' certificates; not given: whom this system trusts",
        live=True,
        example="/etc/fencepost/kafka-ca.crt",
    )
    certificate_file: Path | None = _key(
        None,
        "what the proxy shows where brokers ask for a certificate, then its chain",
        live=True,
        example="/etc/fencepost/tls/proxy.crt",
    )
    key_file: Path | None = _key(
        None,
        "the certificate's private key; not given: in the same file",
        live=True,
        example="/etc/fencepost/tls/proxy.key",
    )
    key_password_file: Path | None = _key(
        None, "holds the key's password, in its first line", live=True, example="/etc/fencepost/tls/password"
    )
    check_hostname: bool = _key(
        True,
        "whether a broker's certificate must be for the host that `upstream` or Kafka's metadata names. That name is "
        "sent too (SNI), unless it is an IP address",
        live=True,
    )
    min_version: TlsVersion = _key("1.2", "oldest TLS that is spoken", live=True)

    def __post_init__(self) -> None:
        _refuse("upstream_tls", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        for name in ("key_file", "key_password_file"):
            if self.certificate_file is None and getattr(self, name) is not None:
                yield name, "a key needs its certificate: certificate_file"


@dataclass(frozen=True, slots=True)
class ControlSasl:
    """As whom the proxy itself logs in at Kafka, if the table is there; clients log in as themselves.

    Its files are read at every login, so a new password or token needs no restart.
    """

    mechanism: SaslMechanism = field(metadata=_meaning("how it logs in", example="SCRAM-SHA-512"))
    username: str | None = _key(None, "for PLAIN and SCRAM", example="fencepost")
    password_file: Path | None = _key(
        None, "holds the password, in its first line; for PLAIN and SCRAM", example="/etc/fencepost/password"
    )
    token_file: Path | None = _key(
        None, "holds the token, in its first line; for OAUTHBEARER", example="/etc/fencepost/token"
    )

    def __post_init__(self) -> None:
        _refuse("control_sasl", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        needed = ("token_file",) if self.mechanism == "OAUTHBEARER" else ("username", "password_file")
        for name in ("username", "password_file", "token_file"):
            if (getattr(self, name) is not None) is not (name in needed):
                missing = "must be given" if name in needed else "is not for this mechanism"
                yield name, f"{missing}: {self.mechanism} needs {' and '.join(needed)}, and nothing else"


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Virtual configs for the topics whose name matches a glob (`*`, `?`, `[abc]`; case matters).

    Never for names that begin with `NO_PATTERN_FOR`: Kafka's internal topics, and by custom those of tools.
    """

    glob: str
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """All that `fencepost proxy` needs to know. `state_topic` is no key: another name would be another cluster."""

    upstream: tuple[Address, ...] = field(
        metadata=_meaning(
            "Kafka brokers to ask first; any one that answers will do, the rest is found by metadata",
            option="--upstream",
            example=["kafka-1:9092", "kafka-2:9092"],
        )
    )
    mode: Mode = _key(
        "gateway",
        "gateway: before all brokers, each of which gets a listener; clients are told those instead of the brokers' "
        "own addresses. sidecar: before the one that `broker` names, which itself advertises the sidecar's address",
        option="--mode",
    )
    broker: Address | None = _key(
        None,
        "of a sidecar: the listener of its broker that it stands before. What that broker advertises for it must be "
        "this sidecar (`advertised_host`, and the port of `listen`); `upstream` is then a listener that clients do not "
        "use",
        option="--broker",
        example="127.0.0.1:9094",
    )
    broker_tls: bool = _key(
        True,
        "of a sidecar: whether `upstream_tls` is for `broker` too. false: that listener is plain TCP (PLAINTEXT, "
        "SASL_PLAINTEXT) on this machine's loopback",
    )
    listen: Address = _key(
        _DEFAULT_LISTEN,
        "the bootstrap listener, where clients connect. Port 0 takes any free port, and then so does every broker's "
        "listener",
        option="--listen",
    )
    advertised_host: str | None = _key(
        None,
        "host that clients are told to connect to; not given: the address by which they reached the proxy",
        option="--advertised-host",
        example="kafka.example.com",
    )
    broker_ports: Mapping[NodeId, int] = _table(
        dict,
        "listener port by broker id; a broker that is not named gets the port of `listen` + 1 + its id",
        example={"1": 20001, "2": 20002},
    )
    refusal_scope: RefusalScope = _key(
        "partition",
        "what one mismatch refuses. partition: each partition of a request stands alone. request: all of it, KIP-27's "
        "literal reading",
        option="--refusal-scope",
    )
    headers: HeaderNames = field(default_factory=HeaderNames)
    topic_patterns: tuple[TopicPattern, ...] = _key(
        (),
        "topic configs of the topics whose name matches a glob (*, ?, [abc]; case matters), from their birth. The "
        "first glob that matches decides alone. What an admin sets on a topic itself wins. No glob matches a name that "
        "begins with __: Kafka's internal topics are never checked",
        example={"orders-*": {"check.expected.offsets": "required"}},
    )
    unlisted_topics: Mapping[str, str] = _table(
        dict,
        "topic configs of the topics that no glob matches, except those whose names begin with __",
        example={"check.expected.offsets": "false"},
    )
    limits: Limits = field(default_factory=Limits)
    config_lease_seconds: float = _key(
        3.0,
        "how old the view of topic configs may be; older, and guarded appends get a retriable error. All proxies of a "
        "cluster must use the same value",
        above=0,
    )
    state_topic: str = "__fencepost_state"
    status: Address | None = _key(
        None,
        "status page, /metrics, /livez and /readyz; not given: off",
        option="--status",
        example="127.0.0.1:8080",
    )
    status_token_file: Path | None = _key(
        None,
        "file whose first line is the token for what changes something at `status` (a group's release: `fencepost "
        "expansions open --token-file`). Read at each use; not given: nothing can be changed there",
        example="/etc/fencepost/status-token",
    )
    log: LogConfig = field(default_factory=LogConfig)
    workers: int = _key(
        1,
        "processes that share the listeners, for more than one core (Linux); each holds every limit for itself",
        option="--workers",
        least=1,
        most=_WORKERS_MAX,
    )
    watch_transactions: bool = _key(
        True, "whether the cluster's transactions are looked at, for the status page and the metrics"
    )
    unsafe_disable_stamping: bool = _key(False, "for tests that show what stamping is for", hidden=True)
    listen_tls: ListenTls | None = None
    upstream_tls: UpstreamTls | None = None
    control_sasl: ControlSasl | None = None

    def __post_init__(self) -> None:
        _refuse("", self._problems())

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from _outside(self)
        if not self.upstream:
            yield "upstream", 'no Kafka to talk to: give --upstream HOST:PORT, or upstream = ["HOST:PORT"] in the file'
        if any(not address.port for address in self.upstream):
            yield "upstream", "a broker's port cannot be 0"
        if self.mode == "sidecar" and self.broker is None:
            yield "broker", 'mode = "sidecar" needs it: the listener of the broker that it stands before'
        if self.mode != "sidecar" and not self.broker_tls:
            yield "broker_tls", 'is for mode = "sidecar" alone: `upstream_tls` says how a gateway speaks to its brokers'
        if self.mode == "sidecar" and (self.broker_ports or not self.listen.port):
            key = "broker_ports" if self.broker_ports else "listen"
            yield key, 'mode = "sidecar" has one listener, and its port is what the broker advertises'
        if self.mode == "sidecar" and not self.broker_tls and self.broker is not None and not _is_here(self.broker):
            yield "broker_tls", f"broker = {self.broker} is not on the loopback: logins would go there in the clear"
        if self.workers > 1 and sys.platform != "linux":
            yield "workers", "more than one worker process needs Linux"
        ports = [*self.broker_ports.values()]
        if self.listen.port:
            ports.append(self.listen.port)
        if len(set(ports)) != len(ports):
            yield "broker_ports", "two brokers share a port, or one has the bootstrap listener's"
        for pattern in self.topic_patterns:
            if pattern.glob.startswith(NO_PATTERN_FOR):
                yield (
                    f'topics."{pattern.glob}"',
                    f"no pattern matches names that begin with {NO_PATTERN_FOR}: Kafka's internal topics are never "
                    "checked. For a topic of your own, set the config on the topic itself (kafka-configs --alter)",
                )

    def configs_for(self, topic: str) -> Mapping[str, str]:
        """The virtual configs that this file gives a topic: the first matching glob's, else `unlisted_topics`."""
        if topic.startswith(NO_PATTERN_FOR):
            return _NO_CONFIGS
        for pattern in self.topic_patterns:
            if fnmatchcase(topic, pattern.glob):
                return pattern.configs
        return self.unlisted_topics
