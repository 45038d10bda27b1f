"""The start of a Produce request, by which the next one of the same client is read without a parser."""

from __future__ import annotations

from struct import Struct
from uuid import UUID

from fencepost_policies.values import value
from fencepost_proxy.session.cutter import REQUEST_BYTES_MIN
from fencepost_proxy.wire.produce import BY_TOPIC_ID, FLEXIBLE, ProducePeek

_ACKS_TIMEOUT = Struct(">hi")
_TOPIC_ID_BYTES = 16


@value
class Known:
    """What the next request of the same client is likely to share, and its meaning.

    `prefix` – from the client id to the end of the only topic's name or id. `before_acks`, `topic` – parts of it, the
    name with its length, from v13 on the id. `is_checked` – it went to a sequencer; else it could be streamed.
    """

    version: int
    prefix: bytes
    before_acks: bytes
    timeout_ms: int
    topic_name: str
    topic: bytes
    is_checked: bool

    def is_about(self, topic_id: UUID) -> bool:
        """Whether it means this topic, or states only its name."""
        return self.version < BY_TOPIC_ID or self.topic == topic_id.bytes


#: Equals no request.
NOTHING_KNOWN = Known(-1, b"", b"", 0, "", b"", False)


def known_start(version: int, head: bytes, peek: ProducePeek, *, is_checked: bool) -> Known | None:
    """None if `head` is incomplete, or if a length is encoded longer than necessary."""
    if peek.end > len(head):
        return None
    prefix = head[REQUEST_BYTES_MIN : peek.end]
    if version < FLEXIBLE:
        return Known(version, prefix, b"", 0, peek.first_topic, b"", False)
    if version >= BY_TOPIC_ID:
        before_topic = peek.end - _TOPIC_ID_BYTES
    else:
        name_bytes = len(peek.first_topic.encode())
        before_topic = peek.end - name_bytes - 1  # its length takes one byte
        if name_bytes >= 0x7F or head[before_topic] != name_bytes + 1:
            return None
    if head[before_topic - 1] != 2:
        return None
    before_acks_end = before_topic - 1 - _ACKS_TIMEOUT.size  # the number of topics takes one byte: it is one topic
    _, timeout_ms = _ACKS_TIMEOUT.unpack_from(head, before_acks_end)
    before_acks, topic = head[REQUEST_BYTES_MIN:before_acks_end], head[before_topic : peek.end]
    return Known(version, prefix, before_acks, timeout_ms, peek.first_topic, topic, is_checked)
