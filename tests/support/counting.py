"""Services of a session, for tests without a process: partition-count checks, memory, and unobserved metrics."""

from __future__ import annotations

from collections.abc import Sequence

from fencepost_proxy.errors import Error
from fencepost_proxy.expansion.barrier import AppendBarrier
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.types import TopicPartition
from tests.support.executors import native_of


class StartsKnown(IdempotenceMemory):
    """Knows where every log starts, so that a refusal needs no query for it."""

    START = 0

    def recent_log_start(self, partition: TopicPartition, now: float) -> int:
        known = super().recent_log_start(partition, now)
        return self.START if known < 0 else known


class Counting:
    """Append barriers that the test controls. `partition_counts` – from metadata. `confirmed_at` – time of the last
    query. `absent` – topics that metadata lacks. `served` – counts reported to clients. `free_bytes` – of the memory
    budget."""

    free_bytes: int

    def __init__(self) -> None:
        self.native = native_of(self)
        self.idempotence: IdempotenceMemory = StartsKnown()
        self.barriers: dict[str, AppendBarrier] = {}
        self.partition_counts: dict[str, int] = {}
        self.confirmed_at: dict[str, float] = {}
        self.just_expanded: set[str] = set()
        self.absent: set[TopicPartition] = set()
        self.denied_topics: set[str] = set()
        self.served: dict[tuple[str | None, str], int] = {}
        self.guesses: list[tuple[str | None, str]] = []
        self.unanswered_at: list[float] = []
        self.waited: list[float] = []

    def new_barrier(self, topic: str) -> AppendBarrier:
        return AppendBarrier(topic, in_doubt_seconds=30.0)

    def barrier(self, topic: str) -> AppendBarrier:
        return self.barriers.setdefault(topic, self.new_barrier(topic))

    def partition_count(self, topic: str, now: float) -> int | None:
        return self.partition_counts.get(topic)

    def count_confirmed_since(self, topic: str, at: float) -> bool:
        return self.confirmed_at.get(topic, float("-inf")) >= at

    def metadata_error(self, partition: TopicPartition, queried_since: float) -> Error | None:
        if partition not in self.absent:
            return Error.NONE
        if self.confirmed_at.get(partition.topic, float("-inf")) < queried_since:
            return None
        denied = partition.topic in self.denied_topics
        return Error.TOPIC_AUTHORIZATION_FAILED if denied else Error.UNKNOWN_TOPIC_OR_PARTITION

    def in_grace_period(self, topic: str, now: float) -> bool:
        return topic in self.just_expanded

    def served_count(self, connection: int, client_id: str | None, topic: str, now: float) -> int | None:
        return self.served.get((client_id, topic))

    def record_served(self, connection: int, client_id: str | None, counts: Sequence[tuple[str, int]]) -> None:
        self.served |= {(client_id, topic): count for topic, count in counts}

    def record_guess(self, connection: int, client_id: str | None, topic: str, now: float) -> None:
        self.guesses.append((client_id, topic))

    def record_unanswered(self, now: float) -> None:
        self.unanswered_at.append(now)

    def barrier_waited(self, seconds: float) -> None:
        self.waited.append(seconds)

    def reserve(self, byte_count: int) -> bool:
        if byte_count > self.free_bytes:
            return False
        self.free_bytes -= byte_count
        return True

    def release(self, byte_count: int) -> None:
        self.free_bytes += byte_count

    def count_request(self, api_key: int, version: int) -> None: ...
    def kafka_refused(self, error_code: int) -> None: ...
    def upstream_lost(self) -> None: ...
    def sequencer_waited(self, seconds: float) -> None: ...
    def forwarded(self, waited_seconds: float) -> None: ...
    def answered(self, waited_seconds: float) -> None: ...
