"""Policies of topics: by the configuration file and by what admins set in the state topic."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from fencepost_proxy.config import ProxyConfig
from fencepost_proxy.executor import changed
from fencepost_proxy.services.membership import Membership
from fencepost_proxy.topics.virtual_configs import TopicPolicy, is_safe

#: Names come from clients, authorized or not.
_POLICIES_MAX = 100_000


class TopicPolicies:
    def __init__(self, config: ProxyConfig, membership: Membership, topic_id: Callable[[str], UUID | None]) -> None:
        self._config = config
        self._membership = membership
        self._topic_id = topic_id
        self._policies: dict[str, TopicPolicy | None] = {}
        self._safe_by_file = any(is_safe(configs) for configs in config.given_configs)
        self._safe = self._safe_by_file

    def policy(self, topic: str) -> TopicPolicy | None:
        """None for a topic without append checks and partition-count checks."""
        try:
            return self._policies[topic]
        except KeyError:
            pass
        policy = self._membership.view.topic_policy(topic, self._topic_id(topic), self._config.configs_for)
        if len(self._policies) > _POLICIES_MAX:
            self._policies.clear()
            changed()
        found = self._policies[topic] = policy if policy.read else None
        return found

    def checks_count(self, topic: str) -> bool:
        policy = self.policy(topic)
        return policy is not None and policy.checks_count

    def some_are_safe(self) -> bool:
        """Whether a topic has fencepost.idempotence.level=safe: it accepts clients that may not write idempotently."""
        return self._safe

    def forget(self, topic: str) -> None:
        self._policies.pop(topic, None)
        changed()

    def state_changed(self) -> None:
        self._policies.clear()
        set_on_topics = self._membership.view.topic_configs.values()
        self._safe = self._safe_by_file or any(is_safe(each.configs) for each in set_on_topics)
