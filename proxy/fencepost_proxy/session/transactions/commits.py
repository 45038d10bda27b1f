"""The end of a client's transaction.

While any topic of the cluster checks expected offsets (`Services.relayed_versions`), EndTxn(commit) is decoded. The
request waits, and with it the reading of later requests, until the commit validator has decided (`ValidateCommit`,
`CommitDecided`). Then the proxy forwards it to Kafka, or refuses it. EndTxn(abort) always goes to Kafka.

The error of a refused commit is chosen by what clients do with it: they raise, and their abort and next transaction
work. From version 4 on it is TRANSACTION_ABORTABLE; older clients treat that as fatal, so for them it is
UNKNOWN_PRODUCER_ID. Kafka's coordinators return neither, so both prove that nothing was committed. If the decision
takes too long, the error is CONCURRENT_TRANSACTIONS: every client retries. If the broker is not the coordinator, it is
NOT_COORDINATOR, as Kafka would answer: every client looks the coordinator up.

The proxy acts for a transactional id only after Kafka has confirmed, on that connection, that the client may use it:
before its appends to checked topics reach a sequencer, before it adds those topics to the transaction, and before a
commit is validated. Otherwise a client that knows another's producer id and epoch could make its commit fail, by an
append that fails, or learn about it. So Kafka is queried first, once for each connection and transactional id
(`Proofs.prove_use`), and the client's other requests wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.errors import Error
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.cutter import INT32
from fencepost_proxy.session.frames.messages import ClearAbortOnly, Count, ValidateCommit
from fencepost_proxy.session.frames.pending_responses import Answer, PendingResponse
from fencepost_proxy.session.frames.steps import ConnectionEnded, Resume, Steps, Wait
from fencepost_proxy.transactions.commit_validator import V2_FROM, Decision, Outcome
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.wire.apis import END_TXN
from fencepost_proxy.wire.control import (
    decode_request,
    decode_response,
    encode_response_frame,
    parse_request_header,
    parse_response_header,
)
from fencepost_proxy.wire.schema import Message

#: The first EndTxn whose clients know TRANSACTION_ABORTABLE.
_ABORTABLE_FROM = 4
#: A transactional id, a producer id, and its epoch.
_Producer = tuple[str, int, int]


@dataclass(slots=True, eq=False)
class EndTxnRequests:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _proofs: Proofs
    _transactions: Table

    def end(self, version: int, correlation_id: int, frame: memoryview) -> Steps[None]:
        header = parse_request_header(frame)
        request = decode_request(END_TXN, version, frame[header.body_offset :])
        producer = request.transactional_id, request.producer_id, request.producer_epoch
        whole = INT32.pack(len(frame)) + bytes(frame)
        pending_response = PendingResponse(END_TXN, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        self._queue.expect(pending_response)
        if not request.committed:
            response: memoryview = yield self._queue.request(pending_response, whole)
            clears = True
        else:
            if producer[0] != self._proofs.may_use and not (
                yield from self._proofs.prove_use(producer[0], correlation_id, header.client_id)
            ):
                self._refuse(pending_response, Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
                return
            decision: Decision = yield self._validation(version, producer)
            if decision.outcome is not Outcome.PASS:
                self._refuse(pending_response, self._error_of(decision, version))
                return
            clears = decision.abort_only_transactions
            response = yield from self._commit(pending_response, whole, producer)
        if not _error_code(response, version):
            self._transactions.ended(*producer)
            if clears:
                yield self._clearing(version, producer)
        self._queue.end(pending_response, [INT32.pack(len(response)), response])

    def _commit(self, pending_response: PendingResponse, whole: bytes, producer: _Producer) -> Steps[memoryview]:
        transaction = self._transactions.commit_sent(*producer)
        try:
            response: memoryview = yield self._queue.request(pending_response, whole)
        except ConnectionEnded:
            self._transactions.commit_unacknowledged(transaction, self._state.now)
            raise
        if _error_code(response, pending_response.version):
            self._transactions.commit_failed(transaction)
        return response

    # ---- waits

    def _validation(self, version: int, producer: _Producer) -> Wait:
        def start(resume: Resume) -> None:
            may_be_committed = self._transactions.may_be_committed(*producer, self._state.now)
            self._state.commands.append(ValidateCommit(self._state.token(resume), *producer, version, may_be_committed))

        return Wait(start, before_sending="the commit validator")

    def _clearing(self, version: int, producer: _Producer) -> Wait:
        """Until the abort-only records of this transaction are cleared."""

        def start(resume: Resume) -> None:
            # With v2, the next transaction has another epoch, and need not wait. Otherwise it must not find them.
            token = 0 if version >= V2_FROM else self._state.token(resume)
            self._state.commands.append(ClearAbortOnly(token, *producer[1:]))
            if not token:
                resume()

        return Wait(start, outlives=True)

    # ---- the proxy's own answers

    def _error_of(self, decision: Decision, version: int) -> Error:
        if decision.outcome is not Outcome.REFUSE:
            return decision.later
        self._state.commands.append(Count("refusal", "commit_refused"))
        return Error.TRANSACTION_ABORTABLE if version >= _ABORTABLE_FROM else Error.UNKNOWN_PRODUCER_ID

    def _refuse(self, pending_response: PendingResponse, error: Error) -> None:
        pending_response.answer = Answer.MADE_HERE
        self._holds.made_here += 1
        message = Message(throttle_time_ms=0, error_code=int(error), producer_id=-1, producer_epoch=-1)
        version, correlation_id = pending_response.version, pending_response.correlation_id
        self._queue.end(pending_response, [encode_response_frame(END_TXN, version, correlation_id, message)])


def _error_code(response: memoryview, version: int) -> int:
    offset = parse_response_header(response, END_TXN, version).body_offset
    return int(decode_response(END_TXN, version, response[offset:]).error_code)
