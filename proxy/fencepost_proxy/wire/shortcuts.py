"""What a few bytes of a frame tell, so that it need not be parsed. False is never wrong, only slow."""

from __future__ import annotations

from typing import Final

from fencepost_proxy.wire.produce import FLEXIBLE

_ONE_BYTE_VARINT_MAX: Final = 0x7F
#: Index, error code, base offset, log append time, log start offset.
_PARTITION_BYTES: Final = 30
_THROTTLE_AND_TAGS_BYTES: Final = 5


def names_no_broker(frame: memoryview, api_version: int) -> bool:
    """Whether a Produce response certainly carries no tagged field, of which `node_endpoints` is one.

    `frame` is a whole response, its length in front. Read is the shape that almost every answer has; of others nothing
    is known.
    """
    if api_version < FLEXIBLE:
        return True
    end = len(frame) - _THROTTLE_AND_TAGS_BYTES
    try:
        if frame[8] or frame[-1]:
            return False
        topic_count = frame[9] - 1
        if not 0 < topic_count < _ONE_BYTE_VARINT_MAX:
            return False
        at = 10
        for _ in range(topic_count):
            name_bytes = frame[at]
            if name_bytes > _ONE_BYTE_VARINT_MAX:
                return False
            at += name_bytes
            partition_count = frame[at] - 1
            if partition_count >= _ONE_BYTE_VARINT_MAX:
                return False
            at += 1
            for _ in range(partition_count):
                at += _PARTITION_BYTES
                # Record errors (an empty array, or null), message, tagged fields.
                if frame[at] > 1 or frame[at + 1] or frame[at + 2]:
                    return False
                at += 3
            if frame[at]:
                return False
            at += 1
    except IndexError:
        return False
    return at == end
