"""Transactions on a partition, as far as the sequencer knows, and the markers that are about to be written."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf

from fencepost_policies.append import Refusal, where
from fencepost_proxy.errors import Error
from fencepost_proxy.sequencer.events import LogEndSnapshot, MayJoin, PendingAppend
from fencepost_proxy.sequencer.fence import PartitionFence
from fencepost_proxy.sequencer.log_view import LogView
from fencepost_proxy.types import MARKER


@dataclass(slots=True, eq=False)
class PartitionTransactions:
    """`joined`: transactional ids on the partition. Their coordinators' "not on this partition" counts from that time
    on. Before, they may not know yet. `joining`: (transactional id, connection) that wait to join."""

    _log: LogView
    _fence: PartitionFence
    joined: dict[str, float]
    joining: dict[tuple[str, int], None] = field(default_factory=dict)
    _producers: dict[str, int] = field(default_factory=dict)  # of those that have sent an append here
    #: Producer id: (first, last) time of its "try again".
    _try_again_at: OrderedDict[int, tuple[float, float]] = field(default_factory=OrderedDict)
    _markers: int = 0  # that connections are about to send, or wait for
    _written_by: float = -inf  # latest time at which a marker without an answer is written

    @property
    def in_transaction(self) -> bool:
        """A transaction here may not be over, and only this process knows."""
        return bool(self.joined or self._markers)

    def awaits_marker(self, now: float) -> bool:
        """No append with an expected offset is sent meanwhile: a marker takes an offset."""
        return self._markers > 0 or now < self._written_by

    def occupied(self, now: float) -> bool:
        return bool(self.joined or self.joining) or self.awaits_marker(now)

    # ---- what moves the log end

    def join(self, transactional_id: str, connection: int) -> None:
        if transactional_id == MARKER:
            self._markers += 1
            self._fence.moves_unfenced()
        else:
            self.believe_from(transactional_id, inf)
        self.joining[transactional_id, connection] = None

    def answered(self, transactional_id: str, until: float) -> None:
        """A request to join or to write a marker is done, or at the latest `until`."""
        if transactional_id == MARKER:
            self._markers = max(0, self._markers - 1)  # the sequencer may have been created since
            self._written_by = max(self._written_by, until)
            self._fence.moves_unfenced()
        else:
            self.joining = {each: None for each in self.joining if each[0] != transactional_id}
            self.believe_from(transactional_id, until)

    def let_join(self) -> None:
        """No fenced append is in flight or in doubt whose offset the marker could take. Later admissions read the log
        end first."""
        self._log.effects += [MayJoin(connection) for _, connection in self.joining]
        self.joining = {}

    def believe_from(self, transactional_id: str, time: float) -> None:
        self.joined[transactional_id] = time
        if len(self.joined) > self._log.limits.remembered_producers_max:
            self._forget(next(iter(self.joined)))
        self._fence.unconfirm()

    def sent(self, pending: PendingAppend) -> None:
        """Its marker will take an offset without passing the sequencer, so what is known of the log end expires."""
        self._fence.unconfirm()
        if pending.transactional_id is not None:
            self.believe_from(pending.transactional_id, inf)
            self._producers[pending.transactional_id] = pending.append.producer_id
            self._try_again_at.pop(pending.append.producer_id, None)

    def forget_ended(self, snapshot: LogEndSnapshot) -> None:
        for transactional_id in snapshot.ended_transactions:
            if self.joined.get(transactional_id, inf) <= snapshot.transactions_as_of:
                self._forget(transactional_id)

    def _forget(self, transactional_id: str) -> None:
        del self.joined[transactional_id]
        self._producers.pop(transactional_id, None)

    # ---- appends and the transactions of others

    def another_is_open(self, pending: PendingAppend, snapshot: LogEndSnapshot) -> bool:
        """A transaction that joined counts until its coordinator reports its end, whatever the partition leader
        reports: it may not have written yet, and after an admin's abort its own marker is still to come.

        Two transactions that have only joined each other's partitions must not wait for each other. So a joined
        transaction counts for another only once the leader knows a record of it, or when it is ending. If its marker
        comes in between, the other append's offset shows it.
        """
        if pending.append.expected_base_offset is None:
            return False
        if snapshot.open_transactions - {pending.append.producer_id}:
            return True
        if not pending.append.transactional:
            return bool(self.joined)
        joined = self.joined.keys() - {pending.transactional_id}
        # Its own transactional id may be ending, too: the producer's previous transaction.
        return pending.transactional_id in snapshot.ending_transactions or not joined.isdisjoint(
            snapshot.ending_transactions
        )

    def may_not_wait(self, pending: PendingAppend, snapshot: LogEndSnapshot, now: float) -> bool:
        """Another transaction owns what this one needs. A transaction that owns a partition must give up, since the
        other may need that one, unless the other is ending. What this transaction owns through other instances is not
        known here, so then it waits for `transaction_wait_seconds`.
        """
        if not pending.append.transactional:
            return False
        producer_id, limits = pending.append.producer_id, self._log.limits
        ending = {self._producers[each] for each in self._producers.keys() & snapshot.ending_transactions}
        if snapshot.open_transactions <= ending | {producer_id}:
            return False
        if pending.sending.has_partitions:
            return True
        since, last = self._try_again_at.pop(producer_id, (now, now))
        if now - last > limits.transaction_wait_seconds:
            since = now  # an earlier, separate wait
        waited = now - since > limits.transaction_wait_seconds
        if waited and not pending.context.alone:
            return True
        self._try_again_at[producer_id] = since, now
        if len(self._try_again_at) > limits.remembered_producers_max:
            self._try_again_at.popitem(last=False)
        return False

    @staticmethod
    def is_known(pending: PendingAppend, snapshot: LogEndSnapshot) -> bool:
        """Whether the coordinator of the append's transaction was queried after the append arrived."""
        if snapshot.transactions_as_of < pending.submitted_at:
            return False
        named, known = pending.transactional_id, snapshot.producer_ids
        return named is None or known is None or named in known

    @staticmethod
    def is_anothers_producer(pending: PendingAppend, snapshot: LogEndSnapshot) -> bool:
        if pending.transactional_id is None or snapshot.producer_ids is None:
            return False
        return snapshot.producer_ids.get(pending.transactional_id, -1) not in (-1, pending.append.producer_id)


# ---- refusals


def not_supported(pending: PendingAppend) -> Refusal:
    """A transaction keeps its own producer id, and its marker moves the log. Neither moves the fence's sequence."""
    return Refusal(
        Error.POLICY_VIOLATION,
        "transactions_not_supported",
        f"TRANSACTIONS_NOT_SUPPORTED {where(pending.append)}: fencepost.check.expected.offsets=required does not allow "
        "transactions (set it to true to mix transactional and conditional appends)",
    )


def conflict(pending: PendingAppend) -> Refusal:
    return Refusal(
        Error.POLICY_VIOLATION,
        "transaction_conflict",
        f"TRANSACTION_CONFLICT {where(pending.append)}: another transaction has an open append here, and this one has "
        "appended to other partitions: waiting could deadlock (abort and retry the transaction)",
        expected_of(pending),
    )


def expected_of(pending: PendingAppend) -> int:
    """Base offset of a refusal after which the transaction should be run again: no mismatch reports it."""
    expected = pending.append.expected_base_offset
    return -1 if expected is None else expected


def anothers_producer(pending: PendingAppend) -> Refusal:
    producer_id = pending.append.producer_id
    return Refusal(
        Error.INVALID_PRODUCER_ID_MAPPING,
        "anothers_producer",
        f"ANOTHERS_PRODUCER {where(pending.append)}: producer id {producer_id} is not that of the transactional id",
    )
