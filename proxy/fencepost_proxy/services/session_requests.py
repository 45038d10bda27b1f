"""What sessions request and wait for: group queries, commits, expansions, stored configs, work in threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from fencepost_proxy import logs
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.services.expansions import Expansions
from fencepost_proxy.services.groups import GroupProgressTracker
from fencepost_proxy.services.transactions import Commits
from fencepost_proxy.session import messages as sessions
from fencepost_proxy.topics.state import TopicConfigChange

_T = TypeVar("_T")
_log = logs.get("services.session_requests")

#: Maximum requests whose batches are read in threads at one time.
_READ_AT_ONCE_MAX = 2


class SessionRequests:
    """Each is a task, whose result goes to the session by `report`.

    `host` – the client's, None once the connection has ended. `queried` – called after each group query.
    """

    def __init__(
        self,
        *,
        groups: GroupProgressTracker,
        commits: Commits,
        expansions: Callable[[], Expansions | None],
        store: Callable[[Sequence[TopicConfigChange]], Awaitable[str | None]],
        host: Callable[[int], str | None],
        report: Callable[[int, sessions.Event], None],
        queried: Callable[[], None],
        spawn: Spawn,
    ) -> None:
        self._groups = groups
        self._commits = commits
        self._expansions = expansions
        self._store = store
        self._host = host
        self._report = report
        self._queried = queried
        self._spawn = spawn
        self._reading = asyncio.Semaphore(_READ_AT_ONCE_MAX)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, connection: int, command: sessions.Command) -> bool:
        """Whether the command is such a request."""
        match command:
            case sessions.Expand():
                self._spawn(self._expand(connection, command), "expand topics")
            case sessions.Store():
                self._spawn(self._stored(connection, command), "store configs")
            case sessions.GroupQuery(_, query_message):
                self._spawn(self._query(connection, command), f"query group {query_message.group}")
            case sessions.ValidateCommit():
                self._spawn(self._validate(connection, command), "validate a commit")
            case sessions.RecordAbortOnly() | sessions.ClearAbortOnly():
                self._spawn(self._record_or_clear(connection, command), "record an abort-only transaction")
            case sessions.ReadBatches():
                self._spawn(self._read_batches(connection, command), "read batches")
            case _:
                return False
        return True

    async def _expand(self, connection: int, expand: sessions.Expand) -> None:
        expansions = self._expansions()
        assert expansions is not None
        outcomes = await asyncio.gather(*(expansions.expand(request, expand.timeout_ms) for request in expand.requests))
        self._report(connection, sessions.Expanded(expand.token, tuple(outcomes)))

    async def _stored(self, connection: int, store: sessions.Store) -> None:
        self._report(connection, sessions.Stored(store.token, await self._store(store.changes)))

    async def _query(self, connection: int, query: sessions.GroupQuery) -> None:
        reply = await self._groups.answer(query.query_message, self._host(connection) or "")
        self._queried()
        self._report(connection, sessions.Replied(query.token, reply))

    async def _validate(self, connection: int, requested: sessions.ValidateCommit) -> None:
        self._report(connection, sessions.CommitDecided(requested.token, await self._commits.validate(requested)))

    async def _record_or_clear(
        self, connection: int, requested: sessions.RecordAbortOnly | sessions.ClearAbortOnly
    ) -> None:
        if isinstance(requested, sessions.RecordAbortOnly):
            stored = await self._commits.record_abort_only(requested.abort_only, requested.instead_of)
        else:
            stored = await self._commits.clear_abort_only(requested.producer_id, requested.producer_epoch)
        self._report(connection, sessions.AbortOnlyRecorded(requested.token, stored))

    async def _read_batches(self, connection: int, requested: sessions.ReadBatches) -> None:
        """Limits concurrency: each read may need as much memory as the largest decompressed batch."""
        async with self._reading:
            if self._host(connection) is None:
                return
            self._loop = asyncio.get_running_loop()
            try:
                await asyncio.to_thread(requested.read)
            except Exception as error:
                _log.crash("reading batches crashed", error)
        self._report(connection, sessions.BatchesRead(requested.token))

    def in_loop(self, call: Callable[[], _T]) -> _T:
        """Called from the event loop: runs at once. Called from a thread of `_read_batches`: waits for the loop."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            return call()
        assert self._loop is not None
        result: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def run() -> None:
            try:
                result.set_result(call())
            except Exception as error:
                result.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return result.result()
