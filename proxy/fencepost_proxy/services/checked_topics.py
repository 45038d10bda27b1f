"""Applies what changes for checked topics: records of the state topic, new topic ids, counts to check."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import Reason
from fencepost_proxy.observability.status import ExpansionStatus
from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.services.driver import Driver
from fencepost_proxy.services.replaced_topics import ReplacedTopics
from fencepost_proxy.services.session_services import SessionServices
from fencepost_proxy.topics.abort_only import is_abort_only
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.wire.state_records import StateRecord


@dataclass(eq=False)
class CheckedTopics:
    config: ProxyConfig
    cluster: ClusterView
    driver: Driver
    services: SessionServices
    replaced_topics: ReplacedTopics
    connections: ClientConnections
    _count_checked: set[str] = field(default_factory=set, init=False)  # by what admins set, not by the file

    def known(self) -> set[str]:
        """Topics that may have append checks."""
        sequenced = (partition.topic for partition in self.driver.dispatcher.sequencers)
        return {*self.cluster.membership.view.topic_configs, *self.driver.dispatcher.barriers, *sequenced}

    def count_checked(self) -> list[str]:
        """Known topics: enabled by an admin, appended to here, or checked at some earlier time."""
        topics = {
            *self._count_checked,
            *self.driver.dispatcher.barriers,
            *self.cluster.membership.view.expansions.names,
        }
        return [topic for topic in sorted(topics) if self.cluster.policies.checks_count(topic)]

    def expansions(self) -> Sequence[ExpansionStatus]:
        return () if self.cluster.expansions is None else self.cluster.expansions.status()

    def warnings(self) -> Iterator[Reason]:
        if self.cluster.expansions is not None:
            yield from self.cluster.expansions.warnings()
        yield from self.replaced_topics.warnings()

    def state_changed(self, records: Sequence[StateRecord]) -> None:
        cluster, view = self.cluster, self.cluster.membership.view
        cluster.commits.apply_records(records)
        if all(is_abort_only(record) for record in records):
            return  # hundreds in a second, where transactions race
        topics = set(filter(None, map(_topic_of, records)))
        cluster.lookups.verify(topics, view.topic_configs)
        self.replaced_topics.state_changed(view)
        cluster.policies.state_changed()
        cluster.groups.refresh()
        self.verified()
        if cluster.expansions is not None:
            cluster.expansions.view_changed()
        now = time.monotonic()
        for topic in topics:
            self._record_count_checked(topic, now)
            self.driver.forget_topic(topic)

    def _record_count_checked(self, topic: str, now: float) -> None:
        """The topic's configs have changed. Appends sent before its checks were enabled never entered a barrier."""
        if not self.cluster.policies.checks_count(topic):
            self._count_checked.discard(topic)
        elif topic not in self._count_checked:
            self._count_checked.add(topic)
            barrier = self.driver.dispatcher.barrier(topic)
            self.driver.dispatcher.now_count_checked(topic, now)
            quiet = self.driver.dispatcher.quiet and now >= self.services.unanswered_until
            if not quiet and not self.connections.draining:
                seconds = self.config.config_lease_seconds + self.config.limits.request_timeout_seconds
                barrier.not_empty_before(now + seconds)

    def probe(self, now: float) -> None:
        """Call once a second."""
        self.cluster.commits.probe(now)
        self.services.update_relayed_versions()

    # ---- what lookups of topics show

    def verified(self) -> None:
        self.cluster.commits.refresh()
        self.services.update_relayed_versions()

    def refreshed(self, now: float) -> None:
        self.driver.perform(self.driver.dispatcher.topic_news(now), now)

    def replaced(self, topic: str) -> None:
        self.cluster.policies.forget(topic)
        self.cluster.counts.forget(topic)
        self.services.idempotence.forget_topic(topic)
        if topic in self.driver.dispatcher.barriers:
            self.driver.dispatcher.barriers[topic].forget_count()
        self.driver.forget_topic(topic)


def _topic_of(record: StateRecord) -> str | None:
    """The topic whose virtual configs a state record changes."""
    kind, _, topic = record.key.decode(errors="replace").partition("/")
    return topic if kind == "topic-config" else None
