"""The hashes that place keyed records, against the clients that use them; and what a batch is refused for."""

from __future__ import annotations

import ctypes
import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import confluent_kafka
import pytest
from aiokafka.partitioner import DefaultPartitioner as AiokafkaPartitioner
from kafka.partitioner.default import DefaultPartitioner as KafkaPythonPartitioner

from fencepost_policies.append import Append, Check, Refusal
from fencepost_policies.partition_count import PartitionFacts, check_count
from fencepost_policies.partitioners import Partitioner, partition_for

_COUNTS = (1, 2, 3, 6, 7, 12, 100, 1999, 2**31 - 1)


def _keys() -> list[bytes]:
    """Of every length up to 40, since hashes treat the last bytes differently, and with every byte."""
    rng = random.Random(253)
    keys = [rng.randbytes(length) for length in range(1, 41) for _ in range(20)]
    return [*keys, bytes(256), bytes(range(256)), b"\xff" * 7, b"key", "ключ".encode()]


@cache
def _librdkafka() -> ctypes.CDLL:
    """The one that confluent-kafka brings: its partitioners are functions of its C API."""
    assert confluent_kafka.__file__ is not None
    (library,) = (Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka-*")
    return ctypes.CDLL(str(library))


def _by_librdkafka(name: str, key: bytes, count: int) -> int:
    function = getattr(_librdkafka(), f"rd_kafka_msg_partitioner_{name}")
    function.restype = ctypes.c_int32
    args = (None, ctypes.c_char_p(key), ctypes.c_size_t(len(key)), ctypes.c_int32(count), None, None)
    placed = function(*args)
    assert isinstance(placed, int)
    return placed


@pytest.mark.parametrize(
    ("partitioner", "name", "empty_key_is_hashed"),
    [
        (Partitioner.CRC32, "consistent_random", False),
        (Partitioner.MURMUR2, "murmur2_random", True),
        (Partitioner.FNV1A, "fnv1a_random", True),
    ],
)
def test_librdkafka_partitioner_agrees_on_every_key(
    partitioner: Partitioner, name: str, empty_key_is_hashed: bool
) -> None:
    keys = [*_keys(), b""] if empty_key_is_hashed else _keys()
    for key in keys:
        for count in _COUNTS:
            assert partition_for(partitioner, key, count) == _by_librdkafka(name, key, count), (key, count)


def test_kafka_python_partitioner_agrees_on_every_key() -> None:
    for key in (*_keys(), b""):
        for count in _COUNTS[:-2]:
            cluster: Any = Mock()
            cluster.topics.return_value = {"t"}
            cluster.partitions_for_topic.return_value = set(range(count))
            cluster.available_partitions_for_topic.return_value = set(range(count))
            placed = KafkaPythonPartitioner().partition("t", None, key, None, b"", cluster)
            assert partition_for(Partitioner.MURMUR2, key, count) == placed, (key, count)


def test_aiokafka_partitioner_agrees_on_every_key() -> None:
    partitioner: Any = AiokafkaPartitioner()
    for key in (*_keys(), b""):
        for count in _COUNTS[:-1]:
            placed = partitioner(key, range(count), range(count))
            assert partition_for(Partitioner.MURMUR2, key, count) == placed, (key, count)


@pytest.mark.parametrize("partitioner", list(Partitioner))
def test_a_record_without_a_key_belongs_anywhere(partitioner: Partitioner) -> None:
    assert partition_for(partitioner, None, 3) is None


def test_librdkafka_default_puts_empty_key_on_any_partition() -> None:
    assert partition_for(Partitioner.CRC32, b"", 3) is None


# --- the policy -------------------------------------------------------------------------------------------------------


def _refusal(append: Append, of: PartitionFacts, check: Check = Check.ON) -> Refusal | None:
    return check_count(append, check, of)


def _append(stated: int | None = None) -> Append:
    return Append("orders", 3, record_count=2, expected_base_offset=None, partition_count=stated)


_STALE = "INVALID_PARTITION_COUNT topic=orders partition=3 expected=6 actual=8"


@pytest.mark.parametrize(
    ("check", "stated", "served", "code", "message"),
    [
        # Stated counts: tests/contract/partition_count.py
        # The stated count wins over the served one.
        ("true", (8, None), 6, 0, ""),
        # No count stated: a guess that refuses no batch that may be right.
        ("true", (None, None), None, 0, ""),
        ("true", (None, None), 8, 0, ""),
        ("true", (None, None), 6, 37, _STALE),
        ("true", (None, None), 9, 0, ""),
        # Off is off.
        ("false", (6, None), 6, 0, ""),
        ("false", (6, 8), None, 0, ""),
    ],
)
def test_what_a_batch_is_refused_for(
    check: str, stated: tuple[int | None, int | None], served: int | None, code: int, message: str
) -> None:
    in_header, in_request = stated
    refusal = _refusal(_append(in_header), PartitionFacts(8, in_request, served=served), Check(check))
    assert (0 if refusal is None else refusal.error_code) == code
    assert (refusal.message if refusal else "").startswith(message)
    assert refusal is None or refusal.base_offset == -1


def test_keys_are_checked_when_batch_states_no_count() -> None:
    # Given keys, of which murmur2 places the third on another of 8 partitions than 3
    here, elsewhere = _placed_on(3, of=8), _placed_on(5, of=8)

    def refusal(*keys: bytes | None, stated: int | None = None) -> tuple[int, str] | None:
        facts = PartitionFacts(8, None, Partitioner.MURMUR2, keys, served=6)
        refused = _refusal(_append(stated), facts)
        return None if refused is None else (refused.error_code, refused.message)

    # Then the first misplaced one is named, and what needs no place has none
    assert refusal(here, None, here) is None, "the served count does not matter where keys are compared"
    assert refusal(here, None, elsewhere) == (
        37,
        "MISPLACED_KEY topic=orders partition=3 record=2 belongs=5 actual=8: of 8 partitions, its key is placed on "
        "another one by murmur2",
    )
    assert refusal(elsewhere, stated=8) is None, "a client that states the count chooses its partitions freely"


def test_keys_are_not_checked_outside_the_grace_period() -> None:
    facts = PartitionFacts(8, None, Partitioner.MURMUR2, keys=None, served=6)
    assert _refusal(_append(), facts) is None


def _placed_on(partition: int, *, of: int) -> bytes:
    return next(
        key
        for key in (b"%d" % number for number in range(1000))
        if partition_for(Partitioner.MURMUR2, key, of) == partition
    )
