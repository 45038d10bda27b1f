"""Reads the state topic once, for commands that are no proxy. Writes nothing and takes no lease."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from fencepost_proxy.cluster.broker import BrokerConnection, UpstreamUnavailable, deadline_in
from fencepost_proxy.cluster.fetches import fetch_call, fetched_partition
from fencepost_proxy.cluster.metadata import Leader
from fencepost_proxy.errors import Error, StateError, UpstreamProtocolError
from fencepost_proxy.topics import hints
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.types import Offset, TopicPartition
from fencepost_proxy.wire.batch import split_batches
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.uncompressed_batch import read_uncompressed_records

_FETCH_BYTES_MAX: Final = 1_048_576


async def read_stored(
    connection: BrokerConnection,
    leader: Leader,
    topic: str,
    topic_id: UUID,
    cluster_id: str,
    *,
    timeout_seconds: float,
) -> StateView:
    """Read up to the high watermark of the first response. `connection`: to the leader. `timeout_seconds`: per request.

    Raises `UpstreamUnavailable`, and `StateError` if the topic is unusable for a proxy.
    """
    view = StateView(cluster_id)
    position, end = Offset(0), None
    while end is None or position < end:
        call = fetch_call(
            connection,
            TopicPartition(topic, 0),
            topic_id,
            position,
            leader_epoch=leader.leader_epoch,
            bytes_max=_FETCH_BYTES_MAX,
            wait_max_ms=0,
            bytes_min=1,
        )
        answer = fetched_partition(await connection.request(*call, deadline=deadline_in(timeout_seconds)))
        if answer.error_code == Error.OFFSET_OUT_OF_RANGE or answer.log_start_offset > 0:
            raise StateError(
                f"{topic} lost records (read up to offset {position}, it starts at {answer.log_start_offset})",
                hint=hints.RECREATE,
            )
        if answer.error_code:
            raise UpstreamUnavailable(
                f"{topic}: Fetch returned error {answer.error_code}", error_code=answer.error_code
            )
        end = answer.high_watermark if end is None else end
        before = position
        try:
            position = _apply(view, answer.records or b"", position)
        except (MalformedBatch, UpstreamProtocolError) as error:
            raise StateError(
                f"{topic} cannot be read at offset {position}: {error}. Its compression.type must be uncompressed",
                hint=hints.UNREADABLE,
            ) from error
        if position == before and position < end:
            raise UpstreamUnavailable(f"{topic}: no records returned at offset {position}, but the log ends at {end}")
    return view


def _apply(view: StateView, data: bytes, position: Offset) -> Offset:
    for header, batch in split_batches(memoryview(data)):
        for record in () if header.is_control else read_uncompressed_records(header, batch):
            if record.offset >= position:
                view.apply(*record)
        position = Offset(max(position, header.base_offset + header.last_offset_delta + 1))
    return position
