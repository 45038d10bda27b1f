"""Dialogues with one session: bytes and decisions in, commands out. kafka-python's codec makes and reads the frames."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, Self, TypeVar
from uuid import UUID

import pytest
from kafka.protocol.producer import ProduceRequest, ProduceResponse

from fencepost_policies.append import Check
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.errors import ClientProtocolError, ContradictoryResults, UpstreamProtocolError
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.session.connection.draining import READ_SECONDS
from fencepost_proxy.session.control.rewriters import Finished, RequestRewriter, RequestRewriters
from fencepost_proxy.session.dispatcher import Dispatcher, ForConnection
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.frames.services import RELAYED_VERSIONS, RelayedVersions
from fencepost_proxy.session.session import Session
from fencepost_proxy.topics.planning import Joins, Known
from fencepost_proxy.topics.state import NotStored, StateView, TopicConfigChange
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.api_versions import Software
from fencepost_proxy.wire.apis import ADD_PARTITIONS_TO_TXN, API_VERSIONS, END_TXN, UNKNOWN_VERSION, WRITE_TXN_MARKERS
from fencepost_proxy.wire.batch import parse_batch_header
from fencepost_proxy.wire.batch_scan import HeaderNames
from fencepost_proxy.wire.control import encode_request_frame, encode_response_frame
from fencepost_proxy.wire.primitives import join_tags
from fencepost_proxy.wire.produce import (
    LEVEL_TAG,
    NodeEndpoint,
    PartitionData,
    PartitionResult,
    TopicData,
    encode_produce_request,
    parse_produce_request,
)
from fencepost_proxy.wire.produce import ProduceRequest as ProduceRequestFrame
from fencepost_proxy.wire.schema import Message
from tests.support.batches import batch, expecting
from tests.support.counting import Counting
from tests.support.sequencer_calls import Call, SequencerCalls, call

C = TypeVar("C")
T_ID = UUID(int=77)
HEARTBEAT, METADATA = 12, 3
COUNT_FIELD = 253
MISMATCH = PartitionResult(0, 44, 57, -1, 3, error_message="OFFSET_MISMATCH …")
NOT_LEADER, TIMED_OUT, NOT_AUTHORIZED, INVALID_RECORD = 6, 7, 29, 87


@dataclass
class ServicesStandIn(Counting):
    """The services of a process in which `checked-*` topics are checked; the test decides for the sequencers."""

    frame_bytes_max: int = 1 << 20
    in_flight_requests_max: int = 10
    sequencer_wait_max_seconds: float = 5.0
    request_timeout_seconds: float = 30.0
    decompressed_bytes_max: int = 1 << 20
    read_here_bytes_max: int = 1 << 20
    header_names: HeaderNames = field(default_factory=HeaderNames)
    refuse_whole_requests: bool = False
    clients_log_in: bool = False
    transactions: Table = field(default_factory=Table)
    state_topic: str = "__state"
    relayed_versions: RelayedVersions = field(default_factory=lambda: RELAYED_VERSIONS)
    state_topic_marks: tuple[bytes, ...] = (b"__state",)
    shared_producer_ids: frozenset[int] = frozenset({7000})
    is_fresh: bool = True
    free_bytes: int = 1 << 20
    newest_produce: int = 12
    sequencers: Any = field(default_factory=SequencerCalls)
    unread: int = 0
    instance_id: int = 7
    is_alone: bool = True
    is_taken_over: bool = True
    unknown_topics: frozenset[str] = frozenset()
    topic_names: dict[UUID, str] = field(default_factory=dict)
    unknown_topic_ids: dict[UUID, float] = field(default_factory=dict)
    #: If given: of topics with 6 partitions. Metadata is fresh.
    policies: Mapping[str, TopicPolicy] | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self.partition_counts = dict.fromkeys(self.policies or (), 6)
        self.confirmed_at = dict.fromkeys(self.policies or (), float("inf"))

    def alone(self, now: float) -> bool:
        return self.is_alone

    def taken_over(self, now: float) -> bool:
        return self.is_taken_over

    def unix_ms(self, now: float) -> int:
        return round(now * 1000)

    def fresh(self, now: float) -> bool:
        return self.is_fresh

    def policy(self, topic: str) -> TopicPolicy | None:
        if self.policies is not None:
            return self.policies.get(topic)
        return TopicPolicy(Check.ON) if topic.startswith("checked") else None

    def topic_id(self, topic: str) -> UUID | None:
        return None if topic in self.unknown_topics else T_ID

    def leader_epoch(self, partition: TopicPartition) -> int:
        return 0

    def produce_version_max(self) -> int:
        return self.newest_produce

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        return NodeEndpoint(endpoint.node_id, local_host, 19000 + endpoint.node_id, endpoint.rack)

    def unread_bytes(self, connection: int) -> int:
        return self.unread


class Unchanged:
    """Rewriters that change nothing."""

    def begin(self, api_key: int, version: int, frame: memoryview, local_host: str) -> RequestRewriter:
        return RequestRewriter(struct.pack(">i", len(frame)) + bytes(frame))


class Talk:
    """One session before a `process`; `commands` are those that no assertion has consumed yet."""

    def __init__(self, rewriters: Any = None, **services: Any) -> None:
        self.services: Any = ServicesStandIn(**services)
        self.session = Session(1, "proxy.local", self.services, rewriters or Unchanged(), 0.0)
        self.commands: list[m.Command | Call] = []
        self.services.sequencers.record = self._record
        self.now = 100.0

    def _record(self, call: Call) -> None:
        self.session.state.commands.append(call)  # type: ignore[arg-type]

    def call(self, function: Callable[..., list[m.Command]], *arguments: Any) -> None:
        """Of the session: an event, or what a sequencer reports."""
        self.commands += function(*arguments, self.now)

    def report(self, event: m.Event) -> None:
        self.call(self.session.handle, event)

    def client(self, data: bytes) -> None:
        self.report(m.ClientBytes(memoryview(data)))

    def kafka(self, data: bytes) -> None:
        self.report(m.UpstreamBytes(memoryview(data)))

    def may_write(self, *topics: str) -> Self:
        """Kafka has just confirmed it."""
        self.session._core.proofs.may_write |= dict.fromkeys(topics, self.now)
        return self

    def next(self, kind: type[C]) -> C:
        assert self.commands, f"no command, expected {kind.__name__}"
        command = self.commands.pop(0)
        assert isinstance(command, kind), f"expected {kind.__name__}, got {command}"
        return command

    def silent(self) -> None:
        assert not self.commands, self.commands

    def upstream(self) -> bytes:
        return b"".join(self.next(m.ToUpstream).chunks)

    def answer(self) -> bytes:
        return b"".join(self.next(m.ToClient).chunks)

    def submitted(self) -> g.PendingAppend:
        name, (pending,) = self.next(Call)
        assert name == "submit"
        return pending

    def admit(self, pending: g.PendingAppend, sequence: int = 5) -> None:
        pending.placement.fence = g.Fence(7000, 0, sequence)
        self.call(self.session.append_admitted, pending)

    def admit_again(self, pending: g.PendingAppend) -> None:
        """With the fence that it has, if any."""
        self.call(self.session.append_admitted, pending)

    def complete(self, pending: g.PendingAppend, result: PartitionResult, refusal: str | None = None) -> None:
        """The sequencer's last word."""
        self.call(self.session.append_completed, g.Answer(pending, result, refusal))

    def refuse(self, pending: g.PendingAppend) -> None:
        self.complete(pending, replace(MISMATCH, partition=pending.partition.partition), "offset_mismatch")

    def sent(self, *pending_appends: g.PendingAppend) -> None:
        for pending in pending_appends:
            assert self.next(Call) == call("sent", pending)

    def submits(self, at: int = 5, **options: Any) -> g.PendingAppend:
        """The client sends a batch for `checked-a` 0 that expects to lie there."""
        self.produces(("checked-a", 0, expecting(at, b"x")), **options)
        return self.submitted()

    def sends(self, **options: Any) -> g.PendingAppend:
        """It is admitted too, and goes to Kafka."""
        pending = self.submits(**options)
        self.admit(pending)
        self.sent(pending)
        self.upstream()
        return pending

    def half_admitted(self) -> tuple[g.PendingAppend, g.PendingAppend]:
        """Of a request to `checked-a` 0 and `checked-b` 1: the first append is admitted, the second one waits."""
        self.produces(A, B)
        first = self.submitted()
        self.admit(first)
        return first, self.submitted()

    def lost(self, pending: g.PendingAppend) -> None:
        assert self.next(Call) == call("lost", pending)

    def canceled(self, *pending_appends: g.PendingAppend) -> None:
        for pending in pending_appends:
            assert self.next(Call) == call("cancel", pending)

    def admitted(self, *, fenced: bool = True) -> g.PendingAppend:
        """The next append is submitted, admitted and sent; its bytes are left."""
        pending = self.submitted()
        if fenced:
            self.admit(pending)
        else:
            self.admit_again(pending)
        self.sent(pending)
        return pending

    def sent_up(self) -> ProduceRequestFrame:
        return parse_produce_request(memoryview(self.upstream())[4:])

    def refused(self, pending: g.PendingAppend) -> None:
        self.refuse(pending)
        self.metric()

    def completed(self, pending: g.PendingAppend, answer: bytes, result: PartitionResult) -> None:
        """Kafka answers, and `result` is the sequencer's last word."""
        self.kafka(answer)
        name, arguments = self.next(Call)
        assert (name, arguments[0]) == ("answered", pending)
        self.complete(pending, result)

    def produces(self, *records: tuple[str, int, memoryview], **options: Any) -> None:
        self.client(produce(*records, **options))

    def says(self, *results: tuple[str, int, int, int], **options: Any) -> None:
        """Kafka answers a Produce request."""
        self.kafka(produced(*results, **options))

    def outcomes(self) -> dict[tuple[str, int], tuple[int, int]]:
        """The answer to a Produce request: errors and base offsets."""
        return {key: value[:2] for key, value in read(self.answer()).items()}

    def fails(self, error: int, where: tuple[str, int] = ("checked-a", 0), *, version: int = 9) -> str:
        """An append is answered with this error, and counted; returns the message."""
        self.metric()
        code, base_offset, message = read(self.answer(), version)[where]
        assert (code, base_offset) == (error, -1)
        return message or ""

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.report(m.Tick())

    def metric(self) -> None:
        self.next(m.Count)

    def read_elsewhere(self) -> None:
        """The session goes on after a thread has read the batches."""
        requested = self.next(m.ReadBatches)
        requested.read()
        self.report(m.BatchesRead(requested.token))


class PolicyTalk(Talk):
    """One session before a process with these policies. `may_write` – it has proved that before."""

    policies: ClassVar[dict[str, TopicPolicy]]

    def __init__(self, *, may_write: bool = True, rewriters: object = None, **services: Any) -> None:
        super().__init__(rewriters, policies=self.policies, **services)
        if may_write:
            self.session._core.proofs.may_write = dict.fromkeys([*self.policies, "unchecked"], float("inf"))

    def reported(self) -> dict[tuple[str, int], tuple[int, int, str | None]]:
        return read(self.answer())


def query(
    *parts: tuple[str, int, Any],
    level: bytes | None = None,
    count: bytes | None = None,
    correlation: int = 1,
    version: int = 9,
    acks: int = -1,
    timeout_ms: int = 3000,
) -> bytes:
    """A Produce request: (topic, partition, records). `level`, `count`: the tagged fields 254 of its header, and 253 of
    each topic."""
    topics: dict[str, list[PartitionData]] = {}
    for topic, partition, records in parts:
        topics.setdefault(topic, []).append(PartitionData(partition, memoryview(records)))
    header, tags = (
        b"" if contents is None else join_tags([(7, b"theirs"), (tag, contents), (300, b"later")])
        for tag, contents in ((LEVEL_TAG, level), (COUNT_FIELD, count))
    )
    data = tuple(TopicData(name, None, tuple(partitions), tags) for name, partitions in topics.items())
    request = ProduceRequestFrame(version, correlation, "test", header, None, acks, timeout_ms, data)
    return b"".join(encode_produce_request(request))


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def frames(data: bytes) -> list[bytes]:
    found = []
    while data:
        length = 4 + int.from_bytes(data[:4], "big")
        found.append(data[:length])
        data = data[length:]
    return found


def to_client(talk: Talk) -> list[bytes]:
    """All answers, among other commands."""
    return frames(b"".join(bytes(chunk) for c in talk.commands if isinstance(c, m.ToClient) for chunk in c.chunks))


def request(api_key: int, version: int, correlation: int, body: bytes = b"") -> bytes:
    return frame(struct.pack(">hhih", api_key, version, correlation, -1) + body)


def response(correlation: int, body: bytes = b"") -> bytes:
    return frame(struct.pack(">i", correlation) + body)


def produce(
    *records: tuple[str, int, memoryview],
    correlation: int = 1,
    version: int = 9,
    acks: int = 1,
    timeout_ms: int = 3000,
    transactional_id: str | None = None,
) -> bytes:
    topics: dict[str, list[Any]] = {}
    for topic, partition, data in records:
        topics.setdefault(topic, []).append((partition, bytes(data)))
    message = ProduceRequest[version](
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=[
            ProduceRequest.TopicProduceData(
                version=version,
                name=name,
                partition_data=[
                    ProduceRequest.TopicProduceData.PartitionProduceData(version=version, index=index, records=data)
                    for index, data in parts
                ],
            )
            for name, parts in topics.items()
        ],
    )
    message.with_header(correlation_id=correlation, client_id="test")
    return bytes(message.encode(header=True, framed=True))


def produced(
    *results: tuple[str, int, int, int], correlation: int = 1, version: int = 9, by_id: bool = False, **more: Any
) -> bytes:
    """Kafka's answer: (topic, partition, error, base offset)."""
    Topic = ProduceResponse.TopicProduceResponse
    message = ProduceResponse[version](
        responses=[
            Topic(
                version=version,
                **({"topic_id": T_ID} if by_id else {"name": topic}),
                partition_responses=[
                    Topic.PartitionProduceResponse(
                        version=version,
                        index=partition,
                        error_code=error,
                        base_offset=base,
                        log_append_time_ms=-1,
                        log_start_offset=0,
                        record_errors=[],
                        error_message=None,
                    )
                ],
            )
            for topic, partition, error, base in results
        ],
        throttle_time_ms=0,
        **more,
    )
    message.with_header(correlation_id=correlation)
    return bytes(message.encode(header=True, framed=True))


def read(answer: bytes, version: int = 9) -> dict[tuple[str, int], tuple[int, int, str | None]]:
    """A produce response as its client sees it: (topic, partition) -> (error, base offset, message)."""
    message = ProduceResponse.decode(answer, version=version, header=True, framed=True)
    return {
        (topic.name, each.index): (each.error_code, each.base_offset, each.error_message)
        for topic in message.responses
        for each in topic.partition_responses
    }


#: What most clients here send: batches that expect to lie at 5 of `checked-a` 0 (and then at 6), or at 9.
A = ("checked-a", 0, expecting(5, b"x"))
A_NEXT = ("checked-a", 0, expecting(6, b"y"))
B = ("checked-b", 1, expecting(9, b"x"))
UNCHECKED = ("unchecked", 0, batch(b"p"))
A_AT_5, B_AT_9 = PartitionResult(0, 0, 5), PartitionResult(1, 0, 9)


@pytest.fixture
def talk() -> Talk:
    return Talk()


# ---------------------------------------------------------------------------------------------------------- cut through


def test_frame_without_handling_is_streamed_both_ways(talk: Talk) -> None:
    query, reply = request(HEARTBEAT, 4, 1, b"x" * 100), response(1, bytes(5) + b"y" * 100)
    for piece in (query[:20], query[20:50], query[50:]):
        talk.client(piece)
        assert talk.upstream() == piece
    for piece in (reply[:30], reply[30:]):
        talk.kafka(piece)
        assert talk.answer() == piece
    assert talk.session.drained


def test_unchecked_produce_is_streamed_once_topic_is_known(talk: Talk) -> None:
    query = produce(("unchecked", 0, batch(b"v" * 1000)))
    talk.client(query[:60])
    begun = talk.upstream()
    assert query[:60].startswith(begun)
    talk.client(query[60:200])  # with the producer id of its batch
    assert begun + talk.upstream() == query[:200]
    talk.client(query[200:])
    assert talk.upstream() == query[200:]
    assert talk.services.free_bytes == 1 << 20


def relayed(talk: Talk, data: bytes, cut: int) -> bytes:
    """What reaches Kafka of bytes that arrive in pieces."""
    up = b""
    for at in range(0, len(data), cut):
        piece = memoryview(data[at : at + cut])
        taken, out = talk.session.fast_path.take_up(piece, talk.now)
        up += b"".join(out)
        if taken < len(piece):
            talk.client(bytes(piece[taken:]))
        while talk.commands and isinstance(talk.commands[0], m.ToUpstream):
            up += talk.upstream()
    return up


def test_fast_path_relays_only_the_last_topic_with_valid_configs(talk: Talk) -> None:
    last = produce(UNCHECKED)
    talk.client(last)
    other = produce(A)
    assert [talk.session.fast_path.take_up(memoryview(each), talk.now)[0] for each in (last, other)] == [len(last), 0]
    talk.services.is_fresh = False
    assert talk.session.fast_path.take_up(memoryview(last), talk.now)[0] == 0


def test_fast_path_keeps_the_order_of_answers(talk: Talk) -> None:
    talk.sends()
    talk.client(request(HEARTBEAT, 4, 2))
    talk.says(("checked-a", 0, 0, 5))  # its sequencer decides later
    assert talk.session.fast_path.take_down(memoryview(response(2, bytes(6))), talk.now) == (0, [])


@pytest.mark.parametrize("cut", [1, 7, 61, 400, 1 << 20])
@pytest.mark.parametrize("version", [3, 8, 9, 12])
@pytest.mark.parametrize("partitions", [1, 3, 101])
def test_relayed_produce_with_shared_producer_id_is_refused(
    partitions: int, version: int, cut: int, talk: Talk
) -> None:
    """In the last of its partitions, after requests with the same beginning."""
    good, bad = (batch(b"v" * 100, producer=(producer_id, 32_767, 0)) for producer_id in (6999, 7000))
    entries = [("unchecked", number, good) for number in range(partitions - 1)]
    for _ in range(2):
        query = produce(*entries, ("unchecked", partitions - 1, good), version=version)
        assert relayed(talk, query, cut) == query
    talk.silent()
    query = produce(*entries, ("unchecked", partitions - 1, bad), version=version)
    assert len(relayed(talk, query, cut)) < len(query)
    assert "PRODUCER_ID_TAKEN" in talk.next(m.CloseClient).reason


def test_collected_produce_with_shared_producer_id_is_refused(talk: Talk) -> None:
    talk.produces(UNCHECKED, ("other", 0, batch(b"v", producer=(7000, 32_767, 0))))
    assert "PRODUCER_ID_TAKEN" in talk.next(m.CloseClient).reason


def test_addresses_in_a_produce_answer_become_ours(talk: Talk) -> None:
    talk.produces(UNCHECKED, version=10)
    talk.upstream()
    endpoint = ProduceResponse.NodeEndpoint(version=10, node_id=3, host="kafka-3.internal", port=9092, rack=None)
    talk.kafka(produced(("unchecked", 0, 6, -1), version=10, node_endpoints=[endpoint]))
    answer = talk.answer()
    assert b"kafka-3.internal" not in answer
    (got,) = ProduceResponse.decode(answer, version=10, header=True, framed=True).node_endpoints
    assert (got.node_id, got.host, got.port) == (3, "proxy.local", 19003)


def test_acks_0_has_no_answer_to_wait_for(talk: Talk) -> None:
    talk.client(produce(UNCHECKED, acks=0) + request(HEARTBEAT, 4, 2))
    talk.upstream()
    talk.kafka(response(2))
    assert talk.answer() == response(2)


# ------------------------------------------------------------------------------------------------------ checked Produce


def append(talk: Talk, *more: tuple[str, int, memoryview], **options: Any) -> list[g.PendingAppend]:
    """A Produce to `checked-a` 0 (and more), every append of which is admitted; what was sent upstream is left."""
    talk.produces(A, *more, **options)
    pending_appends = []
    while talk.commands and isinstance(talk.commands[0], Call) and talk.commands[0].name == "submit":
        pending_appends.append(talk.submitted())
        talk.admit(pending_appends[-1])
    talk.sent(*pending_appends)
    return pending_appends


def test_checked_batch_is_fenced_and_sent_as_all(talk: Talk) -> None:
    (pending,) = append(talk, acks=1)
    sent = talk.sent_up()
    assert sent.acks == -1
    (data,) = sent.topics[0].partitions
    assert data.records is not None
    header = parse_batch_header(data.records)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (7000, 0, 5)
    talk.says(("checked-a", 0, 0, 5))
    assert talk.next(Call) == call("answered", pending, PartitionResult(0, 0, 5, -1, 0))
    talk.silent()  # the sequencer decides
    talk.complete(pending, PartitionResult(0, 0, 5, -1, 0))
    assert read(talk.answer()) == {("checked-a", 0): (0, 5, None)}
    assert talk.services.free_bytes == 1 << 20


def test_topic_id_is_used_upstream_and_name_downstream() -> None:
    talk = Talk(newest_produce=13)
    (pending,) = append(talk)
    sent = talk.sent_up()
    assert (sent.api_version, sent.topics[0].topic_id) == (13, T_ID)
    talk.says(("", 0, 100, -1), version=13, by_id=True)
    assert talk.next(m.TopicStale).topic == "checked-a"
    name, (_, answered) = talk.next(Call)
    assert name == "answered"
    assert answered.error_code == 3  # a client that names topics knows no UNKNOWN_TOPIC_ID
    talk.complete(pending, answered)
    # WRITE cannot be proved for an unknown topic, but Kafka itself has answered.
    assert talk.outcomes()["checked-a", 0] == (3, -1)


def test_requests_after_a_waiting_append_are_not_read(talk: Talk) -> None:
    talk.client(produce(A) + request(HEARTBEAT, 4, 2))
    pending = talk.submitted()
    assert not talk.next(m.ReadClient).on
    talk.silent()
    talk.admit(pending)
    talk.sent(pending)
    assert talk.next(m.ReadClient).on
    assert request(HEARTBEAT, 4, 2) in talk.upstream()


def test_early_answer_stays_in_the_socket(talk: Talk) -> None:
    pending = talk.sends()
    talk.client(request(HEARTBEAT, 4, 2))
    talk.upstream()
    reply = response(2, bytes(5) + b"y" * 50)
    talk.kafka(produced(("checked-a", 0, 45, -1)) + reply)
    assert talk.next(Call).name == "answered"
    assert not talk.next(m.ReadUpstream).on
    talk.silent()  # the sequencer reads the log
    talk.refused(pending)
    assert talk.next(m.ReadUpstream).on
    answers = talk.answer()
    assert answers.endswith(reply)
    assert read(answers[: -len(reply)]) == {("checked-a", 0): (44, 57, "OFFSET_MISMATCH …")}


def test_refused_fence_is_replaced_and_sent_again(talk: Talk) -> None:
    pending = talk.sends()
    talk.says(("checked-a", 0, 47, -1))
    talk.next(Call)
    talk.admit(pending, sequence=0)
    talk.sent(pending)
    again = talk.sent_up()
    assert parse_batch_header(again.topics[0].partitions[0].records or memoryview(b"")).base_sequence == 0
    talk.completed(pending, produced(("checked-a", 0, 0, 5)), A_AT_5)
    assert talk.outcomes() == {("checked-a", 0): (0, 5)}


def test_refused_and_accepted_partitions_share_one_response(talk: Talk) -> None:
    talk.produces(B, A, ("unchecked", 2, batch(b"p")))
    first = talk.submitted()
    assert first.partition == TopicPartition("checked-a", 0)  # in the order of partitions, not of the request
    talk.refused(first)
    second = talk.admitted()
    assert partitions_of(talk.upstream()) == {("checked-b", 1), ("unchecked", 2)}
    talk.completed(second, produced(("checked-b", 1, 0, 9), ("unchecked", 2, 0, 100)), B_AT_9)
    assert partitions_of(talk.upstream()) == {("checked-a", 0)}  # WRITE for `checked-b` was proved by the append
    talk.says(("checked-a", 0, INVALID_RECORD, -1))
    assert talk.outcomes() == {("checked-a", 0): (44, 57), ("checked-b", 1): (0, 9), ("unchecked", 2): (0, 100)}


def test_second_result_of_an_append_closes_its_connection() -> None:
    talk = Talk().may_write("checked-a", "checked-b")
    first, second = talk.half_admitted()
    talk.admit(second)
    talk.sent(first, second)
    talk.upstream()
    talk.complete(first, A_AT_5)
    talk.complete(first, replace(A_AT_5, base_offset=6))
    closing = talk.next(m.CloseClient)
    assert closing.fault is ContradictoryResults
    assert "has two results, 0 and 0" in closing.reason
    talk.silent()


def test_known_retry_does_not_refuse_the_whole_request() -> None:
    talk = Talk(refuse_whole_requests=True).may_write("checked-a")
    talk.produces(A, B)
    talk.complete(talk.submitted(), A_AT_5)  # its first attempt was appended
    second = talk.admitted()
    talk.upstream()
    talk.completed(second, produced(("checked-b", 1, 0, 9)), B_AT_9)
    assert talk.outcomes() == {("checked-a", 0): (0, 5), ("checked-b", 1): (0, 9)}


# ---------------------------------------------------------------------------------------------- proof of the permission


def test_write_is_proved_once_a_connection(talk: Talk) -> None:
    talk.refused(talk.submits())
    talk.upstream()
    talk.says(("checked-a", 0, INVALID_RECORD, -1))
    assert talk.outcomes() == {("checked-a", 0): (44, 57)}
    talk.refused(talk.submits(correlation=2))
    assert talk.outcomes() == {("checked-a", 0): (44, 57)}


def test_write_permission_expires_after_a_time() -> None:
    """A client that is only ever refused here would otherwise keep reading the log end after its right is revoked."""
    talk = Talk().may_write("checked-a")
    talk.now += 29.0
    talk.refused(talk.submits())
    assert talk.outcomes() == {("checked-a", 0): (44, 57)}
    talk.now += 2.0
    talk.refused(talk.submits())
    assert b"checked-a" in talk.upstream()
    talk.silent()


TRY_AGAIN = PartitionResult(0, NOT_LEADER, error_message="TRY_AGAIN a transaction is open")


@pytest.mark.parametrize("stated", [INVALID_RECORD, NOT_AUTHORIZED])
@pytest.mark.parametrize(
    ("result", "refusal"),
    [(MISMATCH, "offset_mismatch"), (TRY_AGAIN, "try_again"), (A_AT_5, None)],
    ids=["mismatch", "try again", "retry of an appended batch"],
)
def test_outcome_is_for_authorized_writers_only(
    result: PartitionResult, refusal: str | None, stated: int, talk: Talk
) -> None:
    result = replace(result, partition=0)
    talk.complete(talk.submits(), result, refusal)
    if refusal:
        talk.metric()
    assert [(p.partition, bytes(p.records or b"")) for p in talk.sent_up().topics[0].partitions] == [(0, b"")]
    talk.says(("checked-a", 0, stated, -1))
    allowed = (result.error_code, result.base_offset, result.error_message)
    assert read(talk.answer())["checked-a", 0] == (allowed if stated == INVALID_RECORD else (NOT_AUTHORIZED, -1, None))


@pytest.mark.parametrize(
    ("result", "silent_seconds"), [(MISMATCH, 2.2), (TRY_AGAIN, 0.3)], ids=["mismatch", "try again"]
)
def test_silent_kafka_gives_retriable_error_without_reason(
    result: PartitionResult, silent_seconds: float, talk: Talk
) -> None:
    talk.complete(talk.submits(), replace(result, partition=0), "refused")
    talk.metric()
    talk.upstream()
    talk.tick(silent_seconds)
    talk.silent()
    talk.tick(0.8)
    message = talk.fails(NOT_LEADER)
    assert message.startswith("TRY_AGAIN")
    assert "transaction" not in message
    talk.says(("checked-a", 0, INVALID_RECORD, -1))
    talk.silent()


@pytest.mark.parametrize("stated", [INVALID_RECORD, NOT_AUTHORIZED])
def test_unauthorized_state_topic_append_costs_one_query(stated: int, talk: Talk) -> None:
    talk.produces(("__state", 0, batch(b"unguard everything")))
    talk.metric()
    query = talk.upstream()
    assert b"__state" in query
    assert b"unguard" not in query
    talk.says(("__state", 0, stated, -1))
    code, base_offset, message = read(talk.answer())[("__state", 0)]
    assert (code, base_offset, message is None) == (NOT_AUTHORIZED, -1, stated == NOT_AUTHORIZED)
    talk.silent()


def test_unproved_success_is_unknown_and_not_retriable(talk: Talk) -> None:
    """Kafka answered -1 and appended; the sequencer found the batch; Kafka does not confirm WRITE."""
    pending = talk.sends()
    talk.completed(pending, produced(("checked-a", 0, -1, -1)), A_AT_5)
    assert partitions_of(talk.upstream()) == {("checked-a", 0)}  # an empty append: whether it may
    talk.tick(3.0)
    talk.fails(TIMED_OUT)


# ---------------------------------------------------------------------------------------------- the configs are unknown


@pytest.mark.parametrize("clients_log_in", [False, True])
def test_nothing_is_sent_while_configs_are_unknown(clients_log_in: bool) -> None:
    talk = Talk(is_fresh=False, clients_log_in=clients_log_in)
    talk.produces(UNCHECKED, ("checked-a", 0, batch(b"x")))
    talk.metric()
    assert talk.outcomes() == {("unchecked", 0): (6, -1), ("checked-a", 0): (6, -1)}


def test_acks_0_append_waits_for_the_configs() -> None:
    """A refusal would lose it: the client gets no answer."""
    talk = Talk(is_fresh=False)
    query = produce(UNCHECKED, acks=0)
    talk.client(query)
    assert not talk.next(m.ReadClient).on
    talk.tick(0)
    assert {type(command) for command in talk.commands} == {m.ReadClient}
    talk.commands.clear()
    talk.services.is_fresh = True
    talk.tick(0)
    talk.next(m.ReadClient)
    assert talk.upstream() == query


def test_expired_admission_is_returned_and_requested_again(talk: Talk) -> None:
    talk.services.sequencers.admissions_hold = False
    pending = talk.submits()
    talk.admit(pending)
    talk.canceled(pending)
    assert talk.submitted() is pending
    talk.silent()


# ------------------------------------------------------------------------------ what was sent before a failure was read


def read_later(talk: Talk, second: bytes) -> tuple[int, str]:
    """The error of a batch that was sent before the failure was read, and the first word of its message."""
    talk.commands.clear()
    talk.services.unread = 0
    talk.client(second)
    talk.metric()
    ((code, _, message),) = read(talk.answer()).values()
    return code, (message or "").split()[0]


@pytest.mark.parametrize("why", ["the whole request", "its batch"])
def test_append_after_an_unsent_batch_fails_too(why: str) -> None:
    talk = Talk(refuse_whole_requests=True).may_write("checked-a", "checked-b")
    second = produce(A_NEXT, correlation=2)
    if why == "the whole request":
        _, refused = talk.half_admitted()
        talk.services.unread = len(second)
        talk.refuse(refused)
    else:
        damaged = bytearray(expecting(5, b"x"))
        damaged[-1] ^= 1
        talk.services.unread = len(second)
        talk.produces(("checked-a", 0, memoryview(bytes(damaged))))
    assert read_later(talk, second)[1] == "PREDECESSOR_FAILED"
    talk.submits(correlation=3)  # sent knowing it


@pytest.mark.parametrize("topic", ["checked-a", "a topic whose check is known only then"])
def test_append_after_refusal_for_unknown_configs_fails_too(topic: str) -> None:
    """Given A, refused because the configs are too old, and B, sent after A and read with newer configs: another
    writer's record may be at A's offset, and B would be appended after that record."""
    talk = Talk(is_fresh=False)
    second = produce((topic, 0, expecting(6, b"y")), correlation=2)
    talk.services.unread = len(second)
    talk.produces((topic, 0, expecting(5, b"x")))
    talk.metric()
    assert read(talk.answer())[topic, 0][0] == 6

    talk.services.is_fresh = True
    talk.services.policy = lambda name: TopicPolicy(Check.ON)  # type: ignore[method-assign]
    assert read_later(talk, second) == (NOT_LEADER, "PREDECESSOR_FAILED")
    talk.produces((topic, 0, expecting(6, b"y")), correlation=3)  # sent knowing it
    assert talk.submitted().append.expected_base_offset == 6
    assert not talk.session._core.pipelines.failed


@pytest.mark.parametrize("where", ["read together", "in the socket"])
def test_appends_sent_before_a_refusal_fail_with_it(where: str) -> None:
    """The second would fit after another writer's record, but its client expects the first there."""
    talk = Talk().may_write("checked-a")
    first, second = produce(A), produce(A_NEXT, ("checked-a", 1, expecting(0, b"z")), correlation=2)
    talk.client(first + second if where == "read together" else first)
    talk.services.unread = len(second) if where == "in the socket" else 0
    talk.refuse(talk.submitted())
    if where == "in the socket":
        talk.services.unread = 0
        talk.client(second)
    others = [each.arguments[0] for each in talk.commands if isinstance(each, Call) and each.name == "submit"]
    assert [pending.partition.partition for pending in others] == [1]  # another partition is another pipeline
    talk.refuse(others[0])
    code, base_offset, message = read(to_client(talk)[1])[("checked-a", 0)]
    assert (code, base_offset) == (44, 57)  # the log end of the first
    assert (message or "").startswith("PREDECESSOR_FAILED OFFSET_MISMATCH")
    talk.commands.clear()
    assert talk.submits(6, correlation=3).append.expected_base_offset == 6  # sent knowing it


def test_batch_sent_before_reading_a_failure_fails_too(talk: Talk) -> None:
    first, slow = append(talk, ("checked-b", 0, expecting(9, b"y")))
    talk.upstream()
    talk.says(("checked-a", 0, 45, -1), ("checked-b", 0, 45, -1))
    talk.commands.clear()
    talk.refused(first)  # the other partition is not decided, so the client has no answer yet
    talk.produces(("checked-a", 0, expecting(57, b"sent before the refusal was read")), correlation=2)
    talk.metric()
    talk.refused(slow)
    one, other = frames(talk.answer())
    assert read(one) == dict.fromkeys([("checked-a", 0), ("checked-b", 0)], (44, 57, MISMATCH.error_message))
    code, _, message = read(other)["checked-a", 0]
    assert (code, (message or "").split()[0]) == (44, "PREDECESSOR_FAILED")
    talk.submits(57, correlation=3)  # sent after it


def test_append_after_an_unknown_one_fails_too() -> None:
    """It was not read earlier because another append waited. Another writer's record may be where the first was
    expected."""
    talk = Talk().may_write("checked-a", "checked-b")
    first = talk.sends(timeout_ms=1000)
    waits = produce(("checked-b", 0, expecting(1, b"y")), correlation=2, timeout_ms=9000)
    talk.client(waits + produce(A_NEXT, correlation=3))
    waiting = talk.submitted()
    assert not talk.next(m.ReadClient).on
    talk.tick(0.95)
    talk.lost(first)
    talk.commands.clear()
    talk.refuse(waiting)
    assert not [c for c in talk.commands if isinstance(c, Call)]
    code, _, message = read(to_client(talk)[1])["checked-a", 0]
    assert (code, (message or "").split()[0]) == (TIMED_OUT, "PREDECESSOR_FAILED")


def test_append_submitted_before_predecessors_end_fails_too() -> None:
    """1. Each of two requests has two partitions.
    2. The second is admitted at one of them and submitted at the other.
    3. There the first fails, so the sequencer would admit the second."""
    talk = Talk().may_write("checked-a", "checked-b")
    _, first = append(talk, ("checked-b", 0, expecting(5, b"x")))
    talk.upstream()
    talk.produces(A_NEXT, ("checked-b", 0, expecting(6, b"y")), correlation=2)
    talk.admit(talk.submitted())
    crossing = talk.submitted()
    talk.refused(first)
    talk.admit(crossing)
    talk.metric()
    talk.canceled(crossing)
    assert talk.next(Call).name == "sent"
    assert partitions_of(talk.upstream()) == {("checked-a", 0)}
    talk.silent()


def test_pipelined_appends_fail_with_the_same_message() -> None:
    talk = Talk().may_write("checked-a")
    batches = [expecting(6 + i, b"x") for i in range(3)]  # after one that failed
    talk.client(b"".join(produce(("checked-a", 0, each), correlation=1 + i) for i, each in enumerate(batches)))
    reported = "PREDECESSOR_FAILED TRY_AGAIN later"  # the sequencer's message
    talk.complete(talk.submitted(), PartitionResult(0, NOT_LEADER, error_message=reported))
    answers = b"".join(to_client(talk))
    assert answers.count(reported.encode()) == 3
    assert b"PREDECESSOR_FAILED PREDECESSOR_FAILED" not in answers


def test_append_waiting_at_another_sequencer_still_fails() -> None:
    talk = Talk().may_write("checked-b")
    talk.produces(("checked-b", 0, expecting(5, b"x")))
    first = talk.admitted()
    talk.upstream()
    talk.produces(("checked-a", 0, expecting(1, b"y")), ("checked-b", 0, expecting(6, b"z")), correlation=2)
    waiting = talk.submitted()  # at checked-a
    talk.complete(first, PartitionResult(0, NOT_LEADER, -1))
    assert talk.outcomes() == {("checked-b", 0): (NOT_LEADER, -1)}
    talk.admit(waiting)
    talk.metric()  # the other one is never submitted
    talk.sent(waiting)
    assert partitions_of(talk.upstream()) == {("checked-a", 0)}


# ----------------------------------------------------------------------------------------------------------------- ends


def test_silent_upstream_of_lost_client_is_closed_eventually(talk: Talk) -> None:
    pending = talk.sends()
    talk.report(m.ClientLost())
    talk.tick(talk.services.request_timeout_seconds + 1)
    talk.next(m.CloseUpstream)
    talk.lost(pending)


@pytest.mark.parametrize("end", [m.ClientLost(), m.UpstreamLost("the broker closed the connection")])
def test_lost_connection_cancels_waiting_appends_at_once(end: m.Event, talk: Talk) -> None:
    first, second = talk.half_admitted()
    talk.report(end)
    talk.canceled(first, second)
    talk.next(m.CloseUpstream if isinstance(end, m.ClientLost) else m.CloseClient)
    assert talk.services.free_bytes == 1 << 20
    talk.admit(second)  # was on its way
    talk.canceled(second)
    talk.silent()


def test_unread_requests_of_lost_client_are_dropped(talk: Talk) -> None:
    talk.client(produce(A) + produce(B, correlation=2)[:-1])
    talk.submitted()
    talk.report(m.ClientLost())
    assert talk.session.finished
    assert talk.services.free_bytes == 1 << 20


def test_late_outcome_is_answered_as_timed_out(talk: Talk) -> None:
    pending = talk.sends(timeout_ms=1000)
    talk.tick(0.95)
    talk.lost(pending)  # others must not wait for a stalled broker
    talk.fails(TIMED_OUT)
    talk.admit(pending)
    talk.canceled(pending)
    talk.completed(pending, produced(("checked-a", 0, 0, 5)), A_AT_5)
    talk.silent()
    assert talk.session.drained


def test_unawaited_append_also_times_out(talk: Talk) -> None:
    talk.produces(("checked-a", 0, batch(b"x")), acks=0, timeout_ms=1000)
    pending = talk.admitted()
    talk.upstream()
    talk.tick(0.95)
    talk.lost(pending)
    talk.silent()


# ----------------------------------------------------------------------------------------- requests of the proxy itself

LATER = request(HEARTBEAT, 4, 2, b"x" * 100)


def half_a_later_frame(talk: Talk) -> bytes:
    """The client has begun its next request, which is streamed; returns the rest of it."""
    talk.client(LATER[:40])
    assert talk.upstream() == LATER[:40]
    return LATER[40:]


def test_permission_probe_is_not_written_within_client_frame(talk: Talk) -> None:
    talk.refused(talk.submits())
    assert talk.upstream()  # this queries the permission
    rest = half_a_later_frame(talk)
    talk.client(rest)
    assert talk.upstream() == rest


def test_permission_probe_waits_for_half_sent_frame(talk: Talk) -> None:
    pending = talk.sends()
    rest = half_a_later_frame(talk)
    talk.refused(pending)
    talk.silent()
    talk.client(rest)
    sent = talk.upstream()
    assert sent.startswith(rest)
    assert len(sent) > len(rest)  # and then the probe


def test_append_is_not_resent_within_client_frame() -> None:
    talk = Talk().may_write("checked-a")
    pending = talk.sends()
    half_a_later_frame(talk)
    talk.admit(pending)
    assert talk.next(m.TopicStale) == m.TopicStale("checked-a")
    talk.metric()
    talk.canceled(pending)
    assert talk.outcomes() == {("checked-a", 0): (NOT_LEADER, -1)}


# ---------------------------------------------------------------------------------------------------- control messages


@pytest.mark.parametrize(("failure", "answer"), [(None, b"stored"), (NotStored("timed out"), b"timed out")])
def test_answer_says_whether_changes_are_stored(failure: NotStored | None, answer: bytes) -> None:
    finished = Finished(
        b"stored",
        changes=(TopicConfigChange("orders", None, deleted=True),),
        answer_not_stored=lambda failure: failure.reason.encode(),
    )
    talk = Talk(SimpleNamespace(begin=lambda *_: RequestRewriter(frame(b""), finish=lambda response: finished)))
    talk.client(request(METADATA, 9, 1))
    talk.upstream()
    talk.kafka(response(1))
    talk.report(m.Stored(talk.next(m.Store).token, failure))
    assert talk.answer() == answer


def test_software_and_requests_of_a_client_are_recorded() -> None:
    talk, counted = Talk(), []
    talk.services.count_request = lambda *each: counted.append(each)  # type: ignore[method-assign]
    software = Message(client_software_name="library", client_software_version="1.0")
    talk.client(encode_request_frame(API_VERSIONS, 3, 1, "app", software))
    for api_key, version in ((HEARTBEAT, 4), (API_VERSIONS, 99)):
        talk.client(request(api_key, version, 2))
    state = talk.session.state
    assert (state.client_id, state.software) == ("app", Software("library", "1.0"))
    assert counted == [(API_VERSIONS, 3), (HEARTBEAT, 4), (API_VERSIONS, UNKNOWN_VERSION)]


def test_time_in_the_proxy_is_without_the_sequencers() -> None:
    talk, seconds = Talk(), []
    talk.services.forwarded = seconds.append  # type: ignore[method-assign]
    pending = talk.submits()
    talk.now += 2
    talk.admit(pending)
    talk.produces(UNCHECKED, ("other", 0, batch(b"v")))
    assert seconds == [0.0, 0.0]


# ------------------------------------------------------------------------------------------------------ transactions v1


class Joining(Unchanged):
    """AddPartitionsToTxn adds `checked-a` 0, or WriteTxnMarkers writes there."""

    def __init__(self, put_off: bytes, transactional_id: str = "app") -> None:
        self.put_off = put_off
        self.joins = Joins(transactional_id, (WHERE,))

    def begin(self, api_key: int, version: int, frame: memoryview, local_host: str) -> RequestRewriter:
        forward = struct.pack(">i", len(frame)) + bytes(frame)
        finish = lambda response: Finished(struct.pack(">i", len(response)) + bytes(response))  # noqa: E731
        if api_key not in (ADD_PARTITIONS_TO_TXN, WRITE_TXN_MARKERS):
            return RequestRewriter(forward)
        return RequestRewriter(forward, finish=finish, joins=self.joins, answer_later=lambda: self.put_off)


WHERE = TopicPartition("checked-a", 0)
JOIN_AND_MORE = request(ADD_PARTITIONS_TO_TXN, 3, 1) + request(METADATA, 9, 2)


def about_to_join(*, put_off: bytes = b"", may_use: str | None = None) -> Talk:
    talk = Talk(Joining(put_off))
    talk.session._core.proofs.may_use = may_use
    talk.client(JOIN_AND_MORE)
    return talk


def joining(*, put_off: bytes = b"") -> Talk:
    talk = about_to_join(put_off=put_off, may_use="app")
    assert talk.next(Call) == call("join", WHERE, "app", 1)
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    return talk


@pytest.mark.parametrize("allowed", [True, False])
def test_only_authorized_transactions_reach_the_sequencers(allowed: bool) -> None:
    """Kafka refuses the others. Appends would wait for a transaction that never joins."""
    talk = about_to_join()
    assert talk.next(m.ReadClient) == m.ReadClient(False)
    assert struct.unpack(">hh", talk.upstream()[4:8]) == (END_TXN, 1)
    talk.silent()
    talk.kafka(response(1, struct.pack(">ih", 0, 49 if allowed else 53)))
    if allowed:
        assert talk.next(Call) == call("join", WHERE, "app", 1)
    else:
        assert talk.next(m.ReadClient) == m.ReadClient(True)
        assert talk.upstream() == JOIN_AND_MORE
        talk.kafka(response(1))
        assert talk.answer() == response(1)
    talk.silent()


@pytest.mark.parametrize("end", [None, m.UpstreamLost("it broke"), m.ClientLost()])
def test_sequencers_learn_of_transaction_begin_and_end(end: m.Event | None) -> None:
    talk = joining()
    talk.silent()
    assert talk.session.needs_ticks
    talk.call(talk.session.may_join, WHERE)
    assert talk.next(m.ReadClient) == m.ReadClient(True)
    assert talk.upstream() == JOIN_AND_MORE
    talk.report(end or m.UpstreamBytes(memoryview(response(1))))
    assert talk.next(Call) == call("joined", WHERE, "app", end is None)
    if end is None:
        assert talk.answer() == response(1)


@pytest.mark.parametrize("end", [None, m.UpstreamLost("it broke"), m.ClientLost()])
def test_join_is_not_sent_after_timeout_or_disconnect(end: m.Event | None) -> None:
    """The sequencers need not expect a marker: the coordinator got no request."""
    talk = joining(put_off=response(1))
    talk.now += talk.services.sequencer_wait_max_seconds + 0.1
    talk.report(end or m.Tick())
    assert talk.next(Call) == call("joined", WHERE, "app", True)
    if end is None:
        assert talk.next(m.ReadClient) == m.ReadClient(True)
        assert talk.upstream() == request(METADATA, 9, 2)
        assert talk.answer() == response(1)
    talk.call(talk.session.may_join, WHERE)
    assert not [each for each in talk.commands if isinstance(each, m.ToUpstream)]


# --------------------------------------------------------------------------------------- topics whose ids are not known


def test_unchecked_topic_without_id_is_sent_by_name() -> None:
    talk = Talk(newest_produce=13, unknown_topics=frozenset({"unchecked"}))
    (pending,) = append(talk, UNCHECKED)
    first, second = (parse_produce_request(memoryview(each)[4:]) for each in frames(talk.upstream()))
    assert (first.api_version, first.topics[0].topic_id, first.acks) == (13, T_ID, -1)
    assert (second.api_version, [topic.name for topic in second.topics]) == (9, ["unchecked"])
    talk.says(("checked-a", 0, 0, 5), version=13, by_id=True)
    talk.says(("unchecked", 0, 0, 70))
    talk.next(Call)
    talk.complete(pending, A_AT_5)
    assert talk.outcomes() == {("checked-a", 0): (0, 5), ("unchecked", 0): (0, 70)}


def test_checked_topic_without_id_gets_retriable_error() -> None:
    talk = Talk(newest_produce=13, unknown_topics=frozenset({"checked-a"})).may_write("checked-a")
    second = produce(A_NEXT, correlation=2)
    pending = talk.submits()
    talk.services.unread = len(second)
    talk.admit(pending)
    assert talk.next(m.TopicStale) == m.TopicStale("checked-a")
    talk.metric()
    talk.canceled(pending)
    assert talk.outcomes() == {("checked-a", 0): (NOT_LEADER, -1)}
    # What was sent after it fails too.
    talk.services.unknown_topics = frozenset()
    assert read_later(talk, second) == (NOT_LEADER, "PREDECESSOR_FAILED")


# ------------------------------------------------------------------------------------------------------------ bad peers


def test_unexpected_answer_ends_the_connection(talk: Talk) -> None:
    talk.kafka(response(9))
    assert talk.next(m.CloseClient).fault is UpstreamProtocolError
    talk.next(m.CloseUpstream)


def test_invalid_answer_during_close_fails_the_append(talk: Talk) -> None:
    pending = talk.sends()
    talk.produces(("unchecked", 0, batch(b"v", producer=(7000, 32_767, 0))), correlation=2)
    assert talk.next(m.CloseClient).fault is ClientProtocolError
    talk.says(("checked-a", 1, 0, 5))
    talk.lost(pending)
    talk.next(m.CloseUpstream)


def test_earlier_requests_are_answered_before_a_faulty_one_ends_the_connection(talk: Talk) -> None:
    pending = talk.sends()
    talk.client(request(HEARTBEAT, 4, 2))
    talk.upstream()
    talk.client(request(999, 0, 3) + request(HEARTBEAT, 4, 4))
    assert not talk.next(m.ReadClient).on
    talk.completed(pending, produced(("checked-a", 0, 0, 5)), A_AT_5)
    assert talk.outcomes() == {("checked-a", 0): (0, 5)}
    talk.kafka(response(2))
    assert talk.answer() == response(2)
    talk.tick(READ_SECONDS)
    closed = talk.next(m.CloseClient)
    assert (closed.fault, closed.hang_up) == (ClientProtocolError, True)
    talk.silent()


def test_waiting_append_is_sent_before_an_impossible_frame_ends_the_connection(talk: Talk) -> None:
    pending = talk.submits()
    talk.client(struct.pack(">i", -5))
    assert not talk.next(m.ReadClient).on
    talk.admit(pending)
    talk.sent(pending)
    talk.upstream()
    talk.completed(pending, produced(("checked-a", 0, 0, 5)), A_AT_5)
    assert talk.outcomes() == {("checked-a", 0): (0, 5)}
    talk.tick(READ_SECONDS)
    assert talk.next(m.CloseClient).fault is ClientProtocolError


@pytest.mark.parametrize(
    "faulty",
    [produce(B, acks=0, correlation=2), produce(B, B, correlation=2)],
    ids=["expected-offset-with-acks-0", "partition-twice"],
)
def test_earlier_requests_are_answered_before_one_that_waited_ends_the_connection(faulty: bytes, talk: Talk) -> None:
    pending = talk.sends()
    talk.services.absent = {TopicPartition("checked-b", 1)}
    talk.client(faulty)
    talk.next(m.TopicStale)
    talk.services.absent.clear()
    talk.report(m.TopicNews())
    assert not talk.next(m.ReadClient).on
    talk.silent()
    talk.completed(pending, produced(("checked-a", 0, 0, 5)), A_AT_5)
    assert talk.outcomes() == {("checked-a", 0): (0, 5)}
    talk.tick(READ_SECONDS)
    assert talk.next(m.CloseClient).fault is ClientProtocolError


def test_request_that_waited_ends_the_connection_before_an_impossible_frame(talk: Talk) -> None:
    talk.services.absent = {TopicPartition("checked-b", 1)}
    talk.client(produce(B, B) + struct.pack(">i", -5))
    talk.next(m.TopicStale)
    assert not talk.next(m.ReadClient).on
    talk.services.absent.clear()
    talk.report(m.TopicNews())
    assert talk.next(m.CloseClient).fault is ClientProtocolError


def test_faulty_request_ends_the_connection_although_kafka_does_not_answer(talk: Talk) -> None:
    talk.client(request(HEARTBEAT, 4, 1))
    talk.upstream()
    talk.client(request(999, 0, 2))
    talk.next(m.ReadClient)
    assert talk.session.needs_ticks
    talk.tick(talk.services.request_timeout_seconds - 1)
    talk.silent()
    talk.tick(1)
    assert talk.next(m.CloseClient).fault is ClientProtocolError


def test_an_answer_out_of_order_ends_the_connection(talk: Talk) -> None:
    talk.client(request(HEARTBEAT, 4, 1) + request(HEARTBEAT, 4, 2))
    talk.upstream()
    talk.kafka(response(2))
    assert "correlation id 2 where 1" in talk.next(m.CloseClient).reason


@pytest.mark.parametrize(("api_key", "version"), [(4, 0), (999, 0), (-1, 0), (HEARTBEAT, 99), (0, 2)])
def test_what_is_not_advertised_ends_the_connection(api_key: int, version: int, talk: Talk) -> None:
    talk.client(request(api_key, version, 1))
    assert talk.next(m.CloseClient).fault is ClientProtocolError
    talk.silent()


def test_unusable_broker_id_closes_only_the_connection() -> None:
    known = Known(StateView("cluster-1"), lambda topic: {}, lambda topic: None, "__state")
    talk = Talk(RequestRewriters(AddressBook(19092), lambda: known, frozenset[int], lambda nodes: None))
    talk.client(encode_request_frame(METADATA, 9, 1, "test", Message(topics=[])))
    talk.upstream()
    broker = Message(node_id=60_000, host="kafka", port=9092)
    talk.kafka(encode_response_frame(METADATA, 9, 1, Message(brokers=[broker], topics=[])))
    closed = talk.next(m.CloseClient)
    assert closed.fault is UpstreamProtocolError
    assert "60000" in closed.reason


# ------------------------------------------------------------------------------------------------------ memory, quotas


def test_memory_that_is_not_there_is_waited_for() -> None:
    talk = Talk(free_bytes=10)
    query = request(METADATA, 9, 1, b"z" * 20_000)
    talk.client(query)
    assert not talk.next(m.ReadClient).on
    talk.tick(0)
    talk.commands.clear()
    talk.services.free_bytes = 30_000
    talk.tick(0)
    talk.next(m.ReadClient)
    assert talk.upstream() == query


def test_small_control_messages_pass_when_memory_is_full() -> None:
    talk = Talk(free_bytes=0)
    query = request(METADATA, 9, 1, b"z" * 1_000)
    assert talk.session.state.collecting_since is None
    talk.client(query[:-1])
    assert talk.session.state.collecting_since == talk.now
    talk.client(query[-1:])
    assert talk.session.state.collecting_since is None
    assert talk.upstream() == query
    assert talk.services.free_bytes == 0


def test_too_many_unanswered_requests_are_not_read() -> None:
    talk = Talk(in_flight_requests_max=2)
    for correlation in (1, 2, 3):
        talk.client(request(HEARTBEAT, 4, correlation))
    assert talk.upstream() + talk.upstream() == request(HEARTBEAT, 4, 1) + request(HEARTBEAT, 4, 2)
    assert not talk.next(m.ReadClient).on
    talk.silent()
    talk.kafka(response(1))
    assert talk.next(m.ReadClient).on
    assert talk.upstream() == request(HEARTBEAT, 4, 3)


class AnswersHere:
    """Rewriters that answer without Kafka."""

    def begin(self, api_key: int, version: int, frame: memoryview, local_host: str) -> RequestRewriter:
        return RequestRewriter(None, answer=b"\0\0\0\4" + bytes(frame[4:8]))


def test_answers_made_here_stop_at_the_quota() -> None:
    """256 KB of the smallest requests blocked all other connections until the config lease expired."""
    talk = Talk(AnswersHere())
    talk.client(b"".join(request(METADATA, 9, correlation) for correlation in range(50)))
    answers = []
    while talk.commands:
        answers.append(sum(len(each.chunks) for each in talk.commands if isinstance(each, m.ToClient)))
        reading = [each.on for each in talk.commands if isinstance(each, m.ReadClient)]
        assert reading[-1] is (sum(answers) == 50) is not talk.session.over_quota
        talk.commands.clear()
        talk.tick(0)
        talk.silent()
        talk.report(m.QuotaRenewed())
    assert answers == [16, 16, 16, 2]


class ChangesAnswers:
    """Rewriters that decode every answer of Kafka."""

    def begin(self, api_key: int, version: int, frame: memoryview, local_host: str) -> RequestRewriter:
        forward = struct.pack(">i", len(frame)) + bytes(frame)
        return RequestRewriter(forward, finish=lambda answer: Finished(struct.pack(">i", len(answer)) + bytes(answer)))


def queries(count: int) -> bytes:
    return b"".join(request(METADATA, 9, correlation) for correlation in range(count))


def replies(*correlations: int) -> bytes:
    return b"".join(response(correlation, bytes(4000)) for correlation in correlations)


def changing(queried: int = 10) -> Talk:
    """Has sent that many requests whose answers are decoded, and has its whole quota."""
    talk = Talk(ChangesAnswers(), in_flight_requests_max=100)
    talk.client(queries(queried))
    talk.upstream()
    talk.report(m.QuotaRenewed())
    talk.silent()
    return talk


def test_answers_that_are_decoded_stop_at_the_quota() -> None:
    talk = changing()
    talk.kafka(replies(*range(10)))
    for number in range(0, 10, 2):
        if number:
            assert talk.session.over_quota
            talk.tick(0)
            talk.silent()
            talk.report(m.QuotaRenewed())
        assert talk.next(m.ReadUpstream).on is (number == 8)
        assert talk.answer() == replies(number, number + 1)
        talk.silent()
    assert not talk.session.over_quota


def test_relayed_answers_need_no_quota() -> None:
    talk = changing(3)
    talk.client(request(HEARTBEAT, 4, 3))
    assert talk.upstream()
    for correlation in (0, 1):
        talk.kafka(replies(correlation))
        assert talk.answer()
    talk.kafka(replies(2))
    assert not talk.next(m.ReadUpstream).on
    talk.silent()
    assert talk.session.over_quota
    talk.report(m.QuotaRenewed())
    assert talk.next(m.ReadUpstream).on
    assert talk.answer()
    talk.session._holds.quota = 0
    talk.kafka(response(3))
    assert talk.answer() == response(3)


def test_one_session_at_a_time_gets_new_quota() -> None:
    """With a hundred clients that query all metadata and never read, another client had 0 appends per second."""
    services = ServicesStandIn(in_flight_requests_max=100)
    dispatcher = Dispatcher(services, ChangesAnswers(), g.SequencerLimits(), HeaderNames())  # type: ignore[arg-type]
    for connection in (1, 2, 3):
        dispatcher.open(connection, "proxy.local", 100.0)
        dispatcher.session_event(connection, m.ClientBytes(memoryview(queries(10))), 100.0)
        dispatcher.session_event(connection, m.UpstreamBytes(memoryview(replies(*range(10)))), 100.0)
    dispatcher.session_event(2, m.ClientLost(), 100.0)
    served: list[int] = []
    while dispatcher.over_quota:
        to_clients = [
            action.connection
            for action in dispatcher.renew_quota(100.0)
            if isinstance(action, ForConnection) and isinstance(action.command, m.ToClient)
        ]
        assert len(to_clients) <= 1
        served += to_clients
    assert served == [1, 3] * 5


# -------------------------------------------------------- partitions that are absent, or cannot be appended to for long

ABSENT = TopicPartition("checked-b", 7)
UNKNOWN_PARTITION = 3


def lacking(*partitions: TopicPartition) -> Talk:
    talk = Talk()
    talk.services.absent = set(partitions)
    return talk


def metadata_is_read(talk: Talk) -> None:
    talk.services.confirmed_at["checked-b"] = talk.now
    talk.report(m.TopicNews())


def test_absent_partitions_are_answered_before_waiting() -> None:
    talk = lacking(*(TopicPartition("checked-b", each) for each in range(2000)))
    talk.services.frame_bytes_max = talk.services.free_bytes = 1 << 24
    talk.produces(A, *(("checked-b", each, batch(b"x")) for each in range(2000)))
    talk.read_elsewhere()
    assert talk.next(m.TopicStale).topic == "checked-b"  # once, and nothing is submitted meanwhile
    talk.silent()
    assert talk.session.needs_ticks
    metadata_is_read(talk)
    for _ in range(2000):
        talk.metric()
    pending = talk.admitted()
    assert pending.partition == TopicPartition("checked-a", 0)
    talk.upstream()
    talk.completed(pending, produced(("checked-a", 0, 0, 5)), A_AT_5)
    got = read(talk.answer())
    assert got.pop(("checked-a", 0)) == (0, 5, None)
    assert set(got.values()) == {(UNKNOWN_PARTITION, -1, None)}
    assert len(got) == 2000


def test_topic_hidden_from_the_proxy_is_refused() -> None:
    """Error 3 would be retried until a timeout."""
    talk = lacking(ABSENT)
    talk.services.denied_topics = {ABSENT.topic}
    talk.produces((*ABSENT, expecting(0, b"x")))
    talk.next(m.TopicStale)
    metadata_is_read(talk)
    assert talk.fails(29, ABSENT).startswith("NOT_AUTHORIZED topic=checked-b: the proxy's own user lacks")


def test_new_partition_is_appended_once_metadata_shows_it() -> None:
    talk = lacking(ABSENT)
    talk.services.confirmed_at["checked-b"] = talk.now - 0.1  # older than the request, this proves no absence
    talk.produces((*ABSENT, expecting(0, b"x")))
    talk.next(m.TopicStale)
    talk.silent()
    talk.services.absent = set()
    metadata_is_read(talk)
    assert talk.submitted().partition == ABSENT


def test_absent_partition_is_retriable_without_timely_metadata() -> None:
    talk = lacking(ABSENT)
    talk.produces((*ABSENT, expecting(0, b"x")), timeout_ms=3000)
    talk.commands.clear()
    talk.tick(1.1)
    talk.fails(NOT_LEADER, ABSENT)


def test_append_after_one_to_absent_partition_fails_too() -> None:
    talk = lacking(ABSENT)
    first, second = (
        produce((*ABSENT, batch(b"x", producer=(1000, 0, each))), correlation=1 + each) for each in range(2)
    )
    talk.client(first)
    talk.services.unread = len(second)
    talk.commands.clear()
    metadata_is_read(talk)
    talk.fails(UNKNOWN_PARTITION, ABSENT)
    talk.services.absent = set()
    assert read_later(talk, second)[0] == UNKNOWN_PARTITION  # it would have been appended without its predecessor


def in_part() -> tuple[Talk, g.PendingAppend, g.PendingAppend]:
    """An append to checked-a was sent before the one to checked-b, which waits."""
    talk = Talk().may_write("checked-a", "checked-b")
    talk.produces(A, B, ("unchecked", 2, batch(b"p")))
    first = talk.submitted()
    talk.admit(first)
    second = talk.submitted()
    assert talk.session.needs_ticks
    talk.tick(0.01)
    talk.silent()
    talk.tick(0.02)
    talk.sent(first)
    assert partitions_of(talk.upstream()) == {("checked-a", 0), ("unchecked", 2)}
    return talk, first, second


def first_is_answered(talk: Talk, first: g.PendingAppend) -> None:
    talk.completed(first, produced(("checked-a", 0, 0, 5), ("unchecked", 2, 0, 70)), A_AT_5)


def partitions_of(frame: bytes) -> set[tuple[str, int]]:
    sent = parse_produce_request(memoryview(frame)[4:])
    return {(topic.name, each.partition) for topic in sent.topics for each in topic.partitions}


def test_admitted_append_is_sent_before_slow_one() -> None:
    talk, first, second = in_part()
    first_is_answered(talk, first)
    talk.silent()
    talk.admit(second)
    talk.sent(second)
    assert partitions_of(talk.upstream()) == {("checked-b", 1)}
    talk.completed(second, produced(("checked-b", 1, 0, 9)), B_AT_9)
    assert talk.outcomes() == {("checked-a", 0): (0, 5), ("checked-b", 1): (0, 9), ("unchecked", 2): (0, 70)}
    assert talk.services.free_bytes == 1 << 20


def test_drain_reports_sent_appends_unknown_and_unsent_retriable() -> None:
    talk, first, second = in_part()
    talk.report(m.Drain(talk.now + 0.05))
    talk.canceled(second)
    talk.lost(first)  # its outcome is read from the log
    talk.metric()
    assert not talk.next(m.ReadClient).on
    got = {key: value[0] for key, value in read(talk.answer()).items()}
    assert got == {("checked-a", 0): TIMED_OUT, ("checked-b", 1): NOT_LEADER, ("unchecked", 2): TIMED_OUT}


def test_lost_upstream_leaves_only_sent_appends_in_doubt() -> None:
    talk, first, second = in_part()
    talk.report(m.UpstreamLost("lost"))
    talk.canceled(second)
    talk.lost(first)
    assert talk.next(m.CloseClient).fault is None
    talk.report(m.ClientLost())
    talk.silent()  # it is closed already
    assert talk.session.finished
    assert talk.services.free_bytes == 1 << 20


@pytest.mark.parametrize("answered", [False, True])
def test_lost_client_cancels_only_unsent_appends(answered: bool) -> None:
    talk, first, second = in_part()
    if answered:
        first_is_answered(talk, first)
    talk.report(m.ClientLost())
    talk.canceled(second)
    if not answered:
        talk.silent()  # Kafka's answer to the first is still read
        first_is_answered(talk, first)
    talk.next(m.CloseUpstream)
    assert talk.services.free_bytes == 1 << 20


def test_whole_request_blocks_no_partition_while_waiting() -> None:
    talk = Talk(refuse_whole_requests=True)
    first, second = talk.half_admitted()
    talk.tick(0.03)
    talk.canceled(first)
    talk.silent()
    talk.admit(second)
    talk.canceled(second)  # or two requests could wait for each other
    assert talk.submitted() is first
    talk.admit(first)
    assert talk.submitted() is second
    talk.admit(second)
    talk.sent(first, second)
    assert partitions_of(talk.upstream()) == {("checked-a", 0), ("checked-b", 1)}


def test_partitions_after_a_slow_one_get_retriable_error() -> None:
    talk = Talk().may_write("checked-a", "checked-b")
    talk.produces(A, B, timeout_ms=3000)
    first = talk.submitted()
    talk.now += 2.8
    talk.complete(first, PartitionResult(0, NOT_LEADER), "try_again")
    talk.metric()
    talk.metric()
    assert talk.outcomes() == dict.fromkeys([("checked-a", 0), ("checked-b", 1)], (NOT_LEADER, -1))
