"""Competing conditional writers while leaders move between brokers with sidecars, and the resulting log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from tests.kit.stage import NODES
from tests.sidecars.stage import Sidecars
from tests.support.kafka import unique_topic
from tests.support.three_brokers import required_topic
from tests.support.writers import CONDITIONAL, UNCONDITIONAL, under_load

Say = Callable[[str], None]
#: The topic's check. true: an unconditional writer also appends to it.
Check = Literal["required", "true"]
#: Appends required after each step, so that each step happens under load.
_CONTINUE = 15
_DOWN_SECONDS = 1.0


def run(
    stage: Sidecars,
    *,
    rounds: int = 1,
    restarts: Sequence[int] = NODES,
    check: Check = "required",
    say: Say = lambda text: None,
) -> None:
    """Each round moves the leader to every broker by election, then restarts `restarts` in turn.

    Every second round kills brokers instead, together with the sidecars of the current leaders. Raises AssertionError
    if the log does not fit the answers.
    """
    topic = stage.create(required_topic() if check == "required" else unique_topic("checked"))
    with under_load(stage, topic, CONDITIONAL if check == "required" else CONDITIONAL | UNCONDITIONAL) as load:
        for number in range(rounds):
            for leader in (2, 3, 1):
                stage.lead(topic, leader)
                load.more(_CONTINUE)
            for node_id in restarts:
                stage.lead(topic, node_id)
                if number % 2:
                    stage.sidecar(node_id).kill()
                    time.sleep(_DOWN_SECONDS)
                    stage.sidecar(node_id).restart()
                stage.restart_broker(node_id, kill=bool(number % 2))
                stage.await_in_sync(topic)
                load.more(_CONTINUE)
            say(f"round {number + 1}: {stage.log.end(topic)} records")
    ledger = load.ledger
    # Where Kafka compares the sequence, this is impossible.
    say("\n".join([f"appended at another offset, and reported or unknown: {ledger.misplaced()}", *ledger.table()]))
