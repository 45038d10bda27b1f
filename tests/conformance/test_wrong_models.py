"""The cases have teeth: a model that is wrong in one point is found out by the case that is about it."""

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
    """`cases`: those that have to notice."""

    def register(spoil: Break) -> Break:
        _WRONG.extend(pytest.param(spoil, case, id=f"{spoil.__name__}-{case}") for case in cases)
        return spoil

    return register


@pytest.mark.parametrize(("spoil", "case"), _WRONG)
def test_a_wrong_model_is_found_out(spoil: Break, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch)
    reported = _BY_NAME[case]
    noticed = 0
    for seed in range(_SEEDS):
        try:
            reported.report(ModelKafka(seed, reported.brokers))
        except AssertionError:
            noticed += 1
    assert noticed, f"{case} holds on a model of which '{spoil.__name__}' is true"


@wrong("the_last_five_batches_are_known_again")
def six_batches_are_remembered(patch: pytest.MonkeyPatch) -> None:
    known = broker.Known.__init__

    def init(self: broker.Known, *args: Any, **more: Any) -> None:
        known(self, *args, **more)
        self.batches = deque(maxlen=6)

    patch.setattr(broker.Known, "__init__", init)


def _checked(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, Any], Any]) -> None:
    """`change` the verdict of the idempotence check: (replica, batch header, verdict)."""
    check = Replica._check_producer

    def changed(self: Replica, header: Any, *, from_zero: bool) -> Any:
        return change(self, header, check(self, header, from_zero=from_zero))

    patch.setattr(Replica, "_check_producer", changed)


@wrong("a_gap_is_refused_and_changes_nothing", "a_cached_shift_accepts_at_the_wrong_place")
def gaps_and_stale_sequences_are_judged_by_the_log_end(patch: pytest.MonkeyPatch) -> None:
    def change(replica: Replica, header: Any, decision: Any) -> Any:
        if decision is not None and decision.error_code == 0:
            return decision
        return None if header.base_sequence >= replica.log_end else PartitionResult(0, broker.OUT_OF_ORDER)

    _checked(patch, change)


@wrong(
    "a_producer_that_is_not_known_begins_anywhere",
    "two_that_believe_in_different_shifts_both_win",
    "behind_a_refused_first_batch_the_second_lands_in_its_place",
)
def who_is_not_known_begins_at_zero(patch: pytest.MonkeyPatch) -> None:
    check = Replica._check_producer
    patch.setattr(Replica, "_check_producer", lambda self, header, *, from_zero: check(self, header, from_zero=True))


@wrong("transactions_v2_begin_at_zero_and_bump_the_epoch_with_each_end")
def who_is_not_known_begins_anywhere_in_v2_too(patch: pytest.MonkeyPatch) -> None:
    check = Replica._check_producer
    patch.setattr(Replica, "_check_producer", lambda self, header, *, from_zero: check(self, header, from_zero=False))


@wrong("equal_sequences_are_a_duplicate_whatever_they_hold", "a_duplicate_is_found_behind_other_writers")
def duplicates_look_fresh(patch: pytest.MonkeyPatch) -> None:
    def change(replica: Replica, header: Any, decision: Any) -> Any:
        if decision is None or decision.error_code:
            return decision
        return PartitionResult(0, 0, decision.base_offset, -1, replica.log_start)

    _checked(patch, change)


@wrong("a_new_epoch_begins_at_zero_and_fences_the_old")
def a_new_epoch_goes_on_with_the_sequence(patch: pytest.MonkeyPatch) -> None:
    def change(replica: Replica, header: Any, decision: Any) -> Any:
        known = replica.producers.get(header.producer_id)
        return None if known is not None and header.producer_epoch > known.epoch else decision

    _checked(patch, change)


@wrong("a_new_epoch_begins_at_zero_and_fences_the_old")
def an_old_epoch_is_out_of_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker, "WRONG_EPOCH", broker.OUT_OF_ORDER)


@wrong("sequences_wrap")
def sequences_do_not_wrap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker, "_SEQUENCES", 1 << 32)


def _refuses(patch: pytest.MonkeyPatch, change: Callable[[Any, Any, bytes, int], int]) -> None:
    refuse = Cluster._refuse

    def changed(self: Cluster, node: int, partition: Any, records: bytes, acks: int) -> int:
        return change(self, partition, records, refuse(self, node, partition, records, acks))

    patch.setattr(Cluster, "_refuse", changed)


@wrong("errors_come_before_duplicates", "too_few_in_sync_replicas")
def duplicates_come_before_errors(patch: pytest.MonkeyPatch) -> None:
    def change(cluster: Any, partition: Any, records: bytes, decision: int) -> int:
        header = parse_batch_header(memoryview(records))
        found = partition.replicas[partition.leader]._check_producer(header, from_zero=False)
        return broker.NONE if found is not None and found.error_code == 0 else decision

    _refuses(patch, change)


@wrong("a_refused_batch_leaves_the_sequence_alone")
def a_refused_batch_counts(patch: pytest.MonkeyPatch) -> None:
    """As if the sequence were taken although nothing is appended."""

    def change(cluster: Any, partition: Any, records: bytes, decision: int) -> int:
        if decision == broker.TOO_LARGE:
            replica = partition.replicas[partition.leader]
            header = parse_batch_header(memoryview(records))
            replica._learn(broker.LogBatch(replica.log_end, header.record_count, records, header, 0))
        return decision

    _refuses(patch, change)


@wrong("of_several_errors_the_first_is_told")
def the_checksum_is_looked_at_first(patch: pytest.MonkeyPatch) -> None:
    _refuses(
        patch,
        lambda cluster, partition, records, decision: decision if verify_crc(memoryview(records)) else broker.CORRUPT,
    )


@wrong("after_a_restart_only_the_last_batch_is_remembered", "after_a_kill_only_the_last_batch_is_remembered")
def a_restart_forgets_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "reload_producers", lambda *args, **more: None)


@wrong("deleted_records_are_remembered_until_a_restart")
def a_restart_remembers_what_is_deleted(patch: pytest.MonkeyPatch) -> None:
    load = Replica.reload_producers

    def reload(self: Replica, snapshot: int, *args: Any, **more: Any) -> None:
        start, self.log_start = self.log_start, -1
        load(self, snapshot, *args, **more)
        self.log_start = start

    patch.setattr(Replica, "reload_producers", reload)


@wrong("deleted_records_are_remembered_until_a_restart")
def deleting_forgets_at_once(patch: pytest.MonkeyPatch) -> None:
    delete = Cluster.delete_records

    def deleted(self: Cluster, name: Any, before: int | None = None) -> None:
        delete(self, name, before)
        for replica in self.partitions[name].replicas.values():
            replica.producers.clear()

    patch.setattr(Cluster, "delete_records", deleted)


@wrong("a_producer_whose_records_are_deleted_is_known_as_long_as_others_remain")
def a_restart_forgets_all_whose_records_are_deleted(patch: pytest.MonkeyPatch) -> None:
    load = Replica.reload_producers

    def reload(self: Replica, *args: Any, **more: Any) -> None:
        load(self, *args, **more)
        left = {batch.header.producer_id for batch in self.batches if batch.end > self.log_start}
        self.producers = {producer_id: known for producer_id, known in self.producers.items() if producer_id in left}

    patch.setattr(Replica, "reload_producers", reload)


@wrong(
    "old_records_are_forgotten_at_a_restart_and_appended_twice",
    "old_records_are_forgotten_without_a_restart_too",
)
def age_is_counted_from_the_append(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "expire_producers", lambda *args: None)


@wrong("a_lying_header_does_not_keep_old_records_known")
def the_header_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker, "newest_timestamp", lambda data, header: header.max_timestamp_ms)


@wrong("attributes_without_a_meaning_are_kept_where_the_batch_is")
def all_attributes_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker, "_KNOWN_ATTRIBUTES", 0x7FFF)


@wrong("log_append_time_hides_duplicates")
def log_append_time_is_not_told(patch: pytest.MonkeyPatch) -> None:
    append = Replica.append_as_leader

    def reported(self: Replica, *args: Any, **more: Any) -> PartitionResult:
        result = append(self, *args, **more)
        return PartitionResult(0, result.error_code, result.base_offset, -1, result.log_start_offset)

    patch.setattr(Replica, "append_as_leader", reported)


@wrong("a_request_outlives_its_connection")
def requests_die_with_their_connections(patch: pytest.MonkeyPatch) -> None:
    handle = broker.BrokerSide._handle

    def live(self: broker.BrokerSide, frame: bytes) -> None:
        if not self._gone:
            handle(self, frame)

    patch.setattr(broker.BrokerSide, "_handle", live)


@wrong("a_connection_is_silent_while_an_append_waits_for_replicas")
def requests_of_a_connection_overtake_each_other(patch: pytest.MonkeyPatch) -> None:
    following = broker.BrokerSide._next

    def eager(self: broker.BrokerSide) -> None:
        self._busy = False
        following(self)

    patch.setattr(broker.BrokerSide, "_next", eager)


@wrong(
    "a_partition_that_was_added_and_never_written_gets_its_marker",
    "a_commit_marker_takes_an_offset",
    "an_abort_marker_takes_an_offset",
)
def there_are_no_markers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cluster, "_marker", lambda *args: None)


@wrong("a_coordinator_knows_until_the_marker_is_there")
def a_coordinator_forgets_with_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Cluster, "transaction_partitions", lambda self, producer_id: self.transactions[producer_id].partitions
    )


@wrong("transactions_v2_begin_at_zero_and_bump_the_epoch_with_each_end")
def epochs_stay_in_v2(patch: pytest.MonkeyPatch) -> None:
    begin = Cluster.begin_transactional
    patch.setattr(
        Cluster, "begin_transactional", lambda self, producer_id, *, v2=None: begin(self, producer_id, v2=False)
    )


@wrong("a_transactions_states")
def a_transaction_is_ongoing_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(broker.Transaction, "state", "Ongoing")


@wrong("an_end_that_is_said_again", "an_end_that_is_said_again_v2")
def an_end_is_heard_once(patch: pytest.MonkeyPatch) -> None:
    end_txn = Cluster.end_txn

    def once(self: Cluster, producer_id: int, epoch: int, *, commit: bool) -> tuple[int, int, int]:
        if not self.transactions[producer_id].ongoing:
            return broker.INVALID_TXN_STATE, -1, -1
        return end_txn(self, producer_id, epoch, commit=commit)

    patch.setattr(Cluster, "end_txn", once)


@wrong("an_end_that_is_said_again", "an_end_that_is_said_again_v2")
def any_epoch_may_end(patch: pytest.MonkeyPatch) -> None:
    end_txn = Cluster.end_txn
    patch.setattr(
        Cluster,
        "end_txn",
        lambda self, producer_id, epoch, *, commit: end_txn(
            self, producer_id, self.transactions[producer_id].epoch, commit=commit
        ),
    )


@wrong("the_log_end_runs_ahead_of_the_high_watermark", "too_few_in_sync_replicas")
def the_high_watermark_is_the_log_end(patch: pytest.MonkeyPatch) -> None:
    def advance(self: Cluster, partition: Any, node: int) -> None:
        replica = partition.replicas[node]
        replica.high_watermark = replica.log_end
        self._check_waiting(partition)

    patch.setattr(Cluster, "_advance", advance)


@wrong("a_resend_waits_for_its_replicas_as_the_first_did")
def duplicates_are_committed_at_once(patch: pytest.MonkeyPatch) -> None:
    check = Cluster._check_waiting

    def early(self: Cluster, partition: Any) -> None:
        for waiting in list(partition.waiting):
            if waiting.result.log_append_time_ms != -1:
                self._finish(partition, waiting, broker.NONE)
        check(self, partition)

    patch.setattr(Cluster, "_check_waiting", early)


@wrong("truncation_takes_log_and_sequence_back_together")
def truncation_leaves_the_sequence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "reload_producers", lambda *args, **more: None)


@wrong("each_replica_has_its_own_memory")
def memory_is_shared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Replica, "reload_producers", lambda *args, **more: None)


@wrong("a_new_leader_knows_the_last_five_and_the_old_one_takes_nothing")
def followers_do_not_learn(patch: pytest.MonkeyPatch) -> None:
    fetch = Cluster._fetch

    def forgetful(self: Cluster, partition: Any, node: int, *args: Any) -> None:
        fetch(self, partition, node, *args)
        partition.replicas[node].producers.clear()

    patch.setattr(Cluster, "_fetch", forgetful)


@wrong("a_new_leader_knows_the_last_five_and_the_old_one_takes_nothing")
def any_epoch_is_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cluster, "leads", lambda self, node, partition, epoch: True)


@wrong("a_recreated_topic_knows_nobody_and_has_another_id")
def a_recreated_topic_is_the_same(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cluster, "recreate", lambda self, name: None)
