"""Error codes in Kafka's responses: which a retry or a metadata refresh may resolve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fencepost_proxy.cluster.broker import UpstreamUnavailable
from fencepost_proxy.errors import Error, error_name
from fencepost_proxy.wire.schema import Message

#: Error codes that a retry or a metadata refresh may resolve.
RETRIABLE: Final = frozenset(
    {
        Error.UNKNOWN_TOPIC_OR_PARTITION,
        Error.LEADER_NOT_AVAILABLE,
        Error.NOT_LEADER_OR_FOLLOWER,
        Error.REQUEST_TIMED_OUT,
        Error.KAFKA_STORAGE_ERROR,
        Error.FENCED_LEADER_EPOCH,
        Error.UNKNOWN_LEADER_EPOCH,
        Error.UNKNOWN_TOPIC_ID,
        Error.INCONSISTENT_TOPIC_ID,
        Error.REPLICA_NOT_AVAILABLE,
        Error.COORDINATOR_LOAD_IN_PROGRESS,
        Error.COORDINATOR_NOT_AVAILABLE,
        Error.NOT_COORDINATOR,
        Error.NOT_CONTROLLER,
        Error.OFFSET_NOT_AVAILABLE,  # the new leader does not know its high watermark yet
        Error.THROTTLING_QUOTA_EXCEEDED,
    }
)


class Retry(Exception):
    """A retry after a metadata refresh may succeed."""


def check(error_code: int, api: str, message: str | None = None) -> None:
    """Raises `Retry`, or `UpstreamUnavailable` with the error code. 0 is no error."""
    if not error_code:
        return
    text = f"{api} returned {error_name(error_code)}" + (f" ({message})" if message else "")
    if error_code in RETRIABLE:
        raise Retry(text)
    raise UpstreamUnavailable(text, error_code=error_code)


def only(items: Sequence[Message], api: str) -> Message:
    """The response to the only topic or partition of the request."""
    if len(items) != 1:
        raise UpstreamUnavailable(f"{api} answered for {len(items)} topics or partitions instead of one")
    return items[0]
