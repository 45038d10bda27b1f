"""Event-sourced accounts with many writers: how the mapping of accounts to partitions decides how many appends succeed.

Each event states the account's version and balance. To handle a command, a writer

1. knows the events of the account's partition, since it has read that partition to its end;
2. decides, and appends the event at the end that it has read;
3. on OffsetMismatchError (another writer was first, perhaps for another account), reads on and decides again.

The program does this with one partition, with several that all writers share (also reading on before each decision),
and with several that have one writer each. Finally it reads all events: versions must be consecutive, no balance
negative, and no command lost.

    .venv/bin/fencepost dev                         # in one terminal: Kafka and the proxy
    .venv/bin/python examples/event_sourcing.py     # in another
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from kafka import KafkaAdminClient
from kafka.admin import NewTopic

from fencepost import LogRecord, OffsetMismatchError, Record
from fencepost.kafka_python import LogReader, LogWriter

BOOTSTRAP_SERVER = os.environ.get("FENCEPOST_BOOTSTRAP_SERVER", "127.0.0.1:19092")
ACCOUNTS = [f"account-{number}" for number in range(64)]


def partition_of(account: str, partitions: int) -> int:
    return zlib.crc32(account.encode()) % partitions


@dataclass(slots=True)
class Accounts:
    """The accounts of one partition, as its events yield them. `gaps`: events whose version is not the next one."""

    versions: dict[str, int] = field(default_factory=dict)
    balances: dict[str, int] = field(default_factory=dict)
    gaps: int = 0

    def apply(self, record: LogRecord) -> None:
        assert record.value is not None
        self.apply_event(json.loads(record.value))

    def apply_event(self, event: dict[str, object]) -> None:
        account, version = str(event["account"]), int(str(event["version"]))
        self.gaps += version != self.versions.get(account, 0) + 1
        self.versions[account] = version
        self.balances[account] = int(str(event["balance"]))

    def decide(self, account: str, amount: int) -> dict[str, object]:
        """The event of a command: a debit takes at most what is there."""
        balance = max(0, self.balances.get(account, 0) + amount)
        return {"account": account, "version": self.versions.get(account, 0) + 1, "balance": balance}


@dataclass(frozen=True, slots=True)
class Layout:
    partitions: int
    owned: bool = False
    read_first: bool = False

    def __str__(self) -> str:
        return "one each" if self.owned else "all, read first" if self.read_first else "all"

    def accounts_of(self, writer: int, writers: int) -> list[str]:
        """Those for which this writer handles commands."""
        return [each for each in ACCOUNTS if not self.owned or partition_of(each, self.partitions) % writers == writer]


class Writer(threading.Thread):
    """Handles commands one by one. Opens a partition at its first command."""

    def __init__(self, topic: str, layout: Layout, bootstrap: str, commands: Sequence[tuple[str, int]]) -> None:
        super().__init__()
        self._topic, self._layout, self._server, self._commands = topic, layout, bootstrap, commands
        self._open: dict[int, tuple[LogWriter, Accounts]] = {}
        self.appended = self.refused = 0

    def prepare(self) -> None:
        for partition in {partition_of(account, self._layout.partitions) for account, _ in self._commands}:
            log, accounts = LogWriter(self._topic, partition, bootstrap_servers=self._server), Accounts()
            log.read_to_end(accounts.apply)
            self._open[partition] = log, accounts

    def run(self) -> None:
        for account, amount in self._commands:
            log, accounts = self._open[partition_of(account, self._layout.partitions)]
            if self._layout.read_first:
                log.read_to_end(accounts.apply)
            while True:
                event = accounts.decide(account, amount)
                try:
                    log.append([Record(json.dumps(event).encode(), account.encode())])
                    break
                except OffsetMismatchError:
                    self.refused += 1
                    log.read_to_end(accounts.apply)
            accounts.apply_event(event)
            self.appended += 1

    def close(self) -> None:
        for log, _ in self._open.values():
            log.close()


def commands(accounts: Sequence[str], count: int) -> list[tuple[str, int]]:
    return [(random.choice(accounts), random.randint(-50, 50)) for _ in range(count)]


def measure(bootstrap: str, layout: Layout, writers: int, count: int) -> bool:
    """Prints one row. Whether the log is right."""
    topic = f"accounts-{time.time_ns()}"
    with KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        admin.create_topics(
            [NewTopic(topic, layout.partitions, -1, topic_configs={"fencepost.check.expected.offsets": "required"})]
        )
    running = [
        Writer(topic, layout, bootstrap, commands(layout.accounts_of(writer, writers), count))
        for writer in range(writers)
    ]
    for writer in running:
        writer.prepare()
    started = time.monotonic()
    for writer in running:
        writer.start()
    for writer in running:
        writer.join()
    seconds = time.monotonic() - started
    for writer in running:
        writer.close()
    appended, refused = sum(each.appended for each in running), sum(each.refused for each in running)
    truth = Accounts()
    with LogReader([(topic, number) for number in range(layout.partitions)], bootstrap_servers=bootstrap) as log:
        for _, record in log:
            truth.apply(record)
    print(f"{layout.partitions:>10} {layout!s:>24} {appended / seconds:>12.0f} {refused / appended:>19.2f}")
    right = truth.gaps == 0 and sum(truth.versions.values()) == appended == writers * count
    return right and min(truth.balances.values()) >= 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bootstrap-server", dest="bootstrap", default=BOOTSTRAP_SERVER, help="the proxy (default: %(default)s)"
    )
    parser.add_argument("--writers", type=int, default=4, help="number of writers (default: %(default)s)")
    parser.add_argument("--partitions", type=int, default=8, help="number of partitions (default: %(default)s)")
    parser.add_argument("--commands", type=int, default=100, help="commands per writer (default: %(default)s)")
    options = parser.parse_args()
    print(f"{options.writers} writers handle {options.commands} commands each for {len(ACCOUNTS)} accounts.")
    print(f"{'partitions':>10} {'writers of a partition':>24} {'appends/s':>12} {'refusals per append':>19}")
    several = options.partitions
    layouts = [Layout(1), Layout(several), Layout(several, read_first=True), Layout(several, owned=True)]
    right = [measure(options.bootstrap, each, options.writers, options.commands) for each in layouts]
    print("RIGHT: every command is one event, on the version before it." if all(right) else "WRONG: see the topics.")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
