"""Tests whose result differs through the proxy, and why. Any other difference fails the run."""

from __future__ import annotations

from typing import Final

_NOT_A_MULTIPLE: Final = "ordered topics [expand only by multiples](partition-expansion.md)"
#: (suite, test) → reason.
EXPLAINED: Final[dict[tuple[str, str], str]] = {
    ("kafka-python", "test/integration/test_admin_integration.py::test_create_partitions"): _NOT_A_MULTIPLE,
    ("librdkafka", "0081/do_test_CreatePartitions"): _NOT_A_MULTIPLE,
}
