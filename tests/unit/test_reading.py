"""Batches that take long to read are read outside the event loop; their connection waits meanwhile."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import Error
from fencepost_proxy.session import messages as m
from fencepost_proxy.session.reading import HERE_BYTES_MAX, HERE_STEPS_MAX, Readings
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import RECORDS_MAX, BatchScan, HeaderNames
from tests.support import bytewise
from tests.support.batches import expecting
from tests.unit.test_counted import Doors, ask
from tests.unit.test_session import Talk, produce, read, request

WHERE = TopicPartition("guarded", 0)
#: Deflate does not shrink them below what is read here.
LARGE = expecting(7, b"v" * 3000)


@pytest.fixture
def talk() -> Talk:
    return Talk(read_here_bytes_max=1000)


def test_large_batch_is_offered_once_it_was_read(talk: Talk) -> None:
    talk.client(produce(("guarded", 0, LARGE)))
    talk.read_elsewhere()
    assert talk.offered().append.expected_base_offset == 7


def test_nothing_behind_a_batch_that_is_read_overtakes_it(talk: Talk) -> None:
    talk.client(produce(("guarded", 0, LARGE)) + request(12, 4, 2))
    wanted = talk.next(m.ReadBatches)
    assert talk.commands == [m.ReadClient(False)]
    talk.commands.clear()
    wanted.read()
    talk.tell(m.BatchesRead(wanted.token))
    assert talk.offered().append.expected_base_offset == 7
    talk.silent()


def test_client_that_leaves_meanwhile_leaves_nothing_behind(talk: Talk) -> None:
    free = talk.around.free_bytes
    talk.client(produce(("guarded", 0, LARGE)))
    wanted = talk.next(m.ReadBatches)
    talk.tell(m.ClientLost())
    talk.tell(m.BatchesRead(wanted.token))
    assert [type(each) for each in talk.commands] == [m.CloseUpstream]
    assert talk.around.free_bytes == free
    assert talk.session.finished


def test_process_that_drains_waits_for_what_is_read(talk: Talk) -> None:
    talk.client(produce(("guarded", 0, LARGE)))
    wanted = talk.next(m.ReadBatches)
    talk.tell(m.Leave(talk.now + 10))
    talk.now += 1
    talk.tell(m.Tick())
    assert not any(isinstance(each, m.CloseClient) for each in talk.commands)
    talk.commands.clear()
    wanted.read()
    talk.tell(m.BatchesRead(wanted.token))
    talk.offered()


def test_policy_that_changes_meanwhile_is_told_to_try_again() -> None:
    readings = Readings(HeaderNames(), 1 << 20, here_bytes_max=1000)
    readings.want(WHERE, LARGE, TopicPolicy(), None)
    assert not readings.here()
    readings.elsewhere()
    assert isinstance(readings.of(WHERE, LARGE, TopicPolicy()), BatchScan)
    changed = readings.of(WHERE, LARGE, TopicPolicy(carrier_base=True))
    assert isinstance(changed, Refusal)
    assert changed.error_code == Error.NOT_LEADER_OR_FOLLOWER


def test_many_keys_are_placed_elsewhere() -> None:
    talk = Doors(read_here_bytes_max=1000)
    talk.around.settling.add("hashed")
    talk.client(ask(("hashed", 2, bytewise.batch([bytewise.record(i, key=b"k%d" % i) for i in range(200)]))))
    talk.read_elsewhere()
    assert talk.refusals() == ["misplaced_key"]


# --- work is bounded --------------------------------------------------------------------------------------------------

_TINY = bytes([12, 0, 4, 0, 1, 1, 0])
_SAYING = bytewise.record(0, [(b"expected-offset", b"7")])
_HEADERS = bytewise.framed(b"\0\0\0\1\1" + bytewise.varint(400_000) + b"\0\1" * 400_000)

BOMBS = {
    "tiny records": ([_TINY * 900_000], 900_000),
    "tiny records before a header": ([_TINY * 900_000, _SAYING], 900_001),
    "one record of headers": ([_HEADERS, b"expected-offset"], 1),
    "more records than are taken": ([_TINY * 1_500_000], 1_500_000),
    "a large value": ([bytewise.record(0, [(b"expected-offset", b"7")], value=bytes(4_000_000))], 1),
}


def _lines_of(call: Any) -> int:
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("codec", bytewise.CODECS)
@pytest.mark.parametrize("bomb", BOMBS)
def test_work_done_here_is_bounded_for_any_batch(bomb: str, codec: str) -> None:
    records, count = BOMBS[bomb]
    batch = bytewise.batch(records, count=count, codec=codec)
    readings = Readings(HeaderNames(), 100 << 20)
    readings.want(WHERE, batch, TopicPolicy(carrier_base=True), None)
    assert _lines_of(readings.here) < 20 * HERE_STEPS_MAX


def test_all_batches_of_a_request_share_the_work_done_here() -> None:
    readings = Readings(HeaderNames(), 100 << 20)
    for partition in range(3):
        readings.want(TopicPartition("t", partition), expecting(7, bytes(HERE_BYTES_MAX // 2)), TopicPolicy(), None)
    assert not readings.here()


def test_more_records_than_are_taken_are_refused() -> None:
    batch = bytewise.batch([_TINY], count=RECORDS_MAX + 1)
    talk = Talk().may_write("guarded")
    talk.client(produce(("guarded", 0, batch)))
    talk.read_elsewhere()
    talk.counted()
    error_code, _, message = read(talk.answer())["guarded", 0]
    assert error_code == Error.MESSAGE_TOO_LARGE
    assert f"the limit is {RECORDS_MAX}" in (message or "")
