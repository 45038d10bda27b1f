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
a time. Once sent, a request is one of `_produce_in_flight` until its last partition has a result.

A refusal reveals the log end. So before the proxy reports it, or any other answer that Kafka did not give, it checks
with Kafka whether this client may write (`_prove_write`). If clients log in, it checks before the first submission
(`proofs.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from fencepost_policies.append import Append, Facts, Refusal
from fencepost_proxy.errors import ClientProtocolError, Error, LimitError, UpstreamProtocolError
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.sequencer.state import sent_after
from fencepost_proxy.session.appends import AppendDraft, make_pending_append, refused
from fencepost_proxy.session.barriers import AtBarriers
from fencepost_proxy.session.connection import INT32
from fencepost_proxy.session.cutter import CutterState
from fencepost_proxy.session.levels import MESSAGE_FORMAT, NOT_PERMITTED, downgraded, leveled_produce
from fencepost_proxy.session.messages import Count, TopicStale
from fencepost_proxy.session.partition_counts import pipeline_of
from fencepost_proxy.session.pending_responses import Answer, Failed, PendingResponse
from fencepost_proxy.session.produce_exchange import NOTHING_DENIED, ProduceExchange
from fencepost_proxy.session.producer_ids import refuse_producer_id
from fencepost_proxy.session.proofs import PROVES_NOTHING
from fencepost_proxy.session.reading import PARTITIONS_MAX, TOPICS_AT_ONCE, ManyPartitions, Readings, append_of
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import LIST_OFFSETS, PRODUCE
from fencepost_proxy.wire.control import decode_response, encode_request_frame, parse_response_header
from fencepost_proxy.wire.peeks import names_producer
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
    """Its state is the connection's: `_waiting_produce`, `_produce_in_flight` and `_answer_by`, the deadlines of
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
            if policy is not None and (policy.is_checked or policy.checks_count):
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
        if request.transactional_id is not None and self._needs_use_proof(request):

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
        pending_response = PendingResponse(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        starts_at = self._received_bytes - self._client.unread_bytes - len(frame)
        produce = ProduceExchange(
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
            self._fail_closed(pending_response, produce)
        else:
            self._check_levels(produce, now)
            self._deny_topics(produce)
            self._check_on_arrival(produce, now)
            if not self._waits_before_sequencers(produce, now):
                self._take_drafts_entered(produce, now)
        # Only now: an unreadable request raises before this, and leaves no pending response with reserved memory.
        pending_response.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        if request.acks != 0:
            self._to_client.append(pending_response)
        if not (
            produce.at_barrier or produce.pending_appends or produce.results or produce.count_checked or produce.leveled
        ):
            self._forward_unread(pending_response, request, frame)
            return
        self._waiting_produce, self._waiting_response = produce, pending_response
        if not produce.at_barrier:
            self._pipelines_fail_at_barrier(pending_response, produce)
            self._to_sequencers(produce, now)

    def _requested_readings(self, request: ProduceRequest, denied: Mapping[str, int], now: float) -> Readings:
        """Read its batches, as far as the decisions about them need it."""
        services = self._services
        readings = Readings(services.header_names, services.decompressed_bytes_max, services.read_here_bytes_max)
        request, _ = leveled_produce(request, services.policy, now)  # may remove producer ids
        for topic in request.topics:
            policy = services.policy(topic.name)
            if policy is None or topic.name in denied or topic.name == services.state_topic:
                continue
            if policy.reads_records:
                placed = policy.partitioner is not None and services.in_grace_period(topic.name, now)
                count = services.partition_count(topic.name, now) if placed else None
                for data in topic.partitions:
                    readings.add(TopicPartition(topic.name, data.partition), data.records, policy, count)
        return readings

    def _produce_many(self, frame: memoryview, many: ManyPartitions) -> None:
        """It has too many partitions to be read. Check only its topics, some at a time."""
        services, request = self._services, many.stated()
        if not services.fresh(self._now):
            self._close("the topic configs are not (re)read yet, and a request has many partitions", None)
            return
        if any(field_tag == LEVEL_TAG for field_tag, _ in split_tags(request.header_tags)):
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
        pending_response = PendingResponse(PRODUCE, request.api_version, request.correlation_id, Answer.MADE_HERE)
        pending_response.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        if request.acks != 0:
            self._to_client.append(pending_response)
        self._forward_unread(pending_response, request, frame)

    def _check_barrier(self, now: float) -> None:
        """A barrier opened, metadata arrived, or time has passed: check again whether the waiting request may enter."""
        produce = self._waiting_produce
        if produce is None or not produce.at_barrier:
            return
        if not self._services.fresh(now):
            produce.at_barrier = False
            assert self._waiting_response is not None
            self._fail_closed(self._waiting_response, produce)
        elif self._waits_before_sequencers(produce, now):
            return
        else:
            self._take_drafts_entered(produce, now)
        assert self._waiting_response is not None
        self._pipelines_fail_at_barrier(self._waiting_response, produce)
        self._to_sequencers(produce, now)

    def _waits_before_sequencers(self, produce: ProduceExchange, now: float) -> bool:
        return (
            self._waits_for_metadata(produce, now)
            or self._waits_to_drop_id(produce, now)
            or self._waits_at_barrier(produce, now)
        )

    def _waits_for_metadata(self, produce: ProduceExchange, now: float) -> bool:
        """False: all its partitions are known to exist, or are refused.

        Metadata may be older than an expansion: a partition is absent only if metadata requested after the request's
        arrival does not show it.
        """
        services = self._services
        absent: dict[TopicPartition, PartitionData] = {}
        stale: dict[str, None] = {}
        for topic in produce.request.topics:
            policy = None if topic.name in produce.denied else services.policy(topic.name)
            if policy is None or not policy.is_checked or topic.name == services.state_topic:
                continue
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                exists = key in produce.results or services.partition_exists(key, produce.received_at)
                if exists is None:
                    stale[topic.name] = None
                if not exists:
                    absent[key] = data
        produce.at_barrier = bool(stale) and now < produce.received_at + self._wait_seconds(produce.request.timeout_ms)
        if produce.at_barrier:
            self._commands += [TopicStale(topic) for topic in stale]
            return True
        for key, data in absent.items():
            if key.topic in stale:
                message = f"TRY_AGAIN topic={key.topic}: metadata could not be read in time"
                self._refuse(produce, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
            else:
                produce.results[key] = PartitionResult(key.partition, Error.UNKNOWN_TOPIC_OR_PARTITION)
                self._commands.append(Count("refusal", "unknown_partition"))
            produce.misread.append((key, pipeline_of(data)))
            if produce.leveled is not None:
                produce.leveled.safe.discard(key)
        produce.sequencer_seconds = max(produce.sequencer_seconds, now - produce.received_at)
        return False

    def _pipelines_fail_at_barrier(self, pending_response: PendingResponse, produce: ProduceExchange) -> None:
        """A refusal before the sequencer fails the pipeline as the sequencer would: later appends leave a gap."""
        if produce.leveled is not None:
            for key in produce.leveled.tries_again:
                pipeline_key = (key, produce.leveled.producers[key])
                self._failed_pipelines[pipeline_key] = Failed(produce.results[key])
                pending_response.pipeline_keys.append(pipeline_key)
        for pipeline_key in produce.misread:
            self._failed_pipelines[pipeline_key] = Failed(produce.results[pipeline_key[0]])
            pending_response.pipeline_keys.append(pipeline_key)
        for topic in produce.request.topics if produce.refused_by_policy or produce.denied else ():
            policy = self._services.policy(topic.name)
            for data in topic.partitions if policy is not None and policy.is_checked else ():
                key = TopicPartition(topic.name, data.partition)
                if key in produce.refused_by_policy or topic.name in produce.denied:
                    pipeline_key = (key, pipeline_of(data))
                    self._failed_pipelines[pipeline_key] = Failed(produce.results[key])
                    pending_response.pipeline_keys.append(pipeline_key)

    def _to_sequencers(self, produce: ProduceExchange, now: float) -> None:
        produce.to_submit = [produce.pending_appends[key] for key in sorted(produce.pending_appends, reverse=True)]
        self._submit_next(now)

    def _forward_unread(self, pending_response: PendingResponse, request: ProduceRequest, frame: memoryview) -> None:
        """It was collected because it might contain a checked topic; it does not."""
        if request.acks != 0:
            self._to_client.pop()
            self._services.release(pending_response.reserved_bytes)
            pending_response = self._produce_response(request.api_version, request.correlation_id)
            self._to_client.append(pending_response)
            self._from_upstream.append(pending_response)
        else:
            self._services.release(pending_response.reserved_bytes)
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

    def _deny_topics(self, produce: ProduceExchange) -> None:
        """Kafka's denial is final: no level, barrier or sequencer is involved."""
        for key in produce.partitions() if produce.denied else ():
            error_code = produce.denied.get(key.topic)
            if error_code is not None:
                produce.results[key] = PartitionResult(partition=key.partition, error_code=error_code)
                if produce.leveled is not None:
                    produce.leveled.safe.discard(key)

    def _check_on_arrival(self, produce: ProduceExchange, now: float) -> None:
        """Apply the policies of `Stage.ARRIVAL`. On an unchecked topic, what a refusal means for the producer's later
        batches is Kafka's matter, as when Kafka itself refuses a batch."""
        for topic in produce.request.topics:
            policy = self._services.policy(topic.name)
            if policy is None or not policy.on_arrival:
                continue
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                if key in produce.results:
                    continue
                assert produce.readings is not None
                scan = produce.readings.of(key, data.records, policy)
                if isinstance(scan, Refusal):
                    if not policy.is_checked:  # else `_take_draft` refuses it
                        self._refuse(produce, key, scan)
                    continue
                refusal = self._refused_on_arrival(policy, append_of(key, scan), now)
                if refusal is not None:
                    self._refuse(produce, key, refusal)
                    produce.refused_by_policy |= {key}

    def _refused_on_arrival(self, policy: TopicPolicy, append: Append, now: float) -> Refusal | None:
        facts = Facts(now_ms=self._services.unix_ms(now))
        return next(filter(None, (each.check(append, setting, facts) for each, setting in policy.on_arrival)), None)

    def _fail_closed(self, pending_response: PendingResponse, produce: ProduceExchange) -> None:
        """The topic configs are outdated, so any topic may be checked: refuse all appends with a retriable error.

        Their pipelines fail too, as at a sequencer:

        1. A, expecting 15, arrives while the configs are outdated, and is refused.
        2. B, expecting 16, was sent after A. It arrives when the configs are current again.
        3. Meanwhile another writer has appended at 15. B must not be appended after that record.
        """
        message = "TRY_AGAIN the proxy has not (re)read its topic configs yet"
        for topic in produce.request.topics:
            for data in topic.partitions:
                result = PartitionResult(
                    partition=data.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                )
                key = TopicPartition(topic.name, data.partition)
                pipeline_key = (key, pipeline_of(data))
                produce.results[key] = result
                self._failed_pipelines[pipeline_key] = Failed(result)
                pending_response.pipeline_keys.append(pipeline_key)
        self._commands.append(Count("refusal", "not_ready"))

    def _take_drafts_entered(self, produce: ProduceExchange, now: float) -> None:
        try:
            self._take_drafts(produce, now)
        except ClientProtocolError:
            self._leave_barrier(produce, unsent=True)
            raise

    # ---- levels of idempotence

    def _check_levels(self, produce: ProduceExchange, now: float) -> None:
        """Apply the levels of its topics and its own: refuse batches, and note those that may be sent without ids."""
        deadline = now + self._wait_seconds(produce.request.timeout_ms)
        produce.request, produce.leveled = leveled_produce(produce.request, self._policy_for(produce), deadline)
        if produce.leveled is not None:
            for key, refusal in produce.leveled.refused.items():
                self._refuse(produce, key, refusal)
            stripped = [key for key in produce.leveled.stripped if not self._is_after_a_failed(produce, key)]
            self._commands += downgraded(stripped, NOT_PERMITTED)

    def _waits_to_drop_id(self, produce: ProduceExchange, now: float) -> bool:
        """False: no batch is sent without its producer id, or all that are may be sent now. Order: see `levels.py`."""
        leveled = produce.leveled
        if leveled is None or not leveled.safe:
            return False
        leveled.safe -= {key for key in leveled.safe if self._is_after_a_failed(produce, key)}
        without = leveled.drops_id(self._services.idempotence, now)
        blocked = [
            key for key in without if any(self._has_id_upstream(each, key) for each in self._produce_in_flight.values())
        ]
        if blocked and now < leveled.deadline:
            produce.at_barrier = leveled.waits = True
            return True
        if leveled.waits:
            produce.at_barrier = leveled.waits = False
            produce.sequencer_seconds = now - produce.received_at
        for key in without:
            if key in blocked:
                message = f"TRY_AGAIN topic={key.topic} partition={key.partition}: earlier batches are not answered yet"
                self._refuse(produce, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "level_unknown", message))
                leveled.safe.discard(key)
                leveled.tries_again.add(key)
            else:
                leveled.give_up_id(key)
        self._commands += downgraded(set(without) & leveled.without, MESSAGE_FORMAT)
        return False

    def _is_after_a_failed(self, produce: ProduceExchange, key: TopicPartition) -> bool:
        """Whether it is refused because an earlier batch failed, which its client sends again first."""
        assert produce.leveled is not None
        failed = self._failed_pipelines.get((key, produce.leveled.producers[key]))
        if failed is None or produce.starts_at >= failed.after_bytes:
            return False
        message = f"PREDECESSOR_FAILED {failed.result.error_message}"
        self._refuse(produce, key, Refusal(failed.result.error_code, "predecessor_failed", message))
        return True

    @staticmethod
    def _has_id_upstream(produce: ProduceExchange, key: TopicPartition) -> bool:
        return produce.leveled is not None and produce.leveled.has_id_upstream(key) and key not in produce.results

    def _send_without(
        self, pending_response: PendingResponse, produce: ProduceExchange, keys: Sequence[TopicPartition], now: float
    ) -> None:
        """Kafka accepts no producer ids there, and appended nothing: resend these batches without them."""
        assert produce.leveled is not None
        for key in keys:
            self._services.idempotence.refused(key.topic, now)
            produce.leveled.give_up_id(key)
        self._commands += downgraded(keys, MESSAGE_FORMAT)
        for part in self._by_topic_id(produce.request_without(keys)):
            self._probes.append((self._response_of_part(pending_response, produce, part), encode_produce_request(part)))
            if produce.count_checked is not None:
                produce.count_checked.was_sent()
        self._send_probes()

    def _record_acknowledged(self, pending: PendingAppend, base_offset: int) -> None:
        """For an append that kept its producer's id."""
        append = pending.append
        if append.producer_id >= 0:
            last_offset = base_offset + append.record_count - 1
            self._services.idempotence.acknowledged(pending.partition, append.producer_id, last_offset)

    def _reported(self, produce: ProduceExchange, key: TopicPartition, result: PartitionResult) -> PartitionResult:
        """Kafka's result, as reported to the client: 45 only if acknowledged records are lost.

        If the log starts after everything acknowledged to its producer, Kafka has only forgotten the producer. Then the
        error is 59, and producers restart their sequences. It is reported once: a client that resends the same batch
        after it would do so indefinitely (kafka-python 3).
        """
        memory = self._services.idempotence
        memory.record_log_start(key, result.log_start_offset, self._now)
        pending = produce.pending_appends.get(key)
        if pending is not None:
            append = pending.append
            batch, record_count = (append.producer_id, append.producer_epoch, append.base_sequence), append.record_count
            if pending.fence is not None:
                return result
        elif produce.leveled is not None and key in produce.leveled.with_id:
            batch, record_count = produce.leveled.with_id[key]
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

    def _take_drafts(self, produce: ProduceExchange, now: float) -> None:
        """A pending append for each checked partition, or a refusal if its batch cannot be one."""
        services = self._services
        request = produce.request
        wait_seconds = self._wait_seconds(request.timeout_ms)
        refused_before = frozenset(produce.results)
        for topic in request.topics:
            if topic.name == services.state_topic:
                self._deny(produce, topic)
                continue
            policy = services.policy(topic.name)
            if policy is None or not policy.is_checked:
                continue
            draft = self._draft(policy, request.transactional_id, now, now + wait_seconds)
            for data in topic.partitions:
                if TopicPartition(topic.name, data.partition) not in refused_before:
                    self._take_draft(produce, draft, topic, data)

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

    def _deny(self, produce: ProduceExchange, topic: TopicData) -> None:
        """The proxy's state topic: a client that wrote to it could switch off checks."""
        message = f"{topic.name} is the proxy's state topic; it is closed to clients"
        for data in topic.partitions:
            refusal = Refusal(Error.TOPIC_AUTHORIZATION_FAILED, "state_topic", message)
            self._refuse(produce, TopicPartition(topic.name, data.partition), refusal)

    def _take_draft(self, produce: ProduceExchange, draft: AppendDraft, topic: TopicData, data: PartitionData) -> None:
        key = TopicPartition(topic.name, data.partition)
        if key in produce.pending_appends or key in produce.results:
            raise ClientProtocolError(f"a Produce request names {key} twice")
        assert produce.readings is not None
        pending = make_pending_append(draft, key, data, produce.readings.of(key, data.records, draft.policy))
        if isinstance(pending, Refusal):
            self._refuse(produce, key, pending)
            produce.misread.append((key, pipeline_of(data)))
            return
        pending.leader_epoch = self._services.leader_epoch(key)
        transactional_id = draft.transactional_id
        if pending.append.transactional and transactional_id is not None:
            pending.has_partitions = self._services.transactions.owns(transactional_id, *pending.producer)
            if self._is_ending(transactional_id, pending):
                where = f"topic={topic.name} partition={data.partition}"
                message = f"TRY_AGAIN {where}: a commit of its transaction is being sent to Kafka"
                self._refuse(produce, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
                return
        if produce.silent and pending.append.expected_base_offset is not None:
            raise ClientProtocolError(f"an expected offset for {key} with acks=0: a mismatch could not be reported")
        if not self._fails_with_its_pipeline(produce, pending):
            self._failed_pipelines.pop((key, pending.pipeline), None)
            produce.pending_appends[key] = pending

    def _fails_with_its_pipeline(self, produce: ProduceExchange, pending: PendingAppend) -> bool:
        for pipeline in pending.follows if self._failed_pipelines else ():
            failed = self._failed_pipelines.get((pending.partition, pipeline))
            if failed is not None and produce.starts_at < failed.after_bytes:
                reported = sent_after(pending, failed.result)
                self._refuse(
                    produce,
                    pending.partition,
                    Refusal(reported.error_code, "predecessor_failed", reported.error_message or ""),
                )
                return True
        return False

    def _refuse(self, produce: ProduceExchange, key: TopicPartition, refusal: Refusal) -> None:
        produce.results[key] = refused(key, refusal)
        self._commands.append(Count("refusal", refusal.reason, key))

    # ---- submission, one partition after the other

    def _submit_next(self, now: float) -> None:
        produce = self._waiting_produce
        assert produce is not None
        while produce.to_submit and not (produce.refused and self._services.refuse_whole_requests):
            pending = produce.to_submit.pop()
            if self._fails_with_its_pipeline(produce, pending):
                continue  # failed while it waited for another sequencer
            if now >= produce.answer_by:
                where = f"topic={pending.partition.topic} partition={pending.partition.partition}"
                message = f"TRY_AGAIN {where}: the partitions before it took too long"
                self._refuse(produce, pending.partition, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
                assert self._waiting_response is not None
                self._pipeline_failed(self._waiting_response, pending, produce.results[pending.partition])
                continue
            produce.waiting_for, produce.submitted_at = pending, now
            if pending.append.transactional:
                self._submits(pending)
            self._sequencers.submit(pending)
            return
        produce.waiting_for = None
        self._send_produce(produce, now)

    def _append_admitted(self, pending: PendingAppend, now: float) -> None:
        produce = self._waiting_produce
        if produce is not None and pending is produce.waiting_for:
            if not produce.admitted:
                produce.admitted_at = now
            produce.admitted.append(pending)
            produce.sequencer_seconds += now - produce.submitted_at
            self._services.sequencer_waited(now - produce.submitted_at)
            if produce.alone:
                produce.alone = False
                self._resubmit_admitted(produce)
            self._submit_next(now)
            return
        pending_response, sent = self._sent_produce_of(pending)
        if (
            pending_response is None
            or sent is None
            or pending_response.done
            or self.client_closed
            or self.upstream_closed
        ):
            self._sequencers.cancel(pending)
            return
        # Kafka refused its fence, the sequencer read the log, and the expected offset still holds: resend it.
        if self._without_id(sent, [pending]):
            self._not_sent(pending_response, sent, pending, f"the id of topic {pending.partition.topic} is unknown")
            self._finish_produce(pending_response, sent)
            return
        if self._client.state is CutterState.PASSING:
            # A frame of the client is half upstream, and ends when the client likes. Nothing can be sent in between,
            # and the sequencer cannot wait for that.
            self._not_sent(pending_response, sent, pending, "the client's next request is being relayed")
            self._finish_produce(pending_response, sent)
            return
        if now >= self._login_ends:
            self._not_sent(pending_response, sent, pending, _LOGIN_IS_OVER)
            self._finish_produce(pending_response, sent)
            return
        self._forward(pending_response, sent, sent.request_for(pending))
        if pending.append.transactional:
            self._sends(pending)
        self._sequencers.sent(pending)

    def _append_completed(
        self, pending: PendingAppend, result: PartitionResult, reason: str | None, now: float
    ) -> None:
        if reason is not None:
            expected = pending.append.expected_base_offset
            self._commands.append(Count("refusal", reason, pending.partition, expected, result.base_offset))
        self._services.idempotence.record_log_start(pending.partition, result.log_start_offset, now)
        if pending.append.transactional:
            self._was_appended(pending, result)
        produce = self._waiting_produce
        if produce is not None and pending is produce.waiting_for:
            produce.alone = False
            produce.results[pending.partition] = result
            if self._waiting_response is not None:
                self._pipeline_failed(self._waiting_response, pending, result)
            self._submit_next(now)
            return
        pending_response, sent = self._sent_produce_of(pending)
        if pending_response is not None and sent is not None:
            sent.results.setdefault(pending.partition, result)
            self._pipeline_failed(pending_response, pending, result)
            self._finish_produce(pending_response, sent)

    def _pipeline_failed(
        self, pending_response: PendingResponse, pending: PendingAppend, result: PartitionResult
    ) -> None:
        if result.error_code and not pending_response.done:
            pipeline_key = (pending.partition, pending.pipeline)
            self._failed_pipelines[pipeline_key] = Failed(result)
            pending_response.pipeline_keys.append(pipeline_key)

    def _sent_produce_of(self, pending: PendingAppend) -> tuple[PendingResponse, ProduceExchange] | tuple[None, None]:
        self._disable_fast_path()
        for pending_response, produce in self._produce_in_flight.items():
            if produce.pending_appends.get(pending.partition) is pending:
                return pending_response, produce
        return None, None

    def _disable_fast_path(self) -> None:
        """See `FastPath`: requests sent by it become `_produce_in_flight`."""
        raise NotImplementedError

    # ---- sending

    def _send_produce(self, produce: ProduceExchange, now: float) -> None:
        """All appends are decided: forward the admitted ones, answer the refused ones."""
        if produce.refused and self._services.refuse_whole_requests:
            self._refuse_the_rest(produce)
        pending_response = self._waiting_response
        assert pending_response is not None
        first = not produce.sent
        sent = self._send_admitted(pending_response, produce, now)
        if produce.to_submit:
            self._submit_next(now)
            return
        self._waiting_produce, self._waiting_response = None, None
        self._produce_in_flight[pending_response] = produce
        if produce.sent:
            self._answer_by[pending_response] = produce.answer_by
        if sent and first:
            self._services.forwarded(max(0.0, now - produce.received_at - produce.sequencer_seconds))
        if not sent:
            self._made_here += not produce.sent
            self._finish_produce(pending_response, produce)

    def _send_admitted(self, pending_response: PendingResponse, produce: ProduceExchange, now: float) -> bool:
        """Send what is admitted, and what needs no admission, in one request; False if there is nothing."""
        if self._failed_pipelines:
            self._return_after_failed(produce)
        if produce.admitted and now >= self._login_ends:
            self._return_unsent(produce)
        if any(not self._sequencers.may_send(pending, now) for pending in produce.admitted):
            # An admission without a confirmed fence expires.
            self._resubmit_admitted(produce)
            return False
        for pending in self._without_id(produce, produce.admitted):
            produce.admitted.remove(pending)
            self._not_sent(pending_response, produce, pending, f"the id of topic {pending.partition.topic} is unknown")
        request = produce.upstream_request()
        if request is None:
            return False
        produce.sent.update(produce.unsent())
        for pending in produce.admitted:
            if pending.append.transactional:
                self._sends(pending)
            self._sequencers.sent(pending)
        produce.admitted = []
        self._forward(pending_response, produce, request)
        return True

    def _send_ahead(self, now: float) -> None:
        """Send admitted appends before the rest of their request, which takes too long.

        Not if a refusal of the rest would refuse these too (`refusal_scope = "request"`). Then they are returned until
        the slow partition admits its append, and after that all are submitted in order.
        """
        produce, pending_response = self._waiting_produce, self._waiting_response
        if produce is None or pending_response is None or not produce.admitted or produce.waiting_for is None:
            return
        if now < produce.admitted_at + _BLOCKS_SECONDS:
            return
        if self._services.refuse_whole_requests:
            produce.alone = True
            self._resubmit_admitted(produce)
            return
        if self._send_admitted(pending_response, produce, now):
            self._produce_in_flight[pending_response] = produce

    def _resubmit_admitted(self, produce: ProduceExchange) -> None:
        for pending in produce.admitted:
            self._sequencers.cancel(pending)
        produce.to_submit = sorted([*produce.to_submit, *produce.admitted], key=lambda t: t.partition, reverse=True)
        produce.admitted = []

    def _return_after_failed(self, produce: ProduceExchange) -> None:
        """Cancel admitted appends whose pipeline has failed meanwhile:

        1. B is submitted. Its sequencer completes A with an error and admits B before this session has processed A's
           result.
        2. The session gets both results before it sends B, but for the sequencer B no longer follows A.
        """
        for pending in tuple(produce.admitted):
            if self._fails_with_its_pipeline(produce, pending):
                produce.admitted.remove(pending)
                self._sequencers.cancel(pending)

    def _return_unsent(self, produce: ProduceExchange) -> None:
        """The client's login expired while it waited. Kafka would close the connection without a result.

        The client retries: on a connection that ends here, or after it has logged in again.
        """
        pending_response = self._waiting_response
        assert pending_response is not None
        for key in list(produce.unsent()):
            produce.results[key] = PartitionResult(
                partition=key.partition,
                error_code=Error.NOT_LEADER_OR_FOLLOWER,
                error_message=f"TRY_AGAIN {_LOGIN_IS_OVER}",
            )
        for pending in produce.admitted:
            self._pipeline_failed(pending_response, pending, produce.results[pending.partition])
            self._sequencers.cancel(pending)
            self._commands.append(Count("refusal", "try_again", pending.partition))
        produce.admitted = []

    def _forward(self, pending_response: PendingResponse, produce: ProduceExchange, request: ProduceRequest) -> None:
        """Send (a part of) a request upstream; `pending_response` is the client's pending response."""
        for part in self._by_topic_id(request):
            self._forward_part(pending_response, produce, part)

    def _forward_part(
        self, pending_response: PendingResponse, produce: ProduceExchange, request: ProduceRequest
    ) -> None:
        for topic in request.topics:
            for data in topic.partitions:
                pending = produce.pending_appends.get(TopicPartition(topic.name, data.partition))
                if pending is not None:
                    pending.topic_id = topic.topic_id
        upstream = self._response_of_part(pending_response, produce, request)
        if produce.count_checked is not None:
            produce.count_checked.was_sent()
        self._from_upstream.append(upstream)
        self._upstream_out += encode_produce_request(request)

    def _response_of_part(
        self, pending_response: PendingResponse, produce: ProduceExchange, request: ProduceRequest
    ) -> PendingResponse:
        names: dict[UUID | None, str] = {topic.topic_id: topic.name for topic in request.topics}
        queried = {TopicPartition(topic.name, data.partition) for topic in request.topics for data in topic.partitions}
        return self._upstream_response(pending_response, produce, request.api_version, names=names, queried=queried)

    def _upstream_response(
        self,
        pending_response: PendingResponse,
        produce: ProduceExchange,
        version: int,
        *,
        names: dict[UUID | None, str],
        queried: set[TopicPartition],
    ) -> PendingResponse:
        """For a part sent upstream; `pending_response` is the client's pending response."""
        upstream = PendingResponse(PRODUCE, version, pending_response.correlation_id, Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            self._produce_answered(pending_response, produce, parse_produce_response(frame, version), names, queried)

        upstream.on_response = on_response
        return upstream

    def _refuse_the_rest(self, produce: ProduceExchange) -> None:
        """`refusal_scope = "request"`, KIP-27's literal reading: one mismatch refuses the whole request."""
        for pending in produce.admitted:
            self._sequencers.cancel(pending)
        produce.admitted, produce.to_submit = [], []
        first = next(produce.refusals())
        pending_response = self._waiting_response
        assert pending_response is not None
        for key in produce.partitions():
            if key not in produce.results:
                message = f"WHOLE_REQUEST_REFUSED topic={key.topic} partition={key.partition}: {first.error_message}"
                result = produce.results[key] = PartitionResult(
                    partition=key.partition, error_code=first.error_code, error_message=message
                )
                if key in produce.pending_appends:
                    self._pipeline_failed(pending_response, produce.pending_appends[key], result)

    def _sent_by_id(self, request: ProduceRequest) -> bool:
        """By id if the brokers can: a topic that was deleted and recreated is another topic.

        Not for transactions: versions from 12 on mean transactions v2, which the client must choose.
        """
        return request.transactional_id is None and self._services.produce_version_max() >= PRODUCE_BY_ID

    def _by_topic_id(self, request: ProduceRequest) -> list[ProduceRequest]:
        """One request by id; and one by name for topics without checks whose ids are unknown here."""
        if not self._sent_by_id(request):
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

    def _without_id(self, produce: ProduceExchange, admitted: Sequence[PendingAppend]) -> list[PendingAppend]:
        """Admitted appends that must be sent by id, and whose topic has no known id: it was deleted, or not looked up
        yet.

        Those without expected offset that keep their producer id may be sent by name, as without the proxy.
        """
        if not self._sent_by_id(produce.request):
            return []
        return [
            pending
            for pending in admitted
            if (pending.fence is not None or pending.append.expected_base_offset is not None)
            and self._services.topic_id(pending.partition.topic) is None
        ]

    def _not_sent(
        self, pending_response: PendingResponse, produce: ProduceExchange, pending: PendingAppend, why: str
    ) -> None:
        message = f"TRY_AGAIN {why}"
        result = produce.results[pending.partition] = PartitionResult(
            partition=pending.partition.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
        )
        self._pipeline_failed(pending_response, pending, result)
        self._commands += [
            TopicStale(pending.partition.topic),
            Count("refusal", "try_again", pending.partition),
        ]
        self._sequencers.cancel(pending)

    # ---- results

    def _produce_answered(
        self,
        pending_response: PendingResponse,
        produce: ProduceExchange,
        response: ProduceResponse,
        names: dict[UUID | None, str],
        queried: set[TopicPartition],
    ) -> None:
        produce.throttle_time_ms = response.throttle_time_ms
        pending_response.answered_at = self._now
        answers = {
            TopicPartition(topic.name or names.get(topic.topic_id, ""), result.partition): result
            for topic in response.topics
            for result in topic.partitions
        }
        if answers.keys() != queried:
            raise UpstreamProtocolError(f"the broker answered for {sorted(answers)} instead of {sorted(queried)}")
        if produce.count_checked is not None:
            produce.count_checked.was_answered()
        again = [] if produce.leveled is None else self._to_send_without(pending_response, produce, answers)
        for key, result in answers.items():
            if key not in again:
                self._partition_answered(produce, key, self._reported(produce, key, _for_names(result)))
        if again:
            self._send_without(pending_response, produce, again, self._now)
        self._finish_produce(pending_response, produce)
        waiting = self._waiting_produce
        if waiting is not None and waiting.leveled is not None and waiting.leveled.waits:
            self._check_barrier(self._now)

    def _to_send_without(
        self,
        pending_response: PendingResponse,
        produce: ProduceExchange,
        answers: Mapping[TopicPartition, PartitionResult],
    ) -> list[TopicPartition]:
        """None if the outcome was reported as unknown (the client may have resent it), or if the client is lost."""
        assert produce.leveled is not None
        if pending_response.done or self.client_closed:
            return []
        safe = produce.leveled.safe
        format_error = Error.UNSUPPORTED_FOR_MESSAGE_FORMAT
        return [key for key, result in answers.items() if result.error_code == format_error and key in safe]

    def _partition_answered(self, produce: ProduceExchange, key: TopicPartition, result: PartitionResult) -> None:
        self._record_proof(key.topic, result.error_code)
        if result.error_code in _STALE:
            self._commands.append(TopicStale(key.topic))
        pending = produce.pending_appends.get(key)
        if pending is not None and key in produce.sent:
            pending.may_write = self._has_proved(key.topic)
            if result.error_code:
                self._services.kafka_refused(result.error_code)
            self._sequencers.answered(pending, result)
        else:
            produce.results.setdefault(key, result)

    def _finish_produce(self, pending_response: PendingResponse, produce: ProduceExchange) -> None:
        self._leave_barrier(produce)
        if pending_response not in self._produce_in_flight or not produce.complete:
            return
        if not (self.client_closed or pending_response.done or produce.silent):
            if produce.querying:
                return
            unreported = self._reported_without_proof(produce)
            unproved = sorted({key.topic for key in unreported})
            unknown = self._report_log_starts(produce, unproved)
            if unproved:
                if all(produce.results[key].error_code == Error.NOT_LEADER_OR_FOLLOWER for key in unreported):
                    produce.answer_by = min(produce.answer_by, self._now + _REASON_SECONDS)
                self._prove_write(pending_response, produce, unproved)
            if unknown:
                self._query_log_starts(pending_response, produce, unknown)
            if produce.querying:
                return
        if produce.request.transactional_id is not None:
            if self._waits_for_records(pending_response, produce):
                return
            self._end_appends(produce)
        del self._produce_in_flight[pending_response]
        self._answer_by.pop(pending_response, None)
        if produce.silent:
            self._services.release(pending_response.reserved_bytes)
            failed = next((r for r in produce.results.values() if r.error_code), None)
            if failed is not None:
                raise ClientProtocolError(f"an append with acks=0 failed: {failed.error_message or failed.error_code}")
        elif not pending_response.done:
            self._end(pending_response, [encode_produce_response(produce.response(), produce.request.api_version)])

    def _answer_unknown_outcomes(self, now: float) -> None:
        """Report what was sent and not answered in time as unknown; the sequencer continues to resolve it."""
        for pending_response, deadline in list(self._answer_by.items()):
            if deadline > now:
                continue
            self._disable_fast_path()
            del self._answer_by[pending_response]
            produce = self._produce_in_flight[pending_response]
            self._stop_waiting(produce)
            if produce.silent:
                continue
            self._answer_later_instead(produce)
            message = "OUTCOME_UNKNOWN Kafka did not answer in time; it may have been appended"
            results = {
                key: PartitionResult(partition=key.partition, error_code=Error.REQUEST_TIMED_OUT, error_message=message)
                for key in produce.partitions()
            }
            message = "TRY_AGAIN Kafka did not confirm in time that this client may write"
            unreported = self._reported_without_proof(produce)
            unproved = {
                key: PartitionResult(
                    partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                )
                for key in unreported
                if key not in produce.sent
            }
            # Without a proof, what was sent stays unknown: it may be in the log.
            known = {
                key: each for key, each in produce.results.items() if key not in produce.sent or key not in unreported
            }
            reported = ProduceExchange(produce.request, results=results | known | unproved)
            for key, pending in produce.pending_appends.items():
                if key not in produce.results:
                    self._pipeline_failed(pending_response, pending, results[key])
            self._commands.append(Count("refusal", "outcome_unknown"))
            self._end(pending_response, [encode_produce_response(reported.response(), produce.request.api_version)])
            if produce.request.transactional_id is not None and produce.open_records is None:
                # Too late to wait for it. Later results are processed when they arrive.
                for transaction in self._failed(produce, reported.results):
                    self._record_abort_only(pending_response, produce, transaction)
                produce.open_records = None

    def _answer_before_close(self, now: float) -> None:
        """The connection ends in a moment. Appends that wait for a sequencer or barrier were not sent: they get a
        retriable error. Appends sent and not answered are reported as unknown, as at their deadline.
        """
        if not self._closes_soon(now):
            return
        self._disable_fast_path()
        produce, pending_response = self._waiting_produce, self._waiting_response
        if produce is not None and pending_response is not None:
            self._return_waiting_produce()
            if pending_response in self._produce_in_flight:
                self._answer_by[pending_response] = now
            # No result of a transaction is reported before it is recorded: the client sees the end, and retries.
            elif not (
                produce.sent or self.client_closed or produce.silent or produce.request.transactional_id is not None
            ):
                message = "TRY_AGAIN this proxy is shutting down"
                left = set(produce.partitions()) - produce.results.keys() | set(self._reported_without_proof(produce))
                for key in left:
                    produce.results[key] = PartitionResult(
                        partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                    )
                self._commands.append(Count("refusal", "try_again"))
                self._end(pending_response, [encode_produce_response(produce.response(), produce.request.api_version)])
        for pending_response in self._answer_by:
            self._answer_by[pending_response] = now

    def _stop_waiting(self, produce: ProduceExchange) -> None:
        """A leader that hangs may never answer, and never break the connection either: other appends must continue.

        If it appends the batch later, the sequencer finds that in the log.
        """
        for pending in produce.pending_appends.values():
            if pending.partition in produce.sent and pending.partition not in produce.results:
                pending.may_write = self._has_proved(pending.partition.topic)
                self._sequencers.lost(pending)
                if produce.count_checked is not None:
                    produce.count_checked.in_doubt = True  # the sequencer may resend it

    def _return_waiting_produce(self) -> None:
        """The request that waits for a sequencer will not be sent any more."""
        produce, self._waiting_produce = self._waiting_produce, None
        pending_response, self._waiting_response = self._waiting_response, None
        if produce is not None:
            for pending in (*produce.admitted, produce.waiting_for):
                if pending is not None:
                    self._sequencers.cancel(pending)
            if produce.sent:  # in part: it goes on as one of `_produce_in_flight`, until that is answered
                for key in produce.partitions():
                    if key not in produce.sent and key not in produce.results:
                        produce.results[key] = PartitionResult(
                            partition=key.partition,
                            error_code=Error.NOT_LEADER_OR_FOLLOWER,
                            error_message="TRY_AGAIN not sent: its connection ended",
                        )
                assert pending_response is not None
                self._finish_produce(pending_response, produce)
                return
            self._end_appends(produce)
            self._leave_barrier(produce, unsent=True)
        if pending_response is not None:
            self._services.release(pending_response.reserved_bytes)
            pending_response.reserved_bytes = 0

    # ---- permissions

    def _reported_without_proof(self, produce: ProduceExchange) -> list[TopicPartition]:
        """The results made by the proxy that reveal something about a topic for which this client has not proved WRITE:
        that it is checked or being expanded, its log end, its contents, or that it is the state topic."""
        return [
            key
            for key, result in produce.results.items()
            if not (self._has_proved(key.topic) or key.topic in produce.stated)
            and (
                key.topic == self._services.state_topic
                or (
                    result.error_code not in _NEEDS_NO_PROOF
                    and not (result.error_code == Error.NOT_LEADER_OR_FOLLOWER and self._now >= self._login_ends)
                    and (
                        key in produce.pending_appends
                        or key in produce.refused_by_policy
                        or (produce.leveled is not None and key in produce.leveled.refused)
                    )
                )
            )
        ]

    def _prove_write(self, pending_response: PendingResponse, produce: ProduceExchange, topics: Sequence[str]) -> None:
        """A refusal reveals the log end or the partition count. Only clients that may write the topic get these, and
        Kafka decides which may.
        """
        produce.querying += 1

        def done(answers: dict[str, PartitionResult]) -> None:
            for topic, answer in answers.items():
                self._proved(produce, topic, answer)
            produce.querying -= 1
            self._finish_produce(pending_response, produce)

        names = dict.fromkeys(topics)
        partitions = {name: next(k.partition for k in produce.partitions() if k.topic == name) for name in names}
        self._answer_by[pending_response] = produce.answer_by
        self._query_write(produce.request, partitions, done)

    def _proved(self, produce: ProduceExchange, topic: str, answer: PartitionResult) -> None:
        produce.stated |= {topic}
        if answer.error_code not in PROVES_NOTHING:
            return
        for key in list(produce.results):
            if key.topic == topic:
                produce.results[key] = PartitionResult(partition=key.partition, error_code=answer.error_code)

    # ---- where the log starts

    def _report_log_starts(self, produce: ProduceExchange, unproved: Collection[str]) -> list[TopicPartition]:
        """Put the log start into refusals (KAFKA-5793), as Kafka does into its own. Returns the partitions whose log
        start is unknown here."""
        if produce.request.api_version < LOG_START_OFFSET_FROM:
            return []
        unknown = []
        memory = self._services.idempotence
        for key, result in produce.results.items():
            if not result.error_code or result.log_start_offset >= 0 or result.error_code in _WITHOUT_LOG_START:
                continue
            if not self._has_proved(key.topic):
                reported_later = key.topic in unproved and result.error_code not in _REVEALS_NOTHING
                if reported_later and memory.recent_log_start(key, self._now) < 0:
                    unknown.append(key)
                continue
            queried = produce.starts_queried or result.error_code in _REVEALS_NOTHING
            start = memory.log_start(key) if queried else memory.recent_log_start(key, self._now)
            if start >= 0:
                produce.results[key] = replace(result, log_start_offset=start)
            elif not queried:
                unknown.append(key)
        return [] if produce.starts_queried else unknown

    def _query_log_starts(
        self, pending_response: PendingResponse, produce: ProduceExchange, keys: Sequence[TopicPartition]
    ) -> None:
        """On the client's own connection, so that Kafka applies the client's permissions. Once for each refusal."""
        produce.starts_queried = True
        produce.querying += 1
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
        upstream = PendingResponse(LIST_OFFSETS, _LIST_OFFSETS_VERSION, correlation_id, Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            offset = parse_response_header(frame, LIST_OFFSETS, _LIST_OFFSETS_VERSION).body_offset
            for topic in decode_response(LIST_OFFSETS, _LIST_OFFSETS_VERSION, frame[offset:]).topics:
                for each in topic.partitions:
                    if not each.error_code:
                        key = TopicPartition(topic.name, each.partition_index)
                        self._services.idempotence.record_log_start(key, each.offset, self._now)
            produce.querying -= 1
            self._finish_produce(pending_response, produce)

        upstream.on_response = on_response
        self._answer_by[pending_response] = produce.answer_by
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
