"""KIP-27's worked example: a key-value store whose log is a Kafka partition, with two competing leaders.

Normally a shard has one leader. Here two leaders are active at once. Both accept operations whose result depends on the
state: `add N to KEY`, logged as "KEY goes from OLD to NEW". Each leader

1. reads the partition to its end and applies every operation to its own state;
2. converts a batch of requests into operations on that state, and appends them at the next offset;
3. on success, applies them and responds to its clients;
4. on OffsetMismatchError (the other leader was first), drops the batch and restarts at 1 with the same requests.

Finally both leaders read to the end, and a third reader replays the log from the start. All three must have the same
state, every request must be in the log exactly once, and no operation may start from a stale value.

`--unchecked` appends without expected offsets, and shows the resulting errors.

    .venv/bin/fencepost dev                         # in one terminal: Kafka and the proxy
    .venv/bin/python examples/kv_store.py           # in another
"""

from __future__ import annotations

import argparse
import json
import os
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

from fencepost import InDoubtError, LogRecord, OffsetMismatchError, Record, RetryPolicy
from fencepost.kafka_python import LogWriter

BOOTSTRAP_SERVER = os.environ.get("FENCEPOST_BOOTSTRAP_SERVER", "127.0.0.1:19092")
PARTITION = 0


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client: add `add` to `key`."""

    id: str
    key: str
    add: int


@dataclass(slots=True)
class State:
    """The state that the log yields. `conflicts`: number of operations decided on a stale value."""

    values: dict[str, int] = field(default_factory=dict)
    observed: Counter[str] = field(default_factory=Counter)
    conflicts: int = 0

    def apply(self, record: LogRecord) -> None:
        assert record.value is not None
        self.apply_operation(json.loads(record.value))

    def apply_operation(self, operation: dict[str, object]) -> None:
        key, old, new = str(operation["key"]), int(str(operation["old"])), int(str(operation["new"]))
        if self.values.get(key, 0) != old:
            self.conflicts += 1
        self.values[key] = new
        self.observed[str(operation["id"])] += 1


def decide(requests: Sequence[Request], state: State) -> list[dict[str, object]]:
    """Operations for `requests`, each applied to the result of the previous ones."""
    values: dict[str, int] = {}
    operations: list[dict[str, object]] = []
    for request in requests:
        old = values.get(request.key, state.values.get(request.key, 0))
        values[request.key] = old + request.add
        operations.append({"id": request.id, "key": request.key, "old": old, "new": old + request.add})
    return operations


class UncheckedLogWriter(LogWriter):
    """The same writer without conditional publish: correct only with a single leader."""

    def __init__(self, topic: str, partition: int, *, retry: RetryPolicy, bootstrap_servers: str) -> None:
        super().__init__(topic, partition, retry=retry, bootstrap_servers=bootstrap_servers)
        self._unchecked_producer = KafkaProducer(bootstrap_servers=bootstrap_servers)

    def append(self, records: Sequence[Record]) -> int:
        futures = [self._unchecked_producer.send(self.topic, r.value, r.key, partition=self.partition) for r in records]
        offsets = [int(future.get(30).offset) for future in futures]
        return offsets[0]

    def close(self) -> None:
        self._unchecked_producer.close()
        super().close()


@dataclass(slots=True)
class Leader:
    """One leader of the shard, with its clients' requests and its own copy of the state."""

    name: str
    log: LogWriter
    requests: list[Request]
    batch: int
    pause_seconds: float
    state: State = field(default_factory=State)
    appended: int = 0
    fenced: int = 0
    in_doubt: int = 0
    error: BaseException | None = None

    def run(self) -> None:
        """Serve all requests. Stores an exception in `error`, because a thread's exception would be lost."""
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
            except OffsetMismatchError:
                self.fenced += 1
                self.log.read_to_end(self.state.apply)
            except InDoubtError:
                # Reading shows which of these operations are in the log.
                self.in_doubt += 1
                self.log.read_to_end(self.state.apply)
                waiting = [request for request in waiting if request.id not in self.state.observed]
            else:
                self.appended += 1
                for operation in operations:
                    self.state.apply_operation(operation)
                waiting = waiting[len(chosen) :]


def make_topic(bootstrap: str, topic: str, *, checked: bool) -> None:
    """Create the topic and switch its check on. Any admin client can do this, including `kafka-configs`."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        try:
            admin.create_topics([NewTopic(topic, 1, -1)])
        except TopicAlreadyExistsError:
            raise SystemExit(f"topic {topic!r} already exists (choose another with --topic)") from None
        if checked:
            change = {"fencepost.check.expected.offsets": (AlterConfigOp.SET, "required")}
            try:
                admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, change)])
            except ValueError as error:  # kafka-python checks the config name with the cluster
                raise SystemExit(f"{bootstrap} is not a Fencepost proxy ({error}); see --help") from None
    finally:
        admin.close()


def replay(bootstrap: str, topic: str, retry: RetryPolicy) -> tuple[State, int]:
    """(state, log end offset) of a reader that starts at the beginning of the log."""
    state = State()
    with LogWriter(topic, PARTITION, retry=retry, bootstrap_servers=bootstrap) as log:
        return state, log.read_to_end(state.apply)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 if all states are equal and no request is lost, duplicated or decided on stale state; else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bootstrap-server", dest="bootstrap", default=BOOTSTRAP_SERVER, help="the proxy (default: %(default)s)"
    )
    parser.add_argument("--topic", default=f"kv-store-{int(time.time())}", help="a new topic (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=300, help="requests per leader (default: %(default)s)")
    parser.add_argument(
        "--keys", type=int, default=5, help="number of keys; fewer cause more conflicts (default: %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=10, help="maximum operations per append (default: %(default)s)")
    parser.add_argument("--pause-ms", type=int, default=10, help="maximum pause between appends (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="random seed (default: random, printed)")
    parser.add_argument("--unchecked", action="store_true", help="append without expected offsets")
    options = parser.parse_args(arguments)

    seed = options.seed if options.seed is not None else random.randrange(1 << 32)
    rng = random.Random(seed)
    retry = RetryPolicy()
    make_topic(options.bootstrap, options.topic, checked=not options.unchecked)
    how = "without expected offsets" if options.unchecked else "each at the offset after the last record that it read"
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
    """Print the result and whether it is correct. Returns the exit status."""
    for leader in leaders:
        print(
            f"leader {leader.name}: {leader.appended} appends succeeded, {leader.fenced} were refused because the "
            f"other leader was first, {leader.in_doubt} stayed in doubt"
        )
    requests = [request for leader in leaders for request in leader.requests]
    lost = sum(request.id not in truth.observed for request in requests)
    doubled = sum(count > 1 for count in truth.observed.values())
    sums: Counter[str] = Counter()
    for request in requests:
        sums[request.key] += request.add
    print(f"log: {end} offsets, {truth.observed.total()} operations of {len(requests)} requests, in {took:.1f} s")
    print(f"  requests lost: {lost}   doubled: {doubled}   decided on a stale value: {truth.conflicts}")
    print(f"  {'key':8} {'requested':>10} {'replayed':>10} " + " ".join(f"{'leader ' + x.name:>10}" for x in leaders))
    for key in sorted(sums):
        row = [sums[key], truth.values.get(key, 0), *(leader.state.values.get(key, 0) for leader in leaders)]
        print(
            f"  {key:8} " + " ".join(f"{value:>10}" for value in row) + ("" if len(set(row)) == 1 else "   <- differ")
        )
    equal = all(leader.state.values == truth.values for leader in leaders)
    right = equal and truth.values == dict(sums) and not (lost or doubled or truth.conflicts)
    print("EQUAL: both leaders and the replay have the requested values." if right else "DIVERGED: see above.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
