"""Expand a topic while a producer writes counters per key and a consumer with assigned partitions reads them.

    .venv/bin/fencepost dev                         # in one terminal: Kafka and the proxy
    .venv/bin/python examples/partition_expansion.py     # in another

Prints the expansions and the number of records read out of key order, which is 0. `--unchecked` uses kafka-python's own
producer and consumer on a topic without ordered expansion. The consumer lags: it pauses once until the topic expands.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
import uuid
from collections import defaultdict
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, NewPartitions, NewTopic

from fencepost import partition_expansions
from fencepost.kafka_python import OrderedConsumer, OrderedProducer

BOOTSTRAP_SERVER = os.environ.get("FENCEPOST_BOOTSTRAP_SERVER", "127.0.0.1:19092")
KEYS = [f"customer {n}".encode() for n in range(20)]
EXPANSIONS = (4, 8)
ROUNDS = 150
#: Per record. Slower than the producer, so that unread records remain when the topic expands.
LAG_SECONDS = 0.002
#: After this many records, the consumer pauses until the first expansion.
STANDS_STILL_AT = ROUNDS // 6 * len(KEYS)


def create(bootstrap: str, topic: str, *, unchecked: bool) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        admin.create_topics([NewTopic(topic, 2, 1)])
        while len(admin.describe_topics([topic])[0]["partitions"]) < 2:
            time.sleep(0.1)  # until the broker's metadata has it
        if not unchecked:
            on = {"fencepost.ordered.partition.expansion": "true", "fencepost.check.partition.count": "required"}
            change = {name: (AlterConfigOp.SET, value) for name, value in on.items()}
            admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, change)])
    finally:
        admin.close()


def write(bootstrap: str, topic: str, *, unchecked: bool) -> None:
    kind = KafkaProducer if unchecked else OrderedProducer
    producer = kind(bootstrap_servers=bootstrap, metadata_max_age_ms=1000)
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    expansions = iter(EXPANSIONS)
    for number in range(1, ROUNDS + 1):
        for key in KEYS:
            producer.send(topic, b"%d" % number, key=key)
        if number % (ROUNDS // 3) == 0 and (count := next(expansions, None)):
            admin.create_partitions({topic: NewPartitions(count)})
            print(f"expanded to {count} partitions after {number * len(KEYS)} records")
        time.sleep(0.02)
    producer.flush()
    producer.close()
    admin.close()


def await_expansion(bootstrap: str, topic: str) -> None:
    """Wait until all added partitions have records."""
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


def read(bootstrap: str, topic: str, *, unchecked: bool) -> int:
    """Read all records. Returns how many were read before an earlier record of the same key."""
    options: dict[str, Any] = {
        "bootstrap_servers": bootstrap,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        "max_poll_records": 20,
        "metadata_max_age_ms": 1000,
        "max_partition_fetch_bytes": 1024,  # so that each poll alternates between partitions
    }
    consumer = KafkaConsumer(**options) if unchecked else OrderedConsumer(topic, **options)
    observed: dict[bytes, int] = defaultdict(int)
    records = early = 0
    assigned = 0
    lags = True
    while records < ROUNDS * len(KEYS):
        if lags and records >= STANDS_STILL_AT:
            lags = False
            await_expansion(bootstrap, topic)
            while unchecked and len(consumer.partitions_for_topic(topic) or ()) == assigned:
                consumer.pause(*consumer.assignment())
                consumer.poll(100)  # refreshes metadata and reads nothing
        if unchecked:  # like any consumer that assigns its partitions itself
            partitions = consumer.partitions_for_topic(topic) or set()
            if len(partitions) > assigned:
                assigned = len(partitions)
                consumer.assign([TopicPartition(topic, partition) for partition in partitions])
                consumer.resume(*consumer.assignment())
        for batch in consumer.poll(200).values():
            for record in batch:
                time.sleep(LAG_SECONDS)
                records += 1
                early += int(record.value) > observed[record.key] + 1
                observed[record.key] = max(observed[record.key], int(record.value))
    consumer.close()
    return early


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bootstrap-server", dest="bootstrap", default=BOOTSTRAP_SERVER, help="the proxy (default: %(default)s)"
    )
    parser.add_argument("--unchecked", action="store_true", help="use no ordered expansion")
    args = parser.parse_args()
    topic = f"expanding-{uuid.uuid4().hex[:8]}"
    create(args.bootstrap, topic, unchecked=args.unchecked)
    writer = threading.Thread(target=write, args=(args.bootstrap, topic), kwargs={"unchecked": args.unchecked})
    writer.start()
    early = read(args.bootstrap, topic, unchecked=args.unchecked)
    writer.join()
    if not args.unchecked:
        admin = KafkaAdminClient(bootstrap_servers=args.bootstrap)
        for expansion in partition_expansions(admin, topic):
            print(f"from {expansion.from_count} to {expansion.to_count}: thresholds {expansion.thresholds}")
        admin.close()
    print(f"{ROUNDS * len(KEYS)} records of {len(KEYS)} keys read, {early} of them out of order")


if __name__ == "__main__":
    main()
