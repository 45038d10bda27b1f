"""Connects to the servers that a command names before the command sends anything, and says why it cannot.

Kafka's clients retry a refused connection, a failed TLS handshake and a failed login until a timeout, and report that.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Final

from fencepost_proxy import logs
from fencepost_proxy.cli.status_client import CannotQuery
from fencepost_proxy.cluster import hints
from fencepost_proxy.cluster.broker import Access, BrokerConnection, UpstreamUnavailable, deadline_in, remaining
from fencepost_proxy.cluster.responses import RETRIABLE
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.transport.certificates import upstream_context
from fencepost_proxy.types import NO_TOPIC_ID, Address, Monotonic
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

_CLIENT_ID: Final = "fencepost"
_RETRY_SECONDS: Final = 0.2
_AT_ONCE_MAX: Final = 16
_Open = Callable[[Address], Awaitable[BrokerConnection]]


def require_connection(config: ProxyConfig, timeout_seconds: float) -> None:
    """Raises `CannotQuery` unless a server of `upstream` accepts a connection, the login and a request."""
    asyncio.run(_connect(config, timeout_seconds, None, None))


def partitions_of(config: ProxyConfig, topic: str, partition: int | None, timeout_seconds: float) -> list[int]:
    """The topic's partitions; empty if it does not exist.

    Raises `CannotQuery` unless their leaders, or that of `partition` alone, accept a connection and the login.
    """
    return asyncio.run(_connect(config, timeout_seconds, topic, partition))


def reason_of(error: UpstreamUnavailable) -> str:
    """With what the user can change: settings of a Java client, not those of a proxy."""
    text = str(error).rpartition("last error: ")[2].replace(": cannot connect: ", ": ", 1)
    for key, name in hints.PROPERTIES.items():
        text = text.replace(key, name)
    hint = hints.FOR_COMMANDS.get(error.hint, error.hint)
    return f"{text} ({hint})" if hint else text


async def _connect(config: ProxyConfig, timeout_seconds: float, topic: str | None, partition: int | None) -> list[int]:
    logs.setup("error", stream=io.StringIO())  # the message has the reason
    context = None if config.upstream_tls is None else upstream_context(config.upstream_tls)
    access = Access(lambda: context, config.control_sasl)
    limits = Limits(connect_timeout_seconds=timeout_seconds, request_timeout_seconds=timeout_seconds)
    at_once, deadline = asyncio.Semaphore(_AT_ONCE_MAX), deadline_in(timeout_seconds)
    async with AsyncExitStack() as stack:

        async def opened(address: Address) -> BrokerConnection:
            async with at_once:
                connection = await BrokerConnection.open(address, limits=limits, client_id=_CLIENT_ID, access=access)
            stack.push_async_callback(connection.close)
            return connection

        first = await _first(config.upstream, opened)
        try:
            brokers, found = await _described(first, topic, deadline)
        except UpstreamUnavailable as error:
            raise CannotQuery(f"cannot query {reason_of(error)}") from None
        leaders = _leaders(topic or "", found, partition)
        await asyncio.gather(
            *(
                _reach(node_id, brokers.get(node_id), f"{topic}-{led}", opened)
                for node_id, led in leaders.items()
                if brokers.get(node_id) != first.address
            )
        )
        return [] if found is None else sorted(each.partition_index for each in found.partitions)


async def _first(servers: Sequence[Address], opened: _Open) -> BrokerConnection:
    """The first of the connections to succeed."""
    tasks = [asyncio.ensure_future(opened(each)) for each in servers]
    failures = []
    try:
        for task in asyncio.as_completed(tasks):
            try:
                return await task
            except UpstreamUnavailable as error:
                failures.append(reason_of(error))
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    raise CannotQuery(f"cannot connect to {'; '.join(failures)}")


async def _described(
    connection: BrokerConnection, topic: str | None, deadline: Monotonic
) -> tuple[dict[int, Address], Message | None]:
    """The brokers, and the topic if it exists. Repeated while its brokers learn of the topic."""
    queried = [] if topic is None else [Message(name=topic, topic_id=NO_TOPIC_ID)]
    message = Message(topics=queried, allow_auto_topic_creation=False)
    while True:
        answer = await connection.query(apis.METADATA, message, at_least=10, at_most=13, deadline=deadline)
        brokers = {each.node_id: Address(each.host, each.port) for each in answer.brokers}
        if topic is None:
            return brokers, None
        (found,) = answer.topics
        code = found.error_code
        if code == Error.UNKNOWN_TOPIC_OR_PARTITION:
            return brokers, None
        if not code:
            return brokers, found
        if code == Error.TOPIC_AUTHORIZATION_FAILED:
            raise CannotQuery(f"topic {topic}: this user may not DESCRIBE it")
        if code not in RETRIABLE or remaining(deadline) <= _RETRY_SECONDS:
            raise CannotQuery(f"topic {topic}: Metadata returned {error_name(code)}")
        await asyncio.sleep(_RETRY_SECONDS)


def _leaders(topic: str, found: Message | None, partition: int | None) -> dict[int, int]:
    """Leader → one of its partitions."""
    if found is None:
        return {}
    led = {each.partition_index: each.leader_id for each in found.partitions}
    if partition is not None:
        if partition not in led:
            raise CannotQuery(f"topic {topic} has no partition {partition}, only 0 to {max(led)}")
        led = {partition: led[partition]}
    leaderless = sorted(each for each, leader in led.items() if leader < 0)
    if leaderless:
        raise CannotQuery(f"partition {topic}-{leaderless[0]} has no leader now (start the brokers that are down)")
    return {leader: each for each, leader in sorted(led.items(), reverse=True)}


async def _reach(node_id: int, address: Address | None, led: str, opened: _Open) -> None:
    if address is None:
        raise CannotQuery(f"broker {node_id}, the leader of {led}, is not in the cluster now")
    try:
        await opened(address)
    except UpstreamUnavailable as error:
        raise CannotQuery(f"cannot connect to broker {node_id}, the leader of {led}, at {reason_of(error)}") from None
