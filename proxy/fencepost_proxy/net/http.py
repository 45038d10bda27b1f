"""Status over HTTP: `/` for people, `/status.json`, `/metrics` (Prometheus), `/livez` and `/readyz` (orchestrators).

Off unless an address is given. It shows topic names and addresses, so give it a loopback or private one. GET and HEAD,
and one POST by which an operator lets a group have a topic's new partitions; one request per connection, bounded in
size, time and number: this is no place for a web framework, nor for a client that wants to stay.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from html import escape
from typing import Final
from urllib.parse import parse_qs, unquote

from fencepost_compiled import what_runs
from fencepost_proxy import logs
from fencepost_proxy.net.metrics import CONTENT_TYPE, Metrics, load_exposition
from fencepost_proxy.types import Address, NodeId

_log = logs.get("net.http")

_HEAD_BYTES_MAX: Final = 8_192
_REQUEST_SECONDS: Final = 5.0
_CONNECTIONS_MAX: Final = 32
_REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_THRESHOLDS_SHOWN: Final = 16
_TEXT: Final = "text/plain; charset=utf-8"
_GROUPS: Final = "/groups/"
_RELEASE: Final = "/release"


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """`listener` is where clients reach this broker through the proxy, None while there is no listener."""

    node_id: NodeId
    kafka: Address
    listener: Address | None
    connections: int = 0


@dataclass(frozen=True, slots=True)
class GuardedTopicStatus:
    """`check` is the value of `check.expected.offsets`; `waiting` counts appends at its gates."""

    topic: str
    check: str
    partitions: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class ExpansionStatus:
    """One growth of a counted topic. `state` – pending, done or unordered (around the proxy).

    `at_ms` – when it began if pending, else when it ended. `step`, `waits_for` – None where another process drives it.
    """

    topic: str
    from_count: int
    to_count: int
    state: str
    at_ms: int
    step: str | None = None
    waits_for: str | None = None
    held_ms: int | None = None
    thresholds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WithheldStatus:
    """A group that waits for a new partition. `records_max` – at most so many are left for it to read before.

    `waits` – for which prior partitions, and how far it is there; `seconds` – since when, as far as this process knows.
    """

    group: str
    topic: str
    partition: int
    why: str
    records_max: int
    waits: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class StatusSnapshot:
    """What the proxy is doing at this moment.

    `not_ready` – why clients should not be sent here yet, or any more; ready when empty.
    `warnings` – what an operator should look at although the proxy serves.
    `added_seconds` – below what the time added to requests and answers lies: (half of them, 99 of 100), None before the
    first.
    `state_lease_seconds` – how long the view of the virtual configs may still be acted on, None where unknown.
    `build` – whether the hot rooms are compiled.
    """

    version: str
    uptime_seconds: float
    cluster_id: str | None
    bootstrap: Address | None
    not_ready: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    connections: int = 0
    requests_in_flight: int = 0
    buffered_bytes: int = 0
    bytes_to_kafka: int = 0
    bytes_to_clients: int = 0
    violations: int = 0
    added_seconds: tuple[float, float] | None = None
    state_lease_seconds: float | None = None
    refusals: Mapping[str, int] = field(default_factory=dict)
    brokers: tuple[BrokerStatus, ...] = ()
    guarded_topics: tuple[GuardedTopicStatus, ...] = ()
    expansions: tuple[ExpansionStatus, ...] = ()
    withheld: tuple[WithheldStatus, ...] = ()
    build: str = field(default_factory=what_runs)

    @property
    def ready(self) -> bool:
        return not self.not_ready


Release = Callable[[str, str], Awaitable[str]]


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class _Page:
    status: int
    content_type: str
    body: bytes


class StatusServer:
    """`snapshot` is called for each page; it must not block. `refresh` is awaited before.

    `release` – lets a group have a topic's new partitions (group, topic); gives back what came of it.
    """

    def __init__(
        self,
        snapshot: Callable[[], StatusSnapshot],
        metrics: Metrics,
        refresh: Callable[[], Awaitable[None]] | None = None,
        release: Release | None = None,
    ) -> None:
        self._refresh = refresh
        self._release = release
        self._snapshot = snapshot
        self._metrics = metrics
        self._server: asyncio.Server | None = None
        self._handlers: set[asyncio.Task[None]] = set()

    async def start(self, address: Address) -> Address:
        """Listens; returns the address with the port that was taken. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, address.host, address.port, limit=_HEAD_BYTES_MAX)
        bound = Address(*self._server.sockets[0].getsockname()[:2])
        _log.info("status page", url=f"http://{bound}/")
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
        if len(self._handlers) >= _CONNECTIONS_MAX:
            writer.transport.abort()
            return
        self._handlers.add(task)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.CancelledError):
            # A client that is too slow or gone, or the process ends: none of it is worth a line. Not re-raised: the
            # streams would report a cancelled handler as an error.
            writer.transport.abort()
        finally:
            self._handlers.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        method = "GET"
        try:
            method, path, query, from_a_page = await self._request(reader)
            if path == "/metrics":
                # The first time it takes as long as a start does: clients must not wait for it.
                await asyncio.to_thread(load_exposition)
            if self._refresh is not None and path != "/livez":
                await self._refresh()
            page = await self._posted(path, query, from_a_page) if method == "POST" else self._page(path)
        except _Refused as e:
            page = _Page(e.status, _TEXT, f"{e}\n".encode())
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except Exception as e:
            _log.crash("status page crashed", e)
            page = _Page(500, _TEXT, b"this page crashed; the log says why\n")
        head = [
            f"HTTP/1.1 {page.status} {_REASONS[page.status]}",
            f"Content-Type: {page.content_type}",
            f"Content-Length: {len(page.body)}",
            "Connection: close",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
        ]
        if page.status == 405:
            head.append("Allow: GET, HEAD")
        writer.write("\r\n".join([*head, "", ""]).encode() + (b"" if method == "HEAD" else page.body))
        await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
            # Closing with unread bytes of the client in our buffer would reset the connection, and the answer with it.
            with suppress(OSError):
                while await reader.read(_HEAD_BYTES_MAX):
                    pass

    async def _request(self, reader: asyncio.StreamReader) -> tuple[str, str, str, bool]:
        """Method, path, query, and whether a page in somebody's browser has sent it."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise _Refused(431, f"the request's head is longer than {_HEAD_BYTES_MAX} bytes") from None
        parts = head.split(b"\r\n", 1)[0].decode("ascii", "replace").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            raise _Refused(400, "this is an HTTP/1.1 server; Kafka is at another port")
        method, target, _ = parts
        path, _, query = target.partition("?")
        if method not in ("GET", "HEAD") and not (method == "POST" and path.startswith(_GROUPS)):
            raise _Refused(405, f"only GET and HEAD, and POST {_GROUPS}GROUP{_RELEASE}?topic=TOPIC")
        return method, path, query, b"\r\norigin:" in head.lower()

    async def _posted(self, path: str, query: str, from_a_page: bool) -> _Page:
        """What an operator wants done. Not for pages of other sites, which a browser lets post to this address, too."""
        group, slash, what = path.removeprefix(_GROUPS).rpartition("/")
        topics = parse_qs(query).get("topic", [])
        if self._release is None or slash + what != _RELEASE or not group or len(topics) != 1:
            raise _Refused(404, f"there is POST {_GROUPS}GROUP{_RELEASE}?topic=TOPIC")
        if from_a_page:
            raise _Refused(403, "not from a web page")
        return _Page(200, _TEXT, f"{await self._release(unquote(group), topics[0])}\n".encode())

    def _page(self, path: str) -> _Page:
        if path == "/livez":
            return _Page(200, _TEXT, b"ok\n")
        if path == "/metrics":
            return _Page(200, CONTENT_TYPE, self._metrics.exposition())
        snapshot = self._snapshot()
        match path:
            case "/readyz":
                text = "ready" if snapshot.ready else "\n".join(("not ready", *snapshot.not_ready))
                return _Page(200 if snapshot.ready else 503, _TEXT, f"{text}\n".encode())
            case "/status.json":
                return _Page(200, "application/json", _as_json(snapshot))
            case "/":
                return _Page(200, "text/html; charset=utf-8", _as_html(snapshot).encode())
        raise _Refused(404, "there are /, /status.json, /metrics, /livez and /readyz")


def _as_json(snapshot: StatusSnapshot) -> bytes:
    return json.dumps({"ready": snapshot.ready, **_plain_fields(snapshot)}, indent=2).encode()


def _plain_fields(
    value: StatusSnapshot | BrokerStatus | GuardedTopicStatus | ExpansionStatus | WithheldStatus,
) -> dict[str, object]:
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}


def _plain(value: object) -> object:
    match value:
        case Address():
            return str(value)
        case BrokerStatus() | GuardedTopicStatus() | ExpansionStatus() | WithheldStatus():
            return _plain_fields(value)
        case tuple():
            return [_plain(each) for each in value]
        case Mapping():
            return dict(value)
    return value


# --- the page -------------------------------------------------------------------------------------------------------

_STYLE: Final = """
:root { color-scheme: light dark; --bg: #f7f7f5; --card: #fff; --ink: #1d2126; --soft: #667078; --line: #e3e4e0;
  --good: #1a7f4b; --bad: #b3261e; --warn: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --ink: #e6e8ea; --soft: #98a2aa;
  --line: #2c3238; --good: #4cc38a; --bad: #ff8a80; --warn: #e3b341; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, sans-serif }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem }
header { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: baseline; margin-bottom: 1.5rem }
h1 { font-size: 1.5rem; margin: 0; letter-spacing: -.01em }
h2 { font-size: .8rem; text-transform: uppercase; letter-spacing: .06em; color: var(--soft); margin: 2rem 0 .5rem }
.state { font-weight: 600 } .good { color: var(--good) } .bad { color: var(--bad) } .warn { color: var(--warn) }
.soft { color: var(--soft) }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .75rem }
.tile, .box { background: var(--card); border: 1px solid var(--line); border-radius: .6rem }
.tile { padding: .75rem 1rem } .tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums }
.tile span { color: var(--soft); font-size: .85rem }
.box { overflow-x: auto } ul.box { margin: 0; padding: .75rem 1rem .75rem 2rem }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .5rem 1rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 500; font-size: .85rem } tr:last-child td { border-bottom: 0 }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
code { font: .9em ui-monospace, monospace } footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem }
a { color: inherit }
"""


def _as_html(s: StatusSnapshot) -> str:
    state = '<span class="state good">ready</span>' if s.ready else '<span class="state bad">not ready</span>'
    bootstrap = f"<code>{escape(str(s.bootstrap))}</code>" if s.bootstrap else "not listening"
    lease = "–" if s.state_lease_seconds is None else f"{max(0.0, s.state_lease_seconds):.1f} s"
    tiles = [
        ("connections", f"{s.connections:,}"),
        ("requests in flight", f"{s.requests_in_flight:,}"),
        ("to Kafka", _bytes(s.bytes_to_kafka)),
        ("to clients", _bytes(s.bytes_to_clients)),
        ("held in memory", _bytes(s.buffered_bytes)),
        ("refusals", f"{sum(s.refusals.values()):,}"),
        ("violations", f"{s.violations:,}"),
        ("time added (median, p99)", _added(s.added_seconds)),
        ("config lease left", lease),
    ]
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Fencepost</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="5">',
        f"<style>{_STYLE}</style></head><body><main><header><h1>Fencepost</h1>{state}",
        f'<span class="soft">{bootstrap} · cluster <code>{escape(s.cluster_id or "unknown")}</code> · '
        f"up {_duration(s.uptime_seconds)}</span></header>",
        _list("Why it is not ready", s.not_ready, "bad"),
        _list("Look at this", s.warnings, "warn"),
        '<div class="tiles">',
        *(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles),
        "</div>",
        _table(
            "Brokers",
            ("id", "clients connect to", "Kafka", "connections"),
            [(b.node_id, b.listener or "no listener", b.kafka, b.connections) for b in s.brokers],
        ),
        _table(
            "Guarded topics",
            ("topic", "check.expected.offsets", "partitions", "waiting"),
            [(t.topic, t.check, t.partitions, t.waiting) for t in s.guarded_topics],
        ),
        _table(
            "Topics that grow, or have grown",
            ("topic", "partitions", "state", "since", "appends held", "thresholds"),
            [_expansion_row(each) for each in s.expansions],
        ),
        _table(
            "Groups that wait for a new partition",
            ("group", "partition", "records left, at most", "for", "why"),
            [
                (w.group, f"{w.topic}-{w.partition}", w.records_max, _duration(w.seconds), "; ".join(w.waits) or w.why)
                for w in s.withheld
            ],
        ),
        _table("Refusals", ("reason", "batches"), sorted(s.refusals.items())),
        f'<footer>fencepost {escape(s.version)}, {escape(s.build)} · <a href="/status.json">status.json</a> · '
        '<a href="/metrics">metrics</a> · this page reloads every 5 s</footer></main></body></html>',
    ]
    return "\n".join(part for part in parts if part)


def _expansion_row(e: ExpansionStatus) -> tuple[object, ...]:
    state = e.state if e.step is None else f"{e.state}: {e.step}" + (f" ({e.waits_for})" if e.waits_for else "")
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(e.at_ms / 1000))
    held = "–" if e.held_ms is None else f"{e.held_ms / 1000:.1f} s"
    shown = [str(each) for each in e.thresholds[:_THRESHOLDS_SHOWN]]
    if len(e.thresholds) > _THRESHOLDS_SHOWN:
        shown.append("…")
    return e.topic, f"{e.from_count} → {e.to_count}", state, since, held, ", ".join(shown) or "–"


def _list(title: str, items: tuple[str, ...], tone: str) -> str:
    if not items:
        return ""
    return f'<h2>{title}</h2><ul class="box {tone}">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> str:
    if not rows:
        return ""

    def cell(tag: str, value: object, number: bool) -> str:
        return f"<{tag}{' class=number' if number else ''}>{escape(str(value))}</{tag}>"

    numbers = [index > 0 and isinstance(value, int) for index, value in enumerate(rows[0])]
    head = "".join(cell("th", name, number) for name, number in zip(columns, numbers, strict=True))
    body = "".join(
        "<tr>" + "".join(cell("td", value, number) for value, number in zip(row, numbers, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<h2>{title}</h2><div class="box"><table><tr>{head}</tr>{body}</table></div>'


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _added(bounds: tuple[float, float] | None) -> str:
    """They are bounds of a histogram: below them it was."""
    if bounds is None:
        return "–"
    return " · ".join(f"&lt; {each * 1e6:.0f} µs" if each < 0.001 else f"&lt; {each * 1e3:g} ms" for each in bounds)


def _duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
