"""Clients that misbehave, each kind in one way, until stdin ends.

    python -m tests.support.crowd HOST:PORT PLAIN_TOPIC CHECKED_TOPIC SEED

A separate process, so that a well-behaved client competes with them at the proxy, not for a Python interpreter. They
reconnect after a close. Prints `ready` once each has connected, and at the end the numbers of connections as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

from fencepost_proxy.types import Address
from tests.support.batches import batch
from tests.support.files import allow_open_files
from tests.support.messages import encode_request

PRODUCE, FETCH = 0, 1
#: Number of clients of each kind: a thousand altogether.
KINDS = {
    "half-open": 350,
    "slow-loris": 200,
    "garbage": 50,
    "oversized": 50,
    "announced and stalled": 100,
    "fetches, never reads": 100,
    "produces, never reads": 100,
    "comes and goes": 50,
}
_AGAIN_SECONDS = 1.0
#: The most that one producer that never reads sends, which bounds the test's data.
_PRODUCED_BYTES_MAX = 1_000_000
_FETCHES = 30


class Crowd:
    def __init__(self, address: Address, unchecked_topic: str, checked_topic: str, seed: int) -> None:
        self.address = address
        self.chance = random.Random(seed)
        self.connected: set[int] = set()
        self.all_connected = asyncio.Event()
        self.counts: Counter[str] = Counter()
        small = {"Index": 0, "Records": bytes(batch(b"x" * 2_000))}
        self.produce = encode_request(
            PRODUCE,
            9,
            1,
            {"Acks": 1, "TimeoutMs": 5_000, "TopicData": [{"Name": unchecked_topic, "PartitionData": [small]}]},
        )
        large = {"Index": 0, "Records": bytes(batch(b"x" * 500_000))}
        self.held = encode_request(
            PRODUCE,
            9,
            1,
            {"Acks": 1, "TimeoutMs": 5_000, "TopicData": [{"Name": checked_topic, "PartitionData": [large]}]},
        )
        partition = {"Partition": 0, "FetchOffset": 0, "PartitionMaxBytes": 1_000_000}
        self.fetch = encode_request(
            FETCH,
            11,
            1,
            {"MaxWaitMs": 0, "MinBytes": 1, "Topics": [{"Topic": unchecked_topic, "Partitions": [partition]}]},
        )

    async def run(self, until: Awaitable[object]) -> None:
        ways: dict[str, Callable[[socket.socket], Awaitable[None]]] = {
            "half-open": self._half_open,
            "slow-loris": self._slow_loris,
            "garbage": self._garbage,
            "oversized": self._oversized,
            "announced and stalled": self._announced,
            "fetches, never reads": self._fetches,
            "produces, never reads": self._produces,
            "comes and goes": self._comes_and_goes,
        }
        async with asyncio.TaskGroup() as group:
            kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
            self.chance.shuffle(kinds)
            tasks = [group.create_task(self._one(number, kind, ways[kind])) for number, kind in enumerate(kinds)]
            async with asyncio.timeout(300):
                await self.all_connected.wait()
            print("ready", flush=True)
            await until
            for task in tasks:
                task.cancel()

    async def _one(self, number: int, kind: str, way: Callable[[socket.socket], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self.chance.uniform(0, _AGAIN_SECONDS))
            with socket.socket() as sock:
                sock.setblocking(False)
                if "never reads" in kind:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await asyncio.get_running_loop().sock_connect(sock, self.address)
                    self.counts[kind] += 1
                    self.connected.add(number)
                    if len(self.connected) == sum(KINDS.values()):
                        self.all_connected.set()
                    await way(sock)

    # ---- ways to be a nuisance; each returns when it was closed or has had enough

    async def _closed(self, sock: socket.socket) -> None:
        while await asyncio.get_running_loop().sock_recv(sock, 65536):
            pass

    async def _half_open(self, sock: socket.socket) -> None:
        await self._closed(sock)

    async def _slow_loris(self, sock: socket.socket) -> None:
        for byte in self.held if self.chance.random() < 0.5 else self.produce:
            await asyncio.get_running_loop().sock_sendall(sock, bytes([byte]))
            await asyncio.sleep(self.chance.uniform(0.2, 1.0))

    async def _garbage(self, sock: socket.socket) -> None:
        noise = self.chance.randbytes(self.chance.choice((10, 1_000, 50_000)))
        if self.chance.random() < 0.5:
            # Looks like a request of an API that the proxy decodes, but is invalid.
            noise = struct.pack(">ihhi", len(noise) + 8, self.chance.choice((0, 3, 19, 32)), 5, 1) + noise
        await asyncio.get_running_loop().sock_sendall(sock, noise)
        await self._closed(sock)

    async def _oversized(self, sock: socket.socket) -> None:
        length = self.chance.choice((2**31 - 1, 200_000_000, -1))
        await asyncio.get_running_loop().sock_sendall(sock, struct.pack(">ihhi", length, PRODUCE, 9, 1))
        await self._closed(sock)

    async def _announced(self, sock: socket.socket) -> None:
        cut = self.chance.choice((200, len(self.held) // 2, len(self.held) - 1))
        await asyncio.get_running_loop().sock_sendall(sock, self.held[:cut])
        await self._closed(sock)

    async def _fetches(self, sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, self.fetch * _FETCHES)
        await asyncio.sleep(self.chance.uniform(5, 30))

    async def _produces(self, sock: socket.socket) -> None:
        for _ in range(_PRODUCED_BYTES_MAX // len(self.produce)):
            await asyncio.get_running_loop().sock_sendall(sock, self.produce)
            await asyncio.sleep(self.chance.uniform(0, 0.1))
        await asyncio.sleep(self.chance.uniform(5, 30))

    async def _comes_and_goes(self, sock: socket.socket) -> None:
        if self.chance.random() < 0.5:
            await asyncio.get_running_loop().sock_sendall(
                sock, self.produce[: self.chance.randrange(len(self.produce))]
            )
        if self.chance.random() < 0.5:
            # Close with a reset.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def main() -> None:
    address, unchecked_topic, checked_topic, seed = sys.argv[1:]
    allow_open_files(4_096)
    crowd = Crowd(Address.parse(address), unchecked_topic, checked_topic, int(seed))
    await crowd.run(asyncio.to_thread(sys.stdin.read))
    print(json.dumps(crowd.counts), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
