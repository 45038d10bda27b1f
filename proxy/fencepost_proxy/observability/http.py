"""HTTP status server: HTML pages, the same as JSON, `/metrics` (Prometheus), `/livez`, `/readyz` (orchestrators).

Off unless an address is configured. It shows topic names and addresses, so use a loopback or private address. It serves
GET and HEAD, and one POST with a token (`status_token_file`) by which an operator stops gating a group's partitions.
One request per connection, bounded in size, time and number. At the connection limit, the connection that has been
silent longest is dropped. `/livez` is always served, and `/readyz` does not wait for other pages.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode

from fencepost_proxy import logs
from fencepost_proxy.config.secrets import secret
from fencepost_proxy.errors import ConfigError
from fencepost_proxy.metrics import Metrics, fencepost_version
from fencepost_proxy.observability import page
from fencepost_proxy.observability.diagnosis import diagnose
from fencepost_proxy.observability.status import (
    OFFSET_MAX,
    ROWS_MAX,
    ExpansionStatus,
    Listed,
    PageRequest,
    StatusSnapshot,
    What,
)
from fencepost_proxy.types import Address

_log = logs.get("observability.http")

_HEAD_BYTES_MAX: Final = 8_192
_REQUEST_SECONDS: Final = 5.0
#: For the server's own work: it queries other workers, and the imports of the first scrape are slow.
_ANSWER_SECONDS: Final = 60.0
#: Connections that wait for their client to send a request or read a response; above this the oldest is dropped.
_WAITING_MAX: Final = 64
#: Concurrent requests, for `/readyz` and for all other paths; above this the server responds 503.
_ANSWERING_MAX: Final = 32
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Length limit of JSON strings and of search terms.
_CHARACTERS_MAX: Final = 400
_FIELDS_MAX: Final = 16
#: In one response, unless a single expansion has more.
_THRESHOLDS_MAX: Final = 20_000
_LISTS: Final[Mapping[str, What]] = {
    "topics": "topics",
    "partitions": "partitions",
    "refusals": "refusals",
    "clients": "clients",
    "expansions": "expansions",
    "groups": "groups",
}
#: Lists on the overview page.
_FIRST: Final[tuple[What, ...]] = ("topics", "refusals", "software", "expansions", "groups")
_FIRST_SHOWN: Final = 20
_FIRST_IN_JSON: Final = 100
_JSON_NAMES: Final[Mapping[str, str]] = {"topics": "checked_topics", "groups": "gated", "refusals": "last_refusals"}
_PATHS: Final = "not found: paths are /, /status.json, /metrics, /livez and /readyz; " + ", ".join(
    f"/{name} and /{name}.json" for name in _LISTS
)
_GROUPS: Final = "/groups/"
_RELEASE: Final = "/release"


Release = Callable[[str, str], Awaitable[str]]
Lists = Callable[[Sequence[PageRequest]], Awaitable[Sequence[Listed]]]


def _header(head: bytes, requested: bytes) -> bytes:
    """Value of the first header named `requested` (lower case); empty without one."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == requested:
            return value.strip()
    return b""


def _host(head: bytes) -> str:
    """The Host header without its port; empty without one."""
    host = _header(head, b"host").decode("ascii", "replace")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_loopback_name(host: str) -> bool:
    """Prevents DNS rebinding: a web site whose name resolves to this machine must not read the page in a browser."""
    if not host or host.lower() == "localhost":
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Request(NamedTuple):
    """`token`: from `Authorization: Bearer`. `from_a_page`: a web page in a browser sent the request."""

    method: str
    path: str
    query: str
    token: bytes
    from_a_page: bool


@dataclass(frozen=True, slots=True)
class _Page:
    status: int
    content_type: str
    body: bytes


class StatusServer:
    """`snapshot`, `metrics`: called for each page, must not block. `refresh`: awaited before.

    `lists`: returns pages of lists.

    `release`: stops gating for (group, topic) and returns a result message.
    `token_file`: its first line authorizes `release`; None forbids it.
    """

    def __init__(
        self,
        snapshot: Callable[[], StatusSnapshot],
        metrics: Callable[[], Metrics],
        lists: Lists,
        *,
        refresh: Callable[[], Awaitable[None]] | None = None,
        release: Release | None = None,
        token_file: Path | None = None,
    ) -> None:
        self._lists = lists
        self._token_file = token_file
        self._loopback = False
        self._refresh = refresh
        self._release = release
        self._snapshot = snapshot
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], None] = {}  # longest wait first
        self._answering: dict[bool, set[asyncio.Task[None]]] = {True: set(), False: set()}  # `/readyz`, all others

    async def start(self, address: Address) -> Address:
        """Listen; return the bound address. Raises `OSError`."""
        self._server = await asyncio.start_server(self._serve, address.host, address.port, limit=_HEAD_BYTES_MAX)
        bound = Address(*self._server.sockets[0].getsockname()[:2])
        _log.info("status page started", url=f"http://{bound}/")
        self._loopback = ip_address(bound.host).is_loopback
        if not self._loopback:
            _log.warning(
                "status page is reachable from other machines: it shows topic and group names, addresses and client "
                "ids",
                address=bound,
            )
        return bound

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        handlers = list(self._handlers)
        for handler in handlers:
            handler.cancel()
        if handlers:
            await asyncio.wait(handlers)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS) as patience:
                await self._answer(task, reader, writer, patience)
        except (TimeoutError, OSError, asyncio.CancelledError):
            # A slow or closed client, or shutdown: not logged. Not re-raised, because asyncio streams would report a
            # cancelled handler as an error.
            writer.transport.abort()
        finally:
            self._handlers.discard(task)
            self._waiting.pop(task, None)
            writer.close()

    def _wait_for_client(self, task: asyncio.Task[None]) -> None:
        if len(self._waiting) >= _WAITING_MAX:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.cancel()
        self._waiting[task] = None

    async def _answer(
        self,
        task: asyncio.Task[None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        patience: asyncio.Timeout,
    ) -> None:
        now = asyncio.get_running_loop().time
        method = "GET"
        try:
            self._wait_for_client(task)
            request = await self._request(reader)
            self._waiting.pop(task, None)
            method = request.method
            patience.reschedule(now() + _ANSWER_SECONDS)
            if request.path == "/livez":
                answer = _Page(200, _TEXT, b"ok\n")
            else:
                answer = await self._made(task, request)
        except _Refused as e:
            answer = _Page(e.status, _TEXT, f"{e}\n".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except Exception as e:
            _log.crash("status page crashed", e)
            answer = _Page(500, _TEXT, b"internal error: the log has the stack trace\n")
        head = [
            f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}",
            f"Content-Type: {answer.content_type}",
            f"Content-Length: {len(answer.body)}",
            "Connection: close",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Referrer-Policy: no-referrer",
            "Cross-Origin-Resource-Policy: same-origin",
            f"Content-Security-Policy: {page.CONTENT_SECURITY_POLICY}",
        ]
        if answer.status == 405:
            head.append("Allow: GET, HEAD")
        if answer.status == 401:
            head.append("WWW-Authenticate: Bearer")
        self._wait_for_client(task)
        patience.reschedule(now() + _REQUEST_SECONDS)  # for reading the response
        writer.write("\r\n".join([*head, "", ""]).encode() + (b"" if method == "HEAD" else answer.body))
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            # Closing with unread bytes in the receive buffer would reset the connection and lose the response.
            with suppress(OSError):
                while await reader.read(_HEAD_BYTES_MAX):
                    pass

    async def _made(self, task: asyncio.Task[None], request: _Request) -> _Page:
        answering = self._answering[request.path == "/readyz"]
        if len(answering) >= _ANSWERING_MAX:
            raise _Refused(503, f"{_ANSWERING_MAX} requests are in progress; retry")
        answering.add(task)
        try:
            if request.path == "/metrics":
                # The first import takes about 50 ms; it must not block clients.
                await asyncio.to_thread(import_module, "fencepost_proxy.observability.exposition")
            if self._refresh is not None:
                await self._refresh()
            return await (
                self._posted(request) if request.method == "POST" else self._page(request.path, request.query)
            )
        finally:
            answering.discard(task)

    async def _request(self, reader: asyncio.StreamReader) -> _Request:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _Refused(431, f"request head is longer than {_HEAD_BYTES_MAX} bytes") from None
        parts = head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise _Refused(400, "this port serves HTTP/1.1; Kafka clients use another port")
        method, target, _ = parts
        path, _, query = target.partition("?")
        if method not in ("GET", "HEAD") and not (method == "POST" and path.startswith(_GROUPS)):
            raise _Refused(405, f"allowed: GET and HEAD, and POST {_GROUPS}GROUP{_RELEASE}?topic=TOPIC")
        if self._loopback and path != "/livez" and not _is_loopback_name(_host(head)):
            raise _Refused(421, "wrong Host header: use an IP address or localhost")
        kind, _, token = _header(head, b"authorization").partition(b" ")
        token = token.strip() if kind.lower() == b"bearer" else b""
        return _Request(method, path, query, token, b"\r\norigin:" in head.lower())

    async def _posted(self, request: _Request) -> _Page:
        """An operator's action. Requests from web pages are refused, because browsers let other sites post here."""
        group, slash, what = request.path.removeprefix(_GROUPS).rpartition("/")
        topics = parse_qs(request.query).get("topic", [])
        if self._release is None or slash + what != _RELEASE or not group or len(topics) != 1:
            raise _Refused(404, f"not found: use POST {_GROUPS}GROUP{_RELEASE}?topic=TOPIC")
        if request.from_a_page:
            raise _Refused(403, "requests from web pages are not allowed")
        self._authorize(request.token)
        return _Page(200, _TEXT, f"{await self._release(unquote(group), topics[0])}\n".encode())

    def _authorize(self, token: bytes) -> None:
        if self._token_file is None:
            raise _Refused(403, "actions are disabled: set status_token_file in the proxy's configuration")
        try:
            expected = secret("status_token_file", self._token_file)
        except ConfigError as error:
            _log.warning("action refused", reason=error)
            raise _Refused(403, "actions are disabled: the file in status_token_file is not usable") from None
        if not hmac.compare_digest(token, expected.encode()):
            raise _Refused(
                401, "token required: send the first line of status_token_file as Authorization: Bearer TOKEN"
            )

    async def _page(self, path: str, query: str) -> _Page:
        if path == "/metrics":
            from fencepost_proxy.observability.exposition import exposition  # noqa: PLC0415 - imported on the first scrape

            return _Page(200, _PROMETHEUS, exposition(self._metrics()))
        if path == "/readyz":
            snapshot = self._snapshot()
            text = "ready" if snapshot.ready else "\n".join(("not ready", *snapshot.not_ready))
            return _Page(200 if snapshot.ready else 503, _TEXT, f"{text}\n".encode())
        if path in ("/", "/status.json"):
            observed = await self._overview(_FIRST_SHOWN if path == "/" else _FIRST_IN_JSON)
            if path == "/":
                return _html(page.overview(observed, time.time()), query, observed.snapshot.version)
            return _Page(200, _JSON, _json(_as_json(observed)))
        name, dot, kind = path.removeprefix("/").partition(".")
        if name not in _LISTS or (dot and kind != "json"):
            raise _Refused(404, _PATHS)
        requested = _requested(_LISTS[name], query)
        (listed,) = await self._lists((requested,))
        if dot:
            return _Page(200, _JSON, _json(_list_as_json(path, requested, listed)))
        return _html(page.list_page(requested, listed, time.time()), query, fencepost_version())

    async def _overview(self, rows: int) -> page.Overview:
        requested = [PageRequest(what, limit=rows) for what in _FIRST]
        lists = dict(zip(_FIRST, await self._lists(requested), strict=True))
        snapshot = self._snapshot()
        problems = diagnose(snapshot, lists["expansions"].rows, lists["groups"].rows, time.time())
        return page.Overview(snapshot, problems, lists)


def _html(shown: page.Page, query: str, version: str) -> _Page:
    """The complete page, or only its sections for the script."""
    if "live" in _queried(query):
        return _Page(200, _JSON, json.dumps({"title": shown.title, "sections": shown.sections}).encode())
    return _Page(200, "text/html; charset=utf-8", page.html(shown, version).encode())


def _queried(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise _Refused(400, f"query has more than {_FIELDS_MAX} fields") from None


def _requested(what: What, query: str) -> PageRequest:
    queried = _queried(query)
    return PageRequest(
        what,
        search=queried.get("search", "").strip()[:_CHARACTERS_MAX],
        topic=queried.get("topic"),
        offset=_number(queried, "offset", 0, 0, OFFSET_MAX),
        limit=_number(queried, "limit", 50, 1, ROWS_MAX),
    )


def _number(queried: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = queried.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise _Refused(400, f"{name} must be a number from {least} to {most}")
    return int(text)


def _as_json(observed: page.Overview) -> dict[str, object]:
    snapshot = observed.snapshot
    lists = {_JSON_NAMES.get(what, what): listed for what, listed in observed.lists.items()}
    return {
        "ready": snapshot.ready,
        "state": page.state_of(snapshot, observed.problems),
        **{each.name: getattr(snapshot, each.name) for each in fields(snapshot)},
        "problems": observed.problems,
        "totals": {name: listed.matching for name, listed in lists.items()},
        **{
            name: _with_thresholds(listed.rows) if name == "expansions" else listed.rows
            for name, listed in lists.items()
        },
    }


def _list_as_json(path: str, requested: PageRequest, listed: Listed) -> dict[str, object]:
    rows: Sequence[object] = listed.rows
    if requested.what == "expansions":
        rows = _with_thresholds(listed.rows)
    after = requested.offset + len(rows)
    queried = {"topic": requested.topic, "search": requested.search or None, "offset": after, "limit": requested.limit}
    given = urlencode({name: value for name, value in queried.items() if value is not None})
    more = bool(rows) and after < listed.matching and after <= OFFSET_MAX
    return {
        "matching": listed.matching,
        "offset": requested.offset,
        "rows": rows,
        "next": f"{path}?{given}" if more else None,
    }


def _with_thresholds(rows: Sequence[ExpansionStatus]) -> Sequence[ExpansionStatus]:
    """Rows that fit into `_THRESHOLDS_MAX`; the next page has the rest. A topic has one threshold per old partition."""
    count = 0
    for index, each in enumerate(rows):
        count += len(each.thresholds)
        if count > _THRESHOLDS_MAX and index:
            return rows[:index]
    return rows


def _json(value: object) -> bytes:
    return json.dumps(_json_value(value), separators=(",", ":")).encode()


def _json_value(value: object) -> object:
    """Convert to JSON types. Long strings are clipped, which bounds the response."""
    if is_dataclass(value):
        return {each.name: _json_value(getattr(value, each.name)) for each in fields(value)}
    match value:
        case Address():
            return str(value)
        case str() if len(value) > _CHARACTERS_MAX:
            return f"{value[:_CHARACTERS_MAX]}…"
        case tuple() | list():
            return [_json_value(each) for each in value]
        case Mapping():
            return {name: _json_value(each) for name, each in value.items()}
    return value
