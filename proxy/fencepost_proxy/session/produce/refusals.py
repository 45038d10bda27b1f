"""What a refusal contains, and when its client gets it.

It reveals the log end. So before the proxy reports it, or any other answer that Kafka did not give, it checks with
Kafka whether this client may write. (If clients log in, it checked that before, see `proofs.py`.) Then it adds the log
start, as Kafka does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fencepost_proxy.errors import Error
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.proofs import PROVES_NOTHING, Proofs
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.pending_responses import inner_response
from fencepost_proxy.session.frames.services import Settings
from fencepost_proxy.session.frames.steps import Resume, Steps, Wait
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import LIST_OFFSETS
from fencepost_proxy.wire.control import decode_response, encode_request_frame, parse_response_header
from fencepost_proxy.wire.produce import PartitionResult
from fencepost_proxy.wire.schema import Message

#: The first version whose response contains the log start offset.
LOG_START_OFFSET_FROM = 5
#: Kafka sends no log start with these errors: the log is on another broker, or does not exist.
_WITHOUT_LOG_START = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.LEADER_NOT_AVAILABLE,
        Error.TOPIC_AUTHORIZATION_FAILED,
        Error.CLUSTER_AUTHORIZATION_FAILED,
        Error.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Error.UNKNOWN_TOPIC_ID,
        Error.INCONSISTENT_TOPIC_ID,
    }
)
#: One offset for each partition; supported by every broker since 0.10.1.
_LIST_OFFSETS_VERSION = 1
#: With these results, the log start is not worth a query.
_REVEALS_NOTHING = PROVES_NOTHING | {Error.NONE, Error.NOT_LEADER_OR_FOLLOWER, Error.REQUEST_TIMED_OUT}
#: Reported without checking with Kafka. What may have been appended is never reported as retriable.
_NEEDS_NO_PROOF = PROVES_NOTHING | {Error.REQUEST_TIMED_OUT}
#: If Kafka hangs, a retriable error is reported after this time without a proof and without a reason.
_REASON_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class Refusals:
    _state: ConnectionState
    _queue: ResponseQueue
    _proofs: Proofs
    _settings: Settings
    _producers: IdempotenceMemory

    def unproved(self, produce: ProduceExchange) -> list[TopicPartition]:
        """The results made by the proxy that reveal something about a topic for which this client has not proved WRITE:
        that it is checked or being expanded, its log end, its contents, or that it is the state topic."""
        return [
            key
            for key, result in produce.results.items()
            if not (self._proofs.has_proved(key.topic) or key.topic in produce.answering.stated)
            and (
                key.topic == self._settings.state_topic
                or (
                    result.error_code not in _NEEDS_NO_PROOF
                    and not (
                        result.error_code == Error.NOT_LEADER_OR_FOLLOWER and self._state.now >= self._state.login_ends
                    )
                    and (
                        key in produce.pending_appends
                        or key in produce.checks.refused_by_policy
                        or (produce.checks.leveled is not None and key in produce.checks.leveled.refused)
                    )
                )
            )
        ]

    def confirm(self, produce: ProduceExchange) -> Steps[None]:
        """Until its client may get its refusals, with their log starts."""
        while self.is_awaited(produce):
            unreported = self.unproved(produce)
            unproved = sorted({key.topic for key in unreported})
            unknown = self._report_log_starts(produce, unproved)
            if not (unproved or unknown):
                return
            if unproved and all(produce.results[key].error_code == Error.NOT_LEADER_OR_FOLLOWER for key in unreported):
                produce.answer_by = min(produce.answer_by, self._state.now + _REASON_SECONDS)
            self._queue.answer_by[produce] = produce.answer_by
            produce.answering.starts_queried |= bool(unknown)
            yield Wait(partial(self._query, produce, unproved, unknown))

    def is_awaited(self, produce: ProduceExchange) -> bool:
        """By its client."""
        return not (self._state.client_closed or produce.pending_response.done or produce.silent)

    def _query(
        self, produce: ProduceExchange, unproved: Sequence[str], unknown: Sequence[TopicPartition], resume: Resume
    ) -> None:
        left, produce.answering.resume = bool(unproved) + bool(unknown), resume

        def answered() -> None:
            nonlocal left
            left -= 1
            if not (left and self.is_awaited(produce)):
                resume()

        if unproved:
            self._prove_write(produce, unproved, answered)
        if unknown:
            self._query_log_starts(produce, unknown, answered)

    def _prove_write(self, produce: ProduceExchange, topics: Sequence[str], answered: Resume) -> None:
        """A refusal reveals the log end or the partition count. Only clients that may write the topic get these, and
        Kafka decides which may.
        """

        def done(answers: dict[str, PartitionResult]) -> None:
            for topic, answer in answers.items():
                self._proved(produce, topic, answer)
            answered()

        partitions = {name: next(k.partition for k in produce.partitions if k.topic == name) for name in topics}
        self._proofs.query_write(produce.request, partitions, done)

    def _proved(self, produce: ProduceExchange, topic: str, answer: PartitionResult) -> None:
        produce.answering.stated |= {topic}
        if answer.error_code not in PROVES_NOTHING:
            return
        for key in list(produce.results):
            if key.topic == topic:
                produce.results.override(key, PartitionResult(partition=key.partition, error_code=answer.error_code))

    def _report_log_starts(self, produce: ProduceExchange, unproved: Collection[str]) -> list[TopicPartition]:
        """Put the log start into refusals (KAFKA-5793), as Kafka does into its own. Returns the partitions whose log
        start is unknown here, if Kafka was not queried for it."""
        if produce.request.api_version < LOG_START_OFFSET_FROM:
            return []
        unknown, queried = [], produce.answering.starts_queried
        memory = self._producers
        for key, result in tuple(produce.results.items()):
            if not result.error_code or result.log_start_offset >= 0 or result.error_code in _WITHOUT_LOG_START:
                continue
            if not self._proofs.has_proved(key.topic):
                reported_later = key.topic in unproved and result.error_code not in _REVEALS_NOTHING
                if reported_later and memory.recent_log_start(key, self._state.now) < 0:
                    unknown.append(key)
                continue
            take_any = queried or result.error_code in _REVEALS_NOTHING
            start = memory.log_start(key) if take_any else memory.recent_log_start(key, self._state.now)
            if start >= 0:
                produce.results.override(key, replace(result, log_start_offset=start))
            elif not take_any:
                unknown.append(key)
        return [] if queried else unknown

    def _query_log_starts(self, produce: ProduceExchange, keys: Sequence[TopicPartition], answered: Resume) -> None:
        """On the client's own connection, so that Kafka applies the client's permissions. Once for each refusal."""
        topics = [
            Message(
                name=name,
                partitions=[Message(partition_index=key.partition, timestamp=-2) for key in keys if key.topic == name],
            )
            for name in dict.fromkeys(key.topic for key in keys)
        ]
        queried = Message(replica_id=-1, topics=topics)
        correlation_id = produce.request.correlation_id
        frame = encode_request_frame(
            LIST_OFFSETS, _LIST_OFFSETS_VERSION, correlation_id, produce.request.client_id, queried
        )

        def on_response(frame: memoryview) -> None:
            offset = parse_response_header(frame, LIST_OFFSETS, _LIST_OFFSETS_VERSION).body_offset
            for topic in decode_response(LIST_OFFSETS, _LIST_OFFSETS_VERSION, frame[offset:]).topics:
                for each in topic.partitions:
                    if not each.error_code:
                        key = TopicPartition(topic.name, each.partition_index)
                        self._producers.record_log_start(key, each.offset, self._state.now)
            answered()

        upstream = inner_response(LIST_OFFSETS, _LIST_OFFSETS_VERSION, correlation_id, on_response)
        self._queue.send_between_frames(upstream, [frame])
