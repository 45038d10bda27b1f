"""What Kafka and the sequencers answer for the appends of a Produce request, and how that becomes its one response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fencepost_proxy.errors import ClientProtocolError, Error
from fencepost_proxy.sequencer.events import Answer, PendingAppend
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange, Results, retriable
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.in_progress import InProgress
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.read_holds import Throttling
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import Count, LateAppends, TopicStale
from fencepost_proxy.session.frames.services import Sequencers, Services
from fencepost_proxy.session.frames.steps import Steps, Wait
from fencepost_proxy.session.produce.barriers import Barriers
from fencepost_proxy.session.produce.forwarding import PRODUCE_BY_ID, Forwarding
from fencepost_proxy.session.produce.idempotence import IdempotenceChecks
from fencepost_proxy.session.produce.refusals import Refusals
from fencepost_proxy.session.transactions.appends import TransactionalAppends
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult

#: Errors that show that the known topic id or leaders are outdated.
_STALE = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.NOT_LEADER_OR_FOLLOWER,
        Error.UNKNOWN_TOPIC_ID,
        Error.INCONSISTENT_TOPIC_ID,
    }
)


@dataclass(slots=True, eq=False)
class Completion:
    _state: ConnectionState
    _queue: ResponseQueue
    _pipelines: FailedPipelines
    _proofs: Proofs
    _in_progress: InProgress
    _throttling: Throttling
    _services: Services
    _producers: IdempotenceMemory
    _sequencers: Sequencers
    _transactions: TransactionalAppends
    _barriers: Barriers
    _forwarding: Forwarding
    _refusals: Refusals
    _levels: IdempotenceChecks

    def __post_init__(self) -> None:
        self._forwarding.answered = self._answered

    def sent_produce_of(self, pending: PendingAppend) -> ProduceExchange | None:
        found = self._produce_of(pending)
        if found is None:
            self._queue.take_over()
            found = self._produce_of(pending)
        return found

    def _produce_of(self, pending: PendingAppend) -> ProduceExchange | None:
        return next((p for p in self._queue.in_flight if p.pending_appends.get(pending.partition) is pending), None)

    def not_sent(self, produce: ProduceExchange, pending: PendingAppend, why: str) -> None:
        result = produce.results.refuse(pending.partition, retriable(pending.partition, f"TRY_AGAIN {why}"))
        self._pipelines.fail_with(produce, pending, result)
        self._state.commands += [
            TopicStale(pending.partition.topic),
            Count("refusal", "try_again", pending.partition),
        ]
        self._sequencers.cancel(pending)

    def _answered(self, produce: ProduceExchange, answers: Mapping[TopicPartition, PartitionResult]) -> None:
        produce.pending_response.answered_at = self._state.now
        if produce.checks.count_checked is not None:
            produce.checks.count_checked.was_answered()
        again = [] if produce.checks.leveled is None else self._levels.to_send_without(produce, answers)
        by_name = produce.request.api_version < PRODUCE_BY_ID
        for key, result in answers.items():
            if key not in again:
                known = _for_names(result) if by_name else result
                self._partition_answered(produce, key, self._levels.reported(produce, key, known))
        if again:
            self._levels.send_without(produce, again)
        self.finish(produce)

    def _partition_answered(self, produce: ProduceExchange, key: TopicPartition, result: PartitionResult) -> None:
        self._proofs.record(key.topic, result.error_code)
        if result.error_code in _STALE:
            self._state.commands.append(TopicStale(key.topic))
        pending = produce.pending_appends.get(key)
        if pending is not None and key in produce.sent:
            self._throttling.is_answered(pending)
            pending.sending.may_write = self._proofs.has_proved(key.topic)
            if result.error_code:
                self._services.kafka_refused(result.error_code)
            decision = self._sequencers.answered(pending, result)
            if decision is not None:
                self.complete(produce, pending, self.final_result(decision))
        else:
            produce.results.answer(key, result)

    def final_result(self, decision: Answer) -> PartitionResult:
        """Of an append, sent or not. It is known to this process from here on."""
        pending, result = decision.pending, decision.result
        if decision.reason is not None:
            expected = pending.append.expected_base_offset
            self._state.commands.append(
                Count("refusal", decision.reason, pending.partition, expected, result.base_offset)
            )
        self._producers.record_log_start(pending.partition, result.log_start_offset, self._state.now)
        if pending.append.transactional:
            self._transactions.was_appended(pending, result)
        return result

    def complete(self, produce: ProduceExchange, pending: PendingAppend, result: PartitionResult) -> None:
        produce.results.answer(pending.partition, result)
        self._pipelines.fail_with(produce, pending, result)

    def begin(self, produce: ProduceExchange) -> None:
        """Answer it, without the steps that sent it."""
        self._in_progress.begin(self.answer(produce))

    def finish(self, produce: ProduceExchange) -> None:
        """Continue its `answer`, if that can go on."""
        self._barriers.leave(produce)
        answering = produce.answering
        if answering.resume is None or not produce.complete:
            return
        # It waits for results; or for Kafka's answer to a query, which its client does not need any more.
        if not answering.begun or not (answering.open_records or self._refusals.is_awaited(produce)):
            answering.resume()

    def answer(self, produce: ProduceExchange) -> Steps[None]:
        """The rest of its life, from when it is in flight: results of all partitions, and its response."""
        answering = produce.answering
        if not produce.complete:
            yield Wait(partial(setattr, answering, "resume"))
        answering.begun, answering.resume = True, None
        self._barriers.leave(produce)
        yield from self._refusals.confirm(produce)
        if produce.request.transactional_id is not None:
            yield from self._transactions.record(produce)
            yield from self._refusals.confirm(produce)  # of what is not stored, it reports another error
            self._transactions.end_appends(produce)
        del self._queue.in_flight[produce]
        self._queue.answer_by.pop(produce, None)
        if produce.silent:
            self._services.release(produce.pending_response.reserved_bytes)
            failed = next((r for r in produce.results.values() if r.error_code), None)
            if failed is not None:
                raise ClientProtocolError(f"an append with acks=0 failed: {failed.error_message or failed.error_code}")
        elif not produce.pending_response.done:
            self._queue.end(produce.pending_response, produce.response())

    def answer_unknown_outcomes(self, now: float) -> None:
        """Report what was sent and not answered in time as unknown; the sequencer continues to resolve it."""
        for produce, deadline in list(self._queue.answer_by.items()):
            if deadline > now:
                continue
            del self._queue.answer_by[produce]
            self.stop_waiting(produce)
            if produce.silent:
                continue
            self._transactions.answer_later_instead(produce)
            message = "OUTCOME_UNKNOWN Kafka did not answer in time; it may have been appended"
            results = {
                key: PartitionResult(partition=key.partition, error_code=Error.REQUEST_TIMED_OUT, error_message=message)
                for key in produce.partitions
            }
            message = "TRY_AGAIN Kafka did not confirm in time that this client may write"
            unreported = self._refusals.unproved(produce)
            unproved = {key: retriable(key, message) for key in unreported if key not in produce.sent}
            # Without a proof, what was sent stays unknown: it may be in the log.
            known = {
                key: each for key, each in produce.results.items() if key not in produce.sent or key not in unreported
            }
            reported = Results(results | known | unproved)
            for key, pending in produce.pending_appends.items():
                if key not in produce.results:
                    self._pipelines.fail_with(produce, pending, results[key])
            self._state.commands.append(Count("refusal", "outcome_unknown"))
            self._queue.end(produce.pending_response, produce.response(reported))
            if produce.request.transactional_id is not None and produce.answering.open_records is None:
                # Too late to wait for it. Later results are processed when they arrive.
                for transaction in self._transactions.failed(produce, reported):
                    self._transactions.record_abort_only(produce, transaction)
                produce.answering.open_records = None

    def resolve_late(self, pending_appends: Sequence[PendingAppend]) -> None:
        """Let the log decide about these appends to one partition, in order: other clients wait for them.

        Not if the proxy may not send them again. Nothing more is sent on this connection before Kafka has answered
        them: else the next append would be late, too.
        """
        partition = pending_appends[0].partition
        produces = [self.sent_produce_of(pending) for pending in pending_appends]
        if self._services.clients_log_in and not self._proofs.has_proved(partition.topic):
            return  # without logins, each client has the proxy's permissions
        if any(
            each is None or each.checks.count_checked is not None or each.checks.leveled is not None
            for each in produces
        ):
            return  # an expansion waits for its answer
        seconds = max(self._state.now - (pending.placement.sent_at or self._state.now) for pending in pending_appends)
        self._state.commands.append(LateAppends(partition, seconds))
        for pending, produce in zip(pending_appends, produces, strict=True):
            assert produce is not None
            pending.sending.may_write, pending.sending.may_arrive_until = True, produce.answer_by
            self._throttling.is_late(pending)
            self._sequencers.lost(pending)

    def stop_waiting(self, produce: ProduceExchange) -> None:
        """A leader that hangs may never answer, and never break the connection either: other appends must continue.

        If it appends the batch later, the sequencer finds that in the log.
        """
        for pending in produce.pending_appends.values():
            if pending.partition in produce.sent and pending.partition not in produce.results:
                pending.sending.may_write = self._proofs.has_proved(pending.partition.topic)
                self._sequencers.lost(pending)
                if produce.checks.count_checked is not None:
                    produce.checks.count_checked.in_doubt = True  # the sequencer may resend it

    def take_over(self, produce: ProduceExchange) -> None:
        """Native code has sent the request, by topic id. From now on it ends here."""
        queue, queried = self._queue, set(produce.pending_appends)
        names = {pending.sending.topic_id: pending.partition.topic for pending in produce.pending_appends.values()}
        queue.to_client.append(produce.pending_response)
        queue.from_upstream.append(self._forwarding.response_of(produce, PRODUCE_BY_ID, names, queried))
        queue.in_flight[produce] = None
        queue.answer_by[produce] = produce.answer_by
        self.begin(produce)


def _for_names(result: PartitionResult) -> PartitionResult:
    """A client that identifies topics by name does not know UNKNOWN_TOPIC_ID: to it, the topic is unknown."""
    if result.error_code in (Error.UNKNOWN_TOPIC_ID, Error.INCONSISTENT_TOPIC_ID):
        return replace(result, error_code=Error.UNKNOWN_TOPIC_OR_PARTITION)
    return result
