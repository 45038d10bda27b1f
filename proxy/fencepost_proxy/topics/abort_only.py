"""Abort-only transaction: it may not commit, because a conditional append in it got an answer other than success.

Its records in the state topic:

| key | value | if there are several |
|---|---|---|
| `abort-only/<producer id>/<producer epoch>/<uuid>` | `{"transactional_id", "reason", "pending", "at_ms"}` | all |

A record is written before the client gets that answer. So every process refuses the commit: this one, its successor or
another one.

`pending` names batches that were answered "try again", or whose outcome is unknown: `[topic, partition, base
sequence]`. A batch at its expected offset is no longer pending, whichever process saw it. null: refused for good.

The uuid is new for each record. Under transactions v1 a producer's next transaction has the same epoch. So the records
of one transaction are tombstoned before its client gets the answer to its end, by the keys that were read: a late
tombstone does not affect the next transaction.

A refusal replaces all earlier records of the same process for the transaction. So a client that is refused repeatedly
and never ends the transaction leaves one record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.state_records import StateRecord, object_of, record, typed

ABORT_ONLY: Final = "abort-only"
_PREFIX: Final = f"{ABORT_ONLY}/".encode()
#: Maximum number of unresolved batches that are named; with more, the transaction is refused for good.
PENDING_MAX: Final = 100

#: One batch of a transaction: partition and base sequence.
BatchName = tuple[TopicPartition, int]


class AbortOnly(NamedTuple):
    """Why a transaction must not commit; `name` distinguishes records of one producer id and epoch.

    `pending`: valid only while one of these is not at its expected offset; None: always valid.
    """

    name: UUID
    transactional_id: str
    producer_id: int
    producer_epoch: int
    reason: str
    pending: frozenset[BatchName] | None
    at_ms: int

    @property
    def key(self) -> bytes:
        return f"{ABORT_ONLY}/{self.producer_id}/{self.producer_epoch}/{self.name}".encode()


def encode_abort_only(abort_only: AbortOnly) -> StateRecord:
    pending = None
    if abort_only.pending is not None:
        pending = sorted([each.topic, each.partition, sequence] for each, sequence in abort_only.pending)
    return record(
        abort_only.key.decode(),
        {
            "transactional_id": abort_only.transactional_id,
            "reason": abort_only.reason,
            "pending": pending,
            "at_ms": abort_only.at_ms,
        },
    )


def encode_abort_only_record(abort_only: AbortOnly, instead_of: Iterable[UUID]) -> list[StateRecord]:
    """Record it, and tombstone others of the same producer id and epoch by name, in one batch."""
    return [
        encode_abort_only(abort_only),
        *encode_abort_only_tombstones(abort_only._replace(name=name) for name in instead_of),
    ]


def encode_abort_only_tombstones(abort_only_records: Iterable[AbortOnly]) -> list[StateRecord]:
    """The transaction is over, or another record replaces these."""
    return [StateRecord(abort_only.key, None) for abort_only in abort_only_records]


def is_abort_only(record: StateRecord) -> bool:
    """Whether it is of this kind, tombstone or not."""
    return record.key.startswith(_PREFIX)


def cleared(record: StateRecord) -> UUID | None:
    """The name of the record that a tombstone removes, None for other records."""
    kind, _, rest = record.key.decode(errors="replace").partition("/")
    if kind != ABORT_ONLY or record.value is not None:
        return None
    try:
        _producer_id, _producer_epoch, name = rest.split("/")
        return UUID(name)
    except ValueError:
        return None


class AbortOnlyView:
    """Content up to the last record applied."""

    def __init__(self) -> None:
        self._by_producer: dict[tuple[int, int], dict[UUID, AbortOnly]] = {}

    def apply(self, key: str, raw: bytes | None) -> None:
        """Raises ValueError if it cannot be read."""
        _, producer_id, producer_epoch, name = key.split("/")
        producer, uuid = (int(producer_id), int(producer_epoch)), UUID(name)
        value = object_of(raw)
        if value is not None:
            self._by_producer.setdefault(producer, {})[uuid] = _abort_only(uuid, producer, value)
            return
        found = self._by_producer.get(producer)
        if found is not None and found.pop(uuid, None) is not None and not found:
            del self._by_producer[producer]

    def of(self, producer_id: int, producer_epoch: int) -> tuple[AbortOnly, ...]:
        return tuple(self._by_producer.get((producer_id, producer_epoch), {}).values())

    def older_than(self, at_ms: int) -> list[AbortOnly]:
        found = (each for abort_only_records in self._by_producer.values() for each in abort_only_records.values())
        return sorted((each for each in found if each.at_ms < at_ms), key=lambda each: each.at_ms)

    def __len__(self) -> int:
        return sum(map(len, self._by_producer.values()))


def _abort_only(name: UUID, producer: tuple[int, int], value: Mapping[str, object]) -> AbortOnly:
    pending = None
    if value.get("pending") is not None:
        entries = typed(value, "pending", list)
        pending = frozenset((TopicPartition(str(t), int(p)), int(sequence)) for t, p, sequence in entries)
    return AbortOnly(
        name,
        typed(value, "transactional_id", str),
        *producer,
        typed(value, "reason", str),
        pending,
        typed(value, "at_ms", int),
    )
