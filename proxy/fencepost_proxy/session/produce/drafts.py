"""From the batches of a Produce request to pending appends, or refusals."""

from __future__ import annotations

from dataclasses import dataclass

from fencepost_policies.append import Facts, Refusal
from fencepost_policies.append_policy import refusal_of
from fencepost_proxy.errors import ClientProtocolError, Error
from fencepost_proxy.sequencer.events import AppendContext, PendingAppend, Placement
from fencepost_proxy.session.batches.partition_counts import pipeline_of
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange, refused
from fencepost_proxy.session.batches.reading import append_of, checked_append
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import Count
from fencepost_proxy.session.frames.services import Services, Settings
from fencepost_proxy.session.transactions.appends import TransactionalAppends
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionData, PartitionResult, TopicData

#: Clients give up at `timeout_ms`; an unknown outcome is reported a little earlier.
_ANSWER_BY = 0.9


@dataclass(slots=True, eq=False)
class Drafts:
    _state: ConnectionState
    _pipelines: FailedPipelines
    _services: Services
    _transactions: TransactionalAppends

    def deny_topics(self, produce: ProduceExchange) -> None:
        """Kafka's denial is final: no level, barrier or sequencer is involved."""
        for key in produce.partitions:
            error_code = produce.received.denied.get(key.topic)
            if error_code is not None:
                produce.results.override(key, PartitionResult(partition=key.partition, error_code=error_code))

    def check_policies(self, produce: ProduceExchange, now: float) -> None:
        """Apply the policies of its topics, at arrival and after each wait before the sequencers.

        On an unchecked topic, what a refusal means for the producer's later batches is Kafka's matter, as when Kafka
        itself refuses a batch.
        """
        for topic in produce.request.topics:
            policy = self._services.policy(topic.name)
            if policy is None or not policy.policies:
                continue
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                if key in produce.results:
                    continue
                assert produce.received.readings is not None
                scan = produce.received.readings.of(key, data.records, policy)
                if isinstance(scan, Refusal):
                    if not policy.is_checked:  # else `_take_draft` refuses it
                        self._state.refuse(produce, key, scan)
                    continue
                refusal = refusal_of(append_of(key, scan), policy.policies, Facts(self._services.unix_ms(now)))
                if refusal is not None:
                    self._state.refuse(produce, key, refusal)
                    produce.checks.refused_by_policy |= {key}

    def take(self, produce: ProduceExchange, now: float) -> None:
        """A pending append for each checked partition, or a refusal if its batch cannot be one."""
        services = self._services
        request = produce.request
        refused_before = frozenset(produce.results)
        instance_id, opened_at = services.instance_id, self._state.opened_at
        context = AppendContext(instance_id, opened_at, services.alone(now), services.taken_over(now))
        for topic in request.topics:
            if topic.name == services.state_topic:
                self._deny(produce, topic)
                continue
            policy = services.policy(topic.name)
            if policy is None or not policy.is_checked:
                continue
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                if key not in refused_before:
                    self._take_draft(produce, policy, context, key, data)

    def _deny(self, produce: ProduceExchange, topic: TopicData) -> None:
        """The proxy's state topic: a client that wrote to it could switch off checks."""
        message = f"{topic.name} is the proxy's state topic; it is closed to clients"
        for data in topic.partitions:
            key = TopicPartition(topic.name, data.partition)
            refusal = Refusal(Error.TOPIC_AUTHORIZATION_FAILED, "state_topic", message)
            produce.results.override(key, refused(key, refusal))  # it may be refused for its idempotence level
            self._state.commands.append(Count("refusal", refusal.reason, key))

    def _take_draft(
        self,
        produce: ProduceExchange,
        policy: TopicPolicy,
        context: AppendContext,
        key: TopicPartition,
        data: PartitionData,
    ) -> None:
        if key in produce.pending_appends or key in produce.results:
            raise ClientProtocolError(f"a Produce request names {key} twice")
        assert produce.received.readings is not None
        scan = produce.received.readings.of(key, data.records, policy)
        append = checked_append(key, scan, self._services.shared_producer_ids)
        if isinstance(append, Refusal):
            self._state.refuse(produce, key, append)
            produce.checks.misread.append((key, pipeline_of(data)))
            return
        assert not isinstance(scan, Refusal)
        assert data.records is not None
        now, transactional_id = self._state.now, produce.request.transactional_id
        pending = PendingAppend(
            connection=self._state.connection,
            partition=key,
            append=append,
            records=data.records,
            digest=scan.digest,
            check=policy.check,
            submitted_at=now,
            transactional_id=transactional_id,
            context=context,
            placement=Placement(now + produce.received.wait_seconds),
        )
        pending.sending.leader_epoch = self._services.leader_epoch(key)
        if pending.append.transactional and transactional_id is not None:
            pending.sending.has_partitions = self._services.transactions.owns(transactional_id, *pending.producer)
            if self._transactions.is_ending(transactional_id, pending):
                where = f"topic={key.topic} partition={key.partition}"
                message = f"TRY_AGAIN {where}: a commit of its transaction is being sent to Kafka"
                self._state.refuse(produce, key, Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message))
                return
        if produce.silent and pending.append.expected_base_offset is not None:
            raise ClientProtocolError(f"an expected offset for {key} with acks=0: a mismatch could not be reported")
        if not self._pipelines.refuse_after_failed(produce, pending):
            self._pipelines.failed.pop((key, pending.pipeline), None)
            produce.pending_appends[key] = pending


def longest_wait(settings: Settings, timeout_ms: int) -> float:
    """How many seconds an append may wait before it is sent."""
    return min(settings.sequencer_wait_max_seconds, max(timeout_ms, 0) / 3000)


def due_by(now: float, timeout_ms: int) -> float:
    return now + _ANSWER_BY * max(timeout_ms, 100) / 1000
