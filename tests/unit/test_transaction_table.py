"""Transactions as a process knows them, and their records in the state topic."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from fencepost_policies.append import Append
from fencepost_proxy.topics.abort_only import (
    PENDING_MAX,
    AbortOnly,
    AbortOnlyView,
    cleared,
    encode_abort_only,
    encode_abort_only_tombstones,
)
from fencepost_proxy.topics.state import StateView
from fencepost_proxy.transactions.table import Open, Table, Transaction
from fencepost_proxy.types import Offset, TopicPartition
from fencepost_proxy.wire.state_records import StateRecord

TXN = "transfer"
A = TopicPartition("t", 0)
ONE = Append(
    topic="t",
    partition=0,
    record_count=2,
    expected_base_offset=10,
    producer_id=7,
    producer_epoch=3,
    base_sequence=0,
    transactional=True,
)
SEQUENCED = replace(ONE, expected_base_offset=None)


def known(table: Table) -> Transaction:
    transaction = table.of(TXN, 7, 3)
    assert transaction is not None
    return transaction


def recorded(table: Table, transaction: Transaction) -> AbortOnly:
    record = table.record_to_store(transaction)
    assert record is not None
    return record


@pytest.fixture
def table() -> Table:
    return Table()


# ---- ownership of partitions


def test_transaction_owns_partitions_after_possible_append(table: Table) -> None:
    assert not table.owns(TXN, 7, 3)
    for happens, owns in (
        (lambda: table.submitted(TXN, ONE), False),
        (lambda: table.sent(TXN, ONE), True),
        (lambda: table.failed(TXN, ONE, 6, "TRY_AGAIN", was_sent=True), False),
        (lambda: table.failed(TXN, ONE, 7, "OUTCOME_UNKNOWN", was_sent=True), True),
        (lambda: table.ended(TXN, 7, 3), False),
        (lambda: table.submitted(TXN, SEQUENCED), False),
        (lambda: table.sent(TXN, SEQUENCED), True),
    ):
        happens()
        assert table.owns(TXN, 7, 3) is owns


def test_a_newer_epoch_is_another_transaction(table: Table) -> None:
    table.appended_batch(TXN, ONE, 10)
    table.submitted(TXN, replace(ONE, producer_epoch=4))
    assert table.of(TXN, 7, 3) is None


def test_least_recently_used_transaction_is_dropped() -> None:
    table = Table(transactions_max=2)
    for producer_id in (1, 2, 1, 3):
        table.sent(TXN, replace(SEQUENCED, producer_id=producer_id))
    assert [table.owns(TXN, each, 3) for each in (1, 2, 3)] == [True, False, True]


# ---- what was appended


def test_batches_that_follow_each_other_are_whole(table: Table) -> None:
    for sequence, at in ((0, 10), (2, 12), (2, 12), (0, 10), (4, 14)):  # with retries of the second and the first
        table.appended_batch(TXN, replace(ONE, base_sequence=sequence, expected_base_offset=at), at)
    transaction = known(table)
    written = transaction.written[A]
    assert (written.first_offset, written.first_sequence, written.last_sequence, written.whole) == (10, 0, 5, True)
    table.appended_batch(TXN, replace(ONE, base_sequence=8, expected_base_offset=None), 20)
    assert not written.whole
    assert transaction.refused is None


# ---- what is recorded


def test_each_refusal_is_recorded_under_another_name(table: Table) -> None:
    """The next transaction may have begun, and the first record may be about to be cleared."""
    transaction = table.failed(TXN, ONE, 44, "OFFSET_MISMATCH", was_sent=False)
    first = recorded(table, transaction)
    table.failed(TXN, ONE, 44, "OFFSET_MISMATCH", was_sent=False)
    second = recorded(table, transaction)
    assert first.pending is None
    assert first.name != second.name
    table.cleared(first.name)
    assert table.of(TXN, 7, 3) is transaction
    table.cleared(second.name)
    assert table.of(TXN, 7, 3) is None


def test_retriable_batch_is_recorded_once(table: Table) -> None:
    assert recorded(table, table.failed(TXN, ONE, 6, "TRY_AGAIN", was_sent=False)).pending == {(A, 0)}
    table.submitted(TXN, ONE)
    assert table.record_to_store(table.failed(TXN, ONE, 6, "TRY_AGAIN", was_sent=False)) is None
    other = table.failed(TXN, replace(ONE, base_sequence=2), 51, "CONCURRENT", was_sent=True)
    assert recorded(table, other).pending == {(A, 0), (A, 2)}


def test_unstored_record_is_made_again_until_appended(table: Table) -> None:
    transaction = table.failed(TXN, ONE, 6, "TRY_AGAIN", was_sent=False)
    table.not_recorded(transaction, recorded(table, transaction))
    table.not_recorded(transaction, recorded(table, transaction))
    table.appended_batch(TXN, ONE, 10)
    assert table.record_to_store(transaction) is None


@pytest.mark.parametrize("answered", [True, False])
def test_too_many_pending_appends_count_as_refusal(answered: bool, table: Table) -> None:
    for sequence in range(PENDING_MAX + 2):
        one = replace(ONE, base_sequence=2 * sequence)
        if answered:
            table.failed(TXN, one, 6, "TRY_AGAIN", was_sent=False)
        else:
            table.submitted(TXN, one)
            table.over(TXN, one)
    transaction = known(table)
    assert transaction.refused == "TRY_AGAIN" if answered else transaction.refused
    assert len(transaction.open) == PENDING_MAX + answered


@pytest.mark.parametrize("sent", [False, True])
def test_broken_connection_leaves_the_append_pending(sent: bool, table: Table) -> None:
    table.submitted(TXN, ONE)
    if sent:
        table.sent(TXN, ONE)
    table.over(TXN, ONE)
    transaction = known(table)
    assert transaction.under_way is None
    assert transaction.pending == {(A, 0)}
    assert table.owns(TXN, 7, 3) == sent
    table.over(TXN, replace(ONE, producer_id=8))  # unknown


def test_end_of_request_keeps_reported_outcomes(table: Table) -> None:
    refused, later = replace(ONE, base_sequence=2), replace(ONE, base_sequence=4)
    for each in (ONE, refused, later):
        table.submitted(TXN, each)
    table.appended_batch(TXN, ONE, 10)
    table.failed(TXN, refused, 44, "OFFSET_MISMATCH", was_sent=False)
    transaction = table.failed(TXN, later, 7, "OUTCOME_UNKNOWN", was_sent=True)
    for each in (ONE, refused, later):
        table.over(TXN, each)
    assert dict(transaction.open) == {(A, 4): Open.UNKNOWN}
    assert transaction.refused == "OFFSET_MISMATCH"


def test_foreign_transactional_id_ends_no_append_in_flight(table: Table) -> None:
    table.submitted(TXN, ONE)
    table.over("another", ONE)
    assert known(table).under_way == (A, 0)


@pytest.mark.parametrize("code", [49, 53])
def test_unauthorized_append_does_not_affect_the_transaction(code: int, table: Table) -> None:
    """Kafka assigns the batch to no transaction of this producer."""
    table.appended_batch(TXN, ONE, 10)
    foreign = replace(ONE, base_sequence=9)
    table.submitted(TXN, foreign)
    table.sent(TXN, foreign)
    transaction = table.failed(TXN, foreign, code, "not authorized", was_sent=True)
    assert table.record_to_store(transaction) is None
    assert (transaction.refused, dict(transaction.open)) == (None, {})


@pytest.mark.parametrize("other_first", [False, True])
@pytest.mark.parametrize("epoch", [3, 4])
def test_producer_id_is_tracked_per_transactional_id(other_first: bool, epoch: int, table: Table) -> None:
    if not other_first:
        table.appended_batch(TXN, ONE, 10)
    foreign = replace(ONE, producer_epoch=epoch, base_sequence=2)
    table.submitted("another", foreign)
    other = table.failed("another", foreign, 44, "OFFSET_MISMATCH", was_sent=False)
    record = recorded(table, other)
    assert record.transactional_id == "another"
    if other_first:
        table.appended_batch(TXN, ONE, 10)
    transaction = known(table)
    assert (transaction.transactional_id, transaction.refused, transaction.under_way) == (TXN, None, None)
    assert table.owns(TXN, 7, 3)
    assert not table.owns("another", 7, epoch)
    table.cleared(record.name)
    assert table.of("another", 7, epoch) is None
    assert table.of(TXN, 7, 3) is transaction


def test_sequencers_producer_id_refusal_counts_for_named_id(table: Table) -> None:
    """The sequencer's knowledge may be outdated."""
    assert table.failed(TXN, ONE, 49, "ANOTHERS_PRODUCER", was_sent=False).refused == "ANOTHERS_PRODUCER"


def test_dropped_transaction_takes_its_names_along() -> None:
    table = Table(transactions_max=1)
    dropped = recorded(table, table.failed(TXN, ONE, 44, "OFFSET_MISMATCH", was_sent=False))
    kept = table.failed(TXN, replace(ONE, producer_id=8), 44, "OFFSET_MISMATCH", was_sent=False)
    assert len(table) == 1
    table.cleared(dropped.name)
    assert table.of(TXN, 8, 3) is kept
    assert not table._named


# ---- the state topic

ABORT_ONLY = AbortOnly(UUID(int=5), TXN, 7, 3, "OFFSET_MISMATCH …", None, 1_000)
PENDING = ABORT_ONLY._replace(name=UUID(int=6), pending=frozenset({(A, 4)}), at_ms=2_000)


def test_abort_only_records_decode_to_what_was_encoded() -> None:
    view = StateView("cluster")
    records = [encode_abort_only(ABORT_ONLY), encode_abort_only(PENDING)]
    for offset, (key, value) in enumerate(records):
        assert view.apply(Offset(offset), key, value) is None
    assert set(view.abort_only_records.of(7, 3)) == {ABORT_ONLY, PENDING}
    assert view.abort_only_records.of(7, 4) == ()
    assert view.abort_only_records.older_than(2_000) == [ABORT_ONLY]
    (tombstone,) = encode_abort_only_tombstones([ABORT_ONLY])
    assert cleared(tombstone) == ABORT_ONLY.name
    assert view.apply(Offset(2), *tombstone) is None
    assert view.abort_only_records.of(7, 3) == (PENDING,)
    assert view.apply(Offset(3), *tombstone) is None
    assert len(view.abort_only_records) == 1


def test_tombstone_of_one_transaction_keeps_the_next() -> None:
    """v1: T1 is refused and aborted, T2 of the same epoch is refused; the end of T1 is stored late."""
    view = AbortOnlyView()
    view.apply(ABORT_ONLY.key.decode(), encode_abort_only(ABORT_ONLY).value)
    late = encode_abort_only_tombstones(view.of(7, 3))
    view.apply(PENDING.key.decode(), encode_abort_only(PENDING).value)
    for key, value in late:
        view.apply(key.decode(), value)
    assert view.of(7, 3) == (PENDING,)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"abort-only/7", b"{}"),
        (b"abort-only/7/3/x", b"{}"),
        (ABORT_ONLY.key, b"{}"),
        (ABORT_ONLY.key, b"[]"),
        (ABORT_ONLY.key, b'{"transactional_id":"t","why":"w","at_ms":1,"pending":[[1]]}'),
    ],
)
def test_what_cannot_be_read_is_left_out(key: bytes, value: bytes) -> None:
    view = StateView("cluster")
    assert "cannot be read" in (view.apply(Offset(0), key, value) or "")
    assert len(view.abort_only_records) == 0


@pytest.mark.parametrize("key", [b"heartbeat/7", b"abort-only/7", b"abort-only/7/3/x", ABORT_ONLY.key + b"/1"])
def test_what_takes_nothing_away(key: bytes) -> None:
    assert cleared(StateRecord(key, None)) is None
    assert cleared(encode_abort_only(ABORT_ONLY)) is None
