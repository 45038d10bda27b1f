"""A workaround for kafka-python's groups. Separate from `members`, for tests that load one client only."""

from __future__ import annotations

from kafka import KafkaConsumer


def keep_on_joining(consumer: KafkaConsumer) -> None:
    """Call this between the consumer's polls.

    kafka-python 3.0.12 can lose a rejoin after a metadata change:

    1. A topic's metadata changes, and the member begins to rejoin.
    2. Kafka's responses take longer than that poll.
    3. Later polls compare with the new metadata, find no change, and do not continue the rejoin.

    The member keeps its partitions and sends no heartbeats, and its commits are refused; without a proxy, too. A
    consumer that joins before it knows its topic rejoins for the same reason, and then never gets partitions.
    """
    if consumer._coordinator.rejoining:
        consumer._coordinator.request_rejoin()
