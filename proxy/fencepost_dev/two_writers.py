"""The first part of the demonstration: two writers read one log, then each appends what it decided.

With Kafka alone, the later append hides the earlier one. Through the proxy it is refused.

`python -m fencepost_dev.two_writers --proxy HOST:PORT`, or `--kafka HOST:PORT` (docker-compose.yml), repeatable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import TopicAlreadyExistsError

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
    lost, right = _with_kafka_alone(screen, kafka), _through_proxy(screen, proxy)
    return lost == OPENING - PAID_OUT and right == OPENING + PAID_IN - PAID_OUT


def _with_kafka_alone(screen: Screen, kafka: str) -> int:
    screen.line("Kafka alone:")
    _create("balance", kafka, {})
    with KafkaProducer(bootstrap_servers=kafka) as producer:

        def append(balance: int, expected: int) -> int:
            return int(producer.send("balance", b"%d" % balance, partition=0).get(_SECONDS).offset)

        return _play(screen, "balance", kafka, append)


def _through_proxy(screen: Screen, proxy: str) -> int:
    screen.line("Through Fencepost, where each append states the offset that it expects:")
    _create("checked-balance", proxy, {"fencepost.check.expected.offsets": "required"})
    with ConditionalProducer(bootstrap_servers=proxy) as producer:

        def append(balance: int, expected: int) -> int:
            sent = producer.send("checked-balance", b"%d" % balance, partition=0, expected_offset=expected)
            return int(sent.get(_SECONDS).offset)

        return _play(screen, "checked-balance", proxy, append)


def _create(topic: str, bootstrap: str, configs: dict[str, str]) -> None:
    with KafkaAdminClient(bootstrap_servers=bootstrap) as admin, suppress(TopicAlreadyExistsError):
        admin.create_topics([NewTopic(topic, 1, 1, topic_configs=configs)])


def _play(screen: Screen, topic: str, bootstrap: str, append: Append) -> int:
    """Both writers in turn. Returns the balance at the end."""
    begin = len(_read(topic, bootstrap))
    append(OPENING, begin)
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
    log, right = _read(topic, bootstrap)[begin:], OPENING + PAID_IN - PAID_OUT
    result = "which is right" if log[-1] == right else f"but {right} is right: an update is LOST"
    screen.line(f"The log has the balances {', '.join(map(str, log))}. The last one counts, {result}.\n")
    return log[-1]


def _read(topic: str, bootstrap: str) -> list[int]:
    with LogReader([(topic, 0)], bootstrap_servers=bootstrap) as log:
        return [int(record.value or b"") for _, record in log]


def main(words: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(words)
    screen = Screen(sys.stdout)
    screen.line(_INTRODUCTION)
    if arguments.proxy:
        _through_proxy(screen, arguments.proxy)
    else:
        _with_kafka_alone(screen, arguments.kafka)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m fencepost_dev.two_writers")
    where = made.add_mutually_exclusive_group(required=True)
    where.add_argument("--proxy", metavar="HOST:PORT", help="through this proxy")
    where.add_argument("--kafka", metavar="HOST:PORT", help="with this Kafka alone")
    return made


if __name__ == "__main__":
    sys.exit(main())
