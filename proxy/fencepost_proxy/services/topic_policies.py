"""Policies of topics: by the configuration file and by what admins set in the state topic."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from fencepost_policies.partition_count import CHECK_PARTITION_COUNT
from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.native_view import RememberedMap
from fencepost_proxy.services.membership import Membership
from fencepost_proxy.topics.virtual_configs import ORDERED_PARTITION_EXPANSION, TopicPolicy, is_safe

#: Names come from clients, authorized or not.
_POLICIES_MAX = 100_000
#: Without both, a topic has no partition-count checks, unless an expansion is pending.
_COUNTING = frozenset({CHECK_PARTITION_COUNT.name, ORDERED_PARTITION_EXPANSION.name})


class TopicPolicies:
    def __init__(self, config: ProxyConfig, membership: Membership, topic_id: Callable[[str], UUID | None]) -> None:
        self._config = config
        self._membership = membership
        self._topic_id = topic_id
        self._policies = RememberedMap[str, TopicPolicy | None]()
        self._known = self._policies.view
        self._safe_by_file = any(is_safe(configs) for configs in config.given_configs)
        self._safe = self._safe_by_file
        self._counts_by_file = any(TopicPolicy.of(configs).checks_count for configs in config.given_configs)
        self._may_check_counts: frozenset[bytes] | None = None

    def policy(self, topic: str) -> TopicPolicy | None:
        """None for a topic without append checks and partition-count checks."""
        try:
            return self._known[topic]
        except KeyError:
            pass
        policy = self._membership.view.topic_policy(topic, self._topic_id(topic), self._config.configs_for)
        if len(self._known) > _POLICIES_MAX:
            self._policies.clear()
        found = policy if policy.read else None
        self._policies.add(topic, found)
        return found

    def checks_count(self, topic: str) -> bool:
        policy = self.policy(topic)
        return policy is not None and policy.checks_count

    def may_check_counts(self) -> frozenset[bytes] | None:
        """Names of all topics that may have partition-count checks; None: by the configuration file, any may."""
        if self._may_check_counts is None and not self._counts_by_file:
            view = self._membership.view
            set_on_topics = {
                topic for topic, each in view.topic_configs.items() if not _COUNTING.isdisjoint(each.configs)
            }
            names = {*set_on_topics, *view.expansions.names, *(each.topic for each in view.expansions.pending)}
            self._may_check_counts = frozenset(map(str.encode, names))
        return self._may_check_counts

    def some_are_safe(self) -> bool:
        """Whether a topic has fencepost.idempotence.level=safe: it accepts clients that may not write idempotently."""
        return self._safe

    def forget(self, topic: str) -> None:
        self._policies.discard(topic)

    def state_changed(self) -> None:
        self._policies.clear()
        self._may_check_counts = None
        set_on_topics = self._membership.view.topic_configs.values()
        self._safe = self._safe_by_file or any(is_safe(each.configs) for each in set_on_topics)
