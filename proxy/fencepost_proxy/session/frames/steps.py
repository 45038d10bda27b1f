"""Requests that wait: each is one generator, read from top to bottom.

A request yields a `Wait` and continues with its result, at once or during a later event. `InProgress`
(`in_progress.py`) resumes it, or throws into it what ended the wait: `ConnectionEnded`, or `TooLate`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, TypeVar

_T = TypeVar("_T")
#: A wait gets a function to call with its result.
Resume = Callable[..., None]


class ConnectionEnded(Exception):
    """Kafka will answer nothing more on this connection, and nothing more is sent to it."""


class TooLate(Exception):
    """The wait took until `Wait.until`. A request that does not catch it loses its connection, for this reason."""


@dataclass(slots=True, eq=False)
class Wait:
    """`start` begins it, and gets the function to call with the result.

    - `before_sending` – what a request waits for that Kafka has not got: no later request is read meanwhile. Empty:
      later requests are read.
    - `until` – then `TooLate` is thrown, with the reason `late`.
    - `outlives` – it ends although the connection has ended: Kafka's answer is there, and may have to be stored.
    """

    start: Callable[[Resume], object]
    before_sending: str = ""
    until: float = float("inf")
    late: str = ""
    outlives: bool = False
    steps: Steps[None] = field(init=False)  # set by `InProgress`


#: A request, or a part of one that returns a result (`yield from`).
Steps = Generator[Wait, Any, _T]
