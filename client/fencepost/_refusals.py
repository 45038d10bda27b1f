"""A refusal as a client library shows it -> our exception. The messages are the proxy's: docs/contract.md."""

from __future__ import annotations

import re

from fencepost.errors import FencepostError, OffsetMismatch, OffsetViolation

POLICY_VIOLATION = 44

_MISMATCH = re.compile(
    r"OFFSET_MISMATCH topic=\S+ partition=-?\d+ expected=(?P<expected>-?\d+) actual=(?P<actual>-?\d+)"
    r"(?: record=(?P<record>\d+))?(?P<yours> POSSIBLY_YOURS)?"
)
#: Refused with the batch ahead of it, whose refusal follows: `expected` is that one's, `actual` the log end.
_BEHIND = "SENT_BEHIND_A_FAILED_BATCH "
_VIOLATION = re.compile(r"OFFSET_VIOLATION .*\bappended_at=(?P<at>\d+)")


def refusal(
    topic: str, partition: int, expected: int, *, code: int, message: str | None, log_end: int | None = None
) -> FencepostError | None:
    """The exception for an error on a write that expected the offset `expected`; None if it is not ours to explain.

    `message` is the server's, None where the client library drops it. Then a 44 is taken for a mismatch: that is what
    it is for a write with an expectation, but for the one case in which a writer went around the proxy. `log_end` is
    used where there is no message.
    """
    if code != POLICY_VIOLATION:
        return None
    if message is None:
        return OffsetMismatch(topic, partition, expected, log_end)
    if message.startswith(_BEHIND):
        # Nobody looked at what lies at its own offset: whether an earlier try of it does is not known.
        ahead = _MISMATCH.match(message.removeprefix(_BEHIND))
        actual = None if ahead is None or ahead["record"] else int(ahead["actual"])
        return OffsetMismatch(topic, partition, expected, actual, detail=message)
    if found := _MISMATCH.match(message):
        # For a record that contradicts its place in the batch, `actual` is the offset that this record would get.
        actual = int(found["actual"]) - int(found["record"] or 0)
        detail = message if int(found["expected"]) != expected else None
        return OffsetMismatch(
            topic, partition, expected, actual, possibly_yours=found["yours"] is not None, detail=detail
        )
    if found := _VIOLATION.match(message):
        return OffsetViolation(topic, partition, expected, int(found["at"]))
    return None


def verify(topic: str, partition: int, expected: int, offset: int) -> None:
    """Raises OffsetViolation if an acknowledged record lies elsewhere than expected: then nothing checked it."""
    if offset != expected:
        raise OffsetViolation(topic, partition, expected, offset)
