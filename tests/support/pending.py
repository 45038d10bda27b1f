"""Pending appends of whole batches, as `session/` makes them."""

from __future__ import annotations

from typing import Final

from fencepost_policies.append import Refusal
from fencepost_proxy.sequencer.events import AppendContext, PendingAppend, Placement
from fencepost_proxy.session.batches.reading import checked_append, read_batch
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch_scan import HeaderNames

NOTHING_KNOWN: Final = AppendContext()


def pending_append(
    partition: TopicPartition,
    records: memoryview,
    policy: TopicPolicy,
    shared_producer_ids: frozenset[int],
    *,
    now: float,
    wait: float,
    connection: int = 1,
    context: AppendContext = NOTHING_KNOWN,
    transactional_id: str | None = None,
    bytes_max: int = 1 << 20,
) -> PendingAppend | Refusal:
    scan = read_batch(
        partition,
        records,
        HeaderNames(),
        source_is_base=policy.source_is_base,
        fields=policy.fields,
        bytes_max=bytes_max,
    )
    append = checked_append(partition, scan, shared_producer_ids)
    if isinstance(append, Refusal):
        return append
    assert not isinstance(scan, Refusal)
    return PendingAppend(
        connection=connection,
        partition=partition,
        append=append,
        records=records,
        digest=scan.digest,
        check=policy.check,
        submitted_at=now,
        transactional_id=transactional_id,
        context=context,
        placement=Placement(now + wait),
    )
