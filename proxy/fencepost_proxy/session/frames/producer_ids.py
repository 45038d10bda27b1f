"""Checks the producer ids of a streamed Produce request: clients may not use those of fenced appends."""

from __future__ import annotations

import sys
from typing import Final

from fencepost_proxy.errors import ClientProtocolError
from fencepost_proxy.wire.peeks import PARTITION_HEAD_BYTES, UNREADABLE, producer_id_of

#: A Produce request with more partitions is collected: checking each one takes long.
STREAMED_PARTITIONS_MAX: Final = 1000
_NO_MORE: Final = sys.maxsize


def refuse_producer_id() -> ClientProtocolError:
    return ClientProtocolError("PRODUCER_ID_TAKEN a Produce request uses a producer id of fenced appends")


class ProducerIdWatch:
    """Checks one partition after the other, each when its first bytes have arrived.

    `first_at` – where the first one begins in the frame. `count` – of the partitions.
    """

    __slots__ = ("_flexible", "_left", "_producer_ids", "_tags_before", "first_at")

    head_bytes = PARTITION_HEAD_BYTES
    at_trailer = False

    def __init__(self, first_at: int, count: int, producer_ids: frozenset[int], *, flexible: bool) -> None:
        self.first_at = first_at
        self._left = count
        self._producer_ids = producer_ids
        self._flexible = flexible
        self._tags_before = False

    def probe(self, head: memoryview) -> int:
        """How many bytes to stream before the next check. `head` – `PARTITION_HEAD_BYTES`, or less at the frame's end.

        Kafka refuses what is unreadable. Raises ClientProtocolError.
        """
        if not self._left:
            return _NO_MORE
        at = 0
        if self._tags_before:
            if head[0]:
                raise ClientProtocolError("tagged fields of a partition of a Produce request: Kafka knows none")
            at = 1
        try:
            producer_id, at = producer_id_of(head, at, flexible=self._flexible)
        except UNREADABLE:
            return _NO_MORE
        if producer_id in self._producer_ids:
            raise refuse_producer_id()
        self._left -= 1
        self._tags_before = self._flexible
        return at if self._left else _NO_MORE

    def in_place(self, trailer: memoryview) -> memoryview:
        return trailer
