"""Prometheus text format 0.0.4, and the declaration of metrics: functions from a scrape to a value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from fencepost_proxy.metrics import Distribution

#: Values of a metric by those of its labels.
Labelled = Iterable[tuple[tuple[str, ...], float]]
Value = float | Distribution | Labelled
_Read = TypeVar("_Read", bound=Callable[..., Value | None])


class Shown(NamedTuple):
    """One metric. `read` returns None if this process does not expose it now."""

    name: str
    kind: str
    help: str
    read: Callable[[Any], Value | None]
    labels: tuple[str, ...]


class Section:
    """Metrics under one heading of the reference. Its methods are decorators, given the names of the labels."""

    def __init__(self, title: str, text: str) -> None:
        self.title = title
        self.text = text
        self.shown: list[Shown] = []

    def counter(self, *labels: str) -> Callable[[_Read], _Read]:
        return self._adds("counter", labels)

    def gauge(self, *labels: str) -> Callable[[_Read], _Read]:
        return self._adds("gauge", labels)

    def histogram(self) -> Callable[[_Read], _Read]:
        return self._adds("histogram", ())

    def _adds(self, kind: str, labels: tuple[str, ...]) -> Callable[[_Read], _Read]:
        def add(read: _Read) -> _Read:
            self.shown.append(Shown(read.__name__, kind, " ".join((read.__doc__ or "").split()), read, labels))
            return read

        return add


def lines(sections: Iterable[Section], scrape: object) -> Iterable[str]:
    for section in sections:
        for shown in section.shown:
            value = shown.read(scrape)
            if value is not None:
                yield f"# HELP {shown.name} {shown.help}"
                yield f"# TYPE {shown.name} {shown.kind}"
                yield from _samples(shown, value)


def _samples(shown: Shown, value: Value) -> Iterable[str]:
    name = shown.name
    if isinstance(value, Distribution):
        below = 0
        for bound, count in zip((*map(str, map(float, value.bounds)), "+Inf"), value.counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {float(below)}'
        yield f"{name}_count {float(below)}"
        yield f"{name}_sum {float(value.total)}"
    elif isinstance(value, int | float):
        yield f"{name} {float(value)}"
    else:
        for given, number in value:
            by_name = sorted(zip(shown.labels, given, strict=True))
            labels = ",".join(f'{label}="{_escaped(of)}"' for label, of in by_name)
            yield f"{name}{{{labels}}} {float(number)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
