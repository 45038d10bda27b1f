"""Load a million changes of PostgreSQL, while loaders, the proxy, the broker and PostgreSQL are killed a hundred times.

    python -m tests.soak.postgres_load --changes 1000000 --kills 100 --minutes 50

Two loaders (examples/sources/postgres.py) run at once. Prints how often each was killed, and whether each change is in
the topic once and in order. Exit status 1: it is not. After `--minutes`, it checks what was written so far.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fencepost.kafka_python import LogReader
from fencepost_dev.cluster import KafkaCluster
from tests.kit.campaigns import Campaign, campaign, leave
from tests.support import clients
from tests.support.docs import ROOT
from tests.support.postgres import Postgres, missing_program, postgres_server
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.senders import free_proxy_port

PARTITIONS = 2
_IDS = 200
_LOADERS = 2
_LAST_LOAD_SECONDS = 1_800
#: Then loads that begin with a group of more changes than a loader reads at a time, or after all of them.
_LAST_CHANGES = 12_000
_AGAIN_SECONDS = 120
_ORDER = ("loader", "loader", "proxy", "loader", "PostgreSQL", "loader", "broker", "loader", "proxy", "loader")


@dataclass(frozen=True, slots=True)
class Plan:
    changes: int
    kills: int
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Stage:
    postgres: Postgres
    proxy: ProxyProcess
    kafka: KafkaCluster
    topic: str

    @property
    def command(self) -> list[str]:
        command = [sys.executable, str(ROOT / "examples/sources/postgres.py"), self.postgres.connection]
        command += ["--slot", "to_kafka", "--publication", "orders", "--topic", self.topic]
        return [*command, "--bootstrap", self.proxy.bootstrap]


@dataclass(slots=True)
class Result:
    written: int = 0
    seconds: float = 0.0
    last_load_seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)
    #: Records in the topic.
    found: int = 0
    problems: list[str] = field(default_factory=list)

    def table(self) -> Iterator[str]:
        kills = ", ".join(f"{count} of {what}" for what, count in self.kills.most_common())
        yield f"changes written     {self.written:,} in {self.seconds:,.0f} s"
        yield f"kills               {self.kills.total()}: {kills}"
        yield f"last load           {self.last_load_seconds:,.0f} s"
        yield f"records found       {self.found:,}"
        yield f"not once, in order  {len(self.problems)}"
        yield from self.problems[:10]


class Changes:
    """Transactions on a table. `expected`: the new numbers of each id in commit order, None for deleted."""

    def __init__(self, postgres: Postgres, rng: random.Random) -> None:
        self._postgres, self._rng = postgres, rng
        self._number = 0
        self.expected: defaultdict[int, list[int | None]] = defaultdict(list)
        postgres.execute("CREATE TABLE orders (id int PRIMARY KEY, number int)")
        postgres.execute("CREATE PUBLICATION orders FOR TABLE orders")
        postgres.execute("SELECT pg_create_logical_replication_slot('to_kafka', 'pgoutput')")

    def write(self, count: int, *, at_once: bool = False) -> int:
        """At least `count` changes, or exactly these in one transaction."""
        statements, written = [], 0
        while written < count:
            statements.append("BEGIN;")
            for _ in range(count if at_once else self._rng.choice([1, 1, 3, 40, 40, count // 20 + 1])):
                statements.append(self._change(self._rng.randrange(_IDS)))
                written += 1
            statements.append("COMMIT;")
        self._postgres.execute("\n".join(statements))
        return written

    def _change(self, of: int) -> str:
        numbers = self.expected[of]
        if numbers and numbers[-1] is not None and self._rng.random() < 0.1:
            numbers.append(None)
            return f"DELETE FROM orders WHERE id = {of};"
        self._number += 1
        numbers.append(self._number)
        conflict = f"ON CONFLICT (id) DO UPDATE SET number = {self._number}"
        return f"INSERT INTO orders VALUES ({of}, {self._number}) {conflict};"


class Loaders:
    """Processes that load until they are killed."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._processes = [self._start() for _ in range(_LOADERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def kill_one(self, rng: random.Random) -> None:
        process = self._processes.pop(rng.randrange(len(self._processes)))
        assert process.poll() is None, "a loader ended without a kill"
        process.kill()
        process.wait()
        self._processes.append(self._start())

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def load_under_kills(plan: Plan, stage: Stage) -> Result:
    rng, result = random.Random(plan.seed), Result()
    changes, began = Changes(stage.postgres, rng), time.monotonic()
    with contextlib.closing(Loaders(stage.command)) as loaders:
        for number in range(plan.kills):
            if time.monotonic() - began > plan.seconds:
                break
            result.written += changes.write(plan.changes // plan.kills + 1)
            time.sleep(rng.uniform(0.2, 1.5))
            what = _ORDER[number % len(_ORDER)]
            _kill(what, stage, loaders, rng)
            result.kills[what] += 1
        time.sleep(rng.uniform(0.5, 2))
    result.seconds = time.monotonic() - began
    began = time.monotonic()
    result.written += changes.write(_LAST_CHANGES, at_once=True)
    try:
        for seconds in (_LAST_LOAD_SECONDS, _AGAIN_SECONDS, _AGAIN_SECONDS):
            subprocess.run([*stage.command, "--once"], check=True, timeout=seconds, capture_output=True)
            result.written += changes.write(1)
        subprocess.run([*stage.command, "--once"], check=True, timeout=_AGAIN_SECONDS, capture_output=True)
    except subprocess.TimeoutExpired as late:
        result.problems.append(f"a last load did not end within {late.timeout:,.0f} s")
    result.last_load_seconds = time.monotonic() - began
    _compare(stage, changes, result)
    return result


def _kill(what: str, stage: Stage, loaders: Loaders, rng: random.Random) -> None:
    if what == "proxy":
        stage.proxy.kill()
        stage.proxy.restart()
    elif what == "broker":
        (broker,) = stage.kafka.node_ids
        stage.kafka.kill(broker)
        stage.kafka.restart(broker)
    elif what == "PostgreSQL":
        stage.postgres.stop()
        stage.postgres.start()
    else:
        loaders.kill_one(rng)


def _compare(stage: Stage, changes: Changes, result: Result) -> None:
    found: defaultdict[int, list[int | None]] = defaultdict(list)
    places: defaultdict[int, set[int]] = defaultdict(set)
    partitions = [(stage.topic, each) for each in range(PARTITIONS)]
    with LogReader(partitions, bootstrap_servers=stage.kafka.bootstrap) as log:
        for (_, partition), record in log:
            of = int(json.loads(record.key or b"")["id"])
            found[of].append(None if record.value is None else int(json.loads(record.value)["number"]))
            places[of].add(partition)
            result.found += 1
    for of in found.keys() | changes.expected.keys():
        if found[of] != changes.expected[of] or len(places[of]) != 1:
            result.problems.append(f"id {of}: {len(changes.expected[of])} changes, {len(found[of])} records")


ARGUMENTS = {
    "--changes": {"type": int, "default": 1_000_000},
    "--kills": {"type": int, "default": 100},
    "--minutes": {"type": float, "default": 50.0},
    "--seed": {"type": int, "default": random.randrange(1 << 31)},
}


def prove(this: Campaign) -> bool:
    options = this.options
    if (missing := missing_program()) is not None:
        raise SystemExit(f"needs PostgreSQL's {missing} in the PATH")
    plan = Plan(options.changes, options.kills, options.minutes * 60, options.seed)
    print(f"seed {plan.seed}", flush=True)
    with (
        KafkaCluster() as kafka,
        ProxyProcess(kafka.bootstrap, this.directory, config=CHECKED_BY_NAME, port=free_proxy_port()) as proxy,
        postgres_server() as postgres,
    ):
        topic = clients.create_topic(proxy.bootstrap, "required-load", partitions=PARTITIONS)
        result = load_under_kills(plan, Stage(postgres, proxy, kafka, topic))
    print("\n".join(result.table()))
    return not result.problems


if __name__ == "__main__":
    leave(campaign("soak.postgres_load", prove, ARGUMENTS))
