"""Every form of a compressed batch, also unusual and corrupt ones: a checked topic responds as Kafka does."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.support import raw
from tests.support.compressed import FORMS, batch
from tests.support.proxy import ProxyProcess

pytestmark = pytest.mark.kafka

UNKNOWN_SERVER_ERROR, OK, INVALID_RECORD = -1, 0, 87
#: Forms for which a checked topic responds differently, and its error code; docs/contract.md states the reasons.
OTHERWISE: dict[str, int] = {}


def test_checked_topic_accepts_the_compressed_forms_of_kafka(
    kafka: KafkaCluster, proxy: ProxyProcess, unique_topic: Callable[..., str]
) -> None:
    answers: dict[str, dict[str, int]] = {}
    ends = []
    for address in (kafka.bootstrap, proxy.bootstrap):
        name = unique_topic("checked")
        with raw.Connection(address) as connection:
            connection.create_topic(name)
            assert raw.final_answer(connection, name, raw.batch(b"first")).error_code == OK
            now_ms = int(time.time() * 1000)
            answers[address] = {
                form: raw.final_answer(connection, name, batch(codec, data, base_timestamp_ms=now_ms)).error_code
                for form, (codec, data) in FORMS.items()
            }
        ends.append(raw.Log(kafka.bootstrap).end(name))
    direct, proxied = answers.values()
    print("\n" + "\n".join(f"| {form} | {direct[form]} | {proxied[form]} |" for form in FORMS))
    assert proxied == direct | OTHERWISE
    assert ends[0] == ends[1]
    assert set(direct.values()) == {UNKNOWN_SERVER_ERROR, OK, INVALID_RECORD}, "the forms do not cover all outcomes"
