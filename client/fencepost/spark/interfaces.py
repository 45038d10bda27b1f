"""What the decisions of the sink need from Kafka, the clock and the record format. The decisions do no I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

TopicPartition = tuple[str, int]
"""Topic and partition."""


class TopicIdentity(NamedTuple):
    """A topic as Kafka has it now. Another topic of the same name has another `id`. `leader_epochs`: by partition; a
    log can become shorter only when its leader changes."""

    id: str
    leader_epochs: dict[int, int]

    @property
    def partitions(self) -> int:
        return len(self.leader_epochs)


class Answer(NamedTuple):
    """Produce response for one batch: error code (0 if appended), base offset, and the message. With error 44, the base
    offset is the log end offset, or -1."""

    code: int
    base_offset: int
    message: str | None


class Log(Protocol):
    """Kafka through the proxy. All methods raise SinkError; all but `append` raise CannotReach for temporary errors."""

    def identify(self, topic: str) -> TopicIdentity: ...

    def partition_count(self, topic: str) -> int: ...

    def offsets(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Log start and high watermark."""

    def append(self, topic: str, partition: int, batch: bytes) -> Future[Any]:
        """Send one request without retries. The future returns an Answer, or raises Unknown or SinkError."""

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[Any]:
        """The batches (`encoding.Logged`) from the one that contains `start` up to `end`, perhaps more."""

    def last_batch(self, topic: str, partition: int, end: int) -> Any:
        """The batch that ends at `end`, or None."""

    def last_batches(self, topic: str, ends: Mapping[int, int]) -> dict[int, Any]:
        """`last_batch` of several partitions. `ends`: by partition."""


class Clock(Protocol):
    def now(self) -> float: ...
    def time_ms(self) -> int: ...
    def random(self) -> float: ...
    def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        """Wait until one future is done or `seconds` passed."""


class Framing(Protocol):
    """Bytes of Kafka's record format."""

    def build(
        self,
        bodies: pa.Array,
        *,
        commit_tag: bytes,
        expected: int,
        now_ms: int,
        partition: tuple[str, int],
        partition_count: int | None,
    ) -> bytes: ...
