"""Runs the log reads of partition sequencers against Kafka: one coroutine per effect, each returns an event."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from uuid import uuid4

from fencepost_proxy import logs
from fencepost_proxy.cluster.appends import Appends
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.configs import BrokerFacts, Configs, TopicFacts
from fencepost_proxy.cluster.fetches import Fetches, Found, NotYet
from fencepost_proxy.cluster.log_ends import LogEnds
from fencepost_proxy.cluster.producers import PartitionReading, Producers
from fencepost_proxy.cluster.transactions import Transactions
from fencepost_proxy.errors import Error, FencepostError
from fencepost_proxy.metrics import Counts
from fencepost_proxy.sequencer import events as sequencers
from fencepost_proxy.sequencer.appends import batch_to_send
from fencepost_proxy.sequencer.log_view import decoded
from fencepost_proxy.services.claim_markers import ClaimMarkers
from fencepost_proxy.services.membership import Membership
from fencepost_proxy.services.missing_rights import MissingRights
from fencepost_proxy.session.dispatcher import ForControl
from fencepost_proxy.topics.fencing import FenceBase, encode_fence_base
from fencepost_proxy.types import (
    PRODUCER_EPOCHS,
    SEQUENCE_MODULUS,
    LogEndOffset,
    Offset,
    ProducerEpoch,
    ProducerId,
    TopicPartition,
)
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.batch_scan import HeaderNames

_log = logs.get("services.log_reader")
_limited_log = logs.RateLimitedLog(_log)

#: Maximum age of a topic's Kafka configs.
FACTS_SECONDS = 10.0
#: Maximum age of the known `producer.id.expiration.ms` for a confirmed fence: several times `FACTS_SECONDS`, and far
#: below the shortest sensible value.
KNOWN_SECONDS = 60.0
_READ_SECONDS = 5.0
#: Larger or compressed batches are compared outside the event loop.
_COMPARED_HERE_BYTES = 8 * 1024
#: Immediate repeats of a log-end snapshot if the log moved meanwhile; pauses would give every offset to other writers.
_CONSISTENT_READS_MAX = 10
_RESEND_TIMEOUT_MS = 5_000
#: Prefix of transaction states while markers are written (PrepareCommit, PrepareAbort).
_ENDING = "Prepare"


class ProducerExpiration:
    """`producer.id.expiration.ms` over all brokers. Times are monotonic seconds.

    A lower value applies immediately, a higher one after all reads of `KNOWN_SECONDS` returned it. `known_until`: no
    fence is valid after it, unless all brokers responded to a later read.
    """

    def __init__(self) -> None:
        self.milliseconds = BrokerFacts().producer_id_expiration_ms
        self.known_until = float("-inf")
        self._raised: tuple[float, int] | None = (float("-inf"), sys.maxsize)  # the first read applies immediately

    def observe(self, facts: BrokerFacts, requested_at: float) -> bool:
        """Returns whether the applied value decreased."""
        before, read = self.milliseconds, facts.producer_id_expiration_ms
        if facts.complete:
            self.known_until = requested_at + KNOWN_SECONDS
        if read <= before:
            self.milliseconds, self._raised = read, None
        elif not facts.complete:
            self._raised = None
        else:
            since, lowest = self._raised or (requested_at, read)
            self._raised = since, min(lowest, read)
            if requested_at - since >= KNOWN_SECONDS:
                self.milliseconds, self._raised = self._raised[1], None
        return self.milliseconds < before


class _Fence(NamedTuple):
    """The published fence base, the producer id of its epoch, and what the leader knows of that."""

    base: FenceBase
    claim: sequencers.Claim
    producer_id: ProducerId | None
    state: sequencers.ProducerState | None
    marker_is_replicated: bool = True


class LogReader:
    """Reads for one process. `frame_bytes_max` bounds a batch that is read, `unpacked_bytes_max` its records.

    `markers`: None if no topic allows claims."""

    def __init__(
        self,
        kafka: KafkaClient,
        membership: Membership,
        frame_bytes_max: int,
        *,
        rights: MissingRights,
        names: HeaderNames,
        unpacked_bytes_max: int,
        markers: ClaimMarkers | None = None,
    ) -> None:
        self._rights = rights
        self._names = names
        self._unpacked_bytes_max = unpacked_bytes_max
        self._metadata = kafka.metadata
        self._configs = Configs(kafka)
        self._log_ends = LogEnds(kafka)
        self._fetches = Fetches(kafka)
        self._producers = Producers(kafka)
        self._transaction_states = Transactions(kafka)
        self._appends = Appends(kafka)
        self._membership = membership
        self._markers = markers or ClaimMarkers(kafka, lambda _: False, Counts())
        self._frame_bytes_max = frame_bytes_max
        self._facts: dict[str, tuple[float, TopicFacts]] = {}
        self.expiration = ProducerExpiration()

    async def carry_out(self, requested: ForControl) -> sequencers.Event:
        """Never raises: a failed read is an event too, because a sequencer without an event waits indefinitely."""
        try:
            return await self._carry_out(requested)
        except Exception as error:
            _log.crash("partition read crashed", error, partition=requested.partition)
            match requested.effect:
                case sequencers.ReadLogEnd():
                    return sequencers.LogEndUnknown(f"read crashed: {error!r}")
                case sequencers.ReadBatch(pending):
                    return sequencers.BatchRead(pending, sequencers.Unreadable(f"read crashed: {error!r}"))
                case sequencers.Resend(pending):
                    return sequencers.Resent(pending, None)
                case sequencers.PublishBase():
                    return sequencers.BasePublished(False)

    async def _carry_out(self, requested: ForControl) -> sequencers.Event:
        partition = requested.partition
        match requested.effect:
            case sequencers.ReadLogEnd(_, transactional_ids):
                return await self._snapshot(partition, transactional_ids)
            case sequencers.ReadBatch(pending, offset):
                return sequencers.BatchRead(
                    pending, await self._compared(pending, offset, await self._probe(partition, offset))
                )
            case sequencers.Resend(pending):
                return await self._resend(partition, pending)
            case sequencers.PublishBase() as proposal:
                return await self._publish(proposal)

    async def facts(self, topic: str) -> TopicFacts:
        """The topic's Kafka configs, at most `FACTS_SECONDS` old."""
        now = time.monotonic()
        known = self._facts.get(topic)
        if known is not None and now - known[0] < FACTS_SECONDS:
            return known[1]
        facts = await self._configs.topic_facts(topic, timeout_seconds=_READ_SECONDS)
        self._facts[topic] = (now, facts)
        return facts

    async def in_sync(self, topic: str) -> int:
        """See `TopicFacts`."""
        return (await self.facts(topic)).in_sync

    async def changed_facts(self, topics: Sequence[str]) -> list[str]:
        """Read the Kafka configs of these topics again, in few requests; return the topics whose configs changed.

        Deleted topics are omitted. Raises `UpstreamUnavailable`.
        """
        facts = await self._configs.facts_of_topics(topics, timeout_seconds=_READ_SECONDS)
        now = time.monotonic()
        changed = [topic for topic, found in facts.items() if self.known_facts(topic) != found]
        self._facts.update((topic, (now, found)) for topic, found in facts.items())
        return changed

    def known_facts(self, topic: str) -> TopicFacts | None:
        known = self._facts.get(topic)
        return None if known is None else known[1]

    async def _snapshot(
        self, partition: TopicPartition, transactional_ids: Sequence[str]
    ) -> sequencers.LogEndRead | sequencers.LogEndUnknown:
        try:
            facts = await self.facts(partition.topic)
            # Read before the log end, so that the snapshot contains the marker of each ended transaction.
            queried_at = time.monotonic()
            ended, ending, producer_ids = await self._transactions(partition, transactional_ids)
            for _ in range(_CONSISTENT_READS_MAX):
                reading = await self._producers.read_partition(partition, timeout_seconds=_READ_SECONDS)
                if reading.consistent:
                    break
        except UpstreamUnavailable as error:
            _limited_log.warning(f"log end {partition}", "cannot read the log end", partition=partition, reason=error)
            if error.error_code == Error.TOPIC_AUTHORIZATION_FAILED:
                await self._rights.look_up([partition.topic])
            return sequencers.LogEndUnknown(str(error), error.error_code)
        if not reading.consistent:
            return sequencers.LogEndUnknown("the log advanced during the read")
        try:
            fence = await self._fence(partition, reading)
        except FencepostError as error:
            return sequencers.LogEndUnknown(str(error))
        if fence.producer_id is None:
            return sequencers.LogEndUnknown("no producer id is agreed on yet")
        return sequencers.LogEndRead(
            sequencers.LogEndSnapshot(
                requested_at=reading.requested_at,
                log_end_offset=reading.log_end.offset,
                log_start_offset=reading.log_start_offset,
                producer_id=fence.producer_id,
                producer_state=fence.state,
                fence_base=(fence.base.producer_epoch, fence.base.base),
                claim=fence.claim,
                marker_is_replicated=fence.marker_is_replicated,
                may_claim=self._markers.may_claim(partition.topic),
                open_transactions=frozenset(reading.open_transactions),
                in_transaction={
                    each: sequencers.ProducerState(state.epoch, (state.last_sequence + 1) % SEQUENCE_MODULUS)
                    for each, state in reading.open_transactions.items()
                },
                log_append_time=facts.log_append_time,
                leader_epoch=reading.log_end.leader_epoch,
                expiration_seconds=self.expiration.milliseconds / 1000,
                expiration_known_until=self.expiration.known_until,
                clock_offset_seconds=time.time() - time.monotonic(),
                ended_transactions=ended,
                ending_transactions=ending,
                transactions_as_of=queried_at,
                producer_ids=producer_ids,
            )
        )

    async def _fence(self, partition: TopicPartition, reading: PartitionReading) -> _Fence:
        """Raises `UpstreamUnavailable`, `StateError`."""
        fence = self._known_fence(partition, reading)
        is_ahead = fence.state is not None and fence.state.producer_epoch > fence.base.producer_epoch
        if is_ahead and self._markers.may_claim(partition.topic):
            # A claim's base is stored before its marker is written, but perhaps not read here yet.
            await self._membership.joined.read_to_end(timeout_seconds=_READ_SECONDS)
            fence = self._known_fence(partition, reading)
        only_marker = fence.state == sequencers.ProducerState(fence.base.producer_epoch, 0)
        if fence.claim is sequencers.Claim.NONE or not only_marker:
            return fence
        end = await self._log_ends.partition_end(partition, timeout_seconds=_READ_SECONDS)
        same_leader = end.log_end.leader_epoch == reading.log_end.leader_epoch
        return fence._replace(marker_is_replicated=same_leader and end.high_watermark >= reading.log_end.offset)

    def _known_fence(self, partition: TopicPartition, reading: PartitionReading) -> _Fence:
        topic, view = self._metadata.topic(partition.topic), self._membership.view
        base, claim = None, sequencers.Claim.NONE
        if topic is not None:
            base = view.fence_bases.get(topic.topic_id, partition.partition)
            stored = view.fence_bases.claim(topic.topic_id, partition.partition)
            claim = sequencers.Claim.of(stored, self._membership.identity if stored else "")
        base = base or FenceBase(ProducerEpoch(0), LogEndOffset(0))
        number = base.producer_epoch // PRODUCER_EPOCHS
        producer_id = view.producer_ids.get(number)
        known = None if producer_id is None else reading.producers.get(producer_id)
        if known is None:
            return _Fence(base, claim, producer_id, None)
        epoch, next_sequence = number * PRODUCER_EPOCHS + known.epoch, (known.last_sequence + 1) % SEQUENCE_MODULUS
        return _Fence(base, claim, producer_id, sequencers.ProducerState(epoch, next_sequence))

    async def _transactions(
        self, partition: TopicPartition, transactional_ids: Sequence[str]
    ) -> tuple[frozenset[str], frozenset[str], Mapping[str, int]]:
        """Transactional ids whose coordinators no longer list the partition, ids that are ending there, and their
        producer ids; see `LogEndSnapshot`.

        A coordinator that is cut off may not list a transaction that has only joined. If its marker then takes an
        append's offset, the answer, or the resolver, reports the violation.
        """
        ended, ending = set(), set()
        producer_ids = dict.fromkeys(transactional_ids, -1)
        for transactional_id in transactional_ids:
            try:
                found = await self._transaction_states.describe(transactional_id, timeout_seconds=_READ_SECONDS)
            except UpstreamUnavailable as error:
                _limited_log.error(
                    f"transaction {transactional_id}",
                    "cannot read a transaction's state: conditional appends to its partition wait (the proxy's "
                    "principal needs DESCRIBE on transactional ids)",
                    transactional_id=transactional_id,
                    partition=partition,
                    reason=error,
                )
                continue
            if found is not None and not found.state.startswith(_ENDING):  # its next one may have a new id
                producer_ids[transactional_id] = found.producer_id
            if found is None or partition not in found.partitions:
                ended.add(transactional_id)
            elif found.state.startswith(_ENDING):
                ending.add(transactional_id)
        return frozenset(ended), frozenset(ending), producer_ids

    async def _probe(self, partition: TopicPartition, offset: int) -> sequencers.BatchReadResult:
        try:
            read = await self._fetches.read_batch(
                partition, Offset(offset), bytes_max=self._frame_bytes_max, timeout_seconds=_READ_SECONDS
            )
            if isinstance(read, Found):
                return sequencers.Found(memoryview(read.batch))
            if isinstance(read, NotYet):
                end = await self._log_ends.log_end(partition, timeout_seconds=_READ_SECONDS)
                return sequencers.NotYet(end.offset)
        except UpstreamUnavailable as error:
            return sequencers.Unreadable(str(error))
        return sequencers.OutOfRange()  # below the log start, or compacted away

    async def _compared(
        self, pending: sequencers.PendingAppend, offset: int, found: sequencers.BatchReadResult
    ) -> sequencers.BatchReadResult:
        if not isinstance(found, sequencers.Found):
            return found
        compared = found.batch, offset, pending, self._names, self._unpacked_bytes_max
        batches = (found.batch,) if pending.outcome.comparison is None else (found.batch, pending.records)
        if all(len(each) <= _COMPARED_HERE_BYTES and not parse_batch_header(each).compression for each in batches):
            return decoded(*compared)
        return await asyncio.to_thread(decoded, *compared)

    async def producer_at(self, partition: TopicPartition, offset: int) -> int | None:
        """Producer id of the batch at `offset`: -1 if it has none, None if it is not readable."""
        found = await self._probe(partition, offset)
        return parse_batch_header(found.batch).producer_id if isinstance(found, sequencers.Found) else None

    async def _resend(self, partition: TopicPartition, pending: sequencers.PendingAppend) -> sequencers.Resent:
        try:
            result = await self._appends.produce(
                partition,
                bytes(batch_to_send(pending)),
                timeout_ms=_RESEND_TIMEOUT_MS,
                topic_id=pending.sending.topic_id,
            )
        except UpstreamUnavailable:
            return sequencers.Resent(pending, None)
        return sequencers.Resent(pending, result)

    async def _publish(self, proposal: sequencers.PublishBase) -> sequencers.BasePublished:
        partition, producer_epoch = proposal.partition, proposal.producer_epoch
        topic = self._metadata.topic(partition.topic)
        facts = {
            "partition": partition,
            "reason": proposal.reason,
            "new_epoch": producer_epoch,
            "new_base": proposal.base,
        }
        is_claim = proposal.claim is not sequencers.Claim.NONE
        if is_claim:
            _log.info("claiming a partition", **facts, shared=proposal.claim is sequencers.Claim.SHARED)
        else:
            _log.warning("log advanced without fenced appends: proposing a new fence base", **facts)
        if topic is None or (
            proposal.claim is not sequencers.Claim.NONE and not await self._markers.permitted(partition)
        ):
            return sequencers.BasePublished(False)
        epoch, view = ProducerEpoch(producer_epoch), self._membership.view
        claim = proposal.claim.stored(self._membership.identity) if is_claim else None
        base = LogEndOffset(proposal.base)
        record = encode_fence_base(topic.topic_id, partition.partition, epoch, uuid4(), base, claim=claim)
        older = view.fence_bases.older(topic.topic_id, partition.partition, epoch)
        number, used = divmod(producer_epoch, PRODUCER_EPOCHS)
        try:
            async with asyncio.timeout(_READ_SECONDS):
                # Acquire the next producer id long before the first partition needs it.
                for each in (number, number + 1) if used >= PRODUCER_EPOCHS // 2 else (number,):
                    await self._membership.joined.acquire_producer_id(each, timeout_seconds=_READ_SECONDS)
                await self._membership.joined.append([record, *older])
        except (FencepostError, TimeoutError) as error:
            _log.error("failed to store the new fence base", partition=partition, reason=error)
            return sequencers.BasePublished(False)
        ours = view.fence_bases.proposal(topic.topic_id, partition.partition, epoch) == record.key
        if ours and is_claim:
            await self._markers.write(partition, await self._membership.joined.acquire_producer_id(number), used)
        return sequencers.BasePublished(True, ours=ours)
