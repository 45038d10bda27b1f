"""Move money between two accounts on two partitions with many writers, without creating or losing any.

Each record contains a change and the resulting balance, so a transfer must be decided on both current balances. A
writer

1. reads both partitions to their ends: the balances, and the expected offset of each partition;
2. decides the transfer, and appends one record to each partition in one transaction, at the expected offsets;
3. on OffsetMismatchError or TransactionConflictError (another writer was first), restarts at 1 after a random pause.

Finally an auditor reads the committed records of both partitions. The balances must add up to the deposits, every
balance must follow from the previous one, and every transfer must be in both partitions exactly once.

    .venv/bin/fencepost dev                         # in one terminal: Kafka and the proxy
    .venv/bin/python examples/transfer.py           # in another

`--unchecked` uses Kafka's transactions without expected offsets. Each transfer is still all or nothing, but money is
lost, because two transfers may be decided on the same balances.

`--kills N` kills (kill -9) and restarts writers and proxies N times. The program then starts its own proxies in front
of the Kafka that `--kafka` names.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import KafkaError, TopicAlreadyExistsError

import fencepost.kafka_python
from fencepost import LogRecord, OutcomeUnknownError, Record, RetryPolicy, WriterFencedError, retrying

with contextlib.suppress(ImportError):  # aiokafka is not installed
    import fencepost.aiokafka
with contextlib.suppress(ImportError):  # confluent-kafka is not installed
    import fencepost.confluent

PAID_IN = 1000
#: The partition of each account.
ACCOUNTS = (0, 1)
RETRY = RetryPolicy(attempt_seconds=10, total_seconds=180, pause_seconds=0.02, pause_seconds_max=1.0)
BOOTSTRAP_SERVER = os.environ.get("FENCEPOST_BOOTSTRAP_SERVER", "127.0.0.1:19092")
#: Client library → its adapter.
CLIENTS = {"kafka-python": "kafka_python", "confluent": "confluent", "aiokafka": "aiokafka"}
INSTALLED = [client for client, adapter in CLIENTS.items() if hasattr(fencepost, adapter)]
COUNTERS = ("decided", "fenced", "unknown")

TopicPartition = tuple[str, int]
Appends = Mapping[TopicPartition, tuple[int | None, Sequence[Record]]]


@dataclass(slots=True)
class Books:
    """The balances that both partitions yield. `conflicts`: number of balances that do not follow from the previous."""

    balances: dict[int, int] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0))
    observed: dict[int, Counter[str]] = field(default_factory=lambda: {account: Counter() for account in ACCOUNTS})
    conflicts: int = 0

    def apply(self, topic_partition: TopicPartition, record: LogRecord) -> None:
        assert record.value is not None
        _, account = topic_partition
        entry = json.loads(record.value)
        if self.balances[account] + entry["change"] != entry["balance"]:
            self.conflicts += 1
        self.balances[account] = entry["balance"]
        self.observed[account][entry["id"]] += 1

    def has(self, transfer: str) -> bool:
        return any(transfer in observed for observed in self.observed.values())


class Log(Protocol):
    def read_to_end(self, apply: Callable[[TopicPartition, LogRecord], None]) -> dict[TopicPartition, int]: ...

    def close(self) -> None: ...


class Writer(Protocol):
    def append(self, requested: Appends) -> dict[TopicPartition, int]: ...

    def close(self) -> None: ...


class UncheckedWriter:
    """The same writer without expected offsets: correct only with a single writer."""

    def __init__(self, transactional_id: str, bootstrap: str) -> None:
        self._producer = KafkaProducer(bootstrap_servers=bootstrap, transactional_id=transactional_id)
        self._producer.init_transactions()

    def append(self, requested: Appends) -> dict[TopicPartition, int]:
        self._producer.begin_transaction()
        for (topic, partition), (_, records) in requested.items():
            for record in records:
                self._producer.send(topic, record.value, partition=partition)
        self._producer.commit_transaction()
        return {}

    def close(self) -> None:
        self._producer.close()


class Awaited:
    """Blocking wrapper of the aiokafka reader or writer."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._runner = asyncio.Runner()
        self._inner = self._runner.run(self._made(make))

    async def _made(self, make: Callable[[], Any]) -> Any:
        inner = make()
        await inner.start()
        return inner

    def read_to_end(self, apply: Callable[[TopicPartition, LogRecord], None]) -> dict[TopicPartition, int]:
        expected: dict[TopicPartition, int] = self._runner.run(self._inner.read_to_end(apply))
        return expected

    def append(self, requested: Appends) -> dict[TopicPartition, int]:
        offsets: dict[TopicPartition, int] = self._runner.run(self._inner.append(requested))
        return offsets

    def close(self) -> None:
        self._runner.run(self._inner.stop())
        self._runner.close()


def open_log(client: str, bootstrap: str, topic: str) -> Log:
    partitions = [(topic, account) for account in ACCOUNTS]
    if client == "confluent":
        return fencepost.confluent.LogReader(partitions, {"bootstrap.servers": bootstrap}, retry=RETRY)
    if client == "aiokafka":
        return Awaited(lambda: fencepost.aiokafka.LogReader(partitions, bootstrap_servers=bootstrap, retry=RETRY))
    return fencepost.kafka_python.LogReader(partitions, bootstrap_servers=bootstrap, retry=RETRY)


def open_writer(client: str, bootstrap: str, name: str, *, unchecked: bool) -> Writer:
    if unchecked:
        return UncheckedWriter(name, bootstrap)
    if client == "confluent":
        return fencepost.confluent.TransactionalWriter(name, {"bootstrap.servers": bootstrap}, retry=RETRY)
    if client == "aiokafka":
        return Awaited(lambda: fencepost.aiokafka.TransactionalWriter(name, bootstrap_servers=bootstrap, retry=RETRY))
    return fencepost.kafka_python.TransactionalWriter(name, bootstrap_servers=bootstrap, retry=RETRY)


# --- writer process ---------------------------------------------------------------------------------------------------


class Teller:
    """One writer. Makes its transfers one by one, and skips those made before a restart."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._books = Books()
        self._log = open_log(options.client, options.bootstrap, options.topic)
        self._writer = self._open_writer()
        self._counts = dict.fromkeys(COUNTERS, 0)  # of the current transfer

    def run(self) -> None:
        name = self._options.writer
        for number in range(self._options.transfers):
            rng = random.Random(f"{self._options.seed}{name}{number}")
            source, target = rng.sample(ACCOUNTS, 2)
            self._transfer(f"{name}-{number}", source, target, rng.randint(1, 50))
            print(json.dumps({"done": f"{name}-{number}", **self._counts}), flush=True)
            self._counts = dict.fromkeys(COUNTERS, 0)
        self._writer.close()
        self._log.close()

    def _transfer(self, name: str, source: int, target: int, wish: int) -> None:
        def attempt() -> None:
            expected = self._log.read_to_end(self._books.apply)
            if self._books.has(name):
                return  # done before a restart, or by a commit with an unknown outcome
            self._counts["decided"] += 1
            balances = self._books.balances
            amount = min(wish, balances[source])
            topic = self._options.topic
            self._writer.append(
                {
                    (topic, account): (expected[topic, account], [entry(name, change, balances[account])])
                    for account, change in ((source, -amount), (target, amount))
                }
            )

        while True:
            try:
                retrying(attempt, RETRY)
                return
            except OutcomeUnknownError:  # the next attempt reads the outcome
                self._counts["unknown"] += 1
            except WriterFencedError:  # no other writer has this id, so the transaction timed out
                self._counts["fenced"] += 1
                self._writer.close()
                self._writer = self._open_writer()

    def _open_writer(self) -> Writer:
        options = self._options
        return open_writer(
            options.client, options.bootstrap, f"{options.topic}-{options.writer}", unchecked=options.unchecked
        )


def entry(transfer: str, change: int, balance: int) -> Record:
    return Record(json.dumps({"id": transfer, "change": change, "balance": balance + change}).encode())


# --- the program ------------------------------------------------------------------------------------------------------


class Proxies:
    """The proxies that this program starts and kills."""

    def __init__(self, kafka: str, ports: Sequence[int], directory: Path) -> None:
        self._kafka = kafka
        self._ports = ports
        self._directory = directory
        self._config = directory / "fencepost.toml"
        # How long a restarted proxy responds to conditional appends with a retriable error.
        self._config.write_text("[limits]\ntakeover_seconds = 1.0\n")
        self._running: list[subprocess.Popen[str]] = []
        for number in range(len(ports)):
            self._running.append(self._start(number))

    def bootstrap(self, number: int) -> str:
        return f"127.0.0.1:{self._ports[number % len(self._ports)]}"

    def kill_one(self) -> str:
        number = random.randrange(len(self._running))
        self._running[number].kill()
        self._running[number].wait()
        self._running[number] = self._start(number)
        return f"proxy {number + 1}"

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait()

    def _start(self, number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fencepost_proxy", "proxy", "--upstream", self._kafka]
        command += ["--listen", self.bootstrap(number), "--config", str(self._config)]
        with (self._directory / f"proxy-{number + 1}.log").open("a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready"):
            raise SystemExit(f"the proxy did not start (see {self._directory}/proxy-{number + 1}.log)")
        return process


def make_topic(bootstrap: str, topic: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        try:
            admin.create_topics([NewTopic(topic, len(ACCOUNTS), -1)])
        except TopicAlreadyExistsError:
            raise SystemExit(f"topic {topic!r} already exists (choose another with --topic)") from None
        change = {"fencepost.check.expected.offsets": (AlterConfigOp.SET, "true")}
        try:
            admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, change)])
        except ValueError as error:  # kafka-python checks the config name with the cluster
            raise SystemExit(f"{bootstrap} is not a Fencepost proxy ({error}); see --help") from None
    finally:
        admin.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if no money is lost and every transfer is made once; else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bootstrap-server", dest="bootstrap", default=BOOTSTRAP_SERVER, help="the proxy (default: %(default)s)"
    )
    parser.add_argument("--topic", default=f"transfer-{int(time.time())}", help="a new topic (default: %(default)s)")
    parser.add_argument("--writers", type=int, default=4, help="number of writer processes (default: %(default)s)")
    parser.add_argument("--transfers", type=int, default=25, help="transfers per writer (default: %(default)s)")
    parser.add_argument(
        "--client",
        choices=[*INSTALLED, "all"],
        default="all",
        help="client library of the writers (default: all installed)",
    )
    parser.add_argument("--unchecked", action="store_true", help="use transactions without expected offsets")
    parser.add_argument("--kills", type=int, default=0, help="number of times to kill a writer or a proxy")
    parser.add_argument("--kafka", help="with --kills: Kafka's own address")
    parser.add_argument(
        "--ports", default="19192,19292", help="with --kills: ports of the proxies; a few ports above each must be free"
    )
    parser.add_argument("--seed", type=int, default=None, help="random seed (default: random, printed)")
    parser.add_argument("--writer", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.writer is not None:
        # These libraries log every refusal and every wait for a partition.
        for library in ("aiokafka", "kafka"):
            logging.getLogger(library).setLevel(logging.CRITICAL)
        Teller(options).run()
        return 0
    if (options.kills > 0) != (options.kafka is not None):
        parser.error("--kills and --kafka require each other: the program starts the proxies that it kills")
    if options.seed is None:
        options.seed = random.randrange(1 << 32)
    with contextlib.ExitStack() as stack:
        proxies = None
        if options.kafka is not None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            proxies = Proxies(options.kafka, [int(port) for port in options.ports.split(",")], directory)
            stack.callback(proxies.stop)
            options.bootstrap = proxies.bootstrap(0)
        return run(options, proxies)


def run(options: argparse.Namespace, proxies: Proxies | None) -> int:
    topic = options.topic
    make_topic(options.bootstrap, topic)
    how = (
        "in transactions without expected offsets"
        if options.unchecked
        else "each at the offset after the last record that it read"
    )
    print(f"{options.writers} writers make {options.transfers} transfers each in {topic}, {how} (seed {options.seed}).")
    deposit = [entry("deposit", PAID_IN, 0)]
    with fencepost.kafka_python.TransactionalWriter(
        f"{topic}-deposit", bootstrap_servers=options.bootstrap, retry=RETRY
    ) as writer:
        retrying(lambda: writer.append({(topic, account): (0, deposit) for account in ACCOUNTS}), RETRY)

    started = time.monotonic()
    total = options.writers * options.transfers
    killed: Counter[str] = Counter()
    with contextlib.closing(Writers(options, proxies)) as writers:
        while writers.at_work():
            # Spread the kills evenly over all transfers.
            if proxies is not None and len(writers.done) * (options.kills + 1) > total * (killed.total() + 1):
                killed[proxies.kill_one() if random.random() < 0.3 else writers.kill_one()] += 1
            time.sleep(0.02)
    took = time.monotonic() - started
    books = audit(options.bootstrap, topic)
    if killed:
        print("killed: " + ", ".join(f"{target} {count} times" for target, count in sorted(killed.items())))
    reported = {what: sum(counts[what] for counts in writers.done.values()) for what in COUNTERS}
    print(
        f"{total} transfers were decided {reported['decided']} times (without killed attempts), in {took:.1f} s; "
        f"fenced: {reported['fenced']}, outcome unknown at first: {reported['unknown']}"
    )
    return report(options, books)


class Writers:
    """The writer processes. `done`: {transfer: counts} that they reported."""

    def __init__(self, options: argparse.Namespace, proxies: Proxies | None) -> None:
        self._options = options
        self._proxies = proxies
        self.done: dict[str, dict[str, int]] = {}
        self._running = {number: self._start(number) for number in range(options.writers)}

    def at_work(self) -> bool:
        for number, (process, ear) in list(self._running.items()):
            if process.poll() is not None:
                ear.join()
                if process.returncode:
                    raise SystemExit(f"writer {number} failed with exit status {process.returncode}")
                del self._running[number]
        return bool(self._running)

    def kill_one(self) -> str:
        number = random.choice(list(self._running))
        self._kill(number)
        self._running[number] = self._start(number)
        return "writers"

    def close(self) -> None:
        for number in self._running:
            self._kill(number)

    def _kill(self, number: int) -> None:
        process, ear = self._running[number]
        process.kill()
        process.wait()
        ear.join()

    def _start(self, number: int) -> tuple[subprocess.Popen[str], threading.Thread]:
        options = self._options
        bootstrap = options.bootstrap if self._proxies is None else self._proxies.bootstrap(number)
        client = INSTALLED[number % len(INSTALLED)] if options.client == "all" else options.client
        command = [sys.executable, __file__, "--writer", f"writer-{number}", "--topic", options.topic]
        command += ["--bootstrap-server", bootstrap, "--client", client, "--seed", str(options.seed)]
        command += ["--transfers", str(options.transfers), *(["--unchecked"] if options.unchecked else [])]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        ear = threading.Thread(target=self._read_output, args=(process,), daemon=True)
        ear.start()
        return process, ear

    def _read_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                with contextlib.suppress(ValueError):  # incomplete line of a killed writer
                    reported = json.loads(line)
                    self.done.setdefault(reported.pop("done"), reported)


def audit(bootstrap: str, topic: str) -> Books:
    """The books that a reader gets after every transaction has its markers."""
    deadline = time.monotonic() + RETRY.total_seconds
    while True:
        books = Books()
        with contextlib.suppress(KafkaError):
            log = open_log("kafka-python", bootstrap, topic)
            try:
                log.read_to_end(books.apply)
            finally:
                log.close()
            if books.observed[0].keys() == books.observed[1].keys() or time.monotonic() > deadline:
                return books
        time.sleep(0.1)


def report(options: argparse.Namespace, books: Books) -> int:
    """Print the result and whether it is correct. Returns the exit status."""
    expected = {f"writer-{w}-{n}" for w in range(options.writers) for n in range(options.transfers)} | {"deposit"}
    lost = len(expected - (books.observed[0].keys() & books.observed[1].keys()))
    doubled = sum(count > 1 for observed in books.observed.values() for count in observed.values())
    paid_in, there = PAID_IN * len(ACCOUNTS), sum(books.balances.values())
    print(f"transfers lost: {lost}   doubled: {doubled}   decided on a stale balance: {books.conflicts}")
    print(f"deposits: {paid_in}   balances: {there} ({' + '.join(map(str, books.balances.values()))})")
    right = there == paid_in and not (lost or doubled or books.conflicts)
    print("CONSERVED: the balances equal the deposits." if right else "NOT CONSERVED: see above.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
