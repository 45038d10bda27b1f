"""What follows from the list of append checks: what batches are read for, metrics, refusal reasons."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import pytest

from fencepost_policies.append import Append, Facts
from fencepost_policies.append_policy import refusal_of
from fencepost_policies.conditional_publish import check_timestamps
from fencepost_policies.fields import OLDEST_TIMESTAMP_MS, Field
from fencepost_policies.idempotence_level import Level, check_level
from fencepost_policies.record_age import RecordAge
from fencepost_policies.registry import CHECKS, REASONS
from fencepost_proxy.errors import LimitError
from fencepost_proxy.metrics import Metrics
from fencepost_proxy.observability.exposition import exposition
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import HEADER_BYTES
from fencepost_proxy.wire.batch_scan import BatchScan, HeaderNames, scan_batch
from fencepost_proxy.wire.compression import MalformedBatch
from fencepost_proxy.wire.records import Effort
from tests.support import raw
from tests.support.docs import ROOT

KEYS = Field(lambda records: list(records.keys()))
_LIMIT = 1 << 20


def _refused_with() -> set[str]:
    """Literal reasons in the sources of the checks."""
    found = set()
    for source in (ROOT / "policies" / "fencepost_policies").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal":
                reason = node.args[1]
                found |= {reason.value} if isinstance(reason, ast.Constant) else set()
    return found


def test_each_reason_is_declared() -> None:
    assert _refused_with() | {"offset_mismatch", "copied_headers"} == set(REASONS)


def test_refusals_of_all_checks_are_counted_from_zero() -> None:
    lines = exposition(Metrics()).decode().splitlines()
    assert {f'fencepost_refusals_total{{reason="{reason}"}} 0.0' for reason in REASONS} <= set(lines)


@pytest.mark.parametrize(
    ("configs", "read", "records", "headers", "fields"),
    [
        ({}, False, False, False, ()),
        ({"fencepost.check.expected.offsets": "true"}, True, True, True, ()),
        ({"fencepost.check.partition.count": "true"}, True, True, False, ()),
        ({"fencepost.idempotence.level": "safe"}, True, False, False, ()),
        ({"fencepost.max.record.age.ms": "1"}, True, True, False, (OLDEST_TIMESTAMP_MS,)),
        ({"fencepost.ordered.partition.expansion": "true"}, True, False, False, ()),
        ({"fencepost.expected.offsets.source": "base", "fencepost.partitioner": "crc32"}, False, False, False, ()),
    ],
)
def test_only_what_the_checks_of_a_topic_need_is_read(
    configs: Mapping[str, str], read: bool, records: bool, headers: bool, fields: tuple[Field[object], ...]
) -> None:
    policy = TopicPolicy.of(configs)
    assert (policy.read, policy.reads_records, policy.reads_headers, policy.fields) == (read, records, headers, fields)
    assert dict(policy.configs) == configs


def test_every_check_is_off_by_default() -> None:
    assert not TopicPolicy.of({check.config.name: check.config.default for check in CHECKS}).read


def _scan(batch: bytes, *fields: Field[object], steps: int = _LIMIT) -> BatchScan:
    where, effort = TopicPartition("t", 0), Effort(_LIMIT, steps)
    return scan_batch(
        memoryview(batch), HeaderNames(), where, source_is_base=False, fields=fields,
        decompressed_bytes_max=_LIMIT, effort=effort,
    )  # fmt: skip


@pytest.mark.parametrize("codec", [0, 1])
def test_each_field_is_computed_from_all_records(codec: int) -> None:
    records = [raw.Record(b"x" * 200, key=key, timestamp_ms=at) for key, at in ((b"a", 9), (None, -1), (b"", 7))]
    scan = _scan(raw.batch(*records, codec=codec), KEYS, OLDEST_TIMESTAMP_MS)
    assert scan.fields == {KEYS: [b"a", None, b""], OLDEST_TIMESTAMP_MS: 7}
    assert _scan(raw.batch(records[1]), OLDEST_TIMESTAMP_MS).fields == {OLDEST_TIMESTAMP_MS: None}
    assert _scan(raw.batch(*records)).fields is None


def test_walk_over_the_records_is_limited_and_checked() -> None:
    batch = raw.batch(*[raw.Record(b"x", key=b"k", timestamp_ms=1)] * 5)
    longer = bytearray(batch)
    longer[HEADER_BYTES + 4 * (len(batch) - HEADER_BYTES) // 5] += 2  # the last record ends after the batch
    for field in (KEYS, OLDEST_TIMESTAMP_MS):
        with pytest.raises(LimitError):
            _scan(batch, field, steps=14)  # 10 for the batch, 5 for its records
        assert _scan(batch, field, steps=15).fields
        with pytest.raises(MalformedBatch):
            _scan(bytes(longer), field)
    _scan(bytes(longer))  # nothing reads its last record


def test_first_policy_that_refuses_decides() -> None:
    old = Append("t", 0, 1, None, fields={OLDEST_TIMESTAMP_MS: 1_000})
    policies = ((RecordAge(), 9_000), (RecordAge(), 500), (RecordAge(), 400))
    refusal = refusal_of(old, policies, Facts(now_ms=10_000))
    assert refusal is not None
    assert "fencepost.max.record.age.ms=500 " in refusal.message
    assert refusal_of(old, policies[:1], Facts(now_ms=10_000)) is None


def test_producer_id_0_is_one_and_a_timestamp_at_the_limit_is_too_old() -> None:
    append = Append("t", 0, 1, 5, producer_id=0, max_timestamp_ms=1_000)
    assert check_level(append, Level.REQUIRED) is None
    assert check_timestamps(append, 999) is None
    assert check_timestamps(append, 1_000) is not None
