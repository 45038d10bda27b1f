"""Topics with ordered partition expansion, by the state topic and metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from uuid import UUID

from fencepost_proxy.expansion.gating import brought_by
from fencepost_proxy.expansion.history import NO_EXPANSIONS, ExpansionHistory
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition


class ExpandedTopics:
    """`policy`: of a topic, None without checks. `topic_id`: by metadata, None if unknown.

    `view`: of the state topic; empty until it is loaded.
    """

    def __init__(
        self,
        policy: Callable[[str], TopicPolicy | None],
        topic_id: Callable[[str], UUID | None],
        view: Callable[[], StateView],
    ) -> None:
        self._policy = policy
        self.topic_id = topic_id
        self._view = view
        self._ids: dict[str, UUID] = {}
        self._names: dict[UUID, str] = {}

    @property
    def view(self) -> StateView:
        return self._view()

    def refresh(self) -> bool:
        """Update from the view after a change. Returns whether a topic is or was expanded."""
        view = self.view
        ids = {topic: configs.topic_id for topic, configs in view.topic_configs.items()}
        ids.update((each.topic, each.topic_id) for each in (*view.expansions.expanded, *view.expansions.pending))
        # A record may be from a deleted topic: metadata takes precedence.
        self._ids = {topic: self.topic_id(topic) or topic_id for topic, topic_id in ids.items() if self.expands(topic)}
        self._names = {topic_id: topic for topic, topic_id in self._ids.items()}
        return any(each.topic in self._ids for each in (*view.expansions.expanded, *view.expansions.pending))

    def expands(self, topic: str) -> bool:
        policy = self._policy(topic)
        return policy is not None and policy.ordered

    def new(self, partition: TopicPartition) -> bool:
        return brought_by(self.history(partition.topic), partition.partition) is not None

    def topic(self, topic_id: UUID) -> str | None:
        return self._names.get(topic_id)

    def topic_ids(self) -> Mapping[str, UUID]:
        return self._ids

    def history(self, topic: str) -> ExpansionHistory:
        return self.view.history(topic, self.topic_id(topic)) if self.expands(topic) else NO_EXPANSIONS
