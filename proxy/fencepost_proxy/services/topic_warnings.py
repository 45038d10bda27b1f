"""Warnings about checked topics: what Kafka itself may lose, and what several proxies cannot prevent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from fencepost_policies.append import Check
from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.configs import Configs
from fencepost_proxy.cluster.tasks import Spawn
from fencepost_proxy.topics.virtual_configs import TopicPolicy, durability_warnings

_log = logs.get("services.topic_warnings")

#: Maximum topic names in one text; it gives the number of the others.
_NAMED_MAX = 5


class TopicWarnings:
    """Warns once per topic. `shared_ports`: whether other proxies get appends of the same clients (`reuse_port`)."""

    def __init__(
        self,
        kafka: KafkaClient,
        policy: Callable[[str], TopicPolicy | None],
        spawn: Spawn,
        *,
        shared_ports: bool,
    ) -> None:
        self._kafka = kafka
        self._policy = policy
        self._spawn = spawn
        self._shared_ports = shared_ports
        self._warned: set[str] = set()
        self._only_detected: set[str] = set()

    def check(self, topics: Iterable[str]) -> None:
        topics = set(topics)
        if self._shared_ports:
            self._warn_of_shared_ports(topics)
        if new := sorted(topics - self._warned):
            self._warned.update(new)
            self._spawn(self._warn(new), "durability check")

    def changed(self, topic: str) -> None:
        """Warn again."""
        self._warned.discard(topic)

    def keep(self, topics: Iterable[str]) -> None:
        """Forget all others."""
        self._warned.intersection_update(topics)
        self._only_detected.intersection_update(topics)

    def _warn_of_shared_ports(self, topics: Set[str]) -> None:
        found = {topic for topic in topics if (policy := self._policy(topic)) is not None and policy.check is Check.ON}
        if new := sorted(found - self._only_detected):
            _log.warning(
                "wrong offsets are detected, not prevented, on topics with fencepost.check.expected.offsets=true: "
                "several proxies share the ports (set required, or use one proxy without reuse_port for these topics)",
                topics=len(new),
                names=some(new),
            )
        self._only_detected = (self._only_detected - topics) | found

    async def _warn(self, topics: Sequence[str]) -> None:
        """Logs one line for all topics: a pattern may match thousands."""
        checked = [topic for topic in topics if (policy := self._policy(topic)) is not None and policy.is_checked]
        try:
            facts = await Configs(self._kafka).facts_of_topics(checked)
        except UpstreamUnavailable:
            self._warned.difference_update(topics)  # the next round retries
            return
        found: dict[tuple[str, str], list[str]] = {}
        for topic in facts:
            if (info := self._kafka.topic(topic)) is None:
                continue
            for warning in durability_warnings(
                replication_factor=info.replication_factor,
                min_insync_replicas=facts[topic].min_insync_replicas,
                unclean_leader_election=facts[topic].unclean_leader_election,
            ):
                found.setdefault(warning, []).append(topic)
        if found:
            _log.warning(
                "Kafka itself may lose appends of checked topics",
                topics=len({name for names in found.values() for name in names}),
                reason="; ".join(f"{state} ({todo}): {some(names)}" for (state, todo), names in found.items()),
            )


def some(names: Sequence[str]) -> str:
    """At most five of them, and the number of the others."""
    return ", ".join(names[:_NAMED_MAX]) + (f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else "")
