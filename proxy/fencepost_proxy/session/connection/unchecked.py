"""Expected offsets on topics that do not check them: their producers rely on a comparison that does not take place.

Produce requests to such topics are relayed unread. So only the first ones of a connection are read: per topic, the
first partition of at most `_REQUESTS_MAX` requests, and none whose batch is large or has not arrived completely. Once
the fast path relays a topic's requests, none is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fencepost_policies.append import Check
from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import OffsetIgnored
from fencepost_proxy.session.frames.services import Settings, Topics
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch_scan import scan_batch
from fencepost_proxy.wire.peeks import UNREADABLE, records_of
from fencepost_proxy.wire.records import Effort

_REQUESTS_MAX = 3
_TOPICS_MAX = 100
_BATCH_BYTES_MAX = 16 * 1024
_UNPACKED_BYTES_MAX = 256 * 1024
_RECORDS_MAX = 2_000


@dataclass(slots=True, eq=False)
class UncheckedSamples:
    _state: ConnectionState
    _topics: Topics
    _settings: Settings
    _read: dict[str, int] = field(default_factory=dict)  # how many requests were read, by topic

    def read_start(self, topic: str, head: memoryview, first_at: int, *, flexible: bool) -> None:
        """`head`: the part of a Produce request that has arrived; its first partition starts at `first_at`."""
        if not self._is_due(topic):
            return
        try:
            partition, start, end = records_of(head, first_at, flexible=flexible)
        except UNREADABLE:
            return
        if end <= len(head):
            self.read(TopicPartition(topic, partition), head[start:end])

    def read(self, where: TopicPartition, records: memoryview | None) -> None:
        if records is None or len(records) > _BATCH_BYTES_MAX or not self._is_due(where.topic):
            return
        policy = self._topics.policy(where.topic)
        if policy is not None and policy.check is not Check.OFF:
            return
        self._read[where.topic] = self._read.get(where.topic, 0) + 1
        try:
            scan = scan_batch(
                records,
                self._settings.header_names,
                where,
                source_is_base=False,
                decompressed_bytes_max=_UNPACKED_BYTES_MAX,
                effort=Effort(_UNPACKED_BYTES_MAX, _RECORDS_MAX),
            )
        except ProtocolError:
            return  # Kafka decides
        if scan.expected_base_offset is not None:
            self._state.commands.append(OffsetIgnored(where.topic))

    def _is_due(self, topic: str) -> bool:
        read = self._read.get(topic)
        return len(self._read) < _TOPICS_MAX if read is None else read < _REQUESTS_MAX
