"""A Kafka, and a proxy with ordered partition expansion."""

from __future__ import annotations

from tests.support.fixtures import proxy_fixture

#: Topics by name prefix: ordered expansion, and ordered expansion with partition-count checks.
EXPANDING = """
config_lease_seconds = 3.0

[topics."ordered-*"]
"fencepost.ordered.partition.expansion" = "true"

[topics."counted-*"]
"fencepost.ordered.partition.expansion" = "true"
"fencepost.check.partition.count" = "required"
"""


growing = proxy_fixture(config=EXPANDING)
