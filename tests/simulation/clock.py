"""Virtual time, randomness and connections: all events are in one heap and come from one seed."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

#: Virtual monotonic time starts here; the offset to Unix time follows.
START = 1000.0
UNIX_MINUS_MONOTONIC = 1_700_000_000.0


class Sim:
    """Virtual time. `trace` collects log lines for a replay."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.now = START
        self.events = 0
        #: Checksum of all bytes written to all connections, in order.
        self.written = 0
        self.tracing = tracing
        self.trace: list[str] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    @property
    def unix_ms(self) -> int:
        return int((self.now + UNIX_MINUS_MONOTONIC) * 1000)

    def after(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        assert delay >= 0.0, "time does not run backwards"
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, call, args))

    def run(self, until: float) -> None:
        """Run all events due until then."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)
        self.now = until

    def log(self, line: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.now - START:9.4f} {line}")

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()


class Wire:
    """One direction of a TCP connection: ordered, delayed, in chunks. A paused one is not read."""

    def __init__(self, sim: Sim, delay: Callable[[], float], deliver: Callable[[bytes], None]) -> None:
        self._sim = sim
        self._delay = delay
        self._deliver = deliver
        self._under_way: deque[tuple[float, bytes]] = deque()
        self._last = 0.0
        self._paused = False
        self._ended: Callable[[], None] | None = None
        self.dead = False

    def write(self, data: bytes) -> None:
        if self.dead or self._ended is not None:
            return
        self._sim.written = zlib.crc32(data, self._sim.written)
        self._last = max(self._last, self._sim.now + self._delay())
        self._under_way.append((self._last, data))
        self._sim.after(self._last - self._sim.now, self._arrive)

    @property
    def unread_bytes(self) -> int:
        """Bytes that have arrived and are unread."""
        return sum(len(data) for at, data in self._under_way if at <= self._sim.now)

    def hold(self, paused: bool) -> None:
        self._paused = paused
        if not paused:
            self._sim.after(0.0, self._arrive)

    def end(self, then: Callable[[], None]) -> None:
        """Write no more. Call `then` when everything has arrived."""
        if self._ended is None and not self.dead:
            self._ended = then
            self._sim.after(max(self._last - self._sim.now, self._delay()), self._arrive)

    def cut(self) -> None:
        """Deliver part of the data in transit, up to a random byte."""
        if self.dead:
            return
        rng = self._sim.rng
        self.dead = True
        while self._under_way and not self._paused:
            _, data = self._under_way.popleft()
            if rng.random() < 0.5:
                self._deliver(data[: rng.randrange(len(data) + 1)])
                break
            self._deliver(data)
        self._under_way.clear()

    def _arrive(self) -> None:
        while self._under_way and not self._paused and not self.dead and self._under_way[0][0] <= self._sim.now:
            _, data = self._under_way.popleft()
            if len(data) > 1 and self._sim.rng.random() < 0.05:
                at = self._sim.rng.randrange(1, len(data))
                self._deliver(data[:at])
                if not self.dead:
                    self._deliver(data[at:])
            else:
                self._deliver(data)
        if not self._under_way and self._ended is not None and not self.dead:
            self.dead = True
            self._ended()


class End:
    """One end of a connection."""

    def data(self, data: bytes) -> None:
        raise NotImplementedError

    def lost(self) -> None:
        raise NotImplementedError


class Connection:
    """Two wires between the client `a` and the server `b`. Each end is notified once of the close."""

    def __init__(self, sim: Sim, delay: Callable[[], float], a: End, b: End) -> None:
        self._sim = sim
        self._ends = {"a": a, "b": b}
        self.to_b = Wire(sim, delay, b.data)
        self.to_a = Wire(sim, delay, a.data)
        self._reported: dict[str, bool] = {"a": False, "b": False}

    @property
    def over(self) -> bool:
        return self._reported["a"] or self._reported["b"]

    def close(self, by: str) -> None:
        """Data written by this end still arrives; data to it is lost."""
        if self._reported[by]:
            return
        other = "b" if by == "a" else "a"
        out, back = (self.to_b, self.to_a) if by == "a" else (self.to_a, self.to_b)
        back.dead = True
        out.end(lambda: self._report(other))
        # A transport closes only after its buffer is written.
        self._sim.after(self._sim.between(0.1, 2.0) if self._sim.chance(0.1) else 0.0, self._report, by)

    def cut(self) -> None:
        """Break the connection. The ends notice at different times."""
        self.to_a.cut()
        self.to_b.cut()
        for each in ("a", "b"):
            slow = self._sim.chance(0.1)
            self._sim.after(self._sim.between(0.5, 3.0) if slow else self._sim.between(0.0, 0.02), self._report, each)

    def _report(self, end: str) -> None:
        if not self._reported[end]:
            self._reported[end] = True
            self._ends[end].lost()


def take_frame(data: bytearray) -> bytes | None:
    """Remove and return the first complete frame, without its length, or None."""
    end = 4 + int.from_bytes(data[:4], "big")
    if len(data) < end:
        return None
    frame = bytes(data[4:end])
    del data[:end]
    return frame
