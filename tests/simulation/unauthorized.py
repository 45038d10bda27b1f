"""A client that may write the topics and knows another client's transactional id, producer id and epoch. It uses that
producer id with the other transactional id, for which it has no right, or with its own.
"""

from __future__ import annotations

from fencepost_policies.append import Check
from fencepost_proxy.wire.apis import END_TXN
from fencepost_proxy.wire.control import decode_response, encode_request_frame, parse_response_header
from fencepost_proxy.wire.produce import (
    PartitionData,
    ProduceRequest,
    TopicData,
    encode_produce_request,
    parse_produce_response,
)
from fencepost_proxy.wire.schema import Message
from tests.simulation.broker import DENIED_TRANSACTIONAL_ID, NONE
from tests.simulation.clients import Peer
from tests.simulation.world import World
from tests.support.batches import batch

KIND = "stranger"
_VERSION, _END_VERSION = 11, 3
_TRIES = 6  # for each append of other clients


class Unauthorized(Peer):
    """`done` after enough attempts. None may succeed, and unauthorized ones get an authorization error."""

    def __init__(self, world: World, name: str, kind: str, writes: int) -> None:
        super().__init__(world)
        self.name = name
        self.writes_left = writes * _TRIES
        self.done = False
        self._correlation = 0
        self._waits_for = ""
        self._denied = False
        producer_id, _ = world.cluster.init_producer_id()
        world.cluster.begin_transactional(producer_id)
        world.transactional_ids[name] = producer_id
        self.sim.after(self.sim.between(0.3, 1.2), self._next)

    def _next(self) -> None:
        if self.writes_left <= 0:
            self.done = True
            self.disconnect()
            return
        self.writes_left -= 1
        claimed = self.world.history.transactions[-4:]
        if not claimed or (self.socket is None and not self._connect()):
            self._later()
            return
        assert self.socket is not None
        sim, rng = self.sim, self.sim.rng
        victim = rng.choice(claimed)
        epoch = victim.producer_epoch + sim.chance(0.2)
        self._denied = sim.chance(0.6)
        transactional_id = victim.client if self._denied else self.name
        self._correlation += 1
        if sim.chance(0.3):
            message = Message(
                transactional_id=transactional_id,
                producer_id=victim.producer_id,
                producer_epoch=epoch,
                committed=sim.chance(0.7),
            )
            self._waits_for = "EndTxn"
            self.socket.write(encode_request_frame(END_TXN, _END_VERSION, self._correlation, self.name, message))
            return
        names = [name for name in self.world.names if self.world.checks[name.topic] is Check.ON]
        name = rng.choice(names)
        partition = self.world.cluster.partitions[name]
        end = partition.replicas[partition.leader or 0].log_end
        expected = end if sim.chance(0.7) else end + 7
        headers = [("fencepost-expected-offset", b"%d" % expected)]
        if self._denied and sim.chance(0.2):
            headers = []  # with its own transactional id, Kafka would accept it
        records = batch(
            f"{self.name}.{self.writes_left}".encode(),
            headers=[headers],
            timestamp_ms=sim.unix_ms,
            producer=(victim.producer_id, epoch, rng.randrange(5)),
            transactional=True,
        )
        topics = (TopicData(name.topic, None, (PartitionData(name.partition, records),)),)
        queried = ProduceRequest(_VERSION, self._correlation, self.name, b"", transactional_id, -1, 1500, topics)
        self._waits_for = "Produce"
        self.socket.write(b"".join(encode_produce_request(queried)))

    def _connect(self) -> bool:
        proxy = self.sim.rng.choice(self.world.proxies)
        return self.attach(proxy, self.sim.rng.randrange(len(self.world.cluster.brokers)))

    def received(self, frame: bytes) -> None:
        queried, self._waits_for = self._waits_for, ""
        if queried == "Produce":
            response = parse_produce_response(memoryview(frame), _VERSION)
            code = response.topics[0].partitions[0].error_code
        else:
            offset = parse_response_header(memoryview(frame), END_TXN, _END_VERSION).body_offset
            code = decode_response(END_TXN, _END_VERSION, memoryview(frame)[offset:]).error_code
        self.sim.log(f"{self.name} <- {queried}: {code}")
        if code == NONE or (self._denied and code != DENIED_TRANSACTIONAL_ID):
            self.world.history.broken.append(f"UNAUTHORIZED: {self.name}, without the right, got {code}")
        if self.sim.chance(0.2):
            self.disconnect()
        self._later()

    def lost(self) -> None:
        self.socket = None
        if self._waits_for:
            self._waits_for = ""
            self._later()

    def _later(self) -> None:
        self.sim.after(self.sim.between(0.005, 0.15), self._next)
