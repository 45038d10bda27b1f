"""Faulty connections: TCP forwarding that can cut, delay or drop data.

`PipeProcess` runs all pipes of a run in a separate process (`python -m tests.soak.pipe`), controlled by JSON lines:
they take no time from the clients under test.

A fault is armed on a pipe. It hits the connection with the next bytes in its direction, `after` bytes later, which
may be in the middle of a frame:

| fault | effect at that byte |
|---|---|
| cut | close both sockets; with `reset` by RST |
| stall | forward nothing in that direction for `seconds`, then everything |
| deaf | discard all further bytes, and cut after `seconds`: a response is lost |
| refuse | accept no connection for `seconds`, and cut existing ones |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, Self

from fencepost_proxy.dev.process import supervised

Direction = Literal["up", "down"]
_CHUNK = 1 << 16
_ANSWER_SECONDS = 10.0
_CONNECT_SECONDS = 5.0
#: A fault that hits no connection for this long is discarded.
_ARMED_SECONDS = 5.0


@dataclass(slots=True)
class Fault:
    kind: Literal["cut", "stall", "deaf"]
    direction: Direction
    after: int
    seconds: float = 0.0
    reset: bool = False


class Pipe:
    """From `listen` to `target`. `hits` counts faults that hit a connection."""

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self.listen = listen
        self.target = target
        self.hits: Counter[str] = Counter()
        self._armed: list[tuple[float, Fault]] = []
        self._wires: set[_Wire] = set()
        self._closed_until = 0.0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accepted, *self.listen, limit=_CHUNK)

    def arm(self, fault: Fault) -> None:
        self._armed.append((asyncio.get_running_loop().time() + _ARMED_SECONDS, fault))

    def refuse(self, seconds: float) -> None:
        self._closed_until = asyncio.get_running_loop().time() + seconds
        self.hits["refuse"] += 1
        for wire in list(self._wires):
            wire.cut(reset=True)

    def take(self, direction: Direction) -> Fault | None:
        now = asyncio.get_running_loop().time()
        self._armed = [each for each in self._armed if each[0] > now]
        for each in self._armed:
            if each[1].direction == direction:
                self._armed.remove(each)
                self.hits[each[1].kind] += 1
                return each[1]
        return None

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if asyncio.get_running_loop().time() < self._closed_until:
            writer.transport.abort()
            return
        try:
            far = await asyncio.wait_for(asyncio.open_connection(*self.target, limit=_CHUNK), _CONNECT_SECONDS)
        except (OSError, TimeoutError):
            writer.transport.abort()
            return
        wire = _Wire(self, (reader, writer), far)
        self._wires.add(wire)
        try:
            await wire.run()
        finally:
            self._wires.discard(wire)


class _Wire:
    def __init__(
        self,
        pipe: Pipe,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self.pipe = pipe
        self.near, self.far = near, far
        for _, writer in (near, far):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self) -> None:
        up = asyncio.create_task(self._pass_on(self.near[0], self.far[1], "up"))
        down = asyncio.create_task(self._pass_on(self.far[0], self.near[1], "down"))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.cut()
            await asyncio.gather(up, down, return_exceptions=True)

    def cut(self, *, reset: bool = False) -> None:
        for _, writer in (self.near, self.far):
            with contextlib.suppress(OSError):
                if reset:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort() if reset else writer.close()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: Direction) -> None:
        fault: Fault | None = None
        left = 0
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                if fault is None:
                    fault = self.pipe.take(direction)
                    left = fault.after if fault is not None else 0
                if fault is None or len(data) < left:
                    left -= len(data)
                    sink.write(data)
                    await sink.drain()
                    continue
                sink.write(data[:left])
                await sink.drain()
                if fault.kind == "cut":
                    # Deliver earlier bytes first: the cut is at that byte.
                    await asyncio.sleep(0.001)
                    self.cut(reset=fault.reset)
                    return
                if fault.kind == "deaf":
                    await self._throw_away(source, fault.seconds)
                    self.cut(reset=fault.reset)
                    return
                await asyncio.sleep(fault.seconds)
                sink.write(data[left:])
                await sink.drain()
                fault = None

    @staticmethod
    async def _throw_away(source: asyncio.StreamReader, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while await source.read(_CHUNK):
                    pass


# --- separate process -------------------------------------------------------------------------------------------------


async def _serve() -> None:
    pipes: dict[str, Pipe] = {}
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        try:
            answer = await _obey(pipes, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


async def _obey(pipes: dict[str, Pipe], order: dict[str, Any]) -> dict[str, Any]:
    match order.pop("do"):
        case "open":
            pipe = Pipe(tuple(order["listen"]), tuple(order["target"]))
            await pipe.open()
            pipes[order["pipe"]] = pipe
        case "arm":
            pipes[order.pop("pipe")].arm(Fault(**order))
        case "refuse":
            pipes[order["pipe"]].refuse(order["seconds"])
        case "hits":
            total: Counter[str] = Counter()
            for each in pipes.values():
                total.update(each.hits)
            return dict(total)
    return {}


class PipeProcess:
    """The pipes of a run. Thread-safe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            supervised([sys.executable, "-m", "tests.soak.pipe"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        self._lock = threading.Lock()

    def _query(self, **order: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
            answer: dict[str, Any] = json.loads(stdout.readline())
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def open(self, pipe: str, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self._query(do="open", pipe=pipe, listen=listen, target=target)

    def arm(self, pipe: str, fault: Fault) -> None:
        self._query(
            do="arm",
            pipe=pipe,
            kind=fault.kind,
            direction=fault.direction,
            after=fault.after,
            seconds=fault.seconds,
            reset=fault.reset,
        )

    def refuse(self, pipe: str, seconds: float) -> None:
        self._query(do="refuse", pipe=pipe, seconds=seconds)

    def hits(self) -> Counter[str]:
        return Counter(self._query(do="hits"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._process.kill()
        self._process.wait(_ANSWER_SECONDS)


if __name__ == "__main__":
    asyncio.run(_serve())
