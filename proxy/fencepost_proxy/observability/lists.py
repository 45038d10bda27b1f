"""Paged lists of the status page: topics, partitions, refusals, clients, expansions, groups.

A query scans names and builds only the rows of the requested page. Rows are ordered by name.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest, nsmallest
from itertools import islice
from operator import attrgetter
from typing import Final, TypeVar

from fencepost_proxy.cluster.metadata import TopicInfo
from fencepost_proxy.observability import audit
from fencepost_proxy.observability.audit import Identity
from fencepost_proxy.observability.status import (
    CheckedTopicStatus,
    ClientStatus,
    ExpansionStatus,
    GatedStatus,
    Listed,
    PageRequest,
    PartitionStatus,
    RefusalStatus,
    SoftwareStatus,
)
from fencepost_proxy.sequencer.fence import Phase
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session.frames.messages import Count
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import TopicPartition

_T = TypeVar("_T")
_S = TypeVar("_S", str, TopicPartition)

#: Partitions and topics whose last refusal is retained; the oldest refusal is evicted first.
_REFUSALS_MAX: Final = 10_000
#: Clients choose software names; names above this number are counted as `others`.
_SOFTWARE_MAX: Final = 1_000
#: Clients choose client ids, which may have 32,767 bytes.
CHARACTERS_MAX: Final = 200
OTHERS: Final = "others"
_HEAP_PAYS: Final = 16


_Lasts = OrderedDict[_T, tuple[int, RefusalStatus]]
_NEVER: Final[tuple[int, None]] = (0, None)


def clipped(text: str | None) -> str | None:
    return text if text is None or len(text) <= CHARACTERS_MAX else f"{text[:CHARACTERS_MAX]}…"


class Refusals:
    """Number of refusals and the last one, of each partition and topic, least recently refused first."""

    def __init__(self) -> None:
        self._of_partition: _Lasts[TopicPartition] = OrderedDict()
        self._of_topic: _Lasts[str] = OrderedDict()

    def record(self, reported: Count, proxied: ProxiedConnection | None) -> None:
        partition = reported.partition
        if partition is None:
            return
        identity = Identity.of(proxied)
        last = RefusalStatus(
            *partition,
            reported.label,
            at_ms=int(time.time() * 1000),
            expected=reported.expected,
            log_end_offset=reported.actual if reported.actual >= 0 else None,
            client_id=clipped(identity.client_id),
            client=identity.peer,
            principal=clipped(identity.principal),
        )
        audit.append_refused(last)
        _keep(self._of_partition, partition, last)
        _keep(self._of_topic, partition.topic, last)

    def of_partition(self, partition: TopicPartition) -> tuple[int, RefusalStatus | None]:
        return self._of_partition.get(partition, _NEVER)

    def of_topic(self, topic: str) -> tuple[int, RefusalStatus | None]:
        return self._of_topic.get(topic, _NEVER)

    def __len__(self) -> int:
        return len(self._of_partition)

    def newest_first(self) -> Iterator[RefusalStatus]:
        return (last for _, last in reversed(self._of_partition.values()))


def _keep(lasts: _Lasts[_T], key: _T, last: RefusalStatus) -> None:
    count, _ = lasts.pop(key, _NEVER)
    lasts[key] = count + 1, last
    if len(lasts) > _REFUSALS_MAX:
        lasts.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Lists:
    """`topics`: topics with virtual configs or with partition sequencers."""

    proxied_connections: Mapping[int, ProxiedConnection]
    sequencers: Mapping[TopicPartition, PartitionSequencer]
    refusals: Refusals
    topics: Callable[[], Iterable[str]]
    policy: Callable[[str], TopicPolicy | None]
    info: Callable[[str], TopicInfo | None]
    expansions: Callable[[], Sequence[ExpansionStatus]]
    gated: Callable[[], Sequence[GatedStatus]]

    def listed(self, requested: PageRequest) -> Listed:
        begin, end = requested.offset, requested.offset + requested.limit
        match requested.what:
            case "topics":
                names = [name for name in self._topics() if _fits(requested, name) and requested.topic in (None, name)]
                return Listed(len(names), tuple(map(self._topic, _first(end, names)[begin:])))
            case "partitions":
                partitions = self._partitions(requested)
                return Listed(len(partitions), tuple(map(self._partition, _first(end, partitions)[begin:])))
            case "refusals":
                if not requested.search and requested.topic is None:
                    newest = islice(self.refusals.newest_first(), begin, end)
                    return Listed(len(self.refusals), tuple(newest))
                lasts = [each for each in self.refusals.newest_first() if _of(requested, each.topic)]
                return Listed(len(lasts), tuple(lasts[begin:end]))
            case "software":
                software = self._software()
                return Listed(len(software), tuple(nlargest(end, software, key=attrgetter("connections"))[begin:]))
            case "clients":
                return self._clients(requested)
            case "expansions":
                expanded = [each for each in self.expansions() if _of(requested, each.topic)]
                return Listed(len(expanded), tuple(expanded[begin:end]))
            case "groups":
                waiting = [each for each in self.gated() if _of(requested, each.topic, each.group)]
                return Listed(len(waiting), tuple(waiting[begin:end]))

    def _topics(self) -> Iterator[str]:
        """Existing checked topics."""
        for topic in self.topics():
            if self.policy(topic) is not None and self.info(topic) is not None:
                yield topic

    def _topic(self, topic: str) -> CheckedTopicStatus:
        policy, info = self.policy(topic), self.info(topic)
        assert policy is not None
        assert info is not None
        sequencers = [self.sequencers.get(TopicPartition(topic, partition)) for partition in info.partitions]
        known = self._ends(topic).values()
        count, last = self.refusals.of_topic(topic)
        return CheckedTopicStatus(
            topic,
            dict(policy.configs),
            info.partition_count,
            sum(sequencer.waiting for sequencer in sequencers if sequencer is not None),
            log_end_offsets=sum(known),
            ends_known=len(known),
            refusals=count,
            last_refusal=last,
        )

    def _ends(self, topic: str) -> dict[int, int]:
        info = self.info(topic)
        ends = {}
        for partition in () if info is None else info.partitions:
            sequencer = self.sequencers.get(TopicPartition(topic, partition))
            if sequencer is not None and sequencer.log_end_offset is not None:
                ends[partition] = sequencer.log_end_offset
        return ends

    def _partitions(self, requested: PageRequest) -> list[TopicPartition]:
        """All partitions of a checked topic; without a topic, all partitions with a sequencer."""
        if requested.topic is None:
            names = list(self.sequencers)
        else:
            info = self.info(requested.topic) if self.policy(requested.topic) is not None else None
            names = [] if info is None else [TopicPartition(requested.topic, each) for each in info.partitions]
        return [name for name in names if _fits(requested, str(name))] if requested.search else names

    def _partition(self, name: TopicPartition) -> PartitionStatus:
        info, sequencer = self.info(name.topic), self.sequencers.get(name)
        at = None if info is None else info.partitions.get(name.partition)
        leader = None if at is None or at.leader.node_id < 0 else at.leader.node_id
        count, last = self.refusals.of_partition(name)
        if sequencer is None:
            return PartitionStatus(*name, leader, refusals=count, last_refusal=last)
        is_open = sequencer.phase is Phase.OPEN
        return PartitionStatus(
            *name,
            leader,
            state=sequencer.phase.name.lower(),
            log_end_offset=sequencer.log_end_offset,
            sequence_offset=sequencer.sequence_offset if is_open else None,
            waiting=sequencer.waiting,
            refusals=count,
            last_refusal=last,
        )

    def _software(self) -> list[SoftwareStatus]:
        counts: Counter[tuple[str | None, str | None]] = Counter()
        for proxied in self.proxied_connections.values():
            software = None if proxied.session is None else proxied.session.state.software
            key: tuple[str | None, str | None] = software or (None, None)
            if key not in counts and len(counts) >= _SOFTWARE_MAX:
                key = (OTHERS, None)
            counts[key] += 1
        return [SoftwareStatus(*key, count) for key, count in counts.items()]

    def _clients(self, requested: PageRequest) -> Listed:
        now = time.monotonic()
        proxied_connections = self.proxied_connections.values()
        matching = [
            proxied for proxied in proxied_connections if not requested.search or _fits(requested, *_names(proxied))
        ]
        first = nsmallest(
            requested.offset + requested.limit, matching, key=lambda proxied: (_names(proxied)[0], proxied.peer)
        )
        return Listed(len(matching), tuple(_client(proxied, now) for proxied in first[requested.offset :]))


def _client(proxied: ProxiedConnection, now: float) -> ClientStatus:
    session, identity = proxied.session, Identity.of(proxied)
    software = None if session is None else session.state.software
    return ClientStatus(
        client_id=clipped(identity.client_id),
        address=proxied.peer,
        software=None if software is None else software.name,
        version=None if software is None else software.version,
        node_id=proxied.node_id,
        connected_seconds=now - proxied.opened_at,
        idle_seconds=max(0.0, now - max(proxied.client.received_at, proxied.opened_at)),
        in_flight=0 if session is None else session.unanswered_count,
        waits_for=None if session is None else session.waits_for,
        principal=clipped(identity.principal),
    )


def _names(proxied: ProxiedConnection) -> tuple[str, str, str, str]:
    session, identity = proxied.session, Identity.of(proxied)
    software = None if session is None else session.state.software
    return (
        identity.client_id or "",
        str(proxied.peer),
        identity.principal or "",
        "" if software is None else f"{software.name} {software.version}",
    )


def _first(count: int, names: list[_S]) -> list[_S]:
    """The first names in order. A heap is faster for few of many names, and far slower for many."""
    return nsmallest(count, names) if count * _HEAP_PAYS < len(names) else sorted(names)[:count]


def _fits(requested: PageRequest, *names: str) -> bool:
    search = requested.search.lower()
    return not search or any(search in name.lower() for name in names)


def _of(requested: PageRequest, topic: str, *names: str) -> bool:
    return requested.topic in (None, topic) and _fits(requested, topic, *names)
