"""The cases can fail: a model with one wrong rule fails the case for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from fencepost_proxy.wire.batch import parse_batch_header, verify_crc
from fencepost_proxy.wire.produce import PartitionResult
from tests.conformance.cases import CASES
from tests.conformance.model import ModelKafka
from tests.simulation import broker
from tests.simulation.broker import Cluster, Replica

Break = Callable[[pytest.MonkeyPatch], None]
_BY_NAME = {case.name: case for case in CASES}
_SEEDS = 5
_WRONG: list[Any] = []


def wrong(*cases: str) -> Callable[[Break], Break]:
    """`cases`: those that must fail."""

    def register(spoil: Break) -> Break:
        _WRONG.extend(pytest.param(spoil, case, id=f"{spoil.__name__}-{case}") for case in cases)
        return spoil

    return register


@pytest.mark.parametrize(("spoil", "case"), _WRONG)
def test_wrong_model_fails_its_case(spoil: Break, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    reported = _BY_NAME[case]
    failures = 0
    for seed in range(_SEEDS):
        try:
            reported.report(ModelKafka(seed, reported.brokers))
        except AssertionError:
            failures += 1
    assert failures, f"{case} holds although {spoil.__name__}"


@wrong("last_five_batches_are_recognized")
def six_batches_are_remembered(patch: pytest.MonkeyPatch) -> None:
    known = broker.Known.__init__

    def init(self: broker.Known, *args: Any, **more: Any) -> None:
        known(self, *args, **more)
        self.batches = deque(maxlen=6)

    patch.setattr(broker.Known, "__init__", init)


def _checked(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, Any], Any]) -> None:
    """Change the result of the idempotence check: (replica, batch header, result)."""
    check = Replica._check_producer

    def changed(self: Replica, header: Any, *, from_zero: bool) -> Any:
        return change(self, header, check(self, header, from_zero=from_zero))

    patch.setattr(Replica, "_check_producer", changed)


@wrong("sequence_gap_is_refused", "cached_sequence_offset_accepts_a_wrong_offset")
def sequences_are_compared_with_the_log_end(patch: pytest.MonkeyPatch) -> None:
    def change(replica: Replica, header: Any, decision: Any) -> Any:
        if decision is not None and decision.error_code == 0:
            return decision
        return None if header.base_sequence >= replica.log_end else PartitionResult(0, broker.OUT_OF_ORDER)

    _checked(patch, change)


@wrong(
    "unknown_producer_starts_at_any_sequence",
    "different_sequence_offsets_both_succeed",
    "unconfirmed_successor_replaces_a_refused_batch",
)
def unknown_producer_starts_at_zero(patch: pytest.MonkeyPatch) -> None:
    check = Replica._check_producer
    patch.setattr(Replica, "_check_producer", lambda self, header, *, from_zero: check(self, header, from_zero=True))


@wrong("transactions_v2_start_at_zero_and_bump_epochs")
def unknown_producer_starts_at_any_sequence_in_v2(patch: pytest.MonkeyPatch) -> None:
    check = Replica._check_producer
    patch.setattr(Replica, "_check_producer", lambda self, header, *, from_zero: check(self, header, from_zero=False))


@wrong("equal_sequences_are_duplicates_despite_other_records", "duplicate_is_found_after_other_producers")
def duplicates_have_no_timestamp(patch: pytest.MonkeyPatch) -> None:
    def change(replica: Replica, header: Any, decision: Any) -> Any:
        if decision is None or decision.error_code:
            return decision
        return PartitionResult(0, 0, decision.base_offset, -1, replica.log_start)

    _checked(patch, change)


@wrong("new_epoch_starts_at_zero_and_fences_the_old")
def new_epoch_continues_the_sequence(patch: pytest.MonkeyPatch) -> None:
    def change(replica: Replica, header: Any, decision: Any) -> Any:
        known = replica.producers.get(header.producer_id)
        return None if known is not None and header.producer_epoch > known.epoch else decision

    _checked(patch, change)


@wrong("new_epoch_starts_at_zero_and_fences_the_old")
def old_epoch_is_out_of_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker, "WRONG_EPOCH", broker.OUT_OF_ORDER)


@wrong("sequences_wrap")
def sequences_do_not_wrap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker, "_SEQUENCES", 1 << 32)


def _refuses(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, bytes, int], int]) -> None:
    refuse = Cluster._refuse

    def changed(self: Cluster, node: int, partition: Any, records: bytes, acks: int) -> int:
        return change(self, partition, records, refuse(self, node, partition, records, acks))

    patch.setattr(Cluster, "_refuse", changed)


@wrong("errors_precede_the_duplicate_check", "too_few_in_sync_replicas")
def duplicate_check_precedes_errors(patch: pytest.MonkeyPatch) -> None:
    def change(cluster: Any, partition: Any, records: bytes, decision: int) -> int:
        header = parse_batch_header(memoryview(records))
        found = partition.replicas[partition.leader]._check_producer(header, from_zero=False)
        return broker.NONE if found is not None and found.error_code == 0 else decision

    _refuses(patch, change)


@wrong("refused_batch_does_not_change_the_sequence")
def refused_batch_uses_its_sequence(patch: pytest.MonkeyPatch) -> None:
    def change(cluster: Any, partition: Any, records: bytes, decision: int) -> int:
        if decision == broker.TOO_LARGE:
            replica = partition.replicas[partition.leader]
            header = parse_batch_header(memoryview(records))
            replica._learn(broker.LogBatch(replica.log_end, header.record_count, records, header, 0))
        return decision

    _refuses(patch, change)


@wrong("validation_order_is_fixed")
def checksum_is_checked_first(patch: pytest.MonkeyPatch) -> None:
    _refuses(
        patch,
        lambda cluster, partition, records, decision: decision if verify_crc(memoryview(records)) else broker.CORRUPT,
    )


@wrong("restart_keeps_only_the_last_batch", "kill_keeps_only_the_last_batch")
def restart_keeps_all_batches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "reload_producers", lambda *args, **more: None)


@wrong("producer_of_deleted_records_is_known_until_restart")
def restart_keeps_producers_of_deleted_records(patch: pytest.MonkeyPatch) -> None:
    load = Replica.reload_producers

    def reload(self: Replica, snapshot: int, *args: Any, **more: Any) -> None:
        start, self.log_start = self.log_start, -1
        load(self, snapshot, *args, **more)
        self.log_start = start

    patch.setattr(Replica, "reload_producers", reload)


@wrong("producer_of_deleted_records_is_known_until_restart")
def deletion_forgets_producers(patch: pytest.MonkeyPatch) -> None:
    delete = Cluster.delete_records

    def deleted(self: Cluster, name: Any, before: int | None = None) -> None:
        delete(self, name, before)
        for replica in self.partitions[name].replicas.values():
            replica.producers.clear()

    patch.setattr(Cluster, "delete_records", deleted)


@wrong("producer_is_known_while_other_records_remain")
def restart_forgets_producers_of_deleted_records(patch: pytest.MonkeyPatch) -> None:
    load = Replica.reload_producers

    def reload(self: Replica, *args: Any, **more: Any) -> None:
        load(self, *args, **more)
        left = {batch.header.producer_id for batch in self.batches if batch.end > self.log_start}
        self.producers = {producer_id: known for producer_id, known in self.producers.items() if producer_id in left}

    patch.setattr(Replica, "reload_producers", reload)


@wrong(
    "restart_forgets_producers_with_old_records",
    "producers_expire_without_a_restart",
)
def producers_never_expire(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "expire_producers", lambda *args: None)


@wrong("broker_computes_the_newest_timestamp")
def header_timestamp_is_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker, "newest_timestamp", lambda data, header: header.max_timestamp_ms)


@wrong("unassigned_attributes_survive_unless_rewritten")
def all_attributes_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker, "_KNOWN_ATTRIBUTES", 0x7FFF)


@wrong("log_append_time_hides_duplicates")
def log_append_time_is_not_reported(patch: pytest.MonkeyPatch) -> None:
    append = Replica.append_as_leader

    def reported(self: Replica, *args: Any, **more: Any) -> PartitionResult:
        result = append(self, *args, **more)
        return PartitionResult(0, result.error_code, result.base_offset, -1, result.log_start_offset)

    patch.setattr(Replica, "append_as_leader", reported)


@wrong("request_is_appended_after_its_connection_closed")
def requests_end_with_their_connections(patch: pytest.MonkeyPatch) -> None:
    handle = broker.BrokerSide._handle

    def live(self: broker.BrokerSide, frame: bytes) -> None:
        if not self._gone:
            handle(self, frame)

    patch.setattr(broker.BrokerSide, "_handle", live)


@wrong("later_appends_wait_for_earlier_replication")
def requests_of_a_connection_overtake_each_other(patch: pytest.MonkeyPatch) -> None:
    following = broker.BrokerSide._next

    def eager(self: broker.BrokerSide) -> None:
        self._busy = False
        following(self)

    patch.setattr(broker.BrokerSide, "_next", eager)


@wrong(
    "added_partition_without_records_gets_a_marker",
    "commit_marker_takes_an_offset",
    "abort_marker_takes_an_offset",
)
def markers_are_not_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cluster, "_marker", lambda *args: None)


@wrong("coordinator_lists_partition_until_its_marker")
def coordinator_forgets_partitions_at_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Cluster, "transaction_partitions", lambda self, producer_id: self.transactions[producer_id].partitions
    )


@wrong("transactions_v2_start_at_zero_and_bump_epochs")
def epochs_are_not_bumped_in_v2(patch: pytest.MonkeyPatch) -> None:
    begin = Cluster.begin_transactional
    patch.setattr(
        Cluster, "begin_transactional", lambda self, producer_id, *, v2=None: begin(self, producer_id, v2=False)
    )


@wrong("transaction_states")
def transaction_stays_ongoing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker.Transaction, "state", "Ongoing")


@wrong("repeated_end_txn", "repeated_end_txn_v2")
def end_txn_succeeds_once(patch: pytest.MonkeyPatch) -> None:
    end_txn = Cluster.end_txn

    def once(self: Cluster, producer_id: int, epoch: int, *, commit: bool) -> tuple[int, int, int]:
        if not self.transactions[producer_id].ongoing:
            return broker.INVALID_TXN_STATE, -1, -1
        return end_txn(self, producer_id, epoch, commit=commit)

    patch.setattr(Cluster, "end_txn", once)


@wrong("repeated_end_txn", "repeated_end_txn_v2")
def any_epoch_may_end(patch: pytest.MonkeyPatch) -> None:
    end_txn = Cluster.end_txn
    patch.setattr(
        Cluster,
        "end_txn",
        lambda self, producer_id, epoch, *, commit: end_txn(
            self, producer_id, self.transactions[producer_id].epoch, commit=commit
        ),
    )


@wrong("log_end_exceeds_the_high_watermark", "too_few_in_sync_replicas")
def the_high_watermark_is_the_log_end(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Cluster, partition: Any, node: int) -> None:
        replica = partition.replicas[node]
        replica.high_watermark = replica.log_end
        self._check_waiting(partition)

    patch.setattr(Cluster, "_advance", advance)


@wrong("duplicate_waits_for_replicas")
def duplicates_do_not_wait_for_replicas(patch: pytest.MonkeyPatch) -> None:
    check = Cluster._check_waiting

    def early(self: Cluster, partition: Any) -> None:
        for waiting in list(partition.waiting):
            if waiting.result.log_append_time_ms != -1:
                self._finish(partition, waiting, broker.NONE)
        check(self, partition)

    patch.setattr(Cluster, "_check_waiting", early)


@wrong("truncation_removes_log_and_sequence_together")
def truncation_leaves_the_sequence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "reload_producers", lambda *args, **more: None)


@wrong("replicas_remember_different_batches")
def replicas_remember_the_same_batches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "reload_producers", lambda *args, **more: None)


@wrong("new_leader_recognizes_five_batches")
def followers_forget_producers(patch: pytest.MonkeyPatch) -> None:
    fetch = Cluster._fetch

    def forgetful(self: Cluster, partition: Any, node: int, *args: Any) -> None:
        fetch(self, partition, node, *args)
        partition.replicas[node].producers.clear()

    patch.setattr(Cluster, "_fetch", forgetful)


@wrong("new_leader_recognizes_five_batches")
def any_leader_epoch_is_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cluster, "leads", lambda self, node, partition, epoch: True)


@wrong("recreated_topic_has_another_id_and_no_producers")
def recreated_topic_is_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cluster, "recreate", lambda self, name: None)
