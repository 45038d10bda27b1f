"""Gated assignments of consumer groups in the state topic (`gating.py` has the reasons).

| key | value | if there are several |
|---|---|---|
| `gated/<group>` | `{"topics": {name: {"id", "partitions"}}, "at_ms"}`: members may lack these | the last |
| `released/<topic id>/<to>/<group>` | `{"at_ms"}`: an operator released that expansion's partitions to it | any |

A restarted process does not know the assignments of members that stayed connected to other listeners, or kept their
generation. `gated` names the groups for which it must assume gaps. It is tombstoned once no partition is gated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.state_records import StateRecord, object_of, record, tombstone, typed

GATED: Final = "gated"
RELEASED: Final = "released"
KINDS: Final = frozenset({GATED, RELEASED})


@dataclass(frozen=True, slots=True)
class GatedPartitions:
    """`topic_ids`: of the topics in `partitions`."""

    partitions: frozenset[TopicPartition]
    topic_ids: Mapping[str, UUID]
    at_ms: int


def encode_gated(
    group: str, partitions: Iterable[TopicPartition], topic_ids: Mapping[str, UUID], at_ms: int
) -> StateRecord:
    """Members of the group may lack these partitions."""
    topics: dict[str, dict[str, object]] = {}
    for topic in sorted({each.topic for each in partitions} & topic_ids.keys()):
        numbers = sorted(each.partition for each in partitions if each.topic == topic)
        topics[topic] = {"id": str(topic_ids[topic]), "partitions": numbers}
    return record(f"{GATED}/{group}", {"topics": topics, "at_ms": at_ms})


def encode_gated_tombstone(group: str) -> StateRecord:
    """Members have all that they were assigned."""
    return tombstone(f"{GATED}/{group}")


def encode_released(topic_id: UUID, to_count: int, group: str, at_ms: int) -> StateRecord:
    """The group gets the partitions of the expansion to `to_count`, whatever its progress."""
    return record(f"{RELEASED}/{topic_id}/{to_count}/{group}", {"at_ms": at_ms})


class GatedView:
    """Content up to the last record applied."""

    def __init__(self) -> None:
        self.groups: dict[str, GatedPartitions] = {}
        self._released: dict[tuple[UUID, int, str], str] = {}

    def apply(self, key: str, raw: bytes | None) -> None:
        """Apply a record of one of `KINDS`. Raises ValueError if it cannot be read."""
        kind, _, rest = key.partition("/")
        value = object_of(raw)
        if kind == GATED:
            if value is None:
                self.groups.pop(rest, None)
            else:
                self.groups[rest] = _gated(value)
            return
        topic_id, _, rest = rest.partition("/")
        to_count, _, group = rest.partition("/")
        release = UUID(topic_id), int(to_count), group
        if value is None:
            self._released.pop(release, None)
        else:
            self._released[release] = key

    def released(self, topic_id: UUID, to_count: int, group: str) -> bool:
        return (topic_id, to_count, group) in self._released

    def forget(self, topic_id: UUID) -> list[StateRecord]:
        """Tombstones of all records of a deleted topic."""
        return [tombstone(key) for release, key in self._released.items() if release[0] == topic_id]


def _gated(value: Mapping[str, object]) -> GatedPartitions:
    partitions: set[TopicPartition] = set()
    topic_ids: dict[str, UUID] = {}
    for topic, entry in typed(value, "topics", dict).items():
        if not isinstance(entry, dict):
            raise ValueError("a topic's entry is not a JSON object")
        topic_ids[topic] = UUID(typed(entry, "id", str))
        partitions.update(TopicPartition(topic, int(each)) for each in typed(entry, "partitions", list))
    return GatedPartitions(frozenset(partitions), topic_ids, typed(value, "at_ms", int))
