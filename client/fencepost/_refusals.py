"""Maps a client library's error to this library's exception. docs/contract.md defines the proxy's messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fencepost.errors import (
    AppendRefusedError,
    FencepostError,
    OffsetMismatchError,
    OffsetViolationError,
    TransactionConflictError,
)

POLICY_VIOLATION = 44

_MISMATCH = re.compile(
    r"OFFSET_MISMATCH topic=\S+ partition=-?\d+ expected=(?P<expected>-?\d+) actual=(?P<actual>-?\d+)"
    r"(?: record=(?P<record>\d+))?(?P<yours> POSSIBLY_YOURS(?:: (?P<why>.*))?)?"
)
#: An earlier pipelined append failed. Its refusal follows: `expected` is that append's, `actual` the log end.
_PREDECESSOR_FAILED = "PREDECESSOR_FAILED "
#: Refusals after which the transaction should be run again.
_CONFLICTS = ("TRANSACTION_CONFLICT ", "SEQUENCE_TAKEN ")
_VIOLATION = re.compile(r"OFFSET_VIOLATION .*\bappended_at=(?P<at>\d+)")


def refusal(topic: str, partition: int, expected: int, *, code: int, message: str | None) -> FencepostError | None:
    """The exception for a failed append that expected offset `expected`; None for errors other than refusals."""
    if code != POLICY_VIOLATION:
        return None
    if message is None:
        return AppendRefusedError(topic, partition, "the server sent no message")
    if message.startswith(_CONFLICTS):
        return TransactionConflictError(f"{topic}-{partition}: {message}")
    if message.startswith(_PREDECESSOR_FAILED):
        # The proxy did not read this append's own offset, so `possibly_yours` is unknown.
        failed = message.removeprefix(_PREDECESSOR_FAILED)
        ahead = _MISMATCH.match(failed)
        if ahead is None and not _VIOLATION.match(failed):
            return AppendRefusedError(topic, partition, message)
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
    return AppendRefusedError(topic, partition, message)


def silent_refusal(
    topic: str,
    partition: int,
    expected: int,
    *,
    base_offset: int,
    append_time_ms: int,
    transactional: bool,
    checks: Sequence[str],
) -> FencepostError:
    """The exception for POLICY_VIOLATION if the client library hides its message; see docs/contract.md.

    `base_offset`, `append_time_ms`: of the answer. `checks`: the topic's other checks.
    """
    if base_offset >= 0 <= append_time_ms:
        return OffsetViolationError(topic, partition, expected, base_offset)
    if base_offset == expected and transactional:
        return TransactionConflictError(f"{topic}-{partition}: another transaction is open on it")
    if base_offset >= 0:
        return OffsetMismatchError(topic, partition, expected, base_offset)
    found = f"the topic has {', '.join(checks)}" if checks else "by a check of the proxy"
    return AppendRefusedError(topic, partition, f"{found} (the client library hides the server's reason)")


def verify(topic: str, partition: int, expected: int, offset: int) -> None:
    """Raises OffsetViolationError if an acknowledged record was appended at another offset than expected."""
    if offset != expected:
        raise OffsetViolationError(topic, partition, expected, offset)
