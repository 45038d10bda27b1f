"""Requests that only the primary worker may process."""

from __future__ import annotations

from fencepost_policies.append import Check
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.wire.apis import (
    ALTER_CONFIGS,
    CREATE_PARTITIONS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    INCREMENTAL_ALTER_CONFIGS,
)

#: Requests that may change virtual configs or expand a topic: one process must order them.
PRIMARY_APIS = frozenset({CREATE_TOPICS, DELETE_TOPICS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS, CREATE_PARTITIONS})


def needs_primary(policy: TopicPolicy | None) -> bool:
    """On `required` topics every append is fenced, and Kafka compares the sequences of all processes. Elsewhere,
    batches may keep their own producer ids, and only a single sequencer that gets them all knows the log end.
    """
    return policy is not None and policy.check is Check.ON
