"""What the kafka-python adapter refuses to be made of."""

from __future__ import annotations

import pytest

from fencepost.kafka_python import ConditionalProducer


def test_a_producer_that_would_not_live_through_a_refusal_is_not_made() -> None:
    with pytest.raises(ValueError, match="unusable after its first refusal"):
        ConditionalProducer(enable_idempotence=True)
