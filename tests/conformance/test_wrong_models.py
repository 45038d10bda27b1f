"""The cases can fail: a model with one wrong rule fails the case for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fencepost_proxy.preflight.conformance.cases import CASES
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.produce import PartitionResult
from tests.conformance.model import ModelKafka
from tests.simulation import broker
from tests.simulation.broker import BrokerSide, Cluster, Replica, Transaction
from tests.support.mutants import Change, Mutant, body, edit, put, wrap

_BY_NAME = {case.name: case for case in CASES}
_SEEDS = 5


def _wrong(rule: str, cases: tuple[str, ...], *changes: Change) -> Mutant:
    """`rule`: the model's wrong rule. `cases`: those that must fail."""
    return Mutant(rule, rule, cases, *changes)


def _accept_any_gap(check: Callable[..., Any], replica: Replica, header: Any, **more: Any) -> PartitionResult | None:
    decision: PartitionResult | None = check(replica, header, **more)
    if decision is not None and decision.error_code == 0:
        return decision
    return None if header.base_sequence >= replica.log_end else PartitionResult(0, broker.OUT_OF_ORDER)


def _forget_producers_of_deleted_records(
    reload: Callable[..., None], replica: Replica, *args: Any, **more: Any
) -> None:
    reload(replica, *args, **more)
    left = {batch.header.producer_id for batch in replica.batches if batch.end > replica.log_start}
    replica.producers = {producer_id: known for producer_id, known in replica.producers.items() if producer_id in left}


def _accept_duplicates(refuse: Callable[..., int], cluster: Cluster, *request: Any) -> int:
    decision = refuse(cluster, *request)
    _, partition, records, _ = request
    found = partition.replicas[partition.leader].check_producer(
        parse_batch_header(memoryview(records)), from_zero=False
    )
    return broker.NONE if found is not None and found.error_code == 0 else decision


_TOO_LARGE = "settings.max_message_bytes is not None and len(records) > settings.max_message_bytes"

WRONG_MODELS = (
    _wrong(
        "six_batches_are_remembered",
        ("last_five_batches_are_recognized",),
        put(broker, "_REMEMBERED_BATCHES", 6),
    ),
    _wrong(
        "sequences_are_compared_with_the_log_end",
        ("sequence_gap_is_refused", "cached_sequence_offset_accepts_a_wrong_offset"),
        wrap(Replica, "check_producer", _accept_any_gap),
    ),
    _wrong(
        "unknown_producer_starts_at_zero",
        (
            "unknown_producer_starts_at_any_sequence",
            "different_sequence_offsets_both_succeed",
            "unconfirmed_successor_replaces_a_refused_batch",
        ),
        edit(Replica, "check_producer", ("from_zero and first", "first")),
    ),
    _wrong(
        "unknown_producer_starts_at_any_sequence_in_v2",
        ("transactions_v2_start_at_zero",),
        edit(Replica, "check_producer", ("from_zero and first", "False")),
    ),
    _wrong(
        "duplicates_have_no_timestamp",
        ("equal_sequences_are_duplicates_despite_other_records", "duplicate_is_found_after_other_producers"),
        edit(
            Replica,
            "check_producer",
            (
                "PartitionResult(0, NONE, base, timestamp, self.log_start)",
                "PartitionResult(0, NONE, base, -1, self.log_start)",
            ),
        ),
    ),
    _wrong(
        "new_epoch_continues_the_sequence",
        ("new_epoch_starts_at_zero_and_fences_the_old",),
        edit(
            Replica, "check_producer", ("first == expected", "first == expected or header.producer_epoch > known.epoch")
        ),
    ),
    _wrong(
        "old_epoch_is_out_of_order",
        ("new_epoch_starts_at_zero_and_fences_the_old",),
        put(broker, "WRONG_EPOCH", broker.OUT_OF_ORDER),
    ),
    _wrong("sequences_do_not_wrap", ("sequences_wrap",), put(broker, "_SEQUENCES", 1 << 32)),
    _wrong(
        "duplicate_check_precedes_errors",
        ("errors_precede_the_duplicate_check", "too_few_in_sync_replicas"),
        wrap(Cluster, "_refuse", _accept_duplicates),
    ),
    _wrong(
        "refused_batch_uses_its_sequence",
        ("refused_batch_does_not_change_the_sequence",),
        edit(
            Cluster,
            "_refuse",
            (
                f"if {_TOO_LARGE}:\n    return TOO_LARGE",
                f"if {_TOO_LARGE}:\n"
                "    replica = partition.replicas[partition.leader]\n"
                "    replica._learn(LogBatch(replica.log_end, header.record_count, records, header, 0))\n"
                "    return TOO_LARGE",
            ),
        ),
    ),
    _wrong(
        "checksum_is_checked_first",
        ("validation_order_is_fixed",),
        edit(
            Cluster,
            "_refuse",
            (
                "view, settings = partition.views[node], partition.settings",
                "view, settings = partition.views[node], partition.settings\n"
                "if not verify_crc(memoryview(records)):\n    return CORRUPT",
            ),
        ),
    ),
    _wrong(
        "producers_are_not_reloaded",
        (
            "restart_keeps_only_the_last_batch",
            "kill_keeps_only_the_last_batch",
            "truncation_removes_log_and_sequence_together",
            "replicas_remember_different_batches",
        ),
        body(Replica, "reload_producers", "pass"),
    ),
    _wrong(
        "restart_keeps_producers_of_deleted_records",
        ("producer_of_deleted_records_is_known_until_restart",),
        edit(
            Replica,
            "reload_producers",
            ("snapshot > self.log_start", "True"),
            ("batch.end > self.log_start and not (used and batch.base < snapshot)", "batch.base >= snapshot"),
        ),
    ),
    _wrong(
        "deletion_forgets_producers",
        ("producer_of_deleted_records_is_known_until_restart",),
        edit(
            Cluster,
            "delete_records",
            (
                "replica.log_start = max(replica.log_start, min(start, replica.log_end))",
                "replica.log_start = max(replica.log_start, min(start, replica.log_end)); replica.producers.clear()",
            ),
        ),
    ),
    _wrong(
        "restart_forgets_producers_of_deleted_records",
        ("producer_is_known_while_other_records_remain",),
        wrap(Replica, "reload_producers", _forget_producers_of_deleted_records),
    ),
    _wrong(
        "producers_never_expire",
        ("restart_forgets_producers_with_old_records", "producers_expire_without_a_restart"),
        body(Replica, "expire_producers", "pass"),
    ),
    _wrong(
        "header_timestamp_is_trusted",
        ("broker_computes_the_newest_timestamp",),
        body(broker, "newest_timestamp", "return header.max_timestamp_ms"),
    ),
    _wrong(
        "all_attributes_are_kept",
        ("rewritten_batches_lose_unassigned_attributes",),
        put(broker, "_KNOWN_ATTRIBUTES", 0x7FFF),
    ),
    _wrong(
        "every_batch_is_rewritten",
        ("unassigned_attributes_survive",),
        edit(
            Replica,
            "_rewritten",
            ("attributes != header.attributes or newest_timestamp_ms != header.max_timestamp_ms", "True"),
        ),
    ),
    _wrong(
        "records_are_changed",
        ("acknowledged_records_are_read_back",),
        edit(Replica, "_rewritten", ("return stored", "stored[-1] ^= 1\nreturn stored")),
    ),
    _wrong(
        "log_append_time_is_not_reported",
        ("log_append_time_hides_duplicates",),
        edit(Replica, "append_as_leader", ("now_ms if self.log_append_time else -1", "-1")),
        edit(
            Replica,
            "check_producer",
            (
                "PartitionResult(0, NONE, base, timestamp, self.log_start)",
                "PartitionResult(0, NONE, base, -1, self.log_start)",
            ),
        ),
    ),
    _wrong(
        "requests_end_with_their_connections",
        ("request_is_appended_after_its_connection_closed",),
        edit(
            BrokerSide,
            "_handle",
            (
                "request = parse_produce_request(memoryview(frame))",
                "if self._closed:\n    return\nrequest = parse_produce_request(memoryview(frame))",
            ),
        ),
    ),
    _wrong(
        "requests_of_a_connection_overtake_each_other",
        ("later_appends_wait_for_earlier_replication",),
        edit(BrokerSide, "_next", ("not self._busy and self._frames", "self._frames")),
    ),
    _wrong(
        "markers_are_not_written",
        (
            "added_partition_without_records_gets_a_marker",
            "commit_marker_takes_an_offset",
            "abort_marker_takes_an_offset",
        ),
        body(Cluster, "_marker", "pass"),
    ),
    _wrong(
        "coordinator_forgets_partitions_at_the_end",
        ("coordinator_lists_partition_until_its_marker",),
        edit(
            Cluster,
            "transaction_partitions",
            ("[*transaction.partitions, *transaction.due]", "transaction.partitions"),
        ),
    ),
    _wrong(
        "epochs_are_not_bumped_in_v2",
        ("transactions_v2_bump_epochs",),
        edit(Cluster, "begin_transactional", ("self.transactions_v2 if v2 is None else v2", "False")),
    ),
    _wrong(
        "transaction_stays_ongoing",
        ("transaction_states", "transaction_states_v2"),
        body(Transaction, "state", 'return "Ongoing"'),
    ),
    _wrong(
        "end_txn_succeeds_once",
        ("repeated_end_txn", "repeated_end_txn_v2"),
        edit(
            Cluster,
            "end_txn",
            (
                "transaction = self.transactions.get(producer_id)",
                "transaction = self.transactions[producer_id]\n"
                "if not transaction.ongoing:\n    return INVALID_TXN_STATE, -1, -1",
            ),
        ),
    ),
    _wrong(
        "any_epoch_may_end",
        ("repeated_end_txn", "repeated_end_txn_v2"),
        wrap(
            Cluster,
            "end_txn",
            lambda end_txn, cluster, producer_id, _, **more: end_txn(
                cluster, producer_id, cluster.transactions[producer_id].epoch, **more
            ),
        ),
    ),
    _wrong(
        "the_high_watermark_is_the_log_end",
        ("log_end_exceeds_the_high_watermark", "too_few_in_sync_replicas"),
        body(
            Cluster,
            "_advance",
            "replica = partition.replicas[node]\n"
            "replica.high_watermark = replica.log_end\n"
            "self._check_waiting(partition)",
        ),
    ),
    _wrong(
        "duplicates_do_not_wait_for_replicas",
        ("duplicate_waits_for_replicas",),
        edit(
            Cluster,
            "_check_waiting",
            (
                "view = partition.views[waiting.broker]",
                "if waiting.result.log_append_time_ms != -1:\n"
                "    self._finish(partition, waiting, NONE)\n"
                "    continue\n"
                "view = partition.views[waiting.broker]",
            ),
        ),
    ),
    _wrong(
        "markers_begin_no_epoch",
        ("marker_claims_an_epoch",),
        edit(
            Cluster,
            "write_marker",
            (
                "_marker(replica.log_end, producer_id, epoch, False, self.sim.unix_ms)",
                "_marker(replica.log_end, producer_id + 1, epoch, False, self.sim.unix_ms)",
            ),
        ),
    ),
    _wrong(
        "markers_of_lower_epochs_are_accepted",
        ("marker_claims_an_epoch",),
        edit(Cluster, "write_marker", ("known.epoch > epoch", "False")),
    ),
    _wrong(
        "replicas_forget_producers",
        ("new_leader_recognizes_five_batches",),
        edit(
            Cluster,
            "_fetch",
            (
                "here.append(batch.data, batch.leader_epoch)",
                "here.append(batch.data, batch.leader_epoch); here.producers.clear()",
            ),
        ),
    ),
    _wrong(
        "any_leader_epoch_is_answered",
        ("new_leader_recognizes_five_batches",),
        body(Cluster, "leads", "return True"),
    ),
    _wrong(
        "recreated_topic_is_the_same",
        ("recreated_topic_has_another_id_and_no_producers",),
        body(Cluster, "recreate", "pass"),
    ),
)


@pytest.mark.parametrize(
    ("model", "case"),
    [pytest.param(model, case, id=f"{model.name}-{case}") for model in WRONG_MODELS for case in model.where],
)
def test_wrong_model_fails_its_case(model: Mutant, case: str) -> None:
    reported = _BY_NAME[case]
    failures = 0
    with model.live():
        for seed in range(_SEEDS):
            try:
                reported.run(ModelKafka(seed, reported.brokers))
            except AssertionError:
                failures += 1
    assert failures, f"{case} holds although {model.name}"
