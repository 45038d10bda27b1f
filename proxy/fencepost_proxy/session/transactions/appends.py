"""The appends of a client's transaction, and the records of those that failed.

A failed conditional append of a transaction is recorded in the state topic before the client gets the error
(`RecordAbortOnly`, `AbortOnlyRecorded`), so that every process refuses the commit. If it cannot be stored in time, the
client gets a retriable error instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from fencepost_policies.append import Append
from fencepost_proxy.errors import ClientProtocolError, Error
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import RecordAbortOnly
from fencepost_proxy.session.frames.services import Topics
from fencepost_proxy.session.frames.steps import Steps, Wait
from fencepost_proxy.transactions.table import PENDING_CODES, Table, Transaction
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.produce import PartitionData, PartitionResult, ProduceRequest


@dataclass(slots=True, eq=False)
class TransactionalAppends:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _proofs: Proofs
    _topics: Topics
    _table: Table

    def must_prove(self, transactional_id: str, request: ProduceRequest) -> bool:
        """Whether it appends to checked topics, and Kafka has not confirmed the transactional id for this client."""
        if transactional_id == self._proofs.may_use:
            return False
        for topic in request.topics:
            policy = self._topics.policy(topic.name)
            if policy is not None and policy.is_checked:
                for data in topic.partitions:
                    if _unread(TopicPartition(topic.name, data.partition), data) is not None:
                        return True
        return False

    def deny(self, request: ProduceRequest) -> None:
        """As Kafka does: refuse the whole request."""
        denied = Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        if request.acks == 0:
            raise ClientProtocolError(f"an append with acks=0 failed: {denied}")
        produce = ProduceExchange(request)
        self._queue.expect(produce.pending_response)
        self._holds.made_here += 1
        for key in produce.partitions:
            produce.results.refuse(key, PartitionResult(partition=key.partition, error_code=denied))
        self._queue.end(produce.pending_response, produce.response())

    def is_ending(self, transactional_id: str, pending: PendingAppend) -> bool:
        """A commit validated without this append may overtake it."""
        if pending.append.expected_base_offset is None:
            return False
        return self._table.may_be_committed(transactional_id, *pending.producer, self._state.now)

    def submits(self, pending: PendingAppend) -> None:
        if pending.transactional_id is not None:
            self._table.submitted(pending.transactional_id, pending.append)

    def sends(self, pending: PendingAppend) -> None:
        if pending.transactional_id is not None:
            self._table.sent(pending.transactional_id, pending.append)

    def was_appended(self, pending: PendingAppend, result: PartitionResult) -> None:
        if pending.transactional_id is not None and result.error_code == Error.NONE:
            self._table.appended_batch(pending.transactional_id, pending.append, result.base_offset)

    def end_appends(self, produce: ProduceExchange) -> None:
        """The one exit from `waiting_produce` and `in_flight`, whether the client was answered or
        disconnected: none of its appends are in progress here from now on. Without it, two refusals whose request
        still waits for a third partition when its connection breaks delay later commits of that epoch indefinitely.
        """
        transactional_id = produce.request.transactional_id
        if transactional_id is not None:
            for pending in produce.pending_appends.values():
                self._table.over(transactional_id, pending.append)

    def record(self, produce: ProduceExchange) -> Steps[None]:
        """Record its failed appends. Until that is stored, or cannot be, a client that waits gets no answer."""
        produce.answering.open_records = 0
        for transaction in self.failed(produce, produce.results):
            self.record_abort_only(produce, transaction)
        if produce.answering.open_records and not (self._state.client_closed or produce.pending_response.done):
            self._queue.answer_by[produce] = produce.answer_by
            yield Wait(partial(setattr, produce.answering, "resume"))

    def record_abort_only(self, produce: ProduceExchange, transaction: Transaction) -> None:
        answering = produce.answering
        abort_only = self._table.record_to_store(transaction)
        if abort_only is None:
            return

        def recorded(stored: bool) -> None:
            if not stored:
                self._table.not_recorded(transaction, abort_only)
                self.answer_later_instead(produce)
            if answering.open_records:
                answering.open_records -= 1
            if answering.resume is not None and not answering.open_records:
                answering.resume()

        answering.open_records = (answering.open_records or 0) + 1
        instead_of = self._table.recorded_before(transaction, abort_only)
        self._state.commands.append(RecordAbortOnly(self._state.token(recorded), abort_only, instead_of))

    def failed(self, produce: ProduceExchange, reported: Mapping[TopicPartition, PartitionResult]) -> list[Transaction]:
        """The transactions whose conditional appends it reports as failed. Marked as abort-only from now on."""
        transactional_id = produce.request.transactional_id
        concerned: dict[Transaction, None] = {}
        for topic in produce.request.topics if transactional_id is not None else ():
            policy = self._topics.policy(topic.name)
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                result, pending = reported.get(key), produce.pending_appends.get(key)
                if result is None or not result.error_code or topic.name in produce.received.denied:
                    continue  # what Kafka denies belongs to no transaction
                append: Append | None = None
                if pending is not None:
                    conditional = pending.append.transactional and pending.append.expected_base_offset is not None
                    append = pending.append if conditional else None
                elif policy is not None and policy.is_checked:
                    append = _unread(key, data)
                if append is not None and transactional_id is not None:
                    why = result.error_message or f"a conditional append to {key} was answered {result.error_code}"
                    was_sent = pending is not None and key in produce.sent
                    concerned[
                        self._table.failed(transactional_id, append, result.error_code, why, was_sent=was_sent)
                    ] = None
        return list(concerned)

    def answer_later_instead(self, produce: ProduceExchange) -> None:
        """Replace a refusal that only this process would know by a retriable error: the retry gets the refusal."""
        if produce.request.transactional_id is None:
            return
        for key, result in tuple(produce.results.items()):
            if result.error_code and result.error_code not in PENDING_CODES:
                # An append that ended up at another offset is in the log; nothing was appended of the others.
                pending = produce.pending_appends.get(key)
                is_appended = pending is not None and pending.outcome.appended_at is not None
                error_code = Error.REQUEST_TIMED_OUT if is_appended else Error.NOT_LEADER_OR_FOLLOWER
                message = f"{'OUTCOME_UNKNOWN' if is_appended else 'TRY_AGAIN'} its outcome could not be stored in time"
                produce.results.override(key, PartitionResult(key.partition, error_code, error_message=message))


def _unread(partition: TopicPartition, data: PartitionData) -> Append | None:
    """A batch that was refused unread: treated as conditional. None if it belongs to no transaction."""
    if data.records is None:
        return None
    try:
        header = parse_batch_header(data.records)
    except MalformedBatch:
        return None
    if header.producer_id < 0 or not header.is_transactional:
        return None
    return Append(
        topic=partition.topic,
        partition=partition.partition,
        record_count=header.record_count,
        expected_base_offset=header.base_offset,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        transactional=True,
    )
