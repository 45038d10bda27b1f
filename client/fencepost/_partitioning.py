"""Partitions keyed records, and repartitions refused ones after an expansion, keeping the order of each key.

All records of a topic are partitioned for one *partition count* and carry it. The first refusal for a stale count
stops the topic:

1. New records are queued, so that they do not overtake records that must be repartitioned.
2. The producer waits for the records in flight. Counts only increase, so of one key's records the first ones are
   appended and the rest refused.
3. The producer reads the new count. It sends the refused records in their original order, then the queued ones.

No I/O. Times are monotonic seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fencepost.errors import PartitionCountChangedError
from fencepost.records import PARTITION_COUNT, own_headers, stated_count

INVALID_PARTITIONS = 37

Partitioner = Callable[[bytes, int], int]
"""(key, partition count) → partition."""

_ACTUAL = re.compile(r"\bactual=(\d+)")
_UINT32 = 0xFFFFFFFF
_MURMUR2_M = 0x5BD1E995


def murmur2(key: bytes, count: int) -> int:
    """Partition of a key in the Java client, kafka-python, aiokafka and librdkafka's `murmur2_random`."""
    length = len(key)
    h = 0x9747B28C ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(key[i : i + 4], "little") * _MURMUR2_M & _UINT32
        h = (h * _MURMUR2_M & _UINT32) ^ ((k ^ k >> 24) * _MURMUR2_M & _UINT32)
    if whole < length:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _MURMUR2_M & _UINT32
    h = (h ^ h >> 13) * _MURMUR2_M & _UINT32
    return ((h ^ h >> 15) & 0x7FFFFFFF) % count


def crc32(key: bytes, count: int) -> int:
    """Partition of a key in librdkafka's default partitioner."""
    return zlib.crc32(key) % count


def jump_hash(key: bytes, count: int) -> int:
    """Partition of `key` among `count` partitions by jump consistent hash (Lamping and Veach, 2014).

    After an expansion by any number, keys move to added partitions only, and as few as possible:
    `fencepost.ordered.partition.expansion=any` requires that. Kafka's hashes do so only if the count is multiplied.
    All producers of the topic must use the same partitioner."""
    state = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    bucket, following = 0, 0
    while following < count:
        bucket = following
        state = (state * 2862933555777941757 + 1) & 0xFFFFFFFFFFFFFFFF
        following = int((bucket + 1) * (1 << 31) / ((state >> 33) + 1))
    return bucket


@dataclass(slots=True, eq=False)
class Send:
    """A record to send. `partition`: the application's argument; `outcome`: the adapter's future or callback."""

    number: int
    topic: str
    key: bytes | None
    partition: int | None
    deadline: float
    value: Any
    headers: Sequence[tuple[str, Any]] = ()
    timestamp_ms: int = 0
    outcome: Any = None
    chosen_partition: int | None = None
    partition_count: int = 0


@dataclass(slots=True)
class TopicSends:
    """One topic's records. `requested`: the highest partition count from refusals, 0 if none."""

    partition_of: Partitioner
    count: int
    stale: bool = False
    requested: int = 0
    in_flight: dict[int, Send] = field(default_factory=dict)
    refused: list[Send] = field(default_factory=list)
    queue: deque[Send] = field(default_factory=deque)

    def submit(self, send: Send) -> bool:
        """True: the record has a partition; send it now. False: it is queued, and `next` returns it later."""
        if self.stale or self.queue:
            self.queue.append(send)
            return False
        self._choose_partition(send)
        return True

    def next(self) -> Send | None:
        """The next queued record with its partition; send it now. None if there is none to send."""
        if self.stale or not self.queue:
            return None
        send = self.queue.popleft()
        self._choose_partition(send)
        return send

    def put_back(self, send: Send) -> None:
        """Return a record to the queue that the library did not accept."""
        del self.in_flight[send.number]
        self.queue.appendleft(send)

    def ended(self, send: Send) -> None:
        """Appended, or failed for good."""
        self.in_flight.pop(send.number, None)

    def refuse(self, send: Send, message: str | None = None) -> None:
        """The record was refused for its partition count, so it was not appended."""
        self.in_flight.pop(send.number, None)
        self.refused.append(send)
        self.stale = True
        reported = _ACTUAL.search(message or "")
        self.requested = max(self.requested, send.partition_count + 1, int(reported[1]) if reported else 0)

    @property
    def drained(self) -> bool:
        """All records sent with the stale count are answered."""
        return self.stale and not self.in_flight

    def update_count(self, count: int, now: float) -> list[Send]:
        """Take the topic's current partition count; call it while `stale`. Returns the expired records."""
        expired_sends = [send for send in itertools.chain(self.refused, self.queue) if now >= send.deadline]
        if count >= self.requested:
            self.queue.extendleft(sorted(self.refused, key=lambda send: -send.number))
            self.refused, self.stale, self.requested, self.count = [], False, 0, count
        expired = {send.number for send in expired_sends}
        if expired:
            self.refused = [send for send in self.refused if send.number not in expired]
            self.queue = deque(send for send in self.queue if send.number not in expired)
        if self.stale and not self.refused:
            self.stale, self.requested = False, 0  # if the count is still stale, queued records are refused again
        return expired_sends

    def give_up(self) -> list[Send]:
        """Remove and return all unsent and refused records, because the producer is closed."""
        left = [*self.refused, *self.queue]
        self.refused, self.queue, self.stale = [], deque(), False
        return left

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.refused) + len(self.queue)

    def _choose_partition(self, send: Send) -> None:
        send.partition_count = self.count
        send.chosen_partition = send.partition
        if send.partition is None and send.key is not None:
            send.chosen_partition = self.partition_of(send.key, self.count)
        self.in_flight[send.number] = send


class OrderedSends:
    """All records of an ordered producer. `timeout_seconds`: how long a record may be refused; `buffered_max`: how
    many records of a topic may be queued."""

    def __init__(self, partition_of: Partitioner, timeout_seconds: float, buffered_max: int) -> None:
        self.topics: dict[str, TopicSends] = {}
        #: Of Kafka, once known.
        self.cluster_id: str | None = None
        self.buffered_max = buffered_max
        self._partition_of = partition_of
        #: Why a record that was refused for too long was not appended.
        self.reason = f"tried for {timeout_seconds:g} s"
        self._timeout_seconds = timeout_seconds
        self._numbers = itertools.count()

    def checked(self, headers: Iterable[tuple[str, Any]] | None) -> list[tuple[str, Any]]:
        """See `own_headers`. Raises ValueError if the caller already set the partition count."""
        return own_headers(headers or (), PARTITION_COUNT)

    def headers(self, send: Send) -> list[tuple[str, Any]]:
        """The record's headers and its partition count."""
        return [*send.headers, stated_count(send.partition_count, send.topic, self.cluster_id)]

    def add(self, topic: str, count: int) -> TopicSends:
        return self.topics.setdefault(topic, TopicSends(self._partition_of, count))

    def is_full(self, topic: str) -> bool:
        return len(self.topics[topic].queue) >= self.buffered_max

    def new(  # noqa: PLR0917 - the parts of a record
        self,
        topic: str,
        key: bytes | None,
        value: Any,
        headers: Sequence[tuple[str, Any]],
        partition: int | None,
        timestamp_ms: int | None,
        outcome: Any,
    ) -> Send:
        """A record with the next number, to be submitted."""
        deadline = time.monotonic() + self._timeout_seconds
        at_ms = timestamp_ms or int(time.time() * 1000)
        return Send(next(self._numbers), topic, key, partition, deadline, value, headers, at_ms, outcome)

    def __len__(self) -> int:
        """Records without an outcome."""
        return sum(map(len, self.topics.values()))

    @property
    def drained(self) -> list[str]:
        """The topics whose partition count must be read now."""
        return [topic for topic, sends in self.topics.items() if sends.drained]

    def update_count(self, topic: str, count: int) -> list[tuple[Send, PartitionCountChangedError]]:
        """Take the partition count, 0 if it could not be read. Returns the expired records with their errors."""
        expired = self.topics[topic].update_count(count, time.monotonic())
        return [(send, count_changed(send, count or None, self.reason)) for send in expired]

    def give_up(self) -> list[tuple[Send, PartitionCountChangedError]]:
        """Remove and return all unsent and refused records, because the producer is closed."""
        return [
            (send, count_changed(send, None, "the producer was closed"))
            for sends in self.topics.values()
            for send in sends.give_up()
        ]


def count_changed(send: Send, count: int | None, reason: str) -> PartitionCountChangedError:
    chosen_partition = -1 if send.chosen_partition is None else send.chosen_partition
    return PartitionCountChangedError(send.topic, chosen_partition, send.partition_count, count, reason=reason)


def refuse_configs(*, acks: object, idempotent: bool, transactional: bool, idempotence: str | None = None) -> None:
    """Raises ValueError for configs that cannot keep order. `idempotence`: why the library's idempotent producer cannot
    be used, None if it can."""
    if str(acks) == "0":
        raise ValueError("acks=0 cannot be used with partition counts: the producer would not receive refusals")
    if transactional:
        raise ValueError(
            "transactions are not supported: a refused record makes the transaction abort-only, so it must be aborted "
            "(set the header partition-count yourself, abort on error 37, and send the transaction again)"
        )
    if idempotent and idempotence is not None:
        raise ValueError(f"enable_idempotence=True cannot be used with partition counts: {idempotence}")


class OrderedProducerBase:
    """The library's producer, but it keeps each key in order across expansions of its topic (KIP-253).

    Each record carries the partition count that chose its partition. If the topic has more partitions, the proxy
    refuses the record, and this producer repartitions it, in the order of the sends. See
    docs/client.md.

    `partitioner`: (key, partition count) → partition; default: the Java client's, or with confluent-kafka by the
    setting `partitioner` (`consistent_random`, that is crc32, or `murmur2_random`). `repartition_timeout_seconds`: how
    long a record may be refused before it fails with PartitionCountChangedError. `buffered_max`: how many records may
    be queued meanwhile; then `send` waits, and `produce` of confluent-kafka raises BufferError.
    """
