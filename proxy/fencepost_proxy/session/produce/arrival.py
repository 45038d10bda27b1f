"""Produce requests that concern checked partitions: from the frame, through the sequencers, to the one response.

`ProduceExchange` (`produce_exchange.py`) is the state of one such request. The steps:

1. Each checked partition gets a pending append, or a refusal.
2. The pending appends are submitted, one partition sequencer after the other.
3. Admitted appends are sent, and Kafka's results are reported to their sequencers.
4. The sequencers' final results become one response.

A request may name partitions that do not exist, or that cannot be appended to for long. Neither may delay other clients
more than Kafka would. So partitions absent from metadata are answered before any partition is waited for
(`_waits_for_metadata`), and an admitted append blocks its partition for a moment only before it is sent ahead of the
rest (`Admission.send_ahead`).

While a request waits for a sequencer, later requests are not read. A broker too handles one request of a connection at
a time. Once sent, a request is one of `ResponseQueue.in_flight` until its last partition has a result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import ClientProtocolError, Error, LimitError
from fencepost_proxy.sequencer.appends import not_authorized
from fencepost_proxy.session.batches.levels import leveled_produce
from fencepost_proxy.session.batches.partition_counts import pipeline_of
from fencepost_proxy.session.batches.produce_exchange import (
    NOTHING_DENIED,
    NotFound,
    ProduceExchange,
    Received,
    retriable,
)
from fencepost_proxy.session.batches.reading import PARTITIONS_MAX, TOPICS_AT_ONCE, ManyPartitions, Readings
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.response_queue import ResponseQueue, relayed
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.connection.threads import ThreadWork
from fencepost_proxy.session.connection.unchecked import UncheckedSamples
from fencepost_proxy.session.frames.cutter import INT32
from fencepost_proxy.session.frames.messages import Count, HeadersCopied, TopicStale
from fencepost_proxy.session.frames.producer_ids import refuse_producer_id
from fencepost_proxy.session.frames.services import Services
from fencepost_proxy.session.frames.steps import Resume, Steps, Wait
from fencepost_proxy.session.produce.admission import Admission
from fencepost_proxy.session.produce.barriers import Barriers, policies_but_for
from fencepost_proxy.session.produce.completion import Completion
from fencepost_proxy.session.produce.drafts import Drafts, due_by, longest_wait
from fencepost_proxy.session.produce.idempotence import IdempotenceChecks
from fencepost_proxy.session.produce.topic_ids import NONE_NAMELESS, TopicIds
from fencepost_proxy.session.transactions.appends import TransactionalAppends
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.peeks import names_producer
from fencepost_proxy.wire.primitives import split_tags
from fencepost_proxy.wire.produce import (
    BY_TOPIC_ID,
    LEVEL_TAG,
    PartitionData,
    PartitionResult,
    ProduceRequest,
    parse_produce_request,
)


@dataclass(slots=True, eq=False)
class Arrival:
    _state: ConnectionState
    _holds: ReadHolds
    _queue: ResponseQueue
    _pipelines: FailedPipelines
    _proofs: Proofs
    _threads: ThreadWork
    _samples: UncheckedSamples
    _services: Services
    _topic_ids: TopicIds
    _transactions: TransactionalAppends
    _barriers: Barriers
    _drafts: Drafts
    _levels: IdempotenceChecks
    _admission: Admission
    _completion: Completion
    _news: Resume | None = None  # continues a request that waits before its sequencers

    @property
    def awaits_news(self) -> bool:
        """A request waits for an append barrier or for metadata."""
        return self._news is not None

    def produce(self, frame: memoryview, whole: ProduceRequest | None = None) -> Steps[None]:
        """Its whole life, until it is answered. `whole` – the request, if it was already parsed."""
        try:
            whole = whole or parse_produce_request(frame, partitions_max=PARTITIONS_MAX)
        except LimitError:
            yield from self._produce_many(frame)
            return
        self._holds.silent = whole.acks == 0
        self._state.client_id = whole.client_id
        produce = yield from self._read(whole, starts_at=self._state.read_bytes - len(frame))
        if produce is None:
            self._transactions.deny(whole)
            return
        # Whatever is read from here on was sent with knowledge of these.
        self._pipelines.forget_known(produce.received.starts_at)
        if produce.received.not_found:
            self._topic_ids.fail(produce)
        waits = self._check_on_arrival(produce)
        if not (waits or produce.concerns_checks):
            self._forward_unread(produce.request, frame)
            return
        # Only now: an unreadable request raises before this, and leaves no pending response with reserved memory.
        self._queue.expect(produce.pending_response, silent=produce.silent)
        self._holds.waiting_produce = produce
        while waits:
            yield Wait(self._await_news)
            if self._holds.waiting_produce is not produce:
                return  # its connection ends
            waits = self._check_before_sequencers(produce)
        self._fail_pipelines(produce)
        yield from self._admission.send(produce)
        if produce in self._queue.in_flight:
            yield from self._completion.answer(produce)

    def _read(self, whole: ProduceRequest, starts_at: int) -> Steps[ProduceExchange | None]:
        """Name its topics, check the client's permissions, and read its batches. None: it may not use its transactional
        id.

        After each wait everything is checked again: the configs of its topics, their names and the client's permissions
        may have changed.
        """
        services = self._services
        denied, nameless, readings, leveled = NOTHING_DENIED, NONE_NAMELESS, None, None
        wait_seconds = longest_wait(services, whole.timeout_ms)
        while True:
            request = whole
            not_found: tuple[NotFound, ...] = ()
            if whole.api_version >= BY_TOPIC_ID:
                if unknown := self._topic_ids.unknown(whole, nameless):
                    nameless = yield from self._topic_ids.look_up(whole, nameless, unknown)
                    continue
                request, not_found = self._topic_ids.named(whole, nameless, starts_at)
                if not_found and whole.acks == 0:
                    raise ClientProtocolError(f"an append with acks=0 failed: {not_found[0].error_code}")
            self._refuse_producer_ids(request)
            transactional_id = request.transactional_id
            if transactional_id is not None and self._transactions.must_prove(transactional_id, request):
                names = transactional_id, request.correlation_id, request.client_id
                if not (yield from self._proofs.prove_use(*names)):
                    return None
                denied, readings = NOTHING_DENIED, None
                continue
            if unproved := self._unproved(request, denied):
                until = due_by(self._state.now, request.timeout_ms)
                denied = {**denied, **(yield from self._proofs.prove_write(request, unproved, until))}
                readings = None
                continue
            now = self._state.now
            if not services.fresh(now):
                leveled = None
                break
            request, leveled = leveled_produce(request, policies_but_for(denied, services), now + wait_seconds)
            if readings is not None:
                break
            readings = self._requested_readings(request, denied, now)
            if readings.here():
                break
            yield from self._threads.read(readings.elsewhere)
        produce = ProduceExchange(
            request,
            Received(starts_at, self._state.now, wait_seconds, denied, readings, not_found),
            answer_by=due_by(self._state.now, request.timeout_ms),
        )
        produce.checks.leveled = leveled
        return produce

    def _await_news(self, resume: Resume) -> None:
        self._news = resume

    def news(self) -> None:
        """A barrier opened, metadata arrived, or time has passed."""
        if self._news is not None:
            resume, self._news = self._news, None
            resume()

    def earlier_answered(self) -> None:
        """The waiting request may have waited for that to be sent without a producer id."""
        waiting = self._holds.waiting_produce
        if waiting is not None and waiting.checks.leveled is not None and waiting.checks.leveled.waits:
            self.news()

    def _refuse_producer_ids(self, request: ProduceRequest) -> None:
        """Clients may not use those of fenced appends. On checked topics such batches are refused one by one."""
        for topic in request.topics:
            policy = self._services.policy(topic.name)
            if policy is not None and (policy.is_checked or policy.checks_count):
                continue
            if topic.partitions and self._services.fresh(self._state.now):
                first = topic.partitions[0]
                self._samples.read(TopicPartition(topic.name, first.partition), first.records)
            if any(names_producer(data.records, self._services.shared_producer_ids) for data in topic.partitions):
                raise refuse_producer_id()

    def _unproved(self, request: ProduceRequest, denied: Mapping[str, int]) -> dict[str, int]:
        if not (self._services.clients_log_in and self._services.fresh(self._state.now)):
            return {}
        return self._proofs.unproved(self._concerned(request, denied))

    def _check_on_arrival(self, produce: ProduceExchange) -> bool:
        """Whether it waits for a barrier, for metadata, or for earlier batches without producer ids."""
        if self._services.fresh(self._state.now):
            for where, copied_from in () if produce.received.readings is None else produce.received.readings.copied:
                self._state.commands.append(HeadersCopied(where, copied_from, produce.request.client_id))
            if produce.checks.leveled is not None:
                self._levels.check(produce, produce.checks.leveled)
            if produce.received.denied:
                self._drafts.deny_topics(produce)
        return self._check_before_sequencers(produce)

    def _check_before_sequencers(self, produce: ProduceExchange) -> bool:
        """The same, after each wait. False: each of its checked partitions has a pending append, or a result.

        The configs of its topics, their partitions and what this process knows may have changed.
        """
        now = self._state.now
        if not self._services.fresh(now):
            self._fail_closed(produce)
            return False
        self._drafts.check_policies(produce, now)
        if (
            self._waits_for_metadata(produce, now)
            or self._levels.waits(produce, now)
            or self._barriers.waits(produce, now)
        ):
            return True
        try:
            self._drafts.take(produce, now)
        except ClientProtocolError:
            self._barriers.leave(produce, unsent=True)
            raise
        return False

    def _requested_readings(self, request: ProduceRequest, denied: Mapping[str, int], now: float) -> Readings:
        """Read its batches, as far as the decisions about them need it."""
        services = self._services
        readings = Readings(services.header_names, services.decompressed_bytes_max, services.read_here_bytes_max)
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

    def _produce_many(self, frame: memoryview) -> Steps[None]:
        """It has too many partitions to be read. Check only its topics, some at a time."""
        services, many = self._services, ManyPartitions(frame)
        self._holds.silent = True  # perhaps
        yield from self._threads.read(many.read)
        request, nameless, probed = many.stated(), NONE_NAMELESS, 0
        self._holds.silent = request.acks == 0
        while True:
            if not services.fresh(self._state.now):
                self._queue.close("the topic configs are not (re)read yet, and a request has many partitions")
                return
            if any(field_tag == LEVEL_TAG for field_tag, _ in split_tags(request.header_tags)):
                raise _too_many("it states an idempotence level")
            end = probed + TOPICS_AT_ONCE
            ids = many.topic_ids[probed:end]
            if ids and (unknown := self._topic_ids.unknown(request, nameless, ids)):
                nameless = yield from self._topic_ids.look_up(request, nameless, unknown)
                continue
            if any(each not in services.topic_names for each in ids):
                raise _too_many("Kafka does not know the id of one of its topics")
            for name in [services.topic_names[each] for each in ids] or many.topics[probed:end]:
                if name == services.state_topic or services.policy(name) is not None:
                    raise _too_many(f"topic {name} is one that this proxy checks")
            probed = end
            if end >= max(len(many.topics), len(many.topic_ids)):
                break
            yield from self._threads.read(lambda: None)  # other connections go on meanwhile
        self._state.client_id = request.client_id
        self._forward_unread(request, frame)

    def _waits_for_metadata(self, produce: ProduceExchange, now: float) -> bool:
        """False: all its partitions are known to exist, or are refused.

        Metadata may be older than an expansion: a partition is absent only if metadata requested after the request's
        arrival does not show it.
        """
        services = self._services
        absent: dict[TopicPartition, tuple[Error | None, PartitionData]] = {}
        stale: dict[str, None] = {}
        for topic in produce.request.topics:
            policy = None if topic.name in produce.received.denied else services.policy(topic.name)
            if policy is None or not policy.is_checked or topic.name == services.state_topic:
                continue
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                known = Error.NONE if key in produce.results else services.metadata_error(key, produce.received.at)
                if known is None:
                    stale[topic.name] = None
                if known != Error.NONE:
                    absent[key] = known, data
        if stale and now < produce.received.at + produce.received.wait_seconds:
            self._state.commands += [TopicStale(topic) for topic in stale]
            return True
        for key, (known, data) in absent.items():
            if key.topic in stale:
                message = f"TRY_AGAIN topic={key.topic}: metadata could not be read in time"
                self._state.refuse(produce, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
            elif known == Error.TOPIC_AUTHORIZATION_FAILED:
                self._state.refuse(produce, key, not_authorized(key.topic))
            else:
                produce.results.refuse(key, PartitionResult(key.partition, Error.UNKNOWN_TOPIC_OR_PARTITION))
                self._state.commands.append(Count("refusal", "unknown_partition"))
            produce.checks.misread.append((key, pipeline_of(data)))
        produce.sequencer_seconds = max(produce.sequencer_seconds, now - produce.received.at)
        return False

    def _fail_pipelines(self, produce: ProduceExchange) -> None:
        """A refusal before the sequencer fails the pipeline as the sequencer would: later appends leave a gap."""
        if produce.checks.leveled is not None:
            for key in produce.checks.leveled.tries_again:
                self._pipelines.fail(produce, (key, produce.checks.leveled.producers[key]), produce.results[key])
        for pipeline_key in produce.checks.misread:
            self._pipelines.fail(produce, pipeline_key, produce.results[pipeline_key[0]])
        for topic in produce.request.topics if produce.checks.refused_by_policy or produce.received.denied else ():
            policy = self._services.policy(topic.name)
            for data in topic.partitions if policy is not None and policy.is_checked else ():
                key = TopicPartition(topic.name, data.partition)
                if key in produce.checks.refused_by_policy or topic.name in produce.received.denied:
                    self._pipelines.fail(produce, (key, pipeline_of(data)), produce.results[key])

    def _forward_unread(self, request: ProduceRequest, frame: memoryview) -> None:
        """It was collected because it might contain a checked topic; it does not."""
        self._state.release_collected()
        if request.acks != 0:
            self._queue.relay(relayed(PRODUCE, request.api_version, request.correlation_id))
        self._queue.upstream_out += [INT32.pack(len(frame)), frame]
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

    def _fail_closed(self, produce: ProduceExchange) -> None:
        """The topic configs are outdated, so any topic may be checked: refuse all appends with a retriable error.

        Their pipelines fail too, as at a sequencer:

        1. A, expecting 15, arrives while the configs are outdated, and is refused.
        2. B, expecting 16, was sent after A. It arrives when the configs are current again.
        3. Meanwhile another writer has appended at 15. B must not be appended after that record.
        """
        message = "TRY_AGAIN the proxy has not (re)read its topic configs yet"
        for topic in produce.request.topics:
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                result = produce.results.override(key, retriable(key, message))
                self._pipelines.fail(produce, (key, pipeline_of(data)), result)
        self._state.commands.append(Count("refusal", "not_ready"))


def _too_many(why: str) -> LimitError:
    return LimitError(
        f"a Produce request names more than {PARTITIONS_MAX} topics or partitions, and {why}; send smaller requests"
    )
