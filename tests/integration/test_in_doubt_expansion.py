"""Partition expansion during appends that the barrier cannot see: slow requests."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.expanding import (
    OK,
    expand,
    expansions,
    partition_count,
)
from tests.support.kafka import unique_topic
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log, Record, batch, produce_request

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover, pytest.mark.timeout(400)]

REQUEST_SECONDS = 6.0


def test_slow_produce_is_not_appended_past_the_threshold(kafka: KafkaCluster, tmp_path: Path) -> None:
    """The append starts before partition-count checks are switched on. The proxy closes its connection when the request
    times out."""
    config = (
        f"config_lease_seconds = 3.0\n[limits]\ntakeover_seconds = 0.5\nrequest_timeout_seconds = {REQUEST_SECONDS}\n"
    )
    topic = unique_topic("later")
    with ProxyProcess(kafka.bootstrap, tmp_path, config=config) as proxy, Connection(proxy.bootstrap) as admin:
        assert admin.create_topic(topic) == (OK, None)
        until(lambda: partition_count(proxy.bootstrap, topic) == 1, f"{topic} to appear")
        with Log(proxy.bootstrap).connect(topic) as slow, Log(proxy.bootstrap).connect(topic) as quick:
            slow.api_versions(3)  # connects the proxy to the broker: the append itself need not wait for that
            assert quick.append(topic, batch(Record(b"quick"))).error_code == OK
            _, frame = slow.frame(produce_request({topic: {0: batch(Record(b"slow" * 100_000))}}), 9)
            slow.socket.sendall(frame[: len(frame) // 2])
            assert quick.append(topic, batch(Record(b"quick"))).error_code == OK

            assert admin.alter_topic(topic, {"fencepost.ordered.partition.expansion": "true"}) == (OK, None)
            assert expand(proxy.bootstrap, topic, 2) == (OK, None)

            # The rest of the request must have no effect.
            with suppress(OSError):
                slow.socket.sendall(frame[len(frame) // 2 :])
            assert slow.is_closed(30.0)
        [recorded] = expansions(proxy.bootstrap, topic)
        assert recorded.thresholds == (2,)
        assert Log(kafka.bootstrap).end(topic) == 2
        assert f"after partition-count checks of {topic} were enabled" in proxy.log
