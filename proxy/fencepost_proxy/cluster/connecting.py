"""TCP connections to a host by name: staggered attempts at all of its addresses (Happy Eyeballs, RFC 8305).

`loop.create_connection` does this too, but not in uvloop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any, Final, TypeVar

from fencepost_proxy.types import Address

#: Pause before the next address is tried alongside (RFC 8305, section 5).
_STAGGER_SECONDS: Final = 0.25
#: How long an address that failed, or was overtaken, comes last.
_LAST_SECONDS: Final = 60.0
#: How long the addresses of a name are used. Callers in between share one lookup.
_LOOKUP_SECONDS: Final = 5.0
_NAMES_MAX: Final = 1_000
_PROBE_THREADS_MAX: Final = 16

_Info = tuple[int, int, int, str, Any]
_Result = TypeVar("_Result")


class Unreachable(OSError):
    """No address of a host accepts connections. `errno` is that of the last failure."""

    def __init__(self, reason: str, errno: int | None) -> None:
        super().__init__(errno, reason)

    def __str__(self) -> str:
        return f"{self.strerror}"


class NoResponse(TimeoutError):
    """At least one address of a host gave no response, and no other one accepted."""


class Connector:
    """Opens connections, and remembers which addresses of a name do not respond."""

    def __init__(self) -> None:
        self._lookups: dict[Address, tuple[float, asyncio.Future[Any]]] = {}
        self._last_until: dict[Any, float] = {}

    async def connect(self, address: Address, seconds: float) -> socket.socket:
        """A nonblocking socket. Raises `NoResponse`, `Unreachable`, or `socket.gaierror` for an unknown name."""
        failures: dict[str, OSError | None] = {}
        try:
            async with asyncio.timeout(seconds):
                infos = self._ordered(await self._look_up(address))
                return await self._race(infos, failures)
        except TimeoutError:
            tried = failures or {"the name server": None}
            raise NoResponse(f"no response from {_stated(tried)}") from None

    async def _look_up(self, address: Address) -> Sequence[Any]:
        loop, numeric = asyncio.get_running_loop(), socket.AI_NUMERICHOST
        try:
            return list(socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=numeric))
        except socket.gaierror:
            pass  # a name
        now = time.monotonic()
        began, lookup = self._lookups.get(address, (0.0, None))
        if (
            lookup is None
            or lookup.get_loop() is not loop
            or (lookup.done() and (now - began > _LOOKUP_SECONDS or _failed(lookup)))
        ):
            if len(self._lookups) >= _NAMES_MAX:
                self._lookups.clear()
            lookup = loop.create_task(
                loop.getaddrinfo(*address, type=socket.SOCK_STREAM), name=f"look up {address.host}"
            )
            lookup.add_done_callback(_failed)  # retrieves the exception if every caller has given up
            self._lookups[address] = now, lookup
        infos: list[Any] = await asyncio.shield(lookup)
        return infos

    def _ordered(self, infos: Iterable[_Info]) -> list[_Info]:
        """Families in turn, then those that failed lately."""
        families: dict[int, list[_Info]] = {}
        for info in dict.fromkeys(infos):
            families.setdefault(info[0], []).append(info)
        mixed = [each for each in chain.from_iterable(zip_longest(*families.values())) if each is not None]
        now = time.monotonic()
        return sorted(mixed, key=lambda info: self._last_until.get(info[4], 0.0) > now)

    async def _race(self, infos: Sequence[_Info], failures: dict[str, OSError | None]) -> socket.socket:
        """`failures` – gets every address that was tried; None while it is silent."""
        if len(infos) == 1:
            failures[_host(infos[0])] = None
            return await _attempt(infos[0])
        attempts: dict[asyncio.Task[socket.socket], _Info] = {}
        waiting = deque(infos)
        try:
            while waiting or attempts:
                if waiting:
                    info = waiting.popleft()
                    failures[_host(info)] = None
                    attempts[asyncio.create_task(_attempt(info), name=f"connect {_host(info)}")] = info
                stagger = _STAGGER_SECONDS if waiting else None
                done, _ = await asyncio.wait(attempts, timeout=stagger, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    info = attempts.pop(task)
                    if (error := task.exception()) is None:
                        self._overtaken(attempts.values())
                        return task.result()
                    assert isinstance(error, OSError)
                    failures[_host(info)] = error
                    self._overtaken([info])
        finally:
            for task in attempts:
                task.cancel()
                task.add_done_callback(_close_result)
        last = next(error for error in reversed(failures.values()) if error is not None)
        raise Unreachable(_stated(failures), last.errno)

    def _overtaken(self, infos: Iterable[_Info]) -> None:
        now = time.monotonic()
        if len(self._last_until) >= _NAMES_MAX:
            self._last_until.clear()
        for info in infos:
            self._last_until[info[4]] = now + _LAST_SECONDS


def _failed(lookup: asyncio.Future[Any]) -> bool:
    return lookup.cancelled() or lookup.exception() is not None


def _host(info: _Info) -> str:
    return str(info[4][0])


def _stated(failures: dict[str, OSError | None]) -> str:
    def each() -> Iterator[str]:
        for host, error in failures.items():
            why = "no response" if error is None else error.strerror or str(error)
            yield f"{host} ({why})" if error is not None or len(failures) > 1 else host

    return ", ".join(each())


async def _attempt(info: _Info) -> socket.socket:
    family, kind, protocol, _, where = info
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, os.strerror(error.errno) if error.errno else str(error)) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _close_result(task: asyncio.Task[socket.socket]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


class Probe:
    """Whether addresses accept connections.

    The lookup of a dead name may take as long as the name server gives no response. So lookups have separate threads,
    half of them for names that have not failed. While a lookup is slow, what the last one found is used.
    """

    def __init__(self) -> None:
        self._infos: dict[Address, tuple[float, Sequence[_Info]]] = {}  # and when they were looked up
        self._pending: dict[Address, asyncio.Task[Sequence[_Info]]] = {}
        self._failed: set[Address] = set()
        self._lookups, self._lookups_again = (asyncio.Semaphore(_PROBE_THREADS_MAX // 2) for _ in range(2))

    def keep(self, addresses: Collection[Address]) -> None:
        """Forget all others."""
        self._infos = {each: found for each, found in self._infos.items() if each in addresses}
        self._failed &= set(addresses)

    async def accepts(self, address: Address, seconds: float) -> bool:
        """`seconds`: once its host has been resolved."""
        # ValueError: of a name that no DNS query can have.
        with contextlib.suppress(OSError, ValueError):
            if await _any_accepts(await self._resolved(address, seconds), seconds):
                self._failed.discard(address)
                return True
        self._failed.add(address)
        return False

    async def _resolved(self, address: Address, seconds: float) -> Sequence[_Info]:
        with contextlib.suppress(socket.gaierror):
            return socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        at, infos = self._infos.get(address, (0.0, ()))
        if infos and time.monotonic() - at < _LOOKUP_SECONDS:
            return infos
        lookup = self._pending.get(address)
        if lookup is None:
            self._pending[address] = lookup = asyncio.create_task(
                self._look_up(address), name=f"look up {address.host}"
            )
            lookup.add_done_callback(lambda _: self._pending.pop(address, None))
            lookup.add_done_callback(_failed)  # retrieves the exception if nothing waits for it
        if infos and not (await asyncio.wait({lookup}, timeout=seconds / 2))[0]:
            return infos
        return await asyncio.shield(lookup)

    async def _look_up(self, address: Address) -> Sequence[_Info]:
        async with self._lookups_again if address in self._failed else self._lookups:
            try:
                found = await _in_thread(lambda: socket.getaddrinfo(*address, type=socket.SOCK_STREAM))
            except (OSError, ValueError):
                self._infos.pop(address, None)
                raise
        self._infos[address] = time.monotonic(), found
        return found


async def _in_thread(call: Callable[[], _Result]) -> _Result:
    """In a separate thread, which the end of the process does not wait for."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    results: list[_Result | Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=run, name="look up", daemon=True).start()
    await ended.wait()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]


async def _any_accepts(infos: Iterable[_Info], seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for info in infos:
                with contextlib.suppress(OSError):
                    (await _attempt(info)).close()
                    return True
    return False
