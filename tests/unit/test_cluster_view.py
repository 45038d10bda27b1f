"""The broker of a client's connection, as `Commits.validate` needs it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.types import Address, NodeId

ONE, TWO = (NodeId(1), Address("kafka-1", 9092)), (NodeId(2), Address("kafka-2", 9092))
ANOTHER_NAME = Address("kafka", 9092)


@pytest.mark.parametrize(
    ("brokers", "listener", "address", "found"),
    [
        ([ONE, TWO], NodeId(2), ANOTHER_NAME, NodeId(2)),
        ([ONE, TWO], None, TWO[1], NodeId(2)),
        ([ONE, TWO], None, ANOTHER_NAME, None),
        ([ONE], None, ANOTHER_NAME, NodeId(1)),
        ([], None, ANOTHER_NAME, None),
    ],
)
def test_broker_of_a_connection(
    brokers: list[tuple[NodeId, Address]], listener: NodeId | None, address: Address, found: NodeId | None
) -> None:
    view: Any = SimpleNamespace(sidecar=None, kafka=SimpleNamespace(brokers=dict(brokers)))
    assert ClusterView.broker_of(view, listener, address) == found


def test_broker_of_a_sidecar_is_its_own() -> None:
    view: Any = SimpleNamespace(sidecar=SimpleNamespace(node_id=NodeId(2)))
    assert ClusterView.broker_of(view, None, ANOTHER_NAME) == NodeId(2)
