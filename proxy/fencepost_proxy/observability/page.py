"""HTML of the status page. Pure functions; `_text` escapes every value.

A page is a list of sections with ids. The first response is a complete page and needs no script. The script fetches
the sections again as JSON and replaces those that changed. Style and script are inline, so a saved page looks the same;
the Content-Security-Policy names them by hash.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, urlencode

from fencepost_proxy.observability.status import (
    CheckedTopicStatus,
    ClientStatus,
    ExpansionStatus,
    GatedStatus,
    Listed,
    PageRequest,
    PartitionStatus,
    Problem,
    RefusalStatus,
    SoftwareStatus,
    StatusSnapshot,
    What,
)
from fencepost_proxy.transactions.watched import WHY, TransactionsReport

#: Refresh interval of a page.
REFRESH_SECONDS: Final = 5
_CHARACTERS_MAX: Final = 200
_PROBLEM_CHARACTERS_MAX: Final = 600
_THRESHOLDS_SHOWN: Final = 8
_WAITS_SHOWN: Final = 3
#: Cells longer than this wrap.
_PROSE_FROM: Final = 40
_DASH: Final = "–"

_STYLE: Final = Path(__file__).with_name("page.css").read_text("utf-8")

_SCRIPT: Final = Path(__file__).with_name("page.js").read_text("utf-8").replace("REFRESH_SECONDS", str(REFRESH_SECONDS))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(_STYLE)}",
        f"script-src {_hash(_SCRIPT)}",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)


# --- what is shown ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overview:
    """Content of the overview page. `lists`: the first rows of each list."""

    snapshot: StatusSnapshot
    problems: tuple[Problem, ...]
    lists: Mapping[What, Listed]


class Page(NamedTuple):
    """`path`: of this page. `sections`: HTML by id. `search`: content of its form, None without a form."""

    path: str
    title: str
    sections: Mapping[str, str]
    search: str | None = None
    hidden: tuple[tuple[str, str], ...] = ()


_PAGES: Final = (
    ("/", "Overview"),
    ("/topics", "Topics"),
    ("/clients", "Clients"),
    ("/refusals", "Refusals"),
    ("/expansions", "Expansions"),
    ("/groups", "Groups"),
)

HEALTHY, WARNING, DEGRADED, NOT_READY = "healthy", "warning", "degraded", "not_ready"
_DECISIONS: Final = {
    HEALTHY: ("good", "✓ Healthy", "Serving; no problems found."),
    WARNING: ("warn", "△ Serving, with warnings", ""),
    DEGRADED: ("bad", "✕ Serving, but degraded", ""),
    NOT_READY: ("bad", "✕ Not ready", "Do not send clients here at the moment."),
}


def state_of(snapshot: StatusSnapshot, problems: Iterable[Problem]) -> str:
    if not snapshot.ready:
        return NOT_READY
    return max((DEGRADED if each.bad else WARNING for each in problems), default=HEALTHY, key=(WARNING, DEGRADED).index)


def overview(observed: Overview, now: float) -> Page:
    """`now`: wall clock, seconds."""
    snapshot, lists = observed.snapshot, observed.lists
    state = state_of(snapshot, observed.problems)
    sections = {
        "state": _decision(state),
        "problems": _problems(observed.problems),
        "figures": _figures(snapshot, lists),
        "brokers": _table(
            "Brokers",
            ("broker", "clients connect to", "Kafka", "connections", "problem"),
            [
                (b.node_id, b.listener or Cell("no listener", tone="bad"), b.kafka, b.connections, _problem(b.problem))
                for b in snapshot.brokers
            ],
        ),
        "topics": _topics_table(lists["topics"], now, "/topics"),
        "refusals": _refusals_table(lists["refusals"], now, "/refusals"),
        "expansions": _expansions_table(lists["expansions"], now, "/expansions"),
        "groups": _groups_table(lists["groups"], "/groups"),
        "transactions": _transactions(snapshot),
        "software": _software_table(lists["software"], "/clients"),
        "reasons": _table("Refusals by reason", ("reason", "batches"), sorted(snapshot.refusals.items())),
    }
    return Page("/", f"{_DECISIONS[state][1]} – Fencepost", sections)


def list_page(requested: PageRequest, listed: Listed, now: float) -> Page:
    """One page of a list."""
    match requested.what:
        case "topics":
            title, table = "Topics", _topics_table(listed, now)
        case "partitions":
            title = "Partitions" if requested.topic is None else f"Partitions of {requested.topic}"
            table = _partitions_table(title, listed, now)
        case "refusals":
            title, table = "Last refusals", _refusals_table(listed, now)
        case "expansions":
            title, table = "Expansions", _expansions_table(listed, now)
        case "groups":
            title, table = "Waiting groups", _groups_table(listed)
        case _:
            title, table = "Clients", _clients_table(listed)
    path = f"/{requested.what}"
    hidden = () if requested.topic is None else (("topic", requested.topic),)
    body = (table or f'<h2>{_text(title)}</h2><p class="soft">None.</p>') + _pages(path, requested, listed)
    return Page(path, f"{title} – Fencepost", {"list": body}, requested.search, hidden)


#: The form precedes this section, so replacing sections keeps its input.
_BELOW_FORM: Final = ("topics", "list")


def html(page: Page, version: str) -> str:
    proxied_connections = "".join(
        f'<a href="{path}"{" aria-current=page" if path == page.path else ""}>{name}</a>' for path, name in _PAGES
    )
    form = _form(page)
    shown = "\n".join(
        f'{form if name in _BELOW_FORM else ""}<section id="{name}"{" role=status" if name == "state" else ""}>'
        f"{body}</section>"
        for name, body in page.sections.items()
    )
    # A refresh would clear a form that is being filled in.
    refresh = f'<noscript><meta http-equiv="refresh" content="{2 * REFRESH_SECONDS}"></noscript>'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{_text(page.title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">{refresh if page.search is None else ""}
<style>{_STYLE}</style></head><body>
<header class="bar"><h1>Fencepost</h1><nav aria-label="Pages">{proxied_connections}</nav></header>
<main><p id="lost" role="alert" hidden></p>
{shown}</main>
<footer>fencepost {_text(version)} · <a href="{_text(_json_path(page))}">JSON</a> ·
<a href="/metrics">metrics</a> · refreshed every {REFRESH_SECONDS} s
<button id="pause" type="button" hidden>Pause</button></footer><script>{_SCRIPT}</script></body></html>
"""


def _json_path(page: Page) -> str:
    if page.search is None:
        return "/status.json"
    queried = urlencode([*page.hidden, *([("search", page.search)] if page.search else [])])
    return f"{page.path}.json" + (f"?{queried}" if queried else "")


def _form(page: Page) -> str:
    if page.search is None:
        # The overview page searches topics.
        return '<form action="/topics" role="search">' + _SEARCH.format(label="Find a topic", value="") + "</form>"
    hidden = "".join(f'<input type="hidden" name="{name}" value="{_text(value)}">' for name, value in page.hidden)
    label = {"/clients": "Client id, address or software", "/groups": "Group or topic"}.get(page.path, "Topic")
    return (
        f'<form action="{page.path}" role="search">{hidden}'
        + _SEARCH.format(label=label, value=_text(page.search))
        + "</form>"
    )


_SEARCH: Final = (
    '<label for="search">{label}</label><input id="search" type="search" name="search" maxlength="200" value="{value}">'
    "<button>Search</button>"
)


# --- parts of it ------------------------------------------------------------------------------------------------------


def _decision(state: str) -> str:
    """A separate section: screen readers announce its changes only, not each refresh of a problem."""
    tone, title, text = _DECISIONS[state]
    return f'<div class="is-{tone}"><h2>{title}</h2>{f"<p>{text}</p>" if text else ""}</div>'


def _problems(problems: Sequence[Problem]) -> str:
    items = [
        f'<li class="is-{"bad" if each.bad else "warn"}"><b><span class="tag">{"✕" if each.bad else "△"}</span> '
        f"{_text(each.what, _PROBLEM_CHARACTERS_MAX)}</b>{_text(each.do, _PROBLEM_CHARACTERS_MAX)}"
        + (f' <a href="{each.page}">more</a>' if each.page else "")
        + "</li>"
        for each in problems
    ]
    return f'<ul aria-label="Problems and actions">{"".join(items)}</ul>' if items else ""


def _figures(s: StatusSnapshot, lists: Mapping[What, Listed]) -> str:
    lease = _DASH if s.state_lease_seconds is None else f"{max(0.0, s.state_lease_seconds):.1f} s"
    words = [
        f"clients connect to <code>{_text(s.bootstrap)}</code>" if s.bootstrap else "not listening",
        f"cluster <code>{_text(s.cluster_id or 'unknown')}</code>",
        f"up for {duration(s.uptime_seconds)}",
        f"fencepost {_text(s.version)}",
    ]
    return f'<p class="soft">{" · ".join(words)}</p>' + _tiles(
        [
            ("connections", f"{s.connections:,}"),
            ("requests in flight", f"{s.requests_in_flight:,}"),
            ("to Kafka", _bytes(s.bytes_to_kafka)),
            ("to clients", _bytes(s.bytes_to_clients)),
            ("buffered in memory", _bytes(s.buffered_bytes)),
            ("time added (median, p99)", _added(s.added_seconds)),
            ("checked topics", f"{lists['topics'].matching:,}"),
            ("refusals", f"{sum(s.refusals.values()):,}"),
            ("offset violations", f"{s.violations:,}"),
            ("config lease left", lease),
        ]
    )


def _topics_table(listed: Listed, now: float, more: str = "") -> str:
    def row(t: CheckedTopicStatus) -> tuple[object, ...]:
        checks = [f"offsets {t.check}"] * (t.check != "false") + [f"partition count {t.count_check}"] * (
            t.count_check != "false"
        )
        checks += ["ordered expansion"] * t.ordered + [f"idempotence {t.idempotence}"] * (t.idempotence != "off")
        ends = f"{t.log_end_offsets:,}" if t.ends_known else _DASH
        if 0 < t.ends_known < t.partitions:
            ends += f" in {t.ends_known:,}"
        name = Cell(t.topic, href=f"/partitions?topic={quote(t.topic, safe='')}")
        return name, ", ".join(checks), t.partitions, Cell(ends, number=True), t.waiting, t.refusals, _last(t, now)

    columns = ("topic", "checks", "partitions", "log ends, sum", "waiting", "refused", "last refusal")
    return _table("Checked topics", columns, [row(each) for each in listed.rows], listed.matching, more)


def _last(status: CheckedTopicStatus | PartitionStatus, now: float) -> object:
    last = status.last_refusal
    return _DASH if last is None else f"{last.reason}, {_ago(last.at_ms, now)}"


def _partitions_table(title: str, listed: Listed, now: float) -> str:
    rows = [
        (
            f"{p.topic}-{p.partition}",
            Cell("none", tone="bad") if p.leader is None else p.leader,
            p.state or "not used yet",
            _DASH if p.log_end_offset is None else p.log_end_offset,
            _DASH if p.sequence_offset is None else p.sequence_offset,
            p.waiting,
            p.refusals,
            _last(p, now),
        )
        for p in listed.rows
    ]
    columns = ("partition", "leader", "sequencer", "log end", "sequence offset", "waiting", "refused", "last refusal")
    return _table(title, columns, rows)


def _refusals_table(listed: Listed, now: float, more: str = "") -> str:
    def row(r: RefusalStatus) -> tuple[object, ...]:
        offsets = (_DASH if each is None else each for each in (r.expected, r.log_end_offset))
        partition = Cell(f"{r.topic}-{r.partition}", href=f"/partitions?topic={quote(r.topic, safe='')}")
        return partition, _ago(r.at_ms, now), r.reason, *offsets, r.client_id or _DASH, r.client or _DASH

    columns = ("partition", "when", "reason", "expected", "log end", "client id", "from")
    return _table("Last refusals", columns, [row(each) for each in listed.rows], listed.matching, more)


def _expansions_table(listed: Listed, now: float, more: str = "") -> str:
    def row(e: ExpansionStatus) -> tuple[object, ...]:
        state: object = e.state
        if e.state == "pending":
            step = e.step or "run by another process"
            state = Cell(f"{step}: {e.waits_for}" if e.waits_for else step, tone="warn")
        elif e.state == "unordered":
            state = Cell(e.state, tone="warn")
        blocked = _DASH if e.blocked_ms is None else f"{e.blocked_ms / 1000:.1f} s"
        shown = [f"{each:,}" for each in e.thresholds[:_THRESHOLDS_SHOWN]]
        more_thresholds = f" … {len(e.thresholds) - len(shown):,} more" if len(e.thresholds) > len(shown) else ""
        thresholds = " ".join(shown) + more_thresholds or _DASH
        return e.topic, f"{e.from_count:,} → {e.to_count:,}", state, _ago(e.at_ms, now), blocked, thresholds

    columns = ("topic", "partitions", "state", "when", "appends blocked", "thresholds")
    rows = [row(each) for each in listed.rows]
    return _table("Partition expansions", columns, rows, listed.matching, more)


def _groups_table(listed: Listed, more: str = "") -> str:
    def row(w: GatedStatus) -> tuple[object, ...]:
        waits = [*w.waits[:_WAITS_SHOWN], *([f"{len(w.waits) - _WAITS_SHOWN:,} more"] * (len(w.waits) > _WAITS_SHOWN))]
        return w.group, f"{w.topic}-{w.partition}", duration(w.seconds), w.records_max, "; ".join(waits) or w.why

    columns = ("group", "gated partition", "for", "records left, at most", "lags in")
    rows = [row(each) for each in listed.rows]
    return _table("Consumer groups with gated partitions", columns, rows, listed.matching, more)


def _software_table(listed: Listed, more: str = "") -> str:
    def row(s: SoftwareStatus) -> tuple[object, ...]:
        if s.software is None:
            return Cell("unknown", tone="soft"), _DASH, s.connections
        name = Cell(s.software, href=f"/clients?{urlencode({'search': s.software})}")
        return name, s.version or _DASH, s.connections

    rows = [row(each) for each in listed.rows]
    return _table("Client software", ("software", "version", "connections"), rows, listed.matching, more)


def _clients_table(listed: Listed) -> str:
    def row(c: ClientStatus) -> tuple[object, ...]:
        software = _DASH if c.software is None else f"{c.software} {c.version}"
        broker = "bootstrap" if c.node_id is None else f"broker {c.node_id}"
        doing = (
            "waiting"
            if c.waits
            else f"{c.in_flight:,} in flight"
            if c.in_flight
            else f"idle {duration(c.idle_seconds)}"
        )
        return c.client_id or _DASH, c.address, software, broker, duration(c.connected_seconds), doing

    columns = ("client id", "from", "software", "listener", "connected for", "activity")
    return _table("Clients", columns, [row(each) for each in listed.rows])


def _transactions(s: StatusSnapshot) -> str:
    """Always shown if transactions are watched, even if none hangs."""
    abort_only_transactions = _table(
        "Abort-only transactions",
        ("transactional id", "producer", "for", "why"),
        [
            (d.transactional_id, f"{d.producer_id}/{d.producer_epoch}", duration(d.seconds), d.why)
            for d in s.abort_only_transactions
        ],
    )
    return abort_only_transactions if s.transactions is None else _watched(s.transactions) + abort_only_transactions


def _watched(t: TransactionsReport) -> str:
    swept = "not yet" if t.sweep_age_seconds is None else f"{duration(t.sweep_age_seconds)} ago"
    hanging = sum(t.hanging_by_reason.values())
    tiles: list[tuple[str, str | Cell]] = [
        ("open", f"{t.open_transactions:,}"),
        ("oldest", duration(t.oldest_seconds) if t.open_transactions else _DASH),
        ("hanging", Cell(f"{hanging:,}", tone="bad" if hanging else "")),
        ("transactional ids", f"{sum(t.transactional_ids.values()):,}"),
        ("producer ids, all partitions", f"{t.producer_ids:,}"),
        ("partitions with LSO lag", f"{t.lagging_partitions:,} of {t.partitions:,}"),
        ("last sweep of all partitions", swept),
    ]
    return (
        "<h2>Transactions of the cluster</h2>"
        + _tiles(tiles)
        + _table(
            "Hanging transactions",
            ("partition", "from offset", "producer", "transactional id", "observed for", "why"),
            [
                (
                    f"{h.topic}-{h.partition}",
                    h.start_offset,
                    f"{h.producer_id}/{h.producer_epoch}",
                    h.transactional_id or "unknown",
                    duration(h.observed_seconds),
                    WHY[h.why],
                )
                for h in t.hanging
            ],
        )
        + _table(
            "Open transactions",
            ("transactional id", "state", "age", "producer", "coordinator", "partitions", "problem"),
            [
                (
                    o.transactional_id,
                    o.state,
                    _DASH if o.age_seconds is None else duration(o.age_seconds),
                    f"{o.producer_id}" if o.producer_epoch is None else f"{o.producer_id}/{o.producer_epoch}",
                    o.coordinator,
                    _DASH if o.partitions is None else o.partitions,
                    _DASH if o.stuck is None else WHY[o.stuck],
                )
                for o in t.open
            ],
        )
        + _table(
            "Last stable offset below the high watermark",
            ("partition", "LSO", "high watermark", "lag", "unchanged for"),
            [
                (f"{b.topic}-{b.partition}", b.last_stable_offset, b.high_watermark, b.lag, duration(b.seconds))
                for b in t.lagging
            ],
        )
    )


# --- the smallest pieces ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of a table cell with an optional link, tone or number alignment."""

    text: str
    href: str = ""
    tone: str = ""
    number: bool = False


def _text(value: object, characters_max: int = _CHARACTERS_MAX) -> str:
    """Untrusted value as HTML text: clipped, without control characters, escaped."""
    text = str(value)
    if len(text) > characters_max:
        text = f"{text[:characters_max]}…"
    return escape("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text))


def _problem(problem: str | None) -> Cell:
    return Cell(_DASH) if problem is None else Cell(problem, tone="bad")


def _table(
    title: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[object, ...]],
    matching: int | None = None,
    more: str = "",
) -> str:
    """HTML table, empty without rows. `more`: link to all `matching` rows, if these are not all."""
    if not rows:
        return ""
    numbers = [index > 0 and _are_numbers([row[index] for row in rows]) for index in range(len(columns))]
    head = "".join(
        f"<th scope=col{' class=number' if number else ''}>{name}</th>"
        for name, number in zip(columns, numbers, strict=True)
    )
    body = "".join(
        "<tr role=row>"
        + "".join(_cell(index, columns[index], row[index], numbers[index]) for index in range(len(columns)))
        + "</tr>"
        for row in rows
    )
    heading = _text(title)
    if matching is not None and more:
        heading += f' <small><a href="{more}">all {matching:,}</a></small>'
    return (
        f'<h2>{heading}</h2><div class=box><table role=table aria-label="{_text(title)}">'
        f"<thead><tr role=row>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _are_numbers(column: Sequence[object]) -> bool:
    known = [each for each in column if each != _DASH]
    return bool(known) and all(isinstance(each, int) or (isinstance(each, Cell) and each.number) for each in known)


def _cell(index: int, column: str, value: object, number: bool) -> str:
    cell = value if isinstance(value, Cell) else Cell(f"{value:,}" if isinstance(value, int) else str(value))
    kinds = (
        ["number"] * number + ["prose"] * (not number and len(cell.text) > _PROSE_FROM) + [cell.tone] * bool(cell.tone)
    )
    classes = f' class="{" ".join(kinds)}"' if kinds else ""
    text = f'<a href="{_text(cell.href)}">{_text(cell.text)}</a>' if cell.href else f"<span>{_text(cell.text)}</span>"
    if not index:
        return f"<th scope=row role=rowheader{classes}>{text}</th>"
    return f'<td role=cell data-label="{column}"{classes}>{text}</td>'


def _tiles(tiles: Iterable[tuple[str, str | Cell]]) -> str:
    shown = []
    for name, value in tiles:
        cell = value if isinstance(value, Cell) else Cell(value)
        tone = f' class="{cell.tone}"' if cell.tone else ""
        shown.append(f"<div><dt>{name}</dt><dd{tone}>{_text(cell.text)}</dd></div>")
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def _pages(path: str, requested: PageRequest, listed: Listed) -> str:
    first, last = requested.offset + 1, requested.offset + len(listed.rows)
    if not listed.rows:
        return ""

    def proxied(offset: int, text: str) -> str:
        queried = {
            "topic": requested.topic,
            "search": requested.search or None,
            "offset": offset or None,
            "limit": requested.limit,
        }
        given = urlencode({name: value for name, value in queried.items() if value is not None})
        return f'<a href="{_text(f"{path}?{given}")}">{text}</a>'

    proxied_connections = [proxied(max(0, requested.offset - requested.limit), "previous")] * bool(requested.offset)
    proxied_connections += [proxied(last, "next")] * (last < listed.matching)
    return (
        f'<nav class="pages" aria-label="List pages"><span class="soft">{first:,} to {last:,} of '
        f"{listed.matching:,}</span>{''.join(proxied_connections)}</nav>"
    )


def _ago(at_ms: int, now: float) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_ms / 1000))
    seconds = max(0.0, now - at_ms / 1000)
    return f"{duration(seconds)} ago" if seconds < 3_600 else at


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _added(bounds: tuple[float, float] | None) -> str:
    """Upper bounds from histogram buckets."""
    if bounds is None:
        return _DASH
    return " · ".join(f"< {each * 1e6:.0f} µs" if each < 0.001 else f"< {each * 1e3:g} ms" for each in bounds)


def duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
