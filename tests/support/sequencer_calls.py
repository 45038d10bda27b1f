"""What a session under test calls of the partition sequencers, recorded among its commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Call(NamedTuple):
    name: str
    arguments: tuple[Any, ...]


def call(name: str, *arguments: Any) -> Call:
    return Call(name, arguments)


class SequencerCalls:
    """Partition sequencers that only record; no admission expires."""

    admissions_hold = True

    def __init__(self) -> None:
        self.record: Callable[[Call], None] = lambda each: None

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("submit", "cancel", "sent", "answered", "lost", "join", "joined"):
            raise AttributeError(name)
        return lambda *arguments, **named: self.record(Call(name, (*arguments, *named.values())))

    def read_ahead(self, pending: object) -> None:
        """Changes no answer."""

    def may_send(self, pending: object, now: float) -> bool:
        return self.admissions_hold

    def sequencer(self, partition: object) -> None:
        return None
