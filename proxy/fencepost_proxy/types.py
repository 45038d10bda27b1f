"""Leaf values that every room shares. Imports nothing of the proxy."""

from __future__ import annotations

from typing import NamedTuple, NewType
from uuid import UUID

#: Offset of the next record of a partition: Kafka's LEO, what KIP-27 calls the upcoming offset.
LogEndOffset = NewType("LogEndOffset", int)
#: Offset of a record, or of the first record of a batch.
Offset = NewType("Offset", int)
#: Broker id.
NodeId = NewType("NodeId", int)
LeaderEpoch = NewType("LeaderEpoch", int)
ProducerId = NewType("ProducerId", int)
ProducerEpoch = NewType("ProducerEpoch", int)
#: Of a transaction: with transactions v2 (KIP-890) each of a producer has an epoch of its own.
Transactor = tuple[ProducerId, ProducerEpoch]
#: Sequence of a record within its producer, 0 .. 2^31-1, wrapping.
Sequence = NewType("Sequence", int)
#: `time.monotonic()` seconds.
Monotonic = NewType("Monotonic", float)

NO_TOPIC_ID = UUID(int=0)
SEQUENCE_MODULUS = 1 << 31
#: In place of a transactional id, which Kafka wants to have a character: an admin has a transaction marker written.
MARKER = ""
#: Of one producer id: 0 to 32,767.
PRODUCER_EPOCHS = 1 << 15


class TopicPartition(NamedTuple):
    """Sortable by topic, then partition: the order in which a request takes its turns at several gates."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Address(NamedTuple):
    """Where something listens. IPv6 hosts are kept without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, *, default_port: int | None = None) -> Address:
        """`HOST:PORT`, `[V6]:PORT`, or `HOST` where a default port is given. Raises ValueError with a plain reason."""
        if "://" in text:
            raise ValueError(f"{text!r} has a protocol in front; write HOST:PORT alone")
        host, separator, port = text.rpartition(":")
        if not separator or (text.startswith("[") and text.endswith("]")):
            if default_port is None:
                raise ValueError(f"{text!r} is not HOST:PORT")
            host, port = text, str(default_port)
        if not host:
            raise ValueError(f"{text!r} has no host; write HOST:PORT, for example localhost:9092")
        if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
            raise ValueError(f"{text!r} has no usable port: {port!r} is not a number from 0 to 65535")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))
