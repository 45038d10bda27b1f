"""Checked topic: a topic with at least one append check on.

Applies what changes for these: records of the state topic, new topic ids, counts to check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.errors import Reason
from fencepost_proxy.observability.status import ExpansionStatus
from fencepost_proxy.services import unknown_configs
from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.services.driver import Driver
from fencepost_proxy.services.replaced_topics import ReplacedTopics
from fencepost_proxy.services.session_services import SessionServices
from fencepost_proxy.topics.abort_only import is_abort_only
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transactions.watched import Leaders
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.wire.state_records import StateRecord

#: Topics that are listed because the file checks them: the proxy keeps their metadata.
_LISTED_MAX: Final = 500


@dataclass(eq=False)
class CheckedTopics:
    config: ProxyConfig
    cluster: ClusterView
    driver: Driver
    services: SessionServices
    replaced_topics: ReplacedTopics
    connections: ClientConnections
    _count_checked: set[str] = field(default_factory=set, init=False)  # by what admins set, not by the file
    _of_file: frozenset[str] = field(default=frozenset(), init=False)

    def known(self) -> set[str]:
        """Topics that may have append checks."""
        sequenced = (partition.topic for partition in self.driver.dispatcher.sequencers)
        configured = self.cluster.membership.view.topic_configs
        return {*configured, *self.driver.dispatcher.barriers, *sequenced, *self._of_file}

    async def found(self, leaders: Leaders) -> None:
        """Topics that the file checks are known before their first append, as far as the transaction watch sees them:
        an operator looks for them after a restart."""
        if not any(self.config.given_configs):
            return
        self._of_file = await asyncio.to_thread(_checked_by_file, self.config, leaders)
        if unseen := [topic for topic in self._of_file if self.cluster.kafka.topic(topic) is None]:
            await self.cluster.kafka.metadata.refresh_quietly(unseen)

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
        unknown_configs.log({topic: view.unknown_configs[topic] for topic in topics & view.unknown_configs.keys()})
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
            self.driver.dispatcher.past_barriers.remember(topic, now)
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


def _checked_by_file(config: ProxyConfig, leaders: Leaders) -> frozenset[str]:
    names = {partition.topic for partitions in leaders.by_node.values() for partition in partitions}
    checked = (name for name in sorted(names) if (configs := config.configs_for(name)) and TopicPolicy.of(configs).read)
    return frozenset(islice(checked, _LISTED_MAX))
