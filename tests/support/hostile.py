"""A client that means harm, in one way, until it is ended.

    python -m tests.support.hostile HOST:PORT TOPIC WAY

A process of its own, so that it competes with the good client at Kafka or at the proxy, and not for an interpreter.
Prints `ready` once it has begun. A connection that is closed is opened again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import repeat

from tests.support import raw

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


def _produces(address: str, batches: raw.Batches) -> Iterator[None]:
    with raw.Connection(address) as connection:
        for _ in repeat(None):
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
