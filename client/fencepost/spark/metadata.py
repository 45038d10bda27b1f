"""The Metadata request: version 12, whose response has topic ids. aiokafka has versions up to 5."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Boolean, CompactArray, CompactString, Int16, Int32, Int64, Schema, TaggedFields

_NO_ID = (0, 0)


class MetadataResponse_v12(Response):  # type: ignore[misc]
    API_KEY, API_VERSION = 3, 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString()),
                ("port", Int32),
                ("rack", CompactString()),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString()),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("topic", CompactString()),
                ("id_high", Int64),
                ("id_low", Int64),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class MetadataRequest_v12(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION, FLEXIBLE_VERSION = 3, 12, True
    RESPONSE_TYPE = MetadataResponse_v12
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("id_high", Int64), ("id_low", Int64), ("topic", CompactString()), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


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
