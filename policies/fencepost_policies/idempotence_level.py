"""Idempotence levels (KAFKA-5793, KAFKA-5794): what a topic, or a request, demands of its producers.

`required` accepts only batches with a producer id. `safe` accepts them if Kafka does, else the same batch without one.
The session does the latter; this module only decides.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from fencepost_policies.append import CLUSTER_AUTHORIZATION_FAILED, POLICY_VIOLATION, Append, Refusal, where
from fencepost_policies.append_policy import AppendCheck, Choice


class Level(IntEnum):
    """Value of `fencepost.idempotence.level` or of a request's tagged field: the higher one applies."""

    OFF = 0
    SAFE = 1
    REQUIRED = 2


#: Producer ids from here on are made by the proxy, for clients that get none from Kafka, which counts up from 0.
MADE_UP_IDS_FROM = 1 << 62


IDEMPOTENCE_LEVEL: Final = Choice(
    name="fencepost.idempotence.level",
    settings={level.name.lower(): level for level in Level},
    default=Level.OFF.name.lower(),
    documentation=(
        "Idempotence required of producers (KAFKA-5793, KAFKA-5794). With required, a batch without a producer id "
        "is refused. With safe, a batch that Kafka accepts from no idempotent producer (message format before "
        "0.11, or no permission) is appended without its producer id, so not exactly once. With off, nothing is "
        "checked."
    ),
)


class IdempotenceLevel(AppendCheck[Level]):
    config = IDEMPOTENCE_LEVEL
    reasons = ("idempotence_required", "idempotence_not_permitted")


def check_level(append: Append, level: Level) -> Refusal | None:
    """`level`: the higher one of the topic's and the request's. A producer id made by the proxy is valid on `safe`
    topics only, where the batch is appended without it."""
    if append.producer_id >= MADE_UP_IDS_FROM and level is not Level.SAFE:
        return Refusal(
            CLUSTER_AUTHORIZATION_FAILED,
            "idempotence_not_permitted",
            f"IDEMPOTENCE_NOT_PERMITTED {where(append)}: Kafka does not permit this client to be idempotent; "
            "its producer id works with fencepost.idempotence.level=safe only (allow it WRITE, before Kafka 2.8 "
            "IDEMPOTENT_WRITE on the cluster, or disable its idempotence)",
        )
    if append.producer_id < 0 and level is Level.REQUIRED:
        return Refusal(
            POLICY_VIOLATION,
            "idempotence_required",
            f"IDEMPOTENCE_REQUIRED {where(append)}: batch without producer id, but "
            "fencepost.idempotence.level=required (use an idempotent producer, enable.idempotence=true, or set the "
            "level to safe or off)",
        )
    return None
