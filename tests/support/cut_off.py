"""Three brokers, one of which can be isolated from the others but stays reachable for clients.

Clients use the listener WIRE directly. Brokers and controllers reach each other through fault proxies, which close
every connection from and to the isolated broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from fencepost_dev.cluster import KafkaCluster
from fencepost_dev.ports import HOST
from tests.kit.fault_proxy import FaultProxy
from tests.kit.stage import NODES, THREE_REPLICAS
from tests.support.kafka import kafka_version


class CutOffCluster(KafkaCluster):
    """`wire`: the address of each node for clients."""

    def __init__(self, controllers: dict[int, FaultProxy], replicas: dict[int, FaultProxy]) -> None:
        super().__init__(
            len(NODES), version=kafka_version(), listeners={"WIRE": "PLAINTEXT"}, properties=THREE_REPLICAS
        )
        self._controllers, self._replicas = controllers, replicas

    def wire(self, node_id: int) -> str:
        return str(self.address(node_id, "WIRE"))

    def cut_off(self, node_id: int) -> None:
        """Isolate the broker permanently."""
        for node, pipe in [*self._controllers.items(), *self._replicas.items()]:
            if node == node_id:
                pipe.refuse()
            # The client ids of a node's controller, and of its broker.
            pipe.block(b"raft-client-%d" % node_id, b"%d" % node_id)

    def _properties(self, node_id: int) -> dict[str, str]:
        for pipes, listener in ((self._controllers, "CONTROLLER"), (self._replicas, "PLAINTEXT")):
            for node, pipe in pipes.items():
                pipe.targets = ((HOST, self.address(node, listener).port),)
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
        pipes = [{node: stack.enter_context(FaultProxy()) for node in NODES} for _ in range(2)]
        yield stack.enter_context(CutOffCluster(*pipes))
