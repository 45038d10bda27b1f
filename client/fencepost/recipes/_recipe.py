"""What the recipes share: reading on, appending, and one method for the blocking clients and for aiokafka.

A recipe is steps (`fencepost._steps`), written once. Its class for a client runs them: see `Method`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Sequence
from types import MethodType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, overload

from fencepost._log_writer import BlockingLogWriter, LogWriterBase
from fencepost._steps import Closing, Steps, Use, now, run, run_async
from fencepost.errors import ForeignRecordError
from fencepost.records import LogRecord, Record

P = ParamSpec("P")
T = TypeVar("T")

#: The header of each record that a recipe adds: its recipe, format version and kind, as in `leader/1 claim`.
RECIPE = "fencepost-recipe"


class OfOneLibrary:
    """`WRITER`: the log writers of this class's client libraries."""

    WRITER: ClassVar[type[LogWriterBase]] = LogWriterBase
    #: A second call between the read and the append of the first one would move the end under its decision.
    _use: Use

    def _require(self, log: LogWriterBase) -> None:
        if not isinstance(log, self.WRITER):
            other = "fencepost.recipes" if isinstance(log, BlockingLogWriter) else "fencepost.recipes.aiokafka"
            raise TypeError(f"{type(self).__name__} of another client library (use that of {other})")


class Blocking(OfOneLibrary):
    """Of kafka-python and confluent-kafka."""

    WRITER = BlockingLogWriter


class Awaited(OfOneLibrary):
    """Of aiokafka, whose methods return coroutines."""


class Method(Generic[P, T]):
    """A public method, made of steps. In a Blocking class it returns their result, in an Awaited one a coroutine."""

    def __init__(self, steps: Callable[Concatenate[Any, P], Steps[T]]) -> None:
        def blocking(recipe: Any, /, *args: P.args, **options: P.kwargs) -> T:
            return run(_alone(recipe, *args, **options))

        async def awaited(recipe: Any, /, *args: P.args, **options: P.kwargs) -> T:
            return await run_async(_alone(recipe, *args, **options))

        def _alone(recipe: Any, *args: P.args, **options: P.kwargs) -> Steps[T]:
            alone: Steps[T] = recipe._use.alone(getattr(recipe, steps.__name__)(*args, **options))
            return alone

        for call in (blocking, awaited):
            functools.update_wrapper(call, steps)
            call.__name__ = steps.__name__.lstrip("_")
        self._blocking, self._awaited = blocking, awaited

    @overload
    def __get__(self, recipe: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, recipe: Blocking, kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, recipe: Awaited, kind: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, recipe: OfOneLibrary | None, kind: type) -> Callable[..., Any]:
        call: Callable[..., Any] = self._awaited if issubclass(kind, Awaited) else self._blocking
        return call if recipe is None else MethodType(call, recipe)


class Recipe(OfOneLibrary):
    """A state machine over one log writer, which nothing else may use."""

    #: Recipe and format version.
    FORMAT: ClassVar[str]

    def __init__(self, log: LogWriterBase) -> None:
        self._require(log)
        self._log = log
        self._use = Use(f"{type(self).__name__} of {log.topic}-{log.partition}", "another one for each task or thread")
        #: Monotonic seconds when the newest record was read.
        self._changed: float | None = None
        #: For how many seconds the log had no new record, as of the last read to its end. A failed read adds nothing.
        self.silent_seconds = 0.0

    def _read(self, apply: Callable[[LogRecord], Any]) -> Steps[None]:
        """Call `apply(record)` for each unread record, and await a coroutine. A record whose call raises is read again.
        Raises the errors of a log writer's loop: an unreadable log is never a silent one."""
        begun, loop = now(), self._log.loop()
        try:
            while (item := (yield from loop.following())) is not None:
                self._changed, self.silent_seconds = None, 0.0
                result = apply(item.value)
                if result is not None:
                    yield result
        finally:
            del loop  # a traceback would keep it, and with it the use of the log
        if self._changed is None:
            self._changed = now()
        self.silent_seconds = max(0.0, begun - self._changed)

    def _write(self, records: Sequence[Record]) -> Steps[int]:
        """One append at the offset that was read. Raises what LogWriter.append raises."""
        offset: int = yield from LogWriterBase.append(self._log, records)
        self._changed, self.silent_seconds = now(), 0.0
        return offset

    def _header(self, kind: str) -> tuple[str, bytes]:
        return RECIPE, f"{self.FORMAT} {kind}".encode()

    def _kind(self, record: LogRecord) -> str | None:
        """The kind of a record of this recipe; None for other records. Raises ForeignRecordError for another format."""
        stated = header_of(record, RECIPE)
        if stated is None:
            return None
        form, _, kind = stated.decode(errors="replace").partition(" ")
        if form.partition("/")[0] != self.FORMAT.partition("/")[0]:
            return None
        if form != self.FORMAT:
            raise self._foreign(record, f"it has the format {form}, this library reads {self.FORMAT}")
        return kind

    def _key(self, record: LogRecord) -> str:
        """Raises ForeignRecordError."""
        try:
            return (record.key or b"").decode()
        except UnicodeDecodeError:
            raise self._foreign(record, "its key is not UTF-8") from None

    def _foreign(self, record: LogRecord, why: str) -> ForeignRecordError:
        return ForeignRecordError(self._log.topic, self._log.partition, record.offset, why)


class BlockingRecipe(Blocking, Recipe, Closing):
    def close(self) -> None:
        self._log.close()  # type: ignore[attr-defined]


def header_of(record: LogRecord, name: str) -> bytes | None:
    """The last header `name`."""
    return next((value for key, value in reversed(record.headers) if key == name), None)
