"""A leader stops for seconds, another one takes over, and the first one continues: what does it still write?

Two processes number entries in a log. One leads, the other one takes over when the log has been silent for a second.
The leader is stopped (SIGSTOP, as by a long pause of a virtual machine) after it decided on an entry and before it
sends it. It is continued (SIGCONT) once its successor has written.

- With plain Kafka, a leader writes a claim and checks before each entry that no later claim is in the log. Between its
  check and its append it may be stopped for any time, so an old leader's entry follows the new leader's.
- With `fencepost.recipes.Leader`, the append itself is refused, because the claim moved the log end.

    .venv/bin/fencepost dev                         # in one terminal: Kafka and the proxy
    .venv/bin/python examples/stopped_leader.py     # in another
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic

from fencepost import LogRecord, NotLeaderError, Record
from fencepost.kafka_python import LogReader, LogWriter
from fencepost.recipes import Leader

BOOTSTRAP_SERVER = os.environ.get("FENCEPOST_BOOTSTRAP_SERVER", "127.0.0.1:19092")
SILENT_SECONDS = 1.0
#: The leader works this long between its decision and its append. Here it is stopped.
WORK_SECONDS = 0.3
STOPPED_AT = 3


class Numbers:
    """The state: the last number in the log."""

    def __init__(self) -> None:
        self.last = 0

    def apply(self, record: LogRecord) -> None:
        self.last = int((record.value or b"").split()[1])


class UncheckedLeader:
    """What a leader does with plain Kafka: check, then append."""

    def __init__(self, topic: str, name: str, numbers: Numbers, bootstrap: str) -> None:
        self._topic, self._name, self._numbers = topic, name, numbers
        self._log = LogReader([(topic, 0)], bootstrap_servers=bootstrap)
        self._producer = KafkaProducer(bootstrap_servers=bootstrap)
        self._changed, self._leader = time.monotonic(), ""
        self.silent_seconds = 0.0

    def read_to_end(self) -> None:
        for _, record in self._log:
            self._changed = time.monotonic()
            if (record.value or b"").startswith(b"claim "):
                self._leader = (record.value or b"").split()[1].decode()
            else:
                self._numbers.apply(record)
        self.silent_seconds = time.monotonic() - self._changed

    def claim(self) -> int:
        return self._send(f"claim {self._name}")

    def check(self) -> None:
        self.read_to_end()
        if self._leader != self._name:
            raise NotLeaderError(self._topic, 0, None, None, self._leader)

    def append(self, records: Sequence[Record]) -> int:
        return self._send((records[0].value or b"").decode())

    def _send(self, value: str) -> int:
        return int(self._producer.send(self._topic, value.encode(), partition=0).get(30).offset)


class FencepostLeader(Leader):
    def check(self) -> None:
        """No check is needed: the append is refused."""


def lead(name: str, topic: str, bootstrap: str, count: int, *, unchecked: bool) -> None:
    """One process: take over when the log is silent, then write `count` entries. Prints what happens."""
    numbers = Numbers()
    leader: UncheckedLeader | FencepostLeader
    if unchecked:
        leader = UncheckedLeader(topic, name, numbers, bootstrap)
    else:
        leader = FencepostLeader(LogWriter(topic, 0, bootstrap_servers=bootstrap), name, numbers.apply)
    leader.read_to_end()
    print("follows", flush=True)
    while leader.silent_seconds < SILENT_SECONDS:
        time.sleep(0.1)
        leader.read_to_end()
    print(f"leads, by its claim at offset {leader.claim()}", flush=True)
    try:
        for _ in range(count):
            leader.check()
            number = numbers.last + 1
            print(f"decides on number {number}", flush=True)
            time.sleep(WORK_SECONDS)
            offset = leader.append([Record(f"{name} {number}".encode())])
            numbers.last = number
            print(f"wrote number {number} at offset {offset}", flush=True)
    except NotLeaderError as error:
        print(f"leads no longer: {error.leader} does", flush=True)


class Process:
    """A leader's process. Its lines go to the common timeline."""

    def __init__(self, name: str, arguments: Sequence[str], timeline: queue.Queue[tuple[float, str, str]]) -> None:
        self.name = name
        command = [sys.executable, __file__, *arguments, "--lead", name]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._timeline = timeline
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._timeline.put((time.monotonic(), self.name, line.strip()))
        self._timeline.put((time.monotonic(), self.name, "ended"))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def play(bootstrap: str, *, unchecked: bool) -> int:
    """One run. Prints its timeline, and returns the number of entries of an old leader after a later claim."""
    topic = f"stopped-leader-{time.time_ns()}"
    configs = {} if unchecked else {"fencepost.check.expected.offsets": "required"}
    with KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        admin.create_topics([NewTopic(topic, 1, -1, topic_configs=configs)])
    arguments = ["--bootstrap-server", bootstrap, "--topic", topic, *(["--unchecked"] if unchecked else [])]
    timeline: queue.Queue[tuple[float, str, str]] = queue.Queue()
    begun = time.monotonic()

    def show(name: str, text: str) -> None:
        print(f"  {time.monotonic() - begun:5.1f} s  {name}  {text}")

    def shown_until(name: str, text: str) -> None:
        while True:
            _, by, line = timeline.get(timeout=60)
            if line != "ended":
                show(by, line)
            if (by, line) == (name, text):
                return

    a = Process("A", arguments, timeline)
    processes = [a]
    try:
        shown_until("A", f"decides on number {STOPPED_AT}")
        a.signal(signal.SIGSTOP)
        show("A", "is stopped (SIGSTOP)")
        processes.append(Process("B", [*arguments, "--count", "3"], timeline))
        shown_until("B", "ended")
        show("A", "is continued (SIGCONT)")
        a.signal(signal.SIGCONT)
        shown_until("A", "ended")
    finally:
        for process in processes:
            process.end()
    return report(topic, bootstrap)


def report(topic: str, bootstrap: str) -> int:
    """Print the log. Returns the number of entries that are not by the newest claim's leader."""
    leader, entries, wrong = "", [], 0
    with LogReader([(topic, 0)], bootstrap_servers=bootstrap) as log:
        for _, record in log:
            value = (record.value or b"").decode()
            if value.startswith("claim ") or any(name == "fencepost-recipe" for name, _ in record.headers):
                leader = value.removeprefix("claim ")
                entries.append(f"[{leader} claims]")
            else:
                wrong += not value.startswith(leader)
                entries.append(value if value.startswith(leader) else f"{value} (WRONG: {leader} leads)")
    print("  log: " + ", ".join(entries) + "\n")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bootstrap-server", dest="bootstrap", default=BOOTSTRAP_SERVER, help="the proxy (default: %(default)s)"
    )
    for internal in ("--lead", "--topic"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--unchecked", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=100, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.lead:
        lead(options.lead, options.topic, options.bootstrap, options.count, unchecked=options.unchecked)
        return 0
    print("Plain Kafka: the leader checks for a later claim, then appends.")
    unchecked = play(options.bootstrap, unchecked=True)
    print("fencepost.recipes.Leader: the append of an old leader is refused.")
    fenced = play(options.bootstrap, unchecked=False)
    print(f"Entries of the old leader after its successor's claim: {unchecked} with plain Kafka, {fenced} with Leader.")
    return 0 if unchecked and not fenced else 1


if __name__ == "__main__":
    sys.exit(main())
