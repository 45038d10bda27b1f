"""One run: start the stage, writers and faults; repair everything, read the log and check the history."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.kit import checker, final_log
from tests.kit.history import OK, OUTCOMES, Manner, Recorder
from tests.kit.java import JavaProducers
from tests.kit.stage import NODES
from tests.soak import stage as stages
from tests.soak import writers as kinds
from tests.soak.faults import Faults
from tests.soak.stage import PROXIES, Stage
from tests.soak.writers import Crew, Writer, reported_by
from tests.support.raw import Closed, Connection, batch

_PROGRESS_SECONDS = 5.0
_JOIN_SECONDS = 75.0
_HEARTBEAT_SECONDS = 90.0
#: Other writers may overtake a probe repeatedly, so the probe ends them after this time.
_RACE_SECONDS = 15.0
#: Requests in flight after all clients and proxies ended have this long before the log is read.
_LAST_SECONDS = 3.0

HISTORY, LOG, ABOUT = "history.jsonl", "log.jsonl", "about.json"

#: Topic → whether an expected offset is required. Both proxies serve `required` topics, only `a` the others.
TOPICS = {
    "required-race": "required",
    "required-log": "required",
    "required-mixed": "required",
    "checked-mixed": "true",
    "checked-transactions": "true",
}

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
    decision: checker.Decision
    counts: Counter[tuple[str, str]]
    codes: Counter[tuple[str, str]]
    faults: Counter[str]
    hits: Counter[str]
    transactions: Counter[str]
    renewed: Counter[str]
    records: dict[str, int]
    #: Problems besides findings: a topic that accepts no appends, a writer that hangs.
    problems: list[str] = field(default_factory=list)

    @property
    def operations(self) -> int:
        return self.counts.total()

    @property
    def holds(self) -> bool:
        return not self.decision.findings and not self.problems

    def summary(self) -> Iterator[str]:
        yield f"{'writers':<40}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES)
        for kind in sorted({kind for kind, _ in self.counts}):
            yield f"{kind:<40}" + "".join(f"{self.counts[kind, outcome]:>12}" for outcome in OUTCOMES)
        outcomes: Counter[str] = Counter()
        for (_, outcome), count in self.counts.items():
            outcomes[outcome] += count
        yield f"{'all ' + str(self.operations):<40}" + "".join(f"{outcomes[outcome]:>12}" for outcome in OUTCOMES)
        codes: Counter[str] = Counter()
        for (_, code), count in self.codes.items():
            codes[code] += count
        yield "errors: " + _listed(codes)
        yield "transactions: " + _listed(self.transactions)
        yield f"faults: {self.faults.total()}: " + _listed(self.faults)
        yield "faults that met a connection: " + _listed(self.hits)
        yield "clients reopened after: " + _listed(self.renewed)
        yield f"log: {sum(self.records.values())} records and markers: " + _listed(Counter(self.records))
        yield from (f"PROBLEM: {problem}" for problem in self.problems)
        yield from checker.report(self.decision)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common()) or "none"


def crew_of(crew: Crew) -> list[Writer]:
    race, mixed, checked, transactions = (
        "required-race",
        "required-mixed",
        "checked-mixed",
        "checked-transactions",
    )
    return [
        kinds.RawWriter(crew, race, "a"),
        kinds.RawWriter(crew, race, "b"),
        kinds.RawPipeline(crew, race, "a"),
        kinds.RawPipeline(crew, race, "b"),
        kinds.RawRetrier(crew, race, "a"),
        kinds.Confluent(crew, race, "b"),
        kinds.JavaWriter(crew, race, "a"),
        kinds.KafkaPythonLog(crew, "required-log", "a"),
        kinds.AiokafkaLog(crew, "required-log", "b"),
        kinds.ConfluentLog(crew, "required-log", "a"),
        kinds.RawRetrier(crew, "required-log", "b"),
        kinds.RawPassThroughWriter(crew, mixed, "a"),
        kinds.RawSequenced(crew, mixed, "b"),
        kinds.RawSequencedPipeline(crew, mixed, "a"),
        kinds.KafkaPython(crew, mixed, "a"),
        kinds.KafkaPythonHeaders(crew, mixed, "b"),
        kinds.Aiokafka(crew, mixed, "a"),
        kinds.AiokafkaHeaders(crew, mixed, "b"),
        kinds.ConfluentHeaders(crew, mixed, "a"),
        kinds.ConfluentNotIdempotent(crew, mixed, "b"),
        kinds.JavaPipeline(crew, mixed, "b"),
        kinds.JavaNamed(crew, mixed, "a"),
        kinds.RawWriter(crew, checked, "a"),
        kinds.RawPipeline(crew, checked, "a"),
        kinds.RawSequencedPipeline(crew, checked, "a"),
        kinds.RawPassThroughWriter(crew, checked, "a"),
        kinds.RawSequenced(crew, checked, "a"),
        kinds.ConfluentPassThrough(crew, checked, "a"),
        kinds.AiokafkaPassThrough(crew, checked, "a"),
        kinds.KafkaPythonPassThrough(crew, checked, "a"),
        kinds.JavaPassThrough(crew, checked, "a"),
        kinds.KafkaPython(crew, checked, "a"),
        kinds.ConfluentTransactional(crew, transactions, "a"),
        kinds.AiokafkaTransactional(crew, transactions, "a"),
        kinds.JavaTransactional(crew, transactions, "a"),
        kinds.RawWriter(crew, transactions, "a"),
        kinds.Confluent(crew, transactions, "a"),
        kinds.JavaWriter(crew, transactions, "a"),
    ]


def run(plan: Plan, say: Say = print, *, interrupted: threading.Event | None = None) -> Result:
    """Write history, log and seed to the plan's directory. `interrupted`: end early, and check what was recorded."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    about = {"seed": plan.seed, "seconds": plan.seconds, "pace_seconds": plan.pace_seconds}
    (plan.directory / ABOUT).write_text(json.dumps(about) + "\n")
    interrupted = interrupted or threading.Event()
    recorder = Recorder(plan.directory / HISTORY)
    problems: list[str] = []
    with stages.stage(plan.directory, fencing=plan.fencing) as stage:
        for index, (topic, mode) in enumerate(TOPICS.items()):
            leader = NODES[index % len(NODES)]
            stage.create(topic, on=[leader, *(node_id for node_id in NODES if node_id != leader)])
            recorder.topic(topic, mode, one_proxy=mode == "true")
        with JavaProducers(plan.directory / "java.log") as java:
            crew = Crew(stage, recorder, java, plan.seed, plan.pace_seconds)
            writers = crew_of(crew)
            faults = Faults(stage, list(TOPICS), plan.seed, recorder)
            try:
                for writer in writers:
                    writer.start()
                if plan.faults:
                    faults.start()
                _watch(plan, crew, say, interrupted)
                say("mending")
                faults.stop()
                stage.mend()
                problems += _still_live(stage, recorder, crew.over, say)
            finally:
                crew.over.set()
            deadline = time.monotonic() + _JOIN_SECONDS
            hanging = [writer.name for writer in writers if not writer.join(max(0.1, deadline - time.monotonic()))]
            problems += [f"{name} does not come back from its client" for name in hanging]
        hits = stage.fault_proxies.hits()
        for proxy in stage.proxies:
            proxy.close()
        problems += [problem for name, proxy in stage.named.items() for problem in crashes(name, proxy.log)]
        time.sleep(_LAST_SECONDS)
        recorder.close()
        say("reading the log")
        records = final_log.write(stage.log, stage.kafka.bootstrap, list(TOPICS), plan.directory / LOG)
    say("checking")
    decision = checker.check(checker.load(plan.directory / HISTORY, plan.directory / LOG))
    return Result(
        decision,
        recorder.counts,
        recorder.codes,
        recorder.faults,
        hits,
        recorder.transactions,
        recorder.renewed,
        records,
        problems,
    )


def _watch(plan: Plan, crew: Crew, say: Say, interrupted: threading.Event) -> None:
    started = time.monotonic()
    last = 0
    while (passed := time.monotonic() - started) < plan.seconds:
        if interrupted.wait(min(_PROGRESS_SECONDS, plan.seconds - passed)):
            say("interrupted")
            return
        outcomes: Counter[str] = Counter()
        for (_, outcome), count in list(crew.recorder.counts.items()):
            outcomes[outcome] += count
        done = outcomes.total()
        say(
            f"{time.monotonic() - started:5.0f} s  {done} operations ({done - last} more)  {_listed(outcomes)}  "
            f"faults {crew.recorder.faults.total()}"
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


def _still_live(stage: Stage, recorder: Recorder, over: threading.Event, say: Say) -> list[str]:
    """After the repair, every topic accepts an append through every proxy that serves it.

    `over` ends the writers if they keep these appends from winning.
    """
    problems = []
    for topic, mode in TOPICS.items():
        for proxy in PROXIES if mode == "required" else PROXIES[:1]:
            if not append_at_last(stage, recorder, topic, proxy, over):
                problems.append(f"{topic} takes no appends through proxy {proxy} after all repairs")
                say(problems[-1])
    return problems


def append_at_last(stage: Stage, recorder: Recorder, topic: str, proxy: str, over: threading.Event) -> bool:
    began = time.monotonic()
    end = 0
    number = 0
    while (passed := time.monotonic() - began) < _HEARTBEAT_SECONDS:
        if passed > _RACE_SECONDS:
            over.set()
        number += 1
        each = f"probe-{proxy}/{topic}/{number}"
        with contextlib.suppress(OSError, Closed, AssertionError):
            with Connection(stage.bootstrap(proxy), timeout_seconds=5.0) as queried:
                metadata = queried.metadata(topic)
            brokers = {broker.node_id: f"{broker.host}:{broker.port}" for broker in metadata.brokers}
            leader = brokers[metadata.topics[0].partitions[0].leader_id]
            with Connection(leader, timeout_seconds=10.0) as connection:
                operation = recorder.call(f"probe-{proxy}", topic, 0, [each], expected=end, manner=Manner())
                reported = reported_by(connection.append(topic, batch(each.encode(), expected=end)))
                recorder.reported(operation, reported)
                if reported.outcome == OK:
                    return True
                end = reported.actual if reported.actual is not None else end
        time.sleep(0.02)
    return False
