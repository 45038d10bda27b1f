"""Which tests the processes of `make test` begin with."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.workers import ByFile

FILES = ["kafka-long", "kafka-short", "unit", "simulation"]


class Process:
    def __init__(self, number: int) -> None:
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.reported: list[int] = []

    def send_runtest_some(self, indexes: list[int]) -> None:
        self.reported += indexes


@pytest.mark.parametrize(("count", "begins"), [(4, [0, 1, 2, 3]), (3, [0, 1, 3]), (2, [0, 1]), (1, [0])])
def test_last_test_process_starts_from_the_end(count: int, begins: list[int]) -> None:
    scheduler: Any = object.__new__(ByFile)
    processes = [Process(number) for number in range(count)]
    scheduler.numnodes = count
    scheduler.assigned_work = {}
    scheduler.workqueue = OrderedDict((name, {name: False}) for name in FILES)
    scheduler.registered_collections = dict.fromkeys(processes, FILES)
    for process in processes:
        scheduler._assign_work_unit(process)
    assert [process.reported for process in processes] == [[each] for each in begins]
    assert len(scheduler.workqueue) == len(FILES) - count
