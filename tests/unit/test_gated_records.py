"""Records of the state topic about groups with gated partitions."""

from __future__ import annotations

from uuid import UUID

import pytest

from fencepost_proxy.expansion.gated import (
    GatedPartitions,
    encode_gated,
    encode_gated_tombstone,
    encode_released,
)
from fencepost_proxy.topics.state import StateView, TopicConfigChange
from fencepost_proxy.types import Offset, TopicPartition
from fencepost_proxy.wire.state_records import StateRecord

ID = UUID(int=7)
LACKED = frozenset({TopicPartition("orders", 2), TopicPartition("orders", 3)})


def _view(*records: StateRecord) -> StateView:
    view = StateView("cluster")
    for offset, each in enumerate(records):
        assert view.apply(Offset(offset), each.key, each.value) is None
    return view


@pytest.mark.parametrize("group", ["g", "a/b", "", "gruppe mit ü"])
def test_gated_record_is_read_until_its_tombstone(group: str) -> None:
    stored = encode_gated(group, LACKED, {"orders": ID, "others": UUID(int=8)}, 5)
    assert _view(stored).groups.groups == {group: GatedPartitions(LACKED, {"orders": ID}, 5)}
    assert not _view(stored, encode_gated_tombstone(group)).groups.groups


@pytest.mark.parametrize("group", ["g", "a/b"])
def test_released_partition_stays_released_until_topic_deletion(group: str) -> None:
    view = _view(encode_released(ID, 3, group, 5))
    assert view.groups.released(ID, 3, group)
    assert not view.groups.released(ID, 4, group)
    assert not view.groups.released(ID, 3, "another")
    assert not view.groups.released(UUID(int=8), 3, group)
    (tombstone,) = view.records_of([TopicConfigChange("orders", ID, deleted=True)])
    assert view.apply(view.next_offset, tombstone.key, tombstone.value) is None
    assert not view.groups.released(ID, 3, group)


@pytest.mark.parametrize(
    "record",
    [
        StateRecord(b"gated/g", b"{}"),
        StateRecord(b"gated/g", b'{"topics":{"orders":[]},"at_ms":1}'),
        StateRecord(b"gated/g", b'{"topics":{"orders":{"id":"no","partitions":[]}},"at_ms":1}'),
        StateRecord(b"released/no/3/g", b"{}"),
        StateRecord(b"released/00000000-0000-0000-0000-000000000007/x/g", b"{}"),
        StateRecord(b"gated/g", b"no"),
    ],
)
def test_unreadable_record_is_left_out(record: StateRecord) -> None:
    view = StateView("cluster")
    assert view.apply(Offset(0), record.key, record.value) is not None
    assert not view.groups.groups
