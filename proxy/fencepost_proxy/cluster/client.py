"""The Kafka client: the proxy's requests to Kafka, on separate connections.

`KafkaClient` chooses the connection (`pool`), knows the cluster's metadata (`metadata_cache`) and retries. Each other
module of this package sends one kind of request through it.

It needs READ, WRITE and DESCRIBE on checked topics and the state topic, CREATE for the latter, IDEMPOTENT_WRITE (or
WRITE on any topic), DESCRIBE_CONFIGS on topics and the cluster, and DESCRIBE on the consumer groups of topics with
ordered partition expansion.

A query to a partition leader carries the known leader epoch if the API has a field for it. It is repeated after a
metadata refresh if the broker is not the leader of that epoch, until the caller's time limit. Appends are sent once:
the caller resolves failures.

Every coroutine raises UpstreamUnavailable when it runs out of time. Its `error_code` is set if retrying cannot help:
3 no such topic or partition, 29 or 31 not authorized, 35 the broker lacks the API version.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import (
    BACKOFF_SECONDS,
    PLAINTEXT,
    Access,
    BrokerConnection,
    Call,
    UpstreamUnavailable,
    deadline_in,
    remaining,
)
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.cluster.metadata_cache import MetadataCache
from fencepost_proxy.cluster.pool import ConnectionPool, Purpose
from fencepost_proxy.cluster.responses import Retry, check, only
from fencepost_proxy.cluster.tasks import Tasks
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error, Reason
from fencepost_proxy.types import Address, Monotonic, NodeId, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

_log = logs.get("cluster.client")
_limited_log = logs.RateLimitedLog(_log)
_T = TypeVar("_T")

GROUP_COORDINATOR: Final = 0
TRANSACTION_COORDINATOR: Final = 1
#: The first FindCoordinator that answers for several keys.
_SEVERAL_COORDINATORS: Final = 4
_COORDINATORS_MAX: Final = 100_000
#: Consecutive metadata responses without a topic before it counts as missing: brokers learn of new topics one by one.
_MISSING_TOPIC_TRIES: Final = 4


class KafkaClient:
    """See the module. Owned by one event loop; `start` before anything else, `close` at the end.

    `on_brokers` is called with all brokers' addresses when one was added, moved or removed. `access` – TLS and login
    of its connections; callers that open more connections use it too.
    """

    def __init__(
        self,
        upstream: Sequence[Address],
        limits: Limits,
        *,
        on_brokers: Callable[[Mapping[NodeId, Address]], None] | None = None,
        access: Access = PLAINTEXT,
    ) -> None:
        self.limits = limits
        self.access = access
        #: While `start` waits: why the last attempt failed.
        self.waits_because: Reason | None = None
        self._tasks = Tasks()
        self.run = self._tasks.run
        self.pool = ConnectionPool(upstream, limits, access)
        self.metadata = MetadataCache(self.pool, limits, self._tasks, on_brokers)
        self.topic = self.metadata.topic
        self.leader = self.metadata.leader
        self.refresh_metadata = self.metadata.refresh
        self._coordinators: dict[tuple[int, str], NodeId] = {}

    async def start(self, *, timeout_seconds: float | None = None) -> None:
        """Returns once a broker has sent metadata. Without a timeout it retries indefinitely, and logs that."""
        deadline = None if timeout_seconds is None else deadline_in(timeout_seconds)
        addresses = ",".join(str(each.address) for each in self.pool.bootstrap)
        for each in self.pool.bootstrap:
            each.quiet = True  # failures are logged below
        seconds = self.metadata.refresh_seconds(len(self.pool.bootstrap))
        while True:
            try:
                await self.refresh_metadata([], timeout_seconds=seconds)
                break
            except UpstreamUnavailable as e:
                if deadline is not None and time.monotonic() > deadline:
                    raise
                self.waits_because = Reason(str(e), e.hint)
                _limited_log.warning("start", "waiting for Kafka", upstream=addresses, reason=e)
                await asyncio.sleep(self.limits.reconnect_backoff_max_seconds)
        for each in self.pool.bootstrap:
            each.quiet = False
        await self.pool.learn_versions()
        _log.info("connected to Kafka", cluster_id=self.cluster_id, brokers=len(self.brokers))
        self.run(self._keep_metadata_fresh(), "metadata refresh")

    async def close(self) -> None:
        """Ends every task and connection; requests in flight fail."""
        await self._tasks.close()
        await self.pool.close()

    async def _keep_metadata_fresh(self) -> None:
        while True:
            await asyncio.sleep(self.limits.metadata_refresh_seconds)
            await self.metadata.refresh_quietly(list(self.metadata.known.topics))
            await self.pool.learn_versions()

    @property
    def cluster_id(self) -> str | None:
        """Id of the first cluster that responded. Responses from another cluster are rejected."""
        return self.metadata.known.cluster_id

    @property
    def brokers(self) -> Mapping[NodeId, Address]:
        """The brokers' addresses, as advertised by the listener of `upstream`."""
        return self.metadata.known.brokers

    def deadline(self, timeout_seconds: float | None) -> Monotonic:
        """None: `limits.request_timeout_seconds`."""
        return deadline_in(self.limits.request_timeout_seconds if timeout_seconds is None else timeout_seconds)

    async def connected(self, node_id: NodeId, purpose: Purpose, deadline: Monotonic) -> BrokerConnection:
        return await self.pool.to(node_id, purpose).connected(deadline)

    async def query_leader(
        self,
        tp: TopicPartition,
        query: Callable[[BrokerConnection, Leader, Monotonic], Awaitable[_T]],
        timeout_seconds: float | None,
        purpose: Purpose = Purpose.QUERIES,
    ) -> _T:
        """Queries the known leader, and after a failure the leader of refreshed metadata."""

        async def once(deadline: Monotonic) -> _T:
            leader = self.leader(tp)
            if leader is None:
                raise Retry("has no leader now")
            connection = await self.connected(leader.node_id, purpose, deadline)
            return await query(connection, leader, deadline)

        deadline = self.deadline(timeout_seconds)
        if self.leader(tp) is None:
            with suppress(UpstreamUnavailable):
                await self.refresh_metadata([tp.topic], timeout_seconds=remaining(deadline))
        return await self._until(deadline, f"{tp}", once, tp=tp)

    async def query_any(
        self, query: Callable[[BrokerConnection, Monotonic], Awaitable[_T]], timeout_seconds: float | None
    ) -> _T:
        """Queries any broker, another one at each try."""
        attempt = 0

        async def once(deadline: Monotonic) -> _T:
            nonlocal attempt
            pooled = self.pool.to_any()
            chosen = pooled[attempt % len(pooled)]
            attempt += 1
            return await query(await chosen.connected(deadline), deadline)

        return await self._until(self.deadline(timeout_seconds), "Kafka", once)

    async def query_coordinator(
        self,
        name: str,
        query: Callable[[BrokerConnection, Monotonic], Awaitable[_T]],
        timeout_seconds: float | None,
        *,
        key_type: int = GROUP_COORDINATOR,
    ) -> _T:
        """Queries the coordinator of a group or transactional id: the cached one, else from FindCoordinator."""

        async def find(connection: BrokerConnection, deadline: Monotonic) -> _T:
            node_id = self._coordinators.pop((key_type, name), None)
            if node_id is None:
                version = connection.version(apis.FIND_COORDINATOR, at_least=3, at_most=6)
                message = Message(key=name, key_type=key_type, coordinator_keys=[name])
                answer = await connection.request(apis.FIND_COORDINATOR, version, message, deadline=deadline)
                found = only(answer.coordinators, "FindCoordinator") if version >= _SEVERAL_COORDINATORS else answer
                check(found.error_code, "FindCoordinator", found.error_message)
                node_id = NodeId(found.node_id)
            there = await self.connected(node_id, Purpose.QUERIES, deadline)
            result = await query(there, deadline)
            if len(self._coordinators) < _COORDINATORS_MAX:
                self._coordinators[key_type, name] = node_id  # until a query fails
            return result

        return await self.query_any(find, timeout_seconds)

    async def query_one(
        self,
        node_id: NodeId,
        query: Callable[[BrokerConnection, Monotonic], Awaitable[_T]],
        timeout_seconds: float | None,
    ) -> _T:
        """Queries this broker, and no other at a retry."""

        async def once(deadline: Monotonic) -> _T:
            return await query(await self.connected(node_id, Purpose.QUERIES, deadline), deadline)

        return await self._until(self.deadline(timeout_seconds), f"broker {node_id}", once)

    async def query_broker(
        self, node_id: NodeId, calls: Callable[[BrokerConnection], Sequence[Call]], *, timeout_seconds: float
    ) -> list[Message]:
        """Sends the requests that `calls` makes, once, on a connection that no sequencer query or append uses.

        The caller checks error codes in responses.
        """
        deadline = self.deadline(timeout_seconds)
        connection = await self.connected(node_id, Purpose.WATCHING, deadline)
        return await connection.pipeline(calls(connection), deadline=deadline)

    async def _until(
        self,
        deadline: Monotonic,
        what: str,
        once: Callable[[Monotonic], Awaitable[_T]],
        *,
        tp: TopicPartition | None = None,
    ) -> _T:
        """Retries until there is a response, the deadline has passed, or retrying cannot help."""
        pause = BACKOFF_SECONDS
        missing = 0
        while True:
            try:
                return await once(deadline)
            except Retry as e:
                reason = str(e)
            except UpstreamUnavailable as e:
                if e.error_code is not None:
                    raise
                reason = str(e)
            if remaining(deadline) <= pause:
                raise UpstreamUnavailable(f"{what}: {reason}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, self.limits.reconnect_backoff_max_seconds)
            if tp is not None:
                try:
                    await self.refresh_metadata([tp.topic], timeout_seconds=remaining(deadline))
                except UpstreamUnavailable:
                    continue
                if tp.topic in self.metadata.denied:
                    raise UpstreamUnavailable(
                        f"{what}: the proxy's user may not DESCRIBE the topic",
                        error_code=Error.TOPIC_AUTHORIZATION_FAILED,
                    )
                info = self.topic(tp.topic)
                missing = missing + 1 if info is None or tp.partition not in info.partitions else 0
                if missing >= _MISSING_TOPIC_TRIES:
                    raise UpstreamUnavailable(
                        f"{what}: no such topic or partition",
                        error_code=Error.UNKNOWN_TOPIC_OR_PARTITION,
                    )
