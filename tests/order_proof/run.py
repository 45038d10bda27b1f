"""One run: a topic grows while producers write per-key counters and groups of several kinds read them.

    writer      one record per key and round, placed over the count that it declares; a refused one is placed again
    groups      two members each, slow: behind the writer when the topic grows
    growth      kafka-python's admin client; meanwhile members join, leave, are killed, and commit slowly

In a run *without* the feature the topic is one that nobody orders, and the groups stand still on its prior partitions
while they read the new one: what a lagging consumer does, made certain.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import confluent_kafka
from kafka import KafkaAdminClient
from kafka.admin import NewPartitions, NewTopic

from fencepost import jump_hash
from fencepost_policies.partitioners import Partitioner, partition_for
from fencepost_proxy.dev.cluster import KafkaCluster
from tests.order_proof.members import BROKER_PROPERTIES, Group, Kind
from tests.order_proof.seen import NANOS, WARM_UP, Grown, Verdict, judge
from tests.support.kafka import running_kafka, unique_topic
from tests.support.proxy import ProxyProcess

#: Topics whose names begin so grow in order, and know their producers' counts: by multiples, or by any number.
ORDERED = "ordered"
ANY = "any"
PROXY_CONFIG = f"""
config_lease_seconds = 3.0

[topics."{ORDERED}-*"]
"ordered.partition.expansion" = "true"
"check.partition.count" = "true"

[topics."{ANY}-*"]
"ordered.partition.expansion" = "any"
"check.partition.count" = "true"
"""
_INVALID_PARTITIONS = 37
_POLL_SECONDS = 0.05
_ROUND_SECONDS = 60.0
_GROW_SECONDS = 90.0
#: A record of a prior partition takes so long while a group lags.
_LAG_SECONDS = 0.1


def place_by_murmur2(key: str, count: int) -> int:
    """As Java does, and kafka-python and aiokafka."""
    partition = partition_for(Partitioner.MURMUR2, key.encode(), count)
    assert partition is not None
    return partition


def place_by_jump_hash(key: str, count: int) -> int:
    return jump_hash(key.encode(), count)


@dataclass(frozen=True, slots=True)
class Step:
    """The topic grows to `to_count`; while what came with it is withheld: `kill` or `leave` (the first member of each
    group), `join` (one more)."""

    to_count: int
    events: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """`lag_seconds` – how long groups are slow before and after each growth. `patience_seconds` – for all that must
    happen in the end. `commit_seconds` – of the groups' members in turn. `place` – where keys go; `by_multiples` –
    whether all steps are such that a hash modulo the count moves keys to new partitions only."""

    initial: int
    steps: tuple[Step, ...]
    keys: int = 24
    rounds_per_second: float = 12.0
    lag_seconds: float = 2.0
    patience_seconds: float = 120.0
    commit_seconds: tuple[float, ...] = (0.5, 2.0)
    place: Callable[[str, int], int] = place_by_murmur2

    @property
    def by_multiples(self) -> bool:
        counts = (self.initial, *(step.to_count for step in self.steps))
        return all(larger % count == 0 for count, larger in pairwise(counts))


#: Only by multiples: placed by a hash modulo the count, keys then move to new partitions only, which is what KIP-253
#: keeps in order. From 2 to 3 they also move between the old ones.
SHORT = Plan(2, (Step(4, ("kill", "join")),), keys=12)
LONG = Plan(
    1,
    (Step(2), Step(4, ("join",)), Step(8, ("kill",)), Step(16, ("leave", "join"))),
    keys=40,
    lag_seconds=4.0,
    commit_seconds=(0.5, 4.0),
)
OFF = Plan(1, (Step(2),), keys=12)
#: Any growth, where keys are placed so that they move to new partitions only.
JUMPING = Plan(1, (Step(2), Step(3, ("join",)), Step(8, ("kill",))), keys=40, place=place_by_jump_hash)
#: What is *not* kept in order, for information: keys that move between partitions that were there before.
BETWEEN_OLD = Plan(2, (Step(3),), keys=24)


@dataclass(slots=True)
class Result:
    verdicts: dict[Kind, Verdict]
    written: int
    #: Records of the writer that were refused and placed again.
    refused: int
    growths: list[Grown] = field(default_factory=list)
    #: What did not happen in time, though it may have later: partitions that were withheld for too long.
    late: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.late and all(verdict.holds for verdict in self.verdicts.values())


class NeverHappened(AssertionError):
    """Something that a run waits for."""


class Writer:
    """One record per key and round; a round ends when all of it is acknowledged, so a key's records are in the order of
    their counters whatever was sent again."""

    def __init__(self, bootstrap: str, topic: str, plan: Plan, count: int, *, learns: bool) -> None:
        """`learns` – of a growth by refusals alone; else it asks how many partitions there are before every round."""
        self.written = {f"k{i}": 0 for i in range(plan.keys)}
        self.refused = 0
        self.error: BaseException | None = None
        self._topic = topic
        self._place = plan.place
        self._pause = 1 / plan.rounds_per_second
        self._count = count
        self._learns = learns
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 1}
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def rounds(self) -> int:
        return min(self.written.values())

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(2 * _ROUND_SECONDS)

    def end(self) -> None:
        self.stop()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._pause):
                if not self._learns:
                    self._ask()
                self._round()
        except BaseException as error:
            self.error = error

    def _round(self) -> None:
        deadline = time.monotonic() + _ROUND_SECONDS
        left = list(self.written)
        while left:
            failed: dict[str, confluent_kafka.KafkaError] = {}
            for key in left:
                self._send(key, failed)
            assert self._producer.flush(_ROUND_SECONDS) == 0, "the writer's records were not acknowledged"
            for key in left:
                if key not in failed:
                    self.written[key] += 1
            left = list(failed)
            if not left:
                return
            errors = {error.code() for error in failed.values()}
            assert time.monotonic() < deadline, f"the writer's records are refused for ever: {errors}"
            self.refused += len(left)
            if errors - {_INVALID_PARTITIONS}:
                time.sleep(_POLL_SECONDS)
            self._ask()

    def _send(self, key: str, failed: dict[str, Any]) -> None:
        def delivered(error: confluent_kafka.KafkaError | None, _: confluent_kafka.Message) -> None:
            if error is not None:
                failed[key] = error

        self._producer.produce(
            self._topic,
            b"%d" % (self.written[key] + 1),
            key,
            self._place(key, self._count),
            on_delivery=delivered,
            headers=[("partition-count", b"%d" % self._count)],
        )

    def _ask(self) -> None:
        deadline = time.monotonic() + _ROUND_SECONDS
        while True:
            try:
                self._count = len(self._producer.list_topics(self._topic, 10).topics[self._topic].partitions)
                return
            except confluent_kafka.KafkaException:
                # A refusal for its count closes a client's connection.
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_SECONDS)


@dataclass(slots=True)
class Stage:
    kafka: KafkaCluster
    proxy: ProxyProcess
    directory: Path

    def create(self, topic: str, partitions: int) -> None:
        admin = KafkaAdminClient(bootstrap_servers=self.proxy.bootstrap)
        try:
            admin.create_topics([NewTopic(topic, partitions, 1)])
        finally:
            admin.close()
        _until(lambda: self.count(topic) == partitions, 30, f"{topic} did not appear")

    def count(self, topic: str) -> int:
        admin = KafkaAdminClient(bootstrap_servers=self.proxy.bootstrap)
        try:
            (described,) = admin.describe_topics([topic])
            return len(described["partitions"])
        finally:
            admin.close()

    def grow(self, topic: str, to_count: int) -> Grown:
        admin = KafkaAdminClient(bootstrap_servers=self.proxy.bootstrap, request_timeout_ms=int(_GROW_SECONDS * 1000))
        try:
            from_count, began = self.count(topic), time.monotonic_ns()
            admin.create_partitions({topic: NewPartitions(to_count)}, timeout_ms=int(_GROW_SECONDS * 1000) - 5000)
            return Grown(from_count, to_count, began, time.monotonic_ns())
        finally:
            admin.close()


@contextmanager
def stage(directory: Path, brokers: int = 1) -> Iterator[Stage]:
    with (
        running_kafka(brokers, properties=BROKER_PROPERTIES) as kafka,
        ProxyProcess(kafka.bootstrap, directory, config=PROXY_CONFIG) as proxy,
    ):
        yield Stage(kafka, proxy, directory)


def run(
    stage: Stage, kinds: Sequence[Kind], plan: Plan, *, ordered: bool, say: Callable[[str], None] = lambda _: None
) -> Result:
    """Raises AssertionError where something did not happen at all; what was seen out of order is in the result."""
    topic = unique_topic((ORDERED if plan.by_multiples else ANY) if ordered else "plain")
    stage.create(topic, plan.initial)
    # Half of the groups would skip what a new partition already holds, were they not told where it begins.
    groups = [
        Group(kind, stage.proxy.bootstrap, topic, stage.directory, "latest" if ordered and i % 2 else "earliest")
        for i, kind in enumerate(kinds)
    ]
    writer = None
    try:
        for group in groups:
            for commit_seconds in plan.commit_seconds:
                group.join(commit_seconds)
        _until_each(groups, partial(Group.holds_partitions, count=plan.initial), plan, "was assigned its partitions")
        _warm_up(stage.proxy.bootstrap, topic, groups, plan)
        writer = Writer(stage.proxy.bootstrap, topic, plan, plan.initial, learns=ordered)
        growths: list[Grown] = []
        late: list[str] = []
        for step in plan.steps:
            new = range(growths[-1].to_count if growths else plan.initial, step.to_count)
            used = {p for p in (plan.place(key, step.to_count) for key in writer.written) if p in new}
            assert used, f"no key moves to {new}"
            _lag(groups, writer, plan, new.start)
            growths.append(stage.grow(topic, step.to_count))
            seconds = (growths[-1].ended_nanos - growths[-1].began_nanos) / NANOS
            records = sum(writer.written.values())
            say(f"  {topic}: {new.start} -> {new.stop} partitions in {seconds:.2f} s, {records} records written")
            for event in step.events:
                _disturb(groups, event, plan)
            if ordered:
                time.sleep(plan.lag_seconds)  # in which nothing of the new partitions may be seen
            else:
                _until_each(groups, partial(Group.has_seen_any, partitions=new), plan, f"saw any of {new}")
            _pace(groups, 0, 0)
            try:
                _until_each(groups, partial(Group.has_seen, partitions=used), plan, f"saw all of {new}", writer)
            except NeverHappened as error:
                if not ordered:
                    raise
                # Go on: does it come later, is anything missing?
                say(f"  {error}")
                late.append(str(error))
            say(f"  all of {new} seen {(time.monotonic_ns() - growths[-1].ended_nanos) / NANOS:.1f} s later")
        writer.end()
        everything = dict(writer.written)
        _until(lambda: all(group.has_all(everything) for group in groups), plan.patience_seconds, None)
        return Result(
            {group.kind: judge(group.seen, writer.written, growths) for group in groups},
            sum(writer.written.values()),
            writer.refused,
            growths,
            late,
        )
    finally:
        for group in groups:
            group.end()
        if writer is not None:
            writer.stop()


def _warm_up(bootstrap: str, topic: str, groups: Sequence[Group], plan: Plan) -> None:
    """Until each group reads each partition: one that begins at the latest offset finds that after it is assigned."""
    producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap})
    deadline = time.monotonic() + plan.patience_seconds
    while not all(group.has_seen(range(plan.initial)) for group in groups):
        if time.monotonic() >= deadline:
            raise NeverHappened("not all groups read from the beginning")
        for partition in range(plan.initial):
            headers: list[tuple[str, str | bytes | None]] = [("partition-count", b"%d" % plan.initial)]
            producer.produce(topic, b"0", WARM_UP, partition, headers=headers)
        producer.flush(_ROUND_SECONDS)
        time.sleep(4 * _POLL_SECONDS)


def _lag(groups: Sequence[Group], writer: Writer, plan: Plan, partitions: int) -> None:
    """Makes groups slow, and waits until the writer is well ahead of them."""
    _pace(groups, _LAG_SECONDS, partitions)
    target = writer.rounds + int(plan.lag_seconds * plan.rounds_per_second)
    _until(lambda: writer.rounds >= target or writer.error is not None, _ROUND_SECONDS, "the writer stands still")


def _pace(groups: Sequence[Group], seconds: float, below: int) -> None:
    for group in groups:
        for member in group.running:
            member.pace(seconds, below)


def _disturb(groups: Sequence[Group], event: str, plan: Plan) -> None:
    for group in groups:
        if event == "kill":
            group.running[0].kill()
        elif event == "leave":
            group.running[0].stop_reading_orders()
        else:
            group.join(plan.commit_seconds[0])


def _until_each(
    groups: Sequence[Group], condition: Callable[[Group], bool], plan: Plan, what: str, writer: Writer | None = None
) -> None:
    deadline = time.monotonic() + plan.patience_seconds
    left = list(groups)
    while left:
        left = [group for group in left if not condition(group)]
        if writer is not None and writer.error is not None:
            raise writer.error
        if left and time.monotonic() >= deadline:
            stuck = "; ".join(f"{group.id} has seen {group.standing()}" for group in left)
            raise NeverHappened(f"never {what} within {plan.patience_seconds:g} s: {stuck} (logs: {left[0].directory})")
        time.sleep(_POLL_SECONDS)


def _until(condition: Callable[[], bool], seconds: float, otherwise: str | None) -> bool:
    """`otherwise` – what to fail with; None where the caller goes on."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            if otherwise is not None:
                raise NeverHappened(f"{otherwise} within {seconds:g} s")
            return False
        time.sleep(_POLL_SECONDS)
    return True


# --- the table --------------------------------------------------------------------------------------------------------


def table(on: dict[Kind, Verdict], off: dict[Kind, Verdict]) -> list[str]:
    """`on` and `off` – the verdicts with the feature on and off; either may lack a kind."""
    head = ("client", "protocol", "keys", "records", "seen again", "missing", "out of order: on", "off", "longest hold")
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
                str(shown.again),
                str(shown.missing),
                "–" if one is None else str(one.out_of_order),
                "–" if other is None else str(other.out_of_order),
                "–" if one is None else f"{one.longest_hold_seconds:.1f} s",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return lines
