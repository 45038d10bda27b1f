"""One line per event: `key=value` for a console, or JSON. Values come from peers, so nothing in them is believed.

    log = logs.get("net.control")
    log.warning("connection lost", broker=address, reason=error)

    2026-03-01T12:00:00.123Z WARNING net.control connection lost broker=kafka-1:9092 reason="closed by peer"

A topic name or client id may hold a line feed, a terminal escape or a forged `level=ERROR`: control characters are
escaped, and a value with a blank, a quote or `=` in it is quoted. The event itself is our own text. Record contents
are never passed to this module.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, TextIO

_ROOT: Final = "fencepost"
_FIELDS: Final = "fencepost_fields"
#: A peer's text is cut to this many characters: one line stays one line that somebody can read.
VALUE_CHARACTERS_MAX: Final = 500


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
        self._seen: OrderedDict[object, tuple[float, int]] = OrderedDict()

    def info(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.info, key, event, fields)

    def warning(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.warning, key, event, fields)

    def error(self, key: object, event: str, /, **fields: object) -> None:
        self._limited(self._log.error, key, event, fields)

    def _limited(self, emit: Callable[..., None], key: object, event: str, fields: Mapping[str, object]) -> None:
        now = self._clock()
        logged_at, suppressed = self._seen.get(key, (None, 0))
        if logged_at is not None and now - logged_at < self._interval_seconds:
            self._seen[key] = (logged_at, suppressed + 1)
            return
        self._seen[key] = (now, 0)
        self._seen.move_to_end(key)
        if len(self._seen) > self._keys_max:
            self._seen.popitem(last=False)
        emit(event, **fields, **({"suppressed": suppressed} if suppressed else {}))


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
    if common:
        handler.addFilter(add_common)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(level.upper())
    logging.captureWarnings(True)


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
            plain = value if value is None or isinstance(value, bool | int | float) else escape(str(value))
            # A field may not pass itself off as one of ours.
            entry[f"{key}_" if key in entry else key] = plain
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)
