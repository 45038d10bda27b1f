"""Rolling restarts under load, and their results."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.kit.checker import Decision, check, report
from tests.kit.history import OK, History, Manner, Operation
from tests.kit.java import JavaProducers
from tests.kit.producers import CLIENTS
from tests.kit.threads import working
from tests.kit.waiting import until
from tests.kit.writers import ClientWriter, Crew, LogWriter, Writer
from tests.rolling_restart.transactions import PARTITIONS, ConditionalTransactions, Transactions
from tests.support.clients import LIBRARIES
from tests.support.kafka import unique_topic
from tests.support.members import MEMBERS, Member
from tests.support.raw import Connection

if TYPE_CHECKING:
    from tests.rolling_restart.stage import Stage

PATIENCE_SECONDS = 150.0
#: Appends of each writer that are required before and after each step, so that each step happens under load.
_CONTINUE = 30
_COMMIT_EVERY_SECONDS = 0.5
#: Longer than the delivery timeout of any client.
_REPORTED_SECONDS = 180.0
_PAUSE_SECONDS = 0.05
_IDEMPOTENT = {"acks": "all", "enable_idempotence": True}
#: Without expected offsets: the client's usual configuration, with acks=all and idempotence, and ten records in flight.
PLAIN: Mapping[str, Callable[..., Writer]] = {
    client: partial(
        ClientWriter,
        client=client,
        conditional=False,
        at_once=10,
        partitions=PARTITIONS,
        settings=_IDEMPOTENT,
        manner=Manner(resends=True, idempotent=True),
    )
    for client in CLIENTS
}
#: The only writers of their topics: `LogWriter` of the client library, and Kafka's Java producer with headers.
CONDITIONAL: Mapping[str, Callable[..., Writer]] = {
    "java": partial(ClientWriter, client="java", settings={"acks": "all"}, manner=Manner(named=True, resends=True)),
    **{client: partial(LogWriter, client=client) for client in LIBRARIES},
}
#: One for each client.
READERS = ("java-eager", "kafka-python-eager", "aiokafka-eager", "librdkafka-eager")
#: Clients that try the other addresses of `bootstrap.servers` when all known brokers are unreachable: librdkafka
#: immediately, Java within a minute. kafka-python and aiokafka only retry the brokers that they know.
QUERY_THE_OTHER = ("java", "confluent-kafka", "librdkafka")
EVERYBODY = (*QUERY_THE_OTHER, "kafka-python", "aiokafka")

Say = Callable[[str], None]


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
    history: History
    decision: Decision
    transactions: tuple[Transactions, ...]
    read: tuple[Read, ...]
    stops_seconds: tuple[float, ...]

    @property
    def failed(self) -> list[Operation]:
        """Sends that failed, except within transactions, which are repeated."""
        operations = self.history.operations.values()
        return [each for each in operations if each.outcome != OK and each.transaction is None]

    @property
    def holds(self) -> bool:
        committed = all(each.accepted for each in self.transactions)
        return committed and not self.failed and not self.decision.findings and all(each.holds for each in self.read)

    def table(self) -> str:
        lines = [*self.history.table(), *report(self.decision), ""]
        lines += [str(each) for each in self.transactions]
        lines += ["", "group                         in Kafka    read  missed  read again  commits  tried again"]
        lines += [
            f"{r.group:<28} {r.in_kafka:>9} {r.read:>7} {r.missed:>7} {r.again:>11} {r.commits:>8}"
            f" {r.commits_failed:>12}"
            for r in self.read
        ]
        stops = ", ".join(f"{each:.1f}" for each in self.stops_seconds)
        lines += ["", f"{len(self.stops_seconds)} proxies stopped by SIGTERM, each with status 0, in {stops} s"]
        lines += [f"failed: {each}" for each in self.failed[:20]]
        for writer in self.transactions:
            lines += [f"{writer.name}: {what} ({count} times)" for what, count in writer.again.most_common(6)]
        for group in self.read:
            lines += [f"{group.group}: {error}" for error in group.errors]
        return "\n".join(lines)


def run(
    stage: Stage,
    *,
    continue_meanwhile: Collection[str] = (),
    rolls: int = 1,
    readers: Sequence[str] = READERS,
    say: Say = lambda text: None,
) -> Result:
    """Restart the proxies `rolls` times while writers and readers use the stage's bootstrap address.

    `continue_meanwhile` – clients that must make progress while one of the proxies is down; all must once it is back.
    Raises AssertionError otherwise.
    """
    kafka, bootstrap, history = stage.kafka.bootstrap, stage.bootstrap, History()
    first = stage.proxies[0]
    partitions: dict[str, int] = {}

    def created(prefix: str, count: int, mode: str = "false") -> str:
        topic = unique_topic(prefix)
        with Connection(first.bootstrap) as connection:
            assert connection.create_topic(topic, partitions=count) == (0, None)
        history.topic(topic, mode)
        partitions[topic] = count
        return topic

    unchecked = created("plain", PARTITIONS)
    with ExitStack() as stack:
        java = stack.enter_context(JavaProducers(stage.directory / "java.log"))
        crew = Crew(lambda _: bootstrap, history, java, pace_seconds=_PAUSE_SECONDS, answer_seconds=_REPORTED_SECONDS)
        transactions = [
            *(Transactions(each, crew, created(f"transactions-{each}", PARTITIONS), kafka) for each in CLIENTS),
            ConditionalTransactions("java", crew, created("checked", 1, "true"), kafka),
        ]
        writers: list[Writer] = [
            *(plain(each, crew, unchecked, "") for each, plain in PLAIN.items()),
            *(alone(each, crew, created(f"required-{each}", 1, "required"), "") for each, alone in CONDITIONAL.items()),
            *transactions,
        ]
        stack.callback(_finish, writers)
        for each in writers:
            each.start()
        groups = {
            name: stack.enter_context(Member(MEMBERS[name], bootstrap, unchecked, f"{name}-{unchecked}"))
            for name in readers
        }
        with working(*(partial(_commit, each) for each in groups.values()), seconds=PATIENCE_SECONDS):
            _continue(writers, groups)
            stops = []
            for number in range(rolls):
                for proxy in stage.proxies:
                    began = time.monotonic()
                    assert proxy.stop() == 0, proxy.log
                    stops.append(time.monotonic() - began)
                    for each in transactions:
                        each.note_open()
                    _continue(
                        [each for each in writers if each.name.startswith(tuple(continue_meanwhile))],
                        {name: each for name, each in groups.items() if name.startswith(tuple(continue_meanwhile))},
                    )
                    stage.before_start(proxy)
                    proxy.restart()
                    _continue(writers, groups)
                    say(f"roll {number + 1}: {proxy.bootstrap} was down; all clients continue")
            _finish(writers)
            for topic, count in partitions.items():
                history.read_log(stage.log, topic, range(count), committed_at=kafka)
            stored = {each.id for part in range(PARTITIONS) for each in history.logs[unchecked, part]}
            for name, member in groups.items():
                until(
                    lambda m=member: len({each.value for each in m.read}) >= len(stored),
                    f"{name} to read all",
                    seconds=PATIENCE_SECONDS,
                )
    history.save(stage.directory / "history.json")
    read = tuple(_read(name, member, stored) for name, member in groups.items())
    return Result(history, check(history), tuple(transactions), read, tuple(stops))


def _finish(writers: Sequence[Writer]) -> None:
    """Also if one of them hangs."""
    with ExitStack() as stack:
        for each in writers:
            each.stop()
            stack.callback(each.join, 2 * _REPORTED_SECONDS)


def _continue(writers: Sequence[Writer], groups: Mapping[str, Member]) -> None:
    """Wait for progress of all clients. Requests in flight at the call do not count."""
    before = {writer: writer.accepted for writer in writers}

    def continued(writer: Writer) -> bool:
        writer.raise_error()
        return writer.accepted >= before[writer] + _CONTINUE

    read = {name: len(member.read) for name, member in groups.items()}
    for writer in writers:
        until(partial(continued, writer), f"{writer.name} to continue", seconds=PATIENCE_SECONDS)
    for name, member in groups.items():
        until(
            lambda n=name, m=member: len(m.read) >= read[n] + _CONTINUE,
            f"{name} to read on: {member.errors[-5:]}",
            seconds=PATIENCE_SECONDS,
        )


def _commit(member: Member, over: threading.Event) -> None:
    """Commit repeatedly. The table shows commits that take too long."""
    while not over.wait(_COMMIT_EVERY_SECONDS):
        try:
            member.commit()
        except AssertionError:
            member.errors.append("a commit took too long")


def _read(name: str, member: Member, stored: Collection[str | None]) -> Read:
    times = Counter((each.partition, each.offset) for each in member.read)
    values = {each.value for each in member.read}
    return Read(
        name,
        len(stored),
        len(times),
        sum(value not in values for value in stored),
        sum(count - 1 for count in times.values()),
        member.commits,
        len(member.errors),
        tuple(dict.fromkeys(error[:160] for error in member.errors))[:3],
    )
