"""What an operator may set: one TOML file, overridden by the command line, checked before anything is opened.

A file looks like this (every key is optional except `upstream`):

    upstream = ["kafka-1:9092", "kafka-2:9092"]
    listen = "0.0.0.0:19092"
    advertised_host = "kafka.example.com"
    refusal_scope = "partition"

    [limits]
    connections_max = 500

    [topics."orders-*"]
    "check.expected.offsets" = "required"

    [unlisted_topics]
    "check.expected.offsets" = "false"

The dataclasses below are the reference: a TOML key is the name of a field. An unknown key is an error, since a
misspelt guard would guard nothing.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from fencepost_proxy.errors import ConfigError
from fencepost_proxy.types import Address, NodeId

RefusalScope = Literal["partition", "request"]
LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

#: Says what is wrong with one virtual topic config, or None. The table of virtual configs lives in a higher room.
CheckTopicConfig = Callable[[str, str], "str | None"]

#: Tags of processes are 1 to 255, and each worker that is started again takes another.
_WORKERS_MAX: Final = 64

_DEFAULT_LISTEN: Final = Address("127.0.0.1", 19092)


def _limit(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the process. The unit is the end of the name or the word before `_max`.

    What happens at a limit: a client's connection waits (backpressure), or gets a retriable Kafka error, or is
    closed with the limit's name in the log. `limit_docs()` gives the text beside each.
    """

    frame_bytes_max: int = _limit(104_857_600, "largest request or response frame; Kafka's socket.request.max.bytes")
    connections_max: int = _limit(2_000, "client connections at once; one more is closed on arrival")
    in_flight_requests_max: int = _limit(100, "unanswered requests of one connection; then it is not read any further")
    buffered_bytes_max: int = _limit(268_435_456, "bytes held in memory for all connections; then nobody is read")
    decompressed_bytes_max: int = _limit(
        104_857_600, "records of one batch once decompressed; above: MESSAGE_TOO_LARGE"
    )
    gate_queue_max: int = _limit(1_000, "appends waiting at one guarded partition; one more gets a retriable error")
    gate_wait_max_seconds: float = _limit(
        5.0, "longest wait at a gate; never more than a third of the client's timeout"
    )
    handshake_seconds: float = _limit(10.0, "from accept to the first whole request")
    header_seconds: float = _limit(10.0, "silence within a frame's header, or within a frame that is held in memory")
    client_idle_seconds: float = _limit(
        600.0, "silence after which a client is closed; Kafka's connections.max.idle.ms"
    )
    connect_timeout_seconds: float = _limit(5.0, "opening a connection to a broker")
    request_timeout_seconds: float = _limit(
        30.0, "one request of our own to a broker, then its connection is given up; a client's frame held in memory"
    )
    reconnect_backoff_min_seconds: float = _limit(0.05, "pause after the first failed connection to a broker")
    reconnect_backoff_max_seconds: float = _limit(1.0, "longest pause between connection attempts to a broker")
    control_in_flight_max: int = _limit(256, "our own unanswered requests on one connection to a broker")
    metadata_refresh_seconds: float = _limit(5.0, "how often brokers and known topics are looked up again")
    settle_retry_seconds: float = _limit(0.05, "pause before an append in doubt is looked for again")
    takeover_seconds: float = _limit(
        30.0,
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
        10_000, "clients and topics of which is remembered which partition count they were told last"
    )
    withheld_without_commit_seconds: float = _limit(
        600.0,
        "how long a group that has committed nothing on a prior partition is kept from a new one (topic config "
        "ordered.partition.expansion); then it gets it, and a warning is logged",
    )
    group_look_seconds: float = _limit(
        1.0, "how often it is looked up how far a group is that waits for a new partition; rarer where many wait"
    )
    drain_seconds: float = _limit(10.0, "how long a closing connection may take to pass on what is under way")

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise ConfigError(f"limits.{each.name} must be above 0, not {getattr(self, each.name)!r}")
        if self.buffered_bytes_max < self.frame_bytes_max:
            raise ConfigError(
                f"limits.buffered_bytes_max ({self.buffered_bytes_max}) must not be below limits.frame_bytes_max "
                f"({self.frame_bytes_max}): a single frame of that size could never be handled"
            )
        if self.reconnect_backoff_min_seconds > self.reconnect_backoff_max_seconds:
            raise ConfigError(
                "limits.reconnect_backoff_min_seconds must not be above limits.reconnect_backoff_max_seconds"
            )


def limit_docs() -> Mapping[str, str]:
    """The meaning of each limit, by its name: the one home of that text."""
    return {each.name: each.metadata["doc"] for each in fields(Limits)}


@dataclass(frozen=True, slots=True)
class HeaderNames:
    """The record headers by which an unmodified client speaks to the proxy."""

    expected_offset: str = "expected-offset"
    partition_count: str = "partition-count"
    write_id: str = "write-id"

    def __post_init__(self) -> None:
        names = [getattr(self, each.name) for each in fields(self)]
        if not all(names) or len(set(names)) != len(names):
            raise ConfigError("headers.*: the header names must differ and must not be empty")


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: LogLevel = "info"
    format: LogFormat = "console"


@dataclass(frozen=True, slots=True)
class TopicPattern:
    """Virtual configs for the topics whose name matches a glob (`*`, `?`, `[abc]`; case matters)."""

    glob: str
    configs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ProxyConfig:
    """All that `fencepost proxy` needs to know.

    `upstream` – brokers to ask first; any of them will do, the rest is found by metadata.
    `listen` – the bootstrap listener. Port 0 takes any free port, and then so does every broker's listener.
    `advertised_host` – what clients are told to connect to; None: the address by which they reached us.
    `broker_ports` – listener port per broker id; a broker that is not named gets bootstrap port + 1 + id.
    `refusal_scope` – `partition`: each partition of a request stands alone. `request`: one mismatch refuses all of
    it, KIP-27's literal reading.
    `topic_patterns` – the first glob that matches a topic decides; `unlisted_topics` is for those no glob matches.
    What an admin sets on a topic itself wins over both.
    `config_lease_seconds` – how old our view of the virtual configs may be; older, and guarded appends get a
    retriable error. All proxies of a cluster must use the same value.
    `status` – address of the status page, metrics and health checks; None: off.
    `workers` – processes that share the listeners, for more than one core; the limits hold for each of them.
    `unsafe_disable_stamping` – for tests that show what stamping is for.
    """

    upstream: tuple[Address, ...]
    listen: Address = _DEFAULT_LISTEN
    advertised_host: str | None = None
    broker_ports: Mapping[NodeId, int] = field(default_factory=dict)
    refusal_scope: RefusalScope = "partition"
    headers: HeaderNames = field(default_factory=HeaderNames)
    topic_patterns: tuple[TopicPattern, ...] = ()
    unlisted_topics: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    config_lease_seconds: float = 3.0
    state_topic: str = "__fencepost_state"
    status: Address | None = None
    log: LogConfig = field(default_factory=LogConfig)
    workers: int = 1
    unsafe_disable_stamping: bool = False

    def __post_init__(self) -> None:
        if not self.upstream:
            raise ConfigError('no Kafka to talk to: give --upstream HOST:PORT, or upstream = ["HOST:PORT"] in the file')
        if any(not address.port for address in self.upstream):
            raise ConfigError("upstream: a broker's port cannot be 0")
        if not self.config_lease_seconds > 0:
            raise ConfigError(f"config_lease_seconds must be above 0, not {self.config_lease_seconds!r}")
        if not 1 <= self.workers <= _WORKERS_MAX:
            raise ConfigError(f"workers must be from 1 to {_WORKERS_MAX}, not {self.workers}")
        if self.workers > 1 and sys.platform != "linux":
            raise ConfigError("workers: more than one worker process needs Linux")
        ports = [*self.broker_ports.values()]
        if self.listen.port:
            ports.append(self.listen.port)
        if len(set(ports)) != len(ports):
            raise ConfigError("broker_ports: two brokers share a port, or one has the bootstrap listener's")

    def configs_for(self, topic: str) -> Mapping[str, str]:
        """The virtual configs that this file gives a topic: the first matching glob's, else `unlisted_topics`."""
        for pattern in self.topic_patterns:
            if fnmatchcase(topic, pattern.glob):
                return pattern.configs
        return self.unlisted_topics


def load(
    file: Path | None = None,
    overrides: Mapping[str, object] | None = None,
    *,
    check_topic_config: CheckTopicConfig | None = None,
) -> ProxyConfig:
    """The file's settings, with `overrides` (same keys, same types as in TOML) on top.

    Raises ConfigError naming the file, the key and what is allowed there.
    """
    document: dict[str, object] = {}
    where = "command line"
    if file is not None:
        where = str(file)
        try:
            document = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"{file}: cannot be read: {e.strerror}") from e
        except UnicodeDecodeError as e:
            raise ConfigError(f"{file}: is not UTF-8 text") from e
        except tomllib.TOMLDecodeError as e:
            raise ConfigError(f"{file}: is not TOML: {e}") from e
    for key, value in (overrides or {}).items():
        below = document.get(key)
        document[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return _Reader(where, frozenset(overrides or ()), check_topic_config).config(document)


class _Reader:
    """Turns TOML values into the dataclasses, and every slip into a sentence."""

    def __init__(self, where: str, overridden: frozenset[str], check_topic_config: CheckTopicConfig | None) -> None:
        self._where = where
        self._overridden = overridden
        self._check_topic_config = check_topic_config

    def config(self, document: Mapping[str, object]) -> ProxyConfig:
        # The last two fields are one table each in the file, and one is for tests alone.
        known = ["topics", *(f.name for f in fields(ProxyConfig) if f.name not in ("topic_patterns", "state_topic"))]
        self._known("", document, known, hidden=("unsafe_disable_stamping",))
        values: dict[str, Any] = {}
        for key, value in document.items():
            match key:
                case "upstream":
                    values[key] = self._addresses(key, value)
                case "listen" | "status":
                    values[key] = self._address(key, value)
                case "advertised_host":
                    values[key] = self._text(key, value)
                case "broker_ports":
                    values[key] = self._broker_ports(key, value)
                case "refusal_scope":
                    values[key] = self._one_of(key, value, get_args(RefusalScope))
                case "headers":
                    values[key] = self._flat(HeaderNames, key, value, self._text)
                case "topics":
                    table = self._table(key, value)
                    values["topic_patterns"] = tuple(
                        TopicPattern(glob, self._topic_configs(f'topics."{glob}"', table[glob])) for glob in table
                    )
                case "unlisted_topics":
                    values[key] = self._topic_configs(key, value)
                case "limits":
                    values[key] = self._limits(key, value)
                case "config_lease_seconds":
                    values[key] = self._number(key, value)
                case "log":
                    values[key] = self._log(key, value)
                case "workers":
                    values[key] = self._whole(key, value)
                case "unsafe_disable_stamping":
                    values[key] = self._boolean(key, value)
        values.setdefault("upstream", ())
        try:
            return ProxyConfig(**values)
        except ConfigError as e:
            raise ConfigError(f"{self._where}: {e}") from e

    def _fail(self, key: str, problem: str) -> ConfigError:
        where = "command line" if key.partition(".")[0] in self._overridden else self._where
        return ConfigError(f"{where}: {key}: {problem}")

    def _known(self, table: str, given: Iterable[str], known: Iterable[str], hidden: tuple[str, ...] = ()) -> None:
        allowed = [name for name in known if name not in hidden]
        for key in given:
            if key in allowed or key in hidden:
                continue
            import difflib  # noqa: PLC0415 - for a mistake only

            near = difflib.get_close_matches(key, allowed, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"allowed here: {', '.join(sorted(allowed))}"
            raise self._fail(f"{table}.{key}" if table else key, f"unknown key; {hint}")

    def _text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise self._fail(key, f"must be a text that is not empty, not {value!r}")
        return value

    def _boolean(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise self._fail(key, f"must be true or false, not {value!r}")
        return value

    def _number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._fail(key, f"must be a number, not {value!r}")
        return float(value)

    def _whole(self, key: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._fail(key, f"must be a whole number, not {value!r}")
        return value

    def _one_of(self, key: str, value: object, allowed: tuple[str, ...]) -> str:
        if value not in allowed:
            raise self._fail(key, f"must be one of {', '.join(map(repr, allowed))}, not {value!r}")
        return str(value)

    def _table(self, key: str, value: object) -> Mapping[str, object]:
        if not isinstance(value, dict):
            raise self._fail(key, f"must be a table ([{key}]), not {value!r}")
        return value

    def _address(self, key: str, value: object) -> Address:
        try:
            return Address.parse(self._text(key, value))
        except ValueError as e:
            raise self._fail(key, str(e)) from e

    def _addresses(self, key: str, value: object) -> tuple[Address, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list) or not value:
            raise self._fail(key, 'must be "HOST:PORT,HOST:PORT" or a list of such addresses')
        return tuple(self._address(key, each) for each in value)

    def _broker_ports(self, key: str, value: object) -> Mapping[NodeId, int]:
        ports: dict[NodeId, int] = {}
        for node, port in self._table(key, value).items():
            if not node.isascii() or not node.isdigit():
                raise self._fail(f"{key}.{node}", "the key must be a broker id, for example 1 = 19093")
            ports[NodeId(int(node))] = self._whole(f"{key}.{node}", port)
            if not 1 <= ports[NodeId(int(node))] <= 65535:
                raise self._fail(f"{key}.{node}", f"must be a port from 1 to 65535, not {port!r}")
        return MappingProxyType(ports)

    def _topic_configs(self, key: str, value: object) -> Mapping[str, str]:
        configs: dict[str, str] = {}
        for name, setting in self._table(key, value).items():
            if isinstance(setting, dict):
                raise self._fail(f"{key}.{name}", f'a config name with dots needs quotes: "{name}.…" = "…"')
            # `true` reads better than "true" in TOML; Kafka's configs are text.
            text = str(setting).lower() if isinstance(setting, bool) else self._text(f'{key}."{name}"', setting)
            problem = self._check_topic_config(name, text) if self._check_topic_config else None
            if problem is not None:
                raise self._fail(f'{key}."{name}"', problem)
            configs[name] = text
        return MappingProxyType(configs)

    def _flat(self, cls: type[Any], key: str, value: object, read: Callable[[str, object], object]) -> Any:
        table = self._table(key, value)
        self._known(key, table, (f.name for f in fields(cls)))
        values = {name: read(f"{key}.{name}", each) for name, each in table.items()}
        try:
            return cls(**values)
        except ConfigError as e:
            raise ConfigError(f"{self._where}: {e}") from e

    def _limits(self, key: str, value: object) -> Limits:
        whole = {f.name for f in fields(Limits) if f.type == "int"}

        def read(name: str, each: object) -> float:
            return self._whole(name, each) if name.rpartition(".")[2] in whole else self._number(name, each)

        limits: Limits = self._flat(Limits, key, value, read)
        return limits

    def _log(self, key: str, value: object) -> LogConfig:
        allowed = {f"{key}.level": get_args(LogLevel), f"{key}.format": get_args(LogFormat)}
        log: LogConfig = self._flat(LogConfig, key, value, lambda name, each: self._one_of(name, each, allowed[name]))
        return log
