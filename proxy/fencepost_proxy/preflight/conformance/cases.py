"""All cases, in the order of docs/conformance.md."""

from __future__ import annotations

from fencepost_proxy.preflight.conformance import appends, expiry, replicas, transactions
from fencepost_proxy.preflight.conformance.case import CASES, Case

__all__ = ["CASES", "Case", "appends", "expiry", "replicas", "transactions"]
