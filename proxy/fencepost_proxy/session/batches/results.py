"""The results of a Produce request, one for each partition, and the only places that write them.

Only a sequencer or Kafka can report a success, by `answer`, and only for a partition without a result. All else that a
client gets is an error: `refuse`, or `override` in place of a result that it must not see.
"""

from __future__ import annotations

from fencepost_policies.append import Refusal
from fencepost_proxy.errors import ContradictoryResults, Error
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.produce import PartitionResult


class Results(dict[TopicPartition, PartitionResult]):
    """A dict, but for writing. Two different results are a defect of the proxy: the client gets neither."""

    __slots__ = ()
    # Only the methods below write.
    __setitem__ = __delitem__ = __ior__ = setdefault = update = pop = popitem = clear = None  # type: ignore[assignment]

    def answer(self, partition: TopicPartition, result: PartitionResult) -> None:
        """The final result of its sequencer, or of Kafka if it has none.

        A retriable error stays: the append was canceled, unsent, while this result was on its way.
        """
        before = self.get(partition)
        if before is None or before.error_code != Error.NOT_LEADER_OR_FOLLOWER:
            self._write(partition, result)

    def refuse(self, partition: TopicPartition, error: PartitionResult) -> PartitionResult:
        """It is not sent, or not again."""
        assert error.error_code
        self._write(partition, error)
        return error

    def override(self, partition: TopicPartition, error: PartitionResult) -> PartitionResult:
        """Report this error, and not the result, if there is one."""
        assert error.error_code
        dict.__setitem__(self, partition, error)
        return error

    def _write(self, partition: TopicPartition, result: PartitionResult) -> None:
        if partition in self and self[partition] != result:
            codes = f"{self[partition].error_code} and {result.error_code}"
            raise ContradictoryResults(f"an append to {partition} has two results, {codes}: a defect of the proxy")
        dict.__setitem__(self, partition, result)


def refused(partition: TopicPartition, refusal: Refusal) -> PartitionResult:
    return PartitionResult(
        partition=partition.partition,
        error_code=refusal.error_code,
        base_offset=refusal.base_offset,
        log_start_offset=refusal.log_start_offset,
        error_message=refusal.message,
    )
