"""The proxy's own connections to a scripted broker: what a failure means to the caller."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import uvloop

from fencepost_proxy.cluster.broker import (
    PLAINTEXT,
    Access,
    BrokerConnection,
    Call,
    OutcomeUnknown,
    PooledConnection,
    UpstreamUnavailable,
    deadline_in,
)
from fencepost_proxy.config import Limits
from fencepost_proxy.types import Address
from fencepost_proxy.wire import control as wire
from fencepost_proxy.wire.apis import API_VERSIONS, INIT_PRODUCER_ID
from fencepost_proxy.wire.schema import Message
from tests.kit.waiting import until_async

#: For what must happen: a busy machine takes its time.
PATIENCE_SECONDS = 60.0
LIMITS = Limits(connect_timeout_seconds=PATIENCE_SECONDS, request_timeout_seconds=PATIENCE_SECONDS)
IN_FLIGHT_MAX = 4

QUERY = Call(INIT_PRODUCER_ID, 4, Message(transactional_id=None, transaction_timeout_ms=0))


@pytest.fixture(autouse=True)
def few_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fencepost_proxy.cluster.broker.IN_FLIGHT_MAX", IN_FLIGHT_MAX)


Script = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The broker's end of one connection, after ApiVersions was answered."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def read(self) -> int:
        """The correlation id of the next request."""
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        return wire.parse_request_header(await self._reader.readexactly(size)).correlation_id

    def answer(self, correlation_id: int, producer_id: int = 7) -> None:
        message = Message(error_code=0, producer_id=producer_id, producer_epoch=0)
        self.writer.write(wire.encode_response_frame(INIT_PRODUCER_ID, 4, correlation_id, message))

    def hello(self, correlation_id: int) -> None:
        keys = [Message(api_key=INIT_PRODUCER_ID, min_version=0, max_version=4)]
        message = Message(error_code=0, api_keys=keys)
        self.writer.write(wire.encode_response_frame(API_VERSIONS, 3, correlation_id, message))


@asynccontextmanager
async def broker(script: Script) -> AsyncIterator[Address]:
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        peer = Peer(reader, writer)
        try:
            peer.hello(await peer.read())
            await script(peer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@asynccontextmanager
async def connected(
    script: Script, limits: Limits = LIMITS, access: Access = PLAINTEXT
) -> AsyncIterator[BrokerConnection]:
    async with broker(script) as address:
        connection = await BrokerConnection.open(address, limits=limits, client_id="test", access=access)
        try:
            yield connection
        finally:
            await connection.close()


async def echo(peer: Peer) -> None:
    while True:
        correlation_id = await peer.read()
        peer.answer(correlation_id, producer_id=correlation_id)


async def silence(peer: Peer) -> None:
    while True:
        await peer.read()


async def hang_up(peer: Peer) -> None:
    """After the first request."""
    await peer.read()


@contextlib.contextmanager
def refusing() -> Iterator[Address]:
    with socket.socket() as not_listening:
        not_listening.bind(("127.0.0.1", 0))
        yield Address(*not_listening.getsockname())


async def query(connection: BrokerConnection, seconds: float = PATIENCE_SECONDS) -> Message:
    return await connection.request(*QUERY, deadline=deadline_in(seconds))


async def test_responses_arrive_in_request_order() -> None:
    async with connected(echo) as connection:
        answers = await asyncio.gather(*(query(connection) for _ in range(20)))
        ids = [each.producer_id for each in answers]
        assert ids == sorted(set(ids))
        pair = await connection.pipeline([QUERY, QUERY], deadline=deadline_in(PATIENCE_SECONDS))
        assert pair[1].producer_id == pair[0].producer_id + 1


async def test_broken_connection_leaves_sent_request_in_doubt() -> None:
    async with connected(hang_up) as connection:
        with pytest.raises(OutcomeUnknown, match="closed by the broker"):
            await query(connection)
        with pytest.raises(UpstreamUnavailable) as caught:
            await query(connection)
        assert not isinstance(caught.value, OutcomeUnknown)


async def test_connection_errors_are_reported_by_reason() -> None:
    async def nonsense(peer: Peer) -> None:
        await peer.read()
        peer.writer.write(b"HTTP/1.1 400")
        await peer.read()

    async def problems(script: Script) -> list[str]:
        reported: list[str] = []
        async with connected(script, access=Access(on_error=reported.append)) as connection:
            with pytest.raises(OutcomeUnknown):
                await query(connection)
        return reported

    assert await problems(hang_up) == ["lost"]
    assert await problems(nonsense) == ["protocol"]
    reported: list[str] = []
    with refusing() as address, pytest.raises(UpstreamUnavailable):
        await BrokerConnection.open(address, limits=LIMITS, client_id="", access=Access(on_error=reported.append))
    assert reported == ["unreachable"]


async def test_closing_an_idle_connection_is_no_error() -> None:
    async def done(peer: Peer) -> None:
        peer.answer(await peer.read())
        await peer.writer.drain()

    reported: list[str] = []
    access = Access(on_error=reported.append)
    async with connected(done, access=access) as connection:
        await query(connection)
        await until_async(lambda: connection.closed, "the connection to close")
    async with connected(echo, access=access) as connection:
        await query(connection)
    assert reported == []


async def test_late_answer_is_dropped_and_connection_stays() -> None:
    too_late = asyncio.Event()

    async def slow_once(peer: Peer) -> None:
        first = await peer.read()
        await too_late.wait()
        peer.answer(first, producer_id=111)
        await echo(peer)

    async with connected(slow_once) as connection:
        with pytest.raises(OutcomeUnknown, match="no answer to InitProducerId in time"):
            await query(connection, 0.05)
        too_late.set()
        assert (await query(connection)).producer_id != 111
        assert not connection.closed


async def test_silent_connection_is_closed_and_fails_its_requests() -> None:
    async with connected(silence, replace(LIMITS, request_timeout_seconds=0.3)) as connection:
        waiting = asyncio.create_task(query(connection))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not connection.closed:
                with pytest.raises(UpstreamUnavailable):
                    await query(connection, 0.05)
        with pytest.raises(OutcomeUnknown, match=r"limits\.request_timeout_seconds"):
            await waiting
        assert connection.closed


async def test_no_more_than_the_limit_is_ever_unanswered() -> None:
    observed = 0

    async def count(peer: Peer) -> None:
        nonlocal observed
        while True:
            await peer.read()
            observed += 1

    async with connected(count) as connection:
        results = await asyncio.gather(*(query(connection, 0.2) for _ in range(10)), return_exceptions=True)
        await until_async(lambda: observed >= IN_FLIGHT_MAX, "the limit to be reached")
        assert observed == IN_FLIGHT_MAX
        sent = [each for each in results if isinstance(each, OutcomeUnknown)]
        assert len(sent) == IN_FLIGHT_MAX
        assert all("unanswered, the limit" in str(each) for each in results if each not in sent)


async def test_concurrent_pipelines_do_not_deadlock_at_the_limit() -> None:
    async def slowly_at_first(peer: Peer) -> None:
        held = [await peer.read() for _ in range(4)]
        for correlation_id in held:
            await asyncio.sleep(0.03)
            peer.answer(correlation_id)
        await echo(peer)

    async with connected(slowly_at_first) as connection:
        singles = [asyncio.create_task(query(connection)) for _ in range(4)]
        await asyncio.sleep(0.01)
        # If each took what came free, both would get two of the three places that they need.
        pipelines = (connection.pipeline([QUERY] * 3, deadline=deadline_in(PATIENCE_SECONDS)) for _ in range(2))
        assert [len(answers) for answers in await asyncio.gather(*pipelines)] == [3, 3]
        await asyncio.gather(*singles)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (struct.pack(">i", 2_000_000_000), "a response of 2000000000 bytes"),
        (struct.pack(">i", -1), "a response of -1 bytes"),
        (struct.pack(">iib", 5, 99_999, 0), "response 99999 where"),
        (struct.pack(">iib", 5, 2, 0), "malformed"),
    ],
)
async def test_non_kafka_server_fails_only_its_connection(frame: bytes, reason: str) -> None:
    async def nonsense(peer: Peer) -> None:
        await peer.read()
        peer.writer.write(frame)
        await asyncio.sleep(2 * PATIENCE_SECONDS)

    async with connected(nonsense) as connection:
        with pytest.raises(OutcomeUnknown, match="is not talking Kafka's protocol") as caught:
            await query(connection)
        assert reason in str(caught.value)


async def test_unsupported_version_is_reported() -> None:
    async with connected(echo) as connection:
        assert connection.version(INIT_PRODUCER_ID, at_most=9) == 4
        with pytest.raises(UpstreamUnavailable, match="too old or too new") as caught:
            connection.version(INIT_PRODUCER_ID, at_least=5, at_most=9)
        assert caught.value.error_code == 35


async def test_greeting_without_an_answer_leaves_nothing_in_doubt() -> None:
    limits = replace(LIMITS, connect_timeout_seconds=1.0)  # of which connecting takes next to nothing
    with socket.create_server(("127.0.0.1", 0)) as never_accepts:
        address = Address(*never_accepts.getsockname())
        with pytest.raises(UpstreamUnavailable, match="no answer to ApiVersions") as caught:
            await BrokerConnection.open(address, limits=limits, client_id="test")
        assert not isinstance(caught.value, OutcomeUnknown)


async def test_waiters_share_one_attempt_despite_short_deadline() -> None:
    attempts = 0
    spoiled = asyncio.Event()

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        await spoiled.wait()
        peer = Peer(reader, writer)
        peer.hello(await peer.read())
        await reader.read()
        writer.transport.abort()

    server = await asyncio.start_server(late, "127.0.0.1", 0)
    proxied = PooledConnection(Address(*server.sockets[0].getsockname()[:2]), limits=LIMITS, client_id="test")
    hurried = asyncio.create_task(proxied.connected(deadline_in(0.02)))
    waiting = [asyncio.create_task(proxied.connected(deadline_in(PATIENCE_SECONDS))) for _ in range(2)]
    with pytest.raises(UpstreamUnavailable, match="not connected in time"):
        await hurried
    spoiled.set()
    patient = await asyncio.gather(*waiting)
    assert patient[0] is patient[1] is proxied.connection
    assert attempts == 1
    await proxied.close()
    server.close()


async def test_refused_connection_is_retried_with_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def recorded(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", recorded)

    with refusing() as address:
        limits = replace(LIMITS, reconnect_backoff_max_seconds=0.25)
        proxied = PooledConnection(address, limits=limits, client_id="test")
        for _ in range(6):
            with pytest.raises(UpstreamUnavailable, match="cannot connect"):
                await proxied.connected(deadline_in(PATIENCE_SECONDS))
        await proxied.close()

    longest = [0, 0.05, 0.1, 0.2, 0.25, 0.25]
    assert len(pauses) == len(longest)
    assert all(most / 2 <= pause <= most for pause, most in zip(pauses, longest, strict=True)), pauses


@pytest.mark.parametrize("turns", range(4))
def test_request_on_a_closed_transport_is_not_sent(turns: int) -> None:
    async def story() -> None:
        async with connected(hang_up) as connection:
            connection._writer.transport.abort()  # as uvloop does on a reset
            for _ in range(turns):
                await asyncio.sleep(0)
            with pytest.raises(UpstreamUnavailable):
                await connection.pipeline([QUERY], deadline=deadline_in(PATIENCE_SECONDS))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


async def test_repeated_waits_for_a_failing_attempt_all_end() -> None:
    with refusing() as address:
        proxied = PooledConnection(address, limits=LIMITS, client_id="test")

        async def patient() -> None:
            for _ in range(3):
                with contextlib.suppress(UpstreamUnavailable):
                    await proxied.connected(deadline_in(PATIENCE_SECONDS))

        await asyncio.gather(*(patient() for _ in range(5)))
        await proxied.close()
