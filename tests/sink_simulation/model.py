"""A log that compares and appends, a network that loses and delays, and a simulated clock.

Tasks are blocking code, so each runs in a thread. One runs at a time; the seed determines the order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from fencepost.spark.errors import CannotReach, Unknown
from fencepost.spark.interfaces import TopicIdentity


class Killed(BaseException):
    """The process was killed."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A record batch, not encoded."""

    bodies: tuple[bytes, ...]
    commit_tag: bytes | None
    expected: int | None
    count: int | None


@dataclass(frozen=True, slots=True)
class Stored:
    """`compacted`: number of records that compaction removed."""

    base_offset: int
    bodies: tuple[bytes, ...]
    commit_tag: bytes | None
    compacted: int = 0

    @property
    def next_offset(self) -> int:
        return self.base_offset + len(self.bodies) + self.compacted

    @property
    def is_whole(self) -> bool:
        return self.compacted == 0


@dataclass(slots=True)
class Partition:
    stored: list[Stored] = field(default_factory=list)
    start: int = 0
    end: int = 0
    #: Readers see no more than this.
    high_watermark: int = 0
    leader_epoch: int = 0

    def append(self, bodies: tuple[bytes, ...], commit_tag: bytes | None) -> int:
        base = self.end
        self.stored.append(Stored(base, bodies, commit_tag))
        self.end = base + len(bodies)
        return base


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    base_offset: int = -1
    message: str | None = None


@dataclass(slots=True)
class Request:
    topic_partition: tuple[str, int]
    batch: Batch
    answer: Future[Any]


@dataclass(slots=True)
class Faults:
    """Probabilities, per request."""

    lost: float = 0.0
    answer_lost: float = 0.0
    late: float = 0.0
    retriable: float = 0.0
    unreadable: float = 0.0
    foreign: float = 0.0
    kill: float = 0.0
    #: Per task attempt: its process stops for seconds.
    suspended: float = 0.0


class Actor:
    """A process, or a task in one. It runs until it pauses or ends."""

    def __init__(self, world: World, name: str, work: Callable[[], None]) -> None:
        self.world = world
        self.name = name
        self.ready: Callable[[], bool] = lambda: True
        self.deadline: float | None = None
        self.ended = False
        self.killed = False
        self.suspended_until = 0.0
        self.error: BaseException | None = None
        self._work = work
        self._baton = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._baton.acquire()
        try:
            if not self.killed:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.ended = True
        self.world.back.release()

    def resume(self) -> None:
        self._baton.release()
        self.world.back.acquire()

    def pause(self, ready: Callable[[], bool], deadline: float | None) -> None:
        self.ready, self.deadline = ready, deadline
        self.world.back.release()
        self._baton.acquire()
        if self.killed:
            raise Killed


@dataclass(slots=True)
class Requests:
    """Of the tasks, or of the drivers. `read_bytes`: of the batches that they fetched."""

    queries: int = 0
    read_bytes: int = 0


class World:
    def __init__(self, seed: int, faults: Faults) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.time = 0.0
        self.topics: dict[str, list[Partition]] = {}
        self.count_checked: set[str] = set()
        self.network: list[Request] = []
        self.late: list[Request] = []
        self.actors: list[Actor] = []
        self.back = threading.Semaphore(0)
        self.current: Actor | None = None
        self.refusals = 0
        self.appends = 0
        self.sent = 0
        self.tasks, self.drivers = Requests(), Requests()
        #: Called between two steps: faults and changes of the story.
        self.meddle: Callable[[], None] = lambda: None

    # --- scheduling -----------------------------------------------------------------------------------------------

    def start(self, name: str, work: Callable[[], None]) -> Actor:
        actor = Actor(self, name, work)
        self.actors.append(actor)
        return actor

    def run(self, until: Callable[[], bool], steps_max: int = 60_000) -> None:
        for _ in range(steps_max):
            if until():
                return
            self.step()
        raise AssertionError(f"no end after {steps_max} steps")

    def step(self) -> None:
        self.time += 0.001
        self.meddle()
        self.actors = [actor for actor in self.actors if not actor.ended]
        able = [a for a in self.actors if a.killed or self._is_able(a)]
        choices = len(able) + len(self.network)
        if self.late and (not choices or self.random.random() < 0.03):
            self._arrive(self.late.pop(self.random.randrange(len(self.late))))
            return
        if not choices:
            deadlines = [
                max(actor.suspended_until, 0.0 if actor.ready() else actor.deadline or 0.0)
                for actor in self.actors
                if actor.deadline is not None or actor.suspended_until > self.time
            ]
            if not deadlines:
                raise AssertionError("all wait for each other")
            self.time = max(self.time, min(deadlines))
            return
        chosen = self.random.randrange(choices)
        if chosen >= len(able):
            self._deliver(self.network.pop(chosen - len(able)))
            return
        self.current = able[chosen]
        self.current.resume()
        self.current = None

    def _is_able(self, actor: Actor) -> bool:
        if actor.suspended_until > self.time:
            return False
        return actor.ready() or (actor.deadline is not None and actor.deadline <= self.time)

    def kill(self, actor: Actor) -> None:
        """Takes effect at its next step. Its requests stay in the network."""
        actor.killed = True

    def end_all(self) -> None:
        for actor in self.actors:
            actor.killed = True
        while any(not actor.ended for actor in self.actors):
            for actor in self.actors:
                if not actor.ended:
                    actor.resume()

    # --- the log --------------------------------------------------------------------------------------------------

    def _deliver(self, request: Request) -> None:
        dice, faults = self.random.random(), self.faults
        if dice < faults.lost:
            request.answer.set_exception(Unknown("the connection was lost"))
            return
        dice -= faults.lost
        if dice < faults.late:
            request.answer.set_exception(Unknown("no answer in time"))
            self.late.append(request)
            return
        dice -= faults.late
        if dice < faults.retriable:
            request.answer.set_result(Answer(self.random.choice((6, 7, 19))))
            return
        answer = self._arrive(request)
        if self.random.random() < faults.answer_lost:
            request.answer.set_exception(Unknown("the connection was lost"))
            return
        if answer.code == 0:
            partition = self.topics[request.topic_partition[0]][request.topic_partition[1]]
            partition.high_watermark = max(partition.high_watermark, answer.base_offset + len(request.batch.bodies))
        request.answer.set_result(answer)

    def _arrive(self, request: Request) -> Answer:
        (topic, number), batch = request.topic_partition, request.batch
        partition = self.topics[topic][number]
        if topic in self.count_checked and batch.count is not None and batch.count != len(self.topics[topic]):
            return Answer(37, -1, "INVALID_PARTITION_COUNT")
        if batch.expected is not None and batch.expected != partition.end:
            self.refusals += 1
            known = self.random.random() < 0.5
            return Answer(44, partition.end if known else -1, "OFFSET_MISMATCH" if known else None)
        if self.random.random() < self.faults.foreign:
            # Another writer was first.
            partition.append(tuple(b"\1foreign" for _ in range(self.random.randrange(1, 4))), None)
            return Answer(44, -1, None)
        self.appends += 1
        return Answer(0, partition.append(batch.bodies, batch.commit_tag))

    def expand(self, topic: str, count: int) -> None:
        """As the proxy does: no request is in flight and everything is replicated."""
        for partition in self.topics[topic]:
            partition.high_watermark = partition.end
        self.topics[topic] += [Partition() for _ in range(count - len(self.topics[topic]))]


class ModelLog:
    """`fencepost.spark.interfaces.Log`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _breathe(self, queries: int = 1) -> None:
        world = self._world
        assert world.current is not None
        self._requests().queries += queries
        world.current.pause(lambda: True, None)
        if world.random.random() < world.faults.unreadable:
            raise CannotReach("no answer")

    def identify(self, topic: str) -> TopicIdentity:
        self._breathe()
        epochs = {number: partition.leader_epoch for number, partition in enumerate(self._world.topics[topic])}
        return TopicIdentity(f"id of {topic}", epochs)

    def partition_count(self, topic: str) -> int:
        return self.identify(topic).partitions

    def _requests(self) -> Requests:
        current = self._world.current
        return self._world.tasks if current is not None and current.name.startswith("t") else self._world.drivers

    def _fetched(self, stored: Stored) -> Stored:
        self._requests().read_bytes += sum(map(len, stored.bodies))
        return stored

    def offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        self._breathe(2)
        found = {}
        for number in partitions:
            partition = self._world.topics[topic][number]
            if self._world.random.random() < 0.5:
                partition.high_watermark = partition.end
            found[number] = (partition.start, partition.high_watermark)
        return found

    def append(self, topic: str, partition: int, batch: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self._world.sent += 1
        self._world.network.append(Request((topic, partition), batch, answer))
        return answer

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Stored]:
        self._breathe()
        at = self._world.topics[topic][partition]
        if start < at.start:
            raise AssertionError(f"read below the log's start: {start}")
        at.high_watermark = max(at.high_watermark, min(end, at.end))
        for stored in list(at.stored):
            if stored.next_offset > start and stored.base_offset < end:
                yield self._fetched(stored)

    def last_batch(self, topic: str, partition: int, end: int) -> Stored | None:
        return self.last_batches(topic, {partition: end})[partition]

    def last_batches(self, topic: str, ends: Mapping[int, int]) -> dict[int, Stored | None]:
        self._breathe()
        found: dict[int, Stored | None] = dict.fromkeys(ends)
        for partition, end in ends.items():
            at = self._world.topics[topic][partition]
            at.high_watermark = max(at.high_watermark, min(end, at.end))  # a reader waits for the replicas
            for stored in at.stored:
                if stored.next_offset == end:
                    found[partition] = self._fetched(stored)
        return found


class ModelClock:
    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.time

    def time_ms(self) -> int:
        return int(self._world.time * 1000)

    def random(self) -> float:
        return self._world.random.random()

    def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        assert self._world.current is not None
        waited = list(futures)
        self._world.current.pause(lambda: any(each.done() for each in waited), self._world.time + seconds)


class ModelFraming:
    """A body is a length, a key (or 255 for none), a value."""

    @staticmethod
    def build(
        bodies: pa.Array,
        *,
        commit_tag: bytes,
        expected: int,
        now_ms: int,
        partition: tuple[str, int],
        partition_count: int | None,
    ) -> Any:
        return Batch(tuple(bodies.to_pylist()), commit_tag, expected, partition_count)

    @staticmethod
    def key(body: bytes) -> bytes | None:
        return None if body[0] == 255 else body[1 : 1 + body[0]]


def body(key: bytes | None, value: bytes) -> bytes:
    return b"\xff" + value if key is None else bytes([len(key)]) + key + value
