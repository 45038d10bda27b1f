"""A worker's connection to the supervisor: it gets listeners, and migrates connections to the primary worker.

The worker with index 0 is the primary worker. The supervisor (`supervisor.py`) binds every port once; all workers
accept on the same sockets.
"""

from __future__ import annotations

import mmap
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.metrics import Metrics, ProcessNumbers
from fencepost_proxy.observability.lists import Found
from fencepost_proxy.observability.process import process_numbers
from fencepost_proxy.observability.status import PageRequest, StatusSnapshot
from fencepost_proxy.transport.proxied_connection import MigratedSockets
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.workers.channel import Channel, Packet, receive_packet, send_packet

PRIMARY: Final = 0
#: A supervisor that is silent this long is dead: it has little other work.
_LISTENER_SECONDS: Final = 5.0

#: Bytes of shared memory per worker, for its number of connections.
LOAD_BYTES: Final = 8
#: Load of a worker that does not serve, so that no other worker defers to it.
AWAY: Final = sys.maxsize

START, READY, MIGRATE, REPORT, RELEASE, LIST = "start", "ready", "migrate", "report", "release", "list"
RELOAD = "reload"


@dataclass(frozen=True, slots=True)
class ListenerRequest:
    """`node_id`: None for the bootstrap listener."""

    node_id: NodeId | None
    address: Address
    what: str


@dataclass(frozen=True, slots=True)
class Report:
    """Status and metrics of a worker. `state_fresh_until`: monotonic clock, which processes of a machine share."""

    snapshot: StatusSnapshot
    metrics: Metrics
    state_fresh_until: float
    process: ProcessNumbers


class Proxy(Protocol):
    """Interface of the proxy in this worker."""

    def take_over(self, migrated: MigratedSockets, client: socket.socket, upstream: socket.socket) -> None: ...
    def report(self) -> tuple[StatusSnapshot, Metrics, float]: ...
    def release_group(self, group: str, topic: str) -> None: ...
    def found(self, requested: Sequence[PageRequest]) -> list[Found]: ...
    def reload(self, config: ProxyConfig) -> None: ...


class Worker:
    """`packets`, `listeners`: this process's ends of the two sockets to the supervisor.

    `loads`: memory file with the number of connections per worker. Each worker writes its own.
    """

    def __init__(self, index: int, packets: socket.socket, listeners: socket.socket, loads: int) -> None:
        self.index = index
        self._loads = memoryview(mmap.mmap(loads, 0)).cast("q")
        os.close(loads)
        self._packets = packets
        self._listeners = listeners
        self._channel: Channel | None = None
        self._proxy: Proxy | None = None
        #: Called when the supervisor ended; set it before `attach`.
        self.on_end: Callable[[], None] = lambda: None
        listeners.settimeout(_LISTENER_SECONDS)

    @property
    def primary(self) -> bool:
        """Whether this is the primary worker: it serves checked topics and changes virtual configs."""
        return self.index == PRIMARY

    def wait_for_start(self) -> ProxyConfig | None:
        """Block until this worker may serve; None if the supervisor ended."""
        packet = receive_packet(self._packets)
        config: ProxyConfig | None = None if packet is None else packet.message()
        return config

    def attach(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._channel = Channel(self._packets, self._received, self.on_end)

    def has(self, connections: int) -> None:
        """Store the number of connections; called on each change."""
        self._loads[self.index] = connections

    def others_first(self) -> bool:
        """Whether another worker has fewer connections. This balances connections approximately."""
        return self._loads[self.index] > min(self._loads)

    def ready(self, bootstrap: Address) -> None:
        self._send(Packet.of(READY, bootstrap))

    def listener(self, requested: ListenerRequest) -> socket.socket:
        """Get a listening socket. Blocks briefly, once per broker. Raises `ConfigError`."""
        try:
            send_packet(self._listeners, Packet.of("listener", requested))
            packet = receive_packet(self._listeners)
        except OSError as error:
            raise ConfigError(f"no listener for {requested.what}: request to the supervisor failed: {error}") from error
        if packet is None:
            raise ConfigError(f"no listener for {requested.what}: the supervisor ended")
        problem = packet.message()
        if problem is not None:
            raise ConfigError(problem)
        (sock,) = packet.sockets()
        sock.setblocking(False)
        return sock

    def migrate(self, migrated: MigratedSockets, client: socket.socket, upstream: socket.socket) -> bool:
        """Migrate a connection to the primary worker; False if its sockets were closed instead."""
        return self._send(Packet.of(MIGRATE, migrated, [client, upstream]))

    def _send(self, packet: Packet) -> bool:
        if self._channel is None:
            packet.close()
            return False
        return self._channel.send(packet)

    def _received(self, packet: Packet) -> None:
        assert self._proxy is not None
        message = packet.message()
        if packet.kind == MIGRATE:
            self._proxy.take_over(message, *packet.sockets())
        elif packet.kind == RELEASE:
            self._proxy.release_group(*message)
        elif packet.kind == RELOAD:
            self._proxy.reload(message)
        elif packet.kind == REPORT:
            snapshot, metrics, fresh_until = self._proxy.report()
            report = Report(snapshot, metrics, fresh_until, process_numbers() or ProcessNumbers())
            self._send(Packet.of(REPORT, (message, report)))
        elif packet.kind == LIST:
            number, requested = message
            self._send(Packet.of(LIST, (number, self._proxy.found(requested))))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._listeners.close()
