"""Topics that were deleted and created again at Kafka, and inherit checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from uuid import UUID

from fencepost_proxy import logs
from fencepost_proxy.errors import Reason
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.services.topic_warnings import some
from fencepost_proxy.topics.state import StateView

_log = logs.get("services.replaced_topics")


class ReplacedTopics:
    """Reported when found twice: the configs of a topic created through another proxy may arrive late."""

    def __init__(self, topic_id: Callable[[str], UUID | None], metrics: Metrics) -> None:
        self._topic_id = topic_id
        self._metrics = metrics
        #: Topics that inherited checks at the last probe, and those that did at the probe before it, too.
        self._found: dict[str, UUID] = {}
        self._lasting: dict[str, UUID] = {}

    @property
    def unsettled(self) -> bool:
        """Some were found once."""
        return bool(self._found.keys() - self._lasting.keys())

    def probe(self, view: StateView) -> None:
        found = {
            topic: topic_id
            for topic in view.topic_configs
            if (topic_id := self._topic_id(topic)) is not None and view.inherits(topic, topic_id)
        }
        lasting = {topic: topic_id for topic, topic_id in found.items() if self._found.get(topic) == topic_id}
        for topic in sorted(topic for topic, topic_id in lasting.items() if self._lasting.get(topic) != topic_id):
            _log.error(
                "a checked topic was deleted and created again at Kafka: it keeps the checks of its predecessor "
                "until its configs are set through the proxy, or it is deleted through the proxy",
                topic=topic,
                topic_id=lasting[topic],
                configs=dict(view.configs_set_on(topic, lasting[topic])),
            )
        self._found = found
        self._keep_inheriting(lasting, view)

    def state_changed(self, view: StateView) -> None:
        """Those whose configs are set now inherit nothing any more."""
        self._keep_inheriting(self._lasting, view)

    def _keep_inheriting(self, topics: Mapping[str, UUID], view: StateView) -> None:
        self._lasting = {topic: each for topic, each in topics.items() if view.inherits(topic, each)}
        self._metrics.topics_replaced.value = len(self._lasting)

    def warnings(self) -> Iterator[Reason]:
        if self._lasting:
            names = some(sorted(self._lasting))
            yield Reason(
                f"Topics that were deleted and created again at Kafka keep the checks of their predecessors: {names}",
                "Decide for each: set its configs through the proxy (kafka-configs --alter, --add-config or "
                "--delete-config), or delete it through the proxy, which deletes its checks too.",
            )
