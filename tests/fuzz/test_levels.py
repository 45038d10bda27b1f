"""Dialogues on topics with idempotence levels, with a Kafka that may refuse producer ids."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fencepost_policies.append import Check
from fencepost_policies.idempotence_level import Level
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from tests.fuzz import dialogue
from tests.fuzz.dialogue import Dialogue, FuzzServices, _Run
from tests.fuzz.engine import Failure, Op, Program, Untraced
from tests.support.executors import each_executor, executing
from tests.unit.test_fast_path import _Programs, _Steady

_PROGRAMS = 120
_POLICIES = {
    "checked": TopicPolicy(Check.ON, idempotence=Level.SAFE),
    "required": TopicPolicy(Check.REQUIRED, idempotence=Level.REQUIRED),
    "relay": TopicPolicy(idempotence=Level.SAFE),
    "other": TopicPolicy(idempotence=Level.REQUIRED),
}


class _ForgetfulServices(FuzzServices):
    """It must query log starts."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.idempotence = IdempotenceMemory(3)


class _LevelledRun(_Run):
    def __init__(self, program: Program, seed: int) -> None:
        super().__init__(program, set(), Untraced())
        self._rng = random.Random(f"levels {seed}")

    def _do(self, op: Op) -> None:
        draw = self._rng.random()
        if draw < 0.05:
            self.services.idempotence.refused(self._rng.choice(("relay", "checked")), self.now)
        elif draw < 0.08:
            self.services.idempotence.forget_topic("relay")
        super()._do(op)


def _error(rng: random.Random) -> int:
    return rng.choice((0, 6, 7, 20, 29, 31, 43, 43, 43, 43, 45, 45, 59, 87))


@each_executor
def test_levels_keep_the_invariants_of_dialogues(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogue, "POLICIES", _POLICIES)
    monkeypatch.setattr(dialogue, "FuzzServices", _ForgetfulServices)
    monkeypatch.setattr(Dialogue, "_error", staticmethod(_error))
    for seed in range(_PROGRAMS):
        rng, fuzzer = random.Random(f"levels {seed}"), Dialogue()
        program = Program(fuzzer.setup(rng), [fuzzer.op(rng) for _ in range(60)])
        if not seed % 2:
            program = (_Steady() if seed % 4 else _Programs()).program(seed)
        try:
            with executing(executor):
                _LevelledRun(program, seed).run()
        except Failure as failure:
            raise AssertionError(f"seed {seed}: {failure}") from failure
