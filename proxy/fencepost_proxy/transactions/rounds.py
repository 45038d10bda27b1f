"""One round of queries about a cluster's transactions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fencepost_proxy.transactions.observed import Found, OpenTransactions, Partitions, SuspectKey
from fencepost_proxy.transactions.sending import BrokerQueues, QueryToBroker
from fencepost_proxy.transactions.watched import (
    OPEN_STATES,
    Answer,
    Described,
    DescribeTransactions,
    Descriptions,
    FindLeaders,
    Listing,
    ListTransactions,
    ProbePartitions,
    Query,
)
from fencepost_proxy.types import NodeId, ProducerId, TopicPartition

TRANSACTIONS_AT_ONCE: Final = 100
#: Per round.
DESCRIBED_MAX: Final = 500
#: Of those that a round describes, one in so many is among the oldest.
_OLDEST_SHARE: Final = 5
PROBED_CLOSELY_MAX: Final = 500


class Round:
    """Steps: list open transactions, and probe their partitions; describe the transactions; query those that are open
    in logs but not among them; describe these. `over`: all steps are done."""

    def __init__(self, queues: BrokerQueues, opened: OpenTransactions, partitions: Partitions) -> None:
        self._queues = queues
        self._opened = opened
        self._partitions = partitions
        self._step = 0
        #: Unanswered queries of this step.
        self._queried: set[Query] = set()
        #: Brokers that gave no answer.
        self._failed: set[NodeId | None] = set()
        self._listed: dict[str, Found] = {}
        self._described: dict[str, Described] = {}
        self._inquired: list[SuspectKey] = []
        self._found: dict[ProducerId, Found] = {}
        self._found_described: dict[ProducerId, Described] = {}
        self.over = False
        for node_id in queues.nodes:
            self._query(ListTransactions(node_id, OPEN_STATES))
        for node_id, led in partitions.by_leader(self._to_probe_closely()).items():
            while led:
                chunk = partitions.chunk(led)
                del led[: len(chunk)]
                self._query(ProbePartitions(node_id, chunk))

    def _to_probe_closely(self) -> list[TopicPartition]:
        """Partitions that have, or may have, an open transaction."""
        requested: dict[TopicPartition, None] = {}
        for found in (
            self._partitions.suspects.partitions,
            self._partitions.lagging,
            (partition for each in self._opened.described for partition in each.partitions),
        ):
            for partition in found:
                if len(requested) >= PROBED_CLOSELY_MAX:
                    return list(requested)
                requested[partition] = None
        return list(requested)

    def _query(self, query: QueryToBroker) -> None:
        if query.node_id in self._queues.nodes and query.node_id not in self._failed and query not in self._queried:
            self._queried.add(query)
            self._queues.put(query)

    def answered(self, query: Query, answer: Answer | None, now: float) -> None:
        """`query` may be of another round, or of none."""
        if query not in self._queried:
            return
        self._queried.discard(query)
        if answer is None:
            self._fail(getattr(query, "node_id", None))
        else:
            self._observe(query, answer)
        self._advance(now)

    def _fail(self, node_id: NodeId | None) -> None:
        """A broker that does not answer is not queried again in this round: each query would wait for its timeout, and
        what the others reported would be out of date."""
        self._failed.add(node_id)
        if self._step == 0 and node_id is not None:
            self._queried -= self._queues.remove(node_id, self._queried)

    def _observe(self, query: Query, answer: Answer) -> None:
        match query, answer:
            case ListTransactions(node_id, _, ()), Listing(transactions):
                self._listed.update((each.transactional_id, (each, node_id)) for each in transactions)
            case ListTransactions(node_id, _, _), Listing(transactions):
                self._found.update((each.producer_id, (each, node_id)) for each in transactions)
            case DescribeTransactions(), Descriptions(described) if self._step == 1:
                self._described.update((each.transactional_id, each) for each in described)
            case DescribeTransactions(), Descriptions(described):
                self._found_described.update((each.producer_id, each) for each in described)

    def _advance(self, now: float) -> None:
        """Advance to the next step that has queries."""
        while not self._queried:
            self._step += 1
            match self._step:
                case 1:
                    ordered = self._opened.in_order_of_description(self._listed, DESCRIBED_MAX // _OLDEST_SHARE)
                    self._describe(ordered[:DESCRIBED_MAX])
                case 2:
                    self._opened.update(self._listed, self._described, self._failed, now)
                    self._inquire()
                case 3:
                    if self._inquired and not self._failed:
                        self._describe((each.transactional_id, node_id) for each, node_id in self._found.values())
                case _:
                    if self._inquired and not self._failed and self._partitions.coordinators:
                        self._partitions.suspects.conclude(self._inquired, self._found_described, self._found, now)
                    self.over = True
                    return

    def _describe(self, requested: Iterable[tuple[str, NodeId]]) -> None:
        by_node: dict[NodeId, list[str]] = {}
        for name, node_id in requested:
            by_node.setdefault(node_id, []).append(name)
        for node_id, names in by_node.items():
            for start in range(0, len(names), TRANSACTIONS_AT_ONCE):
                self._query(DescribeTransactions(node_id, tuple(names[start : start + TRANSACTIONS_AT_ONCE])))

    def _inquire(self) -> None:
        """Query those that were open in a log at two probes, and are not among the open transactions."""
        undescribed = {each.producer_id for name, (each, _) in self._listed.items() if name not in self._described}
        self._inquired, producer_ids = self._partitions.suspects.to_inquire(self._described.values(), undescribed)
        if not self._inquired:
            return
        self._queues.find_leaders()  # for whether the transaction log has leaders now
        self._queried.add(FindLeaders())
        for node_id in self._queues.nodes:
            self._query(ListTransactions(node_id, (), producer_ids))
