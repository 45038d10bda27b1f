"""Rewrites broker addresses in responses, so that clients connect to the proxy only.

Every broker has its own listener in the proxy: port = bootstrap port + 1 + node id, or an explicit map. The proxy
learns a broker from the first response that names it. For such a response the caller, in this order:

1. calls `learn_brokers`;
2. opens a listener for each node id that it returns;
3. calls `rewrite_response`. So every advertised port has a listener.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from fencepost_proxy.errors import ConfigError, Error
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.apis import DESCRIBE_CLUSTER, DESCRIBE_QUORUM, FIND_COORDINATOR, METADATA
from fencepost_proxy.wire.node_endpoints import ENDPOINTS_FROM
from fencepost_proxy.wire.schema import Message

_PORT_MAX = 65535
#: `endpoint_type` of DescribeCluster v1+ (KIP-919).
_CONTROLLERS = 2


class AddressBook:
    """Maps a node id to the broker's address (`upstream_of`) and to the address for clients (`advertised`).

    `bootstrap_port`: port of the bootstrap listener. With 0, every listener takes any free port.
    `advertised_host`: host in responses; None for the address to which the client connected.
    `ports`: listener ports by node id that differ from bootstrap port + 1 + node id.
    """

    def __init__(
        self, bootstrap_port: int, *, advertised_host: str | None = None, ports: Mapping[NodeId, int] | None = None
    ) -> None:
        self._bootstrap_port = bootstrap_port
        self._advertised_host = advertised_host
        self._ports: dict[NodeId, int] = dict(ports or {})
        self._upstream: dict[NodeId, Address] = {}
        #: The bootstrap address of another process through which clients should reach a broker; None: this one.
        self.home_of: Callable[[NodeId], Address | None] = lambda node_id: None

    @property
    def nodes(self) -> Mapping[NodeId, Address]:
        """Known brokers and their addresses."""
        return dict(self._upstream)

    def learn(self, node_id: NodeId, upstream: Address) -> bool:
        """Records a broker's address. Returns True if the broker is new or its address changed."""
        changed = self._upstream.get(node_id) != upstream
        self._upstream[node_id] = upstream
        return changed

    def upstream_of(self, node_id: NodeId) -> Address | None:
        """The broker's address; None if no response has named it."""
        return self._upstream.get(node_id)

    def listener_port(self, node_id: NodeId) -> int:
        """The listener port of a broker; 0 for any free port, which the caller then reports with `listens_on`.

        Raises `ConfigError` if the computed port is out of range.
        """
        if (port := self._ports.get(node_id)) is not None:
            return port
        if not self._bootstrap_port:
            return 0
        port = self._bootstrap_port + 1 + node_id
        if not 0 < port <= _PORT_MAX:
            raise ConfigError(
                f"broker {node_id} has no port: {self._bootstrap_port} + 1 + {node_id} = {port} is not from 1 to "
                f"{_PORT_MAX} (set one, for example [broker_ports] {node_id} = 9100)"
            )
        return port

    def listens_on(self, node_id: NodeId, port: int) -> None:
        """Records the port of a broker's listener."""
        self._ports[node_id] = port

    def advertised(self, node_id: NodeId, local_host: str) -> Address:
        """The address for a client that connected to the proxy at `local_host`.

        Raises `ConfigError` as `listener_port` does, and `LookupError` if the listener has no port yet.
        """
        port, home = self.listener_port(node_id), self.home_of(node_id)
        if home is not None and home.port + 1 + node_id <= _PORT_MAX:
            return Address(home.host, home.port + 1 + node_id)
        if not port:
            raise LookupError(f"broker {node_id} has no listener yet")
        return Address(self._advertised_host or local_host, port)


def learn_brokers(api_key: int, message: Message, book: AddressBook) -> tuple[NodeId, ...]:
    """Records every broker that a response names. Returns node ids that are new or whose address changed."""
    return tuple(
        node_id
        for node_id, holder in _addresses(api_key, message)
        if node_id >= 0 and book.learn(node_id, Address(holder.host, holder.port))
    )


def rewrite_response(api_key: int, message: Message, book: AddressBook, local_host: str) -> None:
    """Replaces every address in a decoded response.

    - Entries without an address (errors of FindCoordinator: host "", port -1, node -1) are unchanged.
    - A list of KRaft controllers becomes error 115: controllers have no listener in the proxy. Brokers never return
      such a list (they respond MISMATCHED_ENDPOINT_TYPE); an upstream that is a controller does.
    - In DescribeQuorum, a controller that is not a known broker loses its endpoints.
    """
    if api_key == DESCRIBE_QUORUM:
        _rewrite_quorum(message, book, local_host)
        return
    if api_key == DESCRIBE_CLUSTER and message.endpoint_type == _CONTROLLERS and message.brokers:
        message.brokers = []
        message.controller_id = -1
        message.error_code = Error.UNSUPPORTED_ENDPOINT_TYPE
        message.error_message = "The addresses of controllers are not available through this proxy."
        return
    for node_id, holder in _addresses(api_key, message):
        if node_id >= 0:
            holder.host, holder.port = book.advertised(node_id, local_host)
        else:
            # No broker has a negative id, so there is no listener to advertise.
            holder.host, holder.port = "", -1


def _rewrite_quorum(message: Message, book: AddressBook, local_host: str) -> None:
    """Replaces a controller's address with its broker listener: brokers forward requests to the active controller."""
    for node in message.nodes:
        if book.upstream_of(node.node_id) is None:
            node.listeners = []
        for listener in node.listeners:
            listener.host, listener.port = book.advertised(node.node_id, local_host)


def _addresses(api_key: int, message: Message) -> Iterator[tuple[NodeId, Message]]:
    """Each node id with the struct that holds its `host` and `port`."""
    if api_key == METADATA:
        yield from ((broker.node_id, broker) for broker in message.brokers)
    elif api_key == DESCRIBE_CLUSTER and message.endpoint_type != _CONTROLLERS:
        yield from ((broker.broker_id, broker) for broker in message.brokers)
    elif api_key == FIND_COORDINATOR:
        # v0-3: one coordinator in the response itself. v4+: a list.
        yield from ((each.node_id, each) for each in (message, *message.coordinators) if each.host)
    elif api_key in ENDPOINTS_FROM:
        yield from ((each.node_id, each) for each in message.node_endpoints)
