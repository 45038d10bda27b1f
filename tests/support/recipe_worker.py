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

from fencepost import (
    FencepostError,
    LoadTakenOverError,
    NotLeaderError,
    Record,
    RetryPolicy,
    VersionMismatchError,
)

LOAD_PARTITIONS, LOAD_UNITS = 3, 2_000
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

    def writer(self, topic: str, partition: int = 0) -> Any:
        return self._make(self._adapter.LogWriter, topic, partition)

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
                    await of(made.start())
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
                await asyncio.sleep(random.uniform(0, 0.05))  # without pauses, claims are refused most of the time
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


async def lock(library: Library, topic: str, name: str) -> None:
    """Acquire, renew and release."""
    made = await library.opened("Lock", partial(library.writer, topic), name, lease_seconds=1.0)
    while True:
        try:
            token = await of(made.acquire(timeout_seconds=30))
            for _ in range(random.randint(0, 4)):
                say(token=token)
                await asyncio.sleep(random.uniform(0, 0.2))
                await of(made.renew())
            if random.random() < 0.7:
                await of(made.release())
                await asyncio.sleep(random.uniform(0, 0.3))
            else:
                await asyncio.sleep(1.0)
        except FencepostError as error:
            say(failed=str(error))


async def table(library: Library, topic: str, name: str) -> None:
    """Put if version, delete and get. `begin`, `at`: when the call began and ended, on the machine's clock."""
    made = await library.opened("Table", partial(library.writer, topic))
    for number in itertools.count():
        key, value = f"key-{random.randint(0, 2)}", f"{name} {number}"
        known = made.entries.get(key)
        expected = random.choice([None, -1 if known is None else known.version])
        call: dict[str, Any] = {"key": key, "begin": time.monotonic(), "expected": expected}
        say(**call, value=value, number=number)  # its outcome is unknown until it is printed
        try:
            if random.random() < 0.4:
                entry = await of(made.get(key))
                say(done=number, observed=[-1, None] if entry is None else [entry.version, entry.value.decode()])
            else:
                say(done=number, version=await of(made.put(key, value.encode(), expected)))
        except VersionMismatchError as error:
            say(done=number, observed=[error.actual, None])
        except FencepostError as error:
            say(failed=str(error), undone=number if error.outcome == "refused" else None)
        await asyncio.sleep(random.uniform(0, 0.05))


async def queue(library: Library, topic: str, name: str) -> None:
    """Work off the items of the topic with `items-` before its name. Take over when the leader is silent."""
    made = await library.opened(
        "Queue", partial(library.reader, f"items-{topic}"), partial(library.writer, topic), name
    )
    while True:
        try:
            if made.term is not None:
                items = await of(made.take(random.randint(1, 10)))
                if items:
                    await of(made.finish([Record(b"result of " + (item.value or b"")) for item in items]))
                    say(finished=len(items))
                await asyncio.sleep(random.uniform(0, 0.1))
            elif made.silent_seconds > 0.3 or random.random() < 0.05:
                say(claimed=await of(made.claim()))
            else:
                await of(made.read_to_end())
                await asyncio.sleep(0.05)
        except FencepostError as error:
            say(failed=str(error))
            if made.term is None or error.outcome == "unknown":
                await of(made.read_to_end())


def loaded(unit: int) -> list[Record]:
    """The rows of a unit of the load."""
    return [Record(b"%d.%d" % (unit, row), b"%d" % ((unit + row) % 11)) for row in range(unit % 4)]


async def loader(library: Library, topic: str, name: str) -> None:
    """Load the units from where the log says, until it has all of them."""
    while True:
        writers = partial(lambda count: [library.writer(topic, each) for each in range(count)], LOAD_PARTITIONS)
        made = await library.opened("Loader", "numbers", writers, group_bytes=random.choice([200, 5_000]))
        try:
            for unit in range(int(made.position or 0) + 1, LOAD_UNITS + 1):
                await of(made.append(loaded(unit), b"%d" % unit))
                await asyncio.sleep(0.001)
            await of(made.flush())
            say(complete=LOAD_UNITS)
        except LoadTakenOverError as error:
            say(taken_over=error.offset)
        except FencepostError as error:
            say(failed=str(error))
        await library.close(made)
        await asyncio.sleep(random.uniform(0, 1))


STORIES: dict[str, Callable[[Library, str, str], Awaitable[None]]] = {
    "leader": leader,
    "registry": registry,
    "lock": lock,
    "table": table,
    "queue": queue,
    "loader": loader,
}


async def main() -> None:
    recipe, library, bootstrap, topic, name = sys.argv[1:]
    await STORIES[recipe](Library(library, bootstrap), topic, name)


if __name__ == "__main__":
    asyncio.run(main())
