"""Requests that add partitions to a transaction. Before Kafka gets one, the sequencers of its partitions must agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.pending_responses import PendingResponse
from fencepost_proxy.session.frames.services import Sequencers, Settings
from fencepost_proxy.session.frames.steps import ConnectionEnded, Resume, Steps, TooLate, Wait
from fencepost_proxy.topics.planning import Joins
from fencepost_proxy.types import MARKER, TopicPartition
from fencepost_proxy.wire.produce import ProduceRequest

#: For the query whether it may write: supported by every broker that has transactions.
_WRITE_VERSION = 3


@dataclass(slots=True, eq=False)
class TransactionJoins:
    """At most one request waits for sequencers: no later one is read meanwhile."""

    _state: ConnectionState
    _queue: ResponseQueue
    _proofs: Proofs
    _settings: Settings
    _sequencers: Sequencers
    _waiting: set[TopicPartition] = field(default_factory=set)
    _resume: Resume = lambda: None

    def send(self, pending_response: PendingResponse, request: bytes, joins: Joins) -> Steps[memoryview | None]:
        """Kafka's response. None: appends to its partitions are in doubt for too long, and nothing has been added."""
        if not (yield from self._is_allowed(pending_response, joins)):
            response: memoryview = yield self._queue.request(pending_response, request)
            return response  # Kafka refuses it, with its own error
        until = self._state.now + self._settings.sequencer_wait_max_seconds
        try:
            # After Kafka has it, the transaction marker may come at any time.
            yield Wait(partial(self._join, joins), before_sending="sequencers of its partitions", until=until)
        except (TooLate, ConnectionEnded) as end:
            self._report(joins, answered=True)
            if isinstance(end, TooLate):
                return None
            raise
        try:
            response = yield self._queue.request(pending_response, request)
        except ConnectionEnded:
            self._report(joins, answered=False)  # whether they were added stays unknown
            raise
        self._report(joins, answered=True)
        return response

    def may_join(self, partition: TopicPartition) -> None:
        """The partition's sequencer permits it."""
        if partition in self._waiting:
            self._waiting.discard(partition)
            if not self._waiting:
                self._resume()

    def _join(self, joins: Joins, resume: Resume) -> None:
        self._waiting, self._resume = set(joins.partitions), resume
        for partition in joins.partitions:
            self._sequencers.join(partition, joins.transactional_id, self._state.connection)

    def _report(self, joins: Joins, *, answered: bool) -> None:
        for partition in joins.partitions:
            self._sequencers.joined(partition, joins.transactional_id, answered=answered)

    def _is_allowed(self, pending_response: PendingResponse, joins: Joins) -> Steps[bool]:
        correlation_id, client_id = pending_response.correlation_id, self._state.client_id
        if joins.transactional_id == MARKER:
            if not self._settings.clients_log_in:
                return True
            topic, version = joins.partitions[0].topic, pending_response.version
            return (yield from self._proofs.prove_markers(topic, version, correlation_id, client_id))
        if joins.transactional_id != self._proofs.may_use and not (
            yield from self._proofs.prove_use(joins.transactional_id, correlation_id, client_id)
        ):
            return False
        unproved = self._proofs.unproved({each.topic: each.partition for each in joins.partitions})
        if not unproved:
            return True
        until = self._state.now + self._settings.request_timeout_seconds
        request = ProduceRequest(_WRITE_VERSION, correlation_id, client_id, b"", None, 1, 0, ())
        # Kafka adds none of the partitions if one is denied.
        return not (yield from self._proofs.prove_write(request, unproved, until))
