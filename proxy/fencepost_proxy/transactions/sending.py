"""Which query of the monitor of a cluster's transactions is sent next: the queues of the brokers, and the sweep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from fencepost_proxy.transactions.observed import PARTITIONS_AT_ONCE
from fencepost_proxy.transactions.watched import (
    DescribeTransactions,
    FindLeaders,
    ListTransactions,
    ProbePartitions,
    Query,
)
from fencepost_proxy.types import NodeId, TopicPartition

QueryToBroker = ListTransactions | DescribeTransactions | ProbePartitions


class BrokerQueues:
    """Queries to send, at most one at a time to each broker, and those that are sent. `nodes`: the current brokers."""

    def __init__(self) -> None:
        self.nodes: tuple[NodeId, ...] = ()
        self._queues: dict[NodeId, deque[QueryToBroker]] = {}
        self._sent: dict[Query, float] = {}
        self._busy: set[NodeId] = set()
        self._finds_leaders = False
        self._rotation = 0
        self.requests = 0

    def nodes_are(self, nodes: tuple[NodeId, ...]) -> list[Query]:
        """Return queries that will not be sent, since their broker left."""
        dropped: list[Query] = []
        for removed in set(self.nodes) - set(nodes):
            dropped += self._queues.pop(removed)
        for new in set(nodes) - set(self.nodes):
            self._queues[new] = deque()
        self.nodes = nodes
        return dropped

    def put(self, query: QueryToBroker) -> None:
        if query not in self._sent:  # the sweep may have sent the same query
            self._queues[query.node_id].append(query)

    def remove(self, node_id: NodeId, queries: Collection[Query]) -> set[Query]:
        """Return those of `queries` that were not sent yet."""
        queue = self._queues.get(node_id, deque())
        dropped: set[Query] = {each for each in queue if each in queries}
        if dropped:
            self._queues[node_id] = deque(each for each in queue if each not in dropped)
        return dropped

    def find_leaders(self) -> None:
        self._finds_leaders = True

    def sends_or_finds(self) -> bool:
        """Whether a query that belongs to a sweep is sent, or will be."""
        return self._finds_leaders or any(isinstance(each, FindLeaders | ProbePartitions) for each in self._sent)

    def next(self, otherwise: Callable[[NodeId], Query | None], now: float) -> list[Query]:
        """Queries to send now. `otherwise` returns one for a broker whose queue is empty."""
        queries: list[Query] = []
        if self._finds_leaders and FindLeaders() not in self._sent and self.nodes:
            self._finds_leaders = False
            queries.append(FindLeaders())
        self._rotation += 1
        rotation = self._rotation % max(1, len(self.nodes))
        for node_id in (*self.nodes[rotation:], *self.nodes[:rotation]):
            if node_id in self._busy:
                continue
            queue = self._queues[node_id]
            query = queue.popleft() if queue else otherwise(node_id)
            if query is not None:
                self._busy.add(node_id)
                queries.append(query)
        for query in queries:
            self._sent[query] = now
            self.requests += 3 if isinstance(query, ProbePartitions) else 1
        return queries

    def answered(self, query: Query, now: float) -> float:
        """Return when it was sent."""
        if not isinstance(query, FindLeaders):
            self._busy.discard(query.node_id)
        return self._sent.pop(query, now)


class Sweep:
    """Probes every partition in turn, at `partitions_per_second`. `interval_seconds`: minimum time between two starts.

    `completed`: their number. `seconds`, `ended_at`: duration and end of the last one.
    """

    def __init__(self, partitions_per_second: float, interval_seconds: float) -> None:
        self._rate = partitions_per_second
        self._interval_seconds = interval_seconds
        self._left: dict[NodeId, deque[TopicPartition]] = {}
        self._began_at = float("-inf")
        self._tokens = 0.0
        self._tokens_at: float | None = None
        self.running = False
        self.completed = 0
        self.seconds: float | None = None
        self.ended_at: float | None = None

    def begin_if_due(self, now: float) -> bool:
        if self.running or now - self._began_at < self._interval_seconds:
            return False
        self.running, self._began_at = True, now
        self._left.clear()
        return True

    def put(self, node_id: NodeId, partitions: Sequence[TopicPartition]) -> None:
        """`partitions` of this leader; ignored after the first call in a sweep."""
        if self.running and node_id not in self._left:
            self._left[node_id] = deque(partitions)

    def leaders_are_unknown(self) -> None:
        if not self._left:
            self.running = False

    def remove_broker(self, node_id: NodeId) -> None:
        self._left.pop(node_id, None)

    def refill(self, now: float) -> None:
        if self._tokens_at is not None:
            self._tokens += (now - self._tokens_at) * self._rate
        self._tokens = min(self._tokens, PARTITIONS_AT_ONCE + self._rate)
        self._tokens_at = now

    def next(
        self, node_id: NodeId, chunk: Callable[[Iterable[TopicPartition]], tuple[TopicPartition, ...]]
    ) -> ProbePartitions | None:
        """The next probe at this broker, if the rate permits it."""
        left = self._left.get(node_id)
        if not left:
            return None
        partitions = chunk(left)
        if self._tokens < len(partitions):
            return None
        self._tokens -= len(partitions)
        for _ in partitions:
            left.popleft()
        return ProbePartitions(node_id, partitions)

    @property
    def unsent(self) -> bool:
        return any(self._left.values())

    def end(self, now: float) -> None:
        self.running = False
        self.ended_at, self.seconds = now, now - self._began_at
        self.completed += 1
