"""Leaders and coordinators that move, die or pause during each step of the validation of commits.

Eight concurrent transactions append to two partitions each, with an expected offset on both. Some clients append
through the validating proxy. Raw producers bypass it, so that only the log shows their appends. Some appends have stale
offsets, and some are refused by another proxy. All validations stop at one step, the cluster changes, and they resume.
Then exactly the matching transactions are committed and visible, and no partition has an open transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from kafka.protocol.metadata import FindCoordinatorRequest

from fencepost_proxy.types import Address
from tests.kit.stage import NODES, PATIENCE_SECONDS
from tests.kit.waiting import until
from tests.support.instances import Process, Reported
from tests.support.kafka import unique_topic
from tests.support.messages import RawConnection
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Producer, batch, produce_request
from tests.support.stopping_validator import Stops
from tests.support.three_brokers import FENCED, Stage3, leaders_listener
from tests.support.transactions import add_request, added, committed, end_request, init_request, transaction_state

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(600)]

OK, POLICY_VIOLATION, UNKNOWN_PRODUCER_ID, ABORTABLE = 0, 44, 59, 120
#: Retriable errors: the request is repeated at the current coordinator or leader.
_AGAIN = frozenset({3, 5, 6, 7, 14, 15, 16, 19, 20, 51})
TRANSACTION_STATE, STATE_TOPIC = "__transaction_state", "__fencepost_state"
FIRST, SECOND, COORDINATOR = NODES
#: A validation takes as long as the cluster change during it.
CONFIG = f"{FENCED}\ncommit_wait_seconds = 60.0\n"
_TRANSACTION_PARTITIONS = 5

_numbers = count(1)


def transactional_id(prefix: str) -> str:
    """An id whose coordinator is the leader of partition 0 of the transaction log. The test chooses that leader."""
    while True:
        name = f"{prefix}-{next(_numbers)}"
        hashed = 0
        for character in name.encode():
            hashed = (31 * hashed + character) & 0xFFFFFFFF
        if abs(hashed - (1 << 32 if hashed >> 31 else 0)) % _TRANSACTION_PARTITIONS == 0:
            return name


# --- the eight transactions -------------------------------------------------------------------------------------------


@dataclass
class Story:
    """One transaction. `holds` – its expected offsets match. `observed` – it appends through the validating proxy.

    `partition` – of both topics. `timeout_ms` – longer than most tests, so that the client ends the transaction.
    `outcome` – set at its end: "committed", or the error of the commit.
    """

    partition: int
    protocol: int
    holds: bool
    observed: bool = False
    client: str = ""
    refused_elsewhere: bool = False
    timeout_ms: int = 300_000
    name: str = ""
    producer: Producer = field(default_factory=lambda: Producer(-1, -1, 0))
    outcome: str = ""

    def reaches(self, step: str) -> bool:
        match step.partition(":")[0]:
            case "producers":
                return not self.refused_elsewhere
            case "log":
                return not self.observed and not self.refused_elsewhere
            case "verdict":
                return self.holds
        return True

    @property
    def label(self) -> str:
        where = self.client or ("refused elsewhere" if self.refused_elsewhere else "around")
        return f"{where} v{self.protocol} {'holds' if self.holds else 'does not hold'}"


def stories() -> list[Story]:
    return [
        Story(0, 2, holds=True, observed=True, client="java"),
        Story(1, 1, holds=True, observed=True, client="confluent-kafka"),
        Story(2, 2, holds=True),
        Story(3, 1, holds=True),
        Story(4, 2, holds=False),
        Story(5, 1, holds=False),
        Story(6, 2, holds=False, refused_elsewhere=True),
        Story(7, 1, holds=False, refused_elsewhere=True),
    ]


@dataclass
class Stage:
    """Two topics with different leaders, and a third broker that leads the transaction log."""

    kafka: Stage3
    proxy: ProxyProcess
    stops: Path
    clients: Mapping[str, Process]
    topics: tuple[str, str]
    #: By topic and partition, the records that must be visible.
    visible: dict[tuple[str, int], list[bytes]]

    def elect(self, topic: str, leader: int, partitions: Sequence[int]) -> None:
        """Make that broker the leader of these partitions. No other partition moves."""
        replicas = [leader, *(each for each in NODES if each != leader)]
        self.kafka.request_reassignment(topic, replicas, partitions)

        def led() -> bool:
            self.kafka.request_election(topic, partitions)
            return all(self.kafka.leader(topic, each) == leader for each in partitions)

        self.kafka.until(led, f"broker {leader} to lead {topic}")

    def elect_all(self) -> None:
        """Put all leaders where the moves start."""
        everywhere = range(len(stories()))
        for topic, leader in zip(self.topics, (FIRST, SECOND), strict=True):
            self.elect(topic, leader, everywhere)
        self.elect(TRANSACTION_STATE, COORDINATOR, [0])
        self.elect(STATE_TOPIC, FIRST, [0])

    # ---- raw requests to the current coordinator or leader

    def _bootstrap(self, proxy: ProxyProcess | None) -> list[str]:
        if proxy is not None:
            return [proxy.bootstrap]
        return [str(self.kafka.kafka.address(each)) for each in self.kafka.living]

    def query_coordinator(
        self, name: str, request: Any, version: int, code: Callable[[Any], int], proxy: ProxyProcess | None = None
    ) -> Any:
        def queried() -> Any:
            for address in self._bootstrap(proxy):
                with Connection(address, timeout_seconds=30) as connection:
                    find = FindCoordinatorRequest(key_type=1, coordinator_keys=[name])
                    (found,) = connection.query(find, 4).coordinators
                if found.error_code:
                    continue
                with Connection(f"{found.host}:{found.port}", timeout_seconds=30) as connection:
                    answer = connection.query(request, version)
                    if code(answer) not in _AGAIN:
                        return answer
            return None

        return until(queried, f"the coordinator of {name}", seconds=PATIENCE_SECONDS)

    def begin(self, story: Story) -> None:
        init = init_request(story.name, story.timeout_ms)
        answer = self.query_coordinator(story.name, init, 4, lambda found: int(found.error_code))
        assert answer.error_code == OK, answer
        story.producer = Producer(answer.producer_id, answer.producer_epoch, 0)
        if story.protocol == 1:
            add = add_request(story.name, story.producer, {each: [story.partition] for each in self.topics})
            self.query_coordinator(story.name, add, 3, lambda found: max(added(found).values()))

    def append(self, story: Story, topic: str, value: bytes, expected: int, proxy: ProxyProcess | None) -> int:
        records = batch(value, expected=expected, producer=story.producer, transactional=True)
        request = produce_request({topic: {story.partition: records}}, -1, 10_000, story.name)
        version = 12 if story.protocol == 2 else 11

        def appended() -> int | None:
            address = leaders_listener(proxy, topic) if proxy else self.kafka.log.leader(topic, story.partition)
            with Connection(address) as connection:
                connection.send(request, version)
                answer = connection.receive_produce(version)[1][topic, story.partition]
            return None if answer.error_code in _AGAIN else answer.error_code

        found: int = until(appended, "an append", accept=lambda each: each is not None, seconds=PATIENCE_SECONDS)
        return found

    def end(self, story: Story, *, commit: bool) -> int:
        """Through the validating proxy."""
        request, version = end_request(story.name, story.producer, commit=commit), 5 if story.protocol == 2 else 3
        answer = self.query_coordinator(story.name, request, version, lambda found: int(found.error_code), self.proxy)
        return int(answer.error_code)

    # ---- one transaction

    def write(self, story: Story) -> None:
        """All requests before the commit."""
        story.name = transactional_id(f"{self.topics[0]}-{story.partition}")
        ends = [self.kafka.log.end(topic, story.partition) for topic in self.topics]
        values = self.values(story)
        if story.client:
            process = self.clients[story.client]
            process.do("init", story.name, story.name, story.timeout_ms)
            process.do("begin", story.name)
            for topic, value, end in zip(self.topics, values, ends, strict=True):
                reported = process.do("send", story.name, topic, story.partition, value.decode(), end)
                assert int(reported) == end
            return
        self.begin(story)
        elsewhere = self.kafka.proxies[1] if story.refused_elsewhere else None
        assert self.append(story, self.topics[0], values[0], ends[0], elsewhere) == OK
        wrong = 0 if story.holds else 3
        code = self.append(story, self.topics[1], values[1], ends[1] + wrong, elsewhere)
        assert code == (POLICY_VIOLATION if story.refused_elsewhere else OK)

    @staticmethod
    def values(story: Story) -> list[bytes]:
        return [f"{story.name}-{where}".encode() for where in ("first", "second")]

    def commit(self, story: Story) -> None:
        """Repeat the commit until it has an outcome."""
        if story.client:
            story.outcome = self._committed_by(self.clients[story.client], story.name)
            return
        code = self.end(story, commit=True)
        story.outcome = "committed" if code == OK else f"refused {code}"
        if code == (ABORTABLE if story.protocol == 2 else UNKNOWN_PRODUCER_ID):
            assert self.end(story, commit=False) == OK

    def commit_and_disconnect(self, story: Story) -> None:
        find = FindCoordinatorRequest(key_type=1, coordinator_keys=[story.name])
        with Connection(self.proxy.bootstrap) as connection:
            (found,) = connection.query(find, 4).coordinators
        with Connection(f"{found.host}:{found.port}") as connection:
            request = end_request(story.name, story.producer, commit=True)
            connection.send(request, 5 if story.protocol == 2 else 3)
            until((self.stops / f"reached-{story.name}").exists, "validation of its commit")

    def _committed_by(self, process: Process, name: str) -> str:
        reported: Reported = process.query("commit", name)
        process.query("close", name)
        return "committed" if reported.ok else reported.text

    # ---- results

    def all_has_ended(self) -> None:
        for story in stories():
            for topic in self.topics:
                until(
                    lambda topic=topic, story=story: self.is_stable(topic, story.partition),
                    f"no open transaction on {topic}-{story.partition}",
                    seconds=PATIENCE_SECONDS,
                )

    def is_stable(self, topic: str, partition: int) -> bool:
        return self._last_stable_offset(topic, partition) == self.kafka.log.end(topic, partition)

    def _last_stable_offset(self, topic: str, partition: int) -> int:
        queried = {"PartitionIndex": partition, "Timestamp": -1, "CurrentLeaderEpoch": -1}
        body = {"ReplicaId": -1, "IsolationLevel": 1, "Topics": [{"Name": topic, "Partitions": [queried]}]}
        with RawConnection(Address.parse(self.kafka.log.leader(topic, partition))) as connection:
            return int(connection.query(2, 4, body)["Topics"][0]["Partitions"][0]["Offset"])

    def committed(self) -> dict[tuple[str, int], list[bytes]]:
        return committed(self.kafka.kafka.bootstrap, *self.visible)

    def goes_on(self, value: bytes) -> None:
        """Append conditionally to every partition through the validating proxy."""
        for topic, partition in self.visible:

            def appended(topic: str = topic, partition: int = partition) -> bool:
                records = batch(value, expected=self.kafka.log.end(topic, partition))
                with Connection(leaders_listener(self.proxy, topic)) as connection:
                    return connection.append(topic, records, partition=partition).error_code == OK

            until(appended, f"{topic}-{partition} to go on", seconds=PATIENCE_SECONDS)
            self.visible[topic, partition].append(value)


@pytest.fixture(scope="module")
def validating(shared_stage3: Stage3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("validating")
    stops = directory / "stops"
    stops.mkdir()
    with ExitStack() as stack:
        proxy = stack.enter_context(
            ProxyProcess(
                shared_stage3.proxies[0].upstream,
                directory,
                config=CONFIG,
                module="tests.support.stopping_validator",
                environment={"STOPS": str(stops)},
            )
        )
        topics = unique_topic("checked"), unique_topic("checked")
        with Connection(proxy.bootstrap) as admin:
            for topic, replicas in zip(topics, ([1, 2, 3], [2, 3, 1]), strict=True):
                assert admin.create_topic(topic, partitions=len(stories()), on=replicas) == (OK, None)
        clients = {
            each: stack.enter_context(Process(each, proxy.bootstrap, directory)) for each in ("java", "confluent-kafka")
        }
        visible: dict[tuple[str, int], list[bytes]] = {
            (topic, story.partition): [] for topic in topics for story in stories()
        }
        yield Stage(shared_stage3, proxy, stops, clients, topics, visible)
        for each in (proxy, *shared_stage3.proxies):
            assert "Traceback" not in each.log
            assert "crashed" not in each.log


@pytest.fixture
def stage(validating: Stage, stage3: Stage3) -> Stage:
    assert stage3 is validating.kafka
    validating.elect_all()
    return validating


# --- cluster changes --------------------------------------------------------------------------------------------------


def leaders_elected(stage: Stage, going: Sequence[Story], release: Callable[[], None]) -> None:
    stage.elect(stage.topics[0], COORDINATOR, range(len(stories())))
    release()


def leader_killed(stage: Stage, going: Sequence[Story], release: Callable[[], None]) -> None:
    stage.kafka.kafka.kill(FIRST)
    stage.kafka.await_leader(stage.topics[0], other_than=FIRST)
    release()


def coordinator_elected(stage: Stage, going: Sequence[Story], release: Callable[[], None]) -> None:
    stage.elect(TRANSACTION_STATE, SECOND, [0])
    release()


def coordinator_killed(stage: Stage, going: Sequence[Story], release: Callable[[], None]) -> None:
    stage.kafka.kafka.kill(COORDINATOR)
    stage.kafka.await_leader(TRANSACTION_STATE, other_than=COORDINATOR)
    release()


def coordinator_restarted(stage: Stage, going: Sequence[Story], release: Callable[[], None]) -> None:
    stage.kafka.kafka.restart(COORDINATOR)
    stage.elect(TRANSACTION_STATE, COORDINATOR, [0])
    release()


def state_topic_elected(stage: Stage, going: Sequence[Story], release: Callable[[], None]) -> None:
    stage.elect(STATE_TOPIC, SECOND, [0])
    release()


def coordinator_dies_with_it(stage: Stage, going: Sequence[Story], release: Callable[[], None]) -> None:
    """The commits are in the coordinator's socket when it dies, so their outcome is unknown."""
    stage.kafka.kafka.pause(COORDINATOR)
    release()
    _await_sent(stage, going)
    stage.kafka.kafka.kill(COORDINATOR)


def coordinator_wakes_up_with_it(stage: Stage, going: Sequence[Story], release: Callable[[], None]) -> None:
    """1. The commits arrive in the paused coordinator's socket. 2. Another broker replaces it. 3. It resumes."""
    stage.kafka.kafka.pause(COORDINATOR)
    stage.kafka.await_leader(TRANSACTION_STATE, other_than=COORDINATOR)
    release()
    _await_sent(stage, going)
    stage.kafka.kafka.resume(COORDINATOR)


def _await_sent(stage: Stage, going: Sequence[Story]) -> None:
    pipe = stage.kafka.pipes[COORDINATOR]
    for story in going:
        # API key, version, correlation id, client id, transactional id.
        end_txn = re.compile(rb"\x00\x1a\x00[\x00-\x05].{4}\x00.{1,60}?" + story.name.encode(), re.DOTALL)
        stage.kafka.until(
            lambda end_txn=end_txn: any(end_txn.search(each.frame) for each in list(pipe.requests)),
            f"the commit of {story.name} to be sent",
        )


Move = Callable[[Stage, Sequence[Story], Callable[[], None]], None]
MOVES: Sequence[Move] = (
    leaders_elected,
    leader_killed,
    coordinator_elected,
    coordinator_killed,
    coordinator_restarted,
    state_topic_elected,
)
WITH_THE_COMMIT: Sequence[Move] = (coordinator_dies_with_it, coordinator_wakes_up_with_it)
STEPS = ("state:before", "transaction:before", "transaction:after", "producers:before", "producers:after",
         "log:before", "log:after", "verdict:after")  # fmt: skip
FAST = {
    ("producers:before", leader_killed),
    ("verdict:after", coordinator_dies_with_it),
}


def _cases() -> Iterator[Any]:
    for step in STEPS:
        for move in (*MOVES, *(WITH_THE_COMMIT if step.startswith("verdict") else ())):
            marks = () if (step, move) in FAST else (pytest.mark.soak,)
            yield pytest.param(step, move, id=f"{step}-{move.__name__}", marks=marks)


@pytest.mark.parametrize(("step", "move"), list(_cases()))
def test_what_holds_commits_and_nothing_else_becomes_visible(
    step: str, move: Move, stage: Stage, say: Callable[[str], None]
) -> None:
    # Given eight transactions whose clients are about to commit
    eight = stories()
    with ThreadPoolExecutor(len(eight)) as pool:
        list(pool.map(stage.write, eight))
        going = [story for story in eight if story.reaches(step)]
        with Stops(stage.stops, step) as stops:
            ends = [pool.submit(stage.commit, story) for story in eight]
            stops.await_reached(*(story.name for story in going))
            # When the cluster changes during the validations
            move(stage, going, stops.release)
        for end in ends:
            end.result()
    say("; ".join(f"{story.label}: {story.outcome}" for story in eight))

    # Then exactly the matching transactions are committed, and the proxy has refused the others
    assert {story.outcome for story in eight} == {"committed", f"refused {ABORTABLE}", f"refused {UNKNOWN_PRODUCER_ID}"}
    assert {story.label for story in eight if story.outcome == "committed"} == {s.label for s in eight if s.holds}
    stage.kafka.mend()
    stage.all_has_ended()
    for story in eight:
        if story.outcome == "committed":
            for topic, value in zip(stage.topics, stage.values(story), strict=True):
                stage.visible[topic, story.partition].append(value)
    assert stage.committed() == stage.visible
    # and appends continue.
    stage.goes_on(b"after")
    assert stage.committed() == stage.visible


def test_transaction_timed_out_during_validation_is_not_committed(stage: Stage, say: Callable[[str], None]) -> None:
    """The coordinator moves. Its successor aborts timed-out transactions, including successfully validated ones."""
    # Given transactions with a short timeout, and one whose client disconnects
    soon = [story for story in stories() if story.holds]
    for story in soon:
        story.timeout_ms = 5_000
    *waiting, disconnecting = soon
    with ThreadPoolExecutor(len(soon)) as pool:
        list(pool.map(stage.write, soon))
        with Stops(stage.stops, "verdict:after") as stops:
            ends = [pool.submit(stage.commit, story) for story in waiting]
            stage.commit_and_disconnect(disconnecting)
            stops.await_reached(*(story.name for story in soon))
            # When the coordinator moves and they time out before the proxy relays the commits
            stage.elect(TRANSACTION_STATE, SECOND, [0])
            stage.all_has_ended()
            stops.release()
        for end in ends:
            end.result()
    say("; ".join(f"{story.label}: {story.outcome}" for story in waiting))

    # Then no client gets a success, and nothing is visible.
    assert "committed" not in {story.outcome for story in waiting}
    stage.all_has_ended()
    assert stage.committed() == stage.visible
    stage.goes_on(b"after")
    assert stage.committed() == stage.visible


@pytest.mark.soak
def test_commit_waits_for_a_partition_without_leader(stage: Stage) -> None:
    """Kafka would commit without a marker on that partition (KAFKA-20734): half of the transaction would be visible."""
    kafka, proxy = stage.kafka, stage.kafka.proxies[0]  # its time limit for validation is short
    alone = unique_topic("checked")
    with Connection(proxy.bootstrap) as admin:
        configs = {"min.insync.replicas": "1"}
        reported = admin.create_topic(alone, partitions=len(stories()), on=[COORDINATOR], configs=configs)
        assert reported == (OK, None)
    kafka.await_leader(alone, is_now=COORDINATOR)
    stage.elect(TRANSACTION_STATE, SECOND, [0])

    # Given matching transactions, one partition of which has lost its only broker
    two = [Story(2, 2, holds=True), Story(3, 1, holds=True)]
    here = (stage.topics[0], alone)
    visible = {(topic, s.partition): stage.visible.get((topic, s.partition), []) for topic in here for s in two}
    stage = replace(stage, proxy=proxy, topics=here, visible=visible)
    for story in two:
        stage.write(story)
    kafka.kafka.pause(COORDINATOR)
    kafka.until(lambda: kafka.leader(alone) not in NODES, "loss of the leader")

    # When their clients commit, then they get a retriable error
    with ThreadPoolExecutor(len(two)) as pool:
        ends = [pool.submit(stage.commit, story) for story in two]
        kafka.until(lambda: "commit deferred" in proxy.log, "a deferred commit")
        states = {transaction_state(str(kafka.kafka.address(SECOND)), story.name)[0] for story in two}
        assert states == {"Ongoing"}
        # until the broker is back: then everything is committed.
        kafka.kafka.resume(COORDINATOR)
        for end in ends:
            end.result()
    assert [story.outcome for story in two] == ["committed", "committed"]
    kafka.mend()
    for story in two:
        for topic, value in zip(here, stage.values(story), strict=True):
            visible[topic, story.partition].append(value)
            kafka.until(
                lambda topic=topic, story=story: stage.is_stable(topic, story.partition),
                f"{topic}-{story.partition} to be stable",
            )
    assert stage.committed() == visible
