"""In-doubt appends: the response agrees with the log, or says that the outcome is unknown.

Three brokers, two proxies, and before each broker a fault proxy, which fails at chosen bytes. A client may get: 0, and
the record is at the expected offset; a refusal, and the record is not in the log; 7 or no response, and the record is
at the expected offset or not in the log. After each fault, the next correct append succeeds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from tests.kit.fault_proxy import Change, Cut, Direction, Hold, produce_error
from tests.kit.stage import NODES
from tests.kit.waiting import until
from tests.support.raw import Answer, Closed, Connection, Producer, batch, produce_request
from tests.support.three_brokers import Stage3, leaders_listener, required_topic
from tests.support.writers import (
    OK,
    POLICY_VIOLATION,
    TIMED_OUT,
    Ledger,
    append_at_the_end,
    offsets,
    value_of,
)

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(400)]

Say = Callable[[str], None]
NOT_LEADER, NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND, UNKNOWN_SERVER_ERROR = 6, 19, 20, -1


class Story:
    """One topic, led by broker 1, its appends and their responses."""

    def __init__(self, stage: Stage3, *, on: Sequence[int] = NODES, configs: dict[str, str] | None = None) -> None:
        self.stage = stage
        self.topic = stage.create(required_topic(), on=on, configs=configs)
        self.ledger = Ledger(self.topic)
        self.named: dict[bytes, bytes] = {}  # batches; write ids equal the values
        self.number = 0

    def connect(self, proxy: int = 0, *, timeout_seconds: float = 40.0) -> Connection:
        client = Connection(leaders_listener(self.stage.proxies[proxy], self.topic), timeout_seconds=timeout_seconds)
        try:
            client.api_versions()  # the proxy closes a connection that stays silent for long
        except BaseException:
            client.close()
            raise
        return client

    def warm(self, proxy: int = 0) -> int:
        """Append through this proxy, so that it confirms its fence. Return the log end offset."""
        return append_at_the_end(self.stage.log, self.stage.proxies[proxy], "warm", self.ledger) + 1

    def confirmed_client(self) -> tuple[Connection, int]:
        """A connection that is older than an acknowledged append and may therefore pipeline; and the log end offset."""
        client = self.connect()
        return client, self.warm()

    def value(self, who: str, expected: int) -> bytes:
        self.number += 1
        return value_of(who, self.number, expected)

    def send(
        self,
        client: Connection,
        *values: bytes,
        at: int,
        named: bool = False,
        producer: Producer | None = None,
        timeout_ms: int = 10_000,
    ) -> None:
        """Send one batch per value, all in one write."""
        frames = b""
        for i, value in enumerate(values):
            self.ledger.sent(value, named=named, idempotent=producer is not None)
            who = None if producer is None else producer._replace(sequence=producer.sequence + i)
            records = batch(value, expected=at + i, write_id=value if named else None, producer=who)
            if named:
                self.named[value] = records
            frames += client.frame(produce_request({self.topic: {0: records}}, -1, timeout_ms), 9)[1]
        client.socket.sendall(frames)

    def apply_records(self, client: Connection, *values: bytes) -> list[int]:
        """Error codes of the responses, until the connection ends."""
        codes = []
        with suppress(Closed, OSError):
            for value in values:
                answer = client.receive_produce()[1][self.topic, 0]
                self.ledger.note(value, answer)
                codes.append(answer.error_code)
        return codes

    def continue_appending(self) -> None:
        """Check that the next correct append succeeds through each proxy."""
        self.stage.mend()
        for proxy in self.stage.proxies:
            append_at_the_end(self.stage.log, proxy, "after", self.ledger)

    def query_again(self) -> None:
        """Check that a retry with the same write id reports the outcome of an in-doubt append, through each proxy."""
        for value, records in self.named.items():
            if not self.ledger.is_unknown(value):
                continue
            there = offsets(self.stage.log.batches(self.topic)).get(value)
            for proxy in (1, 0):
                answer = self._queried_again(proxy, records)
                if there is None:
                    assert answer.error_code == POLICY_VIOLATION, answer
                    assert "POSSIBLY_YOURS" not in (answer.message or "")
                else:
                    assert (answer.error_code, answer.base_offset) == (OK, there), answer
                self.ledger.note(value, answer, again=True)

    def _queried_again(self, proxy: int, records: bytes) -> Answer:
        def final_answer() -> Answer | None:
            with self.connect(proxy) as client:
                answer = client.append(self.topic, records)
            return None if answer.error_code == NOT_LEADER else answer

        answer: Answer = until(final_answer, "an answer that is not retriable")
        return answer

    def end(self, say: Say, title: str) -> None:
        self.continue_appending()
        self.query_again()
        say(f"{title}: {self.ledger}")
        self.ledger.check(self.stage.log)


# --- lost connections -------------------------------------------------------------------------------------------------

DIRECTIONS: Sequence[Direction] = ("request", "response")
PARTS = [0.0, 0.01, 0.5, 0.99, 1.0]


@pytest.mark.parametrize("rounds", [1, pytest.param(15, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_the_connection_is_lost_at_any_byte(rounds: int, stage3: Stage3, say: Say) -> None:
    """The connection is cut in the request or the response, for one append or the third of a pipeline."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    story = Story(stage3)
    reported: dict[str, set[tuple[int, ...]]] = {}
    for run in range(rounds):
        parts = PARTS if run == 0 else [chance.random() for _ in range(4)]
        for part in parts:
            for direction in DIRECTIONS:
                for kind in ("one", "named", "idempotent", "chain", "unconfirmed"):
                    count = 5 if kind == "chain" else 1
                    with story.connect() as client:
                        end = story.warm(1 if kind == "unconfirmed" else 0)
                        values = [story.value(kind, end + i) for i in range(count)]
                        fault = stage3.pipes[1].add(Cut(direction, values[count // 2], part=part))
                        producer = client.init_producer_id() if kind == "idempotent" else None
                        story.send(client, *values, at=end, named=kind in ("named", "unconfirmed"), producer=producer)
                        codes = story.apply_records(client, *values)
                    fault.wait()
                    reported.setdefault(f"{direction} {kind}", set()).add(tuple(codes))
    for what, observed_codes in reported.items():
        say(f"{what}: {sorted(observed_codes)}")
    story.end(say, "cut at a byte")


@pytest.mark.parametrize("beside", ["another client expects the offset", "alone"])
def test_lost_answer_delays_another_client_until_resolved(beside: str, stage3: Stage3, say: Say) -> None:
    story = Story(stage3)
    for part in (0.0, 0.5):
        for direction in DIRECTIONS:
            end = story.warm()
            mine, other = story.value("mine", end), story.value("other", end)
            stage3.pipes[1].add(Cut(direction, mine, part=part))
            with story.connect() as client, story.connect() as another:
                story.send(client, mine, at=end)
                if beside != "alone":
                    story.send(another, other, at=end)
                    codes = story.apply_records(another, other)
                    assert codes[0] in (OK, POLICY_VIOLATION, NOT_LEADER)
                story.apply_records(client, mine)
    story.end(say, beside)


@pytest.mark.parametrize("states_offset", [True, False], ids=["with the offset", "without"])
def test_an_error_after_the_append_is_no_refusal(states_offset: bool, stage3: Stage3, say: Say) -> None:
    """The broker returns 7, 20 or -1 for a batch that it has appended, and 6 only together with an offset."""
    story = Story(stage3)
    errors = [TIMED_OUT, NOT_ENOUGH_REPLICAS_AFTER_APPEND, UNKNOWN_SERVER_ERROR]
    for error_code in [*errors, NOT_LEADER] if states_offset else errors:
        for kind in ("bare", "named", "idempotent"):
            end = story.warm()
            value = story.value(f"error{error_code}", end)
            fault = stage3.pipes[1].add(
                Change("response", value, change=produce_error(error_code, with_offset=states_offset))
            )
            with story.connect() as client:
                producer = client.init_producer_id() if kind == "idempotent" else None
                story.send(client, value, at=end, named=kind == "named", producer=producer)
                codes = story.apply_records(client, value)
            fault.wait()
            assert codes in ([OK], [TIMED_OUT], []), codes
            if kind == "named":
                assert codes == [OK], "a named append that is in the log succeeds"
    story.end(say, "error after the append")


def test_min_isr_is_lost_in_the_middle(stage3: Stage3, say: Say) -> None:
    """All three replicas must have the batch. One pauses after the leader has appended it, and resumes later."""
    story = Story(stage3, configs={"min.insync.replicas": "3"})
    client, end = story.confirmed_client()
    pipeline_key = [story.value("chain", end + i) for i in range(3)]
    with client, story.connect() as another:
        stage3.kafka.pause(3)
        story.send(client, *pipeline_key, at=end, timeout_ms=7_000)
        stage3.until(lambda: stage3.isr(story.topic) == {1, 2}, "broker 3 to be out of sync")
        codes = story.apply_records(client, *pipeline_key)
        # Now Kafka refuses the batch before it appends it.
        now = stage3.log_end_of(story.topic, 1)
        late = story.value("late", now)
        story.send(another, late, at=now, timeout_ms=3_000)
        codes += story.apply_records(another, late)
        stage3.kafka.resume(3)
    say(f"min ISR lost: answers to a pipeline and a late one: {codes}")
    assert OK not in codes, "too few replicas had the batch"
    stage3.await_in_sync(story.topic)
    story.end(say, "min ISR lost")


def test_appends_timed_out_by_paused_replicas_stay_consistent(stage3: Stage3, say: Say) -> None:
    story = Story(stage3)
    stage3.lead("__fencepost_state", 1)  # otherwise the proxies cannot read it and stop serving
    client, end = story.confirmed_client()
    values = [story.value("timeout", end), story.value("named", end + 1)]
    with client:
        for follower in (2, 3):
            stage3.kafka.pause(follower)
        try:
            story.send(client, values[0], at=end, timeout_ms=3_000)
            story.send(client, values[1], at=end + 1, named=True, timeout_ms=3_000)
            time.sleep(4)
        finally:
            for follower in (2, 3):
                stage3.kafka.resume(follower)
        codes = story.apply_records(client, *values)
    stage3.await_in_sync(story.topic)
    say(f"replicas stood still: answers {codes}")
    story.end(say, "replicas stood still")


# --- disconnected clients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held", DIRECTIONS)
def test_append_of_disconnected_client_keeps_its_offset(held: Direction, stage3: Stage3, say: Say) -> None:
    story = Story(stage3)
    for reset in (True, False):
        end = story.warm()
        gone, next_one = story.value("gone", end), story.value("next", end)
        client = story.connect()
        with Hold(held, gone) as fault, story.connect() as another:
            stage3.pipes[1].add(fault)
            story.send(client, gone, at=end)
            fault.wait()
            if reset:
                client.reset()
            else:
                client.close()
            story.send(another, next_one, at=end, timeout_ms=3_000)
            codes = story.apply_records(another, next_one)
            fault.release()
        assert OK not in codes, "the offset was already taken by the disconnected client"
    story.end(say, "client disconnected")


# --- paused and replaced brokers --------------------------------------------------------------------------------------


def test_append_queued_in_former_leader_stays_consistent(stage3: Stage3, say: Say) -> None:
    story = Story(stage3)
    client, end = story.confirmed_client()
    queued = [story.value("queued", end + i) for i in range(3)]
    with Hold("request", queued[0]) as fault:
        stage3.pipes[1].add(fault)
        story.send(client, *queued, at=end, timeout_ms=2_000)
        fault.wait()
        stage3.kafka.pause(1)
    try:
        codes = story.apply_records(client, *queued)
        client.reset()
        assert codes[:1] in ([TIMED_OUT], []), codes  # the proxy may not have sent the later ones
        stage3.await_leader(story.topic, other_than=1)
        # The sequencer of the other proxy knows nothing about the queued appends.
        append_at_the_end(stage3.log, stage3.proxies[1], "other", story.ledger)
    finally:
        stage3.kafka.resume(1)
    stage3.await_in_sync(story.topic)
    story.end(say, "queued in an old leader")


@pytest.mark.parametrize("seconds", [8, pytest.param(45, marks=pytest.mark.soak)])
def test_append_queued_in_only_replica_stays_consistent(seconds: int, stage3: Stage3, say: Say) -> None:
    """No other replica can lead. The broker resumes, reads its sockets and compares the queued appends."""
    stories = [Story(stage3, on=[1], configs={"min.insync.replicas": "1"}) for _ in range(3)]
    others = [story.connect(1) for story in stories]
    clients = [story.connect() for story in stories]
    ends = [story.warm() for story in stories]
    rivals: list[bytes] = []
    stage3.kafka.pause(1)
    try:
        for i, story in enumerate(stories):
            queued = [story.value("queued", ends[i]), story.value("behind", ends[i] + 1)]
            story.send(clients[i], *queued, at=ends[i], named=i == 1, timeout_ms=2_000)
            story.apply_records(clients[i], *queued)
        clients[2].reset()
        time.sleep(seconds)
        for i, story in enumerate(stories):
            rivals.append(story.value("rival", ends[i]))
            story.send(others[i], rivals[i], at=ends[i], timeout_ms=20_000)
    finally:
        stage3.kafka.resume(1)
    for i, story in enumerate(stories):
        story.apply_records(others[i], rivals[i])
        clients[i].close()
        others[i].close()
        story.end(say, "queued in the only replica")


@pytest.mark.parametrize("held", [pytest.param("request", marks=pytest.mark.soak), "response"])
def test_broker_replaced_during_append_stays_consistent(held: Direction, stage3: Stage3, say: Say) -> None:
    """The leader is killed with SIGKILL. Its delayed response arrives after another leader has appended."""
    story = Story(stage3)
    client, end = story.confirmed_client()
    values = [story.value("on-its-way", end + i) for i in range(3)]
    with Hold(held, values[0]) as fault, client:
        stage3.pipes[1].add(fault)
        story.send(client, *values, at=end, named=True)
        fault.wait()
        stage3.kafka.kill(1)
        stage3.await_leader(story.topic, other_than=1)
        append_at_the_end(stage3.log, stage3.proxies[1], "other", story.ledger)
        stage3.kafka.restart(1)
        fault.release()
        codes = story.apply_records(client, *values)
    stage3.await_in_sync(story.topic)
    stage3.lead(story.topic, 1)
    say(f"broker replaced: answers {codes}")
    story.end(say, "broker replaced")


def test_paused_leader_blocks_no_client_after_failover(stage3: Stage3) -> None:
    """The client received 7 and keeps its connection open, as client libraries do."""
    story = Story(stage3)
    end = story.warm()
    value = story.value("in-flight", end)
    with story.connect() as client:
        with Hold("request", value) as fault:
            stage3.pipes[1].add(fault)
            story.send(client, value, at=end, timeout_ms=3_000)
            fault.wait()
            stage3.kafka.pause(1)
        try:
            assert story.apply_records(client, value) == [TIMED_OUT]
            stage3.await_leader(story.topic, other_than=1)
            append_at_the_end(stage3.log, stage3.proxies[0], "same-proxy", story.ledger, within_seconds=60)
        finally:
            stage3.kafka.resume(1)
        stage3.await_in_sync(story.topic)
        story.continue_appending()
    story.ledger.check(stage3.log)
