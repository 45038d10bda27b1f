"""Limits that no other test covers, each reached. Limits of sockets and processes:
`tests/integration/test_bad_input.py` and
`tests/protocol`."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from fencepost_policies.append import Check, Refusal
from fencepost_proxy.config import Limits, ProxyConfig
from fencepost_proxy.errors import ClientProtocolError, LimitError, UpstreamProtocolError
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.server import Proxy
from fencepost_proxy.session import dispatcher as dispatcher_module
from fencepost_proxy.session.dispatcher import Dispatcher
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import Address, TopicPartition
from fencepost_proxy.wire.apis import ADD_PARTITIONS_TO_TXN, DESCRIBE_CONFIGS
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.control import ITEMS_MAX, decode_request
from fencepost_proxy.wire.throttle import HEAD_BYTES
from tests.support.batches import batch, expecting
from tests.support.pending import pending_append
from tests.unit.test_control_codec import uvarint
from tests.unit.test_sequencer import TP, Talk, confirmed
from tests.unit.test_session import HEARTBEAT, ServicesStandIn, Unchanged, produce, request
from tests.unit.test_session import Talk as SessionTalk

MESSAGE_TOO_LARGE, TIMED_OUT = 10, 7


@contextmanager
def at_most(byte_count: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < byte_count
    finally:
        tracemalloc.stop()


# --- the process's own, as its parts get them -------------------------------------------------------------------------


def test_configured_limits_apply_to_sequencers_and_sessions() -> None:
    limits = replace(
        Limits(),
        sequencer_queue_max=7,
        decompressed_bytes_max=70_000,
        frame_bytes_max=7_000,
        buffered_bytes_max=14_000,
        in_flight_requests_max=77,
        sequencer_wait_max_seconds=7.5,
        request_timeout_seconds=17.0,
    )
    proxy = Proxy(ProxyConfig((Address("kafka", 9092),), limits=limits))
    sequencers, services = proxy._dispatcher._limits, proxy._services
    assert (sequencers.queue_max, sequencers.decompressed_bytes_max) == (7, 70_000)
    assert (services.frame_bytes_max, services.in_flight_requests_max, services.decompressed_bytes_max) == (
        7_000,
        77,
        70_000,
    )
    assert (services.sequencer_wait_max_seconds, services.request_timeout_seconds) == (7.5, 17.0)
    assert services.reserve(14_000)
    assert not services.reserve(1)


# --- messages ---------------------------------------------------------------------------------------------------------


def _describe_configs(count: int) -> bytes:
    """v3: resources of a type, an empty name and no keys."""
    return struct.pack(">i", count) + b"\2\0\0\0\0\0\0" * count + b"\0\0"


def test_request_above_element_limit_is_refused_before_allocation() -> None:
    """100 MB of the smallest elements would take gigabytes, and a minute of the event loop."""
    assert len(decode_request(DESCRIBE_CONFIGS, 3, _describe_configs(ITEMS_MAX)).resources) == ITEMS_MAX
    body = _describe_configs(ITEMS_MAX + 1)
    with at_most(2 * len(body)), pytest.raises(LimitError, match=f"array elements than the limit .{ITEMS_MAX}."):
        decode_request(DESCRIBE_CONFIGS, 3, body)


def test_elements_within_elements_count_too() -> None:
    """v3: one resource of many keys, and many resources of one key."""
    keys = struct.pack(">i", ITEMS_MAX) + b"\0\0" * ITEMS_MAX
    with pytest.raises(LimitError):
        decode_request(DESCRIBE_CONFIGS, 3, struct.pack(">i", 1) + b"\2\0\0" + keys + b"\0\0")
    count = ITEMS_MAX // 2 + 1
    with pytest.raises(LimitError):
        decode_request(DESCRIBE_CONFIGS, 3, struct.pack(">i", count) + b"\2\0\0\0\0\0\1\0\0" * count + b"\0\0")


def test_numbers_count_as_elements() -> None:
    """AddPartitionsToTxn v3: two strings, a producer id and epoch, one topic of so many partitions."""
    body = b"\1\0\0\0\0\0\0\0\0\0\0\2\2t" + uvarint(ITEMS_MAX + 1) + b"\0\0\0\0" * ITEMS_MAX + b"\0\0"
    with pytest.raises(LimitError):
        decode_request(ADD_PARTITIONS_TO_TXN, 3, body)


def test_decompression_beyond_the_limit_is_refused_with_error() -> None:
    bomb = batch(b"\0" * 20_000, compression=1)
    assert len(bomb) < 1_000

    def pending(bytes_max: int) -> g.PendingAppend | Refusal:
        return pending_append(
            TP, bomb, TopicPolicy(Check.ON), frozenset({7000}), now=0.0, wait=1.0, bytes_max=bytes_max
        )

    refusal = pending(10_000)
    assert isinstance(refusal, Refusal)
    assert (refusal.error_code, refusal.reason) == (MESSAGE_TOO_LARGE, "too_large")
    assert "TOO_LARGE topic=orders partition=3" in refusal.message
    assert isinstance(pending(30_000), g.PendingAppend)


# --- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("timeout_ms", "wait"), [(30_000, 5.0), (3_000, 1.0), (0, 0.0)])
def test_append_deadline_is_limit_or_third_of_timeout(timeout_ms: int, wait: float) -> None:
    talk = SessionTalk()
    pending = talk.submits(timeout_ms=timeout_ms)
    assert pending.placement.deadline == pytest.approx(talk.now + wait)


def test_frame_above_limit_closes_connection_before_buffering() -> None:
    talk = SessionTalk(frame_bytes_max=1_000)
    talk.client(struct.pack(">ihhi", 1_001, 3, 9, 1))
    closed = talk.next(m.CloseClient)
    assert closed.fault is LimitError
    assert "frame_bytes_max=1000" in closed.reason
    talk.silent()


def test_buffered_response_above_limit_closes_connection() -> None:
    """Relayed responses are not buffered and have no limit."""
    talk = SessionTalk(frame_bytes_max=1_000)
    talk.sends(correlation=7)
    talk.kafka(struct.pack(">ii", 2_000_000_000, 7))
    (closed,) = [each for each in talk.commands if isinstance(each, m.CloseClient)]
    assert closed.fault is UpstreamProtocolError
    assert "2000000000 bytes to Produce" in closed.reason

    talk = SessionTalk(frame_bytes_max=1_000)
    talk.client(request(HEARTBEAT, 3, 7))
    talk.upstream()
    talk.kafka(struct.pack(">ii", 2_000_000_000, 7) + bytes(HEAD_BYTES))
    assert len(talk.answer()) == 8 + HEAD_BYTES


def test_broken_request_releases_shared_memory() -> None:
    """Of a request that cannot be answered, and of requests that cannot be read."""
    for broken in (
        produce(("checked-a", 0, expecting(5, b"x")), acks=0),
        produce(("checked-a", 0, batch(b"x")), ("checked-a", 0, batch(b"x"))),
        produce(("checked-a", 0, batch(b"x")))[:-1] + b"\7",
    ):
        talk = SessionTalk()
        free = talk.services.free_bytes
        talk.client(broken)
        assert talk.next(m.CloseClient).fault is ClientProtocolError
        talk.report(m.ClientLost())
        talk.report(m.UpstreamLost("closed"))
        assert talk.services.free_bytes == free


# --- sequencers -------------------------------------------------------------------------------------------------------


def _limited(**limits: Any) -> Talk:
    return confirmed(limits=g.SequencerLimits(**limits))


def test_pipelined_appends_respect_the_in_flight_limit() -> None:
    talk = _limited(in_flight_max=2)
    first, _ = (talk.sends(expecting(at, b"x")) for at in (10, 11))
    third = talk.submit(expecting(12, b"x"))
    talk.silent()  # it waits, though it could go
    talk.acknowledged(first, 10)
    assert talk.admitted(third) is not None


def test_unresolvable_append_is_finally_reported_unknown() -> None:
    talk = _limited(resolve_seconds=3.0, read_retry_seconds=0.5)
    pending = talk.loses(expecting(10, b"x"))
    probes = 0
    gave_up = talk.now + 3.0
    while isinstance(talk.effects[0], g.ReadBatch):
        talk.next(g.ReadBatch)
        probes += 1
        talk.report(g.BatchRead(pending, g.Unreadable("the broker does not answer")))
        if talk.effects:
            break
        assert talk.now <= gave_up
        talk.now += 0.5
        talk.report(g.Tick())
    assert talk.answered(pending).error_code == TIMED_OUT
    assert talk.now >= gave_up
    assert probes == 7  # at once, and every half second


def test_sequencer_remembers_bounded_batches_and_producers() -> None:
    talk = _limited(remembered_batches_max=3, remembered_producers_max=2)
    sent = [expecting(at, b"%d" % at, producer=(100 + at, 0, 0)) for at in range(10, 16)]
    for at, records in enumerate(sent, 10):
        talk.acknowledged(talk.submit(records), at)
    talk.silent()
    assert len(talk.sequencer.state.retries.appended_batch) == 3
    assert len(talk.sequencer.state.retries.fenced) == 2
    # The newest are known at once; an older one has to be looked for in the log.
    talk.accepted(talk.submit(sent[-1], connection=2), 15)
    talk.submit(sent[0], connection=2)
    assert talk.effects
    assert not isinstance(talk.effects[0], g.Answer)


def test_idle_sequencers_are_dropped_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients choose topic names that match a pattern."""
    monkeypatch.setattr(dispatcher_module, "_IDLE_SEQUENCERS_MAX", 4)
    services = ServicesStandIn()
    dispatcher = Dispatcher(services, Unchanged(), g.SequencerLimits(), HeaderNames())  # type: ignore[arg-type]
    services.sequencers = dispatcher
    for number in range(1, 12):
        dispatcher.open(number, "proxy.local", 100.0)
        data = produce((f"checked-{number}", 0, batch(b"x")))
        dispatcher.session_event(number, m.ClientBytes(memoryview(data)), 100.0)
        if number != 3:  # an append that waits keeps its sequencer
            dispatcher.session_event(number, m.ClientLost(), 100.0)
        assert len(dispatcher.sequencers) <= 4
    assert TopicPartition("checked-3", 0) in dispatcher.sequencers


def test_sequencer_with_a_queued_call_is_kept_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. An append is submitted to an idle sequencer. 2. Before that is processed, another partition needs a sequencer.
    3. If the first one were dropped, a new one would get the answer, and the append would never end.
    """
    monkeypatch.setattr(dispatcher_module, "_IDLE_SEQUENCERS_MAX", 2)
    dispatcher = Dispatcher(ServicesStandIn(), Unchanged(), g.SequencerLimits(), HeaderNames())  # type: ignore[arg-type]
    partitions = [TopicPartition("checked-a", number) for number in range(4)]
    for partition in partitions:
        dispatcher.join(partition, "app", 1)
    assert list(dispatcher.sequencers) == partitions
