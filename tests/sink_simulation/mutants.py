"""The rules of the sink, each broken: the simulation must detect it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pyarrow as pa

from fencepost.spark import appender, closing, driver_probe, resumer, task
from fencepost.spark.appender import Appender
from fencepost.spark.driver_probe import DriverProbe
from fencepost.spark.errors import Unknown
from fencepost.spark.refusals import Refusals
from fencepost.spark.resumer import Resumer
from fencepost.spark.task import Task
from fencepost.spark.write import Write
from tests.support.mutants import Change, Mutant, body, edit, wrap

from .model import Answer, ModelFraming
from .stories import STORIES, play

Wrapped = Callable[..., Any]


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


def _send_two(send: Wrapped, self: Any, topic_partition: Any, partition: Any) -> None:
    """The second append expects the log end that the first would leave."""
    send(self, topic_partition, partition)
    if partition.flight is None or not self._sendable(topic_partition, partition):
        return
    first, end, prefix = partition.flight, partition.end, partition.prefix
    partition.end, partition.prefix = end + len(first.rows), first.prefix
    send(self, topic_partition, partition)
    second, partition.end, partition.prefix = partition.flight, end, prefix
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
    rows = pa.concat_arrays([first.rows, second.rows])
    partition.flight = replace(second, rows=rows, expected=end, answer=both)


MUTANTS = (
    Mutant(
        "no catch-up",
        "after a refusal the new end is believed, and the rows before it are not",
        ("speculation", "zombies", "lossy"),
        edit(Appender, "_probe", ("self._resumer.catch_up(topic_partition, end)", "partition.end = end")),
    ),
    Mutant(
        "no catch-up of a sequence",
        "after a refusal the last commit tag is not read",
        ("sorted", "sorted, zombies", "load, speculation"),
        edit(Resumer, "catch_up", ("self._follow(topic_partition, commit_tag)", "pass")),
    ),
    Mutant(
        "last batch only, after a refusal",
        "the commit tag below other clients' records is not searched",
        ("sorted, zombies", "load, zombies", "load, speculation"),
        edit(Resumer, "catch_up", ("commit_tag = each", "pass")),
    ),
    Mutant(
        "in doubt is success",
        "an append without an answer counts as appended",
        ("lossy",),
        wrap(Appender, "_answered", _in_doubt_is_success),
    ),
    Mutant(
        "not pooled",
        "the rows of a half-written stream batch are not searched",
        ("driver restarts", "zombies"),
        edit(Resumer, "_read_pool", ("partition.pool.add(bytes(digests))", "pass")),
    ),
    Mutant(
        "not pooled after a refusal",
        "the rows of another attempt are not searched",
        ("speculation, other order", "zombies, other order"),
        edit(
            Resumer,
            "catch_up",
            ('partition.pool.add(b"".join(map(digest_of, logged.bodies)))', "pass"),
        ),
    ),
    Mutant(
        "skipped uncompared",
        "the digest of skipped rows is not compared",
        ("sorted, other data", "load, other data of a half"),
        body(Resumer, "_compare", "pass"),
    ),
    Mutant(
        "order not compared",
        "the digest does not depend on the order",
        ("load, other order of a half",),
        *(
            edit(
                module,
                "extended",
                ("np.arange(prefix.rows, rows, dtype=np.uint64)", "np.zeros(len(bodies), dtype=np.uint64)"),
            )
            for module in (appender, resumer)
        ),
    ),
    Mutant(
        "not compared first",
        "other data is appended where the log has nothing of the batch, and then the right data cannot finish it",
        ("load, other data of a half", "load, fewer rows than a half"),
        body(DriverProbe, "is_partly_written", "return False"),
    ),
    Mutant(
        "not compared first, sorted",
        "as before, of a micro-batch",
        ("sorted, other data of a half",),
        body(DriverProbe, "is_partly_written", "return False"),
    ),
    Mutant(
        "comparison appends",
        "the tasks that compare append too",
        ("load, other data of a half", "sorted, other data of a half"),
        edit(Task, "feed", ("write.only_compares", "False")),
        edit(Task, "_take", ("self._write.only_compares", "False")),
    ),
    Mutant(
        "fewer rows",
        "rows that are in the log and not in the data are not missed",
        ("sorted, other data", "other data"),
        body(Resumer, "check_all_found", "pass"),
    ),
    Mutant(
        "fewer rows of a half",
        "a half-written batch is complete if the data has no more than the log",
        ("load, fewer rows than a half",),
        edit(Resumer, "check_all_found", ("rows == partition.logged.rows > 0 and not partition.is_last", "False")),
    ),
    Mutant(
        "more rows",
        "rows after the last one are appended",
        ("load", "sorted, other data"),
        edit(Resumer, "_unnumbered", ("len(rows) and partition.is_last", "False")),
        edit(Refusals, "refuse_missing", ("self._write.is_load and self._write.probed.done", "False")),
    ),
    Mutant(
        "last too early",
        "an append that is not the last one is flagged as such",
        ("load, lossy", "sorted"),
        edit(
            Appender, "_send", ("partition.is_numbered and self.ends and not partition.queue", "partition.is_numbered")
        ),
    ),
    Mutant(
        "no last row kept",
        "a task sends its last row before it knows that there are no more",
        ("sorted", "load, lossy"),
        edit(
            Appender,
            "_sendable",
            ("topic_partition == self.deferred if self.ends else True", "topic_partition == self.deferred"),
        ),
    ),
    Mutant(
        "rows without a task",
        "rows that lie where no task of the data has any are not missed",
        ("other data", "sorted, other data"),
        body(closing, "refuse_without_task", "pass"),
    ),
    Mutant(
        "resume as fresh",
        "a half-written batch is not read",
        ("driver restarts", "zombies"),
        _begin_without(lambda last, current: last == current),
    ),
    Mutant(
        "resume as fresh, sorted",
        "the commit tag of a half-written batch is not read",
        ("sorted", "load, zombies"),
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
        edit(Resumer, "open", ("begin, end = partition.began, partition.end", "begin = end = partition.end")),
    ),
    Mutant(
        "order",
        "refused rows are sent after later ones",
        ("lossy",),
        edit(Appender, "_answered", ("partition.put(flight.rows, front=True)", "partition.put(flight.rows)")),
    ),
    Mutant(
        "earlier counts",
        "after an expansion, rows are searched only in their current partitions",
        ("expansion and restarts", "expansion", "load, expansion"),
        edit(Task, "feed", ("len(write.counts[topic]) > 1", "False")),
    ),
    Mutant(
        "earlier counts forgotten",
        "the counts of earlier appends are not taken from commit tags",
        ("expansion and restarts", "expansion, no keys"),
        edit(task, "_counts", ("tuple(sorted(known | {count}))", "(count,)")),
    ),
    Mutant(
        "count not stated",
        "appends do not state the partition count used for their rows",
        ("expansion and restarts", "expansion", "expansion, no keys"),
        edit(ModelFraming, "build", ("partition_count", "None")),
    ),
    Mutant(
        "count kept unchecked",
        "without the check, a half-written batch takes the new count",
        ("expansion without the check", "sorted, expansion without the check"),
        edit(task, "_counts", ("tuple(known) or (count,)", "(count,)")),
    ),
    Mutant(
        "numbered anywhere",
        "rows are numbered although they were arranged by another count",
        ("expansion, sorted", "load, expansion", "load, expansion by a half"),
        edit(
            Write,
            "owns",
            ("self.counts[topic] == (self.arranged.get(topic),) and partition == self.task", "True"),
        ),
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
        body(driver_probe, "_search", "return replace(before, end=now.end)"),
    ),
    Mutant(
        "not arranged",
        "copies of a row are in several tasks",
        ("equal rows, dealt",),
        edit(
            Task,
            "feed",
            ("(np.where(placements < 0, -1 - placements, placements) % arranged != write.task).any()", "False"),
        ),
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
        edit(
            driver_probe,
            "_observed",
            ("Observation(now.start, now.start, None, unread=True)", "replace(before, end=now.start)"),
        ),
    ),
    Mutant(
        "no flag",
        "a finished load is not flagged",
        ("load, empty partitions",),
        edit(closing, "_append", ("index == 0", "False")),
    ),
    Mutant(
        "flagged too early",
        "rows follow the flag",
        ("load, lossy", "load, zombies", "load"),
        edit(Appender, "_send", ("last and write.ends_load", "last")),
    ),
    Mutant(
        "flag ignored",
        "a finished load is completed with other rows",
        ("load, empty partitions",),
        edit(Refusals, "refuse_missing", ("self._write.is_load and self._write.probed.done", "False")),
    ),
    Mutant(
        "last rows unchecked",
        "the driver appends the deferred rows at the log end, unread",
        ("load, two drivers", "load, speculation", "load, zombies"),
        edit(
            closing,
            "_append",
            (
                "partition.put(deferred.rows)",
                "partition.put(deferred.rows)\n"
                "topic, number = deferred.topic_partition\n"
                "[(_, partition.end)] = write.log.offsets(topic, [number]).values()",
            ),
        ),
    ),
    Mutant(
        "not delayed",
        "new rows are appended before all old ones are matched",
        ("other data",),
        edit(Appender, "_sendable", ("partition.queued_rows if partition.is_released else 0", "partition.queued_rows")),
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
