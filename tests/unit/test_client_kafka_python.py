"""What the kafka-python adapter refuses to be made of."""

from __future__ import annotations

import pytest

from fencepost.kafka_python import ConditionalProducer


def test_idempotent_conditional_producer_is_refused() -> None:
    with pytest.raises(ValueError, match="unusable after its first refusal"):
        ConditionalProducer(enable_idempotence=True)
