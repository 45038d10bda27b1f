"""Which address clients are told for each broker, so that none of them ever hears a broker's own.

Every broker has a listener of its own here: port = bootstrap port + 1 + node id, or an explicit map. A broker is known
once a response has named it. With a response that names brokers the caller does, in this order: `learn_brokers`, open
a listener for each id that it gives back, `rewrite_response`: no client is told of a port that nobody listens on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fencepost_proxy.errors import ConfigError, Error
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire.apis import DESCRIBE_CLUSTER, DESCRIBE_QUORUM, FIND_COORDINATOR, METADATA
from fencepost_proxy.wire.schema import Message

_PORT_MAX = 65535
#: `endpoint_type` of DescribeCluster v1+ (KIP-919).
_CONTROLLERS = 2


class AddressBook:
    """Node id -> where the broker is (`upstream_of`) and where clients reach it (`advertised`).

    `bootstrap_port` – of the bootstrap listener; 0: any free port, and then so for every broker's listener.
    `advertised_host` – what clients are told; None: the address by which the client at hand reached the proxy.
    `ports` – listener port per node id, where it is not bootstrap port + 1 + node id.
    """

    def __init__(
        self, bootstrap_port: int, *, advertised_host: str | None = None, ports: Mapping[NodeId, int] | None = None
    ) -> None:
        self._bootstrap_port = bootstrap_port
        self._advertised_host = advertised_host
        self._ports: dict[NodeId, int] = dict(ports or {})
        self._upstream: dict[NodeId, Address] = {}

    @property
    def nodes(self) -> Mapping[NodeId, Address]:
        """Every known broker and where it is."""
        return dict(self._upstream)

    def learn(self, node_id: NodeId, upstream: Address) -> bool:
        """Notes where a broker is. True if it is new or has moved."""
        changed = self._upstream.get(node_id) != upstream
        self._upstream[node_id] = upstream
        return changed

    def upstream_of(self, node_id: NodeId) -> Address | None:
        """Where the broker is, None while no response has named it."""
        return self._upstream.get(node_id)

    def listener_port(self, node_id: NodeId) -> int:
        """The port to listen on for a broker; 0 for any free one, to be told by `listens_on`.

        Raises ConfigError where the arithmetic leaves the range of ports.
        """
        if (port := self._ports.get(node_id)) is not None:
            return port
        if not self._bootstrap_port:
            return 0
        port = self._bootstrap_port + 1 + node_id
        if not 0 < port <= _PORT_MAX:
            raise ConfigError(
                f"broker {node_id} would get port {self._bootstrap_port} + 1 + {node_id} = {port}, and ports end at "
                f"{_PORT_MAX}: name a port for it in the configuration, for example [broker_ports] {node_id} = 9100"
            )
        return port

    def listens_on(self, node_id: NodeId, port: int) -> None:
        """Notes the port that a broker's listener got."""
        self._ports[node_id] = port

    def advertised(self, node_id: NodeId, local_host: str) -> Address:
        """What a client is told; `local_host` is the address by which that client reached the proxy.

        Raises ConfigError as `listener_port` does, and LookupError where the listener got no port yet.
        """
        port = self.listener_port(node_id)
        if not port:
            raise LookupError(f"broker {node_id} has no listener yet")
        return Address(self._advertised_host or local_host, port)


def learn_brokers(api_key: int, message: Message, book: AddressBook) -> tuple[NodeId, ...]:
    """Notes every broker that a response names; gives back those that are new or have moved."""
    return tuple(
        node_id
        for node_id, holder in _addresses(api_key, message)
        if node_id >= 0 and book.learn(node_id, Address(holder.host, holder.port))
    )


def rewrite_response(api_key: int, message: Message, book: AddressBook, local_host: str) -> None:
    """Replaces every address in a response to Metadata, FindCoordinator, DescribeCluster or DescribeQuorum.

    Answers without an address (FindCoordinator's errors: host "", port -1, node -1) stay as they are. A list of KRaft
    controllers is replaced by error 115: a broker never gives one (it answers MISMATCHED_ENDPOINT_TYPE), and if the
    upstream is a controller after all, the controllers have no listener here that could be told instead. For the same
    reason DescribeQuorum names a controller that is not a known broker without any endpoint.
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
            # Nothing to put in its place: no broker of ours has such an id.
            holder.host, holder.port = "", -1


def _rewrite_quorum(message: Message, book: AddressBook, local_host: str) -> None:
    """A broker forwards a client's requests to the active controller: its listener stands for its controller's."""
    for node in message.nodes:
        if book.upstream_of(node.node_id) is None:
            node.listeners = []
        for listener in node.listeners:
            listener.host, listener.port = book.advertised(node.node_id, local_host)


def _addresses(api_key: int, message: Message) -> Iterator[tuple[NodeId, Message]]:
    """Each (node id, struct with `host` and `port`) that holds an address."""
    if api_key == METADATA:
        yield from ((broker.node_id, broker) for broker in message.brokers)
    elif api_key == DESCRIBE_CLUSTER and message.endpoint_type != _CONTROLLERS:
        yield from ((broker.broker_id, broker) for broker in message.brokers)
    elif api_key == FIND_COORDINATOR:
        # v0–3 name one coordinator in the response itself, v4+ a list of them.
        yield from ((each.node_id, each) for each in (message, *message.coordinators) if each.host)
