"""Exactly-once processing: the committed output has each input once although processes are killed.

This is the short form. `make eos-proof` runs every client with many more kills and prints the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.eos_proof import run as proof

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[proof.Stage]:
    with proof.stage(tmp_path_factory.mktemp("eos")) as ready:
        yield ready


def test_without_transactions_inputs_are_in_the_output_twice(stage: proof.Stage, say: Callable[[str], None]) -> None:
    """Shows that the next test can fail."""
    plan = proof.Plan(2, clients=("aiokafka", "kafka-python"), plain=True, victims=("application", "zombie"))
    result = proof.run(stage, plan)
    say("\n    ".join(proof.table(result)))
    assert result.at_least_once, result


def test_each_input_is_once_in_the_output(stage: proof.Stage, say: Callable[[str], None]) -> None:
    """Given applications of two clients, when they, a proxy and a broker are killed, and successors start while they
    run. The run waits until these zombies are fenced."""
    result = proof.run(stage, proof.Plan(4, clients=("aiokafka", "kafka-python")))
    say("\n    ".join([f"kills: {dict(result.kills)}", *proof.table(result)]))
    assert result.holds, result
    assert all(each.zombies for each in result.counts.values())


@pytest.mark.soak
@pytest.mark.parametrize("lie", ["commits", "offsets"])
def test_lying_proxy_is_detected(tmp_path: Path, lie: str, say: Callable[[str], None]) -> None:
    """Given a proxy that aborts half of the transactions but reports success, or that commits offset 0."""
    with proof.stage(tmp_path, lie=lie) as stage:
        result = proof.run(stage, proof.Plan(2, victims=("application",)))
    say("\n    ".join(proof.table(result)))
    for client, counts in result.counts.items():
        assert counts.missing if lie == "commits" else counts.twice, (client, counts)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_client_and_many_kills(stage: proof.Stage, say: Callable[[str], None]) -> None:
    result = proof.run(stage, proof.Plan(50))
    say("\n    ".join([f"kills: {dict(result.kills)}", *proof.table(result)]))
    assert result.holds, result
    assert all(each.aborted for each in result.counts.values()), "no kill met an open transaction"
