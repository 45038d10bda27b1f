"""The form of a row: topic configs, the log before, the requests with their answers, and the log afterwards.

Each table file has a list `ROWS`. Three levels run every row: `sequencer.py` (one partition sequencer), `modelled.py`
(the proxy core and modelled brokers) and `real.py` (a proxy process and Kafka). `Row.without` says why a level cannot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from fencepost_proxy.preflight.conformance.driver import DEFAULTS, Settings
from tests.support import raw

SEQUENCER, MODELLED, REAL = "sequencer", "modelled", "real"

OK, CORRUPT_MESSAGE, NOT_LEADER, TIMED_OUT, TOO_LARGE = 0, 2, 6, 7, 10
CLUSTER_AUTHORIZATION_FAILED, INVALID_TIMESTAMP, INVALID_PARTITIONS = 31, 32, 37
OLD_FORMAT, POLICY_VIOLATION, OUT_OF_ORDER, UNKNOWN_PRODUCER_ID, INVALID_RECORD = 43, 44, 45, 59, 87

_CHECK, _COUNT, _LEVEL = (
    f"fencepost.{name}" for name in ("check.expected.offsets", "check.partition.count", "idempotence.level")
)
_AGE = {"fencepost.max.record.age.ms": "60000"}
#: As the state topic has it: a config of a newer version that must be understood.
_NEWER = {"!fencepost.future": "1"}
_BASE = {"fencepost.expected.offsets.source": "base"}
#: Topic configs, by the name that rows use.
CONFIGS: Final[Mapping[str, Mapping[str, str]]] = {
    "plain": {},
    "checked": {_CHECK: "true"},
    "required": {_CHECK: "required"},
    "base": {_CHECK: "true", **_BASE},
    "base-required": {_CHECK: "required", **_BASE},
    "counted": {_COUNT: "true"},
    "count-required": {_COUNT: "required"},
    "checked-and-counted": {_CHECK: "required", _COUNT: "true"},
    "safe": {_LEVEL: "safe"},
    "idempotent": {_LEVEL: "required"},
    "checked-and-safe": {_CHECK: "true", _LEVEL: "safe"},
    "checked-and-idempotent": {_CHECK: "true", _LEVEL: "required"},
    "aged": _AGE,
    "checked-and-aged": {_CHECK: "true", **_AGE},
    "counted-and-aged": {_COUNT: "true", **_AGE},
    "all-checks": {_CHECK: "required", _COUNT: "required", _LEVEL: "required", **_AGE},
    "newer": _NEWER,
    "newer-and-required": {_CHECK: "required", **_NEWER},
    "newer-and-counted": {_COUNT: "true", **_NEWER},
    "newer-and-ignored": {"fencepost.future": "1"},
}

NO_SESSION: Final = {SEQUENCER: "sessions decide this, not sequencers"}
ONLY_MODELLED: Final = {**NO_SESSION, REAL: "supported releases of Kafka never answer this"}

#: The producer id of fences; a producer id that the proxy invents.
SHARED, INVENTED = "shared", 1 << 62
_LONGEST_TEXT = 400


@dataclass(frozen=True)
class Batch:
    """Equal batches are the same bytes: a retry. `producer`: a name, `SHARED`, or an id. `age_ms`: of timestamps that
    the records do not state. `resent`: these are the same in all such batches of a row. `spoil`: changes the finished
    bytes. In header values, `{topic}` is the first topic."""

    records: tuple[raw.Record, ...]
    producer: str | int | None = None
    epoch: int = 0
    sequence: int = 0
    base_offset: int = 0
    codec: int = 0
    transactional: bool = False
    attributes: int = 0
    age_ms: int = 0
    resent: bool = False
    spoil: Callable[[bytes], bytes] | None = None

    @property
    def values(self) -> tuple[bytes, ...]:
        return tuple(record.value for record in self.records)

    def __str__(self) -> str:
        changed = (
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != each.default
        )
        return f"batch({', '.join(changed)})"[:_LONGEST_TEXT]

    def build(self, now_ms: int, producer_id: Callable[[str | int], tuple[int, int]], topic: str) -> bytes:
        producer = None
        if self.producer is not None:
            number, epoch = producer_id(self.producer)
            producer = raw.Producer(number, epoch + self.epoch, self.sequence)
        built = raw.batch(
            *(_placed(record, now_ms - self.age_ms, topic.encode()) for record in self.records),
            producer=producer,
            base_offset=self.base_offset,
            codec=self.codec,
            transactional=self.transactional,
            attributes=self.attributes,
        )
        return built if self.spoil is None else self.spoil(built)


def _placed(record: raw.Record, now_ms: int, topic: bytes) -> raw.Record:
    at = now_ms if record.timestamp_ms is None else record.timestamp_ms
    expected = record.expected
    if isinstance(expected, bytes):
        expected = expected.replace(b"{topic}", topic)
    headers = [(name, value and value.replace(b"{topic}", topic)) for name, value in record.headers]
    return raw.Record(record.value, expected, headers, record.key, at)


def batch(
    *records: raw.Record | bytes,
    expected: int | bytes | None = None,
    write_id: bytes | None = None,
    count: int | bytes | None = None,
    **more: object,
) -> Batch:
    """`expected`, `write_id` and `count` become headers of the first record."""
    first, *rest = (each if isinstance(each, raw.Record) else raw.Record(each) for each in records)
    headers = list(first.headers)
    if write_id is not None:
        headers.append(("fencepost-write-id", write_id))
    if count is not None:
        headers.append(("fencepost-partition-count", b"%d" % count if isinstance(count, int) else count))
    stated = first.expected if expected is None else expected
    first = raw.Record(first.value, stated, tuple(headers), first.key, first.timestamp_ms)
    return Batch((first, *rest), **more)  # type: ignore[arg-type]


# --- answers ----------------------------------------------------------------------------------------------------------


#: Values and codec of each batch, by base offset.
Log = dict[int, tuple[tuple[bytes, ...], int]]


class Reply(NamedTuple):
    """One partition's answer. In a message, `{where}` is topic and partition, `{topic}` the first topic; `…` at its
    end: any continuation. `log_start` is not compared at the sequencer level, where the session has yet to add it."""

    code: int
    base_offset: int = -1
    message: str | None = None
    log_start: int = 0

    @property
    def appended(self) -> bool:
        return self.code == OK or (self.message or "").startswith("OFFSET_VIOLATION")

    def matches(self, code: int, base_offset: int, message: str | None, topic: str, where: str) -> bool:
        if (code, base_offset) != self[:2]:
            return False
        if self.message is None or message is None:
            return message is self.message
        expected = self.message.replace("{where}", where).replace("{topic}", topic)
        return message.startswith(expected[:-1]) if expected.endswith("…") else message == expected


def appended(at: int) -> Reply:
    return Reply(OK, at)


def mismatch(expected: int, actual: int, more: str = "", *, base_offset: int | None = None) -> Reply:
    """`base_offset`: the log end, if it is not `actual`."""
    at = actual if base_offset is None else base_offset
    return Reply(POLICY_VIOLATION, at, f"OFFSET_MISMATCH {{where}} expected={expected} actual={actual}{more}")


def refused(code: int, message: str, log_start: int = 0) -> Reply:
    """`message`: its beginning. `log_start`: -1 where the client has not proved WRITE, or Kafka sends none either."""
    return Reply(code, -1, f"{message}…", log_start)


def from_kafka(code: int) -> Reply:
    return Reply(code)


# --- steps ------------------------------------------------------------------------------------------------------------


#: Partition 0 of a row's second topic.
SECOND: Final = -1


class Part(NamedTuple):
    batch: Batch
    reply: Reply | None = None
    partition: int = 0


@dataclass(frozen=True)
class Send:
    """A Produce request. With `closes`, parts have no reply. With acks=0, a reply only says where it is appended.

    `via`: name of the connection; `OTHER`: one to another proxy process. `count`, `level`: contents of the tagged
    fields 253 and 254. `again`: its records are in the log, in other batches.
    """

    parts: tuple[Part, ...]
    closes: bool = False
    via: str = "first"
    acks: int = -1
    version: int = 9
    timeout_ms: int = 10_000
    transactional_id: str | None = None
    count: bytes | None = None
    level: bytes | None = None
    again: bool = False


OTHER: Final = "other process"


def send(records: Batch, reply: Reply | None = None, *, partition: int = 0, **more: object) -> Send:
    return Send((Part(records, reply, partition),), **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pipelined:
    """All requests leave before the first answer. One connection."""

    sends: tuple[Send, ...]


@dataclass(frozen=True)
class Bypass:
    """An append directly at Kafka."""

    batch: Batch
    at: int


@dataclass(frozen=True)
class DeleteRecords:
    before: int


@dataclass(frozen=True)
class Faulty:
    """Kafka appends the batch, but its response is lost with the broker connection, or delayed until the client has an
    answer. The first value is in no other request."""

    send: Send
    response: Literal["lost", "late"]


@dataclass(frozen=True)
class Begin:
    """Begin a transaction on partition 0. The transactional id is the producer's name."""

    producer: str


@dataclass(frozen=True)
class End:
    """Commit or abort, and wait until the marker is at this offset."""

    producer: str
    marker_at: int
    commit: bool = True


Step = Send | Pipelined | Bypass | DeleteRecords | Faulty | Begin | End


@dataclass(frozen=True)
class Row:
    """`second`: configs of a second topic. `length`: records in partition 0 beforehand, all `old`, in one batch.
    `scope`: `refusal_scope`. `without`: levels that cannot run it, with the reason.

    Afterwards, the logs have exactly the batches that are appended by their answers."""

    name: str
    topic: str
    steps: tuple[Step, ...]
    length: int = 0
    partitions: int = 1
    second: str | None = None
    settings: Settings = DEFAULTS
    old_format: bool = False
    scope: str = "partition"
    without: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def sends(self) -> list[Send]:
        groups = [step.sends if isinstance(step, Pipelined) else (step,) for step in self.steps]
        steps = [each.send if isinstance(each, Faulty) else each for group in groups for each in group]
        return [each for each in steps if isinstance(each, Send)]

    @property
    def logs(self) -> dict[int, Log]:
        """The logs afterwards, by partition: values and codec of each batch, by base offset."""
        logs: dict[int, Log] = {partition: {} for partition in range(self.partitions)}
        if self.second is not None:
            logs[SECOND] = {}
        if self.length:
            logs[0][0] = (b"old",) * self.length, 0
        first = [each for each in self.sends if not each.again]
        for part in (part for each in first for part in each.parts if part.reply is not None):
            if part.reply.appended:
                logs[part.partition][part.reply.base_offset] = part.batch.values, part.batch.codec
        for step in self.steps:
            if isinstance(step, Bypass):
                logs[0][step.at] = step.batch.values, step.batch.codec
        return logs


def row(name: str, topic: str, *steps: Step, **more: object) -> Row:
    return Row(name, topic, steps, **more)  # type: ignore[arg-type]


def filling(row: Row) -> Batch:
    """The records that the log has beforehand, with everything that some topic requires."""
    first = raw.Record(b"old", 0, (("fencepost-partition-count", b"%d" % row.partitions),))
    return Batch((first, *[raw.Record(b"old")] * (row.length - 1)), producer="filling")


# --- running a row ----------------------------------------------------------------------------------------------------


class Level:
    """What a level shares: built batches, and the comparison of answers and logs."""

    def __init__(self, row: Row, topic: str) -> None:
        self.row = row
        self.topic = topic
        self.second_topic = f"{topic}-second"
        self._built: dict[Batch, bytes] = {}
        self._ids: dict[str | int, tuple[int, int]] = {}
        self.log_start = 0
        self._resent_ms = 0

    def place(self, partition: int) -> tuple[str, int]:
        return (self.second_topic, 0) if partition == SECOND else (self.topic, partition)

    def now_ms(self) -> int:
        return int(time.time() * 1000)

    def new_producer(self) -> tuple[int, int]:
        raise NotImplementedError

    def shared_producer(self) -> tuple[int, int]:
        raise NotImplementedError

    def send(self, sends: tuple[Send, ...]) -> None:
        """All requests, then check all answers."""
        raise NotImplementedError

    def bypass(self, records: bytes) -> int:
        """Append directly at Kafka and return the base offset."""
        raise NotImplementedError

    def delete_records(self, before: int) -> None:
        raise NotImplementedError

    def run(self, step: Step) -> None:
        match step:
            case Send():
                self.send((step,))
            case Pipelined(sends):
                self.send(sends)
            case Bypass(records, at):
                assert self.bypass(self.bytes_of(records)) == at
            case DeleteRecords(before):
                self.log_start = before
                self.delete_records(before)
            case Faulty(request):
                with self.fault(step):
                    self.send((request,))
            case Begin(producer):
                self._ids[producer] = self.begin(producer)
            case End(producer, marker_at, commit):
                self.end(producer, commit=commit)
                self.await_end(marker_at + 1)

    def fault(self, faulty: Faulty) -> AbstractContextManager[object]:
        raise NotImplementedError

    def begin(self, producer: str) -> tuple[int, int]:
        raise NotImplementedError

    def end(self, producer: str, *, commit: bool) -> None:
        raise NotImplementedError

    def await_end(self, log_end: int) -> None:
        raise NotImplementedError

    def stored(self, partition: int) -> list[raw.Logged]:
        """From `log_start` on."""
        raise NotImplementedError

    def bytes_of(self, records: Batch) -> bytes:
        if records not in self._built:
            now_ms = self.now_ms()
            self._resent_ms = self._resent_ms or now_ms
            at_ms = self._resent_ms if records.resent else now_ms
            self._built[records] = records.build(at_ms, self._producer_id, self.topic)
        return self._built[records]

    def _producer_id(self, name: str | int) -> tuple[int, int]:
        if isinstance(name, int):
            return name, 0
        if name == SHARED:
            return self.shared_producer()
        if name not in self._ids:
            self._ids[name] = self.new_producer()
        return self._ids[name]

    def check(self, part: Part, answer: tuple[int, int, str | None, int | None]) -> None:
        """`answer`: code, base offset, message, log start (None: this level does not know it)."""
        code, base_offset, message, log_start = answer
        where = "topic={} partition={}".format(*self.place(part.partition))
        assert part.reply is not None, f"row {self.row.name}: {part.batch} got an answer: {answer}"
        expected = part.reply
        if not expected.matches(code, base_offset, message, self.topic, where) or log_start not in (
            None,
            expected.log_start,
        ):
            got = Reply(code, base_offset, message, -1 if log_start is None else log_start)
            raise AssertionError(f"row {self.row.name}\n  append {part.batch}\n  expected {expected}\n  got      {got}")

    def run_all(self) -> None:
        for step in self.row.steps:
            self.run(step)
        for partition, log in self.row.logs.items():
            gzip = self.row.settings.gzip
            batches = (each for each in self.stored(partition) if not each.is_control)
            stored = {b.base_offset: (b.values, 0 if gzip else b.codec) for b in batches}
            expected = {
                at: (values, 0 if gzip else codec) for at, (values, codec) in log.items() if at >= self.log_start
            }
            assert stored == expected, f"row {self.row.name}: partition {partition} has {stored}, not {expected}"
