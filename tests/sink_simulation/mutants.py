"""The rules of the sink, each broken: the simulation must detect it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from fencepost.spark import closing, comparing, driver_probe, task
from fencepost.spark.appender import Appender
from fencepost.spark.errors import Unknown
from fencepost.spark.refusals import Refusals
from fencepost.spark.resumer import Resumer, UnmatchedRows
from fencepost.spark.rows import digest_of, joined
from fencepost.spark.task import Task
from fencepost.spark.write import Write
from tests.support.mutants import Change, Mutant, body, edit, wrap

from .model import Answer, ModelFraming
from .stories import STORIES, play

Wrapped = Callable[..., Any]


def _pool_without(origin: str) -> Change:
    first = "commit_tag = append.commit_tag"
    return edit(Resumer, "_pool", (first, f"if origin == {origin}: return\n{first}"))


def _begin_without(batches: Callable[[int, int], bool]) -> Change:
    """The driver's snapshot lacks last commit tags: those of which `batches(last, current)` is true."""

    def wrapped(begin: Wrapped, self: Any) -> None:
        observations = {
            topic_partition: replace(observation, last=None)
            if observation.last and batches(observation.last.batch, self._write.batch)
            else observation
            for topic_partition, observation in self._write.probed.observations.items()
        }
        self._write.probed = replace(self._write.probed, observations=observations)
        begin(self)

    return wrap(Task, "begin", wrapped)


def _in_doubt_is_success(answered: Wrapped, self: Any, topic_partition: Any, partition: Any) -> None:
    flight = partition.flight
    if isinstance(flight.answer.exception(), Unknown):
        partition.flight = None
        self._acknowledged(topic_partition, partition, flight, Answer(0, flight.expected))
    else:
        answered(self, topic_partition, partition)


def _append_anyway(append_at: Wrapped, self: Any, topic_partition: Any, _: int, *append: Any) -> int:
    """At the current log end."""
    done = 0
    while not done:
        [(_, end)] = self.log.offsets(topic_partition[0], [topic_partition[1]]).values()
        done = int(append_at(self, topic_partition, end, *append))
    return done


def _without_earlier_commits(read: Wrapped, self: Any, topic_partition: Any) -> Any:
    """Without the appends that the driver made before this commit began."""
    found = read(self, topic_partition)
    first = self.__dict__.setdefault("first_ends", {}).setdefault(topic_partition, found.end)
    for commit_tag, logged in self._appends(topic_partition, found.begin, first):
        if commit_tag.task == comparing.DRIVER and logged.base_offset < first:
            for each in logged.bodies:
                found.digests.remove(digest_of(each))
    return found


def _wrong_began(may_have_rows: Wrapped, write: Any, refusals: Any) -> Any:
    found = may_have_rows(write, refusals)
    for topic_partition, observation in write.probed.observations.items():
        if observation.last is not None and observation.last.batch == write.batch:
            write.partitions[topic_partition].began = observation.end
    return found


def _send_two(send: Wrapped, self: Any, topic_partition: Any, partition: Any) -> None:
    """The second append expects the log end that the first would leave."""
    send(self, topic_partition, partition)
    if partition.flight is None or not partition.queue:
        return
    first, end = partition.flight, partition.end
    partition.end = end + len(first.rows)
    send(self, topic_partition, partition)
    second, partition.end = partition.flight, end
    both: Future[Any] = Future()

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
    rows = joined([first.rows, second.rows])
    partition.flight = replace(first, rows=rows, answer=both)


MUTANTS = (
    Mutant(
        "no probe",
        "after a refusal the new end is believed without reading",
        ("speculation", "zombies", "lossy"),
        edit(Appender, "_probe", ("not self._nothing_new(topic_partition, partition, end, commit_tag)", "False")),
    ),
    Mutant(
        "in doubt is success",
        "an append without an answer counts as appended",
        ("lossy",),
        wrap(Appender, "_answered", _in_doubt_is_success),
    ),
    Mutant(
        "no overlap check",
        "rows of another split's tasks are written again",
        ("changed split", "changed split, calm"),
        _pool_without("FOREIGN"),
    ),
    Mutant(
        "no foreign numbers",
        "rows are not searched under other task numbers",
        ("permuted", "permuted, calm"),
        _pool_without("FOREIGN"),
    ),
    Mutant(
        "no own number",
        "rows are not searched under the task's number in other runs",
        ("driver restarts",),
        _pool_without("SAME_NUMBER"),
    ),
    Mutant(
        "no own run",
        "rows are not searched in the task's appends of this run",
        ("speculation", "tasks die"),
        _pool_without("THIS_RUN"),
    ),
    Mutant(
        "same run's",
        "rows of this run's other tasks count, and nothing is compared",
        ("equal rows in tasks",),
        edit(
            Resumer,
            "absorb",
            (
                "if commit_tag.task != self._write.task:\n    return\norigin = THIS_RUN",
                "origin = THIS_RUN if commit_tag.task == self._write.task else FOREIGN",
            ),
        ),
        body(comparing, "compare", "return None"),
    ),
    Mutant(
        "not compared",
        "rows that several tasks have found are not counted",
        ("equal rows in tasks", "permuted, equal rows"),
        body(comparing, "compare", "return None"),
    ),
    Mutant(
        "nothing missing",
        "the driver does not append missing rows",
        ("equal rows in tasks", "permuted, equal rows"),
        edit(comparing, "_Comparison._difference", ("return missing, unknown", "return {}, unknown")),
    ),
    Mutant(
        "nothing unknown",
        "rows in the log that no task has are ignored",
        ("other data, compared",),
        edit(comparing, "_Comparison._difference", ("return missing, unknown", "return missing, 0")),
    ),
    Mutant(
        "driver unchecked",
        "the driver appends at the log end without a comparison",
        ("permuted, equal rows", "other splits, equal rows", "equal rows in tasks"),
        wrap(comparing, "_Comparison._append_at", _append_anyway),
    ),
    Mutant(
        "driver's own",
        "a repeated commit does not see the driver's earlier appends",
        ("equal rows in tasks",),
        wrap(comparing, "_Comparison._read", _without_earlier_commits),
    ),
    Mutant(
        "unmatched not reported",
        "a task does not report unmatched rows under its number",
        ("permuted", "other data, compared"),
        edit(Task, "_met", ('b"".join(left)', 'b""')),
    ),
    Mutant(
        "numbers not reported",
        "a task does not report whose rows it has found",
        ("other data, fewer tasks",),
        edit(Task, "_met", ("frozenset(partition.numbers)", "frozenset()")),
    ),
    Mutant(
        "never unmatched",
        "a batch whose data changes each time is appended each time",
        ("other data each time",),
        edit(Appender, "_send", ("self._write.has_unmatched", "False")),
    ),
    Mutant(
        "keys",
        "a task of other keys is taken for one of other data",
        ("permuted, few rows", "permuted, expansion"),
        body(UnmatchedRows, "_keys_are_the_same", "return True"),
    ),
    Mutant(
        "left-overs",
        "rows that are in the log and not in the data are not missed",
        ("other data",),
        body(UnmatchedRows, "check", "pass"),
    ),
    Mutant(
        "resume as fresh",
        "a half-written batch is not read",
        ("driver restarts", "zombies"),
        _begin_without(lambda last, current: last == current),
    ),
    Mutant(
        "complete as fresh",
        "a complete batch is written again",
        ("restored",),
        _begin_without(lambda last, current: last > current),
    ),
    Mutant(
        "began",
        "a half-written batch is read from the end only",
        ("driver restarts", "zombies"),
        wrap(task, "_may_have_rows", _wrong_began),
    ),
    Mutant(
        "nothing new",
        "`task_appends` is not compared",
        ("speculation", "zombies"),
        body(Appender, "_nothing_new", "return True"),
    ),
    Mutant(
        "lock is believed",
        "the end that the last holder of the lock left is believed without its commit tag",
        ("speculation", "speculation, other order", "tasks die"),
        edit(
            Appender,
            "_has_lock",
            (
                "self._patience.patiently(lambda: self._probe(topic_partition, end, hint))",
                "partition.end = last.end",
            ),
        ),
    ),
    Mutant(
        "task appends",
        "appends that were read are not counted",
        ("speculation", "speculation, other order", "lossy contention"),
        edit(
            Resumer,
            "absorb",
            ("partition.task_appends = None", "pass"),
            ("partition.task_appends[commit_tag.task] = partition.task_appends.get(commit_tag.task, 0) + 1", "pass"),
        ),
    ),
    Mutant(
        "not deduped",
        "queued rows are not compared with rows that were read",
        ("lossy",),
        body(Appender, "_dedupe", "pass"),
    ),
    Mutant(
        "repartitioned without reading",
        "after an expansion, old partitions are not read",
        ("expansion and copies",),
        edit(
            Appender,
            "_repartition",
            (
                "self._patience.patiently(lambda topic_partition=topic_partition: self._probe(topic_partition, -1))",
                "pass",
            ),
        ),
    ),
    Mutant(
        "not mixed",
        "after an expansion, rows are searched only in their current partitions",
        ("expansion and restarts", "expansion"),
        edit(
            Resumer,
            "_is_missing",
            ("topic_partition[0] in self._write.mixed and (self._write.plan.arranged or not explicit)", "False"),
        ),
    ),
    Mutant(
        "count not stated",
        "appends do not state the partition count used for their rows",
        ("expansion and restarts", "expansion", "expansion, no keys"),
        edit(ModelFraming, "build", ("partition_count", "None")),
    ),
    Mutant(
        "two under way",
        "two appends of one partition are under way at once",
        ("speculation, other order", "zombies, other order"),
        wrap(Appender, "_send", _send_two),
    ),
    Mutant(
        "last batch only",
        "the last commit tag is not searched below other clients' records",
        ("zombies, other order",),
        body(driver_probe, "_search", "return replace(lower, below=bounds[1])"),
    ),
    Mutant(
        "spread by chance",
        "rows without a key go anywhere",
        ("no keys",),
        body(Write, "default_partition", "return int(self.clock.random() * self.over[topic])"),
    ),
    Mutant(
        "arranged by task",
        "arranged rows are searched only in the task's appends",
        ("changed split, then arranged", "expansion, arranged"),
        edit(
            Resumer,
            "absorb",
            (
                "commit_tag, partition = append.commit_tag, self._write.partitions[topic_partition]",
                "commit_tag, partition = append.commit_tag, self._write.partitions[topic_partition]\n"
                "if self._write.plan.arranged and commit_tag.task != self._write.task:\n"
                "    return",
            ),
        ),
    ),
    Mutant(
        "arranged rows without a task",
        "rows that lie where no task of the arranged data has any are not missed",
        ("other data, arranged, a partition is empty now",),
        body(comparing, "_without_task", "return set()"),
    ),
    Mutant(
        "order",
        "refused rows are sent after later ones",
        ("lossy",),
        edit(Appender, "_answered", ("partition.put(flight.rows, front=True)", "partition.put(flight.rows)")),
    ),
    Mutant(
        "other query",
        "rows of another query are ignored",
        ("deleted checkpoint",),
        body(Refusals, "refuse_other_query", "pass"),
    ),
    Mutant(
        "a stale commit tag",
        "deleted unread records are not noticed",
        ("deleted rows",),
        edit(driver_probe, "_from", ("Known(start, None, 0, unread=True)", "replace(known, below=start)")),
    ),
    Mutant(
        "read no further",
        "a row is missing although its scan range was not read to the end",
        ("arranged",),
        body(Resumer, "_read_more", "return False"),
    ),
    Mutant(
        "no mark",
        "a finished load is not marked",
        ("load",),
        edit(closing, "close", ("total if each is deferred[-1] else None", "None")),
    ),
    Mutant(
        "marked too early",
        "rows follow the mark",
        ("load, lossy", "load, zombies", "load, arranged"),
        edit(closing, "close", ("each is deferred[-1]", "each is deferred[0]")),
    ),
    Mutant(
        "mark ignored",
        "a finished load is compared and completed",
        ("load",),
        edit(task, "_may_have_rows", ("write.probed.done is not None", "False")),
    ),
    Mutant(
        "totals not compared",
        "any rows are those of a finished load",
        ("load",),
        edit(closing, "close", ("outcome.done != total", "False")),
    ),
    Mutant(
        "totals counted",
        "as many other rows are those of a finished load",
        ("load",),
        edit(closing, "close", ("outcome.done != total", "outcome.done[0] != total.rows")),
    ),
    Mutant(
        "last rows unchecked",
        "the driver appends the deferred rows at the log end, unread",
        ("load, two drivers", "load, other order", "load, zombies"),
        edit(
            closing,
            "_append",
            (
                "partition.put(deferred.rows)",
                "partition.put(deferred.rows)\n"
                "topic, number = deferred.topic_partition\n"
                "[(_, partition.end)] = log.offsets(topic, [number]).values()",
            ),
        ),
    ),
    Mutant(
        "deferred row is unknown",
        "a deferred row that another run has appended is taken for other data",
        ("load, other splits",),
        edit(comparing, "_Comparison._difference", ("expected_digests[scope].append(digest)", "pass")),
    ),
    Mutant(
        "not buffered",
        "new rows are appended before all old ones are matched",
        ("other data",),
        edit(Resumer, "_buffer", ("self._write.buffered = []", "pass")),
    ),
)


def hunt(mutant: Mutant, seeds: int) -> tuple[str, int, str] | None:
    """Story, seed and finding of the first run that fails; None if none does."""
    for name in mutant.where:
        story = STORIES[name]
        for seed in range(seeds):
            with mutant.live():
                try:
                    play(story, seed)
                except (AttributeError, NameError, TypeError):
                    raise  # the mutant does not fit the code: its crash proves nothing
                except Exception as error:
                    return name, seed, str(error)[:100]
    return None
