"""What the state topic says of transactions that must not commit as they are.

| key | value | of several |
|---|---|---|
| `poison/<producer id>/<producer epoch>/<uuid>` | `{"transactional_id", "why", "pending", "at_ms"}` | all count |

A conditional append of a transaction that was answered with anything but success is noted here before its client is
told: so whichever process the commit comes to refuses it, this one or its successor or another.

`pending` names batches that were told to come again (or whose outcome is not known): `[topic, partition, base
sequence]`. One that lies where it was expected is pending no more, whoever saw it land. null: refused for good.

The uuid is new for each record. Under transactions v1 the next transaction of a producer
has the same epoch, so the records of one are tombstoned before its end is told to the client, by the keys that were
seen: a tombstone that comes late takes away nothing of the next one's.

A refusal takes the place of all that the same process has noted of the transaction before: who is refused again and
again, and never ends it, leaves one record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.topics.records import StateRecord, object_of, record, typed
from fencepost_proxy.types import TopicPartition

POISON: Final = "poison"
KINDS: Final = frozenset({POISON})
_PREFIX: Final = f"{POISON}/".encode()
#: What is not known to be resolved is at least so many, and no more are named: from then on it is refused for good.
PENDING_MAX: Final = 100

#: One batch of a transaction: its partition and base sequence.
BatchName = tuple[TopicPartition, int]


class Poison(NamedTuple):
    """Why a transaction must not commit; `name` tells it from others of the same producer id and epoch.

    `pending` – only as long as one of these is not where it was expected; None: whatever comes.
    """

    name: UUID
    transactional_id: str
    producer_id: int
    producer_epoch: int
    why: str
    pending: frozenset[BatchName] | None
    at_ms: int

    @property
    def key(self) -> bytes:
        return f"{POISON}/{self.producer_id}/{self.producer_epoch}/{self.name}".encode()


def encode_poison(poison: Poison) -> StateRecord:
    pending = None
    if poison.pending is not None:
        pending = sorted([each.topic, each.partition, sequence] for each, sequence in poison.pending)
    return record(
        poison.key.decode(),
        {
            "transactional_id": poison.transactional_id,
            "why": poison.why,
            "pending": pending,
            "at_ms": poison.at_ms,
        },
    )


def encode_note(poison: Poison, instead_of: Iterable[UUID]) -> list[StateRecord]:
    """It takes the place of others of the same producer id and epoch, by their names: for one batch."""
    return [encode_poison(poison), *encode_poison_tombstones(poison._replace(name=name) for name in instead_of)]


def encode_poison_tombstones(poisons: Iterable[Poison]) -> list[StateRecord]:
    """That the transaction is over, or that another record says it."""
    return [StateRecord(poison.key, None) for poison in poisons]


def is_poison(record: StateRecord) -> bool:
    """It is of one of `KINDS`, a tombstone or not."""
    return record.key.startswith(_PREFIX)


def lifted(record: StateRecord) -> UUID | None:
    """The name of what a tombstone takes away, None for any other record."""
    kind, _, rest = record.key.decode(errors="replace").partition("/")
    if kind != POISON or record.value is not None:
        return None
    try:
        _producer_id, _producer_epoch, name = rest.split("/")
        return UUID(name)
    except ValueError:
        return None


class PoisonView:
    """Up to the last record applied."""

    def __init__(self) -> None:
        self._by_producer: dict[tuple[int, int], dict[UUID, Poison]] = {}

    def apply(self, key: str, raw: bytes | None) -> None:
        """A record of one of `KINDS`. Raises ValueError for one that cannot be read."""
        _, producer_id, producer_epoch, name = key.split("/")
        producer, uuid = (int(producer_id), int(producer_epoch)), UUID(name)
        value = object_of(raw)
        if value is not None:
            self._by_producer.setdefault(producer, {})[uuid] = _poison(uuid, producer, value)
            return
        found = self._by_producer.get(producer)
        if found is not None and found.pop(uuid, None) is not None and not found:
            del self._by_producer[producer]

    def of(self, producer_id: int, producer_epoch: int) -> tuple[Poison, ...]:
        return tuple(self._by_producer.get((producer_id, producer_epoch), {}).values())

    def older_than(self, at_ms: int) -> list[Poison]:
        """Those noted before, oldest first."""
        found = (each for poisons in self._by_producer.values() for each in poisons.values())
        return sorted((each for each in found if each.at_ms < at_ms), key=lambda each: each.at_ms)

    def __len__(self) -> int:
        return sum(map(len, self._by_producer.values()))


def _poison(name: UUID, producer: tuple[int, int], value: Mapping[str, object]) -> Poison:
    pending = None
    if value.get("pending") is not None:
        entries = typed(value, "pending", list)
        pending = frozenset((TopicPartition(str(t), int(p)), int(sequence)) for t, p, sequence in entries)
    return Poison(
        name,
        typed(value, "transactional_id", str),
        *producer,
        typed(value, "why", str),
        pending,
        typed(value, "at_ms", int),
    )
