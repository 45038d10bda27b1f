"""confluent-kafka-python's tests/integration/conftest.py needs trivup; this one uses the Kafka that `KAFKA` names.

Modules that start a Kafka or need a schema registry are replaced by empty ones.
"""

import os
import sys
from types import ModuleType

import pytest


class Absent(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for absent in (
    *("trivup", "trivup.clusters", "trivup.clusters.KafkaCluster", "confluent_kafka.avro"),
    *("confluent_kafka.schema_registry", "confluent_kafka.schema_registry.schema_registry_client"),
    *("confluent_kafka.schema_registry._async", "confluent_kafka.schema_registry._async.schema_registry_client"),
):
    sys.modules[absent] = Absent(absent)

from tests.integration.cluster_fixture import ByoFixture  # noqa: E402 - it imports the absent modules


@pytest.fixture(scope="session")
def kafka_cluster():
    return ByoFixture({"bootstrap.servers": os.environ["KAFKA"]})
