"""Competing conditional writers while leaders move between brokers with sidecars, and the resulting log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.kit.checker import Decision, report
from tests.kit.checker import check as validate
from tests.kit.history import OK, REFUSED
from tests.kit.stage import NODES
from tests.sidecars.stage import Sidecars
from tests.support.kafka import unique_topic
from tests.support.three_brokers import required_topic
from tests.support.writers import Ledger, Writer, append_at_the_end, await_more, check_fences, writing

Say = Callable[[str], None]
#: The topic's check. true: an unconditional writer also appends to it.
Check = Literal["required", "true"]
#: Appends required after each step, so that each step happens under load.
_CONTINUE = 15
_DOWN_SECONDS = 1.0


@dataclass(frozen=True)
class Result:
    """`detected` – appended at another offset than expected, with OFFSET_VIOLATION or an unknown outcome: impossible
    where Kafka compares the sequence."""

    moves: int
    restarts: int
    history: Ledger
    decision: Decision
    detected: int

    @property
    def holds(self) -> bool:
        outcomes = self.history.outcomes()
        return not self.decision.findings and bool(outcomes[OK] and outcomes[REFUSED])

    def table(self) -> str:
        rows = {
            "leaders moved by an election": self.moves,
            "brokers restarted": self.restarts,
            "connections lost": self.history.lost,
            "appended at another offset, which was reported or unknown": self.detected,
        }
        lines = [f"{name:<60} {count:>6}" for name, count in rows.items()]
        return "\n".join([*lines, *self.history.table(), *report(self.decision)])


def writers_of(stage: Sidecars, ledger: Ledger, check: Check) -> list[Writer]:
    """Sequential and pipelined, idempotent, with and without write-id; all compete for the same offsets."""
    there, back = list(stage.proxies), list(reversed(stage.proxies))
    beside = (
        []
        if check == "required"
        else [Writer("expects-nothing", there, ledger, idempotent=True, conditional=False, pause_seconds=0.05)]
    )
    return [
        *beside,
        Writer("single", there, ledger),
        Writer("chain", back, ledger, pipeline_key=6),
        Writer("idempotent", back, ledger, idempotent=True),
        Writer("named", there, ledger, named=True),
        Writer("named-chain", back, ledger, pipeline_key=4, named=True, idempotent=True),
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
    ledger = Ledger(topic)
    writers = writers_of(stage, ledger, check)
    moves = restarted = 0
    with writing(*writers):
        await_more(stage, writers, _CONTINUE)
        for number in range(rounds):
            for leader in (2, 3, 1):
                stage.lead(topic, leader)
                moves += 1
                await_more(stage, writers, _CONTINUE)
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
                await_more(stage, writers, _CONTINUE)
            say(f"round {number + 1}: {stage.log.end(topic)} records")
    for sidecar in stage.proxies:
        append_at_the_end(stage.log, sidecar, "after", ledger)
    ledger.read_log(stage.log, topic)
    decision = validate(ledger)
    if check == "required" and not decision.findings:
        check_fences(stage.log.batches(topic))
    return Result(moves, restarted, ledger, decision, ledger.misplaced())
