"""Idempotence levels in a Produce request (KAFKA-5793, KAFKA-5794): parse them, and apply them to its batches.

`LeveledProduce` accompanies the request's `ProduceExchange` (`produce_exchange.py`), as `CountCheckedProduce` does. It
records for each batch whether it may be appended, and whether it may be sent without its producer id if Kafka accepts
none.

A batch of a `safe` topic is forwarded unchanged. If Kafka answers 43 (UNSUPPORTED_FOR_MESSAGE_FORMAT), nothing was
appended; the proxy resends the batch without its producer id, and the client gets Kafka's answer to that. For some time
after that, the proxy sends the topic's batches without producer ids at once.

Order on a connection
---------------------
1. A and B are sent with their ids. Kafka refuses A.
2. C arrives. Sent without its id at once, C would be appended before B, whose refusal is still on its way.

So a batch without its id waits until no batch of its partition is upstream with an id. Resent batches keep their order,
because their refusals arrive in it.

Kafka compares no sequences of batches without producer ids:

1. The proxy refuses A with a retriable error.
2. B was sent after A. It would be appended before A's retry.

So the proxy refuses B too, as on checked topics. It cannot do so for batches that Kafka itself refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from fencepost_policies.append import INVALID_RECORD, Append, Refusal
from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM, Level, check_level
from fencepost_proxy.errors import ClientProtocolError
from fencepost_proxy.session.frames.messages import Downgraded
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import BatchHeader, require_single_batch, verify_crc, without_producer
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.primitives import join_tags, split_tags
from fencepost_proxy.wire.produce import LEVEL_TAG, PartitionData, ProduceRequest

#: Why a batch is sent without its producer id, for the metrics and the log.
MESSAGE_FORMAT: Final = "message_format"
NOT_PERMITTED: Final = "not_permitted"


@dataclass(slots=True, eq=False)
class LeveledProduce:
    """`deadline` – when a batch that waits to be sent without its id gets a retriable error, monotonic seconds.

    - `refused` – batches not sent. `safe` – may be resent without their producer ids. `without` – are sent so.
    - `stripped` – lost their made-up ids before the checks.
    - `with_id` – batches under their producers' own ids: id, epoch and sequence, and how many records.
    - `producers` – the original ids of batches that are or may be sent without.
    - `tries_again` – those of them that the proxy refuses with a retriable error.
    - `waits` – it waits for batches upstream before it is sent without ids.
    """

    deadline: float
    refused: dict[TopicPartition, Refusal] = field(default_factory=dict)
    safe: set[TopicPartition] = field(default_factory=set)
    without: set[TopicPartition] = field(default_factory=set)
    stripped: list[TopicPartition] = field(default_factory=list)
    with_id: dict[TopicPartition, tuple[tuple[int, int, int], int]] = field(default_factory=dict)
    producers: dict[TopicPartition, int] = field(default_factory=dict)
    tries_again: set[TopicPartition] = field(default_factory=set)
    waits: bool = False

    def drops_id(self, memory: IdempotenceMemory, now: float) -> list[TopicPartition]:
        """Its batches that Kafka would not accept with their ids."""
        return sorted(key for key in self.safe if memory.drops_id(key.topic, now))

    def give_up_id(self, key: TopicPartition) -> None:
        self.safe.discard(key)
        self.with_id.pop(key, None)
        self.without.add(key)


def leveled_produce(
    request: ProduceRequest, policy: Callable[[str], TopicPolicy | None], deadline: float
) -> tuple[ProduceRequest, LeveledProduce | None]:
    """The request to send upstream, and its part that levels apply to.

    Raises ClientProtocolError if it names a partition twice.
    """
    stated: Level | None = None
    unreadable = None
    if request.header_tags:
        stated, unreadable, tags = _stated(request.header_tags)
        if tags != request.header_tags:
            request = replace(request, header_tags=tags)
    policies = [policy(topic.name) for topic in request.topics]
    if stated is None and unreadable is None and not any(map(_concerns, policies)):
        return request, None
    leveled = LeveledProduce(deadline)
    observed: set[TopicPartition] = set()
    topics = []
    for topic, each in zip(request.topics, policies, strict=True):
        level = max(stated or Level.OFF, Level.OFF if each is None else each.idempotence)
        if level is Level.OFF and unreadable is None and (each is None or each.is_checked):
            topics.append(topic)  # pending appends check those of checked topics
            continue
        partitions = []
        for data in topic.partitions:
            key, taken = TopicPartition(topic.name, data.partition), data
            if key in observed:
                raise ClientProtocolError(f"a Produce request names {key} twice")
            observed.add(key)
            if unreadable is not None:
                message = f"IDEMPOTENCE_LEVEL_UNREADABLE topic={key.topic} partition={key.partition}: {unreadable}"
                leveled.refused[key] = Refusal(INVALID_RECORD, "idempotence_level_unreadable", message)
            else:
                taken = _take(leveled, key, data, level, is_checked=each is not None and each.is_checked)
            partitions.append(taken)
        topics.append(replace(topic, partitions=tuple(partitions)) if leveled.stripped else topic)
    return (replace(request, topics=tuple(topics)) if leveled.stripped else request), leveled


def _concerns(policy: TopicPolicy | None) -> bool:
    return policy is not None and (policy.idempotence is not Level.OFF or policy.checks_count)


def _take(
    leveled: LeveledProduce, key: TopicPartition, data: PartitionData, level: Level, *, is_checked: bool
) -> PartitionData:
    """Record the batch in `leveled`, and return the data to send."""
    header = _header(data)
    if header is None:
        if level is Level.REQUIRED:
            message = f"MALFORMED topic={key.topic} partition={key.partition}: this is not one record batch"
            leveled.refused[key] = Refusal(INVALID_RECORD, "malformed", message)
        return data  # else Kafka decides
    producer_id = header.producer_id
    append = Append(*key, header.record_count, None, producer_id=producer_id)
    refusal = check_level(append, level)
    if refusal is not None:
        leveled.refused[key] = refusal
        return data
    if producer_id < 0:
        return data
    leveled.with_id[key] = (producer_id, header.producer_epoch, header.base_sequence), header.record_count
    if level is not Level.SAFE or header.is_transactional or data.records is None or not verify_crc(data.records):
        return data  # a new CRC would hide damage
    leveled.producers[key] = producer_id
    if producer_id >= MADE_UP_IDS_FROM:
        del leveled.with_id[key]
        leveled.stripped.append(key)
        return replace(data, records=memoryview(without_producer(data.records)))
    if not is_checked:
        leveled.safe.add(key)
    return data


def _header(data: PartitionData) -> BatchHeader | None:
    try:
        return None if data.records is None else require_single_batch(data.records)
    except MalformedBatch:
        return None


def _stated(section: bytes) -> tuple[Level | None, str | None, bytes]:
    """The level in the tagged field, or why it is unreadable; and the other tagged fields."""
    fields = split_tags(section)
    ours = [contents for field_tag, contents in fields if field_tag == LEVEL_TAG]
    if not ours:
        return None, None, section
    others = join_tags([(field_tag, contents) for field_tag, contents in fields if field_tag != LEVEL_TAG])
    if len(ours) > 1:
        return None, f"tagged field {LEVEL_TAG} occurs {len(ours)} times", others
    if len(ours[0]) != 1 or ours[0][0] > max(Level):
        return None, f"tagged field {LEVEL_TAG} is an int8 from 0 (off) to {max(Level):d} (required)", others
    return Level(ours[0][0]), None, others


def downgraded(keys: Iterable[TopicPartition], why: str) -> list[Downgraded]:
    """One for each topic of these batches."""
    counts: dict[str, int] = {}
    for key in keys:
        counts[key.topic] = counts.get(key.topic, 0) + 1
    return [Downgraded(topic, why, count) for topic, count in counts.items()]
