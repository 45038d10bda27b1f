"""Two requests in versions that aiokafka does not have: Produce 9 (up to 8 there) and Metadata 12 (up to 5), whose
response has topic ids."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
    UnsignedVarInt32,
)

_TAGS = ("tags", TaggedFields)
_THROTTLED = ("throttle_time_ms", Int32)
_NO_ID = (0, 0)

_ERRORS = CompactArray(("batch_index", Int32), ("message", CompactString()), _TAGS)
_OFFSETS = [(name, Int64) for name in ("offset", "timestamp", "log_start_offset")]
_APPENDED = CompactArray(
    ("partition", Int32), ("error_code", Int16), *_OFFSETS, ("errors", _ERRORS), ("message", CompactString()), _TAGS
)
_BROKERS = CompactArray(
    ("node_id", Int32), ("host", CompactString()), ("port", Int32), ("rack", CompactString()), _TAGS
)
_NUMBERS = [(name, Int32) for name in ("partition", "leader", "leader_epoch")]
_REPLICAS = [(name, CompactArray(Int32)) for name in ("replicas", "isr", "offline_replicas")]
_PARTITIONS = CompactArray(("error_code", Int16), *_NUMBERS, *_REPLICAS, _TAGS)
_TOPIC_ID = ("id_high", Int64), ("id_low", Int64)
_TOPICS = CompactArray(
    ("error_code", Int16), ("topic", CompactString()), *_TOPIC_ID, ("is_internal", Boolean),
    ("partitions", _PARTITIONS), ("authorized_operations", Int32), _TAGS,
)  # fmt: skip


class ProduceResponse_v9(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 0, 9
    SCHEMA = Schema(
        ("topics", CompactArray(("topic", CompactString()), ("partitions", _APPENDED), _TAGS)), _THROTTLED, _TAGS
    )


class Produce_v9(RequestStruct):  # type: ignore[misc]
    """One batch for one partition, copied as rarely as possible.

    The proxy has a faster path for this version than for aiokafka's own, 8 (`session/fast_path.py`).
    """

    API_KEY, API_VERSION, FLEXIBLE_VERSION = 0, 9, True
    RESPONSE_TYPE, SCHEMA = ProduceResponse_v9, Schema()  # `encode` uses none

    def __init__(self, topic: str, partition: int, timeout_ms: int, batch: bytes) -> None:
        super().__init__()
        name, uvarint = topic.encode(), UnsignedVarInt32.encode
        # No transactional id, acks=all, and an array of one topic.
        head = struct.pack(">bhib", 0, -1, timeout_ms, 2) + uvarint(len(name) + 1) + name
        self._parts = head + struct.pack(">bi", 2, partition) + uvarint(len(batch) + 1), batch, bytes(3)

    def encode(self) -> bytes:
        return b"".join(self._parts)

    def __repr__(self) -> str:  # for aiokafka's debug log: without record contents
        return f"Produce({len(self._parts[1])} bytes)"


class Produce(Request[Produce_v9]):  # type: ignore[misc]
    API_KEY = 0

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, request_struct_class: type[Produce_v9]) -> Produce_v9:
        return request_struct_class(*self._fields)


class MetadataResponse_v12(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 3, 12
    SCHEMA = Schema(
        _THROTTLED, ("brokers", _BROKERS), ("cluster_id", CompactString()), ("controller_id", Int32),
        ("topics", _TOPICS), _TAGS,
    )  # fmt: skip


class MetadataRequest_v12(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, FLEXIBLE_VERSION = 3, 12, True
    RESPONSE_TYPE = MetadataResponse_v12
    SCHEMA = Schema(
        ("topics", CompactArray(*_TOPIC_ID, ("topic", CompactString()), _TAGS)),
        ("allow_auto_topic_creation", Boolean), ("include_topic_authorized_operations", Boolean), _TAGS,
    )  # fmt: skip


class Metadata(Request[MetadataRequest_v12]):  # type: ignore[misc]
    """Of the named topics. Creates none."""

    API_KEY = 3

    def __init__(self, topics: Iterable[str]) -> None:
        self._topics: list[Any] = [(*_NO_ID, topic, {}) for topic in topics]

    def build(self, request_struct_class: type[MetadataRequest_v12]) -> MetadataRequest_v12:
        return request_struct_class(self._topics, False, False, {})


def topic_id(high: int, low: int) -> str:
    """In hexadecimal."""
    return (high.to_bytes(8, "big", signed=True) + low.to_bytes(8, "big", signed=True)).hex()


def update_brokers(cluster: Any, response: Any) -> None:
    """Give aiokafka the brokers alone: it knows older versions, and would log each topic with an error."""
    response.brokers, response.topics = [broker[:4] for broker in response.brokers], []
    cluster.update_metadata(response)
