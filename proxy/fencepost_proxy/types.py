"""Value types shared by all modules. Imports no other module of the proxy."""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import NamedTuple, NewType, TypeVar
from uuid import UUID

#: Offset of the next record of a partition (Kafka's LEO; the upcoming offset in KIP-27).
LogEndOffset = NewType("LogEndOffset", int)
#: Offset of a record, or of the first record of a batch.
Offset = NewType("Offset", int)
#: Broker id.
NodeId = NewType("NodeId", int)
LeaderEpoch = NewType("LeaderEpoch", int)
ProducerId = NewType("ProducerId", int)
ProducerEpoch = NewType("ProducerEpoch", int)
#: Identifies a transaction: with transactions v2 (KIP-890), each transaction of a producer has its own epoch.
Transactor = tuple[ProducerId, ProducerEpoch]
#: Sequence of a record of its producer, 0 to 2^31-1, wrapping.
Sequence = NewType("Sequence", int)
#: `time.monotonic()` seconds.
Monotonic = NewType("Monotonic", float)

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

NO_TOPIC_ID = UUID(int=0)
SEQUENCE_MODULUS = 1 << 31
#: In place of a transactional id (never empty in Kafka): an admin client writes a transaction marker.
MARKER = ""
#: Number of epochs of one producer id, 0 to 32,767.
PRODUCER_EPOCHS = 1 << 15


class TopicPartition(NamedTuple):
    """Sorts by topic, then partition: the order in which a request enters several partition sequencers."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class Address(NamedTuple):
    """Address of a listener. IPv6 hosts are stored without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of_socket(cls, name: tuple[str, int, *tuple[object, ...]]) -> Address:
        """From a socket's own name or its peer's. An IPv4 client of a `[::]` listener is 192.0.2.1, not
        ::ffff:192.0.2.1: certificates name the former, and clients compare the text."""
        host, port = name[:2]
        # Many connections have one host.
        return cls(sys.intern(host.removeprefix("::ffff:") if "." in host else host), port)

    @classmethod
    def parse(cls, text: str, *, default_port: int | None = None) -> Address:
        """Parses `HOST:PORT`, `[V6]:PORT`, or `HOST` if `default_port` is given. Raises `ValueError`."""
        if "://" in text:
            raise ValueError(f"{text!r} starts with a protocol; write only HOST:PORT")
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


class Bounded(OrderedDict[_Key, _Value]):
    """At most `count_max` entries: a further one replaces the entry that was set longest ago."""

    def __init__(self, count_max: int) -> None:
        super().__init__()
        self._count_max = count_max

    def __setitem__(self, key: _Key, value: _Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._count_max:
            self.popitem(last=False)
