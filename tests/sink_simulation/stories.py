"""Scenarios: a query, its driver, its tasks, and what happens to them. Each follows from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fencepost._partitioning import murmur2
from fencepost.spark import closing, driver_probe
from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.task import Task
from fencepost.spark.write import Outcome, Plan, Write

from .model import Actor, Faults, ModelClock, ModelFraming, ModelLog, Partition, World, body

TOPIC = "t"


@dataclass(frozen=True, slots=True)
class Row:
    key: bytes | None
    value: bytes
    partition: int | None = None

    @property
    def body(self) -> bytes:
        return body(self.key, self.value)

    @property
    def place(self) -> int:
        """As `Task.feed` takes it."""
        if self.partition is not None:
            return -1 - self.partition
        return murmur2(self.value if self.key is None else self.key, 1 << 31)

    def under(self, count: int) -> int:
        return (-1 - self.place if self.place < 0 else self.place) % count


@dataclass(slots=True)
class Story:
    """`strict`: nothing may be refused. `is_sorted`: as in foreachBatch, the rows of a partition have one order; else
    each attempt has them in another one, if `shuffled`."""

    name: str
    faults: Faults
    partitions: int = 2
    batches: int = 3
    rows: int = 40
    is_sorted: bool = False
    shuffled: bool = False
    speculation: float = 0.0
    restarts: int = 0
    zombies: float = 0.5
    split_brain: bool = False
    restored: bool = False
    expands: bool = False
    #: Partition count after an expansion, as a factor.
    factor: float = 2
    count_checked: bool = True
    equal_rows: bool = False
    keyless: bool = False
    explicit: bool = False
    strict: bool = True
    deleted_checkpoint: bool = False
    #: Retention deletes the last batch, whose commit is lost. The same driver repeats the batch.
    deleted_rows: bool = False
    #: The last batch is repeated with other rows.
    other_data: bool = False
    #: A half-written batch is started again: with another row, in another order, or without the rows that it lacks.
    changed_half: str = ""
    #: Rows are dealt to tasks one by one, so equal rows are in several tasks.
    dealt: bool = False
    #: A driver restarts only when no request is in the network.
    quiet: bool = False
    #: `df.write`: one batch, which is done at its end. Killed drivers may go on.
    load: bool = False


@dataclass(slots=True)
class Run:
    """The result of a story."""

    story: Story
    world: World
    rows: dict[int, list[Row]] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    found: int = 0
    #: The log has the flag of a finished load.
    is_flagged: bool = False


@dataclass(slots=True)
class Attempt:
    actor: Actor
    task: int
    outcome: Outcome | None = None
    error: BaseException | None = None


def play(story: Story, seed: int) -> Run:
    """Raise AssertionError if a guarantee was broken."""
    world = World(seed, story.faults)
    world.topics[TOPIC] = [Partition() for _ in range(story.partitions)]
    if story.count_checked:
        world.count_checked.add(TOPIC)
    run = Run(story, world)
    for number in range(story.batches if story.load else story.batches + 1):
        run.rows[number] = _rows(world, story, number)
    if story.expands:
        requested = world.random.randrange(1, 60)

        def expand() -> None:
            due = world.appends >= requested and len(world.topics[TOPIC]) == story.partitions
            if due and (story.count_checked or not any(actor.name.startswith("t") for actor in world.actors)):
                world.expand(TOPIC, int(story.partitions * story.factor))

        world.meddle = expand
    try:
        _Query(run, query="" if story.load else "q").play()
        # Requests in the network arrive, and running tasks end.
        _until_quiet(world)
        check(run)
    finally:
        world.end_all()
    return run


def _until_quiet(world: World) -> None:
    world.run(lambda: not world.network and not world.late and not any(not a.ended for a in world.actors))


def _rows(world: World, story: Story, batch: int) -> list[Row]:
    rows = []
    for number in range(world.random.randrange(story.rows // 2, story.rows + 1)):
        key = None if story.keyless else b"k%d" % (7 + world.random.randrange(8))
        value = b"%d:%d" % (batch, world.random.randrange(5) if story.equal_rows else number)
        rows.append(Row(key, value, world.random.randrange(story.partitions) if story.explicit else None))
    return rows


@dataclass(slots=True)
class _Query:
    run: Run
    query: str
    committed: int = -1
    #: By the driver that began the last one.
    remembered: dict[Any, driver_probe.Observation] = field(default_factory=dict)

    def play(self) -> None:
        story, world = self.run.story, self.run.world
        restarts = story.restarts
        tries = 0
        if story.dealt:
            self._try_dealt()
            return
        while self.committed < story.batches - 1:
            tries += 1
            assert tries < 60, self.run.errors[-3:]
            driver = _Driver(self)
            kill_at = world.appends + world.random.randrange(1, 25) if restarts > 0 else None
            others = [_Driver(self)] if story.split_brain and restarts else []
            actors = [world.start(f"driver{tries}", driver.main) for driver in (driver, *others)]

            def over(actors: list[Actor] = actors, kill_at: int | None = kill_at) -> bool:
                return all(a.ended for a in actors) or (kill_at is not None and world.appends >= kill_at)

            world.run(over)
            if kill_at is not None and not all(actor.ended for actor in actors):
                restarts -= 1
                for each in (driver, *others):
                    each.die()
                for actor in actors:
                    if not story.load or world.random.random() >= story.zombies:
                        world.kill(actor)
                if story.quiet or story.changed_half:
                    _until_quiet(world)
                if story.changed_half:
                    self._change_a_half()
                continue
            for actor in actors:
                if actor.error is not None:
                    raise actor.error
        if story.deleted_checkpoint or story.other_data:
            self._start_over()
        if story.load:
            self._load_again()
        if story.deleted_rows:
            self._delete_rows()
        if story.restored:
            # From a backup of the checkpoint: the next batches are already in the log.
            self.committed = world.random.randrange(-1, story.batches - 1)
            before = sum(p.end for p in world.topics[TOPIC])
            driver = _Driver(self)
            actor = world.start("restored", driver.main)
            world.run(lambda: actor.ended)
            if actor.error is not None:
                raise actor.error
            assert not driver.refused, driver.refused
            assert before == sum(p.end for p in world.topics[TOPIC])

    def _try_dealt(self) -> None:
        """Copies of a row are in several tasks."""
        self._try_again()
        assert "in one task" in self.run.errors[-1], self.run.errors[-1]

    def _start_over(self) -> None:
        """Start under another query id, or repeat the last batch with other rows. Nothing is appended."""
        run, world = self.run, self.run.world
        _until_quiet(world)
        before = [p.end for p in world.topics[TOPIC]]
        last = run.story.batches - 1
        if run.story.deleted_checkpoint:
            self.query, self.committed = "another", -1
            self._try_again()
        else:
            self._try_others(last, more=run.story.is_sorted)
        assert before == [p.end for p in world.topics[TOPIC]], "appended before it was refused"

    def _try_others(self, batch: int, *, more: bool, new_partition: bool = False) -> None:
        """`more`: also more rows than the log has; `new_partition`: also where it has none."""
        run, truth = self.run, self.run.rows[batch]
        count = len(run.world.topics[TOPIC])
        gone = truth[-1].under(count)
        others = [
            [*truth[:-1], Row(truth[-1].key, b"something else", truth[-1].partition)],
            [truth[0], *(Row(row.key, b"else %d" % number, row.partition) for number, row in enumerate(truth[1:]))],
            truth[:-1],
            [row for row in truth if row.under(count) != gone],
        ]
        if more:
            others += [[*truth, truth[-1]], [*truth, Row(truth[0].key, b"one more", truth[0].partition)]]
        empty = set(range(count)) - {row.under(count) for row in truth}
        if new_partition and empty:
            others.append([*truth, Row(None, b"one more", min(empty))])
        for run.rows[batch] in others:
            self.committed = batch - 1
            self._try_again()
            assert "the data now has" in run.errors[-1], run.errors[-1]
        run.rows[batch] = truth

    def _change_a_half(self) -> None:
        """Nothing is appended, so the original rows can finish the batch."""
        world, batch = self.run.world, self.committed + 1
        if batch == self.run.story.batches:
            return
        truth = self.run.rows[batch]
        logged = [{each for stored in p.stored for each in stored.bodies} for p in world.topics[TOPIC]]
        count = len(logged)
        chosen = [row for row in truth if row.body in logged[row.under(count)]]
        at = chosen[0].under(count) if chosen else 0
        old = [row for row in chosen if row.under(count) == at]
        new = [row for row in truth if row.under(count) == at and row not in old]
        changed_half = self.run.story.changed_half
        if len(old) < 2 or (changed_half == "fewer" and not new) or self._is_done():
            return
        first = Row(old[0].key, b"other", old[0].partition)
        changed = {"row": [first, *old[1:], *new], "order": [old[1], old[0], *old[2:], *new], "fewer": old}
        before = [partition.end for partition in world.topics[TOPIC]]
        others = [row for row in truth if row.under(count) != at]
        if all(row not in chosen for row in others):  # the log has nothing to compare these with
            others = [Row(row.key, b"other" + row.value, row.partition) for row in others]
        self.run.rows[batch] = others + changed[changed_half]
        self.run.story = replace(self.run.story, changed_half="", strict=False)
        self._try_again()
        assert "the data now has" in self.run.errors[-1], self.run.errors[-1]
        assert before == [partition.end for partition in world.topics[TOPIC]], "appended before it was refused"
        self.run.rows[batch] = truth

    def _is_done(self) -> bool:
        tags = [each.commit_tag for p in self.run.world.topics[TOPIC] for each in p.stored if each.commit_tag]
        return any(getattr(CommitTag.decode(tag), "done", False) for tag in tags)

    def _delete_rows(self) -> None:
        world = self.run.world
        kept = [(partition, partition.stored) for partition in world.topics[TOPIC]]
        for partition, _ in kept:
            partition.start, partition.stored = partition.end, []
        self.committed -= 1
        self._try_again(remembered=self.remembered)
        for partition, stored in kept:
            assert not partition.stored, "appended before it was refused"
            partition.start, partition.stored = 0, stored

    def _load_again(self) -> None:
        """A finished load appends nothing: the same rows, in any split, are done; others are refused."""
        run, world = self.run, self.run.world
        _until_quiet(world)
        run.is_flagged = self._is_done()
        check(run)
        before, queries = [p.end for p in world.topics[TOPIC]], world.tasks.queries
        self.committed = -1
        driver = _Driver(self)
        actor = world.start("done", driver.main)
        world.run(lambda: actor.ended)
        assert not actor.error, actor.error
        assert not driver.refused, driver.refused
        if not run.story.expands:
            assert world.tasks.queries == queries, "tasks of a finished load have read the log"
        run.story = replace(run.story, strict=False)
        if not run.story.expands:  # the tasks of a later arrangement do not know which rows the others have
            self._try_others(0, more=True, new_partition=run.is_flagged)
        if run.story.faults == CALM and not run.story.restarts and not run.story.expands:
            assert run.is_flagged or not {row.under(run.story.partitions) for row in run.rows[0]} & {0, 1, 2, 4}
        assert before == [p.end for p in world.topics[TOPIC]], "a finished load has appended"

    def _try_again(self, *, remembered: dict[Any, driver_probe.Observation] | None = None) -> None:
        world = self.run.world
        driver = _Driver(self)
        driver.remembered = driver.remembered if remembered is None else remembered
        actor = world.start("again", driver.main)
        world.run(lambda: actor.ended)
        if actor.error is not None:
            raise actor.error
        assert driver.refused, "other data was not noticed"
        _until_quiet(world)


@dataclass(slots=True)
class _Driver:
    """Spark's driver: runs batches in order, repeats tasks, and starts speculative copies."""

    query: _Query
    attempts: list[Attempt] = field(default_factory=list)
    refused: str = ""
    remembered: dict[Any, driver_probe.Observation] = field(default_factory=dict)

    def main(self) -> None:
        run = self.query.run
        world, story = run.world, run.story
        clock, log = ModelClock(world), ModelLog(world)
        remembered = self.query.remembered = self.remembered
        arranged = len(world.topics[TOPIC])  # by the query, once
        for batch in range(self.query.committed + 1, story.batches):
            count_checked = frozenset(world.count_checked)
            while True:
                try:
                    probe = driver_probe.probe(
                        log, "s", {TOPIC: log.identify(TOPIC)}, at=0, count_checked=count_checked, known=remembered
                    )
                    break
                except CannotReach:
                    clock.wait((), 0.05)
            hold = 10_000 if story.other_data else world.random.choice((100, 10_000))
            plan = Plan(
                "s", patience_seconds=1e6, append_bytes_max=world.random.choice((60, 150, 400)), buffer_bytes=800,
                hold_bytes=hold,
            )  # fmt: skip
            if not self._compare_and_write(probe, plan, batch, arranged):
                return
            run.complete.add(batch)
            # The commit may be lost: the next driver begins with this batch again.
            self.query.committed = max(self.query.committed, batch)

    def _compare_and_write(self, probe: driver_probe.DriverProbe, plan: Plan, batch: int, arranged: int) -> bool:
        """As `append` does. Spark has no hook for a comparison in streams."""
        story = self.query.run.story
        if (story.is_sorted or story.load) and probe.is_partly_written(batch):
            compared = self._run(probe, plan, batch, arranged, only_compares=True)
            if compared is None:
                return False
            try:
                closing.refuse_without_task(plan.sink, compared)
            except SinkError as error:
                self._refuse(str(error), f"batch {batch}")
                return False
        outcomes = self._run(probe, plan, batch, arranged)
        return outcomes is not None and self._commit(plan, batch, outcomes)

    def _run(
        self, probe: driver_probe.DriverProbe, plan: Plan, batch: int, arranged: int, *, only_compares: bool = False
    ) -> list[Outcome] | None:
        """A job: the outcomes of its tasks, or None if it failed."""
        world, story = self.query.run.world, self.query.run.story

        def start(number: int) -> Attempt:
            return self._start(probe, plan, batch, number, tasks[number], arranged, only_compares=only_compares)

        tasks: dict[int, list[Row]] = {number: [] for number in range(arranged)}
        for index, row in enumerate(self.query.run.rows[batch]):
            tasks[index % arranged if story.dealt else row.under(arranged)].append(row)
        done: dict[int, Outcome] = {}
        running: dict[int, list[Attempt]] = {number: [start(number)] for number in tasks}
        failures = 0
        while len(done) < len(tasks):
            waiting = [each for number, several in running.items() if number not in done for each in several]
            assert world.current is not None
            world.current.pause(lambda waiting=waiting: any(each.actor.ended for each in waiting), world.time + 0.05)
            for number, several in running.items():
                for each in list(several):
                    if not each.actor.ended:
                        continue
                    several.remove(each)
                    if each.actor.error is not None:
                        raise each.actor.error
                    if each.outcome is not None:
                        done.setdefault(number, each.outcome)
                        continue
                    if isinstance(each.error, SinkError):
                        if number in done:
                            continue
                        self._refuse(str(each.error), f"batch {batch}, task {number}")
                        self._stop()
                        return None
                    failures += 1
                    if failures > 12:
                        self._stop()
                        return None  # Spark ends the query; it is restarted
                if number in done:
                    continue
                if not several or (len(several) == 1 and world.random.random() < story.speculation):
                    several.append(start(number))
        return list(done.values())

    def _commit(self, plan: Plan, batch: int, outcomes: list[Outcome]) -> bool:
        """Spark may call it again."""
        run = self.query.run
        for _ in range(run.world.random.choice((1, 1, 2))):
            while True:
                try:
                    closing.refuse_without_task(plan.sink, outcomes)
                    if run.story.load:
                        log, clock = ModelLog(run.world), ModelClock(run.world)
                        closing.close(plan, outcomes, log=log, framing=ModelFraming(), clock=clock)
                except CannotReach:
                    continue  # the restarted query is soon here again
                except SinkError as error:
                    self._refuse(str(error), f"batch {batch}")
                    return False
                break
        return True

    def _refuse(self, stated: str, where: str) -> None:
        run = self.query.run
        self.refused = stated
        run.errors.append(stated)
        if run.story.strict and not self._may_refuse(stated):
            raise AssertionError(f"{where}: {stated}")

    def _may_refuse(self, stated: str) -> bool:
        story = self.query.run.story
        return (story.split_brain and "another driver is ahead" in stated) or (
            story.expands and ("start it again" in stated or "run it again" in stated)
        )

    def _stop(self) -> None:
        """Kill the tasks, except zombies."""
        world = self.query.run.world
        for each in self.attempts:
            if world.random.random() >= self.query.run.story.zombies:
                world.kill(each.actor)

    def die(self) -> None:
        self._stop()

    def _start(  # noqa: PLR0917 - what Spark gives a task
        self,
        probe: driver_probe.DriverProbe,
        plan: Plan,
        batch: int,
        number: int,
        rows: list[Row],
        arranged: int,
        *,
        only_compares: bool,
    ) -> Attempt:
        run = self.query.run
        world, story = run.world, run.story
        attempt = Attempt(None, number)  # type: ignore[arg-type]
        kill_after = world.random.randrange(1, 30) if world.random.random() < story.faults.kill else None
        suspend_after = world.random.randrange(1, 30) if world.random.random() < story.faults.suspended else None
        order, is_sorted = list(rows), story.is_sorted or story.load
        if story.shuffled and not is_sorted:
            world.random.shuffle(order)

        def work() -> None:
            write = Write(
                plan, probe, query=self.query.query, batch=batch, task=number, log=ModelLog(world),
                framing=ModelFraming(), clock=ModelClock(world), is_sorted=is_sorted,
                only_compares=only_compares,
            )  # fmt: skip
            one = Task(write)
            try:
                one.begin()
                step = world.random.randrange(1, 12)
                for first in range(0, len(order), step):
                    some = order[first : first + step]
                    placements = np.array([row.place for row in some], np.int64)
                    one.feed(TOPIC, pa.array([row.body for row in some], pa.large_binary()), placements, arranged)
                    ModelClock(world).wait((), 0.001)
                attempt.outcome = one.finish()
                run.found += 0 if only_compares else attempt.outcome.found
            except (SinkError, CannotReach) as error:
                attempt.error = error

        attempt.actor = world.start(f"t{batch}.{number}", work)
        self.attempts.append(attempt)
        if kill_after is not None:
            self._later(attempt.actor, kill_after, lambda: world.kill(attempt.actor))
        if suspend_after is not None:
            self._later(attempt.actor, suspend_after, lambda: self._suspend(attempt.actor))
        return attempt

    def _suspend(self, actor: Actor) -> None:
        """After this step."""
        if not actor.suspended_until:
            actor.suspended_until = self.query.run.world.time + self.query.run.world.random.choice((1.0, 30.0))

    def _later(self, actor: Actor, steps: int, what: Callable[[], None]) -> None:
        """An executor dies or stops, in the middle of a step."""
        left = steps
        original: Callable[[], None] = actor.resume

        def resume() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                what()
            original()

        actor.resume = resume  # type: ignore[method-assign]


def check(run: Run) -> None:
    """Count rows in the log."""
    there: Counter[bytes] = Counter()
    values: dict[bytes, list[bytes]] = {}
    for partition in run.world.topics[TOPIC]:
        offset = 0
        for stored in partition.stored:
            assert stored.base_offset == offset
            offset = stored.next_offset
            if stored.commit_tag is not None:
                there.update(stored.bodies)
                for each in stored.bodies:
                    values.setdefault(each[: 1 + each[0]] if each[0] != 255 else b"", []).append(each)
    for batch, rows in run.rows.items():
        requested = Counter(row.body for row in rows)
        for each, count in requested.items():
            assert there[each] <= count, (
                f"{run.story.name}: batch {batch}: {there[each]} times instead of {count}: {each!r}"
            )
            if batch in run.complete:
                assert there[each] == count, f"{run.story.name}: batch {batch}: a row is missing: {each!r}"
    assert there.total() <= sum(map(len, run.rows.values()))
    if not (run.story.shuffled or run.story.equal_rows or run.story.expands or run.story.keyless or run.story.explicit):
        _check_order(run, values)
    if run.story.explicit:
        for number, partition in enumerate(run.world.topics[TOPIC]):
            requested = Counter(row.body for rows in run.rows.values() for row in rows if row.partition == number)
            found = Counter(each for stored in partition.stored if stored.commit_tag for each in stored.bodies)
            assert found <= requested


def _check_order(run: Run, values: dict[bytes, list[bytes]]) -> None:
    """The rows of each key are in the order of the input."""
    requested = [row.body for batch in sorted(run.rows) for row in run.rows[batch]]
    position = {each: index for index, each in enumerate(requested)}
    for key, found in values.items():
        order = [position[each] for each in found if each in position]
        assert order == sorted(order), f"{run.story.name}: key {key!r} out of order"


SOME = Faults(lost=0.05, answer_lost=0.08, late=0.05, retriable=0.05, unreadable=0.03, suspended=0.1)
CALM = Faults()
_DEADLY = replace(SOME, kill=0.3, foreign=0.1)

STORIES = {
    story.name: story
    for story in (
        Story("calm", CALM),
        Story("lossy", SOME),
        Story("foreign writers", replace(SOME, foreign=0.2)),
        Story("tasks die", replace(SOME, kill=0.4)),
        Story("speculation", SOME, speculation=0.4),
        Story("speculation, other order", SOME, speculation=0.4, shuffled=True),
        Story("zombies", _DEADLY, restarts=3, zombies=1.0),
        Story("zombies, other order", _DEADLY, restarts=3, zombies=1.0, shuffled=True),
        Story("driver restarts", replace(SOME, kill=0.2), restarts=3, shuffled=True, batches=4),
        Story("two drivers", SOME, restarts=2, split_brain=True, shuffled=True),
        Story("equal rows", SOME, restarts=2, equal_rows=True, shuffled=True, speculation=0.2),
        Story("equal rows, dealt", SOME, restarts=3, equal_rows=True, dealt=True, strict=False, zombies=1.0),
        Story("no keys", SOME, restarts=2, keyless=True, shuffled=True, speculation=0.2, partitions=3),
        Story("explicit partitions", SOME, restarts=2, explicit=True, shuffled=True, equal_rows=True),
        Story("restored", SOME, restarts=1, restored=True, shuffled=True, batches=4),
        Story("sorted", SOME, is_sorted=True, restarts=3, batches=4, speculation=0.2),
        Story("sorted, zombies", _DEADLY, is_sorted=True, restarts=3, zombies=1.0, batches=4, speculation=0.4),
        Story("sorted, equal rows", SOME, is_sorted=True, restarts=3, zombies=1.0, equal_rows=True, keyless=True),
        Story("sorted, two drivers", SOME, is_sorted=True, restarts=2, split_brain=True),
        Story("sorted, restored", SOME, is_sorted=True, restored=True, restarts=1, batches=4),
        Story("sorted, other data", SOME, is_sorted=True, other_data=True, strict=False, explicit=True),
        Story("other data", SOME, other_data=True, strict=False, rows=30, shuffled=True),
        Story("deleted checkpoint", SOME, deleted_checkpoint=True, strict=False),
        Story("deleted rows", CALM, deleted_rows=True, strict=False),
        Story("load", CALM, load=True, batches=1, partitions=4),
        Story("load, empty partitions", CALM, load=True, batches=1, partitions=4, rows=4),
        Story("load, lossy", replace(SOME, kill=0.2), load=True, batches=1, restarts=3, zombies=0.0, partitions=3),
        Story("load, zombies", replace(SOME, kill=0.2, foreign=0.1), load=True, batches=1, restarts=4, zombies=1.0),
        Story("load, speculation", _DEADLY, load=True, batches=1, restarts=3, speculation=0.4, zombies=1.0),
        Story("load, equal rows", SOME, load=True, batches=1, restarts=3, equal_rows=True, zombies=0.5, partitions=5),
        Story("load, two drivers", SOME, load=True, batches=1, restarts=3, split_brain=True),
        Story("load, explicit partitions", SOME, load=True, batches=1, restarts=2, explicit=True, partitions=5),
        Story("load, other data of a half", SOME, load=True, batches=1, restarts=1, changed_half="row", rows=80),
        Story("load, other order of a half", SOME, load=True, batches=1, restarts=1, changed_half="order", rows=80),
        Story("sorted, other data of a half", SOME, is_sorted=True, batches=2, restarts=1, changed_half="row", rows=80),
        Story("load, fewer rows than a half", SOME, load=True, batches=1, restarts=1, changed_half="fewer", rows=80),
        Story("expansion", SOME, expands=True, speculation=0.2, shuffled=True, zombies=1.0),
        Story("expansion and restarts", replace(SOME, kill=0.2), expands=True, restarts=3, zombies=1.0, shuffled=True),
        Story("expansion, equal rows", SOME, expands=True, restarts=3, zombies=1.0, shuffled=True, equal_rows=True),
        Story("expansion by a half", SOME, expands=True, restarts=2, zombies=1.0, factor=1.5, speculation=0.2, rows=60),
        Story("expansion, explicit partitions", SOME, expands=True, restarts=2, explicit=True, shuffled=True),
        Story("expansion, no keys", SOME, expands=True, keyless=True, restarts=2, zombies=1.0, partitions=3),
        Story("expansion, sorted", SOME, expands=True, is_sorted=True, restarts=3, zombies=1.0, equal_rows=True),
        Story("expansion, restored", SOME, expands=True, restored=True, restarts=1),
        Story("load, expansion", SOME, load=True, batches=1, restarts=3, expands=True, zombies=0.5, rows=60),
        Story(
            "load, expansion by a half", SOME, load=True, batches=1, restarts=3, expands=True, factor=1.5, rows=60
        ),
        # No task with the old count may run.
        Story(
            "expansion without the check", SOME, expands=True, count_checked=False, restarts=3, zombies=0.0, quiet=True,
            shuffled=True,
        ),
        Story(
            "sorted, expansion without the check", SOME, expands=True, count_checked=False, restarts=3, zombies=0.0,
            quiet=True, is_sorted=True, factor=1.5,
        ),
        Story(
            "expansion without the check, restored", SOME, expands=True, count_checked=False, restored=True, quiet=True,
            zombies=0.0,
        ),
    )
}  # fmt: skip
