"""Scenarios: a query, its driver, its tasks, and what happens to them. Each follows from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from fencepost._partitioning import murmur2
from fencepost.spark import closing, comparing, driver_probe
from fencepost.spark.commit_tags import CommitTag
from fencepost.spark.errors import CannotReach, SinkError
from fencepost.spark.task import Task
from fencepost.spark.write import Outcome, Plan, Write

from .model import Actor, Faults, ModelClock, ModelFraming, ModelLocks, ModelLog, Partition, World, body

TOPIC = "t"


@dataclass(frozen=True, slots=True)
class Row:
    key: bytes | None
    value: bytes
    partition: int | None = None

    @property
    def body(self) -> bytes:
        return body(self.key, self.value)


@dataclass(slots=True)
class Story:
    """`strict`: nothing may be refused."""

    name: str
    faults: Faults
    partitions: int = 2
    tasks: int = 2
    batches: int = 3
    rows: int = 40
    arranged: bool = False
    shuffled: bool = False
    changed_split: bool = False
    #: As Spark's Kafka source: a repeated batch numbers its tasks in another order.
    permuted: bool = False
    #: Rows are dealt to tasks one by one, so equal rows are in several tasks.
    dealt: bool = False
    unmatched: str = "auto"
    same_split: bool = False
    rescued: bool = False
    speculation: float = 0.0
    restarts: int = 0
    zombies: float = 0.5
    split_brain: bool = False
    restored: bool = False
    expands: bool = False
    count_checked: bool = True
    equal_rows: bool = False
    keyless: bool = False
    explicit: bool = False
    strict: bool = True
    deleted_checkpoint: bool = False
    #: Retention deletes the last batch, whose commit is lost. The same driver repeats the batch.
    deleted_rows: bool = False
    other_data: bool = False
    #: The last task with rows is missing, with its rows.
    fewer: bool = False
    #: The query uses rand().
    random_data: bool = False
    #: A driver restarts only when no request is in the network.
    quiet: bool = False
    #: `df.write`: one batch, which is done at its end. Killed drivers may go on.
    load: bool = False
    #: Only tasks on one machine share append locks.
    machines: int = 2


@dataclass(slots=True)
class Run:
    """The result of a story."""

    story: Story
    world: World
    rows: dict[int, list[Row]] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    found: int = 0
    #: Rows that are in the log correctly, although the query no longer has them.
    surplus: int = 0
    #: Rows that drivers appended.
    filled: int = 0
    compared: int = 0
    #: The log has the mark of a finished load.
    marked: bool = False


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
                world.expand(TOPIC, story.partitions * 2)

        world.meddle = expand
    try:
        _Query(run, query="" if story.load else "q").play()
        # Requests in the network arrive, and running tasks end.
        world.run(lambda: not world.network and not world.late and not any(not a.ended for a in world.actors))
        check(run)
    finally:
        world.end_all()
    return run


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
    log: Any = None
    #: Batches that a driver has begun.
    begun: set[int] = field(default_factory=set)
    #: By the driver that began the last one.
    remembered: dict[Any, driver_probe.Known] = field(default_factory=dict)

    def play(self) -> None:
        story, world = self.run.story, self.run.world
        restarts = story.restarts
        split = 0
        tries = 0
        while self.committed < story.batches - 1:
            tries += 1
            assert tries < 60, self.run.errors[-3:]
            driver = _Driver(self, split, arranged=story.arranged)
            kill_at = world.appends + world.random.randrange(1, 25) if restarts > 0 else None
            others = [_Driver(self, split, arranged=story.arranged)] if story.split_brain and restarts else []
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
                if story.quiet:
                    world.run(
                        lambda: not world.network and not world.late and not any(not a.ended for a in world.actors)
                    )
                if story.changed_split:
                    split = world.random.randrange(3)
                continue
            for actor in actors:
                if actor.error is not None:
                    raise actor.error
            if tries > 20 and "the topic was expanded after the batch began" in driver.refused:
                return  # restarts do not help: the user needs another sink.id
            if story.changed_split and driver.refused:
                # The user follows the message.
                if story.rescued:
                    self.run.story = story = replace(story, arranged=True)
                    split = 0
                else:
                    return
        if story.deleted_checkpoint or story.other_data:
            self._start_over()
        if story.random_data:
            self._try_over_and_over()
        if story.load:
            self._load_again()
        if story.deleted_rows:
            self._delete_rows()
        if story.restored:
            # From a backup of the checkpoint: the next batches are already in the log.
            self.committed = world.random.randrange(-1, story.batches - 1)
            before = sum(p.end for p in world.topics[TOPIC])
            driver = _Driver(self, split, arranged=story.arranged)
            actor = world.start("restored", driver.main)
            world.run(lambda: actor.ended)
            if actor.error is not None:
                raise actor.error
            assert not driver.refused, driver.refused
            assert before == sum(p.end for p in world.topics[TOPIC])

    def _start_over(self) -> None:
        """Start under another query id, or repeat the last batch with other rows."""
        run, world = self.run, self.run.world
        world.run(lambda: all(actor.ended for actor in world.actors) and not world.network and not world.late)
        before = {number: p.end for number, p in enumerate(world.topics[TOPIC])}
        last = run.story.batches - 1
        truth = run.rows[last]
        if run.story.deleted_checkpoint:
            self.query, self.committed = "another", -1
        else:
            self.committed = last - 1
            if not run.story.fewer:
                run.rows[last] = [*truth[:-1], Row(truth[-1].key, b"something else", truth[-1].partition)]
        for _ in range(2 if run.story.unmatched == "compare" else 1):
            self._try_again(fewer=run.story.fewer)
        run.rows[last] = truth
        after = {number: p.end for number, p in enumerate(world.topics[TOPIC])}
        if run.story.unmatched == "compare" and not run.story.fewer:
            # The query's current rows are there, too, once each.
            run.surplus = 1
            assert sum(after.values()) == sum(before.values()) + 1
        else:
            assert before == after, "appended before it was refused"

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
        """A finished load appends nothing: the same rows, in any split and order, are done; others are refused."""
        run, world = self.run, self.run.world
        world.run(lambda: all(actor.ended for actor in world.actors) and not world.network and not world.late)
        tags = [each.commit_tag for partition in world.topics[TOPIC] for each in partition.stored if each.commit_tag]
        run.marked = any(CommitTag.decode(tag).done for tag in tags)
        before, truth = sum(p.end for p in world.topics[TOPIC]), run.rows[0]
        check(run)
        if not run.marked:
            assert run.story.faults != _CALM
            return  # another attempt appended the last row
        self.committed = -1
        queries = world.tasks.queries
        driver = _Driver(self, world.random.randrange(3), arranged=run.story.arranged)
        actor = world.start("done", driver.main)
        world.run(lambda: actor.ended)
        assert not actor.error, actor.error
        assert not driver.refused, driver.refused
        assert world.tasks.queries == queries, "tasks of a finished load have read the log"
        run.story = replace(run.story, strict=False)
        changed = [*truth[:-1], Row(truth[-1].key, b"something else", truth[-1].partition)]
        for run.rows[0] in ([*truth, *truth[-2:]], truth[:-1], changed):
            self.committed = -1
            self._try_again()
            assert "is finished: it has written" in run.errors[-1], run.errors[-1]
        run.rows[0] = truth
        assert before == sum(p.end for p in world.topics[TOPIC]), "a finished load has appended"

    def _try_over_and_over(self) -> None:
        run, world = self.run, self.run.world
        last = run.story.batches - 1
        truth, before = run.rows[last], sum(p.end for p in world.topics[TOPIC])
        self.committed = last - 1
        for number in range(4):
            run.rows[last] = [Row(row.key, b"%d %s" % (number, row.value)) for row in truth]
            self._try_again()
        run.rows[last] = truth
        run.surplus = sum(p.end for p in world.topics[TOPIC]) - before
        assert run.surplus <= len(truth), "each try was written"

    def _try_again(self, *, fewer: bool = False, remembered: dict[Any, driver_probe.Known] | None = None) -> None:
        world = self.run.world
        driver = _Driver(self, 0, arranged=self.run.story.arranged, fewer=fewer)
        driver.remembered = driver.remembered if remembered is None else remembered
        actor = world.start("again", driver.main)
        world.run(lambda: actor.ended)
        if actor.error is not None:
            raise actor.error
        assert driver.refused, "other data was not noticed"


@dataclass(slots=True)
class _Driver:
    """Spark's driver: runs batches in order, repeats tasks, and starts speculative copies."""

    query: _Query
    split: int
    arranged: bool
    attempts: list[Attempt] = field(default_factory=list)
    refused: str = ""
    fewer: bool = False
    remembered: dict[Any, driver_probe.Known] = field(default_factory=dict)

    def main(self) -> None:
        run = self.query.run
        world, story = run.world, run.story
        clock, log = ModelClock(world), ModelLog(world)
        remembered = self.query.remembered = self.remembered
        planned = len(world.topics[TOPIC])
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
            if self.arranged and probe.counts[TOPIC] != planned:
                return  # restarted, and arranged again
            hold = 10_000 if story.other_data or story.random_data else world.random.choice((100, 10_000))
            plan = Plan(
                "s", arranged=self.arranged, unmatched=story.unmatched, same_split=story.same_split,
                patience_seconds=1e6, append_bytes_max=world.random.choice((60, 150, 400)), buffer_bytes=800,
                hold_bytes=hold,
            )  # fmt: skip
            again = batch in self.query.begun
            self.query.begun.add(batch)
            if not self._write(probe, plan, batch, planned, again=again):
                return
            run.complete.add(batch)
            # The commit may be lost: the next driver begins with this batch again.
            self.query.committed = max(self.query.committed, batch)

    def _write(self, probe: driver_probe.DriverProbe, plan: Plan, batch: int, planned: int, *, again: bool) -> bool:
        world, story = self.query.run.world, self.query.run.story
        tasks = self._tasks(batch, planned)
        if story.permuted and again:
            tasks = {number: tasks[(number + 1) % len(tasks)] for number in tasks}
        done: dict[int, Outcome] = {}
        running: dict[int, list[Attempt]] = {
            number: [self._start(probe, plan, batch, number, rows)] for number, rows in tasks.items()
        }
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
                        self.refused = str(each.error)
                        self.query.run.errors.append(self.refused)
                        if story.strict and not self._may_refuse(self.refused):
                            raise AssertionError(f"batch {batch}, task {number}: {self.refused}")
                        self._stop()
                        return False
                    failures += 1
                    if failures > 12:
                        self._stop()
                        return False  # Spark ends the query; it is restarted
                if number in done:
                    continue
                if not several or (len(several) == 1 and world.random.random() < story.speculation):
                    several.append(self._start(probe, plan, batch, number, tasks[number]))
        return self._commit(plan, batch, list(done.values()))

    def _commit(self, plan: Plan, batch: int, outcomes: list[Outcome]) -> bool:
        """Spark may call it again."""
        run = self.query.run
        for _ in range(run.world.random.choice((1, 1, 2))):
            while True:
                try:
                    kafka = {
                        "log": ModelLog(run.world),
                        "framing": ModelFraming(),
                        "clock": ModelClock(run.world),
                    }
                    compared = comparing.compare(plan, outcomes, **kafka)
                    if run.story.load:
                        closing.close(plan, outcomes, **kafka)
                except CannotReach:
                    continue  # the restarted query is soon here again
                except SinkError as error:
                    self.refused = str(error)
                    run.errors.append(self.refused)
                    if run.story.strict and not self._may_refuse(self.refused):
                        raise AssertionError(f"batch {batch}: {self.refused}") from error
                    return False
                break
            if compared is not None:
                run.compared += 1
                run.filled += compared.appended
        return True

    def _may_refuse(self, stated: str) -> bool:
        story = self.query.run.story
        if story.load and "(run it again" in stated:
            return True
        return (story.split_brain and "another driver is ahead" in stated) or (
            story.expands and story.arranged and "since the rows were arranged" in stated
        )

    def _stop(self) -> None:
        """Kill the tasks, except zombies."""
        world = self.query.run.world
        for each in self.attempts:
            if world.random.random() >= self.query.run.story.zombies:
                world.kill(each.actor)

    def die(self) -> None:
        self._stop()

    def _tasks(self, batch: int, planned: int) -> dict[int, list[Row]]:
        run = self.query.run
        story, world = run.story, run.world
        count = planned if self.arranged else story.tasks + self.split
        tasks: dict[int, list[Row]] = {number: [] for number in range(count)}
        for index, row in enumerate(run.rows[batch]):
            if self.arranged:
                tasks[_partition_of(row, planned)].append(row)
            elif row.key is None or story.dealt:
                tasks[index % count].append(row)
            else:
                tasks[murmur2(row.key + b"!", count)].append(row)
        if self.fewer:
            del tasks[max(number for number, rows in tasks.items() if rows)]
        if story.shuffled:
            for rows in tasks.values():
                world.random.shuffle(rows)
        return tasks

    def _start(self, probe: driver_probe.DriverProbe, plan: Plan, batch: int, number: int, rows: list[Row]) -> Attempt:
        run = self.query.run
        world, story = run.world, run.story
        attempt = Attempt(None, number)  # type: ignore[arg-type]
        kill_after = world.random.randrange(1, 30) if world.random.random() < story.faults.kill else None
        suspend_after = world.random.randrange(1, 30) if world.random.random() < story.faults.suspended else None
        machine = world.random.randrange(story.machines)
        order = list(rows)
        if story.shuffled:
            world.random.shuffle(order)

        def work() -> None:
            write = Write(
                plan, probe, query=self.query.query, batch=batch, task=number, attempt=f"{world.random.random()}",
                log=ModelLog(world), framing=ModelFraming(), clock=ModelClock(world), locks=ModelLocks(world, machine),
            )  # fmt: skip
            one = Task(write)
            try:
                one.begin()
                step = world.random.randrange(1, 12)
                for first in range(0, len(order), step):
                    some = order[first : first + step]
                    over = write.over[TOPIC]
                    partitions = [
                        write.default_partition(TOPIC)
                        if r.key is None and r.partition is None
                        else _partition_of(r, over)
                        for r in some
                    ]
                    explicit = np.array([r.partition is not None for r in some]) if story.explicit else None
                    if self.arranged and not story.explicit:
                        explicit = np.ones(len(some), dtype=bool)
                        partitions = [_partition_of(r, len(probe.counts) and probe.counts[TOPIC]) for r in some]
                    one.feed(TOPIC, pa.array([r.body for r in some], pa.large_binary()), partitions, explicit)
                    ModelClock(world).wait((), 0.001)
                attempt.outcome = one.finish()
                run.found += attempt.outcome.found
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


def _partition_of(row: Row, count: int) -> int:
    if row.partition is not None:
        return row.partition
    assert row.key is not None
    return murmur2(row.key, count)


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
                    if (key := ModelFraming.key(each)) is not None:
                        values.setdefault(key, []).append(each)
    for batch, rows in run.rows.items():
        requested = Counter(row.body for row in rows)
        for each, count in requested.items():
            assert there[each] <= count, (
                f"{run.story.name}: batch {batch}: {there[each]} times instead of {count}: {each!r}"
            )
            if batch in run.complete:
                assert there[each] == count, f"{run.story.name}: batch {batch}: a row is missing: {each!r}"
    assert there.total() <= sum(map(len, run.rows.values())) + run.surplus
    reported = run.story
    if not (reported.shuffled or reported.changed_split or reported.equal_rows or reported.expands or reported.dealt):
        _check_order(run, values)
    if run.story.explicit:
        for number, partition in enumerate(run.world.topics[TOPIC]):
            requested = Counter(row.body for rows in run.rows.values() for row in rows if row.partition == number)
            found = Counter(each for stored in partition.stored if stored.commit_tag for each in stored.bodies)
            assert found <= requested


def _check_order(run: Run, values: dict[bytes, list[bytes]]) -> None:
    """The rows of each key are in the order of the input: a key is in one task and one partition."""
    if run.story.explicit:
        return
    for key, found in values.items():
        requested = [row.body for batch in sorted(run.rows) for row in run.rows[batch] if row.key == key]
        position = {each: index for index, each in enumerate(requested)}
        order = [position[each] for each in found if each in position]
        assert order == sorted(order), f"{run.story.name}: key {key!r} out of order"


_SOME = Faults(lost=0.05, answer_lost=0.08, late=0.05, retriable=0.05, unreadable=0.03, suspended=0.1)
_CALM = Faults()

STORIES = {
    story.name: story
    for story in (
        Story("calm", _CALM),
        Story("contention", _CALM, tasks=5, partitions=2, batches=2),
        Story("lossy", _SOME),
        Story("lossy contention", _SOME, tasks=4, rows=60, batches=2),
        Story("foreign writers", replace(_SOME, foreign=0.2)),
        Story("tasks die", replace(_SOME, kill=0.4)),
        Story("speculation", _SOME, speculation=0.3),
        Story("speculation, other order", _SOME, speculation=0.3, shuffled=True),
        Story("zombies, other order", replace(_SOME, kill=0.3, foreign=0.1), restarts=3, zombies=1.0, shuffled=True),
        Story("zombies", replace(_SOME, kill=0.3), restarts=3, zombies=1.0),
        Story("driver restarts", replace(_SOME, kill=0.2), restarts=3, shuffled=True, batches=4),
        Story("two drivers", _SOME, restarts=2, split_brain=True, shuffled=True),
        Story("equal rows", _SOME, restarts=2, equal_rows=True, shuffled=True, speculation=0.2),
        Story("no keys", _SOME, restarts=2, keyless=True, shuffled=True, speculation=0.2, tasks=3),
        Story("explicit partitions", _SOME, restarts=2, explicit=True, shuffled=True, equal_rows=True),
        Story("restored", _SOME, restarts=1, restored=True, shuffled=True, batches=4),
        Story("arranged", _SOME, arranged=True, restarts=3, zombies=1.0, shuffled=True, batches=4),
        Story("arranged, restored", _SOME, arranged=True, restored=True, restarts=1, batches=4),
        Story("permuted", _SOME, restarts=4, permuted=True, zombies=1.0, tasks=3),
        Story("permuted, calm", _CALM, restarts=4, permuted=True, zombies=0.0),
        Story("permuted, few rows", _CALM, restarts=4, permuted=True, zombies=0.0, rows=16, batches=4),
        Story("permuted, other order", _SOME, restarts=4, permuted=True, shuffled=True, tasks=4, speculation=0.2),
        Story(
            "permuted, equal rows", _SOME, restarts=4, permuted=True, dealt=True, equal_rows=True, unmatched="compare"
        ),
        Story("permuted, then restored", _SOME, restarts=2, permuted=True, restored=True, batches=4, tasks=3),
        Story("permuted, expansion", _SOME, restarts=3, permuted=True, expands=True, tasks=3),
        # The driver cannot know the partition of a missing copy, and refuses.
        Story(
            "permuted, expansion, equal rows",
            _SOME,
            restarts=3,
            permuted=True,
            expands=True,
            dealt=True,
            equal_rows=True,
            unmatched="compare",
            zombies=1.0,
            strict=False,
        ),
        Story("permuted, explicit partitions", _SOME, restarts=3, permuted=True, explicit=True, equal_rows=True),
        # Several tasks find one copy of a row; the driver appends the missing ones.
        Story("equal rows in tasks", _SOME, restarts=3, dealt=True, equal_rows=True, tasks=3, speculation=0.2),
        Story("other splits", _SOME, restarts=4, changed_split=True, zombies=1.0, unmatched="compare"),
        Story("other splits, calm", _CALM, restarts=4, changed_split=True, unmatched="compare", tasks=1, zombies=0.5),
        Story(
            "other splits, equal rows",
            _SOME,
            restarts=4,
            changed_split=True,
            dealt=True,
            equal_rows=True,
            unmatched="compare",
            zombies=1.0,
        ),
        Story("other data, compared", _SOME, other_data=True, strict=False, rows=30, unmatched="compare"),
        Story(
            "other data, fewer tasks",
            _SOME,
            other_data=True,
            fewer=True,
            strict=False,
            rows=30,
            tasks=3,
            unmatched="compare",
        ),
        Story(
            "other data, arranged, a partition is empty now",
            _SOME,
            arranged=True,
            other_data=True,
            fewer=True,
            strict=False,
        ),
        Story("other data, arranged", _SOME, arranged=True, other_data=True, strict=False),
        Story("other data each time", _CALM, random_data=True, strict=False, rows=30, batches=1),
        Story("changed split", _SOME, restarts=4, changed_split=True, strict=False, zombies=1.0),
        Story("changed split, calm", _CALM, restarts=4, changed_split=True, strict=False, zombies=0.5, tasks=1),
        Story("changed split, equal rows", _SOME, restarts=4, changed_split=True, strict=False, equal_rows=True),
        Story("changed split, then arranged", _SOME, restarts=4, changed_split=True, rescued=True, strict=False),
        # The partition of rows without a key depends on their task, so no task of the old split may run.
        Story(
            "changed split, no keys",
            Faults(retriable=0.1),
            restarts=4,
            changed_split=True,
            strict=False,
            zombies=0.0,
            keyless=True,
            quiet=True,
        ),
        *(
            Story(
                f"{'load' if load else 'stream'}, other splits, no keys{', equal rows' if equal else ''}, all searched",
                Faults(retriable=0.1, unreadable=0.03, foreign=0.1),
                restarts=4,
                changed_split=True,
                zombies=0.0,
                keyless=True,
                quiet=True,
                equal_rows=equal,
                tasks=1,
                unmatched="compare",
                same_split=True,
                # Equal rows in several partitions may be found in one, and missed in another.
                strict=not equal,
                load=load,
                batches=1 if load else 3,
            )
            for load in (False, True)
            for equal in (False, True)
        ),
        Story("load", _CALM, load=True, batches=1),
        Story("load, lossy", replace(_SOME, kill=0.2), load=True, batches=1, restarts=3, tasks=3, zombies=0.0),
        Story("load, zombies", replace(_SOME, kill=0.2, foreign=0.1), load=True, batches=1, restarts=4, zombies=1.0),
        Story(
            "load, other order", _SOME, load=True, batches=1, restarts=3, zombies=1.0, shuffled=True, speculation=0.4
        ),
        Story("load, equal rows", _SOME, load=True, batches=1, restarts=3, equal_rows=True, zombies=0.5, tasks=5),
        Story("load, arranged", _SOME, load=True, batches=1, restarts=3, arranged=True, zombies=0.5, partitions=3),
        Story("load, expansion", _SOME, load=True, batches=1, restarts=2, expands=True, zombies=0.5, tasks=3),
        Story("load, two drivers", _SOME, load=True, batches=1, restarts=3, split_brain=True, shuffled=True),
        Story(
            "load, other splits",
            _SOME,
            load=True,
            batches=1,
            restarts=4,
            changed_split=True,
            dealt=True,
            equal_rows=True,
            unmatched="compare",
            zombies=1.0,
        ),
        Story("deleted checkpoint", _SOME, deleted_checkpoint=True, strict=False),
        Story("deleted rows", _CALM, deleted_rows=True, strict=False),
        Story("other data", _SOME, other_data=True, strict=False, rows=30),
        Story("expansion", _SOME, expands=True, speculation=0.2, shuffled=True),
        Story(
            "expansion and copies", _CALM, expands=True, speculation=0.9, tasks=1, partitions=3, rows=80, shuffled=True
        ),
        Story("expansion and restarts", replace(_SOME, kill=0.2), expands=True, restarts=3, zombies=1.0, shuffled=True),
        Story("expansion, arranged", _SOME, expands=True, arranged=True, restarts=2, zombies=1.0),
        Story(
            "expansion without the check",
            _SOME,
            expands=True,
            count_checked=False,
            restarts=3,
            zombies=0.0,
            shuffled=True,
        ),
        Story(
            "expansion without the check, restored",
            _SOME,
            expands=True,
            count_checked=False,
            restored=True,
            zombies=0.0,
        ),
        Story("expansion, restored", _SOME, expands=True, restored=True, restarts=1),
        Story("expansion, no keys", _SOME, expands=True, keyless=True, restarts=2, zombies=1.0, tasks=3),
    )
}
