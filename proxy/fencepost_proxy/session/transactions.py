"""The end of a client's transaction, and the records of its failed appends.

While any topic of the cluster checks expected offsets (`Services.relayed_versions`), EndTxn(commit) is decoded. The
request waits, and with it the reading of later requests, until the commit validator has decided (`ValidateCommit`,
`CommitDecided`). Then the proxy forwards it to Kafka, or refuses it. EndTxn(abort) always goes to Kafka.

The error of a refused commit is chosen by what clients do with it: they raise, and their abort and next transaction
work. From version 4 on it is TRANSACTION_ABORTABLE; older clients treat that as fatal, so for them it is
UNKNOWN_PRODUCER_ID. Kafka's coordinators return neither, so both prove that nothing was committed. If the decision
takes too long, the error is CONCURRENT_TRANSACTIONS: every client retries.

The proxy acts for a transactional id only after Kafka has confirmed, on that connection, that the client may use it:
before its appends to checked topics reach a sequencer, before it adds those topics to the transaction, and before a
commit is validated. Otherwise a client that knows another's producer id and epoch could make its commit fail, by an
append that fails, or learn about it. So Kafka is queried first, once for each connection and transactional id
(`_prove_use`), and the client's other requests wait.

A failed conditional append of a transaction is recorded in the state topic before the client gets the error
(`RecordAbortOnly`, `AbortOnlyRecorded`), so that every process refuses the commit. If it cannot be stored in time, the
client gets a retriable error instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fencepost_policies.append import Append
from fencepost_proxy.errors import ClientProtocolError, Error
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.connection import INT32
from fencepost_proxy.session.logins import Logins
from fencepost_proxy.session.messages import ClearAbortOnly, Count, RecordAbortOnly, ValidateCommit
from fencepost_proxy.session.pending_responses import Answer, PendingResponse
from fencepost_proxy.session.produce_exchange import ProduceExchange
from fencepost_proxy.session.rewriters import RequestRewriter, RequestRewriters
from fencepost_proxy.session.services import Services
from fencepost_proxy.topics.planning import Joins
from fencepost_proxy.transactions.commit_validator import V2_FROM, Decision, Outcome
from fencepost_proxy.transactions.table import PENDING_CODES, Transaction
from fencepost_proxy.types import MARKER, TopicPartition
from fencepost_proxy.wire.apis import END_TXN, PRODUCE
from fencepost_proxy.wire.batch import MalformedBatch, parse_batch_header
from fencepost_proxy.wire.control import (
    decode_request,
    decode_response,
    encode_response_frame,
    parse_request_header,
    parse_response_header,
)
from fencepost_proxy.wire.produce import PartitionData, PartitionResult, ProduceRequest, encode_produce_response
from fencepost_proxy.wire.schema import Message

#: For the query whether it may write: supported by every broker that has transactions.
_WRITE_VERSION = 3
#: The first EndTxn whose clients know TRANSACTION_ABORTABLE.
_ABORTABLE_FROM = 4
_NO_PRODUCER_ID, _NO_PRODUCER_EPOCH = -1, -1


@dataclass(slots=True)
class Ending:
    """One EndTxn. `frame` – the whole request with its length. `token` – of the `ValidateCommit`."""

    pending_response: PendingResponse
    frame: bytes
    transactional_id: str
    producer_id: int
    producer_epoch: int
    commits: bool
    token: int = 0
    abort_only_transactions: bool = False


class AtTransactions(Logins):
    """State: `_ending`, the commit being validated; `_commits`, those that Kafka has not answered; records in
    `_stores`."""

    __slots__ = ("_commits", "_ending")

    def __init__(
        self,
        connection: int,
        local_host: str,
        services: Services,
        rewriters: RequestRewriters,
        opened_at: float,
        *,
        primary: bool,
    ) -> None:
        super().__init__(connection, local_host, services, rewriters, opened_at, primary=primary)
        self._ending: Ending | None = None
        self._commits: dict[PendingResponse, Transaction] = {}

    @property
    def commits(self) -> list[Transaction]:
        """Those whose commit Kafka has not answered."""
        return list(self._commits.values())

    # ---- permissions

    def _needs_use_proof(self, request: ProduceRequest) -> bool:
        """It appends to a checked topic under a transactional id that Kafka has not confirmed for this client."""
        if request.transactional_id is None or request.transactional_id == self._may_use:
            return False
        for topic in request.topics:
            policy = self._services.policy(topic.name)
            if policy is not None and policy.is_checked:
                for data in topic.partitions:
                    if _unread(TopicPartition(topic.name, data.partition), data) is not None:
                        return True
        return False

    def _request_join(self, pending_response: PendingResponse, rewriter: RequestRewriter, joins: Joins) -> None:
        def done(allowed: bool) -> None:
            if allowed:
                self._query_to_join(pending_response, rewriter, joins)
                return
            assert rewriter.forward is not None  # Kafka refuses it, with its own error
            self._from_upstream.append(pending_response)
            self._upstream_out.append(rewriter.forward)
            self._services.forwarded(0.0)

        def may_use(allowed: bool) -> None:
            unproved = self._unproved({each.topic: each.partition for each in joins.partitions}) if allowed else {}
            if not unproved:
                done(allowed)
                return
            until = self._now + self._services.request_timeout_seconds
            request = ProduceRequest(
                _WRITE_VERSION, pending_response.correlation_id, self.client_id, b"", None, 1, 0, ()
            )
            # Kafka adds none of the partitions if one is denied.
            self._prove_write_first(request, unproved, until, lambda denied: done(not denied))

        if joins.transactional_id == MARKER:
            if self._services.clients_log_in:
                self._prove_markers(
                    joins.partitions[0].topic,
                    pending_response.version,
                    pending_response.correlation_id,
                    self.client_id,
                    done,
                )
            else:
                done(True)
        elif joins.transactional_id == self._may_use:
            may_use(True)
        else:
            self._prove_use(joins.transactional_id, pending_response.correlation_id, self.client_id, may_use)

    def _deny_append(self, request: ProduceRequest) -> None:
        """As Kafka does: refuse the whole request."""
        denied = Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        if request.acks == 0:
            raise ClientProtocolError(f"an append with acks=0 failed: {denied}")
        pending_response = PendingResponse(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        pending_response.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        self._to_client.append(pending_response)
        self._made_here += 1
        produce = ProduceExchange(request)
        produce.results = {
            key: PartitionResult(partition=key.partition, error_code=denied) for key in produce.partitions()
        }
        self._end(pending_response, [encode_produce_response(produce.response(), request.api_version)])

    # ---- the end

    def _control_message(self, api_key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        if api_key == END_TXN:
            self._end_txn(version, correlation_id, frame)
        else:
            super()._control_message(api_key, version, correlation_id, frame)

    def _end_txn(self, version: int, correlation_id: int, frame: memoryview) -> None:
        if not self._primary:
            self._move_to_primary(frame)
            return
        header = parse_request_header(frame)
        request = decode_request(END_TXN, version, frame[header.body_offset :])
        pending_response = PendingResponse(END_TXN, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        pending_response.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        self._to_client.append(pending_response)
        ending = Ending(
            pending_response,
            INT32.pack(len(frame)) + bytes(frame),
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            commits=request.committed,
        )
        if not ending.commits:
            self._forward_end(ending)
        elif ending.transactional_id == self._may_use:
            self._validate(ending)
        else:

            def done(allowed: bool) -> None:
                if allowed:
                    self._validate(ending)
                else:
                    self._answer_end(pending_response, Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)

            self._prove_use(ending.transactional_id, correlation_id, header.client_id, done)

    def _validate(self, ending: Ending) -> None:
        ending.token = self._next_token = self._next_token + 1
        self._ending = ending
        self._paused = True
        transaction_key = ending.transactional_id, ending.producer_id, ending.producer_epoch
        may_be_committed = self._services.transactions.may_be_committed(*transaction_key, self._now)
        self._commands.append(
            ValidateCommit(ending.token, *transaction_key, ending.pending_response.version, may_be_committed)
        )

    def _validated(self, token: int, decision: Decision) -> None:
        ending = self._ending
        if ending is None or ending.token != token:
            return
        self._ending, self._paused = None, False
        if self.client_closed or self.upstream_closed:
            return
        if decision.outcome is Outcome.PASS:
            ending.abort_only_transactions = decision.abort_only_transactions
            self._forward_end(ending)
            return
        pending_response = ending.pending_response
        error = Error.CONCURRENT_TRANSACTIONS
        if decision.outcome is Outcome.REFUSE:
            self._commands.append(Count("refusal", "commit_refused"))
            error = (
                Error.TRANSACTION_ABORTABLE
                if pending_response.version >= _ABORTABLE_FROM
                else Error.UNKNOWN_PRODUCER_ID
            )
        self._answer_end(pending_response, error)

    def _answer_end(self, pending_response: PendingResponse, error: Error) -> None:
        pending_response.answer = Answer.MADE_HERE
        self._made_here += 1
        message = Message(
            throttle_time_ms=0,
            error_code=int(error),
            producer_id=_NO_PRODUCER_ID,
            producer_epoch=_NO_PRODUCER_EPOCH,
        )
        self._end(
            pending_response,
            [encode_response_frame(END_TXN, pending_response.version, pending_response.correlation_id, message)],
        )

    def _forward_end(self, ending: Ending) -> None:
        if ending.commits:
            transaction_key = ending.transactional_id, ending.producer_id, ending.producer_epoch
            self._commits[ending.pending_response] = self._services.transactions.commit_sent(*transaction_key)

        def on_response(frame: memoryview) -> None:
            self._end_answered(ending, frame)

        ending.pending_response.on_response = on_response
        self._from_upstream.append(ending.pending_response)
        self._upstream_out.append(ending.frame)
        self._services.forwarded(0.0)

    def _leave_commits(self) -> None:
        """Kafka will not answer these."""
        for transaction in self._commits.values():
            self._services.transactions.commit_unacknowledged(transaction, self._now)
        self._commits.clear()

    def _end_answered(self, ending: Ending, frame: memoryview) -> None:
        pending_response = ending.pending_response
        transaction = self._commits.pop(pending_response, None)
        offset = parse_response_header(frame, END_TXN, pending_response.version).body_offset
        answer: list[bytes | memoryview] = [INT32.pack(len(frame)), bytes(frame)]
        if decode_response(END_TXN, pending_response.version, frame[offset:]).error_code != Error.NONE:
            if transaction is not None:
                self._services.transactions.commit_failed(transaction)
            self._end(pending_response, answer)
            return
        self._services.transactions.ended(ending.transactional_id, ending.producer_id, ending.producer_epoch)
        if ending.commits and not ending.abort_only_transactions:
            self._end(pending_response, answer)
        elif pending_response.version >= V2_FROM:
            # The next transaction has another epoch: clearing the records of this one can wait.
            self._commands.append(ClearAbortOnly(0, ending.producer_id, ending.producer_epoch))
            self._end(pending_response, answer)
        else:
            # The next transaction has the same epoch, and must not find the records of this one.
            token = self._next_token = self._next_token + 1
            self._stores[token] = lambda error: self._end(pending_response, answer)
            self._commands.append(ClearAbortOnly(token, ending.producer_id, ending.producer_epoch))

    # ---- its appends, in order of events

    def _is_ending(self, transactional_id: str, pending: PendingAppend) -> bool:
        """A commit validated without this append may overtake it."""
        if pending.append.expected_base_offset is None:
            return False
        return self._services.transactions.may_be_committed(transactional_id, *pending.producer, self._now)

    def _submits(self, pending: PendingAppend) -> None:
        if pending.transactional_id is not None:
            self._services.transactions.submitted(pending.transactional_id, pending.append)

    def _sends(self, pending: PendingAppend) -> None:
        if pending.transactional_id is not None:
            self._services.transactions.sent(pending.transactional_id, pending.append)

    def _was_appended(self, pending: PendingAppend, result: PartitionResult) -> None:
        if pending.transactional_id is not None and result.error_code == Error.NONE:
            self._services.transactions.appended_batch(pending.transactional_id, pending.append, result.base_offset)

    def _end_appends(self, produce: ProduceExchange) -> None:
        """The one exit from `_waiting_produce` and `_produce_in_flight`, whether the client was answered or
        disconnected: none of its appends are in progress here from now on.
        """
        transactional_id = produce.request.transactional_id
        if transactional_id is not None:
            for pending in produce.pending_appends.values():
                self._services.transactions.over(transactional_id, pending.append)

    def _waits_for_records(self, pending_response: PendingResponse, produce: ProduceExchange) -> bool:
        """Whether records of its failed appends are not stored yet. Until then it is not answered."""
        if produce.open_records is None:
            produce.open_records = 0
            for transaction in self._failed(produce, produce.results):
                self._record_abort_only(pending_response, produce, transaction)
            if self.client_closed or pending_response.done:
                produce.open_records = 0  # no client waits for it
            elif produce.open_records:
                self._answer_by[pending_response] = produce.answer_by
        return produce.open_records > 0

    def _record_abort_only(
        self, pending_response: PendingResponse, produce: ProduceExchange, transaction: Transaction
    ) -> None:
        abort_only = self._services.transactions.record_to_store(transaction)
        if abort_only is None:
            return
        token = self._next_token = self._next_token + 1

        def recorded(error: str | None) -> None:
            if error is not None:
                self._services.transactions.not_recorded(transaction, abort_only)
                self._answer_later_instead(produce)
            if produce.open_records:
                produce.open_records -= 1
            if pending_response in self._produce_in_flight:
                self._finish_produce(pending_response, produce)

        self._stores[token] = recorded
        produce.open_records = (produce.open_records or 0) + 1
        instead_of = self._services.transactions.recorded_before(transaction, abort_only)
        self._commands.append(RecordAbortOnly(token, abort_only, instead_of))

    def _abort_only_recorded(self, token: int, *, stored: bool) -> None:
        done = self._stores.pop(token, None)
        if done is not None:
            done(None if stored else "it could not be stored")

    def _failed(
        self, produce: ProduceExchange, reported: Mapping[TopicPartition, PartitionResult]
    ) -> list[Transaction]:
        """The transactions whose conditional appends it reports as failed. Marked as abort-only from now on."""
        transactional_id = produce.request.transactional_id
        concerned: dict[Transaction, None] = {}
        for topic in produce.request.topics if transactional_id is not None else ():
            policy = self._services.policy(topic.name)
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                result, pending = reported.get(key), produce.pending_appends.get(key)
                if result is None or not result.error_code or topic.name in produce.denied:
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
                        self._services.transactions.failed(
                            transactional_id, append, result.error_code, why, was_sent=was_sent
                        )
                    ] = None
        return list(concerned)

    def _answer_later_instead(self, produce: ProduceExchange) -> None:
        """Replace a refusal that only this process would know by a retriable error: the retry gets the refusal."""
        if produce.request.transactional_id is None:
            return
        for key, result in produce.results.items():
            if result.error_code and result.error_code not in PENDING_CODES:
                # An append that ended up at another offset is in the log; nothing was appended of the others.
                pending = produce.pending_appends.get(key)
                is_appended = pending is not None and pending.appended_at is not None
                message = "its outcome could not be stored in time"
                produce.results[key] = PartitionResult(
                    partition=key.partition,
                    error_code=Error.REQUEST_TIMED_OUT if is_appended else Error.NOT_LEADER_OR_FOLLOWER,
                    error_message=f"{'OUTCOME_UNKNOWN' if is_appended else 'TRY_AGAIN'} {message}",
                )

    def _finish_produce(self, pending_response: PendingResponse, produce: ProduceExchange) -> None:
        raise NotImplementedError


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
