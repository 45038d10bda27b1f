"""Offsets that clients query before they start reading: whether a client began at the end of a partition."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from fencepost_proxy.types import Bounded, TopicPartition

_LOOKUPS_MAX: Final = 100_000

#: Host and client id.
Client = tuple[str, "str | None"]


class OffsetLookups:
    """When a client last queried an offset of a partition, and whether it ever queried another one than the end."""

    def __init__(self) -> None:
        self._lookups: Bounded[tuple[Client, TopicPartition], tuple[float, bool]] = Bounded(_LOOKUPS_MAX)

    def record(
        self, client: Client, latest: Collection[TopicPartition], others: Collection[TopicPartition], now: float
    ) -> None:
        for partition in (*latest, *others):
            before = self._lookups.get((client, partition))
            elsewhere = partition in others or (before is not None and before[1])
            self._lookups[client, partition] = now, elsewhere

    def began_at_end(self, client: Client, partition: TopicPartition) -> bool:
        """A client that also queried other offsets may have started there and queried the end to measure its lag."""
        found = self._lookups.get((client, partition))
        return found is not None and not found[1]

    def forget_old(self, since: float) -> None:
        while self._lookups and next(iter(self._lookups.values()))[0] < since:
            self._lookups.popitem(last=False)
