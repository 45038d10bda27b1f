"""One run: applications consume a topic, transform and produce to another in transactions, while processes are killed.

    input           numbers, written directly to one partition per application
    applications    one process per client and partition, with one transactional id per partition (KIP-98). It reads,
                    produces, sends the offsets and commits. An application that is killed or gives up is restarted,
                    which fences its predecessor
    zombies         the successor starts while its predecessor still runs; the predecessor works until it is fenced
    kills           kill -9 of an application, a proxy or a broker in turn; the next one after progress resumed
    output          a Kafka consumer reads each number once, read committed, without a proxy

The output topic checks expected offsets (`true`), so the commit validator decides on each commit.

Two controls: `plain`, the same applications without transactions, has numbers twice in its output. `direct`, without a
proxy, shows whether the proxy causes a standstill.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import confluent_kafka

from fencepost_dev.cluster import KafkaCluster
from tests.kit import stage as kit
from tests.kit.reading import read
from tests.kit.waiting import until
from tests.support.instances import CLIENTS, Process, Reported
from tests.support.kafka import running_kafka, unique_topic
from tests.support.proxy import CHECKED_BY_NAME
from tests.support.raw import Connection
from tests.support.transactional_worker import PLAIN

TRANSACTION_MS = 10_000
PATIENCE_SECONDS = 240.0
#: An application that has input and makes no progress for this long is killed, as a liveness probe would do. Starting
#: may take longer on a busy machine.
STANDSTILL_SECONDS = 30.0
_START_SECONDS = 120.0
_PROXIES = 2
_POLL_SECONDS = 0.1
#: Without transactions, a zombie runs until its successor has processed this many inputs.
_BESIDE_ZOMBIES = 3
_PROPERTIES = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
}

VICTIMS = ("application", "proxy", "broker", "zombie")
#: The error that a zombie gets, by client and protocol version.
FENCED = re.compile(r"fenced|INVALID_PRODUCER_EPOCH|InvalidProducerEpoch|InvalidProducerIdMapping", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Plan:
    """`kills` – for each client. `per_kill` – inputs that each partition gets between two kills. `plain` – without
    transactions: at least once. `seconds_max` – no kill after this time."""

    kills: int
    per_kill: int = 30
    clients: tuple[str, ...] = CLIENTS
    plain: bool = False
    victims: tuple[str, ...] = VICTIMS
    seconds_max: float = inf


@dataclass(frozen=True, slots=True)
class Stood:
    """An application that made no progress although it had input, and was restarted. `at` – the step of its loop that
    it had begun. `after` – the last kill."""

    at: str
    after: str

    def __str__(self) -> str:
        return f"{self.at} after {self.after}"


@dataclass(slots=True)
class Counts:
    """Counts for one client's partition."""

    inputs: int = 0
    outputs: int = 0
    missing: int = 0
    twice: int = 0
    #: Records of aborted transactions: those that only read_uncommitted returns.
    aborted: int = 0
    out_of_order: int = 0
    transactions: int = 0
    started: int = 0
    killed: int = 0
    zombies: int = 0
    #: Zombies that got an error because they are fenced.
    fenced: int = 0
    stood_still: Counter[Stood] = field(default_factory=Counter)
    gave_up: Counter[str] = field(default_factory=Counter)
    #: By kind of victim: the longest time until the first input that was available at the kill was processed.
    pauses: dict[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return self.inputs > 0 and self.outputs == self.inputs and not (self.missing or self.twice or self.out_of_order)

    @property
    def at_least_once(self) -> bool:
        """At least once but not exactly once: the expected result without transactions."""
        return self.inputs > 0 and self.twice > 0 and not self.missing


@dataclass(slots=True)
class Result:
    counts: dict[str, Counts]
    kills: Counter[str]
    seconds: float

    @property
    def holds(self) -> bool:
        return all(each.holds for each in self.counts.values())

    @property
    def at_least_once(self) -> bool:
        return all(each.at_least_once for each in self.counts.values())


class Application:
    """One client's application on its partition. A thread restarts it whenever it ends or gives up."""

    def __init__(self, stage: Stage, client: str, partition: int, source: str, target: str, *, plain: bool) -> None:
        self.client, self.partition = client, partition
        self.counts = Counts()
        self.reached = 0
        #: (time, offset) of its progress.
        self.progress: list[tuple[float, int]] = []
        self._stage = stage
        self._topics = source, target
        self._plain = plain
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._process: Process | None = None
        self._zombies: list[Process] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        with self._lock:
            if self._process is not None:
                self.counts.killed += 1
                self._process.kill()

    def replace(self) -> None:
        """Start a successor without notifying the running application."""
        with self._lock:
            if self._process is not None:
                self.counts.zombies += 1
                self._zombies.append(self._process)
                self._process = None

    @property
    def haunted(self) -> bool:
        return bool(self._zombies)

    def stop(self) -> None:
        self._ended.set()
        with self._lock:
            for each in (self._process, *self._zombies):
                if each is not None:
                    each.kill()
        self._thread.join(30)

    def pause_seconds(self, since: float, offset: int) -> float:
        """0 if the offset was reached before `since`."""
        moments = (moment for moment, reached in self.progress if reached >= offset and moment >= since)
        return next(moments, since) - since

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                process = self._process = Process(self.client, self._stage.bootstrap(), self._stage.directory)
                self.counts.started += 1
            try:
                self._serve(process)
            except OSError:
                pass  # killed while it got a command
            finally:
                if process not in self._zombies:
                    process.kill()

    def _serve(self, process: Process) -> None:
        source, target = self._topics
        name = f"{target}-{self.partition}"
        process.report("init", "app", PLAIN if self._plain else name, TRANSACTION_MS)
        loop = "forward" if self._plain else "transform"
        process.report(loop, "app", f"{target}-group", source, target, self.partition)
        begun, done = False, 0
        last_observed = time.monotonic()
        while not self._ended.is_set() and self._process is process:
            reported = process.apply_records(within_seconds=_POLL_SECONDS)
            self._observe_zombies()
            if reported is None:
                if not process.running:
                    return
                if self.reached >= self._stage.written:
                    last_observed = time.monotonic()
                elif time.monotonic() - last_observed > (STANDSTILL_SECONDS if begun else _START_SECONDS):
                    stood = Stood(process.at or "init", self._stage.killed)
                    self._stage.note(f"{self.client} {process.log.name} stood still: {stood}")
                    process.probe()
                    self.counts.stood_still[stood] += 1
                    return
                continue
            last_observed = time.monotonic()
            if not reported.ok:
                self._stage.note(f"{self.client} {process.log.name} gave up: {reported.text}")
                self.counts.gave_up[reported.error] += 1
                return
            if begun:
                self._done(reported)
                if self._plain:
                    done += 1
                    self._lay_zombies(done)
            begun = True

    def _done(self, reported: Reported) -> None:
        self.counts.transactions += 1
        self.reached = max(self.reached, int(reported.text))
        self.progress.append((time.monotonic(), self.reached))

    def _observe_zombies(self) -> None:
        """Count what zombies processed before they were fenced: their successors do not process it again."""
        for zombie in tuple(self._zombies):
            while (reported := zombie.apply_records(within_seconds=0)) is not None:
                if reported.ok:
                    self._done(reported)
                    continue
                self._stage.note(f"{self.client} {zombie.log.name}, a zombie, got: {reported.text}")
                if FENCED.search(reported.text):
                    self.counts.fenced += 1
                else:
                    self.counts.gave_up[f"zombie: {reported.error}"] += 1
                zombie.kill()
                self._zombies.remove(zombie)
                break

    def _lay_zombies(self, done: int) -> None:
        """End the zombies without transactions, which are never fenced, after successors repeated some work."""
        if done >= _BESIDE_ZOMBIES:
            for zombie in self._zombies:
                zombie.kill()
            self._zombies.clear()


class Stage(kit.Stage):
    """Three brokers, and two proxies that applications choose at random; or no proxy between them and Kafka."""

    def __init__(self, kafka: KafkaCluster, directory: Path) -> None:
        super().__init__(kafka, directory)
        self.written = 0
        self.killed = "nothing"
        self._began = time.monotonic()

    def bootstrap(self) -> str:
        """The addresses of both proxies, in random order."""
        if not self.proxies:
            return self.kafka.bootstrap
        return ",".join(random.sample([each.bootstrap for each in self.proxies], len(self.proxies)))

    def kill_proxy(self) -> None:
        proxy = random.choice(self.proxies)
        proxy.kill()
        proxy.restart()

    def kill_broker(self) -> None:
        node_id = random.choice(self.kafka.node_ids)
        self.kafka.kill(node_id)
        self.kafka.restart(node_id)

    def without_proxies(self) -> Stage:
        return Stage(self.kafka, self.directory)

    def note(self, text: str) -> None:
        with (self.directory / "events.log").open("a") as log:
            log.write(f"{time.time():.3f} {time.monotonic() - self._began:.3f} {text}\n")


@contextmanager
def stage(directory: Path, *, lie: str = "") -> Iterator[Stage]:
    """`lie` – the fault that `tests/support/lying_proxy.py` injects into code in Python."""
    lying: dict[str, Any] = (
        {"module": "tests.support.lying_proxy", "environment": {"LIE": lie, "FENCEPOST_NATIVE": "off"}} if lie else {}
    )
    with running_kafka(3, properties=_PROPERTIES) as kafka, Stage(kafka, directory) as ready:
        ready.start_proxies({f"proxy{i}": {"config": CHECKED_BY_NAME} | lying for i in range(_PROXIES)})
        yield ready


class Feeder:
    """Writes the input: increasing numbers from 0 to each partition."""

    def __init__(self, stage: Stage, topic: str, partitions: int) -> None:
        self._stage = stage
        self._topic, self._partitions = topic, partitions
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": stage.kafka.bootstrap, "enable.idempotence": True, "log_level": 0}
        )

    def more(self, count: int) -> None:
        for number in range(self.written, self.written + count):
            for partition in range(self._partitions):
                self._producer.produce(self._topic, b"%d" % number, partition=partition)
        assert self._producer.flush(PATIENCE_SECONDS) == 0, "the input was not written"
        self._stage.written += count

    @property
    def written(self) -> int:
        return self._stage.written


def run(stage: Stage, plan: Plan, say: Callable[[str], None] = lambda _: None) -> Result:
    began = time.monotonic()
    source, target = unique_topic("in"), unique_topic("checked")
    stage.written, stage.killed = 0, "nothing"
    with Connection(stage.bootstrap().split(",")[0]) as admin:
        for topic in (source, target):
            assert admin.create_topic(topic, partitions=len(plan.clients), replicas=3) == (0, None)
    feeder = Feeder(stage, source, len(plan.clients))
    applications = [
        Application(stage, client, partition, source, target, plain=plan.plain)
        for partition, client in enumerate(plan.clients)
    ]
    victims = [each for each in plan.victims if stage.proxies or each != "proxy"]
    kills: Counter[str] = Counter()
    try:
        feeder.more(plan.per_kill)
        _all_reach(1, "every application begun", applications)
        for number in range(plan.kills):
            if time.monotonic() - began > plan.seconds_max:
                break
            feeder.more(plan.per_kill)
            victim = stage.killed = victims[number % len(victims)]
            kills[victim] += 1
            since, written = time.monotonic(), feeder.written
            stage.note(f"kill {number + 1}: {victim}")
            {
                "application": lambda: [each.kill() for each in applications],
                "zombie": lambda: _replace(applications, feeder),
                "proxy": stage.kill_proxy,
                "broker": stage.kill_broker,
            }[victim]()
            # Not all of the input: the next victim is killed while it processes.
            _all_reach(written - plan.per_kill + 1, victim, applications)
            pauses = {each.client: each.pause_seconds(since, written - plan.per_kill + 1) for each in applications}
            for each in applications:
                each.counts.pauses[victim] = max(each.counts.pauses.get(victim, 0.0), pauses[each.client])
            feeder.more(plan.per_kill)
            stage.note(f"went on after {pauses}")
            say(f"{number + 1} of {plan.kills}: {victim}")
        _all_reach(feeder.written, "all of it done", applications)
    finally:
        for each in applications:
            each.stop()
    for each in applications:
        _count(stage.kafka.bootstrap, target, each, feeder.written)
    return Result({each.client: each.counts for each in applications}, kills, time.monotonic() - began)


def _replace(applications: Sequence[Application], feeder: Feeder) -> None:
    """Add input meanwhile. Otherwise a predecessor could finish before its successor has started."""
    for each in applications:
        each.replace()

    def all_fenced() -> bool:
        if any(each.haunted for each in applications):
            feeder.more(1)
            return False
        return True

    def fenced() -> str:
        return f"zombies to be fenced: {[(each.client, each.counts.fenced) for each in applications]}"

    until(all_fenced, fenced, seconds=PATIENCE_SECONDS, pause_seconds=_POLL_SECONDS)


def _all_reach(offset: int, what: str, applications: Sequence[Application]) -> None:
    def reached() -> str:
        stood = {each.client: (each.reached, dict(each.counts.gave_up)) for each in applications}
        return f"all to go beyond {offset} after {what}: {stood}"

    until(
        lambda: all(each.reached >= offset for each in applications),
        reached,
        seconds=PATIENCE_SECONDS,
        pause_seconds=_POLL_SECONDS,
    )


def _count(bootstrap: str, topic: str, application: Application, written: int) -> None:
    counts = application.counts
    committed = _read(bootstrap, topic, application.partition, "read_committed")
    everything = _read(bootstrap, topic, application.partition, "read_uncommitted")
    found = Counter(committed)
    counts.inputs, counts.outputs = written, len(committed)
    counts.missing = sum(number not in found for number in range(written))
    counts.twice = sum(times - 1 for times in found.values())
    counts.aborted = len(everything) - len(committed)
    counts.out_of_order = sum(a > b for a, b in pairwise(committed))


def _read(bootstrap: str, topic: str, partition: int, isolation: str) -> list[int]:
    return [int(message.value()) for message in read(bootstrap, (topic, partition), isolation=isolation)]


def table(result: Result) -> list[str]:
    rows = [
        "| client | inputs | outputs | missing | twice | out of order | aborted on the way | transactions | started "
        "| killed | zombies; fenced | stood still |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {client} | {each.inputs} | {each.outputs} | {each.missing} | {each.twice} | {each.out_of_order} "
        f"| {each.aborted} | {each.transactions} | {each.started} | {each.killed} | {each.zombies}; {each.fenced} "
        f"| {_stood_still(each)} |"
        for client, each in result.counts.items()
    ]
    return rows


def _stood_still(counts: Counts) -> str:
    times = sum(counts.stood_still.values())
    return f"{times}: {', '.join(f'{stood} {n}' for stood, n in counts.stood_still.items())}" if times else "0"


def pauses_table(results: dict[str, Result]) -> list[str]:
    """Longest pauses in seconds, by kind of victim, for several runs."""
    clients = next(iter(results.values())).counts
    rows = ["| killed | run | " + " | ".join(clients) + " |", "|---|---|" + "---|" * len(clients)]
    for victim in VICTIMS:
        for name, result in results.items():
            if victim in result.kills:
                cells = [f"{each.pauses.get(victim, 0.0):.1f}" for each in result.counts.values()]
                rows.append(f"| {victim} | {name} | " + " | ".join(cells) + " |")
    return rows
