"""A TCP proxy in front of Kafka brokers or proxies, with faults at chosen requests, responses and bytes.

`FaultProxy` runs in a thread of the test. `FaultProxies` runs several in a process of their own
(`python -m tests.kit.fault_proxy`, controlled by JSON lines), so that they take no time from the clients under test.

| fault | effect |
|---|---|
| `Cut` | closes the connection, with FIN or RST |
| `Drop` | discards the frame, or everything from here on |
| `Hold` | keeps the frame and all that follows until `release`, for a time, or until several wait |
| `Duplicate` | sends the frame twice |
| `Change` | sends another frame instead |
| `Respond` | answers the request without the broker |

Each has a direction. A fault of a response is chosen by its request. The fault of one connection delays no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import queue
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, Self, TypeVar

from tests.kit.lines import LineProcess
from tests.kit.waiting import until

Direction = Literal["request", "response"]
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PRODUCE = 0
_CHUNK_BYTES = 1 << 18
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
_REQUESTS_MAX = 20_000
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with RST


@dataclass(eq=False)
class Fault:
    """What happens to the next `times` frames with these words, of this API (None: any).

    `part` (1.0: all) or `after` (bytes, may end in a later frame) is forwarded before. A fraction between 0 and 1 is
    always inside the frame. `observed`: the request has arrived. `happened`: the fault has taken effect.
    """

    direction: Direction
    words: bytes = b""
    api_key: int | None = PRODUCE
    _: KW_ONLY
    part: float = 0.0
    after: int = 0
    times: float = 1
    within_seconds: float = math.inf
    when: Callable[[bytes], bool] = field(default=lambda request: True, repr=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.within_seconds
        self.request, self.observed, self.happened = b"", threading.Event(), threading.Event()

    @property
    def is_over(self) -> bool:
        return self.times <= 0 or time.monotonic() >= self.deadline

    def matches(self, request: bytes) -> bool:
        is_of_api = self.api_key is None or int.from_bytes(request[4:6]) == self.api_key
        return is_of_api and self.words in request and self.when(request)

    def position(self, size: int) -> int:
        if 0 < self.part < 1:
            return min(max(1, int(size * self.part)), size - 1)
        return self.after + size * int(self.part)

    async def strike(self, channel: Channel, frame: bytes, sent: int) -> None:
        """`sent` bytes of the frame are forwarded. This decides about the rest."""
        raise NotImplementedError

    def wait_observed(self, seconds: float = 60.0) -> None:
        assert self.observed.wait(seconds), f"no request for {self}"

    def wait(self, seconds: float = 60.0) -> None:
        assert self.happened.wait(seconds), f"never happened: {self}"


@dataclass(eq=False)
class Cut(Fault):
    """`refuse`: all connections are closed, and new ones until `FaultProxy.accept`."""

    reset: bool = False
    refuse: bool = False

    async def strike(self, channel: Channel, frame: bytes, sent: int) -> None:
        connection = channel.connection
        if self.refuse:
            connection.proxy.close_all(math.inf, reset=self.reset)
        connection.close(reset=self.reset)
        self.happened.set()


@dataclass(eq=False)
class Drop(Fault):
    """`everything`: all that follows, too. Then the connection stays open, for at most `seconds`."""

    everything: bool = False
    seconds: float | None = None
    reset: bool = False

    async def strike(self, channel: Channel, frame: bytes, sent: int) -> None:
        self.happened.set()
        if self.everything:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.seconds):
                    while await channel.reader.read(_CHUNK_BYTES):
                        pass
            channel.connection.close(reset=self.reset)


@dataclass(eq=False)
class Hold(Fault):
    """`count`: so many frames are kept, on all connections, and sent on with the last, in one write per connection.

    Kept frames are delivered even if their sender has disconnected.
    """

    count: int | None = None
    seconds: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.times = self.count or 1
        self._channels: list[Channel] = []
        self._released = False

    async def strike(self, channel: Channel, frame: bytes, sent: int) -> None:
        self._channels.append(channel)
        channel.pause()
        await channel.send(frame[sent:])
        self.happened.set()
        asyncio.get_running_loop().call_later(self.seconds, self.release)
        if len(self._channels) == self.count:
            self.release()
        elif self._released:  # meanwhile
            self._resume()

    def release(self) -> None:
        if not self._released:
            self.times, self._released = 0, True
            self._resume()

    def _resume(self) -> None:
        for channel in dict.fromkeys(self._channels):
            with contextlib.suppress(RuntimeError):  # the proxy has ended
                channel.connection.proxy.loop.call_soon_threadsafe(channel.resume)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(eq=False)
class Duplicate(Fault):
    async def strike(self, channel: Channel, frame: bytes, sent: int) -> None:
        await channel.send(frame[sent:] + frame)
        self.happened.set()


@dataclass(eq=False)
class Change(Fault):
    """`change` gets the request and the frame. A frame that it leaves alone does not count as a fault."""

    change: Callable[[bytes, bytes], bytes] = lambda request, frame: frame

    async def strike(self, channel: Channel, frame: bytes, sent: int) -> None:
        changed = self.change(self.request, frame)
        await channel.send(changed[sent:])
        if changed != frame:
            self.happened.set()


@dataclass(eq=False)
class Respond(Fault):
    """`respond` makes the response from the request, which goes no further."""

    respond: Callable[[bytes], bytes] = lambda request: request

    async def strike(self, channel: Channel, frame: bytes, sent: int) -> None:
        await channel.connection.channels["response"].send(self.respond(frame))
        self.happened.set()


_AnyFault = TypeVar("_AnyFault", bound=Fault)


class Request(NamedTuple):
    connection: Connection
    frame: bytes


class FaultProxy:
    """Listens from the start. `targets` may be set later; connections alternate between those that are up.

    `raw`: no frames; faults hit the next bytes. `requests`: those that were sent on. `hits`: how many faults struck.
    """

    def __init__(self, *targets: tuple[str, int], host: str = "127.0.0.1", port: int = 0, raw: bool = False) -> None:
        self.targets = targets
        self.is_raw = raw
        self._listener = socket.create_server((host, port))
        self.port = int(self._listener.getsockname()[1])
        self.address = f"{host}:{self.port}"
        self.requests: deque[Request] = deque(maxlen=_REQUESTS_MAX)
        self.hits: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._connections: set[Connection] = set()
        self._rotation = itertools.count()
        self._refuses_until = 0.0
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), daemon=True)
        self._thread.start()
        assert started.wait(_ANSWER_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_ANSWER_SECONDS)

    # ---- what tests do

    def add(self, fault: _AnyFault) -> _AnyFault:
        self._faults = [*(each for each in self._faults if not each.is_over), fault]
        return fault

    def forget_faults(self) -> None:
        self._faults = []

    def block(self, *client_ids: bytes) -> None:
        """Close each connection that sends a request with one of these client ids."""
        self.add(Cut("request", api_key=None, times=math.inf, when=lambda request: client_id(request) in client_ids))

    def cut_all(self, *, reset: bool = False) -> None:
        self._in_loop(lambda: self.close_all(0, reset=reset))

    def refuse(self, seconds: float = math.inf, *, reset: bool = False) -> None:
        """Close all connections, and new ones for some time or until `accept`."""
        self.hits["refuse"] += 1
        self._in_loop(lambda: self.close_all(seconds, reset=reset))

    def accept(self) -> None:
        self._refuses_until = 0.0

    @property
    def produced(self) -> list[bytes]:
        """All Produce requests."""
        return [frame for _, frame in list(self.requests) if int.from_bytes(frame[4:6]) == PRODUCE]

    def wait_for(self, words: bytes) -> list[Request]:
        """Wait until a request with these words was sent on. What was sent stays sent."""
        found: list[Request] = until(
            lambda: [each for each in list(self.requests) if words in each.frame],
            f"{words!r} to be sent on",
            pause_seconds=0.002,
        )
        return found

    def cut_after(self, words: bytes) -> None:
        """Close the connection of a request with these words, once it was sent on."""
        for request in self.wait_for(words):
            self._in_loop(request.connection.close)

    # ---- inside

    def _in_loop(self, action: Callable[[], None]) -> None:
        async def act() -> None:
            action()

        asyncio.run_coroutine_threadsafe(act(), self.loop).result(_ANSWER_SECONDS)

    def close_all(self, refuse_seconds: float, *, reset: bool) -> None:
        self._refuses_until = time.monotonic() + refuse_seconds
        for connection in self._connections:
            connection.close(reset=reset)

    async def _serve(self, started: threading.Event) -> None:
        self.loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accepted, sock=self._listener)
        started.set()
        await self._end.wait()
        server.close()
        while self._connections:
            self.close_all(math.inf, reset=False)
            await asyncio.sleep(0.001)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = None
        try:
            far = None if self._refuses() else await self._connect()
            if far is not None:
                connection = Connection(self, (reader, writer), far)
                self._connections.add(connection)
                if not self._refuses():
                    await connection.run()
        finally:
            if connection is not None:
                connection.close()
                self._connections.discard(connection)
            writer.transport.abort()

    def _refuses(self) -> bool:
        return time.monotonic() < self._refuses_until

    async def _connect(self) -> Stream | None:
        first = next(self._rotation) % max(1, len(self.targets))
        for target in self.targets[first:] + self.targets[:first]:
            with contextlib.suppress(OSError, TimeoutError):
                return await asyncio.wait_for(asyncio.open_connection(*target), _CONNECT_SECONDS)
        return None

    def take(self, direction: Direction, request: bytes) -> Fault | None:
        for fault in self._faults:
            if fault.direction == direction and not fault.is_over and fault.matches(request):
                fault.times -= 1
                fault.request = request
                fault.observed.set()
                self.hits[type(fault).__name__.lower()] += 1
                return fault
        return None


class Connection:
    def __init__(self, proxy: FaultProxy, near: Stream, far: Stream) -> None:
        self.proxy = proxy
        self.channels: dict[Direction, Channel] = {
            "request": Channel(self, "request", near[0], far[1]),
            "response": Channel(self, "response", far[0], near[1]),
        }
        self.closed = False
        self._due: dict[bytes, tuple[Fault, bytes]] = {}  # faults of responses, and requests, by correlation id

    async def run(self) -> None:
        tasks = [asyncio.create_task(channel.run()) for channel in self.channels.values()]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.close()
            await asyncio.gather(*tasks)

    def close(self, *, reset: bool = False) -> None:
        self.closed = True
        for channel in self.channels.values():
            channel.close(reset=reset)

    def fault_for(self, direction: Direction, frame: bytes) -> Fault | None:
        if self.proxy.is_raw:
            return self.proxy.take(direction, frame)
        if direction == "response":
            fault, request = self._due.pop(frame[4:8], (None, b""))
            if fault is not None:
                fault.request = request
            return fault
        if expected := self.proxy.take("response", frame):
            self._due[frame[8:12]] = expected, frame
        return self.proxy.take("request", frame)


class Channel:
    """One direction of a connection."""

    def __init__(
        self, connection: Connection, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.connection = connection
        self.reader = reader
        self._direction = direction
        self._writer = writer
        self._kept: list[bytes] = []
        self._flows = asyncio.Event()
        self._flows.set()
        writer.transport.set_write_buffer_limits(0)  # `drain` waits until the kernel has everything

    async def run(self) -> None:
        with contextlib.suppress(OSError):
            await self._relay()
        await self._flows.wait()
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def _relay(self) -> None:
        fault, left = None, 0
        async for piece in self._pieces():
            if self.connection.closed:
                return
            if fault is None and (fault := self.connection.fault_for(self._direction, piece)):
                left = fault.position(len(piece))
            if fault is None or left > len(piece):
                left -= len(piece)
                await self.send(piece)
            else:
                await self.send(piece[:left])
                await fault.strike(self, piece, left)
                fault = None

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Frames with their length, and what is left at the end. Raw: whatever arrives."""
        buffer, is_raw = bytearray(), self.connection.proxy.is_raw
        while data := await self.reader.read(_CHUNK_BYTES):
            buffer += data
            while len(buffer) >= (size := len(buffer) if is_raw else 4 + int.from_bytes(buffer[:4])) > 0:
                yield bytes(buffer[:size])
                del buffer[:size]
        if buffer:
            yield bytes(buffer)

    async def send(self, data: bytes) -> None:
        if not self._flows.is_set():
            self._kept.append(data)
        elif data:
            self._writer.write(data)
            await self._writer.drain()
            self._record(data)

    def _record(self, *frames: bytes) -> None:
        if self._direction == "request" and not self.connection.proxy.is_raw:
            self.connection.proxy.requests.extend(Request(self.connection, each) for each in frames)

    def pause(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        if not self.connection.closed:
            self._writer.write(b"".join(self._kept))
            self._record(*self._kept)
        self._kept.clear()
        self._flows.set()

    def close(self, *, reset: bool) -> None:
        if reset:
            with contextlib.suppress(OSError):
                self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self._writer.transport.abort()
        self._flows.set()


def client_id(request: bytes) -> bytes:
    return request[14 : 14 + int.from_bytes(request[12:14])]


def produce_error(error_code: int, *, with_offset: bool) -> Callable[[bytes, bytes], bytes]:
    """For `Change`: the broker has appended the one batch of a request, and responds with this error.

    As after a timeout, or if replicas were lost. With the batch's base offset, or -1.
    """

    def change(request: bytes, response: bytes) -> bytes:
        (version,) = struct.unpack_from(">h", request, 6)
        at = 4 + 4  # length, correlation id
        if version >= 13:
            at += 1 + 1 + 16  # tagged fields, one topic, its id
        elif version >= 9:
            at += 1 + 1 + response[at + 2]  # the length of its name, plus one, is in one byte
        else:
            at += 4 + 2 + struct.unpack_from(">h", response, at + 4)[0]
        at += (1 if version >= 9 else 4) + 4  # one partition, its index
        changed = bytearray(response)
        if struct.unpack_from(">h", response, at) == (0,):
            struct.pack_into(">h", changed, at, error_code)
            if not with_offset:
                struct.pack_into(">q", changed, at + 2, -1)
        return bytes(changed)

    return change


# --- separate process -------------------------------------------------------------------------------------------------


class FaultProxies(LineProcess):
    """Raw proxies by name, in a process of their own. Thread-safe."""

    def __init__(self) -> None:
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._one_at_a_time = threading.Lock()
        super().__init__([sys.executable, "-m", "tests.kit.fault_proxy"], self._answers.put)

    def open(self, proxy: str, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._order("open", proxy, listen=listen, target=target)

    def add(self, proxy: str, kind: str, **fault: Any) -> None:
        """`kind`: `Cut`, `Drop`, `Hold` or `Duplicate`; the rest as in its class."""
        self._order("add", proxy, kind=kind, **fault)

    def refuse(self, proxy: str, seconds: float) -> None:
        self._order("refuse", proxy, seconds=seconds)

    def hits(self) -> Counter[str]:
        return Counter(self._order("hits"))

    def _order(self, what: str, proxy: str = "", **details: Any) -> dict[str, Any]:
        with self._one_at_a_time:
            self.send(json.dumps([what, proxy, details]))
            line = self._answers.get(timeout=_ANSWER_SECONDS)
        answer: dict[str, Any] = {"error": "the fault proxies have ended"} if line is None else json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def close(self, seconds: float = _ANSWER_SECONDS) -> None:
        self.kill()


def _obey(proxies: dict[str, FaultProxy], what: str, proxy: str, details: dict[str, Any]) -> dict[str, int]:
    match what:
        case "open":
            host, port = details["listen"]
            proxies[proxy] = FaultProxy(tuple(details["target"]), host=host, port=port, raw=True)
        case "add":
            kinds: dict[str, type[Fault]] = {each.__name__: each for each in (Cut, Drop, Hold, Duplicate)}
            proxies[proxy].add(kinds[details.pop("kind")](api_key=None, **details))
        case "refuse":
            proxies[proxy].refuse(details["seconds"], reset=True)
        case "hits":
            return sum((each.hits for each in proxies.values()), Counter())
    return {}


def _serve_orders() -> None:
    proxies: dict[str, FaultProxy] = {}
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = _obey(proxies, *json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve_orders()
