"""The datagrams to systemd at $NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from fencepost_proxy.cli.service_manager import notify


@pytest.mark.parametrize("abstract", [False, True])
def test_service_manager_is_notified(abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@fencepost-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", name)

        notify("READY=1\nSTATUS=serving")

        assert manager.recv(100) == b"READY=1\nSTATUS=serving"


@pytest.mark.parametrize("name", ["", "/no/such/socket", "vsock:2:1"])
def test_without_one_nothing_happens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    notify("READY=1")
