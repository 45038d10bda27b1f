"""Metrics of the time that the proxy adds: one sample per request and response, with sequencer waits apart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, batch

pytestmark = pytest.mark.kafka

#: The lease outlasts stalls of the machine.
CONFIG = 'config_lease_seconds = 60.0\n[topics."checked-*"]\n"fencepost.check.expected.offsets" = "true"\n'
#: Less than the longest wait for a partition sequencer.
PAUSED_SECONDS = 1.5


class Scraped:
    """One proxy, and the increase of its metrics since the previous scrape."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self.proxy = proxy
        self._before = self._series()

    def _series(self) -> dict[str, float]:
        metrics, names = self.proxy.metrics(), ("added_request", "added_response", "sequencer_wait")
        found = {
            f"{name} {what}": metrics[f"fencepost_{name}_seconds_{what}"] for name in names for what in ("count", "sum")
        }
        return found | {"bytes": metrics['fencepost_relayed_bytes_total{direction="to_kafka"}']}

    def more(self) -> dict[str, float]:
        before, self._before = self._before, self._series()
        return {name: value - before[name] for name, value in self._before.items()}


@pytest.fixture
def scraped(kafka: KafkaCluster, tmp_path: Path) -> Iterator[Scraped]:
    with ProxyProcess(kafka.bootstrap, tmp_path, config=CONFIG, arguments=("--status", "127.0.0.1:0")) as proxy:
        yield Scraped(proxy)


@pytest.mark.parametrize("prefix", ["free", "checked"])
@pytest.mark.parametrize("size", [100, 400_000], ids=["small", "streamed or collected"])
def test_each_request_and_response_is_measured_once(
    prefix: str, size: int, scraped: Scraped, kafka: KafkaCluster
) -> None:
    topic = unique_topic(prefix)
    with Connection(kafka.bootstrap) as direct, Connection(scraped.proxy.bootstrap) as client:
        direct.create_topic(topic)
        client.api_versions()
        until(lambda: client.append(topic, batch(b"x" * size)).error_code == 0, "the topic to be served")
        scraped.more()
        for _ in range(20):
            assert client.append(topic, batch(b"x" * size)).error_code == 0
        more = scraped.more()
    assert 20 * size < more["bytes"] < 20 * (size + 300)
    assert more["added_request count"] == 20
    assert more["added_response count"] == 20
    assert more["sequencer_wait count"] == (20 if prefix == "checked" else 0)
    for direction in ("added_request", "added_response"):
        assert 0 < more[f"{direction} sum"] < 20, "the sum is not in seconds or includes Kafka's time"


def test_sequencer_wait_is_measured_separately(scraped: Scraped, kafka: KafkaCluster) -> None:
    """The second append waits for the outcome of the first, which a paused broker delays.

    The test retries: a stall of the machine looks like added time or a longer wait.
    """
    until(lambda: waits_apart(scraped, kafka), "a wait that is measured separately", seconds=120)


def waits_apart(scraped: Scraped, kafka: KafkaCluster) -> bool:
    topic = unique_topic("checked")
    with (
        Connection(kafka.bootstrap) as direct,
        Connection(scraped.proxy.bootstrap) as first,
        Connection(scraped.proxy.bootstrap) as second,
    ):
        direct.create_topic(topic)
        for each in (first, second):
            each.api_versions()
        until(lambda: first.append(topic, batch(b"a", expected=0)).error_code == 0, "the log end to be known")
        scraped.more()
        kafka.pause(1)
        try:
            first.send_produce({topic: {0: batch(b"b", expected=1)}})
            second.send_produce({topic: {0: batch(b"c", expected=2)}})
            time.sleep(PAUSED_SECONDS)
        finally:
            kafka.resume(1)
        answers = [each.receive_produce()[1][topic, 0].error_code for each in (first, second)]
        more = scraped.more()
    assert more["added_request count"] == 2
    apart = more["sequencer_wait sum"] > PAUSED_SECONDS / 2 > more["added_request sum"]
    return answers == [0, 0] and apart


def test_the_status_page_shows_it(scraped: Scraped, kafka: KafkaCluster) -> None:
    assert json.loads(scraped.proxy.page("/status.json"))["added_seconds"] is None
    with Connection(scraped.proxy.bootstrap) as client:
        client.api_versions()
    half, nearly_all = json.loads(scraped.proxy.page("/status.json"))["added_seconds"]
    assert 0 < half <= nearly_all
