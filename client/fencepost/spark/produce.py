"""The Produce request of the sink's appends: version 9. aiokafka has versions up to 8."""

from __future__ import annotations

import struct
from typing import Any

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import (
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
    UnsignedVarInt32,
)


class ProduceResponse_v9(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 0, 9
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(
                ("topic", CompactString()),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("offset", Int64),
                        ("timestamp", Int64),
                        ("log_start_offset", Int64),
                        (
                            "record_errors",
                            CompactArray(("batch_index", Int32), ("message", CompactString()), ("tags", TaggedFields)),
                        ),
                        ("error_message", CompactString()),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("throttle_time_ms", Int32),
        ("tags", TaggedFields),
    )


class Produce_v9(RequestStruct):  # type: ignore[misc]
    """One batch for one partition, copied as rarely as possible.

    The proxy has a faster path for this version than for aiokafka's own, 8 (`session/relay/fast_path.py`).
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
