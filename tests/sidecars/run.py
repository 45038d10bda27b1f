"""Competing conditional writers while leaders move between brokers with sidecars, and the resulting log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.kit.stage import NODES
from tests.sidecars.stage import Sidecars
from tests.support.kafka import unique_topic
from tests.support.raw import Log
from tests.support.three_brokers import required_topic
from tests.support.writers import Ledger, Writer, append_at_the_end, await_more, expected_of, offsets, writing

Say = Callable[[str], None]
#: The topic's check. true: an unconditional writer also appends to it.
Check = Literal["required", "true"]
#: Appends required after each step, so that each step happens under load.
_CONTINUE = 15
_DOWN_SECONDS = 1.0


@dataclass(frozen=True)
class Result:
    """`false_accepts` – accepted at another offset than expected, or one of two accepted appends at one offset. `lost`
    – accepted, and not in Kafka. `appeared` – refused, and in Kafka. `detected` – appended at another offset than
    expected, with OFFSET_VIOLATION or without any response: impossible where Kafka compares the sequence."""

    moves: int
    restarts: int
    accepted: int
    refused: int
    unknown: int
    connections_lost: int
    in_kafka: int
    detected: int
    false_accepts: int
    lost: int
    appeared: int

    @property
    def holds(self) -> bool:
        return not (self.false_accepts or self.lost or self.appeared) and bool(self.accepted and self.refused)

    def table(self) -> str:
        rows = {
            "leaders moved by an election": self.moves,
            "brokers restarted": self.restarts,
            "appends accepted": self.accepted,
            "appends refused": self.refused,
            "outcome unknown to the writer": self.unknown,
            "connections lost": self.connections_lost,
            "records in Kafka": self.in_kafka,
            "appended elsewhere, which was told, or nothing was": self.detected,
            "accepted at another offset than expected, or twice": self.false_accepts,
            "accepted, and not in Kafka": self.lost,
            "refused, and in Kafka": self.appeared,
        }
        return "\n".join(f"{name:<52} {count:>6}" for name, count in rows.items())


def writers_of(stage: Sidecars, topic: str, check: Check) -> list[Writer]:
    """Sequential and pipelined, idempotent, with and without write-id; all compete for the same offsets."""
    there, back = list(stage.proxies), list(reversed(stage.proxies))
    beside = (
        []
        if check == "required"
        else [Writer("expects-nothing", there, topic, idempotent=True, conditional=False, pause_seconds=0.05)]
    )
    return [
        *beside,
        Writer("single", there, topic),
        Writer("chain", back, topic, pipeline_key=6),
        Writer("idempotent", back, topic, idempotent=True),
        Writer("named", there, topic, named=True),
        Writer("named-chain", back, topic, pipeline_key=4, named=True, idempotent=True),
    ]


def run(
    stage: Sidecars,
    *,
    rounds: int = 1,
    restarts: Sequence[int] = NODES,
    check: Check = "required",
    say: Say = lambda text: None,
) -> Result:
    """Each round moves the leader to every broker by election, then restarts `restarts` in turn.

    Every second round kills brokers instead, together with the sidecars of the current leaders.
    """
    topic = stage.create(required_topic() if check == "required" else unique_topic("checked"))
    writers = writers_of(stage, topic, check)
    moves = restarted = 0
    with writing(*writers):
        await_more(stage, topic, writers, _CONTINUE)
        for number in range(rounds):
            for leader in (2, 3, 1):
                stage.lead(topic, leader)
                moves += 1
                await_more(stage, topic, writers, _CONTINUE)
            for node_id in restarts:
                stage.lead(topic, node_id)
                moves += 1
                if number % 2:
                    stage.sidecar(node_id).kill()
                    time.sleep(_DOWN_SECONDS)
                    stage.sidecar(node_id).restart()
                stage.restart_broker(node_id, kill=bool(number % 2))
                restarted += 1
                stage.await_in_sync(topic)
                await_more(stage, topic, writers, _CONTINUE)
            say(f"round {number + 1}: {stage.log.end(topic)} records")
    ledger = Ledger().take(*(each.ledger for each in writers))
    for sidecar in stage.proxies:
        append_at_the_end(stage.log, sidecar, topic, "after", ledger)
    say(str(ledger))
    result = _counted(stage.log, topic, ledger, check, moves=moves, restarts=restarted)
    if result.holds and check == "required":
        ledger.check(stage.log, topic)  # and no new fence base was needed
    return result


def _counted(log: Log, topic: str, ledger: Ledger, check: Check, *, moves: int, restarts: int) -> Result:
    there = offsets(log.batches(topic))
    elsewhere = {
        value
        for value, at in ledger.accepted.items()
        if expected_of(value) not in (None, at) or there.get(value, at) != at
    }
    misplaced = {value for value, at in there.items() if expected_of(value) not in (None, at)}
    detected = misplaced & (ledger.violated.keys() | ledger.unknown) if check == "true" else set()
    won_twice = len(ledger.accepted) - len(set(ledger.accepted.values()))
    return Result(
        moves,
        restarts,
        len(ledger.accepted),
        len(ledger.refused),
        len(ledger.unknown),
        ledger.lost,
        len(there),
        len(detected),
        len(elsewhere | (misplaced - detected)) + won_twice,
        len(ledger.accepted.keys() - there.keys()),
        len(ledger.refused & there.keys()),
    )
