"""A model of `services/transactions.py`: validates commits and records abort-only transactions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fencepost_proxy.session.frames import messages as sessions
from fencepost_proxy.topics.abort_only import encode_abort_only_record, encode_abort_only_tombstones
from fencepost_proxy.transactions import commit_validator as j
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.batch_scan import scan_batch
from fencepost_proxy.wire.state_records import StateRecord
from tests.simulation.broker import LogBatch, Replica, is_commit

if TYPE_CHECKING:
    from tests.simulation.world import Proxy

_COMMIT_WAIT_SECONDS = 2.0
_STORE_SECONDS = 2.0
_PROBE_AGAIN_SECONDS = 0.05


class ValidatorCall:
    """One commit. Brokers answer its queries with their state at that time."""

    def __init__(self, proxy: Proxy, connection: int, requested: sessions.ValidateCommit) -> None:
        self._proxy = proxy
        self._sim = proxy.sim
        self._connection = connection
        self._token = requested.token
        self._deadline = proxy.sim.now + _COMMIT_WAIT_SECONDS
        self._over = False
        self._validate = j.CommitValidator(
            proxy.transactions,
            requested.transactional_id,
            requested.producer_id,
            requested.producer_epoch,
            v2=requested.end_txn_version >= j.V2_FROM,
            is_checked=self._checked,
            may_be_committed=requested.may_be_committed,
        )

    def _checked(self, topic: str) -> j.CheckedTopic | None:
        policy = self._proxy.policy(topic)
        return j.CheckedTopic(policy.source_is_base) if policy is not None and policy.is_checked else None

    def start(self) -> None:
        self._proxy.later(_COMMIT_WAIT_SECONDS, self._report, j.TimedOut())
        self._continue(self._validate.begin())

    def _continue(self, stated: tuple[j.CommitQuery, ...] | j.Decision) -> None:
        if self._over:
            return
        if isinstance(stated, j.Decision):
            self._over = True
            self._sim.log(f"proxy {self._proxy.number} decides: {stated.outcome.name} {stated.reason} {stated.message}")
            self._proxy.report(self._connection, sessions.CommitDecided(self._token, stated))
            return
        for query in stated:
            match query:
                case j.ReadState(producer_id, epoch):
                    self._proxy.read_state(
                        lambda ok, producer=(producer_id, epoch): self._report(
                            j.StateRead(self._proxy.abort_only_of(*producer) if ok else None)
                        )
                    )
                case j.QueryTransaction(transactional_id):
                    self._at_a_broker(self._describe, transactional_id)
                case j.QueryProducers(producer_id, partitions):
                    self._query_leaders(producer_id, partitions)
                case j.ReadBack():
                    self._query_leader(query.partition, self._read_back(query), j.LogIs(query.partition, None))

    def _report(self, answer: j.Answer) -> None:
        if not self._over:
            self._continue(self._validate.handle(answer))

    def _write(self, answer: j.Answer) -> None:
        """Deliver a broker's response later."""
        self._proxy.later(self._proxy.world.delay(), self._report, answer)

    def _at_a_broker(self, call: Callable[..., None], *args: object) -> None:
        if self._sim.chance(self._proxy.world.lossy_reads):
            return  # no response before the time limit
        self._sim.after(self._sim.between(0.0003, 0.004), call, *args)

    def _describe(self, transactional_id: str) -> None:
        world = self._proxy.world
        known = world.cluster.transactions.get(world.transactional_ids.get(transactional_id, -1))
        if known is None:
            self._write(j.TransactionIs(known=True))
            return
        partitions = frozenset(world.cluster.transaction_partitions(known.producer_id))
        self._write(j.TransactionIs(True, known.producer_id, known.epoch, known.state, partitions))

    # ---- leaders

    def _query_leaders(self, producer_id: int, partitions: tuple[TopicPartition, ...]) -> None:
        found: dict[TopicPartition, j.ProducerAt | None] = {}

        def queried(partition: TopicPartition, replica: Replica) -> None:
            known = replica.producers.get(producer_id)
            found[partition] = (
                None if known is None else j.ProducerAt(known.epoch, known.last_sequence, known.transaction_start)
            )
            if len(found) == len(partitions):
                self._write(j.ProducersAre(found))

        for partition in partitions:
            self._query_leader(
                partition, lambda replica, partition=partition: queried(partition, replica), j.ProducersAre({})
            )

    def _query_leader(
        self, name: TopicPartition, call: Callable[[Replica], None], failed: j.Answer, *, again: bool = False
    ) -> None:
        """Query the leader in metadata, which may not lead."""
        proxy = self._proxy
        if self._over or not proxy.live:
            return
        if again:
            proxy.refresh(name)
        node, epoch, _ = proxy.leader(name)
        if node is None or self._sim.chance(proxy.world.lossy_reads):
            proxy.later(0.05, lambda: self._query_leader(name, call, failed, again=True))
            return

        def handled() -> None:
            cluster = proxy.world.cluster
            partition = cluster.partitions[name]
            if cluster.leads(node, partition, epoch):
                call(partition.replicas[node])
            elif self._sim.now + 0.1 < self._deadline:
                proxy.later(0.05, lambda: self._query_leader(name, call, failed, again=True))
            else:
                self._write(failed)

        self._sim.after(self._sim.between(0.0003, 0.004), handled)

    def _read_back(self, query: j.ReadBack) -> Callable[[Replica], None]:
        """Read to the initial log end, after waiting for its replication."""
        ends: list[int] = []
        offset = query.from_offset

        def read(replica: Replica) -> None:
            ends.append(replica.log_end)
            name = next(n for n, p in self._proxy.world.cluster.partitions.items() if replica in p.replicas.values())
            if replica.log_start > offset:
                self._write(j.LogIs(name, None, out_of_range=True))
            elif replica.high_watermark < ends[0]:
                self._proxy.later(
                    _PROBE_AGAIN_SECONDS, lambda: self._query_leader(name, read, j.LogIs(name, None), again=True)
                )
            else:
                batches = [b for b in replica.batches if b.end > offset and b.base < replica.high_watermark]
                mine = tuple(self._logged(b, query) for b in batches if b.header.producer_id == query.producer_id)
                self._write(j.LogIs(name, mine))

        return read

    def _logged(self, batch: LogBatch, query: j.ReadBack) -> j.Logged:
        header = batch.header
        logged = j.Logged(batch.base, batch.count, header.producer_epoch, header.base_sequence)
        if header.is_control:
            return replace(logged, marker=j.Marker.COMMIT if is_commit(batch.data) else j.Marker.ABORT)
        if query.checked[0] <= batch.base and batch.end <= query.checked[1]:
            return logged
        scan = scan_batch(
            memoryview(batch.data),
            self._proxy.header_names,
            query.partition,
            source_is_base=False,
            decompressed_bytes_max=1 << 20,
        )
        expected = scan.expected_base_offset
        return replace(logged, conditional=expected is not None, expected=expected)


class AbortOnlyRecords:
    """`RecordAbortOnly` and `ClearAbortOnly` of one process."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def record(self, connection: int, requested: sessions.RecordAbortOnly) -> None:
        proxy = self._proxy
        records = encode_abort_only_record(
            requested.abort_only._replace(at_ms=proxy.sim.unix_ms), sorted(requested.instead_of)
        )
        self._append(records, connection, requested.token)

    def clear_abort_only(self, connection: int, requested: sessions.ClearAbortOnly) -> None:
        proxy = self._proxy

        def read(ok: bool) -> None:
            if ok:
                abort_only_records = proxy.abort_only_of(requested.producer_id, requested.producer_epoch)
                self._append(encode_abort_only_tombstones(abort_only_records), connection, requested.token)
            else:
                self._reported(connection, requested.token, False)

        proxy.read_state(read)

    def _append(self, records: list[StateRecord], connection: int, token: int) -> None:
        if not records:
            self._reported(connection, token, True)
            return
        head, *rest = records

        def appended(ok: bool) -> None:
            if ok and rest:
                self._append(rest, connection, token)
            else:
                self._reported(connection, token, ok)

        self._proxy.publish(head, appended)

    def _reported(self, connection: int, token: int, stored: bool) -> None:
        if token:
            self._proxy.report(connection, sessions.AbortOnlyRecorded(token, stored))
