"""Encodes and decodes headers, and bodies (`Message`) of every API with a schema.

A *frame* here excludes its four bytes of length. A rewritten request keeps the client's header bytes (`replace_body`).
Unknown tagged fields survive (`wire/schema.py`).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from fencepost_proxy.errors import ClientProtocolError, Error, LimitError, ProtocolError, UpstreamProtocolError
from fencepost_proxy.wire import schema
from fencepost_proxy.wire.apis import API_VERSIONS, APIS, api_name
from fencepost_proxy.wire.primitives import INT32, MALFORMED, CutOff, Malformed, read_tags, reason_of
from fencepost_proxy.wire.schema import Message

# --- headers and frames ---------------------------------------------------------------------------------------------


class RequestHeader(NamedTuple):
    """`body_offset` counts from the start of the frame. `tags` is the raw section of tagged fields.

    `client_id` is for logs: bytes that are not UTF-8 are escaped.
    """

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    tags: bytes
    body_offset: int


class ResponseHeader(NamedTuple):
    """`body_offset` counts from the start of the frame."""

    correlation_id: int
    tags: bytes
    body_offset: int


_REQUEST_PREFIX: Final = struct.Struct(">hhih")


def request_header_is_flexible(api_key: int, version: int) -> bool:
    """Whether the request header has tagged fields (v2). False for an unknown API."""
    api = APIS.get(api_key)
    return api is not None and api.flexible_from is not None and version >= api.flexible_from


def response_header_is_flexible(api_key: int, version: int) -> bool:
    """Whether the response header has tagged fields (v1).

    Never for ApiVersions: the client does not know the broker's versions yet (KIP-511).
    """
    return api_key != API_VERSIONS and request_header_is_flexible(api_key, version)


def parse_request_header(frame: memoryview | bytes) -> RequestHeader:
    """The header of a client's frame; v1 only for an unknown API. Raises `ClientProtocolError`."""
    try:
        api_key, version, correlation_id, length = _REQUEST_PREFIX.unpack_from(frame)
        pos = _REQUEST_PREFIX.size
        client_id = None
        if length >= 0:
            if pos + length > len(frame):
                raise CutOff(pos + length)
            client_id = bytes(frame[pos : pos + length]).decode("utf-8", "backslashreplace")
            pos += length
        elif length != -1:
            raise Malformed(f"client id has length {length}")
        tags = b""
        if request_header_is_flexible(api_key, version):
            tags, pos = read_tags(frame, pos)
    except MALFORMED as error:
        raise ClientProtocolError(f"malformed request header of {len(frame)} bytes: {reason_of(error)}") from error
    return RequestHeader(api_key, version, correlation_id, client_id, tags, pos)


def parse_response_header(frame: memoryview | bytes, api_key: int, version: int) -> ResponseHeader:
    """The header of a broker's response to that API and version. Raises `UpstreamProtocolError`."""
    try:
        (correlation_id,) = INT32.unpack_from(frame)
        tags = b""
        pos = INT32.size
        if response_header_is_flexible(api_key, version):
            tags, pos = read_tags(frame, pos)
    except MALFORMED as error:
        message = f"malformed response header of {api_name(api_key)} v{version}: {reason_of(error)}"
        raise UpstreamProtocolError(message) from error
    return ResponseHeader(correlation_id, tags, pos)


def encode_request_frame(
    api_key: int, version: int, correlation_id: int, client_id: str | None, message: Message
) -> bytes:
    """Encodes a whole request with its four bytes of length."""
    out = bytearray(4)
    raw = client_id.encode() if client_id is not None else None
    out += _REQUEST_PREFIX.pack(api_key, version, correlation_id, -1 if raw is None else len(raw))
    out += raw or b""
    if request_header_is_flexible(api_key, version):
        out.append(0)
    out += encode_request(api_key, version, message)
    return _with_length(out)


def encode_response_frame(api_key: int, version: int, correlation_id: int, message: Message) -> bytes:
    """Encodes a whole response with its four bytes of length."""
    out = bytearray(4)
    out += INT32.pack(correlation_id)
    if response_header_is_flexible(api_key, version):
        out.append(0)
    out += encode_response(api_key, version, message)
    return _with_length(out)


def replace_body(frame: memoryview | bytes, body_offset: int, body: bytes) -> bytes:
    """The frame with its header and another body, with four bytes of length."""
    return _with_length(bytearray(4) + frame[:body_offset] + body)


def _with_length(out: bytearray) -> bytes:
    INT32.pack_into(out, 0, len(out) - 4)
    return bytes(out)


# --- bodies ---------------------------------------------------------------------------------------------------------


def codec_versions(api_key: int) -> tuple[int, int] | None:
    """(min, max) version that can be decoded and encoded; None without a schema: such an API can only be relayed."""
    return schema.valid_versions(_name(api_key, "Request"))


#: Limit on array elements of a request. Each becomes an object of about 100 bytes and takes CPU time.
ITEMS_MAX: Final = 100_000


def decode_request(api_key: int, version: int, body: memoryview | bytes) -> Message:
    """Decodes a request of that API and version.

    Raises `ClientProtocolError` if malformed or for extra bytes, `LimitError` above `ITEMS_MAX` array elements.
    """
    limited = schema.LimitedBytes(body)
    limited.items_left = ITEMS_MAX
    return _decode("Request", api_key, version, limited, ClientProtocolError)


def encode_request(api_key: int, version: int, message: Message) -> bytes:
    return _encode("Request", api_key, version, message)


def decode_response(api_key: int, version: int, body: memoryview | bytes) -> Message:
    """Decodes a response; ApiVersions with error 35 is always v0 (KIP-511). Raises `UpstreamProtocolError`."""
    if api_key == API_VERSIONS and bytes(body[:2]) == _UNSUPPORTED_VERSION:
        version = 0
    return _decode("Response", api_key, version, bytes(body), UpstreamProtocolError)


def encode_response(api_key: int, version: int, message: Message) -> bytes:
    if api_key == API_VERSIONS and getattr(message, "error_code", 0) == Error.UNSUPPORTED_VERSION:
        version = 0
    return _encode("Response", api_key, version, message)


_UNSUPPORTED_VERSION: Final = struct.pack(">h", Error.UNSUPPORTED_VERSION)


def _name(api_key: int, kind: str) -> str:
    return api_name(api_key) + kind


def _decode(kind: str, api_key: int, version: int, data: bytes, fault: type[ProtocolError]) -> Message:
    name = _name(api_key, kind)
    codec = schema.codec(name, version)
    if codec is None:
        raise fault(f"no schema of {name} v{version}")
    try:
        message, end = codec.read(data, 0)
    except LimitError as error:
        raise LimitError(f"{name} v{version} of {len(data)} bytes: {error} ({ITEMS_MAX})") from error
    except MALFORMED as error:
        raise fault(f"malformed {name} v{version} of {len(data)} bytes: {reason_of(error)}") from error
    if end != len(data):
        raise fault(f"malformed {name} v{version}: {len(data) - end} extra bytes at the end")
    assert isinstance(message, Message)
    return message


def _encode(kind: str, api_key: int, version: int, message: Message) -> bytes:
    name = _name(api_key, kind)
    codec = schema.codec(name, version)
    if codec is None:
        raise ValueError(f"no schema of {name} v{version}")
    out = bytearray()
    codec.write(out, message)
    return bytes(out)
