"""What kafka-python's groups need of their tests. Apart from `members`, for those that load one client only."""

from __future__ import annotations

from kafka import KafkaConsumer


def keep_on_joining(consumer: KafkaConsumer) -> None:
    """To be called between its polls.

    Of itself kafka-python 3.0.12 forgets a rejoin that it began because a topic's metadata changed, if Kafka's answers
    outlast that poll: it has taken note of the new metadata by then, so no later poll sees a reason to rejoin. The
    member then keeps the partitions that it had, sends no heartbeats, and every commit is refused (also without a
    proxy, whenever a topic grows under a group whose leader polls for less time than a rejoin takes). A consumer that
    joins before it knows its topic rejoins at once for the same reason; then it has no partitions, for good.
    """
    if consumer._coordinator.rejoining:
        consumer._coordinator.request_rejoin()
