"""Periodic work of a process that has joined the others: stalled clients, checked topics, settings of Kafka."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.configs import Configs
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.errors import FencepostError
from fencepost_proxy.services.checked_topics import CheckedTopics
from fencepost_proxy.services.cluster_view import ClusterView
from fencepost_proxy.services.driver import Driver
from fencepost_proxy.services.homes import Homes
from fencepost_proxy.services.log_reader import FACTS_SECONDS
from fencepost_proxy.services.replaced_topics import ReplacedTopics
from fencepost_proxy.services.topic_warnings import TopicWarnings
from fencepost_proxy.session.frames import messages
from fencepost_proxy.transport.client_connections import ClientConnections
from fencepost_proxy.transport.stalled import StalledConnections

_log = logs.get("services.housekeeping")
_limited_log = logs.RateLimitedLog(_log)

_HOUSEKEEPING_SECONDS = 1.0


@dataclass(eq=False)
class Housekeeping:
    """`lease_seconds`: pause between two probes of topics that were found once to inherit checks."""

    cluster: ClusterView
    driver: Driver
    topics: CheckedTopics
    replaced: ReplacedTopics
    warnings: TopicWarnings
    connections: ClientConnections
    stalled: StalledConnections
    homes: Homes | None
    spawn: Spawn
    lease_seconds: float

    async def run(self) -> None:
        """Closes stalled clients every second, and checks the checked topics less often."""
        expansions, probed_at = self.cluster.expansions, time.monotonic()
        assert expansions is not None
        while True:
            await asyncio.sleep(_HOUSEKEEPING_SECONDS)
            now = time.monotonic()
            self.stalled.close(list(self.connections.by_number.values()), now)
            self._end_moved(now)
            self.topics.probe(time.monotonic())
            logs.report_suppressed()
            if self.cluster.membership.joined.heartbeats.instance_id_expires:
                self.spawn(self._renew_instance_id(), "renew the instance id")
            expansions.maintain(self.topics.count_checked())
            seconds = min(FACTS_SECONDS, self.lease_seconds) if self.replaced.unsettled else FACTS_SECONDS
            if time.monotonic() - probed_at >= seconds:
                probed_at = time.monotonic()
                await self.maintain_topics()

    def _end_moved(self, now: float) -> None:
        """Ends connections to brokers whose home is another process, between two requests."""
        if self.homes is None:
            return
        for each, until in self.homes.moved(self.connections.by_number.values(), now):
            moved = messages.Drain(until, "clients reach this broker through another process now")
            self.driver.session_event(each.connection, moved)

    async def _renew_instance_id(self) -> None:
        try:
            await self.cluster.membership.joined.heartbeats.enter()
        except FencepostError as error:
            _limited_log.warning("instance id", "instance id could not be renewed", reason=error)

    async def maintain_topics(self) -> None:
        """Refreshes checked topics' ids (a name may refer to a new topic) and the configs that sequencers depend on."""
        await self.cluster.rights.look_up_again()
        view, topic_id = self.cluster.membership.joined.view, self.cluster.topic_id
        sequenced = {partition.topic for partition in self.driver.dispatcher.sequencers}
        barriers = {topic for topic in self.driver.dispatcher.barriers if topic_id(topic) is not None}
        topics = sorted({*view.topic_configs, *sequenced, *barriers, *view.expansions.names})
        if not topics:
            return
        before = {topic: topic_id(topic) for topic in topics}
        self.warnings.keep(topics)
        try:
            await self.cluster.kafka.refresh_metadata(topics)
            self.warnings.check(topic for topic in topics if topic_id(topic) is not None)
            for topic in topics:
                if topic_id(topic) != before[topic]:
                    self.topics.replaced(topic)
            if denied := [topic for topic in topics if self.cluster.lookups.denied(topic)]:
                await self.cluster.rights.look_up(denied)
            self.replaced.probe(view)
            there = sorted(topic for topic in sequenced if topic_id(topic) is not None)
            known = {topic for topic in there if self.cluster.log_reader.known_facts(topic) is not None}
            for topic in await self.cluster.log_reader.changed_facts(there):
                if topic in known:
                    _log.info("Kafka's configs of a checked topic have changed", topic=topic)
                    self.warnings.changed(topic)
                self.driver.forget_topic(topic, same_log=True)
        except UpstreamUnavailable as error:
            _limited_log.warning("topics", "checked topics could not be looked up", reason=error)

    # ---- settings of brokers that Kafka's sequence comparison depends on

    async def read_broker_settings(self) -> None:
        requested_at = time.monotonic()
        facts = await Configs(self.cluster.kafka).broker_facts(timeout_seconds=FACTS_SECONDS)
        if self.cluster.log_reader.expiration.observe(facts, requested_at):
            for topic in {partition.topic for partition in self.driver.dispatcher.sequencers}:
                self.driver.forget_topic(topic, same_log=True)

    async def watch_broker_settings(self) -> None:
        """They may change while brokers run."""
        expiration = self.cluster.log_reader.expiration
        while True:
            await asyncio.sleep(FACTS_SECONDS)
            before = expiration.milliseconds
            try:
                await self.read_broker_settings()
                if expiration.milliseconds != before:
                    milliseconds = expiration.milliseconds
                    _log.warning("producer.id.expiration.ms has changed", was=before, milliseconds=milliseconds)
                await self.cluster.membership.joined.settings.read_again()
            except UpstreamUnavailable as error:
                _limited_log.warning("broker settings", "the brokers' settings could not be read again", reason=error)
