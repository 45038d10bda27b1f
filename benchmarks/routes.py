"""Routes between a client and Kafka (direct, the product, HAProxy, other proxies), and how each is started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import string
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine
from benchmarks.results import DIRECT, PRODUCT
from fencepost_proxy.dev.cluster import FREE_PORTS, HOST
from fencepost_proxy.dev.process import SupervisedProcess

HAPROXY = "HAProxy (TCP)"
#: What people use now: said to be missing where peers.toml does not name them.
KNOWN_PEERS = ("Kroxylicious", "kafka-proxy")
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
#: Words by which the interpreter is known that `SupervisedProcess` starts first.
_IS_GUARD = {"-I", "-S", "-c"}
#: Ports in a row that each route may use: the address that clients are given, and what it needs behind that.
PORTS = 8
#: Below those that a Kafka of ours chooses from, which come to be used a moment later.
_FREE_PORTS = range(10_000, FREE_PORTS.start)

#: HAProxy hands bytes on and looks at none of them. One thread for each core, as by default; buffers of 64 KiB, not 16,
#: which took a tenth off its CPU for large answers; no splicing, which took nothing off.
_HAPROXY_CONFIG = """
global
    maxconn ${connections}
    tune.bufsize 65536
defaults
    mode tcp
    timeout connect 5s
    timeout client 10m
    timeout server 10m
listen kafka
    bind ${host}:${port}
    server kafka ${upstream}
"""

_FENCEPOST_CONFIG = """
upstream = ["${upstream}"]
listen = "${host}:${port}"

[limits]
connections_max = 10000
# Two checkouts of it may serve one Kafka here; neither leaves anything behind that the other has to wait for.
takeover_seconds = 0.5

[topics."checked-*"]
"check.expected.offsets" = "true"

[topics."required-*"]
"check.expected.offsets" = "required"

[topics."base-required-*"]
"check.expected.offsets" = "required"
"expected.offsets.carrier" = "base"

[topics."base-checked-*"]
"check.expected.offsets" = "true"
"expected.offsets.carrier" = "base"
"""


class PeersError(Exception):
    """peers.toml, or a --route, is not as it should be; the text says how."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How a proxy is started.

    Known in `start`, `config` and `environment`: `${host}`, `${port}`, `${port1}` … `${port7}` (free ports behind it),
    `${upstream}` (Kafka's HOST:PORT), `${connections}` (how many may be open), `${config}` (the file that `config` is
    written to), `${directory}` (a scratch one).

    `start` – empty: it runs already, at `address`.
    `rewrites` – whether it puts its own address into Kafka's answers. If not, Kafka must advertise it.
    `missing` – why it cannot be started here, as far as that is known beforehand.
    """

    name: str
    start: tuple[str, ...] = ()
    config: str = ""
    version: tuple[str, ...] = ()
    rewrites: bool = True
    address: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""


def product() -> Peer:
    return Peer(
        PRODUCT,
        (sys.executable, "-m", "fencepost_proxy", "proxy", "--config", "${config}", "--log-level", "warning"),
        _FENCEPOST_CONFIG,
    )


def haproxy() -> Peer:
    # Debian's has its place where not every user's PATH looks.
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        return Peer(HAPROXY, missing="haproxy is not installed; on Debian and Ubuntu: apt-get install haproxy")
    return Peer(HAPROXY, (found, "-db", "-f", "${config}"), _HAPROXY_CONFIG, (found, "-v"), rewrites=False)


def read_peers(text: str) -> list[Peer]:
    """The peers of a `peers.toml`. Raises PeersError."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PeersError(f"not TOML: {error}") from error
    return [_peer(name, table) for name, table in document.items()]


def _peer(name: str, table: object) -> Peer:
    if not isinstance(table, dict):
        raise PeersError(f"{name}: must be a table: [{name}]")
    unknown = table.keys() - {"start", "config", "version", "rewrites", "address", "environment"}
    if unknown:
        raise PeersError(f"{name}: unknown: {', '.join(sorted(unknown))}")
    if name in (DIRECT, PRODUCT, HAPROXY):
        raise PeersError(f"{name}: this name is taken")
    start = _words(name, "start", table)
    address = table.get("address", "")
    if bool(start) == bool(address):
        raise PeersError(f"{name}: give either `start`, or the `address` of one that runs already")
    peer = Peer(
        name,
        start,
        str(table.get("config", "")),
        _words(name, "version", table),
        bool(table.get("rewrites", True)),
        str(address),
        {key: str(value) for key, value in table.get("environment", {}).items()},
    )
    if start and shutil.which(os.path.expanduser(start[0])) is None:
        return Peer(name, missing=f"{start[0]} was not found here; docs/performance.md tells how to get it")
    return peer


def _words(name: str, key: str, table: Mapping[str, object]) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise PeersError(f"{name}: {key} must be a list of words")
    return tuple(value)


def absent(name: str) -> Peer:
    return Peer(
        name, missing="benchmarks/peers.toml does not say how to start it; docs/performance.md tells how to get it"
    )


def given_route(text: str, *, rewrites: bool) -> Peer:
    """Of `--route NAME=HOST:PORT` or `--tcp-route`. Raises PeersError."""
    name, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    if not name or not host or not port.isdigit():
        raise PeersError(f"--route {text}: write NAME=HOST:PORT")
    return Peer(name, address=address, rewrites=rewrites)


def filled(template: str, values: Mapping[str, str]) -> str:
    """With every `${name}` replaced. Raises PeersError for a name that is not known."""
    try:
        return string.Template(template).substitute(values)
    except (KeyError, ValueError) as error:
        raise PeersError(f"{error}: known are {', '.join(sorted(values))}; a dollar sign is written $$") from error


class StartError(Exception):
    """A proxy did not start, or ended; the text has its last words."""


class Route:
    """One way to Kafka. `address` is what clients are given; `pids()` are its processes, where we started them."""

    def __init__(self, peer: Peer, *, port: int, upstream: str, directory: Path) -> None:
        self.name = peer.name
        self.peer = peer
        self.address = peer.address or f"{HOST}:{port}"
        self._directory = directory / "".join(each if each.isalnum() else "-" for each in peer.name)
        self._directory.mkdir()
        self._values = {
            "host": HOST,
            # Two descriptors for each; more than the machine allows, and HAProxy does not start.
            "connections": str(min(12_000, machine.descriptors_max() // 2 - 200)),
            "port": str(port),
            "upstream": upstream,
            "directory": str(self._directory),
            "config": str(self._directory / "config"),
            **{f"port{each}": str(port + each) for each in range(1, PORTS)},
        }
        self._process: SupervisedProcess | None = None

    @property
    def is_ours(self) -> bool:
        return bool(self.peer.start)

    @property
    def log(self) -> Path:
        return self._directory / "log"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def pids(self) -> list[int]:
        return machine.family(self._process.pid) if self._process is not None else []

    def start(self) -> float:
        """Seconds from the start of the program to the first connection that it took."""
        assert self._process is None
        (self._directory / "config").write_text(filled(self.peer.config, self._values))
        command = [os.path.expanduser(filled(word, self._values)) for word in self.peer.start]
        command[0] = shutil.which(command[0]) or command[0]
        environment = {**os.environ, **{key: filled(text, self._values) for key, text in self.peer.environment.items()}}
        process = self._process = SupervisedProcess(command, output=self.log, environment=environment)
        # A guarded process is an interpreter at first, and only then the program.
        first = machine.command_line(process.pid)
        while process.running and set(first) >= _IS_GUARD and machine.command_line(process.pid) == first:
            time.sleep(0.0005)
        began = time.perf_counter()
        self._until_it_listens()
        return time.perf_counter() - began

    def _until_it_listens(self) -> None:
        host, _, port = self.address.rpartition(":")
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            if self._process is not None and not self._process.running:
                break
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
                return
            time.sleep(0.001)
        self.stop()
        raise StartError(f"{self.name} did not listen at {self.address}: {self.last_words()}")

    def last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return "nothing was printed"
        return " / ".join(lines[-3:]) or "nothing was printed"

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.signal(signal.SIGTERM)
        if not process.wait(_STOP_SECONDS):
            # It leads a session of its own: what it started ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_STOP_SECONDS)

    def version(self) -> str:
        """The first line that its version command prints."""
        if not self.peer.version:
            return ""
        command = [os.path.expanduser(filled(word, self._values)) for word in self.peer.version]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"unknown ({error})"
        return ((done.stdout or done.stderr).strip().splitlines() or ["unknown"])[0]


def free_ports(count: int, *, but: Collection[int] = ()) -> Sequence[int]:
    """The first of each of `count` rows of PORTS free ports, none of them in `but`."""
    found: list[int] = []
    rows = range(_FREE_PORTS.start + os.getpid() % 100 * PORTS, _FREE_PORTS.stop - PORTS, PORTS)
    for first in rows:
        row = range(first, first + PORTS)
        if not set(row) & set(but) and all(_is_free(port) for port in row):
            found.append(first)
        if len(found) == count:
            return found
    raise StartError(f"no free ports between {rows.start} and {rows.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
