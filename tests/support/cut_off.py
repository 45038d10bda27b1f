"""Three brokers of which one can be cut off from the others, and not from whoever else asks it.

Its listener WIRE is reached directly. What brokers and controllers say to each other goes through pipes, which end what
the one that is cut off sends and close what leads to it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fencepost_proxy.dev.cluster import HOST, KafkaCluster
from tests.support import framepipe
from tests.support.framepipe import FramePipe
from tests.support.kafka import kafka_version
from tests.support.three_brokers import _PROPERTIES, NODES


class CutOffCluster(KafkaCluster):
    """See the module. `wire` – the address of each node for those who are not brokers."""

    def __init__(self, controllers: dict[int, _PeerPipe], replicas: dict[int, _PeerPipe]) -> None:
        super().__init__(len(NODES), version=kafka_version(), listeners={"WIRE": "PLAINTEXT"}, properties=_PROPERTIES)
        self._controllers, self._replicas = controllers, replicas

    def wire(self, node_id: int) -> str:
        return str(self.address(node_id, "WIRE"))

    def cut_off(self, node_id: int) -> None:
        """For good."""
        for node, pipe in [*self._controllers.items(), *self._replicas.items()]:
            if node == node_id:
                pipe.close()
            # As whom a node's controller, and its broker, speak to controllers.
            pipe.unacknowledged = {b"raft-client-%d" % node_id, b"%d" % node_id}

    def _properties(self, node_id: int) -> dict[str, str]:
        for pipes, listener in ((self._controllers, "CONTROLLER"), (self._replicas, "PLAINTEXT")):
            for node, pipe in pipes.items():
                pipe.target = (HOST, self.address(node, listener).port)
        advertised = {
            "CONTROLLER": self._controllers[node_id].address,
            "PLAINTEXT": self._replicas[node_id].address,
            "WIRE": self.wire(node_id),
        }
        return super()._properties(node_id) | {
            "controller.quorum.voters": ",".join(f"{node}@{pipe.address}" for node, pipe in self._controllers.items()),
            "advertised.listeners": ",".join(f"{name}://{address}" for name, address in advertised.items()),
        }


@contextmanager
def cut_off_cluster() -> Iterator[CutOffCluster]:
    with ExitStack() as stack:
        pipes = [{node: stack.enter_context(_PeerPipe()) for node in NODES} for _ in range(2)]
        yield stack.enter_context(CutOffCluster(*pipes))


class _PeerPipe(FramePipe):
    """`unacknowledged` – client ids from whom nothing is passed on."""

    def __init__(self) -> None:
        super().__init__()
        self.unacknowledged: set[bytes] = set()

    def _wire(self, near: socket.socket, far: socket.socket) -> framepipe._Wire:
        return _PeerWire(self, near, far)


class _PeerWire(framepipe._Wire):
    _pipe: _PeerPipe

    def _requests(self) -> None:
        with contextlib.suppress(OSError):
            for frame in framepipe._frames(self._near):
                client_id = frame[14 : 14 + int.from_bytes(frame[12:14])]
                if client_id in self._pipe.unacknowledged:
                    break
                self._far.sendall(frame)
        self.cut()
