"""`idempotence=` of the library's producers."""

from __future__ import annotations

import pytest

import fencepost.confluent
import fencepost.kafka_python
from fencepost._idempotence import Idempotence, configured

NAME = "enable_idempotence"


@pytest.mark.parametrize(
    ("level", "lives", "dies"),
    [("off", False, False), (False, False, False), ("safe", True, False), ("required", True, True), (True, True, True)],
)
def test_what_a_level_comes_to(level: Idempotence, lives: bool, dies: bool) -> None:
    assert configured(level, {}, NAME, possible=True) == {NAME: lives}
    assert configured(level, {}, NAME, possible=False) == {NAME: dies}


def test_unset_level_leaves_library_default() -> None:
    assert configured(None, {NAME: True}, NAME, possible=True) == {}


@pytest.mark.parametrize("level", ["on", "strict", "", 1.5])
def test_unknown_level_error_lists_known_levels(level: Idempotence) -> None:
    with pytest.raises(ValueError, match="use 'off', 'safe', 'required'"):
        configured(level, {}, NAME, possible=True)


@pytest.mark.parametrize("stated", [False, "false"])
def test_contradicting_setting_is_an_error(stated: object) -> None:
    with pytest.raises(ValueError, match="contradict"):
        configured("required", {NAME: stated}, NAME, possible=True)
    assert configured("off", {NAME: stated}, NAME, possible=True) == {NAME: False}


@pytest.mark.parametrize(
    ("producer", "option"),
    [
        (fencepost.kafka_python.ConditionalProducer, {"idempotence": "required"}),
        (fencepost.kafka_python.ConditionalProducer, {"enable_idempotence": True}),
        (fencepost.kafka_python.OrderedProducer, {"idempotence": "required"}),
    ],
)
def test_kafka_python_refuses_required_idempotence(producer: type, option: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="unusable after its first refusal"):
        producer(bootstrap_servers="127.0.0.1:1", **option)


@pytest.mark.parametrize("producer", [fencepost.confluent.ConditionalProducer, fencepost.confluent.OrderedProducer])
def test_librdkafka_receives_the_idempotence_setting(producer: type) -> None:
    with pytest.raises(ValueError, match="contradict"):
        producer({"bootstrap.servers": "127.0.0.1:1", "enable.idempotence": False}, idempotence=True)
    producer({"bootstrap.servers": "127.0.0.1:1"}, idempotence="off").close()
