"""A small HTTP/1.1 server for the status page, bounded for slow and hostile clients.

One request per connection, without a body, bounded in size, time and number. At the connection limit, the connection
that has been silent longest is dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from fencepost_proxy import logs
from fencepost_proxy.cluster.tasks import Tasks
from fencepost_proxy.transport.listeners import Acceptor, Listening, listen
from fencepost_proxy.transport.loop_share import Share
from fencepost_proxy.types import Address

_log = logs.get("observability.http")

_HEAD_BYTES_MAX: Final = 8_192
_REQUEST_SECONDS: Final = 5.0
#: For the server's own work.
ANSWER_SECONDS: Final = 60.0
#: Connections that wait for their client to send a request or read a response; above this the oldest is dropped.
_WAITING_MAX: Final = 64
#: Share of the event loop for connections, and what one takes of it, about.
_SHARE: Final = 0.05
_CREDIT_SECONDS: Final = 0.1
_CONNECTION_SECONDS: Final = 0.001

TEXT: Final = "text/plain; charset=utf-8"
#: A page may load its style and script from here, and query this server; nothing else.
_HEADERS: Final = (
    "Connection: close",
    "Cache-Control: no-store",
    "X-Content-Type-Options: nosniff",
    "Referrer-Policy: no-referrer",
    "Cross-Origin-Resource-Policy: same-origin",
    "Content-Security-Policy: default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
)
_OF_STATUS: Final = {
    405: "Allow: GET, HEAD",
    401: 'WWW-Authenticate: Bearer\r\nWWW-Authenticate: Basic realm="Fencepost"',
}


class Refused(Exception):
    """The request is answered with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Request(NamedTuple):
    """`headers`: by name in lower case; the first of each name. `peer`: address of the HTTP client."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    peer: str = "unknown"


class Response(NamedTuple):
    content_type: str
    body: bytes
    status: int = 200


class HttpServer:
    """`respond`: makes the response to one request. May raise `Refused`."""

    def __init__(self, respond: Callable[[Request], Awaitable[Response]]) -> None:
        self._respond = respond
        self._share = Share(_SHARE, _CREDIT_SECONDS)
        self._tls: Any = None
        self._sockets: list[Listening] = []
        self._acceptors: list[Acceptor] = []
        self._tasks = Tasks()
        self._handlers: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], None] = {}  # longest wait first

    async def start(self, address: Address, tls: Any = None) -> Address:
        """Listen; return the bound address. `tls`: an `ssl.SSLContext`. Raises `OSError`."""
        self._tls = tls
        self._sockets = await listen(address)
        self._acceptors = [Acceptor(sock, self._accepted, self._share) for sock in self._sockets]
        return Address.of_socket(self._sockets[0].getsockname())

    async def close(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for sock in self._sockets:
            sock.close()
        await self._tasks.close()
        handlers = list(self._handlers)
        for handler in handlers:
            handler.cancel()
        if handlers:
            await asyncio.wait(handlers)

    def _accepted(self, sock: Listening, peer: Address) -> None:
        self._share.charge(_CONNECTION_SECONDS)
        self._tasks.run(self._open(sock), f"status page for {peer}")

    async def _open(self, sock: Listening) -> None:
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=_HEAD_BYTES_MAX), self._serve)

        try:
            sock.setblocking(False)
            seconds = None if self._tls is None else _REQUEST_SECONDS
            await loop.connect_accepted_socket(protocol, sock, ssl=self._tls, ssl_handshake_timeout=seconds)
        except OSError:
            sock.close()  # the peer's handshake failed, or it has closed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS) as patience:
                await self._serve_request(task, reader, writer, patience)
        except (OSError, EOFError, asyncio.CancelledError):
            # A slow or closed client, or shutdown: not logged. Not re-raised, because asyncio streams would report a
            # cancelled handler as an error.
            writer.transport.abort()
        finally:
            self._handlers.discard(task)
            self._waiting.pop(task, None)
            writer.close()

    async def _serve_request(
        self,
        task: asyncio.Task[None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: asyncio.Timeout,
    ) -> None:
        now = asyncio.get_running_loop().time
        self._wait_for_client(task)
        method = "GET"
        try:
            request = (await _read(reader))._replace(peer=str(Address.of_socket(writer.get_extra_info("peername"))))
            method = request.method
            self._waiting.pop(task, None)
            patience.reschedule(now() + ANSWER_SECONDS)
            response = await self._respond(request)
        except Refused as e:
            response = Response(TEXT, f"{e}\n".encode(), e.status)
        except (EOFError, ConnectionError):
            raise
        except Exception as e:
            _log.crash("status page crashed", e)
            response = Response(TEXT, b"internal error: the log has the stack trace\n", 500)
        self._wait_for_client(task)
        patience.reschedule(now() + _REQUEST_SECONDS)  # for reading the response
        writer.write(_head(response) + (b"" if method == "HEAD" else response.body))
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            # Closing with unread bytes in the receive buffer would reset the connection and lose the response.
            with suppress(OSError):
                while await reader.read(_HEAD_BYTES_MAX):
                    pass

    def _wait_for_client(self, task: asyncio.Task[None]) -> None:
        if len(self._waiting) >= _WAITING_MAX:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.cancel()
        self._waiting[task] = None


async def _read(reader: asyncio.StreamReader) -> Request:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise Refused(431, f"request head is longer than {_HEAD_BYTES_MAX} bytes") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise Refused(400, "this port serves HTTP/1.1; Kafka clients use another port")
    path, _, query = parts[1].partition("?")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers.setdefault(name.strip().lower(), value.strip())
    return Request(parts[0], path, query, headers)


def _head(response: Response) -> bytes:
    status = response.status
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Date: {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        *_HEADERS,
        *([_OF_STATUS[status]] if status in _OF_STATUS else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode()
