"""A key-value store whose log is a Kafka partition, with two leaders that compete for it (KIP-27's worked example).

Both leaders accept operations whose result depends on the state: `add N to KEY`, logged as "KEY goes from OLD to NEW".
Each leader

1. reads the partition to its end and applies every operation to its own state;
2. turns a batch of requests into operations on that state, and appends them at the offset that it has read up to;
3. on success, applies them;
4. on OffsetMismatch, discards the batch, goes back to 1, and decides the same requests again.

At the end both leaders read to the end, and a third reader replays the log from the start. The program verifies that
all three hold the same state, that every request is in the log once, and that no operation started from a stale value.

With `--unchecked` the leaders append without an expected offset, and the verification fails.

    .venv/bin/fencepost dev                         # in one terminal: Kafka and the proxy
    .venv/bin/python examples/kv_store.py           # in another
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, NewTopic
from kafka.errors import TopicAlreadyExistsError

from fencepost import InDoubt, LogRecord, OffsetMismatch, Record, RetryPolicy
from fencepost.kafka_python import LogWriter

PARTITION = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client of the store."""

    id: str
    key: str
    add: int


@dataclass(slots=True)
class State:
    """The state that results from the log. `conflicts`: operations that were decided on a stale value."""

    values: dict[str, int] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    conflicts: int = 0

    def apply(self, record: LogRecord) -> None:
        assert record.value is not None
        self.apply_operation(json.loads(record.value))

    def apply_operation(self, operation: dict[str, object]) -> None:
        key, old, new = str(operation["key"]), int(str(operation["old"])), int(str(operation["new"]))
        if self.values.get(key, 0) != old:
            self.conflicts += 1
        self.values[key] = new
        self.seen[str(operation["id"])] += 1


def decide(requests: Sequence[Request], state: State) -> list[dict[str, object]]:
    """Operations for `requests`, each on the state after the one before it."""
    values: dict[str, int] = {}
    operations: list[dict[str, object]] = []
    for request in requests:
        old = values.get(request.key, state.values.get(request.key, 0))
        values[request.key] = old + request.add
        operations.append({"id": request.id, "key": request.key, "old": old, "new": old + request.add})
    return operations


class UncheckedLogWriter(LogWriter):
    """Appends without expected offsets: correct only if there is no other writer."""

    def __init__(self, topic: str, partition: int, *, retry: RetryPolicy, bootstrap_servers: str) -> None:
        super().__init__(topic, partition, retry=retry, bootstrap_servers=bootstrap_servers)
        self._plain = KafkaProducer(bootstrap_servers=bootstrap_servers)

    def append(self, records: Sequence[Record]) -> int:
        futures = [self._plain.send(self.topic, r.value, r.key, partition=self.partition) for r in records]
        offsets = [int(future.get(30).offset) for future in futures]
        return offsets[0]

    def close(self) -> None:
        self._plain.close()
        super().close()


@dataclass(slots=True)
class Leader:
    """One leader of the shard, with the requests of its clients and its own copy of the state."""

    name: str
    log: LogWriter
    requests: list[Request]
    batch: int
    pause_seconds: float
    state: State = field(default_factory=State)
    appended: int = 0
    fenced: int = 0
    doubts: int = 0
    error: BaseException | None = None

    def run(self) -> None:
        """Serves all requests. Stores an exception in `error`, since a thread's exception would be lost."""
        try:
            self._serve()
        except BaseException as error:
            self.error = error

    def _serve(self) -> None:
        waiting = list(self.requests)
        self.log.read_to_end(self.state.apply)
        while waiting:
            time.sleep(random.uniform(0, self.pause_seconds))
            chosen = waiting[: random.randint(1, self.batch)]
            operations = decide(chosen, self.state)
            try:
                self.log.append([Record(json.dumps(o).encode(), str(o["key"]).encode()) for o in operations])
            except OffsetMismatch:
                self.fenced += 1
                self.log.read_to_end(self.state.apply)
            except InDoubt:
                # What of it is in the log will be read now, like everybody else's operations.
                self.doubts += 1
                self.log.read_to_end(self.state.apply)
                waiting = [request for request in waiting if request.id not in self.state.seen]
            else:
                self.appended += 1
                for operation in operations:
                    self.state.apply_operation(operation)
                waiting = waiting[len(chosen) :]


def make_topic(bootstrap: str, topic: str, *, checked: bool) -> None:
    """Creates the topic and switches its check on, as any admin client or `kafka-configs` can."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        try:
            admin.create_topics([NewTopic(topic, 1, -1)])
        except TopicAlreadyExistsError:
            raise SystemExit(f"topic {topic!r} exists already: name another one with --topic") from None
        if checked:
            change = {"check.expected.offsets": (AlterConfigOp.SET, "required")}
            try:
                admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, change)])
            except ValueError as error:  # kafka-python asks the cluster which configs there are
                raise SystemExit(f"{bootstrap} is not a Fencepost proxy ({error}); see --help") from None
    finally:
        admin.close()


def replay(bootstrap: str, topic: str, retry: RetryPolicy) -> tuple[State, int]:
    """The state of a reader that replays the whole log, and the log end offset."""
    state = State()
    with LogWriter(topic, PARTITION, retry=retry, bootstrap_servers=bootstrap) as log:
        return state, log.read_to_end(state.apply)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all states are equal and no request is lost, duplicated or decided on stale state; else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bootstrap", default="127.0.0.1:19092", help="the proxy (default: %(default)s)")
    parser.add_argument("--topic", default=f"kv-store-{int(time.time())}", help="a new topic (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="for each leader (default: %(default)s)")
    parser.add_argument("--keys", type=int, default=5, help="fewer keys, more conflicts (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=10, help="operations in an append, at most (default: %(default)s)")
    parser.add_argument("--pause-ms", type=int, default=10, help="pause between appends (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="seed of the requests; printed if not given")
    parser.add_argument("--unchecked", action="store_true", help="append without expected offsets")
    options = parser.parse_args(arguments)

    seed = options.seed if options.seed is not None else random.randrange(1 << 32)
    rng = random.Random(seed)
    retry = RetryPolicy()
    make_topic(options.bootstrap, options.topic, checked=not options.unchecked)
    how = "without expected offsets" if options.unchecked else "each at the offset behind what it has read"
    print(f"Two leaders append {options.requests} requests each to {options.topic}-{PARTITION}, {how} (seed {seed}).")

    leaders = []
    for name in ("A", "B"):
        requests = [
            Request(str(uuid.UUID(int=rng.getrandbits(128))), f"key-{rng.randrange(options.keys)}", rng.randint(1, 9))
            for _ in range(options.requests)
        ]
        writer = UncheckedLogWriter if options.unchecked else LogWriter
        log = writer(options.topic, PARTITION, retry=retry, bootstrap_servers=options.bootstrap)
        leaders.append(Leader(name, log, requests, options.batch, options.pause_ms / 1000))
    started = time.monotonic()
    threads = [threading.Thread(target=leader.run, name=f"leader-{leader.name}") for leader in leaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - started
    try:
        for leader in leaders:
            if leader.error is not None:
                raise leader.error
            if not options.unchecked:
                leader.log.read_to_end(leader.state.apply)
    finally:
        for leader in leaders:
            leader.log.close()
    truth, end = replay(options.bootstrap, options.topic, retry)
    return report(leaders, truth, end, took)


def report(leaders: Sequence[Leader], truth: State, end: int, took: float) -> int:
    """Prints the result and returns the exit status."""
    for leader in leaders:
        print(
            f"leader {leader.name}: {leader.appended} appends succeeded, {leader.fenced} were refused because the "
            f"other leader had been first, {leader.doubts} stayed in doubt"
        )
    asked = [request for leader in leaders for request in leader.requests]
    lost = sum(request.id not in truth.seen for request in asked)
    doubled = sum(count > 1 for count in truth.seen.values())
    sums: Counter[str] = Counter()
    for request in asked:
        sums[request.key] += request.add
    print(f"log: {end} offsets, {truth.seen.total()} operations of {len(asked)} requests, in {took:.1f} s")
    print(f"  requests lost: {lost}   doubled: {doubled}   decided on a value that was not there: {truth.conflicts}")
    print(f"  {'key':8} {'asked for':>10} {'replayed':>10} " + " ".join(f"{'leader ' + x.name:>10}" for x in leaders))
    for key in sorted(sums):
        row = [sums[key], truth.values.get(key, 0), *(leader.state.values.get(key, 0) for leader in leaders)]
        print(
            f"  {key:8} " + " ".join(f"{value:>10}" for value in row) + ("" if len(set(row)) == 1 else "   <- differ")
        )
    equal = all(leader.state.values == truth.values for leader in leaders)
    right = equal and truth.values == dict(sums) and not (lost or doubled or truth.conflicts)
    print("EQUAL: both leaders and the replay hold what was asked for." if right else "DIVERGED: see above.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
