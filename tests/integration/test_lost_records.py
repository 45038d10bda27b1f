"""A broker loses the last records of a log that it had acknowledged: the file is cut while it is down.

No retry of a lost record is answered with success, and the proxy reports the loss.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support.fixtures import kafka_fixture, proxy_fixture
from tests.support.kafka import unique_topic
from tests.support.proxy import CHECKED_BY_NAME, ProxyProcess
from tests.support.raw import Answer, Closed, Connection, Log, Producer, batch

pytestmark = [pytest.mark.kafka, pytest.mark.no_cover]

OK, NOT_LEADER, TIMED_OUT, POLICY_VIOLATION = 0, 6, 7, 44
#: A takeover would delay what follows a restart of Kafka.
CONFIG = f"{CHECKED_BY_NAME}\n[limits]\ntakeover_seconds = 0.5\n"
_LENGTH = struct.Struct(">8xi")
_LENGTH_ENDS = 12
_LOST = 3


cluster = kafka_fixture()


proxy = proxy_fixture(of="cluster", arguments=("--status", "127.0.0.1:0"), config=CONFIG, unexpected=("Traceback",))


def _append(proxy: ProxyProcess, topic: str, records: bytes) -> Answer:
    def answer() -> Answer | None:
        try:
            with Connection(proxy.bootstrap, timeout_seconds=30) as connection:
                last = connection.append(topic, records)
        except (Closed, OSError):
            return None
        return None if last.error_code in (3, NOT_LEADER, TIMED_OUT) else last

    found: Answer = until(answer, f"an answer from {topic} that is not retriable", seconds=90)
    return found


def _cut(cluster: KafkaCluster, topic: str, count: int) -> None:
    """Remove the last batches from the log's only file, and what else the broker has stored about producers."""
    folder = Path(cluster.data) / "node-1" / "data" / f"{topic}-0"
    (file,) = folder.glob("*.log")
    data, at, starts = file.read_bytes(), 0, []
    while at + _LENGTH_ENDS <= len(data) and (length := _LENGTH.unpack_from(data, at)[0]) > 0:
        starts.append(at)
        at += _LENGTH_ENDS + length
    os.truncate(file, starts[-count])
    for snapshot in folder.glob("*.snapshot"):
        snapshot.unlink()


@pytest.mark.parametrize("check", ["required", "checked"])
def test_retry_of_a_lost_record_is_never_a_success_without_the_record(
    check: str, cluster: KafkaCluster, proxy: ProxyProcess
) -> None:
    log, topic = Log(cluster.bootstrap), unique_topic(f"{check}-tail")
    with Connection(proxy.bootstrap, timeout_seconds=60) as client:
        assert client.create_topic(topic) == (OK, None)
        first = client.init_producer_id()
        sent = [batch(b"old %d" % i, expected=i, producer=Producer(first.id, first.epoch, i)) for i in range(10)]
        for i, records in enumerate(sent):
            answer = until(lambda records=records: _answered(client.append(topic, records)), "an answer")
            assert (answer.error_code, answer.base_offset) == (OK, i)
    cluster.kill(1)
    _cut(cluster, topic, _LOST)
    cluster.restart(1)

    # Another producer does not know of the loss. The next one begins another history.
    beyond = _append(proxy, topic, batch(b"beyond", expected=10))
    assert (beyond.error_code, beyond.base_offset) == (POLICY_VIOLATION, 7)
    retry = _append(proxy, topic, sent[8])
    assert (retry.error_code, retry.base_offset) == (POLICY_VIOLATION, 7)
    assert _append(proxy, topic, batch(b"new 7", expected=7)).base_offset == 7
    retry = _append(proxy, topic, sent[7])
    assert (retry.error_code, retry.base_offset) == (POLICY_VIOLATION, 8)
    again = _append(proxy, topic, sent[8])
    assert (again.error_code, again.base_offset) == (OK, 8)  # the log ends at its expected offset
    kept = _append(proxy, topic, sent[6])
    assert (kept.error_code, kept.base_offset) == (OK, 6)
    assert log.values(topic) == [*(b"old %d" % i for i in range(7)), b"new 7", b"old 8"]

    line = f"Kafka lost acknowledged records partition={topic}-0 first_lost=7 acknowledged_to=9 log_end=7"
    assert line in proxy.log
    status = json.loads(proxy.page("/status.json"))
    assert status["last_shortened_log"]["topic"] == topic
    assert proxy.metrics()["fencepost_shortened_logs_total"] == status["shortened_logs"]
    assert any(f"last 7 to 9 of {topic}-0" in problem["what"] for problem in status["problems"])


def _answered(answer: Answer) -> Answer | None:
    return None if answer.error_code == NOT_LEADER else answer
