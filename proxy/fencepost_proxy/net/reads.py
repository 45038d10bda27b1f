"""Runs the log reads of partition sequencers against Kafka: one coroutine per effect, each returns an event."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from uuid import uuid4

from fencepost_proxy import logs
from fencepost_proxy.errors import FencepostError
from fencepost_proxy.net.control import BrokerFacts, ControlClient, Found, NotYet, TopicFacts, UpstreamUnavailable
from fencepost_proxy.net.state_topic import StateTopic
from fencepost_proxy.partitions import events as gates
from fencepost_proxy.partitions.landed import read_landed
from fencepost_proxy.session.switch import ForControl
from fencepost_proxy.session.turn import batch_to_send
from fencepost_proxy.topics.state import encode_stamp_base
from fencepost_proxy.types import (
    PRODUCER_EPOCHS,
    SEQUENCE_MODULUS,
    LogEndOffset,
    Offset,
    ProducerEpoch,
    TopicPartition,
)
from fencepost_proxy.wire.batch import HeaderNames, parse_batch_header

_log = logs.get("net.reads")
_limited_log = logs.RateLimitedLog(_log)

#: Maximum age of a topic's Kafka configs.
FACTS_SECONDS = 10.0
#: Maximum age of the `producer.id.expiration.ms` behind a confirmed fence: several times `FACTS_SECONDS`, and far below
#: the shortest sensible value.
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


class GateReads:
    """Reads for one process. `frame_bytes_max` bounds a batch that is read, `unpacked_bytes_max` its records."""

    def __init__(
        self,
        control: ControlClient,
        state: StateTopic,
        frame_bytes_max: int,
        *,
        names: HeaderNames,
        unpacked_bytes_max: int,
    ) -> None:
        self._names = names
        self._unpacked_bytes_max = unpacked_bytes_max
        self._control = control
        self._state = state
        self._frame_bytes_max = frame_bytes_max
        self._facts: dict[str, tuple[float, TopicFacts]] = {}
        self.expiration = ProducerExpiration()

    async def carry_out(self, wanted: ForControl) -> gates.Event:
        """Never raises: a failed read is an event too, because a sequencer without an event waits indefinitely."""
        try:
            return await self._carry_out(wanted)
        except Exception as error:
            _log.crash("partition read crashed", error, partition=wanted.partition)
            match wanted.effect:
                case gates.ReadTail():
                    return gates.TailUnknown(f"read crashed: {error!r}")
                case gates.Look(ticket):
                    return gates.Looked(ticket, gates.Unreadable(f"read crashed: {error!r}"))
                case gates.Resend(ticket):
                    return gates.Resent(ticket, None)
                case gates.PublishBase():
                    return gates.BasePublished(False)

    async def _carry_out(self, wanted: ForControl) -> gates.Event:
        partition = wanted.partition
        match wanted.effect:
            case gates.ReadTail(_, transactional_ids):
                return await self._tail(partition, transactional_ids)
            case gates.Look(ticket, offset):
                return gates.Looked(ticket, await self._compared(ticket, offset, await self._look(partition, offset)))
            case gates.Resend(ticket):
                return await self._resend(partition, ticket)
            case gates.PublishBase(_, producer_epoch, base, reason):
                return await self._publish(partition, producer_epoch, base, reason)

    async def facts(self, topic: str, *, fresh: bool = False) -> TopicFacts:
        """The topic's Kafka configs, at most `FACTS_SECONDS` old."""
        now = time.monotonic()
        known = self._facts.get(topic)
        if known is not None and not fresh and now - known[0] < FACTS_SECONDS:
            return known[1]
        facts = await self._control.topic_facts(topic, timeout_seconds=_READ_SECONDS)
        self._facts[topic] = (now, facts)
        return facts

    async def changed_facts(self, topics: Sequence[str]) -> list[str]:
        """Read the Kafka configs of these topics again, in few requests; return the topics whose configs changed.

        Deleted topics are omitted. Raises `UpstreamUnavailable`.
        """
        facts = await self._control.facts_of_topics(topics, timeout_seconds=_READ_SECONDS)
        now = time.monotonic()
        changed = [topic for topic, found in facts.items() if self.known_facts(topic) != found]
        self._facts.update((topic, (now, found)) for topic, found in facts.items())
        return changed

    def known_facts(self, topic: str) -> TopicFacts | None:
        known = self._facts.get(topic)
        return None if known is None else known[1]

    async def _tail(
        self, partition: TopicPartition, transactional_ids: Sequence[str]
    ) -> gates.TailRead | gates.TailUnknown:
        try:
            facts = await self.facts(partition.topic)
            # Read before the log end, so that the snapshot contains the marker of each ended transaction.
            asked_at = time.monotonic()
            ended, ending, producer_ids = await self._transactions(partition, transactional_ids)
            for _ in range(_CONSISTENT_READS_MAX):
                reading = await self._control.read_partition(partition, timeout_seconds=_READ_SECONDS)
                if reading.consistent:
                    break
        except UpstreamUnavailable as error:
            _limited_log.warning(f"tail {partition}", "cannot read the log end", partition=partition, reason=error)
            return gates.TailUnknown(str(error), error.error_code)
        if not reading.consistent:
            return gates.TailUnknown("the log advanced during the read")
        topic = self._control.topic(partition.topic)
        base = None if topic is None else self._state.view.stamp_base(topic.topic_id, partition.partition)
        number = 0 if base is None else base.producer_epoch // PRODUCER_EPOCHS
        producer_id = self._state.view.producer_id(number)
        if producer_id is None:
            return gates.TailUnknown("no producer id is agreed on yet")
        known = reading.producers.get(producer_id)
        return gates.TailRead(
            gates.Tail(
                requested_at=reading.requested_at,
                log_end_offset=reading.log_end.offset,
                log_start_offset=reading.log_start_offset,
                producer_id=producer_id,
                producer_state=None
                if known is None
                else gates.ProducerState(
                    number * PRODUCER_EPOCHS + known.epoch, (known.last_sequence + 1) % SEQUENCE_MODULUS
                ),
                stamp_base=(0, 0) if base is None else (base.producer_epoch, base.base),
                open_transactions=frozenset(reading.open_transactions),
                in_transaction={
                    each: gates.ProducerState(state.epoch, (state.last_sequence + 1) % SEQUENCE_MODULUS)
                    for each, state in reading.open_transactions.items()
                },
                log_append_time=facts.log_append_time,
                expiration_seconds=self.expiration.milliseconds / 1000,
                expiration_known_until=self.expiration.known_until,
                wall_minus_monotonic_seconds=time.time() - time.monotonic(),
                ended_transactions=ended,
                ending_transactions=ending,
                transactions_as_of=asked_at,
                producer_ids=producer_ids,
            )
        )

    async def _transactions(
        self, partition: TopicPartition, transactional_ids: Sequence[str]
    ) -> tuple[frozenset[str], frozenset[str], Mapping[str, int]]:
        """Transactional ids whose coordinators no longer list the partition, ids that are ending there, and their
        producer ids; see `Tail`."""
        ended, ending = set(), set()
        producer_ids = dict.fromkeys(transactional_ids, -1)
        for transactional_id in transactional_ids:
            try:
                found = await self._control.transaction(transactional_id, timeout_seconds=_READ_SECONDS)
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

    async def _look(self, partition: TopicPartition, offset: int) -> gates.LookResult:
        try:
            read = await self._control.read_batch(
                partition, Offset(offset), bytes_max=self._frame_bytes_max, timeout_seconds=_READ_SECONDS
            )
            if isinstance(read, Found):
                return gates.Found(memoryview(read.batch))
            if isinstance(read, NotYet):
                end = await self._control.log_end(partition, timeout_seconds=_READ_SECONDS)
                return gates.NotYet(end.offset)
        except UpstreamUnavailable as error:
            return gates.Unreadable(str(error))
        return gates.OutOfRange()  # below the log start, or compacted away

    async def _compared(self, ticket: gates.Ticket, offset: int, found: gates.LookResult) -> gates.LookResult:
        if not isinstance(found, gates.Found):
            return found
        compared = found.batch, offset, ticket, self._names, self._unpacked_bytes_max
        if len(found.batch) <= _COMPARED_HERE_BYTES and not parse_batch_header(found.batch).compression:
            landed = read_landed(*compared)
        else:
            landed = await asyncio.to_thread(read_landed, *compared)
        return gates.Found(found.batch, offset, landed)

    async def producer_at(self, partition: TopicPartition, offset: int) -> int | None:
        """Producer id of the batch at `offset`: -1 if it has none, None if it is not readable."""
        found = await self._look(partition, offset)
        return parse_batch_header(found.batch).producer_id if isinstance(found, gates.Found) else None

    async def _resend(self, partition: TopicPartition, ticket: gates.Ticket) -> gates.Resent:
        try:
            result = await self._control.produce(
                partition, bytes(batch_to_send(ticket)), timeout_ms=_RESEND_TIMEOUT_MS, topic_id=ticket.topic_id
            )
        except UpstreamUnavailable:
            return gates.Resent(ticket, None)
        return gates.Resent(ticket, result)

    async def _publish(
        self, partition: TopicPartition, producer_epoch: int, base: int, reason: str
    ) -> gates.BasePublished:
        topic = self._control.topic(partition.topic)
        _log.warning(
            "log advanced without fenced appends: proposing a new fence base",
            partition=partition,
            reason=reason,
            new_epoch=producer_epoch,
            new_base=base,
        )
        if topic is None:
            return gates.BasePublished(False)
        epoch, view = ProducerEpoch(producer_epoch), self._state.view
        record = encode_stamp_base(topic.topic_id, partition.partition, epoch, uuid4(), LogEndOffset(base))
        older = view.older_stamp_bases(topic.topic_id, partition.partition, epoch)
        number, used = divmod(producer_epoch, PRODUCER_EPOCHS)
        try:
            async with asyncio.timeout(_READ_SECONDS):
                # Acquire the next producer id long before the first partition needs it.
                for each in (number, number + 1) if used >= PRODUCER_EPOCHS // 2 else (number,):
                    await self._state.acquire_producer_id(each, timeout_seconds=_READ_SECONDS)
                await self._state.append([record, *older])
        except (FencepostError, TimeoutError) as error:
            _log.error("failed to store the new fence base", partition=partition, reason=error)
            return gates.BasePublished(False)
        won = view.stamp_base_proposal(topic.topic_id, partition.partition, epoch)
        return gates.BasePublished(True, ours=won == record.key)
