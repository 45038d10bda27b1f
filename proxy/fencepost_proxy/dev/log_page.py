"""`python -m fencepost_proxy.dev.log_page`: prints `docs/logs.md`, what there can be in the log.

The events are read out of the sources: what is not there is never logged, and what is there is on the page.
`tests/monitoring/test_pages.py` fails where the file is not what this prints.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_ROOT: Final = Path(__file__).parents[1]
_LOGS: Final = ("_log", "_limited_log")
_LEVELS: Final = ("error", "warning", "info", "debug")

_HEAD: Final = """\
# The log

The table is made from the sources by `python -m fencepost_proxy.dev.log_page`; change it there.

One line per event, to stderr. `[log] format` (or `--log-format`) is `console`, for people, or `json`, one object a
line; `[log] level` the least severe one that is written.

```text
2026-03-01T12:00:00.123Z INFO net.control connected to Kafka cluster_id=Xk9J2 brokers=3
{"time": "2026-03-01T12:00:00.123Z", "level": "info", "room": "net.control", "event": "connected to Kafka", \
"cluster_id": "Xk9J2", "brokers": 3}
```

`time` is UTC. `room` is the part of the program. `event` is a text of the proxy's own; all that comes from somebody
else is in a field. An event that is the proxy's own fault (level *crash* below, written as an error) is followed by a
stack trace: indented, or as `exception`. With several worker processes each line has `worker`.

**What peers send cannot forge lines.** Topic names, client ids, groups, errors of brokers: line feeds, terminal
escapes and whatever else is not printable is written as an escape sequence, a value with a blank, a quote or `=` in
it is quoted, and a field is cut after 500 characters. Contents of records, passwords and tokens are never logged.

**Nor can they fill a disk.** Events with *often* below are written once in ten seconds for each broker, group, kind
of reason or whatever makes two of them the same to a reader; and of any event at most 200 lines are written in ten
seconds. What is left out is counted (`fencepost_log_lines_total{level="left_out"}`) and told: a line with
`suppressed=N` stands for itself and N others.

Fields that several events have:

| field | what it is |
|---|---|
| `reason` | why, in words; often an error of the system or of a broker |
| `peer` | a client's address and port |
| `broker` | a broker's id, or its address |
| `topic`, `partition` | Kafka's; `partition` is `TOPIC-NUMBER` |
| `group`, `transactional_id`, `producer_id`, `producer_epoch` | Kafka's |
| `bootstrap` | where clients connect |
| `proposal` | which growth of a topic; the same in the log of every proxy that sees it |
| `*_seconds` | how long |
| `late_seconds`, `cpu_seconds`, `frame` | how late the event loop was; CPU time of its thread since the \
last look; the code that it ran 0.05 s after it was due. CPU time far below: the machine was busy, not that code |

## From start to end

`starting` → `waiting for Kafka` (as long as it is not there) → `connected to Kafka` → `state topic loaded` →
`listening for broker`, once for each → `serving`. A signal: `draining`, then `drained` with the number of requests
that were left unanswered. `certificates loaded` when they were read anew.

## Events

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


def _logged(call: ast.Call, room: str) -> Iterator[_Event]:
    match call.func:
        case ast.Attribute(value=ast.Name(id=log), attr=level) if log in _LOGS and level in (*_LEVELS, "crash"):
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


if __name__ == "__main__":
    print(page(), end="")
