"""Structured logging: one line per event, as `key=value` or JSON. Values come from peers and are untrusted.

    log = logs.get("cluster.client")
    log.warning("connection lost", broker=address, reason=error)

    2026-03-01T12:00:00.123Z WARNING cluster.client connection lost broker=kafka-1:9092 reason="closed by peer"

A topic name or client id may contain a line feed, a terminal escape or a forged `level=ERROR`. Control characters are
escaped, and a value with a space, a quote or `=` is quoted. Event texts are constants of the proxy. Record contents are
never passed to this module.

Peers cannot fill a disk. Events that they can cause use a `RateLimitedLog`, and any event is limited to
`EVENT_LINES_MAX` lines per `EVENT_SECONDS`. Suppressed lines are counted (`lines`). The next line of that event, or
`report_suppressed`, reports them: a line with `suppressed=N` stands for itself and N others.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TextIO
from weakref import WeakSet

_ROOT: Final = "fencepost"
_FIELDS: Final = "fencepost_fields"
#: Longer values are cut.
VALUE_CHARACTERS_MAX: Final = 500
#: Lines of one event per `EVENT_SECONDS`.
EVENT_LINES_MAX: Final = 200
EVENT_SECONDS: Final = 10.0
#: Bound on distinct events that are counted; the oldest is dropped.
_EVENTS_MAX: Final = 1_000
_LEFT_OUT: Final = "left_out"

#: Lines written by level, and lines suppressed (`left_out`).
_lines: dict[str, int] = {}
_rate_limited: WeakSet[RateLimitedLog] = WeakSet()


def lines() -> dict[str, int]:
    """Lines written by level, and suppressed lines as `left_out`."""
    return {"debug": 0, "info": 0, "warning": 0, "error": 0, _LEFT_OUT: 0} | _lines


def report_suppressed(*, at_once: bool = False) -> None:
    """Reports suppressed lines whose event has not occurred again. Called periodically.

    `at_once` reports all of them, because the process exits.
    """
    for limited in list(_rate_limited):
        limited.report_suppressed(at_once=at_once)
    for handler in logging.getLogger().handlers:
        for each in handler.filters:
            if isinstance(each, _Flood):
                each.report_suppressed(at_once=at_once)


def _count(name: str, lines: int = 1) -> None:
    _lines[name] = _lines.get(name, 0) + lines


class Log:
    """Log of one module. Fields are written in the order given."""

    __slots__ = ("_logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields)

    def crash(self, event: str, error: BaseException, /, **fields: object) -> None:
        """Logs a defect of the proxy: the only event with a stack trace."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._logger.error(event, extra={_FIELDS: fields}, exc_info=error)

    def _emit(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields})


def _nothing() -> None:
    pass


@dataclass(slots=True)
class _Reported:
    """One kind of event: time of the last line, and lines suppressed since."""

    at: float
    suppressed: int = 0
    say: Callable[[], None] = _nothing


class RateLimitedLog:
    """For events that peers can cause at will: logs each key once per interval, then with `suppressed=N`.

    The key groups events that are the same to a reader, for example `("bad frame", client_host)`. At most `keys_max`
    keys are kept; the least recently logged one is dropped first.
    """

    def __init__(
        self,
        log: Log,
        *,
        interval_seconds: float = 10.0,
        keys_max: int = 1_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._interval_seconds = interval_seconds
        self._keys_max = keys_max
        self._clock = clock
        self._observed: OrderedDict[object, _Reported] = OrderedDict()
        _rate_limited.add(self)

    def info(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.info, key, event, fields)

    def warning(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.warning, key, event, fields)

    def error(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.error, key, event, fields)

    def report_suppressed(self, *, at_once: bool = False) -> None:
        """Writes the last suppressed event of each key."""
        now = self._clock()
        for reported in list(self._observed.values()):
            if reported.suppressed and (at_once or now - reported.at >= self._interval_seconds):
                reported.at = now
                reported.suppressed -= 1
                reported.say()

    def _limited(self, emit: Callable[..., None], key: object, event: str, fields: Mapping[str, object]) -> None:
        now = self._clock()
        reported = self._observed.get(key)
        if reported is not None and now - reported.at < self._interval_seconds:
            reported.suppressed += 1
            reported.say = partial(self._write, reported, emit, event, fields)
            return
        if reported is None:
            reported = self._observed[key] = _Reported(now)
        reported.at = now
        self._observed.move_to_end(key)
        if len(self._observed) > self._keys_max:
            _, forgotten = self._observed.popitem(last=False)
            if forgotten.suppressed:
                forgotten.suppressed -= 1
                forgotten.say()
        self._write(reported, emit, event, fields)

    @staticmethod
    def _write(reported: _Reported, emit: Callable[..., None], event: str, fields: Mapping[str, object]) -> None:
        suppressed, reported.suppressed, reported.say = reported.suppressed, 0, _nothing
        _count(_LEFT_OUT, suppressed)
        emit(event, **fields, **({"suppressed": suppressed} if suppressed else {}))


class _Flood(logging.Filter):
    """Limits the lines of each event per interval, including lines of libraries."""

    def __init__(self, handler: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._handler = handler
        self._clock = clock
        self._events: OrderedDict[tuple[str, int, str], list[float]] = OrderedDict()  # began at, lines, left out

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        began, lines, left_out = self._events.get(key, (now, 0, 0))
        if now - began >= EVENT_SECONDS:
            self._report(key, int(left_out))
            began, lines, left_out = now, 0, 0
        allowed = lines < EVENT_LINES_MAX
        self._events[key] = [began, lines + allowed, left_out + (not allowed)]
        self._events.move_to_end(key)
        if len(self._events) > _EVENTS_MAX:
            forgotten, (_, _, unreported) = self._events.popitem(last=False)
            self._report(forgotten, int(unreported))
        _count(record.levelname.lower() if allowed else _LEFT_OUT)
        return allowed

    def report_suppressed(self, *, at_once: bool = False) -> None:
        now = self._clock()
        for key, (began, _, left_out) in list(self._events.items()):
            if at_once or now - began >= EVENT_SECONDS:
                del self._events[key]
                self._report(key, int(left_out))

    def _report(self, key: tuple[str, int, str], left_out: int) -> None:
        """Writes one line for all suppressed ones, bypassing this filter."""
        if left_out:
            name, level, event = key
            record = logging.LogRecord(name, level, "", 0, event, None, None)
            setattr(record, _FIELDS, {"suppressed": left_out})
            self._handler.acquire()
            try:
                self._handler.emit(record)
            finally:
                self._handler.release()


def get(logger: str) -> Log:
    """The log of a module, named relative to `fencepost_proxy`, for example `cluster.client`."""
    return Log(logging.getLogger(f"{_ROOT}.{logger}"))


def setup(level: str = "info", style: str = "console", stream: TextIO | None = None) -> None:
    """Writes events, and warnings of libraries, to `stream` (stderr). `style` is `console` or `json`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Console())
    handler.addFilter(_Flood(handler))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level.upper())
    logging.captureWarnings(True)


def change(level: str, style: str) -> None:
    """Changes level and style after `setup`."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Json() if style == "json" else _Console())
    logging.getLogger(_ROOT).setLevel(level.upper())


def escape(text: str) -> str:
    """The text on one line, cut, with control characters escaped."""
    cut = text if len(text) <= VALUE_CHARACTERS_MAX else text[:VALUE_CHARACTERS_MAX] + "…"
    if cut.isprintable() and "\\" not in cut:
        return cut
    # unicode_escape on the whole text would also escape printable non-ASCII letters.
    return "".join(
        "\\\\" if c == "\\" else c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in cut
    )


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields


def _logger_name(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{_ROOT}.")


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        parts = [_timestamp(record), record.levelname, _logger_name(record), escape(record.getMessage())]
        parts += [f"{key}={self._value(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            # Indented, so that exception text cannot forge an event.
            line += "".join(f"\n    {escape(each)}" for each in self.formatException(record.exc_info).splitlines())
        return line

    @staticmethod
    def _value(value: object) -> str:
        text = escape(str(value))
        if text and not any(c in text for c in ' "='):
            return text
        return '"' + text.replace('"', '\\"') + '"'


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": _logger_name(record),
            "event": escape(record.getMessage()),
        }
        for key, value in _fields(record).items():
            is_json = value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
            # A field must not overwrite the four keys above.
            entry[f"{key}_" if key in entry else key] = value if is_json else escape(str(value))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)
