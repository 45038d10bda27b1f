"""`docs/logs.md`, the reference of log events. They are read from the sources, so the page has all of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, NamedTuple

from tests.support.docs import ROOT

_ROOT: Final = ROOT / "proxy" / "fencepost_proxy"
_LOGS: Final = ("_log", "_limited_log")
_LEVELS: Final = ("error", "warning", "info", "debug")

_HEAD: Final = """\
# The log

Every event that the proxy logs, and the format of its log lines.

The proxy writes one line per event to stderr. `[log] format` (or `--log-format`) is `console` for people or `json`, one
object per line. `[log] level` is the least severe level that is written.

```text
2026-03-01T12:00:00.123Z INFO net.control connected to Kafka cluster_id=Xk9J2 brokers=3
{"time": "2026-03-01T12:00:00.123Z", "level": "info", "room": "net.control", "event": "connected to Kafka", \
"cluster_id": "Xk9J2", "brokers": 3}
```

`time` is UTC. `room` is the module of the proxy. `event` is a fixed text; values from clients and brokers are always in
fields. A bug in the proxy has the level *crash* in the table below. It is logged as an error with a stack trace:
indented in `console`, in the field `exception` in `json`. With several worker processes each line has `worker`.

**Peers cannot forge lines.** Unprintable characters in topic names, client ids, groups and broker errors, such as line
feeds and terminal escapes, are escaped. A value with a blank, a quote or `=` is quoted, and a field is cut after 500
characters. Record contents, passwords and tokens are never logged.

**Peers cannot fill a disk.** Events marked *often* are written at most once in ten seconds per broker, group or kind of
reason. Any event is written at most 200 times in ten seconds. `fencepost_log_lines_total{level="left_out"}` counts the
lines that are left out, and a line with `suppressed=N` stands for itself and N others.

Fields of several events:

| field | meaning |
|---|---|
| `reason` | the cause, often an error of the system or of a broker |
| `peer` | address and port of a client |
| `broker` | id or address of a broker |
| `topic`, `partition` | Kafka's; `partition` is `TOPIC-NUMBER` |
| `group`, `transactional_id`, `producer_id`, `producer_epoch` | Kafka's |
| `bootstrap` | the address that clients connect to |
| `proposal` | id of a partition expansion, the same in the log of every instance |
| `*_seconds` | a duration |
| `late_seconds`, `cpu_seconds`, `frame` | how late the event loop was; CPU time of its thread in that time; the \
code that ran 0.05 s after the event loop was due. If the CPU time is much lower, the machine was busy, not that code |

## From start to end

`starting` → `waiting for Kafka` (until it is reached) → `connected to Kafka` → `state topic loaded` →
`listening for broker`, once per broker → `serving`. On a signal: `draining`, then `drained` with the number of requests
that were left unanswered. `certificates loaded` appears when certificates are reloaded.

## Events

The table is generated from the sources: change it there, then run `python -m tests.pages`.

| level | room | event | fields |
|---|---|---|---|
"""


class _Event(NamedTuple):
    level: str
    room: str
    often: bool
    text: str
    fields: tuple[str, ...]


def page() -> str:
    """The whole file."""
    return _HEAD + "".join(_row(each) for each in sorted(set(_events()), key=_order))


def _order(event: _Event) -> tuple[object, ...]:
    return event.room, event.text, event


def _row(event: _Event) -> str:
    level = f"{event.level}, often" if event.often else event.level
    fields = ", ".join(f"`{field}`" for field in event.fields) or "–"
    return f"| {level} | `{event.room}` | {event.text.replace('|', chr(92) + '|')} | {fields} |\n"


def _events() -> Iterator[_Event]:
    for file in sorted(_ROOT.rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        room = _room(tree)
        if room is not None:
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    yield from _logged(node, room)


def _room(tree: ast.Module) -> str | None:
    """As `logs.get("net.app")` names it."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logs"), attr="get"), args=[ast.Constant(value=room)]):
                return str(room)
    return None


def is_logged(call: ast.Call) -> bool:
    """By a call whose level is known."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=log), attr=level):
            return log in _LOGS and level in (*_LEVELS, "crash")
    return False


def _logged(call: ast.Call, room: str) -> Iterator[_Event]:
    match call.func:
        case ast.Attribute(value=ast.Name(id=log), attr=level) if is_logged(call):
            often = log == "_limited_log"
        case ast.Name(id="say" | "log"):
            often, level = False, "info or warning"  # by how it ended
        case _:
            return
    event = call.args[1] if often else call.args[0]
    fields = tuple(each.arg for each in call.keywords if each.arg is not None)
    for text in _texts(event):
        yield _Event(level, room, often, text, fields)


def _texts(event: ast.expr) -> Iterator[str]:
    match event:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)
        case ast.IfExp(body=one, orelse=other):
            yield from _texts(one)
            yield from _texts(other)
        case _:
            yield "…"
