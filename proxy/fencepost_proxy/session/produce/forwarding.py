"""Sends Produce requests with checked appends upstream, in parts: by topic id, and by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from fencepost_proxy.errors import UpstreamProtocolError
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.response_queue import ResponseQueue
from fencepost_proxy.session.frames.pending_responses import PendingResponse, inner_response
from fencepost_proxy.session.frames.services import Topics
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.produce import (
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    encode_produce_request,
)

#: Identifies topics by id: a fenced append cannot reach a topic that was deleted and recreated.
PRODUCE_BY_ID = 13
#: Gets the results by partition.
Answered = Callable[[ProduceExchange, Mapping[TopicPartition, PartitionResult]], None]


@dataclass(slots=True, eq=False)
class Forwarding:
    """`answered` gets the results of each part that was sent: set by `Completion`."""

    _queue: ResponseQueue
    _topics: Topics
    answered: Answered = field(init=False)

    def forward(
        self, produce: ProduceExchange, keys: Collection[TopicPartition], *, between_frames: bool = False
    ) -> None:
        """Send these batches upstream: one request by id, and one by name for topics without checks whose ids are
        unknown here. `between_frames`: after the client's frame that is being streamed."""
        topic_id = self._topics.topic_id if self._sent_by_id(produce.request) else _no_id
        by_id: list[TopicData] = []
        by_name: list[TopicData] = []
        for topic in produce.upstream_topics({*keys}, topic_id):
            (by_name if topic.topic_id is None else by_id).append(topic)
        acks = produce.upstream_acks(keys)
        for version, topics in ((PRODUCE_BY_ID, by_id), (produce.request.api_version, by_name)):
            if topics:
                self._send(produce, produce.request.part(version, acks, topics), between_frames)

    def _send(self, produce: ProduceExchange, request: ProduceRequest, between_frames: bool) -> None:
        if produce.checks.count_checked is not None:
            produce.checks.count_checked.was_sent()
        names: dict[UUID | None, str] = {}
        queried = set()
        for topic in request.topics:
            names[topic.topic_id] = topic.name
            for data in topic.partitions:
                key = TopicPartition(topic.name, data.partition)
                queried.add(key)
                pending = produce.pending_appends.get(key)
                if pending is not None:
                    pending.sending.topic_id = topic.topic_id
        response, frame = (
            self.response_of(produce, request.api_version, names, queried),
            encode_produce_request(request),
        )
        if between_frames:
            self._queue.send_between_frames(response, frame)
        else:
            self._queue.send(response, *frame)

    def response_of(
        self, produce: ProduceExchange, version: int, names: dict[UUID | None, str], queried: set[TopicPartition]
    ) -> PendingResponse:
        """For a part sent upstream, with the names of topics identified by id, and its partitions."""

        def on_response(response: ProduceResponse) -> None:
            answers = {
                TopicPartition(topic.name or names.get(topic.topic_id, ""), result.partition): result
                for topic in response.topics
                for result in topic.partitions
            }
            if answers.keys() != queried:
                raise UpstreamProtocolError(f"the broker answered for {sorted(answers)} instead of {sorted(queried)}")
            answering = produce.answering
            answering.throttle_time_ms = max(answering.throttle_time_ms, response.throttle_time_ms)
            self.answered(produce, answers)

        return inner_response(PRODUCE, version, produce.request.correlation_id, on_response)

    def _sent_by_id(self, request: ProduceRequest) -> bool:
        """By id if the brokers can: a topic that was deleted and recreated is another topic.

        Not for transactions: versions from 12 on mean transactions v2, which the client must choose.
        """
        return request.transactional_id is None and self._topics.produce_version_max() >= PRODUCE_BY_ID

    def without_id(self, produce: ProduceExchange, admitted: Sequence[PendingAppend]) -> list[PendingAppend]:
        """Admitted appends that must be sent by id, and whose topic has no known id, or another one than the client
        says: it was deleted, or not looked up yet.

        Those without expected offset that keep their producer id may be sent by name, as without the proxy.
        """
        request = produce.request
        if request.api_version < PRODUCE_BY_ID and not self._sent_by_id(request):
            return []
        stated = {topic.name: topic.topic_id for topic in request.topics}
        found = []
        for pending in admitted:
            if pending.placement.fence is not None or pending.append.expected_base_offset is not None:
                topic = pending.partition.topic
                known = self._topics.topic_id(topic)
                if known is None or stated[topic] not in (None, known):
                    found.append(pending)
        return found


def _no_id(topic: str) -> None:
    """It is sent by name."""
