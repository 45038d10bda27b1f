"""Copy a topic into another one, also from another cluster: each record once and in order, without transactions.

    python kafka_topic.py orders orders-copy --from kafka-1:9092 --to 127.0.0.1:19092

Each partition is one load, into the partition of the same number. A unit of it is a record, its position the
source's topic id and the next offset. Keys, values and headers are copied, except Fencepost's headers. The timestamp
becomes a header, because a checked topic refuses old ones. A record without key and value gets an empty value.

Only committed records are copied. If the source deletes records before they are copied, or is deleted and created
again, the copy ends with an error: it would be incomplete. The same if compaction removes records that the last run
has copied but not confirmed: start a new copy. If the source is expanded, expand the target, then start again.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterable
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.errors import KafkaError, OffsetOutOfRangeError

from fencepost import FencepostError, LoadChangedError, LoadPositionLostError, Record
from fencepost.kafka_python import LogWriter
from fencepost.recipes import Loader


class SourceLost(Exception):
    """The source does not have what follows the position, and never will."""


class Source:
    """The committed records of a topic. `id` is another one after the topic was deleted and created again."""

    def __init__(self, topic: str, bootstrap: str) -> None:
        self._topic = topic
        self._admin = KafkaAdminClient(bootstrap_servers=bootstrap)
        self._consumer = KafkaConsumer(
            bootstrap_servers=bootstrap,
            auto_offset_reset="none",
            enable_auto_commit=False,
            isolation_level="read_committed",
        )
        self.id, self.partitions = self._described()

    def _described(self) -> tuple[str, list[TopicPartition]]:
        [described] = self._admin.describe_topics([self._topic])
        if described["error_code"]:
            raise SourceLost(f"topic {self._topic} cannot be described: error {described['error_code']}")
        return str(described["topic_id"]), [TopicPartition(self._topic, p) for p in range(len(described["partitions"]))]

    def start(self, positions: Iterable[bytes | None]) -> None:
        self._consumer.assign(self.partitions)
        for partition, position in zip(self.partitions, positions, strict=True):
            if position is None:
                self._consumer.seek_to_beginning(partition)
                continue
            of, offset = position.decode().split()
            if of != self.id:
                raise SourceLost(f"topic {self._topic} was deleted and created again")
            self._consumer.seek(partition, int(offset))

    def poll(self) -> dict[TopicPartition, list[Any]]:
        try:
            polled: dict[TopicPartition, list[Any]] = self._consumer.poll(500, max_records=5000)
        except OffsetOutOfRangeError as error:
            raise SourceLost(f"{self._topic}: records were deleted before they were copied: {error}") from error
        # An offset of the old topic may be one of the new topic. So describe it after the poll, not before.
        if (found := self._described()) != (self.id, self.partitions):
            raise SourceLost(f"{self._topic} was deleted and created again, or expanded: {found}")
        return polled

    def is_read(self) -> bool:
        ends = self._consumer.end_offsets(self.partitions)
        return all(self._consumer.position(each) >= ends[each] for each in self.partitions)

    def close(self) -> None:
        self._admin.close()
        self._consumer.close()


def copied(record: Any) -> Record:
    headers = [(name, value) for name, value in record.headers if not name.startswith("fencepost-")]
    value = b"" if record.key is None and record.value is None else record.value
    return Record(value, record.key, (*headers, ("source-timestamp", b"%d" % record.timestamp)))


def copy(source: Source, target: str, bootstrap: str, *, once: bool) -> None:
    with contextlib.ExitStack() as stack:
        loads = [
            stack.enter_context(Loader(f"{at.topic}/{at.partition}", [_writer(target, at.partition, bootstrap)]))
            for at in source.partitions
        ]
        source.start(load.position for load in loads)
        while True:
            polled = source.poll()
            for at, records in polled.items():
                for record in records:
                    loads[at.partition].append([copied(record)], f"{source.id} {record.offset + 1}".encode())
                loads[at.partition].flush()
                print(f"{at.topic}/{at.partition}: copied up to offset {records[-1].offset}", flush=True)
            if once and not polled and source.is_read():
                return


def _writer(topic: str, partition: int, bootstrap: str) -> LogWriter:
    return LogWriter(topic, partition, bootstrap_servers=bootstrap)


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy a topic into another one, each record once and in order.")
    parser.add_argument("source", help="a topic")
    parser.add_argument("target", help="a topic with fencepost.check.expected.offsets=required and as many partitions")
    parser.add_argument("--from", dest="brokers", required=True, help="the brokers of the source")
    parser.add_argument("--to", default="127.0.0.1:19092", help="the proxy (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="end when all records are in the target")
    args = parser.parse_args()
    while True:
        try:
            with contextlib.closing(Source(args.source, args.brokers)) as source:
                return copy(source, args.target, args.to, once=args.once)
        except (SourceLost, LoadChangedError, LoadPositionLostError) as error:
            raise SystemExit(f"cannot continue: {error}") from None
        except (FencepostError, KafkaError) as error:  # the target says how far the copy is
            print(f"starts again: {error}", flush=True)
            time.sleep(1)


if __name__ == "__main__":
    main()
