"""Conditional publish (KIP-27, KAFKA-2260): append only if the log end offset is the expected offset."""

from __future__ import annotations

from typing import Final

from fencepost_policies.append import (
    INVALID_TIMESTAMP,
    POLICY_VIOLATION,
    Append,
    Check,
    Refusal,
    copied_headers,
    header_unreadable,
    where,
)
from fencepost_policies.append_policy import AppendCheck, Choice
from fencepost_policies.fields import RecordHeader

CHECK_EXPECTED_OFFSETS: Final = Choice(
    name="fencepost.check.expected.offsets",
    settings={each.value: each for each in Check},
    default=Check.OFF.value,
    documentation=(
        "Conditional publish (KIP-27). With true, a batch with an expected offset is appended only if the log ends "
        "there, and a batch without one is appended as usual. With required, a batch without an expected offset is "
        "refused."
    ),
)
EXPECTED_OFFSETS_SOURCE: Final = Choice(
    name="fencepost.expected.offsets.source",
    settings={"header": "header", "base": "base"},
    default="header",
    documentation=(
        "Source of a batch's expected offset. With header, the record header fencepost-expected-offset (a base "
        "offset above 0 counts too). With base, the batch's base offset, taken literally: 0 is 0, -1 is none."
    ),
)
CLAIMS: Final = Choice(
    name="fencepost.claims",
    settings={"false": False, "true": True},
    default="false",
    documentation=(
        "For fencepost.check.expected.offsets=required and several proxy processes. With true, a process that has "
        "appended to a partition alone for a while claims it, and then pipelines; another one takes over at once. A "
        "claim takes one offset, which consumers do not receive: the next append must expect one offset more."
    ),
)

#: Added to a mismatch if records of the append may be in the log, or may still be appended, through an earlier attempt.
#: The refusal covers this attempt only.
POSSIBLY_YOURS = "POSSIBLY_YOURS"
#: Reason of a mismatch if the record at the expected offset has this write id and another timestamp.
COPIED_HEADERS: Final = "copied_headers"


def offset_mismatch(
    append: Append,
    actual: int,
    log_start_offset: int = -1,
    *,
    possibly_yours: bool = False,
    why: str | None = None,
    reason: str = "offset_mismatch",
) -> Refusal:
    """Refusal of a batch whose expected offset is not the log end. `actual`: the log end offset.

    If the batch contradicts itself, `expected` is the contradicting record's expected offset, `actual` the offset it
    would have got, and `record=` its index. `why`: what makes it possibly yours, unless equal records are there.
    """
    expected = append.expected_base_offset
    if append.contradiction is not None:
        wrong = append.contradiction
        detail = f"expected={wrong.expected} actual={actual + wrong.offset_delta} record={wrong.record}"
    else:
        detail = f"expected={expected} actual={actual}"
    message = f"OFFSET_MISMATCH {where(append)} {detail}"
    if possibly_yours:
        message += f" {POSSIBLY_YOURS}" + ("" if why is None else f": {why}")
    return Refusal(POLICY_VIOLATION, reason, message, base_offset=actual, log_start_offset=log_start_offset)


class ConditionalPublish(AppendCheck[Check]):
    """`true` checks an expected offset if there is one, `required` demands one. Kafka compares it with the log end."""

    config = CHECK_EXPECTED_OFFSETS
    more_configs = (EXPECTED_OFFSETS_SOURCE, CLAIMS)
    reads = (RecordHeader.EXPECTED_OFFSET, RecordHeader.WRITE_ID)
    reasons = ("offset_mismatch", COPIED_HEADERS, "expectation_required", "timestamp_too_old", "header_unreadable")


def check_statements(append: Append, setting: Check) -> Refusal | None:
    """Before the log end is known: whether what the batch states is readable, and enough."""
    if setting is Check.OFF:
        return None
    unreadable = header_unreadable(append)
    if unreadable is not None or setting is not Check.REQUIRED or append.expected_base_offset is not None:
        return unreadable
    return Refusal(
        POLICY_VIOLATION,
        "expectation_required",
        f"EXPECTATION_REQUIRED {where(append)}: this topic has "
        "fencepost.check.expected.offsets=required, so the first record of every batch must carry its expected "
        f"offset{copied_headers(append)}",
    )


def check_timestamps(append: Append, oldest_ms: int) -> Refusal | None:
    """Of a batch to be fenced: its `max_timestamp_ms` must be above `oldest_ms`."""
    if append.max_timestamp_ms > oldest_ms:
        return None
    return Refusal(
        INVALID_TIMESTAMP,
        "timestamp_too_old",
        f"TIMESTAMP_TOO_OLD {where(append)} newest={append.max_timestamp_ms} limit={oldest_ms}: "
        "Kafka forgets a producer by its record timestamps, so the newest record of a conditional batch must be "
        "younger than half of producer.id.expiration.ms (put the event time into the value or a header)",
    )
