"""Transactional producers that state expected offsets on several partitions.

They send raw requests of transactions v1 or v2. They repeat appends with unknown outcome, with the same sequence and
through any process, but not refused ones; then they commit or abort. Some commit despite a refusal: the proxy must
refuse that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fencepost_policies.append import Check
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import ADD_PARTITIONS_TO_TXN, END_TXN
from fencepost_proxy.wire.control import decode_response, encode_request_frame, parse_response_header
from fencepost_proxy.wire.produce import parse_produce_response
from fencepost_proxy.wire.schema import Message
from tests.simulation.clients import RETRIABLE, Peer, produce_frame
from tests.simulation.history import Ended, Transaction, Write
from tests.simulation.listener import ADD_LATER, ADDED, adds, query_message
from tests.simulation.world import World
from tests.support.batches import Header, batch

CONCURRENT_TRANSACTIONS, UNKNOWN_PRODUCER_ID, TRANSACTION_ABORTABLE = 51, 59, 120
#: Per transactions version: the version of EndTxn, and the proxy's error for a refused commit.
END_V1, END_V2 = 3, 5
REFUSED = {END_V1: UNKNOWN_PRODUCER_ID, END_V2: TRANSACTION_ABORTABLE}
_TRIES_MAX = 8
_ENDS_MAX = 40


@dataclass(frozen=True)
class Habits:
    """`lies` – share of commits despite a refusal. `bundles` – share of requests with all partitions. `sorts` – share
    of transactions with partitions in a fixed order. `unconditional` – share of appends. `long` – share
    of pauses before the end. `stale` – share of expected offsets that were not read. `patient` – repeats retriable
    errors without limit. `routed` – uses a fixed process for each partition.
    """

    lies: float = 0.0
    bundles: float = 0.3
    sorts: float = 0.5
    unconditional: float = 0.15
    long: float = 0.1
    stale: float = 0.15
    patient: bool = False
    routed: bool = False


HABITS = {
    "atomic": Habits(),
    "atomic-liar": Habits(lies=0.6, stale=0.3),
    "atomic-patient": Habits(patient=True),
    "atomic-crossing": Habits(bundles=0.0, sorts=0.0, unconditional=0.0, stale=0.0, patient=True),
    "atomic-routed": Habits(bundles=0.0, sorts=0.0, unconditional=0.0, stale=0.0, patient=True, routed=True),
}


class Atomic(Peer):
    """One transactional producer."""

    def __init__(self, world: World, name: str, kind: str, writes: int) -> None:
        super().__init__(world)
        self.name = name
        self.habits = HABITS[kind]
        self.writes_left = writes
        self.v2 = world.scenario.transactions_v2
        self.producer_id, self.epoch = world.cluster.init_producer_id()
        world.cluster.begin_transactional(self.producer_id)
        world.transactional_ids[name] = self.producer_id
        self.sequences: dict[TopicPartition, int] = {}
        self.ends: dict[TopicPartition, int] = {}
        self.proxy: int | None = None
        self.done = False
        self.committed = 0
        self._only: int | None = None  # proxy to use until it has committed
        self._correlation = self.sim.rng.randrange(1 << 20)
        self._round = 0
        self._waits_for = ""
        self._version = 0
        self._now: Transaction | None = None
        self._groups: list[list[TopicPartition]] = []
        self._to_add: list[TopicPartition] = []
        self._sent: list[Write] = []
        self._tries_left = 0
        self._unknown = False  # if it is unknown whether some sequence was used
        self._commits = False
        self.sim.after(self.sim.between(0.3, 1.2), self._next)

    # ---- transactions

    def once_more(self, proxy: int) -> None:
        """Run one correct transaction through that process; it must commit."""
        self.habits = Habits(bundles=0.0, sorts=1.0, unconditional=0.0, long=0.0, stale=0.0)
        self.writes_left, self.done, self._only, self.committed = 40, False, proxy, 0
        self.disconnect()
        self._next()

    def _next(self) -> None:
        if self.writes_left <= 0 or (self._only is not None and self.committed):
            self.done = True
            self.disconnect()
            return
        if self.world.cluster.busy(self.producer_id) and not (self.v2 and self.sim.chance(0.3)):
            self.sim.after(0.05, self._next)
            return
        self.writes_left -= 1
        rng, habits = self.sim.rng, self.habits
        names = [name for name in self.world.names if self.world.checks[name.topic] is Check.ON]
        chosen = names if self._only is not None else rng.sample(names, rng.randrange(1, len(names) + 1))
        if self.sim.chance(habits.sorts):
            chosen = sorted(chosen)
        self._groups = [list(chosen)] if self.sim.chance(habits.bundles) else [[name] for name in chosen]
        if self.sim.chance(0.3):
            self._groups.append([rng.choice(chosen)])
        self._now = Transaction(self.name, self.producer_id, self.epoch, self.sim.now)
        self.world.history.transactions.append(self._now)
        self._to_add = [] if self.v2 else list(chosen)
        self._unknown = False
        if self.sim.chance(0.5) or self._only is not None:
            self.ends.clear()
        self._step()

    def _step(self) -> None:
        if self._to_add:
            self._send(self._add)
        elif self._sent:
            self._send(self._produce)
        elif self._groups:
            group = self._groups.pop(0)
            self._sent = [self._write(name) for name in group]
            self._tries_left = _TRIES_MAX
            self._send(self._produce)
        else:
            pause = self.sim.between(0.0, 1.0) if self.sim.chance(self.habits.long) else 0.0
            self.sim.after(pause, self._end, True)

    def _write(self, name: TopicPartition) -> Write:
        history, sim, rng = self.world.history, self.sim, self.sim.rng
        number = len(history.writes)
        count = rng.choice((1, 1, 2))
        expected = None if sim.chance(self.habits.unconditional) else self._end_of(name)
        headers: list[list[Header]] = [[] for _ in range(count)]
        if expected is not None:
            headers[0].append(("fencepost-expected-offset", b"%d" % expected))
        sequence = self.sequences.get(name, 0)
        records = batch(
            *(b"%d.%d" % (number, index) for index in range(count)),
            headers=headers,
            timestamp_ms=sim.unix_ms,
            producer=(self.producer_id, self.epoch, sequence),
            transactional=True,
        )
        # A client that reuses the sequence of a given-up batch bypasses Kafka's deduplication.
        honest = not self.habits.lies
        write = Write(number, self.name, name, "transactional", records, count, expected, None, honest=honest)
        history.writes.append(write)
        assert self._now is not None
        self._now.writes.append(write)
        return write

    def _end_of(self, name: TopicPartition) -> int:
        partition = self.world.cluster.partitions[name]
        if name not in self.ends or not self.sim.chance(self.habits.stale):
            node = partition.leader if partition.leader is not None else next(iter(partition.replicas))
            mine = self.ends.get(name, -1)
            self.ends[name] = max(mine, partition.replicas[node].log_end)
        return self.ends[name]

    # ---- appends

    def _produced(self, frame: bytes) -> None:
        response = parse_produce_response(memoryview(frame), self._version)
        results = {(topic.name, result.partition): result for topic in response.topics for result in topic.partitions}
        again, failed = [], False
        for write in self._sent:
            attempt = write.tries[-1]
            result = results.get((write.partition.topic, write.partition.partition))
            if result is None:
                self.world.history.broken.append(f"NO RESULT: {self.name} got none for {write}")
                return
            attempt.result, attempt.answered_at = result, self.sim.now
            self.sim.log(
                f"{self.name} <- {write.number}: {result.error_code} base {result.base_offset} {attempt.message}"
            )
            if result.error_code == 0:
                self._add_appended(write, result.base_offset)
            elif result.error_code in RETRIABLE or result.error_code == CONCURRENT_TRANSACTIONS:
                again.append(write)
            else:
                failed = True
                self._unknown = self._unknown or "OFFSET_VIOLATION" in attempt.message or result.error_code == 45
                self.ends.pop(write.partition, None)
        self._after(again, failed=failed)

    def _add_appended(self, write: Write, base_offset: int) -> None:
        self.sequences[write.partition] = self.sequences.get(write.partition, 0) + write.count
        self.ends[write.partition] = base_offset + write.count

    def _after(self, again: list[Write], *, failed: bool) -> None:
        """A successor must wait for its predecessor's outcome, so all wait."""
        self._sent = again
        self._tries_left -= 1
        self.sim.after(
            self.sim.between(0.0, 0.05) if not again else self.sim.between(0.02, 0.3), self._continue, failed
        )

    def _continue(self, failed: bool) -> None:
        given_up = self._sent and self._tries_left <= 0 and not self.habits.patient
        if not failed and not given_up:
            self._step()
            return
        self._unknown = self._unknown or bool(self._sent)
        self._sent, self._to_add = [], []
        if self.sim.chance(self.habits.lies) and self.sim.chance(0.5) and self._groups:
            self._step()  # continues despite the refusal
            return
        self._groups = []
        self._end(self.sim.chance(self.habits.lies))

    # ---- end

    def _end(self, commits: bool) -> None:
        assert self._now is not None
        self._commits = commits
        self._now.ends.append(Ended(commits, self.sim.now))
        self._tries_left = _ENDS_MAX
        self._send(self._end_txn)

    def _ended(self, frame: bytes) -> None:
        version = END_V2 if self.v2 else END_V1
        offset = parse_response_header(memoryview(frame), END_TXN, version).body_offset
        answer = decode_response(END_TXN, version, memoryview(frame)[offset:])
        transaction = self._now
        assert transaction is not None
        transaction.ends[-1].codes.append(answer.error_code)
        transaction.ends[-1].answered_at = self.sim.now
        self.sim.log(f"{self.name} <- EndTxn({'commit' if self._commits else 'abort'}): {answer.error_code}")
        if answer.error_code == CONCURRENT_TRANSACTIONS:
            self._end_again()
        elif answer.error_code == REFUSED[version]:
            if not self._commits:
                self.world.history.broken.append(f"ABORT REFUSED: {self.name}")
            self._unknown = True  # a new epoch is safe, as in real clients
            self._end(False)
        elif answer.error_code == 0:
            self.committed += self._commits
            if self.v2:
                self.epoch = answer.producer_epoch
                self.sequences.clear()
            self._over(fenced=self._unknown and not self.v2)
        else:
            self._over(fenced=True)

    def _end_again(self) -> None:
        self._tries_left -= 1
        if self._tries_left <= 0 and not self.world.quiet:
            self._over(fenced=True)
        else:
            self.sim.after(self.sim.between(0.02, 0.2), self._send, self._end_txn)

    def _over(self, *, fenced: bool) -> None:
        self._now = None
        if fenced:
            _, self.epoch = self.world.cluster.init_producer_id(self.producer_id)
            self.sequences.clear()
        self.sim.after(self.sim.between(0.0, self.world.scenario.think_max), self._next)

    # ---- sending

    def _send(self, what: Callable[[], None]) -> None:
        self._round += 1
        if self.habits.routed and self.proxy != self._route():
            self.disconnect()
        if self.socket is None and not self._connect():
            self.sim.after(self.sim.between(0.05, 0.3), self._send, what)
            return
        self._correlation += 1
        what()
        self.sim.after(self.sim.between(2.5, 6.0), self._give_up, self._round)

    def _add(self) -> None:
        assert self.socket is not None
        self._waits_for = "add"
        text = adds(self.name, self.producer_id, self.epoch, self._to_add)
        self.socket.write(query_message(ADD_PARTITIONS_TO_TXN, 3, self._correlation, text))

    def _produce(self) -> None:
        assert self.socket is not None
        assert self._now is not None
        self._waits_for = "produce"
        self._version = 12 if self.v2 else 11
        for write in self._sent:
            attempt = self.world.history.tried(write, self.sim.now, self.proxy)
            attempt.connection, attempt.starts_at = self.socket.connection, self.socket.sent_bytes
            attempt.correlation_id = self._correlation
            self.sim.log(f"{self.name} -> proxy {self.proxy}: {write}, try {len(write.tries)}")
        timeout_ms = self.sim.rng.choice((600, 1500, 3000))
        names = {"client": self.name, "transactional_id": self.name}
        self.socket.write(produce_frame(self._version, self._correlation, self._sent, **names, timeout_ms=timeout_ms))

    def _end_txn(self) -> None:
        assert self.socket is not None
        self._waits_for = "end"
        message = Message(
            transactional_id=self.name,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=self._commits,
        )
        version = END_V2 if self.v2 else END_V1
        self.sim.log(f"{self.name} -> proxy {self.proxy}: EndTxn({'commit' if self._commits else 'abort'})")
        self.socket.write(encode_request_frame(END_TXN, version, self._correlation, self.name, message))

    def _connect(self) -> bool:
        world, rng = self.world, self.sim.rng
        name = self._sent[0].partition if self._sent else rng.choice(world.names)
        leader = world.cluster.partitions[name].leader
        node = leader if leader is not None and self.sim.chance(0.95) else rng.randrange(len(world.cluster.brokers))
        proxy = rng.choice(world.proxies) if self._only is None else world.proxies[self._only]
        if self.habits.routed:
            proxy = world.proxies[self._route()]
        self.proxy = proxy.number
        return self.attach(proxy, node)

    def _route(self) -> int:
        return self._sent[0].partition.partition % len(self.world.proxies) if self._sent else 0

    def _give_up(self, number: int) -> None:
        if number == self._round and self._waits_for and self.socket is not None and not self.world.quiet:
            self.sim.log(f"{self.name} gives up its connection")
            self.socket.close()

    # ---- responses

    def received(self, frame: bytes) -> None:
        if not self._waits_for or int.from_bytes(frame[:4], "big", signed=True) != self._correlation:
            self.world.history.broken.append(f"OUT OF ORDER: {self.name} got an unexpected response")
            return
        queried, self._waits_for = self._waits_for, ""
        self._round += 1
        if self.sim.chance(0.3):
            self.disconnect()  # the next request may use another process
        if queried == "add":
            self._added(frame[4:])
        elif queried == "produce":
            self._produced(frame)
        else:
            self._ended(frame)

    def _added(self, body: bytes) -> None:
        if body == ADDED:
            self._to_add = []
            self._step()
        elif body == ADD_LATER:
            self.sim.after(self.sim.between(0.05, 0.2), self._send, self._add)
        else:
            self._to_add, self._groups, self._now = [], [], None
            self._over(fenced=True)

    def lost(self) -> None:
        self.sim.log(f"{self.name} loses its connection")
        self.socket = None
        queried, self._waits_for = self._waits_for, ""
        self._round += 1
        if queried == "end":
            assert self._now is not None
            self._now.ends[-1].codes.append(None)
            self._end_again()
        elif queried == "produce":
            self._after(list(self._sent), failed=False)
        elif queried == "add":
            self.sim.after(self.sim.between(0.02, 0.2), self._send, self._add)
