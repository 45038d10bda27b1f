"""Idempotence levels on a connection: which batches are refused, wait, or go without producer ids (`levels.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import Error
from fencepost_proxy.session.batches.levels import MESSAGE_FORMAT, NOT_PERMITTED, LeveledProduce, downgraded
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.produce.forwarding import Forwarding
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult


@dataclass(slots=True, eq=False)
class IdempotenceChecks:
    _state: ConnectionState
    _queue: ResponseQueue
    _pipelines: FailedPipelines
    _producers: IdempotenceMemory
    _forwarding: Forwarding

    def check(self, produce: ProduceExchange, leveled: LeveledProduce) -> None:
        """Refuse batches by the levels of its topics and its own."""
        for key, refusal in leveled.refused.items():
            self._state.refuse(produce, key, refusal)
        stripped = [key for key in leveled.stripped if not self._is_after_a_failed(produce, key)]
        self._state.commands += downgraded(stripped, NOT_PERMITTED)

    def waits(self, produce: ProduceExchange, now: float) -> bool:
        """False: no batch is sent without its producer id, or all that are may be sent now. Order: see `levels.py`."""
        leveled = produce.checks.leveled
        if leveled is None or not leveled.safe:
            return False
        leveled.safe -= produce.results.keys()  # refused for another reason
        leveled.safe -= {key for key in leveled.safe if self._is_after_a_failed(produce, key)}
        without = leveled.drops_id(self._producers, now)
        blocked = [key for key in without if any(_has_id_upstream(each, key) for each in self._queue.in_flight)]
        if blocked and now < leveled.deadline:
            leveled.waits = True
            return True
        if leveled.waits:
            leveled.waits = False
            produce.sequencer_seconds = now - produce.received.at
        for key in without:
            if key in blocked:
                message = f"TRY_AGAIN topic={key.topic} partition={key.partition}: earlier batches are not answered yet"
                self._state.refuse(produce, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "level_unknown", message))
                leveled.safe.discard(key)
                leveled.tries_again.add(key)
            else:
                leveled.give_up_id(key)
        self._state.commands += downgraded(set(without) & leveled.without, MESSAGE_FORMAT)
        return False

    def _is_after_a_failed(self, produce: ProduceExchange, key: TopicPartition) -> bool:
        """Whether it is refused because an earlier batch failed, which its client sends again first."""
        assert produce.checks.leveled is not None
        result = self._pipelines.before((key, produce.checks.leveled.producers[key]), produce.received.starts_at)
        if result is None:
            return False
        message = f"PREDECESSOR_FAILED {result.error_message}"
        self._state.refuse(produce, key, Refusal(result.error_code, "predecessor_failed", message))
        return True

    def send_without(self, produce: ProduceExchange, keys: Sequence[TopicPartition]) -> None:
        """Kafka accepts no producer ids there, and appended nothing: resend these batches without them."""
        assert produce.checks.leveled is not None
        for key in keys:
            self._producers.refused(key.topic, self._state.now)
            produce.checks.leveled.give_up_id(key)
        self._state.commands += downgraded(keys, MESSAGE_FORMAT)
        self._forwarding.forward(produce, keys, between_frames=True)

    def reported(self, produce: ProduceExchange, key: TopicPartition, result: PartitionResult) -> PartitionResult:
        """Kafka's result, as reported to the client: 45 only if acknowledged records are lost.

        If the log starts after everything acknowledged to its producer, Kafka has only forgotten the producer. Then the
        error is 59, and producers restart their sequences. It is reported once: a client that resends the same batch
        after it would do so indefinitely (kafka-python 3).
        """
        memory = self._producers
        memory.record_log_start(key, result.log_start_offset, self._state.now)
        pending = produce.pending_appends.get(key)
        if pending is not None:
            append = pending.append
            batch, record_count = (append.producer_id, append.producer_epoch, append.base_sequence), append.record_count
            if pending.placement.fence is not None:
                return result
        elif produce.checks.leveled is not None and key in produce.checks.leveled.with_id:
            batch, record_count = produce.checks.leveled.with_id[key]
        else:
            return result
        producer_id = batch[0]
        if producer_id < 0:
            return result
        if result.error_code == Error.NONE:
            memory.acknowledged(key, producer_id, result.base_offset + record_count - 1)
        elif result.error_code == Error.OUT_OF_ORDER_SEQUENCE_NUMBER:
            start = result.log_start_offset if result.log_start_offset >= 0 else memory.log_start(key)
            if memory.is_dead(key, producer_id, start) and not memory.was_reported(key, batch):
                message = (
                    f"PRODUCER_FORGOTTEN topic={key.topic} partition={key.partition}: all records of this producer "
                    f"lie below the log start {start}, and none of them was lost otherwise"
                )
                return replace(result, error_code=Error.UNKNOWN_PRODUCER_ID, error_message=message)
        return result

    def to_send_without(
        self,
        produce: ProduceExchange,
        answers: Mapping[TopicPartition, PartitionResult],
    ) -> list[TopicPartition]:
        """None if the outcome was reported as unknown (the client may have resent it), or if the client is lost."""
        assert produce.checks.leveled is not None
        if produce.pending_response.done or self._state.client_closed:
            return []
        safe = produce.checks.leveled.safe
        format_error = Error.UNSUPPORTED_FOR_MESSAGE_FORMAT
        return [key for key, result in answers.items() if result.error_code == format_error and key in safe]


def _has_id_upstream(produce: ProduceExchange, key: TopicPartition) -> bool:
    """It may still be answered 43."""
    leveled = produce.checks.leveled
    return leveled is not None and key in leveled.safe and key not in produce.results
