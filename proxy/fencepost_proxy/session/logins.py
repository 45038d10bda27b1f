"""When a client's login ends: the answer that ends it says so (KIP-368)."""

from __future__ import annotations

from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.wire.apis import SASL_AUTHENTICATE
from fencepost_proxy.wire.control import decode_response, parse_response_header

_FOR_EVER = float("inf")
#: Before that it is not said.
_LIFETIME_FROM = 1
#: So much of it, and so many seconds at most, before Kafka takes it for ended: what is sent has its way to go. Clients
#: log in anew before that: Java's at 95 % of the time at the latest.
_EARLIER = 0.03
_EARLIER_SECONDS_MAX = 1.0


def login_ends(frame: memoryview, version: int, asked_at: float) -> float:
    """A little before Kafka takes it for ended: its time began after `asked_at`. What cannot be read ends nothing."""
    if version < _LIFETIME_FROM:
        return _FOR_EVER
    try:
        start = parse_response_header(frame, SASL_AUTHENTICATE, version).body_offset
        lifetime_ms: int = decode_response(SASL_AUTHENTICATE, version, frame[start:]).session_lifetime_ms
    except ProtocolError:
        return _FOR_EVER
    if lifetime_ms <= 0:
        return _FOR_EVER
    seconds = lifetime_ms / 1000
    return asked_at + seconds - min(seconds * _EARLIER, _EARLIER_SECONDS_MAX)
