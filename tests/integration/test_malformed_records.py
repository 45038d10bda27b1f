"""Malformed record batches that the proxy relays unparsed: Kafka validates every record before it appends any of them.

`scan_batch` parses only records that could have a Fencepost header. The proxy may relay these batches. If Kafka
appended one, its content in the log could differ from what the proxy has checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fencepost_dev.cluster import KafkaCluster
from tests.kit.waiting import until
from tests.support import raw
from tests.support.bytewise import CODECS, batch, framed, record, sized, varint

pytestmark = pytest.mark.kafka

UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NOT_LEADER = 3, 5, 6
GOOD = record(1)
MALFORMED: dict[str, tuple[list[bytes], int]] = {
    "fewer-records-than-claimed": ([record(0), GOOD], 3),
    "more-records-than-claimed": ([record(0), GOOD, record(2)], 2),
    "a-byte-left-over": ([record(0), GOOD, b"\0"], 2),
    "last-byte-missing": ([record(0), record(1)[:-1]], 2),
    "negative-length": ([record(0), varint(-5) + GOOD], 2),
    "negative-header-count": ([record(0), framed(b"\0\0\x02\x01\x01" + varint(-1))], 2),
    "more-headers-than-it-has": ([record(0), framed(b"\0\0\x02\x01\x01" + varint(5))], 2),
    "header-without-a-name": ([record(0), framed(b"\0\0\x02\x01\x01\x02" + varint(-1) + sized(b"v"))], 2),
    "a-header-value-beyond-the-record": ([record(0), framed(b"\0\0\x02\x01\x01\x02" + sized(b"h") + varint(9))], 2),
    "a-value-beyond-the-record": ([record(0), framed(b"\0\0\x02\x01" + varint(99) + b"\0")], 2),
    "bytes-behind-the-headers": ([record(0), framed(b"\0\0\x02\x01\x01\0xyz")], 2),
}


def reported(connection: raw.Connection, topic: str, records: bytes) -> int:
    """The error code, once the broker knows that it leads the partition."""
    return int(
        until(
            lambda: connection.append(topic, records).error_code,
            f"the leader of {topic}",
            accept=lambda code: code not in (None, UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NOT_LEADER),
        )
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("case", MALFORMED)
def test_kafka_appends_nothing_of_a_malformed_batch(
    kafka: KafkaCluster, unique_topic: Callable[..., str], case: str, codec: str
) -> None:
    records, count = MALFORMED[case]
    now_ms = int(time.time() * 1000)
    name = unique_topic("malformed")
    log = raw.Log(kafka.bootstrap)
    with raw.Connection(kafka.bootstrap) as connection:
        connection.create_topic(name)
        malformed = bytes(batch(records, count=count, base_timestamp_ms=now_ms, codec=codec))
        assert reported(connection, name, malformed) != 0
    assert log.end(name) == 0


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("delta", [0, 7])
def test_kafka_trusts_offset_deltas_of_uncompressed_batches_only(
    kafka: KafkaCluster, unique_topic: Callable[..., str], delta: int, codec: str
) -> None:
    """Therefore the offset delta of a record with an expected offset must equal its position in the batch."""
    now_ms = int(time.time() * 1000)
    name = unique_topic("deltas")
    with raw.Connection(kafka.bootstrap) as connection:
        connection.create_topic(name)
        code = reported(
            connection, name, bytes(batch([record(0), record(delta)], base_timestamp_ms=now_ms, codec=codec))
        )
    assert (code == 0) == (codec == "none")
