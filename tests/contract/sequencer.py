"""Rows at one partition sequencer: its effects are carried out at once, on a modelled broker."""

from __future__ import annotations

from collections import deque

from fencepost_policies.append import Refusal
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.appends import batch_to_send
from fencepost_proxy.sequencer.sequencer import PartitionSequencer
from fencepost_proxy.session.batches.produce_exchange import refused
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import SEQUENCE_MODULUS
from fencepost_proxy.wire.produce import PartitionResult
from tests.conformance.model import ModelKafka
from tests.contract.rows import CONFIGS, Level, Part, Row, Send
from tests.simulation.clock import UNIX_MINUS_MONOTONIC
from tests.support import raw
from tests.support.pending import pending_append

_SHARED = 7000
_ROUNDS_MAX = 1000
_DAY_SECONDS = 86_400.0


class SequencerLevel(Level):
    def __init__(self, row: Row, seed: int) -> None:
        self.kafka = ModelKafka(seed, brokers=1)
        self.at_kafka = self.kafka.create(row.settings)
        super().__init__(row, self.at_kafka.name.topic)
        self.sequencer = PartitionSequencer(self.at_kafka.name, g.SequencerLimits())
        self._connections: dict[str, int] = {}
        self._next_id = 100
        self._base = (0, 0)
        self._in_flight: deque[g.PendingAppend] = deque()
        self._answers: dict[g.PendingAppend, PartitionResult] = {}
        if row.length:
            answer = self.at_kafka.append(raw.batch(*self._old(), producer=raw.Producer(_SHARED, 0, 0)))
            assert answer.error_code == 0

    def _old(self) -> list[raw.Record]:
        return [raw.Record(b"old", timestamp_ms=self.now_ms())] * self.row.length

    def now_ms(self) -> int:
        return self.kafka.now_ms()

    @property
    def now(self) -> float:
        return self.kafka.sim.now

    def new_producer(self) -> tuple[int, int]:
        self._next_id += 1
        return self._next_id, 0

    def shared_producer(self) -> tuple[int, int]:
        return _SHARED, 0

    def stored(self, partition: int) -> list[raw.Logged]:
        return [
            logged
            for each in self._replica().batches
            if each.base >= self.log_start
            for logged in raw.read_batches(each.data)
        ]

    def _replica(self):  # type: ignore[no-untyped-def]
        return self.kafka.cluster.partitions[self.at_kafka.name].replicas[0]

    def bypass(self, records: bytes) -> int:
        return self.at_kafka.append(records).base_offset

    def delete_records(self, before: int) -> None:
        self.at_kafka.delete_records(before)

    def send(self, sends: tuple[Send, ...]) -> None:
        pending: list[tuple[Part, g.PendingAppend | PartitionResult]] = []
        effects: list[g.Effect] = []
        for each in sends:
            (part,) = each.parts
            made = self._made(each, part)
            pending.append((part, made))
            if isinstance(made, g.PendingAppend):
                effects += self.sequencer.submit(made, self.now)
        self._carry_out(effects, [each for _, each in pending if isinstance(each, g.PendingAppend)])
        for part, each in pending:
            result = each if isinstance(each, PartitionResult) else self._answers.pop(each)
            self.check(part, (result.error_code, result.base_offset, result.error_message, None))

    def _made(self, request: Send, part: Part) -> g.PendingAppend | PartitionResult:
        made = pending_append(
            self.at_kafka.name,
            memoryview(self.bytes_of(part.batch)),
            TopicPolicy.of(CONFIGS[self.row.topic]),
            frozenset({_SHARED}),
            now=self.now,
            wait=5.0,
            connection=self._connections.setdefault(request.via, len(self._connections) + 1),
            context=g.AppendContext(alone=True),
        )
        if isinstance(made, Refusal):
            return refused(self.at_kafka.name, made)
        made.sending.may_write = True
        return made

    def _carry_out(self, effects: list[g.Effect], pending: list[g.PendingAppend]) -> None:
        for _ in range(_ROUNDS_MAX):
            while effects:
                effects = effects[1:] + self._done(effects[0])
            if self._in_flight:
                effects = self._answered(self._in_flight.popleft())
            elif all(each in self._answers for each in pending):
                return
            else:
                self.kafka.sim.run(self.now + 0.05)
                effects = self.sequencer.handle(g.Tick(), self.now)
        raise AssertionError(f"no answer to {[each.append for each in pending if each not in self._answers]}")

    def _done(self, effect: g.Effect) -> list[g.Effect]:
        match effect:
            case g.Answer(pending, result):
                self._answers[pending] = result
                return []
            case g.Admit(pending):
                self._in_flight.append(pending)
                return self.sequencer.sent(pending, self.now)
            case g.ReadLogEnd():
                event: g.Event = g.LogEndRead(self._snapshot())
            case g.ReadBatch(pending, offset):
                event = g.BatchRead(pending, self._read(offset))
            case g.Resend(pending):
                event = g.Resent(pending, self._append(pending))
            case g.PublishBase(_, producer_epoch, base):
                self._base = (producer_epoch, base)
                event = g.BasePublished(True, ours=True)
            case _:
                return []
        return self.sequencer.handle(event, self.now)

    def _answered(self, pending: g.PendingAppend) -> list[g.Effect]:
        return self.sequencer.answered(pending, self._append(pending), self.now)

    def _append(self, pending: g.PendingAppend) -> PartitionResult:
        answer = self.at_kafka.append(bytes(batch_to_send(pending)))
        return PartitionResult(0, answer.error_code, answer.base_offset, answer.log_append_time_ms)

    def _snapshot(self) -> g.LogEndSnapshot:
        known = self._replica().producers.get(_SHARED)
        state = None if known is None else g.ProducerState(known.epoch, (known.last_sequence + 1) % SEQUENCE_MODULUS)
        return g.LogEndSnapshot(
            requested_at=self.now,
            log_end_offset=self.at_kafka.end(),
            log_start_offset=self.at_kafka.start(),
            producer_id=_SHARED,
            producer_state=state,
            fence_base=self._base,
            open_transactions=frozenset(),
            log_append_time=self.row.settings.log_append_time,
            expiration_seconds=_DAY_SECONDS,
            clock_offset_seconds=UNIX_MINUS_MONOTONIC,
            transactions_as_of=self.now,
        )

    def _read(self, offset: int) -> g.BatchReadResult:
        replica = self._replica()
        found = replica.batch_at(offset)
        if offset < replica.log_start or found is None:
            return g.OutOfRange() if offset < replica.log_start else g.NotYet(replica.log_end)
        return g.Found(memoryview(found.data))
