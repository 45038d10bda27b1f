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
from benchmarks.results import DIRECT, FLOOR, HAPROXY, PRODUCT
from fencepost_dev.ports import FREE_PORTS, HOST, is_free
from fencepost_dev.process import SupervisedProcess

#: Common proxies, reported as missing if peers.toml does not name them.
KNOWN_PEERS = ("Kroxylicious", "kafka-proxy")
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
#: Arguments of the interpreter that `SupervisedProcess` starts first.
_IS_GUARD = {"-I", "-S", "-c"}
#: Consecutive ports per route: its listener, and the ports for brokers.
PORTS = 8
#: Below `FREE_PORTS`, from which Kafka's ports are chosen later.
_FREE_PORTS = range(10_000, FREE_PORTS.start)

#: HAProxy as a TCP proxy. One thread per core (default). Buffers of 64 KiB instead of 16 reduce its CPU time for large
#: responses by a tenth. Splicing had no effect, so it is off.
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
address_connections_max = 10000
# Two checkouts of the product may serve this Kafka. Neither leaves state that the other must wait for.
takeover_seconds = 0.5

[topics."checked-*"]
"fencepost.check.expected.offsets" = "true"

[topics."required-*"]
"fencepost.check.expected.offsets" = "required"

[topics."base-required-*"]
"fencepost.check.expected.offsets" = "required"
"fencepost.expected.offsets.source" = "base"

[topics."base-checked-*"]
"fencepost.check.expected.offsets" = "true"
"fencepost.expected.offsets.source" = "base"
"""


class PeersError(Exception):
    """peers.toml or a --route is invalid."""


@dataclass(frozen=True, slots=True)
class Peer:
    """How a proxy is started.

    Variables in `start`, `config` and `environment`: `${host}`, `${port}`, `${port1}` … `${port7}` (the next ports,
    free), `${upstream}` (Kafka's HOST:PORT), `${connections}` (maximum open connections), `${config}` (the file with
    `config`), `${directory}` (a scratch directory).

    `start`: empty if it already runs at `address`.
    `tls_config`: as `config`, with TLS on both sides. `${certificate}`, `${key}` and `${trusted}` are PEM files.
    `rewrites`: whether it puts its own address into Kafka's responses. If not, Kafka must advertise it.
    `missing`: why it cannot be started, if known in advance.
    """

    name: str
    start: tuple[str, ...] = ()
    config: str = ""
    version: tuple[str, ...] = ()
    rewrites: bool = True
    address: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    tls_config: str = ""


def product() -> Peer:
    return Peer(
        PRODUCT,
        (sys.executable, "-m", "fencepost_proxy", "proxy", "--config", "${config}", "--log-level", "warning"),
        _FENCEPOST_CONFIG,
    )


def haproxy() -> Peer:
    # Debian installs it in a directory that is not in every user's PATH.
    found = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        return Peer(HAPROXY, missing="haproxy is not installed (Debian and Ubuntu: apt-get install haproxy)")
    return Peer(HAPROXY, (found, "-db", "-f", "${config}"), _HAPROXY_CONFIG, (found, "-v"), rewrites=False)


def floor() -> Peer:
    """Without BBR's pacing, as the product relays within a host."""
    if shutil.which("cc") is None:
        return Peer(FLOOR, missing="there is no C compiler (cc)")
    source = Path(__file__).with_name("floor.c")
    relay = (
        f"cc -O2 -o ${{directory}}/floor {source} && exec ${{directory}}/floor ${{host}}:${{port}} ${{upstream}} reno"
    )
    return Peer(FLOOR, ("sh", "-c", relay), rewrites=False)


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
    unknown = table.keys() - {"start", "config", "tls_config", "version", "rewrites", "address", "environment"}
    if unknown:
        raise PeersError(f"{name}: unknown: {', '.join(sorted(unknown))}")
    if name in (DIRECT, PRODUCT, HAPROXY, FLOOR):
        raise PeersError(f"{name}: this name is reserved")
    start = _words(name, "start", table)
    address = table.get("address", "")
    if bool(start) == bool(address):
        raise PeersError(f"{name}: set either `start`, or the `address` of a running proxy")
    peer = Peer(
        name,
        start,
        str(table.get("config", "")),
        _words(name, "version", table),
        bool(table.get("rewrites", True)),
        str(address),
        {key: str(value) for key, value in table.get("environment", {}).items()},
        tls_config=str(table.get("tls_config", "")),
    )
    if start and shutil.which(os.path.expanduser(start[0])) is None:
        return Peer(name, missing=f"{start[0]} was not found (docs/performance.md describes how to install it)")
    return peer


def _words(name: str, key: str, table: Mapping[str, object]) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise PeersError(f"{name}: {key} must be a list of words")
    return tuple(value)


def absent(name: str) -> Peer:
    return Peer(name, missing="not in benchmarks/peers.toml (docs/performance.md describes how to install it)")


def given_route(text: str, *, rewrites: bool) -> Peer:
    """The peer of `--route NAME=HOST:PORT` or `--tcp-route`. Raises PeersError."""
    name, _, address = text.partition("=")
    host, _, port = address.rpartition(":")
    if not name or not host or not port.isdigit():
        raise PeersError(f"--route {text}: write NAME=HOST:PORT")
    return Peer(name, address=address, rewrites=rewrites)


def filled(template: str, values: Mapping[str, str]) -> str:
    """Replace each `${name}`. Raises PeersError for an unknown name."""
    try:
        return string.Template(template).substitute(values)
    except (KeyError, ValueError) as error:
        raise PeersError(
            f"invalid variable: {error} (known: {', '.join(sorted(values))}; write a dollar sign as $$)"
        ) from error


class StartError(Exception):
    """A proxy did not start, or ended. The message has its last output."""


class Route:
    """One way to Kafka. `address`: bootstrap address for clients; `pids()`: its processes, if this run started them."""

    def __init__(self, peer: Peer, *, port: int, upstream: str, directory: Path) -> None:
        self.name = peer.name
        self.peer = peer
        self.address = peer.address or f"{HOST}:{port}"
        self._directory = directory / "".join(each if each.isalnum() else "-" for each in peer.name)
        self._directory.mkdir()
        self._values = {
            "host": HOST,
            # Two descriptors per connection. HAProxy does not start if they exceed the limit.
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
        """Seconds from the start of the program to its first accepted connection."""
        assert self._process is None
        (self._directory / "config").write_text(filled(self.peer.config, self._values))
        command = [os.path.expanduser(filled(word, self._values)) for word in self.peer.start]
        command[0] = shutil.which(command[0]) or command[0]
        environment = {**os.environ, **{key: filled(text, self._values) for key, text in self.peer.environment.items()}}
        process = self._process = SupervisedProcess(command, output=self.log, environment=environment)
        # A supervised process starts as an interpreter, which then executes the program.
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
            # It leads its own session, so its child processes end too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(_STOP_SECONDS)

    def version(self) -> str:
        """First output line of its version command."""
        if not self.peer.version:
            return ""
        command = [os.path.expanduser(filled(word, self._values)) for word in self.peer.version]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"unknown ({error})"
        return ((done.stdout or done.stderr).strip().splitlines() or ["unknown"])[0]


def free_ports(count: int, *, but: Collection[int] = ()) -> Sequence[int]:
    """First ports of `count` ranges of PORTS free ports, none of them in `but`."""
    found: list[int] = []
    rows = range(_FREE_PORTS.start + os.getpid() % 100 * PORTS, _FREE_PORTS.stop - PORTS, PORTS)
    for first in rows:
        row = range(first, first + PORTS)
        if not set(row) & set(but) and all(is_free(port) for port in row):
            found.append(first)
        if len(found) == count:
            return found
    raise StartError(f"no free ports between {rows.start} and {rows.stop}")
