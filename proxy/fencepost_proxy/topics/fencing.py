"""Records for fenced appends in the state topic: the shared producer ids, and the fence base of each partition.

| key | value | if there are several |
|---|---|---|
| `producer-id/<proposal uuid>` | `{"cluster_id", "producer_id", "number"}` | the lowest offset per number wins |
| `fence-base/<topic id>/<partition>/<producer epoch>/<proposal uuid>` | `{"base"}` | the same, per epoch |

The base of a claim has also `"claim"`: see `encode_fence_base`.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.errors import StateError
from fencepost_proxy.topics import hints
from fencepost_proxy.types import LogEndOffset, ProducerEpoch, ProducerId
from fencepost_proxy.wire.state_records import StateRecord, object_of, record, tombstone, typed

PRODUCER_ID: Final = "producer-id"
FENCE_BASE: Final = "fence-base"
_OLDER_BASES_MAX: Final = 1000


class FenceBase(NamedTuple):
    """Under `producer_epoch`, sequence = expected offset − `base`."""

    producer_epoch: ProducerEpoch
    base: LogEndOffset


def encode_producer_id(proposal: UUID, cluster_id: str, producer_id: ProducerId, number: int = 0) -> StateRecord:
    """Proposal of a producer id for fenced appends of this cluster: the first one, or the `number`-th after it, for
    partitions that have used all epochs of those before."""
    value = {"cluster_id": cluster_id, "producer_id": producer_id, **({"number": number} if number else {})}
    return record(f"{PRODUCER_ID}/{proposal}", value)


def encode_fence_base(
    topic_id: UUID,
    partition: int,
    producer_epoch: ProducerEpoch,
    proposal: UUID,
    base: LogEndOffset,
    *,
    claim: str | None = None,
) -> StateRecord:
    """Proposal of the fence base of a partition under this epoch.

    Epochs continue from one shared producer id to the next: `PRODUCER_EPOCHS` of the first, then those of the second.
    `claim`: identity of the only process that appends under it; "" if all do; None if it does not begin with a marker.
    """
    value = {"base": base, **({} if claim is None else {"claim": claim})}
    return record(f"{FENCE_BASE}/{topic_id}/{partition}/{producer_epoch}/{proposal}", value)


class SharedProducerIds:
    """Shared producer id: the producer id under which all instances of a cluster send fenced appends.

    `all`: those that were ever used.
    """

    def __init__(self, cluster_id: str) -> None:
        self._cluster_id = cluster_id
        self._by_number: dict[int, ProducerId] = {}
        self.all: frozenset[int] = frozenset()

    def apply(self, key: str, raw: bytes | None) -> None:
        """Raises StateError for another cluster's id."""
        value = object_of(raw)
        if value is None:
            raise _without_producer_id(key)
        cluster_id, producer_id = typed(value, "cluster_id", str), typed(value, "producer_id", int)
        if cluster_id != self._cluster_id:
            raise _copied(cluster_id, self._cluster_id)
        number = typed(value, "number", int) if "number" in value else 0
        self._by_number.setdefault(number, ProducerId(producer_id))
        self.all = frozenset(self._by_number.values())

    def get(self, number: int = 0) -> ProducerId | None:
        """The shared producer id of that number, None while none is agreed on."""
        return self._by_number.get(number)


class FenceBaseRecords:
    def __init__(self) -> None:
        # Per partition and epoch the proposal that won: its key, its base, its claim.
        self._won: dict[tuple[UUID, int], dict[ProducerEpoch, tuple[str, LogEndOffset, str | None]]] = {}

    def apply(self, key: str, raw: bytes | None) -> None:
        _, topic_id, partition, epoch, _ = key.split("/")
        bases = self._won.setdefault((UUID(topic_id), int(partition)), {})
        producer_epoch = ProducerEpoch(int(epoch))
        value = object_of(raw)
        if value is not None:
            claim = typed(value, "claim", str) if "claim" in value else None
            bases.setdefault(producer_epoch, (key, LogEndOffset(typed(value, "base", int)), claim))
        elif bases.get(producer_epoch, ("",))[0] == key:
            del bases[producer_epoch]

    def get(self, topic_id: UUID, partition: int) -> FenceBase | None:
        """The base agreed on under the highest epoch; None if none was published (epoch 0, base 0)."""
        bases = self._won.get((topic_id, partition))
        if not bases:
            return None
        epoch = max(bases)
        return FenceBase(epoch, bases[epoch][1])

    def claim(self, topic_id: UUID, partition: int) -> str | None:
        """The claim of that base (`encode_fence_base`)."""
        bases = self._won.get((topic_id, partition))
        return bases[max(bases)][2] if bases else None

    def older(self, topic_id: UUID, partition: int, producer_epoch: ProducerEpoch) -> list[StateRecord]:
        """Tombstones of bases that are not needed once that epoch has one; as many as fit in a batch."""
        bases = self._won.get((topic_id, partition), {})
        older = (tombstone(key) for epoch, (key, *_) in bases.items() if epoch < producer_epoch)
        return list(islice(older, _OLDER_BASES_MAX))

    def proposal(self, topic_id: UUID, partition: int, producer_epoch: ProducerEpoch) -> bytes | None:
        """The key of the winning proposal under that epoch."""
        won = self._won.get((topic_id, partition), {}).get(producer_epoch)
        return None if won is None else won[0].encode()

    def forget(self, topic_id: UUID) -> list[StateRecord]:
        """Tombstones of all records of a deleted topic."""
        return [
            tombstone(key) for (found, _), bases in self._won.items() if found == topic_id for key, *_ in bases.values()
        ]


def _without_producer_id(key: str) -> StateError:
    text = f"the state topic's record {key} was deleted: the producer id of this cluster is unknown"
    return StateError(text, hint=hints.RECREATE)


def _copied(from_cluster: str, cluster: str) -> StateError:
    return StateError(
        f"the state topic belongs to cluster {from_cluster}, but this is cluster {cluster}: it was copied from there "
        "(if no topic of this cluster has had append checks yet, delete the state topic)",
        hint=hints.COPIED,
    )
