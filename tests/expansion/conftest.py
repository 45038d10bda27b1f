"""A Kafka, and a proxy with ordered partition expansion."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.support.proxy import ProxyProcess

#: Topics by name prefix: ordered expansion, and ordered expansion with partition-count checks.
EXPANDING = """
config_lease_seconds = 3.0

[topics."ordered-*"]
"fencepost.ordered.partition.expansion" = "true"

[topics."counted-*"]
"fencepost.ordered.partition.expansion" = "true"
"fencepost.check.partition.count" = "required"
"""


@pytest.fixture(scope="module")
def growing(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    with ProxyProcess(kafka.bootstrap, tmp_path_factory.mktemp("growing"), config=EXPANDING) as process:
        yield process
