"""Levels of idempotence in a Produce request (KAFKA-5793, KAFKA-5794): what it says, and what is to be done with it.

`LeveledProduce` stands beside the request's `ProduceExchange` (`produce_exchange.py`), as `CountCheckedProduce` does.
It knows of each batch whether it may be appended, and whether it may go without its producer id where Kafka takes none.

A batch of a `safe` topic goes up as it is. If Kafka answers 43 (UNSUPPORTED_FOR_MESSAGE_FORMAT), nothing of it was
appended; it is sent once more at once, without, and what Kafka says then is what the client hears. From then on the
topic's batches go without at once, for a while.

Order on a connection
---------------------
A, B are sent with their ids; C comes when A has been refused. C would go without at once, and land before B, whose
refusal is still on its way. So who goes without waits until nothing of its partition is upstream with an id; those
that are sent again follow each other in their order by themselves, since their refusals come in it.

Nobody compares the sequences of what goes without. A is refused by this proxy, to be tried again, and B, sent behind
it, would land before A's next try; so B is refused as well, as on guarded topics. What Kafka itself refuses is beyond
us.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from fencepost_policies.append import INVALID_RECORD, Refusal
from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM, Level, check_idempotence
from fencepost_proxy.errors import ClientProtocolError
from fencepost_proxy.session.messages import Downgraded
from fencepost_proxy.session.produce_exchange import without_producer
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import BatchHeader, MalformedBatch, require_single_batch, verify_crc
from fencepost_proxy.wire.primitives import join_tags, split_tags
from fencepost_proxy.wire.produce import LEVEL_TAG, PartitionData, ProduceRequest

#: Why a batch goes without its producer id, for the metrics and the log.
MESSAGE_FORMAT: Final = "message_format"
NOT_PERMITTED: Final = "not_permitted"


@dataclass(slots=True, eq=False)
class LeveledProduce:
    """`deadline` – when who waits for its turn to go without is told to try again, monotonic seconds.

    `refused` – batches that go no further. `safe` – may be sent again without their producer ids. `without` – are sent
    so. `stripped` – were made so before anybody looked at them, since their ids are made up. `own` – of batches under
    producer ids of their own: id, epoch and sequence, and how many records. `producers` – the ids with which those came
    that go without, or may. `tries_again` – of those, what is refused here, to be sent again. `waits` – for what is
    upstream, before it goes without.
    """

    deadline: float
    refused: dict[TopicPartition, Refusal] = field(default_factory=dict)
    safe: set[TopicPartition] = field(default_factory=set)
    without: set[TopicPartition] = field(default_factory=set)
    stripped: list[TopicPartition] = field(default_factory=list)
    own: dict[TopicPartition, tuple[tuple[int, int, int], int]] = field(default_factory=dict)
    producers: dict[TopicPartition, int] = field(default_factory=dict)
    tries_again: set[TopicPartition] = field(default_factory=set)
    waits: bool = False

    def goes_without(self, memory: IdempotenceMemory, now: float) -> list[TopicPartition]:
        """Those of its batches that Kafka would not take with their ids."""
        return sorted(key for key in self.safe if memory.goes_without(key.topic, now))

    def give_up_id(self, key: TopicPartition) -> None:
        self.safe.discard(key)
        self.own.pop(key, None)
        self.without.add(key)

    def has_id_upstream(self, key: TopicPartition) -> bool:
        """Its answer may be a 43 yet."""
        return key in self.safe


def leveled_produce(
    request: ProduceRequest, policy: Callable[[str], TopicPolicy | None], deadline: float
) -> tuple[ProduceRequest, LeveledProduce | None]:
    """The request as it is to go upstream, and what of it has to do with levels.

    Raises ClientProtocolError where it names a partition twice.
    """
    stated: Level | None = None
    unreadable = None
    if request.header_tags:
        stated, unreadable, tags = _stated(request.header_tags)
        if tags != request.header_tags:
            request = replace(request, header_tags=tags)
    policies = [policy(topic.name) for topic in request.topics]
    if stated is None and unreadable is None and not any(each is not None and _concerns(each) for each in policies):
        return request, None
    exchange = LeveledProduce(deadline)
    observed: set[TopicPartition] = set()
    topics = []
    for topic, each in zip(request.topics, policies, strict=True):
        level = max(stated or Level.OFF, Level.OFF if each is None else each.idempotence)
        if level is Level.OFF and unreadable is None and (each is None or each.is_checked):
            topics.append(topic)  # of guarded ones, tickets know
            continue
        partitions = []
        for data in topic.partitions:
            key, taken = TopicPartition(topic.name, data.partition), data
            if key in observed:
                raise ClientProtocolError(f"a Produce request names {key} twice")
            observed.add(key)
            if unreadable is not None:
                message = f"IDEMPOTENCE_LEVEL_UNREADABLE topic={key.topic} partition={key.partition}: {unreadable}"
                exchange.refused[key] = Refusal(INVALID_RECORD, "idempotence_level_unreadable", message)
            else:
                taken = _take(exchange, key, data, level, is_checked=each is not None and each.is_checked)
            partitions.append(taken)
        topics.append(replace(topic, partitions=tuple(partitions)) if exchange.stripped else topic)
    return (replace(request, topics=tuple(topics)) if exchange.stripped else request), exchange


def _concerns(policy: TopicPolicy) -> bool:
    return policy.idempotence is not Level.OFF or policy.counted


def _take(
    exchange: LeveledProduce, key: TopicPartition, data: PartitionData, level: Level, *, is_checked: bool
) -> PartitionData:
    """What is known of it goes into `turn`; given back is what goes on."""
    header = _header(data)
    if header is None:
        if level is Level.REQUIRED:
            message = f"MALFORMED topic={key.topic} partition={key.partition}: this is not one record batch"
            exchange.refused[key] = Refusal(INVALID_RECORD, "malformed", message)
        return data  # else Kafka says what it thinks of it
    producer_id = header.producer_id
    refusal = check_idempotence(key.topic, key.partition, producer_id, level)
    if refusal is not None:
        exchange.refused[key] = refusal
        return data
    if producer_id < 0:
        return data
    exchange.own[key] = (producer_id, header.producer_epoch, header.base_sequence), header.record_count
    if level is not Level.SAFE or header.is_transactional or data.records is None or not verify_crc(data.records):
        return data  # a new CRC would make sound what is damaged
    exchange.producers[key] = producer_id
    if producer_id >= MADE_UP_IDS_FROM:
        del exchange.own[key]
        exchange.stripped.append(key)
        return replace(data, records=memoryview(without_producer(data.records)))
    if not is_checked:
        exchange.safe.add(key)
    return data


def _header(data: PartitionData) -> BatchHeader | None:
    try:
        return None if data.records is None else require_single_batch(data.records)
    except MalformedBatch:
        return None


def _stated(section: bytes) -> tuple[Level | None, str | None, bytes]:
    """What the tagged field says, or why it cannot be read; and the tagged fields without it."""
    fields = split_tags(section)
    ours = [contents for instance_id, contents in fields if instance_id == LEVEL_TAG]
    if not ours:
        return None, None, section
    others = join_tags([(instance_id, contents) for instance_id, contents in fields if instance_id != LEVEL_TAG])
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
