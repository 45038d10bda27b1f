"""The appends of a Produce request at their sequencers, one partition after the other, until sent or refused."""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.events import Answer, PendingAppend
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange, retriable
from fencepost_proxy.session.connection.draining import Draining
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState, Full
from fencepost_proxy.session.frames.messages import Count
from fencepost_proxy.session.frames.services import Observation, Sequencers, Settings
from fencepost_proxy.session.frames.steps import Resume, Steps, Wait
from fencepost_proxy.session.produce.barriers import Barriers
from fencepost_proxy.session.produce.completion import Completion
from fencepost_proxy.session.produce.forwarding import Forwarding
from fencepost_proxy.session.produce.refusals import Refusals
from fencepost_proxy.session.transactions.appends import TransactionalAppends
from fencepost_proxy.wire.produce import PartitionResult

_LOGIN_IS_OVER = "the client's login expired"
_IS_MUTED = "Kafka does not read this client's requests at the moment: it may be over a quota"
_IS_UNREAD = "the client does not read its responses"
#: How long an admitted append may block its partition while other partitions of its request are waited for.
_BLOCKS_SECONDS = 0.02
#: Partitions of one request whose log ends are read at once.
_READ_AHEAD_MAX = 128


@dataclass(slots=True, eq=False)
class Admission:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _pipelines: FailedPipelines
    _draining: Draining
    _settings: Settings
    _observation: Observation
    _sequencers: Sequencers
    _transactions: TransactionalAppends
    _barriers: Barriers
    _forwarding: Forwarding
    _refusals: Refusals
    _completion: Completion
    _decided: Resume | None = None  # continues the request that waits for a sequencer

    def send(self, produce: ProduceExchange) -> Steps[None]:
        """Submit its appends, one sequencer after the other; send what is admitted, and answer what is refused."""
        produce.submission.to_submit = [
            produce.pending_appends[key] for key in sorted(produce.pending_appends, reverse=True)
        ]
        self._read_ahead(produce)
        while True:
            while (pending := self._next(produce)) is not None:
                yield from self._decide(produce, pending)
                if self._holds.waiting_produce is not produce:
                    return  # its connection ends
            if self._settings.refuse_whole_requests and produce.refused:
                self._refuse_the_rest(produce)
            first = not produce.sent
            sent = self._send_admitted(produce, self._state.now)
            if not produce.submission.to_submit:
                break
        self._holds.waiting_produce = None
        self._queue.in_flight[produce] = None
        if produce.sent:
            self._queue.answer_by[produce] = produce.answer_by
        if sent and first:
            self._observation.forwarded(max(0.0, self._state.now - produce.received.at - produce.sequencer_seconds))
        self._holds.made_here += not produce.sent

    def _read_ahead(self, produce: ProduceExchange) -> None:
        """A partition waits until those before it are admitted, but not until their log ends are read."""
        submits = produce.submission.to_submit
        if len(submits) > 1:
            for pending in reversed(submits[-_READ_AHEAD_MAX:]):
                self._sequencers.read_ahead(pending)

    def _next(self, produce: ProduceExchange) -> PendingAppend | None:
        """The next append to submit; refuses those that failed or became late while others were waited for."""
        while produce.submission.to_submit and not (self._settings.refuse_whole_requests and produce.refused):
            pending = produce.submission.to_submit.pop()
            if self._pipelines.refuse_after_failed(produce, pending):
                continue
            if self._state.now < produce.answer_by:
                return pending
            where = f"topic={pending.partition.topic} partition={pending.partition.partition}"
            why = self._why_muted() if self._is_muted() else "the partitions before it took too long"
            message = f"TRY_AGAIN {where}: {why}"
            self._state.refuse(produce, pending.partition, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
            self._pipelines.fail_with(produce, pending, produce.results[pending.partition])
        return None

    def _decide(self, produce: ProduceExchange, pending: PendingAppend) -> Steps[None]:
        """Wait until its sequencer admits or completes it; if Kafka would not read it now, only until then."""
        submission = produce.submission
        if self._is_muted():
            submission.to_submit.append(pending)
            self._resubmit_admitted(produce)
            yield Wait(self._await_decision)
            return
        submission.waiting_for, submission.submitted_at = pending, self._state.now
        if pending.append.transactional:
            self._transactions.submits(pending)
        decision = self._sequencers.submit(pending)
        result: PartitionResult | None = None
        if decision is None:
            result = yield Wait(self._await_decision)
            if self._holds.waiting_produce is not produce:
                return  # its connection ends
        elif isinstance(decision, Answer):
            result = self._completion.final_result(decision)
        submission.waiting_for = None
        if result is not None:
            submission.alone = False
            self._completion.complete(produce, pending, result)
            return
        now = self._state.now
        if not submission.admitted:
            submission.admitted_at = now
        submission.admitted.append(pending)
        produce.sequencer_seconds += now - submission.submitted_at
        self._observation.sequencer_waited(now - submission.submitted_at)
        if submission.alone:
            submission.alone = False
            self._resubmit_admitted(produce)

    def _await_decision(self, resume: Resume) -> None:
        self._decided = resume

    def _resume(self, result: PartitionResult | None) -> None:
        assert self._decided is not None
        resume, self._decided = self._decided, None
        resume(result)

    def submit_muted(self) -> None:
        """Submit what waits because an append of this client would stand still."""
        produce = self._holds.waiting_produce
        if produce is not None and produce.is_muted:
            self._resume(None)

    def _is_muted(self) -> bool:
        """Whether Kafka would not read an append that is sent now, or the proxy its answer."""
        return self._state.full != 0 or self._holds.throttling.blocks(len(self._queue.from_upstream))

    def _why_muted(self) -> str:
        return _IS_UNREAD if self._state.full & Full.CLIENT else _IS_MUTED

    def admitted(self, pending: PendingAppend, now: float) -> None:
        produce = self._holds.waiting_produce
        if produce is not None and pending is produce.submission.waiting_for:
            self._resume(None)
            return
        sent = self._completion.sent_produce_of(pending)
        client_closed = self._state.client_closed and sent is not None and not sent.silent
        if sent is None or sent.pending_response.done or client_closed or self._state.upstream_closed:
            self._sequencers.cancel(pending)
            return
        # Kafka refused its fence, the sequencer read the log, and the expected offset still holds: resend it.
        why = self._why_not_resent(sent, pending, now)
        if why is not None:
            self._completion.not_sent(sent, pending, why)
            self._completion.finish(sent)
            return
        self._forwarding.forward(sent, {pending.partition})
        if pending.append.transactional:
            self._transactions.sends(pending)
        self._sequencers.sent(pending)

    def _why_not_resent(self, sent: ProduceExchange, pending: PendingAppend, now: float) -> str | None:
        if self._forwarding.without_id(sent, [pending]):
            return _unknown_id(pending)
        if self._state.streams_up:
            # A frame of the client is half upstream, and ends when the client likes. Nothing can be sent in between,
            # and the sequencer cannot wait for that.
            return "the client's next request is being relayed"
        if now >= self._state.login_ends:
            return _LOGIN_IS_OVER
        return self._why_muted() if self._is_muted() else None  # or its last attempt is not answered

    def completed(self, decision: Answer) -> None:
        pending, result = decision.pending, self._completion.final_result(decision)
        produce = self._holds.waiting_produce
        if produce is not None and pending is produce.submission.waiting_for:
            self._resume(result)
            return
        sent = self._completion.sent_produce_of(pending)
        if sent is not None:
            self._completion.complete(sent, pending, result)
            self._completion.finish(sent)

    def _send_admitted(self, produce: ProduceExchange, now: float) -> bool:
        """Send what is admitted, and what needs no admission, in one request; False if there is nothing."""
        submission = produce.submission
        if self._pipelines.failed:
            self._return_after_failed(produce)
        if submission.admitted and now >= self._state.login_ends:
            self._return_unsent(produce)
        if submission.admitted and (
            self._is_muted() or any(not self._sequencers.may_send(pending, now) for pending in submission.admitted)
        ):
            # Kafka would not read them now; or: an admission without a confirmed fence expires.
            self._resubmit_admitted(produce)
            return False
        for pending in self._forwarding.without_id(produce, submission.admitted):
            submission.admitted.remove(pending)
            self._completion.not_sent(produce, pending, _unknown_id(pending))
        unsent = produce.unsent()
        if not unsent:
            return False
        produce.sent.update(unsent)
        self._forwarding.forward(produce, unsent)
        for pending in submission.admitted:
            if pending.append.transactional:
                self._transactions.sends(pending)
            self._sequencers.sent(pending)
        submission.admitted = []
        return True

    def send_ahead(self, now: float) -> None:
        """Send admitted appends before the rest of their request, which takes too long.

        Not if a refusal of the rest would refuse these too (`refusal_scope = "request"`). Then they are returned until
        the slow partition admits its append, and after that all are submitted in order.
        """
        produce = self._holds.waiting_produce
        if produce is None:
            return
        submission = produce.submission
        if not submission.admitted or submission.waiting_for is None or now < submission.admitted_at + _BLOCKS_SECONDS:
            return
        if self._settings.refuse_whole_requests:
            submission.alone = True
            self._resubmit_admitted(produce)
            return
        if self._send_admitted(produce, now):
            self._queue.in_flight[produce] = None

    def _resubmit_admitted(self, produce: ProduceExchange) -> None:
        submission = produce.submission
        for pending in submission.admitted:
            self._sequencers.cancel(pending)
        submission.to_submit = sorted(
            [*submission.to_submit, *submission.admitted], key=lambda t: t.partition, reverse=True
        )
        submission.admitted = []

    def _return_after_failed(self, produce: ProduceExchange) -> None:
        """Cancel admitted appends whose pipeline has failed meanwhile:

        1. B is submitted. Its sequencer completes A with an error and admits B before this session has processed A's
           result.
        2. The session gets both results before it sends B, but for the sequencer B no longer follows A.
        """
        for pending in tuple(produce.submission.admitted):
            if self._pipelines.refuse_after_failed(produce, pending):
                produce.submission.admitted.remove(pending)
                self._sequencers.cancel(pending)

    def _return_unsent(self, produce: ProduceExchange) -> None:
        """The client's login expired while it waited. Kafka would close the connection without a result.

        The client retries: on a connection that ends here, or after it has logged in again.
        """
        for key in produce.unsent():
            produce.results.refuse(key, retriable(key, f"TRY_AGAIN {_LOGIN_IS_OVER}"))
        for pending in produce.submission.admitted:
            self._pipelines.fail_with(produce, pending, produce.results[pending.partition])
            self._sequencers.cancel(pending)
            self._state.commands.append(Count("refusal", "try_again", pending.partition))
        produce.submission.admitted = []

    def _refuse_the_rest(self, produce: ProduceExchange) -> None:
        """`refusal_scope = "request"`, KIP-27's literal reading: one mismatch refuses the whole request."""
        submission = produce.submission
        for pending in submission.admitted:
            self._sequencers.cancel(pending)
        submission.admitted, submission.to_submit = [], []
        first = next(produce.refusals())
        for key in produce.partitions:
            if key not in produce.results:
                message = f"WHOLE_REQUEST_REFUSED topic={key.topic} partition={key.partition}: {first.error_message}"
                result = PartitionResult(key.partition, first.error_code, error_message=message)
                produce.results.refuse(key, result)
                if key in produce.pending_appends:
                    self._pipelines.fail_with(produce, produce.pending_appends[key], result)

    def answer_before_close(self, now: float) -> None:
        """The connection ends in a moment. Appends that wait for a sequencer or barrier were not sent: they get a
        retriable error. Appends sent and not answered are reported as unknown, as at their deadline.
        """
        if not self._draining.closes_soon(now):
            return
        self._queue.take_over()
        produce = self._holds.waiting_produce
        if produce is not None:
            self.cancel_waiting()
            if produce in self._queue.in_flight:
                self._queue.answer_by[produce] = now
            # No result of a transaction is reported before it is recorded: the client sees the end, and retries.
            elif not (
                produce.sent
                or self._state.client_closed
                or produce.silent
                or produce.request.transactional_id is not None
            ):
                left = set(produce.partitions) - produce.results.keys() | set(self._refusals.unproved(produce))
                for key in left:
                    produce.results.override(key, retriable(key, "TRY_AGAIN the proxy closes this connection"))
                self._state.commands.append(Count("refusal", "try_again"))
                self._queue.end(produce.pending_response, produce.response())
        for sent in self._queue.answer_by:
            self._queue.answer_by[sent] = now

    def drop_waiting(self) -> None:
        """The same, for a client that gets no answer to it, but to earlier requests."""
        produce = self._holds.waiting_produce
        self.cancel_waiting()
        if produce is not None and produce not in self._queue.in_flight and not produce.silent:
            self._queue.to_client.remove(produce.pending_response)

    def cancel_waiting(self) -> None:
        """The request that waits for a sequencer will not be sent any more."""
        produce, self._holds.waiting_produce = self._holds.waiting_produce, None
        if produce is not None:
            for pending in (*produce.submission.admitted, produce.submission.waiting_for):
                if pending is not None:
                    self._sequencers.cancel(pending)
            if produce.sent:  # in part: it goes on as one of `in_flight`, until that is answered
                for key in produce.partitions:
                    if key not in produce.sent and key not in produce.results:
                        produce.results.refuse(key, retriable(key, "TRY_AGAIN not sent: its connection ended"))
                self._completion.begin(produce)
                return
            self._transactions.end_appends(produce)
            self._barriers.leave(produce, unsent=True)
            self._queue.release(produce.pending_response)


def _unknown_id(pending: PendingAppend) -> str:
    return f"the id of topic {pending.partition.topic} is unknown"
