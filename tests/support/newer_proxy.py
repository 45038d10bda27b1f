"""`fencepost proxy` of a newer version: `python -m tests.support.newer_proxy`. It has one more append policy."""

from __future__ import annotations

import sys
from typing import Final

from fencepost_policies import registry
from fencepost_policies.append import POLICY_VIOLATION, Append, Facts, Refusal, where
from fencepost_policies.append_policy import AppendPolicy, Choice

ONE_RECORD: Final = "fencepost.one.record.per.batch"


class OneRecordPerBatch(AppendPolicy[bool]):
    config = Choice(name=ONE_RECORD, default="false", documentation="", settings={"false": False, "true": True})

    def check(self, append: Append, setting: bool, facts: Facts) -> Refusal | None:
        refusal = Refusal(POLICY_VIOLATION, "several_records", f"SEVERAL_RECORDS {where(append)}")
        return None if append.record_count == 1 else refusal


if __name__ == "__main__":
    policy = OneRecordPerBatch()
    registry.POLICIES = (*registry.POLICIES, policy)  # type: ignore[misc]
    registry.CHECKS = (*registry.CHECKS, policy)  # type: ignore[misc]
    from fencepost_proxy.cli.main import main

    sys.exit(main())
