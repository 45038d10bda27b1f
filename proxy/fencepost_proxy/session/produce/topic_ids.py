"""Topics that a client identifies by id (Produce v13, KIP-516).

Checks belong to topic names. A topic never changes its name, so a name that Kafka has given for an id stays valid. An
unknown id is looked up on the client's own connection, with the client's permissions, before anything else is decided.
`Services.topic_names` has the names that were looked up, by id, `Services.unknown_topic_ids` when Kafka did not know
an id. Both are bounded.

UNKNOWN_TOPIC_ID (100), as from Kafka, is the answer for

- an id that Kafka does not know: sent on, it might reach a topic that is checked and just being created;
- an id of a checked topic that is not the one known here. Either the topic was deleted and created again, or metadata
  here is older than the client's. The client retries after it has refreshed its metadata.

Batches that the client sent after such a batch, without knowledge of its failure, fail too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final
from uuid import UUID

from fencepost_proxy.errors import Error
from fencepost_proxy.session.batches.partition_counts import pipeline_of
from fencepost_proxy.session.batches.produce_exchange import NotFound, ProduceExchange
from fencepost_proxy.session.connection.failed_pipelines import FailedPipelines
from fencepost_proxy.session.connection.proofs import Proofs
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.messages import Count, TopicStale
from fencepost_proxy.session.frames.pending_responses import PipelineKey
from fencepost_proxy.session.frames.services import Topics
from fencepost_proxy.session.frames.steps import Steps
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionData, PartitionResult, ProduceRequest, TopicData

#: Ids without a name, and Kafka's errors.
Nameless = Mapping[UUID, int]
#: Ids in one Metadata request. Kafka 4.4 takes 5 ms for 100 unknown ones, and 650 ms for 1,000.
IDS_AT_ONCE: Final = 50
#: An id that Kafka did not know is not looked up again for so long, for any client: shorter than a client's refresh of
#: its metadata and retry.
UNKNOWN_SECONDS: Final = 0.25
NONE_NAMELESS: Final[Nameless] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class TopicIds:
    _state: ConnectionState
    _pipelines: FailedPipelines
    _proofs: Proofs
    _topics: Topics

    def unknown(self, request: ProduceRequest, nameless: Nameless, ids: Iterable[UUID] = ()) -> list[UUID]:
        """The ids that are not known here, and were not looked up. `ids` – those of the request."""
        names = self._topics.topic_names
        ids = ids or [topic.topic_id for topic in request.topics if topic.topic_id is not None]
        return list(dict.fromkeys(each for each in ids if each not in names and each not in nameless))

    def look_up(self, request: ProduceRequest, nameless: Nameless, unknown: Sequence[UUID]) -> Steps[Nameless]:
        """`nameless` with those of `unknown` for which Kafka has no name."""
        names, recent = self._topics.topic_names, self._topics.unknown_topic_ids
        as_of = self._state.now - UNKNOWN_SECONDS
        errors = {**nameless, **dict.fromkeys(unknown, int(Error.UNKNOWN_TOPIC_ID))}
        left = [each for each in unknown if recent.get(each, as_of) <= as_of]
        for first in range(0, len(left), IDS_AT_ONCE):
            part = left[first : first + IDS_AT_ONCE]
            response = yield from self._proofs.look_up(part, request.correlation_id, request.client_id)
            for topic in response.topics:
                if topic.name:
                    names[topic.topic_id] = topic.name
                elif topic.error_code == Error.TOPIC_AUTHORIZATION_FAILED:
                    errors[topic.topic_id] = topic.error_code
                else:
                    recent[topic.topic_id] = self._state.now
        return errors

    def named(
        self, request: ProduceRequest, nameless: Nameless, starts_at: int
    ) -> tuple[ProduceRequest, tuple[NotFound, ...]]:
        """The request with the names of its topics, but for those that it can be answered for at once."""
        topics, not_found = [], []
        for topic in request.topics:
            assert topic.topic_id is not None
            name = self._topics.topic_names.get(topic.topic_id)
            if name is None:
                not_found.append(NotFound(topic, nameless[topic.topic_id]))
            elif self._is_replaced(name, topic.topic_id) or self._follows_not_found(topic, starts_at):
                not_found.append(NotFound(topic, Error.UNKNOWN_TOPIC_ID))
            else:
                topics.append(replace(topic, name=name))
        return replace(request, topics=tuple(topics)), tuple(not_found)

    def fail(self, produce: ProduceExchange) -> None:
        for topic, error in produce.received.not_found:
            for data in topic.partitions:
                self._pipelines.fail(produce, _key(topic, data), PartitionResult(data.partition, error))
            self._state.commands.append(Count("refusal", "unknown_partition"))

    def _is_replaced(self, name: str, topic_id: UUID) -> bool:
        if self._topics.policy(name) is None or self._topics.topic_id(name) in (None, topic_id):
            return False
        self._state.commands.append(TopicStale(name))
        return True

    def _follows_not_found(self, topic: TopicData, starts_at: int) -> bool:
        return bool(self._pipelines.failed) and any(
            self._pipelines.before(_key(topic, data), starts_at) is not None for data in topic.partitions
        )


def _key(topic: TopicData, data: PartitionData) -> PipelineKey:
    """No topic has such a name."""
    return TopicPartition(f"id {topic.topic_id}", data.partition), pipeline_of(data)
