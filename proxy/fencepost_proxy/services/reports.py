"""What sessions and sequencers report, without waiting for a result: counted, logged, shown."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from fencepost_policies.conditional_publish import COPIED_HEADERS
from fencepost_proxy import logs
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.audit import Identity
from fencepost_proxy.observability.lists import Refusals, clipped
from fencepost_proxy.observability.slow_clients import SlowClients
from fencepost_proxy.observability.status import ShortenedLogStatus, ViolationStatus
from fencepost_proxy.sequencer.events import LostRecords, Violation
from fencepost_proxy.sequencer.in_doubt import FORGOTTEN
from fencepost_proxy.services.groups import GroupProgressTracker
from fencepost_proxy.services.log_reader import LogReader
from fencepost_proxy.services.topic_lookups import TopicLookups
from fencepost_proxy.session.batches.levels import MESSAGE_FORMAT, NOT_PERMITTED
from fencepost_proxy.session.frames import messages as sessions
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.types import Bounded, TopicPartition

_log = logs.get("services.reports")
_limited_log = logs.RateLimitedLog(_log)

#: Maximum topics for which the log explains why their batches lose their producer ids, or headers do not count.
_REPORTED_MAX = 10_000
_WHY_DOWNGRADED = {
    MESSAGE_FORMAT: "its message format is older than 0.11 and has no producer ids",
    NOT_PERMITTED: "Kafka does not permit idempotent writes to one of its clients",
}


@dataclass(eq=False)
class Reports:
    """`violations`, `shortened_logs`: how many were reported, and the last of them."""

    metrics: Metrics
    groups: GroupProgressTracker
    lookups: TopicLookups
    log_reader: LogReader
    spawn: Spawn
    refusals: Refusals = field(default_factory=Refusals, init=False)
    slow_clients: SlowClients = field(init=False)
    violations: int = field(default=0, init=False)
    last_violation: ViolationStatus | None = field(default=None, init=False)
    shortened_logs: int = field(default=0, init=False)
    last_shortened_log: ShortenedLogStatus | None = field(default=None, init=False)
    _logged_downgraded: set[tuple[str, str]] = field(default_factory=set, init=False)
    #: Topics that do not check the expected offsets that they get, and when they last got one.
    ignored_offsets: Bounded[str, float] = field(default_factory=lambda: Bounded(_REPORTED_MAX), init=False)
    _logged_copies: set[tuple[str | None, str]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.slow_clients = SlowClients(self.metrics)

    def take(self, command: sessions.Command, proxied: ProxiedConnection | None) -> bool:
        """Whether the command is a report only."""
        match command:
            case sessions.Count(what, label):
                if what == "refusal":
                    self.metrics.refusals.inc(label)
                    self.refusals.record(command, proxied)
                if label == COPIED_HEADERS:
                    self._copy_refused(command, proxied)
            case sessions.HeadersCopied(partition, copied_from, client_id):
                self._copied(partition, copied_from, client_id)
            case sessions.OffsetIgnored(topic):
                self._offset_ignored(topic)
            case sessions.Throttled(throttle_ms):
                self.slow_clients.throttled(proxied, throttle_ms)
            case sessions.LateAppends(partition, seconds):
                self.slow_clients.late(proxied, partition, seconds)
            case sessions.Downgraded(topic, why, batches):
                self._downgraded(topic, why, batches)
            case sessions.Noticed(notice):
                self.groups.notice(notice, "" if proxied is None else proxied.peer.host)
            case sessions.TopicStale(topic):
                self.lookups.refresh(topic)
            case sessions.LoginFailed(mechanism, principal, reason) if proxied is not None:
                self.metrics.client_logins_failed.inc()
                _limited_log.warning(
                    ("login", proxied.peer.host),
                    "login failed",
                    peer=proxied.peer,
                    mechanism=mechanism,
                    principal=principal or "unknown",
                    reason=reason,
                )
            case sessions.CloseClient() if proxied is not None:
                self._closing(proxied, command)
                return False
            case _:
                return False
        return True

    def _copied(self, partition: TopicPartition, copied_from: str, client_id: str | None) -> None:
        """Counts every time, logs once per client id and topic."""
        self.metrics.copied_headers.inc()
        key = (client_id, partition.topic)
        if key not in self._logged_copies and len(self._logged_copies) < _REPORTED_MAX:
            self._logged_copies.add(key)
            _limited_log.warning(
                ("copied headers", partition.topic),
                "headers of another record ignored: a client copies record headers (let it leave out those whose names "
                "begin with fencepost-)",
                client_id=client_id or "unknown",
                partition=partition,
                made_for=copied_from,
            )

    def _offset_ignored(self, topic: str) -> None:
        """Counts every time, logs once per topic."""
        self.metrics.ignored_offsets.inc()
        if topic not in self.ignored_offsets:
            _limited_log.warning(
                ("ignored offset", topic),
                "topic gets expected offsets, but does not check them (set fencepost.check.expected.offsets)",
                topic=topic,
            )
        self.ignored_offsets[topic] = time.monotonic()

    def _downgraded(self, topic: str, why: str, batches: int) -> None:
        """Counts every time, logs once."""
        self.metrics.downgrades.inc(why, batches)
        if (topic, why) not in self._logged_downgraded and len(self._logged_downgraded) < _REPORTED_MAX:
            self._logged_downgraded.add((topic, why))
            _log.warning("idempotence dropped for a topic with level `safe`", topic=topic, why=_WHY_DOWNGRADED[why])

    def _closing(self, proxied: ProxiedConnection, command: sessions.CloseClient) -> None:
        if command.fault is None:
            self.metrics.connections_closed.inc("stale_partition_count" if command.hang_up else "upstream_closed")
            return
        self.metrics.connections_closed.inc(command.fault.__name__)
        _limited_log.warning(_kind(command), "connection closed", peer=proxied.peer, reason=command.reason)

    @staticmethod
    def _copy_refused(refused: sessions.Count, proxied: ProxiedConnection | None) -> None:
        identity = Identity.of(proxied)
        _limited_log.warning(
            ("copy refused", refused.partition, identity.client_id),
            "append refused: copied headers (leave the fencepost headers out of a record that is written again)",
            partition=refused.partition,
            client_id=clipped(identity.client_id),
            client=identity.peer,
            expected=refused.expected,
            log_end=refused.actual,
        )

    def finding(self, finding: Violation | LostRecords) -> None:
        """Of a sequencer, in the log."""
        if isinstance(finding, Violation):
            self._violation(finding)
        else:
            self._lost_records(finding)

    def _lost_records(self, lost: LostRecords) -> None:
        self.shortened_logs += 1
        self.last_shortened_log = ShortenedLogStatus(
            *lost.partition, lost.acknowledged_end, lost.offset, round(time.time() * 1000)
        )
        self.metrics.shortened_logs.inc()
        _log.error(
            "Kafka lost acknowledged records",
            partition=lost.partition,
            first_lost=lost.offset,
            acknowledged_to=lost.acknowledged_end - 1,
            log_end="other records are there" if lost.log_end_offset is None else lost.log_end_offset,
        )

    def _violation(self, violation: Violation) -> None:
        """An append at another offset than expected, or of a writer that bypasses the proxy."""
        self.violations += 1
        self.last_violation = ViolationStatus(*violation.partition, violation.offset, round(time.time() * 1000))
        self.metrics.violations.inc()
        self.spawn(self._write(violation), "violation")

    async def _write(self, violation: Violation) -> None:
        producer_id = violation.producer_id
        if producer_id is None:
            producer_id = await self.log_reader.producer_at(violation.partition, violation.offset)
        _log.error(
            "OFFSET_VIOLATION",
            reason=FORGOTTEN if violation.forgotten else "a producer bypasses the proxy",
            partition=violation.partition,
            offset=violation.offset,
            producer_id="unknown" if producer_id is None else producer_id,
            appended_at=violation.appended_at,
            log_end=violation.log_end_offset,
        )


def _kind(close: sessions.CloseClient) -> object:
    """Rate-limits similar closings together: by the start of the reason, without its numbers."""
    return close.fault, re.sub(r"-?\d+", "", close.reason)[:20]
