"""Queries to Kafka that an answer of a group coordinator waits for, and their replies."""

from __future__ import annotations

from collections.abc import Mapping

from fencepost_policies.values import value
from fencepost_proxy.expansion.watch import Assigned
from fencepost_proxy.types import TopicPartition


@value
class MayHave:
    """Partitions that a member of the group is about to get. The reply, `GatedPartitions`, has those that are gated."""

    group: str
    client_id: str | None
    partitions: tuple[TopicPartition, ...]


@value
class GatedPartitions:
    partitions: frozenset[TopicPartition]


@value
class WhereToBegin:
    """New partitions on which the group has no commit. The reply is `Beginnings`."""

    group: str
    partitions: tuple[TopicPartition, ...]


@value
class Beginnings:
    """Start offsets; for a missing partition the client's own policy applies. None: the query failed."""

    offsets: Mapping[TopicPartition, int] | None


@value
class WhatIsAssigned:
    """Assignment of a KIP-848 group member that is not known here. The reply is `IsAssigned`."""

    group: str
    member: str


@value
class IsAssigned:
    """None: the query failed."""

    assigned: Assigned | None


@value
class HasTasks:
    """Notice without a reply: the group assigns more than partitions, so none may be gated."""

    group: str


@value
class SharesTopics:
    """Notice without a reply: the group shares the partitions of expanded topics, so none is gated."""

    group: str
    topics: tuple[str, ...]


@value
class LookedUp:
    """Notice without a reply: a client requested end offsets (`latest`), or other offsets, of partitions."""

    client_id: str | None
    latest: tuple[TopicPartition, ...]
    others: tuple[TopicPartition, ...]


Query = MayHave | WhereToBegin | WhatIsAssigned
Notice = HasTasks | SharesTopics | LookedUp
Reply = GatedPartitions | Beginnings | IsAssigned
