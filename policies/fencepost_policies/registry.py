"""The append checks of the proxy, in the order in which DescribeConfigs shows their configs."""

from __future__ import annotations

from typing import Any, Final

from fencepost_policies.append_policy import AppendCheck, AppendPolicy
from fencepost_policies.conditional_publish import ConditionalPublish
from fencepost_policies.idempotence_level import IdempotenceLevel
from fencepost_policies.partition_count import PartitionCount
from fencepost_policies.record_age import RecordAge

POLICIES: Final[tuple[AppendPolicy[Any], ...]] = (
    # docs/write-a-policy.md adds a line here.
    RecordAge(),
)

#: See `append_policy.py` for why these are no policies.
OTHER_CHECKS: Final[tuple[AppendCheck[Any], ...]] = (ConditionalPublish(), PartitionCount(), IdempotenceLevel())

CHECKS: Final = (*OTHER_CHECKS, *POLICIES)
#: Labels of `fencepost_refusals_total`.
REASONS: Final = tuple(dict.fromkeys(reason for check in CHECKS for reason in check.reasons))
