"""Levels of idempotence (KAFKA-5793, KAFKA-5794): what a topic, or a request, asks of its producers.

`required` takes batches with a producer id only. `safe` takes them where Kafka does, and else the same batch without
one: from here on it is the session's to do, here is only decided who may.
"""

from __future__ import annotations

from enum import IntEnum

from fencepost_policies.append import CLUSTER_AUTHORIZATION_FAILED, POLICY_VIOLATION, Refusal


class Level(IntEnum):
    """Value of the topic config `idempotence.level`, and of a request's tagged field: the higher of both counts."""

    OFF = 0
    SAFE = 1
    REQUIRED = 2


#: Producer ids from here on are of the proxy's own making, for clients whom Kafka gives none: it counts up from 0.
MADE_UP_IDS_FROM = 1 << 62


def check_idempotence(topic: str, partition: int, producer_id: int, level: Level) -> Refusal | None:
    """`producer_id` – of the batch, -1 for none. One that was made up counts on `safe` topics only, where the batch is
    then appended without it."""
    where = f"topic={topic} partition={partition}"
    if producer_id >= MADE_UP_IDS_FROM and level is not Level.SAFE:
        return Refusal(
            CLUSTER_AUTHORIZATION_FAILED,
            "idempotence_not_permitted",
            f"IDEMPOTENCE_NOT_PERMITTED {where}: Kafka does not let this client be idempotent; its producer id counts "
            "on topics with idempotence.level=safe only. Give it the right to WRITE (before Kafka 2.8: IDEMPOTENT_WRITE"
            " on the cluster), or switch its idempotence off",
        )
    if producer_id < 0 and level is Level.REQUIRED:
        return Refusal(
            POLICY_VIOLATION,
            "idempotence_required",
            f"IDEMPOTENCE_REQUIRED {where}: the batch has no producer id, and idempotence.level=required here: use an "
            "idempotent producer (enable.idempotence=true), or set the level to safe or off",
        )
    return None
