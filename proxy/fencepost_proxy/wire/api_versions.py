"""ApiVersions: what a client is told it may use, which is what the table of APIs and its broker have in common."""

from __future__ import annotations

from fencepost_proxy.errors import Error
from fencepost_proxy.wire.apis import API_VERSIONS, APIS
from fencepost_proxy.wire.schema import Message


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
