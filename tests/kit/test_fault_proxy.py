"""Each fault hits the chosen frame or byte of one connection, and nothing else."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.fault_proxy import (
    PRODUCE,
    Change,
    Cut,
    Direction,
    Drop,
    Duplicate,
    FaultProxies,
    FaultProxy,
    Hold,
    Respond,
    produce_error,
)
from tests.kit.waiting import until
from tests.support.ports import free_port

_ANSWER_SECONDS = 30.0
each_direction = pytest.mark.parametrize("direction", ["request", "response"])


def request(text: bytes, correlation_id: int = 0, *, api_key: int = PRODUCE, client: bytes = b"client") -> bytes:
    body = struct.pack(">hhih", api_key, 9, correlation_id, len(client)) + client + text
    return struct.pack(">i", len(body)) + body


def response(text: bytes, correlation_id: int = 0) -> bytes:
    return struct.pack(">ii", 4 + len(text), correlation_id) + text


class Broker:
    """Echoes the text of each request. `received`: all bytes. `closed`: how many connections ended."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.received, self.closed = b"", 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = b""
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    self.received += data
                    buffer += data
                    while len(buffer) >= 4 and len(buffer) >= (end := 4 + int.from_bytes(buffer[:4])):
                        frame, buffer = buffer[:end], buffer[end:]
                        text = frame[14 + int.from_bytes(frame[12:14]) :]
                        connection.sendall(response(text, int.from_bytes(frame[8:12])))
            except OSError:
                pass
        self.closed += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Client:
    def __init__(self, address: Any) -> None:
        self.socket = socket.create_connection(address, _ANSWER_SECONDS)

    def send(self, *frames: bytes) -> None:
        self.socket.sendall(b"".join(frames))

    def receive(self, count: int) -> bytes:
        """Up to `count` bytes; fewer if the connection ends."""
        data = b""
        while len(data) < count:
            try:
                more = self.socket.recv(count - len(data))
            except ConnectionResetError:
                break
            if not more:
                break
            data += more
        return data

    def query(self, text: bytes) -> bytes:
        """The text of the response; empty if the connection ends."""
        try:
            self.send(request(text))
            return self.receive(8 + len(text))[8:]
        except OSError:
            return b""

    @property
    def is_silent(self) -> bool:
        """Whether the connection is open, and nothing arrives."""
        self.socket.settimeout(0.1)
        try:
            self.socket.recv(1)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(_ANSWER_SECONDS)
        return False

    @property
    def is_closed(self) -> bool:
        return self.receive(1) == b""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


@pytest.fixture
def broker() -> Iterator[Broker]:
    server = Broker()
    yield server
    server.close()


@pytest.fixture
def proxy(broker: Broker) -> Iterator[FaultProxy]:
    with FaultProxy(broker.address) as made:
        yield made


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[Client]:
    with Client(("127.0.0.1", proxy.port)) as made:
        assert made.query(b"first") == b"first"
        yield made


@pytest.fixture
def other(proxy: FaultProxy) -> Iterator[Client]:
    """Another connection. No fault may hit it."""
    with Client(("127.0.0.1", proxy.port)) as made:
        assert made.query(b"first") == b"first"
        yield made
        assert made.query(b"last") == b"last"


# --- faults of frames -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99, 1.0])
@each_direction
def test_cut_forwards_a_part_of_the_frame(  # noqa: PLR0917
    direction: Direction, part: float, proxy: FaultProxy, broker: Broker, client: Client, other: Client
) -> None:
    """A fraction between 0 and 1 is inside the frame, however short the frame is."""
    before, fault = len(broker.received), proxy.add(Cut(direction, b"words", part=part))
    assert other.query(b"not this one") == b"not this one"
    before = len(broker.received)
    client.send(request(b"with words"))
    arrived = client.receive(1000)
    fault.wait()
    whole = len(request(b"with words") if direction == "request" else response(b"with words"))
    expected = {0.0: 0, 1.0: whole}.get(part, min(max(1, int(part * whole)), whole - 1))
    if direction == "request":
        until(lambda: broker.closed == 1, "the broker's connection to end")
        assert len(broker.received) - before == expected
        assert arrived == b""
    else:
        assert broker.received[before:] == request(b"with words")
        assert arrived == response(b"with words")[:expected]
    assert proxy.hits == {"cut": 1}


def test_reset_cut_sends_rst(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Cut("request", b"words", reset=True))
    client.send(request(b"words"))
    with pytest.raises(ConnectionResetError):
        client.socket.recv(1)


def test_fault_hits_only_its_api(proxy: FaultProxy, client: Client) -> None:
    fault = proxy.add(Cut("request", b"words", 3))
    assert client.query(b"words") == b"words"
    assert not fault.observed.is_set()
    client.send(request(b"words", api_key=3))
    assert client.is_closed


def test_dropped_frame_leaves_the_connection_usable(proxy: FaultProxy, broker: Broker, client: Client) -> None:
    proxy.add(Drop("response", b"lost"))
    client.send(request(b"lost", 1), request(b"kept", 2))
    assert client.receive(12) == response(b"kept", 2)
    assert b"lost" in broker.received


@each_direction
def test_dropping_everything_keeps_the_connection_open(
    direction: Direction, proxy: FaultProxy, broker: Broker, client: Client, other: Client
) -> None:
    fault = proxy.add(Drop(direction, b"one", part=0.5, everything=True))
    client.send(request(b"one"), request(b"two"))
    fault.wait()
    assert client.receive(5) == response(b"one")[:5] if direction == "response" else client.is_silent
    assert client.is_silent
    assert other.query(b"three") == b"three"
    assert (b"two" in broker.received) == (direction == "response")


def test_dropping_everything_ends_after_a_time(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Drop("response", b"one", everything=True, seconds=0.1))
    client.send(request(b"one"))
    assert client.is_closed


@each_direction
def test_held_frame_waits_with_all_that_follows(
    direction: Direction, proxy: FaultProxy, broker: Broker, client: Client, other: Client
) -> None:
    with Hold(direction, b"one") as fault:
        proxy.add(fault)
        client.send(request(b"one", 1), request(b"two", 2))
        fault.wait()
        assert client.is_silent
        assert (b"one" in broker.received) == (direction == "response")
        assert other.query(b"three") == b"three"
    assert client.receive(22) == response(b"one", 1) + response(b"two", 2)


def test_hold_ends_after_a_time(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Hold("response", b"one", seconds=0.3))
    sent = time.monotonic()
    assert client.query(b"one") == b"one"
    assert time.monotonic() - sent >= 0.3


def test_released_hold_holds_nothing_more(proxy: FaultProxy, client: Client) -> None:
    with proxy.add(Hold("request", b"one")):
        pass
    assert client.query(b"one") == b"one"


def test_held_request_of_closed_client_arrives(proxy: FaultProxy, broker: Broker, client: Client) -> None:
    with proxy.add(Hold("request", b"one")) as fault:
        client.send(request(b"one"))
        fault.wait()
        client.socket.close()
        time.sleep(0.05)
        assert b"one" not in broker.received
    until(lambda: b"one" in broker.received, "the request to arrive")


def test_requests_are_collected_over_connections(
    proxy: FaultProxy, broker: Broker, client: Client, other: Client
) -> None:
    with proxy.add(Hold("request", b"chain", count=3)):
        client.send(request(b"chain 1", 1), request(b"chain 2", 2))
        assert client.is_silent
        assert b"chain" not in broker.received
        other.send(request(b"chain 3", 3))
        assert client.receive(30) == response(b"chain 1", 1) + response(b"chain 2", 2)
        assert other.receive(15) == response(b"chain 3", 3)
    assert request(b"chain 1", 1) + request(b"chain 2", 2) in broker.received


def test_ended_hold_releases_no_later_one(proxy: FaultProxy, broker: Broker, client: Client) -> None:
    for ended in (Hold("request", b"one", count=1, seconds=0.1), Hold("request", b"one", seconds=0.1)):
        proxy.add(ended)
        assert client.query(b"one") == b"one"
        with proxy.add(Hold("request", b"two")) as fault:
            client.send(request(b"two"))
            fault.wait()
            time.sleep(0.2)
            ended.release()
            assert client.is_silent
        assert client.receive(11) == response(b"two")


def test_incomplete_collection_is_sent_at_the_end(proxy: FaultProxy, client: Client) -> None:
    with proxy.add(Hold("request", b"chain", count=3)):
        client.send(request(b"chain 1", 1))
        assert client.is_silent
    assert client.receive(15) == response(b"chain 1", 1)


@each_direction
def test_duplicate_is_sent_twice(direction: Direction, proxy: FaultProxy, client: Client) -> None:
    proxy.add(Duplicate(direction, b"one"))
    client.send(request(b"one", 7))
    assert client.receive(22) == response(b"one", 7) * 2
    assert client.query(b"two") == b"two"


def test_changed_response_arrives(proxy: FaultProxy, client: Client) -> None:
    def change(to: bytes, frame: bytes) -> bytes:
        return frame.replace(b"one", b"two") if b"client" in to else frame

    fault = proxy.add(Change("response", b"one", change=change))
    assert client.query(b"one") == b"two"
    fault.wait()
    assert client.query(b"one") == b"one"


def test_unchanged_response_is_no_fault(proxy: FaultProxy, client: Client) -> None:
    fault = proxy.add(Change("response", b"one"))
    assert client.query(b"one") == b"one"
    assert fault.observed.is_set()
    assert not fault.happened.is_set()


@pytest.mark.parametrize("with_offset", [True, False])
@pytest.mark.parametrize("broker_error", [0, 6])
def test_produce_error_replaces_success(broker_error: int, with_offset: bool) -> None:
    for version, head in (
        (8, b"\0\0\0\1\0\1t\0\0\0\1\0\0\0\0"),
        (9, b"\0\2\2t\2\0\0\0\0"),
        (13, b"\0\2" + bytes(16) + b"\2" + bytes(4)),
    ):
        to = struct.pack(">ihh", 0, PRODUCE, version)
        answer = response(head + struct.pack(">hq", broker_error, 42))
        changed = produce_error(7, with_offset=with_offset)(to, answer)
        expected = (6, 42) if broker_error else (7, 42 if with_offset else -1)
        assert changed == response(head + struct.pack(">hq", *expected)), version


def test_proxy_responds_without_the_broker(proxy: FaultProxy, broker: Broker, client: Client) -> None:
    fault = proxy.add(Respond("request", b"one", respond=lambda to: response(b"no", int.from_bytes(to[8:12]))))
    client.send(request(b"one", 5))
    assert client.receive(10) == response(b"no", 5)
    assert fault.request == request(b"one", 5)
    assert b"one" not in broker.received


# --- faults of a proxy ------------------------------------------------------------------------------------------------


def test_refusing_proxy_closes_connections_until_it_accepts(proxy: FaultProxy, client: Client) -> None:
    address = client.socket.getpeername()
    proxy.refuse()
    assert client.is_closed
    with Client(address) as late:
        assert late.query(b"one") == b""
    proxy.accept()
    with Client(address) as back:
        assert back.query(b"one") == b"one"


def test_cut_can_refuse_all_connections(proxy: FaultProxy, broker: Broker, client: Client) -> None:
    address = client.socket.getpeername()
    fault = proxy.add(Cut("response", b"one", refuse=True))
    with Client(address) as another:
        assert another.query(b"two") == b"two"
        client.send(request(b"one"))
        fault.wait()
        assert client.is_closed
        assert another.is_closed
    assert b"one" in broker.received
    with Client(address) as late:
        assert late.query(b"three") == b""
    proxy.accept()
    with Client(address) as back:
        assert back.query(b"four") == b"four"


def test_cut_all_leaves_the_proxy_open(proxy: FaultProxy, client: Client) -> None:
    proxy.cut_all()
    assert client.is_closed
    with Client(client.socket.getpeername()) as back:
        assert back.query(b"one") == b"one"


def test_blocked_client_id_sends_nothing(proxy: FaultProxy, broker: Broker, client: Client, other: Client) -> None:
    proxy.block(b"1", b"2")
    for client_id in (b"1", b"2"):
        with Client(client.socket.getpeername()) as blocked:
            blocked.send(request(b"blocked", client=client_id))
            assert blocked.is_closed
    assert client.query(b"one") == b"one"
    assert b"blocked" not in broker.received


def test_requests_are_recorded_once_sent_on(proxy: FaultProxy, client: Client, other: Client) -> None:
    with proxy.add(Hold("request", b"one")) as fault:
        client.send(request(b"one"))
        fault.wait()
        assert all(b"one" not in frame for frame in proxy.produced)
    assert [each.frame for each in proxy.wait_for(b"one")] == [request(b"one")]
    proxy.cut_after(b"one")
    assert client.receive(11) in (b"", response(b"one"))
    assert client.is_closed
    assert request(b"one") in proxy.produced


def test_forgotten_and_expired_faults_hit_nothing(proxy: FaultProxy, client: Client) -> None:
    proxy.add(Cut("request", b"one", within_seconds=0))
    assert client.query(b"one") == b"one"
    proxy.add(Cut("request", b"one"))
    proxy.forget_faults()
    assert client.query(b"one") == b"one"


def test_connections_take_turns_and_skip_absent_targets(broker: Broker) -> None:
    another, absent = Broker(), ("127.0.0.1", free_port())
    with FaultProxy(absent, broker.address, another.address, raw=True) as balancer:
        for _ in range(6):
            with Client(("127.0.0.1", balancer.port)) as client:
                assert client.query(b"one") == b"one"
    another.close()
    assert sorted([broker.received.count(b"one"), another.received.count(b"one")]) == [2, 4]


# --- faults of bytes, in another process ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proxies() -> Iterator[FaultProxies]:
    with FaultProxies() as process:
        yield process


@pytest.fixture
def raw(proxies: FaultProxies, broker: Broker, request: pytest.FixtureRequest) -> Iterator[tuple[str, Client]]:
    """The name of a proxy, and a used connection through it."""
    listen, name = ("127.0.0.1", free_port()), request.node.name
    proxies.open(name, listen, broker.address)
    with Client(listen) as connection:
        assert connection.query(b"first") == b"first"
        broker.received = b""
        yield name, connection


@pytest.mark.parametrize("reset", [False, True])
def test_raw_cut_forwards_the_bytes_before_it(
    reset: bool, proxies: FaultProxies, broker: Broker, raw: tuple[str, Client]
) -> None:
    name, client = raw
    proxies.add(name, "Cut", direction="request", after=30, reset=reset)
    client.send(request(b"one"))  # 23 bytes
    client.receive(11)
    client.send(request(b"two"))
    assert client.is_closed
    until(lambda: broker.received == (request(b"one") + request(b"two"))[:30], "30 bytes and no more")
    assert proxies.hits()["cut"] >= 1


def test_raw_cut_of_responses_leaves_the_request_whole(
    proxies: FaultProxies, broker: Broker, raw: tuple[str, Client]
) -> None:
    name, client = raw
    proxies.add(name, "Cut", direction="response", after=4)
    client.send(request(b"one"))
    assert client.receive(11) == response(b"one")[:4]
    assert broker.received == request(b"one")


def test_raw_hold_delays_and_loses_nothing(proxies: FaultProxies, raw: tuple[str, Client]) -> None:
    name, client = raw
    proxies.add(name, "Hold", direction="response", after=4, seconds=0.3)
    sent = time.monotonic()
    assert client.query(b"one") == b"one"
    assert time.monotonic() - sent >= 0.3


def test_raw_drop_loses_the_response(proxies: FaultProxies, broker: Broker, raw: tuple[str, Client]) -> None:
    name, client = raw
    proxies.add(name, "Drop", direction="response", everything=True, seconds=0.2)
    assert client.query(b"one") == b""
    assert broker.received == request(b"one")


def test_raw_proxy_refuses_connections_for_a_time(proxies: FaultProxies, raw: tuple[str, Client]) -> None:
    name, client = raw
    address = client.socket.getpeername()

    def accepted() -> bool:
        with Client(address) as another:
            return another.query(b"back") == b"back"

    proxies.refuse(name, 600)
    assert client.is_closed
    assert not accepted()
    proxies.refuse(name, 0.2)
    until(accepted, "connections to be accepted again")
    assert proxies.hits()["refuse"] >= 2


def test_failed_order_is_reported(proxies: FaultProxies) -> None:
    with pytest.raises(OSError, match="KeyError"):
        proxies.refuse("unknown", 1)
