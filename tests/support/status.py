"""A status page with contents that a test chooses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.status import Listed, PageRequest, StatusSnapshot
from fencepost_proxy.observability.status_server import Release, StatusServer
from fencepost_proxy.types import Address
from tests.support.ports import free_port

#: Virtual configs of a checked topic.
REQUIRED: Final = {"fencepost.check.expected.offsets": "required"}
AGED: Final = {"fencepost.max.record.age.ms": "60000"}


def lists(rows: Mapping[str, Sequence[Any]]) -> Callable[[Sequence[PageRequest]], Awaitable[Sequence[Listed]]]:
    """Rows by kind; of one topic, or one page of them."""

    async def listed(requested: Sequence[PageRequest]) -> Sequence[Listed]:
        found = []
        for each in requested:
            there = [row for row in rows.get(each.what, ()) if each.topic in (None, getattr(row, "topic", None))]
            there = [row for row in there if each.search in getattr(row, "topic", "")]
            found.append(Listed(len(there), tuple(there[each.offset : each.offset + each.limit])))
        return found

    return listed


@contextmanager
def status_page(
    snapshot: StatusSnapshot,
    rows: Mapping[str, Sequence[Any]],
    *,
    release: Release | None = None,
    token_file: Path | None = None,
    **more: Any,
) -> Iterator[Address]:
    """Served by a thread, for commands that query it."""
    loop, address = asyncio.new_event_loop(), Address("127.0.0.1", free_port())
    more |= {"not_ready": lambda: snapshot.not_ready, "release": release, "token_file": token_file}
    server = StatusServer(lambda: snapshot, Metrics, lists(rows), **more)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(address), loop).result(60)
    try:
        yield address
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
