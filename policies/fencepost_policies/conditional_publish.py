"""Conditional publish (KIP-27, KAFKA-2260): append only if the log end offset is the expected offset."""

from __future__ import annotations

from typing import Final

from fencepost_policies.append import (
    INVALID_TIMESTAMP,
    POLICY_VIOLATION,
    Append,
    Check,
    Facts,
    Refusal,
    copied_headers,
    header_unreadable,
    where,
)
from fencepost_policies.append_policy import AppendPolicy, Choice, Reads, Stage

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

#: Added to a mismatch if records of the append may be in the log, or may still be appended, through an earlier attempt.
#: The refusal covers this attempt only.
POSSIBLY_YOURS = "POSSIBLY_YOURS"


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


class ConditionalPublish(AppendPolicy[Check]):
    """`true` checks an expected offset if there is one, `required` demands one."""

    config = CHECK_EXPECTED_OFFSETS
    more_configs = (EXPECTED_OFFSETS_SOURCE,)
    off = Check.OFF
    reads = frozenset({Reads.RECORD_HEADERS})
    stage = Stage.LOG_END

    def check(self, append: Append, setting: Check, facts: Facts) -> Refusal | None:
        if setting is Check.OFF:
            return None
        return (
            header_unreadable(append)
            or self._nothing_stated(append, setting)
            or self._timestamps(append, facts)
            or self._mismatch(append, facts)
        )

    @staticmethod
    def _nothing_stated(append: Append, setting: Check) -> Refusal | None:
        if setting is not Check.REQUIRED or append.expected_base_offset is not None:
            return None
        return Refusal(
            POLICY_VIOLATION,
            "expectation_required",
            f"EXPECTATION_REQUIRED {where(append)}: this topic has "
            "fencepost.check.expected.offsets=required, so the first record of every batch must carry its expected "
            f"offset{copied_headers(append)}",
        )

    @staticmethod
    def _timestamps(append: Append, facts: Facts) -> Refusal | None:
        oldest = facts.oldest_timestamp_ms
        if oldest is None or append.max_timestamp_ms > oldest:
            return None
        have = append.max_timestamp_ms
        return Refusal(
            INVALID_TIMESTAMP,
            "timestamp_too_old",
            f"TIMESTAMP_TOO_OLD {where(append)} newest={have} limit={oldest}: "
            "Kafka forgets a producer by its record timestamps, so the newest record of a conditional batch must be "
            "younger than half of producer.id.expiration.ms (put the event time into the value or a header)",
        )

    @staticmethod
    def _mismatch(append: Append, facts: Facts) -> Refusal | None:
        if append.expected_base_offset is None or facts.log_end_offset is None:
            return None
        if append.contradiction is None and append.expected_base_offset == facts.log_end_offset:
            return None
        return offset_mismatch(append, facts.log_end_offset, facts.log_start_offset)
