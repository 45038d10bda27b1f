"""A process that is to end, as each of its connections sees it: dialogues with `Drain`."""

from __future__ import annotations

from fencepost_proxy.sequencer import events as g
from fencepost_proxy.session import messages as m
from fencepost_proxy.session.barriers import READ_SECONDS
from fencepost_proxy.wire.apis import FETCH, PRODUCE
from tests.support.batches import expecting
from tests.unit.test_session import (
    HEARTBEAT,
    NOT_LEADER,
    TIMED_OUT,
    Talk,
    produce,
    produced,
    read,
    request,
    response,
)

BOUND_SECONDS = 10.0


def leave(talk: Talk, until: float) -> None:
    talk.report(m.Drain(until))


def hangs_up(talk: Talk) -> None:
    close = talk.next(m.CloseClient)
    assert close.hang_up, "closed with a request unread, it would be reset"
    assert close.fault is None
    talk.silent()


def test_idle_connection_closes_after_the_read_time() -> None:
    talk = Talk()
    until = talk.now + BOUND_SECONDS
    leave(talk, until)
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    talk.silent()
    talk.now += READ_SECONDS
    leave(talk, until)
    hangs_up(talk)


def test_started_request_completes_and_later_ones_are_unread() -> None:
    """A paused client in the middle of its request would be cut off there, at the bound."""
    talk = Talk()
    until = talk.now + BOUND_SECONDS
    query, another = request(HEARTBEAT, 4, 1, b"x" * 100), request(HEARTBEAT, 4, 2)
    talk.client(query[:50])
    assert talk.upstream() == query[:50]
    leave(talk, until)
    talk.silent()  # it is read on
    talk.client(query[50:] + another)
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    assert talk.upstream() == query[50:], "what has not begun is not begun"
    talk.now += 1.0
    leave(talk, until)
    talk.silent()  # its answer is waited for
    talk.kafka(response(1, b"yes"))
    assert talk.answer() == response(1, b"yes")
    talk.now += READ_SECONDS
    leave(talk, until)
    hangs_up(talk)


def test_started_buffered_request_completes() -> None:
    talk = Talk()
    until = talk.now + BOUND_SECONDS
    query = produce(("guarded-a", 0, expecting(5, b"x")))
    talk.client(query[:-3])
    leave(talk, until)
    talk.now += 1.0
    leave(talk, until)
    talk.silent()
    talk.client(query[-3:])
    pending = talk.submitted()
    talk.next(m.ReadClient)
    talk.grant(pending)
    talk.sent(pending)
    talk.upstream()
    talk.kafka(produced(("guarded-a", 0, 0, 5)))
    assert isinstance(talk.next(m.ToSequencer).event, g.Answered)


def test_unanswered_fetch_keeps_connection_until_the_bound() -> None:
    talk = Talk()
    until = talk.now + BOUND_SECONDS
    fetch = request(FETCH, 11, 1, b"topic")
    talk.client(fetch)
    assert talk.upstream() == fetch
    leave(talk, until)
    talk.next(m.ReadClient)
    talk.now = until - 2 * READ_SECONDS
    leave(talk, until)
    talk.silent()
    assert talk.session.unanswered == [FETCH]
    talk.now = until
    leave(talk, until)
    hangs_up(talk)


def test_pending_append_gets_retriable_error_before_the_bound() -> None:
    talk = Talk()
    until = talk.now + BOUND_SECONDS
    talk.client(produce(("guarded-a", 0, expecting(5, b"x")), timeout_ms=60_000))
    pending = talk.submitted()
    leave(talk, until)
    talk.next(m.ReadClient)
    talk.silent()
    talk.now = until - READ_SECONDS
    leave(talk, until)
    assert talk.next(m.ToSequencer) == m.ToSequencer(pending, g.Canceled(pending))
    talk.counted()
    code, offset, message = read(talk.answer())[("guarded-a", 0)]
    assert (code, offset) == (NOT_LEADER, -1)
    assert "shutting down" in (message or "")
    talk.silent()
    talk.now = until
    leave(talk, until)
    hangs_up(talk)
    assert talk.services.free_bytes == 1 << 20


def test_unanswered_append_is_unknown_and_resolution_continues() -> None:
    talk = Talk()
    until = talk.now + BOUND_SECONDS
    talk.client(produce(("guarded-a", 0, expecting(5, b"x")), timeout_ms=60_000))
    pending = talk.submitted()
    talk.grant(pending)
    talk.sent(pending)
    talk.upstream()
    leave(talk, until)
    talk.next(m.ReadClient)
    assert talk.session.unanswered == [PRODUCE]
    talk.now = until - READ_SECONDS
    leave(talk, until)
    assert talk.next(m.ToSequencer) == m.ToSequencer(pending, g.Lost(pending))
    talk.counted()
    assert read(talk.answer())[("guarded-a", 0)][0] == TIMED_OUT
    talk.now = until
    leave(talk, until)
    hangs_up(talk)


def test_a_bound_that_is_brought_forward_counts() -> None:
    """A second signal."""
    talk = Talk()
    talk.client(request(FETCH, 11, 1, b"topic"))
    talk.upstream()
    leave(talk, talk.now + BOUND_SECONDS)
    talk.next(m.ReadClient)
    leave(talk, talk.now)
    hangs_up(talk)
