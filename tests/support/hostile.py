"""A client that means harm, in one way, until it is ended.

    python -m tests.support.hostile HOST:PORT TOPIC WAY

A process of its own, so that it competes with the good client at Kafka or at the proxy, and not for an interpreter.
Prints `ready` once it has begun. A connection that is closed is opened again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle

from tests.support import compressed, raw

ABSENT_PARTITIONS = 300
#: Of the topic `TOPIC-wide`.
WIDE_PARTITIONS = 60
_TIMEOUT_MS = 5_000

#: Sends something once for each `next`.
Way = Callable[[str, str], Iterator[None]]
WAYS: dict[str, Way] = {}


def way(each: Way) -> Way:
    WAYS[each.__name__.replace("_", " ")] = each
    return each


@way
def absent_partitions(address: str, topic: str) -> Iterator[None]:
    """One that exists, and many that do not."""
    records = raw.batch(b"x")
    return _produces(address, {topic: dict.fromkeys(range(1 + ABSENT_PARTITIONS), records)})


@way
def many_partitions(address: str, topic: str) -> Iterator[None]:
    """Whose log ends are not known."""
    records = raw.batch(b"x")
    wide = dict.fromkeys(range(WIDE_PARTITIONS), raw.batch(raw.Record(b"x", expected=1 << 40)))
    return _produces(address, {topic: {0: records}, f"{topic}-wide": wide})


@way
def linked_blocks(address: str, topic: str) -> Iterator[None]:
    """LZ4 that Kafka answers with UNKNOWN_SERVER_ERROR, and the proxy without asking it."""
    return _produces(address, *_after_a_good_one(topic, "lz4, linked blocks"))


@way
def error_after_error(address: str, topic: str) -> Iterator[None]:
    """LZ4 that the proxy can read, and that Kafka answers with UNKNOWN_SERVER_ERROR."""
    return _produces(address, *_after_a_good_one(topic, "lz4, missing content checksum"))


def _after_a_good_one(topic: str, form: str) -> Iterator[raw.Batches]:
    """So that it has proved that it may write, and an append of it may be sent again."""
    odd = compressed.batch(*compressed.FORMS[form], base_timestamp_ms=int(time.time() * 1000))
    for batch in (raw.batch(b"x"), *[odd] * 20):
        yield {topic: {0: batch}}


def _produces(address: str, *requests: raw.Batches) -> Iterator[None]:
    with raw.Connection(address) as connection:
        for batches in cycle(requests):
            connection.produce(batches, timeout_ms=_TIMEOUT_MS)
            yield


def main() -> None:
    address, topic, name = sys.argv[1:]
    began = False
    while True:
        try:
            for _ in WAYS[name](address, topic):
                if not began:
                    print("ready", flush=True)
                began = True
        except (OSError, raw.Closed):
            continue


if __name__ == "__main__":
    main()
