"""One run: a topic is expanded while producers write per-key counters and groups of several kinds read them.

    writers     `tests/order_proof/writers.py`: of one kind or of several at once
    groups      two members each, slow, so that they lag when the topic is expanded
    expansion   kafka-python's admin client; meanwhile members join, leave, are killed, and commit slowly; a proxy or a
                broker may be killed at one of its steps

In a run *without* the feature the topic has no ordered expansion, and the groups pause their prior partitions while
they read the new one. That makes the reordering of a lagging consumer certain.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import confluent_kafka
from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import NewPartitions, NewTopic
from kafka.errors import KafkaError

from fencepost import jump_hash
from fencepost_dev.cluster import KafkaCluster
from fencepost_policies.partitioners import Partitioner, partition_for
from tests.kit import stage as kit
from tests.kit.waiting import NeverHappened, until
from tests.order_proof.members import BROKER_PROPERTIES, Group
from tests.order_proof.observed import NANOS, WARM_UP, Decision, Expanded, Observed, validate
from tests.order_proof.writers import PATIENCE_SECONDS, WRITERS, Place, Querying, Work, Writer
from tests.support.expanding import expand as ask_to_grow
from tests.support.expanding import expansions, partition_count
from tests.support.kafka import running_kafka, unique_topic
from tests.support.members import Kind
from tests.support.proxy import ProxyProcess
from tests.support.raw import Closed

#: Name prefixes of topics with ordered expansion and partition-count checks. One expands by multiples (there, producers
#: without a partition count are known to place keys by murmur2), the other to any count.
ORDERED = "ordered"
ANY = "any"
SEQUENCED = "plain"
PROXY_CONFIG = f"""
config_lease_seconds = 3.0

[limits]
takeover_seconds = 5.0

[topics."{ORDERED}-*"]
"fencepost.ordered.partition.expansion" = "true"
"fencepost.check.partition.count" = "true"
"fencepost.partitioner" = "murmur2"

[topics."{ANY}-*"]
"fencepost.ordered.partition.expansion" = "any"
"fencepost.check.partition.count" = "true"
"""
_POLL_SECONDS = 0.05
_EXPAND_SECONDS = 120.0
#: How long a killed process is down.
_AWAY_SECONDS = 4.0
#: Duration of a record of a prior partition while a group lags.
_LAG_SECONDS = 0.1


def partition_by_murmur2(key: str, count: int) -> int:
    """The default of Java, kafka-python and aiokafka."""
    partition = partition_for(Partitioner.MURMUR2, key.encode(), count)
    assert partition is not None
    return partition


def partition_by_jump_hash(key: str, count: int) -> int:
    return jump_hash(key.encode(), count)


@dataclass(frozen=True, slots=True)
class Step:
    """An expansion to `to_count`. While its partitions are gated: `kill` or `leave` (the first member of each group),
    `join` (one more). `kill` – what is killed during the expansion: see `Stage.expand`."""

    to_count: int
    events: tuple[str, ...] = ()
    kill: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """`lag_seconds` – how long groups are slow before and after each expansion. `patience_seconds` – limit for all
    awaited events. `keys` – of each writer. `commit_seconds` – of the groups' members in turn. `place` – the partition
    of a key. `by_multiples` – whether a hash modulo the count moves keys to new partitions only, in all steps."""

    initial: int
    steps: tuple[Step, ...]
    keys: int = 24
    rounds_per_second: float = 12.0
    lag_seconds: float = 2.0
    patience_seconds: float = 120.0
    commit_seconds: tuple[float, ...] = (0.5, 2.0)
    place: Place = partition_by_murmur2
    writers: tuple[str, ...] = ("declared",)

    @property
    def by_multiples(self) -> bool:
        counts = (self.initial, *(step.to_count for step in self.steps))
        return all(larger % count == 0 for count, larger in pairwise(counts))


#: By multiples only. With a hash modulo the count, keys then move to new partitions only, which is the order that
#: KIP-253 keeps. From 2 to 3 partitions, keys also move between the old ones.
SHORT = Plan(
    2,
    (Step(4, ("kill", "join")),),
    keys=8,
    rounds_per_second=8.0,
    writers=("declared", "silent", "transactional", "library confluent-kafka"),
)
LONG = Plan(
    1,
    (Step(2), Step(4, ("join",)), Step(8, ("kill",)), Step(16, ("leave", "join"))),
    keys=40,
    lag_seconds=4.0,
    commit_seconds=(0.5, 4.0),
)
OFF = Plan(1, (Step(2),), keys=12)
#: More kinds of kills, and all kinds of writers: for two proxies, and preferably several brokers.
KILLS = Plan(
    1,
    (
        Step(2, kill="driver at create"),
        Step(4, ("join",), kill="broker at barriers"),
        Step(8, ("kill",), kill="proxy at barriers"),
        Step(16, ("leave", "join"), kill="driver at ends"),
    ),
    keys=10,
    rounds_per_second=6.0,
    lag_seconds=4.0,
    patience_seconds=240.0,
    commit_seconds=(0.5, 4.0),
    writers=tuple(WRITERS),
)
#: Any count, with a placement that moves keys to new partitions only.
JUMPING = Plan(1, (Step(2), Step(3, ("join",)), Step(8, ("kill",))), keys=40, place=partition_by_jump_hash)
#: For information: keys that move between old partitions are *not* kept in order.
BETWEEN_OLD = Plan(2, (Step(3),), keys=24)


@dataclass(slots=True)
class Result:
    decisions: dict[Kind, Decision]
    #: Kind of writer → its records in all groups together, and how many were refused and resent.
    writers: dict[str, Decision]
    refused: dict[str, int]
    expanded: list[Expanded] = field(default_factory=list)
    #: Events that were late, though they may have happened afterwards: partitions that were gated too long.
    late: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return self.complete and all(decision.holds for decision in self.decisions.values())

    @property
    def complete(self) -> bool:
        """Whether each group read all records, in any order."""
        return not self.late and not any(decision.missing for decision in self.decisions.values())


class Stage(kit.Stage):
    """`proxies` – with two, members and writers use them in turn."""

    def __init__(self, kafka: KafkaCluster, directory: Path) -> None:
        super().__init__(kafka, directory)
        self.replicas = min(3, len(kafka.node_ids))
        self._histories = 0
        self._coming_back: list[threading.Thread] = []

    @property
    def bootstraps(self) -> list[str]:
        return [proxy.bootstrap for proxy in self.proxies]

    def create_partitions(self, topic: str, partitions: int) -> None:
        with closing(KafkaAdminClient(bootstrap_servers=self.bootstraps[0])) as admin:
            admin.create_topics([NewTopic(topic, partitions, self.replicas)])
        for bootstrap in self.bootstraps:
            until(lambda b=bootstrap: self.count(topic, b) == partitions, f"{topic} to appear", seconds=_EXPAND_SECONDS)

    def count(self, topic: str, bootstrap: str) -> int:
        with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
            (described,) = admin.describe_topics([topic])
            return len(described["partitions"])

    def expand(self, topic: str, to_count: int, kill: str, say: Callable[[str], None]) -> Expanded:
        """Returns when the topic is expanded. The proxies are used in turn. `kill` – `WHAT at STEP`, or empty: what
        gets SIGKILL as soon as the log shows that step. WHAT: `driver` (the proxy that got the request), `proxy` (the
        other one), `broker` (that of partition 0)."""
        driver = self.proxies[self._histories % len(self.proxies)]
        self._histories += 1
        from_count, began = self.count(topic, driver.bootstrap), time.monotonic_ns()
        queried = threading.Thread(target=self._request, args=(driver.bootstrap, topic, to_count), daemon=True)
        log_bytes = len(driver.log)
        queried.start()
        if kill:
            what, _, step = kill.partition(" at ")
            at = self._kill(what, step, driver, topic, log_bytes)
            say(f"  {topic}: {what} killed at step {at}")
        queried.join(_EXPAND_SECONDS)
        self._await_expanded(topic, to_count)
        return Expanded(from_count, to_count, began, time.monotonic_ns())

    def _request(self, bootstrap: str, topic: str, to_count: int) -> None:
        """Send the request with an admin client; the response may get lost."""
        with (
            contextlib.suppress(KafkaError),
            closing(
                KafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=int(_EXPAND_SECONDS * 1000))
            ) as admin,
        ):
            admin.create_partitions({topic: NewPartitions(to_count)}, timeout_ms=int(_EXPAND_SECONDS * 1000) - 5000)

    def _kill(self, what: str, step: str, driver: ProxyProcess, topic: str, log_bytes: int) -> str:
        """Return the step of the kill: on a busy machine a short step may be over."""

        def steps() -> list[str]:
            return re.findall(rf"expansion step topic={topic} step=(\w+)", driver.log[log_bytes:])

        until(lambda: step in steps(), f"{topic} to reach {step}", seconds=_EXPAND_SECONDS, pause_seconds=0.001)
        if what == "broker":
            node_id = self.leader(topic)
            self.kafka.kill(node_id)
            self._come_back(lambda: self.kafka.restart(node_id, wait=False))
        else:
            proxy = driver if what == "driver" else next(each for each in self.proxies if each is not driver)
            proxy.kill()
            self._come_back(proxy.restart)
        return steps()[-1]

    def _come_back(self, restart: Callable[[], None]) -> None:
        def later() -> None:
            time.sleep(_AWAY_SECONDS)
            restart()

        thread = threading.Thread(target=later, daemon=True)
        thread.start()
        self._coming_back.append(thread)

    def _await_expanded(self, topic: str, to_count: int) -> None:
        """Repeat the request at a live proxy if the first proxy died before it persisted the expansion."""
        deadline = time.monotonic() + _EXPAND_SECONDS
        stated: object = None
        while True:
            proxy = next(each for each in self.proxies if each.running) if any(self._running) else self.proxies[0]
            try:
                if topic.startswith(SEQUENCED):
                    if partition_count(proxy.bootstrap, topic) == to_count:
                        return
                elif any(each.to_count == to_count for each in expansions(proxy.bootstrap, topic)):
                    return
                stated = ask_to_grow(proxy.bootstrap, topic, to_count, timeout_ms=10_000)
            except (OSError, Closed) as error:
                stated = error
            assert time.monotonic() < deadline, f"{topic} was not expanded to {to_count}: {stated}"
            time.sleep(_POLL_SECONDS)

    @property
    def _running(self) -> list[bool]:
        return [each.running for each in self.proxies]

    def resolve(self) -> None:
        """Wait until every killed process runs again."""
        while self._coming_back:
            self._coming_back.pop().join(_EXPAND_SECONDS)
        self.kafka.await_ready()

    def blocked_seconds(self, topic: str) -> list[float]:
        """Duration of the blocked appends in each expansion, from the logs."""
        found = re.compile(rf"expansion ended topic={topic} result=done .*?blocked_seconds=([\d.]+)")
        return [float(each) for proxy in self.proxies for each in found.findall(proxy.log)]


@contextmanager
def stage(directory: Path, brokers: int = 1, proxies: int = 1) -> Iterator[Stage]:
    with running_kafka(brokers, properties=BROKER_PROPERTIES) as kafka, Stage(kafka, directory) as ready:
        ready.start_proxies({f"proxy-{number}": {"config": PROXY_CONFIG} for number in range(proxies)})
        yield ready
        ready.resolve()  # otherwise one would restart after the end


def run(
    stage: Stage, kinds: Sequence[Kind], plan: Plan, *, ordered: bool, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Raises AssertionError if an event did not happen at all. The result lists records that were read out of order."""
    topic = unique_topic((ORDERED if plan.by_multiples else ANY) if ordered else SEQUENCED)
    stage.create_partitions(topic, plan.initial)
    # Half of the groups use `latest`: without the proxy's start offset they would skip records of a new partition.
    groups = [
        Group(kind, stage.bootstraps, topic, stage.directory, "latest" if ordered and i % 2 else "earliest")
        for i, kind in enumerate(kinds)
    ]
    writers: list[Writer] = []
    try:
        for group in groups:
            for commit_seconds in plan.commit_seconds:
                group.join(commit_seconds)
        _until_each(groups, partial(Group.holds_partitions, count=plan.initial), plan, "was assigned its partitions")
        warm_up(stage.bootstraps[0], topic, groups, plan)
        for number, make in enumerate([WRITERS[name] for name in plan.writers] if ordered else [Querying]):
            bootstrap = stage.bootstraps[number % len(stage.bootstraps)]
            work = Work(bootstrap, topic, plan.place, plan.initial, plan.keys, plan.rounds_per_second)
            writers.append(make(work))
            writers[-1].start()
        keys = [key for writer in writers for key in writer.written]
        expansions: list[Expanded] = []
        late: list[str] = []
        for step in plan.steps:
            new = range(expansions[-1].to_count if expansions else plan.initial, step.to_count)
            used = {p for p in (plan.place(key, step.to_count) for key in keys) if p in new}
            assert used, f"no key moves to {new}"
            _lag(groups, writers, plan, new.start)
            expansions.append(stage.expand(topic, step.to_count, step.kill, say))
            seconds = (expansions[-1].ended_nanos - expansions[-1].began_nanos) / NANOS
            written = sum(sum(writer.written.values()) for writer in writers)
            say(f"  {topic}: {new.start} -> {new.stop} partitions in {seconds:.2f} s, {written} records written")
            for event in step.events:
                _disturb(groups, event, plan)
            if ordered:
                time.sleep(plan.lag_seconds)  # no record of the new partitions may be read meanwhile
            else:
                _until_each(groups, partial(Group.has_observed_any, partitions=new), plan, f"saw any of {new}")
            _pace(groups, 0, 0)
            try:
                _until_each(groups, partial(Group.has_observed, partitions=used), plan, f"saw all of {new}", writers)
            except NeverHappened as error:
                if not ordered:
                    raise
                # Continue: the partition may come later, and the result shows what is missing.
                say(f"  {error}")
                late.append(str(error))
            say(f"  all of {new} observed {(time.monotonic_ns() - expansions[-1].ended_nanos) / NANOS:.1f} s later")
            stage.resolve()
        for writer in writers:
            writer.end()
        everything = {key: count for writer in writers for key, count in writer.written.items()}
        with contextlib.suppress(AssertionError):  # the result shows what is missing
            until(lambda: all(group.has_all(everything) for group in groups), "all", seconds=plan.patience_seconds)
        blocked = ", ".join(f"{each:.2f}" for each in stage.blocked_seconds(topic))
        say(f"  {topic}: appends were blocked for {blocked} s" if ordered else f"  {topic}: done")
        return Result(
            {group.kind: validate(group.observed, everything, expansions, group.assigned) for group in groups},
            {
                writer.name: _of_all(
                    [validate(_of(group, writer), writer.written, expansions, group.assigned) for group in groups]
                )
                for writer in writers
            },
            {writer.name: writer.refused for writer in writers},
            expansions,
            late,
        )
    finally:
        for group in groups:
            group.end()
        for writer in writers:
            with contextlib.suppress(AssertionError):  # an error before this one is reported
                writer.end()


def _of(group: Group, writer: Writer) -> list[Observed]:
    return [each for each in group.observed if each.key in writer.written]


def _of_all(decisions: Sequence[Decision]) -> Decision:
    return Decision(
        keys=decisions[0].keys,
        records=sum(each.records for each in decisions),
        early=[record for each in decisions for record in each.early],
        late=[record for each in decisions for record in each.late],
        expelled=[record for each in decisions for record in each.expelled],
        again=sum(each.again for each in decisions),
        missing=sum(each.missing for each in decisions),
    )


def warm_up(bootstrap: str, topic: str, groups: Sequence[Group], plan: Plan) -> None:
    """Wait until each group reads each partition and has committed an offset of it.

    A group with `latest` determines its start after the assignment. Without a commit, records are lost so:

    1. The first member reads both partitions.
    2. The second member joins and gets one of them.
    3. It starts at the log end, and no member reads what was written meanwhile.
    """
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    partitions = range(plan.initial)
    deadline = time.monotonic() + plan.patience_seconds
    with closing(KafkaAdminClient(bootstrap_servers=bootstrap)) as admin:
        while not all(group.has_observed(partitions) for group in groups) or not all(
            committed(admin, group, partitions) for group in groups
        ):
            if time.monotonic() >= deadline:
                raise NeverHappened("not all groups read from the beginning, and commit")
            for partition in partitions:
                headers: list[tuple[str, str | bytes | None]] = [("fencepost-partition-count", b"%d" % plan.initial)]
                producer.produce(topic, b"0", WARM_UP, partition, headers=headers)
            producer.flush(PATIENCE_SECONDS)
            time.sleep(4 * _POLL_SECONDS)


def committed(admin: KafkaAdminClient, group: Group, partitions: Iterable[int]) -> bool:
    """Whether the group has committed an offset of each partition."""
    requested = [TopicPartition(group.topic, partition) for partition in partitions]
    offsets = admin.list_group_offsets({group.id: requested})[group.id]
    return all(each in offsets and offsets[each].offset >= 0 for each in requested)


def _lag(groups: Sequence[Group], writers: Sequence[Writer], plan: Plan, partitions: int) -> None:
    """Slow the groups down, and wait until the writers are ahead of them."""
    _pace(groups, _LAG_SECONDS, partitions)
    for writer in writers:
        rounds = int(plan.lag_seconds * plan.rounds_per_second)
        # They start together, but may differ in speed.
        target = writer.rounds + (rounds if writer is writers[0] else 1)
        what = f"{writer.name} to continue"
        until(lambda w=writer, t=target: w.rounds >= t or w.error is not None, what, seconds=PATIENCE_SECONDS)


def _pace(groups: Sequence[Group], seconds: float, below: int) -> None:
    for group in groups:
        for member in group.running:
            member.pace(seconds, below)


def _disturb(groups: Sequence[Group], event: str, plan: Plan) -> None:
    for group in groups:
        if event == "kill":
            group.running[0].kill()
        elif event == "leave":
            group.running[0].end_input()
        else:
            group.join(plan.commit_seconds[0])


def _until_each(
    groups: Sequence[Group],
    condition: Callable[[Group], bool],
    plan: Plan,
    what: str,
    writers: Sequence[Writer] = (),
) -> None:
    deadline = time.monotonic() + plan.patience_seconds
    left = list(groups)
    while left:
        left = [group for group in left if not condition(group)]
        for writer in writers:
            writer.raise_error()
        if left and time.monotonic() >= deadline:
            stuck = "; ".join(f"{group.id} has read {group.standing()}" for group in left)
            raise NeverHappened(f"never {what} within {plan.patience_seconds:g} s: {stuck} (logs: {left[0].directory})")
        time.sleep(_POLL_SECONDS)


# --- the table --------------------------------------------------------------------------------------------------------


def table(on: dict[Kind, Decision], off: dict[Kind, Decision]) -> list[str]:
    """`on` and `off` – the decisions with the feature on and off; either may lack a kind."""
    head = ("client", "protocol", "keys", "records", "redelivered", "missing", "out of order: on", "off", "longest")
    rows = [head]
    for kind in dict.fromkeys((*on, *off)):
        one, other = on.get(kind), off.get(kind)
        shown = one or other
        assert shown is not None
        rows.append(
            (
                kind.client,
                kind.protocol,
                str(shown.keys),
                str(shown.records),
                f"{shown.again} ({len(shown.expelled)} to expelled members)" if shown.expelled else str(shown.again),
                str(shown.missing),
                "–" if one is None else str(one.out_of_order),
                "–" if other is None else str(other.out_of_order),
                "–" if one is None else f"{one.longest_hold_seconds:.1f} s",
            )
        )
    return _aligned(rows)


def writers_table(results: Sequence[Result]) -> list[str]:
    """By kind of writer: records, refusals for the partition count, and what all groups read."""
    rows = [("writer", "keys", "records", "refused", "missing", "out of order")]
    names = dict.fromkeys(name for result in results for name in result.writers)
    for name in names:
        decision = _of_all([result.writers[name] for result in results if name in result.writers])
        refused = sum(result.refused.get(name, 0) for result in results)
        reported = "automatic" if name.startswith("library") else str(refused)
        numbers = (decision.keys, decision.records, reported, decision.missing, decision.out_of_order)
        rows.append((name, *map(str, numbers)))  # type: ignore[arg-type]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines
