"""One line per event: `key=value` for a console, or JSON. Values come from peers, so nothing in them is believed.

    log = logs.get("net.control")
    log.warning("connection lost", broker=address, reason=error)

    2026-03-01T12:00:00.123Z WARNING net.control connection lost broker=kafka-1:9092 reason="closed by peer"

A topic name or client id may hold a line feed, a terminal escape or a forged `level=ERROR`: control characters are
escaped, and a value with a blank, a quote or `=` in it is quoted. The event itself is our own text. Record contents
are never passed to this module.

Nor can they fill a disk: what they can cause goes by a `RateLimitedLog`, and above `EVENT_LINES_MAX` in
`EVENT_SECONDS` any event is left out. What was left out is counted (`lines`), and told by the next line of its kind or
by `tell_left_out`: a line with `suppressed=N` stands for itself and N others.
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
#: A peer's text is cut to this many characters: one line stays one line that somebody can read.
VALUE_CHARACTERS_MAX: Final = 500
#: Of one event, whoever causes it.
EVENT_LINES_MAX: Final = 200
EVENT_SECONDS: Final = 10.0
#: Events are words of ours, some with a name in them; should there ever be more, the oldest is forgotten.
_EVENTS_MAX: Final = 1_000
_LEFT_OUT: Final = "left_out"

#: What was written so far, by level, and what was left out.
_lines: dict[str, int] = {}
_rate_limited: WeakSet[RateLimitedLog] = WeakSet()


def lines() -> dict[str, int]:
    """How many lines there were of each level, and as `left_out` how many were not written."""
    return {"debug": 0, "info": 0, "warning": 0, "error": 0, _LEFT_OUT: 0} | _lines


def tell_left_out(*, at_once: bool = False) -> None:
    """To be called now and then: what was left out is told, where no line of its kind has come that could do so.

    `at_once` – the process ends.
    """
    for limited in list(_rate_limited):
        limited.tell_left_out(at_once=at_once)
    for handler in logging.getLogger().handlers:
        for each in handler.filters:
            if isinstance(each, _Flood):
                each.tell_left_out(at_once=at_once)


def _count(name: str, lines: int = 1) -> None:
    _lines[name] = _lines.get(name, 0) + lines


class Log:
    """Events of one room. The fields are shown in the order in which they are given."""

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
        """Our own fault: the one event that carries a stack trace."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._logger.error(event, extra={_FIELDS: fields}, exc_info=error)

    def _emit(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields})


def _nothing() -> None:
    pass


@dataclass(slots=True)
class _Told:
    """One kind of event: when it was written last, and what was left out since."""

    at: float
    suppressed: int = 0
    say: Callable[[], None] = _nothing


class RateLimitedLog:
    """For what peers can cause as often as they like: each key is logged once per interval, then with `suppressed=N`.

    The key is whatever makes two events the same to a reader, for example `("bad frame", client_host)`. At most
    `keys_max` keys are remembered; the one least recently logged is forgotten first.
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
        self._seen: OrderedDict[object, _Told] = OrderedDict()
        _rate_limited.add(self)

    def info(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.info, key, event, fields)

    def warning(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.warning, key, event, fields)

    def error(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.error, key, event, fields)

    def tell_left_out(self, *, at_once: bool = False) -> None:
        """Writes the last one of each kind that was left out: none may come after it."""
        now = self._clock()
        for told in list(self._seen.values()):
            if told.suppressed and (at_once or now - told.at >= self._interval_seconds):
                told.at = now
                told.suppressed -= 1
                told.say()

    def _limited(self, emit: Callable[..., None], key: object, event: str, fields: Mapping[str, object]) -> None:
        now = self._clock()
        told = self._seen.get(key)
        if told is not None and now - told.at < self._interval_seconds:
            told.suppressed += 1
            told.say = partial(self._say, told, emit, event, fields)
            return
        if told is None:
            told = self._seen[key] = _Told(now)
        told.at = now
        self._seen.move_to_end(key)
        if len(self._seen) > self._keys_max:
            _, forgotten = self._seen.popitem(last=False)
            if forgotten.suppressed:
                forgotten.suppressed -= 1
                forgotten.say()
        self._say(told, emit, event, fields)

    @staticmethod
    def _say(told: _Told, emit: Callable[..., None], event: str, fields: Mapping[str, object]) -> None:
        suppressed, told.suppressed, told.say = told.suppressed, 0, _nothing
        _count(_LEFT_OUT, suppressed)
        emit(event, **fields, **({"suppressed": suppressed} if suppressed else {}))


class _Flood(logging.Filter):
    """Lets so many lines of each event pass, in an interval that begins with its first. Libraries' lines, too."""

    def __init__(
        self, handler: logging.Handler, common: Mapping[str, object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._handler = handler
        self._common = common
        self._clock = clock
        self._events: OrderedDict[tuple[str, int, str], list[float]] = OrderedDict()  # began at, lines, left out

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, record.levelno, str(record.msg))
        now = self._clock()
        began, lines, left_out = self._events.get(key, (now, 0, 0))
        if now - began >= EVENT_SECONDS:
            self._tell(key, int(left_out))
            began, lines, left_out = now, 0, 0
        passes = lines < EVENT_LINES_MAX
        self._events[key] = [began, lines + passes, left_out + (not passes)]
        self._events.move_to_end(key)
        if len(self._events) > _EVENTS_MAX:
            forgotten, (_, _, unsaid) = self._events.popitem(last=False)
            self._tell(forgotten, int(unsaid))
        _count(record.levelname.lower() if passes else _LEFT_OUT)
        return passes

    def tell_left_out(self, *, at_once: bool = False) -> None:
        now = self._clock()
        for key, (began, _, left_out) in list(self._events.items()):
            if at_once or now - began >= EVENT_SECONDS:
                del self._events[key]
                self._tell(key, int(left_out))

    def _tell(self, key: tuple[str, int, str], left_out: int) -> None:
        """Past this filter: it is one line for many."""
        if left_out:
            name, level, event = key
            record = logging.LogRecord(name, level, "", 0, event, None, None)
            setattr(record, _FIELDS, {"suppressed": left_out, **self._common})
            self._handler.acquire()
            try:
                self._handler.emit(record)
            finally:
                self._handler.release()


def get(room: str) -> Log:
    """The log of a room, named as its module below `fencepost_proxy`, for example `net.control`."""
    return Log(logging.getLogger(f"{_ROOT}.{room}"))


def setup(level: str = "info", style: str = "console", stream: TextIO | None = None, **common: object) -> None:
    """Sends our events to `stream` (stderr), and warnings of libraries with them. `style`: `console` or `json`.

    `common` – fields of every event.
    """

    def add_common(record: logging.LogRecord) -> bool:
        setattr(record, _FIELDS, {**_fields(record), **common})
        return True

    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json() if style == "json" else _Console())
    handler.addFilter(_Flood(handler, common))
    if common:
        handler.addFilter(add_common)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level.upper())
    logging.captureWarnings(True)


def change(level: str, style: str) -> None:
    """Of what `setup` has begun; nothing else of it changes."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(_Json() if style == "json" else _Console())
    logging.getLogger(_ROOT).setLevel(level.upper())


def escape(text: str) -> str:
    """The text on one line, with nothing in it that a terminal or a log reader would act on."""
    cut = text if len(text) <= VALUE_CHARACTERS_MAX else text[:VALUE_CHARACTERS_MAX] + "…"
    if cut.isprintable() and "\\" not in cut:
        return cut
    # unicode_escape would also spell out every letter beyond ASCII; only what is not printable is.
    return "".join(
        "\\\\" if c == "\\" else c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
        for c in cut
    )


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, _FIELDS, {})
    return fields


def _room(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{_ROOT}.")


def _timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


class _Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        parts = [_timestamp(record), record.levelname, _room(record), escape(record.getMessage())]
        parts += [f"{key}={self._value(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        if record.exc_info:
            # Indented, so that no exception's text can look like an event of its own.
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
            "room": _room(record),
            "event": escape(record.getMessage()),
        }
        for key, value in _fields(record).items():
            is_json = value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
            plain = value if is_json else escape(str(value))
            # A field may not pass itself off as one of ours.
            entry[f"{key}_" if key in entry else key] = plain
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)
