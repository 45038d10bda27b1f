"""`fencepost check`: whether a proxy with this configuration would work on this machine, without starting one.

Checks files, this machine, all servers in `upstream`, all brokers of the cluster, and ACLs (`rights.py`). It changes
nothing. Each request and the whole check have time limits.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.cluster import hints
from fencepost_proxy.cluster.broker import Access, BrokerConnection, UpstreamUnavailable, deadline_in
from fencepost_proxy.cluster.metadata import ClusterMetadata, from_response
from fencepost_proxy.config import ListenTls, ProxyConfig, UpstreamTls
from fencepost_proxy.config.secrets import secret
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.preflight import rights
from fencepost_proxy.preflight.findings import Finding, Group, State
from fencepost_proxy.services.sidecar import SidecarProbe
from fencepost_proxy.transport import certificates
from fencepost_proxy.transport.listeners import bind
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.apis import API_VERSIONS, api_name
from fencepost_proxy.wire.schema import Message

FILES: Final = Group("files")
MACHINE: Final = Group("this machine")
KAFKA: Final = Group("Kafka")

_NO_HINT: Final = "check the broker's log"
_CLIENT_ID: Final = "fencepost-check"
_DAY_SECONDS: Final = 86_400.0
_SOON_SECONDS: Final = 14 * _DAY_SECONDS
_AT_ONCE_MAX: Final = 16
#: Open files besides the two per client.
_OTHER_FILES: Final = 200
_CONNECT_SECONDS: Final = 3.0

#: `metadata.version`, on which all brokers agree, and the release that introduced it. Brokers may be newer.
_RELEASES: Final = (
    *((1, "3.0"), (2, "3.1"), (3, "3.2"), (4, "3.3"), (8, "3.4"), (9, "3.5"), (12, "3.6"), (15, "3.7"), (20, "3.8")),
    *((21, "3.9"), (22, "4.0"), (26, "4.1"), (28, "4.2"), (30, "4.3"), (31, "4.4")),
)
_NEWEST_LEVEL: Final = 33


async def check(config: ProxyConfig, *, seconds: float, running: bool = False) -> list[Finding]:
    """All findings within `seconds`. `running`: this proxy is running, so its ports must be in use."""
    found = [*_files(config), *_machine(config)]
    brokers: list[NodeId] | None = None
    try:
        async with asyncio.timeout(seconds), AsyncExitStack() as stack:
            probing = _Kafka(config, found, stack)
            await probing.probe()
            brokers = probing.brokers
    except TimeoutError:
        stated = f"check not finished within {seconds:g} s"
        found.append(KAFKA.failed("time", stated, "raise --timeout, or find out what hangs"))
    return found + await _listeners(config, brokers, running)


# --- files ------------------------------------------------------------------------------------------------------------


def _files(config: ProxyConfig) -> Iterator[Finding]:
    listen, upstream, sasl = config.listen_tls, config.upstream_tls, config.control_sasl
    yield from _readable("status_token_file", config.status_token_file)
    yield from _readable("status_read_token_file", config.status_read_token_file)
    if listen is not None:
        yield from _tls("listen_tls", listen, lambda: certificates.listener_context(listen), "client_ca_file")
        yield from _named(config, listen.certificate_file)
    if upstream is not None:
        yield from _tls("upstream_tls", upstream, lambda: certificates.upstream_context(upstream), "ca_file")
    if sasl is not None:
        yield from _readable("control_sasl.password_file", sasl.password_file)
        yield from _readable("control_sasl.token_file", sasl.token_file)
    if (listen is None) is not (upstream is None):
        plaintext_part = "from clients to the proxy" if listen is None else "from the proxy to Kafka"
        missing = "[listen_tls]" if listen is None else "[upstream_tls]"
        stated = f"TLS is enabled on one side only: traffic {plaintext_part}, including SASL passwords, is plaintext"
        yield FILES.warning("TLS", stated, f"add the table {missing}, unless that network is trusted")
    if sasl is not None and sasl.mechanism in ("PLAIN", "OAUTHBEARER") and upstream is None:
        stated = "the proxy sends its own password or token to Kafka in plaintext"
        yield FILES.warning("control_sasl.mechanism", stated, "add the table [upstream_tls], or use SCRAM-SHA-512")


def _tls(table: str, tls: ListenTls | UpstreamTls, load: Callable[[], object], authorities: str) -> Iterator[Finding]:
    key = "certificate_file" if tls.key_file is None else "key_file"
    yield from _secret(f"{table}.{key}", tls.key_file or tls.certificate_file)
    yield from _secret(f"{table}.key_password_file", tls.key_password_file)
    try:
        load()
    except ConfigError as error:
        yield _wrong(error)
    else:
        yield from _lasting(f"{table}.certificate_file", tls.certificate_file)
        yield from _lasting(f"{table}.{authorities}", getattr(tls, authorities))


def _readable(key: str, file: Path | None) -> Iterator[Finding]:
    """Check a file whose first line is a secret."""
    if file is None:
        return
    try:
        secret(key, file)
    except ConfigError as error:
        yield _wrong(error)
    else:
        yield FILES.ok(key, f"{file} is readable")
    yield from _secret(key, file)


def _wrong(error: ConfigError) -> Finding:
    key, _, stated = str(error).partition(": ")
    todo = "correct the file, or use another one"
    if f" {certificates.EXPIRED} on " in stated:
        todo = "renew it; a running proxy reloads the file automatically"
    if f" {certificates.NOT_YET} before " in stated:
        todo = "check this machine's clock"
    if "cannot be read" in stated:
        todo = "check the path as this process sees it, and the permissions of the user who runs it"
    return FILES.failed(key, stated, todo)


def _secret(key: str, file: Path | None) -> Iterator[Finding]:
    """Warn if other users of this machine can read the file. `_readable` checks that it exists."""
    if file is None:
        return
    try:
        mode = file.stat().st_mode
    except OSError:
        return
    if mode & stat.S_IRWXO:
        stated = f"all users of this machine may read {file} ({stat.filemode(mode)})"
        yield FILES.warning(key, stated, f"chmod o= {file}")


def _lasting(key: str, file: Path | None) -> Iterator[Finding]:
    if file is None:
        return
    now, begins, ends = time.time(), certificates.not_before(file), certificates.not_after(file)
    if ends is None:
        yield FILES.unknown(key, f"expiry of {file} is unknown")
        return
    day = datetime.fromtimestamp(ends, UTC).date()
    if ends < now:
        yield FILES.failed(key, f"{file} expired on {day}", "renew it; a running proxy reloads the file automatically")
    elif begins is not None and begins > now:
        day = datetime.fromtimestamp(begins, UTC).date()
        yield FILES.failed(key, f"{file} is not valid before {day}", "check this machine's clock")
    elif ends - now < _SOON_SECONDS:
        stated = f"{file} expires on {day}, in {(ends - now) / _DAY_SECONDS:.0f} days"
        yield FILES.warning(key, stated, "renew it; a running proxy reloads the file automatically")
    else:
        yield FILES.ok(key, f"{file} is valid until {day} ({(ends - now) / _DAY_SECONDS:.0f} days)")


def _named(config: ProxyConfig, file: Path) -> Iterator[Finding]:
    host, names = config.advertised_host, certificates.names(file)
    if host is None or not names or any(_is_for(name, host) for name in names):
        return
    stated = f"{file} is for {', '.join(names)}, but clients connect to {host} (advertised_host)"
    todo = f"issue it for {host}, or set advertised_host to one of its names"
    yield FILES.failed("listen_tls.certificate_file", stated, todo)


def _is_for(name: str, host: str) -> bool:
    """Compare as TLS clients do: `*` matches the first label."""
    try:
        return ip_address(host) == ip_address(name)
    except ValueError:
        pass
    name, host = name.lower().rstrip("."), host.lower().rstrip(".")
    return name == host or (name.startswith("*.") and host.partition(".")[2] == name[2:])


# --- this machine -----------------------------------------------------------------------------------------------------


def _machine(config: ProxyConfig) -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    requested = 2 * config.limits.connections_max + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= requested:
        yield MACHINE.ok("open files", f"the limit of {soft} suffices for {config.limits.connections_max} clients")
    else:
        stated = f"the limit is {soft} open files per process; limits.connections_max={config.limits.connections_max} "
        stated += f"needs {requested}"
        yield MACHINE.warning("open files", stated, f"ulimit -n {requested}, or LimitNOFILE={requested} in the unit")


async def _listeners(config: ProxyConfig, brokers: Sequence[NodeId] | None, running: bool) -> list[Finding]:
    found: list[Finding] = []
    requested: list[tuple[str, Address]] = [("listener for clients", config.listen)]
    book = AddressBook(config.listen.port, advertised_host=config.advertised_host, ports=config.broker_ports)
    with_own = [] if config.mode == "sidecar" else brokers
    for node_id in with_own if with_own is not None else sorted(config.broker_ports):
        what = f"listener for broker {node_id}"
        try:
            requested.append((what, Address(config.listen.host, book.listener_port(node_id))))
        except ConfigError as error:
            found.append(MACHINE.failed(what, str(error), f"[broker_ports] {node_id} = …"))
    if with_own is None:
        stated = "the brokers are not known, so neither are the ports of their listeners"
        found.append(MACHINE.unknown("listeners for brokers", stated))
    elif absent := sorted(set(config.broker_ports) - set(with_own)):
        stated = f"names broker(s) {', '.join(map(str, absent))}, which are not in the cluster now"
        found.append(MACHINE.warning("broker_ports", stated, "remove them, unless they will return"))
    if config.status is not None:
        requested.append(("status page", config.status))
    for what, address in requested:
        found.append(await _answers(what, address) if running else _free(what, address, config))
    if config.advertised_host is not None:
        found.append(await _resolves(config.advertised_host, alone=config.homes))
    return found


def _free(what: str, address: Address, config: ProxyConfig) -> Finding:
    try:
        sock = bind(address, what, reuse_port=config.reuse_port and address != config.status, listens=False)
    except ConfigError as error:
        stated = str(error).partition(": ")[2] or str(error)
        todo = "if this proxy is running already: fencepost check --running"
        if "another process" not in stated:
            todo = "use an address of this machine, or 0.0.0.0 for all of them"
        return MACHINE.failed(what, f"{address}: {stated}", todo)
    sock.close()
    return MACHINE.ok(what, f"{address} is free" if address.port else f"{address}: any free port")


async def _answers(what: str, address: Address) -> Finding:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, address.port)
    except (OSError, TimeoutError) as error:
        stated = f"{address}: nothing listens there ({getattr(error, 'strerror', None) or 'no response'})"
        return MACHINE.failed(what, stated, "is the proxy running? If not, omit --running")
    writer.close()
    return MACHINE.ok(what, f"{address}: in use")


async def _resolves(host: str, *, alone: bool = False) -> Finding:
    """`alone`: it must lead to this proxy, and to no other one."""
    what = "advertised_host"
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            infos = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        stated = f"{host} does not resolve here ({getattr(error, 'strerror', None) or 'no response'})"
        return MACHINE.warning(what, stated, "clients connect to this name: it must resolve where they run")
    hosts = list(dict.fromkeys(str(info[4][0]) for info in infos))
    stated = f"{host} resolves to {', '.join(hosts) if alone else hosts[0]} here"
    families = {info[0] for info in infos}
    if alone and len(hosts) > len(families):
        return MACHINE.warning(what, stated, "homes = true: use a name that leads to this proxy alone")
    return MACHINE.ok(what, f"{stated}; homes = true: it must lead to this proxy alone" if alone else stated)


def release_of(level: int) -> str:
    if level > _NEWEST_LEVEL:
        return f"newer than {_RELEASES[-1][1]}"
    return next((release for least, release in reversed(_RELEASES) if level >= least), "older than 3.0")


# --- Kafka ------------------------------------------------------------------------------------------------------------


def _remedy(error: UpstreamUnavailable, more: str = "") -> str:
    remedy = error.hint or _NO_HINT
    return f"{remedy} ({more})" if more else remedy


def _without(address: Address, error: UpstreamUnavailable) -> str:
    return str(error).removeprefix(f"{address}: ")


class _Kafka:
    """Appends to `found` while it runs, so a timeout keeps earlier findings. `brokers`: None if not known."""

    def __init__(self, config: ProxyConfig, found: list[Finding], stack: AsyncExitStack) -> None:
        self._config = config
        self._found = found
        self._stack = stack
        self._at_once = asyncio.Semaphore(_AT_ONCE_MAX)
        self.brokers: list[NodeId] | None = None
        self._context: ssl.SSLContext | None = None

    async def probe(self) -> None:
        try:
            if self._config.upstream_tls is not None:
                self._context = certificates.upstream_context(self._config.upstream_tls)
        except ConfigError:
            self._found.append(KAFKA.unknown("upstream", "not checked: the files of [upstream_tls] are not usable"))
            return
        servers = {f"upstream {each}": each for each in self._config.upstream}
        reached = await self._reach(
            servers, "other servers in upstream respond, so a proxy would start", one_suffices=True
        )
        clusters = {what: found for what, each in reached.items() if (found := await self._metadata(what, each))}
        if not clusters:
            return
        cluster = next(iter(clusters.values()))
        for what, found in clusters.items():
            stated = f"{self._way_in(reached[what])}, cluster {found.cluster_id}"
            if found.cluster_id == cluster.cluster_id:
                self._found.append(KAFKA.ok(what, stated))
            else:
                todo = "set upstream to brokers of one cluster: the proxy uses the first one that responds"
                self._found.append(KAFKA.failed(what, f"{stated}: another cluster", todo))
            self._found.extend(self._ending(what, reached[what]))
        self.brokers = sorted(cluster.brokers)
        connection = reached[next(iter(clusters))]
        self._found.append(await self._release(connection, cluster))
        proxied_connections = await self._each_broker(cluster)
        self._found.extend(self._few(cluster))
        if self._config.mode == "sidecar":
            self._found.append(await self._sidecar(cluster))
        usable = next(iter(proxied_connections.values()), connection)
        self._found.extend(await rights.rights(usable, self._config, cluster, proxied_connections))

    async def _reach(
        self, servers: Mapping[str, Address], hint: str, *, one_suffices: bool = False
    ) -> dict[str, BrokerConnection]:
        """Connections to the servers that respond. `hint` – about the others."""
        tried = await asyncio.gather(*map(self._open, servers.values()))
        reached = {what: it for what, it in zip(servers, tried, strict=True) if isinstance(it, BrokerConnection)}
        for (what, address), it in zip(servers.items(), tried, strict=True):
            if isinstance(it, UpstreamUnavailable):
                warns = one_suffices and bool(reached)
                state = State.WARNING if warns else State.FAILED
                todo = _remedy(it, hint if warns or not one_suffices else "")
                self._found.append(Finding(KAFKA.name, what, state, _without(address, it), todo))
        return reached

    async def _open(self, address: Address) -> BrokerConnection | UpstreamUnavailable:
        """The connection, or the failure."""
        access = Access(lambda: self._context, self._config.control_sasl)
        async with self._at_once:
            try:
                connection = await BrokerConnection.open(
                    address, limits=self._config.limits, client_id=_CLIENT_ID, access=access
                )
            except UpstreamUnavailable as error:
                return error
        self._stack.push_async_callback(connection.close)
        return connection

    async def _metadata(self, what: str, connection: BrokerConnection) -> ClusterMetadata | None:
        try:
            version = connection.version(apis.METADATA, at_least=10, at_most=13)
            message = Message(topics=[], allow_auto_topic_creation=False)
            deadline = deadline_in(self._config.limits.request_timeout_seconds)
            return from_response(await connection.request(apis.METADATA, version, message, deadline=deadline))
        except UpstreamUnavailable as error:
            self._found.append(KAFKA.failed(what, _without(connection.address, error), _remedy(error)))
            return None

    def _way_in(self, connection: BrokerConnection) -> str:
        secured, sasl = connection.secured, self._config.control_sasl
        way = "plain TCP" if secured is None else (secured.version() or "TLS")
        if sasl is not None:
            way += f", SASL {sasl.mechanism}" + (f" as {sasl.username}" if sasl.username else "")
        return way

    @staticmethod
    def _ending(what: str, connection: BrokerConnection) -> Iterator[Finding]:
        """Warn if the broker's certificate expires soon."""
        shown = None if connection.secured is None else connection.secured.getpeercert()
        if not shown or "notAfter" not in shown:
            return
        left = ssl.cert_time_to_seconds(str(shown["notAfter"])) - time.time()
        if left < _SOON_SECONDS:
            stated = f"the broker's certificate expires in {left / _DAY_SECONDS:.0f} days ({shown['notAfter']})"
            yield KAFKA.warning(what, stated, "renew it on the broker")

    async def _release(self, connection: BrokerConnection, cluster: ClusterMetadata) -> Finding:
        message = Message(client_software_name="fencepost", client_software_version="0")
        deadline = deadline_in(self._config.limits.request_timeout_seconds)
        stated = f"{cluster.cluster_id}, {len(cluster.brokers)} broker(s)"
        try:
            answer = await connection.request(API_VERSIONS, 3, message, deadline=deadline)
        except UpstreamUnavailable as error:
            return KAFKA.unknown("cluster", f"{stated}; its release: {error}")
        levels = {each.name: each.max_version_level for each in answer.finalized_features or ()}
        level = levels.get("metadata.version")
        if level is None:
            return KAFKA.unknown("cluster", f"{stated}; release unknown")
        return KAFKA.ok("cluster", f"{stated}, features of Kafka {release_of(level)} (metadata.version {level})")

    async def _each_broker(self, cluster: ClusterMetadata) -> dict[NodeId, BrokerConnection]:
        """Connections to the reachable brokers."""
        brokers = {f"broker {node_id} at {address}": node_id for node_id, address in sorted(cluster.brokers.items())}
        servers = {what: cluster.brokers[node_id] for what, node_id in brokers.items()}
        reached = await self._reach(servers, "the address is from advertised.listeners of the listener in upstream")
        for what, connection in reached.items():
            self._found.append(self._apis(what, connection))
            self._found.extend(self._ending(what, connection))
        return {brokers[what]: connection for what, connection in reached.items()}

    @staticmethod
    def _apis(what: str, connection: BrokerConnection) -> Finding:
        lacking = []
        for api_key, (at_least, at_most) in rights.NEEDED.items():
            try:
                connection.version(api_key, at_least=at_least, at_most=at_most)
            except UpstreamUnavailable:
                low, high = connection.api_versions.get(api_key, (0, -1))
                has = f"has v{low}–{high}" if high >= low else "has none"
                lacking.append(f"{api_name(api_key)} v{at_least}–{at_most} ({has})")
        if lacking:
            todo = "this Kafka is too old or too new for this proxy: docs/api-table.md"
            return KAFKA.failed(what, f"lacks APIs that the proxy needs: {', '.join(lacking)}", todo)
        low, high = connection.api_versions.get(apis.PRODUCE, (0, 0))
        fetch = "–".join(map(str, connection.api_versions.get(apis.FETCH, (0, 0))))
        stated = f"has all required APIs; {len(connection.api_versions)} APIs, Produce {low}–{high}, Fetch {fetch}"
        return KAFKA.ok(what, stated)

    async def _sidecar(self, cluster: ClusterMetadata) -> Finding:
        """Check whether its broker sends clients to it."""
        config = self._config
        access = Access(lambda: self._context, config.control_sasl)
        known = (cluster.cluster_id, cluster.brokers)
        probe = SidecarProbe(config, lambda: config.listen, lambda: known, access)
        what = f"sidecar of {config.broker}"
        try:
            problem = await probe.probe()
        except UpstreamUnavailable as error:
            todo = hints.FOR_SIDECAR.get(error.hint, error.hint or _NO_HINT)
            return KAFKA.failed(what, _without(probe.broker, error), todo)
        if problem is not None:
            todo = "the broker must send clients to the sidecar: docs/configuration.md, mode"
            return KAFKA.failed(what, problem.text, todo)
        return KAFKA.ok(what, f"broker {probe.node_id} sends clients to it")

    @staticmethod
    def _few(cluster: ClusterMetadata) -> Iterator[Finding]:
        if not cluster.brokers:
            yield KAFKA.failed("brokers", "Kafka reports none", "are its brokers running? Check their logs")
        elif len(cluster.brokers) < 3:
            stated = (
                f"{len(cluster.brokers)} broker(s): a disk failure may lose acknowledged appends and the state topic"
            )
            todo = "for durable topics use three brokers and min.insync.replicas=2"
            yield KAFKA.warning("durability", stated, todo)
