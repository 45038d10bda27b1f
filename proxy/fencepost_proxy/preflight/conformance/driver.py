"""The interface to Kafka for conformance cases: `cluster.py` implements it for any cluster.

Tests implement it for the simulation's model, and for clusters whose brokers they may stop.

All calls block until they are done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fencepost_proxy.errors import error_name
from fencepost_proxy.preflight.conformance.batches import Logged


class Answer(NamedTuple):
    """One partition of a Produce response."""

    error_code: int
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1

    def __str__(self) -> str:
        return (
            f"[{error_name(self.error_code)} ({self.error_code}), offset {self.base_offset}, "
            f"append time {self.log_append_time_ms}, log start {self.log_start_offset}]"
        )


class ProducerState(NamedTuple):
    """A producer in DescribeProducers. `transaction_start`: -1 outside a transaction."""

    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    transaction_start: int


@dataclass(frozen=True)
class Settings:
    """Configs of a topic. `gzip`: `compression.type=gzip`."""

    replicas: int = 1
    min_isr: int = 1
    log_append_time: bool = False
    max_message_bytes: int | None = None
    timestamp_after_max_ms: int | None = None
    gzip: bool = False


DEFAULTS = Settings()


class Wire(ABC):
    """One connection to a broker. Requests may be pipelined."""

    @abstractmethod
    def send(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000) -> None: ...

    @abstractmethod
    def receive(self) -> Answer: ...

    @abstractmethod
    def close(self) -> None:
        """Sent requests still arrive; their responses are lost."""


class Transaction(ABC):
    """A transactional producer, with transactions v1 or v2."""

    producer_id: int
    epoch: int

    @abstractmethod
    def add(self, topic: Topic) -> None:
        """Send AddPartitionsToTxn. With transactions v2, do nothing: the first append adds the partition."""

    @abstractmethod
    def append(self, topic: Topic, records: bytes) -> Answer: ...

    @abstractmethod
    def is_on(self, topic: Topic) -> bool:
        """Whether its coordinator lists that topic (DescribeTransactions)."""

    @abstractmethod
    def end(self, *, commit: bool) -> None:
        """Return when EndTxn is answered. The marker may not be written yet."""

    @abstractmethod
    def say_end(self, epoch: int, *, commit: bool) -> int:
        """Send EndTxn with that epoch, repeat it while the coordinator is busy, and return the error code."""

    @abstractmethod
    def state(self) -> str:
        """The coordinator's state (DescribeTransactions)."""


class Topic(ABC):
    """A topic with one partition."""

    @abstractmethod
    def append(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000, node: int | None = None) -> Answer:
        """Send once, on a new connection, to the leader or `node`."""

    @abstractmethod
    def append_by_id(self, records: bytes, topic_id: object) -> Answer:
        """Produce v13."""

    @abstractmethod
    def connect(self) -> Wire: ...

    @property
    @abstractmethod
    def topic_id(self) -> object: ...

    @abstractmethod
    def end(self) -> int:
        """The log end offset, from the leader (OffsetForLeaderEpoch)."""

    @abstractmethod
    def high_watermark(self) -> int:
        """The latest offset in ListOffsets, for a consumer."""

    @abstractmethod
    def start(self) -> int: ...

    @abstractmethod
    def producers(self, node: int | None = None) -> dict[int, ProducerState]:
        """Producers known to the leader or `node`."""

    @abstractmethod
    def read(self) -> list[Logged]:
        """All batches from the log start to the high watermark."""

    @abstractmethod
    def delete_records(self, before: int) -> None: ...

    @abstractmethod
    def write_marker(self, producer_id: int, epoch: int) -> int:
        """An abort marker of a producer without a transaction. Returns Kafka's error code."""

    @abstractmethod
    def deny(self, operation: str) -> None:
        """Revoke READ or WRITE from all clients."""

    @abstractmethod
    def recreate(self) -> None:
        """Delete it and create it again, with the same name and settings."""

    # ---- more than one broker

    @abstractmethod
    def leader(self) -> int: ...

    @abstractmethod
    def leader_epoch(self) -> int: ...

    @abstractmethod
    def replicas(self) -> Sequence[int]: ...

    @abstractmethod
    def move_leader(self, node: int) -> None:
        """Return when that broker leads and all brokers know it."""

    @abstractmethod
    def end_as_of(self, node: int, leader_epoch: int) -> int | None:
        """The log end that `node` reports for that leader epoch, or None if it refuses."""

    @abstractmethod
    def in_sync(self) -> int:
        """Number of in-sync replicas."""


class Kafka(ABC):
    """A cluster, and its clock.

    `shared_id`, `other_id`: producer ids of fences and of another producer. Apache Kafka accepts any.
    """

    shared_id = 7_000_001
    other_id = 7_000_002

    @abstractmethod
    def now_ms(self) -> int: ...

    @abstractmethod
    def create(self, settings: Settings = DEFAULTS) -> Topic: ...

    @abstractmethod
    def transactional(self, *, v2: bool) -> Transaction: ...

    @abstractmethod
    def restart(self) -> None:
        """Shut all brokers down cleanly and start them again."""

    @abstractmethod
    def crash(self) -> None:
        """Kill all brokers and start them again. Written data survives, because the operating system does not stop."""

    @abstractmethod
    def expire_producers(self) -> None:
        """Let brokers soon expire producers older than `producer.id.expiration.ms` (one day)."""

    @abstractmethod
    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, by this cluster's clock."""

    # ---- one broker

    @abstractmethod
    def pause(self, node: int) -> None: ...

    @abstractmethod
    def let_fetches_end(self) -> None:
        """Wait until pending fetches of a paused follower are answered: a busy leader delays them after an append."""

    @abstractmethod
    def resume(self, node: int) -> None: ...

    @abstractmethod
    def kill(self, node: int) -> None: ...

    @abstractmethod
    def start_again(self, node: int) -> None: ...
