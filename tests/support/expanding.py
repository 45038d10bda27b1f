"""Topics that are expanded during writes: writers that state their partition count, and checks of the resulting log."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from kafka.protocol.admin import CreatePartitionsRequest

from tests.kit.threads import Worker
from tests.kit.waiting import until
from tests.support.raw import Closed, Connection, Log, Record, batch

OK, UNKNOWN_TOPIC, NOT_LEADER, TIMED_OUT, TOPIC_AUTHORIZATION_FAILED = 0, 3, 6, 7, 29
INVALID_PARTITIONS, INVALID_ASSIGNMENT, POLICY_VIOLATION = 37, 39, 44
_RETRIED = frozenset({UNKNOWN_TOPIC, 5, NOT_LEADER, TIMED_OUT, 19, 20})

#: Topics with partition-count checks by name prefix, expanded to any count or by multiples only. Takeovers are short. A
#: tool on a busy machine may take long between its connection and its first request.
COUNT_CHECKED_BY_NAME = """
config_lease_seconds = 3.0

[limits]
takeover_seconds = 0.5
handshake_seconds = 120.0
expansion_wait_seconds = {wait_seconds}

[topics."expands-*"]
"fencepost.ordered.partition.expansion" = "any"
"fencepost.check.partition.count" = "true"

[topics."doubles-*"]
"fencepost.ordered.partition.expansion" = "true"
"fencepost.check.partition.count" = "true"
"""


def counted(wait_seconds: float = 30.0) -> str:
    return COUNT_CHECKED_BY_NAME.format(wait_seconds=wait_seconds)


def create_partitions(
    connection: Connection,
    requested: dict[str, int],
    *,
    assignments: Sequence[Sequence[int]] | None = None,
    validate_only: bool = False,
    timeout_ms: int = 100_000,
) -> dict[str, tuple[int, str | None]]:
    """(error code, message) by topic."""
    topic = CreatePartitionsRequest.CreatePartitionsTopic
    replicas = (
        None
        if assignments is None
        else [topic.CreatePartitionsAssignment(broker_ids=list(brokers)) for brokers in assignments]
    )
    request = CreatePartitionsRequest(
        topics=[topic(name=name, count=count, assignments=replicas) for name, count in requested.items()],
        timeout_ms=timeout_ms,
        validate_only=validate_only,
    )
    answer = connection.query(request, 3)
    return {each.name: (each.error_code, each.error_message) for each in answer.results}


def expand(address: str, topic: str, count: int, **settings: Any) -> tuple[int, str | None]:
    with Connection(address, timeout_seconds=120) as connection:
        return create_partitions(connection, {topic: count}, **settings)[topic]


def expand_at_the_end(address: str, topic: str, count: int) -> None:
    """Repeat the request until the topic is expanded. After a lost response, the topic may be expanded already."""

    def expanded() -> bool:
        return expand(address, topic, count)[0] == OK or any(
            each.to_count == count for each in expansions(address, topic)
        )

    until(expanded, f"{topic} to be expanded to {count}", seconds=120)


class Expanded(NamedTuple):
    """One expansion, as the topic's config reports it."""

    from_count: int
    to_count: int
    thresholds: tuple[int, ...]
    unordered: bool
    multiple: bool


def expansions(address: str, topic: str) -> list[Expanded]:
    with Connection(address) as connection:
        shown = connection.describe_topic(topic, keys=["fencepost.ordered.partition.expansions"])
    return [
        Expanded(each["from"], each["to"], tuple(each["thresholds"]), each["unordered"], each["multiple"])
        for each in json.loads(shown["fencepost.ordered.partition.expansions"])
        if not each.get("pending")
    ]


def partition_count(address: str, topic: str) -> int:
    with Connection(address) as connection:
        return len(connection.metadata(topic).topics[0].partitions)


class Writer(Worker):
    """Appends records sequentially until it is stopped, each with the number of partitions that it knows.

    `acknowledged` – the values that Kafka acknowledged. A record's value is `NAME:NUMBER:COUNT`. An unacknowledged
    record is resent with the current count.
    """

    def __init__(self, name: str, address: str, topic: str, *, says_count: bool = True) -> None:
        super().__init__(name)
        self.address = address
        self.topic = topic
        self.says_count = says_count
        self.acknowledged: list[int] = []
        self.codes: Counter[int] = Counter()

    def work(self) -> None:
        number = 0
        while not self.over.is_set():
            try:
                number = self._write_from(number)
            except (OSError, Closed):
                self.over.wait(0.05)

    def _write_from(self, number: int) -> int:
        """Append until an error. Return the number of the next record."""
        with Connection(self.address, timeout_seconds=20) as connection:
            found = connection.metadata(self.topic).topics[0]
        count = len(found.partitions)
        if found.error_code or not count:
            self.over.wait(0.05)
            return number
        connections: dict[int, Connection] = {}
        try:
            while not self.over.is_set():
                partition = number % count
                if partition not in connections:
                    connections[partition] = Log(self.address).connect(self.topic, partition)
                value = f"{self.name}:{number}:{count}".encode()
                headers = [("fencepost-partition-count", b"%d" % count)] if self.says_count else []
                records = batch(Record(value, headers=headers))
                answer = connections[partition].append(self.topic, records, partition=partition, timeout_ms=6_000)
                self.codes[answer.error_code] += 1
                if answer.error_code == INVALID_PARTITIONS or answer.error_code in _RETRIED:
                    self.over.wait(0.02)
                    return number
                assert answer.error_code == OK, answer
                self.acknowledged.append(number)
                number += 1
        finally:
            for connection in connections.values():
                connection.close()
        return number

    def stop(self) -> None:
        super().stop()
        self.join(60)

    def goes_on(self) -> None:
        """Wait until it appends a record after this call."""
        before = len(self.acknowledged)
        until(lambda: len(self.acknowledged) > before + 1 or self.error is not None, f"{self.name} to append")


@contextmanager
def writing(addresses: Sequence[str], topic: str) -> Iterator[list[Writer]]:
    """One writer for each address; stopped at the end, also if the test fails."""
    writers = [Writer(f"w{index}", address, topic) for index, address in enumerate(addresses)]
    for writer in writers:
        writer.start()
    try:
        yield writers
    finally:
        for writer in writers:
            writer.stop()


def check_log(log: Log, topic: str, recorded: Sequence[Expanded], writers: Sequence[Writer]) -> None:
    """Records placed with an old count are before its thresholds, those with a new one after them; and none is lost."""
    count = recorded[-1].to_count if recorded else 1
    counts: dict[int, list[tuple[int, int]]] = {}
    found: set[tuple[str, int]] = set()
    for partition in range(count):
        counts[partition] = []
        for logged in log.batches(topic, partition):
            for delta, value in enumerate(() if logged.is_control else logged.values):
                name, number, under = (value or b"").decode().split(":")
                found.add((name, int(number)))
                counts[partition].append((logged.base_offset + delta, int(under)))
    for each in recorded:
        if each.unordered:
            continue
        for partition, placed in counts.items():
            for offset, under in placed:
                after_threshold = partition >= each.from_count or offset >= each.thresholds[partition]
                assert (under >= each.to_count) == after_threshold, (
                    f"{topic}-{partition} at {offset}: placed under {under} partitions, the expansion was {each}"
                )
    for writer in writers:
        lost = {(writer.name, number) for number in writer.acknowledged} - found
        assert not lost, f"acknowledged, and not in the log: {sorted(lost)[:10]}"
