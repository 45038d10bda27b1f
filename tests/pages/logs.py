"""`docs/logs.md`, the reference of log events, extracted from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, NamedTuple

from fencepost_proxy.observability.audit import Identity
from tests.support.docs import ROOT

_ROOT: Final = ROOT / "proxy" / "fencepost_proxy"
_LOGS: Final = ("_log", "_limited_log")
_LEVELS: Final = ("error", "warning", "info", "debug")

_HEAD: Final = """\
# Log events

The proxy writes one line per event to stderr. `[log] format` (or `--log-format`) is `console` or `json`, one object per
line. `[log] level` is the lowest level that is written.

```text
2026-03-01T12:00:00.123Z INFO cluster.client connected to Kafka cluster_id=Xk9J2 brokers=3
{"time": "2026-03-01T12:00:00.123Z", "level": "info", "logger": "cluster.client", "event": "connected to Kafka", \
"cluster_id": "Xk9J2", "brokers": 3}
```

`time` is UTC. `logger` is the module. `event` is a constant text; values from peers appear only in fields. Level
*crash* below marks a defect of the proxy: it is written as an error with a stack trace, indented or as `exception`.

**Peers cannot forge lines.** In topic names, client ids, groups and broker errors, line feeds, terminal escapes and
other control characters are escaped. A value with a space, a quote or `=` is quoted. A field is cut after 500
characters. Record contents, passwords and tokens are never logged.

**Peers cannot fill a disk.** An event marked *often* is written once per ten seconds for the same broker, group or
kind of reason. Any event is limited to 200 lines per ten seconds. Suppressed lines are counted
(`fencepost_log_lines_total{level="left_out"}`), and a later line with `suppressed=N` stands for itself and N others.

Common fields:

| field | meaning |
|---|---|
| `reason` | cause, often an error of the operating system or a broker |
| `peer` | address and port of a client |
| `broker` | id or address of a broker |
| `topic`, `partition` | as in Kafka; `partition` is `TOPIC-NUMBER` |
| `group`, `transactional_id`, `producer_id`, `producer_epoch` | as in Kafka |
| `bootstrap` | bootstrap address for clients |
| `proposal` | identifies one partition expansion in the logs of all instances |
| `*_seconds` | duration |
| `late_seconds`, `cpu_seconds`, `frame` | delay of the event loop; CPU time of its thread since the last check; \
the code that ran 0.05 s after the deadline. CPU time far below the delay: the machine was busy, not that code |

## Start and stop

`starting` → `executor of the hot path` → `waiting for Kafka` (until Kafka responds) → `connected to Kafka` →
`state topic loaded` → `listening for broker`, once per broker → `serving`. After a signal: `draining`, then `drained`
with the number of unanswered requests. `certificates loaded` follows a reload.

`executor of the hot path` is a warning if the [native module](installation.md#native-module) is present but cannot be
used.

## Audit log

Lines of the logger `audit` name the client or operator that changed something or was refused; filter for that name.
`virtual configs changed`, `partitions added` and `append refused` have the client's address, `principal` (user of its
login with PLAIN or SCRAM) and client id. `virtual configs changed` has `old` and `new` values, and is a warning if a
check is weakened, such as from `required` to `true`. `append refused` is written once a minute for each host, topic and
reason.
`an operator released a group` and `action refused` are requests to the status page, with their address. Kafka logs what
it refuses itself (`kafka.authorizer.logger`), under the client's principal. See also `login failed` of
`services.reports` and `configuration reloaded` of `cli`.

## Events

The table is generated from the sources: change it there, then run `python -m tests.pages`.

| level | logger | event | fields |
|---|---|---|---|
"""


class _Event(NamedTuple):
    level: str
    logger: str
    often: bool
    text: str
    fields: tuple[str, ...]


def page() -> str:
    return _HEAD + "".join(_row(each) for each in sorted(set(_events()), key=_order))


def _order(event: _Event) -> tuple[object, ...]:
    return event.logger, event.text, event


def _row(event: _Event) -> str:
    level = f"{event.level}, often" if event.often else event.level
    fields = ", ".join(f"`{field}`" for field in event.fields) or "–"
    return f"| {level} | `{event.logger}` | {event.text.replace('|', chr(92) + '|')} | {fields} |\n"


def _events() -> Iterator[_Event]:
    for file in sorted(_ROOT.rglob("*.py")):
        tree = ast.parse(file.read_text("utf-8"))
        logger = _logger_of(tree)
        if logger is not None:
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    yield from _logged(node, logger)


def _logger_of(tree: ast.Module) -> str | None:
    """The argument of `logs.get`, such as `server`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logs"), attr="get"), args=[ast.Constant(value=logger)]):
                return str(logger)
    return None


def is_logged(call: ast.Call) -> bool:
    """Whether the call logs with a known level."""
    match call.func:
        case ast.Attribute(value=ast.Name(id=log), attr=level):
            return log in _LOGS and level in (*_LEVELS, "crash")
    return False


def _logged(call: ast.Call, logger: str) -> Iterator[_Event]:
    match call.func:
        case ast.Attribute(value=ast.Name(id=log), attr=level) if is_logged(call):
            often = log == "_limited_log"
        case ast.Name(id="say" | "log"):
            often, level = False, "info or warning"  # depends on the outcome
        case _:
            return
    event = call.args[1] if often else call.args[0]
    fields = tuple(name for each in call.keywords for name in _names(each))
    for text in _texts(event):
        yield _Event(level, logger, often, text, fields)


def _names(keyword: ast.keyword) -> tuple[str, ...]:
    if keyword.arg is None:
        return Identity._fields if ast.unparse(keyword.value) == "identity._asdict()" else ()
    return (keyword.arg,)


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
