"""A topic grows while a producer writes counters per key and a consumer that assigns partitions by hand reads them.

    python examples/growing_topic.py --bootstrap PROXY

Prints, for each growth, how many records of keys that moved were seen out of order: none. With `--plain`, the same with
Kafka's own producer and consumer on a topic that nobody orders. The consumer lags, as consumers do: once it
stands still until the topic has grown.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from collections import defaultdict
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, NewPartitions, NewTopic

from fencepost import partition_expansions
from fencepost.kafka_python import OrderedConsumer, OrderedProducer

KEYS = [f"customer {n}".encode() for n in range(20)]
GROWTHS = (4, 8)
ROUNDS = 150
#: Per record: slower than the producer, so that something is left to read when the topic grows.
LAG_SECONDS = 0.002
#: When it has read so much, the consumer stands still until the topic has grown for the first time.
STANDS_STILL_AT = ROUNDS // 6 * len(KEYS)


def create(bootstrap: str, topic: str, *, plain: bool) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        admin.create_topics([NewTopic(topic, 2, 1)])
        while len(admin.describe_topics([topic])[0]["partitions"]) < 2:
            time.sleep(0.1)  # until the broker has heard of it
        if not plain:
            on = {"ordered.partition.expansion": "true", "check.partition.count": "required"}
            change = {name: (AlterConfigOp.SET, value) for name, value in on.items()}
            admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, change)])
    finally:
        admin.close()


def write(bootstrap: str, topic: str, *, plain: bool) -> None:
    kind = KafkaProducer if plain else OrderedProducer
    producer = kind(bootstrap_servers=bootstrap, metadata_max_age_ms=1000)
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    growths = iter(GROWTHS)
    for number in range(1, ROUNDS + 1):
        for key in KEYS:
            producer.send(topic, b"%d" % number, key=key)
        if number % (ROUNDS // 3) == 0 and (count := next(growths, None)):
            admin.create_partitions({topic: NewPartitions(count)})
            print(f"grown to {count} partitions while {number * len(KEYS)} records were written")
        time.sleep(0.02)
    producer.flush()
    producer.close()
    admin.close()


def await_growth(bootstrap: str, topic: str) -> None:
    """Until there is something to read in new partitions."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    consumer = KafkaConsumer(bootstrap_servers=bootstrap)
    while True:
        described = admin.describe_topics([topic])[0]["partitions"]
        new = [TopicPartition(topic, partition) for partition in range(2, len(described))]
        if new and all(consumer.end_offsets(new).values()):
            break
        time.sleep(0.1)
    consumer.close()
    admin.close()


def read(bootstrap: str, topic: str, *, plain: bool) -> int:
    """Reads all by hand; returns how many records came before one that was written earlier with the same key."""
    options: dict[str, Any] = {
        "bootstrap_servers": bootstrap,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "max_poll_records": 20,
        "metadata_max_age_ms": 1000,
        "max_partition_fetch_bytes": 1024,  # so that partitions take turns
    }
    consumer = KafkaConsumer(**options) if plain else OrderedConsumer(topic, **options)
    seen: dict[bytes, int] = defaultdict(int)
    records = early = 0
    assigned = 0
    lags = True
    while records < ROUNDS * len(KEYS):
        if lags and records >= STANDS_STILL_AT:
            lags = False
            await_growth(bootstrap, topic)
            while plain and len(consumer.partitions_for_topic(topic) or ()) == assigned:
                consumer.pause(*consumer.assignment())
                consumer.poll(100)  # it hears of the new ones, and reads nothing
        if plain:  # as a consumer does that follows its topic by hand
            partitions = consumer.partitions_for_topic(topic) or set()
            if len(partitions) > assigned:
                assigned = len(partitions)
                consumer.assign([TopicPartition(topic, partition) for partition in partitions])
                consumer.resume(*consumer.assignment())
        for batch in consumer.poll(200).values():
            for record in batch:
                time.sleep(LAG_SECONDS)
                records += 1
                early += int(record.value) > seen[record.key] + 1
                seen[record.key] = max(seen[record.key], int(record.value))
    consumer.close()
    return early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", required=True, metavar="HOST:PORT", help="the proxy")
    parser.add_argument("--plain", action="store_true", help="without any of it")
    args = parser.parse_args()
    topic = f"growing-{uuid.uuid4().hex[:8]}"
    create(args.bootstrap, topic, plain=args.plain)
    writer = threading.Thread(target=write, args=(args.bootstrap, topic), kwargs={"plain": args.plain})
    writer.start()
    early = read(args.bootstrap, topic, plain=args.plain)
    writer.join()
    if not args.plain:
        admin = KafkaAdminClient(bootstrap_servers=args.bootstrap)
        for expansion in partition_expansions(admin, topic):
            print(f"from {expansion.from_count} to {expansion.to_count}: ended at {expansion.thresholds}")
        admin.close()
    print(f"{ROUNDS * len(KEYS)} records of {len(KEYS)} keys read, {early} of them out of order")


if __name__ == "__main__":
    main()
