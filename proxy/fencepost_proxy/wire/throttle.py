"""For how long Kafka reads nothing more from the connection of a response: `throttle_time_ms` (KIP-219).

Kafka answers a client over its quota at once, and then leaves the client's next requests in the socket for that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fencepost_proxy.errors import ProtocolError
from fencepost_proxy.wire.apis import API_VERSIONS, APIS, PRODUCE, Api
from fencepost_proxy.wire.control import response_header_is_flexible
from fencepost_proxy.wire.peeks import names_no_broker
from fencepost_proxy.wire.primitives import read_uvarint
from fencepost_proxy.wire.produce import FLEXIBLE, parse_produce_response
from fencepost_proxy.wire.schema import fixed_bytes, untagged_fields

NOT_THROTTLED: Final = memoryview(bytes(4))
#: More than the beginning of a response that has the time.
HEAD_BYTES: Final = 19
#: Not in the response; or of Produce, which the fast path reads to its end.
NOWHERE: Final = 0
#: At another position, which the fast path does not look for: beyond any response.
_ELSEWHERE: Final = 1 << 30
_LENGTH_BYTES: Final = 4
_CORRELATION_BYTES: Final = 4
_NAME: Final = "ThrottleTimeMs"
#: Produce, ApiVersions, CreateDelegationToken, DescribeDelegationToken: after an array, or at the end.
_LATER: Final = frozenset({PRODUCE, API_VERSIONS, 38, 41})
#: Of a Produce response with errors or addresses of brokers. Longer ones take too long.
_PARSED_MAX: Final = 64 * 1024
_API_BYTES: Final = 6
_TAGS_BYTES: Final = 1


def _position(api: Api, version: int) -> int:
    if api.key == PRODUCE:
        return NOWHERE
    at = _LENGTH_BYTES + _CORRELATION_BYTES + response_header_is_flexible(api.key, version)
    for name, type_name, _ in untagged_fields(f"{api.name}Response", version):
        if name == _NAME:
            return at
        at += fixed_bytes(type_name) or _ELSEWHERE
    return NOWHERE


#: By API and version: where it is in a response with its length.
THROTTLED_AT: Final[Mapping[int, tuple[int, ...]]] = MappingProxyType(
    {
        key: tuple(_position(api, version) for version in range(api.max_version + 1))
        for key, api in APIS.items()
        if not api.gated
    }
)


def is_at_end(api_key: int, version: int) -> bool:
    """Only a whole response shows it."""
    return api_key in _LATER and version >= (1 if api_key in (PRODUCE, API_VERSIONS) else 0)


def throttle_ms(frame: memoryview, api_key: int, version: int) -> int:
    """`frame`: a response without its length; the beginning suffices unless `is_at_end`. 0: none, or not readable."""
    positions = THROTTLED_AT.get(api_key, ())
    if version >= len(positions):
        return 0
    if is_at_end(api_key, version):
        return _at_end(frame, api_key, version)
    at = positions[version] - _LENGTH_BYTES
    return max(0, _int32(frame, at)) if positions[version] else 0


def _at_end(frame: memoryview, api_key: int, version: int) -> int:
    try:
        if api_key == API_VERSIONS:
            return max(0, _int32(frame, _end_of_apis(frame, version)))
        if api_key == PRODUCE and not _has_no_tags(frame, version):
            return max(0, parse_produce_response(frame, version).throttle_time_ms) if len(frame) <= _PARSED_MAX else 0
    except (IndexError, ValueError, ProtocolError):
        return 0
    flexible_from = APIS[api_key].flexible_from
    tags = flexible_from is not None and version >= flexible_from
    return max(0, _int32(frame, len(frame) - 4 - tags))


def produce_throttle(frame: memoryview, version: int) -> memoryview:
    """Its bytes in a Produce response without tagged fields at its end (`names_no_broker`)."""
    return frame[-4:] if version < FLEXIBLE else frame[-5:-1]


def _has_no_tags(frame: memoryview, version: int) -> bool:
    return version < FLEXIBLE or names_no_broker(memoryview(bytes(_LENGTH_BYTES) + bytes(frame)), version)


def _end_of_apis(frame: memoryview, version: int) -> int:
    at = _CORRELATION_BYTES + 2  # its header has no tags in any version
    if version < 3:
        return at + 4 + max(0, _int32(frame, at)) * _API_BYTES
    count, at = read_uvarint(frame, at)
    return at + max(0, count - 1) * (_API_BYTES + _TAGS_BYTES)


def _int32(frame: memoryview, at: int) -> int:
    part = frame[at : at + 4]
    return int.from_bytes(part, "big", signed=True) if at >= 0 and len(part) == 4 else 0
