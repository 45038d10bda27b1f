"""Headers, sizes, the cache of checked topics, and the promise that `import fencepost` needs no client library."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.record.default_records import DefaultRecordBatchBuilder

from fencepost import CheckIsOffError, LogRecord, Record, RetryPolicy
from fencepost._checks import CheckCache
from fencepost.records import batch_bytes_max, binding_of, conditional_headers, new_write_id, own_headers, write_id_of


def test_the_headers_of_the_contract() -> None:
    assert conditional_headers([("mine", b"x")], 41, b"id", binding_of("orders", 3, "CLUSTER")) == [
        ("mine", b"x"),
        ("fencepost-expected-offset", b"41@orders/3@CLUSTER"),
        ("fencepost-write-id", b"id"),
    ]


def test_headers_of_record_that_was_read_are_replaced() -> None:
    read = conditional_headers([("mine", b"x")], 41, b"id", binding_of("orders", 3, None))
    again = [*read, ("fencepost-partition-count", b"6@orders")]
    assert conditional_headers(again, 7, b"other", binding_of("retry", 0, None)) == [
        ("mine", b"x"),
        ("fencepost-expected-offset", b"7@retry/0"),
        ("fencepost-write-id", b"other"),
    ]
    assert own_headers([("fencepost-write-id", b"id"), ("fencepost-partition-count", b"6@orders")]) == [
        ("fencepost-write-id", b"id")
    ]


@pytest.mark.parametrize("name", ["fencepost-expected-offset", "fencepost-write-id"])
def test_contract_header_set_by_hand_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        conditional_headers([(name, b"7")], 41, b"id", b"")


@pytest.mark.parametrize("offset", [-1, "41", 4.0, True])
def test_what_is_no_offset_is_refused(offset: object) -> None:
    with pytest.raises(ValueError, match="not an offset"):
        conditional_headers([], offset, b"id", b"")  # type: ignore[arg-type]


def test_write_ids_are_readable_and_unique() -> None:
    assert write_id_of(LogRecord(0, 0, None, b"", (("a", b"1"), ("fencepost-write-id", b"id")))) == b"id"
    assert write_id_of(LogRecord(0, 0, None, b"")) is None
    assert len({new_write_id() for _ in range(100)}) == 100


_texts = st.text(st.characters(codec="utf-8"), max_size=40)


@given(
    st.lists(
        st.builds(
            Record,
            value=st.binary(max_size=300),
            key=st.none() | st.binary(max_size=300),
            headers=st.lists(st.tuples(_texts, st.binary(max_size=40)), max_size=4).map(tuple),
            timestamp_ms=st.integers(0, 2**50),
        ),
        min_size=1,
        max_size=30,
    )
)
def test_the_size_of_a_batch_is_never_underestimated(records: list[Record]) -> None:
    """Measured by kafka-python's encoder, whose varints are as long as Kafka's."""
    where = binding_of("t" * 249, 2**31 - 1, "Mk3OEYBSD34fcwNTJENDM2Qx")
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 30)
    for i, r in enumerate(records):
        headers = [*r.headers, ("fencepost-expected-offset", b"9" * 19 + where), ("fencepost-write-id", new_write_id())]
        builder.append(i, r.timestamp_ms, r.key, r.value, headers)
    size = len(builder.build())
    estimate = batch_bytes_max(records, where)
    assert size <= estimate <= size + 100 * len(records)


def test_a_record_needs_content() -> None:
    with pytest.raises(ValueError, match="key or a value"):
        Record(None)


def test_a_retry_policy_needs_time() -> None:
    with pytest.raises(ValueError, match="<= total_seconds"):
        RetryPolicy(attempt_seconds=10, total_seconds=5)


def test_checked_topic_is_cached_until_expiry() -> None:
    now = 0.0
    cache = CheckCache(30, clock=lambda: now)
    assert cache.get("t") is None
    facts = cache.learn("t", {"fencepost.check.expected.offsets": "required", "max.message.bytes": "1048588"})
    assert facts.max_message_bytes == 1048588
    now = 29.9
    assert cache.get("t") is facts
    assert cache.get("other") is None
    now = 30.0
    assert cache.get("t") is None


@pytest.mark.parametrize(
    ("configs", "reason"),
    [
        (
            {"fencepost.check.expected.offsets": "false", "max.message.bytes": "1"},
            "fencepost.check.expected.offsets=false",
        ),
        ({"max.message.bytes": "1"}, "not a Fencepost proxy"),
        ({}, "not visible"),
    ],
)
def test_unchecked_topic_error_names_reason_and_remedy(configs: dict[str, str | None], reason: str) -> None:
    cache = CheckCache(30)
    cache.learn("t", {"fencepost.check.expected.offsets": "true"})
    with pytest.raises(CheckIsOffError, match=reason) as caught:
        cache.learn("t", configs)
    assert "kafka-configs.sh" in str(caught.value)
    assert "--entity-name t --add-config fencepost.check.expected.offsets=true" in str(caught.value)
    assert cache.get("t") is None, "what was switched off must not be remembered as on"


_IMPORTS = """
import sys
import fencepost
unwanted = ("kafka", "aiokafka", "confluent_kafka", "fencepost_proxy", "pyspark", "pyarrow", "numpy")
bad = [m for m in sys.modules if m.split(".")[0] in unwanted or m.startswith("fencepost.spark")]
assert not bad, bad
"""

_MISSING = """
import sys
sys.modules[{library!r}] = None
try:
    import fencepost.{adapter}
except ImportError as error:
    assert "pip install" in str(error) and {package!r} in str(error), error
else:
    raise AssertionError("imported")
"""


def test_importing_fencepost_imports_no_client_library() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True)


@pytest.mark.parametrize(
    ("adapter", "library", "package"),
    [
        ("kafka_python", "kafka", "kafka-python"),
        ("aiokafka", "aiokafka", "aiokafka"),
        ("confluent", "confluent_kafka", "confluent-kafka"),
    ],
)
def test_a_missing_client_library_is_named(adapter: str, library: str, package: str) -> None:
    script = _MISSING.format(adapter=adapter, library=library, package=package)
    subprocess.run([sys.executable, "-c", script], check=True)
