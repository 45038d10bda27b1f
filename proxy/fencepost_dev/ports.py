"""Free ports of this machine, and the listeners of an embedded cluster."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence

from fencepost_dev.errors import PortTakenError
from fencepost_proxy.types import Address

HOST = "127.0.0.1"
#: Below the ephemeral ports (Linux: from 32768), so that no outgoing connection takes the port of a restarting broker.
FREE_PORTS = range(15_000, 32_000)

port_lock = threading.Lock()
ports_given_out: set[int] = set()


def free_ports(count: int, used: Iterable[int] = ()) -> list[int]:
    """Free ports that no other cluster of this process has chosen, without `used`."""
    found: list[int] = []
    with port_lock:
        for port in random.sample(FREE_PORTS, len(FREE_PORTS)):
            if port not in used and port not in ports_given_out and is_free(port):
                found.append(port)
                if len(found) == count:
                    ports_given_out.update(found)
                    return found
    raise PortTakenError(f"no free port between {FREE_PORTS.start} and {FREE_PORTS.stop}")


def is_free(port: int) -> bool:
    with socket.socket() as probe_socket:
        # As Java's server sockets: ignore connections of an earlier run in TIME_WAIT.
        probe_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe_socket.bind((HOST, port))
        except OSError:
            return False
        return True


def require_free(ports: Iterable[int]) -> None:
    for port in ports:
        if not is_free(port):
            raise PortTakenError(f"port {port} on {HOST} is in use (stop the other process, or choose another port)")


class Listeners:
    """Listeners of all nodes. `ports`: node id → listener name → port; CONTROLLER only for a controller."""

    def __init__(
        self,
        ports: Sequence[int] | None,
        listeners: Mapping[str, str] | None,
        listener_ports: Mapping[str, int] | None,
        advertised: Mapping[str, Address] | None,
    ) -> None:
        self.given_ports = tuple(ports or ())
        self._protocols = {"CONTROLLER": "PLAINTEXT", "PLAINTEXT": "PLAINTEXT"} | dict(listeners or {})
        self._fixed = dict(listener_ports or {})
        self.advertised = dict(advertised or {})
        self.ports: dict[int, dict[str, int]] = {}

    def require_free(self) -> None:
        require_free((*self.given_ports, *self._fixed.values()))

    def choose_for_controllers(self, count: int) -> None:
        """For the nodes 1 to `count`."""
        self.ports = {}
        for index in range(count):
            ports = self._free(list(self._protocols))
            if self.given_ports:
                ports["PLAINTEXT"] = self.given_ports[index]
            self.ports[index + 1] = ports | self._fixed

    def choose_for_broker(self, node_id: int) -> None:
        self.ports[node_id] = self._free([name for name in self._protocols if name != "CONTROLLER"])

    def _free(self, names: Sequence[str]) -> dict[str, int]:
        used = {port for ports in self.ports.values() for port in ports.values()}
        used.update(self.given_ports, self._fixed.values())
        return dict(zip(names, free_ports(len(names), used), strict=True))

    def properties(self, node_id: int) -> dict[str, str]:
        """The node's server properties."""
        ports = self.ports[node_id]
        listeners = {name: f"{name}://{HOST}:{port}" for name, port in ports.items()}
        advertised = listeners | {name: f"{name}://{address}" for name, address in self.advertised.items()}
        voters = [
            f"{other}@{HOST}:{of_other['CONTROLLER']}"
            for other, of_other in self.ports.items()
            if "CONTROLLER" in of_other
        ]
        return {
            "process.roles": "broker,controller" if "CONTROLLER" in ports else "broker",
            # Static voters, not stored in the log as newer releases can: ports may change between runs.
            "controller.quorum.voters": ",".join(voters),
            "controller.listener.names": "CONTROLLER",
            "listeners": ",".join(listeners.values()),
            "advertised.listeners": ",".join(text for name, text in advertised.items() if name != "CONTROLLER"),
            "listener.security.protocol.map": ",".join(
                f"{name}:{protocol}" for name, protocol in self._protocols.items()
            ),
            "inter.broker.listener.name": "PLAINTEXT",
        }
