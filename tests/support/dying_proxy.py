"""`fencepost proxy` that dies or stops at one step of an expansion: `python -m tests.support.dying_proxy`.

`$STOP_AT` is `STEP:WHEN:HOW`. STEP: one of `Step` (the requested action), or `closed` (reporting that this process
blocks appends). WHEN: `before` or `after` the step. HOW: `die`, by SIGKILL; `die-once:PATH`, as `die` unless the file
PATH exists, and creates it; or a path: then the proxy creates `PATH.reached`, and continues once the file PATH exists.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from fencepost_proxy.cli.main import main
from fencepost_proxy.net.expansions import Expansions
from fencepost_proxy.topics import expanding as ex
from fencepost_proxy.topics.expansions import EXPANSION_CLOSED, Expansion

STEP, WHEN, HOW = os.environ["STOP_AT"].split(":", 2)
_PROBE_SECONDS = 0.02


async def _stop(step: str, when: str) -> None:
    if (step, when) != (STEP, WHEN):
        return
    if HOW == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    how, _, path = HOW.partition(":")
    if how == "die-once":
        try:
            Path(path).touch(exist_ok=False)  # noqa: ASYNC240
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
    Path(f"{HOW}.reached").touch()  # noqa: ASYNC240
    while not Path(HOW).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(_PROBE_SECONDS)


answer, append = Expansions._answer, Expansions._append


async def stopping_answer(self: Expansions, expansion: Expansion, requested: ex.Effect) -> ex.Answer:
    step = self._procedures[expansion.proposal].step.value
    if step == ex.Step.CREATE.value and isinstance(requested, ex.Describe):
        return await answer(self, expansion, requested)  # only verifies the topic: the next request is this step's
    await _stop(step, "before")
    answered = await answer(self, expansion, requested)
    await _stop(step, "after")
    return answered


async def stopping_append(self: Expansions, requested: ex.Append) -> ex.Answer:
    closed = (
        requested.records[0].key.startswith(f"{EXPANSION_CLOSED}/".encode()) and requested.records[0].value is not None
    )
    if closed:
        await _stop("closed", "before")
    answered = await append(self, requested)
    if closed:
        await _stop("closed", "after")
    return answered


Expansions._answer = stopping_answer  # type: ignore[method-assign]
Expansions._append = stopping_append  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
