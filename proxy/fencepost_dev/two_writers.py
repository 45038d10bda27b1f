"""The first part of the demonstration: two writers read one log, then each appends what it decided.

With Kafka alone, the later append hides the earlier one. Through the proxy it is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from fencepost.errors import OffsetMismatchError
from fencepost.kafka_python import ConditionalProducer, LogReader
from fencepost_dev.screen import Screen

OPENING, PAID_IN, PAID_OUT = 100, 50, 30
_SECONDS: Final = 30
_INTRODUCTION: Final = f"""\
1. Two writers, one log

The last record of a log is the balance of an account: {OPENING}. Writer A pays in {PAID_IN}, writer B pays out
{PAID_OUT}. Both read the balance, then each appends the new one.
"""

#: Appends a balance, expecting this offset. Returns the record's offset.
Append = Callable[[int, int], int]


def show(screen: Screen, kafka: str, proxy: str) -> bool:
    """Shows both cases. Returns True if Kafka alone loses an update, and the proxy prevents it.

    `kafka`, `proxy`: their bootstrap addresses.
    """
    screen.line(_INTRODUCTION)
    screen.line("Kafka alone:")
    _create("balance", kafka, {})
    with KafkaProducer(bootstrap_servers=kafka) as producer:

        def append(balance: int, expected: int) -> int:
            return int(producer.send("balance", b"%d" % balance, partition=0).get(_SECONDS).offset)

        lost = _play(screen, "balance", kafka, append)

    screen.line("Through Fencepost, where each append states the offset that it expects:")
    _create("checked-balance", proxy, {"fencepost.check.expected.offsets": "required"})
    with ConditionalProducer(bootstrap_servers=proxy) as checked:

        def append_if(balance: int, expected: int) -> int:
            sent = checked.send("checked-balance", b"%d" % balance, partition=0, expected_offset=expected)
            return int(sent.get(_SECONDS).offset)

        right = _play(screen, "checked-balance", proxy, append_if)
    return lost == OPENING - PAID_OUT and right == OPENING + PAID_IN - PAID_OUT


def _create(topic: str, bootstrap: str, configs: dict[str, str]) -> None:
    with KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        admin.create_topics([NewTopic(topic, 1, 1, topic_configs=configs)])


def _play(screen: Screen, topic: str, bootstrap: str, append: Append) -> int:
    """Both writers in turn. Returns the balance at the end."""
    append(OPENING, 0)
    log = _read(topic, bootstrap)
    for writer in "AB":
        screen.say(writer, f"reads the balance {log[-1]}; the log ends at offset {len(log)}")
    for writer, change in (("A", PAID_IN), ("B", -PAID_OUT)):
        try:
            screen.say(writer, f"appends {log[-1] + change} at offset {append(log[-1] + change, len(log))}")
        except OffsetMismatchError as refused:
            expected = f"it expected offset {refused.expected}, but the log ends at offset {refused.actual}"
            screen.say(writer, f"appends {log[-1] + change}: REFUSED, {expected}")
            newer = _read(topic, bootstrap)
            screen.say(writer, f"reads the balance {newer[-1]}; the log ends at offset {len(newer)}")
            screen.say(writer, f"appends {newer[-1] + change} at offset {append(newer[-1] + change, len(newer))}")
    log, right = _read(topic, bootstrap), OPENING + PAID_IN - PAID_OUT
    result = "which is right" if log[-1] == right else f"but {right} is right: an update is LOST"
    screen.line(f"The log has the balances {', '.join(map(str, log))}. The last one counts, {result}.\n")
    return log[-1]


def _read(topic: str, bootstrap: str) -> list[int]:
    with LogReader([(topic, 0)], bootstrap_servers=bootstrap) as log:
        return [int(record.value or b"") for _, record in log]
