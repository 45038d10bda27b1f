"""Offsets that clients query before they start reading: whether a client began at the end of a partition."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Final

from fencepost_proxy.types import TopicPartition

_LOOKUPS_MAX: Final = 100_000

#: Host and client id.
Client = tuple[str, "str | None"]


class OffsetLookups:
    """When a client last queried an offset of a partition, and whether it ever queried another one than the end."""

    def __init__(self) -> None:
        self._lookups: OrderedDict[tuple[Client, TopicPartition], tuple[float, bool]] = OrderedDict()

    def record(
        self, client: Client, latest: Collection[TopicPartition], others: Collection[TopicPartition], now: float
    ) -> None:
        for partition in (*latest, *others):
            before = self._lookups.get((client, partition))
            elsewhere = partition in others or (before is not None and before[1])
            self._lookups[client, partition] = now, elsewhere
            self._lookups.move_to_end((client, partition))
        while len(self._lookups) > _LOOKUPS_MAX:
            self._lookups.popitem(last=False)

    def began_at_end(self, client: Client, partition: TopicPartition) -> bool:
        """A client that also queried other offsets may have started there and queried the end to measure its lag."""
        found = self._lookups.get((client, partition))
        return found is not None and not found[1]

    def forget_old(self, since: float) -> None:
        while self._lookups and next(iter(self._lookups.values()))[0] < since:
            self._lookups.popitem(last=False)
