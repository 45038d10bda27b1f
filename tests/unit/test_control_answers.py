"""What the Kafka client makes of answers that a healthy cluster rarely gives."""

from __future__ import annotations

import pytest

from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.fetches import CompactedAway, Found, _batch_containing
from fencepost_proxy.cluster.log_ends import read_log_end
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.cluster.responses import Retry
from fencepost_proxy.types import LeaderEpoch, NodeId, Offset
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.uncompressed_batch import encode_uncompressed_batch

LEADER = Leader(NodeId(1), LeaderEpoch(5))


def end_of_epoch(epoch: int, offset: int, error_code: int = 0) -> Message:
    partition = Message(partition=0, error_code=error_code, leader_epoch=epoch, end_offset=offset)
    return Message(topics=[Message(topic="t", partitions=[partition])])


def at(offset: int, *values: bytes) -> bytes:
    batch = encode_uncompressed_batch([(None, value) for value in values], 1)
    return offset.to_bytes(8, "big") + batch[8:]


def test_only_requested_epochs_end_is_a_log_end() -> None:
    assert read_log_end(end_of_epoch(5, 41), LEADER).offset == 41

    # For an older epoch Kafka answers with the start of the next one; undefined is (-1, -1).
    for answer in (end_of_epoch(4, 41), end_of_epoch(-1, -1), end_of_epoch(5, -1)):
        with pytest.raises(Retry):
            read_log_end(answer, LEADER)


@pytest.mark.parametrize("error_code", [3, 5, 6, 74, 75, 78, 100, 103])
def test_errors_a_new_leader_may_fix_are_retried(error_code: int) -> None:
    with pytest.raises(Retry):
        read_log_end(end_of_epoch(-1, -1, error_code), LEADER)


@pytest.mark.parametrize("error_code", [-1, 29, 42])
def test_what_waiting_does_not_change_is_an_answer(error_code: int) -> None:
    with pytest.raises(UpstreamUnavailable) as caught:
        read_log_end(end_of_epoch(-1, -1, error_code), LEADER)
    assert caught.value.error_code == error_code


def test_batch_at_offset_is_extracted_or_reported_compacted() -> None:
    first, second = at(10, b"a", b"b", b"c"), at(13, b"d")

    assert _batch_containing(Offset(12), first + second) == Found(first)
    assert _batch_containing(Offset(9), first) == CompactedAway(Offset(10))
    for offset, records in ((13, first + second), (10, first[:-1])):
        with pytest.raises(Retry):
            _batch_containing(Offset(offset), records)


def test_old_message_format_is_unreadable() -> None:
    old = bytearray(at(0, b"a"))
    old[16] = 1

    with pytest.raises(UpstreamUnavailable, match="magic 1"):
        _batch_containing(Offset(0), bytes(old))
