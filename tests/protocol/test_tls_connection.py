"""A proxied connection with TLS on both sides, whose peers send each record separately, as Java does."""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import random
import socket
import ssl
import termios
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from fencepost_proxy.transport.native_tls import NativeTlsSocket
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.transport.proxied_socket import RECEIVE_BUFFER_BYTES, UNSENT_BYTES_MAX, Buffers, ProxiedSocket
from fencepost_proxy.transport.tls import TlsBuffers, TlsSocket, _Records, secure
from fencepost_proxy.types import Address
from tests.kit.waiting import until_async
from tests.protocol.test_proxied_connection import Driver, _tcp_pair, request, response, unsent_bytes
from tests.protocol.test_tls_socket import authority, executor, listen, server, tcp_pair, trusting
from tests.support.certificates import Authority, Certificate

__all__ = ["authority", "executor", "server"]  # fixtures

RECORD_BYTES = 16 * 1024
ANSWER_BYTES = 1 << 20


class CountingSocket(TlsSocket):
    """How often it was read and written to, by system calls that moved something."""

    reads = writes = 0

    def recv_into(self, buffer: memoryview) -> int:
        self.reads += 1
        return super().recv_into(buffer)

    def _flush(self) -> None:
        self.writes += bool(self._unflushed)
        super()._flush()


class NativeCountingSocket(NativeTlsSocket):
    """Its reads are counted by `count_reads`; its writes are not. `read_by_python` – reads of Python."""

    reads = writes = read_by_python = 0

    def recv_into(self, buffer: memoryview) -> int:
        self.read_by_python += 1
        return super().recv_into(buffer)


Counting = CountingSocket | NativeCountingSocket


def count_reads(side: ProxiedSocket | None, near: Counting) -> None:
    assert side is not None
    reader = side.reader
    assert reader is not None

    def read() -> None:
        near.reads += 1
        reader()

    side.pause(0)
    side.reader = read
    side.resume()


def unflushed_bytes(sock: TlsSocket) -> int:
    return len(sock._unflushed) if sock.native is None else sock.native.unflushed_bytes


class Far:
    """The other end: Python's own TLS, the records in hand."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, as_server: bool) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        name = None if as_server else "localhost"
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=as_server, server_hostname=name)
        self._loop = asyncio.get_running_loop()

    async def _observe_record(self) -> None:
        data = await self._loop.sock_recv(self.sock, 1 << 20)
        assert data, "the connection ended"
        self._incoming.write(data)

    async def shake_hands(self) -> None:
        while True:
            try:
                self._ssl.do_handshake()
            except ssl.SSLWantReadError:
                await self._loop.sock_sendall(self.sock, self._outgoing.read())
                await self._observe_record()
            else:
                await self._loop.sock_sendall(self.sock, self._outgoing.read())
                return

    def records(self, data: bytes) -> list[bytes]:
        out = []
        for at in range(0, len(data), RECORD_BYTES):
            self._ssl.write(data[at : at + RECORD_BYTES])
            out.append(self._outgoing.read())
        return out

    async def receive(self, size: int) -> bytes:
        received = bytearray()
        async with asyncio.timeout(60):
            while len(received) < size:
                try:
                    received += self._ssl.read(size - len(received))
                except ssl.SSLWantReadError:
                    await self._observe_record()
        return bytes(received)


def unread(sock: TlsSocket) -> int:
    waiting = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, waiting)
    return waiting[0]


def worth_an_event(sock: TlsSocket) -> int:
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 4), "little")


class Both:
    def __init__(
        self,
        proxied: ProxiedConnection,
        client: Far,
        broker: Far,
        near_client: Counting,
        near_broker: Counting,
    ) -> None:
        self.proxied, self.client, self.broker = proxied, client, broker
        self.near_client, self.near_broker = near_client, near_broker

    async def query(self) -> None:
        for record in self.client.records(request(1)):
            self.client.sock.sendall(record)
        await self.broker.receive(len(request(1)))


@asynccontextmanager
async def secured_connection(authority: Authority, server: Certificate, *, narrow: bool = False) -> AsyncIterator[Both]:
    """`narrow` – the kernel holds little for anybody."""

    def pair_of(*, as_server: bool) -> tuple[Counting, Far]:
        near, far = tcp_pair() if narrow else _tcp_pair()
        ours, theirs = listen(server), trusting(authority)
        if not as_server:
            ours, theirs = theirs, ours
        name = None if as_server else "localhost"
        sock: Counting
        if ours.native is None:
            sock = CountingSocket(near, ours, tls_buffers, name)
        else:
            sock = NativeCountingSocket(near, ours, tls_buffers, name, ours.native.connection(name))
        return sock, Far(far, theirs, as_server=not as_server)

    buffers, tls_buffers, driver = Buffers(), TlsBuffers(), Driver(frame_bytes_max=1 << 30)
    (near_client, client), (near_broker, broker) = pair_of(as_server=True), pair_of(as_server=False)
    await asyncio.gather(secure(near_client), client.shake_hands())
    await asyncio.gather(secure(near_broker), broker.shake_hands())
    peer = Address("client", 1)
    proxied = ProxiedConnection(1, near_client, driver, buffers, peer=peer, local_host="127.0.0.1", node_id=None)
    proxied.connected(near_broker)
    if near_client.native is not None:
        count_reads(proxied.client, near_client)
        count_reads(proxied.upstream, near_broker)
    try:
        yield Both(proxied, client, broker, near_client, near_broker)
    finally:
        proxied.client.abort()
        if proxied.upstream is not None:
            proxied.upstream.abort()
        client.sock.close()
        broker.sock.close()
        await asyncio.sleep(0)


async def _one_by_one(records: list[bytes], far: Far, near: Counting) -> None:
    """Each is received before the next is sent, and the event loop has run meanwhile."""

    def is_there(reads: int, byte_count: int) -> bool:
        return near.reads > reads or unread(near) >= byte_count

    for record in records:
        there = partial(is_there, near.reads, unread(near) + len(record))
        await asyncio.get_running_loop().sock_sendall(far.sock, record)
        await until_async(there, "the record to arrive")
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.mark.parametrize("direction", ["answer", "request"])
async def test_many_tls_records_are_read_and_written_together(
    authority: Authority, server: Certificate, direction: str
) -> None:
    async with secured_connection(authority, server) as both:
        # Given: a frame of 1 MB, in 65 records.
        if direction == "answer":
            await both.query()
            frame = response(1, os.urandom(ANSWER_BYTES))
            far, near, to, out = both.broker, both.near_broker, both.client, both.near_client
        else:
            frame = request(1, os.urandom(ANSWER_BYTES))
            far, near, to, out = both.client, both.near_client, both.broker, both.near_broker
        reads, writes = near.reads, out.writes
        # When: they come one by one.
        receiving = asyncio.create_task(to.receive(len(frame)))
        records = far.records(frame)
        await _one_by_one(records, far, near)
        # Then: it arrives to its last byte, by few reads and few writes.
        assert await receiving == frame
        assert len(records) == 65
        assert near.reads - reads <= 20
        assert out.writes - writes <= 20
        # And: the next byte of whatever comes is worth an event again.
        assert worth_an_event(near) == 1
        await both.query()


async def test_trickling_tls_records_are_relayed(authority: Authority, server: Certificate) -> None:
    async with secured_connection(authority, server) as both:
        # Given: of an answer three records have come, and no more.
        await both.query()
        frame = response(1, os.urandom(ANSWER_BYTES // 4))
        records = both.broker.records(frame)
        receiving = asyncio.create_task(both.client.receive(3 * RECORD_BYTES))
        await _one_by_one(records[:3], both.broker, both.near_broker)
        upstream = both.proxied.upstream
        assert upstream is not None
        # When: nothing more has come for some seconds.
        upstream.take_trickle(time.monotonic() + 5.0)
        # Then: they have arrived.
        assert await receiving == frame[: 3 * RECORD_BYTES]
        # And: the rest, when it comes.
        receiving = asyncio.create_task(both.client.receive(len(frame) - 3 * RECORD_BYTES))
        await _one_by_one(records[3:], both.broker, both.near_broker)
        assert await receiving == frame[3 * RECORD_BYTES :]


async def test_a_client_that_reads_nothing_costs_bounded_memory(authority: Authority, server: Certificate) -> None:
    async with secured_connection(authority, server, narrow=True) as both:
        await both.query()
        upstream, frame = both.proxied.upstream, response(1, os.urandom(4 * ANSWER_BYTES))
        assert upstream is not None

        async def answer() -> None:
            for record in both.broker.records(frame):
                await asyncio.get_running_loop().sock_sendall(both.broker.sock, record)

        # When: its client reads nothing of a long answer.
        answering = asyncio.create_task(answer())
        await until_async(lambda: bool(upstream.paused), "reading from Kafka to pause")
        # Then: no more than one read beyond the bound is kept, and one encrypted piece; the broker waits.
        assert not answering.done()
        assert unsent_bytes(both.proxied.client) <= UNSENT_BYTES_MAX + RECEIVE_BUFFER_BYTES
        assert unflushed_bytes(both.near_client) <= RECEIVE_BUFFER_BYTES
        # And: nothing is lost.
        assert await both.client.receive(len(frame)) == frame
        await answering
        assert both.proxied.client.unsent is None
        assert unflushed_bytes(both.near_client) == 0


async def test_frame_for_a_slow_client_stays_in_native_code(authority: Authority, server: Certificate) -> None:
    async with secured_connection(authority, server, narrow=True) as both:
        if not isinstance(both.near_broker, NativeCountingSocket):
            return
        await both.query()
        frame = response(1, os.urandom(ANSWER_BYTES))
        records = both.broker.records(frame)
        # Given: the client has not taken some bytes, too few to stop reading from Kafka.
        both.broker.sock.sendall(b"".join(records[:4]))
        await until_async(lambda: both.proxied.client.unsent is not None, "unsent bytes")
        assert 0 < unsent_bytes(both.proxied.client) <= UNSENT_BYTES_MAX
        # When: the rest comes, and the client reads.
        sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(both.broker.sock, b"".join(records[4:])))
        await asyncio.sleep(0.1)
        assert await both.client.receive(len(frame)) == frame
        await sending
        # Then: Python has read nothing of it.
        assert both.near_broker.read_by_python == 0


async def test_close_within_a_frame_is_noticed(authority: Authority, server: Certificate) -> None:
    async with secured_connection(authority, server) as both:
        await both.query()
        records = both.broker.records(response(1, os.urandom(ANSWER_BYTES // 4)))
        receiving = asyncio.create_task(both.client.receive(2 * RECORD_BYTES))
        await _one_by_one(records[:2], both.broker, both.near_broker)
        assert worth_an_event(both.near_broker) > RECORD_BYTES
        both.broker.sock.close()
        await receiving
        await until_async(
            lambda: both.proxied.upstream is not None and both.proxied.upstream.ended, "the upstream connection to end"
        )


@pytest.mark.parametrize("seed", range(20))
def test_no_more_is_expected_than_must_come(seed: int) -> None:
    """For any sizes of records, wherever the stream is cut. Otherwise the proxy would wait indefinitely."""
    rng = random.Random(seed)
    overhead = rng.choice((16, 17, 24))
    largest = rng.random() < 0.3
    plain = [RECORD_BYTES if largest else rng.choice((1, 50, 5_000, RECORD_BYTES)) for _ in range(rng.randint(1, 30))]
    ends = [0]
    stream = bytearray()
    for size in plain:
        stream += b"\x17\x03\x03" + (size + overhead).to_bytes(2, "big") + bytes(size + overhead)
        ends.append(len(stream))
    for cut in sorted(rng.sample(range(len(stream)), min(200, len(stream)))):
        records = _Records(overhead)
        records.follow(memoryview(stream)[:cut])
        whole = sum(end <= cut for end in ends[1:])
        for last in range(whole + 1, len(plain) + 1):
            expected = records.bytes_before(sum(plain[whole:last]))
            assert 0 < expected <= ends[last] - cut
            if largest:
                assert expected == ends[last] - cut
