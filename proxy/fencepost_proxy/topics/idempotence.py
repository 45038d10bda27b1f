"""Memory of idempotent producers, per process (KAFKA-5793, KAFKA-5794). No I/O, no clock, bounded.

- Topics on which Kafka rejects producer ids: topics with `fencepost.idempotence.level=safe` omit them for a while.
- The last acknowledged offset of a producer. If the log starts after it, the producer's records are deleted, and with
  them Kafka's state of the producer: a sequence error is no loss then.
- Log start offsets, for answers that the proxy makes. A lower bound, since they may have moved.

A producer that is not in this memory gets Kafka's answer.
"""

from __future__ import annotations

import random
from typing import Final

from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM
from fencepost_proxy.types import Bounded, TopicPartition

#: After this, try one batch with its producer id: the topic may have been upgraded.
_TRY_AGAIN_SECONDS: Final = 300.0
_TOPICS_MAX: Final = 10_000
#: Maximum age of a log start offset in an answer that the proxy makes.
_RECENT_SECONDS: Final = 5.0
_NEVER_OBSERVED: Final = (-1, float("-inf"))


def make_up_producer_id() -> int:
    """For a client that gets none from Kafka. Kafka counts its own up from 0; these are random."""
    return MADE_UP_IDS_FROM + random.SystemRandom().getrandbits(62)


class IdempotenceMemory:
    """`remembered_max`: maximum number of (partition, producer) pairs, and of partitions."""

    def __init__(self, remembered_max: int = 50_000) -> None:
        self._without_until: Bounded[str, float] = Bounded(_TOPICS_MAX)
        self._acknowledged: Bounded[tuple[TopicPartition, int], int] = Bounded(remembered_max)
        self._reported: Bounded[tuple[TopicPartition, tuple[int, int, int]], None] = Bounded(remembered_max)
        self._log_starts: Bounded[TopicPartition, tuple[int, float]] = Bounded(remembered_max)

    # ---- topics that reject producer ids

    def drops_id(self, topic: str, now: float) -> bool:
        until = self._without_until.get(topic)
        return until is not None and now < until

    def refused(self, topic: str, now: float) -> None:
        """Kafka refused a batch because of its producer id."""
        self._without_until[topic] = now + _TRY_AGAIN_SECONDS

    # ---- acknowledged appends

    def acknowledged(self, partition: TopicPartition, producer_id: int, last_offset: int) -> None:
        self._acknowledged[partition, producer_id] = last_offset

    def is_dead(self, partition: TopicPartition, producer_id: int, log_start_offset: int) -> bool:
        """Whether all acknowledged appends of this producer lie below the log start."""
        last_offset = self._acknowledged.get((partition, producer_id))
        return last_offset is not None and last_offset < log_start_offset

    def was_reported(self, partition: TopicPartition, batch: tuple[int, int, int]) -> bool:
        """Whether the producer of this batch (id, epoch, sequence) already got "producer forgotten": if it sends the
        same batch again, it cannot handle that answer."""
        before = (partition, batch) in self._reported
        self._reported[partition, batch] = None
        return before

    # ---- log starts

    def record_log_start(self, partition: TopicPartition, log_start_offset: int, now: float) -> None:
        if log_start_offset >= 0:
            self._log_starts[partition] = log_start_offset, now

    def log_start(self, partition: TopicPartition) -> int:
        """The last known one, or -1."""
        return self._log_starts.get(partition, _NEVER_OBSERVED)[0]

    def recent_log_start(self, partition: TopicPartition, now: float) -> int:
        """The last known one, or -1 if too old for an answer."""
        log_start_offset, observed_at = self._log_starts.get(partition, _NEVER_OBSERVED)
        return log_start_offset if now < observed_at + _RECENT_SECONDS else -1

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted or recreated."""
        self._without_until.pop(topic, None)
        for at in [at for at in self._log_starts if at.topic == topic]:
            del self._log_starts[at]
        for key in [key for key in self._acknowledged if key[0].topic == topic]:
            del self._acknowledged[key]
        for reported in [reported for reported in self._reported if reported[0].topic == topic]:
            del self._reported[reported]
