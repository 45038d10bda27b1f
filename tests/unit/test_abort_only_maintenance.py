"""Records of transactions that ended without a proxy are cleared, and no others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.transactions import NotCoordinator
from fencepost_proxy.config import Limits
from fencepost_proxy.errors import Error
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services.transactions import Commits
from fencepost_proxy.topics.abort_only import AbortOnly
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import NodeId
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.state_records import StateRecord

ONE, TWO = NodeId(1), NodeId(2)
RECORD = AbortOnly(UUID(int=1), "transfer", 7, 3, "OFFSET_MISMATCH …", None, 1_000)
NEWER = RECORD._replace(name=UUID(int=2), transactional_id="another", at_ms=2_000)
OPEN = SimpleNamespace(producer_id=7, producer_epoch=3, state="Ongoing")
NEXT = SimpleNamespace(producer_id=7, producer_epoch=4, state="Ongoing")
ENDED = SimpleNamespace(producer_id=7, producer_epoch=3, state="CompleteAbort")
NOT_COORDINATOR = NotCoordinator("")
DENIED = UpstreamUnavailable("", error_code=Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
DOWN = UpstreamUnavailable("no connection")


class Kafka:
    """`states` – what each broker answers about each transactional id."""

    def __init__(self, states: dict[str, dict[NodeId, Any]], *records: AbortOnly) -> None:
        self.states, self.stored = states, list[StateRecord]()
        self.known = SimpleNamespace(brokers={ONE: None, TWO: None})
        self.view = SimpleNamespace(abort_only_records=SimpleNamespace(older_than=lambda at_ms: list(records)))

    async def describe_at(self, node_id: NodeId, transactional_id: str) -> Any:
        answer = self.states[transactional_id][node_id]
        if isinstance(answer, UpstreamUnavailable):
            raise answer
        return answer

    async def append(self, records: list[StateRecord]) -> None:
        self.stored += records


def maintained(kafka: Any) -> set[bytes]:
    """The keys that are cleared."""
    names = "metadata", "transactions", "producers", "log_ends", "fetches", "in_sync"
    parts: dict[str, Any] = dict.fromkeys(names, kafka)
    commits = Commits(
        Limits(),
        lambda: kafka,
        table=Table(),
        configured=[],
        policy=lambda topic: None,
        names=HeaderNames(),
        metrics=Metrics(),
        **parts,
    )
    asyncio.run(commits.maintain(10.0))
    assert all(record.value is None for record in kafka.stored)
    return {record.key for record in kafka.stored}


@pytest.mark.parametrize(
    ("one", "two", "cleared"),
    [
        (ENDED, NOT_COORDINATOR, True),
        (NEXT, NOT_COORDINATOR, True),
        (NOT_COORDINATOR, None, True),
        (OPEN, NOT_COORDINATOR, False),
        (NOT_COORDINATOR, NOT_COORDINATOR, False),
        # The first one is cut off from the others, and was the coordinator.
        (None, OPEN, False),
        (ENDED, OPEN, False),
        (ENDED, DENIED, False),
    ],
)
def test_a_record_is_cleared_once_no_broker_has_its_transaction_open(one: Any, two: Any, cleared: bool) -> None:
    assert maintained(Kafka({"transfer": {ONE: one, TWO: two}}, RECORD)) == ({RECORD.key} if cleared else set())


def test_what_one_transaction_shows_is_stored_although_another_cannot_be_described() -> None:
    states = {"transfer": {ONE: ENDED, TWO: NOT_COORDINATOR}, "another": {ONE: DOWN, TWO: NOT_COORDINATOR}}
    kafka = Kafka(states, RECORD, NEWER)
    with pytest.raises(UpstreamUnavailable):
        maintained(kafka)
    assert {record.key for record in kafka.stored} == {RECORD.key}
