"""What the batches of one Produce request say: each is read once, before the request comes to a door or a gate.

How long that takes is the client's to say: a few kilobytes may unpack to 100 MiB, or to a million records. So little is
read at once (`Readings.here`). The rest is read outside the event loop, by `Readings.elsewhere` in a thread
(`messages.ReadBatches`): decompression, CRC and search let other threads run meanwhile, and what walks over records is
interrupted by the interpreter. Nothing else of the connection happens until then. What takes too long even there is
refused (MESSAGE_TOO_LARGE).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Generic, TypeVar

from fencepost_policies.append import Append, Refusal
from fencepost_policies.partition_count import CountFacts, check_partition_count
from fencepost_policies.partitioners import Partitioner
from fencepost_policies.values import value
from fencepost_proxy.errors import ClientProtocolError, Error, LimitError, ProtocolError
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import (
    RECORDS_MAX,
    BatchScan,
    Effort,
    HeaderNames,
    MalformedBatch,
    require_single_batch,
    scan_batch,
    verify_crc,
)
from fencepost_proxy.wire.compression import UndecodableBatch
from fencepost_proxy.wire.keys import record_keys
from fencepost_proxy.wire.produce import ProduceRequest, parse_produce_request

_T = TypeVar("_T")

#: What is read at once, all batches of a request together: some milliseconds. `ReadBatches` is for more.
HERE_BYTES_MAX = 1_310_720
HERE_STEPS_MAX = 5_000
HERE_BATCHES_MAX = 500
#: What is read of one request at all, in the largest batches that are taken.
_LARGEST_MAX = 4
_KEYS_BYTES_MAX = 32 << 20
#: Placing a key takes as long as reading so many times its bytes.
_KEY_EFFORT = 32
#: Topics and partitions of a request that is read: each takes some time of everybody's, at each step of its way.
PARTITIONS_MAX = 2_048
#: Of a request with more, so many topics are looked at in a row, whether the proxy has to do with one.
TOPICS_AT_ONCE = 1_000
#: In place of the header names that do not matter; no name in UTF-8 has these bytes.
_NO_NAMES = (b"\xff0", b"\xff1")


@value
class _Wanted:
    where: TopicPartition
    records: memoryview | None
    policy: TopicPolicy
    count: int | None


class Readings:
    """`names`, `bytes_max` – as for `scan_batch`. `here_bytes_max` – what may be read at once."""

    def __init__(self, names: HeaderNames, bytes_max: int, here_bytes_max: int = HERE_BYTES_MAX) -> None:
        self._names = names
        self._bytes_max = bytes_max
        self._here_bytes_max = here_bytes_max
        self._requested: list[_Wanted] = []
        self._found: dict[tuple[TopicPartition, bool, bool], BatchScan | Refusal] = {}
        self._placed: dict[tuple[TopicPartition, Partitioner, int], Refusal | None] = {}

    def want(self, where: TopicPartition, records: memoryview | None, policy: TopicPolicy, count: int | None) -> None:
        """`count` – of the topic's partitions, where its keys are to be placed over them; else None."""
        self._requested.append(_Wanted(where, records, policy, count))

    def here(self) -> bool:
        """Reads all that is wanted; False: that takes too long, `elsewhere` is to do it."""
        if len(self._requested) > HERE_BATCHES_MAX:
            return False  # those that cannot be read take no effort, but time
        effort = Effort(self._here_bytes_max, HERE_STEPS_MAX)
        try:
            for each in self._requested:
                self._read(each, effort)
        except LimitError:
            return False
        return True

    def elsewhere(self) -> None:
        """In another thread. Nobody else looks at these readings meanwhile."""
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
        """What the batch says, under this policy."""
        return self._now(lambda effort: self._scan(where, records, policy, effort), where)

    def placed(self, append: Append, records: memoryview, policy: TopicPolicy, count: int) -> Refusal | None:
        """Where its keys do not all belong to its partition, of so many."""
        where = TopicPartition(append.topic, append.partition)
        return self._now(lambda effort: self._place(append, records, policy, count, effort), where)

    def _now(self, read: Callable[[Effort], _T], where: TopicPartition) -> _T | Refusal:
        """It was read already; unless what its topic demands has changed since."""
        try:
            return read(Effort(self._here_bytes_max, HERE_STEPS_MAX))
        except LimitError:
            message = f"TRY_AGAIN topic={where.topic} partition={where.partition}: its topic has changed meanwhile"
            return Refusal(Error.NOT_LEADER_OR_FOLLOWER, "try_again", message)

    def _read(self, requested: _Wanted, effort: Effort) -> None:
        found = self._scan(requested.where, requested.records, requested.policy, effort)
        if isinstance(found, BatchScan) and requested.count is not None and requested.records is not None:
            self._place(append_of(requested.where, found), requested.records, requested.policy, requested.count, effort)

    def _scan(
        self, where: TopicPartition, records: memoryview | None, policy: TopicPolicy, effort: Effort
    ) -> BatchScan | Refusal:
        key = _key(where, policy)
        found = self._found.get(key)
        if found is None:
            names = self._names
            if not policy.is_checked:
                names = HeaderNames(_NO_NAMES[0], names.partition_count, _NO_NAMES[1])
            found = self._found[key] = read_batch(
                where, records, names, carrier_base=policy.carrier_base, bytes_max=self._bytes_max, effort=effort
            )
        return found

    def _place(
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
            refusal = check_partition_count(append, None, CountFacts(policy.count_check, count, partitioner, keys()))
        except MalformedBatch as error:
            refusal = _malformed(where, error)
        self._placed[key] = refusal
        return refusal


class ManyPartitions:
    """A request with more than `PARTITIONS_MAX`: it may pass, if the proxy has nothing to do with its topics.

    `read` is for another thread; `said` tells afterwards. `probed_at` – how many of its topics were looked up.
    """

    __slots__ = ("_error", "_frame", "_request", "probed_at", "topics")

    def __init__(self, frame: memoryview) -> None:
        self._frame = frame
        self._request: ProduceRequest | None = None
        self._error: ProtocolError = ClientProtocolError("a Produce request could not be read")
        self.topics: list[str] = []
        self.probed_at = 0

    def read(self) -> None:
        try:
            request = parse_produce_request(self._frame)
        except ProtocolError as error:
            self._error = error
        else:
            self.topics = [topic.name for topic in request.topics]
            self._request = replace(request, topics=())

    def stated(self) -> ProduceRequest:
        """Without its topics. Raises ClientProtocolError, LimitError for what could not be read."""
        if self._request is None:
            raise self._error
        return self._request


class Work(Generic[_T]):
    """What `make` makes, in another thread by `run`; `result` gives it back afterwards, or raises what `make` raised.

    What `make` refers to is let go by that thread, too: to free a hundred thousand objects takes long.
    """

    __slots__ = ("_error", "_made", "_make")

    def __init__(self, make: Callable[[], _T]) -> None:
        self._make: Callable[[], _T] | None = make
        self._made: list[_T] = []
        self._error: ProtocolError = ClientProtocolError("a large message could not be worked on")

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


def _key(where: TopicPartition, policy: TopicPolicy) -> tuple[TopicPartition, bool, bool]:
    return where, policy.is_checked, policy.carrier_base


def read_batch(
    where: TopicPartition,
    records: memoryview | None,
    names: HeaderNames,
    *,
    carrier_base: bool,
    bytes_max: int,
    effort: Effort | None = None,
) -> BatchScan | Refusal:
    """A batch that cannot be read is refused, not the connection. Raises LimitError where `effort` does not suffice."""
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
            records, names, carrier_base=carrier_base, decompressed_bytes_max=bytes_max, header=header, effort=effort
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
    )
