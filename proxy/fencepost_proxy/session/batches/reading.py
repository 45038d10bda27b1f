"""The batches of one Produce request: each is parsed once, before the request reaches a barrier or a sequencer.

How long that takes depends on the client: a few kilobytes may decompress to 100 MiB, or to a million records. So only a
limited amount is parsed in the event loop (`Readings.here`), and the rest by `Readings.elsewhere` in a thread
(`messages.ReadBatches`): decompression, CRC and search release the interpreter lock, and the interpreter interrupts the
walk over records. Until then the connection does nothing else. A batch that takes too long even there is refused
(MESSAGE_TOO_LARGE).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar
from uuid import UUID

from fencepost_policies.append import Append, Refusal
from fencepost_policies.fields import Field
from fencepost_policies.idempotence_level import MADE_UP_IDS_FROM, Level, check_level
from fencepost_policies.partition_count import PartitionFacts, check_count
from fencepost_policies.partitioners import Partitioner
from fencepost_policies.values import value
from fencepost_proxy.errors import ClientProtocolError, Error, LimitError, ProtocolError
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import require_single_batch, verify_crc
from fencepost_proxy.wire.batch_scan import BatchScan, HeaderNames, scan_batch
from fencepost_proxy.wire.compression import MalformedBatch, UndecodableBatch
from fencepost_proxy.wire.keys import record_keys
from fencepost_proxy.wire.produce import ProduceRequest, parse_produce_request
from fencepost_proxy.wire.records import RECORDS_MAX, Effort

_T = TypeVar("_T")
#: A batch, and what was read of it.
_Key = tuple[TopicPartition, bool, bool, tuple[Field[Any], ...]]

#: Limits for all batches of a request, parsed in the event loop: some milliseconds. Above them, `ReadBatches` is used.
HERE_BYTES_MAX = 1_310_720
HERE_STEPS_MAX = 5_000
HERE_BATCHES_MAX = 500
#: The limit for one request in a thread, in multiples of the largest accepted batch.
_LARGEST_MAX = 4
_KEYS_BYTES_MAX = 32 << 20
#: To compute a key's partition takes as long as to read this many times its bytes.
_KEY_EFFORT = 32
#: Topics and partitions of a request that is parsed: each takes some time at every step.
PARTITIONS_MAX = 2_048
#: How many topics of a larger request are looked up without a pause.
TOPICS_AT_ONCE = 1_000
#: Replace the header names that do not matter; no UTF-8 name has these bytes.
_NO_NAMES = (b"\xff0", b"\xff1")


@value
class _Requested:
    where: TopicPartition
    records: memoryview | None
    policy: TopicPolicy
    count: int | None


class Readings:
    """`names`, `bytes_max` – as for `scan_batch`. `here_bytes_max` – the limit in the event loop."""

    def __init__(self, names: HeaderNames, bytes_max: int, here_bytes_max: int = HERE_BYTES_MAX) -> None:
        self._names = names
        self._bytes_max = bytes_max
        self._here_bytes_max = here_bytes_max
        self._requested: list[_Requested] = []
        #: Batches with headers that do not count there, and what they are bound to.
        self.copied: list[tuple[TopicPartition, str]] = []
        self._found: dict[_Key, BatchScan | Refusal] = {}
        self._placed: dict[tuple[TopicPartition, Partitioner, int], Refusal | None] = {}

    def add(self, where: TopicPartition, records: memoryview | None, policy: TopicPolicy, count: int | None) -> None:
        """Add a batch. `count` – the topic's partition count if the partitions of its keys are to be checked."""
        self._requested.append(_Requested(where, records, policy, count))

    def here(self) -> bool:
        """Read all batches added; False: that takes too long, use `elsewhere`."""
        if len(self._requested) > HERE_BATCHES_MAX:
            return False  # unreadable ones use up no effort, but time
        effort = Effort(self._here_bytes_max, HERE_STEPS_MAX)
        try:
            for each in self._requested:
                self._read(each, effort)
        except LimitError:
            return False
        return True

    def elsewhere(self) -> None:
        """The same in another thread, the only one that uses these readings meanwhile."""
        effort = Effort(_LARGEST_MAX * self._bytes_max, _LARGEST_MAX * RECORDS_MAX)
        for each in self._requested:
            try:
                self._read(each, effort)
            except LimitError as limit:
                refusal = _too_large(each.where, limit)
                self._found.setdefault(_key(each.where, each.policy), refusal)
                if each.count is not None and each.policy.partitioner is not None:
                    self._placed.setdefault((each.where, each.policy.partitioner, each.count), refusal)

    def of(self, where: TopicPartition, records: memoryview | None, policy: TopicPolicy) -> BatchScan | Refusal:
        """The parsed batch, under this policy."""
        found = self._found.get(_key(where, policy))
        return self._now(lambda effort: self._scan(where, records, policy, effort), where) if found is None else found

    def placed(self, append: Append, records: memoryview, policy: TopicPolicy, count: int) -> Refusal | None:
        """A refusal if some of its keys do not belong to its partition, of `count`."""
        where = TopicPartition(append.topic, append.partition)
        return self._now(lambda effort: self._check_placement(append, records, policy, count, effort), where)

    def _now(self, read: Callable[[Effort], _T], where: TopicPartition) -> _T | Refusal:
        """It was read before, unless the requirements of its topic have changed since."""
        try:
            return read(Effort(self._here_bytes_max, HERE_STEPS_MAX))
        except LimitError:
            message = f"TRY_AGAIN topic={where.topic} partition={where.partition}: the topic's configs have changed"
            return Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message)

    def _read(self, requested: _Requested, effort: Effort) -> None:
        found = self._scan(requested.where, requested.records, requested.policy, effort)
        if isinstance(found, BatchScan) and requested.count is not None and requested.records is not None:
            self._check_placement(
                append_of(requested.where, found), requested.records, requested.policy, requested.count, effort
            )

    def _scan(
        self, where: TopicPartition, records: memoryview | None, policy: TopicPolicy, effort: Effort
    ) -> BatchScan | Refusal:
        key = _key(where, policy)
        found = self._found.get(key)
        if found is None:
            names = self._names
            if not policy.reads_headers:
                names = HeaderNames(_NO_NAMES[0], names.partition_count, _NO_NAMES[1], cluster_id=names.cluster_id)
            found = self._found[key] = read_batch(
                where,
                records,
                names,
                source_is_base=policy.source_is_base,
                fields=policy.fields,
                bytes_max=self._bytes_max,
                effort=effort,
            )
            if isinstance(found, BatchScan) and found.copied_from is not None:
                self.copied.append((where, found.copied_from))
        return found

    def _check_placement(
        self,
        append: Append,
        records: memoryview,
        policy: TopicPolicy,
        count: int,
        effort: Effort,
    ) -> Refusal | None:
        where, partitioner = TopicPartition(append.topic, append.partition), policy.partitioner
        assert partitioner is not None
        key = (where, partitioner, count)
        if key in self._placed:
            return self._placed[key]

        def keys() -> Iterator[bytes | None]:
            for each in record_keys(records, decompressed_bytes_max=limit):
                effort.take(_KEY_EFFORT * len(each or b""), 1)
                yield each

        limit = min(self._bytes_max, effort.bytes_left, _KEYS_BYTES_MAX)
        try:
            effort.take(len(records), 0)
            refusal = check_count(append, policy.count_check, PartitionFacts(count, None, partitioner, keys()))
        except MalformedBatch as error:
            refusal = _malformed(where, error)
        self._placed[key] = refusal
        return refusal


class ManyPartitions:
    """A request with more than `PARTITIONS_MAX`: it is relayed if the proxy checks none of its topics.

    `read` runs in another thread; `stated` returns the result afterwards. From v13 on it has `topic_ids` instead of
    `topics`.
    """

    __slots__ = ("_error", "_frame", "_request", "topic_ids", "topics")

    def __init__(self, frame: memoryview) -> None:
        self._frame = frame
        self._request: ProduceRequest | None = None
        self._error: ProtocolError = ClientProtocolError("a Produce request could not be read")
        self.topics: list[str] = []
        self.topic_ids: list[UUID] = []

    def read(self) -> None:
        try:
            request = parse_produce_request(self._frame)
        except ProtocolError as error:
            self._error = error
        else:
            self.topics = [topic.name for topic in request.topics if topic.topic_id is None]
            self.topic_ids = [topic.topic_id for topic in request.topics if topic.topic_id is not None]
            self._request = replace(request, topics=())

    def stated(self) -> ProduceRequest:
        """The request without its topics. Raises ClientProtocolError, LimitError for an unreadable one."""
        if self._request is None:
            raise self._error
        return self._request


class Work(Generic[_T]):
    """Runs `make` in another thread, by `run`; afterwards `result` returns its result, or raises its error.

    The thread also drops what `make` refers to: to free a hundred thousand objects takes long.
    """

    __slots__ = ("_error", "_made", "_make")

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make: Callable[[], _T] | None = make
        self._made: list[_T] = []
        self._error: ProtocolError = ClientProtocolError("a large message could not be processed")

    def run(self) -> None:
        make, self._make = self._make, None
        assert make is not None
        try:
            self._made = [make()]
        except ProtocolError as error:
            self._error = error.with_traceback(None)

    def result(self) -> _T:
        if not self._made:
            raise self._error
        return self._made[0]


def _key(where: TopicPartition, policy: TopicPolicy) -> _Key:
    return where, policy.reads_headers, policy.source_is_base, policy.fields


def read_batch(
    where: TopicPartition,
    records: memoryview | None,
    names: HeaderNames,
    *,
    source_is_base: bool,
    fields: Sequence[Field[Any]] = (),
    bytes_max: int,
    effort: Effort | None = None,
) -> BatchScan | Refusal:
    """An unreadable batch is refused without ending the connection. Raises LimitError if `effort` is used up."""
    if records is None:
        message = f"NO_RECORDS topic={where.topic} partition={where.partition}: no record batch for this partition"
        return Refusal(Error.INVALID_RECORD, "no_records", message)
    try:
        header = require_single_batch(records)
        if effort is not None and len(records) > effort.bytes_left:
            raise LimitError("its CRC takes too long")
        if not verify_crc(records):
            message = f"CORRUPT topic={where.topic} partition={where.partition}: the batch does not match its CRC"
            return Refusal(Error.CORRUPT_MESSAGE, "corrupt", message)
        return scan_batch(
            records,
            names,
            where,
            source_is_base=source_is_base,
            fields=fields,
            decompressed_bytes_max=bytes_max,
            header=header,
            effort=effort,
        )
    except LimitError as limit:
        if effort is not None:
            raise
        return _too_large(where, limit)
    except ProtocolError as error:
        return _malformed(where, error)


def _too_large(where: TopicPartition, limit: LimitError) -> Refusal:
    message = f"TOO_LARGE topic={where.topic} partition={where.partition}: {limit}"
    return Refusal(Error.MESSAGE_TOO_LARGE, "too_large", message)


def _malformed(where: TopicPartition, error: ProtocolError) -> Refusal:
    message = f"MALFORMED topic={where.topic} partition={where.partition}: {error}"
    # As Kafka answers.
    code = Error.UNKNOWN_SERVER_ERROR if isinstance(error, UndecodableBatch) else Error.INVALID_RECORD
    return Refusal(code, "malformed", message)


def append_of(partition: TopicPartition, scan: BatchScan) -> Append:
    header = scan.header
    return Append(
        topic=partition.topic,
        partition=partition.partition,
        record_count=header.record_count,
        expected_base_offset=scan.expected_base_offset,
        contradiction=scan.contradiction,
        unreadable=scan.unreadable,
        partition_count=scan.partition_count,
        write_id=scan.write_id,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        transactional=header.is_transactional,
        max_timestamp_ms=scan.max_timestamp_ms,
        copied_from=scan.copied_from,
        fields=scan.fields,
    )


def checked_append(
    partition: TopicPartition, scan: BatchScan | Refusal, shared_producer_ids: frozenset[int]
) -> Append | Refusal:
    """What a batch says; a refusal if clients may not append it to a checked topic."""
    if isinstance(scan, Refusal):
        return scan
    append, header = append_of(partition, scan), scan.header
    if header.is_control:
        message = f"CONTROL_BATCH topic={partition.topic} partition={partition.partition}: only brokers write these"
        return Refusal(Error.INVALID_RECORD, "control_batch", message)
    if header.producer_id >= MADE_UP_IDS_FROM:
        not_permitted = check_level(append, Level.OFF)
        assert not_permitted is not None
        return not_permitted
    if header.producer_id in shared_producer_ids:
        name = f"topic={partition.topic} partition={partition.partition}"
        message = f"PRODUCER_ID_TAKEN {name}: producer id {header.producer_id} is the proxy's own"
        return Refusal(Error.POLICY_VIOLATION, "shared_producer_id", message)
    return append
