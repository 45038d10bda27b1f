"""Keyed records of growing topics: placed over the partitions that there are, and placed again where there were more.

Of one topic, all records are placed over one *count*, and say so. The first refusal for a stale count stops the topic:

1. what is sent now is held back, or it would overtake what must be placed again;
2. what is in flight is waited for. Counts only grow, so of one key's records a first part is appended and the rest
   refused;
3. the new count is asked for; what was refused is placed over it, in the order in which it was sent, and then what was
   held back.

So a key's records are appended in the order in which they were sent. No I/O here; times are monotonic seconds.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fencepost.errors import PartitionCountChanged

INVALID_PARTITIONS = 37

Placement = Callable[[bytes, int], int]
"""(key, count) → partition."""

_ACTUAL = re.compile(r"\bactual=(\d+)")
_UINT32 = 0xFFFFFFFF
_MURMUR2_M = 0x5BD1E995


def murmur2(key: bytes, count: int) -> int:
    """Where Java, kafka-python and aiokafka put a key, and librdkafka's `murmur2_random`."""
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
    """Where librdkafka puts a key unless told otherwise."""
    return zlib.crc32(key) % count


def jump_hash(key: bytes, count: int) -> int:
    """Jump consistent hash (Lamping and Veach, 2014): where the topic grows, by however many partitions, keys move to
    new ones only, as `ordered.partition.expansion=any` wants it, and as few as possible. For topics all of whose
    producers place keys so; Kafka's own hashes do that only where the count is multiplied."""
    state = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    bucket, following = 0, 0
    while following < count:
        bucket = following
        state = (state * 2862933555777941757 + 1) & 0xFFFFFFFFFFFFFFFF
        following = int((bucket + 1) * (1 << 31) / ((state >> 33) + 1))
    return bucket


@dataclass(slots=True, eq=False)
class Send:
    """A record on its way. `partition` – as the application gave it; `what` – the adapter's."""

    number: int
    topic: str
    key: bytes | None
    partition: int | None
    deadline: float
    what: Any
    placed_on: int | None = None
    placed_over: int = 0


@dataclass(slots=True)
class TopicSends:
    """One topic's records on their way. `wanted` – the count that refusals have told; 0 where none did."""

    place_key: Placement
    count: int
    stale: bool = False
    wanted: int = 0
    flying: dict[int, Send] = field(default_factory=dict)
    refused: list[Send] = field(default_factory=list)
    queue: deque[Send] = field(default_factory=deque)

    def submit(self, send: Send) -> bool:
        """True: it is placed, hand it over. Otherwise it is queued, and `next` gives it when its turn has come."""
        if self.stale or self.queue:
            self.queue.append(send)
            return False
        self._place(send)
        return True

    def next(self) -> Send | None:
        """Of the queue, placed: hand it over."""
        if self.stale or not self.queue:
            return None
        send = self.queue.popleft()
        self._place(send)
        return send

    def put_back(self, send: Send) -> None:
        """It could not be handed over now."""
        del self.flying[send.number]
        self.queue.appendleft(send)

    def ended(self, send: Send) -> None:
        """Appended, or failed for good."""
        self.flying.pop(send.number, None)

    def refuse(self, send: Send, message: str | None = None) -> None:
        """Refused for its count: not appended."""
        self.flying.pop(send.number, None)
        self.refused.append(send)
        self.stale = True
        told = _ACTUAL.search(message or "")
        self.wanted = max(self.wanted, send.placed_over + 1, int(told[1]) if told else 0)

    @property
    def settled(self) -> bool:
        """Everything of the stale count is answered."""
        return self.stale and not self.flying

    def regrown(self, count: int, now: float) -> list[Send]:
        """The count as it is told now, to be asked for while `stale`. Returns what has had its time."""
        late = [send for send in itertools.chain(self.refused, self.queue) if now >= send.deadline]
        if count >= self.wanted:
            self.queue.extendleft(sorted(self.refused, key=lambda send: -send.number))
            self.refused, self.stale, self.wanted, self.count = [], False, 0, count
        gone = {send.number for send in late}
        if gone:
            self.refused = [send for send in self.refused if send.number not in gone]
            self.queue = deque(send for send in self.queue if send.number not in gone)
        if self.stale and not self.refused:
            self.stale, self.wanted = False, 0  # what was sent meanwhile finds out by itself
        return late

    def give_up(self) -> list[Send]:
        """All that was not handed over, or refused: the producer is closed."""
        left = [*self.refused, *self.queue]
        self.refused, self.queue, self.stale = [], deque(), False
        return left

    def __len__(self) -> int:
        return len(self.flying) + len(self.refused) + len(self.queue)

    def _place(self, send: Send) -> None:
        send.placed_over = self.count
        send.placed_on = send.partition
        if send.partition is None and send.key is not None:
            send.placed_on = self.place_key(send.key, self.count)
        self.flying[send.number] = send


def counted_headers(name: str, headers: Iterable[tuple[str, Any]], count: int) -> list[tuple[str, Any]]:
    """`headers` with the count added. Raises ValueError where the caller gives one by hand."""
    given = list(headers)
    if any(each == name for each, _ in given):
        raise ValueError(f"header {name!r} is set by this producer; leave it out of headers")
    return [*given, (name, b"%d" % count)]


def count_changed(send: Send, count: int | None, reason: str) -> PartitionCountChanged:
    placed_on = -1 if send.placed_on is None else send.placed_on
    return PartitionCountChanged(send.topic, placed_on, send.placed_over, count, reason=reason)


def refuse_configs(*, acks: object, idempotent: bool, transactional: bool, idempotence: str | None = None) -> None:
    """Raises ValueError for what cannot be kept in order. `idempotence` – why an idempotent producer of this library
    cannot be used; None where it can."""
    if str(acks) == "0":
        raise ValueError("acks=0 cannot be used with partition counts: nobody would hear of a refusal")
    if transactional:
        raise ValueError(
            "transactions cannot be used here: a refused record leaves a transaction that can only be aborted; send "
            "the header partition-count by hand, abort on error 37, and send the transaction again"
        )
    if idempotent and idempotence is not None:
        raise ValueError(f"enable_idempotence=True cannot be used with partition counts: {idempotence}")
