"""Expansions of topics, as recorded in the state topic.

| key | value | if there are several |
|---|---|---|
| `expansion/<topic id>/<from>/<proposal uuid>` | `{"topic", "to", "assignments", "process", "at_ms"}` | see below |
| the same, of an expansion that bypassed the proxy | `{"topic", "to", "at_ms", "unordered": true}` | see below |
| `expansion-closed/<topic id>/<proposal>/<process uuid>` | `{}`: that process admits no append | all count |
| `expansion-driver/<topic id>/<proposal>/<round>/<claim uuid>` | `{"process"}` | the lowest offset of a round wins |
| `expansion-end/<topic id>/<proposal>/<uuid>` | see `encode_done`, `encode_failed`, … | the lowest wins |
| `partition-count/<topic id>` | `{"topic", "count"}`: count when checks began | the last |

*Which proposal is accepted.* One for which, at its place in the log, no expansion of the topic is pending, and that
begins at the count where the last one ended. All others are rejected for good: the proposer reads its record back and
reports the result to its client. The rule does not depend on records that compaction may move or delete: each record
has its own key, and is deleted only together with all others of its topic.

*Ordered* is an expansion that ended `done`: it has thresholds. An expansion without blocked appends is *unordered*: it
only gives the count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from uuid import UUID

from fencepost_proxy.types import LeaderEpoch, LogEndOffset, NodeId
from fencepost_proxy.wire.state_records import StateRecord, object_of, record, tombstone, typed

EXPANSION: Final = "expansion"
EXPANSION_CLOSED: Final = "expansion-closed"
EXPANSION_DRIVER: Final = "expansion-driver"
EXPANSION_END: Final = "expansion-end"
PARTITION_COUNT: Final = "partition-count"
KINDS: Final = frozenset({EXPANSION, EXPANSION_CLOSED, EXPANSION_DRIVER, EXPANSION_END, PARTITION_COUNT})

#: The replicas requested for each new partition.
Assignments = tuple[tuple[NodeId, ...], ...]


@dataclass(frozen=True, slots=True)
class Expansion:
    """One expansion of one incarnation of a topic, from `from_count` to `to_count` partitions.

    `thresholds`, `epochs`: log end and leader epoch of each prior partition; empty if pending or `unordered`.
    `ended_at_ms`: None while pending. `blocked_ms`: how long appends were blocked.
    """

    topic: str
    topic_id: UUID
    from_count: int
    to_count: int
    proposal: UUID
    at_ms: int
    process: UUID | None = None
    assignments: Assignments | None = None
    thresholds: tuple[LogEndOffset, ...] = ()
    """Threshold: the log end of a prior partition when the topic was expanded, up to which groups read it first."""
    epochs: tuple[LeaderEpoch, ...] = ()
    unordered: bool = False
    ended_at_ms: int | None = None
    blocked_ms: int | None = None

    @property
    def ordered(self) -> bool:
        return self.ended_at_ms is not None and not self.unordered

    @property
    def multiple(self) -> bool:
        """Whether keys placed by hash % count move to new partitions only."""
        return self.to_count % self.from_count == 0

    @property
    def prior_partitions(self) -> range:
        """Prior partition: one that the topic had before the expansion (KIP-253)."""
        return range(self.from_count)

    @property
    def created_partitions(self) -> range:
        """The added partitions."""
        return range(self.from_count, self.to_count)


@dataclass(frozen=True, slots=True)
class ExpansionHistory:
    """All expansions of one incarnation of a topic.

    `first_count`: partitions when checks began; None if unknown.
    `expansions`: those that ended `done` or unordered, in order; each begins where the one before ended.
    `pending`: in progress; its partitions may exist or not. `closed`: processes that admit no append because of it.
    `driver`: the process that executes it; `driver_round`: 0 for the proposer. `failed`: reason of failure by proposal.
    """

    first_count: int | None = None
    expansions: tuple[Expansion, ...] = ()
    pending: Expansion | None = None
    closed: frozenset[UUID] = frozenset()
    driver: UUID | None = None
    driver_round: int = 0
    failed: Mapping[UUID, str] = field(default_factory=dict)

    @property
    def count(self) -> int | None:
        """Partitions after the last expansion that ended, else when checks began; None if neither is known."""
        return self.expansions[-1].to_count if self.expansions else self.first_count

    @property
    def ordered(self) -> tuple[Expansion, ...]:
        return tuple(expansion for expansion in self.expansions if expansion.ordered)

    def created_by(self, partition: int) -> Expansion | None:
        """The expansion, ended or pending, that added a partition; None for an original partition."""
        known = self.expansions if self.pending is None else (*self.expansions, self.pending)
        return next((each for each in known if partition in each.created_partitions), None)

    def ended(self, proposal: UUID) -> Expansion | None:
        """The result of a proposal that did not fail; None if it is pending or was not accepted."""
        return next((each for each in self.expansions if each.proposal == proposal), None)

    def described(self) -> str:
        """The value of the config `fencepost.ordered.partition.expansions`: JSON, oldest first.

        A pending one comes last, without thresholds. A consumer that assigns partitions itself may see the new ones in
        Metadata before the thresholds are known, and must not take them for original ones.
        """
        expansions: list[dict[str, object]] = [
            {
                "from": each.from_count,
                "to": each.to_count,
                "thresholds": list(each.thresholds),
                "at_ms": each.ended_at_ms,
                "unordered": each.unordered,
                "multiple": each.multiple,
            }
            for each in self.expansions
        ]
        if self.pending is not None:
            expansions.append(
                {
                    "from": self.pending.from_count,
                    "to": self.pending.to_count,
                    "thresholds": None,
                    "at_ms": None,
                    "unordered": False,
                    "multiple": self.pending.multiple,
                    "pending": True,
                }
            )
        return json.dumps(expansions, separators=(",", ":"))


NO_EXPANSIONS: Final = ExpansionHistory()


# --- records ----------------------------------------------------------------------------------------------------------


def encode_expansion(expansion: Expansion) -> StateRecord:
    """The proposal of an expansion, or the record of an unordered one."""
    value: dict[str, object] = {"topic": expansion.topic, "to": expansion.to_count, "at_ms": expansion.at_ms}
    if expansion.unordered:
        value["unordered"] = True
    else:
        value["process"] = str(expansion.process)
        value["assignments"] = expansion.assignments
    return record(f"{EXPANSION}/{expansion.topic_id}/{expansion.from_count}/{expansion.proposal}", value)


def encode_closed(expansion: Expansion, process: UUID) -> StateRecord:
    """The process admits no append to the topic, has none in progress, and will not until the end is stored."""
    return record(f"{EXPANSION_CLOSED}/{expansion.topic_id}/{expansion.proposal}/{process}", {})


def encode_claim(expansion: Expansion, driver_round: int, claim: UUID, process: UUID) -> StateRecord:
    """The process claims to drive the expansion, since its driver is dead."""
    key = f"{EXPANSION_DRIVER}/{expansion.topic_id}/{expansion.proposal}/{driver_round}/{claim}"
    return record(key, {"process": str(process)})


def encode_done(
    expansion: Expansion,
    end: UUID,
    *,
    thresholds: Sequence[LogEndOffset],
    epochs: Sequence[LeaderEpoch],
    at_ms: int,
    blocked_ms: int,
) -> StateRecord:
    value = {"result": "done", "thresholds": thresholds, "epochs": epochs, "at_ms": at_ms, "blocked_ms": blocked_ms}
    return record(f"{EXPANSION_END}/{expansion.topic_id}/{expansion.proposal}/{end}", value)


def encode_failed(expansion: Expansion, end: UUID, *, reason: str, at_ms: int) -> StateRecord:
    """The topic still has the old number of partitions."""
    value = {"result": "failed", "reason": reason, "at_ms": at_ms}
    return record(f"{EXPANSION_END}/{expansion.topic_id}/{expansion.proposal}/{end}", value)


def encode_unordered_end(expansion: Expansion, end: UUID, *, to_count: int, reason: str, at_ms: int) -> StateRecord:
    """The topic has `to_count` partitions, but not by this expansion."""
    value = {"result": "unordered", "to": to_count, "reason": reason, "at_ms": at_ms}
    return record(f"{EXPANSION_END}/{expansion.topic_id}/{expansion.proposal}/{end}", value)


def encode_partition_count(topic: str, topic_id: UUID, count: int) -> StateRecord:
    """The partition count of a topic when checks began."""
    return record(f"{PARTITION_COUNT}/{topic_id}", {"topic": topic, "count": count})


@dataclass(slots=True)
class _Topic:
    """Records of one incarnation. `keys`: of all its records, to be deleted with the topic."""

    keys: dict[str, None] = field(default_factory=dict)
    name: str | None = None
    history: ExpansionHistory = NO_EXPANSIONS


class ExpansionHistories:
    """Expansions of all topics, up to the last record applied."""

    def __init__(self) -> None:
        self._topics: dict[UUID, _Topic] = {}

    def apply(self, key: str, raw: bytes | None) -> None:
        """Apply a record of one of `KINDS`, in offset order. Raises ValueError if it cannot be read."""
        kind, _, rest = key.partition("/")
        value = object_of(raw)
        names = rest.split("/")
        topic_id = UUID(names[0])
        topic = self._topics.setdefault(topic_id, _Topic())
        # Each history replaces the one before: a thread that plans a large request reads it too.
        if value is not None:
            topic.keys[key] = None
            topic.history = _with(topic, topic_id, kind, names, value)
            return
        topic.keys.pop(key, None)
        topic.history = _without(topic.history, kind, names)
        if not topic.keys:
            del self._topics[topic_id]

    # ---- queries

    def history(self, topic: str, topic_id: UUID | None) -> ExpansionHistory:
        """`topic_id` None if unknown: the latest incarnation of that name."""
        if topic_id is None:
            topics = list(self._topics.items()) if self._topics else []
            topic_id = next((key for key, each in reversed(topics) if each.name == topic), None)
        found = None if topic_id is None else self._topics.get(topic_id)
        return NO_EXPANSIONS if found is None else found.history

    @property
    def pending(self) -> tuple[Expansion, ...]:
        return tuple(each.history.pending for each in self._topics.values() if each.history.pending is not None)

    @property
    def expanded(self) -> tuple[Expansion, ...]:
        """The last expansion of each expanded topic, also of deleted topics."""
        return tuple(each.history.expansions[-1] for each in self._topics.values() if each.history.expansions)

    @property
    def names(self) -> frozenset[str]:
        """Topics that ever had partition-count checks, also deleted ones."""
        return frozenset(each.name for each in self._topics.values() if each.name is not None)

    @property
    def incarnations(self) -> Mapping[UUID, str]:
        """Names of those topics by id, one per incarnation."""
        return {topic_id: each.name for topic_id, each in self._topics.items() if each.name is not None}

    def forget(self, topic_id: UUID) -> list[StateRecord]:
        """Tombstones of all records of a deleted incarnation."""
        topic = self._topics.get(topic_id)
        return [] if topic is None else [tombstone(key) for key in topic.keys]

    def tidy(self, expansion: Expansion) -> list[StateRecord]:
        """Tombstones of the records that are not needed after the end: closed processes and drivers."""
        topic = self._topics.get(expansion.topic_id)
        if topic is None:
            return []
        starts = tuple(
            f"{kind}/{expansion.topic_id}/{expansion.proposal}/" for kind in (EXPANSION_CLOSED, EXPANSION_DRIVER)
        )
        return [tombstone(key) for key in topic.keys if key.startswith(starts)]


def _expansion(topic_id: UUID, from_count: int, proposal: UUID, value: Mapping[str, Any]) -> Expansion:
    unordered = value.get("unordered") is True
    assignments = value.get("assignments")
    at_ms = typed(value, "at_ms", int)
    return Expansion(
        topic=typed(value, "topic", str),
        topic_id=topic_id,
        from_count=from_count,
        to_count=typed(value, "to", int),
        proposal=proposal,
        at_ms=at_ms,
        process=None if unordered else UUID(typed(value, "process", str)),
        assignments=None if assignments is None else tuple(tuple(map(NodeId, each)) for each in assignments),
        unordered=unordered,
        ended_at_ms=at_ms if unordered else None,
    )


def _with(topic: _Topic, topic_id: UUID, kind: str, names: Sequence[str], value: Mapping[str, Any]) -> ExpansionHistory:
    history = topic.history

    def is_pending(proposal: str) -> bool:
        return history.pending is not None and history.pending.proposal == UUID(proposal)

    match kind, names:
        case "expansion", [_, from_count, proposal]:
            expansion = _expansion(topic_id, int(from_count), UUID(proposal), value)
            begins = history.expansions[-1].to_count if history.expansions else expansion.from_count
            if history.pending is None and begins == expansion.from_count and expansion.created_partitions:
                topic.name = expansion.topic
                if expansion.unordered:
                    return replace(history, expansions=(*history.expansions, expansion))
                return replace(history, pending=expansion, driver=expansion.process)
        case "expansion-closed", [_, proposal, process]:
            if is_pending(proposal):
                return replace(history, closed=history.closed | {UUID(process)})
        case "expansion-driver", [_, proposal, driver_round, _]:
            if is_pending(proposal) and int(driver_round) > history.driver_round:
                driver = UUID(typed(value, "process", str))
                return replace(history, driver=driver, driver_round=int(driver_round))
        case "expansion-end", [_, proposal, _]:
            if history.pending is not None and is_pending(proposal):
                return _ended(history, history.pending, value)
        case "partition-count", [_]:
            topic.name = typed(value, "topic", str)
            return replace(history, first_count=typed(value, "count", int))
        case _:
            raise ValueError("invalid key")
    return history


def _not_pending(history: ExpansionHistory) -> ExpansionHistory:
    return ExpansionHistory(history.first_count, history.expansions, failed=history.failed)


def _ended(history: ExpansionHistory, expansion: Expansion, value: Mapping[str, Any]) -> ExpansionHistory:
    at_ms = typed(value, "at_ms", int)
    match value.get("result"):
        case "failed":
            failed = {**history.failed, expansion.proposal: typed(value, "reason", str)}
            return replace(_not_pending(history), failed=failed)
        case "unordered":
            ended = replace(expansion, to_count=typed(value, "to", int), unordered=True, ended_at_ms=at_ms)
        case "done":
            thresholds, epochs = typed(value, "thresholds", list), typed(value, "epochs", list)
            if len(thresholds) != expansion.from_count or len(epochs) != expansion.from_count:
                raise ValueError(f"{len(thresholds)} thresholds for {expansion.from_count} partitions")
            ended = replace(
                expansion,
                thresholds=tuple(map(LogEndOffset, thresholds)),
                epochs=tuple(map(LeaderEpoch, epochs)),
                ended_at_ms=at_ms,
                blocked_ms=typed(value, "blocked_ms", int),
            )
        case other:
            raise ValueError(f"unknown result of an expansion {other!r:.40} (was it written by a newer version?)")
    return replace(_not_pending(history), expansions=(*history.expansions, ended))


def _without(history: ExpansionHistory, kind: str, names: Sequence[str]) -> ExpansionHistory:
    if kind == PARTITION_COUNT:
        return replace(history, first_count=None)
    if kind != EXPANSION or len(names) != 3:
        return history
    proposal = UUID(names[2])
    if history.pending is not None and history.pending.proposal == proposal:
        history = _not_pending(history)
    return replace(
        history,
        expansions=tuple(each for each in history.expansions if each.proposal != proposal),
        failed={each: reason for each, reason in history.failed.items() if each != proposal},
    )
