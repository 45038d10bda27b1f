"""How producers place keyed records: the clients' hash functions, tested against the clients.

| partitioner | clients | partition without a key, with an empty key |
|---|---|---|
| `murmur2` | Java, kafka-python, aiokafka; librdkafka's `murmur2_random` | any; hashed |
| `crc32` | librdkafka's default, `consistent_random` | any; any |
| `fnv1a` | librdkafka's `fnv1a_random`; Sarama | any; hashed |

`tests/unit/test_partitioners.py` compares with kafka-python, aiokafka and librdkafka, `tests/integration/` with Java.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from zlib import crc32

_WORD = Struct("<I")
_UINT32 = 0xFFFFFFFF
_INT32_MAX = 0x7FFFFFFF
_MURMUR2_SEED = 0x9747B28C
_MURMUR2_M = 0x5BD1E995
_FNV_OFFSET = 0x811C9DC5
_FNV_PRIME = 0x01000193


class Partitioner(Enum):
    """Value of the topic config `partitioner`."""

    MURMUR2 = "murmur2"
    CRC32 = "crc32"
    FNV1A = "fnv1a"


def partition_for(partitioner: Partitioner, key: bytes | None, count: int) -> int | None:
    """The partition for this key among `count`; None if any partition is valid."""
    if key is None or (not key and partitioner is Partitioner.CRC32):
        return None
    if partitioner is Partitioner.MURMUR2:
        return (murmur2(key) & _INT32_MAX) % count
    if partitioner is Partitioner.CRC32:
        return crc32(key) % count
    return fnv1a(key) % count


def murmur2(key: bytes) -> int:
    """32 bits, unsigned (org.apache.kafka.common.utils.Utils.murmur2, which is signed)."""
    length = len(key)
    h = _MURMUR2_SEED ^ length
    whole = length & ~3
    for (word,) in _WORD.iter_unpack(memoryview(key)[:whole]):
        k = word * _MURMUR2_M & _UINT32
        h = (h * _MURMUR2_M & _UINT32) ^ ((k ^ k >> 24) * _MURMUR2_M & _UINT32)
    if whole < length:
        h = (h ^ int.from_bytes(key[whole:], "little")) * _MURMUR2_M & _UINT32
    h = (h ^ h >> 13) * _MURMUR2_M & _UINT32
    return h ^ h >> 15


def fnv1a(key: bytes) -> int:
    """31 bits: as a signed number its absolute value (rdfnv1a.c, after Sarama's hash partitioner)."""
    h = _FNV_OFFSET
    for byte in key:
        h = (h ^ byte) * _FNV_PRIME & _UINT32
    return h if h <= _INT32_MAX else _UINT32 + 1 - h
