"""Rolling restarts under load, and their results."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.java import JavaProducers
from tests.kit.waiting import until
from tests.rolling_restart.transactions import (
    PARTITIONS,
    Committed,
    conditional_transactions,
    counted,
    transactional,
)
from tests.rolling_restart.writers import CLIENTS, Writer, conditional, finish, plain
from tests.support.kafka import unique_topic
from tests.support.members import MEMBERS, Member
from tests.support.proxy import ProxyProcess
from tests.support.raw import Connection, Log

PATIENCE_SECONDS = 150.0
#: Appends of each writer that are required before and after each step, so that each step happens under load.
_CONTINUE = 30
_COMMIT_EVERY_SECONDS = 0.5
#: One for each client.
READERS = ("java-eager", "kafka-python", "aiokafka", "librdkafka-eager")
#: Clients that try the other addresses of `bootstrap.servers` when all known brokers are unreachable: librdkafka
#: immediately, Java within a minute. kafka-python and aiokafka only retry the brokers that they know.
QUERY_THE_OTHER = ("java", "confluent-kafka", "librdkafka")
EVERYBODY = (*QUERY_THE_OTHER, "kafka-python", "aiokafka")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Written:
    """Results of one writer's records, counted in Kafka. `pause` – the longest duration of an append."""

    writer: str
    reported: int
    failed: int
    in_kafka: int
    twice: int
    lost: int
    out_of_order: int
    pause_seconds: float
    failures: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not (self.failed or self.twice or self.lost or self.out_of_order)


@dataclass(frozen=True)
class Read:
    """What one consumer group read of the unchecked topic. `again` – records that it got more than once."""

    group: str
    in_kafka: int
    read: int
    missed: int
    again: int
    commits: int
    commits_failed: int
    errors: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.missed


@dataclass(frozen=True)
class Result:
    written: tuple[Written, ...]
    committed: tuple[Committed, ...]
    read: tuple[Read, ...]
    stops_seconds: tuple[float, ...]

    @property
    def holds(self) -> bool:
        return all(each.holds for each in (*self.written, *self.committed, *self.read))

    def table(self) -> str:
        lines = ["writer                        acked  failed  in Kafka  twice  lost  out of order  longest append"]
        lines += [
            f"{w.writer:<28} {w.reported:>6} {w.failed:>7} {w.in_kafka:>9} {w.twice:>6} {w.lost:>5} "
            f"{w.out_of_order:>13}"
            f" {w.pause_seconds:>13.1f} s"
            for w in self.written
        ]
        if self.committed:
            lines += [
                "",
                "transactions                committed  aborted  open at a stop  tried again  new producers"
                "  in Kafka  twice  lost  half  aborted, seen  out of order  longest one",
            ]
        lines += [
            f"{c.writer:<29} {c.committed:>7} {c.aborted:>8} {c.open_then:>15} {c.again:>12} {c.producers:>14}"
            f" {c.in_kafka:>9} {c.twice:>6} {c.lost:>5} {c.torn:>5} {c.shown:>14} {c.out_of_order:>13}"
            f" {c.pause_seconds:>10.1f} s"
            for c in self.committed
        ]
        lines.append("")
        lines.append("group                         in Kafka    read  missed  read again  commits  tried again")
        lines += [
            f"{r.group:<28} {r.in_kafka:>9} {r.read:>7} {r.missed:>7} {r.again:>11} {r.commits:>8}"
            f" {r.commits_failed:>12}"
            for r in self.read
        ]
        stops = ", ".join(f"{each:.1f}" for each in self.stops_seconds)
        lines += ["", f"{len(self.stops_seconds)} proxies stopped by SIGTERM, each with status 0, in {stops} s"]
        for each in self.written:
            lines += [f"{each.writer}: {failure}" for failure in each.failures]
        for transactions in self.committed:
            lines += [f"{transactions.writer}: {reported}" for reported in transactions.reported]
        for group in self.read:
            lines += [f"{group.group}: {error}" for error in group.errors]
        return "\n".join(lines)


def run(
    kafka: str,
    proxies: Sequence[ProxyProcess],
    directory: Path,
    *,
    bootstrap: str,
    continue_meanwhile: Collection[str] = (),
    rolls: int = 1,
    readers: Sequence[str] = READERS,
    clients: Sequence[str] = CLIENTS,
    transacting: Sequence[str] = CLIENTS,
    say: Say = lambda text: None,
) -> Result:
    """Restart the proxies `rolls` times while writers and readers use `bootstrap`.

    `kafka` – Kafka's bootstrap address, used for counting. `continue_meanwhile` – clients that must make progress while
    one of the proxies is down; all must once it is back. Raises AssertionError otherwise.
    """
    log = Log(kafka)
    of_transactions = {each: _created(proxies[0], unique_topic(f"plain-{each}"), PARTITIONS) for each in transacting}
    unchecked_topic = _created(proxies[0], unique_topic("plain"), 3)
    required_topics = {client: _created(proxies[0], unique_topic(f"required-{client}"), 1) for client in clients}
    with ExitStack() as stack:
        java = stack.enter_context(JavaProducers(directory / "java.log"))
        writers: list[Writer] = [plain(client, bootstrap, unchecked_topic, java) for client in clients]
        writers += [conditional(client, bootstrap, topic, java) for client, topic in required_topics.items()]
        commits = [transactional(client, kafka, bootstrap, topic, java) for client, topic in of_transactions.items()]
        if "java" in transacting:
            checked = _created(proxies[0], unique_topic("checked"), 1)
            commits.append(conditional_transactions(kafka, bootstrap, checked, java))
        writers += commits
        stack.callback(finish, writers)
        groups = {
            name: stack.enter_context(
                MEMBERS[name](bootstrap, unchecked_topic, f"{name}-{unchecked_topic}", "earliest")
            )
            for name in readers
        }
        with _committing(groups.values()):
            _continue(writers, groups)
            stops = []
            for number in range(rolls):
                for proxy in proxies:
                    began = time.monotonic()
                    assert proxy.stop() == 0, proxy.log
                    stops.append(time.monotonic() - began)
                    for each in commits:
                        each.note_open()
                    _continue(
                        [each for each in writers if each.name.startswith(tuple(continue_meanwhile))],
                        {name: each for name, each in groups.items() if name.startswith(tuple(continue_meanwhile))},
                    )
                    proxy.restart()
                    _continue(writers, groups)
                    say(f"roll {number + 1}: {proxy.bootstrap} was down; all clients continue")
            finish(writers)
            stored = {topic: _stored(log, topic, partitions) for topic, partitions in
                      ((unchecked_topic, 3), *((topic, 1) for topic in required_topics.values()))}  # fmt: skip
            expected = Counter(value for _, value in stored[unchecked_topic])
            for name, member in groups.items():
                until(
                    lambda m=member: len({each.value for each in m.read}) >= len(expected),
                    f"{name} to read all",
                    seconds=PATIENCE_SECONDS,
                )
    return Result(
        tuple(_written(writer, stored[writer.topic]) for writer in writers if writer.topic in stored),
        tuple(counted(each, each.committed()) for each in commits),
        tuple(_read(name, member, expected) for name, member in groups.items()),
        tuple(stops),
    )


def _created(proxy: ProxyProcess, topic: str, partitions: int) -> str:
    with Connection(proxy.bootstrap) as connection:
        assert connection.create_topic(topic, partitions=partitions) == (0, None)
    return topic


def _continue(writers: Sequence[Writer], groups: Mapping[str, Member]) -> None:
    """Wait for progress of all clients. Requests in flight at the call do not count."""
    before = {writer: writer.appended for writer in writers}
    read = {name: len(member.read) for name, member in groups.items()}
    for writer in writers:
        until(
            lambda w=writer: w.appended >= before[w] + _CONTINUE or w.ledger.failed,
            f"{writer.name} to continue",
            seconds=PATIENCE_SECONDS,
        )
    for name, member in groups.items():
        until(
            lambda n=name, m=member: len(m.read) >= read[n] + _CONTINUE,
            f"{name} to read on: {member.errors[-5:]}",
            seconds=PATIENCE_SECONDS,
        )


@contextmanager
def _committing(members: Collection[Member]) -> Iterator[None]:
    """Commit repeatedly, in one thread per member. The table shows commits that take too long."""
    end = threading.Event()

    def commit(member: Member) -> None:
        while not end.wait(_COMMIT_EVERY_SECONDS):
            try:
                member.commit()
            except AssertionError:
                member.errors.append("a commit took too long")

    threads = [threading.Thread(target=commit, args=(each,), daemon=True) for each in members]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        end.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)


def _stored(log: Log, topic: str, partitions: int) -> list[tuple[int, str]]:
    """(partition, value) of every record, in the order of each partition's log."""
    return [(part, (value or b"").decode()) for part in range(partitions) for value in log.values(topic, part)]


def _written(writer: Writer, stored: Sequence[tuple[int, str]]) -> Written:
    written = [(partition, value) for partition, value in stored if value.startswith(f"{writer.name}/")]
    times = Counter(value for _, value in written)
    numbers: dict[int, list[int]] = {}
    for partition, value in written:
        numbers.setdefault(partition, []).append(int(value.rpartition("/")[2]))
    return Written(
        writer.name,
        len(writer.ledger.reported),
        len(writer.ledger.failed),
        len(written),
        sum(count - 1 for count in times.values()),
        sum(value not in times for value in writer.ledger.reported),
        sum(later < earlier for each in numbers.values() for earlier, later in itertools.pairwise(each)),
        writer.ledger.longest_pause_seconds,
        tuple(f"{value}: {error}" for value, error in list(writer.ledger.failed.items())[:3]),
    )


def _read(name: str, member: Member, expected: Counter[str]) -> Read:
    times = Counter((each.partition, each.offset) for each in member.read)
    values = {each.value for each in member.read}
    errors = [each for each in member.errors if not each.startswith("[")]  # log lines of Java clients, not commits
    return Read(
        name,
        sum(expected.values()),
        len(times),
        sum(value not in values for value in expected),
        sum(count - 1 for count in times.values()),
        member.commits,
        len(errors),
        tuple(dict.fromkeys(error[:160] for error in errors))[:3],
    )
