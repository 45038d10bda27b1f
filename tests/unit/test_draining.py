"""A draining process, in dialogues with `Drain`."""

from __future__ import annotations

import pytest

from fencepost_proxy.session.connection.draining import READ_SECONDS
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.wire.apis import FETCH, PRODUCE
from tests.support.batches import expecting
from tests.support.sequencer_calls import Call
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


class Draining(Talk):
    """`until` – the time at which the connection is closed in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.until = self.now + BOUND_SECONDS

    def drains(self, *, at: float | None = None, after: float = 0.0) -> None:
        """The process repeats this at each tick."""
        self.now = self.now + after if at is None else at
        self.report(m.Drain(self.until))

    def hangs_up(self) -> None:
        close = self.next(m.CloseClient)
        assert close.hang_up, "closed with a request unread, it would be reset"
        assert close.fault is None
        self.silent()


@pytest.fixture
def talk() -> Draining:
    return Draining()


def test_idle_connection_closes_after_the_read_time(talk: Draining) -> None:
    talk.drains()
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    talk.silent()
    talk.drains(after=READ_SECONDS)
    talk.hangs_up()


def test_connection_of_a_lost_client_is_not_closed_again(talk: Draining) -> None:
    pending = talk.sends()
    talk.drains()
    talk.report(m.ClientLost())
    talk.commands.clear()
    talk.drains(at=talk.until)
    assert not [each for each in talk.commands if isinstance(each, m.CloseClient)]
    assert pending in talk.session.produce_requests[0].pending_appends.values()


def test_log_says_why_a_connection_was_drained(talk: Draining) -> None:
    talk.report(m.Drain(talk.until, "its home moved"))
    talk.drains()
    talk.next(m.ReadClient)
    talk.drains(after=READ_SECONDS)
    assert talk.next(m.CloseClient).reason == "its home moved"


def test_started_request_completes_and_later_ones_are_unread(talk: Draining) -> None:
    """A client that pauses within a request is cut off at the bound."""
    query, another = request(HEARTBEAT, 4, 1, b"x" * 100), request(HEARTBEAT, 4, 2)
    talk.client(query[:50])
    assert talk.upstream() == query[:50]
    talk.drains()
    talk.silent()  # it is read on
    talk.client(query[50:] + another)
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    assert talk.upstream() == query[50:], "what has not begun is not begun"
    talk.drains(after=1.0)
    talk.silent()  # its answer is waited for
    talk.kafka(response(1, b"yes"))
    assert talk.answer() == response(1, b"yes")
    talk.drains(after=READ_SECONDS)
    talk.hangs_up()


def test_started_buffered_request_completes(talk: Draining) -> None:
    query = produce(("checked-a", 0, expecting(5, b"x")))
    talk.client(query[:-3])
    talk.drains()
    talk.drains(after=1.0)
    talk.silent()
    talk.client(query[-3:])
    pending = talk.submitted()
    talk.next(m.ReadClient)
    talk.admit(pending)
    talk.sent(pending)
    talk.upstream()
    talk.kafka(produced(("checked-a", 0, 0, 5)))
    assert talk.next(Call).name == "answered"


def test_unanswered_fetch_keeps_connection_until_the_bound(talk: Draining) -> None:
    fetch = request(FETCH, 11, 1, b"topic")
    talk.client(fetch)
    assert talk.upstream() == fetch
    talk.drains()
    talk.next(m.ReadClient)
    talk.drains(at=talk.until - 2 * READ_SECONDS)
    talk.silent()
    assert talk.session.unanswered == [FETCH]
    talk.drains(at=talk.until)
    talk.hangs_up()


def test_pending_append_gets_retriable_error_before_the_bound(talk: Draining) -> None:
    pending = talk.submits(timeout_ms=60_000)
    talk.drains()
    talk.next(m.ReadClient)
    talk.silent()
    talk.drains(at=talk.until - READ_SECONDS)
    talk.canceled(pending)
    talk.metric()
    code, offset, message = read(talk.answer())[("checked-a", 0)]
    assert (code, offset) == (NOT_LEADER, -1)
    assert "closes this connection" in (message or "")
    talk.silent()
    talk.drains(at=talk.until)
    talk.hangs_up()
    assert talk.services.free_bytes == 1 << 20


def test_unanswered_append_is_unknown_and_resolution_continues(talk: Draining) -> None:
    pending = talk.sends(timeout_ms=60_000)
    talk.drains()
    talk.next(m.ReadClient)
    assert talk.session.unanswered == [PRODUCE]
    talk.drains(at=talk.until - READ_SECONDS)
    talk.lost(pending)
    talk.metric()
    assert read(talk.answer())[("checked-a", 0)][0] == TIMED_OUT
    talk.drains(at=talk.until)
    talk.hangs_up()


def test_a_bound_that_is_brought_forward_counts(talk: Draining) -> None:
    """By a second signal."""
    talk.client(request(FETCH, 11, 1, b"topic"))
    talk.upstream()
    talk.drains()
    talk.next(m.ReadClient)
    talk.until = talk.now
    talk.drains()
    talk.hangs_up()
