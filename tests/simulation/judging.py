"""What `net/transactions.py` does, modelled: commits are judged, failed appends of transactions noted for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fencepost_proxy.session import messages as sessions
from fencepost_proxy.topics.poisoned import encode_note, encode_poison_tombstones
from fencepost_proxy.topics.records import StateRecord
from fencepost_proxy.transactions import judge as j
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch import scan_batch
from tests.simulation.broker import LogBatch, Replica, is_commit

if TYPE_CHECKING:
    from tests.simulation.world import Proxy

_COMMIT_WAIT_SECONDS = 2.0
_STORE_SECONDS = 2.0
_LOOK_AGAIN_SECONDS = 0.05


class JudgeCall:
    """One commit: its questions are answered as things are when their brokers handle them."""

    def __init__(self, proxy: Proxy, connection: int, wanted: sessions.JudgeCommit) -> None:
        self._proxy = proxy
        self._sim = proxy.sim
        self._connection = connection
        self._token = wanted.token
        self._deadline = proxy.sim.now + _COMMIT_WAIT_SECONDS
        self._over = False
        self._judge = j.Judge(
            proxy.transactions,
            wanted.transactional_id,
            wanted.producer_id,
            wanted.producer_epoch,
            v2=wanted.end_txn_version >= j.V2_FROM,
            guarded=self._guarded,
            may_be_committed=wanted.may_be_committed,
        )

    def _guarded(self, topic: str) -> j.Guarded | None:
        policy = self._proxy.policy(topic)
        return j.Guarded(policy.carrier_base) if policy is not None and policy.guarded else None

    def start(self) -> None:
        self._proxy.later(_COMMIT_WAIT_SECONDS, self._tell, j.TimeIsUp())
        self._go_on(self._judge.begin())

    def _go_on(self, said: tuple[j.Ask, ...] | j.Verdict) -> None:
        if self._over:
            return
        if isinstance(said, j.Verdict):
            self._over = True
            self._sim.log(f"proxy {self._proxy.number} judges: {said.outcome.name} {said.reason} {said.message}")
            self._proxy.tell(self._connection, sessions.Judged(self._token, said))
            return
        for ask in said:
            match ask:
                case j.ReadState(producer_id, epoch):
                    self._proxy.read_state(
                        lambda ok, who=(producer_id, epoch): self._tell(
                            j.StateRead(self._proxy.poisons_of(*who) if ok else None)
                        )
                    )
                case j.AskTransaction(transactional_id):
                    self._at_a_broker(self._describe, transactional_id)
                case j.AskProducers(producer_id, partitions):
                    self._ask_leaders(producer_id, partitions)
                case j.ReadBack():
                    self._ask_leader(ask.partition, self._read_back(ask), j.LogIs(ask.partition, None))

    def _tell(self, answer: j.Answer) -> None:
        if not self._over:
            self._go_on(self._judge.handle(answer))

    def _say(self, answer: j.Answer) -> None:
        """From a broker: some time later."""
        self._proxy.later(self._proxy.world.delay(), self._tell, answer)

    def _at_a_broker(self, call: Callable[..., None], *args: object) -> None:
        if self._sim.chance(self._proxy.world.lossy_reads):
            return  # until the time is up
        self._sim.after(self._sim.between(0.0003, 0.004), call, *args)

    def _describe(self, transactional_id: str) -> None:
        world = self._proxy.world
        known = world.cluster.transactions.get(world.transactional_ids.get(transactional_id, -1))
        if known is None:
            self._say(j.TransactionIs(known=True))
            return
        partitions = frozenset(world.cluster.transaction_partitions(known.producer_id))
        self._say(j.TransactionIs(True, known.producer_id, known.epoch, known.state, partitions))

    # ---- leaders

    def _ask_leaders(self, producer_id: int, partitions: tuple[TopicPartition, ...]) -> None:
        found: dict[TopicPartition, j.ProducerAt | None] = {}

        def asked(partition: TopicPartition, replica: Replica) -> None:
            known = replica.producers.get(producer_id)
            found[partition] = (
                None if known is None else j.ProducerAt(known.epoch, known.last_sequence, known.transaction_start)
            )
            if len(found) == len(partitions):
                self._say(j.ProducersAre(found))

        for partition in partitions:
            self._ask_leader(
                partition, lambda replica, partition=partition: asked(partition, replica), j.ProducersAre({})
            )

    def _ask_leader(
        self, name: TopicPartition, call: Callable[[Replica], None], failed: j.Answer, *, again: bool = False
    ) -> None:
        """Whom metadata names; who is not the leader of that epoch says so."""
        proxy = self._proxy
        if self._over or not proxy.alive:
            return
        if again:
            proxy.refresh(name)
        node, epoch, _ = proxy.leader(name)
        if node is None or self._sim.chance(proxy.world.lossy_reads):
            proxy.later(0.05, lambda: self._ask_leader(name, call, failed, again=True))
            return

        def handled() -> None:
            cluster = proxy.world.cluster
            partition = cluster.partitions[name]
            if cluster.leads(node, partition, epoch):
                call(partition.replicas[node])
            elif self._sim.now + 0.1 < self._deadline:
                proxy.later(0.05, lambda: self._ask_leader(name, call, failed, again=True))
            else:
                self._say(failed)

        self._sim.after(self._sim.between(0.0003, 0.004), handled)

    def _read_back(self, ask: j.ReadBack) -> Callable[[Replica], None]:
        """As far as the log reaches at first, also what is not replicated yet: that is waited for."""
        ends: list[int] = []
        offset = ask.from_offset

        def read(replica: Replica) -> None:
            ends.append(replica.log_end)
            name = next(n for n, p in self._proxy.world.cluster.partitions.items() if replica in p.replicas.values())
            if replica.log_start > offset:
                self._say(j.LogIs(name, None, gone=True))
            elif replica.high_watermark < ends[0]:
                self._proxy.later(
                    _LOOK_AGAIN_SECONDS, lambda: self._ask_leader(name, read, j.LogIs(name, None), again=True)
                )
            else:
                batches = [b for b in replica.batches if b.end > offset and b.base < replica.high_watermark]
                mine = tuple(self._logged(b, ask) for b in batches if b.header.producer_id == ask.producer_id)
                self._say(j.LogIs(name, mine))

        return read

    def _logged(self, batch: LogBatch, ask: j.ReadBack) -> j.Logged:
        header = batch.header
        logged = j.Logged(batch.base, batch.count, header.producer_epoch, header.base_sequence)
        if header.is_control:
            return replace(logged, marker=j.Marker.COMMIT if is_commit(batch.data) else j.Marker.ABORT)
        if ask.checked[0] <= batch.base and batch.end <= ask.checked[1]:
            return logged
        scan = scan_batch(
            memoryview(batch.data), self._proxy.header_names, carrier_base=False, decompressed_bytes_max=1 << 20
        )
        expected = scan.expected_base_offset
        return replace(logged, conditional=expected is not None, expected=expected)


class Notes:
    """`NotePoison` and `LiftPoison` of one process."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def note(self, connection: int, wanted: sessions.NotePoison) -> None:
        proxy = self._proxy
        records = encode_note(wanted.poison._replace(at_ms=proxy.sim.wall_ms), sorted(wanted.instead_of))
        self._append(records, connection, wanted.token)

    def lift(self, connection: int, wanted: sessions.LiftPoison) -> None:
        proxy = self._proxy

        def read(ok: bool) -> None:
            if ok:
                poisons = proxy.poisons_of(wanted.producer_id, wanted.producer_epoch)
                self._append(encode_poison_tombstones(poisons), connection, wanted.token)
            else:
                self._told(connection, wanted.token, False)

        proxy.read_state(read)

    def _append(self, records: list[StateRecord], connection: int, token: int) -> None:
        if not records:
            self._told(connection, token, True)
            return
        head, *rest = records

        def appended(ok: bool) -> None:
            if ok and rest:
                self._append(rest, connection, token)
            else:
                self._told(connection, token, ok)

        self._proxy.publish(head, appended)

    def _told(self, connection: int, token: int, stored: bool) -> None:
        if token:
            self._proxy.tell(connection, sessions.PoisonNoted(token, stored))
