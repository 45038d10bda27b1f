"""A proxied connection on real sockets: relayed, spliced and buffered bytes, and sockets that open, close and stall."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from fencepost_proxy.metrics import Traffic
from fencepost_proxy.session.connection.state import Full
from fencepost_proxy.session.frames import messages
from fencepost_proxy.session.relay.fast_path import FastPath
from fencepost_proxy.session.relay.native import MODULE
from fencepost_proxy.session.session import Session
from fencepost_proxy.transport import unsent
from fencepost_proxy.transport.proxied_connection import ProxiedConnection
from fencepost_proxy.transport.proxied_socket import SPLICE_BYTES_MIN, UNSENT_BYTES_MAX, Buffers, ProxiedSocket
from fencepost_proxy.types import Address
from fencepost_proxy.wire.apis import FETCH
from fencepost_proxy.wire.control import decode_response, encode_response
from fencepost_proxy.wire.schema import Message
from tests.kit.waiting import until_async
from tests.support.executors import NATIVE, PYTHON, executing, needs_native
from tests.unit.test_session import ServicesStandIn, Unchanged

#: More than the kernel takes off a sender's hands on loopback.
SIZE = 48 * 1024 * 1024
OFFSET_COMMIT = 8


def request(correlation_id: int, payload: bytes = b"") -> bytes:
    """Of an API that passes."""
    frame = struct.pack(">hhi", OFFSET_COMMIT, 5, correlation_id) + payload
    return struct.pack(">i", len(frame)) + frame


def response(correlation_id: int, payload: bytes = b"") -> bytes:
    """Its throttle time, in the first 8 bytes of any payload, is 0."""
    payload = bytes(min(8, len(payload))) + payload[8:]
    return struct.pack(">ii", 4 + len(payload), correlation_id) + payload


def unsent_bytes(sock: ProxiedSocket) -> int:
    return 0 if sock.unsent is None else sock.unsent.byte_count


class Driver:
    """Passes events to the session and its commands back, at once."""

    def __init__(self, **services: Any) -> None:
        self.traffic = Traffic()
        self.services = ServicesStandIn(**services)
        self.opened: list[ProxiedConnection] = []
        self.closed: list[ProxiedConnection] = []
        self.events: list[messages.Event] = []

    def session_event(self, connection: int, event: messages.Event) -> None:
        self.events.append(event)
        proxied = self.opened[0]
        assert proxied.session is not None
        for command in proxied.session.handle(event, 1.0):
            if not isinstance(command, messages.Count):
                proxied.perform(command)

    def keep_time(self, session: Session) -> None: ...

    def proxied_opened(self, proxied: ProxiedConnection) -> Session:
        self.opened.append(proxied)
        return Session(proxied.connection, proxied.local_host, self.services, Unchanged(), 0.0)  # type: ignore[arg-type]

    def proxied_closed(self, proxied: ProxiedConnection) -> None:
        self.closed.append(proxied)

    def relayed_bytes(self) -> tuple[int, int]:
        """To Kafka, to clients."""
        native = self.services.native
        _, _, to_kafka, to_clients, *_ = ((), 0, 0, 0) if native is None else native[1].take_counts()
        return self.traffic.bytes_to_kafka + to_kafka, self.traffic.bytes_to_clients + to_clients

    def observed(self, kind: type) -> list[messages.Event]:
        return [event for event in self.events if isinstance(event, kind)]


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        return far, server.accept()[0]


class Pair:
    """A link on two real connections: `client` and `broker` are the far ends."""

    def __init__(self, **services: Any) -> None:
        self.driver = Driver(**services)
        self.client, self._near_client = _tcp_pair()
        self.broker, self._near_broker = _tcp_pair()
        for far in (self.client, self.broker):
            far.setblocking(False)
        self.buffers = Buffers()
        self.proxied: ProxiedConnection

    def accept(self) -> None:
        peer = Address("client", 1)
        self.proxied = ProxiedConnection(
            1, self._near_client, self.driver, self.buffers, peer=peer, local_host="127.0.0.1", node_id=None
        )

    def connect(self) -> None:
        self.proxied.connected(self._near_broker)

    def close(self) -> None:
        for side in (self.proxied.client, self.proxied.upstream):
            if side is not None:
                side.abort()
        for far in (self.client, self.broker, self._near_broker):
            far.close()
        self.buffers.pipes.close()


@asynccontextmanager
async def pair(*, connected: bool = True, **services: Any) -> AsyncIterator[Pair]:
    sockets = Pair(**services)
    sockets.accept()
    if connected:
        sockets.connect()
    try:
        yield sockets
    finally:
        sockets.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def python_pair() -> AsyncIterator[Pair]:
    with executing(PYTHON):
        async with pair() as sockets:
            yield sockets


async def send(sock: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, data)


async def receive(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    async with asyncio.timeout(60):
        while len(data) < count:
            piece = await asyncio.get_running_loop().sock_recv(sock, 1 << 20)
            assert piece, f"the connection ended after {len(data)} bytes"
            data += piece
    return bytes(data)


async def query(sockets: Pair, number: int = 1) -> None:
    await send(sockets.client, request(number))
    assert await receive(sockets.broker, len(request(number))) == request(number)


async def pass_bytes(sockets: Pair, number: int) -> None:
    await query(sockets, number)
    answer = response(number, b"answer")
    await send(sockets.broker, answer)
    assert await receive(sockets.client, len(answer)) == answer


# --- what passes ------------------------------------------------------------------------------------------------------


async def test_relayed_requests_and_responses_cause_no_events() -> None:
    async with pair() as sockets:
        for number in range(3):
            await pass_bytes(sockets, number)
        assert sockets.driver.events == []
        assert sockets.driver.relayed_bytes() == (3 * len(request(0)), 3 * len(response(0, b"answer")))


@pytest.mark.skipif(MODULE is None, reason="fencepost_native is not built: make native")
@pytest.mark.parametrize("asked_before", [0, 2], ids=["at once", "armed"])
async def test_an_error_of_the_proxy_ends_its_connection(asked_before: int) -> None:
    """The bytes stay in the socket, so it would be readable again at once."""
    errors: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(repr(context["exception"])))
    async with pair() as sockets:
        for number in range(asked_before):
            await pass_bytes(sockets, number)
        sockets.driver.services.relayed_versions = None  # type: ignore[assignment]
        await send(sockets.client, request(7))
        assert not await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sockets.client, 1), 60)
        await asyncio.sleep(0)
        assert sockets.proxied in sockets.driver.closed
    assert len(errors) == 1
    assert sockets.proxied.close_reason == "the proxy failed to handle its bytes"


@pytest.mark.skipif(MODULE is None, reason="fencepost_native is not built: make native")
async def test_slow_bytes_that_native_code_leaves_are_read_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only while they are slow: then native code reads again."""
    async with pair() as sockets:
        event, client = sockets.driver.session_event, sockets.proxied.client

        def slow(connection: int, event_: messages.Event) -> None:
            time.sleep(0.004)
            event(connection, event_)

        monkeypatch.setattr(sockets.driver, "session_event", slow)
        await send(sockets.client, request(0)[:9])  # the rest of it is not there: for Python
        while not client.received_at:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert client.read_bytes_max == 1024
        monkeypatch.undo()
        await send(sockets.client, request(0)[9:])
        await receive(sockets.broker, len(request(0)))
        await send(sockets.broker, response(0, b""))
        await receive(sockets.client, len(response(0, b"")))
        await query(sockets)
        assert client.read_bytes_max == 0


@pytest.fixture(params=["spliced", "read", pytest.param("native", marks=needs_native)])
def relayed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By whom large frames are relayed: Python in either way, or native code."""
    how: str = request.param
    monkeypatch.setattr(unsent, "_CAN_SPLICE", how == "spliced")
    with executing(NATIVE if how == "native" else PYTHON):
        yield how


async def test_addresses_after_spliced_records_do_not_reach_the_client(relayed: str) -> None:
    async with pair() as sockets:
        fetch = struct.pack(">ihhi", 8, FETCH, 17, 1)
        await send(sockets.client, fetch)
        assert await receive(sockets.broker, len(fetch)) == fetch
        partition = {"records": bytes(5_000_000), "error_code": 6}
        topic = Message(partitions=[Message(partition_index=each, **partition) for each in range(2)])
        node = Message(node_id=2, host="broker.internal", port=9092, rack=None)
        sent = response(1, b"\0" + encode_response(FETCH, 17, Message(responses=[topic], node_endpoints=[node])))
        assert b"broker.internal" in sent
        answering = asyncio.create_task(send(sockets.broker, sent))
        got = await receive(sockets.client, len(sent))
        await answering
        assert b"broker.internal" not in got
        reported = decode_response(FETCH, 17, got[9:])
        assert [each.error_code for each in reported.responses[0].partitions] == [6, 6]
        assert reported.node_endpoints == []


async def test_a_large_frame_arrives_as_it_was_sent(relayed: str) -> None:
    """In both directions, between small ones, in one piece or in many."""
    async with pair(frame_bytes_max=1 << 30) as sockets:
        for number, size in enumerate((9, SPLICE_BYTES_MIN, 700_001, 11, 5_000_000, 700_002, 70_000, 100_000, 10)):
            there, back = request(number, os.urandom(size)), response(number, os.urandom(size))
            sending = asyncio.create_task(send(sockets.client, there))
            assert await receive(sockets.broker, len(there)) == there
            await sending
            answering = asyncio.create_task(send(sockets.broker, back))
            assert await receive(sockets.client, len(back)) == back
            await answering
        events = sockets.driver.observed(messages.ClientPassed), sockets.driver.observed(messages.UpstreamPassed)
        assert all(events) if relayed == "spliced" else events == ([], [])
        assert bool(sockets.driver.events) == (relayed != "native")


async def test_slow_reader_costs_bounded_memory_and_loses_nothing(relayed: str) -> None:
    async with pair() as sockets:
        upstream = sockets.proxied.upstream
        assert upstream is not None
        await query(sockets)
        answer = response(1, os.urandom(1 << 16) * (SIZE >> 16))
        sending = asyncio.create_task(send(sockets.broker, answer))
        await until_async(lambda: bool(upstream.paused), "reading from Kafka to pause")
        assert not sending.done()
        assert unsent_bytes(sockets.proxied.client) <= UNSENT_BYTES_MAX + unsent.PIPE_BYTES
        assert await receive(sockets.client, len(answer)) == answer
        await sending
        assert sockets.proxied.client.unsent is None


async def test_data_is_relayed_when_no_pipe_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file descriptors are used up, say."""

    def no_pipe(flags: int) -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pipe2", no_pipe)
    async with pair(frame_bytes_max=1 << 30) as sockets:
        there = request(1, os.urandom(2_000_000))
        sending = asyncio.create_task(send(sockets.client, there))
        assert await receive(sockets.broker, len(there)) == there
        await sending


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_broker_closing_during_splice_leaves_pipes_clean(end: str) -> None:
    """Bytes left in a pipe must never appear on another connection."""
    before = _open_pipes()
    async with python_pair() as sockets:
        await query(sockets)
        sending = asyncio.create_task(send(sockets.broker, response(1, b"x" * SIZE)))
        upstream = sockets.proxied.upstream
        assert upstream is not None
        await until_async(lambda: bool(upstream.paused), "reading from Kafka to pause")
        if end == "abort":
            sockets.proxied.client.abort()
            upstream.abort()
        else:
            sockets.client.close()
        sending.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await sending
        sockets.broker.close()
        await until_async(lambda: sockets.driver.closed == [sockets.proxied], "the connection to close")
        assert all(pipe.filled_bytes == 0 for pipe in sockets.buffers.pipes._kept)
        kept = {fd for pipe in sockets.buffers.pipes._kept for fd in (pipe.read_fd, pipe.write_fd)}
        assert not _open_pipes() - kept - before


def _open_pipes() -> set[int]:
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:"):
                found.add(int(fd))
    return found


# --- out of step ------------------------------------------------------------------------------------------------------


async def test_client_closed_before_upstream_connects_leaks_nothing() -> None:
    async with pair(connected=False) as sockets:
        sockets.client.close()
        sockets.connect()
        await until_async(lambda: sockets.driver.closed == [sockets.proxied], "the connection to close")


@pytest.mark.parametrize("first", ["client", "broker"])
async def test_proxied_connection_is_closed_once_by_either_end(first: str) -> None:
    """A connection that is never closed would always count against `connections_max`."""
    async with pair() as sockets:
        await query(sockets)
        getattr(sockets, first).close()
        await until_async(lambda: bool(sockets.driver.closed), "a connection to close")
        await asyncio.sleep(0.05)
        assert sockets.driver.closed == [sockets.proxied]


async def test_client_closed_by_proxy_gets_no_session() -> None:
    async with pair(connected=False) as sockets:
        sockets.proxied.client.close(1.0)
        await until_async(lambda: sockets.driver.closed == [sockets.proxied], "the connection to close")
        sockets.connect()
        assert sockets.driver.opened == [], "a session that would never be closed"
        assert sockets.proxied.upstream is None


async def test_client_that_does_not_read_is_not_read() -> None:
    """The proxy makes some responses itself. Without this they would accumulate."""
    async with pair() as sockets:
        sockets.proxied.perform(messages.ToClient([b"x" * SIZE]))
        await send(sockets.client, request(1))
        await asyncio.sleep(0.05)
        assert sockets.driver.traffic.bytes_to_kafka == 0

        await receive(sockets.client, SIZE)
        await until_async(
            lambda: sockets.driver.traffic.bytes_to_kafka == len(request(1)), "the request to reach Kafka"
        )


async def test_answers_to_appends_are_read_for_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. A client sends Fetch and an append, and reads nothing. 2. The Fetch response fills its socket. 3. Others wait
    for the append's answer."""
    awaits_append = True
    monkeypatch.setattr(FastPath, "awaits_append", property(lambda path: awaits_append))
    async with pair() as sockets:
        client, upstream = sockets.proxied.client, sockets.proxied.upstream
        assert upstream is not None
        assert sockets.proxied.session is not None
        state = sockets.proxied.session.state
        client.write([bytes(SIZE)])
        assert (state.full, bool(client.paused), bool(upstream.paused)) == (Full.CLIENT, True, False)
        awaits_append = False
        client.write([b"x"])
        assert upstream.paused
        await receive(sockets.client, SIZE + 1)
        await until_async(lambda: not state.full, "the client's socket to take the rest")
        assert (client.paused, upstream.paused) == (0, 0)
        assert sockets.driver.events == []


async def test_session_knows_that_kafka_does_not_read() -> None:
    async with pair() as sockets:
        upstream, session = sockets.proxied.upstream, sockets.proxied.session
        assert upstream is not None
        assert session is not None
        upstream.write([bytes(SIZE)])
        assert session.state.full == Full.UPSTREAM
        sockets.proxied.driver.session_event(1, messages.ClientBytes(memoryview(request(1))))
        assert session.fast_path.client_is_paused
        assert (await receive(sockets.broker, SIZE + len(request(1)))).endswith(request(1))
        assert not session.state.full
        assert not session.fast_path.client_is_paused


async def test_chunks_are_sent_in_order_before_the_close() -> None:
    async with pair() as sockets:
        chunks = [bytes([number]) * (SIZE // 8) for number in range(8)]  # more than the kernel takes at once
        sockets.proxied.perform(messages.ToClient([*chunks, b"end"]))
        sockets.proxied.perform(messages.ToClient([b"more"]))
        sockets.proxied.perform(messages.CloseClient("enough"))
        whole = b"".join(chunks) + b"end" + b"more"
        assert await receive(sockets.client, len(whole)) == whole
        assert await asyncio.get_running_loop().sock_recv(sockets.client, 1) == b""


async def test_lost_socket_is_reported_once_outside_writes() -> None:
    async with pair() as sockets:
        lost: list[object] = []

        class Watched(ProxiedSocket):
            def _lost(self, error: OSError | None) -> None:
                lost.append(error)

        far, near = _tcp_pair()
        side = Watched(near, sockets.buffers, asyncio.get_running_loop())
        side.resume()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()  # by a reset
        for _ in range(3):
            side.send(b"anything")
            assert lost == []
        side.abort()
        side.close(1.0)
        await until_async(lambda: bool(lost), "the connection to be lost")
        await asyncio.sleep(0)
        assert len(lost) == 1
