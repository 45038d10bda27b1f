"""What a conformance case may ask and do: Kafka as a producer and the proxy's own questions see it.

Two implementations: `real.py` is Kafka, `model.py` the simulation's brokers. Everything here blocks until it is done.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.support import raw

#: How long an answer may take that has to come, in the driver's own time.
ANSWER_SECONDS = 60.0


class Answer(NamedTuple):
    """What a Produce response says of the one partition that was asked for."""

    error_code: int
    base_offset: int = -1
    log_append_time_ms: int = -1
    log_start_offset: int = -1


class ProducerState(NamedTuple):
    """A producer as DescribeProducers tells of it. `transaction_start`: -1 outside of a transaction."""

    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    transaction_start: int


class Stored(NamedTuple):
    """A batch in a log. Of a control batch, `values` has one None."""

    base_offset: int
    attributes: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_control: bool
    values: tuple[bytes | None, ...]


def stored_batches(data: bytes) -> list[Stored]:
    """The complete batches of a Fetch answer."""
    found = []
    for each in raw.read_batches(data):
        (attributes,) = struct.unpack_from(">h", data, 21)
        found.append(
            Stored(
                each.base_offset,
                attributes,
                each.producer_id,
                each.producer_epoch,
                each.base_sequence,
                each.is_control,
                each.values,
            )
        )
        data = data[12 + int.from_bytes(data[8:12], "big") :]
    return found


@dataclass(frozen=True)
class Settings:
    """A topic's. `timestamp_after_max_ms`: how far ahead of the broker's clock a record may be. `gzip`: its
    `compression.type`, where it is not the producer's."""

    replicas: int = 1
    min_isr: int = 1
    log_append_time: bool = False
    max_message_bytes: int | None = None
    timestamp_after_max_ms: int | None = None
    gzip: bool = False


DEFAULTS = Settings()


class Wire(ABC):
    """One connection to a broker. Requests may be sent ahead of answers."""

    @abstractmethod
    def send(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000) -> None: ...

    @abstractmethod
    def receive(self) -> Answer: ...

    @abstractmethod
    def close(self) -> None:
        """What was sent still arrives; nobody is there for its answers."""


class Transaction(ABC):
    """A transactional producer of the old protocol (transactions v1) or of the new one."""

    producer_id: int
    epoch: int

    @abstractmethod
    def add(self, topic: Topic) -> None:
        """AddPartitionsToTxn; nothing with transactions v2, where the first append does it."""

    @abstractmethod
    def append(self, topic: Topic, records: bytes) -> Answer: ...

    @abstractmethod
    def is_on(self, topic: Topic) -> bool:
        """Whether its coordinator names that topic (DescribeTransactions)."""

    @abstractmethod
    def end(self, *, commit: bool) -> None:
        """Returns when EndTxn is answered. The marker may not be written yet."""

    @abstractmethod
    def say_end(self, epoch: int, *, commit: bool) -> int:
        """EndTxn with that epoch, as often as it is told to come again; its error code. Nothing is learned of it."""

    @abstractmethod
    def state(self) -> str:
        """Of its coordinator (DescribeTransactions)."""


class Topic(ABC):
    """One topic of one partition."""

    @abstractmethod
    def append(self, records: bytes, *, acks: int = -1, timeout_ms: int = 10_000, node: int | None = None) -> Answer:
        """Sent once, on a connection of its own, to the leader or to `node`."""

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
        """ListOffsets of the latest, as a consumer."""

    @abstractmethod
    def start(self) -> int: ...

    @abstractmethod
    def producers(self, node: int | None = None) -> dict[int, ProducerState]:
        """What the leader, or `node`, remembers."""

    @abstractmethod
    def read(self) -> list[Stored]:
        """Everything below the high watermark, from the log start on."""

    @abstractmethod
    def delete_records(self, before: int) -> None: ...

    @abstractmethod
    def deny(self, operation: str) -> None:
        """Nobody may READ or WRITE it any more."""

    @abstractmethod
    def recreate(self) -> None:
        """Deletes it and creates it anew under its name, with the same settings."""

    # ---- more than one broker

    @abstractmethod
    def leader(self) -> int: ...

    @abstractmethod
    def leader_epoch(self) -> int: ...

    @abstractmethod
    def replicas(self) -> Sequence[int]: ...

    @abstractmethod
    def move_leader(self, node: int) -> None:
        """Returns when that broker leads and everybody knows it."""

    @abstractmethod
    def end_as_of(self, node: int, leader_epoch: int) -> int | None:
        """The log end as `node` tells it to somebody who believes in that epoch; None where it refuses to."""

    @abstractmethod
    def in_sync(self) -> int:
        """How many replicas are."""


class Kafka(ABC):
    """A cluster, and its clock."""

    @abstractmethod
    def now_ms(self) -> int: ...

    @abstractmethod
    def create(self, settings: Settings = DEFAULTS) -> Topic: ...

    @abstractmethod
    def transactional(self, *, v2: bool) -> Transaction: ...

    @abstractmethod
    def restart(self) -> None:
        """All brokers shut down in good order (what they knew is written down) and started again."""

    @abstractmethod
    def crash(self) -> None:
        """All brokers killed and started again. What was written stays: the operating system lives on."""

    @abstractmethod
    def expire_producers(self) -> None:
        """Soon the brokers look for producers whose last batch is older than `producer.id.expiration.ms`: one day."""

    @abstractmethod
    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits, in this cluster's time, for what happens in its own."""

    # ---- one broker

    @abstractmethod
    def pause(self, node: int) -> None: ...

    @abstractmethod
    def let_fetches_end(self) -> None:
        """What a follower that stands still had asked before is answered: a busy leader does so a while after an
        append, with all that came since."""

    @abstractmethod
    def resume(self, node: int) -> None: ...

    @abstractmethod
    def kill(self, node: int) -> None: ...

    @abstractmethod
    def start_again(self, node: int) -> None: ...
