"""Tests that come out otherwise through the proxy, and why. Any other difference fails the run."""

from __future__ import annotations

from typing import Final

_NOT_A_MULTIPLE: Final = (
    "it asks for a number of partitions that is no multiple of the last; ordered topics expand by a multiple "
    "([how to grow a topic](partition-expansion.md))"
)
#: By suite and test.
EXPLAINED: Final[dict[tuple[str, str], str]] = {
    ("kafka-python", "test/integration/test_admin_integration.py::test_create_partitions"): _NOT_A_MULTIPLE,
    ("librdkafka", "0081/do_test_CreatePartitions"): _NOT_A_MULTIPLE,
}
