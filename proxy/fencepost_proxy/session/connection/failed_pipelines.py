"""Pipelined append: one that its producer sent before an earlier one to the same partition was answered.

It fails if the earlier one fails; see `Failed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fencepost_policies.append import Refusal
from fencepost_proxy.sequencer.appends import sent_after
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.session.batches.produce_exchange import ProduceExchange
from fencepost_proxy.session.connection.read_holds import ReadHolds
from fencepost_proxy.session.connection.state import ConnectionState
from fencepost_proxy.session.frames.pending_responses import Failed, PipelineKey
from fencepost_proxy.session.frames.services import Memory
from fencepost_proxy.wire.produce import PartitionResult


@dataclass(slots=True, eq=False)
class FailedPipelines:
    """`failed` – by partition and producer; empty in general."""

    _state: ConnectionState
    _holds: ReadHolds
    _memory: Memory
    failed: dict[PipelineKey, Failed] = field(default_factory=dict)

    def fail(self, produce: ProduceExchange, pipeline_key: PipelineKey, result: PartitionResult) -> None:
        """What its answer reports as `result` fails what follows it."""
        self.failed[pipeline_key] = Failed(result)
        produce.pending_response.pipeline_keys.append(pipeline_key)

    def fail_with(self, produce: ProduceExchange, pending: PendingAppend, result: PartitionResult) -> None:
        """The same for an append, if it has failed and is not answered yet."""
        if result.error_code and not produce.pending_response.done:
            self.fail(produce, (pending.partition, pending.pipeline), result)

    def before(self, pipeline_key: PipelineKey, starts_at: int) -> PartitionResult | None:
        """The failure that a request starting at this byte of the connection was sent without knowledge of."""
        failed = self.failed.get(pipeline_key)
        return failed.result if failed is not None and starts_at < failed.after_bytes else None

    def refuse_after_failed(self, produce: ProduceExchange, pending: PendingAppend) -> bool:
        """Refuse the append if it follows a failed one."""
        for pipeline in pending.follows if self.failed else ():
            result = self.before((pending.partition, pipeline), produce.received.starts_at)
            if result is not None:
                reported = sent_after(pending, result)
                refusal = Refusal(
                    reported.error_code, "predecessor_failed", reported.error_message or "", reported.base_offset
                )
                self._state.refuse(produce, pending.partition, refusal)
                return True
        return False

    def may_know(self, pipeline_keys: Sequence[PipelineKey]) -> None:
        """Their failure is reported now. Bytes that arrive later count as sent with knowledge of it."""
        if not pipeline_keys:
            return
        sent_bytes = self._state.received_bytes + self._memory.unread_bytes(self._state.connection)
        for pipeline_key in pipeline_keys:
            if pipeline_key in self.failed:
                self.failed[pipeline_key].after_bytes = float(sent_bytes)
        if self._holds.waits_for:
            return  # the request that waits may be an append that was read before this
        produce = self._holds.waiting_produce  # it still has batches to submit
        self.forget_known(self._state.read_bytes if produce is None else produce.received.starts_at)

    def forget_known(self, starts_at: int) -> None:
        """All that is processed from now on starts at this byte or later."""
        if self.failed:
            self.failed = {key: each for key, each in self.failed.items() if each.after_bytes > starts_at}
