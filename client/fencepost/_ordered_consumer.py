"""The steps of an ordered consumer: start, and open gated partitions when their prior partitions have been read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from fencepost._ordering import TopicOrder, Waiting, every, expansions_of, refuse_without_group, was_read
from fencepost._steps import Steps, Use, now


class Assignment(Protocol):
    """An adapter's consumer and admin client. Methods return a result or an awaitable, except `position`."""

    def describe(self, topic: str) -> Any:
        """(partition count, configs). The count must be read first: see `TopicOrder.learn`."""

    def committed(self, topic: str, partitions: Collection[int]) -> Any:
        """{partition: the group's committed offset or None}."""

    def log_starts(self, topic: str, partitions: Collection[int]) -> Any:
        """{partition: log start offset}."""

    def earliest(self, topic: str, partitions: Collection[int]) -> Any:
        """{partition: offset to assign for its first record}."""

    def log_ends(self, topic: str, partitions: Collection[int]) -> Any:
        """{partition: log end offset}."""

    def position(self, topic: str, partition: int) -> int | None:
        """The offset after the last record returned; None if it is not known yet."""

    def assign(self, topic: str, starts: Mapping[int, int | None], opened: Collection[tuple[str, int]]) -> Any:
        """Assign `opened`, all partitions of all topics. `starts`: the added ones of one topic, with the offset to
        start at; None uses the reset policy."""


class OrderedReads:
    """`given`: {partition: offset} of the application; `latest`: the reset policy; `grouped`: whether the consumer has
    a group id; `key`: makes a partition as the application names it."""

    def __init__(
        self,
        topics: Iterable[str],
        assignment: Assignment,
        *,
        partition_filter: Callable[[int], bool] | None,
        given: Mapping[Any, int] | None,
        grouped: bool,
        latest: bool,
        refresh_seconds: float,
        key: Callable[[str, int], Any] = lambda topic, partition: (topic, partition),
    ) -> None:
        self._orders = {topic: TopicOrder(topic, partition_filter or every) for topic in topics}
        self._key = key
        self._assignment = assignment
        self._given = dict(given or {})
        self._grouped = grouped
        self._latest = latest
        self._refresh_seconds = refresh_seconds
        self._probe_at = 0.0
        self._use = Use("OrderedConsumer", "a consumer for each task or thread")
        #: Committed offsets of prior partitions that other consumers read.
        self._others: dict[str, dict[int, int | None]] = {topic: {} for topic in self._orders}

    def waiting(self) -> dict[Any, Waiting]:
        return {
            self._key(topic, partition): waits
            for topic, order in self._orders.items()
            for partition in order.unopened
            if (waits := order.waiting(partition, self._positions(order)))
        }

    def start(self) -> Steps[None]:
        """Raises CheckIsOffError, ValueError."""
        for order in self._orders.values():
            yield from self._learn(order)
            refuse_without_group(order.topic, order.shares, grouped=self._grouped)
            known = yield from self._known(order, order.unopened)
            created = [p for p in known if order.is_created(p)]
            log_starts = (yield self._assignment.log_starts(order.topic, created)) if created else {}
            fresh = self._latest and all(offset is None for offset in known.values())
            opened = [p for p in known if not order.is_created(p) or fresh or was_read(known[p], log_starts[p])]
            yield from self._assign(order, {p: known[p] for p in opened})

    def fetch(self, seconds: float | None, query: Callable[[float], Any]) -> Steps[Any]:
        """The first records that `query(seconds)` returns, or its empty result after `seconds` (None: unlimited). One
        fetch at a time, because the records of the last one then count as processed."""
        return self._use.alone(self._fetch(seconds, query))

    def _fetch(self, seconds: float | None, query: Callable[[float], Any]) -> Steps[Any]:
        deadline = None if seconds is None or seconds < 0 else now() + seconds
        while True:
            yield from self._open()
            left = self._refresh_seconds if deadline is None else min(self._refresh_seconds, max(0, deadline - now()))
            records = yield query(left)
            if records or (deadline is not None and now() >= deadline):
                return records

    def _learn(self, order: TopicOrder) -> Steps[None]:
        count, configs = yield self._assignment.describe(order.topic)
        order.learn(count, expansions_of(order.topic, configs))

    def _known(self, order: TopicOrder, partitions: Collection[int]) -> Steps[dict[int, int | None]]:
        """Where the application, or its group, has read the partitions up to."""
        known = {p: self._given.get((order.topic, p)) for p in partitions}
        unknown = [p for p, offset in known.items() if offset is None]
        if self._grouped and unknown:
            known |= yield self._assignment.committed(order.topic, unknown)
        return known

    def _open(self) -> Steps[None]:
        time = now()
        probe = time >= self._probe_at
        if probe:
            self._probe_at = time + self._refresh_seconds
        for order in self._orders.values():
            if probe:
                yield from self._learn(order)
            if not order.unopened:
                continue
            if probe:
                yield from self._read_prior_partitions(order, time)
            ready = order.ready(self._positions(order))
            if ready:
                starts = yield from self._known(order, ready)
                # Ignore the reset policy: all records of an added partition are newer than the expansion.
                unread = [p for p in ready if starts[p] is None]
                if unread:
                    starts |= yield self._assignment.earliest(order.topic, unread)
                yield from self._assign(order, starts)

    def _read_prior_partitions(self, order: TopicOrder, time: float) -> Steps[None]:
        unread = order.unread_prior_partitions(self._positions(order), time)
        others = [prior_partition for prior_partition in unread if not order.reads(prior_partition)]
        if others:
            self._others[order.topic].update((yield from self._known(order, others)))
        if unread and order.ends_are_due(time):
            for prior_partition, end in (yield self._assignment.log_ends(order.topic, unread)).items():
                order.ended_at(prior_partition, end)

    def _positions(self, order: TopicOrder) -> dict[int, int | None]:
        positions = dict(self._others[order.topic])
        for partition in order.opened:
            positions[partition] = self._assignment.position(order.topic, partition)
        return positions

    def _assign(self, order: TopicOrder, starts: Mapping[int, int | None]) -> Steps[None]:
        order.opened.update(starts)
        opened = [(each.topic, partition) for each in self._orders.values() for partition in sorted(each.opened)]
        yield self._assignment.assign(order.topic, starts, opened)


class OrderedConsumerBase:
    """The library's consumer, without joining a group, that keeps keys in order across expansions (KIP-253).

    Records are read as with the library's consumer. A partition that an expansion added is assigned after all earlier
    partitions are read up to their thresholds. Records returned by an earlier call count as read. See docs/client.md.

    `partition_filter(partition)`: whether this consumer reads a partition, also a future one; default all. Processes
    that share topics need the same group id and must commit. `positions`: {partition: offset} to start at, for
    applications that store offsets themselves; a partition is a TopicPartition, or a (topic, partition) tuple for
    confluent-kafka. Other partitions start at the group's committed offsets or by the reset policy. `refresh_seconds`:
    interval of checks for expansions and other processes' commits. The constructor, or aiokafka's `start`, raises
    CheckIsOffError, ValueError.
    """

    _reads: OrderedReads

    def waiting(self) -> dict[Any, Waiting]:
        """The gated partitions, and what each waits for: {partition: Waiting}."""
        return self._reads.waiting()

    def subscribe(self, *_: Any, **__: Any) -> None:
        """Raises TypeError: a group coordinator would assign gated partitions."""
        raise TypeError("an OrderedConsumer reads the topics of its constructor (the proxy orders groups)")
