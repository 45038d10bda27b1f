"""The start of a Produce request, by which the next one of the same client is read without a parser."""

from __future__ import annotations

from struct import Struct
from uuid import UUID

from fencepost_policies.values import value
from fencepost_proxy.session.frames.cutter import REQUEST_BYTES_MIN
from fencepost_proxy.wire.produce import BY_TOPIC_ID, FLEXIBLE, ProducePeek

_ACKS_TIMEOUT = Struct(">hi")
_TOPIC_ID_BYTES = 16
#: In requests before v9, and what replaces the last one in flexible requests: no tagged field, no transactional id.
_NAME_LENGTH_BYTES = 2
_TOPIC_COUNT_BYTES = 4
_NO_TRANSACTIONAL_ID = b"\xff\xff"
_FLEXIBLE_NO_TRANSACTIONAL_ID = b"\0\0"


@value
class RequestTemplate:
    """What the next request of the same client is likely to share, and its meaning.

    `prefix` – from the client id to the end of the only topic's name or id. `topic` – its end: the name with its
    length, from v13 on the id. `before_acks` – of a checked one: what precedes acks in a flexible request.
    `is_checked` – it went to a sequencer; else it could be streamed. `peek` – what `prefix` says.
    """

    version: int
    prefix: bytes
    before_acks: bytes
    timeout_ms: int
    topic_name: str
    topic: bytes
    is_checked: bool
    peek: ProducePeek

    def starts(self, version: int, head: memoryview) -> bool:
        """Whether that request shares it."""
        end = REQUEST_BYTES_MIN + len(self.prefix)
        return version == self.version and head[REQUEST_BYTES_MIN:end] == self.prefix

    def is_about(self, topic_id: UUID) -> bool:
        """Whether it means this topic, or states only its name."""
        return self.version < BY_TOPIC_ID or self.topic == topic_id.bytes


#: Equals no request.
NO_TEMPLATE = RequestTemplate(-1, b"", b"", 0, "", b"", False, ProducePeek(0, None, 0, ""))


def template_of(version: int, head: bytes, peek: ProducePeek, *, is_checked: bool) -> RequestTemplate | None:
    """None if `head` is incomplete, or if a length is encoded longer than necessary."""
    if peek.end > len(head):
        return None
    name_bytes = len(peek.first_topic.encode())
    if version < FLEXIBLE:
        topic_at = peek.end - name_bytes - _NAME_LENGTH_BYTES
        acks_at = topic_at - _TOPIC_COUNT_BYTES - _ACKS_TIMEOUT.size
        before_acks = head[REQUEST_BYTES_MIN : acks_at - len(_NO_TRANSACTIONAL_ID)] + _FLEXIBLE_NO_TRANSACTIONAL_ID
    else:
        if version >= BY_TOPIC_ID:
            topic_at = peek.end - _TOPIC_ID_BYTES
        else:
            topic_at = peek.end - name_bytes - 1  # its length takes one byte
            if name_bytes >= 0x7F or head[topic_at] != name_bytes + 1:
                return None
        if head[topic_at - 1] != 2:
            return None
        acks_at = topic_at - 1 - _ACKS_TIMEOUT.size  # the number of topics takes one byte: it is one topic
        before_acks = head[REQUEST_BYTES_MIN:acks_at]
    _, timeout_ms = _ACKS_TIMEOUT.unpack_from(head, acks_at)
    prefix, topic = head[REQUEST_BYTES_MIN : peek.end], head[topic_at : peek.end]
    return RequestTemplate(version, prefix, before_acks, timeout_ms, peek.first_topic, topic, is_checked, peek)
