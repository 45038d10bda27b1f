"""Expansions in a model: two proxy processes with writers, a transaction, and a Kafka that may not answer.

The procedure stops before and after each effect, by the death of the driver or of the other process. In the end the
expansion has ended, thresholds separate records of the old count from those of the new one, and writers may write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from uuid import UUID

import pytest

from fencepost_proxy.errors import Error
from fencepost_proxy.expansion import procedure as ex
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.expansion.history import Expansion
from fencepost_proxy.topics.state import StateView, TopicConfigChange
from fencepost_proxy.types import LeaderEpoch, LogEndOffset, Offset, ProducerEpoch, ProducerId
from fencepost_proxy.wire.state_records import StateRecord

TOPIC_ID = UUID(int=0x70)
WAIT_SECONDS = 60.0
IN_DOUBT_SECONDS = 30.0
#: After its last heartbeat a process may append for 75 s, and what it sent may be in a queue.
DEAD_SECONDS = 75.0 + IN_DOUBT_SECONDS
STEP_SECONDS = 0.05
#: How long an append is on its way, and one whose connection broke at the most.
ON_ITS_WAY_SECONDS = 0.3
IN_A_QUEUE_SECONDS = 20.0
TRANSACTIONAL = ProducerId(7), ProducerEpoch(0)


def new_procedure(
    expansion: Expansion, now: float, new_id: Callable[[], UUID], clock_ms: Callable[[], int], taken_over: bool
) -> ex.Procedure:
    waits = {"wait_seconds": WAIT_SECONDS, "in_doubt_seconds": IN_DOUBT_SECONDS}
    return ex.Procedure(expansion, now, **waits, new_id=new_id, clock_ms=clock_ms, taken_over=taken_over)


@dataclass
class Kafka:
    """One topic. `logs` – per partition, the count under which each record was placed."""

    topic_id: UUID | None = TOPIC_ID
    logs: list[list[int]] = field(default_factory=lambda: [[2, 2], [2]])
    unreplicated: int = 0
    transaction_until: float | None = None
    leaderless_until: float = 0.0
    #: What the controller says instead of creating; None: nothing is wrong.
    refuses: ex.Refused | None = None
    #: Lagging metadata shows so many partitions.
    metadata_shows: int | None = None
    created: Counter[int] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return len(self.logs)

    def create(self, requested: ex.CreatePartitions) -> ex.Answer:
        if self.topic_id is None:  # it goes by the name: a recreated topic would do
            return ex.Refused(Error.UNKNOWN_TOPIC_OR_PARTITION, None)
        if self.refuses is not None:
            return self.refuses
        if requested.to_count <= self.count:
            return ex.Refused(Error.INVALID_PARTITIONS, f"Topic already has {self.count} partition(s).")
        if not requested.validate_only:
            self.created[requested.to_count] += 1
            self.logs += [[] for _ in range(self.count, requested.to_count)]
        return ex.Created()


@dataclass
class Flight:
    """An append on its way; `count` – under which it was placed."""

    process: Process
    number: int
    partition: int
    count: int
    appended_at: float


class World:
    """Times are seconds from the start."""

    def __init__(self, processes: int = 2) -> None:
        self.now = 0.0
        self.kafka = Kafka()
        self.view = StateView("cluster")
        self.records: list[StateRecord] = []
        self.names = iter(UUID(int=0x1000 + number) for number in range(10_000))
        self.processes = [Process(self) for _ in range(processes)]
        self.flights: list[Flight] = []
        self.effects = 0
        self.ended: list[ex.Ended] = []

    def new_id(self) -> UUID:
        return next(self.names)

    def append(self, records: Iterable[StateRecord]) -> None:
        for record in records:
            assert record.key not in {each.key for each in self.records}, "no key is ever written twice"
            stated = self.view.apply(Offset(len(self.records)), record.key, record.value)
            assert stated is None, stated
            self.records.append(record)
        for process in self.processes:
            process.view_changed()

    @property
    def history(self) -> ex.ExpansionHistory:
        return self.view.history("orders", TOPIC_ID)

    def may_append(self) -> list[Process]:
        """As the other processes know it."""
        known = [each for each in self.processes if each.known]
        return [each for each in known if each.died_at is None or self.now < each.died_at + each.dead_seconds]

    def living(self) -> list[Process]:
        return [each for each in self.processes if each.died_at is None]

    def run(self, until: Callable[[], bool], seconds: float = 400.0) -> None:
        end = self.now + seconds
        while not until():
            assert self.now < end, f"it never came: {[each.state for each in self.processes]} {self.history}"
            self.now += STEP_SECONDS
            for flight in [each for each in self.flights if each.appended_at <= self.now]:
                self.flights.remove(flight)
                self.kafka.logs[flight.partition].append(flight.count)
                flight.process.appended_batch(flight)
            for process in self.living():
                if process.deaf_until <= self.now < process.deaf_until + STEP_SECONDS:
                    process.view_changed()
                process.write()
                process.close_barrier()
                process.drive()

    def expand(self, to: int, driver: int = 0) -> ex.Procedure:
        return self.processes[driver].begin(to)

    def check(self) -> None:
        """Of each expansion that succeeded."""
        for expansion in self.history.ordered:
            for prior_partition, threshold in enumerate(expansion.thresholds):
                log = self.kafka.logs[prior_partition]
                assert all(count <= expansion.from_count for count in log[:threshold]), "placed under the new count"
                assert all(count >= expansion.to_count for count in log[threshold:]), "after the threshold"
            for created_partitions in expansion.created_partitions:
                assert all(count >= expansion.to_count for count in self.kafka.logs[created_partitions])


class Process:
    """A proxy process with a writer that never pauses."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.name = world.new_id()
        self.barrier = AppendBarrier("orders", in_doubt_seconds=IN_DOUBT_SECONDS)
        self.closing: ex.Closing | None = None
        self.procedure: ex.Procedure | None = None
        self.died_at: float | None = None
        self.dead_seconds = DEAD_SECONDS
        self.crash_at: tuple[int, str] | None = None
        self.unanswered_at: tuple[int, str] | None = None
        #: False: its first record is lost, or on its way.
        self.known = True
        #: Within its lease, its view of the state topic may be that old.
        self.deaf_until = float("-inf")
        self.written = 0
        self.view_changed()

    @property
    def state(self) -> str:
        return f"{self.procedure.step if self.procedure else None} {self.closing} dead since {self.died_at}"

    def view_changed(self) -> None:
        if self.died_at is not None or self.world.now < self.deaf_until:
            return
        history = self.world.history
        if history.pending is None:
            self.closing = None
            if self.barrier.closed or self.barrier.count != (history.count or 2):
                self.barrier.open(history.count or 2)
        elif self.closing is None or self.closing.expansion.proposal != history.pending.proposal:
            self.barrier.close(self.world.now)
            self.closing = ex.Closing(history.pending)

    # ---- what it appends

    def write(self) -> None:
        world = self.world
        number, count = self.written, self.barrier.count or 2
        if not self.known or self.barrier.in_flight or not self.barrier.enter(number, world.now):
            return
        self.written += 1
        world.flights.append(Flight(self, number, number % count, count, world.now + ON_ITS_WAY_SECONDS))

    def appended_batch(self, flight: Flight) -> None:
        if self.died_at is None:
            self.barrier.leave(flight.number, self.world.now)

    def die(self) -> None:
        """What it sent stays in a queue."""
        self.died_at = self.world.now
        for flight in self.world.flights:
            if flight.process is self:
                flight.appended_at = self.world.now + IN_A_QUEUE_SECONDS

    # ---- what it does about an expansion

    def close_barrier(self) -> None:
        world, closing = self.world, self.closing
        if closing is None or self.died_at is not None:
            return
        requested = closing.query(world.history, self.name, empty=self.barrier.empty(world.now), now=world.now)
        if isinstance(requested, ex.Append):
            self.carry_out(requested)
        elif isinstance(requested, ex.ProbeTransactions):
            hold = closing.handle(self.probe_transactions(), world.now)
            if hold is not None:
                self.barrier.close(world.now, but_for=hold.but_for)

    def probe_transactions(self) -> ex.TransactionsOpen:
        until = self.world.kafka.transaction_until
        return ex.TransactionsOpen({} if until is None or until <= self.world.now else {1: [TRANSACTIONAL]})

    def begin(self, to: int) -> ex.Procedure:
        count = self.world.history.count or 2
        expansion = Expansion("orders", TOPIC_ID, count, to, self.world.new_id(), 0, process=self.name)
        self.procedure = procedure = self._procedure(expansion)
        return procedure

    def _procedure(self, expansion: Expansion, *, taken_over: bool = False) -> ex.Procedure:
        world = self.world
        return new_procedure(expansion, world.now, world.new_id, lambda: int(world.now * 1000), taken_over)

    def drive(self) -> None:
        world = self.world
        if self.procedure is None:
            live = frozenset(each.name for each in world.living() if each is not self)
            match ex.driver(
                world.history, own_names=frozenset({self.name}), process=self.name, live=live, new_id=world.new_id
            ):
                case ex.Drive(expansion):
                    self.procedure = self._procedure(expansion, taken_over=True)
                case ex.Claim(record):
                    self.carry_out(ex.Append((record,)))
            return
        not_closed = tuple(each.name for each in world.may_append() if each.name not in world.history.closed)
        requested = self.procedure.query(ex.World(world.history, frozenset({self.name}), not_closed), world.now)
        if isinstance(requested, ex.Ended):
            world.ended.append(requested)
            self.procedure = None
        elif not isinstance(requested, ex.Wait):
            answer = self.carry_out(requested)
            if answer is not None and self.procedure is not None:
                self.procedure.handle(answer, world.now)

    def carry_out(self, requested: ex.Effect) -> ex.Answer | None:
        """None: the process died, before or after it."""
        number, self.world.effects = self.world.effects, self.world.effects + 1
        if self.crash_at == (number, "before"):
            self.die()
            return None
        lost = self.unanswered_at == (number, "lost")
        answer = ex.Unanswered("no answer") if lost else self._done(requested)
        if self.crash_at == (number, "after"):
            self.die()
            return None
        if lost or self.unanswered_at == (number, "done, not answered"):
            return ex.NotAppended("no answer", True) if isinstance(requested, ex.Append) else ex.Unanswered("no answer")
        return answer

    def _done(self, requested: ex.Effect) -> ex.Answer:
        kafka, now = self.world.kafka, self.world.now
        match requested:
            case ex.Append(records):
                self.world.append(records)
                return ex.Appended()
            case ex.Describe():
                shown = kafka.count if kafka.metadata_shows is None else kafka.metadata_shows
                leaderless = (shown - 1,) if now < kafka.leaderless_until else ()
                return ex.Described(kafka.topic_id, shown, leaderless)
            case ex.ProbeTransactions():
                return self.probe_transactions()
            case ex.CreatePartitions():
                return kafka.create(requested)
            case ex.ReadEnds() if kafka.topic_id is None:
                return ex.Unanswered("no such topic")
            case ex.ReadEnds(partitions):
                ends = [LogEndOffset(len(kafka.logs[each])) for each in partitions]
                kafka.unreplicated, lag = max(0, kafka.unreplicated - 1), kafka.unreplicated
                return ex.Ends(tuple(ex.PartitionEnd(LeaderEpoch(3), end, Offset(max(0, end - lag))) for end in ends))


def expanded(world: World, to: int) -> Callable[[], bool]:
    return lambda: world.history.pending is None and world.history.count == to


def over(world: World) -> Callable[[], bool]:
    return lambda: bool(world.ended) and world.history.pending is None


def writes_on(world: World) -> None:
    """Every live process appends, under the current count."""
    before = [each.written for each in world.living()]
    world.run(lambda: all(each.written > old + 3 for each, old in zip(world.living(), before, strict=True)))


@pytest.fixture
def world() -> World:
    return World()


# --- as it should go --------------------------------------------------------------------------------------------------


def test_topic_expands_repeatedly_under_load(world: World) -> None:
    for to in (3, 5, 8):
        world.expand(to)
        world.run(expanded(world, to))
        writes_on(world)
    assert [each.result for each in world.ended] == [ex.Result.DONE] * 3
    assert [(each.from_count, each.to_count) for each in world.history.ordered] == [(2, 3), (3, 5), (5, 8)]
    world.check()


# --- stopped anywhere -------------------------------------------------------------------------------------------------


def scene() -> World:
    """Writers at work; a transaction and missing leaders for a while."""
    world = World()
    world.kafka.transaction_until = 2.0
    world.kafka.leaderless_until = 3.0
    world.kafka.unreplicated = 1
    world.run(lambda: world.now > 1.0)
    return world


def effects_of_a_run() -> int:
    world = scene()
    world.expand(3)
    world.run(expanded(world, 3))
    return world.effects


EFFECTS = effects_of_a_run()


@pytest.mark.parametrize("then", ["the other takes over", "it restarts"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("effect", range(EFFECTS))
def test_expansion_ends_in_order_after_any_crash(effect: int, when: str, then: str) -> None:
    world = scene()
    for process in world.processes:
        process.crash_at = (effect, when)

    world.expand(3)
    world.run(lambda: over(world)() or len(world.living()) < 2)
    dead = [each for each in world.processes if each.died_at is not None]
    if then == "it restarts":
        for each in dead:  # on the same machine: its death is known at once, what it sent may be queued
            each.dead_seconds = IN_DOUBT_SECONDS
            world.processes.append(Process(world))
    if world.history.pending is not None:
        world.run(lambda: world.history.pending is None)
    writes_on(world)

    # It was abandoned, since the dead process cannot report its barrier closed, or it succeeded: never between.
    assert world.history.count in {None, 2, 3}
    assert world.kafka.count == (world.history.count or 2)
    world.check()
    # And the topic can expand again.
    world.ended.clear()
    world.run(lambda: world.may_append() == world.living())
    world.expand(6, driver=world.processes.index(world.living()[0]))
    world.run(expanded(world, 6))
    writes_on(world)
    world.check()


def test_the_enumeration_stops_in_every_step() -> None:
    """The run that is stopped everywhere goes through every step except those of abandoning."""
    world = scene()
    procedure = world.expand(3)
    world.run(over(world))
    assert set(procedure.took) == set(ex.Step) - {ex.Step.ABANDON, ex.Step.PROBE}
    assert EFFECTS > 10


@pytest.mark.parametrize("what", ["done, not answered", "lost"])
@pytest.mark.parametrize("effect", range(EFFECTS))
def test_expansion_survives_any_unanswered_query(effect: int, what: str) -> None:
    world = scene()
    for process in world.processes:
        process.unanswered_at = (effect, what)
    world.expand(3)

    world.run(over(world))
    if world.history.count is None:  # the first query failed: nothing has changed
        assert world.ended.pop().result in {ex.Result.REFUSED, ex.Result.UNKNOWN}
        world.expand(3)
    world.run(expanded(world, 3))

    writes_on(world)
    world.check()
    assert world.kafka.created == {3: 1}


def test_process_unknown_to_the_others_serves_no_client(world: World) -> None:
    """Its first record is in doubt and its view may be seconds old, so an expansion does not wait for it. An append
    of it would be after a threshold (`StateTopic.enter`)."""
    unknown = Process(world)
    unknown.known, unknown.deaf_until = False, 6.0
    world.processes.append(unknown)
    world.run(lambda: world.now > 1.0)

    world.expand(3)
    world.run(expanded(world, 3))
    assert world.now < unknown.deaf_until
    world.run(lambda: world.now > unknown.deaf_until)
    unknown.known = True  # it has read back its first record, and all before

    writes_on(world)
    world.check()


# --- given up ---------------------------------------------------------------------------------------------------------


def test_endless_transaction_fails_expansion_and_reopens_topic(world: World) -> None:
    world.kafka.transaction_until = 1e9
    world.expand(3)
    world.run(over(world))
    [ended] = world.ended
    assert (ended.result, ended.code) == (ex.Result.FAILED, Error.POLICY_VIOLATION)
    assert (ended.message or "").startswith("EXPANSION_FAILED topic=orders from=2 to=3: after 60 s")
    assert (world.kafka.count, world.history.count, world.history.expansions) == (2, None, ())
    writes_on(world)


def test_silent_process_fails_expansion_and_retry_succeeds(world: World) -> None:
    world.processes[1].die()
    world.expand(3)
    world.run(over(world))
    assert str(world.processes[1].name) in (world.ended[0].message or "")
    world.run(lambda: world.may_append() == world.living())
    world.expand(3)
    world.run(lambda: len(world.ended) == 2)
    assert world.ended[1].result is ex.Result.DONE


@pytest.mark.parametrize("step", [ex.Step.VALIDATE, ex.Step.CREATE])
def test_kafkas_refusal_is_reported_with_its_message(step: ex.Step, world: World) -> None:
    refusal = ex.Refused(Error.TOPIC_AUTHORIZATION_FAILED, "Topic authorization failed.")
    procedure = world.expand(3)
    if step is ex.Step.CREATE:
        world.run(lambda: procedure.step is ex.Step.BARRIERS)
    world.kafka.refuses = refusal
    world.run(over(world))

    [ended] = world.ended
    assert ended.code == Error.TOPIC_AUTHORIZATION_FAILED
    assert "Topic authorization failed." in (ended.message or "")
    assert "ALTER" in (ended.message or "")
    assert ended.result is (ex.Result.REFUSED if step is ex.Step.VALIDATE else ex.Result.FAILED)
    writes_on(world)
    assert world.kafka.count == 2


def test_stale_metadata_does_not_abandon_created_partitions(world: World) -> None:
    """1. A driver dies after CREATE.
    2. The next driver reads the old count from a lagging broker, and a transaction delays it.
    3. It must query the controller before it opens barriers at the old count."""
    procedure = world.expand(3)
    world.run(lambda: procedure.step is ex.Step.LEADERS)
    world.processes[0].die()
    world.kafka.metadata_shows = 2
    world.kafka.transaction_until = world.now + WAIT_SECONDS + 5.0
    second = world.processes[1]
    world.run(lambda: second.procedure is not None and second.procedure.step is ex.Step.ABANDON)
    world.run(lambda: second.procedure is not None and second.procedure.step is ex.Step.PROBE)
    world.kafka.metadata_shows = None

    world.run(expanded(world, 3))

    assert world.kafka.created == {3: 1}
    writes_on(world)
    world.check()


# --- others -----------------------------------------------------------------------------------------------------------


def test_second_concurrent_expansion_is_refused_permanently(world: World) -> None:
    world.expand(3, driver=0)
    world.expand(4, driver=1)

    world.run(lambda: len(world.ended) == 2)

    assert Counter(each.result for each in world.ended) == {ex.Result.DONE: 1, ex.Result.REFUSED: 1}
    [refused] = [each for each in world.ended if each.result is ex.Result.REFUSED]
    assert refused.code == Error.INVALID_PARTITIONS
    assert (refused.message or "").startswith("EXPANSION_IN_PROGRESS topic=orders")
    assert world.history.count == world.kafka.count == 3
    # Reading the state topic from the beginning gives the same.
    again = StateView("cluster")
    for offset, record in enumerate(world.records):
        again.apply(Offset(offset), *record)
    assert again.history("orders", TOPIC_ID) == world.history


@pytest.mark.parametrize(
    ("step", "created_anew"),
    [
        (ex.Step.BARRIERS, False),
        (ex.Step.BARRIERS, True),
        (ex.Step.LEADERS, False),
        (ex.Step.LEADERS, True),
        (ex.Step.ENDS, False),
    ],
)
def test_a_topic_that_is_deleted_meanwhile(step: ex.Step, created_anew: bool, world: World) -> None:
    world.kafka.leaderless_until = 20.0
    world.kafka.unreplicated = 5
    procedure = world.expand(3)
    world.run(lambda: procedure.step is step)
    created_before = dict(world.kafka.created)
    world.kafka.topic_id = UUID(int=0x71) if created_anew else None

    world.run(over(world))

    assert (world.ended[0].result, world.ended[0].code) == (ex.Result.FAILED, Error.UNKNOWN_TOPIC_OR_PARTITION)
    assert "was deleted" in (world.ended[0].message or "")
    assert world.kafka.created == created_before, "its successor was expanded"


def test_topic_deleted_through_proxy_ends_its_expansion(world: World) -> None:
    world.kafka.transaction_until = 1e9
    procedure = world.expand(3)
    world.run(lambda: procedure.step is ex.Step.BARRIERS)
    for record in world.view.records_of([TopicConfigChange("orders", TOPIC_ID, deleted=True)]):
        world.view.apply(world.view.next_offset, *record)
    world.run(lambda: bool(world.ended))
    assert world.ended[0].result is ex.Result.DELETED
    assert world.ended[0].code == Error.UNKNOWN_TOPIC_OR_PARTITION


def test_direct_expansion_during_wait_ends_as_unordered(world: World) -> None:
    world.kafka.transaction_until = 5.0
    world.expand(3)
    world.run(lambda: world.history.pending is not None)
    world.kafka.logs += [[] for _ in range(6)]

    world.run(over(world))

    assert world.ended[0].result is ex.Result.UNORDERED
    assert world.history.count == world.kafka.count == 8
    assert [each.unordered for each in world.history.expansions] == [True]
    writes_on(world)


def test_slow_driver_stops_after_takeover(world: World) -> None:
    procedure, slow = world.expand(3), world.processes[0]
    world.run(lambda: procedure.step is ex.Step.LEADERS)
    slow.died_at = world.now  # so it seems to the other
    slow.dead_seconds = 0.0
    world.run(expanded(world, 3))
    slow.died_at = None
    slow.view_changed()
    world.run(lambda: len(world.ended) == 2)

    assert [each.result for each in world.ended] == [ex.Result.DONE, ex.Result.DONE]
    assert len([each for each in world.records if each.key.startswith(b"expansion-end/")]) == 1


def test_first_of_two_concurrent_claims_drives() -> None:
    world = World(processes=3)
    procedure = world.expand(3)
    world.run(lambda: procedure.step is ex.Step.BARRIERS)
    history = world.history
    claims = []
    for process in world.processes[1:]:
        claim = ex.driver(
            history, own_names=frozenset({process.name}), process=process.name, live=frozenset(), new_id=world.new_id
        )
        assert isinstance(claim, ex.Claim)
        claims.append(claim.record)

    world.append(claims)
    assert world.history.driver == world.processes[1].name
    assert world.history.driver_round == 1


# --- single steps -----------------------------------------------------------------------------------------------------

ME, ANOTHER = UUID(int=2), UUID(int=3)
PENDING = Expansion("orders", TOPIC_ID, 2, 3, UUID(int=1), 0, process=ME)


def begun(*, driver: UUID = ME, closed: Iterable[UUID] = (ME,)) -> ex.World:
    return ex.World(
        ex.ExpansionHistory(2, (), PENDING, frozenset(closed), driver),
        frozenset({ME}),
        tuple({ME} - set(closed)),
        fresh=True,
    )


def machine(*, taken_over: bool = True) -> ex.Procedure:
    names = iter(UUID(int=0x2000 + number) for number in range(100))
    return new_procedure(PENDING, 0.0, lambda: next(names), lambda: 1_000, taken_over)


def goes_on(procedure: ex.Procedure, *answers: ex.Answer, now: float = 0.0) -> ex.Procedure:
    """Its next effects get these answers."""
    for answer in answers:
        procedure.query(begun(), now)
        procedure.handle(answer, now)
    return procedure


def ended_as(procedure: ex.Procedure, world: ex.World, now: float = 0.0) -> tuple[ex.Result, Error]:
    ended = procedure.query(world, now)
    assert isinstance(ended, ex.Ended)
    return ended.result, Error(ended.code)


OLD_COUNT, NEW_COUNT, NO_TRANSACTION = ex.Described(TOPIC_ID, 2), ex.Described(TOPIC_ID, 3), ex.TransactionsOpen({})


def at_ends() -> ex.Procedure:
    procedure = goes_on(machine(), NEW_COUNT, NEW_COUNT)
    assert procedure.query(begun(), 0.0) == ex.ReadEnds(range(2))
    return procedure


def at_create() -> ex.Procedure:
    """Its intent is stored, and no transaction is open."""
    return goes_on(machine(taken_over=False), ex.Created(), ex.Appended(), NO_TRANSACTION)


def end(log_end: int, high_watermark: int, epoch: int = 3) -> ex.PartitionEnd:
    return ex.PartitionEnd(LeaderEpoch(epoch), LogEndOffset(log_end), Offset(high_watermark))


def test_barrier_is_reported_closed_after_final_transaction_probe() -> None:
    """A batch that entered earlier may open a transaction when it is appended."""
    closing, history = ex.Closing(PENDING), begun(closed=()).history
    hold, none = ex.Hold(frozenset({TRANSACTIONAL})), ex.Hold(frozenset())
    for now, empty, found, action in (
        (0.0, False, {}, None),
        (1.0, True, {0: [TRANSACTIONAL]}, hold),
        (2.0, True, {}, none),
        (3.0, True, {}, None),
    ):
        assert closing.query(history, ME, empty=empty, now=now) == ex.ProbeTransactions(range(2))
        assert closing.handle(ex.TransactionsOpen(found), now) == action
    assert isinstance(closing.query(history, ME, empty=True, now=4.0), ex.Append)


def test_unreplicated_log_end_is_no_threshold() -> None:
    """Without its leader, records that no follower has are lost: the new end counts."""
    procedure = at_ends()

    procedure.handle(ex.Ends((end(10, 10), end(20, 15))), 0.0)
    assert isinstance(procedure.query(begun(), 0.0), ex.Wait)
    assert procedure.query(begun(), 1.0) == ex.ReadEnds(range(2))
    procedure.handle(ex.Ends((end(10, 10), end(15, 15, epoch=4))), 1.0)

    stored = procedure.query(begun(), 1.0)
    assert isinstance(stored, ex.Append)
    assert stored.records[0].value is not None
    assert b'"thresholds":[10,15]' in stored.records[0].value
    assert b'"epochs":[3,4]' in stored.records[0].value


def test_abandoning_waits_for_previous_drivers_requests() -> None:
    procedure = machine()
    procedure.query(begun(closed=()), 0.0)
    procedure.handle(ex.Described(TOPIC_ID, 2), 0.0)
    late = WAIT_SECONDS + 0.1
    assert isinstance(procedure.query(begun(closed=()), 0.0), ex.Wait)
    procedure.wait_seconds = 1.0
    requested = procedure.query(begun(closed=()), 1.1)
    assert requested == ex.Wait(IN_DOUBT_SECONDS, "a request of another process may still be queued in Kafka")
    assert procedure.query(begun(closed=()), late) == ex.CreatePartitions(3, None, validate_only=True)


def test_undescribable_topic_before_create_times_out() -> None:
    procedure = at_create()
    for now in (1.0, WAIT_SECONDS - 1.0, WAIT_SECONDS + 1.0):
        assert procedure.step is ex.Step.CREATE
        assert procedure.query(begun(), now) == ex.Describe()
        procedure.handle(ex.Unanswered("no broker answers"), now)
    assert procedure.step is ex.Step.ABANDON


def test_abandoning_waits_for_an_unanswered_create() -> None:
    procedure = goes_on(at_create(), OLD_COUNT)
    assert procedure.query(begun(), 0.0) == ex.CreatePartitions(3, None, validate_only=False)
    queried_at = WAIT_SECONDS - 1.0
    procedure.handle(ex.Unanswered("the connection broke"), queried_at)
    goes_on(procedure, OLD_COUNT, ex.TransactionsOpen({0: [TRANSACTIONAL]}), now=queried_at + 2.0)
    requested = procedure.query(begun(), queried_at + 2.0)
    assert requested == ex.Wait(
        queried_at + IN_DOUBT_SECONDS, "a request of another process may still be queued in Kafka"
    )


@pytest.mark.parametrize(
    ("history", "reported"),
    [
        (ex.ExpansionHistory(), (ex.Result.DELETED, Error.UNKNOWN_TOPIC_OR_PARTITION)),
        (ex.ExpansionHistory(2), (ex.Result.REFUSED, Error.INVALID_PARTITIONS)),
    ],
    ids=["deleted meanwhile", "another was first"],
)
def test_an_intent_that_the_view_does_not_have(history: ex.ExpansionHistory, reported: tuple[ex.Result, Error]) -> None:
    procedure = goes_on(machine(taken_over=False), ex.Created())
    assert isinstance(procedure.query(begun(), 0.0), ex.Append)
    procedure.handle(ex.Appended(), 0.0)
    assert ended_as(procedure, ex.World(history, frozenset({ME}), ())) == reported


def test_driver_stops_when_another_drives() -> None:
    assert ended_as(at_ends(), begun(driver=ANOTHER)) == (ex.Result.SUPERSEDED, Error.REQUEST_TIMED_OUT)


def test_missing_topic_is_requeried_before_it_is_deleted() -> None:
    missing = ex.Described(None)
    assert goes_on(machine(), missing, missing, missing, NEW_COUNT).step is ex.Step.BARRIERS
    # But when it stays missing, it is deleted.
    assert goes_on(machine(), missing, missing, missing, missing).step is ex.Step.STORE


def test_stale_view_ends_no_expansion() -> None:
    """1. A driver finds that the expansion is impossible, and is stopped.
    2. Another one takes over and creates the partitions.
    3. The first would report the topic unchanged, and open all barriers at the old count."""
    refused = ex.Refused(Error.TOPIC_AUTHORIZATION_FAILED, None)
    procedure = goes_on(machine(), OLD_COUNT, NO_TRANSACTION, OLD_COUNT, refused)
    now = IN_DOUBT_SECONDS + 1.0
    assert procedure.query(begun(), now) == ex.CreatePartitions(3, None, validate_only=True)
    procedure.handle(ex.Created(), now)
    outdated = ex.World(begun().history, frozenset({ME}), (), fresh=False)

    now += 200.0
    assert isinstance(procedure.query(outdated, now), ex.Wait)
    assert ended_as(procedure, begun(driver=ANOTHER), now + 1.0)[0] is ex.Result.SUPERSEDED


def test_stale_view_creates_no_partitions() -> None:
    procedure = goes_on(machine(), OLD_COUNT, NO_TRANSACTION)
    outdated = ex.World(begun().history, frozenset({ME}), (), fresh=False)
    assert isinstance(procedure.query(outdated, 0.0), ex.Wait)
    assert procedure.query(begun(), 0.1) == ex.Describe()
    procedure.handle(OLD_COUNT, 0.1)
    assert isinstance(procedure.query(outdated, 0.1), ex.Wait)
    assert procedure.query(begun(), 0.2) == ex.CreatePartitions(3, None, validate_only=False)


def test_existing_partitions_are_probed_while_metadata_lags() -> None:
    procedure = goes_on(machine(), OLD_COUNT, NO_TRANSACTION, OLD_COUNT)
    assert procedure.query(begun(), 0.0) == ex.CreatePartitions(3, None, validate_only=False)
    procedure.handle(ex.Refused(Error.INVALID_PARTITIONS, "Topic already has 3 partition(s)."), 0.0)
    goes_on(procedure, OLD_COUNT, now=1.0)
    assert procedure.step is ex.Step.PROBE
    assert procedure.query(begun(), 2.0) == ex.Describe()
    procedure.handle(NEW_COUNT, 2.0)
    procedure.query(begun(), 2.0)
    assert procedure.step is ex.Step.LEADERS
