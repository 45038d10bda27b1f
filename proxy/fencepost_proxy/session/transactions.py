"""The end of a client's transaction, and what has to be known of its appends before.

EndTxn(commit) is looked into while some topic of the cluster checks expectations (`Surroundings.passes`): it is held,
with all that its client sends behind it, until there is a verdict (`JudgeCommit`, `Judged`). Then it goes to Kafka, or
is answered here. EndTxn(abort) always goes to Kafka.

Which error refuses a commit is what clients make of it: they raise, their abort works, so does their next transaction.
From version 4 on that is TRANSACTION_ABORTABLE, which older clients do not know and die of; for them it is
UNKNOWN_PRODUCER_ID. Kafka's coordinators answer neither, so they say for certain that nothing was committed. What
cannot be found out in time is CONCURRENT_TRANSACTIONS: every client asks again.

Nobody's word on a transaction counts before Kafka has told its connection that it may use that transactional id: what
it appends to guarded topics comes to no gate, that it joins them neither, and what it wants to commit is not looked
into. Whoever knows another's producer id and epoch could have its transaction refused else, by an append that fails, or
hear of it. So Kafka is asked first, once for a connection and transactional id (`_prove_use`), and all else of that
client waits.

A conditional append of a transaction that failed is noted in the state topic before its client is told (`NotePoison`,
`PoisonNoted`), so that the commit is refused whichever process it comes to. Where it cannot be stored in time the
client is told to try again instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fencepost_policies.append import Append
from fencepost_proxy.errors import ClientProtocolError, Error
from fencepost_proxy.partitions.events import Ticket
from fencepost_proxy.session.connection import INT32
from fencepost_proxy.session.exchange import Exchange, Exchanges
from fencepost_proxy.session.logins import Logins
from fencepost_proxy.session.messages import Count, JudgeCommit, LiftPoison, NotePoison
from fencepost_proxy.session.slots import Answer, Slot
from fencepost_proxy.session.surroundings import Surroundings
from fencepost_proxy.session.turn import Turn
from fencepost_proxy.topics.planning import Joins
from fencepost_proxy.transactions.judge import V2_FROM, Outcome, Verdict
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

#: Of a question whether it may write: understood by every broker that has transactions.
_WRITE_VERSION = 3
#: The first EndTxn whose clients know TRANSACTION_ABORTABLE.
_ABORTABLE_FROM = 4
_NO_PRODUCER_ID, _NO_PRODUCER_EPOCH = -1, -1


@dataclass(slots=True)
class Ending:
    """One EndTxn. `frame` – the whole request with its length. `token` – of the question whether it may commit."""

    slot: Slot
    frame: bytes
    transactional_id: str
    producer_id: int
    producer_epoch: int
    commits: bool
    token: int = 0
    poisoned: bool = False


class AtTransactions(Logins):
    """Its state is `_ending`, the commit that is being judged, `_commits`, those that Kafka has not answered, and notes
    (`_stores`)."""

    __slots__ = ("_commits", "_ending")

    def __init__(
        self,
        connection: int,
        local_host: str,
        around: Surroundings,
        exchanges: Exchanges,
        opened_at: float,
        *,
        owner: bool,
    ) -> None:
        super().__init__(connection, local_host, around, exchanges, opened_at, owner=owner)
        self._ending: Ending | None = None
        self._commits: dict[Slot, Transaction] = {}

    # ---- who may speak

    def _is_to_be_proved(self, request: ProduceRequest) -> bool:
        """It appends to a guarded topic for a transactional id that its client has not been allowed to use."""
        if request.transactional_id is None or request.transactional_id == self._may_use:
            return False
        for topic in request.topics:
            policy = self._around.policy(topic.name)
            if policy is not None and policy.guarded:
                for data in topic.partitions:
                    if _unread(TopicPartition(topic.name, data.partition), data) is not None:
                        return True
        return False

    def _wants_to_join(self, slot: Slot, exchange: Exchange, joins: Joins) -> None:
        def done(allowed: bool) -> None:
            if allowed:
                self._ask_to_join(slot, exchange, joins)
                return
            assert exchange.forward is not None  # Kafka refuses it, in its own words
            self._from_upstream.append(slot)
            self._upstream_out.append(exchange.forward)
            self._around.forwarded(0.0)

        def may_use(allowed: bool) -> None:
            unproved = self._unproved({each.topic: each.partition for each in joins.partitions}) if allowed else {}
            if not unproved:
                done(allowed)
                return
            until = self._now + self._around.request_timeout_seconds
            request = ProduceRequest(_WRITE_VERSION, slot.correlation_id, self.client_id, b"", None, 1, 0, ())
            # Nothing is added where one of them is denied.
            self._prove_write_first(request, unproved, until, lambda denied: done(not denied))

        if joins.transactional_id == MARKER:
            if self._around.clients_log_in:
                self._prove_markers(joins.partitions[0].topic, slot.version, slot.correlation_id, self.client_id, done)
            else:
                done(True)
        elif joins.transactional_id == self._may_use:
            may_use(True)
        else:
            self._prove_use(joins.transactional_id, slot.correlation_id, self.client_id, may_use)

    def _deny_append(self, request: ProduceRequest) -> None:
        """As Kafka does: the whole request, whatever else is in it."""
        denied = Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        if request.acks == 0:
            raise ClientProtocolError(f"an append with acks=0 failed: {denied}")
        slot = Slot(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        self._to_client.append(slot)
        self._made_here += 1
        turn = Turn(request)
        turn.results = {key: PartitionResult(partition=key.partition, error_code=denied) for key in turn.partitions()}
        self._end(slot, [encode_produce_response(turn.response(), request.api_version)])

    # ---- the end

    def _control_message(self, api_key: int, version: int, correlation_id: int, frame: memoryview) -> None:
        if api_key == END_TXN:
            self._end_txn(version, correlation_id, frame)
        else:
            super()._control_message(api_key, version, correlation_id, frame)

    def _end_txn(self, version: int, correlation_id: int, frame: memoryview) -> None:
        if not self._owner:
            self._want_owner(frame)
            return
        header = parse_request_header(frame)
        request = decode_request(END_TXN, version, frame[header.body_offset :])
        slot = Slot(END_TXN, version, correlation_id, Answer.MADE_FROM_RESPONSE)
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        self._to_client.append(slot)
        ending = Ending(
            slot,
            INT32.pack(len(frame)) + bytes(frame),
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            commits=request.committed,
        )
        if not ending.commits:
            self._forward_end(ending)
        elif ending.transactional_id == self._may_use:
            self._judge(ending)
        else:

            def done(allowed: bool) -> None:
                if allowed:
                    self._judge(ending)
                else:
                    self._answer_end(slot, Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)

            self._prove_use(ending.transactional_id, correlation_id, header.client_id, done)

    def _judge(self, ending: Ending) -> None:
        ending.token = self._next_token = self._next_token + 1
        self._ending = ending
        self._held = True
        who = ending.transactional_id, ending.producer_id, ending.producer_epoch
        may_be_committed = self._around.transactions.may_be_committed(*who, self._now)
        self._commands.append(JudgeCommit(ending.token, *who, ending.slot.version, may_be_committed))

    def _judged(self, token: int, verdict: Verdict) -> None:
        ending = self._ending
        if ending is None or ending.token != token:
            return
        self._ending, self._held = None, False
        if self.client_gone or self.upstream_gone:
            return
        if verdict.outcome is Outcome.PASS:
            ending.poisoned = verdict.poisoned
            self._forward_end(ending)
            return
        slot = ending.slot
        error = Error.CONCURRENT_TRANSACTIONS
        if verdict.outcome is Outcome.REFUSE:
            self._commands.append(Count("refusal", "commit_refused"))
            error = Error.TRANSACTION_ABORTABLE if slot.version >= _ABORTABLE_FROM else Error.UNKNOWN_PRODUCER_ID
        self._answer_end(slot, error)

    def _answer_end(self, slot: Slot, error: Error) -> None:
        slot.answer = Answer.MADE_HERE
        self._made_here += 1
        message = Message(
            throttle_time_ms=0,
            error_code=int(error),
            producer_id=_NO_PRODUCER_ID,
            producer_epoch=_NO_PRODUCER_EPOCH,
        )
        self._end(slot, [encode_response_frame(END_TXN, slot.version, slot.correlation_id, message)])

    def _forward_end(self, ending: Ending) -> None:
        if ending.commits:
            who = ending.transactional_id, ending.producer_id, ending.producer_epoch
            self._commits[ending.slot] = self._around.transactions.commit_sent(*who)

        def on_response(frame: memoryview) -> None:
            self._end_answered(ending, frame)

        ending.slot.on_response = on_response
        self._from_upstream.append(ending.slot)
        self._upstream_out.append(ending.frame)
        self._around.forwarded(0.0)

    def _leave_commits(self) -> None:
        """Kafka's answers to them will never come."""
        for transaction in self._commits.values():
            self._around.transactions.commit_unheard(transaction, self._now)
        self._commits.clear()

    def _end_answered(self, ending: Ending, frame: memoryview) -> None:
        slot = ending.slot
        transaction = self._commits.pop(slot, None)
        offset = parse_response_header(frame, END_TXN, slot.version).body_offset
        answer: list[bytes | memoryview] = [INT32.pack(len(frame)), bytes(frame)]
        if decode_response(END_TXN, slot.version, frame[offset:]).error_code != Error.NONE:
            if transaction is not None:
                self._around.transactions.commit_failed(transaction)
            self._end(slot, answer)
            return
        self._around.transactions.ended(ending.transactional_id, ending.producer_id, ending.producer_epoch)
        if ending.commits and not ending.poisoned:
            self._end(slot, answer)
        elif slot.version >= V2_FROM:
            # The next transaction has another epoch: what is said of this one can wait.
            self._commands.append(LiftPoison(0, ending.producer_id, ending.producer_epoch))
            self._end(slot, answer)
        else:
            # The next one has the same epoch, and must not find what is said of this one.
            token = self._next_token = self._next_token + 1
            self._stores[token] = lambda error: self._end(slot, answer)
            self._commands.append(LiftPoison(token, ending.producer_id, ending.producer_epoch))

    # ---- its appends, in the order of what happens to them

    def _is_ending(self, transactional_id: str, ticket: Ticket) -> bool:
        """A commit that was judged without it may come before it."""
        if ticket.append.expected_base_offset is None:
            return False
        return self._around.transactions.may_be_committed(transactional_id, *ticket.producer, self._now)

    def _offers(self, ticket: Ticket) -> None:
        if ticket.transactional_id is not None:
            self._around.transactions.offered(ticket.transactional_id, ticket.append)

    def _sends(self, ticket: Ticket) -> None:
        if ticket.transactional_id is not None:
            self._around.transactions.sent(ticket.transactional_id, ticket.append)

    def _has_landed(self, ticket: Ticket, result: PartitionResult) -> None:
        if ticket.transactional_id is not None and result.error_code == Error.NONE:
            self._around.transactions.landed(ticket.transactional_id, ticket.append, result.base_offset)

    def _let_go(self, turn: Turn) -> None:
        """The one way out of `_turn` and `_turns`, whether its client was told or its connection is gone: nothing of it
        is under way here from now on.
        """
        transactional_id = turn.request.transactional_id
        if transactional_id is not None:
            for ticket in turn.tickets.values():
                self._around.transactions.over(transactional_id, ticket.append)

    def _waits_for_notes(self, slot: Slot, turn: Turn) -> bool:
        """Whether what it has to tell of a transaction's failed appends is not stored yet. Nothing is told before."""
        if turn.notes is None:
            turn.notes = 0
            for transaction in self._failed(turn, turn.results):
                self._note_poison(slot, turn, transaction)
            if self.client_gone or slot.done:
                turn.notes = 0  # nobody waits for it
            elif turn.notes:
                self._answer_by[slot] = turn.answer_by
        return turn.notes > 0

    def _note_poison(self, slot: Slot, turn: Turn, transaction: Transaction) -> None:
        poison = self._around.transactions.note(transaction)
        if poison is None:
            return
        token = self._next_token = self._next_token + 1

        def noted(error: str | None) -> None:
            if error is not None:
                self._around.transactions.not_noted(transaction, poison)
                self._tell_later_instead(turn)
            if turn.notes:
                turn.notes -= 1
            if slot in self._turns:
                self._finish_turn(slot, turn)

        self._stores[token] = noted
        turn.notes = (turn.notes or 0) + 1
        instead_of = self._around.transactions.noted_before(transaction, poison)
        self._commands.append(NotePoison(token, poison, instead_of))

    def _poison_noted(self, token: int, *, stored: bool) -> None:
        done = self._stores.pop(token, None)
        if done is not None:
            done(None if stored else "it could not be stored")

    def _failed(self, turn: Turn, told: Mapping[TopicPartition, PartitionResult]) -> list[Transaction]:
        """The transactions whose conditional appends are to be told an error by it. Known here from now on."""
        transactional_id = turn.request.transactional_id
        concerned: dict[Transaction, None] = {}
        for topic in turn.request.topics if transactional_id is not None else ():
            policy = self._around.policy(topic.name)
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                result, ticket = told.get(key), turn.tickets.get(key)
                if result is None or not result.error_code or topic.name in turn.denied:
                    continue  # what Kafka denies is of no transaction, and spoils none
                append: Append | None = None
                if ticket is not None:
                    conditional = ticket.append.transactional and ticket.append.expected_base_offset is not None
                    append = ticket.append if conditional else None
                elif policy is not None and policy.guarded:
                    append = _unread(key, data)
                if append is not None and transactional_id is not None:
                    why = result.error_message or f"a conditional append to {key} was answered {result.error_code}"
                    was_sent = ticket is not None and key in turn.sent
                    concerned[
                        self._around.transactions.failed(
                            transactional_id, append, result.error_code, why, was_sent=was_sent
                        )
                    ] = None
        return list(concerned)

    def _tell_later_instead(self, turn: Turn) -> None:
        """A refusal that only this process would know of is not told: its client tries again, and hears of it then."""
        if turn.request.transactional_id is None:
            return
        for key, result in turn.results.items():
            if result.error_code and result.error_code not in PENDING_CODES:
                # One that landed elsewhere is there; of all others nothing was appended.
                ticket = turn.tickets.get(key)
                landed = ticket is not None and ticket.appended_at is not None
                message = "what became of it is not stored yet, so that it is not told either"
                turn.results[key] = PartitionResult(
                    partition=key.partition,
                    error_code=Error.REQUEST_TIMED_OUT if landed else Error.NOT_LEADER_OR_FOLLOWER,
                    error_message=f"{'OUTCOME_UNKNOWN' if landed else 'TRY_AGAIN'} {message}",
                )

    def _finish_turn(self, slot: Slot, turn: Turn) -> None:
        raise NotImplementedError


def _unread(partition: TopicPartition, data: PartitionData) -> Append | None:
    """A batch that was refused before it was read: taken for a conditional one. None where it is of no transaction."""
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
