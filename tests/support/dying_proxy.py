"""`fencepost proxy` that dies, or stops, at one step of an expansion: `python -m tests.support.dying_proxy`.

`$STOP_AT` is `STEP:WHEN:HOW`. STEP: one of `Step`, or `closed` (the record that this process's barrier is closed).
WHEN: `before` or `after` the step. HOW: `die`, by SIGKILL; or a path: it creates `PATH.reached`, and continues once
file PATH exists.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from fencepost_proxy.cli.main import main
from fencepost_proxy.expansion import procedure as ex
from fencepost_proxy.expansion.history import EXPANSION_CLOSED
from fencepost_proxy.services.expansion_effects import ExpansionEffects
from tests.support.mutants import Mutant, wrap

STEP, WHEN, HOW = os.environ["STOP_AT"].split(":", 2)
_PROBE_SECONDS = 0.02


async def _stop(step: str, when: str) -> None:
    if (step, when) != (STEP, WHEN):
        return
    if HOW == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    Path(f"{HOW}.reached").touch()  # noqa: ASYNC240
    while not Path(HOW).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(_PROBE_SECONDS)


Carries = Callable[..., Awaitable[ex.Answer]]


async def stopping_answer(
    answer: Carries, self: ExpansionEffects, procedure: ex.Procedure, requested: ex.Effect
) -> ex.Answer:
    step = procedure.step.value
    if step == ex.Step.CREATE.value and isinstance(requested, ex.Describe):
        return await answer(self, procedure, requested)  # only verifies the topic; the step's request follows
    await _stop(step, "before")
    answered = await answer(self, procedure, requested)
    await _stop(step, "after")
    return answered


async def stopping_append(append: Carries, self: ExpansionEffects, requested: ex.Append) -> ex.Answer:
    closed = (
        requested.records[0].key.startswith(f"{EXPANSION_CLOSED}/".encode()) and requested.records[0].value is not None
    )
    if closed:
        await _stop("closed", "before")
    answered = await append(self, requested)
    if closed:
        await _stop("closed", "after")
    return answered


_answers = wrap(ExpansionEffects, "answer", stopping_answer)
_appends = wrap(ExpansionEffects, "append", stopping_append)
# For the whole process.
_live = Mutant("dying proxy", "see the module", (), _answers, _appends).live()
_live.__enter__()

if __name__ == "__main__":
    sys.exit(main())
