"""`fencepost health`, for a container's health check."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fencepost_proxy.cli.main import main
from tests.support.ports import free_port


@contextmanager
def status_page(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, text = answers[self.path]
            self.send_response(code)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", free_port()), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_its_status_is_whether_clients_are_served(capsys: pytest.CaptureFixture[str]) -> None:
    with status_page({"/readyz": (200, "ready\n"), "/livez": (200, "alive\n")}) as address:
        assert main(["health", "--status", address]) == 0
    assert capsys.readouterr().out == "ready\n"


def test_proxy_waiting_for_kafka_is_live_not_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with status_page({"/readyz": (503, "waiting for Kafka\n"), "/livez": (200, "alive\n")}) as address:
        assert main(["health", "--status", address]) == 1
        assert capsys.readouterr().out == "waiting for Kafka\n"
        assert main(["health", "--live", "--status", address]) == 0


def test_unreachable_proxy_is_unhealthy_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["health", "--status", f"127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err.startswith(f"fencepost health: no response from http://127.0.0.1:{port}/readyz: ")


def test_responses_cannot_inject_terminal_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with status_page({"/readyz": (503, "topic \x1b[31m waits\nand more\n")}) as address:
        assert main(["health", "--status", address]) == 1
    assert capsys.readouterr().out == "topic \\x1b[31m waits\nand more\n"
    with socket.create_server(("127.0.0.1", free_port())) as other_server:
        thread = threading.Thread(target=_write, args=(other_server, b"\0\0\0\5hello\x1b[31m\n"))
        thread.start()
        assert main(["health", "--status", f"127.0.0.1:{other_server.getsockname()[1]}"]) == 1
        thread.join()
    reported = capsys.readouterr().err
    assert "no response from" in reported
    assert "\x1b" not in reported


def _write(server: socket.socket, words: bytes) -> None:
    client, _ = server.accept()
    with client:
        client.sendall(words)
