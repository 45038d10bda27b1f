"""Batches that take long to read are read outside the event loop; their connection waits."""

from __future__ import annotations

from typing import Any

import pytest

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import Error
from fencepost_proxy.session.batches.reading import (
    HERE_BATCHES_MAX,
    HERE_BYTES_MAX,
    HERE_STEPS_MAX,
    PARTITIONS_MAX,
    TOPICS_AT_ONCE,
    Readings,
)
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch_scan import BatchScan, HeaderNames
from fencepost_proxy.wire.records import RECORDS_MAX
from tests.support import bytewise
from tests.support.batches import expecting
from tests.support.line_counts import lines_of
from tests.support.sequencer_calls import Call
from tests.unit.test_partition_counts import Barriers
from tests.unit.test_session import Talk, produce, query, read, request

WHERE = TopicPartition("checked", 0)
#: Deflate does not shrink them below what is read here.
LARGE = expecting(7, b"v" * 3000)


@pytest.fixture
def talk() -> Talk:
    return Talk(read_here_bytes_max=1000)


def test_request_after_large_batch_does_not_overtake_it(talk: Talk) -> None:
    talk.client(produce(("checked", 0, LARGE)) + request(12, 4, 2))
    assert talk.commands.pop() == m.ReadClient(False)
    talk.read_elsewhere()
    assert talk.submitted().append.expected_base_offset == 7
    talk.silent()


def test_client_lost_during_reading_frees_everything(talk: Talk) -> None:
    free = talk.services.free_bytes
    talk.client(produce(("checked", 0, LARGE)))
    requested = talk.next(m.ReadBatches)
    talk.report(m.ClientLost())
    talk.report(m.BatchesRead(requested.token))
    assert [type(each) for each in talk.commands] == [m.CloseUpstream]
    assert talk.services.free_bytes == free
    assert talk.session.finished


def test_process_that_drains_waits_for_what_is_read(talk: Talk) -> None:
    talk.client(produce(("checked", 0, LARGE)))
    requested = talk.next(m.ReadBatches)
    talk.report(m.Drain(talk.now + 10))
    talk.tick(1)
    assert not any(isinstance(each, m.CloseClient) for each in talk.commands)
    talk.commands.clear()
    requested.read()
    talk.report(m.BatchesRead(requested.token))
    talk.submitted()


def test_many_unreadable_batches_are_read_elsewhere(talk: Talk) -> None:
    talk.client(_many("checked", partitions=HERE_BATCHES_MAX + 1))
    talk.next(m.ReadBatches)


def test_policy_changed_during_reading_gets_retriable_error() -> None:
    readings = Readings(HeaderNames(), 1 << 20, here_bytes_max=1000)
    readings.add(WHERE, LARGE, TopicPolicy(), None)
    assert not readings.here()
    readings.elsewhere()
    assert isinstance(readings.of(WHERE, LARGE, TopicPolicy()), BatchScan)
    changed = readings.of(WHERE, LARGE, TopicPolicy(source_is_base=True))
    assert isinstance(changed, Refusal)
    assert changed.error_code == Error.NOT_LEADER_OR_FOLLOWER


def test_many_keys_are_placed_elsewhere() -> None:
    talk = Barriers(read_here_bytes_max=1000)
    talk.services.just_expanded.add("hashed")
    talk.client(query(("hashed", 2, bytewise.batch([bytewise.record(i, key=b"k%d" % i) for i in range(200)]))))
    talk.read_elsewhere()
    assert talk.refusals() == ["misplaced_key"]


# --- requests with many partitions ------------------------------------------------------------------------------------

_NULL_RECORDS = memoryview(b"")


def _many(*topics: str, partitions: int = 1, **more: Any) -> bytes:
    return produce(*((topic, number, _NULL_RECORDS) for topic in topics for number in range(partitions)), **more)


def _closed(talk: Talk) -> str:
    (closed,) = [each for each in talk.commands if isinstance(each, m.CloseClient)]
    assert not any(isinstance(each, m.ToUpstream | Call | m.ToClient) for each in talk.commands)
    return closed.reason


def test_many_relayed_partitions_are_forwarded_in_order(talk: Talk) -> None:
    queried = _many("unchecked", "other", partitions=PARTITIONS_MAX)
    free = talk.services.free_bytes
    talk.client(queried + produce(("checked", 0, expecting(7, b"v")), correlation=2))
    talk.read_elsewhere()
    talk.commands = [each for each in talk.commands if not isinstance(each, m.ReadClient)]
    assert talk.submitted().append.expected_base_offset == 7
    assert talk.upstream() == queried
    assert talk.services.free_bytes <= free


def test_many_partitions_are_parsed_outside_the_event_loop(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    queried = _many("unchecked", "other", partitions=65_536 // 2)
    talk.services.free_bytes = len(queried)
    assert lines_of(lambda: talk.client(queried)) < 2_000
    requested = talk.next(m.ReadBatches)
    requested.read()
    assert lines_of(lambda: talk.report(m.BatchesRead(requested.token))) < 2_000
    assert talk.upstream() == queried


def test_many_topics_are_looked_up_in_several_goes(talk: Talk) -> None:
    queried = _many(*(f"unchecked-{number}" for number in range(PARTITIONS_MAX + 1)))
    talk.client(queried)
    for _ in range(1 + PARTITIONS_MAX // TOPICS_AT_ONCE):
        assert not any(isinstance(each, m.ToUpstream) for each in talk.commands)
        talk.read_elsewhere()
    assert talk.upstream() == queried


@pytest.mark.parametrize("topics", [("checked",), ("unchecked", "checked"), ("unchecked", "__state")])
def test_many_partitions_are_refused_on_a_checked_topic(talk: Talk, topics: tuple[str, ...]) -> None:
    talk.client(_many(*topics, partitions=PARTITIONS_MAX + 1))
    talk.read_elsewhere()
    assert f"more than {PARTITIONS_MAX} topics or partitions" in _closed(talk)


def test_partitions_at_the_limit_are_not_refused(talk: Talk) -> None:
    talk.client(_many("checked", partitions=PARTITIONS_MAX))
    talk.read_elsewhere()
    assert not any(isinstance(each, m.ReadBatches | m.CloseClient) for each in talk.commands)


def test_unreadable_request_of_many_partitions_closes_connection(talk: Talk) -> None:
    queried = bytearray(_many("unchecked", "other", partitions=PARTITIONS_MAX))
    queried[-4] = 0x40  # the length of the last one's records
    talk.client(bytes(queried))
    talk.read_elsewhere()
    assert "malformed" in _closed(talk)


def test_many_partitions_are_refused_while_configs_unknown(talk: Talk) -> None:
    talk.services.is_fresh = False
    talk.client(_many("unchecked", "other", partitions=PARTITIONS_MAX))
    talk.read_elsewhere()
    assert "not (re)read yet" in _closed(talk)


# --- work is bounded --------------------------------------------------------------------------------------------------

_TINY = bytes([12, 0, 4, 0, 1, 1, 0])
_SAYING = bytewise.record(0, [(b"fencepost-expected-offset", b"7")])
_HEADERS = bytewise.framed(b"\0\0\0\1\1" + bytewise.varint(400_000) + b"\0\1" * 400_000)

BOMBS = {
    "tiny records": ([_TINY * 900_000], 900_000),
    "tiny records before a header": ([_TINY * 900_000, _SAYING], 900_001),
    "one record of headers": ([_HEADERS, b"fencepost-expected-offset"], 1),
    "more records than are taken": ([_TINY * 1_500_000], 1_500_000),
    "a large value": ([bytewise.record(0, [(b"fencepost-expected-offset", b"7")], value=bytes(4_000_000))], 1),
}


@pytest.mark.parametrize("codec", bytewise.CODECS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_work_done_here_is_bounded_for_any_batch(bomb: str, codec: str) -> None:
    records, count = BOMBS[bomb]
    batch = bytewise.batch(records, count=count, codec=codec)
    readings = Readings(HeaderNames(), 100 << 20)
    readings.add(WHERE, batch, TopicPolicy(source_is_base=True), None)
    assert lines_of(readings.here) < 20 * HERE_STEPS_MAX


def test_batches_of_a_request_share_the_local_limit() -> None:
    readings = Readings(HeaderNames(), 100 << 20)
    for partition in range(3):
        readings.add(TopicPartition("t", partition), expecting(7, bytes(HERE_BYTES_MAX // 2)), TopicPolicy(), None)
    assert not readings.here()


def test_more_records_than_are_taken_are_refused() -> None:
    batch = bytewise.batch([_TINY], count=RECORDS_MAX + 1)
    talk = Talk().may_write("checked")
    talk.client(produce(("checked", 0, batch)))
    talk.read_elsewhere()
    talk.metric()
    error_code, _, message = read(talk.answer())["checked", 0]
    assert error_code == Error.MESSAGE_TOO_LARGE
    assert f"the limit of {RECORDS_MAX}" in (message or "")
