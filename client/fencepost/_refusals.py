"""Maps a client library's error to this library's exception. docs/contract.md defines the proxy's messages."""

from __future__ import annotations

import re

from fencepost.errors import FencepostError, OffsetMismatchError, OffsetViolationError

POLICY_VIOLATION = 44

_MISMATCH = re.compile(
    r"OFFSET_MISMATCH topic=\S+ partition=-?\d+ expected=(?P<expected>-?\d+) actual=(?P<actual>-?\d+)"
    r"(?: record=(?P<record>\d+))?(?P<yours> POSSIBLY_YOURS(?:: (?P<why>.*))?)?"
)
#: An earlier pipelined append failed. Its refusal follows: `expected` is that append's, `actual` the log end.
_PREDECESSOR_FAILED = "PREDECESSOR_FAILED "
_VIOLATION = re.compile(r"OFFSET_VIOLATION .*\bappended_at=(?P<at>\d+)")


def refusal(
    topic: str, partition: int, expected: int, *, code: int, message: str | None, log_end: int | None = None
) -> FencepostError | None:
    """The exception for a failed append that expected offset `expected`; None for errors other than refusals.

    `message`: the server's, None if the client library drops it. Without a message, 44 is reported as a mismatch, the
    only other cause being a writer that bypasses the proxy. `log_end`: used only without a message.
    """
    if code != POLICY_VIOLATION:
        return None
    if message is None:
        return OffsetMismatchError(topic, partition, expected, log_end)
    if message.startswith(_PREDECESSOR_FAILED):
        # The proxy did not read this append's own offset, so `possibly_yours` is unknown.
        ahead = _MISMATCH.match(message.removeprefix(_PREDECESSOR_FAILED))
        actual = None if ahead is None or ahead["record"] else int(ahead["actual"])
        return OffsetMismatchError(topic, partition, expected, actual, detail=message)
    if found := _MISMATCH.match(message):
        # For a record whose expected offset contradicts its index in the batch, `actual` is that record's offset.
        actual = int(found["actual"]) - int(found["record"] or 0)
        detail = message if int(found["expected"]) != expected else found["why"]
        return OffsetMismatchError(
            topic, partition, expected, actual, possibly_yours=found["yours"] is not None, detail=detail
        )
    if found := _VIOLATION.match(message):
        return OffsetViolationError(topic, partition, expected, int(found["at"]))
    return None


def verify(topic: str, partition: int, expected: int, offset: int) -> None:
    """Raises OffsetViolationError if an acknowledged record was appended at another offset than expected."""
    if offset != expected:
        raise OffsetViolationError(topic, partition, expected, offset)
