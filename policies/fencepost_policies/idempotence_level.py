"""Idempotence levels (KAFKA-5793, KAFKA-5794): what a topic, or a request, demands of its producers.

`required` accepts only batches with a producer id. `safe` accepts them if Kafka does, else the same batch without one.
The session does the latter; this module only decides.
"""

from __future__ import annotations

from enum import IntEnum

from fencepost_policies.append import CLUSTER_AUTHORIZATION_FAILED, POLICY_VIOLATION, Refusal


class Level(IntEnum):
    """Value of `fencepost.idempotence.level` or of a request's tagged field: the higher one applies."""

    OFF = 0
    SAFE = 1
    REQUIRED = 2


#: Producer ids from here on are made by the proxy, for clients that get none from Kafka, which counts up from 0.
MADE_UP_IDS_FROM = 1 << 62


def check_idempotence(topic: str, partition: int, producer_id: int, level: Level) -> Refusal | None:
    """`producer_id`: of the batch, -1 if it has none. One made by the proxy is valid on `safe` topics only, where the
    batch is appended without it."""
    where = f"topic={topic} partition={partition}"
    if producer_id >= MADE_UP_IDS_FROM and level is not Level.SAFE:
        return Refusal(
            CLUSTER_AUTHORIZATION_FAILED,
            "idempotence_not_permitted",
            f"IDEMPOTENCE_NOT_PERMITTED {where}: Kafka does not permit this client to be idempotent; its producer id "
            "works with fencepost.idempotence.level=safe only (allow it WRITE, before Kafka 2.8 IDEMPOTENT_WRITE on "
            "the cluster, or disable its idempotence)",
        )
    if producer_id < 0 and level is Level.REQUIRED:
        return Refusal(
            POLICY_VIOLATION,
            "idempotence_required",
            f"IDEMPOTENCE_REQUIRED {where}: batch without producer id, but fencepost.idempotence.level=required (use "
            "an idempotent producer, enable.idempotence=true, or set the level to safe or off)",
        )
    return None
