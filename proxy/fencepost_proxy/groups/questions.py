"""What has to be asked of Kafka before an answer of a group's coordinator may pass, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping

from fencepost_policies.values import value
from fencepost_proxy.groups.watch import Assigned
from fencepost_proxy.types import TopicPartition


@value
class MayHave:
    """Partitions that a member of the group is about to get. Answered by those that it may not have: `Withheld`."""

    group: str
    client_id: str | None
    partitions: tuple[TopicPartition, ...]


@value
class Withheld:
    partitions: frozenset[TopicPartition]


@value
class WhereToBegin:
    """New partitions on which the group has committed nothing. Answered by `Beginnings`."""

    group: str
    partitions: tuple[TopicPartition, ...]


@value
class Beginnings:
    """Where to begin; a partition that is missing is for the client's own policy. None: it could not be found out."""

    offsets: Mapping[TopicPartition, int] | None


@value
class WhatIsAssigned:
    """To a member of a KIP-848 group that is not known here. Answered by `IsAssigned`."""

    group: str
    member: str


@value
class IsAssigned:
    """None: it could not be found out."""

    assigned: Assigned | None


@value
class HasTasks:
    """To be known, not answered: the group assigns more than partitions, so nothing may be withheld from it."""

    group: str


@value
class LookedUp:
    """To be known, not answered: a client asked where partitions end (`latest`), or for other places of theirs."""

    client_id: str | None
    latest: tuple[TopicPartition, ...]
    others: tuple[TopicPartition, ...]


Question = MayHave | WhereToBegin | WhatIsAssigned
Notice = HasTasks | LookedUp
Reply = Withheld | Beginnings | IsAssigned
