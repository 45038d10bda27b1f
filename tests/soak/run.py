"""One run: start the stage, writers and faults; repair everything, read the log and check the history."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit import checker
from tests.kit.history import OK, History, listed
from tests.kit.java import JavaProducers
from tests.kit.stage import NODES
from tests.kit.writers import REOPENED, Crew
from tests.soak import stage as stages
from tests.soak.faults import Faults
from tests.soak.stage import PROXIES, Stage
from tests.soak.writers import KINDS, connect_to_leader
from tests.support.raw import Closed, batch
from tests.support.writers import reported_by

_PROGRESS_SECONDS = 5.0
#: The share of wrong expected offsets.
_WRONG = 0.06
_JOIN_SECONDS = 75.0
_HEARTBEAT_SECONDS = 90.0
#: Other writers may overtake a probe repeatedly, so the probe ends them after this time.
_RACE_SECONDS = 15.0
#: Requests in flight after all clients and proxies ended have this long before the log is read.
_LAST_SECONDS = 3.0

HISTORY = "history.json"
_SEED = "seed"

#: Topic → its writers: kind (`writers.KINDS`) and proxy. Both proxies serve `required` topics, only `a` the others.
WRITERS = {
    "required-race": "raw a, raw b, raw-pipeline a, raw-pipeline b, raw-named a, confluent b, java a",
    "required-log": "kafka-python-log a, aiokafka-log b, confluent-log a, raw-named b",
    "required-mixed": (
        "raw-plain a, raw-sequenced b, raw-pipeline-sequenced a, kafka-python a, kafka-python-headers b, aiokafka a, "
        "aiokafka-headers b, confluent-headers a, confluent-headers-not-idempotent b, java-pipeline b, java-named a"
    ),
    "checked-mixed": (
        "raw a, raw-pipeline a, raw-pipeline-sequenced a, raw-plain a, raw-sequenced a, confluent-plain a, "
        "aiokafka-plain a, kafka-python-plain a, java-plain a, kafka-python a"
    ),
    "checked-transactions": (
        "confluent-transactional a, aiokafka-transactional a, java-transactional a, raw a, confluent a, java a"
    ),
}
#: Topic → whether an expected offset is required.
TOPICS = {topic: "required" if topic.startswith("required") else "true" for topic in WRITERS}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """`pace_seconds`: approximate pause of a writer after each append."""

    seconds: float
    seed: int
    directory: Path
    pace_seconds: float = 0.15
    faults: bool = True
    fencing: bool = True


@dataclass(slots=True)
class Result:
    history: History
    decision: checker.Decision
    #: Fault proxy → connections that its faults met.
    hits: Counter[str]
    #: Problems besides findings: a topic that accepts no appends, a writer that hangs.
    problems: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.decision.findings and not self.problems

    def summary(self) -> Iterator[str]:
        yield from self.history.table()
        faults = Counter(kind for _, kind, _ in self.history.events if kind not in (REOPENED, _SEED))
        yield f"faults: {faults.total()}: " + listed(faults)
        yield "faults that met a connection: " + listed(self.hits)
        reopened = Counter(text.partition(":")[0] for _, kind, text in self.history.events if kind == REOPENED)
        yield "clients reopened after: " + listed(reopened)
        yield from (f"PROBLEM: {problem}" for problem in self.problems)
        yield from checker.report(self.decision)


def run(plan: Plan, say: Say = print, *, interrupted: threading.Event | None = None) -> Result:
    """Write the history to the plan's directory. `interrupted`: end early, and check what was recorded."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    interrupted = interrupted or threading.Event()
    history = History()
    history.event(_SEED, f"{plan.seed}")
    problems: list[str] = []
    with stages.stage(plan.directory, fencing=plan.fencing) as stage:
        for index, (topic, mode) in enumerate(TOPICS.items()):
            leader = NODES[index % len(NODES)]
            stage.create(topic, on=[leader, *(node_id for node_id in NODES if node_id != leader)])
            history.topic(topic, mode, one_proxy=mode == "true")
        with JavaProducers(plan.directory / "java.log") as java:
            crew = Crew(stage.bootstrap, history, java, pace_seconds=plan.pace_seconds, seed=plan.seed, wrong=_WRONG)
            writers = [
                KINDS[kind](kind, crew, topic, proxy)
                for topic, each in WRITERS.items()
                for kind, proxy in (one.split() for one in each.split(", "))
            ]
            faults = Faults(stage, list(TOPICS), plan.seed, history)
            try:
                for writer in writers:
                    writer.start()
                if plan.faults:
                    faults.start()
                _watch(plan, crew, say, interrupted)
                say("mending")
                faults.stop()
                stage.mend()
                problems += _still_live(stage, history, crew.over, say)
            finally:
                crew.over.set()
            deadline = time.monotonic() + _JOIN_SECONDS
            for writer in writers:
                try:
                    writer.join(max(0.1, deadline - time.monotonic()))
                except AssertionError as problem:
                    problems.append(f"{problem}")
        hits = stage.fault_proxies.hits()
        for proxy in stage.proxies:
            proxy.close()
        problems += [problem for name, proxy in stage.named.items() for problem in crashes(name, proxy.log)]
        time.sleep(_LAST_SECONDS)
        say("reading the log")
        for topic in TOPICS:
            history.read_log(stage.log, topic, committed_at=stage.kafka.bootstrap)
    history.save(plan.directory / HISTORY)
    say("checking")
    return Result(history, checker.check(history), hits, problems)


def _watch(plan: Plan, crew: Crew, say: Say, interrupted: threading.Event) -> None:
    started = time.monotonic()
    last = 0
    while (passed := time.monotonic() - started) < plan.seconds:
        if interrupted.wait(min(_PROGRESS_SECONDS, plan.seconds - passed)):
            say("interrupted")
            return
        outcomes = crew.history.outcomes()
        done = outcomes.total()
        say(
            f"{time.monotonic() - started:5.0f} s  {done} operations ({done - last} more)  {listed(outcomes)}  "
            f"events {len(crew.history.events) - 1}"
        )
        last = done


def crashes(proxy: str, log_text: str) -> Iterator[str]:
    """Stack traces in a proxy's log, each with its count."""
    lines = log_text.splitlines()
    found: Counter[str] = Counter()
    for index, line in enumerate(lines):
        if line.strip() == "Traceback (most recent call last):":
            # Stack frames are indented deeper than the exception line that ends them.
            depth = len(line) - len(line.lstrip())
            rest = (each for each in lines[index + 1 :] if len(each) - len(each.lstrip()) <= depth)
            found[next(rest, "").strip()] += 1
    for error, count in found.most_common():
        yield f"proxy {proxy} crashed {count} times with {error}; see its log"


def _still_live(stage: Stage, history: History, over: threading.Event, say: Say) -> list[str]:
    """After the repair, every topic accepts an append through every proxy that serves it.

    `over` ends the writers if they keep these appends from winning.
    """
    problems = []
    for topic, mode in TOPICS.items():
        for proxy in PROXIES if mode == "required" else PROXIES[:1]:
            if not append_at_last(stage, history, topic, proxy, over):
                problems.append(f"{topic} takes no appends through proxy {proxy} after all repairs")
                say(problems[-1])
    return problems


def append_at_last(stage: Stage, history: History, topic: str, proxy: str, over: threading.Event) -> bool:
    began = time.monotonic()
    end = 0
    number = 0
    while (passed := time.monotonic() - began) < _HEARTBEAT_SECONDS:
        if passed > _RACE_SECONDS:
            over.set()
        number += 1
        each = f"probe/{proxy}/{topic}/{number}"
        with (
            contextlib.suppress(OSError, Closed, AssertionError),
            connect_to_leader(stage.bootstrap(proxy), topic, 10.0) as connection,
        ):
            operation = history.call(f"probe/{proxy}", topic, [each], expected=end)
            reported = reported_by(connection.append(topic, batch(each.encode(), expected=end)))
            history.reported(operation, reported)
            if reported.outcome == OK:
                return True
            end = reported.actual if reported.actual is not None else end
        time.sleep(0.02)
    return False
