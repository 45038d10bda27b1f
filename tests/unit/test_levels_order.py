"""Batches that go without their producer ids keep the order in which their client sent them, whatever comes when.

One session between a client that pipelines and a broker that takes no producer ids: what the client has sent, what
Kafka handles, what is answered, how frames are cut, and when others learn or forget that the topic goes without, is by
seed.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.produce import idempotence
from fencepost_proxy.topics.idempotence import IdempotenceMemory
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.produce import (
    PartitionResult,
    ProduceResponse,
    TopicResult,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
)
from tests.support.batches import batch
from tests.unit.test_levels import OLD_FORMAT, Levels, idempotent
from tests.unit.test_session import query

SEEDS = range(150)
_REQUESTS = 40
_IN_FLIGHT = 5
_PARTITIONS = 2


class Run:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.talk = Levels()
        self.reads = True
        self.from_client = bytearray()  # sent, and not taken by the session yet
        self.to_broker = bytearray()
        self.to_client = bytearray()
        self.handled: deque[bytes] = deque()  # answers of the broker on their way
        self.log: dict[int, list[bytes]] = {each: [] for each in range(_PARTITIONS)}
        self.sent: dict[int, list[bytes]] = {each: [] for each in range(_PARTITIONS)}
        self.answers: list[int] = []
        self.queried = 0

    def run(self) -> None:
        steps = [self.query, self.deliver, self.handle, self.answer, self.others, self.tick]
        while len(self.answers) < _REQUESTS:
            self.random.choices(steps, weights=[4, 6, 5, 5, 1, 1])[0]()
        assert self.answers == list(range(_REQUESTS))
        for partition, values in self.sent.items():
            assert self.log[partition] == values

    # ---- what may come next

    def query(self) -> None:
        if self.queried - len(self.answers) >= _IN_FLIGHT or self.queried == _REQUESTS:
            return
        number = self.queried
        self.queried += 1
        if self.random.random() < 0.2:
            self.from_client += query(("unchecked", 0, batch(b"x" * 200)), correlation=number)
            return
        value = b"%d" % number
        partitions = self.random.sample(range(_PARTITIONS), self.random.randint(1, _PARTITIONS))
        for partition in partitions:
            self.sent[partition].append(value)
        self.from_client += query(
            *(("safe", each, idempotent(value, number)) for each in partitions), correlation=number
        )

    def deliver(self) -> None:
        if self.reads and self.from_client:
            count = self.random.choice([len(self.from_client), self.random.randint(1, len(self.from_client))])
            data = bytes(self.from_client[:count])
            del self.from_client[:count]
            taken, out = self.talk.session.fast_path.take_up(memoryview(data), self.talk.now)
            self.to_broker += b"".join(out)
            if data[taken:]:
                self.report(m.ClientBytes(memoryview(data[taken:])))

    def handle(self) -> None:
        """One request at a time, in their order; a producer id is refused."""
        if len(self.to_broker) < 4:
            return
        end = 4 + int.from_bytes(self.to_broker[:4], "big")
        if len(self.to_broker) < end:
            return
        request = parse_produce_request(memoryview(bytes(self.to_broker[4:end])))
        del self.to_broker[:end]
        topics = []
        for topic in request.topics:
            results = []
            for data in topic.partitions:
                assert data.records is not None
                old = topic.name == "safe" and parse_batch_header(data.records).producer_id >= 0
                if topic.name == "safe" and not old:
                    self.log[data.partition].append(_value(data.records))
                results.append(PartitionResult(data.partition, OLD_FORMAT if old else 0, -1 if old else 0))
            topics.append(TopicResult(topic.name, None, tuple(results)))
        response = ProduceResponse(request.correlation_id, tuple(topics), 0)
        self.handled.append(encode_produce_response(response, request.api_version))

    def answer(self) -> None:
        if self.handled:
            self.report(m.UpstreamBytes(memoryview(self.handled.popleft())))

    def others(self) -> None:
        """Another connection has found out, or it was long ago."""
        if self.random.random() < 0.5:
            self.talk.services.idempotence.refused("safe", self.talk.now)
        else:
            self.talk.services.idempotence = IdempotenceMemory()

    def tick(self) -> None:
        self.talk.now += 0.01
        self.report(m.Tick())

    def report(self, event: m.Event) -> None:
        for command in self.talk.session.handle(event, self.talk.now):
            match command:
                case m.ToUpstream(chunks):
                    self.to_broker += b"".join(chunks)
                case m.ToClient(chunks):
                    self.to_client += b"".join(chunks)
                case m.ReadClient(on):
                    self.reads = on
                case m.CloseClient(reason):
                    raise AssertionError(reason)
        while len(self.to_client) >= 4:
            end = 4 + int.from_bytes(self.to_client[:4], "big")
            reported = parse_produce_response(memoryview(bytes(self.to_client[4:end])), 9)
            del self.to_client[:end]
            assert not any(each.error_code for topic in reported.topics for each in topic.partitions), reported
            self.answers.append(reported.correlation_id)


def _value(records: memoryview) -> bytes:
    """Of the only record: its last bytes but one, which counts its headers."""
    body = bytes(records[61:])
    length = body[5] >> 1  # after length, attributes, time and offset deltas, and an absent key
    return body[6 : 6 + length]


def test_nothing_is_overtaken_lost_or_doubled() -> None:
    for seed in SEEDS:
        try:
            Run(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def test_disabling_the_order_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule, a batch without a producer id does not wait for batches upstream that have one."""
    monkeypatch.setattr(idempotence, "_has_id_upstream", lambda produce, key: False)
    with pytest.raises(AssertionError, match="seed"):
        test_nothing_is_overtaken_lost_or_doubled()
