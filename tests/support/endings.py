"""Faults of the next EndTxn(commit) of any client."""

from __future__ import annotations

import struct

from tests.kit.fault_proxy import Respond

END_TXN = 26
_FLEXIBLE_FROM, _ABORTABLE_FROM, _WITH_PRODUCER_FROM = 3, 4, 5
UNKNOWN_PRODUCER_ID, TRANSACTION_ABORTABLE = 59, 120


def refuse_commit() -> Respond:
    """Respond as the proxy does, so that a client can continue. The coordinator does not get the request."""
    return Respond("request", api_key=END_TXN, when=commits, respond=_refusal)


def version_of(request: bytes) -> int:
    return int.from_bytes(request[6:8])


def commits(request: bytes) -> bool:
    """`committed` is the last field before the tagged fields, which no client sends."""
    return request[-2 if version_of(request) >= _FLEXIBLE_FROM else -1] == 1


def _refusal(request: bytes) -> bytes:
    version = version_of(request)
    code = TRANSACTION_ABORTABLE if version >= _ABORTABLE_FROM else UNKNOWN_PRODUCER_ID
    end = b"\0" if version >= _FLEXIBLE_FROM else b""
    producer = struct.pack(">qh", -1, -1) if version >= _WITH_PRODUCER_FROM else b""
    body = request[8:12] + end + struct.pack(">ih", 0, code) + producer + end
    return struct.pack(">i", len(body)) + body
