"""Record age: append only batches whose records are all younger than the topic allows."""

from __future__ import annotations

from fencepost_policies.append import INVALID_TIMESTAMP, Append, Facts, Refusal, where
from fencepost_policies.append_policy import AppendPolicy, Milliseconds
from fencepost_policies.fields import OLDEST_TIMESTAMP_MS


class RecordAge(AppendPolicy[int]):
    """As Kafka's message.timestamp.before.max.ms, records without a timestamp have no age."""

    config = Milliseconds(
        name="fencepost.max.record.age.ms",
        default="-1",
        documentation=(
            "Refuse a batch if the timestamp of one of its records is older than this, for instance because a producer "
            "was offline. Records without a timestamp are accepted. With -1, nothing is checked."
        ),
    )
    reads = (OLDEST_TIMESTAMP_MS,)
    reasons = ("record_too_old",)

    def check(self, append: Append, setting: int, facts: Facts) -> Refusal | None:
        oldest = append.field(OLDEST_TIMESTAMP_MS)
        if oldest is None or oldest >= facts.now_ms - setting:
            return None
        return Refusal(
            INVALID_TIMESTAMP,
            "record_too_old",
            f"RECORD_TOO_OLD {where(append)} timestamp={oldest} limit={facts.now_ms - setting}: this topic has "
            f"fencepost.max.record.age.ms={setting} (drop the batch, or write it to a topic without this limit)",
        )
