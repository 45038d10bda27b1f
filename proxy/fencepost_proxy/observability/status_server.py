"""The status page: a static page, the JSON that it shows, `/metrics` (Prometheus), `/livez`, `/readyz` (orchestrators).

Off unless an address is configured. It shows topic names and addresses, so use a loopback or private address. It serves
GET and HEAD, and one POST with a token (`status_token_file`) by which an operator stops gating a group's partitions.
With `status_read_token_file`, all but `/livez` and `/readyz` needs that token, or the other one.
`/livez` is always served, and `/readyz` does not wait for other requests.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, parse_qsl, unquote, urlencode

from fencepost_proxy import logs
from fencepost_proxy.cluster.tasks import Tasks
from fencepost_proxy.config.secrets import secret
from fencepost_proxy.errors import ConfigError, Reason
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability import audit
from fencepost_proxy.observability.diagnosis import diagnose, state_of
from fencepost_proxy.observability.exposition import exposition
from fencepost_proxy.observability.http import ANSWER_SECONDS, TEXT, HttpServer, Refused, Request, Response
from fencepost_proxy.observability.status import (
    OFFSET_MAX,
    ROWS_MAX,
    ExpansionStatus,
    Listed,
    PageRequest,
    Problem,
    StatusSnapshot,
    What,
)
from fencepost_proxy.transactions.watched import WHY
from fencepost_proxy.transport.loop_share import Share
from fencepost_proxy.types import Address

_log = logs.get("observability.status_server")

#: Concurrent requests, for `/readyz` and for all other paths; above this the server responds 503.
_ANSWERING_MAX: Final = 32
#: Share of the event loop for making responses.
_SHARE: Final = 0.05
_CREDIT_SECONDS: Final = 0.1
_JSON: Final = "application/json"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Length limit of JSON strings and of search terms.
_CHARACTERS_MAX: Final = 400
_PROBLEM_CHARACTERS_MAX: Final = 600
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
#: Lists in `/status.json`, with their names there.
_FIRST: Final[Mapping[What, str]] = {
    "topics": "checked_topics",
    "refusals": "last_refusals",
    "software": "software",
    "expansions": "expansions",
    "groups": "gated",
}
_FIRST_ROWS_MAX: Final = 100
_PAGE: Final = "page.html"
#: One page for the overview and for every list: its script shows what the path names.
_FILES: Final = {"/page.js": "page.js", "/page.css": "page.css"} | dict.fromkeys(
    ("/", "/transactions", *(f"/{name}" for name in _LISTS)), _PAGE
)
_CONTENT_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_PATHS: Final = "not found: paths are /, /status.json, /metrics, /livez and /readyz; " + ", ".join(
    f"/{name} and /{name}.json" for name in _LISTS
)
_GROUPS: Final = "/groups/"
_RELEASE: Final = "/release"

Release = Callable[[str, str], Awaitable[str]]
Lists = Callable[[Sequence[PageRequest]], Awaitable[Sequence[Listed]]]


class StatusServer:
    """`snapshot`, `metrics`, `not_ready` (for `/readyz`): called for each response, must not block.

    `lists`: returns pages of lists.

    `release`: stops gating for (group, topic) and returns a result message.
    `token_file`: its first line authorizes `release`; None forbids it.
    `read_token_file`: its first line authorizes to read; None: no login.
    `tls`: returns an `ssl.SSLContext`, or None for plain HTTP; called once.
    """

    def __init__(
        self,
        snapshot: Callable[[], StatusSnapshot],
        metrics: Callable[[], Metrics],
        lists: Lists,
        *,
        not_ready: Callable[[], Sequence[Reason]],
        release: Release | None = None,
        token_file: Path | None = None,
        read_token_file: Path | None = None,
        tls: Callable[[], Any] = lambda: None,
    ) -> None:
        self._snapshot = snapshot
        self._metrics = metrics
        self._lists = lists
        self._not_ready = not_ready
        self._release = release
        self._token_file = token_file
        self._read_token_file = read_token_file
        self._tls = tls
        self._loopback = False
        self._server = HttpServer(self._respond)
        self._answering = {True: 0, False: 0}  # `/readyz`, all others
        self._tasks = Tasks()
        self._share = Share(_SHARE, _CREDIT_SECONDS)
        #: Responses that wait for their share of the event loop, by path and query.
        self._next: dict[tuple[str, str], asyncio.Task[Response]] = {}

    async def start(self, address: Address) -> Address:
        """Listen; return the bound address. Raises `OSError`."""
        tls = self._tls()
        bound = await self._server.start(address, tls)
        _log.info("status page started", url=f"{'http' if tls is None else 'https'}://{bound}/")
        self._loopback = ip_address(bound.host).is_loopback
        if not self._loopback and self._read_token_file is None:
            _log.warning(
                "status page is reachable from other machines: it shows topic and group names, addresses and client "
                "ids",
                address=bound,
            )
        return bound

    async def close(self) -> None:
        await self._server.close()
        await self._tasks.close()

    async def _respond(self, request: Request) -> Response:
        posts = request.method == "POST" and request.path.startswith(_GROUPS)
        if request.method not in ("GET", "HEAD") and not posts:
            raise Refused(405, f"allowed: GET and HEAD, and POST {_GROUPS}GROUP{_RELEASE}?topic=TOPIC")
        if request.path == "/livez":
            return Response(TEXT, b"ok\n")
        if self._loopback and not _is_loopback_name(request.headers.get("host", "")):
            raise Refused(421, "wrong Host header: use an IP address or localhost")
        if not posts and request.path != "/readyz":
            self._authorize_reading(request)
        if request.path in _FILES:
            return _file(_FILES[request.path])
        of_readiness = request.path == "/readyz"
        if self._answering[of_readiness] >= _ANSWERING_MAX:
            raise Refused(503, f"{_ANSWERING_MAX} requests are in progress; retry")
        self._answering[of_readiness] += 1
        try:
            return await (self._posted(request) if posts else self._shown(request))
        finally:
            self._answering[of_readiness] -= 1

    async def _posted(self, request: Request) -> Response:
        """An operator's action. Requests from web pages are refused, because browsers let other sites post here."""
        group, slash, what = request.path.removeprefix(_GROUPS).rpartition("/")
        topics = parse_qs(request.query).get("topic", [])
        if self._release is None or slash + what != _RELEASE or not group or len(topics) != 1:
            raise Refused(404, f"not found: use POST {_GROUPS}GROUP{_RELEASE}?topic=TOPIC")
        try:
            if "origin" in request.headers:
                raise Refused(403, "requests from web pages are not allowed")
            self._authorize(request)
        except Refused as refused:
            audit.action_refused(request.peer, request.path, refused)
            raise
        result = await self._release(unquote(group), topics[0])
        audit.group_released(request.peer, unquote(group), topics[0], result)
        return Response(TEXT, f"{result}\n".encode())

    def _authorize(self, request: Request) -> None:
        if self._token_file is None:
            raise Refused(403, "actions are disabled: set status_token_file in the proxy's configuration")
        # Not by password: browsers send it for other sites too.
        if not _has_token(request, "status_token_file", self._token_file, "bearer"):
            raise Refused(
                401, "token required: send the first line of status_token_file as Authorization: Bearer TOKEN"
            )

    def _authorize_reading(self, request: Request) -> None:
        files = {"status_read_token_file": self._read_token_file, "status_token_file": self._token_file}
        if self._read_token_file is not None and not any(
            _has_token(request, key, file, "bearer", "basic") for key, file in files.items() if file is not None
        ):
            raise Refused(401, "token required: the first line of status_read_token_file, as bearer token or password")

    async def _shown(self, request: Request) -> Response:
        if request.path == "/readyz":
            reasons = self._not_ready()
            text = "\n".join(("not ready", *map(str, reasons))) if reasons else "ready"
            return Response(TEXT, f"{text}\n".encode(), 503 if reasons else 200)
        key = request.path, request.query
        if key not in self._next:
            self._next[key] = self._tasks.run(self._computed(*key), f"status page {request.path}")
        return await asyncio.shield(self._next[key])

    async def _computed(self, path: str, query: str) -> Response:
        """For all requests that came before it begins, so that their number costs the clients of Kafka nothing."""
        try:
            await self._share.free()
        finally:
            del self._next[path, query]
        began = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._compute(path, query)
        finally:
            self._share.charge(time.monotonic() - began)

    async def _compute(self, path: str, query: str) -> Response:
        if path == "/metrics":
            return Response(_PROMETHEUS, exposition(self._metrics()))
        if path == "/status.json":
            limit = _number(_queried(query), "limit", _FIRST_ROWS_MAX, 1, _FIRST_ROWS_MAX)
            lists = await self._lists([PageRequest(what, limit=limit) for what in _FIRST])
            return _json(status_json(self._snapshot(), dict(zip(_FIRST, lists, strict=True)), time.time()))
        name = path.removeprefix("/").removesuffix(".json")
        if name not in _LISTS:
            raise Refused(404, _PATHS)
        requested = _requested(_LISTS[name], query)
        (listed,) = await self._lists((requested,))
        return _json(list_json(path, requested, listed))


def _has_token(request: Request, key: str, file: Path, *kinds: str) -> bool:
    """Whether the request has the token in that file. `kinds`: bearer, basic (the password of any user)."""
    try:
        expected = secret(key, file)
    except ConfigError as error:
        _log.warning("token file is not usable", reason=error)
        raise Refused(403, f"requests are not allowed: the file in {key} is not usable") from None
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    token = given.strip().encode("latin-1")
    if kind.lower() not in kinds:
        return False
    if kind.lower() == "basic":
        try:
            token = base64.b64decode(token, validate=True).partition(b":")[2]
        except ValueError:
            return False
    return hmac.compare_digest(token, expected.encode())


def _is_loopback_name(header: str) -> bool:
    """Prevents DNS rebinding: a web site whose name resolves to this machine must not read the page in a browser."""
    host = header[1:].partition("]")[0] if header.startswith("[") else header.partition(":")[0]
    if not host or host.lower() == "localhost":
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _file(name: str) -> Response:
    content_type = _CONTENT_TYPES[name.rpartition(".")[2]]
    return Response(f"{content_type}; charset=utf-8", Path(__file__).with_name(name).read_bytes())


def _queried(query: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise Refused(400, f"query has more than {_FIELDS_MAX} fields") from None


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
        raise Refused(400, f"{name} must be a number from {least} to {most}")
    return int(text)


def status_json(snapshot: StatusSnapshot, lists: Mapping[What, Listed], now: float) -> dict[str, object]:
    """`now`: wall clock, seconds."""
    problems = diagnose(snapshot, lists["expansions"].rows, lists["groups"].rows, now, lists["refusals"].rows)
    return {
        "ready": snapshot.ready,
        "state": state_of(snapshot, problems),
        **{each.name: getattr(snapshot, each.name) for each in fields(snapshot)},
        "problems": problems,
        "hanging_reasons": WHY,
        "totals": {name: lists[what].matching for what, name in _FIRST.items()},
        **{name: _rows(what, lists[what]) for what, name in _FIRST.items()},
    }


def list_json(path: str, requested: PageRequest, listed: Listed) -> dict[str, object]:
    rows = _rows(requested.what, listed)
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


def _rows(what: What, listed: Listed) -> Sequence[object]:
    return _with_thresholds(listed.rows) if what == "expansions" else listed.rows


def _with_thresholds(rows: Sequence[ExpansionStatus]) -> Sequence[ExpansionStatus]:
    """Rows that fit into `_THRESHOLDS_MAX`; the next page has the rest. A topic has one threshold per old partition."""
    count = 0
    for index, each in enumerate(rows):
        count += len(each.thresholds)
        if count > _THRESHOLDS_MAX and index:
            return rows[:index]
    return rows


def _json(value: object) -> Response:
    return Response(_JSON, json.dumps(json_value(value), separators=(",", ":"), allow_nan=False).encode())


def json_value(value: object, characters_max: int = _CHARACTERS_MAX) -> object:
    """Convert to JSON types; a reason is its text. Long strings are clipped, which bounds the response."""
    if isinstance(value, Reason | Address):
        value = str(value)
    if is_dataclass(value):
        most = _PROBLEM_CHARACTERS_MAX if isinstance(value, Problem) else characters_max
        return {each.name: json_value(getattr(value, each.name), most) for each in fields(value)}
    match value:
        case str() if len(value) > characters_max:
            return f"{value[:characters_max]}…"
        case float() if not math.isfinite(value):
            return None
        case tuple() | list():
            return [json_value(each, characters_max) for each in value]
        case Mapping():
            return {name: json_value(each, characters_max) for name, each in value.items()}
    return value
