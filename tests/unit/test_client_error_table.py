"""What each kind of refusal becomes with each client library: the table of docs/client.md.

kafka-python has the proxy's message, confluent-kafka the base offset. aiokafka has neither, so the library takes the
base offset and the append time from the response.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from confluent_kafka import KafkaError
from kafka.errors import InvalidRecordError, PolicyViolationError

import fencepost.aiokafka._producer as with_aiokafka
import fencepost.kafka_python._producer as with_kafka_python
from fencepost import FencepostError, OffsetMismatchError, OffsetViolationError
from fencepost.confluent._producer import ConditionalProducer, LogEnds
from fencepost_policies.append import Append, Refusal
from fencepost_policies.conditional_publish import offset_mismatch
from tests.support.clients import LIBRARIES
from tests.support.docs import ROOT

EXPECTED = 41
CHECKS = ("fencepost.check.partition.count=required",)
_MISMATCH = offset_mismatch(Append("orders", 3, 5, EXPECTED), 57)
_VIOLATION = Refusal(44, "", "OFFSET_VIOLATION topic=orders appended_at=60: why", 60, log_append_time_ms=0)
#: kind: (the proxy's answer, whether the producer is transactional, class)
KINDS: dict[str, tuple[Refusal, bool, str]] = {
    "`OFFSET_MISMATCH`": (_MISMATCH, False, "OffsetMismatchError"),
    "the same in a transaction": (_MISMATCH, True, "OffsetMismatchError"),
    "`OFFSET_VIOLATION`": (_VIOLATION, False, "OffsetViolationError"),
    "`TRANSACTION_CONFLICT`, `SEQUENCE_TAKEN`": (
        Refusal(44, "", "TRANSACTION_CONFLICT topic=orders", EXPECTED),
        True,
        "TransactionConflictError",
    ),
    "any other 44": (Refusal(44, "", "PARTITION_COUNT_REQUIRED topic=orders"), False, "AppendRefusedError"),
    "any other 44 in a transaction": (
        Refusal(44, "", "TRANSACTIONS_NOT_SUPPORTED topic=orders"),
        True,
        "AppendRefusedError",
    ),
}


class _Batch:
    error: Any = None

    def __init__(self, sends: int = 1) -> None:
        self.retry_count = sends

    def failure(self, exception: Exception) -> None:
        self.error = self.error or exception


def _answered(refusal: Refusal, sends: int = 1) -> Any:
    """The error of a batch of aiokafka."""
    batch = _Batch(sends)
    handler = with_aiokafka._ProduceHandler.__new__(with_aiokafka._ProduceHandler)
    handler._batches = {TopicPartition("orders", 3): batch}
    handler._client, handler._to_reenqueue = None, []
    handler._can_retry = lambda *_: False
    answer = (3, refusal.error_code, refusal.base_offset, refusal.log_append_time_ms, -1)
    handler.handle_response(SimpleNamespace(API_VERSION=7, topics=[("orders", [answer])]))
    return batch.error


@pytest.mark.parametrize(("sends", "earlier"), [(1, False), (2, True)])
def test_aiokafka_batch_sent_twice_may_be_appended(sends: int, earlier: bool) -> None:
    assert _answered(Refusal(44, "", ""), sends).earlier is earlier


def _by_aiokafka(refusal: Refusal, *, transactional: bool) -> Any:
    error = _answered(refusal)
    producer: Any = with_aiokafka.ConditionalProducer.__new__(with_aiokafka.ConditionalProducer)
    producer._closed = True
    producer._txn_manager = SimpleNamespace(transactional_id="w") if transactional else None
    producer._checks = SimpleNamespace(others=lambda _: CHECKS)
    return producer._refusal(error, "orders", 3, EXPECTED) or error


def _by_confluent(refusal: Refusal, *, transactional: bool) -> Any:
    outcome: Any = ConditionalProducer._outcome
    checks = SimpleNamespace(others=lambda _: CHECKS)
    this = SimpleNamespace(_log_ends=LogEnds(), _transactional=transactional, _checks=checks)
    message = SimpleNamespace(offset=lambda: refusal.base_offset)
    return outcome(this, ("orders", 3, EXPECTED), KafkaError(refusal.error_code), message, 0)


def _by_kafka_python(refusal: Refusal, *, transactional: bool) -> Any:
    inner = with_kafka_python.SendFuture()
    future = with_kafka_python.ConditionalFuture(inner, "orders", 3, EXPECTED)
    inner.failure({44: PolicyViolationError, 87: InvalidRecordError}[refusal.error_code](refusal.message))
    return future.exception


BY: dict[str, Any] = {
    "kafka-python": _by_kafka_python,
    "aiokafka": _by_aiokafka,
    "confluent-kafka": _by_confluent,
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_refusal_becomes_the_class_of_the_table(kind: str, library: str) -> None:
    refusal, transactional, name = KINDS[kind]
    if kind == "`OFFSET_VIOLATION`" and library == "confluent-kafka":
        name = "OffsetMismatchError"  # as the page says
        refusal = replace(refusal, base_offset=57)
    error = BY[library](refusal, transactional=transactional)
    assert type(error).__name__ == name
    assert isinstance(error, FencepostError)
    if isinstance(error, OffsetMismatchError):
        assert error.actual == 57
    elif isinstance(error, OffsetViolationError):
        assert (error.outcome, error.appended_at) == ("appended", 60)
    elif name == "AppendRefusedError":
        assert (error.outcome, error.retriable) == ("refused", False)
        assert (refusal.message if library == "kafka-python" else CHECKS[0]) in str(error)


@pytest.mark.parametrize("library", LIBRARIES)
def test_invalid_record_is_a_final_error_of_the_library(library: str) -> None:
    error = BY[library](Refusal(87, "", "HEADER_UNREADABLE topic=orders"), transactional=False)
    code = error.code() if isinstance(error, KafkaError) else error.errno
    assert code == 87
    assert not (error.retriable() if isinstance(error, KafkaError) else error.retriable)


def test_page_has_this_table() -> None:
    page = (ROOT / "docs" / "client.md").read_text("utf-8")
    for kind, (_, _, name) in KINDS.items():
        if not kind.endswith("in a transaction"):
            assert re.search(rf"^\| {re.escape(kind)} \|.*\| `{name}` \|", page, re.MULTILINE), kind


def test_records_of_a_batch_refused_by_another_check_are_no_mismatches() -> None:
    """librdkafka adds each record's place to the base offset: -1, 0, 1."""
    ends = LogEnds()
    assert [ends.of_refusal("t", 0, 41 + at, at - 1, 0) for at in range(3)] == [-1, -1, -1]
