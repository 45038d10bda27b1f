"""Every row of the contract's tables, at each level that can run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.contract.modelled import ModelledLevel
from tests.contract.real import CONFIG, RealLevel, await_first_append
from tests.contract.rows import CONFIGS, MODELLED, REAL, SEQUENCER, Row
from tests.contract.sequencer import SequencerLevel
from tests.contract.tables import TABLES
from tests.kit.fault_proxy import FaultProxy
from tests.support.proxy import ProxyProcess

#: Runs of each row at the modelled levels: other delays, other splits of the byte streams.
_SEEDS = 3


def rows(level: str) -> list[Any]:
    return [
        pytest.param(row, id=f"{table}/{row.name}")
        for table, rows in TABLES.items()
        for row in rows
        if level not in row.without
    ]


@pytest.mark.parametrize("row", rows(SEQUENCER))
def test_sequencer(row: Row) -> None:
    for seed in range(_SEEDS):
        SequencerLevel(row, seed).run_all()


@pytest.mark.parametrize("row", rows(MODELLED))
def test_modelled_cluster(row: Row) -> None:
    for seed in range(_SEEDS):
        ModelledLevel(row, seed).run_all()


@pytest.fixture(scope="module")
def proxy(pipe: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(pipe.address, tmp_path_factory.mktemp("contract"), config=CONFIG) as process:
        await_first_append(process)
        yield process


@pytest.fixture(scope="module")
def other(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ProxyProcess]]:
    """Another process, started by the first row that needs it."""
    started: list[ProxyProcess] = []
    with ExitStack() as stack:

        def start() -> ProxyProcess:
            if not started:
                config = 'refusal_scope = "request"\n' + CONFIG
                process = ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("other"), config=config)
                started.append(stack.enter_context(process))
                await_first_append(process)
            return started[0]

        yield start


@pytest.mark.kafka
@pytest.mark.brokers
@pytest.mark.parametrize("row", rows(REAL))
def test_real_kafka(
    row: Row, kafka: KafkaCluster, pipe: FaultProxy, proxy: ProxyProcess, other: Callable[[], ProxyProcess]
) -> None:
    level = RealLevel(row, kafka.bootstrap, pipe, proxy, other)
    try:
        level.run_all()
    finally:
        level.close()


def test_rows_are_well_formed() -> None:
    for table, listed in TABLES.items():
        names = [each.name for each in listed]
        assert len(names) == len(set(names)), table
        for each in listed:
            assert each.topic in CONFIGS
            assert len(each.without) < 3, f"{table}/{each.name} runs nowhere"
            assert set(each.without) <= {SEQUENCER, MODELLED, REAL}
