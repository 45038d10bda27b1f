"""One Produce request with checked partitions: its appends at their sequencers, and how its answer is put together.

Admitted appends are forwarded in one request, refused ones are answered by the proxy, and both results are merged into
one response. The partitions are submitted one after the other, in the order of topic and partition. Admitted appends
block other appends to their partitions until they are sent, so they do not wait long for the rest: they are sent ahead
(`Admission.send_ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import ContradictoryResults, Error
from fencepost_proxy.sequencer.appends import batch_to_send
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.batches.levels import LeveledProduce
from fencepost_proxy.session.batches.partition_counts import CountCheckedProduce
from fencepost_proxy.session.batches.reading import Readings
from fencepost_proxy.session.frames.pending_responses import Answer, PendingResponse, PipelineKey
from fencepost_proxy.session.frames.steps import Resume
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import PRODUCE
from fencepost_proxy.wire.batch import without_producer
from fencepost_proxy.wire.produce import (
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    TopicResult,
    encode_produce_response,
)

ACKS_ALL = -1


class NotFound(NamedTuple):
    """A topic, by id, that does not exist, and Kafka's error."""

    topic: TopicData
    error_code: int


NOTHING_DENIED: Final[Mapping[str, int]] = MappingProxyType({})


class Received(NamedTuple):
    """What a client sent, after it is read, and before the checks.

    `starts_at` – its first byte on the connection. `at` – when it was complete, monotonic seconds.
    `wait_seconds` – how long its appends may wait before they are sent.
    `denied` – topics that the client may not write, with Kafka's error. `readings` – the parsed batches.
    `not_found` – topics of the client's request that `ProduceExchange.request` lacks.
    """

    starts_at: int = 0
    at: float = 0.0
    wait_seconds: float = 0.0
    denied: Mapping[str, int] = NOTHING_DENIED
    readings: Readings | None = None
    not_found: tuple[NotFound, ...] = ()


NOT_READ: Final = Received()


class Results(dict[TopicPartition, PartitionResult]):
    """The results of a Produce request, one for each partition. Only its own methods write.

    Only a sequencer or Kafka can report a success, by `answer`, and only for a partition without a result. All else
    that a client gets is an error: `refuse`, or `override` in place of a result that it must not see. Two different
    results are a defect of the proxy: the client gets neither.
    """

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = setdefault = update = pop = popitem = clear = None  # type: ignore[assignment]

    def answer(self, partition: TopicPartition, result: PartitionResult) -> None:
        """The final result of its sequencer, or of Kafka if it has none.

        A retriable error stays: the append was canceled, unsent, while this result was on its way.
        """
        before = self.get(partition)
        if before is None or before.error_code != Error.NOT_LEADER_OR_FOLLOWER:
            self._write(partition, result)

    def refuse(self, partition: TopicPartition, error: PartitionResult) -> PartitionResult:
        """It is not sent, or not again."""
        assert error.error_code
        self._write(partition, error)
        return error

    def override(self, partition: TopicPartition, error: PartitionResult) -> PartitionResult:
        """Report this error, and not the result, if there is one."""
        assert error.error_code
        dict.__setitem__(self, partition, error)
        return error

    def _write(self, partition: TopicPartition, result: PartitionResult) -> None:
        if partition in self and self[partition] != result:
            codes = f"{self[partition].error_code} and {result.error_code}"
            raise ContradictoryResults(f"an append to {partition} has two results, {codes}: a defect of the proxy")
        dict.__setitem__(self, partition, result)


@dataclass(slots=True, eq=False)
class Checks:
    """What is found before the sequencers. `leveled` – its batches with idempotence levels.

    `count_checked` – its topics with partition-count checks; `refused_by_policy` – partitions refused by these.
    `misread` – pipelines of batches that could not become pending appends.
    """

    leveled: LeveledProduce | None = None
    count_checked: CountCheckedProduce | None = None
    refused_by_policy: frozenset[TopicPartition] = frozenset()
    misread: list[PipelineKey] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Submission:
    """Its appends at their sequencers, for `Admission`. Times are monotonic seconds.

    `waiting_for` – the append submitted last, None once all are decided; `submitted_at` – since when.
    `admitted` – block their partitions until they are sent or canceled; `admitted_at` – since when the first does.
    `alone` – it waits for one partition with none admitted, and submits all in order after that.
    """

    to_submit: list[PendingAppend] = field(default_factory=list)
    waiting_for: PendingAppend | None = None
    submitted_at: float = 0.0
    admitted: list[PendingAppend] = field(default_factory=list)
    admitted_at: float = 0.0
    alone: bool = False


@dataclass(slots=True, eq=False)
class Answering:
    """What its answer waits for. `resume` – continues `Completion.answer`.

    `begun` – each partition has a result, and it is being put together. `starts_queried` – for log starts.
    `stated` – topics for which Kafka has answered whether the client may write.
    `open_records` – records of failed appends of a transaction that are not stored yet; None: not determined.
    """

    begun: bool = False
    resume: Resume | None = None
    starts_queried: bool = False
    stated: frozenset[str] = frozenset()
    open_records: int | None = None
    throttle_time_ms: int = 0


@dataclass(slots=True, eq=False)
class ProduceExchange:
    """`results` fills up with the final result of each partition; `pending_appends` are the appends to checked ones.

    - `pending_response` – of its client. `answer_by` – when it must get an answer, monotonic seconds. `partitions` – of
      its request, in that order.
    - `sent` – the partitions whose batches went upstream.
    - `sequencer_seconds` – how long it has waited for sequencers and barriers so far.
    """

    request: ProduceRequest
    received: Received = NOT_READ
    answer_by: float = float("inf")
    pending_appends: dict[TopicPartition, PendingAppend] = field(default_factory=dict)
    results: Results = field(default_factory=Results)
    sent: set[TopicPartition] = field(default_factory=set)
    sequencer_seconds: float = 0.0
    checks: Checks = field(default_factory=Checks)
    submission: Submission = field(default_factory=Submission)
    answering: Answering = field(default_factory=Answering)
    pending_response: PendingResponse = field(init=False)
    partitions: list[TopicPartition] = field(init=False)

    def __post_init__(self) -> None:
        topics = self.request.topics
        self.partitions = [TopicPartition(topic.name, data.partition) for topic in topics for data in topic.partitions]
        version, correlation_id = self.request.api_version, self.request.correlation_id
        self.pending_response = PendingResponse(PRODUCE, version, correlation_id, Answer.MADE_HERE)

    @property
    def is_muted(self) -> bool:
        """It has appends to submit, and does not wait for a sequencer."""
        return bool(self.submission.to_submit) and self.submission.waiting_for is None

    @property
    def concerns_checks(self) -> bool:
        """Otherwise it is forwarded as it came."""
        return bool(
            self.pending_appends
            or self.results
            or self.checks.count_checked
            or self.checks.leveled
            or self.received.not_found
        )

    @property
    def complete(self) -> bool:
        return all(map(self.results.__contains__, self.partitions))

    @property
    def refused(self) -> bool:
        """Whether the proxy refused a part of it. A recognized retry has its result too, and that is a success."""
        return any(self.refusals())

    def refusals(self) -> Iterator[PartitionResult]:
        """Except topics that Kafka denies."""
        return (
            result
            for key, result in self.results.items()
            if result.error_code and key.topic not in self.received.denied
        )

    @property
    def silent(self) -> bool:
        """acks=0: the client reads no answer."""
        return self.request.acks == 0

    # ---- what goes upstream

    def unsent(self) -> list[TopicPartition]:
        """What can be sent now: what is admitted, and what needs no admission."""
        blocked = self.pending_appends.keys() - {pending.partition for pending in self.submission.admitted}
        done = self.results.keys() | self.sent | blocked
        return [key for key in self.partitions if key not in done]

    def upstream_acks(self, keys: Collection[TopicPartition]) -> int:
        """Of a request with these batches: all, if one may be fenced.

        With acks=1 a leader could lose a conditional append that it acknowledged, and let a second writer win the same
        offset.
        """
        acks = self.request.acks
        return ACKS_ALL if acks == 0 or not self.pending_appends.keys().isdisjoint(keys) else acks

    def upstream_topics(
        self, keys: Collection[TopicPartition], topic_id: Callable[[str], UUID | None]
    ) -> Iterator[TopicData]:
        """These batches as they are sent. `topic_id` – of topics that the client identifies by name."""
        for topic in self.request.topics:
            partitions = tuple(
                PartitionData(data.partition, self._upstream_records(key, data.records), data.tags)
                for data in topic.partitions
                if (key := TopicPartition(topic.name, data.partition)) in keys
            )
            if partitions:
                yield TopicData(topic.name, topic.topic_id or topic_id(topic.name), partitions, topic.tags)

    def _upstream_records(self, key: TopicPartition, records: memoryview | None) -> memoryview | None:
        """Fenced, or without their producer ids."""
        pending = self.pending_appends.get(key)
        if pending is not None:
            return memoryview(batch_to_send(pending))
        if records is not None and self.checks.leveled is not None and key in self.checks.leveled.without:
            return memoryview(without_producer(records))
        return records

    # ---- what comes back

    def response(self, reported: Results | None = None) -> list[bytes | memoryview]:
        """The frame. `reported` – in place of its results, some of which are unknown."""
        results = self.results if reported is None else reported
        topics = []
        for topic in self.request.topics:
            partitions = [results[TopicPartition(topic.name, data.partition)] for data in topic.partitions]
            topics.append(TopicResult(topic.name, topic.topic_id, tuple(partitions)))
        for topic, error in self.received.not_found:
            partitions = [PartitionResult(data.partition, error) for data in topic.partitions]
            topics.append(TopicResult("", topic.topic_id, tuple(partitions)))
        response = ProduceResponse(self.request.correlation_id, tuple(topics), self.answering.throttle_time_ms)
        return [encode_produce_response(response, self.request.api_version)]


def retriable(key: TopicPartition, message: str) -> PartitionResult:
    """Nothing was appended: every client sends the batch again."""
    return PartitionResult(partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message)


def refused(partition: TopicPartition, refusal: Refusal) -> PartitionResult:
    return PartitionResult(
        partition=partition.partition,
        error_code=refusal.error_code,
        base_offset=refusal.base_offset,
        log_start_offset=refusal.log_start_offset,
        error_message=refusal.message,
    )
