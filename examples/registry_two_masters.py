"""Two masters of a registry give ids to names: with plain Kafka one id twice, with `fencepost.recipes.Registry` never.

A registry, such as one of schemas, has one master, which reads its log, gives the next id, and writes the name with its
id to the log. During an election two processes can both be the master for a while. Here both register names.

- With plain Kafka, a master reads to the log end, then appends. It misses what the other appends in between.
- With `fencepost.recipes.Registry`, such an append is refused. The master reads on, and decides again.

Both masters register a common list of names, each from another place on, so most names come to both of them.

    .venv/bin/fencepost dev                                 # in one terminal: Kafka and the proxy
    .venv/bin/python examples/registry_two_masters.py       # in another
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic

from fencepost.kafka_python import LogReader, LogWriter
from fencepost.recipes import Registry

BOOTSTRAP_SERVER = os.environ.get("FENCEPOST_BOOTSTRAP_SERVER", "127.0.0.1:19092")
#: Lines of the timeline before only the problems are shown.
SHOWN = 6


class UncheckedRegistry:
    """What a master does with plain Kafka: read, decide, append."""

    def __init__(self, topic: str, bootstrap: str) -> None:
        self._topic = topic
        self._ids: dict[str, int] = {}
        self._log = LogReader([(topic, 0)], bootstrap_servers=bootstrap)
        self._producer = KafkaProducer(bootstrap_servers=bootstrap)

    def register(self, name: str) -> int:
        for _, record in self._log:
            self._ids.setdefault((record.key or b"").decode(), int(record.value or b""))
        if name not in self._ids:
            number = max(self._ids.values(), default=0) + 1
            self._producer.send(self._topic, b"%d" % number, name.encode(), partition=0).get(30)
            return number
        return self._ids[name]

    def close(self) -> None:
        self._log.close()
        self._producer.close()


class FencepostRegistry(Registry):
    def __init__(self, topic: str, bootstrap: str) -> None:
        super().__init__(LogWriter(topic, 0, bootstrap_servers=bootstrap))

    def number(self, name: str) -> int:
        return self.register(name).number


class Timeline:
    """Which master gave which id to which name. Prints the first lines, and each problem."""

    def __init__(self) -> None:
        self._begun, self._lock, self._lines = time.monotonic(), threading.Lock(), 0
        self.names: defaultdict[int, set[str]] = defaultdict(set)
        self.ids: defaultdict[str, set[int]] = defaultdict(set)
        self.problems = 0

    def given(self, master: str, name: str, number: int) -> None:
        with self._lock:
            self.names[number].add(name)
            self.ids[name].add(number)
            problem = ""
            if len(self.names[number]) > 1:
                problem = f"   <- WRONG: this id is also that of {', '.join(sorted(self.names[number] - {name}))}"
            elif len(self.ids[name]) > 1:
                problem = f"   <- WRONG: this name also has the id {min(self.ids[name] - {number})}"
            self.problems += bool(problem)
            self._lines += 1
            if self._lines <= SHOWN or (problem and self.problems <= SHOWN):
                print(f"  {time.monotonic() - self._begun:5.1f} s  master {master}: {name} has id {number}{problem}")


def play(bootstrap: str, count: int, *, unchecked: bool) -> int:
    """Two masters register `count` names. Returns how often an id had two names, or a name two ids."""
    topic = f"two-masters-{time.time_ns()}"
    configs = {} if unchecked else {"fencepost.check.expected.offsets": "required"}
    with KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        admin.create_topics([NewTopic(topic, 1, -1, topic_configs=configs)])
    names, timeline = [f"schema-{number}" for number in range(count)], Timeline()
    failed: list[BaseException] = []

    def serve(master: str, register: Callable[[str], int], order: list[str]) -> None:
        try:
            for name in order:
                timeline.given(master, name, register(name))
        except BaseException as error:
            failed.append(error)

    threads = []
    masters: list[UncheckedRegistry | FencepostRegistry] = []
    for master in ("A", "B"):
        made = UncheckedRegistry(topic, bootstrap) if unchecked else FencepostRegistry(topic, bootstrap)
        masters.append(made)
        register = made.register if isinstance(made, UncheckedRegistry) else made.number
        threads.append(threading.Thread(target=serve, args=(master, register, random.sample(names, count))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for made in masters:
        made.close()
    if failed:
        raise failed[0]
    twice = sum(len(found) > 1 for found in timeline.names.values())
    print(f"  {count} names, {len(timeline.names)} different ids, {twice} of them given to two names\n")
    return timeline.problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bootstrap-server", dest="bootstrap", default=BOOTSTRAP_SERVER, help="the proxy (default: %(default)s)"
    )
    parser.add_argument("--names", type=int, default=60, help="names that both register (default: %(default)s)")
    options = parser.parse_args()
    print("Plain Kafka: each master reads the log, gives the next id, and appends.")
    unchecked = play(options.bootstrap, options.names, unchecked=True)
    print("fencepost.recipes.Registry: an id that was decided on an outdated log is refused.")
    checked = play(options.bootstrap, options.names, unchecked=False)
    right = unchecked > 0 and checked == 0
    print("RIGHT: two masters disagree with plain Kafka, and never with Registry." if right else "WRONG: see above.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
