"""Reads from a leader that other replicas confirm: Metadata v10–13, and ListOffsets for the high watermark.

A broker that does not respond in time gets a new connection. Retried as in `log_ends`, and if another replica knows a
later leader.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Final, TypeVar

from fencepost_proxy.cluster.broker import BrokerConnection, Call, OutcomeUnknown, UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.log_ends import LATEST, list_offset_call, read_list_offset
from fencepost_proxy.cluster.metadata import ClusterMetadata, Leader, from_response
from fencepost_proxy.cluster.pool import Purpose
from fencepost_proxy.cluster.responses import Retry
from fencepost_proxy.types import NO_TOPIC_ID, Monotonic, NodeId, Offset, TopicPartition
from fencepost_proxy.wire import apis
from fencepost_proxy.wire.schema import Message

_T = TypeVar("_T")
#: If a replica does not report the leader in this time, the other replicas are queried too.
_ONE_MORE_SECONDS: Final = 0.2


class ConfirmedLeader:
    """Queries replicas that responded most recently first."""

    def __init__(self, kafka: KafkaClient) -> None:
        self.kafka = kafka
        self._reported_at: dict[NodeId, float] = {}  # when a broker last reported a partition's leader
        #: Queries that begin in one iteration of the event loop, and their topics, are sent together.
        self._starting: dict[NodeId, tuple[set[str], asyncio.Task[ClusterMetadata | None]]] = {}

    async def high_watermark(self, tp: TopicPartition, *, in_sync: int, timeout_seconds: float | None = None) -> Offset:
        """The high watermark from a confirmed leader: everything acknowledged before this call is below it."""

        async def query(connection: BrokerConnection, leader: Leader, deadline: Monotonic) -> Offset:
            call = list_offset_call(connection, tp, leader.leader_epoch, LATEST)
            read = request_or_close(connection, call, deadline)
            return read_list_offset(await self.confirmed(read, tp, leader, in_sync=in_sync, deadline=deadline))

        return await self.kafka.query_leader(tp, query, timeout_seconds, Purpose.LEADERS)

    async def confirmed(
        self, read: Awaitable[_T], tp: TopicPartition, leader: Leader, *, in_sync: int, deadline: Monotonic
    ) -> _T:
        """The result of a read from this leader. Raises Retry if other replicas do not confirm it.

        A leader that is partitioned from the other brokers, but not from the proxy, keeps responding as leader
        indefinitely, and the proxy's metadata may come from it. `in_sync` – min.insync.replicas. Apart from this
        leader, all replicas but `in_sync` must know of no later leader. docs/decisions/0014 shows that this suffices.
        """
        # Queried now, not earlier: a replica that has stored appends of a later leader by now knows that leader.
        confirming = self.kafka.run(self._confirm_leader(tp, leader, in_sync, deadline), "confirm a leader")
        try:
            answer = await read
            await confirming
        finally:
            confirming.cancel()
        return answer

    async def _confirm_leader(self, tp: TopicPartition, leader: Leader, in_sync: int, deadline: Monotonic) -> None:
        """Raises Retry if another replica knows of a later leader, or too few replicas respond."""
        info = self.kafka.topic(tp.topic)
        if info is None or tp.partition not in info.partitions:
            raise Retry("is no longer known")
        replicas = set(info.partitions[tp.partition].replicas)
        requested = len(replicas) - in_sync
        others = [each for each in replicas if each != leader.node_id and each in self.kafka.brokers]
        if in_sync == 1:
            requested = min(requested, len(others))  # otherwise one dead replica would confirm nothing
        # Query no more replicas than needed, those that responded most recently first: others may be down.
        others.sort(key=lambda node_id: self._reported_at.get(node_id, float("-inf")))
        queried: set[asyncio.Task[ClusterMetadata | None]] = set()
        try:
            while requested > 0:
                while others and len(queried) < requested:
                    queried.add(self.kafka.run(self._reported_by(others.pop(), tp.topic, deadline), "leader"))
                if len(queried) < requested:
                    raise Retry(f"too few replicas are reachable to confirm that broker {leader.node_id} leads")
                patience = _ONE_MORE_SECONDS if others else None
                done, queried = await asyncio.wait(queried, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    queried |= {
                        self.kafka.run(self._reported_by(each, tp.topic, deadline), "leader") for each in others
                    }
                    others.clear()
                for each in done:
                    reported = each.result()
                    news = reported and reported.topics.get(tp.topic)
                    if not reported or not news or tp.partition not in news.partitions:
                        continue
                    partition = news.partitions[tp.partition]
                    if news.topic_id != info.topic_id or partition.leader.leader_epoch > leader.leader_epoch:
                        self.kafka.metadata.adopt(reported, all_topics=False)
                        raise Retry(f"broker {leader.node_id} is no longer its leader")
                    # Replicas are being added: those known before may no longer be in sync.
                    added = set(partition.replicas) - replicas
                    replicas |= added
                    others += [node_id for node_id in added if node_id in self.kafka.brokers]
                    requested += len(added) - 1
        finally:
            for task in queried:
                task.cancel()

    async def _reported_by(self, node_id: NodeId, topic: str, deadline: Monotonic) -> ClusterMetadata | None:
        """Metadata with this topic from this broker, None if it does not respond. Not adopted."""
        topics, reporting = self._starting.get(node_id, (set(), None))
        topics.add(topic)
        if reporting is None:
            reporting = self.kafka.run(self._report(node_id, topics, deadline), "leaders")
            self._starting[node_id] = topics, reporting
        return await asyncio.shield(reporting)

    async def _report(self, node_id: NodeId, topics: set[str], deadline: Monotonic) -> ClusterMetadata | None:
        await asyncio.sleep(0)
        del self._starting[node_id]
        try:
            connection = await self.kafka.connected(node_id, Purpose.LEADERS, deadline)
            named = [Message(name=topic, topic_id=NO_TOPIC_ID) for topic in sorted(topics)]
            message = Message(topics=named, allow_auto_topic_creation=False)
            call = connection.call(apis.METADATA, message, at_least=10, at_most=13)
            answer = await request_or_close(connection, call, deadline)
        except UpstreamUnavailable:
            return None
        if answer.error_code:
            return None
        self._reported_at[node_id] = time.monotonic()
        return from_response(answer)


async def request_or_close(connection: BrokerConnection, call: Call, deadline: Monotonic) -> Message:
    """Closes the connection after a timeout: the broker may be dead, which only a new connection shows."""
    try:
        return await connection.request(*call, deadline=deadline)
    except OutcomeUnknown:
        await connection.close()
        raise
