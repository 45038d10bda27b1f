"""What cases are made of: their registration, batches, expected answers and checks.

Cases state error codes, offsets and producer states exactly: the simulation is worth nothing where model and Kafka
differ.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from fencepost_proxy.errors import FencepostError
from fencepost_proxy.preflight.conformance.batches import Headers, Producer, make_batch
from fencepost_proxy.preflight.conformance.driver import Answer, Kafka, Topic

CORRUPT, UNKNOWN_TOPIC_ID, NOT_LEADER, TIMED_OUT, TOO_LARGE = 2, 100, 6, 7, 10
NOT_ENOUGH_REPLICAS, DENIED, INVALID_TIMESTAMP = 19, 29, 32
OUT_OF_ORDER, WRONG_EPOCH, INVALID_TXN_STATE, INVALID_RECORD, PRODUCER_FENCED = 45, 47, 48, 87, 90
LAST_SEQUENCE: Final = (1 << 31) - 1
DAY_MS: Final = 86_400_000


class Promise(StrEnum):
    """What users rely on, by its name in the contract."""

    REQUIRED = "required"
    TRUE = "true"
    TRANSACTIONS = "transactions"
    SPARK = "Spark sink"
    CLAIMS = "claims"


class Control(StrEnum):
    """What a case does beyond requests of clients. `fencepost verify-broker` leaves such cases out."""

    STOPS = "broker kills, restarts and pauses"
    EXPIRY = "expiry of producers"
    ACLS = "changes of ACLs"


#: Every promise depends on fenced appends.
FENCES: Final = frozenset(Promise)
MARKERS: Final = frozenset({Promise.TRUE, Promise.TRANSACTIONS})
TRANSACTIONS: Final = frozenset({Promise.TRANSACTIONS})
CLAIMS: Final = frozenset({Promise.CLAIMS})
#: The proxy allows for this behavior: a broker that differs breaks no promise.
ALLOWED_FOR: Final[frozenset[Promise]] = frozenset()


@dataclass(frozen=True)
class Case:
    """`promises`: those that need this fact. `brokers`: replicas of its topic. `optional`: not all releases have it."""

    run: Callable[[Kafka], None]
    fact: str
    promises: frozenset[Promise]
    brokers: int
    control: Control | None
    optional: bool

    @property
    def name(self) -> str:
        return self.run.__name__


CASES: list[Case] = []
_Run = Callable[[Kafka], None]


def case(
    fact: str,
    promises: frozenset[Promise] = FENCES,
    *,
    brokers: int = 1,
    control: Control | None = None,
    optional: bool = False,
) -> Callable[[_Run], _Run]:
    """Register a case."""

    def register(run: _Run) -> _Run:
        CASES.append(Case(run, fact, promises, brokers, control, optional))
        return run

    return register


# --- checks -----------------------------------------------------------------------------------------------------------


class Deviation(AssertionError):
    """The cluster does not behave as a case states."""


class NotTested(FencepostError):
    """A case cannot run here; the text says why."""


class NotAvailable(NotTested):
    """The cluster lacks a feature."""


def same(actual: object, expected: object, why: str = "") -> None:
    if actual != expected:
        raise Deviation(f"{_shown(actual)} instead of {_shown(expected)}" + (f" ({why})" if why else ""))


def holds(condition: bool, stated: str) -> None:
    if not condition:
        raise Deviation(f"not true: {stated}")


def _shown(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Answer):
        return ", ".join(map(str, value))
    return str(value) if isinstance(value, Answer) else repr(value)


# --- batches and answers ----------------------------------------------------------------------------------------------


def fenced(
    kafka: Kafka,
    sequence: int,
    *values: bytes,
    epoch: int = 0,
    producer_id: int | None = None,
    timestamp_ms: int | None = None,
    transactional: bool = False,
    base_offset: int = 0,
    attributes: int = 0,
    headers: Headers = (),
) -> bytes:
    return make_batch(
        values or (b"%d" % sequence,),
        timestamp_ms=kafka.now_ms() if timestamp_ms is None else timestamp_ms,
        producer=Producer(kafka.shared_id if producer_id is None else producer_id, epoch, sequence),
        transactional=transactional,
        base_offset=base_offset,
        attributes=attributes,
        headers=headers,
    )


def unconditional(kafka: Kafka, *values: bytes) -> bytes:
    return make_batch(values, timestamp_ms=kafka.now_ms())


def appended(base_offset: int, log_start_offset: int = 0) -> Answer:
    """A new append, with CreateTime."""
    return Answer(0, base_offset, -1, log_start_offset)


def duplicate(base_offset: int, first: bytes, log_start_offset: int = 0) -> Answer:
    """Distinguished by the timestamp, which is that of the existing batch."""
    return Answer(0, base_offset, timestamp_of(first), log_start_offset)


def refused(error_code: int, log_start_offset: int = -1) -> Answer:
    return Answer(error_code, -1, -1, log_start_offset)


def timestamp_of(batch: bytes) -> int:
    """The newest timestamp of its records."""
    return int(struct.unpack_from(">q", batch, 35)[0])


def next_sequence(kafka: Kafka, topic: Topic, node: int | None = None) -> tuple[int, int] | None:
    """(epoch, last sequence) of the fences."""
    known = topic.producers(node).get(kafka.shared_id)
    return None if known is None else (known.epoch, known.last_sequence)


def values(topic: Topic) -> list[bytes | None]:
    return [value for batch in topic.read() for value in batch.values]
