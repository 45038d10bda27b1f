"""The append policies of the proxy, in the order in which DescribeConfigs shows their configs."""

from __future__ import annotations

from typing import Any, Final

from fencepost_policies.append_policy import AppendPolicy
from fencepost_policies.conditional_publish import ConditionalPublish
from fencepost_policies.idempotence_level import IdempotenceLevel
from fencepost_policies.partition_count import PartitionCount
from fencepost_policies.record_age import RecordAge

POLICIES: Final[tuple[AppendPolicy[Any], ...]] = (
    ConditionalPublish(),
    PartitionCount(),
    IdempotenceLevel(),
    RecordAge(),
)
