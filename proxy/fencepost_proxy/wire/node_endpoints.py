"""Brokers' addresses after the records of a response: Fetch v16+ (KIP-951), ShareFetch and ShareAcknowledge.

Kafka sends them if a partition has error 6 or 74 (NOT_LEADER_OR_FOLLOWER, FENCED_LEADER_EPOCH), together with that
partition's `CurrentLeader` (`KafkaApis.scala`). Most responses have none, and are relayed unchanged.

`NodeEndpoints` is the last field: in Fetch a tagged one, in the others an array before the tagged fields. It and what
follows is the *trailer* here. `EndpointWalk` finds it in a response that is being streamed. It follows the lengths of
all fields before it, and needs no other bytes, so no record is buffered. Only the trailer is.

- A response that is in memory as a whole gets clients' addresses (`rewritten`).
- The length of one that is streamed has been sent. It gets them if they take as many bytes (`in_place`). Otherwise the
  field is left out, and a tagged field that Kafka does not define takes the remaining bytes. Clients skip unknown tags
  (KIP-482). They know the address of the new leader from Metadata (Java's `Metadata.updatePartitionLeadership` uses
  that), or request Metadata, as before KIP-951.

The layouts come from Kafka's schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum, auto
from functools import cache
from typing import Any, Final

from fencepost_proxy.errors import ConfigError, UpstreamProtocolError
from fencepost_proxy.wire.apis import FETCH, SHARE_ACKNOWLEDGE, SHARE_FETCH, api_name
from fencepost_proxy.wire.primitives import (
    MALFORMED,
    NO_TAGS,
    Malformed,
    join_tags,
    read_tags,
    read_uvarint,
    reason_of,
    split_tags,
    write_uvarint,
)
from fencepost_proxy.wire.produce import (
    NODE_ENDPOINTS_TAG,
    NodeEndpoint,
    encode_node_endpoints,
    read_node_endpoints,
)
from fencepost_proxy.wire.schema import fields_of, fixed_bytes, untagged_fields

#: First version whose response can name brokers.
ENDPOINTS_FROM: Final = {FETCH: 16, SHARE_FETCH: 1, SHARE_ACKNOWLEDGE: 1}
#: More than 1,000 brokers with long names.
TRAILER_BYTES_MAX: Final = 1 << 18
_FIELD: Final = "NodeEndpoints"
#: Tags that no version of Kafka uses: of one byte, and of two.
_UNKNOWN_TAGS: Final = (0x7F, 0x3FFF)
_CORRELATION_ID_BYTES: Final = 4
#: Header tags, throttle time, error code, session id.
_FETCH_TOPICS_AT: Final = _CORRELATION_ID_BYTES + 1 + 10
_TOPIC_ID_BYTES: Final = 16
#: Index, error code, high watermark, last stable offset, log start offset.
_FETCH_PARTITION_BYTES: Final = 30
_PREFERRED_REPLICA_BYTES: Final = 4

Readdress = Callable[[NodeEndpoint], NodeEndpoint]


# --- the way to the trailer -------------------------------------------------------------------------------------------


class _Skip(Enum):
    """`FIXED`: so many bytes. `SIZED`: a length, and so many bytes. `ARRAY`: a count, and so many structs."""

    FIXED = auto()
    SIZED = auto()
    ARRAY = auto()
    TAGS = auto()


_Steps = tuple[tuple[_Skip, Any], ...]


@cache
def _steps(api_key: int, version: int) -> _Steps:
    """From the end of the correlation id to the trailer."""
    fields = untagged_fields(f"{api_name(api_key)}Response", version)
    before = [field for field in fields if field[0] != _FIELD]
    return (_Skip.TAGS, None), *_steps_over(before, version)


def _steps_over(fields: list[tuple[str, str, list[dict[str, Any]]]], version: int) -> _Steps:
    steps: list[tuple[_Skip, Any]] = []
    for _, type_name, inner in fields:
        size = fixed_bytes(type_name)
        if size is not None:
            if steps and steps[-1][0] is _Skip.FIXED:
                size += steps.pop()[1]
            steps.append((_Skip.FIXED, size))
        elif type_name in ("string", "bytes", "records"):
            steps.append((_Skip.SIZED, None))
        else:
            struct = (*_steps_over(fields_of(inner, version), version), (_Skip.TAGS, None))
            if type_name.startswith("[]"):
                steps.append((_Skip.ARRAY, struct))
            else:
                steps += struct
    return tuple(steps)


def _walk(steps: _Steps, skip: int) -> Generator[int, memoryview, int]:
    """Yields how many bytes to skip, and gets the next ones; returns how many to skip at the end."""
    for kind, argument in steps:
        if kind is _Skip.FIXED:
            skip += argument
            continue
        head = yield skip
        count, skip = read_uvarint(head, 0)
        if kind is _Skip.ARRAY:
            for _ in range(count - 1):
                skip = yield from _walk(argument, skip)
        elif kind is _Skip.SIZED:
            skip += max(count - 1, 0)
        else:
            for _ in range(count):
                head = yield skip
                _, skip = read_uvarint(head, 0)
                head = yield skip
                size, skip = read_uvarint(head, 0)
                skip += size
    return skip


class EndpointWalk:
    """Watches a response that is being streamed (`session.cutter.Watch`). `frame_bytes`: without its length."""

    __slots__ = ("_api_key", "_at", "_frame_bytes", "_readdress", "_version", "_walk", "at_trailer", "first_at")

    #: What `probe` needs, unless the frame ends before: the longest number.
    head_bytes = 5

    def __init__(self, api_key: int, version: int, frame_bytes: int, readdress: Readdress) -> None:
        self._api_key = api_key
        self._version = version
        self._frame_bytes = frame_bytes
        self._readdress = readdress
        self._walk: Generator[int, memoryview, int] | None = _walk(_steps(api_key, version), 0)
        next(self._walk)
        self.first_at = self._at = _CORRELATION_ID_BYTES
        self.at_trailer = False

    def probe(self, head: memoryview) -> int:
        """How many bytes to skip before the next one; 0 at the trailer. Raises `UpstreamProtocolError`."""
        if self._walk is None:
            self.at_trailer = True
            return 0
        try:
            skip = self._walk.send(head)
        except StopIteration as end:
            self._walk, skip = None, end.value
        except MALFORMED as error:
            raise self._malformed(reason_of(error)) from error
        self._at += skip
        left = self._frame_bytes - self._at
        if left <= 0:
            raise self._malformed("a length in it leads beyond its end")
        if self._walk is None and left > TRAILER_BYTES_MAX:
            raise self._malformed(f"{left} bytes follow the records; at most {TRAILER_BYTES_MAX} are accepted")
        return skip

    def in_place(self, trailer: memoryview) -> memoryview:
        """The trailer for clients, in as many bytes."""
        data = bytes(trailer)
        new = rewritten_trailer(self._api_key, self._version, data, self._readdress)
        if len(new) != len(data):
            new = _without_endpoints(self._api_key, data)
        return memoryview(new)

    def _malformed(self, reason: str) -> UpstreamProtocolError:
        return _malformed(self._api_key, self._version, self._frame_bytes, reason)


def _malformed(api_key: int, version: int, frame_bytes: int, reason: str) -> UpstreamProtocolError:
    return UpstreamProtocolError(f"malformed {api_name(api_key)} v{version} response of {frame_bytes} bytes: {reason}")


def _trailer_at(api_key: int, version: int, frame: memoryview) -> int:
    walk = EndpointWalk(api_key, version, len(frame), lambda endpoint: endpoint)
    at = walk.first_at
    while True:
        at += walk.probe(frame[at : at + walk.head_bytes])
        if walk.at_trailer:
            return at


# --- responses that are in memory -------------------------------------------------------------------------------------


def names_no_node(frame: memoryview, api_key: int, version: int) -> bool:
    """Whether a whole response, without its length, certainly has no such addresses. False if it is malformed."""
    if api_key == FETCH and _is_usual_fetch(frame):
        return True
    try:
        return not _has_endpoints(api_key, frame[_trailer_at(api_key, version, frame) :])
    except UpstreamProtocolError:
        return False


def _is_usual_fetch(frame: memoryview) -> bool:
    """Whether it has the common form, without tagged fields and aborted transactions. False: unknown."""
    try:
        if frame[_CORRELATION_ID_BYTES]:
            return False
        topic_count, at = read_uvarint(frame, _FETCH_TOPICS_AT)
        for _ in range(topic_count - 1):
            partition_count, at = read_uvarint(frame, at + _TOPIC_ID_BYTES)
            for _ in range(partition_count - 1):
                at += _FETCH_PARTITION_BYTES
                if frame[at] > 1:  # aborted transactions: null, none, or some
                    return False
                length, at = read_uvarint(frame, at + 1 + _PREFERRED_REPLICA_BYTES)
                at += max(length - 1, 0)
                if frame[at]:
                    return False
                at += 1
            if frame[at]:
                return False
            at += 1
        return frame[at] == 0 and at + 1 == len(frame)
    except (IndexError, Malformed):
        return False


def rewritten(frame: memoryview, api_key: int, version: int, readdress: Readdress) -> list[bytes | memoryview]:
    """The parts of such a response for clients. Raises `UpstreamProtocolError`."""
    at = _trailer_at(api_key, version, frame)
    return [frame[:at], rewritten_trailer(api_key, version, bytes(frame[at:]), readdress)]


# --- the trailer ------------------------------------------------------------------------------------------------------


def _has_endpoints(api_key: int, trailer: bytes | memoryview) -> bool:
    """False is certain."""
    return trailer[0] > 0 if api_key == FETCH else trailer[0] > 1


def rewritten_trailer(api_key: int, version: int, trailer: bytes, readdress: Readdress) -> bytes:
    """The trailer for clients. Brokers without an address for clients are left out."""
    try:
        endpoints, others = _read_trailer(api_key, trailer)
    except MALFORMED as error:
        raise _malformed(api_key, version, len(trailer), f"its end: {reason_of(error)}") from error
    if not endpoints:
        return trailer
    for_clients = []
    for endpoint in endpoints:
        try:
            for_clients.append(readdress(endpoint))
        except (ConfigError, LookupError):
            continue
    return _trailer(api_key, tuple(for_clients), others)


_Tags = list[tuple[int, bytes]]


def _read_trailer(api_key: int, trailer: bytes) -> tuple[tuple[NodeEndpoint, ...], _Tags]:
    endpoints: tuple[NodeEndpoint, ...] = ()
    at = 0
    if api_key != FETCH:
        endpoints, at = read_node_endpoints(trailer, 0)
    section, end = read_tags(trailer, at)
    if end != len(trailer):
        raise Malformed(f"{len(trailer) - end} extra bytes")
    tags = split_tags(section)
    if api_key == FETCH:
        for tag, contents in tags:
            if tag == NODE_ENDPOINTS_TAG:
                endpoints, at = read_node_endpoints(contents, 0)
                if at != len(contents):
                    raise Malformed(f"{len(contents) - at} extra bytes after the node endpoints")
        tags = [field for field in tags if field[0] != NODE_ENDPOINTS_TAG]
    return endpoints, tags


def _trailer(api_key: int, endpoints: tuple[NodeEndpoint, ...], others: _Tags) -> bytes:
    out = bytearray()
    encoded = encode_node_endpoints(endpoints)
    if api_key != FETCH:
        out += encoded
    elif endpoints:
        others = [(NODE_ENDPOINTS_TAG, encoded), *others]
    out += join_tags(others) or NO_TAGS
    return bytes(out)


def _without_endpoints(api_key: int, trailer: bytes) -> bytes:
    """No endpoints in as many bytes: an unknown tagged field takes the rest."""
    _, others = _read_trailer(api_key, trailer)
    missing = len(trailer) - len(_trailer(api_key, (), others))
    for tag in _UNKNOWN_TAGS:
        for size_bytes in range(1, 4):
            padded = sorted([*others, (tag, bytes(max(missing - _bytes_of(tag) - size_bytes, 0)))])
            new = _trailer(api_key, (), padded)
            if len(new) == len(trailer):
                return new
    raise AssertionError(f"no tagged field takes {missing} bytes")


def _bytes_of(number: int) -> int:
    out = bytearray()
    write_uvarint(out, number)
    return len(out)
