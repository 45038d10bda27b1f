"""Checks whether Kafka sends clients to this sidecar: its broker must advertise the sidecar's address.

In `mode = "sidecar"` the proxy does not rewrite addresses, so clients connect to what the broker advertises. A broker
that advertises its own address makes clients bypass the proxy. The proxy's own connections must not go through
sidecars, which deny access to the state topic: `upstream` names another listener.

Kafka has no request for a broker's own id, but a broker describes only its own configs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import PLAINTEXT, Access, BrokerConnection, UpstreamUnavailable, deadline_in
from fencepost_proxy.cluster.metadata import ClusterMetadata, from_response
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import Error, Reason
from fencepost_proxy.types import Address, NodeId
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

_log = logs.get("services.sidecar")
_limited_log = logs.RateLimitedLog(_log)

_CLIENT_ID: Final = "fencepost-sidecar"
_BROKER_RESOURCE: Final = 4
#: Interval after a check without and with a problem.
_PROBE_SECONDS: Final = 30.0
_PROBE_AGAIN_SECONDS: Final = 2.0


class SidecarProbe:
    """`problem`: the problem and its fix, or None. `advertised`: address that clients get, by broker.

    `known` returns the Kafka client's view of the cluster: its id, and the brokers' addresses through `upstream`.
    """

    def __init__(
        self,
        config: ProxyConfig,
        listens_on: Callable[[], Address | None],
        known: Callable[[], tuple[str | None, Mapping[NodeId, Address]]],
        access: Access,
    ) -> None:
        assert config.broker is not None
        self._config = config
        self.broker = config.broker
        self._listens_on = listens_on
        self._known = known
        self._access = access if config.broker_tls else replace(access, tls=PLAINTEXT.tls)
        self.problem: Reason | None = Reason(
            f"the advertised address of the broker at {config.broker} is not known yet",
            "Wait a moment. If it persists: is the broker running, and is broker its address?",
        )
        self.queried = False
        self.node_id: NodeId | None = None
        self.advertised: Mapping[NodeId, Address] = {}

    async def run(self) -> None:
        while True:
            before = self.problem
            try:
                self.problem = await self.probe()
            except UpstreamUnavailable as error:
                self.problem = Reason(
                    f"cannot read the broker's advertised address: {error}",
                    "Is the broker running, and is broker the address of its listener for sidecars? fencepost check "
                    "--running shows details.",
                )
            self.queried = True
            if self.problem is not None:
                _limited_log.error("problem", "broker does not send clients to this sidecar", reason=self.problem)
            elif before is not None:
                _log.info("broker sends clients to this sidecar", broker=self.node_id, by=self.broker)
            await asyncio.sleep(_PROBE_SECONDS if self.problem is None else _PROBE_AGAIN_SECONDS)

    async def probe(self) -> Reason | None:
        """Check once; return the problem or None. Raises `UpstreamUnavailable`."""
        limits = self._config.limits
        connection = await BrokerConnection.open(self.broker, limits=limits, client_id=_CLIENT_ID, access=self._access)
        try:
            deadline = deadline_in(limits.connect_timeout_seconds)
            version = connection.version(apis.METADATA, at_least=10, at_most=13)
            queried = Message(topics=[], allow_auto_topic_creation=False)
            reported = from_response(await connection.request(apis.METADATA, version, queried, deadline=deadline))
            node_id = None
            for each in sorted(reported.brokers, key=lambda each: each != self.node_id):
                if await _is(connection, each, limits.connect_timeout_seconds):
                    node_id = each
                    break
        finally:
            await connection.close()
        self.advertised, self.node_id = reported.brokers, node_id
        return self._validate(reported, node_id)

    def _validate(self, reported: ClusterMetadata, node_id: NodeId | None) -> Reason | None:
        cluster_id, by_upstream = self._known()
        if reported.cluster_id != cluster_id:
            return Reason(
                f"broker = {self.broker} is of cluster {reported.cluster_id}, upstream is of {cluster_id}",
                "Set broker and upstream to the same cluster.",
            )
        ours = self._listens_on()
        if ours is None:
            return Reason(
                "the sidecar does not listen yet",
                "Wait a moment. If it persists, its port is in use: the log names it.",
            )
        host, port = self._config.advertised_host, ours.port
        requested = f"{host or 'HOST'}:{port}"
        here = {node: address for node, address in reported.brokers.items() if _same(address, host, port)}
        advertised = ", ".join(f"{node}: {address}" for node, address in sorted(reported.brokers.items()))
        if not here or (node_id is not None and node_id not in here):
            named = "a broker" if node_id is None else f"broker {node_id}"
            return Reason(
                f"{named} at {self.broker} does not advertise this sidecar, {requested}, for that listener but "
                f"{reported.brokers.get(node_id, advertised) if node_id is not None else advertised}: set it in the "
                "broker's advertised.listeners (or advertised_host here, if this is another name of the sidecar)",
                "In the broker's server.properties, set advertised.listeners of the listener that broker names to the "
                "address of this sidecar. Until then clients bypass it.",
            )
        if node_id is None and len(here) > 1 and host is not None:
            return Reason(
                f"{len(here)} brokers advertise {requested}: each needs its own sidecar",
                "Give every broker its own address in advertised.listeners, served by its own sidecar.",
            )
        through = sorted(node for node, address in by_upstream.items() if reported.brokers.get(node) == address)
        if through:
            return Reason(
                f"upstream leads to the sidecars too: brokers {through} advertise the same addresses there. Set "
                "upstream to a listener that clients do not use, such as the inter-broker listener",
                "Set upstream to a listener that clients do not use, such as the inter-broker listener.",
            )
        return None


def _same(address: Address, host: str | None, port: int) -> bool:
    return address.port == port and (host is None or address.host == host)


async def _is(connection: BrokerConnection, node_id: NodeId, seconds: float) -> bool:
    """Whether the connection is to this broker. Other brokers refuse; False also without DESCRIBE_CONFIGS."""
    version = connection.version(apis.DESCRIBE_CONFIGS, at_most=4)
    resource = Message(
        resource_type=_BROKER_RESOURCE, resource_name=str(node_id), configuration_keys=["advertised.listeners"]
    )
    queried = Message(resources=[resource], include_synonyms=False, include_documentation=False)
    answer = await connection.request(apis.DESCRIBE_CONFIGS, version, queried, deadline=deadline_in(seconds))
    return [each.error_code for each in answer.results] == [Error.NONE]
