"""What one process remembers of idempotent producers (KAFKA-5793, KAFKA-5794). No I/O, no clock, all of it bounded.

- On which topics Kafka takes no producer ids: topics with `idempotence.level=safe` go without for a while then.
- Up to where the appends of a producer were acknowledged. If the log starts behind that, its records are gone, and with
  them what Kafka knew of the producer: a sequence that "does not follow" is no loss.
- Where logs start, for answers that Kafka had no part in. It may have moved on since: a lower bound.

Who was not seen by this process, or is forgotten, is treated as Kafka says.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from typing import Final, TypeVar

from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM
from fencepost_proxy.types import TopicPartition

#: Then one batch is tried with its producer id again: the topic may have been upgraded.
_TRY_AGAIN_SECONDS: Final = 300.0
_TOPICS_MAX: Final = 10_000
#: So old may a log start be in an answer that Kafka had no part in.
_RECENT_SECONDS: Final = 5.0
_UNHEARD: Final = (-1, float("-inf"))

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def make_up_producer_id() -> int:
    """For a client whom Kafka gives none. Kafka counts its own up from 0, and of two of these no two are alike."""
    return MADE_UP_IDS_FROM + secrets.randbits(62)


class IdempotenceMemory:
    """`remembered_max` – producers on partitions, and partitions, of which something is remembered."""

    def __init__(self, remembered_max: int = 50_000) -> None:
        self._remembered_max = remembered_max
        self._without_until: OrderedDict[str, float] = OrderedDict()
        self._acknowledged: OrderedDict[tuple[TopicPartition, int], int] = OrderedDict()
        self._told: OrderedDict[tuple[TopicPartition, tuple[int, int, int]], None] = OrderedDict()
        self._log_starts: OrderedDict[TopicPartition, tuple[int, float]] = OrderedDict()

    # ---- topics that take no producer ids

    def goes_without(self, topic: str, now: float) -> bool:
        until = self._without_until.get(topic)
        return until is not None and now < until

    def refused(self, topic: str, now: float) -> None:
        """Kafka has refused a batch for its producer id."""
        _put(self._without_until, topic, now + _TRY_AGAIN_SECONDS, _TOPICS_MAX)

    # ---- what was acknowledged

    def acknowledged(self, partition: TopicPartition, producer_id: int, last_offset: int) -> None:
        _put(self._acknowledged, (partition, producer_id), last_offset, self._remembered_max)

    def is_gone(self, partition: TopicPartition, producer_id: int, log_start_offset: int) -> bool:
        """Whether all that this producer was told is in the log lies below its start."""
        last_offset = self._acknowledged.get((partition, producer_id))
        return last_offset is not None and last_offset < log_start_offset

    def was_told(self, partition: TopicPartition, batch: tuple[int, int, int]) -> bool:
        """Whether the producer of this batch (its id, epoch and sequence) was told before that it was forgotten: if it
        sends the same again, it does not know what to make of it."""
        before = (partition, batch) in self._told
        _put(self._told, (partition, batch), None, self._remembered_max)
        return before

    # ---- where logs start

    def note_log_start(self, partition: TopicPartition, log_start_offset: int, now: float) -> None:
        if log_start_offset >= 0:
            _put(self._log_starts, partition, (log_start_offset, now), self._remembered_max)

    def log_start(self, partition: TopicPartition) -> int:
        """As it was heard last, -1 where nobody has said."""
        return self._log_starts.get(partition, _UNHEARD)[0]

    def recent_log_start(self, partition: TopicPartition, now: float) -> int:
        """The same, -1 also where that was too long ago to tell a client."""
        log_start_offset, heard_at = self._log_starts.get(partition, _UNHEARD)
        return log_start_offset if now < heard_at + _RECENT_SECONDS else -1

    def forget_topic(self, topic: str) -> None:
        """It is gone, or another one by now."""
        self._without_until.pop(topic, None)
        for at in [at for at in self._log_starts if at.topic == topic]:
            del self._log_starts[at]
        for key in [key for key in self._acknowledged if key[0].topic == topic]:
            del self._acknowledged[key]
        for told in [told for told in self._told if told[0].topic == topic]:
            del self._told[told]


def _put(members: OrderedDict[_Key, _Value], key: _Key, member: _Value, count_max: int) -> None:
    members[key] = member
    members.move_to_end(key)
    if len(members) > count_max:
        members.popitem(last=False)
