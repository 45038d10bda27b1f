"""What sessions request and wait for: group queries, commits, expansions, stored configs, work in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fencepost_proxy import logs
from fencepost_proxy.observability import audit
from fencepost_proxy.observability.audit import Identity
from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.services.topic_configs import TopicConfigs
from fencepost_proxy.session.frames import messages as sessions
from fencepost_proxy.transport.proxied_connection import ProxiedConnection

_T = TypeVar("_T")
_log = logs.get("services.session_requests")

#: Maximum requests whose batches are read in threads at one time.
_READ_AT_ONCE_MAX = 2


@dataclass(eq=False)
class SessionRequests:
    """`host` – the client's, None once the connection has ended. `queried` – called after each group query."""

    cluster: ClusterView
    configs: TopicConfigs
    host: Callable[[int], str | None]
    queried: Callable[[], None]
    _reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_READ_AT_ONCE_MAX), init=False)
    _loop: asyncio.AbstractEventLoop | None = field(default=None, init=False)

    def start(
        self, connection: int, command: sessions.Command, proxied: ProxiedConnection | None
    ) -> Coroutine[Any, Any, sessions.Event | None] | None:
        """The work that such a request causes; it returns the event for the session. None for other commands."""
        match command:
            case sessions.Expand():
                return self._expand(command, Identity.of(proxied))
            case sessions.Store():
                return self._stored(command, Identity.of(proxied))
            case sessions.GroupQuery():
                return self._query(connection, command)
            case sessions.ValidateCommit():
                return self._validate(command, proxied)
            case sessions.RecordAbortOnly():
                return self._record(command)
            case sessions.ClearAbortOnly():
                return self._clear(command)
            case sessions.ReadBatches():
                return self._read_batches(connection, command)
        return None

    async def _expand(self, expand: sessions.Expand, identity: Identity) -> sessions.Event:
        expansions = self.cluster.expansions
        assert expansions is not None
        running = (expansions.expand(request, expand.timeout_ms) for request in expand.requests)
        outcomes = tuple(await asyncio.gather(*running))
        audit.expanded(identity, expand.requests, outcomes)
        return sessions.Expanded(expand.token, outcomes)

    async def _stored(self, store: sessions.Store, identity: Identity) -> sessions.Event:
        stored = await self.configs.store(store.changes)
        audit.configs_stored(identity, store.changes, stored.effects, stored.failure)
        return sessions.Stored(store.token, stored.failure)

    async def _query(self, connection: int, query: sessions.GroupQuery) -> sessions.Event:
        reply = await self.cluster.groups.answer(query.query_message, self.host(connection) or "")
        self.queried()
        return sessions.Replied(query.token, reply)

    async def _validate(self, requested: sessions.ValidateCommit, proxied: ProxiedConnection | None) -> sessions.Event:
        node_id = None if proxied is None else self.cluster.broker_of(proxied.node_id, proxied.upstream_address)
        return sessions.CommitDecided(requested.token, await self.cluster.commits.validate(requested, node_id))

    async def _record(self, requested: sessions.RecordAbortOnly) -> sessions.Event:
        stored = await self.cluster.commits.record_abort_only(requested.abort_only, requested.instead_of)
        return sessions.AbortOnlyRecorded(requested.token, stored)

    async def _clear(self, requested: sessions.ClearAbortOnly) -> sessions.Event:
        cleared = await self.cluster.commits.clear_abort_only(requested.producer_id, requested.producer_epoch)
        return sessions.AbortOnlyRecorded(requested.token, cleared)

    async def _read_batches(self, connection: int, requested: sessions.ReadBatches) -> sessions.Event | None:
        """Limits concurrency: each read may need as much memory as the largest decompressed batch."""
        async with self._reading:
            if self.host(connection) is None:
                return None
            self._loop = asyncio.get_running_loop()
            try:
                await asyncio.to_thread(requested.read)
            except Exception as error:
                _log.crash("reading batches crashed", error)
        return sessions.BatchesRead(requested.token)

    def in_loop(self, call: Callable[[], _T]) -> _T:
        """Called from the event loop: runs at once. Called from a thread of `_read_batches`: waits for the loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            return call()
        assert self._loop is not None

        async def run() -> _T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()
