"""Produce requests that concern guarded partitions: from the frame, over their turns at the gates, to the one answer.

`ProduceExchange` (`produce_exchange.py`) is what is known of one such request. Here it goes its way: a ticket for each
guarded partition, or a
refusal; the turns, one gate after the other; what passed is sent, and what Kafka says of it is told to the gates; the
gates' last words are put into one answer.

A request may name partitions that do not exist, or that cannot be appended to for long. Neither may cost other clients
more than at Kafka: what metadata does not show is answered before any partition is waited for (`_waits_for_metadata`),
and what is granted blocks its partition for `_BLOCKS_SECONDS` at most before it is sent ahead of the rest.

While a turn waits at a gate, nothing behind it is read, as a broker would not either (it handles one request of a
connection at a time). Once it is sent it is one of `_exchanges_in_flight`, until the last of its partitions has a
result.

A refusal tells where the log ends. So before it is told, or anything else that Kafka did not say itself, Kafka is asked
whether this client may write (`_prove_write`). Where clients log in it is asked before the first turn (`proofs.py`).
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

#: The first version whose answer says where the log starts.
LOG_START_OFFSET_FROM = 5
#: Beside them Kafka says nothing of the log either: it is another broker's, or there is none.
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
#: One offset for each partition, and understood by every broker since 0.10.1.
_LIST_OFFSETS_VERSION = 1
#: Names topics by id: a stamped append cannot land in a topic that was deleted and created anew.
PRODUCE_BY_ID = 13
#: Answers that say that what is known of the topic (its id, its leaders) is out of date.
_STALE = frozenset({Error.UNKNOWN_TOPIC_OR_PARTITION, Error.NOT_LEADER_OR_FOLLOWER})
#: Clients give up at `timeout_ms`; what is not known by then is told a little earlier.
_ANSWER_BY = 0.9
#: Answers beside which no log start is worth a question of its own.
_REVEALS_NOTHING = PROVES_NOTHING | {Error.NONE, Error.NOT_LEADER_OR_FOLLOWER, Error.REQUEST_TIMED_OUT}
#: Anybody may have them, without waiting for Kafka: what may have been appended is never told as "try again".
_NEEDS_NO_PROOF = PROVES_NOTHING | {Error.REQUEST_TIMED_OUT}
_LOGIN_IS_OVER = "its client's login has ended"
#: To try again is told without a proof, and without a reason, where Kafka has not given one so soon: it may hang.
_REASON_SECONDS = 1.0
#: For how long a granted append may block its partition while others of its request are waited for.
_BLOCKS_SECONDS = 0.02


class CheckedProduce(AtBarriers):
    """Its state is the connection's: `_waiting_exchange` that waits, `_exchanges_in_flight` that are sent, `_answer_by`
    when to tell what."""

    __slots__ = ()

    # ---- a request, and what it wants of which gate

    def _produce(
        self,
        frame: memoryview,
        now: float,
        denied: Mapping[str, int] = NOTHING_DENIED,
        readings: Readings | None = None,
    ) -> None:
        """`denied` – topics that its client may not write, and Kafka's words, where it was asked first. `readings` –
        of its batches, where that took long."""
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
                continue  # they are refused one by one
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
            # Whatever is read from here on was sent knowing of those.
            self._failed_pipelines = {c: f for c, f in self._failed_pipelines.items() if f.after_bytes > starts_at}
        if not services.fresh(now):
            self._fail_closed(response_slot, exchange)
        else:
            self._check_levels(exchange, now)
            self._deny_topics(exchange)
            if not self._waits_before_sequencers(exchange, now):
                self._take_drafts_inside_barriers(exchange, now)
        # Only now: a request that could not be read leaves no slot behind that would have to give its memory back.
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
        """What has to be known of its batches, before anything is decided about them."""
        services = self._services
        readings = Readings(services.header_names, services.decompressed_bytes_max, services.read_here_bytes_max)
        request, _ = leveled_produce(request, services.policy, now)  # which may take producer ids off
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
        """It has more partitions than are read. Its topics are looked at, not all at once."""
        services, request = self._services, many.stated()
        if not services.fresh(self._now):
            self._close("the topic configs are not read yet, or again, and a request has many partitions", None)
            return
        if any(instance_id == LEVEL_TAG for instance_id, _ in split_tags(request.header_tags)):
            raise _too_many("it asks for a level of idempotence")
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
        """A door was opened, metadata has answered, or time has passed: may what waits there go in?"""
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
        """False: all its partitions are known to exist, or were refused.

        Metadata may be older than an expansion: a partition is absent only if metadata that was asked for after the
        request came does not show it.
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
        """What never came to its gate has failed as if it had: what follows it follows a hole."""
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
        """It was collected because it might have named a guarded topic; it does not."""
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
        """The topics that it may have to wait for, a partition of each."""
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
        """Kafka has said so, and nothing here has a say in it: neither a level, nor a door, nor a gate."""
        for key in exchange.partitions() if exchange.denied else ():
            error_code = exchange.denied.get(key.topic)
            if error_code is not None:
                exchange.results[key] = PartitionResult(partition=key.partition, error_code=error_code)
                if exchange.leveled is not None:
                    exchange.leveled.safe.discard(key)

    def _fail_closed(self, response_slot: PendingResponse, exchange: ProduceExchange) -> None:
        """Whether a topic is guarded is not known: no append is let through, and each may be tried again.

        Its chains fail with it, as at a gate: A, expecting 15, comes while the configs are too old. B, expecting 16,
        was sent behind it and comes when they are not any more, and another writer has won 15.
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
        """What the levels of its topics, and its own, forbid; and which of its batches may go without producer ids."""
        deadline = now + self._wait_seconds(exchange.request.timeout_ms)
        exchange.request, exchange.leveled = leveled_produce(exchange.request, self._policy_for(exchange), deadline)
        if exchange.leveled is not None:
            for key, refusal in exchange.leveled.refused.items():
                self._refuse(exchange, key, refusal)
            stripped = [key for key in exchange.leveled.stripped if not self._is_after_a_failed(exchange, key)]
            self._commands += downgraded(stripped, NOT_PERMITTED)

    def _waits_to_go_without(self, exchange: ProduceExchange, now: float) -> bool:
        """False: nothing of it goes without its producer id, or all that does may. See `levels.py` about the order."""
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
                message = (
                    f"TRY_AGAIN topic={key.topic} partition={key.partition}: what was sent before is not answered yet"
                )
                self._refuse(exchange, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "level_unknown", message))
                leveled.safe.discard(key)
                leveled.tries_again.add(key)
            else:
                leveled.give_up_id(key)
        self._commands += downgraded(set(without) & leveled.without, MESSAGE_FORMAT)
        return False

    def _is_after_a_failed(self, exchange: ProduceExchange, key: TopicPartition) -> bool:
        """Then it is refused like that one, which its client sends again first."""
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
        """Kafka takes no producer ids there, and has appended nothing: the same batches once more, without."""
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
        """Of an append that kept its producer's own id."""
        append = pending.append
        if append.producer_id >= 0:
            last_offset = base_offset + append.record_count - 1
            self._services.idempotence.acknowledged(pending.partition, append.producer_id, last_offset)

    def _reported(self, exchange: ProduceExchange, key: TopicPartition, result: PartitionResult) -> PartitionResult:
        """Kafka's answer, as the client is to hear it: 45 only where records are lost that were acknowledged.

        If the log starts behind all that its producer was told, it is Kafka that has forgotten: 59, with which
        producers begin anew. Told once: one that sends the same batch again would do so for ever (kafka-python 3).
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
                    f"PRODUCER_FORGOTTEN topic={key.topic} partition={key.partition}: all that this producer appended "
                    f"lies below the log start {start}, and nothing of it was lost otherwise"
                )
                return replace(result, error_code=Error.UNKNOWN_PRODUCER_ID, error_message=message)
        return result

    def _take_drafts(self, exchange: ProduceExchange, now: float) -> None:
        """A ticket for each guarded partition, or a refusal where its batch cannot be one."""
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
        """The proxy's own topic: what a client wrote there could unguard others."""
        message = f"{topic.name} is where the proxy keeps its state; it is closed to clients"
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
                message = f"TRY_AGAIN {where}: a commit of its transaction is on its way to Kafka"
                self._refuse(exchange, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
                return
        if exchange.silent and pending.append.expected_base_offset is not None:
            raise ClientProtocolError(f"an expectation for {key} with acks=0, which nobody could answer")
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

    # ---- its turns

    def _next_exchange(self, now: float) -> None:
        exchange = self._waiting_exchange
        assert exchange is not None
        while exchange.to_submit and not (exchange.refused and self._services.refuse_whole_requests):
            pending = exchange.to_submit.pop()
            if self._fails_with_its_pipeline(exchange, pending):
                continue  # while it waited for its turn at another gate
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
        # Kafka refused its stamp, the gate has looked at the log, and its expectation holds after all: once more.
        if self._without_id(sent, [pending]):
            self._not_sent(response_slot, sent, pending, f"the id of topic {pending.partition.topic} is not known now")
            self._finish_exchange(response_slot, sent)
            return
        if self._client.state is CutterState.PASSING:
            # A frame of the client's is half upstream, and ends when the client likes. Nothing can go between, and
            # the gate cannot wait for that.
            self._not_sent(response_slot, sent, pending, "the client's next request is on its way")
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
        """See `FastPath`: what was sent by it becomes one of `_exchanges_in_flight`."""
        raise NotImplementedError

    # ---- what passed is sent

    def _send_exchange(self, exchange: ProduceExchange, now: float) -> None:
        """All verdicts are there: forward what passed, answer what did not."""
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
        """What is granted, and what needs no grant, goes upstream in one request; False if there is nothing."""
        if self._failed_pipelines:
            self._return_after_failed(exchange)
        if exchange.admitted and now >= self._login_ends:
            self._return_unsent(exchange)
        if any(not self._services.may_send(pending, now) for pending in exchange.admitted):
            # A cold grant is no longer good after so long.
            self._resubmit_admitted(exchange)
            return False
        for pending in self._without_id(exchange, exchange.admitted):
            exchange.admitted.remove(pending)
            self._not_sent(
                response_slot, exchange, pending, f"the id of topic {pending.partition.topic} is not known now"
            )
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
        """What is granted goes upstream before the rest of its request, which is waited for too long.

        Not where a refusal of the rest would have to refuse it (`refusal_scope = "request"`): there it is given back
        until the slow one is granted, and then all are waited for in order.
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
        """A gate ends A and grants B, which was offered before the end of A was heard here: the two have crossed. Each
        is told before B goes up, but at no gate is B behind A any more.
        """
        for pending in tuple(exchange.admitted):
            if self._fails_with_its_pipeline(exchange, pending):
                exchange.admitted.remove(pending)
                self._commands.append(ToSequencer(pending, Canceled(pending)))

    def _return_unsent(self, exchange: ProduceExchange) -> None:
        """Its client's login has ended while it waited. Kafka would end the connection, and say nothing of the append.

        Its client tries again: then its connection ends here, or it has logged in anew.
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
        """Sends (a part of) a turn upstream; `slot` is where its client waits."""
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
        """For what is sent upstream of a turn; its client waits at `slot`."""
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
        """By id where the brokers can: a topic that was deleted and created anew is another topic.

        Not for transactions: versions from 12 on mean transactions v2, which is the client's to choose.
        """
        return request.transactional_id is None and self._services.produce_version_max() >= PRODUCE_BY_ID

    def _by_topic_id(self, request: ProduceRequest) -> list[ProduceRequest]:
        """One request by id; and one by name for the unguarded topics beside it whose ids are not known here."""
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
        """Granted appends that cannot be sent as they must be: the topic is gone, or was not looked up yet.

        Those that expect nothing and keep their own producer may go by name, as they would without us.
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

    # ---- what became of it

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
            raise UpstreamProtocolError(f"the broker answered for {sorted(answers)}, asked were {sorted(queried)}")
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
        """What was told as unknown may have been sent again by its client; what nobody waits for need not be."""
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
        """What was sent and is not known in time is told as unknown; the gate goes on settling it."""
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
            message = "TRY_AGAIN Kafka did not say in time whether this client may write"
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
                # Too late to wait for it. What comes of these after all is looked at then.
                for transaction in self._failed(exchange, reported.results):
                    self._record_abort_only(response_slot, exchange, transaction)
                exchange.notes = None

    def _hurry(self, now: float) -> None:
        """The connection ends in a moment. What waits at a gate or a door is told to try again: nothing of it was sent.
        What was sent and is not answered is told as unknown, as when Kafka's time for it is up.
        """
        if not self._in_a_hurry(now):
            return
        self._disable_fast_path()
        exchange, response_slot = self._waiting_exchange, self._waiting_response
        if exchange is not None and response_slot is not None:
            self._return_exchanges()
            if response_slot in self._exchanges_in_flight:
                self._answer_by[response_slot] = now
            # Of a transaction nothing is told that is not noted beforehand; its client sees the end, and tries again.
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
        """A leader that stands still may never answer, and never break the connection either: others have to go on.

        What it does with the append when it wakes up, the gate can find in the log.
        """
        for pending in exchange.pending_appends.values():
            if pending.partition in exchange.sent and pending.partition not in exchange.results:
                pending.may_write = self._has_proved(pending.partition.topic)
                self._commands.append(ToSequencer(pending, Lost(pending)))
                if exchange.counted is not None:
                    exchange.counted.in_doubt = True  # the gate may send it once more by itself

    def _return_exchanges(self) -> None:
        """The request that waits at a gate will not be sent any more."""
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
                            error_message="TRY_AGAIN its connection ends, and it was not sent",
                        )
                assert response_slot is not None
                self._finish_exchange(response_slot, exchange)
                return
            self._let_go(exchange)
            self._leave_barrier(exchange, unsent=True)
        if response_slot is not None:
            self._services.release(response_slot.reserved_bytes)
            response_slot.reserved_bytes = 0

    # ---- who may know

    def _reported_without_proof(self, exchange: ProduceExchange) -> list[TopicPartition]:
        """The answers made here that tell of a topic for which this client has not proved WRITE: that it is guarded or
        grows, where its log ends, that it holds what the client has sent, that it is the proxy's own."""
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
        """A refusal tells where the log ends, or how many partitions there are. Only who may write the topic learns
        that, and Kafka says who may.
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
        """Puts the log start into refusals (KAFKA-5793), as Kafka does into its own. Given back is of which partitions
        nobody here knows it yet."""
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
        """On the client's own connection: who may not see the topic is told nothing of it. Once for each refusal."""
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
    """A client that names topics does not know UNKNOWN_TOPIC_ID; for it the topic is what is unknown."""
    if result.error_code in (Error.UNKNOWN_TOPIC_ID, Error.INCONSISTENT_TOPIC_ID):
        return replace(result, error_code=Error.UNKNOWN_TOPIC_OR_PARTITION)
    return result
