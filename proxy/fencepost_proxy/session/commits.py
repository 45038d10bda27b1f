"""The end of a client's transaction.

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
(`Proofs.prove_use`), and the client's other requests wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_proxy.errors import Error
from fencepost_proxy.session.core import Core
from fencepost_proxy.session.cutter import INT32
from fencepost_proxy.session.messages import ClearAbortOnly, Count, ValidateCommit
from fencepost_proxy.session.pending_responses import Answer, PendingResponse
from fencepost_proxy.transactions.commit_validator import V2_FROM, Decision, Outcome
from fencepost_proxy.transactions.table import Transaction
from fencepost_proxy.wire.apis import END_TXN
from fencepost_proxy.wire.control import (
    decode_request,
    decode_response,
    encode_response_frame,
    parse_request_header,
    parse_response_header,
)
from fencepost_proxy.wire.schema import Message

_NO_PRODUCER_ID, _NO_PRODUCER_EPOCH = -1, -1
#: The first EndTxn whose clients know TRANSACTION_ABORTABLE.
_ABORTABLE_FROM = 4


@dataclass(slots=True)
class Ending:
    """One EndTxn. `frame` – the whole request with its length."""

    pending_response: PendingResponse
    frame: bytes
    transactional_id: str
    producer_id: int
    producer_epoch: int
    commits: bool
    abort_only_transactions: bool = False


class EndTxnRequests:
    __slots__ = ("_holds", "_proofs", "_queue", "_services", "_state", "commits")

    def __init__(self, core: Core) -> None:
        self._services = core.state.services
        self._state = core.state
        self._holds = core.holds
        self._queue = core.queue
        self._proofs = core.proofs
        self.commits: dict[PendingResponse, Transaction] = {}

    def request(self, version: int, correlation_id: int, frame: memoryview) -> None:
        header = parse_request_header(frame)
        request = decode_request(END_TXN, version, frame[header.body_offset :])
        pending_response = PendingResponse(END_TXN, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        self._queue.expect(pending_response)
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
        elif ending.transactional_id == self._proofs.may_use:
            self._validate(ending)
        else:

            def done(allowed: bool) -> None:
                if allowed:
                    self._validate(ending)
                else:
                    self._answer_end(pending_response, Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)

            self._proofs.prove_use(ending.transactional_id, correlation_id, header.client_id, done)

    def _validate(self, ending: Ending) -> None:
        self._holds.paused = True
        transaction_key = ending.transactional_id, ending.producer_id, ending.producer_epoch
        token = self._state.token(lambda decision: self._decided(ending, decision))
        may_be_committed = self._services.transactions.may_be_committed(*transaction_key, self._state.now)
        self._state.commands.append(
            ValidateCommit(token, *transaction_key, ending.pending_response.version, may_be_committed)
        )

    def _decided(self, ending: Ending, decision: Decision) -> None:
        self._holds.paused = False
        if self._state.client_closed or self._state.upstream_closed:
            return
        if decision.outcome is Outcome.PASS:
            ending.abort_only_transactions = decision.abort_only_transactions
            self._forward_end(ending)
            return
        pending_response = ending.pending_response
        error = Error.CONCURRENT_TRANSACTIONS
        if decision.outcome is Outcome.REFUSE:
            self._state.commands.append(Count("refusal", "commit_refused"))
            error = (
                Error.TRANSACTION_ABORTABLE
                if pending_response.version >= _ABORTABLE_FROM
                else Error.UNKNOWN_PRODUCER_ID
            )
        self._answer_end(pending_response, error)

    def _answer_end(self, pending_response: PendingResponse, error: Error) -> None:
        pending_response.answer = Answer.MADE_HERE
        self._holds.made_here += 1
        message = Message(
            throttle_time_ms=0,
            error_code=int(error),
            producer_id=_NO_PRODUCER_ID,
            producer_epoch=_NO_PRODUCER_EPOCH,
        )
        self._queue.end(
            pending_response,
            [encode_response_frame(END_TXN, pending_response.version, pending_response.correlation_id, message)],
        )

    def _forward_end(self, ending: Ending) -> None:
        if ending.commits:
            transaction_key = ending.transactional_id, ending.producer_id, ending.producer_epoch
            self.commits[ending.pending_response] = self._services.transactions.commit_sent(*transaction_key)

        def on_response(frame: memoryview) -> None:
            self._end_answered(ending, frame)

        ending.pending_response.on_response = on_response
        self._queue.forward(ending.pending_response, ending.frame)

    def leave(self) -> None:
        """Kafka will not answer these."""
        for transaction in self.commits.values():
            self._services.transactions.commit_unacknowledged(transaction, self._state.now)
        self.commits.clear()

    def _end_answered(self, ending: Ending, frame: memoryview) -> None:
        pending_response = ending.pending_response
        transaction = self.commits.pop(pending_response, None)
        offset = parse_response_header(frame, END_TXN, pending_response.version).body_offset
        answer: list[bytes | memoryview] = [INT32.pack(len(frame)), bytes(frame)]
        if decode_response(END_TXN, pending_response.version, frame[offset:]).error_code != Error.NONE:
            if transaction is not None:
                self._services.transactions.commit_failed(transaction)
            self._queue.end(pending_response, answer)
            return
        self._services.transactions.ended(ending.transactional_id, ending.producer_id, ending.producer_epoch)
        if ending.commits and not ending.abort_only_transactions:
            self._queue.end(pending_response, answer)
        elif pending_response.version >= V2_FROM:
            # The next transaction has another epoch: clearing the records of this one can wait.
            self._state.commands.append(ClearAbortOnly(0, ending.producer_id, ending.producer_epoch))
            self._queue.end(pending_response, answer)
        else:
            # The next transaction has the same epoch, and must not find the records of this one.
            token = self._state.token(lambda stored: self._queue.end(pending_response, answer))
            self._state.commands.append(ClearAbortOnly(token, ending.producer_id, ending.producer_epoch))
