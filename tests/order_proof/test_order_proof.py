"""The order promise: during expansions, every client's group reads each key in order, and reads all records.

This is the short form. `make order-proof` runs every client and group protocol with more expansions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from kafka import KafkaAdminClient

from tests.order_proof import run as proof
from tests.order_proof.members import Group, kinds_named
from tests.support.kafka import unique_topic
from tests.support.members import KINDS, Kind

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(900)]

#: One kind for each client and each protocol, without a JVM for each member.
_FEW = "kafka-python eager,aiokafka,librdkafka cooperative,librdkafka consumer"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[proof.Stage]:
    with proof.stage(tmp_path_factory.mktemp("order"), proxies=2) as ready:
        yield ready


def test_without_ordered_expansion_groups_read_keys_unordered(stage: proof.Stage) -> None:
    """Shows that the next test can fail."""
    result = proof.run(stage, kinds_named(_FEW), proof.OFF, ordered=False)
    for kind, decision in result.decisions.items():
        assert decision.early, f"{kind.name} read all in order by chance"
        assert not decision.missing


def test_with_ordered_expansion_groups_read_keys_in_order(stage: proof.Stage, say: Callable[[str], None]) -> None:
    result = proof.run(stage, kinds_named(_FEW), proof.SHORT, ordered=True)
    say("\n    ".join(proof.table(result.decisions, {})))
    for kind, decision in result.decisions.items():
        assert decision.holds, f"{kind.name}: {decision.missing} missing, {decision.early[:5]}, {decision.late[:5]}"
    assert result.holds, result.late
    for writer in ("declared", "silent", "transactional"):
        assert result.refused[writer], f"no record was refused for its partition count: {writer} always knew the count"


def test_warm_up_ends_after_every_partition_has_commit(stage: proof.Stage) -> None:
    """Otherwise a second member would start at the log end of a partition, and miss records without any fault."""
    (kind,) = kinds_named("kafka-python cooperative")
    topic = unique_topic(proof.SEQUENCED)
    stage.create_partitions(topic, 2)
    group = Group(kind, stage.bootstraps, topic, stage.directory, "latest")
    try:
        group.join(commit_seconds=2.0)
        proof.warm_up(stage.bootstraps[0], topic, [group], proof.BETWEEN_OLD)
        with closing(KafkaAdminClient(bootstrap_servers=stage.kafka.bootstrap)) as admin:
            assert proof.committed(admin, group, range(2))
    finally:
        group.end()


@pytest.mark.soak
@pytest.mark.parametrize("client", sorted({kind.client for kind in KINDS}))
def test_every_client_and_protocol(stage: proof.Stage, client: str, say: Callable[[str], None]) -> None:
    kinds = kinds_named(client)
    on = proof.run(stage, kinds, proof.LONG, ordered=True)
    off = proof.run(stage, kinds, proof.OFF, ordered=False).decisions
    say("\n    ".join(proof.table(on.decisions, off)))
    assert on.holds, (on.late, on.decisions)
    assert all(decision.early for decision in off.values()), off


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("client", sorted({kind.client for kind in KINDS}))
def test_while_proxies_and_brokers_are_killed(tmp_path: Path, client: str, say: Callable[[str], None]) -> None:
    with proof.stage(tmp_path, brokers=3, proxies=2) as stage:
        result = proof.run(stage, kinds_named(client), proof.KILLS, ordered=True)
    say("\n    ".join([*proof.table(result.decisions, {}), *proof.writers_table([result])]))
    assert result.holds, (result.late, result.decisions)


def test_kinds_are_chosen_by_name_prefix() -> None:
    assert kinds_named("") == KINDS
    chosen: tuple[Kind, ...] = kinds_named("java consumer,aiokafka")
    assert [kind.name for kind in chosen] == ["java consumer", "aiokafka eager"]


@pytest.mark.soak
def test_order_holds_when_any_expansion_is_allowed(stage: proof.Stage, say: Callable[[str], None]) -> None:
    result = proof.run(stage, kinds_named(_FEW), proof.JUMPING, ordered=True)
    say("\n    ".join(proof.table(result.decisions, {})))
    assert result.holds, (result.late, result.decisions)
