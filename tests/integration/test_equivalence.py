"""Transparency: the same scripts by the same clients have equal results directly and through the proxy.

`SCRIPTS` is the table. A script gets a `Stage` (bootstrap address and unique names) and returns what its user observed.
Only names and broker addresses are normalized before the comparison.
"""

from __future__ import annotations

import asyncio
import re
import select
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

import aiokafka
import aiokafka.admin
import aiokafka.errors
import confluent_kafka
import confluent_kafka.admin as confluent_admin
import kafka as kafka_python
import kafka.admin as kafka_admin
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from kafka.errors import KafkaError

from fencepost_dev.cluster import KafkaCluster
from fencepost_proxy.topics.virtual_configs import VIRTUAL_CONFIGS
from fencepost_proxy.types import Address
from tests.kit.waiting import until, until_async
from tests.support.kafka import kafka_version, unique_topic
from tests.support.messages import RawConnection
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, batch
from tests.support.rejoining import keep_on_joining
from tests.support.sasl_ssl import ADMIN, Secured, SecuredConnection
from tests.support.three_brokers import leaders_listener
from tests.support.tools import at_both

pytestmark = [pytest.mark.kafka, pytest.mark.brokers]

WAIT_SECONDS = 90.0
#: An hour ago: the broker may delete records older than the retention during a script.
AT_MS = int(time.time()) * 1000 - 3_600_000
LARGE, TOO_LARGE = 900_000, 1_500_000
HEADERS = [("a", b"1"), ("a", b"2"), ("empty", b""), ("null", None)]
NOT_NULL = [header for header in HEADERS if header[1] is not None]
METADATA = 3


class Stage:
    """`name("x")` is a unique name for a topic, a group or a transactional id.

    `kafka_python`, `aiokafka`, `confluent`, `java` – connection settings of each client.
    """

    def __init__(self, bootstrap: str, brokers: int, secured: Secured | None = None, mechanism: str = "") -> None:
        self.brokers = brokers
        self.kafka_python: dict[str, Any] = {"bootstrap_servers": bootstrap}
        self.aiokafka: dict[str, Any] = {"bootstrap_servers": bootstrap}
        self.confluent: dict[str, Any] = {"bootstrap.servers": bootstrap}
        self.java: dict[str, str] = {"bootstrap.servers": bootstrap}
        if secured is not None:
            self.kafka_python |= secured.kafka_python(ADMIN, mechanism)
            self.aiokafka |= secured.aiokafka(ADMIN, mechanism)
            self.confluent |= secured.confluent(ADMIN, mechanism)
            self.java |= secured.java(ADMIN, mechanism)
        self._prefix = unique_topic("stage")

    def name(self, what: str) -> str:
        return f"{self._prefix}-{what}"

    def topic(self, what: str = "topic", partitions: int = 2) -> str:
        """Create a topic with kafka-python's admin client, for all clients."""
        admin = kafka_python.KafkaAdminClient(**self.kafka_python)
        try:
            admin.create_topics(
                [kafka_admin.NewTopic(self.name(what), partitions, self.brokers)], wait_for_metadata=True
            )
        finally:
            admin.close()
        _until_led(self, self.name(what))
        return self.name(what)

    def plain(self, value: Any, brokers: dict[str, str]) -> str:
        """The text of a value, with this stage's names and addresses replaced."""
        text = repr(value).replace(self._prefix, "stage")
        for address, name in brokers.items():
            host, _, port = address.rpartition(":")
            text = text.replace(address, name).replace(f"'{host}', {port}", f"'{name}'")
        return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "an id", text)


def _until_led(stage: Stage, topic: str) -> None:
    """Wait until leaders serve. Metadata names them earlier, and errors until then are not compared."""
    with kafka_python_consumer(stage) as consumer:

        def led() -> bool:
            found = consumer.partitions_for_topic(topic) or set()
            with suppress(KafkaError):
                consumer.end_offsets([kafka_python.TopicPartition(topic, partition) for partition in found])
                return bool(found)
            return False

        until(led, f"leaders of {topic}", seconds=WAIT_SECONDS)


def _is_shown(configs: object) -> bool:
    """Whether the broker shows a changed config. It learns of it after the controller."""
    return "9876543210" in repr(configs)


def outcome(action: Callable[[], Any]) -> Any:
    """The result, or the class (and Kafka's code) of the exception."""
    try:
        return action()
    except confluent_kafka.KafkaException as error:
        return f"KafkaException {error.args[0].name()}"
    except Exception as error:
        return type(error).__name__


# --- kafka-python -----------------------------------------------------------------------------------------------------


class kafka_python_consumer:
    def __init__(self, stage: Stage, *topics: str, **settings: Any) -> None:
        defaults = {"auto_offset_reset": "earliest", "enable_auto_commit": False, "group_id": None}
        self._consumer = kafka_python.KafkaConsumer(*topics, **stage.kafka_python, **defaults | settings)

    def __enter__(self) -> Any:
        return self._consumer

    def __exit__(self, *_: object) -> None:
        self._consumer.close()


def _read(stage: Stage, topic: str, **settings: Any) -> list[Any]:
    """All records of a topic, with manual assignment."""
    with kafka_python_consumer(stage, **settings) as consumer:
        partitions = [kafka_python.TopicPartition(topic, p) for p in sorted(consumer.partitions_for_topic(topic))]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        ends = consumer.end_offsets(partitions)
        found = []
        deadline = time.monotonic() + WAIT_SECONDS
        while any(consumer.position(p) < ends[p] for p in partitions):
            assert time.monotonic() < deadline, (found, ends)
            for records in consumer.poll(200).values():
                found += [(r.partition, r.offset, r.timestamp, r.key, r.value, r.headers) for r in records]
        return sorted(found, key=repr)


def _produced(stage: Stage) -> Any:
    """The records of the clients' `produce` scripts, sorted: unacknowledged appends overtake each other."""
    unconfirmed = _resolved(lambda: _read(stage, stage.name("unconfirmed")), 15)
    return _read(stage, stage.name("confirmed")), sorted((p, *rest) for p, _, *rest in unconfirmed)


def kp_produce(stage: Stage) -> Any:
    topics = {0: stage.topic("unconfirmed"), 1: stage.topic("confirmed")}
    sent = []
    for acks in (0, 1, "all"):
        topic = topics.get(acks, topics[1])
        for compression in (None, "gzip", "snappy", "lz4", "zstd"):
            producer = kafka_python.KafkaProducer(
                **stage.kafka_python, acks=acks, compression_type=compression, enable_idempotence=False
            )
            for number in range(3):
                value = f"{acks} {compression} {number} ".encode() * 20
                future = producer.send(
                    topic, value, key=b"k", partition=number % 2, headers=NOT_NULL, timestamp_ms=AT_MS + number
                )
                met = future.get(WAIT_SECONDS)
                sent.append((met.partition, met.offset))
            producer.close()
    return sent, _produced(stage)


def kp_idempotent_and_large(stage: Stage) -> Any:
    topic = stage.topic()
    producer = kafka_python.KafkaProducer(**stage.kafka_python, enable_idempotence=True, max_request_size=4 * TOO_LARGE)
    observed = [
        outcome(lambda size=size: producer.send(topic, b"x" * size, partition=0).get(WAIT_SECONDS).offset)
        for size in (1, LARGE, TOO_LARGE)
    ]
    producer.close()
    return observed, [(partition, offset, len(value)) for partition, offset, _, _, value, _ in _read(stage, topic)]


def kp_transactions(stage: Stage) -> Any:
    topic = stage.topic()
    producer = kafka_python.KafkaProducer(**stage.kafka_python, transactional_id=stage.name("txn"))
    producer.init_transactions()
    for end in ("commit", "abort", "commit"):
        producer.begin_transaction()
        for partition in (0, 1):
            producer.send(topic, end.encode(), partition=partition, timestamp_ms=AT_MS).get(WAIT_SECONDS)
        (producer.commit_transaction if end == "commit" else producer.abort_transaction)()
    producer.close()
    return [
        _resolved(lambda level=level: _read(stage, topic, isolation_level=level), count)
        for level, count in (("read_committed", 4), ("read_uncommitted", 6))
    ]


def _resolved(read: Callable[[], list[Any]], count: int) -> list[Any]:
    """Read until the markers are written, shortly after the commit. Until then the last stable offset lags."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        found = read()
        if len(found) >= count or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def kp_group(stage: Stage) -> Any:
    topic, group = stage.topic(), stage.name("group")
    _fill(stage, topic, 20)
    observed: list[Any] = []
    for count in (7, 13):
        with kafka_python_consumer(stage, topic, group_id=group, max_poll_records=1) as consumer:
            values = []
            deadline = time.monotonic() + WAIT_SECONDS
            while len(values) < count:
                assert time.monotonic() < deadline, values
                for records in consumer.poll(500).values():
                    values += [record.value for record in records]
                keep_on_joining(consumer)
            consumer.commit()
            committed = [consumer.committed(kafka_python.TopicPartition(topic, p)) for p in (0, 1)]
            observed.append((len(values), sum(offset or 0 for offset in committed)))
            observed.append(values)
    # The order of the two partitions depends on timing; duplicates and missing records do not.
    return [observed[0], observed[2], sorted(observed[1] + observed[3])]


def kp_seek_and_times(stage: Stage) -> Any:
    topic = stage.topic()
    _fill(stage, topic, 20)
    first, second = (kafka_python.TopicPartition(topic, p) for p in (0, 1))
    with kafka_python_consumer(stage) as consumer:
        consumer.assign([first])
        consumer.seek(first, 6)
        record = next(consumer)
        times = consumer.offsets_for_times({first: AT_MS + 8, second: AT_MS + 10_000})
        consumer.seek(first, 10_000)
        deadline = time.monotonic() + WAIT_SECONDS
        while not consumer.poll(300):  # out of range: it restarts at the beginning
            assert time.monotonic() < deadline
        return [
            (record.offset, record.value),
            [times[first], times[second]],
            sorted(consumer.beginning_offsets([first, second]).items()),
            sorted(consumer.end_offsets([first, second]).items()),
            consumer.position(first),
        ]


def kp_admin(stage: Stage) -> Any:
    admin = kafka_python.KafkaAdminClient(**stage.kafka_python)
    topic, group = stage.topic(), stage.name("group")
    _fill(stage, topic, 6)
    resource = kafka_admin.ConfigResource(kafka_admin.ConfigResourceType.TOPIC, topic)
    acl = kafka_admin.ACL(
        "User:a",
        "*",
        kafka_admin.ACLOperation.READ,
        kafka_admin.ACLPermissionType.ALLOW,
        kafka_admin.ResourcePattern(kafka_admin.ResourceType.TOPIC, topic),
    )
    offsets = {kafka_python.TopicPartition(topic, 0): kafka_python.OffsetAndMetadata(2, "m", -1)}
    try:
        with kafka_python_consumer(stage, group_id=group) as consumer:
            consumer.assign(list(offsets))
            consumer.commit(offsets)
        change = kafka_admin.ConfigResource(kafka_admin.ConfigResourceType.TOPIC, topic, {"retention.ms": "9876543210"})
        return [
            outcome(lambda: admin.create_topics([kafka_admin.NewTopic(topic, 1, 1)])),
            outcome(lambda: admin.create_topics([kafka_admin.NewTopic(stage.name("wide"), 1, 77)])),
            outcome(lambda: admin.create_topics([kafka_admin.NewTopic("not a name", 1, 1)])),
            outcome(lambda: admin.create_partitions({topic: 4})),
            outcome(lambda: admin.create_partitions({topic: 1})),
            outcome(lambda: admin.alter_configs([change])),
            until(lambda: admin.describe_configs([resource]), "the change", seconds=WAIT_SECONDS, accept=_is_shown),
            outcome(lambda: admin.delete_records({kafka_python.TopicPartition(topic, 0): 2})),
            outcome(lambda: admin.describe_groups([group])),
            outcome(lambda: [g for g in admin.list_groups() if group in str(g)]),
            outcome(lambda: admin.list_group_offsets([group])),
            outcome(lambda: admin.delete_groups([group])),
            outcome(lambda: admin.create_acls([acl])),
            outcome(lambda: admin.describe_acls(kafka_admin.ACLFilter(*[None] * 2, *_any_acl()))),
            outcome(lambda: sorted(map(str, _brokers_of(admin.describe_cluster())))),
            outcome(lambda: [t["name"] for t in admin.describe_topics([topic])]),
            outcome(lambda: admin.delete_topics([topic])),
            outcome(lambda: admin.delete_topics([stage.name("nowhere")])),
        ]
    finally:
        admin.close()


def _any_acl() -> Iterable[Any]:
    return (
        kafka_admin.ACLOperation.ANY,
        kafka_admin.ACLPermissionType.ANY,
        kafka_admin.ResourcePatternFilter(kafka_admin.ResourceType.ANY, None, kafka_admin.ACLResourcePatternType.ANY),
    )


def _brokers_of(described: dict[str, Any]) -> list[Any]:
    return [(each.get("node_id", each.get("broker_id")), each["host"], each["port"]) for each in described["brokers"]]


def _fill(stage: Stage, topic: str, count: int) -> None:
    """Write `count` records to two partitions, one per batch, with timestamps that increase by one."""
    producer = kafka_python.KafkaProducer(**stage.kafka_python, batch_size=0, enable_idempotence=False)
    for number in range(count):
        producer.send(topic, b"%03d" % number, partition=number % 2, timestamp_ms=AT_MS + number).get(WAIT_SECONDS)
    producer.close()


# --- aiokafka ---------------------------------------------------------------------------------------------------------


def in_asyncio(script: Callable[[Stage], Awaitable[Any]]) -> Callable[[Stage], Any]:
    def run(stage: Stage) -> Any:
        return asyncio.run(script(stage))  # type: ignore[arg-type]

    run.__name__ = getattr(script, "__name__", "script")
    return run


async def _outcome(action: Awaitable[Any]) -> Any:
    try:
        return await action
    except Exception as error:
        return type(error).__name__


@in_asyncio
async def aio_produce(stage: Stage) -> Any:
    topics = {acks: await asyncio.to_thread(stage.topic, what) for acks, what in ((0, "unconfirmed"), (1, "confirmed"))}
    sent = []
    for acks in (0, 1, "all"):
        topic = topics.get(acks, topics[1])
        for compression in (None, "gzip", "snappy", "lz4", "zstd"):
            async with aiokafka.AIOKafkaProducer(**stage.aiokafka, acks=acks, compression_type=compression) as producer:
                for number in range(3):
                    value = f"{acks} {compression} {number} ".encode() * 20
                    met = await producer.send_and_wait(topic, value, b"k", number % 2, AT_MS + number, NOT_NULL)
                    # Without an acknowledgement there is no offset.
                    sent.append(met and (met.partition, met.offset))
    return sent, await asyncio.to_thread(_produced, stage)


@in_asyncio
async def aio_idempotent_large_and_transactions(stage: Stage) -> Any:
    topic = await asyncio.to_thread(stage.topic)
    observed = []
    async with aiokafka.AIOKafkaProducer(
        **stage.aiokafka, enable_idempotence=True, max_request_size=4 * TOO_LARGE
    ) as producer:
        for size in (1, LARGE, TOO_LARGE):
            met = await _outcome(producer.send_and_wait(topic, b"x" * size, partition=0))
            observed.append(met if isinstance(met, str) else met.offset)
    async with aiokafka.AIOKafkaProducer(**stage.aiokafka, transactional_id=stage.name("aio-txn")) as producer:
        for end in ("commit", "abort", "commit"):
            await producer.begin_transaction()
            for partition in (0, 1):
                await producer.send_and_wait(topic, end.encode(), partition=partition, timestamp_ms=AT_MS)
            await (producer.commit_transaction() if end == "commit" else producer.abort_transaction())
    committed = await asyncio.to_thread(_resolved, lambda: _read(stage, topic, isolation_level="read_committed"), 6)
    return observed, [(partition, offset, value[:10]) for partition, offset, _, _, value, _ in committed]


@in_asyncio
async def aio_group_seek_and_times(stage: Stage) -> Any:
    topic, group = await asyncio.to_thread(stage.topic), stage.name("group")
    await asyncio.to_thread(_fill, stage, topic, 20)
    values, counts = [], []
    for count in (7, 13):
        async with aiokafka.AIOKafkaConsumer(
            topic,
            **stage.aiokafka,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        ) as consumer:
            for _ in range(count):
                values.append((await asyncio.wait_for(consumer.getone(), WAIT_SECONDS)).value)
            await consumer.commit()
            counts.append(sum([await consumer.committed(p) or 0 for p in consumer.assignment()]))
    async with aiokafka.AIOKafkaConsumer(**stage.aiokafka) as consumer:
        first, second = (aiokafka.TopicPartition(topic, p) for p in (0, 1))
        consumer.assign([first, second])
        consumer.seek(second, 4)
        record = await consumer.getone(second)
        times = await consumer.offsets_for_times({first: AT_MS + 8, second: AT_MS + 10_000})
        ends = await consumer.end_offsets([first, second])
    return sorted(values), counts, (record.offset, record.value), times[first], times[second], sorted(ends.values())


@in_asyncio
async def aio_admin(stage: Stage) -> Any:
    topic = await asyncio.to_thread(stage.topic)
    await asyncio.to_thread(_fill, stage, topic, 6)
    admin = aiokafka.admin.AIOKafkaAdminClient(**stage.aiokafka)
    await admin.start()
    new = aiokafka.admin.NewTopic
    resource = aiokafka.admin.config_resource.ConfigResource(
        aiokafka.admin.config_resource.ConfigResourceType.TOPIC, topic, {"retention.ms": "9876543210"}
    )
    try:
        observed = [
            await _outcome(admin.create_topics([new(topic, 1, 1)])),
            await _outcome(admin.create_topics([new(stage.name("wide"), 1, 77)])),
            await _outcome(admin.create_partitions({topic: aiokafka.admin.NewPartitions(4)})),
            await _outcome(admin.alter_configs([resource])),
            await until_async(
                lambda: admin.describe_configs([resource]), "the change", seconds=WAIT_SECONDS, accept=_is_shown
            ),
            await _outcome(admin.describe_consumer_groups([stage.name("nobody")])),
            await _outcome(admin.delete_topics([topic])),
        ]
        described = await admin.describe_cluster()
        return [_without_throttle(each) for each in observed], sorted(map(str, _brokers_of(described)))
    finally:
        await admin.close()


def _without_throttle(value: Any) -> Any:
    """The text of an aiokafka response, without fields that vary in Kafka."""
    return re.sub(r"throttle_time_ms=\d+", "", str(value))


# --- confluent-kafka --------------------------------------------------------------------------------------------------


def _ck_producer(stage: Stage, **settings: Any) -> Any:
    named = {key.replace("_", "."): value for key, value in settings.items()}
    return confluent_kafka.Producer({**stage.confluent, **named})


def _ck_send(producer: Any, topic: str, values: Iterable[bytes], **more: Any) -> list[Any]:
    observed: list[Any] = []

    def delivered(error: Any, message: Any) -> None:
        observed.append(error.name() if error else (message.partition(), message.offset()))

    for number, value in enumerate(values):
        producer.produce(topic, value, partition=number % 2, timestamp=AT_MS + number, on_delivery=delivered, **more)
        assert producer.flush(WAIT_SECONDS) == 0
    return observed


def ck_produce(stage: Stage) -> Any:
    topics = {0: stage.topic("unconfirmed"), 1: stage.topic("confirmed")}
    sent = []
    for acks in (0, 1, "all"):
        topic = topics.get(acks, topics[1])
        for compression in ("none", "gzip", "snappy", "lz4", "zstd"):
            producer = _ck_producer(stage, acks=acks, compression_type=compression)
            values = [f"{acks} {compression} {number} ".encode() * 20 for number in range(3)]
            sent += _ck_send(producer, topic, values, key=b"k", headers=HEADERS)
    return sent, _produced(stage)


def ck_idempotent_large_and_transactions(stage: Stage) -> Any:
    topic = stage.topic()
    producer = _ck_producer(stage, enable_idempotence=True, message_max_bytes=4 * TOO_LARGE)
    observed: list[Any] = _ck_send(producer, topic, [b"x" * size for size in (1, 2, LARGE, LARGE)])
    unchecked = _ck_producer(stage, message_max_bytes=4 * TOO_LARGE)
    observed += _ck_send(unchecked, topic, [b"x" * TOO_LARGE])
    producer = _ck_producer(stage, transactional_id=stage.name("ck-txn"))
    producer.init_transactions(WAIT_SECONDS)
    for end in ("commit", "abort", "commit"):
        producer.begin_transaction()
        observed += _ck_send(producer, topic, [end.encode()] * 2)
        (producer.commit_transaction if end == "commit" else producer.abort_transaction)(WAIT_SECONDS)
    committed = _resolved(lambda: _read(stage, topic, isolation_level="read_committed"), 8)
    return observed, [(partition, offset, value[:10]) for partition, offset, _, _, value, _ in committed]


def _ck_group(stage: Stage, protocol: str) -> Any:
    topic, group = stage.topic(protocol), stage.name(f"group-{protocol}")
    _fill(stage, topic, 20)
    values, committed = [], []
    for count in (7, 13):
        consumer = confluent_kafka.Consumer(
            {
                **stage.confluent,
                "group.id": group,
                "group.protocol": protocol,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe([topic])
        taken = 0
        deadline = time.monotonic() + WAIT_SECONDS
        while taken < count:
            assert time.monotonic() < deadline, values
            for message in consumer.consume(1, 0.5):
                assert message.error() is None, message.error()
                values.append(message.value())
                taken += 1
        stored = consumer.commit(asynchronous=False)
        committed.append(sum(each.offset for each in consumer.committed(consumer.assignment(), WAIT_SECONDS)
                             if each.offset > 0))  # fmt: skip
        assert all(each.error is None for each in stored)
        consumer.close()
    return sorted(values), committed


def ck_group_classic(stage: Stage) -> Any:
    return _ck_group(stage, "classic")


def ck_group_consumer(stage: Stage) -> Any:
    return _ck_group(stage, "consumer")


def ck_seek_and_times(stage: Stage) -> Any:
    topic = stage.topic()
    _fill(stage, topic, 20)
    consumer = confluent_kafka.Consumer({**stage.confluent, "group.id": stage.name("none")})
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 6)])
        message = consumer.poll(WAIT_SECONDS)
        queried = [
            confluent_kafka.TopicPartition(topic, 0, AT_MS + 8),
            confluent_kafka.TopicPartition(topic, 1, AT_MS * 2),
        ]
        times = consumer.offsets_for_times(queried, WAIT_SECONDS)
        marks = [consumer.get_watermark_offsets(each, WAIT_SECONDS) for each in queried]
        return (message.offset(), message.value(), message.timestamp()), [each.offset for each in times], marks
    finally:
        consumer.close()


def ck_admin(stage: Stage) -> Any:
    admin = confluent_admin.AdminClient({**stage.confluent})
    topic, group = stage.topic(), stage.name("group")
    _fill(stage, topic, 6)
    partition = confluent_kafka.TopicPartition(topic, 0, 2)
    consumer = confluent_kafka.Consumer({**stage.confluent, "group.id": group})
    consumer.commit(offsets=[partition], asynchronous=False)
    consumer.close()

    def of(futures: Any) -> list[Any]:
        if not isinstance(futures, dict):
            futures = {"": futures}
        return [outcome(lambda future=future: future.result(WAIT_SECONDS)) for future in futures.values()]

    def shown(configs: Any) -> Any:
        # The proxy adds only virtual topic configs.
        return sorted(
            (e.name, e.value, e.source, e.is_default) for e in configs.values() if e.name not in VIRTUAL_CONFIGS
        )

    resource = confluent_admin.ConfigResource("topic", topic)
    entry = confluent_admin.ConfigEntry(
        "retention.ms", "9876543210", incremental_operation=confluent_admin.AlterConfigOpType.SET
    )
    change = confluent_admin.ConfigResource("topic", topic, incremental_configs=[entry])
    any_acl = confluent_admin.AclBindingFilter(
        confluent_admin.ResourceType.ANY, None, confluent_admin.ResourcePatternType.ANY, None, None,
        confluent_admin.AclOperation.ANY, confluent_admin.AclPermissionType.ANY,
    )  # fmt: skip
    new = confluent_admin.NewTopic
    cluster = admin.describe_cluster().result(WAIT_SECONDS)
    described = admin.describe_topics(confluent_kafka.TopicCollection([topic]))[topic].result(WAIT_SECONDS)
    latest = {partition: confluent_admin.OffsetSpec.latest()}
    members = admin.describe_consumer_groups([group])[group].result(WAIT_SECONDS)
    return [
        of(admin.create_topics([new(topic, 1, 1), new(stage.name("wide"), 1, 77), new("not a name", 1, 1)])),
        of(admin.create_partitions([confluent_admin.NewPartitions(topic, 4)])),
        of(admin.create_partitions([confluent_admin.NewPartitions(topic, 1)])),
        of(admin.incremental_alter_configs([change])),
        until(
            lambda: [shown(each) for each in of(admin.describe_configs([resource]))],
            "the change",
            seconds=WAIT_SECONDS,
            accept=_is_shown,
        ),
        [each.offset for each in of(admin.list_offsets(latest))],
        [each.low_watermark for each in of(admin.delete_records([partition]))],
        of(admin.describe_acls(any_acl)),
        sorted(str((node.id, node.host, node.port)) for node in cluster.nodes),
        [(each.id, str(each.leader), sorted(map(str, each.replicas)))
         for each in described.partitions][: 1 if stage.brokers == 1 else 0],
        (members.group_id.replace(group, "g"), str(members.state), members.members),
        [each.group_id for each in admin.list_consumer_groups().result(WAIT_SECONDS).valid if each.group_id == group],
        [[p.offset for p in each.topic_partitions] for each in of(
            admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]))],
        of(admin.delete_consumer_groups([group])),
        of(admin.delete_topics([topic, stage.name("nowhere")])),
    ]  # fmt: skip


SCRIPTS: dict[str, Callable[[Stage], Any]] = {
    "kafka-python: produce": kp_produce,
    "kafka-python: idempotent, large": kp_idempotent_and_large,
    "kafka-python: transactions": kp_transactions,
    "kafka-python: group, commit, resume": kp_group,
    "kafka-python: seek, offsets for times": kp_seek_and_times,
    "kafka-python: admin": kp_admin,
    "aiokafka: produce": aio_produce,
    "aiokafka: idempotent, large, transactions": aio_idempotent_large_and_transactions,
    "aiokafka: group, seek, offsets for times": aio_group_seek_and_times,
    "aiokafka: admin": aio_admin,
    "confluent-kafka: produce": ck_produce,
    "confluent-kafka: idempotent, large, transactions": ck_idempotent_large_and_transactions,
    "confluent-kafka: group, commit, resume": ck_group_classic,
    "confluent-kafka: group.protocol=consumer": ck_group_consumer,
    "confluent-kafka: seek, offsets for times": ck_seek_and_times,
    "confluent-kafka: admin": ck_admin,
}


def _addresses(bootstrap: str, secured: Secured | None = None) -> dict[str, str]:
    """Address → name, including the bootstrap listener."""
    first = bootstrap.partition(",")[0]
    if secured is None:
        with RawConnection(Address.parse(first)) as connection:
            brokers = connection.query(METADATA, 9, {"Topics": []})["Brokers"]
        return {f"{each['Host']}:{each['Port']}": f"broker {each['NodeId']}" for each in brokers}
    with SecuredConnection(first, secured.trusting()) as client:
        assert client.log_in(ADMIN) == 0
        return {f"{each.host}:{each.port}": f"broker {each.node_id}" for each in client.metadata("none").brokers}


def compare(play: Callable[[str], str], direct: str, proxy: ProxyProcess) -> None:
    observed, proxied = at_both(play, direct, proxy.bootstrap)

    print(proxy.log[-2000:])
    at = next((index for index, pair in enumerate(zip(proxied, observed, strict=False)) if pair[0] != pair[1]), None)
    assert proxied == observed, f"proxied …{proxied[at - 80 : at + 200]}\ndirect …{observed[at - 80 : at + 200]}"
    assert len(observed) > 20


def skip_what_kafka_lacks(script: str) -> None:
    if script == "confluent-kafka: group.protocol=consumer" and kafka_version().startswith("3."):
        pytest.skip("librdkafka needs ConsumerGroupHeartbeat v1, which Kafka 3.9 does not have")


@pytest.mark.parametrize("brokers", [1, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_client_sees_the_same_through_the_proxy(brokers: int, script: str, request: pytest.FixtureRequest) -> None:
    skip_what_kafka_lacks(script)
    cluster: KafkaCluster = request.getfixturevalue("kafka" if brokers == 1 else "kafka3")
    proxy: ProxyProcess = request.getfixturevalue("proxied" if brokers == 1 else "proxied3")

    def play(bootstrap: str) -> str:
        stage = Stage(bootstrap, brokers)
        return stage.plain(SCRIPTS[script](stage), _addresses(bootstrap))

    compare(play, cluster.bootstrap, proxy)


# --- a difference: acks=1 ---------------------------------------------------------------------------------------------


def test_acks_1_goes_up_as_all(kafka3: KafkaCluster, proxy3: ProxyProcess) -> None:
    """With a paused follower replica, acks=1 completes immediately and acks=all does not."""
    log3 = Log(kafka3.bootstrap)
    leader, follower, _ = kafka3.node_ids
    topics = {prefix: unique_topic(prefix) for prefix in ("plain", "required", "checked")}
    with Connection(proxy3.bootstrap) as admin:
        for topic in topics.values():
            assert admin.create_topic(topic, on=[leader, follower]) == (0, None)
            assert log3.end(topic) == 0
    with ExitStack() as stack:
        clients = {
            prefix: stack.enter_context(Connection(leaders_listener(proxy3, topic))) for prefix, topic in topics.items()
        }
        for prefix, client in clients.items():
            until(
                lambda prefix=prefix, client=client: client.append(topics[prefix], batch(b"warm", expected=0))[0] == 0,
                f"an append to {topics[prefix]}",
            )
        kafka3.pause(follower)
        try:
            for prefix, client in clients.items():
                expected = 1 if prefix == "required" else None
                client.send_produce({topics[prefix]: {0: batch(b"x", expected=expected)}}, acks=1)
            answered = {"plain": _answers_within(clients["plain"], 60.0)}
            answered |= {prefix: _answers_within(clients[prefix], 0.5) for prefix in ("required", "checked")}
        finally:
            kafka3.resume(follower)
        assert answered == {"plain": True, "required": False, "checked": False}
        for prefix, client in clients.items():
            assert client.receive_produce()[1][topics[prefix], 0][:2] == (0, 1)


def _answers_within(connection: Connection, seconds: float) -> bool:
    readable, _, _ = select.select([connection.socket], [], [], seconds)
    return bool(readable)
