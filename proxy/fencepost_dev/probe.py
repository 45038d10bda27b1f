"""Readiness probes of a broker, with hand-written requests, so that starting Kafka needs no client library.

Each raises `OSError` while the broker does not respond. Kafka 3.9 to 4.4 support the versions used.
"""

from __future__ import annotations

import socket
import struct

from fencepost_proxy.types import Address

TIMEOUT_SECONDS = 5.0
GROUP, TRANSACTION = 0, 1
COORDINATOR_TYPES = (GROUP, TRANSACTION)
#: The answer of a broker with an authorizer to requests without a login. It is ready for those with one.
_DENIED = (30, 31, 53)

_METADATA, _FIND_COORDINATOR, _INIT_PRODUCER_ID = 3, 10, 22
_CLIENT_ID = b"fencepost-probe"


def registered_brokers(address: Address) -> set[int]:
    """Ids of live nodes in the broker's metadata (Metadata v1, no topics)."""
    body = _query(address, _METADATA, 1, struct.pack(">i", 0))
    (count,) = struct.unpack_from(">i", body)
    at, node_ids = 4, set()
    for _ in range(count):
        node_id, host_bytes = struct.unpack_from(">ih", body, at)
        at += 6 + host_bytes + 4
        (rack_bytes,) = struct.unpack_from(">h", body, at)
        at += 2 + max(0, rack_bytes)
        node_ids.add(node_id)
    return node_ids


def has_coordinator(address: Address, key_type: int) -> bool:
    """Whether there is a coordinator of groups or transactions (FindCoordinator v1).

    The request also makes Kafka create the internal topic, so that the first client need not wait.
    """
    key = b"fencepost-probe"
    body = _query(address, _FIND_COORDINATOR, 1, struct.pack(">h", len(key)) + key + struct.pack(">b", key_type))
    return _error_after_throttle(body) in (0, *_DENIED)


def gives_producer_ids(address: Address) -> bool:
    """Whether the broker assigns producer ids (InitProducerId v0)."""
    body = _query(address, _INIT_PRODUCER_ID, 0, struct.pack(">hi", -1, 60_000))
    return _error_after_throttle(body) in (0, *_DENIED)


def _error_after_throttle(body: bytes) -> int:
    return int(struct.unpack_from(">ih", body)[1])


def _query(address: Address, api_key: int, version: int, body: bytes) -> bytes:
    """Sends one request on a new connection. Returns the response after its correlation id."""
    header = struct.pack(">hhih", api_key, version, 1, len(_CLIENT_ID)) + _CLIENT_ID
    with socket.create_connection(address, TIMEOUT_SECONDS) as connection:
        connection.sendall(struct.pack(">i", len(header) + len(body)) + header + body)
        with connection.makefile("rb") as answer:
            size = answer.read(4)
            if len(size) < 4:
                raise ConnectionError(f"{address} closed the connection")
            frame = answer.read(*struct.unpack(">i", size))
    return frame[4:]
