"""A pipe applies a fault at the given byte, and only to one connection."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.kit.waiting import until
from tests.soak.pipe import Fault, PipeProcess
from tests.support.ports import free_port


@pytest.fixture(scope="module")
def pipes() -> Iterator[PipeProcess]:
    with PipeProcess() as process:
        yield process


class Echo:
    """Sends received data back, and keeps it."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        self.got = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    self.got += data
                    connection.sendall(data)
            except OSError:
                pass


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()


@pytest.fixture
def wire(pipes: PipeProcess, echo: Echo, request: pytest.FixtureRequest) -> Iterator[tuple[str, socket.socket]]:
    """The name of a pipe, and a used connection through it."""
    listen = ("127.0.0.1", free_port())
    name = request.node.name
    pipes.open(name, listen, echo.address)
    with socket.create_connection(listen, 60) as connection:
        connection.sendall(b"hello")
        assert received(connection, 5) == b"hello"
        yield name, connection


def received(connection: socket.socket, count: int) -> bytes:
    """Up to `count` bytes; fewer if the connection ends."""
    data = b""
    while len(data) < count:
        try:
            more = connection.recv(count - len(data))
        except ConnectionResetError:
            break
        if not more:
            break
        data += more
    return data


@pytest.mark.parametrize("reset", [False, True])
def test_cut_relays_the_bytes_before_it(
    reset: bool, pipes: PipeProcess, echo: Echo, wire: tuple[str, socket.socket]
) -> None:
    name, connection = wire
    pipes.arm(name, Fault("cut", "up", 3, reset=reset))
    connection.sendall(b"0123456789")
    received(connection, 10)
    until(lambda: echo.got == b"hello012", "three bytes and no more")


def test_a_cut_of_answers_leaves_the_request_whole(
    pipes: PipeProcess, echo: Echo, wire: tuple[str, socket.socket]
) -> None:
    name, connection = wire
    pipes.arm(name, Fault("cut", "down", 4))
    connection.sendall(b"0123456789")
    assert received(connection, 10) == b"0123"
    assert echo.got == b"hello0123456789"


def test_a_stall_delays_and_loses_nothing(pipes: PipeProcess, wire: tuple[str, socket.socket]) -> None:
    name, connection = wire
    pipes.arm(name, Fault("stall", "down", 4, seconds=0.3))
    sent = time.monotonic()
    connection.sendall(b"0123456789")
    assert received(connection, 10) == b"0123456789"
    assert time.monotonic() - sent >= 0.3


def test_an_answer_that_is_lost(pipes: PipeProcess, echo: Echo, wire: tuple[str, socket.socket]) -> None:
    name, connection = wire
    pipes.arm(name, Fault("deaf", "down", 0, seconds=0.2))
    connection.sendall(b"0123456789")
    assert received(connection, 10) == b""
    until(lambda: echo.got == b"hello0123456789", "the whole request")


def test_refusing_pipe_closes_and_rejects_connections(pipes: PipeProcess, wire: tuple[str, socket.socket]) -> None:
    name, connection = wire
    address = connection.getpeername()

    def accepted() -> bool:
        try:
            with socket.create_connection(address, 60) as another:
                another.sendall(b"back")
                return received(another, 4) == b"back"
        except OSError:  # cut before it sent
            return False

    pipes.refuse(name, 600)
    assert received(connection, 1) == b""
    assert not accepted()

    pipes.refuse(name, 0.2)
    until(accepted, "connections to be accepted again")
    assert pipes.hits()["refuse"] >= 1
