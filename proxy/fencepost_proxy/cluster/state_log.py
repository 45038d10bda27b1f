"""Reads the state topic's records into a view, from the first one on: for proxies, and once for other commands."""

from __future__ import annotations

from typing import Final, NamedTuple
from uuid import UUID

from fencepost_proxy.cluster.broker import BrokerConnection, Call, UpstreamUnavailable, deadline_in
from fencepost_proxy.cluster.fetches import fetch_call, fetched_partition
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.errors import Error, StateError, UpstreamProtocolError, error_name
from fencepost_proxy.topics import hints
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.types import Offset, TopicPartition
from fencepost_proxy.wire.batch import split_batches
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.state_records import StateRecord
from fencepost_proxy.wire.uncompressed_batch import read_uncompressed_records

_FETCH_BYTES_MAX: Final = 1_048_576


class Applied(NamedTuple):
    """`skipped`: why records were skipped. `high_watermark`: of the response."""

    records: list[StateRecord]
    skipped: list[str]
    high_watermark: Offset


class StateLog:
    """`position`: the next offset to read."""

    def __init__(self, name: str, cluster_id: str) -> None:
        self.tp = TopicPartition(name, 0)
        self.view = StateView(cluster_id)
        self.position = Offset(0)

    def fetch_call(
        self, connection: BrokerConnection, topic_id: UUID | None, leader: Leader, *, wait_max_ms: int
    ) -> Call:
        """`connection`: to the leader. Pass the response to `apply`."""
        return fetch_call(
            connection,
            self.tp,
            topic_id,
            self.position,
            leader_epoch=leader.leader_epoch,
            bytes_max=_FETCH_BYTES_MAX,
            wait_max_ms=wait_max_ms,
            bytes_min=1,
        )

    def apply(self, answer: Message) -> Applied:
        """Raises `UpstreamUnavailable`, and `StateError` if the topic is unusable for a proxy."""
        name, partition = self.tp.topic, fetched_partition(answer)
        if partition.error_code == Error.OFFSET_OUT_OF_RANGE or partition.log_start_offset > 0:
            raise StateError(
                f"{name} lost records (read up to offset {self.position}, it starts at {partition.log_start_offset}): "
                "retention, DeleteRecords or an unclean leader election removed virtual configs or the producer id. "
                "Decide which topics need checks; then stop every proxy, delete this topic, and start the proxies",
                hint=hints.RECREATE,
            )
        if partition.error_code:
            code = partition.error_code
            raise UpstreamUnavailable(f"Fetch returned {error_name(code)}", error_code=code)
        applied = Applied([], [], Offset(partition.high_watermark))
        try:
            for header, batch in split_batches(memoryview(partition.records or b"")):
                for record in () if header.is_control else read_uncompressed_records(header, batch):
                    if record.offset >= self.position:
                        applied.records.append(StateRecord(record.key or b"", record.value))
                        if (skipped := self.view.apply(*record)) is not None:
                            applied.skipped.append(skipped)
                self.position = Offset(max(self.position, header.base_offset + header.last_offset_delta + 1))
        except (MalformedBatch, UpstreamProtocolError) as error:
            raise StateError(
                f"{name} cannot be read at offset {self.position}: {error}. Its compression.type must be uncompressed",
                hint=hints.UNREADABLE,
            ) from error
        return applied


async def read_stored(
    connection: BrokerConnection,
    leader: Leader,
    topic: str,
    topic_id: UUID,
    cluster_id: str,
    *,
    timeout_seconds: float,
) -> StateView:
    """Read up to the high watermark of the first response; write nothing. `timeout_seconds`: per request.

    Raises as `StateLog.apply`.
    """
    log = StateLog(topic, cluster_id)
    end = None
    while end is None or log.position < end:
        call, before = log.fetch_call(connection, topic_id, leader, wait_max_ms=0), log.position
        answer = await connection.request(*call, deadline=deadline_in(timeout_seconds))
        high_watermark = log.apply(answer).high_watermark
        end = high_watermark if end is None else end
        if log.position == before and before < end:
            raise UpstreamUnavailable(f"{topic}: no records returned at offset {before}, but the log ends at {end}")
    return log.view
