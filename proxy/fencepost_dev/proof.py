"""Verifies that a topic contains each of a given set of rows exactly once, and nothing else.

Independent of the proxy, Spark and the job: a consumer reads from Kafka, and two multisets of hashes are compared.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

from aiokafka import AIOKafkaConsumer, TopicPartition

from fencepost_proxy.errors import FencepostError

#: Size of a row's hash: 128 bits make collisions negligible.
HASH_BYTES = 16
READ_TIMEOUT_SECONDS = 30.0

#: Decodes a record's value into the fields of a row; None if it is not a row.
Decode = Callable[[bytes], "Iterable[str] | None"]
#: Receives the number of records read.
Progress = Callable[[int], None]


class ProofError(FencepostError):
    """The topic could not be read to its end."""


@dataclass(frozen=True, slots=True)
class PartitionRead:
    """`log_start` and `log_end` as reported by the broker. `gaps`: number of offsets between them without a record."""

    partition: int
    log_start: int
    log_end: int
    records: int
    gaps: int


@dataclass(frozen=True, slots=True)
class Proof:
    """The topic's content compared with the expected rows. Equal rows are counted."""

    partitions: tuple[PartitionRead, ...]
    rows_expected: int
    rows_once: int
    rows_missing: int
    rows_too_often: int
    records_unknown: int

    @property
    def records(self) -> int:
        return sum(observed.records for observed in self.partitions)

    @property
    def gaps(self) -> int:
        return sum(observed.gaps for observed in self.partitions)

    @property
    def holds(self) -> bool:
        """Whether the topic has each row once, nothing else, and no gap from offset 0 on."""
        return (
            self.rows_once == self.rows_expected == self.records
            and not (self.rows_missing or self.rows_too_often or self.records_unknown or self.gaps)
            and all(observed.log_start == 0 for observed in self.partitions)
        )


def row_hash(fields: Iterable[str]) -> bytes:
    """Hash of a row's fields in order. It includes their lengths: ("ab", "c") differs from ("a", "bc")."""
    texts = list(fields)
    framed = ",".join(map(str, map(len, texts))) + ":" + "".join(texts)
    return blake2b(framed.encode(), digest_size=HASH_BYTES).digest()


def read_back(bootstrap: str, topic: str, expected: Counter[bytes], decode: Decode, progress: Progress) -> Proof:
    """Compares all records of `topic` with `expected`: `row_hash` of each row → expected number.

    `bootstrap`: the brokers, not the proxy. Raises `ProofError` if reading stalls.
    """
    return asyncio.run(_read_back(bootstrap, topic, expected, decode, progress))


async def _read_back(bootstrap: str, topic: str, expected: Counter[bytes], decode: Decode, progress: Progress) -> Proof:
    consumer = AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        isolation_level="read_uncommitted",
        check_crcs=True,
    )
    await consumer.start()
    try:
        partitions = sorted(consumer.assignment())
        begins = await consumer.beginning_offsets(partitions)
        ends = await consumer.end_offsets(partitions)
        found: Counter[bytes] = Counter()
        counts: Counter[TopicPartition] = Counter()
        unknown = 0
        last = time.monotonic()
        while any([await consumer.position(at) < ends[at] for at in partitions]):
            batches = await consumer.getmany(timeout_ms=500, max_records=20_000)
            for at, records in batches.items():
                last = time.monotonic()
                for record in records:
                    if record.offset < ends[at]:
                        counts[at] += 1
                        row = decode(record.value or b"")
                        if row is None:
                            unknown += 1
                        else:
                            found[row_hash(row)] += 1
            progress(counts.total())
            if time.monotonic() - last > READ_TIMEOUT_SECONDS:
                raise ProofError(f"{bootstrap} returned {counts.total()} records of {topic!r}, then timed out")
    finally:
        await consumer.stop()
    return _compare(
        tuple(
            PartitionRead(at.partition, begins[at], ends[at], counts[at], ends[at] - begins[at] - counts[at])
            for at in partitions
        ),
        expected,
        found,
        unknown,
    )


def _compare(
    partitions: tuple[PartitionRead, ...], expected: Counter[bytes], found: Counter[bytes], unknown: int
) -> Proof:
    foreign = sum(count for row, count in found.items() if row not in expected)
    return Proof(
        partitions=partitions,
        rows_expected=expected.total(),
        rows_once=(expected & found).total(),
        rows_missing=(expected - found).total(),
        rows_too_often=(found - expected).total() - foreign,
        records_unknown=unknown + foreign,
    )
