"""`python -m tests.support.recipe_worker RECIPE LIBRARY BOOTSTRAP TOPIC NAME`: uses a recipe until it is killed.

Prints one JSON line for each outcome, and continues after every error. Each recipe is written once, for the blocking
clients and for aiokafka.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fencepost import FencepostError, NotLeaderError, Record, RetryPolicy

RETRY = RetryPolicy(attempt_seconds=5, total_seconds=60, pause_seconds=0.02, pause_seconds_max=0.5)


class Library:
    """`writer` and `recipe` make objects of one client library; `of` awaits a result if it is awaitable."""

    def __init__(self, name: str, bootstrap: str) -> None:
        self.name = name
        self._adapter = importlib.import_module("fencepost." + name.removesuffix("-kafka").replace("-", "_"))
        self._recipes = importlib.import_module("fencepost.recipes" + (".aiokafka" if name == "aiokafka" else ""))
        self._configs: Any = {"bootstrap_servers": bootstrap}
        if "confluent" in name:
            self._configs = {"bootstrap.servers": bootstrap}

    def writer(self, topic: str) -> Any:
        return self._make(self._adapter.LogWriter, topic, 0)

    def reader(self, topic: str) -> Any:
        return self._make(self._adapter.LogReader, [(topic, 0)])

    def _make(self, kind: Any, *args: Any) -> Any:
        if "bootstrap.servers" in self._configs:
            return kind(*args, self._configs, retry=RETRY)
        return kind(*args, retry=RETRY, **self._configs)

    async def opened(self, recipe: str, *args: Any, **options: Any) -> Any:
        """The recipe on the topics of `args`, started. The proxy may be starting, too."""
        give_up = time.monotonic() + RETRY.total_seconds
        while True:
            made = None
            try:
                made = getattr(self._recipes, recipe)(*(arg() if callable(arg) else arg for arg in args), **options)
                if hasattr(made, "start"):
                    await made.start()
                return made
            except Exception:
                if hasattr(made, "stop"):
                    await made.stop()
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(0.2)

    async def close(self, made: Any) -> None:
        await of(made.stop() if hasattr(made, "stop") else made.close())


async def of(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def say(**outcome: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **outcome}), flush=True)


async def leader(library: Library, topic: str, name: str) -> None:
    """Claim now and then, whether the other leader is silent or not, and append while leading. A value is its term."""
    made = await library.opened("Leader", partial(library.writer, topic), name)
    while True:
        try:
            if made.term is not None:
                term = made.term
                await of(made.append([Record(b"%d" % term)] * random.randint(1, 3)))
                say(appended=term)
            elif random.random() < 0.3:
                say(claimed=await of(made.claim()))
            else:
                await of(made.read_to_end())
                await asyncio.sleep(random.uniform(0, 0.1))
        except NotLeaderError as error:
            say(deposed=error.term)
        except FencepostError as error:
            say(failed=str(error))
            await of(made.read_to_end())


async def registry(library: Library, topic: str, name: str) -> None:
    """Register names that all processes register, each with its own value."""
    made = await library.opened("Registry", partial(library.writer, topic))
    for number in itertools.count():
        registered = f"name-{number // 4 + random.randint(0, 3)}"
        try:
            entry = await of(made.register(registered, name.encode()))
            say(name=registered, number=entry.number, value=entry.value.decode())
        except FencepostError as error:
            say(failed=str(error))


STORIES: dict[str, Callable[[Library, str, str], Awaitable[None]]] = {"leader": leader, "registry": registry}


async def main() -> None:
    recipe, library, bootstrap, topic, name = sys.argv[1:]
    await STORIES[recipe](Library(library, bootstrap), topic, name)


if __name__ == "__main__":
    asyncio.run(main())
