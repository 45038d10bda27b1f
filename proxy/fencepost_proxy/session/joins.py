"""Requests that add partitions to a transaction. Before Kafka gets one, the sequencers of its partitions must agree."""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.session.core import Core
from fencepost_proxy.session.pending_responses import Answer, PendingResponse
from fencepost_proxy.session.rewriters import RequestRewriter
from fencepost_proxy.topics.planning import Joins
from fencepost_proxy.types import MARKER, TopicPartition
from fencepost_proxy.wire.produce import ProduceRequest


@dataclass(slots=True)
class Joining:
    """A request that adds partitions to a transaction and is not sent yet. `waiting` – for these sequencers."""

    pending_response: PendingResponse
    rewriter: RequestRewriter
    joins: Joins
    waiting: set[TopicPartition]
    until: float


#: For the query whether it may write: supported by every broker that has transactions.
_WRITE_VERSION = 3


class TransactionJoins:
    __slots__ = ("_holds", "_joining", "_joins", "_proofs", "_queue", "_sequencers", "_services", "_state")

    def __init__(self, core: Core) -> None:
        self._services = core.state.services
        self._sequencers = core.state.sequencers
        self._state = core.state
        self._holds = core.holds
        self._queue = core.queue
        self._proofs = core.proofs
        self._joining: Joining | None = None
        self._joins: dict[PendingResponse, Joins] = {}

    def _query_to_join(self, pending_response: PendingResponse, rewriter: RequestRewriter, joins: Joins) -> None:
        """The sequencers must agree before Kafka gets it: after that, the transaction marker may come at any time."""
        until = self._state.now + self._services.sequencer_wait_max_seconds
        self._joining = Joining(pending_response, rewriter, joins, set(joins.partitions), until)
        self._holds.paused = True
        for partition in joins.partitions:
            self._sequencers.join(partition, joins.transactional_id, self._state.connection)

    def may_join(self, partition: TopicPartition) -> None:
        joining = self._joining
        if joining is None or self._state.client_closed or self._state.upstream_closed:
            return
        joining.waiting.discard(partition)
        if joining.waiting:
            return
        self._joining, self._holds.paused = None, False
        self._join(joining.pending_response, joining.joins)
        assert joining.rewriter.forward is not None
        self._queue.forward(joining.pending_response, joining.rewriter.forward)

    def end_late(self, now: float) -> None:
        """Appends to its partitions are in doubt for too long: return a retriable error; nothing has been added."""
        joining = self._joining
        if joining is None or joining.until > now or self._state.client_closed:
            return
        self._joining, self._holds.paused = None, False
        self._report_joined(joining.joins, answered=True)
        joining.pending_response.answer = Answer.MADE_HERE
        self._queue.end(joining.pending_response, [joining.rewriter.answer_later()])

    def _join(self, pending_response: PendingResponse, joins: Joins) -> None:
        finish = pending_response.on_response
        assert finish is not None

        def on_response(response: memoryview) -> None:
            self._report_joined(self._joins.pop(pending_response), answered=True)
            finish(response)

        pending_response.on_response = on_response
        self._joins[pending_response] = joins

    def leave(self) -> None:
        """Whether these were added stays unknown; what was not sent will not be."""
        joining, self._joining = self._joining, None
        if joining is not None:
            self._report_joined(joining.joins, answered=True)
        for joins in self._joins.values():
            self._report_joined(joins, answered=False)
        self._joins.clear()

    def _report_joined(self, joins: Joins, *, answered: bool) -> None:
        for partition in joins.partitions:
            self._sequencers.joined(partition, joins.transactional_id, answered=answered)

    def request(self, pending_response: PendingResponse, rewriter: RequestRewriter, joins: Joins) -> None:
        def done(allowed: bool) -> None:
            if allowed:
                self._query_to_join(pending_response, rewriter, joins)
                return
            assert rewriter.forward is not None  # Kafka refuses it, with its own error
            self._queue.forward(pending_response, rewriter.forward)

        def may_use(allowed: bool) -> None:
            unproved = (
                self._proofs.unproved({each.topic: each.partition for each in joins.partitions}) if allowed else {}
            )
            if not unproved:
                done(allowed)
                return
            until = self._state.now + self._services.request_timeout_seconds
            request = ProduceRequest(
                _WRITE_VERSION, pending_response.correlation_id, self._state.client_id, b"", None, 1, 0, ()
            )
            # Kafka adds none of the partitions if one is denied.
            self._proofs.prove_write_first(request, unproved, until, lambda denied: done(not denied))

        if joins.transactional_id == MARKER:
            if self._services.clients_log_in:
                self._proofs.prove_markers(
                    joins.partitions[0].topic,
                    pending_response.version,
                    pending_response.correlation_id,
                    self._state.client_id,
                    done,
                )
            else:
                done(True)
        elif joins.transactional_id == self._proofs.may_use:
            may_use(True)
        else:
            self._proofs.prove_use(
                joins.transactional_id, pending_response.correlation_id, self._state.client_id, may_use
            )
