"""One client connection and its upstream connection: which bytes just pass, which are read, who answers what, when.

Sans-IO: events in, commands out (`messages.py`), no clock of its own.

Order
-----
A broker answers the requests of a connection in their order, and so do we, though some answers are made here and some
requests have none (acks=0). Every request that will be answered has one `Slot`, in two queues:

- `_to_client`: every slot, in the order of the client's requests. Only the front one may write to the client.
- `_from_upstream`: the slots that the broker will answer, in the order they were sent.

An answer that belongs to the front slot and needs no reading is streamed through. One that comes while the front
slot is still undecided (a refusal that waits for a read of the log, say) stays in the socket: reading from upstream
stops, and with it, by TCP, the broker. The same holds the other way: while a guarded Produce waits for its turn at a
gate, nothing behind it is read, as a broker would not either (it handles one request of a connection at a time).

A client that vanishes does not take its appends with it: what is on its way upstream is waited for, up to a bound, so
that the gates learn the outcome; only then is the upstream connection closed.

Among worker processes only one owns what cannot be shared (see `_owners`). The session of another that comes to such a
request reads no further and waits until nothing is under way; then it ends, and the owner goes on with its
connections, from the first byte of that request.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol
from uuid import UUID

from fencepost_policies.append import Check, Refusal
from fencepost_policies.values import value
from fencepost_proxy.errors import ClientProtocolError, Error, ProtocolError, UpstreamProtocolError
from fencepost_proxy.partitions.events import (
    Answered,
    Lost,
    Offered,
    Sent,
    Ticket,
    TransactionJoined,
    TransactionJoins,
    Withdrawn,
)
from fencepost_proxy.partitions.gate import Gate, sent_behind
from fencepost_proxy.session.cutter import CutterState, FrameCutter
from fencepost_proxy.session.exchange import Exchanges
from fencepost_proxy.session.messages import (
    ClientBytes,
    ClientLost,
    ClientPassed,
    CloseClient,
    CloseUpstream,
    Command,
    Count,
    Event,
    Handed,
    HandOver,
    ReadClient,
    ReadUpstream,
    Store,
    Stored,
    Tick,
    ToClient,
    ToGate,
    ToPartition,
    TopicStale,
    ToUpstream,
    TurnEnded,
    TurnGranted,
    UpstreamBytes,
    UpstreamLost,
    UpstreamPassed,
)
from fencepost_proxy.session.turn import Bid, Turn, make_ticket, refused, sent_batch
from fencepost_proxy.topics.planning import Joins
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.types import TopicPartition
from fencepost_proxy.wire.apis import (
    ALTER_CONFIGS,
    API_VERSIONS,
    APIS,
    CREATE_TOPICS,
    DELETE_TOPICS,
    INCREMENTAL_ALTER_CONFIGS,
    PRODUCE,
    Treatment,
    api_name,
)
from fencepost_proxy.wire.batch import HeaderNames
from fencepost_proxy.wire.produce import (
    FLEXIBLE,
    NodeEndpoint,
    PartitionData,
    PartitionResult,
    ProducePeek,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    encode_produce_request,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
    peek_produce,
)
from fencepost_proxy.wire.shortcuts import names_no_broker
from fencepost_proxy.wire.single import encode_single, encode_single_answer, read_single, read_single_answer

_REQUEST_PREFIX = struct.Struct(">hhi")
_FRAME_PREFIX = struct.Struct(">ihhi")
_RESPONSE_PREFIX = struct.Struct(">ii")
_INT32 = struct.Struct(">i")
_ACKS_TIMEOUT = struct.Struct(">hi")
_LENGTH_BYTES = 4
#: API key, version, correlation id; and the shortest response is its correlation id.
_REQUEST_BYTES_MIN = 8
_RESPONSE_BYTES_MIN = 4
#: Answers that say that what is known of the topic (its id, its leaders) is out of date.
_STALE = frozenset({Error.UNKNOWN_TOPIC_OR_PARTITION, Error.NOT_LEADER_OR_FOLLOWER})
#: Produce requests below it carry no v2 record batches, and brokers since 4.0 refuse them.
_PRODUCE_VERSION_MIN = 3
#: The first version whose response can name a broker's address.
_PRODUCE_ENDPOINTS_FROM = 10
#: Names topics by id: a stamped append cannot land in a topic that was deleted and created anew.
_PRODUCE_BY_ID = 13
#: A Produce header is read from as much of the frame's start as this; longer ones are collected whole.
_PEEK_BYTES_MAX = 4096
#: Answers made here without Kafka, per event: it is Kafka's pace that keeps one client from all the others' time.
_MADE_HERE_MAX = 16
#: Control messages up to this size do not count as held in memory.
_SMALL_FRAME_BYTES = 16 * 1024
#: Clients give up at `timeout_ms`; what is not known by then is told a little earlier.
_ANSWER_BY = 0.9
#: Answers that say neither where a log ends nor how it is guarded: anybody may have them, without waiting for Kafka.
_TELLS_NOTHING = frozenset({Error.NONE, Error.NOT_LEADER_OR_FOLLOWER, Error.REQUEST_TIMED_OUT})


#: API key -> the versions that pass without a look, and whether the state topic must not occur in their bytes.
_PASSES = {
    key: (api.min_version, api.max_version, Treatment.INSPECT_REQUEST in api.treatment)
    for key, api in APIS.items()
    if api.treatment in (Treatment.RELAY, Treatment.INSPECT_REQUEST)
}


class Surroundings(Protocol):
    """What a session may ask of the process it runs in. Answers hold at the moment of asking."""

    frame_bytes_max: int
    in_flight_requests_max: int
    gate_wait_max_seconds: float
    request_timeout_seconds: float
    decompressed_bytes_max: int
    header_names: HeaderNames
    refuse_whole_requests: bool
    state_topic: str

    @property
    def state_topic_marks(self) -> tuple[bytes, ...]:
        """Bytes that occur in every request that concerns the state topic: its name, its id."""

    @property
    def shared_producer_id(self) -> int:
        """What stamped batches are appended under, -1 while it is not known."""

    @property
    def tag(self) -> int:
        """What tells this process's stamps from those of the others, 1 to 255; 0 while that is not settled."""

    def alone(self, now: float) -> bool:
        """Whether no other process is known to serve the cluster."""

    def taken_over(self, now: float) -> bool:
        """Whether what processes before this one had under way is over."""

    def fresh(self, now: float) -> bool:
        """Whether the virtual configs are loaded and recent enough to rely on."""

    def policy(self, topic: str) -> TopicPolicy | None:
        """The policy of a guarded topic, None for one that is not."""

    def gate(self, partition: TopicPartition) -> Gate | None:
        """The partition's gate, None if it has not been needed lately."""

    def topic_id(self, topic: str) -> UUID | None: ...
    def leader_epoch(self, partition: TopicPartition) -> int:
        """As last heard of, -1 if it was not."""

    def produce_version_max(self) -> int:
        """The newest Produce version that every broker understands."""

    def may_send(self, ticket: Ticket, now: float) -> bool:
        """Whether the gate's grant still holds."""

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        """The same broker at the address by which clients reach it."""

    def count_request(self, api_key: int) -> None:
        """For the metrics; the key is one of the table's."""

    def unread_bytes(self, connection: int) -> int:
        """What the client has sent and nobody has read from its socket yet."""

    def gate_waited(self, seconds: float) -> None:
        """For the metrics: from an append's offer to its turn."""

    def forwarded(self, waited_seconds: float) -> None:
        """For the metrics: a request goes up now; it was read so long before this event, gates not counted."""

    def answered(self, waited_seconds: float) -> None:
        """For the metrics: an answer of Kafka's goes to its client now; it was read so long before this event."""

    def reserve(self, byte_count: int) -> bool:
        """Takes from the memory that all connections share; False if there is not enough now."""

    def release(self, byte_count: int) -> None: ...


#: The appends of one producer to one partition, on one connection.
_Chain = tuple[TopicPartition, int]


@dataclass(slots=True)
class _Failed:
    """Why a chain failed, and up to which byte of the connection its client cannot have known.

    A, expecting 5, and B, expecting 6, are sent together. Another writer wins 5, A is refused – and B would land behind
    the other's record as if it were A. So what was sent before the answer to A was, falls with it. How much that is
    nobody can tell for certain from here: at least what had arrived when the answer left.
    """

    result: PartitionResult
    behind_bytes: float = float("inf")


class _Answer(Enum):
    #: Streamed from upstream to the client as it is.
    RELAYED = auto()
    #: The same, once it is known to name no broker's address: a Produce response, of 100 bytes or so.
    RELAYED_UNLESS_BROKERS = auto()
    #: Collected from upstream; `Slot.on_response` makes the answer of it, now or later.
    MADE_FROM_RESPONSE = auto()
    #: Not from upstream at all.
    MADE_HERE = auto()
    #: One guarded append that took the short way (`Slot.single`); its answer does, too, if it is the one that is due.
    SINGLE = auto()


@dataclass(slots=True)
class _Single:
    """What is kept of a guarded append that took the short way: enough to make a `Turn` of it after all."""

    ticket: Ticket
    frame: memoryview
    starts_at: int
    answer_by: float
    topic: bytes
    topic_id: bytes


@value
class _Known:
    """Of a Produce request: what the next one of the same client is likely to begin with, and what that says.

    `prefix` – from the client id to the end of the only topic's name. `before_acks`, `topic` – parts of it, the name
    with its length. `guarded` – it went to a gate; else it could be streamed.
    """

    version: int
    prefix: bytes
    before_acks: bytes
    timeout_ms: int
    topic_name: str
    topic: bytes
    guarded: bool


class Slot:
    """One request that somebody waits for."""

    __slots__ = (
        "answer",
        "answered_at",
        "api_key",
        "chains",
        "chunks",
        "correlation_id",
        "done",
        "inner",
        "on_response",
        "reserved_bytes",
        "single",
        "version",
    )

    def __init__(self, api_key: int, version: int, correlation_id: int, answer: _Answer) -> None:
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.answer = answer
        self.on_response: Callable[[memoryview], None] | None = None
        self.chunks: list[bytes | memoryview] = []
        self.done = False
        #: When Kafka's answer was here; None where it has passed, or does not come from Kafka.
        self.answered_at: float | None = None
        #: Asked by us on behalf of another slot: no client's request of its own.
        self.inner = False
        self.single: _Single | None = None
        self.reserved_bytes = 0
        #: Failed appends that its answer tells of: until it is read, what follows them follows a hole.
        self.chains: list[_Chain] = []


#: Requests that may change virtual configs: one process puts them in an order.
_OWNERS_APIS = frozenset({CREATE_TOPICS, DELETE_TOPICS, ALTER_CONFIGS, INCREMENTAL_ALTER_CONFIGS})

_NOTHING_KNOWN = _Known(-1, b"", b"", 0, "", b"", False)


class Session:
    """See the module's docstring. `handle` is the only way in.

    `local_host` is the address by which this client reached us, which is what it is told for the brokers' listeners
    where none is configured. `opened_at` – since when its upstream connection is open, monotonic seconds. `owner` –
    whether this process owns what only one may; a session that goes on in another process begins with `handed`.
    """

    __slots__ = (
        "_answer_by",
        "_around",
        "_client",
        "_client_out",
        "_client_paused",
        "_closing",
        "_collecting_bytes",
        "_collecting_since",
        "_commands",
        "_drain_until",
        "_exchanges",
        "_failed_chains",
        "_from_upstream",
        "_joins",
        "_known",
        "_made_here",
        "_may_write",
        "_next_token",
        "_now",
        "_opened_at",
        "_owner",
        "_owner_wanted",
        "_probes",
        "_received_bytes",
        "_stores",
        "_taken_frame",
        "_to_client",
        "_turn",
        "_turn_slot",
        "_turns",
        "_upstream",
        "_upstream_out",
        "_upstream_paused",
        "client_gone",
        "client_id",
        "connection",
        "local_host",
        "upstream_gone",
    )

    def __init__(
        self,
        connection: int,
        local_host: str,
        around: Surroundings,
        exchanges: Exchanges,
        opened_at: float,
        *,
        owner: bool = True,
    ) -> None:
        self.connection = connection
        self._owner = owner
        self._owner_wanted = False
        self._taken_frame: bytes | None = None  # what the owner is wanted for, where it was collected already
        self._opened_at = opened_at
        self.local_host = local_host
        self.client_id: str | None = None
        self._around = around
        self._exchanges = exchanges
        self._client = FrameCutter(_REQUEST_BYTES_MIN, around.frame_bytes_max, ClientProtocolError)
        self._upstream = FrameCutter(_RESPONSE_BYTES_MIN, 2**31 - 1, UpstreamProtocolError)
        self._to_client: list[Slot] = []  # lists: short ones, and an empty deque takes 760 bytes
        self._from_upstream: list[Slot] = []
        self._turn: Turn | None = None  # the one that waits at a gate; nothing behind it is read
        self._turn_slot: Slot | None = None
        self._turns: dict[Slot, Turn] = {}  # sent, not completely answered
        self._answer_by: dict[Slot, float] = {}
        self._may_write: dict[str, None] = {}  # topics this client has proved WRITE for, on this connection
        self._failed_chains: dict[_Chain, _Failed] = {}
        self._received_bytes = 0  # of the client, in all
        self._probes: list[tuple[Slot, list[bytes | memoryview]]] = []
        self._joins: dict[Slot, Joins] = {}
        self._stores: dict[int, Callable[[str | None], None]] = {}
        self._next_token = 0
        self._collecting_bytes = 0
        self._collecting_since = 0.0
        self._known = _NOTHING_KNOWN
        self._made_here = 0  # answers, since the connection or the clock was heard last
        self._drain_until = float("inf")
        self._now = 0.0  # of the event that is being handled
        self._client_paused = False
        self._upstream_paused = False
        self.client_gone = False
        self.upstream_gone = False
        self._closing = False
        self._commands: list[Command] = []
        self._client_out: list[bytes | memoryview] = []
        self._upstream_out: list[bytes | memoryview] = []

    @classmethod
    def of(cls, handed: Handed, connection: int, around: Surroundings, exchanges: Exchanges) -> Session:
        """The session of another process, here. It is to be told of `handed.unread` as of any bytes of its client."""
        session = cls(connection, handed.local_host, around, exchanges, handed.opened_at)
        session.client_id = handed.client_id
        session._may_write = dict.fromkeys(handed.may_write)
        session._received_bytes = handed.received_bytes
        session._failed_chains = {
            (partition, producer_id): _Failed(result, behind_bytes)
            for partition, producer_id, result, behind_bytes in handed.failed_chains
        }
        return session

    # ---- what others may look at

    @property
    def finished(self) -> bool:
        return self.client_gone and self.upstream_gone

    @property
    def in_flight(self) -> int:
        return len(self._to_client)

    @property
    def needs_ticks(self) -> bool:
        return bool(self._answer_by) or self.client_gone or (self._client_paused and self._turn is None)

    @property
    def mid_header(self) -> bool:
        """The client has begun a frame and not said yet what it is."""
        return not self._client.between_frames and self._client.state is CutterState.START

    @property
    def collecting_since(self) -> float | None:
        """When the frame began that is being held in memory, None while there is none."""
        return self._collecting_since if self._client.state is CutterState.COLLECTING else None

    @property
    def drained(self) -> bool:
        """Nothing is under way: the connection can be closed without harm."""
        return not self._to_client and not self._from_upstream and self._client.between_frames

    @property
    def passing_up_bytes(self) -> int:
        """How many of the client's next bytes just go to the broker; see `ClientPassed`."""
        return self._client.passing_bytes

    @property
    def passing_down_bytes(self) -> int:
        """How many of the broker's next bytes just go to the client; see `UpstreamPassed`."""
        return self._upstream.passing_bytes

    # ---- the short way: whole frames of the usual kind, while nothing else is going on

    def take_up(self, data: memoryview, now: float) -> tuple[int, list[bytes | memoryview]]:
        """How many of the client's bytes need nothing else, and what goes to the broker for them, to be written now.

        They are whole requests that nobody has to read, and guarded appends whose gate has nothing against them. What
        is left is for `handle(ClientBytes(rest))`. Chunks may be views into `data`.
        """
        out: list[bytes | memoryview] = []
        if self._turn is not None or self._client_paused or self._closing or self.client_gone or self.upstream_gone:
            return 0, out
        if not self._client.between_frames:
            return 0, out
        around, size, to_client = self._around, len(data), self._to_client
        at = passing_from = 0
        while size - at >= _LENGTH_BYTES + _REQUEST_BYTES_MIN:
            length, api_key, version, correlation_id = _FRAME_PREFIX.unpack_from(data, at)
            end = at + _LENGTH_BYTES + length
            if length < _REQUEST_BYTES_MIN or end > size or length > around.frame_bytes_max:
                break
            if len(to_client) >= around.in_flight_requests_max:
                break
            passes = _PASSES.get(api_key)
            if passes is not None:
                if not passes[0] <= version <= passes[1]:
                    break
                if passes[2] and self._concerns_state_topic(data[at:end]):
                    break
                slot = Slot(api_key, version, correlation_id, _Answer.RELAYED)
            elif api_key != PRODUCE or not self._is_known(data[at:end], version) or not around.fresh(now):
                break
            elif not self._known.guarded:
                if around.policy(self._known.topic_name) is not None:
                    break
                slot = self._produce_slot(version, correlation_id)
            else:
                frame = memoryview(bytes(data[at + _LENGTH_BYTES : end]))
                chunks = self._take_single(frame, correlation_id, self._received_bytes + at + _LENGTH_BYTES, now)
                if chunks is None:
                    break
                if passing_from < at:
                    out.append(data[passing_from:at])
                out += chunks
                passing_from = at = end
                around.count_request(api_key)
                continue
            to_client.append(slot)
            self._from_upstream.append(slot)
            around.count_request(api_key)
            at = end
        if passing_from < at:
            out.append(data[passing_from:at])
        if at:
            self._made_here = 0
            self._received_bytes += at
        return at, out

    def take_down(self, data: memoryview, now: float) -> tuple[int, list[bytes | memoryview]]:
        """How many of the broker's bytes need nothing else, and what goes to the client for them, to be written now.

        What is left is for `handle(UpstreamBytes(rest))`. Chunks may be views into `data`.
        """
        out: list[bytes | memoryview] = []
        if self._client_paused or self._upstream_paused or self._closing or self.client_gone:
            return 0, out
        if not self._upstream.between_frames:
            return 0, out
        size, to_client, from_upstream = len(data), self._to_client, self._from_upstream
        at = passing_from = 0
        while size - at >= _LENGTH_BYTES + _RESPONSE_BYTES_MIN and to_client and from_upstream:
            slot = from_upstream[0]
            length, correlation_id = _RESPONSE_PREFIX.unpack_from(data, at)
            end = at + _LENGTH_BYTES + length
            if end > size or length < _RESPONSE_BYTES_MIN or correlation_id != slot.correlation_id:
                break
            if slot is not to_client[0] or (len(to_client) > 1 and to_client[1].done):
                break
            if slot.answer is _Answer.SINGLE:
                answer = self._end_single(slot, data[at + _LENGTH_BYTES : end], now)
                if answer is None:
                    break
                if passing_from < at:
                    out.append(data[passing_from:at])
                out.append(answer)
                passing_from = end
            elif slot.reserved_bytes or not (
                slot.answer is _Answer.RELAYED
                or (slot.answer is _Answer.RELAYED_UNLESS_BROKERS and names_no_broker(data[at:end], slot.version))
            ):
                break
            del to_client[0], from_upstream[0]
            at = end
        if passing_from < at:
            out.append(data[passing_from:at])
        return at, out

    def _is_known(self, frame: memoryview, version: int) -> bool:
        """Whether a Produce request, its length in front, begins as the last one that was read."""
        known = self._known
        start = _LENGTH_BYTES + _REQUEST_BYTES_MIN
        return version == known.version and frame[start : start + len(known.prefix)] == known.prefix

    def _concerns_state_topic(self, frame: memoryview) -> bool:
        data = bytes(frame)
        return any(mark in data for mark in self._around.state_topic_marks)

    def _take_single(
        self, frame: memoryview, correlation_id: int, starts_at: int, now: float
    ) -> list[bytes | memoryview] | None:
        """A guarded append that is the whole of its request, if its gate takes it as it is; what to send, then.

        None: nothing has happened. `frame` is the request without its length, and nobody else's memory.
        """
        around, known = self._around, self._known
        single = read_single(frame, _REQUEST_BYTES_MIN + len(known.prefix))
        if single is None or self._failed_chains:
            return None
        partition, start, end = single
        policy, topic_id = around.policy(known.topic_name), around.topic_id(known.topic_name)
        key = TopicPartition(known.topic_name, partition)
        gate = around.gate(key)
        if not self._owner and self._is_owners(policy):
            return None
        if policy is None or topic_id is None or gate is None or around.produce_version_max() < _PRODUCE_BY_ID:
            return None
        if not around.reserve(len(frame)):
            return None
        wait_seconds = min(around.gate_wait_max_seconds, max(known.timeout_ms, 0) / 3000)
        bid = self._bid(policy, None, now, now + wait_seconds)
        ticket = make_ticket(bid, key, PartitionData(partition, frame[start:end], b""))
        if isinstance(ticket, Refusal):
            around.release(len(frame))
            return None
        ticket.leader_epoch = around.leader_epoch(key)
        if not gate.take(ticket, now):
            around.release(len(frame))
            return None
        ticket.topic_id = topic_id
        around.gate_waited(0.0)
        slot = Slot(PRODUCE, known.version, correlation_id, _Answer.SINGLE)
        slot.reserved_bytes = len(frame)
        answer_by = self._answer_by[slot] = _answer_by(now, known.timeout_ms)
        slot.single = _Single(ticket, frame, starts_at, answer_by, known.topic, topic_id.bytes)
        self._to_client.append(slot)
        self._from_upstream.append(slot)
        header, rest = sent_batch(ticket)
        return encode_single(
            correlation_id=correlation_id,
            before_acks=known.before_acks,
            timeout_ms=known.timeout_ms,
            topic_id=topic_id.bytes,
            partition=partition,
            header=header,
            rest=rest,
        )

    def _end_single(self, slot: Slot, frame: memoryview, now: float) -> bytes | None:
        """The answer of such an append, if it is the success that was due. None: nothing has happened.

        The caller takes the slot out of the queues.
        """
        single = slot.single
        assert single is not None
        fields = read_single_answer(frame, single.topic_id)
        gate = self._around.gate(single.ticket.partition)
        if fields is None or gate is None:
            return None
        partition, error, base_offset, append_time, log_start, throttle = fields
        if error or partition != single.ticket.partition.partition:
            return None
        result = PartitionResult(partition, error, base_offset, append_time, log_start)
        if gate.landed(single.ticket, result, now) is None:
            return None
        self._may_write[single.ticket.partition.topic] = None
        del self._answer_by[slot]
        self._around.release(slot.reserved_bytes)
        slot.reserved_bytes = 0
        return encode_single_answer(
            correlation_id=slot.correlation_id,
            topic=single.topic,
            partition=partition,
            base_offset=base_offset,
            append_time=append_time,
            start=log_start,
            throttle=throttle,
        )

    def _no_short_ways(self) -> None:
        """Something is not as usual: appends that took the short way become turns like all others."""
        found = False
        for index, slot in enumerate(self._from_upstream):
            single = slot.single
            if single is None:
                continue
            found = True
            ticket = single.ticket
            turn = Turn(parse_produce_request(single.frame), starts_at=single.starts_at, answer_by=single.answer_by)
            turn.tickets[ticket.partition] = ticket
            turn.granted.append(ticket)
            turn.sent = True
            slot.answer, slot.single = _Answer.MADE_HERE, None
            self._turns[slot] = turn
            names: dict[UUID | None, str] = {ticket.topic_id: ticket.partition.topic}
            asked = {ticket.partition}
            self._from_upstream[index] = self._upstream_slot(slot, turn, _PRODUCE_BY_ID, names=names, asked=asked)
        if found:
            # Doubts are settled in the order in which they are told: a successor looked up first would miss its
            # predecessor, which is only about to be sent again.
            self._turns = dict(sorted(self._turns.items(), key=lambda item: item[1].starts_at))

    # ---- the only way in else

    def handle(self, event: Event, now: float) -> list[Command]:
        """Raises nothing: a peer that breaks the protocol costs this connection, by a command."""
        self._now = now
        try:
            match event:
                case ClientBytes(data):
                    self._made_here = 0
                    if not self.client_gone and not self._closing:
                        self._received_bytes += len(data)
                        self._client.feed(data)
                        self._pump_client(now)
                case UpstreamBytes(data):
                    self._upstream.feed(data)
                    self._pump_upstream(now)
                case ClientPassed(byte_count):
                    self._received_bytes += byte_count
                    self._client.passed(byte_count)
                    self._frame_passes_up()
                case UpstreamPassed(byte_count):
                    self._upstream.passed(byte_count)
                    self._frame_passes_down()
                case TurnGranted(ticket):
                    self._turn_granted(ticket, now)
                case TurnEnded(ticket, result, reason):
                    self._turn_ended(ticket, result, reason, now)
                case Stored(token, failure):
                    self._stores.pop(token)(failure)
                case ClientLost():
                    self._client_lost(now)
                case UpstreamLost(reason):
                    self._upstream_lost(reason)
                case Tick():
                    self._made_here = 0
                    self._tick(now)
            self._go_on(now)
        except ProtocolError as error:
            self._close(f"{error}", type(error))
        self._flush()
        if self._owner_wanted:
            self._hand_over()
        # Given away: what was relayed last must not stay in memory until the next event, which may be hours away.
        commands, self._commands = self._commands, []
        return commands

    def _go_on(self, now: float) -> None:
        """What an answer may have set free: the next answers, then the next requests."""
        if self._upstream_paused and not self._upstream_is_blocked():
            self._upstream_paused = False
            self._upstream.feed(memoryview(b""))
            self._pump_upstream(now)
            if not self._upstream_paused:
                self._commands.append(ReadUpstream(True))
        if self._client_paused and not (self._closing or self.client_gone or self._client_is_blocked()):
            self._client_paused = False
            self._client.feed(memoryview(b""))
            self._pump_client(now)
            if not self._client_paused:
                self._commands.append(ReadClient(True))
        if self.client_gone and not self.upstream_gone and not self._turns and self._turn is None:
            self._leave_joins()
            self._commands.append(CloseUpstream())
            self.upstream_gone = True

    def _flush(self) -> None:
        if self._upstream_out:
            if not self.upstream_gone:
                self._commands.append(ToUpstream(self._upstream_out))
            self._upstream_out = []
        self._flush_client()

    def _flush_client(self) -> None:
        if self._client_out:
            if not self.client_gone:
                self._commands.append(ToClient(self._client_out))
            self._client_out = []

    # ---- from the client

    def _client_is_blocked(self) -> bool:
        return (
            self._turn is not None
            or self._owner_wanted
            or len(self._to_client) >= self._around.in_flight_requests_max
            or self._made_here >= _MADE_HERE_MAX
        )

    def _pump_client(self, now: float) -> None:
        cutter = self._client
        while not self._closing:
            if cutter.state is CutterState.PASSING:
                view = cutter.take()
                if not view:
                    break
                self._upstream_out.append(view)
                self._frame_passes_up()
            elif cutter.state is CutterState.COLLECTING:
                frame = cutter.collected()
                if frame is None:
                    break
                self._request(frame, now)
            else:
                head = cutter.head()
                if head is None:
                    break
                if self._client_is_blocked():
                    # Only now, that there is something to keep it from: most clients wait for their answer anyway.
                    self._pause_client()
                    break
                if not self._start_request(head[0], head[1], now):
                    break
                self._around.count_request(int.from_bytes(head[1][:2], "big"))
        cutter.save()

    def _frame_passes_up(self) -> None:
        if not self._client.passing_bytes:
            self._around.forwarded(0.0)
            self._send_probes()

    def _frame_passes_down(self) -> None:
        if not self._upstream.passing_bytes:
            self._around.answered(0.0)
            self._end(self._from_upstream.pop(0), [])

    def _pause_client(self) -> None:
        if not self._client_paused:
            self._client_paused = True
            self._commands.append(ReadClient(False))

    def _start_request(self, length: int, head: memoryview, now: float) -> bool:
        """Decides about the frame that begins here; False if that needs more of it, or memory that is not there."""
        api_key, version, correlation_id = _REQUEST_PREFIX.unpack_from(head)
        passes = _PASSES.get(api_key)
        if passes is not None and not passes[2] and passes[0] <= version <= passes[1]:
            self._relay(Slot(api_key, version, correlation_id, _Answer.RELAYED), length)
            return True
        api = APIS.get(api_key)
        if api is None or api.withheld:
            raise ClientProtocolError(f"{api_name(api_key)} v{version} is not an API that this proxy lets pass")
        treatment = api.treatment
        if not api.serves(version) and api_key != API_VERSIONS:
            raise ClientProtocolError(
                f"{api.name} v{version} is not served: this proxy advertises {api.min_version} to {api.max_version}"
            )
        if treatment is Treatment.PRODUCE:
            return self._start_produce(length, head, version, correlation_id, now)
        # Small ones are gone again with this call or the next, and must pass while others hold all the memory.
        return self._collect(length, now, counted=length > _SMALL_FRAME_BYTES)

    def _relay(self, slot: Slot, length: int) -> None:
        self._client.pass_frame(length)
        self._to_client.append(slot)
        self._from_upstream.append(slot)

    def _collect(self, length: int, now: float, *, counted: bool = True) -> bool:
        if counted:
            if not self._around.reserve(length):
                self._pause_client()
                return False
            self._collecting_bytes = length
        self._collecting_since = now
        self._client.collect_frame(length)
        return True

    def _start_produce(self, length: int, head: memoryview, version: int, correlation_id: int, now: float) -> bool:
        """A Produce request that concerns no guarded topic is streamed through; its first bytes tell."""
        if version < _PRODUCE_VERSION_MIN:
            raise ClientProtocolError(f"Produce v{version} is older than record batches; use v3 or newer")
        peek = peek_produce(head, length)
        if peek is None:
            if len(head) < min(_PEEK_BYTES_MAX, length):
                return False
            return self._collect(length, now)
        around = self._around
        if peek.acks == 0 and not around.fresh(now):
            # Its client cannot be told to try again. It waits, as it would for a broker that does not read.
            self._pause_client()
            return False
        if (
            not self._owner
            and peek.topic_count == 1
            and around.fresh(now)
            and self._is_owners(around.policy(peek.first_topic))
        ):
            self._want_owner()
            return False
        streamed = (
            around.fresh(now)
            and peek.topic_count == 1
            and peek.first_topic != around.state_topic
            and around.policy(peek.first_topic) is None
        )
        if not streamed:
            if (
                peek.topic_count == 1
                and peek.acks != 0
                and peek.transactional_id is None
                and version >= FLEXIBLE
                and peek.first_topic != around.state_topic
            ):
                self._note_known(version, bytes(head[:_PEEK_BYTES_MAX]), peek, guarded=True)
            return self._collect(length, now)
        if peek.acks == 0:
            self._client.pass_frame(length)
        else:
            self._relay(self._produce_slot(version, correlation_id), length)
            self._note_known(version, bytes(head[:_PEEK_BYTES_MAX]), peek, guarded=False)
        return True

    def _note_known(self, version: int, head: bytes, peek: ProducePeek, *, guarded: bool) -> None:
        """Not where that would be only a part of it, or where lengths are written longer than they have to be."""
        if peek.end > len(head):
            return
        name = peek.first_topic.encode()
        before_topic = peek.end - len(name) - 1  # its length takes one byte, or it is not noted
        if version < FLEXIBLE:
            self._known = _Known(version, head[_REQUEST_BYTES_MIN : peek.end], b"", 0, peek.first_topic, b"", False)
            return
        if len(name) >= 0x7F or head[before_topic - 1] != 2 or head[before_topic] != len(name) + 1:
            return
        before_acks_end = before_topic - 1 - _ACKS_TIMEOUT.size  # the number of topics takes one byte: it is one topic
        _, timeout_ms = _ACKS_TIMEOUT.unpack_from(head, before_acks_end)
        self._known = _Known(
            version,
            head[_REQUEST_BYTES_MIN : peek.end],
            head[_REQUEST_BYTES_MIN:before_acks_end],
            timeout_ms,
            peek.first_topic,
            head[before_topic : peek.end],
            guarded,
        )

    def _produce_slot(self, version: int, correlation_id: int) -> Slot:
        """For a request that goes up as it is: only the addresses in its answer concern us."""
        if version < _PRODUCE_ENDPOINTS_FROM:
            return Slot(PRODUCE, version, correlation_id, _Answer.RELAYED)
        return Slot(PRODUCE, version, correlation_id, _Answer.RELAYED_UNLESS_BROKERS)

    def _with_own_addresses(self, slot: Slot, frame: memoryview) -> list[bytes | memoryview]:
        """A Produce response, and no broker's own address in it."""
        response = parse_produce_response(frame, slot.version)
        if not response.node_endpoints:
            return [_INT32.pack(len(frame)), frame]
        endpoints = tuple(self._around.endpoint(each, self.local_host) for each in response.node_endpoints)
        return [encode_produce_response(replace(response, node_endpoints=endpoints), slot.version)]

    def _request(self, frame: memoryview, now: float) -> None:
        """A request that was collected whole."""
        api_key, version, correlation_id = _REQUEST_PREFIX.unpack_from(frame)
        if api_key == PRODUCE:
            self._produce(frame, now)
            return
        slot = Slot(api_key, version, correlation_id, _Answer.MADE_FROM_RESPONSE)
        if not self._owner and api_key in _OWNERS_APIS:
            self._want_owner(frame)
            return
        exchange = self._exchanges.begin(api_key, version, frame, self.local_host)
        if not self._owner and exchange.joins is not None:
            self._want_owner(frame)
            return
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        self._to_client.append(slot)
        if exchange.forward is None:
            assert exchange.answer is not None
            slot.answer = _Answer.MADE_HERE
            self._made_here += 1
            self._end(slot, [exchange.answer])
            return
        if exchange.finish is None:
            slot.answer = _Answer.RELAYED
        else:
            finish = exchange.finish

            def on_response(response: memoryview) -> None:
                finished = finish(response)
                if not finished.changes:
                    self._end(slot, [finished.answer])
                    return
                token = self._next_token = self._next_token + 1

                def stored(error: str | None) -> None:
                    self._end(slot, [finished.answer if error is None else finished.answer_not_stored(error)])

                self._stores[token] = stored
                self._commands.append(Store(token, finished.changes))

            slot.on_response = on_response
        if exchange.joins is not None:
            self._join(slot, exchange.joins)
        self._from_upstream.append(slot)
        self._upstream_out.append(exchange.forward)
        self._around.forwarded(0.0)

    def _join(self, slot: Slot, joins: Joins) -> None:
        """The gates hear of it before Kafka does: from then on its marker may come at any time."""
        finish = slot.on_response
        assert finish is not None

        def on_response(response: memoryview) -> None:
            self._tell_joined(self._joins.pop(slot), answered=True)
            finish(response)

        slot.on_response = on_response
        self._joins[slot] = joins
        for partition in joins.partitions:
            self._commands.append(ToPartition(partition, TransactionJoins(joins.transactional_id)))

    # ---- what only the owner may do

    @staticmethod
    def _is_owners(policy: TopicPolicy | None) -> bool:
        """On `required` topics every append is stamped, and Kafka compares, whichever process sends it. Where batches
        keep producer ids of their own, only one gate that sees them all knows where the log ends.
        """
        return policy is not None and policy.check is Check.ON

    def _want_owner(self, frame: memoryview | None = None) -> None:
        """Nothing is read any more; `frame`, collected already, is the first that the owner gets."""
        self._owner_wanted = True
        if frame is not None:
            self._taken_frame = bytes(frame)
        self._pause_client()

    def _hand_over(self) -> None:
        """Once nothing is under way. What waits for an answer waits for this process."""
        under_way = self._to_client or self._from_upstream or self._turns or self._turn is not None or self._probes
        if under_way or not self._upstream.between_frames or self._closing or self.client_gone or self.upstream_gone:
            return
        unread = self._client.give_back()
        if self._taken_frame is not None:
            unread = _INT32.pack(len(self._taken_frame)) + self._taken_frame + unread
        self._around.release(self._collecting_bytes)
        self._collecting_bytes = 0
        handed = Handed(
            local_host=self.local_host,
            client_id=self.client_id,
            opened_at=self._opened_at,
            may_write=tuple(self._may_write),
            failed_chains=tuple(
                (*chain, failed.result, failed.behind_bytes) for chain, failed in self._failed_chains.items()
            ),
            received_bytes=self._received_bytes - len(unread),
            unread=unread,
        )
        self._commands.append(HandOver(handed))
        self._owner_wanted = False
        self.client_gone = self.upstream_gone = True

    def _leave_joins(self) -> None:
        """Nobody will hear whether these were added."""
        for joins in self._joins.values():
            self._tell_joined(joins, answered=False)
        self._joins.clear()

    def _tell_joined(self, joins: Joins, *, answered: bool) -> None:
        for partition in joins.partitions:
            self._commands.append(ToPartition(partition, TransactionJoined(joins.transactional_id, answered)))

    # ---- Produce with guarded partitions

    def _produce(self, frame: memoryview, now: float) -> None:
        around = self._around
        if self._single(frame, now):
            return
        request = parse_produce_request(frame)
        self.client_id = request.client_id
        if (
            not self._owner
            and around.fresh(now)
            and any(self._is_owners(around.policy(t.name)) for t in request.topics)
        ):
            self._want_owner(frame)
            return
        slot = Slot(PRODUCE, request.api_version, request.correlation_id, _Answer.MADE_HERE)
        starts_at = self._received_bytes - self._client.unread_bytes - len(frame)
        turn = Turn(
            request, starts_at=starts_at, answer_by=_answer_by(now, request.timeout_ms), received_at=now, offered_at=now
        )
        if not around.fresh(now):
            self._fail_closed(turn)
        else:
            self._take_bids(turn, now)
        # Only now: a request that could not be read leaves no slot behind that would have to give its memory back.
        slot.reserved_bytes, self._collecting_bytes = self._collecting_bytes, 0
        if request.acks != 0:
            self._to_client.append(slot)
        if not turn.tickets and not turn.results:
            self._forward_unread(slot, request, frame)
            return
        self._turn, self._turn_slot = turn, slot
        turn.to_offer = [turn.tickets[key] for key in sorted(turn.tickets, reverse=True)]
        self._next_turn(now)

    def _single(self, frame: memoryview, now: float) -> bool:
        """The short way, for a request that did not come in one piece."""
        _, version, correlation_id = _REQUEST_PREFIX.unpack_from(frame)
        known = self._known
        end = _REQUEST_BYTES_MIN + len(known.prefix)
        if not known.guarded or version != known.version or frame[_REQUEST_BYTES_MIN:end] != known.prefix:
            return False
        if self._client_is_blocked() or not self._around.fresh(now):
            return False
        starts_at = self._received_bytes - self._client.unread_bytes - len(frame)
        reserved, self._collecting_bytes = self._collecting_bytes, 0
        self._around.release(reserved)
        chunks = self._take_single(frame, correlation_id, starts_at, now)
        if chunks is not None:
            self._around.forwarded(0.0)
        else:
            taken_back = self._around.reserve(reserved)
            assert taken_back, "it was given back a moment ago"
            self._collecting_bytes = reserved
            return False
        self._upstream_out += chunks
        return True

    def _forward_unread(self, slot: Slot, request: ProduceRequest, frame: memoryview) -> None:
        """It was collected because it might have named a guarded topic; it does not."""
        if request.acks != 0:
            self._to_client.pop()
            self._around.release(slot.reserved_bytes)
            slot = self._produce_slot(request.api_version, request.correlation_id)
            self._to_client.append(slot)
            self._from_upstream.append(slot)
        else:
            self._around.release(slot.reserved_bytes)
        self._upstream_out += [_INT32.pack(len(frame)), frame]
        self._around.forwarded(0.0)

    def _fail_closed(self, turn: Turn) -> None:
        """Whether a topic is guarded is not known: no append is let through, and each may be tried again."""
        message = "TRY_AGAIN the proxy has not (re)read its topic configs yet"
        for key in turn.partitions():
            turn.results[key] = PartitionResult(
                partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
            )
        self._commands.append(Count("refusal", "not_ready"))

    def _take_bids(self, turn: Turn, now: float) -> None:
        """A ticket for each guarded partition, or a refusal where its batch cannot be one."""
        around = self._around
        request = turn.request
        wait_seconds = min(around.gate_wait_max_seconds, max(request.timeout_ms, 0) / 3000)
        for topic in request.topics:
            if topic.name == around.state_topic:
                self._deny(turn, topic)
                continue
            policy = around.policy(topic.name)
            if policy is None:
                continue
            bid = self._bid(policy, request.transactional_id, now, now + wait_seconds)
            for data in topic.partitions:
                self._take_bid(turn, bid, topic, data)

    def _bid(self, policy: TopicPolicy, transactional_id: str | None, now: float, deadline: float) -> Bid:
        around = self._around
        return Bid(
            self.connection,
            policy,
            around.header_names,
            around.decompressed_bytes_max,
            around.shared_producer_id,
            now,
            deadline,
            around.tag,
            self._opened_at,
            around.alone(now),
            around.taken_over(now),
            transactional_id,
        )

    def _deny(self, turn: Turn, topic: TopicData) -> None:
        """The proxy's own topic: what a client wrote there could unguard others."""
        message = f"{topic.name} is where the proxy keeps its state; it is closed to clients"
        for data in topic.partitions:
            refusal = Refusal(Error.TOPIC_AUTHORIZATION_FAILED, "state_topic", message)
            self._refuse(turn, TopicPartition(topic.name, data.partition), refusal)

    def _take_bid(self, turn: Turn, bid: Bid, topic: TopicData, data: PartitionData) -> None:
        key = TopicPartition(topic.name, data.partition)
        if key in turn.tickets or key in turn.results:
            raise ClientProtocolError(f"a Produce request names {key} twice")
        ticket = make_ticket(bid, key, data)
        if isinstance(ticket, Refusal):
            self._refuse(turn, key, ticket)
            return
        ticket.leader_epoch = self._around.leader_epoch(key)
        if turn.silent and ticket.append.expected_base_offset is not None:
            raise ClientProtocolError(f"an expectation for {key} with acks=0, which nobody could answer")
        if not self._falls_with_its_chain(turn, ticket):
            self._failed_chains.pop((key, ticket.append.producer_id), None)
            turn.tickets[key] = ticket

    def _falls_with_its_chain(self, turn: Turn, ticket: Ticket) -> bool:
        failed = self._failed_chains.get((ticket.partition, ticket.append.producer_id))
        if failed is None or turn.starts_at >= failed.behind_bytes:
            return False
        told = sent_behind(ticket, failed.result)
        self._refuse(turn, ticket.partition, Refusal(told.error_code, "behind_refused", told.error_message or ""))
        return True

    def _refuse(self, turn: Turn, key: TopicPartition, refusal: Refusal) -> None:
        turn.results[key] = refused(key, refusal)
        self._commands.append(Count("refusal", refusal.reason))

    def _next_turn(self, now: float) -> None:
        turn = self._turn
        assert turn is not None
        while turn.to_offer and not (turn.refused and self._around.refuse_whole_requests):
            ticket = turn.to_offer.pop()
            if self._falls_with_its_chain(turn, ticket):
                continue  # while it waited for its turn at another gate
            turn.waiting_for, turn.offered_at = ticket, now
            self._commands.append(ToGate(ticket, Offered(ticket)))
            return
        turn.waiting_for = None
        self._send_turn(turn, now)

    def _turn_granted(self, ticket: Ticket, now: float) -> None:
        turn = self._turn
        if turn is not None and ticket is turn.waiting_for:
            turn.granted.append(ticket)
            turn.gate_seconds += now - turn.offered_at
            self._around.gate_waited(now - turn.offered_at)
            self._next_turn(now)
            return
        slot, sent = self._sent_turn_of(ticket)
        if slot is None or sent is None or slot.done or self.client_gone or self.upstream_gone:
            self._commands.append(ToGate(ticket, Withdrawn(ticket)))
            return
        # Kafka refused its stamp, the gate has looked at the log, and its expectation holds after all: once more.
        if ticket in self._without_id(sent):
            self._not_sent(sent, ticket, f"the id of topic {ticket.partition.topic} is not known now")
            self._finish_turn(slot, sent)
            return
        if self._client.state is CutterState.PASSING:
            # A frame of the client's is half upstream, and ends when the client likes. Nothing can go between, and
            # the gate cannot wait for that.
            self._not_sent(sent, ticket, "the client's next request is on its way")
            self._finish_turn(slot, sent)
            return
        self._forward(slot, sent, sent.request_for(ticket))
        self._commands.append(ToGate(ticket, Sent(ticket)))

    def _sent_turn_of(self, ticket: Ticket) -> tuple[Slot, Turn] | tuple[None, None]:
        self._no_short_ways()
        for slot, turn in self._turns.items():
            if turn.tickets.get(ticket.partition) is ticket:
                return slot, turn
        return None, None

    def _turn_ended(self, ticket: Ticket, result: PartitionResult, reason: str | None, now: float) -> None:
        if reason is not None:
            self._commands.append(Count("refusal", reason))
        turn = self._turn
        if turn is not None and ticket is turn.waiting_for:
            turn.results[ticket.partition] = result
            if self._turn_slot is not None:
                self._chain_failed(self._turn_slot, ticket, result)
            self._next_turn(now)
            return
        slot, sent = self._sent_turn_of(ticket)
        if slot is not None and sent is not None:
            sent.results.setdefault(ticket.partition, result)
            self._chain_failed(slot, ticket, result)
            self._finish_turn(slot, sent)

    def _chain_failed(self, slot: Slot, ticket: Ticket, result: PartitionResult) -> None:
        if result.error_code and not slot.done:
            chain = (ticket.partition, ticket.append.producer_id)
            self._failed_chains[chain] = _Failed(result)
            slot.chains.append(chain)

    def _send_turn(self, turn: Turn, now: float) -> None:
        """All verdicts are there: forward what passed, answer what did not."""
        if turn.refused and self._around.refuse_whole_requests:
            self._refuse_the_rest(turn)
        stale = [ticket for ticket in turn.granted if not self._around.may_send(ticket, now)]
        if stale:
            # It waited so long for another gate that a cold grant is no longer good: ask again, in order.
            for ticket in turn.granted:
                self._commands.append(ToGate(ticket, Withdrawn(ticket)))
            turn.to_offer = sorted(turn.granted, key=lambda t: t.partition, reverse=True)
            turn.granted = []
            self._next_turn(now)
            return
        for ticket in self._without_id(turn):
            turn.granted.remove(ticket)
            self._not_sent(turn, ticket, f"the id of topic {ticket.partition.topic} is not known now")
        slot = self._turn_slot
        assert slot is not None
        self._turn, self._turn_slot = None, None
        request = turn.upstream_request()
        self._turns[slot] = turn
        if request is None:
            self._made_here += 1
            self._finish_turn(slot, turn)
            return
        turn.sent = True
        self._around.forwarded(max(0.0, now - turn.received_at - turn.gate_seconds))
        for ticket in turn.granted:
            self._commands.append(ToGate(ticket, Sent(ticket)))
        self._forward(slot, turn, request)
        self._answer_by[slot] = turn.answer_by

    def _forward(self, slot: Slot, turn: Turn, request: ProduceRequest) -> None:
        """Sends (a part of) a turn upstream; `slot` is where its client waits."""
        for part in self._by_topic_id(request):
            self._forward_part(slot, turn, part)

    def _forward_part(self, slot: Slot, turn: Turn, request: ProduceRequest) -> None:
        for topic in request.topics:
            for data in topic.partitions:
                ticket = turn.tickets.get(TopicPartition(topic.name, data.partition))
                if ticket is not None:
                    ticket.topic_id = topic.topic_id
        version = request.api_version
        names: dict[UUID | None, str] = {topic.topic_id: topic.name for topic in request.topics}
        asked = {TopicPartition(topic.name, data.partition) for topic in request.topics for data in topic.partitions}
        upstream = self._upstream_slot(slot, turn, version, names=names, asked=asked)
        self._from_upstream.append(upstream)
        self._upstream_out += encode_produce_request(request)

    def _upstream_slot(
        self,
        slot: Slot,
        turn: Turn,
        version: int,
        *,
        names: dict[UUID | None, str],
        asked: set[TopicPartition],
    ) -> Slot:
        """For what is sent upstream of a turn; its client waits at `slot`."""
        upstream = Slot(PRODUCE, version, slot.correlation_id, _Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            self._turn_answered(slot, turn, parse_produce_response(frame, version), names, asked)

        upstream.on_response = on_response
        return upstream

    def _refuse_the_rest(self, turn: Turn) -> None:
        """`refusal_scope = "request"`, KIP-27's literal reading: one mismatch refuses the whole request."""
        for ticket in turn.granted:
            self._commands.append(ToGate(ticket, Withdrawn(ticket)))
        turn.granted = []
        first = next(result for result in turn.results.values() if result.error_code)
        for key in turn.partitions():
            if key not in turn.results:
                message = f"WHOLE_REQUEST_REFUSED topic={key.topic} partition={key.partition}: {first.error_message}"
                turn.results[key] = PartitionResult(
                    partition=key.partition, error_code=first.error_code, error_message=message
                )

    def _goes_by_id(self, request: ProduceRequest) -> bool:
        """By id where the brokers can: a topic that was deleted and created anew is another topic.

        Not for transactions: versions from 12 on mean transactions v2, which is the client's to choose.
        """
        return request.transactional_id is None and self._around.produce_version_max() >= _PRODUCE_BY_ID

    def _by_topic_id(self, request: ProduceRequest) -> list[ProduceRequest]:
        """One request by id; and one by name for the unguarded topics beside it whose ids are not known here."""
        if not self._goes_by_id(request):
            return [request]
        ids = {topic.name: self._around.topic_id(topic.name) for topic in request.topics}
        known = tuple(replace(topic, topic_id=ids[topic.name]) for topic in request.topics if ids[topic.name])
        others = tuple(topic for topic in request.topics if not ids[topic.name])
        parts = []
        if known:
            parts.append(replace(request, api_version=_PRODUCE_BY_ID, topics=known))
        if others:
            parts.append(replace(request, topics=others))
        return parts

    def _without_id(self, turn: Turn) -> list[Ticket]:
        """Granted appends that cannot be sent as they must be: the topic is gone, or was not looked up yet.

        Those that expect nothing and keep their own producer may go by name, as they would without us.
        """
        if not self._goes_by_id(turn.request):
            return []
        return [
            ticket
            for ticket in turn.granted
            if (ticket.stamp is not None or ticket.append.expected_base_offset is not None)
            and self._around.topic_id(ticket.partition.topic) is None
        ]

    def _not_sent(self, turn: Turn, ticket: Ticket, why: str) -> None:
        message = f"TRY_AGAIN {why}"
        turn.results[ticket.partition] = PartitionResult(
            partition=ticket.partition.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
        )
        self._commands += [
            TopicStale(ticket.partition.topic),
            Count("refusal", "try_again"),
            ToGate(ticket, Withdrawn(ticket)),
        ]

    def _turn_answered(
        self,
        slot: Slot,
        turn: Turn,
        response: ProduceResponse,
        names: dict[UUID | None, str],
        asked: set[TopicPartition],
    ) -> None:
        turn.throttle_time_ms = response.throttle_time_ms
        slot.answered_at = self._now
        answers = {
            TopicPartition(topic.name or names.get(topic.topic_id, ""), result.partition): result
            for topic in response.topics
            for result in topic.partitions
        }
        if answers.keys() != asked:
            raise UpstreamProtocolError(f"the broker answered for {sorted(answers)}, asked were {sorted(asked)}")
        for key, result in answers.items():
            self._partition_answered(turn, key, _for_names(result))
        self._finish_turn(slot, turn)

    def _partition_answered(self, turn: Turn, key: TopicPartition, result: PartitionResult) -> None:
        if result.error_code != Error.TOPIC_AUTHORIZATION_FAILED:
            self._may_write[key.topic] = None
        if result.error_code in _STALE:
            self._commands.append(TopicStale(key.topic))
        ticket = turn.tickets.get(key)
        if ticket is not None and ticket in turn.granted:
            ticket.may_write = key.topic in self._may_write
            self._commands.append(ToGate(ticket, Answered(ticket, result)))
        else:
            turn.results.setdefault(key, result)

    def _finish_turn(self, slot: Slot, turn: Turn) -> None:
        if slot not in self._turns or not turn.complete:
            return
        if not (self.client_gone or slot.done or turn.silent):
            unproved = sorted({key.topic for key in self._told_without_proof(turn)})
            if unproved:
                self._prove_write(slot, turn, unproved)
                return
        del self._turns[slot]
        self._answer_by.pop(slot, None)
        if turn.silent:
            self._around.release(slot.reserved_bytes)
            failed = next((r for r in turn.results.values() if r.error_code), None)
            if failed is not None:
                raise ClientProtocolError(f"an append with acks=0 failed: {failed.error_message or failed.error_code}")
        elif not slot.done:
            self._end(slot, [encode_produce_response(turn.response(), turn.request.api_version)])

    def _told_without_proof(self, turn: Turn) -> list[TopicPartition]:
        """The refusals that tell of a topic for which this client has not proved WRITE."""
        return [
            key
            for key, result in turn.results.items()
            if result.error_code not in _TELLS_NOTHING and key in turn.tickets and key.topic not in self._may_write
        ]

    def _prove_write(self, slot: Slot, turn: Turn, topics: Sequence[str]) -> None:
        """A refusal tells where the log ends. Only who may write the topic learns that, and Kafka says who may.

        A Produce request without a record batch: authorisation comes first (29), then Kafka finds nothing to append
        (87). Nothing can be written by it.
        """
        if turn.proving:
            return
        turn.proving = True
        names = dict.fromkeys(topics)
        partitions = {name: next(k.partition for k in turn.tickets if k.topic == name) for name in names}
        version = min(9, turn.request.api_version)
        probe = replace(
            turn.request,
            api_version=version,
            transactional_id=None,
            acks=1,
            topics=tuple(
                TopicData(name, None, (PartitionData(partition, memoryview(b""), b""),), b"")
                for name, partition in partitions.items()
            ),
        )
        upstream = Slot(PRODUCE, version, probe.correlation_id, _Answer.MADE_FROM_RESPONSE)
        upstream.inner = True

        def on_response(frame: memoryview) -> None:
            for topic in parse_produce_response(frame, version).topics:
                for result in topic.partitions:
                    self._proved(turn, topic.name, result)
            turn.proving = False
            self._finish_turn(slot, turn)

        upstream.on_response = on_response
        self._answer_by[slot] = turn.answer_by
        self._probes.append((upstream, encode_produce_request(probe)))
        self._send_probes()

    def _send_probes(self) -> None:
        """Not into the middle of a frame of the client's that is being streamed."""
        if self._client.state is CutterState.PASSING:
            return
        while self._probes:
            upstream, chunks = self._probes.pop(0)
            self._from_upstream.append(upstream)
            self._upstream_out += chunks

    def _proved(self, turn: Turn, topic: str, answer: PartitionResult) -> None:
        self._may_write[topic] = None
        if answer.error_code != Error.TOPIC_AUTHORIZATION_FAILED:
            return
        for key, result in list(turn.results.items()):
            if key.topic == topic and result.error_code:
                turn.results[key] = PartitionResult(partition=key.partition, error_code=answer.error_code)

    # ---- from upstream

    def _upstream_is_blocked(self) -> bool:
        """The next answer is for a client that must get another one first."""
        if not self._from_upstream:
            return False
        slot = self._from_upstream[0]
        return slot.answer is _Answer.RELAYED and bool(self._to_client) and self._to_client[0] is not slot

    def _overtaken(self, slot: Slot, length: int) -> bool:
        """Whether an answer that has to wait for the front one is held here, in memory, instead of in the socket.

        It must be where the front one's answer comes behind it: a guarded append that was refused by its stamp and sent
        once more, say. Or where a gate waits for an answer behind it. False also if there is no memory for it now: then
        the front one ends by its time limit.
        """
        a_gate_waits = any(each.inner or each.single is not None for each in self._from_upstream)
        if not a_gate_waits or not self._around.reserve(length):
            return False
        slot.reserved_bytes += length
        return True

    def _pump_upstream(self, now: float) -> None:
        cutter = self._upstream
        while True:
            if cutter.state is CutterState.PASSING:
                view = cutter.take()
                if not view:
                    break
                self._client_out.append(view)
                self._frame_passes_down()
            elif cutter.state is CutterState.COLLECTING:
                frame = cutter.collected()
                if frame is None:
                    break
                self._collected(frame, now)
            else:
                head = cutter.head()
                if head is None:
                    break
                length, view = head
                slot = self._expected_slot(view)
                if slot.answer is not _Answer.RELAYED:
                    cutter.collect_frame(length)
                elif not self._upstream_is_blocked():
                    cutter.pass_frame(length)
                elif self._overtaken(slot, length):
                    cutter.collect_frame(length)
                else:
                    self._upstream_paused = True
                    self._commands.append(ReadUpstream(False))
                    break
        cutter.save()

    def _collected(self, frame: memoryview, now: float) -> None:
        if self._from_upstream[0].answer is _Answer.SINGLE:
            self._collected_single(frame, now)
            return
        slot = self._from_upstream.pop(0)
        if not slot.inner:
            slot.answered_at = now
        if slot.answer is _Answer.MADE_FROM_RESPONSE:
            on_response, slot.on_response = slot.on_response, None  # it refers back to the slot
            assert on_response is not None
            on_response(frame)
            self._answer_front()
        elif slot.answer is _Answer.RELAYED_UNLESS_BROKERS:
            self._end(slot, self._with_own_addresses(slot, frame))
        else:
            self._end(slot, [_INT32.pack(len(frame)), frame])

    def _collected_single(self, frame: memoryview, now: float) -> None:
        slot = self._from_upstream[0]
        answer = self._end_single(slot, frame, now)
        if answer is None:
            self._no_short_ways()
            self._collected(frame, now)
        else:
            del self._from_upstream[0]
            slot.answered_at = now
            self._end(slot, [answer])

    def _expected_slot(self, head: memoryview) -> Slot:
        (correlation_id,) = _INT32.unpack_from(head)
        if not self._from_upstream:
            raise UpstreamProtocolError(f"an answer with correlation id {correlation_id}, and nothing was asked")
        slot = self._from_upstream[0]
        if slot.correlation_id != correlation_id:
            raise UpstreamProtocolError(
                f"an answer with correlation id {correlation_id} where {slot.correlation_id} "
                f"({api_name(slot.api_key)}) comes next"
            )
        return slot

    # ---- answers

    def _end(self, slot: Slot, chunks: list[bytes | memoryview]) -> None:
        slot.chunks = chunks
        slot.done = True
        self._answer_front()

    def _answer_front(self) -> None:
        while self._to_client and self._to_client[0].done:
            slot = self._to_client.pop(0)
            self._around.release(slot.reserved_bytes)
            slot.reserved_bytes = 0
            if slot.answered_at is not None:
                self._around.answered(self._now - slot.answered_at)
            self._client_out += slot.chunks
            self._may_know(slot.chains)

    def _may_know(self, chains: Sequence[_Chain]) -> None:
        """The answer that tells of their failure leaves now: what has not been sent by now was sent knowing it."""
        if not chains:
            return
        sent_bytes = self._received_bytes + self._around.unread_bytes(self.connection)
        for chain in chains:
            if chain in self._failed_chains:
                self._failed_chains[chain].behind_bytes = float(sent_bytes)
        read_bytes = self._received_bytes - self._client.unread_bytes
        if self._turn is not None:
            read_bytes = self._turn.starts_at  # it still has batches to offer
        self._failed_chains = {c: f for c, f in self._failed_chains.items() if f.behind_bytes > read_bytes}

    # ---- ends

    def _tick(self, now: float) -> None:
        """What was sent and is not known in time is told as unknown; the gate goes on settling it."""
        if now >= self._drain_until and not self.upstream_gone:
            self._commands.append(CloseUpstream())
            self._upstream_lost("the client is gone, and Kafka does not answer its last requests")
        for slot, deadline in list(self._answer_by.items()):
            if deadline > now:
                continue
            self._no_short_ways()
            del self._answer_by[slot]
            turn = self._turns[slot]
            self._give_up_waiting(turn)
            if turn.silent:
                continue
            message = "OUTCOME_UNKNOWN Kafka did not answer in time; it may have been appended"
            results = {
                key: PartitionResult(partition=key.partition, error_code=Error.REQUEST_TIMED_OUT, error_message=message)
                for key in turn.partitions()
            }
            message = "TRY_AGAIN Kafka did not say in time whether this client may write"
            unproved = {
                key: PartitionResult(
                    partition=key.partition, error_code=Error.NOT_LEADER_OR_FOLLOWER, error_message=message
                )
                for key in self._told_without_proof(turn)
            }
            told = Turn(turn.request, results=results | turn.results | unproved)
            self._commands.append(Count("refusal", "outcome_unknown"))
            self._end(slot, [encode_produce_response(told.response(), turn.request.api_version)])

    def _give_up_waiting(self, turn: Turn) -> None:
        """A leader that stands still may never answer, and never break the connection either: others have to go on.

        What it does with the append when it wakes up, the gate can find in the log.
        """
        for ticket in turn.granted:
            if turn.sent and ticket.partition not in turn.results:
                ticket.may_write = ticket.partition.topic in self._may_write
                self._commands.append(ToGate(ticket, Lost(ticket)))

    def _close(self, reason: str, fault: type[Exception] | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._flush_client()
        self._commands.append(CloseClient(reason, fault))
        if fault is not None and issubclass(fault, UpstreamProtocolError):
            self._upstream_lost(reason)
            self._commands.append(CloseUpstream())

    def _client_lost(self, now: float) -> None:
        self._no_short_ways()
        self.client_gone = True
        self._drain_until = now + self._around.request_timeout_seconds
        self._give_turns_back()
        self._around.release(self._collecting_bytes)
        self._collecting_bytes = 0
        # Nobody is left to keep order for; what is under way is read on, to learn how the appends ended.
        for slot in self._to_client:
            self._around.release(slot.reserved_bytes)
            slot.reserved_bytes = 0
        self._to_client.clear()

    def _give_turns_back(self) -> None:
        """The request that waits at a gate will not be sent any more."""
        turn, self._turn = self._turn, None
        slot, self._turn_slot = self._turn_slot, None
        if turn is not None:
            for ticket in (*turn.granted, turn.waiting_for):
                if ticket is not None:
                    self._commands.append(ToGate(ticket, Withdrawn(ticket)))
        if slot is not None:
            self._around.release(slot.reserved_bytes)
            slot.reserved_bytes = 0

    def _upstream_lost(self, reason: str) -> None:
        """Everything that was sent and not answered is in doubt from here on; the gates look into the log."""
        if self.upstream_gone:
            return
        self._no_short_ways()
        self.upstream_gone = True
        # Its client's connection may take long to close. A grant that comes before would be taken for sent, and its
        # gate wait for ever.
        self._give_turns_back()
        for turn in self._turns.values():
            self._give_up_waiting(turn)
        for slot in (*self._to_client, *self._turns):
            self._around.release(slot.reserved_bytes)
            slot.reserved_bytes = 0
        self._turns.clear()
        self._answer_by.clear()
        self._leave_joins()
        self._from_upstream.clear()
        self._probes.clear()
        if not self._closing and not self.client_gone:
            self._close(reason, None)


def _answer_by(now: float, timeout_ms: int) -> float:
    return now + _ANSWER_BY * max(timeout_ms, 100) / 1000


def _for_names(result: PartitionResult) -> PartitionResult:
    """A client that names topics does not know UNKNOWN_TOPIC_ID; for it the topic is what is unknown."""
    if result.error_code in (Error.UNKNOWN_TOPIC_ID, Error.INCONSISTENT_TOPIC_ID):
        return replace(result, error_code=Error.UNKNOWN_TOPIC_OR_PARTITION)
    return result
