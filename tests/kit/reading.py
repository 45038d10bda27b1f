"""Read partitions directly from Kafka, to their end."""

from __future__ import annotations

from collections.abc import Iterator

import confluent_kafka

from tests.kit.waiting import NeverHappened

_PATIENCE_SECONDS = 60.0


def read(
    bootstrap: str, *partitions: tuple[str, int], isolation: str = "read_committed"
) -> Iterator[confluent_kafka.Message]:
    """Each record up to the last stable offset; with `read_uncommitted`, up to the log end."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "checker",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
            "log_level": 0,
        }
    )
    left = set(partitions)
    try:
        consumer.assign([confluent_kafka.TopicPartition(*each, 0) for each in partitions])
        while left:
            message = consumer.poll(_PATIENCE_SECONDS)
            if message is None:
                raise NeverHappened(f"the end of {left} was not reached")
            error = message.error()
            if error is None:
                yield message
            elif error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                left.remove((message.topic(), message.partition()))
            else:
                assert error.retriable(), error
    finally:
        consumer.close()
