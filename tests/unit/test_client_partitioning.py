"""The library's ordered producers, without a client: the partitions of keys, and what an expansion changes."""

from __future__ import annotations

import random

import pytest

from fencepost import jump_hash
from fencepost._partitioning import OrderedSends, Send, TopicSends, count_changed, crc32, murmur2, refuse_configs
from fencepost_policies.partitioners import Partitioner, partition_for

KEYS = [random.Random(253).randbytes(n % 40) for n in range(400)]


@pytest.fixture
def story() -> Story:
    return Story()


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_keys_are_placed_where_proxy_expects(count: int) -> None:
    """Whose hashes are pinned against the clients' own (tests/unit/test_partitioners.py)."""
    for key in KEYS:
        assert murmur2(key, count) == partition_for(Partitioner.MURMUR2, key, count)
        if key:
            assert crc32(key, count) == partition_for(Partitioner.CRC32, key, count)


def test_jump_hash_moves_keys_to_new_partitions_only() -> None:
    moved = 0
    for key in KEYS:
        for count, larger in ((1, 2), (2, 3), (3, 8), (8, 9), (9, 31)):
            before, after = jump_hash(key, count), jump_hash(key, larger)
            assert 0 <= before < count
            assert after == before or count <= after < larger
            moved += after != before
    assert moved > len(KEYS)


def test_by_jump_hash_keys_are_spread() -> None:
    counts = [0] * 8
    for number in range(8000):
        counts[jump_hash(b"%d" % number, 8)] += 1
    assert min(counts) > 850


class Story:
    """Records 1, 2, … of a topic, with keys that are on partition `key % count`."""

    def __init__(self, count: int = 2) -> None:
        self.sends = TopicSends(lambda key, count: int(key) % count, count)
        self.records: list[Send] = []

    def submit(self, key: int, *, partition: int | None = None, deadline: float = 100.0) -> bool:
        send = Send(len(self.records), "t", b"%d" % key, partition, deadline, None)
        self.records.append(send)
        return self.sends.submit(send)

    def next(self) -> tuple[int, int | None, int] | None:
        """(number, partition, count)"""
        send = self.sends.next()
        return None if send is None else (send.number, send.chosen_partition, send.partition_count)


def test_records_are_sent_immediately_without_refusals(story: Story) -> None:
    assert story.submit(3)
    assert (story.records[0].chosen_partition, story.records[0].partition_count) == (1, 2)
    story.sends.ended(story.records[0])
    assert len(story.sends) == 0


def test_refused_records_are_resent_in_order_first(story: Story) -> None:
    for key in (2, 3, 2, 3):
        assert story.submit(key)
    first, second, third, fourth = story.records
    story.sends.ended(first)  # appended before the expansion
    story.sends.refuse(third)
    assert not story.submit(2)  # not sent: it would overtake the third
    assert not story.sends.drained
    story.sends.refuse(second)
    assert story.next() is None
    story.sends.refuse(fourth, "INVALID_PARTITION_COUNT topic=t partition=1 expected=2 actual=4")
    assert story.sends.drained

    assert story.sends.update_count(3, 1.0) == []  # the metadata are older than the refusal
    assert story.next() is None
    assert story.sends.update_count(4, 2.0) == []
    assert [story.next() for _ in range(5)] == [(1, 3, 4), (2, 2, 4), (3, 3, 4), (4, 2, 4), None]
    assert story.submit(2)


def test_refusal_without_message_waits_for_larger_count(story: Story) -> None:
    story.submit(2)
    story.sends.refuse(story.records[0])
    story.sends.update_count(2, 1.0)
    assert story.next() is None
    story.sends.update_count(3, 1.0)
    assert story.next() == (0, 2, 3)


def test_second_expansion_during_resend_pauses_again(story: Story) -> None:
    for key in (2, 3):
        story.submit(key)
    for record in story.records:
        story.sends.refuse(record)
    story.submit(5)
    story.sends.update_count(4, 1.0)
    assert story.next() == (0, 2, 4)
    story.sends.refuse(story.records[0])
    assert story.next() is None
    story.sends.update_count(8, 2.0)
    assert [story.next() for _ in range(3)] == [(0, 2, 8), (1, 3, 8), (2, 5, 8)]


def test_record_with_explicit_partition_keeps_it(story: Story) -> None:
    story.submit(2, partition=1)
    story.sends.refuse(story.records[0])
    story.sends.update_count(4, 1.0)
    assert story.next() == (0, 1, 4)


def test_timed_out_record_fails_and_others_continue(story: Story) -> None:
    story.submit(2, deadline=5.0)
    story.sends.refuse(story.records[0])
    story.submit(2, deadline=50.0)
    assert story.sends.update_count(2, 4.0) == []
    assert story.sends.update_count(2, 5.0) == [story.records[0]]
    assert story.next() == (1, 0, 2)  # it is refused when it is sent
    error = count_changed(story.records[0], 2, "tried for 5 s")
    assert str(error) == "t-0: not appended: partitioned for 2 partitions, the topic has 2; tried for 5 s"


def test_unsent_record_is_next_again(story: Story) -> None:
    story.submit(2)
    story.sends.refuse(story.records[0])
    story.sends.update_count(4, 1.0)
    assert story.next() == (0, 2, 4)
    story.sends.put_back(story.records[0])
    assert not story.submit(3)
    assert [story.next(), story.next()] == [(0, 2, 4), (1, 3, 4)]


def test_closed_producer_gives_up_buffered_records(story: Story) -> None:
    for _ in range(2):
        story.submit(2)
    story.sends.refuse(story.records[0])
    story.submit(3)
    assert story.sends.give_up() == [story.records[0], story.records[2]]
    assert len(story.sends) == 1  # in flight still


def test_the_header_is_the_producers_to_set() -> None:
    sends = OrderedSends(murmur2, timeout_seconds=60, buffered_max=1)
    send = sends.new("t", b"k", b"v", sends.checked([("a", b"b")]), None, None, None)
    assert sends.add("t", 8).submit(send)
    assert sends.headers(send) == [("a", b"b"), ("fencepost-partition-count", b"8@t")]
    sends.cluster_id = "C"
    assert sends.headers(send)[1:] == [("fencepost-partition-count", b"8@t@C")]
    with pytest.raises(ValueError, match="remove it"):
        sends.checked([("fencepost-partition-count", b"8")])


def test_what_cannot_be_kept_in_order() -> None:
    refuse_configs(acks="all", idempotent=True, transactional=False)
    with pytest.raises(ValueError, match="acks=0"):
        refuse_configs(acks=0, idempotent=False, transactional=False)
    with pytest.raises(ValueError, match="aborted"):
        refuse_configs(acks="all", idempotent=False, transactional=True)
    with pytest.raises(ValueError, match="dead"):
        refuse_configs(acks="all", idempotent=True, transactional=False, idempotence="dead")


def test_record_refused_for_too_long_fails_and_others_are_given_up() -> None:
    sends = OrderedSends(murmur2, timeout_seconds=0, buffered_max=1)
    topic = sends.add("t", 2)
    first, second = (sends.new("t", b"key", b"value", [("a", b"b")], None, None, None) for _ in range(2))
    assert topic.submit(first)
    assert sends.headers(first) == [("a", b"b"), ("fencepost-partition-count", b"2@t")]
    topic.refuse(first)
    assert sends.drained == ["t"]
    assert not topic.submit(second)
    assert sends.is_full("t")
    expired = sends.update_count("t", 0)
    assert [send.number for send, _ in expired] == [0, 1]
    assert str(expired[0][1]) == (
        "t-1: not appended: partitioned for 2 partitions, the topic has a different number; tried for 0 s"
    )
    assert len(sends) == 0


def test_closed_producer_gives_up_its_unsent_records() -> None:
    sends = OrderedSends(murmur2, timeout_seconds=60, buffered_max=10)
    topic = sends.add("t", 2)
    send = sends.new("t", b"key", b"value", [], 1, None, None)
    topic.submit(send)
    topic.refuse(send)
    assert sends.update_count("t", 2) == []
    [(given_up, error)] = sends.give_up()
    assert given_up is send
    assert "the producer was closed" in str(error)
    assert sends.drained == []
