"""ApiVersions: what a client is told it may use, which is what the table of APIs and its broker have in common."""

from __future__ import annotations

from typing import Final, NamedTuple

from fencepost_proxy.errors import Error, ProtocolError
from fencepost_proxy.wire.apis import API_VERSIONS, APIS
from fencepost_proxy.wire.control import codec_versions, decode_request, parse_request_header
from fencepost_proxy.wire.schema import Message

#: In Kafka's own request since this version (KIP-511).
_NAMED_FROM: Final = 3
#: Each connection holds it: Kafka's own clients use less than half.
_SOFTWARE_CHARACTERS_MAX: Final = 64


class Software(NamedTuple):
    """What a client says that it is, for people to read: `apache-kafka-java`, `4.3.1`. At most so long, printable."""

    name: str
    version: str


def introduced(frame: memoryview) -> tuple[str | None, Software | None]:
    """The client's id and its software, of an ApiVersions request without its length.

    None where it does not say, or where that cannot be read: Kafka will tell it.
    """
    try:
        header = parse_request_header(frame)
        versions = codec_versions(API_VERSIONS)
        if versions is None or not _NAMED_FROM <= header.api_version <= versions[1]:
            return header.client_id, None
        request = decode_request(API_VERSIONS, header.api_version, frame[header.body_offset :])
    except ProtocolError:
        return None, None
    software = Software(_shown(request.client_software_name), _shown(request.client_software_version))
    return header.client_id, software


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:_SOFTWARE_CHARACTERS_MAX])


def restrict_api_versions(response: Message) -> None:
    """Leaves in a broker's answer only the versions that the table serves too; features stay as the broker says.

    An API of which no version is left is not mentioned at all, as Kafka does. An error answer (35, of v0, with the
    broker's own range for ApiVersions alone) is restricted likewise.
    """
    common = []
    for entry in response.api_keys:
        api = APIS.get(entry.api_key)
        if api is None or api.withheld:
            continue
        entry.min_version = max(entry.min_version, api.min_version)
        entry.max_version = min(entry.max_version, api.max_version)
        if entry.min_version <= entry.max_version:
            common.append(entry)
    response.api_keys = common


def unsupported_api_versions() -> Message:
    """The answer to an ApiVersions request that is newer than this proxy: error 35 and what it could be asked instead.

    Such a request must not go upstream: a broker that knows the version would answer in a format that we do not.
    It is encoded as v0 whatever was asked (KIP-511); the client asks again with a version named here.
    """
    api = APIS[API_VERSIONS]
    known = Message(api_key=API_VERSIONS, min_version=api.min_version, max_version=api.max_version)
    return Message(error_code=Error.UNSUPPORTED_VERSION, api_keys=[known])
