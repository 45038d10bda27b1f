"""Leaders move, die, pause or are elected uncleanly while conditional writers append.

Kafka's log and its producer state advance together, and truncation of a log resets both. Afterwards, every accepted
append is at its reported offset, and no refused append is in the log. An append with an unknown outcome is in the log
at most once, at its expected offset. The next correct append succeeds. Every check reads the log directly from Kafka.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

from tests.kit.fault_proxy import Hold
from tests.kit.stage import NODES
from tests.kit.waiting import until
from tests.support.raw import Closed, Connection, batch
from tests.support.three_brokers import Stage3, leaders_listener, required_topic
from tests.support.writers import (
    OK,
    POLICY_VIOLATION,
    Ledger,
    append_at_the_end,
    under_load,
    value_of,
)

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

Say = Callable[[str], None]
STATE_TOPIC = "__fencepost_state"
NOT_LEADER = 6
ONE_ROUND_AND_MANY = [1, pytest.param(8, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]


# --- leaders that move ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", ONE_ROUND_AND_MANY)
def test_preferred_elections_and_reassignments(rounds: int, stage3: Stage3, say: Say) -> None:
    topic = stage3.create(required_topic())
    with under_load(stage3, topic) as load:
        for _ in range(rounds):
            for leader in (2, 3, 1):
                stage3.lead(topic, leader)
                load.more()
            for replicas in ([1, 2], [3, 1], [2, 3, 1], [1, 2, 3]):
                stage3.reassign(topic, replicas)  # moves data, and with [3, 1] the leader too
                stage3.elect_preferred(topic)
                load.more()


@pytest.mark.parametrize(
    ("tail", "fenced"),
    [("another wrote", True), ("another wrote", False), ("no client wrote", True)],
    ids=["fenced", "not fenced", "no other writer"],
)
def test_leader_returning_between_check_and_append_misplaces_nothing(
    tail: str, fenced: bool, stage3: Stage3, say: Say
) -> None:
    """Leadership moves from A to B and back to A. A request that was checked before the moves arrives at A after them,
    and A cannot detect this."""
    first, second = stage3.proxies if fenced else stage3.naive
    topic = stage3.create(required_topic())
    ledger = Ledger(topic)
    runs = 4
    reported = []
    for run in itertools.count():
        if run >= runs and (set(reported) != {NOT_LEADER} or run >= 4 * runs):
            break
        end = append_at_the_end(stage3.log, first, f"warm{run}", ledger) + 1
        # Kafka takes an equal sequence range for a duplicate, and refuses any other. The runs cover both responses.
        late = [value_of("late", run, end), value_of("too-late", run, end + 1)][: 1 + run % 2]
        for value in late:
            ledger.sent(value)
        with Hold("request", late[0]) as held, Connection(leaders_listener(first, topic)) as client:
            stage3.pipes[1].add(held)
            # Allow time for the leader changes.
            client.send_produce({topic: {0: batch(*late, expected=end)}}, timeout_ms=60_000)
            held.wait_observed()
            stage3.lead(topic, 2)
            if tail == "another wrote":
                # Two appends, so that the offsets of a naive proxy cannot match by chance.
                for _ in range(2):
                    append_at_the_end(stage3.log, second, f"other{run}", ledger)
            stage3.lead(topic, 1)
            stage3.until(partial(has_expanded, stage3, topic, 1, end - 1), "broker 1 to know that it leads")
            held.release()
            answer = client.receive_produce()[1][topic, 0]
        reported.append(answer.error_code)
        if fenced:
            for i, value in enumerate(late):
                ledger.note(value, answer._replace(base_offset=answer.base_offset + i))
            # 6: the append timed out in the sequencer, or broker 1 does not lead yet.
            right = POLICY_VIOLATION if tail == "another wrote" else OK
            assert answer.error_code in (right, NOT_LEADER), answer
    misplaced = ledger.misplaced(stage3.log)
    title = f"{tail}, {'fenced' if fenced else 'not fenced'}"
    say(f"{title}: {run} runs, {misplaced} at a wrong offset; the late ones got {reported}")
    if fenced:
        ledger.check(stage3.log)
        assert set(reported) != {NOT_LEADER}, "no append was compared: these runs prove nothing"
    else:
        assert misplaced >= runs, "no append was misplaced without a fence: these runs prove nothing"


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
    """Kills the partition's leader, the active controller, or a broker that is both. Then the leader moves again."""
    topic = stage3.create(required_topic())
    with under_load(stage3, topic) as load:
        for _ in range(rounds):
            controller = stage3.controller()
            others = [each for each in NODES if each != controller]
            stage3.lead(topic, controller if victim == "leader and controller" else others[0])
            killed = others[0] if victim == "leader" else controller
            stage3.kafka.kill(killed)
            if victim != "controller":
                stage3.await_leader(topic, other_than=killed)
            load.more()
            stage3.lead(topic, next(iter(stage3.isr(topic) - {killed, stage3.leader(topic)})))
            load.more()
            stage3.kafka.restart(killed)
            stage3.await_in_sync(topic)
            load.more()


# --- paused leaders that lose the end of their log --------------------------------------------------------------------


@pytest.mark.parametrize("rounds", ONE_ROUND_AND_MANY)
def test_replaced_leader_truncates_without_misplaced_appends(rounds: int, stage3: Stage3, say: Say) -> None:
    """The former leader resumes and appends the requests in its sockets before it learns of its replacement. Then it
    truncates them."""
    topic = stage3.create(required_topic())
    with under_load(stage3, topic) as load:
        for _ in range(rounds):
            leader = stage3.leader(topic)
            stage3.kafka.pause(leader)
            stage3.await_leader(topic, other_than=leader)
            load.more()
            stage3.kafka.resume(leader)
            stage3.await_in_sync(topic)
            load.more()


def has_expanded(stage: Stage3, topic: str, leader: int, end: int) -> bool:
    return stage.log_end_of(topic, leader) > end


@pytest.mark.parametrize("rounds", ONE_ROUND_AND_MANY)
def test_unreplicated_log_end_is_truncated_without_misplaced_appends(rounds: int, stage3: Stage3, say: Say) -> None:
    """The followers pause, so that only the leader has the appends. Then the leader pauses and the followers resume."""
    topic = stage3.create(required_topic())
    ledger = Ledger(topic)
    truncated = 0
    for run in itertools.count():
        # A follower may have some of the appends, if the leader answered its fetch late.
        if run >= rounds and (truncated or run >= rounds + 4):
            break
        leader = stage3.leader(topic)
        followers = [each for each in NODES if each != leader]
        stage3.lead(STATE_TOPIC, leader)  # otherwise the proxies cannot read it and stop serving
        with Connection(leaders_listener(stage3.proxies[0], topic), timeout_seconds=40) as client:
            client.api_versions()  # older than the acknowledgement that confirms the fence, so it may pipeline
            end = append_at_the_end(stage3.log, stage3.proxies[0], f"warm{run}", ledger) + 1
            tail = [value_of("tail", run * 10 + i, end + i) for i in range(5)]
            for follower in followers:
                stage3.kafka.pause(follower)
            time.sleep(1)  # lets the followers' waiting fetches end (replica.fetch.wait.max.ms)
            for i, value in enumerate(tail):
                ledger.sent(value)
                # With acks=1 the client would get a success that is truncated later. All replicas must have the append.
                client.send_produce({topic: {0: batch(value, expected=end + i)}}, acks=1, timeout_ms=8_000)
            until(partial(has_expanded, stage3, topic, leader, end), "records to lose")
            stage3.kafka.pause(leader)
            for follower in followers:
                stage3.kafka.resume(follower)
            stage3.await_leader(topic, other_than=leader)
            # Another writer takes the offsets that the former leader assigned to these appends.
            other = append_at_the_end(stage3.log, stage3.proxies[1], f"other{run}", ledger)
            stage3.kafka.resume(leader)
            with suppress(Closed, TimeoutError):
                for value in tail:
                    ledger.note(value, client.receive_produce()[1][topic, 0])
        stage3.await_in_sync(topic)
        truncated += other == end  # an offset that the former leader assigned
        stage3.lead(topic, leader)  # tests the log and producer state of the broker that truncated
        for proxy in stage3.proxies:
            append_at_the_end(stage3.log, proxy, f"after{run}", ledger)
    say(f"{truncated} of {run} leaders had records to lose; {ledger}")
    ledger.check(stage3.log)
    assert truncated, "no leader was truncated: these runs prove nothing"


# --- data loss in Kafka -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_unclean_election_loses_records_but_misplaces_none(rounds: int, stage3: Stage3, say: Say) -> None:
    """Only an outdated replica remains. Its log end applies to both the log and the producer state."""
    topic = stage3.create(
        required_topic(),
        on=(1, 2),
        configs={"unclean.leader.election.enable": "true", "min.insync.replicas": "1"},
    )
    ledger = Ledger(topic, may_lose=True)
    lost = 0
    for run in range(rounds):
        stage3.lead(topic, 1)
        append_at_the_end(stage3.log, stage3.proxies[0], f"safe{run}", ledger)
        stage3.kafka.kill(2)
        stage3.until(lambda: stage3.isr(topic) == {1}, "broker 1 to be alone")
        before = [append_at_the_end(stage3.log, stage3.proxies[i % 2], f"alone{run}", ledger) for i in range(6)]
        stage3.kafka.kill(1)
        stage3.kafka.restart(2, wait=False)
        stage3.await_leader(topic, is_now=2)
        end = stage3.log.end(topic)
        lost += before[-1] + 1 - end
        for proxy in stage3.proxies:
            append_at_the_end(stage3.log, proxy, f"uncleanly-led{run}", ledger)
        stage3.kafka.restart(1)
        stage3.await_in_sync(topic, 2)
        stage3.lead(topic, 1)  # had the lost records, and has truncated them
        for proxy in stage3.proxies:
            append_at_the_end(stage3.log, proxy, f"mended{run}", ledger)
    say(f"{lost} accepted appends lost by Kafka in {rounds} elections; {ledger}")
    assert lost, "no record was lost: this run proves nothing"
    ledger.check(stage3.log)


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


# --- clients that connect meanwhile -----------------------------------------------------------------------------------


def test_clients_connect_while_first_broker_is_paused(stage3: Stage3) -> None:
    """The paused broker accepts connections and does not respond. Clients reconnect, as client libraries do, and soon
    reach another broker."""
    answered = 0
    stage3.kafka.pause(1)
    for _ in range(20):
        with suppress(Closed, OSError), Connection(stage3.proxies[0].bootstrap, timeout_seconds=5) as client:
            client.api_versions()
            answered += 1
            break
    assert answered
