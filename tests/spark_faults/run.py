"""Runs consecutive faults and prints their results as a table."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tests.spark_faults.faults import Fault
from tests.spark_faults.query import FENCEPOST, KAFKA
from tests.spark_faults.stage import Counts, QueryFailed, Stage, Trial


@dataclass(frozen=True, slots=True)
class Outcome:
    counts: Counts
    seconds: float
    refusal: str = ""
    then: str = ""
    at_refusal: Counts | None = None
    #: Why it did not complete.
    broken: str = ""

    @property
    def exact(self) -> bool:
        before = self.at_refusal
        nothing_undue = before is None or not (before.duplicated or before.out_of_order or before.foreign)
        return not self.broken and self.counts.exact and nothing_undue


@dataclass(slots=True)
class Result:
    sinks: Sequence[str]
    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Our sink is exact under each fault; and the same counting finds duplicates of Spark's sink, if run."""
        ours = all(each.exact for (_, sink), each in self.outcomes.items() if sink == FENCEPOST)
        theirs = [each for (_, sink), each in self.outcomes.items() if sink == KAFKA]
        return ours and (not theirs or any(each.counts.duplicated for each in theirs))


class Row:
    """Consecutive faults on one sink."""

    def __init__(self, stage: Stage, sink: str) -> None:
        self._stage, self._sink = stage, sink
        self._trial: Trial | None = None

    def strike(self, fault: Fault) -> Outcome:
        began = time.monotonic()
        if self._trial is not None and not (fault.chained and fault.master == self._trial.master):
            self.close()
        if self._trial is None:
            self._trial = Trial(self._stage, self._sink, fault.master)
        trial, broken = self._trial, ""
        trial.begin(chained=fault.chained)
        try:
            fault.happen(trial)
        except (QueryFailed, AssertionError) as error:
            broken = f"{type(error).__name__}: {error.reason if isinstance(error, QueryFailed) else error}"
        counts = trial.count()
        if broken or not fault.chained:
            self.close()
        seconds = time.monotonic() - began
        return Outcome(counts, seconds, trial.refusal, trial.then, trial.at_refusal, broken)

    def close(self) -> None:
        if self._trial is not None:
            self._trial.close()
            self._trial = None


def run(
    stage: Stage, faults: Sequence[Fault], sinks: Sequence[str], say: Callable[[str], None] = lambda _: None
) -> Result:
    result = Result(sinks, faults=list(faults))
    for sink in sinks:
        with contextlib.closing(Row(stage, sink)) as row:
            for fault in faults:
                if sink in fault.sinks:
                    outcome = row.strike(fault)
                    result.outcomes[fault.name, sink] = outcome
                    what = f"{reported(outcome)}, {outcome.seconds:.0f} s {outcome.refusal}{outcome.broken}"
                    say(f"{fault.name}, {sink}: {what}")
    return result


def reported(outcome: Outcome) -> str:
    counts = outcome.counts
    foreign = f" / {counts.foreign} foreign" if counts.foreign else ""
    return f"{counts.expected} rows: {counts.missing} / {counts.duplicated} / {counts.out_of_order}{foreign}"


def table(result: Result) -> Iterator[str]:
    """A table of the faults with a count above 0 or a refusal, then lists of the others."""
    names = {FENCEPOST: "`fencepost`", KAFKA: "Spark's `kafka`"}
    yield f"| fault | rows | {' | '.join(names[sink] for sink in result.sinks)} |"
    yield f"|---|{'---:|' * (1 + len(result.sinks))}"
    refusals: list[str] = []
    others: dict[str, list[str]] = {}
    for fault in result.faults:
        found = {sink: result.outcomes.get((fault.name, sink)) for sink in result.sinks}
        if all(each is None or (_counts(each) == _EXACT and not each.refusal) for each in found.values()):
            tested = " and ".join(names[sink] for sink, each in found.items() if each is not None)
            others.setdefault(tested, []).append(fault.reported)
            continue
        rows = next(each.counts.expected for each in found.values() if each is not None)
        cells = []
        for outcome in found.values():
            reference = ""
            if outcome is not None and outcome.refusal:
                refusals.append(
                    f"[{len(refusals) + 1}] `{fault.name}`: “{outcome.refusal}” Continued with {outcome.then}."
                )
                reference = f" [{len(refusals)}]"
            cells.append("–" if outcome is None else f"{_counts(outcome)}{reference}")
        yield f"| {fault.reported} | {rows} | {' | '.join(cells)} |"
    yield ""
    for tested, faults in others.items():
        if tested:
            yield f"{_EXACT} with {tested}: {'; '.join(faults)}."
    yield from refusals


_EXACT = "0/0/0"


def _counts(outcome: Outcome) -> str:
    counts = outcome.counts
    foreign = f", {counts.foreign} foreign" if counts.foreign else ""
    broken = " **broken**" if outcome.broken else ""
    return f"{counts.missing}/{counts.duplicated}/{counts.out_of_order}{foreign}{broken}"
