"""The transaction markers of claims (`sequencer/fence_bases.py`): whether this process may write them, and writes."""

from __future__ import annotations

import time
from collections.abc import Callable

from fencepost_proxy import logs
from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.cluster.client import KafkaClient
from fencepost_proxy.cluster.transactions import MARKERS_DENIED, write_abort_marker
from fencepost_proxy.metrics import Counts
from fencepost_proxy.transactions.watched import OpenInLog, marker_probe
from fencepost_proxy.types import Offset, ProducerId, TopicPartition

_log = logs.get("services.claim_markers")
_limited_log = logs.RateLimitedLog(_log)

#: How long Kafka's permission or refusal is remembered.
REMEMBERED_SECONDS = 60.0
_WRITE_SECONDS = 5.0


class ClaimMarkers:
    """`may_claim`: whether a topic allows claims. `counts`: results, for the metric."""

    def __init__(self, kafka: KafkaClient, may_claim: Callable[[str], bool], counts: Counts) -> None:
        self.may_claim = may_claim
        self._counts = counts
        self._kafka = kafka
        self._permitted = True
        self._as_of = float("-inf")

    async def permitted(self, partition: TopicPartition) -> bool:
        """Query Kafka before a claim is published: without its marker, no process can append."""
        if time.monotonic() >= self._as_of + REMEMBERED_SECONDS:
            error_code = await self._write(partition, *marker_probe(partition.topic))
            if error_code is None:
                return False
            self._permitted, self._as_of = error_code not in MARKERS_DENIED, time.monotonic()
            if not self._permitted:
                _limited_log.error(
                    "denied",
                    "Kafka does not let the proxy write transaction markers, so it cannot claim partitions (its user "
                    "needs ALTER on the cluster, before Kafka 3.8 CLUSTER_ACTION; or set fencepost.claims=false)",
                    partition=partition,
                )
        if not self._permitted:
            self._counts.inc("denied")
        return self._permitted

    async def write(self, partition: TopicPartition, producer_id: ProducerId, producer_epoch: int) -> None:
        """Once: the log shows whether it was written. If not, the next claim has another epoch."""
        marker = OpenInLog(producer_id, producer_epoch, 0, Offset(-1), -1)
        error_code = await self._write(partition, partition, marker)
        self._counts.inc("unknown" if error_code is None else "refused" if error_code else "written")
        if error_code:
            _limited_log.warning("refused", "a claim's marker was refused", partition=partition, error_code=error_code)

    async def _write(self, partition: TopicPartition, at: TopicPartition, marker: OpenInLog) -> int | None:
        """Kafka's error code; None if it is not known."""
        leader = self._kafka.leader(partition)
        if leader is None:
            return None
        try:
            return await write_abort_marker(self._kafka, leader.node_id, at, marker, timeout_seconds=_WRITE_SECONDS)
        except UpstreamUnavailable as error:
            _limited_log.warning("lost", "a claim's marker may not be written", partition=partition, reason=error)
            return None
