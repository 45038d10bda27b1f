"""ApiVersions: a client receives the versions that the API table and its broker have in common."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from fencepost_proxy.errors import Error, ProtocolError
from fencepost_proxy.wire.apis import API_VERSIONS, APIS
from fencepost_proxy.wire.control import (
    codec_versions,
    decode_request,
    decode_response,
    encode_response,
    parse_request_header,
)
from fencepost_proxy.wire.schema import Message

#: First request version with the client's software (KIP-511).
_NAMED_FROM: Final = 3
#: Stored per connection; Kafka's own clients use less than half.
_SOFTWARE_CHARACTERS_MAX: Final = 64


class Software(NamedTuple):
    """Software that a client reports, such as `apache-kafka-java`, `4.3.1`. Printable, at most 64 characters each."""

    name: str
    version: str


def introduced(frame: memoryview) -> tuple[str | None, Software | None]:
    """Client id and software from an ApiVersions request (a frame without its length).

    None if absent or malformed: Kafka then responds with the error.
    """
    try:
        header = parse_request_header(frame)
        versions = codec_versions(API_VERSIONS)
        if versions is None or not _NAMED_FROM <= header.api_version <= versions[1]:
            return header.client_id, None
        request = decode_request(API_VERSIONS, header.api_version, frame[header.body_offset :])
    except ProtocolError:
        return None, None
    return header.client_id, _software(_shown(request.client_software_name), _shown(request.client_software_version))


@lru_cache(maxsize=256)
def _software(name: str, version: str) -> Software:
    """Many connections have the same one."""
    return Software(name, version)


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:_SOFTWARE_CHARACTERS_MAX])


@lru_cache(maxsize=8)
def restricted_api_versions(version: int, body: bytes) -> bytes:
    """The body of a broker's response, restricted. Every connection begins with one, and a broker's are all equal.

    Raises `UpstreamProtocolError`.
    """
    response = decode_response(API_VERSIONS, version, memoryview(body))
    restrict_api_versions(response)
    return encode_response(API_VERSIONS, version, response)


def restrict_api_versions(response: Message) -> None:
    """Restricts a broker's response to the versions of the API table. Features are unchanged.

    An API without a common version is removed, as in Kafka. An error response (35, v0, with only the broker's range of
    ApiVersions) is restricted too.
    """
    common = []
    for entry in response.api_keys:
        api = APIS.get(entry.api_key)
        if api is None or api.gated:
            continue
        entry.min_version = max(entry.min_version, api.min_version)
        entry.max_version = min(entry.max_version, api.max_version)
        if entry.min_version <= entry.max_version:
            common.append(entry)
    response.api_keys = common


def unsupported_api_versions() -> Message:
    """The response to an ApiVersions request that is newer than this proxy: error 35 and the served versions.

    Such a request is not relayed: a newer broker would respond in a format that the proxy cannot decode. The response
    is encoded as v0 (KIP-511). The client then retries with a version from it.
    """
    api = APIS[API_VERSIONS]
    known = Message(api_key=API_VERSIONS, min_version=api.min_version, max_version=api.max_version)
    return Message(error_code=Error.UNSUPPORTED_VERSION, api_keys=[known])
