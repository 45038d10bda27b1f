"""Produce requests that concern checked partitions: from the frame, through the sequencers, to the one response.

`ProduceExchange` (`produce_exchange.py`) is the state of one such request. The steps:

1. Each checked partition gets a pending append, or a refusal.
2. The pending appends are submitted, one partition sequencer after the other.
3. Admitted appends are sent, and Kafka's results are reported to their sequencers.
4. The sequencers' final results become one response.

A request may name partitions that do not exist, or that cannot be appended to for long. Neither may delay other clients
more than Kafka would. So partitions absent from metadata are answered before any partition is waited for
(`_waits_for_metadata`), and an admitted append blocks its partition for at most `_BLOCKS_SECONDS` before it is sent
ahead of the rest.

While a request waits for a sequencer, later requests are not read. A broker too handles one request of a connection at
a time. Once sent, a request is one of `_exchanges_in_flight` until its last partition has a result.

A refusal reveals the log end. So before the proxy reports it, or any other answer that Kafka did not give, it checks
with Kafka whether this client may write (`_prove_write`). If clients log in, it checks before the first submission
(`proofs.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from fencepost_policies.append import Check, Refusal
from fencepost_proxy.errors import ClientProtocolError, Error, LimitError, UpstreamProtocolError
from fencepost_proxy.sequencer.events import Answered, Canceled, Lost, PendingAppend, Sent, Submitted
from fencepost_proxy.sequencer.state import sent_after
from fencepost_proxy.session.barriers import AtBarriers
from fencepost_proxy.session.connection import INT32
from fencepost_proxy.session.cutter import CutterState
from fencepost_proxy.session.levels import MESSAGE_FORMAT, NOT_PERMITTED, downgraded, leveled_produce
from fencepost_proxy.session.messages import Count, TopicStale, ToSequencer
from fencepost_proxy.session.partition_counts import pipeline_of
from fencepost_proxy.session.pending_responses import Answer, Failed, PendingResponse
from fencepost_proxy.session.produce_exchange import (
    NOTHING_DENIED,
    AppendDraft,
    ProduceExchange,
    make_pending_append,
    refused,
)
from fencepost_proxy.session.producer_ids import refuse_producer_id
from fencepost_proxy.session.proofs import PROVES_NOTHING
from fencepost_proxy.session.reading import PARTITIONS_MAX, TOPICS_AT_ONCE, ManyPartitions, Readings
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import LIST_OFFSETS, PRODUCE
from fencepost_proxy.wire.control import decode_response, encode_request_frame, parse_response_header
from fencepost_proxy.wire.primitives import split_tags
from fencepost_proxy.wire.produce import (
    LEVEL_TAG,
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    encode_produce_request,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
)
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.shortcuts import names_producer

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
#: Identifies topics by id: a fenced append cannot reach a topic that was deleted and recreated.
PRODUCE_BY_ID = 13
#: Errors that show that the known topic id or leaders are outdated.
_STALE = frozenset({Error.UNKNOWN_TOPIC_OR_PARTITION, Error.NOT_LEADER_OR_FOLLOWER})
#: Clients give up at `timeout_ms`; an unknown outcome is reported a little earlier.
_ANSWER_BY = 0.9
#: With these results, the log start is not worth a query.
_REVEALS_NOTHING = PROVES_NOTHING | {Error.NONE, Error.NOT_LEADER_OR_FOLLOWER, Error.REQUEST_TIMED_OUT}
#: Reported without checking with Kafka. What may have been appended is never reported as retriable.
_NEEDS_NO_PROOF = PROVES_NOTHING | {Error.REQUEST_TIMED_OUT}
_LOGIN_IS_OVER = "the client's login expired"
#: If Kafka hangs, a retriable error is reported after this time without a proof and without a reason.
_REASON_SECONDS = 1.0
#: How long an admitted append may block its partition while other partitions of its request are waited for.
_BLOCKS_SECONDS = 0.02


class CheckedProduce(AtBarriers):
    """Its state is the connection's: `_waiting_exchange`, `_exchanges_in_flight` and `_answer_by`, the deadlines of
    answers."""

    __slots__ = ()

    # ---- a request, and its pending appends

    def _produce(
        self,
        frame: memoryview,
        now: float,
        denied: Mapping[str, int] = NOTHING_DENIED,
        readings: Readings | None = None,
    ) -> None:
        """`denied` – topics that the client may not write, with Kafka's errors, if already checked. `readings` – its
        parsed batches, if that took long."""
        services = self._services
        try:
            request = parse_produce_request(frame, partitions_max=PARTITIONS_MAX)
        except LimitError:
            many = ManyPartitions(frame)
            self._read_elsewhere(many.read, lambda: self._produce_many(frame, many))
            return
        self.client_id = request.client_id
        for topic in request.topics:
            policy = services.policy(topic.name)
            if policy is not None and (policy.is_checked or policy.counted):
                continue  # refused one by one
            if any(names_producer(data.records, services.shared_producer_ids) for data in topic.partitions):
                raise refuse_producer_id()
        if (
            not self._primary
            and services.fresh(now)
            and any(self._needs_primary(services.policy(t.name)) for t in request.topics)
        ):
            self._move_to_primary(frame)
            return
        if request.transactional_id is not None and self._is_to_be_proved(request):

            def done(allowed: bool) -> None:
                if allowed:
                    self._produce(frame, self._now)
                else:
                    self._deny_append(request)

            self._prove_use(request.transactional_id, request.correlation_id, request.client_id, done)
            return
        answer_by = due_by(now, request.timeout_ms)
        if services.clients_log_in and services.fresh(now):
            unproved = self._unproved(self._concerned(request, denied))
            if unproved:
                self._prove_write_first(
                    request,
                    unproved,
                    answer_by,
                    lambda reported: self._produce(frame, self._now, {**denied, **reported}),
                )
                return
        if readings is None and services.fresh(now):
            readings = self._requested_readings(request, denied, now)
            if not readings.here():
                self._read_elsewhere(readings.elsewhere, lambda: self._produce(frame, self._now, denied, readings))
                return
        response_slot = PendingResponse(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        starts_at = self._received_bytes - self._client.unread_bytes - len(frame)
        exchange = ProduceExchange(
            request,
            starts_at=starts_at,
            answer_by=answer_by,
            received_at=now,
            submitted_at=now,
            denied=denied,
            readings=readings,
        )
        if self._failed_pipelines:
            # Whatever is read from here on was sent with knowledge of these.
            self._failed_pipelines = {c: f for c, f in self._failed_pipelines.items() if f.after_bytes > starts_at}
        if not services.fresh(now):
            self._fail_closed(response_slot, exchange)
        else:
            self._check_levels(exchange, now)
            self._deny_topics(exchange)
            if not self._waits_before_sequencers(exchange, now):
                self._take_drafts_inside_barriers(exchange, now)
        # Only now: an unreadable request raises before this, and leaves no pending response with reserved memory.
        response_slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        if request.acks != 0:
            self._to_client.append(response_slot)
        if not (
            exchange.at_barrier or exchange.pending_appends or exchange.results or exchange.counted or exchange.leveled
        ):
            self._forward_unread(response_slot, request, frame)
            return
        self._waiting_exchange, self._waiting_response = exchange, response_slot
        if not exchange.at_barrier:
            self._pipelines_fail_at_barrier(response_slot, exchange)
            self._to_sequencers(exchange, now)

    def _requested_readings(self, request: ProduceRequest, denied: Mapping[str, int], now: float) -> Readings:
        """Read its batches, as far as the decisions about them need it."""
        services = self._services
        readings = Readings(services.header_names, services.decompressed_bytes_max, services.read_here_bytes_max)
        request, _ = leveled_produce(request, services.policy, now)  # may remove producer ids
        for topic in request.topics:
            policy = services.policy(topic.name)
            if policy is None or topic.name in denied or topic.name == services.state_topic:
                continue
            if policy.is_checked or policy.count_check is not Check.OFF:
                placed = policy.partitioner is not None and services.in_grace_period(topic.name, now)
                count = services.partition_count(topic.name, now) if placed else None
                for data in topic.partitions:
                    readings.want(TopicPartition(topic.name, data.partition), data.records, policy, count)
        return readings

    def _produce_many(self, frame: memoryview, many: ManyPartitions) -> None:
        """It has too many partitions to be read. Check only its topics, some at a time."""
        services, request = self._services, many.stated()
        if not services.fresh(self._now):
            self._close("the topic configs are not (re)read yet, and a request has many partitions", None)
            return
        if any(instance_id == LEVEL_TAG for instance_id, _ in split_tags(request.header_tags)):
            raise _too_many("it states an idempotence level")
        end = many.probed_at + TOPICS_AT_ONCE
        for name in many.topics[many.probed_at : end]:
            if name == services.state_topic or services.policy(name) is not None:
                raise _too_many(f"topic {name} is one that this proxy checks")
        many.probed_at = end
        if end < len(many.topics):
            self._read_elsewhere(lambda: None, lambda: self._produce_many(frame, many))
            return
        self.client_id = request.client_id
        response_slot = PendingResponse(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        response_slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        if request.acks != 0:
            self._to_client.append(response_slot)
        self._forward_unread(response_slot, request, frame)

    def _check_barrier(self, now: float) -> None:
        """A barrier opened, metadata arrived, or time has passed: check again whether the waiting request may enter."""
        exchange = self._waiting_exchange
        if exchange is None or not exchange.at_barrier:
            return
        if not self._services.fresh(now):
            exchange.at_barrier = False
            assert self._waiting_response is not None
            self._fail_closed(self._waiting_response, exchange)
        elif self._waits_before_sequencers(exchange, now):
            return
        else:
            self._take_drafts_inside_barriers(exchange, now)
        assert self._waiting_response is not None
        self._pipelines_fail_at_barrier(self._waiting_response, exchange)
        self._to_sequencers(exchange, now)

    def _waits_before_sequencers(self, exchange: ProduceExchange, now: float) -> bool:
        return (
            self._waits_for_metadata(exchange, now)
            or self._waits_to_go_without(exchange, now)
            or self._waits_at_barrier(exchange, now)
        )

    def _waits_for_metadata(self, exchange: ProduceExchange, now: float) -> bool:
        """False: all its partitions are known to exist, or are refused.

        Metadata may be older than an expansion: a partition is absent only if metadata requested after the request's
        arrival does not show it.
        """
        services = self._services
        absent: dict[TopicPartition, PartitionData] = {}
        stale: dict[str, None] = {}
        for topic in exchange.request.topics:
            policy = None if topic.name in exchange.denied else services.policy(topic.name)
            if policy is None or not policy.is_checked or topic.name == services.state_topic:
                continue
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                exists = key in exchange.results or services.partition_exists(key, exchange.received_at)
                if exists is None:
                    stale[topic.name] = None
                if not exists:
                    absent[key] = data
        exchange.at_barrier = bool(stale) and now < exchange.received_at + self._wait_seconds(
            exchange.request.timeout_ms
        )
        if exchange.at_barrier:
            self._commands += [TopicStale(topic) for topic in stale]
            return True
        for key, data in absent.items():
            if key.topic in stale:
                message = f"TRY_AGAIN topic={key.topic}: metadata could not be read in time"
                self._refuse(exchange, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
            else:
                exchange.results[key] = PartitionResult(key.partition, Error.UNKNOWN_TOPIC_OR_PARTITION)
                self._commands.append(Count("refusal", "unknown_partition"))
            exchange.misread.append((key, pipeline_of(data)))
            if exchange.leveled is not None:
                exchange.leveled.safe.discard(key)
        exchange.sequencer_seconds = max(exchange.sequencer_seconds, now - exchange.received_at)
        return False

    def _pipelines_fail_at_barrier(self, response_slot: PendingResponse, exchange: ProduceExchange) -> None:
        """A refusal before the sequencer fails the pipeline as the sequencer would: later appends leave a gap."""
        if exchange.leveled is not None:
            for key in exchange.leveled.tries_again:
                pipeline_key = (key, exchange.leveled.producers[key])
                self._failed_pipelines[pipeline_key] = Failed(exchange.results[key])
                response_slot.pipeline_keys.append(pipeline_key)
        for pipeline_key in exchange.misread:
            self._failed_pipelines[pipeline_key] = Failed(exchange.results[pipeline_key[0]])
            response_slot.pipeline_keys.append(pipeline_key)
        for topic in exchange.request.topics if exchange.count_refused or exchange.denied else ():
            policy = self._services.policy(topic.name)
            for data in topic.partitions if policy is not None and policy.is_checked else ():
                key = TopicPartition(topic.name, data.partition)
                if key in exchange.count_refused or topic.name in exchange.denied:
                    pipeline_key = (key, pipeline_of(data))
                    self._failed_pipelines[pipeline_key] = Failed(exchange.results[key])
                    response_slot.pipeline_keys.append(pipeline_key)

    def _to_sequencers(self, exchange: ProduceExchange, now: float) -> None:
        exchange.to_submit = [exchange.pending_appends[key] for key in sorted(exchange.pending_appends, reverse=True)]
        self._next_exchange(now)

    def _forward_unread(self, response_slot: PendingResponse, request: ProduceRequest, frame: memoryview) -> None:
        """It was collected because it might contain a checked topic; it does not."""
        if request.acks != 0:
            self._to_client.pop()
            self._services.release(response_slot.reserved_bytes)
            response_slot = self._produce_response(request.api_version, request.correlation_id)
            self._to_client.append(response_slot)
            self._from_upstream.append(response_slot)
        else:
            self._services.release(response_slot.reserved_bytes)
        self._upstream_out += [INT32.pack(len(frame)), frame]
        self._services.forwarded(0.0)

    def _concerned(self, request: ProduceRequest, denied: Mapping[str, int]) -> dict[str, int]:
        """The topics that it may have to wait for, with one partition each."""
        services = self._services
        return {
            topic.name: topic.partitions[0].partition
            for topic in request.topics
            if topic.partitions
            and topic.name not in denied
            and topic.name != services.state_topic
            and services.policy(topic.name) is not None
        }

    def _deny_topics(self, exchange: ProduceExchange) -> None:
        """Kafka's denial is final: no level, barrier or sequencer is involved."""
        for key in exchange.partitions() if exchange.denied else ():
            error_code = exchange.denied.get(key.topic)
            if error_code is not None:
                exchange.results[key] = PartitionResult(partition=key.partition, error_code=error_code)
                if exchange.leveled is not None:
                    exchange.leveled.safe.discard(key)

    def _fail_closed(self, response_slot: PendingResponse, exchange: ProduceExchange) -> None:
        """The topic configs are outdated, so any topic may be checked: refuse all appends with a retriable error.

        Their pipelines fail too, as at a sequencer:

        1. A, expecting 15, arrives while the configs are outdated, and is refused.
        2. B, expecting 16, was sent after A. It arrives when the configs are current again.
        3. Meanwhile another writer has appended at 15. B must not be appended after that record.
        """
        message = "TRY_AGAIN the proxy has not (re)read its topic configs yet"
        for topic in exchange.request.topics:
            for data in topic.partitions:
                result = PartitionResult(
                    partition=data.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                )
                key = TopicPartition(topic.name, data.partition)
                pipeline_key = (key, pipeline_of(data))
                exchange.results[key] = result
                self._failed_pipelines[pipeline_key] = Failed(result)
                response_slot.pipeline_keys.append(pipeline_key)
        self._commands.append(Count("refusal", "not_ready"))

    def _take_drafts_inside_barriers(self, exchange: ProduceExchange, now: float) -> None:
        try:
            self._take_drafts(exchange, now)
        except ClientProtocolError:
            self._leave_barrier(exchange, unsent=True)
            raise

    # ---- levels of idempotence

    def _check_levels(self, exchange: ProduceExchange, now: float) -> None:
        """Apply the levels of its topics and its own: refuse batches, and note those that may be sent without ids."""
        deadline = now + self._wait_seconds(exchange.request.timeout_ms)
        exchange.request, exchange.leveled = leveled_produce(exchange.request, self._policy_for(exchange), deadline)
        if exchange.leveled is not None:
            for key, refusal in exchange.leveled.refused.items():
                self._refuse(exchange, key, refusal)
            stripped = [key for key in exchange.leveled.stripped if not self._is_after_a_failed(exchange, key)]
            self._commands += downgraded(stripped, NOT_PERMITTED)

    def _waits_to_go_without(self, exchange: ProduceExchange, now: float) -> bool:
        """False: no batch is sent without its producer id, or all that are may be sent now. Order: see `levels.py`."""
        leveled = exchange.leveled
        if leveled is None or not leveled.safe:
            return False
        leveled.safe -= {key for key in leveled.safe if self._is_after_a_failed(exchange, key)}
        without = leveled.goes_without(self._services.idempotence, now)
        behind = [
            key
            for key in without
            if any(self._has_id_upstream(each, key) for each in self._exchanges_in_flight.values())
        ]
        if behind and now < leveled.deadline:
            exchange.at_barrier = leveled.waits = True
            return True
        if leveled.waits:
            exchange.at_barrier = leveled.waits = False
            exchange.sequencer_seconds = now - exchange.received_at
        for key in without:
            if key in behind:
                message = f"TRY_AGAIN topic={key.topic} partition={key.partition}: earlier batches are not answered yet"
                self._refuse(exchange, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "level_unknown", message))
                leveled.safe.discard(key)
                leveled.tries_again.add(key)
            else:
                leveled.give_up_id(key)
        self._commands += downgraded(set(without) & leveled.without, MESSAGE_FORMAT)
        return False

    def _is_after_a_failed(self, exchange: ProduceExchange, key: TopicPartition) -> bool:
        """Whether it is refused because an earlier batch failed, which its client sends again first."""
        assert exchange.leveled is not None
        failed = self._failed_pipelines.get((key, exchange.leveled.producers[key]))
        if failed is None or exchange.starts_at >= failed.after_bytes:
            return False
        message = f"PREDECESSOR_FAILED {failed.result.error_message}"
        self._refuse(exchange, key, Refusal(failed.result.error_code, "behind_refused", message))
        return True

    @staticmethod
    def _has_id_upstream(exchange: ProduceExchange, key: TopicPartition) -> bool:
        return exchange.leveled is not None and exchange.leveled.has_id_upstream(key) and key not in exchange.results

    def _send_without(
        self, response_slot: PendingResponse, exchange: ProduceExchange, keys: Sequence[TopicPartition], now: float
    ) -> None:
        """Kafka accepts no producer ids there, and appended nothing: resend these batches without them."""
        assert exchange.leveled is not None
        for key in keys:
            self._services.idempotence.refused(key.topic, now)
            exchange.leveled.give_up_id(key)
        self._commands += downgraded(keys, MESSAGE_FORMAT)
        for part in self._by_topic_id(exchange.request_without(keys)):
            self._probes.append((self._response_of_part(response_slot, exchange, part), encode_produce_request(part)))
            if exchange.counted is not None:
                exchange.counted.was_sent()
        self._send_probes()

    def _record_acknowledged(self, pending: PendingAppend, base_offset: int) -> None:
        """For an append that kept its producer's id."""
        append = pending.append
        if append.producer_id >= 0:
            last_offset = base_offset + append.record_count - 1
            self._services.idempotence.acknowledged(pending.partition, append.producer_id, last_offset)

    def _reported(self, exchange: ProduceExchange, key: TopicPartition, result: PartitionResult) -> PartitionResult:
        """Kafka's result, as reported to the client: 45 only if acknowledged records are lost.

        If the log starts after everything acknowledged to its producer, Kafka has only forgotten the producer. Then the
        error is 59, and producers restart their sequences. It is reported once: a client that resends the same batch
        after it would do so indefinitely (kafka-python 3).
        """
        memory = self._services.idempotence
        memory.record_log_start(key, result.log_start_offset, self._now)
        pending = exchange.pending_appends.get(key)
        if pending is not None:
            append = pending.append
            batch, record_count = (append.producer_id, append.producer_epoch, append.base_sequence), append.record_count
            if pending.fence is not None:
                return result
        elif exchange.leveled is not None and key in exchange.leveled.own:
            batch, record_count = exchange.leveled.own[key]
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

    def _take_drafts(self, exchange: ProduceExchange, now: float) -> None:
        """A pending append for each checked partition, or a refusal if its batch cannot be one."""
        services = self._services
        request = exchange.request
        wait_seconds = self._wait_seconds(request.timeout_ms)
        refused_before = frozenset(exchange.results)
        for topic in request.topics:
            if topic.name == services.state_topic:
                self._deny(exchange, topic)
                continue
            policy = services.policy(topic.name)
            if policy is None or not policy.is_checked:
                continue
            draft = self._draft(policy, request.transactional_id, now, now + wait_seconds)
            for data in topic.partitions:
                if TopicPartition(topic.name, data.partition) not in refused_before:
                    self._take_draft(exchange, draft, topic, data)

    def _draft(self, policy: TopicPolicy, transactional_id: str | None, now: float, deadline: float) -> AppendDraft:
        services = self._services
        return AppendDraft(
            self.connection,
            policy,
            services.header_names,
            services.decompressed_bytes_max,
            services.shared_producer_ids,
            now,
            deadline,
            services.instance_id,
            self._opened_at,
            services.alone(now),
            services.taken_over(now),
            transactional_id,
        )

    def _deny(self, exchange: ProduceExchange, topic: TopicData) -> None:
        """The proxy's state topic: a client that wrote to it could switch off checks."""
        message = f"{topic.name} is the proxy's state topic; it is closed to clients"
        for data in topic.partitions:
            refusal = Refusal(Error.TOPIC_AUTHORIZATION_FAILED, "state_topic", message)
            self._refuse(exchange, TopicPartition(topic.name, data.partition), refusal)

    def _take_draft(self, exchange: ProduceExchange, draft: AppendDraft, topic: TopicData, data: PartitionData) -> None:
        key = TopicPartition(topic.name, data.partition)
        if key in exchange.pending_appends or key in exchange.results:
            raise ClientProtocolError(f"a Produce request names {key} twice")
        assert exchange.readings is not None
        pending = make_pending_append(draft, key, data, exchange.readings.of(key, data.records, draft.policy))
        if isinstance(pending, Refusal):
            self._refuse(exchange, key, pending)
            exchange.misread.append((key, pipeline_of(data)))
            return
        pending.leader_epoch = self._services.leader_epoch(key)
        transactional_id = draft.transactional_id
        if pending.append.transactional and transactional_id is not None:
            pending.has_partitions = self._services.transactions.owns(transactional_id, *pending.producer)
            if self._is_ending(transactional_id, pending):
                where = f"topic={topic.name} partition={data.partition}"
                message = f"TRY_AGAIN {where}: a commit of its transaction is being sent to Kafka"
                self._refuse(exchange, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
                return
        if exchange.silent and pending.append.expected_base_offset is not None:
            raise ClientProtocolError(f"an expected offset for {key} with acks=0: a mismatch could not be reported")
        if not self._fails_with_its_pipeline(exchange, pending):
            self._failed_pipelines.pop((key, pending.pipeline), None)
            exchange.pending_appends[key] = pending

    def _fails_with_its_pipeline(self, exchange: ProduceExchange, pending: PendingAppend) -> bool:
        for pipeline in pending.follows if self._failed_pipelines else ():
            failed = self._failed_pipelines.get((pending.partition, pipeline))
            if failed is not None and exchange.starts_at < failed.after_bytes:
                reported = sent_after(pending, failed.result)
                self._refuse(
                    exchange,
                    pending.partition,
                    Refusal(reported.error_code, "behind_refused", reported.error_message or ""),
                )
                return True
        return False

    def _refuse(self, exchange: ProduceExchange, key: TopicPartition, refusal: Refusal) -> None:
        exchange.results[key] = refused(key, refusal)
        self._commands.append(Count("refusal", refusal.reason, key))

    # ---- submission, one partition after the other

    def _next_exchange(self, now: float) -> None:
        exchange = self._waiting_exchange
        assert exchange is not None
        while exchange.to_submit and not (exchange.refused and self._services.refuse_whole_requests):
            pending = exchange.to_submit.pop()
            if self._fails_with_its_pipeline(exchange, pending):
                continue  # failed while it waited for another sequencer
            if now >= exchange.answer_by:
                where = f"topic={pending.partition.topic} partition={pending.partition.partition}"
                message = f"TRY_AGAIN {where}: the partitions before it took too long"
                self._refuse(exchange, pending.partition, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
                assert self._waiting_response is not None
                self._pipeline_failed(self._waiting_response, pending, exchange.results[pending.partition])
                continue
            exchange.waiting_for, exchange.submitted_at = pending, now
            if pending.append.transactional:
                self._submits(pending)
            self._commands.append(ToSequencer(pending, Submitted(pending)))
            return
        exchange.waiting_for = None
        self._send_exchange(exchange, now)

    def _append_admitted(self, pending: PendingAppend, now: float) -> None:
        exchange = self._waiting_exchange
        if exchange is not None and pending is exchange.waiting_for:
            if not exchange.admitted:
                exchange.admitted_at = now
            exchange.admitted.append(pending)
            exchange.sequencer_seconds += now - exchange.submitted_at
            self._services.sequencer_waited(now - exchange.submitted_at)
            if exchange.alone:
                exchange.alone = False
                self._resubmit_admitted(exchange)
            self._next_exchange(now)
            return
        response_slot, sent = self._sent_exchange_of(pending)
        if response_slot is None or sent is None or response_slot.done or self.client_closed or self.upstream_closed:
            self._commands.append(ToSequencer(pending, Canceled(pending)))
            return
        # Kafka refused its fence, the sequencer read the log, and the expected offset still holds: resend it.
        if self._without_id(sent, [pending]):
            self._not_sent(response_slot, sent, pending, f"the id of topic {pending.partition.topic} is unknown")
            self._finish_exchange(response_slot, sent)
            return
        if self._client.state is CutterState.PASSING:
            # A frame of the client is half upstream, and ends when the client likes. Nothing can be sent in between,
            # and the sequencer cannot wait for that.
            self._not_sent(response_slot, sent, pending, "the client's next request is being relayed")
            self._finish_exchange(response_slot, sent)
            return
        if now >= self._login_ends:
            self._not_sent(response_slot, sent, pending, _LOGIN_IS_OVER)
            self._finish_exchange(response_slot, sent)
            return
        self._forward(response_slot, sent, sent.request_for(pending))
        if pending.append.transactional:
            self._sends(pending)
        self._commands.append(ToSequencer(pending, Sent(pending)))

    def _append_completed(
        self, pending: PendingAppend, result: PartitionResult, reason: str | None, now: float
    ) -> None:
        if reason is not None:
            expected = pending.append.expected_base_offset
            self._commands.append(Count("refusal", reason, pending.partition, expected, result.base_offset))
        self._services.idempotence.record_log_start(pending.partition, result.log_start_offset, now)
        if pending.append.transactional:
            self._was_appended(pending, result)
        exchange = self._waiting_exchange
        if exchange is not None and pending is exchange.waiting_for:
            exchange.alone = False
            exchange.results[pending.partition] = result
            if self._waiting_response is not None:
                self._pipeline_failed(self._waiting_response, pending, result)
            self._next_exchange(now)
            return
        response_slot, sent = self._sent_exchange_of(pending)
        if response_slot is not None and sent is not None:
            sent.results.setdefault(pending.partition, result)
            self._pipeline_failed(response_slot, pending, result)
            self._finish_exchange(response_slot, sent)

    def _pipeline_failed(self, response_slot: PendingResponse, pending: PendingAppend, result: PartitionResult) -> None:
        if result.error_code and not response_slot.done:
            pipeline_key = (pending.partition, pending.pipeline)
            self._failed_pipelines[pipeline_key] = Failed(result)
            response_slot.pipeline_keys.append(pipeline_key)

    def _sent_exchange_of(self, pending: PendingAppend) -> tuple[PendingResponse, ProduceExchange] | tuple[None, None]:
        self._disable_fast_path()
        for response_slot, exchange in self._exchanges_in_flight.items():
            if exchange.pending_appends.get(pending.partition) is pending:
                return response_slot, exchange
        return None, None

    def _disable_fast_path(self) -> None:
        """See `FastPath`: requests sent by it become `_exchanges_in_flight`."""
        raise NotImplementedError

    # ---- sending

    def _send_exchange(self, exchange: ProduceExchange, now: float) -> None:
        """All appends are decided: forward the admitted ones, answer the refused ones."""
        if exchange.refused and self._services.refuse_whole_requests:
            self._refuse_the_rest(exchange)
        response_slot = self._waiting_response
        assert response_slot is not None
        first = not exchange.sent
        sent = self._send_admitted(response_slot, exchange, now)
        if exchange.to_submit:
            self._next_exchange(now)
            return
        self._waiting_exchange, self._waiting_response = None, None
        self._exchanges_in_flight[response_slot] = exchange
        if exchange.sent:
            self._answer_by[response_slot] = exchange.answer_by
        if sent and first:
            self._services.forwarded(max(0.0, now - exchange.received_at - exchange.sequencer_seconds))
        if not sent:
            self._made_here += not exchange.sent
            self._finish_exchange(response_slot, exchange)

    def _send_admitted(self, response_slot: PendingResponse, exchange: ProduceExchange, now: float) -> bool:
        """Send what is admitted, and what needs no admission, in one request; False if there is nothing."""
        if self._failed_pipelines:
            self._return_after_failed(exchange)
        if exchange.admitted and now >= self._login_ends:
            self._return_unsent(exchange)
        if any(not self._services.may_send(pending, now) for pending in exchange.admitted):
            # An admission without a confirmed fence expires.
            self._resubmit_admitted(exchange)
            return False
        for pending in self._without_id(exchange, exchange.admitted):
            exchange.admitted.remove(pending)
            self._not_sent(response_slot, exchange, pending, f"the id of topic {pending.partition.topic} is unknown")
        request = exchange.upstream_request()
        if request is None:
            return False
        exchange.sent.update(exchange.unsent())
        for pending in exchange.admitted:
            if pending.append.transactional:
                self._sends(pending)
            self._commands.append(ToSequencer(pending, Sent(pending)))
        exchange.admitted = []
        self._forward(response_slot, exchange, request)
        return True

    def _send_ahead(self, now: float) -> None:
        """Send admitted appends before the rest of their request, which takes too long.

        Not if a refusal of the rest would refuse these too (`refusal_scope = "request"`). Then they are returned until
        the slow partition admits its append, and after that all are submitted in order.
        """
        exchange, response_slot = self._waiting_exchange, self._waiting_response
        if exchange is None or response_slot is None or not exchange.admitted or exchange.waiting_for is None:
            return
        if now < exchange.admitted_at + _BLOCKS_SECONDS:
            return
        if self._services.refuse_whole_requests:
            exchange.alone = True
            self._resubmit_admitted(exchange)
            return
        if self._send_admitted(response_slot, exchange, now):
            self._exchanges_in_flight[response_slot] = exchange

    def _resubmit_admitted(self, exchange: ProduceExchange) -> None:
        for pending in exchange.admitted:
            self._commands.append(ToSequencer(pending, Canceled(pending)))
        exchange.to_submit = sorted([*exchange.to_submit, *exchange.admitted], key=lambda t: t.partition, reverse=True)
        exchange.admitted = []

    def _return_after_failed(self, exchange: ProduceExchange) -> None:
        """Cancel admitted appends whose pipeline has failed meanwhile:

        1. B is submitted. Its sequencer completes A with an error and admits B before this session has processed A's
           result.
        2. The session gets both results before it sends B, but for the sequencer B no longer follows A.
        """
        for pending in tuple(exchange.admitted):
            if self._fails_with_its_pipeline(exchange, pending):
                exchange.admitted.remove(pending)
                self._commands.append(ToSequencer(pending, Canceled(pending)))

    def _return_unsent(self, exchange: ProduceExchange) -> None:
        """The client's login expired while it waited. Kafka would close the connection without a result.

        The client retries: on a connection that ends here, or after it has logged in again.
        """
        response_slot = self._waiting_response
        assert response_slot is not None
        for key in list(exchange.unsent()):
            exchange.results[key] = PartitionResult(
                partition=key.partition,
                error_code=Error.NOT_LEADER_OR_FOLLOWER,
                error_message=f"TRY_AGAIN {_LOGIN_IS_OVER}",
            )
        for pending in exchange.admitted:
            self._pipeline_failed(response_slot, pending, exchange.results[pending.partition])
            self._commands.append(ToSequencer(pending, Canceled(pending)))
            self._commands.append(Count("refusal", "try_again", pending.partition))
        exchange.admitted = []

    def _forward(self, response_slot: PendingResponse, exchange: ProduceExchange, request: ProduceRequest) -> None:
        """Send (a part of) a request upstream; `response_slot` is the client's pending response."""
        for part in self._by_topic_id(request):
            self._forward_part(response_slot, exchange, part)

    def _forward_part(self, response_slot: PendingResponse, exchange: ProduceExchange, request: ProduceRequest) -> None:
        for topic in request.topics:
            for data in topic.partitions:
                pending = exchange.pending_appends.get(TopicPartition(topic.name, data.partition))
                if pending is not None:
                    pending.topic_id = topic.topic_id
        upstream = self._response_of_part(response_slot, exchange, request)
        if exchange.counted is not None:
            exchange.counted.was_sent()
        self._from_upstream.append(upstream)
        self._upstream_out += encode_produce_request(request)

    def _response_of_part(
        self, response_slot: PendingResponse, exchange: ProduceExchange, request: ProduceRequest
    ) -> PendingResponse:
        names: dict[UUID | None, str] = {topic.topic_id: topic.name for topic in request.topics}
        queried = {TopicPartition(topic.name, data.partition) for topic in request.topics for data in topic.partitions}
        return self._upstream_response(response_slot, exchange, request.api_version, names=names, queried=queried)

    def _upstream_response(
        self,
        response_slot: PendingResponse,
        exchange: ProduceExchange,
        version: int,
        *,
        names: dict[UUID | None, str],
        queried: set[TopicPartition],
    ) -> PendingResponse:
        """For a part sent upstream; `response_slot` is the client's pending response."""
        upstream = PendingResponse(PRODUCE, version, response_slot.correlation_id, Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            self._exchange_answered(response_slot, exchange, parse_produce_response(frame, version), names, queried)

        upstream.on_response = on_response
        return upstream

    def _refuse_the_rest(self, exchange: ProduceExchange) -> None:
        """`refusal_scope = "request"`, KIP-27's literal reading: one mismatch refuses the whole request."""
        for pending in exchange.admitted:
            self._commands.append(ToSequencer(pending, Canceled(pending)))
        exchange.admitted, exchange.to_submit = [], []
        first = next(exchange.refusals())
        response_slot = self._waiting_response
        assert response_slot is not None
        for key in exchange.partitions():
            if key not in exchange.results:
                message = f"WHOLE_REQUEST_REFUSED topic={key.topic} partition={key.partition}: {first.error_message}"
                result = exchange.results[key] = PartitionResult(
                    partition=key.partition, error_code=first.error_code, error_message=message
                )
                if key in exchange.pending_appends:
                    self._pipeline_failed(response_slot, exchange.pending_appends[key], result)

    def _goes_by_id(self, request: ProduceRequest) -> bool:
        """By id if the brokers can: a topic that was deleted and recreated is another topic.

        Not for transactions: versions from 12 on mean transactions v2, which the client must choose.
        """
        return request.transactional_id is None and self._services.produce_version_max() >= PRODUCE_BY_ID

    def _by_topic_id(self, request: ProduceRequest) -> list[ProduceRequest]:
        """One request by id; and one by name for topics without checks whose ids are unknown here."""
        if not self._goes_by_id(request):
            return [request]
        ids = {topic.name: self._services.topic_id(topic.name) for topic in request.topics}
        known = tuple(replace(topic, topic_id=ids[topic.name]) for topic in request.topics if ids[topic.name])
        others = tuple(topic for topic in request.topics if not ids[topic.name])
        parts = []
        if known:
            parts.append(replace(request, api_version=PRODUCE_BY_ID, topics=known))
        if others:
            parts.append(replace(request, topics=others))
        return parts

    def _without_id(self, exchange: ProduceExchange, admitted: Sequence[PendingAppend]) -> list[PendingAppend]:
        """Admitted appends that must be sent by id, and whose topic has no known id: it was deleted, or not looked up
        yet.

        Those without expected offset that keep their producer id may be sent by name, as without the proxy.
        """
        if not self._goes_by_id(exchange.request):
            return []
        return [
            pending
            for pending in admitted
            if (pending.fence is not None or pending.append.expected_base_offset is not None)
            and self._services.topic_id(pending.partition.topic) is None
        ]

    def _not_sent(
        self, response_slot: PendingResponse, exchange: ProduceExchange, pending: PendingAppend, why: str
    ) -> None:
        message = f"TRY_AGAIN {why}"
        result = exchange.results[pending.partition] = PartitionResult(
            partition=pending.partition.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
        )
        self._pipeline_failed(response_slot, pending, result)
        self._commands += [
            TopicStale(pending.partition.topic),
            Count("refusal", "try_again", pending.partition),
            ToSequencer(pending, Canceled(pending)),
        ]

    # ---- results

    def _exchange_answered(
        self,
        response_slot: PendingResponse,
        exchange: ProduceExchange,
        response: ProduceResponse,
        names: dict[UUID | None, str],
        queried: set[TopicPartition],
    ) -> None:
        exchange.throttle_time_ms = response.throttle_time_ms
        response_slot.answered_at = self._now
        answers = {
            TopicPartition(topic.name or names.get(topic.topic_id, ""), result.partition): result
            for topic in response.topics
            for result in topic.partitions
        }
        if answers.keys() != queried:
            raise UpstreamProtocolError(f"the broker answered for {sorted(answers)} instead of {sorted(queried)}")
        if exchange.counted is not None:
            exchange.counted.was_answered()
        again = [] if exchange.leveled is None else self._to_send_without(response_slot, exchange, answers)
        for key, result in answers.items():
            if key not in again:
                self._partition_answered(exchange, key, self._reported(exchange, key, _for_names(result)))
        if again:
            self._send_without(response_slot, exchange, again, self._now)
        self._finish_exchange(response_slot, exchange)
        waiting = self._waiting_exchange
        if waiting is not None and waiting.leveled is not None and waiting.leveled.waits:
            self._check_barrier(self._now)

    def _to_send_without(
        self,
        response_slot: PendingResponse,
        exchange: ProduceExchange,
        answers: Mapping[TopicPartition, PartitionResult],
    ) -> list[TopicPartition]:
        """None if the outcome was reported as unknown (the client may have resent it), or if the client is lost."""
        assert exchange.leveled is not None
        if response_slot.done or self.client_closed:
            return []
        safe = exchange.leveled.safe
        format_error = Error.UNSUPPORTED_FOR_MESSAGE_FORMAT
        return [key for key, result in answers.items() if result.error_code == format_error and key in safe]

    def _partition_answered(self, exchange: ProduceExchange, key: TopicPartition, result: PartitionResult) -> None:
        self._record_proof(key.topic, result.error_code)
        if result.error_code in _STALE:
            self._commands.append(TopicStale(key.topic))
        pending = exchange.pending_appends.get(key)
        if pending is not None and key in exchange.sent:
            pending.may_write = self._has_proved(key.topic)
            if result.error_code:
                self._services.kafka_refused(result.error_code)
            self._commands.append(ToSequencer(pending, Answered(pending, result)))
        else:
            exchange.results.setdefault(key, result)

    def _finish_exchange(self, response_slot: PendingResponse, exchange: ProduceExchange) -> None:
        self._leave_barrier(exchange)
        if response_slot not in self._exchanges_in_flight or not exchange.complete:
            return
        if not (self.client_closed or response_slot.done or exchange.silent):
            if exchange.querying:
                return
            unreported = self._reported_without_proof(exchange)
            unproved = sorted({key.topic for key in unreported})
            unknown = self._report_log_starts(exchange, unproved)
            if unproved:
                if all(exchange.results[key].error_code == Error.NOT_LEADER_OR_FOLLOWER for key in unreported):
                    exchange.answer_by = min(exchange.answer_by, self._now + _REASON_SECONDS)
                self._prove_write(response_slot, exchange, unproved)
            if unknown:
                self._query_log_starts(response_slot, exchange, unknown)
            if exchange.querying:
                return
        if exchange.request.transactional_id is not None:
            if self._waits_for_notes(response_slot, exchange):
                return
            self._let_go(exchange)
        del self._exchanges_in_flight[response_slot]
        self._answer_by.pop(response_slot, None)
        if exchange.silent:
            self._services.release(response_slot.reserved_bytes)
            failed = next((r for r in exchange.results.values() if r.error_code), None)
            if failed is not None:
                raise ClientProtocolError(f"an append with acks=0 failed: {failed.error_message or failed.error_code}")
        elif not response_slot.done:
            self._end(response_slot, [encode_produce_response(exchange.response(), exchange.request.api_version)])

    def _answer_unknown_outcomes(self, now: float) -> None:
        """Report what was sent and not answered in time as unknown; the sequencer continues to resolve it."""
        for response_slot, deadline in list(self._answer_by.items()):
            if deadline > now:
                continue
            self._disable_fast_path()
            del self._answer_by[response_slot]
            exchange = self._exchanges_in_flight[response_slot]
            self._stop_waiting(exchange)
            if exchange.silent:
                continue
            self._answer_later_instead(exchange)
            message = "OUTCOME_UNKNOWN Kafka did not answer in time; it may have been appended"
            results = {
                key: PartitionResult(partition=key.partition, error_code=Error.REQUEST_TIMED_OUT, error_message=message)
                for key in exchange.partitions()
            }
            message = "TRY_AGAIN Kafka did not confirm in time that this client may write"
            unreported = self._reported_without_proof(exchange)
            unproved = {
                key: PartitionResult(
                    partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                )
                for key in unreported
                if key not in exchange.sent
            }
            # Without a proof, what was sent stays unknown: it may be in the log.
            known = {
                key: each for key, each in exchange.results.items() if key not in exchange.sent or key not in unreported
            }
            reported = ProduceExchange(exchange.request, results=results | known | unproved)
            for key, pending in exchange.pending_appends.items():
                if key not in exchange.results:
                    self._pipeline_failed(response_slot, pending, results[key])
            self._commands.append(Count("refusal", "outcome_unknown"))
            self._end(response_slot, [encode_produce_response(reported.response(), exchange.request.api_version)])
            if exchange.request.transactional_id is not None and exchange.notes is None:
                # Too late to wait for it. Later results are processed when they arrive.
                for transaction in self._failed(exchange, reported.results):
                    self._record_abort_only(response_slot, exchange, transaction)
                exchange.notes = None

    def _hurry(self, now: float) -> None:
        """The connection ends in a moment. Appends that wait for a sequencer or barrier were not sent: they get a
        retriable error. Appends sent and not answered are reported as unknown, as at their deadline.
        """
        if not self._in_a_hurry(now):
            return
        self._disable_fast_path()
        exchange, response_slot = self._waiting_exchange, self._waiting_response
        if exchange is not None and response_slot is not None:
            self._return_exchanges()
            if response_slot in self._exchanges_in_flight:
                self._answer_by[response_slot] = now
            # No result of a transaction is reported before it is recorded: the client sees the end, and retries.
            elif not (
                exchange.sent or self.client_closed or exchange.silent or exchange.request.transactional_id is not None
            ):
                message = "TRY_AGAIN this proxy is shutting down"
                left = set(exchange.partitions()) - exchange.results.keys() | set(
                    self._reported_without_proof(exchange)
                )
                for key in left:
                    exchange.results[key] = PartitionResult(
                        partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                    )
                self._commands.append(Count("refusal", "try_again"))
                self._end(response_slot, [encode_produce_response(exchange.response(), exchange.request.api_version)])
        for response_slot in self._answer_by:
            self._answer_by[response_slot] = now

    def _stop_waiting(self, exchange: ProduceExchange) -> None:
        """A leader that hangs may never answer, and never break the connection either: other appends must continue.

        If it appends the batch later, the sequencer finds that in the log.
        """
        for pending in exchange.pending_appends.values():
            if pending.partition in exchange.sent and pending.partition not in exchange.results:
                pending.may_write = self._has_proved(pending.partition.topic)
                self._commands.append(ToSequencer(pending, Lost(pending)))
                if exchange.counted is not None:
                    exchange.counted.in_doubt = True  # the sequencer may resend it

    def _return_exchanges(self) -> None:
        """The request that waits for a sequencer will not be sent any more."""
        exchange, self._waiting_exchange = self._waiting_exchange, None
        response_slot, self._waiting_response = self._waiting_response, None
        if exchange is not None:
            for pending in (*exchange.admitted, exchange.waiting_for):
                if pending is not None:
                    self._commands.append(ToSequencer(pending, Canceled(pending)))
            if exchange.sent:  # in part: it goes on as one of `_exchanges_in_flight`, until that is answered
                for key in exchange.partitions():
                    if key not in exchange.sent and key not in exchange.results:
                        exchange.results[key] = PartitionResult(
                            partition=key.partition,
                            error_code=Error.NOT_LEADER_OR_FOLLOWER,
                            error_message="TRY_AGAIN not sent: its connection ended",
                        )
                assert response_slot is not None
                self._finish_exchange(response_slot, exchange)
                return
            self._let_go(exchange)
            self._leave_barrier(exchange, unsent=True)
        if response_slot is not None:
            self._services.release(response_slot.reserved_bytes)
            response_slot.reserved_bytes = 0

    # ---- permissions

    def _reported_without_proof(self, exchange: ProduceExchange) -> list[TopicPartition]:
        """The results made by the proxy that reveal something about a topic for which this client has not proved WRITE:
        that it is checked or being expanded, its log end, its contents, or that it is the state topic."""
        return [
            key
            for key, result in exchange.results.items()
            if not (self._has_proved(key.topic) or key.topic in exchange.stated)
            and (
                key.topic == self._services.state_topic
                or (
                    result.error_code not in _NEEDS_NO_PROOF
                    and not (result.error_code == Error.NOT_LEADER_OR_FOLLOWER and self._now >= self._login_ends)
                    and (
                        key in exchange.pending_appends
                        or key in exchange.count_refused
                        or (exchange.leveled is not None and key in exchange.leveled.refused)
                    )
                )
            )
        ]

    def _prove_write(self, response_slot: PendingResponse, exchange: ProduceExchange, topics: Sequence[str]) -> None:
        """A refusal reveals the log end or the partition count. Only clients that may write the topic get these, and
        Kafka decides which may.
        """
        exchange.querying += 1

        def done(answers: dict[str, PartitionResult]) -> None:
            for topic, answer in answers.items():
                self._proved(exchange, topic, answer)
            exchange.querying -= 1
            self._finish_exchange(response_slot, exchange)

        names = dict.fromkeys(topics)
        partitions = {name: next(k.partition for k in exchange.partitions() if k.topic == name) for name in names}
        self._answer_by[response_slot] = exchange.answer_by
        self._query_write(exchange.request, partitions, done)

    def _proved(self, exchange: ProduceExchange, topic: str, answer: PartitionResult) -> None:
        exchange.stated |= {topic}
        if answer.error_code not in PROVES_NOTHING:
            return
        for key in list(exchange.results):
            if key.topic == topic:
                exchange.results[key] = PartitionResult(partition=key.partition, error_code=answer.error_code)

    # ---- where the log starts

    def _report_log_starts(self, exchange: ProduceExchange, unproved: Collection[str]) -> list[TopicPartition]:
        """Put the log start into refusals (KAFKA-5793), as Kafka does into its own. Returns the partitions whose log
        start is unknown here."""
        if exchange.request.api_version < LOG_START_OFFSET_FROM:
            return []
        unknown = []
        memory = self._services.idempotence
        for key, result in exchange.results.items():
            if not result.error_code or result.log_start_offset >= 0 or result.error_code in _WITHOUT_LOG_START:
                continue
            if not self._has_proved(key.topic):
                reported_later = key.topic in unproved and result.error_code not in _REVEALS_NOTHING
                if reported_later and memory.recent_log_start(key, self._now) < 0:
                    unknown.append(key)
                continue
            queried = exchange.starts_queried or result.error_code in _REVEALS_NOTHING
            start = memory.log_start(key) if queried else memory.recent_log_start(key, self._now)
            if start >= 0:
                exchange.results[key] = replace(result, log_start_offset=start)
            elif not queried:
                unknown.append(key)
        return [] if exchange.starts_queried else unknown

    def _query_log_starts(
        self, response_slot: PendingResponse, exchange: ProduceExchange, keys: Sequence[TopicPartition]
    ) -> None:
        """On the client's own connection, so that Kafka applies the client's permissions. Once for each refusal."""
        exchange.starts_queried = True
        exchange.querying += 1
        topics = [
            Message(
                name=name,
                partitions=[Message(partition_index=key.partition, timestamp=-2) for key in keys if key.topic == name],
            )
            for name in dict.fromkeys(key.topic for key in keys)
        ]
        queried = Message(replica_id=-1, topics=topics)
        correlation_id = exchange.request.correlation_id
        frame = encode_request_frame(
            LIST_OFFSETS, _LIST_OFFSETS_VERSION, correlation_id, exchange.request.client_id, queried
        )
        upstream = PendingResponse(LIST_OFFSETS, _LIST_OFFSETS_VERSION, correlation_id, Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            offset = parse_response_header(frame, LIST_OFFSETS, _LIST_OFFSETS_VERSION).body_offset
            for topic in decode_response(LIST_OFFSETS, _LIST_OFFSETS_VERSION, frame[offset:]).topics:
                for each in topic.partitions:
                    if not each.error_code:
                        key = TopicPartition(topic.name, each.partition_index)
                        self._services.idempotence.record_log_start(key, each.offset, self._now)
            exchange.querying -= 1
            self._finish_exchange(response_slot, exchange)

        upstream.on_response = on_response
        self._answer_by[response_slot] = exchange.answer_by
        self._probes.append((upstream, [frame]))
        self._send_probes()


def _too_many(why: str) -> LimitError:
    return LimitError(
        f"a Produce request names more than {PARTITIONS_MAX} topics or partitions, and {why}; send smaller requests"
    )


def due_by(now: float, timeout_ms: int) -> float:
    return now + _ANSWER_BY * max(timeout_ms, 100) / 1000


def _for_names(result: PartitionResult) -> PartitionResult:
    """A client that identifies topics by name does not know UNKNOWN_TOPIC_ID: to it, the topic is unknown."""
    if result.error_code in (Error.UNKNOWN_TOPIC_ID, Error.INCONSISTENT_TOPIC_ID):
        return replace(result, error_code=Error.UNKNOWN_TOPIC_OR_PARTITION)
    return result
