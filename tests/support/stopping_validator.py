"""`fencepost proxy` whose validations of commits stop where a test says: `python -m tests.support.stopping_validator`.

`$STOPS` is a directory. While it contains a file `stop`, a validation waits at the step that the file names
(`STEP:before` or `STEP:after`), and creates `reached-TRANSACTIONAL_ID`. `Stops` is the test's side.

Steps: the queries of a validation (`STEPS`), and `decision`, when the commit may pass.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from fencepost_proxy.cli.main import main
from fencepost_proxy.services.transactions import Commits
from fencepost_proxy.session.frames.messages import ValidateCommit
from fencepost_proxy.transactions import commit_validator as queries_to_send
from tests.kit.waiting import until
from tests.support.mutants import Mutant, wrap

STEPS: Final = {
    queries_to_send.ReadState: "state",
    queries_to_send.QueryTransaction: "transaction",
    queries_to_send.QueryProducers: "producers",
    queries_to_send.ReadBack: "log",
}
_PROBE_SECONDS = 0.02
_PATIENCE_SECONDS = 60.0


class Stops:
    """While it is entered, validations stop there."""

    def __init__(self, directory: Path, where: str) -> None:
        self._directory = directory
        self._where = where

    def __enter__(self) -> Self:
        # Renamed, so that no validation reads an incomplete file.
        new = self._directory / "new"
        new.write_text(self._where)
        new.rename(self._directory / "stop")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        (self._directory / "stop").unlink(missing_ok=True)

    def await_reached(self, *transactional_ids: str) -> None:
        for name in transactional_ids:
            until(
                (self._directory / f"reached-{name}").exists,
                f"the commit of {name} to come to {self._where}",
                seconds=_PATIENCE_SECONDS,
            )


_validated: ContextVar[str] = ContextVar("validated")


async def _stop(step: str, when: str) -> None:
    directory = Path(os.environ["STOPS"])
    stop = directory / "stop"
    try:
        where = stop.read_text()
    except FileNotFoundError:
        return
    if where != f"{step}:{when}":
        return
    (directory / f"reached-{_validated.get()}").touch()
    while stop.exists():  # noqa: ASYNC110
        await asyncio.sleep(_PROBE_SECONDS)


async def stopping_validate(
    validate: Callable[..., Awaitable[queries_to_send.Decision]], self: Commits, requested: ValidateCommit, *of: Any
) -> queries_to_send.Decision:
    _validated.set(requested.transactional_id)
    decision = await validate(self, requested, *of)
    if decision.outcome is queries_to_send.Outcome.PASS:
        await _stop("verdict", "after")
    return decision


async def stopping_answer(
    answer: Callable[..., Awaitable[queries_to_send.Answer]],
    self: Commits,
    query: queries_to_send.CommitQuery,
    *of: Any,
) -> queries_to_send.Answer:
    await _stop(STEPS[type(query)], "before")
    answered = await answer(self, query, *of)
    await _stop(STEPS[type(query)], "after")
    return answered


if __name__ == "__main__":
    validations = wrap(Commits, "validate", stopping_validate)
    answers = wrap(Commits, "_answer", stopping_answer)
    with Mutant("stopping validator", "see the module", (), validations, answers).live():
        sys.exit(main())
