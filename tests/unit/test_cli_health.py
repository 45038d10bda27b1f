"""`fencepost health`, for a container's health check."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from fencepost_proxy.cli.main import main
from fencepost_proxy.config import ListenTls
from fencepost_proxy.errors import Reason
from fencepost_proxy.observability.status import StatusSnapshot
from fencepost_proxy.transport.certificates import Certificates
from tests.support.certificates import Authority
from tests.support.ports import free_port
from tests.support.status import status_page

SERVING = StatusSnapshot("1", 1.0, "cluster", None)


@pytest.mark.parametrize(
    ("not_ready", "code", "reported"),
    [
        ((), 0, "ready\n"),
        (("waiting for Kafka",), 1, "not ready\nwaiting for Kafka\n"),
        (("a\x1b[31m",), 1, "not ready\na\\x1b[31m\n"),
    ],
    ids=["ready", "waiting", "terminal commands"],
)
def test_exit_code_says_whether_clients_are_served(
    capsys: pytest.CaptureFixture[str], not_ready: tuple[str, ...], code: int, reported: str
) -> None:
    with status_page(replace(SERVING, not_ready=tuple(Reason(each, "") for each in not_ready)), {}) as address:
        assert main(["health", "--status", str(address)]) == code
        assert capsys.readouterr().out == reported
        assert main(["health", "--live", "--status", str(address)]) == 0


def test_proxy_with_tls_is_queried_by_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate = Authority(tmp_path).sign("proxy", names="DNS:kafka.example.com")
    tls = Certificates(ListenTls(certificate.certificate, certificate.key), None).status_context
    with status_page(SERVING, {}, tls=tls) as address:
        assert main(["health", "--status", f"https://{address}"]) == 0
        assert main(["health", "--status", str(address)]) == 1
    assert f"no response from http://{address}/readyz: " in capsys.readouterr().err


def test_unreachable_proxy_is_unhealthy_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(["health", "--status", f"127.0.0.1:{port}"]) == 1
    assert capsys.readouterr().err.startswith(f"fencepost health: no response from http://127.0.0.1:{port}/readyz: ")


def test_other_server_cannot_inject_terminal_commands(capsys: pytest.CaptureFixture[str]) -> None:
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
