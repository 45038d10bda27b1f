"""Tells systemd what the process does, where it runs as a unit of `Type=notify` (sd_notify(3))."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """`READY=1`, `STOPPING=1`, `STATUS=…`. Without a service manager that listens, nothing happens."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    # A name that begins with @ is one of Linux's own, without a file.
    name = "\0" + path[1:] if path[0] == "@" else path
    # It is only told: whoever does not listen is no reason not to serve.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
        manager.setblocking(False)
        manager.sendto(state.encode(), name)
