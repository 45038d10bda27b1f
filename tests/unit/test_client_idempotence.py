"""`idempotence=` of the library's producers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

import fencepost.aiokafka
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


def _kafka_python(producer: str, **options: object) -> None:
    getattr(fencepost.kafka_python, producer)(bootstrap_servers="127.0.0.1:1", api_version=(2, 8), **options).close(0)


def _aiokafka(producer: str, **options: object) -> None:
    async def make() -> None:
        await getattr(fencepost.aiokafka, producer)(bootstrap_servers="127.0.0.1:1", **options).stop()

    asyncio.run(make())


def _confluent(producer: str, *, enable_idempotence: bool | None = None, **options: object) -> None:
    stated = {} if enable_idempotence is None else {"enable.idempotence": enable_idempotence}
    getattr(fencepost.confluent, producer)({"bootstrap.servers": "127.0.0.1:1", **stated}, **options).close()


@pytest.mark.parametrize("producer", ["ConditionalProducer", "OrderedProducer"])
@pytest.mark.parametrize(
    ("make", "survives"),
    [
        (_kafka_python, ()),
        (_aiokafka, ("ConditionalProducer",)),
        (_confluent, ("ConditionalProducer", "OrderedProducer")),
    ],
)
def test_producers_accept_idempotence_that_survives_refusals(
    make: Callable[..., None], survives: tuple[str, ...], producer: str
) -> None:
    for level in ("off", "safe", None):
        make(producer, idempotence=level)
    with pytest.raises(ValueError, match="contradict"):
        make(producer, idempotence=True, enable_idempotence=False)
    for options in ({"idempotence": "required"}, {"enable_idempotence": True}):
        if producer in survives:
            make(producer, **options)
        else:
            with pytest.raises(ValueError, match=r"after (its first|a) refusal"):
                make(producer, **options)
