"""Requests with many partitions, topics, records, record headers, tagged fields or bytes.

A dialogue (`dialogue.py`) with the process's own limits. It searches for calls longer than `engine.CALL_SECONDS`. The
work of a thread (`ReadBatches`) does not count, but handling its result does.
"""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from fencepost_proxy.config import Limits
from fencepost_proxy.sequencer import events as g
from fencepost_proxy.sequencer.log_view import read_appended_batch
from fencepost_proxy.session.batches.reading import HERE_BYTES_MAX, PARTITIONS_MAX
from fencepost_proxy.wire.apis import APIS, Handling
from fencepost_proxy.wire.control import (
    decode_request,
    decode_response,
    encode_request,
    encode_response,
    request_header_is_flexible,
)
from fencepost_proxy.wire.schema import Message
from tests.fuzz.dialogue import SERVED, TOPICS, Dialogue, FuzzServices, Wires, _Run, made_up_body
from tests.fuzz.engine import Op, Program, Tracer, Untraced
from tests.fuzz.log import Log
from tests.support import bytewise

_COUNTS = (1, 100, 1_000, PARTITIONS_MAX, PARTITIONS_MAX + 1, 20_000, 65_536)
_CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
#: Elements of a control message: few enough for the event loop, and too many for each step.
_ELEMENTS = (1, 40, 100, 250, 1_000, 5_000, 20_000)
_UNPACKED_MAX = 96 << 20
_LIMITS = Limits()


class _LargeServices(FuzzServices):
    frame_bytes_max = _LIMITS.frame_bytes_max
    in_flight_requests_max = _LIMITS.in_flight_requests_max
    decompressed_bytes_max = _LIMITS.decompressed_bytes_max

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self.read_here_bytes_max = HERE_BYTES_MAX
        self.memory_bytes = self.free_bytes = _LIMITS.buffered_bytes_max


class Large(Dialogue):
    name = "large"

    def op(self, rng: random.Random) -> Op:
        connection = rng.choice((0, 0, 1))
        draw = rng.random()
        if draw < 0.5:
            return ["send", connection, [self._frame(rng)], []]
        if draw < 0.7:
            return ["answer", connection, rng.choice(("ok", "ok", "error")), self._error(rng), 0, 1]
        return rng.choice([["tick", 20], ["stored", 0, 1], ["control", 0, "true", 0]])

    def _frame(self, rng: random.Random) -> dict[str, Any]:
        return self.frame(rng)

    @staticmethod
    def frame(rng: random.Random) -> dict[str, Any]:
        kind = rng.choice(
            ("partitions", "partitions", "records", "records", "headers", "tags", "small", "control", "control")
        )
        return {
            "kind": kind,
            "version": rng.choice((3, 8, 9, 12)),
            "acks": rng.choice((-1, -1, 1, 0)),
            "topic": rng.choice((0, 0, 1, 1, 2)),
            "topics": rng.choice((1, 1, *_COUNTS)),
            "count": rng.choice(_COUNTS),
            "codec": rng.randrange(len(_CODECS)),
            "bytes": rng.choice((0, 0, 100, 100, 100_000, 1 << 20, 8 << 20, 32 << 20, _UNPACKED_MAX)),
            "delta": rng.choice((0, 0, 1, 5_000)),
            "ours": rng.randrange(4),
            "where": rng.randrange(4),
            "transaction": rng.random() < 0.1,
            "variant": rng.randrange(6),
            "elements": rng.choice(_ELEMENTS),
            "changes": [],
        }

    def execute(self, program: Program, observed: set[Hashable], tracer: Tracer | Untraced) -> bytes:
        return _LargeRun(Program(program.setup, program.ops[:12]), observed, tracer).run()


class _LargeRun(_Run):
    limits = g.SequencerLimits()
    rounds_max = 20_000  # one sequencer after the other
    elements = 1

    def __init__(self, program: Program, observed: set[Hashable], tracer: Tracer | Untraced) -> None:
        super().__init__(program, observed, tracer)
        self.logs = defaultdict(Log, self.logs)

    def _make_services(self, setup: dict[str, Any]) -> FuzzServices:
        return _LargeServices(setup)

    def _file_configs(self, topic: str) -> Mapping[str, str]:
        return {"fencepost.check.expected.offsets": "true"} if topic == TOPICS[0] else {}

    def _made_up_answer(self, key: int, version: int, variant: int) -> bytes:
        """As long as the latest request."""
        return _body(key, version, "response", variant, self.elements)

    def _compared(self, effect: object, event: g.Event) -> g.Event:
        """As `services/log_reader.py` does in a thread."""
        match effect, event:
            case g.ReadBatch(pending, offset), g.BatchRead(_, g.Found(batch)):
                names, bytes_max = self.services.header_names, self.services.decompressed_bytes_max
                return g.BatchRead(
                    pending, g.Found(batch, offset, read_appended_batch(batch, offset, pending, names, bytes_max))
                )
        return event

    def _check_bounds(self) -> None:
        """Too slow after every event with thousands of sequencers."""

    def _make_frame(self, wires: Wires, spec: dict[str, Any]) -> bytes:
        if "topics" not in spec:
            return super()._make_frame(wires, spec)
        correlation = wires.next_correlation
        wires.next_correlation += 1
        self.elements = min(abs(spec["elements"]), 100_000)
        frame = _framed(b"".join(_frame(spec, correlation)))
        # Many in one read, or one expensive one.
        return frame * (1 if spec["kind"] != "small" else 1 + 65_536 // len(frame))


def _framed(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def _frame(spec: dict[str, Any], correlation: int) -> Iterator[bytes]:
    kind, count = spec["kind"], min(abs(spec["count"]), 100_000)
    name = TOPICS[spec["topic"] % 3].encode()
    match kind:
        case "partitions":
            topics = max(1, min(abs(spec["topics"]), count))
            records = [None, b"", _records("none", 1, 10, 0, 1), b"no batch"][spec["ours"] % 4]
            names = [b"topic-%d" % number for number in range(topics - 1)] + [name]
            return _produce(spec, correlation, [(each, count // topics, records) for each in names])
        case "records":
            # The first, the last or no record of a million has our header.
            codec = _CODECS[spec["codec"] % 5]
            size = min(abs(spec["bytes"]), _UNPACKED_MAX if codec != "none" else 1 << 20)
            records = _records(codec, 15 * count, size, spec["delta"], spec["ours"] % 4)
            return _produce(spec, correlation, [(name, 1 + spec["where"] % 2, records)])
        case "headers":
            records = _headers(_CODECS[spec["codec"] % 5], count, spec["ours"] % 4)
            return _produce(spec, correlation, [(name, 1 + spec["where"] % 2, records)])
        case "tags":
            return _produce({**spec, "version": 9}, correlation, [(name, 8, _records("none", 1, 10, 0, 1))], tags=count)
        case "small":
            key, version = SERVED[spec["count"] % len(SERVED)]
            return iter((_header(key, version, correlation), _body(key, version, "request", spec["variant"] % 6, 0)))
        case _:
            key, version = READ[(spec["count"] + spec["bytes"] + spec["where"] + spec["variant"]) % len(READ)]
            body = _body(key, version, "request", spec["variant"] % 6, min(abs(spec["elements"]), 100_000))
            return iter((_header(key, version, correlation), body))


def _header(key: int, version: int, correlation: int) -> bytes:
    tags = b"\0" if request_header_is_flexible(key, version) else b""
    return struct.pack(">hhih", key, version, correlation, 0) + tags


#: Those of `SERVED` that are decoded and can have long arrays.
READ: Final = [(key, version) for key, version in SERVED if APIS[key].handling not in (Handling.RELAY, Handling.ALONE)]


@lru_cache(maxsize=128)
def _body(key: int, version: int, kind: str, variant: int, elements: int) -> bytes:
    """The first array has that many elements with distinct names; so has the first array of its first element."""
    decode, encode = (decode_request, encode_request) if kind == "request" else (decode_response, encode_response)
    message = decode(key, version, made_up_body(key, version, kind, variant))
    _lengthen(message, elements, within=variant % 2 == 1)
    return encode(key, version, message)


def _lengthen(message: Message, elements: int, *, within: bool) -> None:
    value = next((each for each in vars(message).values() if isinstance(each, list) and each), [])
    first = value[0] if value else None
    if isinstance(first, Message) and within:
        _lengthen(first, elements, within=False)
    elif isinstance(first, Message):
        value.extend(_renamed(first, number) for number in range(elements))
    elif isinstance(first, str):
        value.extend(f"topic-{number}" for number in range(elements))
    elif isinstance(first, int):
        value.extend(range(elements))


def _renamed(message: Message, number: int) -> Message:
    named = Message(**vars(message))
    for name, value in vars(message).items():
        if isinstance(value, str):
            setattr(named, name, f"topic-{number}")
            return named
    return named


# --- Produce requests, without the product's encoder, which is measured too -------------------------------------------


def _produce(
    spec: dict[str, Any], correlation: int, topics: list[tuple[bytes, int, bytes | None]], *, tags: int = 0
) -> Iterator[bytes]:
    """`topics` – name, number of partitions, and the records of each."""
    version, where = 3 + (spec["version"] - 3) % 10, spec["where"] % 4
    flexible = version >= 9
    many = _uvarint(tags) + b"".join(_uvarint(instance_id) + b"\0" for instance_id in range(tags))

    def section(level: int) -> bytes:
        return b"" if not flexible else many if tags and level == where else b"\0"

    def count(number: int) -> bytes:
        return _uvarint(number + 1) if flexible else struct.pack(">i", number)

    def text(value: bytes | None) -> bytes:
        if value is None:
            return b"\0" if flexible else b"\xff\xff"
        return count(len(value)) + value if flexible else struct.pack(">h", len(value)) + value

    yield struct.pack(">hhih", 0, version, correlation, 4) + b"fuzz" + section(0)
    yield text(b"tx" if spec["transaction"] else None) + struct.pack(">hi", max(-1, min(1, spec["acks"])), 30_000)
    yield count(len(topics))
    for name, partitions, records in topics:
        yield text(name) + count(partitions)
        null = b"\0" if flexible else b"\xff\xff\xff\xff"
        head = null if records is None else count(len(records)) + records
        for partition in range(partitions):
            yield struct.pack(">i", partition) + head + section(1)
        yield section(2)
    yield section(3)


def _uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


_SAYS = [(b"fencepost-expected-offset", b"0")]


@lru_cache(maxsize=64)
def _records(codec: str, count: int, size: int, delta: int, ours: int) -> bytes:
    """`size` – bytes of the first record's value; the others are minimal."""
    count = max(1, count)
    first = bytewise.record(0, _SAYS if ours == 1 else [], timestamp_delta=delta, value=bytes(size))
    tiny = bytewise.record(0, key=None, value=None)
    records = first + tiny * (count - 2)
    if count > 1:
        records += bytewise.record(count - 1, _SAYS if ours == 2 else [], value=None)
    return _batch(codec, records, count)


@lru_cache(maxsize=64)
def _headers(codec: str, count: int, ours: int) -> bytes:
    """Headers of one record, or of the first of several."""
    headers = [(b"h", None)] * count
    if ours:
        headers.insert(len(headers) * (ours - 1) // 2, _SAYS[0])
    return _batch(codec, bytewise.record(0, headers) + bytewise.record(1), 2)


def _batch(codec: str, records: bytes, count: int) -> bytes:
    return bytes(bytewise.batch([records], count=count, codec=codec, max_timestamp_ms=bytewise.NOW_MS))
