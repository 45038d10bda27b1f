"""The dispatcher with sessions and sequencers, between clients and brokers that follow a program.

Connections are modelled as in `transport/`: one receive buffer, overwritten after each call; a paused or closed socket
delivers nothing; a closed socket reports its end later. The broker appends to a small log (`log.py`). By the program it
responds correctly, with an error, to another request, late or never.

Invariants:

- `handle` raises nothing
- reserved memory is released exactly once
- a client gets one response per request, in order; relayed responses are the broker's bytes
- relayed requests are the client's bytes
- responses to Produce have the request's version; success is reported only at the expected offset
- buffers are bounded
- every pending append belongs to a request
- when all requests are answered, every client has its responses; when all have disconnected, nothing waits
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final
from uuid import UUID

from fencepost_policies.append import Check
from fencepost_proxy.addresses import AddressBook
from fencepost_proxy.errors import ConfigError, ProtocolError
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.session.control.rewriters import RequestRewriters
from fencepost_proxy.session.dispatcher import Action, Dispatcher, ForConnection, ForControl
from fencepost_proxy.session.frames import messages as m
from fencepost_proxy.session.frames.services import RELAYED_VERSIONS
from fencepost_proxy.topics.planning import Known
from fencepost_proxy.topics.state import NotStored, StateView
from fencepost_proxy.topics.virtual_configs import TopicPolicy
from fencepost_proxy.transactions.table import Table
from fencepost_proxy.types import NodeId, TopicPartition
from fencepost_proxy.wire.apis import (
    API_VERSIONS,
    APIS,
    FIND_COORDINATOR,
    METADATA,
    PRODUCE,
    SASL_HANDSHAKE,
    UNKNOWN_VERSION,
    Handling,
)
from fencepost_proxy.wire.batch_scan import HeaderNames, scan_batch
from fencepost_proxy.wire.control import (
    codec_versions,
    decode_request,
    encode_response,
    parse_request_header,
    request_header_is_flexible,
    response_header_is_flexible,
)
from fencepost_proxy.wire.produce import (
    NodeEndpoint,
    PartitionData,
    PartitionResult,
    ProduceRequest,
    ProduceResponse,
    TopicData,
    TopicResult,
    encode_produce_request,
    encode_produce_response,
    parse_produce_request,
    parse_produce_response,
)
from fencepost_proxy.wire.schema import Message
from fencepost_proxy.wire.throttle import THROTTLED_AT, throttle_ms
from tests.fuzz.engine import Failure, Op, Program, Tracer, Untraced
from tests.fuzz.log import INVALID_RECORD, SHARED, UNIX_SECONDS, Log, carry_out
from tests.support.batches import batch
from tests.support.counting import Counting
from tests.support.kio_messages import NOT_IN_KIO, by_kio
from tests.support.sequencer_view import view_of
from tests.support.under_way import left_under_way

STATE_TOPIC = "__state"
TOPICS = ("checked", "required", "relay", "other", STATE_TOPIC)
POLICIES = {"checked": TopicPolicy(Check.ON), "required": TopicPolicy(Check.REQUIRED)}
TOPIC_IDS = {name: UUID(int=1000 + index) for index, name in enumerate(TOPICS)}
NAMES_BY_ID = {topic_id: name for name, topic_id in TOPIC_IDS.items()}
WORDS = (*TOPICS, "fencepost.check.expected.offsets", "true", "required", "fencepost.expected.offsets.source", "2")
PARTITIONS = 2
CONNECTIONS_MAX = 5
FRAME_BYTES_MAX = 40_000
RECEIVE_BYTES = 65536
NOW_MS = int(UNIX_SECONDS * 1000) + 1_000_000
LIMITS = g.SequencerLimits(
    queue_max=4,
    in_flight_max=3,
    attempts_max=3,
    unconfirmed_send_seconds=0.5,
    resolve_seconds=2.0,
    queued_seconds=3.0,
    violation_seconds=0.2,
    remembered_producers_max=3,
    remembered_batches_max=4,
    decompressed_bytes_max=20_000,
)
_IN_FLIGHT_MAX = 4
#: Longer than every time limit of requests, sequencers and in-doubt appends.
_LONG_SECONDS = 60
_HANDSHAKE_V0 = struct.pack(">hh", SASL_HANDSHAKE, 0)
_ROUNDS_MAX = 400
#: Delivered in chunks up to here; the rest of an operation follows in one piece.
_CUTS_MAX = 80

#: APIs and versions that this module can generate.
SERVED: Final = [
    (key, version)
    for key, api in APIS.items()
    if key != PRODUCE and not api.gated and (known := codec_versions(key)) is not None
    for version in range(max(known[0], api.min_version), min(known[1], api.max_version) + 1)
    if (key, version) not in NOT_IN_KIO
]


@lru_cache(maxsize=4096)
def made_up_body(key: int, version: int, kind: str, variant: int) -> bytes:
    """Generate a request or response body with kio. Broker ids are small, as in a cluster."""
    from kio.index import load_request_schema, load_response_schema  # noqa: PLC0415  takes a second

    rng = random.Random(f"{key} {version} {kind} {variant}")
    if kind == "request":
        return by_kio(load_request_schema(key, version), rng, WORDS)
    brokers = [Message(node_id=each, broker_id=each, host=f"b{each}", port=9092, rack=None) for each in range(3)]
    if key == METADATA:
        topics = [
            Message(name=name, topic_id=TOPIC_IDS[name], partitions=[]) for name in rng.sample(TOPICS, rng.randrange(4))
        ]
        for each in brokers:
            del each.broker_id
        return encode_response(key, version, Message(brokers=brokers[: rng.randrange(4)], topics=topics))
    if key == FIND_COORDINATOR:
        one = {"node_id": rng.randrange(-1, 3), "host": "b1", "port": 9092}
        return encode_response(
            key, version, Message(coordinators=[Message(key="k", **one)]) if version >= 4 else Message(**one)
        )
    if key == 60:  # DescribeCluster
        for each in brokers:
            del each.node_id
        return encode_response(key, version, Message(brokers=brokers, endpoint_type=rng.choice((1, 2))))
    if (key, version) in NOT_IN_KIO:
        return encode_response(key, version, Message())
    return by_kio(load_response_schema(key, version), rng, WORDS)


THROTTLED_EVERY = 47


def _throttle_ms(queried: Requested) -> int:
    """Of some answers: the proxy serves these clients on its general path for half a minute."""
    return 250 if queried.correlation_id % THROTTLED_EVERY == THROTTLED_EVERY - 1 else 0


@lru_cache(maxsize=4096)
def _batch(
    expected: int | None, count: int, producer: tuple[int, int, int], flags: int, age_seconds: int | None
) -> bytes:
    headers = []
    if expected is not None:
        headers.append(("fencepost-expected-offset", b"%d" % expected))
    if flags & 1:
        headers.append(("fencepost-write-id", b"w%d" % (flags >> 5)))
    if flags & 2:
        headers.append(("fencepost-expected-offset", b"x"))
    values = [b"v%d" % (flags & 4)] * count
    timestamp = -1 if age_seconds is None else NOW_MS - age_seconds * 1000
    made = batch(
        *values,
        headers=[headers],
        timestamp_ms=timestamp,
        producer=producer,
        transactional=bool(flags & 8) and producer[0] >= 0,
        compression=1 if flags & 16 else 0,
    )
    return bytes(made)


def make_batch(log_end: int, spec: list[Any]) -> bytes:
    """`spec`: [kind of expectation, its number, records, producer, sequence, flags, age in seconds].

    Kinds: "end" – offset from the current log end; "is" – that number; others – no expectation. Producer 0 is none, 4
    the proxy's. An age below 0 means no timestamp. Flags: see `_batch`.
    """
    how, number, count, producer, sequence, flags, age = spec
    expected: int | None = None
    if how == "end":
        expected = max(0, log_end + min(number, 7))
    elif how == "is":
        expected = abs(number) % 1000
    producer %= 5
    producer_of_batch = (
        (-1, -1, -1) if not producer else (SHARED if producer == 4 else producer, 0, abs(sequence) % 1000)
    )
    return _batch(
        expected, 1 + abs(count - 1) % 5, producer_of_batch, flags % 128, None if age < 0 else age % 1_000_000
    )


# --- services of the dispatcher ---------------------------------------------------------------------------------------


class FuzzServices(Counting):
    frame_bytes_max = FRAME_BYTES_MAX
    in_flight_requests_max = _IN_FLIGHT_MAX
    sequencer_wait_max_seconds = 1.0
    request_timeout_seconds = 3.0
    decompressed_bytes_max = 20_000
    read_here_bytes_max = 200
    state_topic = STATE_TOPIC
    relayed_versions = RELAYED_VERSIONS
    state_topic_marks = (STATE_TOPIC.encode(),)
    clients_log_in = False

    def __init__(self, setup: dict[str, Any]) -> None:
        self.header_names = HeaderNames(cluster_id=b"fuzzed")
        self.refuse_whole_requests = bool(setup["whole"])
        self.transactions = Table()
        self.memory_bytes = self.free_bytes = 2 * FRAME_BYTES_MAX
        self.newest_produce = setup["produce"]
        self.is_fresh = True
        self.dispatcher: Dispatcher
        self.unread: dict[int, int] = {}
        self.topic_names: dict[UUID, str] = {}
        self.unknown_topic_ids: dict[UUID, float] = {}
        super().__init__()

    shared_producer_ids = frozenset({SHARED})
    instance_id = 5
    is_alone = True
    is_taken_over = True

    def alone(self, now: float) -> bool:
        return self.is_alone

    def taken_over(self, now: float) -> bool:
        return self.is_taken_over

    def leader_epoch(self, partition: TopicPartition) -> int:
        return 0

    def unix_ms(self, now: float) -> int:
        return round((now + UNIX_SECONDS) * 1000)

    def fresh(self, now: float) -> bool:
        return self.is_fresh

    def policy(self, topic: str) -> TopicPolicy | None:
        return POLICIES.get(topic)

    @property
    def sequencers(self) -> Dispatcher:
        return self.dispatcher

    def topic_id(self, topic: str) -> UUID | None:
        return TOPIC_IDS.get(topic)

    def produce_version_max(self) -> int:
        return int(self.newest_produce)

    def endpoint(self, endpoint: NodeEndpoint, local_host: str) -> NodeEndpoint:
        return NodeEndpoint(endpoint.node_id, local_host, 19000, endpoint.rack)

    def count_request(self, api_key: int, version: int) -> None:
        if api_key not in APIS:
            raise Failure("a request is counted for an API that is not in the table", api_key)
        if version != UNKNOWN_VERSION and not APIS[api_key].serves(version):
            raise Failure("a request is counted for a version that is not served", (api_key, version))

    def sequencer_waited(self, seconds: float) -> None:
        if seconds < 0:
            raise Failure("a wait of negative length", seconds)

    def forwarded(self, waited_seconds: float) -> None:
        self.sequencer_waited(waited_seconds)

    def answered(self, waited_seconds: float) -> None:
        self.sequencer_waited(waited_seconds)

    def unread_bytes(self, connection: int) -> int:
        return self.unread.get(connection, 0)

    def release(self, byte_count: int) -> None:
        super().release(byte_count)
        if self.free_bytes > self.memory_bytes:
            raise Failure("more memory was released than reserved", self.free_bytes - self.memory_bytes)


# --- one client connection --------------------------------------------------------------------------------------------


@dataclass
class Requested:
    """A request that reached the broker. `results`: already executed."""

    frame: bytes
    results: dict[TopicPartition, tuple[int, int, int]] | None = None

    @property
    def api_key(self) -> int:
        return int(struct.unpack_from(">h", self.frame)[0])

    @property
    def version(self) -> int:
        return int(struct.unpack_from(">h", self.frame, 2)[0])

    @property
    def correlation_id(self) -> int:
        return int(struct.unpack_from(">i", self.frame, 4)[0])


@dataclass
class Wires:
    """Bytes written on a connection, and how many were delivered."""

    number: int
    client_wrote: bytearray = field(default_factory=bytearray)
    client_delivered: int = 0
    client_paused: bool = False
    proxy_closed_client: bool = False  # by the proxy
    client_closed: bool = False
    client_got: bytearray = field(default_factory=bytearray)
    upstream_got: bytearray = field(default_factory=bytearray)
    upstream_read: int = 0
    upstream_wrote: bytearray = field(default_factory=bytearray)
    upstream_delivered: int = 0
    upstream_paused: bool = False
    proxy_closed_upstream: bool = False
    upstream_closed: bool = False
    queried: deque[Requested] = field(default_factory=deque)
    #: Relayed responses by correlation id; several with one id are only counted.
    answers: dict[int, bytes | None] = field(default_factory=dict)
    next_correlation: int = 1
    lied: bool = False

    @property
    def client_can_send(self) -> bool:
        return not (self.client_paused or self.proxy_closed_client or self.client_closed)

    @property
    def upstream_can_send(self) -> bool:
        return not (self.upstream_paused or self.proxy_closed_upstream or self.upstream_closed)


def frames_of(stream: bytes | bytearray, shortest: int, longest: int = 2**31) -> tuple[list[bytes], bytes]:
    """The complete frames up to the first impossible length, and the rest."""
    frames, at = [], 0
    while len(stream) - at >= 4:
        (length,) = struct.unpack_from(">i", stream, at)
        if not shortest <= length <= longest or len(stream) - at - 4 < length:
            break
        frames.append(bytes(stream[at + 4 : at + 4 + length]))
        at += 4 + length
    return frames, bytes(stream[at:])


def acks_of(frame: bytes) -> int | None:
    """Acks of a Produce request, or None if it is unreadable."""
    try:
        (version,) = struct.unpack_from(">h", frame, 2)
        (length,) = struct.unpack_from(">h", frame, 8)
        at = 10 + max(length, 0)
        if version < 9:
            (length,) = struct.unpack_from(">h", frame, at)
            at += 2 + max(length, 0)
        else:
            count, at = _uvarint(frame, at)
            for _ in range(count):
                _, at = _uvarint(frame, at)
                size, at = _uvarint(frame, at)
                at += size
            length, at = _uvarint(frame, at)
            at += max(length - 1, 0)
        return int(struct.unpack_from(">h", frame, at)[0])
    except (struct.error, IndexError):
        return None


def _uvarint(data: bytes, at: int) -> tuple[int, int]:
    value = sequence_offset = 0
    while True:
        value |= (data[at] & 0x7F) << sequence_offset
        sequence_offset += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def _stored(store: m.Store | m.RecordAbortOnly | m.ReadBatches, done: bool) -> m.Event:
    if isinstance(store, m.ReadBatches):
        store.read()
        return m.BatchesRead(store.token)
    if isinstance(store, m.RecordAbortOnly):
        return m.AbortOnlyRecorded(store.token, done)
    return m.Stored(store.token, None if done else NotStored("no"))


def relayed_versions(frame: bytes) -> bool:
    """Whether a client's frame is relayed unchanged."""
    (key,) = struct.unpack_from(">h", frame)
    if key == PRODUCE:
        try:
            topics = parse_produce_request(memoryview(frame)).topics
        except ProtocolError:
            return False
        names = [topic.name if topic.topic_id is None else NAMES_BY_ID.get(topic.topic_id) for topic in topics]
        return not any(name is None or name in POLICIES or name == STATE_TOPIC for name in names)
    if frame[:4] == _HANDSHAKE_V0:
        return False  # sent as v1
    return key in APIS and APIS[key].handling in (Handling.RELAY, Handling.ALONE)


def _looked_up(queried: Requested) -> bytes | None:
    """Kafka's answer to a lookup of topic ids."""
    if (queried.api_key, queried.version) != (METADATA, 12):
        return None
    try:
        header = parse_request_header(memoryview(queried.frame))
        requested = decode_request(METADATA, 12, memoryview(queried.frame)[header.body_offset :])
    except ProtocolError:
        return None
    if not requested.topics or any(topic.name is not None for topic in requested.topics):
        return None
    topics = [Message(topic_id=each.topic_id, name=NAMES_BY_ID.get(each.topic_id)) for each in requested.topics]
    for each in topics:
        each.error_code = 0 if each.name else 100
    return encode_response(METADATA, 12, Message(topics=topics))


# --- the target -------------------------------------------------------------------------------------------------------

SEQUENCER_MODULES = (
    "proxy/fencepost_proxy/sequencer/sequencer.py",
    "proxy/fencepost_proxy/sequencer/admitter.py",
    "proxy/fencepost_proxy/sequencer/kafka_answers.py",
    "proxy/fencepost_proxy/sequencer/state.py",
    "proxy/fencepost_proxy/sequencer/appends.py",
    "proxy/fencepost_proxy/sequencer/fence.py",
    "proxy/fencepost_proxy/sequencer/fence_bases.py",
    "proxy/fencepost_proxy/sequencer/transactions.py",
    "proxy/fencepost_proxy/sequencer/queued_in_brokers.py",
    "proxy/fencepost_proxy/sequencer/in_doubt.py",
)


class Dialogue:
    name = "session"
    modules = (
        "proxy/fencepost_proxy/session/session.py",
        "proxy/fencepost_proxy/session/control/control_messages.py",
        "proxy/fencepost_proxy/session/produce/admission.py",
        "proxy/fencepost_proxy/session/produce/arrival.py",
        "proxy/fencepost_proxy/session/produce/completion.py",
        "proxy/fencepost_proxy/session/produce/drafts.py",
        "proxy/fencepost_proxy/session/connection/failed_pipelines.py",
        "proxy/fencepost_proxy/session/produce/forwarding.py",
        "proxy/fencepost_proxy/session/frames/request_template.py",
        "proxy/fencepost_proxy/session/connection/read_holds.py",
        "proxy/fencepost_proxy/session/produce/refusals.py",
        "proxy/fencepost_proxy/session/request_reader.py",
        "proxy/fencepost_proxy/session/connection/response_queue.py",
        "proxy/fencepost_proxy/session/response_reader.py",
        "proxy/fencepost_proxy/session/connection/state.py",
        "proxy/fencepost_proxy/session/relay/fast_path.py",
        "proxy/fencepost_proxy/session/batches/produce_exchange.py",
        "proxy/fencepost_proxy/session/dispatcher.py",
        "proxy/fencepost_proxy/session/frames/cutter.py",
        "proxy/fencepost_proxy/session/control/rewriters.py",
        *SEQUENCER_MODULES,
    )

    # ---- generating programs

    def setup(self, rng: random.Random) -> dict[str, Any]:
        return {
            "whole": rng.random() < 0.2,
            "produce": rng.choice((9, 12, 13)),
            "append_time": rng.random() < 0.2,
            "upstream_first": rng.random() < 0.5,
            "calm": rng.random() < 0.5,
        }

    def op(self, rng: random.Random) -> Op:
        connection = rng.choice((0, 0, 0, 1, 1, 2, 3))
        draw = rng.random()
        if draw < 0.34:
            frames = [self._frame(rng) for _ in range(rng.choice((1, 1, 1, 2, 3, 6)))]
            cuts = rng.choice(([], [], [], [1], [7, 13], [rng.randint(1, 200)]))
            return ["send", connection, frames, cuts]
        if draw < 0.60:
            kind = rng.choice(("ok",) * 8 + ("error", "error", "append-error", "wrong-id", "noise", "partitions"))
            return ["answer", connection, kind, self._error(rng), rng.choice((0, 0, 0, 1, 9)), rng.choice((1, 1, 1, 3))]
        if draw < 0.75:
            kind = rng.choice(
                ("true",) * 8 + ("unknown", "no-topic", "unreadable", "not-yet", "deleted", "open", "error")
            )
            return ["control", rng.randrange(3), kind, self._error(rng)]
        return rng.choice(
            [
                ["apply", connection],
                ["deliver", connection, rng.choice((1, 8, 1000))],
                ["lose-client", connection],
                ["lose-upstream", connection],
                ["tick", rng.choice((20, 20, 100, 400, 600, 3100))],
                ["tick", rng.choice((20, 20, 100, 400, 600, 3100))],
                ["tick", 20],
                ["stored", rng.randrange(2), rng.randrange(2)],
                ["forget", rng.randrange(2)],
                ["fresh", rng.randrange(2)],
                ["fresh", 1],
                ["move", rng.randrange(2), rng.randrange(PARTITIONS), rng.randint(1, 3)],
                ["truncate", rng.randrange(2), rng.randrange(PARTITIONS), rng.randrange(4)],
                ["stray", connection, rng.randrange(4)],
                ["unread", connection, rng.choice((0, 100))],
            ]
        )

    @staticmethod
    def _error(rng: random.Random) -> int:
        return rng.choice((0, 1, 2, 3, 6, 7, 10, 19, 20, 29, 45, 47, 56, 59, 87, 100, -1))

    def _frame(self, rng: random.Random) -> dict[str, Any]:
        changes = []
        if rng.random() < 0.12:
            kind = rng.choice(("byte", "byte", "byte", "length", "cut", "insert"))
            changes.append(
                [kind, rng.choice((rng.randrange(24), rng.randrange(400))), rng.choice((0, 255, rng.randrange(256)))]
            )
        draw = rng.random()
        if draw < 0.7:
            parts = [
                [rng.choice((0, 0, 0, 0, 1, 1, 1, 2, 3, 4)), rng.choice((0, 0, 0, 1)), self._records(rng)]
                for _ in range(rng.choice((1, 1, 1, 1, 2, 3)))
            ]
            frame = {
                "kind": "produce",
                "version": rng.choice((3, 7, 8, 9, 9, 10, 12, 12)),
                "acks": rng.choice((-1, -1, 1, 1, 0)),
                "timeout": rng.choice((0, 300, 3000, 30_000)),
                "transaction": (share := rng.random()) < 0.1,
                "parts": parts,
                "changes": changes,
            }
            if 0.02 < share < 0.1:  # make appends likely that a sequencer accepts
                for _, _, records in parts:
                    records[3], records[5] = records[3] or 1, records[5] | 8
            return frame
        if draw < 0.97:
            key, version = rng.choice(SERVED)
            return {
                "kind": "api",
                "key": key,
                "version": version,
                "variant": rng.randrange(12),
                "changes": changes,
            }
        return {"kind": "raw", "hex": rng.randbytes(rng.choice((3, 12, 40))).hex(), "changes": []}

    @staticmethod
    def _records(rng: random.Random) -> list[Any]:
        """See `make_batch`."""
        how = rng.choice(("end", "end", "end", "is", "none"))
        number = rng.choice((0, 0, 0, 1, -1, 2)) if how == "end" else rng.randrange(5)
        producer = rng.choice((0, 0, 1, 1, 2, 3))
        flags = rng.choice((0, 0, 0, 0, 1, 33, 2, 4, 8, 16))
        return [
            how,
            number,
            rng.choice((1, 1, 2, 3)),
            producer,
            rng.randrange(4),
            flags,
            rng.choice((0, 0, 0, 90_000, -1)),
        ]

    # ---- running a program

    def execute(self, program: Program, observed: set[Hashable], tracer: Tracer | Untraced) -> bytes:
        return _Run(program, observed, tracer).run()


class _Run:
    limits = LIMITS
    rounds_max = _ROUNDS_MAX

    def __init__(self, program: Program, observed: set[Hashable], tracer: Tracer | Untraced) -> None:
        setup = program.setup
        self.program = program
        self.observed = observed
        self.call = tracer.call
        self.now = 1000.0
        self.services = self._make_services(setup)
        self.view = StateView("fuzzed")
        book = AddressBook(19092)
        known = Known(
            view=self.view,
            file_configs=self._file_configs,
            topic_id=TOPIC_IDS.get,
            state_topic=STATE_TOPIC,
            state_topic_id=TOPIC_IDS[STATE_TOPIC],
        )

        def open_listeners(node_ids: Any) -> None:
            for node_id in node_ids:
                try:
                    book.listens_on(NodeId(node_id), book.listener_port(node_id))
                except ConfigError:
                    continue

        rewriters = RequestRewriters(
            book, lambda: known, lambda: frozenset({SHARED}), open_listeners, in_loop=self.call
        )
        self.dispatcher = self.services.dispatcher = Dispatcher(
            self.services, rewriters, self.limits, self.services.header_names
        )
        append_time = NOW_MS if setup["append_time"] else None
        self.logs = {
            TopicPartition(topic, partition): Log(log_append_time_ms=append_time)
            for topic in TOPICS
            for partition in range(PARTITIONS)
        }
        self.bases: dict[TopicPartition, tuple[int, int]] = {}
        self.wires: list[Wires] = []
        self.control: list[ForControl] = []
        self.control_requested_at: list[float] = []
        self.stores: list[tuple[int, m.Store | m.RecordAbortOnly | m.ReadBatches]] = []
        self.buffer = bytearray(RECEIVE_BYTES)
        self.always_fresh = True

    def _make_services(self, setup: dict[str, Any]) -> FuzzServices:
        return FuzzServices(setup)

    def _file_configs(self, topic: str) -> Mapping[str, str]:
        return {}

    # ---- operations

    def run(self) -> bytes:
        for op in self.program.ops:
            self._do(op)
        if self.program.setup["calm"]:
            self._calm_down()
        self._end_everything()
        for wires in self.wires:
            self._check_wires(wires)
        return b"".join(bytes(wires.client_got) + bytes(wires.upstream_got) for wires in self.wires)

    def _do(self, op: Op) -> None:
        kind, *rest = op
        match kind:
            case "send":
                wires = self._wires(rest[0])
                for frame in rest[1]:
                    wires.client_wrote += self._make_frame(wires, frame)
                self._deliver_client(wires, rest[2])
            case "deliver":
                wires = self._wires(rest[0])
                self._deliver_client(wires, [max(1, rest[1])])
            case "answer":
                for _ in range(min(8, abs(rest[4]))):
                    self._answer(self._wires(rest[0]), rest[1], rest[2], rest[3])
            case "apply":
                wires = self._wires(rest[0])
                for queried in wires.queried:
                    if queried.results is None:
                        self._carry_out(queried)
                        break
            case "lose-client":
                self._lose_client(self._wires(rest[0]))
            case "lose-upstream":
                self._lose_upstream(self._wires(rest[0]))
            case "tick":
                self._pass_time(abs(rest[0]) % 10_000 / 1000)
            case "control" if self.control:
                self._control(rest[0] % len(self.control), rest[1], rest[2])
            case "stored" if self.stores:
                connection, store = self.stores.pop(rest[0] % len(self.stores))
                self._perform(self._event(connection, _stored(store, bool(rest[1]))))
            case "forget":
                self._perform(self.call(self.dispatcher.forget_topic, TOPICS[rest[0] % 2], self.now))
            case "fresh":
                self.services.is_fresh = bool(rest[0])
                self.always_fresh = self.always_fresh and self.services.is_fresh
            case "move":
                self._log(rest[0] % 2, rest[1]).move(abs(rest[2]) % 100)
            case "truncate":
                self._log(rest[0] % 2, rest[1]).truncate(abs(rest[2]))
            case "stray":
                wires = self._wires(rest[0])
                wires.lied = True
                wires.answers[rest[1]] = None
                wires.upstream_wrote += struct.pack(">ii", 4, rest[1])
                self._deliver_upstream(wires, 0)
            case "unread":
                self.services.unread[self._wires(rest[0]).number] = abs(rest[1])
            case _:
                pass

    def _wires(self, index: int) -> Wires:
        index = abs(index) % CONNECTIONS_MAX
        while len(self.wires) <= index:
            number = len(self.wires) + 1
            self.wires.append(Wires(number))
            self.dispatcher.open(number, "proxy.local", self.now)
        return self.wires[index]

    def _log(self, topic: int, partition: int) -> Log:
        return self.logs[TopicPartition(TOPICS[topic % len(TOPICS)], partition % PARTITIONS)]

    # ---- writes of clients

    def _make_frame(self, wires: Wires, spec: dict[str, Any]) -> bytes:
        correlation = wires.next_correlation
        wires.next_correlation += 1
        if spec["kind"] == "raw":
            return bytes.fromhex(spec["hex"])
        if spec["kind"] == "api":
            key, version = spec["key"] % 32_768, spec["version"] % 32_768
            served = (key, version) in SERVED
            body = made_up_body(key, version, "request", spec["variant"] % 6)[:15_000] if served else b""
            # above 16 KiB it counts as buffered memory
            client_id = b"f" * (17_000 if spec["variant"] % 12 >= 6 else 4)
            header = struct.pack(">hhih", key, version, correlation, len(client_id)) + client_id
            data = bytearray(header + (b"\0" if request_header_is_flexible(key, version) else b"") + body)
            data[:0] = struct.pack(">i", len(data))
        else:
            data = bytearray(b"".join(bytes(chunk) for chunk in self._make_produce(correlation, spec)))
        for kind, index, value in spec["changes"]:
            at = abs(index) % len(data)
            match kind:
                case "byte":
                    data[at] = value & 255
                case "length":
                    struct.pack_into(">i", data, 0, struct.unpack_from(">i", data)[0] + value - 128)
                case "cut":
                    del data[at:]
                case _:
                    data.insert(at, value & 255)
            if not data:
                break
        return bytes(data)

    def _make_produce(self, correlation: int, spec: dict[str, Any]) -> list[bytes | memoryview]:
        version = 3 + (spec["version"] - 3) % 11
        topics: dict[str, list[PartitionData]] = {}
        for topic, partition, records in spec["parts"]:
            name = TOPICS[topic % len(TOPICS)]
            made = make_batch(self.logs[TopicPartition(name, partition % PARTITIONS)].end, records)
            topics.setdefault(name, []).append(PartitionData(partition % PARTITIONS, memoryview(made)))
        return encode_produce_request(
            ProduceRequest(
                version,
                correlation,
                "fuzz",
                b"",
                "tx" if spec["transaction"] else None,
                max(-2, min(3, spec["acks"])),
                spec["timeout"] % 2**31,
                tuple(
                    TopicData("" if version >= 13 else name, TOPIC_IDS[name] if version >= 13 else None, tuple(parts))
                    for name, parts in topics.items()
                ),
            )
        )

    # ---- delivery

    def _event(self, connection: int, event: m.Event) -> list[Action]:
        return self.call(self.dispatcher.session_event, connection, event, self.now)

    def _deliver_client(self, wires: Wires, cuts: list[int]) -> None:
        index = 0
        while wires.client_can_send and wires.client_delivered < len(wires.client_wrote):
            cut = cuts and index < _CUTS_MAX
            size = max(1, abs(cuts[index % len(cuts)]) % 1000) if cut else RECEIVE_BYTES
            index += 1
            data = wires.client_wrote[wires.client_delivered : wires.client_delivered + min(size, RECEIVE_BYTES)]
            wires.client_delivered += len(data)
            self.buffer[: len(data)] = data
            view = memoryview(self.buffer)[: len(data)]
            session = self.dispatcher.sessions.get(wires.number)
            taken = passed = 0
            if session is not None:
                taken, out = self.call(session.fast_path.take_up, view, self.now)
                if taken:
                    self._command(wires, m.ToUpstream(out))
                    if session.needs_ticks:
                        self.dispatcher.keep_time(session)
                passed = 0 if len(data) % 2 else min(session.state.client.unseen_bytes, len(data) - taken)
            if passed:
                self._command(wires, m.ToUpstream([view[taken : taken + passed]]))
                self._perform(self._event(wires.number, m.ClientPassed(passed)))
            if view[taken + passed :]:
                self._perform(self._event(wires.number, m.ClientBytes(view[taken + passed :])))
            self.buffer[: len(data)] = b"\xee" * len(data)

    def _deliver_upstream(self, wires: Wires, cut: int) -> None:
        index = 0
        while wires.upstream_can_send and wires.upstream_delivered < len(wires.upstream_wrote):
            size = max(1, abs(cut) % 1000) if cut and index < _CUTS_MAX else RECEIVE_BYTES
            index += 1
            data = wires.upstream_wrote[wires.upstream_delivered : wires.upstream_delivered + size]
            wires.upstream_delivered += len(data)
            self.buffer[: len(data)] = data
            view = memoryview(self.buffer)[: len(data)]
            session = self.dispatcher.sessions.get(wires.number)
            taken = passed = 0
            if session is not None:
                taken, out = self.call(session.fast_path.take_down, view, self.now)
                if taken:
                    self._command(wires, m.ToClient(out))
                passed = 0 if len(data) % 2 else min(session.state.upstream.unseen_bytes, len(data) - taken)
            if passed:
                self._command(wires, m.ToClient([view[taken : taken + passed]]))
                self._perform(self._event(wires.number, m.UpstreamPassed(passed)))
            if view[taken + passed :]:
                self._perform(self._event(wires.number, m.UpstreamBytes(view[taken + passed :])))
            self.buffer[: len(data)] = b"\xee" * len(data)

    def _lose_client(self, wires: Wires) -> None:
        if not wires.client_closed:
            wires.client_closed = True
            self._perform(self._event(wires.number, m.ClientLost()))

    def _lose_upstream(self, wires: Wires) -> None:
        if not wires.upstream_closed:
            wires.upstream_closed = True
            self._perform(self._event(wires.number, m.UpstreamLost("lost")))

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        self._perform(self.call(self.dispatcher.tick, self.now))
        while self.dispatcher.over_quota:
            self._perform(self.call(self.dispatcher.renew_quota, self.now))

    # ---- commands

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ForConnection(connection, command):
                    self._command(self.wires[connection - 1], command)
                case ForControl():
                    self.control.append(action)
                    self.control_requested_at.append(self.now)
        if actions:
            self._check_bounds()

    def _command(self, wires: Wires, command: m.Command) -> None:
        match command:
            case m.ToClient(chunks):
                if not (wires.proxy_closed_client or wires.client_closed):
                    wires.client_got += b"".join(chunks)
            case m.ToUpstream(chunks):
                if not (wires.proxy_closed_upstream or wires.upstream_closed):
                    wires.upstream_got += b"".join(chunks)
                    self._read_requests(wires)
            case m.ReadClient(on):
                wires.client_paused = not on
            case m.ReadUpstream(on):
                wires.upstream_paused = not on
            case m.CloseClient(_, fault):
                wires.proxy_closed_client = True
                self.observed.add(("closed", fault and fault.__name__))
            case m.CloseUpstream():
                wires.proxy_closed_upstream = True
            case m.Store() | m.RecordAbortOnly() | m.ReadBatches():
                self.stores.append((wires.number, command))
            case m.Count(_, label):
                self.observed.add(("count", label))
            case (
                m.TopicStale()
                | m.Downgraded()
                | m.HeadersCopied()
                | m.OffsetIgnored()
                | m.Throttled()
                | m.LateAppends()
            ):
                pass
            case _:
                raise Failure("a command without a connection", command)

    def _read_requests(self, wires: Wires) -> None:
        frames, rest = frames_of(wires.upstream_got[wires.upstream_read :], 8)
        wires.upstream_read = len(wires.upstream_got) - len(rest)
        wires.queried += [Requested(frame) for frame in frames]

    def _check_bounds(self) -> None:
        dispatcher, observed = self.dispatcher, self.observed
        for session in dispatcher.sessions.values():
            if session.state.client.buffered_bytes > self.services.frame_bytes_max + RECEIVE_BYTES:
                raise Failure("a session buffers more than a frame and a read", session.state.client.buffered_bytes)
            if session.unanswered_count > self.services.in_flight_requests_max:
                raise Failure("more requests in flight than allowed", session.unanswered_count)
            observed.add(
                (
                    "session",
                    min(session.unanswered_count, 3),
                    min(len(session.produce_requests), 3),
                    session.waits_for,
                    session.at_barrier,
                    session.over_quota,
                    session.state.client_closed,
                    session.state.upstream_closed,
                    session.state.mid_header,
                    session.state.collecting_since is not None,
                    session.state.client.unseen_bytes > 0,
                    session.state.upstream.unseen_bytes > 0,
                    session.drained,
                )
            )
        for sequencer in dispatcher.sequencers.values():
            if sequencer.waiting > 2 * self.limits.queue_max + self.limits.in_flight_max:
                raise Failure("a sequencer's queue exceeds its limit", sequencer.waiting)
            if (
                len(sequencer.state.retries.appended_batch) > self.limits.remembered_batches_max
                or len(sequencer.state.retries.fenced) > self.limits.remembered_producers_max
            ):
                raise Failure(
                    "a sequencer remembers too much",
                    (len(sequencer.state.retries.appended_batch), len(sequencer.state.retries.fenced)),
                )
            view = view_of(sequencer, self.now)
            observed.add(
                (
                    "sequencer",
                    sequencer.phase,
                    min(sequencer.waiting, 2),
                    view.admitted is not None,
                    min(len(view.in_flight), 2),
                    min(len(view.in_doubt), 2),
                    min(len(view.being_read), 2),
                    view.fence_confirmed,
                )
            )
        left = left_under_way(dispatcher, self.services.transactions)
        if left:
            raise Failure("an append stays pending without a request", left)

    # ---- responses of the broker

    def _carry_out(self, queried: Requested) -> None:
        queried.results = {}
        if queried.api_key != PRODUCE:
            return
        for topic, data in self._parts(queried):
            where = TopicPartition(topic, data.partition)
            log = self.logs.get(where)
            if log is None:
                queried.results[where] = (3, -1, -1)
            else:
                queried.results[where] = log.append(bytes(data.records or b""))

    def _parts(self, queried: Requested) -> Iterator[tuple[str, PartitionData]]:
        try:
            request = parse_produce_request(memoryview(queried.frame))
        except ProtocolError:
            return  # a client's mutated and relayed request
        for topic in request.topics:
            name = topic.name or NAMES_BY_ID.get(topic.topic_id or UUID(int=0), "?")
            for data in topic.partitions:
                yield name, data

    def _answer(self, wires: Wires, kind: str, error: int, cut: int) -> None:
        while wires.queried and self._acks_0(wires.queried[0]):
            queried = wires.queried.popleft()
            if queried.results is None:
                self._carry_out(queried)
        if not wires.queried:
            self._deliver_upstream(wires, cut)  # bytes left while the session did not read
            return
        error = (error + 2**15) % 2**16 - 2**15
        queried = wires.queried.popleft()
        head = struct.pack(">i", queried.correlation_id + (kind == "wrong-id"))
        wires.lied = wires.lied or kind in ("wrong-id", "noise", "partitions")
        if kind == "noise":
            body = random.Random(error).randbytes(abs(error) % 300)
            answer = struct.pack(">i", len(head) + len(body)) + head + body
        elif queried.api_key == PRODUCE:
            answer = self._produced(queried, kind, error)
            answer = answer[:4] + head + answer[8:]
        else:
            answer = self._other_answer(queried, head, error)
        verbatim = wires.answers
        verbatim[queried.correlation_id] = None if queried.correlation_id in verbatim else answer
        wires.upstream_wrote += answer
        self._deliver_upstream(wires, cut)

    @staticmethod
    def _acks_0(queried: Requested) -> bool:
        return queried.api_key == PRODUCE and acks_of(queried.frame) == 0

    def _other_answer(self, queried: Requested, head: bytes, variant: int) -> bytes:
        key, version = queried.api_key, queried.version
        known = codec_versions(key)
        if (
            APIS[key].handling in (Handling.RELAY, Handling.ALONE)
            or known is None
            or not known[0] <= version <= known[1]
        ):
            body = random.Random(f"{queried.correlation_id} {variant}").randbytes(abs(variant) % 200)
        else:
            body = b"\0" if response_header_is_flexible(key, version) else b""
            body += _looked_up(queried) or self._made_up_answer(key, version, abs(variant) % 6)
            if key == API_VERSIONS and (body[:2] == b"\0\x23" or throttle_ms(memoryview(head + body), key, version)):
                body = encode_response(key, version, Message())
        answer = bytearray(struct.pack(">i", len(head) + len(body)) + head + body)
        at = THROTTLED_AT[key][version] if key in THROTTLED_AT and version < len(THROTTLED_AT[key]) else 0
        if at and len(answer) >= at + 4:
            answer[at : at + 4] = struct.pack(">i", _throttle_ms(queried))
        return bytes(answer)

    def _made_up_answer(self, key: int, version: int, variant: int) -> bytes:
        return made_up_body(key, version, "response", variant)

    def _produced(self, queried: Requested, kind: str, error: int) -> bytes:
        if queried.results is None and (kind in ("ok", "append-error", "partitions", "wrong-id") or not error):
            self._carry_out(queried)
        topics: dict[str, list[PartitionResult]] = {}
        for topic, data in self._parts(queried):
            where = TopicPartition(topic, data.partition)
            code, base, appended_at = (queried.results or {}).get(where, (error, -1, -1))
            if kind == "append-error" and not code:
                code, base = error, base if error % 2 else -1
            elif kind == "error" and data.records is None:
                code = INVALID_RECORD
            partition = data.partition + (kind == "partitions")
            topics.setdefault(topic, []).append(PartitionResult(partition, code, base, appended_at, 0))
        version = min(queried.version, 13)
        response = ProduceResponse(
            queried.correlation_id,
            tuple(
                TopicResult("" if version >= 13 else name, TOPIC_IDS.get(name, UUID(int=5)), tuple(results))
                for name, results in topics.items()
            ),
            _throttle_ms(queried),
            (NodeEndpoint(1, "b1", 9092, None),) if error % 2 and version >= 10 else (),
        )
        return encode_produce_response(response, version)

    # ---- responses of the control client

    def _control(self, index: int, kind: str, error: int) -> None:
        requested, queried_at = self.control.pop(index), self.control_requested_at.pop(index)
        log, bases = self.logs.get(requested.partition, Log()), self.bases
        if requested.partition not in self.logs:
            kind = "no-topic"
        event = carry_out(
            requested.effect, requested.partition, log, bases, queried_at=queried_at, kind=kind, error=error
        )
        event = self._compared(requested.effect, event)
        self._perform(self.call(self.dispatcher.sequencer_event, requested.partition, event, self.now))

    def _compared(self, effect: object, event: g.Event) -> g.Event:
        return event

    # ---- end

    def _deliver_once(self, kind: str = "true") -> bool:
        """Deliver everything deliverable. Return whether anything was."""
        moved = False
        for wires in self.wires:
            if wires.client_can_send and wires.client_delivered < len(wires.client_wrote):
                self._deliver_client(wires, [])
                moved = True
            if wires.upstream_can_send and wires.upstream_delivered < len(wires.upstream_wrote):
                self._deliver_upstream(wires, 0)
                moved = True
            if wires.queried and not (wires.proxy_closed_upstream or wires.upstream_closed):
                self._answer(wires, "ok", 0, 0)
                moved = True
        while self.stores:
            connection, store = self.stores.pop(0)
            self._perform(self._event(connection, _stored(store, True)))
            moved = True
        for _ in range(len(self.control)):
            self._control(0, kind, 0)
            moved = True
        return moved

    def _resolve(self, kind: str = "true") -> None:
        """Deliver until nothing changes, beyond every time limit."""
        quiet = 0
        for _ in range(self.rounds_max):
            quiet = 0 if self._deliver_once(kind) else quiet + 1
            if quiet > 12 and not self.dispatcher.needs_ticks:
                return
            self._pass_time(_LONG_SECONDS / 12 if quiet > 2 else 0.06)
            for wires in self.wires:  # closed connections end after their last bytes
                if wires.proxy_closed_client:
                    self._lose_client(wires)
                if wires.proxy_closed_upstream:
                    self._lose_upstream(wires)
            if quiet > 24:
                return

    def _calm_down(self) -> None:
        """With correct responses and reads, every connected client gets its responses."""
        self.services.is_fresh = True
        self._resolve()
        # The process closes connections that stopped within a frame; until then they may block others.
        for wires in self.wires:
            frames, rest = frames_of(wires.client_wrote, 8, self.services.frame_bytes_max)
            if rest and not wires.proxy_closed_client and wires.client_delivered == len(wires.client_wrote):
                self._lose_client(wires)
        self._resolve()
        for wires in self.wires:
            if (
                wires.proxy_closed_client
                or wires.client_closed
                or wires.upstream_closed
                or wires.proxy_closed_upstream
                or wires.lied
            ):
                continue
            frames, _ = frames_of(wires.client_wrote, 8, self.services.frame_bytes_max)
            requested = [each for each in frames if struct.unpack_from(">h", each) != (PRODUCE,) or acks_of(each) != 0]
            answered, _ = frames_of(wires.client_got, 4)
            if len(answered) < len(requested):
                at = requested[len(answered)]
                key, version, correlation = struct.unpack_from(">hhi", at)
                raise Failure("a request is never answered", f"API {key} v{version} correlation id {correlation}")

    def _end_everything(self) -> None:
        for wires in self.wires:
            for lose in (self._lose_upstream, self._lose_client)[:: 1 if self.program.setup["upstream_first"] else -1]:
                lose(wires)
        while self.stores:
            connection, store = self.stores.pop(0)
            self._perform(self._event(connection, _stored(store, True)))
        if self.dispatcher.sessions:
            raise Failure("a session is left after both connections ended", len(self.dispatcher.sessions))
        self._resolve("true" if self.program.setup["calm"] else "unreadable")
        stuck = [
            f"{sequencer.partition} {sequencer.phase.name}"
            for sequencer in self.dispatcher.sequencers.values()
            if not sequencer.idle
        ]
        if stuck:
            raise Failure("a sequencer is stuck after all clients disconnected", stuck)
        if self.dispatcher.needs_ticks:
            raise Failure("ticks are needed although nothing waits")
        if self.services.free_bytes != self.services.memory_bytes:
            raise Failure("memory is not released at the end", self.services.memory_bytes - self.services.free_bytes)

    # ---- bytes on the connections

    def _check_wires(self, wires: Wires) -> None:
        sent, _ = frames_of(wires.client_wrote, 8, self.services.frame_bytes_max)
        ids = [struct.unpack_from(">i", frame, 4)[0] for frame in sent]
        self._check_answers(wires, sent)
        if len(set(ids)) == len(ids) and self.always_fresh:
            self._check_passed(wires, dict(zip(ids, sent, strict=True)))

    def _check_answers(self, wires: Wires, sent: list[bytes]) -> None:
        requested = [each for each in sent if struct.unpack_from(">h", each) != (PRODUCE,) or acks_of(each) != 0]
        answers, rest = frames_of(wires.client_got, 4)
        if len(answers) > len(requested) + wires.lied:  # a false response may answer a request that arrived partly
            raise Failure("more answers than requests", (len(answers), len(requested)))
        for request, answer in zip(requested, answers, strict=False):
            if request[4:8] != answer[:4]:
                raise Failure("an answer out of order", (request[4:8].hex(), answer[:4].hex()))
            correlation = struct.unpack_from(">i", request, 4)[0]
            whole = wires.answers.get(correlation)
            if whole is not None and whole[4:8] == answer[:4] and self._relayed(request) and whole[4:] != answer:
                raise Failure("a relayed response was changed", correlation)
            if request[:2] == b"\0\0":
                self._check_success(request, answer, lied=wires.lied)
        if rest and wires.answers and len(rest) >= 8 and len(answers) < len(requested):
            correlation = struct.unpack_from(">i", requested[len(answers)], 4)[0]
            whole = wires.answers.get(correlation)
            if whole is not None and not whole.startswith(rest):
                raise Failure("the beginning of a relayed response was changed", correlation)

    @staticmethod
    def _relayed(request: bytes) -> bool:
        return request[:2] != b"\0\0" and relayed_versions(request)

    def _check_success(self, request: bytes, answer: bytes, *, lied: bool) -> None:
        try:
            queried = parse_produce_request(memoryview(request))
        except ProtocolError:
            return
        try:
            reported = parse_produce_response(memoryview(answer), queried.api_version)
        except ProtocolError as error:
            if not lied:
                raise Failure("an unreadable response to Produce", str(error)) from None
            return
        results = {
            (topic.name, topic.topic_id, each.partition): each for topic in reported.topics for each in topic.partitions
        }
        for topic in queried.topics:
            name = NAMES_BY_ID.get(topic.topic_id, "") if topic.topic_id else topic.name
            policy = POLICIES.get(name)
            if policy is None or not policy.is_checked:
                continue
            for data in topic.partitions:
                result = results.get((topic.name, topic.topic_id, data.partition))
                if result is None:
                    raise Failure("a response lacks a partition", (topic.name, data.partition))
                if result.error_code or data.records is None:
                    continue
                try:
                    scan = scan_batch(
                        data.records,
                        self.services.header_names,
                        TopicPartition(name, data.partition),
                        source_is_base=False,
                        decompressed_bytes_max=self.services.decompressed_bytes_max,
                    )
                except ProtocolError:
                    raise Failure("success for an unreadable batch") from None
                if scan.expected_base_offset not in (None, result.base_offset):
                    raise Failure("success at another offset", (scan.expected_base_offset, result.base_offset))

    @staticmethod
    def _check_passed(wires: Wires, sent: dict[int, bytes]) -> None:
        """Relayed bytes are in the client's order and unchanged; the last frame may be incomplete."""
        relayed = [frame for frame in sent.values() if relayed_versions(frame)]
        frames, rest = frames_of(wires.upstream_got, 8)
        at = 0
        for frame in frames:
            original = sent.get(struct.unpack_from(">i", frame, 4)[0])
            if original is None or not relayed_versions(original) or frame[:2] != original[:2]:
                continue  # or the lookup of the topic's id
            if at >= len(relayed) or frame != relayed[at]:
                raise Failure("a relayed request was changed", frame[:40].hex())
            at += 1
        delivered = bytes(wires.client_wrote[: wires.client_delivered])
        if rest and rest not in delivered:
            raise Failure("the beginning of a relayed request was changed", rest[:40].hex())
