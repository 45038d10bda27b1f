"""The appends in progress at one partition, and their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from fencepost_policies.append import Refusal, where
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.sequencer.events import PendingAppend
from fencepost_proxy.wire.batch import fence_batch, zero_base_offset
from fencepost_proxy.wire.produce import PartitionResult

#: Errors of a fenced batch that concern the fence, not the client's batch: read the log and decide again.
FENCE_ERRORS = frozenset(
    {
        Error.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Error.INVALID_PRODUCER_EPOCH,
        Error.UNKNOWN_PRODUCER_ID,
        90,  # PRODUCER_FENCED
    }
)
_PREDECESSOR_FAILED = "PREDECESSOR_FAILED"


@dataclass(slots=True, eq=False)
class Appends:
    """Every append in progress is in one of these. `admitted`: not sent yet. `in_doubt`: sent, with an unknown outcome.
    `being_read`: looked up in the log without blocking the queue.

    `sequence_gaps`: pipelines with a batch that was not found at its offset.
    """

    queue: deque[PendingAppend] = field(default_factory=deque)
    admitted: PendingAppend | None = None
    in_flight: deque[PendingAppend] = field(default_factory=deque)
    in_doubt: deque[PendingAppend] = field(default_factory=deque)
    being_read: list[PendingAppend] = field(default_factory=list)
    sequence_gaps: set[tuple[int, int]] = field(default_factory=set)
    _submitted_count: int = 0
    _sent_count: int = 0

    @property
    def idle(self) -> bool:
        return not (self.queue or self.admitted or self.in_flight or self.in_doubt or self.being_read)

    @property
    def fenced_unanswered(self) -> bool:
        return any(pending.placement.kind.fenced for pending in (*self.in_flight, *self.in_doubt))

    def with_duplicate_waiters(self) -> Iterator[PendingAppend]:
        for earlier in (*self.in_flight, *self.in_doubt, *self.queue, *self.being_read):
            if earlier.placement.duplicate_waiters:
                yield earlier

    def number(self, pending: PendingAppend) -> None:
        self._submitted_count += 1
        pending.placement.submitted_as = self._submitted_count

    def send(self, pending: PendingAppend, now: float) -> None:
        pending.placement.sent_at = now
        self._sent_count += 1
        pending.placement.sent_as = self._sent_count  # several may be sent at the same `now`
        pending.placement.attempts += 1
        self.in_flight.append(pending)

    def put_back(self, pending: PendingAppend) -> None:
        """To the head of the queue, after those sent before it. If it was never sent: to its place in the queue."""
        if pending.placement.sent_at is None:
            ahead = sum(1 for each in self.queue if each.placement.submitted_as < pending.placement.submitted_as)
        else:
            ahead = sum(1 for each in self.queue if 0 < each.placement.sent_as < pending.placement.sent_as)
        self.queue.insert(ahead, pending)

    def cancel(self, pending: PendingAppend) -> None:
        if pending is self.admitted:
            self.admitted = None
            if pending.placement.attempts:
                # 1. A and B are sent. 2. Kafka refuses both fences. 3. A cannot be resent. 4. B must not be appended
                # alone.
                message = f"TRY_AGAIN an earlier append was not resent {where(pending.append)}"
                partition = pending.partition.partition
                failed = PartitionResult(partition, Error.NOT_LEADER_OR_FOLLOWER, error_message=message)
                self.fail_pipeline_after(pending, failed)
        elif pending in self.queue:
            self.queue.remove(pending)
        elif pending in self.being_read:
            self.being_read.remove(pending)
        else:
            for earlier in self.with_duplicate_waiters():
                if pending in earlier.placement.duplicate_waiters:
                    earlier.placement.waits_no_longer(pending)
            return
        if pending.placement.duplicate_waiters:
            # The append had no outcome, so the first of its duplicate waiters takes its place.
            next_waiter, *rest = pending.placement.duplicate_waiters
            pending.placement.duplicate_waiters = ()
            next_waiter.placement.duplicate_waiters += tuple(rest)
            self.queue.appendleft(next_waiter)

    def earlier_attempt(self, pending: PendingAppend) -> PendingAppend | None:
        """Of the same batch, if its outcome is not known yet."""
        for earlier in (*self.in_flight, *self.in_doubt):
            if earlier.batch_name == pending.batch_name and earlier.digest == pending.digest:
                return earlier
        return None

    def let_others_pass(self, waits: Callable[[PendingAppend], bool]) -> bool:
        """Let the first append to the head that need not wait. One that waits blocks only its own pipeline. False if no
        other can pass."""
        blocked: set[tuple[int, int]] = set()
        for pending in self.queue:
            if pending.pipeline_key in blocked or waits(pending):
                blocked.add(pending.pipeline_key)
            else:
                self.queue.remove(pending)
                self.queue.appendleft(pending)
                return True
        return False

    def predecessor_is_read(self, pending: PendingAppend) -> bool:
        """Its predecessor in the pipeline failed, or may be lost, and is being looked up; until that ends, it must not
        be appended."""
        return any(
            (other.placement.attempts or other.outcome.remembered is not None)
            and other.pipeline_key == pending.pipeline_key
            for other in self.being_read
        )

    def sent_after(self, pending: PendingAppend) -> Iterator[PendingAppend]:
        """The rest of a pipeline: same producer, same connection, sent before the failure was known. Batches without a
        producer id are pipelined only if one of the two has an expected offset.

        1. A and B (the next sequence) are sent. 2. Kafka refuses A. 3. B fails at the gap (45).
        B must not be sent again alone: it would be appended after a gap.
        """
        admitted = () if self.admitted is None else (self.admitted,)
        for other in (*self.in_flight, *admitted, *self.in_doubt, *self.queue):
            if (
                (not other.placement.sent_as or other.placement.sent_as > pending.placement.sent_as)
                and other is not pending
                and other.connection == pending.connection
                and pending.pipeline in other.follows
            ):
                yield other

    def fail_pipeline_after(self, pending: PendingAppend, result: PartitionResult) -> None:
        for other in self.sent_after(pending):
            other.placement.predecessor_result = sent_after(other, result)


def not_authorized(topic: str) -> Refusal:
    """The proxy's own user lacks an operation on the topic: no retry helps until an administrator adds it."""
    message = f"NOT_AUTHORIZED topic={topic}: the proxy's own user lacks READ, WRITE or DESCRIBE (see its status page)"
    return Refusal(Error.TOPIC_AUTHORIZATION_FAILED, "not_authorized", message)


def sent_after(pending: PendingAppend, failed: PartitionResult) -> PartitionResult:
    """Answer of a batch that was sent after a failed one: same code and message.

    Kafka's errors about sequences do not apply to a conditional append: it gets POLICY_VIOLATION instead.
    """
    stated = failed.error_message or error_name(failed.error_code)
    code = failed.error_code
    if pending.append.expected_base_offset is not None and code in FENCE_ERRORS:
        code = Error.POLICY_VIOLATION
    return replace(
        failed,
        error_code=code,
        log_append_time_ms=-1,  # this batch was not appended, even if the failed one was
        record_errors=(),  # those are records of the failed batch
        error_message=stated if stated.startswith(_PREDECESSOR_FAILED) else f"{_PREDECESSOR_FAILED} {stated}",
    )


def batch_to_send(pending: PendingAppend) -> bytearray:
    """The batch to send to Kafka: fenced, if it has a fence."""
    fence = pending.placement.fence
    if fence is None:
        # Kafka refuses a base offset other than 0; the expected offset is not for Kafka.
        return zero_base_offset(pending.records)
    return fence_batch(
        pending.records,
        producer_id=fence.producer_id,
        producer_epoch=fence.producer_epoch,
        base_sequence=fence.base_sequence,
        instance_id=fence.instance_id,
    )
