"""Leaders that move, die, stand still or are elected uncleanly while conditional writers go on.

Kafka's log and its memory of sequences go forward together, and when a leader's tail is truncated they go back
together. So afterwards every accepted append lies where it was told, a refused one nowhere, an unknown one at most
once and at its offset, and the next correct append works with nobody's help. Every check is made on the log as Kafka
itself has it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from tests.kit.fault_proxy import Hold
from tests.kit.stage import NODES
from tests.kit.waiting import until
from tests.support.proxy import ProxyProcess
from tests.support.raw import Closed, Connection, batch
from tests.support.three_brokers import Stage3, leaders_listener, required_topic
from tests.support.writers import (
    OK,
    POLICY_VIOLATION,
    Ledger,
    Writer,
    append_at_the_end,
    await_more,
    expected_of,
    offsets,
    value_of,
    writing,
)

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

Say = Callable[[str], None]
STATE_TOPIC = "__fencepost_state"
NOT_LEADER = 6
ONE_ROUND_AND_MANY = [1, pytest.param(8, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]


def all_kinds(proxies: Sequence[ProxyProcess], topic: str) -> list[Writer]:
    """Pipelined and one at a time, idempotent, named and bare, beginning with one proxy and with the other."""
    there, back = list(proxies), list(reversed(proxies))
    return [
        Writer("single", there, topic),
        Writer("chain", back, topic, pipeline_key=6),
        Writer("idempotent", back, topic, idempotent=True),
        Writer("idempotent-chain", there, topic, pipeline_key=4, idempotent=True),
        Writer("named", there, topic, named=True),
    ]


@contextmanager
def load(stage: Stage3, topic: str, say: Say) -> Iterator[list[Writer]]:
    """Writers of all kinds while something happens; then their stories are compared with the log."""
    writers = all_kinds(stage.proxies, topic)
    with writing(*writers):
        until(lambda: stage.log.end(topic) > 20, "the writers to get on", seconds=120)
        yield writers
        stage.mend()
        await_more(stage, topic, writers, 60)
    told_the_truth(stage, topic, writers, say)


def told_the_truth(stage: Stage3, topic: str, writers: Sequence[Writer], say: Say, *, may_lose: bool = False) -> Ledger:
    stage.await_in_sync(topic, len(stage.partition(topic)["ReplicaNodes"]))
    ledger = Ledger().take(*(each.ledger for each in writers))
    for proxy in stage.proxies:
        append_at_the_end(stage.log, proxy, topic, "after", ledger)
    say(str(ledger))
    ledger.check(stage.log, topic, may_lose=may_lose)
    assert ledger.accepted
    assert ledger.refused
    return ledger


# --- leaders that are told to move ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", ONE_ROUND_AND_MANY)
def test_preferred_elections_and_reassignments(rounds: int, stage3: Stage3, say: Say) -> None:
    topic = stage3.create(required_topic())
    with load(stage3, topic, say) as writers:
        for _ in range(rounds):
            for leader in (2, 3, 1):
                stage3.lead(topic, leader)
                await_more(stage3, topic, writers, 10)
            for replicas in ([1, 2], [3, 1], [2, 3, 1], [1, 2, 3]):
                stage3.reassign(topic, replicas)  # data moves, and with [3, 1] the leader too
                stage3.elect_preferred(topic)
                await_more(stage3, topic, writers, 10)


@pytest.mark.parametrize(
    ("tail", "fenced"),
    [("another wrote", True), ("another wrote", False), ("nobody wrote", True)],
    ids=["fenced", "not fenced", "no other writer"],
)
def test_leader_returning_between_check_and_append_misplaces_nothing(
    tail: str, fenced: bool, stage3: Stage3, say: Say
) -> None:
    """A -> B -> A: the request that was checked under the first A comes to the second A, which cannot tell."""
    first, second = stage3.proxies if fenced else stage3.naive
    topic = stage3.create(required_topic())
    ledger = Ledger()
    runs = 4
    reported = []
    for run in itertools.count():
        if run >= runs and (set(reported) != {NOT_LEADER} or run >= 4 * runs):
            break
        end = append_at_the_end(stage3.log, first, topic, f"warm{run}", ledger) + 1
        # Kafka takes an equal sequence range for a duplicate, and refuses any other: see that both are understood.
        late = [value_of("late", run, end), value_of("too-late", run, end + 1)][: 1 + run % 2]
        for value in late:
            ledger.sent(value)
        with Hold("request", late[0]) as held, Connection(leaders_listener(first, topic)) as client:
            stage3.pipes[1].add(held)
            # Leaders may take their time to move.
            client.send_produce({topic: {0: batch(*late, expected=end)}}, timeout_ms=60_000)
            held.wait_observed()
            stage3.lead(topic, 2)
            if tail == "another wrote":
                # Two of them: a naive proxy cannot be right by chance.
                for _ in range(2):
                    append_at_the_end(stage3.log, second, topic, f"other{run}", ledger)
            stage3.lead(topic, 1)
            stage3.until(partial(has_grown, stage3, topic, 1, end - 1), "broker 1 to know that it leads")
            held.release()
            answer = client.receive_produce()[1][topic, 0]
        reported.append(answer.error_code)
        if fenced:
            for i, value in enumerate(late):
                ledger.note(value, answer._replace(base_offset=answer.base_offset + i))
            # 6: its time at the gate is over, or broker 1 has not taken the lead yet.
            right = POLICY_VIOLATION if tail == "another wrote" else OK
            assert answer.error_code in (right, NOT_LEADER), answer
    misplaced = [
        value
        for value, offset in offsets(stage3.log.batches(topic)).items()
        if expected_of(value) not in (None, offset)
    ]
    title = f"{tail}, {'stamped' if fenced else 'not stamped'}"
    say(f"{title}: {run} runs, {len(misplaced)} at a wrong offset; the late ones were told {reported}")
    if fenced:
        ledger.check(stage3.log, topic)
        assert set(reported) != {NOT_LEADER}, "never compared: these runs show nothing"
    else:
        assert len(misplaced) >= runs, "without the stamp nothing went wrong: these runs show nothing"


# --- leaders that die -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("victim", "rounds"),
    [
        ("leader and controller", 1),
        *(
            pytest.param(victim, 6, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])
            for victim in ("leader", "controller", "leader and controller")
        ),
    ],
)
def test_kill_9(victim: str, rounds: int, stage3: Stage3, say: Say) -> None:
    """Of the partition's leader, of the active controller, of one that is both; then the leader moves once more."""
    topic = stage3.create(required_topic())
    with load(stage3, topic, say) as writers:
        for _ in range(rounds):
            controller = stage3.controller()
            others = [each for each in NODES if each != controller]
            stage3.lead(topic, controller if victim == "leader and controller" else others[0])
            killed = others[0] if victim == "leader" else controller
            stage3.kafka.kill(killed)
            if victim != "controller":
                stage3.await_leader(topic, other_than=killed)
            await_more(stage3, topic, writers, 10)
            stage3.lead(topic, next(iter(stage3.isr(topic) - {killed, stage3.leader(topic)})))
            await_more(stage3, topic, writers, 10)
            stage3.kafka.restart(killed)
            stage3.await_in_sync(topic)
            await_more(stage3, topic, writers, 10)


# --- leaders that stand still and lose their tail ---------------------------------------------------------------------


@pytest.mark.parametrize("rounds", ONE_ROUND_AND_MANY)
def test_replaced_leader_truncates_without_misplaced_appends(rounds: int, stage3: Stage3, say: Say) -> None:
    """What was in its sockets is appended by a leader that does not know yet that it is none, and then truncated."""
    topic = stage3.create(required_topic())
    with load(stage3, topic, say) as writers:
        for _ in range(rounds):
            leader = stage3.leader(topic)
            stage3.kafka.pause(leader)
            stage3.await_leader(topic, other_than=leader)
            await_more(stage3, topic, writers, 10)
            stage3.kafka.resume(leader)
            stage3.await_in_sync(topic)
            await_more(stage3, topic, writers, 10)


def has_grown(stage: Stage3, topic: str, leader: int, end: int) -> bool:
    return stage.log_end_of(topic, leader) > end


@pytest.mark.parametrize("rounds", ONE_ROUND_AND_MANY)
def test_unreplicated_log_end_is_truncated_without_misplaced_appends(rounds: int, stage3: Stage3, say: Say) -> None:
    """Followers stand still, so the leader's appends are its own alone; then it stands still and they go on."""
    topic = stage3.create(required_topic())
    ledger = Ledger()
    truncated = 0
    for run in itertools.count():
        # A follower may have some of the tail after all, where its fetch was answered late.
        if run >= rounds and (truncated or run >= rounds + 4):
            break
        leader = stage3.leader(topic)
        duplicate_waiters = [each for each in NODES if each != leader]
        stage3.lead(STATE_TOPIC, leader)  # or the proxies stop serving when they cannot read it
        with Connection(leaders_listener(stage3.proxies[0], topic), timeout_seconds=40) as client:
            client.api_versions()  # connected before the acknowledgement that makes the gate sure: it may pipeline
            end = append_at_the_end(stage3.log, stage3.proxies[0], topic, f"warm{run}", ledger) + 1
            tail = [value_of("tail", run * 10 + i, end + i) for i in range(5)]
            for duplicate_waiter in duplicate_waiters:
                stage3.kafka.pause(duplicate_waiter)
            time.sleep(1)  # their fetches wait in the leader for replica.fetch.wait.max.ms, and would be answered
            for i, value in enumerate(tail):
                ledger.sent(value)
                # acks=1 would be told of a success here, which is then truncated: all have to have it.
                client.send_produce({topic: {0: batch(value, expected=end + i)}}, acks=1, timeout_ms=8_000)
            until(partial(has_grown, stage3, topic, leader, end), "a tail")
            stage3.kafka.pause(leader)
            for duplicate_waiter in duplicate_waiters:
                stage3.kafka.resume(duplicate_waiter)
            stage3.await_leader(topic, other_than=leader)
            # Another writer takes the offsets that the old leader gave to the tail.
            other = append_at_the_end(stage3.log, stage3.proxies[1], topic, f"other{run}", ledger)
            stage3.kafka.resume(leader)
            with suppress(Closed, TimeoutError):
                for value in tail:
                    ledger.note(value, client.receive_produce()[1][topic, 0])
        stage3.await_in_sync(topic)
        truncated += other == end  # which the old leader had given to the tail
        stage3.lead(topic, leader)  # and so log and sequence of the one that truncated are what counts now
        for proxy in stage3.proxies:
            append_at_the_end(stage3.log, proxy, topic, f"after{run}", ledger)
    say(f"{truncated} of {run} leaders had a tail to lose; {ledger}")
    ledger.check(stage3.log, topic)
    assert truncated, "no leader ever lost a tail: these runs show nothing"


# --- what Kafka itself loses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_unclean_election_loses_records_but_misplaces_none(rounds: int, stage3: Stage3, say: Say) -> None:
    """One replica left, then only an outdated one: its end is the end, for log and sequence alike."""
    topic = stage3.create(
        required_topic(),
        on=(1, 2),
        configs={"unclean.leader.election.enable": "true", "min.insync.replicas": "1"},
    )
    ledger = Ledger()
    lost = 0
    for run in range(rounds):
        stage3.lead(topic, 1)
        append_at_the_end(stage3.log, stage3.proxies[0], topic, f"safe{run}", ledger)
        stage3.kafka.kill(2)
        stage3.until(lambda: stage3.isr(topic) == {1}, "broker 1 to be alone")
        before = [append_at_the_end(stage3.log, stage3.proxies[i % 2], topic, f"alone{run}", ledger) for i in range(6)]
        stage3.kafka.kill(1)
        stage3.kafka.restart(2, wait=False)
        stage3.await_leader(topic, is_now=2)
        end = stage3.log.end(topic)
        lost += before[-1] + 1 - end
        for proxy in stage3.proxies:
            append_at_the_end(stage3.log, proxy, topic, f"uncleanly-led{run}", ledger)
        stage3.kafka.restart(1)
        stage3.await_in_sync(topic, 2)
        stage3.lead(topic, 1)  # it had what was lost, and has truncated
        for proxy in stage3.proxies:
            append_at_the_end(stage3.log, proxy, topic, f"mended{run}", ledger)
    say(f"{lost} accepted appends lost by Kafka in {rounds} elections; {ledger}")
    assert lost, "nothing was lost: this shows nothing"
    ledger.check(stage3.log, topic, may_lose=True)


def test_weak_replication_settings_are_warned_about(stage3: Stage3) -> None:
    proxy = stage3.proxies[0]
    topic = stage3.create(
        "weak-" + required_topic(),
        on=(1, 2),
        configs={
            "unclean.leader.election.enable": "true",
            "min.insync.replicas": "1",
            "fencepost.check.expected.offsets": "required",
        },
    )

    def warned(words: str) -> None:
        until(lambda: any(topic in line and words in line for line in proxy.log.splitlines()), f"a warning: {words}")

    warned("has 2 replica(s)")
    warned("has min.insync.replicas=1")
    warned("has unclean.leader.election.enable=true")


# --- clients that come meanwhile --------------------------------------------------------------------------------------


def test_clients_connect_while_first_broker_is_paused(stage3: Stage3) -> None:
    """It takes connections and answers nothing. They try again, as clients do, and soon meet another broker."""
    answered = 0
    stage3.kafka.pause(1)
    for _ in range(20):
        with suppress(Closed, OSError), Connection(stage3.proxies[0].bootstrap, timeout_seconds=5) as client:
            client.api_versions()
            answered += 1
            break
    assert answered
