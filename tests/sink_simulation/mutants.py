"""The rules of the sink, each broken: the simulation has to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from fencepost.spark import comparing, driver_probe, task
from fencepost.spark.errors import SinkError, Unknown

from .model import Answer, ModelFraming
from .stories import STORIES, play

Task = task.Task


@dataclass(frozen=True, slots=True)
class Mutant:
    """`stories` – where it shows."""

    name: str
    breaks: str
    live: Callable[[], Any]
    stories: tuple[str, ...]


def _method(name: str, broken: Callable[..., Any]) -> Callable[[], Any]:
    return lambda: patch.object(Task, name, broken)


def _probe_without_reading(self: Any, topic_partition: Any, actual: int) -> None:
    partition = self._partitions[topic_partition]
    end = actual
    if end < 0:
        [(_, end)] = self._log.offsets(topic_partition[0], [topic_partition[1]]).values()
    partition.end = max(end, partition.end)


_absorb, _answered, _repartition, _begin, _validate = (
    Task._absorb, Task._answered, Task._repartition, Task.begin, Task._choose_counts,
)  # fmt: skip


def _in_doubt_is_success(self: Any, topic_partition: Any, partition: Any) -> None:
    flight = partition.flight
    if isinstance(flight.answer.exception(), Unknown):
        partition.flight = None
        self._acknowledged(topic_partition, partition, flight, Answer(0, flight.expected))
    else:
        _answered(self, topic_partition, partition)


_pool = Task._pool


def _without(origin: int) -> Callable[..., None]:
    def pool(self: Any, partition: Any, append: Any, of: int) -> None:
        if of != origin:
            _pool(self, partition, append, of)

    return pool


def _same_run_too(self: Any, topic_partition: Any, append: Any, **more: Any) -> None:
    _absorb(self, topic_partition, append, **more)
    if append.commit_tag.run == self._probed.run and append.commit_tag.task != self._task and not self._plan.arranged:
        _pool(self, self._partitions[topic_partition], append, task._FOREIGN)


def _uncompared(mutated: Callable[..., Any] | None = None) -> Callable[[], Any]:
    @contextmanager
    def live() -> Iterator[None]:
        with patch.object(comparing, "compare", lambda *args, **more: None):
            if mutated is None:
                yield
            else:
                with patch.object(Task, "_absorb", mutated):
                    yield

    return live


_difference, _append_at, _read_logged_rows = (
    comparing._Comparison._difference,
    comparing._Comparison._append_at,
    comparing._Comparison._read,
)


def _nothing_missing(self: Any, logged_rows: Any) -> Any:
    return {}, _difference(self, logged_rows)[1]


def _nothing_unknown(self: Any, logged_rows: Any) -> Any:
    return _difference(self, logged_rows)[0], 0


def _append_anyway(self: Any, topic_partition: Any, end: int, like: Any, bodies: Any) -> int:
    """At the end, wherever it is now."""
    done = 0
    while not done:
        [(_, end)] = self._log.offsets(topic_partition[0], [topic_partition[1]]).values()
        done = int(_append_at(self, topic_partition, end, like, bodies))
    return done


def _without_earlier_commits(self: Any, topic_partition: Any) -> Any:
    """Without the appends that the driver made before this commit began."""
    found = _read_logged_rows(self, topic_partition)
    first = self.__dict__.setdefault("first_ends", {}).setdefault(topic_partition, found.end)
    for commit_tag, logged in self._chunks(topic_partition, found.begin, first):
        if commit_tag.task == comparing.DRIVER and logged.base_offset < first:
            for each in logged.bodies:
                found.digests.remove(task.digest_of(each))
    return found


def _met_without_unmatched(self: Any) -> Any:
    met = _met(self)
    if met is None:
        return None
    return replace(
        met,
        partitions={topic_partition: at._replace(unmatched=b"") for topic_partition, at in met.partitions.items()},
    )


def _met_without_numbers(self: Any) -> Any:
    met = _met(self)
    if met is None:
        return None
    return replace(
        met,
        partitions={
            topic_partition: at._replace(numbers=frozenset()) for topic_partition, at in met.partitions.items()
        },
    )


_met = Task._met


def _never_unmatched(self: Any, *args: Any) -> Any:
    self._has_unmatched = False
    return _send(self, *args)


def _resume_as_fresh(self: Any) -> None:
    observations = {
        topic_partition: replace(
            observation, last=None if observation.last and observation.last.batch == self._batch else observation.last
        )
        for topic_partition, observation in self._probed.observations.items()
    }
    self._probed = replace(self._probed, observations=observations)
    _begin(self)


def _complete_as_fresh(self: Any) -> None:
    observations = {
        topic_partition: replace(
            observation, last=None if observation.last and observation.last.batch > self._batch else observation.last
        )
        for topic_partition, observation in self._probed.observations.items()
    }
    self._probed = replace(self._probed, observations=observations)
    _begin(self)


def _repartition_without_reading(self: Any, topic: str) -> None:
    self._probe = lambda *args: None  # of this task alone: others are in the middle of theirs
    _repartition(self, topic)
    del self._probe


def _not_mixed(self: Any, *args: Any) -> bool:
    mixed, self._mixed = self._mixed, set()
    try:
        return _is_missing(self, *args)
    finally:
        self._mixed = mixed


_is_missing = Task._is_missing


def _wrong_began(self: Any, last: Any) -> None:
    _validate(self, last)
    for topic_partition, commit_tag in list(last.items()):
        if commit_tag.batch == self._batch:
            last[topic_partition] = replace(commit_tag, began=self._probed.observations[topic_partition].end)
    observations = {
        topic_partition: replace(observation, last=last.get(topic_partition))
        for topic_partition, observation in self._probed.observations.items()
    }  # fmt: skip
    self._probed = replace(self._probed, observations=observations)


def _nothing_is_new(self: Any, topic_partition: Any, partition: Any, end: int) -> bool:
    return True


def _build_without_count(bodies: Any, *, partition_count: int | None, **more: Any) -> Any:
    return _build(bodies, partition_count=None, **more)


_build = ModelFraming.build


class _Both(Future[Any]):
    """Of two appends under way at once."""


def _send_two(self: Any, topic_partition: Any, partition: Any) -> None:
    """The second expects what the first would leave."""
    _send(self, topic_partition, partition)
    if not partition.queue:
        return
    first, end = partition.flight, partition.end
    partition.end = end + len(first.rows)
    _send(self, topic_partition, partition)
    second, partition.end = partition.flight, end
    both: _Both = _Both()

    def done(_: Any) -> None:
        if not (first.answer.done() and second.answer.done()) or both.done():
            return
        answers = [each.answer.exception() or each.answer.result() for each in (first, second)]
        if all(isinstance(answer, Answer) and answer.code == 0 for answer in answers):
            both.set_result(Answer(0, end))
        elif isinstance(answers[0], Answer) and answers[0].code != 0:
            both.set_result(answers[0])
        else:
            both.set_exception(Unknown("one of two"))

    first.answer.add_done_callback(done)
    second.answer.add_done_callback(done)
    partition.flight = task._Flight(task._joined([first.rows, second.rows]), end, both)


_send = Task._send


def _last_batch_only(log: Any, topic_partition: Any, bounds: Any, sink: str, lower: Any) -> Any:
    return replace(lower, below=bounds[1])


def _spread_by_chance(self: Any, topic: str) -> int:
    return int(self._clock.random() * self._over[topic])


def _ours_by_task(self: Any, topic_partition: Any, append: Any, **more: Any) -> None:
    arranged = self._plan
    if arranged.arranged and append.commit_tag.task != self._task:
        return
    _absorb(self, topic_partition, append, **more)


def _no_order(self: Any, topic_partition: Any, partition: Any) -> None:
    """Refused rows are sent after later ones."""
    refused = self._refused
    _answered(self, topic_partition, partition)
    if self._refused > refused and partition.queue:
        partition.queue.rotate(-1)


def _absorb_without_count(self: Any, topic_partition: Any, append: Any, **more: Any) -> None:
    task_appends = self._partitions[topic_partition].task_appends
    before = dict(task_appends) if task_appends is not None else None
    _absorb(self, topic_partition, append, **more)
    self._partitions[topic_partition].task_appends = before


def _release_at_once(self: Any, topic_partition: Any) -> None:
    _read_scan_range(self, topic_partition)
    self._buffered = None


_read_scan_range = Task._read_scan_range

MUTANTS = (
    Mutant(
        "no probe",
        "after a refusal the new end is believed without reading",
        _method("_probe", _probe_without_reading),
        ("speculation", "zombies", "lossy"),
    ),
    Mutant(
        "in doubt is success",
        "an append without an answer counts as appended",
        _method("_answered", _in_doubt_is_success),
        ("lossy",),
    ),
    Mutant(
        "no overlap check",
        "rows of another split's tasks are written again",
        _method("_pool", _without(task._FOREIGN)),
        ("changed split", "changed split, calm"),
    ),
    Mutant(
        "no foreign numbers",
        "rows are not searched under other task numbers",
        _method("_pool", _without(task._FOREIGN)),
        ("permuted", "permuted, calm"),
    ),
    Mutant(
        "no own number",
        "rows are not searched under the task's number in other runs",
        _method("_pool", _without(task._SAME_NUMBER)),
        ("driver restarts",),
    ),
    Mutant(
        "no own run",
        "rows are not searched in the task's appends of this run",
        _method("_pool", _without(task._OWN)),
        ("speculation", "tasks die"),
    ),
    Mutant(
        "same run's",
        "rows of this run's other tasks count, and nothing is compared",
        _uncompared(_same_run_too),
        ("equal rows in tasks",),
    ),
    Mutant(
        "not compared",
        "rows that several tasks have found are not counted",
        _uncompared(),
        ("equal rows in tasks", "permuted, equal rows"),
    ),
    Mutant(
        "nothing missing",
        "the driver does not append missing rows",
        lambda: patch.object(comparing._Comparison, "_difference", _nothing_missing),
        ("equal rows in tasks", "permuted, equal rows"),
    ),
    Mutant(
        "nothing unknown",
        "rows in the log that no task has are ignored",
        lambda: patch.object(comparing._Comparison, "_difference", _nothing_unknown),
        ("other data, compared",),
    ),
    Mutant(
        "driver unchecked",
        "the driver appends at the log end without a comparison",
        lambda: patch.object(comparing._Comparison, "_append_at", _append_anyway),
        ("permuted, equal rows", "other splits, equal rows", "equal rows in tasks"),
    ),
    Mutant(
        "driver's own",
        "a repeated commit does not see the driver's earlier appends",
        lambda: patch.object(comparing._Comparison, "_read", _without_earlier_commits),
        ("equal rows in tasks",),
    ),
    Mutant(
        "unmatched not reported",
        "a task does not report unmatched rows under its number",
        _method("_met", _met_without_unmatched),
        ("permuted", "other data, compared"),
    ),
    Mutant(
        "numbers not reported",
        "a task does not report whose rows it has found",
        _method("_met", _met_without_numbers),
        ("other data, fewer tasks",),
    ),
    Mutant(
        "never unmatched",
        "a batch whose data changes each time is appended each time",
        _method("_send", _never_unmatched),
        ("other data each time",),
    ),
    Mutant(
        "keys",
        "a task of other keys is taken for one of other data",
        _method("_keys_are_the_same", lambda self: True),
        ("permuted, expansion",),
    ),
    Mutant(
        "left-overs",
        "rows that are in the log and not in the data are not missed",
        _method("_check_unmatched", lambda self, early: None),
        ("other data",),
    ),
    Mutant(
        "resume as fresh",
        "a half-written batch is not read",
        _method("begin", _resume_as_fresh),
        ("driver restarts", "zombies"),
    ),
    Mutant(
        "complete as fresh", "a complete batch is written again", _method("begin", _complete_as_fresh), ("restored",)
    ),
    Mutant(
        "began",
        "a half-written batch is read from the end only",
        _method("_choose_counts", _wrong_began),
        ("driver restarts", "zombies"),
    ),
    Mutant(
        "nothing new",
        "`task_appends` is not compared",
        _method("_nothing_new", _nothing_is_new),
        ("speculation", "zombies"),
    ),
    Mutant(
        "task appends",
        "appends that were read are not counted",
        _method("_absorb", _absorb_without_count),
        ("speculation", "speculation, other order", "lossy contention"),
    ),
    Mutant(
        "not deduped",
        "queued rows are not compared with rows that were read",
        _method("_dedupe", lambda self, topic_partition: None),
        ("lossy",),
    ),
    Mutant(
        "repartitioned without reading",
        "after an expansion, old partitions are not read",
        _method("_repartition", _repartition_without_reading),
        ("expansion and copies",),
    ),
    Mutant(
        "not mixed",
        "after an expansion, rows are searched only in their current partitions",
        _method("_is_missing", _not_mixed),
        ("expansion and restarts", "expansion"),
    ),
    Mutant(
        "count not stated",
        "appends do not state the partition count used for their rows",
        lambda: patch.object(ModelFraming, "build", staticmethod(_build_without_count)),
        ("expansion and restarts", "expansion", "expansion, no keys"),
    ),
    Mutant(
        "two under way",
        "two appends of one partition are under way at once",
        _method("_send", _send_two),
        ("speculation, other order", "zombies, other order"),
    ),
    Mutant(
        "last batch only",
        "the last commit tag is not searched below other clients' records",
        lambda: patch.object(driver_probe, "_search", _last_batch_only),
        ("zombies, other order",),
    ),
    Mutant(
        "spread by chance",
        "rows without a key go anywhere",
        _method("default_partition", _spread_by_chance),
        ("no keys",),
    ),
    Mutant(
        "arranged by task",
        "arranged rows are searched only in the task's appends",
        _method("_absorb", _ours_by_task),
        ("changed split, then arranged", "expansion, arranged"),
    ),
    Mutant(
        "arranged rows without a task",
        "rows that lie where no task of the arranged data has any are not missed",
        lambda: patch.object(comparing, "_without_task", lambda outcomes: set()),
        ("other data, arranged, a partition is empty now",),
    ),
    Mutant("order", "refused rows are sent after later ones", _method("_answered", _no_order), ("lossy",)),
    Mutant(
        "other query",
        "rows of another query are ignored",
        _method("_refuse_other_query", lambda self, topic_partition, commit_tag: None),
        ("deleted checkpoint",),
    ),
    Mutant(
        "a stale commit tag",
        "deleted unread records are not noticed",
        lambda: patch.object(driver_probe, "_cut_off", lambda known, start: replace(known, below=start)),
        ("deleted rows",),
    ),
    Mutant(
        "not buffered",
        "new rows are appended before all old ones are matched",
        _method("_read_scan_range", _release_at_once),
        ("other data",),
    ),
)


def hunt(mutant: Mutant, seeds: int) -> tuple[str, int, str] | None:
    """Story, seed and what was noticed; None if nothing was."""
    for name in mutant.stories:
        story = STORIES[name]
        for seed in range(seeds):
            with mutant.live():
                try:
                    play(story, seed)
                except (AssertionError, SinkError, Exception) as error:
                    return name, seed, str(error)[:100]
    return None
