"""Dialogues on topics with partition-count checks, while their append barriers open and close."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fencepost_policies.append import Check
from fencepost_policies.partitioners import Partitioner
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from tests.fuzz import dialogue
from tests.fuzz.dialogue import PARTITIONS, Dialogue, FuzzServices, _Run
from tests.fuzz.engine import Failure, Op, Program, Untraced
from tests.support.executors import each_executor, executing
from tests.unit.test_fast_path import _Programs, _Steady

_PROGRAMS = 120
_ORDERED = {
    "checked": TopicPolicy(Check.ON, ordered=True),
    "required": TopicPolicy(Check.REQUIRED, ordered=True),
}
_COUNT_CHECKED = {
    "checked": TopicPolicy(Check.ON, count_check=Check.ON, partitioner=Partitioner.MURMUR2),
    "required": TopicPolicy(Check.REQUIRED, count_check=Check.ON),
}


class _CountingServices(FuzzServices):
    """Uses the dispatcher's barriers. Metadata is fresh, and the topics have just been expanded."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.partition_counts = dict.fromkeys(_COUNT_CHECKED, PARTITIONS)
        self.confirmed_at = dict.fromkeys(_COUNT_CHECKED, float("inf"))
        self.just_expanded = set(_COUNT_CHECKED)

    def barrier(self, topic: str) -> AppendBarrier:
        return self.dispatcher.barrier(topic)


class _ExpandingRun(_Run):
    def __init__(self, program: Program, seed: int) -> None:
        super().__init__(program, set(), Untraced())
        self._rng = random.Random(f"barriers {seed}")

    def _do(self, op: Op) -> None:
        draw, topic = self._rng.random(), self._rng.choice(("checked", "required"))
        if draw < 0.06:
            self._perform(self.dispatcher.close_barrier(topic, self.now))
        elif draw < 0.14:
            self._perform(self.dispatcher.open_barrier(topic, PARTITIONS, self.now))
        super()._do(op)
        for session in self.dispatcher.sessions.values():
            if session.entered_barriers and session.drained and not session.produce_requests:
                raise Failure("all is answered, but the barrier is not empty", session.connection)

    def _end_everything(self) -> None:
        for topic in list(self.dispatcher.barriers):
            self._perform(self.dispatcher.open_barrier(topic, PARTITIONS, self.now))
        super()._end_everything()
        for topic, barrier in self.dispatcher.barriers.items():
            if barrier.in_flight:
                raise Failure("a request is left in a barrier", (topic, barrier.in_flight))


def _anything(seed: int) -> Program:
    """Programs of the fuzzer, malformed ones included."""
    rng, fuzzer = random.Random(f"anything {seed}"), Dialogue()
    return Program(fuzzer.setup(rng), [fuzzer.op(rng) for _ in range(60)])


@pytest.mark.parametrize("policies", [_ORDERED, _COUNT_CHECKED], ids=["ordered", "count checked"])
@each_executor
def test_barriers_keep_every_promise_of_a_dialogue(
    executor: str, policies: dict[str, TopicPolicy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialogue, "POLICIES", policies)
    monkeypatch.setattr(dialogue, "FuzzServices", _CountingServices)
    for seed in range(_PROGRAMS):
        program = _anything(seed) if seed % 2 else (_Steady() if seed % 4 else _Programs()).program(seed)
        try:
            with executing(executor):
                _ExpandingRun(program, seed).run()
        except Failure as failure:
            raise AssertionError(f"seed {seed}: {failure}") from failure
